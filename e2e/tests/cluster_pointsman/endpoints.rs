//! Which endpoints real pods make, and who reaches them: zones and nodes, pods on their way out, a rolling update, and what
//! conntrack keeps of a connection that one side has closed.
//!
//! The endpoints are the client pods of the workload, which run the same server: a label puts one into a Service or takes it
//! out at once. What leaves and what is replaced has Deployments of its own.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pointsman_e2e::addons::wait_available;
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::Cluster;
use pointsman_e2e::images::TEST_SERVER_IMAGE;
use pointsman_e2e::pointsman::eventually;
use pointsman_e2e::probe::{Place, Summary};
use serde_json::{Value, json};

use crate::{NAMESPACE, PATIENCE};

const ZONE: &str = "topology.kubernetes.io/zone";
/// Requests of which, with two endpoints, all meet one in one of 8,000 cases.
const REQUESTS: u32 = 14;

/// The Service `near` of the client pods that have its label.
struct Near<'a> {
    cluster: &'a Cluster,
    target: String,
}

impl<'a> Near<'a> {
    async fn create(cluster: &'a Cluster, metadata: Value, spec: Value) -> Result<Self> {
        Workload::create(cluster, NAMESPACE).await?;
        let near = Self {
            cluster,
            target: service(cluster, "near", metadata, spec, json!({"trial": "near"})).await?,
        };
        for number in [1, 2] {
            near.label(number, true).await?;
        }
        Ok(near)
    }

    /// Makes the client pod of a node an endpoint, or no endpoint.
    async fn label(&self, number: u8, endpoint: bool) -> Result<()> {
        let (pod, label) = (format!("client-node{number}"), if endpoint { "trial=near" } else { "trial-" });
        self.cluster.kubectl(&["label", "pod", "-n", NAMESPACE, &pod, label, "--overwrite"]).await.map(drop)
    }

    /// Moves a node into a zone. Its endpoint comes after it: the controller of the slices does not look at a node again
    /// for an endpoint that it has.
    async fn move_node(&self, number: u8, to: u8) -> Result<()> {
        self.label(number, false).await?;
        zone(self.cluster, number, to).await?;
        self.meets([&[3 - number], &[3 - number]]).await?;
        self.label(number, true).await
    }

    /// Waits until each node meets exactly these nodes' endpoints; `expected[0]` are those that node1 meets.
    async fn meets(&self, expected: [&[u8]; 2]) -> Result<()> {
        try_join_all((1..=2_u8).zip(expected).map(async |(number, nodes)| {
            let from = Place::Node(format!("node{number}"));
            let wanted: BTreeSet<String> = nodes.iter().map(|node| format!("client-node{node}")).collect();
            eventually(PATIENCE, &format!("{from} meets {wanted:?} alone"), async || {
                let summary = self.cluster.probe(&from, &self.target, REQUESTS).await?;
                let met: BTreeSet<String> = summary.pods.keys().cloned().collect();
                ensure!(summary.failed == 0 && met == wanted, "{summary:?}");
                Ok(())
            })
            .await
        }))
        .await
        .map(drop)
    }

    /// Removes it, and whatever else the trial has changed.
    async fn end(self, outcome: Result<()>) -> Result<()> {
        self.cluster.kubectl(&["delete", "service", "-n", NAMESPACE, "near"]).await?;
        for number in [1, 2] {
            self.label(number, false).await?;
            zone(self.cluster, number, number).await?;
        }
        outcome
    }
}

/// Puts a node into a zone.
async fn zone(cluster: &Cluster, number: u8, zone: u8) -> Result<()> {
    let (node, label) = (format!("node{number}"), format!("{ZONE}=zone{zone}"));
    cluster.kubectl(&["label", "node", &node, &label, "--overwrite"]).await.map(drop)
}

