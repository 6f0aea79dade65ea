//! What the loop does to the kernel, and what it makes of the outcome.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{DriftPolicy, Mode};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use super::engine::Engine;
use super::{Dataplane, Platform};
use crate::kernel::{Reach, SyncError, SyncFailure, Synced};
use crate::plan::{Changes, PortId, PortPlan};
use crate::random;
use crate::sysctl::{Ipvs, Settings};

/// Enough of the differences to know where to look.
const SHOWN_DIFFERENCES: usize = 5;

impl<P: Platform> Engine<P> {
    /// Writes what is pending.
    pub(super) async fn write(&mut self) {
        // What failed need not have been a write: with nothing to write, a success would prove nothing.
        let ask = self.state.consecutive_failures() > 0 || self.schedule.asks_first();
        if ask && !self.probe().await {
            return;
        }
        let Some(running) = self.running.as_mut() else { return };
        let mut changes = std::mem::take(&mut self.pending);
        self.outside.pulse.beat(true);
        let begun = Instant::now();
        let (synced, errors) = running.dataplane.sync(&running.plan, &changes).await;
        let took = begun.elapsed();
        self.flows.found(&synced.served);
        self.state.last_duration_milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let families = running.plan.families().to_vec();
        for family in families.iter().filter(|family| !errors.iter().any(|error| error.family == **family)) {
            self.family_written(*family, &synced, took);
        }
        if !errors.is_empty() {
            // Not consumed: a failed write may have reached the kernel in part.
            self.pending = changes;
            let failure = errors.first().map(|error| error.failure);
            for error in errors {
                self.fail(error, synced.full);
            }
            self.schedule.failed(random::fraction());
            if let Some(failure) = failure {
                self.reconsider(failure);
            }
            return;
        }
        debug!(?took, full = synced.full, rules = synced.total_rules(), "the kernel was written");
        self.must_write = false;
        self.state.rules = synced.total_rules();
        self.state.limits.clone_from(&synced.limits);
        self.outside.metrics.drained();
        if let Some(running) = &self.running {
            let endpoints = |id: &PortId, port: &PortPlan| running.dataplane.flow_endpoints(id, port);
            self.flows.follow(&running.plan, &self.model, &changes.ports, endpoints);
            let known = (!synced.full).then_some(&changes);
            self.state.localhost = self.platform.serve_localhost(&running.plan, known);
            let counted = self.state.mode == Some(Mode::Nftables) && running.plan.config().nftables.counters;
            if !counted || !self.schedule.looks() {
                // Nobody reads them any more, and a figure that stands still is taken for the truth.
                self.outside.metrics.traffic.set(&[]);
            }
        }
        self.adjust().await;
        self.end_stale_flows().await;
        self.answer_health_checks(std::mem::take(&mut changes.health_checks));
        self.report_latency(changes, &families);
        self.schedule.succeeded();
        let aimed = self.running.as_ref().map(|running| &running.candidate.hash);
        if synced.full {
            self.state.last_full = Some(Timestamp::now());
        }
        if synced.full || !self.state.verified || aimed != self.state.config.active_hash.as_ref() {
            self.read_back().await;
        }
    }

    /// Lets the kernel's settings follow the configuration. What fails is tried again with the next look.
    async fn adjust(&mut self) {
        let Some(running) = &self.running else { return };
        let config = running.plan.config();
        let ipvs =
            (self.state.mode == Some(Mode::Ipvs)).then_some(Ipvs { strict_arp: config.ipvs.strict_arp });
        let settings = Settings { conntrack: config.conntrack, ipvs };
        if self.settings.as_ref() == Some(&settings) {
            return;
        }
        let failed = self.platform.adjust(&settings).await;
        for problem in failed.iter().filter(|problem| !self.state.settings.contains(problem)) {
            warn!("a setting of the kernel is not as configured: {problem}");
        }
        self.state.settings = failed;
        self.settings = Some(settings);
    }

