//! The kernel's messages about nftables, and nothing else.
//!
//! In: operations, or bytes from a netlink socket. Out: the bytes of a transaction, or the types of
//! [`ruleset`](super::ruleset). Pure: every byte sequence gives a value or a [`DecodeError`], never a panic.
//!
//! Written by hand because the crates that exist lack expressions that are used here. What is written is what nft 1.0.6
//! writes for the same text, user data included, so that every `nft` since then can list it.

mod batch;
mod decode;
mod expression;
mod parse;
mod userdata;

use thiserror::Error;

use super::ruleset::{Name, Type, Value, Verdict};
use crate::netlink::{Encoder, WireError, attributes, be_u32, exactly};
use pointsman_crds::proxy_node_status::IpFamily;

pub use batch::{Batch, Place, Segment};
pub(super) use decode::cases;
pub use decode::{
    ReadElement, ReadSet, chain, elements, generation, ranges, rule, rule_counter, set, table_flags, table_of,
};

/// Bytes that are no valid message, or say something that nothing of ours says.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Broken framing.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Valid, but not ours.
    #[error("{0}, which is not written here")]
    Foreign(String),
}

impl DecodeError {
    fn foreign(what: impl Into<String>) -> Self {
        Self::Foreign(what.into())
    }
}

/// Subsystem 10 (nf_tables) in the high byte.
const SUBSYSTEM: u16 = 0xa00;
pub(super) const NEW_TABLE: u16 = SUBSYSTEM;
pub(super) const GET_TABLE: u16 = SUBSYSTEM + 1;
const DELETE_TABLE: u16 = SUBSYSTEM + 2;
pub(super) const NEW_CHAIN: u16 = SUBSYSTEM + 3;
pub(super) const GET_CHAIN: u16 = SUBSYSTEM + 4;
const DELETE_CHAIN: u16 = SUBSYSTEM + 5;
pub(super) const NEW_RULE: u16 = SUBSYSTEM + 6;
pub(super) const GET_RULE: u16 = SUBSYSTEM + 7;
const DELETE_RULE: u16 = SUBSYSTEM + 8;
pub(super) const NEW_SET: u16 = SUBSYSTEM + 9;
pub(super) const GET_SET: u16 = SUBSYSTEM + 10;
const DELETE_SET: u16 = SUBSYSTEM + 11;
pub(super) const NEW_ELEMENT: u16 = SUBSYSTEM + 12;
pub(super) const GET_ELEMENT: u16 = SUBSYSTEM + 13;
const DELETE_ELEMENT: u16 = SUBSYSTEM + 14;
pub(super) const NEW_GENERATION: u16 = SUBSYSTEM + 15;
pub(super) const GET_GENERATION: u16 = SUBSYSTEM + 16;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// What the two messages around a batch are about.
const RESOURCE: u16 = 10;

/// In messages about tables, chains, rules, sets and elements alike.
pub(super) const TABLE: u16 = 1;
const TABLE_FLAGS: u16 = 2;
const TABLE_DORMANT: u32 = 1;

const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const ACCEPT: u32 = 1;

pub(super) const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_USERDATA: u16 = 7;

pub(super) const SET_NAME: u16 = 2;
const SET_FLAGS: u16 = 3;
const SET_KEY_TYPE: u16 = 4;
const SET_KEY_LENGTH: u16 = 5;
const SET_DATA_TYPE: u16 = 6;
const SET_DATA_LENGTH: u16 = 7;
const SET_DESCRIPTION: u16 = 9;
const SET_ID: u16 = 10;
const SET_USERDATA: u16 = 13;
const SET_EXPRESSION: u16 = 17;
const SET_EXPRESSIONS: u16 = 18;
const SET_COUNT: u16 = 20;
const DESCRIPTION_SIZE: u16 = 1;
const FLAG_ANONYMOUS: u32 = 1;
const FLAG_CONSTANT: u32 = 2;
const FLAG_INTERVAL: u32 = 4;
const FLAG_MAP: u32 = 8;
const FLAG_TIMEOUT: u32 = 0x10;
const FLAG_DYNAMIC: u32 = 0x20;
const VERDICTS: u32 = 0xffff_ff00;
const VERDICT_LENGTH: u32 = 16;

const ELEMENTS_SET: u16 = 2;
const ELEMENTS: u16 = 3;
const ELEMENTS_SET_ID: u16 = 4;
const LIST_ITEM: u16 = 1;
const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const ELEMENT_FLAGS: u16 = 3;
const ELEMENT_TIMEOUT: u16 = 4;
const ELEMENT_EXPIRATION: u16 = 5;
const ELEMENT_USERDATA: u16 = 6;
const ELEMENT_EXPRESSION: u16 = 7;
const ELEMENT_KEY_END: u16 = 10;
const COUNTER: &str = "counter";
const COUNTER_BYTES: u16 = 1;
const COUNTER_PACKETS: u16 = 2;
const ELEMENT_IS_END: u32 = 1;

const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;

const GENERATION_ID: u16 = 1;

/// Bytes of an address.
const fn address_length(family: IpFamily) -> usize {
    match family {
        IpFamily::IPv4 => 4,
        IpFamily::IPv6 => 16,
    }
}

