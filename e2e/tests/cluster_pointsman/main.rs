//! Pointsman in a real cluster, installed from its charts: what users see, and what happens when things die.
//!
//! All trials share one cluster and take turns; each leaves it as it found it. Names of trials can be given as a filter:
//! `cargo test -p pointsman-e2e --test cluster_pointsman -- killed`. With `POINTSMAN_KEEP_CLUSTER` set, the cluster
//! stays up for looking around.

mod endpoints;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use libtest_mimic::{Arguments, Failed, Trial};
use pointsman_crds::names::{
    ANNOTATION_BREAK_GLASS, NODE_CONFIG_NAMESPACE, OPERATOR_LEASE, SYSTEM_NAMESPACE,
};
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::{Cluster, Component};
use pointsman_e2e::pointsman::{
    agent_pod, all_ready, eventually, kill_pod_process, leader_pod, masquerade_mark, node_state, node_states,
};
use pointsman_e2e::probe::Summary;
use pointsman_e2e::state::Proxy;
use pointsman_e2e::traffic::Traffic;
use pointsman_e2e::up::Options;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use crate::endpoints::{
    a_deployment_that_is_scaled_to_nothing_serves_to_the_end, a_half_closed_connection_is_kept_for_an_hour,
    a_rolling_update_behind_a_load_balancer_loses_nothing, endpoints_of_the_node_are_preferred,
    endpoints_of_the_zone_are_preferred, topology_mode_auto_keeps_requests_in_the_zone,
};

const CLUSTER: &str = "test-pointsman";
const NAMESPACE: &str = "trials";
/// The node that things are done to.
const NODE: &str = "node2";
/// How long a dead component stays dead.
const DEAD: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_mins(2);
/// Within this a status must say that the kernel cannot be written.
const NOTICED: Duration = Duration::from_secs(15);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One cluster, one trial at a time.
    arguments.test_threads = Some(1);
    let runtime = match Runtime::new() {
        Ok(runtime) => Arc::new(runtime),
        Err(error) => {
            eprintln!("no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(&runtime)).exit_code();
    }
    let up = async {
        let cluster = Cluster::up(&Options::new(CLUSTER, Proxy::Pointsman)).await?;
        Workload::create(&cluster, NAMESPACE).await?;
        all_ready(&cluster, PATIENCE).await
    };
    let outcome = runtime.block_on(up);
    let exit = match outcome {
        Ok(()) => libtest_mimic::run(&arguments, trials(&runtime)).exit_code(),
        Err(error) => {
            eprintln!("the cluster does not come up: {error:#}");
            ExitCode::FAILURE
        }
    };
    if std::env::var_os("POINTSMAN_KEEP_CLUSTER").is_none()
        && let Err(error) = runtime.block_on(Cluster::down(CLUSTER))
    {
        eprintln!("the cluster does not go down: {error:#}");
        return ExitCode::FAILURE;
    }
    exit
}

/// Every trial, in the order in which they run.
fn trials(runtime: &Arc<Runtime>) -> Vec<Trial> {
    macro_rules! trials {
        ($($name:ident),+ $(,)?) => {
            vec![$({
                let runtime = Arc::clone(runtime);
                Trial::test(stringify!($name), move || {
                    runtime.block_on(async {
                        let cluster = Cluster::open(CLUSTER).await?;
                        $name(&cluster).await
                    }).map_err(|error| Failed::from(format!("{error:#}")))
                })
            }),+]
        };
    }
    trials![
        services_are_reached_from_everywhere,
        endpoints_of_the_zone_are_preferred,
        endpoints_of_the_node_are_preferred,
        topology_mode_auto_keeps_requests_in_the_zone,
        a_half_closed_connection_is_kept_for_an_hour,
        a_deployment_that_is_scaled_to_nothing_serves_to_the_end,
        a_rolling_update_behind_a_load_balancer_loses_nothing,
        a_live_change_of_the_masquerade_bit_loses_nothing,
        a_layer_reaches_only_its_nodes,
        an_edited_node_configuration_is_refused_and_repaired,
        nonsense_is_skipped_and_the_others_served,
        unwritable_rules_make_a_node_not_ready,
        a_held_xtables_lock_makes_a_node_not_ready,
        a_killed_agent_loses_nothing,
        a_killed_leader_is_replaced,
        a_killed_containerd_loses_nothing,
        a_killed_api_server_loses_nothing,
    ]
}

// ids: CIP-11
async fn services_are_reached_from_everywhere(cluster: &Cluster) -> Result<()> {
    let checks = Workload::create(cluster, NAMESPACE).await?.check_all().await?;
    ensure!(checks > 50, "only {checks} checks");
    Ok(())
}

async fn apply_settings(cluster: &Cluster, proxy: serde_json::Value) -> Result<()> {
    let patch = json!({"spec": {"proxy": proxy}}).to_string();
    cluster.kubectl(&["patch", "pxc", "default", "--type=merge", "-p", &patch]).await.map(drop)
}

// ids: CFG-17
async fn a_live_change_of_the_masquerade_bit_loses_nothing(cluster: &Cluster) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let agent = agent_pod(cluster, NODE).await?;
    let restarts = restarts_of(cluster, &agent).await?;
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    let mut old = node_state(cluster, NODE).await?.active;
    for bit in [20, 9, 14] {
        apply_settings(cluster, json!({"masquerade": {"bit": bit}})).await?;
        eventually(PATIENCE, "every node on the new revision", async || {
            for node in node_states(cluster).await? {
                ensure!(node.is_ready_with_assigned() && node.active != old, "{node:?}");
            }
            Ok(())
        })
        .await?;
        old = node_state(cluster, NODE).await?.active;
        let mark = masquerade_mark(cluster, NODE).await?;
        ensure!(mark == 1 << bit, "Ready with bit {bit}, but the kernel marks packets {mark:#x}");
    }
    traffic.finish().await?;
    ensure!(restarts_of(cluster, &agent).await? == restarts, "the agent was restarted");
    Ok(())
}

