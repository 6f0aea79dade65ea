//! Keeps our tables equal to the plan: writes, reads back, remembers whether that succeeded.
//!
//! In: the [`Plan`] and its [`Changes`]. Out: kernel state, and [`Synced`] or a [`SyncError`] per family. What to write is
//! decided in [`super::layout`].
//!
//! While the installed state is known, a sync writes only what changed and reads nothing. It is unknown at the start and
//! after any failure; then a sync reads our table back and writes what differs. Nothing is flushed, so there is no gap.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::{debug, info, warn};

use super::client::{self, Client};
use super::compare::{Repair, compare};
use super::error::Error;
use super::layout::{self, Limit, State, table};
use super::probe;
use super::read::Installed;
use super::ruleset::{Elements, Operation, Origin, Ruleset, Transaction};
use super::watch::Watches;
use crate::conntrack::{Connections, Target};
use crate::kernel::{Counted, Reach, SyncError, SyncFailure, Synced};
use crate::plan::{Changes, NodePlan, Plan, PortId};

/// How long packets that carry a mark may be on their way through the node.
const MARKED_PACKETS_LEAVE: Duration = Duration::from_millis(250);
/// Kernels before 6.2 hold on to chains that elements led to, for about as long.
const REFERENCES_LEAVE: Duration = Duration::from_secs(1);
/// What is said where kernels cannot do what `nftables.counters` asks for.
const UNCOUNTED: &str =
    "packets to Services are not counted: the sets of this kernel cannot, those of Linux 5.7 can";
/// What metrics call our tables.
const TABLE: &str = "pointsman";

/// The tables of one node.
pub struct Dataplane {
    client: Client,
    families: Vec<IpFamily>,
    /// What is installed, where that is known.
    known: BTreeMap<IpFamily, Known>,
    /// What the last look has found to differ; `None` where there is no table.
    found: BTreeMap<IpFamily, Option<Repair>>,
    /// What tells of changes by others.
    watches: Watches,
    /// Families that were read and found right, and that nobody else has touched since, by the word of their watch.
    untouched: BTreeSet<IpFamily>,
}

/// What is installed in a family.
struct Known {
    state: State,
    /// Whether packets to Services are to be counted.
    counters: bool,
    /// Elements in it.
    elements: usize,
    /// When it was written last.
    written: Instant,
    /// What was said about Service ports that cannot be served as they should.
    limits: BTreeMap<PortId, Limit>,
}

impl Dataplane {
    /// Finds out whether this kernel can do all that we need; the error says what is missing. Writes to the network namespace of
    /// this thread. Knows nothing of what is installed yet: the first [`Dataplane::sync`] reads it and writes what differs.
    pub async fn open(families: &[IpFamily]) -> Result<Self, String> {
        Ok(Self::new(Client::open_probed(families).await?, families))
    }

    /// What an earlier process has left in these families, to be removed.
    pub fn leftover(families: &[IpFamily]) -> Result<Self, Error> {
        Ok(Self::new(Client::open()?, families))
    }

    fn new(client: Client, families: &[IpFamily]) -> Self {
        Self {
            client,
            families: families.to_vec(),
            known: BTreeMap::new(),
            found: BTreeMap::new(),
            watches: Watches::default(),
            untouched: BTreeSet::new(),
        }
    }

    /// The families whose tables it writes.
    #[must_use]
    pub fn families(&self) -> &[IpFamily] {
        &self.families
    }

    /// Waits until somebody else has changed something that may be ours; for ever where the kernel does not tell.
    pub async fn changed(&mut self) {
        match self.watches.changed().await {
            Some(family) => {
                self.untouched.remove(&family);
            }
            None => self.untouched.clear(),
        }
    }

