//! What all sockets of the proxy share: threads, limits, and the end.
//!
//! In: how many files the process may open. Out: permits, and the moment at which what is still open is closed.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::counters::Counters;
use super::workers::Workers;

/// After another mode has taken over, connections may go on for so long.
pub const DRAIN: Duration = Duration::from_mins(10);
/// Files that the agent needs for everything else.
const RESERVED: u64 = 512;
/// Two sockets, two pipes, and two for luck.
const FILES_PER_CONNECTION: u64 = 8;
/// More would need more memory than an agent should have: about 1 GiB, if all are busy at once.
const MOST: u64 = 32_768;

/// What all sockets of the proxy share.
#[derive(Debug)]
pub struct Shared {
    /// Where counters come from.
    pub counters: Counters,
    connections: Arc<Semaphore>,
    flows: Arc<Semaphore>,
    limits: Limits,
    ends: watch::Sender<Option<Instant>>,
    threads: usize,
    workers: Mutex<Option<Arc<Workers>>>,
}

/// How much may be open at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// TCP connections. More wait in the kernel's queue.
    pub connections: usize,
    /// Flows of datagrams. Datagrams of more are dropped.
    pub flows: usize,
}

impl Limits {
    /// What fits into so many files.
    #[must_use]
    pub fn of(files: u64) -> Self {
        let files = files.saturating_sub(RESERVED);
        let fit = |number: u64| usize::try_from(number.clamp(1, MOST)).unwrap_or(1);
        Self { connections: fit(files / FILES_PER_CONNECTION), flows: fit(files / 8) }
    }

    /// For NodePorts on localhost, beside the rest.
    #[must_use]
    pub fn localhost(self) -> Self {
        Self { connections: (self.connections / 8).max(1), flows: 1 }
    }

    /// What fits into the files that this process may open, after asking for as many as it can get.
    #[must_use]
    pub fn of_process() -> Self {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map(|(soft, hard)| {
            if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() { hard } else { soft }
        });
        let limits = Self::of(limit.unwrap_or(1024));
        info!(connections = limits.connections, flows = limits.flows, "the proxy's limits");
        limits
    }
}

impl Shared {
    /// Nothing is open yet. What will be is carried by so many threads.
    #[must_use]
    pub fn new(counters: Counters, limits: Limits, threads: usize) -> Self {
        Self {
            counters,
            connections: Arc::new(Semaphore::new(limits.connections)),
            flows: Arc::new(Semaphore::new(limits.flows)),
            limits,
            ends: watch::Sender::new(None),
            threads,
            workers: Mutex::default(),
        }
    }

    /// The threads, which are started when they are first needed, in the network namespace of this one.
    pub fn workers(&self) -> io::Result<Arc<Workers>> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(workers) = &*workers {
            return Ok(Arc::clone(workers));
        }
        Ok(Arc::clone(workers.insert(Arc::new(Workers::start(self.threads)?))))
    }

    /// Waits until there may be one more connection.
    pub async fn connection(&self) -> Option<OwnedSemaphorePermit> {
        if let Some(permit) = self.room() {
            return Some(permit);
        }
        self.counters.limited.inc();
        warn!(
            limit = self.limits.connections,
            "as many connections are open as the proxy can hold; new ones wait"
        );
        Arc::clone(&self.connections).acquire_owned().await.ok()
    }

    /// Whether there may be one more connection now.
    #[must_use]
    pub fn room(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.connections).try_acquire_owned().ok()
    }

    /// Whether there may be one more flow of datagrams.
    #[must_use]
    pub fn flow(&self) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.flows).try_acquire_owned().ok();
        if permit.is_none() {
            self.counters.limited.inc();
        }
        permit
    }

    /// Connections that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.ends.receiver_count()
    }

    /// Waits until what is open is to be closed.
    pub async fn end(&self) {
        let mut ends = self.ends.subscribe();
        let at = match ends.wait_for(Option::is_some).await {
            Ok(at) => *at,
            Err(_) => None,
        };
        match at {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Lets what is open go on for at most so long, and waits for it.
    pub async fn drain(&self, limit: Duration) {
        let end = Instant::now() + limit;
        self.ends.send_replace(Some(end));
        if self.open() > 0 {
            info!(open = self.open(), "waiting for proxied connections to end");
        }
        while self.open() > 0 && Instant::now() < end {
            tokio::time::sleep(LOOK).await;
        }
        if self.open() > 0 {
            warn!(open = self.open(), "proxied connections are broken off");
        }
    }
}

/// How often a drain looks at what is left.
const LOOK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_the_files_that_may_be_open() {
        assert_eq!(Limits::of(1024), Limits { connections: 64, flows: 64 });
        assert_eq!(Limits::of(100), Limits { connections: 1, flows: 1 });
        assert_eq!(Limits::of(u64::MAX), Limits { connections: 32_768, flows: 32_768 });
        for files in [2048, 65_536, 250_000] {
            let limits = Limits::of(files);
            let localhost = limits.localhost().connections;
            assert!(((limits.connections + localhost) * 6 + limits.flows + 512) as u64 <= files);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_when_nothing_is_open_or_at_its_limit() {
        let shared = Arc::new(Shared::new(Counters::default(), Limits::of(1024), 1));
        let connection = |length: u64| {
            let shared = Arc::clone(&shared);
            tokio::spawn(async move {
                tokio::select! {
                    () = shared.end() => true,
                    () = tokio::time::sleep(Duration::from_secs(length)) => false,
                }
            })
        };
        let (short, long) = (connection(5), connection(500));
        tokio::task::yield_now().await;
        assert_eq!(shared.open(), 2);
        let begun = Instant::now();
        shared.drain(Duration::from_mins(1)).await;
        assert_eq!(begun.elapsed().as_secs(), 60);
        assert_eq!((short.await.unwrap(), long.await.unwrap()), (false, true));
        shared.drain(Duration::from_mins(1)).await;
        assert_eq!(begun.elapsed().as_secs(), 60);
    }
}
