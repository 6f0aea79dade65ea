//! What has to change so that the kernel holds what it should.
//!
//! In: the ruleset that should be there and the one that is. Out: the transactions that repair exactly what differs, and the
//! differences in words. Pure. What packets have written into dynamic maps is left alone.

use std::collections::BTreeMap;
use std::iter;

use super::read::{Installed, Object};
use super::ruleset::{Element, Elements, Extra, Name, Operation, Origin, Rules, Ruleset, Set, Transaction};
use super::text;

/// So many elements are loaded at once: tens of milliseconds.
const STEP: usize = 10_000;

/// What differs, and what to do about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// Makes everything there that should be.
    pub first: Transaction,
    /// Deletes what nothing refers to any more. Apart, because kernels before 6.2 keep a reference until the transaction
    /// that ends it is over.
    pub then: Transaction,
    /// For people.
    pub differences: Vec<String>,
}

impl Repair {
    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.differences.is_empty()
    }

    /// Whether it takes as long as loading a table.
    #[must_use]
    pub fn loads(&self) -> bool {
        self.first.elements().0 > STEP
    }

    fn first(&mut self, operation: Operation) {
        self.first.push(operation, Origin::NONE);
    }
}

impl Ruleset {
    /// Creates everything in a table that is not there, or is empty.
    #[must_use]
    pub fn load(&self) -> Transaction {
        let mut transaction = Transaction::default();
        let mut add = |operation| transaction.push(operation, Origin::NONE);
        add(Operation::AddTable);
        self.sets.values().cloned().map(Operation::AddSet).for_each(&mut add);
        self.chains.values().map(|rules| Operation::AddChain(rules.chain.clone())).for_each(&mut add);
        for (set, elements) in &self.elements {
            add(add_elements(set, elements));
        }
        for rules in self.chains.values() {
            add_rules(rules).for_each(&mut add);
        }
        transaction
    }

    /// The same in several transactions, for a table that is not there: each holds a bounded number of elements, so that
    /// other users of nftables wait for a short time only, and only the last one lets packets in.
    pub fn load_in_steps(&self) -> impl Iterator<Item = Transaction> {
        let chains =
            |base: bool| self.chains.values().filter(move |rules| rules.chain.base.is_some() == base);
        let add_chains = move |base| {
            let create = chains(base).map(|rules| Operation::AddChain(rules.chain.clone()));
            create.chain(chains(base).flat_map(add_rules))
        };
        let sets = self.sets.values().cloned().map(Operation::AddSet);
        let first = transaction([Operation::AddTable].into_iter().chain(sets).chain(add_chains(false)));
        let elements = self.elements.iter().flat_map(|(set, elements)| {
            elements.chunks(STEP).map(|chunk| transaction([add_elements(set, chunk)]))
        });
        iter::once(first).chain(elements).chain(iter::once_with(move || transaction(add_chains(true))))
    }
}

fn transaction(operations: impl IntoIterator<Item = Operation>) -> Transaction {
    Transaction { operations: operations.into_iter().map(|operation| (operation, Origin::NONE)).collect() }
}

fn add_elements<'a>(set: &Name, elements: impl IntoIterator<Item = &'a Element>) -> Operation {
    let elements = elements.into_iter().map(|element| (element.clone(), Origin::NONE)).collect();
    Operation::AddElements { set: set.clone(), elements }
}

fn add_rules(rules: &Rules) -> impl Iterator<Item = Operation> {
    let chain = &rules.chain.name;
    rules.rules.iter().map(|rule| Operation::AddRule { chain: chain.clone(), rule: rule.clone() })
}

/// Compares what should be with what is; `None` if there is no table.
#[must_use]
pub fn compare(desired: &Ruleset, installed: Option<&Installed>) -> Repair {
    let Some(installed) = installed else {
        return Repair {
            first: desired.load(),
            differences: vec![format!("the table {} is missing", desired.table.name)],
            ..Repair::default()
        };
    };
    if let Some(difference) = beyond_repair(desired, installed) {
        // The kernel cannot change a declaration, and rules hold on to the old one.
        let mut first = Transaction::default();
        first.push(Operation::DeleteTable, Origin::NONE);
        first.operations.extend(desired.load().operations);
        return Repair { first, then: Transaction::default(), differences: vec![difference] };
    }
    let mut repair = Repair::default();
    let chains = chains_that_differ(desired, installed, &mut repair);
    let elements = elements_that_differ(desired, installed);
    // What holds references goes first, then what is referred to comes, then what refers to that.
    for name in &chains.flush {
        repair.first(Operation::FlushChain(name.clone()));
    }
    for (name, change) in &elements {
        if change.flush {
            repair.first(Operation::FlushSet(name.clone()));
        } else if !change.delete.is_empty() {
            let elements = change.delete.iter().map(|element| ((*element).clone(), Origin::NONE)).collect();
            repair.first(Operation::DeleteElements { set: name.clone(), elements });
        }
    }
    for (name, set) in &desired.sets {
        if !installed.ruleset.sets.contains_key(name) {
            repair.differences.push(format!("the set {name} is missing"));
            repair.first(Operation::AddSet(set.clone()));
        }
    }
    for rules in &chains.create {
        repair.first(Operation::AddChain(rules.chain.clone()));
    }
    for (name, change) in &elements {
        repair.differences.extend(change.difference(name, desired));
        if !change.add.is_empty() {
            repair.first(add_elements(name, change.add.iter().copied()));
        }
    }
    for rules in &chains.fill {
        add_rules(rules).for_each(|operation| repair.first(operation));
    }
    for name in sets_of(installed) {
        if !desired.sets.contains_key(name) {
            repair.differences.push(format!("the set {name} is not ours"));
            repair.then.push(Operation::DeleteSet(name.clone()), Origin::NONE);
        }
    }
    for name in chains.delete {
        repair.then.push(Operation::DeleteChain(name), Origin::NONE);
    }
    repair
}

