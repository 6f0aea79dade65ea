//! Changes of a table on their way into one transaction.

use std::collections::{BTreeMap, BTreeSet};

use crate::nftables::ruleset::{Element, Operation, Origin, Rules, Transaction, Tuple};

type Touched = BTreeMap<&'static str, BTreeMap<Tuple, (Element, Origin)>>;

/// Collects changes in any order. An element that is both removed and added with the same value stays as it is; with another
/// value it is replaced.
#[derive(Debug, Default)]
pub(super) struct Delta {
    new_chains: Vec<(Rules, Origin)>,
    rewritten: Vec<Rules>,
    removed: Touched,
    added: Touched,
}

impl Delta {
    /// A chain that was not there.
    pub(super) fn chain(&mut self, chain: Rules, origin: Origin) {
        self.new_chains.push((chain, origin));
    }

    /// New rules for a chain.
    pub(super) fn rewrite(&mut self, chain: Rules) {
        self.rewritten.push(chain);
    }

    /// An element that is not there, or will be removed.
    pub(super) fn add(&mut self, set: &'static str, element: Element, origin: Origin) {
        self.added.entry(set).or_default().insert(element.key, (element, origin));
    }

    /// An element that is there, or will be added.
    pub(super) fn remove(&mut self, set: &'static str, element: Element, origin: Origin) {
        self.removed.entry(set).or_default().insert(element.key, (element, origin));
    }

    /// The transaction: chains before the verdicts that lead to them, and all deletes before all adds.
    pub(super) fn into_transaction(mut self) -> Transaction {
        let mut transaction = Transaction::default();
        for (Rules { chain, .. }, origin) in &self.new_chains {
            transaction.push(Operation::AddChain(chain.clone()), *origin);
        }
        for Rules { chain, .. } in &self.rewritten {
            transaction.push(Operation::FlushChain(chain.name.clone()), Origin::NONE);
        }
        let rewritten = self.rewritten.into_iter().map(|rules| (rules, Origin::NONE));
        for (Rules { chain, rules }, origin) in self.new_chains.into_iter().chain(rewritten) {
            for rule in rules {
                transaction.push(Operation::AddRule { chain: chain.name.clone(), rule }, origin);
            }
        }
        for (set, removed) in &mut self.removed {
            let Some(added) = self.added.get_mut(set) else { continue };
            let same: BTreeSet<Tuple> = removed
                .iter()
                .filter(|(key, (old, _))| added.get(key).is_some_and(|(new, _)| new == old))
                .map(|(key, _)| *key)
                .collect();
            removed.retain(|key, _| !same.contains(key));
            added.retain(|key, _| !same.contains(key));
        }
        for (set, elements) in self.removed {
            for (element, origin) in elements.into_values() {
                transaction.delete_element(set, element, origin);
            }
        }
        for (set, elements) in self.added {
            for (element, origin) in elements.into_values() {
                transaction.add_element(set, element, origin);
            }
        }
        transaction
    }
}
