//! Network namespaces for tests: the node under test with three pods, another node with pods, a client outside, and the rest
//! of the world, which answers at every address that nobody else has.
//!
//! A thread enters a namespace and stays there; sockets that it opens belong to it for ever, so servers and clients need no
//! processes. Namespaces are removed when the [`Lab`] is dropped, also on panic.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sched::{CloneFlags, setns};
use pointsman_agent::model::Protocol;
use pointsman_crds::proxy_node_status::IpFamily;

use super::scenario::hosts::{HOSTS, Host, gateway, twin};
use super::traffic::{Answer, PATIENT, Servers, Service, Stream, ask};
use super::world::block_on;

pub const NODE: &str = "node";
/// Everything outside.
pub const WORLD: &str = "world";
const ALL: [&str; 8] = [NODE, "pod", "a", "b", "other", "far", "client", WORLD];
/// The ports at which pods answer, in every protocol.
pub const PORTS: [u16; 3] = [8080, 8443, 5353];

const SETTINGS: [(&str, &str); 6] = [
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    // No limit for answers that say "refused", neither for one receiver nor for all together.
    ("ipv4/icmp_ratemask", "0"),
    ("ipv6/icmp/ratemask", "\n"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/all/accept_dad", "0"),
];

const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

pub struct Lab {
    prefix: String,
    servers: Servers,
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The address of a host.
pub fn address(name: &str, v6: bool) -> IpAddr {
    Host::named(name).unwrap().address(FAMILIES[usize::from(v6)])
}

/// The source that a masqueraded packet to a local pod has.
pub fn masqueraded(v6: bool) -> IpAddr {
    gateway(FAMILIES[usize::from(v6)])
}

/// Commands of `ip` for one namespace, for both families.
#[derive(Default)]
struct Batch(String);

impl Batch {
    fn line(&mut self, line: &str) -> &mut Self {
        let _ = writeln!(self.0, "{line}");
        self
    }

    /// A line in which `4(a.b.c.d)` are addresses: once as it is, once with their twins.
    fn both(&mut self, line: &str) -> &mut Self {
        self.line(&line.replace("4(", "").replace(')', ""));
        let mut parts = line.split("4(");
        let mut twins = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (address, rest) = part.split_once(')').unwrap();
            twins += &twin(address.parse().unwrap()).to_string();
            twins += rest;
        }
        let nodad = if twins.starts_with("addr add") { " nodad" } else { "" };
        let twins = twins.replace("/32", "/128").replace("/24", "/64").replace("0.0.0.0/0", "::/0");
        self.line(&(twins + nodad))
    }

    fn run(&self, namespace: &str) {
        let mut child =
            Command::new("ip").args(["-n", namespace, "-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(self.0.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success(), "in {namespace}:\n{}", self.0);
    }
}

const PRIMARY: &str = "4(192.168.0.2)";
const GATEWAY: &str = "4(10.180.0.254)";
const FAR_GATEWAY: &str = "4(10.180.1.254)";

impl Lab {
    /// `None` where the test cannot run: without root, namespaces cannot be made.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let lab = Self { prefix: format!("pm-t-{}-{number}", std::process::id()), servers: Servers::start() };
        let mut all = Batch::default();
        for name in ALL {
            all.line(&format!("netns add {}", lab.namespace(name)));
        }
        let mut child = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(all.0.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        for name in ALL {
            lab.run(name, move || {
                for (path, value) in SETTINGS {
                    std::fs::write(format!("/proc/sys/net/{path}"), value).unwrap();
                }
                if [NODE, "other"].contains(&name) {
                    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                    std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
                }
                if name == WORLD {
                    std::fs::write("/proc/sys/net/ipv6/ip_nonlocal_bind", "1").unwrap();
                }
            });
        }
        lab.connect();
        for namespace in [NODE, "other", "a", "b", "far"] {
            let pods: Vec<&Host> =
                HOSTS.iter().filter(|host| host.namespace == namespace && host.node.is_some()).collect();
            lab.serve(
                namespace,
                pods.iter().flat_map(|pod| {
                    let at =
                        FAMILIES.into_iter().flat_map(|family| PORTS.map(|port| (pod.address(family), port)));
                    at.flat_map(|to| {
                        let name = if to.1 == PORTS[0] {
                            pod.name.to_owned()
                        } else {
                            format!("{}:{}", pod.name, to.1)
                        };
                        Protocol::ALL.map(|protocol| Service { name: name.clone(), to: to.into(), protocol })
                    })
                }),
            );
        }
        Some(lab)
    }

    fn connect(&self) {
        let mut node = Batch::default();
        node.line("link set lo up").both("addr add 4(192.168.1.2)/32 dev lo");
        let namespaces = ["pod", "a", "b", "other", "client", WORLD];
        let ports = ["pod0", "pod1", "pod2", "net0", "out0", "up0"];
        for (namespace, port) in namespaces.iter().zip(ports) {
            let pods = port.starts_with("pod");
            let own = if pods { GATEWAY } else { PRIMARY };
            node.line(&format!(
                "link add {port} type veth peer name eth0 netns {}",
                self.namespace(namespace)
            ));
            node.line(&format!("link set {port} up")).both(&format!("addr add {own}/32 dev {port}"));
            let mut there = Batch::default();
            there.line("link set lo up").line("link set eth0 up");
            for host in HOSTS.iter().filter(|host| host.namespace == *namespace) {
                let address = host.address(IpFamily::IPv4);
                there.both(&format!("addr add 4({address})/32 dev eth0"));
                node.both(&format!("route add 4({address})/32 dev {port} src {own}"));
            }
            there.both(&format!("route add {own}/32 dev eth0"));
            if *namespace == WORLD {
                there.both("addr add 4(192.0.2.1)/32 dev eth0");
                // It has every address that nobody else has.
                for block in ["192.168.0.0", "192.168.1.0", "203.0.113.0", "10.180.0.0", "10.180.1.0"] {
                    there.both(&format!("route add 4({block})/24 via {own} dev eth0"));
                }
                there
                    .line("route add local 0.0.0.0/0 dev lo table main")
                    .line("route add local ::/0 dev lo table main");
                node.both(&format!("route add 4(192.0.2.1)/32 dev {port} src {own}"));
                node.line(&format!("route add default via 192.0.2.1 dev {port} src 192.168.0.2"));
                node.line(&format!(
                    "route add ::/0 via {} dev {port} src {}",
                    twin([192, 0, 2, 1].into()),
                    twin([192, 168, 0, 2].into())
                ));
            } else {
                there.both(&format!("route add 4(0.0.0.0)/0 via {own} dev eth0"));
            }
            if *namespace == "other" {
                let far = self.namespace("far");
                there
                    .line(&format!("link add far0 type veth peer name eth0 netns {far}"))
                    .line("link set far0 up");
                there.both(&format!("addr add {FAR_GATEWAY}/32 dev far0"));
                node.both(&format!("route add 4(10.180.1.0)/24 via 4(192.168.0.3) dev {port} src {own}"));
            }
            // The node's end of the cable comes first.
            node.run(&self.namespace(NODE));
            node = Batch::default();
            there.run(&self.namespace(namespace));
        }
        let (mut far, mut other) = (Batch::default(), Batch::default());
        far.line("link set lo up").line("link set eth0 up");
        for host in HOSTS.iter().filter(|host| host.namespace == "far") {
            let address = host.address(IpFamily::IPv4);
            far.both(&format!("addr add 4({address})/32 dev eth0"));
            other.both(&format!("route add 4({address})/32 dev far0 src {FAR_GATEWAY}"));
        }
        far.both(&format!("route add {FAR_GATEWAY}/32 dev eth0"));
        far.both(&format!("route add 4(0.0.0.0)/0 via {FAR_GATEWAY} dev eth0"));
        far.run(&self.namespace("far"));
        other.run(&self.namespace("other"));
    }

    pub fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    /// Runs something in a namespace.
    pub fn run<T: Send + 'static>(&self, namespace: &str, what: impl FnOnce() -> T + Send + 'static) -> T {
        self.spawn(namespace, what).join().unwrap()
    }

    /// Starts something in a namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        namespace: &str,
        what: impl FnOnce() -> T + Send + 'static,
    ) -> std::thread::JoinHandle<T> {
        let path = format!("/run/netns/{}", self.namespace(namespace));
        std::thread::spawn(move || {
            setns(File::open(path).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
            what()
        })
    }

    /// Takes the thread into a namespace, for good.
    pub fn enter(&self, namespace: &str) {
        let path = format!("/run/netns/{}", self.namespace(namespace));
        setns(File::open(path).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
    }

    /// Runs a command in the node's namespace.
    pub fn node(&self, command: &str) -> String {
        shell(&format!("nsenter --net=/run/netns/{} sh -ec '{command}'", self.namespace(NODE)))
    }

    /// Gives the node another address.
    pub fn add_node_address(&self, address: IpAddr) {
        let mut batch = Batch::default();
        let rest = if address.is_ipv4() { "/32 dev lo" } else { "/128 dev lo nodad" };
        batch.line(&format!("addr add {address}{rest}")).run(&self.namespace(NODE));
    }

    /// Answers in a namespace, once per address, port and protocol.
    pub fn serve(&self, namespace: &str, services: impl IntoIterator<Item = Service>) {
        let services: BTreeSet<Service> = services.into_iter().collect();
        let opened = self.run(namespace, move || services.into_iter().map(Service::open).collect::<Vec<_>>());
        self.servers.add(opened);
    }

    /// Answers at a host's own address, on TCP.
    pub fn serve_at(&self, name: &str, port: u16) {
        let host = Host::named(name).unwrap();
        let service = |family| {
            let to = (host.address(family), port).into();
            Service { name: name.to_owned(), to, protocol: Protocol::Tcp }
        };
        self.serve(host.namespace, FAMILIES.map(service));
    }

    /// A connection from a host that stays open.
    pub fn stream(&self, from: &str, to: impl Into<std::net::SocketAddr>) -> Stream {
        let to = to.into();
        self.run(Host::named(from).unwrap().namespace, move || Stream::open(to).unwrap())
    }

    /// One connection from a host.
    pub fn tcp(&self, from: &str, to: impl Into<std::net::SocketAddr>) -> Answer {
        self.ask(from, to, Protocol::Tcp)
    }

    /// One datagram from a host.
    pub fn udp(&self, from: &str, to: impl Into<std::net::SocketAddr>) -> Answer {
        self.ask(from, to, Protocol::Udp)
    }

    fn ask(&self, from: &str, to: impl Into<std::net::SocketAddr>, protocol: Protocol) -> Answer {
        let (to, host) = (to.into(), Host::named(from).unwrap());
        self.run(host.namespace, move || block_on(ask(host.source(&to), to, protocol, PATIENT)))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let mut batch = Batch::default();
        for name in ALL {
            batch.line(&format!("netns del {}", self.namespace(name)));
        }
        let child = Command::new("ip")
            .args(["-force", "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        if let Ok(mut child) = child {
            let _ = child.stdin.take().map(|mut input| input.write_all(batch.0.as_bytes()));
            let _ = child.wait();
        }
    }
}

pub fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-c", script]).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}\n{out}{err}");
    out.into_owned()
}
