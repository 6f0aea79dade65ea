//! The configuration of one node, complete, as it stands in that node's ConfigMap.
//!
//! In: merged [`ProxySettings`] (operator side, [`NodeProxyConfiguration::complete`]) or the bytes of a ConfigMap
//! (agent side, [`NodeProxyConfiguration::parse`]). Out: the same type, validated by the same code on both sides.
//! Every value is written out, so an agent of another version cannot apply other defaults, and a field that an
//! agent does not know makes it refuse the whole, so nothing is dropped in silence.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::names::CONFIG_MAX_BYTES;
use crate::proxy_configuration::Drift;
use crate::settings::{
    Cidr, DetectLocal, DetectLocalMode, IpFamilyPolicy, IptablesBackend, IpvsScheduler, LogLevel, Mode,
    NetworkCidr, NodePortAddress, ProxySettings, Userspace, UserspaceScheduler,
};

/// `apiVersion` of the node configuration that this build reads and writes.
pub const API_VERSION: &str = "agent.pointsman.dev/v1alpha1";
/// Versions that this build can read, as an agent announces them in `status.agent.configVersions`.
pub const SUPPORTED_VERSIONS: &[&str] = &["v1alpha1"];
/// `kind` of the node configuration.
pub const KIND: &str = "NodeProxyConfiguration";

/// Why a node configuration is refused. The agent then keeps the one it has.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NodeConfigError {
    /// The bytes are not YAML of the right shape; truncated content ends here too.
    #[error("the node configuration cannot be read: {0}")]
    Unreadable(String),
    /// A field that this build does not know.
    #[error(
        "the node configuration has a field that this agent does not support: {0}; upgrade the agent first"
    )]
    UnsupportedField(String),
    /// Another `apiVersion` or `kind`.
    #[error(
        "the node configuration is {found}, this agent reads {API_VERSION} {KIND}; upgrade the agent or the operator"
    )]
    UnsupportedVersion {
        /// What it says it is.
        found: String,
    },
    /// The annotation does not match the bytes.
    #[error(
        "the node configuration does not match its hash: the annotation says {annotated}, the content has {actual}"
    )]
    HashMismatch {
        /// The annotation's value.
        annotated: String,
        /// The hash of the bytes.
        actual: String,
    },
    /// It is larger than the contract allows.
    #[error("the node configuration has {0} bytes, more than the {CONFIG_MAX_BYTES} allowed")]
    TooLarge(usize),
    /// Values contradict each other or are out of range. Names every fault.
    #[error("the node configuration is invalid: {}", .0.join("; "))]
    Invalid(Vec<String>),
}

/// All settings of one node, nothing left open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeProxyConfiguration {
    /// Always [`API_VERSION`].
    pub api_version: String,
    /// Always [`KIND`].
    pub kind: String,
    /// How Services are programmed.
    pub mode: Mode,
    /// Modes to try, in order, if the node cannot run `mode`.
    pub fallback_modes: Vec<Mode>,
    /// Value of `service.kubernetes.io/service-proxy-name` to serve; empty: Services without that label.
    pub service_proxy_name: String,
    /// Which IP families must be served.
    pub ip_family_policy: IpFamilyPolicy,
    /// Node addresses that answer on NodePorts.
    pub node_port_addresses: Vec<NodePortAddress>,
    /// How packets of local pods are recognised.
    pub detect_local: NodeDetectLocal,
    /// Which packets get the node's address as source.
    pub masquerade: NodeMasquerade,
    /// How often the kernel is written.
    pub sync: NodeSync,
    /// Settings of mode iptables; kept also in other modes, for a fallback.
    pub iptables: NodeIptables,
    /// Settings of mode nftables; kept also in other modes, for a fallback.
    pub nftables: NodeNftables,
    /// Settings of mode ipvs; kept also in other modes, for a fallback.
    pub ipvs: NodeIpvs,
    /// Settings of mode userspace; kept also in other modes, for a fallback.
    pub userspace: NodeUserspace,
    /// Kernel connection tracking.
    pub conntrack: NodeConntrack,
    /// What to do about foreign changes to the kernel state.
    pub drift: Drift,
    /// Port of /healthz and /livez; 0: off.
    pub healthz_port: u16,
    /// Port of /metrics; 0: off.
    pub metrics_port: u16,
    /// Address that /metrics listens on.
    pub metrics_bind_address: IpAddr,
    /// Least severe messages logged.
    pub log_level: LogLevel,
}

