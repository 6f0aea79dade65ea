//! The data-plane settings of one layer, all optional, and the words they are made of.
//!
//! In: what people write under `spec.proxy`. Out: [`ProxySettings`], merged field by field by the operator and
//! completed into a [`crate::NodeProxyConfiguration`]. No field has a schema default: a default in a high layer
//! would mask what a lower layer says.

use std::fmt;

use ipnet::IpNet;
use kube::KubeSchema;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How Services are programmed into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// nftables, written by netlink.
    Nftables,
    /// iptables, in the chains that kube-proxy uses.
    Iptables,
    /// IPVS virtual servers.
    Ipvs,
    /// A proxy in the agent itself.
    Userspace,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
        })
    }
}

/// Which IP families a node must serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IpFamilyPolicy {
    /// Only the family of the node's primary address.
    SingleStack,
    /// The families that the node has.
    PreferDualStack,
    /// Both; a node that lacks one is Incompatible.
    RequireDualStack,
}

/// How an agent knows that a packet comes from a pod of its own node (or cluster).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DetectLocalMode {
    /// The source address is in `clusterCIDRs`.
    ClusterCIDR,
    /// The source address is in the node's own `spec.podCIDRs`.
    NodeCIDR,
    /// The packet came in on `bridgeInterface`.
    BridgeInterface,
    /// The packet came in on an interface whose name begins with `interfaceNamePrefix`.
    InterfaceNamePrefix,
}

/// Which flavour of the iptables tools is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IptablesBackend {
    /// The one that the node's kubelet or container network already uses.
    Auto,
    /// `iptables-legacy`.
    Legacy,
    /// `iptables-nft`.
    NFT,
}

/// Scheduling algorithm of an IPVS virtual server, by the kernel's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the kernel's names")]
pub enum IpvsScheduler {
    Rr,
    Wrr,
    Lc,
    Wlc,
    Lblc,
    Lblcr,
    Sh,
    Dh,
    Sed,
    Nq,
    Mh,
}

/// How mode userspace chooses an endpoint for a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UserspaceScheduler {
    /// One after the other.
    Rr,
    /// The one with the fewest open connections of this node.
    Lc,
}

/// What an agent does when somebody else changed its kernel state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DriftPolicy {
    /// Rewrite what differs.
    #[default]
    Repair,
    /// Say so in status and metrics.
    Report,
    /// Do not look.
    Off,
}

/// Least severe messages that an agent logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the usual names")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// The name that a tracing filter takes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// An address block, such as 10.0.0.0/8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(
    inline,
    extend("maxLength" = 43, "x-kubernetes-validations" = [{
        "rule": "isCIDR(self)",
        "message": "must be a CIDR such as 10.0.0.0/8",
    }])
)]
pub struct Cidr(pub String);

/// An address block without host bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(
    inline,
    extend("maxLength" = 43, "x-kubernetes-validations" = [{
        "rule": "isCIDR(self) && cidr(self) == cidr(self).masked()",
        "message": "must be a CIDR with no host bits set",
    }])
)]
pub struct NetworkCidr(pub String);

/// Node addresses that answer on NodePorts: `primary`, `localhost`, `all`, or an address block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(
    inline,
    extend("maxLength" = 43, "x-kubernetes-validations" = [{
        "rule": "self in ['primary','localhost','all'] || isCIDR(self)",
        "message": "must be a CIDR such as 10.0.0.0/8 or one of primary, localhost, all",
    }])
)]
pub struct NodePortAddress(pub String);

impl Cidr {
    /// The block, if it is one.
    #[must_use]
    pub fn parse(&self) -> Option<IpNet> {
        self.0.parse().ok()
    }
}

impl NetworkCidr {
    /// The block, if it is one and has no host bits.
    #[must_use]
    pub fn parse(&self) -> Option<IpNet> {
        self.0.parse().ok().filter(|net: &IpNet| net.trunc() == *net)
    }
}

/// Settings of one layer. A field that is not set is taken from the next lower layer, and at last from
/// [`crate::node_config`]'s defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.mode) || !has(self.ipvs) || self.mode == 'ipvs'")
        .message("proxy.ipvs may only be set together with mode ipvs")
        .field_path(".ipvs"),
    validation = Rule::new("!has(self.mode) || !has(self.iptables) || self.mode == 'iptables' || (has(self.fallbackModes) && 'iptables' in self.fallbackModes)")
        .message("proxy.iptables may only be set with mode iptables or with iptables in fallbackModes")
        .field_path(".iptables"),
    validation = Rule::new("!has(self.mode) || !has(self.nftables) || self.mode == 'nftables' || (has(self.fallbackModes) && 'nftables' in self.fallbackModes)")
        .message("proxy.nftables may only be set with mode nftables or with nftables in fallbackModes")
        .field_path(".nftables"),
    validation = Rule::new("!has(self.mode) || !has(self.userspace) || self.mode == 'userspace' || (has(self.fallbackModes) && 'userspace' in self.fallbackModes)")
        .message("proxy.userspace may only be set with mode userspace or with userspace in fallbackModes")
        .field_path(".userspace"),
    validation = Rule::new("!has(self.mode) || !has(self.fallbackModes) || !(self.mode in self.fallbackModes)")
        .message("fallbackModes must not contain the mode itself")
        .field_path(".fallbackModes"),
    validation = Rule::new("!has(self.healthzPort) || !has(self.metricsPort) || self.healthzPort == 0 || self.healthzPort != self.metricsPort")
        .message("healthzPort and metricsPort must differ"),
)]
pub struct ProxySettings {
    /// How Services are programmed into the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Tried in order on a node that lacks kernel or tool support for mode; empty means keep the last good
    /// configuration and report Compatible=False.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub fallback_modes: Option<Vec<Mode>>,
    /// Serve only Services whose label service.kubernetes.io/service-proxy-name has this value; empty means those
    /// without the label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63), regex(pattern = "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"))]
    pub service_proxy_name: Option<String>,
    /// Which IP families a node must serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip_family_policy: Option<IpFamilyPolicy>,
    /// Node addresses that answer on NodePorts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub node_port_addresses: Option<Vec<NodePortAddress>>,
    /// How the agent recognises packets from local pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detect_local: Option<DetectLocal>,
    /// Which packets get the node's address as source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<Masquerade>,
    /// How often the kernel is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync: Option<Sync>,
    /// Settings of mode iptables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iptables: Option<Iptables>,
    /// Settings of mode nftables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nftables: Option<Nftables>,
    /// Settings of mode ipvs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipvs: Option<Ipvs>,
    /// Settings of mode userspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub userspace: Option<Userspace>,
    /// Kernel connection tracking.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conntrack: Option<Conntrack>,
    /// Port of /healthz and /livez on every node address; 0 turns it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 65535))]
    pub healthz_port: Option<i32>,
    /// Port of /metrics; 0 turns it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 65535))]
    pub metrics_port: Option<i32>,
    /// Address that /metrics listens on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 45))]
    #[x_kube(validation = Rule::new("isIP(self)").message("must be an IP address"))]
    pub metrics_bind_address: Option<String>,
    /// Least severe messages that the agent logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_level: Option<LogLevel>,
}

