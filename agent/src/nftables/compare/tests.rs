//! What is repaired, and how.

use std::collections::BTreeMap;

use pointsman_crds::proxy_node_status::IpFamily;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::super::ruleset::{
    Chain, ChainType, Columns, ElementValue, Hook, Rule, Statement, Table, Tuple, Type, Value, Verdict, jump,
    key,
};
use super::super::text::tests::example;
use super::*;

fn installed(ruleset: Ruleset) -> Installed {
    Installed { ruleset, foreign: BTreeMap::new() }
}

/// The operations of the first transaction, and of the second, in words.
fn operations(repair: &Repair) -> (Vec<String>, Vec<String>) {
    let words = |transaction: &Transaction| {
        let word = |operation: &Operation| match operation {
            Operation::AddElements { set, elements } => format!("add {} to {set}", elements.len()),
            Operation::DeleteElements { set, elements } => format!("delete {} of {set}", elements.len()),
            Operation::AddChain(chain) => format!("add chain {}", chain.name),
            Operation::AddSet(set) => format!("add set {}", set.name),
            Operation::AddRule { chain, .. } => format!("add rule to {chain}"),
            Operation::DeleteChain(name) => format!("delete chain {name}"),
            Operation::DeleteSet(name) => format!("delete set {name}"),
            Operation::FlushChain(name) => format!("flush chain {name}"),
            Operation::FlushSet(name) => format!("flush set {name}"),
            Operation::AddTable | Operation::AddDormantTable => "add table".to_owned(),
            Operation::DeleteTable => "delete table".to_owned(),
        };
        transaction.operations.iter().map(|(operation, _)| word(operation)).collect()
    };
    (words(&repair.first), words(&repair.then))
}

/// How the example is repaired after this was done to it.
fn after(damage: impl FnOnce(&mut Installed)) -> (Repair, Vec<String>, Vec<String>) {
    let desired = example(IpFamily::IPv4);
    let mut there = installed(desired.clone());
    damage(&mut there);
    let repair = compare(&desired, Some(&there));
    let (first, then) = operations(&repair);
    (repair, first, then)
}

#[test]
fn what_is_equal_is_left_alone() {
    let (repair, first, then) = after(|_| {});
    assert!(repair.is_empty() && first.is_empty() && then.is_empty());
    // What packets write, and the time that is left.
    let (repair, first, _) = after(|there| {
        let element = Element::new(Tuple::new().word(1)).with_data(Tuple::new().word(1));
        there.ruleset.add_element("affinity", element);
        let hairpin = there.ruleset.elements.get_mut("hairpin").unwrap();
        for mut element in hairpin.clone() {
            element.extra_mut().expires = Some(std::time::Duration::from_secs(1));
            hairpin.insert(element);
        }
    });
    assert!(repair.is_empty() && first.is_empty(), "{repair:?}");
}

fn remove_first(elements: &mut Elements) -> Tuple {
    let key = elements.iter().next().unwrap().key;
    elements.remove(&key).unwrap();
    key
}

#[test]
fn a_table_that_is_loaded_in_steps_is_the_same_and_lets_packets_in_last() {
    let desired = example(IpFamily::IPv4);
    let mut there = Ruleset::new(desired.table.clone());
    let steps: Vec<_> = desired.load_in_steps().collect();
    for step in &steps {
        assert!(there.chains.values().all(|rules| rules.chain.base.is_none()));
        apply(&mut there, step);
    }
    assert_eq!(there, desired);
}

#[test]
fn a_missing_table_is_loaded() {
    let desired = example(IpFamily::IPv6);
    let repair = compare(&desired, None);
    assert_eq!(repair.first, desired.load());
    let (first, _) = operations(&repair);
    assert_eq!(first.first().map(String::as_str), Some("add table"));
    assert!(repair.differences[0].contains("missing"));
}

#[test]
fn elements_are_repaired_one_by_one() {
    let (repair, first, then) = after(|there| {
        let frontends = there.ruleset.elements.get_mut("frontends").unwrap();
        let keys: Vec<_> = frontends.iter().map(|element| element.key).collect();
        let extra = Tuple::new().address([9, 9, 9, 9]).protocol(6).port(9);
        frontends.remove(&keys[1]);
        for key in [keys[0], extra] {
            frontends.insert(Element::new(key).with_data(Tuple::new().word(9)));
        }
    });
    assert_eq!(
        (first, then),
        (vec!["delete 2 of frontends".to_owned(), "add 2 to frontends".to_owned()], vec![])
    );
    assert_eq!(
        repair.differences,
        ["frontends lacks 2 elements and has 2 that are not ours, such as 172.30.0.10 . udp . 53 : 20:12"]
    );
}

