//! Runs against the kernel's nftables, in network namespaces that end with their thread, even if the test is killed. The `nft`
//! program is the judge: what we write by netlink must be what it makes of our text.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says by panicking what is wrong"
)]

mod equal;
mod everything;
mod layout;
mod read;
mod scale;
mod watch;
mod write;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::thread;

use nix::sched::{CloneFlags, unshare};
use pointsman_agent::nftables::connection::Connection;
use pointsman_agent::nftables::ruleset::{Operation, Origin, Ruleset, Table, Transaction};
use pointsman_crds::proxy_node_status::IpFamily;

const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// Runs this in a new network namespace. Without root there is none.
fn isolated(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        test();
    };
    if let Err(panic) = thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}

fn table(family: IpFamily) -> Table {
    Table::new(family, "pointsman")
}

/// Runs `nft` with these words, in the namespace of the thread.
fn nft(words: &str) -> String {
    let output = Command::new("nft").args(words.split(' ')).output().unwrap();
    assert!(output.status.success(), "nft {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Feeds a file to `nft`.
fn nft_file(text: &str) {
    let mut child =
        Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
}

fn load(connection: &mut Connection, ruleset: &Ruleset) {
    connection.apply(&ruleset.table, &ruleset.load()).unwrap();
}

fn transaction(operations: impl IntoIterator<Item = (Operation, u32)>) -> Transaction {
    Transaction {
        operations: operations.into_iter().map(|(operation, origin)| (operation, Origin(origin))).collect(),
    }
}
