//! Notices changes of a table by somebody else.
//!
//! In: the kernel's notices about transactions. Out: a word whenever one of them touched our table and was not ours. The
//! notices are only a reason to read the table: what they say beyond that is not looked at.

use std::io;
use std::os::fd::AsRawFd as _;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, setsockopt, socket, sockopt,
};
use pointsman_crds::proxy_node_status::IpFamily;
use tokio::net::UnixDatagram;

use super::client::Port;
use super::connection::errno;
use super::error::Error;
use super::ruleset::Table;
use super::wire;
use crate::netlink::{self, Body, IPV4, IPV6};

/// `NFNLGRP_NFTABLES`, the seventh group.
const GROUPS: u32 = 1 << 6;
/// The kernel sends notices up to the size of a page.
const DATAGRAM: usize = 64 * 1024;
/// A limit, not an allocation: a load of 20,000 elements causes notices of some MiB.
const RECEIVE_BUFFER: usize = 32 << 20;

/// A subscription.
pub struct Watch {
    socket: UnixDatagram,
    table: Table,
    own: Port,
    buffer: Vec<u8>,
}

/// Why the table should be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// Somebody else has changed it.
    Changed,
    /// Notices were lost; it may have been changed.
    Overrun,
}

impl Watch {
    /// Subscribes to changes of `table` that are not made by the client with the port `own`.
    pub fn open(table: Table, own: Port) -> Result<Self, Error> {
        let socket = subscribe().map_err(|error| Error::Open(errno(&error)))?;
        Ok(Self { socket, table, own, buffer: vec![0; DATAGRAM] })
    }

    /// Waits until the table was touched by somebody else. Nothing is lost if this is given up and called again.
    pub async fn changed(&mut self) -> Result<Touched, Error> {
        loop {
            let received = self.socket.recv(&mut self.buffer).await;
            match received.map_err(|error| errno(&error)) {
                Ok(length) => {
                    let datagram = self.buffer.get(..length).unwrap_or_default();
                    if touches(datagram, &self.table, &self.own)? {
                        return Ok(Touched::Changed);
                    }
                }
                Err(Errno::ENOBUFS) => return Ok(Touched::Overrun),
                Err(errno) => return Err(Error::Socket { doing: "reading notices", errno }),
            }
        }
    }
}

/// As for notices about addresses: a netlink socket in the clothes of one that tokio knows. All that is called on it is `recv`.
fn subscribe() -> io::Result<UnixDatagram> {
    let notices = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkNetFilter,
    )?;
    // Not allowed in every namespace; then large loads of our own cause an overrun.
    let _ = setsockopt(&notices, sockopt::RcvBufForce, &RECEIVE_BUFFER);
    bind(notices.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
    UnixDatagram::from_std(std::os::unix::net::UnixDatagram::from(notices))
}

/// Whether a datagram tells of a change of this table by somebody else.
fn touches(datagram: &[u8], table: &Table, own: &Port) -> Result<bool, Error> {
    let family = match table.family {
        IpFamily::IPv4 => IPV4,
        IpFamily::IPv6 => IPV6,
    };
    for message in netlink::messages(datagram) {
        let message = message?;
        match message.body {
            Body::Other { kind, payload } if kind != wire::NEW_GENERATION && !own.is(message.port) => {
                let (of, name) = wire::table_of(payload)?;
                if of == family && name == table.name {
                    return Ok(true);
                }
            }
            _ => {}
        }
    }
    Ok(false)
}
