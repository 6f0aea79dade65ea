//! Rules and the real kernel: adoption, live changes, drift, failures, cleanup and many Services. What each kind of packet
//! gets is said by the scenarios, which `kernel_scenarios` plays in every mode.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::format_push_string)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../support/mod.rs"]
mod support;

mod attack;
mod churn;
mod drift;
mod engine;
mod health;
mod invalid;
mod killed;
mod lifecycle;
mod localhost;
mod nftables;
mod node;
mod scale;
mod takeover;
mod userspace;
