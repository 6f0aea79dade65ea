use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::fixtures::{base, layer};

fn merged(layers: &[Layer]) -> Value {
    serde_json::to_value(merge(&pile(layers)).unwrap()).unwrap()
}

fn disagreements(layers: &[Layer]) -> Vec<String> {
    let found = merge(&pile(layers)).unwrap_err();
    found.iter().map(|found| format!("{}: {}", found.field_path, found.layers.join(" "))).collect()
}

// ids: CFG-16
#[test]
fn fields_are_merged_by_priority() {
    let cases = [
        (
            "a higher layer wins, field by field",
            vec![
                ("low", 1, json!({"masquerade": {"all": true, "bit": 10}, "logLevel": "debug"})),
                ("high", 2, json!({"masquerade": {"bit": 11}})),
            ],
            json!({"mode": "iptables", "masquerade": {"all": true, "bit": 11}, "logLevel": "debug"}),
        ),
        (
            "a name has no say",
            vec![("zzz", 1, json!({"healthzPort": 1})), ("aaa", 2, json!({"healthzPort": 2}))],
            json!({"mode": "iptables", "healthzPort": 2}),
        ),
        (
            "the base lies under layers of its own priority",
            vec![("other", 0, json!({"mode": "nftables"}))],
            json!({"mode": "nftables"}),
        ),
        (
            "lists are replaced whole",
            vec![
                ("low", 1, json!({"nodePortAddresses": ["primary", "localhost"]})),
                ("high", 2, json!({"nodePortAddresses": ["10.0.0.0/8"]})),
            ],
            json!({"mode": "iptables", "nodePortAddresses": ["10.0.0.0/8"]}),
        ),
        (
            "an empty list is a value",
            vec![
                ("low", 1, json!({"fallbackModes": ["nftables"]})),
                ("high", 2, json!({"fallbackModes": []})),
            ],
            json!({"mode": "iptables", "fallbackModes": []}),
        ),
        (
            "a union is replaced whole",
            vec![
                ("low", 1, json!({"detectLocal": {"mode": "ClusterCIDR", "clusterCIDRs": ["10.0.0.0/8"]}})),
                ("high", 2, json!({"detectLocal": {"mode": "BridgeInterface", "bridgeInterface": "br0"}})),
            ],
            json!({"mode": "iptables", "detectLocal": {"mode": "BridgeInterface", "bridgeInterface": "br0"}}),
        ),
        (
            "blocks of modes that are not active are kept",
            vec![
                ("low", 1, json!({"ipvs": {"scheduler": "wrr"}})),
                ("high", 2, json!({"ipvs": {"strictARP": true}})),
            ],
            json!({"mode": "iptables", "ipvs": {"scheduler": "wrr", "strictARP": true}}),
        ),
        (
            "equal values of equal layers are no conflict",
            vec![("a", 5, json!({"logLevel": "debug"})), ("b", 5, json!({"logLevel": "debug"}))],
            json!({"mode": "iptables", "logLevel": "debug"}),
        ),
        (
            "equal layers may set different fields of one object",
            vec![("a", 5, json!({"masquerade": {"bit": 3}})), ("b", 5, json!({"masquerade": {"all": true}}))],
            json!({"mode": "iptables", "masquerade": {"bit": 3, "all": true}}),
        ),
    ];
    for (what, layers, expected) in cases {
        let mut all = vec![base()];
        all.extend(layers.into_iter().map(|(name, priority, proxy)| layer(name, priority, "", proxy)));
        assert_eq!(merged(&all), expected, "{what}");
        all.reverse();
        assert_eq!(merged(&all), expected, "{what}, in the other order");
    }
}

#[test]
fn equal_layers_that_disagree_conflict_on_the_field() {
    let cases = [
        (json!({"masquerade": {"bit": 1}}), json!({"masquerade": {"bit": 2}}), "proxy.masquerade.bit: a b"),
        (json!({"mode": "ipvs"}), json!({"mode": "nftables"}), "proxy.mode: a b"),
        (
            json!({"nodePortAddresses": ["all"]}),
            json!({"nodePortAddresses": ["primary"]}),
            "proxy.nodePortAddresses: a b",
        ),
        (
            json!({"detectLocal": {"mode": "NodeCIDR"}}),
            json!({"detectLocal": {"mode": "BridgeInterface", "bridgeInterface": "br0"}}),
            "proxy.detectLocal: a b",
        ),
    ];
    for (a, b, expected) in cases {
        let layers = [base(), layer("b", 7, "", b), layer("a", 7, "", a)];
        assert_eq!(disagreements(&layers), [expected]);
    }
}

#[test]
fn every_pair_that_disagrees_is_named() {
    let bit = |name: &str, bit: i32| layer(name, 7, "", json!({"masquerade": {"bit": bit}}));
    let found = disagreements(&[base(), bit("c", 2), bit("a", 1), bit("b", 1)]);
    assert_eq!(found, ["proxy.masquerade.bit: a c", "proxy.masquerade.bit: b c"]);
}

