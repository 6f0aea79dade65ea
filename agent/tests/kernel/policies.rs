//! Traffic policies, source ranges, affinity, SCTP, NodePorts on localhost, and live changes of the configuration.

use pointsman_crds::node_config::NodeDetectLocal;
use pointsman_crds::settings::NodePortAddress;
use serde_json::{Value, json};

use crate::net::{Answer, CLIENT, Lab, NODE, POD_A, POD_B, REMOTE, address, ip, masqueraded};
use crate::world::{WAYS, Way, World, config};

const VIP: [&str; 2] = ["203.0.113.9", "2001:db8:9::9"];
const CLUSTER_IP: [&str; 2] = ["10.96.0.80", "fd00:10:96::50"];

fn spec(internal: &str, external: &str) -> Value {
    json!({
        "type": "LoadBalancer",
        "clusterIPs": CLUSTER_IP,
        "internalTrafficPolicy": internal,
        "externalTrafficPolicy": external,
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080},
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
        ],
        "status": {"loadBalancer": {"ingress": [{"ip": VIP[0]}, {"ip": VIP[1]}]}},
    })
}

fn from(name: &str, source: std::net::IpAddr) -> Answer {
    Answer::From(name.to_owned(), source)
}

#[test]
fn etp_1_to_8_and_itp_2_to_5_local_policies() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", spec("Cluster", "Local"));
        world.endpoints("web", &[POD_A, REMOTE]);
        world.settle();
        for v6 in [false, true] {
            let (vip, client, pod) = (ip(VIP[usize::from(v6)]), address(CLIENT, v6), address(POD_B, v6));
            for (to, port) in [(vip, 80), (address(NODE, v6), 30080)] {
                assert_eq!(lab.many(CLIENT, (to, port)), [from("a", client)], "{way}: local only, raw");
                assert_eq!(lab.many(POD_B, (to, port)), [from("a", pod), from("r", pod)], "short cut, raw");
                let masked = masqueraded(v6);
                assert_eq!(lab.many(NODE, (to, port)), [from("a", masked), from("r", masked)]);
            }
        }
        world.endpoints("web", &[REMOTE]);
        world.settle();
        assert_eq!(lab.udp(CLIENT, (ip(VIP[0]), 53)), Answer::Nothing, "dropped, not refused");
        assert_eq!(lab.udp(CLIENT, (address(NODE, false), 30053)), Answer::Nothing);
        assert_eq!(lab.tcp(POD_B, (ip(VIP[0]), 80)), from("r", address(POD_B, false)));
        world.service("web", spec("Local", "Cluster"));
        world.settle();
        assert_eq!(lab.udp(POD_B, (ip(CLUSTER_IP[0]), 53)), Answer::Nothing, "ITP-4");
        assert_eq!(lab.tcp(CLIENT, (ip(VIP[0]), 80)), from("r", masqueraded(false)));
        world.endpoints("web", &[POD_A, REMOTE]);
        world.settle();
        assert_eq!(lab.many(POD_B, (ip(CLUSTER_IP[0]), 80)), [from("a", address(POD_B, false))], "ITP-2");
        world.endpoints("web", &[]);
        world.settle();
        assert_eq!(lab.udp(POD_B, (ip(CLUSTER_IP[0]), 53)), Answer::Refused, "ITP-5");
    }
}

#[test]
fn sr_1_to_7_source_ranges() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        let mut ranged = spec("Cluster", "Cluster");
        ranged["loadBalancerSourceRanges"] = json!(["192.168.77.0/24", " fd00:77::/64"]);
        world.service("web", ranged.clone());
        world.endpoints("web", &[POD_A]);
        world.settle();
        for v6 in [false, true] {
            let vip = ip(VIP[usize::from(v6)]);
            assert_eq!(lab.tcp(CLIENT, (vip, 80)), from("a", masqueraded(v6)), "SR-1");
            assert_eq!(lab.udp(POD_B, (vip, 53)), Answer::Nothing, "SR-4");
            assert!(matches!(lab.tcp(NODE, (vip, 80)), Answer::From(..)), "SR-5");
            assert!(
                matches!(lab.tcp(POD_B, (ip(CLUSTER_IP[usize::from(v6)]), 80)), Answer::From(..)),
                "SR-7"
            );
        }
        ranged["loadBalancerSourceRanges"] = json!(["198.51.100.0/24"]);
        world.service("web", ranged);
        world.settle();
        assert_eq!(lab.udp(CLIENT, (ip(VIP[0]), 53)), Answer::Nothing, "SR-2");
        assert!(matches!(lab.tcp(CLIENT, (address(NODE, false), 30080)), Answer::From(..)), "SR-3");
        assert!(
            matches!(lab.tcp(CLIENT, (ip(VIP[1]), 80)), Answer::From(..)),
            "SR-11: no range of this family"
        );
        world.service("web", spec("Cluster", "Cluster"));
        world.settle();
        assert!(matches!(lab.tcp(CLIENT, (ip(VIP[0]), 80)), Answer::From(..)), "SR-10");
    }
}

