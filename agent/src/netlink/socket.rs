//! A socket to the kernel: requests, lists, and batches of changes.
//!
//! In: messages. Out: answers, each matched to its request by number; or an error. Blocking, for at most ten seconds an
//! answer: the kernel works on a request inside of the call that sends it, so waiting for readiness would be no gain.
//! [`OffThread`](super::OffThread) moves it off the async threads.

use std::fmt::Display;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, NetlinkAddr, getsockname, recv, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};
use thiserror::Error;

use super::{ACK, Body, Encoder, MESSAGE_HEADER, WireError, attributes, messages};

/// The kernel fills datagrams of a list up to 32 KiB if the reader has room for that.
pub const DATAGRAM: usize = 64 * 1024;
/// Seconds. The kernel answers at once; a reader must not hang if it never does.
pub const ANSWER_WITHIN: i64 = 10;
/// Changes in one call: if all are refused, their answers fit into the usual receive buffer of a socket.
const BATCH: usize = 128;

/// Attributes of an answer (`NLMSGERR_ATTR_*`).
const ANSWER_MESSAGE: u16 = 1;
const ANSWER_OFFSET: u16 = 2;

/// Why there is no answer, or not the wanted one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SocketError {
    /// The socket failed; whether a change was made is unknown. `ENOBUFS` says that messages were lost.
    #[error("{doing} the kernel failed: {errno}")]
    Failed {
        /// Sending to, or reading from.
        doing: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused.
    #[error("{errno}{}", explained(detail.as_ref()))]
    Refused {
        /// The kernel's error.
        errno: Errno,
        /// What it says about that.
        detail: Option<String>,
    },
    /// A message that makes no sense.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// What the kernel says about an error, in brackets.
pub(crate) fn explained(detail: Option<&String>) -> String {
    detail.map_or(String::new(), |detail| format!(" ({detail})"))
}

/// Several refusals in words: the first one is the cause; others may follow from it. `nothing` is what was refused if there is none.
pub(crate) fn summary(refusals: &[impl Display], nothing: &str) -> String {
    match refusals {
        [] => format!("the kernel refused {nothing}"),
        [first] => format!("the kernel refused {first}"),
        [first, rest @ ..] => format!("the kernel refused {first}; and {} more", rest.len()),
    }
}

impl SocketError {
    /// The kernel's error, if it refused.
    #[must_use]
    pub fn refusal(&self) -> Option<Errno> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// A change that the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its place in the batch.
    pub index: usize,
    /// The kernel's error as a positive number; some subsystems have numbers of their own.
    pub code: i32,
    /// The kernel's error.
    pub errno: Errno,
    /// What it says about that.
    pub detail: Option<String>,
}

/// A socket in the network namespace of the thread that opened it.
pub struct Socket {
    inner: netlink_sys::Socket,
    port: u32,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Opens a socket; see [`open`].
    pub fn open(
        protocol: isize,
        send_buffer: Option<usize>,
        receive_buffer: Option<usize>,
    ) -> Result<Self, Errno> {
        let inner = open(protocol, send_buffer, receive_buffer)?;
        let port = getsockname::<NetlinkAddr>(inner.as_raw_fd())?.pid();
        Ok(Self { inner, port, sequence: 0, buffer: vec![0; DATAGRAM] })
    }

    /// The number of this socket, which the kernel's notices about its changes carry.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// The number for the next message. Never 0, which is the number of messages that answer nothing.
    pub fn next_sequence(&mut self) -> u32 {
        self.reserve(1)
    }

    /// The first of so many numbers in a row, for messages to be sent.
    pub fn reserve(&mut self, count: u32) -> u32 {
        if self.sequence.checked_add(count).is_none() {
            self.sequence = 0;
        }
        let first = self.sequence + 1;
        self.sequence += count;
        first
    }

    /// Messages up to this number were sent.
    pub fn used(&mut self, last: u32) {
        self.sequence = last;
    }

    /// Sends messages. The kernel takes them whole or not at all.
    pub fn send(&mut self, messages: &[u8]) -> Result<(), SocketError> {
        loop {
            match send(self.inner.as_raw_fd(), messages, MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(SocketError::Failed { doing: "sending to", errno }),
            }
        }
    }

    /// A datagram; `ENOBUFS` if some were lost, `EAGAIN` if there is none in time.
    pub fn receive(&mut self, flags: MsgFlags) -> Result<&[u8], Errno> {
        receive(&self.inner, &mut self.buffer, flags)
    }

    /// Sends the request of this number, and returns the payload of the only answer; nothing if it is an acknowledgement.
    pub fn ask(&mut self, sequence: u32, request: &[u8]) -> Result<Option<Vec<u8>>, SocketError> {
        self.send(request)?;
        loop {
            let datagram = self.receive(MsgFlags::empty()).map_err(reading)?;
            for message in messages(datagram) {
                let message = message?;
                match message.body {
                    _ if message.sequence != sequence => {}
                    Body::Outcome { code: 0, .. } => return Ok(None),
                    Body::Outcome { code, rest } => return Err(refused(code, message.explained, rest)),
                    Body::Other { payload, .. } => return Ok(Some(payload.to_vec())),
                    _ => {}
                }
            }
        }
    }

    /// Sends the request of this number for a list, and hands the payload of each of its entries to `each` until that fails; whether
    /// nothing has disturbed it, or how `each` failed. The list is read to its end in any case: a socket has only one at a time.
    pub fn list<E>(
        &mut self,
        sequence: u32,
        request: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Result<bool, E>, SocketError> {
        self.send(request)?;
        let mut read = Ok(());
        let mut undisturbed = true;
        loop {
            let datagram = self.receive(MsgFlags::empty()).map_err(reading)?;
            for message in messages(datagram) {
                let message = message?;
                if message.sequence != sequence {
                    continue;
                }
                undisturbed &= !message.interrupted;
                match message.body {
                    Body::Done(0) => return Ok(read.map(|()| undisturbed)),
                    Body::Done(code) => return Err(refused(code, false, &[])),
                    Body::Outcome { code, rest } => return Err(refused(code, message.explained, rest)),
                    Body::Overrun => undisturbed = false,
                    Body::Other { payload, .. } if read.is_ok() => read = each(payload),
                    Body::Other { .. } => {}
                }
            }
        }
    }

    /// Makes `count` changes, of which each stands alone; those that the kernel refused, in order. `write` writes one message
    /// for the change of an index, with these flags and this number.
    pub fn change(
        &mut self,
        count: usize,
        mut write: impl FnMut(usize, u16, u32, &mut Encoder),
    ) -> Result<Vec<Refused>, SocketError> {
        let mut all = Vec::new();
        let mut begin = 0;
        while begin < count {
            let size = BATCH.min(count - begin);
            let first = self.reserve(u32::try_from(size).unwrap_or(u32::MAX));
            let mut encoder = Encoder::default();
            for (index, sequence) in (begin..begin + size).zip(first..) {
                // Whatever fails is answered anyway.
                let flags = if index + 1 == begin + size { super::REQUEST | ACK } else { super::REQUEST };
                write(index, flags, sequence, &mut encoder);
            }
            self.send(&encoder.finish())?;
            self.answers(begin, size, first, &mut all)?;
            begin += size;
        }
        Ok(all)
    }

    fn answers(
        &mut self,
        begin: usize,
        size: usize,
        first: u32,
        all: &mut Vec<Refused>,
    ) -> Result<(), SocketError> {
        loop {
            let datagram = self.receive(MsgFlags::empty()).map_err(reading)?;
            for message in messages(datagram) {
                let message = message?;
                let offset = usize::try_from(message.sequence.wrapping_sub(first)).unwrap_or(usize::MAX);
                let Body::Outcome { code, rest } = message.body else { continue };
                if offset >= size {
                    continue;
                }
                if let SocketError::Refused { errno, detail } = refused(code, message.explained, rest)
                    && code != 0
                {
                    all.push(Refused { index: begin + offset, code: code.saturating_neg(), errno, detail });
                }
                if offset + 1 == size {
                    return Ok(());
                }
            }
        }
    }
}

/// A socket of a protocol of [`netlink_sys::protocols`], in the network namespace of this thread. Its answers explain errors.
/// Larger buffers than usual, in bytes, are limits, not allocations, and not allowed in every namespace; then what needs them
/// fails, and says so.
pub(crate) fn open(
    protocol: isize,
    send_buffer: Option<usize>,
    receive_buffer: Option<usize>,
) -> Result<netlink_sys::Socket, Errno> {
    let open = || -> std::io::Result<netlink_sys::Socket> {
        let mut socket = netlink_sys::Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.set_cap_ack(true)?;
        socket.set_ext_ack(true)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_WITHIN))?;
        if let Some(size) = send_buffer {
            let _ = setsockopt(&socket, sockopt::SndBufForce, &size);
        }
        if let Some(size) = receive_buffer {
            let _ = setsockopt(&socket, sockopt::RcvBufForce, &size);
        }
        Ok(socket)
    };
    open().map_err(|error| errno(&error))
}

