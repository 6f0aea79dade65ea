//! Filling a store with Services, in a time proportional to their number.
//!
//! In: an empty folder and a [`Size`]. Out: the folder holds the store of an API server that shows the Services as if each had been
//! created through it.
//!
//! With each Service the API server counts all the addresses that it has given out: 30,000 Services take it more than half an
//! hour. So it creates one of each [`Shape`], and the others are copies of these, written to etcd together with what the API
//! server keeps beside them: an IPAddress each, and the NodePorts that are taken. It finds nothing to repair.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::IPAddress;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::etcd::Etcd;
use super::objects::{NAMESPACE, Numbered, Size, Writer};
use crate::api_server::ApiServer;

/// The API server's range of NodePorts.
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30_000..=32_767;
/// Services that are written at once, with three objects each: etcd takes 128.
const AT_ONCE: u32 = 32;
/// Every shape is among the first so many Services.
const TEMPLATES: u32 = 4;

/// Where an API server and its etcd listen.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The API server's address.
    pub api: Ipv4Addr,
    /// The address of etcd.
    pub etcd: Ipv4Addr,
}

/// Fills the folder `data` with the help of the binary of all components.
pub async fn fill(binary: &Path, place: Place, size: Size, data: &Path) -> Result<()> {
    let server = ApiServer::start_at(place.api, place.etcd, Some(data)).await?;
    let templates = create_templates(&server.client(), size).await?;
    // Away, so that it does not find a Service without its address, or the reverse.
    server.stop().await?;
    let etcd = Etcd::start(binary, place.etcd, data).await?;
    for template in &templates {
        for (key, _) in template.copies(template.of) {
            ensure!(etcd.holds(&key).await?, "the API server does not store at {key} any more");
        }
    }
    let mut batch = Vec::new();
    for number in TEMPLATES..size.services() {
        let one = size.service(number);
        let template = templates.iter().find(|template| template.of.shape() == one.shape());
        batch.extend(template.with_context(|| format!("no template for {}", one.name()))?.copies(one));
        if number % AT_ONCE == 0 || number + 1 == size.services() {
            etcd.put(&batch).await?;
            batch.clear();
        }
    }
    let taken = (0..size.services()).filter_map(|number| size.service(number).node_port());
    etcd.put(&[("/registry/ranges/servicenodeports".to_owned(), taken_node_ports(taken))]).await?;
    etcd.stop().await
}

async fn create_templates(client: &Client, size: Size) -> Result<Vec<Template>> {
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": NAMESPACE}}))?;
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    let writer = Writer::new(client);
    let mut templates = Vec::new();
    for one in (0..TEMPLATES).map(|number| size.service(number)) {
        writer.create(one).await?;
        templates.push(Template::read(client, one).await?);
    }
    Ok(templates)
}

/// Fails unless the API server holds so many Services and as much of the rest.
pub async fn check(client: &Client, size: Size) -> Result<()> {
    async fn count<T>(of: Api<T>) -> Result<i64>
    where
        T: Resource + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let first = of.list(&ListParams::default().limit(1)).await?;
        let listed = i64::try_from(first.items.len())?;
        Ok(listed + first.metadata.remaining_item_count.unwrap_or(0))
    }
    let expected = i64::from(size.services());
    let services = count::<Service>(Api::namespaced(client.clone(), NAMESPACE)).await?;
    let slices = count::<EndpointSlice>(Api::namespaced(client.clone(), NAMESPACE)).await?;
    // One is that of the Service `kubernetes`.
    let addresses = count::<IPAddress>(Api::all(client.clone())).await? - 1;
    ensure!(
        [services, slices, addresses] == [expected; 3],
        "the store for {size} holds {services} Services, {slices} EndpointSlices and {addresses} addresses: remove it from the cache"
    );
    Ok(())
}

/// What the API server shows of a Service that it has created.
#[derive(Debug)]
pub struct Template {
    of: Numbered,
    service: Value,
    slice: Value,
    address: Value,
}

