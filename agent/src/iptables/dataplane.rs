//! Keeps the kernel equal to the plan: runs the tools, remembers whether they succeeded.
//!
//! In: the [`Plan`] and its [`Changes`]. Out: kernel state, and [`Synced`] or a [`SyncError`] per family. What to write is
//! decided in [`super::state`].
//!
//! While the installed state is known, a sync writes only what changed and reads nothing. It is unknown at the start and
//! after any failure; then a sync reads our chains back and writes what differs. Nothing is flushed, so there is no gap.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::{debug, info, warn};

use super::batch::{Batch, Script, Section};
use super::names::ChainName;
use super::saved::{Comparison, Saved, ours_in_filter, ours_in_nat};
use super::sets::{self, Set, SetChanges};
use super::shared::{JUMPS, MARTIAN_RULE};
use super::state::{Read, State};
use super::tools::{Flavour, RunError, Tools};
use crate::kernel::{SyncError, SyncFailure, Synced};
use crate::plan::{Changes, NodePlan, Plan};

/// How long packets that carry a mark may be on their way through the node.
const MARKED_PACKETS_LEAVE: Duration = Duration::from_millis(250);
/// How long a restore may take, besides waiting for the lock.
const RESTORE_TIMEOUT: Duration = Duration::from_mins(2);
const SAVE_TIMEOUT: Duration = Duration::from_mins(1);
/// Lock wait, in seconds, where no configuration says otherwise.
const DEFAULT_LOCK_WAIT: u32 = 5;

/// The rules of one node.
#[derive(Debug)]
pub struct Dataplane {
    tools: Tools,
    families: Vec<IpFamily>,
    /// What is installed, where that is known.
    states: BTreeMap<IpFamily, State>,
    /// How closely what is read back must match. Not known before it was read back once after a full write.
    comparisons: BTreeMap<IpFamily, Comparison>,
}

#[derive(Debug, Default)]
struct Written {
    full: bool,
    rules: (usize, usize),
}

impl Dataplane {
    /// Knows nothing of the kernel yet: the first [`Dataplane::sync`] reads it and writes what differs.
    #[must_use]
    pub fn new(tools: Tools, families: &[IpFamily]) -> Self {
        Self { tools, families: families.to_vec(), states: BTreeMap::new(), comparisons: BTreeMap::new() }
    }

    /// The tools in use.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Forgets what is installed: the next [`Dataplane::sync`] reads it back and repairs what differs. To be called when
    /// [`Dataplane::verify`] has found differences that are to be repaired.
    pub fn distrust(&mut self) {
        self.states.clear();
    }

