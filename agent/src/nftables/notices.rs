//! The kernel's notices about transactions.
//!
//! In: a datagram. Out: whether one of them touched a table in any way, sets and elements included, and which transaction was
//! the last. After the notices about its changes each transaction has one about its number.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::socket::SockFlag;
use pointsman_crds::proxy_node_status::IpFamily;

use super::error::Error;
use super::ruleset::Table;
use super::wire;
use crate::netfilter;
use crate::netlink::{self, Body, IPV4, IPV6};

/// The kernel sends notices up to the size of a page.
pub(super) const DATAGRAM: usize = 64 * 1024;
/// A limit, not an allocation: a load of 20,000 elements causes notices of some MiB.
const RECEIVE_BUFFER: usize = 32 << 20;

/// A socket that gets the notices of the thread's network namespace.
pub(super) fn subscribe(flags: SockFlag) -> io::Result<OwnedFd> {
    netfilter::listen(flags, RECEIVE_BUFFER)
}

/// What a datagram tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// The table was touched.
    pub touched: bool,
    /// The number of the last transaction that is told completely.
    pub generation: Option<u32>,
}

/// Reads a datagram. Changes by the socket `own` do not count.
pub(super) fn read(datagram: &[u8], table: &Table, own: Option<u32>) -> Result<Told, Error> {
    let family = match table.family {
        IpFamily::IPv4 => IPV4,
        IpFamily::IPv6 => IPV6,
    };
    let mut told = Told::default();
    for message in netlink::messages(datagram) {
        let message = message?;
        match message.body {
            Body::Other { kind: wire::NEW_GENERATION, payload } => {
                told.generation = Some(wire::generation(payload)?);
            }
            Body::Other { payload, .. } if own != Some(message.port) => {
                let (of, name) = wire::table_of(payload)?;
                told.touched |= of == family && name == table.name;
            }
            _ => {}
        }
    }
    Ok(told)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::{Encoder, Header};

    fn notice(kind: u16, family: IpFamily, table: &str) -> Vec<u8> {
        let mut encoder = Encoder::default();
        encoder.message(Header::new(kind, 0, 0, family), |to| to.string(wire::TABLE, table));
        encoder.finish()
    }

    #[test]
    fn only_changes_of_the_table_by_others_count() {
        let table = Table::new(IpFamily::IPv4, "pointsman");
        let touched = |datagram: &[u8], own| read(datagram, &table, own).unwrap().touched;
        let ours = notice(wire::NEW_RULE, IpFamily::IPv4, "pointsman");
        assert!(touched(&ours, None) && touched(&ours, Some(1)));
        assert!(!touched(&ours, Some(0)), "by the socket with the number that it carries");
        assert!(!touched(&notice(wire::NEW_RULE, IpFamily::IPv6, "pointsman"), None));
        let other = notice(wire::NEW_RULE, IpFamily::IPv4, "pointsman-not");
        assert!(!touched(&other, None));
        let mut last = Encoder::default();
        last.message(Header::new(wire::NEW_GENERATION, 0, 0, IpFamily::IPv4), |to| to.number(1, 77));
        let datagram = [other, ours, last.finish()].concat();
        assert_eq!(read(&datagram, &table, None), Ok(Told { touched: true, generation: Some(77) }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes, &Table::new(IpFamily::IPv4, "pointsman"), None);
        }
    }
}
