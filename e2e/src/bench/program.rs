//! The two programs that are compared: how each is started on the node, and what its log says.
//!
//! In: the node, the API server and a mode. Out: a running program in a cgroup of its own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::lab::{API_ADDRESS, Lab, PODS};
use super::meter::Meter;
use crate::command::{command, output};
use crate::control_plane::API_PORT;
use crate::network::in_netns;
use crate::node::kube_proxy_configuration;

/// The Node's name.
pub const NODE: &str = "node1";
/// What the agent says of a mode that it does not have. It then waits for another configuration.
const REFUSAL: &str = "cannot run its configuration";
/// How long a program may take to end.
const LAST_WRITE: Duration = Duration::from_secs(15);

/// `sh -c LAUNCH sh LOG PROCS PROGRAM…`: enters the cgroup in every hierarchy, then becomes the program.
const LAUNCH: &str = r#"
log=$1 procs=$2
shift 2
for file in $procs; do echo $$ >"$file" || exit 1; done
exec "$@" </dev/null >>"$log" 2>&1
"#;

/// A command that becomes the words after it, in the cgroup of `meter`, and writes to `log`.
#[must_use]
pub fn measured(log: &Path, meter: &Meter) -> Command {
    let procs: Vec<String> = meter.procs().iter().map(|path| path.display().to_string()).collect();
    let mut sh = command("sh", ["-c", LAUNCH, "sh"]);
    sh.arg(log).arg(procs.join(" "));
    sh
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Kind {
    /// kube-proxy of Kubernetes 1.37.
    KubeProxy,
    /// Pointsman's agent.
    Pointsman,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::KubeProxy => "kube-proxy",
            Self::Pointsman => "Pointsman",
        })
    }
}

/// A mode in which both can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// By iptables rules.
    Iptables,
    /// By nftables rules.
    Nftables,
    /// By virtual servers.
    Ipvs,
}

impl Mode {
    /// The word in both programs' configuration.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
            Self::Ipvs => "ipvs",
        }
    }
}

/// A flavour of the iptables tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Flavour {
    /// Rules of nf_tables.
    Nft,
    /// Rules of ip_tables.
    Legacy,
}

impl Flavour {
    /// The word in the names of the tools.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        }
    }
}

/// What the chart sets for the agent and concerns its speed and memory.
pub const AGENT_ENVIRONMENT: &str = "MALLOC_ARENA_MAX=1";

/// How and where programs are started.
#[derive(Debug)]
pub struct Setup {
    /// The mode of both.
    pub mode: Mode,
    /// What `iptables` is on the node.
    pub flavour: Flavour,
    /// The agent's binary.
    pub agent: PathBuf,
    /// The binary of all Kubernetes components.
    pub controlplane: PathBuf,
    /// The administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// For logs and state.
    pub dir: PathBuf,
}

impl Setup {
    fn words(&self, kind: Kind, state: &Path) -> Result<Vec<String>> {
        let kubeconfig = self.kubeconfig.display();
        let words = match kind {
            Kind::KubeProxy => {
                let configuration = kube_proxy_configuration(self.mode.word(), NODE, &self.kubeconfig, PODS);
                let path = self.dir.join("kube-proxy.json");
                crate::files::write(&path, &configuration.to_string())?;
                vec![
                    self.controlplane.display().to_string(),
                    "kube-proxy".into(),
                    format!("--config={}", path.display()),
                    // As installers set it; the log then says when the lists were complete.
                    "--v=2".into(),
                ]
            }
            Kind::Pointsman => vec![
                "env".into(),
                AGENT_ENVIRONMENT.into(),
                self.agent.display().to_string(),
                "run".into(),
                format!("--node-name={NODE}"),
                format!("--apiserver=https://{API_ADDRESS}:{API_PORT}"),
                format!("--kubeconfig={kubeconfig}"),
                format!("--state-dir={}", state.display()),
                format!("--run-dir={}", state.display()),
            ],
        };
        Ok(words)
    }

