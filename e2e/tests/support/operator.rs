//! The operator's own process on a bare API server with the chart installed, with the rights that the chart gives it.
//!
//! The tests of one binary share the server and take turns. Nobody collects garbage there, so what vanishes has been
//! swept by the operator.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use pointsman_crds::{NodeProxyConfiguration, ProxyConfiguration, ProxyConfigurationStatus, ProxyNodeStatus};
use pointsman_e2e::api_server::ApiServer;
use pointsman_e2e::command::command;
use serde_json::{Value, json};
use tokio::process::Child;
use tokio::sync::{Mutex, MutexGuard, OnceCell};
use tokio::time::sleep;

use super::charts::{NAMESPACE, chart, helm};
use super::server::server;

/// A cluster without agents, in which one test has its turn.
pub struct Stage {
    _turn: MutexGuard<'static, ()>,
    pub server: &'static ApiServer,
    pub nodes: Api<Node>,
    pub config_maps: Api<ConfigMap>,
    pub layers: Api<ProxyConfiguration>,
    pub reports: Api<ProxyNodeStatus>,
    pub leases: Api<Lease>,
    pub client: Client,
    dir: tempfile::TempDir,
}

impl Stage {
    /// Waits for its turn, and clears the stage.
    pub async fn enter() -> Self {
        static TURN: Mutex<()> = Mutex::const_new(());
        static INSTALLED: OnceCell<()> = OnceCell::const_new();
        let turn = TURN.lock().await;
        let (server, api) = server().await;
        INSTALLED
            .get_or_init(|| async {
                let chart = chart("pointsman");
                let kubeconfig = server.kubeconfig().to_string_lossy();
                let args =
                    ["upgrade", "--install", "pointsman", &chart, "-n", NAMESPACE, "--create-namespace"];
                helm(&[&args[..], &["--kubeconfig", &kubeconfig]].concat()).await.expect("helm install");
            })
            .await;
        let dir = tempfile::tempdir().unwrap();
        let client = api.client;
        // Nobody makes the default account, for there is no controller.
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        server.kubectl(&["apply", "-n", NAMESPACE, "-f", "-"], &account.to_string()).await.unwrap();
        let stage = Self {
            _turn: turn,
            server,
            nodes: Api::all(client.clone()),
            config_maps: Api::namespaced(client.clone(), "pointsman-node-config"),
            layers: Api::all(client.clone()),
            reports: Api::all(client.clone()),
            leases: Api::namespaced(client.clone(), NAMESPACE),
            client,
            dir,
        };
        stage.clear().await;
        stage
    }

    async fn clear(&self) {
        let delete = DeleteParams::default();
        for layer in self.layers.list(&ListParams::default()).await.unwrap() {
            let allow = json!({"metadata": {"annotations": {"pointsman.dev/allow-delete": "true"}}});
            let name = layer.name_any();
            self.layers.patch(&name, &PatchParams::default(), &Patch::Merge(&allow)).await.unwrap();
            self.layers.delete(&name, &delete).await.unwrap();
        }
        self.nodes.delete_collection(&delete, &ListParams::default()).await.unwrap();
        self.leases.delete_collection(&delete, &ListParams::default()).await.unwrap();
    }

    /// Starts a replica.
    pub async fn operator(&self, name: &str) -> Operator {
        self.operator_as(name, "pointsman-operator").await
    }

    /// Starts a replica under another service account.
    pub async fn operator_as(&self, name: &str, account: &str) -> Operator {
        let kubeconfig = service_account_kubeconfig(self.server, account, self.dir.path()).await;
        Operator::start(name, &kubeconfig).await
    }

