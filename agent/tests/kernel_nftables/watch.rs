//! Changes by others are noticed, at once; our own and those of other tables are not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use pointsman_agent::nftables::client::Client;
use pointsman_agent::nftables::ruleset::{Element, Operation, Origin, Tuple};
use pointsman_agent::nftables::watch::{Touched, Watch};
use pointsman_crds::proxy_node_status::IpFamily;
use tokio::time::timeout;

use super::everything::{address, everything};
use super::{isolated, nft, table, transaction};

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
