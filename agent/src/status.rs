//! What the agent says about its node in the ProxyNodeStatus.
//!
//! [`build`] turns what the agent knows into the status, without I/O; [`pacing`] decides when it may be written; [`writer`]
//! writes it. The rules are those of `operator-and-api.md` §3.7 and §3.8: the status is true or it is Unknown, it is
//! written when something that matters has changed, and rule programming never waits for it.

pub mod build;
pub mod pacing;
pub mod writer;
