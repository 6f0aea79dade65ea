//! Notices changes of a table by somebody else.
//!
//! In: the kernel's notices about transactions. Out: a word whenever one of them touched our table and was not ours: a
//! reason to read it.
//!
//! As soon as somebody listens, the kernel describes each element of each transaction: a load of 20,000 elements takes twice
//! as long, one of 130,000 five times (2.2 s instead of 0.4 s). That goes for the network namespace, whatever the table, so
//! nobody may listen during a load of either family. Small changes do not suffer.

use std::collections::BTreeMap;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use nix::errno::Errno;
use nix::sys::socket::SockFlag;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::DriftPolicy;
use tokio::net::UnixDatagram;
use tracing::info;

use super::error::Error;
use super::notices::{self, DATAGRAM};
use super::ruleset::Table;
use crate::netlink::socket::errno;

/// A subscription.
pub struct Watch {
    /// As for notices about addresses: a netlink socket in the clothes of one that tokio knows. All that is called on it is
    /// `recv`.
    socket: UnixDatagram,
    table: Table,
    own: u32,
    buffer: Vec<u8>,
}

/// What tells of changes of our tables, by their family.
#[derive(Default)]
pub struct Watches(BTreeMap<IpFamily, Watch>);

impl Watches {
    /// Listens for each of these tables, unless changes by others are not looked for: nobody would read the notices.
    pub fn follow(&mut self, policy: DriftPolicy, tables: impl IntoIterator<Item = Table>, own: u32) {
        if policy == DriftPolicy::Off {
            return self.close();
        }
        for table in tables {
            if !self.has(table.family) {
                self.listen(table, own);
            }
        }
    }

    /// A kernel that does not tell is no error: the table is to be read then.
    fn listen(&mut self, table: Table, own: u32) {
        let family = table.family;
        match Watch::open(table, own) {
            Ok(watch) => {
                self.0.insert(family, watch);
            }
            Err(error) => info!(
                ?family,
                "the kernel's notices about our table cannot be read ({error}); reading the table instead"
            ),
        }
    }

    /// Whether the kernel tells about the table of this family.
    #[must_use]
    pub fn has(&self, family: IpFamily) -> bool {
        self.0.contains_key(&family)
    }

    /// Listens no more.
    pub fn close(&mut self) {
        self.0.clear();
    }

    /// Waits until somebody else has touched a table, and returns whose: `None` if that is not known, and never will be
    /// again. For ever where the kernel does not tell.
    pub async fn changed(&mut self) -> Option<IpFamily> {
        let watches = self.0.iter_mut();
        let mut waiting: FuturesUnordered<_> =
            watches.map(|(family, watch)| async move { (*family, watch.changed().await) }).collect();
        let told = waiting.next().await;
        drop(waiting);
        match told {
            Some((family, Ok(_))) => Some(family),
            Some((_, Err(error))) => {
                info!(
                    "the kernel's notices about tables cannot be read ({error}); reading the tables instead"
                );
                self.0.clear();
                None
            }
            None => std::future::pending().await,
        }
    }
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
    pub fn open(table: Table, own: u32) -> Result<Self, Error> {
        let socket = notices::subscribe(SockFlag::SOCK_NONBLOCK)
            .and_then(|notices| UnixDatagram::from_std(std::os::unix::net::UnixDatagram::from(notices)))
            .map_err(|error| Error::Open(errno(&error)))?;
        Ok(Self { socket, table, own, buffer: vec![0; DATAGRAM] })
    }

    /// Waits until the table was touched by somebody else. Nothing is lost if this is given up and called again.
    pub async fn changed(&mut self) -> Result<Touched, Error> {
        loop {
            let received = self.socket.recv(&mut self.buffer).await;
            match received.map_err(|error| errno(&error)) {
                Ok(length) => {
                    let datagram = self.buffer.get(..length).unwrap_or_default();
                    if notices::read(datagram, &self.table, Some(self.own))?.touched {
                        return Ok(Touched::Changed);
                    }
                }
                Err(Errno::ENOBUFS) => return Ok(Touched::Overrun),
                Err(errno) => return Err(Error::Socket { doing: "reading notices of", errno }),
            }
        }
    }
}
