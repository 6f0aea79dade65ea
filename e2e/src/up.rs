//! Bringing a cluster up.
//!
//! In: a name, the number of nodes and the proxy. Out: a cluster in which all nodes are ready, DNS answers and
//! the proxy runs. Each step does only what is not done yet: on a healthy cluster nothing, on one with dead
//! components it starts those, and after a killed `up` it goes on, or begins anew if the foundation is not whole.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;
use kube::api::PostParams;
use tokio::time::sleep;

use crate::cluster::{Cluster, Component};
use crate::layout::MAX_NODES;
use crate::node::Node;
use crate::progress::step;
use crate::state::{Proxy, Record};
use crate::{addons, control_plane, images, network, state, teardown};

/// What to bring up.
#[derive(Debug, Clone)]
pub struct Options {
    /// The cluster's name.
    pub name: String,
    /// The number of nodes; 2 if not given, or as many as there are.
    pub nodes: Option<u8>,
    /// Whether one more node is a virtual machine whose kernel has IPVS.
    pub ipvs_node: bool,
    /// What serves Services; Pointsman if not given, or what does already.
    pub proxy: Option<Proxy>,
}

impl Options {
    /// A cluster of two nodes.
    #[must_use]
    pub fn new(name: &str, proxy: Proxy) -> Self {
        Self { name: name.to_owned(), nodes: None, ipvs_node: false, proxy: Some(proxy) }
    }
}

/// Programs of this machine that a cluster needs, and the Debian packages that have them.
const PROGRAMS: [(&str, &str); 14] = [
    ("/usr/bin/containerd", "containerd"),
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("/usr/sbin/iptables", "iptables"),
    ("/usr/sbin/nft", "nftables"),
    ("/usr/sbin/ipset", "ipset"),
    ("/usr/sbin/conntrack", "conntrack"),
    ("/bin/ip", "iproute2"),
    ("/usr/bin/nsenter", "util-linux"),
    ("/bin/mount", "mount"),
    ("/bin/busybox", "busybox-static"),
    ("/usr/bin/curl", "curl"),
    ("/bin/nc.openbsd", "netcat-openbsd"),
    ("/usr/bin/ldd", "libc-bin"),
];

impl Cluster {
    /// Brings the cluster up, or what is missing of it.
    pub async fn up(options: &Options) -> Result<Self> {
        check_machine()?;
        let _lock = state::exclusive(&options.name).await?;
        check_options(options)?;
        let archives = step("programs and images", async {
            Ok([images::pause().await?, images::coredns().await?, images::test_server().await?])
        })
        .await?;
        let record = record(options).await?;
        let cluster = Self::on_foundation(&options.name, record).await?;
        if cluster.record.ipvs_node {
            step("virtual machine", cluster.start_machine()).await?;
        }
        step("control plane and containerd", async {
            tokio::try_join!(cluster.start_control_plane(), cluster.start_containerds(&archives)).map(drop)
        })
        .await?;
        step("nodes ready", cluster.start_kubelets()).await?;
        step("DNS ready", addons::install_coredns(&cluster)).await?;
        match cluster.proxy().clone() {
            Proxy::KubeProxy(mode) => {
                cluster.start_kube_proxies(&mode).await?;
            }
            Proxy::Pointsman => addons::install_pointsman(&cluster, &[]).await?,
            Proxy::None => {}
        }
        Ok(cluster)
    }

