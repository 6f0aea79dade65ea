//! Mode ipvs as a whole: taking over, drift, endpoints that leave, changes of the mode under traffic, cleanup.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pointsman_agent::iptables::{self, Tools};
use pointsman_agent::ipvs::client::Connection;
use pointsman_agent::ipvs::server::{Key, Operation, RealServer, Settings, Timeouts, VirtualServer};
use pointsman_agent::model::{Change, Protocol};
use pointsman_agent::sync::node::{Dataplane, Node};
use pointsman_agent::sync::{Opened, Platform};
use pointsman_agent::sysctl::{Machine, Sysctls};
use pointsman_agent::userspace::counters::Counters;
use pointsman_agent::{ipvs, sysctl};
use pointsman_crds::settings::{IptablesBackend, IpvsScheduler, Mode};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

use crate::support;
use crate::support::lab::{Lab, NODE, address, ip};
use crate::support::scenario::hosts::Host;
use crate::support::traffic::{Answer, PATIENT, ask};
use crate::support::world::{FAMILIES, Way, World, block_on, config};

fn tools() -> Tools {
    block_on(Tools::detect(IptablesBackend::Legacy)).unwrap()
}

/// In the network namespace of the thread.
fn open() -> Dataplane {
    let opened = block_on(ipvs::Dataplane::open(tools(), &FAMILIES, IpvsScheduler::Rr));
    Dataplane::Ipvs(Box::new(opened.unwrap()))
}

/// Takes the thread to the node of a new lab.
fn at_node(test: impl FnOnce(Arc<Lab>) + Send + 'static) {
    support::needs_ipvs();
    let inside = || {
        let lab = Arc::new(Lab::new().unwrap());
        lab.enter(NODE);
        let applied = Sysctls::new(Path::new("/proc/sys")).prepare_ipvs(Machine::this());
        let failed = |setting| applied.failed.iter().any(|failed| failed.write.setting == setting);
        assert!(!failed(sysctl::Setting::IpvsConntrack), "{applied:?}");
        test(lab);
    };
    if let Err(panic) = std::thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}

const CLUSTER_IP: [&str; 2] = ["172.30.0.80", "fd00:ac:1e::50"];

fn load(world: &mut World) {
    world.service(
        "web",
        json!({
            "type": "NodePort",
            "clusterIPs": CLUSTER_IP,
            "ports": [
                {"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080},
                {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
            ],
        }),
    );
    world.endpoints("web", &["a", "r"]);
}

fn loaded(dataplane: Dataplane) -> World {
    let mut world = World::usual(dataplane);
    load(&mut world);
    world
}

/// The node, opened as the sync loop does it.
fn open_node(mode: Mode, world: &World) -> (Node, Opened<Dataplane>) {
    let mut config = config();
    config.mode = mode;
    config.iptables.backend = IptablesBackend::Legacy;
    let mut node = Node::new(Path::new("/proc/sys"), Counters::default());
    let opened = world.runtime.block_on(node.open(&config, world.model.node())).unwrap();
    assert_eq!((opened.mode, opened.fallback.as_ref()), (mode, None));
    (node, opened)
}

fn frontends() -> Vec<(&'static str, SocketAddr)> {
    let mut all = Vec::new();
    for (v6, cluster_ip) in [false, true].into_iter().zip(CLUSTER_IP) {
        let cluster_ip = SocketAddr::from((ip(cluster_ip), 80));
        all.push(("client", SocketAddr::from((address("node", v6), 30080))));
        all.push(("node", cluster_ip));
        all.push(("pod", cluster_ip));
    }
    all
}

fn all_answer(lab: &Lab) {
    for (from, to) in frontends() {
        let answer = lab.tcp(from, to);
        assert!(matches!(answer, Answer::From(..)), "{from} to {to}: {answer:?}");
    }
}

fn key(protocol: Protocol, address: &str, port: u16) -> Key {
    Key::new(protocol, ip(address), port)
}

fn reals(key: &Key) -> Vec<(IpAddr, u32)> {
    let reals = Connection::open().unwrap().reals(key).unwrap();
    reals.into_iter().map(|real| (real.server.address.ip(), real.server.weight)).collect()
}

/// Asks all the time; returns how often, and what went wrong.
struct Traffic {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<(usize, Vec<String>)>>,
}

impl Traffic {
    fn start(lab: &Lab) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = frontends().into_iter().map(|(from, to)| {
            let stop = stop.clone();
            let source = Host::named(from).unwrap().source(&to);
            lab.spawn(Host::named(from).unwrap().namespace, move || {
                let (mut count, mut failed) = (0, Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    let answer = block_on(ask(source, to, Protocol::Tcp, PATIENT));
                    let late = start.elapsed() > Duration::from_millis(950);
                    if late || !matches!(answer, Answer::From(..)) {
                        failed.push(format!("{from} to {to}: {answer:?} after {:?}", start.elapsed()));
                    }
                    count += 1;
                    std::thread::park_timeout(Duration::from_millis(20));
                }
                (count, failed)
            })
        });
        Self { threads: threads.collect(), stop }
    }

    fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let mut total = 0;
        for thread in self.threads {
            let (count, failed) = thread.join().unwrap();
            assert_eq!(failed, Vec::<String>::new(), "of {count}");
            total += count;
        }
        total
    }
}

