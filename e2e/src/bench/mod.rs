//! kube-proxy and Pointsman's agent, one after the other, on the same node with the same Services; and what no kube-proxy does any more,
//! [`userspace`], with [`load`].
//!
//! - [`objects`]: the Services; [`fill`], with [`etcd`]: a store that holds them; [`traffic`]: endpoints and a client that measures; [`lab`]: the network.
//! - [`machine`]: all of it in a kernel that has IPVS.
//! - [`program`]: how each is started; [`meter`]: what it uses; [`measure`]: what is done to it; [`report`]: the tables;
//!   [`page`]: where they are published.
//!
//! In: [`Options`]. Out: tables in Markdown, one for each size. A real API server holds the Services; it is filled once for each size, and
//! what its store holds is kept in the cache for the next run. Everything that is started ends with this process,
//! however that ends.

pub mod etcd;
pub mod fill;
pub mod lab;
pub mod load;
pub mod machine;
pub mod measure;
pub mod meter;
pub mod objects;
pub mod page;
pub mod program;
pub mod report;
pub mod traffic;
pub mod userspace;

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use pointsman_crds::names::{ANNOTATION_CONFIG_HASH, CONFIG_KEY, LABEL_REVISION, NODE_CONFIG_NAMESPACE};
use pointsman_crds::node_config::{config_hash, revision};
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::{NodeProxyConfiguration, ProxyNodeStatus, ProxySettings, custom_resource_definitions};
use serde_json::{Value, json};

use self::fill::Place;
use self::lab::{API_ADDRESS, Lab, NODE_ADDRESS, NODE_PODS};
use self::measure::{Effort, Run};
use self::objects::{Size, Writer};
use self::page::Section;
use self::program::{Flavour, Kind, Mode, NODE, Setup};
use crate::api_server::ApiServer;
use crate::command::{command, output};
use crate::pointsman::eventually;
use crate::progress::step;
use crate::stamp::{Inputs, cached};
use crate::{artifacts, release};

/// Where the API server and etcd listen.
const PLACE: Place = Place { api: API_ADDRESS, etcd: Ipv4Addr::LOCALHOST };

/// Said of results that are not for publishing.
const QUICK: &str = "A quick run, for comparing. ";

/// What is to be measured.
#[derive(Debug, Clone)]
pub struct Options {
    /// The mode of both programs.
    pub mode: Mode,
    /// The flavour of the iptables tools.
    pub flavour: Flavour,
    /// How many Services and endpoints, one after the other.
    pub sizes: Vec<Size>,
    /// The programs, in order.
    pub kinds: Vec<Kind>,
    /// How much is measured.
    pub effort: Effort,
    /// Where the logs of the programs are kept, if anywhere.
    pub logs: Option<PathBuf>,
    /// The page on which each table is published, if any.
    pub page: Option<PathBuf>,
}

impl Options {
    /// Where the tables belong: what was measured of one program must not replace what compares two.
    fn section(&self) -> Section {
        let tools = match self.mode {
            Mode::Iptables => format!(" {}", self.flavour.word()),
            Mode::Nftables | Mode::Ipvs => String::new(),
        };
        let only = match self.kinds[..] {
            [kind] => format!(", only {kind}"),
            _ => String::new(),
        };
        let mode = self.mode.word();
        Section { name: format!("{mode}{tools}{only}"), heading: format!("### Mode {mode}{tools}{only}") }
    }
}

/// The programs, built.
#[derive(Debug)]
pub struct Programs {
    controlplane: PathBuf,
    agent: PathBuf,
    profile: String,
}

impl Programs {
    /// Builds what is missing: before [`lab::isolate`], since builders may need the network.
    pub async fn build(kinds: &[Kind]) -> Result<Self> {
        let profile = release::profile();
        let agent = if kinds.contains(&Kind::Pointsman) {
            release::compile(release::Part::Agent, &profile).await?
        } else {
            PathBuf::new()
        };
        Ok(Self { controlplane: artifacts::controlplane().await?, agent, profile })
    }
}