    /// A folder in which `iptables` and its relatives are those of the flavour.
    fn tools(&self) -> Result<PathBuf> {
        let dir = self.dir.join("tools");
        let multi = format!("/usr/sbin/xtables-{}-multi", self.flavour.word());
        fs::create_dir_all(&dir)?;
        for family in ["iptables", "ip6tables"] {
            for suffix in ["", "-save", "-restore"] {
                let link = dir.join(format!("{family}{suffix}"));
                if !link.exists() {
                    symlink(&multi, &link).with_context(|| format!("linking {}", link.display()))?;
                }
            }
        }
        Ok(dir)
    }

    /// Starts a program on the node. `name` is unique to this start; `state` is what the program finds on its disk.
    pub fn start(&self, lab: &Lab, kind: Kind, name: &str, state: &Path) -> Result<Program> {
        let meter = Meter::new(name, lab.processor())?;
        let log = self.dir.join(format!("{name}.log"));
        let path = std::env::var("PATH").unwrap_or_default();
        let mut sh = launch(lab, &meter, &log, self.words(kind, state)?);
        sh.env("PATH", format!("{}:{path}", self.tools()?.display())).env("TZ", "UTC");
        let (started, clock) = (Instant::now(), SystemTime::now());
        let child = sh.spawn().with_context(|| format!("starting {kind}"))?;
        Ok(Program { kind, child, meter, log, started, clock })
    }

    /// Fails unless the rules on the node are those of the mode and the flavour that are to be measured.
    pub async fn verify(&self, lab: &Lab, kind: Kind) -> Result<()> {
        let node = lab.node();
        let tables = output(in_netns(&node, "nft").args(["list", "tables"])).await?;
        let own = match kind {
            Kind::KubeProxy => "table ip kube-proxy",
            Kind::Pointsman => "table ip pointsman",
        };
        let nftables = tables.lines().any(|line| line == own);
        let has_chains = async |flavour: Flavour| -> Result<bool> {
            let save = format!("iptables-{}-save", flavour.word());
            let rules = output(in_netns(&node, &save).args(["-t", "nat"])).await?;
            Ok(rules.contains("-A KUBE-SVC-"))
        };
        let (nft, legacy) = (has_chains(Flavour::Nft).await?, has_chains(Flavour::Legacy).await?);
        let expected = match (self.mode, self.flavour) {
            (Mode::Iptables, Flavour::Nft) => (false, true, false),
            (Mode::Iptables, Flavour::Legacy) => (false, false, true),
            (Mode::Nftables, _) => (true, false, false),
            (Mode::Ipvs, _) => (false, false, false),
        };
        if self.mode == Mode::Ipvs {
            let servers = output(in_netns(&node, "cat").arg("/proc/net/ip_vs")).await?;
            let count = servers.lines().filter(|line| line.starts_with("TCP")).count();
            ensure!(count > 0, "{kind} has made no virtual servers");
        }
        ensure!(
            (nftables, nft, legacy) == expected,
            "{kind} does not run as told: its nftables table exists: {nftables}, chains of iptables-nft: {nft}, of \
             iptables-legacy: {legacy}"
        );
        Ok(())
    }
}

/// A command that becomes a program on the node, measured and with a log.
#[must_use]
pub fn launch(lab: &Lab, meter: &Meter, log: &Path, words: Vec<String>) -> Command {
    let mut sh = measured(log, meter);
    sh.arg("nsenter")
        .arg(format!("--net={}", lab.node().display()))
        .arg("--")
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    sh
}

/// What a process has allocated in bytes, without the pages of its binary.
pub fn allocated(pid: impl std::fmt::Display) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let used = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    Ok(used.context("a process without RssAnon")?.trim().parse::<u64>()? * 1024)
}

/// A running program.
#[derive(Debug)]
pub struct Program {
    kind: Kind,
    child: Child,
    meter: Meter,
    log: PathBuf,
    /// When it was started.
    pub started: Instant,
    clock: SystemTime,
}

