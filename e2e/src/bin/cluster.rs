//! `hack/cluster`: brings test clusters up and down, and enters them.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use pointsman_e2e::addons;
use pointsman_e2e::cluster::Cluster;
use pointsman_e2e::progress::step;
use pointsman_e2e::state::{self, Proxy};
use pointsman_e2e::up::{Options, next_steps};

/// A real Kubernetes on this machine: control plane, and nodes in network namespaces or in a virtual machine.
#[derive(Parser)]
#[command(name = "hack/cluster", bin_name = "hack/cluster")]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Args)]
struct Name {
    /// The cluster's name; clusters of different names run side by side
    #[arg(long, default_value = "pointsman", env = "POINTSMAN_CLUSTER")]
    name: String,
}

#[derive(Subcommand)]
enum Action {
    /// Bring a cluster up, or start what is missing of it
    Up {
        #[command(flatten)]
        name: Name,
        /// Number of nodes [default: 2]
        #[arg(long)]
        nodes: Option<u8>,
        /// One more node, a virtual machine whose kernel has IPVS; its label pointsman.dev/kernel is "ipvs".
        /// kube-proxy:ipvs serves only there, on the other nodes kube-proxy:iptables
        #[arg(long)]
        ipvs_node: bool,
        /// What serves Services: pointsman, kube-proxy:iptables|nftables|ipvs, or none [default: pointsman]
        #[arg(long)]
        proxy: Option<Proxy>,
    },
    /// Take a cluster down; nothing is left of it
    Down {
        #[command(flatten)]
        name: Name,
    },
    /// Print shell lines that set KUBECONFIG and PATH: eval "$(hack/cluster env)"
    Env {
        #[command(flatten)]
        name: Name,
    },
    /// Import a container image (docker-archive or OCI tar) on every node
    Load {
        #[command(flatten)]
        name: Name,
        /// The image archive
        archive: PathBuf,
    },
    /// Run a command on a node
    Node {
        #[command(flatten)]
        name: Name,
        /// The node, such as node1
        node: String,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run a command outside the nodes, on a machine of their network
    Client {
        #[command(flatten)]
        name: Name,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// List the clusters of this machine
    List,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse().action).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hack/cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(action: Action) -> Result<()> {
    match action {
        Action::Up { name, nodes, ipvs_node, proxy } => {
            let options = Options { name: name.name, nodes, ipvs_node, proxy };
            let start = std::time::Instant::now();
            let cluster = Cluster::up(&options).await?;
            eprintln!("{:>7.1} s  in all", start.elapsed().as_secs_f64());
            eprintln!("{}", next_steps(&cluster)?);
            Ok(())
        }
        Action::Down { name } => {
            step(&format!("cluster {:?} taken down", name.name), Cluster::down(&name.name)).await
        }
        Action::Env { name } => {
            let cluster = Cluster::open(&name.name).await?;
            let tools = addons::tools(&cluster).await?;
            println!("export KUBECONFIG='{}'", cluster.kubeconfig().display());
            println!("export PATH='{}':\"$PATH\"", tools.display());
            Ok(())
        }
        Action::Load { name, archive } => {
            let cluster = Cluster::open(&name.name).await?;
            step(&format!("load {}", archive.display()), cluster.load(&archive)).await
        }
        Action::Node { name, node, command } => {
            let cluster = Cluster::open(&name.name).await?;
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            become_command(cluster.node(&node)?.command(&words))
        }
        Action::Client { name, command } => {
            let cluster = Cluster::open(&name.name).await?;
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            become_command(cluster.outside_command(&words))
        }
        Action::List => {
            for name in state::list()? {
                match state::Record::load(&name) {
                    Ok(Some(record)) => println!("{name}\t{} nodes\t{}", record.all_nodes(), record.proxy),
                    _ => println!("{name}\tunfinished: hack/cluster down --name {name}"),
                }
            }
            Ok(())
        }
    }
}

/// Replaces this process, so that the command has our terminal, signals and exit status.
fn become_command(command: tokio::process::Command) -> Result<()> {
    let mut command = command.into_std();
    Err(command.exec()).with_context(|| format!("running {}", command.get_program().display()))
}
