use super::*;

fn news(name: &str, note: &str, scope: Scope) -> ObjectNews {
    let name = ObjectName::new("shop", name);
    ObjectNews { kind: "Service", name, reason: "NotServed", note: note.to_owned(), scope }
}

fn told(agenda: &mut Agenda) -> Vec<String> {
    std::iter::from_fn(|| agenda.pop()).map(|news| format!("{} {}", news.name.name, news.note)).collect()
}

#[tokio::test(start_paused = true)]
async fn the_same_news_is_told_once_an_hour_and_nothing_leaks() {
    let mut agenda = Agenda::new();
    for _ in 0..3 {
        agenda.take(news("web", "a", Scope::Node), 0.0);
        agenda.take(news("web", "b", Scope::Node), 0.0);
    }
    assert_eq!(told(&mut agenda), ["web a", "web b"]);
    agenda.take(news("web", "a", Scope::Node), 0.0);
    assert_eq!(agenda.next(), None);
    tokio::time::advance(AGAIN_AFTER).await;
    agenda.take(news("web", "a", Scope::Node), 0.0);
    assert_eq!(agenda.told.len(), 1, "what is old is forgotten");
    assert_eq!(told(&mut agenda), ["web a"]);
}

#[tokio::test(start_paused = true)]
async fn what_every_node_finds_is_spread_and_what_one_node_finds_is_told_at_once() {
    let mut agenda = Agenda::new();
    agenda.take(news("web", "a", Scope::Cluster), 0.5);
    agenda.take(news("web", "b", Scope::Node), 0.5);
    assert_eq!(told(&mut agenda), ["web b"]);
    assert_eq!(agenda.next(), Some(Instant::now() + SPREAD / 2));
    tokio::time::advance(SPREAD / 2).await;
    assert_eq!(told(&mut agenda), ["web a"]);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_faults_are_told_slowly_and_the_rest_is_dropped() {
    let mut agenda = Agenda::new();
    for number in 0..1000 {
        agenda.take(news(&format!("s{number}"), "a", Scope::Node), 0.0);
    }
    assert_eq!(agenda.due.len(), QUEUE);
    assert_eq!(told(&mut agenda).len(), 10);
    tokio::time::advance(REFILL / 2).await;
    assert_eq!(told(&mut agenda).len(), 0);
    tokio::time::advance(REFILL / 2).await;
    assert_eq!(told(&mut agenda).len(), 1);
    tokio::time::advance(REFILL * 2).await;
    assert_eq!(told(&mut agenda).len(), 2);
    // What was dropped is news when it is found again.
    agenda.take(news("s999", "a", Scope::Node), 0.0);
    assert!(agenda.due.values().any(|news| &*news.name.name == "s999"));
}

#[test]
fn agents_make_one_event_of_one_fault_and_one_each_of_their_own() {
    let of = |news: &ObjectNews, node: &str| event(news, "v1", "uid-1", node, Timestamp::UNIX_EPOCH);
    let shared = news("web", "10.0.0.1:80/TCP belongs to Service a/b", Scope::Cluster);
    let one = of(&shared, "n1");
    assert_eq!(one.metadata.name, of(&shared, "n2").metadata.name);
    assert_eq!(one.metadata.namespace.as_deref(), Some("shop"));
    assert_eq!(one.note.as_deref(), Some(shared.note.as_str()));
    let regarding = one.regarding.unwrap();
    assert_eq!((regarding.kind.as_deref(), regarding.uid.as_deref()), (Some("Service"), Some("uid-1")));
    assert_ne!(one.metadata.name, of(&news("web", "else", Scope::Cluster), "n1").metadata.name);
    let own = news("web", "the port is taken", Scope::Node);
    assert_ne!(of(&own, "n1").metadata.name, of(&own, "n2").metadata.name);
    assert_eq!(of(&own, "n1").note.as_deref(), Some("node n1: the port is taken"));
    let long = of(&news(&"a-".repeat(126), &"ä".repeat(5000), Scope::Node), "n1");
    let name = long.metadata.name.unwrap();
    assert!(name.len() <= 253 && !name.contains("-."), "{name}");
    assert!((NOTE - 1..=NOTE).contains(&long.note.unwrap().len()));
}

#[tokio::test]
async fn the_object_is_asked_for_its_uid_and_without_it_nothing_is_told() {
    use http::{Request, Response};
    use kube::client::Body;
    let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let teller = Teller { client: Client::new(service, "default"), node: "n1".to_owned() };
    let sending = tokio::spawn(async move {
        teller.tell(&news("gone", "a", Scope::Node)).await;
        teller.tell(&news("web", "a", Scope::Node)).await;
    });
    let list = |items: serde_json::Value| {
        let list = serde_json::json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {}, "items": items,
        });
        Response::new(Body::from(serde_json::to_vec(&list).unwrap()))
    };
    let (request, reply) = server.next_request().await.unwrap();
    let uri = request.uri().to_string();
    assert!(uri.starts_with("/api/v1/namespaces/shop/services?"), "{uri}");
    assert!(uri.contains("fieldSelector=metadata.name%3Dgone") && uri.contains("resourceVersion=0"), "{uri}");
    reply.send_response(list(serde_json::json!([])));
    let (_, reply) = server.next_request().await.unwrap();
    reply.send_response(list(serde_json::json!([{
        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "web", "uid": "u7"},
    }])));
    let (request, reply) = server.next_request().await.unwrap();
    assert_eq!(request.method(), "POST");
    assert_eq!(request.uri().path(), "/apis/events.k8s.io/v1/namespaces/shop/events");
    let body = request.into_body().collect_bytes().await.unwrap();
    let event: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(event["regarding"]["uid"], "u7");
    assert_eq!(event["type"], "Warning");
    let exists =
        serde_json::json!({"kind": "Status", "status": "Failure", "reason": "AlreadyExists", "code": 409});
    let exists =
        Response::builder().status(409).body(Body::from(serde_json::to_vec(&exists).unwrap())).unwrap();
    reply.send_response(exists);
    sending.await.unwrap();
}
