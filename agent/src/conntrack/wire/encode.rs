//! Requests to the kernel.
//!
//! In: which entries to dump, or the entry to delete. Out: the bytes of one netlink message.

use std::net::{IpAddr, SocketAddr};

use pointsman_crds::proxy_node_status::IpFamily;

use super::{
    CT_DELETE, CT_GET, CTA_FILTER, CTA_ID, CTA_IP_V4_DST, CTA_IP_V4_SRC, CTA_IP_V6_DST, CTA_IP_V6_SRC,
    CTA_PROTO_DST_PORT, CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_STATUS, CTA_STATUS_MASK, CTA_TUPLE_IP,
    CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, CTA_TUPLE_ZONE, CTA_ZONE, Entry, Protocol, STATUS_SEEN_REPLY, Zone,
};
use crate::netlink::{self, Encoder, Header};

const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const FILTER_PROTO_NUM: u32 = 1 << 3;

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
    let header = Header::new(CT_GET, netlink::REQUEST | netlink::DUMP, sequence, family);
    let mut encoder = Encoder::default();
    encoder.message(header, |request| {
        if let DumpFilter::Protocol(protocol) = filter {
            request.nested(CTA_TUPLE_ORIG, |request| {
                request.nested(CTA_TUPLE_PROTO, |request| {
                    request.attribute(CTA_PROTO_NUM, &[protocol.number()]);
                });
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
    });
    encoder.finish()
}

/// Deletes this entry: with its addresses, its zone, and its id. (Without addresses the kernel would delete everything;
/// they are not optional here.) The id is made of the addresses and the entry's place in memory: an entry that has
/// replaced it since is left alone, unless it has come to the same place, and then its next packet meets the rules again.
/// `acknowledge` asks for an answer also in case of success.
#[must_use]
pub fn delete_request(entry: &Entry, sequence: u32, acknowledge: bool) -> Vec<u8> {
    let flags = if acknowledge { netlink::REQUEST | netlink::ACK } else { netlink::REQUEST };
    let (source, destination) = (entry.original.source, entry.original.destination);
    let family = if destination.is_ipv4() { IpFamily::IPv4 } else { IpFamily::IPv6 };
    let mut encoder = Encoder::default();
    encoder.message(Header::new(CT_DELETE, flags, sequence, family), |request| {
        request.nested(CTA_TUPLE_ORIG, |request| {
            request.nested(CTA_TUPLE_IP, |request| {
                address(request, source, CTA_IP_V4_SRC, CTA_IP_V6_SRC);
                address(request, destination, CTA_IP_V4_DST, CTA_IP_V6_DST);
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
    });
    encoder.finish()
}

fn address(request: &mut Encoder, address: SocketAddr, v4: u16, v6: u16) {
    match address.ip() {
        IpAddr::V4(address) => request.attribute(v4, &address.octets()),
        IpAddr::V6(address) => request.attribute(v6, &address.octets()),
    }
}
