//! Which numbers the kernel knows our Services by.
//!
//! In: our table as it was read back. Out: [`Recovered`], so that a restart goes on with the same numbers, writes only what
//! differs, and clients stay where they are.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;

use super::class::Class;
use super::fixed::{
    CLASSES, ENDPOINTS, FRONTENDS, GROUPS, NODE_PORTS, POSTROUTING, RESTRICTED, SLOTS, SOURCES, STICKY,
};
use super::port::{Endpoint, Slots};
use super::word::{self, GROUP, LENGTH_SHIFT, LIST, LOCAL};
use crate::conntrack::{Frontend, NodePort, Protocol, Target};
use crate::nftables::ruleset::{Element, ElementValue, Ruleset, Statement, Tuple, Value, Verdict};

/// What a Service port had before.
#[derive(Clone, Debug, Default)]
pub(super) struct Prior {
    /// Its group.
    pub group: Option<u32>,
    /// Its slots.
    pub slots: Slots,
    /// The endpoint at each index, for policies Cluster and Local.
    pub orders: [Vec<Endpoint>; 2],
}

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    groups: HashMap<(&'static str, Tuple), u32>,
    orders: HashMap<u32, Vec<Endpoint>>,
    slots: HashMap<u32, Slots>,
    /// Lists of source ranges, sorted.
    pub lists: BTreeMap<u32, Vec<IpNet>>,
    /// Classes with their numbers; those without are only chains.
    pub classes: Vec<(Class, Option<u32>)>,
    /// Mark bits that are masqueraded.
    pub accepted: u32,
}

impl Recovered {
    pub(super) fn from(read: &Ruleset) -> Self {
        let mut found = Self { accepted: masqueraded(read), ..Self::default() };
        for set in [FRONTENDS, NODE_PORTS] {
            for (element, word) in words(read, set) {
                found.groups.insert((set, element.key), word & GROUP & !LOCAL);
            }
        }
        found.find_endpoints(read);
        found.find_lists(read);
        found.find_classes(read);
        found
    }

    /// The group that an element of `frontends` or `nodeports` leads to.
    pub(super) fn group(&self, set: &'static str, key: Tuple) -> Option<u32> {
        self.groups.get(&(set, key)).copied()
    }

    /// What the Service port of this group had.
    pub(super) fn prior(&mut self, group: Option<u32>) -> Prior {
        let Some(group) = group else { return Prior::default() };
        Prior {
            group: Some(group),
            slots: self.slots.remove(&group).unwrap_or_default(),
            orders: [group, group | LOCAL].map(|list| self.orders.remove(&list).unwrap_or_default()),
        }
    }

    fn find_endpoints(&mut self, read: &Ruleset) {
        let family = read.table.family;
        let mut sticky = HashMap::new();
        let mut orders: HashMap<u32, BTreeMap<u32, Endpoint>> = HashMap::new();
        for element in elements(read, STICKY) {
            let mut key = Columns::of(&element.key);
            if let (Some(_), Some(word), Some(endpoint)) =
                (key.protocol(), key.word(), endpoint(element, family))
            {
                sticky.insert(word, endpoint);
                self.slots.entry(word & GROUP & !LOCAL).or_default().found(endpoint, word::choice(word));
            }
        }
        for set in [ENDPOINTS, SLOTS] {
            for element in elements(read, set) {
                let mut key = Columns::of(&element.key);
                let (Some(_), Some(group), Some(index)) = (key.protocol(), key.word(), key.word()) else {
                    continue;
                };
                let endpoint = if set == ENDPOINTS {
                    endpoint(element, family)
                } else {
                    word_of(element).and_then(|slot| sticky.get(&(slot | group & LOCAL)).copied())
                };
                if let Some(endpoint) = endpoint {
                    orders.entry(group).or_default().insert(index, endpoint);
                }
            }
        }
        self.orders =
            orders.into_iter().map(|(group, order)| (group, order.into_values().collect())).collect();
    }

    fn find_lists(&mut self, read: &Ruleset) {
        for (_, list) in words(read, RESTRICTED) {
            self.lists.entry(list).or_default();
        }
        for element in elements(read, SOURCES) {
            let mut key = Columns::of(&element.key);
            let (Some(word), Some(address)) = (key.word(), key.address(read.table.family)) else { continue };
            let length = u8::try_from(word >> LENGTH_SHIFT).unwrap_or(u8::MAX);
            if let Ok(range) = IpNet::new(address, length) {
                self.lists.entry(word & LIST).or_default().push(range);
            }
        }
        self.lists.values_mut().for_each(|ranges| ranges.sort_unstable());
    }

