//! Changes and lists ipsets.
//!
//! In: [`Operation`]s, or a question. Out: success, or the operations that the kernel refused; or what the kernel has.
//!
//! There are no transactions: each change stands alone, in the order given.

use std::collections::BTreeSet;
use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use pointsman_crds::proxy_node_status::IpFamily;
use thiserror::Error;
use tokio::task::JoinError;

use super::{Element, Kind, Operation, wire};
use crate::netlink::socket::{explained, summary};
use crate::netlink::{OffThread, Refused, Socket, SocketError, WireError};

/// Errors of ipset's own (`IPSET_ERR_*`).
const NO_TYPE: i32 = 4098;
const BUSY: i32 = 4100;
const OTHER_SET: i32 = 4103;
const REFERENCED: i32 = 4108;
const FULL: i32 = 4352;

/// Refusals that are reported: the first one is the cause.
const REFUSALS_AT_MOST: usize = 1000;

/// Why something was not written or read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// No socket.
    #[error("cannot open a netlink socket: {}", io::Error::from(*.0))]
    Open(Errno),
    /// The kernel has no ipsets, and could not load them.
    #[error("the kernel has no ipsets ({}); load the kernel module ip_set on the node", io::Error::from(*.0))]
    NoIpsets(Errno),
    /// The kernel's ipsets are too old.
    #[error("the kernel's ipsets speak protocol {0}, and {newest} is needed; run a newer kernel", newest = wire::PROTOCOL)]
    TooOld(u8),
    /// The socket failed; which changes were made is unknown.
    #[error("{doing} the kernel failed: {}; the next sync tries again", io::Error::from(*.errno))]
    Socket {
        /// What was being done.
        doing: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused these changes. All others were made.
    #[error("{}", summary(.0, "a change of ipsets"))]
    Refused(Vec<Refusal>),
    /// The kernel does not tell what it has.
    #[error("the kernel does not tell its ipsets: {}; the next sync tries again", io::Error::from(*.0))]
    NotTold(Errno),
    /// A message of the kernel that makes no sense.
    #[error("{0}; report this with the kernel's version")]
    Wire(#[from] WireError),
    /// The task that talks to the kernel has ended.
    #[error("the task that talks to the kernel has ended: {0}; the next sync tries again")]
    Ended(String),
}

impl From<JoinError> for Error {
    fn from(error: JoinError) -> Self {
        Self::Ended(error.to_string())
    }
}

impl Error {
    fn asking(error: &SocketError) -> Self {
        match *error {
            SocketError::Refused { errno, .. } => Self::NotTold(errno),
            SocketError::Failed { doing, errno } => Self::Socket { doing, errno },
            SocketError::Wire(error) => error.into(),
        }
    }
}

/// A change that the kernel refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("\"{what}\": {}{}", advice(*.code), explained(detail.as_ref()))]
pub struct Refusal {
    /// What was to be done.
    pub what: String,
    /// The kernel's error, as a positive number.
    pub code: i32,
    /// What the kernel says about it.
    pub detail: Option<String>,
}

/// The error, and what to do about it.
fn advice(code: i32) -> String {
    let known = match code {
        NO_TYPE => {
            "the kernel does not have sets of this type; load its kernel module on the node (ip_set_hash_*, ip_set_bitmap_port)"
        }
        BUSY | REFERENCED => "rules lead to this set",
        OTHER_SET => "a set of this name and of another type is there; remove it with \"ipset destroy\"",
        FULL => "the set is full",
        _ => {
            let todo = match Errno::from_raw(code) {
                Errno::EPERM | Errno::EACCES => {
                    "the agent needs the capability NET_ADMIN in the host's network"
                }
                Errno::ENOENT => "somebody else has removed the set; the next sync makes it again",
                _ => "the next sync tries again",
            };
            let error = if code < 4096 {
                io::Error::from_raw_os_error(code).to_string()
            } else {
                format!("error {code} of ipset")
            };
            return format!("{error}: {todo}");
        }
    };
    known.to_owned()
}

/// A [`Connection`] for async code.
pub(crate) struct Client(OffThread<Connection>);

impl Client {
    /// See [`Connection::open`].
    pub(crate) fn open() -> Result<Self, Error> {
        Connection::open().map(|connection| Self(OffThread::new(connection)))
    }

    /// See [`Connection::apply`].
    pub(crate) async fn apply(&mut self, operations: Vec<Operation>) -> Result<(), Error> {
        if operations.is_empty() {
            return Ok(());
        }
        self.0.with(move |connection| connection.apply(&operations)).await
    }

    /// What is in the sets of a kind. A set that is not there has no members.
    pub(crate) async fn members<S: Kind + Send>(
        &mut self,
        family: IpFamily,
    ) -> Result<BTreeSet<Element<S>>, Error> {
        self.0.with(move |connection| connection.members(family)).await
    }

    /// The names of all sets, whoever made them.
    pub(crate) async fn names(&mut self) -> Result<BTreeSet<String>, Error> {
        self.0.with(Connection::names).await
    }
}

/// A socket to the ipsets of the network namespace of the thread that opened it.
pub(crate) struct Connection {
    socket: Socket,
}

impl Connection {
    /// Opens a socket.
    pub(crate) fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(NETLINK_NETFILTER, None, None).map_err(Error::Open)? })
    }

    /// Finds out whether the kernel has ipsets that we can talk to. It loads its module if it has one.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        let sequence = self.socket.next_sequence();
        let answer = match self.socket.ask(sequence, &wire::get_protocol(sequence)) {
            Err(SocketError::Refused { errno, .. }) => return Err(Error::NoIpsets(errno)),
            answer => answer.map_err(|error| Error::asking(&error))?,
        };
        match wire::protocol(&answer.unwrap_or_default())? {
            old if old < wire::PROTOCOL => Err(Error::TooOld(old)),
            _ => Ok(()),
        }
    }

    /// Makes these changes, in order, each for itself: those that are not among the refusals are made. An error that is not a
    /// refusal leaves it open which were.
    pub(crate) fn apply(&mut self, operations: &[Operation]) -> Result<(), Error> {
        let refused = self.socket.change(operations.len(), |index, flags, sequence, to| {
            if let Some(operation) = operations.get(index) {
                wire::operation(to, flags, sequence, operation);
            }
        });
        let refused = refused.map_err(|error| Error::asking(&error))?;
        let mut refusals: Vec<Refusal> = refused
            .into_iter()
            .filter_map(|Refused { index, code, errno, detail }| match (operations.get(index)?, errno) {
                (Operation::Destroy { .. }, Errno::ENOENT) => None,
                (operation, _) => Some(Refusal { what: operation.to_string(), code, detail }),
            })
            .collect();
        refusals.truncate(REFUSALS_AT_MOST);
        if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
    }

    fn members<S: Kind>(&mut self, family: IpFamily) -> Result<BTreeSet<Element<S>>, Error> {
        let mut all = BTreeSet::new();
        for set in S::ALL {
            let sequence = self.socket.next_sequence();
            let listed =
                self.socket.list(sequence, &wire::list_members(sequence, &set.name(family)), |payload| {
                    let members = wire::members(payload)?;
                    all.extend(members.into_iter().map(|member| (*set, member.to_string())));
                    Ok(())
                });
            match listed {
                // It is not there.
                Err(SocketError::Refused { errno: Errno::ENOENT, .. }) => {}
                listed => listed
                    .map_err(|error| Error::asking(&error))
                    .and_then(|read| read.map_err(Error::Wire))
                    .map(drop)?,
            }
        }
        Ok(all)
    }

    fn names(&mut self) -> Result<BTreeSet<String>, Error> {
        let mut names = BTreeSet::new();
        let sequence = self.socket.next_sequence();
        let listed = self.socket.list(sequence, &wire::list_names(sequence), |payload| {
            names.extend(wire::name(payload)?);
            Ok(())
        });
        listed.map_err(|error| Error::asking(&error))?.map_err(Error::Wire)?;
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let said = |code| {
            Error::Refused(vec![Refusal { what: "add S 1".to_owned(), code, detail: None }]).to_string()
        };
        for (code, wanted) in [
            (NO_TYPE, "ip_set_hash_"),
            (OTHER_SET, "ipset destroy"),
            (REFERENCED, "rules lead to this set"),
            (FULL, "full"),
            (4104, "error 4104 of ipset"),
            (1, "NET_ADMIN"),
            (2, "makes it again"),
            (12, "memory"),
        ] {
            assert!(said(code).contains(wanted) && said(code).contains("\"add S 1\""), "{}", said(code));
        }
        assert!(Error::NoIpsets(Errno::EINVAL).to_string().contains("load the kernel module ip_set"));
        assert!(Error::TooOld(5).to_string().contains("protocol 5, and 6 is needed"));
    }
}
