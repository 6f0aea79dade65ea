//! The scratch word: 32 bits in `meta priority` that lead a packet from map to map.
//!
//! ```text
//!  bit 31            20 19                 1  0
//!     +----------------+--------------------+---+
//!     | kind / class / |  group id of the   | L |   L = 0: all usable endpoints   L = 1: only those on this node
//!     | slot           |  Service port      |   |
//!     +----------------+--------------------+---+
//! ```
//!
//! It lives for as long as the first packet of a connection walks our chains, and is zero again afterwards.

/// The bits that name a list of endpoints: a Service port, and [`LOCAL`].
pub(super) const GROUP: u32 = 0x000f_ffff;
/// The bit that says: only endpoints on this node.
pub(super) const LOCAL: u32 = 1;
/// The bits above: a [`Kind`], a class or a slot.
pub(super) const CHOICE: u32 = !GROUP;
/// The first and last number of a Service port; its group is twice that.
pub(super) const PORTS: (u32, u32) = (8, GROUP >> 1);
/// The first and last number of a class: none is a [`Kind`].
pub(super) const CLASSES: (u32, u32) = (16, CHOICE >> CHOICE_SHIFT);
/// The first and last number of an endpoint of a Service port with affinity.
pub(super) const SLOTS: (u32, u32) = (1, CHOICE >> CHOICE_SHIFT);
/// The first and last number of a list of source ranges; above it is a prefix length.
pub(super) const LISTS: (u32, u32) = (1, LIST);
/// The bits that name a list of source ranges.
pub(super) const LIST: u32 = 0x00ff_ffff;
/// Where the prefix length of a source range begins.
pub(super) const LENGTH_SHIFT: u32 = 24;

const CHOICE_SHIFT: u32 = 20;

/// How a packet came to a Service, which decides on masquerading and on the list of endpoints. The numbers are in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// To a ClusterIP.
    InternalCluster = 1,
    /// To a ClusterIP under policy Local.
    InternalLocal = 2,
    /// To a NodePort, load balancer or external IP.
    ExternalCluster = 3,
    /// The same under policy Local.
    ExternalLocal = 4,
}

impl Kind {
    pub(super) const ALL: [Self; 4] =
        [Self::InternalCluster, Self::InternalLocal, Self::ExternalCluster, Self::ExternalLocal];

    /// The word that leads a packet of this kind to a group.
    pub(super) fn word(self, group: u32) -> u32 {
        with(self as u32, group)
    }
}

/// A word of a kind, class or slot, and a group.
pub(super) fn with(choice: u32, group: u32) -> u32 {
    choice << CHOICE_SHIFT | group
}

/// The kind, class or slot in a word.
pub(super) fn choice(word: u32) -> u32 {
    word >> CHOICE_SHIFT
}
