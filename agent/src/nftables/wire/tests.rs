//! Round trips through the kernel's form, errors found again, and bytes of any kind.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::netlink::{Body, messages};
use crate::nftables::ruleset::{
    Chain, ChainType, Columns, DataType, DynamicOperation, Element, Flags, Hook, Key, Operation, Operator,
    Origin, Rule, Set, Statement, Table, Transaction, Tuple, VerdictMap,
};

pub(in crate::nftables) fn table(family: IpFamily) -> Table {
    Table::new(family, "pointsman")
}

fn families() -> impl Strategy<Value = IpFamily> {
    prop_oneof![Just(IpFamily::IPv4), Just(IpFamily::IPv6)]
}

fn names() -> impl Strategy<Value = Name> {
    "[a-z][a-z0-9-]{0,20}".prop_map(Name::from)
}

fn loads() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::SourceAddress),
        Just(Value::DestinationAddress),
        Just(Value::DestinationPort),
        Just(Value::Protocol),
        Just(Value::Mark),
        Just(Value::Priority),
        Just(Value::InputInterface),
        Just(Value::CtState),
        Just(Value::CtStatus),
        Just(Value::SourceType),
        Just(Value::DestinationType),
        (1_u32..).prop_map(|below| Value::Random { below }),
    ]
}

fn words() -> impl Strategy<Value = Value> {
    let plain = prop_oneof![Just(Value::Mark), Just(Value::Priority), Just(Value::CtState)];
    (plain, any::<u32>(), any::<u32>()).prop_map(|(value, mask, bits)| value.and_or(mask, bits))
}

fn keys() -> impl Strategy<Value = Key> {
    // Two interfaces and two IPv6 addresses fill all registers.
    vec(prop_oneof![loads(), words()], 1..4).prop_map(Key)
}

fn constants() -> impl Strategy<Value = Tuple> {
    vec(any::<u8>(), 1..=32).prop_map(|bytes| Tuple::from_bytes(&bytes).unwrap())
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        loads(),
        words(),
        any::<u32>().prop_map(|word| Value::Constant(Tuple::new().word(word))),
        (keys(), names()).prop_map(|(key, map)| Value::Mapped { key, map }),
    ]
}

fn verdicts() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Accept),
        Just(Verdict::Drop),
        Just(Verdict::Return),
        names().prop_map(Verdict::Jump),
        names().prop_map(Verdict::Goto),
    ]
}

fn timeouts() -> impl Strategy<Value = Duration> {
    (1_u64..1 << 40).prop_map(Duration::from_millis)
}

/// Maps in rules have names here: what the kernel calls the others is known only when all is read.
fn statements() -> impl Strategy<Value = Statement> {
    let operators = prop_oneof![Just(Operator::Equal), Just(Operator::NotEqual)];
    let operations = prop_oneof![
        Just(DynamicOperation::Add),
        Just(DynamicOperation::Update),
        Just(DynamicOperation::Delete)
    ];
    prop_oneof![
        (values(), operators, constants()).prop_map(|(value, operator, to)| Statement::Compare {
            value,
            operator,
            to
        }),
        (keys(), names(), any::<bool>()).prop_map(|(key, set, inverted)| Statement::Lookup {
            key,
            set,
            inverted
        }),
        (keys(), names()).prop_map(|(key, map)| Statement::VerdictMap { key, map: VerdictMap::Named(map) }),
        values().prop_map(Statement::SetMark),
        values().prop_map(Statement::SetPriority),
        (
            operations,
            names(),
            vec(prop_oneof![loads(), words()], 1..3),
            option::of(timeouts()),
            option::of(words())
        )
            .prop_map(|(operation, set, key, timeout, data)| Statement::Dynamic {
                operation,
                set,
                key: Key(key),
                timeout,
                data
            }),
        (keys(), names()).prop_map(|(key, map)| Statement::Dnat { key, map }),
        any::<bool>().prop_map(|fully_random| Statement::Masquerade { fully_random }),
        Just(Statement::Reject),
        Just(Statement::Counter),
        verdicts().prop_map(Statement::Verdict),
    ]
}