    /// Settings of the kernel that others have changed, in words; not those that cannot be had anyway.
    fn changed_settings(&self) -> Vec<String> {
        let Some(settings) = &self.settings else { return Vec::new() };
        let mut changed = self.platform.differing(settings);
        changed.retain(|line| !self.state.settings.iter().any(|failed| failed.starts_with(line)));
        changed
    }

    /// Ends flows whose endpoints are gone: only now, since before the rules were in, an entry would come back as it was. What
    /// fails is due again after the next write or look.
    async fn end_stale_flows(&mut self) {
        for job in self.flows.due() {
            let outcome = self.platform.end_stale_flows(&job).await;
            match &outcome {
                Ok(report) => {
                    debug!(family = ?report.family, entries = report.entries, deleted = report.deleted, took = ?report.duration, "stale flows ended");
                    self.outside.metrics.flows_ended(report);
                }
                Err(error) => warn!("flows to endpoints that are gone may go on: {error}"),
            }
            self.flows.finished(job, outcome.is_ok());
        }
    }

    fn family_written(&mut self, family: IpFamily, synced: &Synced, took: Duration) {
        let held = self.state.families.entry(family).or_default();
        if held.consecutive_failures > 0 {
            info!(?family, failures = held.consecutive_failures, "the kernel can be written again");
        }
        held.consecutive_failures = 0;
        held.last_error = None;
        held.oldest_queued = None;
        held.last_updated = Some(Timestamp::now());
        let took = synced.duration.get(&family).copied().unwrap_or(took);
        self.outside.metrics.synced(family, synced, took);
    }

    fn fail(&mut self, error: SyncError, full: bool) {
        self.outside.metrics.failed(self.state.mode, error.family, error.failure, full);
        let held = self.state.families.entry(error.family).or_default();
        held.oldest_queued.get_or_insert_with(Instant::now);
        held.consecutive_failures = held.consecutive_failures.saturating_add(1);
        // Once per message: the same failure every few seconds tells nobody more.
        if held.last_error.as_ref() != Some(&error) {
            error!(family = ?error.family, reason = %error.failure, "the kernel was not written: {}", error.message);
        }
        held.last_error = Some(error);
        self.state.verified = false;
        self.must_write = true;
    }

    fn report_latency(&mut self, changes: Changes, families: &[IpFamily]) {
        let now = Timestamp::now();
        for (service, caused) in changes.triggered {
            if let Some(took) = self.latency.record(service, caused.0, now) {
                self.outside.metrics.programmed(families, took);
            }
        }
        self.state.latency = self.latency.summary();
    }

    /// Reads back what was written, and calls the configuration active if it is there.
    async fn read_back(&mut self) {
        let Some(differences) = self.verify(Reach::Everything).await else { return };
        if !differences.is_empty() {
            warn!("read back after writing, the kernel differs: {}", show(&differences));
            if !self.repair().await {
                self.reconsider(SyncFailure::SyncFailed);
                return;
            }
        }
        self.state.verified = true;
        self.state.drift.differs = false;
        self.state.drift.error = None;
        if self.retire().await {
            self.activate().await;
        }
    }

    /// Reads the kernel. A failure counts as a failed write: nobody knows what it holds.
    async fn verify(&mut self, reach: Reach) -> Option<Vec<String>> {
        let running = self.running.as_mut()?;
        self.outside.pulse.beat(true);
        let begun = Instant::now();
        let verified = running.dataplane.verify(&running.plan, reach).await;
        self.schedule.looked(begun.elapsed());
        match verified {
            Ok(differences) => {
                self.state.drift.last_check = Some(Timestamp::now());
                Some(differences)
            }
            Err(error) => {
                self.fail(error, true);
                self.schedule.failed(random::fraction());
                None
            }
        }
    }

