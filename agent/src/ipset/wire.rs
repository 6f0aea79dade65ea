//! The messages of the kernel's ipset interface (`linux/netfilter/ipset/ip_set.h`), and nothing else.
//!
//! In: what to ask or to do, or the payload of a message from the kernel. Out: the bytes of a message, or names and members. Pure:
//! every byte sequence gives a value or a [`WireError`], never a panic.
//!
//! Numbers are in network order, and say so.

use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use super::{Contents, LARGEST, Member, Operation};
use crate::netlink::{
    DUMP, Encoder, Header, IPV4, IPV6, NETFILTER_HEADER, REQUEST, WireError, attributes, be_u16, exactly,
};

/// `NFNL_SUBSYS_IPSET`
const SUBSYSTEM: u16 = 6 << 8;
/// The protocol that every kernel since 2.6.39 speaks.
pub(super) const PROTOCOL: u8 = 6;
/// Of each type the revision that knows SCTP. `ipset` of any age shows a set of that revision; all kernels since 3.10 have it.
const REVISION: u8 = 1;

/// Commands (`IPSET_CMD_*`).
const GET_PROTOCOL: u16 = 1;
const CREATE: u16 = 2;
const DESTROY: u16 = 3;
const LIST: u16 = 7;
const ADD: u16 = 9;
const DELETE: u16 = 10;

/// Attributes of commands (`IPSET_ATTR_*`).
const ATTR_PROTOCOL: u16 = 1;
const ATTR_NAME: u16 = 2;
const ATTR_TYPE: u16 = 3;
const ATTR_REVISION: u16 = 4;
const ATTR_FAMILY: u16 = 5;
const ATTR_FLAGS: u16 = 6;
const ATTR_DATA: u16 = 7;
const ATTR_MEMBERS: u16 = 8;

/// Attributes of a set or of a member.
const ADDRESS: u16 = 1;
const PORT: u16 = 4;
const LAST_PORT: u16 = 5;
const LAYER_4: u16 = 7;
const LARGEST_SIZE: u16 = 19;
const SECOND: u16 = 20;
const SECOND_LENGTH: u16 = 21;

/// Attributes of an address.
const ADDRESS_4: u16 = 1;
const ADDRESS_6: u16 = 2;

/// `NLA_F_NET_BYTEORDER`
const NETWORK_ORDER: u16 = 0x4000;
/// `IPSET_FLAG_LIST_SETNAME`
const NAMES_ONLY: u32 = 2;

/// Asks for the protocol; and thereby has the kernel load the module.
pub(super) fn get_protocol(sequence: u32) -> Vec<u8> {
    request(GET_PROTOCOL, REQUEST, sequence, |_| {})
}

/// Asks for the names of all sets.
pub(super) fn list_names(sequence: u32) -> Vec<u8> {
    request(LIST, REQUEST | DUMP, sequence, |to| to.number(ATTR_FLAGS | NETWORK_ORDER, NAMES_ONLY))
}

/// Asks for the members of a set.
pub(super) fn list_members(sequence: u32, set: &str) -> Vec<u8> {
    request(LIST, REQUEST | DUMP, sequence, |to| to.string(ATTR_NAME, set))
}

/// Makes a change. Without `NLM_F_EXCL`, what is there already is no error.
/// The kernel refuses a member without anything in it, which is what one that cannot be read becomes.
pub(super) fn operation(to: &mut Encoder, flags: u16, sequence: u32, operation: &Operation) {
    match operation {
        Operation::Create { set, contents, family } => message(to, CREATE, flags, sequence, |to| {
            to.string(ATTR_NAME, set);
            to.string(ATTR_TYPE, contents.name());
            to.attribute(ATTR_REVISION, &[REVISION]);
            let family = match (contents, family) {
                // Ports have none.
                (Contents::Ports, _) => 0,
                (_, IpFamily::IPv4) => IPV4,
                (_, IpFamily::IPv6) => IPV6,
            };
            to.attribute(ATTR_FAMILY, &[family]);
            to.nested(ATTR_DATA, |to| {
                if *contents == Contents::Ports {
                    to.attribute(PORT | NETWORK_ORDER, &0_u16.to_be_bytes());
                    to.attribute(LAST_PORT | NETWORK_ORDER, &u16::MAX.to_be_bytes());
                } else {
                    to.number(LARGEST_SIZE | NETWORK_ORDER, LARGEST);
                }
            });
        }),
        Operation::Add { set, member } | Operation::Remove { set, member } => {
            let command = if matches!(operation, Operation::Add { .. }) { ADD } else { DELETE };
            message(to, command, flags, sequence, |to| {
                to.string(ATTR_NAME, set);
                to.nested(ATTR_DATA, |to| write_member(to, &Member::parse(member).unwrap_or_default()));
            });
        }
        Operation::Destroy { set } => {
            message(to, DESTROY, flags, sequence, |to| to.string(ATTR_NAME, set));
        }
    }
}

/// The newest protocol of the kernel.
pub(super) fn protocol(payload: &[u8]) -> Result<u8, WireError> {
    match find(payload, ATTR_PROTOCOL)? {
        Some(value) => exactly("protocol of ipsets", value).map(|[protocol]| protocol),
        None => Err(WireError::Missing("protocol of ipsets")),
    }
}

