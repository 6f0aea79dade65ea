//! The real node: which modes this build has, which families the kernel has, and the tools.
//!
//! In: the configuration and the own Node. Out: a data plane, or the reason why this node cannot run what it is told to.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::{IpFamilyPolicy, IptablesBackend, Mode};
use tracing::{info, warn};

use super::leftovers::leftovers;
use super::{Opened, Platform};
use crate::config::Rejection;
use crate::conntrack::{self, Connections, Job, Report};
use crate::iptables::{self, Tools};
use crate::ipvs;
use crate::kernel::{Counted, Reach, SyncError, SyncFailure, Synced};
use crate::model::{NodeFacts, family_of};
use crate::netfilter::Notices;
use crate::nftables;
use crate::plan::{Changes, Plan, PortId, PortPlan};
use crate::sysctl::{Machine, Setting, Settings, Sysctls, Write};
use crate::takeover::{Known, Left, Takeover, TakeoverError};
use crate::userspace;
use crate::userspace::counters::Counters;
use crate::userspace::localhost::Localhost;
use crate::userspace::workers::THREADS;

/// Modes that this build can run.
pub const MODES: [Mode; 4] = [Mode::Nftables, Mode::Iptables, Mode::Ipvs, Mode::Userspace];
/// When the agent stops, proxied connections get this long to end. The kubelet waits for thirty seconds.
const LAST_CONNECTIONS: Duration = Duration::from_secs(20);

/// The node that this process runs on.
#[derive(Debug)]
pub struct Node {
    sysctls: Sysctls,
    counters: Counters,
    takeover: Takeover,
    /// What of mode ipvs waits for its connections to end.
    leaving: Option<ipvs::Leaving>,
    /// Once it was asked for.
    localhost: Option<Localhost>,
}

impl Node {
    /// The node, whose kernel settings are below `sysctls`, a directory like `/proc/sys`. A proxy counts what it does in `counters`.
    #[must_use]
    pub fn new(sysctls: &Path, counters: Counters) -> Self {
        let sysctls = Sysctls::new(sysctls);
        Self { sysctls, counters, takeover: Takeover::default(), leaving: None, localhost: None }
    }
}

/// What writes the kernel, in whichever mode.
pub enum Dataplane {
    /// Mode iptables.
    Iptables(iptables::Dataplane),
    /// Mode ipvs.
    Ipvs(Box<ipvs::Dataplane>),
    /// Mode nftables.
    Nftables(nftables::Dataplane),
    /// Mode userspace.
    Userspace(userspace::Dataplane),
}

impl Dataplane {
    /// The families that are served.
    #[must_use]
    pub fn families(&self) -> &[IpFamily] {
        match self {
            Self::Iptables(iptables) => iptables.families(),
            Self::Ipvs(ipvs) => ipvs.families(),
            Self::Nftables(nftables) => nftables.families(),
            Self::Userspace(userspace) => userspace.families(),
        }
    }
}

impl Platform for Node {
    type Dataplane = Dataplane;

    async fn open(
        &mut self,
        config: &NodeProxyConfiguration,
        node: &NodeFacts,
    ) -> Result<Opened<Self::Dataplane>, Rejection> {
        let families = choose_families(config.ip_family_policy, node, kernel_has_ipv6())?;
        let mut refused: Vec<Rejection> = Vec::new();
        for mode in [config.mode].iter().chain(&config.fallback_modes).copied() {
            match self.open_mode(mode, config, &families).await {
                Ok(dataplane) => {
                    let iptables_version = match &dataplane {
                        Dataplane::Iptables(iptables) => Some(iptables.tools().version().to_owned()),
                        Dataplane::Ipvs(ipvs) => Some(ipvs.tools().version().to_owned()),
                        Dataplane::Nftables(_) | Dataplane::Userspace(_) => None,
                    };
                    let fallback = fallback(mode, &refused);
                    return Ok(Opened { dataplane, mode, fallback, families, iptables_version });
                }
                Err(rejection) => refused.push(rejection),
            }
        }
        Err(no_mode(&refused))
    }

    async fn leftovers(&mut self, new: &Self::Dataplane) -> Result<Vec<Self::Dataplane>, SyncError> {
        leftovers(new).await
    }

