//! What the kernel holds of ours, as far as we know, and how to get from there to what the plan says.
//!
//! In: the [`Plan`], what changed in it, and for a full comparison the tables read back. Out: [`Batch`]. Pure. Nothing is kept but the
//! plan's own records and the shape of the dispatch: the rules of a Service port are rendered again when they are
//! needed, so that one change costs what that Service costs and memory stays small.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::sync::Arc;

use pointsman_crds::proxy_node_status::IpFamily;

use super::batch::Batch;
use super::names::ChainName;
use super::render::{Chains, List, Rendered, Rule, render};
use super::saved::{Comparison, Saved, ours_in_filter, ours_in_nat};
use super::sets::{self, Element, Set, SetChanges};
use super::shared::{ANCHOR_CHAIN, Dispatch, DispatchTouched, Frame, JUMPS};
use crate::ipset::{self, Kind as _};
use crate::plan::{Changes, NodePlan, Plan, PortId, PortPlan};

/// What the kernel holds of ours in one family.
#[derive(Clone, Debug)]
pub(super) struct State {
    node: NodePlan,
    /// Mark bits that are masqueraded: more than the one that is set only while it changes.
    accepted: u32,
    ports: BTreeMap<PortId, Arc<PortPlan>>,
    dispatch: Dispatch,
    /// Whether sets say what is refused; otherwise rules do.
    use_sets: bool,
    /// ClusterIPs, with the number of Service ports at each.
    cluster_ips: BTreeMap<IpAddr, usize>,
    /// Members of each set, beside those of the ClusterIPs.
    refused: BTreeMap<Set, usize>,
    /// Rules in the chains of Service ports.
    port_rules: usize,
    /// Rules that Service ports add to the lists.
    listed_rules: usize,
}

/// What was read back.
#[derive(Debug, Default)]
pub(super) struct Read {
    /// Table nat.
    pub nat: Saved,
    /// Table filter.
    pub filter: Saved,
    /// Members of our sets.
    pub members: BTreeSet<Element>,
}

/// What the tools printed.
#[derive(Debug, Default)]
pub(super) struct Texts {
    /// Table nat.
    pub nat: String,
    /// Table filter.
    pub filter: String,
    /// Our sets.
    pub sets: String,
}

impl Texts {
    /// The same for two looks between which nothing was written, whatever time it is and whatever was counted.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for line in self.nat.lines().chain(self.filter.lines()).filter(|line| !line.starts_with('#')) {
            // Counters follow the name of a chain.
            let name = if line.starts_with(':') { line.split('[').next() } else { None };
            name.unwrap_or(line).hash(&mut hasher);
        }
        self.sets.hash(&mut hasher);
        hasher.finish()
    }

    /// Reads them.
    pub(super) fn parse(self, family: IpFamily) -> Read {
        Read {
            nat: Saved::parse(self.nat),
            filter: Saved::parse(self.filter),
            members: ipset::parse(&self.sets, family),
        }
    }
}

/// Where the kernel differs from a state.
#[derive(Debug, Default)]
pub(super) struct Differences {
    /// What makes it equal; without what is to be removed last.
    pub batch: Batch,
    /// Chains that are only left over.
    pub stale: BTreeSet<ChainName>,
    /// The same for filter.
    pub filter_stale: BTreeSet<ChainName>,
}

impl State {
    /// The state that a plan asks for. `accepted` are mark bits that must go on being masqueraded.
    pub(super) fn of(plan: &Plan, node: &NodePlan, accepted: u32, use_sets: bool) -> Self {
        let mut state = Self {
            node: node.clone(),
            accepted: accepted | node.mark,
            ports: plan.ports(node.family).map(|(id, port)| (id.clone(), port.clone())).collect(),
            dispatch: Dispatch::new(node),
            use_sets,
            cluster_ips: BTreeMap::new(),
            refused: BTreeMap::new(),
            port_rules: 0,
            listed_rules: 0,
        };
        state.build_dispatch();
        for (id, port) in &state.ports {
            let rendered = render(id, port, node);
            state.port_rules += count(&rendered.chains);
            state.listed_rules += listed(&rendered, node.family, use_sets).len();
            for (set, _) in rendered.refusals.iter().filter_map(sets::element) {
                *state.refused.entry(set).or_default() += 1;
            }
            if let Some(address) = port.cluster_ip {
                *state.cluster_ips.entry(address).or_default() += 1;
            }
        }
        state
    }

