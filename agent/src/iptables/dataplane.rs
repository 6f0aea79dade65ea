//! Keeps the kernel equal to the plan: runs the tools, remembers whether they succeeded.
//!
//! In: the [`Plan`] and its [`Changes`]. Out: kernel state, and [`Synced`] or a [`SyncError`] per family. What to write is
//! decided in [`super::state`].
//!
//! While the installed state is known, a sync writes only what changed and reads nothing. It is unknown at the start and
//! after any failure; then a sync reads our chains back and writes what differs. Nothing is flushed, so there is no gap.
//! What others have changed is found by [`Dataplane::verify`] and written by [`Dataplane::repair`], chain by chain.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::{debug, info, warn};

use super::batch::{Batch, Script, Section};
use super::counters::invalid_dropped;
use super::ear::Ear;
use super::names::ChainName;
use super::runner::{DEFAULT_LOCK_WAIT, Failure, Runner, classify, failure, lock};
use super::saved::Comparison;
use super::sets::{self, Set, SetChanges};
use super::state::{Differences, Read, State, Texts};
use super::tools::{Flavour, Tools};
use crate::conntrack::Target;
use crate::ipset::Kind as _;
use crate::kernel::{Reach, SyncError, SyncFailure, Synced};
use crate::netfilter::Notices;
use crate::plan::{Changes, NodePlan, Plan};

/// How long packets that carry a mark may be on their way through the node.
const MARKED_PACKETS_LEAVE: Duration = Duration::from_millis(250);

/// The rules of one node.
#[derive(Debug)]
pub struct Dataplane {
    tools: Tools,
    families: Vec<IpFamily>,
    /// What is installed, where that is known.
    states: BTreeMap<IpFamily, State>,
    /// How closely what is read back must match. Not known before it was read back once after a full write.
    comparisons: BTreeMap<IpFamily, Comparison>,
    /// What the tools printed when a look found no difference and nothing was written since: the same again is not compared.
    equal: BTreeMap<IpFamily, u64>,
    /// Where the last look found the kernel to differ from what is installed.
    found: BTreeMap<IpFamily, Differences>,
    /// Behind a lock that nobody holds for longer than a call: whoever runs a tool says that it was us.
    ear: Mutex<Ear>,
}

#[derive(Debug, Default)]
pub(super) struct Written {
    full: bool,
    rules: (usize, usize),
    served: Vec<Target>,
}

impl Dataplane {
    /// Knows nothing of the kernel yet: the first [`Dataplane::sync`] reads it and writes what differs.
    #[must_use]
    pub fn new(tools: Tools, families: &[IpFamily]) -> Self {
        Self {
            tools,
            families: families.to_vec(),
            states: BTreeMap::new(),
            comparisons: BTreeMap::new(),
            equal: BTreeMap::new(),
            found: BTreeMap::new(),
            ear: Mutex::default(),
        }
    }

    /// Takes the kernel's word for what others write, instead of reading everything at every look. Only the nft flavour is
    /// in these notices.
    pub fn listen(&mut self, notices: Notices) {
        if self.tools.flavour() == Flavour::Nft {
            self.ear = Mutex::new(Ear::new(notices));
        }
    }

