//! A day of changes in ten minutes, written by an agent to a real kernel, under traffic.
//!
//! A hundred Services change at random, 14 times a second: about as often in ten minutes as a busy cluster's do in a
//! day. `POINTSMAN_CHURN_SECONDS` says how long, `POINTSMAN_CHURN_SEED` which changes, `POINTSMAN_CHURN_MODE` in which
//! mode. No request to an endpoint that stayed may be lost, none may reach one that has gone, no write may fail, and at
//! the end the kernel must hold what a plan from scratch says, and the agent no more memory than at the beginning.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use libtest_mimic::{Arguments, Failed, Trial};
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::settings::DriftPolicy;
use pointsman_e2e::api_server::ApiServer;
use pointsman_e2e::bench::lab::{API_ADDRESS, Lab, isolate};
use pointsman_e2e::bench::objects::{NAMESPACE, PORT};
use pointsman_e2e::bench::program::{Flavour, Kind, Mode, Program, Setup};
use pointsman_e2e::bench::{configure, traffic};
use pointsman_e2e::churn::{Change, Churn, SERVICES, STEADY, cluster_ip};
use pointsman_e2e::command::{command, output};
use pointsman_e2e::network::in_netns;
use pointsman_e2e::pointsman::eventually;
use pointsman_e2e::{artifacts, release};
use serde_json::{Value, json};
use tokio::runtime::Builder;
use tokio::time::sleep;

/// Between two changes.
const PACE: Duration = Duration::from_millis(70);
/// A gone endpoint may answer for so long: the least time between two writes, a write, and a machine that is busy.
const LINGER: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_mins(1);
/// Beyond this an agent of a hundred Services has a leak.
const GROWTH: u64 = 4 << 20;

fn main() -> ExitCode {
    let trial = Trial::test("a_day_of_changes_loses_nothing_and_leaves_nothing", || {
        run().map_err(|error| Failed::from(format!("{error:#}")))
    });
    let mut arguments = Arguments::from_args();
    // In the main thread, whose namespaces are those of everything that is started.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn setting<T: std::str::FromStr>(name: &str, default: T) -> Result<T> {
    match std::env::var(name) {
        Ok(text) => text.parse().ok().with_context(|| format!("{name}={text:?} is no number")),
        Err(_) => Ok(default),
    }
}

fn run() -> Result<()> {
    let duration = Duration::from_secs(setting("POINTSMAN_CHURN_SECONDS", 600)?);
    let seed = setting("POINTSMAN_CHURN_SEED", 1)?;
    let mode = std::env::var("POINTSMAN_CHURN_MODE").unwrap_or_else(|_| "iptables".into());
    let mode = Mode::from_str(&mode, true).map_err(anyhow::Error::msg)?;
    let building = Builder::new_current_thread().enable_all().build()?;
    let agent = building.block_on(release::compile(release::Part::Agent, "dev"))?;
    let controlplane = building.block_on(artifacts::controlplane())?;
    drop(building);
    isolate()?;
    let _ = tempfile::env::override_temp_dir(Path::new("/run"));
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let mut lab = Lab::new().await?;
        traffic::serve(&lab)?;
        let dir = tempfile::tempdir()?;
        let server = ApiServer::start_at(API_ADDRESS, Ipv4Addr::LOCALHOST, None).await?;
        // Everything that the agent did not write is a fault here, so it must not be repaired in silence.
        let drift = Drift { policy: DriftPolicy::Report, interval_seconds: 10 };
        configure(&server.client(), mode, Flavour::Nft, drift).await?;
        let setup = Setup {
            mode,
            flavour: Flavour::Nft,
            agent,
            controlplane,
            kubeconfig: server.kubeconfig().to_owned(),
            dir: dir.path().to_owned(),
        };
        let test = Test {
            lab: &mut lab,
            setup: &setup,
            store: Store::new(&server.client()),
            churn: Churn::new(seed),
        };
        test.run(duration).await.with_context(|| format!("POINTSMAN_CHURN_SEED={seed}"))
    })
}

/// Puts changes into the API server.
struct Store {
    client: Client,
    services: Api<Service>,
    slices: Api<EndpointSlice>,
}

impl Store {
    fn new(client: &Client) -> Self {
        Self {
            client: client.clone(),
            services: Api::namespaced(client.clone(), NAMESPACE),
            slices: Api::namespaced(client.clone(), NAMESPACE),
        }
    }

    async fn prepare(&self) -> Result<()> {
        let namespace = serde_json::from_value(json!({"metadata": {"name": NAMESPACE}}))?;
        Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &namespace).await?;
        Ok(())
    }

    async fn apply(&self, change: &Change) -> Result<()> {
        let apply = PatchParams::apply("churn").force();
        for slice in &change.slices {
            let name = slice["metadata"]["name"].as_str().context("a slice has a name")?;
            self.slices.patch(name, &apply, &Patch::Apply(slice)).await.with_context(|| slice.to_string())?;
        }
        match &change.service {
            Ok(service) => {
                let name = service["metadata"]["name"].as_str().context("a Service has a name")?;
                let applied = self.services.patch(name, &apply, &Patch::Apply(service)).await;
                applied.with_context(|| service.to_string())?;
                if let Some(vip) = change.vip {
                    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": vip}]}}});
                    self.services.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
                }
            }
            Err(name) if self.services.get_opt(name).await?.is_some() => {
                self.services.delete(name, &DeleteParams::default()).await?;
            }
            Err(_) => {}
        }
        Ok(())
    }
}

