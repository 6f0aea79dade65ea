//! Mode userspace: the agent itself takes connections and datagrams, and passes them on.
//!
//! In: the [`Plan`](crate::plan::Plan). Out: sockets, one small nftables table per family that leads packets to them, and words about
//! how that went ([`crate::kernel`]).
//!
//! [`balance`], [`health`] and [`affinity`] choose an endpoint (pure).

pub mod affinity;
pub mod balance;
pub mod health;
pub mod relay;
