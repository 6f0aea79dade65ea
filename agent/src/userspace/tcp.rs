//! TCP: accepts connections, finds out where the client wanted to go, and reaches an endpoint for it.
//!
//! In: connections that rules have led here, or that came to a port of localhost. Out: the same connections, at endpoints.
//!
//! An endpoint that refuses, does not answer within [`CONNECT`], or ends the connection before a byte was said is replaced by the next
//! one, and the client does not notice. If no endpoint can be reached, or a connection breaks, the client gets a reset.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use nix::sys::socket::{Shutdown, getsockopt, setsockopt, shutdown, sockopt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use super::counters::Failure;
use super::port::{Choice, ServicePort, Visitor};
use super::relay::{Ended, relay};
use super::shared::Shared;
use super::workers::Worker;
use crate::plan::Entrance;

/// An endpoint has so long to answer. A lost SYN is sent again after one second.
const CONNECT: Duration = Duration::from_secs(2);
/// So many endpoints are tried for one client.
const ATTEMPTS: usize = 5;
/// Clients that wait to be accepted. The kernel's `somaxconn` may be less.
const BACKLOG: u32 = 4096;
/// When no connection can be accepted, for want of file descriptors, trying at once would only burn the processor.
const PAUSE: Duration = Duration::from_millis(100);

/// The frontends of a family, by what clients send to.
#[derive(Debug, Default)]
pub struct Frontends(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    addresses: HashMap<SocketAddr, (Entrance, Arc<ServicePort>)>,
    node_ports: HashMap<u16, Arc<ServicePort>>,
}

impl Frontends {
    /// Leads addresses and a NodePort to a Service port.
    pub fn add(
        &self,
        port: &Arc<ServicePort>,
        addresses: impl IntoIterator<Item = (SocketAddr, Entrance)>,
        node_port: Option<u16>,
    ) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for (address, entrance) in addresses {
            table.addresses.insert(address, (entrance, Arc::clone(port)));
        }
        if let Some(number) = node_port {
            table.node_ports.insert(number, Arc::clone(port));
        }
    }

    /// Removes what leads to a Service port.
    pub fn remove(
        &self,
        port: &Arc<ServicePort>,
        addresses: impl IntoIterator<Item = SocketAddr>,
        node_port: Option<u16>,
    ) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for address in addresses {
            if table.addresses.get(&address).is_some_and(|(_, own)| Arc::ptr_eq(own, port)) {
                table.addresses.remove(&address);
            }
        }
        if let Some(number) = node_port
            && table.node_ports.get(&number).is_some_and(|own| Arc::ptr_eq(own, port))
        {
            table.node_ports.remove(&number);
        }
    }

    pub(super) fn find(&self, frontend: SocketAddr) -> Option<(Entrance, Arc<ServicePort>)> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let node_port = || Some((Entrance::External, Arc::clone(table.node_ports.get(&frontend.port())?)));
        table.addresses.get(&frontend).cloned().or_else(node_port)
    }
}

/// Whose connections a listener takes.
#[derive(Clone, Debug)]
pub enum Whose {
    /// Those that rules have led here from one of these frontends.
    Frontends(Arc<Frontends>),
    /// Those of a NodePort that the listener itself stands at.
    NodePort(Arc<ServicePort>),
}

/// Takes connections until this is dropped. Connections go on after that.
#[derive(Debug)]
pub struct Listener {
    /// Where it listens.
    pub address: SocketAddr,
    doors: Vec<(Door, JoinHandle<()>)>,
}

/// Where connections come in, and what becomes of them.
#[derive(Clone, Debug)]
struct Door {
    socket: Arc<TcpListener>,
    whose: Whose,
    shared: Arc<Shared>,
    /// Who accepts and carries them.
    worker: Arc<Worker>,
}

impl Listener {
    /// Listens; port 0 leaves the choice to the kernel.
    pub fn open(address: SocketAddr, whose: &Whose, shared: &Arc<Shared>) -> io::Result<Self> {
        let workers = shared.workers()?;
        let mut listener = Self { address, doors: Vec::new() };
        for worker in workers.iter() {
            let socket = socket(listener.address, workers.iter().len() > 1)?;
            let inside = worker.enter();
            let socket = Arc::new(socket.listen(BACKLOG)?);
            drop(inside);
            listener.address = socket.local_addr()?;
            let door =
                Door { socket, whose: whose.clone(), shared: Arc::clone(shared), worker: Arc::clone(worker) };
            let task = worker.spawn(door.clone().accept());
            listener.doors.push((door, task));
        }
        Ok(listener)
    }
}

fn socket(address: SocketAddr, is_one_of_many: bool) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Not without need: a port that is given would be shared with other programs of the same user.
    socket.set_reuseport(is_one_of_many)?;
    if address.is_ipv6() {
        setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    }
    // What is accepted inherits this.
    prepare(&socket);
    socket.bind(address)?;
    Ok(socket)
}

