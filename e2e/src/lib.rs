//! The test cluster of Pointsman, and what its tests share.
//!
//! - [`api_server`]: etcd and kube-apiserver only, for tests of the API.

pub mod api_server;
pub mod artifacts;
pub mod command;
pub mod control_plane;
pub mod pki;
pub mod stamp;
