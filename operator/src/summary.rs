//! What a ProxyConfiguration's status says.
//!
//! In: the layer, its last status, and each node it selects: what the node is to hold, what its ConfigMap holds, what
//! its agent reports. Out: the whole status. Pure; `now` is used only for conditions whose status changes, so an
//! unchanged world gives an equal status.
//!
//! Counts are over the nodes that the layer selects, whichever layer is their pool: a layer is Ready when every node
//! that should feel it does.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use pointsman_crds::condition::set_condition;
use pointsman_crds::proxy_configuration::{Conflict, FailedNode, NodeCounts, RevisionStatus};
use pointsman_crds::{ConditionStatus, ProxyConfigurationStatus};

use self::conditions::{conditions_of, state};
use crate::decide::Standstill;
use crate::merge::Layer;
use crate::observed::{ConfigMapRecord, ReportRecord};
use crate::revision::{Assignment, Refusal};
use crate::stale::{STATE_STALE, STATE_UNKNOWN};

mod conditions;
#[cfg(test)]
mod tests;

/// Bounds of the lists in a status, as in the schema.
const MAX_FAILED_NODES: usize = 20;
const MAX_CONFLICTS: usize = 10;
const MAX_REVISIONS: usize = 8;
const MAX_FAILURE_MESSAGE: usize = 256;

/// One node that the layer selects.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it is to hold; none if there is no `default`.
    pub assignment: Option<&'a Assignment>,
    /// What its ConfigMap holds.
    pub config_map: Option<&'a ConfigMapRecord>,
    /// What its agent reports.
    pub report: Option<&'a ReportRecord>,
}

/// How a node is counted: the first that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Unreachable,
    Incompatible,
    Degraded,
    Ready,
    Applying,
}

impl NodeView<'_> {
    fn is_updated(&self) -> bool {
        let desired = self.assignment.and_then(Assignment::desired);
        desired.zip(self.config_map).is_some_and(|(desired, config_map)| {
            config_map.hash == desired.hash
                && config_map.revision == desired.revision
                // An edit under break-glass changes neither; the agent says what the bytes are.
                && (!config_map.break_glass
                    || self.report.is_some_and(|report| report.active_hash == desired.hash))
        })
    }

    fn health(&self) -> Health {
        let Some(report) = self.report else { return Health::Unreachable };
        match report.state.as_str() {
            STATE_STALE | STATE_UNKNOWN | "" => Health::Unreachable,
            "Incompatible" => Health::Incompatible,
            "Degraded" => Health::Degraded,
            // Ready with the revision before this one, or with other bytes, is not Ready with this one.
            "Ready"
                if self.config_map.is_some_and(|config_map| {
                    config_map.revision == report.active && config_map.hash == report.active_hash
                }) =>
            {
                Health::Ready
            }
            _ => Health::Applying,
        }
    }

    /// Whether its agent has still time to report for the first time: on a new node it is being pulled and started.
    fn is_awaited(&self, patience: SignedDuration, now: &Time) -> bool {
        let Some(report) = self.report else { return true };
        let assigned = report.spec.desired.as_ref().and_then(|desired| desired.assigned_time.as_ref());
        report.heartbeat.is_none()
            && assigned.is_none_or(|assigned| now.0.duration_since(assigned.0) < patience)
    }

    /// Why the node is not Ready, in the agent's words.
    fn failure(&self) -> FailedNode {
        let conditions = self.report.map(|report| report.conditions.as_slice()).unwrap_or_default();
        let bad = |type_: &str| {
            conditions
                .iter()
                .find(|condition| condition.type_ == type_ && condition.status != ConditionStatus::True)
        };
        // The cause before the consequence; but of a silent agent, only its silence is known.
        let order: &[&str] = match self.health() {
            Health::Unreachable => &["Ready"],
            _ => &["Compatible", "ConfigApplied", "Synced", "Ready"],
        };
        let (reason, message) = match order.iter().find_map(|type_| bad(type_)) {
            Some(condition) => (condition.reason.as_str(), condition.message.as_str()),
            None if self.report.is_none() => ("NeverReported", "there is no ProxyNodeStatus yet"),
            None => ("Unspecified", "the agent gives no reason"),
        };
        FailedNode {
            name: self.name.to_owned(),
            reason: truncated(reason, 64),
            message: truncated(message, MAX_FAILURE_MESSAGE),
        }
    }
}

/// Everything the conditions are derived from.
struct Tally {
    counts: NodeCounts,
    /// Updated, and Ready with it.
    done: i32,
    /// Not done, and nothing known to stand in the way.
    moving: i32,
    /// Unreachable, and not because their agents are only just starting.
    silent: i32,
    /// Invalid because of this layer, with the faults.
    faults: BTreeSet<String>,
    /// Nodes whose merged configuration is invalid, because of whichever layer.
    invalid: i32,
    blamed: BTreeSet<String>,
}

