//! What must change in the kernel, and the restore scripts that change it.
//!
//! In: chains to write, chains to remove, rules to add to and take from lists. Out: [`Script`]s for `iptables-restore
//! --noflush`. Pure.
//!
//! A small batch is one script, so that everything in one table changes in one moment. A large one is cut with the nft flavour,
//! whose restore takes quadratic time: first what refuses, then what nothing leads to yet, then the dispatch, then what
//! nothing leads to any more. Each step alone leaves every Service served, by its old or by its new endpoints. The legacy
//! flavour copies the whole table at each commit and gets one script, whatever its size.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::names::ChainName;
use super::render::{Chains, List, Rule};
use super::sets::SetChanges;
use super::shared::{ANCHOR_CHAIN, Jump};
use super::tools::Flavour;

/// Rules in one transaction of the nft flavour.
const BUDGET: usize = 1600;

/// What must change.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// In nat: chains that mark and masquerade.
    pub masquerade: Chains,
    /// In nat: the chains of Service ports, those of one together.
    pub services: Vec<Chains>,
    /// In nat: the dispatch.
    pub dispatch: Chains,
    /// In nat: chains to remove.
    pub stale: BTreeSet<ChainName>,
    /// In filter: chains to write.
    pub filter: Chains,
    /// In filter: lists to create.
    pub new_lists: BTreeSet<ChainName>,
    /// In filter: anchors of an earlier cleanup, to remove at the end.
    pub anchors: Vec<Rule>,
    /// In filter: rules to add to lists.
    pub listed: BTreeSet<(List, Rule)>,
    /// In filter: rules to take from lists.
    pub unlisted: BTreeSet<(List, Rule)>,
    /// In filter: chains to remove.
    pub filter_stale: BTreeSet<ChainName>,
    /// Members of sets.
    pub sets: SetChanges,
    /// Ways in to add.
    pub jumps: Vec<Jump>,
    /// Nat before filter: for what filter must go on accepting until nat has changed.
    pub nat_first: bool,
}

/// Input of one run of `iptables-restore`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    /// The text.
    pub text: String,
    /// Rules that it adds, in nat and in filter.
    pub rules: (usize, usize),
}

impl Batch {
    /// The scripts, in the order in which they must run.
    pub(crate) fn scripts(&self, flavour: Flavour) -> Vec<Script> {
        let small = flavour == Flavour::Legacy || self.weight() <= BUDGET;
        if small { self.one_script() } else { self.many_scripts() }
    }

    fn weight(&self) -> usize {
        let count = |chains: &Chains| chains.values().map(|rules| rules.len() + 1).sum::<usize>();
        count(&self.masquerade)
            + self.services.iter().map(count).sum::<usize>()
            + count(&self.dispatch)
            + self.stale.len()
            + self.listed.len()
            + self.unlisted.len()
    }

    fn one_script(&self) -> Vec<Script> {
        let mut nat = Section::new("nat");
        nat.write(&self.masquerade);
        for chains in &self.services {
            nat.write(chains);
        }
        nat.write(&self.dispatch);
        nat.insert(&self.jumps);
        nat.remove(&self.stale);
        let mut filter = self.filter_section();
        filter.append(&self.listed);
        let mut after = Section::new("filter");
        after.delete(&self.unlisted);
        after.remove(&self.filter_stale);
        after.take_anchors(&self.anchors);
        let mut script = Script::default();
        let order = if self.nat_first { [nat, filter, after] } else { [filter, nat, after] };
        for section in order {
            section.finish(&mut script);
        }
        if script.text.is_empty() { Vec::new() } else { vec![script] }
    }

    fn many_scripts(&self) -> Vec<Script> {
        let mut scripts = Vec::new();
        let mut push = |section: Section| {
            let mut script = Script::default();
            section.finish(&mut script);
            if !script.text.is_empty() {
                scripts.push(script);
            }
        };
        push(self.filter_section());
        for chunk in chunks(self.listed.iter()) {
            let mut section = Section::new("filter");
            section.append(chunk);
            push(section);
        }
        let mut first = Section::new("nat");
        first.write(&self.masquerade);
        first.insert(self.jumps.iter().filter(|jump| jump.to == "KUBE-POSTROUTING"));
        push(first);
        // A leaf is complete in itself, so it may come before what leads to it.
        let (inner, leaves): (Vec<_>, Vec<_>) = self.dispatch.iter().partition(|(name, rules)| {
            !name.as_str().starts_with("KUBE-IP-") && !name.as_str().starts_with("KUBE-NP-")
                || rules.first().is_some_and(|rule| rule.contains(" -g "))
        });
        let mut section = Section::new("nat");
        for chains in &self.services {
            section.write(chains);
            if section.lines >= BUDGET {
                push(std::mem::replace(&mut section, Section::new("nat")));
            }
        }
        for (name, rules) in leaves {
            section.chain(*name, rules);
            if section.lines >= BUDGET {
                push(std::mem::replace(&mut section, Section::new("nat")));
            }
        }
        push(section);
        let mut last = Section::new("nat");
        for (name, rules) in inner {
            last.chain(*name, rules);
        }
        last.insert(self.jumps.iter().filter(|jump| jump.to != "KUBE-POSTROUTING"));
        push(last);
        for chunk in chunks(self.stale.iter()) {
            let mut section = Section::new("nat");
            for chain in chunk {
                section.chain(*chain, &[]);
            }
            push(section);
        }
        for chunk in chunks(self.stale.iter()) {
            let mut section = Section::new("nat");
            section.remove(chunk);
            push(section);
        }
        for chunk in chunks(self.unlisted.iter()) {
            let mut section = Section::new("filter");
            section.delete(chunk);
            push(section);
        }
        let mut after = Section::new("filter");
        after.remove(&self.filter_stale);
        after.take_anchors(&self.anchors);
        push(after);
        scripts
    }

