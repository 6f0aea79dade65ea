//! nftables through netlink, without the `nft` program.
//!
//! In: a typed [`ruleset`] and [`Transaction`](ruleset::Transaction)s. Out: the same as text for people, or as one
//! transaction in the kernel, and what the kernel holds, read back into the same types. No policy: what to write is decided
//! elsewhere.

pub mod client;
pub mod compare;
pub mod connection;
pub mod error;
mod notices;
pub mod probe;
pub mod read;
pub mod ruleset;
pub mod text;
pub mod watch;
pub mod wire;
