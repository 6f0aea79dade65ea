//! Every scenario with real packets, in every mode: each is a trial of its own, so one line of the result says what works
//! in which mode.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../support/mod.rs"]
mod support;

mod play;

use libtest_mimic::{Arguments, Failed, Trial};

use support::lab::Lab;
use support::scenario::{self, Scenario};
use support::world::{WAYS, World};

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for path in scenario::files() {
        let scenario = Scenario::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let scenario: &'static Scenario = Box::leak(Box::new(scenario));
        for way in WAYS {
            let name = format!("{}::{}", scenario.name.replace('-', "_"), way.to_string().replace('-', "_"));
            trials.push(Trial::test(name, move || {
                let Some(lab) = Lab::new() else { return Ok(()) };
                let wrong = play::play(&lab, World::over(way.open(&lab)), scenario, way.mode());
                if wrong.is_empty() { Ok(()) } else { Err(Failed::from(wrong.join("\n"))) }
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
