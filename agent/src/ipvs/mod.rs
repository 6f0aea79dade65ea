//! Mode ipvs: Services as virtual servers of the kernel's IPVS.
//!
//! [`server`] is what virtual and real servers are, and what can be done to them.

pub mod server;
