//! What others do to our rules, and writes that get half-way: noticed, and repaired where it differs and nowhere else.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pointsman_agent::iptables::{self, Flavour, Options, Tools};
use pointsman_agent::kernel::{Reach, SyncFailure};
use pointsman_agent::netfilter::Notices;
use pointsman_agent::sync::Dataplane as _;
use pointsman_agent::sync::node::Dataplane;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;

use crate::lifecycle::{BOTH, loaded};
use crate::support::lab::{Lab, address};
use crate::support::traffic::Answer;
use crate::support::world::{FAMILIES, World, block_on, cluster_ip, options};

/// Tools that write down how they are run, and fail where a test wants them to.
struct Shim {
    directory: PathBuf,
}

impl Shim {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("pm-t-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        Self { directory }
    }

    fn tools(&self, lab: &Lab, flavour: Flavour) -> Tools {
        let script = format!(
            "cd {} && echo \"$*\" >> log
             case \"$* \" in *ip6tables-*-restore\\ *) if [ -e fail ]; then sed /^COMMIT/q | \"$@\"; exit 4; fi;; esac
             exec \"$@\"",
            self.directory.display()
        );
        let shim = ["sh".into(), "-c".into(), script.into(), "sh".into()];
        let plain = options(lab);
        let options = Options { wrapper: shim.into_iter().chain(plain.wrapper.clone()).collect(), ..plain };
        let backend = match flavour {
            Flavour::Nft => IptablesBackend::NFT,
            Flavour::Legacy => IptablesBackend::Legacy,
        };
        block_on(Tools::detect_with(backend, options)).unwrap()
    }

    /// The commands since the last call.
    fn ran(&self, word: &str) -> usize {
        let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
        let _ = std::fs::remove_file(self.directory.join("log"));
        log.lines().filter(|line| line.contains(word)).count()
    }

