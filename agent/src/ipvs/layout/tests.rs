//! Properties: whatever happens in the cluster, in whatever order, the state follows, and a packet that walks it ends where the plan
//! says.

use std::collections::{BTreeMap, BTreeSet};

use pointsman_crds::names::ANNOTATION_WEIGHT;
use pointsman_crds::proxy_node_status::IpFamily;
use proptest::prelude::*;

use super::frame::{JUMPS, NEAR, TABLES};
use super::port::Server;
use super::sets::{self, Element, Set};
use super::{Delta, Full, State};
use crate::ipset::Kind as _;
use crate::iptables::names::ChainName;
use crate::iptables::tests::tables::{End, Tables};
use crate::ipvs::server::Key;
use crate::model::{Change, family_of};
use crate::plan::random::{
    Cluster, FAMILIES, Rules, any_packet, config, service_applied, slice_applied, sorted, start,
    without_hairpin_from_afar,
};
use crate::plan::{Hop, Packet, Plan, Verdict};

/// What the kernel holds in one family.
struct Kernel {
    family: IpFamily,
    servers: BTreeMap<Key, Server>,
    tables: Tables,
}

impl Kernel {
    fn new(family: IpFamily) -> Self {
        let mut tables = Tables::new();
        tables.change_sets(&sets::SetChanges::create(family));
        tables.table("nat").insert(NEAR.to_owned(), Vec::new());
        for jump in JUMPS {
            let from = tables.table(jump.table).get_mut(jump.from).unwrap();
            from.insert(0, format!("-j {}", jump.to));
        }
        Self { family, servers: BTreeMap::new(), tables }
    }

    fn apply(&mut self, delta: &Delta) {
        self.tables.change_sets(&delta.sets.before(self.family));
        for (table, chains) in TABLES.iter().zip(&delta.chains) {
            for (name, rules) in chains {
                self.tables.table(table).insert(name.to_string(), rules.clone());
            }
        }
        let near = self.tables.table("nat").get_mut(NEAR).unwrap();
        for rule in &delta.far {
            near.remove(near.iter().position(|there| there == rule).expect("removed rules are there"));
        }
        near.extend(delta.near.iter().cloned());
        for name in &delta.stale {
            self.tables.table("nat").remove(name.as_str()).expect("removed chains are there");
        }
        for (key, server) in &delta.servers {
            match server {
                Some(server) => drop(self.servers.insert(*key, server.clone())),
                None => drop(self.servers.remove(key).expect("removed servers are there")),
            }
        }
        self.tables.change_sets(&delta.sets.after(self.family));
    }

    /// In the form in which a plan asks for it.
    fn full(&mut self) -> Full {
        let members = crate::ipset::parse(&self.tables.save_sets(), self.family);
        let near = self.tables.table("nat")[NEAR].iter().cloned().collect();
        let chains = TABLES.map(|table| {
            let ours = self
                .tables
                .table(table)
                .iter()
                .filter(|(name, _)| super::frame::is_ours(name) && *name != NEAR);
            ours.map(|(name, rules)| (ChainName::new(name), rules.clone())).collect()
        });
        Full { servers: self.servers.clone(), members, chains, near }
    }

    fn has(&self, element: &Element) -> bool {
        self.tables.has(&element.0.name(self.family), &element.1)
    }

    /// Where a packet ends.
    fn walk(&self, packet: &Packet) -> Verdict {
        let incoming = packet.interface.is_some();
        let first = if incoming { "PREROUTING" } else { "OUTPUT" };
        if self.tables.ends("mangle", first, packet, 0).iter().any(|(end, _)| *end == End::Drop) {
            return Verdict::Drop;
        }
        let routed = self.has(&(Set::Addresses, packet.destination.to_string()));
        let here = Packet { destination_is_local: packet.destination_is_local || routed, ..packet.clone() };
        let mut hops = Vec::new();
        for (end, mark) in self.tables.ends("nat", first, packet, 0) {
            match end {
                End::Dnat(to) => hops.push(self.sent(packet, to, mark)),
                End::Fell => match self.balanced(&here, mark) {
                    Verdict::Forward(more) => hops.extend(more),
                    other => {
                        assert!(hops.is_empty(), "{packet:?}");
                        return other;
                    }
                },
                other => panic!("{other:?} in nat"),
            }
        }
        sorted(Verdict::Forward(hops))
    }

