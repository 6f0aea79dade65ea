//! Properties: whatever happens in the cluster, in whatever order, the tables follow, and a packet that walks them ends
//! where the plan says.

pub(crate) mod tables;

use std::collections::BTreeMap;

use pointsman_crds::proxy_node_status::IpFamily;
use proptest::prelude::*;

use super::batch::Batch;
use super::saved::{Comparison, Saved};
use super::state::{Read, State};
use super::tools::Flavour;
use crate::model::Change;
use crate::plan::random::{Cluster, Dice, FAMILIES, Rules, any_packet, change, sorted, start};
use crate::plan::{Packet, Plan, Verdict};
use tables::Tables;

/// A cluster, and the tables of both families.
pub(crate) struct World {
    pub(crate) cluster: Cluster,
    tables: BTreeMap<IpFamily, Tables>,
    /// What is installed, where that is known.
    states: BTreeMap<IpFamily, State>,
    use_sets: bool,
}

impl World {
    fn new(use_sets: bool) -> Self {
        Self::begin(use_sets, start())
    }

    /// A node with nothing but this.
    pub(crate) fn begin(use_sets: bool, changes: impl IntoIterator<Item = Change>) -> Self {
        let mut world = Self {
            cluster: Cluster::with(changes),
            tables: FAMILIES.map(|family| (family, Tables::new())).into(),
            states: BTreeMap::new(),
            use_sets,
        };
        world.sync();
        world
    }

    /// What the data plane does: writes what changed, or, if what is installed is not known, whatever differs.
    fn try_sync(&mut self, luck: &mut dyn FnMut() -> Option<Luck>) {
        let Cluster { plan, pending, .. } = &mut self.cluster;
        let changes = std::mem::take(pending);
        for (family, tables) in &mut self.tables {
            let node = plan.node(*family).unwrap();
            let outcome = match self.states.remove(family) {
                None => adopt(plan, *family, tables, self.use_sets, luck),
                Some(mut state) => {
                    let batch = state.advance(plan, node, &changes);
                    let written = write(&batch, *family, tables, luck);
                    written.and_then(|()| settle(&mut state, *family, tables, luck)).map(|()| state)
                }
            };
            if let Ok(state) = outcome {
                self.states.insert(*family, state);
            }
        }
    }
}

impl Rules for World {
    fn cluster(&mut self) -> &mut Cluster {
        &mut self.cluster
    }

    fn sync(&mut self) {
        self.try_sync(&mut || None);
    }

    fn route(&self, packet: &Packet) -> (Verdict, Verdict) {
        let walked = self.tables[&crate::model::family_of(packet.destination)].walk(packet);
        (walked, expected(self.cluster.plan.route(packet), self.use_sets))
    }

    /// The tables hold exactly what was to be installed, and all but the dispatch tree, whose shape depends on its history
    /// within bounds, is what would be installed from scratch.
    fn check(&mut self) {
        for (family, state) in &self.states {
            let tables = &self.tables[family];
            let read = read(tables, *family);
            let differences = state.compare(&read, Comparison::Exact);
            assert_eq!(differences.describe(*family), Vec::<String>::new());
            let scratch =
                State::of(&self.cluster.plan, self.cluster.plan.node(*family).unwrap(), 0, self.use_sets);
            let mut differences = scratch.compare(&read, Comparison::Exact).describe(*family);
            differences.retain(|line| !line.contains("chain KUBE-IP-") && !line.contains("chain KUBE-NP-"));
            assert_eq!(differences, Vec::<String>::new());
            let rules = |table: &str| tables.save(table).lines().filter(|line| is_counted(line)).count();
            assert_eq!(state.rules(), (rules("nat"), rules("filter")), "the count is right");
            assert!(tables.depth("nat") <= 15, "the kernel takes no more");
        }
    }
}

/// What may go wrong with one run of a tool.
#[derive(Clone, Copy, Debug)]
enum Luck {
    /// It changed nothing and failed.
    Failed,
    /// It did its work, and then was killed.
    Killed,
}

/// What keeps packets away from 127.0.0.0/8 is kubelet's, too, and stays.
fn is_counted(line: &str) -> bool {
    line.starts_with("-A") && !line.contains("KUBE-FIREWALL")
}

