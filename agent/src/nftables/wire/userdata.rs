//! What the `nft` program keeps in the kernel for itself: comments, and how a set was declared.
//!
//! A byte string of (type, length, value), each of one byte but the value; numbers are in the kernel's order. As nft 1.0.6
//! writes it: newer programs read that, but 1.0.6 crashes on what newer ones write.

use super::{DecodeError, types_of};
use crate::nftables::ruleset::{Columns, DataType, Set, Type, Value};

const COMMENT: u8 = 0;

const SET_KEY_ORDER: u8 = 0;
const SET_DATA_ORDER: u8 = 1;
const SET_MERGE: u8 = 2;
const SET_KEY_TYPEOF: u8 = 3;
const SET_DATA_TYPEOF: u8 = 4;
const SET_DATA_INTERVAL: u8 = 6;

const ORDER_NONE: u32 = 0;
const ORDER_HOST: u32 = 1;
const ORDER_NETWORK: u32 = 2;

const EXPRESSION: u8 = 0;
const DETAILS: u8 = 1;
const VERDICT: u32 = 1;
const PAYLOAD: u32 = 7;
const META: u32 = 9;
const CONCATENATION: u32 = 13;
const NUMGEN: u32 = 23;

const IP: u32 = 12;
const IP6: u32 = 13;
const TRANSPORT: u32 = 11;

use pointsman_crds::proxy_node_status::IpFamily;

/// Longer comments do not fit.
pub(super) const LONGEST_COMMENT: usize = 128;

fn put(to: &mut Vec<u8>, kind: u8, value: &[u8]) {
    // Values are short: the longest is the declaration of a key of three columns.
    to.push(kind);
    to.push(u8::try_from(value.len()).unwrap_or(u8::MAX));
    to.extend(value);
}

fn put_number(to: &mut Vec<u8>, kind: u8, value: u32) {
    put(to, kind, &value.to_ne_bytes());
}

fn get(bytes: &[u8], wanted: u8) -> Option<&[u8]> {
    let mut rest = bytes;
    while let [kind, length, tail @ ..] = rest {
        let (value, tail) = tail.split_at_checked(usize::from(*length))?;
        if *kind == wanted {
            return Some(value);
        }
        rest = tail;
    }
    None
}

fn get_number(bytes: &[u8], wanted: u8) -> Option<u32> {
    get(bytes, wanted)?.try_into().ok().map(u32::from_ne_bytes)
}

/// The user data of a rule or element with this comment.
pub(super) fn encode_comment(comment: &str) -> Vec<u8> {
    let end = comment.floor_char_boundary(LONGEST_COMMENT - 1);
    let mut text = comment.as_bytes().get(..end).unwrap_or_default().to_vec();
    text.push(0);
    let mut bytes = Vec::new();
    put(&mut bytes, COMMENT, &text);
    bytes
}

pub(super) fn decode_comment(bytes: &[u8]) -> Option<String> {
    let text = get(bytes, COMMENT)?;
    Some(String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned())
}

/// The user data of a set.
pub(super) fn encode_set(set: &Set, family: IpFamily) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_number(&mut bytes, SET_KEY_ORDER, order(&set.key));
    match &set.data {
        Some(DataType::Columns(columns)) => put_number(&mut bytes, SET_DATA_ORDER, order(columns)),
        Some(DataType::Verdict) => put_number(&mut bytes, SET_DATA_ORDER, ORDER_NONE),
        None => {}
    }
    if set.flags.interval {
        put_number(&mut bytes, SET_MERGE, 1);
    }
    let key = encode_columns(&set.key, family);
    if let Some(columns) = &key {
        put(&mut bytes, SET_KEY_TYPEOF, columns);
    }
    match &set.data {
        Some(DataType::Columns(columns)) => {
            if let Some(columns) = encode_columns(columns, family) {
                put(&mut bytes, SET_DATA_TYPEOF, &columns);
            }
        }
        Some(DataType::Verdict) if matches!(set.key, Columns::Typeof(_)) => {
            put(&mut bytes, SET_DATA_TYPEOF, &expression(VERDICT, &[]));
        }
        _ => {}
    }
    if set.data.is_some() {
        put_number(&mut bytes, SET_DATA_INTERVAL, 0);
    }
    bytes
}

/// The user data of a map that is in a rule, with keys of these types.
pub(super) fn encode_inline(types: &[Type]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_number(&mut bytes, SET_KEY_ORDER, order(&Columns::Types(types.to_vec())));
    put_number(&mut bytes, SET_DATA_ORDER, ORDER_NONE);
    if types.len() > 1 {
        put(&mut bytes, SET_KEY_TYPEOF, &expression(CONCATENATION, &[]));
    }
    put(&mut bytes, SET_DATA_TYPEOF, &expression(VERDICT, &[]));
    put_number(&mut bytes, SET_DATA_INTERVAL, 0);
    bytes
}

