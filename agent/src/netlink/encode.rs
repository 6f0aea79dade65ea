//! Writing messages.

use pointsman_crds::proxy_node_status::IpFamily;

use super::{IPV4, IPV6, align};

const NESTED: u16 = 0x8000;

/// The header of a netfilter message.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Subsystem in the high byte, what to do in the low one.
    pub kind: u16,
    /// Flags, such as [`super::REQUEST`].
    pub flags: u16,
    /// What answers refer to.
    pub sequence: u32,
    /// `AF_*`
    pub family: u8,
    /// A number that few messages need.
    pub resource: u16,
}

impl Header {
    /// About a family.
    #[must_use]
    pub fn new(kind: u16, flags: u16, sequence: u32, family: IpFamily) -> Self {
        let family = match family {
            IpFamily::IPv4 => IPV4,
            IpFamily::IPv6 => IPV6,
        };
        Self { kind, flags, sequence, family, resource: 0 }
    }
}

/// Messages under construction, one behind the other.
#[derive(Clone, Debug, Default)]
pub struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    /// A netfilter message with what `fill` adds.
    pub fn message(&mut self, header: Header, fill: impl FnOnce(&mut Self)) {
        let [r0, r1] = header.resource.to_be_bytes();
        self.request(header.kind, header.flags, header.sequence, &[header.family, 0, r0, r1], fill);
    }

    /// A message of any subsystem: its own header, a multiple of four bytes, and what `fill` adds.
    pub fn request(
        &mut self,
        kind: u16,
        flags: u16,
        sequence: u32,
        header: &[u8],
        fill: impl FnOnce(&mut Self),
    ) {
        let start = self.bytes.len();
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(flags.to_ne_bytes());
        self.bytes.extend(sequence.to_ne_bytes());
        // The port: the kernel knows who sends.
        self.bytes.extend([0; 4]);
        self.bytes.extend(header);
        fill(self);
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// An attribute. Values are shorter than 64 KiB.
    pub fn attribute(&mut self, kind: u16, value: &[u8]) {
        let start = self.open(kind);
        self.bytes.extend(value);
        self.close(start);
    }

    /// An attribute that consists of those that `fill` adds. Their sum is shorter than 64 KiB.
    pub fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.open(kind | NESTED);
        fill(self);
        self.close(start);
    }

    /// A number of 32 bits in network order.
    pub fn number(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    /// A number of 32 bits in the kernel's order.
    pub fn native(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    /// A string, with the zero that ends it.
    pub fn string(&mut self, kind: u16, value: &str) {
        let start = self.open(kind);
        self.bytes.extend(value.as_bytes());
        self.bytes.push(0);
        self.close(start);
    }

    /// Bytes as they are, a multiple of four of them.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What was written.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    fn open(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend(kind.to_ne_bytes());
        start
    }

    /// Writes the length of the attribute that starts here, and pads.
    fn close(&mut self, start: usize) {
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes.resize(align(self.bytes.len()), 0);
    }
}
