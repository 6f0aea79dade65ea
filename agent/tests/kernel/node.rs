//! What concerns the whole node: flows of Services that are gone, NodePorts on localhost, health check ports.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pointsman_agent::conntrack::{self, Reconciler};
use pointsman_agent::sysctl::{Machine, Settings, Sysctls};
use pointsman_crds::node_config::NodeConntrack;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::NodePortAddress;

use crate::lifecycle::{BOTH, loaded};
use crate::support::lab::{Lab, address};
use crate::support::traffic::Answer;
use crate::support::world::{World, config};

#[test]
fn ct_6_a_udp_service_that_was_deleted_while_no_agent_ran_loses_its_flows() {
    for flavour in BOTH {
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
        let mut world = loaded(&lab, flavour);
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
        let mut same = loaded(&lab, flavour);
        with_dns(&mut same);
        assert_eq!(same.settle().served.len(), 4);
        let mut successor = loaded(&lab, flavour);
        let served = successor.settle().served;
        assert_eq!(served.len(), 4, "ClusterIP and node port, in both families: {served:?}");
        assert!(ask(), "the kernel goes on translating it");
        let deleted = lab.run("node", move || {
            let mut reconciler = Reconciler::new(IpFamily::IPv4);
            for (_, target) in served.into_iter().filter(|(family, _)| *family == IpFamily::IPv4) {
                reconciler.remove(target);
            }
            conntrack::run(&reconciler.begin().unwrap()).unwrap().deleted
        });
        assert_eq!(deleted, 1);
        assert!(!ask());
    }
}

// ids: NP-4 NP-5
#[test]
fn np_4_5_6_localhost_is_switched_live_and_its_guard_is_looked_after() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = loaded(&lab, flavour);
        world.settle();
        let localhost = (crate::support::lab::ip("127.0.0.1"), 30080);
        let sysctls = Arc::new(Mutex::new(Sysctls::new(Path::new("/proc/sys"))));
        // As the sync loop does, after each write that succeeded.
        let adjust = |world: &World| {
            let route_localnet = world.plan.node(IpFamily::IPv4).unwrap().node_ports.localhost;
            let nothing = NodeConntrack {
                max_per_core: 0,
                min: 0,
                tcp_be_liberal: false,
                tcp_established_timeout_seconds: 0,
                tcp_close_wait_timeout_seconds: 0,
                udp_timeout_seconds: 0,
                udp_stream_timeout_seconds: 0,
            };
            let sysctls = Arc::clone(&sysctls);
            let settings = Settings { conntrack: nothing, route_localnet, ipvs: None };
            lab.run("node", move || {
                assert_eq!(
                    sysctls.lock().unwrap().reconcile(&settings, Machine { cpus: 2, kernel: (6, 1) }).failed,
                    []
                );
                std::fs::read_to_string("/proc/sys/net/ipv4/conf/all/route_localnet").unwrap()
            })
        };
        let mut on = config();
        on.iptables.localhost_node_ports = true;
        on.node_port_addresses = vec![NodePortAddress("all".into())];
        world.configure(on);
        world.settle();
        assert_eq!(adjust(&world), "1\n");
        assert!(matches!(lab.tcp("node", localhost), Answer::From(..)));
        for (done, expected) in [
            (format!("iptables-{flavour} -F KUBE-FIREWALL"), "missing: ! -s 127.0.0.0/8"),
            (
                format!("iptables-{flavour} -D INPUT -j KUBE-FIREWALL"),
                "chain INPUT: missing: -j KUBE-FIREWALL",
            ),
        ] {
            lab.node(&done);
            let found = world.differences();
            assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
            world.repair();
        }
        // kubelet has the same chain; a restart adds nothing to it.
        let rules =
            |lab: &Lab| lab.node(&format!("iptables-{flavour}-save")).matches("KUBE-FIREWALL").count();
        let before = rules(&lab);
        let mut config = world.plan.config().clone();
        let mut again = loaded(&lab, flavour);
        again.configure(config.clone());
        assert_eq!(again.settle().written.values().sum::<usize>(), 0);
        assert_eq!(rules(&lab), before);
        config.iptables.localhost_node_ports = false;
        world.configure(config);
        world.settle();
        assert_eq!(adjust(&world), "0\n");
        assert_eq!(lab.tcp("node", localhost), Answer::Refused);
        assert!(matches!(lab.tcp("client", (address("node", false), 30080)), Answer::From(..)));
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
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, flavour);
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
        assert_eq!(own, Err(ErrorKind::PermissionDenied), "in OUTPUT");
        // A load balancer that puts its address onto the node.
        lab.node("ip addr add 198.51.100.1/32 dev lo");
        assert!(dropped("client"), "in INPUT");
        let firewall = lab.node(&format!("iptables-{flavour} -S KUBE-PROXY-FIREWALL"));
        assert_eq!(firewall.matches("-j DROP").count(), 2, "one a port: {firewall}");
        world.delete_service("web");
        world.settle();
        let firewall = lab.node(&format!("iptables-{flavour} -S KUBE-PROXY-FIREWALL"));
        assert_eq!(firewall.lines().count(), 1, "{firewall}");
    }
}
