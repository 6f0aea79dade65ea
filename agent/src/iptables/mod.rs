//! Mode iptables: the plan as rules in the chains that kube-proxy uses.
//!
//! In: the [`Plan`](crate::plan::Plan) and what changed in it. Out: kernel state in the tables nat and filter of
//! each family, written by `iptables-restore`, and words about how that went ([`crate::kernel`]).
//!
//! [`Dataplane`] is what the sync loop talks to; [`cleanup`] removes everything of ours.

pub(crate) mod batch;
mod cleanup;
mod counters;
mod dataplane;
pub(crate) mod ear;
mod ipvs;
pub(crate) mod names;
pub(crate) mod render;
pub(crate) mod runner;
pub(crate) mod saved;
pub(crate) mod sets;
pub(crate) mod shared;
mod state;
mod tools;
mod tree;

#[cfg(test)]
pub(crate) mod tests;

pub use cleanup::cleanup;
pub(crate) use counters::invalid_dropped;
pub use dataplane::Dataplane;
pub use ipvs::{destroy_sets, kube_proxy_sets, remove_ipvs_chains};
pub use tools::{Flavour, Options, RunError, Tools, ToolsError};
