//! Telling what is being done and how long it took.
//!
//! In: a description and a future. Out: what the future returns; a line on standard error when it ends, and at a
//! terminal also while it runs.

use std::io::IsTerminal;
use std::time::Instant;

use anyhow::{Context, Result};

/// Awaits `work` and prints `what` with the time it took.
pub async fn step<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    if std::io::stderr().is_terminal() {
        // Overwritten by the next line that is printed.
        eprint!("        …  {what}\r");
    }
    let start = Instant::now();
    let result = work.await;
    let outcome = if result.is_ok() { "" } else { "  FAILED" };
    eprintln!("{:>7.1} s  {what}{outcome}", start.elapsed().as_secs_f64());
    result.with_context(|| what.to_owned())
}
