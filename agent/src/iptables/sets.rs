//! ipsets that say what no endpoint takes, so that refusing costs three rules for any number of Services.
//!
//! In: [`Refusal`]s and ClusterIPs. Out: elements of sets, and the rules that look into these. Pure.
//!
//! A set is filled before rules stop serving, and emptied after they serve again: a Service that loses its last endpoint is
//! refused at once, one that gets its first is never refused any more. The set of ClusterIPs refuses what no Service
//! port takes (CIP-6, CIP-7); it holds our Services only, so one that another proxy serves stays untouched.

use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use super::render::{List, Refusal, Rule, commented};
use crate::ipset::{self, Changes, Contents, Kind};

/// One of our sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Set {
    /// Addresses and ports that are dropped.
    Drop,
    /// Addresses and ports that are rejected.
    Reject,
    /// ClusterIPs.
    ClusterIps,
}

/// A member of a set, as the tool prints it.
pub(crate) type Element = ipset::Element<Set>;

/// What must change in the sets.
pub(crate) type SetChanges = Changes<Set>;

impl Kind for Set {
    /// In the order of their rules.
    const ALL: &'static [Self] = &[Self::Drop, Self::Reject, Self::ClusterIps];

    fn name(self, family: IpFamily) -> String {
        let name = match (self, family) {
            (Self::Drop, IpFamily::IPv4) => "POINTSMAN-DROP",
            (Self::Reject, IpFamily::IPv4) => "POINTSMAN-REJECT",
            (Self::ClusterIps, IpFamily::IPv4) => "POINTSMAN-CLUSTER-IPS",
            (Self::Drop, IpFamily::IPv6) => "POINTSMAN-6-DROP",
            (Self::Reject, IpFamily::IPv6) => "POINTSMAN-6-REJECT",
            (Self::ClusterIps, IpFamily::IPv6) => "POINTSMAN-6-CLUSTER-IPS",
        };
        name.to_owned()
    }

    fn contents(self) -> Contents {
        match self {
            Self::Drop | Self::Reject => Contents::Frontends,
            Self::ClusterIps => Contents::Addresses,
        }
    }

    fn is_last(self) -> bool {
        self == Self::ClusterIps
    }
}

impl Set {
    fn rule(self, family: IpFamily) -> Rule {
        let (comment, fields) = match self {
            Self::Drop => ("kubernetes services without local endpoints", "dst,dst"),
            Self::Reject => ("kubernetes services without endpoints", "dst,dst"),
            Self::ClusterIps => ("kubernetes services that have no such port", "dst"),
        };
        let verdict = match (self, family) {
            (Self::Drop, _) => "DROP",
            (_, IpFamily::IPv4) => "REJECT --reject-with icmp-port-unreachable",
            (_, IpFamily::IPv6) => "REJECT --reject-with icmp6-port-unreachable",
        };
        format!("{} -m set --match-set {} {fields} -j {verdict}", commented(comment), self.name(family))
    }
}

/// The rules that look into the sets. Their order matters: what is dropped must not be rejected.
pub(crate) fn rules(family: IpFamily) -> Vec<Rule> {
    Set::ALL.iter().map(|set| set.rule(family)).collect()
}

/// A refusal as a member of a set; NodePorts are no members of any.
pub(crate) fn element(refusal: &Refusal) -> Option<Element> {
    let address = refusal.address.filter(|_| refusal.list != List::NodePortsWithoutEndpoint)?;
    let set = if refusal.drop { Set::Drop } else { Set::Reject };
    Some((set, format!("{address},{}:{}", refusal.protocol.lower(), refusal.port)))
}

/// A ClusterIP as a member of its set.
pub(crate) fn cluster_ip(address: IpAddr) -> Element {
    (Set::ClusterIps, address.to_string())
}