    /// Makes the kernel equal to the plan. One family failing never keeps the other from being written. What failed is
    /// read back and repaired by the next call, even if that brings no changes.
    pub async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let mut synced = Synced::default();
        let mut errors = Vec::new();
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            let start = Instant::now();
            // Taken out, so that it stays unknown if the write fails or is cancelled.
            let known = self.known.remove(&family).filter(|known| known.counters == node.counters);
            synced.full |= known.is_none();
            let outcome = match known {
                Some(known) => self.advance(plan, changes, known).await,
                None => self.adopt(plan, node, &mut synced.served).await,
            };
            match outcome {
                Ok((mut known, written)) => {
                    known.report_limits(family);
                    if known.counters && !known.state.counts() {
                        synced.limits.push(format!("{family:?}: {UNCOUNTED}"));
                    }
                    let limits = known.limits.iter();
                    synced
                        .limits
                        .extend(limits.map(|(id, limit)| format!("{} ({family:?}): {limit}", id.text())));
                    synced.written.insert((family, TABLE), written);
                    synced.rules.insert((family, TABLE), known.elements);
                    synced.duration.insert(family, start.elapsed());
                    debug!(?family, written, elapsed = ?start.elapsed(), "elements written");
                    self.known.insert(family, known);
                }
                Err(error) => errors.push(error),
            }
        }
        self.listen(plan);
        (synced, errors)
    }

    /// Listens to what is not listened to, if somebody looks for changes by others. Before what was written is read back, so that
    /// none is missed.
    fn listen(&mut self, plan: &Plan) {
        let tables = self.families.iter().copied().map(table);
        self.watches.follow(plan.config().drift.policy, tables, self.client.port());
        self.untouched.retain(|family| self.watches.has(*family));
    }

    /// Listens no more: before a load, which is far slower while somebody does.
    fn close(&mut self) {
        self.watches.close();
        self.untouched.clear();
    }

    async fn advance(
        &mut self,
        plan: &Plan,
        changes: &Changes,
        mut known: Known,
    ) -> Result<(Known, usize), SyncError> {
        if known.written.elapsed() > REFERENCES_LEAVE {
            let unused = known.state.sweep();
            self.write(&mut known, unused).await?;
        }
        let transaction = known.state.advance(plan, changes);
        let written = self.write(&mut known, transaction).await?;
        self.settle(&mut known).await?;
        Ok((known, written))
    }

    /// Takes over what an earlier process has installed, or somebody else has changed.
    async fn adopt(
        &mut self,
        plan: &Plan,
        node: &NodePlan,
        served: &mut Vec<(IpFamily, Target)>,
    ) -> Result<(Known, usize), SyncError> {
        self.close();
        let table = table(node.family);
        let read = self.client.read(&table).await.map_err(|error| failed(node.family, &error))?;
        if let Some(read) = &read {
            // Also if this fails: what served them may be gone by the next time.
            served.extend(layout::served(&read.ruleset).into_iter().map(|target| (node.family, target)));
        }
        let counters = node.counters;
        let mut node = node.clone();
        if counters {
            let counts = self.client.with(move |connection| probe::counts(connection, table.family)).await;
            node.counters = counts.map_err(|error| failed(node.family, &error))?;
            if !node.counters {
                warn!(family = ?node.family, "{UNCOUNTED}");
            }
        }
        let state = adopted(plan, &node, read.as_ref());
        let full = state.full();
        let elements = full.elements.values().map(Elements::len).sum();
        let limits = BTreeMap::new();
        let mut known = Known { state, counters, elements, written: Instant::now(), limits };
        let mut written = 0;
        if read.is_some() {
            let repair = compare(&full, read.as_ref());
            // Two whole tables: not kept while a third is written.
            drop((full, read));
            if !repair.is_empty() {
                info!(family = ?node.family, differences = repair.differences.len(), first = repair.differences.first(), "repairing our table");
            }
            written += self.write_all(&mut known, [repair.first, repair.then]).await?;
        } else {
            written += self.write_all(&mut known, full.load_in_steps()).await?;
        }
        known.elements = elements;
        self.settle(&mut known).await?;
        Ok((known, written))
    }

    /// Ends a change of the mark bit, once no packet carries the old one any more.
    async fn settle(&mut self, known: &mut Known) -> Result<(), SyncError> {
        if known.state.is_settling() {
            tokio::time::sleep(MARKED_PACKETS_LEAVE).await;
            let last = known.state.settle();
            self.write(known, last).await?;
        }
        Ok(())
    }

    /// One after the other; returns how many elements were written or deleted.
    async fn write_all(
        &mut self,
        known: &mut Known,
        transactions: impl IntoIterator<Item = Transaction>,
    ) -> Result<usize, SyncError> {
        let mut written = 0;
        for transaction in transactions {
            written += self.write(known, transaction).await?;
        }
        Ok(written)
    }

    /// Returns how many elements were written or deleted.
    async fn write(&mut self, known: &mut Known, transaction: Transaction) -> Result<usize, SyncError> {
        if transaction.is_empty() {
            return Ok(0);
        }
        let (added, deleted) = transaction.elements();
        let result = self.client.apply(&table(known.state.family()), Arc::new(transaction)).await;
        result.map_err(|error| known.failed(&error))?;
        known.elements = (known.elements + added).saturating_sub(deleted);
        known.written = Instant::now();
        Ok(added + deleted)
    }

    /// Reads the kernel and says where it differs from what was last written, or, if that is unknown, from the plan. Empty: equal.
    /// With [`Reach::Suspects`], a table that nobody else has touched since it was last found right is not read again: at
    /// 10,000 Services that is a third of a second of work. Changes nothing; see [`Dataplane::repair`].
    pub async fn verify(&mut self, plan: &Plan, reach: Reach) -> Result<Vec<String>, SyncError> {
        let mut lines = Vec::new();
        for family in self.families.clone() {
            let Some(node) = plan.node(family) else { continue };
            let right = self.known.contains_key(&family) && self.untouched.contains(&family);
            if reach == Reach::Suspects && right {
                continue;
            }
            let read = self.client.read(&table(family)).await.map_err(|error| failed(family, &error))?;
            let full = match self.known.get(&family) {
                Some(known) => known.state.full(),
                None => adopted(plan, node, read.as_ref()).full(),
            };
            if read.is_none() {
                lines.push(format!("{family:?}: the table {TABLE} is missing"));
                self.untouched.remove(&family);
                self.found.insert(family, None);
                continue;
            }
            let repair = compare(&full, read.as_ref());
            lines.extend(repair.differences.iter().map(|line| format!("{family:?}: {line}")));
            if repair.is_empty() {
                self.found.remove(&family);
                // What happens from before this read on, the watch will tell.
                if self.watches.has(family) {
                    self.untouched.insert(family);
                }
            } else {
                self.untouched.remove(&family);
                self.found.insert(family, Some(repair));
            }
        }
        Ok(lines)
    }

    /// Writes what [`Dataplane::verify`] has found to differ, and nothing else.
    pub async fn repair(&mut self, plan: &Plan) -> Vec<SyncError> {
        let mut errors = Vec::new();
        let loads = |repair: &Option<Repair>| repair.as_ref().is_none_or(Repair::loads);
        if self.found.values().any(loads) {
            self.close();
        }
        for (family, repair) in std::mem::take(&mut self.found) {
            // Taken out, so that it is read back if this fails.
            let Some(mut known) = self.known.remove(&family) else { continue };
            let elements = known.elements;
            let written = if let Some(Repair { first, then, .. }) = repair {
                self.write_all(&mut known, [first, then]).await
            } else {
                let full = known.state.full();
                self.write_all(&mut known, full.load_in_steps()).await
            };
            known.elements = elements;
            match written {
                Ok(_) => {
                    self.known.insert(family, known);
                }
                Err(error) => errors.push(error),
            }
        }
        self.listen(plan);
        errors
    }

    /// Packets that were dropped because connection tracking calls them invalid, by family, since the rule was written. Without
    /// a family whose rule is not there.
    pub async fn invalid_dropped(&mut self) -> BTreeMap<IpFamily, u64> {
        let mut dropped = BTreeMap::new();
        for family in self.families.clone() {
            match self.client.counted(&table(family), layout::INVALID_DROPPED).await {
                Ok(counted) => dropped.extend(counted.map(|counted| (family, counted.packets))),
                Err(error) => debug!(?family, "the packets that were dropped cannot be read: {error}"),
            }
        }
        dropped
    }

    /// What clients have sent to each Service port since its frontends are in the table; nothing where that is not counted.
    /// `None` if it cannot be read now.
    pub async fn traffic(&mut self) -> Option<Vec<(PortId, Counted)>> {
        let mut all = Vec::new();
        for (family, known) in self.known.iter().filter(|(_, known)| known.state.counts()) {
            match self.client.elements(&table(*family), &layout::TRAFFIC).await {
                Ok(read) => all.extend(known.state.traffic(&read).map(|(id, counted)| (id.clone(), counted))),
                Err(error) => {
                    debug!(?family, "what was counted cannot be read: {error}");
                    return None;
                }
            }
        }
        Some(all)
    }

    /// Finds out whether the kernel could be written now, by a question that only those who may write can ask.
    pub async fn probe(&mut self) -> Result<(), SyncError> {
        for family in self.families.clone() {
            self.client.exists(&table(family)).await.map_err(|error| failed(family, &error))?;
        }
        Ok(())
    }
}

