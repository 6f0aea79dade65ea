//! What a change costs, and what clients with affinity see of it.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::super::class::Class;
use super::super::{Limit, State, fixed, word};
use super::kernel::apply;
use super::walk::{Clients, ends};
use super::{World, adopt, repair};
use crate::model::{Change, ObjectName};
use crate::nftables::ruleset::{Operation, Origin, Ruleset, Transaction, Tuple};
use crate::nftables::text;
use crate::plan::random::{Rules, service_applied, slice_applied};
use crate::plan::{Hop, Packet, Verdict};
use pointsman_crds::proxy_node_status::IpFamily::{self, IPv4};

const CLUSTER_IP: &str = "10.96.0.1";

fn spec(extra: &Value) -> Value {
    let mut spec = json!({
        "type": "LoadBalancer",
        "clusterIPs": [CLUSTER_IP],
        "ports": [{"name": "p", "protocol": "TCP", "port": 80, "nodePort": 30080}],
        "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}},
    });
    spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    spec
}

/// Ready endpoints; those below 100 are on this node.
fn endpoints(numbers: impl IntoIterator<Item = u32>) -> Value {
    let endpoint = |number: u32| {
        let address = IpAddr::from((0x0af4_0000 + number).to_be_bytes());
        json!({"addresses": [address], "nodeName": if number < 100 { "node" } else { "other" }})
    };
    numbers.into_iter().map(endpoint).collect()
}

impl World {
    fn table(&self) -> &Ruleset {
        &self.installed[&IPv4].1
    }

    /// Applies changes and returns the IPv4 transaction.
    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Transaction {
        for change in changes {
            self.cluster.apply(change);
        }
        let transaction = self.write().swap_remove(0);
        self.check();
        transaction
    }

    fn count(&mut self, service: &Value, numbers: impl IntoIterator<Item = u32>) -> usize {
        count(&self.step([service_applied("web", service), slice_applied("web", &endpoints(numbers))]))
    }
}

/// How many elements a transaction writes or deletes.
fn count(transaction: &Transaction) -> usize {
    let elements = transaction.operations.iter().map(|(operation, _)| match operation {
        Operation::AddElements { elements, .. } | Operation::DeleteElements { elements, .. } => {
            elements.len()
        }
        _ => 0,
    });
    elements.sum()
}

// ids: SYN-2 SYN-5 SYN-6
#[test]
fn a_change_costs_what_it_changes_whatever_the_size() {
    let (plain, sticky) = (spec(&json!({})), spec(&json!({"sessionAffinity": "ClientIP"})));
    for size in [10, 1000] {
        let far = |from: u32, to: u32| 100 + from..100 + to;
        let mut world = World::new();
        // Three frontends, cluster-ips, groups, a class, and the endpoints.
        assert_eq!(world.count(&plain, far(0, size)), 3 + 1 + 1 + 1 + size as usize);
        assert_eq!(world.count(&plain, far(0, size)), 0, "nothing changed");
        assert_eq!(world.count(&plain, far(0, size - 1)), 3 + 1, "the last removed; and a class");
        assert_eq!(world.count(&plain, far(0, size)), 3, "one added");
        assert_eq!(world.count(&plain, far(1, size + 1)), 2, "one replaced");
        assert_eq!(world.count(&plain, far(2, size + 1)), 5, "the second removed: the last moves");
        assert_eq!(world.count(&plain, far(2, size + 1).chain([1])), 3 + 1, "one on this node: hairpin");
        let toggled = world.count(&sticky, far(2, size + 1).chain([1]));
        assert_eq!(
            toggled,
            2 + 1 + 3 * size as usize,
            "affinity: groups, a class, endpoints become slots and sticky"
        );
    }
}

#[test]
fn a_removed_endpoint_leaves_its_index_to_the_last() {
    let mut world = World::new();
    world.count(&spec(&json!({})), 100..110);
    // Delete (3), delete (9), add (3); groups twice; and the class of nine.
    assert_eq!(world.count(&spec(&json!({})), (100..110).filter(|number| *number != 103)), 5 + 1);
}

