//! The threads that carry what the proxy passes on, beside those that follow the cluster.
//!
//! In: tasks, each of one connection, or of all flows of one UDP socket. Out: the same, each on one thread from its beginning to its end.
//!
//! A thread has a runtime of its own, and a socket of its own of each TCP listener, among which the kernel spreads connections by a hash
//! of addresses and ports (`SO_REUSEPORT`): no system call and no lock is spent on handing something to another thread. One
//! acceptor that hands connections to the thread with the fewest was tried: eight clients got a seventh fewer requests answered.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// So many threads carry connections to Services. Nodes have better uses for the others.
pub const THREADS: usize = 2;
/// A thread with new connections wakes up so often: before any timer of theirs would have it do so. A timer that is the next one costs a
/// write and a read beside its entry in a list, and all but none ever fire.
const TICK: Duration = Duration::from_secs(1);

/// The threads.
#[derive(Debug)]
pub struct Workers {
    workers: Vec<Arc<Worker>>,
    next: AtomicUsize,
}

/// A thread. It ends, with all that it carries, when this is dropped.
#[derive(Debug)]
pub struct Worker {
    runtime: Handle,
    begun: Arc<Notify>,
    _ends: oneshot::Sender<()>,
}

impl Workers {
    /// Starts so many, at least one. They are in the network namespace of this thread.
    pub fn start(count: usize) -> io::Result<Self> {
        let workers = (0..count.max(1)).map(Worker::start).collect::<io::Result<_>>()?;
        Ok(Self { workers, next: AtomicUsize::new(0) })
    }

    /// All of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<Worker>> {
        self.workers.iter()
    }

    /// Each in turn.
    #[must_use]
    pub fn in_turn(&self) -> &Arc<Worker> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.workers[turn % self.workers.len()]
    }
}

impl Worker {
    fn start(number: usize) -> io::Result<Arc<Self>> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (ends, end) = oneshot::channel();
        let begun = Arc::new(Notify::new());
        runtime.spawn(tick(Arc::clone(&begun)));
        let worker = Self { runtime: runtime.handle().clone(), begun, _ends: ends };
        let thread = std::thread::Builder::new().name(format!("proxy-{number}"));
        thread.spawn(move || runtime.block_on(end))?;
        Ok(Arc::new(worker))
    }

    /// What is made while this is kept belongs to this thread.
    pub fn enter(&self) -> EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Gives it a task.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(task)
    }

    /// Gives it a connection.
    pub fn carry(&self, connection: impl Future<Output = ()> + Send + 'static) {
        self.begun.notify_one();
        self.spawn(connection);
    }
}

/// Keeps a timer ahead of all others while connections come.
async fn tick(begun: Arc<Notify>) {
    loop {
        begun.notified().await;
        sleep(TICK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_ends_with_what_it_carries() {
        let workers = Workers::start(1).unwrap();
        let (kept, ended) = oneshot::channel::<()>();
        let task = workers.in_turn().spawn(async move {
            std::future::pending::<()>().await;
            drop(kept);
        });
        drop(workers);
        assert!(ended.await.is_err());
        assert!(task.await.unwrap_err().is_cancelled());
    }
}
