//! The rules that lead packets to the proxy, and decide what a proxy would decide too late.
//!
//! In: the plan, and where the proxy listens. Out: one nftables table per family. Pure.
//!
//! ```text
//! prerouting, output  -110  policies: may this source? is there a local endpoint?   no ─► DROP
//!                      -99  frontends: DNAT to where the proxy listens
//! input, forward, output 0  policies: no endpoints ─► REJECT;   another port of a ClusterIP; a listener, not by DNAT ─► REJECT
//! ```
//!
//! A proxy that has accepted a TCP connection can only close it, so what must be dropped or rejected is, before. Frontends are keys
//! `address . protocol . port`; a NodePort's address is all zeros, and looked up with the address masked away. Whichever mode translates
//! at another mode's lower priority wins: so this table takes over when theirs goes, and hands back when theirs comes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;

use crate::model::Protocol;
use crate::nftables::node::{
    self, LOCAL_SOURCES, NODE_PORT_IPS, at_node_ports, from_local_pod, frontend, mask,
};
use crate::nftables::ruleset::{
    Chain, ChainType, Columns, Element, Hook, Key, Operation, Origin, Rule, Ruleset, SCTP, Set, Statement,
    TCP, Table, Transaction, Tuple, Type, UDP, Value, drop, goto, jump, key, return_, set_priority,
};
use crate::plan::{Entrance, NodePlan, Plan, PortId, PortPlan, Target};

const FRONTENDS: &str = "frontends";
const POLICIES: &str = "policies";
const SOURCES: &str = "sources";
const LISTENERS: &str = "listeners";
const CLUSTER_IPS: &str = "cluster-ips";
const CHECK_SOURCE: &str = "check-source";

/// Before anything is translated.
const EARLY: i32 = -110;
/// After the translation of every other mode.
const NAT: i32 = -99;
const FILTER: i32 = 0;

/// A policy says: nobody answers.
const REFUSE: u32 = 1 << 31;
/// Somebody answers, but not on this node.
const DROP: u32 = 1 << 30;
/// The same, but for local pods and the node itself.
const NEAR_ONLY: u32 = 1 << 29;
/// Which list of sources is checked; 0: none.
const LIST: u32 = (1 << 20) - 1;
/// Where the length of a prefix is put.
const LENGTH_SHIFT: u32 = 20;

/// Where the proxy listens for a family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listeners {
    /// For all TCP frontends.
    pub tcp: Option<SocketAddr>,
    /// For UDP, by Service port and kind of frontend.
    pub udp: BTreeMap<(PortId, Entrance), SocketAddr>,
}

impl Listeners {
    fn of(&self, id: &PortId, entrance: Entrance) -> Option<SocketAddr> {
        match id.protocol {
            Protocol::Tcp => self.tcp,
            Protocol::Udp => self.udp.get(&(id.clone(), entrance)).copied(),
            Protocol::Sctp => None,
        }
    }
}

/// Our table.
#[must_use]
pub fn table(family: IpFamily) -> Table {
    Table::new(family, "pointsman-userspace")
}

/// What the table of a family holds.
#[derive(Clone, Debug)]
pub struct Steering {
    node: NodePlan,
    tcp: Option<SocketAddr>,
    ports: BTreeMap<PortId, Vec<(&'static str, Element)>>,
    /// How many source ranges have each prefix length.
    lengths: BTreeMap<u8, usize>,
    lists: BTreeMap<PortId, u32>,
    last_list: u32,
    /// How many Service ports have each ClusterIP.
    cluster_ips: BTreeMap<Tuple, usize>,
}

impl Steering {
    /// Without Service ports.
    #[must_use]
    pub fn new(node: &NodePlan, tcp: Option<SocketAddr>) -> Self {
        Self {
            node: node.clone(),
            tcp,
            ports: BTreeMap::new(),
            lengths: BTreeMap::new(),
            lists: BTreeMap::new(),
            last_list: 0,
            cluster_ips: BTreeMap::new(),
        }
    }

