//! The whole loop on a real kernel, in the node's namespace: it notices, repairs, adjusts and takes over by itself.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pointsman_agent::config::{Assessment, Candidate, Tampering};
use pointsman_agent::events::objects::Objects;
use pointsman_agent::health::Pulse;
use pointsman_agent::healthcheck::Checks;
use pointsman_agent::iptables::Flavour;
use pointsman_agent::metrics::Metrics;
use pointsman_agent::model::{Change, NodeFacts};
use pointsman_agent::state::{Source, SyncState};
use pointsman_agent::sync::node::Node;
use pointsman_agent::sync::{Engine, Input, Outside, QUEUE};
use pointsman_agent::userspace::counters::Counters;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::settings::{IpFamilyPolicy, IptablesBackend, Mode, NodePortAddress};
use tokio::sync::{mpsc, oneshot, watch};

use crate::lifecycle::{BOTH, Traffic};
use serde_json::json;

use crate::support::lab::{Lab, address, ip};
use crate::support::traffic::Answer;
use crate::support::world::{FAMILIES, block_on, cluster_ip, config, service, slice, spec};

/// A loop that runs until it is dropped.
struct Running {
    inputs: mpsc::Sender<Input>,
    state: watch::Receiver<SyncState>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    fn start(lab: &Lab) -> Self {
        let (state, receiver) = watch::channel(SyncState::new(k8s_openapi::jiff::Timestamp::now()));
        let (inputs, queue) = mpsc::channel(QUEUE);
        let (stop, stopped) = oneshot::channel();
        let outside = Outside {
            state,
            metrics: Arc::new(Metrics::default()),
            pulse: Arc::new(Pulse::default()),
            checkpoint: None,
            checks: Checks::default(),
            objects: Objects::channel().0,
        };
        let thread = lab.spawn("node", move || {
            block_on(async {
                let node = Node::new(std::path::Path::new("/proc/sys"), Counters::default());
                Engine::new(node, outside, None).run(queue, stopped).await;
            });
        });
        let running = Self { inputs, state: receiver, stop: Some(stop), thread: Some(thread) };
        let own = [address("node", false), address("node", true)];
        running.change(Change::Node(NodeFacts {
            name: "node".into(),
            addresses: own.to_vec(),
            pod_cidrs: vec!["10.180.0.0/24".parse().unwrap(), "fd00:a:b4::/64".parse().unwrap()],
            zone: None,
        }));
        running.change(Change::LocalAddresses(own.to_vec()));
        running.change(Change::ServiceApplied(Box::new(service("web", &spec()))));
        for family in FAMILIES {
            running.change(Change::SliceApplied(Box::new(slice("web", family, &["a", "r"]))));
        }
        for source in Source::REQUIRED {
            running.tell(match source {
                Source::Services => Input::ServicesListed(String::new()),
                source => Input::Listed(source),
            });
        }
        running
    }

    fn tell(&self, input: Input) {
        self.inputs.blocking_send(input).unwrap();
    }

    fn change(&self, change: Change) {
        self.tell(Input::Change(change));
    }

    fn configure(&self, config: &NodeProxyConfiguration) {
        let content = serde_json::to_string(config).unwrap();
        let hash = pointsman_crds::node_config::config_hash(&content);
        let candidate = Candidate { revision: hash.clone(), hash, content, config: config.clone() };
        let assigned = Some(candidate.revision.clone());
        let assessment =
            Assessment { assigned: assigned.clone(), outcome: Ok(candidate), tampering: Tampering::None };
        self.tell(Input::Config(Box::new(assessment)));
        self.until("it is in force", |state| state.config.active == assigned && state.verified);
    }

