//! Taking everything of mode ipvs from a node: at once, or when its connections have ended.
//!
//! In: the tools and the families. Out: our virtual servers, local routes, chains and sets are gone, and nothing else. What is ours, the
//! sets say: they are there before anything else is, and go last.
//!
//! When another mode takes over ([`Leaving`]), new connections are led by that mode's DNAT, which comes before IPVS. What our chains
//! decided about new connections would come before it, too, and goes at once; real servers get weight 0. Connections
//! that run go on until they end, for [`DRAIN_AT_MOST`]. Until then filter refuses ports of our addresses that no Service has: they are
//! local still. UDP flows do not end, so they are led anew.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tracing::{info, warn};

use super::device::{Device, DeviceError, plan};
use super::layout::frame::{JUMPS, TABLES, is_ours};
use super::layout::sets::{self, Set};
use super::server::{Key, Operation, RealServer};
use super::write::{Failure, Servers};
use crate::conntrack::{self, Endpoints, Frontend, Job, Serving};
use crate::ipset::client::Client;
use crate::ipset::{self, Kind as _};
use crate::iptables::Tools;
use crate::iptables::batch::{Script, Section};
use crate::iptables::runner::{self, Runner};
use crate::kernel::{SyncError, SyncFailure};
use crate::model::Protocol;

/// Connections that run through IPVS for longer than this after another mode has taken over are cut.
pub(crate) const DRAIN_AT_MOST: Duration = Duration::from_hours(1);
/// Of the thread: tests have a network namespace for each.
const CONNECTIONS: &str = "/proc/thread-self/net/ip_vs_conn";

/// Which of these families have anything of ours. A kernel without ipsets has nothing.
pub async fn installed(families: &[IpFamily]) -> Vec<IpFamily> {
    let Ok(mut client) = Client::open() else { return Vec::new() };
    let names = client.names().await.unwrap_or_default();
    let has = |family: &IpFamily| Set::ALL.iter().any(|set| names.contains(&set.name(*family)));
    families.iter().copied().filter(has).collect()
}

/// Removes everything of ours in these families, with the chains of each of these flavours. What is not there is no error.
pub async fn cleanup(tools: &[Tools], families: &[IpFamily]) -> Result<(), SyncError> {
    for family in installed(families).await {
        remove(tools, family).await.map_err(|error| error.of(family))?;
        info!(?family, "virtual servers, routes, chains and sets of mode ipvs removed");
    }
    Ok(())
}

async fn remove(flavours: &[Tools], family: IpFamily) -> Result<(), Failure> {
    let mut sets = Client::open()?;
    let keys = ours(&mut sets, family).await?;
    if !keys.is_empty() {
        Servers::open()?.remove(keys.into_iter().collect()).await?;
    }
    spawn_blocking(move || remove_routes(family)).await.map_err(DeviceError::from)??;
    for tools in flavours {
        remove_from(tools, &TABLES, family).await?;
    }
    let destroy = |set: &Set| ipset::Operation::Destroy { set: set.name(family) };
    if let Err(error) = sets.apply(Set::ALL.iter().map(destroy).collect()).await {
        warn!(?family, "not all sets of mode ipvs are removed: {error}");
    }
    Ok(())
}

/// Removes our routes of a family, and the device with the last one.
fn remove_routes(family: IpFamily) -> Result<(), DeviceError> {
    let Some(mut device) = Device::find()? else { return Ok(()) };
    let changes = plan(&device.read()?, &BTreeSet::new(), &[].into(), &[family]);
    device.apply(&changes)?;
    remove_unused_device()
}

/// Removes the device if no route needs it. What kube-proxy has bound to it has one, our own anchor does not count.
pub(super) fn remove_unused_device() -> Result<(), DeviceError> {
    let Some(mut device) = Device::find()? else { return Ok(()) };
    if device.read()?.routes.is_empty() { device.remove() } else { Ok(()) }
}

/// Whether there are chains of ours in this flavour.
pub async fn has_chains(tools: &Tools, family: IpFamily) -> bool {
    let ear = Mutex::default();
    let saved = Runner::new(tools, &ear, family).read("filter").await;
    saved.is_ok_and(|saved| !saved.ours(is_ours).is_empty())
}

