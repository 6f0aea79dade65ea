//! Keeps virtual servers, local routes, sets and rules equal to the plan.
//!
//! In: the [`Plan`] and its [`Changes`]. Out: kernel state, and [`Synced`] or a [`SyncError`] per family. What to write is decided in
//! [`super::layout`].
//!
//! While the installed state is known, a sync writes only what changed, and reads only the virtual servers that it changes. It is unknown
//! at the start and after any failure; then a sync reads everything back and writes what differs. Nothing is flushed, so there is
//! no gap.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IpvsScheduler;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use super::client::Connection;
use super::difference::{Differences, Work, addresses, compare, source, sources};
use super::drain::LOOK_EVERY;
use super::layout::State;
use super::layout::frame::{FORWARD, MASQ, POST};
use super::leave::remove_unused_device;
use super::probe::{Missing, preflight};
use super::server::{Timeouts, scheduler_name};
use super::write::{Failure, Servers};
use crate::conntrack::Target;
use crate::ipset;
use crate::iptables::ear::Ear;
use crate::iptables::runner::{DEFAULT_LOCK_WAIT, Runner};
use crate::iptables::saved::Comparison;
use crate::iptables::{Tools, invalid_dropped};
use crate::kernel::{SyncError, Synced};
use crate::plan::{Changes, NodePlan, Plan};

/// How long packets that carry a mark may be on their way through the node.
const MARKED_PACKETS_LEAVE: Duration = Duration::from_millis(250);
/// What metrics call our virtual servers.
const TABLE: &str = "ipvs";

/// The virtual servers of one node, with what belongs to them.
pub struct Dataplane {
    tools: Tools,
    ear: Mutex<Ear>,
    families: Vec<IpFamily>,
    servers: Servers,
    /// What is installed, where that is known.
    states: BTreeMap<IpFamily, State>,
    /// How closely rules that are read back must match. Not known before they were read back once after a full write.
    comparisons: BTreeMap<IpFamily, Comparison>,
    /// What the last look has found to differ.
    found: BTreeMap<IpFamily, Differences>,
    /// As they were set last. Not known if somebody else has changed them.
    timeouts: Option<Timeouts>,
    /// Whether the last look has found others.
    timeouts_differ: bool,
    /// When to look at real servers that are leaving.
    next_look: Instant,
}

impl Dataplane {
    /// Finds out whether this node can run the mode with this scheduler; the error says everything that is missing. Works in the network
    /// namespace of this thread. Knows nothing of what is installed yet: the first [`Dataplane::sync`] reads it.
    pub async fn open(tools: Tools, families: &[IpFamily], scheduler: IpvsScheduler) -> Result<Self, String> {
        let asked = families.to_vec();
        let missing = spawn_blocking(move || {
            preflight(ipset::check(), Connection::open(), scheduler_name(scheduler), &asked)
        });
        let missing = missing.await.map_err(|error| error.to_string())?;
        if !missing.is_empty() {
            let all: Vec<String> = missing.iter().map(Missing::to_string).collect();
            return Err(all.join("; "));
        }
        Self::new(tools, families)
    }

    /// Leaves the node as it was before [`Dataplane::open`].
    pub async fn discard(self) {
        if let Ok(Err(error)) = spawn_blocking(remove_unused_device).await {
            warn!("the device of mode ipvs stays: {error}");
        }
    }

    /// What an earlier process has left in these families, to be removed.
    pub fn leftover(tools: Tools, families: &[IpFamily]) -> Result<Self, String> {
        Self::new(tools, families)
    }

    fn new(tools: Tools, families: &[IpFamily]) -> Result<Self, String> {
        Ok(Self {
            tools,
            ear: Mutex::default(),
            families: families.to_vec(),
            servers: Servers::open().map_err(|error| error.to_string())?,
            states: BTreeMap::new(),
            comparisons: BTreeMap::new(),
            found: BTreeMap::new(),
            timeouts: None,
            timeouts_differ: false,
            next_look: Instant::now(),
        })
    }

    /// The families that are served.
    #[must_use]
    pub fn families(&self) -> &[IpFamily] {
        &self.families
    }

    /// The tools in use.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// The kernel gives no notices about virtual servers. Meanwhile, real servers that are leaving are taken out.
    pub async fn changed(&mut self) {
        loop {
            if self.servers.drain.is_empty() {
                std::future::pending::<()>().await;
            }
            sleep_until(self.next_look).await;
            self.look_at_leaving().await;
        }
    }

