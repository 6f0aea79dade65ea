//! What does not depend on Services: tables, sets and the chains that lead a packet.
//!
//! In: the [`NodePlan`]. Out: declarations, chains and a few elements.

use std::collections::BTreeSet;

use pointsman_crds::proxy_node_status::IpFamily;

use super::word::{CHOICE, GROUP, Kind, LENGTH_SHIFT, LIST, LOCAL};
use crate::nftables::node::{
    self, LOCAL_SOURCES, NODE_PORT_IPS, at_node_ports, from_local_pod, frontend, mask, ranges,
};
use crate::nftables::ruleset::{
    Chain, ChainType, Columns, Element, Hook, Key, Rule, Rules, Ruleset, Set, Statement, Table, Tuple, Type,
    Value, Verdict, drop, goto, jump, key, return_, set_mark, set_priority,
};
use crate::plan::NodePlan;

pub(super) const FRONTENDS: &str = "frontends";
pub(super) const NODE_PORTS: &str = "nodeports";
pub(super) const GROUPS: &str = "groups";
pub(super) const CLASSES: &str = "classes";
pub(super) const ENDPOINTS: &str = "endpoints";
pub(super) const SLOTS: &str = "slots";
pub(super) const STICKY: &str = "sticky";
pub(super) const AFFINITY: &str = "affinity";
pub(super) const RESTRICTED: &str = "restricted";
pub(super) const SOURCES: &str = "sources";
pub(super) const CLUSTER_IPS: &str = "cluster-ips";
pub(super) const HAIRPIN: &str = "hairpin";
pub(super) const SERVICE_CIDRS: &str = "service-cidrs";
/// What packets to frontends are counted by, if they are.
pub(super) const FRONTEND_TRAFFIC: &str = "frontend-traffic";
/// The same for NodePorts.
pub(super) const NODE_PORT_TRAFFIC: &str = "nodeport-traffic";
/// The sets that count.
pub const TRAFFIC: [&str; 2] = [FRONTEND_TRAFFIC, NODE_PORT_TRAFFIC];
/// The chain that is rewritten when a prefix length of source ranges appears or goes.
pub(super) const CHECK_SOURCE_LIST: &str = "check-source-list";
/// The chain that drops invalid packets; the only rule of it that counts counts them.
pub const INVALID_DROPPED: &str = "filter-forward";
/// The chain whose rules name the mark bits that are masqueraded.
pub(super) const POSTROUTING: &str = "nat-postrouting";

/// How many clients of Services with affinity are remembered, 27 MiB of kernel memory. More are served without.
const CLIENTS: u32 = 262_144;

/// The addresses of packets that were checked before anything is translated.
const BEFORE_NAT: i32 = -110;
/// One before the priority of everybody else's, kube-proxy's and iptables' included: while another proxy is being replaced, the
/// first to translate a packet wins.
const NAT: i32 = -101;
/// The same after routing.
const SOURCE_NAT: i32 = 99;
const FILTER: i32 = 0;

/// Our table.
#[must_use]
pub fn table(family: IpFamily) -> Table {
    Table::new(family, "pointsman")
}

/// What keeps connections that our table has translated going when it is gone: the least that makes the kernel track packets and
/// translate them. Under the name of our table, so that whoever writes or removes that does the same to this.
#[must_use]
pub fn anchor(family: IpFamily) -> Ruleset {
    let mut anchor = Ruleset::new(table(family));
    anchor.add_chain(Chain::base("nat-prerouting", ChainType::Nat, Hook::Prerouting, NAT), []);
    let tracked = Rule::new([Value::CtState.has(Value::CT_NEW)]);
    let tracked = tracked.commented("no effect, keeps translated connections going");
    anchor.add_chain(Chain::base("filter-input", ChainType::Filter, Hook::Input, FILTER), [tracked]);
    anchor
}

/// All sets and maps.
pub(super) fn sets(counters: bool) -> Vec<Set> {
    use Columns::{Typeof, Types};
    let frontend = || Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]);
    let node_port = || Typeof(vec![Value::Protocol, Value::DestinationPort]);
    let word = || Typeof(vec![Value::Priority]);
    let index = || Typeof(vec![Value::Protocol, Value::Priority, Value::Random { below: u16::MAX.into() }]);
    let mut sets = vec![
        Set::map(FRONTENDS, frontend(), word()),
        Set::map(NODE_PORTS, node_port(), word()),
        Set::map(GROUPS, word(), word()),
        Set::vmap(CLASSES, word()),
        Set::map(ENDPOINTS, index(), Typeof(vec![Value::DestinationAddress, Value::DestinationPort])),
        Set::map(SLOTS, index(), word()),
        Set::map(STICKY, Types(vec![Type::Protocol, Type::ClassId]), Types(vec![Type::Address, Type::Port])),
        Set::map(AFFINITY, Typeof(vec![Value::SourceAddress, Value::Priority]), word()).dynamic(CLIENTS),
        Set::map(RESTRICTED, frontend(), word()),
        Set::new(SOURCES, Typeof(vec![Value::Priority, Value::SourceAddress])),
        Set::new(CLUSTER_IPS, Types(vec![Type::Address])),
        Set::new(NODE_PORT_IPS, Types(vec![Type::Address])),
        Set::new(HAIRPIN, Types(vec![Type::Address, Type::Address])),
        Set::new(LOCAL_SOURCES, Types(vec![Type::Address])).interval(),
        Set::new(SERVICE_CIDRS, Types(vec![Type::Address])).interval(),
    ];
    if counters {
        // Of their own, because the others are looked up several times for the first packet of a connection and never again.
        sets.push(Set::new(FRONTEND_TRAFFIC, frontend()).counting());
        sets.push(Set::new(NODE_PORT_TRAFFIC, node_port()).counting());
    }
    sets
}

