//! How long changes take from the API to the kernel.
//!
//! In: when each change was caused and when it was in the kernel. Out: the 99th percentile and the slowest services of the last ten
//! minutes. Changes that are older than the agent say nothing about the agent and are left out.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use crate::model::ObjectName;
use crate::state::LatencyState;

const WINDOW: Duration = Duration::from_mins(10);
/// Enough for a percentile, small enough to sort after a write.
const SAMPLES: usize = 1000;
const SLOWEST: usize = 5;

#[derive(Debug)]
struct Sample {
    at: Instant,
    service: ObjectName,
    milliseconds: u64,
}

/// The changes of the last ten minutes.
#[derive(Debug)]
pub struct Latency {
    started: Timestamp,
    samples: VecDeque<Sample>,
}

impl Latency {
    /// None yet.
    pub fn new(started: Timestamp) -> Self {
        Self { started, samples: VecDeque::new() }
    }

    /// A change of `service` that was caused at `caused` is in the kernel at `now`. Returns how long that took, if it counts.
    pub fn record(&mut self, service: ObjectName, caused: Timestamp, now: Timestamp) -> Option<Duration> {
        if caused < self.started {
            return None;
        }
        // A clock of the control plane that is ahead of ours makes this negative.
        let took = Duration::try_from(now.duration_since(caused)).unwrap_or_default();
        let milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample { at: Instant::now(), service, milliseconds });
        Some(took)
    }

    /// The summary.
    pub fn summary(&mut self) -> LatencyState {
        let now = Instant::now();
        while self.samples.front().is_some_and(|old| now.saturating_duration_since(old.at) > WINDOW) {
            self.samples.pop_front();
        }
        let mut sorted: Vec<u64> = self.samples.iter().map(|sample| sample.milliseconds).collect();
        sorted.sort_unstable();
        // The smallest value that is not below 99 % of the samples.
        let rank = (sorted.len() * 99).div_ceil(100);
        let p99_milliseconds = rank.checked_sub(1).and_then(|index| sorted.get(index)).copied();
        let last: HashMap<&ObjectName, u64> =
            self.samples.iter().map(|sample| (&sample.service, sample.milliseconds)).collect();
        let mut slowest: Vec<(String, u64)> =
            last.into_iter().map(|(service, milliseconds)| (service.to_string(), milliseconds)).collect();
        slowest.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        slowest.truncate(SLOWEST);
        LatencyState { p99_milliseconds, slowest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_000_000 + milliseconds).unwrap()
    }

    fn service(name: &str) -> ObjectName {
        ObjectName::new("shop", name)
    }

    #[tokio::test(start_paused = true)]
    async fn the_percentile_is_taken_over_what_happened_since_the_start() {
        let mut latency = Latency::new(at(0));
        assert_eq!(latency.summary().p99_milliseconds, None);
        assert_eq!(latency.record(service("old"), at(-1), at(90_000)), None);
        for number in 1..=100 {
            latency.record(service("web"), at(0), at(number));
        }
        let summary = latency.summary();
        assert_eq!(summary.p99_milliseconds, Some(99));
        assert_eq!(summary.slowest, [("shop/web".to_owned(), 100)], "its last change");
        tokio::time::advance(WINDOW + Duration::from_secs(1)).await;
        assert_eq!(latency.summary(), LatencyState::default());
    }

    #[tokio::test(start_paused = true)]
    async fn the_five_slowest_are_named_and_a_clock_ahead_is_no_latency() {
        let mut latency = Latency::new(at(0));
        for (number, name) in (1..).zip(["a", "b", "c", "d", "e", "f"]) {
            latency.record(service(name), at(0), at(number));
        }
        assert_eq!(latency.record(service("g"), at(500), at(100)), Some(Duration::ZERO));
        let names: Vec<String> = latency.summary().slowest.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["shop/f", "shop/e", "shop/d", "shop/c", "shop/b"]);
    }
}
