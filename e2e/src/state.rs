//! What is kept on disk about the clusters of this machine.
//!
//! In: names. Out: the record of each cluster, written before anything of it is created, a slot that no other
//! cluster has, and a lock that keeps two commands on one cluster apart.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::layout::{self, Layout, ROOT, SLOTS};
use crate::stamp::lock;

/// The name of the file in a cluster's folder that holds its record.
pub const RECORD: &str = "cluster.json";

/// Which program serves Services on the nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Proxy {
    /// Pointsman, installed from its charts.
    #[default]
    Pointsman,
    /// kube-proxy in this mode.
    KubeProxy(String),
    /// None: only headless services work.
    None,
}

impl std::str::FromStr for Proxy {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "pointsman" => Ok(Self::Pointsman),
            None if text == "none" => Ok(Self::None),
            Some(("kube-proxy", mode @ ("iptables" | "nftables" | "ipvs"))) => {
                Ok(Self::KubeProxy(mode.to_owned()))
            }
            _ => bail!(
                "{text:?}: give pointsman, kube-proxy:iptables, kube-proxy:nftables, kube-proxy:ipvs or none"
            ),
        }
    }
}

impl TryFrom<String> for Proxy {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl std::fmt::Display for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pointsman => f.write_str("pointsman"),
            Self::KubeProxy(mode) => write!(f, "kube-proxy:{mode}"),
            Self::None => f.write_str("none"),
        }
    }
}

impl From<Proxy> for String {
    fn from(proxy: Proxy) -> Self {
        proxy.to_string()
    }
}

/// The record of a cluster: with the name, all that its [`Layout`] and its parts derive from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The slot, which no other cluster has.
    pub slot: u8,
    /// The number of nodes in namespaces.
    pub nodes: u8,
    /// Whether the last node is a virtual machine besides these, whose kernel has IPVS.
    pub ipvs_node: bool,
    /// What serves Services.
    pub proxy: Proxy,
    /// Whether namespaces, links and cgroups were all made: if not, they are made anew from nothing.
    pub foundation: bool,
}

impl Record {
    /// The record of the cluster `name`, if there is one.
    pub fn load(name: &str) -> Result<Option<Self>> {
        let path = layout::dir(name).join(RECORD);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .with_context(|| format!("{} is damaged: take the cluster down", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
        }
    }

    /// Writes the record of the cluster `name`.
    pub fn store(&self, name: &str) -> Result<()> {
        let dir = layout::dir(name);
        let path = dir.join(RECORD);
        let unfinished = dir.join("cluster.json.unfinished");
        fs::create_dir_all(&dir)
            .and_then(|()| fs::write(&unfinished, serde_json::to_vec_pretty(self)?))
            .and_then(|()| fs::rename(&unfinished, &path))
            .with_context(|| format!("writing {}", path.display()))
    }

    /// The number of all nodes.
    #[must_use]
    pub fn all_nodes(&self) -> u8 {
        self.nodes + u8::from(self.ipvs_node)
    }

    /// The layout of the cluster.
    pub fn layout(&self, name: &str) -> Result<Layout> {
        Layout::new(name, self.slot)
    }
}

/// The record of the cluster `name`, created in a free slot if there is none.
pub async fn record_or_create(name: &str, nodes: u8, ipvs_node: bool, proxy: Proxy) -> Result<Record> {
    layout::check_name(name)?;
    fs::create_dir_all(ROOT).with_context(|| format!("creating {ROOT}: are you root?"))?;
    let _lock = lock(&Path::new(ROOT).join(".lock")).await?;
    if let Some(record) = Record::load(name)? {
        return Ok(record);
    }
    let used: Vec<u8> =
        list()?.iter().filter_map(|other| Record::load(other).ok()?).map(|r| r.slot).collect();
    let slot = (0..SLOTS).find(|slot| !used.contains(slot));
    let slot =
        slot.with_context(|| format!("all {SLOTS} slots are used: take a cluster down ({ROOT} lists them)"))?;
    let record = Record { slot, nodes, ipvs_node, proxy, foundation: false };
    record.store(name)?;
    Ok(record)
}

/// The names of all clusters of this machine.
pub fn list() -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(ROOT) else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("listing {ROOT}"))?;
        if let Ok(name) = entry.file_name().into_string()
            && layout::check_name(&name).is_ok()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Waits until no other command works on the cluster `name`. The lock is not in the cluster's folder, which
/// `down` removes.
pub async fn exclusive(name: &str) -> Result<File> {
    layout::check_name(name)?;
    fs::create_dir_all("/run/lock").context("creating /run/lock")?;
    lock(Path::new(&format!("/run/lock/pointsman-cluster-{name}"))).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_parsed_and_printed() {
        for text in ["pointsman", "none", "kube-proxy:iptables", "kube-proxy:nftables", "kube-proxy:ipvs"] {
            assert_eq!(text.parse::<Proxy>().unwrap().to_string(), text);
        }
        for wrong in ["", "kube-proxy", "kube-proxy:userspace", "cilium"] {
            assert!(
                wrong.parse::<Proxy>().unwrap_err().to_string().contains("kube-proxy:iptables"),
                "{wrong}"
            );
        }
    }
}
