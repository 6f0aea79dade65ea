//! The chains that all Services share: dispatch, marks, and the ways in from the built-in chains.
//!
//! In: the [`NodePlan`] and what each Service port adds ([`Rendered`]). Out: [`Chains`]. Pure. Reference §2.1, §2.2; for the
//! dispatch see [`super::tree`].
//!
//! ```text
//! KUBE-SERVICES         -d 10.96.0.0/12 -j KUBE-IP-10.96.0.0/12    a jump, so that a packet that finds nothing comes back
//!                       -j KUBE-IP-OTHER                           only if there are addresses outside the ServiceCIDRs
//!                       … -j KUBE-NODEPORTS                        one rule per node address, or one for all
//! KUBE-IP-10.96.0.0/12  -d 10.98.0.0/15 -g KUBE-IP-10.98.0.0/15    inner block: gotos only
//! KUBE-IP-10.98.0.0/18  -d 10.98.3.7/32 … -j KUBE-SVC-…            leaf: captures only
//! KUBE-NODEPORTS        -p tcp … --dport 30720:31743 -g KUBE-NP-TCP-30720-31743
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;

use super::names::ChainName;
use super::render::{Capture, Chains, List, MARK_FOREIGN, MARK_MASQ, Rule, commented, from_local_pods, host};
use super::sets;
use super::tree::{Block, Bounded, Contents, Touched, Tree};
use crate::model::Protocol;
use crate::plan::NodePlan;

/// The chain of the addresses outside the ServiceCIDRs.
const OTHER: &str = "KUBE-IP-OTHER";

impl Bounded for (Protocol, u16) {
    const LEAST: Self = (Protocol::Tcp, 0);
    const GREATEST: Self = (Protocol::Sctp, u16::MAX);
}

impl Bounded for () {
    const LEAST: Self = ();
    const GREATEST: Self = ();
}

type Addresses = Tree<(Protocol, u16), Rule>;
type Ports = Tree<(), Rule>;

/// The dispatch of one family.
#[derive(Clone, Debug)]
pub(crate) struct Dispatch {
    family: IpFamily,
    /// One tree per ServiceCIDR, and one for everything else with no block.
    addresses: Vec<(Option<IpNet>, Addresses)>,
    node_ports: [Ports; 3],
}

/// Chains of the dispatch that a change has touched.
#[derive(Debug, Default)]
pub(crate) struct DispatchTouched {
    addresses: BTreeMap<usize, Touched>,
    node_ports: BTreeMap<usize, Touched>,
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

impl Dispatch {
    /// A dispatch without Services.
    pub(crate) fn new(node: &NodePlan) -> Self {
        let width = match node.family {
            IpFamily::IPv4 => 32,
            IpFamily::IPv6 => 128,
        };
        let tree = |net: Option<IpNet>| {
            let root = net.map_or(Block { bits: 0, length: 0 }, |net| Block {
                bits: bits(net.network()),
                length: net.prefix_len(),
            });
            (net, Tree::new(width, root))
        };
        Self {
            family: node.family,
            addresses: node.service_cidrs.iter().copied().map(Some).chain([None]).map(tree).collect(),
            node_ports: Protocol::ALL.map(|_| Tree::new(16, Block { bits: 0, length: 0 })),
        }
    }

    /// Replaces captures. What is in both is replaced in place, so that no block is merged and split for it.
    pub(crate) fn replace(
        &mut self,
        old: BTreeSet<Capture>,
        new: BTreeMap<Capture, Rule>,
        touched: &mut DispatchTouched,
    ) {
        for capture in old.into_iter().filter(|capture| !new.contains_key(capture)) {
            match capture {
                Capture::Address(address, protocol, port) => {
                    let (index, tree) = self.tree_of(address);
                    let touched = touched.addresses.entry(index).or_default();
                    tree.remove(bits(address), (protocol, port), touched);
                }
                Capture::NodePort(protocol, port) => {
                    let (index, tree) = self.ports_of(protocol);
                    tree.remove(u128::from(port), (), touched.node_ports.entry(index).or_default());
                }
            }
        }
        for (capture, rule) in new {
            match capture {
                Capture::Address(address, protocol, port) => {
                    let (index, tree) = self.tree_of(address);
                    let touched = touched.addresses.entry(index).or_default();
                    tree.insert(bits(address), (protocol, port), rule, touched);
                }
                Capture::NodePort(protocol, port) => {
                    let (index, tree) = self.ports_of(protocol);
                    let touched = touched.node_ports.entry(index).or_default();
                    tree.insert(u128::from(port), (), rule, touched);
                }
            }
        }
    }

