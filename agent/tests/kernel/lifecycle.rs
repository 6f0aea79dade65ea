//! Adoption, live changes, failures, cleanup: traffic goes on meanwhile, and what is not ours stays.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pointsman_agent::conntrack::Connections;
use pointsman_agent::iptables::{self, Flavour, Options, Tools, cleanup};
use pointsman_agent::kernel::SyncFailure;
use pointsman_agent::model::Protocol;
use pointsman_agent::sync::Platform;
use pointsman_agent::sync::node::{Dataplane, Node};
use pointsman_agent::userspace::counters::Counters;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;
use serde_json::json;

use crate::support::lab::{Lab, address, ip};
use crate::support::scenario::hosts::Host;
use crate::support::traffic::{Answer, PATIENT, ask};
use crate::support::world::{FAMILIES, Way, World, block_on, cluster_ip, config, options, spec, tools};

pub const BOTH: [Flavour; 2] = [Flavour::Nft, Flavour::Legacy];

pub fn loaded(lab: &Lab, way: impl Into<Way>) -> World {
    let mut world = World::new(lab, way);
    world.service("web", spec());
    world.endpoints("web", &["a", "r"]);
    world
}

/// Connects all the time from several places; returns how many connections there were and which failed.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<(usize, Vec<Answer>)>>,
}

impl Traffic {
    pub fn start(lab: &Lab) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let node_port = |v6| SocketAddr::from((address("node", v6), 30080));
        let flows = [
            ("client", node_port(false)),
            ("client", node_port(true)),
            ("node", cluster_ip()),
            ("pod", cluster_ip()),
            ("pod", (ip("fd00:ac:1e::50"), 80).into()),
        ];
        let threads = flows.map(|(from, to)| {
            let stop = stop.clone();
            let source = Host::named(from).unwrap().source(&to);
            lab.spawn(from, move || {
                let (mut count, mut failed) = (0, Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    match block_on(ask(source, to, Protocol::Tcp, PATIENT)) {
                        Answer::From(..) if start.elapsed() < Duration::from_millis(900) => {}
                        Answer::From(..) => failed.push(Answer::Nothing),
                        other => failed.push(other),
                    }
                    count += 1;
                    std::thread::park_timeout(Duration::from_millis(2));
                }
                (count, failed)
            })
        });
        Self { stop, threads: threads.into() }
    }

    pub fn stop(self) -> (usize, Vec<Answer>) {
        self.stop.store(true, Ordering::Relaxed);
        let ends = self.threads.into_iter().map(|thread| thread.join().unwrap());
        ends.fold((0, Vec::new()), |(count, mut all), (more, failed)| {
            all.extend(failed);
            (count + more, all)
        })
    }
}

// ids: NP-10
#[test]
fn a_new_mark_bit_loses_no_connection() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = loaded(&lab, flavour);
        world.settle();
        // Only what the mark or an established connection lets through is forwarded.
        lab.node(&format!("iptables-{flavour} -P FORWARD DROP; ip6tables-{flavour} -P FORWARD DROP"));
        lab.node(&format!("iptables-{flavour} -A FORWARD -i pod0 -j ACCEPT; ip6tables-{flavour} -A FORWARD -i pod0 -j ACCEPT"));
        let traffic = Traffic::start(&lab);
        for bit in [15, 3, 14] {
            let mut config = config();
            config.masquerade.bit = bit;
            world.configure(config);
            assert!(!world.settle().full);
            let saved = lab.node(&format!("iptables-{flavour}-save"));
            let mark = format!("{:#x}/{:#x}", 1 << bit, 1 << bit);
            assert_eq!(
                saved.matches(&mark).count(),
                3,
                "one mark is set, masqueraded and let through: {saved}"
            );
        }
        let (count, failed) = traffic.stop();
        assert_eq!(failed, [], "of {count}");
        assert!(count > 100, "{count}");
    }
}

