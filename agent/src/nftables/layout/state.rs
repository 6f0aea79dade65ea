//! What the table holds, and what must change when the plan does.
//!
//! In: the [`Plan`] and its [`Changes`]; at the start, the table as it was read back. Out: a [`Transaction`]. One change costs what
//! that Service costs: nothing here walks over all of them but [`State::adopt`] and [`State::full`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;

use super::class::{Class, Classes};
use super::delta::Delta;
use super::fixed::{self, CLASSES, CLUSTER_IPS, HAIRPIN, SOURCES};
use super::ids::Ids;
use super::port::{List, Port, entrances, reorder, source_ranges, traffic};
use super::recovered::{Prior, Recovered};
use super::word::{self, LENGTH_SHIFT, LOCAL};
use crate::nftables::ruleset::{Counted, Element, Elements, Origin, Rules, Ruleset, Transaction, Tuple};
use crate::plan::{Backend, Changes, NodePlan, Plan, PortId, PortPlan, Target};

/// What this layout cannot do for a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Not served: the node has more Service ports, or more different numbers of endpoints, than there are numbers for.
    Unserved,
    /// Served, but clients do not stay with their endpoint: it has more than 4,095, or there are too many different timeouts.
    WithoutAffinity,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unserved => {
                "not served: mode nftables has no number left for it; use another mode on this node"
            }
            Self::WithoutAffinity => {
                "served without session affinity: mode nftables can keep 4095 endpoints apart, and 2048 pairs of timeout and number of endpoints"
            }
        })
    }
}

/// What our table of one family holds.
#[derive(Clone, Debug)]
pub struct State {
    node: NodePlan,
    /// Mark bits that are masqueraded: more than the one that is set only while it changes.
    accepted: u32,
    ports: BTreeMap<PortId, Port>,
    /// Who has the group of twice this number.
    numbers: Ids<PortId>,
    /// The same for those that the last change removed, as long as errors may name them.
    gone: HashMap<u32, PortId>,
    limits: BTreeMap<PortId, Limit>,
    lists: Lists,
    classes: Classes,
    cluster_ips: Uses,
    /// Addresses of endpoints on this node.
    hairpins: Uses,
}

/// Addresses, with the number of those who need them.
type Uses = HashMap<IpAddr, usize>;

impl State {
    /// The state that a plan asks for, with the numbers that `read` has: clients stay where they are, and `read` and
    /// [`State::full`] differ only in what has really changed.
    #[must_use]
    pub fn adopt(plan: &Plan, node: &NodePlan, read: &Ruleset) -> Self {
        let mut found = Recovered::from(read);
        let mut state = Self {
            node: node.clone(),
            accepted: node.mark | found.accepted,
            ports: BTreeMap::new(),
            numbers: Ids::new(word::PORTS),
            gone: HashMap::new(),
            limits: BTreeMap::new(),
            lists: Lists::new(std::mem::take(&mut found.lists)),
            classes: Classes::new(),
            cluster_ips: Uses::new(),
            hairpins: Uses::new(),
        };
        for (class, number) in std::mem::take(&mut found.classes) {
            state.classes.found(class, number);
        }
        let groups = state.claim_groups(plan, &found);
        let mut ports = Vec::new();
        for (id, port) in plan.ports(node.family) {
            let prior = found.prior(groups.get(id).copied());
            // Compared with what was read, not written: what is collected on the way does not matter.
            let laid_out = state.lay_out(id, port, prior, &mut Delta::default());
            ports.extend(laid_out.map(|port| (id.clone(), port)));
        }
        // Made of all at once, a tree has no gaps.
        state.ports = ports.into_iter().collect();
        state.lists.forget_unused();
        state.classes.retire(&mut Delta::default());
        state
    }

    /// The groups of Services that the kernel knows. A ClusterIP says more about who a Service is than other addresses.
    fn claim_groups(&mut self, plan: &Plan, found: &Recovered) -> HashMap<PortId, u32> {
        let mut groups = HashMap::new();
        for by_cluster_ip in [true, false] {
            for (id, port) in plan.ports(self.node.family) {
                let take = if by_cluster_ip { usize::from(port.cluster_ip.is_some()) } else { usize::MAX };
                for (set, key, _) in entrances(id, port).into_iter().take(take) {
                    if !groups.contains_key(id)
                        && let Some(group) = found.group(set, key)
                        && self.numbers.claim(group >> 1, id.clone())
                    {
                        groups.insert(id.clone(), group);
                    }
                }
            }
        }
        groups
    }

