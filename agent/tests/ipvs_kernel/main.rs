//! Mode ipvs and a kernel that has it, such as user-mode-linux: what is written is read back, and packets go there.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../support/mod.rs"]
mod support;

mod client;
mod dataplane;
mod device;
mod probe;
mod takeover;

use std::thread;

use nix::sched::{CloneFlags, unshare};

use support::lab::shell;

/// Runs this in a new network namespace that ends with its thread, even if the test is killed.
fn isolated(test: impl FnOnce() + Send + 'static) {
    support::needs_ipvs();
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        // Without any address the kernel takes all others for broadcasts, and refuses them as real servers.
        shell("ip link set lo up");
        test();
    };
    if let Err(panic) = thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}
