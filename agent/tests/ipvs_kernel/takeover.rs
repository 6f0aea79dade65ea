//! What kube-proxy's mode ipvs has left, virtual servers included, while a connection runs through it.

use std::net::IpAddr;

use pointsman_agent::iptables::Tools;
use pointsman_agent::ipvs::client::Connection;
use pointsman_agent::ipvs::server::{Key, Operation, RealServer, Settings, VirtualServer};
use pointsman_agent::model::Protocol;
use pointsman_agent::takeover::{Known, Left, Takeover};
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;

use crate::support::lab::{Lab, address, ip};
use crate::support::needs_ipvs;
use crate::support::traffic::Answer;
use crate::support::world::block_on;

const NODE_PORT: u16 = 30_080;

/// One attempt, as the agent makes it.
fn attempt(lab: &Lab, takeover: Takeover, known: &Known) -> (Takeover, Left) {
    let known = known.clone();
    lab.run("node", move || {
        block_on(async {
            let tools = Tools::detect(IptablesBackend::Legacy).await.unwrap();
            let mut takeover = takeover;
            let left = takeover.remove(Some(&tools), &known).await.unwrap();
            (takeover, left)
        })
    })
}

fn installed(lab: &Lab) -> Vec<Key> {
    lab.run("node", || {
        let servers = Connection::open().unwrap().servers().unwrap().unwrap();
        let mut keys: Vec<_> = servers.into_iter().map(|server| server.key).collect();
        keys.sort();
        keys
    })
}

#[test]
fn ipvs_kube_proxys_virtual_servers_go_once_no_connection_runs_through_them() {
    needs_ipvs();
    let lab = Lab::new().unwrap();
    let vip = ip("172.30.0.80");
    let node = address("node", false);
    // As kube-proxy has it: addresses on a device that is off, and routes with those as their source.
    lab.node(&format!(
        "ip link add kube-ipvs0 type dummy; ip addr add {vip}/32 dev kube-ipvs0; ip addr add fd00:30::80/128 dev kube-ipvs0 nodad
         ipset create KUBE-CLUSTER-IP hash:ip,port; ipset create OTHER hash:ip
         echo 1 > /proc/sys/net/ipv4/vs/conntrack"
    ));
    let key = |address: IpAddr, port| Key::new(Protocol::Tcp, address, port);
    let theirs = [key(vip, 80), key(node, NODE_PORT), key(ip("fd00:30::80"), 80)];
    // Load balancers of somebody else: at an address of the node, and at one that is none.
    let others = [key(node, 443), key(ip("203.0.113.77"), 80)];
    let real = address("a", false);
    lab.run("node", move || {
        let mut operations = Vec::new();
        for key in theirs.into_iter().chain(others) {
            let settings = Settings { scheduler: "rr".into(), flags: 0, persistence: None };
            operations.push(Operation::AddServer(VirtualServer { key, settings }));
            if key.family() == IpFamily::IPv4 {
                let real = RealServer { address: (real, 8080).into(), weight: 1 };
                operations.push(Operation::AddReal { server: key, real });
            }
        }
        Connection::open().unwrap().apply(&operations).unwrap();
    });
    assert_eq!(
        lab.tcp("node", (vip, 80)),
        Answer::From("a".to_owned(), vip),
        "the trap: the node has the source of the address"
    );
    let known = Known {
        node: [(IpFamily::IPv4, node), (IpFamily::IPv6, address("node", true))].into(),
        node_ports: [(Protocol::Tcp, NODE_PORT)].into(),
    };
    let mut held = lab.stream("client", (vip, 80));
    let mut foreign = lab.stream("client", (node, 443));
    let (takeover, left) = attempt(&lab, Takeover::default(), &known);
    assert_eq!(left, Left::Draining);
    assert_eq!(lab.tcp("node", (vip, 80)), Answer::From("a".to_owned(), node), "the route has a source");
    assert!(held.answers() && foreign.answers());
    assert_eq!(installed(&lab).len(), 5, "nothing has gone");
    drop(held);
    // Its end takes the kernel a moment.
    let mut left = (takeover, Left::Draining);
    for _ in 0..50 {
        left = attempt(&lab, left.0, &known);
        if left.1 == Left::Nothing {
            break;
        }
        block_on(tokio::time::sleep(std::time::Duration::from_millis(200)));
    }
    assert_eq!(left.1, Left::Nothing);
    let mut expected = others;
    expected.sort();
    assert_eq!(installed(&lab), expected);
    assert!(foreign.answers(), "a connection of somebody else keeps nothing waiting, and stays");
    assert!(!lab.node("ip -o link").contains("kube-ipvs0"));
    assert_eq!(lab.node("ipset list -name").trim(), "OTHER");
    assert_eq!(attempt(&lab, left.0, &known).1, Left::Nothing);
}