    /// Waits until somebody else has changed something that may be ours; for ever where the kernel does not tell.
    pub async fn changed(&mut self) {
        self.ear.get_mut().unwrap_or_else(PoisonError::into_inner).hear().await;
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

    /// Makes the kernel equal to the plan. One family failing never keeps the other from being written. What failed is
    /// read back and repaired by the next call, even if that brings no changes.
    pub async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let mut synced = Synced::default();
        let mut errors = Vec::new();
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            let start = Instant::now();
            let mut written = Written::default();
            let outcome = self.sync_family(plan, node, changes, &mut written).await;
            // Also after a failure: what served them may be gone by the next time.
            synced.served.extend(written.served.drain(..).map(|target| (family, target)));
            match outcome {
                Ok(()) => {
                    synced.full |= written.full;
                    synced.written.insert((family, "nat"), written.rules.0);
                    synced.written.insert((family, "filter"), written.rules.1);
                    synced.duration.insert(family, start.elapsed());
                    debug!(?family, full = written.full, elapsed = ?start.elapsed(), "rules written");
                }
                Err(error) => errors.push(failure(family, &error)),
            }
            if let Some(state) = self.states.get(&family) {
                let (nat, filter) = state.rules();
                synced.rules.insert((family, "nat"), nat);
                synced.rules.insert((family, "filter"), filter);
            }
        }
        (synced, errors)
    }

    async fn sync_family(
        &mut self,
        plan: &Plan,
        node: &NodePlan,
        changes: &Changes,
        written: &mut Written,
    ) -> Result<(), Failure> {
        let family = node.family;
        self.found.remove(&family);
        self.equal.remove(&family);
        let lock_wait = plan.config().iptables.lock_timeout_seconds;
        let runner = Runner::new(&self.tools, &self.ear, family).waiting(lock_wait);
        // Taken out, so that it stays unknown if the write fails or is cancelled.
        let state = if let Some(mut state) = self.states.remove(&family) {
            let batch = state.advance(plan, node, changes);
            runner.write(batch, state.uses_sets(), written).await?;
            runner.settle(&mut state, written).await?;
            state
        } else {
            self.comparisons.remove(&family);
            runner.adopt(plan, node, written).await?
        };
        self.states.insert(family, state);
        Ok(())
    }

    fn runner(&self, family: IpFamily, lock_wait: u32) -> Runner<'_> {
        Runner::new(&self.tools, &self.ear, family).waiting(lock_wait)
    }

    /// Reads the kernel and says in which chains it differs from what was last written, or, if that is unknown, from the
    /// plan. Empty: equal. Changes nothing; see [`Dataplane::repair`].
    pub async fn verify(&mut self, plan: &Plan, reach: Reach) -> Result<Vec<String>, SyncError> {
        let mut lines = Vec::new();
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            if reach == Reach::Suspects && self.is_known(family).await {
                continue;
            }
            lock(&self.ear).trust(family);
            let differences = self.verify_family(plan, node).await.inspect_err(|_| {
                lock(&self.ear).doubt(family);
            });
            let differences = differences.map_err(|error| failure(family, &error))?;
            lines.extend(differences.describe(family));
            if differences.is_empty() {
                self.found.remove(&family);
            } else {
                lock(&self.ear).doubt(family);
                self.found.insert(family, differences);
            }
        }
        Ok(lines)
    }

    /// Whether a family was read back and nobody has written it since. Of the sets, which the kernel gives no notices about,
    /// only the sizes are looked at.
    async fn is_known(&self, family: IpFamily) -> bool {
        lock(&self.ear).listen(None);
        let Some(state) = self.states.get(&family) else { return false };
        if !self.comparisons.contains_key(&family) || lock(&self.ear).suspects(family) {
            return false;
        }
        let runner = self.runner(family, DEFAULT_LOCK_WAIT);
        for set in Set::ALL.iter().copied().filter(|_| state.uses_sets()) {
            if runner.set_size(&set.name(family)).await != Some(state.set_size(set)) {
                return false;
            }
        }
        true
    }

    async fn verify_family(&mut self, plan: &Plan, node: &NodePlan) -> Result<Differences, Failure> {
        let family = node.family;
        let texts = self.runner(family, DEFAULT_LOCK_WAIT).print_all().await?;
        let fingerprint = texts.fingerprint();
        if self.equal.get(&family) == Some(&fingerprint) {
            return Ok(Differences::default());
        }
        let differences = self.compare(plan, node, &texts.parse(family));
        if differences.is_empty() && self.states.contains_key(&family) {
            self.equal.insert(family, fingerprint);
        }
        Ok(differences)
    }

    fn compare(&mut self, plan: &Plan, node: &NodePlan, read: &Read) -> Differences {
        let family = node.family;
        let Some(state) = self.states.get(&family) else {
            let unknown = State::of(plan, node, 0, read.filter.uses_sets());
            return unknown.compare(read, Comparison::Exact);
        };
        if let Some(how) = self.comparisons.get(&family) {
            return state.compare(read, *how);
        }
        // The first look after a full write: what differs now only in words is how this version of the tool prints.
        let exact = state.compare(read, Comparison::Exact);
        if exact.is_empty() {
            self.comparisons.insert(family, Comparison::Exact);
            return exact;
        }
        let loose = state.compare(read, Comparison::Shape);
        if !loose.is_empty() {
            return exact;
        }
        warn!(
            ?family,
            version = self.tools.version(),
            "this version of iptables prints rules in words that are not known; only their number and targets are compared"
        );
        self.comparisons.insert(family, Comparison::Shape);
        loose
    }

    /// Writes what [`Dataplane::verify`] has found to differ, and nothing else.
    pub async fn repair(&mut self, plan: &Plan) -> Vec<SyncError> {
        let mut errors = Vec::new();
        for (family, differences) in std::mem::take(&mut self.found) {
            // Taken out, so that it is read back if this fails.
            let Some(state) = self.states.remove(&family) else { continue };
            let lock_wait = plan.config().iptables.lock_timeout_seconds;
            let runner = Runner::new(&self.tools, &self.ear, family).waiting(lock_wait);
            let batch = differences.into_batch();
            match runner.repair(batch, state.uses_sets()).await {
                Ok(()) => {
                    self.states.insert(family, state);
                }
                Err(error) => errors.push(failure(family, &error)),
            }
        }
        errors
    }

    /// Packets that were dropped because connection tracking calls them invalid, by family, since the rule was written.
    pub async fn invalid_dropped(&self) -> BTreeMap<IpFamily, u64> {
        invalid_dropped(&self.tools, &self.families, "KUBE-FORWARD").await
    }

    /// Finds out whether the kernel could be written now, by a restore that holds nothing. With the legacy flavour it takes
    /// the lock and commits nothing, since that flavour copies the whole table for every commit.
    pub async fn probe(&mut self, plan: &Plan) -> Result<(), SyncError> {
        for family in &self.families {
            let runner = self.runner(*family, plan.config().iptables.lock_timeout_seconds);
            runner.restore_nothing().await.map_err(|error| failure(*family, &error))?;
        }
        Ok(())
    }
}

