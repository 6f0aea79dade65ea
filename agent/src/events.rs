//! Events on the Node, for those who look there first.
//!
//! In: each status that is derived. Out: an Event when the node stops or starts being Ready, when a configuration is
//! refused, when what others changed in our kernel state was repaired, and when a port is taken. Only transitions count, and the same news is told at most
//! once in ten minutes: a flapping node is one story. [`objects`] has the Events on Services.

pub mod objects;

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use pointsman_crds::ProxyNodeStatusStatus;
use pointsman_crds::condition::{Condition, ConditionStatus};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use crate::http::Listeners;
use crate::status::build::condition;

/// Who says it, in `reportingController`.
const CONTROLLER: &str = "pointsman-agent";
const AGAIN_AFTER: Duration = Duration::from_mins(10);
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// What an Event's note can hold, in bytes.
const NOTE: usize = 1024;
/// More news than this before the API server takes any of it is not worth keeping.
const QUEUE: usize = 16;

/// One piece of news.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Whether somebody should look.
    pub warning: bool,
    /// One word.
    pub reason: String,
    /// For people.
    pub note: String,
}

/// Finds the news in a sequence of statuses and passes it on.
pub struct Events {
    queue: mpsc::Sender<News>,
    last_ready: Option<Condition>,
    last_refusal: Option<Condition>,
    last_repairs: i32,
    last_listeners: Listeners,
    told: HashMap<String, Instant>,
}

impl Events {
    /// Sends news about Node `node` through `client`, from a task of its own.
    #[must_use]
    pub fn start(client: Client, node: &str) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE);
        let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(node.to_owned()) };
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            // As kubelet does: `kubectl describe node` looks for the name here.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        tokio::spawn(send(Recorder::new(client, reporter), regarding, receiver));
        Self::to(queue)
    }

    fn to(queue: mpsc::Sender<News>) -> Self {
        Self {
            queue,
            last_ready: None,
            last_refusal: None,
            last_repairs: 0,
            last_listeners: Listeners::new(),
            told: HashMap::new(),
        }
    }

    /// Compares `status` with the one before.
    pub fn observe(&mut self, status: &ProxyNodeStatusStatus) {
        let ready = condition(status, "Ready").cloned();
        let refusal =
            condition(status, "ConfigApplied").filter(|it| it.status == ConditionStatus::False).cloned();
        if let Some(ready) = &ready {
            let was = self.last_ready.as_ref().map(|last| last.status == ConditionStatus::True);
            let is = ready.status == ConditionStatus::True;
            match (was, is) {
                // A refused configuration is its own news; saying it twice helps nobody.
                (Some(true), false) if refusal.as_ref().is_some_and(|it| it.message == ready.message) => {}
                (Some(true), false) => self.tell(true, &ready.reason, &ready.message),
                (Some(false), true) => self.tell(false, "ProxyReady", &ready.message),
                _ => {}
            }
        }
        if let Some(refusal) = &refusal {
            let same = |last: &Condition| last.reason == refusal.reason && last.message == refusal.message;
            if !self.last_refusal.as_ref().is_some_and(same) {
                self.tell(true, &format!("Config{}", refusal.reason), &refusal.message);
            }
        }
        if let Some(drift) = status.drift.as_ref().filter(|drift| drift.repairs > self.last_repairs) {
            self.last_repairs = drift.repairs;
            let what = drift.last_diff.as_deref().unwrap_or("something");
            self.tell(
                true,
                "DriftRepaired",
                &format!("others had changed our kernel state, and it is repaired: {what}"),
            );
        }
        self.last_ready = ready;
        self.last_refusal = refusal;
    }

    /// Compares what hinders the ports with what did before. The reasons are kube-proxy's.
    pub fn observe_listeners(&mut self, listeners: &Listeners) {
        for (&name, problem) in listeners {
            let Some(problem) = problem else { continue };
            if self.last_listeners.get(name).is_some_and(Option::is_some) {
                continue;
            }
            let reason = if name == "metrics" {
                "FailedToStartMetricServer"
            } else {
                "FailedToStartProxierHealthcheck"
            };
            self.tell(true, reason, problem);
        }
        self.last_listeners.clone_from(listeners);
    }

    fn tell(&mut self, warning: bool, reason: &str, note: &str) {
        let now = Instant::now();
        self.told.retain(|_, at| now.saturating_duration_since(*at) < AGAIN_AFTER);
        if self.told.contains_key(reason) {
            return;
        }
        self.told.insert(reason.to_owned(), now);
        if warning {
            warn!(reason, "{note}");
        } else {
            info!(reason, "{note}");
        }
        let news = News { warning, reason: reason.to_owned(), note: note.to_owned() };
        if self.queue.try_send(news).is_err() {
            debug!(reason, "the event is dropped: the API server has not taken earlier ones");
        }
    }
}

