//! What is in ipsets, and how it changes.
//!
//! In: members of the sets of one [`Kind`]. Out: the input of `ipset restore`; and the members in what `ipset save` prints. Pure.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use pointsman_crds::proxy_node_status::IpFamily;

/// Sets that are kept together, each for both families.
pub(crate) trait Kind: Copy + Ord + 'static {
    /// All of them, in the order in which they are filled.
    const ALL: &'static [Self];

    /// Its name, of at most 31 characters.
    fn name(self, family: IpFamily) -> String;

    /// Its type and the options that it is created with.
    fn definition(self, family: IpFamily) -> String;

    /// Whether its members are added only after the rules have changed.
    fn is_last(self) -> bool;
}

/// A member of a set, as the tool prints it.
pub(crate) type Element<S> = (S, String);

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
    /// Input for the tool, before the rules change. `create` makes the sets, too.
    pub(crate) fn before(&self, family: IpFamily, create: bool) -> String {
        let mut text = String::new();
        for set in S::ALL.iter().filter(|_| create) {
            let _ = writeln!(text, "create {} {}", set.name(family), set.definition(family));
        }
        for (set, element) in self.added.iter().filter(|(set, _)| !set.is_last()) {
            let _ = writeln!(text, "add {} {element}", set.name(family));
        }
        text
    }

    /// Input for the tool, after the rules have changed.
    pub(crate) fn after(&self, family: IpFamily) -> String {
        let mut text = String::new();
        for (set, element) in &self.removed {
            let _ = writeln!(text, "del {} {element}", set.name(family));
        }
        for (set, element) in self.added.iter().filter(|(set, _)| set.is_last()) {
            let _ = writeln!(text, "add {} {element}", set.name(family));
        }
        text
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
