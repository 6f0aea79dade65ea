//! Network namespaces for tests: a node, a client outside, two pods on the node, one on another.
//!
//! A thread enters a namespace and stays there; sockets that it opens belong to it for ever, so servers and clients need no
//! processes. Namespaces are removed when the [`Lab`] is dropped, also on panic.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

/// What a client got.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// The server's name, and the source that it saw.
    From(String, IpAddr),
    Refused,
    Nothing,
}

#[derive(Debug)]
pub struct Lab {
    prefix: String,
}

pub const NODE: &str = "node";
pub const CLIENT: &str = "client";
pub const POD_A: &str = "a";
pub const POD_B: &str = "b";
pub const REMOTE: &str = "r";
const ALL: [&str; 5] = [NODE, CLIENT, POD_A, POD_B, REMOTE];

const SETTINGS: [(&str, &str); 6] = [
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv6/icmp/ratelimit", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/all/accept_dad", "0"),
];

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The address of a namespace, as others see it.
pub fn address(name: &str, v6: bool) -> IpAddr {
    let pair = match name {
        NODE => ["192.168.77.1", "fd00:77::1"],
        CLIENT => ["192.168.77.2", "fd00:77::2"],
        POD_A => ["10.244.0.10", "fd00:244::a"],
        POD_B => ["10.244.0.11", "fd00:244::b"],
        _ => ["10.244.1.10", "fd00:244:1::a"],
    };
    ip(pair[usize::from(v6)])
}

/// The source that a masqueraded packet to a pod has.
pub fn masqueraded(v6: bool) -> IpAddr {
    ip(if v6 { "fd00:244::1" } else { "10.244.0.1" })
}

