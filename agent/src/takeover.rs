//! What kube-proxy's other modes have left in the kernel, and how it goes.
//!
//! In: a node that serves with our rules, read back, and what its plan knows ([`Known`]). Out: kube-proxy's nftables tables are
//! gone, and of its IPVS mode the virtual servers, the device with the addresses, the chains and the ipsets, in this order:
//! while the addresses are local, the chains keep packets to undefined ports away from the node's own daemons. Everything is
//! known by kube-proxy's own names and addresses; nothing else is touched. What its iptables mode has left needs none of
//! this: it is taken over chain by chain.
//!
//! New connections are ours already, since a DNAT comes before IPVS (reference §3). Those that run through IPVS end when its
//! servers go, so all of it waits for them, up to [`DRAIN_AT_MOST`]. The node's own connections have such an address as their
//! source, unless its route names another: it gets one first (docs/adr/0013-local-routes.md).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;

use nix::net::if_::if_nametoindex;
use pointsman_crds::proxy_node_status::IpFamily;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::conntrack::{self, Entry};
use crate::iptables::{self, Tools};
use crate::ipvs::client::Connection;
use crate::ipvs::device::{self, Change, Device, DeviceError};
use crate::ipvs::server::{Key, Operation};
use crate::ipvs::{self, DRAIN_AT_MOST};
use crate::model::{Protocol, family_of};
use crate::nftables::client;
use crate::nftables::error::Error;
use crate::nftables::ruleset::Table;
use crate::plan::Plan;

/// kube-proxy's tables in mode nftables.
const TABLE: &str = "kube-proxy";
/// Of the thread: tests have a network namespace for each.
const VIRTUAL_SERVERS: &str = "/proc/thread-self/net/ip_vs";

/// What the plan knows of kube-proxy's virtual servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The node's own address in each family.
    pub node: BTreeMap<IpFamily, IpAddr>,
    /// NodePorts of the Services.
    pub node_ports: BTreeSet<(Protocol, u16)>,
}

impl Known {
    /// Of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let mut known = Self::default();
        for family in plan.families() {
            let primary = plan.node(*family).and_then(|node| node.primary);
            known.node.extend(primary.map(|address| (*family, address)));
            let ports = plan.ports(*family);
            known
                .node_ports
                .extend(ports.filter_map(|(id, port)| port.node_port.map(|number| (id.protocol, number))));
        }
        known
    }
}

/// What is left after all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing of kube-proxy.
    Nothing,
    /// Everything of mode ipvs: connections still run through it.
    Draining,
}

/// What could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// A table that catches packets as ours do.
    #[error(
        "kube-proxy's table {TABLE} cannot be removed ({0}), and packets may meet it; stop kube-proxy, and delete the table"
    )]
    Table(Error),
    /// Something of mode ipvs. Packets meet our rules first.
    #[error(
        "{what} of kube-proxy's mode ipvs cannot be removed: {why}; run kube-proxy --cleanup on the node"
    )]
    Ipvs {
        /// What.
        what: &'static str,
        /// Why.
        why: String,
    },
}

/// The removal on one node, which may take more than one attempt.
#[derive(Clone, Debug, Default)]
pub struct Takeover {
    /// When connections were seen first.
    draining: Option<Instant>,
}

impl Takeover {
    /// Removes what is left; of mode ipvs only if there are tools for its chains and sets. What is not there is no error.
    pub async fn remove(&mut self, tools: Option<&Tools>, known: &Known) -> Result<Left, TakeoverError> {
        remove_tables().await?;
        match tools {
            Some(tools) => self.remove_ipvs(tools, known).await,
            None => Ok(Left::Nothing),
        }
    }

    /// As [`Self::remove`] on a node in our mode ipvs, which has taken over virtual servers and addresses by itself.
    pub async fn remove_beside_ipvs(tools: &Tools) -> Result<(), TakeoverError> {
        let failed = |what| move |why: String| TakeoverError::Ipvs { what, why };
        remove_tables().await?;
        let sets = iptables::kube_proxy_sets().await;
        if !sets.is_empty() {
            remove_rules(tools, &sets).await.map_err(failed("the chains and ipsets"))?;
        }
        Ok(())
    }

    async fn remove_ipvs(&mut self, tools: &Tools, known: &Known) -> Result<Left, TakeoverError> {
        let failed = |what| move |why: String| TakeoverError::Ipvs { what, why };
        let sets = iptables::kube_proxy_sets().await;
        let there = if_nametoindex(device::NAME).is_ok();
        let device = there.then(|| with_sources(known)).transpose();
        let device = device.map_err(|error| failed("the device")(error.to_string()))?;
        let (bound, others) = match &device {
            Some((_, local)) => (local.bound.clone(), local.others.clone()),
            None => (BTreeSet::new(), known.node.values().copied().collect()),
        };
        let (theirs, connection) = virtual_servers(&bound, &others, known)
            .map_err(|error| failed("the virtual servers")(error.to_string()))?;
        if device.is_none() && sets.is_empty() && theirs.is_empty() {
            return Ok(Left::Nothing);
        }
        let since = *self.draining.get_or_insert_with(Instant::now);
        if since.elapsed() < DRAIN_AT_MOST {
            let through = ipvs::through(&theirs);
            let through = through.map_err(|error| failed("the virtual servers")(error.to_string()))?;
            if through > 0 || from_any(&bound).await {
                info!(through, "kube-proxy's mode ipvs is left in place while connections run through it");
                return Ok(Left::Draining);
            }
        } else {
            warn!("connections through kube-proxy's mode ipvs are cut: they have had their time");
        }
        if let Some(mut connection) = connection {
            let operations: Vec<_> = theirs.iter().copied().map(Operation::RemoveServer).collect();
            let removed = connection.apply(&operations);
            removed.map_err(|error| failed("the virtual servers")(error.to_string()))?;
        }
        if let Some((device, _)) = device {
            device.remove().map_err(|error| failed("the device")(error.to_string()))?;
        }
        remove_rules(tools, &sets).await.map_err(failed("the chains and ipsets"))?;
        info!(servers = theirs.len(), sets = sets.len(), "what kube-proxy's mode ipvs has left is removed");
        Ok(Left::Nothing)
    }
}

