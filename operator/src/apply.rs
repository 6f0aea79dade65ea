//! The writes.
//!
//! In: what [`crate::decide`] and [`crate::stale`] want written. Out: requests, each sent only while the lease is held,
//! and errors that say which permission is missing. No decisions are made here.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use pointsman_crds::names::{
    ANNOTATION_CONFIG_HASH, ANNOTATION_SOURCES, CONFIG_KEY, LABEL_MANAGED_BY, LABEL_POOL, LABEL_REVISION,
    MANAGED_BY_OPERATOR, NODE_CONFIG_NAMESPACE, OPERATOR_FIELD_MANAGER,
};
use pointsman_crds::{ProxyConfiguration, ProxyConfigurationStatus, ProxyNodeStatus, ProxyNodeStatusSpec};
use serde_json::{Value, json};

use crate::decide::{NodeWork, Sweep};
use crate::error::ApiError;
use crate::lease::Leadership;
use crate::revision::Desired;
use crate::stale::Mark;

/// What is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// A node's ConfigMap.
    ConfigMap,
    /// A ProxyNodeStatus.
    Report,
    /// The status of a ProxyNodeStatus.
    ReportStatus,
    /// The status of a ProxyConfiguration.
    LayerStatus,
}

impl Object {
    /// The resource as RBAC names it.
    #[must_use]
    pub fn resource(self) -> &'static str {
        match self {
            Self::ConfigMap => "configmaps",
            Self::Report => "proxynodestatuses.pointsman.dev",
            Self::ReportStatus => "proxynodestatuses.pointsman.dev/status",
            Self::LayerStatus => "proxyconfigurations.pointsman.dev/status",
        }
    }
}

/// Writes while the lease is held.
#[derive(Clone)]
pub struct Writer {
    config_maps: Api<ConfigMap>,
    reports: Api<ProxyNodeStatus>,
    layers: Api<ProxyConfiguration>,
    leadership: Leadership,
}

impl Writer {
    /// A writer to `client`'s server.
    #[must_use]
    pub fn new(client: &Client, leadership: Leadership) -> Self {
        Self {
            config_maps: Api::namespaced(client.clone(), NODE_CONFIG_NAMESPACE),
            reports: Api::all(client.clone()),
            layers: Api::all(client.clone()),
            leadership,
        }
    }

    fn check(&self) -> Result<(), ApiError> {
        if self.leadership.is_held() { Ok(()) } else { Err(ApiError::NotLeader) }
    }

    /// Writes a node's ConfigMap; returns its new metadata.
    pub async fn config_map(&self, work: &NodeWork, desired: &Desired) -> Result<ConfigMap, ApiError> {
        self.check()?;
        // Forced: the operator is the author, and an edit whose break-glass annotation is gone has had its time. Labels
        // and annotations of others are not named here and so stay.
        let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let body = config_map(&work.node, &work.uid, &work.pool, desired);
        self.config_maps
            .patch(&work.node, &params, &Patch::Apply(&body))
            .await
            .map_err(|error| ApiError::new("patch", Object::ConfigMap.resource(), &work.node, error))
    }

    /// Creates a ProxyNodeStatus, or brings its spec up to date.
    pub async fn report(
        &self,
        work: &NodeWork,
        spec: &ProxyNodeStatusSpec,
    ) -> Result<ProxyNodeStatus, ApiError> {
        self.check()?;
        let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let body = json!({
            "apiVersion": "pointsman.dev/v1alpha1",
            "kind": "ProxyNodeStatus",
            "metadata": {
                "name": work.node,
                "labels": {LABEL_MANAGED_BY: MANAGED_BY_OPERATOR},
                "ownerReferences": [owner(&work.node, &work.uid)],
            },
            "spec": spec,
        });
        self.reports
            .patch(&work.node, &params, &Patch::Apply(&body))
            .await
            .map_err(|error| ApiError::new("patch", Object::Report.resource(), &work.node, error))
    }

    /// Says in an agent's place that it is silent. Fails with a conflict if the agent has just spoken.
    pub async fn mark(&self, mark: &Mark) -> Result<(), ApiError> {
        self.check()?;
        let params =
            PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.into()), ..PatchParams::default() };
        let body = json!({
            "metadata": {"resourceVersion": mark.resource_version},
            "status": {"state": mark.state, "conditions": mark.conditions},
        });
        match self.reports.patch_status(&mark.node, &params, &Patch::Merge(&body)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(ApiError::new("patch", Object::ReportStatus.resource(), &mark.node, error)),
        }
    }

    /// Deletes the ConfigMap of a node that is gone.
    pub async fn sweep_config_map(&self, sweep: &Sweep) -> Result<(), ApiError> {
        self.check()?;
        deleted(self.config_maps.delete(&sweep.name, &only(sweep)).await, Object::ConfigMap, &sweep.name)
    }

    /// Deletes the ProxyNodeStatus of a node that is gone.
    pub async fn sweep_report(&self, sweep: &Sweep) -> Result<(), ApiError> {
        self.check()?;
        deleted(self.reports.delete(&sweep.name, &only(sweep)).await, Object::Report, &sweep.name)
    }

    /// Writes the whole status of a ProxyConfiguration.
    pub async fn layer_status(&self, name: &str, status: &ProxyConfigurationStatus) -> Result<(), ApiError> {
        self.check()?;
        // An apply, unlike a merge, also removes what the new status no longer has.
        let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let body = json!({
            "apiVersion": "pointsman.dev/v1alpha1",
            "kind": "ProxyConfiguration",
            "metadata": {"name": name},
            "status": status,
        });
        match self.layers.patch_status(name, &params, &Patch::Apply(&body)).await {
            Ok(_) => Ok(()),
            // Deleted meanwhile; there is nobody left to tell.
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(ApiError::new("patch", Object::LayerStatus.resource(), name, error)),
        }
    }
}

/// The ConfigMap that the node contract describes.
fn config_map(node: &str, uid: &str, pool: &str, desired: &Desired) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": node,
            "namespace": NODE_CONFIG_NAMESPACE,
            "labels": {
                LABEL_MANAGED_BY: MANAGED_BY_OPERATOR,
                LABEL_POOL: pool,
                LABEL_REVISION: desired.revision,
            },
            "annotations": {
                ANNOTATION_CONFIG_HASH: desired.hash,
                ANNOTATION_SOURCES: desired.sources.join(","),
            },
            "ownerReferences": [owner(node, uid)],
        },
        "data": {CONFIG_KEY: desired.content},
    })
}

/// With the Node goes what is about it, by the cluster's garbage collection.
fn owner(node: &str, uid: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid})
}

fn only(sweep: &Sweep) -> DeleteParams {
    DeleteParams::background()
        .preconditions(Preconditions { uid: Some(sweep.uid.clone()), resource_version: None })
}

fn deleted<T>(result: kube::Result<T>, object: Object, name: &str) -> Result<(), ApiError> {
    match result {
        Ok(_) => Ok(()),
        // Garbage collection was faster, or a new Node of the same name has a new object already.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        Err(error) => Err(ApiError::new("delete", object.resource(), name, error)),
    }
}

#[cfg(test)]
mod tests;
