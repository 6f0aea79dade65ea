use std::sync::Arc;

use pointsman_crds::proxy_node_status::IpFamily;

use super::*;
use crate::config::Rejection;
use crate::config::tests::sample;
use crate::kernel::{SyncError, SyncFailure};
use crate::state::{DriftState, FamilyState, WatchState};

fn now() -> Timestamp {
    "2026-11-29T12:00:00Z".parse().unwrap()
}

/// A node that does everything right.
fn sound() -> SyncState {
    let mut state = SyncState::new("2026-11-29T11:00:00Z".parse().unwrap());
    state.waiting.clear();
    state.config.assigned = Some("default-0123456789".to_owned());
    state.config.assigned_hash = Some("sha256:1".to_owned());
    state.config.active.clone_from(&state.config.assigned);
    state.config.active_hash.clone_from(&state.config.assigned_hash);
    state.config.last_known_good.clone_from(&state.config.assigned);
    state.config.in_force = Some(Arc::new(sample()));
    state.mode = Some(Mode::Iptables);
    state.compatibility = Compatibility::Supported;
    state.family_order = vec![IpFamily::IPv4, IpFamily::IPv6];
    for family in [IpFamily::IPv4, IpFamily::IPv6] {
        state.families.insert(family, FamilyState { last_updated: Some(now()), ..FamilyState::default() });
    }
    state.drift.last_check = Some(now());
    state.verified = true;
    state
}

fn failure(failure: SyncFailure) -> SyncError {
    SyncError { family: IpFamily::IPv6, failure, message: "iptables-restore said no".to_owned() }
}

fn failing(state: &mut SyncState, why: SyncFailure) {
    let family = state.families.get_mut(&IpFamily::IPv6).unwrap();
    family.consecutive_failures = 1;
    family.last_error = Some(failure(why));
}

fn status_of(state: &SyncState, watches: &Watches, previous: &[Condition]) -> ProxyNodeStatusStatus {
    build(Inputs {
        state,
        watches,
        identity: &Identity { version: "0.1.0".to_owned(), ..Identity::default() },
        previous,
        observed_generation: Some(3),
        now: now(),
        instant: Instant::now(),
    })
}

/// `Ready=False/NotSynced` and so on, one word for each condition.
fn words(status: &ProxyNodeStatusStatus) -> Vec<String> {
    status.conditions.iter().map(|it| format!("{}={}/{}", it.type_, it.status, it.reason)).collect()
}

fn check(name: &str, state: &SyncState, watches: &Watches, word: &str, expected: &[&str]) {
    let status = status_of(state, watches, &[]);
    let words = words(&status);
    assert_eq!(status.state.as_deref(), Some(word), "{name}: {words:?}");
    for expected in expected {
        assert!(words.iter().any(|it| it == expected), "{name}: {expected} is not in {words:?}");
    }
    assert_eq!(words.len(), 6, "{name}: always all conditions");
    for condition in &status.conditions {
        assert!(!condition.message.is_empty(), "{name}: {} says why", condition.type_);
    }
}

