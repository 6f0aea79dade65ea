//! Runs against the kernel's own table, in network namespaces that end with their thread, even if the test is killed:
//! real datagrams through real DNAT rules, and entries made by the `conntrack` tool.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says by panicking what is wrong"
)]

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};
use pointsman_agent::conntrack::wire::{self, Body, DumpFilter};
use pointsman_agent::conntrack::{
    self, Endpoints, Entry, Frontend, Job, NodePort, Protocol, Reconciler, Report, Serving,
};
use pointsman_agent::sysctl::{self, Machine, Setting, Settings, Sysctls};
use pointsman_crds::node_config::NodeConntrack;
use pointsman_crds::proxy_node_status::IpFamily;

const CLUSTER_IP: &str = "10.96.0.10";
const EXTERNAL_IP: &str = "203.0.113.7";
const VIP: &str = "192.0.2.80";
const NODE: &str = "192.168.1.5";
const CLIENT: &str = "10.244.9.9";
const SERVING: &str = "10.244.1.7";
const OTHER: &str = "10.244.1.8";
const GONE: &str = "10.244.1.9";

/// Runs this in a new network namespace with all addresses on its loopback device. Without root there is none.
fn isolated(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let inside = move || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let mut script = "set -e; ip link set lo up\n".to_owned();
        for address in [NODE, CLIENT, SERVING, OTHER] {
            let _ = writeln!(script, "ip addr add {address}/32 dev lo");
        }
        for network in ["10.96.0.0/16", "203.0.113.0/24", "192.0.2.0/24", "10.244.0.0/16"] {
            let _ = writeln!(script, "ip route add {network} dev lo src {CLIENT}");
        }
        feed("sh", &[], &script);
        test();
    };
    if let Err(panic) = thread::spawn(inside).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs a program with this input, in the namespace of the thread.
fn feed(program: &str, arguments: &[&str], input: &str) {
    let mut child =
        Command::new(program).args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An entry for the `conntrack` tool; the client's port is its name.
struct Made<'a> {
    port: u16,
    protocol: Protocol,
    to: SocketAddr,
    endpoint: SocketAddr,
    extra: &'a str,
}

fn made(port: u16, protocol: Protocol, to: &str, endpoint: &str) -> Made<'static> {
    Made { port, protocol, to: to.parse().unwrap(), endpoint: endpoint.parse().unwrap(), extra: "" }
}