/// The elements that come from the node.
pub(super) fn elements(node: &NodePlan) -> Vec<(&'static str, Element)> {
    let cidrs = ranges(&node.service_cidrs).into_iter().map(|element| (SERVICE_CIDRS, element));
    node::elements(node).into_iter().chain(cidrs).collect()
}

/// All chains but [`check_source_list`] and those of classes. Packets that carry one of the bits of `accepted` are
/// masqueraded.
pub(super) fn chains(node: &NodePlan, accepted: u32) -> Vec<Rules> {
    let mut chains = services(node);
    chains.extend(unserved(node));
    chains.extend(hooks(node, accepted));
    chains
}

/// Sets the word to the group that it names, with its class; ends the rule if that has no endpoints.
fn to_group(mask: u32) -> Statement {
    set_priority(key([Value::Priority.and(mask)]).map(GROUPS))
}

/// The rules by which a packet to a frontend of any kind goes on to `chain`.
fn at_frontends(node: &NodePlan, chain: &'static str) -> Vec<Vec<Statement>> {
    let mut rules = vec![vec![set_priority(frontend().map(FRONTENDS)), goto(chain)]];
    let mut rule = at_node_ports(node);
    rule.extend([set_priority(node_port().map(NODE_PORTS)), goto(chain)]);
    rules.push(rule);
    rules
}

fn node_port() -> Key {
    key([Value::Protocol, Value::DestinationPort])
}

/// Counts every packet that clients send: before it is translated, while it has the address of a frontend.
fn count(node: &NodePlan) -> Rules {
    let mut rule = at_node_ports(node);
    rule.push(node_port().in_set(NODE_PORT_TRAFFIC));
    chain("count", vec![vec![frontend().in_set(FRONTEND_TRAFFIC), return_()], rule])
}

fn services(node: &NodePlan) -> Vec<Rules> {
    let mark = || set_mark(Value::Mark.or(node.mark));
    let internal = |to: &'static str| -> Vec<Vec<Statement>> {
        let local = from_local_pod(node).filter(|_| !node.masquerade_all);
        let marks = node.masquerade_all || local.is_some();
        let mut rules: Vec<_> = local.map(|local| vec![local, goto(to)]).into_iter().collect();
        if marks {
            rules.push(vec![mark()]);
        }
        rules.push(vec![goto(to)]);
        rules
    };
    let from_node = || Value::SourceType.equals(Tuple::new().word(Value::LOCAL));
    let mut external_local: Vec<_> =
        from_local_pod(node).map(|local| vec![local, goto("cluster")]).into_iter().collect();
    external_local.extend([vec![from_node(), mark(), goto("cluster")], vec![goto("local")]]);
    let to_class = || vec![key([Value::Priority.and(CHOICE)]).vmap(CLASSES)];
    vec![
        chain("internal-cluster", internal("cluster")),
        chain("internal-local", internal("local")),
        chain("external-cluster", vec![vec![mark()], vec![goto("cluster")]]),
        chain("external-local", external_local),
        chain("cluster", vec![vec![to_group(GROUP)], to_class()]),
        chain(
            "local",
            vec![vec![set_priority(Value::Priority.or(LOCAL))], vec![to_group(GROUP)], to_class()],
        ),
        chain(
            "dispatch",
            vec![by_kind(["internal-cluster", "internal-local", "external-cluster", "external-local"])],
        ),
        chain("services", at_frontends(node, "dispatch")),
    ]
}

/// What becomes of packets to Services that were not translated.
fn unserved(node: &NodePlan) -> Vec<Rules> {
    let mut at_services = vec![vec![Value::CtStatus.has(Value::CT_DNAT), return_()]];
    at_services.extend(at_frontends(node, "unserved-service"));
    at_services.push(vec![key([Value::DestinationAddress]).in_set(CLUSTER_IPS), Statement::Reject]);
    at_services.push(vec![key([Value::DestinationAddress]).in_set(SERVICE_CIDRS), drop()]);
    vec![
        chain("unserved-cluster", vec![vec![to_group(GROUP), return_()], vec![Statement::Reject]]),
        chain(
            "unserved-local",
            vec![
                vec![set_priority(Value::Priority.or(LOCAL))],
                vec![to_group(GROUP), return_()],
                vec![to_group(GROUP & !LOCAL), drop()],
                vec![Statement::Reject],
            ],
        ),
        chain(
            "unserved-service",
            vec![by_kind(["unserved-cluster", "unserved-local", "unserved-cluster", "unserved-local"])],
        ),
        chain("unserved", at_services),
    ]
}

