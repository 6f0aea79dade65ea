//! The watches against a mocked API server.

use std::time::Duration;

use http::{Request, Response};
use k8s_openapi::jiff::Timestamp;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::timeout;
use tower_test::mock;

use super::*;

type Handle = mock::Handle<Request<Body>, Response<Body>>;

struct Rig {
    handle: Handle,
    watching: Watching,
    inputs: mpsc::Receiver<Input>,
    state: watch::Sender<SyncState>,
}

fn rig() -> Rig {
    let (service, handle) = mock::pair::<Request<Body>, Response<Body>>();
    let (inputs, received) = mpsc::channel(64);
    let (state, of_state) = watch::channel(SyncState::new(Timestamp::UNIX_EPOCH));
    let watching = Watching {
        client: Client::new(service, "default"),
        node: "n1".to_owned(),
        config_namespace: "pointsman-node-config".to_owned(),
        inputs,
        watches: watch::Sender::new(Watches::default()),
        eligibility: watch::Sender::new(NodeEligibility::default()),
        state: of_state,
    };
    Rig { handle, watching, inputs: received, state }
}

impl Rig {
    /// Answers the next request with watch events, one a line. Returns its path and query.
    async fn answer(&mut self, events: &[Value]) -> String {
        let body = events.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n") + "\n";
        self.respond(200, body).await
    }

    async fn refuse(&mut self, code: u16, message: &str) -> String {
        let body = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "message": message, "reason": "Refused", "code": code,
        });
        self.respond(code, body.to_string()).await
    }

    async fn respond(&mut self, code: u16, body: String) -> String {
        let next = timeout(Duration::from_mins(10), self.handle.next_request()).await;
        let (request, send) = next.expect("a request").unwrap();
        let response = Response::builder().status(code).body(Body::from(body.into_bytes())).unwrap();
        send.send_response(response);
        request.uri().to_string()
    }

    /// What the sync loop was told, in short.
    fn told(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.inputs.try_recv().ok()).map(|input| short(&input)).collect()
    }

    async fn settle(&self) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    fn failure(&self, source: Source) -> Option<String> {
        let watches = self.watching.watches.borrow();
        watches.0.get(&source)?.failing.as_ref().map(|(_, error)| error.clone())
    }
}

fn short(input: &Input) -> String {
    match input {
        Input::Change(Change::ServiceApplied(service)) => {
            format!("+{}", service.metadata.name.as_deref().unwrap())
        }
        Input::Change(Change::ServiceDeleted(name)) => format!("-{}", name.name),
        Input::Change(Change::Node(facts)) => format!("node {}", facts.name),
        Input::Change(Change::ServiceCidrs(all)) => format!("cidrs {all:?}"),
        Input::Change(other) => format!("{other:?}"),
        Input::Listed(source) => format!("listed {source}"),
        Input::ServicesListed(name) => format!("listed Services {name}").trim_end().to_owned(),
        Input::Config(assessment) => match &assessment.outcome {
            Ok(candidate) => format!("config {}", candidate.revision),
            Err(rejection) => format!("config {}", rejection.reason),
        },
    }
}

fn service(name: &str) -> Value {
    json!({"type": "ADDED", "object": {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "shop", "name": name, "resourceVersion": "5"}, "spec": {},
    }})
}

fn end_of_list(kind: &str) -> Value {
    json!({"type": "BOOKMARK", "object": {
        "apiVersion": "v1", "kind": kind,
        "metadata": {"resourceVersion": "10", "annotations": {"k8s.io/initial-events-end": "true"}},
    }})
}

fn gone() -> Value {
    json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "too old", "code": 410,
    }})
}

#[tokio::test(start_paused = true)]
async fn what_a_new_list_lacks_is_deleted() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().services());
    let first = [service("a"), service("b"), end_of_list("Service"), gone()];
    let uri = rig.answer(&first).await;
    assert!(uri.contains("labelSelector=%21service.kubernetes.io%2Fservice-proxy-name"), "{uri}");
    assert!(uri.contains("sendInitialEvents=true"), "{uri}");
    rig.settle().await;
    assert_eq!(rig.told(), ["+a", "+b", "listed Services"]);
    rig.answer(&[service("b"), service("c"), end_of_list("Service")]).await;
    rig.settle().await;
    assert_eq!(rig.told(), ["+b", "+c", "-a", "listed Services"]);
}

#[tokio::test(start_paused = true)]
async fn a_malformed_object_is_skipped_and_what_was_known_of_it_kept() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().services());
    let mut broken = service("a");
    broken["object"]["spec"] = json!("nonsense");
    rig.answer(&[service("a"), service("b"), end_of_list("Service"), gone()]).await;
    rig.settle().await;
    rig.told();
    rig.answer(&[broken, service("b"), service("c"), end_of_list("Service")]).await;
    rig.settle().await;
    assert_eq!(rig.told(), ["+b", "+c", "listed Services"], "neither a stall nor a deletion of a");
}

