//! When the status may be written.
//!
//! In: what happened when (a status that differs, a write, a failure). Out: the moment of the next write. Fifteen thousand
//! agents share one API server: a write needs a reason, and a flapping node must not cost more than six a minute. Only news about
//! Ready is let through sooner.

use std::time::Duration;

use tokio::time::Instant;

/// Least time between two writes.
pub const SPACING: Duration = Duration::from_secs(10);
/// Least time before a write that brings Ready or takes it away.
pub const READY_SPACING: Duration = Duration::from_secs(2);
/// Time between writes that only say that the agent lives, ±20 %.
pub const HEARTBEAT: Duration = Duration::from_mins(5);
/// Writes in any minute, except those that bring Ready or take it away.
const BUCKET: f64 = 6.0;
const REFILL_PER_SECOND: f64 = BUCKET / 60.0;

/// Why a status is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing that matters differs from what was last written.
    None,
    /// Something that matters differs.
    Change,
    /// Ready differs.
    Ready,
}

/// The state of one writer.
#[derive(Debug)]
pub struct Pacing {
    tokens: f64,
    counted: Instant,
    last_attempt: Option<Instant>,
    heartbeat: Instant,
    /// No write before this, after a failure.
    not_before: Option<Instant>,
    failures: u32,
}

impl Pacing {
    /// A writer that starts at `now`. `spread` in 0..1 places its first heartbeat within one interval, so that agents that
    /// start together do not write together.
    #[must_use]
    pub fn new(now: Instant, spread: f64) -> Self {
        Self {
            tokens: BUCKET,
            counted: now,
            last_attempt: None,
            heartbeat: now + HEARTBEAT.mul_f64(spread.clamp(0.0, 1.0)),
            not_before: None,
            failures: 0,
        }
    }

    /// When to write next, given what differs.
    #[must_use]
    pub fn due(&self, need: Need) -> Instant {
        let due = match need {
            Need::None => self.heartbeat,
            Need::Ready => self.last_attempt.map_or(self.counted, |last| last + READY_SPACING),
            Need::Change => {
                let spaced = self.last_attempt.map_or(self.counted, |last| last + SPACING);
                let missing = 1.0 - self.tokens;
                let refilled = if missing > 0.0 {
                    self.counted + Duration::from_secs_f64(missing / REFILL_PER_SECOND)
                } else {
                    self.counted
                };
                spaced.max(refilled).min(self.heartbeat.max(spaced))
            }
        };
        self.not_before.map_or(due, |earliest| due.max(earliest))
    }

    /// A write was made at `now`, for `need`. `jitter` in 0..1 spreads the next heartbeat over ±20 %.
    pub fn written(&mut self, now: Instant, need: Need, jitter: f64) {
        self.attempted(now, need);
        self.failures = 0;
        self.not_before = None;
        self.heartbeat = now + HEARTBEAT.mul_f64(0.8 + 0.4 * jitter.clamp(0.0, 1.0));
    }

    /// A write failed at `now`. `least` is how long to wait in any case.
    pub fn failed(&mut self, now: Instant, need: Need, least: Duration) {
        self.attempted(now, need);
        let backoff = READY_SPACING * 2_u32.pow(self.failures.min(4));
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + backoff.min(Duration::from_secs(30)).max(least));
    }

    fn attempted(&mut self, now: Instant, need: Need) {
        let refill = now.saturating_duration_since(self.counted).as_secs_f64() * REFILL_PER_SECOND;
        self.tokens = (self.tokens + refill).min(BUCKET);
        self.counted = now;
        if need == Need::Change {
            self.tokens -= 1.0;
        }
        self.last_attempt = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn changes_are_ten_seconds_apart_and_at_most_six_a_minute() {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 0.5);
        let mut writes = Vec::new();
        let mut now = pacing.due(Need::Change);
        while now < start + Duration::from_mins(10) {
            writes.push((now - start).as_secs());
            pacing.written(now, Need::Change, 0.5);
            now = pacing.due(Need::Change);
        }
        assert_eq!(writes[0], 0, "the first is not held back");
        assert!(writes.windows(2).all(|pair| pair[1] - pair[0] >= 10), "{writes:?}");
        assert!(writes.len() <= 66, "{} writes in ten minutes", writes.len());
    }

    #[tokio::test(start_paused = true)]
    async fn news_about_ready_waits_two_seconds_and_needs_no_token() {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 0.5);
        pacing.tokens = 0.0;
        pacing.written(start, Need::Change, 0.5);
        assert_eq!(pacing.due(Need::Ready) - start, READY_SPACING);
        assert!(pacing.due(Need::Change) - start >= SPACING);
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeats_are_spread() {
        let start = Instant::now();
        assert_eq!(Pacing::new(start, 0.0).due(Need::None), start);
        assert_eq!(Pacing::new(start, 1.0).due(Need::None) - start, HEARTBEAT);
        let mut pacing = Pacing::new(start, 0.0);
        pacing.written(start, Need::None, 0.0);
        assert_eq!((pacing.due(Need::None) - start).as_secs(), 240);
        pacing.written(start, Need::None, 1.0);
        assert_eq!((pacing.due(Need::None) - start).as_secs(), 360);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_back_off_up_to_half_a_minute_and_heal() {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 0.5);
        let mut waits = Vec::new();
        let mut now = start;
        for _ in 0..6 {
            pacing.failed(now, Need::Ready, Duration::ZERO);
            waits.push((pacing.due(Need::Ready) - now).as_secs());
            now = pacing.due(Need::Ready);
        }
        assert_eq!(waits, [2, 4, 8, 16, 30, 30]);
        pacing.written(now, Need::Ready, 0.5);
        assert_eq!(pacing.due(Need::Ready) - now, READY_SPACING);
        pacing.failed(now, Need::Ready, Duration::from_mins(1));
        assert_eq!((pacing.due(Need::Ready) - now).as_secs(), 60, "as long as the server asks");
    }
}
