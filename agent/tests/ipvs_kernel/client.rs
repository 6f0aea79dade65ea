//! Virtual servers, written and read back.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;

use nix::errno::Errno;
use pointsman_agent::ipvs::Error;
use pointsman_agent::ipvs::client::Connection;
use pointsman_agent::ipvs::server::{
    InstalledReal, InstalledServer, Key, ONE_PACKET, Operation, Persistence, RealServer, SCHEDULER_FALLBACK,
    SCHEDULER_PORT, Settings, Timeouts, VirtualServer,
};
use pointsman_agent::model::Protocol;
use pointsman_crds::proxy_node_status::IpFamily;

use crate::isolated;
use crate::support::world::FAMILIES;

/// Runs this with a connection in a new network namespace.
fn connected(test: impl FnOnce(Connection) + Send + 'static) {
    isolated(|| test(Connection::open().unwrap()));
}

fn server(protocol: Protocol, address: &str) -> VirtualServer {
    let address: SocketAddr = address.parse().unwrap();
    let settings = Settings { scheduler: "rr".into(), flags: 0, persistence: None };
    VirtualServer { key: Key::new(protocol, address.ip(), address.port()), settings }
}

fn real(address: &str, weight: u32) -> RealServer {
    RealServer { address: address.parse().unwrap(), weight }
}

fn add(server: &VirtualServer, reals: &[RealServer]) -> Vec<Operation> {
    let reals = reals.iter().map(|real| Operation::AddReal { server: server.key, real: *real });
    [Operation::AddServer(server.clone())].into_iter().chain(reals).collect()
}

fn idle(server: RealServer) -> InstalledReal {
    InstalledReal { server, plain: true, active: 0, inactive: 0, persistent: 0 }
}

/// What there is, by key; the kernel lists a new real server first.
fn sorted(connection: &mut Connection) -> Vec<InstalledServer> {
    let mut all = connection.read(&FAMILIES).unwrap();
    all.sort_by_key(|installed| installed.server.key);
    for installed in &mut all {
        installed.reals.sort_by_key(|real| real.server);
    }
    all
}

#[test]
fn the_kernel_tells_its_version_and_takes_timeouts() {
    connected(|mut connection| {
        let [major, minor, _] = connection.version().unwrap();
        assert_eq!((major, minor), (1, 2));
        let before = connection.timeouts().unwrap();
        assert!(before.tcp > 0 && before.tcp_fin > 0 && before.udp > 0, "{before:?}");
        connection.set_timeouts(Timeouts { tcp: 1234, tcp_fin: 0, udp: 77 }).unwrap();
        let after = Timeouts { tcp: 1234, tcp_fin: before.tcp_fin, udp: 77 };
        assert_eq!(connection.timeouts().unwrap(), after);
        let refused = connection.set_timeouts(Timeouts { tcp: u32::MAX, tcp_fin: 0, udp: 0 });
        let Err(Error::Refused(refusals)) = refused else { panic!("{refused:?}") };
        assert_eq!(refusals[0].errno, Errno::EINVAL);
        assert_eq!(connection.timeouts().unwrap(), after);
    });
}