    /// Makes the kernel equal to the plan. One family failing never keeps the other from being written. What failed is
    /// read back and repaired by the next call, even if that brings no changes.
    pub async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let mut synced = Synced::default();
        let mut errors = Vec::new();
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            let start = Instant::now();
            match self.sync_family(plan, node, changes).await {
                Ok(written) => {
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
    ) -> Result<Written, Failure> {
        let family = node.family;
        let runner =
            Runner { tools: &self.tools, family, lock_wait: plan.config().iptables.lock_timeout_seconds };
        // Taken out, so that it stays unknown if the write fails or is cancelled.
        let known =
            self.states.remove(&family).filter(|state| state.localhost() == node.node_ports.localhost);
        let (state, written) = if let Some(mut state) = known {
            let mut written = Written::default();
            let batch = state.advance(plan, node, changes);
            runner.write(&batch, state.uses_sets(), &mut written).await?;
            runner.settle(&mut state, &mut written).await?;
            (state, written)
        } else {
            self.comparisons.remove(&family);
            runner.adopt(plan, node).await?
        };
        self.states.insert(family, state);
        Ok(written)
    }

    /// Reads the kernel and says in which chains it differs from what was last written, or, if that is unknown, from the
    /// plan. Empty: equal. Changes nothing; see [`Dataplane::distrust`].
    pub async fn verify(&mut self, plan: &Plan) -> Result<Vec<String>, SyncError> {
        let mut lines = Vec::new();
        for family in &self.families {
            let Some(node) = plan.node(*family) else { continue };
            let runner = Runner { tools: &self.tools, family: *family, lock_wait: DEFAULT_LOCK_WAIT };
            let read = runner.read_all().await.map_err(|error| failure(*family, &error))?;
            let unknown;
            let state = if let Some(state) = self.states.get(family) {
                state
            } else {
                unknown = State::of(plan, node, 0, read.filter.uses_sets());
                &unknown
            };
            let how = self.comparisons.get(family).copied().unwrap_or(Comparison::Exact);
            let mut differences = state.compare(&read, how);
            if self.states.contains_key(family) && !self.comparisons.contains_key(family) {
                // The first look after a full write: what differs now only in words is how this version of the tool prints.
                let alike = differences.is_empty()
                    || {
                        let loose = state.compare(&read, Comparison::Shape);
                        let alike = loose.is_empty();
                        if alike {
                            warn!(
                                ?family,
                                version = self.tools.version(),
                                "this version of iptables prints rules in words that are not known; only their number and targets are compared"
                            );
                            self.comparisons.insert(*family, Comparison::Shape);
                            differences = loose;
                        }
                        alike
                    };
                if alike {
                    self.comparisons.entry(*family).or_insert(Comparison::Exact);
                }
            }
            lines.extend(differences.describe(*family));
        }
        Ok(lines)
    }

    /// Finds out whether the kernel could be written now, by a restore that holds nothing. With the legacy flavour it takes
    /// the lock and commits nothing, since that flavour copies the whole table for every commit.
    pub async fn probe(&mut self, plan: &Plan) -> Result<(), SyncError> {
        for family in &self.families {
            let lock_wait = plan.config().iptables.lock_timeout_seconds;
            let runner = Runner { tools: &self.tools, family: *family, lock_wait };
            runner.restore_nothing().await.map_err(|error| failure(*family, &error))?;
        }
        Ok(())
    }
}

/// Runs the tools for one family.
struct Runner<'a> {
    tools: &'a Tools,
    family: IpFamily,
    lock_wait: u32,
}

/// Why a family could not be written.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(
        "table {table} holds rules that {command} cannot show; remove what other programs have put there"
    )]
    Incompatible { table: &'static str, command: String },
    #[error("the rules differ after they were written: {0}; they are compared again at the next attempt")]
    ReadBack(String),
}

fn failure(family: IpFamily, error: &Failure) -> SyncError {
    SyncError { family, failure: classify(error), message: error.to_string() }
}

fn classify(error: &Failure) -> SyncFailure {
    match error {
        Failure::Run(RunError::Start { .. }) => SyncFailure::ToolMissing,
        Failure::Run(RunError::Failed { message, .. }) if message.contains("xtables lock") => {
            SyncFailure::LockTimeout
        }
        Failure::Run(RunError::Failed { .. }) | Failure::ReadBack(_) => SyncFailure::RestoreFailed,
        Failure::Run(RunError::Timeout { .. }) | Failure::Incompatible { .. } => SyncFailure::SyncFailed,
    }
}

