//! Something that blocks, for async code.
//!
//! In and out: the same. A request that is given up is finished nevertheless, and the next one waits for that: so a change
//! never overtakes another one.

use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::task::{JoinError, spawn_blocking};

/// Does one thing after the other with it, on threads that may block.
pub struct OffThread<C>(Arc<Mutex<C>>);

impl<C: Send + 'static> OffThread<C> {
    /// Takes it.
    #[must_use]
    pub fn new(blocking: C) -> Self {
        Self(Arc::new(Mutex::new(blocking)))
    }

    /// Does this with it.
    pub async fn with<T: Send + 'static, E: From<JoinError> + Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut C) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        // Held by the thread, not by this future, which may be dropped.
        let mut blocking = Arc::clone(&self.0).lock_owned().await;
        spawn_blocking(move || work(&mut blocking)).await?
    }
}
