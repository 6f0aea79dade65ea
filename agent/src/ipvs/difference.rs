//! Where the kernel differs from what is wanted.
//!
//! In: all that is wanted ([`Full`]), and what was read ([`Installed`]). Out: [`Differences`]: what has to be written, and the same in
//! words. Pure.
//!
//! A virtual server is ours if our sets have it, or if it is at an address that kube-proxy has bound. All others are left alone.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use super::device::{self, Change, Local};
use super::drain::Drain;
use super::layout::frame::{JUMPS, NEAR, TABLES, is_ours};
use super::layout::port::{Server, Site};
use super::layout::sets::{self, Element, Set};
use super::layout::{Delta, Full};
use super::server::{InstalledServer, Key};
use crate::conntrack::{Frontend, NodePort, Target};
use crate::ipset::Kind as _;
use crate::iptables::names::ChainName;
use crate::iptables::saved::{Comparison, Saved};
use crate::iptables::shared::Jump;
use crate::model::{Protocol, family_of};

/// What was read of one family.
#[derive(Debug, Default)]
pub(super) struct Installed {
    /// The tables of [`TABLES`].
    pub tables: [Saved; 3],
    /// Members of our sets.
    pub members: BTreeSet<Element>,
    /// Virtual servers, whoever made them.
    pub servers: BTreeMap<Key, InstalledServer>,
    /// Local addresses.
    pub local: Local,
}

/// What has to be written.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Changes. Chains to remove are in `stale`.
    pub delta: Delta,
    /// Chains to remove, of each of [`TABLES`].
    pub stale: [BTreeSet<ChainName>; 3],
    /// Ways in to add.
    pub jumps: Vec<Jump>,
    /// The addresses that are to be local, no others; without them, those that come to the set of addresses or leave it.
    pub local: Option<BTreeSet<IpAddr>>,
    /// Virtual servers that were not there when all were read.
    pub absent: BTreeSet<Key>,
}

impl From<Delta> for Work {
    fn from(mut delta: Delta) -> Self {
        let stale = [BTreeSet::new(), std::mem::take(&mut delta.stale), BTreeSet::new()];
        Self { delta, stale, ..Self::default() }
    }
}

/// What differs.
#[derive(Debug, Default)]
pub(super) struct Differences {
    /// What makes the kernel equal.
    pub work: Work,
    /// In words. Empty: equal.
    pub lines: Vec<String>,
}

impl Installed {
    /// Virtual servers that are ours, as far as was read.
    pub(super) fn ours(&self) -> BTreeSet<Key> {
        let bound = |key: &&Key| key.address().is_some_and(|address| self.local.bound.contains(&address));
        self.recorded().chain(self.servers.keys().filter(bound).copied()).collect()
    }

    /// Those that are ours for certain: our sets have them.
    fn recorded(&self) -> impl Iterator<Item = Key> {
        self.members.iter().filter_map(sets::key)
    }

    /// The UDP and SCTP frontends that were served.
    pub(super) fn served(&self, site: &Site) -> Vec<Target> {
        let target = |key: Key| match key {
            Key::Address { protocol: Protocol::Tcp, .. } | Key::Mark { .. } => None,
            Key::Address { protocol, address } if site.is_own(address.ip()) => {
                Some(NodePort::new(address.port(), protocol).into())
            }
            Key::Address { protocol, address } => Some(Frontend::new(address, protocol).into()),
        };
        self.ours().into_iter().filter_map(target).collect()
    }
}

/// The addresses that are to be local.
pub(super) fn addresses(full: &Full) -> BTreeSet<IpAddr> {
    let members = full.members.iter().filter(|(set, _)| *set == Set::Addresses);
    members.filter_map(|(_, member)| member.parse().ok()).collect()
}

/// The address of the node that its own connections to virtual servers have as their source.
pub(super) fn source(site: &Site) -> Option<IpAddr> {
    let node = &site.node;
    let primary = node.primary.filter(|address| node.own.is_empty() || node.own.contains(address));
    primary.or_else(|| node.own.first().copied())
}