    fn build_dispatch(&mut self) {
        let mut captures = BTreeMap::new();
        for (id, port) in &self.ports {
            captures.extend(render(id, port, &self.node).captures);
        }
        self.dispatch = Dispatch::new(&self.node);
        self.dispatch.replace(BTreeSet::new(), captures, &mut DispatchTouched::default());
    }

    fn frame(&self) -> Frame {
        Frame::new(&self.node, self.node.mark, self.accepted, &self.dispatch, self.use_sets)
    }

    /// Follows the plan; returns what must change in the kernel.
    pub(super) fn advance(&mut self, plan: &Plan, node: &NodePlan, changes: &Changes) -> Batch {
        let before = self.frame();
        let old_node = std::mem::replace(&mut self.node, node.clone());
        self.accepted |= node.mark;
        let mut ids: BTreeSet<&PortId> = changes.ports.iter().filter(|id| id.family == node.family).collect();
        let known: Vec<PortId>;
        if old_node.local_traffic != node.local_traffic || old_node.masquerade_all != node.masquerade_all {
            known = self.ports.keys().cloned().collect();
            ids.extend(&known);
            ids.extend(plan.ports(node.family).map(|(id, _)| id));
        }
        let mut batch = Batch::default();
        let (mut gone, mut caught) = (BTreeSet::new(), BTreeMap::new());
        let mut at_cluster_ip = Vec::new();
        for id in ids {
            let old = self.ports.remove(id);
            let new = plan.port(id).cloned();
            let rendered = |port: &Option<Arc<PortPlan>>, node| {
                port.as_ref().map(|port| render(id, port, node)).unwrap_or_default()
            };
            let (before, after) = (rendered(&old, &old_node), rendered(&new, node));
            for (port, comes) in [(&old, false), (&new, true)] {
                if let Some(address) = port.as_ref().and_then(|port| port.cluster_ip) {
                    at_cluster_ip.push((address, comes));
                }
            }
            if let Some(new) = new {
                self.ports.insert(id.clone(), new);
            }
            if self.use_sets {
                for element in before.refusals.iter().filter_map(sets::element) {
                    let count = self.refused.entry(element.0).or_default();
                    *count = count.saturating_sub(1);
                    batch.sets.removed.insert(element);
                }
                for element in after.refusals.iter().filter_map(sets::element) {
                    *self.refused.entry(element.0).or_default() += 1;
                    batch.sets.added.insert(element);
                }
            }
            self.port_rules = self.port_rules + count(&after.chains) - count(&before.chains);
            let (removed, added) =
                (listed(&before, node.family, self.use_sets), listed(&after, node.family, self.use_sets));
            self.listed_rules = self.listed_rules + added.len() - removed.len();
            batch.unlisted.extend(removed);
            batch.listed.extend(added);
            gone.extend(before.captures.into_keys());
            caught.extend(after.captures);
            batch.services.push(differing(&before.chains, after.chains, &mut batch.stale));
        }
        self.count_cluster_ips(at_cluster_ip, &mut batch.sets);
        let both: Vec<_> = batch.listed.intersection(&batch.unlisted).cloned().collect();
        for rule in both {
            batch.listed.remove(&rule);
            batch.unlisted.remove(&rule);
        }
        if old_node.service_cidrs == node.service_cidrs {
            let mut touched = DispatchTouched::default();
            self.dispatch.replace(gone, caught, &mut touched);
            let (written, removed) = self.dispatch.changed(&touched);
            batch.dispatch = written;
            batch.stale.extend(removed);
        } else {
            let old = self.dispatch.chains();
            self.build_dispatch();
            batch.dispatch = differing(&old, self.dispatch.chains(), &mut batch.stale);
        }
        self.reframe(&before, &mut batch);
        batch
    }

    fn count_cluster_ips(&mut self, changes: Vec<(IpAddr, bool)>, sets: &mut SetChanges) {
        for (address, comes) in changes {
            let count = self.cluster_ips.entry(address).or_default();
            match (comes, *count) {
                (true, 0) => {
                    *count = 1;
                    sets.added.insert(sets::cluster_ip(address));
                }
                (true, _) => *count += 1,
                (false, 0 | 1) => {
                    self.cluster_ips.remove(&address);
                    sets.removed.insert(sets::cluster_ip(address));
                }
                (false, _) => *count -= 1,
            }
        }
        if self.use_sets {
            sets.settle();
        } else {
            *sets = SetChanges::default();
        }
    }

