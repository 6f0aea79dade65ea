//! The agent's binary: flags in, an exit code out.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pointsman_agent::client::{Access, SERVICE_ACCOUNT_DIR, parse_endpoints};
use pointsman_agent::config::checkpoint::Checkpoint;
use pointsman_agent::conntrack::Connections;
use pointsman_agent::iptables::{self, Tools};
use pointsman_agent::{admin, init, instance, ipvs, logging, nftables, run, userspace};
use pointsman_crds::names::NODE_CONFIG_NAMESPACE;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;
use tracing::{error, info};

const STATE_DIR: &str = "/var/lib/pointsman-agent";

/// Programs the Services of a cluster into the kernel of the node it runs on.
#[derive(Debug, Parser)]
#[command(name = "pointsman-agent", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How log lines look.
    #[arg(long, global = true, env = "POINTSMAN_LOG_FORMAT", value_enum, default_value_t)]
    log_format: logging::Format,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent.
    Run(Run),
    /// Load kernel modules and set sysctls, with privilege, and exit.
    Init,
    /// Remove everything that Pointsman wrote to the kernel of this node, and nothing else.
    Cleanup(Cleanup),
    /// Ask the running agent how it is. Exits with 1 if the answer is no.
    Probe(Probe),
    /// Print the version.
    Version,
}

#[derive(Debug, Args)]
struct Run {
    /// The node's name in the cluster.
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
    /// Direct endpoints of the API servers, `https://HOST:PORT`, comma-separated. Never the service IP: this agent programs it.
    #[arg(long, env = "POINTSMAN_APISERVERS", default_value = "")]
    apiserver: String,
    /// Identity from a kubeconfig, outside pods.
    #[arg(long, env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// Directory with the service account's `token` and `ca.crt`.
    #[arg(long, env = "POINTSMAN_SERVICE_ACCOUNT_DIR", default_value = SERVICE_ACCOUNT_DIR)]
    service_account_dir: PathBuf,
    /// Namespace of the node ConfigMaps.
    #[arg(long, env = "POINTSMAN_NODE_CONFIG_NAMESPACE", default_value = NODE_CONFIG_NAMESPACE)]
    node_config_namespace: String,
    /// The kernel's settings: /proc/sys, or a directory with another mount of /proc/sys/net that can be written.
    #[arg(long, env = "POINTSMAN_SYSCTL_DIR", default_value = "/proc/sys")]
    sysctl_dir: PathBuf,
    #[command(flatten)]
    directories: Directories,
}

#[derive(Debug, Args)]
struct Directories {
    /// What survives a restart.
    #[arg(long, env = "POINTSMAN_STATE_DIR", default_value = STATE_DIR)]
    state_dir: PathBuf,
    /// The admin socket.
    #[arg(long, env = "POINTSMAN_RUN_DIR", default_value = "/run/pointsman-agent")]
    run_dir: PathBuf,
}

#[derive(Debug, Args)]
struct Cleanup {
    /// The state directory of this node's agent.
    #[arg(long, env = "POINTSMAN_STATE_DIR", default_value = STATE_DIR)]
    state_dir: PathBuf,
}

#[derive(Debug, Args)]
struct Probe {
    /// What to ask.
    #[arg(value_enum)]
    what: What,
    #[command(flatten)]
    directories: Directories,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// Does the sync loop turn?
    Live,
    /// Does the kernel hold the assigned configuration?
    Ready,
    /// Everything, in JSON.
    State,
}

impl What {
    fn path(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Ready => "ready",
            Self::State => "state",
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match start(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("pointsman-agent: {problem:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Version => {
            println!("pointsman-agent {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Command::Init => {
            let _level = logging::start(cli.log_format);
            let missing = init::prepare();
            info!(missing, "the node is prepared");
            Ok(())
        }
        Command::Probe(probe) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let answer = runtime.block_on(admin::probe(&probe.directories.run_dir, probe.what.path()))?;
            println!("{}", answer.trim_end());
            Ok(())
        }
        Command::Cleanup(cleanup) => {
            let _level = logging::start(cli.log_format);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(clean(&cleanup.state_dir))
        }
        Command::Run(run) => {
            let level = logging::start(cli.log_format);
            let options = run::Options {
                node: run.node_name,
                access: Access {
                    endpoints: parse_endpoints(&run.apiserver)?,
                    kubeconfig: run.kubeconfig,
                    service_account: run.service_account_dir,
                },
                config_namespace: run.node_config_namespace,
                state_directory: run.directories.state_dir,
                sysctl_directory: run.sysctl_dir,
                run_directory: run.directories.run_dir,
                log_format: cli.log_format,
            };
            // Reading a cluster and writing a kernel keeps two threads busy at most; nodes have better uses for the others.
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            let outcome = runtime.block_on(run::run(options, level));
            runtime.shutdown_background();
            outcome.inspect_err(|problem| error!("{problem}")).context("the agent has stopped")
        }
    }
}

/// All modes and both flavours, because a node may have been switched from one to the other.
async fn clean(state_dir: &Path) -> anyhow::Result<()> {
    let _lock =
        instance::lock(state_dir).context("nothing was removed, since an agent would write it again")?;
    let mut problems = Vec::new();
    let mut found = Vec::new();
    for backend in [IptablesBackend::NFT, IptablesBackend::Legacy] {
        match Tools::detect(backend).await {
            Ok(tools) => {
                let families = [IpFamily::IPv4, IpFamily::IPv6];
                match iptables::cleanup(&tools, &families, Connections::Anchor).await {
                    Ok(false) => info!(flavour = %tools.flavour(), "nothing of ours is left"),
                    Ok(true) => info!(
                        flavour = %tools.flavour(),
                        "translated connections are left, and one rule without effect in INPUT that keeps them going; to remove it, run this again when they have ended"
                    ),
                    Err(problem) => problems.push(format!("{}: {problem}", tools.flavour())),
                }
                found.push(tools);
            }
            Err(problem) => info!("{problem}"),
        }
    }
    let families = [IpFamily::IPv4, IpFamily::IPv6];
    if let Err(problem) = ipvs::cleanup(&found, &families).await {
        problems.push(problem.to_string());
    }
    match nftables::cleanup(&families, Connections::Anchor).await {
        Ok(false) => info!("no table of mode nftables is left"),
        Ok(true) => info!(
            "translated connections are left, and a table without effect that keeps them going; to remove it, run this again when they have ended"
        ),
        Err(problem) => problems.push(problem.to_string()),
    }
    match userspace::cleanup(&families).await {
        Ok(()) => info!("no table of mode userspace is left"),
        Err(problem) => problems.push(problem.to_string()),
    }
    if found.is_empty() {
        problems.push("no iptables tools are installed, so nothing can be removed".to_owned());
    }
    if let Err(problem) = Checkpoint::new(state_dir).remove() {
        problems.push(problem.to_string());
    }
    if problems.is_empty() {
        Ok(())
    } else {
        bail!("not everything could be removed: {}", problems.join("; "))
    }
}
