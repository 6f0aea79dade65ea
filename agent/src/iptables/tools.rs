//! The tools of the operating system, and how they are run.
//!
//! In: what to run and its input. Out: its output, or an error that repeats what the tool said. Which of the two
//! flavours is used is decided once, at start, and never mixed: rules in both would both apply (k/k#109811).

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

/// The two implementations of the iptables commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// `iptables-nft`: rules live in nftables.
    Nft,
    /// `iptables-legacy`: rules live in x_tables.
    Legacy,
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        })
    }
}

/// Where the tools are and how they are started. The default is what a node needs.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Directory of the tools; otherwise `PATH` is searched.
    pub directory: Option<PathBuf>,
    /// Command and arguments that every tool is started through, such as `nsenter --net=…`.
    pub wrapper: Vec<OsString>,
}

/// Why there are no tools to work with.
#[derive(Debug, Error)]
pub enum ToolsError {
    /// No flavour that was asked for is installed.
    #[error(
        "no usable {wanted} iptables tools: {reason}; install iptables, or set iptables.backend to the flavour that is there"
    )]
    Missing {
        /// What was looked for.
        wanted: String,
        /// What happened.
        reason: String,
    },
}

/// Why a tool's run did not succeed.
#[derive(Debug, Error)]
pub enum RunError {
    /// It could not be started.
    #[error("{command} cannot be started: {source}; is it installed?")]
    Start {
        /// The command.
        command: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// It did not end in time.
    #[error("{command} did not end within {seconds} s and was killed")]
    Timeout {
        /// The command.
        command: String,
        /// The limit.
        seconds: u64,
    },
    /// It ended with an error.
    #[error("{command} failed with status {status}: {message}")]
    Failed {
        /// The command.
        command: String,
        /// Its exit status, −1 if a signal ended it.
        status: i32,
        /// What it wrote to standard error, and the line of input that it names.
        message: String,
    },
}

/// The iptables tools of one flavour.
#[derive(Clone, Debug)]
pub struct Tools {
    flavour: Flavour,
    version: String,
    options: Options,
    /// Whether the commands carry the flavour in their names.
    suffixed: bool,
}

impl Tools {
    /// Finds the tools of the flavour that is asked for. `Auto` takes the flavour that already holds kubelet's hint
    /// chains in mangle; failing that, the one with more rules; failing that, nft if the kernel has it.
    pub async fn detect(backend: IptablesBackend) -> Result<Self, ToolsError> {
        Self::detect_with(backend, Options::default()).await
    }

    /// As [`Tools::detect`], with the tools elsewhere.
    pub async fn detect_with(backend: IptablesBackend, options: Options) -> Result<Self, ToolsError> {
        let mut reasons = Vec::new();
        let wanted: &[Flavour] = match backend {
            IptablesBackend::NFT => &[Flavour::Nft],
            IptablesBackend::Legacy => &[Flavour::Legacy],
            IptablesBackend::Auto => &[Flavour::Nft, Flavour::Legacy],
        };
        let mut found = Vec::new();
        for flavour in wanted {
            match Self::find(*flavour, &options).await {
                Ok(tools) => found.push(tools),
                Err(reason) => reasons.push(reason),
            }
        }
        let mut best: Option<(Usage, Self)> = None;
        let several = found.len() > 1;
        for tools in found {
            let usage = if several { tools.usage().await } else { Usage::Rules(0) };
            let hinted = usage == Usage::Hinted;
            if best.as_ref().is_none_or(|(known, _)| usage > *known) {
                best = Some((usage, tools));
            }
            if hinted {
                break;
            }
        }
        best.map(|(_, tools)| tools).ok_or_else(|| ToolsError::Missing {
            wanted: match backend {
                IptablesBackend::NFT => "nft".to_owned(),
                IptablesBackend::Legacy => "legacy".to_owned(),
                IptablesBackend::Auto => "nft or legacy".to_owned(),
            },
            reason: reasons.join("; "),
        })
    }

    async fn find(flavour: Flavour, options: &Options) -> Result<Self, String> {
        let mut reason = String::new();
        for suffixed in [true, false] {
            let tools = Self { flavour, version: String::new(), options: options.clone(), suffixed };
            match tools.run(&tools.command(IpFamily::IPv4, ""), &["--version"], None, PROBE_TIMEOUT).await {
                Ok(text) => {
                    let legacy = text.contains("legacy") || !text.contains("nf_tables");
                    if legacy == (flavour == Flavour::Legacy) {
                        let version = text.trim().trim_start_matches("iptables ").to_owned();
                        return Ok(Self { version, ..tools });
                    }
                    reason = format!("iptables is {}", text.trim());
                }
                Err(error) if reason.is_empty() => reason = error.to_string(),
                Err(_) => {}
            }
        }
        Err(reason)
    }

    /// How much this flavour is in use.
    async fn usage(&self) -> Usage {
        // Without a table named, the legacy tool prints what exists and creates nothing. The nft tool may take long for all.
        let first: &[&str] = if self.flavour == Flavour::Legacy { &[] } else { &["-t", "mangle"] };
        let mut count = 0;
        for family in [IpFamily::IPv4, IpFamily::IPv6] {
            let saved = match self.run(&self.command(family, "-save"), first, None, PROBE_TIMEOUT).await {
                // Every kernel has IPv4.
                Err(RunError::Failed { .. }) if family == IpFamily::IPv4 => return Usage::Unusable,
                saved => saved.unwrap_or_default(),
            };
            let is_hint =
                |line: &str| HINT_CHAINS.iter().any(|chain| line.starts_with(&format!(":{chain} ")));
            if saved.lines().any(is_hint) {
                return Usage::Hinted;
            }
            count += rules(&saved);
        }
        if self.flavour == Flavour::Nft {
            count = 0;
            for family in [IpFamily::IPv4, IpFamily::IPv6] {
                let saved = self.run(&self.command(family, "-save"), &[], None, READ_TIMEOUT).await;
                count += rules(&saved.unwrap_or_default());
            }
        }
        Usage::Rules(count)
    }

