//! The test cluster of Pointsman, and what its tests share.
//!
//! - [`up`] and [`cluster`]: a real Kubernetes on one machine, with nodes in network namespaces.
//! - [`api_server`]: etcd and kube-apiserver only, for tests of the API.
//! - [`checks`]: what a user of Services sees, asked from pods, nodes and outside by [`probe`].
//! - [`bench`]: kube-proxy and Pointsman, measured.
//! - [`churn`]: Services that change at random.
//! - [`uml`]: a kernel that has IPVS, as a process.
//! - [`release`]: the images of Pointsman itself; [`pointsman`]: its status and processes in a cluster.

pub mod addons;
pub mod api_server;
pub mod archive;
pub mod artifacts;
pub mod bench;
pub mod cgroup;
pub mod checks;
pub mod churn;
pub mod cluster;
pub mod command;
pub mod control_plane;
pub mod files;
pub mod images;
pub mod layout;
pub mod network;
pub mod node;
pub mod pki;
pub mod pointsman;
pub mod probe;
pub mod process;
pub mod progress;
pub mod release;
pub mod stamp;
pub mod state;
pub mod teardown;
pub mod traffic;
pub mod uml;
pub mod up;
