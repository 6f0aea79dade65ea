//! What many Services cost in memory: the model, the plan and the state of mode nftables, without a kernel.

#![allow(clippy::unwrap_used, reason = "a test says by panicking what is wrong")]

use pointsman_agent::model::{Change, Dirty, Model, NodeFacts};
use pointsman_agent::nftables::layout::{State, table};
use pointsman_agent::nftables::ruleset::Ruleset;
use pointsman_agent::plan::Plan;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{Mode, ProxySettings};
use serde_json::json;

const SERVICES: u32 = 20_000;
const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// What this process has allocated, in KiB.
fn allocated() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn address(first: u8, number: u32) -> String {
    let [_, b, c, d] = number.to_be_bytes();
    format!("10.{}.{c}.{d}", first + b)
}

/// The mix of `hack/bench`.
fn service(number: u32) -> Change {
    let mut spec = json!({
        "type": "ClusterIP", "clusterIPs": [address(96, number)],
        "ports": [{"name": "web", "protocol": "TCP", "port": 80}],
    });
    let mut status = json!({});
    if number.is_multiple_of(5) {
        spec["ports"][0]["nodePort"] = json!(30_000 + number / 5);
    }
    match number % 20 {
        1 => {
            spec["type"] = json!("LoadBalancer");
            status = json!({"loadBalancer": {"ingress": [{"ip": address(198, number)}]}});
        }
        2 => spec["sessionAffinity"] = json!("ClientIP"),
        _ => {}
    }
    let metadata = json!({"namespace": "bench", "name": format!("s{number:05}")});
    let object = json!({"metadata": metadata, "spec": spec, "status": status});
    Change::ServiceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

fn slice(number: u32) -> Change {
    let endpoints: Vec<_> = (0..3)
        .map(|nth| json!({"addresses": [address(226, number * 3 + nth)], "nodeName": "elsewhere"}))
        .collect();
    let object = json!({
        "metadata": {
            "namespace": "bench", "name": format!("s{number:05}-1"),
            "labels": {"kubernetes.io/service-name": format!("s{number:05}")},
        },
        "addressType": "IPv4",
        "ports": [{"name": "web", "protocol": "TCP", "port": 8080}],
        "endpoints": endpoints,
    });
    Change::SliceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

#[test]
fn twenty_thousand_services_fit_into_40_mib() {
    let settings = ProxySettings { mode: Some(Mode::Nftables), ..ProxySettings::default() };
    let config = NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap();
    let mut model = Model::new();
    model.apply(Change::Node(NodeFacts {
        name: "node".into(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        pod_cidrs: vec!["10.224.1.0/24".parse().unwrap()],
        zone: None,
    }));
    model.apply(service(0));
    let before = allocated();
    for number in 0..SERVICES {
        model.apply(service(number));
    }
    let services = allocated();
    for number in 0..SERVICES {
        model.apply(slice(number));
    }
    let slices = allocated();
    let mut plan = Plan::new(config, &FAMILIES);
    drop(plan.update(&model, Dirty { everything: true, ..Dirty::default() }));
    let planned = allocated();
    let family = IpFamily::IPv4;
    let state = State::adopt(&plan, plan.node(family).unwrap(), &Ruleset::new(table(family)));
    let state_size = allocated();
    println!(
        "KiB: Services {}, slices {}, plan {}, state {}, all {}",
        services - before,
        slices - services,
        planned - slices,
        state_size - planned,
        state_size - before
    );
    assert!(state_size - before < 40 << 10);
    drop((state, plan, model));
}
