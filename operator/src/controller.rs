//! The loop that keeps the cluster as it should be.
//!
//! In: the caches. Out: one pass after another: decide, write, tell. A pass looks at everything, because merging is a
//! matter of all layers at once; with shared assignments and compact records that is cheap.
//!
//! Standby replicas turn too, to see which agents are silent, but write nothing. When the lease is lost a pass is
//! dropped where it stands: whatever it had left is what the next leader finds to do.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Resource, ResourceExt};
use pointsman_crds::{ProxyConfiguration, ProxyNodeStatus};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{error, info, warn};

use crate::apply::{Object, Writer};
use crate::context::Context;
use crate::decide::{self, NodeWork, Standstill, Work, World};
use crate::error::ApiError;
use crate::events::{Events, Notice, silence, transitions};
use crate::observed::{ConfigMapRecord, LayerRecord, ReportRecord};
use crate::revision::Assignment;
use crate::stale::{Liveness, Mark, STATE_UNKNOWN, never_reported};
use crate::summary::{NodeView, summarize};

/// How long after a change a pass begins: changes come in bursts.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// How often a pass is made without a change: silence is not an event, and no repair waits longer.
const TICK: Duration = Duration::from_secs(15);
/// Least time between two writes of one ProxyConfiguration's status.
const STATUS_PAUSE: Duration = Duration::from_secs(5);
/// Requests in flight.
const CONCURRENCY: usize = 8;
/// Errors of one pass that are logged in full.
const LOGGED_ERRORS: usize = 5;

/// Runs until `stop` completes. No write is in flight afterwards.
pub async fn run(context: Context, stop: impl Future<Output = ()>) {
    let wake = Arc::clone(&context.caches.wake);
    let leadership = context.leadership.clone();
    let mut controller = Controller::new(context);
    let mut stop = std::pin::pin!(stop);
    let mut next = Instant::now();
    loop {
        let leads = leadership.is_held();
        let changed = tokio::select! {
            () = &mut stop => return,
            () = wake.notified() => true,
            () = sleep_until(next) => false,
            () = leadership.gained(), if !leads => false,
            () = leadership.lost(), if leads => false,
        };
        if changed {
            tokio::select! {
                () = &mut stop => return,
                () = sleep(DEBOUNCE) => {}
            }
        }
        controller.look();
        let pause = tokio::select! {
            () = &mut stop => return,
            () = leadership.lost() => {
                controller.forget();
                TICK
            }
            pause = controller.turn() => pause,
        };
        next = Instant::now() + pause;
    }
}

struct Controller {
    context: Context,
    writer: Writer,
    events: Events,
    liveness: Liveness,
    /// Our own last write of each ConfigMap that somebody else also wrote to: at this version its content is ours.
    vouched: HashMap<String, String>,
    /// When each ProxyConfiguration's status was last written.
    told: HashMap<String, Instant>,
    standstill: Option<Standstill>,
    failures: u32,
}

/// What went wrong in a pass.
#[derive(Default)]
struct Errors(Vec<ApiError>);

impl Errors {
    fn note<T>(&mut self, result: Result<T, ApiError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.0.push(error);
                None
            }
        }
    }

    fn log(&self) {
        for error in self.0.iter().take(LOGGED_ERRORS) {
            warn!("{error}");
        }
        if self.0.len() > LOGGED_ERRORS {
            warn!("and {} more requests failed in this pass", self.0.len() - LOGGED_ERRORS);
        }
    }
}

impl Controller {
    fn new(context: Context) -> Self {
        Self {
            writer: Writer::new(&context.client, context.leadership.clone()),
            events: Events::new(context.client.clone(), context.names.identity.clone()),
            context,
            liveness: Liveness::default(),
            vouched: HashMap::new(),
            told: HashMap::new(),
            standstill: None,
            failures: 0,
        }
    }

    /// What every replica does: keep health, and see who is silent.
    fn look(&mut self) {
        let unsynced = self.context.caches.unsynced();
        self.context.health.progress();
        self.context.metrics.set_leader(self.context.leadership.is_held());
        if unsynced.is_none() {
            let world = self.context.caches.world();
            self.liveness.observe(&world.reports, &world.pods, std::time::Instant::now());
        }
        self.context.health.set_waiting_for(unsynced);
    }

