//! What frontends lead to, and whether an entry contradicts it.
//!
//! In: frontends with their serving endpoints, the frontends that are gone, and one [`Entry`] of the kernel.
//! Out: whether that entry must go. Pure.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::wire::Entry;
pub use crate::model::Protocol;

/// A cluster IP, external IP or load-balancer address, with its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// Where clients send to.
    pub address: SocketAddr,
    /// With which protocol.
    pub protocol: Protocol,
}

impl Frontend {
    /// A frontend.
    #[must_use]
    pub fn new(address: SocketAddr, protocol: Protocol) -> Self {
        Self { address, protocol }
    }
}

/// A node port: a frontend on every address of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodePort {
    /// Where clients send to.
    pub port: u16,
    /// With which protocol.
    pub protocol: Protocol,
}

impl NodePort {
    /// A node port.
    #[must_use]
    pub fn new(port: u16, protocol: Protocol) -> Self {
        Self { port, protocol }
    }
}

/// Either kind of frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the variants are documented by their types")]
pub enum Target {
    Frontend(Frontend),
    NodePort(NodePort),
}

impl Target {
    /// With which protocol clients send to it.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        match self {
            Self::Frontend(frontend) => frontend.protocol,
            Self::NodePort(node_port) => node_port.protocol,
        }
    }
}

impl From<Frontend> for Target {
    fn from(frontend: Frontend) -> Self {
        Self::Frontend(frontend)
    }
}

impl From<NodePort> for Target {
    fn from(node_port: NodePort) -> Self {
        Self::NodePort(node_port)
    }
}

/// The serving endpoints of a service port (terminating ones included while they serve). Cheap to clone: all frontends
/// of a service port share one list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints(Arc<[SocketAddr]>);

impl Endpoints {
    /// The set of these addresses; order and repetition do not matter.
    #[must_use]
    pub fn new(addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        let mut addresses: Vec<_> = addresses.into_iter().collect();
        addresses.sort_unstable();
        addresses.dedup();
        Self(addresses.into())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this address is among them.
    #[must_use]
    pub fn contains(&self, address: &SocketAddr) -> bool {
        self.0.binary_search(address).is_ok()
    }

    /// Whether all of these are among `others`.
    #[must_use]
    pub fn is_subset(&self, others: &Self) -> bool {
        self.0.iter().all(|address| others.contains(address))
    }
}

/// What the frontends of one family lead to, and which ones are gone.
///
/// Traffic policies, topology and affinity are left out on purpose: a flow to an endpoint that still serves is not cut
/// only because new flows would go elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serving {
    /// Serving endpoints of every frontend; none is a fact too.
    pub frontends: HashMap<Frontend, Endpoints>,
    /// Serving endpoints of every node port.
    pub node_ports: HashMap<NodePort, Endpoints>,
    /// Frontends that existed since the last run that succeeded, and do not any more.
    pub removed_frontends: HashSet<Frontend>,
    /// Node ports that existed since the last run that succeeded, and do not any more.
    pub removed_node_ports: HashSet<NodePort>,
    /// The addresses on which node ports answer (loopback addresses count always). Without them any destination with
    /// the port of a node port counts, as in kube-proxy; then flows to other hosts' services on such a port lose their
    /// entries too, which a masqueraded flow notices by a new source port.
    pub node_addresses: Option<HashSet<IpAddr>>,
}

impl Serving {
    /// Whether an entry with this protocol could be stale at all.
    #[must_use]
    pub fn concerns(&self, protocol: Protocol) -> bool {
        self.frontends.keys().any(|frontend| frontend.protocol == protocol)
            || self.node_ports.keys().any(|node_port| node_port.protocol == protocol)
            || self.removed_frontends.iter().any(|frontend| frontend.protocol == protocol)
            || self.removed_node_ports.iter().any(|node_port| node_port.protocol == protocol)
    }

    fn is_node_address(&self, address: IpAddr) -> bool {
        match &self.node_addresses {
            None => true,
            Some(addresses) => address.is_loopback() || addresses.contains(&address),
        }
    }
}

/// Whether this entry leads somewhere its frontend does not lead any more, and may be deleted.
///
/// - Where an entry leads is the source of its replies; for an entry that was never translated, the frontend itself.
/// - A frontend without serving endpoints loses all entries (k/k#139628), a node port without them those that were
///   translated: a datagram to the node itself may be for something else that listens on that port. Where the node's
///   addresses are not known, so that only the port says what it is, none.
/// - A frontend that is gone loses all entries (k/k#141371), a node port that is gone those that were translated.
/// - TCP entries go only while nobody has answered the first SYN (k/k#101607): an established connection to an endpoint
///   that is shutting down must be able to end well (k/k#102631).
/// - In another zone than the default, untranslated entries are those of a switch (Open vSwitch tracks packets once more before
///   they meet our rules) and stay.
#[must_use]
pub fn stale(entry: &Entry, serving: &Serving) -> bool {
    let protocol = entry.protocol;
    if protocol == Protocol::Tcp && !entry.is_unanswered_syn() {
        return false;
    }
    let frontend = entry.original.destination;
    let endpoint = &entry.reply.source;
    let translated = *endpoint != frontend;
    if !translated && entry.zone.is_some() {
        return false;
    }
    let key = Frontend::new(frontend, protocol);
    if let Some(endpoints) = serving.frontends.get(&key) {
        return !endpoints.contains(endpoint);
    }
    if serving.removed_frontends.contains(&key) {
        return true;
    }
    if !serving.is_node_address(frontend.ip()) {
        return false;
    }
    let key = NodePort::new(frontend.port(), protocol);
    if let Some(endpoints) = serving.node_ports.get(&key) {
        let ours = !endpoints.is_empty() || (translated && serving.node_addresses.is_some());
        return ours && !endpoints.contains(endpoint);
    }
    translated && serving.removed_node_ports.contains(&key)
}

#[cfg(test)]
mod tests;
