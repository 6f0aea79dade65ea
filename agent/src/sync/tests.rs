//! The loop against a kernel that fails on cue, in paused time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::jiff::Timestamp;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{DriftPolicy, Mode};
use serde_json::json;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep};

use super::*;
use crate::config::checkpoint::Checkpoint;
use crate::config::tests::{candidate, sample};
use crate::config::{Candidate, Tampering};
use crate::health::Pulse;
use crate::kernel::SyncFailure;
use crate::metrics::Metrics;
use crate::model::ObjectName;
use crate::state::{Compatibility, SyncState};

/// What the fake kernel was asked to do.
#[derive(Clone, Debug)]
struct Write {
    at: Instant,
    ports: usize,
    services: usize,
    masquerade_bit: u8,
    ok: bool,
}

/// What the fake kernel does and has done.
#[derive(Default)]
struct Script {
    writes: Vec<Write>,
    /// The outcomes of the next writes; success when empty.
    failures: VecDeque<SyncFailure>,
    /// Everything fails until told otherwise.
    broken: Option<SyncFailure>,
    /// Answers of the next reads; no difference when empty.
    differences: VecDeque<Vec<String>>,
    reads: usize,
    /// When the kernel was written or probed.
    attempts: Vec<Instant>,
    takes: Duration,
    opened: usize,
    retired: usize,
    refuse: Option<Rejection>,
    needs_full: bool,
}

type Shared = Arc<Mutex<Script>>;

struct Fake(Shared);

impl Dataplane for Fake {
    async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let (takes, failure) = {
            let mut script = self.0.lock().unwrap();
            let failure = script.failures.pop_front().or(script.broken);
            script.attempts.push(Instant::now());
            script.writes.push(Write {
                at: Instant::now(),
                ports: changes.ports.len(),
                services: plan.services(),
                masquerade_bit: plan.config().masquerade.bit,
                ok: failure.is_none(),
            });
            (script.takes, failure)
        };
        sleep(takes).await;
        let mut script = self.0.lock().unwrap();
        if let Some(failure) = failure {
            script.needs_full = true;
            return (Synced::default(), vec![error(failure)]);
        }
        let full = std::mem::take(&mut script.needs_full);
        let rules = BTreeMap::from([((IpFamily::IPv4, "nat"), plan.services())]);
        (Synced { full, rules, ..Synced::default() }, Vec::new())
    }

    async fn verify(&mut self, _: &Plan) -> Result<Vec<String>, SyncError> {
        let mut script = self.0.lock().unwrap();
        script.reads += 1;
        if let Some(failure) = script.broken {
            return Err(error(failure));
        }
        Ok(script.differences.pop_front().unwrap_or_default())
    }

    fn distrust(&mut self) {
        self.0.lock().unwrap().needs_full = true;
    }

    async fn probe(&mut self, _: &Plan) -> Result<(), SyncError> {
        let mut script = self.0.lock().unwrap();
        script.attempts.push(Instant::now());
        script.broken.map_or(Ok(()), |failure| Err(error(failure)))
    }
}

struct FakePlatform(Shared);

impl Platform for FakePlatform {
    type Dataplane = Fake;

    async fn open(
        &mut self,
        config: &NodeProxyConfiguration,
        _: &NodeFacts,
    ) -> Result<Opened<Fake>, Rejection> {
        let mut script = self.0.lock().unwrap();
        script.opened += 1;
        script.needs_full = true;
        if let Some(rejection) = script.refuse.clone() {
            return Err(rejection);
        }
        Ok(Opened {
            dataplane: Fake(Arc::clone(&self.0)),
            mode: config.mode,
            fallback: None,
            families: vec![IpFamily::IPv4],
            iptables_version: Some("v1.8.9 (nf_tables)".to_owned()),
        })
    }

    async fn retire(&mut self, _: Fake, _: &Fake) {
        self.0.lock().unwrap().retired += 1;
    }
}

fn error(failure: SyncFailure) -> SyncError {
    SyncError { family: IpFamily::IPv4, failure, message: "as told".to_owned() }
}

/// A running loop.
struct Rig {
    script: Shared,
    inputs: mpsc::Sender<Input>,
    state: watch::Receiver<SyncState>,
    metrics: Arc<Metrics>,
    stop: Option<oneshot::Sender<()>>,
    engine: tokio::task::JoinHandle<()>,
    _disk: tempfile::TempDir,
    checkpoint: Checkpoint,
}

fn rig_with(checkpointed: Option<Candidate>) -> Rig {
    let disk = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::new(disk.path());
    let script = Shared::default();
    let (state, receiver) = watch::channel(SyncState::new(Timestamp::UNIX_EPOCH));
    let metrics = Arc::new(Metrics::default());
    let outside = Outside {
        state,
        metrics: Arc::clone(&metrics),
        pulse: Arc::new(Pulse::default()),
        checkpoint: Some(checkpoint.clone()),
    };
    let (inputs, queue) = mpsc::channel(QUEUE);
    let (stop, stopped) = oneshot::channel();
    let engine = Engine::new(FakePlatform(Arc::clone(&script)), outside, checkpointed);
    let engine = tokio::spawn(engine.run(queue, stopped));
    Rig { script, inputs, state: receiver, metrics, stop: Some(stop), engine, _disk: disk, checkpoint }
}

