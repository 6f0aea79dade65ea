//! Keeps the proxy and the rules that lead to it equal to the plan.
//!
//! In: the [`Plan`] and its [`Changes`]. Out: sockets, kernel state, and [`Synced`] or a [`SyncError`] per family. What to write is decided
//! in [`super::steer`].
//!
//! Sockets are there before rules lead to them, and go after the rules. When this is dropped, connections go on for as long as
//! [`DRAIN`](super::shared::DRAIN) allows.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::{debug, info, warn};

use super::counters::Counters;
use super::port::{ServicePort, Setting};
use super::shared::{DRAIN, Limits, Shared};
use super::steer::{self, Listeners, Steering, table};
use super::tcp::{Frontends, Listener, Whose};
use super::udp;
use crate::conntrack::{self, Target};
use crate::kernel::{SyncError, SyncFailure, Synced};
use crate::model::Protocol;
use crate::nftables::client::{self, Client};
use crate::nftables::compare::{Repair, compare};
use crate::nftables::error::Error;
use crate::nftables::failed;
use crate::nftables::ruleset::{Ruleset, Transaction};
use crate::nftables::watch::Watches;
use crate::plan::{Changes, Entrance, NodePlan, Plan, PortId, PortPlan};

/// What metrics call our tables.
const TABLE: &str = "pointsman-userspace";

/// The proxy of one node.
pub struct Dataplane {
    client: Client,
    shared: Arc<Shared>,
    families: BTreeMap<IpFamily, Family>,
    order: Vec<IpFamily>,
    found: BTreeMap<IpFamily, Repair>,
    watches: Watches,
}

/// The proxy of one family.
#[derive(Default)]
struct Family {
    setting: Option<Arc<Setting>>,
    frontends: Arc<Frontends>,
    tcp: Option<Listener>,
    ports: BTreeMap<PortId, Served>,
    listeners: Listeners,
    /// What is installed, where that is known.
    steering: Option<Steering>,
}

/// Sockets that are not needed any more.
#[derive(Default)]
struct Gone {
    tcp: Option<Listener>,
    udp: Vec<udp::Listener>,
}

/// One Service port.
struct Served {
    port: Arc<ServicePort>,
    plan: Arc<PortPlan>,
    udp: Vec<(Entrance, udp::Listener)>,
}

impl Dataplane {
    /// Finds out whether this kernel can lead packets to a proxy; the error says what is missing. Opens sockets in the network namespace
    /// of this thread. So many threads carry connections. Knows nothing of what is installed yet.
    pub async fn open(families: &[IpFamily], counters: Counters, threads: usize) -> Result<Self, String> {
        let client = Client::open_probed(families).await?;
        Ok(Self::new(client, families, Shared::new(counters, Limits::of_process(), threads)))
    }

    /// What an earlier process has left in these families, to be removed.
    pub fn leftover(families: &[IpFamily]) -> Result<Self, Error> {
        Ok(Self::new(Client::open()?, families, Shared::new(Counters::default(), Limits::of(0), 1)))
    }

    fn new(client: Client, families: &[IpFamily], shared: Shared) -> Self {
        let shared = Arc::new(shared);
        Self {
            client,
            shared,
            families: families.iter().map(|family| (*family, Family::default())).collect(),
            order: families.to_vec(),
            found: BTreeMap::new(),
            watches: Watches::default(),
        }
    }

    /// The families that are served.
    #[must_use]
    pub fn families(&self) -> &[IpFamily] {
        &self.order
    }

    /// Where the flows of a UDP port lead, as connection tracking sees it.
    #[must_use]
    pub fn flow_endpoints(&self, id: &PortId) -> Vec<SocketAddr> {
        let served = self.families.get(&id.family).and_then(|family| family.ports.get(id));
        served.into_iter().flat_map(|served| &served.udp).map(|(_, listener)| listener.address).collect()
    }

    /// Waits until somebody else has changed our tables; for ever where the kernel does not tell.
    pub async fn changed(&mut self) {
        self.watches.changed().await;
    }

