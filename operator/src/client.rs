//! The client of the API server.
//!
//! In: direct endpoints, if any, and who we are (the pod's service account, or a kubeconfig). Out: a [`kube::Client`].
//! The operator may run where the service IP does not work, because it is what makes the service IP work: direct
//! endpoints take its place. With several, one is used until it fails to answer, then the next; the request that failed
//! is not repeated here, because every caller tries again and lands on the next one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::uri::InvalidUri;
use http::{Request, Response, Uri};
use kube::client::Body;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;
use tower::{BoxError, Service};
use tracing::info;

/// A server that does not even accept a connection for this long is dead; well within the lease's renew deadline.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A watch hears at least a bookmark a minute; one that is silent for longer has lost its server.
const READ_TIMEOUT: Duration = Duration::from_secs(90);

/// Why there is no client.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Not a usable endpoint.
    #[error("API server endpoint {given:?} is not usable ({why}); write https://HOST:PORT")]
    Endpoint {
        /// As it was given.
        given: String,
        /// What is wrong.
        why: String,
    },
    /// Not in a pod, and no kubeconfig.
    #[error("not in a pod ({0}); set --kubeconfig to run the operator outside of the cluster")]
    Nowhere(#[from] InClusterError),
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
        endpoint: Uri,
        /// What is wrong.
        error: Box<kube::Error>,
    },
}

/// Reads one endpoint.
pub fn parse_endpoint(given: &str) -> Result<Uri, ClientError> {
    let refuse = |why: String| ClientError::Endpoint { given: given.to_owned(), why };
    let uri: Uri = given.trim().parse().map_err(|error: InvalidUri| refuse(error.to_string()))?;
    match uri.scheme_str() {
        Some("https" | "http") if uri.path().len() <= 1 && uri.query().is_none() => Ok(uri),
        Some("https" | "http") => Err(refuse("it has a path".to_owned())),
        _ => Err(refuse("its scheme is not https".to_owned())),
    }
}

/// Makes the client; does not talk to any server yet.
pub async fn connect(endpoints: &[Uri], kubeconfig: Option<PathBuf>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let refuse = |error| ClientError::Kubeconfig { path: path.clone(), error: Box::new(error) };
            let file = Kubeconfig::read_from(&path).map_err(refuse)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(refuse)?
        }
        None => Config::incluster()?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    let endpoints = if endpoints.is_empty() { vec![config.cluster_url.clone()] } else { endpoints.to_vec() };
    let targets = endpoints
        .into_iter()
        .map(|endpoint| {
            let mut config = config.clone();
            config.cluster_url = endpoint.clone();
            match Client::try_from(config) {
                Ok(client) => Ok(Target { endpoint, client }),
                Err(error) => Err(ClientError::Build { endpoint, error: Box::new(error) }),
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Failover::client(targets))
}

struct Target {
    endpoint: Uri,
    client: Client,
}

/// Sends every request to the current target, and moves on when that one does not answer.
#[derive(Clone)]
struct Failover {
    targets: Arc<[Target]>,
    current: Arc<AtomicUsize>,
}

impl Failover {
    fn client(targets: Vec<Target>) -> Client {
        Client::new(Self { targets: targets.into(), current: Arc::default() }, "default")
    }

    /// Leaves `failed`, unless another request has done so already.
    fn leave(&self, failed: usize) {
        let next = (failed + 1) % self.targets.len();
        let left = self.current.compare_exchange(failed, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if left && next != failed {
            info!(from = %self.targets[failed].endpoint, to = %self.targets[next].endpoint, "switching API servers");
        }
    }
}

/// Leaves the target when dropped without an answer, which is also what happens when the caller's patience ends.
struct Unanswered {
    failover: Failover,
    target: usize,
    answered: bool,
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if !self.answered {
            self.failover.leave(self.target);
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
        let failover = self.clone();
        Box::pin(async move {
            let target = failover.current.load(Ordering::Relaxed);
            let mut request_to = Unanswered { failover, target, answered: false };
            let response = request_to.failover.targets[target].client.send(request).await?;
            request_to.answered = true;
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    use tower_test::mock::{self, Handle};

    use super::*;

    fn target(name: &'static str) -> (Target, Handle<Request<Body>, Response<Body>>) {
        let (service, handle) = mock::pair();
        (Target { endpoint: Uri::from_static(name), client: Client::new(service, "default") }, handle)
    }

    async fn ask(client: &Client) -> Result<String, kube::Error> {
        client.request_text(Request::get("/version").body(Vec::new()).unwrap()).await
    }

    #[tokio::test]
    async fn the_next_endpoint_is_used_after_an_error_and_kept() {
        let ((a, mut at_a), (b, mut at_b)) = (target("https://a"), target("https://b"));
        let client = Failover::client(vec![a, b]);
        let refuse = async {
            let (_, send) = at_a.next_request().await.unwrap();
            send.send_error(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        };
        let (answered, ()) = tokio::join!(ask(&client), refuse);
        assert!(answered.is_err());
        for _ in 0..2 {
            let answer = async {
                let (_, send) = at_b.next_request().await.unwrap();
                send.send_response(Response::new(Body::from(b"{}".to_vec())));
            };
            let (answered, ()) = tokio::join!(ask(&client), answer);
            assert!(answered.is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_does_not_answer_is_left_when_patience_ends() {
        let ((a, mut at_a), (b, mut at_b)) = (target("https://a"), target("https://b"));
        let client = Failover::client(vec![a, b]);
        let hang = async { at_a.next_request().await };
        let patient = tokio::time::timeout(Duration::from_secs(5), ask(&client));
        let (timed_out, _held) = tokio::join!(patient, hang);
        assert!(timed_out.is_err());
        let answer = async {
            let (_, send) = at_b.next_request().await.unwrap();
            send.send_response(Response::new(Body::from(b"{}".to_vec())));
        };
        let (answered, ()) = tokio::join!(ask(&client), answer);
        assert!(answered.is_ok());
    }

    #[test]
    fn an_endpoint_is_a_url_without_a_path() {
        assert!(parse_endpoint("https://10.0.0.1:6443").is_ok());
        assert!(parse_endpoint(" https://[fd00::1]:6443/").is_ok());
        for bad in ["10.0.0.1:6443", "ftp://a:1", "https://a:1/path", "https://"] {
            let error = parse_endpoint(bad).unwrap_err().to_string();
            assert!(error.contains("write https://HOST:PORT"), "{bad}: {error}");
        }
    }
}