/// Sets are written by netlink; an administrator looks at them with the tool.
#[test]
fn the_tool_shows_the_sets_as_they_are_meant() {
    at_node(|lab| {
        let mut world = loaded(open());
        world.service(
            "guarded",
            json!({
                "type": "LoadBalancer",
                "clusterIPs": ["172.30.0.81", "fd00:ac:1e::51"],
                "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 30099,
                "loadBalancerSourceRanges": ["203.0.113.0/24", "198.51.100.7/32", "2001:db8::/64"],
                "ports": [
                    {"name": "web", "protocol": "TCP", "port": 443, "nodePort": 30443},
                    {"name": "diameter", "protocol": "SCTP", "port": 3868, "nodePort": 30081},
                ],
                "status": {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}, {"ip": "2001:db8:1::4"}]}},
            }),
        );
        world.endpoints("guarded", &["a"]);
        world.settle();
        assert_eq!(world.differences(), Vec::<String>::new());
        let saved = lab.node("ipset save");
        for member in [
            "INTERNAL 172.30.0.80,tcp:80",
            "INTERNAL 172.30.0.80,udp:53",
            "6-INTERNAL fd00:ac:1e::51,sctp:3868",
            "ADDRESSES 172.30.0.81",
            "6-ADDRESSES fd00:ac:1e::51",
            "HEALTH 30099",
            "GUARDED 1.2.3.4,tcp:443",
            "ALLOWED 1.2.3.4,tcp:443,203.0.113.0/24",
            "ALLOWED 1.2.3.4,tcp:443,198.51.100.7",
            "6-ALLOWED 2001:db8:1::4,tcp:443,2001:db8::/64",
        ] {
            assert!(
                saved.lines().any(|line| line == format!("add POINTSMAN-IPVS-{member}")),
                "{member} in {saved}"
            );
        }
        for definition in [
            "create POINTSMAN-IPVS-ALLOWED hash:ip,port,net family inet ",
            "create POINTSMAN-IPVS-6-LOOPS hash:ip,port,ip family inet6 ",
            "create POINTSMAN-IPVS-HEALTH bitmap:port range 0-65535",
        ] {
            assert!(saved.lines().any(|line| line.starts_with(definition)), "{definition} in {saved}");
        }
    });
}

#[test]
fn ipvs_a_restart_finds_everything_in_place_and_writes_nothing() {
    at_node(|lab| {
        let mut world = loaded(open());
        let synced = world.settle();
        assert!(synced.full && synced.written.values().sum::<usize>() > 0);
        all_answer(&lab);
        let synced = loaded(open()).settle();
        assert!(synced.full);
        assert_eq!(synced.written.values().sum::<usize>(), 0, "{:?}", synced.written);
        // ClusterIP and NodePort of DNS, in both families.
        assert_eq!(synced.served.len(), 4, "{:?}", synced.served);
        // What an agent has not seen go is removed by the next one.
        let mut successor = World::usual(open());
        successor.settle();
        assert_eq!(Connection::open().unwrap().servers().unwrap().unwrap(), []);
        for (from, to) in frontends() {
            assert!(!matches!(lab.tcp(from, to), Answer::From(..)), "{from} to {to}");
        }
    });
}

