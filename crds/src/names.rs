//! Names that the operator, the agent, the charts and people must agree on.

/// API group of the custom resources.
pub const GROUP: &str = "pointsman.dev";
/// Namespace of the operator, the agents and the leader's Lease.
pub const SYSTEM_NAMESPACE: &str = "pointsman-system";
/// Namespace that holds one ConfigMap per node and nothing else.
pub const NODE_CONFIG_NAMESPACE: &str = "pointsman-node-config";
/// The Lease that the leading operator replica holds, in [`SYSTEM_NAMESPACE`].
pub const OPERATOR_LEASE: &str = "pointsman-operator";
/// Field manager of everything that the operator applies.
pub const OPERATOR_FIELD_MANAGER: &str = "pointsman-operator";
/// Field manager of the agent's status patches.
pub const AGENT_FIELD_MANAGER: &str = "pointsman-agent";

/// The ProxyConfiguration that is the floor under every other layer.
pub const BASE_CONFIGURATION: &str = "default";

/// Key of the node configuration in a node ConfigMap's data.
pub const CONFIG_KEY: &str = "config.yaml";
/// Upper bound of [`CONFIG_KEY`] in bytes: 15,000 nodes then cost etcd at most 240 MB.
pub const CONFIG_MAX_BYTES: usize = 16 * 1024;

/// Label on a node ConfigMap: who writes it. Mark and sweep selects by it.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`LABEL_MANAGED_BY`].
pub const MANAGED_BY_OPERATOR: &str = "pointsman-operator";
/// Label on a node ConfigMap: the node's pool, which is its highest-priority layer.
pub const LABEL_POOL: &str = "pointsman.dev/pool";
/// Label on a node ConfigMap: the revision in it, `<pool>-<10 hex digits>`.
pub const LABEL_REVISION: &str = "pointsman.dev/revision";
/// Annotation on a node ConfigMap: `sha256:<hex>` of [`CONFIG_KEY`], byte for byte.
pub const ANNOTATION_CONFIG_HASH: &str = "pointsman.dev/config-hash";
/// Annotation on a node ConfigMap: the layers it was merged from, `layer@generation`, comma-separated.
pub const ANNOTATION_SOURCES: &str = "pointsman.dev/sources";
/// Annotation on a node ConfigMap: an emergency edit by hand, with its reason. The agent obeys it.
pub const ANNOTATION_BREAK_GLASS: &str = "pointsman.dev/break-glass";
/// Annotation on an EndpointSlice: the weight of each of its endpoints, 1 to 65535, where a mode can weigh.
pub const ANNOTATION_WEIGHT: &str = "pointsman.dev/weight";
/// Annotation on the base ProxyConfiguration that permits its deletion.
pub const ANNOTATION_ALLOW_DELETE: &str = "pointsman.dev/allow-delete";
