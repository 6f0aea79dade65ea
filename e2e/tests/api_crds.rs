//! The CustomResourceDefinitions on a real API server: every rule refuses with the message that a person reads and lets
//! the right thing pass; bounds, words and unknown fields; defaults; what `kubectl get` shows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/crd_cases.rs"]
mod crd_cases;
mod support;

use pointsman_crds::custom_resource_definitions;
use serde_json::{Value, json};

use crd_cases::{BOUNDS, Case, NODE_SPECS, NODE_STATUSES, OK, RENAMED, RULES};
use support::server::{Answer, Api, node_status, server};

const CONFIGURATIONS: &str = "apis/pointsman.dev/v1alpha1/proxyconfigurations";
const STATUSES: &str = "apis/pointsman.dev/v1alpha1/proxynodestatuses";

/// Ends every list of faults of the schema; the rules come after the schema.
const NOT_CHECKED: &str = ", <nil>: Invalid value: null: some validation rules were not checked because the object \
     was invalid; correct the existing errors to complete validation]";

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

fn configuration(name: &str, spec: &str) -> Value {
    json!({
        "apiVersion": "pointsman.dev/v1alpha1",
        "kind": "ProxyConfiguration",
        "metadata": {"name": name},
        "spec": yaml(spec),
    })
}

/// What the server says, without the words that every answer has.
fn reason(answer: &Answer) -> String {
    let Err(message) = answer else { return OK.to_owned() };
    if let Some((_, field)) = message.split_once("strict decoding error: ") {
        return field.to_owned();
    }
    let reason = message.split_once("is invalid: ").map_or(message.as_str(), |(_, reason)| reason);
    match reason.strip_prefix('[').and_then(|list| list.strip_suffix(NOT_CHECKED)) {
        Some(faults) => format!("{faults} (+)"),
        None => reason.to_owned(),
    }
}

/// Collects wrong answers, so that one run shows them all.
#[derive(Default)]
struct Answers {
    wrong: Vec<String>,
}

impl Answers {
    fn check(&mut self, what: &str, answer: &Answer, expected: &str) {
        let actual = reason(answer);
        if actual != expected {
            self.wrong.push(format!("{what}\n  expected: {expected}\n  actual:   {actual}"));
        }
    }

    fn done(self) {
        assert!(self.wrong.is_empty(), "{} wrong answers:\n{}", self.wrong.len(), self.wrong.join("\n"));
    }
}

async fn check_all(api: &Api, cases: &[Case]) {
    let mut answers = Answers::default();
    for (name, spec, expected) in cases {
        let answer = api.try_create(CONFIGURATIONS, &configuration(name, spec)).await;
        answers.check(&format!("{name} {spec}"), &answer, expected);
    }
    answers.done();
}

#[tokio::test]
async fn rules_of_proxyconfiguration() {
    let (_, api) = server().await;
    check_all(&api, RULES).await;
}

// ids: CFG-12
#[tokio::test]
async fn bounds_of_proxyconfiguration() {
    let (_, api) = server().await;
    check_all(&api, BOUNDS).await;
}

#[tokio::test]
async fn rules_and_bounds_of_proxynodestatus() {
    let (_, api) = server().await;
    let mut answers = Answers::default();
    for (name, spec, expected) in NODE_SPECS {
        let mut object = node_status(name);
        object["spec"] = yaml(spec);
        answers.check(&format!("{name} {spec}"), &api.try_create(STATUSES, &object).await, expected);
    }
    api.create(STATUSES, &node_status("rules")).await.unwrap();
    let path = format!("{STATUSES}/rules");
    let renamed = api.merge(&path, &json!({"spec": {"nodeName": "other"}})).await;
    answers.check("a change of the node", &renamed, RENAMED);
    for (status, expected) in NODE_STATUSES {
        let answer = api.merge(&format!("{path}/status"), &json!({"status": yaml(status)})).await;
        answers.check(status, &answer, expected);
    }
    answers.done();
}

