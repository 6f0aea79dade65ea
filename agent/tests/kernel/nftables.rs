//! Mode nftables over time: restarts, failures, live settings, and the way from and to mode iptables.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_openapi::api::discovery::v1::Endpoint;
use pointsman_agent::conntrack::Connections;
use pointsman_agent::iptables::{Flavour, cleanup};
use pointsman_agent::kernel::{Counted, SyncFailure};
use pointsman_agent::model::Change;
use pointsman_agent::nftables;
use pointsman_agent::sync::node::{Dataplane, Node};
use pointsman_agent::sync::{Dataplane as _, Platform as _};
use pointsman_agent::userspace::counters::Counters;
use pointsman_crds::proxy_node_status::IpFamily;
use serde_json::json;

use crate::lifecycle::{Traffic, loaded};
use crate::support::lab::{Lab, NODE, address};
use crate::support::traffic::Answer;
use crate::support::world::{FAMILIES, Way, World, block_on, cluster_ip, config, slice, spec, tools};

// ids: AFF-7
#[test]
fn syn_9_a_restart_writes_only_what_differs_and_clients_stay() {
    let Some(lab) = Lab::new() else { return };
    let sticky = |world: &mut World| {
        let mut sticky = spec();
        sticky["sessionAffinity"] = json!("ClientIP");
        world.service("web", sticky);
    };
    let mut world = loaded(&lab, Way::Nftables);
    sticky(&mut world);
    // Removed and added again, so that the order in the kernel is not the sorted one.
    for pods in [&["a", "r"][..], &["r"], &["a", "b", "r"]] {
        world.endpoints("web", pods);
        world.settle();
    }
    let answer = lab.tcp("client", cluster_ip());
    drop(world);
    let mut successor = loaded(&lab, Way::Nftables);
    sticky(&mut successor);
    successor.endpoints("web", &["a", "b", "r"]);
    let synced = successor.settle();
    assert!(synced.full);
    assert_eq!(synced.written.values().sum::<usize>(), 0);
    for _ in 0..20 {
        assert_eq!(lab.tcp("client", cluster_ip()), answer);
    }
}

#[test]
fn syn_8_a_failed_write_is_read_back_and_repaired() {
    let Some(lab) = Lab::new() else { return };
    let mut world = loaded(&lab, Way::Nftables);
    world.settle();
    lab.node("nft delete table ip pointsman");
    assert!(!world.differences().is_empty());
    world.endpoints("web", &["a"]);
    let (synced, errors) = world.try_sync();
    assert_eq!(errors.len(), 1, "IPv6 is written all the same");
    assert_eq!(errors[0].failure, SyncFailure::RestoreFailed);
    assert_eq!(synced.duration.len(), 1);
    // No change is needed for the repair.
    assert!(world.settle().full);
    assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    // Drift that no write meets is found by comparing.
    lab.node("nft flush chain ip pointsman services; nft flush set ip6 pointsman cluster-ips; nft add chain ip pointsman mine");
    assert_eq!(world.differences().len(), 3, "{:?}", world.differences());
    world.repair();
    assert_eq!(world.differences(), Vec::<String>::new());
}

#[test]
fn an_error_names_the_service() {
    let Some(lab) = Lab::new() else { return };
    let mut world = loaded(&lab, Way::Nftables);
    world.settle();
    lab.node("nft flush map ip pointsman frontends");
    world.delete_service("web");
    let (_, errors) = world.try_sync();
    assert!(errors[0].message.ends_with("(for ns/web:web)"), "{}", errors[0].message);
}

#[test]
fn a_new_mark_bit_loses_no_connection() {
    let Some(lab) = Lab::new() else { return };
    let mut world = loaded(&lab, Way::Nftables);
    world.settle();
    let traffic = Traffic::start(&lab);
    for bit in [15, 3, 14] {
        let mut config = config();
        config.masquerade.bit = bit;
        world.configure(config);
        assert!(!world.settle().full);
        let listed = lab.node("nft list chain ip pointsman nat-postrouting");
        assert!(listed.contains(&format!("{:#010x}", 1 << bit)), "{listed}");
        assert_eq!(listed.matches("meta mark set").count(), 1, "the old bit is gone: {listed}");
    }
    let (count, failed) = traffic.stop();
    assert_eq!(failed, [], "of {count}");
    assert!(count > 100, "{count}");
}

