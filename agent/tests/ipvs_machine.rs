//! The kernel that `hack/test ipvs` runs the tests of IPVS in has what they need, and a node's network works in it.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "support/mod.rs"]
mod support;

use std::path::Path;

use support::lab::{Lab, NODE, address, shell};
use support::traffic::Answer;

#[test]
fn the_kernel_has_what_ipvs_needs() {
    support::needs_ipvs();
    let schedulers = "rr wrr lc wlc lblc lblcr sh dh sed nq mh";
    for module in schedulers.split(' ').map(|name| format!("ip_vs_{name}")) {
        assert!(Path::new("/sys/module").join(&module).exists(), "{module}");
    }
    shell(
        "ip link add probe type dummy && ip link del probe
        ipset create probe hash:ip,port,net family inet6 && ipset destroy probe
        for program in iptables-legacy ip6tables-legacy; do
            $program -t nat -A POSTROUTING -m mark --mark 0x4000/0x4000 -m comment --comment probe -j MASQUERADE
            $program -t nat -D POSTROUTING -m mark --mark 0x4000/0x4000 -m comment --comment probe -j MASQUERADE
            for table in filter mangle raw; do $program -t $table -S >/dev/null; done
        done
        iptables --version | grep -q legacy",
    );
}

#[test]
fn hosts_reach_pods_through_the_node() {
    support::needs_ipvs();
    let lab = Lab::new().unwrap();
    for v6 in [false, true] {
        let (from, to) = (address("client", v6), (address("a", v6), 8080));
        assert_eq!(lab.tcp("client", to), Answer::From("a".into(), from));
        assert_eq!(lab.udp("client", to), Answer::From("a".into(), from));
    }
    lab.node("test -e /proc/net/ip_vs");
    assert!(Path::new("/run/netns").join(lab.namespace(NODE)).exists());
}