/// Compares. Real servers that are leaving are as they should be.
pub(super) fn compare(
    full: &Full,
    site: &Site,
    installed: &Installed,
    drain: &Drain,
    how: Comparison,
) -> Differences {
    let family = site.node.family;
    let mut differences = Differences::default();
    let Differences { work, lines } = &mut differences;
    for (index, (table, saved)) in TABLES.into_iter().zip(&installed.tables).enumerate() {
        chains(full, index, table, saved, how, work, lines);
    }
    for jump in JUMPS {
        let saved = TABLES.into_iter().zip(&installed.tables).find(|(table, _)| *table == jump.table);
        if saved.is_some_and(|(_, saved)| saved.jumps(jump).next().is_none()) {
            lines.push(format!("{} chain {}: no way to {}", jump.table, jump.from, jump.to));
            work.jumps.push(*jump);
        }
    }
    let changes = &mut work.delta.sets;
    changes.added = full.members.difference(&installed.members).cloned().collect();
    changes.removed = installed.members.difference(&full.members).cloned().collect();
    for (members, what) in [(&changes.added, "missing"), (&changes.removed, "not ours")] {
        let line = |(set, member): &Element| format!("set {}: {what}: {member}", set.name(family));
        lines.extend(members.iter().map(line));
    }
    for (key, wanted) in &full.servers {
        if !installed.servers.contains_key(key) {
            work.absent.insert(*key);
        }
        if let Some(line) = server(key, wanted, installed.servers.get(key), drain) {
            lines.push(line);
            work.delta.servers.insert(*key, Some(wanted.clone()));
        }
    }
    // Only where something is excluded; without that, a look need not read all members once more.
    let recorded = LazyCell::new(|| installed.recorded().collect::<BTreeSet<Key>>());
    let excluded = |key: &Key| key.address().is_none_or(|address| site.excludes(address));
    let theirs = |key: &Key| excluded(key) && !recorded.contains(key);
    let stale = installed.ours().into_iter().filter(|key| {
        let here = key.family() == family && installed.servers.contains_key(key);
        here && !full.servers.contains_key(key) && !theirs(key)
    });
    for key in stale {
        lines.push(format!("virtual server {key}: left over"));
        work.delta.servers.insert(key, None);
    }
    let wanted = addresses(full);
    let routes = device::plan(&installed.local, &wanted, &sources(site), &[family]);
    lines.extend(routes.iter().map(route));
    work.local = Some(wanted);
    for line in lines {
        *line = format!("{family:?} {line}");
    }
    differences
}

/// The source of the routes, as [`device::plan`] takes it.
pub(super) fn sources(site: &Site) -> BTreeMap<IpFamily, IpAddr> {
    source(site).into_iter().map(|source| (family_of(source), source)).collect()
}

fn chains(
    full: &Full,
    index: usize,
    table: &'static str,
    saved: &Saved,
    how: Comparison,
    work: &mut Work,
    lines: &mut Vec<String>,
) {
    let mut stale = saved.ours(is_ours);
    let mut different = |name: ChainName, rules: &[String], lines: &mut Vec<String>| {
        lines.push(format!("{table} chain {name}: missing or different"));
        work.delta.chains[index].insert(name, rules.to_vec());
    };
    for (name, rules) in &full.chains[index] {
        stale.remove(name);
        if !saved.holds(*name, rules, how) {
            different(*name, rules, lines);
        }
    }
    if table == "nat" {
        stale.remove(&ChainName::new(NEAR));
        let rules: Vec<String> = full.near.iter().cloned().collect();
        let there = saved.rules(NEAR).map(|saved| {
            let mut saved: Vec<&str> = saved.collect();
            // Each catches another frontend.
            saved.sort_unstable();
            saved
        });
        let same = there.is_some_and(|there| match how {
            Comparison::Exact => there.into_iter().eq(rules.iter().map(String::as_str)),
            Comparison::Shape => there.len() == rules.len(),
        });
        if !same {
            different(ChainName::new(NEAR), &rules, lines);
        }
    }
    for name in saved.needed_by_others(table, JUMPS, is_ours) {
        stale.remove(&name);
    }
    lines.extend(stale.iter().map(|name| format!("{table} chain {name}: left over")));
    work.stale[index] = stale;
}

/// How a virtual server differs, if it does.
fn server(key: &Key, wanted: &Server, there: Option<&InstalledServer>, drain: &Drain) -> Option<String> {
    let Some(there) = there else { return Some(format!("virtual server {key}: missing")) };
    if there.server.settings != wanted.settings {
        return Some(format!("virtual server {key}: different"));
    }
    let mut missing: BTreeSet<_> = wanted.reals.keys().collect();
    for real in &there.reals {
        let address = real.server.address;
        missing.remove(&address);
        let right = match wanted.reals.get(&address) {
            Some(weight) => real.server.weight == *weight && real.plain,
            None => real.server.weight == 0 && drain.is_leaving(key, address),
        };
        if !right {
            let what = if wanted.reals.contains_key(&address) { "different" } else { "left over" };
            return Some(format!("virtual server {key}: real server {address} {what}"));
        }
    }
    missing.first().map(|address| format!("virtual server {key}: real server {address} missing"))
}

fn route(change: &Change) -> String {
    match change {
        Change::Add { address, .. } => format!("local route to {address}: missing"),
        Change::Change { address, .. } => format!("local route to {address}: another source"),
        Change::Remove(address) => format!("local route to {address}: left over"),
        Change::Bind(address) => format!("address {address} on {}: missing", device::NAME),
        Change::Unbind(address) => format!("address {address} on {}: left over", device::NAME),
    }
}
