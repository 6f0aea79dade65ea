//! What one pass is to do.
//!
//! In: everything observed. Out: the writes that bring the cluster where it should be, as data. Pure; the writes that
//! are not listed are those not needed.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pointsman_crds::ProxyNodeStatusSpec;
use pointsman_crds::proxy_node_status::Desired as Assigned;
use thiserror::Error;

use crate::merge::Layer;
use crate::observed::{ConfigMapRecord, LayerRecord, NodeRecord, PodRecord, ReportRecord};
use crate::revision::{Assignment, Desired, assign};
use crate::rollout::{Target, next_writes};

/// Sources that fit into a ProxyNodeStatus.
const MAX_SOURCES: usize = 8;

/// Everything observed, by name.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// ProxyConfigurations; an error for each that this operator cannot read.
    pub layers: BTreeMap<String, Arc<Result<LayerRecord, String>>>,
    /// Nodes.
    pub nodes: BTreeMap<String, Arc<NodeRecord>>,
    /// ConfigMaps in the namespace of node configurations.
    pub config_maps: BTreeMap<String, Arc<ConfigMapRecord>>,
    /// ProxyNodeStatuses.
    pub reports: BTreeMap<String, Arc<ReportRecord>>,
    /// The agents' pods.
    pub pods: BTreeMap<String, Arc<PodRecord>>,
}

/// Why nodes are not touched at all.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Standstill {
    /// There is no ProxyConfiguration named `default`.
    #[error(
        "there is no ProxyConfiguration named 'default', which lies under every other; create it (kubectl apply, with at least \
         spec.proxy.mode). Until then nodes keep the configuration they have"
    )]
    NoBase,
    /// Some layer cannot be read, and leaving it out would change nodes.
    #[error(
        "this operator cannot read ProxyConfiguration {layer}: {error}; correct it, or upgrade the operator. Until then \
         nodes keep the configuration they have"
    )]
    Unreadable {
        /// Its name.
        layer: String,
        /// What is wrong with it.
        error: String,
    },
}

impl Standstill {
    /// In one word, for conditions.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoBase => "NoBase",
            Self::Unreadable { .. } => "UnreadableLayer",
        }
    }
}

/// What a node gets.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeWork {
    /// The node.
    pub node: String,
    /// Its uid.
    pub uid: String,
    /// Its pool.
    pub pool: String,
    /// The ConfigMap to write, if it is to be written.
    pub config: Option<Desired>,
    /// The ProxyNodeStatus's spec to write afterwards, if it is to be written.
    pub report: Option<ProxyNodeStatusSpec>,
}

/// An object to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Its name.
    pub name: String,
    /// Its uid: a successor of the same name stays.
    pub uid: String,
}

/// The writes of one pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// Per node, in name order.
    pub nodes: Vec<NodeWork>,
    /// ConfigMaps of nodes that are gone.
    pub config_maps: Vec<Sweep>,
    /// ProxyNodeStatuses of nodes that are gone.
    pub reports: Vec<Sweep>,
}

/// The layers, if nodes may be touched.
pub fn layers(world: &World) -> Result<Vec<Layer>, Standstill> {
    let mut layers = Vec::new();
    for (name, record) in &world.layers {
        match record.as_ref() {
            Ok(record) => layers.push(record.layer.clone()),
            Err(error) => {
                return Err(Standstill::Unreadable { layer: name.clone(), error: error.clone() });
            }
        }
    }
    if layers.iter().any(|layer| layer.is_base() && layer.is_enforced()) {
        Ok(layers)
    } else {
        Err(Standstill::NoBase)
    }
}

/// What every node is to hold.
#[must_use]
pub fn assignments(world: &World, layers: &[Layer]) -> BTreeMap<String, Arc<Assignment>> {
    assign(layers, world.nodes.iter().map(|(name, node)| (name.as_str(), &node.labels)))
}

