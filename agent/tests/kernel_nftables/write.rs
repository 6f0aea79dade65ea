//! Transactions: all or nothing, refused by name, and repairs.

use nix::errno::Errno;
use pointsman_agent::nftables::connection::Connection;
use pointsman_agent::nftables::error::Error;
use pointsman_agent::nftables::probe::{counts, probe};
use pointsman_agent::nftables::ruleset::Value;
use pointsman_agent::nftables::ruleset::{
    Chain, ChainType, Element, Hook, Operation, Origin, Rule, Tuple, Verdict, goto, jump, key,
};
use pointsman_crds::proxy_node_status::IpFamily;

use super::everything::{address, everything};
use super::{FAMILIES, isolated, load, nft, table, transaction};

fn refused(
    connection: &mut Connection,
    operations: Vec<(Operation, u32)>,
) -> Vec<(Option<Origin>, Errno, String)> {
    let family = IpFamily::IPv4;
    let before = nft("-a list ruleset");
    let error = connection.apply(&table(family), &transaction(operations)).unwrap_err();
    assert_eq!(nft("-a list ruleset"), before, "nothing has changed");
    let Error::Refused(refusals) = error else { panic!("{error}") };
    refusals.into_iter().map(|refusal| (refusal.origin, refusal.errno, refusal.object)).collect()
}

#[test]
fn a_refusal_names_who_wanted_it() {
    isolated(|| {
        let family = IpFamily::IPv4;
        let mut connection = Connection::open().unwrap();
        load(&mut connection, &everything(family));
        let frontend = |number: u16| {
            let key = address(family, 9).protocol(6).port(number);
            Element::new(key).with_data(Tuple::new().word(number.into()))
        };
        let many = |from: u16, bad: u16| {
            let mut elements: Vec<_> =
                (from..from + 1200).map(|number| (frontend(number), Origin(number.into()))).collect();
            let there =
                Element::new(address(family, 41).protocol(6).port(80)).with_data(Tuple::new().word(1));
            elements.insert(bad.into(), (there, Origin(77_777)));
            (Operation::AddElements { set: "frontends".into(), elements }, 5)
        };
        // Another value for a key that is there, as the first, somewhere, and last.
        for bad in [0, 3, 499, 500, 777, 1200] {
            let refusals = refused(&mut connection, vec![many(1, bad)]);
            let [(origin, errno, object)] = &refusals[..] else { panic!("{refusals:?}") };
            assert_eq!((*origin, *errno), (Some(Origin(77_777)), Errno::EEXIST), "{bad}");
            assert!(object.contains("of frontends"), "{object}");
        }
        // All that are at fault, also in one message.
        let (Operation::AddElements { set, mut elements }, _) = many(1, 700) else { panic!() };
        for bad in [10_usize, 20, 1100] {
            elements[bad].0 = Element::new(elements[700].0.key).with_data(Tuple::new().word(2));
        }
        let refusals = refused(&mut connection, vec![(Operation::AddElements { set, elements }, 5)]);
        let origins: Vec<_> = refusals.iter().filter_map(|(origin, ..)| *origin).collect();
        assert_eq!(origins, [11, 21, 77_777, 1100].map(Origin));
        // Several at once, in their order.
        let verdict = |word, chain: &'static str, origin| {
            let element = Element::new(Tuple::new().word(word)).with_verdict(Verdict::Goto(chain.into()));
            (Operation::AddElements { set: "classes".into(), elements: vec![(element, Origin(origin))] }, 0)
        };
        let absent =
            Operation::DeleteElements { set: "frontends".into(), elements: vec![(frontend(1), Origin(9))] };
        let range = Operation::DeleteElements {
            set: "service-cidrs".into(),
            elements: [(0, 15), (100, 101), (40, 42)]
                .map(|(first, last)| {
                    (Element::range(address(family, first), address(family, last)), Origin(first.into()))
                })
                .into(),
        };
        let rule = |set: &'static str| Operation::AddRule {
            chain: "empty".into(),
            rule: Rule::new([key([Value::SourceAddress]).in_set(set)]),
        };
        let refusals = refused(
            &mut connection,
            vec![
                verdict(1, "rules", 1),
                verdict(2, "nowhere", 2),
                (absent, 0),
                (rule("hairpin"), 3),
                (rule("none"), 4),
                (range, 0),
                (Operation::DeleteChain("empty".into()), 6),
            ],
        );
        // A key that is too short: a register that was never loaded; older kernels see only its length.
        let short = refusals[2].1;
        assert!([Errno::ENODATA, Errno::EINVAL].contains(&short), "{short}");
        let said: Vec<_> = refusals.iter().map(|(origin, errno, _)| (*origin, *errno)).collect();
        assert_eq!(
            said,
            [
                (Some(Origin(2)), Errno::ENOENT),
                (Some(Origin(9)), Errno::ENOENT),
                (Some(Origin(3)), short),
                (Some(Origin(4)), Errno::ENOENT),
                (Some(Origin(100)), Errno::ENOENT),
                (Some(Origin(6)), Errno::EBUSY),
            ],
            "{refusals:?}"
        );
        // Afterwards the connection works on.
        connection.apply(&table(family), &transaction([many(1, 0)])).unwrap_err();
        let fine =
            Operation::AddElements { set: "frontends".into(), elements: vec![(frontend(1), Origin(1))] };
        connection.apply(&table(family), &transaction([(fine, 1)])).unwrap();
    });
}

