//! `hack/bench userspace`: the agent's proxy beside HAProxy in TCP mode and beside no proxy at all.
//!
//! In: [`Options`]. Out: a table in Markdown. No API server: the agent's data plane is run by an example of its crate, as the agent runs
//! it but with a plan of one Service. HAProxy listens at the node's address, and one rule leads the same ClusterIP to it.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::process::Child;
use tokio::task::block_in_place;

use super::QUICK;
use super::lab::{Lab, NODE_ADDRESS};
use super::load::{self, Kind, Seen};
use super::meter::Meter;
use super::objects::{ENDPOINT_PORT, PORT};
use super::page;
use super::program::{AGENT_ENVIRONMENT, launch};
use super::report::{Column, Measured, Value, comparison, percentile};
use crate::command::{command, output, output_with_input};
use crate::network::in_netns;
use crate::progress::step;
use crate::release;

const ENDPOINTS: [Ipv4Addr; 3] =
    [Ipv4Addr::new(10, 232, 0, 1), Ipv4Addr::new(10, 232, 0, 2), Ipv4Addr::new(10, 232, 0, 3)];
const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 80);
/// How long a proxy may take to serve.
const START: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(20);
/// Clients that work at the same time.
const MANY: usize = 8;
/// Connections that are kept open while memory is looked at.
const OPEN: usize = 1000;

/// What is to be measured.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long each kind of load lasts.
    pub during: Duration,
    /// How often everything is measured; the table has the medians.
    pub rounds: usize,
    /// Where the logs are kept, if anywhere.
    pub logs: Option<PathBuf>,
    /// The page on which the table is published, if any.
    pub page: Option<PathBuf>,
}

impl Options {
    /// What the published figures are from.
    pub const FULL: Self = Self { during: Duration::from_secs(3), rounds: 5, logs: None, page: None };
    /// For looking whether a change of the code made a difference.
    pub const QUICK: Self = Self { during: Duration::from_secs(1), rounds: 3, logs: None, page: None };
}

/// Who carries the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    HaProxy(usize),
    Pointsman(usize),
}

const WAYS: [Way; 5] = [Way::Direct, Way::HaProxy(1), Way::Pointsman(1), Way::HaProxy(2), Way::Pointsman(2)];

impl Way {
    fn column(self) -> Column {
        let threads = |count| if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") };
        match self {
            Self::Direct => Column { name: "no proxy".to_owned(), compared: false },
            Self::HaProxy(count) => Column { name: format!("HAProxy, {}", threads(count)), compared: false },
            Self::Pointsman(count) => {
                Column { name: format!("Pointsman, {}", threads(count)), compared: true }
            }
        }
    }

    /// Where clients ask.
    fn address(self) -> SocketAddr {
        match self {
            Self::Direct => (ENDPOINTS[0], ENDPOINT_PORT).into(),
            Self::HaProxy(_) | Self::Pointsman(_) => (CLUSTER_IP, PORT).into(),
        }
    }

    fn words(self, binary: &Path, dir: &Path) -> Result<Option<Vec<String>>> {
        let endpoints = ENDPOINTS.map(|address| format!("{address}:{ENDPOINT_PORT}"));
        Ok(match self {
            Self::Direct => None,
            Self::HaProxy(threads) => {
                let path = dir.join("haproxy.cfg");
                crate::files::write(&path, &haproxy(threads, &endpoints))?;
                Some(vec!["haproxy".into(), "-db".into(), "-f".into(), path.display().to_string()])
            }
            Self::Pointsman(threads) => {
                let mut words = vec!["env".into(), AGENT_ENVIRONMENT.into(), binary.display().to_string()];
                words.extend([threads.to_string(), NODE_ADDRESS.to_string(), self.address().to_string()]);
                words.extend(endpoints);
                Some(words)
            }
        })
    }
}

