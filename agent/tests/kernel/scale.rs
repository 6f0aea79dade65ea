//! Many Services: loads in bounded transactions, changes that cost what they change.

use std::time::Instant;

use pointsman_agent::iptables::Flavour;
use serde_json::json;

use crate::net::{Answer, CLIENT, Lab, POD_A, POD_B, REMOTE, ip};
use crate::world::{FAMILIES, World};

fn service(world: &mut World, number: usize) {
    let (high, low) = (number / 250, number % 250 + 1);
    world.service(
        &format!("s{number}"),
        json!({
            "type": if number.is_multiple_of(5) { "NodePort" } else { "ClusterIP" },
            "clusterIPs": [format!("10.96.{high}.{low}"), format!("fd00:10:96::{high:x}:{low:x}")],
            "ports": [{
                "name": "web", "protocol": "TCP", "port": 80,
                "nodePort": if number.is_multiple_of(5) { 30_000 + number / 5 } else { 0 },
            }],
        }),
    );
    world.endpoints(&format!("s{number}"), &[POD_A, REMOTE]);
}

fn load(flavour: Flavour, count: usize) -> Option<(Lab, World)> {
    let lab = Lab::new()?;
    let mut world = World::new(&lab, flavour);
    for number in 0..count {
        service(&mut world, number);
    }
    let start = Instant::now();
    let synced = world.sync();
    println!(
        "{flavour} {count} services: loaded in {:?}, {:?}, {:?}",
        start.elapsed(),
        synced.duration,
        synced.rules
    );
    Some((lab, world))
}

/// One change each way; prints what it took and returns the rules written.
fn changes(world: &mut World, count: usize) -> Vec<usize> {
    let mut written = Vec::new();
    let mut step = |world: &mut World, what: &str| {
        let start = Instant::now();
        let synced = world.sync();
        assert!(!synced.full);
        println!("  {what}: {:?} {:?} {:?}", start.elapsed(), synced.duration, synced.written);
        written.push(synced.written[&(FAMILIES[0], "nat")]);
    };
    world.endpoints("s7", &[POD_B, REMOTE]);
    step(world, "an endpoint changed");
    service(world, count);
    step(world, "a service added");
    world.delete_service(&format!("s{count}"));
    world.endpoints(&format!("s{count}"), &[]);
    step(world, "a service removed");
    written
}

#[test]
fn syn_2_a_change_among_600_services_writes_its_own_chains_only() {
    for flavour in [Flavour::Nft, Flavour::Legacy] {
        let Some((lab, mut world)) = load(flavour, 600) else { return };
        assert_eq!(world.differences(), Vec::<String>::new());
        for number in [0, 299, 599] {
            let to = ip(&format!("10.96.{}.{}", number / 250, number % 250 + 1));
            assert!(matches!(lab.tcp(CLIENT, (to, 80)), Answer::From(..)), "{to}");
        }
        let written = changes(&mut world, 600);
        assert!(written[0] <= 8, "an endpoint: its service's chains");
        assert!(written[1] <= 60, "a service: its chains and its blocks of the tree");
        assert!(written[2] <= 60);
        assert_eq!(world.differences(), Vec::<String>::new());
    }
}

#[test]
#[ignore = "a measurement: cargo test -p pointsman-agent --test kernel -- --ignored --nocapture measure"]
fn measure() {
    for flavour in [Flavour::Nft, Flavour::Legacy] {
        for count in [1000, 5000] {
            let Some((lab, mut world)) = load(flavour, count) else { return };
            world.listen(&lab);
            assert_eq!(world.differences(), Vec::<String>::new());
            changes(&mut world, count);
            let start = Instant::now();
            assert_eq!(world.look(), Vec::<String>::new());
            println!("  a look after own writes: {:?}", start.elapsed());
            lab.node(&format!("iptables-{flavour} -t nat -F KUBE-MARK-MASQ"));
            let start = Instant::now();
            assert_eq!(world.look().len(), 1);
            let found = start.elapsed();
            world.repair_only();
            let repaired = start.elapsed();
            assert_eq!(world.look(), Vec::<String>::new());
            println!(
                "  a flushed chain: found after {found:?}, back after {repaired:?}, verified after {:?}",
                start.elapsed()
            );
            let mut successor = World::new(&lab, flavour);
            for number in 0..count {
                service(&mut successor, number);
            }
            let start = Instant::now();
            let synced = successor.sync();
            println!("  restart: {:?}, {:?} written", start.elapsed(), synced.written);
        }
    }
}
