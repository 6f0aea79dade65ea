//! The writer against a mocked API server: which requests it sends, and when.

use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::*;
use crate::config::tests::{candidate, sample};
use crate::events;
use crate::kernel::{SyncError, SyncFailure};
use crate::state::{Compatibility, FamilyState};
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;

type Handle = mock::Handle<Request<Body>, Response<Body>>;

struct Rig {
    handle: Handle,
    state: watch::Sender<SyncState>,
    _watches: watch::Sender<Watches>,
    _listeners: watch::Sender<Listeners>,
    _news: tokio::sync::mpsc::Receiver<events::News>,
    /// The status as the server holds it.
    held: Value,
}

fn sound() -> SyncState {
    let candidate = candidate("default", sample());
    let mut state = SyncState::new(Timestamp::UNIX_EPOCH);
    state.waiting.clear();
    state.config.assigned = Some(candidate.revision);
    state.config.assigned_hash = Some(candidate.hash);
    state.config.active.clone_from(&state.config.assigned);
    state.config.active_hash.clone_from(&state.config.assigned_hash);
    state.mode = Some(Mode::Iptables);
    state.compatibility = Compatibility::Supported;
    state.family_order = vec![IpFamily::IPv4];
    let family = FamilyState { last_updated: Some(Timestamp::UNIX_EPOCH), ..FamilyState::default() };
    state.families.insert(IpFamily::IPv4, family);
    state.verified = true;
    state
}

fn rig(held: Value) -> Rig {
    let (service, handle) = mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let (state, receiver) = watch::channel(sound());
    let (watches, watching) = watch::channel(Watches::default());
    let (events, news) = events::tests::unsent();
    let (listeners, listening) = watch::channel(Listeners::new());
    let writer = Writer::new(client, "n1", Identity::default(), receiver, watching, listening, events);
    tokio::spawn(writer.run());
    Rig { handle, state, _watches: watches, _listeners: listeners, _news: news, held }
}

impl Rig {
    /// The next request's body, if one comes within `seconds`.
    async fn request(&mut self, seconds: u64) -> Option<(Value, mock::SendResponse<Response<Body>>)> {
        let next = timeout(Duration::from_secs(seconds), self.handle.next_request()).await;
        let (request, send) = next.ok()?.unwrap();
        assert_eq!(request.method(), http::Method::PATCH);
        assert_eq!(
            request.uri().to_string(),
            "/apis/pointsman.dev/v1alpha1/proxynodestatuses/n1/status?&fieldManager=pointsman-agent"
        );
        assert_eq!(request.headers()["content-type"], "application/merge-patch+json");
        let body = request.into_body().collect_bytes().await.unwrap();
        Some((serde_json::from_slice(&body).unwrap(), send))
    }

    /// Answers as the server does: applies the patch.
    fn accept(&mut self, patch: &Value, send: mock::SendResponse<Response<Body>>) {
        merge(&mut self.held, &patch["status"]);
        let revision = sound().config.assigned;
        let object = json!({
            "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyNodeStatus",
            "metadata": {"name": "n1", "generation": 7},
            "spec": {"nodeName": "n1", "desired": {"revision": revision, "hash": format!("sha256:{:064}", 0)}},
            "status": self.held,
        });
        respond(send, 200, &object);
    }

    async fn accepted(&mut self, seconds: u64) -> Option<Value> {
        let (patch, send) = self.request(seconds).await?;
        self.accept(&patch, send);
        Some(patch["status"].clone())
    }
}

fn respond(send: mock::SendResponse<Response<Body>>, code: u16, body: &Value) {
    let body = Body::from(serde_json::to_vec(body).unwrap());
    send.send_response(Response::builder().status(code).body(body).unwrap());
}

fn refuse(send: mock::SendResponse<Response<Body>>, code: u16) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "no", "code": code});
    respond(send, code, &body);
}

/// RFC 7396.
fn merge(held: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *held = patch.clone();
        return;
    };
    if !held.is_object() {
        *held = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            held.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut held[key], value);
        }
    }
}

fn find<'a>(status: &'a Value, type_: &str) -> &'a Value {
    let all = status["conditions"].as_array().unwrap();
    all.iter().find(|condition| condition["type"] == type_).unwrap()
}

/// Until nothing more is to be said: the first write is followed by one with the generation learnt from it.
async fn quiet(rig: &mut Rig) {
    while rig.accepted(15).await.is_some() {}
}

