//! Taking a cluster down to nothing, whatever state it is in.
//!
//! In: a name. Out: no process, mount, namespace, link, cgroup or folder of that cluster. What there is follows
//! from the name and from the record, which was written before anything was created, so this also works after
//! a killed `up` and when called twice.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::sleep;

use crate::cgroup::Cgroup;
use crate::command::{command, output};
use crate::layout;
use crate::state::Record;

/// Removes everything of the cluster `name` but its record, and with that its slot.
pub async fn reset(name: &str) -> Result<()> {
    remove_running_parts(name).await?;
    let dir = layout::dir(name);
    for entry in fs::read_dir(&dir).with_context(|| format!("listing {}", dir.display()))? {
        let path = entry?.path();
        let removed = match path.file_name() {
            Some(name) if name == crate::state::RECORD => continue,
            _ if path.is_dir() => fs::remove_dir_all(&path),
            _ => fs::remove_file(&path),
        };
        removed.with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

async fn remove_running_parts(name: &str) -> Result<()> {
    layout::check_name(name)?;
    let dir = layout::dir(name);
    let cgroup = Cgroup::new(&layout::cgroup(name))?;
    kill_processes(&dir, &cgroup).await?;
    unmount(&dir)?;
    // Its end in the fabric's namespace went with that, usually; the kernel does that later than we go on.
    if let Ok(Some(record)) = Record::load(name) {
        let link = record.layout(name)?.host_link();
        if Path::new("/sys/class/net").join(&link).exists() {
            let removed = output(&mut command("ip", ["link", "delete", &link])).await;
            if Path::new("/sys/class/net").join(&link).exists() {
                removed?;
            }
        }
    }
    remove_cgroup(&cgroup).await
}

/// Removes everything of the cluster `name`.
pub async fn remove(name: &str) -> Result<()> {
    remove_running_parts(name).await?;
    let dir = layout::dir(name);
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Kills what is in the cluster's cgroup, in its network namespaces, or was started from its folder, until
/// there is none.
async fn kill_processes(dir: &Path, cgroup: &Cgroup) -> Result<()> {
    let namespaces = namespaces(&dir.join("ns"));
    let start = Instant::now();
    let mut killed = BTreeSet::new();
    loop {
        let mut pids: BTreeSet<i32> = cgroup.processes().into_iter().collect();
        pids.extend(strays(dir, &namespaces));
        pids.remove(&Pid::this().as_raw());
        pids.retain(|pid| Path::new(&format!("/proc/{pid}")).exists() && !is_zombie(*pid));
        if pids.is_empty() {
            break;
        }
        if start.elapsed() > Duration::from_secs(30) {
            bail!("these processes of the cluster do not end: {pids:?}");
        }
        for pid in pids {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            killed.insert(pid);
        }
        sleep(Duration::from_millis(20)).await;
    }
    // They belong to process 1 now, which asks for their exit status when it gets to it. Until then they are
    // listed; they hold nothing, so we do not insist.
    while killed.iter().any(|pid| is_zombie(*pid)) && start.elapsed() < Duration::from_secs(5) {
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// The namespaces (device and inode) mounted on the files of `ns`.
fn namespaces(ns: &Path) -> BTreeSet<(u64, u64)> {
    let Ok(own) = fs::metadata(ns) else { return BTreeSet::new() };
    let Ok(entries) = fs::read_dir(ns) else { return BTreeSet::new() };
    let files = entries.flatten().filter_map(|entry| fs::metadata(entry.path()).ok());
    // On the folder's own device it is an ordinary file: the namespace was not mounted yet.
    files.filter(|meta| meta.dev() != own.dev()).map(|meta| (meta.dev(), meta.ino())).collect()
}

/// Processes that are the cluster's by their namespaces, or by the program and the folder in their command line.
fn strays(dir: &Path, namespaces: &BTreeSet<(u64, u64)>) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mark = format!("{}/", dir.display());
    let is_ours = |process: &Path| {
        let in_namespace = ["ns/net", "ns/mnt"].iter().any(|ns| {
            fs::metadata(process.join(ns)).is_ok_and(|meta| namespaces.contains(&(meta.dev(), meta.ino())))
        });
        let program = fs::read_link(process.join("exe")).unwrap_or_default();
        let program = program.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        in_namespace
            || (program.starts_with("controlplane") || program.starts_with("containerd"))
                && fs::read(process.join("cmdline"))
                    .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&mark))
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| is_ours(&PathBuf::from(format!("/proc/{pid}"))))
        .collect()
}

fn is_zombie(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Detaches every mount under the cluster's folder, the last one first.
fn unmount(dir: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?;
    let points: Vec<&Path> =
        mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new).collect();
    for point in points.into_iter().rev().filter(|point| point.starts_with(dir)) {
        umount2(point, MntFlags::MNT_DETACH).with_context(|| format!("unmounting {}", point.display()))?;
    }
    Ok(())
}

/// Removes the cgroup; the kernel takes a moment to notice that its processes are gone.
async fn remove_cgroup(cgroup: &Cgroup) -> Result<()> {
    let start = Instant::now();
    loop {
        match cgroup.remove() {
            Err(error) if start.elapsed() > Duration::from_secs(10) => return Err(error),
            Err(_) => sleep(Duration::from_millis(50)).await,
            Ok(()) => return Ok(()),
        }
    }
}
