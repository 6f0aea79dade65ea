//! What load balancers and owners of objects are told.

use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{DriftPolicy, IptablesBackend, Mode};
use serde_json::json;
use tokio::time::sleep;

use super::rig::{self, Rig, rig};
use crate::config::tests::{candidate, sample};
use crate::kernel::{Counted, SyncFailure};
use crate::model::{Change, NodeFacts, ObjectName, Protocol};
use crate::plan::PortId;
use crate::sync::Input;

/// A Service whose load balancer asks for its health, with one endpoint here that is ready, or about to end.
async fn balanced(rig: &Rig, ready: bool) {
    let mut service = rig::service("web");
    let spec = service.spec.as_mut().unwrap();
    spec.type_ = Some("LoadBalancer".to_owned());
    spec.external_traffic_policy = Some("Local".to_owned());
    spec.health_check_node_port = Some(32000);
    rig.tell(Input::Change(Change::ServiceApplied(Box::new(service)))).await;
    let mut slice = rig::slice("web", k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    let endpoint = &mut slice.endpoints[0];
    endpoint.node_name = Some("n1".to_owned());
    endpoint.conditions = serde_json::from_value(json!({
        "ready": ready, "serving": true, "terminating": !ready,
    }))
    .unwrap();
    rig.tell(Input::Change(Change::SliceApplied(Box::new(slice)))).await;
}

pub async fn begin() -> Rig {
    let rig = rig();
    rig.begin().await;
    let facts = NodeFacts {
        name: "n1".to_owned(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        ..NodeFacts::default()
    };
    rig.tell(Input::Change(Change::Node(facts))).await;
    sleep(Duration::from_secs(5)).await;
    rig
}

#[tokio::test(start_paused = true)]
async fn hc_1_load_balancers_are_answered_when_the_kernel_has_followed() {
    let rig = begin().await;
    rig.script.lock().unwrap().failures.extend([SyncFailure::RestoreFailed; 2]);
    balanced(&rig, true).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.checks.counts(), [0; 0], "the rules are not in");
    sleep(Duration::from_secs(10)).await;
    assert_eq!(rig.checks.counts(), [1]);

    // TRM-12: the rules stay, and nothing is written; the load balancer hears of it all the same.
    let writes = rig.writes().len();
    balanced(&rig, false).await;
    rig.settle().await;
    assert_eq!(rig.checks.counts(), [0]);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.writes().len(), writes);
}

#[tokio::test(start_paused = true)]
async fn a_check_that_goes_while_the_node_is_set_up_anew_goes() {
    let rig = begin().await;
    balanced(&rig, true).await;
    sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.checks.counts(), [1]);
    rig.script.lock().unwrap().broken = Some(SyncFailure::RestoreFailed);
    rig.tell(Input::Change(Change::ServiceDeleted(ObjectName::new("shop", "web")))).await;
    let mut config = sample();
    config.iptables.backend = IptablesBackend::Legacy;
    rig.config(candidate("default", config)).await;
    sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.script.lock().unwrap().opened, 3);
    rig.script.lock().unwrap().broken = None;
    sleep(Duration::from_secs(30)).await;
    assert_eq!(rig.checks.counts(), [0; 0]);
}

#[tokio::test(start_paused = true)]
async fn owners_are_told_what_is_not_served_and_who_has_what_they_name() {
    let mut rig = begin().await;
    let mut service = rig::service("web");
    service.spec.as_mut().unwrap().external_ips =
        Some(vec!["nonsense".to_owned(), "198.51.100.9".to_owned()]);
    rig.tell(Input::Change(Change::ServiceApplied(Box::new(service.clone())))).await;
    service.metadata.name = Some("late".to_owned());
    let spec = service.spec.as_mut().unwrap();
    spec.cluster_ips = Some(vec!["10.96.0.99".to_owned()]);
    spec.external_ips = Some(vec!["198.51.100.9".to_owned()]);
    rig.tell(Input::Change(Change::ServiceApplied(Box::new(service)))).await;
    rig.settle().await;
    let news: Vec<String> = std::iter::from_fn(|| rig.news.try_recv().ok())
        .map(|news| format!("{} {} {}: {}", news.kind, news.name, news.reason, news.note))
        .collect();
    assert_eq!(
        news,
        [
            "Service shop/web NotServed: spec.externalIPs: \"nonsense\" is not an IP address; not served",
            "Service shop/web FrontendConflict: 198.51.100.9:80/TCP belongs to Service shop/late and is not served for this one",
        ]
    );
    assert_eq!((rig.now().skipped, rig.now().conflicts), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn dropped_packets_are_added_up_across_rules_that_are_written_anew() {
    let rig = begin().await;
    rig.script.lock().unwrap().dropped.extend([5, 7, 2, 2]);
    sleep(Duration::from_mins(5)).await;
    assert_eq!(rig.now().invalid_dropped, 9);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_counted_any_more_has_no_series() {
    let rig = begin().await;
    let web = PortId::new(ObjectName::new("shop", "web"), IpFamily::IPv4, "".into(), Protocol::Tcp);
    rig.script.lock().unwrap().traffic = vec![(web, Counted { packets: 7, bytes: 700 })];
    let mut counting = sample();
    counting.mode = Mode::Nftables;
    counting.nftables.counters = true;
    let mut unread = counting.clone();
    unread.drift.policy = DriftPolicy::Off;
    let mut uncounted = unread.clone();
    uncounted.nftables.counters = false;
    for without in [&unread, &uncounted] {
        rig.config(candidate("default", counting.clone())).await;
        sleep(Duration::from_mins(2)).await;
        assert!(rig.scrape().contains("pointsman_service_packets_total{"));
        rig.config(candidate("default", without.clone())).await;
        sleep(Duration::from_secs(2)).await;
        assert!(!rig.scrape().contains("pointsman_service_packets_total{"));
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_mode_cannot_serve_is_in_the_state_as_long_as_it_cannot() {
    let rig = begin().await;
    for limits in [vec!["shop/web: not served".to_owned()], Vec::new()] {
        rig.script.lock().unwrap().limits.clone_from(&limits);
        rig.service("web").await;
        rig.service("more").await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!(rig.now().limits, limits);
        rig.tell(Input::Change(Change::ServiceDeleted(ObjectName::new("shop", "web")))).await;
    }
}
