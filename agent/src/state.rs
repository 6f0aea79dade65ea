//! What the agent knows about itself: the snapshot that the sync loop publishes after each step.
//!
//! In: nothing; `sync` and `watch` fill these types. Out: read by [`crate::status`], [`crate::health`], `http` and the
//! admin socket, none of which ever ask the sync loop anything, so that none of them can hold it up.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;
use tokio::time::Instant;

use crate::config::{Rejection, Tampering};
use crate::kernel::SyncError;
use crate::plan::NoLocal;

/// Where changes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// Services.
    Services,
    /// EndpointSlices.
    EndpointSlices,
    /// The own Node.
    Node,
    /// The own ConfigMap.
    NodeConfig,
    /// The cluster's address blocks for ClusterIPs.
    ServiceCidrs,
}

impl Source {
    /// The sources without which nothing is written to the kernel.
    pub const REQUIRED: [Self; 4] = [Self::Services, Self::EndpointSlices, Self::Node, Self::NodeConfig];

    /// Plural and API group, as RBAC rules name them.
    #[must_use]
    pub fn resource(self) -> (&'static str, &'static str) {
        match self {
            Self::Services => ("services", ""),
            Self::EndpointSlices => ("endpointslices", "discovery.k8s.io"),
            Self::Node => ("nodes", ""),
            Self::NodeConfig => ("configmaps", ""),
            Self::ServiceCidrs => ("servicecidrs", "networking.k8s.io"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Services => "Services",
            Self::EndpointSlices => "EndpointSlices",
            Self::Node => "the Node",
            Self::NodeConfig => "the node's ConfigMap",
            Self::ServiceCidrs => "ServiceCIDRs",
        })
    }
}

/// How one watch is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WatchState {
    /// Whether its first list is complete.
    pub listed: bool,
    /// Since when it has only failed, and what the last failure said.
    pub failing: Option<(Instant, String)>,
}

/// How all watches are doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Watches(pub BTreeMap<Source, WatchState>);

/// Whether load balancers should send traffic to this node, as far as its Node object says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeEligibility {
    /// The Node object has been seen and not been deleted since.
    pub exists: bool,
    /// It is being deleted.
    pub deleting: bool,
    /// The cluster autoscaler is about to remove it.
    pub to_be_deleted: bool,
}

impl NodeEligibility {
    /// All of it in one word.
    #[must_use]
    pub fn eligible(self) -> bool {
        self.exists && !self.deleting && !self.to_be_deleted
    }
}

/// Whether this node can run what it is told to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compatibility {
    /// Nothing has been asked of it yet.
    Unknown,
    /// It runs the mode that was asked for.
    Supported,
    /// It runs one of `fallbackModes`; why not the first choice.
    Fallback(String),
    /// It cannot: reason and message.
    Incompatible(Rejection),
}

/// The configuration: what was asked for and what is in force.
#[derive(Clone, Debug, Default)]
pub struct ConfigState {
    /// The revision in the ConfigMap.
    pub assigned: Option<String>,
    /// Hash of its bytes, if they can be obeyed.
    pub assigned_hash: Option<String>,
    /// The revision in the kernel, read back.
    pub active: Option<String>,
    /// Hash of its bytes.
    pub active_hash: Option<String>,
    /// The revision that last reached the kernel and was read back there.
    pub last_known_good: Option<String>,
    /// The assigned revision, if it was refused, and why.
    pub rejected: Option<(Option<String>, Rejection)>,
    /// Whose bytes they are.
    pub tampering: Tampering,
    /// Which Services are watched: those with this proxy name. Nothing until a configuration says.
    pub service_proxy_name: Option<String>,
    /// What the plan is made with; published for the listeners, which follow it live.
    pub in_force: Option<Arc<NodeProxyConfiguration>>,
}

/// One IP family's writes.
#[derive(Clone, Debug, Default)]
pub struct FamilyState {
    /// The oldest change that the kernel does not hold yet.
    pub oldest_queued: Option<Instant>,
    /// The last successful write.
    pub last_updated: Option<Timestamp>,
    /// Failed writes since then.
    pub consecutive_failures: u32,
    /// What the last failed one said; none after a success.
    pub last_error: Option<SyncError>,
}

