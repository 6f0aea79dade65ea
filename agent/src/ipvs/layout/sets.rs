//! The ipsets of mode ipvs: what the rules must know of each Service, so that their number is the same for any number of
//! Services.
//!
//! In: frontends, endpoints. Out: [`Element`]s. Pure.
//!
//! The first three sets hold every frontend that we have a virtual server for: its member is there before the server and goes after
//! it. So these sets also are the record, as durable as the servers themselves, of which servers are ours.

use std::net::{IpAddr, SocketAddr};

use pointsman_crds::proxy_node_status::IpFamily;

use crate::ipset::{self, Contents, Kind};
use crate::ipvs::server::Key;
use crate::model::Protocol;

/// One of our sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Set {
    /// ClusterIPs and ports.
    Internal,
    /// External IPs, addresses of load balancers, and NodePorts with the addresses that they answer on.
    External,
    /// The same, under policy Local for external traffic.
    Policy,
    /// Frontends whose packets are dropped.
    Drop,
    /// Frontends whose packets are dropped unless they come from local pods or the node itself.
    Away,
    /// Who may use a guarded frontend.
    Allowed,
    /// Frontends that not everybody may use.
    Guarded,
    /// Local endpoints with themselves: who reaches itself must see another source.
    Loops,
    /// Ports of health checks.
    Health,
    /// The addresses on our device.
    Addresses,
}

/// A member of a set, as the tool prints it.
pub(crate) type Element = ipset::Element<Set>;

/// What must change in the sets.
pub(crate) type SetChanges = ipset::Changes<Set>;

impl Kind for Set {
    const ALL: &'static [Self] = &[
        Self::Internal,
        Self::External,
        Self::Policy,
        Self::Drop,
        Self::Away,
        Self::Allowed,
        Self::Guarded,
        Self::Loops,
        Self::Health,
        Self::Addresses,
    ];

    fn name(self, family: IpFamily) -> String {
        let family = if family == IpFamily::IPv4 { "" } else { "6-" };
        let name = match self {
            Self::Internal => "INTERNAL",
            Self::External => "EXTERNAL",
            Self::Policy => "POLICY",
            Self::Drop => "DROP",
            Self::Away => "AWAY",
            Self::Allowed => "ALLOWED",
            Self::Guarded => "GUARDED",
            Self::Loops => "LOOPS",
            Self::Health => "HEALTH",
            Self::Addresses => "ADDRESSES",
        };
        format!("POINTSMAN-IPVS-{family}{name}")
    }

    fn contents(self) -> Contents {
        match self {
            Self::Internal | Self::External | Self::Policy | Self::Drop | Self::Away | Self::Guarded => {
                Contents::Frontends
            }
            Self::Allowed => Contents::FrontendsAndNetworks,
            Self::Loops => Contents::FrontendsAndAddresses,
            Self::Addresses => Contents::Addresses,
            Self::Health => Contents::Ports,
        }
    }

    fn is_last(self) -> bool {
        false
    }
}

impl Set {
    /// The sets that say which virtual servers are ours.
    pub(crate) const FRONTENDS: [Self; 3] = [Self::Internal, Self::External, Self::Policy];
}

/// A frontend as a member.
pub(crate) fn frontend(address: IpAddr, protocol: Protocol, port: u16) -> String {
    format!("{address},{}:{port}", protocol.lower())
}

/// The virtual server that a member of [`Set::FRONTENDS`] stands for.
pub(crate) fn key((set, member): &Element) -> Option<Key> {
    let (address, rest) = member.split_once(',').filter(|_| Set::FRONTENDS.contains(set))?;
    let (protocol, port) = rest.split_once(':')?;
    let protocol = Protocol::ALL.into_iter().find(|known| known.lower() == protocol)?;
    let address = SocketAddr::new(address.parse().ok()?, port.parse().ok()?);
    Some(Key::Address { protocol, address })
}
