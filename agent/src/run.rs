//! The agent, put together.
//!
//! In: where the API server is, which node this is, and where state is kept. Out: a running agent, until it is told to stop. It
//! leaves all rules where they are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

use crate::admin;
use crate::client::{Access, ClientError};
use crate::config::checkpoint::Checkpoint;
use crate::events::Events;
use crate::events::objects::Objects;
use crate::health::Pulse;
use crate::healthcheck::{self, Checks};
use crate::http::{Listener, Listeners, View, health_address, metrics_address};
use crate::instance;
use crate::logging::{Format, Level};
use crate::metrics::Metrics;
use crate::model::Change;
use crate::state::{NodeEligibility, SyncState, Watches};
use crate::status::build::Identity;
use crate::status::writer::Writer;
use crate::sync::{self, Engine, Input, Outside};
use crate::watch::{Watching, addresses};

/// What is under way when the agent is stopped gets this long. The kubelet waits for thirty seconds.
const LAST_WORK: Duration = Duration::from_secs(25);
const TOOL_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(5);

/// What the agent is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node's name in the cluster.
    pub node: String,
    /// How to reach the API server.
    pub access: Access,
    /// Namespace of the node ConfigMaps.
    pub config_namespace: String,
    /// Survives restarts of the pod.
    pub state_directory: PathBuf,
    /// The kernel's settings, where they can be written.
    pub sysctl_directory: PathBuf,
    /// Holds the admin socket.
    pub run_directory: PathBuf,
    /// How log lines look.
    pub log_format: Format,
}

impl Options {
    /// As the command line would say it, for `/flagz`.
    fn flags(&self) -> BTreeMap<&'static str, String> {
        let path = |path: &Path| path.display().to_string();
        let endpoints: Vec<String> = self.access.endpoints.iter().map(ToString::to_string).collect();
        BTreeMap::from([
            ("node-name", self.node.clone()),
            ("apiserver", endpoints.join(",")),
            ("kubeconfig", self.access.kubeconfig.as_deref().map(path).unwrap_or_default()),
            ("service-account-dir", path(&self.access.service_account)),
            ("node-config-namespace", self.config_namespace.clone()),
            ("state-dir", path(&self.state_directory)),
            ("run-dir", path(&self.run_directory)),
            ("log-format", self.log_format.to_string()),
        ])
    }
}

/// Why the agent does not run.
#[derive(Debug, Error)]
pub enum RunError {
    /// No client.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No signals.
    #[error("signals cannot be received: {0}")]
    Signals(std::io::Error),
    /// The sync loop has ended, which it never should.
    #[error(
        "the sync loop has ended unexpectedly ({0}); the rules stay; the kubelet will start the agent again"
    )]
    Ended(String),
}

