//! What a user of Services sees: the same checks for every proxy, so that they are fair.
//!
//! In: a cluster with a proxy. Out: one line a check, and an error that lists those that failed. A check is
//! repeated for a while until it holds: rules follow objects with a delay that is not what is checked here.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use kube::Api;
use kube::api::{DeleteParams, ListParams};

use crate::addons::wait_available;
use crate::cluster::Cluster;
use crate::images::TEST_SERVER_IMAGE;
use crate::pointsman::eventually;
use crate::probe::{Place, Summary};

/// How many pods serve.
const BACKENDS: usize = 3;

/// Enough requests that each of three backends is met but in one of 5,000 cases.
const REQUESTS: u32 = 24;

/// How long a check may take to hold.
const PATIENCE: Duration = Duration::from_mins(1);

/// A web Deployment with its Services, a Service without endpoints, and a client pod on each node, in a namespace.
pub struct Workload<'a> {
    cluster: &'a Cluster,
    namespace: String,
    web: Ports,
    empty: Ports,
}

/// Addresses and ports of a Service, http, tcp and udp.
#[derive(Debug)]
struct Ports {
    addresses: Vec<IpAddr>,
    node_ports: Vec<u16>,
}

/// A port of the Services: its scheme and number.
const PORTS: [(&str, u16); 3] = [("http", 80), ("tcp", 9000), ("udp", 9001)];