    fn ports_of(&mut self, protocol: Protocol) -> (usize, &mut Ports) {
        let index = match protocol {
            Protocol::Tcp => 0,
            Protocol::Udp => 1,
            Protocol::Sctp => 2,
        };
        (index, &mut self.node_ports[index])
    }

    fn tree_of(&mut self, address: IpAddr) -> (usize, &mut Addresses) {
        let last = self.addresses.len() - 1;
        let index = self.addresses[..last]
            .iter()
            .position(|(net, _)| net.is_some_and(|net| net.contains(&address)))
            .unwrap_or(last);
        (index, &mut self.addresses[index].1)
    }

    /// The touched chains that exist, and the touched chains that exist no more.
    pub(crate) fn changed(&self, touched: &DispatchTouched) -> (Chains, BTreeSet<ChainName>) {
        let (mut written, mut removed) = (Chains::new(), BTreeSet::new());
        for (index, touched) in &touched.addresses {
            let (net, tree) = &self.addresses[*index];
            let name = |block: &Block| self.address_chain(*net, tree, *block);
            written.extend(
                touched.written.iter().map(|block| (name(block), self.address_rules(*net, tree, *block))),
            );
            removed.extend(touched.removed.iter().map(name));
        }
        for (index, touched) in &touched.node_ports {
            let (protocol, tree) = (Protocol::ALL[*index], &self.node_ports[*index]);
            for block in &touched.written {
                if *block == tree.root() {
                    written.insert(ChainName::new("KUBE-NODEPORTS"), self.node_port_roots());
                } else {
                    written.insert(port_chain(protocol, tree, *block), port_rules(protocol, tree, *block));
                }
            }
            removed.extend(touched.removed.iter().map(|block| port_chain(protocol, tree, *block)));
        }
        (written, removed)
    }

    /// All chains of the dispatch, without KUBE-SERVICES.
    pub(crate) fn chains(&self) -> Chains {
        let mut chains = Chains::from([(ChainName::new("KUBE-NODEPORTS"), self.node_port_roots())]);
        for (net, tree) in &self.addresses {
            for block in tree.blocks() {
                chains.insert(self.address_chain(*net, tree, block), self.address_rules(*net, tree, block));
            }
        }
        for (protocol, tree) in Protocol::ALL.into_iter().zip(&self.node_ports) {
            for block in tree.blocks().filter(|block| *block != tree.root()) {
                chains.insert(port_chain(protocol, tree, block), port_rules(protocol, tree, block));
            }
        }
        chains
    }

    /// How many rules all chains of the dispatch have, without KUBE-SERVICES: one per capture, and one per block that
    /// is not a root.
    pub(crate) fn rules(&self) -> usize {
        let addresses: usize = self.addresses.iter().map(|(_, tree)| tree.rules()).sum();
        addresses + self.node_ports.iter().map(Tree::rules).sum::<usize>()
    }

    fn address_chain(&self, net: Option<IpNet>, tree: &Addresses, block: Block) -> ChainName {
        if net.is_none() && block == tree.root() {
            ChainName::new(OTHER)
        } else {
            self.net(block).map_or_else(|| ChainName::new(OTHER), ChainName::of_block)
        }
    }

    fn address_rules(&self, net: Option<IpNet>, tree: &Addresses, block: Block) -> Vec<Rule> {
        match tree.contents(block) {
            Contents::Captures(rules) => rules.into_iter().cloned().collect(),
            Contents::Blocks(blocks) => blocks
                .into_iter()
                .filter_map(|child| {
                    Some(format!("-d {} -g {}", self.net(child)?, self.address_chain(net, tree, child)))
                })
                .collect(),
        }
    }

    fn net(&self, block: Block) -> Option<IpNet> {
        let address = match self.family {
            IpFamily::IPv4 => IpAddr::V4(Ipv4Addr::from(u32::try_from(block.bits).ok()?)),
            IpFamily::IPv6 => IpAddr::V6(Ipv6Addr::from(block.bits)),
        };
        IpNet::new(address, block.length).ok()
    }

    /// KUBE-NODEPORTS holds what is in the roots of all protocols.
    fn node_port_roots(&self) -> Vec<Rule> {
        let trees = Protocol::ALL.into_iter().zip(&self.node_ports);
        trees.flat_map(|(protocol, tree)| port_rules(protocol, tree, tree.root())).collect()
    }

