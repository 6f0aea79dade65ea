//! Metrics, under kube-proxy's names where the meaning is kube-proxy's, under `pointsman_` otherwise.
//!
//! In: what the sync loop and the HTTP handlers count, and the snapshot at the moment of a scrape. Out: Prometheus' text format.
//! `docs/metrics.md` lists them, and a test holds both together.

mod client;
mod process;
mod register;
mod slis;
mod traffic;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use k8s_openapi::jiff::Timestamp;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;

use crate::conntrack::Report;
use crate::healthcheck::Checks;
use crate::kernel::{SyncFailure, Synced};
use crate::state::{SyncState, Watches};
use crate::userspace::counters::Counters;

pub use client::ClientMetrics;
use process::ProcessMetrics;
pub use slis::Probe;
use slis::Slis;
pub use traffic::Traffic;

type FloatGauge = Gauge<f64, AtomicU64>;
type Durations = Family<ByFamily, Histogram>;

/// Label `ip_family`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByFamily {
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTable {
    table: &'static str,
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCode {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    ip_family: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResource {
    resource: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByListener {
    listener: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByPolicy {
    traffic_policy: &'static str,
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByState {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConfigLabels {
    mode: String,
    assigned: String,
    active: String,
}

/// The word for a family in labels.
#[must_use]
pub fn family_word(family: IpFamily) -> &'static str {
    match family {
        IpFamily::IPv4 => "IPv4",
        IpFamily::IPv6 => "IPv6",
    }
}

/// What kind of object changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// A Service.
    Service,
    /// An EndpointSlice.
    Endpoints,
}

/// What is looked at when somebody asks for the metrics.
#[derive(Clone, Copy, Debug)]
pub struct Scrape<'a> {
    /// The sync loop's snapshot.
    pub state: &'a SyncState,
    /// The watches.
    pub watches: &'a Watches,
    /// The health checks of load balancers.
    pub checks: &'a Checks,
    /// Whether the kernel holds the assigned configuration.
    pub ready: bool,
    /// Now.
    pub instant: Instant,
}

/// All metrics of one agent.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests to the API server.
    pub client: ClientMetrics,
    /// What mode userspace counts.
    pub userspace: Counters,
    /// What the kernel counts for each Service port.
    pub traffic: Traffic,
    process: ProcessMetrics,
    slis: Slis,
    sync_duration: Durations,
    full_duration: Durations,
    partial_duration: Durations,
    programming: Durations,
    flows_duration: Durations,
    flows_deleted: Family<ByFamily, Counter>,
    last_sync: Family<ByFamily, FloatGauge>,
    last_queued: Family<ByFamily, FloatGauge>,
    service_pending: Gauge,
    service_changes: Counter,
    endpoint_pending: Gauge,
    endpoint_changes: Counter,
    healthz: Family<ByCode, Counter>,
    livez: Family<ByCode, Counter>,
    restore_failures: Family<ByFamily, Counter>,
    partial_failures: Family<ByFamily, Counter>,
    nft_failures: Family<ByFamily, Counter>,
    invalid_dropped: Counter,
    no_local: Family<ByPolicy, Gauge>,
    rules: Family<ByTable, Gauge>,
    rules_written: Family<ByTable, Gauge>,
    failures: Family<ByReason, Counter>,
    consecutive_failures: Family<ByFamily, Gauge>,
    queue_age: Family<ByFamily, FloatGauge>,
    foreign_changes: Counter,
    repairs: Counter,
    services: Gauge,
    endpoints: Gauge,
    rules_held: Gauge,
    skipped: Counter,
    conflicts: Gauge,
    settings: Gauge,
    ready: Gauge,
    build: Family<BuildLabels, Gauge>,
    check_ports: Family<ByState, Gauge>,
    config: Family<ConfigLabels, Gauge>,
    watch_failing: Family<ByResource, Gauge>,
    listener_up: Family<ByListener, Gauge>,
}

fn sync_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// kube-proxy's buckets: fine below a minute, coarse up to five.
fn programming_histogram() -> Histogram {
    let coarse = (60..=115_u16).step_by(5).chain((120..=300).step_by(30));
    Histogram::new([0.25, 0.5].into_iter().chain((1..=59_u16).chain(coarse).map(f64::from)))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            client: ClientMetrics::default(),
            userspace: Counters::default(),
            traffic: Traffic::default(),
            process: ProcessMetrics::default(),
            slis: Slis::default(),
            sync_duration: Family::new_with_constructor(sync_histogram),
            full_duration: Family::new_with_constructor(sync_histogram),
            partial_duration: Family::new_with_constructor(sync_histogram),
            programming: Family::new_with_constructor(programming_histogram),
            flows_duration: Family::new_with_constructor(sync_histogram),
            flows_deleted: Family::default(),
            last_sync: Family::default(),
            last_queued: Family::default(),
            service_pending: Gauge::default(),
            service_changes: Counter::default(),
            endpoint_pending: Gauge::default(),
            endpoint_changes: Counter::default(),
            healthz: Family::default(),
            livez: Family::default(),
            restore_failures: Family::default(),
            partial_failures: Family::default(),
            nft_failures: Family::default(),
            invalid_dropped: Counter::default(),
            no_local: Family::default(),
            rules: Family::default(),
            rules_written: Family::default(),
            failures: Family::default(),
            consecutive_failures: Family::default(),
            queue_age: Family::default(),
            foreign_changes: Counter::default(),
            repairs: Counter::default(),
            services: Gauge::default(),
            endpoints: Gauge::default(),
            rules_held: Gauge::default(),
            skipped: Counter::default(),
            conflicts: Gauge::default(),
            settings: Gauge::default(),
            ready: Gauge::default(),
            build: Family::default(),
            check_ports: Family::default(),
            config: Family::default(),
            watch_failing: Family::default(),
            listener_up: Family::default(),
        };
        metrics.register_proxy();
        metrics.register_own();
        metrics.client.register(&mut metrics.registry);
        metrics.userspace.register(&mut metrics.registry);
        metrics.traffic.register(&mut metrics.registry);
        metrics.process.register(&mut metrics.registry);
        metrics.build.get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        metrics
    }
}

