//! Round trips, refusals, and bytes of any kind.

use proptest::prelude::*;

use pointsman_crds::proxy_node_status::IpFamily;

use super::*;

/// Bytes of an attribute, padded.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap();
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn tuple_bytes(protocol: u8, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let (from, to) = if source.is_ipv4() { (1, 2) } else { (3, 4) };
    let addresses =
        [attribute(from, &octets(source.ip())), attribute(to, &octets(destination.ip()))].concat();
    let ports = [
        attribute(1, &[protocol]),
        attribute(2, &source.port().to_be_bytes()),
        attribute(3, &destination.port().to_be_bytes()),
    ]
    .concat();
    [attribute(0x8001, &addresses), attribute(0x8002, &ports)].concat()
}

fn payload(attributes: &[Vec<u8>]) -> Vec<u8> {
    [&[2, 0, 0, 0], attributes.concat().as_slice()].concat()
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn parts(protocol: u8) -> Vec<Vec<u8>> {
    vec![
        attribute(0x8001, &tuple_bytes(protocol, address("10.0.0.1:4000"), address("10.96.0.10:53"))),
        attribute(0x8002, &tuple_bytes(protocol, address("10.244.1.7:5353"), address("10.0.0.1:4000"))),
        attribute(3, &0x18a_u32.to_be_bytes()),
        attribute(7, &30_u32.to_be_bytes()),
        attribute(12, &77_u32.to_be_bytes()),
    ]
}

/// A message as the kernel sends it.
pub(in crate::conntrack) fn message_bytes(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len() + 16).unwrap();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The payload about a datagram flow from this port to 10.96.0.10:53, which leads to 10.244.1.7:5353.
pub(in crate::conntrack) fn entry_bytes(port: u16) -> Vec<u8> {
    let client = SocketAddr::from(([10, 0, 0, 1], port));
    let mut parts = parts(17);
    parts[0] = attribute(0x8001, &tuple_bytes(17, client, address("10.96.0.10:53")));
    parts[1] = attribute(0x8002, &tuple_bytes(17, address("10.244.1.7:5353"), client));
    payload(&parts)
}

fn sample() -> Entry {
    Entry {
        protocol: Protocol::Udp,
        original: Tuple { source: address("10.0.0.1:4000"), destination: address("10.96.0.10:53") },
        reply: Tuple { source: address("10.244.1.7:5353"), destination: address("10.0.0.1:4000") },
        status: 0x18a,
        tcp_state: None,
        zone: None,
        id: Some(77),
    }
}

#[test]
fn an_entry_is_read() {
    assert_eq!(entry(&payload(&parts(17))), Ok(Some(sample())));
}

#[test]
fn zones_and_states_are_read() {
    let mut with_zone = parts(17);
    with_zone.push(attribute(18, &5_u16.to_be_bytes()));
    assert_eq!(entry(&payload(&with_zone)).unwrap().unwrap().zone, Some(Zone::Entry(5)));

    let mut directional = parts(17);
    let mut tuple = tuple_bytes(17, address("10.0.0.1:4000"), address("10.96.0.10:53"));
    tuple.extend(attribute(3, &6_u16.to_be_bytes()));
    directional[0] = attribute(0x8001, &tuple);
    assert_eq!(entry(&payload(&directional)).unwrap().unwrap().zone, Some(Zone::Original(6)));

    let mut tcp = parts(6);
    tcp[2] = attribute(3, &0_u32.to_be_bytes());
    tcp.push(attribute(0x8004, &attribute(0x8001, &attribute(1, &[1]))));
    let tcp = entry(&payload(&tcp)).unwrap().unwrap();
    assert_eq!(tcp.tcp_state, Some(1));
    assert!(tcp.is_unanswered_syn());
}

#[test]
fn other_protocols_are_no_entries_of_ours() {
    let icmp = attribute(0x8001, &attribute(0x8002, &attribute(1, &[1])));
    assert_eq!(entry(&payload(&[icmp])), Ok(None));
    assert_eq!(entry(&payload(&parts(47))), Ok(None));
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let without = |index| {
        let mut parts = parts(17);
        parts.remove(index);
        entry(&payload(&parts))
    };
    assert_eq!(without(0), Err(WireError::Missing("an original direction")));
    assert_eq!(without(1), Err(WireError::Missing("a reply direction")));
    assert_eq!(without(2), Err(WireError::Missing("a status")));
    assert_eq!(entry(&[2, 0]), Err(WireError::Missing("a header")));
    let mut wrong = parts(17);
    wrong[2] = attribute(3, &[1, 2]);
    assert_eq!(entry(&payload(&wrong)), Err(WireError::Size { what: "status", length: 2 }));
    let cut = payload(&parts(17));
    assert!(matches!(entry(&cut[..cut.len() - 2]), Err(WireError::Attribute { claimed: 8, available: 6 })));
    for length in [0_u16, 3] {
        let bytes = [&[2, 0, 0, 0][..], &length.to_ne_bytes(), &[3, 0]].concat();
        assert!(matches!(entry(&bytes), Err(WireError::Attribute { .. })), "an attribute of {length} bytes");
    }
}

#[test]
fn messages_are_told_apart() {
    let datagram = [
        message_bytes(CT_NEW, 2, 9, &payload(&parts(17))),
        message_bytes(netlink::KIND_ERROR, 0, 9, &(-2_i32).to_ne_bytes()),
        message_bytes(netlink::KIND_ERROR, 0, 9, &0_i32.to_ne_bytes()),
        message_bytes(netlink::KIND_OVERRUN, 0, 9, &[]),
        message_bytes(1, 0, 9, &[]),
        message_bytes(netlink::KIND_DONE, 2 | netlink::INTERRUPTED, 9, &0_i32.to_ne_bytes()),
    ]
    .concat();
    let read: Vec<_> = messages(&datagram).map(Result::unwrap).collect();
    assert!(read.iter().all(|message| message.sequence == 9));
    assert!(matches!(read[0].body, Body::Entry(_)) && !read[0].interrupted);
    assert_eq!(read[1].body, Body::Outcome(-2));
    assert_eq!(read[2].body, Body::Outcome(0));
    assert_eq!(read[3].body, Body::Overrun);
    assert_eq!(read[4].body, Body::Other);
    assert!(read[5].body == Body::Done(0) && read[5].interrupted);
}

#[test]
fn a_broken_length_ends_a_datagram() {
    for length in [0_u32, 15, 17, u32::MAX] {
        let mut bytes = message_bytes(CT_NEW, 0, 1, &[]);
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        let read: Vec<_> = messages(&bytes).collect();
        assert!(matches!(read[..], [Err(WireError::Message { .. })]), "{length}: {read:?}");
    }
}

/// What the kernel would read from our deletion is what it wrote about the entry.
#[test]
fn a_deletion_names_the_entry_completely() {
    for zone in [None, Some(Zone::Entry(5)), Some(Zone::Original(6))] {
        for ends in [("10.0.0.1:4000", "10.96.0.10:53"), ("[fd00::1]:4000", "[fd00:96::a]:53")]
            .map(|(s, d)| Tuple { source: address(s), destination: address(d) })
        {
            let wanted = Entry { original: ends, zone, ..sample() };
            let request = delete_request(&wanted, 3, true);
            assert_eq!(
                request.len(),
                usize::try_from(u32::from_ne_bytes(request[..4].try_into().unwrap())).unwrap()
            );
            assert_eq!(request[4..6], CT_DELETE.to_ne_bytes());
            assert_eq!(request[6..8], 5_u16.to_ne_bytes(), "request and acknowledge");
            assert_eq!(request[16], if ends.source.is_ipv4() { 2 } else { 10 });
            let attributes: Vec<_> = attributes(&request[20..]).map(Result::unwrap).collect();
            let (kind, value) = attributes[0];
            assert_eq!(kind, CTA_TUPLE_ORIG, "without this the kernel deletes everything");
            let read = tuple(value).unwrap().unwrap();
            assert_eq!((read.tuple, read.protocol), (ends, Protocol::Udp));
            let whole = attributes.iter().find(|(kind, _)| *kind == CTA_ZONE);
            match zone {
                Some(Zone::Entry(zone)) => assert_eq!(whole.unwrap().1, zone.to_be_bytes()),
                Some(Zone::Original(zone)) => assert_eq!(read.zone, Some(zone)),
                None => assert!(whole.is_none() && read.zone.is_none()),
            }
            assert_eq!(attributes.last(), Some(&(CTA_ID, 77_u32.to_be_bytes().as_slice())));
        }
    }
}

#[test]
fn dumps_ask_for_what_matters() {
    let plain = dump_request(IpFamily::IPv6, DumpFilter::Family, 4);
    assert_eq!(plain.len(), 20);
    assert_eq!((plain[16], &plain[6..8]), (10, 0x301_u16.to_ne_bytes().as_slice()));
    let kinds = |protocol| {
        let request = dump_request(IpFamily::IPv4, DumpFilter::Protocol(protocol), 4);
        attributes(&request[20..]).map(|attribute| attribute.unwrap().0).collect::<Vec<_>>()
    };
    assert_eq!(kinds(Protocol::Udp), [CTA_TUPLE_ORIG, CTA_FILTER]);
    assert_eq!(kinds(Protocol::Tcp), [CTA_TUPLE_ORIG, CTA_FILTER, CTA_STATUS, CTA_STATUS_MASK]);
}

/// Reads everything that can be read from a datagram.
fn read_all(bytes: &[u8]) -> usize {
    let mut read = 0;
    for message in messages(bytes) {
        read += 1;
        if let Ok(Message { body: Body::Entry(payload), .. }) = message {
            let _ = entry(payload);
        }
    }
    let _ = entry(bytes);
    read
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(read_all(&bytes) <= bytes.len() / 16 + 1);
    }

    /// Nearly right bytes reach deeper than random ones.
    #[test]
    fn damaged_messages_are_survived(
        protocol in prop_oneof![Just(6_u8), Just(17), Just(132), any::<u8>()],
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        keep in any::<prop::sample::Index>(),
    ) {
        let mut bytes = message_bytes(CT_NEW, 2, 9, &payload(&parts(protocol)));
        for (index, byte) in damage {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        bytes.truncate(keep.index(bytes.len() + 1));
        read_all(&bytes);
    }
}