// ids: SYN-17
#[test]
fn switching_from_and_to_mode_iptables_loses_no_connection() {
    for flavour in [Flavour::Nft, Flavour::Legacy] {
        let Some(lab) = Lab::new() else { return };
        let mut world = loaded(&lab, flavour);
        world.settle();
        let traffic = Traffic::start(&lab);
        let remove_table = |lab: &Lab| {
            lab.run(NODE, || block_on(nftables::cleanup(&FAMILIES, Connections::Covered))).unwrap()
        };
        for _ in 0..3 {
            world.dataplane = Way::Nftables.open(&lab);
            world.settle();
            block_on(cleanup(&tools(&lab, flavour), &FAMILIES, Connections::Covered)).unwrap();
            assert_eq!(world.differences(), Vec::<String>::new());
            world.dataplane = Way::from(flavour).open(&lab);
            world.settle();
            remove_table(&lab);
        }
        let (count, failed) = traffic.stop();
        assert_eq!(failed, [], "of {count}, {flavour}");
        assert!(count > 100, "{count}");
        // Nothing to remove is no error.
        remove_table(&lab);
    }
}

/// Cleans up where it is called, as the command does. Returns whether an anchor is left.
fn clean() -> bool {
    block_on(nftables::cleanup(&FAMILIES, Connections::Anchor)).unwrap()
}

fn with_one_endpoint(lab: &Lab) -> World {
    let mut world = World::new(lab, Way::Nftables);
    world.service("web", spec());
    world.endpoints("web", &["a"]);
    world.settle();
    world
}

#[test]
fn syn_16_connections_outlive_a_cleanup() {
    for v6 in [false, true] {
        let Some(lab) = Lab::new() else { return };
        let mut world = with_one_endpoint(&lab);
        let mut stream = lab.stream("client", (address(NODE, v6), 30080));
        assert!(stream.answers());
        assert!(lab.run(NODE, clean), "an anchor is left");
        assert!(stream.answers() && stream.answers());
        let left = lab.node("nft list ruleset");
        assert_eq!((left.matches("table").count(), left.matches("chain").count()), (1, 2), "{left}");
        assert!(lab.run(NODE, clean), "it is still needed");
        assert!(stream.answers());
        assert_eq!(lab.node("nft list ruleset"), left);
        // An agent that comes back makes it its table.
        assert!(!world.differences().is_empty());
        world.repair();
        assert!(stream.answers());
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        assert!(lab.run(NODE, clean));
        drop(stream);
        let begun = Instant::now();
        while lab.run(NODE, clean) {
            assert!(begun.elapsed() < Duration::from_secs(10), "the connection has ended");
            std::thread::park_timeout(Duration::from_millis(50));
        }
        assert_eq!(lab.node("nft list ruleset"), "");
    }
}

#[test]
fn a_family_that_is_not_served_any_more_loses_its_table_and_no_connection() {
    let Some(lab) = Lab::new() else { return };
    let world = with_one_endpoint(&lab);
    let v6 = SocketAddr::from((address(NODE, true), 30080));
    let mut stream = lab.stream("client", v6);
    assert!(stream.answers());
    lab.run(NODE, move || {
        let one = block_on(nftables::Dataplane::open(&[IpFamily::IPv4])).unwrap();
        let mut node = Node::new(Path::new("/nowhere"), Counters::default());
        block_on(node.retire(&world.dataplane, &Dataplane::Nftables(one))).unwrap();
    });
    assert!(stream.answers() && stream.answers());
    assert!(!lab.node("nft list table ip6 pointsman").contains("frontends"));
    assert_eq!(lab.tcp("client", v6), Answer::Refused, "nobody listens there");
    assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
}

