//! The bare API server starts, serves, and leaves nothing behind.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Service};
use kube::Api;
use pointsman_e2e::api_server::ApiServer;

#[tokio::test]
async fn serves_and_leaves_nothing() {
    let server = ApiServer::start().await.expect("an API server");
    let dir = server.kubeconfig().parent().and_then(|pki| pki.parent()).expect("its folder").to_owned();
    let namespaces: Api<Namespace> = Api::all(server.client());
    assert!(namespaces.get("default").await.is_ok(), "the default namespace exists");

    let service = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"ipFamilyPolicy": "RequireDualStack", "ports": [{"port": 80}]}}"#;
    server.kubectl(&["apply", "-f", "-"], service).await.expect("kubectl apply");
    let services: Api<Service> = Api::namespaced(server.client(), "default");
    let addresses = services.get("web").await.expect("the service").spec.and_then(|s| s.cluster_ips);
    assert_eq!(addresses.map_or(0, |a| a.len()), 2, "an address of each family");

    let refused = server.kubectl(&["apply", "-f", "-"], r#"{"apiVersion": "v1", "kind": "Nonsense"}"#).await;
    assert!(refused.unwrap_err().to_string().contains("Nonsense"), "the error names the cause");

    server.stop().await.expect("a clean stop");
    assert!(!dir.exists(), "the folder is removed");
    let path = dir.to_string_lossy().into_owned();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let left = std::fs::read_dir("/proc").expect("/proc").flatten().any(|process| {
        std::fs::read(process.path().join("cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&path))
    });
    assert!(!left, "no process is left");
}

#[tokio::test]
async fn two_at_once() {
    let (one, two) = tokio::join!(ApiServer::start(), ApiServer::start());
    let (one, two) = (one.expect("the first"), two.expect("the second"));
    let namespaces: Api<Namespace> = Api::all(one.client());
    let other: Api<Namespace> = Api::all(two.client());
    let uid = |n: Namespace| n.metadata.uid;
    assert_ne!(uid(namespaces.get("default").await.unwrap()), uid(other.get("default").await.unwrap()));
}