    /// Follows the plan; returns what must change in the kernel.
    pub fn advance(&mut self, plan: &Plan, changes: &Changes) -> Transaction {
        let mut delta = Delta::default();
        self.gone.clear();
        let lengths = self.lists.lengths();
        if let Some(node) = plan.node(self.node.family) {
            self.follow_node(node, &mut delta);
        }
        let mut replaced = Vec::new();
        let family = self.node.family;
        for id in changes.ports.iter().filter(|id| id.family == family) {
            self.replace(id, plan.port(id), &mut delta, &mut replaced);
        }
        // What the new ones do not need either.
        for (id, port) in replaced {
            self.release(id, &port, &mut delta);
        }
        self.classes.retire(&mut delta);
        if self.lists.lengths() != lengths {
            delta.rewrite(self.check_source_list());
        }
        delta.into_transaction()
    }

    fn follow_node(&mut self, node: &NodePlan, delta: &mut Delta) {
        // Whether it counts is decided when a table is adopted.
        let node = NodePlan { counters: self.node.counters, ..node.clone() };
        if node == self.node {
            return;
        }
        let before = fixed::chains(&self.node, self.accepted);
        self.accepted |= node.mark;
        for (set, element) in fixed::elements(&self.node) {
            delta.remove(set, element, Origin::NONE);
        }
        for (set, element) in fixed::elements(&node) {
            delta.add(set, element, Origin::NONE);
        }
        self.node = node;
        self.reframe(&before, delta);
    }

    fn reframe(&self, before: &[Rules], delta: &mut Delta) {
        let after = fixed::chains(&self.node, self.accepted);
        after
            .into_iter()
            .zip(before)
            .filter(|(new, old)| new != *old)
            .for_each(|(new, _)| delta.rewrite(new));
    }

