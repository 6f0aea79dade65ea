//! The shipped definitions are those of the Rust types. To update them after a change of the types:
//! `cargo run -p pointsman-crds --bin crdgen`, then read the diff.

use std::path::Path;

use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::settings::Mode;
use pointsman_crds::{NodeProxyConfiguration, ProxySettings};
use serde_json::Value;

#[test]
fn shipped_definitions_are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (plural, expected) in pointsman_crds::custom_resource_definitions().unwrap() {
        for folder in ["crds/yaml", "charts/pointsman-crds/templates"] {
            let file = root.join(folder).join(format!("{plural}.yaml"));
            let text =
                std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            let shipped: Value = serde_saphyr::from_str(&text).unwrap();
            assert!(shipped == expected, "{} is not current: run crdgen", file.display());
        }
    }
}

#[test]
fn the_values_schema_knows_the_same_fields() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/pointsman/values.schema.json");
    let shipped: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let expected = pointsman_crds::spec_json_schema().unwrap();
    assert!(
        shipped["$defs"]["proxyConfigurationSpec"] == expected,
        "values.schema.json is not current: run crdgen"
    );
}

/// Every field that people write has its place in the reference, and the defaults there are the real ones.
#[test]
fn the_reference_is_complete() {
    fn names(schema: &Value, found: &mut Vec<String>) {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            found.push(name.clone());
            names(field, found);
            names(&field["items"], found);
        }
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md");
    let text = std::fs::read_to_string(file).unwrap();
    let mut fields = Vec::new();
    names(&pointsman_crds::spec_json_schema().unwrap(), &mut fields);
    assert!(fields.len() > 60, "{fields:?}");
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let missing: Vec<&String> = fields.iter().filter(|field| !words.contains(&field.as_str())).collect();
    assert!(missing.is_empty(), "docs/api.md does not mention {missing:?}");

    let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
    let defaults = NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap().render().unwrap();
    let shown = text.split("```yaml defaults\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    assert_eq!(shown, defaults, "docs/api.md shows other defaults");
}
