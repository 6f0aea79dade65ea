//! A random cluster: any number of changes from a sequence of numbers.

use std::net::IpAddr;

use k8s_openapi::api::{core, discovery};
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::names::ANNOTATION_WEIGHT;
use pointsman_crds::node_config::NodeDetectLocal;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{Mode, NodePortAddress, ProxySettings};
use serde_json::{Value, json};

use super::{Changes, Hop, Packet, Plan, Verdict};
use crate::model::{Change, Model, NodeFacts, ObjectName, Protocol, family_of};

/// Numbers that depend on a seed only.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.roll(100) < percent
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.roll(from.len() as u64)).unwrap()]
    }

    fn some<T: Copy>(&mut self, from: &[T], percent: u64) -> Vec<T> {
        from.iter().copied().filter(|_| self.chance(percent)).collect()
    }
}

pub const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];
pub const LOCAL: [&str; 4] = ["192.168.0.1", "10.244.0.1", "fd00:1::1", "fd00:244::1"];
const EXTERNAL: [&str; 6] =
    ["198.51.100.1", "198.51.100.2", "192.168.0.1", "10.96.0.200", "2001:db8::1", "fd00:1::1"];
const SERVICES: u64 = 40;

pub fn config() -> NodeProxyConfiguration {
    let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
    NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap()
}

pub fn random_config(dice: &mut Dice) -> NodeProxyConfiguration {
    let mut config = config();
    config.masquerade.all = dice.chance(30);
    config.masquerade.bit = dice.pick(&[14, 14, 15, 3]);
    config.iptables.localhost_node_ports = dice.chance(30);
    config.nftables.counters = dice.chance(30);
    config.conntrack.tcp_be_liberal = dice.chance(30);
    config.detect_local = match dice.roll(5) {
        0 => NodeDetectLocal::ClusterCIDR {
            cluster_cidrs: ["10.244.0.0/16", "10.245.0.0/16", "fd00:244::/48"]
                .map(|net| net.parse().unwrap())
                .to_vec(),
        },
        1 => NodeDetectLocal::BridgeInterface { bridge_interface: "cni0".into() },
        2 => NodeDetectLocal::InterfaceNamePrefix { interface_name_prefix: "cni".into() },
        3 => NodeDetectLocal::ClusterCIDR { cluster_cidrs: vec!["fd00:244::/48".parse().unwrap()] },
        _ => NodeDetectLocal::NodeCIDR {},
    };
    let addresses = [
        &["primary"][..],
        &["all"],
        &["localhost", "primary"],
        &["10.244.0.0/16", "fd00::/8"],
        &["fd00::/16"],
    ];
    config.node_port_addresses =
        dice.pick(&addresses).iter().map(|entry| NodePortAddress((*entry).to_owned())).collect();
    config
}

/// What every node has.
pub fn start() -> [Change; 3] {
    [
        node(Some("a")),
        Change::ServiceCidrs(cidrs(0)),
        Change::LocalAddresses(LOCAL.iter().map(|ip| ip.parse().unwrap()).collect()),
    ]
}

fn node(zone: Option<&str>) -> Change {
    Change::Node(NodeFacts {
        name: "node".into(),
        addresses: vec!["192.168.0.1".parse().unwrap(), "fd00:1::1".parse().unwrap()],
        pod_cidrs: vec!["10.244.0.0/24".parse().unwrap(), "fd00:244::/64".parse().unwrap()],
        zone: zone.map(ToOwned::to_owned),
    })
}

fn cidrs(which: u64) -> Vec<ipnet::IpNet> {
    let all: [&[&str]; 3] =
        [&["10.96.0.0/24", "fd00:96::/112"], &["10.96.0.0/25", "10.96.0.128/25", "fd00:96::/112"], &[]];
    all[usize::try_from(which).unwrap()].iter().map(|net| net.parse().unwrap()).collect()
}

/// A cluster with its plan.
pub struct Cluster {
    pub model: Model,
    pub plan: Plan,
    /// What changed since somebody looked last.
    pub pending: Changes,
}