    /// Takes over these Service ports, or that they are gone. Returns what changes in the kernel.
    pub fn follow(&mut self, plan: &Plan, ids: &[PortId], listeners: &Listeners) -> Transaction {
        let lengths: BTreeSet<u8> = self.lengths.keys().copied().collect();
        let (mut deleted, mut added) = (Transaction::default(), Transaction::default());
        for id in ids {
            let new = plan.port(id).map(|plan| self.elements(id, plan, listeners)).unwrap_or_default();
            let old = if new.is_empty() {
                self.lists.remove(id);
                self.ports.remove(id)
            } else {
                self.ports.insert(id.clone(), new.clone())
            };
            let old = old.unwrap_or_default();
            for (set, element) in old.iter().filter(|element| !new.contains(element)) {
                if self.forget(set, element) {
                    deleted.delete_element(*set, element.clone(), Origin::NONE);
                }
            }
            for (set, element) in new.into_iter().filter(|element| !old.contains(element)) {
                if self.note(set, &element) {
                    added.add_element(set, element, Origin::NONE);
                }
            }
        }
        if !lengths.iter().eq(self.lengths.keys()) {
            added.push(Operation::FlushChain(CHECK_SOURCE.into()), Origin::NONE);
            for rule in self.check_source() {
                added.push(Operation::AddRule { chain: CHECK_SOURCE.into(), rule }, Origin::NONE);
            }
        }
        // A frontend may go from one Service to another: what is taken away goes first.
        deleted.operations.append(&mut added.operations);
        deleted
    }

    /// Counts an element that a Service port wants. Returns whether it is the first to want it.
    fn note(&mut self, set: &str, element: &Element) -> bool {
        match set {
            SOURCES => *self.lengths.entry(length(element)).or_default() += 1,
            CLUSTER_IPS => {
                let count = self.cluster_ips.entry(element.key).or_default();
                *count += 1;
                return *count == 1;
            }
            _ => {}
        }
        true
    }

    /// The reverse. Returns whether nobody wants it any more.
    fn forget(&mut self, set: &str, element: &Element) -> bool {
        match set {
            SOURCES => {
                let length = length(element);
                if let Some(count) = self.lengths.get_mut(&length) {
                    *count -= 1;
                }
                self.lengths.retain(|_, count| *count > 0);
            }
            CLUSTER_IPS => {
                if let Some(count) = self.cluster_ips.get_mut(&element.key) {
                    *count -= 1;
                }
                let gone = self.cluster_ips.get(&element.key).is_none_or(|count| *count == 0);
                if gone {
                    self.cluster_ips.remove(&element.key);
                }
                return gone;
            }
            _ => {}
        }
        true
    }

    /// How many elements there are.
    #[must_use]
    pub fn elements_held(&self) -> usize {
        self.ports.values().map(Vec::len).sum()
    }

    fn elements(
        &mut self,
        id: &PortId,
        plan: &PortPlan,
        listeners: &Listeners,
    ) -> Vec<(&'static str, Element)> {
        let mut elements = Vec::new();
        if let Some(cluster_ip) = plan.cluster_ip {
            elements.push((CLUSTER_IPS, Element::new(Tuple::new().address(cluster_ip))));
        }
        let frontends = addresses(plan).map(|(address, kind)| (address, plan.port, kind));
        let zeros = zeros(self.node.family);
        let node_port = plan.node_port.map(|number| (zeros, number, Kind::NodePort));
        let list = self.list(id, plan, &mut elements);
        for (address, port, kind) in frontends.chain(node_port) {
            let key = Tuple::new().address(address).protocol(number(id.protocol)).port(port);
            let mut policy = policy(plan, kind.entrance());
            match listeners.of(id, kind.entrance()) {
                Some(to) if policy & (REFUSE | DROP) == 0 => {
                    let to = Tuple::new().address(to.ip()).port(to.port());
                    elements.push((FRONTENDS, Element::new(key).with_data(to)));
                }
                None if policy & DROP == 0 => policy |= REFUSE,
                _ => {}
            }
            if kind == Kind::LoadBalancer {
                policy |= list;
            }
            if policy != 0 {
                elements.push((POLICIES, Element::new(key).with_data(Tuple::new().word(policy))));
            }
        }
        for entrance in [Entrance::Internal, Entrance::External] {
            if id.protocol == Protocol::Udp
                && let Some(at) = listeners.of(id, entrance)
            {
                elements.push((LISTENERS, listener(at, UDP)));
            }
        }
        elements
    }