/// Removes our chains of this flavour, and the ways to them.
pub async fn remove_chains(tools: &Tools, family: IpFamily) -> Result<(), SyncError> {
    remove_from(tools, &TABLES, family).await.map_err(|error| runner::failure(family, &error))
}

async fn remove_from(
    tools: &Tools,
    tables: &[&'static str],
    family: IpFamily,
) -> Result<(), runner::Failure> {
    let ear = Mutex::default();
    let runner = Runner::new(tools, &ear, family);
    for table in tables {
        let saved = runner.read(table).await?;
        let mut section = Section::new(table);
        for jump in JUMPS.iter().filter(|jump| jump.table == *table) {
            saved.jumps(jump).for_each(|rule| section.delete_rule(jump.from, rule));
        }
        let mut chains = saved.ours(is_ours);
        // A chain that others' rules lead to can be emptied, not removed.
        for name in saved.needed_by_others(table, JUMPS, is_ours) {
            warn!(?family, table, chain = %name, "other programs' rules lead to this chain; it is left empty");
            chains.remove(&name);
            section.chain(name, &[]);
        }
        section.remove(&chains);
        let mut script = Script::default();
        section.finish(&mut script);
        if !script.text.is_empty() {
            runner.restore(&script).await?;
        }
    }
    Ok(())
}

async fn ours(sets: &mut Client, family: IpFamily) -> Result<BTreeSet<Key>, ipset::Error> {
    let members = sets.members::<Set>(family).await?;
    Ok(members.iter().filter_map(sets::key).collect())
}

/// What leads running connections after another mode has taken over.
#[derive(Debug)]
pub struct Leaving {
    tools: Tools,
    families: Vec<IpFamily>,
    keys: BTreeSet<Key>,
    since: Instant,
}

impl Leaving {
    /// Leaves new connections to the other mode, which serves these families already.
    pub async fn begin(tools: &Tools, families: &[IpFamily]) -> Result<Self, SyncError> {
        let mut keys = BTreeSet::new();
        for family in families {
            keys.extend(leave(tools, *family).await.map_err(|error| error.of(*family))?);
        }
        info!(servers = keys.len(), "virtual servers stay until their connections have ended");
        Ok(Self { tools: tools.clone(), families: families.to_vec(), keys, since: Instant::now() })
    }

    /// Removes everything if no connection is left, or if they have had their time. Returns whether that is done.
    pub async fn look(&self) -> Result<bool, SyncError> {
        if self.since.elapsed() < DRAIN_AT_MOST {
            let through = through(&self.keys).map_err(|error| self.failed(&error))?;
            if through > 0 {
                info!(through, "connections run through IPVS still");
                return Ok(false);
            }
        } else {
            warn!("connections through IPVS are cut: they have had their time");
        }
        cleanup(std::slice::from_ref(&self.tools), &self.families).await?;
        Ok(true)
    }

    fn failed(&self, error: &io::Error) -> SyncError {
        let family = self.families.first().copied().unwrap_or(IpFamily::IPv4);
        let message = format!("virtual servers of mode ipvs stay for now: {error}");
        SyncError { family, failure: SyncFailure::SyncFailed, message }
    }
}

async fn leave(tools: &Tools, family: IpFamily) -> Result<BTreeSet<Key>, Failure> {
    remove_from(tools, &["mangle", "nat"], family).await?;
    let mut servers = Servers::open()?;
    let keys = ours(&mut servers.sets, family).await?;
    let mut operations = Vec::new();
    for (server, reals) in servers.reals(keys.iter().copied().collect()).await? {
        for real in reals.iter().filter(|real| real.server.weight > 0) {
            let real = RealServer { weight: 0, ..real.server };
            operations.push(Operation::EditReal { server, real });
        }
    }
    if !operations.is_empty() {
        servers.client().apply(operations).await?;
    }
    let udp = keys.iter().filter_map(|key| match key {
        Key::Address { protocol: Protocol::Udp, address } => Some(Frontend::new(*address, Protocol::Udp)),
        _ => None,
    });
    let frontends = udp.map(|frontend| (frontend, Endpoints::default())).collect();
    let job = Job::new(family, Serving { frontends, ..Serving::default() });
    match spawn_blocking(move || conntrack::run(&job)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => warn!(?family, "UDP flows through IPVS end with it: {error}"),
        Err(error) => warn!(?family, "UDP flows through IPVS end with it: {error}"),
    }
    Ok(keys)
}

/// How many open TCP or SCTP connections run through these virtual servers.
pub(crate) fn through(keys: &BTreeSet<Key>) -> io::Result<usize> {
    count(fs::read_to_string(CONNECTIONS), keys)
}

fn count(table: io::Result<String>, keys: &BTreeSet<Key>) -> io::Result<usize> {
    match table {
        Ok(table) => Ok(connections(&table).filter(|key| keys.contains(key)).count()),
        // The module of the kernel is not loaded.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(io::Error::new(
            error.kind(),
            format!("whether connections run through them cannot be read from {CONNECTIONS}: {error}"),
        )),
    }
}

