use std::sync::Arc;

use pointsman_crds::Condition;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::decide::{self, World};
use crate::fixtures::{add_layer, agent_reports, at, base, condition, layer, world, write};

/// Writes what is due, and returns the status of the layer `name`, which is stored as the server would.
fn status(world: &mut World, name: &str, seconds: i64) -> ProxyConfigurationStatus {
    let layers = decide::layers(world);
    let assignments = layers.as_ref().map(|layers| decide::assignments(world, layers)).unwrap_or_default();
    if layers.is_ok() {
        let work = decide::work(world, &assignments, &at(seconds));
        write(world, &work);
    }
    let record = world.layers[name].as_ref().as_ref().unwrap().clone();
    let views: Vec<_> = world
        .nodes
        .iter()
        .filter(|(_, node)| record.layer.selects(&node.labels))
        .map(|(name, _)| NodeView {
            name,
            assignment: assignments.get(name).map(Arc::as_ref),
            config_map: world.config_maps.get(name).map(Arc::as_ref),
            report: world.reports.get(name).map(Arc::as_ref),
        })
        .collect();
    let status = summarize(&record.layer, &record.status, &views, layers.err().as_ref(), &at(seconds));
    let mut record = record;
    record.status = status.clone();
    world.layers.insert(name.to_owned(), Arc::new(Ok(record)));
    status
}

/// `Type=Status/Reason` of every condition.
fn conditions(status: &ProxyConfigurationStatus) -> Vec<String> {
    let line =
        |condition: &Condition| format!("{}={}/{}", condition.type_, condition.status, condition.reason);
    status.conditions.iter().map(line).collect()
}

fn three_nodes() -> World {
    world(&[base(), layer("edge", 10, "edge", json!({}))], &[("n1", "edge"), ("n2", "edge"), ("n3", "")])
}

fn report_all(world: &mut World, state: &str, seconds: i64) {
    for node in ["n1", "n2", "n3"] {
        agent_reports(world, node, state, seconds);
    }
}

#[test]
fn from_the_first_write_to_ready() {
    let mut world = three_nodes();
    let first = status(&mut world, "edge", 0);
    assert_eq!(first.state.as_deref(), Some("RollingOut"));
    assert_eq!(first.current_revision, None);
    assert_eq!(
        conditions(&first),
        [
            "Accepted=True/Valid",
            "Ready=False/RollingOut",
            "Progressing=True/RollingOut",
            "Degraded=False/AsExpected",
            "Conflicted=False/AsExpected",
            "Paused=False/AsExpected",
        ]
    );
    report_all(&mut world, "Ready", 5);
    let ready = status(&mut world, "edge", 9);
    assert_eq!(ready.state.as_deref(), Some("Ready"));
    assert_eq!(ready.observed_generation, Some(1));
    let counts = ready.nodes.unwrap();
    assert_eq!((counts.matched, counts.updated, counts.ready, counts.unreachable), (2, 2, 2, 0));
    assert_eq!(ready.current_revision, ready.update_revision);
    assert!(ready.update_revision.as_deref().unwrap().starts_with("edge-"));
    assert_eq!((ready.revisions.len(), ready.revisions[0].nodes, ready.revisions[0].ready), (1, 2, 2));
    let times: Vec<_> =
        ready.conditions.iter().map(|condition| condition.last_transition_time.clone()).collect();
    assert_eq!(times, [at(0), at(9), at(9), at(0), at(0), at(0)], "only what changed has a new time");
    assert_eq!(status(&mut world, "edge", 1000), ready, "nothing changes by itself");
    let everywhere = status(&mut world, "default", 10).nodes.unwrap();
    assert_eq!((everywhere.matched, everywhere.ready), (3, 3), "the base counts every node");
}

