//! Properties: whatever happens in the cluster, in whatever order, the table follows, and a packet that walks it ends where the
//! plan says.

mod cases;
pub(crate) mod kernel;
pub(crate) mod walk;

use std::collections::BTreeMap;

use ipnet::IpNet;
use pointsman_crds::proxy_node_status::IpFamily;
use proptest::prelude::*;

use super::State;
use super::fixed;
use crate::model::{Change, family_of};
use crate::nftables::compare::compare;
use crate::nftables::read::Installed;
use crate::nftables::ruleset::{Ruleset, Transaction};
use crate::plan::random::{
    Cluster, Dice, FAMILIES, Rules, any_packet, change, sorted, start, without_hairpin_from_afar,
};
use crate::plan::{Packet, Plan, Verdict};
use kernel::apply;
use walk::Clients;

/// A cluster, and the tables of both families.
pub(crate) struct World {
    pub(crate) cluster: Cluster,
    installed: BTreeMap<IpFamily, (State, Ruleset)>,
}

impl World {
    fn new() -> Self {
        Self::begin(start())
    }

    /// A node with nothing but this.
    pub(crate) fn begin(changes: impl IntoIterator<Item = Change>) -> Self {
        let cluster = Cluster::with(changes);
        let installed = FAMILIES
            .map(|family| (family, adopt(&cluster.plan, family, Ruleset::new(fixed::table(family)))))
            .into();
        Self { cluster, installed }
    }

    /// Writes what is pending, and returns the transactions.
    fn write(&mut self) -> Vec<Transaction> {
        let Cluster { plan, pending, .. } = &mut self.cluster;
        let changes = std::mem::take(pending);
        let mut transactions = Vec::new();
        for (family, (state, table)) in &mut self.installed {
            if state.counts() != plan.node(*family).unwrap().counters {
                (*state, *table) = adopt(plan, *family, table.clone());
                continue;
            }
            transactions.push(state.advance(plan, &changes));
            if state.is_settling() {
                apply(table, transactions.last().unwrap()).unwrap();
                transactions.push(state.settle());
            }
            apply(table, transactions.last().unwrap()).unwrap();
        }
        transactions
    }
}

impl Rules for World {
    fn cluster(&mut self) -> &mut Cluster {
        &mut self.cluster
    }

    fn sync(&mut self) {
        self.write();
    }

    /// The tables hold exactly what we think, and what a plan from scratch asks for.
    fn check(&mut self) {
        for (family, (state, table)) in &self.installed {
            assert_eq!(state.full(), *table, "what we think is what is there");
            let again = State::adopt(&self.cluster.plan, self.cluster.plan.node(*family).unwrap(), table);
            assert_eq!(again.full(), *table, "a restart finds nothing to do");
            assert_eq!(table.sets.len(), if state.counts() { 17 } else { 15 });
        }
    }

    fn route(&self, packet: &Packet) -> (Verdict, Verdict) {
        let plan = &self.cluster.plan;
        let walked = walk::route(&self.installed[&family_of(packet.destination)].1, packet, &Clients::new());
        (walked, expected(plan, packet))
    }
}

/// What the agent does at its start.
fn adopt(plan: &Plan, family: IpFamily, mut table: Ruleset) -> (State, Ruleset) {
    let mut state = State::adopt(plan, plan.node(family).unwrap(), &table);
    repair(&state, &mut table);
    if state.is_settling() {
        apply(&mut table, &state.settle()).unwrap();
    }
    (state, table)
}

fn repair(state: &State, table: &mut Ruleset) {
    let installed = Installed { ruleset: table.clone(), foreign: BTreeMap::new() };
    let repair = compare(&state.full(), Some(&installed));
    apply(table, &repair.first).unwrap();
    apply(table, &repair.then).unwrap();
}

/// What this layout does of what the plan says.
fn expected(plan: &Plan, packet: &Packet) -> Verdict {
    let node = plan.node(family_of(packet.destination)).unwrap();
    match plan.route(packet) {
        Verdict::Undefined => Verdict::Reject,
        Verdict::Untouched if inside(&node.service_cidrs, packet) => Verdict::Drop,
        other => sorted(other),
    }
}

fn inside(blocks: &[IpNet], packet: &Packet) -> bool {
    blocks.iter().any(|block| block.contains(&packet.destination))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    // ids: SYN-3 SYN-7
    #[test]
    fn the_table_follows_any_changes_and_packets_end_where_the_plan_says(
        seeds in proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..160),
        packets in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let mut world = World::new();
        world.live(seeds);
        for seed in packets {
            let packet = any_packet(seed);
            let plan = &world.cluster.plan;
            let [walked, wanted] = <[Verdict; 2]>::from(world.route(&packet))
                .map(|verdict| without_hairpin_from_afar(plan, &packet, verdict));
            prop_assert_eq!(walked, wanted, "{:?}", packet);
        }
    }

    // ids: SYN-9 SYN-10
    #[test]
    fn a_restart_over_whatever_is_there_ends_in_the_same_table(
        before in proptest::collection::vec(any::<u64>(), 1..120),
        after in proptest::collection::vec(any::<u64>(), 0..60),
        damage in proptest::collection::vec(any::<u64>(), 0..20),
        reconfigure in any::<Option<u64>>(),
    ) {
        let mut world = World::new();
        for seed in before {
            world.cluster.apply(change(seed));
        }
        world.sync();
        for seed in after {
            world.cluster.apply(change(seed));
        }
        if let Some(seed) = reconfigure {
            world.cluster.configure(seed);
        }
        for family in FAMILIES {
            let mut table = world.installed[&family].1.clone();
            for seed in &damage {
                kernel::damage(&mut table, &mut Dice::new(*seed));
            }
            let (state, table) = adopt(&world.cluster.plan, family, table);
            prop_assert_eq!(state.full(), table);
        }
    }
}
