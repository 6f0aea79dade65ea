//! The cluster's cgroup: the sure knowledge of which processes are the cluster's.
//!
//! In: the cgroup's name. Out: folders in every hierarchy of this machine (version 1 or 2), the processes in
//! them, and their removal. Every process of the cluster enters it before it runs its program, and the kubelets
//! put the pods below it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The name of the part that holds everything that is not a pod.
const SYSTEM: &str = "system";

/// A cgroup in all hierarchies of this machine.
#[derive(Debug, Clone)]
pub struct Cgroup {
    /// The cgroup's folder in each hierarchy that has controllers.
    dirs: Vec<PathBuf>,
    /// The same in a version 2 hierarchy beside those of version 1: runc makes it there too.
    beside: Option<PathBuf>,
}

impl Cgroup {
    /// The cgroup `name`, which need not exist yet.
    pub fn new(name: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?;
        let (roots, beside) = hierarchies(&mounts);
        if roots.is_empty() {
            bail!("no cgroup hierarchy is mounted: kubelet needs one on /sys/fs/cgroup");
        }
        let dirs = roots.iter().map(|root| root.join(name)).collect();
        Ok(Self { dirs, beside: beside.map(|root| root.join(name)) })
    }

    /// Creates it with a child for each of `children` and one for the system's own processes.
    pub fn create(&self, children: &[String]) -> Result<()> {
        for dir in &self.dirs {
            create_with_cpus(dir)?;
            delegate(dir)?;
            for child in children.iter().map(String::as_str).chain([SYSTEM]) {
                let child = dir.join(child);
                create_with_cpus(&child)?;
            }
        }
        Ok(())
    }

    /// The file to write a process number to so that the process belongs to the cluster. One hierarchy is enough.
    #[must_use]
    pub fn system_procs(&self) -> PathBuf {
        // There is always one: `new` refuses none.
        self.dirs.last().map(|dir| dir.join(SYSTEM).join("cgroup.procs")).unwrap_or_default()
    }

    /// The folders of the system's own processes, one in each hierarchy.
    #[must_use]
    pub fn system_dirs(&self) -> Vec<PathBuf> {
        self.dirs.iter().map(|dir| dir.join(SYSTEM)).collect()
    }

    /// The processes in the cgroup and below it, in all hierarchies.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        for dir in self.dirs.iter().chain(&self.beside) {
            collect(dir, &mut pids);
        }
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Removes it, once it is empty.
    pub fn remove(&self) -> Result<()> {
        for dir in self.dirs.iter().chain(&self.beside) {
            remove(dir).with_context(|| format!("removing the cgroup {}", dir.display()))?;
        }
        Ok(())
    }
}

/// The mount points in the text of mountinfo: of the hierarchies that have controllers, and of a version 2
/// hierarchy beside those of version 1.
fn hierarchies(mounts: &str) -> (Vec<PathBuf>, Option<PathBuf>) {
    let found = |wanted: &str| {
        let of_kind = mounts.lines().filter_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            (filesystem.split(' ').next() == Some(wanted)).then(|| mount.split(' ').nth(4))?
        });
        let mut paths: Vec<PathBuf> = of_kind.map(PathBuf::from).collect();
        paths.sort();
        paths.dedup();
        paths
    };
    let (first, second) = (found("cgroup"), found("cgroup2"));
    if first.is_empty() {
        (second.into_iter().take(1).collect(), None)
    } else {
        (first, second.into_iter().next())
    }
}

/// Creates a cgroup. In version 1 a new cpuset has no processors, and nothing can run in it.
fn create_with_cpus(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("creating the cgroup {}", dir.display()))?;
    for file in ["cpuset.mems", "cpuset.cpus"] {
        let (own, parent) = (dir.join(file), dir.parent().unwrap_or(dir).join(file));
        if let (Ok(own_value), Ok(value)) = (fs::read_to_string(&own), fs::read_to_string(parent))
            && own_value.trim().is_empty()
            && !value.trim().is_empty()
        {
            fs::write(&own, value.trim()).with_context(|| format!("writing {}", own.display()))?;
        }
    }
    Ok(())
}

/// In version 2, lets the children use the controllers that kubelet wants.
fn delegate(dir: &Path) -> Result<()> {
    for dir in [dir.parent().unwrap_or(dir), dir] {
        let Ok(available) = fs::read_to_string(dir.join("cgroup.controllers")) else { return Ok(()) };
        let wanted = ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"];
        let enable: Vec<String> = available
            .split_whitespace()
            .filter(|controller| wanted.contains(controller))
            .map(|controller| format!("+{controller}"))
            .collect();
        let file = dir.join("cgroup.subtree_control");
        fs::write(&file, enable.join(" ")).with_context(|| format!("writing {}", file.display()))?;
    }
    Ok(())
}

fn collect(dir: &Path, pids: &mut Vec<i32>) {
    if let Ok(text) = fs::read_to_string(dir.join("cgroup.procs")) {
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    }
    for child in children(dir) {
        collect(&child, pids);
    }
}

fn remove(dir: &Path) -> std::io::Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    for child in children(dir) {
        remove(&child)?;
    }
    fs::remove_dir(dir)
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_found() {
        let hybrid = "30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            32 30 0:28 / /sys/fs/cgroup/unified rw shared:3 - cgroup2 cgroup2 rw\n\
            33 30 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids";
        let expected = ["/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/pids"];
        let beside = Some(PathBuf::from("/sys/fs/cgroup/unified"));
        assert_eq!(hierarchies(hybrid), (expected.map(PathBuf::from).to_vec(), beside));
        let unified = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(hierarchies(unified), (vec![PathBuf::from("/sys/fs/cgroup")], None));
    }
}
