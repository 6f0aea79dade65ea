//! A store that is filled by copies serves what the API server would have created itself.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use k8s_openapi::api::core::v1::{Event, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use pointsman_e2e::api_server::{ApiServer, free_loopback_address};
use pointsman_e2e::artifacts;
use pointsman_e2e::bench::fill::{Place, Template, check, fill};
use pointsman_e2e::bench::objects::{NAMESPACE, Numbered, Size, Writer};
use serde_json::{Value, json};

#[tokio::test]
async fn copies_are_what_the_api_server_would_have_created() {
    let dir = tempfile::tempdir().unwrap();
    let (data, size) = (dir.path().join("etcd"), Size::new(40, 4).unwrap());
    let address = free_loopback_address().unwrap();
    let binary = artifacts::controlplane().await.unwrap();
    fill(&binary, Place { api: address, etcd: address }, size, &data).await.expect("a filled store");

    let server = ApiServer::start_at(address, address, Some(&data)).await.expect("an API server");
    let client = server.client();
    check(&client, size).await.unwrap();
    let services: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    // Copies of all four shapes.
    for one in (20..24).map(|number| size.service(number)) {
        let copied = shown(&client, one).await;
        // Which also shows that the API server knows the address and the port: it would not give them out twice.
        services.delete(&one.name(), &DeleteParams::default()).await.unwrap();
        slices.delete(&one.slice_name(), &DeleteParams::default()).await.unwrap();
        Writer::new(&client).create(one).await.unwrap();
        assert_eq!(copied, shown(&client, one).await);
    }
    let taken = (0..40).filter_map(|number| size.service(number).node_port());
    let taken: Vec<i32> = taken.map(i32::from).collect();
    let create = async |port: Value| {
        let spec = json!({"type": "NodePort", "ports": [port]});
        let service = json!({"metadata": {"generateName": "another-"}, "spec": spec});
        let service = serde_json::from_value(service).unwrap();
        services.create(&PostParams::default(), &service).await
    };
    let created = create(json!({"port": 80})).await.expect("a Service that gets a port").spec.unwrap();
    let port = created.ports.unwrap()[0].node_port.expect("a port");
    assert!(!taken.contains(&port), "{port} is taken");
    let refused = create(json!({"port": 80, "nodePort": taken[7]})).await.unwrap_err().to_string();
    assert!(refused.contains("already allocated"), "{refused}");

    let events: Api<Event> = Api::all(client.clone());
    let mut complaints = events.list(&ListParams::default()).await.unwrap().items;
    // Of what it creates itself the API server may say that it has no address: it looks at both in turns. Copies have always had theirs.
    let copies: Vec<_> = (4..20).chain(24..40).map(|number| Some(size.service(number).name())).collect();
    complaints.retain(|event| copies.contains(&event.involved_object.name));
    assert!(complaints.is_empty(), "{complaints:#?}");
    server.stop().await.unwrap();
}

/// What the API server shows of a Service, without what differs between any two objects.
async fn shown(client: &Client, one: Numbered) -> Vec<Value> {
    let objects = Template::read(client, one).await.unwrap();
    let without = |mut object: Value| {
        let metadata = object["metadata"].as_object_mut().unwrap();
        for field in ["uid", "resourceVersion", "creationTimestamp"] {
            assert!(metadata.remove(field).is_some(), "{metadata:?} has no {field}");
        }
        for manager in metadata["managedFields"].as_array_mut().unwrap() {
            assert!(manager["time"].take().is_string());
        }
        object
    };
    objects.objects().into_iter().cloned().map(without).collect()
}