/// How packets of local pods are recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "mode", deny_unknown_fields)]
pub enum NodeDetectLocal {
    /// By source address, in any of these blocks.
    ClusterCIDR {
        /// Pod address blocks of the cluster.
        #[serde(rename = "clusterCIDRs")]
        cluster_cidrs: Vec<IpNet>,
    },
    /// By source address, in the Node's `spec.podCIDRs`.
    NodeCIDR {},
    /// By the interface that the packet came in on.
    BridgeInterface {
        /// The bridge's name.
        #[serde(rename = "bridgeInterface")]
        bridge_interface: String,
    },
    /// By the beginning of that interface's name.
    InterfaceNamePrefix {
        /// The beginning.
        #[serde(rename = "interfaceNamePrefix")]
        interface_name_prefix: String,
    },
}

/// Which packets get the node's address as source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeMasquerade {
    /// All traffic to ClusterIPs, also from pods.
    pub all: bool,
    /// Bit of the packet mark, 0 to 31.
    pub bit: u8,
}

impl NodeMasquerade {
    /// The packet mark with only the masquerade bit set.
    #[must_use]
    pub fn mark(self) -> u32 {
        1 << self.bit
    }
}

/// How often the kernel is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSync {
    /// Longest time between two looks at the kernel.
    pub period_seconds: u32,
    /// Shortest pause between the end of one write and the start of the next.
    pub min_period_milliseconds: u32,
}

/// Settings of mode iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeIptables {
    /// Serve NodePorts on 127.0.0.1.
    pub localhost_node_ports: bool,
    /// Flavour of the tools.
    pub backend: IptablesBackend,
    /// How long to wait for the xtables lock.
    pub lock_timeout_seconds: u32,
}

/// Settings of mode nftables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeNftables {
    /// Count the packets and bytes that clients send to each Service port.
    pub counters: bool,
}

/// Settings of mode ipvs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeIpvs {
    /// Scheduling algorithm.
    pub scheduler: IpvsScheduler,
    /// Answer ARP only for addresses of the interface that was asked.
    #[serde(rename = "strictARP")]
    pub strict_arp: bool,
    /// Virtual servers in these blocks are never touched.
    #[serde(rename = "excludeCIDRs")]
    pub exclude_cidrs: Vec<IpNet>,
    /// Timeout of idle TCP connections; 0 leaves the kernel's.
    pub tcp_timeout_seconds: u32,
    /// Timeout of TCP connections after a FIN; 0 leaves the kernel's.
    pub tcp_fin_timeout_seconds: u32,
    /// Timeout of UDP; 0 leaves the kernel's.
    pub udp_timeout_seconds: u32,
}

/// Settings of mode userspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeUserspace {
    /// How an endpoint is chosen for a new connection.
    pub scheduler: UserspaceScheduler,
}

/// Kernel connection tracking. A 0 leaves the kernel's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeConntrack {
    /// Entries per processor.
    pub max_per_core: u32,
    /// Least size of the table.
    pub min: u32,
    /// Accept TCP segments outside the window.
    pub tcp_be_liberal: bool,
    /// Timeout of idle established TCP connections.
    pub tcp_established_timeout_seconds: u32,
    /// Timeout of half-closed TCP connections.
    pub tcp_close_wait_timeout_seconds: u32,
    /// Timeout of UDP before a reply.
    pub udp_timeout_seconds: u32,
    /// Timeout of UDP flows with replies.
    pub udp_stream_timeout_seconds: u32,
}

/// `sha256:<hex>` of a node configuration's bytes, as the ConfigMap's annotation has it.
#[must_use]
pub fn config_hash(content: &str) -> String {
    use std::fmt::Write;
    Sha256::digest(content.as_bytes()).iter().fold("sha256:".to_owned(), |mut hash, byte| {
        let _ = write!(hash, "{byte:02x}");
        hash
    })
}

