//! The loop against a kernel that fails on cue, in paused time.

mod reports;
mod rig;
mod selection;
mod trials;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use pointsman_crds::settings::{DriftPolicy, IpvsScheduler, Mode};
use tokio::time::{Instant, sleep};

use super::*;
use crate::config::tests::{candidate, sample};
use crate::conntrack;
use crate::kernel::SyncFailure;
use crate::model::ObjectName;
use crate::state::Compatibility;
use crate::sysctl::Ipvs;
use rig::{listed, rig, rig_with, slice};

#[tokio::test(start_paused = true)]
async fn syn_1_nothing_is_written_before_every_list_is_in() {
    let rig = rig();
    rig.service("web").await;
    rig.config(candidate("default", sample())).await;
    rig.tell(Input::Change(Change::Node(NodeFacts::default()))).await;
    for source in [Source::Services, Source::EndpointSlices, Source::Node] {
        sleep(Duration::from_mins(10)).await;
        assert!(rig.writes().is_empty(), "before {source}");
        assert_eq!(rig.script.lock().unwrap().opened, 0);
        assert!(rig.now().waiting.contains(&source));
        rig.tell(listed(source)).await;
    }
    rig.settle().await;
    let writes = rig.writes();
    assert_eq!((writes.len(), writes[0].services), (1, 1));
    let state = rig.now();
    assert!(state.verified);
    assert_eq!(state.config.active, state.config.assigned);
    assert_eq!(state.compatibility, Compatibility::Supported);
}

#[tokio::test(start_paused = true)]
async fn syn_13_the_pause_counts_from_the_end_of_a_write_and_bursts_are_one_write() {
    let rig = rig();
    rig.script.lock().unwrap().takes = Duration::from_secs(3);
    let start = Instant::now();
    rig.begin().await;
    for number in 0..50 {
        rig.service(&format!("web{number}")).await;
        sleep(Duration::from_millis(20)).await;
    }
    sleep(Duration::from_secs(20)).await;
    let writes = rig.writes();
    assert_eq!(writes.len(), 2, "{writes:?}");
    assert_eq!(writes[1].ports, 50);
    // The first took 3 s; then the pause of 1 s.
    assert!(writes[1].at - start >= Duration::from_secs(4));
    assert!(writes[1].at - start < Duration::from_millis(4100));
}

