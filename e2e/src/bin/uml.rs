//! `hack/uml`: runs a command in a kernel that has IPVS.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use pointsman_e2e::uml::{self, Machine};

/// Runs a command in user-mode-linux: a kernel with IPVS, dummy devices, ipset, SCTP and legacy iptables, on this machine's
/// files. What the command writes is thrown away, except in shared folders. Exits as the command does; with 124 when the
/// time is over, with 125 when the kernel failed.
#[derive(Parser)]
#[command(name = "hack/uml", bin_name = "hack/uml")]
struct Arguments {
    /// Memory in MiB
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Seconds until it is stopped
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// A folder whose files the command may change
    #[arg(long)]
    share: Vec<PathBuf>,
    /// The command
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

// One thread: the kernel dies with the thread that starts it.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("hack/uml: {error:#}");
            ExitCode::from(125)
        }
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<u8> {
    let machine = Machine { memory: arguments.memory, shared: arguments.share, ..Machine::default() };
    let command = machine.command(&uml::script(&arguments.command)?).await?;
    uml::run(command, Duration::from_secs(arguments.timeout)).await
}
