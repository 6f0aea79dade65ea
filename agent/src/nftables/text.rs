//! A ruleset as text that `nft -f` loads, for people, golden tests and diffs.
//!
//! In: a [`Ruleset`]. Out: text in the form of `nft list table`. Pure.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;

use super::ruleset::{
    Base, Chain, ChainType, Columns, DataType, DynamicOperation, Element, ElementValue, Hook, Key, Operator,
    Rule, Ruleset, Set, Statement, Tuple, Type, Value, Verdict, VerdictMap,
};

/// Elements of one line.
const PER_LINE: usize = 4;

/// The whole table.
#[must_use]
pub fn ruleset(ruleset: &Ruleset) -> String {
    let text = Text { family: ruleset.table.family };
    let mut out = format!("table {} {} {{\n", text.keyword(), ruleset.table.name);
    let mut blocks = Vec::new();
    for (name, set) in &ruleset.sets {
        blocks.push(text.set(set, ruleset.elements.get(name).into_iter().flatten()));
    }
    for rules in ruleset.chains.values() {
        let mut block = chain_head(&rules.chain);
        for rule in &rules.rules {
            let _ = writeln!(block, "\t\t{}", text.rule(rule));
        }
        block.push_str("\t}\n");
        blocks.push(block);
    }
    out.push_str(&blocks.join("\n"));
    out.push_str("}\n");
    out
}

/// One rule.
#[must_use]
pub fn rule(rule: &Rule, family: IpFamily) -> String {
    Text { family }.rule(rule)
}

/// One element of a set that is declared like this.
#[must_use]
pub fn element(element: &Element, set: &Set, family: IpFamily) -> String {
    Text { family }.element(element, set)
}

fn chain_head(chain: &Chain) -> String {
    let mut text = format!("\tchain {} {{\n", chain.name);
    if let Some(Base { kind, hook, priority }) = chain.base {
        let kind = match kind {
            ChainType::Filter => "filter",
            ChainType::Nat => "nat",
        };
        let hook = match hook {
            Hook::Prerouting => "prerouting",
            Hook::Input => "input",
            Hook::Forward => "forward",
            Hook::Output => "output",
            Hook::Postrouting => "postrouting",
        };
        let _ = writeln!(text, "\t\ttype {kind} hook {hook} priority {priority}; policy accept;");
    }
    text
}

struct Text {
    family: IpFamily,
}