impl Cluster {
    /// A node with nothing but this.
    pub fn with(changes: impl IntoIterator<Item = Change>) -> Self {
        let mut cluster =
            Self { model: Model::new(), plan: Plan::new(config(), &FAMILIES), pending: Changes::default() };
        for change in changes {
            cluster.apply(change);
        }
        cluster.pending = Changes::default();
        cluster
    }

    pub fn apply(&mut self, change: Change) {
        let dirty = self.model.apply(change);
        let changes = self.plan.update(&self.model, dirty);
        self.pending.merge(changes);
    }

    /// Some change: of the configuration now and then, of the cluster mostly.
    pub fn step(&mut self, seed: u64) {
        if seed.is_multiple_of(50) {
            self.configure(seed);
        } else {
            self.apply(change(seed));
        }
    }

    /// Some change of the configuration.
    pub fn configure(&mut self, seed: u64) {
        self.set_config(random_config(&mut Dice::new(seed)));
    }

    pub fn set_config(&mut self, config: NodeProxyConfiguration) {
        let changes = self.plan.configure(config, &self.model);
        self.pending.merge(changes);
    }
}

/// Rules that follow a cluster.
pub trait Rules {
    fn cluster(&mut self) -> &mut Cluster;
    /// Writes what is pending.
    fn sync(&mut self);
    /// Proves that the rules are what they would be from scratch.
    fn check(&mut self);
    /// Where a packet ends by the rules alone, and by the plan as far as these rules can follow it.
    fn route(&self, packet: &Packet) -> (Verdict, Verdict);

    /// Writes what is pending, and proves it.
    fn follow(&mut self) {
        self.sync();
        self.check();
    }

    /// Lets changes happen, some of which are written at once, and all in the end.
    fn live(&mut self, changes: Vec<(u64, bool)>) {
        for (seed, sync) in changes {
            self.cluster().step(seed);
            if sync {
                self.sync();
            }
        }
        self.follow();
    }
}

/// An endpoint on another node that reaches itself by way of this one keeps its source where the set of those that reach themselves holds
/// this node's only.
pub fn without_hairpin_from_afar(plan: &Plan, packet: &Packet, verdict: Verdict) -> Verdict {
    let mut backends = plan
        .ports(family_of(packet.destination))
        .flat_map(|(_, port)| port.backends().copied().collect::<Vec<_>>());
    if backends.any(|backend| backend.address == packet.source && backend.local) {
        return verdict;
    }
    let Verdict::Forward(hops) = verdict else { return verdict };
    let own = |hop: Hop| if hop.address == packet.source { Hop { masquerade: true, ..hop } } else { hop };
    sorted(Verdict::Forward(hops.into_iter().map(own).collect()))
}

/// The same, with possible destinations in order and each once.
pub fn sorted(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Forward(mut hops) => {
            hops.sort();
            hops.dedup();
            Verdict::Forward(hops)
        }
        other => other,
    }
}

/// A Service of this name with this `spec`, which may hold `status` and `labels` too.
pub fn service_applied(name: &str, spec: &Value) -> Change {
    let mut spec = spec.clone();
    let status = spec.as_object_mut().unwrap().remove("status").unwrap_or_default();
    let labels = spec.as_object_mut().unwrap().remove("labels").unwrap_or_default();
    let service = json!({"metadata": {"namespace": "ns", "name": name, "labels": labels}, "spec": spec, "status": status});
    Change::ServiceApplied(Box::new(serde_json::from_value(service).unwrap()))
}