/// Makes a Service of pods with a label, and returns `http://…` at its ClusterIP.
async fn service(
    cluster: &Cluster,
    name: &str,
    metadata: Value,
    spec: Value,
    selector: Value,
) -> Result<String> {
    let mut object = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]},
    });
    merge(&mut object, json!({"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}));
    cluster.apply(&object.to_string()).await?;
    let made = Api::<Service>::namespaced(cluster.client(), NAMESPACE).get(name).await?;
    let address = made.spec.and_then(|spec| spec.cluster_ip).context("the Service has no ClusterIP")?;
    Ok(format!("http://{address}:80/"))
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

// ids: TOP-33 TOP-34
pub async fn endpoints_of_the_zone_are_preferred(cluster: &Cluster) -> Result<()> {
    let near = Near::create(cluster, json!({}), json!({"trafficDistribution": "PreferSameZone"})).await?;
    let outcome = async {
        near.meets([&[1], &[2]]).await?;
        // One moves to a third zone, and then is the only one.
        near.move_node(2, 3).await?;
        near.meets([&[1], &[2]]).await?;
        near.label(1, false).await?;
        near.meets([&[2], &[2]]).await?;
        near.label(1, true).await?;
        near.meets([&[1], &[2]]).await?;
        // Two nodes of one zone share what is in it.
        near.move_node(2, 1).await?;
        near.meets([&[1, 2], &[1, 2]]).await
    };
    let outcome = outcome.await;
    near.end(outcome).await
}

// ids: TOP-35
pub async fn endpoints_of_the_node_are_preferred(cluster: &Cluster) -> Result<()> {
    let near = Near::create(cluster, json!({}), json!({"trafficDistribution": "PreferSameNode"})).await?;
    let outcome = async {
        near.move_node(2, 1).await?;
        near.meets([&[1], &[2]]).await?;
        // Without one on the node, one in its zone; without that, any.
        near.label(1, false).await?;
        near.meets([&[2], &[2]]).await?;
        zone(cluster, 2, 2).await?;
        near.meets([&[2], &[2]]).await?;
        near.label(1, true).await?;
        near.meets([&[1], &[2]]).await
    };
    let outcome = outcome.await;
    near.end(outcome).await
}

// ids: TOP-36
pub async fn topology_mode_auto_keeps_requests_in_the_zone(cluster: &Cluster) -> Result<()> {
    let metadata = json!({"annotations": {"service.kubernetes.io/topology-mode": "Auto"}});
    let near = Near::create(cluster, metadata, json!({})).await?;
    let outcome = async {
        near.meets([&[1], &[2]]).await?;
        // Zones without enough endpoints get no hints: then every node meets all.
        near.label(1, false).await?;
        near.meets([&[2], &[2]]).await
    };
    let outcome = outcome.await;
    near.end(outcome).await
}

/// A workload of the test server, whose pods serve for so long after they were told to end.
#[allow(clippy::needless_pass_by_value, reason = "called with json!")]
fn workload(kind: &str, name: &str, serves_for: Duration, spec: Value) -> Value {
    let seconds = serves_for.as_secs();
    let mut object = json!({
        "apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "terminationGracePeriodSeconds": seconds + 5,
                    "containers": [{
                        "name": "server", "image": TEST_SERVER_IMAGE, "imagePullPolicy": "IfNotPresent",
                        "env": [{"name": "SHUTDOWN_DELAY", "value": format!("{seconds}s")}],
                        "readinessProbe": {"httpGet": {"path": "/pod", "port": 8080}, "periodSeconds": 1},
                    }],
                },
            },
        },
    });
    merge(&mut object, json!({"spec": spec}));
    object
}

