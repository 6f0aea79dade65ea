//! Rules as the kernel's expressions, read.
//!
//! The registers are followed: each holds the value that an expression left there, and a statement takes what it uses. So
//! a rule of ours comes back as it was written; anything else is [`DecodeError::Foreign`].

use std::array;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;

use super::expression::{
    EXPRESSION_DATA, EXPRESSION_NAME, FIRST_REGISTER, VERDICT_REGISTER, bitwise, cmp, ct, dynset, fib,
    immediate, lookup, masq, meta, nat, numgen, payload, reject, words,
};
use super::{DATA_VALUE, DATA_VERDICT, DecodeError, Fields, address_length, decode_verdict, string};
use crate::netlink::{WireError, attributes, be_u64};
use crate::nftables::ruleset::{DynamicOperation, Key, Name, Operator, Statement, Tuple, Value, VerdictMap};

const REGISTERS: usize = 16;

/// Reads the expressions of a rule.
pub(super) fn statements(bytes: &[u8], family: IpFamily) -> Result<Vec<Statement>, DecodeError> {
    let mut reader = Reader { family, registers: array::from_fn(|_| None), statements: Vec::new() };
    for attribute in attributes(bytes) {
        let fields = Fields::<3>::new(attribute?.1)?;
        let name = string("an expression's name", fields.need(EXPRESSION_NAME, "a name")?)?;
        reader.expression(&name, &Fields::new(fields.get(EXPRESSION_DATA).unwrap_or_default())?)?;
    }
    if reader.registers.iter().any(Option::is_some) {
        return Err(DecodeError::foreign("a rule that loads what it does not use"));
    }
    Ok(reader.statements)
}

/// A constant in a data attribute.
pub(super) fn constant(bytes: &[u8]) -> Result<Tuple, DecodeError> {
    let value = Fields::<3>::new(bytes)?.need(DATA_VALUE, "a value")?;
    Tuple::from_bytes(value).ok_or_else(|| DecodeError::foreign(format!("a value of {} bytes", value.len())))
}

struct Reader {
    family: IpFamily,
    registers: [Option<Value>; REGISTERS],
    statements: Vec<Statement>,
}

impl Reader {
    fn expression(&mut self, name: &str, fields: &Fields<'_, 10>) -> Result<(), DecodeError> {
        match name {
            "immediate" => return self.immediate(fields),
            "lookup" => return self.lookup(fields),
            _ => {}
        }
        let statement = match name {
            "payload" => return self.payload(fields),
            "meta" if fields.get(meta::FROM).is_none() => {
                let value = match fields.number(meta::KEY, "meta key")? {
                    meta::PRIORITY => Value::Priority,
                    meta::MARK => Value::Mark,
                    meta::INPUT_INTERFACE => Value::InputInterface,
                    meta::PROTOCOL => Value::Protocol,
                    other => return Err(DecodeError::foreign(format!("meta key {other}"))),
                };
                return self.store(fields.number(meta::TO, "register")?, value);
            }
            "ct" => {
                let value = match fields.number(ct::KEY, "ct key")? {
                    ct::STATE => Value::CtState,
                    ct::STATUS => Value::CtStatus,
                    other => return Err(DecodeError::foreign(format!("ct key {other}"))),
                };
                return self.store(fields.number(ct::TO, "register")?, value);
            }
            "fib" => {
                let result = fields.number(fib::RESULT, "fib result")?;
                let value = match (result, fields.number(fib::FLAGS, "fib flags")?) {
                    (fib::ADDRESS_TYPE, fib::SOURCE) => Value::SourceType,
                    (fib::ADDRESS_TYPE, fib::DESTINATION) => Value::DestinationType,
                    other => return Err(DecodeError::foreign(format!("fib {other:?}"))),
                };
                return self.store(fields.number(fib::TO, "register")?, value);
            }
            "numgen" => {
                let offset = fields.number_or_zero(numgen::OFFSET, "offset")?;
                if fields.number(numgen::TYPE, "numgen type")? != numgen::RANDOM || offset != 0 {
                    return Err(DecodeError::foreign("numgen that is not random from 0"));
                }
                let below = fields.number(numgen::MODULUS, "modulus")?;
                return self.store(fields.number(numgen::TO, "register")?, Value::Random { below });
            }
            "bitwise" => return self.bitwise(fields),
            "cmp" => Statement::Compare {
                operator: match fields.number(cmp::OPERATION, "comparison")? {
                    cmp::EQUAL => Operator::Equal,
                    cmp::NOT_EQUAL => Operator::NotEqual,
                    other => return Err(DecodeError::foreign(format!("comparison {other}"))),
                },
                to: constant(fields.need(cmp::DATA, "data")?)?,
                value: self.take(fields.number(cmp::FROM, "register")?)?,
            },
            "meta" => {
                let value = self.take(fields.number(meta::FROM, "register")?)?;
                match fields.number(meta::KEY, "meta key")? {
                    meta::PRIORITY => Statement::SetPriority(value),
                    meta::MARK => Statement::SetMark(value),
                    other => return Err(DecodeError::foreign(format!("writing meta key {other}"))),
                }
            }
            "dynset" => self.dynset(fields)?,
            "nat" => self.nat(fields)?,
            "masq" => Statement::Masquerade {
                fully_random: match fields.number_or_zero(masq::FLAGS, "flags")? {
                    0 => false,
                    masq::FULLY_RANDOM => true,
                    other => return Err(DecodeError::foreign(format!("masquerade with flags {other:#x}"))),
                },
            },
            "reject" => {
                let kind = fields.number(reject::TYPE, "reject type")?;
                let code = if self.family == IpFamily::IPv4 { reject::V4 } else { reject::V6 };
                if kind != reject::UNREACHABLE || fields.get(reject::CODE) != Some(&[code]) {
                    return Err(DecodeError::foreign("reject with something else than port unreachable"));
                }
                Statement::Reject
            }
            "counter" => Statement::Counter,
            other => return Err(DecodeError::foreign(format!("the expression {other}"))),
        };
        self.statements.push(statement);
        Ok(())
    }

