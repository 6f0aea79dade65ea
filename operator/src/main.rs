//! The binary: reads flags, wires the parts together, and ends them in order.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use http::Uri;
use k8s_openapi::jiff::Timestamp;
use pointsman_crds::names::{OPERATOR_LEASE, SYSTEM_NAMESPACE};
use pointsman_operator::client::{connect, parse_endpoint};
use pointsman_operator::context::{Caches, Context, Names};
use pointsman_operator::http::{Health, listen, serve};
use pointsman_operator::lease::{Leadership, Settings, compete};
use pointsman_operator::metrics::Metrics;
use pointsman_operator::{controller, preflight};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

/// How often the CRDs are looked for while they are missing.
const PREFLIGHT_PAUSE: Duration = Duration::from_secs(5);

/// Merges ProxyConfiguration layers into one ConfigMap per node.
#[derive(Debug, Parser)]
#[command(name = "pointsman-operator", version)]
struct Args {
    /// Direct API server endpoints (https://HOST:PORT), comma-separated or repeated; they replace the address that the
    /// pod's environment or the kubeconfig names
    #[arg(long = "apiserver", env = "POINTSMAN_APISERVERS", value_delimiter = ',', value_parser = parse_endpoint)]
    apiservers: Vec<Uri>,
    /// Kubeconfig to use instead of the pod's service account
    #[arg(long, env = "POINTSMAN_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// Where /livez, /readyz and /metrics are served
    #[arg(long, env = "POINTSMAN_METRICS_ADDRESS", default_value = "[::]:8080")]
    metrics_address: SocketAddr,
    /// Namespace of the Lease and of the agents' pods
    #[arg(long, env = "POINTSMAN_NAMESPACE", default_value = SYSTEM_NAMESPACE)]
    lease_namespace: String,
    /// Name of the Lease that the leading replica holds
    #[arg(long, env = "POINTSMAN_LEASE_NAME", default_value = OPERATOR_LEASE)]
    lease_name: String,
    /// Labels of the agents' pods
    #[arg(long, env = "POINTSMAN_AGENT_SELECTOR", default_value = "app.kubernetes.io/component=agent")]
    agent_selector: String,
    /// Name of this replica in the Lease and in Events; the pod's name
    #[arg(long, env = "POD_NAME", default_value = "pointsman-operator")]
    pod_name: String,
    /// How log lines look
    #[arg(long, env = "POINTSMAN_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// Which messages are logged, such as info or pointsman_operator=debug
    // What kube logs of its watches we log ourselves, in fewer words.
    #[arg(long, env = "POINTSMAN_LOG", default_value = "info,kube_runtime=error,kube_client=error")]
    log: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    set_up_log(&args)?;
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;

    // Unlike a pod's name, unique also across the restarts of one pod's container.
    let identity = format!("{}_{:x}", args.pod_name, Timestamp::now().as_nanosecond());
    let client = connect(&args.apiservers, args.kubeconfig.clone()).await?;
    let (grant, leadership) = Leadership::new();
    let context = Context {
        client: client.clone(),
        names: Names {
            namespace: args.lease_namespace.clone(),
            agent_selector: args.agent_selector.clone(),
            identity: identity.clone(),
        },
        leadership,
        metrics: Arc::new(Metrics::default()),
        health: Arc::new(Health::default()),
        caches: Arc::new(Caches::default()),
    };

    let listener = listen(args.metrics_address)
        .await
        .with_context(|| format!("listening on {} (--metrics-address)", args.metrics_address))?;
    let stop_http = CancellationToken::new();
    let http = tokio::spawn(serve(
        listener,
        Arc::clone(&context.health),
        Arc::clone(&context.metrics),
        stop_http.clone().cancelled_owned(),
    ));

    let stop = CancellationToken::new();
    let settings = Settings::new(args.lease_namespace, args.lease_name, identity);
    let work = tokio::spawn(work(context, settings, grant, stop.clone()));
    tokio::select! {
        _ = terminate.recv() => info!("SIGTERM: stopping"),
        _ = interrupt.recv() => info!("SIGINT: stopping"),
    }
    stop.cancel();
    work.await.context("the controller ended badly")?;
    stop_http.cancel();
    http.await.context("the HTTP server ended badly")?;
    Ok(())
}

/// Everything between the CRDs being there and the lease being given back.
async fn work(
    context: Context,
    settings: Settings,
    grant: tokio::sync::watch::Sender<Option<tokio::time::Instant>>,
    stop: CancellationToken,
) {
    tokio::select! {
        () = wait_for_crds(&context) => {}
        () = stop.cancelled() => return,
    }
    let watches = context.caches.start(&context.client, &context.names);
    // The lease is given back after the last write, not before.
    let idle = CancellationToken::new();
    let lease = compete(context.client.clone(), settings, grant, idle.clone().cancelled_owned());
    let control = async {
        controller::run(context, stop.cancelled()).await;
        idle.cancel();
    };
    tokio::join!(lease, control);
    drop(watches);
}

async fn wait_for_crds(context: &Context) {
    let mut told = None;
    while let Err(error) = preflight::check(&context.client).await {
        let trouble = error.to_string();
        context.health.progress();
        context.health.set_waiting_for(Some(trouble.clone()));
        if told.as_ref() != Some(&trouble) {
            error!("{trouble}");
            told = Some(trouble);
        }
        tokio::time::sleep(PREFLIGHT_PAUSE).await;
    }
}

fn set_up_log(args: &Args) -> Result<()> {
    // What kube tells of its watches we tell ourselves, in fewer words; --log can still ask for it.
    let filter = EnvFilter::try_new(format!("kube_runtime=error,kube_client=error,{}", args.log))
        .with_context(|| format!("--log {:?} is not a filter; write for example info", args.log))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}
