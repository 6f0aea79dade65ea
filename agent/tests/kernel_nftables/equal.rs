//! What is written by netlink is what `nft` makes of the text, and is read back as it was written.

use pointsman_agent::nftables::compare::compare;
use pointsman_agent::nftables::connection::Connection;
use pointsman_agent::nftables::ruleset::{Chain, Ruleset};
use pointsman_agent::nftables::text;
use pointsman_crds::proxy_node_status::IpFamily;
use serde_json::Value;

use super::everything::{affinity_rules, everything};
use super::{FAMILIES, isolated, load, nft, nft_file};

/// Elements come in any order.
fn sorted_text(listing: &str) -> String {
    let mut out = String::new();
    let mut rest = listing;
    while let Some((before, after)) = rest.split_once("elements = {") {
        let (elements, after) = after.split_once("}\n").unwrap();
        let mut elements: Vec<_> = elements.split(',').map(str::trim).collect();
        elements.sort_unstable();
        out.push_str(before);
        out.push_str(&elements.join(", "));
        out.push('\n');
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Without handles, which count what ever was made, and with elements in order.
fn sorted_json(listing: &str) -> Value {
    fn sort(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.remove("handle");
                map.remove("metainfo");
                map.values_mut().for_each(sort);
                if let Some(Value::Array(elements)) = map.get_mut("elem") {
                    elements.sort_by_key(ToString::to_string);
                }
            }
            Value::Array(all) => all.iter_mut().for_each(sort),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(listing).unwrap();
    sort(&mut value);
    value
}

fn listings(ruleset: &Ruleset) -> (String, Value) {
    let keyword = if ruleset.table.family == IpFamily::IPv4 { "ip" } else { "ip6" };
    let name = &ruleset.table.name;
    let listing = |words: &str| nft(&format!("{words} list table {keyword} {name}"));
    (sorted_text(&listing("-y")), sorted_json(&listing("-j")))
}

/// Loads a table in both ways, and compares what `nft` and we make of it.
pub fn assert_same_by_netlink_and_text(all: &Ruleset) {
    let mut connection = Connection::open().unwrap();
    load(&mut connection, all);
    let by_netlink = listings(all);
    nft("flush ruleset");
    nft_file(&text::ruleset(all));
    let by_text = listings(all);
    for (netlink, text) in by_netlink.0.lines().zip(by_text.0.lines()) {
        assert_eq!(netlink, text);
    }
    assert_eq!(by_netlink, by_text);
    // And what nft has written is understood, and the same; only ranges of addresses it writes in another way.
    let read = connection.read(&all.table).unwrap().unwrap();
    assert_eq!(
        compare(all, Some(&read)).differences,
        [] as [String; 0],
        "{:?}: {:?}",
        all.table,
        read.foreign
    );
    nft("flush ruleset");
}

#[test]
fn netlink_and_text_make_the_same_table() {
    isolated(|| {
        for family in FAMILIES {
            let mut all = everything(family);
            if family == IpFamily::IPv4 {
                all.add_chain(Chain::new("affinity"), affinity_rules());
            }
            assert_same_by_netlink_and_text(&all);
        }
    });
}

#[test]
fn affinity_of_ipv6_can_be_listed() {
    isolated(|| {
        let mut all = everything(IpFamily::IPv6);
        all.add_chain(Chain::new("affinity"), affinity_rules());
        load(&mut Connection::open().unwrap(), &all);
        let (listing, _) = listings(&all);
        for line in [
            "update @affinity { ip6 saddr . meta priority & f:ffff timeout 3h : meta priority }",
            "add @affinity { ip6 saddr . meta priority & f:ffff timeout 1s500ms : meta priority | 10:0 }",
            "delete @affinity { ip6 saddr . meta priority & f:ffff : meta priority }",
        ] {
            assert!(listing.contains(line), "{line}\n{listing}");
        }
    });
}

#[test]
fn what_is_written_is_read_back() {
    isolated(|| {
        for family in FAMILIES {
            let mut all = everything(family);
            all.add_chain(Chain::new("affinity"), affinity_rules());
            let mut connection = Connection::open().unwrap();
            assert!(!connection.exists(&all.table).unwrap());
            assert_eq!(connection.read(&all.table).unwrap(), None);
            load(&mut connection, &all);
            assert!(connection.exists(&all.table).unwrap());
            let read = connection.read(&all.table).unwrap().unwrap();
            assert_eq!(read.foreign.len(), 0, "{:?}", read.foreign);
            assert_eq!(read.ruleset, all);
            assert!(compare(&all, Some(&read)).is_empty());
        }
    });
}
