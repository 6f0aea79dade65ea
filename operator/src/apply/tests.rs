use http::{Method, Request, Response};
use kube::client::Body;
use tokio::time::{Duration, Instant};
use tower_test::mock::{self, Handle};

use super::*;
use crate::fixtures::{at, condition};

type Server = Handle<Request<Body>, Response<Body>>;

/// A writer that holds the lease, and the server it talks to.
fn writer() -> (Writer, Server) {
    let (service, server) = mock::pair();
    let (grant, leadership) = Leadership::new();
    grant.send_replace(Some(Instant::now() + Duration::from_mins(1)));
    (Writer::new(&Client::new(service, "default"), leadership), server)
}

/// Takes one request, answers it, and returns it as (method, path, query, content type, body).
async fn take(server: &mut Server, code: u16, answer: Value) -> (Method, String, String, Value) {
    let (request, send) = server.next_request().await.unwrap();
    let (parts, body) = request.into_parts();
    let body = body.collect_bytes().await.unwrap();
    let answer = Body::from(serde_json::to_vec(&answer).unwrap());
    send.send_response(Response::builder().status(code).body(answer).unwrap());
    let content_type = parts.headers.get("content-type").map_or("", |value| value.to_str().unwrap());
    let query = parts.uri.query().unwrap_or_default();
    let what = format!("{} {content_type}", parts.uri.path());
    (parts.method, what, query.to_owned(), serde_json::from_slice(&body).unwrap_or_default())
}

fn work() -> NodeWork {
    NodeWork {
        node: "n1".to_owned(),
        uid: "node-uid".to_owned(),
        pool: "edge".to_owned(),
        config: None,
        report: None,
    }
}

fn desired() -> Desired {
    Desired {
        sources: vec!["default@12".to_owned(), "edge@7".to_owned()],
        revision: "edge-0123456789".to_owned(),
        hash: "sha256:0123456789".to_owned(),
        content: "mode: iptables\n".to_owned(),
    }
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message})
}

