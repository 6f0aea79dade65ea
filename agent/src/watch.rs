//! The watches: what happens in the cluster, as inputs of the sync loop.
//!
//! In: a client. Out: [`Input`]s in a bounded queue, and for each watch whether it works. A list that is taken again also
//! reports what has vanished meanwhile. An object that cannot be read is skipped, and what was known of it kept; it stalls
//! nothing. A watch that is refused names the permission that is missing, and tries again.

pub mod addresses;
mod source;

use std::collections::BTreeMap;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tracing::warn;

use crate::client::observed;
use crate::config::{assess, assess_malformed};
use crate::model::{Change, NodeFacts, ObjectName};
use crate::state::{NodeEligibility, Source, SyncState, Watches};
use crate::sync::Input;
use source::{Feed, Seen, Sink};

/// Services with this label are another proxy's, or ours if its value is our name.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// Slices with this label belong to headless Services.
const HEADLESS: &str = "service.kubernetes.io/headless";
/// The cluster autoscaler puts this on a node that it is about to remove.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// What all watches share.
#[derive(Clone)]
pub struct Watching {
    /// Talks to the API server.
    pub client: Client,
    /// The own Node's name.
    pub node: String,
    /// The namespace of the node ConfigMaps.
    pub config_namespace: String,
    /// The sync loop.
    pub inputs: mpsc::Sender<Input>,
    /// Where each watch says how it is doing.
    pub watches: watch::Sender<Watches>,
    /// Where the Node watch says whether load balancers should use the node.
    pub eligibility: watch::Sender<NodeEligibility>,
    /// Where the sync loop says which Services it needs.
    pub state: watch::Receiver<SyncState>,
}

impl Watching {
    /// Starts all watches. They run until the sync loop is gone.
    pub fn start(self, tasks: &mut JoinSet<()>) {
        tasks.spawn(self.clone().services());
        tasks.spawn(self.clone().slices());
        tasks.spawn(self.clone().own_node());
        tasks.spawn(self.clone().own_config());
        tasks.spawn(self.service_cidrs());
    }

    fn feed(&self, source: Source) -> Feed {
        Feed { source, inputs: self.inputs.clone(), watches: self.watches.clone() }
    }

    /// A client that clears the watch's trouble as soon as the server lets it in.
    fn client(&self, source: Source) -> Client {
        let feed = self.feed(source);
        observed(self.client.clone(), move || feed.working(false))
    }

    /// Services, by the label that the configuration names. A new name is a new watch; the list it begins with takes away what
    /// the old one had.
    async fn services(self) {
        let mut names = self.state.clone();
        let mut known = Seen::default();
        loop {
            let name = proxy_name(&names.borrow_and_update());
            let mut sink = Services(name.clone());
            let selector =
                if name.is_empty() { format!("!{PROXY_NAME}") } else { format!("{PROXY_NAME}={name}") };
            let api: Api<DeserializeGuard<Service>> = Api::all(self.client(Source::Services));
            let run = self.feed(Source::Services).run(
                api,
                watcher::Config::default().labels(&selector),
                &mut known,
                &mut sink,
            );
            tokio::select! {
                () = run => return,
                changed = names.wait_for(|state| proxy_name(state) != name) => if changed.is_err() { return },
            }
        }
    }

    async fn slices(self) {
        let api: Api<DeserializeGuard<EndpointSlice>> = Api::all(self.client(Source::EndpointSlices));
        let config = watcher::Config::default().labels(&format!("!{HEADLESS}"));
        self.feed(Source::EndpointSlices).run(api, config, &mut Seen::default(), &mut Slices).await;
    }

