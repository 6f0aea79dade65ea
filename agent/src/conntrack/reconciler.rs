//! Remembers what a run must look at, and which runs are due.
//!
//! In: changes of frontends, and the outcome of runs. Out: a [`Job`] when an entry may have become stale. Pure; the cost
//! of a change does not depend on how many frontends there are, except for the first change during a run, which copies.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use pointsman_crds::proxy_node_status::IpFamily;

use super::serving::{Endpoints, Protocol, Serving, Target};

/// What one run compares the kernel with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The family whose entries are looked at.
    pub family: IpFamily,
    /// The protocols whose entries are looked at.
    pub protocols: Vec<Protocol>,
    /// What they should lead to.
    pub serving: Arc<Serving>,
    generation: u64,
}

impl Job {
    /// A run over every protocol that has a frontend, beside any bookkeeping.
    #[must_use]
    pub fn new(family: IpFamily, serving: Serving) -> Self {
        let protocols = Protocol::ALL.into_iter().filter(|protocol| serving.concerns(*protocol)).collect();
        Self { family, protocols, serving: Arc::new(serving), generation: 0 }
    }
}

/// The frontends of one family, and since when their entries need a look.
///
/// A run becomes due when an entry may have become stale: an endpoint left, the first one came (flows that began before
/// it lead nowhere), a frontend is new or gone. More endpoints beside others make no entry stale and cost nothing.
/// Of TCP only the first endpoint makes a run due: the rest ends by itself, and each run has the kernel walk its whole table.
/// It stays due until a run has succeeded.
#[derive(Debug)]
pub struct Reconciler {
    family: IpFamily,
    serving: Arc<Serving>,
    /// Counts changes, so that a run that took long does not answer for what changed meanwhile.
    generation: u64,
    /// Last change that made a run due, by protocol.
    changed: HashMap<Protocol, u64>,
    /// When each removed frontend went.
    removed: HashMap<Target, u64>,
}

impl Reconciler {
    /// No frontends yet, nothing due.
    #[must_use]
    pub fn new(family: IpFamily) -> Self {
        Self {
            family,
            serving: Arc::default(),
            generation: 0,
            changed: HashMap::new(),
            removed: HashMap::new(),
        }
    }

    /// This frontend leads to these endpoints, which may be none.
    pub fn set(&mut self, target: impl Into<Target>, endpoints: Endpoints) {
        let target = target.into();
        let old = match &target {
            Target::Frontend(frontend) => self.serving.frontends.get(frontend),
            Target::NodePort(node_port) => self.serving.node_ports.get(node_port),
        };
        if old == Some(&endpoints) {
            return;
        }
        let led_to = old.filter(|old| !old.is_empty());
        let due = match target.protocol() {
            Protocol::Tcp => led_to.is_none() && !endpoints.is_empty(),
            Protocol::Udp | Protocol::Sctp => !led_to.is_some_and(|old| old.is_subset(&endpoints)),
        };
        let serving = Arc::make_mut(&mut self.serving);
        match target {
            Target::Frontend(frontend) => {
                serving.removed_frontends.remove(&frontend);
                serving.frontends.insert(frontend, endpoints);
            }
            Target::NodePort(node_port) => {
                serving.removed_node_ports.remove(&node_port);
                serving.node_ports.insert(node_port, endpoints);
            }
        }
        self.removed.remove(&target);
        if due {
            self.touch(target.protocol());
        }
    }

    /// This frontend is gone. It need not have been set: after a restart, frontends that are found in the kernel's rules
    /// but not in the plan are removed with this.
    pub fn remove(&mut self, target: impl Into<Target>) {
        let target = target.into();
        let serving = Arc::make_mut(&mut self.serving);
        match &target {
            Target::Frontend(frontend) => drop(serving.frontends.remove(frontend)),
            Target::NodePort(node_port) => drop(serving.node_ports.remove(node_port)),
        }
        if target.protocol() == Protocol::Tcp {
            return;
        }
        match target {
            Target::Frontend(frontend) => drop(serving.removed_frontends.insert(frontend)),
            Target::NodePort(node_port) => drop(serving.removed_node_ports.insert(node_port)),
        }
        self.touch(target.protocol());
        self.removed.insert(target, self.generation);
    }

    /// Node ports answer on these addresses; `None` if they are not known (see [`Serving::node_addresses`]).
    pub fn set_node_addresses(&mut self, addresses: Option<HashSet<IpAddr>>) {
        if self.serving.node_addresses != addresses {
            Arc::make_mut(&mut self.serving).node_addresses = addresses;
            self.touch_all();
        }
    }

    /// Makes a run over everything due: rules were missing for a while, or another mode has taken over.
    pub fn touch_all(&mut self) {
        for protocol in Protocol::ALL {
            self.touch(protocol);
        }
    }

    /// What the frontends lead to now.
    #[must_use]
    pub fn serving(&self) -> &Serving {
        &self.serving
    }

    /// What to run, if a run is due. The sync's rules must be in the kernel by then.
    #[must_use]
    pub fn begin(&self) -> Option<Job> {
        let protocols: Vec<_> =
            Protocol::ALL.into_iter().filter(|protocol| self.changed.contains_key(protocol)).collect();
        (!protocols.is_empty()).then(|| Job {
            family: self.family,
            protocols,
            serving: Arc::clone(&self.serving),
            generation: self.generation,
        })
    }

    /// A run has ended. If it failed, it stays due and forgets nothing.
    pub fn finish(&mut self, job: Job, succeeded: bool) {
        if !succeeded {
            return;
        }
        let Job { protocols, serving, generation, .. } = job;
        // While the job shares the state, changing it would copy it.
        drop(serving);
        let covered = |protocol: Protocol, since: u64| since <= generation && protocols.contains(&protocol);
        self.changed.retain(|protocol, since| !covered(*protocol, *since));
        let done: Vec<Target> = self
            .removed
            .iter()
            .filter(|(target, since)| covered(target.protocol(), **since))
            .map(|(target, _)| *target)
            .collect();
        if done.is_empty() {
            return;
        }
        let serving = Arc::make_mut(&mut self.serving);
        for target in done {
            self.removed.remove(&target);
            match target {
                Target::Frontend(frontend) => serving.removed_frontends.remove(&frontend),
                Target::NodePort(node_port) => serving.removed_node_ports.remove(&node_port),
            };
        }
    }

    fn touch(&mut self, protocol: Protocol) {
        self.generation += 1;
        self.changed.insert(protocol, self.generation);
    }
}

#[cfg(test)]
mod tests;
