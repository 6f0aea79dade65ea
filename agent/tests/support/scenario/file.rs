//! What a scenario file may hold, before names and families are resolved. A key that is not here is an error.

use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct File {
    #[serde(rename = "about")]
    _about: String,
    /// Addresses that the node has besides its usual ones.
    #[serde(default)]
    pub node_addresses: Vec<String>,
    pub steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Step {
    pub what: String,
    /// Behaviours of `docs/test-ids.tsv` that this step proves.
    #[serde(default)]
    pub ids: Vec<String>,
    #[serde(default)]
    pub apply: Vec<Value>,
    #[serde(default)]
    pub patch: Vec<Value>,
    #[serde(default)]
    pub delete: Vec<String>,
    /// Settings, as under `spec.proxy` of a ProxyConfiguration; what is not named has its default.
    pub config: Option<Value>,
    pub node: Option<Node>,
    /// The blocks that ClusterIPs are taken from.
    #[serde(rename = "serviceCIDRs")]
    pub service_cidrs: Option<Vec<String>>,
    #[serde(default)]
    pub wait_seconds: u64,
    #[serde(default)]
    pub expect: Vec<Row>,
    #[serde(default)]
    pub streams: Vec<Stream>,
    /// Modes in which this step ends all connections.
    #[serde(default)]
    pub cut: Vec<Cut>,
}

/// A mode that cannot keep connections.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cut {
    pub mode: Mode,
    #[serde(rename = "because")]
    _because: String,
}

/// Connections that are opened after the packets of the step and live until the end.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stream {
    pub from: OneOrMany,
    pub to: OneOrMany,
}

/// The own Node; what is not named is as at the start.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Node {
    pub zone: Option<String>,
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Option<Vec<String>>,
}

/// Packets and what becomes of them.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Row {
    pub from: OneOrMany,
    pub to: OneOrMany,
    #[serde(default)]
    pub reach: Vec<String>,
    #[serde(rename = "as")]
    pub source: Option<Source>,
    #[serde(default)]
    pub sticky: bool,
    pub forget_after_seconds: Option<u64>,
    pub get: Option<Get>,
    /// Empty: those of the destination.
    #[serde(default)]
    pub families: Vec<IpFamily>,
    #[serde(default)]
    pub unless: Vec<Unless>,
}

/// A mode in which something else happens.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Unless {
    pub mode: Mode,
    #[serde(rename = "because")]
    _because: String,
    #[serde(default)]
    pub reach: Vec<String>,
    #[serde(rename = "as")]
    pub source: Option<Source>,
    #[serde(default)]
    pub sticky: bool,
    pub get: Option<Get>,
}

/// The source that an endpoint sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Source {
    /// The sender's.
    Raw,
    /// One of the node's.
    Masq,
}

/// What a packet gets that reaches no endpoint.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Get {
    Refused,
    Dropped,
    Untouched,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(super) fn list(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

/// A Service in short: what is usually in its metadata, and its `spec` and `status` as they are.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ServiceFile {
    pub service: String,
    #[serde(default)]
    pub labels: Value,
    #[serde(default)]
    pub spec: Value,
    #[serde(default)]
    pub status: Value,
}

/// An EndpointSlice in short.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct SliceFile {
    /// The Service that it belongs to.
    pub endpoints: String,
    /// Its own name; the Service's, if not given.
    pub name: Option<String>,
    #[serde(default)]
    pub labels: serde_json::Map<String, Value>,
    /// Both, if not given.
    pub address_type: Option<String>,
    /// Those of the Service, all with number 8080, if not given.
    pub ports: Option<Value>,
    /// The endpoints: in Kubernetes' form, or words.
    pub to: Vec<Value>,
}
