//! A cluster changes from kube-proxy to Pointsman, as docs/operations.md says, and nobody notices: in every pair of modes
//! that leaves something to be adopted or removed. In between it goes back, which is done without traffic.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use pointsman_e2e::addons::{install_pointsman, uninstall_pointsman, wait_available};
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::{Cluster, Component};
use pointsman_e2e::pointsman::{all_ready, eventually};
use pointsman_e2e::release::{Part, compile, profile};
use pointsman_e2e::state::Proxy;
use pointsman_e2e::traffic::Traffic;
use pointsman_e2e::up::Options;
use serde_json::json;

const NAMESPACE: &str = "adoption";
const NODE: &str = "node2";
const PATIENCE: Duration = Duration::from_mins(2);

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_taken_over_from_kube_proxy_without_a_lost_request() {
    let name = "test-adoption";
    let outcome = adopt_all(name).await;
    // Taken down before the verdict: a failed test leaves the machine as it was.
    Cluster::down(name).await.expect("taking the cluster down");
    outcome.unwrap_or_else(|error| panic!("{error:#}"));
}

async fn adopt_all(name: &str) -> Result<()> {
    let cluster = Cluster::up(&Options::new(name, Proxy::KubeProxy("iptables".into()))).await?;
    let web = Workload::create(&cluster, NAMESPACE).await?;
    // The checks are fair: what they ask of Pointsman is what Kubernetes gives.
    let checks = web.check_all().await.context("before, with kube-proxy")?;
    ensure!(checks > 50, "only {checks} checks");

    // Into the mode that the chart has by default.
    adopt(&cluster, &web, "iptables", "nftables").await.context("iptables to nftables")?;
    // Into the same chains.
    give_back(&cluster, "iptables", "iptables").await.context("going back to iptables")?;
    adopt(&cluster, &web, "iptables", "iptables").await.context("iptables to iptables")?;
    give_back(&cluster, "nftables", "nftables").await.context("going back to nftables")?;
    adopt(&cluster, &web, "nftables", "nftables").await.context("nftables to nftables")
}

async fn adopt(cluster: &Cluster, web: &Workload<'_>, from: &str, to: &str) -> Result<()> {
    // It answers for its health before it has written anything.
    eventually(PATIENCE, &format!("the rules of kube-proxy in mode {from}"), async || {
        expect(cluster, (from == "iptables").then_some("KUBE-SVC-"), from == "nftables", false).await
    })
    .await?;
    let traffic = Traffic::start(cluster, web, NODE).await?;
    for node in cluster.nodes() {
        let proxy = Component::KubeProxy(node.name().to_owned());
        cluster.signal(&proxy, Signal::SIGTERM)?;
        eventually(PATIENCE, &format!("{proxy} ended"), async || {
            ensure!(cluster.running(&proxy).is_none(), "it runs");
            Ok(())
        })
        .await?;
    }
    install_pointsman(cluster, &[]).await?;
    all_ready(cluster, PATIENCE).await?;
    traffic.finish().await?;
    expect(cluster, (to == "iptables").then_some("KUBE-IP-"), false, to == "nftables").await?;

    // It not only keeps what was there: an endpoint that comes now is followed by every node.
    let delete = ["delete", "pod", "-n", NAMESPACE, "-l", "app=web", "--wait=false"];
    cluster.kubectl(&delete).await?;
    wait_available(cluster, NAMESPACE, "deployment/web").await?;
    web.check_all().await.context("after, with Pointsman").map(drop)
}

/// Uninstalls Pointsman, removes its rules, starts kube-proxy in a mode, and says in which mode Pointsman is to come back.
async fn give_back(cluster: &Cluster, mode: &str, next: &str) -> Result<()> {
    uninstall_pointsman(cluster).await?;
    let agent = compile(Part::Agent, &profile()).await?;
    let agent = agent.to_str().context("the agent's path is not UTF-8")?;
    for node in cluster.nodes() {
        let cleanup = [agent, "cleanup", "--state-dir", "/var/lib/pointsman-agent"];
        cluster.node(node.name())?.exec(&cleanup).await?;
    }
    expect(cluster, None, false, false).await.context("after the cleanup")?;
    cluster.start_kube_proxies(mode).await?;
    let patch = json!({"spec": {"proxy": {"mode": next, "fallbackModes": null}}}).to_string();
    cluster.kubectl(&["patch", "pxc", "default", "--type=merge", "-p", &patch]).await.map(drop)
}

/// Where the rules of KUBE-SERVICES lead, on the node that traffic is sent through, and whether kube-proxy's and our tables of
/// nftables are there.
async fn expect(cluster: &Cluster, chains: Option<&str>, theirs: bool, ours: bool) -> Result<()> {
    let node = cluster.node(NODE)?;
    let rules = node.exec(&["iptables-save", "-t", "nat"]).await?;
    let dispatch: Vec<&str> = rules.lines().filter(|line| line.starts_with("-A KUBE-SERVICES ")).collect();
    for prefix in ["KUBE-SVC-", "KUBE-IP-"] {
        let found = dispatch.iter().any(|rule| rule.contains(prefix));
        ensure!(found == (chains == Some(prefix)), "{prefix}: not {chains:?}: {dispatch:#?}");
    }
    let tables = node.exec(&["nft", "list", "tables"]).await?;
    for (table, expected) in [("kube-proxy", theirs), ("pointsman", ours)] {
        let found = tables.lines().any(|line| line == format!("table ip {table}"));
        ensure!(found == expected, "table {table}, expected: {expected}, is in: {tables}");
    }
    Ok(())
}
