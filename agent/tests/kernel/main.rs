//! Real packets through the real kernel, in namespaces of their own: what the plan says is what happens.
//! Names carry the ids of the behaviours in the reference's test plan.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::format_push_string)]

mod drift;
mod engine;
mod health;
mod lifecycle;
mod net;
mod nftables;
mod node;
mod policies;
mod scale;
mod services;
mod takeover;
mod world;
