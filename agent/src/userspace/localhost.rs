//! NodePorts on loopback addresses, by a proxy instead of `route_localnet`, in every mode.
//!
//! In: the plan. Out: a TCP listener at `127.0.0.1` for each NodePort, where the plan asks for it. The rules of no mode take packets to
//! loopback addresses. UDP and SCTP are left out, as in kube-proxy's own proxy of this kind (reference §6.18).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::warn;

use super::counters::Counters;
use super::port::{ServicePort, Setting};
use super::shared::{Limits, Shared};
use super::tcp::{Listener, Whose};
use crate::model::Protocol;
use crate::plan::{Changes, Plan, PortId};

/// The listeners on loopback addresses.
#[derive(Debug)]
pub struct Localhost {
    shared: Arc<Shared>,
    ports: BTreeMap<PortId, Open>,
    settings: BTreeMap<IpFamily, Arc<Setting>>,
}

#[derive(Debug)]
struct Open {
    port: Arc<ServicePort>,
    number: u16,
    /// Or why there is none, in words.
    listener: Result<Listener, String>,
}

impl Localhost {
    /// Nothing is open yet.
    #[must_use]
    pub fn new(counters: Counters) -> Self {
        let shared = Arc::new(Shared::new(counters, Limits::of_process().localhost(), 1));
        Self { shared, ports: BTreeMap::new(), settings: BTreeMap::new() }
    }

    /// Follows the plan: what has changed in it, or all of it. Returns what could not be opened, in words; that is tried again each time.
    pub fn follow(&mut self, plan: &Plan, changes: Option<&Changes>) -> Vec<String> {
        let settings = plan.families().iter().filter_map(|family| plan.node(*family));
        let settings = settings.map(|node| (node.family, Arc::new(Setting::new(node, plan.config()))));
        let settings: BTreeMap<IpFamily, Arc<Setting>> = settings.collect();
        let known = std::mem::replace(&mut self.settings, settings);
        let mut ids: Vec<PortId> = if let Some(changes) = changes.filter(|_| known == self.settings) {
            let failed = self.ports.iter().filter(|(_, open)| open.listener.is_err());
            failed.map(|(id, _)| id).chain(&changes.ports).cloned().collect()
        } else {
            let planned = plan.families().iter().flat_map(|family| plan.ports(*family));
            planned.map(|(id, _)| id).chain(self.ports.keys()).cloned().collect()
        };
        ids.retain(|id| id.protocol == Protocol::Tcp);
        // What gives a port up goes first: it may have passed to another Service.
        ids.sort_by_key(|id| plan.port(id).is_some());
        for id in &ids {
            self.serve(id, plan);
        }
        self.ports.values().filter_map(|open| open.listener.as_ref().err().cloned()).collect()
    }

    fn serve(&mut self, id: &PortId, plan: &Plan) {
        let planned = plan.port(id);
        let setting = self.settings.get(&id.family).filter(|setting| setting.node.node_ports.localhost);
        let wanted = planned.zip(setting).and_then(|(plan, setting)| Some((plan, plan.node_port?, setting)));
        let Some((plan, number, setting)) = wanted else {
            match self.ports.remove(id) {
                Some(open) if planned.is_none() => open.port.counters.forget(),
                Some(open) => open.port.counters.leave(),
                None => {}
            }
            return;
        };
        if let Some(open) = self.ports.get(id).filter(|open| open.number == number && open.listener.is_ok()) {
            open.port.update(Arc::clone(plan), Arc::clone(setting));
            return;
        }
        let before = self.ports.remove(id).and_then(|open| {
            open.port.counters.leave();
            open.listener.err()
        });
        let counters = self.shared.counters.of(id);
        let port = Arc::new(ServicePort::new(id.clone(), Arc::clone(plan), Arc::clone(setting), counters));
        let address = SocketAddr::new(loopback(id.family), number);
        let listener = Listener::open(address, &Whose::NodePort(Arc::clone(&port)), &self.shared);
        let listener = listener.map_err(|error| {
            format!("{} is not served at {address}: {error}; stop what uses the port", id.text())
        });
        if let Err(problem) = &listener
            && before.as_ref() != Some(problem)
        {
            warn!("{problem}");
        }
        self.ports.insert(id.clone(), Open { port, number, listener });
    }

    /// Takes no connections any more, and waits for those that are open to end, for at most so long.
    pub async fn stop(&mut self, limit: Duration) {
        self.ports.clear();
        self.shared.drain(limit).await;
    }
}

fn loopback(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::IPv4 => Ipv4Addr::LOCALHOST.into(),
        IpFamily::IPv6 => Ipv6Addr::LOCALHOST.into(),
    }
}