    /// Writes what the last look has found to differ, and looks again. Returns whether the kernel is as it should be; if not,
    /// that counts as a failed write.
    async fn repair(&mut self) -> bool {
        let Some(running) = self.running.as_mut() else { return false };
        let errors = running.dataplane.repair(&running.plan).await;
        let failed = !errors.is_empty();
        for error in errors {
            self.fail(error, false);
        }
        if !failed {
            let Some(left) = self.verify(Reach::Suspects).await else { return false };
            if left.is_empty() {
                return true;
            }
            let family = self.state.family_order.first().copied().unwrap_or(IpFamily::IPv4);
            let message = format!(
                "repaired and read back, the kernel differs again: {}; something else changes our chains at the same time",
                show(&left)
            );
            self.fail(SyncError { family, failure: SyncFailure::SyncFailed, message }, false);
        }
        self.schedule.failed(random::fraction());
        false
    }

    async fn activate(&mut self) {
        let Some(target) = self.running.as_ref().map(|running| running.candidate.clone()) else { return };
        self.trial.succeeded(&target);
        let config = &mut self.state.config;
        if config.active_hash.as_ref() == Some(&target.hash)
            && config.active.as_ref() == Some(&target.revision)
        {
            return;
        }
        info!(revision = target.revision, "the kernel holds the configuration");
        config.active = Some(target.revision.clone());
        config.active_hash = Some(target.hash.clone());
        config.last_known_good = Some(target.revision.clone());
        if let Some(checkpoint) = self.outside.checkpoint.clone() {
            let stored = tokio::task::spawn_blocking(move || checkpoint.store(&target)).await;
            match stored {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!("the configuration is not kept for the next start: {error}"),
                Err(error) => warn!("the configuration is not kept for the next start: {error}"),
            }
        }
    }

    /// Removes what earlier set-ups have written. Returns whether nothing of it is left.
    async fn retire(&mut self) -> bool {
        let Some(running) = self.running.as_mut() else { return false };
        if !running.leftovers_known {
            match self.platform.leftovers(&running.dataplane).await {
                Ok(leftovers) => {
                    running.retiring.splice(..0, leftovers);
                    running.leftovers_known = true;
                }
                Err(error) => {
                    self.fail(error, true);
                    self.schedule.failed(random::fraction());
                    return false;
                }
            }
        }
        while let Some(old) = running.retiring.pop() {
            if let Err(error) = self.platform.retire(&old, &running.dataplane).await {
                running.retiring.push(old);
                self.fail(error, true);
                self.schedule.failed(random::fraction());
                return false;
            }
        }
        self.take_over().await
    }

    /// Removes what another proxy has left. Returns whether packets meet nothing of it any more.
    async fn take_over(&mut self) -> bool {
        let Some(running) = self.running.as_mut().filter(|running| !running.taken_over) else { return true };
        match self.platform.take_over(&running.dataplane, &running.plan).await {
            Ok(done) => running.taken_over = done,
            Err(error) => {
                self.fail(error, true);
                self.schedule.failed(random::fraction());
                return false;
            }
        }
        true
    }

    /// Looks for foreign changes, and repairs them if it may.
    pub(super) async fn look(&mut self) {
        let Some(mut differences) = self.verify(Reach::Suspects).await else { return };
        if !self.state.settings.is_empty() {
            self.settings = None;
            self.adjust().await;
        }
        let settings = self.changed_settings();
        let settings_differ = !settings.is_empty();
        differences.extend(settings);
        self.end_stale_flows().await;
        if !self.state.localhost.is_empty()
            && let Some(running) = &self.running
        {
            self.state.localhost = self.platform.serve_localhost(&running.plan, Some(&Changes::default()));
        }
        self.count_packets().await;
        if differences.is_empty() {
            self.state.drift.differs = false;
            self.state.drift.error = None;
            return;
        }
        let diff = show(&differences);
        let known = self.state.drift.differs && self.state.drift.last_diff.as_ref() == Some(&diff);
        let policy = self.running.as_ref().map(|running| running.plan.config().drift.policy);
        if !known {
            warn!(?policy, "others have changed our kernel state: {diff}");
            self.state.drift.foreign_changes += 1;
        }
        self.state.drift.differs = true;
        self.state.drift.last_diff = Some(diff);
        if policy != Some(DriftPolicy::Repair) {
            return;
        }
        if settings_differ {
            self.settings = None;
            self.adjust().await;
        }
        if self.repair().await {
            self.state.drift.differs = false;
            self.state.drift.error = None;
            self.state.drift.repairs += 1;
            info!("repaired");
        } else {
            self.state.drift.error = self.state.error().map(ToString::to_string);
        }
    }

