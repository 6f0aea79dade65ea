//! What the tests of the data path share: Service ports with endpoints on loopback.

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use pointsman_crds::proxy_node_status::IpFamily;

use super::counters::Counters;
use super::port::{ServicePort, Setting};
use super::shared::{Limits, Shared};
use crate::config::tests::sample;
use crate::model::{Model, ObjectName, Protocol};
use crate::plan::{Backend, Plan, PortId, PortPlan, Target};

pub(super) fn shared() -> Arc<Shared> {
    Arc::new(Shared::new(Counters::default(), Limits { connections: 100, flows: 100 }, 2))
}

pub(super) fn plan(endpoints: &[SocketAddr]) -> PortPlan {
    let backend =
        |at: &SocketAddr| Backend { address: at.ip(), port: at.port(), local: true, weight: NonZeroU16::MIN };
    let mut cluster: Vec<Backend> = endpoints.iter().map(backend).collect();
    cluster.sort_unstable();
    PortPlan {
        port: 80,
        cluster_ip: Some([10, 96, 0, 1].into()),
        external_ips: Box::default(),
        load_balancer_ips: Box::default(),
        node_port: Some(30080),
        health_check_node_port: None,
        internal: if cluster.is_empty() { Target::Reject } else { Target::Cluster },
        external: if cluster.is_empty() { Target::Reject } else { Target::Cluster },
        external_local: false,
        sources: None,
        affinity: None,
        serving: cluster.clone().into(),
        cluster: cluster.into(),
        local: Box::default(),
    }
}

pub(super) fn setting() -> Arc<Setting> {
    let mut plan = Plan::new(sample(), &[IpFamily::IPv4]);
    plan.update(&Model::new(), crate::model::Dirty { everything: true, ..Default::default() });
    Arc::new(Setting::new(plan.node(IpFamily::IPv4).unwrap(), plan.config()))
}

pub(super) fn port(shared: &Shared, protocol: Protocol, plan: PortPlan) -> Arc<ServicePort> {
    let service = ObjectName::new("ns", "web");
    let id = PortId::new(service, IpFamily::IPv4, "".into(), protocol);
    let counters = shared.counters.of(&id);
    Arc::new(ServicePort::new(id, Arc::new(plan), setting(), counters))
}