impl Text {
    fn keyword(&self) -> &'static str {
        match self.family {
            IpFamily::IPv4 => "ip",
            IpFamily::IPv6 => "ip6",
        }
    }

    fn set<'a>(&self, set: &Set, elements: impl Iterator<Item = &'a Element>) -> String {
        let kind = if set.data.is_some() { "map" } else { "set" };
        let mut text = format!("\t{kind} {} {{\n\t\t{}", set.name, self.columns(&set.key));
        match &set.data {
            Some(DataType::Columns(columns)) => {
                let columns = self.columns(columns);
                let data = columns.split_once(' ').map_or(columns.as_str(), |(_, columns)| columns);
                let _ = write!(text, " : {data}");
            }
            Some(DataType::Verdict) => text.push_str(" : verdict"),
            None => {}
        }
        text.push('\n');
        if let Some(size) = set.size {
            let _ = writeln!(text, "\t\tsize {size}");
        }
        let flags = [
            (set.flags.interval, "interval"),
            (set.flags.dynamic, "dynamic"),
            (set.flags.timeout, "timeout"),
        ];
        let flags: Vec<_> = flags.into_iter().filter_map(|(is, name)| is.then_some(name)).collect();
        if !flags.is_empty() {
            let _ = writeln!(text, "\t\tflags {}", flags.join(","));
        }
        if set.flags.interval {
            text.push_str("\t\tauto-merge\n");
        }
        if set.flags.counter {
            text.push_str("\t\tcounter\n");
        }
        let elements: Vec<_> = elements.map(|element| self.element(element, set)).collect();
        if !elements.is_empty() {
            let lines: Vec<_> = elements.chunks(PER_LINE).map(|line| line.join(", ")).collect();
            let _ = writeln!(text, "\t\telements = {{ {} }}", lines.join(",\n\t\t\t     "));
        }
        text.push_str("\t}\n");
        text
    }

    fn columns(&self, columns: &Columns) -> String {
        match columns {
            Columns::Typeof(values) => {
                let values: Vec<_> = values.iter().map(|value| self.value(value)).collect();
                format!("typeof {}", values.join(" . "))
            }
            Columns::Types(types) => {
                let types: Vec<_> = types.iter().map(|column| self.type_name(*column)).collect();
                format!("type {}", types.join(" . "))
            }
        }
    }

    fn type_name(&self, kind: Type) -> &'static str {
        match (kind, self.family) {
            (Type::Address, IpFamily::IPv4) => "ipv4_addr",
            (Type::Address, IpFamily::IPv6) => "ipv6_addr",
            (Type::Protocol, _) => "inet_proto",
            (Type::Port, _) => "inet_service",
            (Type::Mark, _) => "mark",
            (Type::ClassId, _) => "classid",
            (Type::Interface, _) => "ifname",
            (Type::CtState, _) => "ct_state",
            (Type::CtStatus, _) => "ct_status",
            (Type::AddressType, _) => "fib_addrtype",
            (Type::Integer, _) => "integer",
        }
    }

    fn element(&self, element: &Element, set: &Set) -> String {
        let key = types(&set.key);
        let last = element.extra.as_ref().and_then(|extra| extra.last);
        let mut text = match last {
            Some(last) => self.range(element.key, last),
            None => self.tuple(element.key, &key),
        };
        if let Some(extra) = &element.extra {
            if let Some(timeout) = extra.timeout {
                let _ = write!(text, " timeout {}", duration(timeout));
            }
            if let Some(comment) = &extra.comment {
                let _ = write!(text, " comment {}", quoted(comment));
            }
        }
        match &element.value {
            ElementValue::None => {}
            ElementValue::Data(data) => {
                let types = match &set.data {
                    Some(DataType::Columns(columns)) => types(columns),
                    _ => Vec::new(),
                };
                let _ = write!(text, " : {}", self.tuple(*data, &types));
            }
            ElementValue::Verdict(to) => {
                let _ = write!(text, " : {}", verdict(to));
            }
        }
        text
    }

    /// A prefix if it is one.
    fn range(&self, first: Tuple, last: Tuple) -> String {
        let [from, to] = [first, last].map(|end| self.tuple(end, &[Type::Address]));
        let bits =
            |tuple: Tuple| tuple.bytes().iter().fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
        let (low, high) = (bits(first), bits(last));
        let span = low ^ high;
        if first == last {
            from
        } else if low <= high && low & span == 0 && span & span.wrapping_add(1) == 0 {
            let length = first.bytes().len() * 8;
            format!(
                "{from}/{}",
                length.saturating_sub(usize::try_from(span.count_ones()).unwrap_or_default())
            )
        } else {
            format!("{from}-{to}")
        }
    }

    fn rule(&self, rule: &Rule) -> String {
        let mut parts: Vec<_> = rule.statements.iter().map(|statement| self.statement(statement)).collect();
        if let Some(comment) = &rule.comment {
            parts.push(format!("comment {}", quoted(comment)));
        }
        parts.join(" ")
    }

    fn statement(&self, statement: &Statement) -> String {
        match statement {
            Statement::Compare { value, operator, to } => self.compare(value, *operator, *to),
            Statement::Lookup { key, set, inverted } => {
                format!("{} {}@{set}", self.key(key), if *inverted { "!= " } else { "" })
            }
            Statement::VerdictMap { key, map: VerdictMap::Named(map) } => {
                format!("{} vmap @{map}", self.key(key))
            }
            Statement::VerdictMap { key, map: VerdictMap::Inline(cases) } => {
                let types: Vec<_> = key.0.iter().filter_map(Value::kind).collect();
                let cases =
                    cases.iter().map(|(key, to)| format!("{} : {}", self.tuple(*key, &types), verdict(to)));
                format!("{} vmap {{ {} }}", self.key(key), cases.collect::<Vec<_>>().join(", "))
            }
            Statement::SetMark(value) => format!("meta mark set {}", self.value_as(value, Type::Mark)),
            Statement::SetPriority(value) => {
                format!("meta priority set {}", self.value_as(value, Type::ClassId))
            }
            Statement::Dynamic { operation, set, key, timeout, data } => {
                let operation = match operation {
                    DynamicOperation::Add => "add",
                    DynamicOperation::Update => "update",
                    DynamicOperation::Delete => "delete",
                };
                let timeout = timeout.map_or(String::new(), |time| format!(" timeout {}", duration(time)));
                let data = data.as_ref().map_or(String::new(), |data| format!(" : {}", self.value(data)));
                format!("{operation} @{set} {{ {}{timeout}{data} }}", self.key(key))
            }
            Statement::Dnat { key, map } => {
                format!("dnat {} to {} map @{map}", self.keyword(), self.key(key))
            }
            Statement::Masquerade { fully_random: true } => "masquerade fully-random".to_owned(),
            Statement::Masquerade { fully_random: false } => "masquerade".to_owned(),
            Statement::Reject => "reject".to_owned(),
            Statement::Counter => "counter".to_owned(),
            Statement::Verdict(to) => verdict(to),
        }
    }

    fn compare(&self, value: &Value, operator: Operator, to: Tuple) -> String {
        let kind = value.kind().unwrap_or(Type::Integer);
        if let (Value::Bitwise { value: flags, mask, xor }, Operator::NotEqual) = (value, operator)
            && matches!(kind, Type::CtState | Type::CtStatus)
            && to == to.zeroed()
            && *xor == xor.zeroed()
        {
            return format!("{} {}", self.value(flags), self.tuple(*mask, &[kind]));
        }
        let to = self.tuple(to, &[kind]);
        match operator {
            Operator::NotEqual => format!("{} != {to}", self.value(value)),
            Operator::Equal if matches!(value, Value::Bitwise { .. }) => {
                format!("{} == {to}", self.value(value))
            }
            Operator::Equal => format!("{} {to}", self.value(value)),
        }
    }

    fn key(&self, key: &Key) -> String {
        key.0.iter().map(|value| self.value(value)).collect::<Vec<_>>().join(" . ")
    }

    fn value(&self, value: &Value) -> String {
        self.value_as(value, Type::Integer)
    }

    /// `kind` is the type of a constant.
    fn value_as(&self, value: &Value, kind: Type) -> String {
        let header = self.keyword();
        match value {
            Value::SourceAddress => format!("{header} saddr"),
            Value::DestinationAddress => format!("{header} daddr"),
            Value::DestinationPort => "th dport".to_owned(),
            Value::Protocol => "meta l4proto".to_owned(),
            Value::Mark => "meta mark".to_owned(),
            Value::Priority => "meta priority".to_owned(),
            Value::InputInterface => "iifname".to_owned(),
            Value::CtState => "ct state".to_owned(),
            Value::CtStatus => "ct status".to_owned(),
            Value::SourceType => "fib saddr type".to_owned(),
            Value::DestinationType => "fib daddr type".to_owned(),
            Value::Random { below } => format!("numgen random mod {below}"),
            Value::Bitwise { value: of, mask, xor } => {
                let kind = of.kind().unwrap_or(Type::Integer);
                let mut text = self.value(of);
                // (value & mask) ^ xor, with the bits that are both cleared and changed written as `|`.
                let or = mask.combine(*xor, |mask, xor| !mask & xor);
                let and = mask.combine(or, |mask, or| mask | or);
                let xor = mask.combine(*xor, |mask, xor| mask & xor);
                if and != and.highest() {
                    let _ = write!(text, " & {}", self.tuple(and, &[kind]));
                }
                if xor != xor.zeroed() {
                    let _ = write!(text, " ^ {}", self.tuple(xor, &[kind]));
                }
                if or != or.zeroed() {
                    let _ = write!(text, " | {}", self.tuple(or, &[kind]));
                }
                text
            }
            Value::Mapped { key, map } => format!("{} map @{map}", self.key(key)),
            Value::Constant(constant) => self.tuple(*constant, &[kind]),
        }
    }

    fn tuple(&self, tuple: Tuple, types: &[Type]) -> String {
        let mut rest = tuple.bytes();
        let mut columns = Vec::new();
        for kind in types {
            let length = super::wire::columns_length(&[*kind], self.family);
            let (column, _) = rest.split_at_checked(length).unwrap_or((rest, &[]));
            columns.push(datum(column, *kind));
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        columns.join(" . ")
    }
}

