//! An etcd without an API server, for writing many objects at once.
//!
//! In: a folder with what an etcd has stored. Out: the same folder with more in it. Values are what an API server stores; it
//! reads JSON as well as its own encoding.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use kube::{Client, Config};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::process::Child;

use crate::command::command;
use crate::control_plane::ControlPlane;
use crate::pointsman::eventually;

/// How long it may take to start.
const START: Duration = Duration::from_secs(30);

/// A running etcd; it ends with [`Etcd::stop`], when dropped, and with this process.
pub struct Etcd {
    child: Child,
    client: Client,
    log: PathBuf,
}

impl Etcd {
    /// Starts the etcd of the binary of all components on the folder `data`, at `loopback`.
    pub async fn start(binary: &Path, loopback: Ipv4Addr, data: &Path) -> Result<Self> {
        let log = data.with_extension("log");
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let mut etcd = command("setpriv", ["--pdeathsig", "KILL"]);
        etcd.arg(binary).args(ControlPlane::etcd(loopback, data)).kill_on_drop(true);
        let child = etcd.stdout(file.try_clone()?).stderr(file).spawn().context("starting etcd")?;
        let client = Client::try_from(Config::new(ControlPlane::etcd_url(loopback).parse()?))?;
        let etcd = Self { child, client, log };
        let answers = eventually(START, "etcd answers", async || etcd.holds("/").await).await;
        answers.with_context(|| fs::read_to_string(&etcd.log).unwrap_or_default())?;
        Ok(etcd)
    }

    /// Whether there is this key.
    pub async fn holds(&self, key: &str) -> Result<bool> {
        let answer = self.ask("range", &json!({"key": bytes(key), "count_only": true})).await?;
        // A count of zero is left out.
        Ok(answer["count"].is_string())
    }

    /// Stores these objects at these keys, at most 128 of them.
    pub async fn put(&self, objects: &[(String, Value)]) -> Result<()> {
        let puts: Vec<Value> = (objects.iter())
            .map(|(key, object)| json!({"request_put": {"key": bytes(key), "value": bytes(&object.to_string())}}))
            .collect();
        self.ask("txn", &json!({"success": puts})).await.map(drop)
    }

    async fn ask(&self, what: &str, question: &Value) -> Result<Value> {
        let request = http::Request::post(format!("/v3/kv/{what}")).body(serde_json::to_vec(question)?)?;
        self.client.request(request).await.with_context(|| format!("asking etcd for a {what}"))
    }

    /// Ends it, once all is in its files.
    pub async fn stop(mut self) -> Result<()> {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok()).context("etcd has ended")?;
        kill(Pid::from_raw(pid), Signal::SIGTERM).context("stopping etcd")?;
        self.child.wait().await.context("stopping etcd")?;
        fs::remove_file(&self.log).context("removing the log of etcd")
    }
}

/// Keys and values are bytes, which JSON has in Base64.
fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}
