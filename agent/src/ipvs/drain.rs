//! Real servers that leave gracefully: without new connections until the running ones have ended.
//!
//! In: endpoints that are not wanted any more, with what the kernel has of them, and the time. Out: the operations that take
//! them out: weight 0 first, removal when no connection is left or the time is over. Pure.
//!
//! UDP has no connections that end, and leaves at once, as with kube-proxy: its flows are led to another endpoint. So does every real
//! server under `dh`, which turns away the clients of one with weight 0 instead of choosing another.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use pointsman_crds::settings::IpvsScheduler;

use super::server::{InstalledReal, Key, Operation, RealServer, Settings, scheduler_name};
use crate::model::Protocol;

/// How often to look whether connections are left.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Connections that last longer are cut. As long as the kernel keeps a connection without packets.
pub const AT_MOST: Duration = Duration::from_mins(15);

/// The real servers that are leaving.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    leaving: BTreeMap<Key, BTreeMap<SocketAddr, Instant>>,
}

impl Drain {
    /// An endpoint is not wanted any more; `reals` are what its virtual server, which has these settings, has in the kernel. One
    /// that is not among them needs nothing.
    pub fn remove(
        &mut self,
        server: Key,
        settings: &Settings,
        real: SocketAddr,
        reals: &[InstalledReal],
        now: Instant,
    ) -> Option<Operation> {
        let installed = reals.iter().find(|installed| installed.server.address == real)?;
        if !drains(&server, settings) || is_idle(installed) {
            self.forget(&server, real);
            return Some(Operation::RemoveReal { server, real });
        }
        self.leaving.entry(server).or_default().entry(real).or_insert(now);
        quiet(server, installed)
    }

    /// An endpoint is wanted again. Whether it was leaving: then it has weight 0.
    pub fn keep(&mut self, server: &Key, real: SocketAddr) -> bool {
        self.forget(server, real)
    }

    /// A virtual server is gone, and its real servers with it.
    pub fn gone(&mut self, server: &Key) {
        self.leaving.remove(server);
    }

    /// Whether an endpoint is leaving.
    #[must_use]
    pub fn is_leaving(&self, server: &Key, real: SocketAddr) -> bool {
        self.leaving.get(server).is_some_and(|reals| reals.contains_key(&real))
    }

    /// Virtual servers to look at. Usually none.
    pub fn servers(&self) -> impl Iterator<Item = &Key> {
        self.leaving.keys()
    }

    /// Real servers that are leaving.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leaving.values().map(BTreeMap::len).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Takes out those that have no connections any more, or have had their time; `reals` are what the virtual server has now.
    /// If the operations fail, the next look repeats them.
    pub fn look(&mut self, server: &Key, reals: &[InstalledReal], now: Instant) -> Vec<Operation> {
        let Some(leaving) = self.leaving.get_mut(server) else { return Vec::new() };
        let addresses: BTreeSet<_> = reals.iter().map(|installed| installed.server.address).collect();
        leaving.retain(|real, _| addresses.contains(real));
        let operations = reals
            .iter()
            .filter_map(|installed| {
                let real = installed.server.address;
                let since = leaving.get(&real)?;
                if is_idle(installed) || now.saturating_duration_since(*since) >= AT_MOST {
                    return Some(Operation::RemoveReal { server: *server, real });
                }
                quiet(*server, installed)
            })
            .collect();
        if leaving.is_empty() {
            self.leaving.remove(server);
        }
        operations
    }

    fn forget(&mut self, server: &Key, real: SocketAddr) -> bool {
        let Some(reals) = self.leaving.get_mut(server) else { return false };
        let was = reals.remove(&real).is_some();
        if reals.is_empty() {
            self.leaving.remove(server);
        }
        was
    }
}

fn drains(server: &Key, settings: &Settings) -> bool {
    // Of a mark the protocol is not known.
    let ends = !matches!(server, Key::Address { protocol: Protocol::Udp, .. });
    ends && settings.scheduler != scheduler_name(IpvsScheduler::Dh)
}

fn is_idle(installed: &InstalledReal) -> bool {
    installed.active == 0 && installed.inactive == 0
}

