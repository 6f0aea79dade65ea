//! What the kernel has counted at our rules.
//!
//! In: a chain as `iptables -v -S` prints it. Out: packets. kube-proxy has nfacct objects for this, which many kernels lack.

use std::collections::BTreeMap;
use std::time::Duration;

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::debug;

use super::Tools;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Packets that a rule of this chain dropped because connection tracking calls them invalid, by family, since it was written. Without
/// a family whose rule is not there.
pub(crate) async fn invalid_dropped(
    tools: &Tools,
    families: &[IpFamily],
    chain: &str,
) -> BTreeMap<IpFamily, u64> {
    let mut dropped = BTreeMap::new();
    for family in families {
        let command = tools.command(*family, "");
        let args = ["-w", "5", "-t", "filter", "-v", "-S", chain];
        match tools.run(&command, &args, None, TIMEOUT).await {
            Ok(text) => dropped.extend(packets(&text).map(|packets| (*family, packets))),
            Err(error) => debug!(?family, "the packets that were dropped cannot be read: {error}"),
        }
    }
    dropped
}

/// The packets of the rule that drops invalid ones.
fn packets(text: &str) -> Option<u64> {
    let rule = text.lines().find(|line| line.contains("--ctstate INVALID") && line.ends_with("-j DROP"))?;
    rule.split_once(" -c ")?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::packets;

    #[test]
    fn the_packets_of_the_rule_are_found() {
        let text = "-N KUBE-FORWARD -c 9 9\n\
            -A KUBE-FORWARD -m conntrack --ctstate INVALID -c 42 2520 -j DROP\n\
            -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -c 7 420 -j ACCEPT\n";
        assert_eq!(packets(text), Some(42));
        assert_eq!(packets("-N KUBE-FORWARD\n"), None);
        assert_eq!(packets("-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n"), None);
    }
}