#[test]
fn operations_tell_whom_they_are_for() {
    let mut world = World::new();
    let transaction = world.step([
        service_applied("web", &spec(&json!({"loadBalancerSourceRanges": ["203.0.113.0/25"]}))),
        slice_applied("web", &endpoints([1])),
    ]);
    let origins = |transaction: &Transaction| -> Vec<Origin> {
        let each = transaction.operations.iter().flat_map(|(operation, _)| match operation {
            Operation::AddElements { elements, .. } | Operation::DeleteElements { elements, .. } => {
                elements.iter().map(|(_, origin)| *origin).collect()
            }
            _ => Vec::new(),
        });
        each.collect()
    };
    let state = |world: &World| world.installed[&IPv4].0.clone();
    let name = |world: &World, origin| state(world).port(origin).map(crate::plan::PortId::text);
    assert!(origins(&transaction).iter().all(|origin| name(&world, *origin).as_deref() == Some("ns/web:p")));
    let removal = world.step([Change::ServiceDeleted(ObjectName::new("ns", "web"))]);
    assert_eq!(count(&removal), count(&transaction) - 1, "only the class stays");
    assert!(origins(&removal).iter().all(|origin| name(&world, *origin).as_deref() == Some("ns/web:p")));
}

#[test]
fn the_group_of_a_deleted_service_is_not_used_again_at_once() {
    let mut world = World::new();
    let group = |world: &World| {
        let key = Tuple::new().protocol(6).port(30080);
        world.table().elements[fixed::NODE_PORTS].get(&key).unwrap().value.clone()
    };
    world.count(&spec(&json!({})), [1]);
    let first = group(&world);
    world.step([Change::ServiceDeleted(ObjectName::new("ns", "web"))]);
    world.count(&spec(&json!({})), [1]);
    assert_ne!(group(&world), first);
}

#[test]
fn endpoints_beyond_the_slots_are_served_without_affinity_and_that_is_reported() {
    let sticky = spec(&json!({"sessionAffinity": "ClientIP", "externalTrafficPolicy": "Local"}));
    let mut world = World::new();
    let limits = |world: &World| world.installed[&IPv4].0.limits().values().copied().collect::<Vec<_>>();
    world.count(&sticky, 1..4096);
    assert_eq!(limits(&world), []);
    assert_eq!(world.table().elements[fixed::SLOTS].len(), 4095 + 99);
    world.count(&sticky, 1..4097);
    assert_eq!(limits(&world), [Limit::WithoutAffinity]);
    assert_eq!(world.table().elements[fixed::ENDPOINTS].len(), 4096 + 99);
    assert!(!world.table().elements.contains_key(fixed::STICKY));
    world.count(&sticky, 2..4097);
    assert_eq!(limits(&world), []);
}

#[test]
fn odd_timeouts_do_not_use_up_the_classes_of_others() {
    let mut world = World::new();
    let with_timeout = |seconds: u32| {
        json!({
            "clusterIPs": [IpAddr::from((0x0a60_0000 + seconds).to_be_bytes())],
            "ports": [{"name": "p", "protocol": "TCP", "port": 80}],
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
        })
    };
    let changes = (1..=2050).flat_map(|seconds| {
        let name = format!("s{seconds}");
        [service_applied(&name, &with_timeout(seconds)), slice_applied(&name, &endpoints([1]))]
    });
    world.step(changes);
    let limits = world.installed[&IPv4].0.limits();
    assert_eq!(limits.values().copied().collect::<Vec<_>>(), [Limit::WithoutAffinity; 2]);
    world.count(&spec(&json!({})), 1..8);
    assert_eq!(world.installed[&IPv4].0.limits().len(), 2, "others are served");
}

