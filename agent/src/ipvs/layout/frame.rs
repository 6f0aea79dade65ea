//! The rules of mode ipvs that do not depend on single Services.
//!
//! In: the [`NodePlan`]. Out: chains, and the ways into them. Pure.
//!
//! ```text
//! mangle  PREROUTING, OUTPUT  before anything translates: what must be dropped, by the frontend it came to
//! nat     PREROUTING, OUTPUT  marks what is to be masqueraded; local senders to a frontend of policy Local get an endpoint here
//! nat     POSTROUTING         masquerades what is marked, and who reaches itself
//! filter  INPUT, OUTPUT       refuses ports of our addresses that no Service has: otherwise they would lead to the node's daemons
//! filter  FORWARD             as in mode iptables
//! ```
//!
//! IPVS takes packets at LOCAL_IN behind filter, and at LOCAL_OUT between nat and filter. None of the chains is shared with another
//! mode, and none accepts in nat, so that this mode can be beside any other.

use pointsman_crds::proxy_node_status::IpFamily;

use super::sets::Set;
use crate::ipset::Kind as _;
use crate::iptables::names::{ChainName, NEAR_ENDPOINT, NEAR_PORT};
use crate::iptables::render::{Chains, Rule, from_local_pods};
use crate::iptables::shared::{Jump, forward, postrouting};
use crate::plan::{LocalTraffic, NodePlan};

/// Marks packets for masquerading.
pub(crate) const MASQ: &str = "POINTSMAN-IPVS-MASQ";
/// Masquerades.
pub(crate) const POST: &str = "POINTSMAN-IPVS-POST";
/// One rule per frontend of policy Local that local senders reach all endpoints by. In nat.
pub(crate) const NEAR: &str = "POINTSMAN-IPVS-NEAR";
/// What is behind all ways into nat.
const ENTRANCE: &str = "POINTSMAN-IPVS";
/// Packets to ClusterIPs.
const INTERNAL: &str = "POINTSMAN-IPVS-INTERNAL";
/// Packets to frontends under policy Local.
const POLICY: &str = "POINTSMAN-IPVS-POLICY";
/// In mangle.
const DROP: &str = "POINTSMAN-IPVS-DROP";
/// Packets to frontends that have no endpoint here.
const AWAY: &str = "POINTSMAN-IPVS-AWAY";
/// Packets to frontends that not everybody may use.
const SOURCES: &str = "POINTSMAN-IPVS-SOURCES";
/// In filter.
const REFUSE: &str = "POINTSMAN-IPVS-REFUSE";
/// Packets that pass through the node.
pub(crate) const FORWARD: &str = "POINTSMAN-IPVS-FORWARD";
/// Lets load balancers ask for health.
const HEALTH: &str = "POINTSMAN-IPVS-HEALTH";

/// The ways in, in the order of their insertion at the head of the built-in chains.
pub(crate) const JUMPS: &[Jump] = &{
    const fn jump(table: &'static str, from: &'static str, to: &'static str, new_only: bool) -> Jump {
        Jump { table, from, to, new_only, comment: "pointsman, mode ipvs" }
    }
    [
        jump("mangle", "PREROUTING", DROP, true),
        jump("mangle", "OUTPUT", DROP, true),
        jump("nat", "POSTROUTING", POST, false),
        jump("nat", "PREROUTING", ENTRANCE, false),
        jump("nat", "OUTPUT", ENTRANCE, false),
        jump("filter", "INPUT", REFUSE, true),
        jump("filter", "OUTPUT", REFUSE, true),
        jump("filter", "INPUT", HEALTH, false),
        jump("filter", "FORWARD", FORWARD, false),
    ]
};

/// The tables that we have chains in, in the order in which they are written.
pub(crate) const TABLES: [&str; 3] = ["mangle", "nat", "filter"];

/// Whether a chain is ours, by its name.
pub(crate) fn is_ours(name: &str) -> bool {
    name == ENTRANCE
        || name.starts_with("POINTSMAN-IPVS-")
        || name.starts_with(NEAR_PORT)
        || name.starts_with(NEAR_ENDPOINT)
}

/// The chains of each of [`TABLES`], without [`NEAR`]. `accepted` holds every mark bit that is masqueraded: more than the one that is
/// set while it changes.
pub(crate) fn chains(node: &NodePlan, accepted: u32) -> [Chains; 3] {
    let accepted = accepted | node.mark;
    let set = |set: Set, fields: &str| format!("-m set --match-set {} {fields}", set.name(node.family));
    let local = from_local_pods(&node.local_traffic);
    let each_local =
        |target: &str| local.iter().map(|source| format!("{source}{target}")).collect::<Vec<_>>();
    let chain = |name: &str, rules: Vec<Rule>| (ChainName::new(name), rules);

    let away = [
        each_local("-j RETURN"),
        vec!["-m addrtype --src-type LOCAL -j RETURN".to_owned(), "-j DROP".to_owned()],
    ];
    let mangle = Chains::from([
        chain(
            DROP,
            vec![
                format!("{} -j DROP", set(Set::Drop, "dst,dst")),
                format!("{} -j {SOURCES}", set(Set::Guarded, "dst,dst")),
                format!("{} -j {AWAY}", set(Set::Away, "dst,dst")),
            ],
        ),
        chain(SOURCES, vec![format!("{} -j RETURN", set(Set::Allowed, "dst,dst,src")), "-j DROP".to_owned()]),
        chain(AWAY, away.concat()),
    ]);

    let internal: Vec<Rule> = if node.masquerade_all {
        vec![format!("-j {MASQ}")]
    } else if node.local_traffic == LocalTraffic::Unknown {
        Vec::new()
    } else {
        [each_local("-j RETURN"), vec![format!("-j {MASQ}")]].concat()
    };
    // A pod first, even if its address is one of the node's.
    let policy = [
        each_local(&format!("-g {NEAR}")),
        vec![
            format!("-m addrtype --src-type LOCAL -j {MASQ}"),
            format!("-m addrtype --src-type LOCAL -g {NEAR}"),
        ],
    ];
    let mut post = vec![format!("{} -j MASQUERADE --random-fully", set(Set::Loops, "dst,dst,src"))];
    post.extend(postrouting(accepted));
    let nat = Chains::from([
        chain(
            ENTRANCE,
            vec![
                format!("{} -j {MASQ}", set(Set::External, "dst,dst")),
                format!("{} -j {INTERNAL}", set(Set::Internal, "dst,dst")),
                format!("{} -j {POLICY}", set(Set::Policy, "dst,dst")),
            ],
        ),
        chain(MASQ, vec![format!("-j MARK --set-xmark {mark:#x}/{mark:#x}", mark = node.mark)]),
        chain(INTERNAL, internal),
        chain(POLICY, policy.concat()),
        chain(POST, post),
    ]);

    let mut refuse: Vec<Rule> =
        Set::FRONTENDS.iter().map(|frontends| format!("{} -j RETURN", set(*frontends, "dst,dst"))).collect();
    let answer = match node.family {
        IpFamily::IPv4 => "icmp-port-unreachable",
        IpFamily::IPv6 => "icmp6-port-unreachable",
    };
    refuse.push(format!("{} -j REJECT --reject-with {answer}", set(Set::Addresses, "dst")));
    let filter = Chains::from([
        chain(REFUSE, refuse),
        chain(FORWARD, forward(node, accepted)),
        chain(HEALTH, vec![format!("-p tcp {} -j ACCEPT", set(Set::Health, "dst"))]),
    ]);
    [mangle, nat, filter]
}