    /// Whether more mark bits are masqueraded than are set.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        self.accepted != self.node.mark
    }

    /// Stops masquerading mark bits that nobody sets any more. To be called when packets that carry them have left.
    pub fn settle(&mut self) -> Transaction {
        let mut delta = Delta::default();
        let before = fixed::chains(&self.node, self.accepted);
        self.accepted = self.node.mark;
        self.reframe(&before, &mut delta);
        delta.into_transaction()
    }

    /// Removes the chains that an earlier change has left without use. Kernels before 6.2 refuse that until about a second after
    /// that change; on an error, what is installed is unknown.
    pub fn sweep(&mut self) -> Transaction {
        self.classes.sweep()
    }

    fn replace<'a>(
        &mut self,
        id: &'a PortId,
        plan: Option<&Arc<PortPlan>>,
        delta: &mut Delta,
        replaced: &mut Vec<(&'a PortId, Port)>,
    ) {
        let old = self.ports.remove(id);
        self.limits.remove(id);
        let new = plan.and_then(|plan| {
            let prior = old.as_ref().map(|old| Prior {
                group: Some(old.group),
                slots: old.slots.as_deref().cloned().unwrap_or_default(),
                orders: [old.cluster.order.to_vec(), old.local.order.to_vec()],
            });
            self.lay_out(id, plan, prior.unwrap_or_default(), delta)
        });
        Port::replace(id, old.as_ref(), new.as_ref(), delta);
        if let Some(new) = new {
            self.ports.insert(id.clone(), new);
        }
        replaced.extend(old.map(|old| (id, old)));
    }

    /// Gives a Service port its numbers, and takes its share of what several use.
    fn lay_out(
        &mut self,
        id: &PortId,
        plan: &Arc<PortPlan>,
        prior: Prior,
        delta: &mut Delta,
    ) -> Option<Port> {
        if entrances(id, plan).is_empty() {
            // All that it names belongs to others.
            return None;
        }
        let unserved = |state: &mut Self| {
            state.limits.insert(id.clone(), Limit::Unserved);
        };
        let Some(number) = prior.group.map(|group| group >> 1).or_else(|| self.numbers.take(id.clone()))
        else {
            unserved(self);
            return None;
        };
        let origin = Origin(number);
        let mut list = None;
        if let Some(ranges) = source_ranges(plan) {
            list = self.lists.acquire(ranges, delta, origin);
            if list.is_none() {
                self.numbers.free(number);
                unserved(self);
                return None;
            }
        }
        let [cluster, local] = prior.orders;
        let mut port = Port {
            plan: plan.clone(),
            group: number << 1,
            list,
            counted: self.node.counters,
            slots: plan.affinity.and_then(|_| prior.slots.follow(plan)),
            cluster: List { order: reorder(cluster, &plan.cluster), ..List::default() },
            local: List { order: reorder(local, &plan.local), ..List::default() },
        };
        let mut classified = self.classify(&mut port, delta);
        if !classified && port.slots.take().is_some() {
            self.unclassify(&port);
            classified = self.classify(&mut port, delta);
        }
        if !classified {
            unserved(self);
        } else if plan.affinity.is_some() && port.slots.is_none() {
            self.limits.insert(id.clone(), Limit::WithoutAffinity);
        }
        for (set, element, address) in shared(plan) {
            if acquire(self.uses(set), address) {
                delta.add(set, element, origin);
            }
        }
        Some(port)
    }

    /// Finds the classes of a Service port's lists; false if there are too many.
    fn classify(&mut self, port: &mut Port, delta: &mut Delta) -> bool {
        let timeout = port.plan.affinity.filter(|_| port.slots.is_some());
        let (group, origin) = (port.group, port.origin());
        let mut complete = true;
        for (list, local) in [(&mut port.cluster, false), (&mut port.local, true)] {
            let wanted = (!list.order.is_empty()).then(|| Class::new(list.order.len(), timeout, local));
            let found = wanted.and_then(|class| Some((class, self.classes.acquire(class, delta, origin)?)));
            complete &= found.is_some() == wanted.is_some();
            let group = if local { group | LOCAL } else { group };
            list.class = found.map(|(class, _)| class);
            list.word = found.map(|(_, number)| word::with(number, group));
        }
        if port.cluster.order.is_empty() && [port.plan.internal, port.plan.external].contains(&Target::Drop) {
            // Somebody answers, but only where policy Local forbids to go: the group is there, and leads nowhere.
            port.cluster.word = Some(group);
        }
        complete
    }

    fn unclassify(&mut self, port: &Port) {
        for class in [port.cluster.class, port.local.class].into_iter().flatten() {
            self.classes.release(class);
        }
    }

    /// Gives back what a Service port has had.
    fn release(&mut self, id: &PortId, port: &Port, delta: &mut Delta) {
        self.unclassify(port);
        if port.list.is_some()
            && let Some(ranges) = source_ranges(&port.plan)
        {
            self.lists.release(&ranges, delta, port.origin());
        }
        for (set, element, address) in shared(&port.plan) {
            if release(self.uses(set), address) {
                delta.remove(set, element, port.origin());
            }
        }
        if !self.ports.contains_key(id) {
            self.numbers.free(port.group >> 1);
            self.gone.insert(port.group >> 1, id.clone());
        }
    }

    fn uses(&mut self, set: &'static str) -> &mut Uses {
        if set == HAIRPIN { &mut self.hairpins } else { &mut self.cluster_ips }
    }

    /// Whose addresses its table looks at.
    #[must_use]
    pub fn family(&self) -> IpFamily {
        self.node.family
    }

    /// Whether packets are counted. A table that was made otherwise has to be adopted anew.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.node.counters
    }

    /// What clients have sent to each Service port since its frontends are in the table, as it was read back.
    pub fn traffic(&self, read: &Ruleset) -> impl Iterator<Item = (&PortId, Counted)> {
        let counted = |set: &str, key: &Tuple| read.elements.get(set)?.get(key)?.extra.as_ref()?.counted;
        self.ports.iter().map(move |(id, port)| {
            let all = entrances(id, &port.plan).into_iter();
            let all = all.filter_map(|(set, key, _)| counted(traffic(set), &key));
            let sum = all.fold(Counted::default(), |sum, one| Counted {
                packets: sum.packets + one.packets,
                bytes: sum.bytes + one.bytes,
            });
            (id, sum)
        })
    }

    /// The Service port that an operation of the last transaction is for.
    #[must_use]
    pub fn port(&self, origin: Origin) -> Option<&PortId> {
        self.numbers.get(origin.0).or_else(|| self.gone.get(&origin.0))
    }

    /// The Service ports that are not served as they should be.
    #[must_use]
    pub fn limits(&self) -> &BTreeMap<PortId, Limit> {
        &self.limits
    }

    fn check_source_list(&self) -> Rules {
        fixed::check_source_list(self.node.family, &self.lists.lengths())
    }

    fn chains(&self) -> impl Iterator<Item = Rules> {
        fixed::chains(&self.node, self.accepted)
            .into_iter()
            .chain([self.check_source_list()])
            .chain(self.classes.chains())
    }

    /// The whole table.
    #[must_use]
    pub fn full(&self) -> Ruleset {
        let mut ruleset = Ruleset::new(fixed::table(self.node.family));
        for set in fixed::sets(self.node.counters) {
            ruleset.add_set(set);
        }
        for Rules { chain, rules } in self.chains() {
            ruleset.add_chain(chain, rules);
        }
        let mut elements: BTreeMap<&'static str, Vec<Element>> = BTreeMap::new();
        let mut add = |set, element| elements.entry(set).or_default().push(element);
        let classes = self.classes.elements().map(|element| (CLASSES, element));
        fixed::elements(&self.node).into_iter().chain(classes).for_each(|(set, element)| add(set, element));
        for (id, port) in &self.ports {
            port.elements(id, &mut add);
            shared(&port.plan).for_each(|(set, element, _)| add(set, element));
        }
        for (list, ranges) in self.lists.all() {
            for range in ranges {
                add(SOURCES, source(list, *range));
            }
        }
        ruleset.elements =
            elements.into_iter().map(|(set, elements)| (set.into(), Elements::from(elements))).collect();
        ruleset
    }
}