#[tokio::test(start_paused = true)]
async fn the_first_patch_reads_and_the_second_writes_everything() {
    let held = json!({
        "state": "Stale",
        "config": {"rejected": "default-old"},
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "AsExpected", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "Synced", "status": "False", "reason": "SyncFailed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
    });
    let mut rig = rig(held);
    assert_eq!(rig.accepted(1).await, Some(json!({})), "reads");
    let written = rig.accepted(1).await.unwrap();
    assert_eq!(written["state"], "Ready");
    assert_eq!(written["observedGeneration"], 7);
    assert_eq!(written["config"]["rejected"], Value::Null, "what no longer holds is removed");
    assert!(written["config"].as_object().unwrap().contains_key("rejected"));
    assert_eq!(find(&written, "Ready")["lastTransitionTime"], "2026-01-01T00:00:00Z", "survives a restart");
    assert_ne!(find(&written, "Synced")["lastTransitionTime"], "2026-01-01T00:00:00Z");
    assert!(rig.held["config"].get("rejected").is_none());
    assert!(rig.request(200).await.is_none(), "the next heartbeat is 240 to 360 s after a write");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_nothing_changes_but_the_heartbeat() {
    let mut rig = rig(json!({}));
    quiet(&mut rig).await;
    let start = Instant::now();
    for number in 0..10 {
        rig.state.send_modify(|state| state.services = number);
        assert!(rig.request(20).await.is_none(), "counters ride along");
    }
    let beat = rig.accepted(300).await.unwrap();
    let waited = start.elapsed().as_secs() + 15;
    assert!((239..=362).contains(&waited), "{waited} s");
    assert_eq!(beat["state"], "Ready", "a heartbeat carries the state");
    assert_eq!(beat["conditions"].as_array().unwrap().len(), 6, "and all conditions");
    assert_eq!(beat["sync"]["services"], 9, "and the counters");
}

#[tokio::test(start_paused = true)]
async fn news_about_ready_is_written_within_seconds_and_other_news_later() {
    let mut rig = rig(json!({}));
    quiet(&mut rig).await;
    sleep(Duration::from_mins(1)).await;
    let error = SyncError {
        family: IpFamily::IPv4,
        failure: SyncFailure::RestoreFailed,
        message: "iptables-restore: line 7 failed".to_owned(),
    };
    let start = Instant::now();
    rig.state.send_modify(|state| {
        let family = state.families.get_mut(&IpFamily::IPv4).unwrap();
        family.consecutive_failures = 1;
        family.last_error = Some(error);
    });
    let written = rig.accepted(3).await.unwrap();
    assert_eq!(
        (&written["state"], &find(&written, "Ready")["status"]),
        (&json!("Degraded"), &json!("False"))
    );
    assert!(find(&written, "Synced")["message"].as_str().unwrap().contains("line 7"));
    // Ready again at once: written 2 s later.
    rig.state.send_modify(|state| *state = sound());
    let written = rig.accepted(3).await.unwrap();
    assert_eq!(find(&written, "Ready")["status"], "True");
    assert!(start.elapsed() >= Duration::from_secs(2));
    // Other news waits for its turn.
    let other = Instant::now();
    rig.state.send_modify(|state| state.config.last_known_good = Some("default-1".to_owned()));
    let written = rig.accepted(30).await.unwrap();
    assert_eq!(written["config"]["lastKnownGood"], "default-1");
    assert!(other.elapsed() >= Duration::from_secs(9), "{:?}", other.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_object_that_does_not_exist_yet_is_waited_for() {
    let mut rig = rig(json!({}));
    for code in [404, 404, 403, 500] {
        let (_, send) = rig.request(40).await.expect("it tries again");
        refuse(send, code);
    }
    assert_eq!(rig.accepted(40).await, Some(json!({})));
    assert_eq!(rig.accepted(1).await.unwrap()["state"], "Ready");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_is_given_up_on_and_asked_again() {
    let mut rig = rig(json!({}));
    let (_, hanging) = rig.request(1).await.unwrap();
    let start = Instant::now();
    assert!(rig.accepted(60).await.is_some());
    assert!(start.elapsed() >= PATCH_TIMEOUT);
    drop(hanging);
}

#[test]
fn a_refusal_names_the_verb() {
    let error = StatusError::Forbidden { name: "n1".to_owned(), message: "no".to_owned() }.to_string();
    assert!(error.contains("verb patch on proxynodestatuses/status"), "{error}");
}
