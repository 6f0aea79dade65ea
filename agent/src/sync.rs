//! The sync loop: the one task that owns model, plan and data plane.
//!
//! In: [`Input`]s from the watches through a bounded queue, which slows the watches down when the kernel is slower than the
//! cluster. Out: kernel state, and a [`SyncState`](crate::state::SyncState) after each step. It writes nothing before all required
//! lists are in, pauses after each write, retries a failed one with backoff, reads back what it wrote when that was
//! everything, and looks for foreign changes when the kernel tells of them and from time to time.
//!
//! [`Engine`] is written against [`Platform`] and [`Dataplane`], so that tests can make the kernel fail on cue;
//! [`node::Node`] is the real one.

mod engine;
mod flows;
mod latency;
mod leftovers;
pub mod node;
mod schedule;
mod trial;
mod write;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;

use crate::config::{Assessment, Rejection};
use crate::conntrack::{Job, Report};
use crate::kernel::{Counted, Reach, SyncError, Synced};
use crate::model::{Change, NodeFacts};
use crate::plan::{Changes, Plan, PortId, PortPlan};
use crate::state::Source;
use crate::sysctl::Settings;

pub use engine::{Engine, Outside};

/// How many inputs wait at most before the watches have to.
pub const QUEUE: usize = 1024;

/// What the sync loop is told.
#[derive(Debug)]
pub enum Input {
    /// Something happened in the cluster or on the node.
    Change(Change),
    /// The first list of a source other than Services is complete.
    Listed(Source),
    /// A list of the Services with this proxy name is complete.
    ServicesListed(String),
    /// The node's ConfigMap was judged.
    Config(Box<Assessment>),
}

/// What keeps the kernel equal to a plan.
pub trait Dataplane: Send + 'static {
    /// Makes the kernel equal to `plan`; `changes` is what changed since the last success. A family whose last write has
    /// failed is read back, and what differs is written.
    fn sync(
        &mut self,
        plan: &Plan,
        changes: &Changes,
    ) -> impl Future<Output = (Synced, Vec<SyncError>)> + Send;

    /// Waits until somebody else has changed something that may be ours. Where the kernel does not tell, for ever. May be
    /// dropped at any time without losing anything.
    fn changed(&mut self) -> impl Future<Output = ()> + Send;

    /// Reads the kernel and says where it differs from what was written. With [`Reach::Suspects`], what nobody else has
    /// touched since it was last seen to be right is not read.
    fn verify(
        &mut self,
        plan: &Plan,
        reach: Reach,
    ) -> impl Future<Output = Result<Vec<String>, SyncError>> + Send;

    /// Writes what the last [`Dataplane::verify`] has found to differ, and nothing else.
    fn repair(&mut self, plan: &Plan) -> impl Future<Output = Vec<SyncError>> + Send;

    /// Where UDP and SCTP flows of a Service port may lead, as connection tracking sees it: its endpoints, unless somebody takes the
    /// flows for them.
    fn flow_endpoints(&self, _: &PortId, port: &PortPlan) -> Vec<SocketAddr> {
        port.serving_sockets()
    }

    /// Packets dropped because connection tracking calls them invalid, by family, as far as this mode counts them; from zero again
    /// when the rule is written anew.
    fn invalid_dropped(&mut self) -> impl Future<Output = BTreeMap<IpFamily, u64>> + Send {
        std::future::ready(BTreeMap::new())
    }

    /// What clients have sent to each Service port, as far as the configuration wants that counted; from zero again when its
    /// frontends are written anew. `None` if it cannot be read now.
    fn traffic(&mut self) -> impl Future<Output = Option<Vec<(PortId, Counted)>>> + Send {
        std::future::ready(Some(Vec::new()))
    }

    /// Finds out cheaply whether the kernel could be written now, without changing anything.
    fn probe(&mut self, plan: &Plan) -> impl Future<Output = Result<(), SyncError>> + Send;
}

/// A node that can be programmed.
pub trait Platform: Send + 'static {
    /// What it is programmed with.
    type Dataplane: Dataplane;

    /// Finds the first mode of the configuration that this node can run, and the families it has.
    fn open(
        &mut self,
        config: &NodeProxyConfiguration,
        node: &NodeFacts,
    ) -> impl Future<Output = Result<Opened<Self::Dataplane>, Rejection>> + Send;

    /// What an earlier process has left elsewhere in the kernel, to be retired. Asked for when `new` was read back: nobody waits for it
    /// before. An error counts as a failed write, as with [`Platform::retire`].
    fn leftovers(
        &mut self,
        new: &Self::Dataplane,
    ) -> impl Future<Output = Result<Vec<Self::Dataplane>, SyncError>> + Send;

    /// Removes what `old` has written and `new` has not, after `new` was read back. Until that succeeds, packets may meet
    /// what `old` left, so an error counts as a failed write.
    fn retire(
        &mut self,
        old: &Self::Dataplane,
        new: &Self::Dataplane,
    ) -> impl Future<Output = Result<(), SyncError>> + Send;

    /// Removes what another proxy's modes have left beside ours, after `new`, which follows `plan`, was read back. Returns whether that is
    /// all: some of it may have to wait. An error counts as a failed write, as with [`Platform::retire`].
    fn take_over(
        &mut self,
        new: &Self::Dataplane,
        plan: &Plan,
    ) -> impl Future<Output = Result<bool, SyncError>> + Send;

    /// Gives the kernel's settings the values that a configuration asks for. Returns those that could not be had, in words:
    /// a node serves without them.
    fn adjust(&mut self, settings: &Settings) -> impl Future<Output = Vec<String>> + Send;

    /// Which of the kernel's settings differ from what a configuration asks for, in words that those of [`Platform::adjust`] begin with.
    fn differing(&self, settings: &Settings) -> Vec<String>;

    /// Serves NodePorts on loopback addresses, in every mode, where the plan says so. `changes` is what changed since the last call;
    /// without it, anything may have. Returns what could not be had, in words; that is tried again with the next call.
    fn serve_localhost(&mut self, plan: &Plan, changes: Option<&Changes>) -> Vec<String>;

    /// Endpoints that get no new connections from the agent because they cannot be reached from here: Service port and address.
    fn resting(&self) -> Vec<String>;

    /// Where traffic needs this process: a data plane that does without it, to be written before the agent ends.
    fn stand_in(
        &mut self,
        dataplane: &Self::Dataplane,
    ) -> impl Future<Output = Option<Self::Dataplane>> + Send;

    /// The agent is about to end, and the kernel stays as it is. What ends with the agent may be brought to an end in a few seconds.
    fn stop(&mut self, dataplane: Option<&mut Self::Dataplane>) -> impl Future<Output = ()> + Send;

    /// Deletes the connection tracking entries that contradict what frontends lead to; an error says why not.
    fn end_stale_flows(&mut self, job: &Job) -> impl Future<Output = Result<Report, String>> + Send;
}

/// What [`Platform::open`] found.
#[derive(Debug)]
pub struct Opened<D> {
    /// Writes the kernel.
    pub dataplane: D,
    /// The mode it runs in.
    pub mode: Mode,
    /// Why it is not the mode of first choice.
    pub fallback: Option<String>,
    /// The families to serve, primary first.
    pub families: Vec<IpFamily>,
    /// Version and flavour of the iptables tools.
    pub iptables_version: Option<String>,
}

#[cfg(test)]
mod tests;