impl Runner<'_> {
    pub(super) async fn write(
        &self,
        mut batch: Batch,
        use_sets: bool,
        written: &mut Written,
    ) -> Result<(), Failure> {
        let sets = std::mem::take(&mut batch.sets);
        if use_sets {
            self.change_sets(&sets.before(self.family())).await?;
        }
        let scripts = batch.scripts(self.tools().flavour());
        // While a tool holds all rules, we need not hold them twice.
        drop(batch);
        for script in scripts {
            self.restore(&script).await?;
            written.rules.0 += script.rules.0;
            written.rules.1 += script.rules.1;
        }
        if use_sets {
            self.change_sets(&sets.after(self.family())).await?;
        }
        Ok(())
    }

    /// As [`Self::write`], where even the sets may be gone.
    async fn repair(&self, batch: Batch, use_sets: bool) -> Result<(), Failure> {
        if use_sets {
            self.change_sets(&SetChanges::create(self.family())).await?;
        }
        self.write(batch, use_sets, &mut Written::default()).await
    }

    async fn read_all(&self) -> Result<Read, Failure> {
        Ok(self.print_all().await?.parse(self.family()))
    }

    async fn print_all(&self) -> Result<Texts, Failure> {
        let (nat, filter) = (self.print("nat").await?, self.print("filter").await?);
        let mut texts = Texts { nat, filter, sets: String::new() };
        if texts.filter.contains("--match-set POINTSMAN-") {
            texts.sets = self.print_sets::<Set>().await;
        }
        Ok(texts)
    }

    /// Whether sets can be made and rules can look into them: tried with the sets themselves, which are needed anyway, and a
    /// chain that nothing leads to.
    async fn make_sets(&self) -> Result<bool, Failure> {
        let probe = async {
            self.change_sets(&SetChanges::create(self.family())).await?;
            let mut section = Section::new("filter");
            section.chain(ChainName::new(PROBE), &sets::rules(self.family()));
            let mut script = Script::default();
            section.finish(&mut script);
            self.restore(&script).await?;
            let mut section = Section::new("filter");
            section.remove([&ChainName::new(PROBE)]);
            let mut script = Script::default();
            section.finish(&mut script);
            self.restore(&script).await
        };
        match probe.await {
            Ok(()) => Ok(true),
            // That says nothing about sets.
            Err(error) if classify(&error) == SyncFailure::LockTimeout => Err(error),
            Err(error) => {
                info!(family = ?self.family(), %error, "no ipsets: Services without endpoints are refused by one rule each, undefined ports of ClusterIPs not at all");
                Ok(false)
            }
        }
    }

    /// Ends a change of the mark bit, once no packet carries the old one any more.
    async fn settle(&self, state: &mut State, written: &mut Written) -> Result<(), Failure> {
        if state.is_settling() {
            tokio::time::sleep(MARKED_PACKETS_LEAVE).await;
            self.write(state.settle(), state.uses_sets(), written).await?;
        }
        Ok(())
    }

    /// Takes over whatever is installed, by us or by kube-proxy: adds and corrects, compares, removes what is left over.
    async fn adopt(&self, plan: &Plan, node: &NodePlan, written: &mut Written) -> Result<State, Failure> {
        let use_sets = self.make_sets().await?;
        let read = self.read_all().await?;
        let accepted = read.nat.marks("KUBE-MARK-MASQ") | read.nat.marks("KUBE-POSTROUTING");
        let mut state = State::of(plan, node, accepted, use_sets);
        let found = state.compare(&read, Comparison::Exact);
        let canary = read.nat.has(CANARY) || read.filter.has(CANARY);
        *written = Written { full: true, served: read.nat.served(), ..Written::default() };
        drop(read);
        self.write(found.batch, use_sets, written).await?;
        self.settle(&mut state, written).await?;
        if !found.stale.is_empty() || !found.filter_stale.is_empty() {
            let left = state.compare(&self.read_all().await?, Comparison::Shape);
            let wrong = left.chains();
            if !wrong.is_empty() {
                let names: Vec<&str> = wrong.iter().take(5).map(ChainName::as_str).collect();
                return Err(Failure::ReadBack(names.join(", ")));
            }
            info!(family = ?self.family(), chains = left.stale.len() + left.filter_stale.len(), "removing chains that are left over");
            let batch = Batch { stale: left.stale, filter_stale: left.filter_stale, ..Batch::default() };
            self.write(batch, use_sets, written).await?;
            if canary {
                self.remove_mangle_canary().await;
            }
        }
        Ok(state)
    }

    /// kube-proxy's empty chain in mangle; whether it can be removed does not matter.
    pub(super) async fn remove_mangle_canary(&self) {
        let Ok(mangle) = self.read("mangle").await else { return };
        if mangle.has(CANARY) {
            let mut section = Section::new("mangle");
            section.remove([&ChainName::new(CANARY)]);
            let mut script = Script::default();
            section.finish(&mut script);
            if let Err(error) = self.restore(&script).await {
                warn!(family = ?self.family(), %error, "kube-proxy's canary chain stays in mangle");
            }
        }
    }
}

const CANARY: &str = "KUBE-PROXY-CANARY";
/// A chain for trying out rules; nothing leads to it.
const PROBE: &str = "KUBE-NP-PROBE";
