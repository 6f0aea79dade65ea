//! The text of every kind of rule, set and element.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::super::ruleset::{self, SCTP, TCP, Table, UDP, goto, jump, key, set_mark, set_priority};
use super::*;

const V4: IpFamily = IpFamily::IPv4;

fn says(statements: impl IntoIterator<Item = Statement>) -> String {
    rule(&Rule::new(statements), V4)
}

#[test]
fn rules_are_written_as_nft_lists_them() {
    let address = |octets: [u8; 4]| Tuple::new().address(octets);
    let word = |word| Tuple::new().word(word);
    let known_client = key([Value::SourceAddress, Value::Priority.and(0xf_ffff)]);
    let update = Statement::Dynamic {
        operation: DynamicOperation::Update,
        set: "affinity".into(),
        key: known_client.clone(),
        timeout: Some(Duration::from_hours(3)),
        data: Some(Value::Priority),
    };
    let forget = Statement::Dynamic {
        operation: DynamicOperation::Delete,
        set: "affinity".into(),
        key: known_client.clone(),
        timeout: None,
        data: None,
    };
    let short = Statement::Dynamic {
        operation: DynamicOperation::Add,
        set: "seen".into(),
        key: key([Value::SourceAddress]),
        timeout: Some(Duration::from_millis(1500)),
        data: None,
    };
    let lines = [
        says([
            key([Value::DestinationAddress]).in_set("nodeport-ips"),
            set_priority(key([Value::Protocol, Value::DestinationPort]).map("nodeports")),
            goto("dispatch"),
        ]),
        says([key([Value::SourceAddress]).not_in_set("local-sources"), set_mark(Value::Mark.or(0x4000))]),
        says([set_priority(Value::Priority.and(0xf_ffff)), ruleset::return_()]),
        says([set_priority(Value::Priority.and_or(0xff_ffff, 0x1900_0000)), ruleset::drop()]),
        says([key([Value::Priority.and(0xfff0_0000)]).vmap("classes")]),
        says([key([Value::Priority.and(0xfff0_0000)])
            .vmap_of([(word(0x20_0000), Verdict::Accept), (word(0x10_0000), Verdict::Jump("a".into()))])]),
        says([Value::Priority.and(0xfff0_0000).equals(word(0)), goto("pick")]),
        says([Value::Priority.differs(word(u32::MAX)), set_priority(Value::Constant(word(0)))]),
        says([Value::Mark.has(0x4000), set_mark(Value::Mark.xor(0x4000))]),
        says([Value::CtState.has(Value::CT_NEW), Value::CtStatus.has(Value::CT_DNAT), jump("services")]),
        says([Value::SourceType.equals(word(Value::LOCAL)), Value::DestinationType.differs(word(1))]),
        says([Value::DestinationAddress.masked(address([255, 0, 0, 0])).differs(address([127, 0, 0, 0]))]),
        says([key([Value::Priority, Value::SourceAddress.masked(address([255, 255, 255, 128]))])
            .in_set("sources")]),
        says([
            Value::Protocol.equals(Tuple::new().protocol(UDP)),
            Value::DestinationPort.equals(Tuple::new().port(53)),
        ]),
        says([Value::InputInterface.equals(Tuple::interface("cni0")), Statement::Counter]),
        says([Value::InputInterface.differs(Tuple::interface_prefix("cali"))]),
        says([update]),
        says([forget]),
        says([short]),
        says([key([Value::Protocol, Value::Priority, Value::Random { below: 3 }]).dnat("endpoints")]),
        says([Statement::Masquerade { fully_random: true }]),
        says([Statement::Masquerade { fully_random: false }]),
        rule(&Rule::new([Statement::Reject]).commented("says \"no\""), V4),
    ];
    insta::assert_snapshot!("rules", lines.join("\n"));
}

#[test]
fn a_table_is_written_as_nft_lists_it() {
    for (family, name) in [(IpFamily::IPv4, "ip"), (IpFamily::IPv6, "ip6")] {
        insta::assert_snapshot!(name, ruleset(&example(family)));
    }
}

/// A table with every kind of set and element.
pub(in crate::nftables) fn example(family: IpFamily) -> Ruleset {
    let address = |last: u8| match family {
        IpFamily::IPv4 => Tuple::new().address(Ipv4Addr::new(172, 30, 0, last)),
        IpFamily::IPv6 => Tuple::new().address(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into())),
    };
    let mut table = Ruleset::new(Table::new(family, "pointsman"));
    let frontend =
        || Columns::Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]);
    table.add_set(Set::map("frontends", frontend(), Columns::Typeof(vec![Value::Priority])));
    for (last, protocol, port, word) in
        [(41, TCP, 80, 0x10_0010), (10, UDP, 53, 0x20_0012), (44, SCTP, 3868, 0)]
    {
        let element =
            Element::new(address(last).protocol(protocol).port(port)).with_data(Tuple::new().word(word));
        table.add_element("frontends", element);
    }
    table.add_set(Set::vmap("classes", Columns::Typeof(vec![Value::Priority])));
    let class = |word| Element::new(Tuple::new().word(word));
    table.add_element("classes", class(0x100_0000).with_verdict(Verdict::Goto("n2".into())));
    table.add_element("classes", class(0x110_0000).with_verdict(Verdict::Drop));
    let slot = vec![Value::Protocol, Value::Priority, Value::Random { below: 65535 }];
    let endpoint = vec![Value::DestinationAddress, Value::DestinationPort];
    table.add_set(Set::map("endpoints", Columns::Typeof(slot), Columns::Typeof(endpoint)));
    let index = Tuple::new().protocol(TCP).word(0x10).word(1);
    table.add_element("endpoints", Element::new(index).with_data(address(2).port(8080)));
    table.add_set(Set::map(
        "sticky",
        Columns::Types(vec![Type::Protocol, Type::ClassId]),
        Columns::Types(vec![Type::Address, Type::Port]),
    ));
    let client = Columns::Typeof(vec![Value::SourceAddress, Value::Priority]);
    table.add_set(Set::map("affinity", client, Columns::Typeof(vec![Value::Priority])).dynamic(262_144));
    table.add_set(Set::new("hairpin", Columns::Types(vec![Type::Address, Type::Address])));
    let both = Tuple::from_bytes(&address(7).bytes().repeat(2)).unwrap();
    let mut element = Element::new(both);
    element.extra_mut().comment = Some("itself".to_owned());
    table.add_element("hairpin", element);
    table.add_set(Set::new("service-cidrs", Columns::Types(vec![Type::Address])).interval());
    table.add_element("service-cidrs", Element::range(address(0), address(15)));
    table.add_element("service-cidrs", Element::range(address(32), address(32)));
    table.add_element("service-cidrs", Element::range(address(40), address(42)));
    table.add_element("service-cidrs", Element::range(address(128).highest(), address(0).highest()));
    table.add_set(Set::new("bridges", Columns::Types(vec![Type::Interface])));
    table.add_element("bridges", Element::new(Tuple::interface("cni0")));
    table.add_chain(Chain::new("n2"), [Rule::new([Statement::Reject])]);
    table.add_chain(
        Chain::base("nat-prerouting", ChainType::Nat, Hook::Prerouting, -101),
        [Rule::new([key([Value::Priority]).vmap("classes")]).commented("hello")],
    );
    table.add_chain(Chain::base("filter-output", ChainType::Filter, Hook::Output, 0), []);
    table
}
