//! What concerns the whole node: flows of Services that are gone, health check ports.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use pointsman_agent::conntrack::{self, Reconciler};
use pointsman_crds::proxy_node_status::IpFamily;

use crate::lifecycle::{BOTH, loaded};
use crate::support::lab::{Lab, address};
use crate::support::traffic::Answer;
use crate::support::world::{IN_KERNEL, Way, World};

#[test]
fn ct_6_a_udp_service_that_was_deleted_while_no_agent_ran_loses_its_flows() {
    for way in IN_KERNEL {
        let Some(lab) = Lab::new() else { return };
        let with_dns = |world: &mut World| {
            world.service(
                "dns",
                serde_json::json!({
                    "type": "NodePort",
                    "clusterIPs": ["172.30.0.10", "fd00:ac:1e::a"],
                    "ports": [{"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053}],
                }),
            );
            world.endpoints("dns", &["a"]);
        };
        let mut world = loaded(&lab, way);
        with_dns(&mut world);
        world.settle();
        let node_port = SocketAddr::from((address("node", false), 30053));
        let client = lab.run("client", move || {
            let client = UdpSocket::bind("0.0.0.0:0").unwrap();
            client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            client.connect(node_port).unwrap();
            client
        });
        let ask = || {
            client.send(b"?").unwrap();
            client.recv(&mut [0; 64]).is_ok()
        };
        assert!(ask());
        // A restart finds the same frontends, and nothing to end.
        let mut same = loaded(&lab, way);
        with_dns(&mut same);
        assert_eq!(same.settle().served.len(), 4);
        let mut successor = loaded(&lab, way);
        let served = successor.settle().served;
        assert_eq!(served.len(), 4, "ClusterIP and node port, in both families, {way}: {served:?}");
        assert!(ask(), "the kernel goes on translating it");
        let deleted = lab.run("node", move || {
            let mut reconciler = Reconciler::new(IpFamily::IPv4);
            for (_, target) in served.into_iter().filter(|(family, _)| *family == IpFamily::IPv4) {
                reconciler.remove(target);
            }
            conntrack::run(&reconciler.begin().unwrap()).unwrap().deleted
        });
        assert_eq!(deleted, 1, "{way}");
        assert!(!ask());
    }
}

#[test]
fn hc_6_health_check_ports_pass_a_closed_firewall_while_their_service_is_there() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, flavour);
        for tool in ["iptables", "ip6tables"] {
            lab.node(&format!(
                "{tool}-{flavour} -P INPUT DROP; {tool}-{flavour} -A INPUT -i lo -j ACCEPT
                 {tool}-{flavour} -A INPUT -p {} -j ACCEPT",
                if tool == "iptables" { "icmp" } else { "ipv6-icmp" }
            ));
            lab.node(&format!("{tool}-{flavour} -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT"));
        }
        lab.serve_at("node", 30500);
        lab.serve_at("node", 30501);
        let asked = |lab: &Lab, port| [false, true].map(|v6| lab.tcp("client", (address("node", v6), port)));
        let closed = [Answer::Nothing, Answer::Nothing];
        assert_eq!(asked(&lab, 30500), closed);
        world.service(
            "web",
            serde_json::json!({
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 30500,
                "clusterIPs": ["172.30.0.80", "fd00:ac:1e::50"],
                "ports": [{"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080}],
                "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}},
            }),
        );
        world.settle();
        let open = |answers: &[Answer; 2]| answers.iter().all(|answer| matches!(answer, Answer::From(..)));
        assert!(open(&asked(&lab, 30500)), "without endpoints, too");
        assert_eq!(asked(&lab, 30501), closed);
        world.endpoints("web", &["a"]);
        world.settle();
        assert!(open(&asked(&lab, 30500)));
        world.delete_service("web");
        world.settle();
        assert_eq!(asked(&lab, 30500), closed);
    }
}

// ids: SR-2 CT-13
#[test]
fn sr_the_firewall_drops_new_connections_everywhere_and_leaves_established_ones() {
    for way in IN_KERNEL {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        let spec = |ranges: &[&str]| {
            serde_json::json!({
                "type": "LoadBalancer",
                "clusterIPs": ["172.30.0.80", "fd00:ac:1e::50"],
                "loadBalancerSourceRanges": ranges,
                "ports": [
                    {"name": "web", "protocol": "TCP", "port": 80},
                    {"name": "dns", "protocol": "UDP", "port": 53},
                ],
                "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}},
            })
        };
        world.service("web", spec(&["203.0.113.0/25"]));
        world.endpoints("web", &["a"]);
        world.settle();
        let vip = crate::support::lab::ip("198.51.100.1");
        let mut stream = lab.stream("client", (vip, 80));
        assert!(stream.answers());
        world.service("web", spec(&["198.51.100.0/24"]));
        world.settle();
        assert!(stream.answers(), "it was let in");
        let dropped = |from: &str| lab.udp(from, (vip, 53)) == Answer::Nothing;
        assert!(dropped("client"), "in FORWARD");
        let own = lab.run("node", move || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.send_to(b"?", (vip, 53)).map_err(|error| error.kind())
        });
        assert_eq!(own, Err(ErrorKind::PermissionDenied), "in OUTPUT, {way}");
        // A load balancer that puts its address onto the node.
        lab.node("ip addr add 198.51.100.1/32 dev lo");
        assert!(dropped("client"), "in INPUT");
        let Way::Iptables(flavour) = way else { continue };
        let firewall = lab.node(&format!("iptables-{flavour} -S KUBE-PROXY-FIREWALL"));
        assert_eq!(firewall.matches("-j DROP").count(), 2, "one a port: {firewall}");
        world.delete_service("web");
        world.settle();
        let firewall = lab.node(&format!("iptables-{flavour} -S KUBE-PROXY-FIREWALL"));
        assert_eq!(firewall.lines().count(), 1, "{firewall}");
    }
}