#[test]
fn ipvs_our_own_virtual_servers_go_from_a_block_that_was_excluded_while_no_agent_ran() {
    at_node(|_| {
        loaded(open()).settle();
        let foreign = VirtualServer {
            key: key(Protocol::Tcp, CLUSTER_IP[0], 8443),
            settings: Settings { scheduler: "wlc".into(), flags: 0, persistence: None },
        };
        let mut connection = Connection::open().unwrap();
        connection.apply(&[Operation::AddServer(foreign.clone())]).unwrap();
        let mut config = config();
        config.ipvs.exclude_cidrs = vec!["172.30.0.0/24".parse().unwrap()];
        let mut successor = World::usual(open());
        successor.configure(config);
        load(&mut successor);
        successor.settle();
        let there = connection.servers().unwrap().unwrap().into_iter();
        let excluded = there.filter(|server| server.key.address() == Some(ip(CLUSTER_IP[0])));
        assert_eq!(excluded.collect::<Vec<_>>(), [foreign]);
        assert!(!reals(&key(Protocol::Tcp, CLUSTER_IP[1], 80)).is_empty(), "the rest is served");
    });
}

// ids: REG-59507 REG-109286
#[test]
fn syn_10_what_others_change_is_found_and_repaired_where_it_differs() {
    at_node(|lab| {
        let foreign = VirtualServer {
            key: key(Protocol::Tcp, "203.0.113.200", 80),
            settings: Settings { scheduler: "wlc".into(), flags: 0, persistence: None },
        };
        let real = RealServer { address: "203.0.113.9:80".parse().unwrap(), weight: 7 };
        let mut connection = Connection::open().unwrap();
        let add = Operation::AddReal { server: foreign.key, real };
        connection.apply(&[Operation::AddServer(foreign.clone()), add]).unwrap();
        let mut world = loaded(open());
        world.settle();
        let web = key(Protocol::Tcp, CLUSTER_IP[0], 80);
        let endpoint = SocketAddr::new(address("a", false), 8080);
        let edit = RealServer { address: endpoint, weight: 9 };
        let wrong = VirtualServer { key: web, settings: foreign.settings.clone() };
        let operations = [
            (Operation::RemoveReal { server: web, real: endpoint }, "real server 10.180.0.1:8080 missing"),
            (Operation::EditReal { server: web, real: edit }, "different"),
            (Operation::AddReal { server: web, real }, "real server 203.0.113.9:80 left over"),
            (Operation::RemoveServer(web), "virtual server 172.30.0.80:80/tcp: missing"),
            (Operation::EditServer(wrong), "virtual server 172.30.0.80:80/tcp: different"),
        ];
        let check = |world: &mut World, what: &str, expected: &str, count: usize| {
            let differences = world.differences();
            assert!(differences.iter().any(|line| line.contains(expected)), "{what}: {differences:?}");
            assert_eq!(differences.len(), count, "{what}: {differences:?}");
            let errors = world
                .runtime
                .block_on(pointsman_agent::sync::Dataplane::repair(&mut world.dataplane, &world.plan));
            assert_eq!(errors, [], "{what}");
            assert_eq!(world.differences(), Vec::<String>::new(), "{what}");
            all_answer(&lab);
        };
        for (operation, expected) in operations {
            connection.apply(std::slice::from_ref(&operation)).unwrap();
            check(&mut world, &operation.to_string(), expected, 1);
        }
        for (command, expected, count) in [
            ("ipset flush POINTSMAN-IPVS-EXTERNAL", "set POINTSMAN-IPVS-EXTERNAL: missing", 2),
            ("ipset add POINTSMAN-IPVS-DROP 172.30.0.80,tcp:80", "set POINTSMAN-IPVS-DROP: not ours", 1),
            ("iptables-legacy -t nat -F POINTSMAN-IPVS-MASQ", "nat chain POINTSMAN-IPVS-MASQ", 1),
            ("ip6tables-legacy -t mangle -D PREROUTING 1", "IPv6 mangle chain PREROUTING: no way to", 1),
            (
                "ip route del table local local 172.30.0.80 dev kube-ipvs0",
                "local route to 172.30.0.80: missing",
                1,
            ),
            ("ip route add local 172.30.0.81 dev kube-ipvs0 table local", "172.30.0.81: left over", 1),
            ("ip addr add 172.30.0.82/32 dev kube-ipvs0", "address 172.30.0.82 on kube-ipvs0: left over", 3),
            ("ip link del kube-ipvs0", "local route to 172.30.0.80: missing", 2),
        ] {
            lab.node(command);
            check(&mut world, command, expected, count);
        }
        let there = connection.servers().unwrap().unwrap();
        assert!(there.contains(&foreign), "{there:?}");
        assert_eq!(reals(&foreign.key), [(real.address.ip(), 7)]);
        // A write that fails is read back: somebody has a route to an address that is to become local.
        lab.node("ip route add local 172.30.0.90 dev lo table local");
        world.service(
            "new",
            json!({"clusterIPs": ["172.30.0.90", "fd00:ac:1e::90"], "ports": [{"name": "web", "port": 80}]}),
        );
        let (_, errors) = world.try_sync();
        assert_eq!(errors.len(), 1, "IPv6 is written all the same");
        assert!(errors[0].message.contains("172.30.0.90"), "{errors:?}");
        lab.node("ip route del local 172.30.0.90 dev lo table local");
        assert!(world.settle().full);
        all_answer(&lab);
        // Everything of ours goes, and nothing else.
        block_on(ipvs::cleanup(&[tools()], &FAMILIES)).unwrap();
        assert_eq!(connection.servers().unwrap().unwrap(), [foreign]);
        let left = lab.node("ipset list -name; iptables-legacy-save; ip6tables-legacy-save; ip link");
        assert!(
            !left.contains("PM-IPVS") && !left.contains("POINTSMAN") && !left.contains("kube-ipvs0"),
            "{left}"
        );
        block_on(ipvs::cleanup(&[tools()], &FAMILIES)).unwrap();
    });
}

