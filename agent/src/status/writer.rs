//! Writes the status.
//!
//! In: the snapshots of the sync loop and of the watches. Out: JSON merge patches of the own ProxyNodeStatus' status. Nothing
//! waits for this task. An empty first patch reads what the object holds, since the agent may patch but not get: transition
//! times so survive a restart.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use pointsman_crds::condition::Condition;
use pointsman_crds::names::AGENT_FIELD_MANAGER;
use pointsman_crds::{ProxyNodeStatus, ProxyNodeStatusStatus};
use serde_json::{Map, Value, json};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, error, info, warn};

use super::build::{Identity, Inputs, build, is_ready, meaningful};
use super::pacing::{Need, Pacing};
use crate::events::Events;
use crate::http::Listeners;
use crate::random;
use crate::state::{SyncState, Watches};

/// An API server that needs longer for one patch counts as failed. Longer than the client waits before it turns to another one.
const PATCH_TIMEOUT: Duration = Duration::from_secs(15);
/// A watch grows stale without any event, so the status is derived again at least this often.
const REBUILD: Duration = Duration::from_secs(5);
/// The operator creates the object; before that, and when we may not write, asking more often changes nothing.
const REFUSED_WAIT: Duration = Duration::from_secs(5);

/// Why a status was not written.
#[derive(Debug, Error)]
pub enum StatusError {
    /// The operator has not created the object yet.
    #[error(
        "ProxyNodeStatus {0} does not exist yet; pointsman-operator creates it, together with the node's ConfigMap"
    )]
    NotCreated(String),
    /// RBAC or an admission policy.
    #[error(
        "not allowed to patch proxynodestatuses/status {name} ({message}); the agent's ClusterRole needs the verb patch on \
         proxynodestatuses/status in the group pointsman.dev, and its token must be bound to this node's pod"
    )]
    Forbidden {
        /// The node.
        name: String,
        /// What the server said.
        message: String,
    },
    /// The server did not answer in time.
    #[error("the API server did not answer within {} s", PATCH_TIMEOUT.as_secs())]
    Timeout,
    /// Anything else.
    #[error(transparent)]
    Other(kube::Error),
}

impl StatusError {
    fn new(name: &str, error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 404 => Self::NotCreated(name.to_owned()),
            kube::Error::Api(status) if status.code == 403 => {
                Self::Forbidden { name: name.to_owned(), message: status.message.clone() }
            }
            error => Self::Other(error),
        }
    }
}

/// The task that writes one node's status.
pub struct Writer {
    api: Api<ProxyNodeStatus>,
    name: String,
    identity: Identity,
    state: watch::Receiver<SyncState>,
    watches: watch::Receiver<Watches>,
    listeners: watch::Receiver<Listeners>,
    events: Events,
    known: Option<Known>,
    written: Option<ProxyNodeStatusStatus>,
    last_error: String,
}

/// What the object is known to hold.
#[derive(Default)]
struct Known {
    status: Value,
    conditions: Vec<Condition>,
    generation: Option<i64>,
    desired: Option<String>,
}

impl Writer {
    /// A writer for the ProxyNodeStatus named `name`.
    #[must_use]
    pub fn new(
        client: Client,
        name: &str,
        identity: Identity,
        state: watch::Receiver<SyncState>,
        watches: watch::Receiver<Watches>,
        listeners: watch::Receiver<Listeners>,
        events: Events,
    ) -> Self {
        Self {
            api: Api::all(client),
            name: name.to_owned(),
            identity,
            state,
            watches,
            listeners,
            events,
            known: None,
            written: None,
            last_error: String::new(),
        }
    }

    /// Writes until the sync loop is gone.
    pub async fn run(mut self) {
        let mut pacing = Pacing::new(Instant::now(), random::fraction());
        loop {
            let status = self.status();
            self.events.observe(&status);
            self.events.observe_listeners(&self.listeners.borrow_and_update());
            let need = self.need(&status);
            tokio::select! {
                () = sleep_until(pacing.due(need)) => self.attempt(&status, need, &mut pacing).await,
                changed = self.state.changed() => if changed.is_err() { return },
                changed = self.watches.changed() => if changed.is_err() { return },
                changed = self.listeners.changed() => if changed.is_err() { return },
                () = sleep(REBUILD) => {}
            }
        }
    }

