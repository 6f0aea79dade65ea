use std::net::IpAddr;

use pointsman_crds::node_config::NodeDetectLocal;
use pointsman_crds::settings::NodePortAddress;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::random::{Dice, FAMILIES, change, config, random_config, start};
use super::*;
use crate::model::{Change, NodeFacts, Protocol};

/// A node in zone a, with one Service that has whatever the test says.
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

    fn zone(&mut self, zone: Option<&str>) {
        let facts = NodeFacts { zone: zone.map(ToOwned::to_owned), ..self.model.node().clone() };
        self.apply(Change::Node(facts));
    }

    fn port(&self) -> &PortPlan {
        self.plan.ports(IpFamily::IPv4).next().map(|(_, port)| &**port).unwrap()
    }

    fn cluster(&self) -> Vec<u8> {
        last_bytes(&self.port().cluster)
    }

    fn local(&self) -> Vec<u8> {
        last_bytes(&self.port().local)
    }

    /// Where a packet goes: last byte of each endpoint's address, and whether it is masqueraded.
    fn route(&self, from: Client, to: &str, port: u16) -> String {
        let (interface, source) = match from {
            Client::Pod => (Some("cni0"), "10.244.0.99"),
            Client::Node => (None, "192.168.0.1"),
            Client::Localhost => (None, "127.0.0.1"),
            Client::Outside => (Some("eth0"), "203.0.113.7"),
            Client::Address(source) => (Some("eth0"), source),
        };
        let destination: IpAddr = to.parse().unwrap();
        let verdict = self.plan.route(&Packet {
            interface: interface.map(ToOwned::to_owned),
            source: source.parse().unwrap(),
            source_is_local: interface.is_none(),
            destination,
            destination_is_local: destination.is_loopback()
                || self.model.local_addresses().contains(&destination),
            protocol: Protocol::Tcp,
            port,
        });
        match verdict {
            Verdict::Forward(hops) => {
                let ends: Vec<String> = hops.iter().map(|hop| last_byte(hop.address).to_string()).collect();
                let masked = hops.iter().filter(|hop| hop.masquerade).count();
                let how = if masked == hops.len() { "masq" } else { "raw" };
                assert!(masked == 0 || masked == hops.len());
                format!("{} {how}", ends.join(","))
            }
            other => format!("{other:?}"),
        }
    }
}

#[derive(Clone, Copy)]
enum Client {
    Pod,
    Node,
    Localhost,
    Outside,
    Address(&'static str),
}
use Client::{Localhost, Node, Outside, Pod};

fn last_byte(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(address) => address.octets()[15],
    }
}

fn last_bytes(backends: &[Backend]) -> Vec<u8> {
    backends.iter().map(|backend| last_byte(backend.address)).collect()
}

const CLUSTER_IP: &str = "10.96.0.10";
const VIP: &str = "198.51.100.4";

fn balanced(internal: &str, external: &str) -> Value {
    json!({
        "type": "LoadBalancer",
        "clusterIPs": [CLUSTER_IP],
        "externalIPs": ["198.51.100.9"],
        "internalTrafficPolicy": internal,
        "externalTrafficPolicy": external,
        "ports": [{"name": "p", "port": 80, "nodePort": 30080}],
        "status": {"loadBalancer": {"ingress": [{"ip": VIP}]}},
    })
}

fn internal_only(policy: &str) -> Value {
    json!({"clusterIPs": [CLUSTER_IP], "internalTrafficPolicy": policy, "ports": [{"name": "p", "port": 80}]})
}

/// An endpoint: `L` local or `R` remote; its last byte; `r` ready, `s` serving, `t` terminating; zones; nodes.
fn ep(text: &str) -> Value {
    let mut words = text.split(' ');
    let (place, low, state) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    let local = place == "L";
    let mut endpoint = json!({
        "addresses": [format!("10.244.{}.{low}", u8::from(!local))],
        "nodeName": if local { "node" } else { "other" },
        "conditions": {
            "ready": state.contains('r'), "serving": state.contains('s'), "terminating": state.contains('t'),
        },
    });
    for word in words {
        let (kind, names) = word.split_once('=').unwrap();
        let key = if kind == "z" { "forZones" } else { "forNodes" };
        let names: Vec<Value> = names.split(',').map(|name| json!({"name": name})).collect();
        endpoint["hints"][key] = json!(names);
    }
    endpoint
}

