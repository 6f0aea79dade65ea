//! A table with every kind of rule, set and element.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use pointsman_agent::nftables::ruleset::{
    self, Chain, ChainType, Columns, DynamicOperation, Element, Hook, Rule, Ruleset, SCTP, Set, Statement,
    TCP, Tuple, Type, UDP, Value, Verdict, goto, jump, key, set_mark, set_priority,
};
use pointsman_crds::proxy_node_status::IpFamily;

use super::table;

pub fn address(family: IpFamily, last: u8) -> Tuple {
    match family {
        IpFamily::IPv4 => Tuple::new().address(Ipv4Addr::new(172, 30, 0, last)),
        IpFamily::IPv6 => Tuple::new().address(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into())),
    }
}

/// What nft 1.0.6 cannot load for IPv6, only list: a packet's client in a key that it writes.
pub fn affinity_rules() -> Vec<Rule> {
    let client = || key([Value::SourceAddress, Value::Priority.and(0xf_ffff)]);
    let dynamic = |operation, set: &'static str, key, timeout, data| {
        Rule::new([Statement::Dynamic { operation, set: set.into(), key, timeout, data }])
    };
    vec![
        dynamic(
            DynamicOperation::Update,
            "affinity",
            client(),
            Some(Duration::from_hours(3)),
            Some(Value::Priority),
        ),
        dynamic(
            DynamicOperation::Add,
            "affinity",
            client(),
            Some(Duration::from_millis(1500)),
            Some(Value::Priority.or(0x10_0000)),
        ),
        dynamic(DynamicOperation::Delete, "affinity", client(), None, Some(Value::Priority)),
    ]
}

fn sets(all: &mut Ruleset) {
    let family = all.table.family;
    let at = |last| address(family, last);
    let word = |word| Tuple::new().word(word);
    let frontend =
        || Columns::Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]);
    let priority = || Columns::Typeof(vec![Value::Priority]);
    all.add_set(Set::map("frontends", frontend(), priority()));
    for (last, protocol, port, data) in
        [(41, TCP, 80, 0x10_0010), (10, UDP, 53, 0x20_0012), (44, SCTP, 3868, 0)]
    {
        let element = Element::new(at(last).protocol(protocol).port(port)).with_data(word(data));
        all.add_element("frontends", element);
    }
    let node_port = Columns::Typeof(vec![Value::Protocol, Value::DestinationPort]);
    all.add_set(Set::map("nodeports", node_port, priority()));
    let element = Element::new(Tuple::new().protocol(TCP).port(30080)).with_data(word(0x40_0010));
    all.add_element("nodeports", element);
    all.add_set(Set::map("groups", priority(), priority()));
    all.add_element("groups", Element::new(word(0x10)).with_data(word(0x100_0010)));
    all.add_set(Set::vmap("classes", priority()));
    for (class, verdict) in [
        (0x100_0000, Verdict::Goto("rules".into())),
        (0x110_0000, Verdict::Jump("rules".into())),
        (0x120_0000, Verdict::Drop),
        (0x130_0000, Verdict::Accept),
        (u32::MAX, Verdict::Return),
    ] {
        all.add_element("classes", Element::new(word(class)).with_verdict(verdict));
    }
    let slot = || Columns::Typeof(vec![Value::Protocol, Value::Priority, Value::Random { below: 65535 }]);
    let endpoint = Columns::Typeof(vec![Value::DestinationAddress, Value::DestinationPort]);
    all.add_set(Set::map("endpoints", slot(), endpoint));
    let index = |index| Tuple::new().protocol(TCP).word(0x10).word(index);
    all.add_element("endpoints", Element::new(index(0)).with_data(at(2).port(8080)));
    all.add_element("endpoints", Element::new(index(1)).with_data(at(3).port(8080)));
    all.add_set(Set::map("slots", slot(), priority()));
    all.add_element("slots", Element::new(index(0)).with_data(word(0x10_0014)));
    let sticky = Columns::Types(vec![Type::Protocol, Type::ClassId]);
    all.add_set(Set::map("sticky", sticky, Columns::Types(vec![Type::Address, Type::Port])));
    all.add_element(
        "sticky",
        Element::new(Tuple::new().protocol(UDP).word(0x10_0014)).with_data(at(4).port(53)),
    );
    let client = Columns::Typeof(vec![Value::SourceAddress, Value::Priority]);
    all.add_set(Set::map("affinity", client, priority()).dynamic(262_144));
    all.add_set(Set::new("cluster-ips", Columns::Types(vec![Type::Address])));
    all.add_element("cluster-ips", Element::new(at(41)));
    all.add_set(Set::new("hairpin", Columns::Types(vec![Type::Address, Type::Address])));
    let itself = Tuple::from_bytes(&at(7).bytes().repeat(2)).unwrap();
    let mut element = Element::new(itself);
    element.extra_mut().comment = Some("itself".to_owned());
    all.add_element("hairpin", element);
    all.add_set(Set::new("sources", Columns::Typeof(vec![Value::Priority, Value::SourceAddress])));
    let network = Tuple::from_bytes(&[word(0x1800_0001).bytes(), at(0).bytes()].concat()).unwrap();
    all.add_element("sources", Element::new(network));
    all.add_set(Set::new("service-cidrs", Columns::Types(vec![Type::Address])).interval());
    for (first, last) in [(0, 15), (32, 32), (40, 42), (128, 255)] {
        all.add_element("service-cidrs", Element::range(at(first), at(last)));
    }
    all.add_set(Set::new("local-sources", Columns::Types(vec![Type::Address])).interval());
    all.add_element("local-sources", Element::range(at(0).zeroed(), at(0).highest()));
    all.add_set(Set::new("bridges", Columns::Types(vec![Type::Interface])));
    all.add_element("bridges", Element::new(Tuple::interface("cni0")));
    all.add_set(Set::new("marks", Columns::Typeof(vec![Value::Mark])));
    all.add_element("marks", Element::new(word(0x4000)));
    all.add_set(Set::new("ports", Columns::Types(vec![Type::Port])));
    all.add_element("ports", Element::new(Tuple::new().port(443)));
    all.add_set(Set::new("names", Columns::Typeof(vec![Value::InputInterface, Value::Protocol])));
}

