//! What the node must do with packets to Services: the only place that decides.
//!
//! In: the [`Model`] with what is [`Dirty`] in it, and the node's configuration. Out: one [`PortPlan`] per Service port and
//! family, one [`NodePlan`] per family, and [`Changes`], the names of those that really changed. Which endpoints a
//! frontend may use, whether the source is rewritten, and what a packet without an endpoint gets is decided here and
//! nowhere else; renderers translate. [`Plan::route`] says where one packet goes, and is what every mode is tested with.
//!
//! One change costs time in proportion to the Services it concerns, never to the size of the cluster.

mod claims;
mod endpoints;
mod health;
mod node;
mod port;
mod route;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pointsman_crds::node_config::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;

use crate::model::{Dirty, Model, ObjectName, Service, Skipped};
use claims::Claims;

pub use health::HealthCheck;
pub use node::{LocalTraffic, NodePlan, NodePorts};
pub use port::{Backend, NoLocal, PortId, PortPlan, Sources, Target};
pub use route::{Entrance, Hop, Packet, Verdict};

/// What changed in a plan.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Service ports that were added, changed or removed.
    pub ports: BTreeSet<PortId>,
    /// Families whose [`NodePlan`] changed.
    pub nodes: BTreeSet<IpFamily>,
    /// Services whose endpoints changed at a known time: the start of the network programming latency. Each
    /// is reported once.
    pub triggered: Vec<(ObjectName, Time)>,
    /// Services whose [`HealthCheck`] was added, changed or removed. Nothing of it is in the kernel.
    pub health_checks: BTreeSet<ObjectName>,
    /// Frontends that a Service names and another one has, as far as that is news.
    pub conflicts: Vec<Skipped>,
}

impl Changes {
    /// Adds later changes.
    pub fn merge(&mut self, later: Self) {
        self.ports.extend(later.ports);
        self.nodes.extend(later.nodes);
        self.triggered.extend(later.triggered);
        self.health_checks.extend(later.health_checks);
        self.conflicts.extend(later.conflicts);
    }

    /// Whether the kernel state stays as it is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.nodes.is_empty()
    }

    /// The Services that changed.
    #[must_use]
    pub fn services(&self) -> BTreeSet<&ObjectName> {
        self.ports.iter().map(|id| &id.service).collect()
    }
}

/// What the node must do with packets to Services.
#[derive(Debug)]
pub struct Plan {
    config: NodeProxyConfiguration,
    families: Vec<IpFamily>,
    nodes: BTreeMap<IpFamily, NodePlan>,
    ports: BTreeMap<PortId, Arc<PortPlan>>,
    claims: Claims,
    health_checks: BTreeMap<ObjectName, HealthCheck>,
    /// What each Service names and does not get, if there is anything.
    conflicts: BTreeMap<ObjectName, Vec<String>>,
    no_local: BTreeMap<IpFamily, NoLocal>,
    /// Services that have at least one port in the plan.
    services: usize,
    /// Endpoints of all ports, as far as they are used.
    endpoints: usize,
}

impl Plan {
    /// An empty plan for the families that the node has.
    #[must_use]
    pub fn new(config: NodeProxyConfiguration, families: &[IpFamily]) -> Self {
        Self {
            nodes: families.iter().map(|family| (*family, NodePlan::empty(*family))).collect(),
            families: families.to_vec(),
            config,
            ports: BTreeMap::new(),
            claims: Claims::default(),
            health_checks: BTreeMap::new(),
            conflicts: BTreeMap::new(),
            no_local: BTreeMap::new(),
            services: 0,
            endpoints: 0,
        }
    }

    /// Follows the model.
    pub fn update(&mut self, model: &Model, dirty: Dirty) -> Changes {
        let mut changes = Changes { triggered: dirty.triggers, ..Changes::default() };
        if dirty.everything {
            self.plan_everything(model, &mut changes);
        } else {
            self.plan_services(model, dirty.services, &mut changes);
        }
        changes
    }

    /// Follows a change of the configuration, live.
    pub fn configure(&mut self, config: NodeProxyConfiguration, model: &Model) -> Changes {
        let mut changes = Changes::default();
        if self.config != config {
            self.config = config;
            self.plan_everything(model, &mut changes);
        }
        changes
    }

    fn plan_everything(&mut self, model: &Model, changes: &mut Changes) {
        for family in &self.families {
            let node = NodePlan::new(*family, &self.config, model);
            if self.nodes.get(family) != Some(&node) {
                self.nodes.insert(*family, node);
                changes.nodes.insert(*family);
            }
        }
        let mut names: BTreeSet<ObjectName> = model.services().map(|(name, _)| name.clone()).collect();
        names.extend(self.ports.keys().map(|id| id.service.clone()));
        self.plan_services(model, names, changes);
    }

    fn plan_services(&mut self, model: &Model, mut names: BTreeSet<ObjectName>, changes: &mut Changes) {
        // Two Services may name the same address and port; when one lets go of it, the other takes over.
        for name in names.clone() {
            let service = model.service(&name).filter(|service| self.serves(service.proxy_name.as_deref()));
            names.extend(self.claims.update(&name, service, &self.families));
        }
        for name in names {
            self.plan_service(model, &name, changes);
        }
    }

    /// Whether Services with this value of the label `service.kubernetes.io/service-proxy-name` are ours.
    fn serves(&self, proxy_name: Option<&str>) -> bool {
        match proxy_name {
            None => self.config.service_proxy_name.is_empty(),
            Some(name) => {
                !self.config.service_proxy_name.is_empty() && name == self.config.service_proxy_name
            }
        }
    }