async fn restarts_of(cluster: &Cluster, pod: &str) -> Result<String> {
    let path = "-o=jsonpath={.metadata.uid} {.status.containerStatuses[0].restartCount}";
    cluster.kubectl(&["get", "pod", "-n", SYSTEM_NAMESPACE, pod, path]).await
}

// ids: CFG-16
async fn a_layer_reaches_only_its_nodes(cluster: &Cluster) -> Result<()> {
    let before = node_state(cluster, "node1").await?;
    let layer = |name: &str, bit: u8| {
        json!({
            "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration", "metadata": {"name": name},
            "spec": {
                "nodeSelector": {"matchLabels": {"kubernetes.io/hostname": NODE}},
                "priority": 10, "proxy": {"masquerade": {"bit": bit}},
            },
        })
        .to_string()
    };
    cluster.apply(&layer("edge", 21)).await?;
    eventually(PATIENCE, "node2 in pool edge", async || {
        let node = node_state(cluster, NODE).await?;
        ensure!(node.is_ready_with_assigned() && node.active.starts_with("edge-"), "{node:?}");
        Ok(())
    })
    .await?;
    ensure!(node_state(cluster, "node1").await?.active == before.active, "node1 was changed too");
    // A second layer of the same priority that wants something else: a conflict, and the node keeps what it has.
    let kept = node_state(cluster, NODE).await?.active;
    cluster.apply(&layer("rival", 22)).await?;
    for name in ["edge", "rival"] {
        let condition = format!("--for=condition=Conflicted=True pxc/{name}");
        let mut wait = vec!["wait", "--timeout=30s"];
        wait.extend(condition.split(' '));
        cluster.kubectl(&wait).await?;
    }
    ensure!(node_state(cluster, NODE).await?.active == kept, "a conflict changed the node");
    cluster.kubectl(&["delete", "pxc", "rival", "edge"]).await?;
    eventually(PATIENCE, "node2 back on the base", async || {
        let node = node_state(cluster, NODE).await?;
        ensure!(node.is_ready_with_assigned() && node.active.starts_with("default-"), "{node:?}");
        Ok(())
    })
    .await
}