#[test]
fn syn_10_timeouts_that_others_have_changed_are_found_and_repaired() {
    at_node(|_| {
        let mut world = loaded(open());
        let mut config = config();
        config.ipvs.tcp_timeout_seconds = 777;
        config.ipvs.udp_timeout_seconds = 0;
        world.configure(config);
        world.settle();
        let mut connection = Connection::open().unwrap();
        connection.set_timeouts(Timeouts { tcp: 0, tcp_fin: 0, udp: 99 }).unwrap();
        assert_eq!(world.differences(), Vec::<String>::new(), "the kernel's own value was asked for");
        connection.set_timeouts(Timeouts { tcp: 900, tcp_fin: 0, udp: 0 }).unwrap();
        let differences = world.differences();
        assert!(differences[0].contains("timeouts of IPVS: 900 "), "{differences:?}");
        assert_eq!(connection.timeouts().unwrap().tcp, 900, "nothing is written yet");
        let repair = pointsman_agent::sync::Dataplane::repair(&mut world.dataplane, &world.plan);
        assert_eq!(world.runtime.block_on(repair), []);
        assert_eq!(world.differences(), Vec::<String>::new());
        let timeouts = connection.timeouts().unwrap();
        assert_eq!((timeouts.tcp, timeouts.udp), (777, 99));
    });
}

#[test]
fn ipvs_connections_to_an_endpoint_that_leaves_go_on_and_it_goes_with_the_last_one() {
    at_node(|lab| {
        let mut world = loaded(open());
        world.endpoints("web", &["a"]);
        world.settle();
        let web = key(Protocol::Tcp, CLUSTER_IP[0], 80);
        let mut stream = lab.stream("pod", (ip(CLUSTER_IP[0]), 80));
        assert!(stream.answers());
        world.endpoints("web", &["b"]);
        world.settle();
        let (a, b) = (address("a", false), address("b", false));
        let mut there = reals(&web);
        there.sort_unstable();
        assert_eq!(there, [(a, 0), (b, 1)]);
        assert_eq!(reals(&key(Protocol::Udp, CLUSTER_IP[0], 53)), [(b, 1)], "at once");
        assert!(stream.answers());
        for _ in 0..4 {
            assert!(matches!(lab.tcp("pod", (ip(CLUSTER_IP[0]), 80)), Answer::From(name, _) if name == "b"));
        }
        // A successor finds it as it should be, and leads on.
        let mut successor = World::usual(open());
        load(&mut successor);
        successor.endpoints("web", &["b"]);
        let synced = successor.settle();
        assert_eq!(reals(&web).len(), 2);
        assert!(synced.written.values().sum::<usize>() <= 2, "{:?}", synced.written);
        assert!(stream.answers());
        // The endpoint comes back.
        successor.endpoints("web", &["a", "b"]);
        successor.settle();
        assert!(reals(&web).iter().all(|(_, weight)| *weight == 1));
        successor.endpoints("web", &["b"]);
        successor.settle();
        stream.reset();
        let begun = Instant::now();
        // The kernel keeps a connection that has been broken off for ten seconds.
        while reals(&web).len() > 1 {
            assert!(begun.elapsed() < Duration::from_mins(1), "{:?}", reals(&web));
            let changed = pointsman_agent::sync::Dataplane::changed(&mut successor.dataplane);
            let _ = successor
                .runtime
                .block_on(async { tokio::time::timeout(Duration::from_secs(11), changed).await });
        }
        assert_eq!(successor.differences(), Vec::<String>::new());
    });
}