impl Drop for Listener {
    fn drop(&mut self) {
        for (door, task) in &self.doors {
            task.abort();
            door.empty();
        }
        for (door, _) in &self.doors {
            // Now, and not when the task has ended: another listener may be opened here next.
            let _ = shutdown(door.socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl Door {
    async fn accept(self) {
        loop {
            match self.socket.accept().await {
                Ok((client, peer)) => {
                    // While this one waits, the others do so in the kernel's queue.
                    let Some(permit) = self.shared.connection().await else { return };
                    self.worker.carry(serve(
                        client,
                        peer,
                        self.whose.clone(),
                        Arc::clone(&self.shared),
                        permit,
                    ));
                }
                Err(error) => {
                    debug!("no connection is accepted: {error}");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Accepts what waits in the kernel's queue: it has been let in, and would be reset when the socket closes.
    fn empty(&self) {
        let Ok(socket) = self.socket.as_fd().try_clone_to_owned() else { return };
        let socket = std::net::TcpListener::from(socket);
        while let Ok((client, peer)) = socket.accept()
            && client.set_nonblocking(true).is_ok()
            && let Some(permit) = self.shared.room()
        {
            let (whose, shared) = (self.whose.clone(), Arc::clone(&self.shared));
            self.worker.carry(async move {
                match TcpStream::from_std(client) {
                    Ok(client) => serve(client, peer, whose, shared, permit).await,
                    Err(error) => warn!("a connection cannot be waited for: {error}"),
                }
            });
        }
    }
}

async fn serve(
    mut client: TcpStream,
    peer: SocketAddr,
    whose: Whose,
    shared: Arc<Shared>,
    permit: OwnedSemaphorePermit,
) {
    let peer = plain(peer.ip(), peer.port());
    let found = match &whose {
        Whose::Frontends(frontends) => original(&client, peer.is_ipv4())
            .and_then(|frontend| frontends.find(frontend).map(|(entrance, port)| (frontend, entrance, port))),
        Whose::NodePort(port) => {
            client.local_addr().ok().map(|frontend| (frontend, Entrance::External, Arc::clone(port)))
        }
    };
    // Whoever knocks at the listener itself is nobody's client.
    let Some((frontend, entrance, port)) = found else { return reset(&client) };
    port.counters.connections.inc();
    let visitor = Visitor { client: peer, frontend, entrance };
    let well = tokio::select! {
        well = converse(&mut client, &visitor, &port) => well,
        () = shared.end() => false,
    };
    if !well {
        reset(&client);
    }
    drop(permit);
}

/// Leads a client to an endpoint, and returns whether all went well.
async fn converse(client: &mut TcpStream, visitor: &Visitor, port: &Arc<ServicePort>) -> bool {
    let mut tried = Vec::new();
    while tried.len() < ATTEMPTS {
        let Choice::Endpoint(address) = port.choose(visitor, &tried, Instant::now()) else { break };
        tried.push(address);
        let visit = port.open(address);
        let mut endpoint = match timeout(CONNECT, connect(address)).await {
            Ok(Ok(endpoint)) => endpoint,
            Ok(Err(error)) if unreachable(&error) => {
                debug!(endpoint = %address, "not reached: {error}");
                port.failed(address, Failure::Refused, Instant::now());
                continue;
            }
            Ok(Err(error)) => {
                // No file descriptors, no ports: another endpoint would not help, and this one is not to blame.
                warn!(service = port.id.text(), endpoint = %address, "a connection cannot be made: {error}");
                break;
            }
            Err(_) => {
                port.failed(address, Failure::TimedOut, Instant::now());
                continue;
            }
        };
        // Not before: one that accepts and leaves at once is no better than one that refuses.
        let begun = || port.succeeded(address, Instant::now());
        let patience = port.setting().connection;
        let ended = relay(client, &mut endpoint, patience, &port.counters.bytes, &begun).await;
        drop(visit);
        match ended {
            Ended::Well => return true,
            Ended::Unused(error) => {
                debug!(endpoint = %address, "it was left before anything was said: {error}");
                port.failed(address, Failure::Closed, Instant::now());
            }
            Ended::Broken(error) => {
                debug!(endpoint = %address, client = %visitor.client, "broken off: {error}");
                port.counters.failed(Failure::Broken);
                reset(&endpoint);
                return false;
            }
            Ended::Silent => {
                port.counters.failed(Failure::Silent);
                reset(&endpoint);
                return false;
            }
        }
    }
    port.counters.failed(Failure::Exhausted);
    false
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    prepare(&socket);
    socket.connect(address).await
}

/// Whether it is the endpoint that cannot be reached.
fn unreachable(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(
        error.kind(),
        ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut
    )
}

/// The other side learns that this was no regular end.
fn reset(stream: &TcpStream) {
    if let Err(error) = stream.set_zero_linger() {
        debug!("a connection cannot be reset: {error}");
    }
}

/// Small messages are not held back; who has vanished is noticed after two hours, as the kernel's default is.
fn prepare(socket: &TcpSocket) {
    let _ = socket.set_nodelay(true);
    let _ = socket.set_keepalive(true);
}

/// Without what else an IPv6 address may carry: addresses are compared.
fn plain(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}

/// Where the client sent its first packet to, before the kernel translated that.
fn original(client: &TcpStream, is_ipv4: bool) -> Option<SocketAddr> {
    if is_ipv4 {
        let found = getsockopt(client, sockopt::OriginalDst).ok()?;
        let address = u32::from_be(found.sin_addr.s_addr);
        Some(plain(std::net::Ipv4Addr::from(address).into(), u16::from_be(found.sin_port)))
    } else {
        let found = getsockopt(client, sockopt::Ip6tOriginalDst).ok()?;
        Some(plain(found.sin6_addr.s6_addr.into(), u16::from_be(found.sin6_port)))
    }
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
