//! One Service port as rules.
//!
//! In: a [`PortPlan`] and the [`NodePlan`]. Out: [`Rendered`]: its own chains, and what it adds to the chains that all share.
//! Pure, and decides nothing. Rules have the text that `iptables-save` prints, without `-A CHAIN`, so that what is read
//! back can be compared as it is; their content and order are kube-proxy's (reference §2.3 to §2.6).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use super::names::{ChainName, PortChain};
use crate::model::Protocol;
use crate::plan::{Backend, LocalTraffic, NodePlan, PortId, PortPlan, Target};

/// The text of a rule, without `-A CHAIN`.
pub(crate) type Rule = String;
/// Chains and their rules.
pub(crate) type Chains = BTreeMap<ChainName, Vec<Rule>>;

/// Service ports with more endpoints have no comments in the rules that choose one. Those of an endpoint's own chain never have:
/// the rule that leads there says what it is, and each comment takes 288 bytes of a table that the legacy flavour copies
/// for every change.
const COMMENTED_ENDPOINTS: usize = 100;

/// Marks a packet for masquerading.
pub(crate) const MARK_MASQ: &str = "KUBE-MARK-MASQ";
/// Marks a packet for masquerading unless it comes from a local pod; exists only with several blocks of pods.
pub(crate) const MARK_FOREIGN: &str = "KUBE-MARK-MASQ-FOREIGN";

/// What one Service port adds to the tables.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Rendered {
    /// Its own chains, in nat.
    pub chains: Chains,
    /// Rules that catch packets to its frontends.
    pub captures: BTreeMap<Capture, Rule>,
    /// What packets get that no endpoint takes.
    pub refusals: BTreeSet<Refusal>,
    /// Rules for the filter table's lists.
    pub listed: BTreeSet<(List, Rule)>,
}

/// What a capture rule matches. No two Service ports have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Capture {
    /// A virtual address.
    Address(IpAddr, Protocol, u16),
    /// A NodePort.
    NodePort(Protocol, u16),
}

/// A list of rules in the filter table whose order does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum List {
    /// ClusterIPs without an endpoint.
    Services,
    /// Other virtual addresses without an endpoint.
    ExternalServices,
    /// NodePorts without an endpoint.
    NodePortsWithoutEndpoint,
    /// Load balancers' addresses that not everybody may use.
    Firewall,
    /// Ports of health checks.
    HealthChecks,
}

impl List {
    /// All of them.
    pub(crate) const ALL: [Self; 5] = [
        Self::Services,
        Self::ExternalServices,
        Self::NodePortsWithoutEndpoint,
        Self::Firewall,
        Self::HealthChecks,
    ];

    /// The chain that it is.
    pub(crate) fn chain(self) -> ChainName {
        ChainName::new(match self {
            Self::Services => "KUBE-SERVICES",
            Self::ExternalServices => "KUBE-EXTERNAL-SERVICES",
            Self::NodePortsWithoutEndpoint => "KUBE-NP-WITHOUT-ENDPOINT",
            Self::Firewall => "KUBE-PROXY-FIREWALL",
            Self::HealthChecks => "KUBE-NODEPORTS",
        })
    }
}

/// What packets to a frontend get that no endpoint takes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Refusal {
    /// Where: one of the first three lists.
    pub list: List,
    /// The frontend's address; `None` for a NodePort.
    pub address: Option<IpAddr>,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its port.
    pub port: u16,
    /// Whether the packet is dropped without an answer.
    pub drop: bool,
    /// Which Service.
    pub text: String,
}

impl Refusal {
    /// As a rule.
    pub(crate) fn rule(&self, family: IpFamily) -> Rule {
        let (reason, verdict) = match (self.drop, family) {
            (true, _) => ("has no local endpoints", "DROP"),
            (false, IpFamily::IPv4) => ("has no endpoints", "REJECT --reject-with icmp-port-unreachable"),
            (false, IpFamily::IPv6) => ("has no endpoints", "REJECT --reject-with icmp6-port-unreachable"),
        };
        let comment = format!("{} {reason}", self.text);
        caught(self.address, self.protocol, self.port, &comment, verdict)
    }
}