/// As its manual advises for passing TCP on, with splice, which the agent uses too.
fn haproxy(threads: usize, endpoints: &[String]) -> String {
    let servers = endpoints.iter().enumerate();
    let servers: Vec<_> =
        servers.map(|(number, endpoint)| format!("  server s{number} {endpoint}\n")).collect();
    let servers = servers.concat();
    format!(
        "global\n  nbthread {threads}\n  maxconn 4000\ndefaults\n  mode tcp\n  option splice-auto\n  timeout connect 2s\n  \
         timeout client 1h\n  timeout server 1h\nlisten web\n  bind {NODE_ADDRESS}:{PORT}\n  balance roundrobin\n{servers}"
    )
}

/// What leads a ClusterIP to HAProxy.
fn rules() -> String {
    format!(
        "table ip service {{ chain nat {{ type nat hook prerouting priority dstnat; ip daddr {CLUSTER_IP} tcp dport {PORT} \
         dnat to {NODE_ADDRESS}:{PORT}; }}; }}"
    )
}

/// Builds the data plane that is measured: before [`super::lab::isolate`], since builders may need the network.
pub async fn build() -> Result<PathBuf> {
    release::compile_target("pointsman-agent", "--example", "userspace", &release::profile()).await
}

/// Measures, in the network that [`super::lab::isolate`] has made; prints a table and publishes it.
pub async fn run(options: &Options, binary: &Path) -> Result<()> {
    let dir = tempfile::Builder::new().prefix("bench-").tempdir().context("a temporary folder")?;
    let (machine, before, tools) = (super::machine()?, super::load()?, tools(options).await?);
    // The pages of a binary are charged to who reads them first.
    let _ = fs::read(binary);
    let mut lab = Lab::new().await?;
    load::serve(&lab)?;
    let mut rounds: Vec<Vec<Measured>> = vec![Vec::new(); WAYS.len()];
    for round in 1..=options.rounds {
        // Whoever begins has no advantage.
        for index in 0..WAYS.len() {
            let index = (index + round) % WAYS.len();
            let way = WAYS[index];
            let name = format!("{way:?}-{round}").replace(['(', ')'], "-");
            let measured = async {
                let proxy = Proxy::start(&mut lab, way, &name, binary, dir.path()).await?;
                let measured = block_in_place(|| measure(way, options.during, &proxy));
                proxy.stop(measured).await
            };
            let measured = step(&format!("{}, round {round}", way.column().name), measured).await;
            super::keep_logs(dir.path(), options.logs.as_deref())?;
            rounds[index].push(measured?);
        }
    }
    let columns: Vec<(Column, Measured)> =
        WAYS.iter().zip(rounds).map(|(way, rounds)| (way.column(), Measured::median(&rounds))).collect();
    let report = format!(
        "### Mode userspace\n\n{machine}, load average {before} before and {} after; {tools}\n\n{}",
        super::load()?,
        comparison("", &columns)
    );
    println!("{report}");
    let Some(page) = &options.page else { return Ok(()) };
    page::rewrite(page, |old| page::with_section(old, "userspace", &report))
}

/// A proxy that serves; or none.
struct Proxy(Option<(Child, Meter, PathBuf)>);

