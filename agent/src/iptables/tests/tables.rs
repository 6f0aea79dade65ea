//! A kernel for tests: tables that restore scripts change, as strict as the real one, and packets that walk them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use crate::ipset::Operation;
use crate::iptables::saved::target;
use crate::plan::{Hop, Packet, Verdict};

type Table = BTreeMap<String, Vec<String>>;

/// The tables of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    tables: BTreeMap<String, Table>,
    /// Members of ipsets, by the set's name.
    sets: BTreeMap<String, BTreeSet<String>>,
}

const VERDICTS: [&str; 7] = ["ACCEPT", "DROP", "REJECT", "RETURN", "MARK", "MASQUERADE", "DNAT"];

impl Tables {
    pub fn new() -> Self {
        let table = |chains: &[&str]| chains.iter().map(|chain| ((*chain).to_owned(), Vec::new())).collect();
        Self {
            tables: BTreeMap::from([
                ("nat".to_owned(), table(&["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"])),
                ("filter".to_owned(), table(&["INPUT", "FORWARD", "OUTPUT"])),
                ("mangle".to_owned(), table(&["PREROUTING", "OUTPUT"])),
            ]),
            sets: BTreeMap::new(),
        }
    }

    pub fn has(&self, set: &str, member: &str) -> bool {
        self.sets[set].contains(member)
    }

    pub fn table(&mut self, name: &str) -> &mut Table {
        self.tables.get_mut(name).unwrap()
    }

    /// What `iptables-save -t` prints.
    pub fn save(&self, name: &str) -> String {
        let mut text = format!("*{name}\n");
        for chain in self.tables[name].keys() {
            let _ = writeln!(text, ":{chain} - [0:0]");
        }
        for (chain, rules) in &self.tables[name] {
            for rule in rules {
                let _ = writeln!(text, "-A {chain} {rule}");
            }
        }
        text + "COMMIT\n"
    }

    /// What `ipset save` prints.
    pub fn save_sets(&self) -> String {
        let mut text = String::new();
        for (name, members) in &self.sets {
            for member in members {
                let _ = writeln!(text, "add {name} {member}");
            }
        }
        text
    }

    /// Changes sets, more strictly than the kernel: nothing is added twice, and only what is there is removed.
    pub fn change_sets(&mut self, operations: &[Operation]) {
        for operation in operations {
            match operation {
                Operation::Create { set, .. } => drop(self.sets.entry(set.clone()).or_default()),
                Operation::Add { set, member } => {
                    let added = self.sets.get_mut(set).unwrap().insert(member.clone());
                    assert!(added, "{operation}: it is there");
                }
                Operation::Remove { set, member } => {
                    let removed = self.sets.get_mut(set).unwrap().remove(member);
                    assert!(removed, "{operation}: it is not there");
                }
                Operation::Destroy { .. } => panic!("{operation}"),
            }
        }
    }

    /// What `iptables-restore --noflush` does. Each table as a whole or not at all.
    pub fn restore(&mut self, script: &str) -> Result<(), String> {
        let mut open: Option<(String, Table)> = None;
        for line in script.lines() {
            let (command, rest) = line.split_at(1);
            if command == "*" {
                open = Some((rest.to_owned(), self.tables[rest].clone()));
                continue;
            }
            let (name, table) = open.as_mut().ok_or("no table")?;
            if line == "COMMIT" {
                for rule in table.values().flatten() {
                    let to = target(rule).unwrap_or("ACCEPT");
                    if !VERDICTS.contains(&to) && !table.contains_key(to) {
                        return Err(format!("{rule}: no chain {to}"));
                    }
                }
                self.tables.insert(name.clone(), table.clone());
                open = None;
                continue;
            }
            let words: Vec<&str> = line.splitn(3, ' ').collect();
            if command == ":" {
                table.insert(words[0][1..].to_owned(), Vec::new());
                continue;
            }
            let chain = words[1];
            let rules = table.get_mut(chain).ok_or_else(|| format!("{line}: no such chain"))?;
            match words[0] {
                "-A" => rules.push(words[2].to_owned()),
                "-I" => rules.insert(0, words[2].strip_prefix("1 ").unwrap().to_owned()),
                "-D" => {
                    let at = rules.iter().position(|rule| rule == words[2]);
                    rules.remove(at.ok_or_else(|| format!("{line}: no such rule"))?);
                }
                "-X" => {
                    if !rules.is_empty() || table.values().flatten().any(|rule| target(rule) == Some(chain)) {
                        return Err(format!("{line}: in use"));
                    }
                    table.remove(chain);
                }
                other => return Err(format!("unknown command {other}")),
            }
        }
        Ok(())
    }