/// The writes that are due now.
#[must_use]
pub fn work(world: &World, assignments: &BTreeMap<String, Arc<Assignment>>, now: &Time) -> Work {
    let writes = writes(world, assignments);
    let nodes = world
        .nodes
        .iter()
        .filter_map(|(name, node)| {
            let assignment = assignments.get(name)?;
            let config = writes.get(name.as_str()).map(|target| target.desired.clone());
            let report = report(world, name, node, assignment, config.as_ref(), now);
            (config.is_some() || report.is_some()).then(|| NodeWork {
                node: name.clone(),
                uid: node.uid.clone(),
                pool: assignment.pool.clone(),
                config,
                report,
            })
        })
        .collect();
    let gone = |name: &String| !world.nodes.contains_key(name);
    let config_maps = world
        .config_maps
        .iter()
        .filter(|(name, config_map)| config_map.managed && gone(name))
        .map(|(name, config_map)| Sweep { name: name.clone(), uid: config_map.uid.clone() })
        .collect();
    let reports = world
        .reports
        .iter()
        .filter(|(name, _)| gone(name))
        .map(|(name, report)| Sweep { name: name.clone(), uid: report.uid.clone() })
        .collect();
    Work { nodes, config_maps, reports }
}

/// Each pool under its own rules.
fn writes<'a>(
    world: &'a World,
    assignments: &'a BTreeMap<String, Arc<Assignment>>,
) -> BTreeMap<&'a str, Target<'a>> {
    let mut pools: BTreeMap<&str, (&Assignment, Vec<Target<'_>>)> = BTreeMap::new();
    for (name, node) in &world.nodes {
        let Some(assignment) = assignments.get(name) else { continue };
        let Some(desired) = assignment.desired() else { continue };
        let target = Target { node: name, uid: &node.uid, pool: &assignment.pool, desired };
        pools.entry(&assignment.pool).or_insert_with(|| (assignment, Vec::new())).1.push(target);
    }
    pools
        .into_values()
        .flat_map(|(assignment, targets)| next_writes(&targets, &world.config_maps, &assignment.rollout))
        .map(|target| (target.node, target))
        .collect()
}

/// The spec that a node's ProxyNodeStatus should have once `config` is written, unless it has it already.
fn report(
    world: &World,
    name: &str,
    node: &NodeRecord,
    assignment: &Assignment,
    config: Option<&Desired>,
    now: &Time,
) -> Option<ProxyNodeStatusSpec> {
    let old = world.reports.get(name);
    let old_spec = old.map(|report| &report.spec);
    let held = world.config_maps.get(name);
    // `desired` says what the ConfigMap holds, which under a pause, a conflict or broken glass is not what we want it to.
    let (sources, revision, hash) = match (config, held) {
        (Some(desired), _) => (Some(&desired.sources), &desired.revision, &desired.hash),
        (None, Some(held)) if !held.break_glass && !held.hash.is_empty() => {
            let same = |desired: &&Desired| desired.hash == held.hash && desired.revision == held.revision;
            let sources = assignment.desired().filter(same).map(|desired| &desired.sources);
            (sources, &held.revision, &held.hash)
        }
        _ => {
            let spec = ProxyNodeStatusSpec {
                node_name: name.to_owned(),
                pool: Some(assignment.pool.clone()),
                sources: old_spec.map(|spec| spec.sources.clone()).unwrap_or_default(),
                desired: old_spec.and_then(|spec| spec.desired.clone()),
            };
            return changed(spec, old, node);
        }
    };
    let assigned_before = old_spec.and_then(|spec| spec.desired.clone());
    let desired = match assigned_before {
        Some(before) if before.revision == *revision && before.hash == *hash => before,
        _ => Assigned { revision: revision.clone(), hash: hash.clone(), assigned_time: Some(now.clone()) },
    };
    let sources = match sources {
        // The highest, should there be more than fit.
        Some(sources) => sources[sources.len().saturating_sub(MAX_SOURCES)..].to_vec(),
        None => old_spec.map(|spec| spec.sources.clone()).unwrap_or_default(),
    };
    let spec = ProxyNodeStatusSpec {
        node_name: name.to_owned(),
        pool: Some(assignment.pool.clone()),
        sources,
        desired: Some(desired),
    };
    changed(spec, old, node)
}

fn changed(
    new: ProxyNodeStatusSpec,
    old: Option<&Arc<ReportRecord>>,
    node: &NodeRecord,
) -> Option<ProxyNodeStatusSpec> {
    // A new generation of a layer alone is no reason for a write per node.
    let names = |spec: &ProxyNodeStatusSpec| -> Vec<String> {
        let name = |source: &String| source.split('@').next().unwrap_or_default().to_owned();
        spec.sources.iter().map(name).collect()
    };
    let same = old.is_some_and(|old| {
        old.owner_uid == node.uid
            && old.spec.pool == new.pool
            && old.spec.desired == new.desired
            && names(&old.spec) == names(&new)
    });
    (!same).then_some(new)
}

#[cfg(test)]
mod tests;