impl Proxy {
    /// On a node that is new.
    async fn start(lab: &mut Lab, way: Way, name: &str, binary: &Path, dir: &Path) -> Result<Self> {
        lab.renew_node().await?;
        lab.at_node(|| {
            // Connections are made faster than the kernel forgets them; HAProxy and the agent choose among as many ports.
            fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535").context("a range of ports")
        })?;
        let Some(words) = way.words(binary, dir)? else { return Ok(Self(None)) };
        if matches!(way, Way::HaProxy(_)) {
            output_with_input(in_netns(&lab.node(), "nft").args(["-f", "-"]), &rules()).await?;
        }
        let (meter, log) = (Meter::new(name, None)?, dir.join(format!("{name}.log")));
        let child = launch(lab, &meter, &log, words).spawn().with_context(|| format!("starting {way:?}"))?;
        let mut proxy = Self(Some((child, meter, log)));
        let begun = Instant::now();
        while let Err(error) = block_in_place(|| load::once(way.address())) {
            proxy.check()?;
            if begun.elapsed() > START {
                return proxy.stop(Err(error).context("it does not serve")).await;
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(proxy)
    }

    fn check(&mut self) -> Result<()> {
        if let Some((child, _, log)) = &mut self.0
            && let Some(status) = child.try_wait()?
        {
            bail!("it has ended ({status}): {}", fs::read_to_string(log).unwrap_or_default());
        }
        Ok(())
    }

    fn cpu(&self) -> Result<Duration> {
        self.0.as_ref().map_or(Ok(Duration::ZERO), |(_, meter, _)| meter.cpu())
    }

    /// What its process has allocated.
    fn memory(&self) -> Result<Option<u64>> {
        let Some((child, ..)) = &self.0 else { return Ok(None) };
        super::program::allocated(child.id().context("it has ended")?).map(Some)
    }

    /// Ends it, and adds its log to an error.
    async fn stop<T>(self, outcome: Result<T>) -> Result<T> {
        let Some((mut child, _meter, log)) = self.0 else { return outcome };
        child.kill().await.context("ending a proxy")?;
        outcome.with_context(|| format!("its log:\n{}", fs::read_to_string(log).unwrap_or_default()))
    }
}

fn measure(way: Way, during: Duration, proxy: &Proxy) -> Result<Measured> {
    let to = way.address();
    let mut measured = Measured::default();
    let ask = |kind, clients| -> Result<(Seen, Duration)> {
        let before = proxy.cpu()?;
        let seen = load::ask(to, kind, clients, during)?;
        Ok((seen, proxy.cpu()?.saturating_sub(before)))
    };
    let used = |measured: &mut Measured, what, cpu: Duration, parts: f64| {
        if way != Way::Direct {
            measured.time(what, cpu.div_f64(parts.max(f64::EPSILON)));
        }
    };
    let (alone, _) = ask(Kind::Once, 1)?;
    measured.time("new connection, one client, p50", percentile(&alone.times, 50));
    measured.time("new connection, one client, p99", percentile(&alone.times, 99));
    let (many, cpu) = ask(Kind::Once, MANY)?;
    measured.add("new connections per second, 8 clients", many.rate());
    measured.time("new connection, 8 clients, p99", percentile(&many.times, 99));
    used(&mut measured, "CPU of a connection", cpu, count(many.times.len()));
    let (alone, _) = ask(Kind::Often, 1)?;
    measured.time("request, one client, p50", percentile(&alone.times, 50));
    measured.time("request, one client, p99", percentile(&alone.times, 99));
    let (many, cpu) = ask(Kind::Often, MANY)?;
    measured.add("requests per second, 8 clients", many.rate());
    measured.time("request, 8 clients, p99", percentile(&many.times, 99));
    used(&mut measured, "CPU of a request", cpu, count(many.times.len()));
    let (one, cpu) = ask(Kind::Bulk, 1)?;
    measured.add("throughput of one connection", one.throughput());
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    used(&mut measured, "CPU of a GiB", cpu, one.bytes as f64 / f64::from(1 << 30));
    let (many, _) = ask(Kind::Bulk, MANY)?;
    measured.add("throughput of 8 connections", many.throughput());
    let open = (0..OPEN).map(|_| load::connect(to, Kind::Often)).collect::<std::io::Result<Vec<_>>>();
    let open = open.context("a thousand connections")?;
    if let Some(memory) = proxy.memory()? {
        measured.add("memory with 1,000 connections", Value::Bytes(memory));
    }
    drop(open);
    Ok(measured)
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn count(number: usize) -> f64 {
    number as f64
}

async fn tools(options: &Options) -> Result<String> {
    let version = output(&mut command("haproxy", ["-v"])).await?;
    let version = version.split_whitespace().nth(2).unwrap_or_default().to_owned();
    let quick = if options.during == Options::QUICK.during { QUICK } else { "" };
    Ok(format!(
        "HAProxy {version}; agent {}, profile {}. {quick}{} rounds of {} s for each load; medians.",
        release::VERSION,
        release::profile(),
        options.rounds,
        options.during.as_secs(),
    ))
}
