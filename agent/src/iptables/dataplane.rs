//! Keeps the kernel equal to the plan.

use pointsman_crds::proxy_node_status::IpFamily;

use super::tools::Tools;
use crate::kernel::{SyncError, Synced};
use crate::plan::{Changes, Plan};

/// The rules of one node.
#[derive(Debug)]
pub struct Dataplane {
    tools: Tools,
    families: Vec<IpFamily>,
}

impl Dataplane {
    /// Knows nothing of the kernel yet: the first [`Dataplane::sync`] reads it and writes what differs.
    #[must_use]
    pub fn new(tools: Tools, families: &[IpFamily]) -> Self {
        Self { tools, families: families.to_vec() }
    }

    /// The tools in use.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Makes the kernel equal to the plan. One family failing never keeps the other from being written.
    #[allow(clippy::unused_async, reason = "skeleton")]
    pub async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        let _ = (plan, changes, &self.families);
        (Synced { full: true, ..Synced::default() }, Vec::new())
    }

    /// Reads the kernel and says in which chains it differs from the plan. Empty: equal.
    #[allow(clippy::unused_async, reason = "skeleton")]
    pub async fn verify(&mut self, plan: &Plan) -> Result<Vec<String>, SyncError> {
        let _ = plan;
        Ok(Vec::new())
    }
}

/// Removes everything of ours in both families, jumps first, and nothing else.
#[allow(clippy::unused_async, reason = "skeleton")]
pub async fn cleanup(tools: &Tools) -> Result<(), SyncError> {
    let _ = tools;
    Ok(())
}