impl Program {
    /// What it uses.
    #[must_use]
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// An error that holds the end of its log, if it has ended or `patience` is over.
    pub fn check(&self, patience: Duration) -> Result<()> {
        let pid = self.pid()?;
        let alive = Path::new(&format!("/proc/{pid}")).exists()
            && !fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
        // Not there yet on a machine that is busy.
        let log = self.log().unwrap_or_default();
        let refuses = log.contains(REFUSAL);
        if alive && !refuses && self.started.elapsed() < patience {
            return Ok(());
        }
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n");
        let what = match (alive, refuses) {
            (false, _) => "has ended",
            (true, true) => "cannot do what it is told",
            (true, false) => "is not ready in time",
        };
        bail!("{} {what}; the end of its log:\n{tail}", self.kind)
    }

    fn pid(&self) -> Result<i32> {
        let pid = self.child.id().with_context(|| format!("{} has ended", self.kind))?;
        i32::try_from(pid).context("a process number")
    }

    fn log(&self) -> Result<String> {
        fs::read_to_string(&self.log).with_context(|| format!("reading {}", self.log.display()))
    }

    /// When, after its start, it had all its lists, as its log says.
    pub fn listed(&self) -> Result<Duration> {
        let marker = match self.kind {
            Kind::KubeProxy => "Caches are synced",
            // Written once all lists are there and the tools found.
            Kind::Pointsman => "programming this node",
        };
        let log = self.log()?;
        let line = log.lines().rfind(|line| line.contains(marker));
        let line = line.with_context(|| format!("the log of {} does not say {marker:?}", self.kind))?;
        let at = time_of_day(line).with_context(|| format!("no time in {line:?}"))?;
        let day = Duration::from_hours(24);
        let start = self.clock.duration_since(UNIX_EPOCH).context("the clock")?;
        let start = Duration::from_nanos((start.as_nanos() % day.as_nanos()).try_into().unwrap_or(0));
        // Midnight may have passed.
        Ok(at.checked_sub(start).unwrap_or((at + day).saturating_sub(start)))
    }

    /// The memory of its own process in bytes: what it has allocated, without the pages of its binary.
    pub fn memory(&self) -> Result<u64> {
        allocated(self.pid()?).with_context(|| format!("the memory of {}", self.kind))
    }

    /// Tells it to stop, and waits until it has.
    pub async fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid()?), Signal::SIGTERM)
            .with_context(|| format!("stopping {}", self.kind))?;
        let ended = timeout(LAST_WRITE, self.child.wait()).await;
        ended.with_context(|| format!("{} does not stop", self.kind))?.map(drop).map_err(Into::into)
    }
}

/// The first `HH:MM:SS.ffffff` in a line of a log, in UTC, as time since midnight.
fn time_of_day(line: &str) -> Option<Duration> {
    line.split(['T', ' ', 'Z']).find_map(|word| {
        let mut parts = word.split(':');
        let (hours, minutes, seconds) = (parts.next()?, parts.next()?, parts.next()?);
        let whole = |text: &str| (text.len() == 2).then(|| text.parse::<u64>().ok())?;
        let seconds: f64 = seconds.parse().ok()?;
        let minutes = whole(hours)? * 60 + whole(minutes)?;
        Some(Duration::from_mins(minutes) + Duration::try_from_secs_f64(seconds).ok()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_both_logs() {
        let expected = Some(Duration::from_millis(((13 * 60 + 49) * 60 + 39) * 1000 + 250));
        for line in [
            "I1130 13:49:39.250000   12345 shared_informer.go:377] \"Caches are synced\" controller=\"x\"",
            "2026-11-30T13:49:39.250000Z  INFO pointsman_agent::sync::engine: programming this node mode=iptables",
        ] {
            assert_eq!(time_of_day(line), expected, "{line}");
        }
        assert_eq!(time_of_day("no time: at all"), None);
    }
}
