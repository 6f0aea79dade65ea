//! Reads and writes what mode ipvs has in the kernel.
//!
//! In: [`Work`]. Out: chains, sets, virtual servers and local routes; or a [`Failure`]. What to write is decided elsewhere.
//!
//! Members of sets come first, since rules and virtual servers are only right with them; then chains; then virtual servers, with all their
//! real servers; then routes, so that no address becomes local before something serves there. What goes, goes the other way.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use pointsman_crds::proxy_node_status::IpFamily;
use tokio::task::spawn_blocking;

use super::client::Client;
use super::device::{Change, Device, DeviceError, Local, plan};
use super::difference::{Installed, Work};
use super::drain::Drain;
use super::error::Error;
use super::layout::frame::{NEAR, TABLES};
use super::layout::port::Server;
use super::layout::sets::{Set, SetChanges};
use super::server::{InstalledReal, Key, Operation, RealServer, VirtualServer};
use crate::ipset;
use crate::iptables::batch::{Script, Section};
use crate::iptables::runner::{self, Runner};
use crate::kernel::{SyncError, SyncFailure};

/// Why a family was not written or read.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// Rules.
    #[error(transparent)]
    Tools(#[from] runner::Failure),
    /// Sets.
    #[error(transparent)]
    Sets(#[from] ipset::Error),
    /// Virtual servers.
    #[error(transparent)]
    Ipvs(#[from] Error),
    /// Local routes.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Failure {
    /// In the words of the sync loop.
    pub(super) fn of(self, family: IpFamily) -> SyncError {
        let failure = match &self {
            Self::Tools(failure) => return runner::failure(family, failure),
            Self::Sets(ipset::Error::Refused(_))
            | Self::Ipvs(Error::Refused(_))
            | Self::Device(DeviceError::Refused(_)) => SyncFailure::RestoreFailed,
            Self::Sets(_) | Self::Ipvs(_) | Self::Device(_) => SyncFailure::SyncFailed,
        };
        SyncError { family, failure, message: self.to_string() }
    }
}

/// Virtual servers in the kernel, and the sets that say which are ours.
pub(super) struct Servers {
    client: Client,
    pub(super) sets: ipset::client::Client,
    /// Real servers that are leaving.
    pub(super) drain: Drain,
}

impl Servers {
    pub(super) fn open() -> Result<Self, Failure> {
        Ok(Self { client: Client::open()?, sets: ipset::client::Client::open()?, drain: Drain::default() })
    }

    /// A connection to ask for more.
    pub(super) fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// All of a family that there is.
    pub(super) async fn read(&mut self, runner: &Runner<'_>) -> Result<Installed, Failure> {
        let family = runner.family();
        let tables = runner.read_each(TABLES).await?;
        let members = self.sets.members::<Set>(family).await?;
        let servers = self.client.read(family).await?.into_iter();
        let servers = servers.map(|server| (server.server.key, server)).collect();
        Ok(Installed { tables, members, servers, local: local().await? })
    }

    /// Writes one family. Returns how many rules, members, servers and routes that were.
    pub(super) async fn write(
        &mut self,
        runner: &Runner<'_>,
        work: Work,
        sources: &BTreeMap<IpFamily, IpAddr>,
    ) -> Result<usize, Failure> {
        let family = runner.family();
        let Work { delta, stale, jumps, local, absent } = work;
        let sets = delta.sets;
        // Rules that are written anew must find their sets.
        let mut operations = if local.is_some() { SetChanges::create(family) } else { Vec::new() };
        operations.extend(sets.before(family));
        self.sets.apply(operations).await?;
        let mut script = Script::default();
        let tables = TABLES.into_iter().zip(delta.chains).zip(&stale);
        for ((table, chains), stale) in tables {
            let mut section = Section::new(table);
            for (name, rules) in &chains {
                section.chain(*name, rules);
            }
            if table == "nat" {
                delta.near.iter().for_each(|rule| section.append_rule(NEAR, rule));
                delta.far.iter().for_each(|rule| section.delete_rule(NEAR, rule));
            }
            section.insert(&jumps);
            section.remove(stale);
            section.finish(&mut script);
        }
        let mut written = sets.added.len() + sets.removed.len() + script.rules.0 + script.rules.1;
        if !script.text.is_empty() {
            runner.restore(&script).await?;
        }
        let (mut kept, mut gone) = (BTreeMap::new(), Vec::new());
        for (key, server) in delta.servers {
            match server {
                Some(server) => {
                    kept.insert(key, server);
                }
                None => gone.push(key),
            }
        }
        written += self.serve(kept, &absent).await?;
        written += match local {
            Some(wanted) => set_routes(wanted, sources.clone(), family).await?,
            None => follow(&sets, sources.get(&family).copied()).await?,
        };
        written += self.remove(gone).await?;
        self.sets.apply(sets.after(family)).await?;
        Ok(written)
    }

    /// Makes virtual servers what they are to be. Real servers that are not wanted leave as [`Drain`] says. Those that are absent have
    /// none.
    async fn serve(
        &mut self,
        servers: BTreeMap<Key, Server>,
        absent: &BTreeSet<Key>,
    ) -> Result<usize, Error> {
        if servers.is_empty() {
            return Ok(0);
        }
        let keys = servers.keys().copied().filter(|key| !absent.contains(key)).collect();
        let mut reals: BTreeMap<_, _> = self.reals(keys).await?.into_iter().collect();
        let now = Instant::now();
        let mut operations = Vec::new();
        for (key, server) in servers {
            let reals = reals.remove(&key).unwrap_or_default();
            self.change(key, server, &reals, now, &mut operations);
        }
        let count = operations.len();
        self.client.apply(operations).await?;
        Ok(count)
    }

    fn change(
        &mut self,
        key: Key,
        server: Server,
        reals: &[InstalledReal],
        now: Instant,
        operations: &mut Vec<Operation>,
    ) {
        let Server { settings, reals: wanted } = server;
        operations.push(Operation::AddServer(VirtualServer { key, settings: settings.clone() }));
        let there: BTreeMap<_, _> = reals.iter().map(|real| (real.server.address, real)).collect();
        for (address, weight) in &wanted {
            self.drain.keep(&key, *address);
            let real = RealServer { address: *address, weight: *weight };
            match there.get(address) {
                None => operations.push(Operation::AddReal { server: key, real }),
                Some(there) if there.server != real || !there.plain => {
                    operations.push(Operation::EditReal { server: key, real });
                }
                Some(_) => {}
            }
        }
        for address in there.keys().filter(|address| !wanted.contains_key(address)) {
            operations.extend(self.drain.remove(key, &settings, *address, reals, now));
        }
    }

    /// Removes virtual servers.
    pub(super) async fn remove(&mut self, keys: Vec<Key>) -> Result<usize, Error> {
        for key in &keys {
            self.drain.gone(key);
        }
        let count = keys.len();
        if count > 0 {
            self.client.apply(keys.into_iter().map(Operation::RemoveServer).collect()).await?;
        }
        Ok(count)
    }

    /// Takes out the real servers that have had their last connection.
    pub(super) async fn look(&mut self) -> Result<(), Error> {
        let keys: Vec<Key> = self.drain.servers().copied().collect();
        let mut operations = Vec::new();
        for (key, reals) in self.reals(keys).await? {
            operations.extend(self.drain.look(&key, &reals, Instant::now()));
        }
        if operations.is_empty() { Ok(()) } else { self.client.apply(operations).await }
    }

    /// The real servers of each of these, in their order.
    pub(super) async fn reals(&mut self, keys: Vec<Key>) -> Result<Vec<(Key, Vec<InstalledReal>)>, Error> {
        let read = self
            .client
            .with(move |connection| keys.into_iter().map(|key| Ok((key, connection.reals(&key)?))).collect());
        read.await
    }
}

/// Local addresses. Without the device, there are none.
pub(super) async fn local() -> Result<Local, DeviceError> {
    spawn_blocking(|| match Device::find()? {
        Some(mut device) => device.read(),
        None => Ok(Local::default()),
    })
    .await?
}

/// Makes these addresses local, and no others of the family.
async fn set_routes(
    wanted: BTreeSet<IpAddr>,
    sources: BTreeMap<IpFamily, IpAddr>,
    family: IpFamily,
) -> Result<usize, DeviceError> {
    let work = move || {
        let mut device = Device::open()?;
        let changes = plan(&device.read()?, &wanted, &sources, &[family]);
        device.apply(&changes)?;
        Ok(changes.len())
    };
    spawn_blocking(work).await?
}

/// Makes addresses local that come to the set of addresses, and others not that leave it.
async fn follow(sets: &SetChanges, source: Option<IpAddr>) -> Result<usize, DeviceError> {
    let addresses = |members: &BTreeSet<(Set, String)>| -> Vec<IpAddr> {
        let members = members.iter().filter(|(set, _)| *set == Set::Addresses);
        members.filter_map(|(_, member)| member.parse().ok()).collect()
    };
    let added = addresses(&sets.added).into_iter().map(|address| Change::Add { address, source });
    let changes: Vec<Change> =
        added.chain(addresses(&sets.removed).into_iter().map(Change::Remove)).collect();
    if changes.is_empty() {
        return Ok(0);
    }
    spawn_blocking(move || Device::open()?.apply(&changes).map(|()| changes.len())).await?
}