fn comments() -> impl Strategy<Value = Option<String>> {
    option::of("[ -~]{0,127}")
}

fn rules() -> impl Strategy<Value = Rule> {
    (vec(statements(), 0..6), comments()).prop_map(|(statements, comment)| Rule { statements, comment })
}

fn columns() -> impl Strategy<Value = Columns> {
    let plain = prop_oneof![
        Just(Value::SourceAddress),
        Just(Value::DestinationAddress),
        Just(Value::DestinationPort),
        Just(Value::Protocol),
        Just(Value::Mark),
        Just(Value::Priority),
        Just(Value::InputInterface),
        any::<u32>().prop_map(|below| Value::Random { below }),
    ];
    let types = prop_oneof![
        Just(Type::Address),
        Just(Type::Protocol),
        Just(Type::Port),
        Just(Type::Mark),
        Just(Type::ClassId),
        Just(Type::Interface),
        Just(Type::CtState),
        Just(Type::CtStatus),
        Just(Type::AddressType),
        Just(Type::Integer),
    ];
    prop_oneof![vec(plain, 1..5).prop_map(Columns::Typeof), vec(types, 1..5).prop_map(Columns::Types)]
}

fn sets() -> impl Strategy<Value = Set> {
    let data = option::of(prop_oneof![columns().prop_map(DataType::Columns), Just(DataType::Verdict)]);
    let flags = any::<(bool, bool, bool, bool)>().prop_map(|(interval, dynamic, timeout, counter)| Flags {
        interval,
        dynamic,
        timeout,
        counter,
    });
    (names(), columns(), data, flags, option::of(1_u32..)).prop_map(|(name, key, data, flags, size)| Set {
        name,
        key,
        data,
        flags,
        size,
    })
}

fn elements() -> impl Strategy<Value = Element> {
    let value = option::of(prop_oneof![constants().prop_map(Ok), verdicts().prop_map(Err)]);
    (constants(), value, option::of(timeouts()), comments()).prop_map(|(key, value, timeout, comment)| {
        let mut element = Element::new(key);
        match value {
            Some(Ok(data)) => element = element.with_data(data),
            Some(Err(verdict)) => element = element.with_verdict(verdict),
            None => {}
        }
        if timeout.is_some() || comment.is_some() {
            element.extra_mut().timeout = timeout;
            element.extra_mut().comment = comment;
        }
        element
    })
}

fn batch(family: IpFamily, operations: impl IntoIterator<Item = Operation>) -> (Transaction, Batch) {
    let mut transaction = Transaction::default();
    for (operation, origin) in operations.into_iter().zip(0..) {
        transaction.push(operation, Origin(origin));
    }
    let batch = Batch::new(&table(family), &transaction, 7, &[]);
    (transaction, batch)
}

/// The messages of a batch: kind, number, and content.
fn contents(batch: &Batch) -> Vec<(u16, u32, Vec<u8>)> {
    messages(&batch.bytes)
        .map(|message| {
            let message = message.unwrap();
            let Body::Other { kind, payload } = message.body else { panic!("{message:?}") };
            (kind, message.sequence, payload.to_vec())
        })
        .collect()
}

fn only(family: IpFamily, operation: Operation) -> Vec<u8> {
    let (_, batch) = batch(family, [operation]);
    let [_, (_, 8, payload), _] = &contents(&batch)[..] else { panic!("{batch:?}") };
    payload.clone()
}

