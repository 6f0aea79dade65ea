use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::node_config::config_hash;
use pointsman_crds::settings::Mode;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::fixtures::{add_layer, agent_reports, at, base, layer, world, write};
use crate::revision::Refusal;

/// One pass whose writes all succeed.
fn pass(world: &mut World, seconds: i64) -> Work {
    let Ok(layers) = layers(world) else { return Work::default() };
    let work = work(world, &assignments(world, &layers), &at(seconds));
    write(world, &work);
    work
}

fn written(work: &Work) -> Vec<&str> {
    work.nodes.iter().filter(|node| node.config.is_some()).map(|node| node.node.as_str()).collect()
}

fn edge(proxy: serde_json::Value) -> Layer {
    layer("edge", 10, "edge", proxy)
}

#[test]
fn every_node_gets_the_merge_of_its_layers_and_then_nothing() {
    let mut world = world(&[base(), edge(json!({"mode": "nftables"}))], &[("n1", "edge"), ("n2", "")]);
    let work = pass(&mut world, 0);
    assert_eq!(written(&work), ["n1", "n2"]);
    let [n1, n2] = work.nodes.as_slice() else { panic!("{work:?}") };
    let desired = n1.config.as_ref().unwrap();
    let configuration = NodeProxyConfiguration::parse(&desired.content, Some(&desired.hash)).unwrap();
    assert_eq!(configuration.mode, Mode::Nftables);
    assert_eq!(desired.hash, config_hash(&desired.content));
    assert!(desired.revision.starts_with("edge-"));
    assert_eq!(desired.sources, ["default@1", "edge@1"]);
    assert_eq!((n1.pool.as_str(), n2.pool.as_str()), ("edge", "default"));
    let spec = n1.report.as_ref().unwrap();
    assert_eq!(spec.desired.as_ref().unwrap().revision, desired.revision);
    assert_eq!(spec.desired.as_ref().unwrap().assigned_time, Some(at(0)));
    assert_eq!(pass(&mut world, 1), Work::default());
}

#[test]
fn a_change_reaches_the_nodes_it_concerns_and_reverting_it_returns_to_the_old_revision() {
    let mut world = world(&[base(), edge(json!({}))], &[("n1", "edge"), ("n2", "")]);
    let first = pass(&mut world, 0);
    add_layer(&mut world, edge(json!({"masquerade": {"bit": 3}})));
    assert_eq!(written(&pass(&mut world, 1)), ["n1"]);
    add_layer(&mut world, edge(json!({})));
    let reverted = pass(&mut world, 2);
    assert_eq!(reverted.nodes[0].config, first.nodes[0].config);
}

#[test]
fn a_new_generation_with_the_same_outcome_writes_nothing() {
    let mut world = world(&[base()], &[("n1", "")]);
    pass(&mut world, 0);
    let mut edited = base();
    edited.generation = 2;
    edited.spec.rollout.min_ready_seconds = 99;
    add_layer(&mut world, edited);
    assert_eq!(pass(&mut world, 1), Work::default());
}

#[test]
fn a_pause_holds_changes_back_and_the_report_says_what_the_node_really_has() {
    let mut world = world(&[base()], &[("n1", "")]);
    let first = pass(&mut world, 0);
    let mut paused = layer("default", 0, "", json!({"mode": "nftables"}));
    paused.spec.rollout.paused = true;
    add_layer(&mut world, paused.clone());
    assert_eq!(pass(&mut world, 1), Work::default());
    let assigned = world.reports["n1"].spec.desired.clone().unwrap();
    assert_eq!(assigned.revision, first.nodes[0].config.as_ref().unwrap().revision);
    paused.spec.rollout.paused = false;
    add_layer(&mut world, paused);
    assert_eq!(written(&pass(&mut world, 2)), ["n1"]);
    assert_eq!(world.reports["n1"].spec.desired.as_ref().unwrap().assigned_time, Some(at(2)));
}

#[test]
fn a_pause_does_not_leave_a_new_node_without_a_configuration() {
    let mut paused = base();
    paused.spec.rollout.paused = true;
    let mut world = world(&[base()], &[("n1", "")]);
    pass(&mut world, 0);
    paused.spec.proxy.mode = Some(Mode::Nftables);
    add_layer(&mut world, paused);
    let record = NodeRecord { uid: "uid-n2".to_owned(), labels: BTreeMap::new() };
    world.nodes.insert("n2".to_owned(), Arc::new(record));
    assert_eq!(written(&pass(&mut world, 1)), ["n2"]);
    assert_eq!(pass(&mut world, 2), Work::default());
}

#[test]
fn the_rules_of_each_pool_hold_for_its_nodes_whichever_layer_changed() {
    let mut paused = edge(json!({"masquerade": {"bit": 3}}));
    paused.spec.rollout.paused = true;
    let mut world = world(&[base()], &[("n1", "edge"), ("n2", "")]);
    pass(&mut world, 0);
    add_layer(&mut world, paused);
    pass(&mut world, 1);
    add_layer(&mut world, layer("default", 0, "", json!({"mode": "nftables"})));
    assert_eq!(written(&pass(&mut world, 2)), ["n2"]);
}

