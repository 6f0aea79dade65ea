//! The elements of one Service port.
//!
//! In: a [`PortPlan`], and the numbers that were given to it. Out: its elements, and which of them differ from those that it
//! had before. An endpoint keeps its index for as long as it can: removing one moves the last into its place, so that the
//! cost of a change does not depend on how many there are.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::class::Class;
use super::delta::Delta;
use super::fixed::{
    ENDPOINTS, FRONTEND_TRAFFIC, FRONTENDS, GROUPS, NODE_PORT_TRAFFIC, NODE_PORTS, RESTRICTED, SLOTS, STICKY,
};
use super::ids::Ids;
use super::word::{self, Kind, LOCAL};
use crate::model::Protocol;
use crate::nftables::ruleset::{Element, Origin, SCTP, TCP, Tuple, UDP};
use crate::plan::{Backend, PortId, PortPlan, Target};

/// Address and port of an endpoint.
pub(super) type Endpoint = (IpAddr, u16);

/// One Service port with its numbers.
#[derive(Clone, Debug)]
pub(super) struct Port {
    pub plan: Arc<PortPlan>,
    /// Its group, the local bit not set.
    pub group: u32,
    /// Who may use its load balancers' addresses: a list of source ranges.
    pub list: Option<u32>,
    /// Whether its packets are counted.
    pub counted: bool,
    /// The endpoints' slots, if clients stay with them.
    pub slots: Option<Box<Slots>>,
    /// For policy Cluster.
    pub cluster: List,
    /// For policy Local.
    pub local: List,
}

/// A list of endpoints.
#[derive(Clone, Debug, Default)]
pub(super) struct List {
    /// An endpoint per index.
    pub order: Box<[Endpoint]>,
    /// How one is chosen.
    pub class: Option<Class>,
    /// What `groups` holds for it.
    pub word: Option<u32>,
}

/// The slots of the endpoints of a Service port with affinity: the same for as long as the endpoint exists.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    numbers: Ids<()>,
    of: BTreeMap<Endpoint, u32>,
}

impl Default for Slots {
    fn default() -> Self {
        Self { numbers: Ids::new(word::SLOTS), of: BTreeMap::new() }
    }
}

impl Slots {
    /// Takes over a slot.
    pub(super) fn found(&mut self, endpoint: Endpoint, slot: u32) {
        if !self.of.contains_key(&endpoint) && self.numbers.claim(slot, ()) {
            self.of.insert(endpoint, slot);
        }
    }

    /// Slots for the endpoints of a Service port, or `None` if they are too many.
    pub(super) fn follow(mut self, plan: &PortPlan) -> Option<Box<Self>> {
        let wanted: Vec<Endpoint> = plan.backends().map(endpoint).collect();
        let mut gone = Vec::new();
        self.of.retain(|endpoint, slot| {
            let stays = wanted.binary_search(endpoint).is_ok();
            if !stays {
                gone.push(*slot);
            }
            stays
        });
        for slot in gone {
            self.numbers.free(slot);
        }
        for endpoint in wanted {
            if !self.of.contains_key(&endpoint) {
                self.of.insert(endpoint, self.numbers.take(())?);
            }
        }
        Some(Box::new(self))
    }
}

/// The elements that a packet looks for.
pub(super) fn entrances(id: &PortId, plan: &PortPlan) -> Vec<(&'static str, Tuple, Kind)> {
    let protocol = number(id.protocol);
    let at = |address: IpAddr| Tuple::new().address(address).protocol(protocol).port(plan.port);
    let internal = match plan.internal {
        Target::Local | Target::Drop => Kind::InternalLocal,
        Target::Cluster | Target::Reject => Kind::InternalCluster,
    };
    let external = if plan.external_local { Kind::ExternalLocal } else { Kind::ExternalCluster };
    let node_port =
        plan.node_port.map(|port| (NODE_PORTS, Tuple::new().protocol(protocol).port(port), external));
    let external_ips = plan.load_balancer_ips.iter().chain(&plan.external_ips);
    plan.cluster_ip
        .map(|address| (FRONTENDS, at(address), internal))
        .into_iter()
        .chain(node_port)
        .chain(external_ips.map(|address| (FRONTENDS, at(*address), external)))
        .collect()
}

