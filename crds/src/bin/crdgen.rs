//! Writes the CustomResourceDefinitions to a folder, one file each: `crdgen [FOLDER…]`, by default `crds/yaml` and the
//! templates of the CRD chart. The golden test in `crds/tests` fails when they are not current.

use std::error::Error;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut folders: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if folders.is_empty() {
        folders = vec!["crds/yaml".into(), "charts/pointsman-crds/templates".into()];
    }
    for (plural, crd) in pointsman_crds::custom_resource_definitions()? {
        let text = serde_saphyr::to_string(&crd)?;
        for folder in &folders {
            std::fs::create_dir_all(folder)?;
            let file = Path::new(folder).join(format!("{}.yaml", plural));
            std::fs::write(&file, &text).map_err(|error| format!("{}: {error}", file.display()))?;
        }
    }
    Ok(())
}
