//! Changes by others are noticed, at once; our own and those of other tables are not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use pointsman_agent::kernel::Reach;
use pointsman_agent::model::{Dirty, Model};
use pointsman_agent::nftables::Dataplane;
use pointsman_agent::nftables::client::Client;
use pointsman_agent::nftables::ruleset::{Element, Operation, Origin, Tuple};
use pointsman_agent::nftables::watch::{Touched, Watch};
use pointsman_agent::plan::{Changes, Plan};
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_configuration::Drift;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{DriftPolicy, Mode, ProxySettings};
use tokio::time::timeout;

use super::everything::{address, everything};
use super::{FAMILIES, isolated, nft, table, transaction};

const SOON: Duration = Duration::from_millis(100);

fn with_a_table(test: impl AsyncFnOnce(Client, Watch) + Send + 'static) {
    isolated(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut client = Client::open().unwrap();
            let watch = Watch::open(table(IpFamily::IPv4), client.port()).unwrap();
            let all = everything(IpFamily::IPv4);
            client.apply(&all.table, Arc::new(all.load())).await.unwrap();
            test(client, watch).await;
        });
    });
}

#[test]
fn changes_by_others_are_noticed() {
    with_a_table(async |mut client, mut watch| {
        assert!(timeout(SOON, watch.changed()).await.is_err(), "our own load");
        for change in [
            "delete element ip pointsman frontends { 172.30.0.41 . tcp . 80 }",
            "add element ip pointsman cluster-ips { 1.2.3.4 }",
            "flush chain ip pointsman rules",
            "add rule ip pointsman empty drop",
            "add chain ip pointsman stray",
            "delete table ip pointsman",
            "add table ip pointsman",
        ] {
            nft(change);
            let started = Instant::now();
            let noticed = timeout(SOON, watch.changed()).await.expect(change).unwrap();
            assert_eq!(noticed, Touched::Changed, "{change}");
            println!("{change}: after {:?}", started.elapsed());
            // Of one transaction there may be several notices.
            while timeout(Duration::from_millis(20), watch.changed()).await.is_ok() {}
        }
        assert!(client.exists(&table(IpFamily::IPv4)).await.unwrap());
        assert!(client.read(&table(IpFamily::IPv4)).await.unwrap().unwrap().ruleset.sets.is_empty());
    });
}

#[test]
fn our_own_changes_and_other_tables_are_not() {
    with_a_table(async |mut client, mut watch| {
        let elements = (1..=250)
            .map(|last| (Element::new(address(IpFamily::IPv4, last).zeroed().word(last.into())), Origin(0)))
            .collect();
        let operation = Operation::AddElements { set: "hairpin".into(), elements };
        client.apply(&table(IpFamily::IPv4), Arc::new(transaction([(operation, 0)]))).await.unwrap();
        for change in [
            "add table ip6 pointsman",
            "add table inet pointsman",
            "add table ip pointsman-not",
            "add chain ip pointsman-not rules",
            "add rule ip pointsman-not rules drop",
            "add set ip pointsman-not frontends { type ipv4_addr; }",
            "add element ip pointsman-not frontends { 1.2.3.4 }",
            "delete table ip pointsman-not",
        ] {
            nft(change);
        }
        assert!(timeout(SOON, watch.changed()).await.is_err());
    });
}

#[test]
fn a_given_up_request_is_finished_first() {
    with_a_table(async |mut client, mut watch| {
        let table = table(IpFamily::IPv4);
        let first = Operation::FlushSet("frontends".into());
        let element = Element::new(address(IpFamily::IPv4, 9).protocol(6).port(9));
        let second = Operation::AddElements {
            set: "frontends".into(),
            elements: vec![(element.with_data(Tuple::new().word(9)), Origin(0))],
        };
        let [first, second] = [first, second].map(|operation| Arc::new(transaction([(operation, 0)])));
        let _ = client.apply(&table, first).now_or_never();
        client.apply(&table, second).await.unwrap();
        let read = client.read(&table).await.unwrap().unwrap();
        assert_eq!(read.ruleset.elements["frontends"].len(), 1);
        assert!(timeout(SOON, watch.changed()).await.is_err(), "all of it was ours");
    });
}

