//! nftables through netlink, without the `nft` program.
//!
//! In: the [`Plan`](crate::plan::Plan) and what changed in it. Out: kernel state in one table per family, and words about how
//! that went ([`crate::kernel`]).
//!
//! [`Dataplane`] is what the sync loop talks to; [`cleanup`] removes everything of ours. [`layout`] turns the plan into a typed
//! [`ruleset`] and into [`Transaction`](ruleset::Transaction)s (pure); [`node`] has what mode userspace says alike. The other modules know no Services: [`text`] is for
//! people, [`wire`] the kernel's form of it all (pure), [`connection`] the socket with the refusals mapped back to who wanted
//! what, [`client`] the same for async code, [`read`] reads a table back, [`compare`] finds what has to be repaired (pure),
//! [`watch`] notices changes by others, [`probe`] tries what the kernel can do.

pub mod client;
pub mod compare;
pub mod connection;
mod dataplane;
pub mod error;
pub mod layout;
pub mod node;
mod notices;
pub mod probe;
pub mod read;
pub mod ruleset;
pub mod text;
pub mod watch;
pub mod wire;

pub(crate) use dataplane::failed;
pub use dataplane::{Dataplane, cleanup, installed};