/// How the agent recognises packets from local pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(self.mode == 'ClusterCIDR') == has(self.clusterCIDRs)")
        .message("clusterCIDRs must be set exactly when detectLocal.mode is ClusterCIDR"),
    validation = Rule::new("(self.mode == 'BridgeInterface') == has(self.bridgeInterface)")
        .message("bridgeInterface must be set exactly when detectLocal.mode is BridgeInterface"),
    validation = Rule::new("(self.mode == 'InterfaceNamePrefix') == has(self.interfaceNamePrefix)")
        .message("interfaceNamePrefix must be set exactly when detectLocal.mode is InterfaceNamePrefix"),
)]
pub struct DetectLocal {
    /// The criterion.
    pub mode: DetectLocalMode,
    /// Pod address blocks of the cluster.
    #[serde(rename = "clusterCIDRs", default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 8))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub cluster_cidrs: Option<Vec<NetworkCidr>>,
    /// Name of the bridge that local pods are attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15), regex(pattern = "^[^/+\\s]+$"))]
    pub bridge_interface: Option<String>,
    /// What the names of local pods' interfaces begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15), regex(pattern = "^[^/+\\s]+$"))]
    pub interface_name_prefix: Option<String>,
}

/// Which packets get the node's address as source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Masquerade {
    /// Masquerade all traffic to ClusterIPs, also from pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all: Option<bool>,
    /// Bit of the packet mark that says "masquerade", 0 to 31.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31))]
    pub bit: Option<i32>,
}

/// How often the kernel is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.minPeriodMilliseconds) || !has(self.periodSeconds) || self.minPeriodMilliseconds <= self.periodSeconds * 1000")
        .message("sync.minPeriodMilliseconds must not be longer than sync.periodSeconds"),
)]
pub struct Sync {
    /// Longest time between two looks at the kernel; /healthz turns red after twice this without a success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub period_seconds: Option<i32>,
    /// Shortest pause between the end of one write and the start of the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 60000))]
    pub min_period_milliseconds: Option<i32>,
}

/// Settings of mode iptables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Iptables {
    /// Serve NodePorts on 127.0.0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub localhost_node_ports: Option<bool>,
    /// Which flavour of the tools is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<IptablesBackend>,
    /// How long to wait for the lock that the legacy tools share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 60))]
    pub lock_timeout_seconds: Option<i32>,
}

/// Settings of mode nftables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Nftables {
    /// Count the packets and bytes that clients send to each Service port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<bool>,
}

/// Settings of mode ipvs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ipvs {
    /// Scheduling algorithm of every virtual server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<IpvsScheduler>,
    /// Answer ARP only for addresses of the interface that was asked.
    #[serde(rename = "strictARP", default, skip_serializing_if = "Option::is_none")]
    pub strict_arp: Option<bool>,
    /// Virtual servers in these blocks are never touched.
    #[serde(rename = "excludeCIDRs", default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub exclude_cidrs: Option<Vec<Cidr>>,
    /// IPVS timeout of idle TCP connections; 0 leaves the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub tcp_timeout_seconds: Option<i32>,
    /// IPVS timeout of TCP connections after a FIN; 0 leaves the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub tcp_fin_timeout_seconds: Option<i32>,
    /// IPVS timeout of UDP; 0 leaves the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub udp_timeout_seconds: Option<i32>,
}

/// Settings of mode userspace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Userspace {
    /// How an endpoint is chosen for a new connection: rr one after the other, lc the one with the fewest connections of this
    /// node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<UserspaceScheduler>,
}

/// Kernel connection tracking. A 0 leaves the kernel's value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Conntrack {
    /// Entries per processor; the table is raised, never lowered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_per_core: Option<i32>,
    /// Least size of the table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub min: Option<i32>,
    /// Accept TCP segments outside the window instead of calling them invalid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_be_liberal: Option<bool>,
    /// Timeout of idle established TCP connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub tcp_established_timeout_seconds: Option<i32>,
    /// Timeout of TCP connections that one side has closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub tcp_close_wait_timeout_seconds: Option<i32>,
    /// Timeout of UDP before a reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub udp_timeout_seconds: Option<i32>,
    /// Timeout of UDP flows with replies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub udp_stream_timeout_seconds: Option<i32>,
}
