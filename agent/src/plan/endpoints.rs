//! Which endpoints of a Service port may be used.
//!
//! In: the slices of a Service, the node. Out: [`Categories`]. Reference §1.7 and §6.8, §6.9; KEP-1669 (terminating),
//! KEP-2086 (internal traffic policy), KEP-2433 and KEP-3015 (topology).

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::node::NodePlan;
use super::port::Backend;
use crate::model::{Endpoint, Hints, Model, ObjectName, Protocol};

/// The endpoints of a Service port, by what they may be used for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Categories {
    /// For traffic under policy Cluster: the ready ones near enough; if none is ready, those that still answer.
    pub cluster: Vec<Backend>,
    /// For traffic under policy Local: the ready ones on this node; if none is, those on it that still answer.
    pub local: Vec<Backend>,
    /// Whether anybody answers anywhere. Without it a packet is rejected, with it policy Local drops.
    pub any: bool,
    /// Everybody who answers anywhere.
    pub serving: Vec<Backend>,
}

/// Sorts the endpoints of a Service port.
pub(super) fn categorise(
    model: &Model,
    service: &ObjectName,
    port: &str,
    protocol: Protocol,
    node: &NodePlan,
) -> Categories {
    // The same address and port may be in several slices, for instance while a pod moves between them: the copy
    // that is most alive counts.
    let mut merged: BTreeMap<(IpAddr, u16), &Endpoint> = BTreeMap::new();
    for slice in model.slices(service).filter(|slice| slice.family == node.family) {
        for number in slice.ports.iter().filter(|p| p.protocol == protocol && *p.name == *port) {
            for endpoint in &slice.endpoints {
                merged
                    .entry((endpoint.address, number.port))
                    .and_modify(|known| {
                        if liveness(endpoint) > liveness(known) {
                            *known = endpoint;
                        }
                    })
                    .or_insert(endpoint);
            }
        }
    }
    let is_local = |endpoint: &Endpoint| endpoint.node.as_deref() == Some(node.name.as_str());
    let select = |wanted: &dyn Fn(&Endpoint) -> bool| -> Vec<Backend> {
        let chosen = merged.iter().filter(|(_, endpoint)| wanted(endpoint));
        chosen
            .map(|((address, port), endpoint)| Backend {
                address: *address,
                port: *port,
                local: is_local(endpoint),
                weight: endpoint.weight,
            })
            .collect()
    };
    let ready: Vec<&Endpoint> = merged.values().copied().filter(|endpoint| endpoint.ready).collect();
    let near = nearness(&ready, node);
    let mut cluster = select(&|endpoint| endpoint.ready && near.admits(endpoint, node));
    if cluster.is_empty() {
        cluster = select(&still_answers);
    }
    let mut local = select(&|endpoint| endpoint.ready && is_local(endpoint));
    if local.is_empty() {
        local = select(&|endpoint| still_answers(endpoint) && is_local(endpoint));
    }
    let any = !cluster.is_empty() || !local.is_empty();
    let serving = select(&|endpoint| endpoint.ready || endpoint.serving);
    Categories { cluster, local, any, serving }
}

fn liveness(endpoint: &Endpoint) -> (bool, bool, bool) {
    (endpoint.ready, !endpoint.terminating, endpoint.serving)
}

fn still_answers(endpoint: &Endpoint) -> bool {
    endpoint.serving && endpoint.terminating
}

/// How near an endpoint must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Nearness {
    Node,
    Zone,
    Anywhere,
}

impl Nearness {
    fn admits(self, endpoint: &Endpoint, node: &NodePlan) -> bool {
        let hints = endpoint.hints.as_deref();
        match self {
            Self::Node => hints.is_some_and(|hints| hints.nodes.iter().any(|name| **name == *node.name)),
            Self::Zone => hints.is_some_and(|hints| in_zone(hints, node)),
            Self::Anywhere => true,
        }
    }
}

fn in_zone(hints: &Hints, node: &NodePlan) -> bool {
    node.zone.as_deref().is_some_and(|own| hints.zones.iter().any(|zone| **zone == *own))
}

/// Hints are followed only if every ready endpoint has them and one is meant for here: otherwise the controller
/// and the cluster disagree, and everything is better than nothing.
fn nearness(ready: &[&Endpoint], node: &NodePlan) -> Nearness {
    let hints = |endpoint: &&Endpoint| endpoint.hints.clone();
    let all = |present: &dyn Fn(&Hints) -> bool| {
        !ready.is_empty() && ready.iter().all(|endpoint| hints(endpoint).is_some_and(|hints| present(&hints)))
    };
    let some = |nearness: Nearness| ready.iter().any(|endpoint| nearness.admits(endpoint, node));
    if all(&|hints| !hints.nodes.is_empty()) && some(Nearness::Node) {
        Nearness::Node
    } else if all(&|hints| !hints.zones.is_empty()) && some(Nearness::Zone) {
        Nearness::Zone
    } else {
        Nearness::Anywhere
    }
}