/// The set that counts the packets to what a map of frontends has.
pub(super) fn traffic(set: &'static str) -> &'static str {
    if set == NODE_PORTS { NODE_PORT_TRAFFIC } else { FRONTEND_TRAFFIC }
}

/// The source ranges that have to be looked at, sorted, or `None` if everybody may use the load balancers' addresses.
pub(super) fn source_ranges(plan: &PortPlan) -> Option<Vec<IpNet>> {
    // Without endpoints everybody is refused (SR-9).
    let sources = plan.sources.as_ref().filter(|_| !plan.cluster.is_empty())?;
    let own = plan.load_balancer_ips.iter().filter(|_| sources.node).map(|address| IpNet::from(*address));
    let mut ranges: Vec<IpNet> = sources.ranges.iter().map(IpNet::trunc).chain(own).collect();
    ranges.sort_unstable();
    ranges.dedup();
    Some(ranges)
}

/// The order of endpoints in a list: as it was, as far as possible.
pub(super) fn reorder(mut order: Vec<Endpoint>, wanted: &[Backend]) -> Box<[Endpoint]> {
    let mut there = vec![false; wanted.len()];
    let mut holes = Vec::new();
    for (index, known) in order.iter().enumerate() {
        let found = wanted.binary_search_by(|backend| endpoint(backend).cmp(known));
        match found.ok().and_then(|at| there.get_mut(at)) {
            Some(there) if !*there => *there = true,
            _ => holes.push(index),
        }
    }
    let mut holes = holes.into_iter();
    for (backend, _) in wanted.iter().zip(there).filter(|(_, there)| !there) {
        match holes.next().and_then(|index| order.get_mut(index)) {
            Some(hole) => *hole = endpoint(backend),
            None => order.push(endpoint(backend)),
        }
    }
    // From the end, so that what moves into a hole is no hole.
    for hole in holes.rev() {
        order.swap_remove(hole);
    }
    order.into()
}

impl Port {
    /// Whom its elements are told to belong to.
    pub(super) fn origin(&self) -> Origin {
        Origin(self.group >> 1)
    }

    /// All elements that only it has.
    pub(super) fn elements(&self, id: &PortId, emit: &mut dyn FnMut(&'static str, Element)) {
        self.lead_in(id, emit);
        for list in self.views(id) {
            (0..list.order.len()).for_each(|index| list.emit(index, emit));
        }
    }

    /// What changes when `new` takes the place of `old`.
    pub(super) fn replace(id: &PortId, old: Option<&Self>, new: Option<&Self>, delta: &mut Delta) {
        if let Some(old) = old {
            old.lead_in(id, &mut |set, element| delta.remove(set, element, old.origin()));
            for (list, other) in old.views(id).iter().zip(views(id, new)) {
                let removed = list.without(other.as_ref());
                removed.for_each(|index| {
                    list.emit(index, &mut |set, element| delta.remove(set, element, old.origin()));
                });
            }
        }
        if let Some(new) = new {
            new.lead_in(id, &mut |set, element| delta.add(set, element, new.origin()));
            for (list, other) in new.views(id).iter().zip(views(id, old)) {
                let added = list.without(other.as_ref());
                added.for_each(|index| {
                    list.emit(index, &mut |set, element| delta.add(set, element, new.origin()));
                });
            }
        }
    }

    fn views(&self, id: &PortId) -> [View<'_>; 2] {
        [(&self.cluster, 0), (&self.local, LOCAL)].map(|(list, local)| View {
            protocol: number(id.protocol),
            group: self.group | local,
            slots: self.slots.as_deref(),
            order: &list.order,
        })
    }

    fn lead_in(&self, id: &PortId, emit: &mut dyn FnMut(&'static str, Element)) {
        let leads_to = |key: Tuple, word: u32| Element::new(key).with_data(Tuple::new().word(word));
        for (set, key, kind) in entrances(id, &self.plan) {
            emit(set, leads_to(key, kind.word(self.group)));
            if self.counted {
                emit(traffic(set), Element::new(key));
            }
        }
        if let Some(list) = self.list {
            for address in &self.plan.load_balancer_ips {
                let at = Tuple::new().address(*address).protocol(number(id.protocol)).port(self.plan.port);
                emit(RESTRICTED, leads_to(at, list));
            }
        }
        for (list, local) in [(&self.cluster, 0), (&self.local, LOCAL)] {
            if let Some(word) = list.word {
                emit(GROUPS, leads_to(Tuple::new().word(self.group | local), word));
            }
        }
    }
}

fn views<'a>(id: &PortId, port: Option<&'a Port>) -> [Option<View<'a>>; 2] {
    port.map_or([None, None], |port| port.views(id).map(Some))
}

/// A list of endpoints with all that its elements are made of.
struct View<'a> {
    protocol: u8,
    group: u32,
    slots: Option<&'a Slots>,
    order: &'a [Endpoint],
}

impl View<'_> {
    /// The elements of one index.
    fn emit(&self, index: usize, emit: &mut dyn FnMut(&'static str, Element)) {
        let (Some(endpoint), Ok(number)) = (self.order.get(index), u32::try_from(index)) else { return };
        let key = Tuple::new().protocol(self.protocol).word(self.group).word(number);
        let to_endpoint = Tuple::new().address(endpoint.0).port(endpoint.1);
        let Some(slots) = self.slots else {
            return emit(ENDPOINTS, Element::new(key).with_data(to_endpoint));
        };
        let Some(slot) = slots.of.get(endpoint) else { return };
        emit(SLOTS, Element::new(key).with_data(Tuple::new().word(word::with(*slot, self.group & !LOCAL))));
        let key = Tuple::new().protocol(self.protocol).word(word::with(*slot, self.group));
        emit(STICKY, Element::new(key).with_data(to_endpoint));
    }

    /// The indices whose elements `other` does not have.
    fn without<'a>(&'a self, other: Option<&'a Self>) -> impl Iterator<Item = usize> + 'a {
        let alike = other.filter(|other| other.slots.is_some() == self.slots.is_some());
        let same =
            move |index: &usize| alike.is_some_and(|other| other.order.get(*index) == self.order.get(*index));
        (0..self.order.len()).filter(move |index| !same(index))
    }
}

/// The number of a protocol.
pub(super) fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
        Protocol::Sctp => SCTP,
    }
}

fn endpoint(backend: &Backend) -> Endpoint {
    (backend.address, backend.port)
}
