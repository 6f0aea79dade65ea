//! Transactions, written.
//!
//! A batch is one message that begins it, one message per operation, and one that ends it. Elements are put into as few
//! messages as an attribute of 64 KiB allows.

use std::ops::Range;

use pointsman_crds::proxy_node_status::IpFamily;

use super::expression::{EXPRESSION_DATA, EXPRESSION_NAME, INLINE_NAME, Inline, encode, milliseconds};
use super::{
    ACCEPT, BATCH_BEGIN, BATCH_END, CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TYPE, COUNTER, DATA_VALUE,
    DELETE_CHAIN, DELETE_ELEMENT, DELETE_RULE, DELETE_SET, DELETE_TABLE, DESCRIPTION_SIZE, ELEMENT_DATA,
    ELEMENT_FLAGS, ELEMENT_IS_END, ELEMENT_KEY, ELEMENT_TIMEOUT, ELEMENT_USERDATA, ELEMENTS, ELEMENTS_SET,
    ELEMENTS_SET_ID, FLAG_ANONYMOUS, FLAG_CONSTANT, FLAG_DYNAMIC, FLAG_INTERVAL, FLAG_MAP, FLAG_TIMEOUT,
    HOOK_NUMBER, HOOK_PRIORITY, LIST_ITEM, NEW_CHAIN, NEW_ELEMENT, NEW_RULE, NEW_SET, NEW_TABLE, RESOURCE,
    RULE_CHAIN, RULE_EXPRESSIONS, RULE_USERDATA, SET_DATA_LENGTH, SET_DATA_TYPE, SET_DESCRIPTION,
    SET_EXPRESSION, SET_FLAGS, SET_ID, SET_KEY_LENGTH, SET_KEY_TYPE, SET_NAME, SET_USERDATA, TABLE,
    TABLE_DORMANT, TABLE_FLAGS, VERDICT_LENGTH, VERDICTS, columns_length, columns_number, encode_verdict,
    types_of, userdata,
};
use crate::netlink::{
    ACK, APPEND, ATTRIBUTE_HEADER, CREATE, Encoder, Header, MESSAGE_HEADER, NETFILTER_HEADER, REQUEST, align,
    attributes,
};
use crate::nftables::ruleset::{
    Base, Chain, ChainType, Columns, DataType, Element, ElementValue, Hook, Key, Operation, Origin, Rule,
    Set, Statement, Table, Transaction, Tuple, Type, Verdict, VerdictMap,
};

/// Elements of one message: what `nft` sends, and far below what an attribute can hold, except with long comments.
const ELEMENTS_AT_MOST: usize = 500;
/// Bytes of the elements of one message, so that its attribute ends below 64 KiB whatever the last element is.
const BYTES_AT_MOST: usize = 60_000;

/// A transaction as bytes.
#[derive(Clone, Debug)]
pub struct Batch {
    /// To be sent at once.
    pub bytes: Vec<u8>,
    /// The number of the first message, the one that begins the batch. The others follow.
    pub first: u32,
    /// What each of the messages in between does.
    messages: Vec<Written>,
}

/// What a message does.
#[derive(Clone, Debug)]
struct Written {
    /// Where it begins.
    start: usize,
    /// The operation.
    operation: usize,
    /// Its elements, of messages with elements.
    elements: Option<Range<usize>>,
}

/// Elements that were written into one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Number of the operation in the transaction.
    pub operation: usize,
    /// Numbers of the elements in the operation.
    pub elements: Range<usize>,
}

/// The operation, and perhaps element, that an answer is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the operation in the transaction.
    pub operation: usize,
    /// Number of the element in the operation.
    pub element: Option<usize>,
}