proptest! {
    #[test]
    fn rules_come_back(family in families(), rule in rules()) {
        let operation = Operation::AddRule { chain: "chain".into(), rule: rule.clone() };
        let (chain, read) = super::rule(&only(family, operation), family).unwrap();
        prop_assert_eq!(chain, "chain");
        prop_assert_eq!(read, Ok(rule));
    }

    #[test]
    fn sets_come_back(family in families(), set in sets()) {
        let read = super::set(&only(family, Operation::AddSet(set.clone())), family).unwrap();
        prop_assert_eq!(read, ReadSet { name: set.name.clone(), inline: false, count: None, set: Ok(set) });
    }

    #[test]
    fn ranges_come_back(family in families(), bounds in btree_map(any::<u32>(), any::<bool>(), 0..40)) {
        // Ranges from every other bound to the next one, or to just before that.
        let address = |bits: u32| match family {
            IpFamily::IPv4 => Tuple::new().address(std::net::Ipv4Addr::from(bits)),
            IpFamily::IPv6 => Tuple::new().address(std::net::Ipv6Addr::from(u128::from(bits) << 96 | 7)),
        };
        let bounds: Vec<_> = bounds.into_iter().collect();
        let ranges: Vec<_> = bounds
            .windows(2)
            .step_by(2)
            .map(|pair| Element::range(address(pair[0].0), address(pair[1].0)))
            .collect();
        let tagged = ranges.iter().cloned().map(|element| (element, Origin::NONE)).collect();
        let (_, batch) = batch(family, [Operation::AddElements { set: "set".into(), elements: tagged }]);
        let mut read = Vec::new();
        for (kind, _, payload) in contents(&batch) {
            if kind == NEW_ELEMENT {
                read.extend(super::elements(&payload).unwrap());
            }
        }
        read.reverse();
        prop_assert_eq!(super::ranges(read), ranges);
    }

    #[test]
    fn chains_come_back(family in families(), name in names(), priority in any::<i32>(), hook in 0_usize..5, nat: bool) {
        let hooks = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting];
        let kind = if nat { ChainType::Nat } else { ChainType::Filter };
        for chain in [Chain::new(name.clone()), Chain::base(name.clone(), kind, hooks[hook], priority)] {
            let payload = only(family, Operation::AddChain(chain.clone()));
            prop_assert_eq!(super::chain(&payload), Ok((name.clone(), Ok(chain))));
            let number = if family == IpFamily::IPv4 { 2 } else { 10 };
            prop_assert_eq!(super::table_of(&payload), Ok((number, "pointsman".to_owned())));
        }
    }

    #[test]
    fn any_bytes_are_survived(bytes in vec(any::<u8>(), 0..300), family in families()) {
        survive(&bytes, family);
    }

    #[test]
    fn damaged_messages_are_survived(
        rule in rules(), set in sets(), element in elements(), family in families(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        for operation in [
            Operation::AddRule { chain: "chain".into(), rule },
            Operation::AddSet(set),
            Operation::AddElements { set: "set".into(), elements: vec![(element, Origin::NONE)] },
        ] {
            let mut payload = only(family, operation);
            for (at, byte) in &damage {
                let at = at.index(payload.len());
                payload[at] = *byte;
            }
            survive(&payload, family);
        }
    }
}

proptest! {
    // Each case is of a thousand elements.
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn elements_come_back(family in families(), all in vec(elements(), 0..1200)) {
        let tagged = all.iter().cloned().zip((0..).map(Origin)).collect();
        let (_, batch) = batch(family, [Operation::AddElements { set: "set".into(), elements: tagged }]);
        let mut read = Vec::new();
        for (kind, _, payload) in contents(&batch) {
            if kind == NEW_ELEMENT {
                prop_assert!(payload.len() < 65_536);
                read.extend(super::elements(&payload).unwrap().into_iter().map(|read| read.element));
            }
        }
        prop_assert_eq!(read, all);
    }
}

fn survive(bytes: &[u8], family: IpFamily) {
    for message in messages(bytes) {
        let _ = message;
    }
    let _ = super::table_of(bytes);
    let _ = super::generation(bytes);
    let _ = super::table_flags(bytes);
    let _ = super::chain(bytes);
    let _ = super::rule(bytes, family);
    let _ = super::set(bytes, family);
    if let Ok(read) = super::elements(bytes) {
        let _ = super::ranges(read);
    }
}