async fn an_edited_node_configuration_is_refused_and_repaired(cluster: &Cluster) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let configs = Api::<ConfigMap>::namespaced(cluster.client(), NODE_CONFIG_NAMESPACE);
    let good = configs.get(NODE).await?;
    let content =
        good.data.as_ref().and_then(|data| data.get("config.yaml")).context("no config.yaml")?.clone();
    let patch = json!({"data": {"config.yaml": "mode: none"}}).to_string();
    let edit = ["patch", "configmap", "-n", NODE_CONFIG_NAMESPACE, NODE, "--type=merge", "-p", &patch];
    ensure!(cluster.kubectl(&edit).await.is_err(), "admission must refuse an edit that is no emergency");
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    // In the middle of a text in quotes.
    let cut = content.find("127.0.0.1").context("no address to cut")? + 4;
    // Each reason once, so that none is the last one's.
    for (content, reason) in [
        (content.replace("mode: nftables\n", "mode: nftables\ncolour: red\n"), "UnsupportedField"),
        (content[..cut].to_owned(), "Unreadable"),
        (content.replace("v1alpha1", "v9"), "UnsupportedVersion"),
    ] {
        let patch = json!({
            "metadata": {"annotations": {ANNOTATION_BREAK_GLASS: "a trial"}}, "data": {"config.yaml": content},
        })
        .to_string();
        let edit = ["patch", "configmap", "-n", NODE_CONFIG_NAMESPACE, NODE, "--type=merge", "-p", &patch];
        cluster.kubectl(&edit).await?;
        eventually(PATIENCE, &format!("ConfigApplied=False/{reason}"), async || {
            let node = node_state(cluster, NODE).await?;
            let refused =
                node.conditions.iter().any(|c| c.starts_with(&format!("ConfigApplied=False/{reason}")));
            ensure!(refused && !node.ready, "{node:?}");
            Ok(())
        })
        .await?;
    }
    // When the annotation goes, the configuration is the operator's again.
    let patch = json!({"metadata": {"annotations": {ANNOTATION_BREAK_GLASS: null}}}).to_string();
    cluster
        .kubectl(&["patch", "configmap", "-n", NODE_CONFIG_NAMESPACE, NODE, "--type=merge", "-p", &patch])
        .await?;
    all_ready(cluster, PATIENCE).await?;
    traffic.finish().await
}

async fn nonsense_is_skipped_and_the_others_served(cluster: &Cluster) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let first = "jsonpath={.items[0].status.podIP}";
    let pod = cluster.kubectl(&["get", "pods", "-n", NAMESPACE, "-l=app=web", "-o", first]).await?;
    let cluster_ip = ["get", "service", "empty", "-n", NAMESPACE, "-o=jsonpath={.spec.clusterIP}"];
    let target = format!("http://{}:80", cluster.kubectl(&cluster_ip).await?);
    let slice = |name: &str, kind: &str, address: &str, port: i32| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": "empty"}},
            "addressType": kind,
            "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        })
    };
    // The good one last: an agent that serves it has seen the other.
    for slice in [slice("names", "FQDN", "example.com", 80), slice("good", "IPv4", &pod, 8080)] {
        cluster.apply(&slice.to_string()).await?;
    }
    for node in cluster.nodes() {
        let from = web.client_on(node.name());
        eventually(PATIENCE, "the endpoint beside the nonsense", async || {
            let summary = cluster.probe(&from, &target, 20).await?;
            ensure!(summary.failed == 0 && summary.pods.len() == 1, "{summary:?}");
            Ok(())
        })
        .await?;
        let summary = cluster.probe(&from, &web.cluster_ip("http", 0)?, 20).await?;
        ensure!(summary.failed == 0, "{summary:?}");
    }
    all_ready(cluster, PATIENCE).await?;
    cluster.kubectl(&["delete", "endpointslice", "-n", NAMESPACE, "names", "good"]).await.map(drop)
}

/// Runs `words` in the mount namespace of the agent's container on the node.
async fn in_agent(cluster: &Cluster, words: &[&str]) -> Result<()> {
    let pid = cluster.pod_pid(SYSTEM_NAMESPACE, &agent_pod(cluster, NODE).await?).await?;
    let status = tokio::process::Command::new("nsenter")
        // With its process namespace, as umount looks itself up in the container's /proc.
        .args(["--target", &pid.to_string(), "--mount", "--pid"])
        .args(words)
        .status()
        .await
        .context("entering the agent's container")?;
    ensure!(status.success(), "{words:?} in the agent's container: {status}");
    Ok(())
}