impl Runner<'_> {
    async fn read(&self, table: &'static str) -> Result<Saved, Failure> {
        let command = self.tools.command(self.family, "-save");
        let text = self.tools.run(&command, &["-t", table], None, SAVE_TIMEOUT).await?;
        if text.contains("is incompatible, use 'nft' tool") {
            return Err(Failure::Incompatible { table, command });
        }
        Ok(Saved::parse(text))
    }

    async fn restore(&self, script: &Script) -> Result<(), Failure> {
        let command = self.tools.command(self.family, "-restore");
        let wait = self.lock_wait.to_string();
        let args = ["--noflush", "--counters", "-w", &wait];
        let timeout = RESTORE_TIMEOUT + Duration::from_secs(self.lock_wait.into());
        self.tools.run(&command, &args, Some(&script.text), timeout).await?;
        Ok(())
    }

    async fn restore_nothing(&self) -> Result<(), Failure> {
        let command = self.tools.command(self.family, "-restore");
        let wait = self.lock_wait.to_string();
        let mut args = vec!["--noflush", "-w", &wait];
        if self.tools.flavour() == Flavour::Legacy {
            args.push("--test");
        }
        let timeout = RESTORE_TIMEOUT + Duration::from_secs(self.lock_wait.into());
        self.tools.run(&command, &args, Some("*nat\nCOMMIT\n"), timeout).await?;
        Ok(())
    }

    async fn write(&self, batch: &Batch, use_sets: bool, written: &mut Written) -> Result<(), Failure> {
        if use_sets {
            self.change_sets(&batch.sets.before(self.family, false)).await?;
        }
        for script in batch.scripts(self.tools.flavour()) {
            self.restore(&script).await?;
            written.rules.0 += script.rules.0;
            written.rules.1 += script.rules.1;
        }
        if use_sets {
            self.change_sets(&batch.sets.after(self.family)).await?;
        }
        Ok(())
    }

    async fn change_sets(&self, input: &str) -> Result<(), Failure> {
        if !input.is_empty() {
            self.tools.run("ipset", &["restore", "-exist"], Some(input), SAVE_TIMEOUT).await?;
        }
        Ok(())
    }

    async fn read_all(&self) -> Result<Read, Failure> {
        let (nat, filter) = (self.read("nat").await?, self.read("filter").await?);
        let mut members = BTreeSet::new();
        if filter.uses_sets() {
            for set in Set::ALL {
                // A set that is not there has no members.
                let saved =
                    self.tools.run("ipset", &["save", set.name(self.family)], None, SAVE_TIMEOUT).await;
                members.extend(sets::parse(&saved.unwrap_or_default(), self.family));
            }
        }
        Ok(Read { nat, filter, members })
    }

    /// Whether sets can be made and rules can look into them: tried with the sets themselves, which are needed anyway, and a
    /// chain that nothing leads to.
    async fn make_sets(&self) -> Result<bool, Failure> {
        let probe = async {
            self.change_sets(&SetChanges::default().before(self.family, true)).await?;
            let mut section = Section::new("filter");
            section.chain(ChainName::new(PROBE), &sets::rules(self.family));
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
                info!(family = ?self.family, %error, "no ipsets: Services without endpoints are refused by one rule each, undefined ports of ClusterIPs not at all");
                Ok(false)
            }
        }
    }

    /// Ends a change of the mark bit, once no packet carries the old one any more.
    async fn settle(&self, state: &mut State, written: &mut Written) -> Result<(), Failure> {
        if state.is_settling() {
            tokio::time::sleep(MARKED_PACKETS_LEAVE).await;
            self.write(&state.settle(), state.uses_sets(), written).await?;
        }
        Ok(())
    }

    /// Takes over whatever is installed, by us or by kube-proxy: adds and corrects, compares, removes what is left over.
    async fn adopt(&self, plan: &Plan, node: &NodePlan) -> Result<(State, Written), Failure> {
        let use_sets = self.make_sets().await?;
        let read = self.read_all().await?;
        let accepted = read.nat.marks("KUBE-MARK-MASQ") | read.nat.marks("KUBE-POSTROUTING");
        let mut state = State::of(plan, node, accepted, use_sets);
        let found = state.compare(&read, Comparison::Exact);
        let canary = read.nat.has(CANARY) || read.filter.has(CANARY);
        let mut written = Written { full: true, ..Written::default() };
        if node.node_ports.localhost {
            self.guard_localhost(&read.filter).await?;
        }
        drop(read);
        self.write(&found.batch, use_sets, &mut written).await?;
        self.settle(&mut state, &mut written).await?;
        if !found.stale.is_empty() || !found.filter_stale.is_empty() {
            let left = state.compare(&self.read_all().await?, Comparison::Shape);
            let wrong = left.chains();
            if !wrong.is_empty() {
                let names: Vec<&str> = wrong.iter().take(5).map(ChainName::as_str).collect();
                return Err(Failure::ReadBack(names.join(", ")));
            }
            info!(family = ?self.family, chains = left.stale.len() + left.filter_stale.len(), "removing chains that are left over");
            let batch = Batch { stale: left.stale, filter_stale: left.filter_stale, ..Batch::default() };
            self.write(&batch, use_sets, &mut written).await?;
            if canary {
                self.remove_mangle_canary().await;
            }
        }
        Ok((state, written))
    }

    /// kube-proxy's empty chain in mangle; whether it can be removed does not matter.
    async fn remove_mangle_canary(&self) {
        let Ok(mangle) = self.read("mangle").await else { return };
        if mangle.has(CANARY) {
            let mut section = Section::new("mangle");
            section.remove([&ChainName::new(CANARY)]);
            let mut script = Script::default();
            section.finish(&mut script);
            if let Err(error) = self.restore(&script).await {
                warn!(family = ?self.family, %error, "kube-proxy's canary chain stays in mangle");
            }
        }
    }

    /// Lets NodePorts answer on 127.0.0.1, and nothing else there be reached from outside.
    async fn guard_localhost(&self, filter: &Saved) -> Result<(), Failure> {
        let mut section = Section::new("filter");
        let rules: Vec<&str> = filter.rules(GUARD).into_iter().flatten().collect();
        if !filter.has(GUARD) {
            section.chain(ChainName::new(GUARD), &[]);
        }
        if !rules.iter().any(|rule| rule.contains("block incoming localnet connections")) {
            section.append_rule(GUARD, MARTIAN_RULE);
        }
        for hook in ["INPUT", "OUTPUT"] {
            let mut jumps = filter.rules(hook).into_iter().flatten();
            if !jumps.any(|rule| super::saved::target(rule) == Some(GUARD)) {
                section.append_rule(hook, &format!("-j {GUARD}"));
            }
        }
        let mut script = Script::default();
        section.finish(&mut script);
        if !script.text.is_empty() {
            self.restore(&script).await?;
        }
        self.tools.route_localnet();
        Ok(())
    }
}

