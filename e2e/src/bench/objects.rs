//! The Services that are measured, and writing them to an API server.
//!
//! In: a [`Size`]. Out: objects that follow from their number, so that every run has the same: a fifth with NodePorts, a
//! twentieth each with a LoadBalancer address and with ClientIP affinity; ClusterIPs are spread over the whole block, as
//! the API server's own allocation spreads them.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::lab::FIRST_ENDPOINT;

/// The namespace of all Services here.
pub const NAMESPACE: &str = "bench";
/// The port of every ClusterIP and LoadBalancer address.
pub const PORT: u16 = 80;
/// The port of every endpoint.
pub const ENDPOINT_PORT: u16 = 8080;
/// The ClusterIPs and what endpoints are replaced with are for so many Services.
pub const LARGEST: u32 = 30_000;
/// As many as the controller of Kubernetes puts into one EndpointSlice.
pub const MOST_ENDPOINTS: u32 = 100;

/// Ports 30000 to 32699; the API server hands out up to 32767.
const NODE_PORTS: u32 = 2700;
/// What first endpoints are replaced with: the last of the block that begins with [`FIRST_ENDPOINT`].
const FIRST_REPLACEMENT: Ipv4Addr = Ipv4Addr::new(10, 239, 128, 1);
/// The addresses that endpoints have.
const ROOM: u32 = FIRST_REPLACEMENT.to_bits() - FIRST_ENDPOINT.to_bits();

/// How many Services, and how many endpoints each of them has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    services: u32,
    endpoints: u32,
}

impl Size {
    /// An error says which numbers would do.
    pub fn new(services: u32, endpoints: u32) -> Result<Self> {
        ensure!((20..=LARGEST).contains(&services), "{services} Services: give 20 to {LARGEST}");
        ensure!(
            (1..=MOST_ENDPOINTS).contains(&endpoints),
            "{endpoints} endpoints per Service: give 1 to {MOST_ENDPOINTS}"
        );
        ensure!(
            services * endpoints <= ROOM,
            "{services} Services with {endpoints} endpoints each need {} addresses, and there are {ROOM}: give at most {} endpoints or \
             {} Services",
            services * endpoints,
            ROOM / services,
            ROOM / endpoints,
        );
        Ok(Self { services, endpoints })
    }

    /// The number of Services.
    #[must_use]
    pub fn services(self) -> u32 {
        self.services
    }

    /// The Service with this number, from 0.
    #[must_use]
    pub fn service(self, number: u32) -> Numbered {
        Numbered { number, endpoints: self.endpoints }
    }

    /// A word for names of files and for a place on a page: `1000x3`.
    #[must_use]
    pub fn key(self) -> String {
        format!("{}x{}", self.services, self.endpoints)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} services × {} endpoints", self.services, self.endpoints)
    }
}

/// What objects have in common that differ in names, addresses and ports only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    node_port: bool,
    vip: bool,
    affine: bool,
}

/// One of the Services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Numbered {
    number: u32,
    endpoints: u32,
}

impl Numbered {
    /// Its number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.number
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> String {
        format!("s{:05}", self.number)
    }

    /// The name of its EndpointSlice.
    #[must_use]
    pub fn slice_name(self) -> String {
        format!("{}-1", self.name())
    }

    /// What kind of Service it is.
    #[must_use]
    pub fn shape(self) -> Shape {
        Shape { node_port: self.node_port().is_some(), vip: self.vip().is_some(), affine: self.affine() }
    }

    /// The names and addresses in its objects; in the same order for all of one shape.
    #[must_use]
    pub fn words(self) -> Vec<String> {
        let mut words = vec![self.name(), self.slice_name(), self.cluster_ip().to_string()];
        words.extend(self.vip().map(|vip| vip.to_string()));
        words.extend(self.all_endpoints().map(|address| address.to_string()));
        words
    }

    /// Its ClusterIP. A prime beyond the number of Services spreads them without a collision; the first 256 addresses
    /// and the last 5,000 of the block stay free.
    #[must_use]
    pub fn cluster_ip(self) -> Ipv4Addr {
        above(Ipv4Addr::new(10, 96, 1, 0), u32::try_from(u64::from(self.number) * 7919 % 60_013).unwrap_or(0))
    }

    /// Its ClusterIP and port.
    #[must_use]
    pub fn frontend(self) -> SocketAddr {
        (self.cluster_ip(), PORT).into()
    }

    /// Its NodePort, if it has one.
    #[must_use]
    pub fn node_port(self) -> Option<u16> {
        let nth = self.number / 5;
        (self.number.is_multiple_of(5) && nth < NODE_PORTS).then(|| 30_000 + u16::try_from(nth).unwrap_or(0))
    }