async fn not_ready(cluster: &Cluster, because: &str) -> Result<()> {
    let started = Instant::now();
    eventually(NOTICED, &format!("{NODE} not Ready, {because}"), async || {
        let node = node_state(cluster, NODE).await?;
        ensure!(!node.ready && node.state != "Ready" && node.has(because), "{node:?}");
        Ok(())
    })
    .await?;
    eprintln!("  not Ready after {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Puts the node into mode iptables, and waits until it is.
async fn iptables_on_node(cluster: &Cluster, name: &str, iptables: Value) -> Result<()> {
    let layer = json!({
        "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"matchLabels": {"kubernetes.io/hostname": NODE}},
            "priority": 10, "proxy": {"mode": "iptables", "iptables": iptables},
        },
    });
    cluster.apply(&layer.to_string()).await?;
    eventually(PATIENCE, &format!("{NODE} in mode iptables"), async || {
        let node = node_state(cluster, NODE).await?;
        ensure!(node.is_ready_with_assigned() && node.active.starts_with(&format!("{name}-")), "{node:?}");
        Ok(())
    })
    .await
}

/// Takes that back, and waits until the node is in the base's mode, with nothing left of iptables.
async fn base_on_node(cluster: &Cluster, name: &str) -> Result<()> {
    cluster.kubectl(&["delete", "pxc", name]).await?;
    eventually(PATIENCE, &format!("{NODE} on the base"), async || {
        let node = node_state(cluster, NODE).await?;
        ensure!(node.is_ready_with_assigned() && node.active.starts_with("default-"), "{node:?}");
        for tool in ["iptables-nft-save", "iptables-legacy-save"] {
            let rules = cluster.node(NODE)?.exec(&[tool]).await?;
            ensure!(!rules.contains("KUBE-SERVICES"), "rules of mode iptables are left:\n{rules}");
        }
        Ok(())
    })
    .await
}

async fn unwritable_rules_make_a_node_not_ready(cluster: &Cluster) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    iptables_on_node(cluster, "tools", json!({})).await?;
    let tool = "/usr/sbin/xtables-nft-multi";
    in_agent(cluster, &["mount", "--bind", "/bin/false", tool]).await?;
    let noticed = not_ready(cluster, "Synced=False/RestoreFailed").await;
    in_agent(cluster, &["umount", tool]).await?;
    noticed?;
    all_ready(cluster, PATIENCE).await?;
    base_on_node(cluster, "tools").await?;
    traffic.finish().await
}

// ids: REG-48107 REG-105742
async fn a_held_xtables_lock_makes_a_node_not_ready(cluster: &Cluster) -> Result<()> {
    iptables_on_node(cluster, "legacy", json!({"backend": "Legacy", "lockTimeoutSeconds": 2})).await?;
    let web = Workload::create(cluster, NAMESPACE).await?;
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    let mut holder = cluster.node(NODE)?.command(&["flock", "/run/xtables.lock", "sleep", "120"]);
    let mut holder = holder.kill_on_drop(true).spawn().context("holding the lock")?;
    let noticed = not_ready(cluster, "Synced=False/LockTimeout").await;
    holder.kill().await?;
    // flock's child keeps the lock; it is named by what it does.
    let _ = cluster.node(NODE)?.exec(&["pkill", "-f", "^sleep 120$"]).await;
    noticed?;
    all_ready(cluster, PATIENCE).await?;
    traffic.finish().await?;
    // To the other flavour, with the agent killed in the middle: nothing of the legacy one may be left. (Without a layer
    // the agent would stay with the flavour that it finds in use.)
    let pod = agent_pod(cluster, NODE).await?;
    let change = json!({"spec": {"proxy": {"iptables": {"backend": "NFT"}}}}).to_string();
    cluster.kubectl(&["patch", "pxc", "legacy", "--type=merge", "-p", &change]).await?;
    eventually(PATIENCE, "the agent at work in both flavours", async || {
        let rules = cluster.node(NODE)?.exec(&["iptables-nft-save", "-t", "nat"]).await?;
        ensure!(rules.contains("KUBE-SERVICES"), "not yet");
        Ok(())
    })
    .await?;
    kill_pod_process(cluster, &pod).await?;
    base_on_node(cluster, "legacy").await
}

// ids: SYN-15 REG-75360
async fn a_killed_agent_loses_nothing(cluster: &Cluster) -> Result<()> {
    outlive_the_agent(cluster).await?;
    iptables_on_node(cluster, "chains", json!({})).await?;
    outlive_the_agent(cluster).await?;
    base_on_node(cluster, "chains").await
}

