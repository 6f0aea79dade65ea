//! ipsets: what is in them, how that changes, and the kernel's own interface to them.
//!
//! In: members of the sets of one [`Kind`]. Out: [`Operation`]s, in words those of `ipset restore`. [`client`] makes them by netlink, in the
//! messages of [`wire`], and lists members.

pub(crate) mod client;
mod wire;

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;

use crate::model::Protocol;

pub use client::Error;

/// Finds out whether the kernel has ipsets that we can talk to, in the network namespace of this thread. It loads its module if it
/// has one.
pub fn check() -> Result<(), Error> {
    client::Connection::open()?.check()
}

/// So many members at most.
const LARGEST: u32 = 1 << 20;

/// What the members of a set are: its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Addresses.
    Addresses,
    /// Ports, of whatever protocol.
    Ports,
    /// Address, protocol and port.
    Frontends,
    /// The same, and another address.
    FrontendsAndAddresses,
    /// The same, and a network.
    FrontendsAndNetworks,
}

impl Contents {
    /// The kernel's name of the type.
    fn name(self) -> &'static str {
        match self {
            Self::Addresses => "hash:ip",
            Self::Ports => "bitmap:port",
            Self::Frontends => "hash:ip,port",
            Self::FrontendsAndAddresses => "hash:ip,port,ip",
            Self::FrontendsAndNetworks => "hash:ip,port,net",
        }
    }
}

/// Sets that are kept together, each for both families.
pub(crate) trait Kind: Copy + Ord + 'static {
    /// All of them, in the order in which they are filled.
    const ALL: &'static [Self];

    /// Its name, of at most 31 characters.
    fn name(self, family: IpFamily) -> String;

    /// What it holds.
    fn contents(self) -> Contents;

    /// Whether its members are added only after the rules have changed.
    fn is_last(self) -> bool;
}

/// A member of a set, as the tool prints it.
pub(crate) type Element<S> = (S, String);

/// A change. What is there already, or not any more, is no error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Makes a set.
    Create { set: String, contents: Contents, family: IpFamily },
    /// Adds a member.
    Add { set: String, member: String },
    /// Removes a member.
    Remove { set: String, member: String },
    /// Removes a set.
    Destroy { set: String },
}

/// As a line of `ipset restore`.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create { set, contents: contents @ Contents::Ports, .. } => {
                write!(f, "create {set} {} range 0-65535", contents.name())
            }
            Self::Create { set, contents, family } => {
                let family = if *family == IpFamily::IPv4 { "inet" } else { "inet6" };
                write!(f, "create {set} {} family {family} maxelem {LARGEST}", contents.name())
            }
            Self::Add { set, member } => write!(f, "add {set} {member}"),
            Self::Remove { set, member } => write!(f, "del {set} {member}"),
            Self::Destroy { set } => write!(f, "destroy {set}"),
        }
    }
}

/// What must change in the sets, before and after the rules change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Changes<S: Ord> {
    /// To add; those of [`Kind::is_last`] after the rules.
    pub added: BTreeSet<Element<S>>,
    /// To remove, after the rules.
    pub removed: BTreeSet<Element<S>>,
}

impl<S: Ord> Default for Changes<S> {
    fn default() -> Self {
        Self { added: BTreeSet::new(), removed: BTreeSet::new() }
    }
}

impl<S: Kind> Changes<S> {
    /// What makes the sets of a kind.
    pub(crate) fn create(family: IpFamily) -> Vec<Operation> {
        let create = |set: &S| Operation::Create { set: set.name(family), contents: set.contents(), family };
        S::ALL.iter().map(create).collect()
    }

    /// Before the rules change.
    pub(crate) fn before(&self, family: IpFamily) -> Vec<Operation> {
        self.added(family, false).collect()
    }

    /// After the rules have changed.
    pub(crate) fn after(&self, family: IpFamily) -> Vec<Operation> {
        let remove =
            |(set, member): &Element<S>| Operation::Remove { set: set.name(family), member: member.clone() };
        self.removed.iter().map(remove).chain(self.added(family, true)).collect()
    }

    fn added(&self, family: IpFamily, last: bool) -> impl Iterator<Item = Operation> {
        let added = self.added.iter().filter(move |(set, _)| set.is_last() == last);
        added.map(move |(set, member)| Operation::Add { set: set.name(family), member: member.clone() })
    }