    async fn retire(&mut self, old: &Self::Dataplane, new: &Self::Dataplane) -> Result<(), SyncError> {
        match (old, new) {
            // It has taken over what was about to leave.
            (_, Dataplane::Ipvs(_)) => self.leaving = None,
            (Dataplane::Ipvs(old), _) => {
                self.leaving = Some(ipvs::Leaving::begin(old.tools(), old.families()).await?);
                return Ok(());
            }
            _ => {}
        }
        for family in old.families() {
            let served = new.families().contains(family);
            let taken_over = match (old, new) {
                // The same chains, or the same table.
                (Dataplane::Iptables(old), Dataplane::Iptables(new)) => {
                    old.tools().flavour() == new.tools().flavour()
                }
                (Dataplane::Ipvs(old), Dataplane::Ipvs(new)) => {
                    old.tools().flavour() == new.tools().flavour()
                }
                (Dataplane::Nftables(_), Dataplane::Nftables(_))
                | (Dataplane::Userspace(_), Dataplane::Userspace(_)) => true,
                _ => false,
            };
            if taken_over && served {
                continue;
            }
            let connections = if served { Connections::Covered } else { Connections::Anchor };
            let removed = match old {
                Dataplane::Iptables(old) => {
                    let flavour = old.tools().flavour();
                    info!(%flavour, ?family, "removing the rules of iptables that are not in use any more");
                    iptables::cleanup(old.tools(), &[*family], connections).await.map(|_| ())
                }
                // Of another flavour the chains, of another family everything.
                Dataplane::Ipvs(old) if served => ipvs::remove_chains(old.tools(), *family).await,
                Dataplane::Ipvs(old) => ipvs::cleanup(std::slice::from_ref(old.tools()), &[*family]).await,
                Dataplane::Nftables(_) => {
                    info!(?family, "removing the table of nftables that is not in use any more");
                    nftables::cleanup(&[*family], connections).await.map(|_| ())
                }
                Dataplane::Userspace(_) => {
                    info!(?family, "removing the rules that lead to the proxy");
                    userspace::cleanup(&[*family]).await
                }
            };
            removed.map_err(|error| SyncError {
                message: format!(
                    "what this node was programmed with before cannot be removed, and packets may meet it: {}",
                    error.message
                ),
                ..error
            })?;
        }
        Ok(())
    }

