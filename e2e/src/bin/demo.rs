//! `hack/demo`: Pointsman at work, step by step, with the answers as they come. Fails if anything is not so.
//!
//! In: a machine. Out: a cluster that stays up, for looking around.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::Cluster;
use pointsman_e2e::pointsman::{self, NodeState, masquerade_mark};
use pointsman_e2e::probe::{Place, Summary};
use pointsman_e2e::state::Proxy;
use pointsman_e2e::up::{Options, next_steps};
use tokio::time::sleep;

/// The namespace of the web Deployment.
const NAMESPACE: &str = "demo";
/// How long anything may take to become so.
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests for which answers are shown.
const REQUESTS: u32 = 30;

/// Pointsman at work on a real Kubernetes cluster on this machine. The cluster stays up; hack/cluster down removes it.
#[derive(Parser)]
#[command(name = "hack/demo", bin_name = "hack/demo")]
struct Arguments {
    /// The cluster's name
    #[arg(long, default_value = "pointsman", env = "POINTSMAN_CLUSTER")]
    name: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Arguments::parse().name).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hack/demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(name: &str) -> Result<()> {
    let started = Instant::now();
    say("A cluster of two nodes, without kube-proxy, and Pointsman installed by Helm");
    let cluster = Cluster::up(&Options::new(name, Proxy::Pointsman)).await?;

    say("A ProxyConfiguration: the base of all nodes");
    let bit = 14;
    apply_base(&cluster, bit).await?;
    show(&cluster, &["get", "proxyconfigurations"]).await?;

    say("A Deployment of three web pods, and its Service");
    let web = Workload::create(&cluster, NAMESPACE).await?;
    show(&cluster, &["get", "pods,services,endpointslices", "-n", NAMESPACE, "-o", "wide"]).await?;
    answers(&cluster, &web).await?;

    say("What is so, as the cluster tells it");
    all_ready(&cluster, None).await?;
    show(&cluster, &["get", "pxc"]).await?;
    show(&cluster, &["get", "proxynodestatus"]).await?;

    say("Another masquerade bit, live, while requests go on");
    change_bit(&cluster, &web, bit + 1).await?;
    show(&cluster, &["get", "proxynodestatus"]).await?;

    say("No pod left: refused at once, not timed out");
    refusal(&cluster, &web).await?;

    say(&format!("All of that was so; it took {} s", started.elapsed().as_secs()));
    println!("{}", next_steps(&cluster)?);
    Ok(())
}

fn say(what: &str) {
    println!("\n== {what}");
}

async fn show(cluster: &Cluster, kubectl: &[&str]) -> Result<()> {
    println!("$ kubectl {}\n{}", kubectl.join(" "), cluster.kubectl(kubectl).await?.trim_end());
    Ok(())
}

/// The base with this masquerade bit.
async fn apply_base(cluster: &Cluster, bit: u8) -> Result<()> {
    let manifest = format!(
        "apiVersion: pointsman.dev/v1alpha1\nkind: ProxyConfiguration\nmetadata: {{name: default}}\n\
         spec:\n  proxy:\n    mode: nftables\n    fallbackModes: [iptables]\n    masquerade: {{bit: {bit}}}\n"
    );
    println!("{}", manifest.trim_end());
    let apply = ["apply", "--server-side", "--force-conflicts", "--field-manager=demo", "-f", "-"];
    println!("{}", cluster.kubectl_with_input(&apply, &manifest).await?.trim_end());
    Ok(())
}

/// The answers through every frontend, from everywhere, in both families.
async fn answers(cluster: &Cluster, web: &Workload<'_>) -> Result<()> {
    let node = cluster.nodes().into_iter().next().context("a cluster has nodes")?;
    let pod = web.client_on(node.name());
    let on_node = Place::Node(node.name().to_owned());
    for family in 0..2 {
        let cluster_ip = web.cluster_ip("http", family)?;
        three_answer(cluster, &pod, &cluster_ip, "ClusterIP from a pod").await?;
        three_answer(cluster, &on_node, &cluster_ip, "ClusterIP from a node").await?;
        let node_port = web.node_port("http", node.addresses().both()[family])?;
        three_answer(cluster, &Place::Outside, &node_port, "NodePort from outside").await?;
    }
    three_answer(cluster, &pod, "http://web:80/", "DNS name from a pod").await?;
    for family in ["-4", "-6"] {
        let curl = ["curl", family, "-sSf", "--max-time", "3", "http://web/pod"];
        let answer = cluster.in_pod(NAMESPACE, &format!("client-{}", node.name()), &curl).await?;
        println!("DNS name over {}: {}", if family == "-4" { "IPv4" } else { "IPv6" }, answer.trim());
    }
    Ok(())
}

