//! The shipped definitions are those of the Rust types. To update them after a change of the types:
//! `cargo run -p pointsman-crds --bin crdgen`, then read the diff.

use std::path::Path;

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
