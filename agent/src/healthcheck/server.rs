//! Opens and closes the ports of health checks.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use warp::Filter;

use super::{Checks, Port, steps};
use crate::events::objects::{ObjectNews, Objects, Scope};
use crate::health::{Pulse, proxy_health};
use crate::http::serve::{Routes, serve};
use crate::model::ObjectName;
use crate::state::SyncState;

/// A port in use is tried again after this.
const RETRY: Duration = Duration::from_secs(5);
const BACKLOG: u32 = 128;

/// The ports.
pub struct Server {
    checks: Checks,
    state: watch::Receiver<SyncState>,
    pulse: Arc<Pulse>,
    objects: Objects,
    open: BTreeMap<Port, Open>,
}

/// A port that answers until this is dropped.
struct Open(JoinHandle<()>);

impl Open {
    /// Closes the port now, so that another socket may take it.
    async fn close(mut self) {
        self.0.abort();
        let _ = (&mut self.0).await;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Server {
    /// No port is open yet. `state` and `pulse` say whether the node keeps up, `objects` tells of ports that are taken.
    #[must_use]
    pub fn new(
        checks: Checks,
        state: watch::Receiver<SyncState>,
        pulse: Arc<Pulse>,
        objects: Objects,
    ) -> Self {
        Self { checks, state, pulse, objects, open: BTreeMap::new() }
    }

    /// Follows the checks until the future is dropped.
    pub async fn run(mut self) {
        let checks = self.checks.clone();
        loop {
            let failing = !self.checks.table().problems.is_empty();
            tokio::select! {
                () = checks.0.changed.notified() => {}
                () = sleep(RETRY), if failing => {}
            }
            self.follow().await;
        }
    }

    /// Everything is closed before anything is opened: a port may move from one address, or one Service, to another.
    async fn follow(&mut self) {
        let mut names = std::mem::take(&mut self.checks.table().dirty);
        let mut to_open = Vec::new();
        names.extend(self.checks.table().problems.keys().map(|port| port.service.clone()));
        for service in names {
            let wanted = self.checks.table().checks.get(&service).cloned();
            let (close, open) = steps(&self.addresses(&service), wanted.as_ref());
            for address in close {
                let port = Port { service: service.clone(), address };
                if let Some(socket) = self.open.remove(&port) {
                    socket.close().await;
                    info!(%service, %address, "the load balancer's health check is closed");
                }
            }
            let wanted = wanted.unwrap_or_default();
            self.checks
                .table()
                .problems
                .retain(|port, _| port.service != service || wanted.listen.contains(&port.address));
            to_open.extend(open.into_iter().map(|address| Port { service: service.clone(), address }));
        }
        for port in to_open {
            self.start(port);
        }
        self.checks.table().open = self.open.len();
    }

    fn addresses(&self, service: &ObjectName) -> BTreeSet<SocketAddr> {
        let first = Port { service: service.clone(), address: SocketAddr::from(([0, 0, 0, 0], 0)) };
        let own = self.open.range(first..).take_while(|(port, _)| port.service == *service);
        own.map(|(port, _)| port.address).collect()
    }

    fn start(&mut self, port: Port) {
        match listen(port.address) {
            Ok(socket) => {
                info!(service = %port.service, address = %port.address, "the load balancer's health check is answered");
                self.checks.table().problems.remove(&port);
                let task = tokio::spawn(serve(socket, self.routes(&port), std::future::pending()));
                self.open.insert(port, Open(task));
            }
            Err(error) => self.failed(port, &error),
        }
    }

    fn failed(&self, port: Port, error: &std::io::Error) {
        let why =
            format!("{error}; stop what uses the port, or give the Service another healthCheckNodePort");
        let known = self.checks.table().problems.insert(port.clone(), why.clone());
        if known.as_ref() == Some(&why) {
            return;
        }
        let Port { service, address } = port;
        warn!(%service, %address, "the load balancer's health check cannot be answered: {why}");
        self.objects.tell(ObjectNews {
            kind: "Service",
            name: service,
            reason: "FailedToStartServiceHealthcheck",
            note: format!("the health check of load balancers cannot be answered at {address}: {why}"),
            scope: Scope::Node,
        });
    }

    /// Any path, as kube-proxy.
    fn routes(&self, port: &Port) -> Routes {
        let (checks, port) = (self.checks.clone(), port.clone());
        let (state, pulse) = (self.state.clone(), Arc::clone(&self.pulse));
        warp::any()
            .map(move || {
                let health =
                    proxy_health(&state.borrow(), pulse.alive(), None, Timestamp::now(), Instant::now());
                checks.answer(&port, health.healthy)
            })
            .boxed()
    }
}

/// Listens at an address, whether an interface has it already or not: load balancers' addresses, and IPv6 addresses that are still
/// being checked, come later. All addresses of IPv6 are not all addresses of IPv4 too: each family has its own endpoints.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    setsockopt(&socket, sockopt::IpFreebind, &true)?;
    if address.is_ipv6() {
        setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    }
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
