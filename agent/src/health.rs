//! Whether this node serves, as load balancers, probes and people ask it.
//!
//! In: the sync loop's snapshot, what the Node object says, the sync loop's pulse. Out: verdicts, with the JSON that kube-proxy
//! answers. Pure, except for the [`Pulse`], which the sync loop beats.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tokio::time::Instant;

use crate::metrics::family_word;
use crate::state::{NodeEligibility, SyncState};

/// After so many failed writes in a row a family is not healthy, however young its oldest change is.
pub const FAILURES: u32 = 3;
/// What `sync.periodSeconds` is before there is a configuration.
const DEFAULT_PERIOD: u32 = 30;
/// A sync loop that has not turned for this long hangs.
const LOOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest that one write may take. A full write of a very large cluster with old tools takes minutes.
const WRITE_TIMEOUT: Duration = Duration::from_mins(10);

/// kube-proxy's answer on `/healthz` and `/livez`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxyHealth {
    /// Now while healthy, otherwise the last successful write.
    pub last_updated: String,
    /// Now.
    pub current_time: String,
    /// Whether load balancers should use the node; only on `/healthz`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_eligible: Option<bool>,
    /// Whether all families are healthy.
    pub healthy: bool,
    /// Each family.
    pub status: BTreeMap<&'static str, FamilyHealth>,
}

/// One family in [`ProxyHealth`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FamilyHealth {
    /// Its last successful write.
    pub last_updated: Option<String>,
    /// Whether it keeps up.
    pub healthy: bool,
}

/// Whether the data plane keeps up with the cluster.
///
/// A family does not, when its oldest unwritten change is older than two periods (kube-proxy's rule), or when its last
/// [`FAILURES`] writes failed. None does while the sync loop hangs (`alive` is false): nobody queues changes then.
#[must_use]
pub fn proxy_health(
    state: &SyncState,
    alive: bool,
    node: Option<NodeEligibility>,
    now: Timestamp,
    instant: Instant,
) -> ProxyHealth {
    let period = state.config.in_force.as_ref().map_or(DEFAULT_PERIOD, |config| config.sync.period_seconds);
    let limit = Duration::from_secs(u64::from(period) * 2);
    let mut status = BTreeMap::new();
    let mut last_updated: Option<Timestamp> = None;
    for (&family, held) in &state.families {
        let late = held.oldest_queued.is_some_and(|since| instant.saturating_duration_since(since) > limit);
        let healthy = alive && !late && held.consecutive_failures < FAILURES;
        last_updated = last_updated.max(held.last_updated);
        let last = held.last_updated.map(|time| time.to_string());
        status.insert(family_word(family), FamilyHealth { last_updated: last, healthy });
    }
    let healthy = alive && status.values().all(|family| family.healthy);
    ProxyHealth {
        last_updated: if healthy { now } else { last_updated.unwrap_or(state.started) }.to_string(),
        current_time: now.to_string(),
        node_eligible: node.map(NodeEligibility::eligible),
        healthy,
        status,
    }
}

/// Shows from outside that the sync loop turns.
#[derive(Debug)]
pub struct Pulse {
    start: Instant,
    beat_milliseconds: AtomicU64,
    writing: AtomicBool,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { start: Instant::now(), beat_milliseconds: AtomicU64::new(0), writing: AtomicBool::new(false) }
    }
}

impl Pulse {
    /// How often the sync loop must beat at least.
    pub const INTERVAL: Duration = Duration::from_secs(5);

    /// The loop turns. `writing` says that a write begins, which may take long.
    pub fn beat(&self, writing: bool) {
        let since = self.start.elapsed().as_millis();
        self.beat_milliseconds.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.writing.store(writing, Ordering::Relaxed);
    }

