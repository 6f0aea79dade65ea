//! One watch: lists, follows, recovers, and says how it is doing.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::watcher::{self, Event, InitialListStrategy, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};
use tracing::{debug, error, info, warn};

use crate::model::ObjectName;
use crate::random;
use crate::state::{Source, Watches};
use crate::sync::Input;

/// Waits between attempts, doubled each time. The longest is what a restarted API server is missed for at most.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A server that does not have the API, or does not let us see it, is asked again after this.
const ABSENT_WAIT: Duration = Duration::from_mins(5);

/// The objects that a watch has reported, by namespace and name: what a new list lacks has vanished.
#[derive(Debug, Default)]
pub struct Seen(HashMap<Arc<str>, HashSet<Box<str>>>);

impl Seen {
    fn insert(&mut self, name: &ObjectName) {
        if !self.0.contains_key(&name.namespace) {
            self.0.insert(Arc::clone(&name.namespace), HashSet::new());
        }
        if let Some(names) = self.0.get_mut(&name.namespace) {
            names.insert((*name.name).into());
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn remove(&mut self, name: &ObjectName) {
        if let Some(names) = self.0.get_mut(&name.namespace) {
            names.remove(&*name.name);
            if names.is_empty() {
                self.0.remove(&name.namespace);
            }
        }
    }

    /// Those that are not among `others`.
    fn missing_from(&self, others: &Self) -> Vec<ObjectName> {
        let mut missing = Vec::new();
        for (namespace, names) in &self.0 {
            let known = others.0.get(namespace);
            let gone = names.iter().filter(|name| !known.is_some_and(|known| known.contains(*name)));
            missing.extend(gone.map(|name| ObjectName::new(Arc::clone(namespace), &**name)));
        }
        missing
    }
}

/// Turns objects into inputs.
pub trait Sink<K>: Send {
    /// A list is complete.
    fn listed(&self, source: Source) -> Input {
        Input::Listed(source)
    }

    /// An object is there, new or changed.
    fn applied(&mut self, object: K) -> Option<Input>;

    /// An object is gone.
    fn deleted(&mut self, name: ObjectName) -> Option<Input>;

    /// An object cannot be read. What was known of it is kept.
    fn invalid(&mut self, _: &InvalidObject) -> Option<Input> {
        None
    }
}

/// Where one watch reports to.
#[derive(Clone)]
pub struct Feed {
    pub source: Source,
    pub inputs: mpsc::Sender<Input>,
    pub watches: watch::Sender<Watches>,
}

/// Why a watch does not work.
#[derive(Debug, PartialEq, Eq)]
enum Trouble {
    /// No permission.
    Forbidden(String),
    /// The server does not have the API.
    Absent(String),
    /// The server cannot send lists as a stream.
    NoStreaming,
    /// Where we were is too long ago; the next thing is a new list, and nothing is wrong.
    Outdated,
    /// The server is away, or anything else that passes.
    Passing(String),
}

impl Feed {
    /// Follows `api` until the sync loop is gone.
    pub async fn run<K>(
        self,
        api: Api<DeserializeGuard<K>>,
        config: watcher::Config,
        seen: &mut Seen,
        sink: &mut impl Sink<K>,
    ) where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        // A stream costs server and agent less memory than a list in one piece.
        let mut config = config.streaming_lists();
        let mut wait = FIRST_WAIT;
        let mut inherited = !seen.is_empty();
        'streams: loop {
            let mut stream = std::pin::pin!(watcher(api.clone(), config.clone()));
            let mut listed: Option<Seen> = None;
            while let Some(event) = stream.next().await {
                let (mut outcome, mut gone) = (Vec::new(), Vec::new());
                match event {
                    // The beginning of a list is not yet an answer.
                    Ok(Event::Init) => listed = Some(Seen::default()),
                    Ok(Event::InitApply(object) | Event::Apply(object)) => {
                        let name = ObjectName::of(object.meta());
                        if let Some(listed) = &mut listed {
                            listed.insert(&name);
                        }
                        match object.0 {
                            Ok(object) => {
                                seen.insert(&name);
                                outcome.extend(sink.applied(object));
                                if self.source == Source::Node || self.source == Source::NodeConfig {
                                    outcome.push(sink.listed(self.source));
                                }
                            }
                            Err(broken) => {
                                warn!(object = %name, "skipped: {} cannot be read: {}", self.source, broken.error);
                                outcome.extend(sink.invalid(&broken));
                            }
                        }
                        wait = FIRST_WAIT;
                        self.working(false);
                    }
                    Ok(Event::Delete(object)) => {
                        let name = ObjectName::of(object.meta());
                        outcome.extend(sink.deleted(name.clone()));
                        gone.push(name);
                        self.working(false);
                    }
                    Ok(Event::InitDone) => {
                        let listed = listed.take().unwrap_or_default();
                        // The own Node and ConfigMap count when they are there; an empty list of them is none.
                        let counts = self.source != Source::Node && self.source != Source::NodeConfig;
                        // What another watch has seen is served until this list is.
                        if counts && inherited {
                            outcome.push(sink.listed(self.source));
                        }
                        gone = seen.missing_from(&listed);
                        outcome.extend(gone.iter().filter_map(|name| sink.deleted(name.clone())));
                        if counts && !inherited {
                            outcome.push(sink.listed(self.source));
                        }
                        inherited = false;
                        wait = FIRST_WAIT;
                        self.working(true);
                    }
                    Err(failure) => match self.trouble(&failure, &config) {
                        Trouble::NoStreaming => {
                            info!(
                                "{}: this API server does not stream lists; using plain lists",
                                self.source
                            );
                            config.initial_list_strategy = InitialListStrategy::ListWatch;
                            continue 'streams;
                        }
                        Trouble::Outdated => debug!("{}: listing again", self.source),
                        trouble => {
                            // Let in and then thrown out again is a new story.
                            if !self.failing() {
                                wait = FIRST_WAIT;
                            }
                            let pause = self.complain(trouble, wait);
                            wait = (wait * 2).min(LONGEST_WAIT);
                            sleep(pause.mul_f64(0.8 + 0.4 * random::fraction())).await;
                        }
                    },
                }
                for input in outcome {
                    if self.inputs.send(input).await.is_err() {
                        return;
                    }
                }
                // Not before: a watch that ends here has not told of all of them.
                for name in &gone {
                    seen.remove(name);
                }
            }
        }
    }