#[tokio::test(start_paused = true)]
async fn no_permission_names_the_verb_and_heals() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().slices());
    for _ in 0..3 {
        rig.refuse(403, "endpointslices is forbidden").await;
    }
    let error = rig.failure(Source::EndpointSlices).unwrap();
    assert!(error.contains("watch on endpointslices in the API group \"discovery.k8s.io\""), "{error}");
    assert!(error.contains("verbs list and watch"), "{error}");
    rig.answer(&[end_of_list("EndpointSlice")]).await;
    rig.settle().await;
    assert_eq!(rig.failure(Source::EndpointSlices), None);
    assert_eq!(rig.told(), ["listed EndpointSlices"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_without_streaming_lists_is_listed_plainly() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().services());
    rig.refuse(422, "sendInitialEvents: Forbidden: the WatchList feature gate is disabled").await;
    let list = json!({
        "apiVersion": "v1", "kind": "ServiceList", "metadata": {"resourceVersion": "9"},
        "items": [service("a")["object"]],
    });
    let uri = rig.respond(200, list.to_string()).await;
    assert!(!uri.contains("watch="), "{uri}");
    rig.settle().await;
    assert_eq!(rig.told(), ["+a", "listed Services"]);
    assert_eq!(rig.failure(Source::Services), None);
}

#[tokio::test(start_paused = true)]
async fn another_proxy_name_is_another_watch_that_takes_away_the_old_services() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().services());
    rig.answer(&[service("a"), end_of_list("Service")]).await;
    rig.settle().await;
    assert_eq!(rig.told(), ["+a", "listed Services"]);
    rig.state.send_modify(|state| {
        state.config.service_proxy_name = Some("edge".to_owned());
    });
    // The old watch was about to resume when the name changed; its request may still be in the queue.
    let mut uri = rig.answer(&[service("b"), end_of_list("Service")]).await;
    if !uri.contains("edge") {
        uri = rig.answer(&[service("b"), end_of_list("Service")]).await;
    }
    assert!(uri.contains("service-proxy-name%3Dedge"), "{uri}");
    rig.settle().await;
    let told = rig.told();
    let last = told.len().saturating_sub(3);
    assert_eq!(told[last..], ["+b", "listed Services edge", "-a"], "served until the new ones are known");
}

// ids: SYN-1
#[tokio::test(start_paused = true)]
async fn the_first_list_is_of_the_services_that_the_configuration_on_disk_is_about() {
    let mut rig = rig();
    rig.state.send_modify(|state| state.config.service_proxy_name = Some("edge".to_owned()));
    tokio::spawn(rig.watching.clone().services());
    let uri = rig.answer(&[service("a"), end_of_list("Service")]).await;
    assert!(uri.contains("service-proxy-name%3Dedge"), "{uri}");
    rig.settle().await;
    assert_eq!(rig.told(), ["+a", "listed Services edge"]);
}

// ids: HZ-2 NM-1 NM-6
#[tokio::test(start_paused = true)]
async fn hz_2_the_own_node_counts_when_it_is_there_and_is_to_stay() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().own_node());
    let node = |taints: Value| {
        json!({"type": "ADDED", "object": {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "resourceVersion": "5"},
            "spec": {"taints": taints},
        }})
    };
    let other = json!([{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]);
    let uri = rig.answer(&[end_of_list("Node"), node(other)]).await;
    assert!(uri.contains("fieldSelector=metadata.name%3Dn1"), "{uri}");
    rig.settle().await;
    assert_eq!(rig.told(), ["node n1", "listed the Node"]);
    assert!(rig.watching.eligibility.borrow().eligible());
    let taint = json!([{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]);
    let deleted = json!({"type": "DELETED", "object": node(json!([]))["object"]});
    rig.answer(&[node(taint)]).await;
    rig.settle().await;
    assert!(!rig.watching.eligibility.borrow().eligible());
    rig.told();
    rig.answer(&[deleted]).await;
    rig.settle().await;
    assert!(!rig.watching.eligibility.borrow().exists);
    assert_eq!(rig.told(), [""; 0], "what is served is served until the node is switched off");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_config_map_is_reported_and_an_absent_one_waited_for() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().own_config());
    let map = json!({"type": "ADDED", "object": {
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"namespace": "pointsman-node-config", "name": "n1", "resourceVersion": "5"},
        "data": {"config.yaml": "mode: ["},
    }});
    let deleted = json!({"type": "DELETED", "object": map["object"]});
    let uri = rig.answer(&[end_of_list("ConfigMap"), map, deleted]).await;
    assert!(uri.starts_with("/api/v1/namespaces/pointsman-node-config/configmaps?"), "{uri}");
    assert!(uri.contains("fieldSelector=metadata.name%3Dn1"), "{uri}");
    rig.settle().await;
    assert_eq!(rig.told(), ["config HashMismatch", "listed the node's ConfigMap", "config Missing"]);
}

#[tokio::test(start_paused = true)]
async fn servicecidrs_may_be_missing() {
    let mut rig = rig();
    tokio::spawn(rig.watching.clone().service_cidrs());
    rig.refuse(404, "the server could not find the requested resource").await;
    rig.settle().await;
    assert!(rig.failure(Source::ServiceCidrs).unwrap().contains("does not have servicecidrs"));
    let cidr = json!({"type": "ADDED", "object": {
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes", "resourceVersion": "5"},
        "spec": {"cidrs": ["10.96.0.0/16", "nonsense", "fd00::/108"]},
    }});
    rig.answer(&[cidr, end_of_list("ServiceCIDR")]).await;
    rig.settle().await;
    assert_eq!(rig.told(), ["cidrs [10.96.0.0/16, fd00::/108]", "listed ServiceCIDRs"]);
}
