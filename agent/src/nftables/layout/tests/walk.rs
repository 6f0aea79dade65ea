//! A packet on its way through a table: the rules alone decide where it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use crate::nftables::layout::port::number;
use crate::nftables::ruleset::{
    Base, ChainType, DynamicOperation, ElementValue, Hook, Key, Operator, Ruleset, Statement, Tuple, Value,
    Verdict as End, VerdictMap,
};
use crate::plan::{Hop, Packet, Verdict};

/// What a packet has left in the map of clients.
pub type Clients = BTreeMap<Tuple, Tuple>;

/// Where a packet may end, with what it leaves behind there. Every choice that a rule makes by chance is tried.
pub fn ends(table: &Ruleset, packet: &Packet, clients: &Clients) -> Vec<(Verdict, Clients)> {
    let mut all = Vec::new();
    let mut choices = Vec::new();
    loop {
        let mut walk = Walk {
            table,
            packet: packet.clone(),
            at: None,
            mark: 0,
            priority: 0,
            translated: None,
            masqueraded: false,
            clients: clients.clone(),
            choices: choices.clone(),
            taken: 0,
        };
        let verdict = walk.go();
        let end = (verdict, walk.clients);
        if !all.contains(&end) {
            all.push(end);
        }
        // The next choices, as an odometer counts.
        choices = walk.choices;
        while choices.last().is_some_and(|(choice, below)| choice + 1 == *below) {
            choices.pop();
        }
        let Some((choice, _)) = choices.last_mut() else { return all };
        *choice += 1;
    }
}

/// Where a packet may end.
pub fn route(table: &Ruleset, packet: &Packet, clients: &Clients) -> Verdict {
    let mut hops = BTreeSet::new();
    let mut other = None;
    for (verdict, _) in ends(table, packet, clients) {
        match verdict {
            Verdict::Forward(to) => hops.extend(to),
            verdict => assert!(other.replace(verdict).is_none(), "{packet:?} has two ends"),
        }
    }
    assert_eq!(other.is_some(), hops.is_empty(), "a packet is either served or not: {packet:?}");
    other.unwrap_or(Verdict::Forward(hops.into_iter().collect()))
}

struct Walk<'a> {
    table: &'a Ruleset,
    packet: Packet,
    at: Option<Hook>,
    mark: u32,
    priority: u32,
    translated: Option<(IpAddr, u16)>,
    masqueraded: bool,
    clients: Clients,
    /// Made so far or to be made: each with the number of possibilities.
    choices: Vec<(u32, u32)>,
    taken: usize,
}

/// What a rule or chain leads to.
enum Flow {
    /// The next rule.
    On,
    /// Back to where the chain was entered from.
    Back,
    /// The end of this hook's chain.
    Accept,
    Drop,
    Reject,
}