    /// Leaves out what is both added and removed.
    pub(crate) fn settle(&mut self) {
        let both: Vec<Element<S>> = self.added.intersection(&self.removed).cloned().collect();
        for element in both {
            self.added.remove(&element);
            self.removed.remove(&element);
        }
    }
}

/// The input of `ipset restore`.
pub(crate) fn script(operations: &[Operation]) -> String {
    operations.iter().fold(String::new(), |text, operation| text + &operation.to_string() + "\n")
}

/// The members of our sets in what `ipset save` prints.
pub(crate) fn parse<S: Kind>(text: &str, family: IpFamily) -> BTreeSet<Element<S>> {
    let member = |line: &str| {
        let mut words = line.strip_prefix("add ")?.split_whitespace();
        let name = words.next()?;
        let set = S::ALL.iter().copied().find(|set| set.name(family) == name)?;
        Some((set, words.next()?.to_owned()))
    };
    text.lines().filter_map(member).collect()
}

/// A member in its parts, as far as its set has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Member {
    address: Option<IpAddr>,
    /// The number of the protocol.
    protocol: Option<u8>,
    port: Option<u16>,
    /// Another address or network; without a length, an address.
    second: Option<(IpAddr, Option<u8>)>,
}

impl Member {
    /// Reads what the tool prints: `10.96.0.10`, `10.96.0.10,udp:53`, `10.96.0.10,udp:53,10.0.0.0/24`, or `53`.
    fn parse(text: &str) -> Option<Self> {
        let (first, rest) = text.split_once(',').map_or((text, None), |(first, rest)| (first, Some(rest)));
        if let Ok(port) = first.parse() {
            return rest.is_none().then_some(Self { port: Some(port), ..Self::default() });
        }
        let address = Some(first.parse().ok()?);
        let Some(rest) = rest else { return Some(Self { address, ..Self::default() }) };
        let (port, second) = rest.split_once(',').map_or((rest, None), |(port, second)| (port, Some(second)));
        let (protocol, port) = port.split_once(':')?;
        let known = Protocol::ALL.into_iter().find(|known| known.lower() == protocol);
        let protocol = Some(known.map_or_else(|| protocol.parse().ok(), |known| Some(known.number()))?);
        let second = match second {
            None => None,
            Some(second) => Some(match second.parse::<IpNet>() {
                Ok(network) => (network.addr(), Some(network.prefix_len())),
                Err(_) => (second.parse().ok()?, None),
            }),
        };
        Some(Self { address, protocol, port: Some(port.parse().ok()?), second })
    }
}

/// As the tool prints it.
impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.address {
            write!(f, "{address}")?;
        }
        if let Some(port) = self.port {
            match self.protocol.map(|number| (number, Protocol::from_number(number))) {
                None => write!(f, "{port}")?,
                Some((_, Some(protocol))) => write!(f, ",{}:{port}", protocol.lower())?,
                Some((number, None)) => write!(f, ",{number}:{port}")?,
            }
        }
        match self.second {
            None => Ok(()),
            Some((address, Some(length))) if length < if address.is_ipv4() { 32 } else { 128 } => {
                write!(f, ",{address}/{length}")
            }
            Some((address, _)) => write!(f, ",{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read_as_they_are_printed() {
        for text in [
            "10.96.0.10",
            "fd00:10:96::a",
            "65535",
            "10.96.0.10,udp:53",
            "fd00:10:96::a,sctp:3868",
            "10.96.0.10,112:0",
            "10.96.0.10,tcp:443,10.0.0.0/24",
            "10.96.0.10,tcp:443,10.0.0.7",
            "fd00:10:96::a,tcp:443,fd00::/64",
        ] {
            assert_eq!(Member::parse(text).map(|member| member.to_string()).as_deref(), Some(text));
        }
        let whole = Member::parse("10.96.0.10,tcp:443,10.0.0.7/32").unwrap();
        assert_eq!(whole.to_string(), "10.96.0.10,tcp:443,10.0.0.7", "as the tool prints it");
        for text in ["", "x", "65536", "10.96.0.10,", "10.96.0.10,53", "10.96.0.10,none:53", "53,tcp:53"] {
            assert_eq!(Member::parse(text), None, "{text}");
        }
    }
}