    fn immediate(&mut self, fields: &Fields<'_, 10>) -> Result<(), DecodeError> {
        let data = fields.need(immediate::DATA, "data")?;
        let register = fields.number(immediate::TO, "register")?;
        if register != VERDICT_REGISTER {
            return self.store(register, Value::Constant(constant(data)?));
        }
        let verdict = decode_verdict(Fields::<3>::new(data)?.need(DATA_VERDICT, "a verdict")?)?;
        self.statements.push(Statement::Verdict(verdict));
        Ok(())
    }

    fn payload(&mut self, fields: &Fields<'_, 10>) -> Result<(), DecodeError> {
        let base = fields.number(payload::BASE, "base")?;
        let offset = fields.number(payload::OFFSET, "offset")?;
        let length = fields.number(payload::LENGTH, "length")?;
        let value = match (self.family, base, offset, length) {
            (IpFamily::IPv4, payload::NETWORK, 12, 4) | (IpFamily::IPv6, payload::NETWORK, 8, 16) => {
                Value::SourceAddress
            }
            (IpFamily::IPv4, payload::NETWORK, 16, 4) | (IpFamily::IPv6, payload::NETWORK, 24, 16) => {
                Value::DestinationAddress
            }
            (_, payload::TRANSPORT, payload::DESTINATION_PORT, 2) => Value::DestinationPort,
            _ => {
                let what = format!("payload of {length} bytes at {base}+{offset}");
                return Err(DecodeError::Foreign(what));
            }
        };
        self.store(fields.number(payload::TO, "register")?, value)
    }

    fn bitwise(&mut self, fields: &Fields<'_, 10>) -> Result<(), DecodeError> {
        let from = fields.number(bitwise::FROM, "register")?;
        if fields.number(bitwise::TO, "register")? != from
            || fields.number_or_zero(bitwise::OPERATION, "operation")? != 0
        {
            return Err(DecodeError::foreign("a shift, or bitwise to another register"));
        }
        let mask = constant(fields.need(bitwise::MASK, "mask")?)?;
        let xor = constant(fields.need(bitwise::XOR, "xor")?)?;
        let value = Box::new(self.take(from)?);
        self.store(from, Value::Bitwise { value, mask, xor })
    }

    fn lookup(&mut self, fields: &Fields<'_, 10>) -> Result<(), DecodeError> {
        let set = Name::from(string("a set's name", fields.need(lookup::SET, "a set")?)?);
        let from = fields.number(lookup::FROM, "register")?;
        let inverted = match fields.number_or_zero(lookup::FLAGS, "flags")? {
            0 => false,
            lookup::INVERTED => true,
            other => return Err(DecodeError::foreign(format!("lookup with flags {other:#x}"))),
        };
        let key = self.take_key(from, None)?;
        match fields.get(lookup::TO) {
            None => self.statements.push(Statement::Lookup { key, set, inverted }),
            Some(_) if inverted => return Err(DecodeError::foreign("an inverted map")),
            Some(_) => match fields.number(lookup::TO, "register")? {
                VERDICT_REGISTER => {
                    self.statements.push(Statement::VerdictMap { key, map: VerdictMap::Named(set) });
                }
                register => self.store(register, Value::Mapped { key, map: set })?,
            },
        }
        Ok(())
    }

