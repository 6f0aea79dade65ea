//! The messages of rtnetlink (`linux/rtnetlink.h`, `linux/if_link.h`, `linux/if_addr.h`) that local routes need.
//!
//! In: what to do, or the payload of a message. Out: messages, or addresses. Pure: every byte sequence gives a value or a
//! [`WireError`], never a panic. Numbers are in the kernel's order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Change;
use crate::netlink::{CREATE, DUMP, Encoder, IPV4, IPV6, REQUEST, WireError, attributes, exactly, ne_u32};

const NEW_LINK: u16 = 16;
const DEL_LINK: u16 = 17;
const NEW_ADDRESS: u16 = 20;
const DEL_ADDRESS: u16 = 21;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const DEL_ROUTE: u16 = 25;
const GET_ROUTE: u16 = 26;

/// `NLM_F_EXCL`: not if it is there.
const EXCLUSIVE: u16 = 0x200;
/// `NLM_F_REPLACE`
const REPLACE: u16 = 0x100;

const LINK_NAME: u16 = 3;
const LINK_INFO: u16 = 18;
const LINK_INFO_KIND: u16 = 1;
const LINK_BY_FAMILY: u16 = 26;
/// `IFLA_INET6_ADDR_GEN_MODE`, and `IN6_ADDR_GEN_MODE_NONE`.
const LINK_IPV6_ADDRESSES: u16 = 8;
const NO_ADDRESSES: u8 = 1;
/// `IFF_UP`
const UP: u32 = 1;

/// The address of the other end of a point-to-point link; otherwise, and in IPv6, the address.
const ADDRESS_ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;

const ROUTE_DESTINATION: u16 = 1;
const ROUTE_DEVICE: u16 = 4;
const ROUTE_SOURCE: u16 = 7;
const ROUTE_TABLE: u16 = 15;

/// `RT_TABLE_LOCAL`
const LOCAL_TABLE: u8 = 255;
/// `RTPROT_KERNEL`: routing daemons leave such routes alone.
const BY_KERNEL: u8 = 2;
/// `RTPROT_UNSPEC`: to be removed, whoever made it.
const BY_ANYBODY: u8 = 0;
/// `RT_SCOPE_HOST`
const ON_HOST: u8 = 254;
/// `RTN_LOCAL`
const LOCAL: u8 = 2;
/// The size of `struct rtmsg`.
const ROUTE_HEADER: usize = 12;
/// The size of `struct ifaddrmsg`.
const ADDRESS_HEADER: usize = 8;

/// An address, or a route to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) address: IpAddr,
    /// The number of its device.
    pub(super) device: u32,
    /// Of a route.
    pub(super) source: Option<IpAddr>,
}

pub(super) fn add_device(to: &mut Encoder, flags: u16, sequence: u32, name: &str) {
    to.request(NEW_LINK, flags | CREATE | EXCLUSIVE, sequence, &link(0, 0), |to| {
        to.string(LINK_NAME, name);
        to.nested(LINK_INFO, |to| to.string(LINK_INFO_KIND, "dummy"));
    });
}

/// Otherwise the kernel gives it a link-local one.
pub(super) fn no_automatic_addresses(to: &mut Encoder, flags: u16, sequence: u32, index: u32) {
    to.request(NEW_LINK, flags, sequence, &link(index, 0), |to| {
        to.nested(LINK_BY_FAMILY, |to| {
            to.nested(IPV6.into(), |to| to.attribute(LINK_IPV6_ADDRESSES, &[NO_ADDRESSES]));
        });
    });
}

pub(super) fn turn_on(to: &mut Encoder, flags: u16, sequence: u32, index: u32) {
    to.request(NEW_LINK, flags, sequence, &link(index, UP), |_| {});
}

pub(super) fn remove_device(to: &mut Encoder, flags: u16, sequence: u32, index: u32) {
    to.request(DEL_LINK, flags, sequence, &link(index, 0), |_| {});
}

/// `struct ifinfomsg`: family and type, index, flags and which of them count.
fn link(index: u32, flags: u32) -> Vec<u8> {
    [0, index, flags, flags].into_iter().flat_map(u32::to_ne_bytes).collect()
}

pub(super) fn list_addresses(sequence: u32) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.request(GET_ADDRESS, REQUEST | DUMP, sequence, &[0; ADDRESS_HEADER], |_| {});
    encoder.finish()
}

/// All local routes of the device; also others, from a kernel that does not choose (before 4.20).
pub(super) fn list_routes(sequence: u32, index: u32) -> Vec<u8> {
    let mut header = [0; ROUTE_HEADER];
    header[4] = LOCAL_TABLE;
    let mut encoder = Encoder::default();
    encoder.request(GET_ROUTE, REQUEST | DUMP, sequence, &header, |to| {
        to.native(ROUTE_TABLE, LOCAL_TABLE.into());
        to.native(ROUTE_DEVICE, index);
    });
    encoder.finish()
}

