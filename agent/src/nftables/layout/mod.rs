//! Pointsman's table: the plan as a constant number of sets and maps, whatever the number of Services.
//!
//! In: the [`Plan`](crate::plan::Plan) and what changed in it, and at the start what the kernel holds. Out: the whole table as a
//! [`Ruleset`](super::ruleset::Ruleset), or the [`Transaction`](super::ruleset::Transaction) that leads there. Pure.
//!
//! The number of sets is what makes a table slow to load (the kernel's time is quadratic in it), so there is no chain, set or
//! map for a Service. nft cannot look up what another lookup has found, except through the packet: a scratch [`word`] in
//! `meta priority` leads from the frontend to a group of endpoints, from the group to a [`class`] (how many there are, and for
//! how long a client stays), and from there to one endpoint. docs/adr/0012 shows it with an example.
//!
//! | Module | Says |
//! |---|---|
//! | [`fixed`] | what does not depend on Services |
//! | [`class`] | how one of n endpoints is chosen |
//! | [`port`] | what the elements of one Service port are |
//! | [`state`] | what is installed, and what must change |
//! | [`recovered`] | which numbers the kernel knows our Services by |

mod class;
mod delta;
mod fixed;
mod ids;
mod port;
mod recovered;
mod state;
mod word;

#[cfg(test)]
pub(crate) mod tests;

pub use fixed::{INVALID_DROPPED, TRAFFIC, anchor, table};
pub use recovered::served;
pub use state::{Limit, State};