/// Puts entries into the table.
fn insert(entries: &[Made<'_>]) {
    let mut lines = String::new();
    for Made { port, protocol, to, endpoint, extra } in entries {
        let (name, state) = match protocol {
            Protocol::Udp => ("udp", ""),
            Protocol::Sctp => ("sctp", "--state ESTABLISHED --orig-vtag 1 --reply-vtag 2"),
            Protocol::Tcp if extra.contains("--state") => ("tcp", ""),
            Protocol::Tcp => ("tcp", "--state ESTABLISHED"),
        };
        let status = if extra.contains("SYN_SENT") { "" } else { "-u SEEN_REPLY" };
        let client = if to.is_ipv4() { CLIENT } else { "fd00:244::9" };
        let _ = writeln!(
            lines,
            "-A -t 600 {status} -s {client} -d {} -r {} -q {client} -p {name} --sport {port} --dport {} \
             --reply-port-src {} --reply-port-dst {port} {state} {extra}",
            to.ip(),
            endpoint.ip(),
            to.port(),
            endpoint.port(),
        );
    }
    feed("conntrack", &["-R", "-"], &lines);
}

/// The clients' ports of the entries in the table.
fn table(family: &str) -> BTreeSet<u16> {
    let output = Command::new("conntrack").args(["-L", "-f", family]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let port = |line: &str| line.split("sport=").nth(1)?.split(' ').next()?.parse().ok();
    text.lines().filter_map(port).collect()
}

fn endpoints(addresses: &[&str]) -> Endpoints {
    Endpoints::new(addresses.iter().map(|address| address.parse().unwrap()))
}

fn frontend(address: &str, protocol: Protocol) -> Frontend {
    Frontend::new(address.parse().unwrap(), protocol)
}

/// A service with all kinds of frontends in every protocol.
fn service(to: &[&str]) -> Serving {
    let mut serving = Serving::default();
    for protocol in Protocol::ALL {
        for address in [CLUSTER_IP, EXTERNAL_IP, VIP] {
            serving.frontends.insert(frontend(&format!("{address}:53"), protocol), endpoints(to));
        }
        serving.node_ports.insert(NodePort::new(30053, protocol), endpoints(to));
    }
    serving
}

fn run(serving: &Serving) -> Report {
    let report = conntrack::run(&Job::new(IpFamily::IPv4, serving.clone())).unwrap();
    assert_eq!((report.malformed, report.first_malformed), (0, None));
    report
}

#[test]
fn ct_1_matrix() {
    isolated(|| {
        let mut entries = Vec::new();
        let mut kept = BTreeSet::new();
        let mut port = 1000;
        for protocol in Protocol::ALL {
            for target in [SERVING, OTHER, GONE] {
                for (address, own) in [(CLUSTER_IP, 53), (EXTERNAL_IP, 53), (VIP, 53), (NODE, 30053)] {
                    for to in [own, 54] {
                        port += 1;
                        let (to_address, endpoint) = (format!("{address}:{to}"), format!("{target}:5353"));
                        entries.push(made(port, protocol, &to_address, &endpoint));
                        if protocol == Protocol::Tcp || target == SERVING || to != own {
                            kept.insert(port);
                        }
                    }
                }
            }
        }
        insert(&entries);
        assert_eq!(table("ipv4").len(), 72);
        let report = run(&service(&["10.244.1.7:5353"]));
        assert_eq!(table("ipv4"), kept);
        assert_eq!((report.deleted, report.vanished), (16, 0));
        // The kernel left out the TCP entries: all are established.
        assert_eq!(report.entries, 48);
    });
}

// ids: CT-2 CT-3 CT-4 REG-139628
#[test]
fn ct_2_ct_3_ct_4_old_ports_untranslated_and_scaled_to_zero() {
    isolated(|| {
        insert(&[
            made(1, Protocol::Udp, "10.96.0.10:53", "10.244.1.7:5353"),
            made(2, Protocol::Udp, "10.96.0.10:53", "10.244.1.7:5354"),
            made(3, Protocol::Udp, "10.96.0.10:53", "10.96.0.10:53"),
            made(4, Protocol::Udp, "10.96.0.10:54", "10.96.0.10:54"),
            made(5, Protocol::Udp, "192.168.1.5:30053", "192.168.1.5:30053"),
            made(6, Protocol::Udp, "192.168.1.5:30053", "10.244.1.7:5353"),
            made(7, Protocol::Udp, "192.0.2.80:53", "10.244.1.7:5354"),
        ]);
        assert_eq!(run(&service(&["10.244.1.7:5354"])).deleted, 4);
        assert_eq!(table("ipv4"), BTreeSet::from([2, 4, 7]));
        insert(&[
            made(8, Protocol::Udp, "192.168.1.5:30053", "10.244.1.7:5354"),
            made(9, Protocol::Udp, "192.168.1.5:30053", "192.168.1.5:30053"),
            made(10, Protocol::Udp, "198.51.100.1:30053", "10.244.1.7:5354"),
        ]);
        assert_eq!(run(&service(&[])).deleted, 2);
        assert_eq!(table("ipv4"), BTreeSet::from([4, 8, 9, 10]), "who knows whose node port that is");
        let mut none_left = service(&[]);
        none_left.node_addresses = Some(HashSet::from([NODE.parse().unwrap()]));
        assert_eq!(run(&none_left).deleted, 1);
        assert_eq!(
            table("ipv4"),
            BTreeSet::from([4, 9, 10]),
            "9 is for a listener of the node, 10 for another host"
        );
    });
}

#[test]
fn ct_5_cost_follows_deletions() {
    isolated(|| {
        const UNRELATED: u16 = 50_000;
        const STALE: u16 = 300;
        let entry = |port, to| made(port, Protocol::Udp, to, "10.244.1.9:5353");
        let unrelated: Vec<_> = (1..=UNRELATED).map(|port| entry(port, "10.97.0.1:53")).collect();
        insert(&unrelated);
        let stale: Vec<_> = (0..STALE).map(|port| entry(60_000 + port, "10.96.0.10:53")).collect();
        insert(&stale);
        let report = run(&service(&["10.244.1.7:5353"]));
        eprintln!("CT-5: {report:?}");
        assert_eq!(report.deleted, u64::from(STALE));
        assert_eq!(report.entries, u64::from(UNRELATED) + u64::from(STALE));
        assert!(report.requests <= 3 + u64::from(STALE), "{}", report.requests);
        let again = run(&service(&["10.244.1.7:5353"]));
        assert_eq!((again.deleted, again.requests), (0, 3));
        assert_eq!(table("ipv4").len(), usize::from(UNRELATED));
    });
}

#[test]
fn zones_are_respected() {
    isolated(|| {
        let zoned =
            |port, endpoint, extra| Made { extra, ..made(port, Protocol::Udp, "10.96.0.10:53", endpoint) };
        insert(&[
            zoned(1, "10.244.1.9:5353", "-w 5"),
            zoned(2, "10.244.1.9:5353", "--orig-zone 6"),
            zoned(3, "10.244.1.9:5353", "--reply-zone 7"),
            zoned(4, "10.96.0.10:53", "-w 5"),
            zoned(5, "10.244.1.7:5353", "-w 5"),
            // The same addresses in two zones.
            zoned(6, "10.244.1.9:5353", "-w 5"),
            zoned(6, "10.244.1.7:5353", ""),
        ]);
        let report = run(&service(&["10.244.1.7:5353"]));
        assert_eq!((report.deleted, report.vanished), (4, 0));
        assert_eq!(table("ipv4"), BTreeSet::from([4, 5, 6]));
    });
}

/// Sends one request, and returns the outcome and the entries that the kernel answers with.
fn ask_kernel(request: &[u8]) -> (i32, Vec<Entry>) {
    let netfilter = SockProtocol::NetlinkNetFilter;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, netfilter).unwrap();
    connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0)).unwrap();
    send(socket.as_raw_fd(), request, MsgFlags::empty()).unwrap();
    let (mut buffer, mut entries) = (vec![0; 65_536], Vec::new());
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
        for message in wire::messages(&buffer[..length]) {
            match message.unwrap().body {
                Body::Entry(payload) => entries.extend(wire::entry(payload).unwrap()),
                Body::Done(code) | Body::Outcome(code) => return (code, entries),
                _ => {}
            }
        }
    }
}

