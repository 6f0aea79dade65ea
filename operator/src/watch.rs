//! One watch of one kind, kept as small records.
//!
//! In: kube's watcher, which lists, watches, resumes and backs off. Out: a [`Cache`] of records by name, and a wake-up
//! whenever one changed in a way that matters. kube's own `reflector` keeps whole objects and wakes for every
//! heartbeat, which at 15,000 nodes is most of the memory and all of the wake-ups.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use futures::{Stream, StreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tracing::warn;

use crate::error::ApiError;

/// The records of one kind, by object name.
#[derive(Debug)]
pub struct Cache<V> {
    /// The resource's plural, for messages.
    resource: &'static str,
    /// Whether a change is worth a pass.
    matters: fn(&V, &V) -> bool,
    inner: RwLock<Inner<V>>,
}

#[derive(Debug)]
struct Inner<V> {
    records: BTreeMap<String, Arc<V>>,
    /// Filled while a list is coming in, which replaces `records` once complete.
    incoming: BTreeMap<String, Arc<V>>,
    synced: bool,
    trouble: Option<String>,
}

impl<V> Cache<V> {
    /// An empty cache that has not been synced.
    #[must_use]
    pub fn new(resource: &'static str, matters: fn(&V, &V) -> bool) -> Self {
        let inner =
            Inner { records: BTreeMap::new(), incoming: BTreeMap::new(), synced: false, trouble: None };
        Self { resource, matters, inner: RwLock::new(inner) }
    }

    /// All records as they are now.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<String, Arc<V>> {
        self.read().records.clone()
    }

    /// Why the cache cannot be relied on, if it cannot: it has not been listed yet.
    #[must_use]
    pub fn unsynced(&self) -> Option<String> {
        let inner = self.read();
        (!inner.synced).then(|| match &inner.trouble {
            Some(trouble) => trouble.clone(),
            None => format!("{} have not been listed yet", self.resource),
        })
    }

    /// Takes in one event. Returns whether it is worth a pass.
    fn take<K>(&self, event: watcher::Event<K>, record: &impl Fn(&K) -> Option<V>) -> bool
    where
        K: Resource,
    {
        let mut inner = self.write();
        // Every attempt to list begins with an Init, also one that fails next.
        if !matches!(event, watcher::Event::Init) {
            inner.trouble = None;
        }
        match event {
            watcher::Event::Init => {
                inner.incoming.clear();
                false
            }
            watcher::Event::InitApply(object) => {
                if let Some(record) = record(&object) {
                    inner.incoming.insert(object.name_any(), Arc::new(record));
                }
                false
            }
            watcher::Event::InitDone => {
                inner.records = std::mem::take(&mut inner.incoming);
                inner.synced = true;
                true
            }
            watcher::Event::Apply(object) => match record(&object) {
                Some(new) => {
                    let old = inner.records.insert(object.name_any(), Arc::new(new));
                    let new = inner.records.get(&object.name_any());
                    match (old, new) {
                        (Some(old), Some(new)) => (self.matters)(&old, new),
                        _ => true,
                    }
                }
                None => inner.records.remove(&object.name_any()).is_some(),
            },
            watcher::Event::Delete(object) => inner.records.remove(&object.name_any()).is_some(),
        }
    }

    // A panic of another thread while it held the lock leaves a map that is still a map.
    fn read(&self) -> RwLockReadGuard<'_, Inner<V>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner<V>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches `api` into `cache` for ever; wakes `wake` after changes that matter.
pub async fn follow<K, V>(
    cache: Arc<Cache<V>>,
    api: Api<K>,
    config: watcher::Config,
    record: impl Fn(&K) -> Option<V>,
    wake: Arc<Notify>,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    take_all(&cache, watcher(api, config).default_backoff(), record, &wake).await;
}

async fn take_all<K: Resource, V>(
    cache: &Cache<V>,
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>>,
    record: impl Fn(&K) -> Option<V>,
    wake: &Notify,
) {
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                if cache.take(event, &record) {
                    wake.notify_one();
                }
            }
            Err(error) => {
                let trouble = explain(cache.resource, error);
                // The watcher retries with backoff; the same trouble is told once.
                let mut inner = cache.write();
                if inner.trouble.as_ref() != Some(&trouble) {
                    warn!("{trouble}");
                    inner.trouble = Some(trouble);
                }
            }
        }
    }
}

fn explain(resource: &'static str, error: watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error) => ApiError::new("list", resource, "", error).to_string(),
        watcher::Error::WatchStartFailed(error) | watcher::Error::WatchFailed(error) => {
            ApiError::new("watch", resource, "", error).to_string()
        }
        error => format!("the watch of {resource} failed and is started again: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn object(name: &str, label: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        object.metadata.name = Some(name.to_owned());
        object.metadata.labels = Some([("l".to_owned(), label.to_owned())].into());
        object
    }

    fn label(object: &ConfigMap) -> Option<String> {
        let label = object.metadata.labels.as_ref()?.get("l")?.clone();
        (label != "malformed").then_some(label)
    }

    #[test]
    fn a_list_replaces_everything_at_once_and_only_when_complete() {
        let cache = Cache::new("configmaps", PartialEq::ne);
        assert!(cache.unsynced().unwrap().contains("configmaps"));
        for event in [watcher::Event::Init, watcher::Event::InitApply(object("a", "1"))] {
            assert!(!cache.take(event, &label));
        }
        assert!(cache.snapshot().is_empty(), "half a list is no list");
        assert!(cache.take(watcher::Event::InitDone, &label));
        assert_eq!(cache.unsynced(), None);
        cache.take(watcher::Event::Init, &label);
        cache.take(watcher::Event::InitApply(object("b", "1")), &label);
        assert!(cache.snapshot().contains_key("a"), "the old list serves until the new one is complete");
        cache.take(watcher::Event::InitDone, &label);
        assert_eq!(cache.snapshot().into_keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn only_changes_that_matter_wake() {
        let cache = Cache::new("configmaps", PartialEq::ne);
        cache.take(watcher::Event::InitDone, &label);
        assert!(cache.take(watcher::Event::Apply(object("a", "1")), &label), "new");
        assert!(!cache.take(watcher::Event::Apply(object("a", "1")), &label), "equal");
        assert!(cache.take(watcher::Event::Apply(object("a", "2")), &label), "changed");
        assert!(cache.take(watcher::Event::Apply(object("a", "malformed")), &label), "no longer readable");
        assert!(!cache.take(watcher::Event::Delete(object("a", "1")), &label), "already gone");
    }

    #[tokio::test]
    async fn a_refused_list_names_verb_and_resource() {
        let cache: Cache<String> = Cache::new("nodes", PartialEq::ne);
        let refused = kube::core::Status::failure("nodes is forbidden", "Forbidden").with_code(403).boxed();
        let events =
            futures::stream::iter([Err(watcher::Error::InitialListFailed(kube::Error::Api(refused)))]);
        take_all::<ConfigMap, _>(&cache, events, label, &Notify::new()).await;
        let trouble = cache.unsynced().unwrap();
        assert!(trouble.contains("verb list on nodes"), "{trouble}");
    }
}
