use proptest::prelude::*;
use serde_json::{Value, json};

use super::random::{Dice, FAMILIES, change, config, random_config, start};
use super::*;
use crate::model::Change;

/// A node, with one Service that has whatever the test says. What packets get is said by `tests/scenarios`.
struct World {
    model: Model,
    plan: Plan,
}

impl World {
    fn new(spec: &Value, endpoints: &Value) -> Self {
        let mut world = Self { model: Model::new(), plan: Plan::new(config(), &FAMILIES) };
        for change in start() {
            world.apply(change);
        }
        world.service("web", spec);
        world.slice("web", endpoints);
        world
    }

    fn apply(&mut self, change: Change) -> Changes {
        let dirty = self.model.apply(change);
        assert_eq!(dirty.skipped, []);
        self.plan.update(&self.model, dirty)
    }

    fn service(&mut self, name: &str, spec: &Value) -> Changes {
        self.apply(random::service_applied(name, spec))
    }

    fn slice(&mut self, service: &str, endpoints: &Value) -> Changes {
        self.apply(random::slice_applied(service, endpoints))
    }

    fn annotated_slice(&mut self, service: &str, endpoints: &Value, annotations: &Value) -> Changes {
        let mut change = random::slice_applied(service, endpoints);
        if let Change::SliceApplied(slice) = &mut change {
            slice.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        }
        self.apply(change)
    }

    /// Last bytes of the endpoints for policy Cluster and for policy Local.
    fn sets(&self) -> (Vec<u8>, Vec<u8>) {
        let port = self.plan.ports(IpFamily::IPv4).next().map(|(_, port)| port.clone()).unwrap();
        let last = |backends: &[Backend]| -> Vec<u8> {
            let bytes = backends.iter().map(|backend| match backend.address {
                std::net::IpAddr::V4(address) => address.octets()[3],
                std::net::IpAddr::V6(address) => address.octets()[15],
            });
            bytes.collect()
        };
        (last(&port.cluster), last(&port.local))
    }
}

const CLUSTER_IP: &str = "10.96.0.10";

fn spec() -> Value {
    json!({"clusterIPs": [CLUSTER_IP], "ports": [{"name": "p", "port": 80}]})
}

/// Endpoints by last byte: below 100 on this node, others elsewhere.
fn eps(lows: &[u8]) -> Value {
    let endpoint = |low: &u8| {
        let node = if *low < 100 { "node" } else { "other" };
        json!({"addresses": [format!("10.244.0.{low}")], "nodeName": node})
    };
    lows.iter().map(endpoint).collect()
}

// ids: TOP-29 TOP-30
#[test]
fn a_port_holds_no_endpoints_that_nothing_uses() {
    let both = eps(&[1, 102]);
    for (patch, expected) in [
        (json!({}), (vec![1, 102], vec![])),
        (json!({"internalTrafficPolicy": "Local"}), (vec![], vec![1])),
        (json!({"externalTrafficPolicy": "Local"}), (vec![1, 102], vec![])),
        (json!({"internalTrafficPolicy": "Local", "externalIPs": ["198.51.100.9"]}), (vec![1, 102], vec![1])),
        (json!({"externalTrafficPolicy": "Local", "externalIPs": ["198.51.100.9"]}), (vec![1, 102], vec![1])),
    ] {
        let mut spec = spec();
        spec.as_object_mut().unwrap().extend(patch.as_object().unwrap().clone());
        assert_eq!(World::new(&spec, &both).sets(), expected, "{patch}");
    }
}

// ids: TRK-4
#[test]
fn changes_that_change_nothing_are_none() {
    let mut world = World::new(&spec(), &eps(&[2, 103]));
    assert!(world.service("web", &spec()).is_empty());
    assert!(world.slice("web", &eps(&[103, 2])).is_empty(), "the order does not matter");
    let mut more = eps(&[103, 2, 104]);
    more[2]["conditions"] = json!({"ready": false, "serving": false});
    assert!(world.slice("web", &more).is_empty(), "nor do those that do not answer");
    let annotated = json!({"example.com/note": "x"});
    assert!(
        world.annotated_slice("web", &eps(&[103, 2]), &annotated).is_empty(),
        "nor what people write on them"
    );
    let weight = json!({"pointsman.dev/weight": "7"});
    assert_eq!(world.annotated_slice("web", &eps(&[103, 2]), &weight).ports.len(), 1, "but for a weight");
    assert_eq!(world.slice("web", &eps(&[103])).ports.len(), 1);
    assert_eq!((world.plan.services(), world.plan.endpoints()), (1, 1));
}

// ids: CIP-16
#[test]
fn services_of_another_proxy_are_not_counted() {
    let mut world = World::new(&spec(), &eps(&[2]));
    let mut labelled = spec();
    labelled["labels"] = json!({"service.kubernetes.io/service-proxy-name": "other"});
    assert!(!world.service("web", &labelled).is_empty());
    assert_eq!((world.plan.services(), world.plan.endpoints()), (0, 0));
}

#[test]
fn who_takes_over_an_address_is_planned_at_once() {
    let external = |ip: &str| json!({"clusterIPs": [ip], "externalIPs": ["198.51.100.9"], "ports": [{"name": "p", "port": 80}]});
    let mut world = World::new(&external(CLUSTER_IP), &eps(&[2]));
    world.service("zzz", &external("10.96.0.11"));
    let changes = world.apply(Change::ServiceDeleted(ObjectName::new("ns", "web")));
    assert_eq!(changes.services().len(), 2);
}