    /// Takes out real servers that have had their last connection, if it is time to look.
    async fn look_at_leaving(&mut self) {
        if self.servers.drain.is_empty() || Instant::now() < self.next_look {
            return;
        }
        self.next_look = Instant::now() + LOOK_EVERY;
        if let Err(error) = self.servers.look().await {
            warn!("real servers that are not needed any more stay for now: {error}");
        }
    }

    /// Makes the kernel equal to the plan. One family failing never keeps the other from being written. What failed is
    /// read back and repaired by the next call, even if that brings no changes.
    pub async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let mut synced = Synced::default();
        let mut errors = Vec::new();
        self.look_at_leaving().await;
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            let start = Instant::now();
            let mut served = Vec::new();
            // Taken out, so that it stays unknown if the write fails or is cancelled.
            let known = self.states.remove(&family);
            synced.full |= known.is_none();
            let outcome = match known {
                Some(state) => self.advance(plan, node, changes, state).await,
                None => self.adopt(plan, node, &mut served).await,
            };
            // Also after a failure: what served them may be gone by the next time.
            synced.served.extend(served.into_iter().map(|target| (family, target)));
            match outcome {
                Ok((state, written)) => {
                    synced.written.insert((family, TABLE), written);
                    synced.rules.insert((family, TABLE), state.servers());
                    synced.duration.insert(family, start.elapsed());
                    debug!(?family, written, elapsed = ?start.elapsed(), "virtual servers written");
                    self.states.insert(family, state);
                }
                Err(error) => errors.push(error.of(family)),
            }
        }
        errors.extend(self.set_timeouts(plan).await);
        (synced, errors)
    }

    async fn advance(
        &mut self,
        plan: &Plan,
        node: &NodePlan,
        changes: &Changes,
        mut state: State,
    ) -> Result<(State, usize), Failure> {
        self.found.remove(&node.family);
        let before = (source(state.site()), state.site().node.own.clone());
        let mut work = Work::from(state.advance(plan, node, changes));
        if before != (source(state.site()), node.own.clone()) {
            // An address that the node gets or loses takes routes with it.
            work.local = Some(addresses(&state.full()));
        }
        let written = self.write(plan, &state, work).await?;
        self.settle(plan, &mut state).await?;
        Ok((state, written))
    }

    /// Takes over what an earlier process has installed, or somebody else has changed.
    async fn adopt(
        &mut self,
        plan: &Plan,
        node: &NodePlan,
        served: &mut Vec<Target>,
    ) -> Result<(State, usize), Failure> {
        let family = node.family;
        self.found.remove(&family);
        self.comparisons.remove(&family);
        let runner = Runner::new(&self.tools, &self.ear, family);
        let installed = self.servers.read(&runner).await?;
        let [_, nat, _] = &installed.tables;
        let mut state = State::of(plan, node, nat.marks(MASQ) | nat.marks(POST));
        served.extend(installed.served(state.site()));
        let differences =
            compare(&state.full(), state.site(), &installed, &self.servers.drain, Comparison::Exact);
        let mut written = 0;
        if !differences.lines.is_empty() {
            let first = differences.lines.first();
            info!(?family, differences = differences.lines.len(), first, "writing what differs");
            written = self.write(plan, &state, differences.work).await?;
        }
        self.settle(plan, &mut state).await?;
        Ok((state, written))
    }

    /// Ends a change of the mark bit, once no packet carries the old one any more.
    async fn settle(&mut self, plan: &Plan, state: &mut State) -> Result<(), Failure> {
        if state.is_settling() {
            tokio::time::sleep(MARKED_PACKETS_LEAVE).await;
            let last = state.settle();
            self.write(plan, state, last.into()).await?;
        }
        Ok(())
    }

    async fn write(&mut self, plan: &Plan, state: &State, work: Work) -> Result<usize, Failure> {
        let lock_wait = plan.config().iptables.lock_timeout_seconds;
        let family = state.site().node.family;
        let runner = Runner::new(&self.tools, &self.ear, family).waiting(lock_wait);
        let none_left = self.servers.drain.is_empty();
        let written = self.servers.write(&runner, work, &sources(state.site())).await;
        if none_left {
            self.next_look = Instant::now() + LOOK_EVERY;
        }
        written
    }

    async fn set_timeouts(&mut self, plan: &Plan) -> Option<SyncError> {
        let wanted = Timeouts::of(&plan.config().ipvs);
        if self.timeouts == Some(wanted) {
            return None;
        }
        let set = self.servers.client().with(move |connection| connection.set_timeouts(wanted)).await;
        match set {
            Ok(()) => {
                self.timeouts = Some(wanted);
                None
            }
            Err(error) => self.families.first().map(|family| Failure::from(error).of(*family)),
        }
    }

    /// Reads the kernel and says where it differs from what was last written, or, if that is unknown, from the plan. Empty: equal. The
    /// kernel does not tell who has touched virtual servers, so everything is read every time. Changes nothing; see
    /// [`Dataplane::repair`].
    pub async fn verify(&mut self, plan: &Plan) -> Result<Vec<String>, SyncError> {
        let mut lines = Vec::new();
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            let differences = self.verify_family(plan, node).await.map_err(|error| error.of(family))?;
            lines.extend(differences.lines.iter().cloned());
            if differences.lines.is_empty() {
                self.found.remove(&family);
            } else {
                self.found.insert(family, differences);
            }
        }
        let Some(family) = self.families.first().copied() else { return Ok(lines) };
        let there = self.servers.client().with(Connection::timeouts).await;
        let there = there.map_err(|error| Failure::from(error).of(family))?;
        let wanted = Timeouts::of(&plan.config().ipvs);
        self.timeouts_differ = !there.are(&wanted);
        if self.timeouts_differ {
            lines.push(format!("timeouts of IPVS: {there}, should be {wanted}"));
        }
        Ok(lines)
    }

    async fn verify_family(&mut self, plan: &Plan, node: &NodePlan) -> Result<Differences, Failure> {
        let family = node.family;
        let runner = Runner::new(&self.tools, &self.ear, family).waiting(DEFAULT_LOCK_WAIT);
        let installed = self.servers.read(&runner).await?;
        let drain = &self.servers.drain;
        let Some(state) = self.states.get(&family) else {
            let state = State::of(plan, node, 0);
            return Ok(compare(&state.full(), state.site(), &installed, drain, Comparison::Exact));
        };
        let full = state.full();
        let compare = |how| compare(&full, state.site(), &installed, drain, how);
        if let Some(how) = self.comparisons.get(&family) {
            return Ok(compare(*how));
        }
        // The first look after a full write: what differs now only in words is how this version of the tool prints.
        let exact = compare(Comparison::Exact);
        if exact.lines.is_empty() {
            self.comparisons.insert(family, Comparison::Exact);
            return Ok(exact);
        }
        let loose = compare(Comparison::Shape);
        if !loose.lines.is_empty() {
            return Ok(exact);
        }
        warn!(
            ?family,
            version = self.tools.version(),
            "this version of iptables prints rules in words that are not known; only their number and targets are compared"
        );
        self.comparisons.insert(family, Comparison::Shape);
        Ok(loose)
    }

    /// Writes what [`Dataplane::verify`] has found to differ, and nothing else.
    pub async fn repair(&mut self, plan: &Plan) -> Vec<SyncError> {
        let mut errors = Vec::new();
        for (family, differences) in std::mem::take(&mut self.found) {
            // Taken out, so that it is read back if this fails.
            let Some(state) = self.states.remove(&family) else { continue };
            match self.write(plan, &state, differences.work).await {
                Ok(_) => {
                    self.states.insert(family, state);
                }
                Err(error) => errors.push(error.of(family)),
            }
        }
        if std::mem::take(&mut self.timeouts_differ) {
            self.timeouts = None;
            errors.extend(self.set_timeouts(plan).await);
        }
        errors
    }

    /// Packets that were dropped because connection tracking calls them invalid, by family, since the rule was written.
    pub async fn invalid_dropped(&self) -> BTreeMap<IpFamily, u64> {
        invalid_dropped(&self.tools, &self.families, FORWARD).await
    }

    /// Finds out whether the kernel could be written now, without changing anything but the real servers that are leaving.
    pub async fn probe(&mut self, plan: &Plan) -> Result<(), SyncError> {
        self.look_at_leaving().await;
        for family in self.families.clone() {
            let asked = self.servers.client().with(Connection::timeouts).await;
            asked.map_err(|error| Failure::from(error).of(family))?;
            let lock_wait = plan.config().iptables.lock_timeout_seconds;
            let runner = Runner::new(&self.tools, &self.ear, family).waiting(lock_wait);
            runner.restore_nothing().await.map_err(|error| Failure::from(error).of(family))?;
        }
        Ok(())
    }
}