    /// Its LoadBalancer address, if it has one.
    #[must_use]
    pub fn vip(self) -> Option<Ipv4Addr> {
        (self.number % 20 == 1).then(|| above(Ipv4Addr::new(198, 18, 0, 0), self.number / 20 + 1))
    }

    /// Whether it keeps a client at an endpoint.
    #[must_use]
    pub fn affine(self) -> bool {
        self.number % 20 == 2
    }

    /// The `nth` of its endpoints.
    #[must_use]
    pub fn endpoint(self, nth: u32) -> Ipv4Addr {
        above(FIRST_ENDPOINT, self.number * self.endpoints + nth)
    }

    /// An endpoint of it: with many Services, another one each.
    #[must_use]
    pub fn some_endpoint(self) -> Ipv4Addr {
        self.endpoint(self.number % self.endpoints)
    }

    fn all_endpoints(self) -> impl Iterator<Item = Ipv4Addr> {
        (0..self.endpoints).map(move |nth| self.endpoint(nth))
    }

    /// What its first endpoint is replaced with.
    #[must_use]
    pub fn new_endpoint(self) -> Ipv4Addr {
        above(FIRST_REPLACEMENT, self.number)
    }

    fn service(self) -> Value {
        service(&self.name(), self.cluster_ip(), self.node_port(), self.vip().is_some(), self.affine())
    }

    fn slice(self) -> Value {
        self.slice_from(self.endpoint(0))
    }

    /// Its EndpointSlice with this first endpoint.
    fn slice_from(self, first: Ipv4Addr) -> Value {
        let endpoints: Vec<Ipv4Addr> = std::iter::once(first).chain(self.all_endpoints().skip(1)).collect();
        slice(&self.name(), &self.slice_name(), &endpoints)
    }
}

/// `count` Services without NodePort, LoadBalancer address or affinity, spread over all; different ones as long as there
/// are enough.
#[must_use]
pub fn plain(size: Size, count: usize) -> Vec<Numbered> {
    let is_plain = |one: &Numbered| one.node_port().is_none() && one.vip().is_none() && !one.affine();
    let all: Vec<Numbered> = (0..size.services).map(|number| size.service(number)).filter(is_plain).collect();
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
        let patch = Patch::Merge(of.slice_from(address));
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

    /// Creates a Service and its EndpointSlice.
    pub async fn create(&self, of: Numbered) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn all(services: u32, endpoints: u32) -> Vec<Numbered> {
        let size = Size::new(services, endpoints).unwrap();
        (0..services).map(|number| size.service(number)).collect()
    }

    #[test]
    fn addresses_and_ports_are_unique_and_in_their_blocks() {
        let most = ROOM / LARGEST;
        let all = all(LARGEST, most);
        let ips: BTreeSet<_> = all.iter().map(|one| one.cluster_ip()).collect();
        assert_eq!(ips.len(), all.len());
        assert!(ips.iter().all(|ip| ip.octets()[..2] == [10, 96] && *ip < added_ip(0)));
        let ports: Vec<_> = all.iter().filter_map(|one| one.node_port()).collect();
        assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), ports.len());
        let endpoints: BTreeSet<_> =
            all.iter().flat_map(|one| one.all_endpoints().chain([one.new_endpoint()])).collect();
        assert_eq!(endpoints.len(), all.len() * (most as usize + 1));
        assert!(endpoints.iter().all(|ip| ip.octets()[0] == 10 && matches!(ip.octets()[1], 232..=239)));
    }

    #[test]
    fn a_size_fits_the_addresses_or_says_what_would() {
        let size = Size::new(5000, 50).unwrap();
        assert_eq!(
            (size.to_string().as_str(), size.key().as_str()),
            ("5000 services × 50 endpoints", "5000x50")
        );
        for (services, endpoints, message) in [
            (19, 3, "19 Services: give 20 to 30000"),
            (1000, 101, "101 endpoints per Service: give 1 to 100"),
            (
                20_000,
                50,
                "20000 Services with 50 endpoints each need 1000000 addresses, and there are 491520: give at most 24 endpoints or \
                 9830 Services",
            ),
        ] {
            assert_eq!(Size::new(services, endpoints).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn the_mix_is_as_announced() {
        let count = |is: fn(&Numbered) -> bool| all(1000, 3).into_iter().filter(is).count();
        assert_eq!(count(|one| one.node_port().is_some()), 200);
        assert_eq!(count(|one| one.vip().is_some()), 50);
        assert_eq!(count(|one| one.affine()), 50);
    }

    #[test]
    fn changing_services_are_plain_and_different() {
        for services in [1000, 5000, 10_000] {
            let chosen = plain(Size::new(services, 3).unwrap(), 200);
            assert_eq!(chosen.iter().collect::<BTreeSet<_>>().len(), 200);
            assert!(chosen.iter().all(|one| {
                one.number < services && one.node_port().is_none() && one.vip().is_none() && !one.affine()
            }));
        }
    }
}
