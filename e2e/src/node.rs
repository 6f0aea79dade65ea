//! A node: its mount namespace or its virtual machine, CNI, containerd and kubelet.
//!
//! In: a layout, a node number and the combined binary. Out: files in the node's folder and command lines. The
//! node's own mount namespace gives it a /run, /var/log, /var/lib/kubelet, /var/lib/cni and /var/lib/pointsman-agent
//! of its own (the lock of iptables, the sockets of containerd, pod logs, the agent's checkpoint), and every mount of
//! its pods is gone with it. A virtual machine has its own anyway, and is spoken to over the network.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use crate::command::{command, output};
use crate::files::write;
use crate::layout::{Addresses, Layout};
use crate::uml::Machine;

/// The image that holds each pod's namespaces.
pub const PAUSE_IMAGE: &str = "docker.io/pointsman/pause:dev";

/// Makes the mount namespace. Propagation inside is shared, as kubelet and containerd expect, but ends there.
const MOUNTS: &str = r#"
set -e
dir=$1
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns
mount --bind "$dir/log" /var/log
mount --bind "$dir/kubelet" /var/lib/kubelet
mount --bind "$dir/cni-state" /var/lib/cni
mount --bind "$dir/agent-state" /var/lib/pointsman-agent
mount --make-rshared /
"#;

/// What a virtual machine does until its end, after its network: `%DIR%` is the node's folder. As in [`MOUNTS`], but all in
/// memory. kubelet does not start without the speed and the cache of a processor.
const MACHINE: &str = r#"
for folder in /var/log /var/lib/kubelet /var/lib/cni /var/lib/pointsman-agent %DIR%/containerd; do
  mkdir -p "$folder"
  mount -t tmpfs tmpfs "$folder"
done
mount --make-rshared /
echo +cpu +io +memory +pids >/sys/fs/cgroup/cgroup.subtree_control
{ cat /proc/cpuinfo; printf 'cpu MHz\t\t: 1000.000\ncache size\t: 1024 KB\n'; } >/run/cpuinfo
mount --bind /run/cpuinfo /proc/cpuinfo
hostname %NAME%
exec %SERVER% remote-serve %ADDRESS% %PEER%
"#;

/// Where a virtual machine takes commands.
const REMOTE_PORT: u16 = 10_111;

/// Its memory in MiB: images, containers' files and pods.
const MACHINE_MEMORY: u32 = 4096;

/// The configuration file of kube-proxy in `mode` on `node`: its defaults, but for what must be told.
#[must_use]
pub fn kube_proxy_configuration(mode: &str, node: &str, kubeconfig: &Path, pods: &str) -> serde_json::Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": kubeconfig},
        "clusterCIDR": pods,
        // Limits of the whole machine, which a namespace cannot set.
        "conntrack": {"maxPerCore": 0, "min": 0},
    })
}

/// One node of a cluster.
#[derive(Debug, Clone)]
pub struct Node {
    layout: Layout,
    number: u8,
    name: String,
    remote: Option<PathBuf>,
}

impl Node {
    /// The node with this number, counted from 1. `remote` is the test server, by which commands get to a virtual machine;
    /// none for a node in namespaces.
    #[must_use]
    pub fn new(layout: &Layout, number: u8, remote: Option<PathBuf>) -> Self {
        Self { layout: layout.clone(), number, name: Layout::node_name(number), remote }
    }

    /// Whether it is a virtual machine.
    #[must_use]
    pub fn is_machine(&self) -> bool {
        self.remote.is_some()
    }

