//! Every scenario, without a kernel: the plan says what the scenario expects, and so do the rules made of it.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use pointsman_crds::settings::Mode;

use crate::model::Change;
use crate::plan::random::Rules;
use crate::plan::{Packet, Verdict};
use crate::scenario::hosts::{Host, twin, twin_block};
use crate::scenario::{self, Case, End, Expected, Scenario, Sticky};
use crate::{iptables, ipvs, nftables};

/// What refuses undefined ports of ClusterIPs only where ipsets are available.
const WITHOUT_SETS: &str = "iptables without ipsets";

/// Every kind of rules, with nothing but this.
fn all_rules(start: &[Change]) -> [(&'static str, Mode, Box<dyn Rules>); 4] {
    let iptables = |use_sets| Box::new(iptables::tests::World::begin(use_sets, start.to_vec()));
    let nftables = Box::new(nftables::layout::tests::World::begin(start.to_vec()));
    [
        ("iptables", Mode::Iptables, iptables(true)),
        (WITHOUT_SETS, Mode::Iptables, iptables(false)),
        ("nftables", Mode::Nftables, nftables),
        ("ipvs", Mode::Ipvs, Box::new(ipvs::layout::tests::World::begin(start.to_vec()))),
    ]
}

/// A verdict in the scenarios' words.
fn answer(case: &Case, verdict: Verdict) -> Result<Expected, Verdict> {
    match verdict {
        Verdict::Forward(hops) => {
            let mut ends = Vec::new();
            for hop in &hops {
                let host =
                    scenario::hosts::HOSTS.iter().find(|host| host.address(case.family) == hop.address);
                let Some(Host { name, .. }) = host else { return Err(Verdict::Forward(hops)) };
                ends.push(End { host: name, port: hop.port, masquerade: hop.masquerade });
            }
            ends.sort();
            Ok(Expected::Reach { ends, sticky: Sticky::No })
        }
        Verdict::Undefined | Verdict::Reject => Ok(Expected::Refused),
        Verdict::Drop => Ok(Expected::Dropped),
        Verdict::Untouched => Ok(Expected::Untouched),
    }
}

/// Which of several ends is chosen is no matter of one packet.
fn of_one_packet(expected: &Expected) -> Expected {
    match expected {
        Expected::Reach { ends, .. } => Expected::Reach { ends: ends.clone(), sticky: Sticky::No },
        other => other.clone(),
    }
}

#[test]
fn the_plan_and_the_rules_say_what_the_scenarios_expect() {
    let mut wrong = Vec::new();
    let mut tried = 0;
    for path in scenario::files() {
        let scenario = Scenario::load(&path).unwrap_or_else(|error| panic!("{error}"));
        for (kind, mode, mut rules) in all_rules(&scenario.start) {
            for step in &scenario.steps {
                for change in &step.changes {
                    rules.cluster().apply(change.clone());
                }
                rules.cluster().set_config(step.config.clone());
                rules.follow();
                let local: BTreeSet<_> = rules.cluster().model.local_addresses().clone();
                for case in &step.cases {
                    tried += 1;
                    let packet: Packet = case.packet(&local);
                    let usual = Ok(of_one_packet(case.usually()));
                    let expected = Ok(of_one_packet(case.expected(mode)));
                    let planned = rules.cluster().plan.route(&packet);
                    let unknown = kind == WITHOUT_SETS && planned == Verdict::Undefined;
                    let (walked, promised) = rules.route(&packet);
                    let said = format!("{}: {}: {case}", scenario.name, step.what);
                    if answer(case, planned.clone()) != usual {
                        wrong.push(format!("{said}: expected {usual:?}, planned {planned:?}"));
                    } else if walked != promised || (answer(case, walked.clone()) != expected && !unknown) {
                        wrong.push(format!(
                            "{said}: expected {expected:?}, {kind} says {walked:?}, promised {promised:?}"
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {tried} packets are wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(tried > 100, "{tried}");
}

fn error(text: &str) -> String {
    Scenario::parse("test", text).unwrap_err()
}

fn with(step: &str) -> String {
    format!("about: x\nsteps:\n- what: first\n  {step}")
}

#[test]
fn mistakes_in_files_are_named() {
    for (step, says) in [
        ("expct: []", "expct"),
        ("expect: [{from: pod, to: \"1.2.3.4:80\", reach: [a]}]", "say `as`"),
        ("expect: [{from: pod, to: \"1.2.3.4:80\"}]", "either `reach` or `get`"),
        ("expect: [{from: nobody, to: \"1.2.3.4:80\", get: refused}]", "nobody"),
        ("expect: [{from: pod, to: \"1.2.3.4\", get: refused}]", "1.2.3.4"),
        ("expect: [{from: pod, to: \"1.2.3.4:80/icmp\", get: refused}]", "icmp"),
        ("expect: [{from: pod, to: \"1.2.3.4:80\", reach: [x], as: raw}]", "x is nobody"),
        ("apply: [{service: web, spec: {clusterIP: [1.2.3.4]}}]", "clusterIP"),
        ("apply: [{service: web, spec: {clusterIPz: [1.2.3.4]}}]", "clusterIPz"),
        ("apply: [{endpoints: web, to: [a sleepy]}]", "sleepy"),
        ("apply: [{endpoints: web, to: [z]}]", "z is nobody"),
        ("expect: [{from: pod, to: \"1.2.3.4:80\", reach: [a], as: raw, forgetAfterSeconds: 2}]", "sticky"),
        ("apply: [{servce: web}]", "servce"),
        ("patch: [{service: web, spec: {}}]", "web was not applied"),
        ("delete: [web]", "web"),
        ("config: {masquerade: {al: true}}", "al"),
        ("ids: [cip]", "cip"),
    ] {
        let said = error(&with(step));
        assert!(said.contains(says), "{step}: {said}");
    }
    assert!(error(&with("node: {zone: a}\n- what: first")).contains("twice"));
}

#[test]
fn an_ipv4_object_has_an_ipv6_twin_unless_it_names_a_family() {
    let objects = |text: &str| {
        let scenario = Scenario::parse("test", &with(text)).unwrap();
        format!("{:?}", scenario.steps[0].changes)
    };
    let said = objects(
        "apply: [{service: web, spec: {clusterIPs: [172.30.0.1], ports: [{port: 80}]}}, {endpoints: web, to: [a]}]",
    );
    assert!(said.contains("fd00:ac:1e::1") && said.contains("fd00:a:b4::1"), "{said}");
    let said = objects(
        "apply: [{service: web, spec: {ipFamilies: [IPv4], clusterIPs: [172.30.0.1], ports: [{port: 80}]}}]",
    );
    assert!(!said.contains("fd00"), "{said}");
}

#[test]
fn a_twin_of_a_block_holds_the_twins_of_its_addresses_and_no_others() {
    let addresses = ["203.0.113.2", "203.0.113.130", "203.0.112.2", "10.1.2.3", "172.30.0.1", "172.31.0.1"];
    let blocks = [
        "203.0.113.0/25",
        "203.0.113.0/24",
        "203.0.112.0/23",
        "172.16.0.0/12",
        "10.0.0.0/8",
        "0.0.0.0/0",
        "203.0.113.2/32",
    ];
    for block in blocks {
        let block: Ipv4Net = block.parse().unwrap();
        for address in addresses {
            let address: Ipv4Addr = address.parse().unwrap();
            let inside = twin_block(block).contains(&twin(address));
            assert_eq!(inside, block.contains(&address), "{block} {address}");
        }
    }
}
