//! Events on Services and EndpointSlices that cannot be served as they are written, for their owners.
//!
//! In: news from the sync loop and from health checks, which never wait for this. Out: Events. Every node of a cluster finds the
//! same fault in an object, so an Event has a name that follows from what it says: whichever agent comes first makes it, and the
//! others, spread over a minute, find it there. Each agent tells the same news once an hour, and only so many in a row.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::{CONTROLLER, NOTE, SEND_TIMEOUT, shortened, unwritten};
use crate::model::{ObjectName, Skipped};
use crate::random;

/// The API server forgets Events after an hour.
const AGAIN_AFTER: Duration = Duration::from_hours(1);
/// News of the whole cluster is told at some moment of this time.
const SPREAD: Duration = Duration::from_mins(1);
/// So many in a row, and one more each [`REFILL`].
const BURST: u32 = 10;
const REFILL: Duration = Duration::from_secs(30);
/// More faults than this at a time are in the log only.
const QUEUE: usize = 256;

/// Who finds the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every node.
    Cluster,
    /// This one.
    Node,
}

/// What is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectNews {
    /// `Service` or `EndpointSlice`.
    pub kind: &'static str,
    /// Its namespace and name.
    pub name: ObjectName,
    /// One word.
    pub reason: &'static str,
    /// For people.
    pub note: String,
    /// Who finds the same.
    pub scope: Scope,
}

impl ObjectNews {
    /// News of something that is not served.
    #[must_use]
    pub fn skipped(skipped: Skipped, reason: &'static str) -> Self {
        Self { kind: skipped.kind, name: skipped.name, reason, note: skipped.reason, scope: Scope::Cluster }
    }
}

/// Takes news.
#[derive(Clone, Debug)]
pub struct Objects(mpsc::Sender<ObjectNews>);

impl Objects {
    /// Sends news as `node` through `client`, from a task of its own.
    #[must_use]
    pub fn start(client: Client, node: &str) -> Self {
        let (objects, receiver) = Self::channel();
        tokio::spawn(Teller { client, node: node.to_owned() }.run(receiver));
        objects
    }

    /// Hands news to whoever holds the other end.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<ObjectNews>) {
        let (queue, receiver) = mpsc::channel(QUEUE);
        (Self(queue), receiver)
    }

    /// Takes one piece of news, or drops it while too many wait.
    pub fn tell(&self, news: ObjectNews) {
        if let Err(error) = self.0.try_send(news) {
            debug!("an event is dropped: {error}");
        }
    }
}

/// When which news is told: without I/O.
#[derive(Debug)]
struct Agenda {
    due: BTreeMap<(Instant, u64), ObjectNews>,
    accepted: u64,
    told: HashMap<[u8; 8], Instant>,
    left: u32,
    refilled: Instant,
}

impl Agenda {
    fn new() -> Self {
        Self {
            due: BTreeMap::new(),
            accepted: 0,
            told: HashMap::new(),
            left: BURST,
            refilled: Instant::now(),
        }
    }

    /// Takes news, unless it was taken within the hour. `fraction` in 0..1 spreads it.
    fn take(&mut self, news: ObjectNews, fraction: f64) {
        let now = Instant::now();
        self.told.retain(|_, at| now.saturating_duration_since(*at) < AGAIN_AFTER);
        let key = digest(&[news.kind, &news.name.to_string(), news.reason, &news.note]);
        if self.due.len() >= QUEUE || self.told.contains_key(&key) {
            return;
        }
        self.told.insert(key, now);
        let wait = if news.scope == Scope::Cluster { SPREAD.mul_f64(fraction) } else { Duration::ZERO };
        self.accepted += 1;
        self.due.insert((now + wait, self.accepted), news);
    }

    /// When the next is told.
    fn next(&self) -> Option<Instant> {
        let ((due, _), _) = self.due.first_key_value()?;
        Some(if self.left > 0 { *due } else { (*due).max(self.refilled + REFILL) })
    }

