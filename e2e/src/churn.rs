//! Services that change at random, the same way for the same seed.
//!
//! In: a seed. Out: one change after the other, each as the whole objects that the API server is to hold. The first
//! [`STEADY`] Services keep a frontend and two endpoints for ever, whatever else of them changes: a request to them
//! must be answered at any moment. Everything of the others changes, their existence too.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use serde_json::{Value, json};

use crate::bench::lab::{FIRST_ENDPOINT, NODE_PODS};
use crate::bench::objects::{ENDPOINT_PORT, NAMESPACE, PORT};
use crate::bench::program::NODE;

/// Services in all.
pub const SERVICES: usize = 100;
/// Services of which two endpoints and a frontend stay.
pub const STEADY: usize = 30;
/// Endpoints that a Service can have.
const ENDPOINTS: u32 = 8;

/// Numbers that look random; Knuth's MMIX.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % limit as u64).unwrap_or(0)
    }

    fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }
}

/// How an endpoint is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Ready,
    NotReady,
    /// On its way out: not ready, and serves for a while.
    Terminating,
}

/// What an endpoint is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Endpoint {
    nth: u32,
    health: Health,
    local: bool,
    /// In the second of the Service's slices.
    second: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    ClusterIp,
    NodePort,
    LoadBalancer,
}

/// A Service as it is at the moment.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the API")]
struct Item {
    number: usize,
    exists: bool,
    kind: Kind,
    ports: usize,
    affinity: Option<usize>,
    external_local: bool,
    internal_local: bool,
    external_ips: usize,
    source_ranges: bool,
    not_ready_too: bool,
    close: bool,
    foreign: bool,
    endpoints: Vec<Endpoint>,
}

/// A change, as what is to be in the API server afterwards.
#[derive(Debug, Clone)]
pub struct Change {
    /// The Service, or only its name if it is to be gone.
    pub service: Result<Value, String>,
    /// The address in its status.
    pub vip: Option<Ipv4Addr>,
    /// Its two slices.
    pub slices: Vec<Value>,
    /// Which Service it is.
    pub number: usize,
}

/// All Services.
#[derive(Debug, Clone)]
pub struct Churn {
    random: Random,
    items: Vec<Item>,
}

impl Churn {
    /// Services of which each has two endpoints.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let endpoint = |nth| Endpoint { nth, health: Health::Ready, local: nth == 0, second: false };
        let item = |number| Item {
            number,
            exists: true,
            kind: Kind::ClusterIp,
            ports: 1,
            affinity: None,
            external_local: false,
            internal_local: false,
            external_ips: 0,
            source_ranges: false,
            not_ready_too: false,
            close: false,
            foreign: false,
            endpoints: (0..2).map(endpoint).collect(),
        };
        Self { random: Random(seed), items: (0..SERVICES).map(item).collect() }
    }

    /// What the API server is to hold at the beginning.
    #[must_use]
    pub fn all(&self) -> Vec<Change> {
        self.items.iter().map(Item::change).collect()
    }

    /// Endpoints of a steady Service that may answer now.
    #[must_use]
    pub fn may_answer(&self, number: usize) -> BTreeSet<Ipv4Addr> {
        let item = &self.items[number];
        item.endpoints
            .iter()
            .filter(|one| one.health == Health::Ready)
            .map(|one| address(number, one.nth))
            .collect()
    }

    /// Changes one property of one Service.
    pub fn step(&mut self) -> Change {
        let number = self.random.below(SERVICES);
        let random = &mut self.random;
        let item = &mut self.items[number];
        // Endpoints come and go far more often than anything else.
        if random.below(10) < 6 {
            item.change_endpoints(random);
        } else {
            item.change_service(random);
        }
        item.change()
    }
}

impl Item {
    fn steady(&self) -> bool {
        self.number < STEADY
    }

    fn change_endpoints(&mut self, random: &mut Random) {
        let kept = if self.steady() { 2 } else { 0 };
        let nth = kept + u32::try_from(random.below((ENDPOINTS - kept) as usize)).unwrap_or(0);
        match self.endpoints.iter().position(|one| one.nth == nth) {
            None => self.endpoints.push(Endpoint {
                nth,
                health: Health::Ready,
                local: random.one_in(3),
                second: random.one_in(4),
            }),
            Some(place) => match random.below(4) {
                0 | 1 => drop(self.endpoints.remove(place)),
                2 => {
                    self.endpoints[place].health = match self.endpoints[place].health {
                        Health::Ready => Health::NotReady,
                        Health::NotReady | Health::Terminating => Health::Ready,
                    };
                }
                _ => self.endpoints[place].health = Health::Terminating,
            },
        }
        if !self.steady() && random.one_in(40) {
            self.endpoints.clear();
        }
    }

    fn change_service(&mut self, random: &mut Random) {
        // What may take a frontend away comes last: steady Services have no such changes.
        match random.below(if self.steady() { 6 } else { 11 }) {
            0 => {
                self.kind = match random.below(3) {
                    0 => Kind::ClusterIp,
                    1 => Kind::NodePort,
                    _ => Kind::LoadBalancer,
                }
            }
            1 => self.affinity = if self.affinity.is_none() { Some(1 + random.below(86_400)) } else { None },
            2 => self.ports = 1 + random.below(3),
            3 => self.external_ips = random.below(3),
            4 => self.source_ranges ^= true,
            5 => self.close ^= true,
            6 => self.external_local ^= true,
            7 => self.internal_local ^= true,
            8 => self.not_ready_too ^= true,
            9 => self.foreign ^= true,
            _ => self.exists ^= true,
        }
    }

