use proptest::prelude::*;

use super::*;
use crate::ipvs::server::{InstalledReal, ONE_PACKET, SCHEDULER_PORT, Settings};
use crate::model::Protocol;
use crate::netlink::{ACK, Body, Message, hex, messages};

const ID: u16 = 0x1c;

fn only(bytes: &[u8]) -> (Message<'_>, &[u8]) {
    let mut all = messages(bytes).map(Result::unwrap);
    let message = all.next().unwrap();
    assert_eq!(all.next(), None);
    let Body::Other { kind, payload } = message.body else { panic!("{message:?}") };
    assert!(kind == ID || kind == CONTROL);
    (message, payload)
}

fn written(done: &Operation) -> Vec<u8> {
    let mut encoder = Encoder::default();
    operation(&mut encoder, ID, REQUEST | ACK, 7, done);
    encoder.finish()
}

fn server(persistence: Option<Persistence>, flags: u32) -> VirtualServer {
    let key = Key::new(Protocol::Tcp, [10, 96, 0, 10].into(), 80);
    VirtualServer { key, settings: Settings { scheduler: "rr".into(), flags, persistence } }
}

/// By hand from linux/ip_vs.h and linux/genetlink.h, on a machine with little-endian numbers.
#[test]
#[cfg(target_endian = "little")]
fn requests_are_what_the_header_says() {
    let family = "20000000 1000 0100 01000000 00000000 03010000 0900 0200 4950565300 000000";
    assert_eq!(get_family(1), hex(family));
    let identity = "0600 0100 0200 0000 0600 0200 0600 0000 1400 0300 0a60000a000000000000000000000000 0600 0400 0050 0000";
    let add = format!(
        "68000000 1c00 0500 07000000 00000000 01010000 5400 0180 {identity}
         0700 0600 727200 00 0c00 0700 01000000ffffffff 0800 0800 302a0000 0800 0900 ffffff00"
    );
    let persistence = Persistence { timeout: 10_800, prefix: 24 };
    assert_eq!(written(&Operation::AddServer(server(Some(persistence), 0))), hex(&add));
    let real = Operation::AddReal {
        server: server(None, 0).key,
        real: RealServer { address: "10.244.0.9:8080".parse().unwrap(), weight: 3 },
    };
    let add = format!(
        "8c000000 1c00 0500 07000000 00000000 05010000 3000 0180 {identity}
         4800 0280 1400 0100 0af40009000000000000000000000000 0600 0200 1f90 0000 0600 0b00 0200 0000
         0800 0300 00000000 0800 0400 03000000 0800 0500 00000000 0800 0600 00000000"
    );
    assert_eq!(written(&real), hex(&add));
    let mut timeouts = Encoder::default();
    set_timeouts(&mut timeouts, ID, REQUEST | ACK, 7, Timeouts { tcp: 900, tcp_fin: 0, udp: 300 });
    let set = "2c000000 1c00 0500 07000000 00000000 0c010000 0800 0400 84030000 0800 0500 00000000 0800 0600 2c010000";
    assert_eq!(timeouts.finish(), hex(set));
}

#[test]
fn commands_have_the_numbers_of_the_header() {
    let key = server(None, 0).key;
    let real = RealServer { address: "10.244.0.9:8080".parse().unwrap(), weight: 1 };
    let command = |bytes: &[u8]| only(bytes).1[0];
    let operations = [
        Operation::AddServer(server(None, 0)),
        Operation::EditServer(server(None, 0)),
        Operation::RemoveServer(key),
        Operation::AddReal { server: key, real },
        Operation::EditReal { server: key, real },
        Operation::RemoveReal { server: key, real: real.address },
    ];
    let numbers: Vec<_> = operations.iter().map(|operation| command(&written(operation))).collect();
    assert_eq!(numbers, [1, 2, 3, 5, 6, 7]);
    let asked = [list_servers(ID, 1), list_reals(ID, 1, &key), get_timeouts(ID, 1), get_info(ID, 1)];
    assert_eq!(asked.map(|bytes| command(&bytes)), [4, 8, 13, 15]);
}

