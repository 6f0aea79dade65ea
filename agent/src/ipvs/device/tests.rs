use proptest::prelude::*;

use super::*;
use crate::netlink::{ACK, Body, REQUEST, hex, messages};

const DEVICE: u32 = 7;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn set<const N: usize>(addresses: [&str; N]) -> BTreeSet<IpAddr> {
    addresses.map(ip).into()
}

fn sources() -> BTreeMap<IpFamily, IpAddr> {
    [(IpFamily::IPv4, ip("192.0.2.1")), (IpFamily::IPv6, ip("2001:db8::1"))].into()
}

const BOTH: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// What the kernel makes of changes.
fn after(mut local: Local, changes: &[Change]) -> Local {
    for change in changes {
        match *change {
            Change::Add { address, source } => assert_eq!(local.routes.insert(address, source), None),
            Change::Change { address, source } => assert!(local.routes.insert(address, source).is_some()),
            Change::Remove(address) => drop(local.routes.remove(&address)),
            Change::Bind(address) => assert!(local.bound.insert(address)),
            Change::Unbind(address) => {
                assert!(local.bound.remove(&address));
                if address.is_ipv4() && !local.bound.iter().any(IpAddr::is_ipv4) {
                    local.routes.retain(|to, _| to.is_ipv6());
                }
                // The kernel's own route has the address itself as its source.
                if local.routes.get(&address) == Some(&Some(address)) {
                    local.routes.remove(&address);
                }
            }
        }
    }
    local
}

#[test]
fn ipvs_addresses_come_and_go() {
    let wanted = set(["10.96.0.1", "10.96.0.2", "fd00:96::1"]);
    let (v4, v6) = (Some(ip("192.0.2.1")), Some(ip("2001:db8::1")));
    let add = |address, source| Change::Add { address: ip(address), source };
    let changes = plan(&Local::default(), &wanted, &sources(), &BOTH);
    assert_eq!(changes, [add("10.96.0.1", v4), add("10.96.0.2", v4), add("fd00:96::1", v6)]);
    let local = after(Local::default(), &changes);
    assert_eq!(plan(&local, &wanted, &sources(), &BOTH), []);
    let fewer = set(["10.96.0.2"]);
    let removed = [Change::Remove(ip("10.96.0.1")), Change::Remove(ip("fd00:96::1"))];
    assert_eq!(plan(&local, &fewer, &sources(), &BOTH), removed);
    assert_eq!(
        plan(&local, &fewer, &sources(), &[IpFamily::IPv4]),
        removed[..1],
        "a family that is not served"
    );
}

#[test]
fn ipvs_an_address_of_another_device_is_never_routed() {
    let others = set(["203.0.113.5", "192.0.2.1"]);
    let local = Local { others: others.clone(), ..Local::default() };
    let wanted = set(["203.0.113.5", "203.0.113.6"]);
    let source = Some(ip("192.0.2.1"));
    let only = [Change::Add { address: ip("203.0.113.6"), source }];
    assert_eq!(plan(&local, &wanted, &sources(), &BOTH), only);
    // The node has got it after it was routed.
    let routes = [(ip("203.0.113.5"), source), (ip("203.0.113.6"), source)].into();
    let local = Local { routes, others, ..Local::default() };
    assert_eq!(plan(&local, &wanted, &sources(), &BOTH), [Change::Remove(ip("203.0.113.5"))]);
}

#[test]
fn ipvs_a_new_source_changes_every_route_of_the_family() {
    let routes = [(ip("10.96.0.1"), Some(ip("192.0.2.9"))), (ip("fd00:96::1"), Some(ip("2001:db8::1")))];
    let local = Local { routes: routes.into(), ..Local::default() };
    let wanted = set(["10.96.0.1", "fd00:96::1"]);
    let changed = Change::Change { address: ip("10.96.0.1"), source: Some(ip("192.0.2.1")) };
    assert_eq!(plan(&local, &wanted, &sources(), &BOTH), [changed]);
    let none = plan(&local, &wanted, &BTreeMap::new(), &[IpFamily::IPv4]);
    assert_eq!(none, [Change::Change { address: ip("10.96.0.1"), source: None }]);
}

/// mode-switching §5: its routes get a source first, and its addresses go last.
#[test]
fn ipvs_what_kube_proxy_has_bound_is_taken_over_without_a_gap() {
    let bound = set(["10.96.0.1", "10.96.0.9"]);
    let routes = bound.iter().map(|address| (*address, Some(*address))).collect();
    let local = Local { routes, bound, ..Local::default() };
    let wanted = set(["10.96.0.1"]);
    let changes = plan(&local, &wanted, &sources(), &BOTH);
    for done in 0..=changes.len() {
        let between = after(local.clone(), &changes[..done]);
        assert!(between.routes.contains_key(&ip("10.96.0.1")), "after {done} of {changes:?}");
    }
    let routes = [(ip("10.96.0.1"), Some(ip("192.0.2.1")))].into();
    let local = after(local, &changes);
    assert_eq!(local, Local { routes, bound: [ANCHOR].into(), ..Local::default() });
    assert_eq!(plan(&local, &wanted, &sources(), &BOTH), []);
}

