use pointsman_crds::settings::NodePortAddress;
use serde_json::{Value, json};

use super::random::config;
use super::*;
use crate::model::{Change, NodeFacts};

const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

struct World {
    model: Model,
    plan: Plan,
}

impl World {
    /// A node with an address of each family, and two more of IPv4, one of them a load balancer's.
    fn new(node_port_addresses: &[&str]) -> Self {
        let mut config = config();
        config.node_port_addresses =
            node_port_addresses.iter().map(|entry| NodePortAddress((*entry).to_owned())).collect();
        let mut world = Self { model: Model::new(), plan: Plan::new(config, &FAMILIES) };
        world.apply(Change::Node(NodeFacts {
            name: "n1".to_owned(),
            addresses: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            ..NodeFacts::default()
        }));
        let own = ["127.0.0.1", "192.0.2.1", "10.0.0.1", "2001:db8::1", "fe80::1", "::1"];
        world.apply(Change::LocalAddresses(own.iter().map(|address| address.parse().unwrap()).collect()));
        world
    }

    fn apply(&mut self, change: Change) -> Changes {
        let dirty = self.model.apply(change);
        self.plan.update(&self.model, dirty)
    }

    fn service(&mut self, name: &str, spec: &Value) -> Changes {
        let service = json!({
            "metadata": {"namespace": "ns", "name": name}, "spec": spec,
            "status": {"loadBalancer": {"ingress": [{"ip": spec["loadBalancerIP"]}]}},
        });
        self.apply(Change::ServiceApplied(Box::new(serde_json::from_value(service).unwrap())))
    }