/// What kube-proxy would have written for the same cluster: the same chains, a flat list, canaries.
fn as_kube_proxy(lab: &Lab, flavour: Flavour) {
    for tool in ["iptables", "ip6tables"] {
        let saved = lab.node(&format!("{tool}-{flavour}-save -t nat"));
        let captures =
            saved.lines().filter(|line| line.starts_with("-A KUBE-IP-") && line.contains(" -j KUBE-"));
        let mut script = String::from(
            "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-PROXY-CANARY - [0:0]\n:KUBE-SVC-STALE - [0:0]\n:KUBE-SEP-STALE - [0:0]\n:CNI-OTHER - [0:0]\n",
        );
        for line in saved.lines().filter(|line| line.starts_with(":KUBE-IP-")) {
            script += &format!("{} - [0:0]\n", line.split(' ').next().unwrap());
        }
        for line in captures {
            let (_, rule) = line[3..].split_once(' ').unwrap();
            script += &format!("-A KUBE-SERVICES {rule}\n");
        }
        script += "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n";
        script += "-A KUBE-SVC-STALE -j KUBE-SEP-STALE\n-A KUBE-SEP-STALE -j KUBE-MARK-MASQ\n-A CNI-OTHER -j KUBE-MARK-MASQ\n";
        for line in saved.lines().filter(|line| line.starts_with(":KUBE-IP-")) {
            script += &format!("-X {}\n", &line.split(' ').next().unwrap()[1..]);
        }
        script += "COMMIT\n*filter\n:KUBE-PROXY-CANARY - [0:0]\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\nCOMMIT\n*mangle\n:KUBE-PROXY-CANARY - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n";
        lab.node(&format!("{tool}-{flavour}-restore --noflush <<EOF\n{script}EOF\n"));
    }
}

// ids: SYN-9 REG-75360
#[test]
fn syn_9_rules_of_kube_proxy_are_adopted_without_a_gap() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = loaded(&lab, flavour);
        world.settle();
        as_kube_proxy(&lab, flavour);
        let mut successor = loaded(&lab, flavour);
        assert!(!successor.differences().is_empty());
        let traffic = Traffic::start(&lab);
        let synced = successor.settle();
        assert!(synced.full);
        let (count, failed) = traffic.stop();
        assert_eq!(failed, [], "of {count}");
        let saved = lab.node(&format!("iptables-{flavour}-save"));
        assert!(!saved.contains("STALE") && !saved.contains("KUBE-PROXY-CANARY"), "{saved}");
        for other in ["CNI-OTHER", "KUBE-FIREWALL", "KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT"] {
            assert!(saved.contains(other), "{other} in {saved}");
        }
        // A restart that finds everything in place writes nothing.
        let mut again = loaded(&lab, flavour);
        let synced = again.settle();
        assert_eq!(synced.written.values().sum::<usize>(), 0);
    }
}

/// Cleans up in the node's namespace, as the command does. Returns whether an anchor is left.
fn clean(lab: &Lab, flavour: Flavour) -> bool {
    let tools = tools(lab, flavour);
    lab.run("node", move || block_on(cleanup(&tools, &FAMILIES, Connections::Anchor)).unwrap())
}

#[test]
fn syn_16_connections_outlive_a_cleanup() {
    for flavour in BOTH {
        for v6 in [false, true] {
            let Some(lab) = Lab::new() else { return };
            let mut world = World::new(&lab, flavour);
            world.service("web", spec());
            world.endpoints("web", &["a"]);
            world.settle();
            let mut stream = lab.stream("client", (address("node", v6), 30080));
            assert!(stream.answers());
            assert!(clean(&lab, flavour), "an anchor is left");
            assert!(stream.answers() && stream.answers());
            let rules = |lab: &Lab| {
                let saved = lab.node(&format!("iptables-{flavour}-save; ip6tables-{flavour}-save"));
                saved.lines().filter(|line| line.starts_with("-A")).map(str::to_owned).collect::<Vec<_>>()
            };
            let left = rules(&lab);
            assert!(left.len() == 1 && left[0].starts_with("-A INPUT -m comment"), "{left:?}");
            assert!(clean(&lab, flavour), "it is still needed");
            assert!(stream.answers());
            assert_eq!(rules(&lab), left, "one is enough");
            // An agent that comes back has rules of its own for that.
            assert!(world.differences().len() > 10);
            world.repair();
            assert!(stream.answers());
            assert!(!rules(&lab).contains(&left[0]));
            assert!(clean(&lab, flavour));
            drop(stream);
            let begun = Instant::now();
            while clean(&lab, flavour) {
                assert!(begun.elapsed() < Duration::from_secs(10), "the connection has ended");
                std::thread::park_timeout(Duration::from_millis(50));
            }
            assert_eq!(rules(&lab), Vec::<String>::new());
        }
    }
}