#[tokio::test(start_paused = true)]
async fn an_edit_under_break_glass_is_named_wherever_one_looks() {
    let mut state = sound();
    state.config.tampering = Tampering::BreakGlass("edited by hand: incident 7".to_owned());
    let status = status_of(&state, &Watches::default(), &[]);
    for type_ in ["Ready", "ConfigApplied", "Tampered"] {
        let message = &condition(&status, type_).unwrap().message;
        assert!(message.contains("edited by hand: incident 7"), "{type_}: {message}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_state_has_its_words() {
    let quiet = Watches::default();
    check(
        "sound",
        &sound(),
        &quiet,
        "Ready",
        &[
            "Ready=True/AsExpected",
            "ConfigApplied=True/Applied",
            "Synced=True/Synced",
            "Compatible=True/ModeSupported",
            "Drifted=False/InSync",
            "Tampered=False/AsExpected",
        ],
    );
    check(
        "just started",
        &SyncState::new(now()),
        &quiet,
        "Applying",
        &[
            "Ready=False/ConfigNotApplied",
            "ConfigApplied=Unknown/NeverReported",
            "Synced=Unknown/WaitingForLists",
            "Compatible=Unknown/NotChecked",
            "Drifted=Unknown/NotChecked",
        ],
    );
    for (name, change, word, expected) in CASES {
        let mut state = sound();
        change(&mut state);
        check(name, &state, &quiet, word, expected);
    }
}

/// Name, what is unlike [`sound`], the state, some of the conditions.
type Case = (&'static str, fn(&mut SyncState), &'static str, &'static [&'static str]);

const CASES: &[Case] = &[
    (
        "fallback",
        |s| s.compatibility = Compatibility::Fallback("no ipvs".to_owned()),
        "Ready",
        &["Compatible=True/ModeFallback", "Ready=True/AsExpected"],
    ),
    (
        "incompatible",
        |s| {
            let why = Rejection { reason: "ModeUnsupported", message: "no ipvs".to_owned() };
            s.compatibility = Compatibility::Incompatible(why.clone());
            s.config.rejected = Some((s.config.assigned.clone(), why));
        },
        "Incompatible",
        &["Ready=False/Incompatible", "Compatible=False/ModeUnsupported"],
    ),
    (
        "restore fails",
        |s| failing(s, SyncFailure::RestoreFailed),
        "Degraded",
        &["Ready=False/NotSynced", "Synced=False/RestoreFailed", "ConfigApplied=True/Applied"],
    ),
    (
        "lock held",
        |s| failing(s, SyncFailure::LockTimeout),
        "Degraded",
        &["Ready=False/NotSynced", "Synced=False/LockTimeout"],
    ),
    (
        "incompatible comes before degraded",
        |s| {
            failing(s, SyncFailure::ToolMissing);
            s.compatibility = Compatibility::Incompatible(Rejection {
                reason: "ToolMissing",
                message: "no iptables".to_owned(),
            });
        },
        "Incompatible",
        &["Ready=False/Incompatible"],
    ),
    (
        "refused",
        |s| {
            let why = Rejection { reason: "UnsupportedField", message: "colour".to_owned() };
            s.config.rejected = Some((Some("default-fff".to_owned()), why));
        },
        "Degraded",
        &["Ready=False/ConfigNotApplied", "ConfigApplied=False/UnsupportedField", "Synced=True/Synced"],
    ),
    (
        "applying",
        |s| s.config.assigned = Some("default-fff".to_owned()),
        "Applying",
        &["Ready=False/ConfigNotApplied", "ConfigApplied=Unknown/Applying"],
    ),
    (
        "same name, other bytes",
        |s| s.config.assigned_hash = Some("sha256:2".to_owned()),
        "Applying",
        &["ConfigApplied=Unknown/Applying"],
    ),
    (
        "from disk",
        |s| s.config.assigned = None,
        "Applying",
        &["Ready=False/ConfigNotApplied", "ConfigApplied=Unknown/FromCheckpoint"],
    ),
    (
        "not read back",
        |s| s.verified = false,
        "Applying",
        &["Ready=False/NotSynced", "Synced=Unknown/Verifying"],
    ),
    (
        "break-glass",
        |s| s.config.tampering = Tampering::BreakGlass("incident 7".to_owned()),
        "Ready",
        &["Tampered=True/BreakGlass", "Ready=True/AsExpected"],
    ),
    (
        "tampered",
        |s| {
            s.config.tampering = Tampering::HashMismatch("other bytes".to_owned());
            let why = Rejection { reason: "HashMismatch", message: "other bytes".to_owned() };
            s.config.rejected = Some((s.config.assigned.clone(), why));
        },
        "Degraded",
        &["Tampered=True/HashMismatch", "ConfigApplied=False/HashMismatch"],
    ),
    (
        "drift under Report",
        |s| s.drift = DriftState { differs: true, foreign_changes: 1, ..s.drift.clone() },
        "Degraded",
        &["Drifted=True/ForeignChange", "Ready=False/NotSynced", "Synced=True/Synced"],
    ),
    (
        "repaired",
        |s| s.drift = DriftState { repairs: 1, foreign_changes: 1, ..s.drift.clone() },
        "Ready",
        &["Drifted=False/Repaired", "Ready=True/AsExpected"],
    ),
    (
        "drift off",
        |s| {
            let mut config = sample();
            config.drift.policy = DriftPolicy::Off;
            s.config.in_force = Some(Arc::new(config));
        },
        "Ready",
        &["Drifted=Unknown/CheckDisabled"],
    ),
];

#[tokio::test(start_paused = true)]
async fn a_watch_that_only_fails_grows_stale_and_one_that_never_worked_counts_at_once() {
    let failing = |listed| {
        let failing = Some((Instant::now(), "Services cannot be watched".to_owned()));
        Watches([(Source::Services, WatchState { listed, failing })].into())
    };
    let worked = failing(true);
    check("just failed", &sound(), &worked, "Ready", &["Synced=True/Synced"]);
    tokio::time::advance(WATCH_STALE_AFTER).await;
    check("stale", &sound(), &worked, "Degraded", &["Synced=False/WatchStale", "Ready=False/NotSynced"]);
    check("never listed", &sound(), &failing(false), "Degraded", &["Synced=False/WatchStale"]);
    let optional = WatchState { listed: false, failing: Some((Instant::now(), "no".to_owned())) };
    let optional = Watches([(Source::ServiceCidrs, optional)].into());
    check("ServiceCIDRs are optional", &sound(), &optional, "Ready", &["Synced=True/Synced"]);
}

#[tokio::test(start_paused = true)]
async fn transition_times_stay_while_the_status_stays() {
    let before: Timestamp = "2026-11-28T00:00:00Z".parse().unwrap();
    let mut previous = status_of(&sound(), &Watches::default(), &[]).conditions;
    for condition in &mut previous {
        condition.last_transition_time = Time(before);
    }
    let mut state = sound();
    failing(&mut state, SyncFailure::RestoreFailed);
    let status = status_of(&state, &Watches::default(), &previous);
    let time = |type_| condition(&status, type_).unwrap().last_transition_time.0;
    assert_eq!((time("ConfigApplied"), time("Compatible")), (before, before));
    assert_eq!((time("Ready"), time("Synced")), (now(), now()));
}

#[tokio::test(start_paused = true)]
async fn counters_and_times_alone_are_not_worth_a_write() {
    let mut state = sound();
    let first = status_of(&state, &Watches::default(), &[]);
    state.services = 100;
    state.latency.p99_milliseconds = Some(5);
    state.latency.slowest = vec![("shop/web".to_owned(), 5)];
    state.drift.last_check = Some("2026-11-29T12:05:00Z".parse().unwrap());
    let mut second = status_of(&state, &Watches::default(), &first.conditions);
    second.heartbeat_time = None;
    assert_eq!(meaningful(&first), meaningful(&second));
    state.config.last_known_good = None;
    assert_ne!(meaningful(&first), meaningful(&status_of(&state, &Watches::default(), &first.conditions)));
}

#[tokio::test(start_paused = true)]
async fn what_the_schema_limits_is_cut() {
    let mut state = sound();
    failing(&mut state, SyncFailure::RestoreFailed);
    state.families.get_mut(&IpFamily::IPv6).unwrap().last_error =
        Some(SyncError { message: "ü".repeat(5000), ..failure(SyncFailure::RestoreFailed) });
    state.iptables_version = Some("v".repeat(100));
    state.drift.last_diff = Some("d".repeat(5000));
    state.latency.slowest = (0..9).map(|number| (format!("shop/{number}"), u64::MAX)).collect();
    let status = status_of(&state, &Watches::default(), &[]);
    let length = |text: &Option<String>| text.as_ref().unwrap().chars().count();
    let sync = status.sync.unwrap();
    assert_eq!(length(&sync.last_error), 1024);
    assert_eq!(length(&status.node.unwrap().iptables_version), 32);
    assert_eq!(length(&status.drift.unwrap().last_diff), 512);
    assert_eq!(status.slowest_services.len(), 5);
    assert_eq!(status.slowest_services[0].latency_milliseconds, i32::MAX);
    assert!(status.conditions.iter().all(|condition| condition.message.chars().count() <= 1024));
}

#[test]
fn durations_are_short_for_people() {
    for (milliseconds, text) in [(0, "0ms"), (180, "180ms"), (2345, "2.3s"), (41_000, "41s")] {
        assert_eq!(for_people(milliseconds), text);
    }
}

#[tokio::test(start_paused = true)]
async fn endpoints_that_rest_are_named_and_no_fault_of_the_node() {
    let mut state = sound();
    state.resting = vec!["ns/web/TCP (IPv4) 10.0.0.1:80".to_owned()];
    check("resting", &state, &Watches::default(), "Ready", &["Synced=True/Synced", "Ready=True/AsExpected"]);
    let status = status_of(&state, &Watches::default(), &[]);
    let synced = status.conditions.iter().find(|it| it.type_ == "Synced").unwrap();
    assert!(synced.message.contains("10.0.0.1:80"), "{}", synced.message);
}

#[tokio::test(start_paused = true)]
async fn services_that_the_mode_cannot_serve_as_they_should_be_are_named() {
    let mut state = sound();
    state.limits = vec!["ns/web (IPv4): served without session affinity".to_owned()];
    check("limits", &state, &Watches::default(), "Ready", &["Synced=True/Synced", "Ready=True/AsExpected"]);
    let status = status_of(&state, &Watches::default(), &[]);
    let synced = status.conditions.iter().find(|it| it.type_ == "Synced").unwrap();
    assert!(synced.message.contains("ns/web (IPv4): served without session affinity"), "{}", synced.message);
}
