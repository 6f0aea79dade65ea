//! What mode userspace counts.
//!
//! In: nothing. Out: counters per Service port that the data path raises and `/metrics` shows.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

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
    /// Which ones, by label.
    who_rests: Arc<Mutex<BTreeMap<String, Vec<SocketAddr>>>>,
    bytes: Family<ByDirection, Counter>,
    failures: Family<ByFailure, Counter>,
    /// Connections that had to wait, and datagrams that were dropped, because there were as many as the agent can hold.
    pub limited: Counter,
}

/// The counters of one Service port.
#[derive(Clone, Debug)]
pub struct PortCounters {
    all: Counters,
    label: ByPort,
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
        let who = self.who_rests.lock().unwrap_or_else(PoisonError::into_inner);
        who.iter()
            .map(|(port, endpoints)| {
                let endpoints: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
                format!("{port} {}", endpoints.join(", "))
            })
            .collect()
    }

    /// The counters of a Service port.
    #[must_use]
    pub fn of(&self, id: &PortId) -> PortCounters {
        let label = ByPort::of(id);
        let bytes = |direction| self.bytes.get_or_create_owned(&label.direction(direction));
        PortCounters {
            connections: self.connections.get_or_create_owned(&label),
            open: self.open.get_or_create_owned(&label),
            resting: self.resting.get_or_create_owned(&label),
            bytes: Bytes { to_endpoint: bytes("to_endpoint"), to_client: bytes("to_client") },
            all: self.clone(),
            label,
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
        self.all.failures.get_or_create(&self.label.failure(failure)).inc();
    }

    /// These endpoints rest now.
    pub fn rest(&self, endpoints: Vec<SocketAddr>) {
        self.resting.set(i64::try_from(endpoints.len()).unwrap_or(i64::MAX));
        let ByPort { service, protocol, ip_family } = &self.label;
        let port = format!("{service}/{protocol} ({ip_family})");
        let mut who = self.all.who_rests.lock().unwrap_or_else(PoisonError::into_inner);
        if endpoints.is_empty() {
            who.remove(&port);
        } else {
            who.insert(port, endpoints);
        }
    }

    /// The Service port is gone. What is still under way is not counted any more.
    pub fn forget(&self) {
        self.rest(Vec::new());
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
