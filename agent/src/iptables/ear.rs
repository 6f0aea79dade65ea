//! Whether others have written what is ours, so that it need not be read to find that nobody has.
//!
//! In: the kernel's [`Notices`], which the nft flavour gives, and the ids of the processes that write for us. Out: the
//! families that have to be read. The legacy flavour gives no notices: then every family is suspect at every look. Nothing
//! cheaper would do, because its tools fetch the whole table whatever they are asked (10,000 services: 0.12 s to list one
//! chain, 0.15 s for all of them).

use std::collections::BTreeSet;

use pointsman_crds::proxy_node_status::IpFamily;

use super::saved::{ours_in_filter, ours_in_nat};
use super::shared::JUMPS;
use crate::netfilter::{Event, Notice, Notices};

/// What is heard.
#[derive(Debug, Default)]
pub(crate) struct Ear {
    notices: Option<Notices>,
    suspects: BTreeSet<IpFamily>,
    /// Whether a suspect has come up that nobody was told of.
    news: bool,
}

impl Ear {
    /// Listens from now on.
    pub(crate) fn new(notices: Notices) -> Self {
        Self { notices: Some(notices), ..Self::default() }
    }

    /// Takes in what has happened. `own` is a process that has just written for us and ended.
    pub(crate) fn listen(&mut self, own: Option<u32>) {
        let Some(notices) = &self.notices else { return };
        let suspects = &mut self.suspects;
        let before = suspects.len();
        let complete = notices.take(|notice| {
            if Some(notice.writer) != own && concerns_us(notice) {
                suspects.insert(notice.family);
            }
        });
        if !complete {
            suspects.extend([IpFamily::IPv4, IpFamily::IPv6]);
        }
        self.news |= suspects.len() > before;
    }

    /// Waits until a family has become suspect. For ever without notices.
    pub(crate) async fn hear(&mut self) {
        while !std::mem::take(&mut self.news) {
            match &self.notices {
                Some(notices) => notices.wait().await,
                None => std::future::pending().await,
            }
            self.listen(None);
        }
    }

    /// Whether a family has to be read.
    pub(crate) fn suspects(&self, family: IpFamily) -> bool {
        self.notices.is_none() || self.suspects.contains(&family)
    }

    /// A family is about to be read: what happens from here on counts again.
    pub(crate) fn trust(&mut self, family: IpFamily) {
        self.listen(None);
        self.suspects.remove(&family);
    }

    /// A family was read and is not as it should be.
    pub(crate) fn doubt(&mut self, family: IpFamily) {
        self.suspects.insert(family);
    }
}

/// Whether something of ours may be different now. Rules that others add to the built-in chains leave ours as they are.
fn concerns_us(notice: &Notice<'_>) -> bool {
    let ours = match notice.table {
        "nat" => ours_in_nat(notice.chain),
        "filter" => ours_in_filter(notice.chain),
        _ => return false,
    };
    let built_in = || JUMPS.iter().any(|jump| jump.table == notice.table && jump.from == notice.chain);
    match notice.event {
        Event::TableDeleted => true,
        Event::ChainAdded | Event::RuleAdded => ours,
        Event::ChainDeleted | Event::RuleDeleted => ours || built_in(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syn_10_only_what_may_be_ours_is_suspect() {
        let about = |table, chain, event| {
            concerns_us(&Notice { writer: 1, family: IpFamily::IPv4, event, table, chain })
        };
        for (table, chain, event, expected) in [
            ("nat", "KUBE-SVC-A", Event::RuleDeleted, true),
            ("nat", "KUBE-SVC-A", Event::RuleAdded, true),
            ("nat", "KUBE-SVC-A", Event::ChainDeleted, true),
            ("nat", "PREROUTING", Event::RuleDeleted, true),
            ("nat", "", Event::TableDeleted, true),
            ("filter", "KUBE-FIREWALL", Event::RuleDeleted, false),
            ("nat", "PREROUTING", Event::RuleAdded, false),
            ("nat", "INPUT", Event::RuleDeleted, false),
            ("nat", "CNI-HOSTPORT-DNAT", Event::RuleDeleted, false),
            ("mangle", "KUBE-SVC-A", Event::RuleDeleted, false),
            ("kube-router", "KUBE-SVC-A", Event::ChainDeleted, false),
        ] {
            assert_eq!(about(table, chain, event), expected, "{table} {chain} {event:?}");
        }
    }
}
