//! One table as `iptables-save` prints it.
//!
//! In: the text. Out: [`Saved`], which finds the rules of a chain without copying them; which chains are ours; and which of
//! ours somebody else's rules lead to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use super::names::ChainName;
use super::shared::{ANCHOR_CHAIN, ANCHOR_TEXT, Jump};
use crate::conntrack::{Frontend, NodePort, Protocol, Target};

/// How closely rules must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// In every character.
    Exact,
    /// In number and targets: for a tool that prints a rule in other words than the versions we know.
    Shape,
}

/// One table, read back.
#[derive(Debug, Default)]
pub(crate) struct Saved {
    text: String,
    /// Where the rules of each chain are in the text: the tools print them together.
    chains: BTreeMap<String, Range<usize>>,
}

impl Saved {
    /// Reads what the tool printed for one table.
    pub(crate) fn parse(text: String) -> Self {
        let mut chains: BTreeMap<String, Range<usize>> = BTreeMap::new();
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            let end = at + line.len();
            if let Some(rest) = line.strip_prefix(':') {
                if let Some(name) = rest.split_whitespace().next() {
                    chains.entry(name.to_owned()).or_insert(0..0);
                }
            } else if let Some(name) =
                line.strip_prefix("-A ").and_then(|rest| rest.split_whitespace().next())
            {
                match chains.get_mut(name) {
                    Some(range) if range.end > range.start => range.end = end,
                    Some(range) => *range = at..end,
                    None => {
                        chains.insert(name.to_owned(), at..end);
                    }
                }
            }
            at = end;
        }
        Self { text, chains }
    }

    /// The rules of a chain, without `-A CHAIN`; `None` if there is no such chain.
    pub(crate) fn rules(&self, chain: &str) -> Option<impl Iterator<Item = &str>> {
        let range = self.chains.get(chain)?.clone();
        let prefix = 3 + chain.len() + 1;
        Some(self.text[range].lines().map(move |line| line.get(prefix..).unwrap_or_default()))
    }

    /// Whether a chain has these rules: exactly, or as many with the same targets.
    pub(crate) fn holds(&self, chain: ChainName, rules: &[String], how: Comparison) -> bool {
        let Some(saved) = self.rules(chain.as_str()) else { return false };
        let rules = rules.iter().map(String::as_str);
        match how {
            Comparison::Exact => saved.eq(rules),
            Comparison::Shape => saved.map(target).eq(rules.map(target)),
        }
    }

    /// Whether our rules look into sets.
    pub(crate) fn uses_sets(&self) -> bool {
        self.rules("KUBE-EXTERNAL-SERVICES")
            .into_iter()
            .flatten()
            .any(|rule| rule.contains("--match-set POINTSMAN-"))
    }

    /// Whether there is such a chain.
    pub(crate) fn has(&self, chain: &str) -> bool {
        self.chains.contains_key(chain)
    }

    /// The chains whose name says that they are ours.
    pub(crate) fn ours(&self, ours: impl Fn(&str) -> bool) -> BTreeSet<ChainName> {
        self.chains.keys().filter(|name| ours(name)).map(|name| ChainName::new(name)).collect()
    }

    /// Chains that the rules of others lead to, other than our `jumps`.
    pub(crate) fn needed_by_others(
        &self,
        table: &str,
        jumps: &[Jump],
        ours: impl Fn(&str) -> bool,
    ) -> BTreeSet<ChainName> {
        let foreign = self.chains.keys().filter(|name| !ours(name));
        let rules =
            foreign.flat_map(|name| self.rules(name).into_iter().flatten().map(move |rule| (name, rule)));
        rules
            .filter(|(name, rule)| {
                !jumps.iter().any(|jump| jump.table == table && jump.from == *name && leads(rule, jump))
            })
            .filter_map(|(_, rule)| target(rule))
            .filter(|target| ours(target))
            .map(ChainName::new)
            .collect()
    }

    /// How often a jump is there. Found by target and comment, whatever else other versions of the tool print.
    pub(crate) fn jumps(&self, jump: &Jump) -> impl Iterator<Item = &str> {
        self.rules(jump.from).into_iter().flatten().filter(move |rule| leads(rule, jump))
    }

    /// The UDP and SCTP frontends that rules of ours, or of kube-proxy in iptables mode, lead to endpoints. In nat.
    pub(crate) fn served(&self) -> Vec<Target> {
        let dispatch = |name: &&String| {
            matches!(name.as_str(), "KUBE-SERVICES" | "KUBE-NODEPORTS")
                || name.starts_with("KUBE-IP-")
                || name.starts_with("KUBE-NP-")
        };
        let rules = self.chains.keys().filter(dispatch).filter_map(|name| self.rules(name)).flatten();
        rules.filter_map(frontend).collect()
    }

    /// Rules that a cleanup has left to keep connections going. In filter.
    pub(crate) fn anchors(&self) -> impl Iterator<Item = &str> {
        self.rules(ANCHOR_CHAIN).into_iter().flatten().filter(|rule| rule.contains(ANCHOR_TEXT))
    }

    /// The mark bits that a chain sets or looks for.
    pub(crate) fn marks(&self, chain: &str) -> u32 {
        let mut bits = 0;
        for rule in self.rules(chain).into_iter().flatten() {
            let words: Vec<&str> = rule.split_whitespace().collect();
            for pair in
                words.windows(2).filter(|pair| matches!(pair[0], "--mark" | "--set-xmark" | "--set-mark"))
            {
                for number in pair[1].split('/') {
                    let digits = number.strip_prefix("0x").unwrap_or_default();
                    bits |= u32::from_str_radix(digits, 16).unwrap_or_default();
                }
            }
        }
        bits
    }
}

