//! nftables through netlink, without the `nft` program.
//!
//! In: a typed [`ruleset`] and [`Transaction`](ruleset::Transaction)s. Out: the same as [`text`] for people, or as one
//! transaction in the kernel, and what the kernel holds, read back into the same types. No policy: what to write is decided
//! elsewhere.
//!
//! [`wire`] is the kernel's form of it all (pure), [`connection`] the socket with the refusals mapped back to who wanted
//! what, [`client`] the same for async code, [`read`] reads a table back, [`compare`] finds what has to be repaired (pure),
//! [`watch`] notices changes by others, [`probe`] tries what the kernel can do.

pub mod client;
pub mod compare;
pub mod connection;
pub mod error;
mod notices;
pub mod layout;
pub mod probe;
pub mod read;
pub mod ruleset;
pub mod text;
pub mod watch;
pub mod wire;