const CANARY: &str = "KUBE-PROXY-CANARY";
/// A chain for trying out rules; nothing leads to it.
const PROBE: &str = "KUBE-NP-PROBE";
const GUARD: &str = "KUBE-FIREWALL";

/// Removes everything of ours in both families: the ways in first, then the chains. Touches nothing else; what is not
/// there is no error.
pub async fn cleanup(tools: &Tools) -> Result<(), SyncError> {
    let mut first = None;
    for family in [IpFamily::IPv4, IpFamily::IPv6] {
        let runner = Runner { tools, family, lock_wait: DEFAULT_LOCK_WAIT };
        if let Err(error) = remove_family(&runner).await {
            warn!(?family, %error, "not everything could be removed");
            first.get_or_insert(failure(family, &error));
        }
    }
    first.map_or(Ok(()), Err)
}

async fn remove_family(runner: &Runner<'_>) -> Result<(), Failure> {
    // Filter first: without its rules nothing is refused, without those of nat nothing is served (mode-switching §4).
    for table in ["filter", "nat"] {
        let ours = if table == "nat" { ours_in_nat } else { ours_in_filter };
        let saved = runner.read(table).await?;
        let mut section = Section::new(table);
        for jump in JUMPS.iter().filter(|jump| jump.table == table) {
            saved.jumps(jump).for_each(|rule| section.delete_rule(jump.from, rule));
        }
        let mut script = Script::default();
        section.finish(&mut script);
        if !script.text.is_empty() {
            runner.restore(&script).await?;
        }
        let mut chains = saved.ours(ours);
        // A chain that others' rules lead to can be emptied, not removed.
        for name in saved.needed_by_others(table, ours) {
            warn!(family = ?runner.family, table, chain = %name, "other programs' rules lead to this chain; it is left empty");
            chains.remove(&name);
            let mut section = Section::new(table);
            section.chain(name, &[]);
            let mut script = Script::default();
            section.finish(&mut script);
            runner.restore(&script).await?;
        }
        let mut batch = Batch::default();
        if table == "nat" {
            batch.stale = chains;
        } else {
            batch.filter_stale = chains;
        }
        runner.write(&batch, false, &mut Written::default()).await?;
    }
    runner.remove_mangle_canary().await;
    for set in Set::ALL {
        let name = set.name(runner.family);
        // One that is not there, or no tool to remove it with, is no error.
        if let Err(error) = runner.tools.run("ipset", &["destroy", name], None, SAVE_TIMEOUT).await {
            debug!(set = name, %error, "set not removed");
        }
    }
    Ok(())
}
