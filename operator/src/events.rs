//! Events: what people see in `kubectl describe`.
//!
//! In: conditions before and after a status was written, and marks of silent agents. Out: one Event per transition that
//! people should hear of, and none for the same object and reason within ten minutes, however it flaps.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use pointsman_crds::names::OPERATOR_FIELD_MANAGER;
use pointsman_crds::{Condition, ConditionStatus};
use tracing::warn;

use crate::error::ApiError;
use crate::stale::{Mark, STATE_STALE};

/// How long an object's event of one reason silences the next.
const QUIET: Duration = Duration::from_mins(10);
/// `note` may have 1,024 bytes.
const MAX_NOTE: usize = 1000;

/// One thing to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether somebody should look.
    pub warning: bool,
    /// The condition's reason.
    pub reason: String,
    /// The condition's message.
    pub note: String,
}

/// The transitions between two sets of conditions that people should hear of.
#[must_use]
pub fn transitions(old: &[Condition], new: &[Condition]) -> Vec<Notice> {
    new.iter()
        .filter_map(|condition| {
            let before = old.iter().find(|before| before.type_ == condition.type_);
            let holds = condition.status == ConditionStatus::True;
            if before
                .is_some_and(|before| before.status == condition.status && before.reason == condition.reason)
            {
                return None;
            }
            let warning = match condition.type_.as_str() {
                "Accepted" => !holds,
                "Conflicted" | "Degraded" => holds,
                _ => false,
            };
            // That a thing is still as expected, or that nothing is paused, is no news.
            let news = match condition.type_.as_str() {
                "Accepted" => !holds || before.is_some(),
                "Conflicted" | "Degraded" | "Paused" => holds || before.is_some(),
                "Progressing" => condition.reason == "RollingOut",
                "Ready" => holds,
                _ => false,
            };
            news.then(|| Notice {
                warning,
                reason: if condition.reason == "AsExpected" {
                    // By itself the reason does not say what has ended.
                    format!("Not{}", condition.type_)
                } else {
                    condition.reason.clone()
                },
                note: condition.message.clone(),
            })
        })
        .collect()
}

/// What to tell about a node whose agent is silent; that one has not reported yet is usual at first.
#[must_use]
pub fn silence(mark: &Mark) -> Option<Notice> {
    let ready = mark.conditions.iter().find(|condition| condition.type_ == "Ready")?;
    (mark.state == STATE_STALE).then(|| Notice {
        warning: true,
        reason: ready.reason.clone(),
        note: ready.message.clone(),
    })
}

/// Publishes notices.
pub struct Events {
    recorder: Recorder,
    told: HashMap<(String, String), Instant>,
}

impl Events {
    /// Events in the name of the replica `identity`.
    #[must_use]
    pub fn new(client: Client, identity: String) -> Self {
        let reporter = Reporter { controller: OPERATOR_FIELD_MANAGER.to_owned(), instance: Some(identity) };
        Self { recorder: Recorder::new(client, reporter), told: HashMap::new() }
    }

    /// Publishes `notice` about `object`. A failure is logged: events are help, not state.
    pub async fn publish(&mut self, object: &ObjectReference, notice: Notice) {
        if !self.is_due(object, &notice, Instant::now()) {
            return;
        }
        let mut note = notice.note;
        if let Some((end, _)) = note.char_indices().find(|(at, c)| at + c.len_utf8() > MAX_NOTE) {
            note.truncate(end);
        }
        let event = Event {
            type_: if notice.warning { EventType::Warning } else { EventType::Normal },
            reason: notice.reason,
            note: Some(note),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, object).await {
            let name = object.name.as_deref().unwrap_or_default();
            warn!("{}", ApiError::new("create", "events.events.k8s.io", name, error));
        }
    }

    fn is_due(&mut self, object: &ObjectReference, notice: &Notice, now: Instant) -> bool {
        self.told.retain(|_, told| now.duration_since(*told) < QUIET);
        let object = object.uid.clone().or_else(|| object.name.clone()).unwrap_or_default();
        match self.told.entry((object, notice.reason.clone())) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(now);
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::condition;

    fn reasons(old: &[Condition], new: &[Condition]) -> Vec<String> {
        let line = |notice: &Notice| format!("{}{}", if notice.warning { "!" } else { "" }, notice.reason);
        transitions(old, new).iter().map(line).collect()
    }

    #[test]
    fn a_new_layer_tells_what_is_news_only() {
        let new = [
            condition("Accepted", true, "Valid", ""),
            condition("Ready", false, "RollingOut", ""),
            condition("Progressing", true, "RollingOut", ""),
            condition("Degraded", false, "AsExpected", ""),
            condition("Conflicted", false, "AsExpected", ""),
            condition("Paused", false, "AsExpected", ""),
        ];
        assert_eq!(reasons(&[], &new), ["RollingOut"]);
        assert!(reasons(&new, &new).is_empty());
    }

    #[test]
    fn trouble_is_a_warning_and_its_end_is_told() {
        let fine = [
            condition("Accepted", true, "Valid", ""),
            condition("Degraded", false, "AsExpected", ""),
            condition("Conflicted", false, "AsExpected", ""),
        ];
        let bad = [
            condition("Accepted", false, "InvalidMergedConfig", ""),
            condition("Degraded", true, "NodesDegraded", ""),
            condition("Conflicted", true, "LayerConflict", ""),
        ];
        assert_eq!(reasons(&fine, &bad), ["!InvalidMergedConfig", "!NodesDegraded", "!LayerConflict"]);
        assert_eq!(reasons(&bad, &fine), ["Valid", "NotDegraded", "NotConflicted"]);
    }

    #[tokio::test]
    async fn a_flapping_object_is_told_of_once_in_ten_minutes() {
        let (service, _server) =
            tower_test::mock::pair::<::http::Request<_>, ::http::Response<kube::client::Body>>();
        let mut events = Events::new(Client::new(service, "default"), "op".to_owned());
        let object = |uid: &str| ObjectReference { uid: Some(uid.to_owned()), ..ObjectReference::default() };
        let notice = Notice { warning: true, reason: "AgentUnreachable".to_owned(), note: String::new() };
        let start = Instant::now();
        assert!(events.is_due(&object("a"), &notice, start));
        assert!(!events.is_due(&object("a"), &notice, start + Duration::from_secs(599)));
        assert!(events.is_due(&object("b"), &notice, start));
        assert!(events.is_due(&object("a"), &notice, start + Duration::from_mins(10)));
    }
}
