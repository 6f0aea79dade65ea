//! The addresses of virtual servers, made local to the node: a device without wires, `kube-ipvs0`, and a route for each.
//!
//! In: addresses, and for each family the node address that the node's own connections to them get as their source. Out:
//! the device is there, and with it one local route for each address; those of others are left alone. What is missing is
//! decided by [`plan`], pure; [`Device`] does it.
//!
//! An address is not bound to the device: a route is enough, see docs/adr/0013-local-routes.md. kube-proxy binds; its
//! addresses are taken over. The kernel does not change a route whose source leaves the node:
//! after a change of the node's addresses, [`plan`] again.

mod route;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use netlink_sys::protocols::NETLINK_ROUTE;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use pointsman_crds::proxy_node_status::IpFamily;
use thiserror::Error;
use tokio::task::JoinError;

use crate::model::family_of;
use crate::netlink::socket::{explained, summary};
use crate::netlink::{Encoder, Refused, Socket, SocketError, WireError};
use route::Listed;

/// The device, as kube-proxy calls it.
pub const NAME: &str = "kube-ipvs0";

/// A device that loses its last IPv4 address loses all IPv4 routes. So before those that kube-proxy has bound are removed, it
/// gets one that is the node's already, and keeps it.
const ANCHOR: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 255, 255, 254));

/// Other devices get and lose addresses rarely.
const ATTEMPTS: u32 = 5;

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// Addresses with a local route by the device, and the source that the route names.
    pub routes: BTreeMap<IpAddr, Option<IpAddr>>,
    /// Addresses bound to the device.
    pub bound: BTreeSet<IpAddr>,
    /// Addresses of other devices, which are never routed here.
    pub others: BTreeSet<IpAddr>,
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds a local route. Refused (`EEXIST`) if the address is local by another device.
    Add {
        /// To this address.
        address: IpAddr,
        /// With this address of the node as source of the node's own connections; without one, the kernel chooses.
        source: Option<IpAddr>,
    },
    /// Gives a route of the device another source. Connections are not disturbed.
    Change {
        /// To this address.
        address: IpAddr,
        /// The new source.
        source: Option<IpAddr>,
    },
    /// Removes a route. One that is not there is no error.
    Remove(IpAddr),
    /// Binds an address to the device, for this node only. One that is there is no error.
    Bind(IpAddr),
    /// Removes an address from the device, with the route that came with it. One that is not there is no error.
    Unbind(IpAddr),
}

