//! Rules as the kernel's expressions, written.
//!
//! Expressions work on 16 registers of 32 bits. A key takes as many as its columns need, from the first on; every
//! statement starts anew.

use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;

use super::{DATA_VALUE, LIST_ITEM, address_length, encode_verdict};
use crate::netlink::Encoder;
use crate::nftables::ruleset::{
    DynamicOperation, Key, Operator, Statement, Tuple, Value, Verdict, VerdictMap,
};

pub(super) const EXPRESSION_NAME: u16 = 1;
pub(super) const EXPRESSION_DATA: u16 = 2;

/// The register that holds the verdict.
pub(super) const VERDICT_REGISTER: u32 = 0;
/// The first register of 32 bits.
pub(super) const FIRST_REGISTER: u32 = 8;

pub(super) mod immediate {
    pub const TO: u16 = 1;
    pub const DATA: u16 = 2;
}
pub(super) mod payload {
    pub const TO: u16 = 1;
    pub const BASE: u16 = 2;
    pub const OFFSET: u16 = 3;
    pub const LENGTH: u16 = 4;
    pub const NETWORK: u32 = 1;
    pub const TRANSPORT: u32 = 2;
    pub const DESTINATION_PORT: u32 = 2;
}
pub(super) mod meta {
    pub const TO: u16 = 1;
    pub const KEY: u16 = 2;
    pub const FROM: u16 = 3;
    pub const PRIORITY: u32 = 2;
    pub const MARK: u32 = 3;
    pub const INPUT_INTERFACE: u32 = 6;
    pub const PROTOCOL: u32 = 16;
}
pub(super) mod ct {
    pub const TO: u16 = 1;
    pub const KEY: u16 = 2;
    pub const STATE: u32 = 0;
    pub const STATUS: u32 = 2;
}
pub(super) mod fib {
    pub const TO: u16 = 1;
    pub const RESULT: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub const ADDRESS_TYPE: u32 = 3;
    pub const SOURCE: u32 = 1;
    pub const DESTINATION: u32 = 2;
}
pub(super) mod numgen {
    pub const TO: u16 = 1;
    pub const MODULUS: u16 = 2;
    pub const TYPE: u16 = 3;
    pub const OFFSET: u16 = 4;
    pub const RANDOM: u32 = 1;
}
pub(super) mod bitwise {
    pub const FROM: u16 = 1;
    pub const TO: u16 = 2;
    pub const LENGTH: u16 = 3;
    pub const MASK: u16 = 4;
    pub const XOR: u16 = 5;
    pub const OPERATION: u16 = 6;
}
pub(super) mod cmp {
    pub const FROM: u16 = 1;
    pub const OPERATION: u16 = 2;
    pub const DATA: u16 = 3;
    pub const EQUAL: u32 = 0;
    pub const NOT_EQUAL: u32 = 1;
}
pub(super) mod lookup {
    pub const SET: u16 = 1;
    pub const FROM: u16 = 2;
    pub const TO: u16 = 3;
    pub const SET_ID: u16 = 4;
    pub const FLAGS: u16 = 5;
    pub const INVERTED: u32 = 1;
}
pub(super) mod dynset {
    pub const SET: u16 = 1;
    pub const OPERATION: u16 = 3;
    pub const KEY: u16 = 4;
    pub const DATA: u16 = 5;
    pub const TIMEOUT: u16 = 6;
    pub const ADD: u32 = 0;
    pub const UPDATE: u32 = 1;
    pub const DELETE: u32 = 2;
}
pub(super) mod nat {
    pub const TYPE: u16 = 1;
    pub const FAMILY: u16 = 2;
    pub const ADDRESS: u16 = 3;
    pub const PORT: u16 = 5;
    pub const FLAGS: u16 = 7;
    pub const DNAT: u32 = 1;
    /// Address and port are given.
    pub const GIVEN: u32 = 3;
}
pub(super) mod masq {
    pub const FLAGS: u16 = 1;
    pub const FULLY_RANDOM: u32 = 0x10;
}
pub(super) mod reject {
    pub const TYPE: u16 = 1;
    pub const CODE: u16 = 2;
    pub const UNREACHABLE: u32 = 0;
    /// Port unreachable.
    pub const V4: u8 = 3;
    pub const V6: u8 = 4;
}

/// Names and number of the maps that are in rules.
pub(super) struct Inline<'a> {
    /// Numbers of the maps, in the order of the rules.
    pub ids: &'a mut dyn Iterator<Item = u32>,
}

/// The name that the kernel makes a unique one of.
pub(super) const INLINE_NAME: &str = "__map%d";

