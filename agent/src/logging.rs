//! The log: text or JSON on standard error, with a level that follows the configuration live.
//!
//! In: the format, and later each configuration. Out: nothing but log lines. `RUST_LOG` in the environment wins over the
//! configuration, for the one who debugs one pod.

use std::io::IsTerminal;
use std::{env, fmt};

use clap::ValueEnum;
use pointsman_crds::settings::LogLevel;
use tokio::sync::watch;
use tracing::{info, warn};
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::state::SyncState;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// Changes the level of a running agent.
#[derive(Debug)]
pub struct Level {
    handle: Option<reload::Handle<EnvFilter, Registry>>,
}

/// Begins to log. Call once.
#[must_use]
pub fn start(format: Format) -> Level {
    let (filter, handle) = match env::var("RUST_LOG") {
        Ok(directives) if !directives.is_empty() => (EnvFilter::new(directives), None),
        _ => (filter(LogLevel::Info), Some(())),
    };
    let (filter, reload) = reload::Layer::new(filter);
    let lines = match format {
        Format::Text => {
            let colours = std::io::stderr().is_terminal();
            layer().with_ansi(colours).with_writer(std::io::stderr).boxed()
        }
        Format::Json => layer().json().flatten_event(true).with_writer(std::io::stderr).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    Level { handle: handle.map(|()| reload) }
}

/// The client library repeats at level warn what our watches say once, so it is heard from error on.
fn filter(level: LogLevel) -> EnvFilter {
    let quiet = "kube_runtime=error,kube_client=error,tower=error,hyper=error,h2=error,rustls=error";
    EnvFilter::new(match level {
        LogLevel::Trace => "trace".to_owned(),
        level => format!("{},{quiet}", level.as_str()),
    })
}

impl Level {
    /// Follows the configuration until the sync loop is gone.
    pub async fn follow(self, mut state: watch::Receiver<SyncState>) {
        let Some(handle) = self.handle else { return };
        let of = |state: &SyncState| state.config.in_force.as_ref().map(|config| config.log_level);
        let mut current = LogLevel::Info;
        while let Ok(state) = state.wait_for(|state| of(state).is_some_and(|level| level != current)).await {
            let Some(level) = of(&state) else { continue };
            drop(state);
            current = level;
            match handle.reload(filter(level)) {
                Ok(()) => info!(level = level.as_str(), "the log level follows the configuration"),
                Err(error) => warn!("the log level cannot be changed: {error}"),
            }
        }
    }
}
