//! NodePorts on localhost open 127.0.0.1 for the node itself, not for its neighbours.

use std::net::UdpSocket;

use pointsman_crds::settings::NodePortAddress;

use crate::support::lab::{Lab, NODE, shell};
use crate::support::traffic::IMPATIENT;
use crate::support::world::{IN_KERNEL, Way, World, config};

// ids: NP-5 NP-6 REG-92315
#[test]
fn what_listens_on_localhost_stays_out_of_reach_from_outside() {
    for way in IN_KERNEL {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        let mut config = config();
        config.node_port_addresses =
            ["primary", "localhost"].map(|word| NodePortAddress(word.into())).to_vec();
        world.configure(config.clone());
        world.settle();
        let guarded = || match way {
            Way::Iptables(flavour) => ["iptables", "ip6tables"].map(|tool| {
                lab.node(&format!("{tool}-{flavour}-save -t filter")).contains("block incoming localnet")
            }),
            Way::Nftables => ["ip", "ip6"].map(|family| {
                lab.node(&format!("nft list table {family} pointsman")).contains("127.0.0.0/8")
            }),
            Way::Userspace => [false, false],
        };
        assert_eq!(guarded(), [false, false], "{way}: off unless asked for");

        // Something listens on the node's localhost; a neighbour sends packets for 127.0.0.1 to the node.
        let secret = lab.run(NODE, || UdpSocket::bind("127.0.0.1:9999").unwrap());
        secret.set_read_timeout(Some(IMPATIENT)).unwrap();
        for namespace in [NODE, "client"] {
            lab.run(namespace, || std::fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1").unwrap());
        }
        shell(&format!(
            "ip -n {0} route del local 127.0.0.0/8 dev lo table local; ip -n {0} route del local 127.0.0.1 dev lo table local;
             ip -n {0} route add 127.0.0.1/32 via 192.168.0.2 dev eth0 src 203.0.113.2",
            lab.namespace("client")
        ));
        let gets_in = || {
            lab.run("client", || {
                UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", "127.0.0.1:9999").unwrap()
            });
            secret.recv_from(&mut [0; 8]).is_ok()
        };
        assert!(gets_in(), "{way}: the way is open, were it not for the rule");
        config.iptables.localhost_node_ports = true;
        world.configure(config.clone());
        world.settle();
        assert!(!gets_in(), "{way}");
        assert_eq!(guarded(), [true, false], "{way}: IPv6 has no way to 127.0.0.1");
    }
}