#[test]
fn a_change_is_rolling_out_until_every_node_is_ready_with_it() {
    let mut world = three_nodes();
    status(&mut world, "edge", 0);
    report_all(&mut world, "Ready", 5);
    let old = status(&mut world, "edge", 10).update_revision;
    add_status_keeping(&mut world, layer("edge", 10, "edge", json!({"masquerade": {"bit": 3}})));
    let rolling = status(&mut world, "edge", 20);
    assert_eq!(rolling.state.as_deref(), Some("RollingOut"));
    assert_eq!(rolling.current_revision, old, "until all have the new one");
    assert_ne!(rolling.update_revision, old);
    let counts = rolling.nodes.unwrap();
    assert_eq!(
        (counts.updated, counts.ready),
        (2, 0),
        "Ready with the old revision is not Ready with the new"
    );
    agent_reports(&mut world, "n1", "Ready", 21);
    assert_eq!(status(&mut world, "edge", 22).nodes.unwrap().ready, 1);
    agent_reports(&mut world, "n2", "Ready", 23);
    let done = status(&mut world, "edge", 24);
    assert_eq!((done.state.as_deref(), &done.current_revision), (Some("Ready"), &rolling.update_revision));
}

#[test]
fn a_node_that_runs_an_edit_under_break_glass_is_neither_updated_nor_ready_with_the_revision() {
    let mut world = three_nodes();
    status(&mut world, "edge", 0);
    report_all(&mut world, "Ready", 5);
    let edit = |world: &mut World, break_glass: bool, hash: &str| {
        Arc::make_mut(world.config_maps.get_mut("n1").unwrap()).break_glass = break_glass;
        Arc::make_mut(world.reports.get_mut("n1").unwrap()).active_hash = hash.to_owned();
    };
    let counts = |world: &mut World, seconds: i64| {
        let status = status(world, "edge", seconds);
        let counts = status.nodes.unwrap();
        (counts.updated, counts.ready, status.state.unwrap())
    };
    let hash = world.config_maps["n1"].hash.clone();
    edit(&mut world, true, &hash);
    assert_eq!(counts(&mut world, 10), (2, 2, "Ready".to_owned()), "nothing was edited");
    edit(&mut world, true, "sha256:0");
    assert_eq!(counts(&mut world, 11), (1, 1, "RollingOut".to_owned()));
    edit(&mut world, false, &hash);
    assert_eq!(counts(&mut world, 12), (2, 2, "Ready".to_owned()));
}

/// Replaces a layer by its next generation.
fn add_status_keeping(world: &mut World, mut new: Layer) {
    let old = world.layers[&new.name].as_ref().as_ref().unwrap().clone();
    new.generation = old.layer.generation + 1;
    let name = new.name.clone();
    add_layer(world, new);
    let record = Arc::make_mut(world.layers.get_mut(&name).unwrap()).as_mut().unwrap();
    record.status = old.status;
}

#[test]
fn a_pause_with_changes_outstanding_shows() {
    let mut world = three_nodes();
    status(&mut world, "edge", 0);
    report_all(&mut world, "Ready", 5);
    let mut paused = layer("edge", 10, "edge", json!({}));
    paused.spec.rollout.paused = true;
    add_status_keeping(&mut world, paused.clone());
    let idle = status(&mut world, "edge", 10);
    assert_eq!(idle.state.as_deref(), Some("Ready"), "nothing waits");
    paused.spec.proxy.log_level = Some(pointsman_crds::settings::LogLevel::Debug);
    add_status_keeping(&mut world, paused);
    let waiting = status(&mut world, "edge", 20);
    assert_eq!(waiting.state.as_deref(), Some("Paused"));
    let conditions = conditions(&waiting);
    assert!(conditions.contains(&"Progressing=False/Paused".to_owned()), "{conditions:?}");
    assert!(conditions.contains(&"Paused=True/PausedByUser".to_owned()), "{conditions:?}");
    let counts = waiting.nodes.unwrap();
    assert_eq!((counts.updated, counts.ready), (0, 2), "the nodes are Ready, with the configuration before");
}

#[test]
fn nodes_in_trouble_are_counted_and_named_with_the_agents_reason() {
    let mut world = three_nodes();
    status(&mut world, "edge", 0);
    report_all(&mut world, "Ready", 5);
    agent_reports(&mut world, "n1", "Degraded", 6);
    let report = Arc::make_mut(world.reports.get_mut("n1").unwrap());
    report.conditions.push(condition("Synced", false, "RestoreFailed", "iptables-restore: line 4 failed"));
    agent_reports(&mut world, "n2", "Stale", 6);
    let status = status(&mut world, "edge", 10);
    assert_eq!(status.state.as_deref(), Some("Degraded"));
    let counts = status.nodes.unwrap();
    assert_eq!((counts.degraded, counts.unreachable, counts.ready), (1, 1, 0));
    let failed: Vec<_> =
        status.failed_nodes.iter().map(|node| format!("{} {}", node.name, node.reason)).collect();
    assert_eq!(failed, ["n1 RestoreFailed", "n2 AsReported"]);
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap();
    assert_eq!(
        ready.message,
        "Ready with the configuration: 0 of 2 nodes; 1 node Degraded, 1 node unreachable"
    );
}

