//! The node's own addresses, as the kernel has them.
//!
//! In: the kernel's notices that an address came or went. Out: the complete set of addresses, after each change. A notice is
//! only a reason to look again, so nothing of it is parsed; and once in a while the agent looks without one.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket};
use tokio::net::UnixDatagram;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::ipvs::device;
use crate::model::Change;
use crate::sync::Input;

/// Looks without a notice this often, in case one was lost.
const LOOK: Duration = Duration::from_secs(30);
/// Addresses often come in groups.
const SETTLE: Duration = Duration::from_millis(200);
/// `RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR` of `linux/rtnetlink.h`.
const GROUPS: u32 = 0x10 | 0x100;

/// All addresses of all interfaces of this network namespace, but for those of virtual servers.
pub fn read() -> io::Result<BTreeSet<IpAddr>> {
    let mut addresses = BTreeSet::new();
    for interface in getifaddrs()?.filter(|interface| interface.interface_name != device::NAME) {
        let Some(address) = interface.address else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            addresses.insert(SocketAddr::from(std::net::SocketAddrV4::from(*v4)).ip());
        } else if let Some(v6) = address.as_sockaddr_in6() {
            addresses.insert(SocketAddr::from(std::net::SocketAddrV6::from(*v6)).ip());
        }
    }
    Ok(addresses)
}

/// Reports the addresses whenever they change, until the sync loop is gone. `known` is what it was told already.
pub async fn follow(mut known: BTreeSet<IpAddr>, inputs: mpsc::Sender<Input>) {
    let notices = match subscribe() {
        Ok(notices) => Some(notices),
        Err(error) => {
            warn!(
                "the kernel's notices about addresses cannot be read: {error}; looking every {} s instead",
                LOOK.as_secs()
            );
            None
        }
    };
    loop {
        match &notices {
            Some(notices) => {
                let _ = timeout(LOOK, notice(notices)).await;
                sleep(SETTLE).await;
            }
            None => sleep(LOOK).await,
        }
        match read() {
            Ok(addresses) if addresses != known => {
                debug!(?addresses, "the node's addresses have changed");
                let change = Change::LocalAddresses(addresses.iter().copied().collect());
                known = addresses;
                if inputs.send(Input::Change(change)).await.is_err() {
                    return;
                }
            }
            Ok(_) if inputs.is_closed() => return,
            Ok(_) => {}
            Err(error) => warn!("the node's addresses cannot be read: {error}; keeping the known ones"),
        }
    }
}

/// tokio has no netlink socket, and registering a bare descriptor with it needs unsafe code. A datagram socket of another
/// family serves as well: all that is ever called on it is `recv`.
fn subscribe() -> io::Result<UnixDatagram> {
    let notices = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkRoute,
    )?;
    bind(notices.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
    UnixDatagram::from_std(std::os::unix::net::UnixDatagram::from(notices))
}

/// Waits for a notice and takes all that are there. An overrun, which is an error, is one, too.
async fn notice(notices: &UnixDatagram) {
    let mut buffer = [0; 8192];
    let _ = notices.recv(&mut buffer).await;
    while notices.try_recv(&mut buffer).is_ok() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_the_addresses() {
        assert!(read().unwrap().contains(&IpAddr::from([127, 0, 0, 1])));
    }

    #[tokio::test]
    async fn a_subscription_can_be_made() {
        assert!(subscribe().is_ok());
    }
}