#[test]
fn a_disagreement_counts_even_if_a_higher_layer_settles_the_field() {
    let layers = [
        base(),
        layer("a", 7, "", json!({"logLevel": "warn"})),
        layer("b", 7, "", json!({"logLevel": "debug"})),
        layer("top", 8, "", json!({"logLevel": "info"})),
    ];
    assert_eq!(disagreements(&layers), ["proxy.logLevel: a b"]);
}

#[test]
fn the_pool_is_the_highest_layer_and_its_rules_must_be_clear() {
    let mut low = layer("low", 1, "", json!({}));
    low.spec.rollout.paused = true;
    low.spec.drift.interval_seconds = 90;
    let high = layer("high", 2, "", json!({}));
    let layers = [low.clone(), high.clone(), base()];
    assert_eq!(pool(&pile(&layers)).unwrap().name, "high");
    assert!(merge(&pile(&layers)).is_ok(), "what is not used cannot disagree");

    let mut equal = layer("also-high", 2, "", json!({}));
    assert_eq!(
        pool(&pile(&[high.clone(), equal.clone()])).unwrap().name,
        "also-high",
        "the first in name order"
    );
    equal.spec.rollout.paused = true;
    equal.spec.drift.interval_seconds = 90;
    assert_eq!(disagreements(&[base(), high, equal]), ["drift: also-high high", "rollout: also-high high"]);
}

#[test]
fn planned_layers_are_left_out() {
    let mut planned = layer("planned", 9, "", json!({"mode": "ipvs"}));
    planned.spec.enforcement = Enforcement::Plan;
    let layers = [planned, base()];
    assert_eq!(merged(&layers), json!({"mode": "iptables"}));
    assert_eq!(pool(&pile(&layers)).unwrap().name, "default");
}

#[test]
fn a_layer_without_a_selector_selects_nothing() {
    let mut odd = layer("odd", 1, "", json!({}));
    assert!(odd.selects(&BTreeMap::new()));
    odd.spec.node_selector = None;
    assert!(!odd.selects(&BTreeMap::new()));
    assert!(base().selects(&BTreeMap::new()));
}

fn any_proxy() -> impl Strategy<Value = Value> {
    let bit = prop::option::of(0..3i32);
    let all = prop::option::of(any::<bool>());
    let port = prop::option::of(1..3i32);
    let local = prop::option::of(prop_oneof![
        Just(json!({"mode": "NodeCIDR"})),
        Just(json!({"mode": "BridgeInterface", "bridgeInterface": "br0"})),
    ]);
    let addresses = prop::option::of(prop::sample::select(vec!["all", "primary"]));
    (bit, all, port, local, addresses).prop_map(|(bit, all, port, local, addresses)| {
        let mut proxy = json!({"masquerade": {}});
        let mut set = |pointer: &[&str], value: Option<Value>| {
            if let Some(value) = value {
                *pointer.iter().fold(&mut proxy, |object, name| &mut object[*name]) = value;
            }
        };
        set(&["masquerade", "bit"], bit.map(Into::into));
        set(&["masquerade", "all"], all.map(Into::into));
        set(&["healthzPort"], port.map(Into::into));
        set(&["detectLocal"], local);
        set(&["nodePortAddresses"], addresses.map(|address| json!([address])));
        proxy
    })
}

fn any_layers() -> impl Strategy<Value = Vec<Layer>> {
    prop::collection::vec((0..4i32, any_proxy()), 0..6).prop_map(|layers| {
        let mut all = vec![base()];
        let named = |(index, (priority, proxy))| layer(&format!("l{index}"), priority, "", proxy);
        all.extend(layers.into_iter().enumerate().map(named));
        all
    })
}

proptest! {
    #[test]
    fn the_order_of_the_list_does_not_matter(layers in any_layers().prop_flat_map(|layers| {
        (Just(layers.clone()), Just(layers).prop_shuffle())
    })) {
        let (layers, shuffled) = layers;
        prop_assert_eq!(merge(&pile(&layers)), merge(&pile(&shuffled)));
    }

    #[test]
    fn merging_the_result_again_changes_nothing(layers in any_layers()) {
        if let Ok(settings) = merge(&pile(&layers)) {
            let again = layer("default", 0, "", serde_json::to_value(&settings).unwrap());
            prop_assert_eq!(merge(&pile(&[again])).unwrap(), settings);
        }
    }

    #[test]
    fn a_layer_that_repeats_the_result_changes_nothing(layers in any_layers(), priority in 0..5i32) {
        if let Ok(settings) = merge(&pile(&layers)) {
            let mut all = layers;
            let proxy = serde_json::to_value(&settings).unwrap();
            // Above every other, so that it is equal to the winner of each field.
            all.push(layer("echo", 4 + priority, "", proxy));
            prop_assert_eq!(merge(&pile(&all)).unwrap(), settings);
        }
    }

    #[test]
    fn without_equal_priorities_there_is_no_conflict(layers in any_layers()) {
        let mut layers = layers;
        for (index, layer) in layers.iter_mut().enumerate().skip(1) {
            layer.spec.priority = i32::try_from(index).unwrap();
        }
        prop_assert!(merge(&pile(&layers)).is_ok());
    }
}
