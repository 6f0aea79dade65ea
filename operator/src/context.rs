//! What all parts of one operator process share, and the watches that feed it.
//!
//! In: a client and names. Out: a [`Context`] whose caches fill by themselves.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::watcher;
use kube::{Api, Client};
use pointsman_crds::names::NODE_CONFIG_NAMESPACE;
use pointsman_crds::{ProxyConfiguration, ProxyNodeStatus};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::warn;

use crate::decide::World;
use crate::http::Health;
use crate::lease::Leadership;
use crate::metrics::Metrics;
use crate::observed::{ConfigMapRecord, LayerRecord, NodeRecord, PodRecord, ReportRecord, layer};
use crate::watch::{Cache, follow};

/// Names that an installation may change.
#[derive(Clone, Debug)]
pub struct Names {
    /// Where the agents' pods are.
    pub namespace: String,
    /// The labels of the agents' pods.
    pub agent_selector: String,
    /// This replica.
    pub identity: String,
}

/// Shared by all parts of the process.
#[derive(Clone)]
pub struct Context {
    /// The API server.
    pub client: Client,
    /// Names that an installation may change.
    pub names: Names,
    /// Whether this replica may write.
    pub leadership: Leadership,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What probes are told.
    pub health: Arc<Health>,
    /// What is watched.
    pub caches: Arc<Caches>,
}

/// One cache for each kind that is watched.
#[derive(Debug)]
pub struct Caches {
    layers: Arc<Cache<Result<LayerRecord, String>>>,
    nodes: Arc<Cache<NodeRecord>>,
    config_maps: Arc<Cache<ConfigMapRecord>>,
    reports: Arc<Cache<ReportRecord>>,
    pods: Arc<Cache<PodRecord>>,
    /// Notified after every change that matters.
    pub wake: Arc<Notify>,
}

impl Default for Caches {
    fn default() -> Self {
        Self {
            layers: Arc::new(Cache::new("proxyconfigurations.pointsman.dev", PartialEq::ne)),
            nodes: Arc::new(Cache::new("nodes", PartialEq::ne)),
            config_maps: Arc::new(Cache::new("configmaps", PartialEq::ne)),
            reports: Arc::new(Cache::new("proxynodestatuses.pointsman.dev", ReportRecord::differs)),
            pods: Arc::new(Cache::new("pods", PartialEq::ne)),
            wake: Arc::default(),
        }
    }
}

impl Caches {
    /// Starts all watches; they end when the set is dropped.
    #[must_use]
    pub fn start(&self, client: &Client, names: &Names) -> JoinSet<()> {
        let mut watches = JoinSet::new();
        let all = watcher::Config::default;
        let wake = || Arc::clone(&self.wake);
        let layers = Api::<DeserializeGuard<ProxyConfiguration>>::all(client.clone());
        watches.spawn(follow(Arc::clone(&self.layers), layers, all(), |object| Some(layer(object)), wake()));
        let nodes = Api::<PartialObjectMeta<Node>>::all(client.clone());
        watches.spawn(follow(Arc::clone(&self.nodes), nodes, all(), |node| Some(node.into()), wake()));
        // All of the namespace, which holds nothing else: by our label alone, one that has lost it would look absent.
        let config_maps =
            Api::<PartialObjectMeta<ConfigMap>>::namespaced(client.clone(), NODE_CONFIG_NAMESPACE);
        watches.spawn(follow(
            Arc::clone(&self.config_maps),
            config_maps,
            all(),
            |object| Some(object.into()),
            wake(),
        ));
        let reports = Api::<DeserializeGuard<ProxyNodeStatus>>::all(client.clone());
        watches.spawn(follow(Arc::clone(&self.reports), reports, all(), report, wake()));
        let pods = Api::<Pod>::namespaced(client.clone(), &names.namespace);
        let agents = all().labels(&names.agent_selector);
        watches.spawn(follow(Arc::clone(&self.pods), pods, agents, |pod| Some(pod.into()), wake()));
        watches
    }

    /// What has not been listed yet. The agents' pods are not waited for: without them, heartbeats tell.
    #[must_use]
    pub fn unsynced(&self) -> Option<String> {
        let missing = [
            self.layers.unsynced(),
            self.nodes.unsynced(),
            self.config_maps.unsynced(),
            self.reports.unsynced(),
        ];
        let missing: Vec<String> = missing.into_iter().flatten().collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }

    /// Everything as it is known now.
    #[must_use]
    pub fn world(&self) -> World {
        World {
            layers: self.layers.snapshot(),
            nodes: self.nodes.snapshot(),
            config_maps: self.config_maps.snapshot(),
            reports: self.reports.snapshot(),
            pods: self.pods.snapshot(),
        }
    }
}

fn report(object: &DeserializeGuard<ProxyNodeStatus>) -> Option<ReportRecord> {
    match &object.0 {
        Ok(report) => Some(report.into()),
        Err(error) => {
            let name = error.metadata.name.as_deref().unwrap_or_default();
            warn!(node = name, error = error.error, "a ProxyNodeStatus cannot be read and counts as absent");
            None
        }
    }
}
