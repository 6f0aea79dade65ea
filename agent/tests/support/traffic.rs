//! Servers that say who they are and whom they saw, and clients that ask them.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use pointsman_agent::model::Protocol;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::scenario::hosts::Host;
use super::sctp;
use super::world::block_on;

/// What a client got.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// The server's name, and the source that it saw.
    From(String, IpAddr),
    Refused,
    Nothing,
}

/// How long a client waits for an answer that it expects. Longer than it takes to try again: an error that comes back before
/// `connect` has returned from sending counts only the second time.
pub const PATIENT: Duration = Duration::from_secs(4);

/// How long a client waits for an answer that must not come.
pub const IMPATIENT: Duration = Duration::from_millis(300);

/// Something that answers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    pub to: SocketAddr,
    pub protocol: Protocol,
    pub name: String,
}

/// A [`Service`] whose socket is open.
pub struct Opened {
    name: String,
    socket: Socket,
}

enum Socket {
    Tcp(TcpListener),
    Udp(UdpSocket),
    Sctp(sctp::Listener),
}

impl Service {
    /// Opens the socket in the namespace of the thread.
    pub fn open(self) -> Opened {
        let fail = |error: io::Error| -> ! { panic!("{self:?}: {error}") };
        let socket = match self.protocol {
            Protocol::Tcp => {
                let socket = TcpListener::bind(self.to).unwrap_or_else(|error| fail(error));
                socket.set_nonblocking(true).unwrap();
                Socket::Tcp(socket)
            }
            Protocol::Udp => {
                let socket = UdpSocket::bind(self.to).unwrap_or_else(|error| fail(error));
                socket.set_nonblocking(true).unwrap();
                Socket::Udp(socket)
            }
            Protocol::Sctp => Socket::Sctp(sctp::Listener::open(self.to).unwrap_or_else(|error| fail(error))),
        };
        Opened { name: self.name, socket }
    }
}

/// One thread that serves all sockets it is given, until this is dropped.
pub struct Servers(mpsc::UnboundedSender<Vec<Opened>>);

impl Servers {
    pub fn start() -> Self {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Vec<Opened>>();
        thread::spawn(move || {
            block_on(async move {
                while let Some(opened) = receiver.recv().await {
                    opened.into_iter().for_each(serve);
                }
            });
        });
        Self(sender)
    }

    pub fn add(&self, opened: Vec<Opened>) {
        self.0.send(opened).ok().unwrap();
    }
}

fn serve(Opened { name, socket }: Opened) {
    match socket {
        Socket::Tcp(listener) => {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            tokio::spawn(async move {
                while let Ok((mut stream, peer)) = listener.accept().await {
                    let line = format!("{name} {}\n", peer.ip());
                    tokio::spawn(async move {
                        // Then it echoes, for whoever stays.
                        let (mut reader, mut writer) = stream.split();
                        if writer.write_all(line.as_bytes()).await.is_ok() {
                            let _ = tokio::io::copy(&mut reader, &mut writer).await;
                        }
                    });
                }
            });
        }
        Socket::Sctp(listener) => drop(tokio::spawn(listener.serve(name))),
        Socket::Udp(socket) => {
            let socket = tokio::net::UdpSocket::from_std(socket).unwrap();
            tokio::spawn(async move {
                let mut buffer = [0; 64];
                loop {
                    // An error is about an answer that could not be delivered.
                    if let Ok((_, peer)) = socket.recv_from(&mut buffer).await {
                        let _ = socket.send_to(format!("{name} {}", peer.ip()).as_bytes(), peer).await;
                    }
                }
            });
        }
    }
}

impl Host {
    /// The source that it binds to: the node leaves that to the kernel.
    pub fn source(&self, to: &SocketAddr) -> Option<IpAddr> {
        let family = pointsman_agent::model::family_of(to.ip());
        self.interface.map(|_| self.address(family))
    }
}

/// Asks once, in the namespace of the thread.
pub async fn ask(source: Option<IpAddr>, to: SocketAddr, protocol: Protocol, patience: Duration) -> Answer {
    ask_with(source, to, protocol, patience, b"?").await
}

