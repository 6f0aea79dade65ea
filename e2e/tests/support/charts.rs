//! The charts, rendered by the real Helm.

use std::path::PathBuf;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use pointsman_e2e::artifacts;
use pointsman_e2e::command::{command, output};
use pointsman_e2e::stamp::repository;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Namespace that the tests install into.
pub const NAMESPACE: &str = "pointsman-system";

/// A chart's folder.
pub fn chart(name: &str) -> String {
    repository().join("charts").join(name).to_string_lossy().into_owned()
}

/// Every file of example values of the main chart.
pub fn example_values() -> Vec<PathBuf> {
    let folder = repository().join("charts/pointsman/ci");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&folder).expect("charts/pointsman/ci").map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 3, "examples in {}", folder.display());
    files
}

/// Runs Helm; returns what it prints.
pub async fn helm(args: &[&str]) -> Result<String> {
    // Helm's own caches stay out of the user's home.
    let home = tempfile::tempdir()?;
    let mut helm = command(artifacts::helm().await?, args);
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        helm.env(variable, home.path());
    }
    output(&mut helm).await
}

/// The objects of the main chart with these extra arguments.
pub async fn render(args: &[&str]) -> Result<Rendered> {
    let chart = chart("pointsman");
    let mut all = vec!["template", "pointsman", &chart, "-n", NAMESPACE];
    all.extend(args);
    let text = helm(&all).await?;
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).context("reading what Helm rendered")?;
    Ok(Rendered(objects.into_iter().filter(|object| !object.is_null()).collect()))
}

/// Rendered objects.
pub struct Rendered(pub Vec<Value>);

impl Rendered {
    /// The objects of a kind.
    pub fn kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().filter(move |object| object["kind"] == kind)
    }

    /// The object of this kind and name.
    pub fn get(&self, kind: &str, name: &str) -> &Value {
        self.0
            .iter()
            .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
            .unwrap_or_else(|| panic!("no {kind} {name}"))
    }

    pub fn agent(&self) -> DaemonSet {
        typed(self.get("DaemonSet", "pointsman-agent"))
    }

    pub fn operator(&self) -> Deployment {
        typed(self.get("Deployment", "pointsman-operator"))
    }
}

/// `object` as its type.
pub fn typed<T: DeserializeOwned>(object: &Value) -> T {
    serde_json::from_value(object.clone())
        .unwrap_or_else(|error| panic!("{error} in {} {}", object["kind"], object["metadata"]["name"]))
}