/// These IPv4 endpoints of the port "p" of this Service.
pub fn slice_applied(service: &str, endpoints: &Value) -> Change {
    let slice = json!({
        "metadata": {"namespace": "ns", "name": service, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "p", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints,
    });
    Change::SliceApplied(Box::new(serde_json::from_value(slice).unwrap()))
}

/// One change.
pub fn change(seed: u64) -> Change {
    let dice = &mut Dice::new(seed);
    let number = dice.roll(SERVICES);
    let name = ObjectName::new("ns", format!("s{number}"));
    match dice.roll(100) {
        0..=54 => Change::ServiceApplied(Box::new(service(number, dice))),
        55..=64 => Change::ServiceDeleted(name),
        65..=94 => Change::SliceApplied(Box::new(slice(number, dice))),
        95 | 96 => {
            let part = dice.roll(2);
            let family = dice.pick(&["4", "6"]);
            Change::SliceDeleted(ObjectName::new("ns", format!("s{number}-{family}-{part}")))
        }
        97 => node(dice.pick(&[None, Some("a"), Some("b")])),
        98 => Change::ServiceCidrs(cidrs(dice.roll(3))),
        _ => Change::LocalAddresses(dice.some(&LOCAL, 80).iter().map(|ip| ip.parse().unwrap()).collect()),
    }
}

fn service(number: u64, dice: &mut Dice) -> core::v1::Service {
    let kind = dice.pick(&["ClusterIP", "ClusterIP", "NodePort", "LoadBalancer"]);
    let port = |dice: &mut Dice, name: &str| {
        let mut port = json!({
            "name": name,
            "protocol": dice.pick(&["TCP", "UDP", "SCTP"]),
            "port": dice.pick(&[80, 443]),
        });
        if kind != "ClusterIP" && dice.chance(80) {
            port["nodePort"] = json!(30_000 + dice.roll(60));
        }
        port
    };
    let ports: Vec<Value> = ["web", "dns"][..usize::try_from(1 + dice.roll(2)).unwrap()]
        .iter()
        .map(|name| port(dice, name))
        .collect();
    // Mostly addresses of its own, some that others have too.
    let low = if dice.chance(90) { number * 5 + 1 } else { dice.roll(SERVICES) };
    let ingress: Vec<Value> = dice
        .some(&EXTERNAL, 20)
        .iter()
        .map(|ip| json!({"ip": ip, "ipMode": if dice.chance(90) { "VIP" } else { "Proxy" }}))
        .collect();
    let policy = |dice: &mut Dice| if dice.chance(30) { "Local" } else { "Cluster" };
    let mut ips = vec![format!("10.96.0.{low}")];
    if dice.chance(60) {
        ips.push(format!("fd00:96::{low:x}"));
    }
    let mut spec = json!({
        "type": kind,
        "clusterIPs": ips,
        "externalIPs": dice.some(&EXTERNAL, 10),
        "internalTrafficPolicy": policy(dice),
        "externalTrafficPolicy": policy(dice),
        "ports": ports,
        "sessionAffinity": if dice.chance(20) { "ClientIP" } else { "None" },
        "healthCheckNodePort": 31_000 + number,
    });
    if dice.chance(30) {
        spec["loadBalancerSourceRanges"] =
            json!(dice.some(&["203.0.113.0/25", " 192.168.0.0/24", "fd00:1::/64", "0.0.0.0/0"], 40));
    }
    let mut labels = json!({});
    if dice.chance(5) {
        labels["service.kubernetes.io/service-proxy-name"] = json!("other");
    }
    serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": format!("s{number}"), "labels": labels},
        "spec": spec,
        "status": {"loadBalancer": {"ingress": ingress}},
    }))
    .unwrap()
}

