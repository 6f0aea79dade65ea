//! A Service, as far as routing depends on it.
//!
//! In: a Service object. Out: a [`Service`] record, or nothing for Services that have no virtual address (headless,
//! ExternalName). Reference §1.7. `appProtocol`, `allocateLoadBalancerNodePorts`, `trafficDistribution` (it acts through
//! the hints in slices) and `publishNotReadyAddresses` (it acts through the conditions in slices) do not matter here.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1;

use pointsman_crds::proxy_node_status::IpFamily;

use super::Pool;
use super::address::{family_of, parse_address, parse_network};

/// Label that hands a Service to another proxy.
const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// `sessionAffinityConfig.clientIP.timeoutSeconds`, where it is not set.
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;

/// A transport protocol that Services can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    pub(super) fn read(text: Option<&str>) -> Option<Self> {
        match text {
            None | Some("" | "TCP") => Some(Self::Tcp),
            Some("UDP") => Some(Self::Udp),
            Some("SCTP") => Some(Self::Sctp),
            Some(_) => None,
        }
    }

    /// The number in the IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// The protocol with this number, if Services can have it.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.number() == number)
    }

    /// The name in lower case, as the kernel's tools write it.
    #[must_use]
    pub fn lower(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name; empty if the only port has none.
    pub name: Arc<str>,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port at the virtual addresses.
    pub port: u16,
    /// The port at the node's addresses.
    pub node_port: Option<u16>,
}

/// A Service that has a virtual address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Value of the label `service.kubernetes.io/service-proxy-name`.
    pub proxy_name: Option<Box<str>>,
    /// ClusterIPs, at most one a family.
    pub cluster_ips: Box<[IpAddr]>,
    /// `spec.externalIPs`.
    pub external_ips: Box<[IpAddr]>,
    /// Ingress addresses whose `ipMode` is not `Proxy`.
    pub load_balancer_ips: Box<[IpAddr]>,
    /// `spec.loadBalancerSourceRanges`; `None` if it is not set. An empty list means that none of the entries could
    /// be read: nobody may pass.
    pub source_ranges: Option<Box<[IpNet]>>,
    /// `internalTrafficPolicy: Local`.
    pub internal_local: bool,
    /// `externalTrafficPolicy: Local`.
    pub external_local: bool,
    /// Seconds of `sessionAffinity: ClientIP`.
    pub affinity: Option<u32>,
    /// Port of the load balancer's health check; only for LoadBalancer Services with `externalTrafficPolicy: Local`.
    pub health_check_node_port: Option<u16>,
    /// Its ports.
    pub ports: Box<[ServicePort]>,
}

impl Service {
    /// Reads a Service. `None` if it has nothing to route; what is wrong with the rest goes to `faults`.
    pub(super) fn read(
        object: &v1::Service,
        strings: &mut Pool<str>,
        faults: &mut Vec<String>,
    ) -> Option<Self> {
        let spec = object.spec.as_ref()?;
        let kind = spec.type_.as_deref().unwrap_or("ClusterIP");
        let balanced = kind == "LoadBalancer";
        let listed = spec.cluster_ips.clone().filter(|ips| !ips.is_empty());
        let listed = listed.or_else(|| spec.cluster_ip.clone().map(|ip| vec![ip])).unwrap_or_default();
        if kind == "ExternalName" || listed.iter().all(|ip| ip.is_empty() || ip == "None") {
            return None;
        }
        let cluster_ips = addresses("spec.clusterIPs", &listed, faults);
        let ports = read_ports(spec, strings, faults);
        if ports.is_empty() || cluster_ips.is_empty() {
            return None;
        }
        let ingress = object.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = ingress.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default();
        let ingress: Vec<String> = ingress
            .iter()
            .filter(|entry| balanced && entry.ip_mode.as_deref() != Some("Proxy"))
            .filter_map(|entry| entry.ip.clone().filter(|ip| !ip.is_empty()))
            .collect();
        let external_local = spec.external_traffic_policy.as_deref() == Some("Local");
        Some(Self {
            proxy_name: object
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(PROXY_NAME_LABEL))
                .map(|name| name.as_str().into()),
            cluster_ips,
            external_ips: addresses(
                "spec.externalIPs",
                spec.external_ips.as_deref().unwrap_or_default(),
                faults,
            ),
            load_balancer_ips: addresses("status.loadBalancer.ingress", &ingress, faults),
            source_ranges: spec
                .load_balancer_source_ranges
                .as_ref()
                .filter(|ranges| balanced && !ranges.is_empty())
                .map(|ranges| source_ranges(ranges, faults)),
            internal_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
            external_local,
            affinity: (spec.session_affinity.as_deref() == Some("ClientIP")).then(|| affinity(spec)),
            health_check_node_port: spec
                .health_check_node_port
                .filter(|_| balanced && external_local)
                .and_then(port_number),
            ports,
        })
    }
}

