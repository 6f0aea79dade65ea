//! What can go wrong between us and the kernel, and what to do about it.

use std::io;

use nix::errno::Errno;
use thiserror::Error;
use tokio::task::JoinError;

use super::ruleset::Origin;
use super::wire::DecodeError;
use crate::netlink::socket::{explained, summary};
use crate::netlink::{SocketError, WireError};

/// Why something was not written or read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// No socket.
    #[error("cannot open a netlink socket: {}", advice(*.0))]
    Open(Errno),
    /// The socket failed; whether a transaction took effect is unknown.
    #[error("{doing} the kernel failed: {}", advice(*.errno))]
    Socket {
        /// What was being done.
        doing: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused a transaction as a whole; nothing has changed.
    #[error("the kernel refused the transaction: {}", advice(*.0))]
    RefusedWhole(Errno),
    /// The kernel refused these operations, and with them the transaction; nothing has changed.
    #[error("{}", summary(.0, "the transaction"))]
    Refused(Vec<Refusal>),
    /// The kernel does not list what it has.
    #[error("the kernel does not list its {what}: {}", advice(*.errno))]
    NotListed {
        /// What was asked for.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The table was changed during every attempt to read it.
    #[error("reading was disturbed {0} times by changes of the table; the next sync tries again")]
    Disturbed(u32),
    /// A message of the kernel that makes no sense.
    #[error("{0}; report this with the kernel's version")]
    Decode(#[from] DecodeError),
    /// The task that talks to the kernel has ended.
    #[error("the task that talks to the kernel has ended: {0}; the next sync tries again")]
    Ended(String),
}

impl From<WireError> for Error {
    fn from(error: WireError) -> Self {
        Self::Decode(error.into())
    }
}

impl From<SocketError> for Error {
    fn from(error: SocketError) -> Self {
        match error {
            SocketError::Failed { doing, errno } => Self::Socket { doing, errno },
            SocketError::Refused { errno, .. } => Self::RefusedWhole(errno),
            SocketError::Wire(error) => error.into(),
        }
    }
}

impl From<JoinError> for Error {
    fn from(error: JoinError) -> Self {
        Self::Ended(error.to_string())
    }
}

/// An operation that the kernel refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{object}: {}{}", advice(*.errno), explained(detail.as_ref()))]
pub struct Refusal {
    /// What was to be done.
    pub object: String,
    /// Who wanted it, if it can be told: of very many faults not each is looked at alone.
    pub origin: Option<Origin>,
    /// The kernel's error.
    pub errno: Errno,
    /// What the kernel says about it.
    pub detail: Option<String>,
}

/// The error, and what to do about it.
fn advice(errno: Errno) -> String {
    let todo = match errno {
        Errno::EPERM | Errno::EACCES => "the agent needs the capability NET_ADMIN in the host's network",
        Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => "load the kernel module nf_tables on the node",
        Errno::EOPNOTSUPP => {
            "this kernel cannot do it; the agent's check of the kernel names what is missing"
        }
        Errno::ENOENT => {
            "something it refers to is missing, or a kernel module; the next sync reads the table and repairs it"
        }
        Errno::EEXIST => "something else is there already; the next sync reads the table and repairs it",
        Errno::EBUSY => "it is still in use; the next sync reads the table and repairs it",
        Errno::ENFILE | Errno::ENOSPC => "the set is full",
        Errno::ENOMEM | Errno::ENOBUFS => "the kernel is out of memory for this; the next sync tries again",
        Errno::EMSGSIZE => {
            "the transaction is too large; the agent needs the capability NET_ADMIN to send it"
        }
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
        assert!(Error::Open(Errno::EPROTONOSUPPORT).to_string().contains("nf_tables"));
        assert!(Error::RefusedWhole(Errno::EPERM).to_string().contains("NET_ADMIN"));
        let refusal = |object: &str, errno| Refusal {
            object: object.to_owned(),
            origin: Some(Origin(1)),
            errno,
            detail: Some("in words".to_owned()),
        };
        let full = refusal("to add an element of frontends", Errno::ENFILE);
        let said = Error::Refused(vec![full.clone()]).to_string();
        assert!(said.contains("frontends") && said.contains("full (in words)"), "{said}");
        let said = Error::Refused(vec![full, refusal("to add a rule", Errno::EBUSY)]).to_string();
        assert!(said.contains("full") && said.ends_with("and 1 more"), "{said}");
        assert!(Error::from(WireError::Missing("a name")).to_string().contains("report this"));
    }
}