/// The revision of a configuration in a pool, `<pool>-<first 10 hex digits of the hash>`. Content-addressed: undoing
/// an edit leads back to the old revision.
#[must_use]
pub fn revision(pool: &str, hash: &str) -> String {
    let digits = hash.strip_prefix("sha256:").unwrap_or(hash);
    format!("{pool}-{}", &digits[..digits.len().min(10)])
}

impl NodeProxyConfiguration {
    /// Fills what no layer has set with the defaults, and validates the result.
    ///
    /// The defaults are kube-proxy's, except where `architecture.md` decision 1 differs: NodePorts answer on the primary
    /// addresses, not on localhost, and local pods are recognised by the Node's own `podCIDRs`.
    pub fn complete(settings: &ProxySettings, drift: Drift) -> Result<Self, NodeConfigError> {
        let mut faults = Vec::new();
        let masquerade = settings.masquerade.clone().unwrap_or_default();
        let sync = settings.sync.clone().unwrap_or_default();
        let iptables = settings.iptables.clone().unwrap_or_default();
        let nftables = settings.nftables.clone().unwrap_or_default();
        let ipvs = settings.ipvs.clone().unwrap_or_default();
        let conntrack = settings.conntrack.clone().unwrap_or_default();
        let Some(mode) = settings.mode else {
            return Err(NodeConfigError::Invalid(vec!["mode is not set in any layer".to_owned()]));
        };
        let mut whole = |path: &str, value: Option<i32>, default: u32| match value {
            None => default,
            Some(value) => u32::try_from(value).unwrap_or_else(|_| {
                faults.push(format!("{path}: {value} is negative"));
                default
            }),
        };
        let config = Self {
            api_version: API_VERSION.to_owned(),
            kind: KIND.to_owned(),
            mode,
            // A layer may choose what the base has as a fallback.
            fallback_modes: settings
                .fallback_modes
                .iter()
                .flatten()
                .copied()
                .filter(|other| *other != mode)
                .collect(),
            service_proxy_name: settings.service_proxy_name.clone().unwrap_or_default(),
            ip_family_policy: settings.ip_family_policy.unwrap_or(IpFamilyPolicy::PreferDualStack),
            node_port_addresses: settings
                .node_port_addresses
                .clone()
                .filter(|addresses| !addresses.is_empty())
                .unwrap_or_else(|| vec![NodePortAddress("primary".to_owned())]),
            masquerade: NodeMasquerade {
                all: masquerade.all.unwrap_or(false),
                bit: u8::try_from(whole("masquerade.bit", masquerade.bit, 14)).unwrap_or(u8::MAX),
            },
            sync: NodeSync {
                period_seconds: whole("sync.periodSeconds", sync.period_seconds, 30),
                min_period_milliseconds: whole(
                    "sync.minPeriodMilliseconds",
                    sync.min_period_milliseconds,
                    1000,
                ),
            },
            iptables: NodeIptables {
                localhost_node_ports: iptables.localhost_node_ports.unwrap_or(false),
                backend: iptables.backend.unwrap_or(IptablesBackend::Auto),
                lock_timeout_seconds: whole("iptables.lockTimeoutSeconds", iptables.lock_timeout_seconds, 5),
            },
            conntrack: NodeConntrack {
                max_per_core: whole("conntrack.maxPerCore", conntrack.max_per_core, 32768),
                min: whole("conntrack.min", conntrack.min, 131_072),
                tcp_be_liberal: conntrack.tcp_be_liberal.unwrap_or(false),
                tcp_established_timeout_seconds: whole(
                    "conntrack.tcpEstablishedTimeoutSeconds",
                    conntrack.tcp_established_timeout_seconds,
                    86400,
                ),
                tcp_close_wait_timeout_seconds: whole(
                    "conntrack.tcpCloseWaitTimeoutSeconds",
                    conntrack.tcp_close_wait_timeout_seconds,
                    3600,
                ),
                udp_timeout_seconds: whole("conntrack.udpTimeoutSeconds", conntrack.udp_timeout_seconds, 0),
                udp_stream_timeout_seconds: whole(
                    "conntrack.udpStreamTimeoutSeconds",
                    conntrack.udp_stream_timeout_seconds,
                    0,
                ),
            },
            healthz_port: port(whole("healthzPort", settings.healthz_port, 10256)),
            metrics_port: port(whole("metricsPort", settings.metrics_port, 10249)),
            nftables: NodeNftables { counters: nftables.counters.unwrap_or(false) },
            ipvs: NodeIpvs {
                scheduler: ipvs.scheduler.unwrap_or(IpvsScheduler::Rr),
                strict_arp: ipvs.strict_arp.unwrap_or(false),
                tcp_timeout_seconds: whole("ipvs.tcpTimeoutSeconds", ipvs.tcp_timeout_seconds, 0),
                tcp_fin_timeout_seconds: whole("ipvs.tcpFinTimeoutSeconds", ipvs.tcp_fin_timeout_seconds, 0),
                udp_timeout_seconds: whole("ipvs.udpTimeoutSeconds", ipvs.udp_timeout_seconds, 0),
                exclude_cidrs: parse_cidrs(&ipvs.exclude_cidrs.unwrap_or_default(), &mut faults),
            },
            userspace: complete_userspace(settings.userspace.as_ref()),
            detect_local: complete_detect_local(settings.detect_local.as_ref(), &mut faults),
            metrics_bind_address: settings
                .metrics_bind_address
                .as_deref()
                .unwrap_or("127.0.0.1")
                .parse()
                .unwrap_or_else(|_| {
                    faults.push("metricsBindAddress: must be an IP address".to_owned());
                    IpAddr::from([127, 0, 0, 1])
                }),
            log_level: settings.log_level.unwrap_or(LogLevel::Info),
            drift,
        };
        faults.extend(config.faults());
        if faults.is_empty() { Ok(config) } else { Err(NodeConfigError::Invalid(faults)) }
    }

