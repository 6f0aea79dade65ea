//! What happens to the tables of nf_tables, as the kernel tells whoever listens; and how a network device is deleted.
//!
//! In: the kernel's notices about committed transactions, those of all tables in this network namespace. Out: [`Notice`]s,
//! each with the writer's netlink port, by which own writes are told from those of others; and whether some were lost.
//! iptables-nft writes nf_tables, so its rules are in here; those of iptables-legacy are not, and neither are ipsets.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt, socket,
    sockopt,
};
use pointsman_crds::proxy_node_status::IpFamily;
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use crate::netlink::socket::DATAGRAM;
use crate::netlink::{Body, IPV4, IPV6, Message, NETFILTER_HEADER, WireError, attributes, messages};

/// `NFNLGRP_NFTABLES` of `linux/netfilter/nfnetlink.h`, as a bit.
const GROUP: u32 = 1 << (7 - 1);
/// Room for what one large transaction of iptables-nft announces (seen: 81 datagrams for 1,200 chains and rules).
const RECEIVE_BUFFER: usize = 1024 * 1024;

/// `NFNL_SUBSYS_NFTABLES`, the high byte of a message's type.
const NFTABLES: u16 = 10 << 8;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const DELCHAIN: u16 = 5;
const NEWRULE: u16 = 6;
const DELRULE: u16 = 8;
/// `NFTA_CHAIN_TABLE` and its like: the first attribute of everything that is in a table.
const TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const RULE_CHAIN: u16 = 2;

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A table was deleted.
    TableDeleted,
    /// A chain was added or changed.
    ChainAdded,
    /// A chain was deleted.
    ChainDeleted,
    /// A rule was added.
    RuleAdded,
    /// A rule was deleted.
    RuleDeleted,
}

/// Something that was done to a table of the families IPv4 and IPv6. Tables of other families, and sets, are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice<'a> {
    /// The netlink port of whoever did it. For a process with one socket that is its id.
    pub writer: u32,
    /// The table's family.
    pub family: IpFamily,
    /// What was done.
    pub event: Event,
    /// The table.
    pub table: &'a str,
    /// The chain; empty for tables.
    pub chain: &'a str,
}

/// A subscription to the notices of a network namespace.
///
/// tokio has no netlink socket, and registering a bare descriptor with it needs unsafe code. A datagram socket of another
/// family serves as well: it only says when there is something to read.
#[derive(Debug)]
pub struct Notices(UnixDatagram);

impl Notices {
    /// Subscribes, in the network namespace of the calling thread and the runtime that it is in.
    pub fn subscribe() -> io::Result<Self> {
        let notices = listen(SockFlag::SOCK_NONBLOCK, RECEIVE_BUFFER)?;
        UnixDatagram::from_std(notices.into()).map(Self)
    }

    /// Waits until there may be notices to take.
    pub async fn wait(&self) {
        if self.0.readable().await.is_err() {
            // Only when the runtime ends.
            std::future::pending::<()>().await;
        }
        // From here on only what is new counts; what is there, the caller takes.
        let nothing = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
        let _ = self.0.try_io(Interest::READABLE, nothing);
    }

    /// Takes all notices that are there. Returns whether that is everything that has happened; otherwise some were lost.
    pub fn take(&self, mut each: impl FnMut(&Notice<'_>)) -> bool {
        let mut buffer = vec![0; DATAGRAM];
        let mut complete = true;
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_TRUNC) {
                Ok(length) => complete &= read(buffer.get(..length), &mut each).is_ok(),
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => complete = false,
                Err(Errno::EAGAIN) => return complete,
                Err(_) => return false,
            }
        }
    }
}

/// A socket that gets the notices of the calling thread's network namespace, as far as they fit into so many bytes.
pub(crate) fn listen(flags: SockFlag, receive_buffer: usize) -> io::Result<OwnedFd> {
    let notices = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC | flags,
        SockProtocol::NetlinkNetFilter,
    )?;
    // With less room more is lost, which is noticed.
    let _ = setsockopt(&notices, sockopt::RcvBufForce, &receive_buffer);
    bind(notices.as_raw_fd(), &NetlinkAddr::new(0, GROUP))?;
    Ok(notices)
}

