//! `hack/image`: builds Pointsman's container images.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use pointsman_e2e::progress::step;
use pointsman_e2e::release::{self, Part, VERSION};

/// Builds the container images of Pointsman as archives for `ctr images import` or `docker load`, without a
/// registry or Docker.
#[derive(Parser)]
#[command(name = "hack/image", bin_name = "hack/image")]
struct Arguments {
    /// Which image to build
    #[arg(default_value = "all")]
    image: Which,
    /// The folder for the archives: agent.tar and operator.tar
    #[arg(short, long, default_value = ".")]
    output: PathBuf,
    /// The images' tag
    #[arg(long, default_value = VERSION, env = "TAG")]
    tag: String,
    /// The cargo profile of the binaries: dev builds faster
    #[arg(long, default_value = "release", env = "POINTSMAN_PROFILE")]
    profile: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    Agent,
    Operator,
    All,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hack/image: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<()> {
    let parts: &[Part] = match arguments.image {
        Which::Agent => &[Part::Agent],
        Which::Operator => &[Part::Operator],
        Which::All => &Part::ALL,
    };
    std::fs::create_dir_all(&arguments.output)
        .with_context(|| format!("creating {}", arguments.output.display()))?;
    for part in parts {
        let what = format!("docker.io/pointsman/{}:{}", part.name(), arguments.tag);
        let archive = step(&what, release::build(*part, &arguments.tag, &arguments.profile)).await?;
        let to = arguments.output.join(format!("{}.tar", part.name()));
        std::fs::copy(&archive, &to).with_context(|| format!("writing {}", to.display()))?;
        println!("{}", to.display());
    }
    Ok(())
}
