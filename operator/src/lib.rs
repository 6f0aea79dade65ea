//! The operator of Pointsman: from layers of intent to one configuration per node.
//!
//! ```text
//! watch  ──►  observed   what the API server holds, as small records
//!                │
//!                ▼
//!   merge → revision → rollout        pure: which node is to hold what, and which ConfigMaps to write now
//!   stale · summary                   pure: which agents are silent, what people see in status
//!                │
//!                ▼
//!   decide  ──►  apply                the only place that writes, and only while the lease is held
//! ```
//!
//! Everything is level-triggered: one pass looks at all records and puts right what differs. Passes are debounced by
//! a second after a change and repeat without one, so a missed event, a failed write or a change of leader needs
//! no code of its own.
//!
//! What the operator must be allowed to do (the chart's ClusterRole and Roles):
//!
//! | where | resource | verbs |
//! |---|---|---|
//! | cluster | proxyconfigurations.pointsman.dev | list, watch |
//! | cluster | proxyconfigurations.pointsman.dev/status | patch |
//! | cluster | proxynodestatuses.pointsman.dev | list, watch, create, patch, delete |
//! | cluster | proxynodestatuses.pointsman.dev/status | patch |
//! | cluster | nodes | list, watch |
//! | cluster | events.events.k8s.io | create, patch |
//! | pointsman-node-config | configmaps | list, watch, create, patch, delete |
//! | pointsman-system | leases.coordination.k8s.io | get, create, update |
//! | pointsman-system | pods | list, watch |
//!
//! Discovery (`/openapi/v3`), which every authenticated client may read, tells whether the CRDs are new enough.

pub mod apply;
pub mod client;
pub mod context;
pub mod controller;
pub mod decide;
pub mod error;
pub mod events;
#[cfg(test)]
mod fixtures;
pub mod http;
pub mod lease;
pub mod merge;
pub mod metrics;
pub mod observed;
pub mod preflight;
pub mod revision;
pub mod rollout;
pub mod stale;
pub mod summary;
pub mod watch;
