//! The kernel's settings that follow the configuration: connection tracking, and routing to 127.0.0.0/8.
//!
//! In: what the configuration asks for ([`Settings`]), what the kernel has ([`read`]), and the number of processors.
//! Out: the writes that are missing ([`plan`], pure), then what was written and what could not be ([`apply`]). A change of
//! the configuration is another call; nothing restarts. The failures name each setting, its value and the value it should
//! have; none is a reason not to serve.
//!
//! `/proc/sys` is read-only in an unprivileged container. What is written here is all below `net`, which `NET_ADMIN` may
//! write through another mount of it (reference §1.2; kube-proxy runs privileged for this).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use pointsman_crds::node_config::NodeConntrack;
use thiserror::Error;

/// More entries than this are never asked for; whoever needs them sets them on the node.
pub const LARGEST_TABLE: u32 = 1_048_576;

/// Entries for each bucket of the hash table, at most.
const ENTRIES_PER_BUCKET: u32 = 4;

/// One setting of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Setting {
    /// Entries in the table.
    Max,
    /// Buckets of the table.
    HashSize,
    /// Timeout of idle established TCP connections, in seconds.
    TcpEstablishedTimeout,
    /// Timeout of half-closed TCP connections, in seconds.
    TcpCloseWaitTimeout,
    /// Whether TCP segments outside the window are accepted.
    TcpBeLiberal,
    /// Timeout of UDP before a reply, in seconds.
    UdpTimeout,
    /// Timeout of UDP flows with replies, in seconds.
    UdpStreamTimeout,
    /// Whether packets to 127.0.0.0/8 are routed, which `NodePorts` on 127.0.0.1 need.
    RouteLocalnet,
}

impl Setting {
    /// All of them, in the order in which they are written.
    pub const ALL: [Self; 8] = [
        Self::Max,
        Self::HashSize,
        Self::TcpEstablishedTimeout,
        Self::TcpCloseWaitTimeout,
        Self::TcpBeLiberal,
        Self::UdpTimeout,
        Self::UdpStreamTimeout,
        Self::RouteLocalnet,
    ];

    /// The file, below the directory of the settings.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Max => "net/netfilter/nf_conntrack_max",
            Self::HashSize => "net/netfilter/nf_conntrack_buckets",
            Self::TcpEstablishedTimeout => "net/netfilter/nf_conntrack_tcp_timeout_established",
            Self::TcpCloseWaitTimeout => "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
            Self::TcpBeLiberal => "net/netfilter/nf_conntrack_tcp_be_liberal",
            Self::UdpTimeout => "net/netfilter/nf_conntrack_udp_timeout",
            Self::UdpStreamTimeout => "net/netfilter/nf_conntrack_udp_timeout_stream",
            Self::RouteLocalnet => "net/ipv4/conf/all/route_localnet",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path().replace('/', "."))
    }
}

/// What a configuration asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Connection tracking.
    pub conntrack: NodeConntrack,
    /// Whether packets to 127.0.0.0/8 must be routed. To be asked for only once others are kept from sending there.
    pub route_localnet: bool,
}

/// What the kernel has. A setting that cannot be read is absent.
pub type Current = BTreeMap<Setting, u32>;

/// A setting that has to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Which one.
    pub setting: Setting,
    /// Its value, if it can be read.
    pub current: Option<u32>,
    /// The value it should have.
    pub wanted: u32,
}

/// What a call did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The settings that have changed.
    pub written: Vec<Write>,
    /// The settings that should have, and did not.
    pub failed: Vec<WriteError>,
}

/// A setting that does not have the value that the configuration asks for.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{} is {}, should be {}: {cause}", write.setting, Shown(write.current), write.wanted)]
pub struct WriteError {
    /// What was to be written.
    pub write: Write,
    /// Why it was not.
    #[source]
    pub cause: Cause,
}

/// Why a setting could not be written.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Cause {
    /// A read-only mount, or a setting that only the first network namespace has.
    #[error(
        "not writable from here; mount the node's /proc/sys/net as the chart does, or set it on the node"
    )]
    NotWritable,
    /// The kernel does not have the setting.
    #[error("the kernel does not have this setting; load the kernel module nf_conntrack on the node")]
    Missing,
    /// Anything else.
    #[error("the kernel refused the value: {0}")]
    Refused(String),
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => Self::NotWritable,
            io::ErrorKind::NotFound => Self::Missing,
            _ => Self::Refused(error.to_string()),
        }
    }
}

struct Shown(Option<u32>);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("unknown"),
        }
    }
}