impl Service {
    /// Whether it has a ClusterIP of a family.
    #[must_use]
    pub fn has_family(&self, family: IpFamily) -> bool {
        self.cluster_ips.iter().any(|address| family_of(*address) == family)
    }
}

/// A port number, if it is one.
pub(super) fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number != 0)
}

fn affinity(spec: &v1::ServiceSpec) -> u32 {
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let seconds = config.and_then(|client_ip| client_ip.timeout_seconds).and_then(|s| u32::try_from(s).ok());
    seconds.filter(|seconds| (1..=86_400).contains(seconds)).unwrap_or(DEFAULT_AFFINITY_SECONDS)
}

fn read_ports(
    spec: &v1::ServiceSpec,
    strings: &mut Pool<str>,
    faults: &mut Vec<String>,
) -> Box<[ServicePort]> {
    let mut ports: Vec<ServicePort> = Vec::new();
    for port in spec.ports.as_deref().unwrap_or_default() {
        let name = port.name.as_deref().unwrap_or_default();
        let Some(protocol) = Protocol::read(port.protocol.as_deref()) else {
            let protocol = port.protocol.as_deref().unwrap_or_default();
            faults.push(format!("port {name:?}: protocol {protocol:?} is not TCP, UDP or SCTP; not served"));
            continue;
        };
        let Some(number) = port_number(port.port) else {
            faults.push(format!("port {name:?}: {} is not a port number; not served", port.port));
            continue;
        };
        if ports
            .iter()
            .any(|other| other.protocol == protocol && (other.port == number || other.name.as_ref() == name))
        {
            faults.push(format!(
                "port {name:?}: {number}/{protocol} is listed twice; only the first is served"
            ));
            continue;
        }
        let node_port = port.node_port.filter(|number| *number != 0);
        if let Some(number) = node_port.filter(|number| port_number(*number).is_none()) {
            faults.push(format!("port {name:?}: nodePort {number} is not a port number; served without"));
        }
        ports.push(ServicePort {
            name: strings.share(name),
            protocol,
            port: number,
            node_port: node_port.and_then(port_number),
        });
    }
    ports.into()
}

fn addresses(field: &str, listed: &[String], faults: &mut Vec<String>) -> Box<[IpAddr]> {
    let mut addresses = Vec::new();
    for text in listed {
        match parse_address(text) {
            Some(address) if address.is_unspecified() || address.is_multicast() => {
                faults.push(format!("{field}: {text:?} cannot be an address of a Service; not served"));
            }
            Some(address) if !addresses.contains(&address) => addresses.push(address),
            Some(_) => {}
            None => faults.push(format!("{field}: {text:?} is not an IP address; not served")),
        }
    }
    addresses.into()
}

fn source_ranges(listed: &[String], faults: &mut Vec<String>) -> Box<[IpNet]> {
    let mut ranges = Vec::new();
    for text in listed {
        match parse_network(text) {
            Some(range) => ranges.push(range),
            None => faults
                .push(format!("spec.loadBalancerSourceRanges: {text:?} is not a CIDR; it admits nobody")),
        }
    }
    ranges.sort_unstable();
    ranges.dedup();
    ranges.into()
}
