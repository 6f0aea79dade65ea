//! Every name, address and path of a cluster, derived from its name and slot.
//!
//! In: a name and a slot. Out: addresses that no other slot uses, and names that say whose they are. Because
//! everything is derived, what a killed `up` left can be found without a list of it.
//!
//! ```text
//!            root namespace                fabric namespace                 node namespaces
//!   etcd, API server, … pmS ═══════ uplink ─ br0 (gateway, forwards nothing) ─ eth0  node1: containerd, kubelet
//!                                              ├────────────────────────────── eth0  node2: …
//!                                              └────────────────────────────── eth0  client: outside the nodes
//! ```
//! The bridge has a namespace of its own so that the firewall of the machine (`bridge-nf-call-iptables`) has no
//! say in what passes between nodes. The machine routes nothing but the nodes' network, and forwards nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use anyhow::{Result, ensure};

/// How many clusters a machine can hold.
pub const SLOTS: u8 = 16;

/// How many nodes a cluster can have, a virtual machine among them.
pub const MAX_NODES: u8 = 99;

/// The folder of all clusters.
pub const ROOT: &str = "/var/lib/pointsman-cluster";

/// The names, addresses and paths of one cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    name: String,
    slot: u8,
}

impl Layout {
    /// The layout of the cluster `name` in `slot`.
    pub fn new(name: &str, slot: u8) -> Result<Self> {
        check_name(name)?;
        ensure!(slot < SLOTS, "slot {slot}: there are {SLOTS}");
        Ok(Self { name: name.to_owned(), slot })
    }

    /// The cluster's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The slot.
    #[must_use]
    pub fn slot(&self) -> u8 {
        self.slot
    }

    /// The folder that holds everything of the cluster.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        dir(&self.name)
    }

    /// The folder of a node.
    #[must_use]
    pub fn node_dir(&self, node: &str) -> PathBuf {
        self.dir().join("nodes").join(node)
    }

    /// The name of the node with this number, counted from 1.
    #[must_use]
    pub fn node_name(number: u8) -> String {
        format!("node{number}")
    }

    /// The file that a network namespace is mounted on: `fabric`, `client` or a node.
    #[must_use]
    pub fn netns(&self, of: &str) -> PathBuf {
        self.dir().join("ns").join(of)
    }

    /// The file that a node's mount namespace is mounted on.
    #[must_use]
    pub fn mntns(&self, node: &str) -> PathBuf {
        self.dir().join("ns").join(format!("{node}.mnt"))
    }

    /// The name of the cluster's cgroup, in every hierarchy.
    #[must_use]
    pub fn cgroup(&self) -> String {
        cgroup(&self.name)
    }

    /// The one link in the root namespace.
    #[must_use]
    pub fn host_link(&self) -> String {
        format!("pm{}", self.slot)
    }

    /// A loopback address of the root namespace, for what only the control plane's own components need.
    #[must_use]
    pub fn loopback(&self) -> Ipv4Addr {
        Ipv4Addr::new(127, 77, self.slot, 1)
    }

    /// The API server's address: the machine's, on the nodes' network.
    #[must_use]
    pub fn host(&self) -> Addresses {
        self.on_node_network(1)
    }

    /// The address of the client outside the nodes.
    #[must_use]
    pub fn client(&self) -> Addresses {
        self.on_node_network(2)
    }

    /// The default gateway of nodes and client; it drops what it gets, as nothing here leads further.
    #[must_use]
    pub fn gateway(&self) -> Addresses {
        self.on_node_network(254)
    }

    /// The addresses of a node.
    #[must_use]
    pub fn node(&self, number: u8) -> Addresses {
        self.on_node_network(number + 10)
    }

    fn on_node_network(&self, host: u8) -> Addresses {
        Addresses {
            v4: Ipv4Addr::new(10, 208, self.slot, host),
            v6: Ipv6Addr::new(0xfd10, 0xd0, self.slot.into(), 0, 0, 0, 0, host.into()),
        }
    }

    /// The networks of one node's pods.
    #[must_use]
    pub fn node_pods(&self, number: u8) -> Networks {
        Networks {
            v4: format!("10.{}.{number}.0/24", 224 + self.slot),
            v6: format!("fd10:e0:{:x}:{number:x}::/64", self.slot),
        }
    }

    /// The networks of all pods.
    #[must_use]
    pub fn pods(&self) -> Networks {
        Networks { v4: format!("10.{}.0.0/16", 224 + self.slot), v6: format!("fd10:e0:{:x}::/48", self.slot) }
    }

    /// The networks of services.
    #[must_use]
    pub fn services(&self) -> Networks {
        let Addresses { v4, v6 } = self.service(0);
        Networks { v4: format!("{v4}/16"), v6: format!("{v6}/112") }
    }

    /// The service address with this number.
    #[must_use]
    pub fn service(&self, number: u8) -> Addresses {
        Addresses {
            v4: Ipv4Addr::new(10, 240 + self.slot, 0, number),
            v6: Ipv6Addr::new(0xfd10, 0xf0, self.slot.into(), 0, 0, 0, 0, number.into()),
        }
    }

    /// The cluster's DNS server.
    #[must_use]
    pub fn dns(&self) -> Addresses {
        self.service(10)
    }
}

