//! `ProxyNodeStatus` (pns): what one node is to have, and what it has.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::settings::Mode;

/// What a node is to have. Written by the operator.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "pointsman.dev",
    version = "v1alpha1",
    kind = "ProxyNodeStatus",
    plural = "proxynodestatuses",
    shortname = "pns",
    category = "proxy",
    status = "ProxyNodeStatusStatus",
    derive = "PartialEq",
    doc = "The state of the service proxy on the node of the same name. spec is written by the operator, status by that node's agent.",
    annotation("helm.sh/resource-policy", "keep"),
    selectable = ".status.state",
    selectable = ".status.mode",
    selectable = ".spec.desired.revision",
    selectable = ".spec.pool",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".status.mode"),
    printcolumn(name = "Desired", type_ = "string", json_path = ".spec.desired.revision"),
    printcolumn(name = "Active", type_ = "string", json_path = ".status.config.active"),
    printcolumn(name = "Services", type_ = "integer", json_path = ".status.sync.services"),
    printcolumn(name = "Endpoints", type_ = "integer", json_path = ".status.sync.endpoints"),
    printcolumn(name = "Lag", type_ = "string", json_path = ".status.sync.latencyP99", description = "p99 time from API change to kernel over the last window"),
    printcolumn(name = "Heartbeat", type_ = "date", json_path = ".status.heartbeatTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Last-Good", type_ = "string", json_path = ".status.config.lastKnownGood", priority = 1),
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agent.version", priority = 1),
    printcolumn(name = "Kernel", type_ = "string", json_path = ".status.node.kernelVersion", priority = 1),
    printcolumn(name = "Drift", type_ = "string", json_path = ".status.conditions[?(@.type==\"Drifted\")].status", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1),
    validation = Rule::new("self.metadata.name == self.spec.nodeName")
        .message("spec.nodeName must equal metadata.name")
        .field_path(".spec.nodeName"),
)]
#[serde(rename_all = "camelCase")]
pub struct ProxyNodeStatusSpec {
    /// The node; equal to the object's name.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.nodeName is immutable"))]
    pub node_name: String,
    /// Name of the highest-priority ProxyConfiguration that matches this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub pool: Option<String>,
    /// The layers merged for this node, `layer@generation`, lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), inner(length(max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub sources: Vec<String>,
    /// What the node's ConfigMap holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<Desired>,
}

/// The configuration assigned to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    /// Its revision.
    #[schemars(length(max = 63))]
    pub revision: String,
    /// Hash of its bytes; a second copy, guarded apart from the ConfigMap's annotation.
    #[schemars(length(max = 71), regex(pattern = "^sha256:[0-9a-f]{64}$"))]
    pub hash: String,
    /// When it was assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned_time: Option<Time>,
}

/// What a node has. Written by its agent; by the operator only to say that the agent is silent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProxyNodeStatusStatus {
    /// The generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Ready, Applying, Degraded, Incompatible, Stale or Unknown; derived from conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub state: Option<String>,
    /// The mode that serves now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub mode: Option<String>,
    /// When the agent last wrote this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_time: Option<Time>,
    /// The agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,
    /// What the node offers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeInfo>,
    /// Which configuration is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<ConfigInfo>,
    /// The last writes to the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncInfo>,
    /// Up to 5 services whose last change took longest to reach the kernel on this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub slowest_services: Vec<SlowService>,
    /// Foreign changes to the kernel state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftInfo>,
    /// What a configuration under enforcement Plan would change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanInfo>,
    /// Ready, ConfigApplied, Synced, Compatible, Drifted, Tampered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 12))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The agent that reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct AgentInfo {
    /// Its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub version: Option<String>,
    /// When it started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Versions of the node configuration that it reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4), inner(length(max = 16)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub config_versions: Vec<String>,
}

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "the usual names")]
pub enum IpFamily {
    IPv4,
    IPv6,
}

/// What the node offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct NodeInfo {
    /// Kernel release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub kernel_version: Option<String>,
    /// Version and flavour of the iptables tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub iptables_version: Option<String>,
    /// Version of nft, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub nft_version: Option<String>,
    /// Families the node has, primary first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub ip_families: Vec<IpFamily>,
    /// Modes that the node can run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub supported_modes: Vec<Mode>,
}

/// Which configuration is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct ConfigInfo {
    /// The revision in the node's ConfigMap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub assigned: Option<String>,
    /// The revision in the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub active: Option<String>,
    /// Hash of the active revision's bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 71))]
    pub active_hash: Option<String>,
    /// The revision that last passed its trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub last_known_good: Option<String>,
    /// The revision that was refused, if the assigned one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub rejected: Option<String>,
}

/// The last writes to the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct SyncInfo {
    /// Services programmed.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub services: i32,
    /// Endpoints known, over all services.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub endpoints: i32,
    /// Rules or elements that we hold in the kernel.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub rules: i32,
    /// Last successful write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_sync_time: Option<Time>,
    /// Last successful write of everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_full_sync_time: Option<Time>,
    /// How long the last write took.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub last_duration_milliseconds: i32,
    /// p99 time from API change to kernel over the last window, for people.
    #[serde(default, rename = "latencyP99", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 12))]
    pub latency_p99: Option<String>,
    /// The same in milliseconds.
    #[serde(default, rename = "latencyP99Milliseconds", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub latency_p99_milliseconds: Option<i32>,
    /// Failed writes since the last success.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub consecutive_failures: i32,
    /// What the last failed write said; empty after a success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub last_error: Option<String>,
}

/// A service that was slow to reach the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlowService {
    /// `namespace/name`.
    #[schemars(length(max = 127))]
    pub service: String,
    /// From API change to kernel.
    #[schemars(range(min = 0))]
    pub latency_milliseconds: i32,
}

/// Foreign changes to the kernel state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct DriftInfo {
    /// When the agent last looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_check_time: Option<Time>,
    /// How often something was changed, since the agent's start.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub foreign_changes: i32,
    /// How often it was repaired.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub repairs: i32,
    /// What differed last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub last_diff: Option<String>,
}

/// What a configuration under enforcement Plan would change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct PlanInfo {
    /// The planned revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub revision: Option<String>,
    /// Rules or elements it adds.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub added: i32,
    /// Rules or elements it removes.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub removed: i32,
    /// Rules or elements it changes.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub changed: i32,
    /// Equal diffs have equal hashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 71))]
    pub diff_hash: Option<String>,
    /// The beginning of the diff.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub sample: Option<String>,
}