#[test]
fn a_family_that_is_not_served_any_more_loses_its_rules() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = loaded(&lab, flavour);
        world.settle();
        let v6 = SocketAddr::from((address("node", true), 30080));
        assert!(matches!(lab.tcp("client", v6), Answer::From(..)));
        let one = [IpFamily::IPv4];
        let old = std::mem::replace(
            &mut world.dataplane,
            Dataplane::Iptables(iptables::Dataplane::new(tools(&lab, flavour), &one)),
        );
        let mut node = Node::new(Path::new("/nowhere"), Counters::default());
        block_on(node.retire(&old, &world.dataplane)).unwrap();
        let saved = lab.node(&format!("ip6tables-{flavour}-save"));
        assert!(!saved.contains("KUBE-"), "{saved}");
        assert!(!block_on(tools(&lab, flavour).in_use(IpFamily::IPv6)));
        assert!(block_on(tools(&lab, flavour).in_use(IpFamily::IPv4)));
        assert_eq!(lab.tcp("client", v6), Answer::Refused, "nobody listens there");
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    }
}

#[test]
fn syn_16_the_command_removes_nothing_while_an_agent_runs_in_another_pod() {
    let Some(lab) = Lab::new() else { return };
    let mut world = loaded(&lab, Flavour::Nft);
    world.settle();
    let state = std::env::temp_dir().join(format!("pm-t-state-{}", std::process::id()));
    std::fs::create_dir_all(&state).unwrap();
    let cleanup = || {
        let agent = env!("CARGO_BIN_EXE_pointsman-agent");
        lab.node(&format!("{agent} cleanup --state-dir {} 2>&1 || true", state.display()))
    };
    let running = pointsman_agent::instance::lock(&state).unwrap();
    let said = cleanup();
    assert!(said.contains("an agent is running on this node"), "{said}");
    assert_eq!(world.differences(), Vec::<String>::new());
    drop(running);
    let said = cleanup();
    std::fs::remove_dir_all(&state).unwrap();
    assert!(!lab.node("iptables-nft-save").contains("KUBE-SERVICES"), "{said}");
}

#[test]
fn syn_16_cleanup_removes_what_is_ours_and_nothing_else() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let before = format!(
            "iptables-{flavour} -t nat -N CNI-OTHER; iptables-{flavour} -t nat -A POSTROUTING -j CNI-OTHER;
             iptables-{flavour} -N KUBE-FIREWALL; iptables-{flavour} -A INPUT -j KUBE-FIREWALL;
             iptables-{flavour} -t mangle -N KUBE-KUBELET-CANARY; iptables-{flavour} -A FORWARD -s 192.0.2.1 -j ACCEPT"
        );
        lab.node(&before);
        let save = |lab: &Lab| -> Vec<String> {
            let text = lab.node(&format!("iptables-{flavour}-save; ip6tables-{flavour}-save"));
            let lines = text.lines().filter(|line| {
                line.starts_with('-') || line.starts_with(":KUBE") || line.starts_with(":CNI")
            });
            lines.map(|line| line.split(" [").next().unwrap().to_owned()).collect()
        };
        let foreign = save(&lab);
        let mut world = loaded(&lab, flavour);
        world.settle();
        assert!(save(&lab).len() > foreign.len() + 40);
        assert!(!clean(&lab, flavour), "no connection, no anchor");
        assert_eq!(save(&lab), foreign);
        // Nothing to clean is no error.
        assert!(!clean(&lab, flavour));
        // What was there is restored after a cleanup.
        assert!(!world.differences().is_empty());
        world.repair();
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    }
}