#[test]
fn classes_that_nothing_uses_go_in_two_steps() {
    let mut world = World::new();
    for size in 1..100 {
        world.count(&spec(&json!({})), 0..size);
    }
    let chains =
        |world: &World| world.table().chains.keys().filter(|name| Class::named(name).is_some()).count();
    let verdicts = |world: &World| world.table().elements[fixed::CLASSES].len();
    assert_eq!((chains(&world), verdicts(&world)), (99, 65));
    let again = world.step([slice_applied("web", &endpoints(0..1))]);
    assert!(again.operations.iter().all(|(operation, _)| !matches!(operation, Operation::AddRule { .. })));
    assert_eq!((chains(&world), verdicts(&world)), (99, 65), "its chain was still there");
    let (state, table) = world.installed.get_mut(&IPv4).unwrap();
    apply(table, &state.sweep()).unwrap();
    world.check();
    assert_eq!((chains(&world), verdicts(&world)), (65, 65));
    // With affinity one chain leads to another.
    for size in 1..100 {
        world.count(&spec(&json!({"sessionAffinity": "ClientIP"})), 0..size);
    }
    let (state, table) = world.installed.get_mut(&IPv4).unwrap();
    apply(table, &state.sweep()).unwrap();
    world.check();
}

fn packet(source: &str, destination: &str, port: u16) -> Packet {
    Packet {
        interface: Some("eth0".into()),
        source: source.parse().unwrap(),
        source_is_local: false,
        destination: destination.parse().unwrap(),
        destination_is_local: destination == "192.168.0.1",
        protocol: crate::model::Protocol::Tcp,
        port,
    }
}

/// The last number of the endpoints that a client may get, with what is remembered of it then.
fn served(table: &Ruleset, packet: &Packet, clients: &Clients) -> Vec<(u8, Clients)> {
    let served = ends(table, packet, clients).into_iter().map(|(verdict, clients)| {
        let Verdict::Forward(hops) = verdict else { panic!("{verdict:?}") };
        let Hop { address: IpAddr::V4(address), .. } = hops[0] else { panic!() };
        (address.octets()[3], clients)
    });
    served.collect()
}