async fn remove_rules(tools: &Tools, sets: &[String]) -> Result<(), String> {
    iptables::remove_ipvs_chains(tools).await.map_err(|error| error.to_string())?;
    iptables::destroy_sets(sets).await.map_err(|error| error.to_string())
}

/// Removes kube-proxy's tables of mode nftables.
pub async fn remove_tables() -> Result<(), TakeoverError> {
    let theirs = |family| Table::new(family, TABLE);
    let families = client::remove(&[IpFamily::IPv4, IpFamily::IPv6], theirs).await;
    let families = families.map_err(|(_, error)| TakeoverError::Table(error))?;
    if !families.is_empty() {
        info!(?families, "kube-proxy's table {TABLE} of mode nftables removed");
    }
    Ok(())
}

/// kube-proxy's device, with a node address as source of the route to each of its addresses.
fn with_sources(known: &Known) -> Result<(Device, device::Local), DeviceError> {
    // It may be off, and then takes no routes.
    let mut device = Device::open()?;
    let local = device.read()?;
    let changes: Vec<_> = local
        .bound
        .iter()
        .filter_map(|address| {
            let source = known.node.get(&family_of(*address)).copied();
            let has = local.routes.get(address).copied().flatten();
            (source.is_some() && source != has).then_some(Change::Change { address: *address, source })
        })
        .collect();
    if let Err(error) = device.apply(&changes) {
        warn!("connections of this node to kube-proxy's virtual servers will be cut: {error}");
    }
    Ok((device, local))
}

/// kube-proxy's virtual servers, and a connection to remove them with. Others are named, and left.
fn virtual_servers(
    bound: &BTreeSet<IpAddr>,
    node: &BTreeSet<IpAddr>,
    known: &Known,
) -> Result<(BTreeSet<Key>, Option<Connection>), ipvs::Error> {
    // Asking for them would load the kernel's module.
    if !fs::exists(VIRTUAL_SERVERS).unwrap_or_default() {
        return Ok((BTreeSet::new(), None));
    }
    let mut connection = Connection::open()?;
    let servers = connection.servers()?.unwrap_or_default();
    let keys = servers.iter().map(|server| server.key);
    let (theirs, others): (BTreeSet<_>, BTreeSet<_>) =
        keys.partition(|key| is_kube_proxys(key, bound, node, known));
    if let Some(first) = others.first() {
        warn!(
            count = others.len(),
            "IPVS virtual servers that are not known to be kube-proxy's are left on this node, such as {first}; if \
             nobody needs them, remove them with ipvsadm"
        );
    }
    Ok((theirs, Some(connection)))
}

/// Whether it is at an address that kube-proxy has bound, or is a NodePort of a Service at an address of the node.
#[must_use]
pub fn is_kube_proxys(key: &Key, bound: &BTreeSet<IpAddr>, node: &BTreeSet<IpAddr>, known: &Known) -> bool {
    match key {
        Key::Address { protocol, address } => {
            bound.contains(&address.ip())
                || node.contains(&address.ip()) && known.node_ports.contains(&(*protocol, address.port()))
        }
        Key::Mark { .. } => false,
    }
}

/// Whether a connection of the node has one of these addresses as its source.
async fn from_any(addresses: &BTreeSet<IpAddr>) -> bool {
    for family in [IpFamily::IPv4, IpFamily::IPv6] {
        let addresses: BTreeSet<_> =
            addresses.iter().copied().filter(|address| family_of(*address) == family).collect();
        if addresses.is_empty() {
            continue;
        }
        let from = move |entry: &Entry| {
            entry.is_open_connection() && addresses.contains(&entry.original.source.ip())
        };
        let asked = tokio::task::spawn_blocking(move || conntrack::has(family, from)).await;
        // A kernel that does not list its connections keeps nothing waiting for ever: there is a limit.
        if !matches!(asked, Ok(Ok(false))) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipvs_only_virtual_servers_of_kube_proxy_are_its() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let bound = [ip("10.96.0.10"), ip("fd00:96::10")].into();
        let node = [ip("192.0.2.1"), ip("198.51.100.7")].into();
        let known = Known { node_ports: [(Protocol::Tcp, 30_080)].into(), ..Known::default() };
        let is = |protocol, address| is_kube_proxys(&Key::at(protocol, address), &bound, &node, &known);
        assert!(is(Protocol::Tcp, "10.96.0.10:80") && is(Protocol::Udp, "[fd00:96::10]:53"));
        assert!(is(Protocol::Tcp, "192.0.2.1:30080") && is(Protocol::Tcp, "198.51.100.7:30080"));
        assert!(!is(Protocol::Udp, "192.0.2.1:30080"), "another protocol");
        assert!(!is(Protocol::Tcp, "192.0.2.1:443"), "a load balancer that somebody runs on this node");
        assert!(!is(Protocol::Tcp, "203.0.113.80:80") && !is(Protocol::Tcp, "203.0.113.80:30080"));
        let mark = Key::Mark { family: IpFamily::IPv4, mark: 1 };
        assert!(!is_kube_proxys(&mark, &bound, &node, &known));
    }
}
