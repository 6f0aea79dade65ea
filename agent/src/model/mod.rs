//! What the agent remembers of the cluster: Services, their EndpointSlices, the own Node, ServiceCIDRs and the node's
//! own addresses, as small records.
//!
//! In: one [`Change`] at a time, straight from a watch, in any order. Out: [`Dirty`], the names of what must be planned
//! again. No I/O and no decisions: who may reach what is decided in [`crate::plan`]. The watcher's objects are
//! reduced at once (100,000 endpoints need a few MiB), and an object that makes no sense is skipped with a reason
//! ([`Skipped`]) while everything else is served.
//!
//! The label `service.kubernetes.io/service-proxy-name` is kept as part of a [`Service`]; the plan compares it with the
//! configured name. While that setting changes, Services of the former and of the new name are here side by side: the
//! watch lists only one of them, and the sync loop goes over to the new name when its list is complete.

mod address;
mod node;
mod service;
mod slice;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::{core, discovery};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

pub use address::{family_of, parse_address, parse_network};
pub use node::NodeFacts;
pub use service::{Protocol, Service, ServicePort};
pub use slice::{Endpoint, Hints, Slice, SlicePort};

/// Namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

impl ObjectName {
    /// The name `namespace/name`.
    #[must_use]
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// The name of the object that has this metadata.
    #[must_use]
    pub fn of(metadata: &ObjectMeta) -> Self {
        Self::new(
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        )
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One thing that happened in the cluster or on the node.
#[derive(Clone, Debug)]
pub enum Change {
    /// A Service was added or changed. Headless and ExternalName Services are forgotten.
    ServiceApplied(Box<core::v1::Service>),
    /// A Service is gone.
    ServiceDeleted(ObjectName),
    /// An EndpointSlice was added or changed.
    SliceApplied(Box<discovery::v1::EndpointSlice>),
    /// An EndpointSlice is gone.
    SliceDeleted(ObjectName),
    /// The own Node was added or changed.
    Node(NodeFacts),
    /// The blocks that ClusterIPs are taken from, all of them.
    ServiceCidrs(Vec<IpNet>),
    /// The addresses of the node's interfaces, all of them.
    LocalAddresses(Vec<IpAddr>),
}

/// Something that makes no sense and is therefore not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// The kind of the object.
    pub kind: &'static str,
    /// Its namespace and name.
    pub name: ObjectName,
    /// What is wrong, and what is served nevertheless.
    pub reason: String,
}

/// What a [`Change`] means for the plan.
#[derive(Clone, Debug, Default)]
pub struct Dirty {
    /// Services to plan again.
    pub services: BTreeSet<ObjectName>,
    /// Whether something that concerns every Service has changed.
    pub everything: bool,
    /// What was skipped, for an Event.
    pub skipped: Vec<Skipped>,
    /// When the change of a Service's endpoints was caused (`endpoints.kubernetes.io/last-change-trigger-time`).
    pub triggers: Vec<(ObjectName, Time)>,
}

impl Dirty {
    /// Adds what another change means.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.everything |= other.everything;
        self.skipped.extend(other.skipped);
        self.triggers.extend(other.triggers);
    }

    /// Whether there is nothing to plan. There may still be something [`Dirty::skipped`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && !self.everything
    }
}

/// What the agent remembers of the cluster.
#[derive(Debug, Default)]
pub struct Model {
    node: NodeFacts,
    service_cidrs: Vec<IpNet>,
    local_addresses: BTreeSet<IpAddr>,
    services: BTreeMap<ObjectName, Box<Service>>,
    /// Slices by the Service that they belong to, sorted by their own name. Nearly all Services have one.
    slices: HashMap<ObjectName, Vec<(Arc<str>, Slice)>>,
    /// The Service that a slice belongs to.
    owners: HashMap<ObjectName, Arc<str>>,
    /// Namespaces, names of ports and nodes, and hints, shared by the records that carry them.
    strings: Pool<str>,
    hints: Pool<Hints>,
}

impl Model {
    /// A model that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in one change.
    pub fn apply(&mut self, change: Change) -> Dirty {
        let mut dirty = Dirty::default();
        match change {
            Change::ServiceApplied(object) => self.apply_service(&object, &mut dirty),
            Change::ServiceDeleted(name) => {
                if self.services.remove(&name).is_some() {
                    dirty.services.insert(name);
                }
            }
            Change::SliceApplied(object) => self.apply_slice(&object, &mut dirty),
            Change::SliceDeleted(name) => self.forget_slice(&name, &mut dirty),
            Change::Node(facts) => {
                dirty.everything = self.node != facts;
                self.node = facts;
            }
            Change::ServiceCidrs(mut cidrs) => {
                for cidr in &mut cidrs {
                    *cidr = cidr.trunc();
                }
                let cidrs = IpNet::aggregate(&cidrs);
                dirty.everything = self.service_cidrs != cidrs;
                self.service_cidrs = cidrs;
            }
            Change::LocalAddresses(addresses) => {
                let addresses = addresses.into_iter().collect();
                dirty.everything = self.local_addresses != addresses;
                self.local_addresses = addresses;
            }
        }
        dirty
    }