#[test]
fn ranges_are_repaired_as_a_whole_if_one_is_wrong() {
    let (_, first, _) = after(|there| {
        remove_first(there.ruleset.elements.get_mut("service-cidrs").unwrap());
    });
    assert_eq!(first, ["add 1 to service-cidrs"]);
    let (_, first, _) = after(|there| {
        let ranges = there.ruleset.elements.get_mut("service-cidrs").unwrap();
        let key = remove_first(ranges);
        ranges.insert(Element::range(key, key));
    });
    assert_eq!(first, ["flush set service-cidrs", "add 4 to service-cidrs"]);
}

#[test]
fn chains_are_repaired_one_by_one() {
    let (_, first, then) = after(|there| {
        there.ruleset.chains.get_mut("n2").unwrap().rules.clear();
    });
    assert_eq!((first, then), (vec!["flush chain n2".to_owned(), "add rule to n2".to_owned()], vec![]));
    let (_, first, then) = after(|there| {
        there.ruleset.chains.remove("n2");
        remove_first(there.ruleset.elements.get_mut("classes").unwrap());
        there.ruleset.add_chain(Chain::new("stray"), [Rule::new([jump("n2")])]);
        there.ruleset.add_set(Set::new("odd", desired_columns()));
    });
    assert_eq!(first, ["flush chain stray", "add chain n2", "add 1 to classes", "add rule to n2"]);
    assert_eq!(then, ["delete set odd", "delete chain stray"]);
    let (_, first, _) = after(|there| {
        there.foreign.insert(Object::Rules("n2".into()), "the expression log".to_owned());
    });
    assert_eq!(first, ["flush chain n2", "add rule to n2"]);
}

fn desired_columns() -> Columns {
    Columns::Types(vec![Type::Address])
}

#[test]
fn another_declaration_needs_a_new_table() {
    let rebuilt = |damage: fn(&mut Installed), difference: &str| {
        let (repair, first, then) = after(damage);
        assert_eq!(first[..2], ["delete table", "add table"]);
        assert!(then.is_empty());
        assert!(repair.differences[0].contains(difference), "{repair:?}");
    };
    rebuilt(|there| there.ruleset.sets.get_mut("affinity").unwrap().size = Some(20), "affinity");
    rebuilt(
        |there| {
            there.ruleset.sets.remove("hairpin");
            there.foreign.insert(Object::Set("hairpin".into()), "a set with flags 0x100".to_owned());
        },
        "hairpin",
    );
    rebuilt(
        |there| {
            let chain = Chain::base("filter-output", ChainType::Filter, Hook::Output, 1);
            there.ruleset.add_chain(chain, []);
        },
        "filter-output",
    );
    let (_, first, _) = after(|there| {
        there.foreign.insert(Object::Elements("hairpin".into()), "an element for every key".to_owned());
        let rules = &mut there.ruleset.chains.get_mut("n2").unwrap().rules;
        rules.push(Rule::new([Statement::Counter]));
    });
    assert_eq!(first, ["flush chain n2", "flush set hairpin", "add 1 to hairpin", "add rule to n2"]);
}