async fn send(recorder: Recorder, regarding: ObjectReference, mut queue: mpsc::Receiver<News>) {
    while let Some(news) = queue.recv().await {
        let event = Event {
            type_: if news.warning { EventType::Warning } else { EventType::Normal },
            reason: news.reason,
            note: Some(shortened(&news.note, NOTE).to_owned()),
            action: "ProgramServices".to_owned(),
            secondary: None,
        };
        match timeout(SEND_TIMEOUT, recorder.publish(&event, &regarding)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => unwritten(&error),
            Err(_) => debug!("the event was not written: the API server did not answer"),
        }
    }
}

/// At most so many bytes, which is how the API server counts here.
fn shortened(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// What could not be written is lost; that it never can be is for somebody to mend.
fn unwritten(error: &kube::Error) {
    match error {
        kube::Error::Api(status) if status.code == 403 => warn!(
            "not allowed to write events ({}); the agent's ClusterRole needs the verbs create and patch on events in the \
             group events.k8s.io",
            status.message
        ),
        error => debug!(%error, "the event was not written"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use pointsman_crds::proxy_node_status::DriftInfo;

    /// Events that nobody sends.
    pub(crate) fn unsent() -> (Events, mpsc::Receiver<News>) {
        let (queue, receiver) = mpsc::channel(QUEUE);
        (Events::to(queue), receiver)
    }

    fn status(ready: bool, refusal: Option<&str>) -> ProxyNodeStatusStatus {
        let make = |type_: &str, status: bool, reason: &str| Condition {
            type_: type_.to_owned(),
            status: status.into(),
            reason: reason.to_owned(),
            message: reason.to_lowercase(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        };
        ProxyNodeStatusStatus {
            conditions: vec![
                make("Ready", ready, if ready { "AsExpected" } else { "NotSynced" }),
                make("ConfigApplied", refusal.is_none(), refusal.unwrap_or("Applied")),
            ],
            ..ProxyNodeStatusStatus::default()
        }
    }

    fn reasons(receiver: &mut mpsc::Receiver<News>) -> Vec<String> {
        std::iter::from_fn(|| receiver.try_recv().ok()).map(|news| news.reason).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn only_transitions_are_told_and_flapping_is_told_once() {
        let (mut events, mut receiver) = unsent();
        events.observe(&status(false, None));
        assert!(reasons(&mut receiver).is_empty(), "starting is no news");
        for _ in 0..3 {
            events.observe(&status(true, None));
            events.observe(&status(true, None));
            events.observe(&status(false, None));
        }
        assert_eq!(reasons(&mut receiver), ["ProxyReady", "NotSynced"]);
        tokio::time::advance(AGAIN_AFTER).await;
        events.observe(&status(true, None));
        assert_eq!(reasons(&mut receiver), ["ProxyReady"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_repair_is_told_with_what_was_changed() {
        let (mut events, mut receiver) = unsent();
        let mut repaired = status(true, None);
        events.observe(&repaired);
        let last_diff = Some("chain KUBE-SERVICES is missing".to_owned());
        repaired.drift = Some(DriftInfo { repairs: 1, last_diff, ..DriftInfo::default() });
        events.observe(&repaired);
        events.observe(&repaired);
        let news = receiver.try_recv().unwrap();
        assert_eq!((news.warning, news.reason.as_str()), (true, "DriftRepaired"));
        assert!(news.note.ends_with("chain KUBE-SERVICES is missing"), "{}", news.note);
        assert!(receiver.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_port_that_is_taken_is_told_once() {
        let (mut events, mut receiver) = unsent();
        let taken = Listeners::from([("healthz", Some("in use".to_owned())), ("metrics", None)]);
        events.observe_listeners(&taken);
        events.observe_listeners(&taken);
        events
            .observe_listeners(&Listeners::from([("healthz", None), ("metrics", Some("in use".to_owned()))]));
        assert_eq!(reasons(&mut receiver), ["FailedToStartProxierHealthcheck", "FailedToStartMetricServer"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_configuration_is_told_with_its_reason() {
        let (mut events, mut receiver) = unsent();
        for _ in 0..3 {
            events.observe(&status(true, Some("UnsupportedField")));
        }
        events.observe(&status(true, Some("HashMismatch")));
        assert_eq!(reasons(&mut receiver), ["ConfigUnsupportedField", "ConfigHashMismatch"]);
    }
}