    /// What IPVS does with it, and the rules around that.
    fn balanced(&self, packet: &Packet, mark: u32) -> Verdict {
        let incoming = packet.interface.is_some();
        if incoming && !packet.destination_is_local {
            return self.tables.filtered(packet, mark);
        }
        if incoming {
            match self.tables.filtered(packet, mark) {
                Verdict::Untouched => {}
                refused => return refused,
            }
        }
        let Some(server) = self.servers.get(&Key::new(packet.protocol, packet.destination, packet.port))
        else {
            return self.tables.filtered(packet, mark);
        };
        if server.reals.is_empty() {
            return Verdict::Reject;
        }
        Verdict::Forward(server.reals.keys().map(|to| self.sent(packet, *to, mark)).collect())
    }

    /// Behind translation, in whichever way.
    fn sent(&self, packet: &Packet, to: std::net::SocketAddr, mark: u32) -> Hop {
        let moved = Packet {
            interface: None,
            destination: to.ip(),
            destination_is_local: false,
            port: to.port(),
            ..packet.clone()
        };
        assert_eq!(self.tables.filtered(&moved, mark), Verdict::Untouched, "{to} is let through");
        let ends = self.tables.ends("nat", "POSTROUTING", &moved, mark);
        assert_eq!(ends.len(), 1);
        Hop { address: to.ip(), port: to.port(), masquerade: ends[0].0 == End::Masquerade }
    }
}

/// A cluster, and what the kernel holds in both families.
pub(crate) struct World {
    pub(crate) cluster: Cluster,
    installed: BTreeMap<IpFamily, (State, Kernel)>,
}

impl World {
    /// A node with nothing but this.
    pub(crate) fn begin(changes: impl IntoIterator<Item = Change>) -> Self {
        let cluster = Cluster::with(changes);
        let installed = FAMILIES.map(|family| {
            let state = State::of(&cluster.plan, cluster.plan.node(family).unwrap(), 0);
            let (mut kernel, full) = (Kernel::new(family), state.full());
            kernel.apply(&Delta {
                servers: full.servers.into_iter().map(|(key, server)| (key, Some(server))).collect(),
                sets: sets::SetChanges { added: full.members, ..Default::default() },
                chains: full.chains,
                near: full.near,
                ..Delta::default()
            });
            (family, (state, kernel))
        });
        Self { cluster, installed: installed.into() }
    }

    /// Virtual servers for NodePorts are at the addresses that the node is known to have, so only those are the node's.
    fn arriving(&self, packet: Packet) -> Packet {
        let site = self.installed[&family_of(packet.destination)].0.site();
        let destination = packet.destination;
        Packet { destination_is_local: destination.is_loopback() || site.is_own(destination), ..packet }
    }
}

impl Rules for World {
    fn cluster(&mut self) -> &mut Cluster {
        &mut self.cluster
    }

    fn sync(&mut self) {
        let Cluster { plan, pending, .. } = &mut self.cluster;
        let changes = std::mem::take(pending);
        for (family, (state, kernel)) in &mut self.installed {
            kernel.apply(&state.advance(plan, plan.node(*family).unwrap(), &changes));
            if state.is_settling() {
                kernel.apply(&state.settle());
            }
        }
    }

    /// The kernel holds exactly what we think, and what a plan from scratch asks for.
    fn check(&mut self) {
        for (family, (state, kernel)) in &mut self.installed {
            let there = kernel.full();
            assert_eq!(state.full(), there, "what we think is what is there");
            let scratch = State::of(&self.cluster.plan, self.cluster.plan.node(*family).unwrap(), 0);
            assert_eq!(scratch.full(), there, "what a restart asks for");
            assert_eq!(state.servers(), scratch.servers());
            let frontends: BTreeSet<Key> = there.members.iter().filter_map(sets::key).collect();
            assert!(frontends.iter().eq(there.servers.keys()), "every virtual server is in a set");
        }
    }

