//! The network of a benchmark, in namespaces that vanish with this process however it ends.
//!
//! In: nothing. Out: a node whose kernel nobody else writes, a client that is a pod of that node and a machine outside,
//! and endpoints on every address of two blocks.
//!
//! ```text
//!   this process (API server, client)          node                       endpoints
//!     pod 10.224.1.2  ───────────────── pod 10.224.1.1      ends 10.225.0.1 ── ends 10.225.0.2
//!     out 203.0.113.1 ───────────────── out 203.0.113.2                        10.232.0.0/13 on lo
//!     lo  192.0.2.1 (API server)
//! ```
//! Addresses of Services that the node does not translate are routed to the endpoints too. Nobody listens on their
//! ports, so a client is refused at once instead of waiting.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::network::{ip, set};

/// The API server's address.
pub const API_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The node's address, which answers on NodePorts.
pub const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
/// The pods of the node.
pub const NODE_PODS: &str = "10.224.1.0/24";
/// The pods of all nodes.
pub const PODS: &str = "10.224.0.0/12";
/// The first of the addresses on which endpoints answer. The others follow, up to the end of 10.232.0.0/13.
pub const FIRST_ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 232, 0, 1);

/// A folder in memory that is gone with this process, and that user-mode-linux sees: it has a /run of its own.
pub const TEMPORARY: &str = "/mnt";

/// Refusals come at once, and a lost packet is not waited for longer than three seconds.
const SETTINGS: &str = "net/ipv4/conf/all/rp_filter=0
net/ipv4/conf/default/rp_filter=0
net/ipv4/tcp_syn_retries=1
net/ipv6/conf/default/accept_dad=0
";
const FORWARD: &str = "net/ipv4/ip_forward=1\nnet/ipv6/conf/all/forwarding=1\n";

/// Gives this process a network and a /run and a /mnt of its own, which are file systems in memory. Call it while there is
/// only one thread.
pub fn isolate() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).context("new namespaces: are you root?")?;
    let nothing = None::<&str>;
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).context("private mounts")?;
    for folder in ["/run", TEMPORARY] {
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .with_context(|| format!("mounting {folder}"))?;
    }
    Ok(())
}

/// A network namespace that is kept by an open file.
#[derive(Debug)]
struct Namespace(File);

impl Namespace {
    fn new() -> Result<Self> {
        in_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("a new network namespace")?;
            File::open("/proc/thread-self/ns/net").context("opening a network namespace")
        })
        .map(Self)
    }

    fn run<T: Send + 'static>(&self, what: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let namespace = self.0.try_clone().context("a network namespace")?;
        in_thread(move || {
            setns(namespace, CloneFlags::CLONE_NEWNET).context("entering a network namespace")?;
            what()
        })
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

fn in_thread<T: Send + 'static>(what: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    thread::spawn(what).join().map_err(|_| anyhow!("a thread has panicked"))?
}

/// The namespaces and what joins them.
#[derive(Debug)]
pub struct Lab {
    node: Namespace,
    ends: Namespace,
    processor: Option<SocketAddr>,
}

impl Lab {
    /// Makes all of it, in the network that [`isolate`] has made.
    pub async fn new() -> Result<Self> {
        ip(None, &format!("link set lo up\naddress add {API_ADDRESS}/32 dev lo\n")).await?;
        Self::around_this(None).await
    }

    /// Makes all of it but the API server's address, in a kernel of its own, whose processor time is told at `processor`.
    pub async fn in_machine(processor: SocketAddr) -> Result<Self> {
        Self::around_this(Some(processor)).await
    }

    async fn around_this(processor: Option<SocketAddr>) -> Result<Self> {
        set(Path::new("/proc/self/ns/net"), SETTINGS).await?;
        let ends = Namespace::new()?;
        set(&ends.path(), SETTINGS).await?;
        let lab = Self { node: Namespace::new()?, ends, processor };
        lab.join().await?;
        Ok(lab)
    }

    /// Replaces the node with one whose kernel holds no rules.
    pub async fn renew_node(&mut self) -> Result<()> {
        // The other ends go with them; a namespace takes its time to go by itself.
        ip(None, "link delete out\nlink delete pod\n").await?;
        ip(Some(&self.ends.path()), "link delete ends\n").await?;
        self.node = Namespace::new()?;
        self.join().await
    }

    async fn join(&self) -> Result<()> {
        let (node, ends) = (self.node.path(), self.ends.path());
        set(&node, &format!("{SETTINGS}{FORWARD}")).await?;
        let link = |name: &str, into: &Path| {
            format!("link add {name} type veth peer name {name} netns {}\n", into.display())
        };
        let own = link("out", &node)
            + &link("pod", &node)
            + "address add 203.0.113.1/24 dev out\nlink set out up\naddress add 10.224.1.2/24 dev pod\nlink set pod up\n";
        ip(None, &own).await?;
        let inside = link("ends", &ends)
            + "link set lo up\naddress add 203.0.113.2/24 dev out\nlink set out up\naddress add 10.224.1.1/24 dev pod\n\
               link set pod up\naddress add 10.225.0.1/16 dev ends\nlink set ends up\n\
               route add 192.0.2.1/32 via 203.0.113.1\nroute add default via 10.225.0.2\n";
        ip(Some(&node), &inside).await?;
        let far = "link set lo up\naddress add 10.225.0.2/16 dev ends\nlink set ends up\n\
                   route replace local 10.232.0.0/13 dev lo\nroute replace local 10.96.0.0/16 dev lo\n\
                   route replace local 198.18.0.0/15 dev lo\nroute replace default via 10.225.0.1\n";
        ip(Some(&ends), far).await?;
        let back = "route add 10.96.0.0/16 via 10.224.1.1 src 10.224.1.2\nroute add 10.232.0.0/13 via 10.224.1.1 src 10.224.1.2\n\
                    route add 198.18.0.0/15 via 203.0.113.2\n";
        ip(None, back).await
    }

    /// Where the processor time of all this is told, if a cgroup does not count it well enough.
    #[must_use]
    pub fn processor(&self) -> Option<SocketAddr> {
        self.processor
    }

    /// The node's namespace, for `nsenter`.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        self.node.path()
    }

    /// Runs `what` in the endpoints' namespace; sockets that it opens stay there.
    pub fn at_endpoints<T: Send + 'static>(
        &self,
        what: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.ends.run(what)
    }

    /// Runs `what` in the node's namespace.
    pub fn at_node<T: Send + 'static>(&self, what: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        self.node.run(what)
    }
}
