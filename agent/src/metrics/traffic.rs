//! What clients have sent to each Service port, where the kernel counts it.
//!
//! In: what was read from the kernel, all of it each time. Out: two series for each Service port and family, and none for one
//! that is gone: nothing, unless the configuration wants packets counted.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::raise;
use crate::kernel::Counted;
use crate::plan::PortId;
use crate::userspace::counters::ByPort;

/// The counters of all Service ports.
#[derive(Debug, Default)]
pub struct Traffic {
    packets: Family<ByPort, Counter>,
    bytes: Family<ByPort, Counter>,
    known: Mutex<HashSet<PortId>>,
}

impl Traffic {
    pub(super) fn register(&self, registry: &mut Registry) {
        let to = registry.sub_registry_with_prefix("pointsman_service");
        to.register("packets", "Packets that clients have sent to a Service port", self.packets.clone());
        to.register("bytes", "Bytes that clients have sent to a Service port", self.bytes.clone());
    }

    /// Takes over what the kernel has counted. Service ports that are not among these have no series any more.
    pub fn set(&self, counted: &[(PortId, Counted)]) {
        for (id, Counted { packets, bytes }) in counted {
            let label = ByPort::of(id);
            raise(&self.packets.get_or_create(&label), *packets);
            raise(&self.bytes.get_or_create(&label), *bytes);
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let now: HashSet<PortId> = counted.iter().map(|(id, _)| id.clone()).collect();
        for gone in known.difference(&now) {
            let label = ByPort::of(gone);
            self.packets.remove(&label);
            self.bytes.remove(&label);
        }
        *known = now;
    }
}
