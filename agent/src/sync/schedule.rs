//! When the sync loop does what.
//!
//! In: what happened when. Out: the moment of the next write, retry, probe and look for foreign changes. The pause between
//! writes counts from the end of the last one, so that a slow kernel gets rest too.

use std::time::Duration;

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::settings::DriftPolicy;
use tokio::time::Instant;

/// The first retry after a failure comes this soon.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Never probe more often than this.
const LEAST_PROBE: Duration = Duration::from_secs(5);
/// Nor less often: with a probe's wait for the lock and the pace of the status, a kernel that cannot be written shows within 15 s.
const MOST_PROBE: Duration = Duration::from_secs(8);
/// In between, a probe may take a hundredth of the time.
const PROBE_SHARE: u32 = 100;
/// A write may wait so long for the lock, in seconds and for each family, and show within the same time that it is held.
const UNASKED_LOCK_WAIT: u32 = 5;

/// Foreign changes often come in groups.
const SETTLE: Duration = Duration::from_millis(200);
/// Looks because of foreign changes are at least this far apart.
const LEAST_LOOK: Duration = Duration::from_secs(1);
/// And take a tenth of the time at most, whatever others do.
const LOOK_SHARE: u32 = 10;

/// The sync loop's clock.
#[derive(Debug)]
pub struct Schedule {
    begun: Instant,
    period: Duration,
    pause: Duration,
    drift: Option<Duration>,
    last_write: Option<Instant>,
    failures: u32,
    retry: Option<Instant>,
    next_probe: Option<Instant>,
    asks_first: bool,
    next_look: Option<Instant>,
    /// When the kernel was last read and how long that took.
    last_look: Option<(Instant, Duration)>,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            period: Duration::from_secs(30),
            pause: Duration::from_secs(1),
            drift: None,
            last_write: None,
            failures: 0,
            retry: None,
            next_probe: None,
            asks_first: false,
            next_look: None,
            last_look: None,
        }
    }
}

impl Schedule {
    /// Takes over the configured times.
    pub fn configure(&mut self, config: &NodeProxyConfiguration) {
        self.period = Duration::from_secs(u64::from(config.sync.period_seconds));
        self.pause = Duration::from_millis(u64::from(config.sync.min_period_milliseconds));
        self.asks_first = config.iptables.lock_timeout_seconds > UNASKED_LOCK_WAIT;
        let interval = Duration::from_secs(u64::try_from(config.drift.interval_seconds).unwrap_or(60));
        self.drift = (config.drift.policy != DriftPolicy::Off).then_some(interval);
        self.next_look = match (self.drift, self.next_look) {
            (Some(interval), Some(look)) => Some(look.min(Instant::now() + interval)),
            (Some(interval), None) if self.last_write.is_some() => Some(Instant::now() + interval),
            _ => None,
        };
    }

    /// When to write, if there is something to write.
    pub fn write(&self, pending: bool) -> Option<Instant> {
        match (self.retry, pending) {
            (Some(retry), _) => Some(retry),
            (None, true) => Some(self.last_write.map_or(self.begun, |end| end + self.pause)),
            (None, false) => None,
        }
    }

    /// When to probe whether the kernel can be written.
    pub fn probe(&self) -> Option<Instant> {
        self.next_probe.filter(|_| self.retry.is_none())
    }

    /// Whether to probe before each write, which could wait for the lock for too long to tell in time that it is held.
    pub fn asks_first(&self) -> bool {
        self.asks_first
    }

    /// When to look for foreign changes.
    pub fn look(&self) -> Option<Instant> {
        self.next_look.filter(|_| self.retry.is_none())
    }

    /// A write has succeeded. It was a probe, too.
    pub fn succeeded(&mut self) {
        let now = Instant::now();
        self.last_write = Some(now);
        self.failures = 0;
        self.retry = None;
        self.next_probe = Some(now + self.period.min(LEAST_PROBE));
        if self.next_look.is_none() {
            self.next_look = self.drift.map(|interval| now + interval);
        }
    }

    /// A write, a probe or a look has failed. `jitter` in 0..1 spreads the retry over ±20 %.
    pub fn failed(&mut self, jitter: f64) {
        let now = Instant::now();
        self.last_write = Some(now);
        let doubled = FIRST_RETRY * 2_u32.pow(self.failures.min(12));
        // Sooner than a period, whatever the jitter says.
        let wait = doubled.mul_f64(0.8 + 0.4 * jitter.clamp(0.0, 1.0)).min(self.period);
        self.failures = self.failures.saturating_add(1);
        self.retry = Some(now + wait);
    }

    /// A probe has succeeded and took so long.
    pub fn probed(&mut self, took: Duration) {
        self.next_probe = Some(Instant::now() + (took * PROBE_SHARE).clamp(LEAST_PROBE, MOST_PROBE));
    }

    /// The kernel was read back and that took so long.
    pub fn looked(&mut self, took: Duration) {
        let now = Instant::now();
        self.last_look = Some((now, took));
        self.next_look = self.drift.map(|interval| now + interval);
    }

    /// Whether foreign changes are looked for.
    pub fn looks(&self) -> bool {
        self.drift.is_some()
    }

    /// Somebody else has changed something that may be ours.
    pub fn noticed(&mut self) {
        let rested = self.last_look.map(|(end, took)| end + (took * LOOK_SHARE).max(LEAST_LOOK));
        let soon = (Instant::now() + SETTLE).max(rested.unwrap_or(self.begun));
        self.next_look = self.next_look.map(|look| look.min(soon));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::sample;
    use crate::iptables::runner::PROBE_LOCK_WAIT;
    use crate::status::pacing::READY_SPACING;

    /// In real time, because paused time hides it: the first write is due now, not at the moment of the next question.
    #[test]
    fn the_first_write_is_due_at_once_and_stays_due() {
        let schedule = Schedule::default();
        let now = Instant::now();
        assert!(schedule.write(true).is_some_and(|due| due <= now));
        assert_eq!(schedule.write(false), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_held_lock_shows_within_fifteen_seconds_whatever_it_may_be_waited_for() {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        for lock_timeout in [5, 6, 60] {
            let mut config = sample();
            config.iptables.lock_timeout_seconds = lock_timeout;
            let mut schedule = Schedule::default();
            schedule.configure(&config);
            schedule.succeeded();
            let first = schedule.probe().unwrap() - Instant::now();
            schedule.probed(Duration::from_secs(1));
            let next = schedule.probe().unwrap() - Instant::now();
            let probe = first.max(next) + seconds(PROBE_LOCK_WAIT);
            let families = 2;
            let write = if schedule.asks_first() {
                seconds(PROBE_LOCK_WAIT)
            } else {
                seconds(lock_timeout) * families
            };
            let shown = probe.max(write) + READY_SPACING;
            assert!(shown < Duration::from_secs(15), "{lock_timeout} s: {shown:?}");
        }
    }
}