// ids: NM-2
#[test]
fn a_node_without_addresses_serves_what_needs_none() {
    let mut world = World::new(&spec(), &eps(&[2]));
    let facts = world.model.node().clone();
    world.apply(Change::Node(crate::model::NodeFacts { addresses: Vec::new(), ..facts.clone() }));
    let node = world.plan.node(IpFamily::IPv4).unwrap();
    assert_eq!((node.primary, node.node_ports.all, node.node_ports.addresses.len()), (None, false, 0));
    assert_eq!(world.sets().0, [2]);
    let changes = world.apply(Change::Node(facts));
    assert_eq!(changes.nodes.len(), 2, "both families follow");
    assert_eq!(world.plan.node(IpFamily::IPv4).unwrap().node_ports.addresses.len(), 1);
}

// ids: TRK-5
#[test]
fn the_time_of_the_cause_is_reported_once() {
    const KEY: &str = "endpoints.kubernetes.io/last-change-trigger-time";
    let mut world = World::new(&spec(), &json!([]));
    let at = |second: u8| json!({KEY: format!("2026-11-29T12:00:0{second}.5Z")});
    let times = |changes: &Changes| -> Vec<String> {
        changes.triggered.iter().map(|(_, time)| time.0.to_string()).collect()
    };
    assert_eq!(times(&world.annotated_slice("web", &eps(&[2]), &at(1))), ["2026-11-29T12:00:01.5Z"]);
    assert!(times(&world.annotated_slice("web", &eps(&[2]), &at(1))).is_empty(), "the same again");
    assert_eq!(times(&world.annotated_slice("web", &eps(&[2, 3]), &at(2))), ["2026-11-29T12:00:02.5Z"]);
    assert!(times(&world.annotated_slice("web", &eps(&[3]), &json!({}))).is_empty(), "nothing said");
    assert!(
        times(&world.annotated_slice("web", &eps(&[4]), &json!({KEY: "yesterday"}))).is_empty(),
        "nonsense"
    );
    let gone = world.apply(Change::SliceDeleted(ObjectName::new("ns", "web")));
    assert!(times(&gone).is_empty(), "nobody says when a slice was deleted");
    assert_eq!(times(&world.annotated_slice("web", &eps(&[2]), &at(3))), ["2026-11-29T12:00:03.5Z"]);
}

// ids: TRK-3
#[test]
fn nothing_is_left_after_everything_is_gone() {
    let mut world = World::new(&spec(), &eps(&[2]));
    for round in 0..50 {
        for name in ["web", "other"] {
            let mut spec = spec();
            spec["externalIPs"] = json!([format!("198.51.100.{round}"), "198.51.100.200"]);
            spec["type"] = json!("NodePort");
            spec["ports"][0]["nodePort"] = json!(30_000 + round);
            world.service(name, &spec);
            world.slice(name, &eps(&[2, 103]));
        }
        for name in ["web", "other"] {
            world.apply(Change::SliceDeleted(ObjectName::new("ns", name)));
            world.apply(Change::ServiceDeleted(ObjectName::new("ns", name)));
        }
        assert_eq!((world.plan.services(), world.plan.endpoints()), (0, 0));
        assert!(world.plan.ports.is_empty() && world.plan.claims.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // ids: SYN-20 SYN-14
    #[test]
    fn an_incremental_plan_is_the_plan_from_scratch_in_any_order(
        seeds in proptest::collection::vec(any::<u64>(), 1..150),
        shuffle in any::<u64>(),
    ) {
        let (mut model, mut plan) = (Model::new(), Plan::new(config(), &FAMILIES));
        let mut last = BTreeMap::new();
        let mut settings = config();
        for change in start().into_iter().chain(seeds.iter().map(|seed| change(*seed))) {
            last.insert(subject(&change), change.clone());
            let dirty = model.apply(change);
            plan.update(&model, dirty);
        }
        if shuffle % 3 == 0 {
            settings = random_config(&mut Dice::new(shuffle));
            plan.configure(settings.clone(), &model);
        }
        // Only what was last said of each object, in another order, planned at once.
        let mut order: Vec<Change> = last.into_values().collect();
        let mut dice = Dice::new(shuffle);
        order.sort_by_cached_key(|_| dice.roll(1 << 30));
        let (mut other, mut dirty) = (Model::new(), Dirty::default());
        for change in order {
            dirty.merge(other.apply(change));
        }
        dirty.everything = true;
        let mut scratch = Plan::new(settings, &FAMILIES);
        scratch.update(&other, dirty);
        prop_assert_eq!(&plan.nodes, &scratch.nodes);
        prop_assert_eq!(&plan.ports, &scratch.ports);
        prop_assert_eq!(&plan.health_checks, &scratch.health_checks);
        prop_assert_eq!(&plan.conflicts, &scratch.conflicts);
        prop_assert_eq!(FAMILIES.map(|family| plan.no_local(family)), FAMILIES.map(|family| scratch.no_local(family)));
        prop_assert_eq!((plan.services(), plan.endpoints()), (scratch.services(), scratch.endpoints()));
        let endpoints: usize = plan.ports.values().map(|port| port.endpoints()).sum();
        prop_assert_eq!(plan.endpoints(), endpoints);
    }
}

/// Which object a change is about.
fn subject(change: &Change) -> String {
    match change {
        Change::ServiceApplied(service) => format!("service {}", ObjectName::of(&service.metadata)),
        Change::ServiceDeleted(name) => format!("service {name}"),
        Change::SliceApplied(slice) => format!("slice {}", ObjectName::of(&slice.metadata)),
        Change::SliceDeleted(name) => format!("slice {name}"),
        Change::Node(_) => "node".to_owned(),
        Change::ServiceCidrs(_) => "cidrs".to_owned(),
        Change::LocalAddresses(_) => "addresses".to_owned(),
    }
}
