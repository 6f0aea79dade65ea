//! Reading what the kernel lists.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IpvsScheduler;

use super::{
    CONTROL_ID, DEST, DEST_ACTIVE, DEST_ADDRESS, DEST_FAMILY, DEST_INACTIVE, DEST_LOWER, DEST_METHOD,
    DEST_PERSISTENT, DEST_PORT, DEST_UPPER, DEST_WEIGHT, GENERIC_HEADER, HASHED, INFO_VERSION, MASQUERADE,
    PERSISTENT, SERVICE, SVC_ADDRESS, SVC_FAMILY, SVC_FLAGS, SVC_MARK, SVC_NETMASK, SVC_PORT, SVC_PROTOCOL,
    SVC_SCHEDULER, SVC_TIMEOUT, TIMEOUT_TCP, TIMEOUT_TCP_FIN, TIMEOUT_UDP, WireError,
};
use crate::ipvs::server::{
    InstalledReal, Key, Persistence, RealServer, Settings, Timeouts, VirtualServer, scheduler_name,
};
use crate::model::Protocol;
use crate::netlink::{IPV4, IPV6, attributes, be_u16, be_u32, exactly, ne_u16, ne_u32};

/// A virtual server that the kernel lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// One as we know them.
    Server(VirtualServer),
    /// One of another protocol or family; never ours.
    Unknown,
}

/// The number of the family, from the control family's answer.
pub fn family_id(payload: &[u8]) -> Result<u16, WireError> {
    let mut id = None;
    for attribute in content(payload)? {
        if let (CONTROL_ID, value) = attribute? {
            id = Some(ne_u16("the number of a family", value)?);
        }
    }
    id.ok_or(WireError::Missing("the number of a family"))
}

/// The version of IPVS, such as 1.2.1.
pub fn version(payload: &[u8]) -> Result<[u8; 3], WireError> {
    let mut version = None;
    for attribute in content(payload)? {
        if let (INFO_VERSION, value) = attribute? {
            let [_, major, minor, patch] = ne_u32("the version of IPVS", value)?.to_be_bytes();
            version = Some([major, minor, patch]);
        }
    }
    version.ok_or(WireError::Missing("the version of IPVS"))
}

/// The timeouts. A protocol that the kernel lacks has 0.
pub fn timeouts(payload: &[u8]) -> Result<Timeouts, WireError> {
    let mut timeouts = Timeouts::default();
    for attribute in content(payload)? {
        let (kind, value) = attribute?;
        match kind {
            TIMEOUT_TCP => timeouts.tcp = ne_u32("a timeout of TCP", value)?,
            TIMEOUT_TCP_FIN => timeouts.tcp_fin = ne_u32("a timeout of TCP", value)?,
            TIMEOUT_UDP => timeouts.udp = ne_u32("the timeout of UDP", value)?,
            _ => {}
        }
    }
    Ok(timeouts)
}

/// A virtual server of a list.
pub fn virtual_server(payload: &[u8]) -> Result<Parsed, WireError> {
    let (mut family, mut number, mut address, mut port, mut mark) = (None, None, None, None, None);
    let (mut scheduler, mut flags, mut timeout, mut netmask) = (None, 0, 0, None);
    for attribute in attributes(nested(payload, SERVICE, "a virtual server")?) {
        let (kind, value) = attribute?;
        match kind {
            SVC_FAMILY => family = Some(ne_u16("the family of a virtual server", value)?),
            SVC_PROTOCOL => number = Some(ne_u16("the protocol of a virtual server", value)?),
            SVC_ADDRESS => address = Some(exactly("the address of a virtual server", value)?),
            SVC_PORT => port = Some(be_u16("the port of a virtual server", value)?),
            SVC_MARK => mark = Some(ne_u32("the mark of a virtual server", value)?),
            SVC_SCHEDULER => scheduler = Some(name(value)),
            SVC_FLAGS => {
                let both: [u8; 8] = exactly("the flags of a virtual server", value)?;
                // The kernel's mask says nothing.
                flags = ne_u32("the flags of a virtual server", &both[..4])?;
            }
            SVC_TIMEOUT => timeout = ne_u32("the timeout of a virtual server", value)?,
            SVC_NETMASK => netmask = Some(value),
            _ => {}
        }
    }
    let Some(family) = known(family.ok_or(WireError::Missing("its family"))?) else {
        return Ok(Parsed::Unknown);
    };
    let key = match (mark, number) {
        (Some(mark), _) => Key::Mark { family, mark },
        (None, number) => {
            let number = number.ok_or(WireError::Missing("its protocol"))?;
            let Some(protocol) = u8::try_from(number).ok().and_then(Protocol::from_number) else {
                return Ok(Parsed::Unknown);
            };
            let address = address.ok_or(WireError::Missing("its address"))?;
            Key::new(protocol, ip(family, address), port.ok_or(WireError::Missing("its port"))?)
        }
    };
    let persistence = if flags & PERSISTENT == 0 {
        None
    } else {
        let netmask = netmask.ok_or(WireError::Missing("its netmask"))?;
        let prefix = match family {
            IpFamily::IPv4 => be_u32("a netmask", netmask)?.leading_ones(),
            IpFamily::IPv6 => ne_u32("a netmask", netmask)?,
        };
        Some(Persistence { timeout, prefix: u8::try_from(prefix).unwrap_or(u8::MAX) })
    };
    let settings = Settings {
        // Kernels since 4.2 can have servers without one.
        scheduler: scheduler.unwrap_or(Cow::Borrowed("")),
        flags: flags & !(PERSISTENT | HASHED),
        persistence,
    };
    Ok(Parsed::Server(VirtualServer { key, settings }))
}