fn reading(errno: Errno) -> SocketError {
    SocketError::Failed { doing: "reading from", errno }
}

fn refused(code: i32, with_explanation: bool, rest: &[u8]) -> SocketError {
    let detail = if with_explanation { explanation(rest).0 } else { None };
    SocketError::Refused { errno: from_code(code), detail }
}

/// The kernel sends error numbers negated.
pub(crate) fn from_code(code: i32) -> Errno {
    Errno::from_raw(code.saturating_neg())
}

/// A datagram, or `ENOBUFS` if some were lost.
pub(crate) fn receive<'b>(
    socket: &impl AsRawFd,
    buffer: &'b mut [u8],
    flags: MsgFlags,
) -> Result<&'b [u8], Errno> {
    let length = loop {
        match recv(socket.as_raw_fd(), buffer, flags | MsgFlags::MSG_TRUNC) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    // Larger than anything that the kernel sends.
    buffer.get(..length).ok_or(Errno::EMSGSIZE)
}

pub(crate) fn errno(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or_default())
}

/// What the kernel says about an error, and where in the message it is.
pub(crate) fn explanation(rest: &[u8]) -> (Option<String>, Option<u32>) {
    let (mut text, mut offset) = (None, None);
    for attribute in attributes(rest.get(MESSAGE_HEADER..).unwrap_or_default()) {
        match attribute {
            Ok((ANSWER_MESSAGE, value)) => {
                let value = value.strip_suffix(&[0]).unwrap_or(value);
                text = Some(String::from_utf8_lossy(value).into_owned());
            }
            Ok((ANSWER_OFFSET, value)) => offset = value.try_into().ok().map(u32::from_ne_bytes),
            _ => {}
        }
    }
    (text, offset)
}