impl Template {
    /// Reads it from the API server.
    pub async fn read(client: &Client, of: Numbered) -> Result<Self> {
        let get = async |path: String| -> Result<Value> {
            let request = http::Request::get(&path).body(Vec::new())?;
            client.request(request).await.with_context(|| format!("reading {path}"))
        };
        let (name, slice, ip) = (of.name(), of.slice_name(), of.cluster_ip());
        Ok(Self {
            of,
            service: get(format!("/api/v1/namespaces/{NAMESPACE}/services/{name}")).await?,
            slice: get(format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices/{slice}"))
                .await?,
            address: get(format!("/apis/networking.k8s.io/v1/ipaddresses/{ip}")).await?,
        })
    }

    /// The Service, its EndpointSlice and its IPAddress.
    #[must_use]
    pub fn objects(&self) -> [&Value; 3] {
        [&self.service, &self.slice, &self.address]
    }

    /// The objects of another Service of the same shape, at their keys in etcd.
    fn copies(&self, to: Numbered) -> [(String, Value); 3] {
        let words: HashMap<String, String> = self.of.words().into_iter().zip(to.words()).collect();
        let (name, slice, ip) = (to.name(), to.slice_name(), to.cluster_ip());
        let mut service = copy(&self.service, &words, &uid(0, to));
        if let Some(port) = to.node_port() {
            service["spec"]["ports"][0]["nodePort"] = json!(port);
        }
        [
            (format!("/registry/services/specs/{NAMESPACE}/{name}"), service),
            (format!("/registry/endpointslices/{NAMESPACE}/{slice}"), copy(&self.slice, &words, &uid(1, to))),
            (format!("/registry/ipaddresses/{ip}"), copy(&self.address, &words, &uid(2, to))),
        ]
    }
}

fn uid(kind: u32, of: Numbered) -> String {
    format!("00000000-0000-4000-8{kind:03x}-{:012x}", of.number())
}

/// `original` with these values replaced by those, with a uid, and without the version, which etcd keeps.
fn copy(original: &Value, words: &HashMap<String, String>, uid: &str) -> Value {
    let mut copy = original.clone();
    replace(&mut copy, words);
    copy["metadata"]["uid"] = json!(uid);
    if let Some(metadata) = copy["metadata"].as_object_mut() {
        metadata.remove("resourceVersion");
    }
    copy
}

fn replace(value: &mut Value, words: &HashMap<String, String>) {
    match value {
        Value::String(text) => {
            if let Some(other) = words.get(text.as_str()) {
                text.clone_from(other);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| replace(value, words)),
        Value::Object(fields) => fields.values_mut().for_each(|value| replace(value, words)),
        _ => {}
    }
}

/// What the API server keeps of NodePorts: a number with a bit for each of the range, the most significant byte first.
fn taken_node_ports(taken: impl Iterator<Item = u16>) -> Value {
    let (first, last) = (*NODE_PORTS.start(), *NODE_PORTS.end());
    let mut bits = vec![0_u8; usize::from(last - first) / 8 + 1];
    for port in taken {
        let nth = usize::from(port - first);
        bits[nth / 8] |= 1 << (nth % 8);
    }
    bits.reverse();
    json!({
        "apiVersion": "v1", "kind": "RangeAllocation", "metadata": {}, "range": format!("{first}-{last}"),
        "data": ByteString(bits),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_differ_from_their_template_in_names_addresses_ports_and_uids() {
        let size = Size::new(100, 2).unwrap();
        let (of, to) = (size.service(0), size.service(25));
        let metadata = |name: &str, uid: &str| json!({"name": name, "uid": uid, "managedFields": [{"fieldsV1": {"f:spec": {"f:clusterIP": {}}}}]});
        let objects = |of: Numbered, port: u16, uids: [&str; 3]| {
            let [one, other] = [0, 1].map(|nth| of.endpoint(nth).to_string());
            let ip = of.cluster_ip().to_string();
            [
                json!({
                    "kind": "Service", "metadata": metadata(&of.name(), uids[0]),
                    "spec": {"clusterIP": ip, "clusterIPs": [ip], "ports": [{"name": "web", "nodePort": port}]},
                }),
                json!({
                    "kind": "EndpointSlice", "metadata": metadata(&of.slice_name(), uids[1]),
                    "endpoints": [{"addresses": [one]}, {"addresses": [other]}],
                }),
                json!({
                    "kind": "IPAddress", "metadata": metadata(&ip, uids[2]),
                    "spec": {"parentRef": {"name": of.name(), "namespace": NAMESPACE}},
                }),
            ]
        };
        let [mut service, slice, address] = objects(of, 30_000, ["a", "b", "c"]);
        service["metadata"]["resourceVersion"] = json!("7");
        let template = Template { of, service, slice, address };
        let uids = ["0", "1", "2"].map(|kind| format!("00000000-0000-4000-800{kind}-000000000019"));
        let expected = objects(to, 30_005, [&uids[0], &uids[1], &uids[2]]);
        let ip = to.cluster_ip();
        let keys = [
            "/registry/services/specs/bench/s00025".to_owned(),
            "/registry/endpointslices/bench/s00025-1".to_owned(),
            format!("/registry/ipaddresses/{ip}"),
        ];
        assert_eq!(template.copies(to).to_vec(), keys.into_iter().zip(expected).collect::<Vec<_>>());
    }

    #[test]
    fn every_shape_has_a_template() {
        let size = Size::new(30_000, 3).unwrap();
        let templates: Vec<_> = (0..TEMPLATES).map(|number| size.service(number).shape()).collect();
        assert!((0..size.services()).all(|number| templates.contains(&size.service(number).shape())));
    }

    #[test]
    fn the_last_byte_holds_the_first_ports() {
        let taken = taken_node_ports([30_000, 30_009, 32_767].into_iter());
        let ByteString(bits) = serde_json::from_value(taken["data"].clone()).unwrap();
        assert_eq!(bits.len(), 346);
        assert_eq!((bits[0], bits[344], bits[345]), (0x80, 0x02, 0x01));
        assert_eq!(bits.iter().map(|byte| byte.count_ones()).sum::<u32>(), 3);
    }
}
