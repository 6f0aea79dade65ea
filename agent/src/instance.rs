//! One agent on a node: the lock that a running one holds, so that nobody cleans up beside it.
//!
//! In: the state directory, which is the node's and so the same in every pod, unlike the admin socket's. Out: the lock, or why
//! it cannot be had. It ends with the process, however that ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tokio::time::sleep;
use tracing::{info, warn};

const FILE: &str = "lock";
const RETRY: Duration = Duration::from_secs(5);

/// Why the lock cannot be had.
#[derive(Debug, Error)]
pub enum LockError {
    /// Somebody else has it.
    #[error("an agent is running on this node: it holds {0:?}")]
    Held(PathBuf),
    /// The disk.
    #[error(
        "whether an agent is running cannot be told: {path:?} cannot be locked: {error}; check that this is the node's state \
         directory and can be written"
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Takes the lock in `directory`; it is held until the file is closed.
pub fn lock(directory: &Path) -> Result<File, LockError> {
    let path = directory.join(FILE);
    let file = match OpenOptions::new().create(true).append(true).open(&path) {
        Ok(file) => file,
        Err(error) => return Err(LockError::Io { path, error }),
    };
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(LockError::Held(path)),
        Err(TryLockError::Error(error)) => Err(LockError::Io { path, error }),
    }
}

/// Holds the lock for ever. While another agent has it, this one works all the same: the other's pod may have been deleted by force
/// and end in a moment, and a node without an agent would be worse than one that two agents keep equal.
pub async fn hold(directory: PathBuf) {
    let mut told = false;
    let _lock = loop {
        let _ = std::fs::create_dir_all(&directory);
        match lock(&directory) {
            Ok(lock) => break lock,
            Err(problem) if !told => warn!("{problem}; going on, and trying again"),
            Err(_) => {}
        }
        told = true;
        sleep(RETRY).await;
    };
    if told {
        info!("no other agent is running on this node any more");
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_agent_keeps_others_out_as_long_as_it_runs_and_waits_for_its_predecessor() {
        let node = tempfile::tempdir().unwrap();
        let directory = node.path().join("state");
        let missing = lock(&directory).unwrap_err();
        assert!(matches!(missing, LockError::Io { .. }), "no such node: {missing}");
        let running = |directory: &Path| tokio::spawn(hold(directory.to_owned()));
        let agent = running(&directory);
        sleep(Duration::from_millis(1)).await;
        assert!(matches!(lock(&directory), Err(LockError::Held(_))));
        let successor = running(&directory);
        sleep(Duration::from_mins(1)).await;
        agent.abort();
        sleep(Duration::from_millis(1)).await;
        drop(lock(&directory).expect("nobody has it for a moment"));
        sleep(RETRY).await;
        assert!(matches!(lock(&directory), Err(LockError::Held(_))));
        successor.abort();
    }
}
