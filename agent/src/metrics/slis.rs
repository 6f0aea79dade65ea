//! `/metrics/slis`: the probes as a service level, under the names that all components of Kubernetes have (KEP-3466).

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// A question about health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Should load balancers use the node?
    Healthz,
    /// Does the data plane keep up?
    Livez,
    /// Does the kernel hold the assigned configuration?
    Readyz,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Now {
    name: &'static str,
    r#type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Said {
    name: &'static str,
    r#type: &'static str,
    status: &'static str,
}

/// What was answered to probes.
#[derive(Debug)]
pub(super) struct Slis {
    registry: Registry,
    now: Family<Now, Gauge>,
    said: Family<Said, Counter>,
}

impl Default for Slis {
    fn default() -> Self {
        let (now, said) = (Family::default(), Family::default());
        let mut registry = Registry::default();
        let to = registry.sub_registry_with_prefix("kubernetes");
        to.register("healthcheck", "Whether the check succeeds now", now.clone());
        to.register("healthchecks", "Answers of the check", said.clone());
        Self { registry, now, said }
    }
}

impl Slis {
    pub(super) fn answered(&self, probe: Probe, good: bool) {
        let status = if good { "success" } else { "error" };
        self.said.get_or_create(&Said { name: "proxy", r#type: word(probe), status }).inc();
    }

    pub(super) fn render(&self, now: [(Probe, bool); 3]) -> String {
        for (probe, good) in now {
            self.now.get_or_create(&Now { name: "proxy", r#type: word(probe) }).set(i64::from(good));
        }
        super::encode(&self.registry)
    }
}

fn word(probe: Probe) -> &'static str {
    match probe {
        Probe::Healthz => "healthz",
        Probe::Livez => "livez",
        Probe::Readyz => "readyz",
    }
}
