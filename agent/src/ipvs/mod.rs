//! Mode ipvs: Services as virtual servers of the kernel's IPVS.
//!
//! [`server`] is what virtual and real servers are, and what can be done to them; [`wire`] the kernel's messages about them;
//! [`client`] changes and lists them. [`device`] makes their addresses local. [`drain`] takes
//! real servers out gracefully, and [`probe`] says whether the node can run this mode at all. `layout` decides what the kernel
//! is to have, `difference` what of it is missing, `write` writes that, and [`Dataplane`] remembers whether it succeeded.

pub mod client;
mod dataplane;
pub mod device;
mod difference;
pub mod drain;
pub mod error;
pub(crate) mod layout;
mod leave;
pub mod probe;
pub mod server;
pub mod wire;
mod write;

pub use dataplane::Dataplane;
pub use error::{Error, Refusal};
pub(crate) use leave::{DRAIN_AT_MOST, through};
pub use leave::{Leaving, cleanup, has_chains, installed, remove_chains};