/// No new connections.
fn quiet(server: Key, installed: &InstalledReal) -> Option<Operation> {
    let real = RealServer { weight: 0, ..installed.server };
    (installed.server != real).then_some(Operation::EditReal { server, real })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: &str = "10.244.0.9:8080";

    fn key(protocol: Protocol) -> Key {
        Key::new(protocol, [10, 96, 0, 10].into(), 80)
    }

    fn address() -> SocketAddr {
        REAL.parse().unwrap()
    }

    fn real(weight: u32, active: u32, inactive: u32) -> InstalledReal {
        let server = RealServer { address: address(), weight };
        InstalledReal { server, plain: true, active, inactive, persistent: 0 }
    }

    fn settings(scheduler: IpvsScheduler) -> Settings {
        Settings { scheduler: scheduler_name(scheduler).into(), flags: 0, persistence: None }
    }

    fn remove(
        drain: &mut Drain,
        server: Key,
        real: SocketAddr,
        reals: &[InstalledReal],
        now: Instant,
    ) -> Option<Operation> {
        drain.remove(server, &settings(IpvsScheduler::Rr), real, reals, now)
    }

    fn removal(protocol: Protocol) -> Operation {
        Operation::RemoveReal { server: key(protocol), real: address() }
    }

    fn quieted(protocol: Protocol) -> Operation {
        Operation::EditReal { server: key(protocol), real: real(0, 0, 0).server }
    }

    #[test]
    fn ipvs_graceful_deletion_1_to_5() {
        let (tcp, now) = (Protocol::Tcp, Instant::now());
        for (name, protocol, installed, expected, leaving) in [
            ("1 without connections: now", tcp, vec![real(1, 0, 0)], Some(removal(tcp)), 0),
            ("2 active ones: weight 0", tcp, vec![real(1, 3, 0)], Some(quieted(Protocol::Tcp)), 1),
            ("3 inactive ones: weight 0", tcp, vec![real(1, 0, 3)], Some(quieted(Protocol::Tcp)), 1),
            ("4 UDP: now", Protocol::Udp, vec![real(1, 3, 3)], Some(removal(Protocol::Udp)), 0),
            ("4 SCTP: weight 0", Protocol::Sctp, vec![real(1, 3, 3)], Some(quieted(Protocol::Sctp)), 1),
            ("5 not there: nothing", tcp, vec![], None, 0),
            ("it has weight 0 already", tcp, vec![real(0, 3, 0)], None, 1),
        ] {
            let mut drain = Drain::default();
            assert_eq!(remove(&mut drain, key(protocol), address(), &installed, now), expected, "{name}");
            assert_eq!(drain.len(), leaving, "{name}");
            assert_eq!(drain.is_leaving(&key(protocol), address()), leaving == 1, "{name}");
        }
    }

    #[test]
    fn ipvs_leaving_servers_go_when_the_last_connection_does() {
        let (server, now) = (key(Protocol::Tcp), Instant::now());
        let mut drain = Drain::default();
        remove(&mut drain, server, address(), &[real(1, 2, 0)], now);
        assert_eq!(drain.servers().collect::<Vec<_>>(), [&server]);
        assert_eq!(drain.look(&server, &[real(0, 2, 0)], now), []);
        assert_eq!(drain.look(&server, &[real(0, 0, 1)], now), []);
        assert_eq!(
            drain.look(&server, &[real(7, 0, 1)], now),
            [quieted(Protocol::Tcp)],
            "somebody has given it weight"
        );
        assert_eq!(drain.look(&server, &[real(0, 0, 0)], now), [removal(Protocol::Tcp)]);
        assert_eq!(drain.len(), 1, "it may have failed");
        assert_eq!(drain.look(&server, &[], now), []);
        assert!(drain.is_empty());
    }

    #[test]
    fn ipvs_leaving_takes_no_longer_than_it_may() {
        let (server, now) = (key(Protocol::Tcp), Instant::now());
        let mut drain = Drain::default();
        remove(&mut drain, server, address(), &[real(1, 2, 0)], now);
        // Asking again does not begin anew.
        remove(&mut drain, server, address(), &[real(0, 2, 0)], now + AT_MOST / 2);
        assert_eq!(drain.look(&server, &[real(0, 2, 0)], now + AT_MOST.mul_f32(0.99)), []);
        assert_eq!(drain.look(&server, &[real(0, 2, 0)], now + AT_MOST), [removal(Protocol::Tcp)]);
    }

    #[test]
    fn ipvs_an_endpoint_that_comes_back_stays() {
        let (server, now) = (key(Protocol::Tcp), Instant::now());
        let mut drain = Drain::default();
        assert!(!drain.keep(&server, address()));
        remove(&mut drain, server, address(), &[real(1, 2, 0)], now);
        assert!(drain.keep(&server, address()) && drain.is_empty());
        assert_eq!(drain.look(&server, &[real(1, 0, 0)], now + AT_MOST), []);
        remove(&mut drain, server, address(), &[real(1, 2, 0)], now);
        drain.gone(&server);
        assert!(drain.is_empty());
        // Without connections by now, it goes at once and leaves no trace.
        remove(&mut drain, server, address(), &[real(1, 2, 0)], now);
        assert_eq!(
            remove(&mut drain, server, address(), &[real(0, 0, 0)], now),
            Some(removal(Protocol::Tcp))
        );
        assert!(drain.is_empty());
    }

    #[test]
    fn ipvs_under_dh_no_endpoint_stays_with_weight_0() {
        let (server, now) = (key(Protocol::Tcp), Instant::now());
        let mut drain = Drain::default();
        let mut remove =
            |scheduler| drain.remove(server, &settings(scheduler), address(), &[real(1, 3, 0)], now);
        assert_eq!(remove(IpvsScheduler::Sh), Some(quieted(Protocol::Tcp)));
        assert_eq!(
            remove(IpvsScheduler::Dh),
            Some(removal(Protocol::Tcp)),
            "also if the scheduler has changed"
        );
        assert!(drain.is_empty());
    }
}
