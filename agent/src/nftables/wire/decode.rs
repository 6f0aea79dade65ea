//! The kernel's messages about what it holds, read.

use std::collections::BTreeMap;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;

use super::expression::{EXPRESSION_DATA, EXPRESSION_NAME};
use super::{
    ACCEPT, CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TYPE, COUNTER, COUNTER_BYTES, COUNTER_PACKETS,
    DATA_VERDICT, DecodeError, ELEMENT_DATA, ELEMENT_EXPIRATION, ELEMENT_EXPRESSION, ELEMENT_FLAGS,
    ELEMENT_IS_END, ELEMENT_KEY, ELEMENT_KEY_END, ELEMENT_TIMEOUT, ELEMENT_USERDATA, ELEMENTS,
    FLAG_ANONYMOUS, FLAG_CONSTANT, FLAG_DYNAMIC, FLAG_INTERVAL, FLAG_MAP, FLAG_TIMEOUT, Fields,
    GENERATION_ID, HOOK_NUMBER, HOOK_PRIORITY, RULE_CHAIN, RULE_EXPRESSIONS, RULE_USERDATA, SET_COUNT,
    SET_DATA_TYPE, SET_DESCRIPTION, SET_EXPRESSION, SET_EXPRESSIONS, SET_FLAGS, SET_KEY_TYPE, SET_NAME,
    SET_USERDATA, TABLE, TABLE_FLAGS, VERDICTS, columns_from_number, decode_verdict, parse, string, userdata,
};
use crate::netlink::{NETFILTER_HEADER, WireError, attributes, be_u32, be_u64, exactly};
use crate::nftables::ruleset::{
    Base, Chain, ChainType, Counted, DataType, Element, ElementValue, Extra, Flags, Hook, Name, Rule, Set,
    Tuple, Verdict,
};

fn body(payload: &[u8]) -> Result<&[u8], WireError> {
    payload.get(NETFILTER_HEADER..).ok_or(WireError::Missing("a header"))
}

/// The family (`AF_*`) and table that a message is about.
pub fn table_of(payload: &[u8]) -> Result<(u8, String), DecodeError> {
    let family = *payload.first().ok_or(WireError::Missing("a family"))?;
    let fields = Fields::<2>::new(body(payload)?)?;
    Ok((family, string("a table's name", fields.need(TABLE, "a table")?)?))
}

/// The flags of a table. Ours have none.
pub fn table_flags(payload: &[u8]) -> Result<u32, DecodeError> {
    Ok(Fields::<3>::new(body(payload)?)?.number(TABLE_FLAGS, "a table's flags")?)
}

/// The number of the last transaction.
pub fn generation(payload: &[u8]) -> Result<u32, DecodeError> {
    Ok(Fields::<2>::new(body(payload)?)?.number(GENERATION_ID, "a generation")?)
}

/// A chain: its name, and itself if it is one that could be ours.
pub fn chain(payload: &[u8]) -> Result<(Name, Result<Chain, DecodeError>), DecodeError> {
    let fields = Fields::<8>::new(body(payload)?)?;
    let name = Name::from(string("a chain's name", fields.need(CHAIN_NAME, "a name")?)?);
    let base = fields.get(CHAIN_HOOK).map(|hook| base(&fields, hook)).transpose();
    let chain = base.map(|base| Chain { name: name.clone(), base });
    Ok((name, chain))
}

fn base(fields: &Fields<'_, 8>, hook: &[u8]) -> Result<Base, DecodeError> {
    let hook = Fields::<3>::new(hook)?;
    let number = hook.number(HOOK_NUMBER, "a hook")?;
    let all = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting];
    let kind = string("a chain's type", fields.need(CHAIN_TYPE, "a type")?)?;
    let kinds = [ChainType::Filter, ChainType::Nat];
    if fields.number(CHAIN_POLICY, "a policy")? != ACCEPT {
        return Err(DecodeError::foreign("a chain that does not accept at its end"));
    }
    Ok(Base {
        kind: kinds
            .into_iter()
            .find(|known| known.as_str() == kind)
            .ok_or_else(|| DecodeError::Foreign(format!("a chain of type {kind}")))?,
        hook: all
            .into_iter()
            .find(|hook| super::batch::hook_number(*hook) == number)
            .ok_or_else(|| DecodeError::Foreign(format!("hook {number}")))?,
        priority: i32::from_be_bytes(exactly("priority", hook.need(HOOK_PRIORITY, "a priority")?)?),
    })
}