impl Metrics {
    /// An object has changed in a way that matters.
    pub fn changed(&self, changed: Changed) {
        match changed {
            Changed::Service => {
                self.service_changes.inc();
                self.service_pending.inc();
            }
            Changed::Endpoints => {
                self.endpoint_changes.inc();
                self.endpoint_pending.inc();
            }
        }
    }

    /// The plan has changed, and the kernel is to follow.
    pub fn queued(&self, families: &[IpFamily]) {
        for &family in families {
            self.last_queued.get_or_create(&by_family(family)).set(now());
        }
    }

    /// Every queued change is in the kernel.
    pub fn drained(&self) {
        self.service_pending.set(0);
        self.endpoint_pending.set(0);
    }

    /// One family was written.
    pub fn synced(&self, family: IpFamily, synced: &Synced, took: Duration) {
        let label = by_family(family);
        let kind = if synced.full { &self.full_duration } else { &self.partial_duration };
        for histogram in [&self.sync_duration, kind] {
            histogram.get_or_create(&label).observe(took.as_secs_f64());
        }
        self.last_sync.get_or_create(&label).set(now());
        for (into, from) in [(&self.rules, &synced.rules), (&self.rules_written, &synced.written)] {
            for (&(of, table), &number) in from.iter().filter(|((of, _), _)| *of == family) {
                let label = ByTable { table, ip_family: family_word(of) };
                into.get_or_create(&label).set(i64::try_from(number).unwrap_or(i64::MAX));
            }
        }
    }

    /// Writing one family failed, in the mode that it runs in.
    pub fn failed(&self, mode: Option<Mode>, family: IpFamily, failure: SyncFailure, full: bool) {
        let reason = match failure {
            SyncFailure::LockTimeout => "LockTimeout",
            SyncFailure::RestoreFailed => "RestoreFailed",
            SyncFailure::ToolMissing => "ToolMissing",
            SyncFailure::SyncFailed => "SyncFailed",
        };
        let label = by_family(family);
        self.failures.get_or_create(&ByReason { ip_family: label.ip_family, reason }).inc();
        if mode == Some(Mode::Nftables) {
            self.nft_failures.get_or_create(&label).inc();
            return;
        }
        self.restore_failures.get_or_create(&label).inc();
        if !full {
            self.partial_failures.get_or_create(&label).inc();
        }
    }

    /// A change of endpoints has reached the kernel.
    pub fn programmed(&self, families: &[IpFamily], latency: Duration) {
        for &family in families {
            self.programming.get_or_create(&by_family(family)).observe(latency.as_secs_f64());
        }
    }

