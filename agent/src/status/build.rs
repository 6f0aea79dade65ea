//! The status, derived from what the agent knows.
//!
//! In: the sync loop's snapshot, the state of the watches, what the node offers, the conditions last written. Out: the
//! status to write. A pure function: the same input gives the same status, whenever and wherever it runs.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use pointsman_crds::condition::{Condition, ConditionStatus, set_condition};
use pointsman_crds::node_config::SUPPORTED_VERSIONS;
use pointsman_crds::proxy_node_status::{
    AgentInfo, ConfigInfo, DriftInfo, NodeInfo, ProxyNodeStatusStatus, SlowService, SyncInfo,
};
use pointsman_crds::settings::{DriftPolicy, Mode};
use tokio::time::Instant;

use crate::config::Tampering;
use crate::state::{Compatibility, Source, SyncState, Watches};

/// A watch that has only failed for this long no longer says what the cluster looks like.
pub const WATCH_STALE_AFTER: Duration = Duration::from_mins(1);

/// What does not change while the agent runs.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// The agent's version.
    pub version: String,
    /// Kernel release.
    pub kernel_version: Option<String>,
    /// Version of nft, where there is one.
    pub nft_version: Option<String>,
    /// Modes that this node can run.
    pub supported_modes: Vec<Mode>,
    /// The flags that the agent was started with, defaults included; none is a secret.
    pub flags: BTreeMap<&'static str, String>,
}

/// What a status is made of.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The sync loop's snapshot.
    pub state: &'a SyncState,
    /// The watches.
    pub watches: &'a Watches,
    /// The node and the agent.
    pub identity: &'a Identity,
    /// The conditions that were last written, for their transition times.
    pub previous: &'a [Condition],
    /// The generation of the spec whose revision is the assigned one, if known.
    pub observed_generation: Option<i64>,
    /// Wall time.
    pub now: Timestamp,
    /// The same moment on the clock that cannot be set.
    pub instant: Instant,
}

/// What a condition says, before it has a time.
struct Finding {
    status: ConditionStatus,
    reason: String,
    message: String,
}

impl Finding {
    fn new(status: ConditionStatus, reason: &str, message: impl Into<String>) -> Self {
        Self { status, reason: reason.to_owned(), message: message.into() }
    }

    fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::True, reason, message)
    }

    fn no(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::False, reason, message)
    }

    fn unknown(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::Unknown, reason, message)
    }

    fn is(&self, status: ConditionStatus) -> bool {
        self.status == status
    }
}

/// The status to report now. Its heartbeat time is `now`.
#[must_use]
pub fn build(inputs: Inputs<'_>) -> ProxyNodeStatusStatus {
    let state = inputs.state;
    let compatible = compatible(state);
    let applied = config_applied(state);
    let synced = synced(inputs);
    let drifted = drifted(state);
    let ready = ready(&compatible, &applied, &synced, &drifted);
    let word = state_word(&compatible, &applied, &synced, &ready);

    let mut conditions: Vec<Condition> = inputs.previous.to_vec();
    // Only our own six: a condition that an operator of another version has added is its to remove.
    for (type_, finding) in [
        ("Ready", ready),
        ("ConfigApplied", applied),
        ("Synced", synced),
        ("Compatible", compatible),
        ("Drifted", drifted),
        ("Tampered", tampered(state)),
    ] {
        set_condition(
            &mut conditions,
            Condition {
                type_: type_.to_owned(),
                status: finding.status,
                reason: finding.reason,
                message: cut(&finding.message, 1024),
                last_transition_time: Time(inputs.now),
                observed_generation: inputs.observed_generation,
            },
        );
    }
    ProxyNodeStatusStatus {
        observed_generation: inputs.observed_generation,
        state: Some(word.to_owned()),
        mode: state.mode.map(|mode| mode.to_string()),
        heartbeat_time: Some(Time(inputs.now)),
        agent: Some(AgentInfo {
            version: Some(cut(&inputs.identity.version, 32)),
            start_time: Some(Time(state.started)),
            config_versions: SUPPORTED_VERSIONS.iter().map(|&version| version.to_owned()).collect(),
        }),
        node: Some(NodeInfo {
            kernel_version: inputs.identity.kernel_version.as_deref().map(|text| cut(text, 64)),
            iptables_version: state.iptables_version.as_deref().map(|text| cut(text, 32)),
            nft_version: inputs.identity.nft_version.as_deref().map(|text| cut(text, 32)),
            ip_families: state.family_order.clone(),
            supported_modes: inputs.identity.supported_modes.clone(),
        }),
        config: Some(ConfigInfo {
            assigned: state.config.assigned.clone(),
            active: state.config.active.clone(),
            active_hash: state.config.active_hash.clone(),
            last_known_good: state.config.last_known_good.clone(),
            rejected: state.config.rejected.as_ref().and_then(|(revision, _)| revision.clone()),
        }),
        sync: Some(sync_info(state)),
        slowest_services: state
            .latency
            .slowest
            .iter()
            .take(5)
            .map(|(service, milliseconds)| SlowService {
                service: cut(service, 127),
                latency_milliseconds: count(*milliseconds),
            })
            .collect(),
        drift: Some(DriftInfo {
            last_check_time: state.drift.last_check.map(Time),
            foreign_changes: count(state.drift.foreign_changes),
            repairs: count(state.drift.repairs),
            last_diff: state.drift.last_diff.as_deref().map(|text| cut(text, 512)),
        }),
        plan: None,
        conditions,
    }
}

