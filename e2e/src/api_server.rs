//! A bare API server for tests of the API: etcd and kube-apiserver on a loopback address, ready in about five
//! seconds, without nodes or controllers, and without the need to be root.
//!
//! In: nothing. Out: a client and a kubeconfig. It ends with [`ApiServer::stop`], when dropped, and when the
//! process that started it dies, however that happens.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::process::{Child, ChildStdin};
use tokio::time::sleep;

use crate::artifacts;
use crate::command::{command, output_with_input, quoted};
use crate::control_plane::{self, API_PORT, ControlPlane};
use crate::pki::{Identity, Pki};

/// Runs both programs until its standard input ends, which it does when the process at the other end of the
/// pipe dies; then kills them and removes their folder.
const GUARD: &str = r#"
cd "$1" || exit 1
"$2" %ETCD% >etcd.log 2>&1 & etcd=$!
"$2" %API% >kube-apiserver.log 2>&1 & api=$!
echo "$etcd $api" >pids
read -r _
kill -9 $etcd $api 2>/dev/null
wait
cd / && rm -rf "$1"
"#;

/// A running API server.
pub struct ApiServer {
    client: kube::Client,
    kubeconfig: PathBuf,
    binary: PathBuf,
    dir: PathBuf,
    guard: Child,
    /// Closing it ends the guard and so everything else.
    lifeline: Option<ChildStdin>,
}

impl ApiServer {
    /// Starts etcd and kube-apiserver, building them first if need be, and waits until they serve.
    pub async fn start() -> Result<Self> {
        let address = free_loopback_address()?;
        Self::start_at(address, address, None).await
    }

    /// The same at `address`, with etcd at `loopback`; both belong to this network namespace. A folder `data` with
    /// what an earlier etcd has stored is used and left where it is.
    pub async fn start_at(address: Ipv4Addr, loopback: Ipv4Addr, data: Option<&Path>) -> Result<Self> {
        let binary = artifacts::controlplane().await?;
        let dir =
            tempfile::Builder::new().prefix("pointsman-api-").tempdir().context("a temporary folder")?.keep();
        let data = data.map_or_else(|| dir.join("etcd"), Path::to_owned);
        let admin = Identity::admin();
        let pki = Pki::ensure(
            &dir.join("pki"),
            IpAddr::V4(address),
            &[IpAddr::V4(address)],
            std::slice::from_ref(&admin),
        )?;
        let kubeconfig = pki.kubeconfig(&admin);
        let plane = ControlPlane {
            loopback,
            address: IpAddr::V4(address),
            service_networks: "10.96.0.0/16,fd10:96::/112".into(),
            pod_networks: String::new(),
            pki,
        };
        let words = |args: Vec<String>| args.iter().map(|a| quoted(a)).collect::<Vec<_>>().join(" ");
        let mut api = plane.api_server();
        // Loopback is refused as an advertised address, and without nodes nobody asks for one.
        api.retain(|argument| !argument.starts_with("--advertise-address="));
        api.push("--advertise-address=192.0.2.1".into());
        api.push("--endpoint-reconciler-type=none".into());
        let script = GUARD
            .replace("%ETCD%", &words(ControlPlane::etcd(loopback, &data)))
            .replace("%API%", &words(api));
        let mut guard = command("sh", ["-c", &script, "pointsman-api-server"]);
        guard.arg(&dir).arg(&binary).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A Ctrl-C at the terminal must reach us, not the guard: it cleans up once we are gone.
        guard.process_group(0);
        let mut guard = guard.spawn().context("starting the API server")?;
        let lifeline = guard.stdin.take();
        let client = control_plane::client(&kubeconfig).await?;
        let mut server = Self { client, kubeconfig, binary, dir, guard, lifeline };
        server.wait_until_ready().await?;
        Ok(server)
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let start = Instant::now();
        while !control_plane::is_ready(&self.client).await {
            if start.elapsed() > Duration::from_secs(90) || self.has_failed() {
                bail!("the API server does not get ready; the end of its log:\n{}", self.log_tail());
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Whether one of the two has ended; the guard has not asked for its status yet, so it is a zombie.
    fn has_failed(&self) -> bool {
        let pids = std::fs::read_to_string(self.dir.join("pids")).unwrap_or_default();
        pids.split_whitespace().any(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
        })
    }

    fn log_tail(&self) -> String {
        let tail = |name: &str| {
            let text = std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        format!("{}\n{}", tail("etcd.log"), tail("kube-apiserver.log"))
    }

    /// A client that may do everything.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Runs kubectl with `args` and `input` on its standard input; returns what it prints.
    pub async fn kubectl(&self, args: &[&str], input: &str) -> Result<String> {
        let mut kubectl = command(&self.binary, ["kubectl"]);
        kubectl.args(args).env("KUBECONFIG", &self.kubeconfig);
        output_with_input(&mut kubectl, input).await
    }

    /// Stops both programs and removes their data; returns when they are gone. Dropping does the same in the
    /// background.
    pub async fn stop(mut self) -> Result<()> {
        drop(self.lifeline.take());
        self.guard.wait().await.context("stopping the API server").map(drop)
    }
}

/// An address of 127.0.0.0/8 on which nobody listens, so that the fixed ports are free and parallel tests do
/// not meet.
pub fn free_loopback_address() -> Result<Ipv4Addr> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..100 {
        // Spreads (process, count) over 127.128.0.0/9; the other half is the clusters'.
        let seed = (std::process::id() << 6) + COUNT.fetch_add(1, Ordering::Relaxed);
        let address = Ipv4Addr::from_bits(0x7F80_0000 | (seed.wrapping_mul(0x9E37_79B1) >> 9).max(1));
        if [API_PORT, 2379, 2380].iter().all(|port| TcpListener::bind((address, *port)).is_ok()) {
            return Ok(address);
        }
    }
    bail!("no free loopback address for an API server: are many of them running?")
}
