//! A running cluster: what tests and the command line do with it.
//!
//! In: a name. Out: clients, commands run on nodes, in pods and outside, images loaded, components killed and
//! started again. [`crate::up`] brings it up.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::cgroup::Cgroup;
use crate::command::{command, output, output_with_input};
use crate::control_plane::{self, ControlPlane};
use crate::layout::Layout;
use crate::node::Node;
use crate::pki::{Identity, Pki};
use crate::process::Processes;
use crate::state::{Proxy, Record};
use crate::{artifacts, teardown};

/// A process of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Component {
    /// The store of the control plane.
    Etcd,
    /// The API server.
    ApiServer,
    /// The controller manager.
    ControllerManager,
    /// The scheduler.
    Scheduler,
    /// The virtual machine that is the node of this name.
    Machine(String),
    /// containerd on the node of this name.
    Containerd(String),
    /// The kubelet on the node of this name.
    Kubelet(String),
    /// kube-proxy on the node of this name.
    KubeProxy(String),
}

impl std::fmt::Display for Component {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Etcd => f.write_str("etcd"),
            Self::ApiServer => f.write_str("kube-apiserver"),
            Self::ControllerManager => f.write_str("kube-controller-manager"),
            Self::Scheduler => f.write_str("kube-scheduler"),
            Self::Machine(node) => write!(f, "{node}.machine"),
            Self::Containerd(node) => write!(f, "{node}.containerd"),
            Self::Kubelet(node) => write!(f, "{node}.kubelet"),
            Self::KubeProxy(node) => write!(f, "{node}.kube-proxy"),
        }
    }
}

/// A cluster.
#[derive(Clone)]
pub struct Cluster {
    pub(crate) layout: Layout,
    pub(crate) record: Record,
    pub(crate) binary: PathBuf,
    pub(crate) plane: ControlPlane,
    pub(crate) processes: Processes,
    pub(crate) cgroup: Cgroup,
    client: kube::Client,
    /// What gets commands to a virtual machine, if there is one.
    remote: Option<PathBuf>,
}

impl Cluster {
    /// Opens the cluster `name`, which was brought up before.
    pub async fn open(name: &str) -> Result<Self> {
        let record = Record::load(name)?;
        let record = record.with_context(|| format!("there is no cluster {name:?}: bring it up first"))?;
        Self::with_record(name, record).await
    }

    /// Prepares files and clients of a cluster; starts nothing.
    pub(crate) async fn with_record(name: &str, record: Record) -> Result<Self> {
        let layout = record.layout(name)?;
        let binary = artifacts::controlplane().await?;
        let host = layout.host();
        let [v4, v6] = host.both();
        let mut identities: Vec<Identity> =
            ["kube-controller-manager", "kube-scheduler", "kube-proxy"].map(Identity::component).to_vec();
        identities.push(Identity::admin());
        identities.extend((1..=record.all_nodes()).map(|number| Identity::node(&Layout::node_name(number))));
        let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
        let addresses = [v4, v6, layout.service(1).v4.into(), layout.service(1).v6.into(), loopback];
        let pki = Pki::ensure(&layout.dir().join("pki"), v4, &addresses, &identities)?;
        let client = control_plane::client(&pki.kubeconfig(&Identity::admin())).await?;
        let cgroup = Cgroup::new(&layout.cgroup())?;
        let processes = Processes::new(&layout.dir(), cgroup.system_procs())?;
        let plane = ControlPlane {
            loopback: layout.loopback(),
            address: v4,
            service_networks: layout.services().list(),
            pod_networks: layout.pods().list(),
            pki,
        };
        let remote = if record.ipvs_node { Some(artifacts::testserver().await?) } else { None };
        Ok(Self { layout, record, binary, plane, processes, cgroup, client, remote })
    }

    /// Takes the cluster `name` down to nothing.
    pub async fn down(name: &str) -> Result<()> {
        let _lock = crate::state::exclusive(name).await?;
        teardown::remove(name).await
    }

    /// Names and addresses.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What serves Services.
    #[must_use]
    pub fn proxy(&self) -> &Proxy {
        &self.record.proxy
    }

