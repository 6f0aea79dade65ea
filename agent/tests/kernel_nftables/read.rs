//! What others have changed is found, and exactly that is repaired.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pointsman_agent::nftables::compare::compare;
use pointsman_agent::nftables::connection::Connection;
use pointsman_agent::nftables::error::Error;
use pointsman_agent::nftables::read::Installed;
use pointsman_agent::nftables::ruleset::{Chain, Element, Origin, Rule, Ruleset, Transaction, jump};
use pointsman_crds::proxy_node_status::IpFamily;

use super::everything::{address, affinity_rules, everything};
use super::scale::frontends;
use super::{isolated, load, nft, nft_file, table};

#[test]
fn damage_is_repaired() {
    isolated(|| {
        let mut all = everything(IpFamily::IPv4);
        all.add_chain(Chain::new("affinity"), affinity_rules());
        let mut connection = Connection::open().unwrap();
        load(&mut connection, &all);
        // A client that is pinned: nobody but a packet writes this.
        nft("add element ip pointsman affinity { 10.0.0.1 . 0:10 timeout 1h : 10:10 }");
        let keeps_clients = |damage: &str| !damage.contains("table") && !damage.contains("affinity");
        for (damage, differences) in [
            ("delete element ip pointsman frontends { 172.30.0.41 . tcp . 80 }", 1),
            ("add element ip pointsman cluster-ips { 1.2.3.4 }", 1),
            ("add element ip pointsman frontends { 1.2.3.4 . tcp . 80 : 1:1 }", 1),
            ("flush map ip pointsman frontends", 1),
            ("flush map ip pointsman classes", 1),
            ("delete element ip pointsman service-cidrs { 172.30.0.40-172.30.0.42 }", 1),
            ("add element ip pointsman service-cidrs { 9.0.0.0/8 }", 1),
            ("flush set ip pointsman service-cidrs", 1),
            ("flush chain ip pointsman rules", 1),
            ("add rule ip pointsman empty log prefix \"x\"", 1),
            ("insert rule ip pointsman rules drop", 1),
            ("add rule ip pointsman empty ip saddr { 1.2.3.4, 1.2.3.5 } drop", 1),
            ("add rule ip pointsman empty ether saddr { 00:00:00:00:00:01, 00:00:00:00:00:02 } drop", 1),
            ("add rule ip pointsman empty meta priority vmap { 1:1 : drop, 1:2 : accept }", 1),
            ("add element ip pointsman cluster-ips { * }", 1),
            ("add chain ip pointsman stray", 1),
            (
                "add chain ip pointsman stray; add rule ip pointsman stray jump rules; add rule ip pointsman rules jump stray",
                2,
            ),
            (
                "add set ip pointsman odd { type ether_addr; }; add rule ip pointsman empty ether saddr @odd",
                2,
            ),
            ("add chain ip pointsman evil { type filter hook forward priority 0; policy drop; }", 1),
            (
                "add map ip pointsman more { type ipv4_addr : verdict; }; add element ip pointsman more { 1.2.3.4 : goto rules }",
                1,
            ),
            ("add element ip pointsman classes { 5:5 : goto empty }", 1),
            (
                "delete element ip pointsman classes { 100:0 }; add element ip pointsman classes { 100:0 : drop }",
                1,
            ),
            ("delete rule ip pointsman nat-output handle HANDLE", 1),
            ("add chain ip pointsman filter-input { policy drop; }", 1),
            ("flush map ip pointsman affinity", 0),
            ("add table ip pointsman { flags dormant; }", 1),
            ("delete table ip pointsman", 1),
            ("delete table ip pointsman; add table ip pointsman { flags dormant; }", 1),
            ("delete table ip pointsman; add table ip pointsman", 25),
        ] {
            let mut damage = damage.to_owned();
            if damage.contains("HANDLE") {
                let listing = nft("-a list chain ip pointsman nat-output");
                let handle = listing.split("jump empty # handle ").nth(1).unwrap().lines().next().unwrap();
                damage = damage.replace("HANDLE", handle);
            }
            nft_file(&format!("{}\n", damage.replace("; add", "\nadd")));
            let read = connection.read(&all.table).unwrap();
            let repair = compare(&all, read.as_ref());
            if differences < 25 {
                assert_eq!(repair.differences.len(), differences, "{damage}: {:?}", repair.differences);
            } else {
                assert!(repair.differences.len() >= differences, "{damage}: {:?}", repair.differences);
            }
            for repairs in [&repair.first, &repair.then] {
                connection.apply(&all.table, repairs).unwrap_or_else(|error| panic!("{damage}: {error}"));
            }
            let read = connection.read(&all.table).unwrap().unwrap();
            assert_eq!(compare(&all, Some(&read)).differences, [] as [String; 0], "{damage}");
            assert_eq!(read.ruleset, all, "{damage}");
            if keeps_clients(&damage) && !damage.contains("policy") {
                assert!(nft("list map ip pointsman affinity").contains("10.0.0.1"), "{damage}");
            }
        }
    });
}