#[test]
fn syn_16_cleanup_removes_our_tables_and_nothing_else() {
    let Some(lab) = Lab::new() else { return };
    lab.node("nft add table ip other; nft add table inet pointsman");
    loaded(&lab, Way::Nftables).settle();
    lab.run(NODE, || {
        assert_eq!(block_on(nftables::installed(&FAMILIES)).unwrap(), FAMILIES);
        assert!(!clean(), "no connection, no anchor");
        assert_eq!(block_on(nftables::installed(&FAMILIES)).unwrap(), []);
    });
    assert_eq!(lab.node("nft list tables"), "table ip other\ntable inet pointsman\n");
}

#[test]
fn counters_count_what_clients_send_to_each_service_port() {
    let Some(lab) = Lab::new() else { return };
    let mut world = loaded(&lab, Way::Nftables);
    world.settle();
    let mut counting = config();
    counting.nftables.counters = true;
    world.configure(counting);
    world.settle();
    let traffic = |world: &mut World, v6: bool| {
        let mut counted = world.runtime.block_on(world.dataplane.traffic()).unwrap();
        counted.retain(|(id, _)| id.family == FAMILIES[usize::from(v6)]);
        let [(id, counted)] = &counted[..] else { panic!("{counted:?}") };
        assert_eq!(id.text(), "ns/web:web");
        *counted
    };
    assert_eq!(traffic(&mut world, false), Counted::default());
    assert!(matches!(lab.udp("client", cluster_ip()), Answer::Refused), "another protocol is not counted");
    assert_eq!(traffic(&mut world, false), Counted::default());
    assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    let first = traffic(&mut world, false);
    // At least SYN, ACK and FIN, with headers of at least 40 bytes.
    assert!(first.packets >= 3 && first.bytes >= first.packets * 40, "{first:?}");
    // Also at the NodePort, from the node, and after the endpoints have changed.
    world.endpoints("web", &["b"]);
    world.settle();
    for (from, to) in [("client", (address(NODE, false), 30080).into()), (NODE, cluster_ip())] {
        let before = traffic(&mut world, false);
        assert!(matches!(lab.tcp(from, to), Answer::From(..)));
        let after = traffic(&mut world, false);
        assert!(after.packets >= before.packets + 3, "{from}: {before:?} {after:?}");
    }
    assert_eq!(traffic(&mut world, true), Counted::default());
    assert!(matches!(lab.tcp("client", (address(NODE, true), 30080)), Answer::From(..)));
    assert!(traffic(&mut world, true).packets >= 3);
    world.configure(config());
    world.settle();
    assert!(!lab.node("nft list table ip pointsman").contains("traffic"), "off again");
    assert_eq!(world.runtime.block_on(world.dataplane.traffic()), Some(Vec::new()));
}

#[test]
fn a_service_that_cannot_be_served_as_it_should_be_is_named() {
    let Some(lab) = Lab::new() else { return };
    let mut world = World::new(&lab, Way::Nftables);
    let mut sticky = spec();
    sticky["sessionAffinity"] = json!("ClientIP");
    world.service("web", sticky);
    world.endpoints("web", &["a"]);
    assert_eq!(world.settle().limits, Vec::<String>::new());
    let mut many = slice("web", IpFamily::IPv4, &["a"]);
    let one = many.endpoints.remove(0);
    many.endpoints.extend((0..4096_u16).map(|number| {
        let [high, low] = number.to_be_bytes();
        Endpoint { addresses: vec![format!("10.99.{high}.{low}")], ..one.clone() }
    }));
    world.apply(Change::SliceApplied(Box::new(many)));
    let limits = world.settle().limits;
    assert!(limits.len() == 1 && limits[0].starts_with("ns/web:web (IPv4): served without"), "{limits:?}");
    world.endpoints("web", &["a"]);
    assert_eq!(world.settle().limits, Vec::<String>::new());
}
