//! The kernel's settings that follow the configuration: connection tracking, and IPVS.
//!
//! In: what the configuration asks for ([`Settings`]), what the kernel has ([`read`]), and the [`Machine`].
//! Out: the writes that are missing ([`plan`], pure), then what was written and what could not be ([`apply`]). A change of
//! the configuration is another call; nothing restarts. The failures name each setting, its value and the value it should
//! have; none is a reason not to serve.
//!
//! `/proc/sys` is read-only in an unprivileged container. What is written here is all below `net`, which `NET_ADMIN` may
//! write through another mount of it (reference §1.2; kube-proxy runs privileged for this).

use std::collections::BTreeMap;
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
    /// Whether connections of IPVS have entries of connection tracking, and so NAT and rules that follow them.
    IpvsConntrack,
    /// Whether IPVS schedules a new connection with the client port of an old one anew.
    IpvsConnReuseMode,
    /// Whether connections of IPVS end when their real server is removed, instead of losing their packets silently.
    IpvsExpireNodestConn,
    /// Whether clients that IPVS holds at a real server are free when that gets weight 0.
    IpvsExpireQuiescentTemplate,
    /// Whether packets are forwarded.
    IpForward,
    /// For which addresses ARP is answered: from 1 on, only those of the interface that was asked.
    ArpIgnore,
    /// Which addresses ARP asks with: with 2, the best one of the interface.
    ArpAnnounce,
}

impl Setting {
    /// All of them, in the order in which they are written.
    pub const ALL: [Self; 14] = [
        Self::Max,
        Self::HashSize,
        Self::TcpEstablishedTimeout,
        Self::TcpCloseWaitTimeout,
        Self::TcpBeLiberal,
        Self::UdpTimeout,
        Self::UdpStreamTimeout,
        Self::IpvsConntrack,
        Self::IpvsConnReuseMode,
        Self::IpvsExpireNodestConn,
        Self::IpvsExpireQuiescentTemplate,
        Self::IpForward,
        Self::ArpIgnore,
        Self::ArpAnnounce,
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
            Self::IpvsConntrack => "net/ipv4/vs/conntrack",
            Self::IpvsConnReuseMode => "net/ipv4/vs/conn_reuse_mode",
            Self::IpvsExpireNodestConn => "net/ipv4/vs/expire_nodest_conn",
            Self::IpvsExpireQuiescentTemplate => "net/ipv4/vs/expire_quiescent_template",
            Self::IpForward => "net/ipv4/ip_forward",
            Self::ArpIgnore => "net/ipv4/conf/all/arp_ignore",
            Self::ArpAnnounce => "net/ipv4/conf/all/arp_announce",
        }
    }

    /// The kernel module that it comes with.
    fn module(self) -> &'static str {
        if self.path().starts_with("net/ipv4/vs/") { "ip_vs" } else { "nf_conntrack" }
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
    /// What mode ipvs needs, if that is the mode.
    pub ipvs: Option<Ipvs>,
}

/// What mode ipvs asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipvs {
    /// Answer ARP only for addresses of the interface that was asked, and ask with those.
    pub strict_arp: bool,
}

/// What the values depend on besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Processors.
    pub cpus: u32,
    /// The first two numbers of the kernel's version.
    pub kernel: (u32, u32),
}

impl Machine {
    /// This one. Its processors are the node's, not those that this process may use: the table is the whole node's.
    #[must_use]
    pub fn this() -> Self {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
        let cpus = online.and_then(|ranges| count_cpus(&ranges)).or_else(|| {
            u32::try_from(std::thread::available_parallelism().map_or(1, NonZeroUsize::get)).ok()
        });
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self { cpus: cpus.unwrap_or(1), kernel: kernel_version(&release) }
    }
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

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, should be {}", self.setting, Shown(self.current), self.wanted)
    }
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
#[error("{write}: {cause}")]
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
    #[error("the kernel does not have this setting; load the kernel module {0} on the node")]
    Missing(&'static str),
    /// Anything else.
    #[error("the kernel refused the value: {0}")]
    Refused(String),
}

