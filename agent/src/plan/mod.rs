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
mod node;
mod port;
mod route;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pointsman_crds::node_config::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;

use crate::model::{Dirty, Model, ObjectName};
use claims::Claims;

pub use node::{LocalTraffic, NodePlan, NodePorts};
pub use port::{Backend, PortId, PortPlan, Sources, Target};
pub use route::{Hop, Packet, Verdict};

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
}

impl Changes {
    /// Adds later changes.
    pub fn merge(&mut self, later: Self) {
        self.ports.extend(later.ports);
        self.nodes.extend(later.nodes);
        self.triggered.extend(later.triggered);
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
                    if let Some(before) = self.ports.insert(id.clone(), Arc::new(planned)) {
                        self.endpoints -= before.endpoints();
                    }
                    changes.ports.insert(id);
                }
            }
        }
        let (before, now) = (!old.is_empty(), !kept.is_empty());
        for id in old.into_iter().filter(|id| !kept.contains(id)) {
            if let Some(gone) = self.ports.remove(&id) {
                self.endpoints -= gone.endpoints();
            }
            changes.ports.insert(id);
        }
        self.services = self.services + usize::from(now) - usize::from(before);
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
mod tests;