#[test]
fn a_loop_is_refused_at_the_end() {
    isolated(|| {
        let mut connection = Connection::open().unwrap();
        let chain = |name: &'static str| (Operation::AddChain(Chain::new(name)), 0);
        let rule = |from: &'static str, statement| {
            (Operation::AddRule { chain: from.into(), rule: Rule::new([statement]) }, 0)
        };
        let base = Chain::base("base", ChainType::Filter, Hook::Input, 0);
        let operations = transaction([
            (Operation::AddTable, 0),
            chain("a"),
            chain("b"),
            (Operation::AddChain(base), 0),
            rule("base", jump("a")),
            rule("a", goto("b")),
            rule("b", goto("a")),
        ]);
        let error = connection.apply(&table(IpFamily::IPv4), &operations).unwrap_err();
        assert!(matches!(error, Error::Refused(_) | Error::RefusedWhole(Errno::ELOOP)), "{error:?}");
        assert!(!connection.exists(&table(IpFamily::IPv4)).unwrap());
    });
}

#[test]
fn nothing_to_do_is_not_sent() {
    isolated(|| {
        let mut connection = Connection::open().unwrap();
        let nothing = Operation::AddElements { set: "none".into(), elements: vec![] };
        connection.apply(&table(IpFamily::IPv4), &transaction([])).unwrap();
        connection.apply(&table(IpFamily::IPv4), &transaction([(nothing, 0)])).unwrap();
    });
}

#[test]
fn this_kernel_has_everything_and_nothing_is_left() {
    isolated(|| {
        nft("add table ip other");
        let before = nft("-a list ruleset");
        let mut connection = Connection::open().unwrap();
        for family in FAMILIES {
            assert_eq!(probe(&mut connection, family).unwrap(), []);
            assert!(counts(&mut connection, family).unwrap());
        }
        assert_eq!(nft("-a list ruleset"), before);
    });
}

#[test]
fn what_an_older_probe_has_left_is_removed() {
    isolated(|| {
        let mut connection = Connection::open().unwrap();
        let leave = || {
            nft("add table ip pointsman-probe");
            nft("add chain ip pointsman-probe left { type filter hook input priority 5; }");
        };
        leave();
        assert_eq!(probe(&mut connection, IpFamily::IPv4).unwrap(), []);
        assert_eq!(nft("list ruleset"), "");
        leave();
        assert!(counts(&mut connection, IpFamily::IPv4).unwrap());
        assert_eq!(nft("list ruleset"), "");
    });
}

#[test]
fn without_the_capability_the_error_says_so() {
    isolated(|| {
        let itself = std::env::current_exe().unwrap();
        let output = std::process::Command::new("setpriv")
            .args(["--bounding-set=-net_admin", "--inh-caps=-net_admin"])
            .arg(itself)
            .args(["--ignored", "--exact", "write::what_is_said_without_the_capability", "--nocapture"])
            .output()
            .unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    });
}

#[test]
#[ignore = "runs inside of without_the_capability_the_error_says_so"]
fn what_is_said_without_the_capability() {
    let mut connection = Connection::open().unwrap();
    let add = transaction([(Operation::AddTable, 0)]);
    let error = connection.apply(&table(IpFamily::IPv4), &add).unwrap_err();
    assert_eq!(error, Error::RefusedWhole(Errno::EPERM));
    assert!(error.to_string().contains("NET_ADMIN"), "{error}");
    assert_eq!(probe(&mut connection, IpFamily::IPv4), Err(Error::RefusedWhole(Errno::EPERM)));
    assert!(connection.read(&table(IpFamily::IPv4)).unwrap_err().to_string().contains("NET_ADMIN"));
}
