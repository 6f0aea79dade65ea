//! The messages of IPVS's generic netlink (`linux/ip_vs.h`), and nothing else.
//!
//! In: what to ask or to do, or the payload of a message from the kernel. Out: the bytes of a message, or typed servers.
//! Pure: every byte sequence gives a value or a [`WireError`], never a panic.
//!
//! Numbers are in the kernel's order, but for ports and IPv4's netmask.

mod parse;

use std::net::{IpAddr, SocketAddr};

use pointsman_crds::proxy_node_status::IpFamily;

use super::server::{Key, Operation, Persistence, RealServer, Timeouts, VirtualServer};
use crate::netlink::{DUMP, Encoder, IPV4, IPV6, REQUEST, WireError};

pub use parse::{Parsed, family_id, real, timeouts, version, virtual_server};

/// The name of the family.
const FAMILY: &str = "IPVS";
/// `GENL_ID_CTRL`: the family that knows the others.
const CONTROL: u16 = 0x10;
const CONTROL_GET_FAMILY: u8 = 3;
const CONTROL_ID: u16 = 1;
const CONTROL_NAME: u16 = 2;

/// Of generic netlink's header, behind that of each message: command, version, and two bytes that are 0.
const GENERIC_HEADER: usize = 4;
/// `IPVS_GENL_VERSION`, and that of the control family.
const VERSION: u8 = 1;

/// Commands (`IPVS_CMD_*`).
const NEW_SERVICE: u8 = 1;
const SET_SERVICE: u8 = 2;
const DEL_SERVICE: u8 = 3;
const GET_SERVICE: u8 = 4;
const NEW_DEST: u8 = 5;
const SET_DEST: u8 = 6;
const DEL_DEST: u8 = 7;
const GET_DEST: u8 = 8;
const SET_CONFIG: u8 = 12;
const GET_CONFIG: u8 = 13;
const GET_INFO: u8 = 15;

/// Attributes of commands (`IPVS_CMD_ATTR_*`).
const SERVICE: u16 = 1;
const DEST: u16 = 2;
const TIMEOUT_TCP: u16 = 4;
const TIMEOUT_TCP_FIN: u16 = 5;
const TIMEOUT_UDP: u16 = 6;

/// Attributes of a virtual server (`IPVS_SVC_ATTR_*`).
const SVC_FAMILY: u16 = 1;
const SVC_PROTOCOL: u16 = 2;
const SVC_ADDRESS: u16 = 3;
const SVC_PORT: u16 = 4;
const SVC_MARK: u16 = 5;
const SVC_SCHEDULER: u16 = 6;
const SVC_FLAGS: u16 = 7;
const SVC_TIMEOUT: u16 = 8;
const SVC_NETMASK: u16 = 9;

/// Attributes of a real server (`IPVS_DEST_ATTR_*`).
const DEST_ADDRESS: u16 = 1;
const DEST_PORT: u16 = 2;
const DEST_METHOD: u16 = 3;
const DEST_WEIGHT: u16 = 4;
const DEST_UPPER: u16 = 5;
const DEST_LOWER: u16 = 6;
const DEST_ACTIVE: u16 = 7;
const DEST_INACTIVE: u16 = 8;
const DEST_PERSISTENT: u16 = 9;
/// Kernels since 3.18 have it.
const DEST_FAMILY: u16 = 11;

/// Attributes of the general information (`IPVS_INFO_ATTR_*`).
const INFO_VERSION: u16 = 1;

/// `IP_VS_SVC_F_PERSISTENT`
const PERSISTENT: u32 = 0x1;
/// `IP_VS_SVC_F_HASHED`: the kernel sets it by itself, and refuses to add a server with it.
const HASHED: u32 = 0x2;
/// `IP_VS_CONN_F_MASQ`
const MASQUERADE: u32 = 0;

/// Asks for the number of the family, and thereby has the kernel load the module.
#[must_use]
pub fn get_family(sequence: u32) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.request(CONTROL, REQUEST, sequence, &header(CONTROL_GET_FAMILY), |to| {
        to.string(CONTROL_NAME, FAMILY);
    });
    encoder.finish()
}

/// Asks for the version of IPVS.
#[must_use]
pub fn get_info(family: u16, sequence: u32) -> Vec<u8> {
    command(family, REQUEST, sequence, GET_INFO, |_| {})
}

/// Asks for the timeouts.
#[must_use]
pub fn get_timeouts(family: u16, sequence: u32) -> Vec<u8> {
    command(family, REQUEST, sequence, GET_CONFIG, |_| {})
}

/// Changes the timeouts, but for those that are 0.
pub fn set_timeouts(to: &mut Encoder, family: u16, flags: u16, sequence: u32, timeouts: Timeouts) {
    to.request(family, flags, sequence, &header(SET_CONFIG), |to| {
        to.native(TIMEOUT_TCP, timeouts.tcp);
        to.native(TIMEOUT_TCP_FIN, timeouts.tcp_fin);
        to.native(TIMEOUT_UDP, timeouts.udp);
    });
}