/// Why something was not done or read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// No socket.
    #[error("cannot open a netlink socket: {}", io::Error::from(*.0))]
    Open(Errno),
    /// No device, and no module for it.
    #[error("the kernel has no dummy devices; load the kernel module dummy on the node")]
    NoDummy,
    /// The device could not be made or set.
    #[error("the device {NAME} cannot be {what}: {}; does the agent have the capability NET_ADMIN in the host's network?", io::Error::from(*errno))]
    Device {
        /// What was tried.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused some changes. All others were made.
    #[error("{}", summary(.0, "a route"))]
    Refused(Vec<Refusal>),
    /// The socket failed, or the kernel does not tell; which changes were made is unknown.
    #[error("{doing}: {}; the next sync tries again", io::Error::from(*errno))]
    Failed {
        /// What was tried.
        doing: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// Routes or addresses came or went during every attempt to read them.
    #[error("reading the node's routes and addresses was disturbed {0} times; the next sync tries again")]
    Disturbed(u32),
    /// A message of the kernel that makes no sense.
    #[error("{0}; report this with the kernel's version")]
    Wire(#[from] WireError),
    /// The task that talks to the kernel has ended.
    #[error("the task that talks to the kernel has ended: {0}; the next sync tries again")]
    Ended(String),
}

impl From<JoinError> for DeviceError {
    fn from(error: JoinError) -> Self {
        Self::Ended(error.to_string())
    }
}

/// A change that the kernel refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{change}: {}{}", io::Error::from(*.errno), explained(detail.as_ref()))]
pub struct Refusal {
    /// Its place among the changes.
    pub index: usize,
    /// What was to be done.
    pub change: String,
    /// The kernel's error.
    pub errno: Errno,
    /// What the kernel says about it.
    pub detail: Option<String>,
}

/// The changes that make what there is into what is wanted: `wanted` addresses are local, with these `sources` by family, and
/// no others of these `families`. New routes come first, and routes have their source before an address goes: so nothing
/// that is wanted stops being local.
#[must_use]
pub fn plan(
    local: &Local,
    wanted: &BTreeSet<IpAddr>,
    sources: &BTreeMap<IpFamily, IpAddr>,
    families: &[IpFamily],
) -> Vec<Change> {
    let ours = |address: &&IpAddr| families.contains(&family_of(**address));
    let source_of = |address: IpAddr| sources.get(&family_of(address)).copied();
    let stays = |address: &IpAddr| wanted.contains(address) && !local.others.contains(address);
    let added = wanted.iter().filter(ours).filter(|address| stays(address)).filter_map(|address| {
        let source = source_of(*address);
        match local.routes.get(address) {
            None => Some(Change::Add { address: *address, source }),
            Some(present) if *present != source => Some(Change::Change { address: *address, source }),
            Some(_) => None,
        }
    });
    let unbound: Vec<_> = local.bound.iter().filter(ours).filter(|address| **address != ANCHOR).collect();
    let anchored = local.bound.contains(&ANCHOR) || !unbound.iter().any(|address| address.is_ipv4());
    let anchor = (!anchored).then_some(Change::Bind(ANCHOR));
    // A route that came with an address has gone with it, unless it was changed.
    let removed = local.routes.keys().filter(ours).filter(|address| !stays(address));
    added
        .chain(anchor)
        .chain(unbound.into_iter().map(|address| Change::Unbind(*address)))
        .chain(removed.map(|address| Change::Remove(*address)))
        .collect()
}

/// The device, over a socket in the network namespace of the thread that opened it. Blocks; see
/// [`OffThread`](crate::netlink::OffThread).
pub struct Device {
    socket: Socket,
    index: u32,
}

impl Device {
    /// Makes the device if there is none. The kernel loads its module if it has one.
    pub fn open() -> Result<Self, DeviceError> {
        let socket = Socket::open(NETLINK_ROUTE, None, None).map_err(DeviceError::Open)?;
        let mut device = Self { socket, index: 0 };
        match device.one("made", |to, flags, sequence| route::add_device(to, flags, sequence, NAME)) {
            // Also one of another type serves.
            Err(DeviceError::Device { errno: Errno::EEXIST, .. }) => {}
            Err(DeviceError::Device { errno: Errno::EOPNOTSUPP, .. }) => return Err(DeviceError::NoDummy),
            made => made?,
        }
        device.index = if_nametoindex(NAME).map_err(|errno| DeviceError::Device { what: "found", errno })?;
        let index = device.index;
        // A kernel without IPv6 refuses, and gives the device no such address anyway.
        let _ = device.one("kept from taking addresses", |to, flags, sequence| {
            route::no_automatic_addresses(to, flags, sequence, index);
        });
        device.one("turned on", |to, flags, sequence| route::turn_on(to, flags, sequence, index))?;
        Ok(device)
    }

    /// The device if it is there, as it is.
    pub fn find() -> Result<Option<Self>, DeviceError> {
        let Ok(index) = if_nametoindex(NAME) else { return Ok(None) };
        let socket = Socket::open(NETLINK_ROUTE, None, None).map_err(DeviceError::Open)?;
        Ok(Some(Self { socket, index }))
    }

    /// What there is, of both families.
    pub fn read(&mut self) -> Result<Local, DeviceError> {
        for _ in 0..ATTEMPTS {
            let mut local = Local::default();
            let index = self.index;
            let addresses = self.list(route::list_addresses, |payload| {
                if let Some(Listed { address, device, .. }) = route::address(payload)? {
                    let set = if device == index { &mut local.bound } else { &mut local.others };
                    set.insert(address);
                }
                Ok(())
            })?;
            let routes = self.list(
                |sequence| route::list_routes(sequence, index),
                |payload| {
                    if let Some(Listed { address, device, source }) = route::local_route(payload)?
                        && device == index
                        && address != ANCHOR
                    {
                        local.routes.insert(address, source);
                    }
                    Ok(())
                },
            )?;
            if addresses && routes {
                return Ok(local);
            }
        }
        Err(DeviceError::Disturbed(ATTEMPTS))
    }

    /// Makes these changes, in order, each for itself: those that are not among the refusals are made.
    pub fn apply(&mut self, changes: &[Change]) -> Result<(), DeviceError> {
        let index = self.index;
        let refused = self.socket.change(changes.len(), |place, flags, sequence, to| {
            if let Some(change) = changes.get(place) {
                route::change(to, flags, sequence, index, change);
            }
        });
        let refused = refused.map_err(|error| failed("changing local routes", &error))?;
        let refusals: Vec<_> = refused.into_iter().filter_map(|refused| refusal(changes, refused)).collect();
        if refusals.is_empty() { Ok(()) } else { Err(DeviceError::Refused(refusals)) }
    }

    /// Removes the device, with its addresses and routes.
    pub fn remove(mut self) -> Result<(), DeviceError> {
        let index = self.index;
        self.one("removed", |to, flags, sequence| route::remove_device(to, flags, sequence, index))
    }

    fn one(&mut self, what: &'static str, write: impl Fn(&mut Encoder, u16, u32)) -> Result<(), DeviceError> {
        let refused = self.socket.change(1, |_, flags, sequence, to| write(to, flags, sequence));
        let refused = refused.map_err(|error| failed("setting the device", &error))?;
        match refused.first() {
            None => Ok(()),
            Some(Refused { errno, .. }) => Err(DeviceError::Device { what, errno: *errno }),
        }
    }

    fn list(
        &mut self,
        request: impl FnOnce(u32) -> Vec<u8>,
        each: impl FnMut(&[u8]) -> Result<(), WireError>,
    ) -> Result<bool, DeviceError> {
        let sequence = self.socket.next_sequence();
        let read = self.socket.list(sequence, &request(sequence), each);
        Ok(read.map_err(|error| failed("reading local routes", &error))??)
    }
}

fn failed(doing: &'static str, error: &SocketError) -> DeviceError {
    match *error {
        SocketError::Failed { errno, .. } | SocketError::Refused { errno, .. } => {
            DeviceError::Failed { doing, errno }
        }
        SocketError::Wire(error) => error.into(),
    }
}

/// What was refused, unless it was not needed.
fn refusal(changes: &[Change], refused: Refused) -> Option<Refusal> {
    let Refused { index, errno, detail, .. } = refused;
    let change = match (changes.get(index)?, errno) {
        (Change::Remove(_), Errno::ESRCH)
        | (Change::Unbind(_), Errno::EADDRNOTAVAIL)
        | (Change::Bind(_), Errno::EEXIST) => return None,
        (Change::Bind(address), _) => format!("to bind the address {address} to {NAME}"),
        (
            Change::Add { address, source: Some(source) } | Change::Change { address, source: Some(source) },
            _,
        ) => {
            format!("the local route to {address} with source {source}")
        }
        (Change::Add { address, source: None } | Change::Change { address, source: None }, _) => {
            format!("the local route to {address}")
        }
        (Change::Remove(address), _) => format!("to remove the local route to {address}"),
        (Change::Unbind(address), _) => format!("to remove the address {address} from {NAME}"),
    };
    Some(Refusal { index, change, errno, detail })
}

#[cfg(test)]
mod tests;