/// Between listing and deleting, an entry may end and another one of the same client take its place.
#[test]
fn an_entry_with_another_id_stays() {
    isolated(|| {
        insert(&[made(1, Protocol::Udp, "10.96.0.10:53", "10.244.1.9:5353")]);
        let dump = wire::dump_request(IpFamily::IPv4, DumpFilter::Protocol(Protocol::Udp), 1);
        let (_, entries) = ask_kernel(&dump);
        let [listed] = entries[..] else { panic!("{entries:?}") };
        let other = Entry { id: listed.id.map(|id| id ^ 1), ..listed };
        assert_eq!(ask_kernel(&wire::delete_request(&other, 2, true)).0, -2);
        assert_eq!(table("ipv4"), BTreeSet::from([1]));
        assert_eq!(ask_kernel(&wire::delete_request(&listed, 2, true)).0, 0);
        assert_eq!(table("ipv4"), BTreeSet::new());
    });
}

#[test]
fn ipv6_entries_are_another_run() {
    isolated(|| {
        insert(&[
            made(1, Protocol::Udp, "10.96.0.10:53", "10.244.1.9:5353"),
            made(2, Protocol::Udp, "[fd00:96::a]:53", "[fd00:244::8]:5353"),
            made(3, Protocol::Udp, "[fd00:96::a]:53", "[fd00:244::7]:5353"),
            made(4, Protocol::Sctp, "[fd00:96::a]:53", "[fd00:96::a]:53"),
        ]);
        let mut serving = Serving::default();
        for protocol in [Protocol::Udp, Protocol::Sctp] {
            let target = frontend("[fd00:96::a]:53", protocol);
            serving.frontends.insert(target, endpoints(&["[fd00:244::7]:5353"]));
        }
        let report = conntrack::run(&Job::new(IpFamily::IPv6, serving)).unwrap();
        assert_eq!((report.deleted, report.entries), (2, 3));
        assert_eq!(table("ipv6"), BTreeSet::from([3]));
        assert_eq!(table("ipv4"), BTreeSet::from([1]));
    });
}