/// The virtual server of each open TCP or SCTP connection of IPVS:
/// `Pro FromIP FPrt ToIP TPrt DestIP DPrt State Expires …`.
fn connections(table: &str) -> impl Iterator<Item = Key> {
    table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [protocol, _, _, to, port, _, _, state, ..] = words.as_slice() else { return None };
        let protocol = match *protocol {
            "TCP" => Protocol::Tcp,
            "SCTP" => Protocol::Sctp,
            _ => return None,
        };
        // One side may have ended, and the other go on.
        if !["ESTABLISHED", "SYN_RECV", "FIN_WAIT", "CLOSE_WAIT"].contains(state) {
            return None;
        }
        let address = match u32::from_str_radix(to, 16) {
            Ok(number) => Ipv4Addr::from(number).into(),
            Err(_) => to.trim_matches(['[', ']']).parse().ok()?,
        };
        Some(Key::new(protocol, address, u16::from_str_radix(port, 16).ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syn_17_connections_through_ipvs_are_seen() {
        let head = "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n";
        let line = |protocol, state| {
            format!("{head}{protocol} C0A84D02 D1A2 0A600050 0050 0AF4000A 1F90 {state} 899\n")
        };
        let seen = |table: &str| connections(table).collect::<Vec<_>>();
        for state in ["ESTABLISHED", "FIN_WAIT   ", "CLOSE_WAIT "] {
            assert_eq!(seen(&line("TCP", state)), [Key::at(Protocol::Tcp, "10.96.0.80:80")], "{state}");
        }
        assert_eq!(seen(&line("SCTP", "ESTABLISHED")), [Key::at(Protocol::Sctp, "10.96.0.80:80")]);
        assert_eq!(seen(&line("TCP", "TIME_WAIT  ")), []);
        assert!(seen(head).is_empty() && seen("").is_empty());
        let v6 = "TCP fd00:0000:0000:0000:0000:0000:0000:0002 D1A2 fd00:0010:0096:0000:0000:0000:0000:000a 0035 \
                  fd00:0000:0000:0000:0000:0000:0000:0009 1F90 ESTABLISHED     899";
        assert_eq!(seen(v6), [Key::at(Protocol::Tcp, "[fd00:10:96::a]:53")]);
        assert_eq!(seen(&line("UDP", "ESTABLISHED")), [], "not one");
    }

    #[test]
    fn connections_that_cannot_be_read_do_not_count_as_none() {
        let keys = [Key::at(Protocol::Tcp, "10.96.0.80:80")].into();
        let open = "TCP C0A84D02 D1A2 0A600050 0050 0AF4000A 1F90 ESTABLISHED 899";
        assert_eq!(count(Ok(open.to_owned()), &keys).unwrap(), 1);
        assert_eq!(count(Ok(open.to_owned()), &BTreeSet::new()).unwrap(), 0);
        assert_eq!(count(Err(io::ErrorKind::NotFound.into()), &keys).unwrap(), 0, "no module");
        let error = count(Err(io::ErrorKind::PermissionDenied.into()), &keys).unwrap_err();
        assert!(error.to_string().contains(CONNECTIONS), "{error}");
    }
}