    fn filter_section(&self) -> Section {
        let mut filter = Section::new("filter");
        filter.write(&self.filter);
        for list in &self.new_lists {
            filter.chain(*list, &[]);
        }
        filter.insert(&self.jumps);
        filter
    }
}

fn chunks<T>(items: impl Iterator<Item = T>) -> Vec<Vec<T>> {
    let mut chunks: Vec<Vec<T>> = Vec::new();
    for item in items {
        match chunks.last_mut() {
            Some(chunk) if chunk.len() < BUDGET => chunk.push(item),
            _ => chunks.push(vec![item]),
        }
    }
    chunks
}

/// What one transaction does to one table.
#[derive(Debug)]
pub(crate) struct Section {
    table: &'static str,
    declared: String,
    body: String,
    removed: String,
    lines: usize,
    rules: usize,
}

impl Section {
    pub(crate) fn new(table: &'static str) -> Self {
        Self {
            table,
            declared: String::new(),
            body: String::new(),
            removed: String::new(),
            lines: 0,
            rules: 0,
        }
    }

    /// Makes a chain hold these rules and nothing else.
    pub(crate) fn chain(&mut self, name: ChainName, rules: &[Rule]) {
        let _ = writeln!(self.declared, ":{name} - [0:0]");
        for rule in rules {
            let _ = writeln!(self.body, "-A {name} {rule}");
        }
        self.lines += 1 + rules.len();
        self.rules += rules.len();
    }

    fn write(&mut self, chains: &Chains) {
        for (name, rules) in chains {
            self.chain(*name, rules);
        }
    }

    /// Empties and removes chains.
    pub(crate) fn remove<'a>(&mut self, chains: impl IntoIterator<Item = &'a ChainName>) {
        for name in chains {
            self.chain(*name, &[]);
            let _ = writeln!(self.removed, "-X {name}");
        }
    }

    fn append<'a>(&mut self, rules: impl IntoIterator<Item = &'a (List, Rule)>) {
        for (list, rule) in rules {
            let _ = writeln!(self.body, "-A {} {rule}", list.chain());
            self.lines += 1;
            self.rules += 1;
        }
    }

    fn delete<'a>(&mut self, rules: impl IntoIterator<Item = &'a (List, Rule)>) {
        for (list, rule) in rules {
            self.delete_rule(list.chain().as_str(), rule);
        }
    }

    fn take_anchors(&mut self, anchors: &[Rule]) {
        for rule in anchors {
            self.delete_rule(ANCHOR_CHAIN, rule);
        }
    }

    /// Takes one rule from a chain.
    pub(crate) fn delete_rule(&mut self, chain: &str, rule: &str) {
        let _ = writeln!(self.body, "-D {chain} {rule}");
        self.lines += 1;
    }

    /// Puts ways in at the head of the built-in chains.
    pub(crate) fn insert<'a>(&mut self, jumps: impl IntoIterator<Item = &'a Jump>) {
        for jump in jumps.into_iter().filter(|jump| jump.table == self.table) {
            let _ = writeln!(self.body, "-I {} 1 {}", jump.from, jump.rule());
            self.lines += 1;
            self.rules += 1;
        }
    }

    /// Adds one rule at the end of a chain that is not ours.
    pub(crate) fn append_rule(&mut self, chain: &str, rule: &str) {
        let _ = writeln!(self.body, "-A {chain} {rule}");
        self.lines += 1;
    }

    /// Adds the section to a script, unless it does nothing.
    pub(crate) fn finish(self, script: &mut Script) {
        if self.lines == 0 {
            return;
        }
        let _ =
            write!(script.text, "*{}\n{}{}{}COMMIT\n", self.table, self.declared, self.body, self.removed);
        if self.table == "nat" {
            script.rules.0 += self.rules;
        } else {
            script.rules.1 += self.rules;
        }
    }
}
