//! Pointsman's agent: programs the Services of a cluster into the kernel of the node it runs on.
//!
//! Data flows one way. `watch` turns API events into [`model`] changes; the [`model`] keeps what matters of them; the
//! [`plan`] decides which endpoints a frontend may use, from where and with which source; a renderer ([`iptables`])
//! translates the plan into rules and applies what differs ([`kernel`]). Nothing before [`kernel`] does I/O.

pub mod admin;
pub mod client;
pub mod config;
pub mod conntrack;
pub mod events;
pub mod health;
pub mod healthcheck;
pub mod http;
pub mod init;
pub mod instance;
pub mod ipset;
pub mod iptables;
pub mod ipvs;
pub mod kernel;
pub mod logging;
pub mod metrics;
pub mod model;
pub mod netfilter;
pub mod netlink;
pub mod nftables;
pub mod plan;
mod random;
pub mod run;
pub mod state;
pub mod status;
pub mod sync;
pub mod sysctl;
pub mod takeover;
pub mod userspace;
pub mod watch;

// The tests in `agent/tests` read the same scenarios, and know this crate by its name.
#[cfg(test)]
extern crate self as pointsman_agent;
#[cfg(test)]
#[allow(dead_code, reason = "what only real packets need")]
#[path = "../tests/support/scenario/mod.rs"]
mod scenario;
#[cfg(test)]
mod scenario_tests;
