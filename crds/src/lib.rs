//! The API of Pointsman.
//!
//! People write [`ProxyConfiguration`] objects. The operator merges those that select a node into one
//! [`NodeProxyConfiguration`], writes it to that node's ConfigMap, and names the revision in the node's
//! [`ProxyNodeStatus`]. The node's agent applies the configuration and reports back in the same object.
//!
//! This crate holds the types of all three, their validation, and nothing that talks to a server.

pub mod condition;
pub mod names;
pub mod node_config;
pub mod proxy_configuration;
pub mod proxy_node_status;
mod schema;
pub mod settings;

pub use condition::{Condition, ConditionStatus};
pub use node_config::{NodeConfigError, NodeProxyConfiguration};
pub use proxy_configuration::{ProxyConfiguration, ProxyConfigurationSpec, ProxyConfigurationStatus};
pub use proxy_node_status::{ProxyNodeStatus, ProxyNodeStatusSpec, ProxyNodeStatusStatus};
pub use schema::{custom_resource_definitions, spec_json_schema};
pub use settings::ProxySettings;
