//! Who owns an address and port that several Services name.
//!
//! In: a Service's frontends. Out: the winner of each, the same whatever the order of events. A ClusterIP beats a load
//! balancer's address, which beats an external IP (anybody who may write a Service can claim any external IP,
//! CVE-2020-8554); among equals the first by namespace and name. The loser is served at its other frontends.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use pointsman_crds::proxy_node_status::IpFamily;

use super::port::PortId;
use crate::model::{ObjectName, Protocol, Service, ServicePort, family_of};

/// Something that at most one Service port can answer at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Frontend {
    /// A virtual address.
    Address(IpAddr, Protocol, u16),
    /// A port of the node.
    NodePort(IpFamily, Protocol, u16),
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address, protocol, port) => {
                write!(f, "{}/{protocol}", SocketAddr::new(*address, *port))
            }
            Self::NodePort(family, protocol, port) => write!(f, "node port {port}/{protocol} ({family:?})"),
        }
    }
}

/// What a Service names a frontend as; the first wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    ClusterIp,
    LoadBalancer,
    ExternalIp,
    NodePort,
}

type Claim = (Kind, PortId);

/// The frontends of all Services. Nearly all have one claim, so the claims are sorted lists: a tree has room for eleven.
#[derive(Debug, Default)]
pub(super) struct Claims {
    by_frontend: BTreeMap<Frontend, Vec<Claim>>,
    by_service: BTreeMap<ObjectName, Box<[(Frontend, Claim)]>>,
}

impl Claims {
    /// Replaces a Service's claims; returns the other Services that claim a frontend whose owner has changed by it.
    pub(super) fn update(
        &mut self,
        name: &ObjectName,
        service: Option<&Service>,
        families: &[IpFamily],
    ) -> BTreeSet<ObjectName> {
        let new: BTreeSet<_> = service.map(|service| claims_of(name, service, families)).unwrap_or_default();
        let old = self.by_service.remove(name).unwrap_or_default();
        let mut touched = BTreeSet::new();
        for (frontend, claim) in old.iter().filter(|claim| !new.contains(claim)) {
            if let Some(claims) = self.by_frontend.get_mut(frontend) {
                let had_it = claims.first() == Some(claim);
                claims.retain(|other| other != claim);
                touched.extend(claims.iter().filter(|_| had_it).map(|(_, id)| id.service.clone()));
                if claims.is_empty() {
                    self.by_frontend.remove(frontend);
                }
            }
        }
        for (frontend, claim) in new.iter().filter(|claim| old.binary_search(claim).is_err()) {
            let claims = self.by_frontend.entry(*frontend).or_insert_with(|| Vec::with_capacity(1));
            if let Err(at) = claims.binary_search(claim) {
                claims.insert(at, claim.clone());
            }
            let gets_it = claims.first() == Some(claim);
            touched.extend(claims.iter().filter(|_| gets_it).map(|(_, id)| id.service.clone()));
        }
        if !new.is_empty() {
            self.by_service.insert(name.clone(), new.into_iter().collect());
        }
        touched.remove(name);
        touched
    }

    /// Whether nobody claims anything.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_frontend.is_empty() && self.by_service.is_empty()
    }

    /// What a Service names and another Service has, for people.
    pub(super) fn lost(&self, name: &ObjectName) -> Vec<String> {
        let mut lost = BTreeSet::new();
        for (frontend, _) in self.by_service.get(name).into_iter().flatten() {
            let winner = self.by_frontend.get(frontend).and_then(|claims| claims.first());
            if let Some((_, owner)) = winner.filter(|(_, owner)| owner.service != *name) {
                lost.insert(format!(
                    "{frontend} belongs to Service {} and is not served for this one",
                    owner.service
                ));
            }
        }
        lost.into_iter().collect()
    }

    /// The name of a Service port: the one that its claims have, if it has any.
    pub(super) fn id(&self, service: &ObjectName, family: IpFamily, port: &ServicePort) -> PortId {
        let mut ids = self.by_service.get(service).into_iter().flatten().map(|(_, (_, id))| id);
        let own = ids.find(|id| id.family == family && id.protocol == port.protocol && id.port == port.name);
        own.cloned().unwrap_or_else(|| PortId::new(service.clone(), family, port.name.clone(), port.protocol))
    }

    /// Whether a Service port owns a frontend as what it names it.
    pub(super) fn owns(&self, frontend: Frontend, kind: Kind, id: &PortId) -> bool {
        self.by_frontend
            .get(&frontend)
            .and_then(|claims| claims.first())
            .is_some_and(|(winner, owner)| *winner == kind && owner == id)
    }
}

fn claims_of(name: &ObjectName, service: &Service, families: &[IpFamily]) -> BTreeSet<(Frontend, Claim)> {
    let mut claims = BTreeSet::new();
    for port in &service.ports {
        let [v4, v6] = [IpFamily::IPv4, IpFamily::IPv6]
            .map(|family| PortId::new(name.clone(), family, port.name.clone(), port.protocol));
        let id = |family| match family {
            IpFamily::IPv4 => v4.clone(),
            IpFamily::IPv6 => v6.clone(),
        };
        let lists = [
            (Kind::ClusterIp, &service.cluster_ips),
            (Kind::LoadBalancer, &service.load_balancer_ips),
            (Kind::ExternalIp, &service.external_ips),
        ];
        for (kind, addresses) in lists {
            for address in addresses.iter().filter(|address| families.contains(&family_of(**address))) {
                let frontend = Frontend::Address(*address, port.protocol, port.port);
                claims.insert((frontend, (kind, id(family_of(*address)))));
            }
        }
        for family in families.iter().filter(|family| service.has_family(**family)) {
            if let Some(number) = port.node_port {
                let frontend = Frontend::NodePort(*family, port.protocol, number);
                claims.insert((frontend, (Kind::NodePort, id(*family))));
            }
        }
    }
    claims
}