// ids: REG-109811
#[test]
fn rules_of_the_other_flavour_are_found_and_removed_alone() {
    for (flavour, other) in [(BOTH[0], BOTH[1]), (BOTH[1], BOTH[0])] {
        let Some(lab) = Lab::new() else { return };
        let in_use = || block_on(tools(&lab, flavour).other_flavour_in_use());
        assert!(in_use().is_none());
        // An agent was killed while it changed the flavour: both hold the rules.
        loaded(&lab, other).settle();
        let mut world = loaded(&lab, flavour);
        world.settle();
        let left = in_use().expect("the other flavour holds rules");
        assert_eq!(left.flavour(), other);
        assert!(!block_on(cleanup(&left, &FAMILIES, Connections::Covered)).unwrap());
        assert!(in_use().is_none());
        assert_eq!(world.differences(), Vec::<String>::new(), "the rules in use are as they were");
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
    }
}

// ids: SYN-8 SYN-10 SYN-19 REG-129128 REG-121362
#[test]
fn syn_8_a_failed_write_is_read_back_and_repaired() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let mut world = loaded(&lab, flavour);
        world.settle();
        // Somebody flushes and deletes the whole nat table of IPv4.
        lab.node(&format!("iptables-{flavour} -t nat -F; iptables-{flavour} -t nat -X"));
        assert!(!world.differences().is_empty());
        world.endpoints("web", &["a"]);
        let (synced, errors) = world.try_sync();
        assert_eq!(errors.len(), 1, "IPv6 is written all the same");
        assert_eq!(errors[0].failure, SyncFailure::RestoreFailed);
        assert!(errors[0].message.contains("line"), "{}", errors[0].message);
        assert_eq!(synced.duration.len(), 1);
        // No change is needed for the repair.
        assert!(world.settle().full);
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        // Drift that no write meets is found by comparing.
        lab.node(&format!("iptables-{flavour} -t nat -F KUBE-MARK-MASQ; iptables-{flavour} -D FORWARD 1"));
        assert_eq!(world.differences().len(), 2, "{:?}", world.differences());
        world.repair();
    }
}

/// A tool in ten fails: half of them do nothing, half do their work before. While the file is there.
fn unreliable(lab: &Lab, counter: &std::path::Path) -> Options {
    let script = format!(
        r#"f={}; test -e $f || exec "$@"; n=$(($(cat $f) + 1)); echo $n > $f
           case $((n % 20)) in 0) exit 1;; 10) "$@"; exit 1;; *) exec "$@";; esac"#,
        counter.display()
    );
    let mut options = options(lab);
    let shell = ["sh", "-c", &script, "sh"].map(Into::into);
    options.wrapper = shell.into_iter().chain(options.wrapper).collect();
    options
}

// ids: SYN-8 REG-121362
#[test]
fn with_one_tool_in_ten_failing_the_kernel_follows_all_the_same() {
    for (flavour, backend) in
        [(Flavour::Nft, IptablesBackend::NFT), (Flavour::Legacy, IptablesBackend::Legacy)]
    {
        let Some(lab) = Lab::new() else { return };
        let counter = std::env::temp_dir().join(format!("pm-t-unreliable-{}-{flavour}", std::process::id()));
        let tools = block_on(Tools::detect_with(backend, unreliable(&lab, &counter))).unwrap();
        let mut world = loaded(&lab, flavour);
        world.dataplane = Dataplane::Iptables(iptables::Dataplane::new(tools, &FAMILIES));
        std::fs::write(&counter, "0").unwrap();
        let mut failures = 0;
        for round in 0..40 {
            let name = format!("s{}", round % 7);
            match round % 4 {
                0 => world.service(&name, json!({"clusterIPs": [format!("172.30.1.{round}"), format!("fd00:ac:1e::1:{round}")], "ports": [{"name": "web", "port": 80}]})),
                1 => world.endpoints(&name, &["a", "r"]),
                2 => world.endpoints("web", if round % 8 == 2 { &["a"] } else { &[] }),
                _ => world.delete_service(&name),
            }
            failures += world.try_sync().1.len();
        }
        std::fs::remove_file(&counter).unwrap();
        assert!(failures > 3, "{flavour}: {failures}");
        world.endpoints("web", &["a", "r"]);
        world.settle();
        assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
        assert!(matches!(lab.tcp("client", (address("node", true), 30080)), Answer::From(..)));
    }
}

