//! The plan as virtual servers, addresses, ipsets and rules.
//!
//! In: the [`Plan`] and what changed in it. Out: [`Delta`], what must change in the kernel; and [`Full`], all that must be there. Pure.
//! Nothing is kept but the plan's own records: what a Service port adds is rendered again when it is needed, so that one change
//! costs what that Service costs and memory stays small.

pub(crate) mod frame;
pub(crate) mod port;
pub(crate) mod sets;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::iptables::names::ChainName;
use crate::iptables::render::{Chains, Rule};
use crate::ipvs::server::Key;
use crate::model::Protocol;
use crate::plan::{Changes, NodePlan, Plan, PortId, PortPlan};
use frame::chains;
use port::{Piece, Server, Site, claims, render};
use sets::{Element, Set, SetChanges};

/// What the kernel holds of ours in one family.
#[derive(Clone, Debug)]
pub(crate) struct State {
    site: Site,
    /// Mark bits that are masqueraded: more than the one that is set only while it changes.
    accepted: u32,
    ports: BTreeMap<PortId, Arc<PortPlan>>,
    /// Virtual addresses that are the node's own.
    taken: BTreeSet<Key>,
    node_ports: BTreeMap<(Protocol, u16), PortId>,
    /// Members that several Service ports may have, with their number.
    shared: BTreeMap<Element, usize>,
    /// Virtual and real servers.
    servers: usize,
}

/// All that must be there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Full {
    /// Virtual servers.
    pub servers: BTreeMap<Key, Server>,
    /// Members of sets. Those of [`Set::Addresses`] are the addresses on our device.
    pub members: BTreeSet<Element>,
    /// Chains of each of [`frame::TABLES`], without [`frame::NEAR`].
    pub chains: [Chains; 3],
    /// What is in [`frame::NEAR`].
    pub near: BTreeSet<Rule>,
}

/// What must change in the kernel.
#[derive(Debug, Default)]
pub(crate) struct Delta {
    /// Virtual servers as they are to be; `None`: to be removed.
    pub servers: BTreeMap<Key, Option<Server>>,
    /// Members of sets, and with [`Set::Addresses`] the addresses on our device.
    pub sets: SetChanges,
    /// Chains to write, of each of [`frame::TABLES`].
    pub chains: [Chains; 3],
    /// Chains to remove, in nat.
    pub stale: BTreeSet<ChainName>,
    /// Rules to add to [`frame::NEAR`].
    pub near: BTreeSet<Rule>,
    /// Rules to take from it.
    pub far: BTreeSet<Rule>,
}

impl State {
    /// The state that a plan asks for. `accepted` are mark bits that must go on being masqueraded.
    pub(crate) fn of(plan: &Plan, node: &NodePlan, accepted: u32) -> Self {
        let site = Site { node: node.clone(), ipvs: plan.config().ipvs.clone() };
        let mut state = Self {
            accepted: accepted | node.mark,
            ports: plan.ports(node.family).map(|(id, port)| (id.clone(), port.clone())).collect(),
            taken: BTreeSet::new(),
            node_ports: BTreeMap::new(),
            shared: BTreeMap::new(),
            servers: 0,
            site,
        };
        for (id, port) in &state.ports {
            state.taken.extend(claims(id.protocol, port, &state.site));
            state.node_ports.extend(port.node_port.map(|number| ((id.protocol, number), id.clone())));
        }
        for (id, port) in &state.ports {
            let piece = render(id, port, &state.site, &state.taken);
            state.servers += count(&piece);
            for element in piece.members.into_iter().filter(is_shared) {
                *state.shared.entry(element).or_default() += 1;
            }
        }
        state
    }

    /// Follows the plan; returns what must change in the kernel.
    pub(crate) fn advance(&mut self, plan: &Plan, node: &NodePlan, changes: &Changes) -> Delta {
        let before = self.chains();
        let site = Site { node: node.clone(), ipvs: plan.config().ipvs.clone() };
        let everything = matters(&self.site.node, node) || self.site.ipvs != site.ipvs;
        let old_site = std::mem::replace(&mut self.site, site);
        self.accepted |= node.mark;
        let mut ids: BTreeSet<PortId> =
            changes.ports.iter().filter(|id| id.family == node.family).cloned().collect();
        if everything {
            ids.extend(self.ports.keys().cloned());
            ids.extend(plan.ports(node.family).map(|(id, _)| id.clone()));
        }
        let old_taken = self.taken.clone();
        for (id, port) in ids.iter().filter_map(|id| Some((id, self.ports.get(id)?))) {
            for key in claims(id.protocol, port, &old_site) {
                self.taken.remove(&key);
            }
            if let Some(number) = port.node_port
                && self.node_ports.get(&(id.protocol, number)) == Some(id)
            {
                self.node_ports.remove(&(id.protocol, number));
            }
        }
        for (id, port) in ids.iter().filter_map(|id| Some((id, plan.port(id)?))) {
            self.taken.extend(claims(id.protocol, port, &self.site));
            self.node_ports.extend(port.node_port.map(|number| ((id.protocol, number), id.clone())));
        }
        // Who had or gets a NodePort where a virtual address goes before.
        for key in old_taken.symmetric_difference(&self.taken) {
            if let Key::Address { protocol, address } = key {
                ids.extend(self.node_ports.get(&(*protocol, address.port())).cloned());
            }
        }
        let mut delta = Delta::default();
        for id in ids {
            let old = self.ports.remove(&id);
            let new = plan.port(&id).cloned();
            let piece = |port: &Option<Arc<PortPlan>>, site, taken| {
                port.as_ref().map(|port| render(&id, port, site, taken)).unwrap_or_default()
            };
            let (old, now) = (piece(&old, &old_site, &old_taken), piece(&new, &self.site, &self.taken));
            if let Some(new) = new {
                self.ports.insert(id, new);
            }
            self.replace(old, now, &mut delta);
        }
        delta.settle();
        for ((written, old), new) in delta.chains.iter_mut().zip(before).zip(self.chains()) {
            written.extend(new.into_iter().filter(|(name, rules)| old.get(name) != Some(rules)));
        }
        delta
    }

