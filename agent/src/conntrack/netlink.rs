//! The socket to the kernel's netfilter subsystem, and what can go wrong with it.
//!
//! In: requests as bytes. Out: datagrams as bytes, or the kernel's error number. [`RunError`] says in words what to do.

use std::io;
use std::os::fd::AsRawFd;

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use thiserror::Error;

use super::run::Report;
use super::wire::WireError;
use crate::netlink::socket;

/// Room for the answers to a batch of deletions; a dump waits for its reader by itself.
const RECEIVE_BUFFER: usize = 1024 * 1024;

/// Sends requests and receives datagrams, one after the other.
pub(super) trait Transport {
    fn send(&mut self, message: &[u8]) -> Result<(), Errno>;
    /// The size of the datagram, which is larger than the buffer if it did not fit.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, Errno>;
}

/// A netlink socket in the network namespace of the thread that opened it.
pub(super) struct Socket(netlink_sys::Socket);

impl Socket {
    pub(super) fn open() -> Result<Self, Errno> {
        // The usual size is enough for a batch; more is only safer.
        socket::open(NETLINK_NETFILTER, None, Some(RECEIVE_BUFFER)).map(Self)
    }
}

impl Transport for Socket {
    fn send(&mut self, message: &[u8]) -> Result<(), Errno> {
        // The kernel takes a netlink message whole or not at all.
        send(self.0.as_raw_fd(), message, MsgFlags::empty()).map(|_| ())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, Errno> {
        recv(self.0.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC)
    }
}

/// A run that did not look at everything, or could not delete everything. The next one starts over.
#[derive(Clone, Debug, Error)]
#[error("connection tracking of {:?}: {cause}", report.family)]
pub struct RunError {
    /// What was done before it failed.
    pub report: Box<Report>,
    /// Why it failed.
    #[source]
    pub cause: Cause,
}

/// Why a run failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Cause {
    /// No socket.
    #[error("cannot open a netlink socket: {}", advice(*.0))]
    Open(Errno),
    /// The socket failed.
    #[error("{doing} failed: {}", advice(*.errno))]
    Socket {
        /// What was being done.
        doing: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel does not list its entries.
    #[error("the kernel does not list its entries: {}", advice(*.0))]
    DumpRefused(Errno),
    /// The kernel did not delete some entries.
    #[error("the kernel did not delete {count} stale entries: {}", advice(*.errno))]
    DeleteRefused {
        /// How many.
        count: u64,
        /// The first error.
        errno: Errno,
    },
    /// Every attempt to list the entries was disturbed.
    #[error("listing entries was disturbed {0} times; the next sync tries again")]
    Disturbed(u32),
    /// A datagram larger than any that the kernel sends.
    #[error("a datagram of {0} bytes from the kernel; report this with the kernel's version")]
    TooLarge(usize),
    /// The framing of messages is broken.
    #[error("{0}; report this with the kernel's version")]
    Wire(#[from] WireError),
}

/// The error, and what to do about it.
fn advice(errno: Errno) -> String {
    let todo = match errno {
        Errno::EPERM | Errno::EACCES => "the agent needs the capability NET_ADMIN in the host's network",
        Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT | Errno::EINVAL | Errno::EOPNOTSUPP => {
            "load the kernel module nf_conntrack_netlink on the node"
        }
        Errno::EAGAIN => "the kernel did not answer in time; the next sync tries again",
        _ => "the next sync tries again",
    };
    format!("{}: {todo}", io::Error::from(errno))
}

#[cfg(test)]
mod tests {
    use pointsman_crds::proxy_node_status::IpFamily;

    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let report = Box::new(Report::new(IpFamily::IPv4));
        let said = |cause| RunError { report: report.clone(), cause }.to_string();
        assert!(said(Cause::Open(Errno::EPERM)).contains("NET_ADMIN"));
        assert!(said(Cause::DumpRefused(Errno::EINVAL)).contains("nf_conntrack_netlink"));
        let refused = said(Cause::DeleteRefused { count: 3, errno: Errno::EBUSY });
        assert!(refused.contains("IPv4") && refused.contains("3 stale entries"), "{refused}");
        assert!(said(Cause::Socket { doing: "receiving", errno: Errno::EAGAIN }).contains("in time"));
    }
}