// ids: LB-9
pub async fn a_rolling_update_behind_a_load_balancer_loses_nothing(cluster: &Cluster) -> Result<()> {
    let surge = json!({"updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}});
    let rolled = workload("DaemonSet", "rolled", Duration::from_secs(3), surge);
    cluster.apply(&rolled.to_string()).await?;
    wait_available(cluster, NAMESPACE, "daemonset/rolled").await?;
    let node = cluster.node(crate::NODE)?.addresses().v4.to_string();
    let mut probes = Vec::new();
    for (policy, vip) in [("Cluster", "198.51.100.1"), ("Local", "198.51.100.2")] {
        let name = format!("rolled-{}", policy.to_lowercase());
        let spec = json!({"type": "LoadBalancer", "externalTrafficPolicy": policy});
        service(cluster, &name, json!({}), spec, json!({"app": "rolled"})).await?;
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": vip}]}}}).to_string();
        let patch = [
            "patch",
            "service",
            "-n",
            NAMESPACE,
            &name,
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ];
        cluster.kubectl(&patch).await?;
        // The load balancer: it sends what is for the address to a node.
        cluster.outside(&["ip", "route", "replace", vip, "via", &node]).await?;
        let target = format!("http://{vip}:80/");
        answered(cluster, &Place::Outside, &target).await?;
        probes.push((policy, cluster.start_probe(&Place::Outside, &target, &["-interval", "10ms"]).await?));
    }
    cluster.kubectl(&["rollout", "restart", "-n", NAMESPACE, "daemonset/rolled"]).await?;
    let rolled = wait_available(cluster, NAMESPACE, "daemonset/rolled").await;
    for (policy, probe) in probes {
        let summary = probe.finish().await?;
        eprintln!("  policy {policy}: {} requests, {} failed", summary.requests, summary.failed);
        ensure!(summary.failed == 0 && summary.requests > 100, "policy {policy}: {summary:?}");
        ensure!(summary.pods.len() > 1, "policy {policy}: nothing was rolled: {summary:?}");
    }
    rolled?;
    let gone =
        ["delete", "-n", NAMESPACE, "daemonset/rolled", "service/rolled-cluster", "service/rolled-local"];
    cluster.kubectl(&[&gone[..], &["--wait=false"]].concat()).await?;
    cluster.outside(&["ip", "route", "flush", "198.51.100.0/24"]).await.map(drop)
}

async fn answered(cluster: &Cluster, from: &Place, target: &str) -> Result<Summary> {
    eventually(PATIENCE, &format!("{from} is answered by {target}"), async || {
        let summary = cluster.probe(from, target, 3).await?;
        ensure!(summary.failed == 0, "{summary:?}");
        Ok(summary)
    })
    .await
}

// ids: TRM-11
pub async fn a_deployment_that_is_scaled_to_nothing_serves_to_the_end(cluster: &Cluster) -> Result<()> {
    let serves_for = Duration::from_secs(30);
    let on_one_node = json!({"template": {"spec": {"nodeName": crate::NODE}}});
    let leaving = workload("Deployment", "leaving", serves_for, on_one_node);
    cluster.apply(&leaving.to_string()).await?;
    let mut cases = Vec::new();
    for policy in ["Cluster", "Local"] {
        let name = format!("leaving-{}", policy.to_lowercase());
        let spec =
            json!({"type": "NodePort", "internalTrafficPolicy": policy, "externalTrafficPolicy": policy});
        let cluster_ip = service(cluster, &name, json!({}), spec, json!({"app": "leaving"})).await?;
        let port = ["get", "service", "-n", NAMESPACE, &name, "-o=jsonpath={.spec.ports[0].nodePort}"];
        let port: u16 = cluster.kubectl(&port).await?.trim().parse().context("a NodePort")?;
        for node in ["node1", crate::NODE] {
            let reached = policy == "Cluster" || node == crate::NODE;
            let address = IpAddr::from(cluster.node(node)?.addresses().v4);
            cases.push((Place::Node(node.to_owned()), cluster_ip.clone(), reached));
            cases.push((Place::Outside, format!("http://{address}:{port}/"), reached));
        }
    }
    wait_available(cluster, NAMESPACE, "deployment/leaving").await?;
    for (from, target, _) in cases.iter().filter(|(_, _, reached)| *reached) {
        answered(cluster, from, target).await?;
    }
    cluster.kubectl(&["scale", "-n", NAMESPACE, "deployment/leaving", "--replicas=0"]).await?;
    let slices = Api::<EndpointSlice>::namespaced(cluster.client(), NAMESPACE);
    let of_leaving = ListParams::default().labels("kubernetes.io/service-name=leaving-local");
    eventually(PATIENCE, "the endpoint terminates", async || {
        let list = slices.list(&of_leaving).await?;
        let mut conditions =
            list.items.into_iter().flat_map(|slice| slice.endpoints).filter_map(|end| end.conditions);
        ensure!(conditions.any(|it| it.terminating == Some(true) && it.serving == Some(true)), "not yet");
        Ok(())
    })
    .await?;
    // At the end of these requests, too, the pod is on its way out and not gone.
    let outcome = try_join_all(cases.iter().map(async |(from, target, reached)| {
        for _ in 0..5 {
            let summary = cluster.probe(from, target, if *reached { 10 } else { 1 }).await?;
            let right = if *reached { summary.failed == 0 } else { summary.failed == summary.requests };
            ensure!(right, "{from} to {target}, expected to be answered: {reached}: {summary:?}");
        }
        Ok(())
    }))
    .await;
    let list = slices.list(&of_leaving).await?;
    ensure!(list.items.iter().any(|slice| !slice.endpoints.is_empty()), "the pod has gone before its time");
    let gone =
        ["delete", "-n", NAMESPACE, "deployment/leaving", "service/leaving-cluster", "service/leaving-local"];
    cluster.kubectl(&[&gone[..], &["--wait=false"]].concat()).await?;
    let pods = [
        "delete",
        "pod",
        "-n",
        NAMESPACE,
        "-l",
        "app=leaving",
        "--grace-period=0",
        "--force",
        "--wait=false",
    ];
    cluster.kubectl(&pods).await?;
    outcome.map(drop)
}

// ids: CT-11
pub async fn a_half_closed_connection_is_kept_for_an_hour(cluster: &Cluster) -> Result<()> {
    let near = Near::create(cluster, json!({}), json!({})).await?;
    near.label(2, false).await?;
    let outcome = async {
        near.meets([&[1], &[1]]).await?;
        // A server that never closes: it does not run.
        let server = Pid::from_raw(cluster.pod_pid(NAMESPACE, "client-node1").await?);
        kill(server, Signal::SIGSTOP).context("stopping the server")?;
        let kept = half_close(cluster, &near.target).await;
        kill(server, Signal::SIGCONT).context("resuming the server")?;
        let seconds = kept?;
        ensure!((3540..=3660).contains(&seconds), "kept for {seconds} s");
        Ok(())
    };
    let outcome = outcome.await;
    near.end(outcome).await
}

/// Connects from a node to `target` and closes the client's side. Returns for how many seconds the node keeps the
/// connection then.
async fn half_close(cluster: &Cluster, target: &str) -> Result<u32> {
    let address = target.trim_start_matches("http://").trim_end_matches(":80/");
    let node = cluster.node(crate::NODE)?;
    // It gives up after a second, as the server does not close; its exit code says so.
    let _ = node.exec(&["nc.openbsd", "-N", "-w", "1", address, "80"]).await;
    let list =
        node.exec(&["conntrack", "-L", "-p", "tcp", "--orig-dst", address, "--state", "CLOSE_WAIT"]).await?;
    // tcp 6 3599 CLOSE_WAIT src=…
    let Some(line) = list.lines().find(|line| line.contains("CLOSE_WAIT")) else {
        bail!("no half-closed connection to {address}: {list:?}");
    };
    line.split_whitespace()
        .nth(2)
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("no time in {line:?}"))
}