fn sync_info(state: &SyncState) -> SyncInfo {
    SyncInfo {
        services: count(state.services),
        endpoints: count(state.endpoints),
        rules: count(state.rules),
        last_sync_time: state.last_sync().map(Time),
        last_full_sync_time: state.last_full.map(Time),
        last_duration_milliseconds: count(state.last_duration_milliseconds),
        latency_p99: state.latency.p99_milliseconds.map(for_people),
        latency_p99_milliseconds: state.latency.p99_milliseconds.map(count),
        consecutive_failures: count(state.consecutive_failures()),
        last_error: state.error().map(|error| cut(&error.to_string(), 1024)),
    }
}

fn compatible(state: &SyncState) -> Finding {
    match &state.compatibility {
        Compatibility::Unknown => Finding::unknown("NotChecked", "no configuration has asked for a mode yet"),
        Compatibility::Supported => {
            Finding::yes("ModeSupported", with_settings(state, "the node runs the mode that it is told to"))
        }
        Compatibility::Fallback(why) => Finding::yes("ModeFallback", with_settings(state, why)),
        Compatibility::Incompatible(rejection) => Finding::no(rejection.reason, rejection.message.clone()),
    }
}

/// What the node goes without does not keep it from serving the rest, but is to be seen.
fn with_settings(state: &SyncState, message: &str) -> String {
    let missing: Vec<&str> = state.settings.iter().chain(&state.localhost).map(String::as_str).collect();
    if missing.is_empty() {
        return message.to_owned();
    }
    format!("{message}; not as configured: {}", missing.join("; "))
}

fn config_applied(state: &SyncState) -> Finding {
    let config = &state.config;
    if let Some((_, rejection)) = &config.rejected {
        return Finding::no(rejection.reason, rejection.message.clone());
    }
    match (&config.assigned, &config.active) {
        (None, None) => {
            Finding::unknown("NeverReported", "no configuration has been assigned to this node yet")
        }
        (None, Some(active)) => Finding::unknown(
            "FromCheckpoint",
            format!("serving {active} from the node's disk; the API server has not named a revision yet"),
        ),
        // The hash too: an edit under break-glass keeps the revision's name.
        (Some(assigned), Some(active))
            if assigned == active && config.assigned_hash == config.active_hash =>
        {
            let message = match &config.tampering {
                Tampering::BreakGlass(why) => format!("{active} is in the kernel, {why}"),
                _ => format!("{active} is in the kernel"),
            };
            Finding::yes("Applied", message)
        }
        (Some(assigned), _) => Finding::unknown("Applying", format!("{assigned} is not in the kernel yet")),
    }
}

fn synced(inputs: Inputs<'_>) -> Finding {
    let state = inputs.state;
    if let Some(error) = state.error() {
        return Finding::no(&error.failure.to_string(), error.to_string());
    }
    let failed = |(source, watch): (&Source, &crate::state::WatchState)| {
        let (since, error) = watch.failing.as_ref()?;
        let failing_for = inputs.instant.saturating_duration_since(*since);
        // Before the first list there is nothing to serve from, so a failure counts at once.
        let counts = Source::REQUIRED.contains(source) && (!watch.listed || failing_for >= WATCH_STALE_AFTER);
        counts.then(|| error.clone())
    };
    if let Some(error) = inputs.watches.0.iter().find_map(failed) {
        return Finding::no("WatchStale", error);
    }
    if !state.waiting.is_empty() {
        let lists: Vec<String> = state.waiting.iter().map(ToString::to_string).collect();
        return Finding::unknown("WaitingForLists", format!("waiting for {}", lists.join(", ")));
    }
    if state.families.is_empty() || state.families.values().any(|family| family.last_updated.is_none()) {
        return Finding::unknown("FirstSync", "the first write to the kernel is not done yet");
    }
    if !state.verified {
        return Finding::unknown("Verifying", "what the kernel holds has not been read back yet");
    }
    let mut message = "the kernel holds what the plan says".to_owned();
    for (what, which) in [
        ("except for what this mode cannot", &state.limits),
        ("endpoints that cannot be reached from here get no new connections", &state.resting),
    ] {
        if !which.is_empty() {
            message = format!("{message}; {what}: {}", which.join("; "));
        }
    }
    Finding::yes("Synced", message)
}

