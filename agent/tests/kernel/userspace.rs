//! Mode userspace: the same frontends and policies, by a proxy. Endpoints see the node's address.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

use pointsman_agent::model::Change;
use pointsman_crds::settings::{NodePortAddress, UserspaceScheduler};
use serde_json::{Value, json};

use crate::support::lab::{Lab, address, ip, masqueraded};
use crate::support::traffic::Answer;
use crate::support::world::{FAMILIES, Way, World, config, slice};

const VIP: [&str; 2] = ["203.0.113.9", "2001:db8:9::9"];
const EXTERNAL: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];
const CLUSTER_IP: [&str; 2] = ["172.30.0.80", "fd00:ac:1e::50"];

fn spec(internal: &str, external: &str) -> Value {
    json!({
        "type": "LoadBalancer",
        "clusterIPs": CLUSTER_IP,
        "externalIPs": EXTERNAL,
        "internalTrafficPolicy": internal,
        "externalTrafficPolicy": external,
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080},
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
        ],
        "status": {"loadBalancer": {"ingress": [{"ip": VIP[0]}, {"ip": VIP[1]}]}},
    })
}

/// Who has answered; the source is the node's in any case.
fn names(answers: &[Answer], v6: bool) -> Vec<String> {
    let name = |answer: &Answer| match answer {
        Answer::From(name, source) => {
            assert_eq!(*source, masqueraded(v6));
            name.clone()
        }
        other => format!("{other:?}"),
    };
    answers.iter().map(name).collect()
}

fn world(lab: &Lab, spec: Value, pods: &[&str]) -> World {
    let mut world = World::new(lab, Way::Userspace);
    world.service("web", spec);
    world.endpoints("web", pods);
    assert!(world.settle().full);
    world
}

#[test]
fn np_3_4_5_node_ports_and_localhost_follow_the_configuration() {
    let Some(lab) = Lab::new() else { return };
    let mut world = world(&lab, spec("Cluster", "Cluster"), &["a"]);
    let localhost = (ip("127.0.0.1"), 30080);
    let (second, listed) = ((masqueraded(false), 30080), (address("node", false), 30080));
    assert_eq!((lab.tcp("node", localhost), lab.tcp("client", second)), (Answer::Refused, Answer::Refused));
    let mut next = config();
    next.node_port_addresses = vec![NodePortAddress("all".into())];
    world.configure(next.clone());
    world.settle();
    assert_eq!(names(&[lab.tcp("client", second), lab.tcp("client", listed)], false), ["a", "a"]);
    assert_eq!(lab.tcp("node", localhost), Answer::Refused, "off unless asked for");
    next.iptables.localhost_node_ports = true;
    world.configure(next.clone());
    world.settle();
    assert_eq!(names(&[lab.tcp("node", localhost)], false), ["a"]);
    assert_eq!(lab.node("cat /proc/sys/net/ipv4/conf/all/route_localnet"), "0\n");
    world.endpoints("web", &[]);
    world.settle();
    assert!(
        lab.run("node", move || {
            let mut stream = TcpStream::connect(SocketAddr::from(localhost)).unwrap();
            stream.read(&mut [0]).is_err()
        }),
        "LNP-4: a reset"
    );
    world.delete_service("web");
    world.settle();
    assert_eq!(lab.tcp("node", localhost), Answer::Refused, "LNP-1");
}

#[test]
fn a_listener_of_the_proxy_serves_nobody_who_was_not_led_there() {
    let Some(lab) = Lab::new() else { return };
    let _world = world(&lab, spec("Cluster", "Cluster"), &["a"]);
    let listed = lab.node("nft list set ip pointsman-userspace listeners");
    let mut found = 0;
    for part in listed.split("192.168.0.2 . ").skip(1) {
        let mut words = part.split([' ', '.', ',']).filter(|word| !word.is_empty());
        let (protocol, number) = (words.next().unwrap(), words.next().unwrap());
        let to = (address("node", false), number.parse().unwrap());
        let answer = if protocol == "tcp" { lab.tcp("client", to) } else { lab.udp("client", to) };
        assert_eq!(answer, Answer::Refused, "{protocol} {number}");
        found += 1;
    }
    assert_eq!(found, 3, "{listed}");
}

