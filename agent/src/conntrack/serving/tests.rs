//! The rule of [`stale`], by the ids of the reference.

use super::super::wire::{STATUS_ASSURED, STATUS_SEEN_REPLY, Tuple, Zone};
use super::*;

const CLIENT: &str = "10.244.9.9:40000";
const CLUSTER_IP: &str = "10.96.0.10:53";
const EXTERNAL_IP: &str = "203.0.113.7:53";
const VIP: &str = "192.0.2.80:53";
const NODE: &str = "192.168.1.5:30053";
const SERVING: &str = "10.244.1.7:5353";
const NOT_SERVING: &str = "10.244.1.8:5353";
const DELETED: &str = "10.244.1.9:5353";
const FRONTENDS: [&str; 3] = [CLUSTER_IP, EXTERNAL_IP, VIP];
const SYN_SENT: u8 = 1;
const ESTABLISHED: u8 = 3;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn entry(protocol: Protocol, destination: &str, endpoint: &str) -> Entry {
    Entry {
        protocol,
        original: Tuple { source: address(CLIENT), destination: address(destination) },
        reply: Tuple { source: address(endpoint), destination: address(CLIENT) },
        status: STATUS_SEEN_REPLY | STATUS_ASSURED,
        tcp_state: (protocol == Protocol::Tcp).then_some(ESTABLISHED),
        zone: None,
        id: Some(1),
    }
}

fn port_of(destination: &str, port: u16) -> String {
    SocketAddr::new(address(destination).ip(), port).to_string()
}

/// A service with all kinds of frontends in every protocol, which leads to these endpoints.
fn service(endpoints: &[&str]) -> Serving {
    let endpoints = Endpoints::new(endpoints.iter().map(|endpoint| address(endpoint)));
    let mut serving = Serving::default();
    for protocol in Protocol::ALL {
        for frontend in FRONTENDS {
            serving.frontends.insert(Frontend::new(address(frontend), protocol), endpoints.clone());
        }
        serving.node_ports.insert(NodePort::new(30053, protocol), endpoints.clone());
    }
    serving
}

