//! Metrics, under kube-proxy's names where the meaning is kube-proxy's, under `pointsman_` otherwise.
//!
//! In: what the sync loop and the HTTP handlers count, and the snapshot at the moment of a scrape. Out: Prometheus' text format.

use std::sync::atomic::AtomicU64;
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

use crate::conntrack::Report;
use crate::kernel::{SyncFailure, Synced};
use crate::state::{SyncState, Watches};

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

/// All metrics of one agent.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
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
    rules: Family<ByTable, Gauge>,
    rules_written: Family<ByTable, Gauge>,
    failures: Family<ByReason, Counter>,
    consecutive_failures: Family<ByFamily, Gauge>,
    queue_age: Family<ByFamily, FloatGauge>,
    foreign_changes: Gauge,
    repairs: Gauge,
    services: Gauge,
    endpoints: Gauge,
    skipped: Gauge,
    settings: Gauge,
    ready: Gauge,
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
            rules: Family::default(),
            rules_written: Family::default(),
            failures: Family::default(),
            consecutive_failures: Family::default(),
            queue_age: Family::default(),
            foreign_changes: Gauge::default(),
            repairs: Gauge::default(),
            services: Gauge::default(),
            endpoints: Gauge::default(),
            skipped: Gauge::default(),
            settings: Gauge::default(),
            ready: Gauge::default(),
            config: Family::default(),
            watch_failing: Family::default(),
            listener_up: Family::default(),
        };
        metrics.register_proxy();
        metrics.register_own();
        metrics
    }
}

impl Metrics {
    /// kube-proxy's names. The library appends `_total` to counters, so they are registered without it; the gauges whose name
    /// ends in `_total` are kube-proxy's own choice.
    fn register_proxy(&mut self) {
        let to = self.registry.sub_registry_with_prefix("kubeproxy");
        to.register(
            "sync_proxy_rules_duration_seconds",
            "Duration of one write to the kernel",
            self.sync_duration.clone(),
        );
        to.register(
            "sync_full_proxy_rules_duration_seconds",
            "Duration of one write of everything",
            self.full_duration.clone(),
        );
        to.register(
            "sync_partial_proxy_rules_duration_seconds",
            "Duration of one write of what changed",
            self.partial_duration.clone(),
        );
        to.register(
            "network_programming_duration_seconds",
            "Time from a change of endpoints in the API to the kernel",
            self.programming.clone(),
        );
        to.register(
            "conntrack_reconciler_sync_duration_seconds",
            "Duration of one run over the connection tracking entries",
            self.flows_duration.clone(),
        );
        to.register(
            "conntrack_reconciler_deleted_entries",
            "Connection tracking entries deleted because their endpoints are gone",
            self.flows_deleted.clone(),
        );
        to.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When the last write succeeded",
            self.last_sync.clone(),
        );
        to.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "When the last change was queued",
            self.last_queued.clone(),
        );
        to.register(
            "sync_proxy_rules_service_changes_pending",
            "Service changes that are not in the kernel yet",
            self.service_pending.clone(),
        );
        to.register("sync_proxy_rules_service_changes", "Service changes seen", self.service_changes.clone());
        to.register(
            "sync_proxy_rules_endpoint_changes_pending",
            "EndpointSlice changes that are not in the kernel yet",
            self.endpoint_pending.clone(),
        );
        to.register(
            "sync_proxy_rules_endpoint_changes",
            "EndpointSlice changes seen",
            self.endpoint_changes.clone(),
        );
        to.register("proxy_healthz", "Answers on /healthz", self.healthz.clone());
        to.register("proxy_livez", "Answers on /livez", self.livez.clone());
        to.register(
            "sync_proxy_rules_iptables_restore_failures",
            "Failed iptables-restore runs",
            self.restore_failures.clone(),
        );
        to.register(
            "sync_proxy_rules_iptables_partial_restore_failures",
            "Failed iptables-restore runs that held only what changed",
            self.partial_failures.clone(),
        );
        to.register("sync_proxy_rules_iptables_total", "iptables rules that we hold", self.rules.clone());
        to.register(
            "sync_proxy_rules_iptables_last",
            "iptables rules in the last write",
            self.rules_written.clone(),
        );
    }

    fn register_own(&mut self) {
        let to = self.registry.sub_registry_with_prefix("pointsman");
        to.register("sync_failures", "Failed writes to the kernel, by reason", self.failures.clone());
        to.register(
            "sync_consecutive_failures",
            "Failed writes since the last success",
            self.consecutive_failures.clone(),
        );
        to.register(
            "sync_queue_age_seconds",
            "Age of the oldest change that the kernel does not hold",
            self.queue_age.clone(),
        );
        to.register(
            "drift_foreign_changes",
            "How often others changed our kernel state",
            self.foreign_changes.clone(),
        );
        to.register("drift_repairs", "How often that was repaired", self.repairs.clone());
        to.register("services", "Services in the plan", self.services.clone());
        to.register("endpoints", "Endpoints in the plan", self.endpoints.clone());
        to.register("objects_skipped", "Objects or parts of them that made no sense", self.skipped.clone());
        to.register(
            "settings_not_applied",
            "Settings of the kernel that are not as configured",
            self.settings.clone(),
        );
        to.register("ready", "Whether the kernel holds the assigned configuration", self.ready.clone());
        to.register("config_info", "Mode and revisions", self.config.clone());
        to.register("watch_failing", "Whether a watch only fails", self.watch_failing.clone());
        to.register("listener_up", "Whether a port is listened on", self.listener_up.clone());
    }

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

    /// Writing one family failed.
    pub fn failed(&self, family: IpFamily, failure: SyncFailure, full: bool) {
        let reason = match failure {
            SyncFailure::LockTimeout => "LockTimeout",
            SyncFailure::RestoreFailed => "RestoreFailed",
            SyncFailure::ToolMissing => "ToolMissing",
            SyncFailure::SyncFailed => "SyncFailed",
        };
        let ip_family = family_word(family);
        self.failures.get_or_create(&ByReason { ip_family, reason }).inc();
        self.restore_failures.get_or_create(&by_family(family)).inc();
        if !full {
            self.partial_failures.get_or_create(&by_family(family)).inc();
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
    }

    /// `/livez` answered.
    pub fn answered_livez(&self, code: u16) {
        self.livez.get_or_create(&ByCode { code }).inc();
    }

    /// A port is listened on, or cannot be.
    pub fn listening(&self, listener: &'static str, up: bool) {
        self.listener_up.get_or_create(&ByListener { listener }).set(i64::from(up));
    }

    /// Everything, as Prometheus reads it.
    #[must_use]
    pub fn render(&self, state: &SyncState, watches: &Watches, ready: bool, instant: Instant) -> String {
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
        self.foreign_changes.set(i64::from(state.drift.foreign_changes));
        self.repairs.set(i64::from(state.drift.repairs));
        self.services.set(whole(state.services));
        self.endpoints.set(whole(state.endpoints));
        self.skipped.set(i64::try_from(state.skipped).unwrap_or(i64::MAX));
        self.settings.set(whole(state.settings.len()));
        self.ready.set(i64::from(ready));
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
        let mut text = String::new();
        if prometheus_text::encode(&mut text, &self.registry).is_err() {
            // Writing to a String cannot fail; if an encoder ever refuses, an empty page says so.
            text.clear();
        }
        text
    }
}

