//! What is done to a program, and what is looked at meanwhile.
//!
//! In: a node, an API server with Services, and a program to run. Out: [`Measured`]. Afterwards the API server holds what
//! it held before, and the program has ended.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tokio::task::{block_in_place, spawn_blocking};
use tokio::time::sleep;

use super::lab::{Lab, NODE_ADDRESS};
use super::meter::Meter;
use super::objects::{ENDPOINT_PORT, Numbered, PORT, Size, Writer, added_ip, plain};
use super::program::{Kind, Program, Setup};
use super::report::{Measured, Value, percentile};
use super::traffic::{Look, Seen, connect_times, until_all_answer, until_answered_by};

/// Both programs wait for a second between two writes. A change after this meets none that waits.
const APART: Duration = Duration::from_millis(1300);
/// How long a start may take; kube-proxy needs 10 minutes for 10,000 Services in mode iptables where it shares a processor.
const PATIENCE: Duration = Duration::from_mins(30);
/// How long a change may take.
const CHANGE_PATIENCE: Duration = Duration::from_mins(3);
/// How long a program is waited for to rest.
const REST: Duration = Duration::from_secs(45);
/// The same after its start: kube-proxy in mode ipvs serves before it has written its ipsets, with a process for each member.
const FIRST_REST: Duration = Duration::from_mins(15);
/// Between the changes of a series that is to be collected.
const SERIES_PACE: Duration = Duration::from_millis(50);

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effort {
    /// Connects for latency.
    pub connects: usize,
    /// Endpoint changes whose latency is measured.
    pub changes: usize,
    /// Services that are added.
    pub added: u8,
    /// How long the program is left alone; what it uses then is not scaled: a look at the kernel
    /// that comes once a minute falls into a shorter time or does not.
    pub idle: Duration,
}

impl Effort {
    /// What the published figures are from.
    pub const FULL: Self = Self { connects: 5000, changes: 50, added: 10, idle: Duration::from_mins(1) };
    /// For looking whether a change of the code made a difference.
    pub const QUICK: Self = Self { connects: 2000, changes: 10, added: 5, idle: Duration::from_secs(10) };
    /// [`Self::QUICK`] in user-mode-linux, where kube-proxy takes half a minute for a change at 3,000 Services. What a program
    /// uses when nothing happens is a question there, so a whole minute is watched.
    pub const QUICK_IN_MACHINE: Self = Self { connects: 500, changes: 3, added: 1, idle: Self::FULL.idle };
}

/// So many Services are connected to again and again.
const FEW: usize = 10;

/// One program at one size.
pub struct Run<'a> {
    /// How it is started.
    pub setup: &'a Setup,
    /// Writes Services.
    pub writer: Writer,
    /// Which program.
    pub kind: Kind,
    /// The Services that there are.
    pub size: Size,
    /// How much is measured.
    pub effort: Effort,
    /// Services whose first endpoint is replaced at the moment.
    replaced: BTreeSet<Numbered>,
    failed: usize,
    /// What is used in a second without a program.
    alone: Duration,
}

impl<'a> Run<'a> {
    /// Nothing measured yet.
    #[must_use]
    pub fn new(setup: &'a Setup, writer: Writer, kind: Kind, size: Size, effort: Effort) -> Self {
        Self {
            setup,
            writer,
            kind,
            size,
            effort,
            replaced: BTreeSet::new(),
            failed: 0,
            alone: Duration::ZERO,
        }
    }

    /// Measures all of it, on a new node.
    pub async fn measure(mut self, lab: &mut Lab) -> Result<Measured> {
        lab.renew_node().await?;
        let mut rows = Measured::default();
        let unused = self.direct_latency()?;
        self.measure_nothing(lab, &mut rows).await?;
        let state = self.setup.dir.join(format!("{}-{}", self.kind, self.size.key()));
        let program =
            self.setup.start(lab, self.kind, &format!("{}-{}-cold", self.kind, self.size.key()), &state)?;
        self.measure_running(lab, &program, &mut rows).await?;
        program.stop().await?;
        self.restart(lab, &state, &mut rows).await?;
        rows.time("connect without a Service p50", percentile(&unused, 50));
        rows.time("connect without a Service p99", percentile(&unused, 99));
        rows.add("connections lost while endpoints changed", Value::Count(self.failed));
        Ok(rows)
    }

