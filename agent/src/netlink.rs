//! The framing of netlink: messages and attributes.
//!
//! In: bytes from a netlink [`socket`], or what to say. Out: messages and attributes that borrow from them, or the bytes of
//! messages. Pure, but for the socket: every byte sequence gives a value or a [`WireError`], never a panic. What attributes mean is said where
//! they are used.
//!
//! Numbers are in the kernel's order in the headers; netfilter has network order inside.

mod encode;
mod off_thread;
pub mod socket;

use thiserror::Error;

pub use encode::{Encoder, Header};
pub use off_thread::OffThread;
pub use socket::{Refused, Socket, SocketError};

/// Of a message's header.
pub const MESSAGE_HEADER: usize = 16;
/// Of netfilter's header, behind that of each of its messages.
pub const NETFILTER_HEADER: usize = 4;
/// Of an attribute's header.
pub const ATTRIBUTE_HEADER: usize = 4;

pub(crate) const KIND_ERROR: u16 = 2;
pub(crate) const KIND_DONE: u16 = 3;
pub(crate) const KIND_OVERRUN: u16 = 4;

/// `NLM_F_REQUEST`
pub const REQUEST: u16 = 1;
/// `NLM_F_ACK`: answer also in case of success.
pub const ACK: u16 = 4;
/// `NLM_F_DUMP`: list everything.
pub const DUMP: u16 = 0x300;
/// `NLM_F_CREATE`
pub const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`
pub const APPEND: u16 = 0x800;
pub(crate) const INTERRUPTED: u16 = 0x10;
const EXPLAINED: u16 = 0x300;

/// `AF_INET`
pub const IPV4: u8 = 2;
/// `AF_INET6`
pub const IPV6: u8 = 10;

/// Bytes that are not what the kernel sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The length in a message's header does not fit.
    #[error("a netlink message of {claimed} bytes in a buffer with {available}")]
    Message {
        /// Length by the header.
        claimed: usize,
        /// Bytes left.
        available: usize,
    },
    /// The length in an attribute's header does not fit.
    #[error("an attribute of {claimed} bytes where {available} are left")]
    Attribute {
        /// Length by the header.
        claimed: usize,
        /// Bytes left.
        available: usize,
    },
    /// An attribute has another size than its type.
    #[error("{what} has {length} bytes")]
    Size {
        /// Which attribute.
        what: &'static str,
        /// Its size.
        length: usize,
    },
    /// A message without something that every such message has.
    #[error("an entry without {0}")]
    Missing(&'static str),
}

/// A message from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The number of the request that it answers.
    pub sequence: u32,
    /// The socket whose request caused it.
    pub port: u32,
    /// The dump it belongs to was disturbed, and may lack entries.
    pub interrupted: bool,
    /// An outcome says more behind the header of the request, which comes without its content (`NLM_F_CAPPED` and
    /// `NLM_F_ACK_TLVS`).
    pub explained: bool,
    /// What it says.
    pub body: Body<'a>,
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// The end of a dump, with the number of an error, or 0.
    Done(i32),
    /// The outcome of a request.
    Outcome {
        /// The number of an error, or 0.
        code: i32,
        /// Everything behind that: the request's header, and what the kernel adds.
        rest: &'a [u8],
    },
    /// Messages were lost.
    Overrun,
    /// Anything else.
    Other {
        /// The type.
        kind: u16,
        /// The content.
        payload: &'a [u8],
    },
}

/// The messages in one datagram. After an error there is no more.
pub fn messages(datagram: &[u8]) -> impl Iterator<Item = Result<Message<'_>, WireError>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (message, next) = match message(rest) {
            Ok(parts) => parts,
            Err(error) => {
                rest = &[];
                return Some(Err(error));
            }
        };
        rest = next;
        Some(Ok(message))
    })
}

fn message(bytes: &[u8]) -> Result<(Message<'_>, &[u8]), WireError> {
    let broken = |claimed| WireError::Message { claimed, available: bytes.len() };
    let (header, _) = bytes.split_first_chunk::<MESSAGE_HEADER>().ok_or(broken(MESSAGE_HEADER))?;
    let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, p0, p1, p2, p3] = *header;
    let claimed = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    let payload = bytes.get(MESSAGE_HEADER..claimed).ok_or(broken(claimed))?;
    let number = || payload.split_first_chunk().map(|(bytes, rest)| (i32::from_ne_bytes(*bytes), rest));
    let body = match u16::from_ne_bytes([k0, k1]) {
        KIND_ERROR => {
            let (code, rest) = number().ok_or(broken(claimed))?;
            Body::Outcome { code, rest }
        }
        // Old kernels send no number here.
        KIND_DONE => Body::Done(number().map_or(0, |(code, _)| code)),
        KIND_OVERRUN => Body::Overrun,
        kind => Body::Other { kind, payload },
    };
    let flags = u16::from_ne_bytes([f0, f1]);
    let message = Message {
        sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
        port: u32::from_ne_bytes([p0, p1, p2, p3]),
        interrupted: flags & INTERRUPTED != 0,
        explained: flags & EXPLAINED == EXPLAINED,
        body,
    };
    // Messages are aligned, the last one need not be.
    Ok((message, bytes.get(align(claimed)..).unwrap_or_default()))
}

/// Type and value of each attribute. After an error there is no more.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), WireError>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let available = rest.len();
        let parsed = rest.first_chunk::<ATTRIBUTE_HEADER>().and_then(|[l0, l1, k0, k1]| {
            let claimed = usize::from(u16::from_ne_bytes([*l0, *l1]));
            let value = rest.get(ATTRIBUTE_HEADER..claimed)?;
            // The two highest bits are flags about the value.
            Some((claimed, u16::from_ne_bytes([*k0, *k1]) & 0x3fff, value))
        });
        let Some((claimed, kind, value)) = parsed else {
            let claimed =
                rest.first_chunk().map_or(ATTRIBUTE_HEADER, |length| u16::from_ne_bytes(*length).into());
            rest = &[];
            return Some(Err(WireError::Attribute { claimed, available }));
        };
        rest = rest.get(align(claimed)..).unwrap_or_default();
        Some(Ok((kind, value)))
    })
}

/// Rounded up to where the next message or attribute begins.
#[must_use]
pub const fn align(length: usize) -> usize {
    length.saturating_add(3) & !3
}

/// The value, if it has this length.
pub fn exactly<const N: usize>(what: &'static str, value: &[u8]) -> Result<[u8; N], WireError> {
    value.try_into().map_err(|_| WireError::Size { what, length: value.len() })
}

/// A number of 16 bits in network order.
pub fn be_u16(what: &'static str, value: &[u8]) -> Result<u16, WireError> {
    exactly(what, value).map(u16::from_be_bytes)
}

/// A number of 32 bits in network order.
pub fn be_u32(what: &'static str, value: &[u8]) -> Result<u32, WireError> {
    exactly(what, value).map(u32::from_be_bytes)
}

/// A number of 64 bits in network order.
pub fn be_u64(what: &'static str, value: &[u8]) -> Result<u64, WireError> {
    exactly(what, value).map(u64::from_be_bytes)
}

/// A number of 16 bits in the kernel's order.
pub fn ne_u16(what: &'static str, value: &[u8]) -> Result<u16, WireError> {
    exactly(what, value).map(u16::from_ne_bytes)
}

/// A number of 32 bits in the kernel's order.
pub fn ne_u32(what: &'static str, value: &[u8]) -> Result<u32, WireError> {
    exactly(what, value).map(u32::from_ne_bytes)
}

/// Bytes from their hexadecimal digits, which blanks may part.
#[cfg(test)]
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.split_whitespace().flat_map(str::bytes).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}
