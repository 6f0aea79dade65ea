//! What a packet to one Service port gets.
//!
//! In: a Service, its endpoints, the node. Out: [`PortPlan`].

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::ops::Deref;
use std::sync::Arc;

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;

use super::claims::{Claims, Frontend, Kind};
use super::endpoints::{Categories, categorise};
use super::node::NodePlan;
use crate::model::{Model, ObjectName, Protocol, Service, family_of};

/// Names one port of one Service in one family. A pointer, since several records of each hold it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(Arc<PortName>);

/// What a [`PortId`] points to.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName {
    /// The Service.
    pub service: ObjectName,
    /// The family.
    pub family: IpFamily,
    /// The port's name; empty if the only port has none.
    pub port: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
}

impl Deref for PortId {
    type Target = PortName;

    fn deref(&self) -> &PortName {
        &self.0
    }
}

impl PortId {
    /// The name of a port; empty if the only port of the Service has none.
    #[must_use]
    pub fn new(service: ObjectName, family: IpFamily, port: Arc<str>, protocol: Protocol) -> Self {
        Self(Arc::new(PortName { service, family, port, protocol }))
    }

    /// The least of a Service's, whether it exists or not.
    pub(super) fn first_of(service: &ObjectName) -> Self {
        Self::new(service.clone(), IpFamily::IPv4, "".into(), Protocol::Tcp)
    }

    /// `namespace/name`, and `:port` if the port has a name.
    #[must_use]
    pub fn text(&self) -> String {
        if self.port.is_empty() {
            self.service.to_string()
        } else {
            format!("{}:{}", self.service, self.port)
        }
    }
}

/// One endpoint of a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Whether it is on this node.
    pub local: bool,
    /// Its share of new connections beside that of others, where a mode can weigh.
    pub weight: NonZeroU16,
}

impl Backend {
    /// Its address and port.
    #[must_use]
    pub fn socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// Where packets of one kind go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// To one of [`PortPlan::cluster`], by chance.
    Cluster,
    /// To one of [`PortPlan::local`], by chance.
    Local,
    /// Refused: nobody answers anywhere.
    Reject,
    /// Dropped: somebody answers, but not here, and policy Local forbids to go there.
    Drop,
}

/// Who may use a load balancer's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// From these blocks.
    pub ranges: Vec<IpNet>,
    /// The node itself may: a packet that it sends to a load balancer's address it owns carries that address as source.
    pub node: bool,
}

/// What a packet to one Service port gets, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// The port at the virtual addresses.
    pub port: u16,
    /// The ClusterIP.
    pub cluster_ip: Option<IpAddr>,
    /// External IPs.
    pub external_ips: Box<[IpAddr]>,
    /// Addresses of load balancers.
    pub load_balancer_ips: Box<[IpAddr]>,
    /// The port at the node's addresses.
    pub node_port: Option<u16>,
    /// The port of the load balancer's health check, which a firewall must let in.
    pub health_check_node_port: Option<u16>,
    /// Where packets to the ClusterIP go.
    pub internal: Target,
    /// Where packets to external IPs, load balancers and NodePorts go; a local pod or the node itself are exempt
    /// under [`PortPlan::external_local`].
    pub external: Target,
    /// Policy Local for external traffic: the source stays, and packets of local pods and of the node itself
    /// go to [`PortPlan::cluster`] nevertheless, as a connection to the ClusterIP would.
    pub external_local: bool,
    /// Who may use the load balancer's addresses; `None`: everybody.
    pub sources: Option<Sources>,
    /// For how many seconds a client stays with its endpoint.
    pub affinity: Option<u32>,
    /// Endpoints for policy Cluster, sorted. Empty if nothing uses them.
    pub cluster: Box<[Backend]>,
    /// Endpoints for policy Local, sorted. Empty if nothing uses them.
    pub local: Box<[Backend]>,
    /// All endpoints that answer, near or far, sorted; for UDP and SCTP. A flow to one of them is not cut only because new
    /// flows go elsewhere.
    pub serving: Box<[Backend]>,
}

/// Service ports with policy Local that have endpoints on other nodes only: their packets are dropped here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoLocal {
    /// By the policy for traffic to ClusterIPs.
    pub internal: usize,
    /// By the policy for traffic from outside.
    pub external: usize,
}

impl NoLocal {
    pub(super) fn add(&mut self, other: Self) {
        self.internal += other.internal;
        self.external += other.external;
    }