fn leads(rule: &str, jump: &Jump) -> bool {
    target(rule) == Some(jump.to) && rule.contains(&format!("\"{}\"", jump.comment))
}

/// Where a rule leads.
pub(crate) fn target(rule: &str) -> Option<&str> {
    let mut words = rule.split_whitespace();
    words.find(|word| matches!(*word, "-j" | "-g"))?;
    words.next()
}

/// The UDP or SCTP frontend that a rule catches packets to.
fn frontend(rule: &str) -> Option<Target> {
    const SERVICE: [&str; 4] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-"];
    target(rule).filter(|target| SERVICE.iter().any(|prefix| target.starts_with(prefix)))?;
    let after = |option: &str| {
        let mut words = rule.split_whitespace();
        words.find(|word| *word == option)?;
        words.next()
    };
    let protocol = match after("-p")? {
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        _ => return None,
    };
    let port = after("--dport")?.parse().ok()?;
    let Some(destination) = after("-d") else { return Some(NodePort::new(port, protocol).into()) };
    let (address, length) = destination.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let whole = if address.is_ipv4() { "32" } else { "128" };
    (length == whole).then(|| Frontend::new(SocketAddr::new(address, port), protocol).into())
}

/// Whether a chain of the nat table is ours or kube-proxy's (iptables mode), by its name.
pub(crate) fn ours_in_nat(name: &str) -> bool {
    // The last two are of kube-proxy's mode ipvs, where KUBE-SERVICES leads to them.
    const NAMES: [&str; 8] = [
        "KUBE-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-POSTROUTING",
        "KUBE-MARK-MASQ",
        "KUBE-MARK-MASQ-FOREIGN",
        "KUBE-PROXY-CANARY",
        "KUBE-NODE-PORT",
        "KUBE-LOAD-BALANCER",
    ];
    const PREFIXES: [&str; 8] =
        ["KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-", "KUBE-IP-", "KUBE-NP-"];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether a chain of the filter table is ours or kube-proxy's, by its name. KUBE-FIREWALL is kubelet's.
pub(crate) fn ours_in_filter(name: &str) -> bool {
    const NAMES: [&str; 8] = [
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-FORWARD",
        "KUBE-PROXY-FIREWALL",
        "KUBE-NP-WITHOUT-ENDPOINT",
        "KUBE-NP-PROBE",
        "KUBE-PROXY-CANARY",
    ];
    NAMES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::super::shared::JUMPS;
    use super::*;

    const NAT: &str = "*nat
:PREROUTING ACCEPT [0:0]
:CNI-HOST - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SVC-B - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -j CNI-HOST
-A CNI-HOST -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SVC-A -j KUBE-MARK-MASQ
-A KUBE-SVC-A -j KUBE-SVC-B
COMMIT
";

    #[test]
    fn a_saved_table_is_read() {
        let saved = Saved::parse(NAT.to_owned());
        let rules: Vec<&str> = saved.rules("KUBE-SVC-A").unwrap().collect();
        assert_eq!(rules, ["-j KUBE-MARK-MASQ", "-j KUBE-SVC-B"]);
        assert!(saved.holds(ChainName::new("KUBE-SVC-B"), &[], Comparison::Exact));
        assert!(!saved.has("KUBE-SVC-C"));
        assert_eq!(saved.marks("KUBE-MARK-MASQ"), 0x4000);
        assert_eq!(saved.jumps(JUMPS.last().unwrap()).count(), 1);
        let needed: Vec<_> = saved.needed_by_others("nat", JUMPS, ours_in_nat).into_iter().collect();
        assert_eq!(needed, [ChainName::new("KUBE-MARK-MASQ")]);
    }

    #[test]
    fn ct_6_rules_say_which_frontends_were_served() {
        for (rule, expected) in [
            (
                "-d 10.96.0.10/32 -p udp -m comment --comment \"ns/a:dns cluster IP\" -m udp --dport 53 -j KUBE-SVC-A",
                Some("10.96.0.10:53"),
            ),
            ("-d fd00::a/128 -p sctp -m sctp --dport 53 -j KUBE-SVL-A", Some("[fd00::a]:53")),
            ("-d 10.96.0.10/32 -p tcp -m tcp --dport 53 -j KUBE-SVC-A", None),
            ("-d 127.0.0.0/8 -p udp -m udp --dport 30053 -j KUBE-EXT-A", None),
            ("-d 10.96.0.0/12 -j KUBE-IP-10.96.0.0/12", None),
            ("-p udp -m udp --dport 30720:31743 -g KUBE-NP-UDP-30720-31743", None),
        ] {
            let expected = expected.map(|address: &str| {
                let protocol = if rule.contains("sctp") { Protocol::Sctp } else { Protocol::Udp };
                Frontend::new(address.parse().unwrap(), protocol).into()
            });
            assert_eq!(frontend(rule), expected, "{rule}");
        }
        let node_port = "-p udp -m comment --comment \"ns/a:dns\" -m udp --dport 30053 -j KUBE-EXT-A";
        assert_eq!(frontend(node_port), Some(NodePort::new(30053, Protocol::Udp).into()));
    }

    #[test]
    fn syn_16_chains_of_others_are_not_ours() {
        for name in
            ["KUBE-FIREWALL", "KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT", "KUBE-POD-FW-X", "CNI-HOST"]
        {
            assert!(!ours_in_nat(name) && !ours_in_filter(name), "{name}");
        }
    }
}
