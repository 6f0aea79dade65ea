//! The cluster's long-running processes.
//!
//! In: a name, a command line and where it runs. Out: a process that outlives us, in the cluster's cgroup, whose
//! number and start time are on disk before its program runs, and whose output is in a log file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::sleep;

use crate::command::command;

/// Records itself, joins the cgroup, then becomes the program: `sh -c LAUNCH sh RECORD CGROUP LOG PROGRAM…`.
const LAUNCH: &str = r#"
record=$1 procs=$2 log=$3
shift 3
exec </dev/null >>"$log" 2>&1
echo "$$ $(cut -d' ' -f22 /proc/$$/stat)" >"$record.new" && mv "$record.new" "$record" && echo $$ >"$procs" || exit 1
exec "$@"
"#;

/// The processes of one cluster.
#[derive(Debug, Clone)]
pub struct Processes {
    dir: PathBuf,
    cgroup_procs: PathBuf,
}

impl Processes {
    /// Keeps records in `dir/run` and logs in `dir/log`; `cgroup_procs` is the file that makes a process the
    /// cluster's.
    pub fn new(dir: &Path, cgroup_procs: PathBuf) -> Result<Self> {
        for part in ["run", "log"] {
            fs::create_dir_all(dir.join(part))
                .with_context(|| format!("creating {}/{part}", dir.display()))?;
        }
        Ok(Self { dir: dir.to_owned(), cgroup_procs })
    }

    fn record(&self, name: &str) -> PathBuf {
        self.dir.join("run").join(name)
    }

    /// The log of the process `name`.
    #[must_use]
    pub fn log(&self, name: &str) -> PathBuf {
        self.dir.join("log").join(format!("{name}.log"))
    }

    /// The number of the process `name`, if it runs.
    #[must_use]
    pub fn running(&self, name: &str) -> Option<i32> {
        let record = fs::read_to_string(self.record(name)).ok()?;
        let (pid, start) = record.trim().split_once(' ')?;
        // The start time tells it from another process that got the same number later.
        (start_time(pid)? == start).then(|| pid.parse().ok())?
    }

    /// Starts the process `name` unless it runs already; says whether it did. Components get a small, fixed
    /// environment: what is set in the caller's shell must not change the cluster.
    pub async fn start<S: AsRef<str>>(&self, name: &str, words: &[S]) -> Result<bool> {
        if self.running(name).is_some() {
            return Ok(false);
        }
        let record = self.record(name);
        let _ = fs::remove_file(&record);
        // setsid --fork: not our child, so that it never waits for us as a zombie, and no signal to us reaches it.
        let mut launch = command("setsid", ["--fork", "sh", "-c", LAUNCH, "sh"]);
        launch.arg(&record).arg(&self.cgroup_procs).arg(self.log(name)).args(words.iter().map(AsRef::as_ref));
        launch.env_clear().env("HOME", "/root").env("LC_ALL", "C");
        launch.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        launch.stdin(Stdio::null()).current_dir("/");
        crate::command::output(&mut launch).await.with_context(|| format!("starting {name}"))?;
        let start = Instant::now();
        while !record.exists() {
            if start.elapsed() > Duration::from_secs(10) {
                bail!("{name} did not start: could it not enter {}?", self.cgroup_procs.display());
            }
            sleep(Duration::from_millis(5)).await;
        }
        Ok(true)
    }

    /// Sends `signal` to the process `name`; an error if it does not run.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let pid = self.running(name).with_context(|| format!("{name} does not run"))?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("sending {signal} to {name}"))
    }

    /// Kills the process `name` with SIGKILL, if it runs, and waits until it is gone.
    pub async fn kill(&self, name: &str) -> Result<()> {
        if self.running(name).is_some() {
            self.signal(name, Signal::SIGKILL)?;
        }
        self.wait_gone(name, Duration::from_secs(10)).await
    }

    /// Stops the process `name` with SIGTERM, if it runs, and waits until it is gone.
    pub async fn stop(&self, name: &str) -> Result<()> {
        if self.running(name).is_some() {
            self.signal(name, Signal::SIGTERM)?;
        }
        self.wait_gone(name, Duration::from_secs(30)).await
    }

    async fn wait_gone(&self, name: &str, patience: Duration) -> Result<()> {
        let start = Instant::now();
        while self.running(name).is_some() {
            if start.elapsed() > patience {
                bail!("{name} does not end: see {}", self.log(name).display());
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// The last lines of the log of `name`, for a message.
    #[must_use]
    pub fn log_tail(&self, name: &str) -> String {
        let bytes = fs::read(self.log(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

/// When a process started, in ticks since boot; none for a process that is gone or a zombie.
fn start_time(pid: &str) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may itself contain blanks and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_is_recorded_logged_and_killed() {
        let dir = tempfile::tempdir().unwrap();
        let processes = Processes::new(dir.path(), "/dev/null".into()).unwrap();
        let words = ["sh", "-c", "echo \"$1\"; sleep 60", "sh", "two words"];
        assert!(processes.start("sleeper", &words).await.unwrap());
        assert!(!processes.start("sleeper", &words).await.unwrap(), "it runs already");
        let pid = processes.running("sleeper").unwrap();
        while processes.log_tail("sleeper") != "two words" {
            sleep(Duration::from_millis(5)).await;
        }
        // A record of the same number with another start time is not that process.
        fs::write(processes.record("other"), format!("{pid} 1")).unwrap();
        assert_eq!(processes.running("other"), None);
        processes.kill("sleeper").await.unwrap();
        assert_eq!(processes.running("sleeper"), None);
        assert!(processes.signal("sleeper", Signal::SIGTERM).is_err());
    }
}