/// The sockets that the kernel tells of transactions, in the namespace of the thread: how many bytes wait in each.
fn listeners() -> Vec<u64> {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
    let sockets = sockets.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    // NETLINK_NETFILTER, and the bit of NFNLGRP_NFTABLES.
    let listens =
        |socket: &Vec<&str>| socket[1] == "12" && u32::from_str_radix(socket[3], 16).unwrap() & 0x40 != 0;
    sockets.filter(listens).map(|socket| socket[4].parse().unwrap()).collect()
}

fn configured(policy: DriftPolicy) -> NodeProxyConfiguration {
    let settings = ProxySettings { mode: Some(Mode::Nftables), ..ProxySettings::default() };
    let drift = Drift { policy, ..Drift::default() };
    NodeProxyConfiguration::complete(&settings, drift).unwrap()
}

fn empty_plan(policy: DriftPolicy) -> Plan {
    let mut plan = Plan::new(configured(policy), &FAMILIES);
    let everything = Dirty { everything: true, ..Dirty::default() };
    plan.update(&Model::new(), everything);
    plan
}

#[test]
fn nobody_listens_while_a_table_is_loaded() {
    isolated(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let plan = empty_plan(DriftPolicy::Repair);
            let mut tables = Dataplane::open(&FAMILIES).await.unwrap();
            assert_eq!(tables.sync(&plan, &Changes::default()).await.1, []);
            assert_eq!(listeners(), [0, 0], "each would have heard of what was loaded while it listened");
            nft("delete table ip pointsman");
            timeout(SOON, tables.changed()).await.unwrap();
            assert_eq!(tables.verify(&plan, Reach::Suspects).await.unwrap().len(), 1);
            assert_eq!(tables.repair(&plan).await, []);
            assert_eq!(listeners(), [0, 0], "the same for a table that was deleted");
            // Both are to be read again: nobody has told of changes meanwhile.
            nft("flush chain ip6 pointsman services");
            assert_eq!(tables.verify(&plan, Reach::Suspects).await.unwrap().len(), 1);
        });
    });
}

#[test]
fn nobody_listens_while_changes_by_others_are_not_looked_for() {
    isolated(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut plan = empty_plan(DriftPolicy::Off);
            let mut tables = Dataplane::open(&FAMILIES).await.unwrap();
            for (policy, expected) in [(DriftPolicy::Off, 0), (DriftPolicy::Report, 2), (DriftPolicy::Off, 0)]
            {
                let changes = plan.configure(configured(policy), &Model::new());
                assert_eq!(tables.sync(&plan, &changes).await.1, []);
                assert_eq!(tables.verify(&plan, Reach::Everything).await.unwrap(), [] as [String; 0]);
                assert_eq!(listeners().len(), expected, "{policy:?}");
            }
            // What happened while nobody listened is found when somebody looks again.
            nft("flush chain ip pointsman services");
            let changes = plan.configure(configured(DriftPolicy::Report), &Model::new());
            assert_eq!(tables.sync(&plan, &changes).await.1, []);
            assert_eq!(tables.verify(&plan, Reach::Suspects).await.unwrap().len(), 1);
        });
    });
}

#[test]
fn syn_10_a_look_reads_only_what_somebody_else_has_touched() {
    isolated(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let plan = empty_plan(DriftPolicy::Repair);
            let mut tables = Dataplane::open(&FAMILIES).await.unwrap();
            let (_, errors) = tables.sync(&plan, &Changes::default()).await;
            assert_eq!(errors, []);
            let differences = tables.verify(&plan, Reach::Everything).await.unwrap();
            assert_eq!(differences, Vec::<String>::new());

            nft("flush chain ip pointsman services");
            let unheard = tables.verify(&plan, Reach::Suspects).await.unwrap();
            assert_eq!(unheard, Vec::<String>::new(), "the table is not read before the kernel has told");
            timeout(SOON, tables.changed()).await.unwrap();
            // IPv6 has changed too, but that word is not heard yet.
            nft("flush chain ip6 pointsman services");
            let found = tables.verify(&plan, Reach::Suspects).await.unwrap();
            assert_eq!(found, ["IPv4: the rules of services differ"]);
            assert_eq!(tables.repair(&plan).await, []);
            timeout(SOON, tables.changed()).await.unwrap();
            let found = tables.verify(&plan, Reach::Suspects).await.unwrap();
            assert_eq!(found, ["IPv6: the rules of services differ"], "IPv4 is repaired");
            assert_eq!(tables.repair(&plan).await, []);
            let left = tables.verify(&plan, Reach::Everything).await.unwrap();
            assert_eq!(left, Vec::<String>::new());
        });
    });
}
