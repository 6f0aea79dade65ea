//! Many elements.

use std::time::Instant;

use pointsman_agent::nftables::client::Client;
use pointsman_agent::nftables::connection::Connection;
use pointsman_agent::nftables::ruleset::{
    Columns, Element, Operation, Origin, Ruleset, Set, TCP, Transaction, Tuple, Value,
};
use pointsman_agent::nftables::watch::Watch;
use pointsman_crds::proxy_node_status::IpFamily;

use super::{FAMILIES, isolated, table, transaction};

pub fn frontends(family: IpFamily, count: u32) -> Ruleset {
    let mut all = Ruleset::new(table(family));
    let key = Columns::Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]);
    all.add_set(Set::map("frontends", key, Columns::Typeof(vec![Value::Priority])));
    for number in 0..count {
        let address = match family {
            IpFamily::IPv4 => Tuple::new().address(std::net::Ipv4Addr::from(0x0a00_0000 + number)),
            IpFamily::IPv6 => {
                Tuple::new().address(std::net::Ipv6Addr::from((0xfd << 120) + u128::from(number)))
            }
        };
        let element = Element::new(address.protocol(TCP).port(80)).with_data(Tuple::new().word(number));
        all.add_element("frontends", element);
    }
    all
}

#[test]
fn many_elements_go_and_come_back() {
    isolated(|| {
        for family in FAMILIES {
            let all = frontends(family, 5000);
            let mut connection = Connection::open().unwrap();
            connection.apply(&all.table, &all.load()).unwrap();
            assert_eq!(connection.read(&all.table).unwrap().unwrap().ruleset, all);
        }
    });
}

/// The kernel rearranges the hash table behind the back of whoever lists it; one list in twenty lacked elements.
#[test]
fn a_list_right_after_a_load_is_complete() {
    isolated(|| {
        let mut connection = Connection::open().unwrap();
        for round in 0..30 {
            let all = frontends(IpFamily::IPv4, 2000 + round * 100);
            connection.apply(&all.table, &all.load()).unwrap();
            let read = connection.read(&all.table).unwrap().unwrap().ruleset;
            assert_eq!(read.elements["frontends"].len(), all.elements["frontends"].len());
            let delete = transaction([(Operation::DeleteTable, 0)]);
            connection.apply(&all.table, &delete).unwrap();
        }
    });
}

/// Prints what it costs: `cargo test -p pointsman-agent --test kernel_nftables -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_20000_elements() {
    isolated(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        for watched in [false, true] {
            let client = Client::open().unwrap();
            let watch = watched.then(|| Watch::open(table(IpFamily::IPv4), client.port()).unwrap());
            let all = frontends(IpFamily::IPv4, 20_000);
            let mut connection = Connection::open().unwrap();
            let mut empty = all.clone();
            let elements = empty.elements.remove("frontends").unwrap();
            connection.apply(&all.table, &empty.load()).unwrap();
            let mut load = Transaction::default();
            for element in &elements {
                load.add_element("frontends", element.clone(), Origin::NONE);
            }
            let started = Instant::now();
            connection.apply(&all.table, &load).unwrap();
            let added = started.elapsed();
            let started = Instant::now();
            let read = connection.read(&all.table).unwrap().unwrap();
            let dumped = started.elapsed();
            assert_eq!(read.ruleset, all);
            let element = elements.iter().next().unwrap();
            let mut one = Transaction::default();
            one.delete_element("frontends", element.clone(), Origin::NONE);
            one.add_element(
                "frontends",
                Element::new(element.key).with_data(Tuple::new().word(7)),
                Origin::NONE,
            );
            let started = Instant::now();
            for _ in 0..100 {
                connection.apply(&all.table, &one).unwrap();
            }
            let changed = started.elapsed() / 100;
            let started = Instant::now();
            for _ in 0..100 {
                assert!(connection.exists(&all.table).unwrap());
            }
            let existed = started.elapsed() / 100;
            println!(
                "watched: {watched}; 20000 elements added in {added:?}, read in {dumped:?}; one changed in {changed:?}; \
                 exists in {existed:?}"
            );
            connection.apply(&all.table, &transaction([(Operation::DeleteTable, 0)])).unwrap();
            drop(watch);
        }
    });
}
