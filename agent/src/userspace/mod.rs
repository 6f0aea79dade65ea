//! Mode userspace: the agent itself takes connections and datagrams, and passes them on.
//!
//! In: the [`Plan`](crate::plan::Plan). Out: sockets, one small nftables table per family that leads packets to them, and words about
//! how that went ([`crate::kernel`]).
//!
//! [`Dataplane`] is what the sync loop talks to. [`steer`] turns the plan into rules (pure). [`balance`], [`health`] and [`affinity`]
//! choose an endpoint (pure), for a [`port`] of a Service. [`tcp`], with [`relay`], and [`udp`] are the data path, on the threads
//! of [`workers`] and within the limits of [`shared`]. [`localhost`] serves NodePorts on loopback addresses.

pub mod affinity;
pub mod balance;
pub mod counters;
mod dataplane;
pub mod health;
pub mod localhost;
pub mod port;
pub mod relay;
pub mod shared;
pub mod steer;
pub mod tcp;
pub mod udp;
pub mod workers;

pub use dataplane::{Dataplane, cleanup, installed};

#[cfg(test)]
mod tests;
