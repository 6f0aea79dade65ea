//! Which endpoint a client stays with (`sessionAffinity: ClientIP`).
//!
//! In: clients and the endpoints they were led to. Out: the endpoint to lead a client to again, if the client came back in time. Pure:
//! time is handed in. The timeout slides: every connection starts it anew. Memory is bounded: the client that has been away longest is
//! forgotten first.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::time::Instant;

/// So many clients of one Service port are remembered: about 8 MiB.
pub const CLIENTS: usize = 65_536;

/// The clients of one Service port.
#[derive(Debug)]
pub struct Affinity {
    clients: HashMap<IpAddr, Visit>,
    /// Clients by their last visit.
    order: BTreeMap<u64, IpAddr>,
    visits: u64,
    capacity: usize,
}

#[derive(Clone, Copy, Debug)]
struct Visit {
    endpoint: SocketAddr,
    at: Instant,
    number: u64,
}

impl Affinity {
    /// For at most so many clients.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { clients: HashMap::new(), order: BTreeMap::new(), visits: 0, capacity }
    }

    /// Where a client was led to within the last `timeout`.
    #[must_use]
    pub fn find(&self, client: IpAddr, timeout: Duration, now: Instant) -> Option<SocketAddr> {
        let visit = self.clients.get(&client)?;
        (now.duration_since(visit.at) < timeout).then_some(visit.endpoint)
    }

    /// A client is led to an endpoint.
    pub fn remember(&mut self, client: IpAddr, endpoint: SocketAddr, now: Instant) {
        self.visits += 1;
        let visit = Visit { endpoint, at: now, number: self.visits };
        if let Some(before) = self.clients.insert(client, visit) {
            self.order.remove(&before.number);
        }
        self.order.insert(self.visits, client);
        while self.clients.len() > self.capacity {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.clients.remove(&oldest);
        }
    }

    /// Forgets all clients.
    pub fn clear(&mut self) {
        self.clients = HashMap::new();
        self.order = BTreeMap::new();
    }
}

impl Default for Affinity {
    fn default() -> Self {
        Self::new(CLIENTS)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn client(number: u8) -> IpAddr {
        IpAddr::from([10, 1, 0, number])
    }

    fn endpoint(number: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, number], 80))
    }

    #[test]
    fn aff_2_the_timeout_slides() {
        let (mut affinity, mut now) = (Affinity::default(), Instant::now());
        for _ in 0..5 {
            affinity.remember(client(1), endpoint(1), now);
            now += Duration::from_millis(9_999);
            assert_eq!(affinity.find(client(1), TIMEOUT, now), Some(endpoint(1)));
        }
        now += Duration::from_millis(1);
        assert_eq!(affinity.find(client(1), TIMEOUT, now), None);
        assert_eq!(affinity.find(client(2), TIMEOUT, now), None);
    }

    proptest! {
        /// The same as remembering everything, except for those that have been away longest.
        #[test]
        fn a_full_table_forgets_who_has_been_away_longest(
            visits in proptest::collection::vec((0u8..8, 0u8..4), 0..100), capacity in 1usize..8
        ) {
            let (mut affinity, now) = (Affinity::new(capacity), Instant::now());
            let mut all: Vec<(u8, u8)> = Vec::new();
            for (who, whom) in visits {
                affinity.remember(client(who), endpoint(whom), now);
                all.retain(|(known, _)| *known != who);
                all.push((who, whom));
                prop_assert!(affinity.clients.len() <= capacity);
                prop_assert_eq!(affinity.clients.len(), affinity.order.len());
            }
            let kept = all.len().saturating_sub(capacity);
            for (index, (who, whom)) in all.iter().enumerate() {
                let expected = (index >= kept).then(|| endpoint(*whom));
                prop_assert_eq!(affinity.find(client(*who), TIMEOUT, now), expected);
            }
        }
    }
}