impl Batch {
    /// Writes a transaction; its messages are numbered from `first` on. The elements of the segments `apart` get a message
    /// each, so that each gets an answer.
    #[must_use]
    pub fn new(table: &Table, transaction: &Transaction, first: u32, apart: &[Segment]) -> Self {
        let mut writer =
            Writer { encoder: Encoder::default(), table, first, apart, messages: Vec::new(), next_set: 1 };
        writer.mark(BATCH_BEGIN, first);
        for (index, (operation, _)) in transaction.operations.iter().enumerate() {
            writer.operation(index, operation);
        }
        let end = writer.sequence();
        writer.mark(BATCH_END, end);
        let mut bytes = writer.encoder.finish();
        // The kernel answers a success only if it is asked to: once, by the last operation.
        if let Some(last) = writer.messages.last() {
            let flags = REQUEST | ACK | flags_of(&bytes, last.start);
            if let Some(field) = bytes.get_mut(last.start + 6..last.start + 8) {
                field.copy_from_slice(&flags.to_ne_bytes());
            }
        }
        Self { bytes, first, messages: writer.messages }
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The number of the last operation's message, which is answered in any case.
    #[must_use]
    pub fn last(&self) -> u32 {
        self.first.wrapping_add(u32::try_from(self.messages.len()).unwrap_or(u32::MAX))
    }

    /// What the message with this number does; `offset` is where in it the kernel found the fault.
    #[must_use]
    pub fn place(&self, transaction: &Transaction, sequence: u32, offset: Option<u32>) -> Option<Place> {
        let written = self.written(sequence)?;
        let element = written.elements.clone().and_then(|range| {
            if range.len() == 1 {
                return Some(range.start);
            }
            let (Operation::AddElements { elements, .. } | Operation::DeleteElements { elements, .. }, _) =
                transaction.operations.get(written.operation)?
            else {
                return None;
            };
            let items = self.items_before(written.start, usize::try_from(offset?).ok()?)?;
            let mut counted = 0;
            let index = elements.get(range.clone())?.iter().position(|(element, _)| {
                counted += items_of(element);
                counted > items
            })?;
            Some(range.start + index)
        });
        Some(Place { operation: written.operation, element })
    }

    /// The elements in the message with this number, if there are several.
    #[must_use]
    pub fn segment(&self, sequence: u32) -> Option<Segment> {
        let written = self.written(sequence)?;
        let elements = written.elements.clone().filter(|elements| elements.len() > 1)?;
        Some(Segment { operation: written.operation, elements })
    }

    fn written(&self, sequence: u32) -> Option<&Written> {
        self.messages.get(usize::try_from(sequence.wrapping_sub(self.first)).ok()?.checked_sub(1)?)
    }

    /// How many items of the element list lie before this offset in the message that starts here.
    fn items_before(&self, start: usize, offset: usize) -> Option<usize> {
        let body = start + MESSAGE_HEADER + NETFILTER_HEADER;
        let mut at = MESSAGE_HEADER + NETFILTER_HEADER;
        for attribute in attributes(self.bytes.get(body..)?) {
            let (kind, value) = attribute.ok()?;
            if kind != ELEMENTS {
                at += align(ATTRIBUTE_HEADER + value.len());
                continue;
            }
            at += ATTRIBUTE_HEADER;
            for (items, item) in attributes(value).enumerate() {
                let length = align(ATTRIBUTE_HEADER + item.ok()?.1.len());
                if offset < at + length {
                    return (offset >= at).then_some(items);
                }
                at += length;
            }
            return None;
        }
        None
    }
}

fn flags_of(bytes: &[u8], start: usize) -> u16 {
    bytes.get(start + 6..start + 8).and_then(|flags| flags.try_into().ok()).map_or(0, u16::from_ne_bytes)
}

struct Writer<'a> {
    encoder: Encoder,
    table: &'a Table,
    first: u32,
    apart: &'a [Segment],
    messages: Vec<Written>,
    next_set: u32,
}

