//! Pointsman in a test cluster: what its status says, and its own processes.
//!
//! In: a cluster in which Pointsman is installed. Out: the state of each node as `kubectl get proxynodestatus` shows it,
//! waiting for what must become so, and killing an agent or an operator as a crash would.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pointsman_crds::names::{OPERATOR_LEASE, SYSTEM_NAMESPACE};
use pointsman_crds::{ConditionStatus, ProxyNodeStatus};
use tokio::time::sleep;

use crate::cluster::Cluster;

/// What a ProxyNodeStatus says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// The node.
    pub name: String,
    /// Its state in a word.
    pub state: String,
    /// The mode that serves now; empty if none does.
    pub mode: String,
    /// The revision it is to have.
    pub desired: String,
    /// The revision in its kernel.
    pub active: String,
    /// Whether the condition Ready is True.
    pub ready: bool,
    /// The conditions, `Type=Status/Reason: message`.
    pub conditions: Vec<String>,
}

impl NodeState {
    /// Whether the node is Ready, and with what is assigned to it.
    #[must_use]
    pub fn is_ready_with_assigned(&self) -> bool {
        self.ready && self.state == "Ready" && !self.active.is_empty() && self.active == self.desired
    }

    /// Whether a condition has this status and reason, as in `Synced=False/LockTimeout`.
    #[must_use]
    pub fn has(&self, condition: &str) -> bool {
        self.conditions.iter().any(|text| text.split(':').next() == Some(condition))
    }
}

/// The state of every node that has one, by name.
pub async fn node_states(cluster: &Cluster) -> Result<Vec<NodeState>> {
    let list = Api::<ProxyNodeStatus>::all(cluster.client()).list(&ListParams::default()).await?;
    Ok(list.items.into_iter().map(read).collect())
}

/// The packet mark that says "masquerade" in a node's kernel, whatever a status says; 0 if no rule has one.
pub async fn masquerade_mark(cluster: &Cluster, node: &str) -> Result<u32> {
    let table = cluster.node(node)?.exec(&["nft", "list", "table", "ip", "pointsman"]).await?;
    let mark = table.split_once("meta mark set meta mark | 0x").map(|(_, rest)| rest);
    let digits = mark.and_then(|rest| rest.split_whitespace().next()).unwrap_or("0");
    u32::from_str_radix(digits, 16).with_context(|| format!("the mark 0x{digits} of {node}"))
}

/// The state of one node.
pub async fn node_state(cluster: &Cluster, node: &str) -> Result<NodeState> {
    Ok(read(Api::<ProxyNodeStatus>::all(cluster.client()).get(node).await?))
}

fn read(object: ProxyNodeStatus) -> NodeState {
    let status = object.status.unwrap_or_default();
    let conditions = status.conditions;
    NodeState {
        name: object.metadata.name.unwrap_or_default(),
        state: status.state.unwrap_or_default(),
        mode: status.mode.unwrap_or_default(),
        desired: object.spec.desired.map(|desired| desired.revision).unwrap_or_default(),
        active: status.config.and_then(|config| config.active).unwrap_or_default(),
        ready: conditions.iter().any(|c| c.type_ == "Ready" && c.status == ConditionStatus::True),
        conditions: conditions
            .into_iter()
            .map(|c| format!("{}={}/{}: {}", c.type_, c.status, c.reason, c.message))
            .collect(),
    }
}

/// Waits until every node is Ready with what is assigned to it.
pub async fn all_ready(cluster: &Cluster, patience: Duration) -> Result<()> {
    eventually(patience, "every node Ready with its assigned revision", async || {
        let nodes = node_states(cluster).await?;
        ensure!(nodes.len() == cluster.nodes().len(), "{} nodes report", nodes.len());
        match nodes.iter().find(|node| !node.is_ready_with_assigned()) {
            Some(node) => anyhow::bail!("{node:?}"),
            None => Ok(()),
        }
    })
    .await
}

/// Repeats `check` until it holds; when patience ends, its last error says why it does not.
pub async fn eventually<T>(patience: Duration, what: &str, check: impl AsyncFn() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match check().await {
            Ok(value) => return Ok(value),
            Err(error) if start.elapsed() > patience => {
                return Err(error.context(format!("not so after {} s: {what}", patience.as_secs())));
            }
            Err(_) => sleep(Duration::from_millis(250)).await,
        }
    }
}

/// The agent's pod on a node.
pub async fn agent_pod(cluster: &Cluster, node: &str) -> Result<String> {
    pod_of(cluster, "app.kubernetes.io/component=agent", |pod| {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
    })
    .await
}

/// The pod of the operator replica that leads now.
pub async fn leader_pod(cluster: &Cluster) -> Result<String> {
    let lease = Api::<Lease>::namespaced(cluster.client(), SYSTEM_NAMESPACE).get(OPERATOR_LEASE).await?;
    let holder = lease.spec.and_then(|spec| spec.holder_identity).filter(|holder| !holder.is_empty());
    let holder = holder.context("nobody holds the operator's Lease")?;
    pod_of(cluster, "app.kubernetes.io/component=operator", |pod| {
        pod.metadata.name.as_deref().is_some_and(|name| holder.starts_with(name))
    })
    .await
}

async fn pod_of(cluster: &Cluster, labels: &str, wanted: impl Fn(&Pod) -> bool) -> Result<String> {
    let pods = Api::<Pod>::namespaced(cluster.client(), SYSTEM_NAMESPACE);
    let list = pods.list(&ListParams::default().labels(labels)).await?;
    let pod = list.items.into_iter().find(|pod| wanted(pod) && pod.metadata.deletion_timestamp.is_none());
    pod.and_then(|pod| pod.metadata.name).with_context(|| format!("no such pod among those with {labels}"))
}

/// Kills the process of one of Pointsman's pods with SIGKILL. Its kubelet starts it again.
pub async fn kill_pod_process(cluster: &Cluster, pod: &str) -> Result<()> {
    let pid = cluster.pod_pid(SYSTEM_NAMESPACE, pod).await?;
    kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing {pod}"))
}