/// Rules as a sync would install them: everything that the service has leads to this endpoint.
fn dnat_to(endpoint: Option<&str>) {
    let mut rules = "table ip t\ndelete table ip t\ntable ip t {\n".to_owned();
    for hook in ["output", "prerouting"] {
        let _ = writeln!(rules, " chain {hook} {{ type nat hook {hook} priority -100;");
        if let Some(endpoint) = endpoint {
            let _ = writeln!(
                rules,
                "  ip daddr {{ {CLUSTER_IP}, {VIP} }} meta l4proto {{ udp, tcp }} th dport 53 dnat to {endpoint}
  ip daddr {NODE} udp dport 30053 dnat to {endpoint}"
            );
        }
        rules += " }\n";
    }
    // Conntrack stays on without DNAT rules.
    rules += " chain keep { type filter hook input priority 0; ct state new accept; }\n}\n";
    feed("nft", &["-f", "-"], &rules);
}

/// Answers every datagram with the server's own address, until nobody has asked for a while.
fn serve(address: &str) {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let answer = address.to_owned();
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(answer.as_bytes(), from);
        }
    });
}

/// A client that keeps its port, as a DNS resolver or a log shipper does.
struct Client(UdpSocket);

impl Client {
    fn new(port: u16) -> Self {
        let socket = UdpSocket::bind((CLIENT, port)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
        Self(socket)
    }

    /// Who answers.
    fn ask(&self, frontend: &str) -> Option<String> {
        self.0.send_to(b"?", frontend).unwrap();
        let mut buffer = [0; 64];
        match self.0.recv_from(&mut buffer) {
            Ok((length, from)) => {
                assert_eq!(from, frontend.parse().unwrap(), "the answer is translated back");
                Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                None
            }
        }
    }
}

/// One service with three frontends, and the bookkeeping about it.
struct Service(Reconciler);

impl Service {
    const FRONTENDS: [&str; 3] = ["10.96.0.10:53", "192.0.2.80:53", "192.168.1.5:30053"];

    fn set(&mut self, to: &[&str]) {
        for address in &Self::FRONTENDS[..2] {
            self.0.set(frontend(address, Protocol::Udp), endpoints(to));
        }
        self.0.set(NodePort::new(30053, Protocol::Udp), endpoints(to));
    }

    fn delete(&mut self) {
        for address in &Self::FRONTENDS[..2] {
            self.0.remove(frontend(address, Protocol::Udp));
        }
        self.0.remove(NodePort::new(30053, Protocol::Udp));
    }

