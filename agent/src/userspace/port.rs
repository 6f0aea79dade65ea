//! One Service port: where its next client goes.
//!
//! In: the port's plan, clients, and how attempts to reach endpoints went. Out: an endpoint for a client, or that it gets none. Which
//! endpoints are allowed is what [`PortPlan::route`] says.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::num::NonZeroU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::settings::UserspaceScheduler;
use tokio::time::{Instant, sleep};
use tracing::warn;

use super::affinity::Affinity;
use super::balance::Balancer;
use super::counters::{Failure, PortCounters};
use super::relay::Patience;
use crate::model::Protocol;
use crate::plan::{Backend, Entrance, NodePlan, Packet, PortId, PortPlan, Verdict};

/// What holds for all Service ports of a family.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The node.
    pub node: NodePlan,
    /// How endpoints are chosen.
    pub scheduler: UserspaceScheduler,
    /// How long TCP connections may be silent.
    pub connection: Patience,
    /// How long flows of datagrams may be silent: after an answer, and before one.
    pub flow: Patience,
}

impl Setting {
    /// What a configuration says. Where that leaves the kernel's timeout, it is the one that kernels have by default.
    #[must_use]
    pub fn new(node: &NodePlan, config: &NodeProxyConfiguration) -> Self {
        let conntrack = &config.conntrack;
        let or = |seconds: u32, default: u64| {
            Duration::from_secs(if seconds == 0 { default } else { u64::from(seconds) })
        };
        Self {
            node: node.clone(),
            scheduler: config.userspace.scheduler,
            connection: Patience {
                open: or(conntrack.tcp_established_timeout_seconds, 432_000),
                half_closed: or(conntrack.tcp_close_wait_timeout_seconds, 60),
            },
            flow: Patience {
                open: or(conntrack.udp_stream_timeout_seconds, 120),
                half_closed: or(conntrack.udp_timeout_seconds, 30),
            },
        }
    }
}

/// What a client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This endpoint.
    Endpoint(SocketAddr),
    /// It is told that nobody is there.
    Refuse,
    /// No answer.
    Ignore,
}

/// A client at a frontend.
#[derive(Clone, Copy, Debug)]
pub struct Visitor {
    /// The client.
    pub client: SocketAddr,
    /// Where it sent to.
    pub frontend: SocketAddr,
    /// What kind of frontend that is.
    pub entrance: Entrance,
}

/// One Service port.
#[derive(Debug)]
pub struct ServicePort {
    /// Its name.
    pub id: PortId,
    /// What it counts.
    pub counters: PortCounters,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    plan: Arc<PortPlan>,
    setting: Arc<Setting>,
    balancer: Balancer,
    affinity: Affinity,
}

/// A connection or flow to an endpoint, as long as this is kept.
#[derive(Debug)]
pub struct Visit {
    port: Arc<ServicePort>,
    /// The endpoint.
    pub endpoint: SocketAddr,
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.port.counters.open.dec();
        self.port.state().balancer.closed(self.endpoint);
    }
}

