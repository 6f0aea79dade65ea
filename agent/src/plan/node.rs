//! What holds for the whole node, in one family.
//!
//! In: the configuration, the own Node, ServiceCIDRs and local addresses. Out: [`NodePlan`].

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use pointsman_crds::node_config::{NodeDetectLocal, NodeProxyConfiguration};
use pointsman_crds::proxy_node_status::IpFamily;

use crate::model::{Model, family_of};

/// How packets of local pods are recognised (reference §2.7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LocalTraffic {
    /// Not at all.
    #[default]
    Unknown,
    /// By their source address. Never empty.
    Sources(Vec<IpNet>),
    /// By the interface they came in on.
    Interface(String),
    /// By the beginning of that interface's name.
    InterfacePrefix(String),
}

/// The node addresses that answer on NodePorts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePorts {
    /// All addresses of the node, except loopback.
    pub all: bool,
    /// These addresses; none if `all` is set.
    pub addresses: BTreeSet<IpAddr>,
    /// 127.0.0.1: by a proxy that listens there, not by rules. Never set for IPv6, as in kube-proxy.
    pub localhost: bool,
}

/// What holds for the whole node, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlan {
    /// The family.
    pub family: IpFamily,
    /// The Node's name.
    pub name: String,
    /// The Node's zone.
    pub zone: Option<String>,
    /// The node's own address.
    pub primary: Option<IpAddr>,
    /// Packet mark that says "masquerade": one bit.
    pub mark: u32,
    /// Masquerade all traffic to ClusterIPs.
    pub masquerade_all: bool,
    /// How packets of local pods are recognised.
    pub local_traffic: LocalTraffic,
    /// The node's addresses that mean something beyond one interface; none of loopback.
    pub own: BTreeSet<IpAddr>,
    /// Where NodePorts answer.
    pub node_ports: NodePorts,
    /// The blocks that ClusterIPs are taken from.
    pub service_cidrs: Vec<IpNet>,
    /// Count the packets and bytes that clients send, where the mode can.
    pub counters: bool,
    /// Drop packets that connection tracking calls invalid: a reset from them would end good connections (k/k#74839).
    /// Off when the kernel is told to be liberal.
    pub drop_invalid: bool,
}

impl NodePlan {
    pub(super) fn empty(family: IpFamily) -> Self {
        Self {
            family,
            name: String::new(),
            zone: None,
            primary: None,
            mark: 1 << 14,
            masquerade_all: false,
            local_traffic: LocalTraffic::Unknown,
            own: BTreeSet::new(),
            node_ports: NodePorts::default(),
            service_cidrs: Vec::new(),
            counters: false,
            drop_invalid: true,
        }
    }

    pub(super) fn new(family: IpFamily, config: &NodeProxyConfiguration, model: &Model) -> Self {
        let facts = model.node();
        let of_family = |nets: &[IpNet]| {
            let mut nets: Vec<IpNet> =
                nets.iter().copied().filter(|net| family_of(net.addr()) == family).collect();
            nets.sort_unstable();
            nets.dedup();
            nets
        };
        let sources = |nets: &[IpNet]| {
            Some(of_family(nets))
                .filter(|nets| !nets.is_empty())
                .map_or(LocalTraffic::Unknown, LocalTraffic::Sources)
        };
        Self {
            family,
            name: facts.name.clone(),
            zone: facts.zone.clone(),
            primary: facts.primary(family),
            mark: config.masquerade.mark(),
            masquerade_all: config.masquerade.all,
            local_traffic: match &config.detect_local {
                NodeDetectLocal::ClusterCIDR { cluster_cidrs } => sources(cluster_cidrs),
                NodeDetectLocal::NodeCIDR {} => sources(&facts.pod_cidrs),
                NodeDetectLocal::BridgeInterface { bridge_interface } => {
                    LocalTraffic::Interface(bridge_interface.clone())
                }
                NodeDetectLocal::InterfaceNamePrefix { interface_name_prefix } => {
                    LocalTraffic::InterfacePrefix(interface_name_prefix.clone())
                }
            },
            own: own_addresses(family, model),
            node_ports: node_ports(family, config, model),
            service_cidrs: of_family(model.service_cidrs()),
            counters: config.nftables.counters,
            drop_invalid: !config.conntrack.tcp_be_liberal,
        }
    }
}

fn own_addresses(family: IpFamily, model: &Model) -> BTreeSet<IpAddr> {
    let own = model.local_addresses().iter().copied().filter(|address| family_of(*address) == family);
    own.filter(|address| !address.is_loopback() && !is_link_local(*address)).collect()
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// A list that names only blocks of the other family means the default for this one, `primary`. (kube-proxy takes all
/// addresses then, NP-7; a list that was written to narrow access must not widen it.)
fn node_ports(family: IpFamily, config: &NodeProxyConfiguration, model: &Model) -> NodePorts {
    let primary = model.node().primary(family).filter(|address| !address.is_loopback());
    let localhost = family == IpFamily::IPv4 && config.iptables.localhost_node_ports;
    let mut ports = NodePorts::default();
    let mut named = false;
    for entry in &config.node_port_addresses {
        match entry.0.as_str() {
            "primary" => {
                named = true;
                ports.addresses.extend(primary);
            }
            "localhost" => {
                named = true;
                ports.localhost |= localhost;
            }
            "all" => {
                named = true;
                ports.all = true;
                ports.localhost |= localhost;
            }
            block => {
                let Some(block) =
                    block.parse::<IpNet>().ok().filter(|block| family_of(block.addr()) == family)
                else {
                    continue;
                };
                named = true;
                if block.prefix_len() == 0 {
                    ports.all = true;
                }
                ports.localhost |= localhost && block.contains(&IpAddr::from([127, 0, 0, 1]));
                let inside = model.local_addresses().iter().chain(primary.as_ref());
                ports.addresses.extend(
                    inside.copied().filter(|address| !address.is_loopback() && block.contains(address)),
                );
            }
        }
    }
    if !named {
        ports.addresses.extend(primary);
    }
    if ports.all {
        ports.addresses.clear();
    }
    ports
}