    /// Takes over what the kernel has counted, and adds up what begins anew when a rule does.
    async fn count_packets(&mut self) {
        let Some(running) = self.running.as_mut() else { return };
        if let Some(traffic) = running.dataplane.traffic().await {
            self.outside.metrics.traffic.set(&traffic);
        }
        for (family, count) in running.dataplane.invalid_dropped().await {
            let before = self.invalid_dropped.insert(family, count).unwrap_or_default();
            self.state.invalid_dropped += if count < before { count } else { count - before };
        }
    }

    /// Brings to an end what ends with the agent. Where traffic needs it, the kernel takes over before.
    pub(super) async fn stop(&mut self) {
        if let Err(error) = self.hand_over().await {
            warn!("the kernel cannot stand in, and connections are refused while no agent runs: {error}");
        }
        let dataplane = self.running.as_mut().map(|running| &mut running.dataplane);
        self.platform.stop(dataplane).await;
    }

    async fn hand_over(&mut self) -> Result<(), SyncError> {
        let Some(running) = self.running.as_mut().filter(|_| self.state.verified) else { return Ok(()) };
        let Some(mut stand_in) = self.platform.stand_in(&running.dataplane).await else { return Ok(()) };
        let (_, errors) = stand_in.sync(&running.plan, &Changes::default()).await;
        errors.into_iter().next().map_or(Ok(()), Err)?;
        let differences = stand_in.verify(&running.plan, Reach::Everything).await?;
        if !differences.is_empty() {
            let family = self.state.family_order.first().copied().unwrap_or(IpFamily::IPv4);
            let message = format!("read back, it differs: {}", show(&differences));
            return Err(SyncError { family, failure: SyncFailure::SyncFailed, message });
        }
        self.platform.retire(&running.dataplane, &stand_in).await?;
        info!("the kernel stands in while no agent runs");
        let ports = running.plan.families().iter().flat_map(|family| running.plan.ports(*family));
        let ports = ports.map(|(id, _)| id.clone()).collect();
        let endpoints = |id: &PortId, port: &PortPlan| stand_in.flow_endpoints(id, port);
        self.flows.follow(&running.plan, &self.model, &ports, endpoints);
        self.end_stale_flows().await;
        Ok(())
    }

    /// Finds out whether the kernel could be written, without writing anything. What has to wait until it can be removed is looked at
    /// then, too: foreign changes may not be looked for at all.
    pub(super) async fn probe(&mut self) -> bool {
        let Some(running) = self.running.as_mut() else { return false };
        self.outside.pulse.beat(true);
        let begun = Instant::now();
        match running.dataplane.probe(&running.plan).await {
            Ok(()) => {
                self.schedule.probed(begun.elapsed());
                let ours_is_there = self.state.verified && !self.state.drift.differs;
                !ours_is_there || self.take_over().await
            }
            Err(error) => {
                self.fail(error, false);
                self.schedule.failed(random::fraction());
                false
            }
        }
    }
}

/// The first few differences in one line.
fn show(differences: &[String]) -> String {
    let shown = differences.iter().take(SHOWN_DIFFERENCES).cloned().collect::<Vec<_>>().join("; ");
    match differences.len().saturating_sub(SHOWN_DIFFERENCES) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}