impl Cause {
    fn new(setting: Setting, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => Self::NotWritable,
            io::ErrorKind::NotFound => Self::Missing(setting.module()),
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
/// `before` is what switches were before this process turned them: only those are turned back. The table is raised and never
/// lowered, and a timeout of 0 leaves the kernel's value.
#[must_use]
pub fn plan(settings: &Settings, before: &Current, current: &Current, machine: Machine) -> Vec<Write> {
    let config = &settings.conntrack;
    let mut writes = Vec::new();
    let mut want = |setting: Setting, wanted: u32, fits: fn(u32, u32) -> bool| {
        let current = current.get(&setting).copied();
        if !current.is_some_and(|current| fits(current, wanted)) {
            writes.push(Write { setting, current, wanted });
        }
    };
    if let Some(max) = table_size(config, machine.cpus) {
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
    for (setting, on) in switches(settings) {
        match (on, before.get(&setting)) {
            (Some(value), _) => want(setting, value, at_least),
            (None, Some(value)) => want(setting, *value, exactly),
            (None, None) => {}
        }
    }
    if settings.ipvs.is_some() {
        for (setting, value) in ipvs(machine) {
            want(setting, value, exactly);
        }
    }
    writes
}

fn at_least(current: u32, wanted: u32) -> bool {
    current >= wanted
}

fn exactly(current: u32, wanted: u32) -> bool {
    current == wanted
}

/// What is turned back once nobody asks for it any more, with the value asked for.
fn switches(settings: &Settings) -> [(Setting, Option<u32>); 3] {
    let strict_arp = settings.ipvs.is_some_and(|ipvs| ipvs.strict_arp);
    [
        (Setting::TcpBeLiberal, settings.conntrack.tcp_be_liberal.then_some(1)),
        (Setting::ArpIgnore, strict_arp.then_some(1)),
        (Setting::ArpAnnounce, strict_arp.then_some(2)),
    ]
}

/// What mode ipvs needs (reference §3.1). It stays when the mode changes: connections that still run through IPVS need it, and
/// nobody else minds.
fn ipvs(machine: Machine) -> impl Iterator<Item = (Setting, u32)> {
    // Before 5.9, the kernel drops the first packet of a connection that reuses a client port while an old one lingers, unless
    // this is 0; then such connections go on to an endpoint that is gone. Since then 1 costs nothing. It begins with 4.1.
    let reuses = ((4, 1)..(5, 9)).contains(&machine.kernel);
    [
        (Setting::IpvsConntrack, 1),
        (Setting::IpvsExpireNodestConn, 1),
        (Setting::IpvsExpireQuiescentTemplate, 1),
        (Setting::IpForward, 1),
    ]
    .into_iter()
    .chain(reuses.then_some((Setting::IpvsConnReuseMode, 0)))
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
            Err(error) => {
                applied.failed.push(WriteError { write: *write, cause: Cause::new(write.setting, &error) });
            }
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
    /// What switches were before this process turned them.
    before: Current,
}

impl Sysctls {
    /// The settings below `root`, a directory like `/proc/sys`.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), before: Current::new() }
    }

    /// Reads, plans and applies: at the start, and at each change of the configuration.
    #[must_use]
    pub fn reconcile(&mut self, settings: &Settings, machine: Machine) -> Applied {
        let applied = apply(&self.root, &self.differing(settings, machine));
        for (setting, on) in switches(settings) {
            let Some(write) = applied.written.iter().find(|write| write.setting == setting) else { continue };
            if on.is_some() {
                self.before.entry(setting).or_insert(write.current.unwrap_or(0));
            } else {
                self.before.remove(&setting);
            }
        }
        applied
    }

    /// The settings that do not have the values that were asked for.
    #[must_use]
    pub fn differing(&self, settings: &Settings, machine: Machine) -> Vec<Write> {
        plan(settings, &self.before, &read(&self.root), machine)
    }

    /// Only what mode ipvs needs before its first virtual server: with connection tracking off, connections of IPVS would
    /// break when rules of another mode are added (docs/modes.md).
    #[must_use]
    pub fn prepare_ipvs(&self, machine: Machine) -> Applied {
        let current = read(&self.root);
        let write = |(setting, wanted)| Write { setting, current: current.get(&setting).copied(), wanted };
        let missing = ipvs(machine).map(write).filter(|write| write.current != Some(write.wanted));
        apply(&self.root, &missing.collect::<Vec<_>>())
    }
}

/// The first two numbers of a version such as `6.1.0-13-amd64`.
fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
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