    /// Makes proxy and kernel equal to the plan. One family failing never keeps the other from being served.
    pub async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let mut synced = Synced::default();
        let mut errors = Vec::new();
        for family in self.order.clone() {
            let Some(node) = plan.node(family) else { continue };
            let start = Instant::now();
            match self.sync_family(plan, node, changes, &mut synced).await {
                Ok(written) => {
                    let held = self.families.get(&family).and_then(|family| family.steering.as_ref());
                    let held = held.map(Steering::elements_held).unwrap_or_default();
                    synced.written.insert((family, TABLE), written);
                    synced.rules.insert((family, TABLE), held);
                    synced.duration.insert(family, start.elapsed());
                    debug!(?family, written, elapsed = ?start.elapsed(), "elements written");
                }
                Err(error) => errors.push(error),
            }
        }
        let tables = self.order.iter().copied().map(table);
        self.watches.follow(plan.config().drift.policy, tables, self.client.port());
        (synced, errors)
    }

    async fn sync_family(
        &mut self,
        plan: &Plan,
        node: &NodePlan,
        changes: &Changes,
        synced: &mut Synced,
    ) -> Result<usize, SyncError> {
        let Some(family) = self.families.get_mut(&node.family) else { return Ok(0) };
        // Taken out, so that it stays unknown if the write fails or is cancelled.
        let known = family.steering.take();
        let wanted = Arc::new(Setting::new(node, plan.config()));
        // They go when no rule leads to them any more.
        let mut gone = Gone::default();
        let moved = family.listen(node, plan, &self.shared, &mut gone)?;
        let anew = moved || known.is_none() || family.setting.as_ref() != Some(&wanted);
        family.setting = Some(Arc::clone(&wanted));
        let mut ids: Vec<&PortId> = changes.ports.iter().filter(|id| id.family == node.family).collect();
        if anew {
            ids = plan.ports(node.family).map(|(id, _)| id).chain(family.ports.keys()).collect();
            ids.sort_unstable();
            ids.dedup();
        }
        let ids: Vec<PortId> = ids.into_iter().cloned().collect();
        let mut steering = match known {
            Some(known) if !anew => known,
            _ => Steering::new(node, family.listeners.tcp),
        };
        let ports = ids.iter().map(|id| (id, plan.port(id)));
        family.follow(ports, &wanted, &self.shared, &mut gone)?;
        let transaction = steering.follow(plan, &ids, &family.listeners);
        let written = if anew {
            self.write_anew(node.family, &steering, synced).await?
        } else {
            self.write(node.family, transaction).await?
        };
        if let Some(family) = self.families.get_mut(&node.family) {
            family.steering = Some(steering);
        }
        drop(gone);
        Ok(written)
    }

    /// Reads back, and writes what differs.
    async fn write_anew(
        &mut self,
        family: IpFamily,
        steering: &Steering,
        synced: &mut Synced,
    ) -> Result<usize, SyncError> {
        synced.full = true;
        let read = self.client.read(&table(family)).await.map_err(|error| failed(family, &error))?;
        if let Some(read) = &read {
            synced.served.extend(served(&read.ruleset).map(|target| (family, target)));
        }
        let repair = compare(&steering.full(), read.as_ref());
        let written = self.write(family, repair.first).await? + self.write(family, repair.then).await?;
        self.found.remove(&family);
        Ok(written)
    }

    async fn write(&mut self, family: IpFamily, transaction: Transaction) -> Result<usize, SyncError> {
        if transaction.is_empty() {
            return Ok(0);
        }
        let (added, deleted) = transaction.elements();
        let result = self.client.apply(&table(family), Arc::new(transaction)).await;
        result.map_err(|error| failed(family, &error))?;
        Ok(added + deleted)
    }

    /// Reads the kernel and says where it differs from what was last written. Empty: equal. Changes nothing; see
    /// [`Dataplane::repair`].
    pub async fn verify(&mut self) -> Result<Vec<String>, SyncError> {
        let mut lines = Vec::new();
        for family in self.order.clone() {
            let Some(steering) = self.families.get(&family).and_then(|family| family.steering.as_ref())
            else {
                continue;
            };
            let full = steering.full();
            let read = self.client.read(&table(family)).await.map_err(|error| failed(family, &error))?;
            let repair = compare(&full, read.as_ref());
            lines.extend(repair.differences.iter().map(|line| format!("{family:?}: {line}")));
            if repair.is_empty() {
                self.found.remove(&family);
            } else {
                self.found.insert(family, repair);
            }
        }
        Ok(lines)
    }

    /// Writes what [`Dataplane::verify`] has found to differ, and nothing else.
    pub async fn repair(&mut self) -> Vec<SyncError> {
        let mut errors = Vec::new();
        for (family, repair) in std::mem::take(&mut self.found) {
            let steering = self.families.get_mut(&family).and_then(|family| family.steering.take());
            let mut written = self.write(family, repair.first).await;
            if written.is_ok() {
                written = self.write(family, repair.then).await;
            }
            match written {
                Ok(_) => {
                    if let Some(family) = self.families.get_mut(&family) {
                        family.steering = steering;
                    }
                }
                // Unknown, so that it is read back.
                Err(error) => errors.push(error),
            }
        }
        errors
    }

    /// Finds out whether the kernel could be written now, by a question that only those who may write can ask.
    pub async fn probe(&mut self) -> Result<(), SyncError> {
        for family in self.order.clone() {
            self.client.exists(&table(family)).await.map_err(|error| failed(family, &error))?;
        }
        Ok(())
    }

    /// Waits for connections that are open to end, for at most so long.
    pub async fn stop(&mut self, limit: Duration) {
        self.shared.drain(limit).await;
    }
}

