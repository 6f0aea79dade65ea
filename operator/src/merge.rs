//! From the layers that match a node to one set of settings.
//!
//! In: layers, in any order. Out: their settings merged field by field, the higher priority winning, or the fields on
//! which layers of equal priority disagree. Pure, and independent of the order of the list.
//!
//! Three rules make the result predictable:
//! * `default` lies under every other layer, also under those of priority 0.
//! * Lists are values: a higher list replaces a lower one. So is `detectLocal`, a union of which only one arm may be
//!   set: its mode from one layer with another layer's interface would be a configuration that nobody wrote.
//! * A disagreement counts even where a still higher layer settles the field, so that whether two layers agree depends
//!   on these two alone.

use std::collections::BTreeMap;

use pointsman_crds::names::BASE_CONFIGURATION;
use pointsman_crds::proxy_configuration::Enforcement;
use pointsman_crds::{ProxyConfigurationSpec, ProxySettings};
use serde_json::{Map, Value};

/// Objects that are one value: no field of theirs means anything without the others.
const UNIONS: &[&str] = &["detectLocal"];

/// One ProxyConfiguration, as far as merging needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its name.
    pub name: String,
    /// Its `metadata.generation`.
    pub generation: i64,
    /// What it says.
    pub spec: ProxyConfigurationSpec,
}

impl Layer {
    /// Whether this is the layer under all others.
    #[must_use]
    pub fn is_base(&self) -> bool {
        self.name == BASE_CONFIGURATION
    }

    /// Whether nodes get it; a layer under `enforcement: Plan` is only computed.
    #[must_use]
    pub fn is_enforced(&self) -> bool {
        self.spec.enforcement == Enforcement::Enforce
    }

    /// Whether it selects a node with these labels.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        // The schema forbids a layer without a selector; should one get through, it must not select every node.
        self.is_base() || self.spec.node_selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }

    /// `layer@generation`, as node ConfigMaps and ProxyNodeStatus name it.
    #[must_use]
    pub fn source(&self) -> String {
        format!("{}@{}", self.name, self.generation)
    }

    /// Where it lies in the pile.
    fn height(&self) -> i64 {
        if self.is_base() { -1 } else { i64::from(self.spec.priority) }
    }
}

/// Two layers of equal priority that set one field to different values.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Disagreement {
    /// The field, from `spec` down, such as `proxy.masquerade.bit`.
    pub field_path: String,
    /// Both layers, in name order.
    pub layers: [String; 2],
}

/// The layers that a node gets, lowest first. Names order layers of equal priority, which has no effect on the
/// result but makes it the same every time.
#[must_use]
pub fn pile<'a>(layers: impl IntoIterator<Item = &'a Layer>) -> Vec<&'a Layer> {
    let mut pile: Vec<&Layer> = layers.into_iter().filter(|layer| layer.is_enforced()).collect();
    // Of equal layers the first in name order lies on top, so that it names the pool.
    pile.sort_by(|a, b| a.height().cmp(&b.height()).then_with(|| b.name.cmp(&a.name)));
    pile
}

/// The layer whose `rollout` and `drift` govern the node, and that gives the revision its name: the highest.
#[must_use]
pub fn pool<'a>(pile: &[&'a Layer]) -> Option<&'a Layer> {
    pile.last().copied()
}

/// Merges a [`pile`].
pub fn merge(pile: &[&Layer]) -> Result<ProxySettings, Vec<Disagreement>> {
    let mut disagreements = Vec::new();
    let mut merged: BTreeMap<Vec<String>, Value> = BTreeMap::new();
    for group in pile.chunk_by(|a, b| a.height() == b.height()) {
        let fields: Vec<_> = group.iter().map(|layer| fields(&layer.spec.proxy)).collect();
        for (index, lower) in fields.iter().enumerate() {
            for (offset, upper) in fields[index + 1..].iter().enumerate() {
                let differing = lower
                    .iter()
                    .filter(|(path, value)| upper.get(*path).is_some_and(|other| other != *value));
                disagreements.extend(differing.map(|(path, _)| {
                    let path = format!("proxy.{}", path.join("."));
                    disagreement(path, group[index], group[index + 1 + offset])
                }));
            }
        }
        merged.extend(fields.into_iter().flatten());
    }
    disagreements.extend(disagreeing_pools(pile));
    if disagreements.is_empty() {
        Ok(settings(merged))
    } else {
        disagreements.sort();
        disagreements.dedup();
        Err(disagreements)
    }
}

/// `drift` and `rollout` come whole from the highest layer. Where two layers share that place they must agree: a name
/// must not decide what happens.
fn disagreeing_pools(pile: &[&Layer]) -> Vec<Disagreement> {
    let Some(pool) = pool(pile) else { return Vec::new() };
    let mut found = Vec::new();
    for rival in pile.iter().filter(|layer| layer.height() == pool.height() && layer.name != pool.name) {
        if rival.spec.drift != pool.spec.drift {
            found.push(disagreement("drift".to_owned(), pool, rival));
        }
        if rival.spec.rollout != pool.spec.rollout {
            found.push(disagreement("rollout".to_owned(), pool, rival));
        }
    }
    found
}

fn disagreement(field_path: String, a: &Layer, b: &Layer) -> Disagreement {
    let mut layers = [a.name.clone(), b.name.clone()];
    layers.sort();
    Disagreement { field_path, layers }
}

/// Every field that is set, by its path.
fn fields(settings: &ProxySettings) -> BTreeMap<Vec<String>, Value> {
    let mut fields = BTreeMap::new();
    // Cannot fail: the type holds nothing but strings, numbers, flags and lists of them.
    let value = serde_json::to_value(settings).unwrap_or_default();
    flatten(&mut Vec::new(), value, &mut fields);
    fields
}

fn flatten(path: &mut Vec<String>, value: Value, fields: &mut BTreeMap<Vec<String>, Value>) {
    match value {
        Value::Object(object) if path.last().is_none_or(|name| !UNIONS.contains(&name.as_str())) => {
            for (name, value) in object {
                path.push(name);
                flatten(path, value, fields);
                path.pop();
            }
        }
        Value::Null => {}
        value => {
            fields.insert(path.clone(), value);
        }
    }
}

fn settings(fields: BTreeMap<Vec<String>, Value>) -> ProxySettings {
    let mut root = Value::Object(Map::new());
    for (path, value) in fields {
        // Indexing makes the objects on the way.
        *path.iter().fold(&mut root, |object, name| &mut object[name]) = value;
    }
    // Cannot fail: every value came out of the same type at the same path. And were it to, settings without a mode are
    // refused as invalid, so no node would get them.
    serde_json::from_value(root).unwrap_or_default()
}

#[cfg(test)]
mod tests;
