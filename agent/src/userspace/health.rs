//! Whether an endpoint is fit for new connections.
//!
//! In: how attempts to reach it went, and the time. Out: whether it rests, and how much of its share it gets. Pure.
//!
//! An endpoint that fails [`FAILURES`] times in a row rests for [`FIRST_REST`], twice as long each time it comes back and still fails,
//! at most [`LONGEST_REST`]. The first attempt afterwards decides. One that has come back gets a tenth of its share, and a tenth more
//! with each success, so that it is not flooded while it warms up.

use std::time::Duration;

use tokio::time::Instant;

/// So many failures in a row, and the endpoint rests.
pub const FAILURES: u32 = 3;
/// How long it rests the first time.
pub const FIRST_REST: Duration = Duration::from_secs(10);
/// How long it rests at most.
pub const LONGEST_REST: Duration = Duration::from_mins(5);
/// The share of an endpoint that is well.
pub const FULL_SHARE: u32 = 10;

/// What is known of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Failures since the last success.
    failures: u32,
    /// How often it has rested since it was last well.
    rests: u32,
    until: Option<Instant>,
    share: u32,
}

impl Default for Health {
    fn default() -> Self {
        Self { failures: 0, rests: 0, until: None, share: FULL_SHARE }
    }
}

impl Health {
    /// Whether it gets no new connections now.
    #[must_use]
    pub fn rests(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Its share of new connections, 1 to [`FULL_SHARE`].
    #[must_use]
    pub fn share(&self) -> u32 {
        self.share
    }

    /// It was reached.
    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.until = None;
        self.share = (self.share + 1).min(FULL_SHARE);
        if self.share == FULL_SHARE {
            self.rests = 0;
        }
    }

    /// It was not reached. Returns how long it rests, if it does so from now on.
    pub fn failed(&mut self, now: Instant) -> Option<Duration> {
        self.failures = self.failures.saturating_add(1);
        // Connections that were under way when it was sent to rest say nothing new.
        if self.rests(now) || (self.failures < FAILURES && self.until.is_none()) {
            return None;
        }
        let rest = FIRST_REST.saturating_mul(1 << self.rests.min(8)).min(LONGEST_REST);
        self.rests = self.rests.saturating_add(1);
        self.until = Some(now + rest);
        self.share = 1;
        Some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_rests_after_three_failures_in_a_row() {
        let (mut health, now) = (Health::default(), Instant::now());
        for _ in 0..2 {
            assert_eq!(health.failed(now), None);
            assert_eq!(health.failed(now), None);
            health.succeeded();
        }
        assert_eq!((health.failed(now), health.failed(now)), (None, None));
        assert!(!health.rests(now));
        assert_eq!(health.failed(now), Some(FIRST_REST));
        assert!(health.rests(now + FIRST_REST - Duration::from_millis(1)));
        assert!(!health.rests(now + FIRST_REST));
    }

    #[test]
    fn each_rest_is_twice_as_long_until_the_endpoint_is_well_again() {
        let (mut health, mut now) = (Health::default(), Instant::now());
        let mut rests = Vec::new();
        for _ in 0..FAILURES {
            rests.extend(health.failed(now));
        }
        for _ in 0..6 {
            assert_eq!(health.failed(now), None, "what was under way does not make it longer");
            now += LONGEST_REST;
            rests.push(health.failed(now).unwrap());
        }
        let seconds: Vec<u64> = rests.iter().map(Duration::as_secs).collect();
        assert_eq!(seconds, [10, 20, 40, 80, 160, 300, 300]);
        now += LONGEST_REST;
        assert_eq!(health.share(), 1);
        health.succeeded();
        assert_eq!((health.share(), health.rests(now)), (2, false));
        for _ in 0..FULL_SHARE {
            health.succeeded();
        }
        assert_eq!(health, Health::default());
    }
}