    fn fail(&self, on: bool) {
        let flag = self.directory.join("fail");
        if on { std::fs::write(flag, "").unwrap() } else { std::fs::remove_file(flag).unwrap() }
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A world whose data plane hears what is done in the node's namespace.
fn listening(lab: &Lab, flavour: Flavour, shim: &Shim) -> World {
    let mut world = loaded(lab, flavour);
    world.dataplane = Dataplane::Iptables(iptables::Dataplane::new(shim.tools(lab, flavour), &FAMILIES));
    world.listen(lab);
    world.settle();
    world
}

impl World {
    /// Lets the data plane hear what is done in the node's namespace.
    pub fn listen(&mut self, lab: &Lab) {
        let handle = self.runtime.handle().clone();
        let notices = lab.run("node", move || {
            let _entered = handle.enter();
            Notices::subscribe().unwrap()
        });
        let Dataplane::Iptables(iptables) = &mut self.dataplane else { panic!("not mode iptables") };
        iptables.listen(notices);
    }

    /// Whether the kernel tells within a second that somebody else has changed something.
    fn is_told(&mut self) -> bool {
        let told = self.dataplane.changed();
        self.runtime.block_on(async { tokio::time::timeout(Duration::from_secs(1), told).await.is_ok() })
    }

    pub fn look(&mut self) -> Vec<String> {
        self.runtime.block_on(self.dataplane.verify(&self.plan, Reach::Suspects)).unwrap()
    }

    pub fn repair_only(&mut self) {
        assert_eq!(self.runtime.block_on(self.dataplane.repair(&self.plan)), []);
    }

    pub fn repair(&mut self) {
        self.repair_only();
        assert_eq!(self.differences(), Vec::<String>::new());
    }
}

#[test]
fn syn_10_foreign_changes_are_told_by_the_kernel_and_own_writes_are_not() {
    let Some(lab) = Lab::new() else { return };
    let shim = Shim::new("drift");
    let mut world = listening(&lab, Flavour::Nft, &shim);
    // Our own writes, of every kind, are no foreign changes, and a look after them reads nothing.
    world.endpoints("web", &["a"]);
    world.sync();
    world.endpoints("web", &[]);
    world.sync();
    world.endpoints("web", &["a"]);
    world.sync();
    shim.ran("");
    assert!(!world.is_told());
    assert_eq!(world.look(), Vec::<String>::new());
    assert_eq!(shim.ran("-save"), 0);
    // Nor is what others do to their own chains, and what they add to the built-in ones.
    lab.node(
        "iptables-nft -t nat -N CNI-X; iptables-nft -t nat -A CNI-X -j RETURN; iptables-nft -t nat -A POSTROUTING -j CNI-X
         iptables-nft -t mangle -N KUBE-KUBELET-CANARY; nft add table ip other; nft delete table ip other",
    );
    assert!(!world.is_told());
    assert_eq!(world.look(), Vec::<String>::new());
    assert_eq!(shim.ran("-save"), 0);

    let untouched = |lab: &Lab| lab.node("nft -a list chain ip nat KUBE-SERVICES; nft -a list table ip6 nat");
    for (done, expected) in [
        ("iptables-nft -t nat -F KUBE-MARK-MASQ", "chain KUBE-MARK-MASQ"),
        ("iptables-nft -t nat -D PREROUTING 1", "nat chain PREROUTING: no way to KUBE-SERVICES"),
        ("iptables-nft -D KUBE-FORWARD 2", "chain KUBE-FORWARD"),
        (
            "iptables-nft -t nat -N KUBE-SVC-STRANGER; iptables-nft -t nat -A KUBE-SVC-STRANGER -j RETURN",
            "chain KUBE-SVC-STRANGER: left over",
        ),
    ] {
        let before = untouched(&lab);
        shim.ran("");
        let begun = Instant::now();
        lab.node(done);
        assert!(world.is_told(), "{done}");
        let found = world.look();
        assert!(found.len() == 1 && found[0].contains(expected), "{done}: {found:?}");
        assert_eq!(shim.ran("ip6tables"), 0, "the other family is not looked at");
        world.repair();
        eprintln!("SYN-10: {done}: back after {:?}", begun.elapsed());
        assert_eq!(untouched(&lab), before, "nothing else is written");
        assert!(!world.is_told(), "the repair is ours");
    }
    // The kernel tells nothing about sets; a look sees it.
    lab.node("ipset flush POINTSMAN-CLUSTER-IPS");
    assert!(!world.is_told());
    let found = world.look();
    assert!(found.len() == 1 && found[0].contains("POINTSMAN-CLUSTER-IPS"), "{found:?}");
    world.repair();
    // Everything at once.
    lab.node("iptables-nft -t nat -F; iptables-nft -t nat -X; nft delete table ip filter");
    assert!(world.is_told());
    assert!(world.look().len() > 10);
    world.repair();
    assert!(matches!(lab.tcp("client", cluster_ip()), Answer::From(..)));
}

#[test]
fn syn_10_the_legacy_flavour_is_read_at_every_look() {
    let Some(lab) = Lab::new() else { return };
    let shim = Shim::new("legacy");
    let mut world = listening(&lab, Flavour::Legacy, &shim);
    lab.node("iptables-legacy -t nat -F KUBE-MARK-MASQ; ip6tables-legacy -D FORWARD 1");
    assert!(!world.is_told());
    let found = world.look();
    assert_eq!(found.len(), 2, "{found:?}");
    shim.ran("");
    world.repair();
    assert_eq!(shim.ran("iptables-legacy-restore"), 1, "one family");
}

// ids: SYN-8 SYN-19 REG-121362
#[test]
fn syn_8_a_write_that_got_half_way_is_read_back_and_repaired_in_its_family_alone() {
    for flavour in BOTH {
        let Some(lab) = Lab::new() else { return };
        let shim = Shim::new("half");
        let mut world = listening(&lab, flavour, &shim);
        shim.fail(true);
        // The filter table says already that nobody is there; nat has not heard of it.
        world.endpoints("web", &[]);
        let (_, errors) = world.try_sync();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert_eq!((errors[0].family, errors[0].failure), (IpFamily::IPv6, SyncFailure::RestoreFailed));
        let np = |v6| (address("node", v6), 30080);
        assert_eq!(lab.tcp("client", np(false)), Answer::Refused);
        // Still failing, with the next change beside it.
        world.service(
            "other",
            serde_json::json!({
                "clusterIPs": ["172.30.0.81", "fd00:ac:1e::51"],
                "ports": [{"name": "web", "protocol": "TCP", "port": 80}],
            }),
        );
        world.endpoints("other", &["a"]);
        let (_, errors) = world.try_sync();
        assert_eq!(errors.len(), 1, "{errors:?}");
        shim.fail(false);
        shim.ran("");
        let synced = world.sync();
        assert!(synced.full);
        let log = shim.directory.join("log");
        let log = std::fs::read_to_string(log).unwrap();
        let saves: Vec<&str> = log.lines().filter(|line| line.contains("-save")).collect();
        assert!(!saves.is_empty() && saves.iter().all(|line| line.contains("ip6tables")), "{saves:?}");
        assert_eq!(world.differences(), Vec::<String>::new());
        assert_eq!(lab.tcp("client", np(true)), Answer::Refused);
        let other = (crate::support::lab::ip("fd00:ac:1e::51"), 80);
        assert!(matches!(lab.tcp("client", other), Answer::From(..)));
    }
}