/// Runs until SIGTERM or SIGINT.
pub async fn run(options: Options, level: Level) -> Result<(), RunError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Signals)?;
    info!(version = env!("CARGO_PKG_VERSION"), node = options.node, "pointsman-agent starts");
    // Until the process ends: the last write comes after the other tasks.
    tokio::spawn(instance::hold(options.state_directory.clone()));
    let metrics = Arc::new(Metrics::default());
    // A program takes a while to start, and so does finding an API server.
    let (client, identity) =
        tokio::join!(options.access.client(metrics.client.clone()), identity(options.flags()));
    let (client, identity) = (client?, Arc::new(identity));

    let checkpoint = Checkpoint::new(&options.state_directory);
    let kept = checkpoint.load().unwrap_or_else(|error| {
        warn!("starting without the configuration of the last run: {error}");
        None
    });
    let state = watch::Sender::new(SyncState::new(Timestamp::now()));
    let watches = watch::Sender::new(Watches::default());
    let eligibility = watch::Sender::new(NodeEligibility::default());
    let listeners = watch::Sender::new(Listeners::new());
    let pulse = Arc::new(Pulse::default());
    let (inputs, queue) = mpsc::channel(sync::QUEUE);
    let checks = Checks::default();
    let objects = Objects::start(client.clone(), &options.node);

    // Before anything is planned, so that the first plan knows the node's addresses.
    let own = addresses::read().unwrap_or_else(|error| {
        warn!("the node's addresses cannot be read: {error}; trying again while running");
        std::collections::BTreeSet::new()
    });
    let _ = inputs.send(Input::Change(Change::LocalAddresses(own.iter().copied().collect()))).await;

    let outside = Outside {
        state: state.clone(),
        metrics: Arc::clone(&metrics),
        pulse: Arc::clone(&pulse),
        checkpoint: Some(checkpoint),
        checks: checks.clone(),
        objects: objects.clone(),
    };
    let (stop, stopped) = oneshot::channel();
    let engine = Engine::new(
        sync::node::Node::new(&options.sysctl_directory, metrics.userspace.clone()),
        outside,
        kept,
    );
    let mut engine = tokio::spawn(engine.run(queue, stopped));

    let mut tasks = JoinSet::new();
    tasks.spawn(addresses::follow(own, inputs.clone()));
    tasks.spawn(level.follow(state.subscribe()));
    let server = healthcheck::Server::new(checks.clone(), state.subscribe(), Arc::clone(&pulse), objects);
    tasks.spawn(server.run());
    let watching = Watching {
        client: client.clone(),
        node: options.node.clone(),
        config_namespace: options.config_namespace,
        inputs,
        watches: watches.clone(),
        eligibility: eligibility.clone(),
        state: state.subscribe(),
    };
    watching.start(&mut tasks);
    let writer = Writer::new(
        client.clone(),
        &options.node,
        (*identity).clone(),
        state.subscribe(),
        watches.subscribe(),
        listeners.subscribe(),
        Events::start(client, &options.node),
    );
    tasks.spawn(writer.run());
    let view = View {
        state: state.subscribe(),
        watches: watches.subscribe(),
        node: eligibility.subscribe(),
        identity,
        pulse,
        metrics,
        listeners: listeners.subscribe(),
        checks,
    };
    listen(&mut tasks, &view, &listeners);
    tasks.spawn(serve_admin(options.run_directory, view));

    tokio::select! {
        _ = terminate.recv() => info!("SIGTERM: stopping; all rules stay"),
        _ = interrupt.recv() => info!("SIGINT: stopping; all rules stay"),
        ended = &mut engine => {
            return Err(RunError::Ended(ended.err().map_or_else(String::new, |error| error.to_string())));
        }
    }
    // First what feeds and reports, then the loop, which may be in the middle of a write.
    tasks.abort_all();
    let _ = stop.send(());
    if timeout(LAST_WORK, engine).await.is_err() {
        warn!(
            "a write to the kernel was still under way after {} s and is left to itself",
            LAST_WORK.as_secs()
        );
    }
    Ok(())
}

/// The ports that the configuration names, each in a task.
fn listen(tasks: &mut JoinSet<()>, view: &View, report: &watch::Sender<Listeners>) {
    for (name, address, routes) in [
        ("healthz", health_address as fn(&_) -> _, view.health_routes()),
        ("metrics", metrics_address as fn(&_) -> _, view.metrics_routes()),
    ] {
        let listener = Listener {
            name,
            address,
            routes,
            state: view.state.clone(),
            report: report.clone(),
            metrics: Arc::clone(&view.metrics),
        };
        tasks.spawn(listener.run());
    }
}

/// The probes depend on the socket, so it is tried until it is there.
async fn serve_admin(directory: PathBuf, view: View) {
    loop {
        if let Err(problem) = admin::serve(&directory, &view).await {
            error!("{problem}");
        }
        sleep(RETRY).await;
    }
}

async fn identity(flags: BTreeMap<&'static str, String>) -> Identity {
    let kernel_version = std::fs::read_to_string(Path::new("/proc/sys/kernel/osrelease"))
        .ok()
        .map(|text| text.trim().to_owned());
    Identity {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_version,
        nft_version: nft_version().await,
        supported_modes: sync::node::MODES.to_vec(),
        flags,
    }
}

/// `nft --version` says `nftables v1.0.6 (Lester Gooch #5)`.
async fn nft_version() -> Option<String> {
    let output =
        tokio::process::Command::new("nft").arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(TOOL_TIMEOUT, output).await.ok()?.ok()?;
    String::from_utf8_lossy(&output.stdout).split_whitespace().nth(1).map(str::to_owned)
}
