//! The names of the metrics.

use super::Metrics;

impl Metrics {
    /// kube-proxy's names. The library appends `_total` to counters, so they are registered without it; the gauges whose name
    /// ends in `_total` are kube-proxy's own choice.
    pub(super) fn register_proxy(&mut self) {
        let to = self.registry.sub_registry_with_prefix("kubeproxy");
        to.register(
            "sync_proxy_rules_duration_seconds",
            "Duration of one write to the kernel",
            self.sync_duration.clone(),
        );
        to.register(
            "sync_full_proxy_rules_duration_seconds",
            "Duration of one write of everything",
            self.full_duration.clone(),
        );
        to.register(
            "sync_partial_proxy_rules_duration_seconds",
            "Duration of one write of what changed",
            self.partial_duration.clone(),
        );
        to.register(
            "network_programming_duration_seconds",
            "Time from a change of endpoints in the API to the kernel",
            self.programming.clone(),
        );
        to.register(
            "conntrack_reconciler_sync_duration_seconds",
            "Duration of one run over the connection tracking entries",
            self.flows_duration.clone(),
        );
        to.register(
            "conntrack_reconciler_deleted_entries",
            "Connection tracking entries deleted because their endpoints are gone",
            self.flows_deleted.clone(),
        );
        to.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When the last write succeeded",
            self.last_sync.clone(),
        );
        to.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "When the last change was queued",
            self.last_queued.clone(),
        );
        to.register(
            "sync_proxy_rules_service_changes_pending",
            "Service changes that are not in the kernel yet",
            self.service_pending.clone(),
        );
        to.register("sync_proxy_rules_service_changes", "Service changes seen", self.service_changes.clone());
        to.register(
            "sync_proxy_rules_endpoint_changes_pending",
            "EndpointSlice changes that are not in the kernel yet",
            self.endpoint_pending.clone(),
        );
        to.register(
            "sync_proxy_rules_endpoint_changes",
            "EndpointSlice changes seen",
            self.endpoint_changes.clone(),
        );
        to.register("proxy_healthz", "Answers on /healthz", self.healthz.clone());
        to.register("proxy_livez", "Answers on /livez", self.livez.clone());
        to.register(
            "sync_proxy_rules_iptables_restore_failures",
            "Failed iptables-restore runs",
            self.restore_failures.clone(),
        );
        to.register(
            "sync_proxy_rules_iptables_partial_restore_failures",
            "Failed iptables-restore runs that held only what changed",
            self.partial_failures.clone(),
        );
        to.register(
            "sync_proxy_rules_nftables_sync_failures",
            "Failed nftables transactions",
            self.nft_failures.clone(),
        );
        to.register(
            "iptables_ct_state_invalid_dropped_packets",
            "Packets dropped because connection tracking calls them invalid",
            self.invalid_dropped.clone(),
        );
        to.register(
            "sync_proxy_rules_no_local_endpoints_total",
            "Service ports with policy Local that have endpoints on other nodes only",
            self.no_local.clone(),
        );
        to.register(
            "sync_proxy_rules_iptables_total",
            "iptables rules, or elements of nftables sets and maps, that we hold",
            self.rules.clone(),
        );
        to.register(
            "sync_proxy_rules_iptables_last",
            "iptables rules, or elements of nftables sets and maps, in the last write",
            self.rules_written.clone(),
        );
    }

    /// Our own.
    pub(super) fn register_own(&mut self) {
        let to = self.registry.sub_registry_with_prefix("pointsman");
        to.register("sync_failures", "Failed writes to the kernel, by reason", self.failures.clone());
        to.register(
            "sync_consecutive_failures",
            "Failed writes since the last success",
            self.consecutive_failures.clone(),
        );
        to.register(
            "sync_queue_age_seconds",
            "Age of the oldest change that the kernel does not hold",
            self.queue_age.clone(),
        );
        to.register(
            "drift_foreign_changes",
            "How often others changed our kernel state",
            self.foreign_changes.clone(),
        );
        to.register("drift_repairs", "How often that was repaired", self.repairs.clone());
        to.register("services", "Services in the plan", self.services.clone());
        to.register("endpoints", "Endpoints in the plan", self.endpoints.clone());
        to.register("rules", "Rules in the kernel", self.rules_held.clone());
        to.register(
            "frontend_conflicts",
            "Services that name a frontend which another one has",
            self.conflicts.clone(),
        );
        to.register(
            "health_check_ports",
            "Ports for load balancers' health checks",
            self.check_ports.clone(),
        );
        to.register("build_info", "Version", self.build.clone());
        to.register("objects_skipped", "Objects or parts of them that made no sense", self.skipped.clone());
        to.register(
            "settings_not_applied",
            "Settings of the kernel, and NodePorts on localhost, that are not as configured",
            self.settings.clone(),
        );
        to.register("ready", "Whether the kernel holds the assigned configuration", self.ready.clone());
        to.register("config_info", "Mode and revisions", self.config.clone());
        to.register("watch_failing", "Whether a watch only fails", self.watch_failing.clone());
        to.register("listener_up", "Whether a port is listened on", self.listener_up.clone());
    }
}
