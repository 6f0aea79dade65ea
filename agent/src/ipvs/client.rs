//! Changes and lists virtual servers.
//!
//! In: [`Operation`]s, or a question. Out: success, or the operations that the kernel refused; or what the kernel has.
//!
//! IPVS has no transactions: each change stands alone, in the order given. So the order is the caller's care: a virtual
//! server before its real servers.

use std::collections::BTreeSet;

use netlink_sys::protocols::NETLINK_GENERIC;
use nix::errno::Errno;
use pointsman_crds::proxy_node_status::IpFamily;

use super::error::{Error, Refusal};
use super::server::{InstalledReal, InstalledServer, Key, Operation, Timeouts, VirtualServer};
use super::wire::{self, Parsed};
use crate::netlink::{OffThread, Refused, Socket, SocketError, WireError};

/// Nobody but us changes virtual servers often.
const ATTEMPTS: u32 = 5;
/// Refusals that are reported: the first one is the cause, and each service at fault is wanted.
const REFUSALS_AT_MOST: usize = 1000;

/// A [`Connection`] for async code, one request after the other, also if one is given up.
pub struct Client(OffThread<Connection>);

impl Client {
    /// See [`Connection::open`].
    pub fn open() -> Result<Self, Error> {
        Connection::open().map(|connection| Self(OffThread::new(connection)))
    }

    /// See [`Connection::apply`].
    pub async fn apply(&mut self, operations: Vec<Operation>) -> Result<(), Error> {
        self.with(move |connection| connection.apply(&operations)).await
    }

    /// See [`Connection::read`].
    pub async fn read(&mut self, family: IpFamily) -> Result<Vec<InstalledServer>, Error> {
        self.with(move |connection| connection.read(&[family])).await
    }

    /// Does this with the connection, on a thread that may block.
    pub async fn with<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.0.with(work).await
    }
}

/// A socket to the IPVS of the network namespace of the thread that opened it.
pub struct Connection {
    socket: Socket,
    family: u16,
}

impl Connection {
    /// Opens a socket. The kernel loads its module if it has one.
    pub fn open() -> Result<Self, Error> {
        let mut socket = Socket::open(NETLINK_GENERIC, None, None).map_err(Error::Open)?;
        let sequence = socket.next_sequence();
        let answer = match socket.ask(sequence, &wire::get_family(sequence)) {
            Err(SocketError::Refused { errno: Errno::ENOENT, .. }) => return Err(Error::NoIpvs),
            answer => answer.map_err(|error| Error::not_told("families of generic netlink", &error))?,
        };
        let family = wire::family_id(&answer.unwrap_or_default())?;
        Ok(Self { socket, family })
    }

    /// The version of IPVS, such as 1.2.1.
    pub fn version(&mut self) -> Result<[u8; 3], Error> {
        let answer = self.ask("version of IPVS", wire::get_info)?;
        Ok(wire::version(&answer)?)
    }

    /// The timeouts.
    pub fn timeouts(&mut self) -> Result<Timeouts, Error> {
        let answer = self.ask("timeouts of IPVS", wire::get_timeouts)?;
        Ok(wire::timeouts(&answer)?)
    }

