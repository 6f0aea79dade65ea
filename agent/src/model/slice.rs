//! An EndpointSlice, as far as routing depends on it.
//!
//! In: an EndpointSlice object. Out: the name of its Service and a [`Slice`] record, or nothing for slices that no proxy
//! serves (headless, FQDN, without a Service). Reference §1.7.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use k8s_openapi::api::discovery::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pointsman_crds::names::ANNOTATION_WEIGHT;
use pointsman_crds::proxy_node_status::IpFamily;

use super::Pool;
use super::address::{family_of, parse_address};
use super::service::{Protocol, port_number};

const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Where nothing else is said.
const EQUAL_WEIGHT: NonZeroU16 = NonZeroU16::MIN;
const TRIGGER_TIME_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// One port that all endpoints of a slice have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The name of the Service port that it belongs to.
    pub name: Arc<str>,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its number at the endpoint.
    pub port: u16,
}

/// For which consumers an endpoint is meant (KEP-2433, KEP-3015).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hints {
    /// Zones.
    pub zones: Box<[Box<str>]>,
    /// Nodes.
    pub nodes: Box<[Box<str>]>,
}

impl From<&Hints> for Arc<Hints> {
    fn from(hints: &Hints) -> Self {
        Self::new(hints.clone())
    }
}

/// One address behind a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Where it is.
    pub address: IpAddr,
    /// Takes new connections. Not set counts as true.
    pub ready: bool,
    /// Answers, even if it is about to end. Not set counts as true.
    pub serving: bool,
    /// Is about to end. Not set counts as false.
    pub terminating: bool,
    /// Its share of new connections beside that of others, where a mode can weigh. That of its slice.
    pub weight: NonZeroU16,
    /// The node it runs on.
    pub node: Option<Arc<str>>,
    /// For whom it is meant.
    pub hints: Option<Arc<Hints>>,
}

/// Some endpoints of a Service that have the same ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Family of all addresses.
    pub family: IpFamily,
    /// Ports of all endpoints.
    pub ports: Box<[SlicePort]>,
    /// The endpoints.
    pub endpoints: Box<[Endpoint]>,
}

impl Slice {
    /// Reads an EndpointSlice. `None` if no Service is served by it; what is wrong with the rest goes to `faults`.
    pub(super) fn read(
        object: &v1::EndpointSlice,
        strings: &mut Pool<str>,
        hints: &mut Pool<Hints>,
        faults: &mut Vec<String>,
    ) -> Option<(Arc<str>, Self)> {
        let labels = object.metadata.labels.as_ref();
        if labels.is_some_and(|labels| labels.contains_key(HEADLESS_LABEL)) {
            return None;
        }
        let owner = labels.and_then(|labels| labels.get(SERVICE_NAME_LABEL)).filter(|name| !name.is_empty());
        let Some(owner) = owner else {
            faults.push(format!("has no label {SERVICE_NAME_LABEL}; not served"));
            return None;
        };
        let family = match object.address_type.as_str() {
            "IPv4" => IpFamily::IPv4,
            "IPv6" => IpFamily::IPv6,
            other => {
                faults.push(format!("addressType {other:?} is not IPv4 or IPv6; not served"));
                return None;
            }
        };
        let ports = object.ports.as_deref().unwrap_or_default();
        let ports = ports.iter().filter_map(|port| read_port(port, strings, faults)).collect();
        let weight = read_weight(object, faults);
        let mut endpoints = Vec::with_capacity(object.endpoints.len());
        for endpoint in &object.endpoints {
            if let Some(endpoint) = read_endpoint(endpoint, family, strings, hints, faults) {
                endpoints.push(Endpoint { weight, ..endpoint });
            }
        }
        Some((owner.as_str().into(), Self { family, ports, endpoints: endpoints.into() }))
    }
}

/// What the annotation says; 1 without it, so that all weigh the same. 0 is refused: an endpoint that is to get no connections is
/// not ready, which every mode follows.
fn read_weight(object: &v1::EndpointSlice, faults: &mut Vec<String>) -> NonZeroU16 {
    let text = object.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_WEIGHT));
    let Some(text) = text else { return EQUAL_WEIGHT };
    text.parse().unwrap_or_else(|_| {
        faults.push(format!(
            "annotation {ANNOTATION_WEIGHT} is {text:?}, not a number from 1 to {}; its endpoints get the weight {EQUAL_WEIGHT}",
            u16::MAX
        ));
        EQUAL_WEIGHT
    })
}

fn read_port(
    port: &v1::EndpointPort,
    strings: &mut Pool<str>,
    faults: &mut Vec<String>,
) -> Option<SlicePort> {
    // A port without a number means "all ports", which no Service has; without a name it belongs to none.
    let (name, number) = (port.name.as_deref()?, port.port?);
    let Some(number) = port_number(number) else {
        faults.push(format!("port {name:?}: {number} is not a port number; not served"));
        return None;
    };
    let Some(protocol) = Protocol::read(port.protocol.as_deref()) else {
        let protocol = port.protocol.as_deref().unwrap_or_default();
        faults.push(format!("port {name:?}: protocol {protocol:?} is not TCP, UDP or SCTP; not served"));
        return None;
    };
    Some(SlicePort { name: strings.share(name), protocol, port: number })
}

fn read_endpoint(
    endpoint: &v1::Endpoint,
    family: IpFamily,
    strings: &mut Pool<str>,
    pool: &mut Pool<Hints>,
    faults: &mut Vec<String>,
) -> Option<Endpoint> {
    let text = endpoint.addresses.first()?;
    let usable = |address: &IpAddr| {
        family_of(*address) == family
            && !address.is_unspecified()
            && !address.is_multicast()
            && !address.is_loopback()
    };
    let Some(address) = parse_address(text).filter(usable) else {
        faults.push(format!("endpoint {text:?} is not a usable {family:?} address; not served"));
        return None;
    };
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let ready = conditions.ready.unwrap_or(true);
    let hints = endpoint.hints.as_ref().and_then(|hints| {
        let boxed = |names: Vec<&String>| names.into_iter().map(|name| name.as_str().into()).collect();
        let zones = hints.for_zones.as_deref().unwrap_or_default();
        let nodes = hints.for_nodes.as_deref().unwrap_or_default();
        (!zones.is_empty() || !nodes.is_empty()).then(|| Hints {
            zones: boxed(zones.iter().map(|zone| &zone.name).collect()),
            nodes: boxed(nodes.iter().map(|node| &node.name).collect()),
        })
    });
    Some(Endpoint {
        address,
        ready,
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        weight: EQUAL_WEIGHT,
        node: endpoint.node_name.as_deref().map(|name| strings.share(name)),
        hints: hints.map(|hints| pool.share(&hints)),
    })
}

/// When the change that this slice reports was caused, if the slice says so.
pub(super) fn trigger_time(object: &v1::EndpointSlice) -> Option<Time> {
    let text = object.metadata.annotations.as_ref()?.get(TRIGGER_TIME_ANNOTATION)?;
    text.parse().ok().map(Time)
}
