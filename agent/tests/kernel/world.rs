//! A cluster as the agent sees it, and the kernel of a [`Lab`] that follows it.

use std::fmt;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use pointsman_agent::iptables::{Flavour, Options, Tools};
use pointsman_agent::kernel::{Reach, SyncError, Synced};
use pointsman_agent::model::{Change, Dirty, Model, NodeFacts, ObjectName};
use pointsman_agent::plan::{Changes, Plan};
use pointsman_agent::sync::Dataplane as _;
use pointsman_agent::sync::node::Dataplane;
use pointsman_agent::{iptables, nftables};
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::node_config::NodeDetectLocal;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{IptablesBackend, Mode, ProxySettings};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::net::{self, Lab, NODE, POD_A, POD_B};

pub const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// A way to write the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Iptables(Flavour),
    Nftables,
}

pub const WAYS: [Way; 3] = [Way::Iptables(Flavour::Nft), Way::Iptables(Flavour::Legacy), Way::Nftables];

impl From<Flavour> for Way {
    fn from(flavour: Flavour) -> Self {
        Self::Iptables(flavour)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Iptables(flavour) => write!(f, "iptables-{flavour}"),
            Self::Nftables => f.write_str("nftables"),
        }
    }
}

impl Way {
    pub fn open(self, lab: &Lab) -> Dataplane {
        match self {
            Self::Iptables(flavour) => {
                Dataplane::Iptables(iptables::Dataplane::new(tools(lab, flavour), &FAMILIES))
            }
            Self::Nftables => {
                let opened = lab.run(NODE, || block_on(nftables::Dataplane::open(&FAMILIES)));
                Dataplane::Nftables(opened.unwrap())
            }
        }
    }
}

pub fn config() -> NodeProxyConfiguration {
    let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
    let config = NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap();
    NodeProxyConfiguration { detect_local: NodeDetectLocal::NodeCIDR {}, ..config }
}

pub struct World {
    pub model: Model,
    pub plan: Plan,
    pub dataplane: Dataplane,
    pub pending: Changes,
    pub runtime: Runtime,
}

pub fn tools(lab: &Lab, flavour: Flavour) -> Tools {
    let backend = match flavour {
        Flavour::Nft => IptablesBackend::NFT,
        Flavour::Legacy => IptablesBackend::Legacy,
    };
    block_on(Tools::detect_with(backend, options(lab))).unwrap()
}

pub fn options(lab: &Lab) -> Options {
    let enter = format!("--net=/run/netns/{}", lab.namespace(NODE));
    Options { wrapper: vec!["nsenter".into(), enter.into()], ..Options::default() }
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

impl World {
    pub fn new(lab: &Lab, way: impl Into<Way>) -> Self {
        Self::with(lab, way, config())
    }

    pub fn with(lab: &Lab, way: impl Into<Way>, config: NodeProxyConfiguration) -> Self {
        let mut world = Self {
            model: Model::new(),
            plan: Plan::new(config, &FAMILIES),
            dataplane: way.into().open(lab),
            pending: Changes::default(),
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        };
        world.apply(Change::Node(NodeFacts {
            name: "node".into(),
            addresses: vec![net::address(NODE, false), net::address(NODE, true)],
            pod_cidrs: vec!["10.244.0.0/24".parse().unwrap(), "fd00:244::/64".parse().unwrap()],
            zone: None,
        }));
        world.apply(Change::ServiceCidrs(vec![
            "10.96.0.0/12".parse().unwrap(),
            "fd00:10:96::/108".parse().unwrap(),
        ]));
        world.apply(Change::LocalAddresses(vec![net::address(NODE, false), net::address(NODE, true)]));
        world
    }

    pub fn apply(&mut self, change: Change) {
        let dirty: Dirty = self.model.apply(change);
        assert_eq!(dirty.skipped, [], "nothing in these tests is malformed");
        let changes = self.plan.update(&self.model, dirty);
        self.pending.merge(changes);
    }

    pub fn configure(&mut self, config: NodeProxyConfiguration) {
        let changes = self.plan.configure(config, &self.model);
        self.pending.merge(changes);
    }

    #[allow(clippy::needless_pass_by_value, reason = "called with json!")]
    pub fn service(&mut self, name: &str, spec: Value) {
        self.apply(Change::ServiceApplied(Box::new(service(name, &spec))));
    }

    pub fn delete_service(&mut self, name: &str) {
        self.apply(Change::ServiceDeleted(ObjectName::new("ns", name)));
    }

    /// Endpoints of a Service, in both families.
    pub fn endpoints(&mut self, service: &str, pods: &[&str]) {
        self.endpoints_at(service, pods, 8080);
    }

    pub fn endpoints_at(&mut self, service: &str, pods: &[&str], port: u16) {
        for v6 in [false, true] {
            self.apply(Change::SliceApplied(Box::new(slice(service, v6, pods, port))));
        }
    }

    pub fn try_sync(&mut self) -> (Synced, Vec<SyncError>) {
        let changes = std::mem::take(&mut self.pending);
        self.runtime.block_on(self.dataplane.sync(&self.plan, &changes))
    }

    pub fn sync(&mut self) -> Synced {
        let (synced, errors) = self.try_sync();
        assert_eq!(errors, []);
        synced
    }

    pub fn differences(&mut self) -> Vec<String> {
        self.runtime.block_on(self.dataplane.verify(&self.plan, Reach::Everything)).unwrap()
    }

    /// Syncs, and proves that the kernel holds what the plan says.
    pub fn settle(&mut self) -> Synced {
        let synced = self.sync();
        assert_eq!(self.differences(), Vec::<String>::new());
        synced
    }
}

pub fn service(name: &str, spec: &Value) -> k8s_openapi::api::core::v1::Service {
    let mut object = json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec});
    if let Some(status) = object["spec"].as_object_mut().unwrap().remove("status") {
        object["status"] = status;
    }
    serde_json::from_value(object).unwrap()
}

/// A slice of a Service in one family.
pub fn slice(service: &str, v6: bool, pods: &[&str], port: u16) -> EndpointSlice {
    let family = if v6 { "IPv6" } else { "IPv4" };
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|pod| {
            let node = if [POD_A, POD_B].contains(pod) { "node" } else { "other" };
            json!({"addresses": [net::address(pod, v6)], "nodeName": node})
        })
        .collect();
    let slice = json!({
        "metadata": {
            "namespace": "ns",
            "name": format!("{service}-{family}"),
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "ports": [
            {"name": "web", "protocol": "TCP", "port": port},
            {"name": "dns", "protocol": "UDP", "port": port},
        ],
        "endpoints": endpoints,
    });
    serde_json::from_value(slice).unwrap()
}