fn slice(number: u64, dice: &mut Dice) -> discovery::v1::EndpointSlice {
    let v6 = dice.chance(40);
    let endpoint = |dice: &mut Dice| {
        let local = dice.chance(50);
        let low = 1 + dice.roll(4);
        let mut endpoint = json!({
            "addresses": [match (v6, local) {
                (false, true) => format!("10.244.0.{low}"),
                (false, false) => format!("10.244.1.{low}"),
                (true, true) => format!("fd00:244::{low}"),
                (true, false) => format!("fd00:244:1::{low}"),
            }],
            "nodeName": if local { "node" } else { "other" },
            "conditions": {"ready": dice.chance(70), "serving": dice.chance(80), "terminating": dice.chance(20)},
        });
        if dice.chance(70) {
            endpoint["hints"] = json!({"forZones": [{"name": dice.pick(&["a", "b"])}]});
            if dice.chance(50) {
                endpoint["hints"]["forNodes"] = json!([{"name": dice.pick(&["node", "other"])}]);
            }
        }
        endpoint
    };
    let endpoints: Vec<Value> = (0..dice.roll(5)).map(|_| endpoint(dice)).collect();
    let ports: Vec<Value> = ["TCP", "UDP", "SCTP"]
        .iter()
        .flat_map(|protocol| {
            [
                json!({"name": "web", "protocol": protocol, "port": 8080}),
                json!({"name": "dns", "protocol": protocol, "port": 5353}),
            ]
        })
        .collect();
    let annotations =
        if dice.chance(20) { json!({ANNOTATION_WEIGHT: (1 + dice.roll(3)).to_string()}) } else { json!({}) };
    serde_json::from_value(json!({
        "metadata": {
            "namespace": "ns",
            "name": format!("s{number}-{}-{}", if v6 { "6" } else { "4" }, dice.roll(2)),
            "labels": {"kubernetes.io/service-name": format!("s{number}")},
            "annotations": annotations,
        },
        "addressType": if v6 { "IPv6" } else { "IPv4" },
        "ports": ports,
        "endpoints": endpoints,
    }))
    .unwrap()
}

/// One packet, mostly to something that may be a Service.
pub fn any_packet(seed: u64) -> Packet {
    let dice = &mut Dice::new(seed);
    let v6 = dice.chance(40);
    let clients: &[(Option<&str>, &str)] = if v6 {
        &[
            (None, "fd00:1::1"),
            (Some("cni0"), "fd00:244::2"),
            (Some("eth0"), "fd00:1::99"),
            (Some("eth0"), "2001:db8:f::1"),
        ]
    } else {
        &[
            (None, "192.168.0.1"),
            (None, "198.51.100.1"),
            (Some("cni0"), "10.244.0.2"),
            (Some("eth0"), "10.244.1.2"),
            (Some("eth0"), "203.0.113.7"),
            (Some("eth0"), "203.0.113.200"),
        ]
    };
    let (interface, source) = dice.pick(clients);
    let low = dice.roll(SERVICES) * 5 + 1;
    let node_port = dice.chance(30);
    let destination = match (node_port, dice.roll(3), v6) {
        (true, _, true) => dice.pick(&["fd00:1::1", "fd00:244::1"]).to_owned(),
        (true, _, false) => dice.pick(&["192.168.0.1", "10.244.0.1"]).to_owned(),
        (false, 0, true) => dice.pick(&["2001:db8::1", "fd00:1::1"]).to_owned(),
        (false, 0, false) => dice
            .pick(&["198.51.100.1", "198.51.100.2", "192.168.0.1", "10.96.0.200", "203.0.113.99"])
            .to_owned(),
        (false, _, true) => format!("fd00:96::{low:x}"),
        (false, _, false) => format!("10.96.0.{low}"),
    };
    let destination = if !v6 && node_port && interface.is_none() && dice.chance(20) {
        "127.0.0.1".to_owned()
    } else {
        destination
    };
    let port = if node_port { 30_000 + dice.roll(60) } else { dice.pick(&[80, 443]) };
    let protocol = dice.pick(&Protocol::ALL);
    let local: Vec<&str> =
        LOCAL.iter().copied().chain(if interface.is_none() { Some(source) } else { None }).collect();
    packet(interface, source, &destination, protocol, u16::try_from(port).unwrap(), &local)
}

/// A packet.
fn packet(
    interface: Option<&str>,
    source: &str,
    destination: &str,
    protocol: Protocol,
    port: u16,
    local: &[&str],
) -> Packet {
    let is_local =
        |address: &str| local.contains(&address) || address.parse::<IpAddr>().unwrap().is_loopback();
    Packet {
        interface: interface.map(ToOwned::to_owned),
        source: source.parse().unwrap(),
        source_is_local: is_local(source),
        destination: destination.parse().unwrap(),
        destination_is_local: is_local(destination),
        protocol,
        port,
    }
}