fn by_family(family: IpFamily) -> ByFamily {
    ByFamily { ip_family: family_word(family) }
}

#[allow(clippy::cast_precision_loss, reason = "seconds since 1970 need 31 of the 52 bits")]
fn now() -> f64 {
    Timestamp::now().as_millisecond() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[tokio::test(start_paused = true)]
    async fn names_are_the_ones_that_dashboards_know() {
        let metrics = Metrics::default();
        let synced = Synced {
            full: true,
            rules: BTreeMap::from([((IpFamily::IPv4, "nat"), 12)]),
            written: BTreeMap::from([((IpFamily::IPv4, "nat"), 3)]),
            ..Synced::default()
        };
        metrics.changed(Changed::Service);
        metrics.queued(&[IpFamily::IPv4]);
        metrics.synced(IpFamily::IPv4, &synced, Duration::from_millis(3));
        metrics.failed(IpFamily::IPv6, SyncFailure::LockTimeout, false);
        metrics.programmed(&[IpFamily::IPv4], Duration::from_secs(2));
        metrics.answered_healthz(200);
        let mut state = SyncState::new(Timestamp::UNIX_EPOCH);
        state.config.active = Some("default-0123456789".to_owned());
        let text = metrics.render(&state, &Watches::default(), true, Instant::now());
        for line in [
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.004\"} 1",
            "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"2\"} 1",
            "kubeproxy_sync_proxy_rules_service_changes_total 1",
            "kubeproxy_sync_proxy_rules_service_changes_pending 1",
            "kubeproxy_sync_proxy_rules_iptables_total{table=\"nat\",ip_family=\"IPv4\"} 12",
            "kubeproxy_sync_proxy_rules_iptables_last{table=\"nat\",ip_family=\"IPv4\"} 3",
            "kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family=\"IPv6\"} 1",
            "kubeproxy_proxy_healthz_total{code=\"200\"} 1",
            "pointsman_sync_failures_total{ip_family=\"IPv6\",reason=\"LockTimeout\"} 1",
            "pointsman_ready 1",
            "pointsman_config_info{mode=\"\",assigned=\"\",active=\"default-0123456789\"} 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("_total_total"), "{text}");
        metrics.drained();
        let text = metrics.render(&state, &Watches::default(), true, Instant::now());
        assert!(text.contains("service_changes_pending 0"));
    }

    #[test]
    fn programming_buckets_are_those_of_kube_proxy() {
        let coarse = (60..=115_u16).step_by(5).count() + (120..=300_u16).step_by(30).count();
        assert_eq!(2 + 59 + coarse, 80);
    }
}