fn eps(list: &[&str]) -> Value {
    list.iter().map(|text| ep(text)).collect()
}

/// What is tried, the node's zone, endpoints, the last bytes of those that are used.
type Case<'a> = (&'a str, Option<&'a str>, &'a [&'a str], &'a [u8]);

#[test]
fn top_1_to_13_hints_are_followed_only_if_everybody_has_them() {
    let all_zones = ["L 1 rs z=a", "R 2 rs z=b", "R 3 rs z=a", "R 4 rs z=b,a"];
    let cases: [Case<'_>; 11] = [
        ("1 and 10: same zone, also of several", Some("a"), &all_zones, &[1, 3, 4]),
        ("4: node without zone", None, &all_zones, &[1, 2, 3, 4]),
        ("6: nobody in the zone", Some("c"), &all_zones, &[1, 2, 3, 4]),
        ("7: unready ones do not count", Some("a"), &["L 1 s", "R 2 rs z=a", "R 3 rs z=b"], &[2]),
        ("8: only unready in the zone", Some("a"), &["L 1 s z=a", "R 2 rs z=b"], &[2]),
        ("9: one without a hint", Some("a"), &["L 1 rs z=a", "R 2 rs"], &[1, 2]),
        ("11: same node", Some("a"), &["L 1 rs z=a n=node", "R 2 rs z=a n=other"], &[1]),
        (
            "12: one without a node hint",
            Some("a"),
            &["L 1 rs z=a n=node", "R 2 rs z=a", "R 3 rs z=b"],
            &[1, 2],
        ),
        ("13: nobody for this node", Some("b"), &["L 1 rs z=a n=x", "R 2 rs z=b n=y"], &[2]),
        ("20: some ready", Some("a"), &["L 1 s", "R 2 rs"], &[2]),
        ("21: all terminating", Some("a"), &["L 1 st z=b", "R 2 st z=b"], &[1, 2]),
    ];
    for (what, zone, endpoints, expected) in cases {
        let mut world = World::new(&internal_only("Cluster"), &eps(endpoints));
        world.zone(zone);
        assert_eq!(world.cluster(), expected, "{what}");
        assert!(world.local().is_empty(), "{what}: nothing uses the local ones");
    }
}

#[test]
fn top_2_3_14_to_18_policy_local_ignores_hints() {
    let hinted = eps(&["L 1 rs z=b", "R 2 rs z=a"]);
    let world = World::new(&balanced("Cluster", "Local"), &hinted);
    assert_eq!((world.cluster(), world.local()), (vec![2], vec![1]));
    let world = World::new(&internal_only("Local"), &hinted);
    assert_eq!((world.cluster(), world.local()), (vec![], vec![1]), "30: no cluster set");
    for (endpoints, expected) in [
        (vec![], Target::Reject),
        (vec!["R 1 rs"], Target::Drop),
        (vec!["L 1 rs"], Target::Local),
        (vec!["L 1 rs", "R 2 rs"], Target::Local),
        (vec!["L 1 t", "R 2 x"], Target::Reject),
    ] {
        let world = World::new(&internal_only("Local"), &eps(&endpoints));
        assert_eq!(world.port().internal, expected, "{endpoints:?}");
    }
    let mut spec = internal_only("Cluster");
    spec["externalTrafficPolicy"] = json!("Local");
    let world = World::new(&spec, &eps(&["L 1 rs", "R 2 rs"]));
    assert_eq!((world.cluster(), world.local()), (vec![1, 2], vec![]), "29: not external");
}

