//! The command lines of the control plane, shared by the cluster and the bare API server.
//!
//! In: addresses, service networks and keys. Out: argument lists for the combined binary.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::pki::{Identity, Pki};

/// The port of every API server here; each has an address of its own.
pub const API_PORT: u16 = 6443;

/// What the components must agree on.
#[derive(Debug, Clone)]
pub struct ControlPlane {
    /// A loopback address that only this control plane uses, for what clients need not reach.
    pub loopback: Ipv4Addr,
    /// Where the API server listens and what it advertises.
    pub address: IpAddr,
    /// Service networks, `V4,V6`.
    pub service_networks: String,
    /// Pod networks, `V4,V6`.
    pub pod_networks: String,
    /// Keys and identities.
    pub pki: Pki,
}

impl ControlPlane {
    /// Where clients reach the etcd at `loopback`.
    #[must_use]
    pub fn etcd_url(loopback: Ipv4Addr) -> String {
        format!("http://{loopback}:2379")
    }

    /// The etcd at `loopback`, which forgets on power loss: that makes it several times faster.
    #[must_use]
    pub fn etcd(loopback: Ipv4Addr, data: &Path) -> Vec<String> {
        let peer = format!("http://{loopback}:2380");
        let client = Self::etcd_url(loopback);
        vec![
            "etcd".into(),
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
            format!("--data-dir={}", data.display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
        ]
    }

    /// The API server.
    #[must_use]
    pub fn api_server(&self) -> Vec<String> {
        let pki = &self.pki;
        vec![
            "kube-apiserver".into(),
            format!("--etcd-servers={}", Self::etcd_url(self.loopback)),
            format!("--bind-address={}", self.address),
            format!("--advertise-address={}", self.address),
            format!("--secure-port={API_PORT}"),
            format!("--tls-cert-file={}", pki.server_certificate().display()),
            format!("--tls-private-key-file={}", pki.server_key().display()),
            format!("--token-auth-file={}", pki.tokens().display()),
            "--authorization-mode=Node,RBAC".into(),
            "--enable-admission-plugins=NodeRestriction".into(),
            "--allow-privileged=true".into(),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!("--service-account-signing-key-file={}", pki.service_account_key().display()),
            format!("--service-account-key-file={}", pki.service_account_public_key().display()),
            format!("--service-cluster-ip-range={}", self.service_networks),
            "--kubelet-preferred-address-types=InternalIP".into(),
            "--profiling=false".into(),
        ]
    }

    /// The controller manager. Pod networks are not allotted by it: CNI is configured before the node exists.
    #[must_use]
    pub fn controller_manager(&self) -> Vec<String> {
        let pki = &self.pki;
        let kubeconfig = pki.kubeconfig(&Identity::component("kube-controller-manager"));
        vec![
            "kube-controller-manager".into(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--bind-address={}", self.loopback),
            "--leader-elect=false".into(),
            "--use-service-account-credentials=true".into(),
            format!("--service-account-private-key-file={}", pki.service_account_key().display()),
            format!("--root-ca-file={}", pki.ca().display()),
            format!("--cluster-cidr={}", self.pod_networks),
            format!("--service-cluster-ip-range={}", self.service_networks),
            "--allocate-node-cidrs=false".into(),
        ]
    }

    /// The scheduler.
    #[must_use]
    pub fn scheduler(&self) -> Vec<String> {
        let kubeconfig = self.pki.kubeconfig(&Identity::component("kube-scheduler"));
        vec![
            "kube-scheduler".into(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--bind-address={}", self.loopback),
            "--leader-elect=false".into(),
        ]
    }
}

/// A client with the identity of the kubeconfig `path`.
pub async fn client(path: &Path) -> Result<kube::Client> {
    let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("reading {}", path.display()))?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("using {}", path.display()))?;
    kube::Client::try_from(config).with_context(|| format!("a client from {}", path.display()))
}

/// Whether the API server says it is ready to serve.
pub async fn is_ready(client: &kube::Client) -> bool {
    let Ok(request) = http_get("/readyz") else { return false };
    let answer = tokio::time::timeout(Duration::from_secs(2), client.request_text(request)).await;
    matches!(answer, Ok(Ok(text)) if text == "ok")
}

fn http_get(path: &str) -> Result<http::Request<Vec<u8>>> {
    http::Request::get(path).body(Vec::new()).context("building a request")
}
