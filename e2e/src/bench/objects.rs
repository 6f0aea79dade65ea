//! The Services that are measured, and putting them into an API server.
//!
//! In: how many. Out: objects that follow from their number, so that every run has the same: three endpoints each, a
//! fifth with NodePorts, a twentieth each with a LoadBalancer address and with ClientIP affinity; ClusterIPs are spread
//! over the whole block, as the API server's own allocation spreads them.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// The namespace of all Services here.
pub const NAMESPACE: &str = "bench";
/// Endpoints of a Service.
pub const ENDPOINTS: u32 = 3;
/// The port of every ClusterIP and LoadBalancer address.
pub const PORT: u16 = 80;
/// The port of every endpoint.
pub const ENDPOINT_PORT: u16 = 8080;
/// What the endpoints' addresses of one namespace hold.
pub const LARGEST: u32 = 30_000;

/// Ports 30000 to 32699; the API server hands out up to 32767.
const NODE_PORTS: u32 = 2700;
/// Requests under way to the API server. It is busy with so many, and more of them wait for each other.
const REQUESTS: usize = 32;

/// The Service with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbered(pub u32);

impl Numbered {
    /// Its name.
    #[must_use]
    pub fn name(self) -> String {
        format!("s{:05}", self.0)
    }

    fn slice_name(self) -> String {
        format!("{}-1", self.name())
    }

    /// Its ClusterIP. A prime beyond the number of Services spreads them without a collision; the first 256 addresses
    /// and the last 5,000 of the block stay free.
    #[must_use]
    pub fn cluster_ip(self) -> Ipv4Addr {
        above(Ipv4Addr::new(10, 96, 1, 0), u32::try_from(u64::from(self.0) * 7919 % 60_013).unwrap_or(0))
    }

    /// Its ClusterIP and port.
    #[must_use]
    pub fn frontend(self) -> SocketAddr {
        (self.cluster_ip(), PORT).into()
    }

    /// Its NodePort, if it has one.
    #[must_use]
    pub fn node_port(self) -> Option<u16> {
        let nth = self.0 / 5;
        (self.0.is_multiple_of(5) && nth < NODE_PORTS).then(|| 30_000 + u16::try_from(nth).unwrap_or(0))
    }

    /// Its LoadBalancer address, if it has one.
    #[must_use]
    pub fn vip(self) -> Option<Ipv4Addr> {
        (self.0 % 20 == 1).then(|| above(Ipv4Addr::new(198, 18, 0, 0), self.0 / 20 + 1))
    }

    /// Whether it keeps a client at an endpoint.
    #[must_use]
    pub fn affine(self) -> bool {
        self.0 % 20 == 2
    }

    /// The `nth` of its endpoints.
    #[must_use]
    pub fn endpoint(self, nth: u32) -> Ipv4Addr {
        above(Ipv4Addr::new(10, 226, 0, 1), self.0 * ENDPOINTS + nth)
    }

    /// What its first endpoint is replaced with.
    #[must_use]
    pub fn new_endpoint(self) -> Ipv4Addr {
        above(Ipv4Addr::new(10, 227, 128, 1), self.0)
    }

    fn service(self) -> Value {
        service(&self.name(), self.cluster_ip(), self.node_port(), self.vip().is_some(), self.affine())
    }

    fn slice(self) -> Value {
        let endpoints: Vec<Ipv4Addr> = (0..ENDPOINTS).map(|nth| self.endpoint(nth)).collect();
        slice(&self.name(), &self.slice_name(), &endpoints)
    }
}

/// `count` Services without NodePort, LoadBalancer address or affinity, spread over the first `size`; different ones as
/// long as there are enough.
#[must_use]
pub fn plain(size: u32, count: usize) -> Vec<Numbered> {
    let is_plain = |one: &Numbered| one.node_port().is_none() && one.vip().is_none() && !one.affine();
    let all: Vec<Numbered> = (0..size).map(Numbered).filter(is_plain).collect();
    // A prime step visits all of them, and neighbours do not follow each other.
    (0..count).filter_map(|nth| all.get(nth * 7919 % all.len()).copied()).collect()
}

fn above(first: Ipv4Addr, offset: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(first.to_bits() + offset)
}

fn service(name: &str, ip: Ipv4Addr, node_port: Option<u16>, balanced: bool, affine: bool) -> Value {
    let mut port = json!({"name": "web", "protocol": "TCP", "port": PORT, "targetPort": ENDPOINT_PORT});
    let mut spec = json!({"type": "ClusterIP", "clusterIP": ip});
    if let Some(node_port) = node_port {
        spec["type"] = json!("NodePort");
        port["nodePort"] = json!(node_port);
    }
    if balanced {
        spec["type"] = json!("LoadBalancer");
        spec["allocateLoadBalancerNodePorts"] = json!(false);
    }
    if affine {
        spec["sessionAffinity"] = json!("ClientIP");
    }
    spec["ports"] = json!([port]);
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec,
    })
}

