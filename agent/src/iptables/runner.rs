//! Runs the tools for one family, and says why one did not do its work.
//!
//! In: restore scripts, input for `ipset`, names. Out: tables and sets, or a [`Failure`]. What to write is decided elsewhere.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;

use super::batch::Script;
use super::ear::Ear;
use super::saved::Saved;
use super::tools::{Flavour, RunError, Tools};
use tracing::debug;

use crate::ipset::{Kind, Operation, script};
use crate::kernel::{SyncError, SyncFailure};

/// How long a restore may take, besides waiting for the lock.
const RESTORE_TIMEOUT: Duration = Duration::from_mins(2);
const SAVE_TIMEOUT: Duration = Duration::from_mins(1);
/// What `ipset -` prints before it reads a line.
const PROMPT: &str = "ipset> ";
/// Lock wait, in seconds, where no configuration says otherwise.
pub(crate) const DEFAULT_LOCK_WAIT: u32 = 5;
/// Whoever only asks whether the lock can be had waits so many seconds at most: the answer is what matters then.
pub(crate) const PROBE_LOCK_WAIT: u32 = 2;

/// Runs the tools for one family.
pub(crate) struct Runner<'a> {
    tools: &'a Tools,
    ear: &'a Mutex<Ear>,
    family: IpFamily,
    lock_wait: u32,
}

/// Why a family could not be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A tool did not do its work.
    #[error(transparent)]
    Run(#[from] RunError),
    /// What others have put into a table.
    #[error(
        "table {table} holds rules that {command} cannot show; remove what other programs have put there"
    )]
    Incompatible { table: &'static str, command: String },
    /// Something else is there than was written.
    #[error("the rules differ after they were written: {0}; they are compared again at the next attempt")]
    ReadBack(String),
}

/// A failure in the words of the sync loop.
pub(crate) fn failure(family: IpFamily, error: &Failure) -> SyncError {
    SyncError { family, failure: classify(error), message: error.to_string() }
}

pub(super) fn classify(error: &Failure) -> SyncFailure {
    match error {
        Failure::Run(RunError::Start { .. }) => SyncFailure::ToolMissing,
        Failure::Run(RunError::Failed { message, .. }) if message.contains("xtables lock") => {
            SyncFailure::LockTimeout
        }
        Failure::Run(RunError::Failed { .. }) | Failure::ReadBack(_) => SyncFailure::RestoreFailed,
        Failure::Run(RunError::Timeout { .. }) | Failure::Incompatible { .. } => SyncFailure::SyncFailed,
    }
}

impl<'a> Runner<'a> {
    /// For a run without a configuration.
    pub(crate) fn new(tools: &'a Tools, ear: &'a Mutex<Ear>, family: IpFamily) -> Self {
        Self { tools, ear, family, lock_wait: DEFAULT_LOCK_WAIT }
    }

    /// Waits so many seconds for the lock.
    pub(crate) fn waiting(self, lock_wait: u32) -> Self {
        Self { lock_wait, ..self }
    }

    /// The family.
    pub(crate) fn family(&self) -> IpFamily {
        self.family
    }

    /// The tools.
    pub(crate) fn tools(&self) -> &Tools {
        self.tools
    }

    /// One table.
    pub(crate) async fn read(&self, table: &'static str) -> Result<Saved, Failure> {
        self.print(table).await.map(Saved::parse)
    }

    /// One table, as the tool prints it.
    pub(crate) async fn print(&self, table: &'static str) -> Result<String, Failure> {
        let command = self.tools.command(self.family, "-save");
        let text = self.tools.run(&command, &["-t", table], None, SAVE_TIMEOUT).await?;
        if is_incompatible(&text, table) {
            return Err(Failure::Incompatible { table, command });
        }
        Ok(text)
    }

