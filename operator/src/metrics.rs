//! Metrics, in the Prometheus text format.
//!
//! In: what the controller has done and seen. Out: the text of `/metrics`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::apply::Object;

/// `Content-Type` of [`Metrics::text`].
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PoolState {
    pool: String,
    state: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Write {
    resource: &'static str,
    result: &'static str,
}

/// All metrics of this process.
pub struct Metrics {
    registry: Registry,
    pool_nodes: Family<PoolState, Gauge>,
    /// What `pool_nodes` was last set to: a scrape must not find it half rebuilt on every pass.
    last_counts: Mutex<BTreeMap<(String, String), i64>>,
    passes: Family<Outcome, Counter>,
    pass_seconds: Histogram,
    last_pass: Gauge<f64, AtomicU64>,
    writes: Family<Write, Counter>,
    leader: Gauge,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("pointsman_operator"),
            pool_nodes: Family::default(),
            last_counts: Mutex::default(),
            passes: Family::default(),
            // 1 ms to 65 s.
            pass_seconds: Histogram::new(exponential_buckets(0.001, 4.0, 9)),
            last_pass: Gauge::default(),
            writes: Family::default(),
            leader: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "pool_nodes",
            "Nodes by pool and by the state in their ProxyNodeStatus",
            metrics.pool_nodes.clone(),
        );
        registry.register("reconcile", "Passes over all objects, by result", metrics.passes.clone());
        registry.register(
            "reconcile_duration_seconds",
            "How long a pass took, with its writes",
            metrics.pass_seconds.clone(),
        );
        registry.register(
            "last_reconcile_timestamp_seconds",
            "When the last pass without an error ended",
            metrics.last_pass.clone(),
        );
        registry.register("writes", "Requests that change objects, by result", metrics.writes.clone());
        registry.register("leader", "1 while this replica leads", metrics.leader.clone());
        metrics
    }
}

impl Metrics {
    /// The text of `/metrics`.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }

    /// Replaces the node counts by pool and state.
    pub fn set_pool_nodes(&self, counts: BTreeMap<(String, String), i64>) {
        let mut last = self.last_counts.lock().unwrap_or_else(PoisonError::into_inner);
        if *last == counts {
            return;
        }
        self.pool_nodes.clear();
        for ((pool, state), count) in &counts {
            let labels = PoolState { pool: pool.clone(), state: state.clone() };
            self.pool_nodes.get_or_create(&labels).set(*count);
        }
        *last = counts;
    }

    /// Counts a pass that ended at `timestamp`, in seconds since 1970.
    pub fn pass(&self, succeeded: bool, seconds: f64, timestamp: f64) {
        self.passes.get_or_create(&Outcome { result: result(succeeded) }).inc();
        self.pass_seconds.observe(seconds);
        if succeeded {
            self.last_pass.set(timestamp);
        }
    }

    /// Counts a write.
    pub fn write(&self, object: Object, succeeded: bool) {
        let labels = Write { resource: object.resource(), result: result(succeeded) };
        self.writes.get_or_create(&labels).inc();
    }

    /// Notes whether this replica leads.
    pub fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
        if !leads {
            // Only the leader's counts are current.
            self.set_pool_nodes(BTreeMap::new());
        }
    }
}

fn result(succeeded: bool) -> &'static str {
    if succeeded { "success" } else { "error" }
}
