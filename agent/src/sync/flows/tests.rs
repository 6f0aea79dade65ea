use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::settings::{Mode, ProxySettings};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::model::{Change, Dirty, ObjectName};
use crate::plan::random::{Cluster, FAMILIES, change, start};

const FRONTEND: &str = "10.96.0.10:53";

/// One Service with a UDP port and a TCP port, and what looks after its flows.
struct World {
    model: Model,
    plan: Plan,
    flows: Flows,
    slices: BTreeSet<String>,
}

/// A slice: its name, its port's name and number, and endpoints by last byte with their state.
type Slice<'a> = (&'a str, &'a str, u16, &'a [&'a str]);

impl World {
    fn new() -> Self {
        let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
        let config = NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap();
        let mut world = Self {
            model: Model::new(),
            plan: Plan::new(config, &[IpFamily::IPv4]),
            flows: Flows::default(),
            slices: BTreeSet::new(),
        };
        let service = json!({
            "metadata": {"namespace": "ns", "name": "dns"},
            "spec": {"clusterIPs": ["10.96.0.10"], "ports": [
                {"name": "dns", "protocol": "UDP", "port": 53}, {"name": "tcp", "protocol": "TCP", "port": 53},
            ]},
        });
        world.apply(vec![Change::ServiceApplied(Box::new(serde_json::from_value(service).unwrap()))]);
        world
    }

    /// Whether the flows must be looked at after these changes, and what the frontend leads to then.
    fn apply(&mut self, changes: Vec<Change>) -> bool {
        let mut ports = BTreeSet::new();
        for change in changes {
            let dirty = self.model.apply(change);
            ports.extend(self.plan.update(&self.model, dirty).ports);
        }
        self.flows.follow(&self.plan, &self.model, &ports, |_, port| port.serving_sockets());
        let due = self.flows.due();
        let any = !due.is_empty();
        for job in due {
            self.flows.finished(job, true);
        }
        any
    }

    /// Makes the cluster have exactly these slices.
    fn slices(&mut self, slices: &[Slice<'_>]) -> bool {
        let mut changes = Vec::new();
        for (name, port, number, endpoints) in slices {
            changes.push(Change::SliceApplied(Box::new(slice(name, port, *number, endpoints))));
        }
        let names: BTreeSet<String> = slices.iter().map(|(name, ..)| (*name).to_owned()).collect();
        for gone in self.slices.difference(&names) {
            changes.push(Change::SliceDeleted(ObjectName::new("ns", gone.as_str())));
        }
        self.slices = names;
        self.apply(changes)
    }

    fn endpoints(&self) -> Vec<String> {
        let serving = self.plan.ports(IpFamily::IPv4).filter(|(id, _)| &*id.port == "dns");
        serving
            .flat_map(|(_, port)| &port.serving)
            .map(|backend| {
                let address = backend.address.to_string();
                format!("{}:{}", address.rsplit('.').next().unwrap(), backend.port)
            })
            .collect()
    }
}

fn slice(
    name: &str,
    port: &str,
    number: u16,
    endpoints: &[&str],
) -> k8s_openapi::api::discovery::v1::EndpointSlice {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|text| {
            let (low, state) = text.split_once(' ').unwrap_or((text, "ready"));
            let conditions = json!({
                "ready": state == "ready", "serving": state != "gone", "terminating": state != "ready",
            });
            json!({"addresses": [format!("10.244.1.{low}")], "conditions": conditions})
        })
        .collect();
    let protocol = if port == "tcp" { "TCP" } else { "UDP" };
    let object = json!({
        "metadata": {"namespace": "ns", "name": name, "labels": {"kubernetes.io/service-name": "dns"}},
        "addressType": "IPv4",
        "ports": [{"name": port, "protocol": protocol, "port": number}],
        "endpoints": endpoints,
    });
    serde_json::from_value(object).unwrap()
}

/// What happens, before and after, whether flows must be looked at, and where the frontend leads.
type Transition<'a> = (&'a str, &'a [Slice<'a>], &'a [Slice<'a>], bool, &'a [&'a str]);

