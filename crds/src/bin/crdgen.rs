//! Writes the CustomResourceDefinitions to a folder, one file each: `crdgen [FOLDER…]`, by default `crds/yaml` and the
//! templates of the CRD chart; then it also renews the part of the main chart's values schema that is made from the same
//! types. The golden test in `crds/tests` fails when they are not current.

use std::error::Error;
use std::path::{Path, PathBuf};

use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let mut folders: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if folders.is_empty() {
        renew_values_schema(Path::new("charts/pointsman/values.schema.json"))?;
        folders = vec!["crds/yaml".into(), "charts/pointsman-crds/templates".into()];
    }
    for (plural, crd) in pointsman_crds::custom_resource_definitions()? {
        let text = serde_saphyr::to_string(&crd)?;
        for folder in &folders {
            std::fs::create_dir_all(folder)?;
            let file = Path::new(folder).join(format!("{plural}.yaml"));
            std::fs::write(&file, &text).map_err(|error| format!("{}: {error}", file.display()))?;
        }
    }
    Ok(())
}

fn renew_values_schema(file: &Path) -> Result<(), Box<dyn Error>> {
    let mut schema: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    schema["$defs"]["proxyConfigurationSpec"] = pointsman_crds::spec_json_schema()?;
    Ok(std::fs::write(file, serde_json::to_string_pretty(&schema)? + "\n")?)
}