/// When each endpoint of a steady Service stopped to be one; none while it is.
type Known = Arc<Mutex<Vec<HashMap<Ipv4Addr, Option<Instant>>>>>;

fn note(known: &Known, churn: &Churn, number: usize) -> Result<()> {
    let now = churn.may_answer(number);
    let mut known = known.lock().map_err(|_| anyhow::anyhow!("the prober has panicked"))?;
    for (address, gone) in &mut known[number] {
        if !now.contains(address) {
            gone.get_or_insert_with(Instant::now);
        }
    }
    known[number].extend(now.into_iter().map(|address| (address, None)));
    Ok(())
}

/// Asks the steady Services in turn until told to stop; returns the number of requests, or what was wrong.
fn probe(known: &Known, stop: &AtomicBool) -> Result<usize> {
    let mut requests = 0;
    while !stop.load(Ordering::Relaxed) {
        let number = requests % STEADY;
        let to = SocketAddr::from((cluster_ip(number), PORT));
        let asked = Instant::now();
        let Some(answer) = traffic::ask(to, Duration::from_secs(3))? else {
            bail!("request {requests} to {to} was lost");
        };
        requests += 1;
        let known = known.lock().map_err(|_| anyhow::anyhow!("the writer has panicked"))?;
        match known[number].get(&answer) {
            Some(None) => {}
            Some(Some(gone)) if asked.saturating_duration_since(*gone) < LINGER => {}
            Some(Some(gone)) => bail!("{answer} answered at {to}, {:?} after it had gone", gone.elapsed()),
            None => bail!("{answer} answered at {to}, and never was its endpoint"),
        }
        drop(known);
        std::thread::park_timeout(Duration::from_millis(2));
    }
    Ok(requests)
}

struct Test<'a> {
    lab: &'a mut Lab,
    setup: &'a Setup,
    store: Store,
    churn: Churn,
}