/// Whoever adds a rule adds its case.
// ids: CFG-12 CFG-18
#[test]
fn every_rule_has_a_refused_case() {
    fn messages(schema: &Value, found: &mut Vec<String>) {
        match schema {
            Value::Object(object) => {
                if let Some(rules) = object.get("x-kubernetes-validations").and_then(Value::as_array) {
                    found.extend(rules.iter().map(|rule| rule["message"].as_str().unwrap().to_owned()));
                }
                object.values().for_each(|value| messages(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| messages(value, found)),
            _ => {}
        }
    }
    let mut rules = Vec::new();
    for (_, crd) in custom_resource_definitions().unwrap() {
        messages(&crd, &mut rules);
    }
    assert!(rules.len() >= 20, "{rules:?}");
    let cases: Vec<&str> =
        RULES.iter().chain(NODE_SPECS).map(|(_, _, expected)| *expected).chain([RENAMED]).collect();
    let untested: Vec<&String> =
        rules.iter().filter(|rule| !cases.iter().any(|case| case.contains(rule.as_str()))).collect();
    assert!(untested.is_empty(), "rules without a case: {untested:#?}");
}

/// A default under `spec.proxy` would mask what a lower layer says.
#[tokio::test]
async fn defaults_only_where_nothing_is_merged() {
    let (_, api) = server().await;
    let object = configuration("defaults", "{nodeSelector: {}, proxy: {}, rollout: {canary: {count: 1}}}");
    let created = api.try_create(CONFIGURATIONS, &object).await.unwrap();
    let expected = yaml(
        "{nodeSelector: {}, priority: 0, enforcement: Enforce, proxy: {}, \
         drift: {policy: Repair, intervalSeconds: 60}, \
         rollout: {paused: false, maxUnavailable: 10%, minReadySeconds: 30, progressDeadlineSeconds: 600, \
         failureThreshold: 1, onFailure: Rollback, revisionHistoryLimit: 10, \
         canary: {count: 1, soakSeconds: 300}, probes: {apiServer: true, clusterDNS: true}}}",
    );
    assert_eq!(created["spec"], expected);
    assert!(created.get("status").is_none());
}

#[tokio::test]
async fn status_is_a_subresource() {
    let (_, api) = server().await;
    let mut object = configuration("subresource", "{nodeSelector: {}, proxy: {mode: iptables}}");
    object["status"] = json!({"state": "Ready"});
    let created = api.create(CONFIGURATIONS, &object).await.unwrap();
    assert!(created.get("status").is_none(), "creating does not write status");
    let path = format!("{CONFIGURATIONS}/subresource");
    let patched = api.merge(&path, &json!({"status": {"state": "Ready"}})).await.unwrap();
    assert!(patched.get("status").is_none(), "a patch of the object does not write status");
    let both = json!({"status": {"state": "Ready"}, "spec": {"priority": 7}});
    let patched = api.merge(&format!("{path}/status"), &both).await.unwrap();
    assert_eq!(patched["status"], json!({"state": "Ready"}), "nothing is added to a status");
    assert_eq!(patched["spec"]["priority"], 0, "a patch of the status does not write the spec");
    assert_eq!(patched["metadata"]["generation"], 1);
}

/// The cells of a table that kubectl prints.
fn cells(table: &str) -> Vec<Vec<&str>> {
    table.lines().map(|line| line.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect()).collect()
}

#[tokio::test]
async fn kubectl_shows_and_selects() {
    let (server, api) = server().await;
    for (name, mode, state) in [("shown", "ipvs", "RollingOut"), ("other", "nftables", "Ready")] {
        let spec = format!("{{nodeSelector: {{}}, priority: 5, proxy: {{mode: {mode}}}}}");
        api.create(CONFIGURATIONS, &configuration(name, &spec)).await.unwrap();
        let status = yaml(&format!(
            "{{status: {{state: {state}, updateRevision: {name}-0123456789, \
             nodes: {{matched: 40, updated: 12, ready: 39, degraded: 1, conflicted: 0, incompatible: 0, unreachable: 0}}, \
             conditions: [{{type: Ready, status: \"False\", reason: RollingOut, message: 12 of 40 nodes, \
             lastTransitionTime: \"2026-01-01T00:00:00Z\"}}]}}}}"
        ));
        api.merge(&format!("{CONFIGURATIONS}/{name}/status"), &status).await.unwrap();
    }
    let get = async |args: &[&str]| {
        let mut all = vec!["get"];
        all.extend(args);
        server.kubectl(&all, "").await.unwrap()
    };
    let table = get(&["pxc", "shown"]).await;
    let table = cells(&table);
    assert_eq!(table[0].join(" "), "NAME MODE PRIORITY NODES UPDATED READY DEGRADED STATE AGE");
    assert_eq!(table[1][..8].join(" "), "shown ipvs 5 40 12 39 1 RollingOut");
    let table = get(&["proxyconfiguration", "shown", "-o", "wide"]).await;
    let table = cells(&table);
    assert_eq!(table[0][9..].join(" "), "REVISION PAUSED MESSAGE");
    assert_eq!(table[1][9..].join(" "), "shown-0123456789 false 12 of 40 nodes");

    for (name, state, mode) in [("shown", "Degraded", "iptables"), ("other", "Ready", "nftables")] {
        let mut object = node_status(name);
        let hash = format!("sha256:{}", "0".repeat(64));
        object["spec"] = json!({"nodeName": name, "pool": "edge",
            "desired": {"revision": format!("edge-{mode}"), "hash": hash}});
        api.create(STATUSES, &object).await.unwrap();
        let status = yaml(&format!(
            "{{status: {{state: {state}, mode: {mode}, heartbeatTime: \"2026-01-01T00:00:00Z\", \
             config: {{active: edge-old, lastKnownGood: edge-older}}, agent: {{version: 0.1.0}}, \
             node: {{kernelVersion: 6.1.0}}, sync: {{services: 812, endpoints: 6034, latencyP99: 180ms}}, \
             conditions: [{{type: Ready, status: \"False\", reason: NotSynced, message: lock held, \
             lastTransitionTime: \"2026-01-01T00:00:00Z\"}}, {{type: Drifted, status: \"False\", \
             reason: InSync, message: \"\", lastTransitionTime: \"2026-01-01T00:00:00Z\"}}]}}}}"
        ));
        api.merge(&format!("{STATUSES}/{name}/status"), &status).await.unwrap();
    }
    let table = get(&["pns", "shown", "-o", "wide"]).await;
    let table = cells(&table);
    assert_eq!(
        table[0].join(" "),
        "NAME STATE MODE DESIRED ACTIVE SERVICES ENDPOINTS LAG HEARTBEAT AGE LAST-GOOD AGENT KERNEL DRIFT MESSAGE"
    );
    assert_eq!(
        table[1][..8].join(" "),
        "shown Degraded iptables edge-iptables edge-old 812 6034 180ms",
        "{table:?}"
    );
    assert_eq!(table[1][10..].join(" "), "edge-older 0.1.0 6.1.0 False lock held");

    for selector in [
        "status.state=Degraded",
        "status.mode=iptables",
        "spec.desired.revision=edge-iptables,spec.pool=edge",
    ] {
        let names = get(&["pns", "--field-selector", selector, "-o", "name"]).await;
        assert_eq!(names, "proxynodestatus.pointsman.dev/shown\n", "{selector}");
    }
    for selector in ["spec.proxy.mode=ipvs", "status.state=RollingOut"] {
        let names = get(&["pxc", "--field-selector", selector, "-o", "name"]).await;
        assert_eq!(names, "proxyconfiguration.pointsman.dev/shown\n", "{selector}");
    }
    // The category shows both kinds.
    let all = get(&["proxy", "-o", "name"]).await;
    assert!(
        all.contains("proxyconfiguration.pointsman.dev/") && all.contains("proxynodestatus.pointsman.dev/")
    );
    let help = server.kubectl(&["explain", "pxc.spec.proxy.detectLocal.mode"], "").await.unwrap();
    assert!(help.contains("The criterion.") && help.contains("InterfaceNamePrefix"), "{help}");
}
