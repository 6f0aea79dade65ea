//! What the tests with a kernel share.

pub mod lab;
pub mod scenario;
mod sctp;
pub mod traffic;
pub mod world;
