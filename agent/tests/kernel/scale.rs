//! Many Services: loads in bounded transactions, changes that cost what they change.

use pointsman_agent::iptables::Flavour;
use serde_json::json;

use pointsman_agent::model::Change;

use crate::support::lab::{Lab, address, ip};
use crate::support::traffic::Answer;
use crate::support::world::{FAMILIES, World};

fn service(world: &mut World, number: usize) {
    let (high, low) = (number / 250, number % 250 + 1);
    world.service(
        &format!("s{number}"),
        json!({
            "type": if number.is_multiple_of(5) { "NodePort" } else { "ClusterIP" },
            "clusterIPs": [format!("172.30.{high}.{low}"), format!("fd00:ac:1e::{high:x}:{low:x}")],
            "ports": [{
                "name": "web", "protocol": "TCP", "port": 80,
                "nodePort": if number.is_multiple_of(5) { 30_000 + number / 5 } else { 0 },
            }],
        }),
    );
    world.endpoints(&format!("s{number}"), &["a", "r"]);
}

fn load(flavour: Flavour, count: usize) -> Option<(Lab, World)> {
    let lab = Lab::new()?;
    let mut world = World::new(&lab, flavour);
    for number in 0..count {
        service(&mut world, number);
    }
    world.sync();
    Some((lab, world))
}

/// An endpoint changed, a Service added, emptied, filled and removed: returns the rules that each writes.
fn changes(world: &mut World, count: usize) -> Vec<usize> {
    let mut written = Vec::new();
    let mut step = |world: &mut World| {
        let synced = world.sync();
        assert!(!synced.full);
        written.push(synced.written[&(FAMILIES[0], "nat")]);
    };
    world.endpoints("s7", &["b", "r"]);
    step(world);
    service(world, count);
    step(world);
    world.endpoints(&format!("s{count}"), &[]);
    step(world);
    world.endpoints(&format!("s{count}"), &["a"]);
    step(world);
    world.delete_service(&format!("s{count}"));
    world.endpoints(&format!("s{count}"), &[]);
    step(world);
    written
}

// ids: SYN-2 SYN-3 SYN-4 SYN-5
#[test]
fn syn_2_a_change_among_600_services_writes_its_own_chains_only() {
    for flavour in [Flavour::Nft, Flavour::Legacy] {
        let Some((lab, mut world)) = load(flavour, 600) else { return };
        assert_eq!(world.differences(), Vec::<String>::new());
        for number in [0, 299, 599] {
            let to = ip(&format!("172.30.{}.{}", number / 250, number % 250 + 1));
            assert!(matches!(lab.tcp("client", (to, 80)), Answer::From(..)), "{to}");
        }
        let written = changes(&mut world, 600);
        assert!(written[0] <= 8, "an endpoint: its service's chains");
        assert!(written[1] <= 60, "a service: its chains and its blocks of the tree");
        assert!(written[2] <= 60);
        assert!(written[3] <= 60, "the first endpoint of a service costs no more than a service");
        assert!(written[4] <= 60);
        assert_eq!(world.differences(), Vec::<String>::new());
    }
}

/// A slice of a Service, of which only the first two endpoints exist.
fn slice(v6: bool, number: usize, endpoints: usize) -> Change {
    let family = if v6 { "IPv6" } else { "IPv4" };
    let address = |low: usize| match (number, low, v6) {
        (0, 0, v6) => address("a", v6).to_string(),
        (0, 1, v6) => address("r", v6).to_string(),
        (_, _, false) => format!("10.181.{number}.{low}"),
        (_, _, true) => format!("fd00:b5::{number}:{low}"),
    };
    let endpoints: Vec<_> = (0..endpoints).map(|low| json!({"addresses": [address(low)]})).collect();
    let object = json!({
        "metadata": {
            "namespace": "ns", "name": format!("big-{family}-{number}"),
            "labels": {"kubernetes.io/service-name": "big"},
        },
        "addressType": family,
        "ports": [{"name": "web", "port": 8080}],
        "endpoints": endpoints,
    });
    Change::SliceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

// ids: SYN-11 REG-137085
#[test]
fn a_service_with_more_than_a_thousand_endpoints_in_several_slices() {
    for flavour in [Flavour::Nft, Flavour::Legacy] {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, flavour);
        let ips = ["172.30.0.1", "fd00:ac:1e::1"];
        world.service("big", json!({"clusterIPs": ips, "ports": [{"name": "web", "port": 80}]}));
        for number in 0..12 {
            world.apply(slice(false, number, 100));
            world.apply(slice(true, number, 100));
        }
        let synced = world.settle();
        println!("{flavour} 1200 endpoints: {:?}, {:?}", synced.duration, synced.rules);
        assert!(synced.rules[&(FAMILIES[0], "nat")] > 3 * 1200);
        // Scaled down to two.
        for v6 in [false, true] {
            for number in 1..12 {
                world.apply(slice(v6, number, 0));
            }
            world.apply(slice(v6, 0, 2));
        }
        assert!(!world.settle().full);
        for to in ips {
            assert!(matches!(lab.tcp("client", (ip(to), 80)), Answer::From(..)), "{to}");
        }
    }
}
