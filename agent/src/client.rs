//! The client of the API server, over addresses that do not depend on what this agent programs.
//!
//! In: direct endpoints (`https://host:port`), and who we are (the pod's service account, or a kubeconfig outside pods).
//! Out: a [`kube::Client`]. With several endpoints it uses one until that fails to answer, then the next; the request
//! that failed is not repeated here, because every caller retries with its own backoff and lands on the next endpoint.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;
use tokio::time::{Instant, timeout};
use tower::retry::RetryLayer;
use tower::{BoxError, Service, ServiceBuilder};
use tracing::{debug, info, warn};

use crate::metrics::ClientMetrics;

/// Where a pod finds its token and the cluster's certificate authority.
pub const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// A server that does not even accept a connection for this long is dead.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A server that is gone without a word is noticed by the kernel after about 20 + 3 × 10 s. Nothing but empty packets is
/// sent for that, while a watch in a quiet cluster is silent for minutes and must not be given up on for it.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(20), Duration::from_secs(10), 3);
/// Data that is not acknowledged for this long counts as lost with its connection.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
/// A server that has not begun to answer after this hangs. Lists of large clusters take their time.
const READ_ANSWER: Duration = Duration::from_mins(1);
const WRITE_ANSWER: Duration = Duration::from_secs(10);

/// Why there is no client.
#[derive(Debug, Error)]
pub enum ClientError {
    /// An endpoint is not a URL that can be used.
    #[error("API server endpoint {given:?} is not usable ({why}); write https://HOST:PORT")]
    Endpoint {
        /// As it was given.
        given: String,
        /// What is wrong with it.
        why: String,
    },
    /// Neither endpoints nor a kubeconfig nor a pod.
    #[error(
        "no API server is known: set --apiserver (POINTSMAN_APISERVERS) to the direct addresses of the API servers, or --kubeconfig outside a pod ({0})"
    )]
    Nowhere(kube::config::InClusterError),
    /// The service account's files are missing.
    #[error(
        "the service account's token is missing at {0:?}; mount a projected service account token there, or use --kubeconfig outside a pod"
    )]
    NoToken(PathBuf),
    /// The kubeconfig cannot be used.
    #[error("the kubeconfig {path:?} cannot be used: {error}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<KubeconfigError>,
    },
    /// TLS set-up failed.
    #[error(
        "the client for {endpoint} cannot be set up: {error}; check the certificate authority next to the token"
    )]
    Build {
        /// The endpoint.
        endpoint: String,
        /// What is wrong.
        error: Box<kube::Error>,
    },
}

/// How to reach the API server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Direct endpoints, tried in order.
    pub endpoints: Vec<Uri>,
    /// Identity from here instead of the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Directory with `token` and `ca.crt`; [`SERVICE_ACCOUNT_DIR`] in pods.
    pub service_account: PathBuf,
}

/// Reads a comma-separated list of endpoints.
pub fn parse_endpoints(list: &str) -> Result<Vec<Uri>, ClientError> {
    list.split(',').map(str::trim).filter(|part| !part.is_empty()).map(parse_endpoint).collect()
}

fn parse_endpoint(given: &str) -> Result<Uri, ClientError> {
    let refuse = |why: &str| ClientError::Endpoint { given: given.to_owned(), why: why.to_owned() };
    let uri: Uri = given.parse().map_err(|error: http::uri::InvalidUri| refuse(&error.to_string()))?;
    match uri.scheme_str() {
        Some("https" | "http") => {}
        Some(_) => return Err(refuse("the scheme is not https")),
        None => return Err(refuse("it has no scheme")),
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(refuse("it has no host"));
    }
    if uri.path().len() > 1 || uri.query().is_some() {
        return Err(refuse("it has a path"));
    }
    Ok(uri)
}

impl Access {
    /// Makes the client, which counts its requests in `metrics`. Does not talk to any server yet.
    pub async fn client(&self, metrics: ClientMetrics) -> Result<Client, ClientError> {
        let base = self.config().await?;
        let endpoints =
            if self.endpoints.is_empty() { vec![base.cluster_url.clone()] } else { self.endpoints.clone() };
        let mut targets = Vec::new();
        for endpoint in endpoints {
            let mut config = base.clone();
            config.cluster_url = endpoint.clone();
            let client = connect(&config).map_err(|error| ClientError::Build {
                endpoint: endpoint.to_string(),
                error: Box::new(error),
            })?;
            targets.push(Target { endpoint: endpoint.to_string(), client });
        }
        Ok(Failover::new(targets, metrics).into_client())
    }

    async fn config(&self) -> Result<Config, ClientError> {
        if let Some(path) = &self.kubeconfig {
            let refuse = |error| ClientError::Kubeconfig { path: path.clone(), error: Box::new(error) };
            let file = Kubeconfig::read_from(path).map_err(refuse)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(refuse)
        } else if let Some(first) = self.endpoints.first() {
            in_pod(&self.service_account, first.clone())
        } else {
            warn!(
                "no direct API server endpoint is set: using the service IP of the environment, which this agent itself \
                 programs and which does not work on a node without rules; set --apiserver (POINTSMAN_APISERVERS)"
            );
            Config::incluster_env().map_err(ClientError::Nowhere)
        }
    }
}

