//! Endpoints that say which one they are, and a client that measures.
//!
//! In: addresses. Out: who answered and how long it took. One server listens on every endpoint's address; it answers with
//! the address that the connection was made to, so that a new endpoint is told from an old one.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::libc::linger;
use nix::sys::socket::{setsockopt, sockopt::Linger};

use super::lab::Lab;
use super::objects::ENDPOINT_PORT;
use super::program::Mode;

/// Between two looks at a program that is starting.
const CHECK: Duration = Duration::from_millis(200);

/// How a frontend is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Connections at once.
    connections: usize,
    /// How long one may take to be made.
    patience: Duration,
    /// From the end of a look to the next.
    pause: Duration,
}

impl Look {
    /// For a change of what is served. A third of the connections go to each of three endpoints, and all are answered.
    #[must_use]
    pub fn known(mode: Mode) -> Self {
        Self { connections: 4, patience: Duration::from_secs(3), pause: pause_of(mode) }
    }

    /// For what is not served yet. Until it is programmed, packets may be refused, rejected or dropped. A dropped one is tried again
    /// soon: the kernel would wait for a second. In user-mode-linux a connection may take longer than that; nothing in mode ipvs
    /// drops packets.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        let patience = Duration::from_millis(if mode == Mode::Ipvs { 500 } else { 2 });
        Self { connections: 1, patience, pause: pause_of(mode) }
    }
}

/// The pause between two looks. user-mode-linux has one processor, and a connection in it takes a good part of a millisecond: who
/// looks more often takes the processor away from what is measured.
fn pause_of(mode: Mode) -> Duration {
    Duration::from_millis(if mode == Mode::Ipvs { 20 } else { 1 })
}

/// Starts the server on all endpoints.
pub fn serve(lab: &Lab) -> Result<()> {
    let listener = lab.at_endpoints(|| {
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, ENDPOINT_PORT)).context("listening on the endpoints")
    })?;
    thread::spawn(move || {
        loop {
            // A client that has gone already is no reason to stop.
            let Ok((mut stream, _)) = listener.accept() else { continue };
            if let Ok(SocketAddr::V4(local)) = stream.local_addr() {
                let _ = stream.write_all(&local.ip().octets());
            }
        }
    });
    Ok(())
}

/// Closing leaves nothing: a reset, so that no port waits to be used again.
fn vanishing(stream: TcpStream) -> std::io::Result<TcpStream> {
    setsockopt(&stream.as_fd(), Linger, &linger { l_onoff: 1, l_linger: 0 })?;
    Ok(stream)
}

/// The endpoint that answers a new connection; none if nobody does.
pub fn ask(to: SocketAddr, patience: Duration) -> Result<Option<Ipv4Addr>> {
    let answer = TcpStream::connect_timeout(&to, patience).and_then(vanishing).and_then(|mut stream| {
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        let mut octets = [0; 4];
        stream.read_exact(&mut octets).map(|()| octets)
    });
    match answer {
        Ok(octets) => Ok(Some(octets.into())),
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("connecting to {to}")),
    }
}

/// What became of looking for a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// From `since` to the first answer that shows it.
    pub after: Duration,
    /// Connections that nobody answered meanwhile.
    pub failed: usize,
}

/// Looks until `wanted` answers at `to`.
pub fn until_answered_by(
    to: SocketAddr,
    wanted: Ipv4Addr,
    look: Look,
    since: Instant,
    patience: Duration,
) -> Result<Seen> {
    let mut failed = 0;
    loop {
        for _ in 0..look.connections {
            match ask(to, look.patience)? {
                Some(answer) if answer == wanted => return Ok(Seen { after: since.elapsed(), failed }),
                Some(_) => {}
                None => failed += 1,
            }
        }
        ensure!(since.elapsed() < patience, "{wanted} does not answer at {to} after {patience:?}");
        pause(look.pause);
    }
}

/// Looks until every one of `all` is answered, one after the other. Gives up when `go_on` fails.
pub fn until_all_answer(
    all: &[SocketAddr],
    look: Look,
    since: Instant,
    go_on: impl Fn() -> Result<()>,
) -> Result<Duration> {
    let mut checked = Instant::now();
    for to in all {
        while ask(*to, look.patience)?.is_none() {
            if checked.elapsed() > CHECK {
                go_on().with_context(|| format!("{to} is not answered after {:?}", since.elapsed()))?;
                checked = Instant::now();
            }
            pause(look.pause);
        }
    }
    Ok(since.elapsed())
}

#[expect(clippy::disallowed_methods, reason = "on threads that may block")]
fn pause(time: Duration) {
    thread::sleep(time);
}

/// The time of a connect to each of `targets`, in order: one packet there and one back, on a flow that is new.
pub fn connect_times(targets: &[SocketAddr]) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(targets.len());
    for to in targets {
        let start = Instant::now();
        let connected = TcpStream::connect(to);
        times.push(start.elapsed());
        let connected = connected.and_then(vanishing);
        connected.with_context(|| format!("{to} does not answer while latency is measured"))?;
    }
    Ok(times)
}
