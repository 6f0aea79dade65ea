//! Mode ipvs is measured in user-mode-linux, since the kernel of the machine may have no IPVS: one kernel for each program.
//!
//! In: what is to be measured, and an API server in the network of this process. Out: what the same program, started by
//! [`inside`] in such a kernel, has measured. The API server stays outside; node, endpoints and client are inside.
//!
//! ```text
//!   this process                                user-mode-linux
//!     bench 198.51.100.1 ─────────────────────── eth0 198.51.100.2: the client, and from there as in `lab`
//!     lo  192.0.2.1 (API server)
//! ```
//! Time is measured inside. Processor time is that of the whole kernel with all that runs in it, as the host sees it: the
//! kernel inside looks a hundred times a second who runs, and most of what is measured takes less than that.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::lab::{API_ADDRESS, Lab};
use super::measure::{Effort, Run};
use super::meter::Meter;
use super::objects::{Size, Writer};
use super::program::{Flavour, Kind, Mode, Setup, measured};
use super::report::Measured;
use super::traffic;
use crate::control_plane;
use crate::network::ip;
use crate::uml::{self, Machine};

/// The device outside, and its address.
const LINK: &str = "bench";
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Where the processor time can be asked: any connection gets it, in nanoseconds.
const PROCESSOR: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(OUTSIDE), 10_112);
const MEMORY: u32 = 3072;
/// A run inside takes a few minutes.
const PATIENCE: Duration = Duration::from_mins(40);

/// `sh -c …`: its network, then the command of the words after it.
const NETWORK: &str = "set -e
ip -batch - <<END
address add 198.51.100.2/30 dev eth0
link set eth0 up
route add 192.0.2.1/32 via 198.51.100.1
END
echo 1 >/proc/sys/net/ipv4/ip_forward
";

/// What is told to the program inside, in a file of the folder that both see.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    kind: Kind,
    size: Size,
    effort: Effort,
    agent: PathBuf,
    controlplane: PathBuf,
    kubeconfig: PathBuf,
}

/// Makes the network that the kernels are joined to, once.
pub async fn prepare() -> Result<()> {
    let lines = format!(
        "link set lo up\naddress add {API_ADDRESS}/32 dev lo\ntuntap add {LINK} mode tap\n\
         address add {OUTSIDE}/30 dev {LINK}\nlink set {LINK} up\nroute add 203.0.113.0/24 via 198.51.100.2\n"
    );
    ip(None, &lines).await
}

/// Measures one program at one size, in a kernel of its own.
pub async fn measure(setup: &Setup, kind: Kind, size: Size, effort: Effort) -> Result<Measured> {
    let order = Order {
        kind,
        size,
        effort,
        agent: setup.agent.clone(),
        controlplane: setup.controlplane.clone(),
        kubeconfig: setup.kubeconfig.clone(),
    };
    let result = setup.dir.join("result.json");
    let _ = fs::remove_file(&result);
    fs::write(setup.dir.join("order.json"), serde_json::to_vec(&order)?).context("writing the order")?;
    let arguments = vec![format!("eth0=tuntap,{LINK}")];
    let machine = Machine { memory: MEMORY, shared: vec![setup.dir.clone()], arguments };
    let own = std::env::current_exe().context("the path of this program")?;
    let words = [own.into_os_string(), "--inside".into(), setup.dir.clone().into_os_string()];
    let words = machine.words(&format!("{NETWORK}{}", uml::script(&words)?)).await?;
    let meter = Meter::new(&format!("{kind}-{}-kernel", size.key()), None)?;
    let mut booted = measured(&setup.dir.join(format!("{kind}-{}-kernel.log", size.key())), &meter);
    booted.args(["setpriv", "--pdeathsig", "KILL"]).args(words);
    let status = tokio::select! {
        status = uml::run(booted, PATIENCE) => status?,
        failed = tell_processor_time(&meter) => return Err(failed),
    };
    let log =
        fs::read_to_string(setup.dir.join(format!("{kind}-{}-kernel.log", size.key()))).unwrap_or_default();
    ensure!(status == 0, "what runs in user-mode-linux has failed with {status}:\n{log}");
    let text = fs::read(&result).with_context(|| format!("reading {}", result.display()))?;
    serde_json::from_slice(&text).context("what was measured")
}

/// Tells whoever connects; never returns but with an error.
async fn tell_processor_time(meter: &Meter) -> anyhow::Error {
    let serve = async {
        let listener = TcpListener::bind(PROCESSOR).await.context("telling the processor time")?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            let used = meter.cpu()?.as_nanos().to_string();
            // Who has gone does not want to know.
            let _ = stream.write_all(used.as_bytes()).await;
        }
    };
    let outcome: Result<std::convert::Infallible> = serve.await;
    match outcome {
        Err(error) => error,
    }
}

/// Measures what the order in `dir` says, in the kernel that this process runs in.
pub async fn inside(dir: &Path) -> Result<()> {
    let order = fs::read(dir.join("order.json")).context("reading the order")?;
    let order: Order = serde_json::from_slice(&order).context("the order")?;
    let setup = Setup {
        mode: Mode::Ipvs,
        flavour: Flavour::Legacy,
        agent: order.agent,
        controlplane: order.controlplane,
        kubeconfig: order.kubeconfig,
        dir: dir.to_owned(),
    };
    let mut lab = Lab::in_machine(PROCESSOR).await?;
    traffic::serve(&lab)?;
    let client = control_plane::client(&setup.kubeconfig).await?;
    let run = Run::new(&setup, Writer::new(&client), order.kind, order.size, order.effort);
    let rows = run.measure(&mut lab).await?;
    let unfinished = dir.join("result.unfinished");
    fs::write(&unfinished, serde_json::to_vec(&rows)?)
        .and_then(|()| fs::rename(&unfinished, dir.join("result.json")))
        .context("writing what was measured")
}