#[test]
fn a_batch_is_numbered_and_answered_once() {
    let (_, batch) = batch(IpFamily::IPv4, [Operation::AddTable, Operation::AddChain(Chain::new("a"))]);
    let kinds: Vec<_> = contents(&batch).iter().map(|(kind, sequence, _)| (*kind, *sequence)).collect();
    assert_eq!(kinds, [(BATCH_BEGIN, 7), (NEW_TABLE, 8), (NEW_CHAIN, 9), (BATCH_END, 10)]);
    assert_eq!(batch.last(), 9);
    let acknowledged: Vec<_> = messages(&batch.bytes)
        .zip([0, 20, 20 + 20 + 16 + 8])
        .map(|(_, start)| u16::from_ne_bytes(batch.bytes[start + 6..start + 8].try_into().unwrap()) & 4)
        .collect();
    assert_eq!(acknowledged, [0, 0, 4]);
    let (_, nothing) = self::batch(IpFamily::IPv4, []);
    assert!(nothing.is_empty());
}

#[test]
fn errors_are_found_again() {
    let element = |number: u32| (Element::new(Tuple::new().word(number)), Origin(number));
    let range = |number: u8| {
        let address = |last| Tuple::new().address([10, 0, number, last]);
        (Element::range(address(0), address(9)), Origin(number.into()))
    };
    let (transaction, batch) = batch(
        IpFamily::IPv4,
        [
            Operation::AddTable,
            Operation::AddElements { set: "many".into(), elements: (0..1100).map(element).collect() },
            Operation::DeleteElements { set: "ranges".into(), elements: (0..4).map(range).collect() },
        ],
    );
    // Begin, table, three messages of the many, one of the ranges, end.
    let starts: Vec<_> = {
        let mut at = 0;
        contents(&batch)
            .iter()
            .map(|(_, _, payload)| {
                let start = at;
                at += 16 + payload.len();
                start
            })
            .collect()
    };
    assert_eq!(starts.len(), 7);
    let place = |sequence, offset| batch.place(&transaction, sequence, offset);
    assert_eq!(place(7, None), None);
    assert_eq!(place(8, None), Some(Place { operation: 0, element: None }));
    assert_eq!(place(10, None), Some(Place { operation: 1, element: None }));
    assert_eq!(place(12, None), Some(Place { operation: 2, element: None }));
    assert_eq!(place(13, None), None);
    // Without an offset, the elements in doubt are written apart.
    let segments: Vec<_> = [8, 10, 12].into_iter().filter_map(|sequence| batch.segment(sequence)).collect();
    let segment = |operation, elements| Segment { operation, elements };
    assert_eq!(segments, [segment(1, 500..1000), segment(2, 0..4)]);
    let finely = Batch::new(&table(IpFamily::IPv4), &transaction, 7, &segments);
    let place_finely = |sequence| finely.place(&transaction, sequence, None);
    assert_eq!(finely.last(), 8 + 1 + 500 + 1 + 4);
    assert_eq!(place_finely(9), Some(Place { operation: 1, element: None }));
    assert_eq!(place_finely(10), Some(Place { operation: 1, element: Some(500) }));
    assert_eq!(place_finely(509), Some(Place { operation: 1, element: Some(999) }));
    assert_eq!(finely.segment(510), Some(segment(1, 1000..1100)));
    assert_eq!(place_finely(514), Some(Place { operation: 2, element: Some(3) }));
    // Headers, the names of table and set, the head of the list; then items of 16 and 20 bytes.
    let many = 16 + 4 + 16 + 12 + 4;
    for (sequence, item, element) in [(9, 0, 0), (9, 499, 499), (10, 0, 500), (11, 99, 1099)] {
        let offset = many + item * 16;
        assert_eq!(place(sequence, Some(offset)), Some(Place { operation: 1, element: Some(element) }));
        assert_eq!(place(sequence, Some(offset + 15)), Some(Place { operation: 1, element: Some(element) }));
    }
    assert_eq!(place(11, Some(many + 100 * 16)), Some(Place { operation: 1, element: None }));
    // A range is two items, the second with a flag of 8 bytes.
    for (item, element) in [(0, 0), (16, 0), (16 + 24, 1), (2 * 40 + 16, 2), (3 * 40, 3)] {
        assert_eq!(place(12, Some(many + item)), Some(Place { operation: 2, element: Some(element) }));
    }
}