/// Measures, in the network that [`lab::isolate`] has made; prints each table and publishes it.
pub async fn run(options: &Options, programs: &Programs) -> Result<()> {
    let dir = tempfile::Builder::new().prefix("bench-").tempdir().context("a temporary folder")?;
    if options.sizes.is_empty() || options.kinds.is_empty() {
        bail!("nothing to measure");
    }
    let (section, tools) = (options.section(), tools(options, programs).await?);
    println!("{}", section.heading);
    for binary in [&programs.controlplane, &programs.agent] {
        // The pages of a binary are charged to who reads them first: that is us, not the program.
        let _ = fs::read(binary);
    }
    let lab = if options.mode == Mode::Ipvs {
        machine::prepare().await?;
        None
    } else {
        let lab = Lab::new().await?;
        traffic::serve(&lab)?;
        Some(lab)
    };
    let mut lab = lab;
    for &size in &options.sizes {
        let data = dir.path().join(format!("etcd-{}", size.key()));
        let server = filled_server(programs, size, &data).await?;
        configure(&server.client(), options.mode, options.flavour, Drift::default()).await?;
        let setup = Setup {
            mode: options.mode,
            flavour: options.flavour,
            agent: programs.agent.clone(),
            controlplane: programs.controlplane.clone(),
            kubeconfig: server.kubeconfig().to_owned(),
            dir: dir.path().to_owned(),
        };
        let (machine, before) = (machine()?, load()?);
        let mut columns = Vec::new();
        for &kind in &options.kinds {
            let measured = step(&format!("{kind} at {size}"), async {
                let Some(lab) = &mut lab else {
                    return machine::measure(&setup, kind, size, options.effort).await;
                };
                Run::new(&setup, Writer::new(&server.client()), kind, size, options.effort).measure(lab).await
            })
            .await;
            keep_logs(dir.path(), options.logs.as_deref())?;
            // What has been measured is worth the time that it took.
            columns.push((kind, measured.inspect_err(|_| println!("\n{}", report::table(size, &columns)))?));
        }
        let after = load()?;
        let table = format!(
            "{machine}, load average {before} before and {after} after; {tools}\n\n{}",
            report::table(size, &columns)
        );
        println!("\n{table}");
        if let Some(page) = &options.page {
            page::rewrite(page, |old| page::with_table(old, &section, size, &table))?;
        }
        server.stop().await?;
        fs::remove_dir_all(&data).with_context(|| format!("removing {}", data.display()))?;
    }
    Ok(())
}

/// An API server that holds the Services. `data` is where etcd stores; it is copied from the cache, so that what a run
/// changes is gone with it.
async fn filled_server(programs: &Programs, size: Size, data: &Path) -> Result<ApiServer> {
    let binary = programs.controlplane.file_name().unwrap_or_default().to_string_lossy();
    let sources = [include_str!("objects.rs"), include_str!("fill.rs"), include_str!("etcd.rs")];
    let inputs = Inputs::new().word(&binary).word(&size.key()).word(&sources.concat());
    let stem = format!("bench-{}", size.key());
    let archive = cached(&format!("{stem}.tar"), inputs, async |to| {
        let fresh = data.with_extension("fresh");
        let filling = fill::fill(&programs.controlplane, PLACE, size, &fresh);
        step(&format!("a store filled with {size} (once)"), filling).await?;
        output(
            command("tar", ["--create", "--sparse", "--file"])
                .arg(to)
                .arg("--directory")
                .arg(&fresh)
                .arg("."),
        )
        .await?;
        fs::remove_dir_all(&fresh).with_context(|| format!("removing {}", fresh.display()))
    })
    .await?;
    remove_others(&archive, &format!("{stem}-"))?;
    fs::create_dir_all(data).with_context(|| format!("creating {}", data.display()))?;
    output(command("tar", ["--extract", "--file"]).arg(archive).arg("--directory").arg(data)).await?;
    let starting = ApiServer::start_at(PLACE.api, PLACE.etcd, Some(data));
    let server = step(&format!("API server with {size}"), starting).await?;
    fill::check(&server.client(), size).await?;
    Ok(server)
}

