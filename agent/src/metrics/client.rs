//! Requests to the API server, under client-go's names.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    code: String,
    host: String,
    method: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Took {
    host: String,
    verb: String,
}

/// Requests to the API server.
#[derive(Clone, Debug)]
pub struct ClientMetrics {
    requests: Family<Answered, Counter>,
    duration: Family<Took, Histogram>,
}

/// client-go's buckets.
fn histogram() -> Histogram {
    Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0])
}

impl Default for ClientMetrics {
    fn default() -> Self {
        Self { requests: Family::default(), duration: Family::new_with_constructor(histogram) }
    }
}

impl ClientMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("rest_client_requests", "Requests to the API server", self.requests.clone());
        registry.register(
            "rest_client_request_duration_seconds",
            "Time until the API server began to answer",
            self.duration.clone(),
        );
    }

    /// A request to `host` got an answer with this code, or none.
    pub fn answered(&self, host: &str, method: &http::Method, code: Option<u16>, took: Duration) {
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        let (host, method) = (host.to_owned(), method.to_string());
        self.requests.get_or_create(&Answered { code, host: host.clone(), method: method.clone() }).inc();
        self.duration.get_or_create(&Took { host, verb: method }).observe(took.as_secs_f64());
    }
}
