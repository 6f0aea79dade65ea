//! The charts without a cluster: they lint, render for every example, refuse wrong values by name, and what they render is
//! what the design promises.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Container, Namespace, PodSpec, ResourceQuota, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding};
use pointsman_crds::ProxyConfiguration;
use pointsman_e2e::stamp::repository;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use support::charts::{NAMESPACE, Rendered, chart, example_values, helm, render, typed};

/// Renders an example.
async fn example(file: &std::path::Path) -> Rendered {
    render(&["-f", &file.to_string_lossy()]).await.unwrap_or_else(|error| panic!("{error:#}"))
}

#[tokio::test]
async fn lint() {
    helm(&["lint", "--strict", &chart("pointsman-crds")]).await.unwrap();
    for file in example_values() {
        let args = ["lint", "--strict", "-n", NAMESPACE, "-f", &file.to_string_lossy(), &chart("pointsman")];
        helm(&args).await.unwrap_or_else(|error| panic!("{error:#}"));
    }
}

/// Reads `object` as `T` and back: what the type does not know is lost on the way, which is how a typo shows.
fn assert_known<T: Serialize + DeserializeOwned>(object: &Value) {
    fn lost(sent: &Value, kept: &Value, path: &str, found: &mut Vec<String>) {
        match (sent, kept) {
            (Value::Object(sent), _) => sent.iter().for_each(|(key, value)| {
                // An empty list or map may vanish.
                let empty = value.is_null()
                    || value.as_array().is_some_and(Vec::is_empty)
                    || value.as_object().is_some_and(serde_json::Map::is_empty);
                match kept.get(key) {
                    Some(kept) => lost(value, kept, &format!("{path}.{key}"), found),
                    None if empty => {}
                    None => found.push(format!("{path}.{key}")),
                }
            }),
            (Value::Array(sent), Value::Array(kept)) if sent.len() == kept.len() => {
                sent.iter().zip(kept).for_each(|(sent, kept)| lost(sent, kept, &format!("{path}[]"), found));
            }
            _ if sent == kept => {}
            _ => found.push(format!("{path}: {sent} became {kept}")),
        }
    }
    let kept = serde_json::to_value(typed::<T>(object)).unwrap();
    let mut found = Vec::new();
    lost(object, &kept, "", &mut found);
    let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
    assert!(found.is_empty(), "{name}: unknown fields: {found:?}");
}

#[tokio::test]
async fn every_rendered_field_exists() {
    for file in example_values() {
        let rendered = example(&file).await;
        assert!(rendered.0.len() >= 15, "{}", file.display());
        for object in &rendered.0 {
            match object["kind"].as_str().unwrap() {
                "ClusterRole" => assert_known::<ClusterRole>(object),
                "ClusterRoleBinding" => assert_known::<ClusterRoleBinding>(object),
                "DaemonSet" => assert_known::<DaemonSet>(object),
                "Deployment" => assert_known::<Deployment>(object),
                "Namespace" => assert_known::<Namespace>(object),
                "PodDisruptionBudget" => assert_known::<PodDisruptionBudget>(object),
                "ProxyConfiguration" => assert_known::<ProxyConfiguration>(object),
                "ResourceQuota" => assert_known::<ResourceQuota>(object),
                "Role" => assert_known::<Role>(object),
                "RoleBinding" => assert_known::<RoleBinding>(object),
                "Service" => assert_known::<Service>(object),
                "ServiceAccount" => assert_known::<ServiceAccount>(object),
                "ValidatingAdmissionPolicy" => assert_known::<ValidatingAdmissionPolicy>(object),
                "ValidatingAdmissionPolicyBinding" => {
                    assert_known::<ValidatingAdmissionPolicyBinding>(object);
                }
                // The Prometheus operator's; k8s-openapi has no type for it.
                "ServiceMonitor" => assert_eq!(object["spec"]["jobLabel"], "pointsman.dev/job"),
                other => panic!("no type for {other} in this test"),
            }
        }
    }
}

