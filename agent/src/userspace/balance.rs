//! Chooses an endpoint for a new connection.
//!
//! In: the endpoints that the plan allows, those that were tried already, and how earlier attempts went. Out: one endpoint, or none if
//! all were tried. Pure: time is handed in.
//!
//! An endpoint has the weight that the plan gives it, times its [`Health::share`]: a tenth for one that has just come back. Endpoints
//! that rest are passed over while there are others; if all rest, resting is no better than trying.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::time::Duration;

use pointsman_crds::settings::UserspaceScheduler;
use tokio::time::Instant;

use super::health::Health;

/// The endpoints of one Service port.
#[derive(Debug, Default)]
pub struct Balancer {
    endpoints: BTreeMap<SocketAddr, Endpoint>,
}

#[derive(Debug)]
struct Endpoint {
    health: Health,
    /// As the plan says.
    weight: NonZeroU16,
    /// Connections that are open.
    open: u32,
    /// What round robin owes it.
    credit: i64,
    /// Whether the plan still has it. It is forgotten when its last connection has ended.
    gone: bool,
}

impl Balancer {
    /// Takes over the endpoints of a plan. What is known of those that stay is kept.
    pub fn set(&mut self, endpoints: impl IntoIterator<Item = (SocketAddr, NonZeroU16)>) {
        self.endpoints.values_mut().for_each(|endpoint| endpoint.gone = true);
        for (address, weight) in endpoints {
            let endpoint = self.endpoints.entry(address).or_insert_with(|| Endpoint::new(weight));
            endpoint.weight = weight;
            endpoint.gone = false;
        }
        self.endpoints.retain(|_, endpoint| !endpoint.gone || endpoint.open > 0);
    }

    /// Whether an endpoint is fit for new connections.
    #[must_use]
    pub fn is_fit(&self, address: SocketAddr, now: Instant) -> bool {
        self.endpoints.get(&address).is_some_and(|endpoint| !endpoint.health.rests(now))
    }

    /// Chooses one of `among` that is not one of `tried`.
    pub fn choose(
        &mut self,
        scheduler: UserspaceScheduler,
        among: &[SocketAddr],
        tried: &[SocketAddr],
        now: Instant,
    ) -> Option<SocketAddr> {
        let untried: Vec<SocketAddr> =
            among.iter().copied().filter(|address| !tried.contains(address)).collect();
        let mut fit: Vec<SocketAddr> =
            untried.iter().copied().filter(|address| self.is_fit(*address, now)).collect();
        if fit.is_empty() {
            fit = untried;
        }
        match scheduler {
            UserspaceScheduler::Rr => self.next_in_turn(&fit),
            UserspaceScheduler::Lc => {
                let least =
                    fit.iter().filter_map(|address| Some(self.endpoints.get(address)?.load())).min()?;
                fit.retain(|address| {
                    self.endpoints.get(address).is_some_and(|endpoint| endpoint.load() == least)
                });
                self.next_in_turn(&fit)
            }
        }
    }

    /// Smooth weighted round robin: everybody is owed its weight, who is owed most is next and owes all weights. Equal weights take
    /// turns, unequal ones are spread evenly.
    fn next_in_turn(&mut self, fit: &[SocketAddr]) -> Option<SocketAddr> {
        let (mut total, mut best) = (0, None::<(i64, SocketAddr)>);
        for address in fit {
            let Some(endpoint) = self.endpoints.get_mut(address) else { continue };
            let weight = i64::from(endpoint.share());
            total += weight;
            endpoint.credit += weight;
            if best.is_none_or(|(credit, _)| endpoint.credit > credit) {
                best = Some((endpoint.credit, *address));
            }
        }
        let (_, chosen) = best?;
        if let Some(endpoint) = self.endpoints.get_mut(&chosen) {
            // What is owed to endpoints that were passed over for long must not become a burst.
            endpoint.credit = (endpoint.credit - total).clamp(-total, total);
        }
        Some(chosen)
    }

