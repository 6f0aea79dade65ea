//! The real node: which modes this build has, which families the kernel has, and the tools.
//!
//! In: the configuration and the own Node. Out: a data plane, or the reason why this node cannot run what it is told to.

use std::collections::BTreeMap;
use std::path::Path;

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{IpFamilyPolicy, Mode};
use tracing::{info, warn};

use super::{Opened, Platform};
use crate::config::Rejection;
use crate::conntrack::{self, Job, Report};
use crate::iptables::{self, Connections, Tools};
use crate::kernel::{Reach, SyncError, SyncFailure, Synced};
use crate::model::{NodeFacts, family_of};
use crate::netfilter::Notices;
use crate::plan::{Changes, Plan};
use crate::sysctl::{self, Settings, Sysctls, Write};
use crate::takeover::{self, Left, TakeoverError};

const BOTH: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// Modes that this build can run.
pub const MODES: [Mode; 1] = [Mode::Iptables];

/// The node that this process runs on.
#[derive(Debug)]
pub struct Node {
    sysctls: Sysctls,
}

impl Node {
    /// The node, whose kernel settings are below `sysctls`, a directory like `/proc/sys`.
    #[must_use]
    pub fn new(sysctls: &Path) -> Self {
        Self { sysctls: Sysctls::new(sysctls) }
    }
}

impl Platform for Node {
    type Dataplane = iptables::Dataplane;

    async fn open(
        &mut self,
        config: &NodeProxyConfiguration,
        node: &NodeFacts,
    ) -> Result<Opened<Self::Dataplane>, Rejection> {
        let (mode, fallback) = choose_mode(config)?;
        let families = choose_families(config.ip_family_policy, node, kernel_has_ipv6())?;
        let tools = Tools::detect(config.iptables.backend)
            .await
            .map_err(|error| Rejection { reason: "ToolMissing", message: error.to_string() })?;
        info!(version = tools.version(), "iptables tools found");
        let iptables_version = Some(tools.version().to_owned());
        // A process that was killed while it changed the flavour has left its rules, and nobody else would remove them.
        let other_flavour = tools.other_flavour_in_use().await;
        let mut leftovers: Vec<_> =
            other_flavour.into_iter().map(|other| iptables::Dataplane::new(other, &BOTH)).collect();
        // So has one that served a family more.
        for family in BOTH.into_iter().filter(|family| !families.contains(family)) {
            if tools.in_use(family).await {
                leftovers.push(iptables::Dataplane::new(tools.clone(), &[family]));
            }
        }
        let mut dataplane = iptables::Dataplane::new(tools, &families);
        match Notices::subscribe() {
            Ok(notices) => dataplane.listen(notices),
            Err(error) => {
                info!("the kernel's notices about rules cannot be read ({error}); reading the rules instead");
            }
        }
        Ok(Opened { dataplane, leftovers, mode, fallback, families, iptables_version })
    }

    async fn retire(&mut self, old: &Self::Dataplane, new: &Self::Dataplane) -> Result<(), SyncError> {
        let flavour = old.tools().flavour();
        let same = flavour == new.tools().flavour();
        for family in old.families() {
            let served = new.families().contains(family);
            if same && served {
                // The same chains: the new set-up has taken them over.
                continue;
            }
            info!(%flavour, ?family, "removing the rules that are not in use any more");
            let connections = if served { Connections::Covered } else { Connections::Anchor };
            iptables::cleanup(old.tools(), &[*family], connections).await.map_err(|error| SyncError {
                message: format!(
                    "the rules of the {flavour} flavour cannot be removed, and packets may meet them: {}",
                    error.message
                ),
                ..error
            })?;
        }
        Ok(())
    }

    async fn take_over(&mut self, new: &Self::Dataplane) -> Result<bool, SyncError> {
        match takeover::remove(new.tools()).await {
            Ok(Left::Draining) => Ok(false),
            Ok(Left::Nothing | Left::VirtualServers) => Ok(true),
            Err(error @ TakeoverError::Table(_)) => Err(SyncError {
                family: new.families().first().copied().unwrap_or(IpFamily::IPv4),
                failure: SyncFailure::SyncFailed,
                message: error.to_string(),
            }),
            Err(error @ TakeoverError::Ipvs { .. }) => {
                warn!("{error}");
                Ok(false)
            }
        }
    }

    async fn adjust(&mut self, settings: &Settings) -> Vec<String> {
        let (mut sysctls, settings) = (self.sysctls.clone(), *settings);
        // Buckets take the kernel a moment.
        let adjusted = tokio::task::spawn_blocking(move || {
            let applied = sysctls.reconcile(&settings, sysctl::cpus());
            (sysctls, applied)
        });
        match adjusted.await {
            Ok((sysctls, applied)) => {
                self.sysctls = sysctls;
                for Write { setting, current, wanted } in applied.written {
                    info!(%setting, from = current, to = wanted, "kernel setting changed");
                }
                applied.failed.iter().map(ToString::to_string).collect()
            }
            Err(error) => vec![error.to_string()],
        }
    }