/// A declaration that differs, or the table itself.
fn beyond_repair(desired: &Ruleset, installed: &Installed) -> Option<String> {
    // Kernels refuse to wake a dormant table in one transaction with changes of its hooks.
    if let Some(flags) = installed.foreign.get(&Object::Table) {
        return Some(format!("the table {} is dormant, or somebody else's: {flags}", desired.table.name));
    }
    for (name, set) in &desired.sets {
        let foreign = installed.foreign.get(&Object::Set(name.clone()));
        if foreign.is_some() || installed.ruleset.sets.get(name).is_some_and(|installed| installed != set) {
            return Some(format!("the set {name} is declared differently"));
        }
    }
    for (name, rules) in &desired.chains {
        let foreign = installed.foreign.get(&Object::Chain(name.clone()));
        let there = installed.ruleset.chains.get(name);
        if foreign.is_some() || there.is_some_and(|there| there.chain != rules.chain) {
            return Some(format!("the chain {name} is at another hook or priority"));
        }
    }
    None
}

fn sets_of(installed: &Installed) -> impl Iterator<Item = &Name> {
    let foreign = installed.foreign.keys().filter_map(|object| match object {
        Object::Set(name) => Some(name),
        _ => None,
    });
    installed.ruleset.sets.keys().chain(foreign)
}

#[derive(Default)]
struct Chains<'a> {
    flush: Vec<Name>,
    create: Vec<&'a Rules>,
    fill: Vec<&'a Rules>,
    delete: Vec<Name>,
}

fn chains_that_differ<'a>(desired: &'a Ruleset, installed: &Installed, repair: &mut Repair) -> Chains<'a> {
    let mut chains = Chains::default();
    for (name, rules) in &desired.chains {
        let foreign = installed.foreign.contains_key(&Object::Rules(name.clone()));
        match installed.ruleset.chains.get(name) {
            None => {
                repair.differences.push(format!("the chain {name} is missing"));
                chains.create.push(rules);
                chains.fill.push(rules);
            }
            Some(there) if foreign || there.rules != rules.rules => {
                repair.differences.push(format!("the rules of {name} differ"));
                chains.flush.push(name.clone());
                chains.fill.push(rules);
            }
            Some(_) => {}
        }
    }
    let foreign = installed.foreign.keys().filter_map(|object| match object {
        Object::Chain(name) => Some(name),
        _ => None,
    });
    for name in installed.ruleset.chains.keys().chain(foreign) {
        if !desired.chains.contains_key(name) {
            repair.differences.push(format!("the chain {name} is not ours"));
            chains.flush.push(name.clone());
            chains.delete.push(name.clone());
        }
    }
    chains
}

/// How the elements of a set differ.
#[derive(Default)]
struct Differing<'a> {
    flush: bool,
    delete: Vec<&'a Element>,
    add: Vec<&'a Element>,
}

impl Differing<'_> {
    fn difference(&self, name: &Name, desired: &Ruleset) -> Option<String> {
        let set = desired.sets.get(name)?;
        let example = self.add.first().or(self.delete.first());
        let example = example.map_or(String::new(), |element| {
            format!(", such as {}", text::element(element, set, desired.table.family))
        });
        Some(format!(
            "{name} lacks {} elements and has {} that are not ours{example}",
            self.add.len(),
            if self.flush { "some".to_owned() } else { self.delete.len().to_string() },
        ))
    }
}

fn elements_that_differ<'a>(desired: &'a Ruleset, installed: &'a Installed) -> BTreeMap<Name, Differing<'a>> {
    static NONE: Elements = Elements::new();
    let mut changes = BTreeMap::new();
    for (name, set) in &desired.sets {
        if set.flags.dynamic {
            continue;
        }
        let should = desired.elements.get(name).unwrap_or(&NONE);
        let is = installed.ruleset.elements.get(name).unwrap_or(&NONE);
        let mut change = Differing::default();
        if installed.foreign.contains_key(&Object::Elements(name.clone())) {
            change.flush = true;
            change.add = should.iter().collect();
        } else {
            differ(set, should, is, &mut change);
        }
        if change.flush || !change.add.is_empty() || !change.delete.is_empty() {
            changes.insert(name.clone(), change);
        }
    }
    changes
}

fn differ<'a>(set: &Set, should: &'a Elements, is: &'a Elements, change: &mut Differing<'a>) {
    for element in is {
        if !should.get(&element.key).is_some_and(|wanted| same(wanted, element)) {
            change.delete.push(element);
        }
    }
    for element in should {
        if !is.get(&element.key).is_some_and(|there| same(element, there)) {
            change.add.push(element);
        }
    }
    // Whoever has changed a range can have left half of one.
    if set.flags.interval && !change.delete.is_empty() {
        change.flush = true;
        change.add = should.iter().collect();
    }
}

/// Time runs on, and packets are counted.
fn same(a: &Element, b: &Element) -> bool {
    let rest = |element: &Element| {
        let extra = element.extra.as_deref().cloned().unwrap_or_default();
        Extra { expires: None, counted: None, ..extra }
    };
    a.key == b.key && a.value == b.value && (a.extra == b.extra || rest(a) == rest(b))
}

#[cfg(test)]
mod tests;