    fn until(&self, what: &str, holds: impl Fn(&SyncState) -> bool) -> SyncState {
        let begun = Instant::now();
        loop {
            let state = self.state.borrow().clone();
            if holds(&state) {
                return state;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}: {state:?}");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn settings(flavour: Flavour) -> NodeProxyConfiguration {
    let mut config = config();
    config.iptables.backend = match flavour {
        Flavour::Nft => IptablesBackend::NFT,
        Flavour::Legacy => IptablesBackend::Legacy,
    };
    // The size of the table is the whole machine's.
    config.conntrack.max_per_core = 0;
    config
}

// ids: SYN-10 REG-129128
#[test]
fn syn_10_the_loop_puts_a_deleted_chain_back_within_a_second() {
    let Some(lab) = Lab::new() else { return };
    let running = Running::start(&lab);
    running.configure(&settings(Flavour::Nft));
    for repairs in 1..=3 {
        // Not sooner than a second after the last look.
        std::thread::park_timeout(Duration::from_millis(1100));
        let begun = Instant::now();
        lab.node("iptables-nft -t nat -F KUBE-SERVICES; iptables-nft -t nat -D PREROUTING 1");
        let state = running.until("repaired", |state| state.drift.repairs == repairs);
        let took = begun.elapsed();
        eprintln!("SYN-10: the loop has repaired it after {took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!((state.drift.foreign_changes, state.drift.differs), (repairs, false));
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    }
}

// ids: CT-10 NP-4 CFG-17
#[test]
fn ct_10_np_4_settings_and_families_follow_the_configuration_live() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let sysctl = |lab: &Lab, path: &str| lab.node(&format!("cat /proc/sys/net/{path}"));
        let mut config = settings(flavour);
        config.conntrack.udp_timeout_seconds = 17;
        let running = Running::start(&lab);
        running.configure(&config);
        assert_eq!(sysctl(&lab, "netfilter/nf_conntrack_udp_timeout"), "17\n");
        assert_eq!(sysctl(&lab, "netfilter/nf_conntrack_tcp_timeout_close_wait"), "3600\n");
        let localhost = (ip("127.0.0.1"), 30080);
        assert_eq!(lab.tcp("node", localhost), Answer::Refused);
        config.iptables.localhost_node_ports = true;
        config.node_port_addresses = vec![NodePortAddress("all".into())];
        config.conntrack.udp_timeout_seconds = 18;
        config.conntrack.tcp_be_liberal = true;
        running.configure(&config);
        assert_eq!(sysctl(&lab, "netfilter/nf_conntrack_udp_timeout"), "18\n");
        assert_eq!(sysctl(&lab, "netfilter/nf_conntrack_tcp_be_liberal"), "1\n");
        assert_eq!(sysctl(&lab, "ipv4/conf/all/route_localnet"), "0\n");
        let saved = |lab: &Lab, tool: &str| lab.node(&format!("{tool}-{flavour}-save"));
        assert!(!saved(&lab, "iptables").contains("INVALID"), "the switch follows live (k/k#117924)");
        assert!(matches!(lab.tcp("node", localhost), Answer::From(..)));
        config.iptables.localhost_node_ports = false;
        config.conntrack.tcp_be_liberal = false;
        config.ip_family_policy = IpFamilyPolicy::SingleStack;
        running.configure(&config);
        assert_eq!(sysctl(&lab, "netfilter/nf_conntrack_tcp_be_liberal"), "0\n");
        assert_eq!(sysctl(&lab, "ipv4/conf/all/route_localnet"), "0\n");
        assert!(saved(&lab, "iptables").contains("INVALID"));
        assert!(!saved(&lab, "ip6tables").contains("KUBE-"), "single stack");
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        config.ip_family_policy = IpFamilyPolicy::PreferDualStack;
        running.configure(&config);
        assert!(matches!(lab.tcp("client", (address("node", true), 30080)), Answer::From(..)));
        assert_eq!(running.state.borrow().settings, Vec::<String>::new());
    }
}

#[test]
fn syn_17_the_loop_changes_the_mode_live_and_loses_no_connection() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let running = Running::start(&lab);
        let mut config = settings(flavour);
        running.configure(&config);
        let tables = |lab: &Lab| lab.node("nft list tables").contains("pointsman");
        let chains = |lab: &Lab| {
            lab.node(&format!("iptables-{flavour}-save; ip6tables-{flavour}-save")).contains("KUBE-SERVICES")
        };
        let traffic = Traffic::start(&lab);
        for _ in 0..2 {
            config.mode = Mode::Nftables;
            running.configure(&config);
            assert_eq!(running.state.borrow().mode, Some(Mode::Nftables));
            assert!(tables(&lab) && !chains(&lab), "{flavour}: the rules of iptables are gone");
            config.mode = Mode::Iptables;
            running.configure(&config);
            assert!(!tables(&lab) && chains(&lab), "{flavour}: the tables of nftables are gone");
        }
        let (count, failed) = traffic.stop();
        assert_eq!(failed, [], "of {count}");
        assert!(count > 100, "{count}");
    }
}