    async fn take_over(&mut self, new: &Self::Dataplane, plan: &Plan) -> Result<bool, SyncError> {
        let known = Known::of(plan);
        if let Some(leaving) = &self.leaving {
            if !leaving.look().await? {
                // Without tools, only what packets may meet.
                let removed = self.takeover.remove(None, &known).await;
                return removed.map(|_| false).map_err(|error| not_taken_over(new, &error));
            }
            self.leaving = None;
        }
        let removed = match new {
            Dataplane::Ipvs(ipvs) => Takeover::remove_beside_ipvs(ipvs.tools()).await.map(|()| Left::Nothing),
            Dataplane::Iptables(iptables) => self.takeover.remove(Some(iptables.tools()), &known).await,
            Dataplane::Nftables(_) | Dataplane::Userspace(_) => {
                let tools = Tools::detect(IptablesBackend::Auto).await.ok();
                self.takeover.remove(tools.as_ref(), &known).await
            }
        };
        match removed {
            Ok(Left::Draining) => Ok(false),
            Ok(Left::Nothing) => Ok(true),
            Err(error @ TakeoverError::Table(_)) => Err(not_taken_over(new, &error)),
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
            let applied = sysctls.reconcile(&settings, Machine::this());
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

    fn differing(&self, settings: &Settings) -> Vec<String> {
        self.sysctls.differing(settings, Machine::this()).iter().map(ToString::to_string).collect()
    }

    fn serve_localhost(&mut self, plan: &Plan, changes: Option<&Changes>) -> Vec<String> {
        let wanted = plan.families().iter().filter_map(|family| plan.node(*family));
        if self.localhost.is_none() && !wanted.into_iter().any(|node| node.node_ports.localhost) {
            return Vec::new();
        }
        // What changed before this was asked for, is new.
        let changes = changes.filter(|_| self.localhost.is_some());
        let localhost = self.localhost.get_or_insert_with(|| Localhost::new(self.counters.clone()));
        localhost.follow(plan, changes)
    }

    fn resting(&self) -> Vec<String> {
        self.counters.resting()
    }

    async fn stand_in(&mut self, dataplane: &Self::Dataplane) -> Option<Self::Dataplane> {
        let Dataplane::Userspace(userspace) = dataplane else { return None };
        let opened = nftables::Dataplane::open(userspace.families()).await;
        opened.map(Dataplane::Nftables).inspect_err(|missing| warn!("{missing}")).ok()
    }

    async fn stop(&mut self, dataplane: Option<&mut Self::Dataplane>) {
        let proxy = async {
            if let Some(Dataplane::Userspace(userspace)) = dataplane {
                userspace.stop(LAST_CONNECTIONS).await;
            }
        };
        let localhost = async {
            if let Some(localhost) = &mut self.localhost {
                localhost.stop(LAST_CONNECTIONS).await;
            }
        };
        tokio::join!(proxy, localhost);
    }

    async fn end_stale_flows(&mut self, job: &Job) -> Result<Report, String> {
        let job = job.clone();
        match tokio::task::spawn_blocking(move || conntrack::run(&job)).await {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Node {
    async fn open_mode(
        &self,
        mode: Mode,
        config: &NodeProxyConfiguration,
        families: &[IpFamily],
    ) -> Result<Dataplane, Rejection> {
        match mode {
            Mode::Iptables => {
                let tools = find_tools(config).await?;
                let mut dataplane = iptables::Dataplane::new(tools, families);
                match Notices::subscribe() {
                    Ok(notices) => dataplane.listen(notices),
                    Err(error) => {
                        info!(
                            "the kernel's notices about rules cannot be read ({error}); reading the rules instead"
                        );
                    }
                }
                Ok(Dataplane::Iptables(dataplane))
            }
            Mode::Nftables => nftables::Dataplane::open(families)
                .await
                .map(Dataplane::Nftables)
                .map_err(|message| Rejection { reason: "KernelUnsupported", message }),
            Mode::Userspace => userspace::Dataplane::open(families, self.counters.clone(), THREADS)
                .await
                .map(Dataplane::Userspace)
                .map_err(|message| Rejection { reason: "KernelUnsupported", message }),
            Mode::Ipvs => {
                let tools = find_tools(config).await?;
                let unsupported = |message| Rejection { reason: "KernelUnsupported", message };
                let scheduler = config.ipvs.scheduler;
                let opened = ipvs::Dataplane::open(tools, families, scheduler).await.map_err(unsupported)?;
                // Connections that are not tracked are not masqueraded, and could not go on in another mode.
                let applied = self.sysctls.prepare_ipvs(Machine::this());
                match applied.failed.iter().find(|failed| failed.write.setting == Setting::IpvsConntrack) {
                    Some(failed) => {
                        opened.discard().await;
                        Err(unsupported(failed.to_string()))
                    }
                    None => Ok(Dataplane::Ipvs(Box::new(opened))),
                }
            }
        }
    }
}

async fn find_tools(config: &NodeProxyConfiguration) -> Result<Tools, Rejection> {
    let tools = Tools::detect(config.iptables.backend).await;
    let tools = tools.map_err(|error| Rejection { reason: "ToolMissing", message: error.to_string() })?;
    info!(version = tools.version(), "iptables tools found");
    Ok(tools)
}

fn not_taken_over(new: &Dataplane, error: &TakeoverError) -> SyncError {
    SyncError {
        family: new.families().first().copied().unwrap_or(IpFamily::IPv4),
        failure: SyncFailure::SyncFailed,
        message: error.to_string(),
    }
}

/// Why it is not the mode of first choice.
fn fallback(mode: Mode, refused: &[Rejection]) -> Option<String> {
    let reasons: Vec<_> = refused.iter().map(|rejection| rejection.message.as_str()).collect();
    (!reasons.is_empty())
        .then(|| format!("{}; running in mode {mode} from fallbackModes", reasons.join("; ")))
}

fn no_mode(refused: &[Rejection]) -> Rejection {
    let messages: Vec<_> = refused.iter().map(|rejection| rejection.message.as_str()).collect();
    Rejection {
        reason: refused.first().map_or("ModeUnsupported", |rejection| rejection.reason),
        message: format!(
            "{}; this agent has the modes {}: add one that this node can run to fallbackModes",
            messages.join("; "),
            MODES.map(|mode| mode.to_string()).join(", ")
        ),
    }
}

impl super::Dataplane for Dataplane {
    async fn sync(&mut self, plan: &Plan, changes: &Changes) -> (Synced, Vec<SyncError>) {
        match self {
            Self::Iptables(iptables) => iptables.sync(plan, changes).await,
            Self::Ipvs(ipvs) => ipvs.sync(plan, changes).await,
            Self::Nftables(nftables) => nftables.sync(plan, changes).await,
            Self::Userspace(userspace) => userspace.sync(plan, changes).await,
        }
    }

    async fn changed(&mut self) {
        match self {
            Self::Iptables(iptables) => iptables.changed().await,
            Self::Ipvs(ipvs) => ipvs.changed().await,
            Self::Nftables(nftables) => nftables.changed().await,
            Self::Userspace(userspace) => userspace.changed().await,
        }
    }

    fn flow_endpoints(&self, id: &PortId, port: &PortPlan) -> Vec<SocketAddr> {
        match self {
            // Without an endpoint, flows to the proxy are to meet the rule that refuses them.
            Self::Userspace(userspace) if !port.serving.is_empty() => userspace.flow_endpoints(id),
            _ => port.serving_sockets(),
        }
    }

    async fn traffic(&mut self) -> Option<Vec<(PortId, Counted)>> {
        match self {
            Self::Nftables(nftables) => nftables.traffic().await,
            _ => Some(Vec::new()),
        }
    }

    async fn invalid_dropped(&mut self) -> BTreeMap<IpFamily, u64> {
        match self {
            Self::Iptables(iptables) => iptables.invalid_dropped().await,
            Self::Ipvs(ipvs) => ipvs.invalid_dropped().await,
            Self::Nftables(nftables) => nftables.invalid_dropped().await,
            // It has no such rule.
            Self::Userspace(_) => BTreeMap::new(),
        }
    }

    async fn verify(&mut self, plan: &Plan, reach: Reach) -> Result<Vec<String>, SyncError> {
        match self {
            Self::Iptables(iptables) => iptables.verify(plan, reach).await,
            Self::Ipvs(ipvs) => ipvs.verify(plan).await,
            Self::Nftables(nftables) => nftables.verify(plan, reach).await,
            Self::Userspace(userspace) => userspace.verify().await,
        }
    }

    async fn repair(&mut self, plan: &Plan) -> Vec<SyncError> {
        match self {
            Self::Iptables(iptables) => iptables.repair(plan).await,
            Self::Ipvs(ipvs) => ipvs.repair(plan).await,
            Self::Nftables(nftables) => nftables.repair(plan).await,
            Self::Userspace(userspace) => userspace.repair().await,
        }
    }

    async fn probe(&mut self, plan: &Plan) -> Result<(), SyncError> {
        match self {
            Self::Iptables(iptables) => iptables.probe(plan).await,
            Self::Ipvs(ipvs) => ipvs.probe(plan).await,
            Self::Nftables(nftables) => nftables.probe().await,
            Self::Userspace(userspace) => userspace.probe().await,
        }
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
    use IpFamily::{IPv4, IPv6};

    fn node(addresses: &[&str]) -> NodeFacts {
        NodeFacts {
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn modes_that_a_node_cannot_run_are_named_with_a_way_out() {
        let refused = |reason, message: &str| Rejection { reason, message: message.to_owned() };
        let kernel = refused("KernelUnsupported", "the kernel has no IPVS");
        let none = no_mode(&[kernel.clone(), refused("ToolMissing", "no iptables")]);
        assert_eq!(none.reason, "KernelUnsupported");
        assert_eq!(
            none.message,
            "the kernel has no IPVS; no iptables; this agent has the modes nftables, iptables, ipvs, userspace: add one that this node can run to fallbackModes"
        );
        assert_eq!(fallback(Mode::Iptables, &[]), None);
        assert_eq!(
            fallback(Mode::Iptables, &[kernel]).unwrap(),
            "the kernel has no IPVS; running in mode iptables from fallbackModes"
        );
    }

    // ids: CFG-6 CFG-9 REG-133694
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
