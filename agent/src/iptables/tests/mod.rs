//! Properties: whatever happens in the cluster, in whatever order, the tables follow, and a packet that walks them ends
//! where the plan says.

pub(crate) mod random;
mod tables;

use std::collections::BTreeMap;

use pointsman_crds::proxy_node_status::IpFamily;
use proptest::prelude::*;

use super::saved::{Comparison, Saved};
use super::state::State;
use super::tools::Flavour;
use crate::model::Model;
use crate::plan::{Changes, Plan, Verdict};
use random::{Dice, any_packet, change, config, random_config, start};
use tables::Tables;

const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// A cluster, its plan, and the tables of both families.
struct World {
    model: Model,
    plan: Plan,
    pending: Changes,
    installed: BTreeMap<IpFamily, (State, Tables)>,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            model: Model::new(),
            plan: Plan::new(config(), &FAMILIES),
            pending: Changes::default(),
            installed: BTreeMap::new(),
        };
        for change in start() {
            world.apply(change);
        }
        for family in FAMILIES {
            let (state, tables) = adopt(&world.plan, family, Tables::new());
            world.installed.insert(family, (state, tables));
        }
        world.pending = Changes::default();
        world
    }

    fn apply(&mut self, change: crate::model::Change) {
        let dirty = self.model.apply(change);
        let changes = self.plan.update(&self.model, dirty);
        self.pending.merge(changes);
    }

    fn sync(&mut self) {
        let changes = std::mem::take(&mut self.pending);
        for (family, (state, tables)) in &mut self.installed {
            let node = self.plan.node(*family).unwrap();
            let batch = state.advance(&self.plan, node, &changes);
            write(&batch, tables);
            if state.is_settling() {
                write(&state.settle(), tables);
            }
        }
    }

    /// The tables hold exactly what a plan from scratch asks for.
    fn check(&self) {
        for (family, (state, tables)) in &self.installed {
            let (nat, filter) = read(tables);
            let differences = state.compare(&nat, &filter, Comparison::Exact);
            assert_eq!(differences.describe(*family), Vec::<String>::new());
            let rules =
                |table: &str| tables.save(table).lines().filter(|line| line.starts_with("-A")).count();
            assert_eq!(state.rules(), (rules("nat"), rules("filter")), "the count is right");
            assert!(tables.depth("nat") <= 15, "the kernel takes no more");
        }
    }
}

fn read(tables: &Tables) -> (Saved, Saved) {
    (Saved::parse(tables.save("nat")), Saved::parse(tables.save("filter")))
}

fn write(batch: &super::batch::Batch, tables: &mut Tables) {
    for script in batch.scripts(Flavour::Nft) {
        tables.restore(&script.text).unwrap();
    }
}

/// What the agent does at its start.
fn adopt(plan: &Plan, family: IpFamily, mut tables: Tables) -> (State, Tables) {
    let (nat, filter) = read(&tables);
    let accepted = nat.marks("KUBE-MARK-MASQ") | nat.marks("KUBE-POSTROUTING");
    let mut state = State::of(plan, plan.node(family).unwrap(), accepted);
    let found = state.compare(&nat, &filter, Comparison::Exact);
    write(&found.batch, &mut tables);
    if state.is_settling() {
        write(&state.settle(), &mut tables);
    }
    let (nat, filter) = read(&tables);
    let left = state.compare(&nat, &filter, Comparison::Shape);
    assert_eq!(left.chains(), []);
    let batch =
        super::batch::Batch { stale: left.stale, filter_stale: left.filter_stale, ..Default::default() };
    write(&batch, &mut tables);
    (state, tables)
}

fn sorted(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Forward(mut hops) => {
            hops.sort();
            hops.dedup();
            Verdict::Forward(hops)
        }
        other => other,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn tables_follow_any_changes_and_packets_end_where_the_plan_says(
        seeds in proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..160),
        packets in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let mut world = World::new();
        for (seed, sync) in seeds {
            if seed % 50 == 0 {
                let changes = world.plan.configure(random_config(&mut Dice::new(seed)), &world.model);
                world.pending.merge(changes);
            } else {
                world.apply(change(seed));
            }
            if sync {
                world.sync();
            }
        }
        world.sync();
        world.check();
        for seed in packets {
            let packet = any_packet(seed);
            let family = crate::model::family_of(packet.destination);
            let walked = world.installed[&family].1.walk(&packet);
            prop_assert_eq!(walked, sorted(world.plan.route(&packet)), "{:?}", packet);
        }
    }

    #[test]
    fn a_restart_over_whatever_is_there_ends_in_the_same_tables(
        before in proptest::collection::vec(any::<u64>(), 1..120),
        after in proptest::collection::vec(any::<u64>(), 0..60),
        damage in proptest::collection::vec(any::<u64>(), 0..20),
        reconfigure in any::<Option<u64>>(),
    ) {
        let mut world = World::new();
        for seed in before {
            world.apply(change(seed));
        }
        world.sync();
        for seed in after {
            world.apply(change(seed));
        }
        if let Some(seed) = reconfigure {
            world.plan.configure(random_config(&mut Dice::new(seed)), &world.model);
        }
        for family in FAMILIES {
            let mut tables = world.installed[&family].1.clone();
            for seed in &damage {
                tables.damage(&mut Dice::new(*seed));
            }
            let (state, tables) = adopt(&world.plan, family, tables);
            let (nat, filter) = read(&tables);
            let differences = state.compare(&nat, &filter, Comparison::Exact);
            prop_assert_eq!(differences.describe(family), Vec::<String>::new());
        }
    }
}
