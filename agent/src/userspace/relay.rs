//! Passes bytes between the two halves of a proxied TCP connection.
//!
//! In: two connected streams. Out: the same bytes on the other side, each end told when the other has finished sending, and an
//! [`Ended`] saying how it went.
//!
//! A connection that is quiet holds no memory. One that is busy holds at most [`BUFFER`] bytes in each direction here, beside the
//! kernel's socket buffers: nothing is read while the other side does not take what was read before, so a slow reader slows the sender
//! down. What comes in large amounts, for [`BULK`] bytes in one direction, goes through a pipe and is not copied any more, where the kernel
//! can do that and there are file descriptors for it; until it comes in small ones again, which a pipe makes slower.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, SpliceFFlags, splice};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::pipe2;
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead as _, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// What is read at once.
pub const BUFFER: usize = 16 << 10;
/// After so many bytes in one direction, read [`BUFFER`] at a time, a pipe is worth its two file descriptors.
pub const BULK: usize = 256 << 10;
/// An endpoint that closes a connection on which nothing was said does not want it. One that closes later has waited for long enough,
/// and is well.
pub const UNWANTED: Duration = Duration::from_secs(2);
/// What moves through a pipe at once: what a pipe holds, if nobody has changed that.
const PIPE: usize = 64 << 10;

thread_local! {
    /// One for each thread, not one for each connection.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; BUFFER]);
}

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

    /// Whether an endpoint that finishes now does so without need.
    fn is_unused(&self) -> bool {
        let said = self.moved.load(Ordering::Relaxed) || self.half_closed.load(Ordering::Relaxed);
        !said && self.start.elapsed() < UNWANTED
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
    client: &mut TcpStream,
    endpoint: &mut TcpStream,
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
    let (from_client, to_client) = client.split();
    let (from_endpoint, to_endpoint) = endpoint.split();
    let up = pump(from_client, to_endpoint, false, &shared, &bytes.to_endpoint);
    let down = pump(from_endpoint, to_client, true, &shared, &bytes.to_client);
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
    mut from: ReadHalf<'_>,
    to: WriteHalf<'_>,
    is_endpoint: bool,
    shared: &Shared<'_>,
    counter: &Counter,
) -> Result<(), Stopped> {
    let mut bulk = 0;
    let mut may_splice = true;
    loop {
        if may_splice
            && bulk >= BULK
            && let Some(pipe) = Pipe::new()
        {
            match pipe.pump(from.as_ref(), to.as_ref(), shared, counter).await? {
                Left::Finished => break,
                Left::Unable => may_splice = false,
                Left::Small => bulk = 0,
            }
        }
        let Passed { count, mut rest } =
            std::future::poll_fn(|context| pass(&mut from, &to, shared, context)).await?;
        if count == 0 {
            if is_endpoint && shared.is_unused() {
                return Err(Stopped::Source(io::ErrorKind::UnexpectedEof.into()));
            }
            break;
        }
        while !rest.is_empty() {
            to.writable().await.map_err(Stopped::Sink)?;
            let written = write(&to, &rest)?;
            rest.drain(..written);
            shared.touch();
        }
        bulk = weigh(bulk, count);
        counter.inc_by(u64::try_from(count).unwrap_or_default());
    }
    shared.touch();
    if shared.half_closed.swap(true, Ordering::Relaxed) {
        // Closing both tells the rest.
        return Ok(());
    }
    shared.finished.notify_one();
    match shutdown(to.as_ref().as_raw_fd(), Shutdown::Write) {
        // The other side has gone already, having said all it had to say.
        Ok(()) | Err(Errno::ENOTCONN) => Ok(()),
        Err(errno) => Err(Stopped::Sink(errno.into())),
    }
}

/// How much has come in large amounts of late, after one more.
fn weigh(bulk: usize, count: usize) -> usize {
    if count < BUFFER { bulk.saturating_sub(BUFFER) } else { (bulk + count).min(BULK) }
}

/// What was read at once.
struct Passed {
    /// How much; 0: the source has finished.
    count: usize,
    /// What the other side did not take.
    rest: Vec<u8>,
}

/// Reads once, as soon as there is something, and passes it on. The runtime asks the kernel no second time when less is there than there
/// is room for; for short messages that is a fourth of all system calls.
fn pass(
    from: &mut ReadHalf<'_>,
    to: &WriteHalf<'_>,
    shared: &Shared<'_>,
    context: &mut Context<'_>,
) -> Poll<Result<Passed, Stopped>> {
    SCRATCH.with_borrow_mut(|scratch| {
        let mut buffer = ReadBuf::new(scratch);
        std::task::ready!(Pin::new(from).poll_read(context, &mut buffer)).map_err(Stopped::Source)?;
        let bytes = buffer.filled();
        if bytes.is_empty() {
            return Poll::Ready(Ok(Passed { count: 0, rest: Vec::new() }));
        }
        // From here on they are lost if the other side fails.
        shared.moved();
        let written = write(to, bytes)?;
        Poll::Ready(Ok(Passed {
            count: bytes.len(),
            rest: bytes.get(written..).unwrap_or_default().to_vec(),
        }))
    })
}

/// Writes what there is room for.
fn write(to: &WriteHalf<'_>, bytes: &[u8]) -> Result<usize, Stopped> {
    match to.try_write(bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        written => written.map_err(Stopped::Sink),
    }
}

/// Why a pipe is left. It is empty then.
enum Left {
    /// The source has finished.
    Finished,
    /// The kernel cannot do this here.
    Unable,
    /// What comes is not worth it any more.
    Small,
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

    async fn pump(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        shared: &Shared<'_>,
        counter: &Counter,
    ) -> Result<Left, Stopped> {
        let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK;
        let mut bulk = BULK;
        while bulk > 0 {
            // The pipe is empty, so that "would block" is about the socket.
            let fill = || splice(from, None, &self.write, None, PIPE, flags).map_err(io::Error::from);
            let mut count = match from.async_io(Interest::READABLE, fill).await {
                Ok(0) => return Ok(Left::Finished),
                Ok(count) => count,
                Err(error) if unsupported(&error) => return Ok(Left::Unable),
                Err(error) => return Err(Stopped::Source(error)),
            };
            bulk = weigh(bulk, count);
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
        Ok(Left::Small)
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