/// A rule that catches packets to a frontend.
pub(crate) fn caught(
    address: Option<IpAddr>,
    protocol: Protocol,
    port: u16,
    comment: &str,
    verdict: &str,
) -> Rule {
    let destination = address.map(|address| format!("-d {} ", host(address))).unwrap_or_default();
    let protocol = protocol.lower();
    format!("{destination}-p {protocol} {} -m {protocol} --dport {port} -j {verdict}", commented(comment))
}

/// One address, as the tools write it.
pub(crate) fn host(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// A comment match. The tools leave out the quotes only around plain words, and these always have a space or a slash.
pub(crate) fn commented(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| if c.is_ascii_graphic() && !matches!(c, '"' | '\\' | '\'') || c == ' ' { c } else { '?' })
        .collect();
    format!("-m comment --comment \"{plain}\"")
}

/// The matches that recognise packets of local pods, one rule each.
pub(crate) fn from_local_pods(traffic: &LocalTraffic) -> Vec<String> {
    match traffic {
        LocalTraffic::Unknown => Vec::new(),
        LocalTraffic::Sources(blocks) => blocks.iter().map(|block| format!("-s {block} ")).collect(),
        LocalTraffic::Interface(name) => vec![format!("-i {name} ")],
        LocalTraffic::InterfacePrefix(prefix) => vec![format!("-i {prefix}+ ")],
    }
}

/// Renders one Service port.
pub(crate) fn render(id: &PortId, port: &PortPlan, node: &NodePlan) -> Rendered {
    let mut out = Rendered::default();
    let painter = Painter { id, port, node, text: id.text(), near: false };
    painter.chains(&mut out.chains);
    painter.frontends(&mut out);
    out
}

/// Chains of mode ipvs that lead packets of local pods and of the node itself to the endpoints of policy Cluster, the first
/// of them first.
pub(crate) fn render_near(id: &PortId, port: &PortPlan, node: &NodePlan) -> (ChainName, Chains) {
    let painter = Painter { id, port, node, text: id.text(), near: true };
    let first = ChainName::of_near_port(id);
    let endpoints = port.cluster.iter().map(|backend| (painter.to(backend), painter.endpoint(backend)));
    let mut chains: Chains = endpoints.collect();
    chains.insert(first, painter.choice(&port.cluster, false));
    (first, chains)
}

struct Painter<'a> {
    id: &'a PortId,
    port: &'a PortPlan,
    node: &'a NodePlan,
    text: String,
    /// Chains of mode ipvs.
    near: bool,
}

