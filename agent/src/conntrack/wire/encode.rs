//! Requests to the kernel.
//!
//! In: which entries to dump, or the entry to delete. Out: the bytes of one netlink message.

use std::net::{IpAddr, SocketAddr};

use pointsman_crds::proxy_node_status::IpFamily;

use super::{
    CT_DELETE, CT_GET, CTA_FILTER, CTA_ID, CTA_IP_V4_DST, CTA_IP_V4_SRC, CTA_IP_V6_DST, CTA_IP_V6_SRC,
    CTA_PROTO_DST_PORT, CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_STATUS, CTA_STATUS_MASK, CTA_TUPLE_IP,
    CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, CTA_TUPLE_ZONE, CTA_ZONE, Entry, NLMSG_HEADER, Protocol,
    STATUS_SEEN_REPLY, Zone, align,
};

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NESTED: u16 = 0x8000;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const FILTER_PROTO_NUM: u32 = 1 << 3;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// What the kernel leaves out of a dump. Kernels before 5.8 ignore it and send everything, which is only slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpFilter {
    /// All entries of the family.
    Family,
    /// Only those of this protocol; of TCP only those that nobody has answered, which are few.
    Protocol(Protocol),
}

/// Asks for the entries of a family.
#[must_use]
pub fn dump_request(family: IpFamily, filter: DumpFilter, sequence: u32) -> Vec<u8> {
    let mut request = Request::new(CT_GET, NLM_F_REQUEST | NLM_F_DUMP, sequence, number(family));
    if let DumpFilter::Protocol(protocol) = filter {
        request.nested(CTA_TUPLE_ORIG, |request| {
            request.nested(CTA_TUPLE_PROTO, |request| request.attribute(CTA_PROTO_NUM, &[protocol.number()]));
        });
        request.nested(CTA_FILTER, |request| {
            // These flags are in the kernel's order, unlike everything else in here.
            request.attribute(CTA_FILTER_ORIG_FLAGS, &FILTER_PROTO_NUM.to_ne_bytes());
        });
        if protocol == Protocol::Tcp {
            request.attribute(CTA_STATUS, &0_u32.to_be_bytes());
            request.attribute(CTA_STATUS_MASK, &STATUS_SEEN_REPLY.to_be_bytes());
        }
    }
    request.finish()
}

/// Deletes this entry: with its addresses, its zone, and its id. (Without addresses the kernel would delete everything;
/// they are not optional here.) The id is made of the addresses and the entry's place in memory: an entry that has
/// replaced it since is left alone, unless it has come to the same place, and then its next packet meets the rules again.
/// `acknowledge` asks for an answer also in case of success.
#[must_use]
pub fn delete_request(entry: &Entry, sequence: u32, acknowledge: bool) -> Vec<u8> {
    let flags = if acknowledge { NLM_F_REQUEST | NLM_F_ACK } else { NLM_F_REQUEST };
    let (source, destination) = (entry.original.source, entry.original.destination);
    let family = if destination.is_ipv4() { AF_INET } else { AF_INET6 };
    let mut request = Request::new(CT_DELETE, flags, sequence, family);
    request.nested(CTA_TUPLE_ORIG, |request| {
        request.nested(CTA_TUPLE_IP, |request| {
            request.address(source, CTA_IP_V4_SRC, CTA_IP_V6_SRC);
            request.address(destination, CTA_IP_V4_DST, CTA_IP_V6_DST);
        });
        request.nested(CTA_TUPLE_PROTO, |request| {
            request.attribute(CTA_PROTO_NUM, &[entry.protocol.number()]);
            request.attribute(CTA_PROTO_SRC_PORT, &source.port().to_be_bytes());
            request.attribute(CTA_PROTO_DST_PORT, &destination.port().to_be_bytes());
        });
        if let Some(Zone::Original(zone)) = entry.zone {
            request.attribute(CTA_TUPLE_ZONE, &zone.to_be_bytes());
        }
    });
    if let Some(Zone::Entry(zone)) = entry.zone {
        request.attribute(CTA_ZONE, &zone.to_be_bytes());
    }
    if let Some(id) = entry.id {
        request.attribute(CTA_ID, &id.to_be_bytes());
    }
    request.finish()
}

fn number(family: IpFamily) -> u8 {
    match family {
        IpFamily::IPv4 => AF_INET,
        IpFamily::IPv6 => AF_INET6,
    }
}

/// A message under construction. Lengths never come near the limits of their fields: nothing here has a variable size.
struct Request {
    bytes: Vec<u8>,
}

impl Request {
    fn new(kind: u16, flags: u16, sequence: u32, family: u8) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend([0; 4]);
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        debug_assert_eq!(bytes.len(), NLMSG_HEADER);
        bytes.extend([family, 0, 0, 0]);
        Self { bytes }
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.close(start);
    }

    fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend((kind | NESTED).to_ne_bytes());
        fill(self);
        self.close(start);
    }

    fn address(&mut self, address: SocketAddr, v4: u16, v6: u16) {
        match address.ip() {
            IpAddr::V4(address) => self.attribute(v4, &address.octets()),
            IpAddr::V6(address) => self.attribute(v6, &address.octets()),
        }
    }

    /// Writes the length of the attribute that starts here, and pads.
    fn close(&mut self, start: usize) {
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes.resize(align(self.bytes.len()), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes
    }
}
