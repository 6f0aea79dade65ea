//! Which agents have gone silent.
//!
//! In: reports and agent pods as they are seen, and the operator's own clock. Out: what to write into the status of a
//! node whose agent cannot be trusted to say it itself. Pure but for the memory of when something was last seen.
//!
//! Times that nodes write are never compared with the operator's: only whether they changed, and when that was seen.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pointsman_crds::condition::set_condition;
use pointsman_crds::{Condition, ConditionStatus};

use crate::observed::{PodRecord, ReportRecord};

/// How often agents write a status that says nothing new.
const HEARTBEAT: Duration = Duration::from_mins(5);
/// The same in clusters of [`LARGE`] nodes and more.
const HEARTBEAT_LARGE: Duration = Duration::from_mins(10);
/// Nodes from which on agents write less often.
const LARGE: usize = 5000;
/// Two intervals may pass, and a little for a slow API server.
const GRACE: Duration = Duration::from_mins(1);
/// How long an agent's pod may be out of service before its last report no longer counts.
const POD_GRACE: Duration = Duration::from_secs(90);

/// `status.state` of a node whose agent has stopped reporting.
pub const STATE_STALE: &str = "Stale";
/// `status.state` of a node whose agent has never reported.
pub const STATE_UNKNOWN: &str = "Unknown";

/// When each agent was last seen to do something.
#[derive(Debug, Default)]
pub struct Liveness {
    heartbeats: HashMap<String, (Option<Time>, Instant)>,
    pods_down: HashMap<String, Instant>,
}

/// A status that the operator writes in an agent's place.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// The node.
    pub node: String,
    /// The version it replaces: should the agent write first, its word stands.
    pub resource_version: String,
    /// Stale or Unknown.
    pub state: &'static str,
    /// All conditions, with Ready unknown.
    pub conditions: Vec<Condition>,
}

impl Liveness {
    /// Takes note of what is seen at `now`.
    pub fn observe(
        &mut self,
        reports: &BTreeMap<String, Arc<ReportRecord>>,
        pods: &BTreeMap<String, Arc<PodRecord>>,
        now: Instant,
    ) {
        self.heartbeats.retain(|node, _| reports.contains_key(node));
        for (node, report) in reports {
            match self.heartbeats.get_mut(node) {
                Some((seen, _)) if *seen == report.heartbeat => {}
                _ => {
                    self.heartbeats.insert(node.clone(), (report.heartbeat.clone(), now));
                }
            }
        }
        let nodes = |ready: bool| -> BTreeSet<&str> {
            pods.values().filter(|pod| pod.ready == ready).map(|pod| pod.node.as_str()).collect()
        };
        let (up, down) = (nodes(true), nodes(false));
        // A pod that is gone altogether stays down; where none was ever seen, agents may run outside of pods.
        self.pods_down.retain(|node, _| !up.contains(node.as_str()) && reports.contains_key(node));
        for node in down.into_iter().filter(|node| !up.contains(node)) {
            self.pods_down.entry(node.to_owned()).or_insert(now);
        }
    }

    /// The reports that no longer tell the truth at `now`.
    #[must_use]
    pub fn marks(
        &self,
        reports: &BTreeMap<String, Arc<ReportRecord>>,
        now: Instant,
        time: &Time,
    ) -> Vec<Mark> {
        let interval = if reports.len() < LARGE { HEARTBEAT } else { HEARTBEAT_LARGE };
        reports
            .iter()
            .filter_map(|(node, report)| {
                if report.heartbeat.is_none() {
                    let written = report.state == STATE_UNKNOWN;
                    return (!written).then(|| never_reported(node, report, time));
                }
                if report.state == STATE_STALE || report.state == STATE_UNKNOWN {
                    return None;
                }
                let (_, seen) = self.heartbeats.get(node)?;
                if now.duration_since(*seen) > 2 * interval + GRACE {
                    let message = format!(
                        "the agent has not reported for {} s; see its pod: kubectl get pods -A --field-selector \
                         spec.nodeName={node}",
                        now.duration_since(*seen).as_secs()
                    );
                    return Some(mark(node, report, STATE_STALE, message, time));
                }
                let down = self.pods_down.get(node)?;
                // An agent that reports a fault fails its readiness probe because of it, and one that has written since
                // its pod went down is alive: neither is silent.
                let claims_health = matches!(report.state.as_str(), "Ready" | "Applying");
                (claims_health && seen <= down && now.duration_since(*down) > POD_GRACE).then(|| {
                    let message = format!(
                        "the agent's pod has not been Ready for more than {} s; see: kubectl get pods -A \
                         --field-selector spec.nodeName={node}",
                        POD_GRACE.as_secs()
                    );
                    mark(node, report, STATE_STALE, message, time)
                })
            })
            .collect()
    }
}

/// What a report says before any agent has written it.
#[must_use]
pub fn never_reported(node: &str, report: &ReportRecord, time: &Time) -> Mark {
    let message = format!(
        "no agent has reported from this node yet; is its pod running? kubectl get pods -A --field-selector \
         spec.nodeName={node}"
    );
    let mut mark = mark(node, report, STATE_UNKNOWN, message.clone(), time);
    set_condition(&mut mark.conditions, unknown("ConfigApplied", "NeverReported", message, time));
    mark
}

fn mark(node: &str, report: &ReportRecord, state: &'static str, message: String, time: &Time) -> Mark {
    let mut conditions = report.conditions.clone();
    set_condition(&mut conditions, unknown("Ready", "AgentUnreachable", message, time));
    Mark { node: node.to_owned(), resource_version: report.resource_version.clone(), state, conditions }
}

fn unknown(type_: &str, reason: &str, message: String, time: &Time) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: ConditionStatus::Unknown,
        reason: reason.to_owned(),
        message,
        last_transition_time: time.clone(),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests;