    /// Opens the cluster after making its namespaces, links and cgroups if need be. They are made whole or not at
    /// all: what a killed `up` or a reboot left is removed first.
    async fn on_foundation(name: &str, mut record: Record) -> Result<Self> {
        if record.foundation && namespace_is_mounted(&record.layout(name)?.netns("fabric")) {
            return Self::with_record(name, record).await;
        }
        step("namespaces, links and cgroups", async {
            record.foundation = false;
            record.store(name)?;
            teardown::reset(name).await?;
            let mut cluster = Self::with_record(name, record).await?;
            let nodes = cluster.nodes();
            let names: Vec<String> = nodes.iter().map(|node| node.name().to_owned()).collect();
            cluster.cgroup.create(&names)?;
            network::create(&cluster.layout).await?;
            for (number, node) in (1..).zip(&nodes) {
                if node.is_machine() {
                    network::create_tap(&cluster.layout, number).await?;
                } else {
                    network::create_node(&cluster.layout, number).await?;
                    network::route_pods(&cluster.layout, number, cluster.record.all_nodes()).await?;
                }
                node.create_mounts().await?;
                node.configure()?;
            }
            cluster.record.foundation = true;
            cluster.record.store(name)?;
            Ok(cluster)
        })
        .await
    }

    async fn start_machine(&self) -> Result<()> {
        let node = self.nodes().into_iter().find(Node::is_machine).context("no virtual machine")?;
        let machine = Component::Machine(node.name().to_owned());
        self.start(&machine).await?;
        let handle = self.node(node.name())?;
        self.wait_until(&[machine], async || Ok(handle.exec(&["true"]).await.is_ok())).await
    }

    async fn start_control_plane(&self) -> Result<()> {
        self.start(&Component::Etcd).await?;
        self.start(&Component::ApiServer).await?;
        self.wait_for_api().await?;
        self.start(&Component::ControllerManager).await?;
        self.start(&Component::Scheduler).await.map(drop)
    }

    /// Waits until the API server serves.
    pub async fn wait_for_api(&self) -> Result<()> {
        let client = self.client();
        self.wait_until(&[Component::ApiServer, Component::Etcd], async || {
            Ok(control_plane::is_ready(&client).await)
        })
        .await
    }

    async fn start_containerds(&self, archives: &[std::path::PathBuf]) -> Result<()> {
        let nodes = self.nodes();
        try_join_all(nodes.iter().map(async |node| {
            let containerd = Component::Containerd(node.name().to_owned());
            self.start(&containerd).await?;
            self.wait_until(&[containerd], async || Ok(node.ctr(&["version"]).await.is_ok())).await?;
            for archive in archives {
                node.import(archive).await?;
            }
            anyhow::Ok(())
        }))
        .await
        .map(drop)
    }

    async fn start_kubelets(&self) -> Result<()> {
        let api: Api<NodeObject> = Api::all(self.client());
        let nodes = self.nodes();
        let mut kubelets = Vec::new();
        for node in &nodes {
            if api.get_opt(node.name()).await?.is_none() {
                let object: NodeObject = serde_json::from_value(node.object())?;
                api.create(&PostParams::default(), &object).await?;
            }
            let kubelet = Component::Kubelet(node.name().to_owned());
            self.start(&kubelet).await?;
            kubelets.push(kubelet);
        }
        self.wait_until(&kubelets, async || {
            let list = api.list(&kube::api::ListParams::default()).await?;
            let ready = list.items.iter().filter(|node| is_ready(node)).count();
            Ok(ready >= nodes.len())
        })
        .await
    }

    /// Starts kube-proxy in a mode on every node and waits until it has synchronised.
    pub async fn start_kube_proxies(&self, mode: &str) -> Result<()> {
        let mut cluster = self.clone();
        cluster.record.proxy = Proxy::KubeProxy(mode.to_owned());
        let nodes = cluster.nodes();
        let all = try_join_all(nodes.iter().map(async |node| {
            let proxy = Component::KubeProxy(node.name().to_owned());
            cluster.start(&proxy).await?;
            let handle = cluster.node(node.name())?;
            let url = "http://127.0.0.1:10256/healthz";
            cluster
                .wait_until(&[proxy], async || {
                    Ok(handle.exec(&["curl", "-sf", "--max-time", "2", url]).await.is_ok())
                })
                .await
        }));
        step(&format!("kube-proxy in {mode} mode"), all).await.map(drop)
    }