fn drifted(state: &SyncState) -> Finding {
    let drift = &state.drift;
    let diff = drift.last_diff.as_deref().unwrap_or("something differs");
    if drift.differs {
        return match &drift.error {
            Some(error) => Finding::yes("RepairFailed", format!("{diff}; repairing it failed: {error}")),
            None => Finding::yes("ForeignChange", diff),
        };
    }
    let off = state.config.in_force.as_ref().is_some_and(|config| config.drift.policy == DriftPolicy::Off);
    if off {
        Finding::unknown("CheckDisabled", "drift.policy is Off")
    } else if drift.last_check.is_none() {
        Finding::unknown("NotChecked", "the kernel has not been read back yet")
    } else if drift.repairs > 0 {
        Finding::no("Repaired", format!("repaired: {diff}"))
    } else {
        Finding::no("InSync", "nothing of ours was changed by others")
    }
}

fn tampered(state: &SyncState) -> Finding {
    match &state.config.tampering {
        Tampering::None => Finding::no("AsExpected", "the configuration is the operator's"),
        Tampering::HashMismatch(why) => Finding::yes("HashMismatch", why.clone()),
        Tampering::BreakGlass(why) => Finding::yes("BreakGlass", why.clone()),
    }
}

fn ready(compatible: &Finding, applied: &Finding, synced: &Finding, drifted: &Finding) -> Finding {
    if compatible.is(ConditionStatus::False) {
        Finding::no("Incompatible", compatible.message.clone())
    } else if synced.is(ConditionStatus::False) {
        Finding::no("NotSynced", synced.message.clone())
    } else if !applied.is(ConditionStatus::True) {
        Finding::no("ConfigNotApplied", applied.message.clone())
    } else if !synced.is(ConditionStatus::True) {
        Finding::no("NotSynced", synced.message.clone())
    } else if drifted.is(ConditionStatus::True) {
        Finding::no("NotSynced", format!("the kernel differs from the plan: {}", drifted.message))
    } else {
        Finding::yes("AsExpected", applied.message.clone())
    }
}

/// The first that holds of Incompatible, Degraded, Applying, Ready; Stale and Unknown are the operator's to say.
fn state_word(compatible: &Finding, applied: &Finding, synced: &Finding, ready: &Finding) -> &'static str {
    let drift_degrades = ready.is(ConditionStatus::False)
        && applied.is(ConditionStatus::True)
        && synced.is(ConditionStatus::True)
        && compatible.is(ConditionStatus::True);
    if compatible.is(ConditionStatus::False) {
        "Incompatible"
    } else if synced.is(ConditionStatus::False) || applied.is(ConditionStatus::False) || drift_degrades {
        "Degraded"
    } else if ready.is(ConditionStatus::True) {
        "Ready"
    } else {
        "Applying"
    }
}

/// Whether `status` says Ready.
#[must_use]
pub fn is_ready(status: &ProxyNodeStatusStatus) -> bool {
    condition(status, "Ready").is_some_and(|ready| ready.status == ConditionStatus::True)
}

/// One condition of a status.
#[must_use]
pub fn condition<'a>(status: &'a ProxyNodeStatusStatus, type_: &str) -> Option<&'a Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_)
}

/// `status` without what never justifies a write: times and counters.
#[must_use]
pub fn meaningful(status: &ProxyNodeStatusStatus) -> ProxyNodeStatusStatus {
    let mut status = status.clone();
    status.heartbeat_time = None;
    status.sync = None;
    status.slowest_services.clear();
    if let Some(drift) = &mut status.drift {
        drift.last_check_time = None;
    }
    for condition in &mut status.conditions {
        condition.last_transition_time = Time(Timestamp::UNIX_EPOCH);
    }
    status
}

/// At most `max` characters, which is how the schema counts, cut where a character ends.
fn cut(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    text.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

fn count(number: impl TryInto<i32>) -> i32 {
    number.try_into().unwrap_or(i32::MAX)
}

/// `180ms`, `2.3s`, `41s`.
fn for_people(milliseconds: u64) -> String {
    match milliseconds {
        0..1000 => format!("{milliseconds}ms"),
        1000..10_000 => format!("{}.{}s", milliseconds / 1000, milliseconds % 1000 / 100),
        _ => format!("{}s", milliseconds / 1000),
    }
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
