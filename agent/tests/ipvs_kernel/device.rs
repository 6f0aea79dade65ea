//! The device of virtual servers and its routes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use nix::errno::Errno;
use pointsman_agent::ipvs::client::Connection;
use pointsman_agent::ipvs::device::{Change, Device, DeviceError, Local, plan};
use pointsman_agent::ipvs::server::{Key, Operation, RealServer, Settings, VirtualServer};
use pointsman_agent::model::Protocol;
use pointsman_crds::proxy_node_status::IpFamily;

use crate::isolated;
use crate::support::lab::{Lab, address, ip, shell};
use crate::support::needs_ipvs;
use crate::support::traffic::Answer;

const BOTH: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// Addresses of the node: on a device of its own, so that there is another one.
fn on_a_node(test: impl FnOnce(Device) + Send + 'static) {
    isolated(|| {
        shell(
            "ip link add eth0 type dummy; ip link set eth0 up
             ip addr add 192.0.2.1/24 dev eth0; ip addr add 192.0.2.2/24 dev eth0
             ip addr add 2001:db8::1/64 dev eth0 nodad; ip addr add 2001:db8::2/64 dev eth0 nodad",
        );
        test(Device::open().unwrap());
    });
}

fn sources(v4: &str, v6: &str) -> BTreeMap<IpFamily, IpAddr> {
    [(IpFamily::IPv4, ip(v4)), (IpFamily::IPv6, ip(v6))].into()
}

fn set<const N: usize>(addresses: [&str; N]) -> BTreeSet<IpAddr> {
    addresses.map(ip).into()
}

/// Makes what is wanted, and expects it to be there.
fn settle(device: &mut Device, wanted: &BTreeSet<IpAddr>, sources: &BTreeMap<IpFamily, IpAddr>) -> Local {
    let changes = plan(&device.read().unwrap(), wanted, sources, &BOTH);
    device.apply(&changes).unwrap();
    let local = device.read().unwrap();
    assert_eq!(plan(&local, wanted, sources, &BOTH), [], "after {changes:?}: {local:?}");
    local
}

