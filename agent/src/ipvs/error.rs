//! What can go wrong between us and IPVS, and what to do about it.

use std::io;

use nix::errno::Errno;
use thiserror::Error;
use tokio::task::JoinError;

use crate::netlink::socket::{explained, summary};
use crate::netlink::{SocketError, WireError};

/// Why something was not written or read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// No socket.
    #[error("cannot open a netlink socket: {}", advice(*.0))]
    Open(Errno),
    /// The kernel has no IPVS, and could not load it.
    #[error("the kernel has no IPVS; load the kernel module ip_vs on the node")]
    NoIpvs,
    /// The socket failed; which changes were made is unknown.
    #[error("{doing} the kernel failed: {}", advice(*.errno))]
    Socket {
        /// What was being done.
        doing: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused these changes. All others were made.
    #[error("{}", summary(.0, "a change"))]
    Refused(Vec<Refusal>),
    /// The kernel does not tell what it has.
    #[error("the kernel does not tell its {what}: {}", advice(*.errno))]
    NotTold {
        /// What was asked for.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// Virtual servers came or went during every attempt to read them.
    #[error("reading was disturbed {0} times by changes of virtual servers; the next sync tries again")]
    Disturbed(u32),
    /// A message of the kernel that makes no sense.
    #[error("{0}; report this with the kernel's version")]
    Wire(#[from] WireError),
    /// The task that talks to the kernel has ended.
    #[error("the task that talks to the kernel has ended: {0}; the next sync tries again")]
    Ended(String),
}

impl Error {
    /// An answer that is not what was asked for.
    pub(super) fn not_told(what: &'static str, error: &SocketError) -> Self {
        match *error {
            SocketError::Refused { errno, .. } => Self::NotTold { what, errno },
            SocketError::Failed { doing, errno } => Self::Socket { doing, errno },
            SocketError::Wire(error) => error.into(),
        }
    }
}

impl From<JoinError> for Error {
    fn from(error: JoinError) -> Self {
        Self::Ended(error.to_string())
    }
}

/// A change that the kernel refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("to {what}: {}{}", advice(*.errno), explained(detail.as_ref()))]
pub struct Refusal {
    /// Its place among the changes.
    pub index: usize,
    /// What was to be done.
    pub what: String,
    /// The kernel's error.
    pub errno: Errno,
    /// What the kernel says about it.
    pub detail: Option<String>,
}

/// The error, and what to do about it.
pub(super) fn advice(errno: Errno) -> String {
    let todo = match errno {
        Errno::EPERM | Errno::EACCES => "the agent needs the capability NET_ADMIN in the host's network",
        Errno::EAFNOSUPPORT => "this kernel's IPVS has no IPv6",
        Errno::EOPNOTSUPP => "load the kernel modules dummy and ip_vs on the node",
        // The only thing that a new virtual server refers to.
        Errno::ENOENT => "the scheduler's kernel module is missing on the node, or it was removed meanwhile",
        Errno::ESRCH => "somebody else has removed the virtual server; the next sync adds it again",
        Errno::ENOMEM | Errno::ENOBUFS => "the kernel is out of memory for this; the next sync tries again",
        Errno::EAGAIN => "the kernel did not answer in time; the next sync tries again",
        _ => "the next sync tries again",
    };
    format!("{}: {todo}", io::Error::from(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        assert!(Error::NoIpvs.to_string().contains("load the kernel module ip_vs"));
        assert!(Error::Open(Errno::EPERM).to_string().contains("NET_ADMIN"));
        let refusal = |what: &str, errno| Refusal { index: 0, what: what.to_owned(), errno, detail: None };
        let first = refusal("add the virtual server 10.96.0.10:80/tcp", Errno::ENOENT);
        let said = Error::Refused(vec![first.clone()]).to_string();
        assert!(said.contains("10.96.0.10:80/tcp") && said.contains("scheduler"), "{said}");
        let said = Error::Refused(vec![first, refusal("x", Errno::ESRCH)]).to_string();
        assert!(said.ends_with("and 1 more"), "{said}");
        let failed = SocketError::Failed { doing: "reading from", errno: Errno::EAGAIN };
        let said = Error::not_told("timeouts", &failed).to_string();
        assert!(said.starts_with("reading from the kernel") && said.contains("in time"), "{said}");
        let refused = SocketError::Refused { errno: Errno::EPERM, detail: None };
        assert!(Error::not_told("timeouts", &refused).to_string().contains("its timeouts"));
    }
}
