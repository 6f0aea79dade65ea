//! Numbers that differ between agents, to spread what they do over time. Not for secrets.

use std::hash::{BuildHasher, RandomState};

/// A number in 0..1. The standard library seeds each `RandomState` differently.
#[must_use]
pub fn fraction() -> f64 {
    let bits = u32::try_from(RandomState::new().hash_one(()) >> 32).unwrap_or_default();
    f64::from(bits) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::fraction;

    #[test]
    fn fractions_differ_and_stay_below_one() {
        let all: Vec<f64> = (0..100).map(|_| fraction()).collect();
        assert!(all.iter().all(|&number| (0.0..1.0).contains(&number)));
        assert!(all.windows(2).any(|pair| (pair[0] - pair[1]).abs() > 0.01));
    }
}
