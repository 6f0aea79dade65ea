//! `hack/bench`: kube-proxy and Pointsman, measured in one run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use pointsman_e2e::bench::measure::Effort;
use pointsman_e2e::bench::program::{Flavour, Kind, Mode};
use pointsman_e2e::bench::{Options, Programs, lab, report, run};
use pointsman_e2e::stamp::repository;
use tokio::runtime::Builder;

/// Measures kube-proxy and Pointsman's agent, one after the other, on the same node with the same Services, and prints
/// tables. Needs root; leaves nothing running.
#[derive(Parser)]
#[command(name = "hack/bench", bin_name = "hack/bench")]
struct Arguments {
    /// The mode of both programs
    mode: Mode,
    /// Numbers of Services, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1000,5000,10000")]
    sizes: Vec<u32>,
    /// Measure this program only
    #[arg(long)]
    only: Option<Kind>,
    /// The flavour of the iptables tools
    #[arg(long, default_value = "nft")]
    flavour: Flavour,
    /// Fewer repetitions and a shorter idle time: for comparing, not for publishing
    #[arg(long)]
    quick: bool,
    /// Put the result into docs/benchmarks.md, in place of the last one of this mode and flavour
    #[arg(long)]
    write: bool,
    /// Keep the logs of both programs in this folder
    #[arg(long)]
    logs: Option<PathBuf>,
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
    let options = Options {
        mode: arguments.mode,
        flavour: arguments.flavour,
        sizes: arguments.sizes.clone(),
        kinds: arguments.only.map_or_else(|| vec![Kind::KubeProxy, Kind::Pointsman], |kind| vec![kind]),
        effort: if arguments.quick { Effort::QUICK } else { Effort::FULL },
        logs: arguments.logs.as_deref().map(std::path::absolute).transpose()?,
    };
    let building = Builder::new_current_thread().enable_all().build()?;
    // Two at a time would measure each other.
    let lock = building.block_on(pointsman_e2e::stamp::lock(Path::new("/run/lock/pointsman-bench")));
    let _lock = lock.context("waiting for another benchmark")?;
    let programs = building.block_on(Programs::build(&options.kinds))?;
    // Its threads would keep the network of the machine.
    drop(building);
    lab::isolate()?;
    // In memory, and gone with this process.
    let _ = tempfile::env::override_temp_dir(Path::new("/run"));
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let text = runtime.block_on(run(&options, &programs))?;
    if arguments.write {
        let path = repository().join("docs/benchmarks.md");
        let page = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let name = format!("{} {}", options.mode.word(), options.flavour.word());
        std::fs::write(&path, report::with_section(&page, &name, &text))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