fn rig() -> Rig {
    rig_with(None)
}

impl Rig {
    async fn tell(&self, input: Input) {
        self.inputs.send(input).await.unwrap();
    }

    async fn config(&self, candidate: Candidate) {
        self.assess(Some(candidate.revision.clone()), Ok(candidate)).await;
    }

    async fn assess(&self, assigned: Option<String>, outcome: Result<Candidate, Rejection>) {
        let assessment = Assessment { assigned, outcome, tampering: Tampering::None };
        self.tell(Input::Config(Box::new(assessment))).await;
        self.tell(Input::Listed(Source::NodeConfig)).await;
    }

    async fn service(&self, name: &str) {
        self.tell(Input::Change(Change::ServiceApplied(Box::new(service(name))))).await;
    }

    /// Everything that is needed, so that the loop writes.
    async fn begin(&self) {
        self.tell(Input::Change(Change::Node(NodeFacts::default()))).await;
        for source in [Source::Services, Source::EndpointSlices, Source::Node] {
            self.tell(Input::Listed(source)).await;
        }
        self.config(candidate("default", sample())).await;
        self.settle().await;
    }

    /// Lets everything happen that is due now.
    async fn settle(&self) {
        sleep(Duration::from_millis(1)).await;
    }

    fn writes(&self) -> Vec<Write> {
        self.script.lock().unwrap().writes.clone()
    }

    fn now(&self) -> SyncState {
        self.state.borrow().clone()
    }
}

fn service(name: &str) -> Service {
    let last = name.bytes().map(u32::from).sum::<u32>() % 250 + 1;
    serde_json::from_value(json!({
        "metadata": {"namespace": "shop", "name": name},
        "spec": {
            "type": "ClusterIP", "clusterIP": format!("10.96.0.{last}"),
            "clusterIPs": [format!("10.96.0.{last}")],
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}],
        },
    }))
    .unwrap()
}

fn slice(service: &str, caused: Timestamp) -> EndpointSlice {
    serde_json::from_value(json!({
        "metadata": {
            "namespace": "shop", "name": format!("{service}-x"),
            "labels": {"kubernetes.io/service-name": service},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": caused.to_string()},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": true}}],
    }))
    .unwrap()
}

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
        rig.tell(Input::Listed(source)).await;
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
    sleep(Duration::from_secs(60)).await;
    assert!(rig.now().error().is_some(), "with nothing to write, no write can succeed");
    assert_eq!(rig.writes().len(), writes);
    rig.script.lock().unwrap().broken = None;
    sleep(Duration::from_secs(30)).await;
    assert!(rig.now().error().is_none());
    assert!(rig.now().verified);
}

#[tokio::test(start_paused = true)]
async fn a_new_configuration_is_active_only_when_it_was_read_back() {
    let rig = rig();
    rig.begin().await;
    let old = rig.now().config.active.unwrap();
    let mut config = sample();
    config.masquerade.bit = 15;
    let new = candidate("default", config);
    rig.script.lock().unwrap().differences.push_back(vec!["KUBE-POSTROUTING".to_owned()]);
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
async fn syn_10_drift_is_repaired_and_counted() {
    let rig = rig();
    rig.begin().await;
    let reads = rig.script.lock().unwrap().reads;
    rig.script.lock().unwrap().differences.push_back(vec!["KUBE-SERVICES".to_owned()]);
    sleep(Duration::from_secs(61)).await;
    let state = rig.now();
    assert_eq!((state.drift.foreign_changes, state.drift.repairs), (1, 1));
    assert!(!state.drift.differs && state.verified);
    assert_eq!(state.drift.last_diff.as_deref(), Some("KUBE-SERVICES"));
    assert_eq!(
        rig.script.lock().unwrap().reads,
        reads + 2,
        "once to find it, once to see that it is repaired"
    );
    assert_eq!(rig.writes().len(), 2);
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
        rig.tell(Input::Listed(source)).await;
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
async fn a_deleted_service_is_taken_out_and_counted() {
    let rig = rig();
    rig.begin().await;
    rig.service("web").await;
    sleep(Duration::from_secs(2)).await;
    rig.tell(Input::Change(Change::ServiceDeleted(ObjectName::new("shop", "web")))).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.writes().last().unwrap().services, 0);
    let text = rig.metrics.render(&rig.now(), &crate::state::Watches::default(), true, Instant::now());
    assert!(text.contains("kubeproxy_sync_proxy_rules_service_changes_total 2"), "{text}");
    assert!(text.contains("kubeproxy_sync_proxy_rules_service_changes_pending 0"), "{text}");
}