    /// Flows to endpoints that are gone were ended.
    pub fn flows_ended(&self, report: &Report) {
        let label = by_family(report.family);
        self.flows_duration.get_or_create(&label).observe(report.duration.as_secs_f64());
        self.flows_deleted.get_or_create(&label).inc_by(report.deleted);
    }

    /// `/healthz` answered.
    pub fn answered_healthz(&self, code: u16) {
        self.healthz.get_or_create(&ByCode { code }).inc();
        self.slis.answered(Probe::Healthz, code == 200);
    }

    /// `/livez` answered.
    pub fn answered_livez(&self, code: u16) {
        self.livez.get_or_create(&ByCode { code }).inc();
        self.slis.answered(Probe::Livez, code == 200);
    }

    /// `/readyz` answered.
    pub fn answered_readyz(&self, code: u16) {
        self.slis.answered(Probe::Readyz, code == 200);
    }

    /// `/metrics/slis`: what the probes say now, and how often they said what.
    #[must_use]
    pub fn render_slis(&self, now: [(Probe, bool); 3]) -> String {
        self.slis.render(now)
    }

    /// A port is listened on, or cannot be.
    pub fn listening(&self, listener: &'static str, up: bool) {
        self.listener_up.get_or_create(&ByListener { listener }).set(i64::from(up));
    }

    /// Everything, as Prometheus reads it.
    #[must_use]
    pub fn render(&self, scrape: Scrape<'_>) -> String {
        let Scrape { state, watches, checks, ready, instant } = scrape;
        let whole = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        for (&family, held) in &state.families {
            let age = held
                .oldest_queued
                .map_or(0.0, |since| instant.saturating_duration_since(since).as_secs_f64());
            self.queue_age.get_or_create(&by_family(family)).set(age);
            self.consecutive_failures
                .get_or_create(&by_family(family))
                .set(i64::from(held.consecutive_failures));
        }
        for (&family, count) in &state.no_local {
            for (traffic_policy, count) in [("internal", count.internal), ("external", count.external)] {
                let label = ByPolicy { traffic_policy, ip_family: family_word(family) };
                self.no_local.get_or_create(&label).set(whole(count));
            }
        }
        raise(&self.foreign_changes, state.drift.foreign_changes.into());
        raise(&self.repairs, state.drift.repairs.into());
        raise(&self.skipped, state.skipped);
        raise(&self.invalid_dropped, state.invalid_dropped);
        self.services.set(whole(state.services));
        self.endpoints.set(whole(state.endpoints));
        self.rules_held.set(whole(state.rules));
        self.conflicts.set(whole(state.conflicts));
        self.settings.set(whole(state.settings.len() + state.localhost.len()));
        self.ready.set(i64::from(ready));
        for (word, count) in [("open", checks.open()), ("failing", checks.problems().len())] {
            self.check_ports.get_or_create(&ByState { state: word }).set(whole(count));
        }
        for (source, watch) in &watches.0 {
            self.watch_failing
                .get_or_create(&ByResource { resource: source.resource().0 })
                .set(i64::from(watch.failing.is_some()));
        }
        // One series, not one for every revision that ever was.
        self.config.clear();
        let labels = ConfigLabels {
            mode: state.mode.map(|mode| mode.to_string()).unwrap_or_default(),
            assigned: state.config.assigned.clone().unwrap_or_default(),
            active: state.config.active.clone().unwrap_or_default(),
        };
        self.config.get_or_create(&labels).set(1);
        self.process.read(state.started);
        encode(&self.registry)
    }
}

/// Prometheus' text format.
fn encode(registry: &Registry) -> String {
    let mut text = String::new();
    if prometheus_text::encode(&mut text, registry).is_err() {
        // Writing to a String cannot fail; if an encoder ever refuses, an empty page says so.
        text.clear();
    }
    text
}

/// Lets a counter follow one that is kept elsewhere.
fn raise(counter: &Counter, to: u64) {
    counter.inner().store(to, Ordering::Relaxed);
}

fn by_family(family: IpFamily) -> ByFamily {
    ByFamily { ip_family: family_word(family) }
}

#[allow(clippy::cast_precision_loss, reason = "seconds since 1970 need 31 of the 52 bits")]
fn now() -> f64 {
    Timestamp::now().as_millisecond() as f64 / 1000.0
}

#[cfg(test)]
mod tests;