    fn route(&self, packet: &Packet) -> (Verdict, Verdict) {
        let kernel = &self.installed[&family_of(packet.destination)].1;
        (kernel.walk(packet), expected(&self.cluster.plan, kernel, packet))
    }
}

/// What this mode does of what the plan says.
fn expected(plan: &Plan, kernel: &Kernel, packet: &Packet) -> Verdict {
    match plan.route(packet) {
        Verdict::Undefined => Verdict::Reject,
        // Every virtual address is the node's, and has no ports but those of Services.
        Verdict::Untouched if kernel.has(&(Set::Addresses, packet.destination.to_string())) => {
            Verdict::Reject
        }
        // Not even a virtual server can be there.
        Verdict::Forward(_) | Verdict::Reject | Verdict::Drop if packet.destination.is_loopback() => {
            Verdict::Untouched
        }
        other => sorted(other),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    // ids: SYN-3 SYN-7
    #[test]
    fn the_state_follows_any_changes_and_packets_end_where_the_plan_says(
        seeds in proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..160),
        packets in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let mut world = World::begin(start());
        world.live(seeds);
        for seed in packets {
            let packet = world.arriving(any_packet(seed));
            let plan = &world.cluster.plan;
            let [walked, wanted] = <[Verdict; 2]>::from(world.route(&packet))
                .map(|verdict| without_hairpin_from_afar(plan, &packet, verdict));
            prop_assert_eq!(walked, wanted, "{:?}", packet);
        }
    }
}

// ids: REG-134147
#[test]
fn what_is_excluded_gets_no_server_no_route_and_no_rule() {
    let mut world = World::begin(start());
    let spec = serde_json::json!({
        "type": "NodePort", "clusterIPs": ["10.96.0.9"], "externalIPs": ["203.0.113.9"], "externalTrafficPolicy": "Local",
        "ports": [{"name": "p", "port": 80, "nodePort": 30_080}],
    });
    let backends = serde_json::json!([{"addresses": ["10.244.0.5"], "nodeName": "node"}, {"addresses": ["10.244.1.5"], "nodeName": "other"}]);
    world.cluster.apply(service_applied("web", &spec));
    world.cluster.apply(slice_applied("web", &backends));
    world.follow();
    assert_eq!(world.installed[&IpFamily::IPv4].1.servers.len(), 3);
    let mut config = config();
    config.ipvs.exclude_cidrs =
        ["10.96.0.0/16", "192.168.0.0/24"].map(|block| block.parse().unwrap()).to_vec();
    world.cluster.set_config(config);
    world.follow();
    let servers: Vec<String> =
        world.installed[&IpFamily::IPv4].1.servers.keys().map(ToString::to_string).collect();
    assert_eq!(servers, ["203.0.113.9:80/tcp"]);
}

#[test]
fn real_servers_have_the_weights_of_their_slices() {
    let mut world = World::begin(start());
    let spec = serde_json::json!({"clusterIPs": ["10.96.0.9"], "ports": [{"name": "p", "port": 80}]});
    let backends = serde_json::json!([{"addresses": ["10.244.0.5"]}, {"addresses": ["10.244.1.5"]}]);
    world.cluster.apply(service_applied("web", &spec));
    for (annotation, weight) in [(None, 1), (Some("5"), 5), (Some("9"), 9), (None, 1)] {
        let mut change = slice_applied("web", &backends);
        if let Change::SliceApplied(slice) = &mut change {
            let text = annotation.map(str::to_owned);
            slice.metadata.annotations = text.map(|text| [(ANNOTATION_WEIGHT.to_owned(), text)].into());
        }
        world.cluster.apply(change);
        world.follow();
        let servers = world.installed[&IpFamily::IPv4].1.servers.values();
        let weights: Vec<u32> = servers.flat_map(|server| server.reals.values().copied()).collect();
        assert_eq!(weights, [weight, weight]);
    }
}
