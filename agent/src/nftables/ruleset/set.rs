//! Declarations of sets and maps.

use super::{Name, Value};

/// A set or map, without its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: Name,
    /// What a key consists of.
    pub key: Columns,
    /// What it holds for a key; a set holds nothing.
    pub data: Option<DataType>,
    /// What it can do.
    pub flags: Flags,
    /// At most so many elements.
    pub size: Option<u32>,
}

impl Set {
    /// A set.
    pub fn new(name: impl Into<Name>, key: Columns) -> Self {
        Self { name: name.into(), key, data: None, flags: Flags::default(), size: None }
    }

    /// A map to data.
    pub fn map(name: impl Into<Name>, key: Columns, data: Columns) -> Self {
        Self { data: Some(DataType::Columns(data)), ..Self::new(name, key) }
    }

    /// A map to verdicts.
    pub fn vmap(name: impl Into<Name>, key: Columns) -> Self {
        Self { data: Some(DataType::Verdict), ..Self::new(name, key) }
    }

    /// A set whose elements are ranges of addresses, which must not overlap.
    #[must_use]
    pub fn interval(mut self) -> Self {
        self.flags.interval = true;
        self
    }

    /// A set whose elements count the packets that find them.
    #[must_use]
    pub fn counting(mut self) -> Self {
        self.flags.counter = true;
        self
    }

    /// A set that packets write, whose elements time out.
    #[must_use]
    pub fn dynamic(mut self, size: u32) -> Self {
        self.flags.dynamic = true;
        self.flags.timeout = true;
        self.size = Some(size);
        self
    }
}

/// What a set can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent of each other, as in the kernel")]
pub struct Flags {
    /// Elements are ranges (`flags interval`, and `auto-merge`, which only matters to the `nft` program). One column only.
    pub interval: bool,
    /// Packets add elements.
    pub dynamic: bool,
    /// Elements can end by themselves.
    pub timeout: bool,
    /// Each element counts the packets that find it, and their bytes (Linux 5.7).
    pub counter: bool,
}

/// What a key or a datum consists of, in order. Listings look the way it was declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Columns {
    /// `typeof ip daddr . meta l4proto`: the types of these values, which are plain ones.
    Typeof(Vec<Value>),
    /// `type ipv4_addr . inet_proto`.
    Types(Vec<Type>),
}

/// What a map holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataType {
    /// Data.
    Columns(Columns),
    /// Verdicts. The kernel checks all elements of all such maps whenever one gets an element.
    Verdict,
}

/// A type of nft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// `ipv4_addr` or `ipv6_addr`, by the family of the table.
    Address,
    /// `inet_proto`.
    Protocol,
    /// `inet_service`.
    Port,
    /// `mark`.
    Mark,
    /// `classid`, written as `hi:lo` in hexadecimal: the type of `meta priority`.
    ClassId,
    /// `ifname`.
    Interface,
    /// `ct_state`.
    CtState,
    /// `ct_status`.
    CtStatus,
    /// `fib_addrtype`.
    AddressType,
    /// A number of 32 bits.
    Integer,
}