pub(super) fn change(to: &mut Encoder, flags: u16, sequence: u32, index: u32, change: &Change) {
    match *change {
        Change::Add { address, source } => {
            route(to, NEW_ROUTE, flags | CREATE | EXCLUSIVE, sequence, index, address, source);
        }
        Change::Change { address, source } => {
            route(to, NEW_ROUTE, flags | CREATE | REPLACE, sequence, index, address, source);
        }
        Change::Remove(address) => route(to, DEL_ROUTE, flags, sequence, index, address, None),
        Change::Bind(address) => bound(to, NEW_ADDRESS, flags | CREATE | EXCLUSIVE, sequence, index, address),
        Change::Unbind(address) => bound(to, DEL_ADDRESS, flags, sequence, index, address),
    }
}

fn bound(to: &mut Encoder, kind: u16, flags: u16, sequence: u32, index: u32, address: IpAddr) {
    // struct ifaddrmsg: family, length of the prefix, flags, scope, device.
    let mut header = vec![family(address), bits(address), 0, ON_HOST];
    header.extend(index.to_ne_bytes());
    to.request(kind, flags, sequence, &header, |to| octets(to, ADDRESS_LOCAL, address));
}

fn route(
    to: &mut Encoder,
    kind: u16,
    flags: u16,
    sequence: u32,
    index: u32,
    address: IpAddr,
    source: Option<IpAddr>,
) {
    // struct rtmsg: family, lengths of both prefixes, TOS, table, protocol, scope, type, flags.
    let by = if kind == DEL_ROUTE { BY_ANYBODY } else { BY_KERNEL };
    let header = [family(address), bits(address), 0, 0, LOCAL_TABLE, by, ON_HOST, LOCAL, 0, 0, 0, 0];
    to.request(kind, flags, sequence, &header, |to| {
        octets(to, ROUTE_DESTINATION, address);
        to.native(ROUTE_DEVICE, index);
        if let Some(source) = source {
            octets(to, ROUTE_SOURCE, source);
        }
    });
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { IPV4 } else { IPV6 }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn octets(to: &mut Encoder, kind: u16, address: IpAddr) {
    match address {
        IpAddr::V4(address) => to.attribute(kind, &address.octets()),
        IpAddr::V6(address) => to.attribute(kind, &address.octets()),
    }
}

/// An address of a list; nothing if it is of another family.
pub(super) fn address(payload: &[u8]) -> Result<Option<Listed>, WireError> {
    let (header, content) =
        payload.split_first_chunk::<ADDRESS_HEADER>().ok_or(WireError::Missing("a header"))?;
    let [family, _, _, _, device @ ..] = *header;
    let (mut remote, mut local) = (None, None);
    for attribute in attributes(content) {
        match attribute? {
            (ADDRESS_ADDRESS, value) => remote = ip(family, value)?,
            (ADDRESS_LOCAL, value) => local = ip(family, value)?,
            _ => {}
        }
    }
    let device = u32::from_ne_bytes(device);
    Ok(local.or(remote).map(|address| Listed { address, device, source: None }))
}

/// A route of a list; nothing if it is not one to a single local address.
pub(super) fn local_route(payload: &[u8]) -> Result<Option<Listed>, WireError> {
    let (header, content) =
        payload.split_first_chunk::<ROUTE_HEADER>().ok_or(WireError::Missing("a header"))?;
    let [family, length, _, _, table, _, _, kind, ..] = *header;
    if (table, kind) != (LOCAL_TABLE, LOCAL) {
        return Ok(None);
    }
    let (mut destination, mut device, mut source) = (None, None, None);
    for attribute in attributes(content) {
        match attribute? {
            (ROUTE_DESTINATION, value) => destination = ip(family, value)?,
            (ROUTE_DEVICE, value) => device = Some(ne_u32("the device of a route", value)?),
            (ROUTE_SOURCE, value) => source = ip(family, value)?,
            _ => {}
        }
    }
    Ok(match (destination, device) {
        (Some(address), Some(device)) if length == bits(address) => Some(Listed { address, device, source }),
        _ => None,
    })
}

fn ip(family: u8, value: &[u8]) -> Result<Option<IpAddr>, WireError> {
    Ok(match family {
        IPV4 => Some(Ipv4Addr::from(exactly::<4>("an IPv4 address", value)?).into()),
        IPV6 => Some(Ipv6Addr::from(exactly::<16>("an IPv6 address", value)?).into()),
        _ => None,
    })
}
