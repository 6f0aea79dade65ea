use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::kernel::Counted;
use crate::plan::{HealthCheck, NoLocal, PortId};
use crate::state::{FamilyState, Source, WatchState};
use crate::userspace::counters::Failure;

const FAMILY: IpFamily = IpFamily::IPv4;

/// Metrics in which everything has happened once.
fn eventful() -> Metrics {
    let metrics = Metrics::default();
    let synced = |full| Synced {
        full,
        rules: BTreeMap::from([((FAMILY, "nat"), 12)]),
        written: BTreeMap::from([((FAMILY, "nat"), 3)]),
        ..Synced::default()
    };
    metrics.changed(Changed::Service);
    metrics.changed(Changed::Endpoints);
    metrics.queued(&[FAMILY]);
    metrics.synced(FAMILY, &synced(true), Duration::from_millis(3));
    metrics.synced(FAMILY, &synced(false), Duration::from_millis(3));
    metrics.failed(Some(Mode::Iptables), IpFamily::IPv6, SyncFailure::LockTimeout, false);
    metrics.failed(Some(Mode::Nftables), IpFamily::IPv6, SyncFailure::SyncFailed, false);
    metrics.programmed(&[FAMILY], Duration::from_secs(2));
    metrics.flows_ended(&Report { deleted: 2, ..Report::new(FAMILY) });
    metrics.answered_healthz(200);
    metrics.answered_livez(503);
    metrics.listening("healthz", true);
    let proxied = metrics.userspace.of(&port_id());
    proxied.connections.inc();
    proxied.failed(Failure::Refused);
    metrics.traffic.set(&[(port_id(), Counted { packets: 3, bytes: 180 })]);
    metrics.client.answered("10.0.0.1:6443", &http::Method::GET, Some(200), Duration::from_millis(30));
    metrics.client.answered("10.0.0.1:6443", &http::Method::PATCH, None, Duration::from_secs(10));
    metrics
}

fn port_id() -> PortId {
    let service = crate::model::ObjectName::new("ns", "web");
    PortId::new(service, FAMILY, "http".into(), crate::model::Protocol::Tcp)
}

fn state() -> SyncState {
    let mut state = SyncState::new(Timestamp::UNIX_EPOCH);
    state.config.active = Some("default-0123456789".to_owned());
    state.families.insert(FAMILY, FamilyState { consecutive_failures: 2, ..FamilyState::default() });
    state.no_local.insert(FAMILY, NoLocal { internal: 1, external: 4 });
    state.drift.repairs = 3;
    state.skipped = 5;
    state.conflicts = 6;
    state.rules = 7;
    state.invalid_dropped = 8;
    state
}

fn render(metrics: &Metrics, state: &SyncState) -> String {
    let watches = Watches(BTreeMap::from([(Source::Services, WatchState::default())]));
    let checks = Checks::default();
    checks.change([(crate::model::ObjectName::new("a", "b"), Some(HealthCheck::default()))]);
    metrics.render(Scrape { state, watches: &watches, checks: &checks, ready: true, instant: Instant::now() })
}