fn adopted(plan: &Plan, node: &NodePlan, read: Option<&Installed>) -> State {
    let nothing = Ruleset::new(table(node.family));
    State::adopt(plan, node, read.map_or(&nothing, |read| &read.ruleset))
}

impl Known {
    /// An error, with the Services that it is about.
    fn failed(&self, error: &Error) -> SyncError {
        let mut failed = failed(self.state.family(), error);
        let refusals = if let Error::Refused(refusals) = error { refusals.as_slice() } else { &[] };
        let origins: BTreeSet<Origin> = refusals.iter().filter_map(|refusal| refusal.origin).collect();
        let names: BTreeSet<String> =
            origins.into_iter().filter_map(|origin| self.state.port(origin)).map(PortId::text).collect();
        if !names.is_empty() {
            let names: Vec<_> = names.into_iter().collect();
            failed.message = format!("{} (for {})", failed.message, names.join(", "));
        }
        failed
    }

    /// Says once what cannot be done.
    fn report_limits(&mut self, family: IpFamily) {
        let limits = self.state.limits();
        for (id, limit) in limits {
            if self.limits.get(id) != Some(limit) {
                warn!(?family, service = id.text(), "{limit}");
            }
        }
        if self.limits != *limits {
            self.limits = limits.clone();
        }
    }
}