    /// Endpoints: `L` here or `R` elsewhere, the last byte, `r` ready, `t` terminating and serving, `n` neither.
    fn slice(&mut self, service: &str, name: &str, port: &str, endpoints: &[&str]) -> Changes {
        let endpoints: Vec<Value> = endpoints
            .iter()
            .map(|text| {
                let [place, low, state] = text.split(' ').collect::<Vec<_>>()[..] else { panic!("{text}") };
                json!({
                    "addresses": [format!("10.244.0.{low}")],
                    "nodeName": if place == "L" { "n1" } else { "n2" },
                    "conditions": {"ready": state == "r", "serving": state != "n", "terminating": state == "t"},
                })
            })
            .collect();
        let slice = json!({
            "metadata": {"namespace": "ns", "name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "ports": [{"name": port, "port": 8080, "protocol": "TCP"}],
            "endpoints": endpoints,
        });
        self.apply(Change::SliceApplied(Box::new(serde_json::from_value(slice).unwrap())))
    }

    fn check(&self, name: &str) -> Option<&HealthCheck> {
        self.plan.health_check(&ObjectName::new("ns", name))
    }

    fn listen(&self, name: &str) -> Vec<String> {
        self.check(name).unwrap().listen.iter().map(ToString::to_string).collect()
    }

    fn count(&self, name: &str) -> usize {
        self.check(name).unwrap().local_endpoints[&IpFamily::IPv4]
    }
}

fn balanced(number: u16, last: u8) -> Value {
    json!({
        "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": number,
        "clusterIPs": [format!("10.96.0.{last}"), format!("fd00:96::{last}")],
        "loadBalancerIP": format!("198.51.100.{}", 3 + last),
        "ports": [{"name": "p", "port": 80, "nodePort": 30000 + u16::from(last)}],
    })
}

#[test]
fn hc_4_listens_where_node_ports_answer_and_at_the_load_balancer() {
    for (entries, expected) in [
        (&["all"][..], &["0.0.0.0:32000", "[::]:32000"][..]),
        (&["0.0.0.0/0", "::/0"], &["0.0.0.0:32000", "[::]:32000"]),
        (&["primary"], &["192.0.2.1:32000", "198.51.100.4:32000", "[2001:db8::1]:32000"]),
        // The other family is what it is without an entry of its own: primary.
        (&["127.0.0.0/8"], &["127.0.0.1:32000", "198.51.100.4:32000", "[2001:db8::1]:32000"]),
        (&["localhost"], &["127.0.0.1:32000", "198.51.100.4:32000", "[::1]:32000"]),
        (&["10.0.0.0/8", "fe80::/10"], &["10.0.0.1:32000", "198.51.100.4:32000"]),
    ] {
        let mut world = World::new(entries);
        world.service("web", &balanced(32000, 1));
        assert_eq!(world.listen("web"), expected, "{entries:?}");
    }
}

#[test]
fn hc_1_a_check_comes_and_goes_with_the_service_and_counts_its_ready_endpoints_here() {
    let mut world = World::new(&["primary"]);
    let unknown = world.slice("web", "web-1", "p", &["L 1 r"]);
    assert!(unknown.health_checks.is_empty() && world.check("web").is_none(), "of an unknown Service");
    world.apply(Change::SliceDeleted(ObjectName::new("ns", "web-1")));

    let added = world.service("web", &balanced(32000, 1));
    assert_eq!(added.health_checks.len(), 1);
    assert_eq!(world.count("web"), 0);
    let many: Vec<String> = (1..=18).map(|low| format!("L {low} r")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let changed = world.slice("web", "web-1", "p", &many);
    assert_eq!((changed.health_checks.len(), world.count("web")), (1, 18));
    assert_eq!(world.check("web").unwrap().local_endpoints[&IpFamily::IPv6], 0, "each family for itself");
    world.slice("web", "web-1", "p", &[]);
    assert_eq!(world.count("web"), 0);
    world.slice("web", "web-1", "p", &many);
    world.apply(Change::SliceDeleted(ObjectName::new("ns", "web-1")));
    assert_eq!(world.count("web"), 0);

    let gone = world.apply(Change::ServiceDeleted(ObjectName::new("ns", "web")));
    assert_eq!(gone.health_checks.len(), 1);
    assert!(world.check("web").is_none());
    assert_eq!(world.plan.health_checked().count(), 0);
}

#[test]
fn hc_2_three_services_change_at_once_and_only_those_that_changed_are_told() {
    let mut world = World::new(&["primary"]);
    for (name, last) in [("a", 1), ("b", 2), ("c", 3)] {
        world.service(name, &balanced(32000 + u16::from(last), last));
        world.slice(name, &format!("{name}-1"), "p", &["L 1 r"]);
    }
    let mut changed = world.apply(Change::ServiceDeleted(ObjectName::new("ns", "a")));
    changed.merge(world.service("b", &balanced(32002, 2)));
    changed.merge(world.service("c", &balanced(32009, 3)));
    changed.merge(world.service("d", &balanced(32004, 4)));
    let told: Vec<String> = changed.health_checks.iter().map(ToString::to_string).collect();
    assert_eq!(told, ["ns/a", "ns/c", "ns/d"]);
    assert!(world.listen("c").contains(&"192.0.2.1:32009".to_owned()));
    assert_eq!(world.count("c"), 1, "the endpoints have not changed");
    assert_eq!(world.count("d"), 0);
}

// ids: TRM-14 TRK-10
#[test]
fn trm_14_endpoints_that_end_count_for_nothing_though_they_serve_and_addresses_count_once() {
    for (endpoints, expected) in [
        (&["L 1 r", "L 2 r"][..], 2),
        (&["L 1 r", "R 2 r"], 1),
        (&["R 1 r"], 0),
        (&["L 1 t", "L 2 t"], 0),
        (&["L 1 r", "L 2 n"], 1),
    ] {
        let mut world = World::new(&["primary"]);
        world.service("web", &balanced(32000, 1));
        world.slice("web", "web-1", "p", endpoints);
        assert_eq!(world.count("web"), expected, "{endpoints:?}");
    }
    let mut world = World::new(&["primary"]);
    world.service("web", &balanced(32000, 1));
    world.slice("web", "web-1", "p", &["L 1 r", "L 2 t"]);
    world.slice("web", "web-2", "q", &["L 1 r", "L 2 r"]);
    assert_eq!(world.count("web"), 2, "the same addresses, and of each the copy that is ready");

    // TRM-12: traffic goes on to the one that ends, so the rules stay; only the check changes.
    let mut world = World::new(&["primary"]);
    world.service("web", &balanced(32000, 1));
    world.slice("web", "web-1", "p", &["L 1 r"]);
    let ending = world.slice("web", "web-1", "p", &["L 1 t"]);
    assert_eq!(world.count("web"), 0);
    assert!(!ending.health_checks.is_empty());
    assert_eq!(world.plan.ports(IpFamily::IPv4).next().unwrap().1.external, Target::Local);
}

#[test]
fn only_load_balancers_with_policy_local_are_checked() {
    let mut world = World::new(&["primary"]);
    let mut spec = balanced(32000, 1);
    spec["externalTrafficPolicy"] = json!("Cluster");
    world.service("web", &spec);
    assert!(world.check("web").is_none());
    // Without NodePorts and before the balancer has an address, too.
    let mut spec = balanced(32000, 1);
    spec["ports"][0]["nodePort"] = Value::Null;
    world.service("web", &spec);
    world.slice("web", "web-1", "p", &["L 1 r"]);
    assert_eq!(world.count("web"), 1);
    let mut spec = balanced(32000, 1);
    spec["type"] = json!("NodePort");
    world.service("web", &spec);
    assert!(world.check("web").is_none());
}

#[test]
fn noe_4_local_policies_without_local_endpoints_are_counted() {
    for (internal, external, endpoints, expected) in [
        ("Local", "Cluster", &["L 1 r"][..], (0, 0)),
        ("Local", "Cluster", &["R 1 r"], (1, 0)),
        ("Cluster", "Local", &["L 1 r"], (0, 0)),
        ("Cluster", "Local", &["R 1 r"], (0, 1)),
        ("Local", "Local", &["L 1 r"], (0, 0)),
        ("Local", "Local", &["R 1 r"], (1, 1)),
        ("Local", "Local", &[], (0, 0)),
    ] {
        let mut world = World::new(&["primary"]);
        let mut spec = balanced(32000, 1);
        spec["internalTrafficPolicy"] = json!(internal);
        spec["externalTrafficPolicy"] = json!(external);
        world.service("web", &spec);
        world.slice("web", "web-1", "p", endpoints);
        let counted = world.plan.no_local(IpFamily::IPv4);
        let what = format!("{internal} {external} {endpoints:?}");
        assert_eq!((counted.internal, counted.external), expected, "{what}");
        world.apply(Change::ServiceDeleted(ObjectName::new("ns", "web")));
        assert_eq!(world.plan.no_local(IpFamily::IPv4), NoLocal::default(), "{what}");
    }
}

#[test]
fn a_frontend_that_two_services_name_is_told_once_to_the_one_that_loses_it() {
    let mut world = World::new(&["primary"]);
    let spec = |last: u8, port: u16| {
        json!({
            "clusterIPs": [format!("10.96.0.{last}")], "externalIPs": ["198.51.100.9"],
            "ports": [{"name": "p", "port": port}],
        })
    };
    let told = |changes: Changes| -> Vec<String> {
        changes
            .conflicts
            .into_iter()
            .map(|lost| format!("{} {}: {}", lost.kind, lost.name, lost.reason))
            .collect()
    };
    assert_eq!(told(world.service("b", &spec(2, 80))), [""; 0]);
    let news = told(world.service("a", &spec(1, 80)));
    assert_eq!(
        news,
        ["Service ns/b: 198.51.100.9:80/TCP belongs to Service ns/a and is not served for this one"],
        "the first by name has it, whoever came first"
    );
    assert_eq!(world.plan.conflicts(), 1);
    world.slice("b", "b-1", "p", &["L 1 r"]);
    assert_eq!(told(world.slice("b", "b-1", "p", &["L 2 r"])), [""; 0], "no news");
    world.service("a", &spec(1, 81));
    assert_eq!(world.plan.conflicts(), 0);
    assert_eq!(told(world.service("a", &spec(1, 80))).len(), 1, "again");
    world.apply(Change::ServiceDeleted(ObjectName::new("ns", "b")));
    assert_eq!(world.plan.conflicts(), 0);
}