    /// Where a packet ends, by the rules alone.
    pub fn walk(&self, packet: &Packet) -> Verdict {
        let first = if packet.interface.is_some() { "PREROUTING" } else { "OUTPUT" };
        let mut hops = BTreeSet::new();
        let mut untranslated = false;
        for (end, mark) in self.ends("nat", first, packet, 0) {
            match end {
                End::Dnat(to) => {
                    let source_of = |end: &(End, u32)| end.0 == End::Masquerade;
                    let after = self.ends("nat", "POSTROUTING", packet, mark);
                    assert_eq!(after.len(), 1);
                    let moved = Packet {
                        destination: to.ip(),
                        destination_is_local: false,
                        port: to.port(),
                        ..packet.clone()
                    };
                    assert_eq!(self.filtered(&moved, mark), Verdict::Untouched, "{to} is let through");
                    hops.insert(Hop { address: to.ip(), port: to.port(), masquerade: source_of(&after[0]) });
                }
                End::Fell => {
                    assert!(!untranslated || mark == 0);
                    untranslated = true;
                }
                other => panic!("{other:?} in nat"),
            }
        }
        assert!(hops.is_empty() || !untranslated, "a packet is either for a Service or not: {packet:?}");
        if hops.is_empty() { self.filtered(packet, 0) } else { Verdict::Forward(hops.into_iter().collect()) }
    }

    /// What the filters on its way say.
    pub fn filtered(&self, packet: &Packet, mark: u32) -> Verdict {
        let hooks: &[&str] = match (packet.interface.is_some(), packet.destination_is_local) {
            (true, true) => &["INPUT"],
            (true, false) => &["FORWARD"],
            (false, true) => &["OUTPUT", "INPUT"],
            (false, false) => &["OUTPUT"],
        };
        for hook in hooks {
            let ends = self.ends("filter", hook, packet, mark);
            assert_eq!(ends.len(), 1);
            match ends[0].0 {
                End::Reject => return Verdict::Reject,
                End::Drop => return Verdict::Drop,
                End::Fell | End::Accept => {}
                ref other => panic!("{other:?} in filter"),
            }
        }
        Verdict::Untouched
    }

    /// Where a packet may leave a chain, and with which mark.
    pub fn ends(&self, table: &str, chain: &str, packet: &Packet, mark: u32) -> Vec<(End, u32)> {
        let mut ends = Vec::new();
        let mut marks = vec![mark];
        for rule in &self.tables[table][chain] {
            let words = words(rule);
            let mut next = Vec::new();
            for mark in marks {
                let found = self.matches(&words, packet, mark);
                if found != Match::Yes {
                    next.push(mark);
                }
                if found == Match::No {
                    continue;
                }
                let Some(at) = words.iter().position(|word| word == "-j" || word == "-g") else {
                    next.push(mark);
                    continue;
                };
                let option =
                    |name: &str| words.iter().position(|word| word == name).map(|at| words[at + 1].clone());
                match words[at + 1].as_str() {
                    "RETURN" => ends.push((End::Fell, mark)),
                    "ACCEPT" => ends.push((End::Accept, mark)),
                    "DROP" => ends.push((End::Drop, mark)),
                    "REJECT" => ends.push((End::Reject, mark)),
                    "MASQUERADE" => ends.push((End::Masquerade, mark)),
                    "DNAT" => {
                        let to = option("--to-destination").unwrap();
                        ends.push((End::Dnat(to.parse().unwrap()), mark));
                    }
                    "MARK" => {
                        let (value, bits) = pair(&option("--set-xmark").unwrap());
                        next.push((mark & !bits) ^ value);
                    }
                    to => {
                        for (end, mark) in self.ends(table, to, packet, mark) {
                            if end == End::Fell && words[at] == "-j" {
                                next.push(mark);
                            } else {
                                ends.push((end, mark));
                            }
                        }
                    }
                }
            }
            next.sort_unstable();
            next.dedup();
            marks = next;
        }
        ends.extend(marks.into_iter().map(|mark| (End::Fell, mark)));
        ends.sort();
        ends.dedup();
        ends
    }