/// A real server of a list, of a virtual server of this family. Nothing if it is of a family that we do not know.
pub fn real(payload: &[u8], of: IpFamily) -> Result<Option<InstalledReal>, WireError> {
    let (mut address, mut port, mut family) = (None, None, Some(of));
    let (mut weight, mut method, mut limits) = (None, MASQUERADE, 0);
    let (mut active, mut inactive, mut persistent) = (0, 0, 0);
    for attribute in attributes(nested(payload, DEST, "a real server")?) {
        let (kind, value) = attribute?;
        let number = |what| ne_u32(what, value);
        match kind {
            DEST_ADDRESS => address = Some(exactly("the address of a real server", value)?),
            DEST_PORT => port = Some(be_u16("the port of a real server", value)?),
            DEST_METHOD => method = number("the method of a real server")?,
            DEST_WEIGHT => weight = Some(number("the weight of a real server")?),
            DEST_UPPER | DEST_LOWER => limits |= number("a limit of a real server")?,
            DEST_ACTIVE => active = number("the connections of a real server")?,
            DEST_INACTIVE => inactive = number("the connections of a real server")?,
            DEST_PERSISTENT => persistent = number("the connections of a real server")?,
            DEST_FAMILY => family = known(ne_u16("the family of a real server", value)?),
            _ => {}
        }
    }
    let Some(family) = family else { return Ok(None) };
    let address = ip(family, address.ok_or(WireError::Missing("its address"))?);
    let address = SocketAddr::new(address, port.ok_or(WireError::Missing("its port"))?);
    let weight = weight.ok_or(WireError::Missing("its weight"))?;
    // Bit 0 to 2; the kernel says of one on this node that it is local (1), which masquerades as well.
    let plain = matches!(method & 0x7, MASQUERADE | LOCAL) && limits == 0;
    Ok(Some(InstalledReal { server: RealServer { address, weight }, plain, active, inactive, persistent }))
}

/// `IP_VS_CONN_F_LOCALNODE`
const LOCAL: u32 = 1;

fn content(payload: &[u8]) -> Result<impl Iterator<Item = Result<(u16, &[u8]), WireError>>, WireError> {
    Ok(attributes(payload.get(GENERIC_HEADER..).ok_or(WireError::Missing("a header"))?))
}

fn nested<'a>(payload: &'a [u8], wanted: u16, what: &'static str) -> Result<&'a [u8], WireError> {
    for attribute in content(payload)? {
        let (kind, value) = attribute?;
        if kind == wanted {
            return Ok(value);
        }
    }
    Err(WireError::Missing(what))
}

fn known(family: u16) -> Option<IpFamily> {
    match u8::try_from(family).ok()? {
        IPV4 => Some(IpFamily::IPv4),
        IPV6 => Some(IpFamily::IPv6),
        _ => None,
    }
}

fn ip(family: IpFamily, bytes: [u8; 16]) -> IpAddr {
    match family {
        IpFamily::IPv4 => {
            let [a, b, c, d, ..] = bytes;
            Ipv4Addr::new(a, b, c, d).into()
        }
        IpFamily::IPv6 => Ipv6Addr::from(bytes).into(),
    }
}

/// Thousands of servers have one of few names.
fn name(value: &[u8]) -> Cow<'static, str> {
    let value = value.strip_suffix(&[0]).unwrap_or(value);
    let known = SCHEDULERS.into_iter().map(scheduler_name).find(|name| name.as_bytes() == value);
    known.map_or_else(|| String::from_utf8_lossy(value).into_owned().into(), Cow::Borrowed)
}

const SCHEDULERS: [IpvsScheduler; 11] = [
    IpvsScheduler::Rr,
    IpvsScheduler::Wrr,
    IpvsScheduler::Lc,
    IpvsScheduler::Wlc,
    IpvsScheduler::Lblc,
    IpvsScheduler::Lblcr,
    IpvsScheduler::Sh,
    IpvsScheduler::Dh,
    IpvsScheduler::Sed,
    IpvsScheduler::Nq,
    IpvsScheduler::Mh,
];
