//! Every scenario with real packets in mode ipvs, in a kernel that has it.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../support/mod.rs"]
mod support;

#[path = "../kernel_scenarios/play.rs"]
mod play;

use support::world::Way;

fn main() {
    support::needs_ipvs();
    play::run(&[Way::Ipvs]);
}