#[test]
fn trm_1_to_9_terminating_endpoints_serve_when_nobody_else_does() {
    let cases: [(&str, &str, &[&str], &str, &str); 8] = [
        ("TRM-1", "Local", &["L 1 rs", "L 2 rs", "L 3 st", "L 4 t", "R 5 rs"], "1,2,5 raw", "1,2 raw"),
        ("TRM-2", "Local", &["L 1 st", "L 2 st", "L 3 t", "R 5 rs"], "5 raw", "1,2 raw"),
        ("TRM-3", "Local", &["R 5 st"], "5 raw", "Drop"),
        ("TRM-4", "Local", &["L 1 t", "R 5 t"], "Reject", "Reject"),
        ("TRM-5", "Cluster", &["L 1 rs", "L 2 rs", "R 5 rs", "L 3 st", "R 4 t"], "1,2,5 raw", "1,2,5 masq"),
        ("TRM-6", "Cluster", &["L 1 st", "L 2 st", "R 5 st", "L 3 t"], "1,2,5 raw", "1,2,5 masq"),
        ("TRM-7", "Cluster", &["R 5 st"], "5 raw", "5 masq"),
        ("TRM-8", "Cluster", &["R 5 t"], "Reject", "Reject"),
    ];
    for (id, policy, endpoints, internal, external) in cases {
        let mut world = World::new(&balanced("Cluster", policy), &eps(endpoints));
        assert_eq!(world.route(Pod, CLUSTER_IP, 80), internal, "{id}");
        assert_eq!(world.route(Outside, VIP, 80), external, "{id}");
        world.slice("web", &json!([]));
        assert_eq!(world.route(Outside, VIP, 80), "Reject", "TRM-9 after {id}");
    }
}

/// Rows: source, destination; columns: both policies Cluster, external Local, internal Local. L is 1, R is 2.
type Matrix = [(Client, &'static str, u16, [&'static str; 3]); 10];

const MATRIX: Matrix = [
    (Pod, CLUSTER_IP, 80, ["1,2 raw", "1,2 raw", "1 raw"]),
    (Pod, "192.168.0.1", 30080, ["1,2 masq", "1,2 raw", "1,2 masq"]),
    (Pod, VIP, 80, ["1,2 masq", "1,2 raw", "1,2 masq"]),
    (Node, CLUSTER_IP, 80, ["1,2 masq", "1,2 masq", "1 masq"]),
    (Node, "192.168.0.1", 30080, ["1,2 masq", "1,2 masq", "1,2 masq"]),
    (Localhost, "127.0.0.1", 30080, ["1,2 masq", "1,2 masq", "1,2 masq"]),
    (Node, VIP, 80, ["1,2 masq", "1,2 masq", "1,2 masq"]),
    (Outside, CLUSTER_IP, 80, ["1,2 masq", "1,2 masq", "1 masq"]),
    (Outside, "192.168.0.1", 30080, ["1,2 masq", "1 raw", "1,2 masq"]),
    (Outside, VIP, 80, ["1,2 masq", "1 raw", "1,2 masq"]),
];

#[test]
fn mq_thirty_flows_in_four_configurations() {
    let specs = [balanced("Cluster", "Cluster"), balanced("Cluster", "Local"), balanced("Local", "Cluster")];
    for (detector, all) in [(true, false), (false, false), (true, true), (false, true)] {
        for (column, spec) in specs.iter().enumerate() {
            let mut world = World::new(spec, &eps(&["L 1 rs", "R 2 rs"]));
            let mut config = config();
            config.masquerade.all = all;
            config.iptables.local_host(&mut config.node_port_addresses);
            if !detector {
                config.detect_local =
                    NodeDetectLocal::ClusterCIDR { cluster_cidrs: vec!["fd00::/8".parse().unwrap()] };
            }
            world.plan.configure(config, &world.model);
            for (client, to, port, columns) in MATRIX {
                let mut expected = columns[column].to_owned();
                if to == CLUSTER_IP {
                    let masked = all || (detector && !matches!(client, Pod));
                    expected = format!(
                        "{} {}",
                        expected.split(' ').next().unwrap(),
                        if masked { "masq" } else { "raw" }
                    );
                } else if !detector && matches!(client, Pod) && column == 1 {
                    expected = "1 raw".to_owned();
                }
                let case = format!("detector {detector}, all {all}, S{}, to {to}", column + 1);
                assert_eq!(world.route(client, to, port), expected, "{case}");
            }
        }
    }
}

trait LocalHost {
    fn local_host(&mut self, addresses: &mut Vec<NodePortAddress>);
}