/// The elements of a Service port that others may need too.
fn shared(plan: &PortPlan) -> impl Iterator<Item = (&'static str, Element, IpAddr)> {
    let cluster_ip =
        plan.cluster_ip.map(|address| (CLUSTER_IPS, Element::new(Tuple::new().address(address)), address));
    let local = plan.cluster.iter().chain(&plan.local).filter(|backend| backend.local);
    let hairpins = local.map(|Backend { address, .. }| {
        (HAIRPIN, Element::new(Tuple::new().address(*address).address(*address)), *address)
    });
    cluster_ip.into_iter().chain(hairpins)
}

/// One user more; whether it is the first.
fn acquire(uses: &mut Uses, address: IpAddr) -> bool {
    let count = uses.entry(address).or_default();
    *count += 1;
    *count == 1
}

/// One user less; whether it was the last.
fn release(uses: &mut Uses, address: IpAddr) -> bool {
    let Some(count) = uses.get_mut(&address) else { return false };
    *count -= 1;
    let last = *count == 0;
    if last {
        uses.remove(&address);
    }
    last
}

fn source(list: u32, range: IpNet) -> Element {
    let word = u32::from(range.prefix_len()) << LENGTH_SHIFT | list;
    Element::new(Tuple::new().word(word).address(range.network()))
}

/// Lists of source ranges: equal ones are shared.
#[derive(Clone, Debug)]
struct Lists {
    numbers: Ids<()>,
    /// With number and users.
    known: BTreeMap<Vec<IpNet>, (u32, usize)>,
    /// Prefix lengths in use, with the number of ranges.
    lengths: BTreeMap<u8, usize>,
}

impl Lists {
    /// Takes over the lists of the kernel.
    fn new(found: BTreeMap<u32, Vec<IpNet>>) -> Self {
        let mut lists =
            Self { numbers: Ids::new(word::LISTS), known: BTreeMap::new(), lengths: BTreeMap::new() };
        for (number, ranges) in found {
            if !lists.known.contains_key(&ranges) && lists.numbers.claim(number, ()) {
                lists.known.insert(ranges, (number, 0));
            }
        }
        lists
    }

    /// All lists with their numbers.
    fn all(&self) -> impl Iterator<Item = (u32, &[IpNet])> {
        self.known.iter().map(|(ranges, (number, _))| (*number, &**ranges))
    }

    /// Forgets those that nobody has asked for.
    fn forget_unused(&mut self) {
        let numbers = &mut self.numbers;
        self.known.retain(|_, (number, users)| {
            if *users == 0 {
                numbers.free(*number);
            }
            *users > 0
        });
    }

    fn acquire(&mut self, ranges: Vec<IpNet>, delta: &mut Delta, origin: Origin) -> Option<u32> {
        let known = self.known.get(&ranges).copied();
        let (number, users) = known.or_else(|| Some((self.numbers.take(())?, 0)))?;
        if users == 0 {
            for range in &ranges {
                *self.lengths.entry(range.prefix_len()).or_default() += 1;
                delta.add(SOURCES, source(number, *range), origin);
            }
        }
        self.known.insert(ranges, (number, users + 1));
        Some(number)
    }

    fn release(&mut self, ranges: &[IpNet], delta: &mut Delta, origin: Origin) {
        let Some((number, users)) = self.known.get_mut(ranges) else { return };
        *users -= 1;
        if *users > 0 {
            return;
        }
        let number = *number;
        self.known.remove(ranges);
        self.numbers.free(number);
        for range in ranges {
            delta.remove(SOURCES, source(number, *range), origin);
            if let Some(count) = self.lengths.get_mut(&range.prefix_len()) {
                *count -= 1;
                if *count == 0 {
                    self.lengths.remove(&range.prefix_len());
                }
            }
        }
    }

    /// Prefix lengths in use.
    fn lengths(&self) -> BTreeSet<u8> {
        self.lengths.keys().copied().collect()
    }
}