#[test]
fn what_the_kernel_sets_by_itself_is_not_asked_for() {
    let odd = server(None, PERSISTENT | HASHED | ONE_PACKET | SCHEDULER_PORT);
    let bytes = written(&Operation::AddServer(odd));
    let Ok(Parsed::Server(read)) = virtual_server(only(&bytes).1) else { panic!() };
    assert_eq!(read.settings.flags, ONE_PACKET | SCHEDULER_PORT);
    assert_eq!(read.settings.persistence, None);
}

#[test]
fn answers_are_read() {
    let answer = |command, fill: &dyn Fn(&mut Encoder)| {
        let mut encoder = Encoder::default();
        encoder.request(ID, 0, 1, &header(command), |to| fill(to));
        let bytes = encoder.finish();
        only(&bytes).1.to_vec()
    };
    let family = answer(1, &|to| {
        to.string(CONTROL_NAME, FAMILY);
        to.attribute(CONTROL_ID, &ID.to_ne_bytes());
    });
    assert_eq!(family_id(&family), Ok(ID));
    let info = answer(14, &|to| {
        to.native(INFO_VERSION, 0x0001_0201);
        to.native(2, 4096);
    });
    assert_eq!(version(&info), Ok([1, 2, 1]));
    let config = answer(12, &|to| {
        to.native(TIMEOUT_TCP, 900);
        to.native(TIMEOUT_TCP_FIN, 120);
        to.native(TIMEOUT_UDP, 300);
    });
    assert_eq!(timeouts(&config), Ok(Timeouts { tcp: 900, tcp_fin: 120, udp: 300 }));
    let nothing = answer(14, &|_| {});
    assert_eq!(version(&nothing), Err(WireError::Missing("the version of IPVS")));
    assert!(family_id(&nothing).is_err() && virtual_server(&nothing).is_err());
    assert!(real(&nothing, IpFamily::IPv4).is_err() && timeouts(&[1, 2]).is_err());
}

#[test]
fn servers_of_others_are_told_from_ours() {
    let listed = |family: u16, protocol: u16| {
        let mut encoder = Encoder::default();
        encoder.request(ID, 0, 1, &header(NEW_SERVICE), |to| {
            to.nested(SERVICE, |to| {
                to.attribute(SVC_FAMILY, &family.to_ne_bytes());
                to.attribute(SVC_PROTOCOL, &protocol.to_ne_bytes());
                to.attribute(SVC_ADDRESS, &[1; 16]);
                to.attribute(SVC_PORT, &[0, 80]);
            });
        });
        virtual_server(only(&encoder.finish()).1)
    };
    assert_eq!(listed(2, 33), Ok(Parsed::Unknown), "of another protocol");
    assert_eq!(listed(12, 6), Ok(Parsed::Unknown), "of another family");
    let Ok(Parsed::Server(read)) = listed(2, 132) else { panic!() };
    assert_eq!(read.key, Key::new(Protocol::Sctp, [1, 1, 1, 1].into(), 80));
    assert_eq!(read.settings.scheduler, "", "which the kernel allows");
}