/// The name of the set that a message is about.
pub(super) fn name(payload: &[u8]) -> Result<Option<String>, WireError> {
    let name = find(payload, ATTR_NAME)?.map(|name| name.strip_suffix(&[0]).unwrap_or(name));
    Ok(name.map(|name| String::from_utf8_lossy(name).into_owned()))
}

/// The members in a message about a set.
pub(super) fn members(payload: &[u8]) -> Result<Vec<Member>, WireError> {
    let Some(list) = find(payload, ATTR_MEMBERS)? else { return Ok(Vec::new()) };
    attributes(list).map(|entry| read_member(entry?.1)).collect()
}

fn request(command: u16, flags: u16, sequence: u32, fill: impl FnOnce(&mut Encoder)) -> Vec<u8> {
    let mut encoder = Encoder::default();
    message(&mut encoder, command, flags, sequence, fill);
    encoder.finish()
}

fn message(to: &mut Encoder, command: u16, flags: u16, sequence: u32, fill: impl FnOnce(&mut Encoder)) {
    let header = Header { kind: SUBSYSTEM | command, flags, sequence, family: IPV4, resource: 0 };
    to.message(header, |to| {
        to.attribute(ATTR_PROTOCOL, &[PROTOCOL]);
        fill(to);
    });
}

fn write_member(to: &mut Encoder, member: &Member) {
    if let Some(address) = member.address {
        to.nested(ADDRESS, |to| write_address(to, address));
    }
    if let Some(port) = member.port {
        to.attribute(PORT | NETWORK_ORDER, &port.to_be_bytes());
    }
    if let Some(protocol) = member.protocol {
        to.attribute(LAYER_4, &[protocol]);
    }
    if let Some((address, length)) = member.second {
        to.nested(SECOND, |to| write_address(to, address));
        if let Some(length) = length {
            to.attribute(SECOND_LENGTH, &[length]);
        }
    }
}

fn write_address(to: &mut Encoder, address: IpAddr) {
    match address {
        IpAddr::V4(address) => to.attribute(ADDRESS_4 | NETWORK_ORDER, &address.octets()),
        IpAddr::V6(address) => to.attribute(ADDRESS_6 | NETWORK_ORDER, &address.octets()),
    }
}

fn read_member(bytes: &[u8]) -> Result<Member, WireError> {
    let mut member = Member::default();
    let (mut second, mut length) = (None, None);
    for attribute in attributes(bytes) {
        match attribute? {
            (ADDRESS, value) => member.address = Some(read_address(value)?),
            (PORT, value) => member.port = Some(be_u16("port", value)?),
            (LAYER_4, value) => member.protocol = Some(exactly("protocol", value)?).map(|[number]| number),
            (SECOND, value) => second = Some(read_address(value)?),
            (SECOND_LENGTH, value) => length = Some(exactly("length", value)?).map(|[length]| length),
            _ => {}
        }
    }
    member.second = second.map(|address| (address, length));
    Ok(member)
}

fn read_address(bytes: &[u8]) -> Result<IpAddr, WireError> {
    for attribute in attributes(bytes) {
        match attribute? {
            (ADDRESS_4, value) => return exactly::<4>("address", value).map(IpAddr::from),
            (ADDRESS_6, value) => return exactly::<16>("address", value).map(IpAddr::from),
            _ => {}
        }
    }
    Err(WireError::Missing("address"))
}

/// The value of an attribute of a message.
fn find(payload: &[u8], wanted: u16) -> Result<Option<&[u8]>, WireError> {
    for attribute in attributes(payload.get(NETFILTER_HEADER..).unwrap_or_default()) {
        let (kind, value) = attribute?;
        if kind == wanted {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::MESSAGE_HEADER;

    fn payload(member: &str) -> Vec<u8> {
        let mut encoder = Encoder::default();
        let add = Operation::Add { set: "S".to_owned(), member: member.to_owned() };
        operation(&mut encoder, REQUEST, 7, &add);
        encoder.finish().split_off(MESSAGE_HEADER)
    }

    #[test]
    fn a_member_is_read_as_it_was_written() {
        for text in
            ["53", "10.96.0.10", "fd00::a,udp:53", "10.96.0.10,tcp:443,10.0.0.0/24", "fd00::a,tcp:1,fd00::b"]
        {
            let payload = payload(text);
            assert_eq!(name(&payload).unwrap().as_deref(), Some("S"));
            assert_eq!(protocol(&payload), Ok(PROTOCOL));
            let data = find(&payload, ATTR_DATA).unwrap().unwrap();
            assert_eq!(read_member(data).unwrap().to_string(), text);
            // The kernel lists them in another attribute.
            let mut listed = Encoder::default();
            listed.raw(&[0; NETFILTER_HEADER]);
            listed.nested(ATTR_MEMBERS, |to| to.attribute(ATTR_DATA, data));
            assert_eq!(members(&listed.finish()).unwrap().len(), 1, "{text}");
        }
    }

    #[test]
    fn bytes_that_make_no_sense_are_an_error() {
        let whole = payload("10.96.0.10,udp:53");
        for length in 0..whole.len() {
            let _ = (name(&whole[..length]), members(&whole[..length]), protocol(&whole[..length]));
            let _ = read_member(&whole[length..]);
        }
        assert_eq!(read_address(&[]), Err(WireError::Missing("address")));
        assert!(protocol(&[0; NETFILTER_HEADER]).is_err());
        assert!(read_member(&[5, 0, PORT.to_ne_bytes()[0], 0, 1]).is_err(), "one byte is no port");
    }
}