#[test]
fn without_a_base_nothing_is_written() {
    let mut world = world(&[edge(json!({"mode": "nftables"}))], &[("n1", "edge")]);
    assert_eq!(layers(&world), Err(Standstill::NoBase));
    assert_eq!(pass(&mut world, 0), Work::default());
    let mut planned = base();
    planned.spec.enforcement = pointsman_crds::proxy_configuration::Enforcement::Plan;
    add_layer(&mut world, planned);
    assert_eq!(layers(&world), Err(Standstill::NoBase), "a planned base is no base");
}

#[test]
fn a_layer_that_cannot_be_read_stops_everything_rather_than_vanish() {
    let mut world = world(&[base()], &[("n1", "")]);
    world.layers.insert("odd".to_owned(), Arc::new(Err("unknown variant `ebpf`".to_owned())));
    let standstill = layers(&world).unwrap_err();
    assert!(
        standstill.to_string().contains("ProxyConfiguration odd: unknown variant `ebpf`"),
        "{standstill}"
    );
}

#[test]
fn nodes_in_conflict_keep_what_they_have_and_others_proceed() {
    let mut world = world(&[base()], &[("n1", "edge"), ("n2", "")]);
    pass(&mut world, 0);
    let before = world.config_maps["n1"].clone();
    add_layer(&mut world, layer("a", 5, "edge", json!({"masquerade": {"bit": 1}})));
    add_layer(&mut world, layer("b", 5, "edge", json!({"masquerade": {"bit": 2}})));
    add_layer(&mut world, layer("default", 0, "", json!({"mode": "nftables"})));
    assert_eq!(written(&pass(&mut world, 1)), ["n2"]);
    assert_eq!(world.config_maps["n1"], before);
    let desired = world.reports["n1"].spec.desired.clone().unwrap();
    assert_eq!(desired.revision, before.revision, "the report names what the node has");
}

#[test]
fn an_invalid_merge_names_the_layer_that_made_it_so() {
    let low = layer("low", 1, "", json!({"healthzPort": 7000}));
    let middle = layer("middle", 2, "", json!({"metricsPort": 7000}));
    let top = layer("top", 3, "", json!({"logLevel": "debug"}));
    let world = world(&[base(), low, middle, top], &[("n1", "")]);
    let assignments = assignments(&world, &layers(&world).unwrap());
    let Err(Refusal::Invalid { layer, faults }) = &assignments["n1"].outcome else { panic!("valid") };
    assert_eq!(layer, "middle");
    assert_eq!(faults, &["healthzPort and metricsPort must differ"]);
    assert_eq!(work(&world, &assignments, &at(0)).nodes[0].config, None);
}

#[test]
fn broken_glass_is_left_alone_until_mended() {
    let mut world = world(&[base()], &[("n1", "")]);
    pass(&mut world, 0);
    let untouched = world.config_maps["n1"].as_ref().clone();
    let edited = ConfigMapRecord {
        break_glass: true,
        hash: "sha256:other".to_owned(),
        foreign_content: Some("7".to_owned()),
        ..untouched
    };
    world.config_maps.insert("n1".to_owned(), Arc::new(edited.clone()));
    assert_eq!(pass(&mut world, 1), Work::default());
    world.config_maps.insert("n1".to_owned(), Arc::new(ConfigMapRecord { break_glass: false, ..edited }));
    assert_eq!(written(&pass(&mut world, 2)), ["n1"]);
}

#[test]
fn what_others_did_to_a_config_map_is_undone() {
    type Damage = fn(&mut ConfigMapRecord);
    let damages: [(&str, Damage); 6] = [
        ("label pool", |record| record.pool.clear()),
        ("label managed-by", |record| record.managed = false),
        ("label revision", |record| record.revision = "other".to_owned()),
        ("annotation hash", |record| record.hash.clear()),
        ("owner", |record| record.owner_uid.clear()),
        ("content", |record| record.foreign_content = Some("7".to_owned())),
    ];
    for (what, damage) in damages {
        let mut world = world(&[base()], &[("n1", "")]);
        pass(&mut world, 0);
        damage(Arc::make_mut(world.config_maps.get_mut("n1").unwrap()));
        assert_eq!(written(&pass(&mut world, 1)), ["n1"], "{what}");
        assert_eq!(pass(&mut world, 2), Work::default(), "{what}");
    }
}

