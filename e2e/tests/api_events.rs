//! Events on Services as agents tell them: with the rights that the chart gives, taken by a real API server, shown by kubectl.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use pointsman_agent::events::objects::{ObjectNews, Objects, Scope};
use pointsman_agent::model::ObjectName;
use serde_json::json;
use tokio::time::sleep;

use support::charts::NAMESPACE;
use support::operator::Stage;

const REASON: &str = "FailedToStartServiceHealthcheck";

/// A client with the agents' rights.
async fn agents_client(stage: &Stage) -> Client {
    let file = Kubeconfig::read_from(stage.server.kubeconfig()).unwrap();
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    config.auth_info.impersonate = Some(format!("system:serviceaccount:{NAMESPACE}:pointsman-agent"));
    Client::try_from(config).unwrap()
}

#[tokio::test]
async fn owners_find_what_is_not_served_in_the_description_of_their_object() {
    let stage = Stage::enter().await;
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "events", "namespace": "default"},
        "spec": {"ports": [{"port": 80}]},
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": [],
        "metadata": {"name": "events-x", "namespace": "default"},
    });
    for object in [service, slice] {
        stage.server.kubectl(&["apply", "-f", "-"], &object.to_string()).await.unwrap();
    }
    let client = agents_client(&stage).await;
    let news = |kind, name: &str, note: &str| ObjectNews {
        kind,
        name: ObjectName::new("default", name),
        reason: REASON,
        note: note.to_owned(),
        scope: Scope::Node,
    };
    // The second n1 is the same agent after a restart: it finds its Event there.
    let agents = ["n1", "n1", "n2"].map(|node| Objects::start(client.clone(), node));
    for objects in &agents {
        objects.tell(news("Service", "events", "the port is taken"));
        objects.tell(news("EndpointSlice", "events-x", &"ä".repeat(2000)));
    }
    let api: Api<Event> = Api::namespaced(stage.client.clone(), "default");
    // The API server has Events about new Services too.
    let ours = async || -> Vec<Event> {
        let all = api.list(&ListParams::default()).await.unwrap().items;
        all.into_iter().filter(|event| event.reason.as_deref() == Some(REASON)).collect()
    };
    let mut told = Vec::new();
    for _ in 0..100 {
        told = ours().await;
        if told.len() == 4 {
            break;
        }
        sleep(Duration::from_millis(100)).await;
    }
    sleep(Duration::from_secs(1)).await;
    let now = ours().await.len();
    assert_eq!((told.len(), now), (4, 4), "one Event of each object and node: {told:#?}");
    let described =
        stage.server.kubectl(&["describe", "-n", "default", "service", "events"], "").await.unwrap();
    for node in ["n1", "n2"] {
        let line = format!("node {node}: the port is taken");
        assert!(described.contains(&line) && described.contains(REASON), "{described}");
    }
}