fn read(datagram: Option<&[u8]>, each: &mut impl FnMut(&Notice<'_>)) -> Result<(), WireError> {
    let datagram = datagram.ok_or(WireError::Missing("its end"))?;
    for message in messages(datagram) {
        if let Some(notice) = notice(&message?)? {
            each(&notice);
        }
    }
    Ok(())
}

fn notice<'a>(message: &Message<'a>) -> Result<Option<Notice<'a>>, WireError> {
    let Body::Other { kind, payload } = message.body else { return Ok(None) };
    let (event, name) = match kind.wrapping_sub(NFTABLES) {
        DELTABLE => (Event::TableDeleted, None),
        NEWCHAIN => (Event::ChainAdded, Some(CHAIN_NAME)),
        DELCHAIN => (Event::ChainDeleted, Some(CHAIN_NAME)),
        NEWRULE => (Event::RuleAdded, Some(RULE_CHAIN)),
        DELRULE => (Event::RuleDeleted, Some(RULE_CHAIN)),
        _ => return Ok(None),
    };
    let family = match payload.first() {
        Some(&IPV4) => IpFamily::IPv4,
        Some(&IPV6) => IpFamily::IPv6,
        _ => return Ok(None),
    };
    let (mut table, mut chain) = ("", "");
    for attribute in attributes(payload.get(NETFILTER_HEADER..).ok_or(WireError::Missing("a header"))?) {
        let (kind, value) = attribute?;
        if kind == TABLE {
            table = text(value);
        } else if Some(kind) == name {
            chain = text(value);
        }
    }
    Ok(Some(Notice { writer: message.port, family, event, table, chain }))
}

/// Names end with a zero byte. One that is no text is nobody's that we know.
fn text(value: &[u8]) -> &str {
    std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{Encoder, Header};

    fn notice_bytes(kind: u16, family: u8, fill: impl FnOnce(&mut Encoder)) -> Vec<u8> {
        let header = Header { kind: NFTABLES + kind, flags: 0, sequence: 0, family, resource: 0 };
        let mut encoder = Encoder::default();
        encoder.message(header, fill);
        let mut bytes = encoder.finish();
        bytes[12..16].copy_from_slice(&77_u32.to_ne_bytes());
        bytes
    }

    fn rule(to: &mut Encoder) {
        to.string(TABLE, "nat");
        to.string(RULE_CHAIN, "KUBE-SERVICES");
    }

    #[test]
    fn notices_say_who_did_what_where() {
        let chain = |to: &mut Encoder| {
            to.string(TABLE, "filter");
            to.attribute(2, &[0; 8]);
            to.string(CHAIN_NAME, "X");
        };
        let new_generation = notice_bytes(15, 0, |to| to.number(1, 0));
        let datagram = [
            notice_bytes(DELRULE, IPV4, rule),
            notice_bytes(NEWCHAIN, IPV6, chain),
            notice_bytes(NEWRULE, 1, rule),
            new_generation,
        ]
        .concat();
        let mut seen = Vec::new();
        read(Some(&datagram), &mut |notice| seen.push(format!("{notice:?}"))).unwrap();
        let rule = Notice {
            writer: 77,
            family: IpFamily::IPv4,
            event: Event::RuleDeleted,
            table: "nat",
            chain: "KUBE-SERVICES",
        };
        let chain =
            Notice { family: IpFamily::IPv6, event: Event::ChainAdded, table: "filter", chain: "X", ..rule };
        assert_eq!(seen, [format!("{rule:?}"), format!("{chain:?}")]);
    }

    #[test]
    fn what_cannot_be_read_counts_as_lost() {
        let rule = notice_bytes(NEWRULE, IPV4, |to| to.string(TABLE, "nat"));
        assert!(read(None, &mut |_| {}).is_err(), "larger than the buffer");
        assert!(read(rule.get(..20), &mut |_| {}).is_err());
        let mut damaged = rule;
        damaged[20] = 200;
        assert!(read(Some(&damaged), &mut |_| {}).is_err());
    }
}
