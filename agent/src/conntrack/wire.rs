//! The kernel's messages about connection tracking entries (ctnetlink), and nothing else.
//!
//! In: bytes from a netlink socket, or what to ask. Out: typed messages and entries, or requests as bytes. Pure: every
//! byte sequence gives a value or a [`WireError`], never a panic.
//!
//! Written by hand because few attributes matter here; each is read once, in place, and a bad length is an
//! error instead of a missing value. Numbers are in the kernel's order in the headers and in network order inside.

mod encode;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::serving::Protocol;
pub use crate::netlink::WireError;
use crate::netlink::{self, NETFILTER_HEADER, attributes, be_u16, be_u32, exactly};
pub use encode::{DumpFilter, delete_request, dump_request};

/// Subsystem 1 (ctnetlink) in the high byte; 0 new, 1 get, 2 delete.
const CT_NEW: u16 = 0x100;
const CT_GET: u16 = 0x101;
const CT_DELETE: u16 = 0x102;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_PROTOINFO: u16 = 4;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_STATUS_MASK: u16 = 26;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_TUPLE_ZONE: u16 = 3;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;

/// A packet in the other direction was seen.
pub const STATUS_SEEN_REPLY: u32 = 1 << 1;
/// Kept even when the table is full.
pub const STATUS_ASSURED: u32 = 1 << 2;
const TCP_SYN_SENT: u8 = 1;
const TCP_SYN_RECV: u8 = 2;
const TCP_LAST_ACK: u8 = 6;

/// Addresses and ports of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// Where packets come from.
    pub source: SocketAddr,
    /// Where they go to.
    pub destination: SocketAddr,
}

/// A zone other than the default one: the same addresses can have an entry in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zone {
    /// Of both directions.
    Entry(u16),
    /// Of the original direction only.
    Original(u16),
}

/// An entry of a protocol that services have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The transport protocol.
    pub protocol: Protocol,
    /// As the client sent it.
    pub original: Tuple,
    /// As the answer comes: its source is where the flow leads.
    pub reply: Tuple,
    /// Flags of the kernel (`IPS_*`).
    pub status: u32,
    /// State of a TCP connection.
    pub tcp_state: Option<u8>,
    /// The zone, if it is not the default one.
    pub zone: Option<Zone>,
    /// What mostly tells this entry from a later one with the same addresses.
    pub id: Option<u32>,
}

impl Entry {
    /// A TCP connection that has been answered and has not ended.
    #[must_use]
    pub fn is_open_connection(&self) -> bool {
        let open = self.tcp_state.is_some_and(|state| (TCP_SYN_RECV..=TCP_LAST_ACK).contains(&state));
        self.protocol == Protocol::Tcp && open
    }

    /// One that leads elsewhere than its client sent it to.
    #[must_use]
    pub fn is_translated_connection(&self) -> bool {
        self.is_open_connection() && self.reply.source != self.original.destination
    }

    /// A TCP connection of which nothing but SYNs of the client was seen.
    #[must_use]
    pub fn is_unanswered_syn(&self) -> bool {
        self.protocol == Protocol::Tcp
            && self.tcp_state == Some(TCP_SYN_SENT)
            && self.status & (STATUS_SEEN_REPLY | STATUS_ASSURED) == 0
    }
}

/// A message from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The number of the request that it answers.
    pub sequence: u32,
    /// The dump it belongs to was disturbed, and may lack entries.
    pub interrupted: bool,
    /// What it says.
    pub body: Body<'a>,
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// An entry; see [`entry`].
    Entry(&'a [u8]),
    /// The end of a dump, with the number of an error, or 0.
    Done(i32),
    /// The outcome of a request: the number of an error, or 0.
    Outcome(i32),
    /// Messages were lost.
    Overrun,
    /// Nothing that matters here.
    Other,
}

/// The messages in one datagram. After an error there is no more.
pub fn messages(datagram: &[u8]) -> impl Iterator<Item = Result<Message<'_>, WireError>> {
    netlink::messages(datagram).map(|message| {
        let netlink::Message { sequence, interrupted, body, .. } = message?;
        let body = match body {
            netlink::Body::Done(code) => Body::Done(code),
            netlink::Body::Outcome { code, .. } => Body::Outcome(code),
            netlink::Body::Overrun => Body::Overrun,
            netlink::Body::Other { kind: CT_NEW, payload } => Body::Entry(payload),
            netlink::Body::Other { .. } => Body::Other,
        };
        Ok(Message { sequence, interrupted, body })
    })
}