/// A rule: its chain, and itself if it is one that could be ours. Maps in rules have the names that the kernel gave them.
pub fn rule(payload: &[u8], family: IpFamily) -> Result<(Name, Result<Rule, DecodeError>), DecodeError> {
    let fields = Fields::<8>::new(body(payload)?)?;
    let chain = string("a chain's name", fields.need(RULE_CHAIN, "a chain")?)?;
    let statements = parse::statements(fields.get(RULE_EXPRESSIONS).unwrap_or_default(), family);
    let rule = statements.map(|statements| Rule {
        statements,
        comment: fields.get(RULE_USERDATA).and_then(userdata::decode_comment),
    });
    Ok((chain.into(), rule))
}

/// What a rule of this chain has counted, if it is of this chain and counts.
pub fn rule_counter(payload: &[u8], chain: &str) -> Result<Option<Counted>, DecodeError> {
    let fields = Fields::<8>::new(body(payload)?)?;
    if string("a chain's name", fields.need(RULE_CHAIN, "a chain")?)? != chain {
        return Ok(None);
    }
    for attribute in attributes(fields.get(RULE_EXPRESSIONS).unwrap_or_default()) {
        let expression = attribute?.1;
        let name = Fields::<3>::new(expression)?.need(EXPRESSION_NAME, "a name")?;
        if string("an expression's name", name)? == COUNTER {
            return counter(expression).map(Some);
        }
    }
    Ok(None)
}

/// A set that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadSet {
    /// Its name.
    pub name: Name,
    /// It is in a rule, and has no declaration.
    pub inline: bool,
    /// How many elements it has, of kernels that say so.
    pub count: Option<u32>,
    /// The declaration, if it is one that could be ours.
    pub set: Result<Set, DecodeError>,
}

/// A set.
pub fn set(payload: &[u8], family: IpFamily) -> Result<ReadSet, DecodeError> {
    let fields = Fields::<21>::new(body(payload)?)?;
    let name = Name::from(string("a set's name", fields.need(SET_NAME, "a name")?)?);
    let flags = fields.number_or_zero(SET_FLAGS, "flags")?;
    let inline = flags & FLAG_ANONYMOUS != 0;
    let set = declaration(&fields, name.clone(), flags, family);
    let count = fields.get(SET_COUNT).map(|value| be_u32("count", value)).transpose()?;
    Ok(ReadSet { name, inline, count, set })
}

fn declaration(
    fields: &Fields<'_, 21>,
    name: Name,
    flags: u32,
    family: IpFamily,
) -> Result<Set, DecodeError> {
    let known = FLAG_ANONYMOUS | FLAG_CONSTANT | FLAG_INTERVAL | FLAG_MAP | FLAG_TIMEOUT | FLAG_DYNAMIC;
    let user = fields.get(SET_USERDATA).unwrap_or_default();
    let interval = flags & FLAG_INTERVAL != 0;
    if flags & !known != 0 || interval != userdata::merges(user) {
        return Err(DecodeError::Foreign(format!("a set with flags {flags:#x}")));
    }
    let key = columns_from_number(fields.number(SET_KEY_TYPE, "a key's type")?, family)?;
    let data = if flags & FLAG_MAP == 0 {
        None
    } else {
        Some(match fields.number(SET_DATA_TYPE, "a type of data")? {
            VERDICTS => DataType::Verdict,
            number => {
                let types = columns_from_number(number, family)?;
                DataType::Columns(userdata::decode_columns(user, true, types, family)?)
            }
        })
    };
    if fields.get(SET_EXPRESSIONS).is_some() {
        return Err(DecodeError::foreign("a set with several statements"));
    }
    let counter = fields.get(SET_EXPRESSION).map(counter).transpose()?.is_some();
    let size = Fields::<2>::new(fields.get(SET_DESCRIPTION).unwrap_or_default())?;
    Ok(Set {
        name,
        key: userdata::decode_columns(user, false, key, family)?,
        data,
        flags: Flags {
            interval,
            timeout: flags & FLAG_TIMEOUT != 0,
            dynamic: flags & FLAG_DYNAMIC != 0,
            counter,
        },
        size: match size.number_or_zero(super::DESCRIPTION_SIZE, "size")? {
            0 => None,
            size => Some(size),
        },
    })
}