/// Asks until every one of the three pods has answered and nothing failed, and prints who did.
async fn three_answer(cluster: &Cluster, from: &Place, target: &str, what: &str) -> Result<Summary> {
    let started = Instant::now();
    loop {
        let summary = cluster.probe(from, target, REQUESTS).await?;
        if summary.failed == 0 && summary.pods.len() == 3 {
            let pods: Vec<String> = summary.pods.iter().map(|(pod, n)| format!("{pod} {n}×")).collect();
            println!("{what}, {target}: {}", pods.join(", "));
            return Ok(summary);
        }
        ensure!(started.elapsed() < PATIENCE, "{what}, {target}: {summary:?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until every node is Ready with the revision assigned to it; with `not`, with another one than these.
async fn all_ready(cluster: &Cluster, not: Option<&BTreeSet<String>>) -> Result<BTreeSet<String>> {
    pointsman::eventually(PATIENCE, "every node Ready with its assigned revision", async || {
        let nodes = pointsman::node_states(cluster).await?;
        ensure!(nodes.len() == cluster.nodes().len(), "{} nodes report", nodes.len());
        for node in &nodes {
            ensure!(node.is_ready_with_assigned(), "{node:?}");
            ensure!(
                not.is_none_or(|old| !old.contains(&node.active)),
                "{} is still on {}",
                node.name,
                node.active
            );
        }
        Ok(nodes.into_iter().map(|NodeState { active, .. }| active).collect())
    })
    .await
}

async fn change_bit(cluster: &Cluster, web: &Workload<'_>, bit: u8) -> Result<()> {
    let before = all_ready(cluster, None).await?;
    let node = cluster.nodes().into_iter().next().context("a cluster has nodes")?;
    let fast: &[&str] = &["-interval", "5ms"];
    let mut probes = Vec::new();
    for (from, target) in [
        (web.client_on(node.name()), web.cluster_ip("http", 0)?),
        (Place::Node(node.name().to_owned()), web.cluster_ip("http", 1)?),
        (Place::Outside, web.node_port("http", node.addresses().v4.into())?),
    ] {
        probes.push((format!("{from} to {target}"), cluster.start_probe(&from, &target, fast).await?));
    }
    sleep(Duration::from_secs(1)).await;
    apply_base(cluster, bit).await?;
    let after = all_ready(cluster, Some(&before)).await?;
    // The marks that packets carry are those of the kernel's rules, whatever a status says.
    for node in cluster.nodes() {
        ensure!(masquerade_mark(cluster, node.name()).await? == 1 << bit, "{}: not bit {bit}", node.name());
    }
    sleep(Duration::from_secs(1)).await;
    for (what, probe) in probes {
        let summary = probe.finish().await?;
        println!("{what}: {} requests, {} failed", summary.requests, summary.failed);
        ensure!(summary.failed == 0, "{what}: {summary:?}");
        ensure!(summary.requests > 50, "{what}: too few requests to say anything: {summary:?}");
    }
    println!("from {before:?} to {after:?}");
    Ok(())
}

async fn refusal(cluster: &Cluster, web: &Workload<'_>) -> Result<()> {
    show(cluster, &["scale", "deployment/web", "--replicas=0", "-n", NAMESPACE]).await?;
    let node = cluster.nodes().into_iter().next().context("a cluster has nodes")?;
    for (from, target) in [
        (web.client_on(node.name()), web.cluster_ip("tcp", 0)?),
        (Place::Node(node.name().to_owned()), web.cluster_ip("tcp", 1)?),
        (Place::Outside, web.node_port("tcp", node.addresses().v4.into())?),
    ] {
        let summary = pointsman::eventually(PATIENCE, &format!("{from} to {target} refused"), async || {
            let summary = cluster.probe(&from, &target, 3).await?;
            let refused = summary.errors.get("connection refused").copied().unwrap_or_default();
            ensure!(refused == summary.requests, "{summary:?}");
            Ok(summary)
        })
        .await?;
        println!("{from} to {target}: {:?}", summary.errors);
    }
    show(cluster, &["scale", "deployment/web", "--replicas=3", "-n", NAMESPACE]).await?;
    three_answer(cluster, &web.client_on(node.name()), &web.cluster_ip("http", 0)?, "And with pods again")
        .await?;
    Ok(())
}
