use serde_json::{Value, json};

use super::*;

#[allow(clippy::needless_pass_by_value, reason = "called with json!")]
fn service(name: &str, spec: Value) -> Change {
    let object = json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec});
    Change::ServiceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

fn slice(name: &str, mut object: Value) -> Change {
    object["metadata"] = json!({"namespace": "ns", "name": name, "labels": object["labels"]});
    Change::SliceApplied(Box::new(serde_json::from_value(object).unwrap()))
}

fn reasons(dirty: &Dirty) -> Vec<&str> {
    dirty.skipped.iter().map(|skipped| skipped.reason.as_str()).collect()
}

#[test]
fn lb_4_addresses_are_canonical() {
    assert_eq!(parse_address("192.168.099.022"), Some([192, 168, 99, 22].into()));
    assert_eq!(parse_address(" 010.000.0.1 "), Some([10, 0, 0, 1].into()), "decimal, not octal");
    assert_eq!(parse_address("::ffff:10.0.0.1"), Some([10, 0, 0, 1].into()));
    assert_eq!(parse_address("2001:DB8:0::1"), "2001:db8::1".parse().ok());
    assert_eq!(parse_network(" 010.001.2.3/16 "), "10.1.0.0/16".parse().ok());
    for bad in ["", "1.2.3", "1.2.3.4.5", "1.2.3.256", "1.2.3.+4", "a.b.c.d", "1.2.3.4/8", "fe80::1%eth0"] {
        assert_eq!(parse_address(bad), None, "{bad}");
    }
    for bad in ["10.0.0.0", "10.0.0.0/33", "10.0.0.0/", "/8", "::/129"] {
        assert_eq!(parse_network(bad), None, "{bad}");
    }
}