    /// How many entries the run that is due deletes.
    fn run(&mut self) -> u64 {
        let job = self.0.begin().expect("a run is due");
        let report = conntrack::run(&job).unwrap();
        self.0.finish(job, true);
        report.deleted
    }
}

// ids: CT-6 CT-7 CT-8 CT-12 REG-141371 REG-48370
#[test]
fn ct_6_ct_7_ct_12_a_stream_of_datagrams_follows_the_service() {
    isolated(|| {
        serve("10.244.1.7:5353");
        serve("10.244.1.8:5353");
        let client = Client::new(4000);
        let everybody_gets = |expected: Option<&str>| {
            for address in Service::FRONTENDS {
                assert_eq!(client.ask(address).as_deref(), expected, "{address}");
            }
        };
        let mut service = Service(Reconciler::new(IpFamily::IPv4));

        // A flow that began before there was an endpoint leads nowhere, also when there is one (k/k#48370).
        dnat_to(None);
        service.set(&[]);
        service.run();
        everybody_gets(None);
        dnat_to(Some("10.244.1.7:5353"));
        everybody_gets(None);
        service.set(&["10.244.1.7:5353"]);
        assert_eq!(service.run(), 3);
        everybody_gets(Some("10.244.1.7:5353"));

        // CT-12: a restart without changes deletes nothing.
        service = Service(Reconciler::new(IpFamily::IPv4));
        service.set(&["10.244.1.7:5353"]);
        assert_eq!(service.run(), 0);
        everybody_gets(Some("10.244.1.7:5353"));

        // CT-7: the endpoint is replaced; the old one would still answer whoever asks it.
        dnat_to(Some("10.244.1.8:5353"));
        everybody_gets(Some("10.244.1.7:5353"));
        service.set(&["10.244.1.8:5353"]);
        assert_eq!(service.run(), 3);
        everybody_gets(Some("10.244.1.8:5353"));

        // CT-6: the service is deleted.
        dnat_to(None);
        everybody_gets(Some("10.244.1.8:5353"));
        service.delete();
        assert_eq!(service.run(), 3);
        everybody_gets(None);
        assert_eq!(service.0.begin(), None);
    });
}

// ids: CT-1 REG-101607
#[test]
fn ct_1_tcp_established_stays_and_an_unanswered_syn_goes() {
    isolated(|| {
        let listener = TcpListener::bind("10.244.1.7:53").unwrap();
        dnat_to(Some(SERVING));
        let mut established = TcpStream::connect("10.96.0.10:53").unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        // Nobody has this address: the SYN is never answered.
        dnat_to(Some(GONE));
        let unanswered = SocketAddr::new(VIP.parse().unwrap(), 53);
        TcpStream::connect_timeout(&unanswered, Duration::from_millis(100)).unwrap_err();
        let to_serving = made(7, Protocol::Tcp, "192.0.2.80:53", "10.244.1.7:53");
        insert(&[Made { extra: "--state SYN_SENT", ..to_serving }]);
        assert_eq!(table("ipv4").len(), 3);
        let mut serving = Serving::default();
        for address in [CLUSTER_IP, VIP] {
            let target = frontend(&format!("{address}:53"), Protocol::Tcp);
            serving.frontends.insert(target, endpoints(&["10.244.1.7:53"]));
        }
        let report = run(&serving);
        assert_eq!((report.deleted, report.entries), (1, 2), "the kernel lists unanswered ones only");
        let mine = established.local_addr().unwrap().port();
        assert_eq!(table("ipv4"), BTreeSet::from([7, mine]));
        // The endpoint goes; whoever is connected to it ends in peace.
        serving.frontends.values_mut().for_each(|to| *to = Endpoints::default());
        assert_eq!(run(&serving).deleted, 1);
        assert_eq!(table("ipv4"), BTreeSet::from([mine]));
        established.write_all(b"still here").unwrap();
        accepted.read_exact(&mut [0; 10]).unwrap();
    });
}

/// Without that, all repetitions of the SYN go where the first one went, until the client gives up.
// ids: CT-8
#[test]
fn ct_8_a_connection_that_began_before_its_frontend_was_served_is_answered() {
    isolated(|| {
        let listener = TcpListener::bind("10.244.1.7:53").unwrap();
        dnat_to(None);
        let vip = SocketAddr::new(VIP.parse().unwrap(), 53);
        let client = thread::spawn(move || TcpStream::connect_timeout(&vip, Duration::from_secs(10)));
        while table("ipv4").is_empty() {
            assert!(!client.is_finished(), "it ended without a SYN");
        }
        dnat_to(Some(SERVING));
        let mut reconciler = Reconciler::new(IpFamily::IPv4);
        reconciler.set(Frontend::new(vip, Protocol::Tcp), endpoints(&["10.244.1.7:53"]));
        let job = reconciler.begin().expect("a run is due");
        assert_eq!(conntrack::run(&job).unwrap().deleted, 1);
        client.join().unwrap().unwrap();
        listener.accept().unwrap();
    });
}

#[test]
fn node_addresses_protect_flows_to_other_hosts() {
    isolated(|| {
        insert(&[
            made(1, Protocol::Udp, "198.51.100.1:30053", "198.51.100.1:30053"),
            made(2, Protocol::Udp, "192.168.1.5:30053", "192.168.1.5:30053"),
        ]);
        let mut serving = service(&["10.244.1.7:5353"]);
        serving.node_addresses = Some(HashSet::from([NODE.parse().unwrap()]));
        assert_eq!(run(&serving).deleted, 1);
        assert_eq!(table("ipv4"), BTreeSet::from([1]));
    });
}

const MACHINE: Machine = Machine { cpus: 2, kernel: (6, 1) };

#[test]
fn ct_10_sysctls_of_a_namespace_change_live() {
    isolated(|| {
        let root = Path::new("/proc/sys");
        let mut sysctls = Sysctls::new(root);
        let mut reconcile = |conntrack: &NodeConntrack| {
            sysctls.reconcile(&Settings { conntrack: *conntrack, ipvs: None }, MACHINE)
        };
        let nothing = NodeConntrack {
            max_per_core: 0,
            min: 0,
            tcp_be_liberal: false,
            tcp_established_timeout_seconds: 0,
            tcp_close_wait_timeout_seconds: 0,
            udp_timeout_seconds: 0,
            udp_stream_timeout_seconds: 0,
        };
        let config = NodeConntrack {
            tcp_be_liberal: true,
            tcp_established_timeout_seconds: 86_400,
            tcp_close_wait_timeout_seconds: 3_600,
            udp_timeout_seconds: 11,
            udp_stream_timeout_seconds: 111,
            ..nothing
        };
        let applied = reconcile(&config);
        assert_eq!((applied.written.len(), applied.failed.len()), (5, 0), "{applied:?}");
        assert_eq!(sysctl::read(root)[&Setting::TcpCloseWaitTimeout], 3_600);
        let applied = reconcile(&nothing);
        assert_eq!(applied.written.len(), 1);
        let current = sysctl::read(root);
        assert_eq!((current[&Setting::TcpBeLiberal], current[&Setting::UdpTimeout]), (0, 11));

        // As in the agent's container: /proc/sys is read-only, and /proc/sys/net is there once more, to be written without
        // any capability but NET_ADMIN.
        let none = None::<&str>;
        let second = tempfile::tempdir().unwrap();
        std::fs::create_dir(second.path().join("net")).unwrap();
        mount(Some("/proc/sys/net"), &second.path().join("net"), none, MsFlags::MS_BIND, none).unwrap();
        mount(Some("/proc/sys"), "/proc/sys", none, MsFlags::MS_BIND, none).unwrap();
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, "/proc/sys", none, read_only, none).unwrap();
        let changed = NodeConntrack { udp_timeout_seconds: 12, ..nothing };
        let settings = Settings { conntrack: changed, ipvs: None };
        let applied = sysctls.reconcile(&settings, MACHINE);
        assert!(applied.written.is_empty());
        let said = applied.failed[0].to_string();
        assert!(
            said.contains("udp_timeout is 11, should be 12")
                && said.contains("mount the node's /proc/sys/net"),
            "{said}"
        );
        feed(
            "setpriv",
            &["--bounding-set=-all,+net_admin", "--inh-caps=-all", "sh", "-e"],
            &format!(
                "grep -q CapEff:.0000000000001000 /proc/self/status
             ! echo 12 > /proc/sys/net/netfilter/nf_conntrack_udp_timeout
             echo 12 > {}/net/netfilter/nf_conntrack_udp_timeout",
                second.path().display(),
            ),
        );
        assert_eq!(sysctl::read(root)[&Setting::UdpTimeout], 12, "of this namespace");
        assert!(Sysctls::new(second.path()).reconcile(&settings, MACHINE).failed.is_empty());
        umount(&second.path().join("net")).unwrap();
        assert!(Machine::this().cpus >= 1);
    });
}