/// Each wrong value, and what the refusal must name.
const WRONG: &[(&str, &str)] = &[
    ("replicas=2", "additional properties 'replicas' not allowed"),
    ("image.tag=v1", "additional properties 'tag' not allowed"),
    ("image.registry=", "'/image/registry'"),
    ("image.pullPolicy=Sometimes", "'/image/pullPolicy'"),
    ("image.pullSecrets=mirror", "'/image/pullSecrets'"),
    ("image.agent.digest=sha256:12", "'/image/agent/digest'"),
    ("image.operator.repository=Pointsman", "'/image/operator/repository'"),
    ("image.operator.name=x", "'/image/operator': additional properties 'name' not allowed"),
    ("apiServer.endpoints=[\"192.0.2.1:6443\"]", "'/apiServer/endpoints/0'"),
    ("apiServer.endpoints=[\"http://192.0.2.1:6443\"]", "'/apiServer/endpoints/0'"),
    ("apiServer.endpoints=[\"https://192.0.2.1:6443/api\"]", "'/apiServer/endpoints/0'"),
    ("apiServer.endpoints=[\"https://a\",\"https://a\"]", "'/apiServer/endpoints'"),
    ("apiServer.endpoint=\"https://a\"", "'/apiServer': additional properties 'endpoint' not allowed"),
    ("apiServer.autoDetect=\"yes\"", "'/apiServer/autoDetect'"),
    ("nodeConfigNamespace.name=x", "'/nodeConfigNamespace': additional properties 'name' not allowed"),
    ("operator.replicas=0", "'/operator/replicas'"),
    ("operator.port=70000", "'/operator/port'"),
    ("operator.logLevel=loud", "'/operator/logLevel'"),
    (
        "operator.resources={\"request\":{}}",
        "'/operator/resources': additional properties 'request' not allowed",
    ),
    ("operator.tolerations=[{\"operator\":\"Exist\"}]", "'/operator/tolerations/0/operator'"),
    ("operator.affinity={\"nodeAntiAffinity\":{}}", "'nodeAntiAffinity' not allowed"),
    (
        "operator.serviceAccount.create=true",
        "'/operator/serviceAccount': additional properties 'create' not allowed",
    ),
    ("agent.replicas=1", "'/agent': additional properties 'replicas' not allowed"),
    ("agent.maxUnavailable=0", "'/agent/maxUnavailable'"),
    ("agent.maxUnavailable=\"0%\"", "'/agent/maxUnavailable'"),
    ("agent.podLabels={\"a\":1}", "'/agent/podLabels/a'"),
    ("agent.extraEnv=[{\"value\":\"x\"}]", "'/agent/extraEnv/0': missing property 'name'"),
    ("agent.securityContext={}", "additional properties 'securityContext' not allowed"),
    ("defaultConfiguration.create=\"no\"", "'/defaultConfiguration/create'"),
    ("defaultConfiguration.specs={}", "'/defaultConfiguration': additional properties 'specs' not allowed"),
    ("defaultConfiguration.spec.nodeSelector={}", "'/defaultConfiguration/spec'"),
    ("defaultConfiguration.spec.proxy.mode=\"IPVS\"", "'/defaultConfiguration/spec/proxy/mode'"),
    (
        "defaultConfiguration.spec.proxy.mode=null",
        "'/defaultConfiguration/spec/proxy': missing property 'mode'",
    ),
    (
        "defaultConfiguration.spec.proxy.masquerade={\"bit\":32}",
        "'/defaultConfiguration/spec/proxy/masquerade/bit'",
    ),
    ("defaultConfiguration.spec.proxy.masquerde={}", "additional properties 'masquerde' not allowed"),
    (
        "defaultConfiguration.spec.rollout={\"maxUnavailble\":1}",
        "additional properties 'maxUnavailble' not allowed",
    ),
    ("policies.enable=true", "'/policies': additional properties 'enable' not allowed"),
    ("metrics.service.agentPort=0", "'/metrics/service/agentPort'"),
    ("metrics.serviceMonitor.interval=\"30\"", "'/metrics/serviceMonitor/interval'"),
    ("metrics.serviceMonitor.jobLabel=\"\"", "'/metrics/serviceMonitor/jobLabel'"),
    ("priorityClassQuota=true", "'/priorityClassQuota'"),
    // Contradictions.
    ("policies.enabled=false", "set policies.acknowledgeUnguarded=true if that is meant"),
    ("operator.serviceAccount.name=\"pointsman-agent\"", "operator.serviceAccount.name must differ"),
    (
        "metrics={\"service\":{\"enabled\":false},\"serviceMonitor\":{\"enabled\":true}}",
        "metrics.service.enabled",
    ),
    ("defaultConfiguration.spec.proxy.metricsPort=9100", "metrics.service.agentPort is 10249"),
];