    /// Several tables, by one process. The legacy flavour has no table before something is written to it.
    pub(crate) async fn read_each<const N: usize>(
        &self,
        tables: [&'static str; N],
    ) -> Result<[Saved; N], Failure> {
        let command = self.tools.command(self.family, "-save");
        let text = self.tools.run(&command, &[], None, SAVE_TIMEOUT).await?;
        if let Some(table) = tables.into_iter().find(|table| is_incompatible(&text, table)) {
            return Err(Failure::Incompatible { table, command });
        }
        Ok(tables.map(|table| Saved::parse(section(&text, table).to_owned())))
    }

    /// Changes tables.
    pub(crate) async fn restore(&self, script: &Script) -> Result<(), Failure> {
        let command = self.tools.command(self.family, "-restore");
        let wait = self.lock_wait.to_string();
        let args = ["--noflush", "--counters", "-w", &wait];
        let timeout = RESTORE_TIMEOUT + Duration::from_secs(self.lock_wait.into());
        let (_, process) = self.tools.run_as(&command, &args, Some(&script.text), timeout).await?;
        lock(self.ear).listen(process);
        Ok(())
    }

    /// Finds out whether tables could be changed.
    pub(crate) async fn restore_nothing(&self) -> Result<(), Failure> {
        let command = self.tools.command(self.family, "-restore");
        let lock_wait = self.lock_wait.min(PROBE_LOCK_WAIT);
        let wait = lock_wait.to_string();
        let mut args = vec!["--noflush", "-w", &wait];
        let mut input = "*nat\nCOMMIT\n";
        if self.tools.flavour() == Flavour::Legacy {
            args.push("--test");
            // It fetches the whole table even so, and this one is small.
            input = "*filter\nCOMMIT\n";
        }
        let timeout = RESTORE_TIMEOUT + Duration::from_secs(lock_wait.into());
        let (_, process) = self.tools.run_as(&command, &args, Some(input), timeout).await?;
        lock(self.ear).listen(process);
        Ok(())
    }

    /// Changes sets.
    pub(super) async fn change_sets(&self, operations: &[Operation]) -> Result<(), Failure> {
        if !operations.is_empty() {
            let input = script(operations);
            self.tools.run("ipset", &["restore", "-exist"], Some(&input), SAVE_TIMEOUT).await?;
        }
        Ok(())
    }

    /// The sets of a kind that are there, as the tool prints them.
    pub(super) async fn print_sets<S: Kind>(&self) -> String {
        let names = self.tools.run("ipset", &["list", "-name"], None, SAVE_TIMEOUT).await.unwrap_or_default();
        let ours = S::ALL.iter().map(|set| set.name(self.family));
        // One process for all, which ends at the first set that is not there. Only ours: others' may be large.
        let mut wanted = String::new();
        for set in ours.filter(|set| names.lines().any(|name| name == set)) {
            wanted.extend(["save ", &set, "\n"]);
        }
        if wanted.is_empty() {
            return wanted;
        }
        let saved = self.tools.run("ipset", &["-"], Some(&wanted), SAVE_TIMEOUT).await;
        saved.unwrap_or_default().replace(PROMPT, "")
    }

    /// Removes the sets of a kind. One that is not there, or no tool to remove it with, is no error.
    pub(super) async fn destroy_sets<S: Kind>(&self) {
        for set in S::ALL {
            let name = set.name(self.family);
            if let Err(error) = self.tools.run("ipset", &["destroy", &name], None, SAVE_TIMEOUT).await {
                debug!(set = name, %error, "set not removed");
            }
        }
    }

    /// How many members a set has, without listing them.
    pub(super) async fn set_size(&self, set: &str) -> Option<usize> {
        let args = ["list", "-terse", set];
        let text = self.tools.run("ipset", &args, None, SAVE_TIMEOUT).await.ok()?;
        text.lines().find_map(|line| line.strip_prefix("Number of entries: ")?.trim().parse().ok())
    }
}

/// Whether the tool says that it cannot show a table.
fn is_incompatible(text: &str, table: &str) -> bool {
    text.contains(&format!("Table `{table}' is incompatible, use 'nft' tool"))
}

/// What `-save` has printed of one table.
fn section<'a>(text: &'a str, table: &str) -> &'a str {
    let start = format!("*{table}\n");
    let from = if text.starts_with(&start) { Some(0) } else { text.find(&format!("\n{start}")) };
    let section = from.map(|from| &text[from..]).unwrap_or_default();
    section.split_once("\nCOMMIT\n").map_or(section, |(section, _)| section)
}

pub(super) fn lock(ear: &Mutex<Ear>) -> MutexGuard<'_, Ear> {
    ear.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_found_among_others() {
        let text = "# Generated\n*mangle\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n# Completed\n# Table `raw' is incompatible, use 'nft' tool.\n\
                    *nat\n:KUBE-A - [0:0]\n-A KUBE-A -m comment --comment \"*filter\" -j RETURN\nCOMMIT\n";
        assert_eq!(section(text, "mangle"), "\n*mangle\n:PREROUTING ACCEPT [0:0]");
        let nat = Saved::parse(section(text, "nat").to_owned());
        let rules: Vec<&str> = nat.rules("KUBE-A").unwrap().collect();
        assert_eq!(rules, ["-m comment --comment \"*filter\" -j RETURN"]);
        assert_eq!(section(text, "filter"), "");
        assert_eq!(section("*filter\nCOMMIT\n", "filter"), "*filter");
        assert!(is_incompatible(text, "raw") && !is_incompatible(text, "nat"));
    }
}
