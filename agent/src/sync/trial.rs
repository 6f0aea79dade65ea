//! What becomes of a configuration that the kernel does not take (operator-and-api §3.6).
//!
//! In: which configuration was written, and how that went. Out: which one to write instead. A new configuration that fails
//! [`FAILURES`] times in a row, in a way that may be its own fault, gives way to the last known good one, and is not tried again
//! until another is assigned or the agent restarts. If that one fails as well, neither is at fault: the assigned one is written until
//! the kernel takes it.

use crate::config::{Candidate, Rejection};
use crate::health::FAILURES;
use crate::kernel::SyncFailure;

/// The configuration on trial, and the one to go back to.
#[derive(Debug, Default)]
pub(super) struct Trial {
    good: Option<Candidate>,
    failures: u32,
    refused: Option<Refused>,
    /// Hash of a configuration that was cleared of the failures.
    innocent: Option<String>,
}

#[derive(Debug)]
struct Refused {
    candidate: Candidate,
    why: Rejection,
    /// Whether the last known good one has been written since, so that this one was at fault.
    proven: bool,
}

impl Trial {
    /// With the configuration that was good when the agent last ran.
    pub(super) fn new(good: Option<Candidate>) -> Self {
        Self { good, ..Self::default() }
    }

    /// Why a configuration that is assigned (again) has been given up, if it has.
    pub(super) fn refusal(&self, candidate: &Candidate) -> Option<&Rejection> {
        let refused = self.refused.as_ref().filter(|refused| refused.candidate.hash == candidate.hash);
        refused.map(|refused| &refused.why)
    }

    /// Whether any configuration has been given up.
    pub(super) fn has_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Another configuration was assigned.
    pub(super) fn begin(&mut self) {
        *self = Self::new(self.good.take());
    }

    /// A configuration is in the kernel and was read back.
    pub(super) fn succeeded(&mut self, candidate: &Candidate) {
        self.failures = 0;
        self.good = Some(candidate.clone());
        if let Some(refused) = &mut self.refused {
            refused.proven = true;
        }
    }

    /// A configuration was not written, or not found when it was read back: of which kind that is, and `why` in words. Returns the
    /// one to write instead, if not the same.
    pub(super) fn failed(
        &mut self,
        candidate: &Candidate,
        failure: SyncFailure,
        why: &str,
    ) -> Option<Candidate> {
        let own_fault = match failure {
            SyncFailure::RestoreFailed | SyncFailure::SyncFailed => true,
            SyncFailure::LockTimeout | SyncFailure::ToolMissing => false,
        };
        let good = self.good.as_ref()?;
        if !own_fault {
            return None;
        }
        self.failures += 1;
        if self.failures < FAILURES {
            return None;
        }
        if candidate.hash == good.hash {
            let refused = self.refused.take_if(|refused| !refused.proven)?.candidate;
            self.failures = 0;
            self.innocent = Some(refused.hash.clone());
            return Some(refused);
        }
        if self.innocent.as_ref() == Some(&candidate.hash) {
            return None;
        }
        self.failures = 0;
        let message = format!(
            "{} was not written {FAILURES} times in a row, the last time because of {why}; going back to {}; it is not tried \
             again before it is changed or the agent restarts",
            candidate.revision, good.revision
        );
        let why = Rejection { reason: "RolledBackToLastGood", message };
        self.refused = Some(Refused { candidate: candidate.clone(), why, proven: false });
        Some(good.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{candidate, sample};
    use SyncFailure::{LockTimeout, RestoreFailed};

    fn bit(bit: u8) -> Candidate {
        let mut config = sample();
        config.masquerade.bit = bit;
        candidate("default", config)
    }

    fn fail(trial: &mut Trial, candidate: &Candidate, failure: SyncFailure) -> Option<Candidate> {
        (0..FAILURES).find_map(|_| trial.failed(candidate, failure, ""))
    }

    #[test]
    fn three_failures_in_a_row_lead_back_and_the_same_is_not_tried_again() {
        let (good, bad) = (bit(14), bit(15));
        let mut trial = Trial::new(Some(good.clone()));
        assert_eq!(trial.failed(&bad, RestoreFailed, ""), None);
        trial.failures = 0;
        assert_eq!(fail(&mut trial, &bad, LockTimeout), None, "nobody's fault");
        assert_eq!(fail(&mut trial, &bad, RestoreFailed), Some(good.clone()));
        assert!(trial.refusal(&bad).is_some() && trial.refusal(&good).is_none());
        trial.succeeded(&good);
        assert_eq!(fail(&mut trial, &good, RestoreFailed), None, "later trouble does not clear the other");
        assert!(trial.refusal(&bad).is_some());
        trial.begin();
        assert!(trial.refusal(&bad).is_none());
    }

    #[test]
    fn if_both_fail_neither_is_at_fault() {
        let (good, bad) = (bit(14), bit(15));
        let mut trial = Trial::new(Some(good.clone()));
        assert_eq!(fail(&mut trial, &bad, RestoreFailed), Some(good.clone()));
        assert_eq!(fail(&mut trial, &good, RestoreFailed), Some(bad.clone()));
        assert!(trial.refusal(&bad).is_none());
        assert_eq!(fail(&mut trial, &bad, RestoreFailed), None);
        trial.succeeded(&bad);
        assert_eq!(fail(&mut trial, &bad, RestoreFailed), None, "it is the good one now");
    }

    #[test]
    fn without_a_good_one_there_is_nothing_to_go_back_to() {
        assert_eq!(fail(&mut Trial::default(), &bit(15), RestoreFailed), None);
    }
}