impl Writer<'_> {
    /// The number of the next message.
    fn sequence(&self) -> u32 {
        self.first.wrapping_add(u32::try_from(self.messages.len() + 1).unwrap_or(u32::MAX))
    }

    fn mark(&mut self, kind: u16, sequence: u32) {
        let header = Header { kind, flags: REQUEST, sequence, family: 0, resource: RESOURCE };
        self.encoder.message(header, |_| {});
    }

    fn message(&mut self, kind: u16, flags: u16, operation: usize, fill: impl FnOnce(&mut Encoder)) {
        let header = Header::new(kind, REQUEST | flags, self.sequence(), self.table.family);
        self.messages.push(Written { start: self.encoder.len(), operation, elements: None });
        let name = &self.table.name;
        self.encoder.message(header, |to| {
            to.string(TABLE, name);
            fill(to);
        });
    }

    fn operation(&mut self, index: usize, operation: &Operation) {
        match operation {
            Operation::AddTable => self.message(NEW_TABLE, CREATE, index, |to| to.number(TABLE_FLAGS, 0)),
            Operation::AddDormantTable => {
                self.message(NEW_TABLE, CREATE, index, |to| to.number(TABLE_FLAGS, TABLE_DORMANT));
            }
            Operation::DeleteTable => self.message(DELETE_TABLE, 0, index, |_| {}),
            Operation::AddChain(chain) => {
                self.message(NEW_CHAIN, CREATE, index, |to| encode_chain(to, chain));
            }
            Operation::DeleteChain(name) => {
                self.message(DELETE_CHAIN, 0, index, |to| to.string(CHAIN_NAME, name));
            }
            Operation::FlushChain(name) => {
                self.message(DELETE_RULE, 0, index, |to| to.string(RULE_CHAIN, name));
            }
            Operation::AddRule { chain, rule } => self.rule(index, chain, rule),
            Operation::AddSet(set) => self.set(index, set),
            Operation::DeleteSet(name) => {
                self.message(DELETE_SET, 0, index, |to| to.string(SET_NAME, name));
            }
            Operation::FlushSet(name) => {
                self.message(DELETE_ELEMENT, 0, index, |to| to.string(ELEMENTS_SET, name));
            }
            Operation::AddElements { set, elements } => {
                self.elements(NEW_ELEMENT, CREATE, index, set, elements);
            }
            Operation::DeleteElements { set, elements } => {
                self.elements(DELETE_ELEMENT, 0, index, set, elements);
            }
        }
    }

    fn new_set_id(&mut self) -> u32 {
        let id = self.next_set;
        self.next_set += 1;
        id
    }

    fn set(&mut self, index: usize, set: &Set) {
        let family = self.table.family;
        let id = self.new_set_id();
        let key = types(&set.key);
        self.message(NEW_SET, CREATE, index, |to| {
            to.string(SET_NAME, &set.name);
            to.number(SET_FLAGS, flags(set));
            encode_key_type(to, &key, family);
            match &set.data {
                Some(DataType::Columns(columns)) => {
                    let data = types(columns);
                    to.number(SET_DATA_TYPE, columns_number(&data, family));
                    to.number(SET_DATA_LENGTH, length(&data, family));
                }
                Some(DataType::Verdict) => encode_verdict_type(to),
                None => {}
            }
            to.number(SET_ID, id);
            if let Some(size) = set.size {
                to.nested(SET_DESCRIPTION, |to| to.number(DESCRIPTION_SIZE, size));
            }
            to.attribute(SET_USERDATA, &userdata::encode_set(set, family));
            if set.flags.counter {
                to.nested(SET_EXPRESSION, |to| {
                    to.string(EXPRESSION_NAME, COUNTER);
                    to.nested(EXPRESSION_DATA, |_| {});
                });
            }
        });
    }

    fn rule(&mut self, index: usize, chain: &str, rule: &Rule) {
        let mut ids = Vec::new();
        for statement in &rule.statements {
            if let Statement::VerdictMap { key, map: VerdictMap::Inline(cases) } = statement {
                ids.push(self.inline(index, key, cases));
            }
        }
        let family = self.table.family;
        self.message(NEW_RULE, CREATE | APPEND, index, |to| {
            to.string(RULE_CHAIN, chain);
            to.nested(RULE_EXPRESSIONS, |to| {
                let mut inline = Inline { ids: &mut ids.into_iter() };
                for statement in &rule.statements {
                    encode(to, statement, family, &mut inline);
                }
            });
            if let Some(comment) = &rule.comment {
                to.attribute(RULE_USERDATA, &userdata::encode_comment(comment));
            }
        });
    }

    /// A map without a name of its own, which lives as long as the rule that uses it.
    fn inline<'c>(
        &mut self,
        index: usize,
        key: &Key,
        cases: impl IntoIterator<Item = (&'c Tuple, &'c Verdict)>,
    ) -> u32 {
        let family = self.table.family;
        let id = self.new_set_id();
        let key = types_of(&key.0);
        let cases: Vec<_> = cases.into_iter().collect();
        self.message(NEW_SET, CREATE, index, |to| {
            to.string(SET_NAME, INLINE_NAME);
            to.number(SET_FLAGS, FLAG_ANONYMOUS | FLAG_CONSTANT | FLAG_MAP);
            encode_key_type(to, &key, family);
            encode_verdict_type(to);
            to.number(SET_ID, id);
            let size = u32::try_from(cases.len()).unwrap_or(u32::MAX);
            to.nested(SET_DESCRIPTION, |to| to.number(DESCRIPTION_SIZE, size));
            to.attribute(SET_USERDATA, &userdata::encode_inline(&key));
        });
        self.message(NEW_ELEMENT, CREATE, index, |to| {
            to.string(ELEMENTS_SET, INLINE_NAME);
            to.number(ELEMENTS_SET_ID, id);
            to.nested(ELEMENTS, |to| {
                for (key, verdict) in cases {
                    to.nested(LIST_ITEM, |to| {
                        encode_data(to, ELEMENT_KEY, key);
                        to.nested(ELEMENT_DATA, |to| encode_verdict(to, verdict));
                    });
                }
            });
        });
        id
    }

    fn elements(&mut self, kind: u16, flags: u16, index: usize, set: &str, elements: &[(Element, Origin)]) {
        let mut next = 0;
        while next < elements.len() {
            let first = next;
            let apart = |segment: &Segment| segment.operation == index && segment.elements.contains(&first);
            let at_most = if self.apart.iter().any(apart) { 1 } else { ELEMENTS_AT_MOST };
            self.message(kind, flags, index, |to| {
                to.string(ELEMENTS_SET, set);
                to.nested(ELEMENTS, |to| {
                    let start = to.len();
                    for (element, _) in elements.iter().skip(first).take(at_most) {
                        if to.len() - start > BYTES_AT_MOST {
                            break;
                        }
                        encode_element(to, element, kind == DELETE_ELEMENT);
                        next += 1;
                    }
                });
            });
            if let Some(written) = self.messages.last_mut() {
                written.elements = Some(first..next);
            }
        }
    }
}