impl Type {
    /// nft's number of the type, which the kernel keeps for it. From the sets that nft 1.0.6 makes.
    const fn number(self, family: IpFamily) -> u32 {
        match (self, family) {
            (Self::Integer, _) => 4,
            (Self::Address, IpFamily::IPv4) => 7,
            (Self::Address, IpFamily::IPv6) => 8,
            (Self::Protocol, _) => 12,
            (Self::Port, _) => 13,
            (Self::Mark, _) => 19,
            (Self::ClassId, _) => 23,
            (Self::CtState, _) => 26,
            (Self::CtStatus, _) => 28,
            (Self::AddressType, _) => 38,
            (Self::Interface, _) => 41,
        }
    }

    fn from_number(number: u32, family: IpFamily) -> Option<Self> {
        const ALL: [Type; 10] = [
            Type::Integer,
            Type::Address,
            Type::Protocol,
            Type::Port,
            Type::Mark,
            Type::ClassId,
            Type::CtState,
            Type::CtStatus,
            Type::AddressType,
            Type::Interface,
        ];
        ALL.into_iter().find(|kind| kind.number(family) == number)
    }

    /// Bytes of a value.
    pub(super) const fn length(self, family: IpFamily) -> usize {
        match self {
            Self::Address => address_length(family),
            Self::Protocol => 1,
            Self::Port => 2,
            Self::Interface => 16,
            Self::Mark
            | Self::ClassId
            | Self::CtState
            | Self::CtStatus
            | Self::AddressType
            | Self::Integer => 4,
        }
    }
}

/// Bytes of a key of these columns: a single one as it is, several each rounded up to four bytes.
pub(super) fn columns_length(types: &[Type], family: IpFamily) -> usize {
    match types {
        [only] => only.length(family),
        several => several.iter().map(|column| column.length(family).next_multiple_of(4)).sum(),
    }
}

/// nft's number of these columns together.
fn columns_number(types: &[Type], family: IpFamily) -> u32 {
    types.iter().fold(0, |number, column| number << 6 | column.number(family))
}

fn columns_from_number(number: u32, family: IpFamily) -> Result<Vec<Type>, DecodeError> {
    let mut types = Vec::new();
    let mut rest = number;
    while rest != 0 {
        let column = Type::from_number(rest & 0x3f, family);
        types.push(column.ok_or_else(|| DecodeError::foreign(format!("a set of type {number:#x}")))?);
        rest >>= 6;
    }
    types.reverse();
    Ok(types)
}

/// The types of plain values. What has none (a map, a constant) is no column of a set.
fn types_of(values: &[Value]) -> Vec<Type> {
    values.iter().filter_map(Value::kind).collect()
}

fn encode_verdict(to: &mut Encoder, verdict: &Verdict) {
    let (code, chain): (i32, Option<&Name>) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
    };
    to.nested(DATA_VERDICT, |to| {
        to.attribute(VERDICT_CODE, &code.to_be_bytes());
        if let Some(chain) = chain {
            to.string(VERDICT_CHAIN, chain);
        }
    });
}

fn decode_verdict(bytes: &[u8]) -> Result<Verdict, DecodeError> {
    let (mut code, mut chain) = (None, None);
    for attribute in attributes(bytes) {
        match attribute? {
            (VERDICT_CODE, value) => code = Some(i32::from_be_bytes(exactly("verdict", value)?)),
            (VERDICT_CHAIN, value) => chain = Some(string("a chain", value)?),
            _ => {}
        }
    }
    let chain = chain.ok_or(WireError::Missing("a chain"));
    Ok(match code.ok_or(WireError::Missing("a verdict"))? {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -3 => Verdict::Jump(chain?.into()),
        -4 => Verdict::Goto(chain?.into()),
        -5 => Verdict::Return,
        other => return Err(DecodeError::foreign(format!("verdict {other}"))),
    })
}

/// A string without the zeros that end it.
fn string(what: &'static str, bytes: &[u8]) -> Result<String, WireError> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(bytes.get(..end).unwrap_or_default());
    text.map(str::to_owned).map_err(|_| WireError::Size { what, length: bytes.len() })
}

/// Attributes by type: of several of one type the last.
struct Fields<'a, const N: usize>([Option<&'a [u8]>; N]);

impl<'a, const N: usize> Fields<'a, N> {
    fn new(bytes: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = [None; N];
        for attribute in attributes(bytes) {
            let (kind, value) = attribute?;
            if let Some(field) = fields.get_mut(usize::from(kind)) {
                *field = Some(value);
            }
        }
        Ok(Self(fields))
    }

    fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.0.get(usize::from(kind)).copied().flatten()
    }

    fn need(&self, kind: u16, what: &'static str) -> Result<&'a [u8], WireError> {
        self.get(kind).ok_or(WireError::Missing(what))
    }

    fn number(&self, kind: u16, what: &'static str) -> Result<u32, WireError> {
        be_u32(what, self.need(kind, what)?)
    }

    fn number_or_zero(&self, kind: u16, what: &'static str) -> Result<u32, WireError> {
        self.get(kind).map_or(Ok(0), |value| be_u32(what, value))
    }
}

#[cfg(test)]
mod tests;