    /// The list of sources that may use the load balancer's addresses; 0 if all may.
    fn list(&mut self, id: &PortId, plan: &PortPlan, elements: &mut Vec<(&'static str, Element)>) -> u32 {
        let Some(sources) = plan.sources.as_ref().filter(|_| !plan.cluster.is_empty()) else {
            self.lists.remove(id);
            return 0;
        };
        let list = *self.lists.entry(id.clone()).or_insert_with(|| {
            self.last_list = self.last_list % LIST + 1;
            self.last_list
        });
        let own = plan.load_balancer_ips.iter().filter(|_| sources.node).map(|address| IpNet::from(*address));
        let ranges: BTreeSet<IpNet> = sources.ranges.iter().map(IpNet::trunc).chain(own).collect();
        for range in ranges {
            let word = u32::from(range.prefix_len()) << LENGTH_SHIFT | list;
            elements.push((SOURCES, Element::new(Tuple::new().word(word).address(range.network()))));
        }
        list
    }

    /// Everything.
    #[must_use]
    pub fn full(&self) -> Ruleset {
        let mut ruleset = Ruleset::new(table(self.node.family));
        for set in sets() {
            ruleset.add_set(set);
        }
        for (chain, rules) in self.chains() {
            ruleset.add_chain(chain, rules.into_iter().map(Rule::new));
        }
        ruleset.add_chain(Chain::new(CHECK_SOURCE), self.check_source());
        for (set, element) in self.ports.values().flatten() {
            ruleset.add_element(*set, element.clone());
        }
        for (set, element) in node::elements(&self.node) {
            ruleset.add_element(set, element);
        }
        if let Some(tcp) = self.tcp {
            ruleset.add_element(LISTENERS, listener(tcp, TCP));
        }
        ruleset
    }

    fn chains(&self) -> Vec<(Chain, Vec<Vec<Statement>>)> {
        let node = &self.node;
        let base = |name, kind, hook, priority| Chain::base(name, kind, hook, priority);
        let new = || Value::CtState.has(Value::CT_NEW);
        let word = |value| Tuple::new().word(value);
        let early = || vec![vec![new(), jump("admission")]];
        let late = || vec![vec![new(), jump("refusal")]];
        let direct = vec![
            new(),
            Value::CtStatus.and(Value::CT_DNAT).equals(word(0)),
            frontend().in_set(LISTENERS),
            Statement::Reject,
        ];
        let mut input = vec![direct];
        input.extend(late());
        let to_proxy = || self.at_frontends(|key| vec![key.dnat(FRONTENDS)]);
        let policy =
            |chain: &'static str| self.at_frontends(|key| vec![set_priority(key.map(POLICIES)), goto(chain)]);
        let near = || {
            let mut rules = vec![vec![Value::SourceType.equals(word(Value::LOCAL)), return_()]];
            rules.extend(from_local_pod(node).map(|local| vec![local, return_()]));
            rules.push(vec![drop()]);
            rules
        };
        // What is still for a ClusterIP here is for a port that it does not have.
        let mut refusal = policy("refuse");
        refusal.push(vec![key([Value::DestinationAddress]).in_set(CLUSTER_IPS), Statement::Reject]);
        vec![
            (base("filter-prerouting", ChainType::Filter, Hook::Prerouting, EARLY), early()),
            (base("filter-output-early", ChainType::Filter, Hook::Output, EARLY), early()),
            (base("nat-prerouting", ChainType::Nat, Hook::Prerouting, NAT), to_proxy()),
            (base("nat-output", ChainType::Nat, Hook::Output, NAT), to_proxy()),
            (base("filter-input", ChainType::Filter, Hook::Input, FILTER), input),
            (base("filter-forward", ChainType::Filter, Hook::Forward, FILTER), late()),
            (base("filter-output", ChainType::Filter, Hook::Output, FILTER), late()),
            (Chain::new("admission"), policy("admit")),
            (
                Chain::new("admit"),
                vec![
                    vec![Value::Priority.has(DROP), drop()],
                    vec![Value::Priority.has(NEAR_ONLY), jump("near-only")],
                    vec![Value::Priority.has(LIST), goto(CHECK_SOURCE)],
                    vec![reset()],
                ],
            ),
            (Chain::new("near-only"), near()),
            (Chain::new("refusal"), refusal),
            (Chain::new("refuse"), vec![vec![Value::Priority.has(REFUSE), Statement::Reject], vec![reset()]]),
        ]
    }

    /// Rules for packets to any kind of frontend.
    fn at_frontends(&self, rule: impl Fn(Key) -> Vec<Statement>) -> Vec<Vec<Statement>> {
        let mut rules = vec![rule(frontend())];
        let mut at_node = at_node_ports(&self.node);
        let zeros = Tuple::new().address(zeros(self.node.family));
        let address = Value::DestinationAddress.masked(zeros);
        at_node.extend(rule(key([address, Value::Protocol, Value::DestinationPort])));
        rules.push(at_node);
        rules
    }

    /// Looks for the source of a packet in the list that the priority names, once per prefix length in use.
    fn check_source(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for length in self.lengths.keys().rev() {
            let of_length = u32::from(*length) << LENGTH_SHIFT;
            let mask = mask(self.node.family, *length);
            let source = mask.map_or(Value::SourceAddress, |mask| Value::SourceAddress.masked(mask));
            rules.push(Rule::new([set_priority(Value::Priority.and_or(LIST, of_length))]));
            rules.push(Rule::new([key([Value::Priority, source]).in_set(SOURCES), reset(), return_()]));
        }
        rules.push(Rule::new([drop()]));
        rules
    }
}

/// The length of the prefix that an element of `sources` stands for.
fn length(element: &Element) -> u8 {
    let word = element.key.bytes().first_chunk().map(|bytes| u32::from_ne_bytes(*bytes)).unwrap_or_default();
    u8::try_from(word >> LENGTH_SHIFT).unwrap_or_default()
}

/// What the priority is to others.
fn reset() -> Statement {
    set_priority(Value::Constant(Tuple::new().word(0)))
}

fn sets() -> Vec<Set> {
    let frontend =
        || Columns::Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]);
    let address = || Columns::Types(vec![Type::Address]);
    let to = Columns::Typeof(vec![Value::DestinationAddress, Value::DestinationPort]);
    vec![
        Set::map(FRONTENDS, frontend(), to),
        Set::map(POLICIES, frontend(), Columns::Typeof(vec![Value::Priority])),
        Set::new(SOURCES, Columns::Typeof(vec![Value::Priority, Value::SourceAddress])),
        Set::new(NODE_PORT_IPS, address()),
        Set::new(LOCAL_SOURCES, address()).interval(),
        Set::new(LISTENERS, frontend()),
        Set::new(CLUSTER_IPS, address()),
    ]
}