impl Drop for Dataplane {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut families = std::mem::take(&mut self.families);
        // Nothing leads here any more; a listener that is left would only take what comes by mistake.
        for family in families.values_mut() {
            family.tcp = None;
            family.ports.values().for_each(|served| served.port.counters.leave());
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                shared.drain(DRAIN).await;
                drop(families);
            });
        }
    }
}

impl Family {
    /// Listens for TCP at the node's own address. Returns whether that is another socket than before.
    fn listen(
        &mut self,
        node: &NodePlan,
        plan: &Plan,
        shared: &Arc<Shared>,
        gone: &mut Gone,
    ) -> Result<bool, SyncError> {
        let Some(address) = node.primary else {
            if plan.ports(node.family).next().is_some() {
                let message = "the Node has no address of this family that the proxy could listen at; set ipFamilyPolicy to what the node has".to_owned();
                return Err(SyncError { family: node.family, failure: SyncFailure::SyncFailed, message });
            }
            gone.tcp = self.tcp.take();
            self.listeners.tcp = None;
            return Ok(gone.tcp.is_some());
        };
        if self.tcp.as_ref().is_some_and(|listener| listener.address.ip() == address) {
            return Ok(false);
        }
        let whose = Whose::Frontends(Arc::clone(&self.frontends));
        let listener = Listener::open(SocketAddr::new(address, 0), &whose, shared)
            .map_err(|error| not_listening(node.family, address, &error))?;
        info!(address = %listener.address, "the proxy listens");
        self.listeners.tcp = Some(listener.address);
        gone.tcp = self.tcp.replace(listener);
        Ok(true)
    }