/// The entry in the payload of a [`Body::Entry`], or `None` if services cannot have its protocol (ICMP and others).
pub fn entry(payload: &[u8]) -> Result<Option<Entry>, WireError> {
    let bytes = payload.get(NETFILTER_HEADER..).ok_or(WireError::Missing("a header"))?;
    let (mut original, mut reply, mut zone, mut original_zone) = (None, None, None, None);
    let (mut status, mut tcp_state, mut id) = (None, None, None);
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        match kind {
            CTA_TUPLE_ORIG => {
                let Some(tuple) = tuple(value)? else { return Ok(None) };
                original_zone = tuple.zone;
                original = Some(tuple);
            }
            CTA_TUPLE_REPLY => {
                let Some(tuple) = tuple(value)? else { return Ok(None) };
                reply = Some(tuple);
            }
            CTA_STATUS => status = Some(be_u32("status", value)?),
            CTA_PROTOINFO => tcp_state = protocol_state(value)?,
            CTA_ID => id = Some(be_u32("id", value)?),
            CTA_ZONE => zone = Some(be_u16("zone", value)?),
            _ => {}
        }
    }
    let original = original.ok_or(WireError::Missing("an original direction"))?;
    let reply = reply.ok_or(WireError::Missing("a reply direction"))?;
    Ok(Some(Entry {
        protocol: original.protocol,
        original: original.tuple,
        reply: reply.tuple,
        status: status.ok_or(WireError::Missing("a status"))?,
        tcp_state,
        zone: zone.map(Zone::Entry).or(original_zone.map(Zone::Original)),
        id,
    }))
}

struct ParsedTuple {
    protocol: Protocol,
    tuple: Tuple,
    zone: Option<u16>,
}

fn tuple(bytes: &[u8]) -> Result<Option<ParsedTuple>, WireError> {
    let (mut source, mut destination) = (None, None);
    let (mut number, mut source_port, mut destination_port, mut zone) = (None, None, None, None);
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        match kind {
            CTA_TUPLE_IP => {
                for attribute in attributes(value) {
                    let (kind, value) = attribute?;
                    match kind {
                        CTA_IP_V4_SRC | CTA_IP_V6_SRC => source = Some(address(kind, value)?),
                        CTA_IP_V4_DST | CTA_IP_V6_DST => destination = Some(address(kind, value)?),
                        _ => {}
                    }
                }
            }
            CTA_TUPLE_PROTO => {
                for attribute in attributes(value) {
                    let (kind, value) = attribute?;
                    match kind {
                        CTA_PROTO_NUM => number = Some(u8::from_be_bytes(exactly("protocol", value)?)),
                        CTA_PROTO_SRC_PORT => source_port = Some(be_u16("source port", value)?),
                        CTA_PROTO_DST_PORT => destination_port = Some(be_u16("destination port", value)?),
                        _ => {}
                    }
                }
            }
            CTA_TUPLE_ZONE => zone = Some(be_u16("zone", value)?),
            _ => {}
        }
    }
    let number = number.ok_or(WireError::Missing("a protocol"))?;
    let Some(protocol) = Protocol::from_number(number) else { return Ok(None) };
    let source = source.ok_or(WireError::Missing("a source address"))?;
    let destination = destination.ok_or(WireError::Missing("a destination address"))?;
    let source_port = source_port.ok_or(WireError::Missing("a source port"))?;
    let destination_port = destination_port.ok_or(WireError::Missing("a destination port"))?;
    let tuple = Tuple {
        source: SocketAddr::new(source, source_port),
        destination: SocketAddr::new(destination, destination_port),
    };
    Ok(Some(ParsedTuple { protocol, tuple, zone }))
}

fn address(kind: u16, value: &[u8]) -> Result<IpAddr, WireError> {
    match kind {
        CTA_IP_V4_SRC | CTA_IP_V4_DST => Ok(Ipv4Addr::from(exactly::<4>("IPv4 address", value)?).into()),
        _ => Ok(Ipv6Addr::from(exactly::<16>("IPv6 address", value)?).into()),
    }
}

/// The state of a TCP connection; SCTP has states too, which do not matter here.
fn protocol_state(bytes: &[u8]) -> Result<Option<u8>, WireError> {
    let mut state = None;
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        if kind == CTA_PROTOINFO_TCP {
            for attribute in attributes(value) {
                let (kind, value) = attribute?;
                if kind == CTA_PROTOINFO_TCP_STATE {
                    state = Some(u8::from_be_bytes(exactly("TCP state", value)?));
                }
            }
        }
    }
    Ok(state)
}

#[cfg(test)]
pub(super) mod tests;
