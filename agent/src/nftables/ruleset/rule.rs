//! Rules and their statements.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Key, Name, Tuple, Value};

/// A rule: statements in order. One that does not match ends it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// What it does.
    pub statements: Vec<Statement>,
    /// For people, at most 128 bytes.
    pub comment: Option<String>,
}

impl Rule {
    /// A rule without comment.
    pub fn new(statements: impl IntoIterator<Item = Statement>) -> Self {
        Self { statements: statements.into_iter().collect(), comment: None }
    }

    /// The rule with a comment.
    #[must_use]
    pub fn commented(mut self, comment: impl Into<String>) -> Self {
        self.comment = Some(comment.into());
        self
    }
}

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Compares with a constant. For [`Value::InputInterface`] see [`Tuple::interface`] and [`Tuple::interface_prefix`].
    Compare {
        /// What.
        value: Value,
        /// How.
        operator: Operator,
        /// With what.
        to: Tuple,
    },
    /// Looks a key up in a set (or map, whose data does not matter then).
    Lookup {
        /// Looked up.
        key: Key,
        /// The set.
        set: Name,
        /// Matches if the set does not have it.
        inverted: bool,
    },
    /// Takes the verdict that a map holds for the key; goes on if it holds none.
    VerdictMap {
        /// Looked up.
        key: Key,
        /// Where.
        map: VerdictMap,
    },
    /// Writes `meta mark`.
    SetMark(Value),
    /// Writes `meta priority`.
    SetPriority(Value),
    /// Writes a dynamic set or map from the packet.
    Dynamic {
        /// What is done.
        operation: DynamicOperation,
        /// The set.
        set: Name,
        /// The key.
        key: Key,
        /// How long the element lives, in whole milliseconds.
        timeout: Option<Duration>,
        /// What the map gets to hold.
        data: Option<Value>,
    },
    /// `dnat to key map @map`: the map holds addresses with ports. A packet without one goes on to the next rule.
    Dnat {
        /// Looked up.
        key: Key,
        /// The map.
        map: Name,
    },
    /// The source becomes an address of the interface that the packet leaves by.
    Masquerade {
        /// Source ports are random in any case.
        fully_random: bool,
    },
    /// Refuses by an ICMP error, port unreachable.
    Reject,
    /// Counts packets and bytes.
    Counter,
    /// Where the packet goes.
    Verdict(Verdict),
}

/// How to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
}

/// What a packet does to a dynamic set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DynamicOperation {
    /// Adds the element if the key is not there.
    Add,
    /// Adds the element, or restarts the timeout of the one that is there, without changing its data.
    Update,
    /// Removes the element.
    Delete,
}

/// Where verdicts are looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerdictMap {
    /// A map of the table.
    Named(Name),
    /// A map of this rule only.
    Inline(BTreeMap<Tuple, Verdict>),
}

/// Where a packet goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// On, past the other rules of this hook's chain.
    Accept,
    /// Nowhere.
    Drop,
    /// Back to the chain that jumped here.
    Return,
    /// To a chain, and back at its end.
    Jump(Name),
    /// To a chain, and at its end to where this chain would return to.
    Goto(Name),
}

/// `goto chain`.
pub fn goto(chain: impl Into<Name>) -> Statement {
    Statement::Verdict(Verdict::Goto(chain.into()))
}

/// `jump chain`.
pub fn jump(chain: impl Into<Name>) -> Statement {
    Statement::Verdict(Verdict::Jump(chain.into()))
}

/// `drop`.
#[must_use]
pub fn drop() -> Statement {
    Statement::Verdict(Verdict::Drop)
}

/// `return`.
#[must_use]
pub fn return_() -> Statement {
    Statement::Verdict(Verdict::Return)
}

/// `meta mark set value`.
#[must_use]
pub fn set_mark(value: Value) -> Statement {
    Statement::SetMark(value)
}

/// `meta priority set value`.
#[must_use]
pub fn set_priority(value: Value) -> Statement {
    Statement::SetPriority(value)
}