    /// Lets the proxy follow these Service ports.
    fn follow<'a>(
        &mut self,
        ports: impl Iterator<Item = (&'a PortId, Option<&'a Arc<PortPlan>>)>,
        setting: &Arc<Setting>,
        shared: &Arc<Shared>,
        gone: &mut Gone,
    ) -> Result<(), SyncError> {
        let (mut before, mut outcome) = (Vec::new(), Ok(()));
        for (id, plan) in ports {
            let served = self.ports.get(id);
            before.extend(served.map(|served| (Arc::clone(&served.port), Arc::clone(&served.plan))));
            outcome = self.serve(id, plan, setting, shared, gone);
            if outcome.is_err() {
                break;
            }
        }
        // Only now: a frontend that passes from one Service port to another, such as one that is renamed, has one at any time.
        for (port, plan) in before {
            self.take_out(&port, &plan);
        }
        outcome
    }

    /// Takes out the frontends that a Service port has had and has no more.
    fn take_out(&self, port: &Arc<ServicePort>, before: &PortPlan) {
        let now = self.ports.get(&port.id).filter(|served| Arc::ptr_eq(&served.port, port));
        let now = now.map(|served| &*served.plan);
        let kept: Vec<_> = now.into_iter().flat_map(steer::frontends).map(|(address, _)| address).collect();
        let addresses = steer::frontends(before).map(|(address, _)| address);
        let node_port = before.node_port.filter(|number| now.and_then(|now| now.node_port) != Some(*number));
        self.frontends.remove(port, addresses.filter(|address| !kept.contains(address)), node_port);
    }

    /// Lets the proxy follow a Service port, but for frontends that it has no more.
    fn serve(
        &mut self,
        id: &PortId,
        plan: Option<&Arc<PortPlan>>,
        setting: &Arc<Setting>,
        shared: &Arc<Shared>,
        gone: &mut Gone,
    ) -> Result<(), SyncError> {
        let before = self.ports.remove(id);
        let Some(plan) = plan else {
            if let Some(before) = before {
                before.port.counters.forget();
                gone.udp.extend(self.forget(id, before.udp));
            }
            return Ok(());
        };
        let (port, mut udp) = if let Some(before) = before {
            before.port.update(Arc::clone(plan), Arc::clone(setting));
            (before.port, before.udp)
        } else {
            let counters = shared.counters.of(id);
            let port = ServicePort::new(id.clone(), Arc::clone(plan), Arc::clone(setting), counters);
            (Arc::new(port), Vec::new())
        };
        match id.protocol {
            Protocol::Tcp => self.frontends.add(&port, steer::frontends(plan), plan.node_port),
            Protocol::Udp => {
                let address = self.listeners.tcp.map(|listener| listener.ip());
                if udp.iter().any(|(_, listener)| Some(listener.address.ip()) != address) {
                    gone.udp.extend(self.forget(id, std::mem::take(&mut udp)));
                }
                for entrance in [Entrance::Internal, Entrance::External] {
                    let wanted = steer::frontends(plan).any(|(_, kind)| kind == entrance)
                        || (entrance == Entrance::External && plan.node_port.is_some());
                    let open = udp.iter().position(|(kind, _)| *kind == entrance);
                    match (wanted, open, address) {
                        (true, None, Some(address)) => {
                            let opened =
                                udp::Listener::open(address, Arc::clone(&port), entrance, Arc::clone(shared))
                                    .map_err(|error| not_listening(id.family, address, &error))?;
                            self.listeners.udp.insert((id.clone(), entrance), opened.address);
                            udp.push((entrance, opened));
                        }
                        (false, Some(index), _) => {
                            let closed = vec![udp.swap_remove(index)];
                            gone.udp.extend(self.forget(id, closed));
                        }
                        _ => {}
                    }
                }
            }
            Protocol::Sctp => {
                warn!(service = id.text(), "SCTP is refused: mode userspace passes TCP and UDP on");
            }
        }
        self.ports.insert(id.clone(), Served { port, plan: Arc::clone(plan), udp });
        Ok(())
    }

    fn forget(&mut self, id: &PortId, udp: Vec<(Entrance, udp::Listener)>) -> Vec<udp::Listener> {
        for (entrance, _) in &udp {
            self.listeners.udp.remove(&(id.clone(), *entrance));
        }
        udp.into_iter().map(|(_, listener)| listener).collect()
    }
}

fn not_listening(family: IpFamily, address: IpAddr, error: &io::Error) -> SyncError {
    let message = format!("the proxy cannot listen at {address}: {error}; is that an address of this node?");
    SyncError { family, failure: SyncFailure::SyncFailed, message }
}

/// The UDP frontends that an earlier process has served.
fn served(installed: &Ruleset) -> impl Iterator<Item = Target> {
    steer::served_udp(installed).map(|(address, port)| match address {
        Some(address) => {
            conntrack::Frontend::new(SocketAddr::new(address, port), conntrack::Protocol::Udp).into()
        }
        None => conntrack::NodePort::new(port, conntrack::Protocol::Udp).into(),
    })
}

/// Which of these families have a table of ours in the network namespace of this thread.
pub async fn installed(families: &[IpFamily]) -> Result<Vec<IpFamily>, Error> {
    client::installed(families, table).await
}