    /// Another leader may have written since; nothing remembered about our own writes holds any more.
    fn forget(&mut self) {
        self.context.metrics.set_leader(false);
        self.vouched.clear();
        self.told.clear();
        self.standstill = None;
    }

    /// One pass, if there is enough to go by. Returns when the next is due.
    async fn turn(&mut self) -> Duration {
        if self.context.caches.unsynced().is_some() {
            return TICK;
        }
        let started = Instant::now();
        let (errors, pause) = self.pass().await;
        errors.log();
        let succeeded = errors.0.is_empty();
        #[allow(clippy::cast_precision_loss, reason = "milliseconds since 1970 fit")]
        let timestamp = Timestamp::now().as_millisecond() as f64 / 1000.0;
        self.context.metrics.pass(succeeded, started.elapsed().as_secs_f64(), timestamp);
        if succeeded {
            self.failures = 0;
            return pause;
        }
        self.failures = self.failures.saturating_add(1);
        Duration::from_secs(1 << self.failures.min(4)).min(TICK)
    }

    async fn pass(&mut self) -> (Errors, Duration) {
        let mut errors = Errors::default();
        let world = self.world();
        let now = now();
        let layers = decide::layers(&world);
        let assignments = match &layers {
            Ok(layers) => decide::assignments(&world, layers),
            Err(_) => BTreeMap::new(),
        };
        let standstill = layers.err();
        self.tell_standstill(standstill.as_ref());
        if standstill.is_none() {
            self.write(&world, decide::work(&world, &assignments, &now), &now, &mut errors).await;
        }
        let marks = self.liveness.marks(&world.reports, std::time::Instant::now(), &now);
        self.mark(&world, marks, &mut errors).await;
        self.context.metrics.set_pool_nodes(pool_nodes(&world, &assignments));
        let pause = self.statuses(&world, &assignments, standstill.as_ref(), &now, &mut errors).await;
        (errors, pause)
    }

    /// What is observed, less doubts that our own writes have settled.
    fn world(&mut self) -> World {
        let mut world = self.context.caches.world();
        self.vouched.retain(|name, _| world.config_maps.contains_key(name));
        for (name, version) in &self.vouched {
            if let Some(record) = world.config_maps.get_mut(name)
                && record.foreign_content.as_ref() == Some(version)
            {
                *record = Arc::new(ConfigMapRecord { foreign_content: None, ..record.as_ref().clone() });
            }
        }
        world
    }

    fn tell_standstill(&mut self, standstill: Option<&Standstill>) {
        if self.standstill.as_ref() != standstill {
            if let Some(standstill) = standstill {
                error!("{standstill}");
            } else {
                info!("all layers can be read and 'default' is there: nodes are written again");
            }
            self.standstill = standstill.cloned();
        }
    }

    async fn write(&mut self, world: &World, work: Work, now: &Time, errors: &mut Errors) {
        let Work { nodes, config_maps, reports } = work;
        let written = nodes.iter().filter(|node| node.config.is_some()).count();
        if written > 0 {
            info!(nodes = written, "writing node configurations");
        }
        let this = &*self;
        let results: Vec<_> = stream::iter(nodes)
            .map(|node| async move { this.write_node(world, &node, now).await })
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        let mut vouched = Vec::new();
        for result in results {
            vouched.extend(errors.note(result).flatten());
        }
        self.vouched.extend(vouched);
        for sweep in &config_maps {
            info!(node = sweep.name, "the node is gone; its configuration goes too");
            errors.note(self.count(Object::ConfigMap, self.writer.sweep_config_map(sweep).await));
        }
        for sweep in &reports {
            errors.note(self.count(Object::Report, self.writer.sweep_report(sweep).await));
        }
    }

    /// Writes what one node needs, the ConfigMap before the ProxyNodeStatus that names it. Returns the version at which
    /// the ConfigMap's content is ours.
    async fn write_node(
        &self,
        world: &World,
        work: &NodeWork,
        now: &Time,
    ) -> Result<Option<(String, String)>, ApiError> {
        let mut vouched = None;
        if let Some(desired) = &work.config {
            let written = self.writer.config_map(work, desired).await;
            let written = self.count(Object::ConfigMap, written)?;
            vouched = written.resource_version().map(|version| (work.node.clone(), version));
        }
        if let Some(spec) = &work.report {
            let written = self.writer.report(work, spec).await;
            let written = self.count(Object::Report, written)?;
            // At once, so that nobody ever sees a node without a state.
            if !world.reports.contains_key(&work.node)
                && written.status.as_ref().is_none_or(|status| status.state.is_none())
            {
                let record = ReportRecord::from(&written);
                let marked = self.writer.mark(&never_reported(&work.node, &record, now)).await;
                self.count(Object::ReportStatus, marked)?;
            }
        }
        Ok(vouched)
    }