#[test]
fn ipvs_an_endpoint_that_leaves_gets_no_new_connection_and_keeps_nobody_from_the_others_with_any_scheduler() {
    use IpvsScheduler::{Dh, Lblc, Lblcr, Lc, Mh, Nq, Rr, Sed, Sh, Wlc, Wrr};
    at_node(|lab| {
        let mut world = loaded(open());
        let frontend = SocketAddr::new(ip(CLUSTER_IP[0]), 80);
        let server = Key::new(Protocol::Tcp, frontend.ip(), frontend.port());
        for scheduler in [Rr, Wrr, Lc, Wlc, Lblc, Lblcr, Sh, Dh, Sed, Nq, Mh] {
            let mut config = config();
            config.ipvs.scheduler = scheduler;
            world.configure(config);
            world.endpoints("web", &["a", "b", "r"]);
            world.settle();
            let mut stream = lab.stream("pod", frontend);
            let reals = Connection::open().unwrap().reals(&server).unwrap();
            let used = reals.iter().find(|real| real.active > 0).unwrap().server.address.ip();
            let stays = |name: &&str| address(name, false) != used;
            let rest: Vec<_> = ["a", "b", "r"].into_iter().filter(stays).collect();
            world.endpoints("web", &rest);
            world.settle();
            for _ in 0..6 {
                let answer = lab.tcp("pod", frontend);
                let is_other = matches!(&answer, Answer::From(name, _) if rest.contains(&name.as_str()));
                assert!(is_other, "{scheduler:?}: {answer:?}, not one of {rest:?}");
            }
            assert!(scheduler == Dh || stream.answers(), "{scheduler:?}");
            stream.reset();
        }
    });
}

#[test]
fn ipvs_an_endpoint_that_leaves_keeps_its_associations_of_sctp() {
    at_node(|lab| {
        let mut world = World::usual(open());
        let to = SocketAddr::new(ip("172.30.0.81"), 3868);
        let port = json!({"name": "signals", "protocol": "SCTP", "port": to.port()});
        world.service("signals", json!({"clusterIPs": [to.ip()], "ports": [port]}));
        let mut lead_to = |pod: &str| {
            let mut slice = support::world::slice("signals", FAMILIES[0], &[pod]);
            let port = json!([{"name": "signals", "protocol": "SCTP", "port": 8080}]);
            slice.ports = serde_json::from_value(port).unwrap();
            world.apply(Change::SliceApplied(Box::new(slice)));
            world.settle();
        };
        let pod = Host::named("pod").unwrap();
        let asked = || {
            let asks = move || block_on(ask(pod.source(&to), to, Protocol::Sctp, PATIENT));
            lab.run(pod.namespace, asks)
        };
        lead_to("a");
        assert!(matches!(asked(), Answer::From(name, _) if name == "a"));
        lead_to("b");
        let mut there = reals(&Key::new(Protocol::Sctp, to.ip(), to.port()));
        there.sort_unstable();
        assert_eq!(there, [(address("a", false), 0), (address("b", false), 1)]);
        assert!(matches!(asked(), Answer::From(name, _) if name == "b"));
    });
}

/// Asks from this port, lets the other end close the connection as well, and says who answered and after how long.
fn ask_from(lab: &Lab, port: u16, to: SocketAddr) -> (Answer, Duration) {
    let pod = Host::named("pod").unwrap();
    let source = SocketAddr::new(pod.source(&to).unwrap(), port);
    lab.run(pod.namespace, move || {
        // The port may be used again while its last connection is remembered here, for a second at least.
        std::fs::write("/proc/sys/net/ipv4/tcp_tw_reuse", "1").unwrap();
        let begun = Instant::now();
        block_on(async {
            let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.unwrap();
            socket.set_reuseaddr(true).unwrap();
            socket.bind(source).unwrap();
            let mut stream = socket.connect(to).await.unwrap();
            let mut line = String::new();
            stream.shutdown().await.unwrap();
            stream.read_to_string(&mut line).await.unwrap();
            let (name, source) = line.trim_end().split_once(' ').unwrap();
            (Answer::From(name.to_owned(), source.parse().unwrap()), begun.elapsed())
        })
    })
}