/// An element that was read. The end of a range is one of its own, in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadElement {
    /// What it is.
    pub element: Element,
    /// It is the first address behind a range.
    pub is_end: bool,
}

/// The elements in a message.
pub fn elements(payload: &[u8]) -> Result<Vec<ReadElement>, DecodeError> {
    let fields = Fields::<5>::new(body(payload)?)?;
    let items = attributes(fields.get(ELEMENTS).unwrap_or_default());
    items.map(|item| element(item?.1)).collect()
}

fn element(bytes: &[u8]) -> Result<ReadElement, DecodeError> {
    let fields = Fields::<11>::new(bytes)?;
    if fields.get(ELEMENT_KEY_END).is_some() {
        return Err(DecodeError::foreign("an element with two keys"));
    }
    let flags = fields.number_or_zero(ELEMENT_FLAGS, "flags")?;
    if flags & !ELEMENT_IS_END != 0 {
        return Err(DecodeError::foreign("an element for every key"));
    }
    let mut element = Element::new(parse::constant(fields.need(ELEMENT_KEY, "a key")?)?);
    if let Some(data) = fields.get(ELEMENT_DATA) {
        element = match Fields::<3>::new(data)?.get(DATA_VERDICT) {
            Some(verdict) => element.with_verdict(decode_verdict(verdict)?),
            None => element.with_data(parse::constant(data)?),
        };
    }
    let duration = |kind, what| -> Result<Option<Duration>, WireError> {
        fields.get(kind).map(|value| be_u64(what, value).map(Duration::from_millis)).transpose()
    };
    let extra = Extra {
        last: None,
        timeout: duration(ELEMENT_TIMEOUT, "timeout")?,
        expires: duration(ELEMENT_EXPIRATION, "expiration")?,
        comment: fields.get(ELEMENT_USERDATA).and_then(userdata::decode_comment),
        counted: fields.get(ELEMENT_EXPRESSION).map(counter).transpose()?,
    };
    if extra != Extra::default() {
        element.extra = Some(Box::new(extra));
    }
    Ok(ReadElement { element, is_end: flags == ELEMENT_IS_END })
}

/// What a counter of a set or an element has counted.
fn counter(expression: &[u8]) -> Result<Counted, DecodeError> {
    let fields = Fields::<3>::new(expression)?;
    if string("a statement's name", fields.need(EXPRESSION_NAME, "a name")?)? != COUNTER {
        return Err(DecodeError::foreign("a set with a statement that does not count"));
    }
    let data = Fields::<3>::new(fields.get(EXPRESSION_DATA).unwrap_or_default())?;
    let number = |kind, what| data.get(kind).map_or(Ok(0), |value| be_u64(what, value));
    Ok(Counted { packets: number(COUNTER_PACKETS, "packets")?, bytes: number(COUNTER_BYTES, "bytes")? })
}

/// Makes ranges of the elements of an interval set. An end without a beginning means nothing; `nft` writes one at zero.
#[must_use]
pub fn ranges(read: Vec<ReadElement>) -> Vec<Element> {
    let mut read = read;
    // Where a range ends and the next one begins at once, the end comes first.
    read.sort_by_key(|read| (read.element.key, !read.is_end));
    let mut ranges: Vec<Element> = Vec::new();
    let mut open: Option<Element> = None;
    let close = |element: Element, last: Tuple| {
        let mut element = element;
        element.extra_mut().last = Some(last);
        element
    };
    for ReadElement { element, is_end } in read {
        if let Some(before) = open.take()
            && let Some(last) = element.key.predecessor()
        {
            ranges.push(close(before, last));
        }
        if !is_end {
            open = Some(element);
        }
    }
    if let Some(last) = open {
        let highest = last.key.highest();
        ranges.push(close(last, highest));
    }
    ranges
}

/// The verdicts of a map in a rule.
pub(in crate::nftables) fn cases(read: Vec<ReadElement>) -> Option<BTreeMap<Tuple, Verdict>> {
    read.into_iter()
        .map(|read| match read.element.value {
            ElementValue::Verdict(verdict) => Some((read.element.key, *verdict)),
            _ => None,
        })
        .collect()
}