    fn find_classes(&mut self, read: &Ruleset) {
        for element in elements(read, CLASSES) {
            if let (Some(word), ElementValue::Verdict(verdict)) =
                (Columns::of(&element.key).word(), &element.value)
                && let Verdict::Goto(chain) = &**verdict
                && let Some(class) = Class::named(chain)
            {
                self.classes.push((class, Some(word::choice(word))));
            }
        }
        let chains = read.chains.keys().filter_map(|name| Class::named(name));
        self.classes.extend(chains.map(|class| (class, None)));
    }
}

/// The UDP and SCTP frontends that a table leads to endpoints.
#[must_use]
pub fn served(read: &Ruleset) -> Vec<Target> {
    let groups = read.elements.get(GROUPS);
    let leads_somewhere = |word: u32| {
        let has = |group: u32| groups.is_some_and(|groups| groups.get(&Tuple::new().word(group)).is_some());
        let group = word & GROUP & !LOCAL;
        has(group) || has(group | LOCAL)
    };
    let protocol = |number| Protocol::from_number(number).filter(|protocol| *protocol != Protocol::Tcp);
    let frontends = words(read, FRONTENDS).filter(|(_, word)| leads_somewhere(*word));
    let frontends = frontends.filter_map(|(element, _)| {
        let mut key = Columns::of(&element.key);
        let address = key.address(read.table.family)?;
        let protocol = protocol(key.protocol()?)?;
        Some(Frontend::new(SocketAddr::new(address, key.port()?), protocol).into())
    });
    let node_ports = words(read, NODE_PORTS).filter(|(_, word)| leads_somewhere(*word));
    let node_ports = node_ports.filter_map(|(element, _)| {
        let mut key = Columns::of(&element.key);
        let protocol = protocol(key.protocol()?)?;
        Some(NodePort::new(key.port()?, protocol).into())
    });
    frontends.chain(node_ports).collect()
}

fn elements<'a>(read: &'a Ruleset, set: &str) -> impl Iterator<Item = &'a Element> {
    read.elements.get(set).into_iter().flatten()
}

fn words<'a>(read: &'a Ruleset, set: &str) -> impl Iterator<Item = (&'a Element, u32)> {
    elements(read, set).filter_map(|element| Some((element, word_of(element)?)))
}

fn word_of(element: &Element) -> Option<u32> {
    match &element.value {
        ElementValue::Data(data) => Columns::of(data).word(),
        _ => None,
    }
}

fn endpoint(element: &Element, family: IpFamily) -> Option<Endpoint> {
    let ElementValue::Data(data) = &element.value else { return None };
    let mut data = Columns::of(data);
    Some((data.address(family)?, data.port()?))
}

/// The bits that the rules of `nat-postrouting` look for.
fn masqueraded(read: &Ruleset) -> u32 {
    let rules = read.chains.get(POSTROUTING).into_iter().flat_map(|chain| &chain.rules);
    let bits = rules.flat_map(|rule| &rule.statements).filter_map(|statement| match statement {
        Statement::Compare { value: Value::Bitwise { value, mask, .. }, .. } if **value == Value::Mark => {
            Columns::of(mask).word()
        }
        _ => None,
    });
    bits.fold(0, |all, bit| all | bit)
}

/// Takes a tuple apart, column by column.
struct Columns<'a>(&'a [u8]);

impl<'a> Columns<'a> {
    fn of(tuple: &'a Tuple) -> Self {
        Self(tuple.bytes())
    }

    fn column<const LENGTH: usize>(&mut self) -> Option<[u8; LENGTH]> {
        let column = self.0.first_chunk::<LENGTH>().copied();
        self.0 = self.0.get(LENGTH.next_multiple_of(4)..).unwrap_or_default();
        column
    }

    fn word(&mut self) -> Option<u32> {
        self.column().map(u32::from_ne_bytes)
    }

    fn protocol(&mut self) -> Option<u8> {
        self.column().map(|[number]| number)
    }

    fn port(&mut self) -> Option<u16> {
        self.column().map(u16::from_be_bytes)
    }

    fn address(&mut self, family: IpFamily) -> Option<IpAddr> {
        match family {
            IpFamily::IPv4 => self.column::<4>().map(IpAddr::from),
            IpFamily::IPv6 => self.column::<16>().map(IpAddr::from),
        }
    }
}
