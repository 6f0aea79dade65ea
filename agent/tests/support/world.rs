//! A cluster as the agent sees it, and the kernel of a [`Lab`] that follows it.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use pointsman_agent::iptables::{Flavour, Options, Tools};
use pointsman_agent::kernel::{Reach, SyncError, Synced};
use pointsman_agent::model::{Change, Model, NodeFacts, ObjectName};
use pointsman_agent::plan::{Changes, Plan};
use pointsman_agent::sync::Dataplane as _;
use pointsman_agent::sync::node::Dataplane;
use pointsman_agent::sysctl::{Machine, Sysctls};
use pointsman_agent::userspace::counters::Counters;
use pointsman_agent::userspace::workers::THREADS;
use pointsman_agent::{iptables, ipvs, nftables, userspace};
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{IptablesBackend, IpvsScheduler, Mode, ProxySettings};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::lab::{Lab, NODE, ip};
use super::scenario::hosts::{self, Host, NODES};

pub const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// A way to write the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Iptables(Flavour),
    Nftables,
    /// Only in a kernel that has IPVS, and its tools work where the thread is.
    Ipvs,
    /// Sockets are opened where the thread is, so the thread goes to the node and stays there.
    Userspace,
}

/// Those in which the kernel passes packets on.
pub const IN_KERNEL: [Way; 3] = [Way::Iptables(Flavour::Nft), Way::Iptables(Flavour::Legacy), Way::Nftables];

pub const WAYS: [Way; 4] =
    [Way::Iptables(Flavour::Nft), Way::Iptables(Flavour::Legacy), Way::Nftables, Way::Userspace];

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
            Self::Ipvs => f.write_str("ipvs"),
            Self::Userspace => f.write_str("userspace"),
        }
    }
}

impl Way {
    pub fn mode(self) -> Mode {
        match self {
            Self::Iptables(_) => Mode::Iptables,
            Self::Nftables => Mode::Nftables,
            Self::Ipvs => Mode::Ipvs,
            Self::Userspace => Mode::Userspace,
        }
    }

    pub fn open(self, lab: &Lab) -> Dataplane {
        match self {
            Self::Iptables(flavour) => {
                Dataplane::Iptables(iptables::Dataplane::new(tools(lab, flavour), &FAMILIES))
            }
            Self::Nftables => {
                let opened = lab.run(NODE, || block_on(nftables::Dataplane::open(&FAMILIES)));
                Dataplane::Nftables(opened.unwrap())
            }
            Self::Ipvs => {
                lab.enter(NODE);
                // Some belong to the whole machine.
                let _ = Sysctls::new(Path::new("/proc/sys")).prepare_ipvs(Machine::this());
                let tools = block_on(Tools::detect(IptablesBackend::Legacy)).unwrap();
                let opened = block_on(ipvs::Dataplane::open(tools, &FAMILIES, IpvsScheduler::Rr));
                Dataplane::Ipvs(Box::new(opened.unwrap()))
            }
            Self::Userspace => {
                lab.enter(NODE);
                let opened = block_on(userspace::Dataplane::open(&FAMILIES, Counters::default(), THREADS));
                Dataplane::Userspace(opened.unwrap())
            }
        }
    }
}

pub fn config() -> NodeProxyConfiguration {
    let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
    NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap()
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
    /// The usual node.
    pub fn new(lab: &Lab, way: impl Into<Way>) -> Self {
        Self::usual(way.into().open(lab))
    }

    /// The usual node, with this data plane.
    pub fn usual(dataplane: Dataplane) -> Self {
        let mut world = Self::over(dataplane);
        let own = FAMILIES.into_iter().flat_map(hosts::node_addresses);
        world.apply(Change::Node(NodeFacts {
            name: NODES[0].into(),
            addresses: FAMILIES.iter().map(|family| hosts::node_addresses(*family)[0]).collect(),
            pod_cidrs: hosts::both(hosts::POD_CIDRS[0]).to_vec(),
            zone: None,
        }));
        world.apply(Change::ServiceCidrs(hosts::both(hosts::SERVICE_CIDR).to_vec()));
        world.apply(Change::LocalAddresses(own.collect()));
        world
    }

    /// A node that nothing is known of, with this data plane.
    pub fn over(dataplane: Dataplane) -> Self {
        Self {
            model: Model::new(),
            plan: Plan::new(config(), &FAMILIES),
            dataplane,
            pending: Changes::default(),
            // What a proxy does goes on beside the test.
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap(),
        }
    }

    pub fn apply(&mut self, change: Change) {
        let dirty = self.model.apply(change);
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
        for family in FAMILIES {
            self.apply(Change::SliceApplied(Box::new(slice(service, family, pods))));
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
pub fn slice(service: &str, family: IpFamily, pods: &[&str]) -> EndpointSlice {
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|pod| {
            let host = Host::named(pod).unwrap();
            json!({"addresses": [host.address(family)], "nodeName": host.node.map(|node| NODES[node])})
        })
        .collect();
    let family = format!("{family:?}");
    let slice = json!({
        "metadata": {
            "namespace": "ns",
            "name": format!("{service}-{family}"),
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 8080},
            {"name": "dns", "protocol": "UDP", "port": 8080},
        ],
        "endpoints": endpoints,
    });
    serde_json::from_value(slice).unwrap()
}

/// The Service that many tests have.
pub fn spec() -> serde_json::Value {
    json!({
        "type": "NodePort",
        "clusterIPs": ["172.30.0.80", "fd00:ac:1e::50"],
        "ports": [{"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080}],
    })
}

/// Its ClusterIP and port.
pub fn cluster_ip() -> SocketAddr {
    (ip("172.30.0.80"), 80).into()
}