    fn status(&mut self) -> ProxyNodeStatusStatus {
        let state = self.state.borrow_and_update().clone();
        let watches = self.watches.borrow_and_update().clone();
        let known = self.known.as_ref();
        build(Inputs {
            observed_generation: known
                .filter(|known| known.desired.is_some() && known.desired == state.config.assigned)
                .and_then(|known| known.generation),
            previous: known.map_or(&[], |known| &known.conditions),
            state: &state,
            watches: &watches,
            identity: &self.identity,
            now: Timestamp::now(),
            instant: Instant::now(),
        })
    }

    fn need(&self, status: &ProxyNodeStatusStatus) -> Need {
        match &self.written {
            None => Need::Ready,
            Some(written) if is_ready(written) != is_ready(status) => Need::Ready,
            Some(written) if meaningful(written) != meaningful(status) => Need::Change,
            Some(_) => Need::None,
        }
    }

    async fn attempt(&mut self, status: &ProxyNodeStatusStatus, need: Need, pacing: &mut Pacing) {
        match self.write(status).await {
            Ok(()) => {
                if !self.last_error.is_empty() {
                    info!(node = self.name, "the status is written again");
                    self.last_error.clear();
                }
                pacing.written(Instant::now(), need, random::fraction());
            }
            Err(error) => {
                let least = match &error {
                    StatusError::NotCreated(_) | StatusError::Forbidden { .. } => REFUSED_WAIT,
                    StatusError::Timeout | StatusError::Other(_) => Duration::ZERO,
                };
                self.complain(&error);
                pacing.failed(Instant::now(), need, least);
            }
        }
    }

    /// Says the same thing only once.
    fn complain(&mut self, error: &StatusError) {
        let text = error.to_string();
        if text == self.last_error {
            return;
        }
        match error {
            StatusError::NotCreated(_) => debug!("{text}"),
            StatusError::Forbidden { .. } => error!("{text}"),
            StatusError::Timeout | StatusError::Other(_) => warn!("the status was not written: {text}"),
        }
        self.last_error = text;
    }

    async fn write(&mut self, status: &ProxyNodeStatusStatus) -> Result<(), StatusError> {
        let status = if self.known.is_some() {
            status.clone()
        } else {
            // Changes nothing and returns the object.
            let object = self.patch(json!({ "status": {} })).await?;
            self.learn(&object);
            self.status()
        };
        let fresh = serde_json::to_value(&status)
            .map_err(|error| StatusError::Other(kube::Error::SerdeError(error)))?;
        let held = self.known.as_ref().map_or(&Value::Null, |known| &known.status);
        let object = self.patch(json!({ "status": with_nulls(held, fresh) })).await?;
        self.learn(&object);
        self.written = Some(status);
        Ok(())
    }

    async fn patch(&self, body: Value) -> Result<ProxyNodeStatus, StatusError> {
        let params =
            PatchParams { field_manager: Some(AGENT_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(body);
        timeout(PATCH_TIMEOUT, self.api.patch_status(&self.name, &params, &patch))
            .await
            .map_err(|_| StatusError::Timeout)?
            .map_err(|error| StatusError::new(&self.name, error))
    }

    fn learn(&mut self, object: &ProxyNodeStatus) {
        self.known = Some(Known {
            status: object
                .status
                .as_ref()
                .and_then(|status| serde_json::to_value(status).ok())
                .unwrap_or_default(),
            conditions: object.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default(),
            generation: object.metadata.generation,
            desired: object.spec.desired.as_ref().map(|desired| desired.revision.clone()),
        });
    }
}

/// `fresh` with a null for everything that only `held` has: a merge patch leaves alone what it does not name.
fn with_nulls(held: &Value, fresh: Value) -> Value {
    match (held, fresh) {
        (Value::Object(held), Value::Object(fresh)) => {
            let mut merged = Map::new();
            for (key, value) in fresh {
                let value = with_nulls(held.get(&key).unwrap_or(&Value::Null), value);
                merged.insert(key, value);
            }
            for key in held.keys() {
                merged.entry(key.clone()).or_insert(Value::Null);
            }
            Value::Object(merged)
        }
        (_, fresh) => fresh,
    }
}

#[cfg(test)]
#[path = "writer_tests.rs"]
mod tests;
