//! What the tests of the charts and of the API share.
//!
//! Every test binary uses only some of it.
#![allow(dead_code, missing_docs, reason = "shared by several test binaries")]

pub mod charts;
pub mod operator;
pub mod server;
