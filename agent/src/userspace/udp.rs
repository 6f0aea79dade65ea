//! UDP: passes datagrams on, and the answers back.
//!
//! In: datagrams that rules have led to a socket of one Service port. Out: the same datagrams at endpoints, each client's from a socket of
//! its own, and answers from where the client's datagrams came to, so that connection tracking translates them back.
//!
//! An endpoint that refuses before it has ever answered is replaced by the next one, which gets the datagram again. A flow to an endpoint
//! that is gone moves with the client's next datagram. A datagram that finds no room in a socket is dropped, as networks do.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::counters::Failure;
use super::port::{Choice, ServicePort, Visit, Visitor};
use super::shared::Shared;
use crate::plan::Entrance;

/// The longest datagram.
const LONGEST: usize = 65_535;
/// The longest datagram that is kept until there is an answer.
const KEPT: usize = 4096;
/// So many datagrams are taken before others get their turn.
const BURST: usize = 64;
/// Room for datagrams that wait: as much as `rmem_max` allows by default.
const WAITING: usize = 212_992;

thread_local! {
    /// One for each thread, not one for each flow.
    static DATAGRAM: RefCell<Vec<u8>> = RefCell::new(vec![0; LONGEST]);
}

/// A socket that takes datagrams until this is dropped, which ends all its flows.
#[derive(Debug)]
pub struct Listener {
    /// Where it listens.
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Listener {
    /// Takes the datagrams of one Service port, at a port that the kernel chooses.
    pub fn open(
        address: IpAddr,
        port: Arc<ServicePort>,
        entrance: Entrance,
        shared: Arc<Shared>,
    ) -> io::Result<Self> {
        let socket = std::net::UdpSocket::bind((address, 0))?;
        socket.set_nonblocking(true)?;
        let _ = setsockopt(&socket, sockopt::RcvBuf, &WAITING);
        let workers = shared.workers()?;
        let worker = workers.in_turn();
        let _inside = worker.enter();
        let socket = Arc::new(UdpSocket::from_std(socket)?);
        let address = socket.local_addr()?;
        let (ended, endings) = mpsc::unbounded_channel();
        let flows =
            Flows { socket, address, port, entrance, shared, by_client: HashMap::new(), ended, begun: 0 };
        Ok(Self { address, task: worker.spawn(flows.run(endings)) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The flows of one socket.
struct Flows {
    socket: Arc<UdpSocket>,
    address: SocketAddr,
    port: Arc<ServicePort>,
    entrance: Entrance,
    shared: Arc<Shared>,
    by_client: HashMap<SocketAddr, Flow>,
    /// Flows that have ended by themselves: client and number.
    ended: mpsc::UnboundedSender<(SocketAddr, u64)>,
    begun: u64,
}

/// What one client sends, and gets.
struct Flow {
    number: u64,
    state: Arc<FlowState>,
    task: JoinHandle<()>,
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct FlowState {
    way: Mutex<Way>,
    answered: AtomicBool,
    last: Mutex<Instant>,
    /// The last datagram, until there is an answer.
    unanswered: Mutex<Vec<u8>>,
    refused: Notify,
}

/// The way to an endpoint. Each has a socket of its own, whose source address suits the endpoint.
#[derive(Clone)]
struct Way {
    socket: Arc<UdpSocket>,
    endpoint: SocketAddr,
}

impl Way {
    fn open(endpoint: SocketAddr) -> io::Result<Self> {
        let any: IpAddr =
            if endpoint.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = std::net::UdpSocket::bind((any, 0))?;
        socket.connect(endpoint)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket: Arc::new(UdpSocket::from_std(socket)?), endpoint })
    }

    /// Whether the endpoint has refused an earlier datagram. Asked when the kernel tells of an error, which is no datagram to be read.
    fn refused(&self) -> bool {
        let taken = self.socket.take_error();
        // Told, and over.
        let _ = self.socket.try_io(Interest::ERROR, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
        taken.ok().flatten().is_some_and(|error| refused(&error))
    }

    /// Sends to the endpoint; an error says that it has refused an earlier datagram, and this one was not sent. Not by the runtime,
    /// which takes a new socket for full until it has asked the kernel.
    fn send(&self, datagram: &[u8]) -> Result<(), Errno> {
        match send(self.socket.as_raw_fd(), datagram, MsgFlags::MSG_DONTWAIT) {
            Err(errno @ (Errno::ECONNREFUSED | Errno::EHOSTUNREACH | Errno::ENETUNREACH)) => Err(errno),
            // There is no room now: datagrams get lost.
            _ => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FlowState {
    fn way(&self) -> Way {
        lock(&self.way).clone()
    }

    fn touch(&self) {
        *lock(&self.last) = Instant::now();
    }

    /// Keeps the last datagram until there is an answer.
    fn keep(&self, datagram: &[u8]) {
        if !self.answered.load(Ordering::Relaxed) && datagram.len() <= KEPT {
            let mut kept = lock(&self.unanswered);
            kept.clear();
            kept.extend_from_slice(datagram);
        }
        self.touch();
    }
}

/// What ICMP has said about an earlier datagram.
fn refused(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}

impl Flows {
    async fn run(mut self, mut endings: mpsc::UnboundedReceiver<(SocketAddr, u64)>) {
        let socket = Arc::clone(&self.socket);
        loop {
            tokio::select! {
                Some((client, number)) = endings.recv() => {
                    if self.by_client.get(&client).is_some_and(|flow| flow.number == number) {
                        self.by_client.remove(&client);
                    }
                }
                ready = socket.readable() => {
                    if ready.is_ok() {
                        DATAGRAM.with_borrow_mut(|buffer| self.take(&socket, buffer));
                    }
                }
            }
        }
    }

    fn take(&mut self, socket: &UdpSocket, buffer: &mut [u8]) {
        for _ in 0..BURST {
            match socket.try_recv_from(buffer) {
                Ok((length, peer)) => {
                    let peer = SocketAddr::new(peer.ip(), peer.port());
                    self.pass(buffer.get(..length).unwrap_or_default(), peer);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // About an answer that could not be delivered.
                Err(_) => {}
            }
        }
    }

    fn pass(&mut self, datagram: &[u8], client: SocketAddr) {
        let mut tried = Vec::new();
        if let Some(flow) = self.by_client.get(&client) {
            let way = flow.state.way();
            let endpoint = way.endpoint;
            if flow.task.is_finished() || !self.port.serves(endpoint) {
                self.by_client.remove(&client);
            } else {
                flow.state.keep(datagram);
                match way.send(datagram) {
                    Ok(()) => {
                        self.count(datagram);
                        return;
                    }
                    Err(_) if flow.state.answered.load(Ordering::Relaxed) => {
                        self.port.failed(endpoint, Failure::Refused, Instant::now());
                        tried.push(endpoint);
                        self.by_client.remove(&client);
                    }
                    Err(_) => {
                        // It was kept, and goes to the next endpoint.
                        flow.state.refused.notify_one();
                        return;
                    }
                }
            }
        }
        if let Err(error) = self.begin(datagram, client, &tried) {
            debug!(%client, service = self.port.id.text(), "a datagram is dropped: {error}");
        }
    }

    fn count(&self, datagram: &[u8]) {
        self.port.counters.bytes.to_endpoint.inc_by(u64::try_from(datagram.len()).unwrap_or_default());
    }

    fn begin(&mut self, datagram: &[u8], client: SocketAddr, tried: &[SocketAddr]) -> io::Result<()> {
        let visitor = Visitor { client, frontend: self.address, entrance: self.entrance };
        let Choice::Endpoint(endpoint) = self.port.choose(&visitor, tried, Instant::now()) else {
            return Err(io::Error::other("no endpoint may be used"));
        };
        let Some(permit) = self.shared.flow() else {
            return Err(io::Error::other("as many flows are open as the proxy can hold"));
        };
        let way = Way::open(endpoint)?;
        let state = Arc::new(FlowState {
            way: Mutex::new(way.clone()),
            answered: AtomicBool::new(false),
            last: Mutex::new(Instant::now()),
            unanswered: Mutex::default(),
            refused: Notify::new(),
        });
        state.keep(datagram);
        if way.send(datagram).is_err() {
            state.refused.notify_one();
        }
        self.port.counters.connections.inc();
        let answers = Answers {
            state: Arc::clone(&state),
            visitor,
            visit: self.port.open(endpoint),
            tried: tried.to_vec(),
            socket: Arc::clone(&self.socket),
            port: Arc::clone(&self.port),
            _permit: permit,
        };
        self.count(datagram);
        self.begun += 1;
        let (number, ended) = (self.begun, self.ended.clone());
        let task = tokio::spawn(async move {
            answers.run().await;
            let _ = ended.send((client, number));
        });
        self.by_client.insert(client, Flow { number, state, task });
        Ok(())
    }
}

/// What comes back from an endpoint to a client.
struct Answers {
    state: Arc<FlowState>,
    visitor: Visitor,
    visit: Visit,
    tried: Vec<SocketAddr>,
    socket: Arc<UdpSocket>,
    port: Arc<ServicePort>,
    _permit: OwnedSemaphorePermit,
}

impl Answers {
    async fn run(mut self) {
        let state = Arc::clone(&self.state);
        loop {
            let patience = self.port.setting().flow;
            let answered = state.answered.load(Ordering::Relaxed);
            let patience = if answered { patience.open } else { patience.half_closed };
            let end = *lock(&state.last) + patience;
            let way = state.way();
            let refused = tokio::select! {
                ready = way.socket.ready(Interest::READABLE | Interest::ERROR) => {
                    let refused = ready.is_ok_and(tokio::io::Ready::is_error) && way.refused();
                    refused || DATAGRAM.with_borrow_mut(|buffer| self.give(&way, buffer)).is_err()
                }
                () = state.refused.notified() => true,
                () = sleep_until(end) => {
                    if *lock(&state.last) + patience <= Instant::now() {
                        return;
                    }
                    false
                }
            };
            if refused && !self.next() {
                return;
            }
        }
    }

    /// Gives the client what is there; an error says that the endpoint has refused.
    fn give(&self, way: &Way, buffer: &mut [u8]) -> io::Result<()> {
        for _ in 0..BURST {
            match way.socket.try_recv(buffer) {
                Ok(length) => {
                    if !self.state.answered.swap(true, Ordering::Relaxed) {
                        *lock(&self.state.unanswered) = Vec::new();
                        self.port.succeeded(self.visit.endpoint, Instant::now());
                    }
                    self.state.touch();
                    let datagram = buffer.get(..length).unwrap_or_default();
                    if self.socket.try_send_to(datagram, self.visitor.client).is_ok() {
                        let length = u64::try_from(length).unwrap_or_default();
                        self.port.counters.bytes.to_client.inc_by(length);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if refused(&error) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Turns to the next endpoint with what was not answered. Returns whether there is one.
    fn next(&mut self) -> bool {
        self.port.failed(self.visit.endpoint, Failure::Refused, Instant::now());
        if self.state.answered.load(Ordering::Relaxed) {
            // The client's next datagram begins anew.
            return false;
        }
        self.tried.push(self.visit.endpoint);
        let Choice::Endpoint(endpoint) = self.port.choose(&self.visitor, &self.tried, Instant::now()) else {
            self.port.counters.failed(Failure::Exhausted);
            return false;
        };
        self.visit = self.port.open(endpoint);
        let Ok(way) = Way::open(endpoint) else { return false };
        let datagram = lock(&self.state.unanswered).clone();
        if !datagram.is_empty() && way.send(&datagram).is_err() {
            self.state.refused.notify_one();
        }
        *lock(&self.state.way) = way;
        true
    }
}

#[cfg(test)]
#[path = "udp_tests.rs"]
mod tests;