/// A failure in words.
pub(crate) fn failed(family: IpFamily, error: &Error) -> SyncError {
    let failure = match error {
        Error::Refused(_) | Error::RefusedWhole(_) => SyncFailure::RestoreFailed,
        _ => SyncFailure::SyncFailed,
    };
    SyncError { family, failure, message: error.to_string() }
}

/// Which of these families have a table of ours in the network namespace of this thread.
pub async fn installed(families: &[IpFamily]) -> Result<Vec<IpFamily>, Error> {
    client::installed(families, table).await
}

/// Removes our tables of these families. Touches nothing else; what is not there is no error. Returns whether an anchor is left;
/// calling this again removes it once it is not needed, and so does a data plane.
pub async fn cleanup(families: &[IpFamily], connections: Connections) -> Result<bool, SyncError> {
    let mut anchored = false;
    for family in families.iter().copied() {
        let remove = async {
            if installed(&[family]).await?.is_empty() {
                return Ok(false);
            }
            let mut transaction = Transaction::default();
            transaction.push(Operation::DeleteTable, Origin::NONE);
            let anchor = connections.need_anchor(family).await;
            if anchor {
                transaction.operations.extend(layout::anchor(family).load().operations);
            }
            Client::open()?.apply(&table(family), Arc::new(transaction)).await?;
            Ok(anchor)
        };
        anchored |= remove.await.map_err(|error| failed(family, &error))?;
    }
    Ok(anchored)
}
