//! From the Rust types to the CustomResourceDefinitions that a server gets.
//!
//! kube derives the schemas; this module mends what a derive cannot say and what the derive says too much of.

use kube::CustomResourceExt;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::{ProxyConfiguration, ProxyNodeStatus};

/// The definitions of both kinds, lower-case plural first, as the CRD chart ships them.
///
/// They are plain values because kube's typed form would turn every whole-number bound back into a float.
pub fn custom_resource_definitions() -> Result<Vec<(String, Value)>, serde_json::Error> {
    [ProxyConfiguration::crd(), ProxyNodeStatus::crd()]
        .into_iter()
        .map(|crd| {
            let plural = crd.spec.names.plural.clone();
            let mut value = serde_json::to_value(crd)?;
            if let Some(versions) = value.pointer_mut("/spec/versions").and_then(Value::as_array_mut) {
                for schema in
                    versions.iter_mut().filter_map(|version| version.pointer_mut("/schema/openAPIV3Schema"))
                {
                    mend(schema);
                    if let Some(status) = schema.pointer_mut("/properties/status") {
                        drop_defaults(status);
                    }
                }
            }
            Ok((plural, value))
        })
        .collect()
}

/// The schema of a ProxyConfiguration's `spec` as plain JSON Schema that refuses unknown fields, for the chart's value
/// `defaultConfiguration.spec`: a typo there is an error of Helm. CEL rules cannot be said in it; the API server checks them.
pub fn spec_json_schema() -> Result<Value, serde_json::Error> {
    let mut schema = serde_json::to_value(ProxyConfiguration::crd())?
        .pointer_mut("/spec/versions/0/schema/openAPIV3Schema/properties/spec")
        .map(Value::take)
        .unwrap_or_default();
    mend(&mut schema);
    close(&mut schema);
    Ok(schema)
}

/// `matchLabels` with the bounds that keep CEL's cost estimate finite.
pub(crate) fn match_labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {"type": "string", "maxLength": 63},
    })
}

/// `maxUnavailable`: a number or a percentage, never zero.
pub(crate) fn max_unavailable(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "maxLength": 11,
        "x-kubernetes-validations": [{
            "rule": "type(self) == int ? int(self) >= 1 : string(self).matches('^([1-9][0-9]?|100)%$')",
            "message": "maxUnavailable must be an integer >= 1 or a percentage 1%-100%; use paused to stop a rollout",
        }],
    })
}

/// Removes what schemars adds and an API server does not want: `nullable` (a null would pass a CEL `has`), bounds as
/// floats, and `additionalProperties: false` (the server prunes or refuses unknown fields by itself). Recurses.
fn mend(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            object.remove("nullable");
            if object.get("additionalProperties") == Some(&Value::Bool(false)) {
                object.remove("additionalProperties");
            }
            for bound in ["minimum", "maximum"] {
                if let Some(whole) = object.get(bound).and_then(Value::as_f64) {
                    #[allow(clippy::cast_possible_truncation, reason = "bounds are small whole numbers")]
                    object.insert(bound.to_owned(), json!(whole as i64));
                }
            }
            // kube empties the alternatives; the extension alone says the same.
            if object.contains_key("x-kubernetes-int-or-string") {
                object.remove("anyOf");
            }
            drop_null_variant(object);
            object.values_mut().for_each(mend);
        }
        Value::Array(values) => values.iter_mut().for_each(mend),
        _ => {}
    }
}

/// Turns an API server's schema into a JSON Schema in which every object is closed. Recurses.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            if object.contains_key("x-kubernetes-int-or-string") {
                object.insert("type".to_owned(), json!(["integer", "string"]));
            }
            object.retain(|key, _| !key.starts_with("x-kubernetes-") && key != "format" && key != "default");
            if object.get("properties").is_some_and(Value::is_object) {
                object.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
            object.values_mut().for_each(close);
        }
        Value::Array(values) => values.iter_mut().for_each(close),
        _ => {}
    }
}

/// A status holds what was written to it and nothing that the server invents. Recurses.
fn drop_defaults(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            object.remove("default");
            object.values_mut().for_each(drop_defaults);
        }
        Value::Array(values) => values.iter_mut().for_each(drop_defaults),
        _ => {}
    }
}

/// An optional enum lists `null` among its values.
fn drop_null_variant(object: &mut Map<String, Value>) {
    if let Some(variants) = object.get_mut("enum").and_then(Value::as_array_mut) {
        variants.retain(|variant| !variant.is_null());
    }
}
