//! Elements of sets and maps.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use super::rule::Verdict;
use crate::kernel::Counted;

/// The number of a transport protocol.
pub const TCP: u8 = 6;
/// The number of a transport protocol.
pub const UDP: u8 = 17;
/// The number of a transport protocol.
pub const SCTP: u8 = 132;

const CAPACITY: usize = 32;
const INTERFACE: usize = 16;

/// A key, a datum or a constant as the kernel holds it: columns one behind the other, each beginning at a multiple of four
/// bytes. Small and cheap to copy and compare, since there are many. What the columns are is said where it is used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    bytes: [u8; CAPACITY],
    length: u8,
}

impl Default for Tuple {
    fn default() -> Self {
        Self::new()
    }
}

impl Tuple {
    /// Without columns.
    #[must_use]
    pub const fn new() -> Self {
        Self { bytes: [0; CAPACITY], length: 0 }
    }

    /// From the kernel's bytes, or `None` if they are more than any set of ours has.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut tuple = Self::new();
        tuple.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        tuple.length = u8::try_from(bytes.len()).ok()?;
        Some(tuple)
    }

    /// As the kernel has it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or_default()
    }

    /// With an address behind what is there.
    #[must_use]
    pub fn address(self, address: impl Into<IpAddr>) -> Self {
        match address.into() {
            IpAddr::V4(address) => self.column(&address.octets()),
            IpAddr::V6(address) => self.column(&address.octets()),
        }
    }

    /// With a transport protocol behind what is there.
    #[must_use]
    pub fn protocol(self, number: u8) -> Self {
        self.column(&[number])
    }

    /// With a port behind what is there.
    #[must_use]
    pub fn port(self, port: u16) -> Self {
        self.column(&port.to_be_bytes())
    }

    /// With a number of 32 bits behind what is there: a priority, mark, index, or flags. The kernel keeps them in its own
    /// byte order in everything but interval sets.
    #[must_use]
    pub fn word(self, word: u32) -> Self {
        self.column(&word.to_ne_bytes())
    }

    /// The name of an interface; the kernel allows 15 bytes, and more are cut off.
    #[must_use]
    pub fn interface(name: &str) -> Self {
        let mut bytes = [0; INTERFACE];
        for (byte, from) in bytes.iter_mut().zip(name.bytes().take(INTERFACE - 1)) {
            *byte = from;
        }
        Self::new().column(&bytes)
    }

    /// The beginning of an interface's name, for comparing.
    #[must_use]
    pub fn interface_prefix(prefix: &str) -> Self {
        Self::new().column(prefix.as_bytes().get(..INTERFACE - 1).unwrap_or(prefix.as_bytes()))
    }

    /// Zeros of the same length.
    #[must_use]
    pub fn zeroed(self) -> Self {
        Self { bytes: [0; CAPACITY], length: self.length }
    }

    /// Byte by byte with another one of the same length.
    pub(in crate::nftables) fn combine(mut self, other: Self, with: impl Fn(u8, u8) -> u8) -> Self {
        let length = self.bytes().len();
        for (byte, other) in self.bytes.iter_mut().zip(other.bytes).take(length) {
            *byte = with(*byte, other);
        }
        self
    }

    /// All bits set, in the same length.
    #[must_use]
    pub fn highest(mut self) -> Self {
        let length = self.bytes().len();
        self.bytes.iter_mut().take(length).for_each(|byte| *byte = u8::MAX);
        self
    }

    /// The next address, or `None` after the last.
    #[must_use]
    pub fn successor(mut self) -> Option<Self> {
        let length = self.bytes().len();
        for byte in self.bytes.get_mut(..length)?.iter_mut().rev() {
            *byte = byte.wrapping_add(1);
            if *byte != 0 {
                return Some(self);
            }
        }
        None
    }

    /// The address before, or `None` before the first.
    #[must_use]
    pub fn predecessor(mut self) -> Option<Self> {
        let length = self.bytes().len();
        for byte in self.bytes.get_mut(..length)?.iter_mut().rev() {
            *byte = byte.wrapping_sub(1);
            if *byte != u8::MAX {
                return Some(self);
            }
        }
        None
    }

    /// A single column keeps its own length. What does not fit is left out: the longest key, two IPv6 addresses, does.
    fn column(mut self, value: &[u8]) -> Self {
        let start = usize::from(self.length).next_multiple_of(4);
        let end = start + value.len();
        let Some(room) = self.bytes.get_mut(start..end) else { return self };
        room.copy_from_slice(value);
        let length = if start == 0 { end } else { end.next_multiple_of(4) };
        self.length = u8::try_from(length).unwrap_or(self.length);
        self
    }
}

impl fmt::Debug for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tuple(")?;
        for (index, byte) in self.bytes().iter().enumerate() {
            let space = if index > 0 && index % 4 == 0 { " " } else { "" };
            write!(f, "{space}{byte:02x}")?;
        }
        f.write_str(")")
    }
}

/// An element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// The key; the first address of a range in an interval set.
    pub key: Tuple,
    /// What a map holds for it.
    pub value: ElementValue,
    /// What few elements have.
    pub extra: Option<Box<Extra>>,
}

/// What a map holds for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementValue {
    /// Nothing: it is an element of a set.
    None,
    /// Data.
    Data(Tuple),
    /// A verdict.
    Verdict(Box<Verdict>),
}

/// What few elements have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// In an interval set the last address of the range, itself included.
    pub last: Option<Tuple>,
    /// How long it lives, if not refreshed.
    pub timeout: Option<Duration>,
    /// How long it will still live. Only read, never written.
    pub expires: Option<Duration>,
    /// For people, at most 128 bytes.
    pub comment: Option<String>,
    /// What it has counted. Only read, never written.
    pub counted: Option<Counted>,
}

impl Element {
    /// An element of a set.
    #[must_use]
    pub fn new(key: Tuple) -> Self {
        Self { key, value: ElementValue::None, extra: None }
    }

    /// A range of an interval set, both ends included.
    #[must_use]
    pub fn range(first: Tuple, last: Tuple) -> Self {
        let mut element = Self::new(first);
        element.extra_mut().last = Some(last);
        element
    }

    /// The element, holding data.
    #[must_use]
    pub fn with_data(self, data: Tuple) -> Self {
        Self { value: ElementValue::Data(data), ..self }
    }

    /// The element, holding a verdict.
    #[must_use]
    pub fn with_verdict(self, verdict: Verdict) -> Self {
        Self { value: ElementValue::Verdict(Box::new(verdict)), ..self }
    }

    /// What few elements have, to be written.
    pub fn extra_mut(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }
}
