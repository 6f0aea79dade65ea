//! What every mode's writer reports about its writes to the kernel.
//!
//! In: nothing. Out: the words in which `iptables` (and the modes to come) tell the sync loop how a write went, so that
//! status, metrics and health say the same in every mode.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use thiserror::Error;

use crate::conntrack::Target;

/// How much of the kernel a look takes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All that is ours.
    Everything,
    /// What somebody else may have changed since it was last seen to be right.
    Suspects,
}

/// What the kernel has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// How many packets.
    pub packets: u64,
    /// Their bytes, from the IP header on.
    pub bytes: u64,
}

/// A write that succeeded: from here on the kernel holds what the plan says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Whether everything was written, not only what changed.
    pub full: bool,
    /// Rules that we hold now, by family and table; in mode nftables elements of sets and maps, which are what grows.
    pub rules: BTreeMap<(IpFamily, &'static str), usize>,
    /// The same that this write contained.
    pub written: BTreeMap<(IpFamily, &'static str), usize>,
    /// UDP and SCTP frontends that the kernel served before, as far as it was read, whether or not the plan has them. Also of
    /// families whose write has failed.
    pub served: Vec<(IpFamily, Target)>,
    /// Service ports that the mode cannot serve as they should be, in words.
    pub limits: Vec<String>,
    /// Time spent in each family.
    pub duration: BTreeMap<IpFamily, Duration>,
}

impl Synced {
    /// Rules that we hold, over all families and tables.
    #[must_use]
    pub fn total_rules(&self) -> usize {
        self.rules.values().sum()
    }
}

/// Why a write failed, in one word: the reason of the condition Synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncFailure {
    /// Another program held the xtables lock for too long.
    LockTimeout,
    /// The kernel or the tool refused the rules.
    RestoreFailed,
    /// A tool could not be started.
    ToolMissing,
    /// Anything else.
    SyncFailed,
}

impl fmt::Display for SyncFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LockTimeout => "LockTimeout",
            Self::RestoreFailed => "RestoreFailed",
            Self::ToolMissing => "ToolMissing",
            Self::SyncFailed => "SyncFailed",
        })
    }
}

/// A write that failed. What the kernel holds is unknown until the next write has read it back.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{family:?}: {message}")]
pub struct SyncError {
    /// The family whose write failed. The other family is written all the same.
    pub family: IpFamily,
    /// Why, in one word.
    pub failure: SyncFailure,
    /// Why, and what to do next.
    pub message: String,
}
