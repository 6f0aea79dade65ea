//! A sync loop with a kernel that does as it is told.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::jiff::Timestamp;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use serde_json::json;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep};

use crate::config::checkpoint::Checkpoint;
use crate::config::tests::{candidate, sample};
use crate::config::{Assessment, Candidate, Rejection, Tampering};
use crate::conntrack::{Job, Report, Target};
use crate::events::objects::{ObjectNews, Objects};
use crate::health::Pulse;
use crate::healthcheck::Checks;
use crate::kernel::{Counted, Reach, SyncError, SyncFailure, Synced};
use crate::metrics::{Metrics, Scrape};
use crate::model::{Change, NodeFacts};
use crate::plan::{Changes, Plan, PortId};
use crate::state::{Source, SyncState, Watches};
use crate::sync::{Dataplane, Engine, Input, Opened, Outside, Platform, QUEUE};
use crate::sysctl::Settings;

/// What the fake kernel was asked to do.
#[derive(Clone, Debug)]
pub struct Write {
    pub at: Instant,
    pub ports: usize,
    pub services: usize,
    pub masquerade_bit: u8,
    pub ok: bool,
}

/// What the fake kernel does and has done.
#[derive(Default)]
pub struct Script {
    pub writes: Vec<Write>,
    /// The outcomes of the next writes; success when empty.
    pub failures: VecDeque<SyncFailure>,
    /// Everything fails until told otherwise.
    pub broken: Option<SyncFailure>,
    /// Answers of the next reads; no difference when empty.
    pub differences: VecDeque<Vec<String>>,
    pub reads: Vec<Reach>,
    /// When the fake kernel was repaired.
    pub repairs: Vec<Instant>,
    /// Somebody else changes it.
    pub foreign_change: Arc<Notify>,
    /// When the kernel was written or probed.
    pub attempts: Vec<Instant>,
    pub takes: Duration,
    pub opened: usize,
    pub retired: usize,
    /// Frontends that the next write finds in the kernel.
    pub served: Vec<(IpFamily, Target)>,
    /// How many frontends were gone at each run over the flows.
    pub flows: Vec<usize>,
    pub flows_fail: usize,
    /// How often retiring fails from now on.
    pub stuck: usize,
    /// How the next attempts to remove what another proxy has left end, and how many there were.
    pub takeovers: VecDeque<Result<bool, SyncError>>,
    pub taken_over: usize,
    pub takeover_takes: Duration,
    /// How many leftovers there are to be found.
    pub leftovers: usize,
    /// How often that cannot be told from now on.
    pub leftovers_unknown: usize,
    pub refuse: Option<Rejection>,
    /// What the kernel's settings were asked to be, and how often they cannot be had from now on.
    pub settings: Vec<Settings>,
    pub settings_fail: usize,
    /// Those that others have changed.
    pub settings_differ: Vec<String>,
    pub needs_full: bool,
    /// The kernel does not take configurations with this bit.
    pub refused_bit: Option<u8>,
    /// How often NodePorts on localhost were looked after: for all, or for so many Service ports.
    pub localhost: Vec<Option<usize>>,
    /// Those that somebody else has.
    pub taken_ports: Vec<String>,
    /// What the next looks find counted.
    pub dropped: VecDeque<u64>,
    /// What each write finds that cannot be served.
    pub limits: Vec<String>,
    /// What each look finds counted of Service ports.
    pub traffic: Vec<(PortId, Counted)>,
}

pub type Shared = Arc<Mutex<Script>>;

pub struct Fake(Shared);

