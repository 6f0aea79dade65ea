//! The charts installed by Helm on a real API server: strict validation of all that they render, and what a first
//! install, an upgrade, an uninstall and a reinstall do to the objects that people own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use pointsman_e2e::api_server::ApiServer;
use serde_json::{Value, json};

use support::charts::{NAMESPACE, chart, example_values, helm, render};
use support::server::{Api, node_status};

const BASE: &str = "apis/pointsman.dev/v1alpha1/proxyconfigurations/default";
const AGENTS: &str = "apis/apps/v1/namespaces/pointsman-system/daemonsets/pointsman-agent";

/// A server of its own for each test, because releases and the base exist once in a cluster.
struct Cluster {
    server: ApiServer,
    api: Api,
}

impl Cluster {
    async fn start() -> Self {
        let server = ApiServer::start().await.expect("an API server");
        let api = Api { client: server.client() };
        let cluster = Self { server, api };
        // Until the definitions are established the server knows no such kinds.
        cluster.helm(&["upgrade", "--install", "pointsman-crds", &chart("pointsman-crds"), "--wait"]).await;
        cluster
    }

    async fn helm(&self, args: &[&str]) -> String {
        let kubeconfig = self.server.kubeconfig().to_string_lossy();
        helm(&[args, &["--kubeconfig", &kubeconfig]].concat())
            .await
            .unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Installs or upgrades the main chart; returns the notes.
    async fn install(&self, args: &[&str]) -> String {
        let chart = chart("pointsman");
        let all = ["upgrade", "--install", "pointsman", &chart, "-n", NAMESPACE, "--create-namespace"];
        self.helm(&[&all[..], args].concat()).await
    }

    async fn get(&self, path: &str) -> Option<Value> {
        self.api.send(None, "GET", path, None).await.ok()
    }

    async fn apply(&self, objects: &[Value]) {
        for object in objects {
            self.server.kubectl(&["apply", "-f", "-"], &object.to_string()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn every_example_passes_strict_validation() {
    let cluster = Cluster::start().await;
    for namespace in [NAMESPACE, "pointsman-node-config"] {
        cluster.server.kubectl(&["create", "namespace", namespace], "").await.unwrap();
    }
    for file in example_values() {
        let objects = render(&["-f", &file.to_string_lossy()]).await.unwrap().0;
        // The Prometheus operator's kind is not served here.
        let objects: Vec<Value> = objects.into_iter().filter(|o| o["kind"] != "ServiceMonitor").collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let args = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"];
        let answer = cluster.server.kubectl(&args, &list).await;
        let lines = answer.unwrap_or_else(|error| panic!("{}: {error:#}", file.display()));
        assert_eq!(lines.lines().count(), objects.len(), "{lines}");
    }
    cluster.server.stop().await.unwrap();
}

#[tokio::test]
async fn helm_never_changes_the_base_again() {
    let cluster = Cluster::start().await;
    let notes = cluster.install(&["--set", "defaultConfiguration.spec.proxy.masquerade.bit=13"]).await;
    for line in ["kubectl get pns", "kubectl get pxc", "rollout status daemonset/pointsman-agent"] {
        assert!(notes.contains(line), "{notes}");
    }
    let base = cluster.get(BASE).await.expect("made at the first install");
    assert_eq!(
        base["spec"]["proxy"],
        json!({"mode": "nftables", "fallbackModes": ["iptables"], "masquerade": {"bit": 13}})
    );

    // A person edits it; an upgrade with other values leaves both the edit and the rest alone.
    cluster.api.merge(BASE, &json!({"spec": {"proxy": {"masquerade": {"bit": 12}}}})).await.unwrap();
    cluster.install(&["--set", "defaultConfiguration.spec.proxy.masquerade.bit=11"]).await;
    let upgraded = cluster.get(BASE).await.expect("kept by an upgrade");
    assert_eq!(upgraded["spec"]["proxy"]["masquerade"]["bit"], 12);
    assert_eq!(upgraded["metadata"]["uid"], base["metadata"]["uid"]);
    assert_eq!(upgraded["metadata"]["generation"], 2, "only the person's edit");

    cluster.api.create("apis/pointsman.dev/v1alpha1/proxynodestatuses", &node_status("n1")).await.unwrap();
    cluster.helm(&["uninstall", "pointsman", "-n", NAMESPACE]).await;
    assert!(cluster.get(AGENTS).await.is_none(), "the rest is gone");
    let kept = cluster.get(BASE).await.expect("kept by an uninstall");
    assert_eq!(kept["metadata"]["uid"], base["metadata"]["uid"]);
    cluster.helm(&["uninstall", "pointsman-crds"]).await;
    assert!(cluster.get(BASE).await.is_some(), "the definitions are kept");
    assert!(cluster.get("apis/pointsman.dev/v1alpha1/proxynodestatuses/n1").await.is_some());
    cluster.server.stop().await.unwrap();
}

#[tokio::test]
async fn a_base_that_is_there_is_not_touched() {
    let cluster = Cluster::start().await;
    let mine = json!({"apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration",
        "metadata": {"name": "default"}, "spec": {"proxy": {"mode": "iptables", "masquerade": {"all": true}}}});
    let made = cluster.api.create("apis/pointsman.dev/v1alpha1/proxyconfigurations", &mine).await.unwrap();
    cluster.install(&[]).await;
    let base = cluster.get(BASE).await.unwrap();
    assert_eq!(base["metadata"]["resourceVersion"], made["metadata"]["resourceVersion"]);

    // Deleted on purpose, it does not come back with an upgrade.
    let annotation = json!({"metadata": {"annotations": {"pointsman.dev/allow-delete": "true"}}});
    cluster.api.merge(BASE, &annotation).await.unwrap();
    cluster.api.send(None, "DELETE", BASE, None).await.unwrap();
    cluster.install(&["--set", "operator.replicas=1"]).await;
    assert!(cluster.get(BASE).await.is_none(), "an upgrade starts no rollout");
    cluster.server.stop().await.unwrap();
}

/// The variable of the agents' container.
async fn api_servers(cluster: &Cluster) -> Option<String> {
    let agents = cluster.get(AGENTS).await.unwrap();
    let env = agents["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap().clone();
    let variable = env.into_iter().find(|variable| variable["name"] == "POINTSMAN_APISERVERS")?;
    variable["value"].as_str().map(str::to_owned)
}

// ids: CFG-8
#[tokio::test]
async fn addresses_are_detected_and_dangers_named() {
    let cluster = Cluster::start().await;
    let notes = cluster.install(&[]).await;
    assert!(notes.contains("WARNING: the address of the API server is not known"), "{notes}");
    assert_eq!(notes.matches("WARNING").count(), 1, "{notes}");
    assert_eq!(api_servers(&cluster).await, None);

    let slice = |name: &str, family: &str, addresses: &[&str]| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "endpoints": addresses.iter().map(|address| json!({"addresses": [address]})).collect::<Vec<_>>(),
            "ports": [{"name": "https", "port": 6443, "protocol": "TCP"}],
        })
    };
    let kube_proxy = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "kube-proxy", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"k8s-app": "kube-proxy"}}, "template": {
            "metadata": {"labels": {"k8s-app": "kube-proxy"}},
            "spec": {"containers": [{"name": "kube-proxy", "image": "registry.example.com/kube-proxy"}]}}},
    });
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}});
    cluster.apply(&[slice("kubernetes", "IPv4", &["192.0.2.11", "192.0.2.10"]), kube_proxy, node]).await;
    let label = ["label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=baseline"];
    cluster.server.kubectl(&label, "").await.unwrap();
    let notes = cluster.install(&[]).await;
    let found = api_servers(&cluster).await;
    assert_eq!(
        found.as_deref(),
        Some("https://192.0.2.10:6443,https://192.0.2.11:6443"),
        "sorted, so stable"
    );
    for warning in [
        "WARNING: kube-proxy still runs in this cluster",
        "WARNING: 2 operator replicas share the ports of 1 node(s)",
        "WARNING: namespace pointsman-system admits only baseline pods",
    ] {
        assert!(notes.contains(warning), "{warning} is not in: {notes}");
    }
    assert_eq!(notes.matches("WARNING").count(), 3, "{notes}");

    // The address of the Service `kubernetes` of this server.
    let notes = cluster.install(&["--set-json", "apiServer.endpoints=[\"https://10.96.0.1:443\"]"]).await;
    assert!(
        notes.contains("WARNING: https://10.96.0.1:443 is the address of the Service `kubernetes`"),
        "{notes}"
    );

    let six = "discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";
    cluster.api.send(None, "DELETE", &format!("apis/{six}"), None).await.unwrap();
    cluster.apply(&[slice("kubernetes", "IPv6", &["2001:db8::10"])]).await;
    cluster.install(&["--set-json", "apiServer.endpoints=[]"]).await;
    assert_eq!(api_servers(&cluster).await.as_deref(), Some("https://[2001:db8::10]:6443"));
    cluster.server.stop().await.unwrap();
}
