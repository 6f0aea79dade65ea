//! ipsets that say what no endpoint takes, so that refusing costs three rules for any number of Services.
//!
//! In: [`Refusal`]s and ClusterIPs. Out: elements of sets and the input of `ipset restore`. Pure.
//!
//! A set is filled before rules stop serving, and emptied after they serve again: a Service that loses its last endpoint is
//! refused at once, one that gets its first is never refused any more. The set of ClusterIPs refuses what no Service
//! port takes (CIP-6, CIP-7); it holds our Services only, so one that another proxy serves stays untouched.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use super::render::{List, Refusal, Rule, commented};

/// One of our sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Set {
    /// Addresses and ports that are dropped.
    Drop,
    /// Addresses and ports that are rejected.
    Reject,
    /// ClusterIPs.
    ClusterIps,
}

/// A member of a set, as the tool prints it.
pub(super) type Element = (Set, String);

impl Set {
    /// All of them, in the order of their rules.
    pub(super) const ALL: [Self; 3] = [Self::Drop, Self::Reject, Self::ClusterIps];

    /// Its name.
    pub(super) fn name(self, family: IpFamily) -> &'static str {
        match (self, family) {
            (Self::Drop, IpFamily::IPv4) => "POINTSMAN-DROP",
            (Self::Reject, IpFamily::IPv4) => "POINTSMAN-REJECT",
            (Self::ClusterIps, IpFamily::IPv4) => "POINTSMAN-CLUSTER-IPS",
            (Self::Drop, IpFamily::IPv6) => "POINTSMAN-6-DROP",
            (Self::Reject, IpFamily::IPv6) => "POINTSMAN-6-REJECT",
            (Self::ClusterIps, IpFamily::IPv6) => "POINTSMAN-6-CLUSTER-IPS",
        }
    }

    fn create(self, family: IpFamily) -> String {
        let kind = if self == Self::ClusterIps { "hash:ip" } else { "hash:ip,port" };
        let family_name = if family == IpFamily::IPv4 { "inet" } else { "inet6" };
        format!("create {} {kind} family {family_name} maxelem 1048576", self.name(family))
    }

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
pub(super) fn rules(family: IpFamily) -> Vec<Rule> {
    Set::ALL.iter().map(|set| set.rule(family)).collect()
}

/// A refusal as a member of a set; NodePorts are no members of any.
pub(super) fn element(refusal: &Refusal) -> Option<Element> {
    let address = refusal.address.filter(|_| refusal.list != List::NodePortsWithoutEndpoint)?;
    let set = if refusal.drop { Set::Drop } else { Set::Reject };
    Some((set, format!("{address},{}:{}", refusal.protocol.lower(), refusal.port)))
}

/// A ClusterIP as a member of its set.
pub(super) fn cluster_ip(address: IpAddr) -> Element {
    (Set::ClusterIps, address.to_string())
}

/// What must change in the sets, before and after the rules change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SetChanges {
    /// To add; those of [`Set::ClusterIps`] after the rules.
    pub added: BTreeSet<Element>,
    /// To remove, after the rules.
    pub removed: BTreeSet<Element>,
}

impl SetChanges {
    /// Input for the tool, before the rules change. `create` makes the sets, too.
    pub(super) fn before(&self, family: IpFamily, create: bool) -> String {
        let mut text = String::new();
        for set in Set::ALL.iter().filter(|_| create) {
            let _ = writeln!(text, "{}", set.create(family));
        }
        for (set, element) in self.added.iter().filter(|(set, _)| *set != Set::ClusterIps) {
            let _ = writeln!(text, "add {} {element}", set.name(family));
        }
        text
    }

    /// Input for the tool, after the rules have changed.
    pub(super) fn after(&self, family: IpFamily) -> String {
        let mut text = String::new();
        for (set, element) in &self.removed {
            let _ = writeln!(text, "del {} {element}", set.name(family));
        }
        for (set, element) in self.added.iter().filter(|(set, _)| *set == Set::ClusterIps) {
            let _ = writeln!(text, "add {} {element}", set.name(family));
        }
        text
    }

    /// Leaves out what is both added and removed.
    pub(super) fn settle(&mut self) {
        let both: Vec<Element> = self.added.intersection(&self.removed).cloned().collect();
        for element in both {
            self.added.remove(&element);
            self.removed.remove(&element);
        }
    }
}

/// The members of our sets in what `ipset save` prints.
pub(super) fn parse(text: &str, family: IpFamily) -> BTreeSet<Element> {
    let member = |line: &str| {
        let mut words = line.strip_prefix("add ")?.split_whitespace();
        let name = words.next()?;
        let set = Set::ALL.into_iter().find(|set| set.name(family) == name)?;
        Some((set, words.next()?.to_owned()))
    };
    text.lines().filter_map(member).collect()
}
