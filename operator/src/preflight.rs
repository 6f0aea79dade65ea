//! Whether the CRDs are there, and new enough.
//!
//! In: the schema that the server publishes. Out: nothing, or what is missing and the command that installs it. The
//! operator waits for that instead of crashing: nodes keep what they have meanwhile, and its log says one thing.

use kube::Client;
use pointsman_crds::custom_resource_definitions;
use serde_json::Value;
use thiserror::Error;

use crate::error::ApiError;

/// Where the server publishes the schemas of our group and version.
const SCHEMAS: &str = "/openapi/v3/apis/pointsman.dev/v1alpha1";
/// What to do about it.
const REMEDY: &str = "install the CRDs of this version first: 'helm upgrade --install pointsman-crds charts/pointsman-crds \
                      -n pointsman-system', or 'kubectl apply --server-side -f crds/yaml'";

/// Why the operator cannot work yet.
#[derive(Debug, Error)]
pub enum PreflightError {
    /// A kind does not exist, or not in our version.
    #[error("the server has no {kind} in pointsman.dev/v1alpha1; {REMEDY}")]
    Missing {
        /// The kind.
        kind: String,
    },
    /// The schema lacks fields that this operator writes or reads.
    #[error("the server's CRD of {kind} is older than this operator, it lacks {}; {REMEDY}", .fields.join(", "))]
    Outdated {
        /// The kind.
        kind: String,
        /// The fields.
        fields: Vec<String>,
    },
    /// Our own schemas cannot be had; a fault of the build.
    #[error("the built-in CRDs cannot be rendered: {0}")]
    Built(#[from] serde_json::Error),
    /// The server does not answer.
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// Compares the server's CRDs with those this operator was built for.
pub async fn check(client: &Client) -> Result<(), PreflightError> {
    let request = http::Request::get(SCHEMAS)
        .body(Vec::new())
        .map_err(|error| ApiError::new("get", "openapi", SCHEMAS, kube::Error::HttpError(error)))?;
    let served = match client.request::<Value>(request).await {
        Ok(served) => served,
        // Without a group there is no page for it, nor a Status that says so.
        Err(kube::Error::Api(status)) if status.code == 404 => Value::Null,
        Err(error) => return Err(ApiError::new("get", "openapi", SCHEMAS, error).into()),
    };
    compare(&served)
}

fn compare(served: &Value) -> Result<(), PreflightError> {
    for (_, crd) in custom_resource_definitions()? {
        let kind = crd.pointer("/spec/names/kind").and_then(Value::as_str).unwrap_or_default();
        let wanted = crd.pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap_or(&Value::Null);
        let schemas = served.pointer("/components/schemas").and_then(Value::as_object);
        let found = schemas
            .and_then(|schemas| schemas.iter().find(|(name, _)| name.rsplit('.').next() == Some(kind)))
            .ok_or_else(|| PreflightError::Missing { kind: kind.to_owned() })?;
        let mut fields = Vec::new();
        missing(wanted, found.1, "", &mut fields);
        if !fields.is_empty() {
            return Err(PreflightError::Outdated { kind: kind.to_owned(), fields });
        }
    }
    Ok(())
}

/// The properties of `wanted` that `found` lacks, by path.
fn missing(wanted: &Value, found: &Value, path: &str, fields: &mut Vec<String>) {
    if let (Some(wanted), Some(found)) = (wanted.get("items"), found.get("items")) {
        missing(wanted, found, &format!("{path}[]"), fields);
    }
    let Some(properties) = wanted.get("properties").and_then(Value::as_object) else { return };
    for (name, wanted) in properties {
        let path = format!("{path}.{name}");
        match found.get("properties").and_then(|properties| properties.get(name)) {
            Some(found) => missing(wanted, found, &path, fields),
            None => fields.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn served() -> Value {
        let schemas: serde_json::Map<String, Value> = custom_resource_definitions()
            .unwrap()
            .into_iter()
            .map(|(_, crd)| {
                let kind = crd.pointer("/spec/names/kind").unwrap().as_str().unwrap();
                let schema = crd.pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap();
                (format!("dev.pointsman.v1alpha1.{kind}"), schema.clone())
            })
            .collect();
        json!({"components": {"schemas": schemas}})
    }

    #[test]
    fn the_crds_of_this_build_are_new_enough() {
        compare(&served()).unwrap();
    }

    #[test]
    fn missing_crds_are_named_with_the_command_that_installs_them() {
        let error = compare(&Value::Null).unwrap_err().to_string();
        assert!(error.contains("ProxyConfiguration") && error.contains("helm upgrade"), "{error}");
    }

    #[test]
    fn an_old_crd_is_named_with_the_field_it_lacks() {
        let mut served = served();
        let masquerade = "/components/schemas/dev.pointsman.v1alpha1.ProxyConfiguration/properties/spec/properties/proxy\
                          /properties/masquerade/properties";
        served.pointer_mut(masquerade).unwrap().as_object_mut().unwrap().remove("bit");
        let error = compare(&served).unwrap_err().to_string();
        assert!(error.contains("lacks .spec.proxy.masquerade.bit;"), "{error}");
    }
}
