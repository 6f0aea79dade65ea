//! Who may do what, on a real API server with the chart installed: the admission policies with the message that a
//! refused person reads, and the rights of both service accounts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::OnceCell;

use support::charts::{NAMESPACE, chart, helm};
use support::server::{Answer, Api, Identity, node_status, server};

const CONFIGURATIONS: &str = "apis/pointsman.dev/v1alpha1/proxyconfigurations";
const STATUSES: &str = "apis/pointsman.dev/v1alpha1/proxynodestatuses";
const NODE_CONFIGS: &str = "api/v1/namespaces/pointsman-node-config/configmaps";

const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json";

/// The server with the chart's defaults installed and two nodes' objects; the policies are in force.
async fn installed() -> Api {
    static INSTALLED: OnceCell<()> = OnceCell::const_new();
    let (server, api) = server().await;
    INSTALLED
        .get_or_init(|| async {
            let chart = chart("pointsman");
            let kubeconfig = server.kubeconfig().to_string_lossy();
            let args = ["upgrade", "--install", "pointsman", &chart, "-n", NAMESPACE, "--create-namespace"];
            helm(&[&args[..], &["--kubeconfig", &kubeconfig]].concat()).await.expect("helm install");
            for node in ["n1", "n2"] {
                api.create(STATUSES, &node_status(node)).await.unwrap();
            }
            for policy in [refuse_foreign_status, refuse_foreign_config, refuse_deletion_of_the_base] {
                wait_until_refused(&api, policy).await;
            }
        })
        .await;
    api
}

/// A request that one of the policies refuses.
type Probe = fn() -> (Identity, &'static str, String, Option<(&'static str, Value)>);

fn refuse_foreign_status() -> (Identity, &'static str, String, Option<(&'static str, Value)>) {
    (agent("n1"), "PATCH", format!("{STATUSES}/n2/status?dryRun=All"), Some((MERGE, json!({"status": {}}))))
}

fn refuse_foreign_config() -> (Identity, &'static str, String, Option<(&'static str, Value)>) {
    (admin(), "POST", format!("{NODE_CONFIGS}?dryRun=All"), Some((JSON, node_config("probe", &json!({})))))
}

fn refuse_deletion_of_the_base() -> (Identity, &'static str, String, Option<(&'static str, Value)>) {
    (admin(), "DELETE", format!("{CONFIGURATIONS}/default?dryRun=All"), None)
}

/// A new policy takes the server a moment.
async fn wait_until_refused(api: &Api, probe: Probe) {
    for _ in 0..200 {
        let (identity, method, path, body) = probe();
        let body = body.as_ref().map(|(content_type, body)| (*content_type, body));
        if api.send(Some(&identity), method, &path, body).await.is_err_and(|m| m.contains("AdmissionPolicy"))
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("a policy is not in force after 20 s: {}", probe().2);
}

fn agent(node: &str) -> Identity {
    Identity::pod(NAMESPACE, "pointsman-agent", Some(node))
}

fn operator() -> Identity {
    Identity::pod(NAMESPACE, "pointsman-operator", Some("n1"))
}

fn admin() -> Identity {
    Identity::cluster_admin("jane")
}

fn node_config(name: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "pointsman-node-config", "annotations": annotations},
        "data": {"config.yaml": ""},
    })
}

/// `answer` is a refusal by this policy with this text.
fn assert_refused(what: &str, answer: &Answer, policy: &str, text: &str) {
    let message = answer.as_ref().err().unwrap_or_else(|| panic!("{what}: was allowed"));
    let expected =
        format!("ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: {text}");
    assert!(message.ends_with(&expected), "{what}:\n  expected: {expected}\n  actual:   {message}");
}

fn assert_allowed(what: &str, answer: &Answer) {
    assert!(answer.is_ok(), "{what}: {}", answer.as_ref().unwrap_err());
}