impl<'a> Workload<'a> {
    /// Creates it in a namespace and waits until all its pods are ready.
    pub async fn create(cluster: &'a Cluster, namespace: &str) -> Result<Self> {
        let mut manifests = include_str!("workload.yaml")
            .replace("%IMAGE%", TEST_SERVER_IMAGE)
            .replace("%NAMESPACE%", namespace);
        for node in cluster.nodes() {
            let pod = serde_json::json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": format!("client-{}", node.name()), "namespace": namespace},
                "spec": {"nodeName": node.name(), "terminationGracePeriodSeconds": 0, "containers": [
                    {"name": "client", "image": TEST_SERVER_IMAGE, "imagePullPolicy": "IfNotPresent"},
                ]},
            });
            let _ = write!(manifests, "\n---\n{pod}");
        }
        cluster.apply(&manifests).await?;
        wait_available(cluster, namespace, "deployment/web").await?;
        // Not for all pods: those that an earlier check has ended may still be there, and are never ready again.
        let clients: Vec<String> =
            cluster.nodes().iter().map(|node| format!("pod/client-{}", node.name())).collect();
        let mut wait = vec!["wait", "--namespace", namespace, "--for=condition=Ready", "--timeout=60s"];
        wait.extend(clients.iter().map(String::as_str));
        cluster.kubectl(&wait).await?;
        let services: Api<Service> = Api::namespaced(cluster.client(), namespace);
        let web = ports(&services.get("web").await?)?;
        let empty = ports(&services.get("empty").await?)?;
        Ok(Self { cluster, namespace: namespace.to_owned(), web, empty })
    }

    /// Removes the namespace; does not wait until all is gone.
    pub async fn remove(self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.cluster.client());
        namespaces.delete(&self.namespace, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The client pod on a node.
    #[must_use]
    pub fn client_on(&self, node: &str) -> Place {
        Place::Pod { namespace: self.namespace.clone(), name: format!("client-{node}") }
    }

    /// `http://…`, `tcp://…` or `udp://…` of the web Service: at its IPv4 (0) or IPv6 (1) address.
    pub fn cluster_ip(&self, scheme: &str, family: usize) -> Result<String> {
        self.web.at_cluster_ip(scheme, family)
    }

    /// The same at the NodePort of the node with this address.
    pub fn node_port(&self, scheme: &str, node: IpAddr) -> Result<String> {
        self.web.at_node(scheme, node)
    }

    /// Runs all checks, prints a line for each, and returns how many there were.
    pub async fn check_all(&self) -> Result<usize> {
        let mut report = Report::default();
        self.check_cluster_ips(&mut report).await?;
        self.check_node_ports(&mut report).await?;
        self.check_names(&mut report).await?;
        self.check_hairpin(&mut report).await?;
        self.check_refusals(&mut report).await?;
        report.finish()
    }

    /// Every pod and node reaches all backends at the ClusterIP of both families; backends see the pod's own address.
    async fn check_cluster_ips(&self, report: &mut Report) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), &self.namespace);
        for node in self.cluster.nodes() {
            let client = pods.get(&format!("client-{}", node.name())).await?;
            let own: BTreeSet<String> = client
                .status
                .and_then(|status| status.pod_ips)
                .unwrap_or_default()
                .into_iter()
                .map(|ip| ip.ip)
                .collect();
            for family in 0..2 {
                for (scheme, _) in PORTS {
                    let target = self.web.at_cluster_ip(scheme, family)?;
                    let from = self.client_on(node.name());
                    self.expect(report, &from, &target, |summary| {
                        all_backends(summary)?;
                        let kept = summary.clients.keys().all(|client| own.contains(client));
                        ensure!(kept, "the backends saw {:?}, not the pod's own address", summary.clients);
                        Ok(())
                    })
                    .await;
                    let from = Place::Node(node.name().to_owned());
                    self.expect(report, &from, &target, all_backends).await;
                }
            }
        }
        Ok(())
    }

    /// From outside, all backends answer at the NodePort of every node, in both families; so they do from a pod.
    async fn check_node_ports(&self, report: &mut Report) -> Result<()> {
        for node in self.cluster.nodes() {
            for address in node.addresses().both() {
                for (scheme, _) in PORTS {
                    let target = self.web.at_node(scheme, address)?;
                    self.expect(report, &Place::Outside, &target, all_backends).await;
                }
                let target = self.web.at_node("http", address)?;
                self.expect(report, &self.client_on("node1"), &target, all_backends).await;
            }
        }
        Ok(())
    }

    /// The Service answers by its short and its full name, to the resolvers of Go and of the C library.
    async fn check_names(&self, report: &mut Report) -> Result<()> {
        for node in self.cluster.nodes() {
            let from = self.client_on(node.name());
            for name in ["web".to_owned(), format!("web.{}.svc.cluster.local", self.namespace)] {
                self.expect(report, &from, &format!("http://{name}:80/"), all_backends).await;
            }
        }
        for family in ["-4", "-6"] {
            let curl = ["curl", family, "-sSf", "--max-time", "3", "http://web/pod"];
            let what = format!("pod client-node1 to http://web/ by curl {family}");
            let answer = eventually(PATIENCE, &what, async || {
                let pod = self.cluster.in_pod(&self.namespace, "client-node1", &curl).await?;
                ensure!(pod.starts_with("web-"), "answered {pod:?}");
                Ok(())
            });
            report.add(&what, answer.await);
        }
        Ok(())
    }

    /// A backend reaches all backends, itself among them, through the Service.
    async fn check_hairpin(&self, report: &mut Report) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), &self.namespace);
        let list = pods.list(&ListParams::default().labels("app=web")).await?;
        let name = list.items.into_iter().find_map(|pod| pod.metadata.name).context("no backend")?;
        let from = Place::Pod { namespace: self.namespace.clone(), name };
        for family in 0..2 {
            let target = self.web.at_cluster_ip("http", family)?;
            self.expect(report, &from, &target, all_backends).await;
        }
        Ok(())
    }

    /// A Service without endpoints refuses, rather than let the client wait. All at the same time: a TCP client over IPv6
    /// hears of a refusal only when it sends its first packet again, a second later.
    async fn check_refusals(&self, report: &mut Report) -> Result<()> {
        let mut cases = Vec::new();
        for (family, node_address) in self.cluster.nodes()[0].addresses().both().into_iter().enumerate() {
            for (scheme, _) in PORTS {
                let cluster_ip = self.empty.at_cluster_ip(scheme, family)?;
                let node_port = self.empty.at_node(scheme, node_address)?;
                cases.push((self.client_on("node1"), cluster_ip.clone(), scheme));
                cases.push((Place::Node("node1".into()), cluster_ip, scheme));
                cases.push((Place::Outside, node_port, scheme));
            }
        }
        let outcomes = join_all(cases.iter().map(async |(from, target, scheme)| {
            eventually(PATIENCE, "refused", async || {
                refused(&self.cluster.probe(from, target, 4).await?, *scheme == "udp")
            })
            .await
        }));
        for ((from, target, _), outcome) in cases.iter().zip(outcomes.await) {
            report.add(&format!("{from} to {target}: refused"), outcome);
        }
        Ok(())
    }

    async fn expect(
        &self,
        report: &mut Report,
        from: &Place,
        target: &str,
        holds: impl Fn(&Summary) -> Result<()>,
    ) {
        let outcome =
            eventually(PATIENCE, target, async || holds(&self.cluster.probe(from, target, REQUESTS).await?));
        report.add(&format!("{from} to {target}"), outcome.await);
    }
}

