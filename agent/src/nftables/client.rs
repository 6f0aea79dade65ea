//! A [`Connection`] for async code.
//!
//! In and out: the same, one request after the other, also if one is given up.

use std::sync::Arc;

use nix::errno::Errno;
use pointsman_crds::proxy_node_status::IpFamily;

use super::connection::Connection;
use super::error::Error;
use super::probe::probe;
use super::read::Installed;
use super::ruleset::{Counted, Operation, Origin, Ruleset, Table, Transaction};
use crate::netlink::OffThread;

/// Writes and reads tables, one request after the other.
pub struct Client {
    connection: OffThread<Connection>,
    port: u32,
}

impl Client {
    /// Opens a socket in the network namespace of this thread.
    pub fn open() -> Result<Self, Error> {
        let connection = Connection::open()?;
        let port = connection.port();
        Ok(Self { connection: OffThread::new(connection), port })
    }

    /// The same, if the kernel can do all that our tables need in these families; the error says what is missing.
    pub async fn open_probed(families: &[IpFamily]) -> Result<Self, String> {
        let mut client = Self::open().map_err(|error| error.to_string())?;
        for family in families.iter().copied() {
            let missing = client.with(move |connection| probe(connection, family)).await;
            let missing = missing.map_err(|error| error.to_string())?;
            if !missing.is_empty() {
                let names: Vec<_> = missing.iter().map(ToString::to_string).collect();
                return Err(format!("{family:?}: {}", names.join("; ")));
            }
        }
        Ok(client)
    }

    /// See [`Connection::port`].
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// See [`Connection::apply`].
    pub async fn apply(&mut self, table: &Table, transaction: Arc<Transaction>) -> Result<(), Error> {
        let table = table.clone();
        self.with(move |connection| connection.apply(&table, &transaction)).await
    }

    /// See [`Connection::exists`].
    pub async fn exists(&mut self, table: &Table) -> Result<bool, Error> {
        let table = table.clone();
        self.with(move |connection| connection.exists(&table)).await
    }

    /// See [`Connection::read`].
    pub async fn read(&mut self, table: &Table) -> Result<Option<Installed>, Error> {
        let table = table.clone();
        self.with(move |connection| connection.read(&table)).await
    }

    /// See [`Connection::elements`].
    pub async fn elements(&mut self, table: &Table, sets: &'static [&'static str]) -> Result<Ruleset, Error> {
        let table = table.clone();
        self.with(move |connection| connection.elements(&table, sets)).await
    }

    /// See [`Connection::counted`].
    pub async fn counted(&mut self, table: &Table, chain: &'static str) -> Result<Option<Counted>, Error> {
        let table = table.clone();
        self.with(move |connection| connection.counted(&table, chain)).await
    }

    /// Does this with the connection, on a thread that may block.
    pub async fn with<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.connection.with(work).await
    }
}

/// Which of these families have such a table in the network namespace of this thread.
pub async fn installed(families: &[IpFamily], table: fn(IpFamily) -> Table) -> Result<Vec<IpFamily>, Error> {
    let mut client = match Client::open() {
        Err(Error::Open(Errno::EPROTONOSUPPORT)) => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut found = Vec::new();
    for family in families {
        let there = match client.exists(&table(*family)).await {
            // A kernel without nf_tables, or without the family, has no table.
            Err(Error::NotListed {
                errno: Errno::EINVAL | Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP, ..
            }) => false,
            answer => answer?,
        };
        if there {
            found.push(*family);
        }
    }
    Ok(found)
}

/// Removes such tables of these families. What is not there is no error. Returns where there was one.
pub async fn remove(
    families: &[IpFamily],
    table: fn(IpFamily) -> Table,
) -> Result<Vec<IpFamily>, (IpFamily, Error)> {
    let mut removed = Vec::new();
    for family in families {
        let remove = async {
            if installed(&[*family], table).await?.is_empty() {
                return Ok(());
            }
            let mut transaction = Transaction::default();
            transaction.push(Operation::DeleteTable, Origin::NONE);
            removed.push(*family);
            Client::open()?.apply(&table(*family), Arc::new(transaction)).await
        };
        remove.await.map_err(|error| (*family, error))?;
    }
    Ok(removed)
}
