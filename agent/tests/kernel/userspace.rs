//! Mode userspace: the same frontends and policies, by a proxy. Endpoints see the node's address.

use std::net::UdpSocket;
use std::time::Duration;

use pointsman_crds::settings::NodePortAddress;
use serde_json::{Value, json};

use crate::support::lab::{Lab, address, ip, masqueraded};
use crate::support::traffic::Answer;
use crate::support::world::{Way, World, config};

const VIP: [&str; 2] = ["203.0.113.9", "2001:db8:9::9"];
const EXTERNAL: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];
const CLUSTER_IP: [&str; 2] = ["172.30.0.80", "fd00:ac:1e::50"];

fn spec(internal: &str, external: &str) -> Value {
    json!({
        "type": "LoadBalancer",
        "clusterIPs": CLUSTER_IP,
        "externalIPs": EXTERNAL,
        "internalTrafficPolicy": internal,
        "externalTrafficPolicy": external,
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080},
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
        ],
        "status": {"loadBalancer": {"ingress": [{"ip": VIP[0]}, {"ip": VIP[1]}]}},
    })
}

/// Who has answered; the source is the node's in any case.
fn names(answers: &[Answer], v6: bool) -> Vec<String> {
    let name = |answer: &Answer| match answer {
        Answer::From(name, source) => {
            assert_eq!(*source, masqueraded(v6));
            name.clone()
        }
        other => format!("{other:?}"),
    };
    answers.iter().map(name).collect()
}

fn world(lab: &Lab, spec: Value, pods: &[&str]) -> World {
    let mut world = World::new(lab, Way::Userspace);
    world.service("web", spec);
    world.endpoints("web", pods);
    assert!(world.settle().full);
    world
}

#[test]
fn np_3_node_ports_follow_the_configuration() {
    let Some(lab) = Lab::new() else { return };
    let mut world = world(&lab, spec("Cluster", "Cluster"), &["a"]);
    let (second, listed) = ((masqueraded(false), 30080), (address("node", false), 30080));
    assert_eq!(lab.tcp("client", second), Answer::Refused);
    let mut next = config();
    next.node_port_addresses = vec![NodePortAddress("all".into())];
    world.configure(next);
    world.settle();
    assert_eq!(names(&[lab.tcp("client", second), lab.tcp("client", listed)], false), ["a", "a"]);
}

#[test]
fn a_listener_of_the_proxy_serves_nobody_who_was_not_led_there() {
    let Some(lab) = Lab::new() else { return };
    let _world = world(&lab, spec("Cluster", "Cluster"), &["a"]);
    let listed = lab.node("nft list set ip pointsman-userspace listeners");
    let mut found = 0;
    for part in listed.split("192.168.0.2 . ").skip(1) {
        let mut words = part.split([' ', '.', ',']).filter(|word| !word.is_empty());
        let (protocol, number) = (words.next().unwrap(), words.next().unwrap());
        let to = (address("node", false), number.parse().unwrap());
        let answer = if protocol == "tcp" { lab.tcp("client", to) } else { lab.udp("client", to) };
        assert_eq!(answer, Answer::Refused, "{protocol} {number}");
        found += 1;
    }
    assert_eq!(found, 3, "{listed}");
}

#[test]
fn ct_1_a_udp_flow_keeps_its_endpoint_and_leaves_one_that_is_gone() {
    let Some(lab) = Lab::new() else { return };
    let mut world = world(&lab, spec("Cluster", "Cluster"), &["a"]);
    let socket = lab.run("client", || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((ip(CLUSTER_IP[0]), 53)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
        socket
    });
    let ask = || {
        let mut buffer = [0; 64];
        socket.send(b"?").unwrap();
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).split(' ').next().unwrap().to_owned()
    };
    assert_eq!(ask(), "a");
    world.endpoints("web", &["a", "b", "r"]);
    world.settle();
    assert_eq!([ask(), ask(), ask()], ["a", "a", "a"]);
    world.endpoints("web", &["r"]);
    world.settle();
    assert_eq!([ask(), ask(), ask()], ["r", "r", "r"]);
}

#[test]
fn syn_10_what_others_have_changed_is_found_and_repaired() {
    let Some(lab) = Lab::new() else { return };
    let mut world = world(&lab, spec("Cluster", "Local"), &["a"]);
    for damage in [
        "flush chain ip pointsman-userspace nat-prerouting",
        "flush map ip6 pointsman-userspace frontends",
        "delete table ip pointsman-userspace",
    ] {
        lab.node(&format!("nft {damage}"));
        assert_ne!(world.differences(), Vec::<String>::new(), "{damage}");
        world.repair();
        assert_eq!(world.differences(), Vec::<String>::new(), "{damage}");
        for v6 in [false, true] {
            assert_eq!(names(&[lab.tcp("client", (ip(CLUSTER_IP[usize::from(v6)]), 80))], v6), ["a"]);
        }
    }
}