    /// Reads the content of a node ConfigMap. `annotated_hash` is the annotation
    /// [`crate::names::ANNOTATION_CONFIG_HASH`]; pass `None` only for an edit under break-glass.
    pub fn parse(content: &str, annotated_hash: Option<&str>) -> Result<Self, NodeConfigError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Header {
            #[serde(default)]
            api_version: String,
            #[serde(default)]
            kind: String,
        }
        if content.len() > CONFIG_MAX_BYTES {
            return Err(NodeConfigError::TooLarge(content.len()));
        }
        if let Some(annotated) = annotated_hash {
            let actual = config_hash(content);
            if actual != annotated {
                return Err(NodeConfigError::HashMismatch { annotated: annotated.to_owned(), actual });
            }
        }
        let header: Header = serde_saphyr::from_str(content)
            .map_err(|error| NodeConfigError::Unreadable(error.to_string()))?;
        if header.api_version != API_VERSION || header.kind != KIND {
            return Err(NodeConfigError::UnsupportedVersion {
                found: format!("{:?} {:?}", header.api_version, header.kind),
            });
        }
        let config: Self = serde_saphyr::from_str(content).map_err(|error| {
            let text = error.to_string();
            if text.contains("unknown field") || text.contains("unknown variant") {
                NodeConfigError::UnsupportedField(text)
            } else {
                NodeConfigError::Unreadable(text)
            }
        })?;
        let faults = config.faults();
        if faults.is_empty() { Ok(config) } else { Err(NodeConfigError::Invalid(faults)) }
    }

    /// The canonical text: every value written out, keys sorted, so equal configurations have equal hashes.
    pub fn render(&self) -> Result<String, NodeConfigError> {
        // serde_json's map is sorted by key.
        let value =
            serde_json::to_value(self).map_err(|error| NodeConfigError::Unreadable(error.to_string()))?;
        let content = serde_saphyr::to_string(&value)
            .map_err(|error| NodeConfigError::Unreadable(error.to_string()))?;
        if content.len() > CONFIG_MAX_BYTES {
            return Err(NodeConfigError::TooLarge(content.len()));
        }
        Ok(content)
    }

    /// Everything that is wrong with the values, one sentence each.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut check = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        check(self.masquerade.bit <= 31, "masquerade.bit: must be 0 to 31");
        check((1..=3600).contains(&self.sync.period_seconds), "sync.periodSeconds: must be 1 to 3600");
        check(
            u64::from(self.sync.min_period_milliseconds) <= u64::from(self.sync.period_seconds) * 1000,
            "sync.minPeriodMilliseconds must not be longer than sync.periodSeconds",
        );
        check(
            (1..=60).contains(&self.iptables.lock_timeout_seconds),
            "iptables.lockTimeoutSeconds: must be 1 to 60",
        );
        check(
            self.healthz_port == 0 || self.healthz_port != self.metrics_port,
            "healthzPort and metricsPort must differ",
        );
        check(!self.fallback_modes.contains(&self.mode), "fallbackModes must not contain the mode itself");
        check(self.fallback_modes.len() <= 2, "fallbackModes: at most 2");
        check(
            self.service_proxy_name.is_empty() || is_label_value(&self.service_proxy_name),
            "serviceProxyName: must be a label value",
        );
        check(
            self.drift.interval_seconds >= 10 && self.drift.interval_seconds <= 3600,
            "drift.intervalSeconds: must be 10 to 3600",
        );
        match &self.detect_local {
            NodeDetectLocal::ClusterCIDR { cluster_cidrs } => {
                check(
                    (1..=8).contains(&cluster_cidrs.len()),
                    "detectLocal.clusterCIDRs: 1 to 8 are needed in mode ClusterCIDR",
                );
                check(
                    cluster_cidrs.iter().all(|net| net.trunc() == *net),
                    "detectLocal.clusterCIDRs: must be CIDRs with no host bits set",
                );
            }
            NodeDetectLocal::NodeCIDR {} => {}
            NodeDetectLocal::BridgeInterface { bridge_interface: name }
            | NodeDetectLocal::InterfaceNamePrefix { interface_name_prefix: name } => check(
                is_interface_name(name),
                "detectLocal: the interface name must have 1 to 15 characters, none of them white space, '/' or '+'",
            ),
        }
        check(!self.node_port_addresses.is_empty(), "nodePortAddresses: must not be empty");
        for address in &self.node_port_addresses {
            check(
                matches!(address.0.as_str(), "primary" | "localhost" | "all")
                    || address.0.parse::<IpNet>().is_ok(),
                &format!(
                    "nodePortAddresses: {:?} is neither a CIDR nor one of primary, localhost, all",
                    address.0
                ),
            );
        }
        faults
    }
}