/// RBAC says no, before admission is asked.
fn assert_no_right(what: &str, answer: &Answer) {
    let message = answer.as_ref().err().unwrap_or_else(|| panic!("{what}: was allowed"));
    assert!(message.contains(" cannot ") && !message.contains("AdmissionPolicy"), "{what}: {message}");
}

#[tokio::test]
async fn an_agent_writes_only_its_own_nodes_status() {
    const POLICY: &str = "proxynodestatus-own-node";
    let api = installed().await;
    let patch = async |who: &Identity, path: &str| {
        let body = json!({"status": {"state": "Ready"}});
        let path = format!("{STATUSES}/{path}?dryRun=All");
        api.send(Some(who), "PATCH", &path, Some((MERGE, &body))).await
    };
    assert_allowed("own status", &patch(&agent("n1"), "n1/status").await);
    assert_refused(
        "another node's status",
        &patch(&agent("n1"), "n2/status").await,
        POLICY,
        "the Pointsman agent on node n1 may not write the status of node n2",
    );
    let no_claim = Identity::pod(NAMESPACE, "pointsman-agent", None);
    assert_refused(
        "a token without the node's name",
        &patch(&no_claim, "n1/status").await,
        POLICY,
        "the Pointsman agent's token carries no node-name claim; it must run as a pod and the API server must be 1.30 or \
         newer (ServiceAccountTokenPodNodeInfo)",
    );
    // RBAC refuses the rest already; the policy holds even if somebody binds more rights to the agent.
    let strong = agent("n1").with_all_rights();
    let only_status = "the Pointsman agent may only update the status subresource of proxynodestatuses";
    assert_refused("own spec", &patch(&strong, "n1").await, POLICY, only_status);
    let all = format!("{STATUSES}?dryRun=All");
    let created = api.send(Some(&strong), "POST", &all, Some((JSON, &node_status("n3")))).await;
    assert_refused("creation", &created, POLICY, only_status);
    let deleted = api.send(Some(&strong), "DELETE", &format!("{STATUSES}/n1?dryRun=All"), None).await;
    assert_refused("deletion", &deleted, POLICY, only_status);
    let deleted = api.send(Some(&strong), "DELETE", &all, None).await;
    assert_refused("deletion of all", &deleted, POLICY, only_status);
    // The same account name elsewhere is somebody else, and others are not this policy's business.
    let stranger = Identity::pod("default", "pointsman-agent", Some("n1")).with_all_rights();
    assert_allowed("an account of the same name elsewhere", &patch(&stranger, "n2/status").await);
    assert_allowed("the operator, for a silent agent", &patch(&operator(), "n2/status").await);
    assert_allowed("an administrator", &patch(&admin(), "n2/status").await);
}

