//! The agent's HTTP ports: health for load balancers, metrics for Prometheus.
//!
//! In: what the agent knows about itself ([`View`]). Out: answers. Both listeners follow the configuration live; a port that
//! somebody else has is tried again every five seconds and shows in the metrics, the log and the admin socket.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use k8s_openapi::jiff::Timestamp;
use pointsman_crds::NodeProxyConfiguration;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use warp::Filter;

mod pages;
pub mod serve;

use self::serve::{Routes, serve};
use crate::health::{ProxyHealth, Pulse, proxy_health};
use crate::healthcheck::Checks;
use crate::metrics::{Metrics, Probe, Scrape};
use crate::state::{NodeEligibility, SyncState, Watches};
use crate::status::build::{Identity, Inputs, build, condition};

/// A port in use is tried again after this.
const RETRY: Duration = Duration::from_secs(5);
const JSON: &str = "application/json";
const METRICS: &str = prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
const TEXT: &str = "text/plain; charset=utf-8";

/// Everything that answers are made of.
#[derive(Clone)]
pub struct View {
    /// The sync loop's snapshot.
    pub state: watch::Receiver<SyncState>,
    /// The watches.
    pub watches: watch::Receiver<Watches>,
    /// What the Node object says about load balancers.
    pub node: watch::Receiver<NodeEligibility>,
    /// The node and the agent.
    pub identity: Arc<Identity>,
    /// The sync loop's pulse.
    pub pulse: Arc<Pulse>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// What hinders each listener.
    pub listeners: watch::Receiver<Listeners>,
    /// The health checks of load balancers.
    pub checks: Checks,
}

/// What hinders each listener; nothing if it listens.
pub type Listeners = BTreeMap<&'static str, Option<String>>;

impl View {
    /// Whether the kernel holds the assigned configuration, and why not.
    #[must_use]
    pub fn ready(&self) -> (bool, String) {
        let state = self.state.borrow().clone();
        let watches = self.watches.borrow().clone();
        let status = build(Inputs {
            state: &state,
            watches: &watches,
            identity: &self.identity,
            previous: &[],
            observed_generation: None,
            now: Timestamp::now(),
            instant: Instant::now(),
        });
        condition(&status, "Ready").map_or((false, String::new()), |ready| {
            let is = ready.status == pointsman_crds::ConditionStatus::True;
            (is, format!("{}: {}", ready.reason, ready.message))
        })
    }

    /// Whether the data plane keeps up with the cluster.
    #[must_use]
    pub fn health(&self, node: Option<NodeEligibility>) -> ProxyHealth {
        proxy_health(&self.state.borrow(), self.pulse.alive(), node, Timestamp::now(), Instant::now())
    }

    /// `/healthz`.
    #[must_use]
    pub fn healthz(&self) -> Response<String> {
        let node = *self.node.borrow();
        let health = self.health(Some(node));
        let code = if health.healthy && node.eligible() { 200 } else { 503 };
        self.metrics.answered_healthz(code);
        json(code, &health)
    }

    /// `/livez`.
    #[must_use]
    pub fn livez(&self) -> Response<String> {
        let health = self.health(None);
        let code = if health.healthy { 200 } else { 503 };
        self.metrics.answered_livez(code);
        json(code, &health)
    }

    /// `/readyz`.
    #[must_use]
    pub fn readyz(&self) -> Response<String> {
        let (ready, why) = self.ready();
        let code = if ready { 200 } else { 503 };
        self.metrics.answered_readyz(code);
        reply(code, TEXT, format!("{why}\n"))
    }

    /// `/live` on the admin socket: whether the sync loop turns, however well it does.
    #[must_use]
    pub fn live(&self) -> Response<String> {
        if self.pulse.alive() {
            reply(200, TEXT, "alive\n".to_owned())
        } else {
            reply(503, TEXT, "the sync loop hangs\n".to_owned())
        }
    }

    /// `/metrics`.
    #[must_use]
    pub fn metrics(&self) -> Response<String> {
        let (ready, _) = self.ready();
        let state = self.state.borrow().clone();
        let watches = self.watches.borrow().clone();
        let text = self.metrics.render(Scrape {
            state: &state,
            watches: &watches,
            checks: &self.checks,
            ready,
            instant: Instant::now(),
        });
        reply(200, METRICS, text)
    }

    /// `/metrics/slis`: the probes as a service level.
    #[must_use]
    pub fn slis(&self) -> Response<String> {
        let (healthy, eligible) = (self.health(None).healthy, self.node.borrow().eligible());
        let now =
            [(Probe::Healthz, healthy && eligible), (Probe::Livez, healthy), (Probe::Readyz, self.ready().0)];
        reply(200, METRICS, self.metrics.render_slis(now))
    }

    /// `/statusz`.
    #[must_use]
    pub fn statusz(&self) -> Response<String> {
        let started = self.state.borrow().started;
        reply(200, TEXT, pages::statusz(&self.identity, started, Timestamp::now()))
    }

    /// `/flagz`.
    #[must_use]
    pub fn flagz(&self) -> Response<String> {
        reply(200, TEXT, pages::flagz(&self.identity))
    }

    /// `/proxyMode`, as kube-proxy answers it.
    #[must_use]
    pub fn proxy_mode(&self) -> Response<String> {
        let mode = self.state.borrow().mode;
        mode.map_or_else(
            || reply(503, TEXT, "no mode is in force yet\n".to_owned()),
            |mode| reply(200, TEXT, mode.to_string()),
        )
    }

