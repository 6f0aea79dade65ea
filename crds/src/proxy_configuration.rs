//! `ProxyConfiguration` (pxc): what people want, in layers.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::settings::{DriftPolicy, ProxySettings};

/// One layer of configuration for the nodes that its selector matches.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "pointsman.dev",
    version = "v1alpha1",
    kind = "ProxyConfiguration",
    plural = "proxyconfigurations",
    shortname = "pxc",
    category = "proxy",
    status = "ProxyConfigurationStatus",
    derive = "PartialEq",
    doc = "One layer of the service proxy's configuration. The one named 'default' is the base of all nodes.",
    annotation("helm.sh/resource-policy", "keep"),
    selectable = ".spec.proxy.mode",
    selectable = ".status.state",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.proxy.mode"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes.matched"),
    printcolumn(name = "Updated", type_ = "integer", json_path = ".status.nodes.updated"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.nodes.ready"),
    printcolumn(name = "Degraded", type_ = "integer", json_path = ".status.nodes.degraded"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.updateRevision", priority = 1),
    printcolumn(name = "Paused", type_ = "boolean", json_path = ".spec.rollout.paused", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1),
    validation = Rule::new("self.metadata.name.size() <= 52")
        .message("metadata.name must be at most 52 characters: revisions are named <name>-<10 hex digits> and used as a label value"),
    validation = Rule::new("self.metadata.name != 'default' || !has(self.spec.nodeSelector)")
        .message("the ProxyConfiguration named 'default' is the cluster base and must not set spec.nodeSelector")
        .field_path(".spec.nodeSelector"),
    validation = Rule::new("self.metadata.name == 'default' || has(self.spec.nodeSelector)")
        .message("spec.nodeSelector is required on every ProxyConfiguration except 'default' (use {} to select all nodes on purpose)"),
    validation = Rule::new("self.metadata.name != 'default' || has(self.spec.proxy.mode)")
        .message("spec.proxy.mode must be set explicitly on the ProxyConfiguration named 'default'"),
    validation = Rule::new("self.metadata.name != 'default' || !has(self.spec.priority) || self.spec.priority == 0")
        .message("spec.priority of the ProxyConfiguration named 'default' must be 0")
        .field_path(".spec.priority"),
)]
#[serde(rename_all = "camelCase")]
pub struct ProxyConfigurationSpec {
    /// Nodes this layer applies to. Only 'default' may (and must) omit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<NodeSelector>,
    /// Higher wins, field by field. Two layers of equal priority that set one field of one node to different values
    /// are a conflict; that node keeps its last applied configuration.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub priority: i32,
    /// Enforce programs nodes. Plan makes agents compute and report the rule diff without touching the kernel.
    #[serde(default)]
    pub enforcement: Enforcement,
    /// Data-plane settings. No OpenAPI defaults below this point - defaults are applied by the operator after layers
    /// are merged, else a default would mask a lower layer.
    pub proxy: ProxySettings,
    /// What agents do about foreign changes to the kernel state.
    #[serde(default)]
    pub drift: Drift,
    /// How a change reaches the nodes of this pool.
    #[serde(default)]
    pub rollout: Rollout,
}

/// Whether a layer is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Enforcement {
    /// Nodes are programmed.
    #[default]
    Enforce,
    /// Agents only compute and report what would change.
    Plan,
}

/// A label selector over Nodes. Empty selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct NodeSelector {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::match_labels")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements that a node must meet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub match_expressions: Vec<NodeSelectorRequirement>,
}

/// One requirement of a label selector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.operator in ['In','NotIn'] ? (has(self.values) && self.values.size() > 0) : (!has(self.values) || self.values.size() == 0)")
        .message("values must be non-empty for In/NotIn and empty for Exists/DoesNotExist"),
)]
pub struct NodeSelectorRequirement {
    /// The label's key.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// How the label is compared.
    pub operator: NodeSelectorOperator,
    /// What it is compared with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub values: Vec<String>,
}

/// How a label is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "the names of label selectors")]
pub enum NodeSelectorOperator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl NodeSelector {
    /// Whether a node with these labels is selected.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| {
                let value = labels.get(&requirement.key);
                match requirement.operator {
                    NodeSelectorOperator::In => value.is_some_and(|value| requirement.values.contains(value)),
                    NodeSelectorOperator::NotIn => {
                        !value.is_some_and(|value| requirement.values.contains(value))
                    }
                    NodeSelectorOperator::Exists => value.is_some(),
                    NodeSelectorOperator::DoesNotExist => value.is_none(),
                }
            })
    }
}

/// What an agent does about foreign changes to its kernel state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Drift {
    /// Repair, report, or do not look.
    #[serde(default)]
    pub policy: DriftPolicy,
    /// How often it looks.
    #[serde(default = "defaults::drift_interval")]
    #[schemars(range(min = 10, max = 3600))]
    pub interval_seconds: i32,
}

impl Default for Drift {
    fn default() -> Self {
        Self { policy: DriftPolicy::default(), interval_seconds: defaults::drift_interval() }
    }
}