    /// The binary of all Kubernetes components.
    #[must_use]
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// A client that may do everything.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.plane.pki.kubeconfig(&Identity::admin())
    }

    /// The address of the API server, `https://ADDRESS:PORT`, that hosts and pods reach without any Service.
    #[must_use]
    pub fn api_endpoint(&self) -> String {
        format!("https://{}:{}", self.layout.host().v4, control_plane::API_PORT)
    }

    /// Runs kubectl and returns what it prints.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_with_input(args, "").await
    }

    /// Runs kubectl with `input` on its standard input and returns what it prints.
    pub async fn kubectl_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let mut kubectl = command(&self.binary, ["kubectl"]);
        kubectl.args(args).env("KUBECONFIG", self.kubeconfig());
        output_with_input(&mut kubectl, input).await
    }

    /// Applies manifests (YAML or JSON).
    pub async fn apply(&self, manifests: &str) -> Result<()> {
        self.kubectl_with_input(&["apply", "-f", "-"], manifests).await.map(drop)
    }

    /// All nodes.
    #[must_use]
    pub fn nodes(&self) -> Vec<Node> {
        let remote = |number| self.remote.clone().filter(|_| number > self.record.nodes);
        (1..=self.record.all_nodes()).map(|number| Node::new(&self.layout, number, remote(number))).collect()
    }

    /// The node of this name.
    pub fn node(&self, name: &str) -> Result<NodeHandle<'_>> {
        let node = self.nodes().into_iter().find(|node| node.name() == name);
        let node = node.with_context(|| {
            let names: Vec<String> = self.nodes().iter().map(|node| node.name().to_owned()).collect();
            format!("there is no node {name:?}, only {}", names.join(", "))
        })?;
        Ok(NodeHandle { cluster: self, node })
    }

    /// A command that runs `words` outside the nodes, on a machine of their network.
    #[must_use]
    pub fn outside_command(&self, words: &[&str]) -> Command {
        let net = format!("--net={}", self.layout.netns("client").display());
        self.entering(&["nsenter".to_owned(), net, "--".to_owned()], words)
    }

    /// Runs `words` outside the nodes and returns what they print.
    pub async fn outside(&self, words: &[&str]) -> Result<String> {
        output(&mut self.outside_command(words)).await
    }

    /// A command in the cluster's cgroup, so that it does not survive the cluster.
    fn entering(&self, enter: &[String], words: &[&str]) -> Command {
        let mut sh = command("sh", ["-c", "echo $$ >\"$1\" && shift && exec \"$@\"", "sh"]);
        sh.arg(self.cgroup.system_procs()).args(enter).args(words);
        sh
    }

    /// Runs `words` in a pod and returns what they print.
    pub async fn in_pod(&self, namespace: &str, pod: &str, words: &[&str]) -> Result<String> {
        let mut args = vec!["exec", "--namespace", namespace, pod, "--"];
        args.extend(words);
        self.kubectl(&args).await
    }

    /// Imports the images of a docker-archive or OCI tar on every node.
    pub async fn load(&self, archive: &Path) -> Result<()> {
        let archive = std::path::absolute(archive)?;
        let nodes = self.nodes();
        let imports = nodes.iter().map(|node| node.import(&archive));
        futures::future::try_join_all(imports).await.map(drop)
    }

    /// The number of a component's process, if it runs.
    #[must_use]
    pub fn running(&self, component: &Component) -> Option<i32> {
        self.processes.running(&component.to_string())
    }

    /// Kills a component with SIGKILL and waits until it is gone.
    pub async fn kill(&self, component: &Component) -> Result<()> {
        self.processes.kill(&component.to_string()).await
    }

    /// Sends a signal to a component.
    pub fn signal(&self, component: &Component, signal: Signal) -> Result<()> {
        self.processes.signal(&component.to_string(), signal)
    }

    /// Starts a component unless it runs; says whether it did. Does not wait until it is ready.
    pub async fn start(&self, component: &Component) -> Result<bool> {
        let data = self.layout.dir().join("etcd");
        let pki = &self.plane.pki;
        let mut words = match component {
            Component::Etcd => ControlPlane::etcd(self.plane.loopback, &data),
            Component::ApiServer => self.plane.api_server(),
            Component::ControllerManager => self.plane.controller_manager(),
            Component::Scheduler => self.plane.scheduler(),
            Component::Machine(node) => self.node(node)?.node.machine(self.record.all_nodes()).await?,
            Component::Containerd(node) => self.node(node)?.node.containerd(),
            Component::Kubelet(node) => {
                self.node(node)?.node.kubelet(&self.binary, &pki.kubeconfig(&Identity::node(node)))
            }
            Component::KubeProxy(node) => {
                let Proxy::KubeProxy(mode) = &self.record.proxy else {
                    anyhow::bail!("this cluster's proxy is {}, not kube-proxy", self.record.proxy);
                };
                let kubeconfig = pki.kubeconfig(&Identity::component("kube-proxy"));
                let node = self.node(node)?;
                // Who asks for a node with IPVS has no IPVS on the machine itself.
                let elsewhere = mode == "ipvs" && self.record.ipvs_node && !node.is_machine();
                let mode = if elsewhere { "iptables" } else { mode };
                node.kube_proxy(&self.binary, &kubeconfig, mode)?
            }
        };
        let of_control_plane =
            [Component::Etcd, Component::ApiServer, Component::ControllerManager, Component::Scheduler];
        if of_control_plane.contains(component) {
            words.insert(0, self.binary.display().to_string());
        }
        self.processes.start(&component.to_string(), &words).await
    }

    /// The end of a component's log, for a message.
    #[must_use]
    pub fn log_tail(&self, component: &Component) -> String {
        self.processes.log_tail(&component.to_string())
    }
}

/// A node of a cluster.
pub struct NodeHandle<'a> {
    cluster: &'a Cluster,
    node: Node,
}

impl NodeHandle<'_> {
    /// A command that runs `words` in the node's network and mount namespaces.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        self.cluster.entering(&self.node.enter(), words)
    }

    /// Runs `words` on the node and returns what they print.
    pub async fn exec(&self, words: &[&str]) -> Result<String> {
        output(&mut self.command(words)).await
    }

    /// Runs `words` on the node with `input` on standard input and returns what they print.
    pub async fn exec_with_input(&self, words: &[&str], input: &str) -> Result<String> {
        output_with_input(&mut self.command(words), input).await
    }
}

impl std::ops::Deref for NodeHandle<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}