    /// `/configz`: the configuration in force.
    #[must_use]
    pub fn configz(&self) -> Response<String> {
        match self.state.borrow().config.in_force.as_deref() {
            Some(config) => json(200, &BTreeMap::from([("agent.pointsman.dev", config)])),
            None => reply(503, TEXT, "no configuration is in force yet\n".to_owned()),
        }
    }

    /// The routes of the health port.
    #[must_use]
    pub fn health_routes(&self) -> Routes {
        let (healthz, livez, readyz) = (self.clone(), self.clone(), self.clone());
        let routes = warp::path!("healthz")
            .map(move || healthz.healthz())
            .or(warp::path!("livez").map(move || livez.livez()))
            .unify()
            .or(warp::path!("readyz").map(move || readyz.readyz()))
            .unify();
        warp::get().and(routes).boxed()
    }

    /// The routes of the metrics port.
    #[must_use]
    pub fn metrics_routes(&self) -> Routes {
        let view = self.clone();
        warp::get()
            .and(warp::path::full())
            .map(move |path: warp::path::FullPath| match path.as_str() {
                "/metrics" => view.metrics(),
                "/metrics/slis" => view.slis(),
                "/proxyMode" => view.proxy_mode(),
                "/configz" => view.configz(),
                "/statusz" => view.statusz(),
                "/flagz" => view.flagz(),
                "/healthz" => reply(200, TEXT, "ok".to_owned()),
                other => {
                    reply(404, TEXT, format!("there is no {other}; there is {}\n", pages::PATHS.join(", ")))
                }
            })
            .boxed()
    }
}

/// An answer.
#[must_use]
pub fn reply(code: u16, content_type: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() =
        http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(content_type));
    headers.insert(http::header::X_CONTENT_TYPE_OPTIONS, http::HeaderValue::from_static("nosniff"));
    response
}

/// An answer in JSON.
#[must_use]
pub fn json(code: u16, body: &impl Serialize) -> Response<String> {
    match serde_json::to_string(body) {
        Ok(text) => reply(code, JSON, text),
        Err(error) => reply(500, TEXT, error.to_string()),
    }
}

/// Where the health port is to listen: on every address of the node.
#[must_use]
pub fn health_address(config: &NodeProxyConfiguration) -> Option<SocketAddr> {
    (config.healthz_port != 0).then(|| (Ipv6Addr::UNSPECIFIED, config.healthz_port).into())
}

/// Where the metrics port is to listen.
#[must_use]
pub fn metrics_address(config: &NodeProxyConfiguration) -> Option<SocketAddr> {
    (config.metrics_port != 0).then(|| (config.metrics_bind_address, config.metrics_port).into())
}

/// A port that follows the configuration.
pub struct Listener {
    /// Its name in metrics and messages.
    pub name: &'static str,
    /// Where the configuration puts it.
    pub address: fn(&NodeProxyConfiguration) -> Option<SocketAddr>,
    /// What it answers.
    pub routes: Routes,
    /// The configuration.
    pub state: watch::Receiver<SyncState>,
    /// Where to report.
    pub report: watch::Sender<Listeners>,
    /// Where to count.
    pub metrics: Arc<Metrics>,
}

impl Listener {
    /// Serves until the sync loop is gone.
    pub async fn run(mut self) {
        loop {
            let wanted = self.wanted();
            let Some(address) = wanted else {
                self.tell(None);
                if !moved(&mut self.state, self.address, None).await {
                    return;
                }
                continue;
            };
            match bind(address).await {
                Ok(socket) => {
                    info!(listener = self.name, %address, "listening");
                    self.metrics.listening(self.name, true);
                    self.tell(None);
                    if !self.serve(socket, wanted).await {
                        return;
                    }
                }
                Err(error) => {
                    self.metrics.listening(self.name, false);
                    self.tell(Some(format!(
                        "{address} cannot be listened on ({error}); stop what uses the port, or set another one"
                    )));
                    tokio::select! {
                        () = sleep(RETRY) => {}
                        alive = moved(&mut self.state, self.address, wanted) => if !alive { return },
                    }
                }
            }
        }
    }

    fn wanted(&mut self) -> Option<SocketAddr> {
        self.state.borrow_and_update().config.in_force.as_deref().and_then(self.address)
    }

    /// Serves until the address changes. Returns whether there is still somebody to change it.
    async fn serve(&mut self, socket: TcpListener, wanted: Option<SocketAddr>) -> bool {
        serve(socket, self.routes.clone(), async {
            moved(&mut self.state, self.address, wanted).await;
        })
        .await;
        self.state.has_changed().is_ok()
    }

    fn tell(&self, problem: Option<String>) {
        self.report.send_if_modified(|all| {
            if all.get(self.name) == Some(&problem) {
                return false;
            }
            if let Some(problem) = &problem {
                warn!(listener = self.name, "{problem}");
            }
            all.insert(self.name, problem);
            true
        });
    }
}

/// Waits until the configuration puts the listener elsewhere. False if there is nobody left who could.
async fn moved(
    state: &mut watch::Receiver<SyncState>,
    address: fn(&NodeProxyConfiguration) -> Option<SocketAddr>,
    from: Option<SocketAddr>,
) -> bool {
    state.wait_for(|state| state.config.in_force.as_deref().and_then(address) != from).await.is_ok()
}

/// Listens; on IPv4 only where the node has no IPv6.
async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error)
            if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
                && error.kind() != std::io::ErrorKind::AddrInUse =>
        {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