    async fn own_node(self) {
        let api: Api<DeserializeGuard<Node>> = Api::all(self.client(Source::Node));
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.node));
        let mut sink = OwnNode(self.eligibility.clone());
        self.feed(Source::Node).run(api, config, &mut Seen::default(), &mut sink).await;
    }

    async fn own_config(self) {
        let api: Api<DeserializeGuard<ConfigMap>> =
            Api::namespaced(self.client(Source::NodeConfig), &self.config_namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.node));
        self.feed(Source::NodeConfig).run(api, config, &mut Seen::default(), &mut OwnConfig).await;
    }

    /// Servers before 1.33 do not have them, and nothing else depends on them.
    async fn service_cidrs(self) {
        let api: Api<DeserializeGuard<ServiceCIDR>> = Api::all(self.client(Source::ServiceCidrs));
        let config = watcher::Config::default();
        let mut sink = Cidrs::default();
        self.feed(Source::ServiceCidrs).run(api, config, &mut Seen::default(), &mut sink).await;
    }
}

/// With their proxy name.
struct Services(String);

impl Sink<Service> for Services {
    fn listed(&self, _: Source) -> Input {
        Input::ServicesListed(self.0.clone())
    }

    fn applied(&mut self, service: Service) -> Option<Input> {
        Some(Input::Change(Change::ServiceApplied(Box::new(service))))
    }

    fn deleted(&mut self, name: ObjectName) -> Option<Input> {
        Some(Input::Change(Change::ServiceDeleted(name)))
    }
}

struct Slices;

impl Sink<EndpointSlice> for Slices {
    fn applied(&mut self, slice: EndpointSlice) -> Option<Input> {
        Some(Input::Change(Change::SliceApplied(Box::new(slice))))
    }

    fn deleted(&mut self, name: ObjectName) -> Option<Input> {
        Some(Input::Change(Change::SliceDeleted(name)))
    }
}

struct OwnNode(watch::Sender<NodeEligibility>);

impl Sink<Node> for OwnNode {
    fn applied(&mut self, node: Node) -> Option<Input> {
        self.0.send_replace(eligible(&node));
        Some(Input::Change(Change::Node(NodeFacts::from_node(&node))))
    }

    /// A node that is removed while we run keeps its rules until it is switched off.
    fn deleted(&mut self, _: ObjectName) -> Option<Input> {
        self.0.send_replace(NodeEligibility::default());
        None
    }
}

struct OwnConfig;

impl Sink<ConfigMap> for OwnConfig {
    fn applied(&mut self, map: ConfigMap) -> Option<Input> {
        Some(Input::Config(Box::new(assess(Some(&map)))))
    }

    fn deleted(&mut self, _: ObjectName) -> Option<Input> {
        Some(Input::Config(Box::new(assess(None))))
    }

    fn invalid(&mut self, broken: &InvalidObject) -> Option<Input> {
        Some(Input::Config(Box::new(assess_malformed(&broken.error))))
    }
}

/// The blocks of each ServiceCIDR; the model wants all of them at once.
#[derive(Default)]
struct Cidrs(BTreeMap<String, Vec<IpNet>>);

impl Cidrs {
    fn all(&self) -> Input {
        Input::Change(Change::ServiceCidrs(self.0.values().flatten().copied().collect()))
    }
}

impl Sink<ServiceCIDR> for Cidrs {
    fn applied(&mut self, object: ServiceCIDR) -> Option<Input> {
        self.0.insert(object.metadata.name.clone().unwrap_or_default(), networks(&object));
        Some(self.all())
    }

    fn deleted(&mut self, name: ObjectName) -> Option<Input> {
        self.0.remove(&*name.name);
        Some(self.all())
    }
}

fn proxy_name(state: &SyncState) -> String {
    // Most clusters have no other name, so that is tried before a configuration says.
    state.config.service_proxy_name.clone().unwrap_or_default()
}

fn networks(object: &ServiceCIDR) -> Vec<IpNet> {
    let cidrs = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref()).unwrap_or_default();
    cidrs
        .iter()
        .filter_map(|cidr| {
            let network = cidr.parse().ok();
            if network.is_none() {
                warn!(object = object.metadata.name, cidr, "skipped: not a CIDR");
            }
            network
        })
        .collect()
}

fn eligible(node: &Node) -> NodeEligibility {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    NodeEligibility {
        exists: true,
        deleting: node.metadata.deletion_timestamp.is_some(),
        to_be_deleted: taints.iter().any(|taint| taint.key == TO_BE_DELETED),
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