fn slice(service: &str, name: &str, endpoints: &[Ipv4Addr]) -> Value {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(
            |address| json!({"addresses": [address], "conditions": {"ready": true}, "nodeName": "elsewhere"}),
        )
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": service}},
        "ports": [{"name": "web", "protocol": "TCP", "port": ENDPOINT_PORT}],
        "endpoints": endpoints,
    })
}

fn object<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("an object of the benchmark")
}

/// Writes Services and their endpoints.
#[derive(Clone)]
pub struct Writer {
    services: Api<Service>,
    slices: Api<EndpointSlice>,
}

impl Writer {
    /// Writes with this client.
    #[must_use]
    pub fn new(client: &Client) -> Self {
        Self {
            services: Api::namespaced(client.clone(), NAMESPACE),
            slices: Api::namespaced(client.clone(), NAMESPACE),
        }
    }

    /// Makes the first endpoint of a Service `address`.
    pub async fn set_first_endpoint(&self, of: Numbered, address: Ipv4Addr) -> Result<()> {
        let endpoints = [address, of.endpoint(1), of.endpoint(2)];
        let patch = Patch::Merge(slice(&of.name(), &of.slice_name(), &endpoints));
        let patched = self.slices.patch(&of.slice_name(), &PatchParams::default(), &patch).await;
        patched.with_context(|| format!("changing an endpoint of {}", of.name())).map(drop)
    }

    /// Adds the one endpoint of the Service `x<number>`, which is to come. A program that knew the Service first would
    /// write twice, and wait in between.
    pub async fn add_slice(&self, number: u8, endpoint: Ipv4Addr) -> Result<()> {
        let name = format!("x{number}");
        let slice = object(slice(&name, &name, &[endpoint]))?;
        self.slices.create(&PostParams::default(), &slice).await.context("adding endpoints").map(drop)
    }

    /// Adds the Service `x<number>`.
    pub async fn add_service(&self, number: u8) -> Result<()> {
        let service = object(service(&format!("x{number}"), added_ip(number), None, false, false))?;
        self.services.create(&PostParams::default(), &service).await.context("adding a Service").map(drop)
    }

    /// Removes a Service that [`Self::add_service`] has added.
    pub async fn remove(&self, number: u8) -> Result<()> {
        let name = format!("x{number}");
        self.services.delete(&name, &DeleteParams::default()).await?;
        self.slices.delete(&name, &DeleteParams::default()).await.context("removing a Service").map(drop)
    }

    async fn create(&self, of: Numbered) -> Result<()> {
        let post = PostParams::default();
        let failed = || format!("creating {}", of.name());
        self.services.create(&post, &object(of.service())?).await.with_context(failed)?;
        if let Some(vip) = of.vip() {
            let status = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": [{"ip": vip}]}}}));
            self.services
                .patch_status(&of.name(), &PatchParams::default(), &status)
                .await
                .with_context(failed)?;
        }
        self.slices.create(&post, &object(of.slice())?).await.with_context(failed).map(drop)
    }
}

/// The ClusterIP of a Service that is added.
#[must_use]
pub fn added_ip(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 250, number)
}

/// Creates the first `size` Services in an empty API server.
pub async fn fill(client: &Client, size: u32) -> Result<()> {
    ensure!((20..=LARGEST).contains(&size), "{size} Services: give 20 to {LARGEST}");
    let namespace = object(json!({"metadata": {"name": NAMESPACE}}))?;
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    let writer = Writer::new(client);
    stream::iter(0..size)
        .map(|number| writer.create(Numbered(number)))
        .buffer_unordered(REQUESTS)
        .try_collect()
        .await
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn addresses_and_ports_are_unique_and_in_their_blocks() {
        let all: Vec<Numbered> = (0..LARGEST).map(Numbered).collect();
        let ips: BTreeSet<_> = all.iter().map(|one| one.cluster_ip()).collect();
        assert_eq!(ips.len(), all.len());
        assert!(ips.iter().all(|ip| ip.octets()[..2] == [10, 96] && *ip < added_ip(0)));
        let ports: Vec<_> = all.iter().filter_map(|one| one.node_port()).collect();
        assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), ports.len());
        let endpoints: BTreeSet<_> = (all.iter())
            .flat_map(|one| (0..3).map(|nth| one.endpoint(nth)).chain([one.new_endpoint()]))
            .collect();
        assert_eq!(endpoints.len(), all.len() * 4);
        assert!(endpoints.iter().all(|ip| ip.octets()[0] == 10 && matches!(ip.octets()[1], 226 | 227)));
    }

    #[test]
    fn the_mix_is_as_announced() {
        let count = |is: fn(&Numbered) -> bool| (0..1000).map(Numbered).filter(is).count();
        assert_eq!(count(|one| one.node_port().is_some()), 200);
        assert_eq!(count(|one| one.vip().is_some()), 50);
        assert_eq!(count(|one| one.affine()), 50);
    }

    #[test]
    fn changing_services_are_plain_and_different() {
        for size in [1000, 5000, 10_000] {
            let chosen = plain(size, 200);
            assert_eq!(chosen.iter().map(|one| one.0).collect::<BTreeSet<_>>().len(), 200);
            assert!(chosen.iter().all(|one| one.0 < size && one.node_port().is_none() && !one.affine()));
        }
    }
}