fn encode_chain(to: &mut Encoder, chain: &Chain) {
    to.string(CHAIN_NAME, &chain.name);
    let Some(Base { kind, hook, priority }) = chain.base else { return };
    to.nested(CHAIN_HOOK, |to| {
        to.number(HOOK_NUMBER, hook_number(hook));
        to.attribute(HOOK_PRIORITY, &priority.to_be_bytes());
    });
    to.number(CHAIN_POLICY, ACCEPT);
    to.string(CHAIN_TYPE, kind.as_str());
}

pub(super) const fn hook_number(hook: Hook) -> u32 {
    match hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

impl ChainType {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
        }
    }
}

fn types(columns: &Columns) -> Vec<Type> {
    match columns {
        Columns::Typeof(values) => types_of(values),
        Columns::Types(types) => types.clone(),
    }
}

fn flags(set: &Set) -> u32 {
    let mut flags = 0;
    for (is, flag) in [
        (set.flags.interval, FLAG_INTERVAL),
        (set.data.is_some(), FLAG_MAP),
        (set.flags.timeout, FLAG_TIMEOUT),
        (set.flags.dynamic, FLAG_DYNAMIC),
    ] {
        if is {
            flags |= flag;
        }
    }
    flags
}

fn length(types: &[Type], family: IpFamily) -> u32 {
    u32::try_from(columns_length(types, family)).unwrap_or(u32::MAX)
}

fn encode_key_type(to: &mut Encoder, types: &[Type], family: IpFamily) {
    to.number(SET_KEY_TYPE, columns_number(types, family));
    to.number(SET_KEY_LENGTH, length(types, family));
}

fn encode_verdict_type(to: &mut Encoder) {
    to.number(SET_DATA_TYPE, VERDICTS);
    to.number(SET_DATA_LENGTH, VERDICT_LENGTH);
}

fn encode_data(to: &mut Encoder, kind: u16, value: &Tuple) {
    to.nested(kind, |to| to.attribute(DATA_VALUE, value.bytes()));
}

/// Items of the list that an element takes: a range has a second one behind its last address, unless that is the last of
/// all.
fn items_of(element: &Element) -> usize {
    if end_of(element).is_some() { 2 } else { 1 }
}

/// The first address behind a range.
fn end_of(element: &Element) -> Option<Tuple> {
    element.extra.as_ref()?.last?.successor()
}

fn encode_element(to: &mut Encoder, element: &Element, delete: bool) {
    to.nested(LIST_ITEM, |to| {
        encode_data(to, ELEMENT_KEY, &element.key);
        if delete {
            return;
        }
        match &element.value {
            ElementValue::None => {}
            ElementValue::Data(data) => encode_data(to, ELEMENT_DATA, data),
            ElementValue::Verdict(verdict) => to.nested(ELEMENT_DATA, |to| encode_verdict(to, verdict)),
        }
        if let Some(extra) = &element.extra {
            if let Some(timeout) = extra.timeout {
                to.attribute(ELEMENT_TIMEOUT, &milliseconds(timeout).to_be_bytes());
            }
            if let Some(comment) = &extra.comment {
                to.attribute(ELEMENT_USERDATA, &userdata::encode_comment(comment));
            }
        }
    });
    if let Some(end) = end_of(element) {
        to.nested(LIST_ITEM, |to| {
            encode_data(to, ELEMENT_KEY, &end);
            to.number(ELEMENT_FLAGS, ELEMENT_IS_END);
        });
    }
}