    fn replace(&mut self, old: Piece, new: Piece, delta: &mut Delta) {
        self.servers = self.servers + count(&new) - count(&old);
        for key in old.servers.keys().filter(|key| !new.servers.contains_key(key)) {
            // Unless another Service port has got it already.
            delta.servers.entry(*key).or_insert(None);
        }
        for (key, server) in new.servers {
            if old.servers.get(&key) != Some(&server) || delta.servers.contains_key(&key) {
                delta.servers.insert(key, Some(server));
            }
        }
        for element in new.members.difference(&old.members) {
            if self.counts(element, true) {
                delta.sets.added.insert(element.clone());
            }
        }
        for element in old.members.difference(&new.members) {
            if self.counts(element, false) {
                delta.sets.removed.insert(element.clone());
            }
        }
        delta.far.extend(old.near);
        delta.near.extend(new.near);
        for (name, rules) in &new.chains {
            if old.chains.get(name) != Some(rules) {
                delta.chains[1].insert(*name, rules.clone());
            }
        }
        delta.stale.extend(old.chains.into_keys().filter(|name| !new.chains.contains_key(name)));
    }

    /// Counts who has a member; returns whether it comes or goes by that.
    fn counts(&mut self, element: &Element, comes: bool) -> bool {
        if !is_shared(element) {
            return true;
        }
        let count = self.shared.entry(element.clone()).or_default();
        *count = if comes { *count + 1 } else { count.saturating_sub(1) };
        let (first, last) = (comes && *count == 1, *count == 0);
        if last {
            self.shared.remove(element);
        }
        first || last
    }

    fn chains(&self) -> [Chains; 3] {
        chains(&self.site.node, self.accepted)
    }

    /// All that must be there.
    pub(crate) fn full(&self) -> Full {
        let mut full = Full { chains: self.chains(), ..Full::default() };
        for (id, port) in &self.ports {
            let piece = render(id, port, &self.site, &self.taken);
            full.servers.extend(piece.servers);
            full.members.extend(piece.members);
            full.near.extend(piece.near);
            full.chains[1].extend(piece.chains);
        }
        full
    }

    /// What holds for all Service ports.
    pub(crate) fn site(&self) -> &Site {
        &self.site
    }

    /// How many virtual and real servers there are.
    pub(crate) fn servers(&self) -> usize {
        self.servers
    }

    /// Whether more mark bits are masqueraded than are set.
    pub(crate) fn is_settling(&self) -> bool {
        self.accepted != self.site.node.mark
    }

    /// Stops masquerading mark bits that nobody sets any more. To be called when packets that carry them have left.
    pub(crate) fn settle(&mut self) -> Delta {
        let before = self.chains();
        self.accepted = self.site.node.mark;
        let mut delta = Delta::default();
        for ((written, old), new) in delta.chains.iter_mut().zip(before).zip(self.chains()) {
            written.extend(new.into_iter().filter(|(name, rules)| old.get(name) != Some(rules)));
        }
        delta
    }
}

/// Whether everything has to be rendered anew because of a change of the node.
fn matters(old: &NodePlan, new: &NodePlan) -> bool {
    old.own != new.own || old.node_ports != new.node_ports
}

fn is_shared((set, _): &Element) -> bool {
    matches!(set, Set::Loops | Set::Health | Set::Addresses)
}

fn count(piece: &Piece) -> usize {
    piece.servers.values().map(|server| 1 + server.reals.len()).sum()
}

impl Delta {
    /// Leaves out what is both added and removed.
    fn settle(&mut self) {
        self.sets.settle();
        let both: Vec<Rule> = self.near.intersection(&self.far).cloned().collect();
        for rule in both {
            self.near.remove(&rule);
            self.far.remove(&rule);
        }
    }
}
