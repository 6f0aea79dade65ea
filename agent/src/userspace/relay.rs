//! Passes bytes between the two halves of a proxied TCP connection.
//!
//! In: two connected streams. Out: the same bytes on the other side, each end told when the other has finished sending, and an
//! [`Ended`] saying how it went.
//!
//! A connection that is quiet holds no memory. One that is busy holds at most [`BUFFER`] bytes in each direction here, beside the
//! kernel's socket buffers: nothing is read while the other side does not take what was read before, so a slow reader slows the sender
//! down. After [`BULK`] bytes in one direction they go through a pipe and are not copied any more, where the kernel can do that and there
//! are file descriptors for it.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, SpliceFFlags, splice};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::pipe2;
use prometheus_client::metrics::counter::Counter;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// What is read at once.
pub const BUFFER: usize = 16 << 10;
/// After so many bytes in one direction a pipe is worth its two file descriptors.
pub const BULK: u64 = 256 << 10;
/// What moves through a pipe at once: what a pipe holds, if nobody has changed that.
const PIPE: usize = 64 << 10;

/// For how long a connection may be silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// While both sides may send.
    pub open: Duration,
    /// After one side has finished.
    pub half_closed: Duration,
}

/// Counts the bytes of one Service port.
#[derive(Clone, Debug, Default)]
pub struct Bytes {
    /// From clients to endpoints.
    pub to_endpoint: Counter,
    /// From endpoints to clients.
    pub to_client: Counter,
}

/// How a connection has ended.
#[derive(Debug)]
pub enum Ended {
    /// Both sides have finished sending.
    Well,
    /// The endpoint has ended it before a byte went in either direction: another endpoint can take the client over, who has not noticed.
    Unused(io::Error),
    /// It was broken off.
    Broken(io::Error),
    /// It was silent for too long.
    Silent,
}

/// What both directions of a connection share.
struct Shared<'a> {
    begun: &'a (dyn Fn() + Send + Sync),
    start: Instant,
    /// Milliseconds after `start` at which the last bytes moved.
    last: AtomicU64,
    moved: AtomicBool,
    half_closed: AtomicBool,
    finished: Notify,
}