fn read(tables: &Tables, family: IpFamily) -> Read {
    Read {
        nat: Saved::parse(tables.save("nat")),
        filter: Saved::parse(tables.save("filter")),
        members: crate::ipset::parse(&tables.save_sets(), family),
    }
}

fn write(
    batch: &Batch,
    family: IpFamily,
    tables: &mut Tables,
    luck: &mut dyn FnMut() -> Option<Luck>,
) -> Result<(), Luck> {
    let mut run = |tables: &mut Tables, work: &dyn Fn(&mut Tables)| match luck() {
        Some(Luck::Failed) => Err(Luck::Failed),
        other => {
            work(tables);
            other.map_or(Ok(()), Err)
        }
    };
    run(tables, &|tables| tables.change_sets(&batch.sets.before(family)))?;
    for script in batch.scripts(Flavour::Nft) {
        run(tables, &|tables| tables.restore(&script.text).unwrap())?;
    }
    run(tables, &|tables| tables.change_sets(&batch.sets.after(family)))
}

fn settle(
    state: &mut State,
    family: IpFamily,
    tables: &mut Tables,
    luck: &mut dyn FnMut() -> Option<Luck>,
) -> Result<(), Luck> {
    if state.is_settling() { write(&state.settle(), family, tables, luck) } else { Ok(()) }
}

/// What the agent does at its start, and after a failure.
fn adopt(
    plan: &Plan,
    family: IpFamily,
    tables: &mut Tables,
    use_sets: bool,
    luck: &mut dyn FnMut() -> Option<Luck>,
) -> Result<State, Luck> {
    if use_sets {
        tables.change_sets(&super::sets::SetChanges::create(family));
    }
    let found = read(tables, family);
    let accepted = found.nat.marks("KUBE-MARK-MASQ") | found.nat.marks("KUBE-POSTROUTING");
    let mut state = State::of(plan, plan.node(family).unwrap(), accepted, use_sets);
    let found = state.compare(&found, Comparison::Exact);
    write(&found.batch, family, tables, luck)?;
    settle(&mut state, family, tables, luck)?;
    let left = state.compare(&read(tables, family), Comparison::Shape);
    assert_eq!(left.chains(), []);
    let batch = Batch { stale: left.stale, filter_stale: left.filter_stale, ..Batch::default() };
    write(&batch, family, tables, luck)?;
    Ok(state)
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

    // ids: SYN-2 SYN-3 SYN-5 SYN-7 SYN-12
    #[test]
    fn tables_follow_any_changes_and_packets_end_where_the_plan_says(
        seeds in proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.2)), 1..160),
        packets in proptest::collection::vec(any::<u64>(), 200),
        use_sets in any::<bool>(),
    ) {
        let mut world = World::new(use_sets);
        world.live(seeds);
        for seed in packets {
            let packet = any_packet(seed);
            let (walked, planned) = world.route(&packet);
            prop_assert_eq!(walked, planned, "{:?}", packet);
        }
    }

    // ids: SYN-8 REG-121362
    #[test]
    fn with_one_run_in_ten_failing_the_tables_follow_all_the_same(
        seeds in proptest::collection::vec(any::<u64>(), 1..120),
        use_sets in any::<bool>(),
        luck in any::<u64>(),
    ) {
        let mut world = World::new(use_sets);
        let mut dice = Dice::new(luck);
        let mut roll = || match dice.roll(20) {
            0 => Some(Luck::Failed),
            1 => Some(Luck::Killed),
            _ => None,
        };
        for seed in seeds {
            if seed % 30 == 0 {
                world.cluster.configure(seed);
            } else {
                world.cluster.apply(change(seed));
            }
            if seed % 3 == 0 {
                world.try_sync(&mut roll);
            }
        }
        // It is tried again until it succeeds.
        for _ in 0..100 {
            world.try_sync(&mut roll);
            if world.states.len() == FAMILIES.len() {
                break;
            }
        }
        prop_assert_eq!(world.states.len(), FAMILIES.len());
        world.sync();
        world.check();
    }

    // ids: SYN-9 SYN-10
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
            let mut tables = world.tables[&family].clone();
            for seed in &damage {
                tables.damage(&mut Dice::new(*seed));
            }
            let state = adopt(&world.cluster.plan, family, &mut tables, sets.1, &mut || None).unwrap();
            let differences = state.compare(&read(&tables, family), Comparison::Exact);
            prop_assert_eq!(differences.describe(family), Vec::<String>::new());
        }
    }
}