#[test]
fn ct_1_only_datagram_entries_of_service_ports_to_endpoints_that_do_not_serve_go() {
    let serving = service(&[SERVING]);
    let mut cases = 0;
    for protocol in Protocol::ALL {
        for endpoint in [SERVING, NOT_SERVING, DELETED] {
            for frontend in FRONTENDS.into_iter().chain([NODE]) {
                for own_port in [true, false] {
                    let destination = if own_port { frontend.to_owned() } else { port_of(frontend, 54) };
                    let expected = protocol != Protocol::Tcp && endpoint != SERVING && own_port;
                    let entry = entry(protocol, &destination, endpoint);
                    assert_eq!(stale(&entry, &serving), expected, "{entry:?}");
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 72);
}

#[test]
fn ct_1_a_protocol_does_not_answer_for_another() {
    let mut serving = Serving::default();
    serving.frontends.insert(Frontend::new(address(CLUSTER_IP), Protocol::Sctp), Endpoints::default());
    assert!(!stale(&entry(Protocol::Udp, CLUSTER_IP, DELETED), &serving));
    assert!(stale(&entry(Protocol::Sctp, CLUSTER_IP, DELETED), &serving));
}

#[test]
fn ct_2_entries_to_the_old_target_port_go() {
    let serving = service(&["10.244.1.7:5354"]);
    for frontend in FRONTENDS.into_iter().chain([NODE]) {
        assert!(stale(&entry(Protocol::Udp, frontend, "10.244.1.7:5353"), &serving), "{frontend}");
        assert!(!stale(&entry(Protocol::Udp, frontend, "10.244.1.7:5354"), &serving), "{frontend}");
    }
}

#[test]
fn ct_3_entries_that_were_never_translated_go_at_service_ports_only() {
    let serving = service(&[SERVING]);
    for frontend in FRONTENDS.into_iter().chain([NODE]) {
        assert!(stale(&entry(Protocol::Udp, frontend, frontend), &serving), "{frontend}");
        let other = port_of(frontend, 54);
        assert!(!stale(&entry(Protocol::Udp, &other, &other), &serving), "{other}");
    }
}

#[test]
fn ct_4_without_serving_endpoints_frontends_are_cleaned_and_node_ports_are_kept() {
    let serving = service(&[]);
    for endpoint in [SERVING, NOT_SERVING, DELETED] {
        for frontend in FRONTENDS {
            assert!(stale(&entry(Protocol::Udp, frontend, endpoint), &serving), "{frontend} {endpoint}");
        }
        assert!(!stale(&entry(Protocol::Udp, NODE, endpoint), &serving), "{endpoint}");
    }
    assert!(stale(&entry(Protocol::Udp, VIP, VIP), &serving), "never translated");
    assert!(!stale(&entry(Protocol::Udp, NODE, NODE), &serving), "never translated");
}

#[test]
fn ct_6_frontends_that_are_gone_lose_every_entry() {
    let mut serving = Serving::default();
    serving.removed_frontends.insert(Frontend::new(address(CLUSTER_IP), Protocol::Udp));
    serving.removed_node_ports.insert(NodePort::new(30053, Protocol::Udp));
    for (destination, endpoint, expected) in [
        (CLUSTER_IP, SERVING, true),
        (CLUSTER_IP, CLUSTER_IP, true),
        (VIP, SERVING, false),
        (NODE, SERVING, true),
        // Nothing was translated, so nothing leads to a pod; the port may be some other program's by now.
        (NODE, NODE, false),
        ("192.168.1.5:30054", SERVING, false),
    ] {
        let stale = stale(&entry(Protocol::Udp, destination, endpoint), &serving);
        assert_eq!(stale, expected, "{destination} {endpoint}");
    }
    assert!(!stale(&entry(Protocol::Sctp, CLUSTER_IP, SERVING), &serving));
    assert!(!stale(&entry(Protocol::Tcp, CLUSTER_IP, SERVING), &serving), "established");
}

#[test]
fn ct_6_a_frontend_that_came_back_is_judged_by_its_endpoints() {
    let mut serving = service(&[SERVING]);
    serving.removed_frontends.insert(Frontend::new(address(CLUSTER_IP), Protocol::Udp));
    assert!(!stale(&entry(Protocol::Udp, CLUSTER_IP, SERVING), &serving));
}

#[test]
fn tcp_goes_only_before_anybody_has_answered() {
    let serving = service(&[SERVING]);
    let syn = Entry { status: 0, tcp_state: Some(SYN_SENT), ..entry(Protocol::Tcp, CLUSTER_IP, DELETED) };
    assert!(stale(&syn, &serving));
    let cases = [
        Entry { reply: Tuple { source: address(SERVING), ..syn.reply }, ..syn },
        Entry { status: STATUS_SEEN_REPLY, ..syn },
        Entry { status: STATUS_ASSURED, ..syn },
        Entry { tcp_state: None, ..syn },
    ];
    for kept in cases {
        assert!(!stale(&kept, &serving), "{kept:?}");
    }
    for state in (0..=u8::MAX).filter(|state| *state != SYN_SENT) {
        assert!(!stale(&Entry { tcp_state: Some(state), ..syn }, &serving), "state {state}");
    }
}

#[test]
fn with_known_addresses_a_node_port_is_more_than_a_port() {
    let mut serving = service(&[SERVING]);
    serving.node_addresses = Some(HashSet::from([address(NODE).ip()]));
    // A flow of this node to another host's service on the same port.
    let foreign = "198.51.100.1:30053";
    assert!(!stale(&entry(Protocol::Udp, foreign, foreign), &serving));
    assert!(stale(&entry(Protocol::Udp, NODE, NODE), &serving));
    assert!(stale(&entry(Protocol::Udp, "127.0.0.1:30053", DELETED), &serving));
    serving.node_addresses = None;
    assert!(stale(&entry(Protocol::Udp, foreign, foreign), &serving));
    // Scaled to zero: what was translated was ours, and goes (k/k#139628).
    let mut none_left = service(&[]);
    none_left.node_addresses = Some(HashSet::from([address(NODE).ip()]));
    assert!(stale(&entry(Protocol::Udp, NODE, DELETED), &none_left));
    assert!(!stale(&entry(Protocol::Udp, NODE, NODE), &none_left), "a listener of the node");
    assert!(!stale(&entry(Protocol::Udp, foreign, DELETED), &none_left));
    assert!(!stale(&entry(Protocol::Tcp, NODE, DELETED), &none_left));
}

#[test]
fn in_other_zones_only_translated_entries_go() {
    let serving = service(&[SERVING]);
    for zone in [Zone::Entry(5), Zone::Original(5)] {
        let in_zone = |endpoint| Entry { zone: Some(zone), ..entry(Protocol::Udp, CLUSTER_IP, endpoint) };
        assert!(!stale(&in_zone(CLUSTER_IP), &serving));
        assert!(!stale(&in_zone(SERVING), &serving));
        assert!(stale(&in_zone(DELETED), &serving));
    }
}

#[test]
fn ipv6_is_the_same() {
    let frontend = "[fd00:96::a]:53";
    let mut serving = Serving::default();
    let endpoints = Endpoints::new([address("[fd00:244::7]:53")]);
    serving.frontends.insert(Frontend::new(address(frontend), Protocol::Udp), endpoints);
    assert!(!stale(&entry(Protocol::Udp, frontend, "[fd00:244::7]:53"), &serving));
    assert!(stale(&entry(Protocol::Udp, frontend, "[fd00:244::8]:53"), &serving));
    assert!(stale(&entry(Protocol::Udp, frontend, frontend), &serving));
}

#[test]
fn endpoints_are_a_set() {
    let set = Endpoints::new([address(SERVING), address(DELETED), address(SERVING)]);
    assert_eq!(set, Endpoints::new([address(DELETED), address(SERVING)]));
    assert!(Endpoints::new([address(SERVING)]).is_subset(&set));
    assert!(!set.is_subset(&Endpoints::new([address(SERVING)])));
    assert!(Endpoints::default().is_empty() && Endpoints::default().is_subset(&set));
}

#[test]
fn what_a_state_concerns() {
    assert!(!Serving::default().concerns(Protocol::Udp));
    assert!(service(&[]).concerns(Protocol::Sctp));
    let mut serving = Serving::default();
    serving.removed_node_ports.insert(NodePort::new(1, Protocol::Udp));
    assert!(serving.concerns(Protocol::Udp) && !serving.concerns(Protocol::Sctp));
}