// ids: REG-48107
#[test]
fn a_held_lock_and_a_missing_tool_are_told_apart() {
    let Some(lab) = Lab::new() else { return };
    let directory = std::env::temp_dir().join(format!("pm-t-lock-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let lock = directory.join("xtables.lock");
    let with_lock = |mut options: Options| {
        let env = ["env".into(), format!("XTABLES_LOCKFILE={}", lock.display()).into()];
        options.wrapper = env.into_iter().chain(options.wrapper).collect();
        options
    };
    let tools = block_on(Tools::detect_with(IptablesBackend::Legacy, with_lock(options(&lab)))).unwrap();
    let mut world = loaded(&lab, Flavour::Legacy);
    world.dataplane = Dataplane::Iptables(iptables::Dataplane::new(tools, &FAMILIES));
    let mut config = config();
    config.iptables.lock_timeout_seconds = 1;
    world.configure(config);
    let mut holder =
        std::process::Command::new("flock").arg("-F").arg(&lock).args(["sleep", "30"]).spawn().unwrap();
    while !lock.exists() {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    std::thread::park_timeout(Duration::from_millis(100));
    let (_, errors) = world.try_sync();
    let failures: Vec<SyncFailure> = errors.iter().map(|error| error.failure).collect();
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_eq!(failures, [SyncFailure::LockTimeout; 2], "{errors:?}");
    world.settle();
    std::fs::remove_dir_all(&directory).unwrap();
    let options = Options { directory: Some(directory), ..Options::default() };
    let error = block_on(Tools::detect_with(IptablesBackend::Auto, options)).unwrap_err();
    assert!(error.to_string().contains("install iptables"), "{error}");
}

#[test]
fn a_flavour_that_the_kernel_does_not_have_is_not_taken() {
    let directory = std::env::temp_dir().join(format!("pointsman-flavours-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    for (name, script) in [
        ("iptables-nft", "echo 'iptables v1.8.9 (nf_tables)'"),
        (
            "iptables-nft-save",
            "echo 'Could not fetch rule set generation id: Protocol not supported' >&2; exit 4",
        ),
        ("iptables-legacy", "echo 'iptables v1.8.9 (legacy)'"),
        ("iptables-legacy-save", ""),
        ("ip6tables-legacy-save", ""),
    ] {
        let path = directory.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let options = Options { directory: Some(directory.clone()), ..Options::default() };
    let found = block_on(Tools::detect_with(IptablesBackend::Auto, options)).unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(found.flavour(), Flavour::Legacy);
}

// ids: REG-109811
#[test]
fn the_flavour_is_the_one_that_kubelet_uses() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        lab.node(&format!("iptables-{flavour} -t mangle -N KUBE-IPTABLES-HINT"));
        let found = block_on(Tools::detect_with(IptablesBackend::Auto, options(&lab))).unwrap();
        assert_eq!(found.flavour(), flavour);
        assert!(found.version().starts_with('v'), "{}", found.version());
    }
    let Some(lab) = Lab::new() else { return };
    let found = block_on(Tools::detect_with(IptablesBackend::Auto, options(&lab))).unwrap();
    assert_eq!(found.flavour(), Flavour::Nft, "without any hint");
}