    /// Whether sets say what is refused.
    pub(super) fn uses_sets(&self) -> bool {
        self.use_sets
    }

    /// How many members a set has.
    pub(super) fn set_size(&self, set: Set) -> usize {
        match set {
            Set::ClusterIps => self.cluster_ips.len(),
            Set::Drop | Set::Reject => self.refused.get(&set).copied().unwrap_or_default(),
        }
    }

    /// Whether more mark bits are masqueraded than are set.
    pub(super) fn is_settling(&self) -> bool {
        self.accepted != self.node.mark
    }

    /// Stops masquerading mark bits that nobody sets any more. To be called when packets that carry them have left.
    pub(super) fn settle(&mut self) -> Batch {
        let before = self.frame();
        self.accepted = self.node.mark;
        let mut batch = Batch { nat_first: true, ..Batch::default() };
        self.reframe(&before, &mut batch);
        batch
    }

    fn reframe(&self, before: &Frame, batch: &mut Batch) {
        let after = self.frame();
        batch.listed.extend(after.listed.difference(&before.listed).cloned());
        batch.unlisted.extend(before.listed.difference(&after.listed).cloned());
        batch.masquerade = differing(&before.masquerade, after.masquerade, &mut batch.stale);
        batch.dispatch.extend(differing(&before.entrance, after.entrance, &mut batch.stale));
        batch.filter = differing(&before.filter, after.filter, &mut batch.filter_stale);
    }

    /// Compares with what was read back.
    pub(super) fn compare(&self, read: &Read, how: Comparison) -> Differences {
        let Read { nat, filter, members } = read;
        let mut batch = Batch::default();
        let mut elements = BTreeSet::new();
        let mut stale = nat.ours(ours_in_nat);
        let mut missing = |chains: Chains| -> Chains {
            let wanted = chains.into_iter();
            wanted
                .filter(|(name, rules)| {
                    stale.remove(name);
                    !nat.holds(*name, rules, how)
                })
                .collect()
        };
        let frame = self.frame();
        batch.masquerade = missing(frame.masquerade);
        let mut lists = frame.listed;
        for (id, port) in &self.ports {
            let rendered = render(id, port, &self.node);
            lists.extend(listed(&rendered, self.node.family, self.use_sets));
            elements.extend(rendered.refusals.iter().filter_map(sets::element));
            let chains = missing(rendered.chains);
            if !chains.is_empty() {
                batch.services.push(chains);
            }
        }
        if self.use_sets {
            elements.extend(self.cluster_ips.keys().map(|address| sets::cluster_ip(*address)));
            batch.sets.added = elements.difference(members).cloned().collect();
            batch.sets.removed = members.difference(&elements).cloned().collect();
        }
        batch.dispatch = missing(frame.entrance);
        batch.dispatch.extend(missing(self.dispatch.chains()));
        for name in nat.needed_by_others("nat", JUMPS, ours_in_nat) {
            stale.remove(&name);
        }
        let mut filter_stale = filter.ours(ours_in_filter);
        batch.filter = frame.filter;
        batch.filter.retain(|name, rules| {
            filter_stale.remove(name);
            !filter.holds(*name, rules, how)
        });
        let lists_only = |list: &List| !(self.use_sets && *list == List::ExternalServices);
        for list in List::ALL.into_iter().filter(lists_only) {
            filter_stale.remove(&list.chain());
            match filter.rules(list.chain().as_str()) {
                None => {
                    batch.new_lists.insert(list.chain());
                }
                Some(rules) if how == Comparison::Shape => {
                    if rules.count() == lists.iter().filter(|(of, _)| *of == list).count() {
                        lists.retain(|(of, _)| *of != list);
                    }
                }
                Some(rules) => {
                    for rule in rules {
                        if !lists.remove(&(list, rule.to_owned())) {
                            batch.unlisted.insert((list, rule.to_owned()));
                        }
                    }
                }
            }
        }
        batch.listed = lists;
        batch.anchors = filter.anchors().map(str::to_owned).collect();
        for name in filter.needed_by_others("filter", JUMPS, ours_in_filter) {
            filter_stale.remove(&name);
        }
        let absent = |jump: &&super::shared::Jump| {
            let table = if jump.table == "nat" { nat } else { filter };
            table.jumps(jump).next().is_none()
        };
        batch.jumps = JUMPS.iter().filter(absent).copied().collect();
        Differences { batch, stale, filter_stale }
    }

