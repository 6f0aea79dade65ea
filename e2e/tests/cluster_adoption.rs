//! A cluster changes from kube-proxy in iptables mode to Pointsman, as docs/operations.md says, and nobody notices.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use pointsman_e2e::addons::{install_pointsman, wait_available};
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::{Cluster, Component};
use pointsman_e2e::pointsman::{all_ready, eventually};
use pointsman_e2e::state::Proxy;
use pointsman_e2e::traffic::Traffic;
use pointsman_e2e::up::Options;

const NAMESPACE: &str = "adoption";
const NODE: &str = "node2";
const PATIENCE: Duration = Duration::from_mins(2);

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_taken_over_from_kube_proxy_without_a_lost_request() {
    let name = "test-adoption";
    // In the same chains, and into the mode that the chart has by default.
    for values in [
        &[
            "defaultConfiguration.spec.proxy.mode=iptables",
            "defaultConfiguration.spec.proxy.fallbackModes=null",
        ][..],
        &[],
    ] {
        let outcome = adopt(name, values).await;
        // Taken down before the verdict: a failed test leaves the machine as it was.
        Cluster::down(name).await.expect("taking the cluster down");
        outcome.unwrap_or_else(|error| panic!("{values:?}: {error:#}"));
    }
}

async fn adopt(name: &str, values: &[&str]) -> Result<()> {
    let cluster = Cluster::up(&Options::new(name, Proxy::KubeProxy("iptables".into()))).await?;
    let web = Workload::create(&cluster, NAMESPACE).await?;
    web.check_all().await.context("before, with kube-proxy")?;
    let dispatch = kube_services(&cluster).await?;
    ensure!(dispatch.iter().any(|rule| rule.contains("KUBE-SVC-")), "not kube-proxy's: {dispatch:#?}");

    let traffic = Traffic::start(&cluster, &web, NODE).await?;
    for node in cluster.nodes() {
        let proxy = Component::KubeProxy(node.name().to_owned());
        cluster.signal(&proxy, Signal::SIGTERM)?;
        eventually(PATIENCE, &format!("{proxy} ended"), async || {
            ensure!(cluster.running(&proxy).is_none(), "it runs");
            Ok(())
        })
        .await?;
    }
    install_pointsman(&cluster, values).await?;
    all_ready(&cluster, PATIENCE).await?;
    traffic.finish().await?;

    let dispatch = kube_services(&cluster).await?;
    ensure!(
        dispatch.iter().any(|rule| rule.contains("KUBE-IP-")) != values.is_empty()
            && !dispatch.iter().any(|rule| rule.contains("KUBE-SVC-")),
        "not what mode {} leaves of kube-proxy's rules: {dispatch:#?}",
        if values.is_empty() { "nftables" } else { "iptables" }
    );
    // It not only keeps what was there: an endpoint that comes now is followed by every node.
    let delete = ["delete", "pod", "-n", NAMESPACE, "-l", "app=web", "--wait=false"];
    cluster.kubectl(&delete).await?;
    wait_available(&cluster, NAMESPACE, "deployment/web").await?;
    web.check_all().await.context("after, with Pointsman").map(drop)
}

/// The rules of the chain that every packet to a Service enters, on the node that traffic is sent through.
async fn kube_services(cluster: &Cluster) -> Result<Vec<String>> {
    let rules = cluster.node(NODE)?.exec(&["iptables-save", "-t", "nat"]).await?;
    Ok(rules.lines().filter(|line| line.starts_with("-A KUBE-SERVICES ")).map(str::to_owned).collect())
}