impl Lab {
    /// `None` where the test cannot run: without root, namespaces cannot be made.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let lab = Self { prefix: format!("pm-t-{}-{number}", std::process::id()) };
        let mut script = String::from("set -e\n");
        for name in ALL {
            let ns = lab.namespace(name);
            script += &format!("ip netns add {ns}; ip -n {ns} link set lo up\n");
        }
        shell(&script);
        script.clear();
        script += "set -e\n";
        for name in ALL {
            lab.run(name, || {
                for (path, value) in SETTINGS {
                    std::fs::write(format!("/proc/sys/net/{path}"), value).unwrap();
                }
            });
        }
        let node = lab.namespace(NODE);
        for (name, port) in [(CLIENT, "out0"), (POD_A, "podA"), (POD_B, "podB"), (REMOTE, "far0")] {
            let ns = lab.namespace(name);
            let (v4, v6) = (address(name, false), address(name, true));
            let (gate4, gate6) = if name == CLIENT {
                (address(NODE, false), address(NODE, true))
            } else {
                (masqueraded(false), masqueraded(true))
            };
            script += &format!(
                "ip -n {node} link add {port} type veth peer name eth0 netns {ns}
                 ip -n {ns} link set eth0 up; ip -n {node} link set {port} up
                 ip -n {node} addr add {gate4}/32 dev {port}; ip -n {node} addr add {gate6}/128 dev {port} nodad
                 ip -n {ns} addr add {v4}/32 dev eth0; ip -n {ns} addr add {v6}/128 dev eth0 nodad
                 ip -n {node} route add {v4}/32 dev {port} src {gate4}; ip -n {node} route add {v6}/128 dev {port} src {gate6}
                 ip -n {ns} route add {gate4} dev eth0; ip -n {ns} route add default via {gate4}
                 ip -n {ns} route add {gate6} dev eth0; ip -n {ns} route add default via {gate6}\n"
            );
        }
        // Virtual addresses have a route, as they would have by the node's default route.
        script += &format!(
            "ip -n {node} link add up0 type veth peer name up1; ip -n {node} link set up0 up; ip -n {node} link set up1 up
             ip -n {node} route add default dev up0 src {}; ip -n {node} route add default dev up0 src {}\n",
            address(NODE, false),
            address(NODE, true)
        );
        shell(&script);
        lab.run(NODE, || {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
            std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        });
        for pod in [POD_A, POD_B, REMOTE] {
            lab.serve(pod, 8080);
        }
        Some(lab)
    }

    pub fn namespace(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    /// Runs something in a namespace.
    pub fn run<T: Send + 'static>(&self, name: &str, what: impl FnOnce() -> T + Send + 'static) -> T {
        self.spawn(name, what).join().unwrap()
    }

    /// Starts something in a namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        what: impl FnOnce() -> T + Send + 'static,
    ) -> std::thread::JoinHandle<T> {
        let path = format!("/run/netns/{}", self.namespace(name));
        std::thread::spawn(move || {
            setns(File::open(path).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
            what()
        })
    }

    /// Runs a command in the node's namespace.
    pub fn node(&self, command: &str) -> String {
        shell(&format!("nsenter --net=/run/netns/{} sh -ec '{command}'", self.namespace(NODE)))
    }

    /// A server on TCP and UDP that says its name and the source it saw.
    pub fn serve(&self, name: &'static str, port: u16) {
        let (tcp, udp) = self.run(name, move || {
            let any: SocketAddr = (IpAddr::from([0u16; 8]), port).into();
            (TcpListener::bind(any).unwrap(), UdpSocket::bind(any).unwrap())
        });
        std::thread::spawn(move || {
            while let Ok((mut stream, peer)) = tcp.accept() {
                let _ = write!(stream, "{name} {}", peer.ip().to_canonical());
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(format!("{name} {}", peer.ip().to_canonical()).as_bytes(), peer);
            }
        });
    }

    pub fn tcp(&self, from: &str, to: impl Into<SocketAddr>) -> Answer {
        let to = to.into();
        self.run(from, move || connect(to))
    }

    pub fn udp(&self, from: &str, to: impl Into<SocketAddr>) -> Answer {
        let to = to.into();
        self.run(from, move || {
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).unwrap();
            socket.set_read_timeout(Some(WAIT)).unwrap();
            let mut buffer = [0; 256];
            match socket.connect(to).and_then(|()| socket.send(b"?")).and_then(|_| socket.recv(&mut buffer)) {
                Ok(length) => parse(&String::from_utf8_lossy(&buffer[..length])),
                Err(error) => classify(&error),
            }
        })
    }

    /// The different answers to many connections, sorted.
    pub fn many(&self, from: &str, to: impl Into<SocketAddr>) -> Vec<Answer> {
        let to = to.into();
        self.run(from, move || {
            let mut answers: Vec<Answer> = (0..24).map(|_| connect(to)).collect();
            answers.sort();
            answers.dedup();
            answers
        })
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in ALL {
            let ns = self.namespace(name);
            let _ = Command::new("ip").args(["netns", "del", &ns]).stderr(Stdio::null()).status();
        }
    }
}

/// Longer than it takes a client to try again: an error that comes back before `connect` has returned from sending counts only
/// the second time.
const WAIT: Duration = Duration::from_millis(1500);

pub fn connect(to: SocketAddr) -> Answer {
    let read = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(WAIT))?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    match TcpStream::connect_timeout(&to, WAIT).and_then(read) {
        Ok(text) => parse(&text),
        Err(error) => classify(&error),
    }
}

fn parse(text: &str) -> Answer {
    let (name, source) = text.split_once(' ').unwrap();
    Answer::From(name.to_owned(), ip(source))
}

fn classify(error: &std::io::Error) -> Answer {
    match error.kind() {
        ErrorKind::ConnectionRefused => Answer::Refused,
        ErrorKind::TimedOut | ErrorKind::WouldBlock | ErrorKind::HostUnreachable => Answer::Nothing,
        _ => panic!("{error}"),
    }
}

pub fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-c", script]).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}\n{out}{err}");
    out.into_owned()
}