#[test]
fn sets_are_declared_as_nft_does() {
    // From a dump of what nft 1.0.6 makes of `typeof ip daddr . meta l4proto . th dport : meta priority`.
    let frontends = Set::map(
        "frontends",
        Columns::Typeof(vec![Value::DestinationAddress, Value::Protocol, Value::DestinationPort]),
        Columns::Typeof(vec![Value::Priority]),
    );
    let hex = |bytes: Vec<u8>| bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    assert_eq!(
        hex(userdata::encode_set(&frontends, IpFamily::IPv4)),
        "000400000000010401000000\
         034400040d000000013c0014000407000000010c00040c00000001040c000000010e0004090000000106000410000000021400\
         0407000000010c00040b000000010402000000\
         040e0004090000000106000402000000\
         060400000000"
    );
    // `type ipv4_addr; flags interval; auto-merge`
    let cidrs = Set::new("service-cidrs", Columns::Types(vec![Type::Address])).interval();
    assert_eq!(hex(userdata::encode_set(&cidrs, IpFamily::IPv4)), "000402000000020401000000");
    // `typeof meta priority : verdict`
    let classes = Set::vmap("classes", Columns::Typeof(vec![Value::Priority]));
    assert_eq!(
        hex(userdata::encode_set(&classes, IpFamily::IPv4)),
        "000401000000010400000000030e000409000000010600040200000004080004010000000100060400000000"
    );
    assert_eq!(columns_number(&[Type::Protocol, Type::ClassId, Type::Integer], IpFamily::IPv4), 0xc5c4);
    assert_eq!(columns_number(&[Type::Address, Type::Protocol, Type::Port], IpFamily::IPv6), 0x830d);
}

#[test]
fn what_is_not_ours_is_named() {
    let rule = |expressions: &dyn Fn(&mut Encoder)| {
        let mut encoder = Encoder::default();
        encoder.string(2, "chain");
        encoder.nested(4, |to| expressions(to));
        let payload = [&[2, 0, 0, 0][..], &encoder.finish()].concat();
        super::rule(&payload, IpFamily::IPv4).unwrap().1.unwrap_err().to_string()
    };
    let expression = |to: &mut Encoder, name: &str, fill: &dyn Fn(&mut Encoder)| {
        to.nested(1, |to| {
            to.string(1, name);
            to.nested(2, |to| fill(to));
        });
    };
    assert!(rule(&|to| expression(to, "log", &|_| {})).contains("the expression log"));
    let unused = rule(&|to| {
        expression(to, "meta", &|to| {
            to.number(1, 8);
            to.number(2, 3);
        });
    });
    assert!(unused.contains("does not use"), "{unused}");
    let empty = rule(&|to| {
        expression(to, "meta", &|to| {
            to.number(2, 3);
            to.number(3, 8);
        });
    });
    assert!(empty.contains("register 8 is used without being loaded"), "{empty}");
}

#[test]
fn a_map_in_a_rule_comes_before_it() {
    let cases = BTreeMap::from([(Tuple::new().word(1), Verdict::Drop)]);
    let statement = Statement::VerdictMap { key: Key(vec![Value::Priority]), map: VerdictMap::Inline(cases) };
    let add = |statement| Operation::AddRule { chain: "chain".into(), rule: Rule::new([statement]) };
    let (transaction, batch) = batch(IpFamily::IPv4, [add(statement)]);
    let contents = contents(&batch);
    let kinds: Vec<_> = contents.iter().map(|(kind, ..)| *kind).collect();
    assert_eq!(kinds, [BATCH_BEGIN, NEW_SET, NEW_ELEMENT, NEW_RULE, BATCH_END]);
    for sequence in 8..=10 {
        assert_eq!(batch.place(&transaction, sequence, None), Some(Place { operation: 0, element: None }));
    }
    assert!(super::set(&contents[1].2, IpFamily::IPv4).unwrap().inline);
}