/// The service account's identity, at an address of our choice. kube reads both files again when they change.
fn in_pod(directory: &Path, endpoint: Uri) -> Result<Config, ClientError> {
    let token = directory.join("token");
    if !token.exists() {
        return Err(ClientError::NoToken(token));
    }
    let mut config = Config::new(endpoint);
    config.auth_info.token_file = Some(token.to_string_lossy().into_owned());
    let authority = directory.join("ca.crt");
    if authority.exists() {
        config.root_cert_file = Some(authority);
        // Without it kube also loads the system's authorities, of which the agent's image has none, and fails.
        config.root_cert = Some(Vec::new());
    }
    Ok(config)
}

/// kube's own stack of layers, on connections that notice a dead peer.
fn connect(config: &Config) -> Result<Client, kube::Error> {
    let (idle, interval, retries) = KEEPALIVE;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(idle));
    tcp.set_keepalive_interval(Some(interval));
    tcp.set_keepalive_retries(Some(retries));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    // Obeys Retry-After when the server is overloaded. Callers have patience of their own, so a few attempts are enough here.
    let retry = RetryPolicy::new(Duration::from_millis(100), Duration::from_secs(2), 3, true);
    let retry = retry.ok().map(RetryLayer::new);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(retry)
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(tls));
    Ok(Client::new(service, "default"))
}

/// `client`, with `answered` called whenever the server accepts a request. A watch that resumes says nothing until something
/// happens; this says that it was let in.
pub fn observed(client: Client, answered: impl Fn() + Clone + Send + Sync + 'static) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, answered) = (client.clone(), answered.clone());
        async move {
            let response = client.send(request).await;
            if response.as_ref().is_ok_and(|response| response.status().is_success()) {
                answered();
            }
            response.map_err(BoxError::from)
        }
    });
    Client::new(service, "default")
}

/// One API server.
#[derive(Clone)]
struct Target {
    endpoint: String,
    client: Client,
}

/// Sends every request to the current target, and moves on when that one does not answer.
#[derive(Clone)]
struct Failover {
    targets: Arc<[Target]>,
    current: Arc<AtomicUsize>,
    /// The one that answered last.
    answered: Arc<AtomicUsize>,
    metrics: ClientMetrics,
}

impl Failover {
    fn new(targets: Vec<Target>, metrics: ClientMetrics) -> Self {
        let answered = Arc::new(AtomicUsize::new(usize::MAX));
        Self { targets: targets.into(), current: Arc::default(), answered, metrics }
    }

    fn into_client(self) -> Client {
        Client::new(self, "default")
    }

    /// Leaves `failed`, unless another request has done so already.
    fn leave(&self, failed: usize, why: &str) {
        if self.targets.len() < 2 {
            return;
        }
        let next = (failed + 1) % self.targets.len();
        if self.current.compare_exchange(failed, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let (from, to) = (&self.targets[failed].endpoint, &self.targets[next].endpoint);
            debug!(from, to, why, "trying another API server");
        }
    }
}

