//! Which Services the loop asks for, and what it does until they are all in.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use pointsman_crds::settings::Mode;
use tokio::time::sleep;

use super::rig::{Rig, listed, rig, rig_with, service, slice};
use crate::config::tests::{candidate, sample};
use crate::config::{Candidate, Rejection};
use crate::model::{Change, NodeFacts, ObjectName};
use crate::state::Source;
use crate::sync::Input;

fn edge(mode: Mode) -> Candidate {
    let mut config = sample();
    config.mode = mode;
    config.service_proxy_name = "edge".to_owned();
    candidate("default", config)
}

async fn serving() -> Rig {
    let rig = rig();
    rig.begin().await;
    rig.service("web").await;
    sleep(Duration::from_secs(5)).await;
    rig
}

impl Rig {
    async fn edge_service(&self, name: &str) {
        let mut service = service(name);
        service
            .metadata
            .labels
            .get_or_insert_default()
            .insert("service.kubernetes.io/service-proxy-name".to_owned(), "edge".to_owned());
        self.tell(Input::Change(Change::ServiceApplied(Box::new(service)))).await;
    }

    async fn delete(&self, name: &str) {
        self.tell(Input::Change(Change::ServiceDeleted(ObjectName::new("shop", name)))).await;
    }

    async fn edge_listed(&self) {
        self.tell(Input::ServicesListed("edge".to_owned())).await;
    }

    fn asked_for(&self) -> Option<String> {
        self.now().config.service_proxy_name
    }
}

// ids: SYN-1
#[tokio::test(start_paused = true)]
async fn syn_1_a_restart_with_a_proxy_name_writes_nothing_before_its_services_are_listed() {
    let rig = rig_with(Some(edge(Mode::Iptables)));
    assert_eq!(rig.asked_for().as_deref(), Some("edge"), "before any watch begins");
    rig.tell(Input::Change(Change::Node(NodeFacts::default()))).await;
    rig.service("web").await;
    for source in Source::REQUIRED {
        rig.tell(listed(source)).await;
    }
    sleep(Duration::from_mins(10)).await;
    assert!(rig.writes().is_empty(), "those without the label are not the list");
    assert_eq!(rig.now().waiting, [Source::Services]);
    rig.edge_service("shop").await;
    rig.edge_listed().await;
    rig.settle().await;
    let writes = rig.writes();
    assert_eq!((writes.len(), writes[0].services), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_first_configuration_with_a_proxy_name_gets_a_list_of_its_own() {
    let rig = rig_with(None);
    rig.tell(Input::Change(Change::Node(NodeFacts::default()))).await;
    rig.service("web").await;
    for source in [Source::Services, Source::EndpointSlices, Source::Node] {
        rig.tell(listed(source)).await;
    }
    rig.settle().await;
    assert_eq!(rig.now().waiting, [Source::NodeConfig]);
    rig.config(edge(Mode::Iptables)).await;
    sleep(Duration::from_mins(10)).await;
    assert!(rig.writes().is_empty());
    assert_eq!((rig.asked_for().as_deref(), rig.now().waiting), (Some("edge"), vec![Source::Services]));
    rig.edge_listed().await;
    rig.settle().await;
    assert_eq!(rig.writes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_runs_goes_on_until_the_services_of_a_new_proxy_name_are_listed() {
    let rig = serving().await;
    let old = rig.now().config.active;
    let new = edge(Mode::Iptables);
    rig.config(new.clone()).await;
    rig.edge_service("shop").await;
    // Endpoints are followed meanwhile.
    rig.tell(Input::Change(Change::SliceApplied(Box::new(slice("web", Timestamp::now()))))).await;
    sleep(Duration::from_mins(1)).await;
    assert_eq!((rig.asked_for().as_deref(), rig.now().config.active), (Some("edge"), old));
    assert_eq!((rig.now().services, rig.now().endpoints), (1, 1), "web, and not the half of the new ones");
    rig.edge_service("more").await;
    rig.edge_listed().await;
    rig.delete("web").await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((rig.now().config.active, rig.now().services), (Some(new.revision), 2));
    assert!(rig.writes()[1..].iter().all(|write| write.services > 0), "{:?}", rig.writes());
}

#[tokio::test(start_paused = true)]
async fn a_list_that_comes_after_its_proxy_name_was_taken_back_takes_nothing_away() {
    let rig = serving().await;
    let old = candidate("default", sample());
    rig.config(edge(Mode::Iptables)).await;
    rig.config(old.clone()).await;
    rig.edge_listed().await;
    rig.delete("web").await;
    sleep(Duration::from_mins(1)).await;
    assert_eq!((rig.asked_for().as_deref(), rig.now().services), (Some(""), 1));
    // The list that was asked for last.
    rig.service("web").await;
    rig.service("other").await;
    rig.tell(listed(Source::Services)).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((rig.now().services, rig.now().config.active), (2, Some(old.revision)));
    assert!(rig.writes()[1..].iter().all(|write| write.services > 0), "{:?}", rig.writes());
}

#[tokio::test(start_paused = true)]
async fn services_of_a_new_proxy_name_are_asked_for_when_the_node_can_run_its_mode() {
    let rig = serving().await;
    let new = edge(Mode::Ipvs);
    rig.script.lock().unwrap().refuse =
        Some(Rejection { reason: "ModeUnsupported", message: "no".to_owned() });
    rig.config(new.clone()).await;
    rig.service("other").await;
    sleep(Duration::from_secs(5)).await;
    assert_eq!((rig.asked_for().as_deref(), rig.now().services), (Some(""), 2), "the old one serves on");
    rig.script.lock().unwrap().refuse = None;
    sleep(Duration::from_secs(31)).await;
    assert_eq!((rig.asked_for().as_deref(), rig.now().mode), (Some("edge"), Some(Mode::Iptables)));
    rig.edge_service("shop").await;
    rig.edge_listed().await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((rig.now().config.active, rig.now().mode), (Some(new.revision), Some(Mode::Ipvs)));
    assert_eq!(rig.now().services, 1);
}