#[tokio::test]
async fn node_configurations_belong_to_the_operator() {
    const POLICY: &str = "pointsman-node-config-guard";
    const TEXT: &str = "ConfigMaps in namespace pointsman-node-config are written by the Pointsman operator from \
         ProxyConfiguration objects; edit those instead. In an emergency set the annotation pointsman.dev/break-glass to a \
         reason: the agent will obey the edit and report Tampered=True.";
    let api = installed().await;
    let create = async |who: &Identity, object: &Value| {
        api.send(Some(who), "POST", &format!("{NODE_CONFIGS}?dryRun=All"), Some((JSON, object))).await
    };
    let patch = async |who: &Identity, name: &str, body: Value| {
        let path = format!("{NODE_CONFIGS}/{name}?dryRun=All");
        api.send(Some(who), "PATCH", &path, Some((MERGE, &body))).await
    };
    let delete = async |who: &Identity, name: &str| {
        api.send(Some(who), "DELETE", &format!("{NODE_CONFIGS}/{name}?dryRun=All"), None).await
    };
    let plain = node_config("n1", &json!({}));
    let edit = json!({"data": {"config.yaml": "mode: ipvs"}});
    let broken = json!({"metadata": {"annotations": {"pointsman.dev/break-glass": "DNS is down"}}});
    let applied = format!("{NODE_CONFIGS}/n1?fieldManager=pointsman-operator&force=true");
    let answer =
        api.send(Some(&operator()), "PATCH", &applied, Some(("application/apply-patch+yaml", &plain))).await;
    assert_allowed("the operator applies", &answer);
    assert_allowed("the operator edits", &patch(&operator(), "n1", edit.clone()).await);
    assert_allowed("the operator deletes", &delete(&operator(), "n1").await);

    assert_refused("creation", &create(&admin(), &node_config("n2", &json!({}))).await, POLICY, TEXT);
    assert_refused("an edit", &patch(&admin(), "n1", edit.clone()).await, POLICY, TEXT);
    assert_refused("deletion", &delete(&admin(), "n1").await, POLICY, TEXT);
    let all = api.send(Some(&admin()), "DELETE", &format!("{NODE_CONFIGS}?dryRun=All"), None).await;
    assert_refused("deletion of all", &all, POLICY, TEXT);
    let mut generated = node_config("", &json!({}));
    generated["metadata"]["generateName"] = json!("kube-root-");
    assert_refused("a generated name", &create(&admin(), &generated).await, POLICY, TEXT);
    let mut emergency = edit.clone();
    emergency["metadata"] = broken["metadata"].clone();
    assert_allowed("an edit under break-glass", &patch(&admin(), "n1", emergency).await);
    let annotated = node_config("n2", &broken["metadata"]["annotations"]);
    assert_allowed("creation under break-glass", &create(&admin(), &annotated).await);
    // The way back: n2's is edited by hand, and given back.
    api.send(Some(&admin()), "POST", NODE_CONFIGS, Some((JSON, &annotated))).await.unwrap();
    let ended = json!({"metadata": {"annotations": {"pointsman.dev/break-glass": null}}});
    assert_allowed("the end of break-glass", &patch(&admin(), "n2", ended).await);
    assert_allowed("deletion under break-glass", &delete(&admin(), "n2").await);
    let strong = agent("n1").with_all_rights();
    assert_refused("an agent with stolen rights", &patch(&strong, "n1", edit.clone()).await, POLICY, TEXT);
    assert_no_right("an agent", &patch(&agent("n1"), "n1", edit.clone()).await);

    for collector in [
        "system:kube-controller-manager",
        "system:serviceaccount:kube-system:generic-garbage-collector",
        "system:serviceaccount:kube-system:namespace-controller",
    ] {
        let who = Identity::cluster_admin(collector);
        assert_allowed(collector, &delete(&who, "n1").await);
        assert_refused(collector, &patch(&who, "n1", edit.clone()).await, POLICY, TEXT);
    }
    let publisher = Identity::cluster_admin("system:serviceaccount:kube-system:root-ca-cert-publisher");
    let root = node_config("kube-root-ca.crt", &json!({}));
    assert_allowed("the root CA", &create(&publisher, &root).await);
    api.send(Some(&operator()), "POST", NODE_CONFIGS, Some((JSON, &root))).await.unwrap();
    assert_allowed("an update of the root CA", &patch(&publisher, "kube-root-ca.crt", edit.clone()).await);
    assert_allowed("deletion of the root CA", &delete(&publisher, "kube-root-ca.crt").await);

    let mut elsewhere = plain.clone();
    elsewhere["metadata"]["namespace"] = json!("default");
    let others = "api/v1/namespaces/default/configmaps?dryRun=All";
    let answer = api.send(Some(&admin()), "POST", others, Some((JSON, &elsewhere))).await;
    assert_allowed("another namespace", &answer);
}

