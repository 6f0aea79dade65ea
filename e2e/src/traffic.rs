//! Constant traffic: new connections, open streams and datagrams, from everywhere to live endpoints.
//!
//! In: a cluster with a workload. Out: an error if a single request is lost while a test does its worst.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use tokio::time::sleep;

use crate::checks::Workload;
use crate::cluster::Cluster;
use crate::pointsman::eventually;
use crate::probe::{Place, RunningProbe};

/// How long pods may take to go.
const PATIENCE: Duration = Duration::from_mins(2);

/// Probes at work.
pub struct Traffic(Vec<(String, RunningProbe)>);

impl Traffic {
    /// Begins it, through the first node and through `node`.
    pub async fn start(cluster: &Cluster, web: &Workload<'_>, node: &str) -> Result<Self> {
        only_live_endpoints(cluster, web).await?;
        let addresses = cluster.node(node)?.addresses();
        let mut probes = Vec::new();
        for (from, target, flags) in [
            (web.client_on("node1"), web.cluster_ip("http", 0)?, &["-interval", "10ms"][..]),
            (web.client_on(node), web.cluster_ip("http", 1)?, &["-interval", "10ms"]),
            (Place::Node(node.to_owned()), web.cluster_ip("http", 0)?, &["-interval", "10ms"]),
            (Place::Outside, web.node_port("http", addresses.v4.into())?, &["-interval", "10ms"]),
            (Place::Outside, web.node_port("tcp", addresses.v6.into())?, &["-interval", "20ms", "-stream"]),
            (web.client_on(node), web.cluster_ip("tcp", 0)?, &["-interval", "20ms", "-stream"]),
            (web.client_on("node1"), web.cluster_ip("udp", 0)?, &["-interval", "20ms"]),
            (web.client_on(node), web.cluster_ip("udp", 1)?, &["-interval", "20ms", "-stream"]),
        ] {
            let what = format!("{from} to {target} {}", flags.join(" "));
            probes.push((what, cluster.start_probe(&from, &target, flags).await?));
        }
        sleep(Duration::from_millis(500)).await;
        Ok(Self(probes))
    }

    /// Ends it; an error if a single request failed.
    pub async fn finish(self) -> Result<()> {
        sleep(Duration::from_millis(500)).await;
        let mut faults = Vec::new();
        for (what, probe) in self.0 {
            let summary = probe.finish().await?;
            eprintln!("  {what}: {} requests, {} failed", summary.requests, summary.failed);
            if summary.failed > 0 || summary.requests < 20 {
                faults.push(format!("{what}: {summary:?}"));
            }
        }
        ensure!(faults.is_empty(), "{}", faults.join("\n"));
        Ok(())
    }
}

/// Waits until no web pod is on its way out and every node has heard of it: what is asked for is that nothing to live
/// endpoints is lost, and an earlier trial may have scaled down a moment ago.
async fn only_live_endpoints(cluster: &Cluster, web: &Workload<'_>) -> Result<()> {
    let pods = Api::<Pod>::namespaced(cluster.client(), web.namespace());
    eventually(PATIENCE, "three web pods and no other", async || {
        let list = pods.list(&ListParams::default().labels("app=web")).await?;
        let leaving = list.items.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count();
        ensure!(
            list.items.len() == 3 && leaving == 0,
            "{} pods, {leaving} of them leaving",
            list.items.len()
        );
        Ok(())
    })
    .await?;
    // Longer than the least time between two writes.
    sleep(Duration::from_secs(3)).await;
    Ok(())
}
