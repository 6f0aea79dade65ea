//! Answers the health checks that load balancers send to a Service's `healthCheckNodePort`.
//!
//! In: the plan's [`HealthCheck`]s, as far as they changed, after the kernel has followed; whether the node keeps up. Out: a port
//! for each, open exactly while the Service wants it, that says how many ready endpoints the Service has here. A port that
//! somebody else holds is tried again and told in an Event on the Service. [`steps`] decides which ports to open and close;
//! [`Server`] does it.

mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{HeaderName, HeaderValue, Response};
use serde::Serialize;
use tokio::sync::Notify;

use crate::http::json;
use crate::model::{ObjectName, family_of};
use crate::plan::HealthCheck;

pub use server::Server;

/// Weighted load balancers read the number of endpoints here.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// The health checks of the node, shared by the sync loop, which changes them, and the ports, which answer.
#[derive(Clone, Debug, Default)]
pub struct Checks(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Table {
    checks: BTreeMap<ObjectName, HealthCheck>,
    /// Services whose ports may have to be opened or closed.
    dirty: BTreeSet<ObjectName>,
    open: usize,
    problems: BTreeMap<Port, String>,
}

/// One open port, or one that ought to be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Port {
    service: ObjectName,
    address: SocketAddr,
}

/// What kube-proxy answers.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    service: Named<'a>,
    local_endpoints: usize,
    service_proxy_healthy: bool,
}

#[derive(Debug, Serialize)]
struct Named<'a> {
    namespace: &'a str,
    name: &'a str,
}

impl Checks {
    /// Takes over what has changed; nothing stands for a check that is gone. Costs as much as has changed.
    pub fn change(&self, changed: impl IntoIterator<Item = (ObjectName, Option<HealthCheck>)>) {
        let mut table = self.table();
        for (service, check) in changed {
            match check {
                Some(check) => table.checks.insert(service.clone(), check),
                None => table.checks.remove(&service),
            };
            table.dirty.insert(service);
        }
        if !table.dirty.is_empty() {
            self.0.changed.notify_one();
        }
    }

    /// How many ports are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.table().open
    }

    /// The ports that could not be opened, and why.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let table = self.table();
        table
            .problems
            .iter()
            .map(|(port, why)| format!("{} of Service {}: {why}", port.address, port.service))
            .collect()
    }

    /// The number of endpoints, of each check.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.table().checks.values().map(|check| check.local_endpoints.values().sum()).collect()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer at one port. A check that is gone while a connection is still open counts nobody.
    fn answer(&self, port: &Port, healthy: bool) -> Response<String> {
        let check = self.table().checks.get(&port.service).cloned().unwrap_or_default();
        let count = check.local_endpoints.get(&family_of(port.address.ip())).copied().unwrap_or_default();
        let service = Named { namespace: &port.service.namespace, name: &port.service.name };
        let answer = Answer { service, local_endpoints: count, service_proxy_healthy: healthy };
        let mut response = json(if healthy && count > 0 { 200 } else { 503 }, &answer);
        response.headers_mut().insert(WEIGHT, HeaderValue::from(count));
        response
    }
}

/// Which ports to close and which to open, so that those of `open` become those of `wanted`.
fn steps(open: &BTreeSet<SocketAddr>, wanted: Option<&HealthCheck>) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
    let none = BTreeSet::new();
    let wanted = wanted.map_or(&none, |check| &check.listen);
    (open.difference(wanted).copied().collect(), wanted.difference(open).copied().collect())
}

#[cfg(test)]
mod tests;