#[test]
fn ct_1_a_udp_flow_keeps_its_endpoint_and_leaves_one_that_is_gone() {
    let Some(lab) = Lab::new() else { return };
    let mut world = world(&lab, spec("Cluster", "Cluster"), &["a"]);
    let socket = lab.run("client", || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((ip(CLUSTER_IP[0]), 53)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
        socket
    });
    let ask = || {
        let mut buffer = [0; 64];
        socket.send(b"?").unwrap();
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).split(' ').next().unwrap().to_owned()
    };
    assert_eq!(ask(), "a");
    world.endpoints("web", &["a", "b", "r"]);
    world.settle();
    assert_eq!([ask(), ask(), ask()], ["a", "a", "a"]);
    world.endpoints("web", &["r"]);
    world.settle();
    assert_eq!([ask(), ask(), ask()], ["r", "r", "r"]);
}

/// A server that can be killed; it says its name, and what was asked.
struct Server {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<usize>,
}

impl Server {
    fn start(lab: &Lab, name: &'static str, namespace: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let socket = lab.run(namespace, || TcpListener::bind("[::]:9000").unwrap());
        socket.set_nonblocking(true).unwrap();
        let thread = std::thread::spawn(move || {
            let mut served = 0;
            while !stopped.load(Ordering::Relaxed) {
                let Ok((mut stream, _)) = socket.accept() else {
                    park_timeout(Duration::from_micros(500));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                let _ = stream.write_all(name.as_bytes());
                served += 1;
            }
            // The socket is closed here, and the kernel resets those who wait in its queue.
            served
        });
        Self { stop, thread }
    }

    fn kill(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

#[test]
fn no_request_is_lost_when_one_of_three_endpoints_dies_under_load() {
    for scheduler in [UserspaceScheduler::Rr, UserspaceScheduler::Lc] {
        let Some(lab) = Lab::new() else { return };
        let mut world = world(&lab, spec("Cluster", "Cluster"), &[]);
        let mut config = config();
        config.userspace.scheduler = scheduler;
        world.configure(config);
        let servers = [("a", "a"), ("b", "b"), ("r", "far")]
            .map(|(name, namespace)| Server::start(&lab, name, namespace));
        let mut slice = slice("web", FAMILIES[0], &["a", "b", "r"]);
        slice.ports.as_mut().unwrap()[0].port = Some(9000);
        world.apply(Change::SliceApplied(Box::new(slice)));
        world.settle();
        let stop = Arc::new(AtomicBool::new(false));
        let served = Arc::new(AtomicUsize::new(0));
        let clients: Vec<_> = ["client", "client", "node", "pod"]
            .into_iter()
            .map(|from| {
                let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
                lab.spawn(from, move || {
                    let mut failed = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let ask = || {
                            let mut stream = TcpStream::connect((ip(CLUSTER_IP[0]), 80))?;
                            stream.set_read_timeout(Some(Duration::from_secs(4)))?;
                            let mut text = String::new();
                            stream.read_to_string(&mut text)?;
                            Ok::<_, std::io::Error>(text)
                        };
                        match ask() {
                            Ok(text) if ["a", "b", "r"].contains(&text.as_str()) => {
                                served.fetch_add(1, Ordering::Relaxed);
                            }
                            other => failed.push(format!("{other:?}")),
                        }
                    }
                    failed
                })
            })
            .collect();
        let until = |count: usize| {
            let begun = Instant::now();
            while served.load(Ordering::Relaxed) < count {
                assert!(begun.elapsed() < Duration::from_secs(30));
                park_timeout(Duration::from_millis(5));
            }
        };
        until(300);
        let [a, b, r] = servers;
        let before = b.kill();
        until(served.load(Ordering::Relaxed) + 600);
        stop.store(true, Ordering::Relaxed);
        let failed: Vec<String> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        let all = served.load(Ordering::Relaxed);
        eprintln!(
            "{scheduler:?}: {all} requests served, {} failed; the dead one had served {before}",
            failed.len()
        );
        assert_eq!(failed, Vec::<String>::new(), "of {all}");
        assert!(before > 50 && a.kill() > 50 && r.kill() > 50);
    }
}

#[test]
fn syn_10_what_others_have_changed_is_found_and_repaired() {
    let Some(lab) = Lab::new() else { return };
    let mut world = world(&lab, spec("Cluster", "Local"), &["a"]);
    for damage in [
        "flush chain ip pointsman-userspace nat-prerouting",
        "flush map ip6 pointsman-userspace frontends",
        "delete table ip pointsman-userspace",
    ] {
        lab.node(&format!("nft {damage}"));
        assert_ne!(world.differences(), Vec::<String>::new(), "{damage}");
        world.repair();
        assert_eq!(world.differences(), Vec::<String>::new(), "{damage}");
        for v6 in [false, true] {
            assert_eq!(names(&[lab.tcp("client", (ip(CLUSTER_IP[usize::from(v6)]), 80))], v6), ["a"]);
        }
    }
}
