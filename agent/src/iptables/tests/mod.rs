//! Properties: whatever happens in the cluster, in whatever order, the tables follow, and a packet that walks them ends
//! where the plan says.

mod tables;

use std::collections::BTreeMap;

use pointsman_crds::proxy_node_status::IpFamily;
use proptest::prelude::*;

use super::saved::{Comparison, Saved};
use super::state::{Read, State};
use super::tools::Flavour;
use crate::plan::random::{Cluster, Dice, FAMILIES, any_packet, change, sorted};
use crate::plan::{Plan, Verdict};
use tables::Tables;

/// A cluster, and the tables of both families.
struct World {
    cluster: Cluster,
    installed: BTreeMap<IpFamily, (State, Tables)>,
}

impl World {
    fn new(use_sets: bool) -> Self {
        let cluster = Cluster::new();
        let installed =
            FAMILIES.map(|family| (family, adopt(&cluster.plan, family, Tables::new(), use_sets))).into();
        Self { cluster, installed }
    }

    fn sync(&mut self) {
        let Cluster { plan, pending, .. } = &mut self.cluster;
        let changes = std::mem::take(pending);
        for (family, (state, tables)) in &mut self.installed {
            let node = plan.node(*family).unwrap();
            if state.localhost() != node.node_ports.localhost {
                let use_sets = state.uses_sets();
                (*state, *tables) = adopt(plan, *family, tables.clone(), use_sets);
                continue;
            }
            let batch = state.advance(plan, node, &changes);
            write(&batch, *family, tables);
            if state.is_settling() {
                write(&state.settle(), *family, tables);
            }
        }
    }

    /// The tables hold exactly what a plan from scratch asks for.
    fn check(&self) {
        for (family, (state, tables)) in &self.installed {
            let differences = state.compare(&read(tables, *family), Comparison::Exact);
            assert_eq!(differences.describe(*family), Vec::<String>::new());
            let rules = |table: &str| tables.save(table).lines().filter(|line| is_counted(line)).count();
            assert_eq!(state.rules(), (rules("nat"), rules("filter")), "the count is right");
            assert!(tables.depth("nat") <= 15, "the kernel takes no more");
        }
    }
}

/// What keeps packets away from 127.0.0.0/8 is kubelet's, too, and stays.
fn is_counted(line: &str) -> bool {
    line.starts_with("-A") && !line.contains("KUBE-FIREWALL")
}

fn read(tables: &Tables, family: IpFamily) -> Read {
    Read {
        nat: Saved::parse(tables.save("nat")),
        filter: Saved::parse(tables.save("filter")),
        members: super::sets::parse(&tables.save_sets(), family),
    }
}

fn write(batch: &super::batch::Batch, family: IpFamily, tables: &mut Tables) {
    tables.restore_sets(&batch.sets.before(family, false));
    for script in batch.scripts(Flavour::Nft) {
        tables.restore(&script.text).unwrap();
    }
    tables.restore_sets(&batch.sets.after(family));
}

/// What the agent does at its start.
fn adopt(plan: &Plan, family: IpFamily, mut tables: Tables, use_sets: bool) -> (State, Tables) {
    if use_sets {
        tables.restore_sets(&super::sets::SetChanges::default().before(family, true));
    }
    let found = read(&tables, family);
    let accepted = found.nat.marks("KUBE-MARK-MASQ") | found.nat.marks("KUBE-POSTROUTING");
    let mut state = State::of(plan, plan.node(family).unwrap(), accepted, use_sets);
    let found = state.compare(&found, Comparison::Exact);
    write(&found.batch, family, &mut tables);
    if state.is_settling() {
        write(&state.settle(), family, &mut tables);
    }
    let left = state.compare(&read(&tables, family), Comparison::Shape);
    assert_eq!(left.chains(), []);
    let batch =
        super::batch::Batch { stale: left.stale, filter_stale: left.filter_stale, ..Default::default() };
    write(&batch, family, &mut tables);
    (state, tables)
}

/// What the tables can do of what the plan says.
fn expected(verdict: Verdict, use_sets: bool) -> Verdict {
    match verdict {
        Verdict::Undefined if use_sets => Verdict::Reject,
        Verdict::Undefined => Verdict::Untouched,
        other => sorted(other),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn tables_follow_any_changes_and_packets_end_where_the_plan_says(
        seeds in proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..160),
        packets in proptest::collection::vec(any::<u64>(), 200),
        use_sets in any::<bool>(),
    ) {
        let mut world = World::new(use_sets);
        for (seed, sync) in seeds {
            if seed % 50 == 0 {
                world.cluster.configure(seed);
            } else {
                world.cluster.apply(change(seed));
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
            let routed = expected(world.cluster.plan.route(&packet), use_sets);
            // What keeps packets away from 127.0.0.0/8 is no Service's business.
            let guarded = packet.destination.is_loopback() && !packet.source.is_loopback();
            if !(guarded && (&routed, &walked) == (&Verdict::Untouched, &Verdict::Drop)) {
                prop_assert_eq!(walked, routed, "{:?}", packet);
            }
        }
    }

    #[test]
    fn a_restart_over_whatever_is_there_ends_in_the_same_tables(
        before in proptest::collection::vec(any::<u64>(), 1..120),
        after in proptest::collection::vec(any::<u64>(), 0..60),
        damage in proptest::collection::vec(any::<u64>(), 0..20),
        reconfigure in any::<Option<u64>>(),
        sets in any::<(bool, bool)>(),
    ) {
        let mut world = World::new(sets.0);
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
            let mut tables = world.installed[&family].1.clone();
            for seed in &damage {
                tables.damage(&mut Dice::new(*seed));
            }
            let (state, tables) = adopt(&world.cluster.plan, family, tables, sets.1);
            let differences = state.compare(&read(&tables, family), Comparison::Exact);
            prop_assert_eq!(differences.describe(family), Vec::<String>::new());
        }
    }
}
