//! A cluster survives the death of its components, an interrupted `up` can be taken down or continued, and
//! `down` leaves nothing.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::{Cluster, Component};
use pointsman_e2e::layout;
use pointsman_e2e::probe::Place;
use pointsman_e2e::state::{Proxy, Record};
use pointsman_e2e::up::Options;
use tokio::process::Command;
use tokio::time::sleep;

#[tokio::test(flavor = "multi_thread")]
async fn components_die_and_come_back() {
    let name = "test-lifecycle";
    let outcome = kill_components(name).await;
    let record = Record::load(name).expect("the record");
    Cluster::down(name).await.expect("taking the cluster down");
    outcome.unwrap_or_else(|error| panic!("{error:#}"));
    nothing_is_left(name, record.as_ref()).unwrap();
    Cluster::down(name).await.expect("taking down what is down already");
}

async fn kill_components(name: &str) -> Result<()> {
    let options = Options::new(name, Proxy::KubeProxy("nftables".into()));
    let cluster = Cluster::up(&options).await?;
    let workload = Workload::create(&cluster, "lifecycle").await?;
    let node = cluster.nodes().into_iter().next().context("a node")?;
    // Wait until kube-proxy serves the Service, which is not what is tested here.
    let outside = workload.node_port("http", node.addresses().v4.into())?;
    let service = workload.cluster_ip("tcp", 1)?;
    let pod = workload.client_on(node.name());
    cluster.wait_until(&[], async || Ok(cluster.probe(&pod, &service, 5).await?.failed == 0)).await?;
    cluster
        .wait_until(&[], async || Ok(cluster.probe(&Place::Outside, &outside, 5).await?.failed == 0))
        .await?;

    let requests = cluster.start_probe(&Place::Outside, &outside, &[]).await?;
    let stream = cluster.start_probe(&pod, &service, &["-stream"]).await?;
    let scheduler = cluster.running(&Component::Scheduler).context("the scheduler runs")?;
    let killed = [
        Component::Etcd,
        Component::ApiServer,
        Component::Containerd(node.name().to_owned()),
        Component::Kubelet(node.name().to_owned()),
    ];
    for component in &killed {
        cluster.kill(component).await?;
        ensure!(cluster.running(component).is_none(), "{component} is dead");
    }
    sleep(Duration::from_secs(3)).await;
    let cluster = Cluster::up(&options).await?;
    for component in &killed {
        ensure!(cluster.running(component).is_some(), "{component} runs again");
    }
    ensure!(cluster.running(&Component::Scheduler) == Some(scheduler), "what lived was left alone");
    for (what, probe) in [("new connections", requests), ("one stream", stream)] {
        let summary = probe.finish().await?;
        ensure!(summary.failed == 0 && summary.requests > 20, "{what}: {summary:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_up_leaves_nothing_after_down() {
    let name = "test-killed";
    // With a virtual machine, which boots then.
    for (seconds, more) in [(1, None), (4, None), (3, Some("--ipvs-node"))] {
        let mut up = Command::new(env!("CARGO_BIN_EXE_cluster"));
        up.args(["up", "--name", name, "--nodes", "1", "--proxy", "none"]).args(more);
        let mut up = up.spawn().expect("hack/cluster up");
        while Record::load(name).expect("a readable record").is_none() {
            assert!(up.try_wait().expect("its status").is_none(), "up failed before it recorded the cluster");
            sleep(Duration::from_millis(50)).await;
        }
        sleep(Duration::from_secs(seconds)).await;
        up.kill().await.expect("killing it");
        let record = Record::load(name).expect("the record");
        Cluster::down(name).await.expect("taking the cluster down");
        nothing_is_left(name, record.as_ref()).unwrap();
    }
}

/// Nothing of the cluster is on this machine: no folder, mount, link, cgroup or process.
fn nothing_is_left(name: &str, record: Option<&Record>) -> Result<()> {
    let dir = layout::dir(name);
    ensure!(!dir.exists(), "{} is left", dir.display());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mark = dir.display().to_string();
    ensure!(!mounts.contains(&mark), "mounts are left:\n{mounts}");
    let host_link = record.context("the cluster was recorded")?.layout(name)?.host_link();
    ensure!(!Path::new("/sys/class/net").join(&host_link).exists(), "the link {host_link} is left");
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup")?.flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.chain(["/sys/fs/cgroup".into()]) {
        let cgroup = hierarchy.join(layout::cgroup(name));
        ensure!(!cgroup.exists(), "{} is left", cgroup.display());
    }
    for process in std::fs::read_dir("/proc")?.flatten() {
        let words = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        ensure!(!words.contains(&mark), "a process is left: {words}");
    }
    Ok(())
}
