//! What kube-proxy's other modes have left in the kernel, and how it goes.
//!
//! In: a node that serves with our rules, read back. Out: kube-proxy's nftables tables are gone, and of its IPVS mode the
//! device with the addresses, the chains and the ipsets, in this order: while the addresses are local, the chains keep
//! packets to undefined ports away from the node's own daemons. Everything is known by kube-proxy's own names; nothing else
//! is touched. What its iptables mode has left needs none of this: it is taken over chain by chain.
//!
//! Connections that run through IPVS end when its addresses go, so those wait (reference §3; a DNAT comes before IPVS, so
//! new connections are ours already). Virtual servers stay: see [`Left::VirtualServers`].

use std::fs;

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use pointsman_crds::proxy_node_status::IpFamily;
use thiserror::Error;
use tracing::{info, warn};

use crate::iptables::{self, Tools};
use crate::netfilter;

/// kube-proxy's tables in mode nftables.
const TABLE: &str = "kube-proxy";
/// The device that kube-proxy binds addresses to in mode ipvs.
const DEVICE: &str = "kube-ipvs0";
/// Of the thread: tests have a network namespace for each.
const CONNECTIONS: &str = "/proc/thread-self/net/ip_vs_conn";
const VIRTUAL_SERVERS: &str = "/proc/thread-self/net/ip_vs";

/// What is left after all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// Everything of mode ipvs: connections still run through it.
    Draining,
    /// Virtual servers. They get no packets while our rules take them first; one whose Service is deleted does.
    VirtualServers,
}

/// What could not be removed.
#[derive(Debug, Error)]
pub enum TakeoverError {
    /// A table that catches packets as ours do.
    #[error(
        "kube-proxy's table {TABLE} cannot be removed ({0}), and packets may meet it; stop kube-proxy, and delete the table"
    )]
    Table(Errno),
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

/// Removes what is left; of mode ipvs only if there are tools for its chains and sets. What is not there is no error.
pub async fn remove(tools: Option<&Tools>) -> Result<Left, TakeoverError> {
    for family in [IpFamily::IPv4, IpFamily::IPv6] {
        match netfilter::delete_table(family, TABLE) {
            Ok(()) => info!(?family, "kube-proxy's table {TABLE} of mode nftables removed"),
            // Not there; or a kernel without nf_tables, or without the family.
            Err(
                Errno::ENOENT
                | Errno::EOPNOTSUPP
                | Errno::EAFNOSUPPORT
                | Errno::EPROTONOSUPPORT
                | Errno::EINVAL,
            ) => {}
            Err(errno) => return Err(TakeoverError::Table(errno)),
        }
    }
    let ipvs = |what| move |why: String| TakeoverError::Ipvs { what, why };
    let device = if_nametoindex(DEVICE).ok();
    let sets = match tools {
        Some(tools) => iptables::kube_proxy_sets(tools).await,
        None => Vec::new(),
    };
    if let Some(tools) = tools.filter(|_| device.is_some() || !sets.is_empty()) {
        if connected(&fs::read_to_string(CONNECTIONS).unwrap_or_default()) {
            info!("kube-proxy's mode ipvs is left in place while connections run through it");
            return Ok(Left::Draining);
        }
        if let Some(index) = device {
            netfilter::delete_link(index).map_err(|errno| ipvs("the device")(errno.to_string()))?;
        }
        iptables::remove_ipvs_chains(tools).await.map_err(|error| ipvs("the chains")(error.to_string()))?;
        iptables::destroy_sets(tools, &sets).await.map_err(|error| ipvs("the ipsets")(error.to_string()))?;
        info!(sets = sets.len(), "what kube-proxy's mode ipvs has left is removed");
    }
    if virtual_servers(&fs::read_to_string(VIRTUAL_SERVERS).unwrap_or_default()) {
        warn!(
            "IPVS virtual servers are left on this node; if they are kube-proxy's, remove them with ipvsadm --clear"
        );
        return Ok(Left::VirtualServers);
    }
    Ok(Left::Nothing)
}

/// Whether a TCP connection runs through IPVS: `Pro FromIP FPrt ToIP TPrt DestIP DPrt State Expires …`.
fn connected(table: &str) -> bool {
    table.lines().any(|line| line.split_whitespace().nth(7) == Some("ESTABLISHED"))
}

/// Whether there is a virtual server: a line that begins with its protocol.
fn virtual_servers(table: &str) -> bool {
    table
        .lines()
        .any(|line| ["TCP ", "UDP ", "SCTP "].iter().any(|protocol| line.trim_start().starts_with(protocol)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syn_17_connections_through_ipvs_are_seen() {
        let head = "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n";
        let line = |state| format!("{head}TCP C0A84D02 D1A2 0A600050 0050 0AF4000A 1F90 {state} 899\n");
        assert!(connected(&line("ESTABLISHED")));
        assert!(!connected(&line("TIME_WAIT  ")));
        assert!(!connected(head) && !connected(""));
    }

    #[test]
    fn virtual_servers_are_seen() {
        let head = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n";
        assert!(!virtual_servers(head) && !virtual_servers(""));
        assert!(virtual_servers(&format!("{head}TCP  0A600050:0050 rr\n")));
        assert!(virtual_servers(&format!("{head}UDP  [fd00:0010:0096:0000:0000:0000:0000:000a]:0035 rr\n")));
    }
}