    async fn measure_running(&mut self, lab: &Lab, program: &Program, rows: &mut Measured) -> Result<()> {
        self.cold_start(program, rows)?;
        self.settle(program, FIRST_REST).await?;
        rows.time("CPU of the cold start", program.meter().cpu()?);
        self.setup.verify(lab, self.kind).await?;
        self.latency(rows)?;
        self.endpoint_changes(program, rows).await?;
        self.added_services(program, rows).await?;
        self.series(program, rows).await?;
        self.settle(program, REST).await?;
        let cpu = program.meter().cpu()?;
        sleep(self.effort.idle).await;
        rows.time(self.idle_row(true), program.meter().since(cpu)?);
        rows.add("memory of its process", Value::Bytes(program.memory()?));
        rows.add("peak memory with children", Value::Bytes(program.meter().peak_allocated()));
        rows.add("peak memory with children and kernel", Value::Bytes(program.meter().peak_memory()?));
        Ok(())
    }

    /// The kernel in which all of it runs, where its time is counted, too.
    async fn measure_nothing(&mut self, lab: &Lab, rows: &mut Measured) -> Result<()> {
        if lab.processor().is_none() {
            return Ok(());
        }
        let meter = Meter::new(&format!("{}-{}-nothing", self.kind, self.size.key()), lab.processor())?;
        let cpu = meter.cpu()?;
        sleep(self.effort.idle).await;
        let used = meter.since(cpu)?;
        self.alone = used.div_f64(self.effort.idle.as_secs_f64());
        rows.time(self.idle_row(false), used);
        Ok(())
    }