    fn dynset(&mut self, fields: &Fields<'_, 10>) -> Result<Statement, DecodeError> {
        let data_register = fields.get(dynset::DATA).map(|_| fields.number(dynset::DATA, "register"));
        let data_register = data_register.transpose()?;
        let data = data_register.map(|register| self.take(register)).transpose()?;
        let timeout = fields.get(dynset::TIMEOUT).map(|value| be_u64("timeout", value)).transpose()?;
        Ok(Statement::Dynamic {
            operation: match fields.number(dynset::OPERATION, "operation")? {
                dynset::ADD => DynamicOperation::Add,
                dynset::UPDATE => DynamicOperation::Update,
                dynset::DELETE => DynamicOperation::Delete,
                other => return Err(DecodeError::foreign(format!("dynset operation {other}"))),
            },
            set: string("a set's name", fields.need(dynset::SET, "a set")?)?.into(),
            key: self.take_key(fields.number(dynset::KEY, "register")?, data_register)?,
            // The kernel says 0 for none.
            timeout: timeout.filter(|timeout| *timeout != 0).map(Duration::from_millis),
            data,
        })
    }

    fn nat(&mut self, fields: &Fields<'_, 10>) -> Result<Statement, DecodeError> {
        let address = index(fields.number(nat::ADDRESS, "register")?)?;
        let port = index(fields.number(nat::PORT, "register")?)?;
        let flags = fields.number_or_zero(nat::FLAGS, "flags")?;
        let family = match self.family {
            IpFamily::IPv4 => crate::netlink::IPV4,
            IpFamily::IPv6 => crate::netlink::IPV6,
        };
        if fields.number(nat::TYPE, "nat type")? != nat::DNAT
            || fields.number(nat::FAMILY, "family")? != u32::from(family)
            || port != address + address_length(self.family) / 4
            || flags & !nat::GIVEN != 0
        {
            return Err(DecodeError::foreign("nat that is not dnat to an address with its port"));
        }
        match self.registers.get_mut(address).and_then(Option::take) {
            Some(Value::Mapped { key, map }) => Ok(Statement::Dnat { key, map }),
            _ => Err(DecodeError::foreign("dnat to something else than what a map holds")),
        }
    }

    fn store(&mut self, register: u32, value: Value) -> Result<(), DecodeError> {
        let index = index(register)?;
        let room = self.registers.get_mut(index).ok_or_else(|| out_of_range(register))?;
        *room = Some(value);
        Ok(())
    }

    fn take(&mut self, register: u32) -> Result<Value, DecodeError> {
        let value = self.registers.get_mut(index(register)?).and_then(Option::take);
        value.ok_or_else(|| DecodeError::foreign(format!("register {register} is used without being loaded")))
    }

    /// The values that lie one behind the other from this register on.
    fn take_key(&mut self, register: u32, before: Option<u32>) -> Result<Key, DecodeError> {
        let mut values = Vec::new();
        let mut next = index(register)?;
        let end = before.map_or(Ok(REGISTERS), index)?;
        while next < end
            && let Some(value) = self.registers.get_mut(next).and_then(Option::take)
        {
            let words = words(&value, self.family);
            next = next.saturating_add(usize::try_from(words.max(1)).unwrap_or(REGISTERS));
            values.push(value);
        }
        if values.is_empty() {
            return Err(WireError::Missing("a key").into());
        }
        Ok(Key(values))
    }
}

/// The kernel numbers the registers of 128 bits 1 to 4, and those of 32 bits, which they consist of, 8 to 23.
fn index(register: u32) -> Result<usize, DecodeError> {
    let index = match register {
        1..=4 => (register - 1) * 4,
        FIRST_REGISTER..=23 => register - FIRST_REGISTER,
        _ => return Err(out_of_range(register)),
    };
    usize::try_from(index).map_err(|_| out_of_range(register))
}

fn out_of_range(register: u32) -> DecodeError {
    DecodeError::Foreign(format!("register {register}"))
}