impl LocalHost for pointsman_crds::node_config::NodeIptables {
    fn local_host(&mut self, addresses: &mut Vec<NodePortAddress>) {
        self.localhost_node_ports = true;
        *addresses = ["primary", "localhost"].map(|word| NodePortAddress(word.to_owned())).to_vec();
    }
}

#[test]
fn etp_8_without_local_endpoint_only_pods_and_the_node_pass() {
    let world = World::new(&balanced("Cluster", "Local"), &eps(&["R 2 rs"]));
    for (to, port) in [(VIP, 80), ("198.51.100.9", 80), ("192.168.0.1", 30080)] {
        assert_eq!(world.route(Outside, to, port), "Drop");
        assert_eq!(world.route(Pod, to, port), "2 raw");
        assert_eq!(world.route(Node, to, port), "2 masq");
    }
}

#[test]
fn cip_2_a_hairpin_is_masqueraded() {
    let world = World::new(&internal_only("Cluster"), &eps(&["L 99 rs"]));
    assert_eq!(world.route(Pod, CLUSTER_IP, 80), "99 masq");
    assert_eq!(world.route(Pod, CLUSTER_IP, 81), "Undefined");
}

#[test]
fn np_3_4_7_node_ports_answer_where_they_are_asked_to() {
    let cases: [(&[&str], bool, &[&str]); 8] = [
        (&["primary"], false, &["192.168.0.1"]),
        (&["all"], false, &["192.168.0.1", "10.244.0.1"]),
        (&["all"], true, &["192.168.0.1", "10.244.0.1", "127.0.0.1"]),
        (&["localhost"], true, &["127.0.0.1"]),
        (&["localhost"], false, &[]),
        (&["10.0.0.0/8"], false, &["10.244.0.1"]),
        (&["0.0.0.0/0"], false, &["192.168.0.1", "10.244.0.1"]),
        (&["fd00::/8"], false, &["192.168.0.1"]),
    ];
    for (addresses, localhost, expected) in cases {
        let mut world = World::new(&balanced("Cluster", "Cluster"), &eps(&["R 2 rs"]));
        let mut config = config();
        config.iptables.localhost_node_ports = localhost;
        config.node_port_addresses =
            addresses.iter().map(|entry| NodePortAddress((*entry).to_owned())).collect();
        world.plan.configure(config, &world.model);
        for to in ["192.168.0.1", "10.244.0.1", "127.0.0.1"] {
            let client = if to == "127.0.0.1" { Localhost } else { Outside };
            let answers = world.route(client, to, 30080) != "Untouched";
            assert_eq!(answers, expected.contains(&to), "{addresses:?}, localhost {localhost}: {to}");
        }
    }
}

#[test]
fn lb_2_4_and_sr_1_to_11_load_balancer_addresses_and_who_may_use_them() {
    let mut spec = balanced("Cluster", "Cluster");
    spec["status"] = json!({"loadBalancer": {"ingress": [
        {"ip": "198.51.100.004"}, {"ip": "198.51.100.5", "ipMode": "Proxy"}, {"ip": "198.51.100.6", "ipMode": "VIP"},
    ]}});
    spec["loadBalancerSourceRanges"] = json!(["192.168.9.0/24", " 203.0.113.0/25"]);
    let mut world = World::new(&spec, &eps(&["R 2 rs"]));
    for vip in [VIP, "198.51.100.6"] {
        assert_eq!(world.route(Outside, vip, 80), "2 masq", "SR-1");
        assert_eq!(world.route(Client::Address("203.0.113.200"), vip, 80), "Drop", "SR-2");
        assert_eq!(world.route(Pod, vip, 80), "Drop", "SR-4");
        assert_eq!(world.route(Client::Address(VIP), vip, 80), "Drop", "SR-6: the node is not in a range");
    }
    assert_eq!(world.route(Outside, "198.51.100.5", 80), "Untouched", "LB-2: ipMode Proxy");
    assert_eq!(world.route(Client::Address("203.0.113.200"), "192.168.0.1", 30080), "2 masq", "SR-3");
    assert_eq!(world.route(Pod, CLUSTER_IP, 80), "2 raw", "SR-7");
    spec["loadBalancerSourceRanges"] = json!(["192.168.0.0/24"]);
    world.service("web", &spec);
    assert_eq!(world.route(Node, VIP, 80), "2 masq", "SR-5");
    assert_eq!(world.route(Client::Address(VIP), "198.51.100.6", 80), "2 masq", "SR-5");
    for ranges in [json!(["0.0.0.0/0", "10.0.0.0/8"]), json!(["2001:db8::/32"]), json!([])] {
        spec["loadBalancerSourceRanges"] = ranges;
        world.service("web", &spec);
        assert_eq!(world.route(Outside, VIP, 80), "2 masq", "SR-8, SR-11");
    }
    world.slice("web", &json!([]));
    assert_eq!(world.route(Outside, VIP, 80), "Reject", "SR-9");
}

