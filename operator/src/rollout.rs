//! Which node ConfigMaps are written now.
//!
//! In: what the nodes of one pool are to hold, what their ConfigMaps hold, and the pool's rollout settings. Out: the
//! nodes to write. A rollout is nothing but this choice, repeated: pause, pace and return need no protocol with the
//! agents and survive a change of leader. Pure.
//!
//! Today's policy: everything that differs at once; while paused, only nodes that have no configuration at all, which would
//! serve nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use pointsman_crds::proxy_configuration::Rollout;

use crate::observed::ConfigMapRecord;
use crate::revision::Desired;

/// One node of a pool, and what it is to hold.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The node's name.
    pub node: &'a str,
    /// The Node object's uid, which owns the ConfigMap.
    pub uid: &'a str,
    /// The pool.
    pub pool: &'a str,
    /// The configuration.
    pub desired: &'a Desired,
}

impl Target<'_> {
    /// Whether the ConfigMap is as it should be. Its `sources` annotation does not count: a new generation of a layer
    /// with the same outcome is no reason to write.
    #[must_use]
    pub fn is_met_by(&self, observed: &ConfigMapRecord) -> bool {
        self.holds(observed)
            && observed.owner_uid == self.uid
            && observed.managed
            && observed.pool == self.pool
            && observed.foreign_content.is_none()
    }

    /// Whether the ConfigMap holds the desired content.
    #[must_use]
    pub fn holds(&self, observed: &ConfigMapRecord) -> bool {
        observed.hash == self.desired.hash && observed.revision == self.desired.revision
    }
}

/// The nodes of one pool whose ConfigMaps are written now.
#[must_use]
pub fn next_writes<'a>(
    pool: &[Target<'a>],
    observed: &BTreeMap<String, Arc<ConfigMapRecord>>,
    rollout: &Rollout,
) -> Vec<Target<'a>> {
    let due = |target: &&Target<'_>| match observed.get(target.node) {
        None => true,
        // An emergency edit stands until the person who made it takes the annotation away.
        Some(config_map) => !rollout.paused && !config_map.break_glass && !target.is_met_by(config_map),
    };
    pool.iter().filter(due).copied().collect()
}