#[tokio::test]
async fn a_config_map_is_applied_as_the_contract_says() {
    let (writer, mut server) = writer();
    let (work, desired) = (work(), desired());
    let (result, request) = tokio::join!(
        writer.config_map(&work, &desired),
        take(&mut server, 200, json!({"metadata": {"name": "n1"}}))
    );
    result.unwrap();
    let (method, what, query, body) = request;
    assert_eq!(method, Method::PATCH);
    assert_eq!(what, "/api/v1/namespaces/pointsman-node-config/configmaps/n1 application/apply-patch+yaml");
    assert_eq!(query, "&force=true&fieldManager=pointsman-operator");
    let expected = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "n1",
            "namespace": "pointsman-node-config",
            "labels": {
                "app.kubernetes.io/managed-by": "pointsman-operator",
                "pointsman.dev/pool": "edge",
                "pointsman.dev/revision": "edge-0123456789",
            },
            "annotations": {
                "pointsman.dev/config-hash": "sha256:0123456789",
                "pointsman.dev/sources": "default@12,edge@7",
            },
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-uid"}],
        },
        "data": {"config.yaml": "mode: iptables\n"},
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn a_report_is_applied_with_its_spec_and_owner_and_no_status() {
    let (writer, mut server) = writer();
    let work = work();
    let spec: ProxyNodeStatusSpec = serde_json::from_value(json!({
        "nodeName": "n1", "pool": "edge", "sources": ["default@12"],
        "desired": {"revision": "edge-0123456789", "hash": "sha256:0123456789"},
    }))
    .unwrap();
    let answer = json!({
        "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyNodeStatus",
        "metadata": {"name": "n1"}, "spec": {"nodeName": "n1"},
    });
    let (result, request) = tokio::join!(writer.report(&work, &spec), take(&mut server, 200, answer));
    result.unwrap();
    let (method, what, query, body) = request;
    assert_eq!(method, Method::PATCH);
    assert_eq!(what, "/apis/pointsman.dev/v1alpha1/proxynodestatuses/n1 application/apply-patch+yaml");
    assert_eq!(query, "&force=true&fieldManager=pointsman-operator");
    assert_eq!(body["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(body["spec"], serde_json::to_value(&spec).unwrap());
    assert_eq!(body.get("status"), None);
}

#[tokio::test]
async fn a_mark_names_the_version_it_replaces_and_touches_nothing_else() {
    let (writer, mut server) = writer();
    let conditions = vec![condition("Ready", false, "AgentUnreachable", "silent")];
    let mark = Mark { node: "n1".to_owned(), resource_version: "42".to_owned(), state: "Stale", conditions };
    let conflict = status(409, "Conflict", "the object has been modified");
    let (result, request) = tokio::join!(writer.mark(&mark), take(&mut server, 409, conflict));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("cannot patch proxynodestatuses.pointsman.dev/status n1"), "{error}");
    let (method, what, query, body) = request;
    assert_eq!(method, Method::PATCH);
    assert_eq!(what, "/apis/pointsman.dev/v1alpha1/proxynodestatuses/n1/status application/merge-patch+json");
    assert_eq!(query, "&fieldManager=pointsman-operator");
    assert_eq!(
        body,
        json!({"metadata": {"resourceVersion": "42"}, "status": {"state": "Stale", "conditions": mark.conditions}})
    );
}

#[tokio::test]
async fn a_sweep_deletes_only_the_object_that_was_seen() {
    let (writer, mut server) = writer();
    let sweep = Sweep { name: "n1".to_owned(), uid: "cm-uid".to_owned() };
    for (code, reason) in [(200, "Success"), (404, "NotFound"), (409, "Conflict")] {
        let (result, request) =
            tokio::join!(writer.sweep_config_map(&sweep), take(&mut server, code, status(code, reason, "")));
        result.unwrap();
        let (method, what, _, body) = request;
        assert_eq!(method, Method::DELETE);
        assert!(what.starts_with("/api/v1/namespaces/pointsman-node-config/configmaps/n1 "), "{what}");
        assert_eq!(body["preconditions"], json!({"uid": "cm-uid"}));
    }
    let (result, request) =
        tokio::join!(writer.sweep_report(&sweep), take(&mut server, 200, status(200, "Success", "")));
    result.unwrap();
    assert!(request.1.starts_with("/apis/pointsman.dev/v1alpha1/proxynodestatuses/n1 "), "{}", request.1);
}

#[tokio::test]
async fn a_layers_status_is_applied_whole() {
    let (writer, mut server) = writer();
    let status = ProxyConfigurationStatus {
        observed_generation: Some(3),
        state: Some("Ready".to_owned()),
        conditions: vec![condition("Ready", true, "RolloutComplete", "done")],
        ..ProxyConfigurationStatus::default()
    };
    let answer = json!({
        "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration",
        "metadata": {"name": "edge"}, "spec": {"proxy": {}},
    });
    let (result, request) =
        tokio::join!(writer.layer_status("edge", &status), take(&mut server, 200, answer));
    result.unwrap();
    let (_, what, query, body) = request;
    assert_eq!(
        what,
        "/apis/pointsman.dev/v1alpha1/proxyconfigurations/edge/status application/apply-patch+yaml"
    );
    assert_eq!(query, "&force=true&fieldManager=pointsman-operator");
    assert_eq!(body["status"]["conditions"][0]["lastTransitionTime"], serde_json::to_value(at(0)).unwrap());
    assert_eq!(body["status"]["observedGeneration"], 3);
    assert_eq!(body.get("spec"), None);
}

#[tokio::test]
async fn a_missing_permission_is_named() {
    let (writer, mut server) = writer();
    let (work, desired) = (work(), desired());
    let forbidden = status(403, "Forbidden", "configmaps \"n1\" is forbidden");
    let (result, _) = tokio::join!(writer.config_map(&work, &desired), take(&mut server, 403, forbidden));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("needs verb patch on configmaps"), "{error}");
}

#[tokio::test]
async fn without_the_lease_nothing_is_sent() {
    let (service, mut server) = mock::pair::<Request<Body>, Response<Body>>();
    let (grant, leadership) = Leadership::new();
    let writer = Writer::new(&Client::new(service, "default"), leadership);
    let sweep = Sweep { name: "n1".to_owned(), uid: "uid".to_owned() };
    // Never held; run out although nobody has said so; taken away.
    for until in [None, Some(Instant::now()), None] {
        grant.send_replace(until);
        let refused = [
            writer.config_map(&work(), &desired()).await.err(),
            writer.sweep_config_map(&sweep).await.err(),
            writer.sweep_report(&sweep).await.err(),
            writer.layer_status("edge", &ProxyConfigurationStatus::default()).await.err(),
        ];
        assert!(refused.iter().all(|error| matches!(error, Some(ApiError::NotLeader))), "{refused:?}");
    }
    assert!(futures::poll!(std::pin::pin!(server.next_request())).is_pending());
}
