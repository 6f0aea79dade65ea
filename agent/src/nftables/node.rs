//! What the tables of modes nftables and userspace say about the node in the same words.
//!
//! In: the [`NodePlan`]. Out: statements for rules, and the elements of the sets that these ask.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pointsman_crds::proxy_node_status::IpFamily;

use super::ruleset::{Element, Key, Statement, Tuple, Value, key};
use crate::plan::{LocalTraffic, NodePlan};

/// The addresses that answer on NodePorts.
pub const NODE_PORT_IPS: &str = "nodeport-ips";
/// The blocks of local pods.
pub const LOCAL_SOURCES: &str = "local-sources";

/// The elements of both sets.
#[must_use]
pub fn elements(node: &NodePlan) -> Vec<(&'static str, Element)> {
    let sources = match &node.local_traffic {
        LocalTraffic::Sources(nets) => ranges(nets),
        _ => Vec::new(),
    };
    let addresses = node.node_ports.addresses.iter();
    let addresses = addresses.map(|address| Element::new(Tuple::new().address(*address)));
    addresses
        .map(|element| (NODE_PORT_IPS, element))
        .chain(sources.into_iter().map(|element| (LOCAL_SOURCES, element)))
        .collect()
}

/// Blocks as elements of an interval set, in which they must not overlap.
#[must_use]
pub fn ranges(nets: &[IpNet]) -> Vec<Element> {
    let tuple = |address: IpAddr| Tuple::new().address(address);
    let nets = IpNet::aggregate(&nets.to_vec()).into_iter();
    nets.map(|net| Element::range(tuple(net.network()), tuple(net.broadcast()))).collect()
}

/// Where a packet goes to, as the key of a frontend.
#[must_use]
pub fn frontend() -> Key {
    key([Value::DestinationAddress, Value::Protocol, Value::DestinationPort])
}

/// Matches packets of local pods. (Packets of the node itself have no interface, and match none.)
#[must_use]
pub fn from_local_pod(node: &NodePlan) -> Option<Statement> {
    match &node.local_traffic {
        LocalTraffic::Unknown => None,
        LocalTraffic::Sources(_) => Some(key([Value::SourceAddress]).in_set(LOCAL_SOURCES)),
        LocalTraffic::Interface(name) => Some(Value::InputInterface.equals(Tuple::interface(name))),
        LocalTraffic::InterfacePrefix(prefix) => {
            Some(Value::InputInterface.equals(Tuple::interface_prefix(prefix)))
        }
    }
}

/// Matches packets to addresses that answer on NodePorts. Never loopback's: a proxy listens there.
#[must_use]
pub fn at_node_ports(node: &NodePlan) -> Vec<Statement> {
    if !node.node_ports.all {
        return vec![key([Value::DestinationAddress]).in_set(NODE_PORT_IPS)];
    }
    let to = Value::DestinationAddress;
    let elsewhere = match (node.family, mask(node.family, 8)) {
        (IpFamily::IPv4, Some(mask)) => to.masked(mask).differs(Tuple::new().address([127, 0, 0, 0])),
        _ => to.differs(Tuple::new().address(Ipv6Addr::LOCALHOST)),
    };
    vec![Value::DestinationType.equals(Tuple::new().word(Value::LOCAL)), elsewhere]
}

/// The mask of a prefix, unless it covers the whole address.
#[must_use]
pub fn mask(family: IpFamily, length: u8) -> Option<Tuple> {
    let mask: IpAddr = match family {
        IpFamily::IPv4 => Ipv4Net::new([0; 4].into(), length).ok()?.netmask().into(),
        IpFamily::IPv6 => Ipv6Net::new(Ipv6Addr::UNSPECIFIED, length).ok()?.netmask().into(),
    };
    let whole = match family {
        IpFamily::IPv4 => 32,
        IpFamily::IPv6 => 128,
    };
    (length < whole).then(|| Tuple::new().address(mask))
}