    /// Changes the timeouts, but for those that are 0.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), Error> {
        let family = self.family;
        let refused = self.socket.change(1, |_, flags, sequence, to| {
            wire::set_timeouts(to, family, flags, sequence, timeouts);
        });
        let refused = refused.map_err(|error| Error::not_told("timeouts of IPVS", &error))?;
        let refusal = |Refused { index, errno, detail, .. }| Refusal {
            index,
            what: "set the timeouts of IPVS".to_owned(),
            errno,
            detail,
        };
        match refused.into_iter().next() {
            None => Ok(()),
            Some(refused) => Err(Error::Refused(vec![refusal(refused)])),
        }
    }

    /// Makes these changes, in order, each for itself: those that are not among the refusals are made. An error that is not a
    /// refusal leaves it open which were.
    pub fn apply(&mut self, operations: &[Operation]) -> Result<(), Error> {
        let refused = self.attempt(operations)?;
        let mut edits = Vec::new();
        let mut edited = Vec::new();
        let mut refusals = Vec::new();
        for refused in refused {
            let Some(operation) = operations.get(refused.index) else { continue };
            match answer(operation, refused.errno) {
                Answer::Fine => {}
                Answer::Edit(edit) => {
                    edits.push(edit);
                    edited.push(refused.index);
                }
                Answer::Refused => refusals.push(refusal(operation, refused)),
            }
        }
        for refused in self.attempt(&edits)? {
            if let (Some(edit), Some(index)) = (edits.get(refused.index), edited.get(refused.index)) {
                refusals.push(refusal(edit, Refused { index: *index, ..refused }));
            }
        }
        if refusals.is_empty() {
            return Ok(());
        }
        refusals.sort_by_key(|refusal| refusal.index);
        refusals.truncate(REFUSALS_AT_MOST);
        Err(Error::Refused(refusals))
    }

    fn attempt(&mut self, operations: &[Operation]) -> Result<Vec<Refused>, Error> {
        let family = self.family;
        let refused = self.socket.change(operations.len(), |index, flags, sequence, to| {
            if let Some(operation) = operations.get(index) {
                wire::operation(to, family, flags, sequence, operation);
            }
        });
        refused.map_err(|error| Error::not_told("changes", &error))
    }

    /// All virtual servers of these families with their real servers, whoever made them, in the kernel's order. Those of protocols
    /// that we do not know are left out.
    ///
    /// The kernel lists the real servers of one virtual server at a time, so this is not of one moment; but no virtual server
    /// that was there all the time is missing.
    pub fn read(&mut self, families: &[IpFamily]) -> Result<Vec<InstalledServer>, Error> {
        for _ in 0..ATTEMPTS {
            let Some(servers) = self.servers()? else { continue };
            let before: BTreeSet<_> = servers.iter().map(|server| server.key).collect();
            let mut all = Vec::new();
            let mut undisturbed = true;
            // The kernel is asked for the real servers of one virtual server at a time.
            let wanted = servers.into_iter().filter(|server| families.contains(&server.key.family()));
            for server in wanted {
                let reals = self.reals_once(&server.key)?;
                undisturbed &= reals.is_some();
                all.extend(reals.map(|reals| InstalledServer { server, reals }));
            }
            // The kernel says nothing if a virtual server goes while it lists others; the one behind it is missing then.
            let after = self.servers()?.map(|servers| servers.iter().map(|server| server.key).collect());
            if undisturbed && after == Some(before) {
                return Ok(all);
            }
        }
        Err(Error::Disturbed(ATTEMPTS))
    }

    /// The real servers of a virtual server; none if that is not there.
    pub fn reals(&mut self, server: &Key) -> Result<Vec<InstalledReal>, Error> {
        for _ in 0..ATTEMPTS {
            if let Some(reals) = self.reals_once(server)? {
                return Ok(reals);
            }
        }
        Err(Error::Disturbed(ATTEMPTS))
    }

    /// All virtual servers, without their real servers; nothing if the kernel says that it was disturbed.
    pub fn servers(&mut self) -> Result<Option<Vec<VirtualServer>>, Error> {
        let mut servers = Vec::new();
        let family = self.family;
        let undisturbed = self.list(
            "virtual servers",
            |sequence| wire::list_servers(family, sequence),
            |payload| {
                if let Parsed::Server(server) = wire::virtual_server(payload)? {
                    servers.push(server);
                }
                Ok(())
            },
        )?;
        Ok(undisturbed.then_some(servers))
    }

    fn reals_once(&mut self, server: &Key) -> Result<Option<Vec<InstalledReal>>, Error> {
        let mut reals = Vec::new();
        let family = self.family;
        let undisturbed = self.list(
            "real servers",
            |sequence| wire::list_reals(family, sequence, server),
            |payload| {
                reals.extend(wire::real(payload, server.family())?);
                Ok(())
            },
        )?;
        Ok(undisturbed.then_some(reals))
    }

    fn list(
        &mut self,
        what: &'static str,
        request: impl FnOnce(u32) -> Vec<u8>,
        each: impl FnMut(&[u8]) -> Result<(), WireError>,
    ) -> Result<bool, Error> {
        let sequence = self.socket.next_sequence();
        let read = self.socket.list(sequence, &request(sequence), each);
        Ok(read.map_err(|error| Error::not_told(what, &error))??)
    }

    fn ask(&mut self, what: &'static str, request: fn(u16, u32) -> Vec<u8>) -> Result<Vec<u8>, Error> {
        let sequence = self.socket.next_sequence();
        let answer = self.socket.ask(sequence, &request(self.family, sequence));
        Ok(answer.map_err(|error| Error::not_told(what, &error))?.unwrap_or_default())
    }
}

/// What an error says about an operation.
enum Answer {
    /// It was not needed.
    Fine,
    /// This instead.
    Edit(Operation),
    /// It was not done.
    Refused,
}

fn answer(operation: &Operation, errno: Errno) -> Answer {
    match (operation, errno) {
        (Operation::AddServer(server), Errno::EEXIST) => Answer::Edit(Operation::EditServer(server.clone())),
        (Operation::AddReal { server, real }, Errno::EEXIST) => {
            Answer::Edit(Operation::EditReal { server: *server, real: *real })
        }
        // No such virtual server; no such real server.
        (Operation::RemoveServer(_) | Operation::RemoveReal { .. }, Errno::ESRCH)
        | (Operation::RemoveReal { .. }, Errno::ENOENT) => Answer::Fine,
        _ => Answer::Refused,
    }
}

fn refusal(operation: &Operation, refused: Refused) -> Refusal {
    Refusal {
        index: refused.index,
        what: operation.to_string(),
        errno: refused.errno,
        detail: refused.detail,
    }
}
