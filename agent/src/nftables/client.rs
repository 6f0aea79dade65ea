//! A [`Connection`] for async code.
//!
//! In and out: the same. The socket belongs to the network namespace of the thread that made the client, also when it has
//! to be opened again there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::task::spawn_blocking;

use super::connection::Connection;
use super::error::Error;
use super::read::Installed;
use super::ruleset::{Table, Transaction};

/// Writes and reads tables, one request after the other.
pub struct Client {
    /// Away while a request is under way, and for good if that was given up.
    idle: Option<Connection>,
    port: Arc<AtomicU32>,
}

/// The number of a client's socket, so that a [`Watch`](super::watch::Watch) can tell its changes from those of others.
#[derive(Clone, Debug, Default)]
pub struct Port(Arc<AtomicU32>);

impl Port {
    /// Whether a notice is about a change by that client.
    #[must_use]
    pub fn is(&self, port: u32) -> bool {
        self.0.load(Ordering::Relaxed) == port
    }
}

impl Client {
    /// Opens a socket.
    pub fn open() -> Result<Self, Error> {
        let connection = Connection::open()?;
        let port = Arc::new(AtomicU32::new(connection.port()));
        Ok(Self { idle: Some(connection), port })
    }

    /// See [`Port`].
    #[must_use]
    pub fn port(&self) -> Port {
        Port(Arc::clone(&self.port))
    }

    /// See [`Connection::apply`]. Gives the transaction back.
    pub async fn apply(
        &mut self,
        table: &Table,
        transaction: Transaction,
    ) -> (Transaction, Result<(), Error>) {
        let table = table.clone();
        let result = self
            .with(move |connection| {
                let result = connection.apply(&table, &transaction);
                Ok((transaction, result))
            })
            .await;
        result.unwrap_or_else(|error| (Transaction::default(), Err(error)))
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

    /// Does this with the connection, on a thread that may block.
    pub async fn with<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let mut connection = self.idle.take().map_or_else(Connection::open, Ok)?;
        self.port.store(connection.port(), Ordering::Relaxed);
        let task = spawn_blocking(move || {
            let result = work(&mut connection);
            (connection, result)
        });
        let (connection, result) = task.await.map_err(|error| Error::Ended(error.to_string()))?;
        self.idle = Some(connection);
        result
    }
}