    async fn end_stale_flows(&mut self, job: &Job) -> Result<Report, String> {
        let job = job.clone();
        match tokio::task::spawn_blocking(move || conntrack::run(&job)).await {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl super::Dataplane for iptables::Dataplane {
    async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        Self::sync(self, plan, changes).await
    }

    async fn changed(&mut self) {
        Self::changed(self).await;
    }

    async fn invalid_dropped(&mut self) -> BTreeMap<IpFamily, u64> {
        Self::invalid_dropped(self).await
    }

    async fn verify(&mut self, plan: &Plan, reach: Reach) -> Result<Vec<String>, SyncError> {
        Self::verify(self, plan, reach).await
    }

    async fn repair(&mut self, plan: &Plan) -> Vec<SyncError> {
        Self::repair(self, plan).await
    }

    async fn probe(&mut self, plan: &Plan) -> Result<(), SyncError> {
        Self::probe(self, plan).await
    }
}

/// The first of the configured modes that this build has, and why it is not the first of all.
fn choose_mode(config: &NodeProxyConfiguration) -> Result<(Mode, Option<String>), Rejection> {
    if MODES.contains(&config.mode) {
        return Ok((config.mode, None));
    }
    let missing = format!("mode {} is not supported by this agent", config.mode);
    match config.fallback_modes.iter().find(|mode| MODES.contains(mode)) {
        Some(mode) => Ok((*mode, Some(format!("{missing}; running in mode {mode} from fallbackModes")))),
        None => Err(Rejection {
            reason: "ModeUnsupported",
            message: format!(
                "{missing}, and fallbackModes names none that is ({}); set one of them, or upgrade the agent",
                MODES.map(|mode| mode.to_string()).join(", ")
            ),
        }),
    }
}

/// The families to serve, primary first.
fn choose_families(policy: IpFamilyPolicy, node: &NodeFacts, ipv6: bool) -> Result<Vec<IpFamily>, Rejection> {
    let primary = node.addresses.first().map_or(IpFamily::IPv4, |address| family_of(*address));
    let secondary = match primary {
        IpFamily::IPv4 => IpFamily::IPv6,
        IpFamily::IPv6 => IpFamily::IPv4,
    };
    let kernel_has = |family: IpFamily| family == IpFamily::IPv4 || ipv6;
    let missing = |family: IpFamily, whose: &str| Rejection {
        reason: "FamilyMissing",
        message: format!(
            "{family:?} is needed ({policy:?}), and {whose} does not have it; set ipFamilyPolicy to what this node has"
        ),
    };
    if !kernel_has(primary) {
        return Err(missing(primary, "the kernel"));
    }
    match policy {
        IpFamilyPolicy::PreferDualStack if kernel_has(secondary) => Ok(vec![primary, secondary]),
        IpFamilyPolicy::SingleStack | IpFamilyPolicy::PreferDualStack => Ok(vec![primary]),
        IpFamilyPolicy::RequireDualStack if !kernel_has(secondary) => Err(missing(secondary, "the kernel")),
        IpFamilyPolicy::RequireDualStack if node.primary(secondary).is_none() => {
            Err(missing(secondary, "the Node object"))
        }
        IpFamilyPolicy::RequireDualStack => Ok(vec![primary, secondary]),
    }
}

/// Whether the kernel has IPv6 in this network namespace, and has not been told to do without.
fn kernel_has_ipv6() -> bool {
    let off = std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    Path::new("/proc/net/if_inet6").exists() && off.is_ok_and(|value| value.trim() == "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::sample;
    use IpFamily::{IPv4, IPv6};

    fn node(addresses: &[&str]) -> NodeFacts {
        NodeFacts {
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn the_first_mode_that_this_build_has_is_chosen() {
        let mut config = sample();
        assert_eq!(choose_mode(&config), Ok((Mode::Iptables, None)));
        config.mode = Mode::Ipvs;
        let rejection = choose_mode(&config).unwrap_err();
        assert_eq!(rejection.reason, "ModeUnsupported");
        assert!(rejection.message.contains("mode ipvs"), "{}", rejection.message);
        config.fallback_modes = vec![Mode::Nftables, Mode::Iptables];
        let (mode, why) = choose_mode(&config).unwrap();
        assert_eq!(mode, Mode::Iptables);
        assert!(why.unwrap().contains("mode ipvs is not supported"));
    }

    #[test]
    fn families_follow_policy_kernel_and_node() {
        use IpFamilyPolicy::{PreferDualStack, RequireDualStack, SingleStack};
        let both = node(&["fd00::1", "10.0.0.1"]);
        let four = node(&["10.0.0.1"]);
        for (policy, node, ipv6, expected) in [
            (SingleStack, &both, true, Some(vec![IPv6])),
            (SingleStack, &four, true, Some(vec![IPv4])),
            (PreferDualStack, &both, true, Some(vec![IPv6, IPv4])),
            (PreferDualStack, &four, true, Some(vec![IPv4, IPv6])),
            (PreferDualStack, &four, false, Some(vec![IPv4])),
            (PreferDualStack, &NodeFacts::default(), false, Some(vec![IPv4])),
            (PreferDualStack, &both, false, None),
            (RequireDualStack, &both, true, Some(vec![IPv6, IPv4])),
            (RequireDualStack, &four, true, None),
            (RequireDualStack, &four, false, None),
        ] {
            let chosen = choose_families(policy, node, ipv6);
            if let Err(rejection) = &chosen {
                assert_eq!(rejection.reason, "FamilyMissing");
            }
            assert_eq!(chosen.ok(), expected, "{policy:?} {node:?} {ipv6}");
        }
    }
}