#[test]
fn syn_16_through_userspace_and_back_no_connection_is_lost_and_streams_go_on() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let running = Running::start(&lab);
        let spec =
            json!({"clusterIPs": ["172.30.0.53"], "ports": [{"name": "dns", "protocol": "UDP", "port": 53}]});
        running.change(Change::ServiceApplied(Box::new(service("dns", &spec))));
        running.change(Change::SliceApplied(Box::new(slice("dns", FAMILIES[0], &["a", "r"]))));
        let mut config = settings(flavour);
        running.configure(&config);
        let (mut streams, traffic) = (Vec::new(), Traffic::start(&lab));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        // From one port all the time: what connection tracking holds on to.
        let datagrams = lab.spawn("client", move || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect((ip("172.30.0.53"), 53)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let (mut count, mut lost) = (0, 0);
            while !stopped.load(Ordering::Relaxed) {
                let answered = socket.send(b"?").is_ok() && socket.recv(&mut [0; 64]).is_ok();
                count += 1;
                lost += usize::from(!answered);
                std::thread::park_timeout(Duration::from_millis(5));
            }
            (count, lost)
        });
        for mode in [Mode::Userspace, Mode::Nftables, Mode::Userspace, Mode::Iptables] {
            streams.extend(["client", "node", "pod"].map(|from| lab.stream(from, cluster_ip())));
            config.mode = mode;
            running.configure(&config);
            assert_eq!(running.state.borrow().mode, Some(mode));
            let tables = lab.node("nft list tables");
            assert_eq!(tables.contains("pointsman-userspace"), mode == Mode::Userspace, "{tables}");
            for stream in &mut streams {
                stream.check().unwrap_or_else(|error| panic!("after the change to {mode}: {error}"));
            }
        }
        let (count, failed) = traffic.stop();
        stop.store(true, Ordering::Relaxed);
        let (datagrams, lost) = datagrams.join().unwrap();
        eprintln!(
            "{flavour}: {} of {count} connections failed, {lost} of {datagrams} datagrams lost",
            failed.len()
        );
        assert_eq!(failed, [], "of {count}");
        // An answer may be on its way through a socket that is just replaced.
        assert!(count > 100 && lost <= 4, "{lost} of {datagrams}");
    }
}

#[test]
fn syn_16_a_new_agent_in_mode_userspace_costs_no_connection_and_the_kernel_stands_in_meanwhile() {
    let Some(lab) = Lab::new() else { return };
    let mut config = settings(Flavour::Nft);
    config.mode = Mode::Userspace;
    let running = Running::start(&lab);
    let spec =
        json!({"clusterIPs": ["172.30.0.53"], "ports": [{"name": "dns", "protocol": "UDP", "port": 53}]});
    let dns = |running: &Running| {
        running.change(Change::ServiceApplied(Box::new(service("dns", &spec))));
        running.change(Change::SliceApplied(Box::new(slice("dns", FAMILIES[0], &["a"]))));
    };
    dns(&running);
    running.configure(&config);
    let asked = |socket: &UdpSocket| socket.send(b"?").is_ok() && socket.recv(&mut [0; 64]).is_ok();
    let socket = lab.run("client", || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((ip("172.30.0.53"), 53)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    });
    // By now all changes are in the kernel.
    let begun = Instant::now();
    while !asked(&socket) {
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
    let traffic = Traffic::start(&lab);
    let mut stream = lab.stream("client", cluster_ip());
    std::thread::park_timeout(Duration::from_millis(300));
    let last_words = std::thread::spawn(move || {
        std::thread::park_timeout(Duration::from_secs(2));
        stream.check()
    });
    let stopping = Instant::now();
    drop(running);
    let took = stopping.elapsed();
    last_words.join().unwrap().expect("an open connection has time to end");
    let tables = lab.node("nft list tables");
    assert!(tables.contains("ip pointsman\n") && !tables.contains("pointsman-userspace"), "{tables}");
    assert!(asked(&socket), "a flow from the same port goes by the kernel");
    std::thread::park_timeout(Duration::from_millis(500));
    let successor = Running::start(&lab);
    dns(&successor);
    successor.configure(&config);
    let tables = lab.node("nft list tables");
    assert!(!tables.contains("ip pointsman\n") && tables.contains("pointsman-userspace"), "{tables}");
    let (count, failed) = traffic.stop();
    eprintln!("{} of {count} connections failed; the agent took {took:?} to end", failed.len());
    assert_eq!(failed, [], "of {count}");
    assert!(
        count > 100 && took > Duration::from_secs(1) && took < Duration::from_secs(15),
        "{count} {took:?}"
    );
}

#[test]
fn syn_10_the_loop_repairs_our_table_within_a_second_and_a_successor_removes_what_is_not_its_own() {
    let Some(lab) = Lab::new() else { return };
    let mut config = settings(Flavour::Nft);
    config.mode = Mode::Nftables;
    let running = Running::start(&lab);
    running.configure(&config);
    for (repairs, damage) in (1..).zip([
        "flush chain ip pointsman services",
        "flush map ip6 pointsman frontends",
        "delete table ip pointsman",
    ]) {
        // Not sooner than a second after the last look.
        std::thread::park_timeout(Duration::from_millis(1100));
        let begun = Instant::now();
        lab.node(&format!("nft {damage}"));
        running.until("repaired", |state| state.drift.repairs == repairs);
        let took = begun.elapsed();
        eprintln!("SYN-10: the loop has repaired it after {took:?}");
        assert!(took < Duration::from_secs(1), "{damage}: {took:?}");
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    }
    config.ip_family_policy = IpFamilyPolicy::SingleStack;
    running.configure(&config);
    assert_eq!(lab.node("nft list tables"), "table ip pointsman\n");
    // Killed and started again in another mode.
    drop(running);
    let successor = Running::start(&lab);
    successor.configure(&settings(Flavour::Nft));
    assert!(!lab.node("nft list tables").contains("pointsman"));
    assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
}