/// What the kernel makes of a transaction, and what it refuses.
fn apply(to: &mut Ruleset, transaction: &Transaction) {
    for (operation, _) in &transaction.operations {
        match operation.clone() {
            Operation::AddTable | Operation::AddDormantTable => {}
            Operation::DeleteTable => *to = Ruleset::new(to.table.clone()),
            Operation::AddChain(chain) => {
                to.chains.entry(chain.name.clone()).or_insert(Rules { chain, rules: vec![] });
            }
            Operation::DeleteChain(name) => {
                assert!(to.chains.remove(&name).unwrap().rules.is_empty(), "it was flushed");
                assert!(!to.elements.values().flatten().any(|element| leads_to(element, &name)));
            }
            Operation::FlushChain(name) => to.chains.get_mut(&name).unwrap().rules.clear(),
            Operation::AddRule { chain, rule } => {
                for statement in &rule.statements {
                    if let Statement::Lookup { set, .. } = statement {
                        assert!(to.sets.contains_key(set), "a rule needs {set}");
                    }
                }
                to.chains.get_mut(&chain).unwrap().rules.push(rule);
            }
            Operation::AddSet(set) => assert_eq!(to.sets.insert(set.name.clone(), set), None),
            Operation::DeleteSet(name) => {
                to.sets.remove(&name).unwrap();
                to.elements.remove(&name);
            }
            Operation::FlushSet(name) => {
                assert!(to.sets.contains_key(&name));
                to.elements.remove(&name);
            }
            Operation::AddElements { set, elements } => {
                assert!(to.sets.contains_key(&set));
                for (element, _) in elements {
                    if let ElementValue::Verdict(verdict) = &element.value
                        && let Verdict::Goto(chain) = &**verdict
                    {
                        assert!(to.chains.contains_key(chain), "a verdict needs {chain}");
                    }
                    let there = to.elements.entry(set.clone()).or_default();
                    assert_eq!(there.insert(element), None, "it was deleted");
                }
            }
            Operation::DeleteElements { set, elements } => {
                for (element, _) in elements {
                    to.elements.get_mut(&set).unwrap().remove(&element.key).unwrap();
                }
            }
        }
    }
    to.elements.retain(|_, elements| !elements.is_empty());
}

fn leads_to(element: &Element, chain: &Name) -> bool {
    matches!(&element.value, ElementValue::Verdict(verdict) if **verdict == Verdict::Goto(chain.clone()))
}

/// Tables of few sets, chains and keys, so that two of them have much in common.
fn rulesets() -> impl Strategy<Value = Ruleset> {
    let elements = btree_map(0_u32..8, 0_u32..3, 0..6);
    let sets = btree_map(0_usize..4, (any::<bool>(), elements), 0..4);
    let chains = btree_map(0_usize..5, vec((any::<bool>(), 0_usize..4), 0..3), 1..5);
    (sets, chains, prop::bool::weighted(0.1)).prop_map(|(sets, chains, moved)| {
        let mut all = Ruleset::new(Table::new(IpFamily::IPv4, "pointsman"));
        let name = |kind: &str, number: usize| Name::from(format!("{kind}{number}"));
        let first = name("chain", *chains.keys().next().unwrap());
        for (number, (dynamic, elements)) in &sets {
            let set = name("set", *number);
            // The last one holds verdicts; whether it is written by packets changes the declaration of another.
            let declared = match number {
                3 => Set::vmap(set.clone(), desired_columns()),
                2 if *dynamic => Set::map(set.clone(), desired_columns(), desired_columns()).dynamic(5),
                _ => Set::map(set.clone(), desired_columns(), desired_columns()),
            };
            let written_by_packets = declared.flags.dynamic;
            all.add_set(declared);
            for (key, value) in elements.iter().filter(|_| !written_by_packets) {
                let element = Element::new(Tuple::new().word(*key));
                all.add_element(
                    set.clone(),
                    match number {
                        3 if *value == 0 => element.with_verdict(Verdict::Drop),
                        3 => element.with_verdict(Verdict::Goto(first.clone())),
                        _ => element.with_data(Tuple::new().word(*value)),
                    },
                );
            }
        }
        for (number, rules) in chains {
            let rules = rules.into_iter().map(|(counts, set)| {
                let looks = sets.contains_key(&set).then(|| key([Value::Mark]).in_set(name("set", set)));
                Rule::new(looks.into_iter().chain(counts.then_some(Statement::Counter)))
            });
            let chain = name("chain", number);
            let chain = match number {
                4 => Chain::base(chain, ChainType::Filter, Hook::Input, moved.into()),
                _ => Chain::new(chain),
            };
            all.add_chain(chain, rules.collect::<Vec<_>>());
        }
        all
    })
}

proptest! {
    #[test]
    fn any_table_becomes_any_other(is in rulesets(), should in rulesets()) {
        let repair = compare(&should, Some(&installed(is.clone())));
        prop_assert_eq!(repair.is_empty(), is == should);
        let mut there = is;
        apply(&mut there, &repair.first);
        apply(&mut there, &repair.then);
        prop_assert_eq!(&there, &should);
        let mut loaded = Ruleset::new(should.table.clone());
        apply(&mut loaded, &compare(&should, None).first);
        prop_assert_eq!(&loaded, &should);
    }
}
