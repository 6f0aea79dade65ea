//! What mode userspace counts.
//!
//! In: nothing. Out: counters per Service port that the data path raises and `/metrics` shows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::relay::Bytes;
use crate::metrics::family_word;
use crate::model::Protocol;
use crate::plan::PortId;

/// Labels that name a Service port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ByPort {
    service: String,
    protocol: &'static str,
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDirection {
    service: String,
    protocol: &'static str,
    ip_family: &'static str,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByFailure {
    service: String,
    protocol: &'static str,
    ip_family: &'static str,
    reason: &'static str,
}

/// Why an endpoint was not reached, or left its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It refused, or the network did in its place.
    Refused,
    /// It did not answer in time.
    TimedOut,
    /// It ended a connection before anything was said.
    Closed,
    /// It, or the client, broke off a connection that was in use.
    Broken,
    /// A connection was silent for too long.
    Silent,
    /// No endpoint could be reached: the client was turned away.
    Exhausted,
}

impl Failure {
    const ALL: [Self; 6] =
        [Self::Refused, Self::TimedOut, Self::Closed, Self::Broken, Self::Silent, Self::Exhausted];

    fn word(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::TimedOut => "timeout",
            Self::Closed => "closed",
            Self::Broken => "broken",
            Self::Silent => "silent",
            Self::Exhausted => "exhausted",
        }
    }
}

/// The counters of all Service ports.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    connections: Family<ByPort, Counter>,
    open: Family<ByPort, Gauge>,
    resting: Family<ByPort, Gauge>,
    who_rests: Arc<Mutex<WhoRests>>,
    bytes: Family<ByDirection, Counter>,
    failures: Family<ByFailure, Counter>,
    /// Connections that had to wait, and datagrams that were dropped, because there were as many as the agent can hold.
    pub limited: Counter,
}

/// Which endpoints rest.
#[derive(Debug, Default)]
struct WhoRests {
    /// So many have been given counters.
    sources: u64,
    /// By label, and by who says so: the proxy of a mode and that of localhost may have the same Service port.
    ports: BTreeMap<String, BTreeMap<u64, Vec<SocketAddr>>>,
}

impl WhoRests {
    fn of(&self, port: &str) -> BTreeSet<SocketAddr> {
        self.ports.get(port).into_iter().flat_map(BTreeMap::values).flatten().copied().collect()
    }
}

/// The counters of one Service port.
#[derive(Debug)]
pub struct PortCounters {
    all: Counters,
    label: ByPort,
    source: u64,
    /// Whether this counts no more. Changed under the lock of [`WhoRests`].
    gone: AtomicBool,
    /// Connections, or flows of datagrams, that were begun.
    pub connections: Counter,
    /// Those that are open.
    pub open: Gauge,
    resting: Gauge,
    /// Bytes passed on.
    pub bytes: Bytes,
}

impl Counters {
    /// Gives them their names.
    pub fn register(&self, registry: &mut Registry) {
        let to = registry.sub_registry_with_prefix("pointsman_userspace");
        to.register(
            "connections",
            "Connections and flows of datagrams begun, in mode userspace",
            self.connections.clone(),
        );
        to.register(
            "connections_open",
            "Connections and flows of datagrams that are open",
            self.open.clone(),
        );
        to.register(
            "endpoints_resting",
            "Endpoints that get no new connections because they failed",
            self.resting.clone(),
        );
        to.register("bytes", "Bytes passed on", self.bytes.clone());
        to.register(
            "failures",
            "Endpoints that were not reached, and connections that did not end well",
            self.failures.clone(),
        );
        to.register("limited", "How often the limit of connections was met", self.limited.clone());
    }

    /// Which endpoints rest: Service port and address.
    #[must_use]
    pub fn resting(&self) -> Vec<String> {
        let who = self.who_rests();
        who.ports
            .keys()
            .map(|port| {
                let endpoints: Vec<String> = who.of(port).iter().map(ToString::to_string).collect();
                format!("{port} {}", endpoints.join(", "))
            })
            .collect()
    }

    fn who_rests(&self) -> MutexGuard<'_, WhoRests> {
        self.who_rests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters of a Service port.
    #[must_use]
    pub fn of(&self, id: &PortId) -> PortCounters {
        let label = ByPort::of(id);
        let source = {
            let mut who = self.who_rests();
            who.sources += 1;
            who.sources
        };
        let bytes = |direction| self.bytes.get_or_create_owned(&label.direction(direction));
        PortCounters {
            connections: self.connections.get_or_create_owned(&label),
            open: self.open.get_or_create_owned(&label),
            resting: self.resting.get_or_create_owned(&label),
            bytes: Bytes { to_endpoint: bytes("to_endpoint"), to_client: bytes("to_client") },
            all: self.clone(),
            label,
            source,
            gone: AtomicBool::new(false),
        }
    }
}