    /// The name of a Service, made of the strings that other records have already.
    fn share(&mut self, name: ObjectName) -> ObjectName {
        let known = self.services.get_key_value(&name).map(|(known, _)| known);
        let known = known.or_else(|| self.slices.get_key_value(&name).map(|(known, _)| known));
        known
            .cloned()
            .unwrap_or_else(|| ObjectName { namespace: self.strings.share(&name.namespace), ..name })
    }

    fn apply_service(&mut self, object: &core::v1::Service, dirty: &mut Dirty) {
        let name = self.share(ObjectName::of(&object.metadata));
        let mut faults = Vec::new();
        let service = Service::read(object, &mut self.strings, &mut faults);
        skip(&mut dirty.skipped, "Service", &name, faults);
        let changed = match service {
            Some(service) if self.service(&name) == Some(&service) => false,
            Some(service) => {
                self.services.insert(name.clone(), Box::new(service));
                true
            }
            None => self.services.remove(&name).is_some(),
        };
        if changed {
            dirty.services.insert(name);
        }
    }

    fn apply_slice(&mut self, object: &discovery::v1::EndpointSlice, dirty: &mut Dirty) {
        let mut name = ObjectName::of(&object.metadata);
        name.namespace = self.strings.share(&name.namespace);
        let mut faults = Vec::new();
        let read = Slice::read(object, &mut self.strings, &mut self.hints, &mut faults);
        skip(&mut dirty.skipped, "EndpointSlice", &name, faults);
        let Some((owner, slice)) = read else { return self.forget_slice(&name, dirty) };
        if self.owners.get(&name).is_some_and(|known| *known != owner) {
            self.forget_slice(&name, dirty);
        }
        let service = self.share(ObjectName::new(name.namespace.clone(), owner));
        let owner = service.name.clone();
        let slices = self.slices.entry(service.clone()).or_insert_with(|| Vec::with_capacity(1));
        match slices.binary_search_by(|(known, _)| known.cmp(&name.name)) {
            Ok(at) if slices[at].1 == slice => return,
            Ok(at) => slices[at].1 = slice,
            Err(at) => slices.insert(at, (name.name.clone(), slice)),
        }
        self.owners.insert(name, owner);
        if let Some(time) = slice::trigger_time(object) {
            dirty.triggers.push((service.clone(), time));
        }
        dirty.services.insert(service);
    }

    fn forget_slice(&mut self, name: &ObjectName, dirty: &mut Dirty) {
        let Some(owner) = self.owners.remove(name) else { return };
        let service = ObjectName::new(name.namespace.clone(), owner);
        if let Some(slices) = self.slices.get_mut(&service) {
            slices.retain(|(known, _)| *known != name.name);
            if slices.is_empty() {
                self.slices.remove(&service);
            }
        }
        dirty.services.insert(service);
        self.strings.sweep();
        self.hints.sweep();
    }

    /// The own Node.
    #[must_use]
    pub fn node(&self) -> &NodeFacts {
        &self.node
    }

    /// The blocks that ClusterIPs are taken from, none inside another.
    #[must_use]
    pub fn service_cidrs(&self) -> &[IpNet] {
        &self.service_cidrs
    }

    /// The addresses of the node's interfaces.
    #[must_use]
    pub fn local_addresses(&self) -> &BTreeSet<IpAddr> {
        &self.local_addresses
    }

    /// One Service.
    #[must_use]
    pub fn service(&self, name: &ObjectName) -> Option<&Service> {
        self.services.get(name).map(|service| &**service)
    }

    /// All Services, by name.
    pub fn services(&self) -> impl Iterator<Item = (&ObjectName, &Service)> {
        self.services.iter().map(|(name, service)| (name, &**service))
    }

    /// The slices of a Service, by name.
    pub fn slices(&self, service: &ObjectName) -> impl Iterator<Item = &Slice> {
        self.slices.get(service).into_iter().flatten().map(|(_, slice)| slice)
    }
}

fn skip(skipped: &mut Vec<Skipped>, kind: &'static str, name: &ObjectName, faults: Vec<String>) {
    skipped.extend(faults.into_iter().map(|reason| Skipped { kind, name: name.clone(), reason }));
}

/// Values that many records share.
#[derive(Debug)]
pub(crate) struct Pool<T: ?Sized> {
    values: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self { values: HashSet::new(), sweep_at: 64 }
    }
}

impl<T: ?Sized + Eq + std::hash::Hash> Pool<T> {
    /// The shared copy of a value.
    pub(crate) fn share(&mut self, value: &T) -> Arc<T>
    where
        Arc<T>: for<'a> From<&'a T>,
    {
        if let Some(shared) = self.values.get(value) {
            return shared.clone();
        }
        self.sweep();
        let shared = Arc::from(value);
        self.values.insert(Arc::clone(&shared));
        shared
    }

    /// Forgets values that nobody uses, once enough have gathered.
    fn sweep(&mut self) {
        if self.values.len() >= self.sweep_at {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.sweep_at = (self.values.len() * 2).max(64);
        }
    }
}

#[cfg(test)]
mod tests;
