//! Mode userspace with one Service and no API server: for `hack/bench userspace`, and for looking at the proxy with a debugger.
//!
//! In: threads, the node's address, the Service's address, endpoints. Out: the agent's own data plane in this network namespace, until
//! the process is ended. Prints `ready` when it serves.

use std::net::SocketAddr;

use anyhow::Context as _;
use pointsman_agent::model::{Change, Model, NodeFacts};
use pointsman_agent::plan::{Changes, Plan};
use pointsman_agent::userspace::Dataplane;
use pointsman_agent::userspace::counters::Counters;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{Mode, ProxySettings};
use serde_json::json;

const USAGE: &str = "userspace THREADS NODE-ADDRESS CLUSTER-IP:PORT ENDPOINT:PORT…";

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().context(USAGE);
    let (threads, node, frontend) = (next()?.parse()?, next()?.parse()?, next()?.parse::<SocketAddr>()?);
    let endpoints = arguments.map(|argument| argument.parse()).collect::<Result<Vec<SocketAddr>, _>>()?;
    let port = endpoints.first().context(USAGE)?.port();
    let service = json!({
        "metadata": {"namespace": "bench", "name": "web"},
        "spec": {"clusterIPs": [frontend.ip()], "ports": [{"port": frontend.port(), "targetPort": port}]},
    });
    let addresses = |at: &SocketAddr| json!({"addresses": [at.ip()]});
    let slice = json!({
        "metadata": {"namespace": "bench", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": port}],
        "endpoints": endpoints.iter().map(addresses).collect::<Vec<_>>(),
    });
    let settings = ProxySettings { mode: Some(Mode::Userspace), ..ProxySettings::default() };
    let mut plan =
        Plan::new(NodeProxyConfiguration::complete(&settings, Drift::default())?, &[IpFamily::IPv4]);
    let mut model = Model::new();
    let facts = NodeFacts { name: "node".into(), addresses: vec![node], ..NodeFacts::default() };
    for change in [
        Change::Node(facts),
        Change::ServiceApplied(Box::new(serde_json::from_value(service)?)),
        Change::SliceApplied(Box::new(serde_json::from_value(slice)?)),
    ] {
        let dirty = model.apply(change);
        plan.update(&model, dirty);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let opened = Dataplane::open(&[IpFamily::IPv4], Counters::default(), threads).await;
        let mut dataplane = opened.map_err(anyhow::Error::msg)?;
        let (_, errors) = dataplane.sync(&plan, &Changes::default()).await;
        anyhow::ensure!(errors.is_empty(), "{errors:?}");
        println!("ready");
        std::future::pending().await
    })
}