impl Walk<'_> {
    fn go(&mut self) -> Verdict {
        let outside = self.packet.interface.is_some();
        let v4 = self.table.table.family == IpFamily::IPv4;
        if let Some(end) = self.hook(if outside { Hook::Prerouting } else { Hook::Output }) {
            return end;
        }
        let to_node = self.packet.destination_is_local;
        if outside && !to_node && v4 {
            self.priority = 0;
        }
        let mut hooks = Vec::new();
        match (outside, to_node) {
            (true, true) => hooks.push(Hook::Input),
            (true, false) => hooks.extend([Hook::Forward, Hook::Postrouting]),
            (false, true) => hooks.extend([Hook::Postrouting, Hook::Input]),
            (false, false) => hooks.push(Hook::Postrouting),
        }
        for hook in hooks {
            if hook == Hook::Postrouting && self.translated.is_some() {
                assert_eq!(self.priority, 0, "the word is gone before others see the packet");
            }
            if let Some(end) = self.hook(hook) {
                return end;
            }
        }
        assert!(self.mark == 0, "no mark of ours stays");
        if let Some((address, port)) = self.translated {
            return Verdict::Forward(vec![Hop { address, port, masquerade: self.masqueraded }]);
        }
        assert!(!self.masqueraded);
        Verdict::Untouched
    }

    fn hook(&mut self, hook: Hook) -> Option<Verdict> {
        self.at = Some(hook);
        let table = self.table;
        let base = |base: &Option<Base>| base.filter(|base| base.hook == hook);
        let mut chains: Vec<_> =
            table.chains.values().filter_map(|rules| Some((base(&rules.chain.base)?, rules))).collect();
        chains.sort_by_key(|(base, _)| base.priority);
        for (base, rules) in chains {
            match self.chain(&rules.chain.name, base.kind) {
                Flow::Drop => return Some(Verdict::Drop),
                Flow::Reject => return Some(Verdict::Reject),
                Flow::On | Flow::Back | Flow::Accept => {}
            }
        }
        None
    }

    fn chain(&mut self, name: &str, kind: ChainType) -> Flow {
        let table = self.table;
        for rule in &table.chains[name].rules {
            for statement in &rule.statements {
                let Some(verdict) = self.statement(statement, kind) else { break };
                match verdict {
                    Step::Next => {}
                    Step::Reject => return Flow::Reject,
                    Step::Verdict(End::Accept) => return Flow::Accept,
                    Step::Verdict(End::Drop) => return Flow::Drop,
                    Step::Verdict(End::Return) => return Flow::Back,
                    Step::Verdict(End::Goto(chain)) => {
                        return match self.chain(&chain, kind) {
                            Flow::On => Flow::Back,
                            other => other,
                        };
                    }
                    Step::Verdict(End::Jump(chain)) => {
                        match self.chain(&chain, kind) {
                            Flow::On | Flow::Back => {}
                            other => return other,
                        }
                        break;
                    }
                }
            }
        }
        Flow::On
    }

    /// `None`: the rule does not match.
    fn statement(&mut self, statement: &Statement, kind: ChainType) -> Option<Step> {
        match statement {
            Statement::Compare { value, operator, to } => {
                let value = self.value(value)?;
                let equal = value.bytes().get(..to.bytes().len()) == Some(to.bytes());
                (equal == (*operator == Operator::Equal)).then_some(Step::Next)
            }
            Statement::Lookup { key, set, inverted } => {
                let key = self.key(key)?;
                (self.contains(set, &key) != *inverted).then_some(Step::Next)
            }
            Statement::VerdictMap { key, map } => {
                let key = self.key(key)?;
                let verdict = match map {
                    VerdictMap::Inline(cases) => cases.get(&key).cloned(),
                    VerdictMap::Named(name) => self.element(name, &key).map(|value| match value {
                        ElementValue::Verdict(verdict) => *verdict,
                        other => panic!("{other:?}"),
                    }),
                };
                Some(verdict.map_or(Step::Next, Step::Verdict))
            }
            Statement::SetMark(value) => {
                self.mark = word(&self.value(value)?);
                Some(Step::Next)
            }
            Statement::SetPriority(value) => {
                self.priority = word(&self.value(value)?);
                Some(Step::Next)
            }
            Statement::Dynamic { operation, set, key, data, timeout } => {
                assert_eq!(set, "affinity");
                let key = self.key(key)?;
                let data = data.as_ref().map(|data| self.value(data)).unwrap()?;
                assert_eq!(timeout.is_some(), *operation != DynamicOperation::Delete);
                match operation {
                    DynamicOperation::Delete => {
                        self.clients.remove(&key);
                    }
                    DynamicOperation::Add | DynamicOperation::Update => {
                        let full = self.clients.len() >= self.table.sets[set].size.unwrap() as usize;
                        if full && !self.clients.contains_key(&key) {
                            return None;
                        }
                        self.clients.entry(key).or_insert(data);
                    }
                }
                Some(Step::Next)
            }
            Statement::Dnat { key, map } => {
                assert_eq!(kind, ChainType::Nat);
                let key = self.key(key)?;
                let ElementValue::Data(to) = self.element(map, &key)? else { panic!("no address") };
                let (address, port) = self.endpoint(&to);
                self.translated = Some((address, port));
                self.packet.destination = address;
                self.packet.destination_is_local = false;
                self.packet.port = port;
                Some(Step::Verdict(End::Accept))
            }
            Statement::Masquerade { fully_random } => {
                assert!(*fully_random && kind == ChainType::Nat);
                self.masqueraded = true;
                Some(Step::Verdict(End::Accept))
            }
            Statement::Reject => {
                assert_eq!(kind, ChainType::Filter);
                Some(Step::Reject)
            }
            Statement::Counter => Some(Step::Next),
            Statement::Verdict(verdict) => Some(Step::Verdict(verdict.clone())),
        }
    }

    fn key(&mut self, key: &Key) -> Option<Tuple> {
        let mut all = Vec::new();
        for value in &key.0 {
            let value = self.value(value)?;
            all.resize(all.len().next_multiple_of(4), 0);
            all.extend_from_slice(value.bytes());
        }
        if key.0.len() > 1 {
            all.resize(all.len().next_multiple_of(4), 0);
        }
        Tuple::from_bytes(&all)
    }

    fn value(&mut self, value: &Value) -> Option<Tuple> {
        let one = Tuple::new();
        let local = |yes: bool| one.word(if yes { Value::LOCAL } else { 1 });
        Some(match value {
            Value::SourceAddress => one.address(self.packet.source),
            Value::DestinationAddress => one.address(self.packet.destination),
            Value::DestinationPort => one.port(self.packet.port),
            Value::Protocol => one.protocol(number(self.packet.protocol)),
            Value::Mark => one.word(self.mark),
            Value::Priority => one.word(self.priority),
            Value::InputInterface => {
                let own = if self.at == Some(Hook::Input) { "lo" } else { "" };
                Tuple::interface(self.packet.interface.as_deref().unwrap_or(own))
            }
            Value::CtState => one.word(Value::CT_NEW),
            Value::CtStatus => one.word(if self.translated.is_some() { Value::CT_DNAT } else { 0 }),
            Value::SourceType => local(self.packet.source_is_local),
            Value::DestinationType => local(self.packet.destination_is_local),
            Value::Random { below } => one.word(self.choose(*below)),
            Value::Bitwise { value, mask, xor } => {
                let value = self.value(value)?;
                assert_eq!(
                    (value.bytes().len(), mask.bytes().len()),
                    (mask.bytes().len(), xor.bytes().len())
                );
                let bytes = value.bytes().iter().zip(mask.bytes()).zip(xor.bytes());
                let bytes: Vec<u8> = bytes.map(|((value, mask), xor)| value & mask ^ xor).collect();
                Tuple::from_bytes(&bytes)?
            }
            Value::Mapped { key, map } => {
                let key = self.key(key)?;
                match self.element(map, &key)? {
                    ElementValue::Data(data) => data,
                    other => panic!("{other:?}"),
                }
            }
            Value::Constant(tuple) => *tuple,
        })
    }

    fn choose(&mut self, below: u32) -> u32 {
        if self.taken == self.choices.len() {
            self.choices.push((0, below));
        }
        let (choice, of) = self.choices[self.taken];
        assert_eq!(of, below);
        self.taken += 1;
        choice
    }

    fn element(&self, set: &str, key: &Tuple) -> Option<ElementValue> {
        if set == "affinity" {
            return self.clients.get(key).map(|data| ElementValue::Data(*data));
        }
        assert!(self.table.sets.contains_key(set), "{set}");
        self.table.elements.get(set)?.get(key).map(|element| element.value.clone())
    }

    fn contains(&self, set: &str, key: &Tuple) -> bool {
        if !self.table.sets[set].flags.interval {
            return self.element(set, key).is_some();
        }
        let ranges = self.table.elements.get(set).into_iter().flatten();
        ranges.into_iter().any(|element| {
            let last = element.extra.as_ref().and_then(|extra| extra.last).unwrap();
            (element.key.bytes()..=last.bytes()).contains(&key.bytes())
        })
    }

    fn endpoint(&self, to: &Tuple) -> (IpAddr, u16) {
        let bytes = to.bytes();
        let (address, port): (IpAddr, _) = match self.table.table.family {
            IpFamily::IPv4 => (<[u8; 4]>::try_from(&bytes[..4]).unwrap().into(), &bytes[4..6]),
            IpFamily::IPv6 => (<[u8; 16]>::try_from(&bytes[..16]).unwrap().into(), &bytes[16..18]),
        };
        (address, u16::from_be_bytes(port.try_into().unwrap()))
    }
}

/// What a statement leads to.
enum Step {
    Next,
    Reject,
    Verdict(End),
}

fn word(tuple: &Tuple) -> u32 {
    u32::from_ne_bytes(tuple.bytes().try_into().unwrap())
}