fn listener(at: SocketAddr, protocol: u8) -> Element {
    Element::new(Tuple::new().address(at.ip()).protocol(protocol).port(at.port()))
}

fn zeros(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::IPv4 => Ipv4Addr::UNSPECIFIED.into(),
        IpFamily::IPv6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
        Protocol::Sctp => SCTP,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ClusterIp,
    ExternalIp,
    LoadBalancer,
    NodePort,
}

impl Kind {
    fn entrance(self) -> Entrance {
        if self == Self::ClusterIp { Entrance::Internal } else { Entrance::External }
    }
}

fn addresses(plan: &PortPlan) -> impl Iterator<Item = (IpAddr, Kind)> {
    // A load balancer's address that is an external IP as well is the former, as in the plan.
    let external = plan.external_ips.iter().filter(|address| !plan.load_balancer_ips.contains(address));
    let cluster = plan.cluster_ip.into_iter().map(|address| (address, Kind::ClusterIp));
    cluster
        .chain(external.map(|address| (*address, Kind::ExternalIp)))
        .chain(plan.load_balancer_ips.iter().map(|address| (*address, Kind::LoadBalancer)))
}

/// The addresses that clients may send to, and what kind of frontend each is.
pub fn frontends(plan: &PortPlan) -> impl Iterator<Item = (SocketAddr, Entrance)> {
    addresses(plan).map(|(address, kind)| (SocketAddr::new(address, plan.port), kind.entrance()))
}

fn policy(plan: &PortPlan, entrance: Entrance) -> u32 {
    let target = match entrance {
        Entrance::Internal => plan.internal,
        Entrance::External => plan.external,
    };
    match target {
        Target::Cluster | Target::Local => 0,
        Target::Reject => REFUSE,
        Target::Drop if entrance == Entrance::External && !plan.cluster.is_empty() => NEAR_ONLY,
        Target::Drop => DROP,
    }
}

/// The UDP frontends that a table leads to a proxy: addresses with ports, and NodePorts.
pub fn served_udp(installed: &Ruleset) -> impl Iterator<Item = (Option<IpAddr>, u16)> {
    let family = installed.table.family;
    let elements = installed.elements.get(FRONTENDS).into_iter().flat_map(|elements| elements.iter());
    elements.filter_map(move |element| {
        let bytes = element.key.bytes();
        let (address, rest): (IpAddr, &[u8]) = match family {
            IpFamily::IPv4 => {
                let (address, rest) = bytes.split_first_chunk::<4>()?;
                ((*address).into(), rest)
            }
            IpFamily::IPv6 => {
                let (address, rest) = bytes.split_first_chunk::<16>()?;
                ((*address).into(), rest)
            }
        };
        let port = u16::from_be_bytes([*rest.get(4)?, *rest.get(5)?]);
        (rest.first() == Some(&UDP)).then_some(((!address.is_unspecified()).then_some(address), port))
    })
}

#[cfg(test)]
#[path = "steer_tests.rs"]
mod tests;