    /// What is to be told now.
    fn pop(&mut self) -> Option<ObjectNews> {
        let now = Instant::now();
        while self.left < BURST && now >= self.refilled + REFILL {
            self.left += 1;
            self.refilled += REFILL;
        }
        if self.next().is_none_or(|at| at > now) {
            return None;
        }
        if self.left == BURST {
            self.refilled = now;
        }
        self.left = self.left.saturating_sub(1);
        self.due.pop_first().map(|(_, news)| news)
    }
}

struct Teller {
    client: Client,
    node: String,
}

impl Teller {
    async fn run(self, mut queue: mpsc::Receiver<ObjectNews>) {
        let mut agenda = Agenda::new();
        loop {
            let next = agenda.next();
            tokio::select! {
                news = queue.recv() => match news {
                    Some(news) => agenda.take(news, random::fraction()),
                    None => return,
                },
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    if let Some(news) = agenda.pop() {
                        self.tell(&news).await;
                    }
                }
            }
        }
    }

    async fn tell(&self, news: &ObjectNews) {
        match timeout(SEND_TIMEOUT, self.send(news)).await {
            Ok(Ok(())) => {}
            // Somebody else has told it.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
            Ok(Err(error)) => unwritten(&error),
            Err(_) => debug!("the event was not written: the API server did not answer"),
        }
    }

    /// `kubectl describe` finds Events by the object's uid, which the model does not keep: it is asked for here, of the API
    /// server's cache and under the permission to list that the watches have.
    async fn send(&self, news: &ObjectNews) -> Result<(), kube::Error> {
        let (api_version, uid) = if news.kind == "EndpointSlice" {
            ("discovery.k8s.io/v1", self.uid::<EndpointSlice>(&news.name).await?)
        } else {
            ("v1", self.uid::<Service>(&news.name).await?)
        };
        // Gone meanwhile: nobody is left to read it.
        let Some(uid) = uid else { return Ok(()) };
        let event = event(news, api_version, &uid, &self.node, Timestamp::now());
        let api: Api<Event> = Api::namespaced(self.client.clone(), &news.name.namespace);
        api.create(&PostParams::default(), &event).await.map(|_| ())
    }

    async fn uid<K>(&self, name: &ObjectName) -> Result<Option<String>, kube::Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let params = ListParams::default().fields(&format!("metadata.name={}", name.name)).match_any();
        let api: Api<K> = Api::namespaced(self.client.clone(), &name.namespace);
        let found = api.list_metadata(&params).await?;
        Ok(found.items.into_iter().find_map(|object| object.metadata.uid))
    }
}

fn event(news: &ObjectNews, api_version: &str, uid: &str, node: &str, now: Timestamp) -> Event {
    let told_by = if news.scope == Scope::Node { node } else { "" };
    let digest = digest(&[uid, news.reason, &news.note, told_by]).map(|byte| format!("{byte:02x}")).concat();
    // A name has at most 253 bytes, and none of its parts ends with these.
    let of = shortened(&news.name.name, 230).trim_end_matches(['-', '.']);
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{of}.{digest}")),
            namespace: Some(news.name.namespace.to_string()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(shortened(node, 128).to_owned()),
        action: Some("ProgramServices".to_owned()),
        reason: Some(news.reason.to_owned()),
        type_: Some("Warning".to_owned()),
        note: Some(match news.scope {
            Scope::Node => shortened(&format!("node {node}: {}", news.note), NOTE).to_owned(),
            Scope::Cluster => shortened(&news.note, NOTE).to_owned(),
        }),
        regarding: Some(ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(news.kind.to_owned()),
            namespace: Some(news.name.namespace.to_string()),
            name: Some(news.name.name.to_string()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}

/// Tells texts apart; nobody attacks it.
fn digest(parts: &[&str]) -> [u8; 8] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hash.finalize().first_chunk().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests;
