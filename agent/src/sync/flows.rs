//! UDP and SCTP flows that must not outlive their endpoints, and TCP connections that began before their frontend was served.
//!
//! In: the plan, and which of its ports have changed. Out: one [`Job`] per family for [`crate::conntrack`], due until a run has
//! succeeded. Of TCP only that is looked after: an established connection to a terminating endpoint is to end by itself.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use crate::conntrack::{Endpoints, Frontend, Job, NodePort, Reconciler, Target};
use crate::model::{Model, Protocol, family_of};
use crate::plan::{Backend, Plan, PortId, PortPlan};

/// What every frontend that is looked after leads to, as of the last write.
#[derive(Debug, Default)]
pub(super) struct Flows {
    families: BTreeMap<IpFamily, Reconciler>,
    targets: HashMap<PortId, Vec<Target>>,
    /// Frontends that the kernel was found to serve, to be compared with the plan.
    found: Vec<(IpFamily, Target)>,
    /// The plan is another one than at the last write: what it does not have is not among its changes.
    replaced: bool,
}

impl Flows {
    /// The next plan is made from scratch.
    pub(super) fn replaced(&mut self) {
        self.replaced = true;
    }

    /// Follows the plan after it was written. `changed` are its ports that are not the same as at the last call.
    /// `endpoints` says where the flows of a UDP or SCTP port may lead.
    pub(super) fn follow(
        &mut self,
        plan: &Plan,
        model: &Model,
        changed: &BTreeSet<PortId>,
        endpoints: impl Fn(&PortId, &PortPlan) -> Vec<SocketAddr>,
    ) {
        for family in plan.families() {
            let own =
                model.local_addresses().iter().copied().filter(|address| family_of(*address) == *family);
            self.reconciler(*family).set_node_addresses(Some(own.collect()));
        }
        let gone: Vec<PortId> = if std::mem::take(&mut self.replaced) {
            self.targets.keys().filter(|id| plan.port(id).is_none()).cloned().collect()
        } else {
            Vec::new()
        };
        // A frontend may go from one Service to another: what is taken away goes first.
        for id in changed.iter().chain(&gone) {
            let kept: Vec<Target> = plan.port(id).map(|port| targets(id, port)).unwrap_or_default();
            let family = id.family;
            for target in self.targets.remove(id).unwrap_or_default() {
                if !kept.contains(&target) {
                    self.reconciler(family).remove(target);
                }
            }
            if !kept.is_empty() {
                self.targets.insert(id.clone(), kept);
            }
        }
        for id in changed {
            // Most ports have none: their endpoints need no look.
            let (Some(port), Some(targets)) = (plan.port(id), self.targets.get(id).cloned()) else {
                continue;
            };
            let endpoints = Endpoints::new(match id.protocol {
                Protocol::Tcp => port.backends().map(Backend::socket).collect(),
                Protocol::Udp | Protocol::Sctp => endpoints(id, port),
            });
            for target in targets {
                self.reconciler(id.family).set(target, endpoints.clone());
            }
        }
        self.remove_unplanned();
    }

    /// Takes in frontends that the kernel was found to serve. Those that the plan does not have when it was written went
    /// while no agent ran.
    pub(super) fn found(&mut self, served: &[(IpFamily, Target)]) {
        self.found.extend(served);
    }

    fn remove_unplanned(&mut self) {
        if self.found.is_empty() {
            return;
        }
        let planned: HashSet<(IpFamily, Target)> = (self.targets.iter())
            .flat_map(|(id, targets)| targets.iter().map(|target| (id.family, *target)))
            .collect();
        for (family, target) in std::mem::take(&mut self.found) {
            if !planned.contains(&(family, target)) {
                self.reconciler(family).remove(target);
            }
        }
    }

    /// What is due.
    pub(super) fn due(&self) -> Vec<Job> {
        self.families.values().filter_map(Reconciler::begin).collect()
    }

    /// A job was run.
    pub(super) fn finished(&mut self, job: Job, succeeded: bool) {
        self.reconciler(job.family).finish(job, succeeded);
    }

    fn reconciler(&mut self, family: IpFamily) -> &mut Reconciler {
        self.families.entry(family).or_insert_with(|| Reconciler::new(family))
    }
}

/// The frontends of a port whose flows are looked after. Of TCP those whose packets are forwarded as they are while they are not
/// served: the client's first SYN leaves an entry that keeps each repetition from being translated. A NodePort is answered by the
/// node itself then, and a ClusterIP is refused or dropped; where it is not, in mode iptables, it is not worth a walk through the
/// kernel's table for every new Service.
fn targets(id: &PortId, port: &PortPlan) -> Vec<Target> {
    let protocol = id.protocol;
    let inside = (protocol != Protocol::Tcp).then_some((port.cluster_ip, port.node_port));
    let (cluster_ip, node_port) = inside.unwrap_or_default();
    let addresses = cluster_ip.iter().chain(&port.external_ips).chain(&port.load_balancer_ips);
    addresses
        .map(|address| Frontend::new(SocketAddr::new(*address, port.port), protocol).into())
        .chain(node_port.map(|number| NodePort::new(number, protocol).into()))
        .collect()
}

#[cfg(test)]
mod tests;