#[test]
fn reg_81775_a_port_that_is_used_again_does_not_lead_to_an_endpoint_that_leaves() {
    at_node(|lab| {
        let mut world = loaded(open());
        for (number, (vip, v6)) in (0..).zip(CLUSTER_IP.into_iter().zip([false, true])) {
            world.endpoints("web", &["a"]);
            world.settle();
            let (port, to) = (40_000 + number, SocketAddr::new(ip(vip), 80));
            let answered = |(answer, after): (Answer, Duration), by: &str| {
                assert!(matches!(&answer, Answer::From(name, _) if name == by), "{answer:?}");
                assert!(after < Duration::from_millis(950), "a SYN was lost: {after:?}");
            };
            answered(ask_from(&lab, port, to), "a");
            world.endpoints("web", &["b"]);
            world.settle();
            let leaving = (address("a", v6), 0);
            assert!(reals(&key(Protocol::Tcp, vip, 80)).contains(&leaving), "it is remembered");
            std::thread::park_timeout(Duration::from_millis(1500));
            answered(ask_from(&lab, port, to), "b");
        }
    });
}

// ids: SYN-17 REG-109286
#[test]
fn ipvs_a_change_of_the_mode_and_back_loses_nothing() {
    at_node(|lab| {
        let mut world = loaded(open());
        world.settle();
        let mut streams: Vec<_> = frontends().into_iter().map(|(from, to)| lab.stream(from, to)).collect();
        let traffic = Traffic::start(&lab);
        let mut node = Node::new(Path::new("/proc/sys"), Counters::default());
        for _ in 0..3 {
            let old = std::mem::replace(
                &mut world.dataplane,
                Dataplane::Iptables(iptables::Dataplane::new(tools(), &FAMILIES)),
            );
            assert!(world.settle().full);
            world.runtime.block_on(node.retire(&old, &world.dataplane)).unwrap();
            assert_eq!(world.differences(), Vec::<String>::new());
            let done = world.runtime.block_on(node.take_over(&world.dataplane, &world.plan));
            assert!(!done.unwrap(), "connections run through IPVS");
            assert!(streams.iter_mut().all(support::traffic::Stream::answers));
            let old = std::mem::replace(&mut world.dataplane, open());
            world.settle();
            world.runtime.block_on(node.retire(&old, &world.dataplane)).unwrap();
            assert!(world.runtime.block_on(node.take_over(&world.dataplane, &world.plan)).unwrap());
            assert_eq!(world.differences(), Vec::<String>::new());
            assert!(streams.iter_mut().all(support::traffic::Stream::answers));
        }
        // And for good.
        let old = std::mem::replace(
            &mut world.dataplane,
            Dataplane::Iptables(iptables::Dataplane::new(tools(), &FAMILIES)),
        );
        world.settle();
        world.runtime.block_on(node.retire(&old, &world.dataplane)).unwrap();
        let count = traffic.stop();
        assert!(count > 50, "{count}");
        // A deleted Service is not served by what is left, and its connections go on.
        world.delete_service("web");
        world.settle();
        assert!(streams.iter_mut().all(support::traffic::Stream::answers));
        // The agent is killed meanwhile.
        drop(node);
        let (mut node, opened) = open_node(Mode::Iptables, &world);
        world.dataplane = opened.dataplane;
        world.settle();
        let leftovers = world.runtime.block_on(node.leftovers(&world.dataplane)).unwrap();
        assert_eq!(leftovers.len(), 1);
        for old in &leftovers {
            world.runtime.block_on(node.retire(old, &world.dataplane)).unwrap();
        }
        assert!(!world.runtime.block_on(node.take_over(&world.dataplane, &world.plan)).unwrap());
        assert!(streams.iter_mut().all(support::traffic::Stream::answers));
        for (from, to) in frontends() {
            assert!(!matches!(lab.tcp(from, to), Answer::From(..)), "{from} to {to}");
        }
        drop(streams);
        let begun = Instant::now();
        while !world.runtime.block_on(node.take_over(&world.dataplane, &world.plan)).unwrap() {
            assert!(begun.elapsed() < Duration::from_secs(20), "connections have ended");
            std::thread::park_timeout(Duration::from_millis(200));
        }
        assert_eq!(Connection::open().unwrap().servers().unwrap().unwrap(), []);
        let left = lab.node("ipset list -name; iptables-legacy-save; ip6tables-legacy-save; ip link");
        assert!(!left.contains("IPVS") && !left.contains("kube-ipvs0"), "{left}");
        assert_eq!(world.differences(), Vec::<String>::new());
    });
}