#[test]
fn real_servers_have_connections_and_may_be_set_otherwise() {
    let listed = |method: u32, limit: u32, family: Option<u16>| {
        let mut encoder = Encoder::default();
        encoder.request(ID, 0, 1, &header(NEW_DEST), |to| {
            to.nested(DEST, |to| {
                to.attribute(DEST_ADDRESS, &union([10, 0, 0, 1].into()));
                to.attribute(DEST_PORT, &8080_u16.to_be_bytes());
                to.native(DEST_METHOD, method);
                to.native(DEST_WEIGHT, 5);
                to.native(DEST_UPPER, limit);
                to.native(DEST_LOWER, 0);
                to.native(DEST_ACTIVE, 11);
                to.native(DEST_INACTIVE, 12);
                to.native(DEST_PERSISTENT, 13);
                if let Some(family) = family {
                    to.attribute(DEST_FAMILY, &family.to_ne_bytes());
                }
            });
        });
        real(only(&encoder.finish()).1, IpFamily::IPv4).unwrap()
    };
    let server = RealServer { address: "10.0.0.1:8080".parse().unwrap(), weight: 5 };
    let ours = InstalledReal { server, plain: true, active: 11, inactive: 12, persistent: 13 };
    assert_eq!(listed(0, 0, Some(2)), Some(ours));
    assert_eq!(listed(0, 0, None), Some(ours), "kernels before 3.18 say no family");
    assert_eq!(listed(1, 0, None), Some(ours), "on this node");
    let tunnel = Some(InstalledReal { plain: false, ..ours });
    assert_eq!((listed(2, 0, None), listed(3, 0, None), listed(0, 9, None)), (tunnel, tunnel, tunnel));
    assert_eq!(listed(0, 0, Some(1)), None);
}

fn any_key() -> impl Strategy<Value = Key> {
    let address = (0..3_usize, any::<IpAddr>(), any::<u16>())
        .prop_map(|(protocol, address, port)| Key::new(Protocol::ALL[protocol], address, port));
    let family = prop_oneof![Just(IpFamily::IPv4), Just(IpFamily::IPv6)];
    prop_oneof![address, (family, 1..=u32::MAX).prop_map(|(family, mark)| Key::Mark { family, mark })]
}

proptest! {
    #[test]
    fn what_is_written_is_what_is_read(
        key in any_key(),
        scheduler in "[a-z]{1,15}",
        flags in (0..16_u32).prop_map(|bits| bits << 2),
        persistence in proptest::option::of((any::<u32>(), 1..=32_u8)),
        real_address in any::<std::net::SocketAddr>(),
        weight in 0..i32::MAX.cast_unsigned(),
    ) {
        let persistence = persistence.map(|(timeout, prefix)| Persistence { timeout, prefix });
        let settings = Settings { scheduler: scheduler.into(), flags, persistence };
        let wanted = VirtualServer { key, settings };
        let bytes = written(&Operation::EditServer(wanted.clone()));
        prop_assert_eq!(virtual_server(only(&bytes).1), Ok(Parsed::Server(wanted)));

        let address = std::net::SocketAddr::new(real_address.ip(), real_address.port());
        let added = RealServer { address, weight };
        let bytes = written(&Operation::AddReal { server: key, real: added });
        let none = InstalledReal { server: added, plain: true, active: 0, inactive: 0, persistent: 0 };
        prop_assert_eq!(real(only(&bytes).1, key.family()), Ok(Some(none)));
    }

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = (virtual_server(&bytes), real(&bytes, IpFamily::IPv6), timeouts(&bytes));
        let _ = (family_id(&bytes), version(&bytes));
    }

    /// Random bytes rarely get beyond the first attribute; damaged messages do.
    #[test]
    fn damaged_messages_are_survived(at in any::<prop::sample::Index>(), with in any::<u8>(), cut in 0..160_usize) {
        let real = RealServer { address: "[fd00::9]:8080".parse().unwrap(), weight: 3 };
        let key = Key::new(Protocol::Udp, "fd00::10".parse().unwrap(), 53);
        let persistence = Some(Persistence { timeout: 10, prefix: 128 });
        let settings = Settings { scheduler: "mh".into(), flags: 0, persistence };
        for operation in [
            Operation::AddServer(VirtualServer { key, settings }),
            Operation::AddReal { server: key, real },
        ] {
            let mut bytes = written(&operation);
            bytes.drain(..crate::netlink::MESSAGE_HEADER);
            let index = at.index(bytes.len());
            bytes[index] = with;
            bytes.truncate(bytes.len().saturating_sub(cut));
            let _ = (virtual_server(&bytes), super::real(&bytes, IpFamily::IPv6));
        }
    }
}