/// The settings that have to change.
///
/// `on` are switches that this process has turned on: only those are turned off again. The table is raised and never
/// lowered, and a timeout of 0 leaves the kernel's value.
#[must_use]
pub fn plan(settings: &Settings, on: &BTreeSet<Setting>, current: &Current, cpus: u32) -> Vec<Write> {
    let config = &settings.conntrack;
    let mut writes = Vec::new();
    let mut want = |setting: Setting, wanted: u32, fits: fn(u32, u32) -> bool| {
        let current = current.get(&setting).copied();
        if !current.is_some_and(|current| fits(current, wanted)) {
            writes.push(Write { setting, current, wanted });
        }
    };
    let at_least = |current, wanted| current >= wanted;
    let exactly = |current, wanted| current == wanted;
    if let Some(max) = table_size(config, cpus) {
        want(Setting::Max, max, at_least);
        want(Setting::HashSize, max / ENTRIES_PER_BUCKET, at_least);
    }
    for (setting, seconds) in [
        (Setting::TcpEstablishedTimeout, config.tcp_established_timeout_seconds),
        (Setting::TcpCloseWaitTimeout, config.tcp_close_wait_timeout_seconds),
        (Setting::UdpTimeout, config.udp_timeout_seconds),
        (Setting::UdpStreamTimeout, config.udp_stream_timeout_seconds),
    ] {
        if seconds > 0 {
            want(setting, seconds, exactly);
        }
    }
    for (setting, wanted) in
        [(Setting::TcpBeLiberal, config.tcp_be_liberal), (Setting::RouteLocalnet, settings.route_localnet)]
    {
        if wanted || on.contains(&setting) {
            want(setting, wanted.into(), exactly);
        }
    }
    writes
}

/// The least size of the table, or `None` to leave it.
fn table_size(config: &NodeConntrack, cpus: u32) -> Option<u32> {
    (config.max_per_core > 0)
        .then(|| config.max_per_core.saturating_mul(cpus).max(config.min).min(LARGEST_TABLE))
}

/// What the kernel has now. `root` is a directory like `/proc/sys`.
#[must_use]
pub fn read(root: &Path) -> Current {
    let value = |setting: Setting| fs::read_to_string(root.join(setting.path())).ok()?.trim().parse().ok();
    Setting::ALL.into_iter().filter_map(|setting| Some((setting, value(setting)?))).collect()
}

/// Makes these writes. One that fails does not keep the others from being made.
#[must_use]
pub fn apply(root: &Path, writes: &[Write]) -> Applied {
    let mut applied = Applied::default();
    for write in writes {
        match put(&root.join(write.setting.path()), write.wanted) {
            Ok(()) => applied.written.push(*write),
            Err(error) => applied.failed.push(WriteError { write: *write, cause: error.into() }),
        }
    }
    applied
}

/// Never creates the file: a setting that the kernel does not have is an error.
fn put(path: &Path, value: u32) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(path)?.write_all(value.to_string().as_bytes())
}

/// The settings of one node, as far as this process has changed them.
#[derive(Clone, Debug)]
pub struct Sysctls {
    root: PathBuf,
    /// Switches that were off before this process turned them on.
    on: BTreeSet<Setting>,
}

impl Sysctls {
    /// The settings below `root`, a directory like `/proc/sys`.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), on: BTreeSet::new() }
    }

    /// Reads, plans and applies: at the start, and at each change of the configuration.
    #[must_use]
    pub fn reconcile(&mut self, settings: &Settings, cpus: u32) -> Applied {
        let applied = apply(&self.root, &plan(settings, &self.on, &read(&self.root), cpus));
        for write in &applied.written {
            if matches!(write.setting, Setting::TcpBeLiberal | Setting::RouteLocalnet) {
                if write.wanted == 0 {
                    self.on.remove(&write.setting)
                } else {
                    self.on.insert(write.setting)
                };
            }
        }
        applied
    }
}

/// The processors of the node. Not those that this process may use: the table is the whole node's.
#[must_use]
pub fn cpus() -> u32 {
    fs::read_to_string("/sys/devices/system/cpu/online")
        .ok()
        .and_then(|ranges| count_cpus(&ranges))
        .or_else(|| u32::try_from(std::thread::available_parallelism().map_or(1, NonZeroUsize::get)).ok())
        .unwrap_or(1)
}

/// Counts a list such as `0-3,8`.
fn count_cpus(ranges: &str) -> Option<u32> {
    let mut count = 0_u32;
    for range in ranges.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

#[cfg(test)]
mod tests;
