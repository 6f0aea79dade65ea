//! Every scenario with real packets, in every mode: each is a trial of its own, so one line of the result says what works
//! in which mode.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../support/mod.rs"]
mod support;

mod play;

use support::world::WAYS;

fn main() {
    play::run(&WAYS);
}