#[tokio::test]
async fn the_base_is_not_deleted_by_accident() {
    const POLICY: &str = "proxyconfiguration-default-guard";
    const TEXT: &str = "the ProxyConfiguration named 'default' is the base of every node's configuration; set the \
         annotation pointsman.dev/allow-delete=true first (nodes keep the configuration they have)";
    let api = installed().await;
    let delete = async |name: &str| {
        api.send(Some(&admin()), "DELETE", &format!("{CONFIGURATIONS}/{name}?dryRun=All"), None).await
    };
    let path = format!("{CONFIGURATIONS}/default");
    assert_refused("plain", &delete("default").await, POLICY, TEXT);
    let annotate = |value: &str| json!({"metadata": {"annotations": {"pointsman.dev/allow-delete": value}}});
    for other in ["false", "yes", ""] {
        api.merge(&path, &annotate(other)).await.unwrap();
        assert_refused(other, &delete("default").await, POLICY, TEXT);
    }
    let all = api.send(Some(&admin()), "DELETE", &format!("{CONFIGURATIONS}?dryRun=All"), None).await;
    assert_refused("deletion of all", &all, POLICY, TEXT);
    api.merge(&path, &annotate("true")).await.unwrap();
    assert_allowed("after the annotation", &delete("default").await);
    api.merge(&path, &json!({"metadata": {"annotations": {"pointsman.dev/allow-delete": null}}}))
        .await
        .unwrap();

    let mut layer = json!({"apiVersion": "pointsman.dev/v1alpha1", "kind": "ProxyConfiguration",
        "metadata": {"name": "edge"}, "spec": {"nodeSelector": {}, "proxy": {}}});
    api.create(CONFIGURATIONS, &layer).await.unwrap();
    assert_allowed("another layer", &delete("edge").await);
    layer["metadata"]["name"] = json!("default");
    layer["spec"] = json!({"proxy": {"mode": "iptables"}, "priority": 0});
    assert_allowed(
        "an edit of the base",
        &api.merge(&path, &json!({"spec": {"drift": {"policy": "Report"}}})).await,
    );
}

/// `group/resource[/subresource]` to verbs, in one namespace or everywhere.
type Rights = &'static [(&'static str, &'static [&'static str])];

const AGENT_EVERYWHERE: Rights = &[
    ("/services", &["list", "watch"]),
    ("/nodes", &["list", "watch"]),
    ("discovery.k8s.io/endpointslices", &["list", "watch"]),
    ("networking.k8s.io/servicecidrs", &["list", "watch"]),
    ("pointsman.dev/proxynodestatuses/status", &["patch"]),
    ("events.k8s.io/events", &["create", "patch"]),
];
const AGENT_NODE_CONFIG: Rights = &[("/configmaps", &["list", "watch"])];
const OPERATOR_EVERYWHERE: Rights = &[
    ("pointsman.dev/proxyconfigurations", &["get", "list", "watch"]),
    ("pointsman.dev/proxyconfigurations/status", &["patch"]),
    ("pointsman.dev/proxynodestatuses", &["get", "list", "watch", "create", "patch", "delete"]),
    ("pointsman.dev/proxynodestatuses/status", &["patch"]),
    ("/nodes", &["list", "watch"]),
    ("events.k8s.io/events", &["create", "patch"]),
];
const OPERATOR_NODE_CONFIG: Rights =
    &[("/configmaps", &["get", "list", "watch", "create", "patch", "delete"])];
const OPERATOR_SYSTEM: Rights = &[
    ("coordination.k8s.io/leases", &["create"]),
    ("coordination.k8s.io/leases pointsman-operator", &["get", "update"]),
    ("/pods", &["list", "watch"]),
];

/// What the server says an identity may do in a namespace, as lines; without what every service account may.
async fn rights(api: &Api, who: &Identity, namespace: &str) -> Vec<String> {
    let common = all_rights(api, &Identity::pod("default", "nobody", None), namespace).await;
    let mut lines = all_rights(api, who, namespace).await;
    lines.retain(|line| !common.contains(line));
    lines
}

async fn all_rights(api: &Api, who: &Identity, namespace: &str) -> Vec<String> {
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace}});
    let path = "apis/authorization.k8s.io/v1/selfsubjectrulesreviews";
    let answer = api.send(Some(who), "POST", path, Some((JSON, &review))).await.unwrap();
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().map(|s| s.as_str().unwrap().to_owned()).collect()
    };
    let mut lines = Vec::new();
    for rule in answer["status"]["resourceRules"].as_array().unwrap() {
        let names = strings(&rule["resourceNames"]).join(",");
        for group in strings(&rule["apiGroups"]) {
            for resource in strings(&rule["resources"]) {
                for verb in strings(&rule["verbs"]) {
                    lines.push(format!("{group}/{resource} {names}").trim().to_owned() + " " + &verb);
                }
            }
        }
    }
    lines.sort();
    lines
}