    /// A connection to an endpoint begins.
    pub fn opened(&mut self, address: SocketAddr) {
        if let Some(endpoint) = self.endpoints.get_mut(&address) {
            endpoint.open += 1;
        }
    }

    /// It has ended.
    pub fn closed(&mut self, address: SocketAddr) {
        if let Some(endpoint) = self.endpoints.get_mut(&address) {
            endpoint.open = endpoint.open.saturating_sub(1);
            if endpoint.gone && endpoint.open == 0 {
                self.endpoints.remove(&address);
            }
        }
    }

    /// An endpoint was reached. Returns whether that ends its rest.
    pub fn succeeded(&mut self, address: SocketAddr, now: Instant) -> bool {
        self.endpoints.get_mut(&address).is_some_and(|endpoint| {
            let rested = endpoint.health.rests(now);
            endpoint.health.succeeded();
            rested
        })
    }

    /// An endpoint was not reached. Returns how long it rests, if it does so from now on.
    pub fn failed(&mut self, address: SocketAddr, now: Instant) -> Option<Duration> {
        self.endpoints.get_mut(&address)?.health.failed(now)
    }

    /// The endpoints that rest.
    pub fn resting(&self, now: Instant) -> impl Iterator<Item = SocketAddr> {
        let resting =
            self.endpoints.iter().filter(move |(_, endpoint)| !endpoint.gone && endpoint.health.rests(now));
        resting.map(|(address, _)| *address)
    }
}

impl Endpoint {
    fn new(weight: NonZeroU16) -> Self {
        Self { health: Health::default(), weight, open: 0, credit: 0, gone: false }
    }

    /// What it gets of new connections.
    fn share(&self) -> u32 {
        u32::from(self.weight.get()) * self.health.share()
    }

