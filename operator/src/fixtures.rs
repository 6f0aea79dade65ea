//! Objects for tests, in few words.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use pointsman_crds::names::BASE_CONFIGURATION;
use pointsman_crds::{Condition, ConditionStatus, ProxyConfigurationStatus, ProxyNodeStatusSpec};
use serde_json::{Value, json};

use crate::decide::{Work, World};
use crate::merge::Layer;
use crate::observed::{ConfigMapRecord, LayerRecord, NodeRecord, ReportRecord};

/// A layer that selects the nodes with label `pool: <pool>`, or all if that is empty; without a selector if it is
/// the base.
#[allow(clippy::needless_pass_by_value, reason = "callers pass json!(…)")]
pub fn layer(name: &str, priority: i32, pool: &str, proxy: Value) -> Layer {
    let mut spec = json!({"priority": priority, "proxy": proxy});
    if name != BASE_CONFIGURATION {
        let labels = if pool.is_empty() { json!({}) } else { json!({"pool": pool}) };
        spec["nodeSelector"] = json!({"matchLabels": labels});
    }
    Layer { name: name.to_owned(), generation: 1, spec: serde_json::from_value(spec).unwrap() }
}

/// The usual base.
pub fn base() -> Layer {
    layer("default", 0, "", json!({"mode": "iptables"}))
}

/// `seconds` after the beginning of the test.
pub fn at(seconds: i64) -> Time {
    Time(Timestamp::from_second(1_800_000_000 + seconds).unwrap())
}

/// A world of these layers, and of nodes given as (name, pool).
pub fn world(layers: &[Layer], nodes: &[(&str, &str)]) -> World {
    let mut world = World::default();
    for layer in layers {
        add_layer(&mut world, layer.clone());
    }
    for (name, pool) in nodes {
        let labels = [("pool".to_owned(), (*pool).to_owned())].into();
        world.nodes.insert((*name).to_owned(), Arc::new(NodeRecord { uid: format!("uid-{name}"), labels }));
    }
    world
}

/// Adds or replaces a layer.
pub fn add_layer(world: &mut World, layer: Layer) {
    let record = LayerRecord {
        uid: format!("uid-{}", layer.name),
        layer,
        status: ProxyConfigurationStatus::default(),
    };
    world.layers.insert(record.layer.name.clone(), Arc::new(Ok(record)));
}

/// What the server holds after `work` has been written.
pub fn write(world: &mut World, work: &Work) {
    for node in &work.nodes {
        if let Some(desired) = &node.config {
            let record = ConfigMapRecord {
                uid: format!("cm-{}", node.node),
                owner_uid: node.uid.clone(),
                managed: true,
                pool: node.pool.clone(),
                revision: desired.revision.clone(),
                hash: desired.hash.clone(),
                break_glass: false,
                foreign_content: None,
            };
            world.config_maps.insert(node.node.clone(), Arc::new(record));
        }
        if let Some(spec) = &node.report {
            let old = world.reports.get(&node.node);
            let record = match old {
                Some(old) => {
                    ReportRecord { owner_uid: node.uid.clone(), spec: spec.clone(), ..old.as_ref().clone() }
                }
                None => report(&node.uid, spec.clone()),
            };
            world.reports.insert(node.node.clone(), Arc::new(record));
        }
    }
    for sweep in &work.config_maps {
        world.config_maps.remove(&sweep.name);
    }
    for sweep in &work.reports {
        world.reports.remove(&sweep.name);
    }
}

fn report(owner_uid: &str, spec: ProxyNodeStatusSpec) -> ReportRecord {
    ReportRecord {
        uid: format!("pns-{}", spec.node_name),
        owner_uid: owner_uid.to_owned(),
        spec,
        state: String::new(),
        active: String::new(),
        active_hash: String::new(),
        conditions: Vec::new(),
        heartbeat: None,
        resource_version: "1".to_owned(),
    }
}

/// The agent of `node` reports `state` with the revision that its ConfigMap holds.
pub fn agent_reports(world: &mut World, node: &str, state: &str, seconds: i64) {
    let held = world.config_maps.get(node);
    let active = held.map(|config_map| config_map.revision.clone());
    let active_hash = held.map(|config_map| config_map.hash.clone());
    let report = world.reports.get_mut(node).unwrap();
    *report = Arc::new(ReportRecord {
        state: state.to_owned(),
        active: active.unwrap_or_default(),
        active_hash: active_hash.unwrap_or_default(),
        conditions: vec![condition("Ready", state == "Ready", "AsReported", "says the agent")],
        heartbeat: Some(at(seconds)),
        ..report.as_ref().clone()
    });
}

/// A condition of the beginning of the test.
pub fn condition(type_: &str, status: bool, reason: &str, message: &str) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: ConditionStatus::from(status),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: at(0),
        observed_generation: None,
    }
}