/// Foreign changes to our kernel state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DriftState {
    /// The last look.
    pub last_check: Option<Timestamp>,
    /// How often something was changed, since the start.
    pub foreign_changes: u32,
    /// How often it was repaired.
    pub repairs: u32,
    /// What differed last.
    pub last_diff: Option<String>,
    /// Whether the kernel differs now.
    pub differs: bool,
    /// Why the last look or repair failed.
    pub error: Option<String>,
}

/// Time from a change in the API to the kernel, over the last changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyState {
    /// The 99th percentile in milliseconds.
    pub p99_milliseconds: Option<u64>,
    /// The services whose last change took longest, longest first.
    pub slowest: Vec<(String, u64)>,
}

/// Everything at once.
#[derive(Clone, Debug)]
pub struct SyncState {
    /// When the agent started.
    pub started: Timestamp,
    /// Lists that are still to come.
    pub waiting: Vec<Source>,
    /// The configuration.
    pub config: ConfigState,
    /// The mode that serves now.
    pub mode: Option<Mode>,
    /// Whether the node can run it.
    pub compatibility: Compatibility,
    /// Families that are served, primary first.
    pub family_order: Vec<IpFamily>,
    /// Version and flavour of the iptables tools.
    pub iptables_version: Option<String>,
    /// Services in the plan.
    pub services: usize,
    /// Endpoints in the plan.
    pub endpoints: usize,
    /// Rules in the kernel.
    pub rules: usize,
    /// Per family.
    pub families: BTreeMap<IpFamily, FamilyState>,
    /// When the last write of everything succeeded.
    pub last_full: Option<Timestamp>,
    /// How long the last write took, in milliseconds.
    pub last_duration_milliseconds: u64,
    /// Whether what the kernel holds has been read back and is what the plan says.
    pub verified: bool,
    /// Foreign changes.
    pub drift: DriftState,
    /// Settings of the kernel that are not as configured, in words.
    pub settings: Vec<String>,
    /// NodePorts that are not served on loopback addresses although they should be, in words.
    pub localhost: Vec<String>,
    /// Endpoints that a proxy gives a rest because they cannot be reached from here: Service port and address.
    pub resting: Vec<String>,
    /// Service ports that the mode cannot serve as they should be, in words.
    pub limits: Vec<String>,
    /// Latency.
    pub latency: LatencyState,
    /// Objects and parts of objects that were skipped because they make no sense.
    pub skipped: u64,
    /// Packets dropped because connection tracking calls them invalid.
    pub invalid_dropped: u64,
    /// Services that name a frontend which another one has.
    pub conflicts: usize,
    /// Service ports whose policy Local finds no endpoint on this node, by family.
    pub no_local: BTreeMap<IpFamily, NoLocal>,
}

impl SyncState {
    /// The state before anything has happened.
    #[must_use]
    pub fn new(started: Timestamp) -> Self {
        Self {
            started,
            waiting: Source::REQUIRED.to_vec(),
            config: ConfigState::default(),
            mode: None,
            compatibility: Compatibility::Unknown,
            family_order: Vec::new(),
            iptables_version: None,
            services: 0,
            endpoints: 0,
            rules: 0,
            families: BTreeMap::new(),
            last_full: None,
            last_duration_milliseconds: 0,
            verified: false,
            drift: DriftState::default(),
            settings: Vec::new(),
            localhost: Vec::new(),
            resting: Vec::new(),
            limits: Vec::new(),
            latency: LatencyState::default(),
            skipped: 0,
            invalid_dropped: 0,
            conflicts: 0,
            no_local: BTreeMap::new(),
        }
    }

    /// The last successful write, if all families have had one.
    #[must_use]
    pub fn last_sync(&self) -> Option<Timestamp> {
        self.families.values().map(|family| family.last_updated).min().flatten()
    }

    /// Failed writes since the last success, of the family that is worst off.
    #[must_use]
    pub fn consecutive_failures(&self) -> u32 {
        self.families.values().map(|family| family.consecutive_failures).max().unwrap_or(0)
    }

    /// The failure to report, if the last write of any family failed.
    #[must_use]
    pub fn error(&self) -> Option<&SyncError> {
        self.families.values().find_map(|family| family.last_error.as_ref())
    }
}
