//! What the tests with a kernel share.

pub mod lab;
pub mod scenario;
pub mod sctp;
pub mod traffic;
pub mod world;