#[test]
fn servers_of_every_kind_come_back() {
    connected(|mut connection| {
        let mut wanted = Vec::new();
        for protocol in Protocol::ALL {
            for (address, reals) in [
                ("10.96.0.10:80", [real("10.244.0.9:8080", 0), real("10.244.1.9:8080", 7)]),
                ("[fd00:96::10]:80", [real("[fd00:244::9]:8080", 1), real("[fd00:244::1:9]:8081", 65_535)]),
            ] {
                wanted.push((server(protocol, address), reals));
            }
        }
        let reals = [real("10.244.0.9:8080", 1), real("10.244.1.9:8080", 1)];
        let schedulers = ["wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh"];
        for (port, scheduler) in (100..).zip(schedulers) {
            let mut server = server(Protocol::Tcp, &format!("10.96.0.10:{port}"));
            server.settings.scheduler = scheduler.into();
            if scheduler == "sh" || scheduler == "mh" {
                server.settings.flags = SCHEDULER_FALLBACK | SCHEDULER_PORT;
            }
            wanted.push((server, reals));
        }
        for (port, prefix) in [(200, 32), (201, 24), (202, 1)] {
            let mut server = server(Protocol::Tcp, &format!("10.96.0.10:{port}"));
            server.settings.persistence = Some(Persistence { timeout: 10_800, prefix });
            wanted.push((server, reals));
        }
        let mut persistent = server(Protocol::Udp, "[fd00:96::10]:200");
        persistent.settings.persistence = Some(Persistence { timeout: 86_400, prefix: 128 });
        wanted.push((persistent, [real("[fd00:244::9]:53", 1), real("[fd00:244::a]:53", 1)]));
        let mut one_packet = server(Protocol::Udp, "10.96.0.10:300");
        one_packet.settings.flags = ONE_PACKET;
        wanted.push((one_packet, reals));
        for family in [IpFamily::IPv4, IpFamily::IPv6] {
            let key = Key::Mark { family, mark: 0xffff_0000 };
            let reals = match family {
                IpFamily::IPv4 => reals,
                IpFamily::IPv6 => [real("[fd00:244::9]:0", 1), real("[fd00:244::a]:0", 1)],
            };
            wanted.push((VirtualServer { key, ..server(Protocol::Tcp, "1.1.1.1:1") }, reals));
        }
        let operations: Vec<_> = wanted.iter().flat_map(|(server, reals)| add(server, reals)).collect();
        connection.apply(&operations).unwrap();

        wanted.sort_by_key(|(server, _)| server.key);
        let expected: Vec<_> = wanted
            .into_iter()
            .map(|(server, reals)| InstalledServer { server, reals: reals.map(idle).to_vec() })
            .collect();
        let read = sorted(&mut connection);
        for (read, expected) in read.iter().zip(&expected) {
            assert_eq!(read, expected);
        }
        assert_eq!(read.len(), expected.len());

        let removal: Vec<_> = read.iter().map(|one| Operation::RemoveServer(one.server.key)).collect();
        connection.apply(&removal).unwrap();
        assert_eq!(connection.read(&FAMILIES).unwrap(), []);
    });
}

#[test]
fn adding_again_edits_and_removing_again_is_fine() {
    connected(|mut connection| {
        let mut server = server(Protocol::Tcp, "10.96.0.10:80");
        server.settings.persistence = Some(Persistence { timeout: 10_800, prefix: 32 });
        connection.apply(&add(&server, &[real("10.244.0.9:8080", 1)])).unwrap();
        server.settings = Settings { scheduler: "mh".into(), flags: SCHEDULER_PORT, persistence: None };
        connection.apply(&add(&server, &[real("10.244.0.9:8080", 5), real("10.244.0.8:8080", 0)])).unwrap();
        let reals = vec![idle(real("10.244.0.8:8080", 0)), idle(real("10.244.0.9:8080", 5))];
        assert_eq!(
            sorted(&mut connection),
            [InstalledServer { server: server.clone(), reals: reals.clone() }]
        );

        server.settings = Settings { scheduler: "wrr".into(), flags: 0, persistence: None };
        let key = server.key;
        connection
            .apply(&[
                Operation::EditServer(server.clone()),
                Operation::EditReal { server: key, real: real("10.244.0.8:8080", 3) },
            ])
            .unwrap();
        let expected = [idle(real("10.244.0.8:8080", 3)), reals[1]];
        let mut read = connection.reals(&key).unwrap();
        read.sort_by_key(|real| real.server);
        assert_eq!(read, expected);
        assert_eq!(sorted(&mut connection), [InstalledServer { server, reals: read }]);

        let gone = Operation::RemoveReal { server: key, real: "10.244.0.8:8080".parse().unwrap() };
        connection.apply(&[gone.clone(), gone.clone()]).unwrap();
        connection.apply(&[Operation::RemoveServer(key), Operation::RemoveServer(key), gone]).unwrap();
        assert_eq!((connection.reals(&key).unwrap(), connection.read(&FAMILIES).unwrap()), (vec![], vec![]));
    });
}

