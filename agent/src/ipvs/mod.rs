//! Mode ipvs: Services as virtual servers of the kernel's IPVS.
//!
//! [`server`] is what virtual and real servers are, and what can be done to them; [`wire`] the kernel's messages about them;
//! [`client`] changes and lists them. [`device`] makes their addresses local. [`drain`] takes
//! real servers out gracefully, and [`probe`] says whether the node can run this mode at all.

pub mod client;
pub mod device;
pub mod drain;
pub mod error;
pub(crate) mod layout;
pub mod probe;
pub mod server;
pub mod wire;

pub use error::{Error, Refusal};