    /// How many rules we hold, in nat and in filter.
    pub(super) fn rules(&self) -> (usize, usize) {
        let (nat, filter) = self.frame().rules();
        let jumps = |table: &str| JUMPS.iter().filter(|jump| jump.table == table).count();
        (
            nat + self.port_rules + self.dispatch.rules() + jumps("nat"),
            filter + self.listed_rules + jumps("filter"),
        )
    }
}

fn count(chains: &Chains) -> usize {
    chains.values().map(Vec::len).sum()
}

/// What a Service port adds to the lists. What is a member of a set is in none.
fn listed(rendered: &Rendered, family: IpFamily, use_sets: bool) -> BTreeSet<(List, Rule)> {
    let refusals = rendered.refusals.iter().filter(|refusal| !use_sets || sets::element(refusal).is_none());
    let refusals = refusals.map(|refusal| (refusal.list, refusal.rule(family)));
    rendered.listed.iter().cloned().chain(refusals).collect()
}

/// Chains that are new or different; those that are gone are added to `stale`.
fn differing(old: &Chains, new: Chains, stale: &mut BTreeSet<ChainName>) -> Chains {
    stale.extend(old.keys().filter(|name| !new.contains_key(name)).copied());
    new.into_iter().filter(|(name, rules)| old.get(name) != Some(rules)).collect()
}

impl Differences {
    /// Chains that are missing or different.
    pub(super) fn chains(&self) -> Vec<ChainName> {
        let batch = &self.batch;
        let nat = batch.masquerade.keys().chain(batch.services.iter().flat_map(Chains::keys));
        nat.chain(batch.dispatch.keys()).chain(batch.filter.keys()).chain(&batch.new_lists).copied().collect()
    }

    /// What makes the kernel equal, with what is only left over.
    pub(super) fn into_batch(self) -> Batch {
        let Self { mut batch, stale, filter_stale } = self;
        batch.stale.extend(stale);
        batch.filter_stale.extend(filter_stale);
        batch
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.describe(IpFamily::IPv4).is_empty()
    }

    /// In words, for people. Empty: equal.
    pub(super) fn describe(&self, family: IpFamily) -> Vec<String> {
        let batch = &self.batch;
        let mut lines: Vec<String> = self
            .chains()
            .iter()
            .map(|name| format!("{family:?} chain {name}: missing or different"))
            .collect();
        for (rules, what) in [(&batch.listed, "missing"), (&batch.unlisted, "not ours")] {
            let line = |(list, rule): &(List, Rule)| {
                format!("{family:?} filter chain {}: {what}: {rule}", list.chain())
            };
            lines.extend(rules.iter().map(line));
        }
        for (members, what) in [(&batch.sets.added, "missing"), (&batch.sets.removed, "not ours")] {
            lines.extend(
                members.iter().map(|(set, member)| format!("set {}: {what}: {member}", set.name(family))),
            );
        }
        for rule in &batch.anchors {
            lines.push(format!("{family:?} filter chain {ANCHOR_CHAIN}: left over: {rule}"));
        }
        for jump in &batch.jumps {
            lines.push(format!("{family:?} {} chain {}: no way to {}", jump.table, jump.from, jump.to));
        }
        let stale = self.stale.iter().chain(&self.filter_stale);
        lines.extend(stale.map(|name| format!("{family:?} chain {name}: left over")));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syn_10_a_fingerprint_sees_rules_and_members_and_neither_time_nor_counters() {
        let print = |time: &str, packets: u32, rule: &str, sets: &str| {
            let nat = format!(
                "# Generated {time}\n*nat\n:OUTPUT ACCEPT [{packets}:9]\n-A OUTPUT -j {rule}\nCOMMIT\n"
            );
            Texts { nat, filter: String::new(), sets: sets.to_owned() }.fingerprint()
        };
        let before = print("at noon", 1, "A", "add S 1");
        assert_eq!(print("at one", 2, "A", "add S 1"), before);
        assert_ne!(print("at noon", 1, "B", "add S 1"), before);
        assert_ne!(print("at noon", 1, "A", "add S 2"), before);
    }
}