    pub async fn add_node(&self, name: &str, pool: &str) -> Node {
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"pool": pool}},
        });
        self.nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap()
    }

    /// Creates or changes a layer; returns its generation.
    pub async fn set_layer(&self, name: &str, spec: Value) -> i64 {
        let layer = json!({
            "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration",
            "metadata": {"name": name}, "spec": spec,
        });
        let params = PatchParams::apply("test").force();
        let layer = self.layers.patch(name, &params, &Patch::Apply(&layer)).await.unwrap();
        layer.metadata.generation.unwrap()
    }

    /// The configuration in a node's ConfigMap, once it is there and `holds`.
    pub async fn configuration(
        &self,
        node: &str,
        holds: impl Fn(&NodeProxyConfiguration) -> bool,
    ) -> (ConfigMap, NodeProxyConfiguration) {
        eventually(&format!("the configuration of {node}"), 15, async || {
            let config_map = self.config_maps.get_opt(node).await.unwrap()?;
            let configuration = read(&config_map)?;
            holds(&configuration).then_some((config_map, configuration))
        })
        .await
    }

    /// A layer's status, once it is about the current generation and `holds`.
    pub async fn status(
        &self,
        layer: &str,
        holds: impl Fn(&ProxyConfigurationStatus) -> bool,
    ) -> ProxyConfigurationStatus {
        eventually(&format!("the status of {layer}"), 20, async || {
            let layer = self.layers.get(layer).await.unwrap();
            let status = layer.status.unwrap_or_default();
            (status.observed_generation == layer.metadata.generation && holds(&status)).then_some(status)
        })
        .await
    }

    /// What the agent of `node` writes once it has applied what its ConfigMap holds.
    pub async fn agent_reports_ready(&self, node: &str) {
        let (config_map, _) = self.configuration(node, |_| true).await;
        // It is written after the ConfigMap.
        eventually("a report", 10, async || self.reports.get_opt(node).await.unwrap()).await;
        let now = now_text();
        let status = json!({"status": {
            "state": "Ready", "mode": "iptables", "heartbeatTime": now,
            "config": {
                "active": config_map.labels()["pointsman.dev/revision"],
                "activeHash": config_map.annotations()["pointsman.dev/config-hash"],
            },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "AsExpected", "message": "", "lastTransitionTime": now,
            }],
        }});
        let patch = Patch::Merge(&status);
        self.reports.patch_status(node, &PatchParams::default(), &patch).await.unwrap();
    }

    /// The identity in the Lease.
    pub async fn leader(&self) -> Option<String> {
        let lease = self.leases.get_opt("pointsman-operator").await.unwrap()?;
        lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
    }
}

fn now_text() -> String {
    k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// What a ConfigMap holds, if it is what its annotation says.
pub fn read(config_map: &ConfigMap) -> Option<NodeProxyConfiguration> {
    let content = config_map.data.as_ref()?.get("config.yaml")?;
    let hash = config_map.annotations().get("pointsman.dev/config-hash")?;
    NodeProxyConfiguration::parse(content, Some(hash)).ok()
}

/// The status of a condition, as `status/reason`.
pub fn condition(status: &ProxyConfigurationStatus, type_: &str) -> String {
    let condition = status.conditions.iter().find(|condition| condition.type_ == type_);
    condition.map_or_else(String::new, |condition| format!("{}/{}", condition.status, condition.reason))
}

/// Asks again and again until there is an answer.
pub async fn eventually<T>(what: &str, seconds: u64, ask: impl AsyncFn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(start.elapsed() < Duration::from_secs(seconds), "{what}: not within {seconds} s");
        sleep(Duration::from_millis(50)).await;
    }
}

async fn service_account_kubeconfig(server: &ApiServer, account: &str, dir: &Path) -> PathBuf {
    let create = ["create", "token", account, "-n", NAMESPACE];
    let token = server.kubectl(&create, "").await.expect("a token of the service account");
    let mut kubeconfig: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(server.kubeconfig()).unwrap()).unwrap();
    for user in kubeconfig["users"].as_array_mut().unwrap() {
        user["user"] = json!({"token": token.trim()});
    }
    let path = dir.join(format!("{account}.kubeconfig"));
    std::fs::write(&path, serde_json::to_string(&kubeconfig).unwrap()).unwrap();
    path
}

/// A running replica; killed when dropped.
pub struct Operator {
    pub name: String,
    child: Child,
    http: String,
    dir: tempfile::TempDir,
}

impl Operator {
    /// Starts a replica with this kubeconfig and waits until it answers.
    pub async fn start(name: &str, kubeconfig: &Path) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let dir = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        // Dies with the test, however that ends.
        let child = command("setpriv", ["--pdeathsig", "KILL"])
            .arg(binary().await)
            .args(["--metrics-address", &address, "--pod-name", name, "--kubeconfig"])
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let operator = Self { name: name.to_owned(), child, http: format!("http://{address}"), dir };
        eventually("the operator's HTTP server", 10, async || operator.get("/livez").await).await;
        operator
    }

    /// The body of a page, whatever its status.
    pub async fn get(&self, path: &str) -> Option<String> {
        let url = format!("{}{path}", self.http);
        pointsman_e2e::command::output(&mut command("curl", ["-sS", "--max-time", "5", &url])).await.ok()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// SIGTERM; returns how long it took to end, and that it ended well.
    pub async fn terminate(&mut self) -> Duration {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        let start = Instant::now();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM).unwrap();
        let status = self.child.wait().await.unwrap();
        assert!(status.success(), "{status}: {}", self.log());
        start.elapsed()
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn binary() -> &'static Path {
    static BINARY: OnceCell<PathBuf> = OnceCell::const_new();
    BINARY
        .get_or_init(|| async {
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            let args = ["build", "--message-format=json", "--package", "pointsman-operator"];
            let built = pointsman_e2e::command::output(&mut command(cargo, args)).await.unwrap();
            let executable = built.lines().rev().find_map(|line| {
                let message: Value = serde_json::from_str(line).ok()?;
                message["executable"].as_str().map(PathBuf::from)
            });
            executable.expect("cargo names the executable that it built")
        })
        .await
}