/// Removes our tables of these families. Touches nothing else; what is not there is no error.
pub async fn cleanup(families: &[IpFamily]) -> Result<(), SyncError> {
    client::remove(families, table).await.map(drop).map_err(|(family, error)| failed(family, &error))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::tests::{plan, setting, shared};
    use super::*;
    use crate::config::tests::sample;
    use crate::model::ObjectName;

    fn id(port: &str) -> PortId {
        PortId::new(ObjectName::new("ns", "web"), IpFamily::IPv4, port.into(), Protocol::Tcp)
    }

    #[test]
    fn a_frontend_has_a_service_port_at_any_time_while_its_endpoints_change_or_it_passes_to_another() {
        let (mut family, setting, shared) = (Family::default(), setting(), shared());
        let (one, other) = (Arc::new(plan(&[])), Arc::new(plan(&["127.0.0.1:1".parse().unwrap()])));
        let (a, b) = (id("a"), id("b"));
        let mut follow = |ports: &[(&PortId, Option<&Arc<PortPlan>>)]| {
            family.follow(ports.iter().copied(), &setting, &shared, &mut Gone::default()).unwrap();
            Arc::clone(&family.frontends)
        };
        let frontends = follow(&[(&a, Some(&one))]);
        let stop = Arc::new(AtomicBool::new(false));
        let addresses = ["10.96.0.1:80", "192.168.0.2:30080"].map(|text| text.parse().unwrap());
        let finders = addresses.map(|address: SocketAddr| {
            let (frontends, stop) = (Arc::clone(&frontends), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut lost = 0;
                while !stop.load(Ordering::Relaxed) {
                    lost += usize::from(frontends.find(address).is_none());
                }
                lost
            })
        });
        for _ in 0..5_000 {
            follow(&[(&a, Some(&other))]);
            follow(&[(&a, Some(&one))]);
            // Renamed, and back.
            follow(&[(&a, None), (&b, Some(&one))]);
            follow(&[(&a, Some(&one)), (&b, None)]);
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(finders.map(|finder| finder.join().unwrap()), [0, 0]);
        let moved = Arc::new(PortPlan { port: 81, node_port: None, ..plan(&[]) });
        follow(&[(&a, Some(&moved))]);
        assert_eq!(addresses.map(|address| frontends.find(address).is_some()), [false, false]);
        assert!(frontends.find("10.96.0.1:81".parse().unwrap()).is_some());
        follow(&[(&a, None)]);
        assert!(frontends.find("10.96.0.1:81".parse().unwrap()).is_none());
    }

    #[test]
    fn while_the_address_of_the_node_changes_the_old_socket_listens_until_rules_lead_to_the_new_one() {
        let (mut family, shared, mut gone) = (Family::default(), shared(), Gone::default());
        let plan = Plan::new(sample(), &[IpFamily::IPv4]);
        let mut listen = |address: [u8; 4], gone: &mut Gone| {
            let node = NodePlan { primary: Some(address.into()), ..setting().node.clone() };
            assert!(family.listen(&node, &plan, &shared, gone).unwrap());
            family.listeners.tcp.unwrap()
        };
        let old = listen([127, 0, 0, 1], &mut gone);
        let new = listen([127, 0, 0, 2], &mut gone);
        for address in [old, new] {
            std::net::TcpStream::connect(address).unwrap();
        }
        drop(gone);
        std::net::TcpStream::connect(old).unwrap_err();
    }

    #[test]
    fn nobody_rests_once_the_mode_is_left_even_if_connections_go_on() {
        let mut dataplane = Dataplane::leftover(&[IpFamily::IPv4]).unwrap();
        let (shared, endpoint) = (Arc::clone(&dataplane.shared), "127.0.0.1:1".parse().unwrap());
        let (a, plan) = (id("a"), Arc::new(plan(&[endpoint])));
        let family = dataplane.families.get_mut(&IpFamily::IPv4).unwrap();
        let ports = [(&a, Some(&plan))].into_iter();
        family.follow(ports, &setting(), &shared, &mut Gone::default()).unwrap();
        let port = Arc::clone(&family.ports.get(&a).unwrap().port);
        port.counters.rest(vec![endpoint]);
        assert_eq!(shared.counters.resting().len(), 1);
        drop(dataplane);
        assert_eq!(shared.counters.resting(), Vec::<String>::new());
        port.counters.rest(vec![endpoint]);
        assert_eq!(shared.counters.resting(), Vec::<String>::new());
    }
}