fn rules(family: IpFamily) -> Vec<Rule> {
    let word = |word| Tuple::new().word(word);
    let at = |last| address(family, last);
    let mask = |bits: u32| match family {
        IpFamily::IPv4 => Tuple::new().address(Ipv4Addr::from(bits)),
        IpFamily::IPv6 => Tuple::new().address(Ipv6Addr::from(u128::from(bits) << 96)),
    };
    let slot = |below| key([Value::Protocol, Value::Priority, Value::Random { below }]);
    let frontend = || key([Value::DestinationAddress, Value::Protocol, Value::DestinationPort]);
    let group = || Value::Priority.and(0xf_ffff);
    let class = || Value::Priority.and(0xfff0_0000);
    [
        vec![
            key([Value::DestinationAddress]).in_set("cluster-ips"),
            set_priority(key([Value::Protocol, Value::DestinationPort]).map("nodeports")),
            goto("empty"),
        ],
        vec![set_priority(frontend().map("frontends")), goto("empty")],
        vec![frontend().in_set("frontends"), ruleset::drop()],
        vec![key([Value::SourceAddress]).not_in_set("local-sources"), set_mark(Value::Mark.or(0x4000))],
        vec![key([Value::SourceAddress]).in_set("service-cidrs"), jump("empty")],
        vec![set_priority(key([group()]).map("groups")), ruleset::return_()],
        vec![set_priority(Value::Priority.or(1))],
        vec![set_priority(Value::Priority.and_or(0xff_ffff, 0x1900_0000))],
        vec![key([Value::Priority, Value::SourceAddress.masked(mask(0xffff_ff80))]).in_set("sources")],
        vec![key([class()]).vmap("classes")],
        vec![
            key([class()]).vmap_of([
                (word(0x10_0000), Verdict::Goto("empty".into())),
                (word(0x20_0000), Verdict::Drop),
            ]),
        ],
        vec![
            key([Value::Protocol, Value::DestinationPort])
                .vmap_of([(Tuple::new().protocol(TCP).port(80), Verdict::Accept)]),
        ],
        vec![class().equals(word(0)), goto("empty")],
        vec![class().differs(word(0)), set_priority(slot(2).map("slots"))],
        vec![Value::Priority.differs(word(0x10_0005)), set_priority(Value::Constant(word(0)))],
        vec![set_mark(Value::Constant(word(5)))],
        vec![
            Value::Mark.has(0x4000),
            set_mark(Value::Mark.xor(0x4000)),
            Statement::Masquerade { fully_random: true },
        ],
        vec![Statement::Masquerade { fully_random: false }],
        vec![Value::CtState.has(Value::CT_NEW), Value::CtStatus.has(Value::CT_DNAT), jump("empty")],
        vec![
            Value::SourceType.equals(word(Value::LOCAL)),
            Value::DestinationType.differs(word(Value::LOCAL)),
        ],
        vec![Value::DestinationAddress.equals(at(1)), Value::SourceAddress.differs(at(2))],
        vec![Value::DestinationAddress.masked(mask(0xfffe_0000)).differs(mask(0x7f00_0000))],
        vec![Value::Protocol.equals(Tuple::new().protocol(UDP)), ruleset::drop()],
        vec![
            Value::Protocol.equals(Tuple::new().protocol(TCP)),
            Value::DestinationPort.equals(Tuple::new().port(80)),
            Statement::Counter,
        ],
        vec![Value::InputInterface.equals(Tuple::interface("cni0"))],
        vec![Value::InputInterface.differs(Tuple::interface_prefix("cali"))],
        vec![key([Value::InputInterface]).in_set("bridges")],
        vec![key([Value::InputInterface, Value::Protocol]).in_set("names")],
        vec![key([Value::SourceAddress, Value::DestinationAddress]).in_set("hairpin")],
        vec![slot(3).dnat("endpoints")],
        vec![key([Value::Protocol, Value::Priority]).dnat("sticky")],
        vec![Statement::Reject],
    ]
    .into_iter()
    .map(Rule::new)
    .chain([Rule::new([Statement::Reject]).commented("a comment")])
    .collect()
}

/// Every form; those of affinity are in [`affinity_rules`].
pub fn everything(family: IpFamily) -> Ruleset {
    let mut all = Ruleset::new(table(family));
    sets(&mut all);
    all.add_chain(Chain::new("empty"), []);
    all.add_chain(Chain::new("rules"), rules(family));
    for (name, kind, hook, priority) in [
        ("filter-prerouting", ChainType::Filter, Hook::Prerouting, -110),
        ("filter-input", ChainType::Filter, Hook::Input, 0),
        ("filter-forward", ChainType::Filter, Hook::Forward, 0),
        ("nat-prerouting", ChainType::Nat, Hook::Prerouting, -101),
        ("nat-output", ChainType::Nat, Hook::Output, -101),
        ("nat-postrouting", ChainType::Nat, Hook::Postrouting, 99),
    ] {
        all.add_chain(Chain::base(name, kind, hook, priority), [Rule::new([jump("empty")])]);
    }
    all
}