#[test]
fn other_tables_are_none_of_our_business() {
    isolated(|| {
        nft_file(
            "table ip pointsman-not { map m { type mark : verdict; }; chain c { log; }; }\ntable inet x { chain rules { drop; }; }\n",
        );
        nft_file("table ip6 pointsman { chain c { log; }; }\n");
        let before =
            (nft("list table ip pointsman-not"), nft("list table inet x"), nft("list table ip6 pointsman"));
        let all = everything(IpFamily::IPv4);
        let mut connection = Connection::open().unwrap();
        load(&mut connection, &all);
        assert_eq!(connection.read(&all.table).unwrap().unwrap().ruleset, all);
        let after =
            (nft("list table ip pointsman-not"), nft("list table inet x"), nft("list table ip6 pointsman"));
        assert_eq!(before, after);
    });
}

#[test]
fn a_reading_is_of_one_moment() {
    isolated(|| {
        let family = IpFamily::IPv4;
        let one = everything(family);
        let mut connection = Connection::open().unwrap();
        load(&mut connection, &one);
        // Another writer goes to and fro between two states that differ in the first and in the last thing that is read.
        let mut other = one.clone();
        other.add_element("cluster-ips", Element::new(address(family, 9)));
        other.add_chain(Chain::new("rules"), [Rule::new([jump("empty")])]);
        let installed = |ruleset: &Ruleset| Installed { ruleset: ruleset.clone(), foreign: BTreeMap::new() };
        let to = compare(&other, Some(&installed(&one))).first;
        let fro = compare(&one, Some(&installed(&other))).first;
        let stop = Arc::new(AtomicBool::new(false));
        let mut writer = Connection::open().unwrap();
        let stopped = Arc::clone(&stop);
        let others = thread::spawn(move || {
            let mut transactions = 0;
            while !stopped.load(Ordering::Relaxed) {
                writer.apply(&table(family), &to).unwrap();
                writer.apply(&table(family), &fro).unwrap();
                transactions += 2;
            }
            transactions
        });
        let started = Instant::now();
        let (mut seen, mut disturbed) = ([0, 0], 0);
        while started.elapsed() < Duration::from_secs(2) {
            match connection.read(&one.table) {
                Ok(Some(read)) if read.ruleset == one => seen[0] += 1,
                Ok(Some(read)) if read.ruleset == other => seen[1] += 1,
                Ok(read) => panic!("neither one nor the other: {read:?}"),
                Err(Error::Disturbed(_)) => disturbed += 1,
                Err(error) => panic!("{error}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        let transactions = others.join().unwrap();
        println!("during {transactions} transactions: {seen:?} whole, {disturbed} disturbed");
        assert!(seen[0] > 0 && seen[1] > 0 && transactions > 20);
    });
}

#[test]
fn a_busy_neighbour_does_not_disturb() {
    isolated(|| {
        let all = frontends(IpFamily::IPv4, 20_000);
        let mut connection = Connection::open().unwrap();
        load(&mut connection, &all);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let mut writer = Connection::open().unwrap();
        let others = thread::spawn(move || {
            let neighbour = everything(IpFamily::IPv6);
            load(&mut writer, &neighbour);
            let mut transactions = 0;
            while !stopped.load(Ordering::Relaxed) {
                let more = Element::new(address(IpFamily::IPv6, 9));
                let mut transaction = Transaction::default();
                transaction.add_element("cluster-ips", more.clone(), Origin::NONE);
                writer.apply(&neighbour.table, &transaction).unwrap();
                let mut transaction = Transaction::default();
                transaction.delete_element("cluster-ips", more, Origin::NONE);
                writer.apply(&neighbour.table, &transaction).unwrap();
                transactions += 2;
            }
            transactions
        });
        for _ in 0..3 {
            assert_eq!(connection.read(&all.table).unwrap().unwrap().ruleset, all);
        }
        stop.store(true, Ordering::Relaxed);
        let transactions = others.join().unwrap();
        println!("during {transactions} transactions");
        assert!(transactions > 20);
    });
}