fn payloads(bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let each = |message: Result<crate::netlink::Message<'_>, _>| match message.unwrap().body {
        Body::Other { kind, payload } => (kind, payload.to_vec()),
        other => panic!("{other:?}"),
    };
    messages(bytes).map(each).collect()
}

/// By hand from the headers, on a machine with little-endian numbers.
#[test]
#[cfg(target_endian = "little")]
fn messages_are_what_the_headers_say() {
    let written = |change: &Change| {
        let mut encoder = Encoder::default();
        route::change(&mut encoder, REQUEST | ACK, 3, DEVICE, change);
        encoder.finish()
    };
    let add = Change::Add { address: ip("10.96.0.1"), source: Some(ip("192.0.2.1")) };
    let bytes = "34000000 1800 0506 03000000 00000000 02200000 ff02fe02 00000000
                 0800 0100 0a600001 0800 0400 07000000 0800 0700 c0000201";
    assert_eq!(written(&add), hex(bytes));
    // Whoever made it.
    let bytes = "2c000000 1900 0500 03000000 00000000 02200000 ff00fe02 00000000
                 0800 0100 0a600001 0800 0400 07000000";
    assert_eq!(written(&Change::Remove(ip("10.96.0.1"))), hex(bytes));
    let bytes = "20000000 1500 0500 03000000 00000000 022000fe 07000000 0800 0200 0a600001";
    assert_eq!(written(&Change::Unbind(ip("10.96.0.1"))), hex(bytes));
    let mut device = Encoder::default();
    route::add_device(&mut device, REQUEST | ACK, 1, NAME);
    let bytes = "40000000 1000 0506 01000000 00000000 00000000000000000000000000000000
                 0f00 0300 6b7562652d697076733000 00 1000 1280 0a00 0100 64756d6d7900 0000";
    assert_eq!(device.finish(), hex(bytes));
}

proptest! {
    #[test]
    fn routes_that_are_written_are_read(address in any::<IpAddr>(), sourced in any::<bool>()) {
        let source = sourced.then(|| sources()[&family_of(address)]);
        let mut encoder = Encoder::default();
        route::change(&mut encoder, 0, 1, DEVICE, &Change::Add { address, source });
        let read = route::local_route(&payloads(&encoder.finish())[0].1);
        prop_assert_eq!(read, Ok(Some(Listed { address, device: DEVICE, source })));
    }

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..100), family in 0..12_u8) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = family;
        }
        let _ = (route::address(&bytes), route::local_route(&bytes));
    }

    #[test]
    fn plans_lead_to_what_is_wanted_and_then_to_nothing(
        routes in proptest::collection::btree_map(0..8_u8, proptest::option::of(0..3_u8), 0..8),
        bound in proptest::collection::btree_set(0..8_u8, 0..4),
        others in proptest::collection::btree_set(0..8_u8, 0..3),
        wanted in proptest::collection::btree_set(0..8_u8, 0..8),
    ) {
        let address = |number: u8| IpAddr::from([10, 96, 0, number]);
        let others: BTreeSet<_> = others.into_iter().map(address).collect();
        let mut routes: BTreeMap<_, _> = routes
            .into_iter()
            .map(|(to, source)| (address(to), source.map(|number| IpAddr::from([192, 0, 2, number]))))
            .filter(|(to, _)| !others.contains(to))
            .collect();
        let bound: BTreeSet<_> = bound.into_iter().map(address).filter(|to| !others.contains(to)).collect();
        for one in &bound {
            routes.insert(*one, Some(*one));
        }
        let local = Local { routes, bound, others: others.clone() };
        let wanted: BTreeSet<_> = wanted.into_iter().map(address).collect();
        let after = after(local.clone(), &plan(&local, &wanted, &sources(), &BOTH));
        let expected: BTreeMap<_, _> = wanted
            .difference(&others)
            .map(|to| (*to, Some(ip("192.0.2.1"))))
            .collect();
        let bound = if local.bound.is_empty() { BTreeSet::new() } else { [ANCHOR].into() };
        prop_assert_eq!(&after, &Local { routes: expected, others, bound });
        prop_assert_eq!(plan(&after, &wanted, &sources(), &BOTH), []);
    }
}