impl Test<'_> {
    async fn run(mut self, duration: Duration) -> Result<()> {
        self.store.prepare().await?;
        for change in self.churn.all() {
            self.store.apply(&change).await?;
        }
        let state = self.setup.dir.join("state");
        let agent = self.setup.start(self.lab, Kind::Pointsman, "agent", &state)?;
        self.settled(&agent, &state).await?;

        let known: Known = Arc::new(Mutex::new(vec![HashMap::new(); STEADY]));
        for number in 0..STEADY {
            note(&known, &self.churn, number)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let probing = {
            let (known, stop) = (Arc::clone(&known), Arc::clone(&stop));
            tokio::task::spawn_blocking(move || probe(&known, &stop))
        };
        let (begun, mut changes, mut early) = (Instant::now(), 0_usize, None);
        while begun.elapsed() < duration && !probing.is_finished() {
            let change = self.churn.step();
            if change.number < STEADY {
                note(&known, &self.churn, change.number)?;
            }
            self.store.apply(&change).await?;
            changes += 1;
            if early.is_none() && begun.elapsed() > duration / 4 {
                early = Some(agent.memory()?);
            }
            sleep(PACE).await;
        }
        // So long may a gone endpoint answer; the prober sees the last ones go.
        sleep(LINGER).await;
        stop.store(true, Ordering::Relaxed);
        let requests = probing.await??;
        self.settled(&agent, &state).await?;
        let (early, late) = (early.context("no time passed")?, agent.memory()?);
        eprintln!(
            "  {changes} changes, {requests} requests, none lost; memory {} KiB after a quarter, {} KiB at the end",
            early >> 10,
            late >> 10
        );
        ensure!(requests > 100 && changes > 100, "that is too few to say anything");
        ensure!(late < early + GROWTH, "the agent's memory grew from {early} to {late} bytes");
        let rules = self.rules().await?;
        let held = self.metric("pointsman_services")?;
        agent.stop().await?;

        // A successor makes its plan from scratch and reads the kernel back: it finds nothing to do.
        let agent = self.setup.start(self.lab, Kind::Pointsman, "successor", &state)?;
        self.settled(&agent, &state).await?;
        let fresh = self.metric("pointsman_services")?;
        ensure!(held == fresh, "the agent held {held} Services, its successor {fresh}");
        let after = self.rules().await?;
        let lost: Vec<&String> = rules.iter().filter(|rule| !after.contains(rule)).collect();
        let new: Vec<&String> = after.iter().filter(|rule| !rules.contains(rule)).collect();
        ensure!(lost.is_empty() && new.is_empty(), "a plan from scratch removes {lost:#?} and adds {new:#?}");
        agent.stop().await
    }

    /// Waits until the agent has written everything and has looked at the kernel since; fails on any failure that it
    /// tells of.
    async fn settled(&self, agent: &Program, state: &Path) -> Result<()> {
        let asked = k8s_openapi::jiff::Timestamp::now();
        let ready = eventually(PATIENCE, "written, and read back", async || {
            let state = self.state(state).await?;
            let looked = state["drift"]["lastCheck"].as_str().and_then(|text| text.parse().ok());
            ensure!(state["ready"] == true && state["verified"] == true, "{state}");
            ensure!(looked.is_some_and(|looked: k8s_openapi::jiff::Timestamp| looked > asked), "{state}");
            Ok(state)
        })
        .await;
        let found = match ready {
            Ok(found) => found,
            Err(error) => {
                agent.check(Duration::ZERO).with_context(|| format!("{error:#}"))?;
                return Err(error);
            }
        };
        ensure!(found["drift"]["foreignChanges"] == 0 && found["drift"]["differs"] == false, "{found}");
        ensure!(found["consecutiveFailures"] == 0, "{found}");
        let metrics = self.metrics()?;
        let failed: Vec<&str> = metrics
            .lines()
            .filter(|line| line.contains("_failures_total{") && !line.ends_with(" 0"))
            .collect();
        ensure!(failed.is_empty(), "writes have failed: {failed:#?}");
        Ok(())
    }

    async fn state(&self, state: &Path) -> Result<Value> {
        let mut probe = command(&self.setup.agent, ["probe", "state", "--run-dir"]);
        let text = output(probe.arg(state)).await?;
        serde_json::from_str(&text).with_context(|| format!("not a state: {text}"))
    }

    fn metrics(&self) -> Result<String> {
        self.lab.at_node(|| {
            let mut stream = TcpStream::connect(("127.0.0.1", 10249)).context("connecting to the metrics")?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    }

    fn metric(&self, name: &str) -> Result<String> {
        let metrics = self.metrics()?;
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(str::to_owned).with_context(|| format!("there is no metric {name}"))
    }

    /// Chains and rules in the node's kernel, of all tables of both families; in mode nftables, whatever our tables hold.
    async fn rules(&self) -> Result<Vec<String>> {
        let mut rules = Vec::new();
        if self.setup.mode == Mode::Nftables {
            for family in ["ip", "ip6"] {
                let list = ["-s", "-n", "list", "table", family, "pointsman"];
                let text = output(in_netns(&self.lab.node(), "nft").args(list)).await?;
                rules.extend(listed(&text).into_iter().map(|line| format!("{family}: {line}")));
            }
            ensure!(rules.len() > SERVICES, "that is no table: {rules:#?}");
            rules.sort();
            return Ok(rules);
        }
        for tool in ["iptables-nft-save", "ip6tables-nft-save"] {
            let text = output(&mut in_netns(&self.lab.node(), tool)).await?;
            rules.extend(text.lines().filter_map(comparable).map(|line| format!("{tool}: {line}")));
        }
        rules.sort();
        Ok(rules)
    }
}

/// The lines of a table, and each element of a set or a map with its name. What packets have added is left out.
fn listed(table: &str) -> Vec<String> {
    let (mut lines, mut set) = (Vec::new(), "");
    let mut in_elements = false;
    for line in table.lines().map(str::trim) {
        let is_set = |kind: &&str| line.starts_with(*kind) && line.ends_with('{');
        if let Some(kind) = ["set ", "map "].iter().find(|kind| is_set(kind)) {
            set = line[kind.len()..].trim_end_matches([' ', '{']);
        }
        let begins = line.starts_with("elements = {");
        if !in_elements && !begins {
            lines.push(line.to_owned());
            continue;
        }
        let elements = line.trim_start_matches("elements = {").trim_end_matches('}');
        let ours = elements
            .split(", ")
            .map(|one| one.trim().trim_end_matches(','))
            .filter(|one| !one.is_empty() && !one.contains(" expires "));
        lines.extend(ours.map(|one| format!("{set}: {one}")));
        in_elements = !line.ends_with('}');
    }
    lines
}

/// A chain or a rule as it is whatever happened before. The trees are not: a block that was split stays so for a while
/// when Services go. Whether they are whole, the agent has found out by reading them back.
fn comparable(line: &str) -> Option<String> {
    let tree = ["KUBE-IP-", "KUBE-NP-"];
    let mut words: Vec<&str> = line.split(' ').collect();
    match line.chars().next()? {
        // Counters follow.
        ':' => words.truncate(1),
        '-' => {}
        _ => return None,
    }
    let leads_into_a_tree = words.len() > 2 && tree.iter().any(|of| words[words.len() - 1].starts_with(of));
    let is_block = tree.iter().any(|of| words[0][1..].starts_with(of));
    if leads_into_a_tree || is_block {
        return None;
    }
    if words.len() > 1 && tree.iter().any(|of| words[1].starts_with(of))
        || words.get(1) == Some(&"KUBE-NODEPORTS")
    {
        words[1] = "(a tree)";
    }
    Some(words.join(" "))
}