/// How key and data of a set were declared, as far as their types are these.
pub(super) fn decode_columns(
    bytes: &[u8],
    data: bool,
    types: Vec<Type>,
    family: IpFamily,
) -> Result<Columns, DecodeError> {
    let Some(declared) = get(bytes, if data { SET_DATA_TYPEOF } else { SET_KEY_TYPEOF }) else {
        return Ok(Columns::Types(types));
    };
    let foreign = || DecodeError::foreign("a set with a declaration of its own");
    let values = match split(declared).ok_or_else(foreign)? {
        (CONCATENATION, []) => return Ok(Columns::Types(types)),
        (CONCATENATION, parts) => {
            let columns = (0..=u8::MAX).map_while(|index| get(parts, index));
            columns.map(|part| decode_value(part, family)).collect::<Option<Vec<_>>>().ok_or_else(foreign)?
        }
        _ => vec![decode_value(declared, family).ok_or_else(foreign)?],
    };
    if types_of(&values) != types {
        return Err(foreign());
    }
    Ok(Columns::Typeof(values))
}

/// Whether the set merges its intervals.
pub(super) fn merges(bytes: &[u8]) -> bool {
    get_number(bytes, SET_MERGE) == Some(1)
}

fn order(columns: &Columns) -> u32 {
    match columns {
        Columns::Types(types) => match types[..] {
            [Type::Protocol] => ORDER_NONE,
            [Type::Address | Type::Port] => ORDER_NETWORK,
            [_] => ORDER_HOST,
            _ => ORDER_NONE,
        },
        Columns::Typeof(values) => match values[..] {
            [Value::SourceAddress | Value::DestinationAddress | Value::DestinationPort] => ORDER_NETWORK,
            [_] => ORDER_HOST,
            _ => ORDER_NONE,
        },
    }
}

fn encode_columns(columns: &Columns, family: IpFamily) -> Option<Vec<u8>> {
    match columns {
        Columns::Types(types) if types.len() > 1 => Some(expression(CONCATENATION, &[])),
        Columns::Types(_) => None,
        Columns::Typeof(values) => match values.as_slice() {
            [only] => encode_value(only, family),
            several => {
                let mut parts = Vec::new();
                for (index, value) in (0..).zip(several) {
                    put(&mut parts, index, &encode_value(value, family)?);
                }
                Some(expression(CONCATENATION, &parts))
            }
        },
    }
}

fn expression(kind: u32, details: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_number(&mut bytes, EXPRESSION, kind);
    put(&mut bytes, DETAILS, details);
    bytes
}

fn split(bytes: &[u8]) -> Option<(u32, &[u8])> {
    Some((get_number(bytes, EXPRESSION)?, get(bytes, DETAILS)?))
}

/// Header and field, or key, of the values that a set can be declared with.
fn numbers(value: &Value, family: IpFamily) -> Option<(u32, Vec<u32>)> {
    Some(match (value, family) {
        (Value::SourceAddress, IpFamily::IPv4) => (PAYLOAD, vec![IP, 11]),
        (Value::DestinationAddress, IpFamily::IPv4) => (PAYLOAD, vec![IP, 12]),
        (Value::SourceAddress, IpFamily::IPv6) => (PAYLOAD, vec![IP6, 8]),
        (Value::DestinationAddress, IpFamily::IPv6) => (PAYLOAD, vec![IP6, 9]),
        (Value::DestinationPort, _) => (PAYLOAD, vec![TRANSPORT, 2]),
        (Value::Priority, _) => (META, vec![2]),
        (Value::Mark, _) => (META, vec![3]),
        (Value::InputInterface, _) => (META, vec![6]),
        (Value::Protocol, _) => (META, vec![16]),
        (Value::Random { below }, _) => (NUMGEN, vec![1, *below, 0]),
        _ => return None,
    })
}

fn encode_value(value: &Value, family: IpFamily) -> Option<Vec<u8>> {
    let (kind, numbers) = numbers(value, family)?;
    let mut details = Vec::new();
    for (index, number) in (0..).zip(numbers) {
        put_number(&mut details, index, number);
    }
    Some(expression(kind, &details))
}

fn decode_value(bytes: &[u8], family: IpFamily) -> Option<Value> {
    let (kind, details) = split(bytes)?;
    if kind == NUMGEN {
        let value = Value::Random { below: get_number(details, 1)? };
        return (encode_value(&value, family)? == bytes).then_some(value);
    }
    let plain = [
        Value::SourceAddress,
        Value::DestinationAddress,
        Value::DestinationPort,
        Value::Priority,
        Value::Mark,
        Value::InputInterface,
        Value::Protocol,
    ];
    plain.into_iter().find(|value| encode_value(value, family).as_deref() == Some(bytes))
}
