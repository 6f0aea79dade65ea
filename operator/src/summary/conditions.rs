//! The conditions of a ProxyConfiguration, and the one word that sums them up.
//!
//! In: the tally of its nodes, its conflicts, and why nothing is written, if so. Out: conditions that have no time yet;
//! [`super::summarize`] keeps the time of those whose status stays.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pointsman_crds::Condition;
use pointsman_crds::proxy_configuration::{Conflict, NodeCounts};

use super::{Tally, truncated};
use crate::decide::Standstill;
use crate::merge::Layer;

const MAX_MESSAGE: usize = 1024;

/// A condition before it has a time.
pub(super) struct Derived {
    pub(super) type_: &'static str,
    status: bool,
    reason: &'static str,
    message: String,
}

impl Derived {
    fn new(type_: &'static str, status: bool, reason: &'static str, message: impl Into<String>) -> Self {
        Self { type_, status, reason, message: message.into() }
    }

    pub(super) fn at(&self, generation: i64, now: &Time) -> Condition {
        Condition {
            type_: self.type_.to_owned(),
            status: self.status.into(),
            reason: self.reason.to_owned(),
            message: truncated(&self.message, MAX_MESSAGE),
            last_transition_time: now.clone(),
            observed_generation: Some(generation),
        }
    }
}

/// All conditions that apply to `layer`.
pub(super) fn conditions_of(
    layer: &Layer,
    tally: &Tally,
    conflicts: &[Conflict],
    standstill: Option<&Standstill>,
) -> Vec<Derived> {
    let keeps = "these nodes keep the configuration they have";
    let accepted = if let Some(standstill) = standstill {
        Derived::new("Accepted", false, standstill.reason(), standstill.to_string())
    } else if tally.faults.is_empty() {
        Derived::new("Accepted", true, "Valid", "the configuration is valid on every node it selects")
    } else {
        let faults: Vec<&str> = tally.faults.iter().map(String::as_str).collect();
        Derived::new(
            "Accepted",
            false,
            "InvalidMergedConfig",
            format!("merged with the layers below it: {}; {keeps}", faults.join("; ")),
        )
    };
    let conflicted = match conflicts {
        [] => Derived::new("Conflicted", false, "AsExpected", "no layer of equal priority disagrees"),
        conflicts => {
            let all: Vec<String> = conflicts
                .iter()
                .map(|conflict| {
                    format!("{} ({}, {})", conflict.field_path, conflict.with, nodes(conflict.nodes))
                })
                .collect();
            Derived::new(
                "Conflicted",
                true,
                "LayerConflict",
                format!(
                    "layers of equal priority set different values: {}; {keeps}. Give one of the layers another priority, \
                     or both the same value",
                    all.join(", ")
                ),
            )
        }
    };
    let mut derived = vec![accepted];
    if layer.is_enforced() {
        let (ready, progressing) = match standstill {
            Some(standstill) => (
                Derived::new("Ready", false, standstill.reason(), standstill.to_string()),
                Derived::new("Progressing", false, "Halted", standstill.to_string()),
            ),
            None => (ready(tally), progressing(layer, tally)),
        };
        derived.extend([ready, progressing, degraded(tally)]);
    } else {
        derived.push(Derived::new(
            "Ready",
            false,
            "PlanOnly",
            "enforcement is Plan: this layer is left out of what nodes get",
        ));
    }
    derived.push(conflicted);
    derived.push(if layer.spec.rollout.paused {
        Derived::new(
            "Paused",
            true,
            "PausedByUser",
            "spec.rollout.paused is set: only nodes without a configuration are written",
        )
    } else {
        Derived::new("Paused", false, "AsExpected", "changes reach the nodes")
    });
    derived
}

fn trouble(tally: &Tally) -> i32 {
    tally.counts.degraded + tally.counts.incompatible + tally.silent
}

/// `2 nodes Degraded, 1 node unreachable`.
fn trouble_text(tally: &Tally) -> String {
    let NodeCounts { degraded, incompatible, .. } = tally.counts;
    [(degraded, "Degraded"), (incompatible, "Incompatible"), (tally.silent, "unreachable")]
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{} {what}", nodes(*count)))
        .collect::<Vec<_>>()
        .join(", ")
}

fn ready(tally: &Tally) -> Derived {
    let counts = &tally.counts;
    let progress = format!("Ready with the configuration: {} of {}", tally.done, nodes(counts.matched));
    if counts.matched == 0 {
        Derived::new("Ready", false, "NoMatchingNodes", "no node is selected")
    } else if tally.invalid > 0 {
        let blamed: Vec<&str> = tally.blamed.iter().map(String::as_str).collect();
        Derived::new(
            "Ready",
            false,
            "InvalidMergedConfig",
            format!("{} would get an invalid configuration; see {}", nodes(tally.invalid), blamed.join(", ")),
        )
    } else if counts.conflicted > 0 {
        Derived::new(
            "Ready",
            false,
            "LayerConflict",
            format!("layers of equal priority disagree on {}", nodes(counts.conflicted)),
        )
    } else if trouble(tally) > 0 {
        Derived::new("Ready", false, "NodesDegraded", format!("{progress}; {}", trouble_text(tally)))
    } else if tally.done < counts.matched {
        Derived::new("Ready", false, "RollingOut", progress)
    } else {
        Derived::new("Ready", true, "RolloutComplete", progress)
    }
}

fn progressing(layer: &Layer, tally: &Tally) -> Derived {
    let outstanding = tally.counts.matched - tally.counts.updated;
    if layer.spec.rollout.paused && outstanding > 0 {
        Derived::new(
            "Progressing",
            false,
            "Paused",
            format!("{} wait for the pause to end", nodes(outstanding)),
        )
    } else if tally.moving > 0 {
        Derived::new("Progressing", true, "RollingOut", format!("{} under way", nodes(tally.moving)))
    } else if tally.invalid + tally.counts.conflicted > 0 {
        Derived::new(
            "Progressing",
            false,
            "Halted",
            "nodes without a valid configuration keep the one they have",
        )
    } else if trouble(tally) > 0 {
        Derived::new("Progressing", false, "NodesDegraded", trouble_text(tally))
    } else {
        Derived::new("Progressing", false, "RolloutComplete", "nothing is outstanding")
    }
}

fn degraded(tally: &Tally) -> Derived {
    if trouble(tally) > 0 {
        Derived::new("Degraded", true, "NodesDegraded", trouble_text(tally))
    } else {
        Derived::new("Degraded", false, "AsExpected", "every agent reports and none reports a fault")
    }
}

/// One word for people, from the conditions: the first that holds.
pub(super) fn state(conditions: &[Derived], tally: &Tally) -> &'static str {
    let is = |type_: &str, status: bool| {
        conditions.iter().any(|condition| condition.type_ == type_ && condition.status == status)
    };
    let ready_because = |reason: &str| {
        conditions.iter().any(|condition| condition.type_ == "Ready" && condition.reason == reason)
    };
    if is("Accepted", false) {
        "Invalid"
    } else if is("Conflicted", true) {
        "Conflicted"
    } else if ready_because("PlanOnly") {
        "Plan"
    } else if ready_because("NoMatchingNodes") {
        "NoNodes"
    } else if is("Paused", true) && tally.counts.updated < tally.counts.matched {
        "Paused"
    } else if is("Progressing", true) {
        "RollingOut"
    } else if is("Ready", true) {
        "Ready"
    } else {
        "Degraded"
    }
}

fn nodes(count: i32) -> String {
    if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") }
}
