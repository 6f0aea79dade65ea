//! Asking a Service, from anywhere in the cluster, and counting what comes back.
//!
//! In: a place, a target such as `http://10.240.0.10:80/`, `tcp://…` or `udp://…`, and flags of the test
//! server's prober. Out: how many requests were answered, by which pods, with which source addresses, and how
//! the others failed.

use std::collections::BTreeMap;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use tokio::process::{Child, Command};

use crate::artifacts;
use crate::cluster::Cluster;
use crate::command::output;

/// Where a request comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A pod of the test server's image.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// A process on the node of this name.
    Node(String),
    /// A machine outside the nodes.
    Outside,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pod { name, .. } => write!(f, "pod {name}"),
            Self::Node(node) => f.write_str(node),
            Self::Outside => f.write_str("outside"),
        }
    }
}

/// What a series of requests met.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Requests sent.
    pub requests: u32,
    /// Requests without a right answer.
    pub failed: u32,
    /// Answers by pod.
    pub pods: BTreeMap<String, u32>,
    /// Answers by the source address that the pod saw.
    pub clients: BTreeMap<String, u32>,
    /// Failures by reason.
    pub errors: BTreeMap<String, u32>,
    /// The longest time without an answer.
    pub longest_gap_ms: u64,
    /// When the first request that failed was sent.
    pub first_failure: Option<String>,
}

impl Summary {
    fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).with_context(|| format!("not the summary of a prober: {text:?}"))
    }
}

impl Cluster {
    /// Sends `count` requests to `target`, each over a new connection.
    pub async fn probe(&self, from: &Place, target: &str, count: u32) -> Result<Summary> {
        let count = count.to_string();
        let words = ["probe", "-count", &count, "-interval", "1ms", "-timeout", "2s", target];
        let text = if let Place::Pod { namespace, name } = from {
            let mut inside = vec!["testserver"];
            inside.extend(words);
            self.in_pod(namespace, name, &inside).await
        } else {
            let prober = artifacts::testserver().await?;
            let mut outside = vec![prober.to_str().context("the cache's path is not UTF-8")?];
            outside.extend(words);
            output(&mut self.at(from, &outside).await?).await
        };
        Summary::parse(&text.with_context(|| format!("{from} to {target}"))?)
    }

    /// Starts a prober that goes on until [`RunningProbe::finish`], an hour at most. It does not pass through the
    /// API server or containerd, so these may be killed meanwhile; names of Services are not resolved. `flags`
    /// are the prober's: `-stream` sends all requests over one connection.
    pub async fn start_probe(&self, from: &Place, target: &str, flags: &[&str]) -> Result<RunningProbe> {
        let prober = artifacts::testserver().await?;
        let prober = prober.to_str().context("the cache's path is not UTF-8")?;
        let mut words = vec![prober, "probe", "-duration", "1h"];
        words.extend(flags);
        words.push(target);
        let mut command = self.at(from, &words).await?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        let child = command.spawn().with_context(|| format!("starting a prober at {from}"))?;
        Ok(RunningProbe { child })
    }

    /// A command that runs `words`, programs of this machine, at a place: for a pod, in its network namespace.
    pub async fn at(&self, place: &Place, words: &[&str]) -> Result<Command> {
        match place {
            Place::Node(node) => Ok(self.node(node)?.command(words)),
            Place::Outside => Ok(self.outside_command(words)),
            Place::Pod { namespace, name } => {
                let (node, pid) = self.pod_process(namespace, name).await?;
                let net = format!("--net=/proc/{pid}/ns/net");
                let mut enter = vec!["nsenter", &net, "--"];
                enter.extend(words);
                Ok(self.node(&node)?.command(&enter))
            }
        }
    }

    /// The number of the process of a pod's first container.
    pub async fn pod_pid(&self, namespace: &str, name: &str) -> Result<i32> {
        self.pod_process(namespace, name).await.map(|(_, pid)| pid)
    }

    /// The node of a pod, and the number of the process of its first container there.
    async fn pod_process(&self, namespace: &str, name: &str) -> Result<(String, i32)> {
        let pod = Api::<Pod>::namespaced(self.client(), namespace).get(name).await?;
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let node = node.with_context(|| format!("the pod {name} is on no node"))?;
        let status = pod.status.unwrap_or_default();
        let mut containers = status.container_statuses.unwrap_or_default().into_iter();
        let id = containers.next().and_then(|container| container.container_id);
        let id = id.with_context(|| format!("the pod {name} does not run"))?;
        let id = id.trim_start_matches("containerd://");
        let tasks = self.node(&node)?.ctr(&["tasks", "list"]).await?;
        let task =
            tasks.lines().find(|line| line.starts_with(id)).and_then(|line| line.split_whitespace().nth(1));
        let pid = task.and_then(|pid| pid.parse().ok());
        Ok((node, pid.with_context(|| format!("containerd runs no container {id}"))?))
    }
}

/// A prober at work. Dropping it ends it.
#[derive(Debug)]
pub struct RunningProbe {
    child: Child,
}

impl RunningProbe {
    /// Ends it and returns what it met.
    pub async fn finish(self) -> Result<Summary> {
        let pid = self.child.id().context("the prober has ended before its time")?;
        kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM).context("ending the prober")?;
        let output = self.child.wait_with_output().await?;
        ensure!(output.status.success(), "the prober failed: {}", output.status);
        Summary::parse(&String::from_utf8_lossy(&output.stdout))
    }
}