    /// Connections for its share, in small units.
    fn load(&self) -> u64 {
        (u64::from(self.open) << 32) / u64::from(self.share())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::health::{FAILURES, FIRST_REST, FULL_SHARE};
    use super::*;
    use UserspaceScheduler::{Lc, Rr};

    fn addresses(count: u8) -> Vec<SocketAddr> {
        (1..=count).map(|number| SocketAddr::from(([10, 0, 0, number], 80))).collect()
    }

    fn balancer(addresses: &[SocketAddr]) -> Balancer {
        let mut balancer = Balancer::default();
        balancer.set(addresses.iter().map(|address| (*address, NonZeroU16::MIN)));
        balancer
    }

    fn count(
        balancer: &mut Balancer,
        among: &[SocketAddr],
        times: usize,
        now: Instant,
    ) -> BTreeMap<SocketAddr, usize> {
        let mut counts = BTreeMap::new();
        for _ in 0..times {
            *counts.entry(balancer.choose(Rr, among, &[], now).unwrap()).or_default() += 1;
        }
        counts
    }

    #[test]
    fn least_connections_goes_where_the_fewest_are_open() {
        let all = addresses(3);
        let (mut balancer, now) = (balancer(&all), Instant::now());
        balancer.opened(all[0]);
        balancer.opened(all[0]);
        balancer.opened(all[2]);
        assert_eq!(balancer.choose(Lc, &all, &[], now), Some(all[1]));
        balancer.opened(all[1]);
        balancer.closed(all[0]);
        let next: Vec<_> = (0..3).map(|_| balancer.choose(Lc, &all, &[], now).unwrap()).collect();
        assert_eq!(
            next.iter().collect::<std::collections::BTreeSet<_>>().len(),
            3,
            "equals take turns: {next:?}"
        );
    }

    #[test]
    fn an_endpoint_that_fails_rests_and_comes_back_gently() {
        let all = addresses(2);
        let (mut balancer, mut now) = (balancer(&all), Instant::now());
        for _ in 0..FAILURES {
            balancer.failed(all[0], now);
        }
        assert_eq!(balancer.resting(now).collect::<Vec<_>>(), [all[0]]);
        assert_eq!(count(&mut balancer, &all, 100, now), BTreeMap::from([(all[1], 100)]));
        assert_eq!(balancer.choose(Rr, &all, &[all[1]], now), Some(all[0]), "better than nobody");
        now += FIRST_REST;
        let counts = count(&mut balancer, &all, 110, now);
        assert!((8..=12).contains(&counts[&all[0]]), "a tenth of a share: {counts:?}");
        for _ in 0..FULL_SHARE {
            balancer.succeeded(all[0], now);
        }
        let counts = count(&mut balancer, &all, 100, now);
        assert!((48..=52).contains(&counts[&all[0]]), "{counts:?}");
    }

    #[test]
    fn an_endpoint_that_is_gone_is_remembered_until_its_last_connection_ends() {
        let all = addresses(2);
        let mut balancer = balancer(&all);
        balancer.opened(all[0]);
        balancer.set([(all[1], NonZeroU16::MIN)]);
        assert_eq!(balancer.endpoints.len(), 2);
        balancer.closed(all[0]);
        assert_eq!(balancer.endpoints.len(), 1);
    }

    #[test]
    fn weights_decide_how_many_connections_an_endpoint_gets() {
        let (all, now) = (addresses(2), Instant::now());
        let weights = |first, second| {
            let weights = [first, second].map(|weight| NonZeroU16::new(weight).unwrap());
            all.iter().copied().zip(weights)
        };
        let mut balancer = Balancer::default();
        balancer.set(weights(3, 1));
        let counts = count(&mut balancer, &all, 40, now);
        assert_eq!((counts[&all[0]], counts[&all[1]]), (30, 10));
        let mut open = BTreeMap::<_, usize>::new();
        for _ in 0..40 {
            let chosen = balancer.choose(Lc, &all, &[], now).unwrap();
            balancer.opened(chosen);
            *open.entry(chosen).or_default() += 1;
        }
        assert_eq!((open[&all[0]], open[&all[1]]), (30, 10));
        balancer.set(weights(65_535, 65_535));
        let counts = count(&mut balancer, &all, 40, now);
        assert_eq!(counts[&all[0]], 20, "a weight that changes counts from then on");
    }

    proptest! {
        #[test]
        fn round_robin_gives_everybody_the_same(size in 1u8..20, rounds in 1usize..10) {
            let all = addresses(size);
            let counts = count(&mut balancer(&all), &all, usize::from(size) * rounds, Instant::now());
            prop_assert_eq!(counts.len(), usize::from(size));
            prop_assert!(counts.values().all(|times| *times == rounds));
        }

        #[test]
        fn every_endpoint_is_tried_once_and_then_nobody(
            size in 0u8..10, failing in proptest::collection::vec(0usize..10, 0..40), least: bool
        ) {
            let all = addresses(size);
            let (mut balancer, now) = (balancer(&all), Instant::now());
            for index in failing {
                if let Some(address) = all.get(index) {
                    balancer.failed(*address, now);
                }
            }
            let resting: Vec<_> = balancer.resting(now).collect();
            let scheduler = if least { Lc } else { Rr };
            let mut tried = Vec::new();
            while let Some(next) = balancer.choose(scheduler, &all, &tried, now) {
                prop_assert!(!tried.contains(&next));
                tried.push(next);
            }
            prop_assert_eq!(tried.len(), all.len());
            // Those that rest come last.
            let fit = all.len() - resting.len();
            prop_assert!(tried[fit..].iter().all(|address| resting.contains(address)));
        }

        #[test]
        fn changing_subsets_never_lead_elsewhere_nor_to_bursts(
            subsets in proptest::collection::vec(1u8..=15, 1..200)
        ) {
            let all = addresses(4);
            let (mut balancer, now) = (balancer(&all), Instant::now());
            for bits in subsets {
                let among: Vec<_> = (0..4).filter(|bit| bits & (1 << bit) != 0).map(|bit| all[bit]).collect();
                let chosen = balancer.choose(Rr, &among, &[], now).unwrap();
                prop_assert!(among.contains(&chosen));
            }
            let counts = count(&mut balancer, &all, 400, now);
            prop_assert!(counts.values().all(|times| (80..=120).contains(times)), "{:?}", counts);
        }
    }
}