#[test]
fn aff_1_4_5_a_client_stays_with_its_endpoint() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        let mut sticky = spec("Cluster", "Cluster");
        sticky["sessionAffinity"] = json!("ClientIP");
        world.service("web", sticky);
        world.endpoints("web", &[POD_A, REMOTE]);
        world.settle();
        for v6 in [false, true] {
            let (cluster_ip, vip) = (ip(CLUSTER_IP[usize::from(v6)]), ip(VIP[usize::from(v6)]));
            let mut answers = lab.many(CLIENT, (cluster_ip, 80));
            answers.extend(lab.many(CLIENT, (vip, 80)));
            answers.extend(lab.many(CLIENT, (address(NODE, v6), 30080)));
            answers.dedup();
            assert_eq!(answers.len(), 1, "{way}: one endpoint at all frontends: {answers:?}");
        }
        for left in [POD_A, REMOTE] {
            world.endpoints("web", &[left]);
            world.settle();
            assert_eq!(
                lab.many(POD_B, (ip(CLUSTER_IP[0]), 80)),
                [from(left, address(POD_B, false))],
                "AFF-4"
            );
        }
    }
}

#[test]
fn np_4_5_6_node_ports_on_localhost_stay_out_of_reach_from_outside() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", spec("Cluster", "Cluster"));
        world.endpoints("web", &[POD_A]);
        world.settle();
        assert_eq!(lab.tcp(NODE, (ip("127.0.0.1"), 30080)), Answer::Refused, "off unless asked for");
        lab.run(NODE, || std::fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1").unwrap());
        let mut config = config();
        config.iptables.localhost_node_ports = true;
        config.node_port_addresses =
            ["primary", "localhost"].map(|word| NodePortAddress(word.into())).to_vec();
        world.configure(config);
        world.settle();
        assert_eq!(lab.tcp(NODE, (ip("127.0.0.1"), 30080)), from("a", masqueraded(false)));
        assert!(matches!(lab.tcp(CLIENT, (address(NODE, false), 30080)), Answer::From(..)));
        // Something listens on the node's localhost; a neighbour sends packets for 127.0.0.1 to the node.
        lab.serve(NODE, 9999);
        lab.run(CLIENT, || std::fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1").unwrap());
        crate::net::shell(&format!(
            "ip -n {0} route del local 127.0.0.0/8 dev lo table local; ip -n {0} route del local 127.0.0.1 dev lo table local;
             ip -n {0} route add 127.0.0.1/32 via 192.168.77.1 dev eth0 src 192.168.77.2",
            lab.namespace(CLIENT)
        ));
        assert_eq!(lab.udp(CLIENT, (ip("127.0.0.1"), 9999)), Answer::Nothing, "NP-6");
        if let Way::Iptables(flavour) = way {
            let saved = lab.node(&format!("iptables-{flavour}-save -t filter"));
            assert!(saved.contains("block incoming localnet"));
        }
    }
}

#[test]
fn np_3_and_mq_every_setting_is_changed_live() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service("web", spec("Cluster", "Cluster"));
        world.endpoints("web", &[POD_A]);
        world.settle();
        let second = masqueraded(false);
        assert_eq!(lab.tcp(CLIENT, (second, 30080)), Answer::Refused);
        let mut next = config();
        next.node_port_addresses = vec![NodePortAddress("all".into())];
        world.configure(next.clone());
        world.settle();
        assert!(matches!(lab.tcp(CLIENT, (second, 30080)), Answer::From(..)));
        let cluster_ip = (ip(CLUSTER_IP[0]), 80);
        assert_eq!(lab.tcp(POD_B, cluster_ip), from("a", address(POD_B, false)));
        next.masquerade.all = true;
        world.configure(next.clone());
        world.settle();
        assert_eq!(lab.tcp(POD_B, cluster_ip), from("a", masqueraded(false)), "masqueradeAll");
        next.masquerade.all = false;
        let cidrs = ["10.244.0.0/28", "10.244.1.0/24", "192.168.77.0/24"];
        for detect in [
            NodeDetectLocal::ClusterCIDR { cluster_cidrs: cidrs.map(|net| net.parse().unwrap()).to_vec() },
            NodeDetectLocal::InterfaceNamePrefix { interface_name_prefix: "pod".into() },
            NodeDetectLocal::BridgeInterface { bridge_interface: "podB".into() },
            NodeDetectLocal::NodeCIDR {},
        ] {
            next.detect_local = detect.clone();
            world.configure(next.clone());
            world.settle();
            assert_eq!(lab.tcp(POD_B, cluster_ip), from("a", address(POD_B, false)), "{detect:?}");
            let outside = if matches!(detect, NodeDetectLocal::ClusterCIDR { .. }) {
                address(CLIENT, false)
            } else {
                masqueraded(false)
            };
            assert_eq!(lab.tcp(CLIENT, cluster_ip), from("a", outside), "{detect:?}");
        }
        let synced = world.settle();
        assert_eq!(synced.written.values().sum::<usize>(), 0, "nothing to do, nothing written");
    }
}
