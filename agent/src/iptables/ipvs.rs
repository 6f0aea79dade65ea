//! The chains and ipsets of kube-proxy's mode ipvs, as far as no other mode has them (reference §3.2, §3.3).
//!
//! In: the tools for the chains. Out: they are gone. The chains that mode ipvs shares with mode iptables hold our rules by then.

use pointsman_crds::proxy_node_status::IpFamily;

use super::batch::{Script, Section};
use super::runner::{Failure, Runner, failure};
use super::saved::target;
use super::tools::Tools;
use crate::ipset::client::Client;
use crate::ipset::{self, Operation};
use crate::kernel::SyncError;

/// Chains by table.
const CHAINS: [(&str, &[&str]); 2] = [
    (
        "filter",
        &["KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"],
    ),
    ("nat", &["KUBE-LOAD-BALANCER", "KUBE-NODE-PORT"]),
];

/// Sets, without `KUBE-` or `KUBE-6-`. The kernel's limit cuts the last one.
const SETS: [&str; 18] = [
    "LOOP-BACK",
    "CLUSTER-IP",
    "EXTERNAL-IP",
    "EXTERNAL-IP-LOCAL",
    "LOAD-BALANCER",
    "LOAD-BALANCER-LOCAL",
    "LOAD-BALANCER-FW",
    "LOAD-BALANCER-SOURCE-IP",
    "LOAD-BALANCER-SOURCE-CIDR",
    "NODE-PORT-TCP",
    "NODE-PORT-UDP",
    "NODE-PORT-LOCAL-TCP",
    "NODE-PORT-LOCAL-UDP",
    "NODE-PORT-SCTP-HASH",
    "NODE-PORT-LOCAL-SCTP-HASH",
    "HEALTH-CHECK-NODE-PORT",
    "IPVS-IPS",
    "LOAD-BALANCER-SOURCE-CID",
];

fn is_kube_proxys(set: &str) -> bool {
    let name = set.strip_prefix("KUBE-6-").or_else(|| set.strip_prefix("KUBE-"));
    name.is_some_and(|name| SETS.contains(&name))
}

/// kube-proxy's sets that are there. A kernel without ipsets has none.
pub async fn kube_proxy_sets() -> Vec<String> {
    let Ok(mut client) = Client::open() else { return Vec::new() };
    let names = client.names().await.unwrap_or_default();
    names.into_iter().filter(|name| is_kube_proxys(name)).collect()
}

/// Removes sets.
pub async fn destroy_sets(sets: &[String]) -> Result<(), ipset::Error> {
    let destroy = |set: &String| Operation::Destroy { set: set.clone() };
    Client::open()?.apply(sets.iter().map(destroy).collect()).await
}

/// Removes kube-proxy's chains, and what leads there from the built-in ones.
pub async fn remove_ipvs_chains(tools: &Tools) -> Result<(), SyncError> {
    for family in [IpFamily::IPv4, IpFamily::IPv6] {
        let ear = std::sync::Mutex::default();
        remove_from(&Runner::new(tools, &ear, family)).await.map_err(|error| failure(family, &error))?;
    }
    Ok(())
}

pub(super) async fn remove_from(runner: &Runner<'_>) -> Result<(), Failure> {
    for (table, chains) in CHAINS {
        let saved = runner.read(table).await?;
        let mut section = Section::new(table);
        for hook in ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"] {
            let rules = saved.rules(hook).into_iter().flatten();
            rules
                .filter(|rule| target(rule).is_some_and(|to| chains.contains(&to)))
                .for_each(|rule| section.delete_rule(hook, rule));
        }
        let there: Vec<_> = saved.ours(|name| chains.contains(&name)).into_iter().collect();
        section.remove(&there);
        let mut script = Script::default();
        section.finish(&mut script);
        if !script.text.is_empty() {
            runner.restore(&script).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syn_16_sets_of_others_are_not_kube_proxys() {
        for name in
            ["KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-6-LOAD-BALANCER-SOURCE-CID", "KUBE-IPVS-IPS"]
        {
            assert!(is_kube_proxys(name) && name.len() <= 31, "{name}");
        }
        for name in
            ["KUBE-DST-VBH27M7NWLDOZIE6", "KUBE-SRC-X", "POINTSMAN-DROP", "CLUSTER-IP", "KUBE-ROUTER-SVC"]
        {
            assert!(!is_kube_proxys(name), "{name}");
        }
    }
}