/// Writes a statement as list items.
pub(super) fn encode(to: &mut Encoder, statement: &Statement, family: IpFamily, inline: &mut Inline<'_>) {
    let mut writer = Writer { to, family };
    match statement {
        Statement::Compare { value, operator, to: constant } => {
            writer.load(value, 0);
            let operation = match operator {
                Operator::Equal => cmp::EQUAL,
                Operator::NotEqual => cmp::NOT_EQUAL,
            };
            writer.expression("cmp", |to| {
                to.number(cmp::FROM, FIRST_REGISTER);
                to.number(cmp::OPERATION, operation);
                data(to, cmp::DATA, constant);
            });
        }
        Statement::Lookup { key, set, inverted } => {
            writer.load_key(key, 0);
            writer.expression("lookup", |to| {
                to.string(lookup::SET, set);
                to.number(lookup::FROM, FIRST_REGISTER);
                if *inverted {
                    to.number(lookup::FLAGS, lookup::INVERTED);
                }
            });
        }
        Statement::VerdictMap { key, map } => {
            writer.load_key(key, 0);
            writer.expression("lookup", |to| {
                match map {
                    VerdictMap::Named(name) => to.string(lookup::SET, name),
                    VerdictMap::Inline(_) => {
                        to.string(lookup::SET, INLINE_NAME);
                        to.number(lookup::SET_ID, inline.ids.next().unwrap_or_default());
                    }
                }
                to.number(lookup::FROM, FIRST_REGISTER);
                to.number(lookup::TO, VERDICT_REGISTER);
            });
        }
        Statement::SetMark(value) => writer.set_meta(meta::MARK, value),
        Statement::SetPriority(value) => writer.set_meta(meta::PRIORITY, value),
        Statement::Dynamic { operation, set, key, timeout, data } => {
            let after = writer.load_key(key, 0);
            // nft puts the data at the next register of 128 bits.
            let data_register = after.next_multiple_of(4);
            if let Some(value) = data {
                writer.load(value, data_register);
            }
            let operation = match operation {
                DynamicOperation::Add => dynset::ADD,
                DynamicOperation::Update => dynset::UPDATE,
                DynamicOperation::Delete => dynset::DELETE,
            };
            writer.expression("dynset", |to| {
                to.string(dynset::SET, set);
                to.number(dynset::OPERATION, operation);
                to.number(dynset::KEY, FIRST_REGISTER);
                if data.is_some() {
                    to.number(dynset::DATA, FIRST_REGISTER + data_register);
                }
                if let Some(timeout) = timeout {
                    to.attribute(dynset::TIMEOUT, &milliseconds(*timeout).to_be_bytes());
                }
            });
        }
        Statement::Dnat { key, map } => writer.dnat(key, map),
        Statement::Masquerade { fully_random } => writer.expression("masq", |to| {
            if *fully_random {
                to.number(masq::FLAGS, masq::FULLY_RANDOM);
            }
        }),
        Statement::Reject => writer.expression("reject", |to| {
            to.number(reject::TYPE, reject::UNREACHABLE);
            to.attribute(reject::CODE, &[if family == IpFamily::IPv4 { reject::V4 } else { reject::V6 }]);
        }),
        Statement::Counter => writer.expression("counter", |_| {}),
        Statement::Verdict(verdict) => writer.verdict(verdict),
    }
}

pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn data(to: &mut Encoder, kind: u16, value: &Tuple) {
    to.nested(kind, |to| to.attribute(DATA_VALUE, value.bytes()));
}

struct Writer<'a> {
    to: &'a mut Encoder,
    family: IpFamily,
}

