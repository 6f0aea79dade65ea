//! Which configuration each node is to hold.
//!
//! In: layers and the nodes' labels. Out: per node an [`Assignment`]: the bytes of its ConfigMap under a
//! content-addressed revision, or why there are none, in which case the node keeps what it has. Pure.
//!
//! Nodes that the same layers select share one assignment, so the work is by distinct piles of layers, not by nodes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use pointsman_crds::node_config::{config_hash, revision};
use pointsman_crds::proxy_configuration::Rollout;
use pointsman_crds::{NodeConfigError, NodeProxyConfiguration};

use crate::merge::{Disagreement, Layer, merge, pile, pool};

/// A configuration, ready to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// The layers it was merged from, `layer@generation`, lowest first.
    pub sources: Vec<String>,
    /// `<pool>-<10 hex digits>`.
    pub revision: String,
    /// `sha256:<hex>` of `content`.
    pub hash: String,
    /// What the agent reads.
    pub content: String,
}

/// What a node is to hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The highest layer; its rules govern how changes reach the node.
    pub pool: String,
    /// Those rules.
    pub rollout: Rollout,
    /// The configuration, or why there is none.
    pub outcome: Result<Desired, Refusal>,
}

/// Why a node gets no new configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Layers of equal priority disagree.
    Conflict(Vec<Disagreement>),
    /// The merged result cannot be used.
    Invalid {
        /// The layer from which on, going upwards, the result is invalid.
        layer: String,
        /// What is wrong, one sentence each.
        faults: Vec<String>,
    },
}

impl Assignment {
    /// The configuration, if there is one.
    #[must_use]
    pub fn desired(&self) -> Option<&Desired> {
        self.outcome.as_ref().ok()
    }
}

/// Assigns a configuration to every node. Without any layer for a node, which means without `default`, the node is
/// left out.
#[must_use]
pub fn assign<'a>(
    layers: &[Layer],
    nodes: impl IntoIterator<Item = (&'a str, &'a BTreeMap<String, String>)>,
) -> BTreeMap<String, Arc<Assignment>> {
    let mut known: HashMap<Vec<&str>, Option<Arc<Assignment>>> = HashMap::new();
    let mut assignments = BTreeMap::new();
    for (node, labels) in nodes {
        let pile = pile(layers.iter().filter(|layer| layer.selects(labels)));
        let names: Vec<&str> = pile.iter().map(|layer| layer.name.as_str()).collect();
        let assignment = known.entry(names).or_insert_with(|| assignment(&pile).map(Arc::new));
        if let Some(assignment) = assignment {
            assignments.insert(node.to_owned(), Arc::clone(assignment));
        }
    }
    assignments
}

fn assignment(pile: &[&Layer]) -> Option<Assignment> {
    let pool = pool(pile)?;
    let outcome = match complete(pile) {
        Ok(configuration) => desired(pile, pool, &configuration),
        Err(refusal) => Err(refusal),
    };
    Some(Assignment { pool: pool.name.clone(), rollout: pool.spec.rollout.clone(), outcome })
}

fn desired(
    pile: &[&Layer],
    pool: &Layer,
    configuration: &NodeProxyConfiguration,
) -> Result<Desired, Refusal> {
    let content = configuration
        .render()
        .map_err(|error| Refusal::Invalid { layer: pool.name.clone(), faults: faults(error) })?;
    let hash = config_hash(&content);
    let sources = pile.iter().map(|layer| layer.source()).collect();
    Ok(Desired { sources, revision: revision(&pool.name, &hash), hash, content })
}

fn complete(pile: &[&Layer]) -> Result<NodeProxyConfiguration, Refusal> {
    let settings = merge(pile).map_err(Refusal::Conflict)?;
    let drift = pool(pile).map(|pool| pool.spec.drift).unwrap_or_default();
    NodeProxyConfiguration::complete(&settings, drift)
        .map_err(|error| Refusal::Invalid { layer: culprit(pile).to_owned(), faults: faults(error) })
}

/// The layer that people should look at first when a pile is invalid: the lowest from which on every larger part of
/// the pile is invalid too. The layers below it were fine without it.
fn culprit<'a>(pile: &[&'a Layer]) -> &'a str {
    let valid = |part: &[&Layer]| {
        let drift = pool(part).map(|pool| pool.spec.drift).unwrap_or_default();
        merge(part).is_ok_and(|settings| NodeProxyConfiguration::complete(&settings, drift).is_ok())
    };
    let sound = (0..pile.len()).rev().find(|&end| valid(&pile[..end])).unwrap_or(0);
    pile.get(sound).map_or("", |layer| layer.name.as_str())
}

fn faults(error: NodeConfigError) -> Vec<String> {
    match error {
        NodeConfigError::Invalid(faults) => faults,
        error => vec![error.to_string()],
    }
}