#[test]
fn what_belonged_to_a_node_goes_with_it_and_comes_back_for_its_namesake() {
    let mut world = world(&[base()], &[("n1", ""), ("n2", "")]);
    pass(&mut world, 0);
    // Not ours, and no node: kube-root-ca.crt.
    world.config_maps.insert("kube-root-ca.crt".to_owned(), Arc::default());
    world.nodes.remove("n1");
    let work = pass(&mut world, 1);
    assert_eq!(work.config_maps, [Sweep { name: "n1".to_owned(), uid: "cm-n1".to_owned() }]);
    assert_eq!(work.reports, [Sweep { name: "n1".to_owned(), uid: "pns-n1".to_owned() }]);
    assert_eq!(pass(&mut world, 2), Work::default());

    // Deleted and created again within one pass: both objects still name the old Node.
    let namesake = NodeRecord { uid: "uid-second".to_owned(), ..NodeRecord::default() };
    world.nodes.insert("n2".to_owned(), Arc::new(namesake));
    let work = pass(&mut world, 3);
    assert_eq!((written(&work), work.nodes[0].uid.as_str()), (vec!["n2"], "uid-second"));
    assert!(work.nodes[0].report.is_some());
    assert_eq!(pass(&mut world, 4), Work::default());
}

#[test]
fn a_report_that_is_deleted_comes_back() {
    let mut world = world(&[base()], &[("n1", "")]);
    pass(&mut world, 0);
    world.reports.clear();
    let work = pass(&mut world, 1);
    assert!(written(&work).is_empty());
    let desired = work.nodes[0].report.as_ref().unwrap().desired.clone().unwrap();
    assert_eq!(desired.revision, world.config_maps["n1"].revision);
}

#[test]
fn a_report_lists_the_highest_sources_that_fit() {
    let mut layers = vec![base()];
    layers.extend((1..12).map(|index| layer(&format!("l{index:02}"), index, "", json!({}))));
    let mut world = world(&layers, &[("n1", "")]);
    pass(&mut world, 0);
    let sources = &world.reports["n1"].spec.sources;
    assert_eq!((sources.len(), sources[7].as_str()), (8, "l11@1"));
    assert_eq!(pass(&mut world, 1), Work::default());
}

fn any_layer() -> impl Strategy<Value = Layer> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    let pool = prop::sample::select(vec!["", "edge", "gpu"]);
    (name, 0..3i32, pool, prop::option::of(0..33i32), any::<bool>()).prop_map(
        |(name, priority, pool, bit, paused)| {
            let proxy = bit.map_or(json!({}), |bit| json!({"masquerade": {"bit": bit}}));
            let mut layer = layer(name, priority, pool, proxy);
            layer.spec.rollout.paused = paused;
            layer
        },
    )
}

#[derive(Clone, Debug)]
enum Step {
    Apply(Box<Layer>),
    Delete(&'static str),
    Join(&'static str, &'static str),
    Leave(&'static str),
    Report(&'static str),
}

fn any_step() -> impl Strategy<Value = Step> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    let node = prop::sample::select(vec!["n1", "n2", "n3"]);
    let pool = prop::sample::select(vec!["", "edge", "gpu"]);
    prop_oneof![
        3 => any_layer().prop_map(|layer| Step::Apply(Box::new(layer))),
        1 => name.prop_map(Step::Delete),
        3 => (node.clone(), pool).prop_map(|(node, pool)| Step::Join(node, pool)),
        1 => node.clone().prop_map(Step::Leave),
        1 => node.prop_map(Step::Report),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Whatever happens: one pass does it all, the next finds nothing to do, and what nodes hold is valid, is what their
    /// layers say unless something stands in the way, and does not depend on how the world came to be.
    #[test]
    fn one_pass_is_enough(steps in prop::collection::vec(any_step(), 1..20)) {
        let mut world = world(&[base()], &[("n1", "edge")]);
        for (second, step) in (0..).zip(steps) {
            match step {
                Step::Apply(layer) => add_layer(&mut world, *layer),
                Step::Delete(name) => { world.layers.remove(name); }
                Step::Join(name, pool) => {
                    let labels = [("pool".to_owned(), pool.to_owned())].into();
                    let record = NodeRecord { uid: format!("uid-{name}-{second}"), labels };
                    world.nodes.insert(name.to_owned(), Arc::new(record));
                }
                Step::Leave(name) => { world.nodes.remove(name); }
                Step::Report(name) => if world.reports.contains_key(name) {
                    agent_reports(&mut world, name, "Ready", second);
                },
            }
            pass(&mut world, second);
            prop_assert_eq!(pass(&mut world, second + 1), Work::default());
            let assignments = assignments(&world, &layers(&world).unwrap());
            for (name, node) in &world.nodes {
                let assignment = &assignments[name];
                let held = world.config_maps.get(name);
                prop_assert!(held.is_some() || assignment.desired().is_none(), "{} has no configuration", name);
                if let (Some(desired), false) = (assignment.desired(), assignment.rollout.paused) {
                    let held = held.unwrap();
                    prop_assert_eq!(&held.revision, &desired.revision);
                    prop_assert_eq!(&held.owner_uid, &node.uid);
                    prop_assert!(NodeProxyConfiguration::parse(&desired.content, Some(&desired.hash)).is_ok());
                }
                let spec = &world.reports[name].spec;
                prop_assert_eq!(
                    spec.desired.as_ref().map(|desired| &desired.revision),
                    held.map(|held| &held.revision)
                );
            }
            prop_assert!(world.config_maps.keys().chain(world.reports.keys()).all(|name| world.nodes.contains_key(name)));
        }
    }
}