    /// Its name in Kubernetes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its addresses.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.layout.node(self.number)
    }

    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.layout.node_dir(&self.name)
    }

    /// The name under which one of its processes is recorded.
    #[must_use]
    pub fn process(&self, program: &str) -> String {
        format!("{}.{program}", self.name)
    }

    fn socket(&self) -> PathBuf {
        self.dir().join("containerd.sock")
    }

    fn remote_address(&self) -> String {
        format!("{}:{REMOTE_PORT}", self.addresses().v4)
    }

    /// The words that enter the network namespace in which the bridge is.
    fn enter_fabric(&self) -> Vec<String> {
        let net = format!("--net={}", self.layout.netns("fabric").display());
        ["nsenter", &net, "--"].map(str::to_owned).to_vec()
    }

    /// The words that run the words after them on the node: in its namespaces, or in its virtual machine.
    #[must_use]
    pub fn enter(&self) -> Vec<String> {
        if let Some(remote) = &self.remote {
            let mut words = self.enter_fabric();
            words.extend([remote.display().to_string(), "remote".to_owned(), self.remote_address()]);
            return words;
        }
        let net = format!("--net={}", self.layout.netns(&self.name).display());
        let mount = format!("--mount={}", self.layout.mntns(&self.name).display());
        ["nsenter", &net, &mount, "--"].map(str::to_owned).to_vec()
    }

    /// The words that run the virtual machine, one of `nodes`.
    pub async fn machine(&self, nodes: u8) -> Result<Vec<String>> {
        let server = self.remote.as_ref().with_context(|| format!("{} is no virtual machine", self.name))?;
        let script = MACHINE
            .replace("%DIR%", &self.dir().display().to_string())
            .replace("%NAME%", &self.name)
            .replace("%SERVER%", &server.display().to_string())
            .replace("%ADDRESS%", &self.remote_address())
            // The bridge's own address: whoever has it is root here.
            .replace("%PEER%", &self.layout.gateway().v4.to_string());
        let network = crate::network::machine_script(&self.layout, self.number, nodes);
        let arguments = vec![format!("eth0=tuntap,{}", self.name)];
        let machine = Machine { memory: MACHINE_MEMORY, arguments, ..Machine::default() };
        let mut words = self.enter_fabric();
        words.extend(machine.words(&format!("set -e\n{network}{script}")).await?);
        Ok(words)
    }

    /// Makes the mount namespace. It must not exist yet.
    pub async fn create_mounts(&self) -> Result<()> {
        let dir = self.dir();
        for part in ["log", "kubelet", "cni-state", "agent-state", "cni", "containerd"] {
            let path = dir.join(part);
            fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        }
        if self.is_machine() {
            return Ok(());
        }
        // Mount points, as they would be on a real node.
        for mount_point in ["/var/lib/kubelet", "/var/lib/cni", "/var/lib/pointsman-agent"] {
            fs::create_dir_all(mount_point).with_context(|| format!("creating {mount_point}"))?;
        }
        let file = self.layout.mntns(&self.name);
        fs::write(&file, "").with_context(|| format!("creating {}", file.display()))?;
        // A mount namespace is kept on a file only of an older namespace, and since Linux 6.18 each processor numbers them on its
        // own: in a namespace other than the machine's first, as in a container, one processor may refuse what another does.
        let mut refused = None;
        for processor in 0..std::thread::available_parallelism()?.get() {
            let mut unshare = command("taskset", ["--cpu-list", &processor.to_string(), "unshare"]);
            unshare.arg(format!("--mount={}", file.display()));
            unshare.args(["--propagation=private", "sh", "-c", MOUNTS, "sh"]).arg(&dir);
            match output(&mut unshare).await {
                Ok(_) => return Ok(()),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        let refused = refused.context("no processor")?;
        Err(refused.context(format!("creating the mount namespace of {}", self.name)))
    }

    /// Writes the configuration of CNI, containerd and kubelet.
    pub fn configure(&self) -> Result<()> {
        let dir = self.dir();
        write(&dir.join("cni/10-pods.conflist"), &self.cni().to_string())?;
        write(&dir.join("containerd.toml"), &self.containerd_configuration())?;
        write(&dir.join("kubelet.json"), &self.kubelet_configuration().to_string())
    }

    fn cni(&self) -> serde_json::Value {
        let pods = self.layout.node_pods(self.number);
        json!({
            "cniVersion": "1.0.0", "name": "pods",
            "plugins": [{
                "type": "bridge", "bridge": "cni0",
                "isGateway": true, "isDefaultGateway": true, "hairpinMode": true, "ipMasq": false,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": pods.v4}], [{"subnet": pods.v6}]]},
            }],
        })
    }

    fn containerd_configuration(&self) -> String {
        let dir = self.dir();
        // Without restrict_oom_score_adj every sandbox fails where root lacks CAP_SYS_RESOURCE.
        format!(
            r#"version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  sandbox_image = "{PAUSE_IMAGE}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
"#,
            root = dir.join("containerd").display(),
            socket = self.socket().display(),
            cni = dir.join("cni").display(),
        )
    }

    fn kubelet_configuration(&self) -> serde_json::Value {
        let cgroup = if self.is_machine() {
            "/".to_owned()
        } else {
            format!("/{}/{}", self.layout.cgroup(), self.name)
        };
        let never_evict = json!({
            "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%",
        });
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": self.addresses().v4,
            "clusterDNS": self.layout.dns().both(),
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": format!("unix://{}", self.socket().display()),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup,
            "failCgroupV1": false,
            "enforceNodeAllocatable": [],
            "failSwapOn": false,
            // The proxy is what is tested: the kubelet must not add rules that it relies on.
            "makeIPTablesUtilChains": false,
            "resolvConf": "",
            "maxPods": 250,
            "evictionHard": never_evict,
            // Images cannot be pulled again.
            "imageGCHighThresholdPercent": 100,
        })
    }

    /// The Node object, with the pod networks that CNI uses. The kubelet finds it and only adds its status.
    #[must_use]
    pub fn object(&self) -> serde_json::Value {
        let pods = self.layout.node_pods(self.number);
        let kernel = if self.is_machine() { "ipvs" } else { "host" };
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": self.name, "labels": {
                "kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux",
                "pointsman.dev/kernel": kernel,
                "topology.kubernetes.io/region": "testbed",
                "topology.kubernetes.io/zone": format!("zone{}", self.number),
            }},
            "spec": {"podCIDR": pods.v4, "podCIDRs": [pods.v4, pods.v6]},
        })
    }

    /// The words that run containerd.
    #[must_use]
    pub fn containerd(&self) -> Vec<String> {
        let mut words = self.enter();
        let configuration = self.dir().join("containerd.toml");
        words.extend(["containerd".into(), "--config".into(), configuration.display().to_string()]);
        words
    }

    /// The words that run the kubelet.
    #[must_use]
    pub fn kubelet(&self, binary: &Path, kubeconfig: &Path) -> Vec<String> {
        let [v4, v6] = self.addresses().both();
        let mut words = self.enter();
        words.extend([
            binary.display().to_string(),
            "kubelet".into(),
            format!("--config={}", self.dir().join("kubelet.json").display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={v4},{v6}"),
        ]);
        words
    }

    /// The words that run kube-proxy in `mode`, after writing its configuration.
    pub fn kube_proxy(&self, binary: &Path, kubeconfig: &Path, mode: &str) -> Result<Vec<String>> {
        let configuration =
            kube_proxy_configuration(mode, &self.name, kubeconfig, &self.layout.pods().list());
        let path = self.dir().join("kube-proxy.json");
        write(&path, &configuration.to_string())?;
        let mut words = self.enter();
        words.extend([
            binary.display().to_string(),
            "kube-proxy".into(),
            format!("--config={}", path.display()),
        ]);
        Ok(words)
    }

    /// Runs `ctr` for Kubernetes' containers on this node.
    pub async fn ctr(&self, args: &[&str]) -> Result<String> {
        let enter = self.enter();
        let mut ctr = command(&enter[0], &enter[1..]);
        ctr.args(["ctr", "--address"]).arg(self.socket()).args(["--namespace", "k8s.io"]).args(args);
        output(&mut ctr).await
    }

    /// Imports the images of a tar archive, unless this very file was imported before.
    pub async fn import(&self, archive: &Path) -> Result<()> {
        let known = self.dir().join("images");
        fs::create_dir_all(&known).with_context(|| format!("creating {}", known.display()))?;
        let meta = fs::metadata(archive)
            .with_context(|| format!("{}: not an image archive that can be read", archive.display()))?;
        let stamp = crate::stamp::Inputs::new()
            .word(&archive.to_string_lossy())
            .word(&format!("{} {:?}", meta.len(), meta.modified().ok()))
            .hash();
        let marker = known.join(stamp);
        if !marker.exists() {
            self.ctr(&["images", "import", &archive.to_string_lossy()]).await?;
            fs::write(&marker, "").with_context(|| format!("writing {}", marker.display()))?;
        }
        Ok(())
    }
}
