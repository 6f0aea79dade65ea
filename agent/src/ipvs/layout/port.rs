//! One Service port as virtual servers, members of sets, and rules where it cannot be done without.
//!
//! In: a [`PortPlan`], and what holds for the [`Site`]. Out: a [`Piece`]. Pure, and decides nothing but which server has which of the
//! plan's endpoints.
//!
//! A virtual server cannot tell senders apart. Under policy Local for external traffic that matters: outsiders get the endpoints of this
//! node, local pods and the node itself get all. The server has those for outsiders, and one rule per frontend leads the others past
//! it, straight to an endpoint. Without an endpoint here outsiders are dropped before the server, which can have all, and no rule is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use pointsman_crds::node_config::NodeIpvs;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IpvsScheduler;

use super::sets::{Element, Set, frontend};
use crate::iptables::render::{Chains, Rule, caught, render_near};
use crate::ipvs::server::{Key, Persistence, SCHEDULER_FALLBACK, SCHEDULER_PORT, Settings, scheduler_name};
use crate::model::{Protocol, family_of};
use crate::plan::{Backend, NodePlan, PortId, PortPlan, Target};

/// What holds for all Service ports of a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    /// The node.
    pub node: NodePlan,
    /// Settings of the mode.
    pub ipvs: NodeIpvs,
}

/// What a virtual server is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// How it chooses.
    pub settings: Settings,
    /// Real servers, with their weights.
    pub reals: BTreeMap<SocketAddr, u32>,
}

/// What one Service port adds to the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Virtual servers.
    pub servers: BTreeMap<Key, Server>,
    /// Members of sets. Those of [`Set::Loops`], [`Set::Health`] and [`Set::Addresses`] may be other ports' too.
    pub members: BTreeSet<Element>,
    /// Rules for [`super::frame::NEAR`].
    pub near: BTreeSet<Rule>,
    /// Chains that those lead to.
    pub chains: Chains,
}

impl Site {
    /// Whether a frontend's address is left to others.
    pub(crate) fn excludes(&self, address: IpAddr) -> bool {
        self.ipvs.exclude_cidrs.iter().any(|block| block.contains(&address))
    }

    /// Whether an address is one that NodePorts may answer on.
    pub(crate) fn is_own(&self, address: IpAddr) -> bool {
        self.node.own.contains(&address) || self.node.node_ports.addresses.contains(&address)
    }

    /// The addresses that NodePorts answer on.
    fn node_port_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let ports = &self.node.node_ports;
        let addresses = if ports.all { &self.node.own } else { &ports.addresses };
        addresses.iter().copied().filter(|address| !self.excludes(*address))
    }

    fn settings(&self, affinity: Option<u32>) -> Settings {
        // A real server that gets no more connections still has its place in the tables of these two.
        let flags = match self.ipvs.scheduler {
            IpvsScheduler::Sh => SCHEDULER_FALLBACK,
            IpvsScheduler::Mh => SCHEDULER_FALLBACK | SCHEDULER_PORT,
            _ => 0,
        };
        let prefix = if self.node.family == IpFamily::IPv4 { 32 } else { 128 };
        Settings {
            scheduler: scheduler_name(self.ipvs.scheduler).into(),
            flags,
            persistence: affinity.map(|timeout| Persistence { timeout, prefix }),
        }
    }
}

/// The virtual addresses of a Service port. No two Service ports have the same, with port and protocol.
pub(crate) fn addresses(port: &PortPlan) -> impl Iterator<Item = IpAddr> {
    let external = port.external_ips.iter().chain(&port.load_balancer_ips);
    port.cluster_ip.iter().chain(external).copied()
}

/// Renders one Service port. `taken` are virtual addresses that are the node's own, with their ports: no NodePort answers there.
pub(crate) fn render(id: &PortId, port: &PortPlan, site: &Site, taken: &BTreeSet<Key>) -> Piece {
    let mut painter = Painter { id, port, site, piece: Piece::default() };
    painter.internal();
    painter.external(taken);
    painter.others();
    painter.piece
}

struct Painter<'a> {
    id: &'a PortId,
    port: &'a PortPlan,
    site: &'a Site,
    piece: Piece,
}