/// Removes what begins with `start` beside `archive`: stores that earlier versions of this have filled.
fn remove_others(archive: &Path, start: &str) -> Result<()> {
    for entry in fs::read_dir(archive.parent().context("the cache has a folder")?)? {
        let path = entry?.path();
        if path != archive && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start)) {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

/// Creates the Node, and what the operator would write for it: the defaults, in a mode and with a flavour.
pub async fn configure(client: &Client, mode: Mode, flavour: Flavour, drift: Drift) -> Result<()> {
    let post = PostParams::default();
    let nodes: Api<Node> = Api::all(client.clone());
    let node = json!({"metadata": {"name": NODE}, "spec": {"podCIDR": NODE_PODS, "podCIDRs": [NODE_PODS]}});
    nodes.create(&post, &serde_json::from_value(node)?).await?;
    let addresses = json!({"status": {"addresses": [
        {"type": "InternalIP", "address": NODE_ADDRESS}, {"type": "Hostname", "address": NODE},
    ]}});
    nodes.patch_status(NODE, &PatchParams::default(), &Patch::Merge(addresses)).await?;
    for (_, definition) in custom_resource_definitions().context("the definitions")? {
        let request = http::Request::post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
            .header("Content-Type", "application/json")
            .body(serde_json::to_vec(&definition)?)?;
        client.request::<Value>(request).await?;
    }
    let status = json!({
        "apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyNodeStatus",
        "metadata": {"name": NODE}, "spec": {"nodeName": NODE},
    });
    let status: ProxyNodeStatus = serde_json::from_value(status)?;
    let statuses: Api<ProxyNodeStatus> = Api::all(client.clone());
    let patience = Duration::from_secs(20);
    eventually(patience, "the definitions are served", async || Ok(statuses.create(&post, &status).await?))
        .await?;
    let namespace = json!({"metadata": {"name": NODE_CONFIG_NAMESPACE}});
    Api::<Namespace>::all(client.clone()).create(&post, &serde_json::from_value(namespace)?).await?;
    let configuration = node_configuration(mode, flavour, drift)?;
    let hash = config_hash(&configuration);
    let config_map = json!({
        "metadata": {
            "name": NODE, "labels": {LABEL_REVISION: revision("bench", &hash)},
            "annotations": {ANNOTATION_CONFIG_HASH: hash},
        },
        "data": {CONFIG_KEY: configuration},
    });
    let config_maps: Api<ConfigMap> = Api::namespaced(client.clone(), NODE_CONFIG_NAMESPACE);
    config_maps.create(&post, &serde_json::from_value(config_map)?).await.map(drop).map_err(Into::into)
}

fn node_configuration(mode: Mode, flavour: Flavour, drift: Drift) -> Result<String> {
    let mut settings = json!({"mode": mode.word()});
    if mode != Mode::Nftables {
        let backend = match flavour {
            Flavour::Nft => "NFT",
            Flavour::Legacy => "Legacy",
        };
        settings["iptables"] = json!({"backend": backend});
    }
    let settings: ProxySettings = serde_json::from_value(settings)?;
    let configuration = NodeProxyConfiguration::complete(&settings, drift)?;
    configuration.render().context("the node's configuration")
}

fn keep_logs(from: &Path, to: Option<&Path>) -> Result<()> {
    let Some(to) = to else { return Ok(()) };
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if let (Some("log"), Some(name)) = (path.extension().and_then(|it| it.to_str()), path.file_name()) {
            fs::copy(&path, to.join(name)).with_context(|| format!("keeping {}", path.display()))?;
        }
    }
    Ok(())
}

/// What the figures depend on besides the machine.
async fn tools(options: &Options, programs: &Programs) -> Result<String> {
    let iptables =
        output(&mut command(format!("iptables-{}", options.flavour.word()), ["--version"])).await?;
    let kubernetes = output(&mut command(&programs.controlplane, ["kube-proxy", "--version"])).await?;
    let Effort { connects, changes, added, idle } = options.effort;
    let place = match options.mode {
        Mode::Iptables | Mode::Nftables => "",
        Mode::Ipvs => " In user-mode-linux; processor time is that of the whole kernel and the client in it.",
    };
    Ok(format!(
        "{iptables}; kube-proxy of {kubernetes}; agent {version}, profile {profile}. {quick}{connects} connects, {changes} endpoint \
         changes, {added} Services added, {idle} s idle.{place}",
        quick = if options.effort == Effort::FULL { "" } else { QUICK },
        iptables = iptables.trim(),
        kubernetes = kubernetes.trim(),
        version = release::VERSION,
        profile = programs.profile,
        idle = idle.as_secs(),
    ))
}

/// The 1, 5 and 15 minutes' load average.
fn load() -> Result<String> {
    let load = fs::read_to_string("/proc/loadavg").context("reading the load average")?;
    Ok(load.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

/// When it was measured, and on which machine.
fn machine() -> Result<String> {
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("reading {path}"));
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':'))
            .map(|(_, value)| value.trim().to_owned())
            .unwrap_or_default()
    };
    let cpus = read("/proc/cpuinfo")?;
    let memory: u64 = field(&read("/proc/meminfo")?, "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0);
    Ok(format!(
        "{}; {} × {}, {} GiB, Linux {}",
        k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC"),
        cpus.lines().filter(|line| line.starts_with("processor")).count(),
        field(&cpus, "model name"),
        memory >> 20,
        read("/proc/sys/kernel/osrelease")?.trim(),
    ))
}