#[test]
fn cip_16_services_of_another_proxy_are_left_alone() {
    let mut world = World::new(&internal_only("Cluster"), &eps(&["R 2 rs"]));
    let mut labelled = internal_only("Cluster");
    labelled["labels"] = json!({"service.kubernetes.io/service-proxy-name": "other"});
    assert!(!world.service("web", &labelled).is_empty());
    assert_eq!(world.route(Pod, CLUSTER_IP, 80), "Untouched");
    assert_eq!((world.plan.services(), world.plan.endpoints()), (0, 0));
    let mut config = config();
    config.service_proxy_name = "other".into();
    world.plan.configure(config, &world.model);
    assert_eq!(world.route(Pod, CLUSTER_IP, 80), "2 raw");
}

#[test]
fn trk_changes_that_change_nothing_are_none() {
    let mut world = World::new(&internal_only("Cluster"), &eps(&["R 2 rs", "R 3 rs"]));
    assert!(world.service("web", &internal_only("Cluster")).is_empty());
    assert!(world.slice("web", &eps(&["R 3 rs", "R 2 rs"])).is_empty(), "the order does not matter");
    assert!(
        world.slice("web", &eps(&["R 3 rs", "R 2 rs", "R 4 x"])).is_empty(),
        "nor do those that do not answer"
    );
    assert_eq!(world.slice("web", &eps(&["R 3 rs"])).ports.len(), 1);
    assert_eq!((world.plan.services(), world.plan.endpoints()), (1, 1));
}

#[test]
fn two_services_with_the_same_external_ip_take_turns() {
    let mut world = World::new(&balanced("Cluster", "Cluster"), &eps(&["R 2 rs"]));
    let other = json!({
        "clusterIPs": ["10.96.0.11"], "externalIPs": ["198.51.100.9", CLUSTER_IP], "ports": [{"name": "p", "port": 80}],
    });
    world.service("zzz", &other);
    world.slice("zzz", &eps(&["R 3 rs"]));
    assert_eq!(world.route(Outside, "198.51.100.9", 80), "2 masq", "the first by name");
    assert_eq!(world.route(Pod, CLUSTER_IP, 80), "2 raw", "an external IP takes no ClusterIP");
    let changes = world.apply(Change::ServiceDeleted(ObjectName::new("ns", "web")));
    assert_eq!(changes.services().len(), 2, "the other takes over at once");
    assert_eq!(world.route(Outside, "198.51.100.9", 80), "3 masq");
}

#[test]
fn trk_the_time_of_the_cause_is_reported_once() {
    let mut world = World::new(&internal_only("Cluster"), &json!([]));
    let slice = json!({
        "metadata": {
            "namespace": "ns", "name": "web", "labels": {"kubernetes.io/service-name": "web"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-29T12:00:00.5Z"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "p", "port": 8080, "protocol": "TCP"}],
        "endpoints": eps(&["R 2 rs"]),
    });
    let slice: k8s_openapi::api::discovery::v1::EndpointSlice = serde_json::from_value(slice).unwrap();
    let first = world.apply(Change::SliceApplied(Box::new(slice.clone())));
    assert_eq!(first.triggered.len(), 1);
    assert_eq!(first.triggered[0].1.0.to_string(), "2026-11-29T12:00:00.5Z");
    assert!(world.apply(Change::SliceApplied(Box::new(slice))).triggered.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

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
