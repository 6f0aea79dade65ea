//! What the proxies of `hack/bench userspace` carry: endpoints that answer, and clients that ask as fast as they can.
//!
//! In: an address. Out: rates and times. Threads that block, on both sides: beside a system call there is next to nothing to measure.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::socket::{Backlog, listen};

use super::lab::Lab;
use super::objects::ENDPOINT_PORT;
use super::report::Value;

/// Endpoints serve so many connections at once; more wait in the kernel's queue.
const SERVERS: usize = 64;
const QUEUE: i32 = 4095;
/// The length of a request, and of an answer.
const MESSAGE: usize = 128;
/// What endpoints send, and clients take, at once.
const CHUNK: usize = 128 << 10;
/// Longer than anything takes that goes well.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a connection is for, as its first byte says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One request and its answer.
    Once = 1,
    /// Requests and answers until the client has gone.
    Often,
    /// Bytes until the client has gone.
    Bulk,
}

/// What clients have seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// How long each request took; with [`Kind::Once`], from before the connection until it was closed.
    pub times: Vec<Duration>,
    /// Bytes received.
    pub bytes: u64,
    /// From the first request to the last.
    pub took: Duration,
}

impl Seen {
    /// Requests a second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn rate(&self) -> Value {
        Value::Rate(self.times.len() as f64 / self.took.as_secs_f64())
    }

    /// Bytes a second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn throughput(&self) -> Value {
        Value::Throughput(self.bytes as f64 / self.took.as_secs_f64())
    }
}

/// Starts the endpoints.
pub fn serve(lab: &Lab) -> Result<()> {
    lab.at_endpoints(|| {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ENDPOINT_PORT)).context("the endpoints")?;
        listen(&listener, Backlog::new(QUEUE)?)?;
        for _ in 0..SERVERS {
            let listener = listener.try_clone().context("the endpoints")?;
            thread::spawn(move || {
                let mut chunk = vec![0; CHUNK];
                loop {
                    // A client that has gone already is no reason to stop.
                    if let Ok((stream, _)) = listener.accept() {
                        let _ = answer(stream, &mut chunk);
                    }
                }
            });
        }
        Ok(())
    })
}

fn answer(mut stream: TcpStream, chunk: &mut [u8]) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut message = [0; MESSAGE];
    stream.read_exact(&mut message)?;
    match message[0] {
        kind if kind == Kind::Once as u8 => stream.write_all(&message),
        kind if kind == Kind::Often as u8 => loop {
            stream.write_all(&message)?;
            stream.read_exact(&mut message)?;
        },
        _ => loop {
            stream.write_all(chunk)?;
        },
    }
}

/// A connection whose first request has been answered, or is.
pub fn connect(to: SocketAddr, kind: Kind) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&[kind as u8; MESSAGE])?;
    Ok(stream)
}

/// One request on a connection of its own. The endpoint closes first, so that no port of the client's waits to be used again.
pub fn once(to: SocketAddr) -> std::io::Result<()> {
    let mut stream = connect(to, Kind::Once)?;
    let mut answer = [0; MESSAGE];
    stream.read_exact(&mut answer)?;
    match stream.read(&mut answer)? {
        0 => Ok(()),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// So many clients, for so long.
pub fn ask(to: SocketAddr, kind: Kind, clients: usize, during: Duration) -> Result<Seen> {
    let end = Instant::now() + during;
    let threads: Vec<_> = (0..clients).map(|_| thread::spawn(move || client(to, kind, end))).collect();
    let mut all = Seen::default();
    for thread in threads {
        let seen = thread.join().map_err(|_| anyhow!("a client has panicked"))?;
        let seen = seen.with_context(|| format!("{kind:?} at {to}"))?;
        all.times.extend(seen.times);
        all.bytes += seen.bytes;
        all.took = all.took.max(seen.took);
    }
    ensure!(!all.times.is_empty(), "{to} has not answered within {during:?}");
    Ok(all)
}

fn client(to: SocketAddr, kind: Kind, end: Instant) -> std::io::Result<Seen> {
    let begun = Instant::now();
    let mut seen = Seen::default();
    let mut open = match kind {
        Kind::Once => None,
        Kind::Often | Kind::Bulk => Some(connect(to, kind)?),
    };
    let mut chunk = vec![0; if kind == Kind::Bulk { CHUNK } else { MESSAGE }];
    let mut first = true;
    while Instant::now() < end {
        let start = Instant::now();
        match &mut open {
            None => once(to)?,
            Some(stream) if kind == Kind::Often => {
                if !first {
                    stream.write_all(&chunk)?;
                }
                stream.read_exact(&mut chunk)?;
            }
            Some(stream) => {
                let count = stream.read(&mut chunk)?;
                if count == 0 {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                seen.bytes += u64::try_from(count).unwrap_or_default();
            }
        }
        first = false;
        seen.times.push(start.elapsed());
    }
    seen.took = begun.elapsed();
    Ok(seen)
}
