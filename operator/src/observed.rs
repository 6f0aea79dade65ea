//! What the API server holds, reduced to what the operator decides by.
//!
//! In: objects from the watches. Out: records without what the operator does not look at, so that a cluster of 15,000
//! nodes fits in little memory and their counters and heartbeats wake nobody.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use pointsman_crds::names::{
    ANNOTATION_BREAK_GLASS, ANNOTATION_CONFIG_HASH, LABEL_MANAGED_BY, LABEL_POOL, LABEL_REVISION,
    MANAGED_BY_OPERATOR, OPERATOR_FIELD_MANAGER,
};
use pointsman_crds::{
    Condition, ProxyConfiguration, ProxyConfigurationStatus, ProxyNodeStatus, ProxyNodeStatusSpec,
};

use crate::merge::Layer;

/// A Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeRecord {
    /// Tells a Node from an earlier one of the same name.
    pub uid: String,
    /// What selectors look at.
    pub labels: BTreeMap<String, String>,
}

/// A ConfigMap in the namespace of node configurations, without its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigMapRecord {
    /// Its own uid, so that a deletion cannot hit a successor.
    pub uid: String,
    /// The Node that owns it.
    pub owner_uid: String,
    /// Whether it carries our label.
    pub managed: bool,
    /// The pool label.
    pub pool: String,
    /// The revision label.
    pub revision: String,
    /// The hash annotation.
    pub hash: String,
    /// Whether somebody opened the glass.
    pub break_glass: bool,
    /// Set when another writer than the operator owns some of `data`: the resource version at which it does.
    pub foreign_content: Option<String>,
}

/// A ProxyNodeStatus.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportRecord {
    /// Its own uid, so that a deletion cannot hit a successor.
    pub uid: String,
    /// The Node that owns it.
    pub owner_uid: String,
    /// What the node is to have.
    pub spec: ProxyNodeStatusSpec,
    /// One word from the agent, or from the operator if it is silent.
    pub state: String,
    /// The revision in the kernel.
    pub active: String,
    /// Hash of its bytes.
    pub active_hash: String,
    /// What the agent says in detail.
    pub conditions: Vec<Condition>,
    /// When the agent says that it last wrote; `None` until it first does. Only ever compared with itself, because
    /// nodes have clocks of their own.
    pub heartbeat: Option<Time>,
    /// The version that the other fields are of.
    pub resource_version: String,
}

impl ReportRecord {
    /// Whether the two differ in more than a heartbeat.
    #[must_use]
    pub fn differs(&self, other: &Self) -> bool {
        let Self {
            uid,
            owner_uid,
            spec,
            state,
            active,
            active_hash,
            conditions,
            heartbeat: _,
            resource_version: _,
        } = self;
        *uid != other.uid
            || *owner_uid != other.owner_uid
            || *spec != other.spec
            || *state != other.state
            || *active != other.active
            || *active_hash != other.active_hash
            || *conditions != other.conditions
    }
}

/// A ProxyConfiguration.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRecord {
    /// Its uid, for Events.
    pub uid: String,
    /// What merging needs.
    pub layer: Layer,
    /// What was last written about it.
    pub status: ProxyConfigurationStatus,
}

/// An agent's pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRecord {
    /// The node it runs on.
    pub node: String,
    /// Whether the kubelet says it is Ready.
    pub ready: bool,
}

fn owner_uid(metadata: &ObjectMeta) -> String {
    metadata
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.kind == "Node")
        .map(|owner| owner.uid.clone())
        .unwrap_or_default()
}

impl From<&PartialObjectMeta<Node>> for NodeRecord {
    fn from(node: &PartialObjectMeta<Node>) -> Self {
        Self {
            uid: node.metadata.uid.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
        }
    }
}

impl From<&ObjectMeta> for ConfigMapRecord {
    fn from(metadata: &ObjectMeta) -> Self {
        let label = |name: &str| metadata.labels.as_ref().and_then(|labels| labels.get(name)).cloned();
        let annotations = metadata.annotations.as_ref();
        Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            owner_uid: owner_uid(metadata),
            managed: label(LABEL_MANAGED_BY).as_deref() == Some(MANAGED_BY_OPERATOR),
            pool: label(LABEL_POOL).unwrap_or_default(),
            revision: label(LABEL_REVISION).unwrap_or_default(),
            hash: annotations
                .and_then(|annotations| annotations.get(ANNOTATION_CONFIG_HASH))
                .cloned()
                .unwrap_or_default(),
            break_glass: annotations
                .is_some_and(|annotations| annotations.contains_key(ANNOTATION_BREAK_GLASS)),
            foreign_content: has_foreign_content(metadata)
                .then(|| metadata.resource_version.clone().unwrap_or_default()),
        }
    }
}

/// The content itself is not watched, but the server keeps a record of who wrote it.
fn has_foreign_content(metadata: &ObjectMeta) -> bool {
    metadata.managed_fields.iter().flatten().any(|entry| {
        entry.manager.as_deref() != Some(OPERATOR_FIELD_MANAGER)
            && entry.fields_v1.as_ref().is_some_and(|fields| {
                fields.0.get("f:data").is_some() || fields.0.get("f:binaryData").is_some()
            })
    })
}

impl From<&PartialObjectMeta<ConfigMap>> for ConfigMapRecord {
    fn from(object: &PartialObjectMeta<ConfigMap>) -> Self {
        Self::from(&object.metadata)
    }
}

impl From<&ProxyNodeStatus> for ReportRecord {
    fn from(report: &ProxyNodeStatus) -> Self {
        let status = report.status.clone().unwrap_or_default();
        let config = status.config.unwrap_or_default();
        Self {
            uid: report.metadata.uid.clone().unwrap_or_default(),
            owner_uid: owner_uid(&report.metadata),
            spec: report.spec.clone(),
            state: status.state.unwrap_or_default(),
            active: config.active.unwrap_or_default(),
            active_hash: config.active_hash.unwrap_or_default(),
            conditions: status.conditions,
            heartbeat: status.heartbeat_time,
            resource_version: report.metadata.resource_version.clone().unwrap_or_default(),
        }
    }
}

/// A layer, or why this operator cannot read it. One that is left out in silence would change nodes.
pub fn layer(object: &DeserializeGuard<ProxyConfiguration>) -> Result<LayerRecord, String> {
    let object = object.0.as_ref().map_err(|error| error.error.clone())?;
    Ok(LayerRecord {
        uid: object.metadata.uid.clone().unwrap_or_default(),
        layer: Layer {
            name: object.metadata.name.clone().unwrap_or_default(),
            generation: object.metadata.generation.unwrap_or_default(),
            spec: object.spec.clone(),
        },
        status: object.status.clone().unwrap_or_default(),
    })
}

impl From<&Pod> for PodRecord {
    fn from(pod: &Pod) -> Self {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        Self {
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
            ready: pod.metadata.deletion_timestamp.is_none()
                && conditions
                    .into_iter()
                    .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        }
    }
}