/// How a change reaches the nodes of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.canary) || !has(self.canary.nodeSelector) || !has(self.canary.count)")
        .message("rollout.canary.nodeSelector and rollout.canary.count are mutually exclusive"),
)]
pub struct Rollout {
    /// Hold changes back while true; a node that has no configuration yet gets the current one.
    #[serde(default)]
    pub paused: bool,
    /// Nodes that may be between 'config written' and 'Ready with that config' at one time; number or percent; never
    /// rounds below 1.
    #[serde(default = "defaults::max_unavailable")]
    #[schemars(schema_with = "crate::schema::max_unavailable")]
    pub max_unavailable: IntOrString,
    /// Nodes that get a change first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
    /// How long a node must stay Ready before it counts as done.
    #[serde(default = "defaults::min_ready")]
    #[schemars(range(min = 0, max = 3600))]
    pub min_ready_seconds: i32,
    /// How long a node may take before the rollout halts.
    #[serde(default = "defaults::progress_deadline")]
    #[schemars(range(min = 30, max = 86400))]
    pub progress_deadline_seconds: i32,
    /// The rollout stops once this many updated nodes are Degraded.
    #[serde(default = "defaults::failure_threshold")]
    #[schemars(range(min = 1, max = 1000))]
    pub failure_threshold: i32,
    /// What happens then.
    #[serde(default)]
    pub on_failure: OnFailure,
    /// How many old revisions are kept.
    #[serde(default = "defaults::revision_history")]
    #[schemars(range(min = 1, max = 50))]
    pub revision_history_limit: i32,
    /// Checked on a node before and after a change; only those that passed before must pass after.
    #[serde(default)]
    pub probes: Probes,
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            paused: false,
            max_unavailable: defaults::max_unavailable(),
            canary: None,
            min_ready_seconds: defaults::min_ready(),
            progress_deadline_seconds: defaults::progress_deadline(),
            failure_threshold: defaults::failure_threshold(),
            on_failure: OnFailure::default(),
            revision_history_limit: defaults::revision_history(),
            probes: Probes::default(),
        }
    }
}

/// What happens to a rollout that fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnFailure {
    /// Stop.
    Halt,
    /// Stop and go back to the last fully good revision.
    #[default]
    Rollback,
}

/// Nodes that get a change first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Canary {
    /// The nodes, by label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<CanarySelector>,
    /// Or how many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub count: Option<i32>,
    /// How long they must be Ready before the others follow.
    #[serde(default = "defaults::soak")]
    #[schemars(range(min = 0, max = 86400))]
    pub soak_seconds: i32,
}

/// Labels of canary nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct CanarySelector {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::match_labels")]
    pub match_labels: BTreeMap<String, String>,
}

/// Checks around a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Probes {
    /// The API server answers.
    #[serde(default = "defaults::yes")]
    pub api_server: bool,
    /// The cluster's DNS answers.
    #[serde(rename = "clusterDNS", default = "defaults::yes")]
    pub cluster_dns: bool,
    /// These Services accept a connection.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub services: Vec<ServiceProbe>,
}

impl Default for Probes {
    fn default() -> Self {
        Self { api_server: true, cluster_dns: true, services: Vec::new() }
    }
}

/// A Service that must accept a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceProbe {
    /// Its namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Its name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Its port.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
}

mod defaults {
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

    pub fn drift_interval() -> i32 {
        60
    }
    pub fn max_unavailable() -> IntOrString {
        IntOrString::String("10%".to_owned())
    }
    pub fn min_ready() -> i32 {
        30
    }
    pub fn progress_deadline() -> i32 {
        600
    }
    pub fn failure_threshold() -> i32 {
        1
    }
    pub fn revision_history() -> i32 {
        10
    }
    pub fn soak() -> i32 {
        300
    }
    pub fn yes() -> bool {
        true
    }
}

/// What the operator has seen and done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProxyConfigurationStatus {
    /// The generation that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// One word for people and field selectors, derived from conditions - never an input to the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub state: Option<String>,
    /// The revision that all nodes of the pool last had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub current_revision: Option<String>,
    /// The revision that the nodes of the pool are to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub update_revision: Option<String>,
    /// The revision that was last rolled back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub last_rolled_back_revision: Option<String>,
    /// The revisions assigned to nodes of this pool at present; more than one while rolling out, or where a lower
    /// layer matches only some of the nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["revision".into()]))]
    pub revisions: Vec<RevisionStatus>,
    /// How many nodes are in which state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeCounts>,
    /// The first 20 in name order; the full set is 'kubectl get pns --field-selector status.state=Degraded'.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub failed_nodes: Vec<FailedNode>,
    /// Layers of equal priority that disagree with this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub conflicts: Vec<Conflict>,
    /// Accepted, Ready, Progressing, Degraded, Conflicted, Paused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// One revision and how many nodes have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RevisionStatus {
    /// Its name.
    #[schemars(length(max = 63))]
    pub revision: String,
    /// Nodes it is assigned to.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes: i32,
    /// Nodes of these that are Ready with it.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub ready: i32,
}

/// How many nodes of the pool are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeCounts {
    /// Nodes that the layer selects.
    pub matched: i32,
    /// Nodes whose ConfigMap holds what it should.
    pub updated: i32,
    /// Nodes that are Ready with it.
    pub ready: i32,
    /// Nodes whose kernel does not hold it.
    pub degraded: i32,
    /// Nodes for which layers of equal priority disagree.
    pub conflicted: i32,
    /// Nodes that lack something the configuration needs.
    pub incompatible: i32,
    /// Nodes whose agent does not report.
    pub unreachable: i32,
}

/// A node that does not hold its configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailedNode {
    /// The node.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Why, in one word.
    #[schemars(length(max = 64))]
    pub reason: String,
    /// Why.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub message: String,
}

/// A disagreement with a layer of equal priority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Conflict {
    /// The other layer.
    #[schemars(length(max = 63))]
    pub with: String,
    /// The field both set.
    #[schemars(length(max = 128))]
    pub field_path: String,
    /// Nodes that both select.
    pub nodes: i32,
}