impl Ports {
    fn at_cluster_ip(&self, scheme: &str, family: usize) -> Result<String> {
        let address = self.addresses.get(family).context("the Service is not dual-stack")?;
        let (_, port) = PORTS.iter().find(|(name, _)| *name == scheme).context("no such port")?;
        Ok(url(scheme, *address, *port))
    }

    fn at_node(&self, scheme: &str, node: IpAddr) -> Result<String> {
        let index = PORTS.iter().position(|(name, _)| *name == scheme).context("no such port")?;
        Ok(url(scheme, node, *self.node_ports.get(index).context("the Service has no NodePort")?))
    }
}

fn url(scheme: &str, address: IpAddr, port: u16) -> String {
    format!("{scheme}://{}", std::net::SocketAddr::from((address, port)))
}

fn ports(service: &Service) -> Result<Ports> {
    let spec = service.spec.clone().unwrap_or_default();
    let addresses = spec.cluster_ips.unwrap_or_default();
    let addresses = addresses.iter().map(|ip| ip.parse()).collect::<Result<_, _>>()?;
    let ports = spec.ports.unwrap_or_default();
    let node_ports = ports.iter().map(|port| u16::try_from(port.node_port.unwrap_or_default()));
    Ok(Ports { addresses, node_ports: node_ports.collect::<Result<_, _>>()? })
}

fn all_backends(summary: &Summary) -> Result<()> {
    ensure!(summary.failed == 0, "{} of {} failed: {:?}", summary.failed, summary.requests, summary.errors);
    ensure!(summary.pods.len() == BACKENDS, "not all {BACKENDS} backends answered: {:?}", summary.pods);
    Ok(())
}

/// Every TCP connection is refused. Of datagrams it is enough that one is: the kernel sends only so many ICMP
/// errors a second to one address, and tells a sender on the node itself that it is not permitted.
fn refused(summary: &Summary, datagrams: bool) -> Result<()> {
    ensure!(summary.failed == summary.requests, "answered by {:?}", summary.pods);
    let is_refusal =
        |error: &str| error == "connection refused" || datagrams && error == "operation not permitted";
    let refusals: u32 = summary.errors.iter().filter(|(error, _)| is_refusal(error)).map(|(_, n)| n).sum();
    let enough = if datagrams { refusals > 0 } else { refusals == summary.requests };
    ensure!(enough, "not refused: {:?}", summary.errors);
    Ok(())
}

#[derive(Default)]
struct Report {
    passed: usize,
    failed: Vec<String>,
}

impl Report {
    fn add(&mut self, what: &str, outcome: Result<()>) {
        match outcome {
            Ok(()) => {
                eprintln!("  ok      {what}");
                self.passed += 1;
            }
            Err(error) => {
                eprintln!("  FAILED  {what}: {error:#}");
                self.failed.push(format!("{what}: {error:#}"));
            }
        }
    }

    fn finish(self) -> Result<usize> {
        let all = self.passed + self.failed.len();
        ensure!(
            self.failed.is_empty(),
            "{} of {all} checks failed:\n{}",
            self.failed.len(),
            self.failed.join("\n")
        );
        Ok(all)
    }
}
