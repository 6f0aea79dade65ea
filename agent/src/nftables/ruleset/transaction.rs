//! Changes of a table.

use super::{Chain, Element, Name, Rule, Set};

/// Whoever wants an operation, so that an error can be told to him: a number that only the author of a transaction
/// understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin(pub u32);

impl Origin {
    /// Nobody in particular.
    pub const NONE: Self = Self(u32::MAX);
}

/// A change of a table. Adding what is there already is fine for the table, chains and elements with the same value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The table itself.
    AddTable,
    /// The table, with its base chains at no hook: no packet enters them.
    AddDormantTable,
    /// The table with everything in it, which must exist.
    DeleteTable,
    /// A chain.
    AddChain(Chain),
    /// A chain with its rules; nothing may lead to it any more.
    DeleteChain(Name),
    /// All rules of a chain.
    FlushChain(Name),
    /// A rule behind the others of a chain. Rules are replaced by flushing their chain in the same transaction.
    AddRule {
        /// The chain.
        chain: Name,
        /// The rule.
        rule: Rule,
    },
    /// A set or map.
    AddSet(Set),
    /// A set with its elements; no rule may use it any more.
    DeleteSet(Name),
    /// All elements of a set.
    FlushSet(Name),
    /// Elements, each with who wants it.
    AddElements {
        /// The set.
        set: Name,
        /// Its elements.
        elements: Vec<(Element, Origin)>,
    },
    /// Elements by key (and end, in an interval set), which must exist.
    DeleteElements {
        /// The set.
        set: Name,
        /// Its elements; values do not matter.
        elements: Vec<(Element, Origin)>,
    },
}

/// Changes that become visible to packets all at once, or not at all. The order is kept: what others refer to comes first
/// when adding, last when deleting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// In this order.
    pub operations: Vec<(Operation, Origin)>,
}

impl Transaction {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// How many elements it adds and deletes.
    #[must_use]
    pub fn elements(&self) -> (usize, usize) {
        let (mut added, mut deleted) = (0, 0);
        for (operation, _) in &self.operations {
            match operation {
                Operation::AddElements { elements, .. } => added += elements.len(),
                Operation::DeleteElements { elements, .. } => deleted += elements.len(),
                _ => {}
            }
        }
        (added, deleted)
    }

    /// Adds an operation at the end.
    pub fn push(&mut self, operation: Operation, origin: Origin) {
        self.operations.push((operation, origin));
    }

    /// Adds an element, together with those of the same set that were added last.
    pub fn add_element(&mut self, name: impl Into<Name>, element: Element, origin: Origin) {
        let name = name.into();
        match self.operations.last_mut() {
            Some((Operation::AddElements { set, elements }, _)) if *set == name => {
                elements.push((element, origin));
            }
            _ => {
                let elements = vec![(element, origin)];
                self.push(Operation::AddElements { set: name, elements }, Origin::NONE);
            }
        }
    }

    /// Deletes an element, together with those of the same set that were deleted last.
    pub fn delete_element(&mut self, name: impl Into<Name>, element: Element, origin: Origin) {
        let name = name.into();
        match self.operations.last_mut() {
            Some((Operation::DeleteElements { set, elements }, _)) if *set == name => {
                elements.push((element, origin));
            }
            _ => {
                let elements = vec![(element, origin)];
                self.push(Operation::DeleteElements { set: name, elements }, Origin::NONE);
            }
        }
    }
}