    /// KUBE-SERVICES: as many rules for any number of Services.
    fn entrance(&self, node: &NodePlan) -> Vec<Rule> {
        let mut rules = Vec::new();
        for (net, tree) in &self.addresses {
            match net {
                Some(net) => rules.push(format!("-d {net} -j {}", ChainName::of_block(*net))),
                None if tree.is_empty() => {}
                None => rules.push(format!("-j {OTHER}")),
            }
        }
        let comment = "kubernetes service nodeports; NOTE: this must be the last rule in this chain";
        rules.extend(to_node(node, comment, "KUBE-NODEPORTS"));
        rules
    }
}

fn ends(tree: &Ports, block: Block) -> (u16, u16) {
    let port = |bits: u128| u16::try_from(bits).unwrap_or(u16::MAX);
    (port(block.bits), port(tree.last(block)))
}

fn port_chain(protocol: Protocol, tree: &Ports, block: Block) -> ChainName {
    let (first, last) = ends(tree, block);
    ChainName::of_node_ports(protocol, first, last)
}

fn port_rules(protocol: Protocol, tree: &Ports, block: Block) -> Vec<Rule> {
    match tree.contents(block) {
        Contents::Captures(rules) => rules.into_iter().cloned().collect(),
        Contents::Blocks(blocks) => blocks
            .into_iter()
            .map(|child| {
                let ((first, last), name) = (ends(tree, child), protocol.lower());
                let ports = if first == last { first.to_string() } else { format!("{first}:{last}") };
                format!("-p {name} -m {name} --dport {ports} -g {}", port_chain(protocol, tree, child))
            })
            .collect(),
    }
}

/// Rules that send packets to the node's addresses, as far as NodePorts answer there, to a chain.
fn to_node(node: &NodePlan, comment: &str, chain: &str) -> Vec<Rule> {
    let comment = commented(comment);
    let ports = &node.node_ports;
    if ports.all {
        let loopback = match node.family {
            IpFamily::IPv4 => "127.0.0.0/8",
            IpFamily::IPv6 => "::1/128",
        };
        return vec![format!("! -d {loopback} {comment} -m addrtype --dst-type LOCAL -j {chain}")];
    }
    let rule = |address: &IpAddr| format!("-d {} {comment} -j {chain}", host(*address));
    ports.addresses.iter().map(rule).collect()
}

/// The chains that do not depend on single Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    /// In nat: what marks and masquerades. Must be there before any Service.
    pub masquerade: Chains,
    /// In nat: the way in. Must come after every Service.
    pub entrance: Chains,
    /// In filter: chains whose rules are in order.
    pub filter: Chains,
    /// In filter: rules for the lists.
    pub listed: BTreeSet<(List, Rule)>,
}

impl Frame {
    /// The frame of a node. With `use_sets`, sets say what is refused, otherwise rules. `accepted` holds every mark bit that is masqueraded: more than the one that is set while it
    /// changes.
    pub(crate) fn new(
        node: &NodePlan,
        mark: u32,
        accepted: u32,
        dispatch: &Dispatch,
        use_sets: bool,
    ) -> Self {
        let accepted = accepted | mark;
        let mut masquerade = Chains::from([
            (ChainName::new(MARK_MASQ), vec![format!("-j MARK --set-xmark {mark:#x}/{mark:#x}")]),
            (ChainName::new("KUBE-POSTROUTING"), postrouting(accepted)),
        ]);
        let local = from_local_pods(&node.local_traffic);
        if local.len() > 1 && !node.masquerade_all {
            let mut rules: Vec<Rule> = local.iter().map(|source| format!("{source}-j RETURN")).collect();
            rules.push(format!("-j {MARK_MASQ}"));
            masquerade.insert(ChainName::new(MARK_FOREIGN), rules);
        }
        let comment = "kubernetes service nodeports without endpoints";
        let to_node_ports = to_node(node, comment, List::NodePortsWithoutEndpoint.chain().as_str());
        let mut filter = Chains::from([(ChainName::new("KUBE-FORWARD"), forward(node, accepted))]);
        let mut listed = BTreeSet::new();
        if use_sets {
            let mut rules = sets::rules(node.family);
            rules.extend(to_node_ports);
            filter.insert(List::ExternalServices.chain(), rules);
        } else {
            listed.extend(to_node_ports.into_iter().map(|rule| (List::ExternalServices, rule)));
        }
        Self {
            masquerade,
            entrance: Chains::from([(ChainName::new("KUBE-SERVICES"), dispatch.entrance(node))]),
            filter,
            listed,
        }
    }

    /// How many rules it has, by table.
    pub(crate) fn rules(&self) -> (usize, usize) {
        let count = |chains: &Chains| chains.values().map(Vec::len).sum::<usize>();
        (count(&self.masquerade) + count(&self.entrance), count(&self.filter) + self.listed.len())
    }
}

