//! The operator on a real API server: what it makes of layers and nodes, and who leads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use pointsman_crds::ConditionStatus;
use pointsman_crds::settings::Mode;
use pointsman_e2e::api_server::ApiServer;
use serde_json::{Value, json};
use tokio::time::sleep;

use support::operator::{Operator, Stage, condition, eventually, read};

fn base(mode: &str) -> Value {
    json!({"proxy": {"mode": mode}})
}

#[allow(clippy::needless_pass_by_value, reason = "callers pass json!(…)")]
fn edge(priority: i32, proxy: Value) -> Value {
    json!({"nodeSelector": {"matchLabels": {"pool": "edge"}}, "priority": priority, "proxy": proxy})
}

async fn merge(stage: &Stage, config_map: &str, change: &Value) {
    let patch = Patch::Merge(change);
    stage.config_maps.patch(config_map, &PatchParams::default(), &patch).await.unwrap();
}

// ids: CFG-16
#[tokio::test]
async fn layers_reach_the_nodes_and_their_reports_reach_the_layers() {
    let stage = Stage::enter().await;
    let node = stage.add_node("m1", "edge").await;
    stage.add_node("m2", "").await;
    stage.set_layer("default", base("iptables")).await;
    stage.set_layer("edge", edge(10, json!({"masquerade": {"bit": 15}}))).await;
    let operator = stage.operator("op").await;

    let (config_map, configuration) = stage.configuration("m1", |_| true).await;
    assert_eq!((configuration.mode, configuration.masquerade.bit), (Mode::Iptables, 15));
    assert_eq!(config_map.owner_references()[0].uid, node.uid().unwrap());
    assert_eq!(config_map.labels()["pointsman.dev/pool"], "edge");
    assert_eq!(config_map.annotations()["pointsman.dev/sources"], "default@1,edge@1");
    let (_, other) = stage.configuration("m2", |_| true).await;
    assert_eq!(other.masquerade.bit, 14);

    let report = eventually("a report", 10, async || {
        let report = stage.reports.get_opt("m1").await.unwrap()?;
        report.status.is_some().then_some(report)
    })
    .await;
    let desired = report.spec.desired.as_ref().unwrap();
    assert_eq!(desired.revision, config_map.labels()["pointsman.dev/revision"]);
    assert_eq!(desired.hash, config_map.annotations()["pointsman.dev/config-hash"]);
    assert_eq!(report.spec.sources, ["default@1", "edge@1"]);
    assert_eq!(report.owner_references()[0].uid, node.uid().unwrap());
    assert_eq!(report.status.unwrap().state.as_deref(), Some("Unknown"));

    let rolling = stage.status("edge", |status| status.state.is_some()).await;
    assert_eq!(rolling.state.as_deref(), Some("RollingOut"));
    assert_eq!(condition(&rolling, "Ready"), "False/RollingOut");
    for node in ["m1", "m2"] {
        stage.agent_reports_ready(node).await;
    }
    for layer in ["edge", "default"] {
        let ready = stage.status(layer, |status| status.state.as_deref() == Some("Ready")).await;
        assert_eq!(condition(&ready, "Ready"), "True/RolloutComplete");
        assert_eq!(condition(&ready, "Accepted"), "True/Valid");
        assert_eq!(condition(&ready, "Conflicted"), "False/AsExpected");
        assert_eq!(ready.current_revision, ready.update_revision);
    }
    let table = stage.server.kubectl(&["get", "pxc"], "").await.unwrap();
    assert!(
        table
            .lines()
            .any(|line| line.split_whitespace().take(7).eq(["default", "iptables", "0", "2", "2", "2", "0"])),
        "{table}"
    );
    let events = stage.server.kubectl(&["describe", "pxc", "edge"], "").await.unwrap();
    assert!(events.contains("RolloutComplete"), "{events}");

    let metrics = operator.get("/metrics").await.unwrap();
    assert!(metrics.contains("pointsman_operator_leader 1"), "{metrics}");
    assert!(metrics.contains(r#"pointsman_operator_pool_nodes{pool="edge",state="Ready"} 1"#), "{metrics}");
    assert_eq!(operator.get("/readyz").await.unwrap(), "ok\n");
}

#[tokio::test]
async fn an_emergency_edit_stands_until_its_annotation_goes() {
    let stage = Stage::enter().await;
    for node in ["b1", "b2"] {
        stage.add_node(node, "").await;
    }
    stage.set_layer("default", base("iptables")).await;
    let _operator = stage.operator("op").await;
    stage.configuration("b1", |_| true).await;
    let glass = json!({"pointsman.dev/break-glass": "DNS is down", "note": "by jane"});
    let edit = json!({
        "metadata": {"annotations": glass, "labels": {"team": "net"}},
        "data": {"config.yaml": "mode: by hand"},
    });
    merge(&stage, "b1", &edit).await;
    stage.set_layer("default", base("nftables")).await;
    stage.configuration("b2", |configuration| configuration.mode == Mode::Nftables).await;
    sleep(Duration::from_secs(3)).await;
    let edited = stage.config_maps.get("b1").await.unwrap();
    assert_eq!(edited.data.unwrap()["config.yaml"], "mode: by hand");
    merge(&stage, "b1", &json!({"metadata": {"annotations": {"pointsman.dev/break-glass": null}}})).await;
    let (mended, _) = stage.configuration("b1", |configuration| configuration.mode == Mode::Nftables).await;
    assert_eq!((mended.labels()["team"].as_str(), mended.annotations()["note"].as_str()), ("net", "by jane"));

    // The hash annotation may be right again while the content is not: somebody else wrote that.
    let glass = json!({"pointsman.dev/break-glass": "again"});
    let edit = json!({"metadata": {"annotations": glass}, "data": {"config.yaml": "mode: by hand"}});
    merge(&stage, "b1", &edit).await;
    merge(&stage, "b1", &json!({"metadata": {"annotations": {"pointsman.dev/break-glass": null}}})).await;
    let (mended, _) = stage.configuration("b1", |configuration| configuration.mode == Mode::Nftables).await;
    sleep(Duration::from_secs(3)).await;
    let later = stage.config_maps.get("b1").await.unwrap();
    assert_eq!(later.resource_version(), mended.resource_version(), "mended once, not again and again");
}

#[tokio::test]
async fn what_belongs_to_a_node_goes_with_it_and_its_namesake_gets_its_own() {
    let stage = Stage::enter().await;
    for node in ["s1", "s2"] {
        stage.add_node(node, "").await;
    }
    stage.set_layer("default", base("iptables")).await;
    let _operator = stage.operator("op").await;
    for node in ["s1", "s2"] {
        stage.configuration(node, |_| true).await;
        eventually("a report", 10, async || stage.reports.get_opt(node).await.unwrap()).await;
    }
    stage.nodes.delete("s1", &DeleteParams::default()).await.unwrap();
    eventually("the sweep", 10, async || {
        let config_map = stage.config_maps.get_opt("s1").await.unwrap();
        let report = stage.reports.get_opt("s1").await.unwrap();
        (config_map.is_none() && report.is_none()).then_some(())
    })
    .await;
    stage.nodes.delete("s2", &DeleteParams::default()).await.unwrap();
    let uid = stage.add_node("s2", "").await.uid();
    eventually("the namesake's objects", 10, async || {
        let config_map = stage.config_maps.get_opt("s2").await.unwrap()?;
        let report = stage.reports.get_opt("s2").await.unwrap()?;
        let owners = [config_map.owner_references(), report.owner_references()];
        owners.iter().all(|owners| owners.len() == 1 && Some(&owners[0].uid) == uid.as_ref()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_conflict_shows_on_both_layers_and_changes_nothing() {
    let stage = Stage::enter().await;
    stage.add_node("c1", "edge").await;
    stage.add_node("c2", "").await;
    stage.set_layer("default", base("iptables")).await;
    let _operator = stage.operator("op").await;
    let (before, _) = stage.configuration("c1", |_| true).await;
    stage.set_layer("a", edge(5, json!({"masquerade": {"bit": 1}}))).await;
    stage.configuration("c1", |configuration| configuration.masquerade.bit == 1).await;
    stage.set_layer("b", edge(5, json!({"masquerade": {"bit": 2}}))).await;
    for (layer, other) in [("a", "b"), ("b", "a")] {
        let status =
            stage.status(layer, |status| condition(status, "Conflicted") == "True/LayerConflict").await;
        assert_eq!(status.state.as_deref(), Some("Conflicted"));
        let [conflict] = status.conflicts.as_slice() else { panic!("{:?}", status.conflicts) };
        assert_eq!((conflict.with.as_str(), conflict.field_path.as_str()), (other, "proxy.masquerade.bit"));
        assert_eq!(conflict.nodes, 1);
    }
    stage.set_layer("default", base("nftables")).await;
    stage.configuration("c2", |configuration| configuration.mode == Mode::Nftables).await;
    let held = read(&stage.config_maps.get("c1").await.unwrap()).unwrap();
    assert_eq!((held.mode, held.masquerade.bit), (Mode::Iptables, 1), "keeps what it had");
    let delete = DeleteParams::default();
    stage.layers.delete("b", &delete).await.unwrap();
    stage.configuration("c1", |configuration| configuration.mode == Mode::Nftables).await;
    stage.status("a", |status| condition(status, "Conflicted") == "False/AsExpected").await;
    stage.layers.delete("a", &delete).await.unwrap();
    let (after, configuration) =
        stage.configuration("c1", |configuration| configuration.masquerade.bit == 14).await;
    assert_eq!(configuration.mode, Mode::Nftables);
    assert_ne!(before.labels()["pointsman.dev/revision"], after.labels()["pointsman.dev/revision"]);
}

#[tokio::test]
async fn a_merge_that_makes_no_sense_is_not_accepted() {
    let stage = Stage::enter().await;
    stage.add_node("i1", "edge").await;
    stage.set_layer("default", base("iptables")).await;
    let _operator = stage.operator("op").await;
    let (before, _) = stage.configuration("i1", |_| true).await;
    // Each is valid by itself; only together do the ports collide.
    stage.set_layer("edge", edge(5, json!({"metricsPort": 10256}))).await;
    let status = stage.status("edge", |status| status.state.as_deref() == Some("Invalid")).await;
    assert_eq!(condition(&status, "Accepted"), "False/InvalidMergedConfig");
    let accepted = status.conditions.iter().find(|condition| condition.type_ == "Accepted").unwrap();
    assert!(accepted.message.contains("healthzPort and metricsPort must differ"), "{}", accepted.message);
    let held = stage.config_maps.get("i1").await.unwrap();
    assert_eq!(held.resource_version(), before.resource_version());
    stage.set_layer("edge", edge(5, json!({"metricsPort": 10300}))).await;
    stage.configuration("i1", |configuration| configuration.metrics_port == 10300).await;
    stage.status("edge", |status| condition(status, "Accepted") == "True/Valid").await;
}

#[tokio::test]
async fn without_a_base_nothing_is_written_and_every_layer_says_why() {
    let stage = Stage::enter().await;
    stage.add_node("d1", "edge").await;
    stage.set_layer("edge", edge(5, json!({"mode": "iptables"}))).await;
    let operator = stage.operator("op").await;
    let status = stage.status("edge", |status| status.state.is_some()).await;
    assert_eq!(condition(&status, "Accepted"), "False/NoBase");
    assert!(stage.config_maps.get_opt("d1").await.unwrap().is_none());
    assert!(stage.reports.get_opt("d1").await.unwrap().is_none());
    assert!(operator.log().contains("no ProxyConfiguration named 'default'"), "{}", operator.log());
    stage.set_layer("default", base("iptables")).await;
    stage.configuration("d1", |_| true).await;
}

#[tokio::test]
async fn a_pause_holds_everything_back() {
    let stage = Stage::enter().await;
    stage.add_node("p1", "").await;
    stage.set_layer("default", base("iptables")).await;
    let _operator = stage.operator("op").await;
    let (before, _) = stage.configuration("p1", |_| true).await;
    stage.agent_reports_ready("p1").await;
    let mut paused = base("nftables");
    paused["rollout"] = json!({"paused": true});
    stage.set_layer("default", paused).await;
    let status = stage.status("default", |status| status.state.as_deref() == Some("Paused")).await;
    assert_eq!(condition(&status, "Progressing"), "False/Paused");
    let held = stage.config_maps.get("p1").await.unwrap();
    assert_eq!(held.resource_version(), before.resource_version());
    stage.set_layer("default", base("nftables")).await;
    stage.configuration("p1", |configuration| configuration.mode == Mode::Nftables).await;
}

#[tokio::test]
async fn a_silent_agents_mark_is_replaced_by_its_next_word() {
    let stage = Stage::enter().await;
    stage.add_node("u1", "").await;
    stage.set_layer("default", base("iptables")).await;
    let _operator = stage.operator("op").await;
    let unknown = eventually("a report", 10, async || {
        let status = stage.reports.get_opt("u1").await.unwrap()?.status?;
        (status.state.as_deref() == Some("Unknown")).then_some(status)
    })
    .await;
    let ready = unknown.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap();
    assert_eq!((ready.status, ready.reason.as_str()), (ConditionStatus::Unknown, "AgentUnreachable"));
    stage.agent_reports_ready("u1").await;
    sleep(Duration::from_secs(3)).await;
    let status = stage.reports.get("u1").await.unwrap().status.unwrap();
    assert_eq!(status.state.as_deref(), Some("Ready"), "the operator leaves a living agent's word alone");
}

#[tokio::test]
async fn a_second_replica_takes_over_from_a_killed_leader_within_20_seconds() {
    let stage = Stage::enter().await;
    stage.add_node("t1", "").await;
    stage.set_layer("default", base("iptables")).await;
    let mut first = stage.operator("first").await;
    stage.configuration("t1", |_| true).await;
    let second = stage.operator("second").await;
    eventually("the standby to be ready", 10, async || {
        second.get("/readyz").await.filter(|body| body == "ok\n")
    })
    .await;
    // Until the standby has seen a renewal or two.
    sleep(Duration::from_secs(5)).await;
    assert!(stage.leader().await.unwrap().starts_with("first"));
    first.kill().await;
    let killed = Instant::now();
    stage.set_layer("default", base("nftables")).await;
    eventually("the next leader's work", 20, async || {
        let configuration = read(&stage.config_maps.get("t1").await.unwrap())?;
        (configuration.mode == Mode::Nftables).then_some(())
    })
    .await;
    let taken = killed.elapsed();
    println!("the configuration was written {:.1} s after the leader was killed", taken.as_secs_f64());
    assert!(taken < Duration::from_secs(20), "{taken:?}");
    assert!(stage.leader().await.unwrap().starts_with("second"));
}

#[tokio::test]
async fn a_leader_that_ends_hands_over_at_once() {
    let stage = Stage::enter().await;
    stage.add_node("h1", "").await;
    stage.set_layer("default", base("iptables")).await;
    let mut first = stage.operator("first").await;
    stage.configuration("h1", |_| true).await;
    let _second = stage.operator("second").await;
    sleep(Duration::from_secs(3)).await;
    let ended = Instant::now();
    assert!(first.terminate().await < Duration::from_secs(2), "{}", first.log());
    stage.set_layer("default", base("nftables")).await;
    stage.configuration("h1", |configuration| configuration.mode == Mode::Nftables).await;
    let taken = ended.elapsed();
    println!("the configuration was written {:.1} s after the leader was asked to end", taken.as_secs_f64());
    assert!(taken < Duration::from_secs(6), "{taken:?}");
}

#[tokio::test]
async fn a_replica_that_loses_the_lease_writes_no_more() {
    let stage = Stage::enter().await;
    stage.add_node("l1", "").await;
    stage.set_layer("default", base("iptables")).await;
    let operator = stage.operator("op").await;
    stage.configuration("l1", |_| true).await;
    // Somebody who goes on renewing.
    let steal = async || {
        let now = k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.000000Z").to_string();
        let spec = json!({"spec": {"holderIdentity": "thief", "renewTime": now}});
        let patch = Patch::Merge(&spec);
        stage.leases.patch("pointsman-operator", &PatchParams::default(), &patch).await.unwrap();
    };
    steal().await;
    eventually("the loss", 5, async || {
        operator.get("/metrics").await.filter(|metrics| metrics.contains("pointsman_operator_leader 0"))
    })
    .await;
    stage.set_layer("default", base("nftables")).await;
    for _ in 0..9 {
        sleep(Duration::from_secs(2)).await;
        steal().await;
        let held = read(&stage.config_maps.get("l1").await.unwrap()).unwrap();
        assert_eq!(held.mode, Mode::Iptables);
    }
    // And who stops.
    eventually("the return", 20, async || {
        let configuration = read(&stage.config_maps.get("l1").await.unwrap())?;
        (configuration.mode == Mode::Nftables).then_some(())
    })
    .await;
}

#[tokio::test]
async fn without_crds_the_operator_waits_and_says_what_to_install() {
    let server = ApiServer::start().await.unwrap();
    let operator = Operator::start("op", server.kubeconfig()).await;
    let body = eventually("the reason", 10, async || {
        operator.get("/readyz").await.filter(|body| body.contains("pointsman.dev/v1alpha1"))
    })
    .await;
    assert!(body.contains("helm upgrade --install pointsman-crds"), "{body}");
    assert_eq!(operator.get("/livez").await.unwrap(), "ok\n", "waiting is no reason to be restarted");
    for (_, crd) in pointsman_crds::custom_resource_definitions().unwrap() {
        server.kubectl(&["create", "-f", "-"], &crd.to_string()).await.unwrap();
    }
    eventually("readiness", 20, async || operator.get("/readyz").await.filter(|body| body == "ok\n")).await;
    drop(operator);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_missing_right_is_named() {
    let stage = Stage::enter().await;
    // An account to which no role is bound.
    let operator = stage.operator_as("op", "default").await;
    for (verb, resource) in
        [("list", "nodes"), ("list", "configmaps"), ("list", "proxynodestatuses.pointsman.dev")]
    {
        let right = format!("its role needs verb {verb} on {resource};");
        eventually(&right, 20, async || operator.get("/readyz").await.filter(|body| body.contains(&right)))
            .await;
    }
    eventually("the lease", 10, async || {
        operator.log().contains("its role needs verb get on leases.coordination.k8s.io;").then_some(())
    })
    .await;
}
