//! The table that a plan asks for, with every kind of Service and setting: text and netlink make the same of it, and it is
//! read back as it was written.

use pointsman_agent::model::{Change, Dirty, Model, NodeFacts};
use pointsman_agent::nftables::compare::compare;
use pointsman_agent::nftables::connection::Connection;
use pointsman_agent::nftables::layout::{State, table};
use pointsman_agent::nftables::ruleset::Ruleset;
use pointsman_agent::plan::Plan;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::node_config::NodeDetectLocal;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{Mode, NodePortAddress, ProxySettings};
use serde_json::{Value, json};

use super::equal::assert_same_by_netlink_and_text;
use super::{FAMILIES, isolated, load};

fn configs() -> Vec<NodeProxyConfiguration> {
    let settings = ProxySettings { mode: Some(Mode::Nftables), ..ProxySettings::default() };
    let config = NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap();
    let mut all = Vec::new();
    for (number, detect_local) in [
        NodeDetectLocal::NodeCIDR {},
        NodeDetectLocal::BridgeInterface { bridge_interface: "cni0".into() },
        NodeDetectLocal::InterfaceNamePrefix { interface_name_prefix: "veth".into() },
        NodeDetectLocal::ClusterCIDR { cluster_cidrs: Vec::new() },
    ]
    .into_iter()
    .enumerate()
    {
        let mut config = NodeProxyConfiguration { detect_local, ..config.clone() };
        config.masquerade.all = number == 1;
        config.nftables.counters = number != 0;
        config.conntrack.tcp_be_liberal = number == 3;
        let addresses: &[&str] = [&["primary"][..], &["all"], &["all"], &["primary"]][number];
        config.node_port_addresses = addresses.iter().map(|word| NodePortAddress((*word).into())).collect();
        all.push(config);
    }
    all
}

fn service(name: &str, number: u32, extra: &Value) -> Change {
    let mut spec = json!({
        "type": "LoadBalancer",
        "clusterIPs": [format!("10.96.0.{number}"), format!("fd00:96::{number:x}")],
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30000 + number},
            {"name": "dns", "protocol": "UDP", "port": 53},
            {"name": "sip", "protocol": "SCTP", "port": 3868},
        ],
    });
    spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let ingress = json!([{"ip": format!("198.51.100.{number}")}, {"ip": format!("2001:db8::{number:x}")}]);
    let object = json!({
        "metadata": {"namespace": "ns", "name": name},
        "spec": spec,
        "status": {"loadBalancer": {"ingress": ingress}},
    });
    Change::ServiceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

fn slice(service: &str, v6: bool, count: u32) -> Change {
    let endpoint = |number: u32| {
        let address = if v6 { format!("fd00:244::{number:x}") } else { format!("10.244.0.{number}") };
        json!({"addresses": [address], "nodeName": if number < 3 { "node" } else { "other" }})
    };
    let object = json!({
        "metadata": {
            "namespace": "ns",
            "name": format!("{service}-{v6}"),
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": if v6 { "IPv6" } else { "IPv4" },
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 8080},
            {"name": "dns", "protocol": "UDP", "port": 5353},
            {"name": "sip", "protocol": "SCTP", "port": 3868},
        ],
        "endpoints": (1..=count).map(endpoint).collect::<Value>(),
    });
    Change::SliceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

fn plan(config: NodeProxyConfiguration, affinity: bool) -> Plan {
    let mut model = Model::new();
    let sticky = if affinity { "ClientIP" } else { "None" };
    let mut changes = vec![
        Change::Node(NodeFacts {
            name: "node".into(),
            addresses: vec!["192.168.0.1".parse().unwrap(), "fd00:1::1".parse().unwrap()],
            pod_cidrs: vec!["10.244.0.0/24".parse().unwrap(), "fd00:244::/64".parse().unwrap()],
            zone: None,
        }),
        Change::ServiceCidrs(vec!["10.96.0.0/16".parse().unwrap(), "fd00:96::/112".parse().unwrap()]),
        service(
            "web",
            1,
            &json!({"externalTrafficPolicy": "Local", "loadBalancerSourceRanges":
            ["203.0.113.0/25", "192.168.0.0/24", "192.0.2.1/32", "2001:db8:1::/64", "2001:db8:2::1/128"]}),
        ),
        service("cart", 2, &json!({"sessionAffinity": sticky, "externalTrafficPolicy": "Local"})),
        service("dns", 3, &json!({"internalTrafficPolicy": "Local"})),
        service("none", 4, &json!({})),
    ];
    for v6 in [false, true] {
        changes.extend([("web", 4), ("cart", 3), ("dns", 5)].map(|(name, count)| slice(name, v6, count)));
    }
    for change in changes {
        model.apply(change);
    }
    let mut plan = Plan::new(config, &FAMILIES);
    plan.update(&model, Dirty { everything: true, ..Dirty::default() });
    plan
}

fn full(plan: &Plan, family: IpFamily) -> Ruleset {
    State::adopt(plan, plan.node(family).unwrap(), &Ruleset::new(table(family))).full()
}

#[test]
fn the_layout_is_the_same_by_netlink_and_as_text() {
    isolated(|| {
        for config in configs() {
            for family in FAMILIES {
                // nft 1.0.6 cannot load a client of IPv6 in the key of a map that packets write.
                let plan = plan(config.clone(), family == IpFamily::IPv4);
                assert_same_by_netlink_and_text(&full(&plan, family));
            }
        }
    });
}

#[test]
fn the_layout_is_read_back_as_it_was_written_and_a_restart_finds_nothing_to_do() {
    isolated(|| {
        for config in configs() {
            for family in FAMILIES {
                let plan = plan(config.clone(), true);
                let full = full(&plan, family);
                let mut connection = Connection::open().unwrap();
                load(&mut connection, &full);
                let read = connection.read(&full.table).unwrap().unwrap();
                assert_eq!(read.foreign.len(), 0, "{:?}", read.foreign);
                let differences = compare(&full, Some(&read)).differences;
                assert_eq!(differences, [] as [String; 0]);
                // Elements that count say how much.
                assert_eq!(read.ruleset == full, !config.nftables.counters);
                assert_eq!(State::adopt(&plan, plan.node(family).unwrap(), &read.ruleset).full(), full);
                super::nft("flush ruleset");
            }
        }
    });
}
