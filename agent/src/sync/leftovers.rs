//! What an earlier process has left in the kernel, in other modes than the one that runs.
//!
//! In: the data plane that runs. Out: data planes to be retired, since nobody else would remove what they wrote; or
//! an error, which is not to be taken for "nothing": a table that is left may win every translation.

use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IptablesBackend;

use super::node::Dataplane;
use crate::iptables::{self, Tools};
use crate::kernel::SyncError;
use crate::{ipvs, nftables, userspace};

const BOTH: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// What a process has left that was killed while it changed the mode, the flavour or the families: nobody else would remove it.
pub(super) async fn leftovers(dataplane: &Dataplane) -> Result<Vec<Dataplane>, SyncError> {
    let families = dataplane.families();
    let other = |family: &IpFamily| !families.contains(family);
    let mut left = Vec::new();
    let mut add = |tools: Tools, families: &[IpFamily]| {
        left.push(Dataplane::Iptables(iptables::Dataplane::new(tools, families)));
    };
    let unknown = |error: nftables::error::Error| {
        let family = families.first().copied().unwrap_or(IpFamily::IPv4);
        let error = nftables::failed(family, &error);
        SyncError {
            message: format!("whether tables of an earlier mode are left is not known: {}", error.message),
            ..error
        }
    };
    let mut flavours = Vec::new();
    for backend in [IptablesBackend::NFT, IptablesBackend::Legacy] {
        flavours.extend(Tools::detect(backend).await.ok());
    }
    let mut tables = nftables::installed(&BOTH).await.map_err(unknown)?;
    let mut proxies = userspace::installed(&BOTH).await.map_err(unknown)?;
    match dataplane {
        Dataplane::Iptables(iptables) => {
            let tools = iptables.tools();
            if let Some(flavour) = tools.other_flavour_in_use().await {
                add(flavour, &BOTH);
            }
            for family in BOTH.into_iter().filter(other) {
                if tools.in_use(family).await {
                    add(tools.clone(), &[family]);
                }
            }
        }
        Dataplane::Nftables(_) | Dataplane::Userspace(_) | Dataplane::Ipvs(_) => {
            match dataplane {
                Dataplane::Nftables(_) => tables.retain(other),
                Dataplane::Userspace(_) => proxies.retain(other),
                _ => {}
            }
            for tools in &flavours {
                if tools.in_use(IpFamily::IPv4).await || tools.in_use(IpFamily::IPv6).await {
                    add(tools.clone(), &BOTH);
                }
            }
        }
    }
    left.extend(ipvs_leftovers(dataplane, &flavours).await);
    if !tables.is_empty() {
        left.push(Dataplane::Nftables(nftables::Dataplane::leftover(&tables).map_err(unknown)?));
    }
    if !proxies.is_empty() {
        left.push(Dataplane::Userspace(userspace::Dataplane::leftover(&proxies).map_err(unknown)?));
    }
    Ok(left)
}

/// What is left of mode ipvs, by the flavour of its chains. A process may have been killed when they were gone already, and nothing else.
async fn ipvs_leftovers(dataplane: &Dataplane, flavours: &[Tools]) -> Vec<Dataplane> {
    let own = if let Dataplane::Ipvs(own) = dataplane { Some(own) } else { None };
    let (mut left, mut without) = (Vec::new(), None);
    let installed = ipvs::installed(&BOTH).await;
    for tools in flavours {
        let (mut there, mut rest) = (Vec::new(), Vec::new());
        for family in installed.iter().copied() {
            let in_force = own.filter(|own| own.families().contains(&family));
            if in_force.is_some_and(|own| own.tools().flavour() == tools.flavour()) {
                continue;
            }
            if ipvs::has_chains(tools, family).await {
                there.push(family);
            } else if in_force.is_none() {
                rest.push(family);
            }
        }
        if !rest.is_empty() {
            without.get_or_insert((tools.clone(), rest));
        }
        if !there.is_empty() {
            left.push((tools.clone(), there));
        }
    }
    if left.is_empty() {
        left.extend(without);
    }
    let opened = left.into_iter().filter_map(|(tools, there)| ipvs::Dataplane::leftover(tools, &there).ok());
    opened.map(|ipvs| Dataplane::Ipvs(Box::new(ipvs))).collect()
}
