//! What a program and all that it starts use.
//!
//! In: a name. Out: a cgroup to start the program in, its processor time and its memory's high mark, children included
//! that have ended. Whatever is left in it is killed, and the cgroup removed, when the meter is dropped and when this
//! process dies.

use std::fs;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cgroup::Cgroup;

/// `sh -c GUARD sh SYSTEM… -- PARENT…`: waits until the pipe's other end is gone, then leaves nothing.
const GUARD: &str = r#"
read -r _
for _ in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for dir in "$@"; do
        for pid in $(cat "$dir/cgroup.procs" 2>/dev/null); do left=1; kill -9 "$pid" 2>/dev/null; done
    done
    [ -z "$left" ] && break
    sleep 0.1
done
for dir in "$@"; do rmdir "$dir" "${dir%/*}"; done 2>/dev/null
"#;

/// How often is looked what the processes have allocated; the kernel keeps no high mark of that.
const SAMPLE: Duration = Duration::from_millis(10);
/// The same where looking is a part of what is measured.
const SAMPLE_SELDOM: Duration = Duration::from_secs(1);

/// A cgroup that is measured.
#[derive(Debug)]
pub struct Meter {
    dirs: Vec<PathBuf>,
    processor: Option<SocketAddr>,
    /// What `processor` has told when this was made.
    before: Duration,
    /// The most that the processes had allocated at once, in bytes. The sampling task ends when this is its alone.
    allocated: Arc<AtomicU64>,
    guard: Child,
    lifeline: Option<ChildStdin>,
}

impl Meter {
    /// Makes a cgroup that no other process has the name of. Processor time is asked at `processor`, if given.
    pub fn new(name: &str, processor: Option<SocketAddr>) -> Result<Self> {
        let cgroup = Cgroup::new(&format!("pointsman-bench-{}-{name}", std::process::id()))?;
        cgroup.create(&[])?;
        let dirs = cgroup.system_dirs();
        let mut guard = Command::new("sh");
        guard.args(["-c", GUARD, "sh"]).args(&dirs).stdin(Stdio::piped());
        // A Ctrl-C at the terminal must not reach it: it cleans up once we are gone.
        let mut guard = guard.process_group(0).spawn().context("starting the guard of a cgroup")?;
        let lifeline = guard.stdin.take();
        let allocated = Arc::new(AtomicU64::new(0));
        let pause = if processor.is_some() { SAMPLE_SELDOM } else { SAMPLE };
        sample(&dirs, Arc::clone(&allocated), pause);
        let before = processor.map_or(Ok(Duration::ZERO), told)?;
        Ok(Self { dirs, processor, before, allocated, guard, lifeline })
    }

    /// The files to write a process number to.
    #[must_use]
    pub fn procs(&self) -> Vec<PathBuf> {
        self.dirs.iter().map(|dir| dir.join("cgroup.procs")).collect()
    }

    /// Processor time so far, of all processes that are or were in it; where it is asked for, of everything since this was made.
    pub fn cpu(&self) -> Result<Duration> {
        if let Some(processor) = self.processor {
            return Ok(told(processor)?.saturating_sub(self.before));
        }
        if let Some(text) = self.read("cpuacct.usage") {
            return text.trim().parse().map(Duration::from_nanos).context("reading cpuacct.usage");
        }
        let text = self.read("cpu.stat").context("this machine's cgroups do not count processor time")?;
        let used = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        let used = used.context("cpu.stat has no usage_usec")?;
        used.parse().map(Duration::from_micros).context("reading cpu.stat")
    }

    /// Processor time since it was `before`.
    pub fn since(&self, before: Duration) -> Result<Duration> {
        Ok(self.cpu()?.saturating_sub(before))
    }

    /// The most memory that all its processes had allocated at once, in bytes.
    #[must_use]
    pub fn peak_allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// The most memory that it had at once, in bytes: of all processes, with what the kernel keeps for them (rules, file
    /// cache, sockets).
    pub fn peak_memory(&self) -> Result<u64> {
        let text = self.read("memory.max_usage_in_bytes").or_else(|| self.read("memory.peak"));
        let text = text.context("this machine's cgroups do not count memory")?;
        text.trim().parse().context("reading the peak of memory")
    }

    fn read(&self, file: &str) -> Option<String> {
        read(&self.dirs, file)
    }
}

fn told(processor: SocketAddr) -> Result<Duration> {
    let mut text = String::new();
    let asked = TcpStream::connect(processor).and_then(|mut told| told.read_to_string(&mut text));
    asked.context("asking for the processor time")?;
    text.trim().parse().map(Duration::from_nanos).context("the processor time")
}

fn read(dirs: &[PathBuf], file: &str) -> Option<String> {
    dirs.iter().find_map(|dir| fs::read_to_string(dir.join(file)).ok())
}

fn sample(dirs: &[PathBuf], highest: Arc<AtomicU64>, pause: Duration) {
    let dirs = dirs.to_vec();
    tokio::spawn(async move {
        while Arc::strong_count(&highest) > 1 {
            if let Some(now) = read(&dirs, "memory.stat").as_deref().and_then(allocated) {
                highest.fetch_max(now, Ordering::Relaxed);
            }
            tokio::time::sleep(pause).await;
        }
    });
}

/// `rss` in the first version of cgroups, `anon` in the second.
fn allocated(stat: &str) -> Option<u64> {
    stat.lines()
        .find_map(|line| line.strip_prefix("rss ").or_else(|| line.strip_prefix("anon ")))?
        .parse()
        .ok()
}

impl Drop for Meter {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        let _ = self.guard.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_cgroups_say_what_is_allocated() {
        assert_eq!(allocated("cache 7\nrss_huge 1\nrss 42\n"), Some(42));
        assert_eq!(allocated("anon 43\nfile 1\n"), Some(43));
        assert_eq!(allocated("cache 7\n"), None);
    }
}