    fn plan_service(&mut self, model: &Model, name: &ObjectName, changes: &mut Changes) {
        let old: Vec<PortId> = self.ids_of(name).cloned().collect();
        let service = model.service(name).filter(|service| self.serves(service.proxy_name.as_deref()));
        let mut kept = BTreeSet::new();
        if let Some(service) = service {
            for family in self.families.clone() {
                let Some(node) = self.nodes.get(&family) else { continue };
                let planned = port::plan_ports(name, service, model, node, &self.claims);
                for (id, planned) in planned {
                    kept.insert(id.clone());
                    if self.ports.get(&id).is_some_and(|known| **known == planned) {
                        continue;
                    }
                    self.endpoints += planned.endpoints();
                    self.no_local.entry(family).or_default().add(planned.no_local());
                    if let Some(before) = self.ports.insert(id.clone(), Arc::new(planned)) {
                        self.forget(family, &before);
                    }
                    changes.ports.insert(id);
                }
            }
        }
        let (before, now) = (!old.is_empty(), !kept.is_empty());
        for id in old.into_iter().filter(|id| !kept.contains(id)) {
            if let Some(gone) = self.ports.remove(&id) {
                self.forget(id.family, &gone);
            }
            changes.ports.insert(id);
        }
        self.services = self.services + usize::from(now) - usize::from(before);
        self.note_conflicts(name, changes);
        let check = service.and_then(|service| self.plan_health_check(name, service, model));
        if self.health_checks.get(name) != check.as_ref() {
            match check {
                Some(check) => self.health_checks.insert(name.clone(), check),
                None => self.health_checks.remove(name),
            };
            changes.health_checks.insert(name.clone());
        }
    }

    fn forget(&mut self, family: IpFamily, port: &PortPlan) {
        self.endpoints -= port.endpoints();
        self.no_local.entry(family).or_default().subtract(port.no_local());
    }

    fn plan_health_check(&self, name: &ObjectName, service: &Service, model: &Model) -> Option<HealthCheck> {
        let number = service.health_check_node_port?;
        let mut check = HealthCheck::default();
        for (family, node) in self.nodes.iter().filter(|(family, _)| service.has_family(**family)) {
            let own = self.ids_of(name).filter(|id| id.family == *family);
            let ports = own.filter_map(|id| self.ports.get(id)).map(|port| &**port);
            check.add(number, name, ports, model, node, &self.config);
        }
        Some(check)
    }

    fn note_conflicts(&mut self, name: &ObjectName, changes: &mut Changes) {
        let lost = self.claims.lost(name);
        let known = if lost.is_empty() {
            self.conflicts.remove(name)
        } else {
            self.conflicts.insert(name.clone(), lost.clone())
        };
        let known = known.unwrap_or_default();
        changes.conflicts.extend(
            lost.into_iter().filter(|reason| !known.contains(reason)).map(|reason| Skipped {
                kind: "Service",
                name: name.clone(),
                reason,
            }),
        );
    }

    fn ids_of(&self, name: &ObjectName) -> impl Iterator<Item = &PortId> {
        self.ports.range(PortId::first_of(name)..).map(|(id, _)| id).take_while(move |id| id.service == *name)
    }

    /// The configuration that the plan follows.
    #[must_use]
    pub fn config(&self) -> &NodeProxyConfiguration {
        &self.config
    }

    /// The families that the plan covers.
    #[must_use]
    pub fn families(&self) -> &[IpFamily] {
        &self.families
    }

    /// What holds for the whole node in a family.
    #[must_use]
    pub fn node(&self, family: IpFamily) -> Option<&NodePlan> {
        self.nodes.get(&family)
    }

    /// One Service port.
    #[must_use]
    pub fn port(&self, id: &PortId) -> Option<&Arc<PortPlan>> {
        self.ports.get(id)
    }

    /// All Service ports of a family, in a fixed order.
    pub fn ports(&self, family: IpFamily) -> impl Iterator<Item = (&PortId, &Arc<PortPlan>)> {
        self.ports.iter().filter(move |(id, _)| id.family == family)
    }

    /// What load balancers that ask for a Service get to know, if any may ask.
    #[must_use]
    pub fn health_check(&self, service: &ObjectName) -> Option<&HealthCheck> {
        self.health_checks.get(service)
    }

    /// The Services that load balancers may ask for.
    pub fn health_checked(&self) -> impl Iterator<Item = &ObjectName> {
        self.health_checks.keys()
    }

    /// How many Services name a frontend that another one has.
    #[must_use]
    pub fn conflicts(&self) -> usize {
        self.conflicts.len()
    }

    /// How many Service ports of a family have endpoints, but none where their policy Local wants them.
    #[must_use]
    pub fn no_local(&self, family: IpFamily) -> NoLocal {
        self.no_local.get(&family).copied().unwrap_or_default()
    }

    /// How many Services are in the plan.
    #[must_use]
    pub fn services(&self) -> usize {
        self.services
    }

    /// How many endpoints are in use, counted once per Service port and family.
    #[must_use]
    pub fn endpoints(&self) -> usize {
        self.endpoints
    }
}

#[cfg(test)]
pub(crate) mod random;
#[cfg(test)]
mod tests;

#[cfg(test)]
mod health_tests;
