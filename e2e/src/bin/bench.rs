//! `hack/bench`: kube-proxy and Pointsman, measured in one run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use pointsman_e2e::bench::measure::Effort;
use pointsman_e2e::bench::objects::Size;
use pointsman_e2e::bench::program::{Flavour, Kind, Mode};
use pointsman_e2e::bench::{Options, Programs, lab, machine, run, userspace};
use pointsman_e2e::stamp::repository;
use tokio::runtime::{Builder, Runtime};

/// Measures kube-proxy and Pointsman's agent, one after the other, on the same node with the same Services, and prints
/// tables. Mode userspace is measured beside HAProxy, with one Service. Needs root; leaves nothing running.
#[derive(Parser)]
#[command(name = "hack/bench", bin_name = "hack/bench")]
struct Arguments {
    /// The mode of both programs; ipvs is measured in user-mode-linux
    #[arg(required_unless_present = "inside")]
    mode: Option<Subject>,
    /// Numbers of Services, separated by commas [default: 1000,5000,10000; in mode ipvs 1000,3000]
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<u32>,
    /// Endpoints of each Service
    #[arg(long, default_value_t = 3)]
    endpoints: u32,
    /// Measure this program only
    #[arg(long)]
    only: Option<Kind>,
    /// The flavour of the iptables tools
    #[arg(long, default_value = "nft")]
    flavour: Flavour,
    /// Fewer repetitions and a shorter idle time: for comparing, not for publishing
    #[arg(long)]
    quick: bool,
    /// Put each table into docs/benchmarks.md, in place of the last one of this mode, flavour and size; those of one program only
    /// have sections of their own
    #[arg(long)]
    write: bool,
    /// Keep the logs of both programs in this folder
    #[arg(long)]
    logs: Option<PathBuf>,
    /// Measure what the order in this folder says: how a run in user-mode-linux is started
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Subject {
    Iptables,
    Nftables,
    Ipvs,
    Userspace,
}

fn main() -> ExitCode {
    match measure(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hack/bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> Result<()> {
    if let Some(dir) = &arguments.inside {
        return runtime()?.block_on(machine::inside(dir));
    }
    let mode = match arguments.mode.context("which mode?")? {
        Subject::Iptables => Mode::Iptables,
        Subject::Nftables => Mode::Nftables,
        Subject::Ipvs => Mode::Ipvs,
        Subject::Userspace => return measure_userspace(arguments),
    };
    let usual: &[u32] = if mode == Mode::Ipvs { &[1000, 3000] } else { &[1000, 5000, 10_000] };
    let sizes = if arguments.sizes.is_empty() { usual } else { &arguments.sizes };
    let sizes: Result<_> = sizes.iter().map(|services| Size::new(*services, arguments.endpoints)).collect();
    let options = Options {
        mode,
        // All that user-mode-linux has.
        flavour: if mode == Mode::Ipvs { Flavour::Legacy } else { arguments.flavour },
        sizes: sizes?,
        kinds: arguments.only.map_or_else(|| vec![Kind::KubeProxy, Kind::Pointsman], |kind| vec![kind]),
        effort: match (arguments.quick, mode) {
            (false, _) => Effort::FULL,
            (true, Mode::Ipvs) => Effort::QUICK_IN_MACHINE,
            (true, _) => Effort::QUICK,
        },
        logs: arguments.logs()?,
        page: arguments.page(),
    };
    alone(Programs::build(&options.kinds), async |programs| run(&options, &programs).await)
}

fn measure_userspace(arguments: &Arguments) -> Result<()> {
    let effort = if arguments.quick { userspace::Options::QUICK } else { userspace::Options::FULL };
    let options = userspace::Options { logs: arguments.logs()?, page: arguments.page(), ..effort };
    alone(userspace::build(), async |binary| userspace::run(&options, &binary).await)
}

/// Builds with the network of the machine, and measures in one of its own, while nobody else does: two at a time would measure each
/// other.
fn alone<T>(
    build: impl Future<Output = Result<T>>,
    measure: impl AsyncFnOnce(T) -> Result<()>,
) -> Result<()> {
    let building = Builder::new_current_thread().enable_all().build()?;
    let lock = building.block_on(pointsman_e2e::stamp::lock(Path::new("/run/lock/pointsman-bench")));
    let _lock = lock.context("waiting for another benchmark")?;
    let programs = building.block_on(build)?;
    // Its threads would keep the network of the machine.
    drop(building);
    lab::isolate()?;
    // In memory, and gone with this process.
    let _ = tempfile::env::override_temp_dir(Path::new(lab::TEMPORARY));
    runtime()?.block_on(measure(programs))
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

impl Arguments {
    fn logs(&self) -> Result<Option<PathBuf>> {
        self.logs.as_deref().map(std::path::absolute).transpose().map_err(Into::into)
    }

    fn page(&self) -> Option<PathBuf> {
        self.write.then(|| repository().join("docs/benchmarks.md"))
    }
}
