//! The own Node, as far as routing depends on it.
//!
//! In: a Node object. Out: [`NodeFacts`], equal for two Nodes that are to be served alike, so that a heartbeat of the
//! kubelet changes nothing.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use pointsman_crds::proxy_node_status::IpFamily;

use super::address::{family_of, parse_address, parse_network};

/// What the agent needs to know of its own Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// The Node's name, as endpoints carry it.
    pub name: String,
    /// `status.addresses`: internal before external, in the Node's order; the first of a family is the primary one.
    pub addresses: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// Label `topology.kubernetes.io/zone`; empty counts as absent (TOP-5).
    pub zone: Option<String>,
}

impl NodeFacts {
    /// Reads a Node. What cannot be parsed is left out.
    #[must_use]
    pub fn from_node(node: &Node) -> Self {
        let listed = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
        let mut addresses: Vec<IpAddr> = Vec::new();
        for kind in ["InternalIP", "ExternalIP"] {
            for address in listed.iter().filter(|address| address.type_ == kind) {
                if let Some(address) = parse_address(&address.address)
                    && !addresses.contains(&address)
                {
                    addresses.push(address);
                }
            }
        }
        let spec = node.spec.as_ref();
        let blocks = spec.and_then(|spec| spec.pod_cidrs.clone()).filter(|blocks| !blocks.is_empty());
        let blocks = blocks.or_else(|| spec.and_then(|spec| spec.pod_cidr.clone()).map(|block| vec![block]));
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            addresses,
            pod_cidrs: blocks.unwrap_or_default().iter().filter_map(|block| parse_network(block)).collect(),
            zone: node
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get("topology.kubernetes.io/zone"))
                .filter(|zone| !zone.is_empty())
                .cloned(),
        }
    }

    /// The node's own address of a family.
    #[must_use]
    pub fn primary(&self, family: IpFamily) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| family_of(*address) == family)
    }
}
