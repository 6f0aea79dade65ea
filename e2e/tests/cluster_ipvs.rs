//! A node whose kernel has IPVS, a virtual machine, serves Services beside a node in another mode: TCP, UDP, and SCTP, which
//! the other node's kernel may lack. It has no NAT of nftables.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use pointsman_e2e::addons::{install_pointsman, wait_available};
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::{Cluster, NodeHandle};
use pointsman_e2e::images::TEST_SERVER_IMAGE;
use pointsman_e2e::node::Node;
use pointsman_e2e::pointsman::{all_ready, eventually, node_state};
use pointsman_e2e::probe::Place;
use pointsman_e2e::state::Proxy;
use pointsman_e2e::up::Options;
use serde_json::json;

const NAMESPACE: &str = "checks";
const PATIENCE: Duration = Duration::from_mins(2);

#[tokio::test(flavor = "multi_thread")]
async fn the_checks_are_fair_to_kube_proxy() {
    on_cluster("test-ipvs-peer", Proxy::KubeProxy("ipvs".into()), check_all).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pointsman_serves_in_mode_ipvs_beside_a_node_in_another() {
    on_cluster("test-ipvs", Proxy::None, async |cluster| {
        install_pointsman(cluster, &[]).await?;
        all_ready(cluster, PATIENCE).await?;
        cluster.apply(&layer()).await?;
        let node = machine(cluster)?;
        eventually(PATIENCE, "the virtual machine in mode ipvs, its neighbour in another", async || {
            let (there, here) =
                (node_state(cluster, node.name()).await?, node_state(cluster, "node1").await?);
            ensure!(there.is_ready_with_assigned() && there.mode == "ipvs", "{there:?}");
            ensure!(there.has("Compatible=True/ModeSupported"), "{there:?}");
            ensure!(here.is_ready_with_assigned() && here.mode == "nftables", "{here:?}");
            Ok(())
        })
        .await?;
        check_settings(cluster.node(node.name())?).await?;
        check_all(cluster).await
    })
    .await
    .unwrap();
}

/// Runs `check` on a cluster of one node in namespaces and one in a virtual machine.
async fn on_cluster(name: &str, proxy: Proxy, check: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    let options = Options { nodes: Some(1), ipvs_node: true, ..Options::new(name, proxy) };
    let outcome = async {
        let cluster = Cluster::up(&options).await?;
        check(&cluster).await
    }
    .await;
    // Taken down before the verdict: a failed test leaves the machine as it was.
    Cluster::down(name).await?;
    outcome
}

/// The configuration of nodes with IPVS.
fn layer() -> String {
    json!({
        "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration", "metadata": {"name": "ipvs"},
        "spec": {
            "nodeSelector": {"matchLabels": {"pointsman.dev/kernel": "ipvs"}},
            "priority": 10,
            "proxy": {
                "mode": "ipvs",
                "ipvs": {
                    "scheduler": "wrr", "strictARP": true, "excludeCIDRs": ["203.0.113.0/24"],
                    "tcpTimeoutSeconds": 901, "tcpFinTimeoutSeconds": 31, "udpTimeoutSeconds": 61,
                },
            },
        },
    })
    .to_string()
}

/// What the configuration says is in the kernel.
async fn check_settings(node: NodeHandle<'_>) -> Result<()> {
    let servers = node.exec(&["cat", "/proc/net/ip_vs"]).await?;
    let mut kept = servers.lines().filter(|line| line.starts_with("TCP")).peekable();
    ensure!(kept.peek().is_some() && kept.all(|line| line.contains(" wrr")), "{servers}");
    let arp = ["arp_ignore", "arp_announce"].map(|name| format!("/proc/sys/net/ipv4/conf/all/{name}"));
    let arp = node.exec(&["cat", &arp[0], &arp[1]]).await?;
    ensure!(arp.split_whitespace().eq(["1", "2"]), "{arp}");
    Ok(())
}

fn machine(cluster: &Cluster) -> Result<Node> {
    cluster.nodes().into_iter().find(Node::is_machine).context("the cluster has no virtual machine")
}

async fn check_all(cluster: &Cluster) -> Result<()> {
    let web = Workload::create(cluster, NAMESPACE).await?;
    let checks = web.check_all().await?;
    ensure!(checks > 50, "only {checks} checks");
    check_sctp(cluster, &web).await
}

/// On the virtual machine, pods and the node itself reach every endpoint of an SCTP Service.
async fn check_sctp(cluster: &Cluster, web: &Workload<'_>) -> Result<()> {
    let node = machine(cluster)?;
    cluster.apply(&sctp_workload(node.name())).await?;
    wait_available(cluster, NAMESPACE, "deployment/sctp").await?;
    let service = Api::<Service>::namespaced(cluster.client(), NAMESPACE).get("sctp").await?;
    let spec = service.spec.context("a Service has a spec")?;
    let node_port =
        spec.ports.unwrap_or_default().first().and_then(|port| port.node_port).context("a port")?;
    let mut targets: Vec<String> =
        spec.cluster_ips.unwrap_or_default().iter().map(|ip| target(ip, 9002)).collect::<Result<_>>()?;
    ensure!(targets.len() == 2, "the Service has the addresses {targets:?}");
    targets.push(target(&node.addresses().v4.to_string(), node_port)?);
    for target in targets {
        for from in [web.client_on(node.name()), Place::Node(node.name().to_owned())] {
            eventually(PATIENCE, &format!("{from} to {target}"), async || {
                let summary = cluster.probe(&from, &target, 12).await?;
                ensure!(summary.failed == 0 && summary.pods.len() == 2, "{summary:?}");
                Ok(())
            })
            .await?;
            eprintln!("  ok      {from} to {target}");
        }
    }
    Ok(())
}

fn target(ip: &str, port: i32) -> Result<String> {
    Ok(format!(
        "sctp://{}",
        std::net::SocketAddr::from((ip.parse::<std::net::IpAddr>()?, u16::try_from(port)?))
    ))
}

/// Two servers on a node, and their Service.
fn sctp_workload(node: &str) -> String {
    let labels = json!({"app": "sctp"});
    let metadata = json!({"name": "sctp", "namespace": NAMESPACE});
    let container = json!({
        "name": "server", "image": TEST_SERVER_IMAGE, "imagePullPolicy": "IfNotPresent",
        "args": ["-sctp", ":9002"],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "readinessProbe": {"httpGet": {"path": "/pod", "port": 8080}, "periodSeconds": 1},
    });
    let pod = json!({
        "metadata": {"labels": labels},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 1,
            "containers": [container],
        },
    });
    let items = json!([
        {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata,
            "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": pod},
        },
        {
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {
                "type": "NodePort", "selector": labels,
                "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"],
                "ports": [{"name": "sctp", "protocol": "SCTP", "port": 9002}],
            },
        },
    ]);
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}