    /// The tools of the other flavour, if its tables hold chains of a service proxy: rules in both would both apply.
    pub async fn other_flavour_in_use(&self) -> Option<Self> {
        let other = match self.flavour {
            Flavour::Nft => Flavour::Legacy,
            Flavour::Legacy => Flavour::Nft,
        };
        let tools = Self::find(other, &self.options).await.ok()?;
        let used = tools.in_use(IpFamily::IPv4).await || tools.in_use(IpFamily::IPv6).await;
        used.then_some(tools)
    }

    /// Whether the tables of a family hold chains of a service proxy.
    pub async fn in_use(&self, family: IpFamily) -> bool {
        let saved = self.run(&self.command(family, "-save"), &[], None, READ_TIMEOUT).await;
        saved.unwrap_or_default().lines().any(|line| line.starts_with(":KUBE-SERVICES "))
    }

    /// Which flavour.
    #[must_use]
    pub fn flavour(&self) -> Flavour {
        self.flavour
    }

    /// Version and flavour, such as `v1.8.9 (nf_tables)`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The name of a command: `""`, `-save` or `-restore`.
    pub(crate) fn command(&self, family: IpFamily, suffix: &str) -> String {
        let stem = match family {
            IpFamily::IPv4 => "iptables",
            IpFamily::IPv6 => "ip6tables",
        };
        if self.suffixed { format!("{stem}-{}{suffix}", self.flavour) } else { format!("{stem}{suffix}") }
    }

    /// Runs a tool to its end. Returns what it printed.
    pub(crate) async fn run(
        &self,
        command: &str,
        args: &[&str],
        input: Option<&str>,
        timeout: Duration,
    ) -> Result<String, RunError> {
        Ok(self.run_as(command, args, input, timeout).await?.0)
    }

    /// Runs a tool to its end. Returns what it printed, and the id of the process that it was.
    pub(crate) async fn run_as(
        &self,
        command: &str,
        args: &[&str],
        input: Option<&str>,
        timeout: Duration,
    ) -> Result<(String, Option<u32>), RunError> {
        let program: OsString = match &self.options.directory {
            Some(directory) => directory.join(command).into(),
            None => command.into(),
        };
        let mut words = self.options.wrapper.iter().cloned().chain([program]);
        let mut process = Command::new(words.next().unwrap_or_default());
        process
            .args(words)
            .args(args)
            .env("LC_ALL", "C")
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let start = |source| RunError::Start { command: command.to_owned(), source };
        let mut child = process.spawn().map_err(start)?;
        let id = child.id();
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let feed = async {
            if let (Some(mut pipe), Some(input)) = (stdin, input) {
                // A tool that has failed closes its end; its own message says why.
                let _ = pipe.write_all(input.as_bytes()).await;
            }
        };
        let read = async {
            let mut text = Vec::new();
            if let Some(mut pipe) = stdout {
                let _ = pipe.read_to_end(&mut text).await;
            }
            text
        };
        let complain = async {
            let mut text = Vec::new();
            if let Some(mut pipe) = stderr {
                let _ = pipe.read_to_end(&mut text).await;
            }
            text
        };
        let all = async { tokio::join!(feed, read, complain, child.wait()) };
        let Ok(((), out, err, status)) = tokio::time::timeout(timeout, all).await else {
            return Err(RunError::Timeout { command: command.to_owned(), seconds: timeout.as_secs() });
        };
        let status = status.map_err(start)?;
        if status.success() {
            return Ok((String::from_utf8_lossy(&out).into_owned(), id));
        }
        Err(RunError::Failed {
            command: command.to_owned(),
            status: status.code().unwrap_or(-1),
            message: explain(&String::from_utf8_lossy(&err), input),
        })
    }
}

const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
const READ_TIMEOUT: Duration = Duration::from_mins(1);
/// Chains that kubelet makes so that others can see which flavour it uses (KEP-3178).
const HINT_CHAINS: [&str; 2] = ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"];

/// How much a flavour is in use; more is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Usage {
    /// The kernel does not have it.
    Unusable,
    /// It holds so many rules.
    Rules(usize),
    /// It holds kubelet's hint chains.
    Hinted,
}

/// How many rules a tool has printed.
fn rules(saved: &str) -> usize {
    saved.lines().filter(|line| line.starts_with("-A")).count()
}

/// What the tool said, with the line of input that it names.
fn explain(said: &str, input: Option<&str>) -> String {
    let said = said.trim();
    let line = said
        .split_once("line ")
        .map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect::<String>())
        .and_then(|digits| digits.parse::<usize>().ok())
        .and_then(|number| input?.lines().nth(number.checked_sub(1)?));
    match line {
        Some(line) => format!("{said} (that line is: {line})"),
        None if said.is_empty() => "it said nothing".to_owned(),
        None => said.to_owned(),
    }
}