impl ServicePort {
    /// A port that has heard of no client.
    #[must_use]
    pub fn new(id: PortId, plan: Arc<PortPlan>, setting: Arc<Setting>, counters: PortCounters) -> Self {
        let mut balancer = Balancer::default();
        balancer.set(weighted(plan.backends()));
        let state = State { plan, setting, balancer, affinity: Affinity::default() };
        Self { id, counters, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the plan.
    pub fn update(&self, plan: Arc<PortPlan>, setting: Arc<Setting>) {
        let mut state = self.state();
        state.balancer.set(weighted(plan.backends()));
        self.count_resting(&state, Instant::now());
        if plan.affinity.is_none() {
            state.affinity.clear();
        }
        state.plan = plan;
        state.setting = setting;
    }

    /// What holds now.
    #[must_use]
    pub fn setting(&self) -> Arc<Setting> {
        Arc::clone(&self.state().setting)
    }

    /// Whether an endpoint answers, so that a flow to it may go on.
    #[must_use]
    pub fn serves(&self, endpoint: SocketAddr) -> bool {
        self.state().plan.serving.iter().any(|backend| backend.socket() == endpoint)
    }

    /// Chooses an endpoint that is none of `tried`; the client stays with it if the Service says so.
    #[must_use]
    pub fn choose(&self, visitor: &Visitor, tried: &[SocketAddr], now: Instant) -> Choice {
        let mut state = self.state();
        let State { plan, setting, balancer, affinity } = &mut *state;
        let packet = packet(visitor, plan, self.id.protocol);
        let hops = match plan.route(&setting.node, visitor.entrance, &packet) {
            Verdict::Forward(hops) => hops,
            Verdict::Drop => return Choice::Ignore,
            Verdict::Reject | Verdict::Untouched | Verdict::Undefined => return Choice::Refuse,
        };
        let among: Vec<SocketAddr> = hops.iter().map(|hop| SocketAddr::new(hop.address, hop.port)).collect();
        if let Some(timeout) = plan.affinity {
            let timeout = Duration::from_secs(timeout.into());
            let known = affinity.find(visitor.client.ip(), timeout, now);
            let usable = |endpoint: &SocketAddr| {
                among.contains(endpoint) && !tried.contains(endpoint) && balancer.is_fit(*endpoint, now)
            };
            if let Some(endpoint) = known.filter(usable) {
                affinity.remember(visitor.client.ip(), endpoint, now);
                return Choice::Endpoint(endpoint);
            }
        }
        let Some(endpoint) = balancer.choose(setting.scheduler, &among, tried, now) else {
            return Choice::Refuse;
        };
        if plan.affinity.is_some() {
            // At once: the client's next connection may already be waiting.
            affinity.remember(visitor.client.ip(), endpoint, now);
        }
        Choice::Endpoint(endpoint)
    }

    /// A connection or flow to an endpoint begins. It counts as open until the [`Visit`] is dropped.
    #[must_use]
    pub fn open(self: &Arc<Self>, endpoint: SocketAddr) -> Visit {
        self.counters.open.inc();
        self.state().balancer.opened(endpoint);
        Visit { port: Arc::clone(self), endpoint }
    }

    /// An endpoint was reached.
    pub fn succeeded(&self, endpoint: SocketAddr, now: Instant) {
        let mut state = self.state();
        let comes_back = state.balancer.succeeded(endpoint, now);
        if comes_back {
            self.count_resting(&state, now);
        }
    }

    /// An endpoint was not reached.
    pub fn failed(self: &Arc<Self>, endpoint: SocketAddr, failure: Failure, now: Instant) {
        self.counters.failed(failure);
        let mut state = self.state();
        let Some(rest) = state.balancer.failed(endpoint, now) else { return };
        warn!(service = self.id.text(), %endpoint, "an endpoint failed repeatedly and gets no new connections for {} s", rest.as_secs());
        self.count_resting(&state, now);
        let port = Arc::downgrade(self);
        tokio::spawn(async move {
            sleep(rest).await;
            if let Some(port) = port.upgrade() {
                let state = port.state();
                port.count_resting(&state, Instant::now());
            }
        });
    }

    fn count_resting(&self, state: &State, now: Instant) {
        self.counters.rest(state.balancer.resting(now).collect());
    }
}

fn weighted<'a>(
    backends: impl Iterator<Item = &'a Backend>,
) -> impl Iterator<Item = (SocketAddr, NonZeroU16)> {
    backends.map(|backend| (backend.socket(), backend.weight))
}

/// Whether an address is one of the node's own: from it, the node would send to itself. (Binding to it proves nothing where
/// `ip_nonlocal_bind` is set.)
fn is_local(address: IpAddr) -> bool {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        // Nothing is sent; port 9 discards.
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == address)
}

/// The interface is not known: rules decide by it before, see [`super::steer`].
fn packet(visitor: &Visitor, plan: &PortPlan, protocol: Protocol) -> Packet {
    let source = visitor.client.ip();
    // Only then it matters.
    let asks = plan.external_local && visitor.entrance == Entrance::External;
    Packet {
        interface: None,
        source,
        source_is_local: asks && is_local(source),
        destination: visitor.frontend.ip(),
        destination_is_local: false,
        protocol,
        port: visitor.frontend.port(),
    }
}