    /// Waits until `condition` holds. An error if one of `components` ends meanwhile or patience does.
    pub async fn wait_until(
        &self,
        components: &[Component],
        condition: impl AsyncFn() -> Result<bool>,
    ) -> Result<()> {
        let start = Instant::now();
        loop {
            let outcome = condition().await;
            if matches!(outcome, Ok(true)) {
                return Ok(());
            }
            for component in components {
                if self.running(component).is_none() {
                    bail!("{component} has ended; the end of its log:\n{}", self.log_tail(component));
                }
            }
            if start.elapsed() > Duration::from_mins(2) {
                let logs: Vec<String> =
                    components.iter().map(|c| format!("{c}:\n{}", self.log_tail(c))).collect();
                let error = outcome.err().map(|error| format!("{error:#}")).unwrap_or_default();
                bail!("not so after two minutes. {error}\n{}", logs.join("\n"));
            }
            sleep(Duration::from_millis(150)).await;
        }
    }
}

fn is_ready(node: &NodeObject) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
}

/// The record of the cluster, made if this is the first time.
async fn record(options: &Options) -> Result<Record> {
    let nodes = options.nodes.unwrap_or(2);
    let (name, ipvs_node) = (&options.name, options.ipvs_node);
    state::record_or_create(name, nodes, ipvs_node, options.proxy.clone().unwrap_or_default()).await
}

/// Refuses what cannot be, and what the cluster is not, before anything is done.
fn check_options(options: &Options) -> Result<()> {
    if let Some(nodes) = options.nodes {
        ensure!((1..MAX_NODES).contains(&nodes), "{nodes} nodes: give 1 to {}", MAX_NODES - 1);
    }
    let Some(record) = Record::load(&options.name)? else { return Ok(()) };
    let same_nodes = options.nodes.is_none_or(|nodes| nodes == record.nodes);
    // As without a number of nodes: not to ask for it is to take what there is.
    let same_nodes = same_nodes && (record.ipvs_node || !options.ipvs_node);
    let same_proxy = options.proxy.as_ref().is_none_or(|proxy| *proxy == record.proxy);
    ensure!(
        same_nodes && same_proxy,
        "the cluster {:?} exists with {} nodes{} and the proxy {}: take it down first, or give another name",
        options.name,
        record.nodes,
        if record.ipvs_node { " and one with IPVS" } else { "" },
        record.proxy
    );
    Ok(())
}

fn check_machine() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "a cluster needs root: namespaces, mounts and cgroups");
    let missing: Vec<&str> =
        PROGRAMS.iter().filter(|(path, _)| !Path::new(path).exists()).map(|(_, package)| *package).collect();
    ensure!(
        missing.is_empty(),
        "these Debian packages are missing: apt-get install {} (hack/cluster does it by itself)",
        missing.join(" ")
    );
    Ok(())
}

/// Whether a namespace is mounted on the file (after a reboot only the file is left).
fn namespace_is_mounted(file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev()).ok();
    let parent = file.parent().unwrap_or(file);
    device(file).is_some_and(|own| Some(own) != device(parent))
}

/// A short text that says how to go on with the cluster.
pub fn next_steps(cluster: &Cluster) -> Result<String> {
    let name = cluster.layout().name();
    let option = if name == "pointsman" { String::new() } else { format!(" --name {name}") };
    let names: Vec<String> = cluster.nodes().iter().map(|node| node.name().to_owned()).collect();
    let first = names.first().context("a cluster has nodes")?;
    Ok(format!(
        "The cluster {name:?} is up: {}, proxy {}.\n  eval \"$(hack/cluster env{option})\"; kubectl get nodes\n  \
         hack/cluster node{option} {first} -- ip route\n  hack/cluster client{option} -- curl -s http://{}:NODEPORT/\n  \
         hack/cluster down{option}",
        names.join(", "),
        cluster.proxy(),
        cluster.nodes().first().map(|node| node.addresses().v4.to_string()).unwrap_or_default(),
    ))
}
