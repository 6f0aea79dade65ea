//! Names of chains, the same as kube-proxy's, so that its rules are adopted in place and tools that know them go on
//! working (reference §2.3).
//!
//! In: Service ports, endpoints, blocks. Out: names of at most 28 characters, which is what both flavours take.

use std::fmt;

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use crate::model::Protocol;
use crate::plan::{Backend, PortId};

/// The longest name that both flavours take.
const LONGEST: usize = 28;
/// Prefixes of the names that mode ipvs has for the chains of a Service port.
pub(crate) const NEAR_PORT: &str = "PM-IPVS-SVC-";
/// See [`NEAR_PORT`].
pub(crate) const NEAR_ENDPOINT: &str = "PM-IPVS-SEP-";

/// The name of a chain, kept without an allocation: a node may hold 100,000 of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ChainName([u8; LONGEST]);

impl ChainName {
    /// The name; what is too long is cut, which none of the names made here is.
    pub(crate) fn new(name: &str) -> Self {
        let mut bytes = [0; LONGEST];
        for (to, from) in bytes.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        Self(bytes)
    }

    /// As text.
    pub(crate) fn as_str(&self) -> &str {
        let length = self.0.iter().position(|byte| *byte == 0).unwrap_or(LONGEST);
        std::str::from_utf8(&self.0[..length]).unwrap_or_default()
    }

    fn hashed(prefix: &str, parts: &[&str]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update(part.as_bytes());
        }
        Self::new(&format!("{prefix}{}", base32(&hash.finalize())))
    }

    /// Of a Service port: `KUBE-SVC-…` and its siblings.
    pub(crate) fn of_port(kind: PortChain, id: &PortId) -> Self {
        Self::hashed(kind.prefix(), &[&id.text(), id.protocol.lower()])
    }

    /// Of an endpoint: `KUBE-SEP-…`.
    pub(crate) fn of_endpoint(id: &PortId, backend: &Backend) -> Self {
        let endpoint = backend.socket().to_string();
        Self::hashed("KUBE-SEP-", &[&id.text(), id.protocol.lower(), &endpoint])
    }

    /// As [`Self::of_port`], of mode ipvs: chooses among the endpoints of policy Cluster.
    pub(crate) fn of_near_port(id: &PortId) -> Self {
        Self::hashed(NEAR_PORT, &[&id.text(), id.protocol.lower()])
    }

    /// As [`Self::of_endpoint`], of mode ipvs.
    pub(crate) fn of_near_endpoint(id: &PortId, backend: &Backend) -> Self {
        let endpoint = backend.socket().to_string();
        Self::hashed(NEAR_ENDPOINT, &[&id.text(), id.protocol.lower(), &endpoint])
    }

    /// Of a block of addresses: `KUBE-IP-10.96.0.0/12`. IPv6 blocks do not fit, so theirs are hashed.
    pub(crate) fn of_block(net: IpNet) -> Self {
        let text = net.to_string();
        match net {
            IpNet::V4(_) => Self::new(&format!("KUBE-IP-{text}")),
            IpNet::V6(_) => Self::hashed("KUBE-IP-", &[&text]),
        }
    }

    /// Of a range of NodePorts.
    pub(crate) fn of_node_ports(protocol: Protocol, first: u16, last: u16) -> Self {
        Self::new(&format!("KUBE-NP-{protocol}-{first}-{last}"))
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The chains of a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortChain {
    /// Chooses among the endpoints of policy Cluster.
    Cluster,
    /// Chooses among the endpoints of policy Local.
    Local,
    /// What comes from outside.
    External,
    /// What comes to a load balancer's address that not everybody may use.
    Firewall,
}

impl PortChain {
    fn prefix(self) -> &'static str {
        match self {
            Self::Cluster => "KUBE-SVC-",
            Self::Local => "KUBE-SVL-",
            Self::External => "KUBE-EXT-",
            Self::Firewall => "KUBE-FW-",
        }
    }
}

/// The first 16 characters of the base32 (RFC 4648) of a hash.
fn base32(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let first = bytes.iter().take(10).fold(0u128, |all, byte| all << 8 | u128::from(*byte));
    (0..16).rev().map(|digit| char::from(ALPHABET[(first >> (5 * digit)) as usize & 31])).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use pointsman_crds::proxy_node_status::IpFamily;

    use super::*;
    use crate::model::ObjectName;

    #[test]
    fn syn_18_names_are_those_of_kube_proxy() {
        let id = PortId::new(ObjectName::new("ns1", "svc1"), IpFamily::IPv4, "p80".into(), Protocol::Tcp);
        let backend = Backend {
            address: IpAddr::from([10, 180, 0, 1]),
            port: 80,
            local: true,
            weight: std::num::NonZeroU16::MIN,
        };
        assert_eq!(ChainName::of_port(PortChain::Cluster, &id).as_str(), "KUBE-SVC-XPGD46QRK7WJZT7O");
        assert_eq!(ChainName::of_port(PortChain::External, &id).as_str(), "KUBE-EXT-XPGD46QRK7WJZT7O");
        assert_eq!(ChainName::of_endpoint(&id, &backend).as_str(), "KUBE-SEP-SXIVWICOYRO3J4NJ");
    }

    #[test]
    fn syn_18_names_fit() {
        let long = |net: &str| ChainName::of_block(net.parse().unwrap()).as_str().len();
        assert_eq!(long("255.255.255.255/32"), 26);
        assert_eq!(long("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128"), 24);
        assert_eq!(
            ChainName::of_node_ports(Protocol::Sctp, 30000, 31023).as_str(),
            "KUBE-NP-SCTP-30000-31023"
        );
    }
}
