//! Mode userspace: the agent itself takes connections and datagrams, and passes them on.
//!
//! In: the [`Plan`](crate::plan::Plan). Out: sockets, one small nftables table per family that leads packets to them, and words about
//! how that went ([`crate::kernel`]).
//!
//! [`balance`], [`health`] and [`affinity`] choose an endpoint (pure), for a [`port`] of a Service. [`tcp`], with [`relay`], and [`udp`]
//! are the data path, within the limits of [`shared`].

pub mod affinity;
pub mod balance;
pub mod counters;
pub mod health;
pub mod port;
pub mod relay;
pub mod shared;
pub mod tcp;
pub mod udp;

#[cfg(test)]
mod tests;