/// An address of each family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// IPv4.
    pub v4: Ipv4Addr,
    /// IPv6.
    pub v6: Ipv6Addr,
}

impl Addresses {
    /// Both, IPv4 first.
    #[must_use]
    pub fn both(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }
}

/// A network of each family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Networks {
    /// IPv4.
    pub v4: String,
    /// IPv6.
    pub v6: String,
}

impl Networks {
    /// Both, separated by a comma, IPv4 first.
    #[must_use]
    pub fn list(&self) -> String {
        format!("{},{}", self.v4, self.v6)
    }
}

/// Refuses a name that cannot be part of a path, a cgroup and a socket address.
pub fn check_name(name: &str) -> Result<()> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    ensure!(
        (1..=24).contains(&name.len()) && name.chars().all(fine) && !name.starts_with('-'),
        "{name:?}: a cluster's name has 1 to 24 lower-case letters, digits and dashes"
    );
    Ok(())
}

/// The folder of the cluster `name`.
#[must_use]
pub fn dir(name: &str) -> PathBuf {
    PathBuf::from(ROOT).join(name)
}

/// The cgroup of the cluster `name`.
#[must_use]
pub fn cgroup(name: &str) -> String {
    format!("pointsman-{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_share_nothing() {
        let (first, last) = (Layout::new("a", 0).unwrap(), Layout::new("b", SLOTS - 1).unwrap());
        assert_eq!(first.services().list(), "10.240.0.0/16,fd10:f0::/112");
        assert_eq!(last.services().list(), "10.255.0.0/16,fd10:f0:f::/112");
        assert_eq!(last.pods().list(), "10.239.0.0/16,fd10:e0:f::/48");
        assert_eq!(first.node_pods(2).list(), "10.224.2.0/24,fd10:e0:0:2::/64");
        assert_eq!(first.node(MAX_NODES).v4, Ipv4Addr::new(10, 208, 0, 109));
        assert!(last.host_link().len() < 16);
    }

    #[test]
    fn long_names_fit_a_socket_address() {
        let layout = Layout::new("a23456789012345678901234", 1).unwrap();
        let socket = layout.node_dir(&Layout::node_name(MAX_NODES)).join("containerd.sock.ttrpc");
        assert!(socket.as_os_str().len() < 108, "{}", socket.display());
    }

    #[test]
    fn names_are_checked() {
        for wrong in ["", "..", "a/b", "A", "-a", "a b", "a234567890123456789012345"] {
            assert!(check_name(wrong).is_err(), "{wrong}");
        }
    }
}
