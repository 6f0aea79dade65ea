//! Removes connection tracking entries that lead to endpoints which are gone.
//!
//! The kernel translates the first packet of a flow by rules and every later one by the flow's entry. A datagram sender
//! that keeps its port refreshes its entry for ever, so it goes on sending to a pod that is gone, or into the void when
//! it began before the service had rules. Deleting the entry makes the next packet meet the rules again.
//!
//! In: [`Serving`], what every UDP and SCTP (and, if wanted, TCP) frontend of one family leads to, kept up to date
//! through a [`Reconciler`]. Out: entries deleted from the kernel by [`run`], and a [`Report`] or a typed [`RunError`].
//!
//! It is a reconciliation, not a reaction to events: a run compares all entries with the state of now, so that a run
//! that failed, or a restart, loses nothing. [`stale`] is the whole rule and is pure; [`wire`] is the format of
//! the kernel's messages; `netlink` is the socket.
//!
//! How a sync uses it, after its rules are in the kernel (before that, a deleted entry would come back wrong):
//!
//! ```no_run
//! use pointsman_agent::conntrack::{self, Endpoints, Frontend, Protocol, Reconciler};
//! use pointsman_crds::proxy_node_status::IpFamily;
//!
//! let mut reconciler = Reconciler::new(IpFamily::IPv4);
//! let dns = Frontend::new("10.96.0.10:53".parse()?, Protocol::Udp);
//! reconciler.set(dns, Endpoints::new(["10.244.1.7:53".parse()?]));
//! if let Some(job) = reconciler.begin() {
//!     let result = conntrack::run(&job); // blocking: for tokio::task::spawn_blocking
//!     reconciler.finish(job, result.is_ok());
//! }
//! # Ok::<(), std::net::AddrParseError>(())
//! ```

mod connections;
mod netlink;
mod reconciler;
mod run;
mod serving;
pub mod wire;

pub use connections::Connections;
pub use netlink::{Cause, RunError};
pub use reconciler::{Job, Reconciler};
pub use run::{Report, has, run};
pub use serving::{Endpoints, Frontend, NodePort, Protocol, Serving, Target, stale};
pub use wire::Entry;