impl Service<Request<Body>> for Failover {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Readiness belongs to the target's own client, which waits for it when sending.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let index = this.current.load(Ordering::Relaxed);
            let patience = if request.method().is_safe() { READ_ANSWER } else { WRITE_ANSWER };
            let (method, begun) = (request.method().clone(), Instant::now());
            let answer = timeout(patience, this.targets[index].client.send(request)).await;
            let code =
                answer.as_ref().ok().and_then(|sent| sent.as_ref().ok()).map(|it| it.status().as_u16());
            let endpoint = &this.targets[index].endpoint;
            let host = endpoint.split_once("://").map_or(endpoint.as_str(), |(_, rest)| rest);
            this.metrics.answered(host.trim_end_matches('/'), &method, code, begun.elapsed());
            match answer {
                Ok(Ok(response)) => {
                    if this.answered.swap(index, Ordering::Relaxed) != index {
                        info!(endpoint = this.targets[index].endpoint, "using this API server");
                    }
                    // A server that is shutting down still answers, and says so.
                    if response.status() == StatusCode::SERVICE_UNAVAILABLE {
                        this.leave(index, "503 Service Unavailable");
                    }
                    Ok(response)
                }
                Ok(Err(error)) => {
                    this.leave(index, &error.to_string());
                    Err(error.into())
                }
                Err(elapsed) => {
                    this.leave(index, "no answer");
                    Err(elapsed.into())
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_test::mock;

    type Handle = mock::Handle<Request<Body>, Response<Body>>;

    fn target(name: &str) -> (Target, Handle) {
        let (service, handle) = mock::pair::<Request<Body>, Response<Body>>();
        (Target { endpoint: name.to_owned(), client: Client::new(service, "default") }, handle)
    }

    async fn answer(handle: &mut Handle, status: u16) {
        let (_, send) = handle.next_request().await.unwrap();
        let body = Body::from(br#"{"major":"1","minor":"37"}"#.to_vec());
        send.send_response(Response::builder().status(status).body(body).unwrap());
    }

    async fn refuse(handle: &mut Handle) {
        let (_, send) = handle.next_request().await.unwrap();
        send.send_error(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
    }

    async fn ask(client: &Client) -> Result<String, kube::Error> {
        client.request_text(Request::get("/version").body(Vec::new()).unwrap()).await
    }

    #[test]
    fn a_pod_trusts_the_authority_next_to_its_token_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("token"), "t").unwrap();
        std::fs::write(directory.path().join("ca.crt"), "").unwrap();
        let config = in_pod(directory.path(), "https://192.0.2.1:6443".parse().unwrap()).unwrap();
        assert_eq!(config.root_cert_file, Some(directory.path().join("ca.crt")));
        assert_eq!(config.root_cert, Some(Vec::new()), "the system's authorities would be loaded too");
    }

    #[tokio::test]
    async fn the_next_endpoint_is_used_after_a_connection_error_and_kept() {
        let ((a, mut at_a), (b, mut at_b)) = (target("a"), target("b"));
        let client = Failover::new(vec![a, b], ClientMetrics::default()).into_client();
        let (answered, ()) = tokio::join!(ask(&client), refuse(&mut at_a));
        assert!(answered.is_err());
        for _ in 0..2 {
            let (answered, ()) = tokio::join!(ask(&client), answer(&mut at_b, 200));
            assert!(answered.is_ok());
        }
        let (answered, ()) = tokio::join!(ask(&client), refuse(&mut at_b));
        assert!(answered.is_err());
        let (answered, ()) = tokio::join!(ask(&client), answer(&mut at_a, 200));
        assert!(answered.is_ok(), "after the last endpoint comes the first");
    }

    #[tokio::test]
    async fn a_server_that_is_shutting_down_is_left() {
        let ((a, mut at_a), (b, mut at_b)) = (target("a"), target("b"));
        let client = Failover::new(vec![a, b], ClientMetrics::default()).into_client();
        let (answered, ()) = tokio::join!(ask(&client), answer(&mut at_a, 503));
        assert!(answered.is_err());
        let (answered, ()) = tokio::join!(ask(&client), answer(&mut at_b, 200));
        assert!(answered.is_ok());
    }

    #[tokio::test]
    async fn an_answer_that_refuses_is_no_reason_to_switch() {
        let ((a, mut at_a), (b, _at_b)) = (target("a"), target("b"));
        let client = Failover::new(vec![a, b], ClientMetrics::default()).into_client();
        for _ in 0..2 {
            let (answered, ()) = tokio::join!(ask(&client), answer(&mut at_a, 403));
            assert!(answered.is_err());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_answer_is_left() {
        let ((a, mut at_a), (b, mut at_b)) = (target("a"), target("b"));
        let client = Failover::new(vec![a, b], ClientMetrics::default()).into_client();
        let (answered, hanging) = tokio::join!(ask(&client), at_a.next_request());
        assert!(answered.is_err());
        drop(hanging);
        let (answered, ()) = tokio::join!(ask(&client), answer(&mut at_b, 200));
        assert!(answered.is_ok());
    }

    #[tokio::test]
    async fn an_observer_hears_of_accepted_requests_only() {
        let (a, mut at_a) = target("a");
        let heard = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&heard);
        let client = observed(a.client, move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        for (code, expected) in [(403, 0), (200, 1), (500, 1)] {
            let _ = tokio::join!(ask(&client), answer(&mut at_a, code));
            assert_eq!(heard.load(Ordering::Relaxed), expected, "{code}");
        }
    }

    #[test]
    fn endpoints_are_read_from_a_list() {
        let endpoints = parse_endpoints("https://10.0.0.1:6443, https://[fd00::1]:6443,").unwrap();
        assert_eq!(endpoints.len(), 2);
        assert_eq!(endpoints[1].host(), Some("[fd00::1]"));
        for (bad, why) in [
            ("10.0.0.1:6443", "scheme"),
            ("ftp://a:1", "scheme"),
            ("https://a:1/path", "path"),
            ("https://", "https://HOST:PORT"),
        ] {
            let error = parse_endpoints(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[tokio::test]
    async fn without_anything_the_error_says_what_to_set() {
        let access = Access { service_account: "/nonexistent".into(), ..Access::default() };
        let error = access.client(ClientMetrics::default()).await.err().unwrap().to_string();
        assert!(error.contains("POINTSMAN_APISERVERS"), "{error}");
        let access = Access { endpoints: parse_endpoints("https://10.0.0.1:6443").unwrap(), ..access };
        let error = access.client(ClientMetrics::default()).await.err().unwrap().to_string();
        assert!(error.contains("/nonexistent/token"), "{error}");
    }
}