impl Dataplane for Fake {
    async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let (takes, failure) = {
            let mut script = self.0.lock().unwrap();
            let failure = script.failures.pop_front().or(script.broken);
            let bit = plan.config().masquerade.bit;
            let failure = failure.or((script.refused_bit == Some(bit)).then_some(SyncFailure::RestoreFailed));
            script.attempts.push(Instant::now());
            script.writes.push(Write {
                at: Instant::now(),
                ports: changes.ports.len(),
                services: plan.services(),
                masquerade_bit: bit,
                ok: failure.is_none(),
            });
            (script.takes, failure)
        };
        sleep(takes).await;
        let mut script = self.0.lock().unwrap();
        let served = std::mem::take(&mut script.served);
        if let Some(failure) = failure {
            script.needs_full = true;
            return (Synced { served, ..Synced::default() }, vec![error(failure)]);
        }
        let full = std::mem::take(&mut script.needs_full);
        let rules = BTreeMap::from([((IpFamily::IPv4, "nat"), plan.services())]);
        let limits = script.limits.clone();
        (Synced { full, rules, served, limits, ..Synced::default() }, Vec::new())
    }

    async fn changed(&mut self) {
        let notify = Arc::clone(&self.0.lock().unwrap().foreign_change);
        notify.notified().await;
    }

    async fn verify(&mut self, _: &Plan, reach: Reach) -> Result<Vec<String>, SyncError> {
        let mut script = self.0.lock().unwrap();
        script.reads.push(reach);
        if let Some(failure) = script.broken {
            return Err(error(failure));
        }
        Ok(script.differences.pop_front().unwrap_or_default())
    }

    async fn traffic(&mut self) -> Option<Vec<(PortId, Counted)>> {
        Some(self.0.lock().unwrap().traffic.clone())
    }

    async fn invalid_dropped(&mut self) -> BTreeMap<IpFamily, u64> {
        let mut script = self.0.lock().unwrap();
        script.dropped.pop_front().map(|packets| (IpFamily::IPv4, packets)).into_iter().collect()
    }

    async fn repair(&mut self, _: &Plan) -> Vec<SyncError> {
        let mut script = self.0.lock().unwrap();
        let failure = script.failures.pop_front().or(script.broken);
        script.repairs.push(Instant::now());
        failure.map(error).into_iter().collect()
    }

    async fn probe(&mut self, _: &Plan) -> Result<(), SyncError> {
        let mut script = self.0.lock().unwrap();
        script.attempts.push(Instant::now());
        script.broken.map_or(Ok(()), |failure| Err(error(failure)))
    }
}

pub struct FakePlatform(Shared);

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

    async fn leftovers(&mut self, _: &Fake) -> Result<Vec<Fake>, SyncError> {
        let mut script = self.0.lock().unwrap();
        if script.leftovers_unknown > 0 {
            script.leftovers_unknown -= 1;
            return Err(error(SyncFailure::SyncFailed));
        }
        let left = std::mem::take(&mut script.leftovers);
        Ok((0..left).map(|_| Fake(Arc::clone(&self.0))).collect())
    }

    async fn retire(&mut self, _: &Fake, _: &Fake) -> Result<(), SyncError> {
        let mut script = self.0.lock().unwrap();
        if script.stuck > 0 {
            script.stuck -= 1;
            return Err(error(SyncFailure::LockTimeout));
        }
        script.retired += 1;
        Ok(())
    }

    async fn take_over(&mut self, _: &Fake, _: &Plan) -> Result<bool, SyncError> {
        let takes = self.0.lock().unwrap().takeover_takes;
        sleep(takes).await;
        let mut script = self.0.lock().unwrap();
        script.taken_over += 1;
        script.takeovers.pop_front().unwrap_or(Ok(true))
    }

    async fn adjust(&mut self, settings: &Settings) -> Vec<String> {
        let mut script = self.0.lock().unwrap();
        script.settings.push(*settings);
        script.settings_differ.clear();
        if script.settings_fail == 0 {
            return Vec::new();
        }
        script.settings_fail -= 1;
        vec!["nf_conntrack_max is 1, should be 2".to_owned()]
    }

    fn differing(&self, _: &Settings) -> Vec<String> {
        self.0.lock().unwrap().settings_differ.clone()
    }

    fn serve_localhost(&mut self, _: &Plan, changes: Option<&Changes>) -> Vec<String> {
        let mut script = self.0.lock().unwrap();
        script.localhost.push(changes.map(|changes| changes.ports.len()));
        script.taken_ports.clone()
    }

    fn resting(&self) -> Vec<String> {
        Vec::new()
    }

    async fn stand_in(&mut self, _: &Fake) -> Option<Fake> {
        None
    }

    async fn stop(&mut self, _: Option<&mut Fake>) {}

    async fn end_stale_flows(&mut self, job: &Job) -> Result<Report, String> {
        let mut script = self.0.lock().unwrap();
        script.flows.push(job.serving.removed_frontends.len());
        if script.flows_fail > 0 {
            script.flows_fail -= 1;
            return Err("as told".to_owned());
        }
        Ok(Report::new(job.family))
    }
}