// ids: SYN-17
#[test]
fn ipvs_what_kube_proxy_has_in_the_same_mode_is_taken_over_without_a_gap() {
    at_node(|lab| {
        let (vip, node) = (ip(CLUSTER_IP[0]), address("node", false));
        let mut connection = Connection::open().unwrap();
        let settings = Settings { scheduler: "rr".into(), flags: 0, persistence: None };
        let stale = key(Protocol::Tcp, "172.30.0.99", 80);
        let foreign = Key::new(Protocol::Tcp, node, 443);
        let web = [Key::new(Protocol::Tcp, vip, 80), Key::new(Protocol::Tcp, node, 30080)];
        for server in web.into_iter().chain([stale, foreign]) {
            let add = Operation::AddServer(VirtualServer { key: server, settings: settings.clone() });
            let real = RealServer { address: (address("a", false), 8080).into(), weight: 1 };
            connection.apply(&[add, Operation::AddReal { server, real }]).unwrap();
        }
        // Names, order and verdicts are those of kube-proxy.
        lab.node(&format!(
            "ip link add kube-ipvs0 type dummy; ip addr add {vip}/32 dev kube-ipvs0; ip addr add 172.30.0.99/32 dev kube-ipvs0
             ipset create KUBE-CLUSTER-IP hash:ip,port; ipset add KUBE-CLUSTER-IP {vip},tcp:80; ipset create OTHER hash:ip
             iptables-legacy-restore --noflush <<EOF
*nat
:KUBE-SERVICES - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-NODE-PORT -p tcp -m tcp --dport 30080 -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
COMMIT
EOF
"
        ));
        let mut streams: Vec<_> = [("client", (node, 30080)), ("pod", (vip, 80)), ("node", (vip, 80))]
            .map(|(from, to)| lab.stream(from, to))
            .into();
        let mut world = World::usual(open());
        load(&mut world);
        let (mut platform, opened) = open_node(Mode::Ipvs, &world);
        world.dataplane = opened.dataplane;
        world.settle();
        for old in &world.runtime.block_on(platform.leftovers(&world.dataplane)).unwrap() {
            world.runtime.block_on(platform.retire(old, &world.dataplane)).unwrap();
        }
        assert!(world.runtime.block_on(platform.take_over(&world.dataplane, &world.plan)).unwrap());
        assert_eq!(world.differences(), Vec::<String>::new());
        assert!(streams.iter_mut().all(support::traffic::Stream::answers));
        all_answer(&lab);
        let there = connection.servers().unwrap().unwrap();
        let has = |key: &Key| there.iter().any(|server| server.key == *key);
        assert!(!has(&stale) && has(&foreign) && web.iter().all(has), "{there:?}");
        let left = lab.node("ipset list -name; iptables-legacy-save; ip addr show kube-ipvs0");
        assert!(!left.contains("KUBE-") && !left.contains("172.30.0"), "{left}");
        assert!(left.contains("OTHER"), "{left}");
        // The anchor that kube-proxy's addresses have left on the device does not keep it.
        block_on(ipvs::cleanup(&[tools()], &FAMILIES)).unwrap();
        let left = lab.node("ip link");
        assert!(!left.contains("kube-ipvs0"), "{left}");
    });
}

#[test]
fn ipvs_loses_no_request_once_the_slice_has_changed() {
    support::needs_ipvs();
    // The thread goes to the node and stays there.
    let killed = std::thread::spawn(|| support::killed::kill_one_under_the_kernel(Way::Ipvs));
    if let Err(panic) = killed.join() {
        std::panic::resume_unwind(panic);
    }
}
