//! Properties: the table follows, and a packet that walks it ends at the proxy, or nowhere, as the plan says.

use proptest::prelude::*;

use super::*;
use crate::nftables::layout::tests::{kernel, walk};
use crate::nftables::text;
use crate::plan::random::{Cluster, FAMILIES, any_packet, start};
use crate::plan::{Packet, Verdict};

/// A cluster, and the tables of both families.
struct World {
    cluster: Cluster,
    families: BTreeMap<IpFamily, Family>,
}

struct Family {
    steering: Steering,
    listeners: Listeners,
    table: Ruleset,
    last: u16,
}

impl Family {
    /// A proxy that listens for everything in the plan.
    fn listen(&mut self, plan: &Plan, node: &NodePlan) {
        let address = node.primary.unwrap();
        self.listeners.tcp = Some(SocketAddr::new(address, 40_000));
        let mut udp = BTreeMap::new();
        for (id, port) in plan.ports(node.family).filter(|(id, _)| id.protocol == Protocol::Udp) {
            for entrance in [Entrance::Internal, Entrance::External] {
                let wanted = frontends(port).any(|(_, kind)| kind == entrance)
                    || (entrance == Entrance::External && port.node_port.is_some());
                if wanted {
                    let key = (id.clone(), entrance);
                    let known = self.listeners.udp.get(&key).copied();
                    let at = known.unwrap_or_else(|| {
                        self.last = self.last % 20_000 + 1;
                        SocketAddr::new(address, 40_000 + self.last)
                    });
                    udp.insert(key, at);
                }
            }
        }
        self.listeners.udp = udp;
    }
}

impl World {
    fn new() -> Self {
        let mut cluster = Cluster::with(start());
        cluster.pending.nodes.extend(FAMILIES);
        let family = |family: IpFamily| Family {
            steering: Steering::new(cluster.plan.node(family).unwrap(), None),
            listeners: Listeners::default(),
            table: Ruleset::new(table(family)),
            last: 0,
        };
        let families = FAMILIES.map(|name| (name, family(name))).into();
        let mut world = Self { cluster, families };
        world.sync();
        world
    }

    fn sync(&mut self) {
        let Cluster { plan, pending, .. } = &mut self.cluster;
        let changes = std::mem::take(pending);
        for (name, family) in &mut self.families {
            let node = plan.node(*name).unwrap();
            family.listen(plan, node);
            if changes.nodes.contains(name) {
                family.steering = Steering::new(node, family.listeners.tcp);
                let ids: Vec<PortId> = plan.ports(*name).map(|(id, _)| id.clone()).collect();
                family.steering.follow(plan, &ids, &family.listeners);
                family.table = family.steering.full();
            } else {
                let ids: Vec<PortId> =
                    changes.ports.iter().filter(|id| id.family == *name).cloned().collect();
                let transaction = family.steering.follow(plan, &ids, &family.listeners);
                kernel::apply(&mut family.table, &transaction).unwrap();
            }
        }
    }
}

/// What this mode does of what the plan says.
fn expected(plan: &Plan, packet: &Packet) -> &'static str {
    // The proxy listens there itself.
    if packet.destination.is_loopback() {
        return "elsewhere";
    }
    match plan.route(packet) {
        Verdict::Forward(_) if packet.protocol == Protocol::Sctp => "rejected",
        Verdict::Forward(_) => "proxy",
        Verdict::Reject | Verdict::Undefined => "rejected",
        Verdict::Drop => "dropped",
        Verdict::Untouched => "elsewhere",
    }
}

fn walked(family: &Family, packet: &Packet) -> &'static str {
    match walk::route(&family.table, packet, &BTreeMap::new()) {
        Verdict::Forward(hops) => {
            let at = |hop: &crate::plan::Hop| SocketAddr::new(hop.address, hop.port);
            let all = family.listeners.udp.values().chain(&family.listeners.tcp);
            assert!(hops.iter().all(|hop| all.clone().any(|listener| *listener == at(hop))));
            "proxy"
        }
        Verdict::Reject => "rejected",
        Verdict::Drop => "dropped",
        Verdict::Undefined | Verdict::Untouched => "elsewhere",
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_table_follows_any_changes_and_packets_end_where_the_plan_says(
        seeds in proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..160),
        packets in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let mut world = World::new();
        for (seed, sync) in seeds {
            world.cluster.step(seed);
            if sync {
                world.sync();
            }
        }
        world.sync();
        for family in world.families.values() {
            prop_assert_eq!(&family.steering.full(), &family.table);
        }
        for seed in packets {
            let packet = any_packet(seed);
            let family = &world.families[&crate::model::family_of(packet.destination)];
            let wanted = expected(&world.cluster.plan, &packet);
            prop_assert_eq!(walked(family, &packet), wanted, "{:?}", packet);
        }
    }
}

#[test]
fn the_table_of_one_service_as_people_see_it() {
    let mut cluster = Cluster::with(start());
    cluster.apply(crate::plan::random::service_applied(
        "web",
        &serde_json::json!({
            "type": "LoadBalancer",
            "clusterIPs": ["10.96.0.10"],
            "externalTrafficPolicy": "Local",
            "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.4"}]}},
            "loadBalancerSourceRanges": ["203.0.113.0/24"],
            "ports": [
                {"name": "p", "protocol": "TCP", "port": 80, "nodePort": 30080},
                {"name": "u", "protocol": "UDP", "port": 53},
            ],
        }),
    ));
    cluster.apply(crate::plan::random::slice_applied(
        "web",
        &serde_json::json!([{"addresses": ["10.244.1.7"], "nodeName": "other"}]),
    ));
    let plan = &cluster.plan;
    let node = plan.node(IpFamily::IPv4).unwrap();
    let mut listeners = Listeners { tcp: Some("192.168.0.1:40000".parse().unwrap()), ..Listeners::default() };
    for (number, (id, _)) in (40_001..).zip(plan.ports(IpFamily::IPv4)) {
        listeners
            .udp
            .insert((id.clone(), Entrance::Internal), SocketAddr::new([192, 168, 0, 1].into(), number));
    }
    let mut steering = Steering::new(node, listeners.tcp);
    let ids: Vec<PortId> = plan.ports(IpFamily::IPv4).map(|(id, _)| id.clone()).collect();
    steering.follow(plan, &ids, &listeners);
    insta::assert_snapshot!(text::ruleset(&steering.full()));
}