#[test]
fn each_refusal_names_its_operation_and_the_others_are_made() {
    connected(|mut connection| {
        let mut operations = Vec::new();
        let mut expected = Vec::new();
        for port in 1..=500 {
            let mut server = server(Protocol::Tcp, &format!("10.96.0.10:{port}"));
            if port % 100 == 50 {
                server.settings.scheduler = "none-such".into();
                expected.push((operations.len(), Errno::ENOENT));
                // Of a virtual server that is not there.
                expected.push((operations.len() + 1, Errno::ESRCH));
            }
            operations.extend(add(&server, &[real("10.244.0.9:8080", 1)]));
        }
        let missing = Operation::EditReal {
            server: server(Protocol::Tcp, "10.96.0.10:1").key,
            real: real("10.244.0.1:1", 1),
        };
        expected.push((operations.len(), Errno::ENOENT));
        operations.push(missing);
        let refused = connection.apply(&operations);
        let Err(Error::Refused(refusals)) = refused else { panic!("{refused:?}") };
        let seen: Vec<_> = refusals.iter().map(|refusal| (refusal.index, refusal.errno)).collect();
        assert_eq!(seen, expected);
        assert!(refusals[0].to_string().contains("10.96.0.10:50/tcp"), "{}", refusals[0]);
        let read = connection.read(&FAMILIES).unwrap();
        assert_eq!(read.len(), 495);
        assert!(read.iter().all(|installed| installed.reals.len() == 1));
    });
}

#[test]
fn a_virtual_server_with_very_many_real_servers_is_read_whole() {
    connected(|mut connection| {
        let server = server(Protocol::Udp, "10.96.0.10:53");
        let reals: Vec<_> = (0..2000_u32)
            .map(|index| RealServer {
                address: (Ipv4Addr::from(0x0af4_0001 + index), 53).into(),
                weight: index,
            })
            .collect();
        connection.apply(&add(&server, &reals)).unwrap();
        let [read] = sorted(&mut connection).try_into().unwrap();
        assert_eq!(read.reals, reals.into_iter().map(idle).collect::<Vec<_>>());
    });
}

/// Half a second natively would be much; user-mode-linux is slow.
#[test]
fn three_thousand_servers_are_written_and_read_quickly() {
    connected(|mut connection| {
        let mut operations = Vec::new();
        for index in 0..3000_u32 {
            let address = IpAddr::V4(Ipv4Addr::from(0x0a60_0001 + index));
            let server = server(Protocol::Tcp, &SocketAddr::new(address, 80).to_string());
            let endpoint = |number| RealServer {
                address: (Ipv4Addr::from(0x0af4_0001 + index * 3 + number), 8080).into(),
                weight: 1,
            };
            operations.extend(add(&server, &[endpoint(0), endpoint(1), endpoint(2)]));
        }
        let time = |what: &str, connection: &mut Connection, work: &mut dyn FnMut(&mut Connection)| {
            let started = Instant::now();
            work(connection);
            println!("{what}: {:?}", started.elapsed());
        };
        let mut keys = BTreeSet::new();
        time("3,000 virtual servers and 9,000 real servers written", &mut connection, &mut |connection| {
            connection.apply(&operations).unwrap();
        });
        time("listed, without real servers", &mut connection, &mut |connection| {
            assert_eq!(connection.servers().unwrap().unwrap().len(), 3000);
        });
        time("read", &mut connection, &mut |connection| {
            let read = connection.read(&FAMILIES).unwrap();
            assert!(read.iter().all(|installed| installed.reals.len() == 3));
            keys = read.iter().map(|installed| installed.server.key).collect();
        });
        assert_eq!(keys.len(), 3000);
        time("written over themselves", &mut connection, &mut |connection| {
            connection.apply(&operations).unwrap();
        });
        let removal: Vec<_> = keys.into_iter().map(Operation::RemoveServer).collect();
        time("removed", &mut connection, &mut |connection| connection.apply(&removal).unwrap());
        assert_eq!(connection.read(&FAMILIES).unwrap(), []);
    });
}
