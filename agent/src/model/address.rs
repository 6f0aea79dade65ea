//! Addresses as they appear in API objects.
//!
//! In: text. Out: canonical addresses and blocks, or nothing. Old objects may hold IPv4 addresses with leading zeros,
//! which the API server once accepted; they are decimal, never octal (reference §1.7, LB-4).

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use pointsman_crds::proxy_node_status::IpFamily;

/// The family of an address.
#[must_use]
pub fn family_of(address: IpAddr) -> IpFamily {
    match address {
        IpAddr::V4(_) => IpFamily::IPv4,
        IpAddr::V6(_) => IpFamily::IPv6,
    }
}

/// The address that the text means.
#[must_use]
pub fn parse_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    match text.parse::<IpAddr>() {
        Ok(address) => Some(address.to_canonical()),
        Err(_) => lenient_v4(text).map(IpAddr::V4),
    }
}

/// The block that the text means, without host bits.
#[must_use]
pub fn parse_network(text: &str) -> Option<IpNet> {
    let text = text.trim();
    if let Ok(net) = text.parse::<IpNet>() {
        return Some(net.trunc());
    }
    let (address, length) = text.split_once('/')?;
    Some(IpNet::V4(Ipv4Net::new(lenient_v4(address)?, length.parse().ok()?).ok()?.trunc()))
}

fn lenient_v4(text: &str) -> Option<Ipv4Addr> {
    let mut parts = text.split('.');
    let mut octets = [0; 4];
    for octet in &mut octets {
        let part = parts.next()?;
        if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let digits = part.trim_start_matches('0');
        *octet = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    }
    parts.next().is_none().then(|| Ipv4Addr::from(octets))
}