fn parse_cidrs(cidrs: &[Cidr], faults: &mut Vec<String>) -> Vec<IpNet> {
    let parse = |cidr: &Cidr| {
        let net = cidr.parse();
        if net.is_none() {
            faults.push(format!("ipvs.excludeCIDRs: {:?} is not a CIDR", cidr.0));
        }
        net
    };
    cidrs.iter().filter_map(parse).collect()
}

fn port(number: u32) -> u16 {
    // Out of range cannot pass the API server; in a merge it becomes 0, which is "off", never another port.
    u16::try_from(number).unwrap_or(0)
}

fn is_label_value(value: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    value.len() <= 63
        && edge(value.chars().next())
        && edge(value.chars().last())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// What the kernel accepts as an interface name, less `+`, which is a wildcard to iptables.
fn is_interface_name(name: &str) -> bool {
    (1..=15).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '/' | '+' | '"' | '\\'))
}

fn complete_userspace(userspace: Option<&Userspace>) -> NodeUserspace {
    let scheduler = userspace.and_then(|userspace| userspace.scheduler);
    NodeUserspace { scheduler: scheduler.unwrap_or(UserspaceScheduler::Rr) }
}

fn complete_detect_local(detect: Option<&DetectLocal>, faults: &mut Vec<String>) -> NodeDetectLocal {
    let Some(detect) = detect else { return NodeDetectLocal::NodeCIDR {} };
    let networks = |cidrs: &[NetworkCidr], faults: &mut Vec<String>| {
        cidrs
            .iter()
            .filter_map(|cidr| {
                let net = cidr.parse();
                if net.is_none() {
                    faults.push(format!(
                        "detectLocal.clusterCIDRs: {:?} is not a CIDR without host bits",
                        cidr.0
                    ));
                }
                net
            })
            .collect()
    };
    match detect.mode {
        DetectLocalMode::ClusterCIDR => NodeDetectLocal::ClusterCIDR {
            cluster_cidrs: networks(detect.cluster_cidrs.as_deref().unwrap_or_default(), faults),
        },
        DetectLocalMode::NodeCIDR => NodeDetectLocal::NodeCIDR {},
        DetectLocalMode::BridgeInterface => NodeDetectLocal::BridgeInterface {
            bridge_interface: detect.bridge_interface.clone().unwrap_or_default(),
        },
        DetectLocalMode::InterfaceNamePrefix => NodeDetectLocal::InterfaceNamePrefix {
            interface_name_prefix: detect.interface_name_prefix.clone().unwrap_or_default(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Mode;

    fn base() -> NodeProxyConfiguration {
        let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
        NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap()
    }

    // ids: CFG-15
    #[test]
    fn a_rendered_configuration_reads_back_as_itself() {
        let content = base().render().unwrap();
        let parsed = NodeProxyConfiguration::parse(&content, Some(&config_hash(&content))).unwrap();
        assert_eq!(parsed, base());
        assert_eq!(parsed.render().unwrap(), content, "rendering is canonical");
    }

    // ids: CFG-11
    #[test]
    fn the_text_that_people_read_is_pinned() {
        insta::assert_snapshot!(base().render().unwrap());
    }

    // ids: CFG-2
    #[test]
    fn every_truncation_is_refused() {
        let content = base().render().unwrap();
        for end in 0..content.trim_end().len() {
            let cut = &content[..end];
            // A cut inside the last scalar can still be a whole document; the hash catches that one.
            assert!(
                NodeProxyConfiguration::parse(cut, Some(&config_hash(&content))).is_err(),
                "cut at {end}"
            );
        }
    }

    // ids: CFG-1
    #[test]
    fn an_unknown_field_at_any_depth_is_refused_by_name() {
        let content = base().render().unwrap();
        for (at, with) in [
            ("mode: iptables\n", "mode: iptables\ncolour: red\n"),
            ("  bit: 14\n", "  bit: 14\n  colour: red\n"),
        ] {
            let edited = content.replace(at, with);
            assert_ne!(edited, content);
            let error = NodeProxyConfiguration::parse(&edited, Some(&config_hash(&edited))).unwrap_err();
            assert!(
                matches!(&error, NodeConfigError::UnsupportedField(text) if text.contains("colour")),
                "{error}"
            );
        }
    }

    // ids: CFG-2
    #[test]
    fn another_version_or_kind_is_named() {
        for (old, new) in [("v1alpha1", "v9"), (KIND, "Other")] {
            let edited = base().render().unwrap().replace(old, new);
            let error = NodeProxyConfiguration::parse(&edited, None).unwrap_err();
            assert!(
                matches!(&error, NodeConfigError::UnsupportedVersion { found } if found.contains(new)),
                "{error}"
            );
        }
    }

    #[test]
    fn a_wrong_hash_is_refused() {
        let content = base().render().unwrap();
        let error = NodeProxyConfiguration::parse(&content, Some("sha256:00")).unwrap_err();
        assert!(matches!(error, NodeConfigError::HashMismatch { .. }));
    }

    #[test]
    fn a_layer_may_choose_the_fallback_of_the_base() {
        let merged = ProxySettings {
            mode: Some(Mode::Iptables),
            fallback_modes: Some(vec![Mode::Iptables, Mode::Nftables]),
            ..ProxySettings::default()
        };
        assert_eq!(
            NodeProxyConfiguration::complete(&merged, Drift::default()).unwrap().fallback_modes,
            [Mode::Nftables]
        );
    }

    // ids: CFG-12
    #[test]
    fn every_fault_is_named_at_once() {
        let mut config = base();
        config.masquerade.bit = 32;
        config.metrics_port = config.healthz_port;
        config.fallback_modes = vec![config.mode];
        config.detect_local = NodeDetectLocal::BridgeInterface { bridge_interface: "a/b".to_owned() };
        let content = config.render().unwrap();
        let NodeConfigError::Invalid(faults) = NodeProxyConfiguration::parse(&content, None).unwrap_err()
        else {
            panic!("not Invalid")
        };
        assert_eq!(faults.len(), 4, "{faults:?}");
    }

    #[test]
    fn a_revision_is_the_pool_and_ten_digits_of_the_hash() {
        let hash = config_hash("x");
        assert_eq!(revision("edge", &hash), format!("edge-{}", &hash[7..17]));
    }
}