/// Asks for all virtual servers.
#[must_use]
pub fn list_servers(family: u16, sequence: u32) -> Vec<u8> {
    command(family, REQUEST | DUMP, sequence, GET_SERVICE, |_| {})
}

/// Asks for the real servers of a virtual server. Of one that is not there the kernel lists none.
#[must_use]
pub fn list_reals(family: u16, sequence: u32, server: &Key) -> Vec<u8> {
    command(family, REQUEST | DUMP, sequence, GET_DEST, |to| to.nested(SERVICE, |to| identity(to, server)))
}

/// Makes a change.
pub fn operation(to: &mut Encoder, family: u16, flags: u16, sequence: u32, operation: &Operation) {
    let command = match operation {
        Operation::AddServer(_) => NEW_SERVICE,
        Operation::EditServer(_) => SET_SERVICE,
        Operation::RemoveServer(_) => DEL_SERVICE,
        Operation::AddReal { .. } => NEW_DEST,
        Operation::EditReal { .. } => SET_DEST,
        Operation::RemoveReal { .. } => DEL_DEST,
    };
    to.request(family, flags, sequence, &header(command), |to| match operation {
        Operation::AddServer(server) | Operation::EditServer(server) => {
            to.nested(SERVICE, |to| settings(to, server));
        }
        Operation::RemoveServer(server) => to.nested(SERVICE, |to| identity(to, server)),
        Operation::AddReal { server, real } | Operation::EditReal { server, real } => {
            to.nested(SERVICE, |to| identity(to, server));
            to.nested(DEST, |to| real_server(to, real));
        }
        Operation::RemoveReal { server, real } => {
            to.nested(SERVICE, |to| identity(to, server));
            to.nested(DEST, |to| real_identity(to, *real));
        }
    });
}

fn command(family: u16, flags: u16, sequence: u32, command: u8, fill: impl FnOnce(&mut Encoder)) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.request(family, flags, sequence, &header(command), fill);
    encoder.finish()
}

fn header(command: u8) -> [u8; GENERIC_HEADER] {
    [command, VERSION, 0, 0]
}

fn identity(to: &mut Encoder, server: &Key) {
    let family = match server.family() {
        IpFamily::IPv4 => IPV4,
        IpFamily::IPv6 => IPV6,
    };
    to.attribute(SVC_FAMILY, &u16::from(family).to_ne_bytes());
    match server {
        Key::Address { protocol, address } => {
            to.attribute(SVC_PROTOCOL, &u16::from(protocol.number()).to_ne_bytes());
            to.attribute(SVC_ADDRESS, &union(address.ip()));
            to.attribute(SVC_PORT, &address.port().to_be_bytes());
        }
        Key::Mark { mark, .. } => to.native(SVC_MARK, *mark),
    }
}

fn settings(to: &mut Encoder, server: &VirtualServer) {
    identity(to, &server.key);
    let settings = &server.settings;
    to.string(SVC_SCHEDULER, &settings.scheduler);
    let persistent = if settings.persistence.is_some() { PERSISTENT } else { 0 };
    // The flags, and which of them count: all, so that an edited server keeps none.
    let flags = settings.flags & !(PERSISTENT | HASHED) | persistent;
    to.attribute(SVC_FLAGS, &[flags.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat());
    // The kernel wants both also without persistence.
    let ipv4 = server.key.family() == IpFamily::IPv4;
    let whole = Persistence { timeout: 0, prefix: if ipv4 { 32 } else { 128 } };
    let Persistence { timeout, prefix } = settings.persistence.unwrap_or(whole);
    to.native(SVC_TIMEOUT, timeout);
    if ipv4 {
        let mask = u32::MAX.checked_shl(32_u32.saturating_sub(prefix.into())).unwrap_or(0);
        to.number(SVC_NETMASK, mask);
    } else {
        to.native(SVC_NETMASK, prefix.into());
    }
}

fn real_identity(to: &mut Encoder, address: SocketAddr) {
    to.attribute(DEST_ADDRESS, &union(address.ip()));
    to.attribute(DEST_PORT, &address.port().to_be_bytes());
    let family = if address.is_ipv4() { IPV4 } else { IPV6 };
    to.attribute(DEST_FAMILY, &u16::from(family).to_ne_bytes());
}

fn real_server(to: &mut Encoder, real: &RealServer) {
    real_identity(to, real.address);
    to.native(DEST_METHOD, MASQUERADE);
    to.native(DEST_WEIGHT, real.weight);
    to.native(DEST_UPPER, 0);
    to.native(DEST_LOWER, 0);
}

/// `union nf_inet_addr`: as long as an IPv6 address.
fn union(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            bytes
        }
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests;