    pub(super) fn subtract(&mut self, other: Self) {
        self.internal -= other.internal;
        self.external -= other.external;
    }
}

impl PortPlan {
    /// Which policy Local finds no endpoint here: kube-proxy's metric `no_local_endpoints_total` counts these.
    #[must_use]
    pub fn no_local(&self) -> NoLocal {
        NoLocal {
            internal: usize::from(self.internal == Target::Drop),
            external: usize::from(self.external_local && self.external == Target::Drop),
        }
    }

    /// Where flows may lead: the endpoints that answer.
    #[must_use]
    pub fn serving_sockets(&self) -> Vec<SocketAddr> {
        self.serving.iter().map(Backend::socket).collect()
    }

    /// How many endpoints it uses.
    #[must_use]
    pub fn endpoints(&self) -> usize {
        self.backends().count()
    }

    /// The endpoints it uses, each once, sorted.
    pub fn backends(&self) -> impl Iterator<Item = &Backend> {
        let only_local = self.local.iter().filter(|backend| self.cluster.binary_search(backend).is_err());
        let mut all: Vec<&Backend> = self.cluster.iter().chain(only_local).collect();
        all.sort_unstable();
        all.into_iter()
    }
}

/// Plans the ports of a Service in one family.
pub(super) fn plan_ports(
    name: &ObjectName,
    service: &Service,
    model: &Model,
    node: &NodePlan,
    claims: &Claims,
) -> Vec<(PortId, PortPlan)> {
    let family = node.family;
    if !service.has_family(family) {
        return Vec::new();
    }
    service
        .ports
        .iter()
        .map(|port| {
            let id = claims.id(name, family, port);
            let owned = |kind: Kind, addresses: &[IpAddr]| -> Box<[IpAddr]> {
                let own = |address: &IpAddr| {
                    claims.owns(Frontend::Address(*address, port.protocol, port.port), kind, &id)
                };
                addresses.iter().copied().filter(own).collect()
            };
            let external_ips = owned(Kind::ExternalIp, &service.external_ips);
            let load_balancer_ips = owned(Kind::LoadBalancer, &service.load_balancer_ips);
            let node_port = port.node_port.filter(|number| {
                claims.owns(Frontend::NodePort(family, port.protocol, *number), Kind::NodePort, &id)
            });
            let externally = port.node_port.is_some()
                || service
                    .external_ips
                    .iter()
                    .chain(&service.load_balancer_ips)
                    .any(|ip| family_of(*ip) == family);
            let Categories { mut cluster, mut local, any, serving } =
                categorise(model, name, &port.name, port.protocol, node);
            let resolve = |policy_local: bool| match (policy_local, cluster.is_empty(), local.is_empty()) {
                (true, _, false) => Target::Local,
                (true, _, true) if any => Target::Drop,
                (false, false, _) => Target::Cluster,
                _ => Target::Reject,
            };
            let (internal, external) = (resolve(service.internal_local), resolve(service.external_local));
            let external_local = service.external_local && externally;
            if service.internal_local && !externally {
                cluster.clear();
            }
            if !service.internal_local && !external_local {
                local.clear();
            }
            let plan = PortPlan {
                port: port.port,
                cluster_ip: owned(Kind::ClusterIp, &service.cluster_ips).first().copied(),
                sources: service
                    .source_ranges
                    .as_deref()
                    .filter(|_| !load_balancer_ips.is_empty())
                    .and_then(|ranges| sources(ranges, node)),
                external_ips,
                load_balancer_ips,
                node_port,
                health_check_node_port: service.health_check_node_port,
                internal,
                external,
                external_local,
                affinity: service.affinity,
                cluster: cluster.into(),
                local: local.into(),
                serving: if port.protocol == Protocol::Tcp { Box::default() } else { serving.into() },
            };
            (id, plan)
        })
        .collect()
}

/// Ranges of the family; `None` if there is no restriction in it. If none of the entries could be read, nobody may pass.
fn sources(ranges: &[IpNet], node: &NodePlan) -> Option<Sources> {
    let own: Vec<IpNet> =
        ranges.iter().copied().filter(|range| family_of(range.addr()) == node.family).collect();
    if own.iter().any(|range| range.prefix_len() == 0) || (own.is_empty() && !ranges.is_empty()) {
        return None;
    }
    let node = node.primary.is_some_and(|address| own.iter().any(|range| range.contains(&address)));
    Some(Sources { ranges: own, node })
}