// ids: SYN-6
#[tokio::test(start_paused = true)]
async fn without_changes_nothing_is_written() {
    let rig = rig();
    rig.begin().await;
    rig.service("web").await;
    sleep(Duration::from_secs(3)).await;
    rig.service("web").await;
    sleep(Duration::from_hours(1)).await;
    assert_eq!(rig.writes().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn syn_8_a_failed_write_is_retried_sooner_than_a_period_with_everything_that_was_pending() {
    let rig = rig();
    rig.begin().await;
    sleep(Duration::from_secs(5)).await;
    rig.script.lock().unwrap().failures.extend([SyncFailure::RestoreFailed; 3]);
    rig.service("web").await;
    rig.settle().await;
    let failed = rig.now();
    assert_eq!(failed.consecutive_failures(), 1);
    assert_eq!(failed.error().unwrap().failure, SyncFailure::RestoreFailed);
    assert!(!failed.verified);
    sleep(Duration::from_secs(29)).await;
    let writes = rig.writes();
    let [.., second, third, fourth, fifth] = &writes[..] else { panic!("{writes:?}") };
    assert_eq!([second.ok, third.ok, fourth.ok, fifth.ok], [false, false, false, true]);
    assert_eq!(fifth.ports, 1, "what failed is still to be written");
    for (gap, least, most) in [
        (third.at - second.at, 800, 1210),
        (fourth.at - third.at, 1600, 2410),
        (fifth.at - fourth.at, 3200, 4810),
    ] {
        let gap = gap.as_millis();
        assert!((least..=most).contains(&gap), "{gap} ms");
    }
    let healed = rig.now();
    assert_eq!((healed.consecutive_failures(), healed.verified), (0, true));
    assert!(healed.last_full.is_some(), "after a failure everything is repaired");
}

#[tokio::test(start_paused = true)]
async fn a_retry_does_not_wait_for_the_pause() {
    let rig = rig();
    rig.begin().await;
    let mut config = sample();
    config.sync.min_period_milliseconds = 20_000;
    rig.config(candidate("default", config)).await;
    sleep(Duration::from_mins(1)).await;
    rig.script.lock().unwrap().failures.push_back(SyncFailure::LockTimeout);
    rig.service("web").await;
    sleep(Duration::from_secs(2)).await;
    let writes = rig.writes();
    assert!(writes.last().unwrap().ok);
    assert!(!writes[writes.len() - 2].ok);
}

#[tokio::test(start_paused = true)]
async fn retries_never_wait_for_longer_than_a_period() {
    let rig = rig();
    rig.begin().await;
    rig.script.lock().unwrap().broken = Some(SyncFailure::RestoreFailed);
    rig.service("web").await;
    sleep(Duration::from_mins(10)).await;
    let attempts = rig.script.lock().unwrap().attempts.clone();
    let longest = attempts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(longest <= Duration::from_secs(30), "{longest:?}");
    assert!(rig.now().consecutive_failures() > 10);
    rig.script.lock().unwrap().broken = None;
    sleep(Duration::from_secs(30)).await;
    assert!(rig.now().verified);
}

#[tokio::test(start_paused = true)]
async fn a_kernel_that_cannot_be_written_shows_without_any_change() {
    let rig = rig();
    rig.begin().await;
    sleep(Duration::from_secs(47)).await;
    rig.script.lock().unwrap().broken = Some(SyncFailure::LockTimeout);
    sleep(Duration::from_secs(6)).await;
    assert_eq!(rig.now().error().map(|error| error.failure), Some(SyncFailure::LockTimeout));
    let writes = rig.writes().len();
    sleep(Duration::from_mins(1)).await;
    assert!(rig.now().error().is_some(), "with nothing to write, no write can succeed");
    assert_eq!(rig.writes().len(), writes);
    rig.script.lock().unwrap().broken = None;
    sleep(Duration::from_secs(30)).await;
    assert!(rig.now().error().is_none());
    assert!(rig.now().verified);
}

#[tokio::test(start_paused = true)]
async fn probes_are_no_rarer_because_something_else_is_done_with_them() {
    let rig = rig();
    rig.script.lock().unwrap().takeovers.extend(vec![Ok(false); 100]);
    rig.script.lock().unwrap().takeover_takes = Duration::from_secs(1);
    rig.begin().await;
    sleep(Duration::from_mins(2)).await;
    let attempts = rig.script.lock().unwrap().attempts.clone();
    let longest = attempts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(longest < Duration::from_millis(5500), "{longest:?}");
}

// ids: REG-48107
#[tokio::test(start_paused = true)]
async fn a_write_that_may_wait_long_for_the_lock_asks_first_whether_it_is_held() {
    for (lock_timeout, writes) in [(5, 1), (60, 0)] {
        let rig = rig();
        rig.begin().await;
        let mut config = sample();
        config.iptables.lock_timeout_seconds = lock_timeout;
        rig.config(candidate("default", config)).await;
        sleep(Duration::from_secs(3)).await;
        let before = rig.writes().len();
        rig.script.lock().unwrap().broken = Some(SyncFailure::LockTimeout);
        rig.service("web").await;
        rig.settle().await;
        assert_eq!(rig.now().error().map(|error| error.failure), Some(SyncFailure::LockTimeout));
        assert_eq!(rig.writes().len() - before, writes, "{lock_timeout} s");
        rig.script.lock().unwrap().broken = None;
        sleep(Duration::from_secs(10)).await;
        assert_eq!((rig.now().services, rig.now().verified), (1, true));
    }
}

// ids: CFG-17
#[tokio::test(start_paused = true)]
async fn a_new_configuration_is_active_only_when_it_was_read_back() {
    let rig = rig();
    rig.begin().await;
    let old = rig.now().config.active.unwrap();
    let mut config = sample();
    config.masquerade.bit = 15;
    let new = candidate("default", config);
    rig.script.lock().unwrap().differences.extend(vec![vec!["KUBE-POSTROUTING".to_owned()]; 2]);
    sleep(Duration::from_secs(2)).await;
    rig.config(new.clone()).await;
    rig.settle().await;
    let state = rig.now();
    assert_eq!(state.config.assigned.as_ref(), Some(&new.revision));
    assert_eq!(state.config.active.as_ref(), Some(&old));
    assert!(state.error().unwrap().message.contains("KUBE-POSTROUTING"));
    sleep(Duration::from_secs(2)).await;
    let state = rig.now();
    assert_eq!(state.config.active.as_ref(), Some(&new.revision));
    assert_eq!(state.config.active_hash.as_ref(), Some(&new.hash));
    assert_eq!(rig.writes().last().unwrap().masquerade_bit, 15);
    assert_eq!(rig.checkpoint.load().unwrap().unwrap(), new);
    assert_eq!(rig.script.lock().unwrap().opened, 1, "live, without opening the node again");
}

// ids: CFG-18
#[tokio::test(start_paused = true)]
async fn a_refused_configuration_leaves_the_one_in_force_working() {
    let rig = rig();
    rig.begin().await;
    let before = rig.now();
    let rejection = Rejection { reason: "HashMismatch", message: "no".to_owned() };
    rig.assess(Some("default-ffffffffff".to_owned()), Err(rejection)).await;
    rig.service("web").await;
    sleep(Duration::from_secs(2)).await;
    let state = rig.now();
    assert_eq!(state.config.active, before.config.active);
    assert_eq!(state.config.assigned.as_deref(), Some("default-ffffffffff"));
    assert_eq!(state.config.rejected.unwrap().1.reason, "HashMismatch");
    assert_eq!(rig.writes().last().unwrap().services, 1, "it serves on");
    rig.config(candidate("default", sample())).await;
    sleep(Duration::from_secs(2)).await;
    assert!(rig.now().config.rejected.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_mode_that_the_node_cannot_run_is_incompatible_and_the_old_one_goes_on() {
    let rig = rig();
    rig.begin().await;
    let before = rig.now().config.active;
    rig.script.lock().unwrap().refuse =
        Some(Rejection { reason: "ModeUnsupported", message: "no".to_owned() });
    let mut config = sample();
    config.mode = Mode::Ipvs;
    let other = candidate("default", config);
    rig.config(other.clone()).await;
    rig.service("web").await;
    sleep(Duration::from_secs(2)).await;
    let state = rig.now();
    assert!(matches!(state.compatibility, Compatibility::Incompatible(_)));
    assert_eq!((state.config.active.clone(), state.mode), (before.clone(), Some(Mode::Iptables)));
    assert_eq!(rig.writes().last().unwrap().services, 1);
    // It asks again, and takes over once it can.
    rig.script.lock().unwrap().refuse = None;
    sleep(Duration::from_secs(31)).await;
    let state = rig.now();
    assert_eq!(state.config.active.as_ref(), Some(&other.revision));
    assert_eq!((state.compatibility, state.mode), (Compatibility::Supported, Some(Mode::Ipvs)));
    let asked: Vec<_> = rig.script.lock().unwrap().settings.iter().map(|asked| asked.ipvs).collect();
    assert_eq!(asked, [None, Some(Ipvs { strict_arp: false })], "settings that only this mode needs");
    assert_eq!(
        rig.script.lock().unwrap().retired,
        1,
        "the old one is removed after the new one was read back"
    );
    // Refused once more, and back to what runs: compatible without opening anything.
    rig.script.lock().unwrap().refuse =
        Some(Rejection { reason: "ModeUnsupported", message: "no".to_owned() });
    rig.config(candidate("default", sample())).await;
    sleep(Duration::from_secs(1)).await;
    assert!(matches!(rig.now().compatibility, Compatibility::Incompatible(_)));
    rig.config(other).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.now().compatibility, Compatibility::Supported);
    assert!(rig.now().config.rejected.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_scheduler_that_the_kernel_lacks_is_incompatible_before_anything_is_written() {
    let rig = rig();
    rig.begin().await;
    let with = |mode, scheduler| {
        let mut config = sample();
        (config.mode, config.ipvs.scheduler) = (mode, scheduler);
        candidate("default", config)
    };
    rig.config(with(Mode::Iptables, IpvsScheduler::Mh)).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.script.lock().unwrap().opened, 1, "mode iptables does not mind");
    rig.config(with(Mode::Ipvs, IpvsScheduler::Rr)).await;
    sleep(Duration::from_secs(2)).await;
    let writes = rig.writes().len();
    rig.script.lock().unwrap().refuse =
        Some(Rejection { reason: "KernelUnsupported", message: "no ip_vs_mh".to_owned() });
    rig.config(with(Mode::Ipvs, IpvsScheduler::Mh)).await;
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(rig.now().compatibility, Compatibility::Incompatible(_)));
    assert_eq!(rig.writes().len(), writes);
    rig.script.lock().unwrap().refuse = None;
    sleep(Duration::from_secs(31)).await;
    assert_eq!(rig.now().compatibility, Compatibility::Supported);
    assert!(rig.writes().len() > writes);
}

#[tokio::test(start_paused = true)]
async fn syn_10_settings_of_the_kernel_that_others_have_changed_are_drift() {
    for policy in [DriftPolicy::Repair, DriftPolicy::Report] {
        let rig = rig();
        let mut config = sample();
        config.drift.policy = policy;
        rig.begin().await;
        rig.config(candidate("default", config)).await;
        sleep(Duration::from_secs(2)).await;
        let asked = rig.script.lock().unwrap().settings.len();
        let changed = "net.ipv4.ip_forward is 0, should be 1".to_owned();
        rig.script.lock().unwrap().settings_differ = vec![changed.clone()];
        sleep(Duration::from_secs(61)).await;
        let drift = rig.now().drift;
        assert_eq!((drift.foreign_changes, drift.last_diff), (1, Some(changed)));
        let again = rig.script.lock().unwrap().settings.len() - asked;
        let expected = if policy == DriftPolicy::Repair { (false, 1, 1) } else { (true, 0, 0) };
        assert_eq!((drift.differs, drift.repairs, again), expected, "{policy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn syn_10_drift_is_repaired_and_counted() {
    let rig = rig();
    rig.begin().await;
    assert_eq!(
        rig.script.lock().unwrap().reads,
        [Reach::Everything],
        "what was just written is read in full"
    );
    rig.script.lock().unwrap().differences.push_back(vec!["KUBE-SERVICES".to_owned()]);
    sleep(Duration::from_secs(61)).await;
    let state = rig.now();
    assert_eq!((state.drift.foreign_changes, state.drift.repairs), (1, 1));
    assert!(!state.drift.differs && state.verified);
    assert_eq!(state.drift.last_diff.as_deref(), Some("KUBE-SERVICES"));
    let script = rig.script.lock().unwrap();
    assert_eq!(script.reads[1..], [Reach::Suspects; 2], "once to find it, once to see that it is repaired");
    assert_eq!((script.repairs.len(), script.writes.len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn syn_10_a_change_that_the_kernel_tells_of_is_repaired_within_a_second() {
    let rig = rig();
    rig.begin().await;
    sleep(Duration::from_secs(5)).await;
    let change = Arc::clone(&rig.script.lock().unwrap().foreign_change);
    rig.script.lock().unwrap().differences.push_back(vec!["KUBE-SERVICES".to_owned()]);
    let begun = Instant::now();
    change.notify_one();
    sleep(Duration::from_secs(1)).await;
    assert!(rig.script.lock().unwrap().repairs[0] - begun < Duration::from_secs(1));
    // Whoever changes something all the time keeps us busy once a second.
    let reads = rig.script.lock().unwrap().reads.len();
    for _ in 0..100 {
        change.notify_one();
        sleep(Duration::from_millis(100)).await;
    }
    let more = rig.script.lock().unwrap().reads.len() - reads;
    assert!((8..=10).contains(&more), "{more} looks in ten seconds");
    // A repair that fails is a failed write.
    sleep(Duration::from_secs(5)).await;
    rig.script.lock().unwrap().failures.push_back(SyncFailure::LockTimeout);
    rig.script.lock().unwrap().differences.push_back(vec!["KUBE-SERVICES".to_owned()]);
    change.notify_one();
    sleep(Duration::from_millis(500)).await;
    let state = rig.now();
    assert_eq!(state.error().map(|error| error.failure), Some(SyncFailure::LockTimeout));
    assert!(state.drift.differs && !state.verified);
    sleep(Duration::from_secs(2)).await;
    assert!(rig.now().verified && !rig.now().drift.differs, "sooner than a period");
}

#[tokio::test(start_paused = true)]
async fn drift_under_report_is_reported_and_left() {
    let rig = rig();
    rig.begin().await;
    let mut config = sample();
    config.drift.policy = DriftPolicy::Report;
    rig.config(candidate("default", config)).await;
    sleep(Duration::from_secs(5)).await;
    let writes = rig.writes().len();
    rig.script.lock().unwrap().differences.extend(vec![vec!["KUBE-SERVICES".to_owned()]; 2]);
    sleep(Duration::from_secs(125)).await;
    let state = rig.now();
    assert_eq!((state.drift.foreign_changes, state.drift.repairs, state.drift.differs), (1, 0, true));
    assert_eq!(rig.writes().len(), writes);
    sleep(Duration::from_mins(1)).await;
    assert!(!rig.now().drift.differs);
}

#[tokio::test(start_paused = true)]
async fn the_checkpoint_stands_in_for_the_config_map() {
    let kept = candidate("edge", sample());
    let rig = rig_with(Some(kept.clone()));
    rig.tell(Input::Change(Change::Node(NodeFacts::default()))).await;
    for source in [Source::Services, Source::EndpointSlices, Source::Node] {
        rig.tell(listed(source)).await;
    }
    rig.settle().await;
    let state = rig.now();
    assert_eq!(state.config.active, Some(kept.revision));
    assert_eq!(state.config.assigned, None);
    assert_eq!(rig.writes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn latency_counts_what_happened_while_we_ran() {
    let rig = rig();
    rig.begin().await;
    rig.service("web").await;
    rig.tell(Input::Change(Change::SliceApplied(Box::new(slice("web", Timestamp::now()))))).await;
    sleep(Duration::from_secs(2)).await;
    let latency = rig.now().latency;
    assert_eq!(latency.slowest.first().map(|(name, _)| name.as_str()), Some("shop/web"));
    assert!(latency.p99_milliseconds.is_some());
    assert_eq!(rig.now().endpoints, 1);
}

#[tokio::test(start_paused = true)]
async fn stopping_waits_for_a_write_and_undoes_nothing() {
    let mut rig = rig();
    rig.script.lock().unwrap().takes = Duration::from_secs(2);
    rig.begin().await;
    rig.stop.take().unwrap().send(()).unwrap();
    rig.engine.await.unwrap();
    let script = rig.script.lock().unwrap();
    assert_eq!((script.writes.len(), script.retired), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn what_a_killed_agent_left_elsewhere_is_removed_before_the_node_is_ready() {
    let rig = rig();
    {
        let mut script = rig.script.lock().unwrap();
        (script.leftovers, script.stuck) = (1, 1);
    }
    rig.begin().await;
    assert!(rig.now().config.active.is_none(), "packets may still meet the leftovers");
    sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.script.lock().unwrap().retired, 1, "it tries again");
    assert!(rig.now().config.active.is_some() && rig.now().verified);
}

#[tokio::test(start_paused = true)]
async fn a_node_is_not_ready_before_it_is_known_what_a_killed_agent_has_left() {
    let rig = rig();
    {
        let mut script = rig.script.lock().unwrap();
        (script.leftovers, script.leftovers_unknown) = (1, 1);
    }
    rig.begin().await;
    assert!(rig.now().config.active.is_none() && rig.now().error().is_some(), "there may be leftovers");
    sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.script.lock().unwrap().retired, 1, "it looks again");
    assert!(rig.now().config.active.is_some() && rig.now().verified && rig.now().error().is_none());
}

// ids: CT-6 REG-141371 REG-126130
#[tokio::test(start_paused = true)]
async fn ct_6_flows_of_a_deleted_udp_service_are_ended_after_its_rules_and_tried_again() {
    let rig = rig();
    rig.begin().await;
    rig.service("web").await;
    sleep(Duration::from_secs(2)).await;
    // At start once, whatever there is; then TCP is left alone.
    rig.script.lock().unwrap().flows.clear();
    rig.service("shop").await;
    sleep(Duration::from_secs(2)).await;
    assert!(rig.script.lock().unwrap().flows.is_empty());
    let mut dns = rig::service("dns");
    dns.spec.as_mut().unwrap().ports.as_mut().unwrap()[0].protocol = Some("UDP".to_owned());
    rig.tell(Input::Change(Change::ServiceApplied(Box::new(dns)))).await;
    sleep(Duration::from_secs(2)).await;
    // A new frontend: packets may have gone into the void before its rules were in.
    assert_eq!(rig.script.lock().unwrap().flows, [0]);
    rig.script.lock().unwrap().flows_fail = 1;
    rig.tell(Input::Change(Change::ServiceDeleted(ObjectName::new("shop", "dns")))).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.script.lock().unwrap().flows, [0, 1]);
    sleep(Duration::from_secs(70)).await;
    assert_eq!(rig.script.lock().unwrap().flows, [0, 1, 1], "what failed is due again, and once only");
}

// ids: SYN-3
#[tokio::test(start_paused = true)]
async fn a_deleted_service_is_taken_out_and_counted() {
    let rig = rig();
    rig.begin().await;
    rig.service("web").await;
    sleep(Duration::from_secs(2)).await;
    rig.tell(Input::Change(Change::ServiceDeleted(ObjectName::new("shop", "web")))).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.writes().last().unwrap().services, 0);
    let text = rig.scrape();
    assert!(text.contains("kubeproxy_sync_proxy_rules_service_changes_total 2"), "{text}");
    assert!(text.contains("kubeproxy_sync_proxy_rules_service_changes_pending 0"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn ct_10_settings_follow_the_configuration_live_and_keep_nobody_from_serving() {
    let rig = rig();
    rig.script.lock().unwrap().settings_fail = 1;
    rig.begin().await;
    let state = rig.now();
    assert!(state.config.active.is_some() && state.error().is_none(), "it serves without");
    assert_eq!(state.settings, ["nf_conntrack_max is 1, should be 2"]);
    let text = rig.scrape();
    assert!(text.contains("pointsman_settings_not_applied 1"), "{text}");
    sleep(Duration::from_secs(61)).await;
    assert_eq!(rig.now().settings, Vec::<String>::new(), "tried again with the next look");
    sleep(Duration::from_mins(2)).await;
    assert_eq!(rig.script.lock().unwrap().settings.len(), 2, "and then left alone");
    let mut config = sample();
    config.conntrack.udp_timeout_seconds = 20;
    rig.config(candidate("default", config)).await;
    sleep(Duration::from_secs(2)).await;
    let script = rig.script.lock().unwrap();
    let last = script.settings.last().unwrap();
    assert_eq!(last.conntrack.udp_timeout_seconds, 20);
    assert_eq!((script.settings.len(), script.opened), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn localhost_follows_what_was_written_and_what_is_taken_is_shown_and_tried_again() {
    let rig = rig();
    rig.script.lock().unwrap().taken_ports = vec!["ns/web: in use".to_owned()];
    rig.begin().await;
    assert_eq!(rig.script.lock().unwrap().localhost, [None], "all of it");
    assert_eq!(rig.now().localhost, ["ns/web: in use"]);
    assert!(rig.scrape().contains("pointsman_settings_not_applied 1"));
    rig.service("more").await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.script.lock().unwrap().localhost, [None, Some(1)]);
    rig.script.lock().unwrap().taken_ports.clear();
    sleep(Duration::from_secs(61)).await;
    assert_eq!(rig.now().localhost, Vec::<String>::new());
    sleep(Duration::from_mins(5)).await;
    assert_eq!(rig.script.lock().unwrap().localhost, [None, Some(1), Some(0)], "and then left alone");
}

// ids: CT-6 CT-12
#[tokio::test(start_paused = true)]
async fn ct_6_ct_12_flows_of_a_service_that_went_while_no_agent_ran_are_ended_and_no_others() {
    let dns = |name: &str| {
        let mut dns = rig::service(name);
        dns.spec.as_mut().unwrap().ports.as_mut().unwrap()[0].protocol = Some("UDP".to_owned());
        dns
    };
    let frontend = |service: &k8s_openapi::api::core::v1::Service| {
        let address: std::net::IpAddr =
            service.spec.as_ref().unwrap().cluster_ip.as_ref().unwrap().parse().unwrap();
        let frontend = conntrack::Frontend::new((address, 80).into(), conntrack::Protocol::Udp);
        (IpFamily::IPv4, frontend.into())
    };
    let (kept, gone) = (dns("kept"), dns("gone"));
    let rig = rig();
    rig.script.lock().unwrap().served = vec![frontend(&kept), frontend(&gone)];
    // The write that finds them gets half-way: the next one finds nothing any more.
    rig.script.lock().unwrap().failures.push_back(SyncFailure::RestoreFailed);
    rig.tell(Input::Change(Change::ServiceApplied(Box::new(kept)))).await;
    rig.begin().await;
    assert!(rig.script.lock().unwrap().flows.is_empty(), "not before the rules are in");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.script.lock().unwrap().flows, [1], "the one that is gone");
}

#[tokio::test(start_paused = true)]
async fn syn_17_what_another_proxy_has_left_goes_after_ours_was_read_back() {
    let rig = rig();
    let failed = Err(rig::error(SyncFailure::SyncFailed));
    rig.script.lock().unwrap().takeovers.extend([failed, Ok(false)]);
    rig.begin().await;
    assert!(rig.now().config.active.is_none(), "packets may meet what is left");
    // Foreign changes need not be looked for.
    let mut config = sample();
    config.drift.policy = DriftPolicy::Off;
    rig.config(candidate("default", config)).await;
    sleep(Duration::from_secs(4)).await;
    assert!(rig.now().config.active.is_some(), "what has to wait harms nobody");
    assert_eq!(rig.script.lock().unwrap().taken_over, 2);
    sleep(Duration::from_mins(5)).await;
    assert_eq!(rig.script.lock().unwrap().taken_over, 3, "the next time was the last that was needed");
}