#[tokio::test(start_paused = true)]
async fn names_are_the_ones_that_dashboards_know() {
    let metrics = eventful();
    let text = render(&metrics, &state());
    for line in [
        "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.004\"} 2",
        "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
        "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"2\"} 1",
        "kubeproxy_sync_proxy_rules_service_changes_total 1",
        "kubeproxy_sync_proxy_rules_service_changes_pending 1",
        "kubeproxy_sync_proxy_rules_iptables_total{table=\"nat\",ip_family=\"IPv4\"} 12",
        "kubeproxy_sync_proxy_rules_iptables_last{table=\"nat\",ip_family=\"IPv4\"} 3",
        "kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family=\"IPv6\"} 1",
        "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total{ip_family=\"IPv6\"} 1",
        "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv6\"} 1",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"external\",ip_family=\"IPv4\"} 4",
        "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv4\"} 2",
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total 8",
        "kubeproxy_proxy_healthz_total{code=\"200\"} 1",
        "pointsman_sync_failures_total{ip_family=\"IPv6\",reason=\"LockTimeout\"} 1",
        "pointsman_sync_consecutive_failures{ip_family=\"IPv4\"} 2",
        "pointsman_drift_repairs_total 3",
        "pointsman_objects_skipped_total 5",
        "pointsman_frontend_conflicts 6",
        "pointsman_rules 7",
        "pointsman_ready 1",
        "pointsman_health_check_ports{state=\"open\"} 0",
        "pointsman_config_info{mode=\"\",assigned=\"\",active=\"default-0123456789\"} 1",
        "pointsman_userspace_connections_total{service=\"ns/web:http\",protocol=\"TCP\",ip_family=\"IPv4\"} 1",
        "pointsman_userspace_failures_total{service=\"ns/web:http\",protocol=\"TCP\",ip_family=\"IPv4\",reason=\"refused\"} 1",
        "pointsman_service_packets_total{service=\"ns/web:http\",protocol=\"TCP\",ip_family=\"IPv4\"} 3",
        "pointsman_service_bytes_total{service=\"ns/web:http\",protocol=\"TCP\",ip_family=\"IPv4\"} 180",
        "rest_client_requests_total{code=\"200\",host=\"10.0.0.1:6443\",method=\"GET\"} 1",
        "rest_client_requests_total{code=\"<error>\",host=\"10.0.0.1:6443\",method=\"PATCH\"} 1",
        "rest_client_request_duration_seconds_bucket{host=\"10.0.0.1:6443\",verb=\"GET\",le=\"0.1\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("_total_total"), "{text}");
    metrics.userspace.of(&port_id()).forget();
    metrics.traffic.set(&[]);
    assert!(!render(&metrics, &state()).contains("ns/web"), "a Service that is gone leaves no series");
    metrics.drained();
    assert!(render(&metrics, &state()).contains("service_changes_pending 0"));
}

/// Name, type and labels of each metric, in the order of names.
type Listed = BTreeMap<String, (String, BTreeSet<String>)>;

fn exposed(text: &str) -> Listed {
    let types: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    let mut listed = Listed::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let series = line.rsplit_once(' ').unwrap().0;
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let stem = ["_total", "_bucket", "_sum", "_count"]
            .iter()
            .filter_map(|suffix| name.strip_suffix(suffix))
            .find(|stem| types.contains_key(stem));
        let kind = types[stem.unwrap_or(name)];
        // Counters are known with their suffix, histograms without.
        let name = if kind == "histogram" { stem.unwrap_or(name) } else { name };
        let entry = listed.entry(name.to_owned()).or_insert_with(|| (kind.to_owned(), BTreeSet::new()));
        let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once('='));
        entry.1.extend(labels.map(|(key, _)| key.to_owned()).filter(|key| key != "le"));
    }
    listed
}

/// The rows of the tables of `docs/metrics.md`: `name`, type, `labels`.
fn documented() -> Listed {
    let document = include_str!("../../../docs/metrics.md");
    let ours = document.split("## What kube-proxy has").next().unwrap();
    let rows = ours.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let labels =
            cells[3].split(',').map(|label| label.trim().trim_matches('`')).filter(|it| !it.is_empty());
        (
            cells[1].trim_matches('`').to_owned(),
            (cells[2].to_owned(), labels.map(ToOwned::to_owned).collect()),
        )
    })
    .collect()
}

#[tokio::test(start_paused = true)]
async fn the_documentation_lists_every_metric_with_its_type_and_labels_and_no_other() {
    let metrics = eventful();
    let text = render(&metrics, &state()) + &metrics.render_slis([(Probe::Healthz, true); 3]);
    let (exposed, documented) = (exposed(&text), documented());
    for (name, kind) in &exposed {
        assert_eq!(documented.get(name), Some(kind), "{name} in docs/metrics.md");
    }
    for name in documented.keys() {
        assert!(exposed.contains_key(name), "{name} is documented and not exposed");
    }
}

#[test]
fn slis_say_what_the_probes_say_and_how_often_they_said_it() {
    let metrics = Metrics::default();
    metrics.answered_healthz(200);
    metrics.answered_healthz(503);
    metrics.answered_readyz(200);
    let now = [(Probe::Healthz, false), (Probe::Livez, true), (Probe::Readyz, true)];
    let text = metrics.render_slis(now);
    for line in [
        "kubernetes_healthcheck{name=\"proxy\",type=\"healthz\"} 0",
        "kubernetes_healthcheck{name=\"proxy\",type=\"livez\"} 1",
        "kubernetes_healthchecks_total{name=\"proxy\",type=\"healthz\",status=\"error\"} 1",
        "kubernetes_healthchecks_total{name=\"proxy\",type=\"healthz\",status=\"success\"} 1",
        "kubernetes_healthchecks_total{name=\"proxy\",type=\"readyz\",status=\"success\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
    }
}

#[test]
fn programming_buckets_are_those_of_kube_proxy() {
    let coarse = (60..=115_u16).step_by(5).count() + (120..=300_u16).step_by(30).count();
    assert_eq!(2 + 59 + coarse, 80);
}