/// More than fits into one packet.
pub const LARGE: [u8; 4000] = [b'?'; 4000];

/// Asks with these bytes: on UDP all in one datagram, on TCP after the server has said who it is, and to have them back.
/// SCTP ignores them.
pub async fn ask_with(
    source: Option<IpAddr>,
    to: SocketAddr,
    protocol: Protocol,
    patience: Duration,
    bytes: &[u8],
) -> Answer {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let from = source.unwrap_or(any);
    let outcome = timeout(patience, async {
        match protocol {
            Protocol::Tcp => {
                let mut stream = tokio::io::BufReader::new(fresh_socket(from)?.connect(to).await?);
                let mut line = String::new();
                stream.read_line(&mut line).await?;
                stream.write_all(bytes).await?;
                let mut back = vec![0; bytes.len()];
                stream.read_exact(&mut back).await?;
                assert!(back == bytes, "{to} sends back something else");
                Ok(line)
            }
            Protocol::Udp => {
                let socket = tokio::net::UdpSocket::bind(SocketAddr::new(from, fresh_port())).await?;
                socket.connect(to).await?;
                // The node's own rules drop or reject what it sends: which of the two, only the answer says.
                match socket.send(bytes).await {
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                    sent => drop(sent?),
                }
                let mut buffer = [0; 256];
                let length = socket.recv(&mut buffer).await?;
                Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
            }
            Protocol::Sctp => sctp::ask(from, fresh_port(), to).await,
        }
    });
    match outcome.await {
        Ok(Ok(text)) => {
            let (name, source) =
                text.trim_end().split_once(' ').unwrap_or_else(|| panic!("{text:?} from {to}"));
            Answer::From(name.to_owned(), source.parse().unwrap())
        }
        Ok(Err(error)) => classify(to, &error),
        Err(_) => Answer::Nothing,
    }
}

/// A port that no flow of the last minutes had: conntrack would lead a new flow with the ports of an old one where that one went, and
/// IPVS a new connection of a client that has affinity (`is_new_conn_expected` in the kernel's `ip_vs_core.c`). Below those that the
/// kernel gives out, and those of servers.
fn fresh_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    next_port(&NEXT, 20_000)
}

fn next_port(next: &AtomicU32, count: u32) -> u16 {
    u16::try_from(10_000 + next.fetch_add(1, Ordering::Relaxed) % count).unwrap()
}

/// A socket with such a port; the next if it is in use. Some tests make more connections than there are ports for UDP.
fn fresh_socket(from: IpAddr) -> io::Result<TcpSocket> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let socket = if from.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        match socket.bind(SocketAddr::new(from, next_port(&NEXT, 55_000))) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound.map(|()| socket),
        }
    }
}

/// A connection that stays open.
pub struct Stream(BufReader<TcpStream>);

impl Stream {
    /// Connects, in the namespace of the thread, and waits until the server has said who it is.
    pub fn open(to: SocketAddr) -> io::Result<Self> {
        let socket = TcpStream::connect_timeout(&to, PATIENT)?;
        socket.set_read_timeout(Some(PATIENT))?;
        let mut stream = Self(BufReader::new(socket));
        stream.0.read_line(&mut String::new())?;
        Ok(stream)
    }

    /// Breaks it off, so that nobody waits for the end of it.
    pub fn reset(self) {
        let socket = self.0.into_inner();
        socket.set_nonblocking(true).unwrap();
        super::world::block_on(async {
            tokio::net::TcpStream::from_std(socket).unwrap().set_zero_linger().unwrap();
        });
    }

    /// Its own end.
    pub fn local(&self) -> SocketAddr {
        self.0.get_ref().local_addr().unwrap()
    }

    /// Whether the other end still answers.
    pub fn answers(&mut self) -> bool {
        self.check().is_ok()
    }

    /// An error if the other end does not answer any more.
    pub fn check(&mut self) -> io::Result<()> {
        self.0.get_mut().write_all(b"?")?;
        self.0.read_exact(&mut [0])
    }
}

fn classify(to: SocketAddr, error: &io::Error) -> Answer {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Answer::Refused,
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable => Answer::Nothing,
        _ => panic!("{to}: {error}"),
    }
}