    fn name(&self) -> String {
        format!("c{:03}", self.number)
    }

    fn change(&self) -> Change {
        let service = if self.exists { Ok(self.service()) } else { Err(self.name()) };
        let vip = (self.exists && self.kind == Kind::LoadBalancer).then(|| vip(self.number));
        Change { service, vip, slices: vec![self.slice(false), self.slice(true)], number: self.number }
    }

    fn service(&self) -> Value {
        let ports: Vec<Value> = (0..self.ports)
            .map(|nth| {
                // The first is a steady Service's frontend.
                let protocol = if nth == 1 { "UDP" } else { "TCP" };
                json!({"name": format!("p{nth}"), "protocol": protocol, "port": usize::from(PORT) + nth, "targetPort": ENDPOINT_PORT})
            })
            .collect();
        let mut spec = json!({
            "clusterIP": cluster_ip(self.number), "ports": ports,
            "type": match self.kind {
                Kind::ClusterIp => "ClusterIP",
                Kind::NodePort => "NodePort",
                Kind::LoadBalancer => "LoadBalancer",
            },
            "sessionAffinity": if self.affinity.is_some() { "ClientIP" } else { "None" },
            "internalTrafficPolicy": if self.internal_local { "Local" } else { "Cluster" },
            "publishNotReadyAddresses": self.not_ready_too,
            "externalIPs": (0..self.external_ips).map(|nth| external_ip(self.number, nth)).collect::<Vec<_>>(),
        });
        if let Some(seconds) = self.affinity {
            spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": seconds}});
        }
        if self.kind != Kind::ClusterIp {
            spec["externalTrafficPolicy"] = json!(if self.external_local { "Local" } else { "Cluster" });
        }
        if self.kind == Kind::LoadBalancer && self.source_ranges {
            spec["loadBalancerSourceRanges"] = json!([NODE_PODS, "192.0.2.0/24"]);
        }
        if self.close {
            spec["trafficDistribution"] = json!("PreferClose");
        }
        let mut labels = json!({});
        if self.foreign {
            labels["service.kubernetes.io/service-proxy-name"] = json!("another");
        }
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": self.name(), "namespace": NAMESPACE, "labels": labels}, "spec": spec,
        })
    }

    fn slice(&self, second: bool) -> Value {
        let endpoints: Vec<Value> = self
            .endpoints
            .iter()
            .filter(|one| one.second == second)
            .map(|one| {
                let terminating = one.health == Health::Terminating;
                let ready = one.health == Health::Ready || self.not_ready_too && !terminating;
                json!({
                    "addresses": [address(self.number, one.nth)],
                    "conditions": {"ready": ready, "serving": true, "terminating": terminating},
                    "nodeName": if one.local { NODE } else { "elsewhere" },
                })
            })
            .collect();
        let ports: Vec<Value> = (0..self.ports)
            .map(|nth| {
                let protocol = if nth == 1 { "UDP" } else { "TCP" };
                json!({"name": format!("p{nth}"), "protocol": protocol, "port": ENDPOINT_PORT})
            })
            .collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": format!("{}-{}", self.name(), u8::from(second)), "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": self.name()},
            },
            "ports": ports, "endpoints": endpoints,
        })
    }
}

/// The ClusterIP of a Service.
#[must_use]
pub fn cluster_ip(number: usize) -> Ipv4Addr {
    above(Ipv4Addr::new(10, 96, 8, 0), number * 131)
}

fn vip(number: usize) -> Ipv4Addr {
    above(Ipv4Addr::new(198, 18, 0, 1), number)
}

fn external_ip(number: usize, nth: usize) -> Ipv4Addr {
    above(Ipv4Addr::new(198, 19, 0, 1), number * 2 + nth)
}

fn address(number: usize, nth: u32) -> Ipv4Addr {
    above(FIRST_ENDPOINT, number * ENDPOINTS as usize + nth as usize)
}

fn above(first: Ipv4Addr, offset: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(first.to_bits() + u32::try_from(offset).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_changes_and_another_does_not() {
        let run = |seed| {
            let mut churn = Churn::new(seed);
            (0..500).map(|_| format!("{:?}", churn.step())).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn steady_services_keep_frontend_and_endpoints_and_the_others_lose_everything() {
        let mut churn = Churn::new(7);
        let (mut gone, mut empty, mut kinds) = (0, 0, BTreeSet::new());
        for _ in 0..20_000 {
            let change = churn.step();
            let item = &churn.items[change.number];
            kinds.insert(format!("{:?}", item.kind));
            if change.number < STEADY {
                let service = change.service.unwrap();
                assert_eq!(service["spec"]["internalTrafficPolicy"], "Cluster");
                assert!(churn.may_answer(change.number).len() >= 2);
            } else {
                gone += usize::from(!item.exists);
                empty += usize::from(item.endpoints.is_empty());
            }
        }
        assert!(gone > 100 && empty > 100, "{gone} {empty}");
        assert_eq!(kinds.len(), 3);
    }
}