#[test]
fn the_device_is_made_once_and_has_no_addresses_of_its_own() {
    on_a_node(|mut device| {
        let eth0 = |shell: &dyn Fn(&str) -> String| shell("ip -o addr show eth0");
        let before = eth0(&shell);
        let found = Device::open().unwrap().read().unwrap();
        assert_eq!((found.routes, found.bound), Default::default());
        let others = set(["127.0.0.1", "::1", "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]);
        assert!(others.is_subset(&found.others), "{:?}", found.others);
        let link = shell("ip -d link show kube-ipvs0");
        assert!(link.contains("dummy") && link.contains("NOARP,UP"), "{link}");
        settle(&mut device, &set(["10.96.0.1", "fd00:96::1"]), &sources("192.0.2.1", "2001:db8::1"));
        device.remove().unwrap();
        assert!(Device::find().unwrap().is_none());
        assert_eq!(shell("ip -o route show table local proto kernel to 10.96.0.1"), "");
        assert_eq!(eth0(&shell), before);
    });
}

#[test]
fn routes_name_the_node_as_source_and_follow_its_address() {
    on_a_node(|mut device| {
        let wanted = set(["10.96.0.1", "10.96.0.2", "fd00:96::1", "fd00:96::2"]);
        settle(&mut device, &wanted, &sources("192.0.2.1", "2001:db8::1"));
        let to = |address: &str| shell(&format!("ip -o route get {address}"));
        assert!(
            to("10.96.0.1").contains("local 10.96.0.1 dev lo") && to("10.96.0.1").contains("src 192.0.2.1")
        );
        assert!(to("fd00:96::1").contains("src 2001:db8::1"), "{}", to("fd00:96::1"));
        settle(&mut device, &wanted, &sources("192.0.2.2", "2001:db8::2"));
        assert!(to("10.96.0.1").contains("src 192.0.2.2"), "{}", to("10.96.0.1"));
        assert!(to("fd00:96::1").contains("src 2001:db8::2"), "{}", to("fd00:96::1"));
        let local =
            settle(&mut device, &set(["10.96.0.2", "fd00:96::2"]), &sources("192.0.2.2", "2001:db8::2"));
        assert_eq!(local.routes.len(), 2);
        assert!(!shell("ip route show table local").contains("10.96.0.1"));

        // The kernel leaves it to us to notice that the source has gone.
        shell("ip addr del 192.0.2.2/24 dev eth0; ip addr del 2001:db8::2/64 dev eth0");
        let routes = [(ip("10.96.0.2"), Some(ip("192.0.2.2"))), (ip("fd00:96::2"), Some(ip("2001:db8::2")))];
        assert_eq!(device.read().unwrap().routes, routes.into());
        settle(&mut device, &set(["10.96.0.2", "fd00:96::2"]), &sources("192.0.2.1", "2001:db8::1"));
    });
}

#[test]
fn addresses_of_other_devices_stay_as_they_are() {
    on_a_node(|mut device| {
        let before = shell("ip route show table local; ip -6 route show table local");
        let wanted = set(["192.0.2.2", "2001:db8::2", "127.0.0.1"]);
        let local = settle(&mut device, &wanted, &sources("192.0.2.1", "2001:db8::1"));
        assert_eq!(local.routes, BTreeMap::new());
        let by_force = Change::Add { address: ip("192.0.2.2"), source: Some(ip("192.0.2.1")) };
        let refused =
            device.apply(&[by_force, Change::Remove(ip("10.96.0.7")), Change::Unbind(ip("10.96.0.7"))]);
        let Err(DeviceError::Refused(refusals)) = refused else { panic!("{refused:?}") };
        assert_eq!((refusals.len(), refusals[0].index, refusals[0].errno), (1, 0, Errno::EEXIST));
        let no_source = Change::Add { address: ip("10.96.0.7"), source: Some(ip("192.0.2.77")) };
        let refused = device.apply(&[no_source]);
        let Err(DeviceError::Refused(refusals)) = refused else { panic!("{refused:?}") };
        assert!(refusals[0].to_string().contains("10.96.0.7 with source 192.0.2.77"), "{}", refusals[0]);
        let after = shell("ip route show table local; ip -6 route show table local");
        assert_eq!(after, before);
    });
}

#[test]
fn what_kube_proxy_has_bound_becomes_routes() {
    on_a_node(|mut device| {
        // As kube-proxy does it: the device is down.
        shell(
            "ip link set kube-ipvs0 down; for i in 1 2 3; do ip addr add 10.96.0.$i/32 dev kube-ipvs0
             ip addr add fd00:96::$i/128 dev kube-ipvs0 nodad; done",
        );
        let found = Device::find().unwrap().unwrap().read().unwrap();
        assert_eq!(found.bound.len(), 6, "{found:?}");
        drop(Device::open().unwrap());
        let local = settle(
            &mut device,
            &set(["10.96.0.1", "10.96.0.4", "fd00:96::1", "fd00:96::4"]),
            &sources("192.0.2.1", "2001:db8::1"),
        );
        // IPv4 keeps one address, without which the device would lose its routes.
        assert_eq!((local.routes.len(), local.bound), (4, set(["127.255.255.254"])));
        let routes = shell("ip route show table local; ip -6 route show table local");
        for gone in ["10.96.0.2", "10.96.0.3", "fd00:96::2", "fd00:96::3"] {
            assert!(!routes.contains(gone), "{routes}");
        }
    });
}

/// Both families, from outside, from a pod and from the node itself, which is seen with its own address.
#[test]
fn packets_reach_virtual_servers_by_routes_alone() {
    needs_ipvs();
    let lab = Lab::new().unwrap();
    let vips = ["172.30.0.80", "fd00:30::80"].map(ip);
    let node = [false, true].map(|v6| address("node", v6));
    let real = [false, true].map(|v6| address("a", v6));
    lab.run("node", move || {
        let mut device = Device::open().unwrap();
        let sources = BOTH.into_iter().zip(node).collect();
        settle(&mut device, &vips.into(), &sources);
        let mut operations = Vec::new();
        for (vip, real) in vips.into_iter().zip(real) {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let key = Key::new(protocol, vip, 80);
                let settings = Settings { scheduler: "rr".into(), flags: 0, persistence: None };
                operations.push(Operation::AddServer(VirtualServer { key, settings }));
                let real = RealServer { address: (real, 8080).into(), weight: 1 };
                operations.push(Operation::AddReal { server: key, real });
            }
        }
        Connection::open().unwrap().apply(&operations).unwrap();
    });
    for (v6, vip) in [false, true].into_iter().zip(vips) {
        for (from, source) in [("client", "client"), ("pod", "pod"), ("node", "node")] {
            let expected = Answer::From("a".to_owned(), address(source, v6));
            assert_eq!(lab.tcp(from, (vip, 80)), expected, "{from} to {vip}");
            assert_eq!(lab.udp(from, (vip, 80)), expected, "{from} to {vip}");
        }
    }
    lab.run("node", || Device::find().unwrap().unwrap().remove().unwrap());
    assert_ne!(lab.tcp("client", (vips[0], 80)), Answer::From("a".to_owned(), address("client", false)));
}

#[test]
fn three_thousand_addresses_are_made_local_quickly() {
    on_a_node(|mut device| {
        let addresses: BTreeSet<IpAddr> =
            (0..3000_u32).map(|n| Ipv4Addr::from(0x0a60_0001 + n).into()).collect();
        let sources = sources("192.0.2.1", "2001:db8::1");
        let started = Instant::now();
        let changes = plan(&device.read().unwrap(), &addresses, &sources, &BOTH);
        device.apply(&changes).unwrap();
        println!("3,000 local routes added: {:?}", started.elapsed());
        let started = Instant::now();
        assert_eq!(device.read().unwrap().routes.len(), 3000);
        println!("read: {:?}", started.elapsed());
        let started = Instant::now();
        let changes = plan(&device.read().unwrap(), &BTreeSet::new(), &sources, &BOTH);
        device.apply(&changes).unwrap();
        println!("removed: {:?}", started.elapsed());
        assert_eq!(device.read().unwrap().routes, BTreeMap::new());
    });
}