fn word(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
        Protocol::Sctp => "SCTP",
    }
}

impl ByPort {
    /// The labels of this one.
    pub(crate) fn of(id: &PortId) -> Self {
        Self { service: id.text(), protocol: word(id.protocol), ip_family: family_word(id.family) }
    }

    fn direction(&self, direction: &'static str) -> ByDirection {
        let Self { service, protocol, ip_family } = self.clone();
        ByDirection { service, protocol, ip_family, direction }
    }

    fn failure(&self, failure: Failure) -> ByFailure {
        let Self { service, protocol, ip_family } = self.clone();
        ByFailure { service, protocol, ip_family, reason: failure.word() }
    }
}

impl PortCounters {
    /// Something did not go well.
    pub fn failed(&self, failure: Failure) {
        // Kept, or what is forgotten meanwhile would come back.
        let _who = self.all.who_rests();
        if !self.gone.load(Ordering::Relaxed) {
            self.all.failures.get_or_create(&self.label.failure(failure)).inc();
        }
    }

    /// These endpoints rest now.
    pub fn rest(&self, endpoints: Vec<SocketAddr>) {
        let mut who = self.all.who_rests();
        if !self.gone.load(Ordering::Relaxed) {
            self.note(&mut who, endpoints);
        }
    }

    fn note(&self, who: &mut WhoRests, endpoints: Vec<SocketAddr>) {
        let ByPort { service, protocol, ip_family } = &self.label;
        let port = format!("{service}/{protocol} ({ip_family})");
        let sources = who.ports.entry(port.clone()).or_default();
        if endpoints.is_empty() {
            sources.remove(&self.source);
        } else {
            sources.insert(self.source, endpoints);
        }
        let is_empty = sources.is_empty();
        self.resting.set(i64::try_from(who.of(&port).len()).unwrap_or(i64::MAX));
        if is_empty {
            who.ports.remove(&port);
        }
    }

    fn go(&self, who: &mut WhoRests) {
        if !self.gone.swap(true, Ordering::Relaxed) {
            self.note(who, Vec::new());
        }
    }

    /// Nobody is led anywhere by this any more: no endpoint rests, and what fails is not counted.
    pub fn leave(&self) {
        self.go(&mut self.all.who_rests());
    }

    /// The Service port is gone. What is still under way is not counted any more.
    pub fn forget(&self) {
        let mut who = self.all.who_rests();
        self.go(&mut who);
        self.all.connections.remove(&self.label);
        self.all.open.remove(&self.label);
        self.all.resting.remove(&self.label);
        for direction in ["to_endpoint", "to_client"] {
            self.all.bytes.remove(&self.label.direction(direction));
        }
        for failure in Failure::ALL {
            self.all.failures.remove(&self.label.failure(failure));
        }
    }
}

impl Drop for PortCounters {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use pointsman_crds::proxy_node_status::IpFamily;

    use super::*;
    use crate::model::ObjectName;

    fn id() -> PortId {
        PortId::new(ObjectName::new("ns", "web"), IpFamily::IPv4, "".into(), Protocol::Tcp)
    }

    fn endpoints(ports: &[u16]) -> Vec<SocketAddr> {
        ports.iter().map(|port| SocketAddr::from(([10, 244, 0, 9], *port))).collect()
    }

    #[test]
    fn two_proxies_of_a_service_port_do_not_wipe_what_the_other_says_of_its_endpoints() {
        let counters = Counters::default();
        let (proxy, localhost) = (counters.of(&id()), counters.of(&id()));
        proxy.rest(endpoints(&[1]));
        localhost.rest(Vec::new());
        assert_eq!(counters.resting(), ["ns/web/TCP (IPv4) 10.244.0.9:1"]);
        localhost.rest(endpoints(&[1, 2]));
        assert_eq!(counters.resting(), ["ns/web/TCP (IPv4) 10.244.0.9:1, 10.244.0.9:2"]);
        assert_eq!((proxy.resting.get(), localhost.resting.get()), (2, 2));
        drop(localhost);
        assert_eq!(proxy.resting.get(), 1);
        proxy.leave();
        proxy.rest(endpoints(&[1]));
        assert_eq!((counters.resting(), proxy.resting.get()), (Vec::new(), 0));
    }

    #[test]
    fn a_service_port_that_is_forgotten_does_not_come_back_with_an_old_connection() {
        let counters = Counters::default();
        let port = counters.of(&id());
        port.failed(Failure::Broken);
        port.rest(endpoints(&[1]));
        let shown = || {
            let mut registry = Registry::default();
            counters.register(&mut registry);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        assert!(shown().contains("ns/web"), "{}", shown());
        port.forget();
        port.failed(Failure::Broken);
        port.rest(endpoints(&[1]));
        assert!(!shown().contains("ns/web"), "{}", shown());
        assert_eq!(counters.resting(), Vec::<String>::new());
    }
}