impl Painter<'_> {
    fn chain(&self, kind: PortChain) -> ChainName {
        ChainName::of_port(kind, self.id)
    }

    /// The chain of an endpoint.
    fn to(&self, backend: &Backend) -> ChainName {
        if self.near {
            ChainName::of_near_endpoint(self.id, backend)
        } else {
            ChainName::of_endpoint(self.id, backend)
        }
    }

    fn chains(&self, chains: &mut Chains) {
        let port = self.port;
        if !port.cluster.is_empty() {
            let cluster = self.chain(PortChain::Cluster);
            chains.insert(cluster, self.choice(&port.cluster, port.internal == Target::Cluster));
        }
        if !port.local.is_empty() {
            let local = self.chain(PortChain::Local);
            chains.insert(local, self.choice(&port.local, port.internal == Target::Local));
        }
        for backend in port.backends() {
            chains.insert(self.to(backend), self.endpoint(backend));
        }
        if self.has_external_chain() {
            chains.insert(self.chain(PortChain::External), self.external());
        }
        if let Some(rules) = self.firewall() {
            chains.insert(self.chain(PortChain::Firewall), rules);
        }
    }

    /// Whether packets from outside can reach anybody, if only some packets.
    fn has_external_chain(&self) -> bool {
        let port = self.port;
        let frontends =
            port.node_port.is_some() || !port.external_ips.is_empty() || !port.load_balancer_ips.is_empty();
        frontends && !port.cluster.is_empty()
    }

    /// Chooses an endpoint; before that marks what must be masqueraded because of its way in, the ClusterIP.
    fn choice(&self, backends: &[Backend], by_cluster_ip: bool) -> Vec<Rule> {
        let mut rules = Vec::new();
        if let Some(address) = self.port.cluster_ip.filter(|_| by_cluster_ip) {
            let rule = |source: &str, target: &str| {
                let rule = caught(
                    Some(address),
                    self.id.protocol,
                    self.port.port,
                    &format!("{} cluster IP", self.text),
                    target,
                );
                // An interface is printed behind the destination, a source before it.
                match source.split_once("-i ") {
                    Some((not, name)) => rule.replacen(" -p ", &format!(" {not}-i {name}-p "), 1),
                    None => format!("{source}{rule}"),
                }
            };
            match (self.node.masquerade_all, from_local_pods(&self.node.local_traffic).as_slice()) {
                (true, _) => rules.push(rule("", MARK_MASQ)),
                (false, []) => {}
                (false, [one]) => rules.push(rule(&format!("! {one}"), MARK_MASQ)),
                (false, _) => rules.push(rule("", MARK_FOREIGN)),
            }
        }
        let many = self.port.cluster.len() + self.port.local.len() > COMMENTED_ENDPOINTS;
        let commented = |backend: &Backend| {
            if many {
                String::new()
            } else {
                commented(&format!("{} -> {}", self.text, backend.socket())) + " "
            }
        };
        if let Some(seconds) = self.port.affinity {
            for backend in backends {
                let chain = self.to(backend);
                rules.push(format!(
                    "{}-m recent --rcheck --seconds {seconds} --reap --name {chain} --mask {} --rsource -j {chain}",
                    commented(backend),
                    self.mask(),
                ));
            }
        }
        for (index, backend) in backends.iter().enumerate() {
            let mut rule = commented(backend);
            let left = backends.len() - index;
            if left > 1 {
                let _ = write!(rule, "-m statistic --mode random --probability {} ", probability(left));
            }
            let _ = write!(rule, "-j {}", self.to(backend));
            rules.push(rule);
        }
        rules
    }

    fn endpoint(&self, backend: &Backend) -> Vec<Rule> {
        let chain = self.to(backend);
        let protocol = self.id.protocol.lower();
        let remember = match self.port.affinity {
            Some(_) => format!("-m recent --set --name {chain} --mask {} --rsource ", self.mask()),
            None => String::new(),
        };
        let hairpin = format!("-s {} -j {MARK_MASQ}", host(backend.address));
        let lead =
            format!("-p {protocol} {remember}-m {protocol} -j DNAT --to-destination {}", backend.socket());
        // Mode ipvs has a set for those who reach themselves.
        if self.near { vec![lead] } else { vec![hairpin, lead] }
    }

    fn external(&self) -> Vec<Rule> {
        let cluster = self.chain(PortChain::Cluster);
        let about =
            |what: &str| commented(&format!("{what} traffic for {} external destinations", self.text));
        if !self.port.external_local {
            return vec![format!("{} -j {MARK_MASQ}", about("masquerade")), format!("-j {cluster}")];
        }
        let mut rules: Vec<Rule> = from_local_pods(&self.node.local_traffic)
            .iter()
            .map(|source| format!("{source}{} -j {cluster}", about("pod")))
            .collect();
        rules.push(format!("{} -m addrtype --src-type LOCAL -j {MARK_MASQ}", about("masquerade LOCAL")));
        rules.push(format!("{} -m addrtype --src-type LOCAL -j {cluster}", about("route LOCAL")));
        if !self.port.local.is_empty() {
            rules.push(format!("-j {}", self.chain(PortChain::Local)));
        }
        rules
    }

    fn firewall(&self) -> Option<Vec<Rule>> {
        let sources = self.port.sources.as_ref().filter(|_| self.has_external_chain())?;
        let external = self.chain(PortChain::External);
        let comment = commented(&format!("{} loadbalancer IP", self.text));
        let mut rules: Vec<Rule> =
            sources.ranges.iter().map(|range| format!("-s {range} {comment} -j {external}")).collect();
        if sources.node {
            let own = self.port.load_balancer_ips.iter();
            rules.extend(own.map(|address| format!("-s {} {comment} -j {external}", host(*address))));
        }
        rules.push(commented(&format!(
            "other traffic to {} will be dropped by KUBE-PROXY-FIREWALL",
            self.text
        )));
        Some(rules)
    }

    fn frontends(&self, out: &mut Rendered) {
        let port = self.port;
        if let Some(address) = port.cluster_ip {
            let target = match port.internal {
                Target::Cluster => Some(self.chain(PortChain::Cluster)),
                Target::Local => Some(self.chain(PortChain::Local)),
                Target::Reject | Target::Drop => None,
            };
            match target {
                Some(target) => self.capture(out, address, "cluster IP", target),
                None => self.refuse(out, List::Services, Some(address), port.internal),
            }
        }
        let external = self.chain(PortChain::External);
        let forwarded = self.has_external_chain();
        let refused = matches!(port.external, Target::Reject | Target::Drop);
        for address in &port.external_ips {
            if forwarded {
                self.capture(out, *address, "external IP", external);
            }
            if refused {
                self.refuse(out, List::ExternalServices, Some(*address), port.external);
            }
        }
        for address in &port.load_balancer_ips {
            if forwarded && port.sources.is_some() {
                let firewall = self.chain(PortChain::Firewall);
                self.capture(out, *address, "loadbalancer IP", firewall);
                let comment = format!("{} traffic not accepted by {firewall}", self.text);
                let rule = caught(Some(*address), self.id.protocol, port.port, &comment, "DROP");
                out.listed.insert((List::Firewall, rule));
            } else if forwarded {
                self.capture(out, *address, "loadbalancer IP", external);
            }
            if refused {
                self.refuse(out, List::ExternalServices, Some(*address), port.external);
            }
        }
        if let Some(number) = port.node_port {
            if forwarded {
                let rule = caught(None, self.id.protocol, number, &self.text, external.as_str());
                out.captures.insert(Capture::NodePort(self.id.protocol, number), rule);
            }
            if refused {
                self.refuse(out, List::NodePortsWithoutEndpoint, None, port.external);
            }
        }
        if let Some(number) = port.health_check_node_port {
            let comment = format!("{} health check node port", self.text);
            let rule = caught(None, Protocol::Tcp, number, &comment, "ACCEPT");
            out.listed.insert((List::HealthChecks, rule));
        }
    }

    fn capture(&self, out: &mut Rendered, address: IpAddr, what: &str, target: ChainName) {
        let comment = format!("{} {what}", self.text);
        let (protocol, port) = (self.id.protocol, self.port.port);
        let rule = caught(Some(address), protocol, port, &comment, target.as_str());
        out.captures.insert(Capture::Address(address, protocol, port), rule);
    }

    fn refuse(&self, out: &mut Rendered, list: List, address: Option<IpAddr>, target: Target) {
        out.refusals.insert(Refusal {
            list,
            address,
            protocol: self.id.protocol,
            port: if address.is_some() { self.port.port } else { self.port.node_port.unwrap_or_default() },
            drop: target == Target::Drop,
            text: self.text.clone(),
        });
    }

    fn mask(&self) -> &'static str {
        match self.id.family {
            IpFamily::IPv4 => "255.255.255.255",
            IpFamily::IPv6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        }
    }
}

/// The chance of one in `count`, as the kernel keeps it: in steps of 2⁻³¹.
fn probability(count: usize) -> String {
    let one = f64::from(1u32 << 31);
    let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    format!("{:.11}", (one / count).round() / one)
}
