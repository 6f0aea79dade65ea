//! Who is in the scenarios: the node under test, its pods, another node with pods, and clients outside.
//!
//! In: a name. Out: its addresses, the namespace that it lives in, and the interface at which its packets reach the node.
//! The IPv6 address of everything is its IPv4 address, octet by octet ([`twin`]), so that a scenario names one and runs
//! in both.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pointsman_crds::proxy_node_status::IpFamily;

/// The Node under test, and the other one, as endpoints carry them.
pub const NODES: [&str; 2] = ["node", "other"];

/// Somebody who sends or answers.
#[derive(Debug, PartialEq, Eq)]
pub struct Host {
    pub name: &'static str,
    address: [u8; 4],
    /// The namespace it lives in.
    pub namespace: &'static str,
    /// The interface of the node under test that leads to it; `None`: the node itself.
    pub interface: Option<&'static str>,
    /// The Node that it runs on as an endpoint, as an index of [`NODES`].
    pub node: Option<usize>,
}

const fn host(
    name: &'static str,
    address: [u8; 4],
    namespace: &'static str,
    interface: Option<&'static str>,
    node: Option<usize>,
) -> Host {
    Host { name, address, namespace, interface, node }
}

/// Everybody. Pods that share a namespace cannot be client and endpoint of each other, unless masqueraded.
pub const HOSTS: [Host; 15] = [
    host("node", [192, 168, 0, 2], "node", None, Some(0)),
    host("second", [192, 168, 1, 2], "node", None, None),
    host("localhost", [127, 0, 0, 1], "node", None, None),
    host("pod", [10, 180, 0, 9], "pod", Some("pod0"), Some(0)),
    host("a", [10, 180, 0, 1], "a", Some("pod1"), Some(0)),
    host("b", [10, 180, 0, 2], "b", Some("pod2"), Some(0)),
    host("c", [10, 180, 0, 3], "a", Some("pod1"), Some(0)),
    host("d", [10, 180, 0, 4], "b", Some("pod2"), Some(0)),
    host("other", [192, 168, 0, 3], "other", Some("net0"), Some(1)),
    host("r", [10, 180, 1, 1], "far", Some("net0"), Some(1)),
    host("s", [10, 180, 1, 2], "far", Some("net0"), Some(1)),
    host("t", [10, 180, 1, 3], "far", Some("net0"), Some(1)),
    host("remote", [10, 180, 1, 9], "far", Some("net0"), Some(1)),
    host("client", [203, 0, 113, 2], "client", Some("out0"), None),
    host("blocked", [203, 0, 113, 130], "client", Some("out0"), None),
];

/// The address of the node that its pods have as gateway, and see as source of what is masqueraded.
const GATEWAY: [u8; 4] = [10, 180, 0, 254];

/// Blocks of the pods of each of [`NODES`].
pub const POD_CIDRS: [&str; 2] = ["10.180.0.0/24", "10.180.1.0/24"];

/// The block that ClusterIPs are taken from.
pub const SERVICE_CIDR: &str = "172.30.0.0/16";

impl Host {
    /// The host of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        HOSTS.iter().find(|host| host.name == name)
    }

    pub fn address(&self, family: IpFamily) -> IpAddr {
        in_family(Ipv4Addr::from(self.address), family)
    }
}

/// The node's own addresses in a family, primary first; without those of loopback.
pub fn node_addresses(family: IpFamily) -> Vec<IpAddr> {
    let own = HOSTS.iter().filter(|host| host.namespace == "node" && host.name != "localhost");
    let gateway = in_family(Ipv4Addr::from(GATEWAY), family);
    own.map(|host| host.address(family)).chain([gateway]).collect()
}

pub fn gateway(family: IpFamily) -> IpAddr {
    in_family(Ipv4Addr::from(GATEWAY), family)
}

fn in_family(address: Ipv4Addr, family: IpFamily) -> IpAddr {
    match family {
        IpFamily::IPv4 => address.into(),
        IpFamily::IPv6 => twin(address).into(),
    }
}

/// The IPv6 address that goes with an IPv4 address: `a.b.c.d` is `fd00:a:b:c::d`.
pub fn twin(address: Ipv4Addr) -> Ipv6Addr {
    if address.is_loopback() {
        return Ipv6Addr::LOCALHOST;
    }
    let [a, b, c, d] = address.octets().map(u16::from);
    Ipv6Addr::new(0xfd00, a, b, c, 0, 0, 0, d)
}

/// The IPv6 block that holds exactly the twins of an IPv4 block.
pub fn twin_block(block: Ipv4Net) -> Ipv6Net {
    let block = block.trunc();
    let length = match block.prefix_len() {
        0 => return Ipv6Net::default(),
        // The first three octets are the second to fourth groups of 16 bits, of which the upper 8 are zero.
        length @ 1..=24 => {
            let (whole, rest) = (length / 8, length % 8);
            16 * (whole + 1) + if rest == 0 { 0 } else { 8 + rest }
        }
        length => 96 + length,
    };
    Ipv6Net::new_assert(twin(block.network()), length)
}

/// A block and its twin.
pub fn both(block: &str) -> [IpNet; 2] {
    let block: Ipv4Net = block.parse().expect("a constant");
    [block.into(), twin_block(block).into()]
}