    /// Whether the loop lives.
    #[must_use]
    pub fn alive(&self) -> bool {
        let limit = if self.writing.load(Ordering::Relaxed) { WRITE_TIMEOUT } else { LOOP_TIMEOUT };
        let beat = Duration::from_millis(self.beat_milliseconds.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(beat) < limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{SyncError, SyncFailure};
    use crate::state::FamilyState;
    use pointsman_crds::proxy_node_status::IpFamily;

    fn state(families: &[(IpFamily, FamilyState)]) -> SyncState {
        let mut state = SyncState::new(Timestamp::UNIX_EPOCH);
        state.families = families.iter().cloned().collect();
        state
    }

    fn queued(since: Instant) -> FamilyState {
        FamilyState {
            oldest_queued: Some(since),
            last_updated: Some(Timestamp::UNIX_EPOCH),
            ..FamilyState::default()
        }
    }

    fn healthy(state: &SyncState) -> bool {
        proxy_health(state, true, None, Timestamp::UNIX_EPOCH, Instant::now()).healthy
    }

    #[tokio::test(start_paused = true)]
    async fn hz_1_a_change_may_wait_for_two_periods_and_each_family_counts() {
        let start = Instant::now();
        assert!(healthy(&state(&[])), "before anything");
        let both = state(&[(IpFamily::IPv4, queued(start)), (IpFamily::IPv6, FamilyState::default())]);
        assert!(healthy(&both));
        tokio::time::advance(Duration::from_mins(1)).await;
        assert!(healthy(&both), "exactly two periods");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!healthy(&both));
        let health = proxy_health(&both, true, None, Timestamp::now(), Instant::now());
        assert!(!health.status["IPv4"].healthy);
        assert!(health.status["IPv6"].healthy);
        assert_eq!(health.last_updated, Timestamp::UNIX_EPOCH.to_string(), "the last success");
        let written = state(&[(IpFamily::IPv4, FamilyState::default())]);
        assert!(healthy(&written));
    }

    // ids: REG-105742
    #[tokio::test(start_paused = true)]
    async fn a_sync_loop_that_hangs_is_not_healthy_though_nothing_is_queued() {
        let idle = state(&[(IpFamily::IPv4, FamilyState::default())]);
        let health = proxy_health(&idle, false, None, Timestamp::UNIX_EPOCH, Instant::now());
        assert!(!health.healthy && !health.status["IPv4"].healthy);
    }

    #[tokio::test(start_paused = true)]
    async fn three_failures_in_a_row_are_enough() {
        let error =
            SyncError { family: IpFamily::IPv4, failure: SyncFailure::RestoreFailed, message: String::new() };
        for (failures, expected) in [(2, true), (3, false)] {
            let family = FamilyState {
                consecutive_failures: failures,
                last_error: Some(error.clone()),
                ..FamilyState::default()
            };
            assert_eq!(healthy(&state(&[(IpFamily::IPv4, family)])), expected, "{failures} failures");
        }
    }

    #[test]
    fn hz_2_eligibility_follows_the_node_object() {
        let sound = NodeEligibility { exists: true, ..NodeEligibility::default() };
        for (node, eligible) in [
            (sound, true),
            (NodeEligibility { exists: false, ..sound }, false),
            (NodeEligibility { deleting: true, ..sound }, false),
            (NodeEligibility { to_be_deleted: true, ..sound }, false),
        ] {
            assert_eq!(node.eligible(), eligible, "{node:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hz_3_only_healthz_speaks_of_the_node() {
        let now = Timestamp::UNIX_EPOCH;
        let livez = proxy_health(&state(&[]), true, None, now, Instant::now());
        assert!(!serde_json::to_string(&livez).unwrap().contains("nodeEligible"));
        let healthz = proxy_health(&state(&[]), true, Some(NodeEligibility::default()), now, Instant::now());
        assert!(serde_json::to_string(&healthz).unwrap().contains("\"nodeEligible\":false"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_write_is_alive_and_a_stuck_loop_is_not() {
        let pulse = Pulse::default();
        pulse.beat(false);
        tokio::time::advance(Duration::from_secs(29)).await;
        assert!(pulse.alive());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(!pulse.alive());
        pulse.beat(true);
        tokio::time::advance(Duration::from_secs(500)).await;
        assert!(pulse.alive());
        tokio::time::advance(Duration::from_secs(101)).await;
        assert!(!pulse.alive());
    }
}