pub fn error(failure: SyncFailure) -> SyncError {
    SyncError { family: IpFamily::IPv4, failure, message: "as told".to_owned() }
}

/// A running loop.
pub struct Rig {
    pub script: Shared,
    pub inputs: mpsc::Sender<Input>,
    pub state: watch::Receiver<SyncState>,
    pub metrics: Arc<Metrics>,
    pub stop: Option<oneshot::Sender<()>>,
    pub engine: tokio::task::JoinHandle<()>,
    pub _disk: tempfile::TempDir,
    pub checkpoint: Checkpoint,
    pub checks: Checks,
    pub news: mpsc::Receiver<ObjectNews>,
}

pub fn rig_with(checkpointed: Option<Candidate>) -> Rig {
    let disk = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::new(disk.path());
    let script = Shared::default();
    let (state, receiver) = watch::channel(SyncState::new(Timestamp::UNIX_EPOCH));
    let metrics = Arc::new(Metrics::default());
    let checks = Checks::default();
    let (objects, news) = Objects::channel();
    let outside = Outside {
        state,
        metrics: Arc::clone(&metrics),
        pulse: Arc::new(Pulse::default()),
        checkpoint: Some(checkpoint.clone()),
        checks: checks.clone(),
        objects,
    };
    let (inputs, queue) = mpsc::channel(QUEUE);
    let (stop, stopped) = oneshot::channel();
    let engine = Engine::new(FakePlatform(Arc::clone(&script)), outside, checkpointed);
    let engine = tokio::spawn(engine.run(queue, stopped));
    let stop = Some(stop);
    Rig { script, inputs, state: receiver, metrics, stop, engine, _disk: disk, checkpoint, checks, news }
}

pub fn rig() -> Rig {
    rig_with(None)
}

impl Rig {
    pub async fn tell(&self, input: Input) {
        self.inputs.send(input).await.unwrap();
    }

    pub async fn config(&self, candidate: Candidate) {
        self.assess(Some(candidate.revision.clone()), Ok(candidate)).await;
    }

    pub async fn assess(&self, assigned: Option<String>, outcome: Result<Candidate, Rejection>) {
        let assessment = Assessment { assigned, outcome, tampering: Tampering::None };
        self.tell(Input::Config(Box::new(assessment))).await;
        self.tell(Input::Listed(Source::NodeConfig)).await;
    }

    pub async fn service(&self, name: &str) {
        self.tell(Input::Change(Change::ServiceApplied(Box::new(service(name))))).await;
    }

    /// Everything that is needed, so that the loop writes.
    pub async fn begin(&self) {
        self.tell(Input::Change(Change::Node(NodeFacts::default()))).await;
        for source in [Source::Services, Source::EndpointSlices, Source::Node] {
            self.tell(listed(source)).await;
        }
        self.config(candidate("default", sample())).await;
        self.settle().await;
    }

    /// Lets everything happen that is due now.
    pub async fn settle(&self) {
        sleep(Duration::from_millis(1)).await;
    }

    pub fn writes(&self) -> Vec<Write> {
        self.script.lock().unwrap().writes.clone()
    }

    /// What the metrics say.
    pub fn scrape(&self) -> String {
        self.metrics.render(Scrape {
            state: &self.now(),
            watches: &Watches::default(),
            checks: &self.checks,
            ready: true,
            instant: Instant::now(),
        })
    }

    pub fn now(&self) -> SyncState {
        self.state.borrow().clone()
    }
}

/// A complete list, of the Services that have no other proxy.
pub fn listed(source: Source) -> Input {
    match source {
        Source::Services => Input::ServicesListed(String::new()),
        source => Input::Listed(source),
    }
}

pub fn service(name: &str) -> Service {
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

pub fn slice(service: &str, caused: Timestamp) -> EndpointSlice {
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