#[test]
fn a_new_node_has_time_to_report_and_no_more() {
    let mut world = three_nodes();
    assert_eq!(status(&mut world, "edge", 0).state.as_deref(), Some("RollingOut"));
    let waiting = status(&mut world, "edge", 599);
    assert_eq!(waiting.state.as_deref(), Some("RollingOut"));
    assert!(waiting.failed_nodes.is_empty());
    assert_eq!(waiting.nodes.unwrap().unreachable, 2);
    let over = status(&mut world, "edge", 601);
    assert_eq!(over.state.as_deref(), Some("Degraded"));
    assert_eq!(over.failed_nodes.len(), 2);
}

#[test]
fn both_layers_of_a_conflict_say_so_with_field_and_number_of_nodes() {
    let mut world = three_nodes();
    status(&mut world, "edge", 0);
    report_all(&mut world, "Ready", 5);
    add_status_keeping(&mut world, layer("edge", 10, "edge", json!({"masquerade": {"bit": 3}})));
    add_layer(&mut world, layer("gpu", 10, "", json!({"masquerade": {"bit": 4}})));
    for (name, other) in [("edge", "gpu"), ("gpu", "edge")] {
        let status = status(&mut world, name, 10);
        assert_eq!(status.state.as_deref(), Some("Conflicted"));
        let [conflict] = status.conflicts.as_slice() else { panic!("{:?}", status.conflicts) };
        assert_eq!(conflict.with, other);
        assert_eq!((conflict.field_path.as_str(), conflict.nodes), ("proxy.masquerade.bit", 2));
        let conflicted = status.conditions.iter().find(|condition| condition.type_ == "Conflicted").unwrap();
        assert_eq!(conflicted.status, ConditionStatus::True);
        assert!(conflicted.message.contains(&format!("proxy.masquerade.bit ({other}, 2 nodes)")));
    }
    let base = status(&mut world, "default", 11);
    assert!(base.conflicts.is_empty(), "the base has no part in it");
    assert_eq!(base.nodes.unwrap().conflicted, 2);
}

#[test]
fn an_invalid_merge_is_the_fault_of_the_layer_that_made_it_so() {
    let mut world = three_nodes();
    status(&mut world, "edge", 0);
    report_all(&mut world, "Ready", 5);
    add_status_keeping(&mut world, layer("edge", 10, "edge", json!({"metricsPort": 10256})));
    let edge = status(&mut world, "edge", 10);
    assert_eq!(edge.state.as_deref(), Some("Invalid"));
    assert_eq!(
        conditions(&edge)[..2],
        ["Accepted=False/InvalidMergedConfig", "Ready=False/InvalidMergedConfig"]
    );
    assert!(edge.conditions[0].message.contains("healthzPort and metricsPort must differ"));
    let base = status(&mut world, "default", 10);
    assert_eq!(conditions(&base)[..2], ["Accepted=True/Valid", "Ready=False/InvalidMergedConfig"]);
    assert!(base.conditions[1].message.contains("see edge"), "{}", base.conditions[1].message);
}

#[test]
fn without_a_base_every_layer_says_what_to_do() {
    let mut world = three_nodes();
    world.layers.remove("default");
    let status = status(&mut world, "edge", 0);
    assert_eq!(status.state.as_deref(), Some("Invalid"));
    assert_eq!(
        conditions(&status)[..3],
        ["Accepted=False/NoBase", "Ready=False/NoBase", "Progressing=False/Halted"]
    );
    assert!(status.conditions[0].message.contains("no ProxyConfiguration named 'default'"));
}