fn numbers(served: &[(u8, Clients)]) -> Vec<u8> {
    let mut numbers: Vec<u8> = served.iter().map(|(number, _)| *number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

// ids: AFF-5 AFF-7
#[test]
fn aff_a_client_stays_with_its_endpoint_through_all_frontends_changes_and_a_restart() {
    let sticky = spec(&json!({"sessionAffinity": "ClientIP"}));
    let mut world = World::new();
    world.count(&sticky, [1, 2, 101, 102]);
    let through = [
        packet("203.0.113.7", CLUSTER_IP, 80),
        packet("203.0.113.7", "198.51.100.1", 80),
        packet("203.0.113.7", "192.168.0.1", 30080),
    ];
    let other = packet("203.0.113.8", CLUSTER_IP, 80);
    let first = served(world.table(), &through[0], &Clients::new());
    assert_eq!(numbers(&first), [1, 2, 101, 102]);
    let stays = |table: &Ruleset, alive: &[u8]| {
        for (number, clients) in &first {
            for packet in &through {
                let again = served(table, packet, clients);
                if alive.contains(number) {
                    assert_eq!(again, [(*number, clients.clone())]);
                } else {
                    assert_eq!(numbers(&again), alive, "its endpoint is gone: it may get any");
                    assert!(
                        again
                            .iter()
                            .all(|(number, clients)| numbers(&served(table, packet, clients)) == [*number])
                    );
                }
            }
            assert_eq!(numbers(&served(table, &other, clients)), alive, "another client is not bound");
        }
    };
    stays(world.table(), &[1, 2, 101, 102]);
    world.count(&sticky, [1, 2, 101, 102, 103]);
    stays(world.table(), &[1, 2, 101, 102, 103]);
    world.count(&sticky, [2, 102, 103]);
    stays(world.table(), &[2, 102, 103]);
    let plan = &world.cluster.plan;
    let (_, table) = adopt(plan, IPv4, world.table().clone());
    assert_eq!(table, *world.table());
    stays(&table, &[2, 102, 103]);
}

// ids: AFF-9
#[test]
fn aff_policy_local_moves_a_client_only_if_its_endpoint_is_elsewhere() {
    let sticky = |local: bool| {
        let policy = if local { "Local" } else { "Cluster" };
        spec(&json!({"sessionAffinity": "ClientIP", "externalTrafficPolicy": policy}))
    };
    let mut world = World::new();
    world.count(&sticky(false), [1, 2, 101]);
    let inside = packet("203.0.113.7", CLUSTER_IP, 80);
    let outside = packet("203.0.113.7", "198.51.100.1", 80);
    let first = served(world.table(), &inside, &Clients::new());
    world.count(&sticky(true), [1, 2, 101]);
    for (number, clients) in first {
        let expected = if number < 100 { vec![number] } else { vec![1, 2] };
        assert_eq!(numbers(&served(world.table(), &outside, &clients)), expected);
    }
}

#[test]
fn aff_clients_that_find_the_map_full_are_served_all_the_same() {
    let mut world = World::new();
    world.count(&spec(&json!({"sessionAffinity": "ClientIP"})), [1, 2, 3]);
    let mut table = world.table().clone();
    table.sets.get_mut(fixed::AFFINITY).unwrap().size = Some(1);
    let (_, full) = served(&table, &packet("203.0.113.7", CLUSTER_IP, 80), &Clients::new()).swap_remove(0);
    let second = served(&table, &packet("203.0.113.8", CLUSTER_IP, 80), &full);
    assert_eq!(numbers(&second), [1, 2, 3]);
    assert!(second.iter().all(|(_, clients)| *clients == full), "without being remembered");
}

#[test]
fn a_packet_whose_index_vanishes_between_two_lookups_is_served_all_the_same() {
    for (affinity, indices) in [("None", fixed::ENDPOINTS), ("ClientIP", fixed::SLOTS)] {
        let mut world = World::new();
        world.count(&spec(&json!({"sessionAffinity": affinity})), [1, 2, 3]);
        // It took the class of three before a commit, and looks index 2 up after it.
        let mut table = world.table().clone();
        let gone = Tuple::new().protocol(6).word(word::PORTS.0 << 1).word(2);
        assert!(table.elements.get_mut(indices).unwrap().remove(&gone).is_some());
        let served = served(&table, &packet("203.0.113.7", CLUSTER_IP, 80), &Clients::new());
        assert_eq!(numbers(&served), [1, 2]);
    }
}

#[test]
fn a_new_declaration_replaces_the_table_at_once() {
    let mut world = World::new();
    world.count(&spec(&json!({})), [1, 2]);
    let (state, table) = world.installed.remove(&IPv4).unwrap();
    let mut old = table.clone();
    old.sets.get_mut(fixed::AFFINITY).unwrap().size = Some(20);
    old.add_chain(crate::nftables::ruleset::Chain::new("left"), []);
    repair(&state, &mut old);
    assert_eq!(old, table);
}

#[test]
fn families_have_tables_of_their_own() {
    for family in [IpFamily::IPv4, IpFamily::IPv6] {
        let world = World::new();
        let (state, _): &(State, Ruleset) = &world.installed[&family];
        let resets = state.full().chains["filter-forward"].rules.len();
        assert_eq!(resets, if family == IPv4 { 2 } else { 3 }, "IPv6 resets the word itself");
    }
}

/// The example of docs/adr/0012.
#[test]
fn worked_example() {
    let mut world = World::new();
    let cluster_ip = |last: u8, extra: Value| {
        let ports = json!([{"name": "p", "protocol": "TCP", "port": 80}]);
        let mut spec = json!({"clusterIPs": [format!("10.96.0.{last}")], "ports": ports});
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        spec
    };
    let web = json!({"externalTrafficPolicy": "Local", "loadBalancerSourceRanges": ["203.0.113.0/25"]});
    world.step([service_applied("web", &spec(&web)), slice_applied("web", &endpoints([1, 101]))]);
    let cart = cluster_ip(2, json!({"sessionAffinity": "ClientIP"}));
    world.step([service_applied("cart", &cart), slice_applied("cart", &endpoints([1, 101]))]);
    world.step([service_applied("empty", &cluster_ip(3, json!({})))]);
    insta::assert_snapshot!(text::ruleset(world.table()));
}

#[test]
fn a_table_of_a_kernel_that_cannot_count_follows_without() {
    let mut world = World::new();
    world.count(&spec(&json!({})), 1..8);
    let cluster = &mut world.cluster;
    let mut config = cluster.plan.config().clone();
    assert!(!config.nftables.counters);
    config.nftables.counters = true;
    let changes = cluster.plan.configure(config, &cluster.model);
    let (state, _) = world.installed.get_mut(&IPv4).unwrap();
    assert!(state.advance(&cluster.plan, &changes).is_empty() && !state.counts());
}