fn types(columns: &Columns) -> Vec<Type> {
    match columns {
        Columns::Typeof(values) => values.iter().filter_map(Value::kind).collect(),
        Columns::Types(types) => types.clone(),
    }
}

fn datum(bytes: &[u8], kind: Type) -> String {
    let word = bytes.try_into().map(u32::from_ne_bytes);
    match (kind, word) {
        (Type::Address, _) => match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
            (Ok(octets), _) => IpAddr::V4(Ipv4Addr::from(octets)).to_string(),
            (_, Ok(octets)) => IpAddr::V6(Ipv6Addr::from(octets)).to_string(),
            _ => hexadecimal(bytes),
        },
        (Type::Protocol, _) => match bytes {
            [6] => "tcp".to_owned(),
            [17] => "udp".to_owned(),
            [132] => "sctp".to_owned(),
            [other] => other.to_string(),
            _ => hexadecimal(bytes),
        },
        (Type::Port, _) => match *bytes {
            [high, low] => u16::from_be_bytes([high, low]).to_string(),
            _ => hexadecimal(bytes),
        },
        (Type::Interface, _) => {
            let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
            let star = if name.len() == bytes.len() { "*" } else { "" };
            format!("\"{}{star}\"", String::from_utf8_lossy(name))
        }
        (Type::Mark, Ok(word)) => format!("{word:#010x}"),
        (Type::ClassId, Ok(0)) => "none".to_owned(),
        (Type::ClassId, Ok(u32::MAX)) => "root".to_owned(),
        (Type::ClassId, Ok(word)) => format!("{:x}:{:x}", word >> 16, word & 0xffff),
        (Type::CtState, Ok(Value::CT_INVALID)) => "invalid".to_owned(),
        (Type::CtState, Ok(Value::CT_NEW)) => "new".to_owned(),
        (Type::CtStatus, Ok(Value::CT_DNAT)) => "dnat".to_owned(),
        (Type::AddressType, Ok(Value::LOCAL)) => "local".to_owned(),
        (Type::CtState | Type::CtStatus | Type::AddressType | Type::Integer, Ok(word)) => word.to_string(),
        (_, Err(_)) => hexadecimal(bytes),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn verdict(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Return => "return".to_owned(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

fn duration(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}

/// nft has no way to write a quote inside of quotes.
fn quoted(comment: &str) -> String {
    format!("\"{}\"", comment.replace(['"', '\n'], "'"))
}

#[cfg(test)]
pub(in crate::nftables) mod tests;