    async fn mark(&mut self, world: &World, marks: Vec<Mark>, errors: &mut Errors) {
        for mark in marks {
            let marked = self.writer.mark(&mark).await;
            if errors.note(self.count(Object::ReportStatus, marked)).is_none() {
                continue;
            }
            if let Some(notice) = silence(&mark) {
                warn!(node = mark.node, "{}", notice.note);
                let uid = world.reports.get(&mark.node).map(|report| report.uid.clone());
                self.events.publish(&reference::<ProxyNodeStatus>(&mark.node, uid), notice).await;
            }
        }
    }

    /// Writes the statuses that changed. Returns when the next pass is due.
    async fn statuses(
        &mut self,
        world: &World,
        assignments: &BTreeMap<String, Arc<Assignment>>,
        standstill: Option<&Standstill>,
        now: &Time,
        errors: &mut Errors,
    ) -> Duration {
        let mut pause = TICK;
        self.told.retain(|name, _| world.layers.contains_key(name));
        for (name, record) in &world.layers {
            let Ok(record) = record.as_ref() else { continue };
            let views = views(world, assignments, record);
            let status = summarize(&record.layer, &record.status, &views, standstill, now);
            if status == record.status {
                continue;
            }
            if let Some(told) = self.told.get(name)
                && told.elapsed() < STATUS_PAUSE
            {
                pause = pause.min(STATUS_PAUSE.saturating_sub(told.elapsed()));
                continue;
            }
            let written = self.writer.layer_status(name, &status).await;
            if errors.note(self.count(Object::LayerStatus, written)).is_none() {
                continue;
            }
            self.told.insert(name.clone(), Instant::now());
            for notice in transitions(&record.status.conditions, &status.conditions) {
                self.tell_layer(record, notice).await;
            }
        }
        pause
    }

    async fn tell_layer(&mut self, record: &LayerRecord, notice: Notice) {
        let name = record.layer.name.as_str();
        if notice.warning {
            warn!(configuration = name, reason = notice.reason, "{}", notice.note);
        } else {
            info!(configuration = name, reason = notice.reason, "{}", notice.note);
        }
        let object = reference::<ProxyConfiguration>(name, Some(record.uid.clone()));
        self.events.publish(&object, notice).await;
    }

    fn count<T>(&self, object: Object, result: Result<T, ApiError>) -> Result<T, ApiError> {
        self.context.health.progress();
        self.context.metrics.write(object, result.is_ok());
        result
    }
}

/// The nodes that a layer selects.
fn views<'a>(
    world: &'a World,
    assignments: &'a BTreeMap<String, Arc<Assignment>>,
    record: &LayerRecord,
) -> Vec<NodeView<'a>> {
    world
        .nodes
        .iter()
        .filter(|(_, node)| record.layer.selects(&node.labels))
        .map(|(name, _)| NodeView {
            name,
            assignment: assignments.get(name).map(Arc::as_ref),
            config_map: world.config_maps.get(name).map(Arc::as_ref),
            report: world.reports.get(name).map(Arc::as_ref),
        })
        .collect()
}

fn pool_nodes(
    world: &World,
    assignments: &BTreeMap<String, Arc<Assignment>>,
) -> BTreeMap<(String, String), i64> {
    let mut counts = BTreeMap::new();
    for (node, assignment) in assignments {
        let state = world.reports.get(node).map(|report| report.state.as_str());
        let state = state.filter(|state| !state.is_empty()).unwrap_or(STATE_UNKNOWN);
        *counts.entry((assignment.pool.clone(), state.to_owned())).or_default() += 1;
    }
    counts
}

fn reference<K: Resource<DynamicType = ()>>(name: &str, uid: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        name: Some(name.to_owned()),
        uid,
        ..ObjectReference::default()
    }
}

/// Whole seconds, as metav1.Time has them.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