fn by_kind(chains: [&'static str; 4]) -> Vec<Statement> {
    let case =
        |(kind, chain): (Kind, &'static str)| (Tuple::new().word(kind.word(0)), Verdict::Goto(chain.into()));
    vec![key([Value::Priority.and(CHOICE)]).vmap_of(Kind::ALL.into_iter().zip(chains).map(case))]
}

fn hooks(node: &NodePlan, accepted: u32) -> Vec<Rules> {
    let new = |to: &'static str| vec![Value::CtState.has(Value::CT_NEW), jump(to)];
    let translated = || Value::CtStatus.has(Value::CT_DNAT);
    // Whatever comes later reads the priority as such.
    let reset = || {
        vec![
            Value::CtState.has(Value::CT_NEW),
            translated(),
            set_priority(Value::Constant(Tuple::new().word(0))),
        ]
    };
    let mut forward = Vec::new();
    if node.drop_invalid {
        forward.push(vec![Value::CtState.has(Value::CT_INVALID), Statement::Counter, drop()]);
    }
    if node.family == IpFamily::IPv6 {
        // IPv4 derives it from the type of service before this hook.
        forward.push(reset());
    }
    forward.push(new("unserved"));
    let bits = (0..u32::BITS).map(|bit| 1 << bit).filter(|bit| accepted & bit != 0);
    let masquerade = Statement::Masquerade { fully_random: true };
    let mut postrouting: Vec<_> = bits
        .map(|bit| vec![Value::Mark.has(bit), set_mark(Value::Mark.xor(bit)), masquerade.clone()])
        .collect();
    postrouting.push(vec![
        translated(),
        key([Value::SourceAddress, Value::DestinationAddress]).in_set(HAIRPIN),
        masquerade,
    ]);
    let base = |name: &'static str, kind, hook, priority, rules| Rules {
        chain: Chain::base(name, kind, hook, priority),
        ..chain(name, rules)
    };
    let filter = |name, hook, priority, rules| base(name, ChainType::Filter, hook, priority, rules);
    let nat = |name, hook, priority, rules| base(name, ChainType::Nat, hook, priority, rules);
    let check = Rules {
        rules: vec![Rule::new([set_priority(frontend().map(RESTRICTED)), goto(CHECK_SOURCE_LIST)])],
        chain: Chain::new("check-source"),
    };
    let mut early = vec![new("check-source")];
    let counts = node.counters.then(|| count(node));
    early.extend(counts.as_ref().map(|count| vec![jump(count.chain.name.clone())]));
    let mut chains = vec![
        check,
        filter("filter-prerouting", Hook::Prerouting, BEFORE_NAT, early.clone()),
        filter("filter-output-early", Hook::Output, BEFORE_NAT, early),
        nat("nat-prerouting", Hook::Prerouting, NAT, vec![vec![jump("services")]]),
        nat("nat-output", Hook::Output, NAT, vec![vec![jump("services")]]),
        filter("filter-input", Hook::Input, FILTER, vec![new("unserved")]),
        filter(INVALID_DROPPED, Hook::Forward, FILTER, forward),
        filter("filter-output", Hook::Output, FILTER, vec![reset(), new("unserved")]),
        nat(POSTROUTING, Hook::Postrouting, SOURCE_NAT, postrouting),
    ];
    chains.extend(counts);
    chains
}

/// Looks for the source of a packet in the list that the word names: once per prefix length in use, the longest first. The
/// length is part of the key, or 10.0.0.0/24 would let in whoever asks for 10.0.0.0/8.
pub(super) fn check_source_list(family: IpFamily, lengths: &BTreeSet<u8>) -> Rules {
    let mut rules = Vec::new();
    for length in lengths.iter().rev() {
        let of_length = u32::from(*length) << LENGTH_SHIFT;
        rules.push(vec![set_priority(Value::Priority.and_or(LIST, of_length))]);
        let mask = mask(family, *length);
        let source = mask.map_or(Value::SourceAddress, |mask| Value::SourceAddress.masked(mask));
        rules.push(vec![key([Value::Priority, source]).in_set(SOURCES), return_()]);
    }
    rules.push(vec![drop()]);
    chain(CHECK_SOURCE_LIST, rules)
}

fn chain(name: &'static str, rules: Vec<Vec<Statement>>) -> Rules {
    Rules { chain: Chain::new(name), rules: rules.into_iter().map(Rule::new).collect() }
}