#[test]
fn a_layer_that_selects_nothing_and_one_that_is_only_planned_say_so() {
    let mut world = three_nodes();
    add_layer(&mut world, layer("nobody", 1, "none", json!({})));
    let nobody = status(&mut world, "nobody", 0);
    assert_eq!(nobody.state.as_deref(), Some("NoNodes"));
    assert!(conditions(&nobody).contains(&"Ready=False/NoMatchingNodes".to_owned()));
    let mut planned = layer("nobody", 1, "", json!({}));
    planned.spec.enforcement = pointsman_crds::proxy_configuration::Enforcement::Plan;
    add_status_keeping(&mut world, planned);
    let planned = status(&mut world, "nobody", 1);
    assert_eq!(planned.state.as_deref(), Some("Plan"));
    assert_eq!(
        conditions(&planned),
        [
            "Accepted=True/Valid",
            "Ready=False/PlanOnly",
            "Conflicted=False/AsExpected",
            "Paused=False/AsExpected"
        ]
    );
}

#[test]
fn lists_keep_to_the_bounds_of_the_schema() {
    let mut world = world(&[base()], &[]);
    for index in 0..60 {
        let record = crate::observed::NodeRecord { uid: format!("uid-{index}"), ..Default::default() };
        world.nodes.insert(format!("n{index:02}"), Arc::new(record));
    }
    status(&mut world, "default", 0);
    for index in 0..60 {
        let node = format!("n{index:02}");
        agent_reports(&mut world, &node, "Degraded", 1);
        let long = "ü".repeat(600);
        Arc::make_mut(world.reports.get_mut(&node).unwrap()).conditions[0].message = long;
        let config_map = Arc::make_mut(world.config_maps.get_mut(&node).unwrap());
        config_map.revision = format!("default-{index}");
    }
    let record = world.layers["default"].as_ref().as_ref().unwrap().clone();
    let views: Vec<_> = world
        .nodes
        .keys()
        .map(|name| NodeView {
            name,
            assignment: None,
            config_map: world.config_maps.get(name).map(Arc::as_ref),
            report: world.reports.get(name).map(Arc::as_ref),
        })
        .collect();
    let status = summarize(&record.layer, &record.status, &views, None, &at(2));
    assert_eq!(status.failed_nodes.len(), 20);
    assert_eq!((status.failed_nodes[0].name.as_str(), status.failed_nodes[19].name.as_str()), ("n00", "n19"));
    assert!(status.failed_nodes.iter().all(|node| node.message.chars().count() == 256));
    assert!(status.revisions.len() <= 8);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Counts add up, the state agrees with the conditions, and a second look says the same.
    #[test]
    fn a_status_is_consistent(
        states in prop::collection::vec(
            prop::sample::select(vec!["", "Unknown", "Stale", "Ready", "Degraded", "Incompatible", "Applying"]), 0..6),
        paused in any::<bool>(),
        bits in prop::collection::vec(0..3i32, 0..3),
    ) {
        let names: Vec<String> = (0..states.len()).map(|index| format!("n{index}")).collect();
        let nodes: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
        let mut world = world(&[base()], &nodes);
        status(&mut world, "default", 0);
        for (index, bit) in bits.iter().enumerate() {
            let mut layer = layer(&format!("l{index}"), 1, "", json!({"masquerade": {"bit": bit}}));
            layer.spec.rollout.paused = paused;
            add_layer(&mut world, layer);
        }
        for (node, state) in names.iter().zip(&states) {
            if !state.is_empty() {
                agent_reports(&mut world, node, state, 1);
            }
        }
        let first = status(&mut world, "default", 2);
        let counts = first.nodes.unwrap();
        prop_assert_eq!(counts.matched, i32::try_from(states.len()).unwrap());
        prop_assert!(counts.ready + counts.degraded + counts.incompatible + counts.unreachable <= counts.matched);
        prop_assert!(counts.updated <= counts.matched);
        let ready = first.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap();
        prop_assert_eq!(ready.status == ConditionStatus::True, first.state.as_deref() == Some("Ready"));
        if ready.status == ConditionStatus::True {
            prop_assert_eq!((counts.updated, counts.ready), (counts.matched, counts.matched));
        }
        prop_assert_eq!(status(&mut world, "default", 3), first);
    }
}