impl Painter<'_> {
    fn member(&mut self, set: Set, member: String) {
        self.piece.members.insert((set, member));
    }

    /// Makes a virtual server, and binds its address unless the node has it anyway. Returns whether it may.
    fn serve(&mut self, set: Set, address: IpAddr, number: u16, backends: &[Backend]) -> bool {
        if self.site.excludes(address) {
            return false;
        }
        let real = |backend: &Backend| (backend.socket(), u32::from(backend.weight.get()));
        let reals = backends.iter().map(real).collect();
        let server = Server { settings: self.site.settings(self.port.affinity), reals };
        self.piece.servers.insert(Key::new(self.id.protocol, address, number), server);
        self.member(set, frontend(address, self.id.protocol, number));
        if !self.site.is_own(address) {
            self.member(Set::Addresses, address.to_string());
        }
        true
    }

    fn internal(&mut self) {
        let port = self.port;
        let Some(address) = port.cluster_ip else { return };
        let backends = match port.internal {
            Target::Cluster => &*port.cluster,
            Target::Local => &port.local,
            Target::Reject | Target::Drop => &[],
        };
        if self.serve(Set::Internal, address, port.port, backends) && port.internal == Target::Drop {
            self.member(Set::Drop, frontend(address, self.id.protocol, port.port));
        }
    }

    fn external(&mut self, taken: &BTreeSet<Key>) {
        let port = self.port;
        let set = if port.external_local { Set::Policy } else { Set::External };
        // If all endpoints are here, senders need not be told apart.
        let near = port.external_local && port.external == Target::Local && port.cluster != port.local;
        let backends = match port.external {
            Target::Local => &*port.local,
            Target::Drop | Target::Cluster => &port.cluster,
            Target::Reject => &[],
        };
        let mut chain = None;
        if near {
            let (first, chains) = render_near(self.id, port, &self.site.node);
            chain = Some(first);
            self.piece.chains = chains;
        }
        let virtual_addresses = port.external_ips.iter().chain(&port.load_balancer_ips);
        let mut frontends: Vec<(IpAddr, u16)> =
            virtual_addresses.map(|address| (*address, port.port)).collect();
        if let Some(number) = port.node_port {
            let free = |address: &IpAddr| !taken.contains(&Key::new(self.id.protocol, *address, number));
            let addresses = self.site.node_port_addresses().filter(free);
            frontends.extend(addresses.map(|address| (address, number)));
        }
        for (address, number) in frontends {
            if !self.serve(set, address, number, backends) {
                continue;
            }
            if port.external == Target::Drop {
                self.member(Set::Away, frontend(address, self.id.protocol, number));
            }
            if let Some(chain) = &chain {
                let comment = format!("{} from pods and node", self.id.text());
                let rule = caught(Some(address), self.id.protocol, number, &comment, chain.as_str());
                self.piece.near.insert(rule);
            }
        }
    }

    fn others(&mut self) {
        let (port, protocol) = (self.port, self.id.protocol);
        if let Some(sources) = port.sources.as_ref().filter(|_| !port.cluster.is_empty()) {
            for address in port.load_balancer_ips.iter().filter(|address| !self.site.excludes(**address)) {
                let guarded = frontend(*address, protocol, port.port);
                for range in &sources.ranges {
                    // The tool leaves out the length of a whole address.
                    let whole = range.prefix_len() == range.max_prefix_len();
                    let range = if whole { range.addr().to_string() } else { range.trunc().to_string() };
                    self.piece.members.insert((Set::Allowed, format!("{guarded},{range}")));
                }
                if sources.node {
                    self.piece.members.insert((Set::Allowed, format!("{guarded},{address}")));
                }
                self.piece.members.insert((Set::Guarded, guarded));
            }
        }
        for backend in port.backends().filter(|backend| backend.local) {
            let end = frontend(backend.address, protocol, backend.port);
            self.piece.members.insert((Set::Loops, format!("{end},{}", backend.address)));
        }
        if let Some(number) = port.health_check_node_port {
            self.member(Set::Health, number.to_string());
        }
    }
}

/// The frontend that a NodePort would have to be left out for: a virtual address that is the node's own.
pub(crate) fn claims<'a>(
    protocol: Protocol,
    port: &'a PortPlan,
    site: &'a Site,
) -> impl Iterator<Item = Key> + use<'a> {
    addresses(port)
        .filter(|address| site.is_own(*address) && family_of(*address) == site.node.family)
        .map(move |address| Key::new(protocol, address, port.port))
}