impl Shared<'_> {
    fn moved(&self) {
        if !self.moved.swap(true, Ordering::Relaxed) {
            (self.begun)();
        }
        self.touch();
    }

    fn touch(&self) {
        self.last.store(milliseconds(self.start.elapsed()), Ordering::Relaxed);
    }

    async fn silence(&self, patience: Patience) {
        loop {
            let half_closed = self.half_closed.load(Ordering::Relaxed);
            let patience = if half_closed { patience.half_closed } else { patience.open };
            let end = self.start + Duration::from_millis(self.last.load(Ordering::Relaxed)) + patience;
            if end <= Instant::now() {
                return;
            }
            tokio::select! {
                () = sleep_until(end) => {}
                () = self.finished.notified() => {}
            }
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Why one direction stopped.
enum Stopped {
    /// Reading from where the bytes come from failed.
    Source(io::Error),
    /// Writing to where they go failed.
    Sink(io::Error),
}

/// Passes bytes until both sides have finished. If it does not end well, both streams must be reset, or a client would take what it got
/// for everything.
/// `begun` is called when the first bytes go in either direction.
pub async fn relay(
    client: &TcpStream,
    endpoint: &TcpStream,
    patience: Patience,
    bytes: &Bytes,
    begun: &(dyn Fn() + Send + Sync),
) -> Ended {
    let shared = Shared {
        begun,
        start: Instant::now(),
        last: AtomicU64::new(0),
        moved: AtomicBool::new(false),
        half_closed: AtomicBool::new(false),
        finished: Notify::new(),
    };
    let up = pump(client, endpoint, &shared, &bytes.to_endpoint);
    let down = pump(endpoint, client, &shared, &bytes.to_client);
    let both = async {
        let up = async { up.await.map_err(|stopped| (true, stopped)) };
        let down = async { down.await.map_err(|stopped| (false, stopped)) };
        tokio::try_join!(up, down)
    };
    tokio::select! {
        ended = both => match ended {
            Ok(_) => Ended::Well,
            Err((up, stopped)) => {
                let (at_endpoint, error) = match stopped {
                    Stopped::Source(error) => (!up, error),
                    Stopped::Sink(error) => (up, error),
                };
                if at_endpoint && !shared.moved.load(Ordering::Relaxed) { Ended::Unused(error) } else { Ended::Broken(error) }
            }
        },
        () = shared.silence(patience) => Ended::Silent,
    }
}

/// One direction, until its source has finished.
async fn pump(
    from: &TcpStream,
    to: &TcpStream,
    shared: &Shared<'_>,
    counter: &Counter,
) -> Result<(), Stopped> {
    let mut total = 0;
    let mut may_splice = true;
    loop {
        from.readable().await.map_err(Stopped::Source)?;
        if may_splice && total >= BULK {
            may_splice = false;
            if let Some(pipe) = Pipe::new()
                && pipe.pump(from, to, shared, counter).await?
            {
                break;
            }
            continue;
        }
        // Held only while there is something to pass on.
        let mut buffer = vec![0; BUFFER];
        match copy(
            from,
            to,
            &mut buffer,
            shared,
            counter,
            if may_splice { BULK.saturating_sub(total) } else { u64::MAX },
        )
        .await?
        {
            Copied::End => break,
            Copied::Paused(count) => total += count,
        }
    }
    shared.half_closed.store(true, Ordering::Relaxed);
    shared.touch();
    shared.finished.notify_one();
    match shutdown(to.as_raw_fd(), Shutdown::Write) {
        // The other side has gone already, having said all it had to say.
        Ok(()) | Err(Errno::ENOTCONN) => Ok(()),
        Err(errno) => Err(Stopped::Sink(errno.into())),
    }
}

enum Copied {
    /// The source has finished.
    End,
    /// There is nothing to be read now, or enough was passed on.
    Paused(u64),
}

async fn copy(
    from: &TcpStream,
    to: &TcpStream,
    buffer: &mut [u8],
    shared: &Shared<'_>,
    counter: &Counter,
    enough: u64,
) -> Result<Copied, Stopped> {
    let mut total = 0;
    while total < enough {
        let count = match from.try_read(buffer) {
            Ok(0) => return Ok(Copied::End),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(Stopped::Source(error)),
        };
        // From here on they are lost if the other side fails.
        shared.moved();
        let mut rest = buffer.get(..count).unwrap_or_default();
        while !rest.is_empty() {
            match to.try_write(rest) {
                Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    to.writable().await.map_err(Stopped::Sink)?;
                }
                Err(error) => return Err(Stopped::Sink(error)),
            }
            shared.touch();
        }
        total += u64::try_from(count).unwrap_or_default();
        counter.inc_by(u64::try_from(count).unwrap_or_default());
    }
    Ok(Copied::Paused(total))
}

/// Where bytes wait in the kernel.
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    fn new() -> Option<Self> {
        let (read, write) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).ok()?;
        Some(Self { read, write })
    }

    /// Returns whether the source has finished; if not, the kernel cannot do this here, and nothing is left in the pipe.
    async fn pump(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        shared: &Shared<'_>,
        counter: &Counter,
    ) -> Result<bool, Stopped> {
        let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK;
        loop {
            // The pipe is empty, so that "would block" is about the socket.
            let fill = || splice(from, None, &self.write, None, PIPE, flags).map_err(io::Error::from);
            let mut count = match from.async_io(Interest::READABLE, fill).await {
                Ok(0) => return Ok(true),
                Ok(count) => count,
                Err(error) if unsupported(&error) => return Ok(false),
                Err(error) => return Err(Stopped::Source(error)),
            };
            counter.inc_by(u64::try_from(count).unwrap_or_default());
            while count > 0 {
                let drain = || splice(&self.read, None, to, None, count, flags).map_err(io::Error::from);
                match to.async_io(Interest::WRITABLE, drain).await {
                    Ok(0) => return Err(Stopped::Sink(io::ErrorKind::WriteZero.into())),
                    Ok(written) => count -= written.min(count),
                    Err(error) => return Err(Stopped::Sink(error)),
                }
                shared.touch();
            }
        }
    }
}

fn unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP)
    )
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
