//! NodePorts on loopback addresses, by a proxy instead of `route_localnet`.
//!
//! In: the plan. Out: a TCP listener at `127.0.0.1` (and `::1`, where the plan says so) for each NodePort. Works beside every mode: the
//! rules of none lead packets here. UDP is left out, as in kube-proxy's own proxy of this kind (reference §6.18).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::warn;

use super::port::{ServicePort, Setting};
use super::shared::Shared;
use super::tcp::{Listener, Whose};
use crate::model::Protocol;
use crate::plan::{Changes, Plan, PortId};

/// The listeners on loopback addresses.
pub struct Localhost {
    shared: Arc<Shared>,
    ports: BTreeMap<PortId, Open>,
    settings: BTreeMap<IpFamily, Arc<Setting>>,
}

struct Open {
    port: Arc<ServicePort>,
    number: u16,
    /// None: the address is taken by somebody else.
    listener: Option<Listener>,
}

impl Localhost {
    /// Nothing is open yet.
    #[must_use]
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, ports: BTreeMap::new(), settings: BTreeMap::new() }
    }

    /// Follows the plan. What could not be opened is tried again each time.
    pub fn follow(&mut self, plan: &Plan, changes: &Changes) {
        for family in plan.families() {
            let Some(node) = plan.node(*family) else { continue };
            let setting = Arc::new(Setting::new(node, plan.config()));
            let known = self.settings.insert(*family, Arc::clone(&setting));
            let mut ids: Vec<PortId> =
                changes.ports.iter().filter(|id| id.family == *family).cloned().collect();
            if known.as_ref() == Some(&setting) {
                let failed = self.ports.iter().filter(|(_, open)| open.listener.is_none());
                ids.extend(failed.map(|(id, _)| id.clone()));
            } else {
                ids = plan.ports(*family).map(|(id, _)| id.clone()).collect();
                ids.extend(self.ports.keys().filter(|id| id.family == *family).cloned());
            }
            for id in ids.iter().filter(|id| id.protocol == Protocol::Tcp) {
                self.serve(id, plan, &setting);
            }
        }
    }

    fn serve(&mut self, id: &PortId, plan: &Plan, setting: &Arc<Setting>) {
        let planned = plan.port(id).filter(|_| setting.node.node_ports.localhost);
        let Some((planned, number)) = planned.and_then(|plan| Some((plan, plan.node_port?))) else {
            self.ports.remove(id);
            return;
        };
        if let Some(open) = self.ports.get(id).filter(|open| open.number == number && open.listener.is_some())
        {
            open.port.update(Arc::clone(planned), Arc::clone(setting));
            return;
        }
        let before = self.ports.remove(id);
        let told = before.is_some_and(|open| open.listener.is_none());
        let counters = self.shared.counters.of(id);
        let port = Arc::new(ServicePort::new(id.clone(), Arc::clone(planned), Arc::clone(setting), counters));
        let address = SocketAddr::new(loopback(id.family), number);
        let listener = Listener::open(address, Whose::NodePort(Arc::clone(&port)), Arc::clone(&self.shared));
        if let Err(error) = &listener
            && !told
        {
            warn!(service = id.text(), %address, "the NodePort is not served there: {error}; stop what uses the port");
        }
        self.ports.insert(id.clone(), Open { port, number, listener: listener.ok() });
    }
}

fn loopback(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::IPv4 => Ipv4Addr::LOCALHOST.into(),
        IpFamily::IPv6 => Ipv6Addr::LOCALHOST.into(),
    }
}
