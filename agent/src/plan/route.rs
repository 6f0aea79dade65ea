//! The oracle: where one packet goes, by the plan alone.
//!
//! In: a new connection's first [`Packet`]. Out: a [`Verdict`]. Every renderer is tested against it: the same packet, walked
//! through the rendered rules or sent through the kernel, must end where this says.

use std::net::IpAddr;

use super::Plan;
use super::node::{LocalTraffic, NodePlan};
use super::port::{Backend, PortPlan, Target};
use crate::model::{Protocol, family_of};

/// The first packet of a connection, as it reaches the node or is made on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The interface that it came in on; `None` if the node itself made it.
    pub interface: Option<String>,
    /// Source address.
    pub source: IpAddr,
    /// Whether the source is one of the node's own addresses.
    pub source_is_local: bool,
    /// Destination address.
    pub destination: IpAddr,
    /// Whether the destination is one of the node's own addresses.
    pub destination_is_local: bool,
    /// Protocol.
    pub protocol: Protocol,
    /// Destination port.
    pub port: u16,
}

/// One possible destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hop {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The endpoint's port.
    pub port: u16,
    /// Whether the endpoint sees the node's address as source.
    pub masquerade: bool,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is not for a Service.
    Untouched,
    /// It goes to one of these.
    Forward(Vec<Hop>),
    /// It is for a port that a ClusterIP does not have: rejected where that costs no rule per Service, otherwise
    /// untouched (CIP-6, CIP-7).
    Undefined,
    /// The sender is told that nobody is there.
    Reject,
    /// It vanishes.
    Drop,
}

/// By which kind of frontend a packet came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entrance {
    /// The ClusterIP.
    Internal,
    /// An external IP, an address of a load balancer, or a NodePort.
    External,
}

impl PortPlan {
    /// Where a packet goes that came to one of this port's frontends and, if that is a load balancer's, may use it.
    #[must_use]
    pub fn route(&self, node: &NodePlan, entrance: Entrance, packet: &Packet) -> Verdict {
        match entrance {
            Entrance::Internal => internal(self, node, packet),
            Entrance::External => external(self, node, packet),
        }
    }
}

impl Plan {
    /// Where a packet goes.
    #[must_use]
    pub fn route(&self, packet: &Packet) -> Verdict {
        let Some(node) = self.node(family_of(packet.destination)) else { return Verdict::Untouched };
        let ports = || self.ports(node.family).filter(|(id, _)| id.protocol == packet.protocol);
        let at = |addresses: &[IpAddr]| addresses.contains(&packet.destination);
        for (_, port) in ports().filter(|(_, port)| port.port == packet.port) {
            if port.cluster_ip == Some(packet.destination) {
                return internal(port, node, packet);
            }
            if at(&port.load_balancer_ips) {
                return if admitted(port, packet) || port.cluster.is_empty() {
                    external(port, node, packet)
                } else {
                    Verdict::Drop
                };
            }
            if at(&port.external_ips) {
                return external(port, node, packet);
            }
        }
        match ports().find(|(_, port)| port.node_port == Some(packet.port)) {
            Some((_, port)) if answers(node, packet) => external(port, node, packet),
            _ if self.ports(node.family).any(|(_, port)| port.cluster_ip == Some(packet.destination)) => {
                Verdict::Undefined
            }
            _ => Verdict::Untouched,
        }
    }
}

fn answers(node: &NodePlan, packet: &Packet) -> bool {
    let all = node.node_ports.all && packet.destination_is_local && !packet.destination.is_loopback();
    all || node.node_ports.addresses.contains(&packet.destination)
}

fn admitted(port: &PortPlan, packet: &Packet) -> bool {
    port.sources.as_ref().is_none_or(|sources| {
        sources.ranges.iter().any(|range| range.contains(&packet.source))
            || (sources.node && port.load_balancer_ips.contains(&packet.source))
    })
}

fn from_local_pod(node: &NodePlan, packet: &Packet) -> bool {
    let interface = packet.interface.as_deref();
    match &node.local_traffic {
        LocalTraffic::Unknown => false,
        LocalTraffic::Sources(blocks) => blocks.iter().any(|block| block.contains(&packet.source)),
        LocalTraffic::Interface(name) => interface == Some(name.as_str()),
        LocalTraffic::InterfacePrefix(prefix) => interface.is_some_and(|name| name.starts_with(prefix)),
    }
}

fn internal(port: &PortPlan, node: &NodePlan, packet: &Packet) -> Verdict {
    let foreign = node.local_traffic != LocalTraffic::Unknown && !from_local_pod(node, packet);
    forward(port, port.internal, node.masquerade_all || foreign, packet)
}

fn external(port: &PortPlan, node: &NodePlan, packet: &Packet) -> Verdict {
    if !port.external_local {
        forward(port, port.external, true, packet)
    } else if from_local_pod(node, packet) && !port.cluster.is_empty() {
        forward(port, Target::Cluster, false, packet)
    } else if packet.source_is_local && !port.cluster.is_empty() {
        forward(port, Target::Cluster, true, packet)
    } else {
        forward(port, port.external, false, packet)
    }
}

fn forward(port: &PortPlan, target: Target, masquerade: bool, packet: &Packet) -> Verdict {
    let to = |backends: &[Backend]| {
        // Hairpin: an endpoint that reaches itself must see another source, or it would answer itself directly.
        let hop = |backend: &Backend| Hop {
            address: backend.address,
            port: backend.port,
            masquerade: masquerade || backend.address == packet.source,
        };
        Verdict::Forward(backends.iter().map(hop).collect())
    };
    match target {
        Target::Cluster => to(&port.cluster),
        Target::Local => to(&port.local),
        Target::Reject => Verdict::Reject,
        Target::Drop => Verdict::Drop,
    }
}