    fn trouble(&self, failure: &watcher::Error, config: &watcher::Config) -> Trouble {
        let (verb, status) = match failure {
            watcher::Error::InitialListFailed(kube::Error::Api(status)) => ("list", status),
            watcher::Error::WatchStartFailed(kube::Error::Api(status))
            | watcher::Error::WatchFailed(kube::Error::Api(status))
            | watcher::Error::WatchError(status) => ("watch", status),
            _ => return Trouble::Passing(format!("{} cannot be watched: {}", self.source, chain(failure))),
        };
        let (resource, group) = self.source.resource();
        match status.code {
            403 => Trouble::Forbidden(format!(
                "{} cannot be watched: the verb {verb} on {resource} in the API group {group:?} is not allowed ({}); give the \
                 agent's service account the verbs list and watch on it",
                self.source, status.message
            )),
            410 => Trouble::Outdated,
            404 => Trouble::Absent(format!(
                "{} cannot be watched: this API server does not have {resource} in the API group {group:?}",
                self.source
            )),
            400 | 422
                if config.initial_list_strategy == InitialListStrategy::StreamingList
                    && status.message.contains("sendInitialEvents") =>
            {
                Trouble::NoStreaming
            }
            _ => Trouble::Passing(format!("{} cannot be watched: {}", self.source, status.message)),
        }
    }

    /// Reports trouble, once for each message, and says how long to wait.
    fn complain(&self, trouble: Trouble, wait: Duration) -> Duration {
        let optional = !Source::REQUIRED.contains(&self.source);
        let (text, severe, pause) = match trouble {
            Trouble::Forbidden(text) => (text, true, if optional { ABSENT_WAIT } else { wait }),
            Trouble::Absent(text) => (text, false, if optional { ABSENT_WAIT } else { wait }),
            Trouble::Passing(text) => (text, false, wait),
            Trouble::NoStreaming | Trouble::Outdated => return Duration::ZERO,
        };
        let mut news = false;
        self.watches.send_if_modified(|all| {
            let watch = all.0.entry(self.source).or_default();
            news = watch.failing.as_ref().is_none_or(|(_, known)| *known != text);
            if news {
                let since = watch.failing.as_ref().map_or_else(Instant::now, |(since, _)| *since);
                watch.failing = Some((since, text.clone()));
            }
            news
        });
        if news && severe && !optional {
            error!("{text}");
        } else if news {
            warn!("{text}");
        }
        pause
    }

    fn failing(&self) -> bool {
        self.watches.borrow().0.get(&self.source).is_some_and(|watch| watch.failing.is_some())
    }

    /// The server has answered; `listed` says that a list is complete.
    pub fn working(&self, listed: bool) {
        self.watches.send_if_modified(|all| {
            let watch = all.0.entry(self.source).or_default();
            let recovered = watch.failing.take().is_some();
            if recovered {
                info!("{} can be watched again", self.source);
            }
            let first = listed && !watch.listed;
            watch.listed |= listed;
            recovered || first
        });
    }
}

/// An error with its causes: the outermost one alone rarely says which connection was refused.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}