pub(crate) fn postrouting(accepted: u32) -> Vec<Rule> {
    let [unmarked, clear] = if accepted.is_power_of_two() {
        [
            format!("-m mark ! --mark {accepted:#x}/{accepted:#x} -j RETURN"),
            format!("-j MARK --set-xmark {accepted:#x}/0x0"),
        ]
    } else {
        [
            format!("-m mark --mark 0x0/{accepted:#x} -j RETURN"),
            format!("-j MARK --set-xmark 0x0/{accepted:#x}"),
        ]
    };
    let comment = commented("kubernetes service traffic requiring SNAT");
    vec![unmarked, clear, format!("{comment} -j MASQUERADE --random-fully")]
}

pub(crate) fn forward(node: &NodePlan, accepted: u32) -> Vec<Rule> {
    let mut rules = Vec::new();
    if node.drop_invalid {
        rules.push("-m conntrack --ctstate INVALID -j DROP".to_owned());
    }
    let comment = commented("kubernetes forwarding rules");
    if accepted.is_power_of_two() {
        rules.push(format!("{comment} -m mark --mark {accepted:#x}/{accepted:#x} -j ACCEPT"));
    } else {
        rules.push(format!("{comment} -m mark ! --mark 0x0/{accepted:#x} -j ACCEPT"));
    }
    let comment = commented("kubernetes forwarding conntrack rule");
    rules.push(format!("{comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"));
    rules
}

/// Where the anchor of a cleanup is.
pub(crate) const ANCHOR_CHAIN: &str = "INPUT";
/// The text by which it is found again.
pub(crate) const ANCHOR_TEXT: &str = "pointsman: no effect, keeps translated connections going";
/// The anchor: it asks for connection tracking, and has no target.
pub(crate) const ANCHOR_RULE: &str = "-m comment --comment \"pointsman: no effect, keeps translated connections going\" -m conntrack --ctstate ESTABLISHED";

/// A rule that leads from a built-in chain to one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Jump {
    /// The table.
    pub table: &'static str,
    /// The built-in chain.
    pub from: &'static str,
    /// Our chain.
    pub to: &'static str,
    /// Whether only the first packet of a connection goes there.
    pub new_only: bool,
    /// The comment, by which the rule is found again.
    pub comment: &'static str,
}

impl Jump {
    /// As a rule.
    pub(crate) fn rule(&self) -> Rule {
        let state = if self.new_only { "-m conntrack --ctstate NEW " } else { "" };
        format!("{state}{} -j {}", commented(self.comment), self.to)
    }
}

/// The ways in, in the order of their insertion at the head of the built-in chains. The jump from OUTPUT to
/// KUBE-EXTERNAL-SERVICES is ours alone: the node itself is refused like everybody else.
pub(crate) const JUMPS: &[Jump] = &{
    const PORTALS: &str = "kubernetes service portals";
    const EXTERNAL: &str = "kubernetes externally-visible service portals";
    const FIREWALL: &str = "kubernetes load balancer firewall";
    const fn filter(from: &'static str, to: &'static str, new_only: bool, comment: &'static str) -> Jump {
        Jump { table: "filter", from, to, new_only, comment }
    }
    const fn nat(from: &'static str, to: &'static str, comment: &'static str) -> Jump {
        Jump { table: "nat", from, to, new_only: false, comment }
    }
    [
        filter("INPUT", "KUBE-EXTERNAL-SERVICES", true, EXTERNAL),
        filter("FORWARD", "KUBE-EXTERNAL-SERVICES", true, EXTERNAL),
        filter("OUTPUT", "KUBE-EXTERNAL-SERVICES", true, EXTERNAL),
        filter("INPUT", "KUBE-NODEPORTS", false, "kubernetes health check service ports"),
        filter("FORWARD", "KUBE-SERVICES", true, PORTALS),
        filter("OUTPUT", "KUBE-SERVICES", true, PORTALS),
        filter("FORWARD", "KUBE-FORWARD", false, "kubernetes forwarding rules"),
        filter("INPUT", "KUBE-PROXY-FIREWALL", true, FIREWALL),
        filter("OUTPUT", "KUBE-PROXY-FIREWALL", true, FIREWALL),
        filter("FORWARD", "KUBE-PROXY-FIREWALL", true, FIREWALL),
        nat("POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
        nat("OUTPUT", "KUBE-SERVICES", PORTALS),
        nat("PREROUTING", "KUBE-SERVICES", PORTALS),
    ]
};
