//! The loop itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{IpFamilyPolicy, IptablesBackend, IpvsScheduler, Mode};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{error, info, warn};

use super::flows::Flows;
use super::latency::Latency;
use super::schedule::Schedule;
use super::trial::Trial;
use super::{Dataplane, Input, Opened, Platform};
use crate::config::checkpoint::Checkpoint;
use crate::config::{Assessment, Candidate};
use crate::events::objects::{ObjectNews, Objects};
use crate::health::Pulse;
use crate::healthcheck::Checks;
use crate::kernel::SyncFailure;
use crate::metrics::{Changed, Metrics};
use crate::model::{Change, Dirty, Model, NodeFacts, ObjectName, family_of};
use crate::plan::{Changes, Plan};
use crate::state::{Compatibility, Source, SyncState};
use crate::sysctl::Settings;

/// A node that cannot run its configuration is asked again after this: tools may be installed, modules loaded.
const REOPEN: Duration = Duration::from_secs(30);
/// How many inputs are taken in between two looks at the clock.
const BATCH: usize = 256;

/// What the loop shows to the outside.
#[derive(Clone)]
pub struct Outside {
    /// Where the snapshot goes.
    pub state: watch::Sender<SyncState>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Shows that the loop turns.
    pub pulse: Arc<Pulse>,
    /// Where the configuration in force is kept for the next start.
    pub checkpoint: Option<Checkpoint>,
    /// Who answers load balancers.
    pub checks: Checks,
    /// Where owners of objects are told what is not served.
    pub objects: Objects,
}

/// What decides how a node is opened. When it changes, the node is opened again.
#[derive(Clone, Debug, PartialEq)]
struct Setup {
    mode: Mode,
    fallback_modes: Vec<Mode>,
    policy: IpFamilyPolicy,
    backend: IptablesBackend,
    /// If mode ipvs may be chosen: the kernel may lack it.
    scheduler: Option<IpvsScheduler>,
    families: Vec<IpFamily>,
}

impl Setup {
    fn of(config: &NodeProxyConfiguration, node: &NodeFacts) -> Self {
        let mut families = Vec::new();
        for family in node.addresses.iter().map(|address| family_of(*address)) {
            if !families.contains(&family) {
                families.push(family);
            }
        }
        let may_be_ipvs = config.mode == Mode::Ipvs || config.fallback_modes.contains(&Mode::Ipvs);
        Self {
            mode: config.mode,
            fallback_modes: config.fallback_modes.clone(),
            policy: config.ip_family_policy,
            backend: config.iptables.backend,
            scheduler: may_be_ipvs.then_some(config.ipvs.scheduler),
            families,
        }
    }
}

/// What is being programmed.
pub(super) struct Running<D> {
    setup: Setup,
    compatibility: Compatibility,
    /// The configuration that the plan follows. Not the assigned one, if this node cannot run that.
    pub(super) candidate: Candidate,
    pub(super) dataplane: D,
    pub(super) plan: Plan,
    /// Written by an earlier set-up, removed when this one has been read back.
    pub(super) retiring: Vec<D>,
    /// Whether what an earlier process has left is among them.
    pub(super) leftovers_known: bool,
    /// Whether nothing of another proxy is left to be removed.
    pub(super) taken_over: bool,
}

/// The sync loop.
pub struct Engine<P: Platform> {
    pub(super) platform: P,
    pub(super) outside: Outside,
    pub(super) state: SyncState,
    pub(super) model: Model,
    pub(super) schedule: Schedule,
    pub(super) latency: Latency,
    pub(super) running: Option<Running<P::Dataplane>>,
    /// The kernel's settings, as they were asked for last.
    pub(super) settings: Option<Settings>,
    /// What the kernel counted when it was last read.
    pub(super) invalid_dropped: BTreeMap<IpFamily, u64>,
    /// UDP and SCTP flows, as of the last write.
    pub(super) flows: Flows,
    /// The configuration to have in the kernel.
    target: Option<Candidate>,
    /// The proxy name of the Services in the model.
    services: Option<String>,
    /// Whether the kernel takes it.
    pub(super) trial: Trial,
    /// Changes of the plan that the kernel does not hold yet.
    pub(super) pending: Changes,
    /// Whether the plan has been made from the complete lists.
    planned: bool,
    /// Whether something must be written although no change is pending.
    pub(super) must_write: bool,
    /// When to ask again whether the node can run its configuration.
    reopen: Option<Instant>,
}