/// The argument with a value that is not JSON as a string.
fn json_argument(setting: &str) -> String {
    let (key, value) = setting.split_once('=').unwrap();
    let json = serde_json::from_str::<Value>(value).is_ok();
    if json { setting.to_owned() } else { format!("{key}=\"{value}\"") }
}

#[tokio::test]
async fn wrong_values_are_refused_by_name() {
    let mut faults = Vec::new();
    for (setting, expected) in WRONG {
        match render(&["--set-json", &json_argument(setting)]).await {
            Ok(_) => faults.push(format!("{setting}: accepted")),
            Err(error) if format!("{error:#}").contains(expected) => {}
            Err(error) => faults.push(format!("{setting}: {expected} is not in: {error:#}")),
        }
    }
    let into_default = helm(&["template", "pointsman", &chart("pointsman"), "-n", "kube-system"]).await;
    let error = format!("{:#}", into_default.unwrap_err());
    assert!(error.contains("into a namespace of its own"), "{error}");
    let error = helm(&["template", "c", &chart("pointsman-crds"), "--set", "keep=false"]).await.unwrap_err();
    assert!(format!("{error:#}").contains("additional properties 'keep' not allowed"));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The schema and the defaults name the same values, so that every value has a default that can be read.
#[test]
fn schema_and_defaults_agree() {
    fn compare(schema: &Value, root: &Value, values: &Value, path: &str, faults: &mut Vec<String>) {
        let schema = match schema["$ref"].as_str() {
            Some(reference) => root.pointer(reference.trim_start_matches('#')).unwrap(),
            None => schema,
        };
        let Some(properties) = schema["properties"].as_object() else { return };
        if schema["additionalProperties"] != false {
            faults.push(format!("{path}: the schema lets unknown keys pass"));
        }
        let (known, set): (BTreeSet<_>, BTreeSet<_>) = (
            properties.keys().collect(),
            values.as_object().into_iter().flat_map(|map| map.keys()).collect(),
        );
        // Free-form parts, and what Helm itself passes, need no default.
        let free = ["global", "limits", "nodeAffinity", "podAffinity", "podAntiAffinity"];
        for key in known.symmetric_difference(&set).filter(|key| !free.contains(&key.as_str())) {
            faults.push(format!("{path}.{key}: only in one of schema and values.yaml"));
        }
        for key in known.intersection(&set) {
            compare(&properties[*key], root, &values[*key], &format!("{path}.{key}"), faults);
        }
    }
    let read =
        |name: &str| std::fs::read_to_string(repository().join("charts/pointsman").join(name)).unwrap();
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    let values: Value = serde_saphyr::from_str(&read("values.yaml")).unwrap();
    let mut faults = Vec::new();
    compare(&schema, &schema, &values, "", &mut faults);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let readme = read("README.md");
    for key in schema["properties"].as_object().unwrap().keys().filter(|key| *key != "global") {
        assert!(readme.contains(&format!("`{key}")), "README.md does not mention {key}");
    }
}

fn pod_user(pod: &PodSpec) -> String {
    format!("system:serviceaccount:{NAMESPACE}:{}", pod.service_account_name.as_deref().unwrap())
}

/// A policy that names an account that nobody uses guards nothing, and nobody notices.
#[tokio::test]
async fn policies_name_the_accounts_and_the_namespace_that_exist() {
    for file in example_values() {
        let rendered = example(&file).await;
        let agent = pod_user(&rendered.agent().spec.unwrap().template.spec.unwrap());
        let operator = pod_user(&rendered.operator().spec.unwrap().template.spec.unwrap());
        for (user, account) in [(&agent, "agent"), (&operator, "operator")] {
            let name = user.rsplit(':').next().unwrap();
            let object = rendered.get("ServiceAccount", name);
            assert_eq!(object["metadata"]["namespace"], NAMESPACE);
            for binding in rendered.kind("RoleBinding").chain(rendered.kind("ClusterRoleBinding")) {
                if binding["metadata"]["name"] == format!("pointsman-{account}") {
                    assert_eq!(binding["subjects"][0]["name"], name);
                    assert_eq!(binding["subjects"][0]["namespace"], NAMESPACE);
                }
            }
        }
        if file.ends_with("bare-values.yaml") {
            assert_eq!(rendered.kind("ValidatingAdmissionPolicy").count(), 0, "switched off");
            continue;
        }
        let policy = |name: &str| -> ValidatingAdmissionPolicy {
            let binding = rendered.get("ValidatingAdmissionPolicyBinding", name);
            assert_eq!(binding["spec"]["policyName"], name);
            assert_eq!(binding["spec"]["validationActions"], serde_json::json!(["Deny", "Audit"]));
            typed(rendered.get("ValidatingAdmissionPolicy", name))
        };
        let condition = |policy: &ValidatingAdmissionPolicy, name: &str| -> String {
            let conditions = policy.spec.as_ref().unwrap().match_conditions.as_ref().unwrap();
            conditions.iter().find(|condition| condition.name == name).unwrap().expression.clone()
        };
        let own_node = policy("proxynodestatus-own-node");
        let only = format!("request.userInfo.username == '{agent}'");
        assert_eq!(condition(&own_node, "only-the-agent"), only);
        let guard = policy("pointsman-node-config-guard");
        let except = format!("request.userInfo.username != '{operator}'");
        assert_eq!(condition(&guard, "not-the-operator"), except);
        let guarded = guard.spec.unwrap().match_constraints.unwrap().namespace_selector.unwrap();
        let labels = guarded.match_labels.unwrap();
        assert_eq!(labels["kubernetes.io/metadata.name"], pointsman_crds::names::NODE_CONFIG_NAMESPACE);
        policy("proxyconfiguration-default-guard");
    }
}

#[tokio::test]
async fn rights_are_named_one_by_one() {
    let rendered = render(&[]).await.unwrap();
    let rules: Vec<PolicyRule> = (rendered.kind("Role").chain(rendered.kind("ClusterRole")))
        .flat_map(|role| typed::<Vec<PolicyRule>>(&role["rules"]))
        .collect();
    assert!(rules.len() >= 12);
    for rule in rules {
        let resources = rule.resources.unwrap();
        let words = rule.verbs.iter().chain(&resources).chain(rule.api_groups.iter().flatten());
        assert!(words.clone().all(|word| !word.contains('*')), "a wildcard in {resources:?}");
        let banned = ["secrets", "pods/exec", "serviceaccounts/token", "clusterroles", "roles"];
        assert!(resources.iter().all(|resource| !banned.contains(&resource.as_str())), "{resources:?}");
        let verbs = ["get", "list", "watch", "create", "patch", "update", "delete"];
        assert!(rule.verbs.iter().all(|verb| verbs.contains(&verb.as_str())), "{:?}", rule.verbs);
        assert!(rule.non_resource_urls.is_none());
    }
}

fn mounts(container: &Container) -> Vec<String> {
    container.volume_mounts.iter().flatten().map(|mount| mount.mount_path.clone()).collect()
}

const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

#[tokio::test]
async fn agent_pod() {
    for file in example_values() {
        let daemon_set = example(&file).await.agent().spec.unwrap();
        let update = daemon_set.update_strategy.unwrap().rolling_update.unwrap();
        assert_eq!(serde_json::to_value(update.max_surge).unwrap(), 0, "two agents would share ports");
        let pod = daemon_set.template.spec.unwrap();
        assert_eq!(pod.host_network, Some(true));
        assert_eq!(pod.dns_policy.as_deref(), Some("Default"));
        assert_eq!(pod.automount_service_account_token, Some(false));
        assert!(pod.host_pid.is_none() && pod.host_ipc.is_none());

        let init = &pod.init_containers.as_ref().unwrap()[..];
        let [init] = init else { panic!("one init container") };
        assert_eq!(init.command.as_deref().unwrap(), ["pointsman-agent", "init"]);
        assert_eq!(init.security_context.as_ref().unwrap().privileged, Some(true));
        assert!(!mounts(init).contains(&TOKEN.to_owned()), "privilege without a token");

        let [agent] = &pod.containers[..] else { panic!("one container") };
        assert_eq!(agent.command.as_deref().unwrap(), ["pointsman-agent", "run"]);
        let security = agent.security_context.as_ref().unwrap();
        assert_eq!(security.privileged, Some(false));
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        let capabilities = security.capabilities.as_ref().unwrap();
        assert_eq!(capabilities.drop.as_deref().unwrap(), ["ALL"]);
        assert_eq!(capabilities.add.as_deref().unwrap(), ["NET_ADMIN", "NET_RAW"]);
        let cpu = agent.resources.as_ref().and_then(|r| r.limits.as_ref()).and_then(|l| l.get("cpu"));
        assert!(cpu.is_none(), "a CPU limit throttles writes to the kernel");
        assert_eq!(
            mounts(agent),
            [
                "/run/xtables.lock",
                "/run/pointsman-agent",
                "/var/lib/pointsman-agent",
                "/host/proc/sys/net",
                TOKEN
            ]
        );
        assert!(agent.ports.is_none(), "the ports may change while the agent runs");
        for (probe, word) in [
            (&agent.startup_probe, "live"),
            (&agent.liveness_probe, "live"),
            (&agent.readiness_probe, "ready"),
        ] {
            let command = probe.as_ref().unwrap().exec.as_ref().unwrap().command.as_deref().unwrap();
            assert_eq!(command, ["pointsman-agent", "probe", word]);
        }
        let host_paths: Vec<(String, String)> = (pod.volumes.iter().flatten())
            .filter_map(|volume| volume.host_path.clone())
            .map(|path| (path.path, path.type_.unwrap_or_default()))
            .collect();
        let pairs = [
            ("/run/xtables.lock", "FileOrCreate"),
            ("/lib/modules", ""),
            ("/var/lib/pointsman-agent", "DirectoryOrCreate"),
            ("/proc/sys/net", "Directory"),
        ];
        assert_eq!(host_paths, pairs.map(|(path, kind)| (path.to_owned(), kind.to_owned())));
        let token = pod.volumes.iter().flatten().find(|volume| volume.name == "token").unwrap();
        let sources = token.projected.as_ref().unwrap().sources.as_ref().unwrap();
        assert_eq!(sources[0].service_account_token.as_ref().unwrap().expiration_seconds, Some(3600));
    }
}

#[tokio::test]
async fn operator_pod() {
    for file in example_values() {
        let deployment = example(&file).await.operator().spec.unwrap();
        let pod = deployment.template.spec.unwrap();
        let security = pod.security_context.as_ref().unwrap();
        assert_eq!(security.run_as_non_root, Some(true));
        assert_eq!(security.seccomp_profile.as_ref().unwrap().type_, "RuntimeDefault");
        assert!(pod.volumes.iter().flatten().all(|volume| volume.host_path.is_none()));
        assert_eq!(pod.dns_policy.as_deref(), Some("Default"));
        let [operator] = &pod.containers[..] else { panic!("one container") };
        let security = operator.security_context.as_ref().unwrap();
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        let capabilities = security.capabilities.as_ref().unwrap();
        assert_eq!(capabilities.drop.as_deref().unwrap(), ["ALL"]);
        assert!(capabilities.add.is_none());
        assert_eq!(mounts(operator), [TOKEN]);
    }
}

/// The values of an environment variable in the agents and the operator.
fn variable(rendered: &Rendered, name: &str) -> Vec<Option<String>> {
    let pods =
        [rendered.agent().spec.unwrap().template.spec, rendered.operator().spec.unwrap().template.spec];
    pods.iter()
        .map(|pod| {
            let env = pod.as_ref().unwrap().containers[0].env.as_ref().unwrap();
            env.iter().find(|variable| variable.name == name).and_then(|variable| variable.value.clone())
        })
        .collect()
}

#[tokio::test]
async fn values_reach_the_pods() {
    let rendered = example(&repository().join("charts/pointsman/ci/everything-values.yaml")).await;
    let servers = "https://192.0.2.10:6443,https://[2001:db8::10]:6443,https://api.example.com".to_owned();
    assert_eq!(variable(&rendered, "POINTSMAN_APISERVERS"), [Some(servers.clone()), Some(servers)]);
    let image = |spec: &PodSpec| spec.containers[0].image.clone().unwrap();
    let agent = rendered.agent().spec.unwrap();
    let operator = rendered.operator().spec.unwrap();
    let (agent_pod, operator_pod) = (agent.template.spec.unwrap(), operator.template.spec.unwrap());
    let digest = "0123456789abcdef".repeat(4);
    let registry = "registry.example.com:5000/mirror";
    assert_eq!(image(&agent_pod), format!("{registry}/network/agent@sha256:{digest}"));
    assert_eq!(image(&operator_pod), format!("{registry}/network/operator:v9"));
    assert_eq!(agent_pod.image_pull_secrets.unwrap()[0].name, "mirror");
    assert_eq!(operator.replicas, Some(3));
    assert_eq!(operator_pod.host_network, Some(false));
    assert_eq!(operator_pod.containers[0].ports.as_ref().unwrap()[0].container_port, 8080);
    let monitor = rendered.get("ServiceMonitor", "pointsman-agent");
    assert_eq!(monitor["spec"]["endpoints"][0]["interval"], "15s");
    let service = rendered.get("Service", "pointsman-agent-metrics");
    assert_eq!(service["metadata"]["labels"]["pointsman.dev/job"], "proxy");
    assert_eq!(service["spec"]["clusterIP"], "None");

    let defaults = render(&[]).await.unwrap();
    assert_eq!(
        variable(&defaults, "POINTSMAN_APISERVERS"),
        [None, None],
        "nobody says and nobody can be asked"
    );
    let version = env!("CARGO_PKG_VERSION");
    let pod = defaults.agent().spec.unwrap().template.spec.unwrap();
    assert_eq!(image(&pod), format!("docker.io/pointsman/agent:{version}"));
    let service = defaults.get("Service", "pointsman-agent-metrics");
    assert_eq!(service["metadata"]["labels"]["pointsman.dev/job"], "kube-proxy");
}

/// Whoever upgrades the chart does not start a rollout.
#[tokio::test]
async fn the_base_is_rendered_at_install_only() {
    let rendered = render(&[]).await.unwrap();
    let base = rendered.get("ProxyConfiguration", "default");
    assert_eq!(base["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    assert_eq!(base["spec"]["proxy"]["mode"], "nftables");
    assert_eq!(base["spec"]["proxy"]["fallbackModes"][0], "iptables");
    let upgrade = render(&["--is-upgrade"]).await.unwrap();
    assert_eq!(upgrade.kind("ProxyConfiguration").count(), 0);
    let without = render(&["--set", "defaultConfiguration.create=false"]).await.unwrap();
    assert_eq!(without.kind("ProxyConfiguration").count(), 0);
}

/// One version everywhere.
#[test]
fn chart_versions_are_the_workspaces() {
    for name in ["pointsman", "pointsman-crds"] {
        let text = std::fs::read_to_string(format!("{}/Chart.yaml", chart(name))).unwrap();
        let chart: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"), "{name}");
        assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"), "{name}");
        assert_eq!(chart["kubeVersion"], ">=1.30.0-0");
    }
}

#[tokio::test]
async fn old_servers_are_refused_and_vendors_suffixes_accepted() {
    for version in ["1.30.0", "1.31.4-gke.1200", "1.30.9+k3s1", "1.37.2"] {
        render(&["--kube-version", version]).await.unwrap_or_else(|error| panic!("{version}: {error:#}"));
    }
    let error = render(&["--kube-version", "1.29.9"]).await.err().map(|error| format!("{error:#}"));
    assert!(error.is_some_and(|error| error.contains("requires kubeVersion: >=1.30.0-0")));
}
