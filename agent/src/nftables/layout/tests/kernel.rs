//! A kernel for tests: a table that transactions change, as strict as the real one.

use std::collections::BTreeSet;

use crate::nftables::ruleset::{
    Chain, ElementValue, Name, Operation, Rules, Ruleset, Statement, Transaction, Verdict, VerdictMap,
};
use crate::plan::random::Dice;

/// Makes the changes of a transaction, all or none.
pub fn apply(table: &mut Ruleset, transaction: &Transaction) -> Result<(), String> {
    let mut changed = table.clone();
    for (operation, _) in &transaction.operations {
        step(&mut changed, operation).map_err(|problem| format!("{problem}: {operation:?}"))?;
    }
    // What is deleted must be unused, and what is used must be there.
    refers_to_what_exists(&changed)?;
    *table = changed;
    Ok(())
}

fn step(table: &mut Ruleset, operation: &Operation) -> Result<(), String> {
    match operation {
        Operation::AddTable | Operation::AddDormantTable => {}
        Operation::DeleteTable => *table = Ruleset::new(table.table.clone()),
        Operation::AddChain(chain) => {
            let rules = Rules { chain: chain.clone(), rules: Vec::new() };
            let known = table.chains.entry(chain.name.clone()).or_insert(rules);
            known.chain.eq(chain).then_some(()).ok_or("another chain of this name")?;
        }
        Operation::DeleteChain(name) => {
            table.chains.remove(name).ok_or("no such chain")?;
        }
        Operation::FlushChain(name) => table.chains.get_mut(name).ok_or("no such chain")?.rules.clear(),
        Operation::AddRule { chain, rule } => {
            table.chains.get_mut(chain).ok_or("no such chain")?.rules.push(rule.clone());
        }
        Operation::AddSet(set) => {
            let known = table.sets.entry(set.name.clone()).or_insert_with(|| set.clone());
            known.eq(&set).then_some(()).ok_or("another set of this name")?;
        }
        Operation::DeleteSet(name) => {
            table.sets.remove(name).ok_or("no such set")?;
            table.elements.remove(name);
        }
        Operation::FlushSet(name) => {
            table.elements.remove(name);
        }
        Operation::AddElements { set, elements } => {
            let declared = table.sets.get(set).ok_or("no such set")?.clone();
            for (element, _) in elements {
                if declared.data.is_some() == matches!(element.value, ElementValue::None) {
                    return Err("a map needs data, a set has none".into());
                }
                let known = table.elements.entry(set.clone()).or_default();
                if known.get(&element.key).is_some_and(|known| known != element) {
                    return Err(format!("{:?} has another value", element.key));
                }
                known.insert(element.clone());
                if let ElementValue::Verdict(verdict) = &element.value {
                    let to = chain_of(verdict).ok_or("not a chain")?;
                    table.chains.contains_key(to).then_some(()).ok_or("no such chain")?;
                }
            }
        }
        Operation::DeleteElements { set, elements } => {
            let known = table.elements.get_mut(set).ok_or("the set is empty")?;
            for (element, _) in elements {
                known.remove(&element.key).ok_or_else(|| format!("{:?} is not there", element.key))?;
            }
            if known.is_empty() {
                table.elements.remove(set);
            }
        }
    }
    Ok(())
}

fn chain_of(verdict: &Verdict) -> Option<&Name> {
    match verdict {
        Verdict::Goto(chain) | Verdict::Jump(chain) => Some(chain),
        _ => None,
    }
}

fn statements(table: &Ruleset) -> impl Iterator<Item = &Statement> {
    table.chains.values().flat_map(|chain| &chain.rules).flat_map(|rule| &rule.statements)
}

/// Chains that something leads to.
fn referred(table: &Ruleset) -> BTreeSet<Name> {
    let elements = table.elements.values().flatten();
    let by_element = elements.filter_map(|element| match &element.value {
        ElementValue::Verdict(verdict) => chain_of(verdict),
        _ => None,
    });
    let by_rule = statements(table).flat_map(|statement| match statement {
        Statement::Verdict(verdict) => chain_of(verdict).into_iter().collect(),
        Statement::VerdictMap { map: VerdictMap::Inline(cases), .. } => {
            cases.values().filter_map(chain_of).collect()
        }
        _ => Vec::new(),
    });
    by_element.chain(by_rule).cloned().collect()
}

fn refers_to_what_exists(table: &Ruleset) -> Result<(), String> {
    if let Some(missing) = referred(table).into_iter().find(|name| !table.chains.contains_key(name)) {
        return Err(format!("no chain {missing}"));
    }
    let sets = statements(table).filter_map(|statement| match statement {
        Statement::Lookup { set, .. }
        | Statement::Dynamic { set, .. }
        | Statement::Dnat { map: set, .. }
        | Statement::VerdictMap { map: VerdictMap::Named(set), .. } => Some(set),
        _ => None,
    });
    match sets.into_iter().find(|name| !table.sets.contains_key(*name)) {
        Some(missing) => Err(format!("no set {missing}")),
        None => Ok(()),
    }
}

/// What somebody else might do to our table.
pub fn damage(table: &mut Ruleset, dice: &mut Dice) {
    let mut any = |length: usize| usize::try_from(dice.roll(length as u64)).unwrap();
    match any(4) {
        0 => {
            let at = any(table.chains.len());
            table.chains.values_mut().nth(at).unwrap().rules.pop();
        }
        1 => {
            table.chains.insert("foreign".into(), Rules { chain: Chain::new("foreign"), rules: Vec::new() });
        }
        which if !table.elements.is_empty() => {
            let at = any(table.elements.len());
            let elements = table.elements.values_mut().nth(at).unwrap();
            let keys: Vec<_> = elements.iter().map(|element| element.key).collect();
            let (key, other) = (keys[any(keys.len())], keys[any(keys.len())]);
            if which == 2 {
                elements.remove(&key);
            } else {
                // Intervals would overlap.
                let value = elements.get(&other).unwrap().value.clone();
                let mut element = elements.remove(&key).unwrap();
                element.value = value;
                elements.insert(element);
            }
            table.elements.retain(|_, elements| !elements.is_empty());
        }
        _ => {}
    }
}