/// Kills the agent of a node under traffic; its kubelet, which would start it again at once, is away meanwhile.
async fn outlive_the_agent(cluster: &Cluster) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    let pod = agent_pod(cluster, NODE).await?;
    let before = restarts_of(cluster, &pod).await?;
    let kubelet = Component::Kubelet(NODE.to_owned());
    cluster.kill(&kubelet).await?;
    kill_pod_process(cluster, &pod).await?;
    sleep(DEAD).await;
    cluster.start(&kubelet).await?;
    eventually(PATIENCE, "the agent back", async || {
        ensure!(restarts_of(cluster, &pod).await? != before, "not restarted yet");
        Ok(())
    })
    .await?;
    all_ready(cluster, PATIENCE).await?;
    traffic.finish().await
}

async fn a_killed_leader_is_replaced(cluster: &Cluster) -> Result<()> {
    let leases = Api::<Lease>::namespaced(cluster.client(), SYSTEM_NAMESPACE);
    let holder = async || {
        Ok::<_, anyhow::Error>(leases.get(OPERATOR_LEASE).await?.spec.and_then(|s| s.holder_identity))
    };
    let web = Workload::create(cluster, NAMESPACE).await?;
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    let old = holder().await?;
    let pod = leader_pod(cluster).await?;
    // Its kubelet would start it again within the lease's time; a dead machine does not come back.
    let node_of = ["get", "pod", "-n", SYSTEM_NAMESPACE, &pod, "-o=jsonpath={.spec.nodeName}"];
    let node = cluster.kubectl(&node_of).await?;
    let kubelet = Component::Kubelet(node);
    cluster.kill(&kubelet).await?;
    kill_pod_process(cluster, &pod).await?;
    let killed = Instant::now();
    let replaced = eventually(Duration::from_secs(20), "another replica leads", async || {
        ensure!(holder().await? != old, "the dead leader still holds the Lease");
        Ok(())
    })
    .await;
    eprintln!("  another replica leads after {:.1} s", killed.elapsed().as_secs_f64());
    cluster.start(&kubelet).await?;
    replaced?;
    // The new leader leads.
    apply_settings(cluster, json!({"logLevel": "debug"})).await?;
    eventually(PATIENCE, "a change applied by the new leader", async || {
        let config = Api::<ConfigMap>::namespaced(cluster.client(), NODE_CONFIG_NAMESPACE).get(NODE).await?;
        let data = config.data.unwrap_or_default();
        ensure!(data.get("config.yaml").is_some_and(|text| text.contains("logLevel: debug")), "not yet");
        Ok(())
    })
    .await?;
    apply_settings(cluster, json!({"logLevel": "info"})).await?;
    all_ready(cluster, PATIENCE).await?;
    traffic.finish().await
}

/// Kills a component under traffic, lets it stay dead, and starts it again.
async fn survive(cluster: &Cluster, component: &Component) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let traffic = Traffic::start(cluster, &web, NODE).await?;
    cluster.kill(component).await?;
    sleep(DEAD).await;
    cluster.start(component).await?;
    all_ready(cluster, PATIENCE).await?;
    traffic.finish().await?;
    // What changes now still reaches the kernel of every node.
    scale(cluster, 2).await?;
    served_by(cluster, &web, 2).await?;
    scale(cluster, 3).await?;
    served_by(cluster, &web, 3).await.map(drop)
}

async fn scale(cluster: &Cluster, replicas: u32) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    cluster.kubectl(&["scale", "deployment/web", &replicas, "-n", NAMESPACE]).await.map(drop)
}

async fn served_by(cluster: &Cluster, web: &Workload<'_>, pods: usize) -> Result<Summary> {
    let (from, target) = (web.client_on(NODE), web.cluster_ip("http", 0)?);
    eventually(PATIENCE, &format!("{pods} pods serve"), async || {
        let summary = cluster.probe(&from, &target, 40).await?;
        ensure!(summary.failed == 0 && summary.pods.len() == pods, "{summary:?}");
        Ok(summary)
    })
    .await
}

async fn a_killed_containerd_loses_nothing(cluster: &Cluster) -> Result<()> {
    survive(cluster, &Component::Containerd(NODE.to_owned())).await
}

// ids: SYN-15
async fn a_killed_api_server_loses_nothing(cluster: &Cluster) -> Result<()> {
    survive(cluster, &Component::ApiServer).await
}