fn expected(rights: &[Rights]) -> Vec<String> {
    let mut lines: Vec<String> = rights
        .iter()
        .flat_map(|rights| rights.iter())
        .flat_map(|(resource, verbs)| verbs.iter().map(move |verb| format!("{resource} {verb}")))
        .collect();
    lines.sort();
    lines
}

/// Exactly these rights: the server lists what it would allow, so a right too many fails like one too few.
#[tokio::test]
async fn service_accounts_have_these_rights_and_no_others() {
    let api = installed().await;
    let (agent, operator) = (agent("n1"), operator());
    for namespace in ["default", "kube-system", NAMESPACE] {
        assert_eq!(rights(&api, &agent, namespace).await, expected(&[AGENT_EVERYWHERE]), "{namespace}");
    }
    let there = rights(&api, &agent, "pointsman-node-config").await;
    assert_eq!(there, expected(&[AGENT_EVERYWHERE, AGENT_NODE_CONFIG]));
    for namespace in ["default", "kube-system"] {
        assert_eq!(rights(&api, &operator, namespace).await, expected(&[OPERATOR_EVERYWHERE]), "{namespace}");
    }
    let there = rights(&api, &operator, "pointsman-node-config").await;
    assert_eq!(there, expected(&[OPERATOR_EVERYWHERE, OPERATOR_NODE_CONFIG]));
    let there = rights(&api, &operator, NAMESPACE).await;
    assert_eq!(there, expected(&[OPERATOR_EVERYWHERE, OPERATOR_SYSTEM]));
}

/// The refusals that matter most, as requests.
#[tokio::test]
async fn refused_requests() {
    let api = installed().await;
    let spec = json!({"spec": {"priority": 0}});
    let status = json!({"status": {"state": "Ready"}});
    let state = |name: &str| format!("{STATUSES}/{name}");
    let refused: &[(&str, Identity, &str, String, Option<&Value>)] = &[
        ("the operator edits intent", operator(), "PATCH", format!("{CONFIGURATIONS}/default"), Some(&spec)),
        ("the operator deletes intent", operator(), "DELETE", format!("{CONFIGURATIONS}/default"), None),
        ("the operator reads Secrets", operator(), "GET", "api/v1/secrets".into(), None),
        ("an agent reads Secrets", agent("n1"), "GET", "api/v1/secrets".into(), None),
        ("an agent reads statuses", agent("n1"), "GET", STATUSES.into(), None),
        ("an agent reads its status", agent("n1"), "GET", state("n1"), None),
        ("an agent deletes a status", agent("n1"), "DELETE", state("n1"), None),
        ("an agent edits a spec", agent("n1"), "PATCH", state("n1"), Some(&spec)),
        ("an agent edits intent", agent("n1"), "PATCH", format!("{CONFIGURATIONS}/default"), Some(&spec)),
        ("an agent edits a node", agent("n1"), "PATCH", "api/v1/nodes/n1".into(), Some(&spec)),
        ("somebody writes a status", Identity::user("eve"), "PATCH", state("n1/status"), Some(&status)),
        ("ConfigMaps elsewhere", agent("n1"), "GET", "api/v1/namespaces/kube-system/configmaps".into(), None),
    ];
    for (what, who, method, path, body) in refused {
        let answer = api.send(Some(who), method, path, body.map(|body| (MERGE, body))).await;
        assert_no_right(what, &answer);
    }
    let answer = api
        .send(Some(&agent("n1")), "GET", &format!("{NODE_CONFIGS}?fieldSelector=metadata.name=n1"), None)
        .await;
    assert_allowed("an agent lists its configuration", &answer);
}