/// The status of `layer`, which selects `nodes`. `standstill` says why no node is touched at all, if so.
#[must_use]
pub fn summarize(
    layer: &Layer,
    old: &ProxyConfigurationStatus,
    nodes: &[NodeView<'_>],
    standstill: Option<&Standstill>,
    now: &Time,
) -> ProxyConfigurationStatus {
    let patience = SignedDuration::from_secs(layer.spec.rollout.progress_deadline_seconds.into());
    let tally = tally(layer, nodes, patience, now);
    let conflicts = conflicts(layer, nodes);
    let (update_revision, revisions) = revisions(layer, nodes);
    let complete = tally.done == tally.counts.matched && update_revision.is_some();
    let current_revision = if complete { update_revision.clone() } else { old.current_revision.clone() };
    let failed_nodes = nodes
        .iter()
        .filter(|node| match node.health() {
            Health::Unreachable => !node.is_awaited(patience, now),
            Health::Incompatible | Health::Degraded => true,
            Health::Ready | Health::Applying => false,
        })
        .take(MAX_FAILED_NODES)
        .map(NodeView::failure)
        .collect();

    let mut conditions = old.conditions.clone();
    let derived = conditions_of(layer, &tally, &conflicts, standstill);
    // Types that no longer apply, such as Ready of a layer that is now only planned, go.
    conditions.retain(|old| derived.iter().any(|new| new.type_ == old.type_));
    for new in &derived {
        set_condition(&mut conditions, new.at(layer.generation, now));
    }
    let mut conflicts = conflicts;
    conflicts.truncate(MAX_CONFLICTS);
    ProxyConfigurationStatus {
        observed_generation: Some(layer.generation),
        state: Some(state(&derived, &tally).to_owned()),
        current_revision,
        update_revision,
        last_rolled_back_revision: old.last_rolled_back_revision.clone(),
        revisions,
        nodes: Some(tally.counts),
        failed_nodes,
        conflicts,
        conditions,
    }
}

fn tally(layer: &Layer, nodes: &[NodeView<'_>], patience: SignedDuration, now: &Time) -> Tally {
    let mut tally = Tally {
        counts: NodeCounts::default(),
        done: 0,
        moving: 0,
        silent: 0,
        faults: BTreeSet::new(),
        invalid: 0,
        blamed: BTreeSet::new(),
    };
    for node in nodes {
        let counts = &mut tally.counts;
        counts.matched += 1;
        let mut refused = false;
        match node.assignment.map(|assignment| &assignment.outcome) {
            Some(Err(Refusal::Conflict(_))) => {
                counts.conflicted += 1;
                refused = true;
            }
            Some(Err(Refusal::Invalid { layer: culprit, faults })) => {
                tally.invalid += 1;
                tally.blamed.insert(culprit.clone());
                refused = true;
                if *culprit == layer.name {
                    tally.faults.extend(faults.iter().cloned());
                }
            }
            _ => {}
        }
        let updated = node.is_updated();
        counts.updated += i32::from(updated);
        match node.health() {
            Health::Unreachable => {
                counts.unreachable += 1;
                if node.is_awaited(patience, now) {
                    tally.moving += i32::from(!refused);
                } else {
                    tally.silent += 1;
                }
            }
            Health::Incompatible => counts.incompatible += 1,
            Health::Degraded => counts.degraded += 1,
            health => {
                let ready = health == Health::Ready;
                counts.ready += i32::from(ready);
                if ready && updated {
                    tally.done += 1;
                } else if !refused {
                    tally.moving += 1;
                }
            }
        }
    }
    tally
}

/// The disagreements of this layer with others, and on how many nodes.
fn conflicts(layer: &Layer, nodes: &[NodeView<'_>]) -> Vec<Conflict> {
    let mut found: BTreeMap<(&str, &str), i32> = BTreeMap::new();
    for node in nodes {
        let Some(Err(Refusal::Conflict(disagreements))) =
            node.assignment.map(|assignment| &assignment.outcome)
        else {
            continue;
        };
        for disagreement in disagreements {
            let [a, b] = &disagreement.layers;
            let other = if *a == layer.name {
                b
            } else if *b == layer.name {
                a
            } else {
                continue;
            };
            *found.entry((other, &disagreement.field_path)).or_default() += 1;
        }
    }
    found
        .into_iter()
        .map(|((with, path), nodes)| Conflict {
            with: with.to_owned(),
            field_path: truncated(path, 128),
            nodes,
        })
        .collect()
}

/// The revision that most nodes of the pool are to have, and those that their ConfigMaps hold.
fn revisions(layer: &Layer, nodes: &[NodeView<'_>]) -> (Option<String>, Vec<RevisionStatus>) {
    let mut wanted: BTreeMap<&str, i32> = BTreeMap::new();
    let mut held: BTreeMap<&str, (i32, i32)> = BTreeMap::new();
    for node in nodes {
        let Some(assignment) = node.assignment.filter(|assignment| assignment.pool == layer.name) else {
            continue;
        };
        if let Some(desired) = assignment.desired() {
            *wanted.entry(&desired.revision).or_default() += 1;
        }
        if let Some(config_map) = node.config_map.filter(|config_map| !config_map.revision.is_empty()) {
            let (count, ready) = held.entry(&config_map.revision).or_default();
            *count += 1;
            *ready += i32::from(node.health() == Health::Ready);
        }
    }
    let update = wanted.into_iter().rev().max_by_key(|(_, count)| *count);
    let mut held: Vec<RevisionStatus> = held
        .into_iter()
        .map(|(revision, (nodes, ready))| RevisionStatus { revision: revision.to_owned(), nodes, ready })
        .collect();
    // The most widespread, should there be more than fit.
    held.sort_by(|a, b| b.nodes.cmp(&a.nodes).then_with(|| a.revision.cmp(&b.revision)));
    held.truncate(MAX_REVISIONS);
    (update.map(|(revision, _)| revision.to_owned()), held)
}

/// At most `max` characters, as the schema counts them.
fn truncated(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(max - 1).collect();
    short.push('…');
    short
}