    fn idle_row(&self, program: bool) -> &'static str {
        match (self.effort.idle == Effort::FULL.idle, program) {
            (true, true) => "CPU of an idle minute",
            (true, false) => "CPU of an idle minute without a program",
            (false, true) => "CPU of ten idle seconds",
            (false, false) => "CPU of ten idle seconds without a program",
        }
    }

    /// From nothing to answers from the last Service and from fifty spread over all.
    fn cold_start(&self, program: &Program, rows: &mut Measured) -> Result<()> {
        let count = self.size.services();
        let last = self.size.service(count - 1).frontend();
        let spread = (0..50).map(|nth| self.size.service(nth * count / 50).frontend());
        let all: Vec<SocketAddr> = std::iter::once(last).chain(spread).collect();
        let programmed = block_in_place(|| {
            until_all_answer(&all, Look::new(self.setup.mode), program.started, || program.check(PATIENCE))
        })?;
        rows.time("cold start", programmed);
        rows.time("of it after all lists", programmed.saturating_sub(program.listed()?));
        Ok(())
    }

    fn random_services(&self, count: usize) -> Vec<Numbered> {
        let mut state = 1_u64;
        (0..count)
            .map(|_| {
                // Knuth's MMIX: the same for every run.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let number = (state >> 33) % u64::from(self.size.services());
                self.size.service(u32::try_from(number).unwrap_or(0))
            })
            .collect()
    }

    /// Through the node to endpoints, while it has no rules.
    fn direct_latency(&self) -> Result<Vec<Duration>> {
        let targets: Vec<SocketAddr> = self
            .random_services(self.effort.connects)
            .into_iter()
            .map(|one| (one.some_endpoint(), ENDPOINT_PORT).into())
            .collect();
        block_in_place(|| connect_times(&targets))
    }

    fn latency(&self, rows: &mut Measured) -> Result<()> {
        let services = self.random_services(self.effort.connects);
        let cluster_ips: Vec<SocketAddr> = services.iter().map(|one| one.frontend()).collect();
        let node_ports: Vec<SocketAddr> =
            services.iter().filter_map(|one| Some((NODE_ADDRESS, one.node_port()?).into())).collect();
        // Their rules stay in the caches of the processor; those of all others have to be fetched.
        let few = cluster_ips.iter().take(FEW).cycle().take(cluster_ips.len()).copied().collect();
        for (p50, p99, targets) in [
            ("connect to a ClusterIP p50", "connect to a ClusterIP p99", cluster_ips),
            ("connect to the same ten ClusterIPs p50", "connect to the same ten ClusterIPs p99", few),
            ("connect to a NodePort p50", "connect to a NodePort p99", node_ports),
        ] {
            let times = block_in_place(|| connect_times(&targets))?;
            rows.time(p50, percentile(&times, 50));
            rows.time(p99, percentile(&times, 99));
        }
        Ok(())
    }

    /// Replaces the first endpoint of a Service, or puts it back; returns the address that is to answer.
    async fn toggle(&mut self, one: Numbered) -> Result<Ipv4Addr> {
        let address = self.next(one);
        self.writer.set_first_endpoint(one, address).await?;
        if !self.replaced.remove(&one) {
            self.replaced.insert(one);
        }
        Ok(address)
    }

    fn next(&self, one: Numbered) -> Ipv4Addr {
        if self.replaced.contains(&one) { one.endpoint(0) } else { one.new_endpoint() }
    }

    async fn toggle_and_see(&mut self, one: Numbered) -> Result<Duration> {
        let (to, wanted, since) = (one.frontend(), self.next(one), Instant::now());
        let look = Look::known(self.setup.mode);
        let looking = spawn_blocking(move || until_answered_by(to, wanted, look, since, CHANGE_PATIENCE));
        self.toggle(one).await?;
        let seen: Seen = looking.await??;
        self.failed += seen.failed;
        Ok(seen.after)
    }

    async fn endpoint_changes(&mut self, program: &Program, rows: &mut Measured) -> Result<()> {
        let cpu = program.meter().cpu()?;
        let mut times = Vec::new();
        for one in plain(self.size, self.effort.changes) {
            times.push(self.toggle_and_see(one).await?);
            sleep(APART).await;
        }
        rows.time("endpoint changed p50", percentile(&times, 50));
        rows.time("endpoint changed p99", percentile(&times, 99));
        rows.time("CPU of one endpoint change", program.meter().since(cpu)? / count(times.len()));
        Ok(())
    }

    async fn added_services(&mut self, program: &Program, rows: &mut Measured) -> Result<()> {
        let cpu = program.meter().cpu()?;
        let mut times = Vec::new();
        let look = Look::new(self.setup.mode);
        for number in 0..self.effort.added {
            let endpoint = self.size.service(0).new_endpoint();
            self.writer.add_slice(number, endpoint).await?;
            sleep(APART).await;
            let (to, since) = ((added_ip(number), PORT).into(), Instant::now());
            let looking =
                spawn_blocking(move || until_answered_by(to, endpoint, look, since, CHANGE_PATIENCE));
            self.writer.add_service(number).await?;
            // Refusals are no loss here: the Service is new.
            times.push(looking.await??.after);
            sleep(APART).await;
        }
        rows.time("Service added p50", percentile(&times, 50));
        rows.time("Service added, longest", percentile(&times, 100));
        rows.time("CPU of one Service added", program.meter().since(cpu)? / count(times.len()));
        for number in 0..self.effort.added {
            self.writer.remove(number).await?;
        }
        self.settle(program, REST).await
    }

    /// A hundred changes, twenty a second: what is collected into one write, and what it costs.
    async fn series(&mut self, program: &Program, rows: &mut Measured) -> Result<()> {
        let cpu = program.meter().cpu()?;
        let services = plain(self.size, 100);
        let (last, others) = services.split_last().context("there are Services")?;
        for one in others {
            self.toggle(*one).await?;
            sleep(SERIES_PACE).await;
        }
        rows.time("last of 100 changes in 5 s", self.toggle_and_see(*last).await?);
        self.settle(program, REST).await?;
        rows.time("CPU of 100 changes in 5 s", program.meter().since(cpu)?);
        Ok(())
    }

    /// With its rules in place and one endpoint changed while it was away.
    async fn restart(&mut self, lab: &Lab, state: &std::path::Path, rows: &mut Measured) -> Result<()> {
        let one = plain(self.size, 1)[0];
        let wanted = self.toggle(one).await?;
        sleep(Duration::from_secs(1)).await;
        let name = format!("{}-{}-warm", self.kind, self.size.key());
        let program = self.setup.start(lab, self.kind, &name, state)?;
        let (to, since, look) = (one.frontend(), program.started, Look::known(self.setup.mode));
        let looking = spawn_blocking(move || until_answered_by(to, wanted, look, since, PATIENCE));
        let seen = looking.await?.or_else(|error| program.check(Duration::ZERO).and(Err(error)))?;
        self.failed += seen.failed;
        rows.time("restart with rules in place", seen.after);
        self.settle(&program, FIRST_REST).await?;
        rows.time("CPU of that restart", program.meter().cpu()?);
        rows.add(
            "peak memory of that restart, with children and kernel",
            Value::Bytes(program.meter().peak_memory()?),
        );
        program.stop().await?;
        for one in self.replaced.clone() {
            self.toggle(one).await?;
        }
        ensure!(self.replaced.is_empty(), "every endpoint is back");
        Ok(())
    }

    /// Waits until a program has nothing to do: three seconds with less than a twentieth of a processor beside what is used without it.
    /// Not for ever: kube-proxy in mode ipvs looks at all it has made every 30 seconds, and may take longer for that.
    async fn settle(&self, program: &Program, patience: Duration) -> Result<()> {
        let rests = self.alone + Duration::from_millis(50);
        let (mut quiet, start) = (0, Instant::now());
        while quiet < 3 && start.elapsed() < patience {
            program.check(PATIENCE + Duration::from_hours(1))?;
            let before = program.meter().cpu()?;
            sleep(Duration::from_secs(1)).await;
            let used = program.meter().since(before)?;
            quiet = if used < rests { quiet + 1 } else { 0 };
        }
        Ok(())
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX).max(1)
}
