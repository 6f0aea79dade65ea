//! Who answers the health checks of load balancers, and what.
//!
//! In: a Service with a `healthCheckNodePort`, the node. Out: a [`HealthCheck`]. Reference §5.3 and HC-1 to HC-5; KEP-1669: an
//! endpoint that is about to end keeps its connections and counts for nothing here, so that load balancers leave the node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use pointsman_crds::node_config::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;

use super::node::NodePlan;
use super::port::PortPlan;
use crate::model::{Model, ObjectName};

/// What load balancers that ask for one Service get to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthCheck {
    /// Where it is answered. The unspecified address of a family means all addresses of that family.
    pub listen: BTreeSet<SocketAddr>,
    /// How many ready endpoints the Service has on this node, by family.
    pub local_endpoints: BTreeMap<IpFamily, usize>,
}

impl HealthCheck {
    /// Adds what holds in one family. `ports` are the Service's in that family.
    pub(super) fn add<'a>(
        &mut self,
        number: u16,
        service: &ObjectName,
        ports: impl Iterator<Item = &'a PortPlan>,
        model: &Model,
        node: &NodePlan,
        config: &NodeProxyConfiguration,
    ) {
        let addresses = addresses(ports, node, config);
        self.listen.extend(addresses.into_iter().map(|address| SocketAddr::new(address, number)));
        self.local_endpoints.insert(node.family, local_endpoints(service, model, node));
    }
}

/// The addresses that NodePorts answer at, and the load balancer's own: some balancers send their health checks to the
/// address that they balance (k/k#97225).
fn addresses<'a>(
    ports: impl Iterator<Item = &'a PortPlan>,
    node: &NodePlan,
    config: &NodeProxyConfiguration,
) -> BTreeSet<IpAddr> {
    let (any, loopback): (IpAddr, IpAddr) = match node.family {
        IpFamily::IPv4 => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
        IpFamily::IPv6 => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
    };
    if node.node_ports.all {
        return BTreeSet::from([any]);
    }
    let named = |entry: &str| {
        entry == "localhost" || entry.parse::<IpNet>().is_ok_and(|block| block.contains(&loopback))
    };
    let mut addresses = node.node_ports.addresses.clone();
    if config.node_port_addresses.iter().any(|entry| named(&entry.0)) {
        addresses.insert(loopback);
    }
    addresses.extend(ports.flat_map(|port| &port.load_balancer_ips));
    // A link-local address means nothing without an interface.
    addresses.retain(|address| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    addresses
}

/// Distinct addresses: a pod with several ports is one endpoint. The ready copy of an endpoint in several slices counts.
fn local_endpoints(service: &ObjectName, model: &Model, node: &NodePlan) -> usize {
    let mut ready = BTreeSet::new();
    for slice in model.slices(service).filter(|slice| slice.family == node.family && !slice.ports.is_empty())
    {
        let here = slice
            .endpoints
            .iter()
            .filter(|endpoint| endpoint.ready && endpoint.node.as_deref() == Some(node.name.as_str()));
        ready.extend(here.map(|endpoint| endpoint.address));
    }
    ready.len()
}
