//! What rules look at, and what they write.

use super::rule::{Operator, Statement, Verdict, VerdictMap};
use super::{Name, Tuple, Type};

/// Something known of a packet while a rule runs, or made of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// `ip saddr` or `ip6 saddr`, by the family of the table.
    SourceAddress,
    /// `ip daddr` or `ip6 daddr`.
    DestinationAddress,
    /// `th dport`: of TCP, UDP or SCTP.
    DestinationPort,
    /// `meta l4proto`: the transport protocol.
    Protocol,
    /// `meta mark`.
    Mark,
    /// `meta priority`.
    Priority,
    /// `iifname`: the interface a packet came in on.
    InputInterface,
    /// `ct state`; see [`Value::CT_NEW`].
    CtState,
    /// `ct status`; see [`Value::CT_DNAT`].
    CtStatus,
    /// `fib saddr type`: what the source address is to this node.
    SourceType,
    /// `fib daddr type`.
    DestinationType,
    /// `numgen random mod N`: a number from 0 to N - 1.
    Random {
        /// N, at least 1.
        below: u32,
    },
    /// `(value & mask) ^ xor`, which is how the kernel computes `&`, `|` and `^`. Both have the length of the value.
    Bitwise {
        /// Of what.
        value: Box<Value>,
        /// Bits kept.
        mask: Tuple,
        /// Bits changed afterwards.
        xor: Tuple,
    },
    /// `key map @map`: what a map holds for a key. A rule ends here, without effect, if it holds nothing.
    Mapped {
        /// Looked up.
        key: Key,
        /// The map.
        map: Name,
    },
    /// Always the same.
    Constant(Tuple),
}

impl Value {
    /// `ct state invalid` as a bit of [`Value::CtState`].
    pub const CT_INVALID: u32 = 1;
    /// `ct state new` as a bit of [`Value::CtState`].
    pub const CT_NEW: u32 = 8;
    /// `ct status dnat` as a bit of [`Value::CtStatus`].
    pub const CT_DNAT: u32 = 0x20;
    /// `fib ... type local`: an address of this node (`RTN_LOCAL`).
    pub const LOCAL: u32 = 2;

    /// The type, or `None` if a map decides.
    #[must_use]
    pub fn kind(&self) -> Option<Type> {
        Some(match self {
            Self::SourceAddress | Self::DestinationAddress => Type::Address,
            Self::DestinationPort => Type::Port,
            Self::Protocol => Type::Protocol,
            Self::Mark => Type::Mark,
            Self::Priority => Type::ClassId,
            Self::InputInterface => Type::Interface,
            Self::CtState => Type::CtState,
            Self::CtStatus => Type::CtStatus,
            Self::SourceType | Self::DestinationType => Type::AddressType,
            Self::Random { .. } => Type::Integer,
            Self::Bitwise { value, .. } => return value.kind(),
            Self::Mapped { .. } | Self::Constant(_) => return None,
        })
    }

    /// `value & mask` of a 32-bit value.
    #[must_use]
    pub fn and(self, mask: u32) -> Self {
        self.bitwise(mask, 0)
    }

    /// `value | bits` of a 32-bit value.
    #[must_use]
    pub fn or(self, bits: u32) -> Self {
        self.bitwise(!bits, bits)
    }

    /// `value ^ bits` of a 32-bit value.
    #[must_use]
    pub fn xor(self, bits: u32) -> Self {
        self.bitwise(u32::MAX, bits)
    }

    /// `value & mask | bits` of a 32-bit value.
    #[must_use]
    pub fn and_or(self, mask: u32, bits: u32) -> Self {
        self.bitwise(mask & !bits, bits)
    }

    fn bitwise(self, mask: u32, xor: u32) -> Self {
        Self::Bitwise { value: Box::new(self), mask: Tuple::new().word(mask), xor: Tuple::new().word(xor) }
    }

    /// `value & mask` of an address; `mask` is an address of the same family.
    #[must_use]
    pub fn masked(self, mask: Tuple) -> Self {
        Self::Bitwise { value: Box::new(self), mask, xor: mask.zeroed() }
    }

    /// `value == to`.
    #[must_use]
    pub fn equals(self, to: Tuple) -> Statement {
        Statement::Compare { value: self, operator: Operator::Equal, to }
    }

    /// `value != to`.
    #[must_use]
    pub fn differs(self, to: Tuple) -> Statement {
        Statement::Compare { value: self, operator: Operator::NotEqual, to }
    }

    /// One of these bits is set in a 32-bit value: `ct state new`, `meta mark & 0x4000 != 0`.
    #[must_use]
    pub fn has(self, bits: u32) -> Statement {
        self.and(bits).differs(Tuple::new().word(0))
    }
}

/// Values in order, `ip daddr . meta l4proto . th dport`: what is looked up in a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(pub Vec<Value>);

/// Values in order.
pub fn key(values: impl IntoIterator<Item = Value>) -> Key {
    Key(values.into_iter().collect())
}

impl Key {
    /// `key @set`.
    pub fn in_set(self, set: impl Into<Name>) -> Statement {
        Statement::Lookup { key: self, set: set.into(), inverted: false }
    }

    /// `key != @set`.
    pub fn not_in_set(self, set: impl Into<Name>) -> Statement {
        Statement::Lookup { key: self, set: set.into(), inverted: true }
    }

    /// `key map @map`.
    pub fn map(self, map: impl Into<Name>) -> Value {
        Value::Mapped { key: self, map: map.into() }
    }

    /// `key vmap @map`.
    pub fn vmap(self, map: impl Into<Name>) -> Statement {
        Statement::VerdictMap { key: self, map: VerdictMap::Named(map.into()) }
    }

    /// `key vmap { ... }`; each such rule costs a set of its own in the kernel.
    pub fn vmap_of(self, cases: impl IntoIterator<Item = (Tuple, Verdict)>) -> Statement {
        Statement::VerdictMap { key: self, map: VerdictMap::Inline(cases.into_iter().collect()) }
    }

    /// `dnat to key map @map`; the map holds addresses with ports.
    pub fn dnat(self, map: impl Into<Name>) -> Statement {
        Statement::Dnat { key: self, map: map.into() }
    }
}
