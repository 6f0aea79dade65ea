//! ClusterIP, NodePort, external IP and load balancer, with every client.

use serde_json::json;

use crate::net::{Answer, CLIENT, Lab, NODE, POD_A, POD_B, REMOTE, address, ip, masqueraded};
use crate::world::{WAYS, Way, World};

fn web(v6: bool) -> std::net::IpAddr {
    ip(if v6 { "fd00:10:96::50" } else { "10.96.0.80" })
}

fn web_spec() -> serde_json::Value {
    json!({
        "type": "LoadBalancer",
        "clusterIPs": ["10.96.0.80", "fd00:10:96::50"],
        "externalIPs": ["198.51.100.7", "2001:db8:7::7"],
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080},
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
        ],
        "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.9"}, {"ip": "2001:db8:9::9"}]}},
    })
}

fn from(name: &str, source: std::net::IpAddr) -> Answer {
    Answer::From(name.to_owned(), source)
}

#[test]
fn mq_s1_every_client_reaches_every_endpoint_at_every_frontend() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", web_spec());
        world.endpoints("web", &[POD_A, REMOTE]);
        assert!(world.settle().full);
        for v6 in [false, true] {
            let masked = masqueraded(v6);
            let pod = address(POD_B, v6);
            // Pod to ClusterIP: raw. Node and outside to ClusterIP: masqueraded.
            assert_eq!(lab.many(POD_B, (web(v6), 80)), [from("a", pod), from("r", pod)], "{way}");
            assert_eq!(lab.many(NODE, (web(v6), 80)), [from("a", masked), from("r", masked)], "{way}");
            assert_eq!(lab.many(CLIENT, (web(v6), 80)), [from("a", masked), from("r", masked)]);
            let external = ip(if v6 { "2001:db8:7::7" } else { "198.51.100.7" });
            let balanced = ip(if v6 { "2001:db8:9::9" } else { "203.0.113.9" });
            for (to, port) in [(address(NODE, v6), 30080), (external, 80), (balanced, 80)] {
                for client in [CLIENT, POD_B, NODE] {
                    let answers = lab.many(client, (to, port));
                    assert_eq!(answers, [from("a", masked), from("r", masked)], "{way} {client} to {to}");
                }
            }
            assert!(matches!(lab.udp(CLIENT, (web(v6), 53)), Answer::From(..)));
            assert!(matches!(lab.udp(POD_B, (address(NODE, v6), 30053)), Answer::From(..)));
            // NodePorts answer at the primary address only.
            assert_eq!(lab.tcp(CLIENT, (masked, 30080)), Answer::Refused);
        }
    }
}

#[test]
fn cip_6_7_a_port_that_a_cluster_ip_does_not_have_is_refused() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", web_spec());
        world.endpoints("web", &[POD_A]);
        world.settle();
        for v6 in [false, true] {
            for client in [CLIENT, POD_B] {
                assert_eq!(lab.udp(client, (web(v6), 80)), Answer::Refused, "{way} UDP to a TCP port");
                assert_eq!(lab.udp(client, (web(v6), 99)), Answer::Refused);
            }
        }
        let stranger = lab.udp(CLIENT, (ip("10.96.0.81"), 80));
        assert_eq!(stranger, Answer::Nothing, "CIP-8: an address of no Service is routed");
    }
}

#[test]
fn cip_2_an_endpoint_reaches_itself() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", web_spec());
        world.endpoints("web", &[POD_A]);
        world.settle();
        for v6 in [false, true] {
            assert_eq!(lab.tcp(POD_A, (web(v6), 80)), from("a", masqueraded(v6)));
        }
    }
}

#[test]
fn noe_1_without_endpoints_everybody_is_refused_at_once() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", web_spec());
        world.settle();
        for v6 in [false, true] {
            let external = ip(if v6 { "2001:db8:7::7" } else { "198.51.100.7" });
            let balanced = ip(if v6 { "2001:db8:9::9" } else { "203.0.113.9" });
            assert_eq!(lab.tcp(CLIENT, (web(v6), 80)), Answer::Refused);
            assert_eq!(lab.tcp(NODE, (external, 80)), Answer::Refused);
            for client in [CLIENT, POD_B] {
                for (to, port) in [(web(v6), 53), (address(NODE, v6), 30053), (external, 53), (balanced, 53)]
                {
                    assert_eq!(lab.udp(client, (to, port)), Answer::Refused, "{way} {client} to {to}");
                }
            }
        }
        // Endpoints come and go: one incremental write each.
        world.endpoints("web", &[POD_A]);
        assert!(!world.settle().full);
        assert!(matches!(lab.tcp(CLIENT, (web(false), 80)), Answer::From(..)));
        world.endpoints("web", &[]);
        world.settle();
        assert_eq!(lab.tcp(CLIENT, (web(false), 80)), Answer::Refused);
        world.delete_service("web");
        let synced = world.settle();
        assert_eq!(lab.tcp(CLIENT, (web(false), 80)), Answer::Nothing);
        if way != Way::Nftables {
            assert_eq!(synced.written[&(crate::world::FAMILIES[0], "nat")], 0);
        }
    }
}
