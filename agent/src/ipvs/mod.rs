//! Mode ipvs: Services as virtual servers of the kernel's IPVS.
//!
//! [`server`] is what virtual and real servers are, and what can be done to them; [`wire`] the kernel's messages about them;
//! [`client`] changes and lists them. [`device`] makes their addresses local.

pub mod client;
pub mod device;
pub mod error;
pub mod server;
pub mod wire;

pub use error::{Error, Refusal};