impl<P: Platform> Engine<P> {
    /// A loop that has heard nothing yet. `checkpoint` is the configuration that was in force when the agent last ran.
    pub fn new(platform: P, outside: Outside, checkpoint: Option<Candidate>) -> Self {
        let state = outside.state.borrow().clone();
        let mut engine = Self {
            platform,
            outside,
            latency: Latency::new(state.started),
            state,
            model: Model::new(),
            schedule: Schedule::default(),
            running: None,
            settings: None,
            invalid_dropped: BTreeMap::new(),
            flows: Flows::default(),
            target: None,
            services: None,
            trial: Trial::new(checkpoint.clone()),
            pending: Changes::default(),
            planned: false,
            must_write: false,
            reopen: None,
        };
        if let Some(candidate) = checkpoint {
            info!(revision = candidate.revision, "starting with the configuration on this node's disk");
            engine.state.config.last_known_good = Some(candidate.revision.clone());
            engine.listed(Source::NodeConfig);
            engine.aim(candidate);
        }
        // The watches begin with it.
        engine.publish();
        engine
    }

    /// Runs until `stop` or until nobody can tell it anything any more. Leaves the kernel as it is, or as it has to be without an agent.
    pub async fn run(mut self, mut inputs: mpsc::Receiver<Input>, mut stop: oneshot::Receiver<()>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            self.publish();
            self.outside.pulse.beat(false);
            let wake = self.due().min(Instant::now() + Pulse::INTERVAL);
            tokio::select! {
                // Stopping comes first, then what is overdue; otherwise a busy cluster would keep the kernel waiting.
                biased;
                _ = &mut stop => {
                    self.stop().await;
                    return;
                }
                () = sleep_until(wake) => self.turn().await,
                () = self.foreign_change() => self.schedule.noticed(),
                received = inputs.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        return;
                    }
                    for input in batch.drain(..) {
                        self.take(input);
                    }
                }
            }
        }
    }

    /// Waits for somebody else to change what is ours, if that is to be looked at.
    async fn foreign_change(&mut self) {
        match self.running.as_mut().filter(|_| self.planned && self.schedule.looks()) {
            Some(running) => running.dataplane.changed().await,
            None => std::future::pending().await,
        }
    }

    /// The moment at which there is something to do.
    fn due(&self) -> Instant {
        let far = Instant::now() + Pulse::INTERVAL;
        if !self.complete() {
            return far;
        }
        let open = match &self.running {
            _ if self.wants_open() => Some(self.reopen.unwrap_or_else(Instant::now)),
            _ => None,
        };
        let write = self.planned.then(|| self.schedule.write(self.wants_write())).flatten();
        let (probe, look) = if self.planned && !self.wants_write() {
            (self.schedule.probe(), self.schedule.look())
        } else {
            (None, None)
        };
        [open, write, probe, look].into_iter().flatten().min().unwrap_or(far)
    }

    /// Does what is due.
    async fn turn(&mut self) {
        if !self.complete() {
            return;
        }
        let now = Instant::now();
        if self.wants_open() && self.reopen.is_none_or(|at| at <= now) {
            self.open().await;
            self.publish();
        }
        if !self.planned {
            return;
        }
        if self.schedule.write(self.wants_write()).is_some_and(|at| at <= now) {
            self.write().await;
        } else if self.wants_write() {
            // The write comes first, and is the better probe.
        } else if self.schedule.look().is_some_and(|at| at <= now) {
            self.look().await;
        } else if self.schedule.probe().is_some_and(|at| at <= now) {
            let _ = self.probe().await;
        }
    }

    /// Whether all lists are in. Nothing is written before.
    fn complete(&self) -> bool {
        self.state.waiting.is_empty() && self.target.is_some()
    }

    fn wants_open(&self) -> bool {
        let Some(target) = &self.target else { return false };
        let setup = Setup::of(&target.config, self.model.node());
        let name = Some(&target.config.service_proxy_name);
        // It can be opened, and its Services are on their way.
        let listing = self.state.config.service_proxy_name.as_ref() == name && self.services.as_ref() != name;
        let running = self.running.as_ref().map(|running| &running.setup);
        !listing && (running != Some(&setup) || self.reopen.is_some())
    }

    fn wants_write(&self) -> bool {
        self.must_write || !self.pending.is_empty()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Change(change) => self.change(change),
            Input::Listed(source) => self.listed(source),
            Input::ServicesListed(proxy_name) => self.services_listed(proxy_name),
            Input::Config(assessment) => self.judged(*assessment),
        }
    }

    fn listed(&mut self, source: Source) {
        self.state.waiting.retain(|waiting| *waiting != source);
    }

    fn services_listed(&mut self, proxy_name: String) {
        if self.target.is_none() {
            self.listed(Source::Services);
        }
        if self.services.as_ref() == Some(&proxy_name) {
            return;
        }
        self.services = Some(proxy_name);
        self.configure();
        if self.follows() {
            self.update_plan(Dirty { everything: true, ..Dirty::default() });
        }
    }

    /// Asks for the Services that `config` is about. Returns whether they are all in.
    fn ask_for_services(&mut self, config: &NodeProxyConfiguration) -> bool {
        let name = Some(&config.service_proxy_name);
        self.state.config.service_proxy_name = name.cloned();
        let listed = self.services.as_ref() == name;
        self.listed(Source::Services);
        if !listed && !self.planned {
            self.state.waiting.insert(0, Source::Services);
        }
        listed
    }

    /// Whether the plan follows the model. Not while the model holds the Services of another proxy name.
    fn follows(&self) -> bool {
        let name = self.running.as_ref().map(|running| &running.candidate.config.service_proxy_name);
        self.planned && self.services.as_ref() == name
    }

    fn change(&mut self, change: Change) {
        let kind = match &change {
            Change::ServiceApplied(_) | Change::ServiceDeleted(_) => Some(Changed::Service),
            Change::SliceApplied(_) | Change::SliceDeleted(_) => Some(Changed::Endpoints),
            Change::Node(_) | Change::ServiceCidrs(_) | Change::LocalAddresses(_) => None,
        };
        let mut dirty = self.model.apply(change);
        for skipped in std::mem::take(&mut dirty.skipped) {
            warn!(object = %skipped.name, kind = skipped.kind, "skipped: {}", skipped.reason);
            self.state.skipped += 1;
            self.outside.objects.tell(ObjectNews::skipped(skipped, "NotServed"));
        }
        if dirty.is_empty() {
            return;
        }
        if let Some(kind) = kind {
            self.outside.metrics.changed(kind);
        }
        if self.follows() {
            self.update_plan(dirty);
        }
    }

    fn update_plan(&mut self, dirty: Dirty) {
        let Some(running) = &mut self.running else { return };
        let changes = running.plan.update(&self.model, dirty);
        self.queue(changes);
    }

    /// Notes what the kernel does not hold yet, and tells what it will never hold.
    fn queue(&mut self, mut changes: Changes) {
        for lost in std::mem::take(&mut changes.conflicts) {
            warn!(service = %lost.name, "{}", lost.reason);
            self.outside.objects.tell(ObjectNews::skipped(lost, "FrontendConflict"));
        }
        self.count();
        self.pending.health_checks.append(&mut changes.health_checks);
        if !changes.is_empty() {
            let now = Instant::now();
            for family in self.state.families.values_mut() {
                family.oldest_queued.get_or_insert(now);
            }
            self.outside.metrics.queued(&self.state.family_order);
            self.pending.merge(changes);
        }
        if !self.wants_write() {
            let checked = std::mem::take(&mut self.pending.health_checks);
            self.answer_health_checks(checked);
        }
    }

    /// Lets load balancers know what the kernel holds.
    pub(super) fn answer_health_checks(&self, changed: BTreeSet<ObjectName>) {
        let Some(running) = &self.running else { return };
        self.outside.checks.change(changed.into_iter().map(|name| {
            let check = running.plan.health_check(&name).cloned();
            (name, check)
        }));
    }

    fn count(&mut self) {
        if let Some(running) = &self.running {
            let plan = &running.plan;
            self.state.services = plan.services();
            self.state.endpoints = plan.endpoints();
            self.state.conflicts = plan.conflicts();
            let no_local = |family: &IpFamily| (*family, plan.no_local(*family));
            self.state.no_local = plan.families().iter().map(no_local).collect();
        }
    }

    /// The node's ConfigMap was judged.
    fn judged(&mut self, assessment: Assessment) {
        let config = &mut self.state.config;
        config.assigned.clone_from(&assessment.assigned);
        config.tampering = assessment.tampering;
        config.assigned_hash = None;
        self.reopen = None;
        match assessment.outcome {
            Ok(candidate) => {
                config.assigned_hash = Some(candidate.hash.clone());
                // Says so again if the ConfigMap was something else in between.
                let refusal = self.trial.refusal(&candidate).cloned();
                config.rejected = refusal.map(|refusal| (Some(candidate.revision.clone()), refusal));
                if config.rejected.is_some() {
                    return;
                }
                let runs = self.target.as_ref() == Some(&candidate);
                // Also if it is the one that was gone back to: from now on the one that was given up is another.
                if !runs || self.trial.has_refused() {
                    self.trial.begin();
                }
                if !runs {
                    info!(
                        revision = candidate.revision,
                        hash = candidate.hash,
                        "a configuration is assigned"
                    );
                    self.aim(candidate);
                }
            }
            Err(rejection) => {
                warn!(
                    revision = assessment.assigned.as_deref().unwrap_or("none"),
                    reason = rejection.reason,
                    in_force = config.active.as_deref().unwrap_or("nothing"),
                    "the assigned configuration is refused and the one in force kept: {}",
                    rejection.message
                );
                config.rejected = Some((assessment.assigned, rejection));
            }
        }
    }

    /// Goes back to the last known good configuration, if the one in force was not written for a reason that may be its own.
    pub(super) fn reconsider(&mut self, failure: SyncFailure) {
        // While the target is another, it is already on its way.
        let running =
            self.running.as_ref().filter(|running| self.target.as_ref() == Some(&running.candidate));
        let Some(running) = running else { return };
        let why = self.state.error().map(ToString::to_string).unwrap_or_default();
        let Some(next) = self.trial.failed(&running.candidate, failure, &why) else { return };
        let given_up = &running.candidate;
        if let Some(refusal) = self.trial.refusal(given_up) {
            error!(revision = given_up.revision, "{}", refusal.message);
            self.state.config.rejected = Some((Some(given_up.revision.clone()), refusal.clone()));
        } else {
            warn!(
                revision = next.revision,
                "the last known good configuration is not written either; trying this one again"
            );
            self.state.config.rejected = None;
        }
        self.aim(next);
    }

    /// Makes `candidate` what the kernel is to hold.
    fn aim(&mut self, candidate: Candidate) {
        self.target = Some(candidate);
        self.configure();
    }

    /// Lets the plan follow the target, if it runs in the set-up that the target needs. Otherwise [`Self::open`] will. Until the
    /// Services that the target is about are all in, what runs goes on: half a list would take away the other half.
    fn configure(&mut self) {
        let Some(target) = self.target.clone() else { return };
        let setup = Setup::of(&target.config, self.model.node());
        let other_setup = self.running.as_ref().is_some_and(|running| running.setup != setup);
        if other_setup || !self.ask_for_services(&target.config) {
            return;
        }
        let Some(running) = &mut self.running else { return };
        self.schedule.configure(&target.config);
        self.state.config.in_force = Some(Arc::new(target.config.clone()));
        self.state.compatibility = running.compatibility.clone();
        let changes = running.plan.configure(target.config.clone(), &self.model);
        running.candidate = target;
        // Also without a change in the plan: only what has been read back is active.
        self.must_write = true;
        self.queue(changes);
    }

    /// Opens the node as the target wants it. What runs goes on running until then, and if it cannot be.
    async fn open(&mut self) {
        let Some(target) = self.target.clone() else { return };
        let setup = Setup::of(&target.config, self.model.node());
        match self.platform.open(&target.config, self.model.node()).await {
            Ok(opened) => {
                self.reopen = None;
                if self.ask_for_services(&target.config) {
                    self.start(opened, setup, &target);
                }
            }
            Err(rejection) => {
                if self.state.compatibility != Compatibility::Incompatible(rejection.clone()) {
                    error!(
                        revision = target.revision,
                        reason = rejection.reason,
                        "this node cannot run its configuration: {}",
                        rejection.message
                    );
                }
                self.state.compatibility = Compatibility::Incompatible(rejection.clone());
                self.state.config.rejected = Some((Some(target.revision), rejection));
                self.reopen = Some(Instant::now() + REOPEN);
                if let Some(running) = self.running.as_ref().map(|running| running.candidate.config.clone()) {
                    self.ask_for_services(&running);
                }
            }
        }
    }

    fn start(&mut self, opened: Opened<P::Dataplane>, setup: Setup, target: &Candidate) {
        info!(mode = %opened.mode, families = ?opened.families, "programming this node");
        let compatibility = opened.fallback.map_or(Compatibility::Supported, Compatibility::Fallback);
        self.state.compatibility = compatibility.clone();
        if self
            .state
            .config
            .rejected
            .as_ref()
            .is_some_and(|(revision, _)| *revision == Some(target.revision.clone()))
        {
            self.state.config.rejected = None;
        }
        self.state.mode = Some(opened.mode);
        self.state.family_order.clone_from(&opened.families);
        self.state.iptables_version = opened.iptables_version;
        self.state.families = opened
            .families
            .iter()
            .map(|family| (*family, self.state.families.remove(family).unwrap_or_default()))
            .collect();
        self.state.verified = false;
        self.state.config.in_force = Some(Arc::new(target.config.clone()));
        self.schedule.configure(&target.config);

        let mut plan = Plan::new(target.config.clone(), &opened.families);
        let everything = Dirty { everything: true, ..Dirty::default() };
        let changes = plan.update(&self.model, everything);
        let mut retiring = Vec::new();
        // The new plan knows no health check that is gone.
        let mut checked = std::mem::take(&mut self.pending.health_checks);
        if let Some(before) = self.running.take() {
            checked.extend(before.plan.health_checked().cloned());
            retiring.extend(before.retiring);
            retiring.push(before.dataplane);
        }
        self.running = Some(Running {
            setup,
            compatibility,
            candidate: target.clone(),
            dataplane: opened.dataplane,
            plan,
            retiring,
            leftovers_known: false,
            taken_over: false,
        });
        self.pending = Changes { health_checks: checked, ..Changes::default() };
        self.flows.replaced();
        self.planned = true;
        self.must_write = true;
        self.queue(changes);
    }

    fn publish(&mut self) {
        self.state.resting = self.platform.resting();
        self.outside.state.send_replace(self.state.clone());
    }
}
