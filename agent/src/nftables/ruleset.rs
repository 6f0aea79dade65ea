//! A table of nftables, typed, at the level of nft's own text.
//!
//! In: nothing; other modules build these. Out: values that render to nft text and to netlink, and that are read back.
//! Registers, lengths, byte orders and families are no concern of who writes rules: a [`Value`] says what is looked at, and
//! rendering assigns registers. Addresses belong to the family of the table, so one rule serves both families.
//!
//! The rule `ip daddr @nodeport-ips meta priority set meta l4proto . th dport map @nodeports goto dispatch`:
//!
//! ```
//! use pointsman_agent::nftables::ruleset::{Rule, Value, goto, key, set_priority};
//!
//! let rule = Rule::new([
//!     key([Value::DestinationAddress]).in_set("nodeport-ips"),
//!     set_priority(key([Value::Protocol, Value::DestinationPort]).map("nodeports")),
//!     goto("dispatch"),
//! ]);
//! ```
//!
//! And `meta priority & fff0:0 == none goto s2-10800-pick`:
//!
//! ```
//! use pointsman_agent::nftables::ruleset::{Rule, Tuple, Value, goto};
//!
//! let rule =
//!     Rule::new([Value::Priority.and(0xfff0_0000).equals(Tuple::new().word(0)), goto("s2-10800-pick")]);
//! ```
//!
//! Sets are declared by the types of their columns, elements are tuples of bytes in the same order:
//!
//! ```
//! use std::net::Ipv4Addr;
//! use pointsman_agent::nftables::ruleset::{
//!     Columns, Element, Operation, Origin, Set, TCP, Transaction, Tuple, Value,
//! };
//!
//! let frontends = Set::map(
//!     "frontends",
//!     Columns::Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]),
//!     Columns::Typeof(vec![Value::Priority]),
//! );
//! let mut transaction = Transaction::default();
//! transaction.push(Operation::AddSet(frontends), Origin::NONE);
//! let web = Tuple::new().address(Ipv4Addr::new(172, 30, 0, 41)).protocol(TCP).port(80);
//! let element = Element::new(web).with_data(Tuple::new().word(0x10_0010));
//! transaction.add_element("frontends", element, Origin(7));
//! ```

mod element;
mod elements;
mod rule;
mod set;
mod transaction;
mod value;

use std::borrow::Cow;
use std::collections::BTreeMap;

use pointsman_crds::proxy_node_status::IpFamily;

pub use crate::kernel::Counted;
pub use element::{Element, ElementValue, Extra, SCTP, TCP, Tuple, UDP};
pub use elements::Elements;
pub use rule::{
    DynamicOperation, Operator, Rule, Statement, Verdict, VerdictMap, drop, goto, jump, return_, set_mark,
    set_priority,
};
pub use set::{Columns, DataType, Flags, Set, Type};
pub use transaction::{Operation, Origin, Transaction};
pub use value::{Key, Value, key};

/// The name of a table, chain or set. Most are constants.
pub type Name = Cow<'static, str>;

/// A table: the only object of nftables that is ours as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    /// Whose addresses its rules look at.
    pub family: IpFamily,
    /// Its name, unique within the family.
    pub name: Name,
}

impl Table {
    /// A table of this family.
    pub fn new(family: IpFamily, name: impl Into<Name>) -> Self {
        Self { family, name: name.into() }
    }
}

/// A chain, without its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: Name,
    /// Where packets enter it, or `None` if only rules lead to it.
    pub base: Option<Base>,
}

impl Chain {
    /// A chain that rules lead to.
    pub fn new(name: impl Into<Name>) -> Self {
        Self { name: name.into(), base: None }
    }

    /// A chain that packets enter at a hook; those that reach its end go on.
    pub fn base(name: impl Into<Name>, kind: ChainType, hook: Hook, priority: i32) -> Self {
        Self { name: name.into(), base: Some(Base { kind, hook, priority }) }
    }
}

/// Where packets enter a base chain. Its policy is always to accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// What it may do.
    pub kind: ChainType,
    /// When on a packet's way.
    pub hook: Hook,
    /// Chains of one hook run in ascending order.
    pub priority: i32,
}

/// What a base chain may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainType {
    /// Let pass or drop.
    Filter,
    /// Translate addresses; sees the first packet of a connection only.
    Nat,
}

/// Where on a packet's way (`NF_INET_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Before routing.
    Prerouting,
    /// To this node.
    Input,
    /// Through this node.
    Forward,
    /// From this node.
    Output,
    /// Before it leaves.
    Postrouting,
}

/// A chain with its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The chain.
    pub chain: Chain,
    /// Its rules in order.
    pub rules: Vec<Rule>,
}

/// Everything in a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    /// The table.
    pub table: Table,
    /// Sets and maps by name.
    pub sets: BTreeMap<Name, Set>,
    /// The elements of each set that has any.
    pub elements: BTreeMap<Name, Elements>,
    /// Chains by name.
    pub chains: BTreeMap<Name, Rules>,
}

impl Ruleset {
    /// An empty table.
    #[must_use]
    pub fn new(table: Table) -> Self {
        Self { table, sets: BTreeMap::new(), elements: BTreeMap::new(), chains: BTreeMap::new() }
    }

    /// Adds or replaces a set.
    pub fn add_set(&mut self, set: Set) {
        self.sets.insert(set.name.clone(), set);
    }

    /// Adds or replaces a chain with its rules.
    pub fn add_chain(&mut self, chain: Chain, rules: impl IntoIterator<Item = Rule>) {
        let rules = Rules { chain, rules: rules.into_iter().collect() };
        self.chains.insert(rules.chain.name.clone(), rules);
    }

    /// Adds or replaces an element; see [`Elements::insert`] for the cost.
    pub fn add_element(&mut self, set: impl Into<Name>, element: Element) {
        self.elements.entry(set.into()).or_default().insert(element);
    }
}
