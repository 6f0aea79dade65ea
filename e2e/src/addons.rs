//! What runs as pods: CoreDNS, and Pointsman from its charts.
//!
//! In: a cluster. Out: manifests applied and deployments available.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::artifacts;
use crate::cluster::Cluster;
use crate::command::{command, output};
use crate::images::COREDNS_IMAGE;
use crate::progress::step;
use crate::stamp::repository;

/// The namespace that Pointsman is installed in.
pub const POINTSMAN_NAMESPACE: &str = "pointsman-system";

/// Installs CoreDNS and waits until it serves.
pub async fn install_coredns(cluster: &Cluster) -> Result<()> {
    let dns = cluster.layout().dns();
    let manifests = include_str!("coredns.yaml")
        .replace("%IMAGE%", COREDNS_IMAGE)
        .replace("%API_HOST%", &cluster.layout().host().v4.to_string())
        .replace("%API_PORT%", &crate::control_plane::API_PORT.to_string())
        .replace("%DNS_V4%", &dns.v4.to_string())
        .replace("%DNS_V6%", &dns.v6.to_string());
    cluster.apply(&manifests).await?;
    wait_available(cluster, "kube-system", "deployment/coredns").await
}

/// Waits until a Deployment or DaemonSet is rolled out.
pub async fn wait_available(cluster: &Cluster, namespace: &str, workload: &str) -> Result<()> {
    let rollout = cluster.kubectl(&["rollout", "status", "-n", namespace, workload, "--timeout=120s"]).await;
    match rollout {
        Ok(_) => Ok(()),
        Err(error) => {
            let pods =
                cluster.kubectl(&["get", "pods", "-n", namespace, "-o", "wide"]).await.unwrap_or_default();
            let events =
                cluster.kubectl(&["events", "-n", namespace, "--types=Warning"]).await.unwrap_or_default();
            Err(error.context(format!("{workload} is not available:\n{pods}{events}")))
        }
    }
}

/// Loads Pointsman's images and installs its charts, as a person would; `values` are further arguments of
/// `--set`. Waits until every agent is ready.
pub async fn install_pointsman(cluster: &Cluster, values: &[&str]) -> Result<()> {
    let archives = step("images of Pointsman", crate::release::build_all()).await?;
    for archive in &archives {
        cluster.load(archive).await?;
    }
    step("chart pointsman-crds", upgrade(cluster, "pointsman-crds", &[])).await?;
    let endpoints = format!("apiServer.endpoints={{{}}}", cluster.api_endpoint());
    let mut set = vec![endpoints.as_str()];
    set.extend(values);
    step("chart pointsman", upgrade(cluster, "pointsman", &set)).await?;
    step("Pointsman ready", async {
        wait_available(cluster, POINTSMAN_NAMESPACE, "deployment/pointsman-operator").await?;
        wait_available(cluster, POINTSMAN_NAMESPACE, "daemonset/pointsman-agent").await
    })
    .await
}

/// Uninstalls Pointsman and waits until its pods are gone. Definitions, ProxyConfigurations and rules stay.
pub async fn uninstall_pointsman(cluster: &Cluster) -> Result<()> {
    let mut helm = command(artifacts::helm().await?, ["uninstall", "pointsman", "--namespace"]);
    helm.args([POINTSMAN_NAMESPACE, "--wait"]).env("KUBECONFIG", cluster.kubeconfig());
    output(&mut helm).await?;
    let gone = ["wait", "pod", "--all", "--for=delete", "--namespace", POINTSMAN_NAMESPACE, "--timeout=60s"];
    cluster.kubectl(&gone).await.map(drop)
}

/// `helm upgrade --install` of one of our charts, with `values` as arguments of `--set`.
pub async fn upgrade(cluster: &Cluster, chart: &str, values: &[&str]) -> Result<()> {
    let path = repository().join("charts").join(chart);
    let mut helm = command(artifacts::helm().await?, ["upgrade", "--install", chart]);
    // Waits until what it applied is there: definitions are served a moment after they are accepted.
    helm.arg(&path).args(["--namespace", POINTSMAN_NAMESPACE, "--create-namespace"]);
    if chart.ends_with("-crds") {
        helm.arg("--wait");
    }
    for value in values {
        helm.args(["--set", value]);
    }
    output(helm.env("KUBECONFIG", cluster.kubeconfig())).await.map(drop)
}

/// A folder for the PATH with `kubectl` and `helm`.
pub async fn tools(cluster: &Cluster) -> Result<PathBuf> {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = cluster.layout().dir().join("bin");
    std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let kubectl = dir.join("kubectl");
    let script = format!("#!/bin/sh\nexec '{}' kubectl \"$@\"\n", cluster.binary().display());
    std::fs::write(&kubectl, script)
        .and_then(|()| std::fs::set_permissions(&kubectl, PermissionsExt::from_mode(0o755)))
        .with_context(|| format!("writing {}", kubectl.display()))?;
    let link = dir.join("helm");
    let helm = artifacts::helm().await?;
    if std::fs::read_link(&link).ok().as_ref() != Some(&helm) {
        let _ = std::fs::remove_file(&link);
        symlink(&helm, &link).with_context(|| format!("linking {}", link.display()))?;
    }
    Ok(dir)
}
