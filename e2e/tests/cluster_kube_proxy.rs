//! The connectivity checks pass with kube-proxy: what they ask of Pointsman is what Kubernetes gives.

use pointsman_e2e::checks::Workload;
use pointsman_e2e::cluster::Cluster;
use pointsman_e2e::state::Proxy;
use pointsman_e2e::up::Options;

#[tokio::test(flavor = "multi_thread")]
async fn the_checks_are_fair() {
    let name = "test-kube-proxy";
    let outcome = check(name).await;
    // Taken down before the verdict: a failed test leaves the machine as it was.
    Cluster::down(name).await.expect("taking the cluster down");
    let checks = outcome.unwrap_or_else(|error| panic!("{error:#}"));
    assert!(checks > 50, "only {checks} checks");
}

async fn check(name: &str) -> anyhow::Result<usize> {
    let options = Options::new(name, Proxy::KubeProxy("iptables".into()));
    let cluster = Cluster::up(&options).await?;
    Workload::create(&cluster, "checks").await?.check_all().await
}