// ids: TRK-1
#[test]
fn trk_services_without_a_virtual_address_are_forgotten() {
    let mut model = Model::new();
    let spec = json!({"clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]});
    let name = ObjectName::new("ns", "s");
    assert!(!model.apply(service("s", spec.clone())).is_empty());
    assert!(model.apply(service("s", spec.clone())).is_empty(), "no change");
    for other in [
        json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": [{"port": 80}]}),
        json!({"type": "ExternalName", "externalName": "example.com", "ports": [{"port": 80}]}),
        json!({"clusterIP": "", "ports": [{"port": 80}]}),
        json!({"clusterIPs": ["10.96.0.1"], "ports": []}),
    ] {
        model.apply(service("s", spec.clone()));
        assert!(model.apply(service("s", other.clone())).services.contains(&name), "{other}");
        assert!(model.service(&name).is_none());
        assert!(model.apply(service("s", other)).is_empty());
    }
}

// ids: TRK-1 TRK-8
#[test]
fn trk_what_makes_no_sense_is_skipped_and_the_rest_served() {
    let mut model = Model::new();
    let dirty = model.apply(service(
        "s",
        json!({
            "type": "LoadBalancer",
            "clusterIPs": ["10.96.0.1", "nonsense"],
            "externalIPs": ["198.51.100.1", "0.0.0.0", "1.2.3.400"],
            "loadBalancerSourceRanges": ["10.0.0.0/8", "10.0.0.0/99"],
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 70_000,
            "ports": [
                {"name": "good", "port": 80, "nodePort": 99_999},
                {"name": "zero", "port": 0},
                {"name": "negative", "port": -1},
                {"name": "odd", "port": 81, "protocol": "ICMP"},
                {"name": "twice", "port": 80},
            ],
        }),
    ));
    assert_eq!(dirty.skipped.len(), 9, "{:?}", reasons(&dirty));
    assert!(
        dirty
            .skipped
            .iter()
            .all(|skipped| (skipped.kind, skipped.name.to_string()) == ("Service", "ns/s".to_owned()))
    );
    let service = model.service(&ObjectName::new("ns", "s")).unwrap();
    assert_eq!(service.ports.len(), 1);
    assert_eq!(service.ports[0].node_port, None);
    assert_eq!(service.external_ips.len(), 1);
    assert_eq!(service.health_check_node_port, None);

    let owner = json!({"kubernetes.io/service-name": "s"});
    let dirty = model.apply(slice(
        "s-1",
        json!({
            "labels": owner, "addressType": "IPv4",
            "ports": [{"name": "good", "port": 8080}, {"name": "zero", "port": 0}, {"port": 1}, {"name": "all"}],
            "endpoints": [
                {"addresses": ["10.244.0.1"]}, {"addresses": []}, {"addresses": ["fd00::1"]},
                {"addresses": ["example.com"]}, {"addresses": ["127.0.0.1"]},
            ],
        }),
    ));
    assert_eq!(dirty.skipped.len(), 4, "{:?}", reasons(&dirty));
    let name = ObjectName::new("ns", "s");
    let read: Vec<&Slice> = model.slices(&name).collect();
    assert_eq!((read[0].ports.len(), read[0].endpoints.len()), (1, 1));
    let endpoint = &read[0].endpoints[0];
    assert!(endpoint.ready && endpoint.serving && !endpoint.terminating, "what is not said is assumed");

    for (labels, kind) in [(owner, "FQDN"), (json!({}), "IPv4")] {
        let object =
            json!({"labels": labels, "addressType": kind, "endpoints": [{"addresses": ["example.com"]}]});
        assert_eq!(model.apply(slice("s-2", object)).skipped.len(), 1);
    }
    assert_eq!(model.slices(&name).count(), 1);
}

#[test]
fn a_slice_gives_its_endpoints_a_weight() {
    let owner = json!({"kubernetes.io/service-name": "s"});
    let mut object = json!({
        "metadata": {"namespace": "ns", "name": "s-1", "labels": owner}, "addressType": "IPv4",
        "ports": [{"name": "p", "port": 80}], "endpoints": [{"addresses": ["10.244.0.1"]}],
    });
    let name = ObjectName::new("ns", "s");
    for (text, weight, faults) in [
        (None, 1, 0),
        (Some("5"), 5, 0),
        (Some("65535"), 65_535, 0),
        (Some("0"), 1, 1),
        (Some("65536"), 1, 1),
        (Some("-1"), 1, 1),
        (Some("many"), 1, 1),
        (Some(""), 1, 1),
    ] {
        object["metadata"]["annotations"] =
            text.map_or(json!({}), |text| json!({"pointsman.dev/weight": text}));
        let mut model = Model::new();
        let slice = serde_json::from_value(object.clone()).unwrap();
        let dirty = model.apply(Change::SliceApplied(Box::new(slice)));
        assert_eq!(dirty.skipped.len(), faults, "{text:?}: {:?}", reasons(&dirty));
        let read = model.slices(&name).next().unwrap();
        assert_eq!(read.endpoints[0].weight.get(), weight, "{text:?}");
    }
}

// ids: CIP-17 TRK-8
#[test]
fn cip_17_a_slice_that_becomes_headless_or_changes_hands_is_followed() {
    let mut model = Model::new();
    let object = |labels: Value| {
        slice(
            "x",
            json!({"labels": labels, "addressType": "IPv4", "endpoints": [{"addresses": ["10.244.0.1"]}]}),
        )
    };
    let (one, two) = (ObjectName::new("ns", "one"), ObjectName::new("ns", "two"));
    model.apply(object(json!({"kubernetes.io/service-name": "one"})));
    let dirty = model.apply(object(json!({"kubernetes.io/service-name": "two"})));
    assert_eq!(dirty.services.into_iter().collect::<Vec<_>>(), [one.clone(), two.clone()]);
    assert_eq!((model.slices(&one).count(), model.slices(&two).count()), (0, 1));
    model.apply(object(json!({"kubernetes.io/service-name": "two", "service.kubernetes.io/headless": ""})));
    assert_eq!(model.slices(&two).count(), 0);
    assert!(model.apply(Change::SliceDeleted(ObjectName::new("ns", "unknown"))).is_empty());
}

// ids: TRK-9
#[test]
fn the_health_check_port_goes_with_type_and_policy() {
    let mut model = Model::new();
    let name = ObjectName::new("ns", "s");
    for (kind, policy, expected) in [
        ("ClusterIP", "", None),
        ("LoadBalancer", "Local", Some(31_000)),
        ("LoadBalancer", "Cluster", None),
        ("LoadBalancer", "Local", Some(31_000)),
        ("NodePort", "Local", None),
        ("ClusterIP", "", None),
    ] {
        let spec = json!({
            "type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 31_000,
            "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}],
        });
        assert!(!model.apply(service("s", spec.clone())).is_empty());
        assert!(model.apply(service("s", spec)).is_empty(), "the same again");
        assert_eq!(model.service(&name).unwrap().health_check_node_port, expected, "{kind} {policy}");
    }
}

// ids: TRK-3
#[test]
fn trk_nothing_is_left_after_everything_is_gone() {
    let mut model = Model::new();
    for round in 0..200 {
        let name = format!("s{round}");
        model.apply(service(&name, json!({"clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]})));
        model.apply(slice(
            &name,
            json!({
                "labels": {"kubernetes.io/service-name": name}, "addressType": "IPv4",
                "endpoints": [{"addresses": ["10.244.0.1"], "nodeName": name, "hints": {"forZones": [{"name": name}]}}],
            }),
        ));
        model.apply(Change::SliceDeleted(ObjectName::new("ns", name.clone())));
        model.apply(Change::ServiceDeleted(ObjectName::new("ns", name)));
    }
    assert!(model.services.is_empty() && model.slices.is_empty() && model.owners.is_empty());
    assert!(model.strings.values.len() <= 64 && model.hints.values.len() <= 64, "shared values are swept");
}

#[test]
fn an_endpoint_is_small() {
    assert!(std::mem::size_of::<Endpoint>() <= 48, "100,000 endpoints need less than 5 MiB");
}

// ids: NM-3 NM-5 TOP-5 CFG-6
#[test]
fn nm_a_heartbeat_of_the_node_changes_nothing() {
    let node = |beat: &str, zone: &str| {
        let object = json!({
            "metadata": {"name": "n", "resourceVersion": beat, "labels": {"topology.kubernetes.io/zone": zone}},
            "spec": {"podCIDR": "10.244.1.0/24"},
            "status": {"addresses": [
                {"type": "Hostname", "address": "n"}, {"type": "ExternalIP", "address": "203.0.113.1"},
                {"type": "InternalIP", "address": "192.168.0.1"}, {"type": "InternalIP", "address": "fd00::1"},
            ]},
        });
        NodeFacts::from_node(&serde_json::from_value(object).unwrap())
    };
    let facts = node("1", "a");
    assert_eq!(
        facts.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["192.168.0.1", "fd00::1", "203.0.113.1"]
    );
    assert_eq!(facts.pod_cidrs.len(), 1);
    let mut model = Model::new();
    assert!(model.apply(Change::Node(facts)).everything);
    assert!(model.apply(Change::Node(node("2", "a"))).is_empty());
    assert!(model.apply(Change::Node(node("3", ""))).everything);
    assert_eq!(model.node().zone, None);
}