// ids: TRK-7 CT-8
#[test]
fn flows_are_looked_at_when_an_endpoint_left_or_the_first_one_came() {
    let one: Slice<'_> = ("x", "dns", 5353, &["1"]);
    let two: Slice<'_> = ("y", "dns", 5353, &["2"]);
    let tcp: Slice<'_> = ("t", "tcp", 5353, &["1"]);
    let cases: &[Transition<'_>] = &[
        ("nothing stays nothing", &[], &[], false, &[]),
        ("unchanged", &[one], &[one], false, &["1:5353"]),
        ("unchanged, two slices", &[one, two], &[one, two], false, &["1:5353", "2:5353"]),
        ("unchanged, a port in TCP beside", &[one, tcp], &[one, tcp], false, &["1:5353"]),
        ("the first slice", &[], &[one], true, &["1:5353"]),
        ("the last slice goes", &[one], &[], true, &[]),
        ("a slice beside", &[one], &[one, two], false, &["1:5353", "2:5353"]),
        ("one of two slices goes", &[one, two], &[two], true, &["2:5353"]),
        ("an address more", &[one], &[("x", "dns", 5353, &["1", "3"])], false, &["1:5353", "3:5353"]),
        ("an address less", &[("x", "dns", 5353, &["1", "3"])], &[one], true, &["1:5353"]),
        (
            "an address goes to another slice",
            &[one, two],
            &[("y", "dns", 5353, &["1", "2"])],
            false,
            &["1:5353", "2:5353"],
        ),
        ("the port is renamed away", &[one], &[("x", "other", 5353, &["1"])], true, &[]),
        ("the port is renumbered", &[one], &[("x", "dns", 5354, &["1"])], true, &["1:5354"]),
        ("one goes, one comes", &[one], &[("x", "dns", 5353, &["2"])], true, &["2:5353"]),
        (
            "all sorts",
            &[one, two, tcp],
            &[("y", "dns", 5353, &["2", "4"]), ("z", "dns", 5355, &["1"])],
            true,
            &["1:5355", "2:5353", "4:5353"],
        ),
        ("no address, then one", &[("x", "dns", 5353, &[])], &[one], true, &["1:5353"]),
        ("ready, then about to end", &[one], &[("x", "dns", 5353, &["1 ending"])], false, &["1:5353"]),
        (
            "about to end, then gone",
            &[("x", "dns", 5353, &["1 ending"])],
            &[("x", "dns", 5353, &["1 gone"])],
            true,
            &[],
        ),
        (
            "about to end beside a ready one",
            &[one, two],
            &[one, ("y", "dns", 5353, &["2 ending"])],
            false,
            &["1:5353", "2:5353"],
        ),
        ("TCP only", &[tcp], &[("t", "tcp", 5353, &["2"])], false, &[]),
    ];
    for (what, before, after, looked_at, endpoints) in cases {
        let mut world = World::new();
        world.slices(before);
        assert_eq!(world.slices(after), *looked_at, "{what}");
        assert_eq!(world.endpoints(), *endpoints, "{what}");
        let frontend = Frontend::new(FRONTEND.parse().unwrap(), Protocol::Udp);
        let serving = world.flows.reconciler(IpFamily::IPv4);
        serving.set(frontend, Endpoints::default());
        assert_eq!(serving.begin().is_some(), !endpoints.is_empty(), "{what}: the bookkeeping knew them");
    }
}

// ids: CT-8
#[test]
fn of_tcp_only_addresses_from_outside_are_looked_at_and_only_when_their_first_endpoint_came() {
    let mut world = World::new();
    let vip = json!({
        "metadata": {"namespace": "ns", "name": "dns"},
        "spec": {
            "type": "LoadBalancer", "clusterIPs": ["10.96.0.10"], "externalIPs": ["203.0.113.7"],
            "ports": [{"name": "tcp", "protocol": "TCP", "port": 53, "nodePort": 30053}],
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.80"}]}},
    });
    world.slices(&[("t", "tcp", 5353, &["1"])]);
    assert!(world.apply(vec![Change::ServiceApplied(Box::new(serde_json::from_value(vip).unwrap()))]));
    let known = &world.flows.reconciler(IpFamily::IPv4).serving().frontends;
    let tcp = known.keys().filter(|frontend| frontend.protocol == Protocol::Tcp);
    let known: BTreeSet<String> = tcp.map(|frontend| frontend.address.to_string()).collect();
    assert_eq!(known, BTreeSet::from(["192.0.2.80:53".to_owned(), "203.0.113.7:53".to_owned()]));
    for (endpoints, looked_at) in [(&["1", "2"][..], false), (&["2"], false), (&[], false), (&["2"], true)] {
        assert_eq!(world.slices(&[("t", "tcp", 5353, endpoints)]), looked_at, "{endpoints:?}");
    }
}

// ids: TRK-3
#[test]
fn nothing_is_left_of_services_that_came_and_went() {
    let mut world = World::new();
    for _ in 0..50 {
        world.slices(&[("x", "dns", 5353, &["1"])]);
        world.slices(&[]);
        assert!(world.apply(vec![Change::ServiceDeleted(ObjectName::new("ns", "dns"))]));
        assert!(world.flows.targets.is_empty());
        let fresh = World::new();
        world.apply(vec![]);
        (world.model, world.plan) = (fresh.model, fresh.plan);
        world.flows.replaced();
        let again = world.plan.ports(IpFamily::IPv4).map(|(id, _)| id.clone()).collect();
        world.flows.follow(&world.plan, &world.model, &again, |_, port| port.serving_sockets());
        assert_eq!(world.flows.targets.len(), 1);
    }
}

/// What follows of the plan alone.
fn from_scratch(plan: &Plan) -> HashMap<PortId, Vec<Target>> {
    let ports = FAMILIES.into_iter().flat_map(|family| plan.ports(family));
    ports
        .map(|(id, port)| (id.clone(), targets(id, port)))
        .filter(|(_, targets)| !targets.is_empty())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    // ids: TRK-3
    #[test]
    fn the_bookkeeping_follows_the_changes_of_the_plan_and_plans_from_scratch(
        seeds in proptest::collection::vec(any::<u64>(), 1..160),
    ) {
        let (mut cluster, mut flows) = (Cluster::with(start()), Flows::default());
        for seed in seeds {
            match seed % 40 {
                0 => cluster.configure(seed),
                // Opened anew, perhaps with one family less, while changes are waiting.
                1 => {
                    let families = &FAMILIES[..if seed % 3 == 0 { 1 } else { 2 }];
                    cluster.plan = Plan::new(cluster.plan.config().clone(), families);
                    let everything = Dirty { everything: true, ..Dirty::default() };
                    cluster.pending = cluster.plan.update(&cluster.model, everything);
                    flows.replaced();
                }
                _ => cluster.apply(change(seed)),
            }
            if seed % 3 == 0 {
                flows.follow(
&cluster.plan, &cluster.model, &std::mem::take(&mut cluster.pending).ports, |_, port| port.serving_sockets());
                prop_assert_eq!(&flows.targets, &from_scratch(&cluster.plan));
            }
        }
    }
}