impl Writer<'_> {
    fn expression(&mut self, name: &str, fill: impl FnOnce(&mut Encoder)) {
        self.to.nested(LIST_ITEM, |to| {
            to.string(EXPRESSION_NAME, name);
            to.nested(EXPRESSION_DATA, fill);
        });
    }

    /// Loads the columns from this register on; returns the one behind.
    fn load_key(&mut self, key: &Key, first: u32) -> u32 {
        key.0.iter().fold(first, |register, value| {
            self.load(value, register);
            register + words(value, self.family)
        })
    }

    fn load(&mut self, value: &Value, register: u32) {
        let number = FIRST_REGISTER + register;
        let v4 = self.family == IpFamily::IPv4;
        match value {
            Value::SourceAddress => self.load_address(if v4 { 12 } else { 8 }, number),
            Value::DestinationAddress => self.load_address(if v4 { 16 } else { 24 }, number),
            Value::DestinationPort => {
                self.load_payload(payload::TRANSPORT, payload::DESTINATION_PORT, 2, number);
            }
            Value::Protocol => self.load_meta(meta::PROTOCOL, number),
            Value::Mark => self.load_meta(meta::MARK, number),
            Value::Priority => self.load_meta(meta::PRIORITY, number),
            Value::InputInterface => self.load_meta(meta::INPUT_INTERFACE, number),
            Value::CtState => self.load_ct(ct::STATE, number),
            Value::CtStatus => self.load_ct(ct::STATUS, number),
            Value::SourceType => self.load_fib(fib::SOURCE, number),
            Value::DestinationType => self.load_fib(fib::DESTINATION, number),
            Value::Random { below } => self.expression("numgen", |to| {
                to.number(numgen::TO, number);
                to.number(numgen::MODULUS, *below);
                to.number(numgen::TYPE, numgen::RANDOM);
                to.number(numgen::OFFSET, 0);
            }),
            Value::Bitwise { value, mask, xor } => {
                self.load(value, register);
                self.expression("bitwise", |to| {
                    to.number(bitwise::FROM, number);
                    to.number(bitwise::TO, number);
                    to.number(bitwise::LENGTH, u32::try_from(mask.bytes().len()).unwrap_or_default());
                    data(to, bitwise::MASK, mask);
                    data(to, bitwise::XOR, xor);
                });
            }
            Value::Mapped { key, map } => {
                self.load_key(key, register);
                self.expression("lookup", |to| {
                    to.string(lookup::SET, map);
                    to.number(lookup::FROM, number);
                    to.number(lookup::TO, number);
                });
            }
            Value::Constant(constant) => self.expression("immediate", |to| {
                to.number(immediate::TO, number);
                data(to, immediate::DATA, constant);
            }),
        }
    }

    fn load_address(&mut self, offset: u32, register: u32) {
        let length = if self.family == IpFamily::IPv4 { 4 } else { 16 };
        self.load_payload(payload::NETWORK, offset, length, register);
    }

    fn load_payload(&mut self, base: u32, offset: u32, length: u32, register: u32) {
        self.expression("payload", |to| {
            to.number(payload::TO, register);
            to.number(payload::BASE, base);
            to.number(payload::OFFSET, offset);
            to.number(payload::LENGTH, length);
        });
    }

    fn load_meta(&mut self, key: u32, register: u32) {
        self.expression("meta", |to| {
            to.number(meta::KEY, key);
            to.number(meta::TO, register);
        });
    }

    fn set_meta(&mut self, key: u32, value: &Value) {
        self.load(value, 0);
        self.expression("meta", |to| {
            to.number(meta::KEY, key);
            to.number(meta::FROM, FIRST_REGISTER);
        });
    }

    fn load_ct(&mut self, key: u32, register: u32) {
        self.expression("ct", |to| {
            to.number(ct::KEY, key);
            to.number(ct::TO, register);
        });
    }

    fn load_fib(&mut self, flags: u32, register: u32) {
        self.expression("fib", |to| {
            to.number(fib::TO, register);
            to.number(fib::RESULT, fib::ADDRESS_TYPE);
            to.number(fib::FLAGS, flags);
        });
    }

    fn dnat(&mut self, key: &Key, map: &str) {
        self.load_key(key, 0);
        self.expression("lookup", |to| {
            to.string(lookup::SET, map);
            to.number(lookup::FROM, FIRST_REGISTER);
            to.number(lookup::TO, FIRST_REGISTER);
        });
        let (family, port) = match self.family {
            IpFamily::IPv4 => (crate::netlink::IPV4, FIRST_REGISTER + 1),
            IpFamily::IPv6 => (crate::netlink::IPV6, FIRST_REGISTER + 4),
        };
        self.expression("nat", |to| {
            to.number(nat::TYPE, nat::DNAT);
            to.number(nat::FAMILY, family.into());
            to.number(nat::ADDRESS, FIRST_REGISTER);
            to.number(nat::PORT, port);
        });
    }

    fn verdict(&mut self, verdict: &Verdict) {
        self.expression("immediate", |to| {
            to.number(immediate::TO, VERDICT_REGISTER);
            to.nested(immediate::DATA, |to| encode_verdict(to, verdict));
        });
    }
}

/// Registers of 32 bits that a value takes. What a map holds is taken for one; only `dnat` uses more, and knows it.
pub(super) fn words(value: &Value, family: IpFamily) -> u32 {
    let bytes = match value {
        Value::SourceAddress | Value::DestinationAddress => address_length(family),
        Value::InputInterface => 16,
        Value::Bitwise { value, .. } => return words(value, family),
        Value::Constant(constant) => constant.bytes().len(),
        _ => 4,
    };
    u32::try_from(bytes.div_ceil(4)).unwrap_or_default()
}