    fn matches(&self, words: &[String], packet: &Packet, mark: u32) -> Match {
        let mut rest = words.to_vec();
        if let Some(at) = rest.iter().position(|word| word == "--match-set") {
            let members = &self.sets[&rest[at + 1]];
            let frontend = format!("{},{}:{}", packet.destination, packet.protocol.lower(), packet.port);
            let found = match rest[at + 2].as_str() {
                // A bitmap holds ports.
                "dst" => {
                    members.contains(&packet.destination.to_string())
                        || members.contains(&packet.port.to_string())
                }
                "dst,dst" => members.contains(&frontend),
                "dst,dst,src" => {
                    let sources =
                        members.iter().filter_map(|member| member.strip_prefix(&frontend)?.strip_prefix(','));
                    sources.into_iter().any(|source| within(source, packet.source))
                }
                other => panic!("{other}"),
            };
            if !found {
                return Match::No;
            }
            rest.drain(at..at + 3);
        }
        matches(&rest, packet, mark)
    }

    /// The longest way down from a built-in chain, in chains.
    pub fn depth(&self, table: &str) -> usize {
        fn below(table: &Table, chain: &str) -> usize {
            let rules = table.get(chain).into_iter().flatten();
            1 + rules
                .filter_map(|rule| target(rule))
                .filter(|to| table.contains_key(*to))
                .map(|to| below(table, to))
                .max()
                .unwrap_or(0)
        }
        let table = &self.tables[table];
        ["PREROUTING", "OUTPUT", "POSTROUTING"].iter().map(|hook| below(table, hook) - 1).max().unwrap()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    Fell,
    Accept,
    Drop,
    Reject,
    Masquerade,
    Dnat(SocketAddr),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Match {
    Yes,
    No,
    /// By chance.
    Maybe,
}

fn words(rule: &str) -> Vec<String> {
    let mut quoted = false;
    let split = rule.split(|c: char| {
        if c == '"' {
            quoted = !quoted;
        }
        c == ' ' && !quoted
    });
    split.map(ToOwned::to_owned).collect()
}

fn pair(text: &str) -> (u32, u32) {
    let number = |text: &str| u32::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap();
    let (value, mask) = text.split_once('/').unwrap();
    (number(value), number(mask))
}

/// A block, or one address.
fn within(block: &str, address: IpAddr) -> bool {
    block.parse::<IpNet>().map_or_else(|_| block.parse() == Ok(address), |block| block.contains(&address))
}

fn matches(words: &[String], packet: &Packet, mark: u32) -> Match {
    let mut chance = Match::Yes;
    let mut not = false;
    let mut iter = words.iter();
    while let Some(word) = iter.next() {
        let mut value = || iter.next().unwrap().as_str();
        let holds = match word.as_str() {
            "!" => {
                not = true;
                continue;
            }
            "-s" => within(value(), packet.source),
            "-d" => within(value(), packet.destination),
            "-i" => {
                let (wanted, actual) = (value(), packet.interface.as_deref().unwrap_or("lo"));
                wanted.strip_suffix('+').map_or(actual == wanted, |prefix| actual.starts_with(prefix))
            }
            "-p" => value() == packet.protocol.lower(),
            "--dport" => {
                let range = value();
                let (first, last) = range.split_once(':').unwrap_or((range, range));
                (first.parse().unwrap()..=last.parse().unwrap()).contains(&packet.port)
            }
            "--src-type" => value() == "LOCAL" && packet.source_is_local,
            "--dst-type" => value() == "LOCAL" && packet.destination_is_local,
            "--ctstate" => value() == "NEW",
            "--mark" => {
                let (wanted, bits) = pair(value());
                mark & bits == wanted
            }
            "--probability" => {
                assert!((0.0..1.0).contains(&value().parse::<f64>().unwrap()));
                chance = Match::Maybe;
                true
            }
            "--rcheck" => false,
            "-j" | "-g" => break,
            "-m" | "--comment" | "--mode" | "--name" | "--mask" | "--seconds" => {
                value();
                continue;
            }
            "--set" | "--rsource" | "--reap" => continue,
            other => panic!("{other} in {words:?}"),
        };
        if holds == not {
            return Match::No;
        }
        not = false;
    }
    chance
}

impl Tables {
    /// What somebody else might do to our chains.
    pub fn damage(&mut self, dice: &mut crate::plan::random::Dice) {
        let table = self.table(["nat", "filter"][usize::try_from(dice.roll(2)).unwrap()]);
        let at = usize::try_from(dice.roll(table.len() as u64)).unwrap();
        let chain = table.keys().nth(at).unwrap().clone();
        match dice.roll(3) {
            0 => table.get_mut(&chain).unwrap().clear(),
            1 => {
                table.get_mut(&chain).unwrap().pop();
            }
            _ => {
                table.insert("KUBE-SVC-GONE".to_owned(), Vec::new());
            }
        }
    }
}
