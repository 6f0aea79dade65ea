//! Virtual servers and their real servers, as the kernel's IPVS has them.
//!
//! In: nothing. Out: the words in which the renderer says what it wants, [`client`](super::client) says what the kernel has,
//! and a difference between the two is written: [`Operation`]s. No I/O, and no policy.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use pointsman_crds::node_config::NodeIpvs;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::IpvsScheduler;

use crate::model::{Protocol, family_of};

/// Schedule each packet alone, of UDP (`IP_VS_SVC_F_ONEPACKET`).
pub const ONE_PACKET: u32 = 0x4;
/// First flag of the scheduler: with `sh` and `mh`, go on to another real server if the chosen one has weight 0 or is full
/// (`IP_VS_SVC_F_SCHED1`).
pub const SCHEDULER_FALLBACK: u32 = 0x8;
/// Second flag of the scheduler: with `sh` and `mh`, the client's port counts as its address does (`IP_VS_SVC_F_SCHED2`).
pub const SCHEDULER_PORT: u32 = 0x10;
/// Third flag of the scheduler, which none uses yet (`IP_VS_SVC_F_SCHED3`).
pub const SCHEDULER_THIRD: u32 = 0x20;

/// What the kernel knows a virtual server by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// Packets to an address and port.
    Address {
        /// The transport protocol.
        protocol: Protocol,
        /// Address and port of the frontend.
        address: SocketAddr,
    },
    /// Packets with a mark of the firewall.
    Mark {
        /// Of the packets.
        family: IpFamily,
        /// Not 0.
        mark: u32,
    },
}

impl Key {
    /// The server of an address, without what an IPv6 socket address has besides.
    #[must_use]
    pub fn new(protocol: Protocol, address: IpAddr, port: u16) -> Self {
        Self::Address { protocol, address: SocketAddr::new(address, port) }
    }

    /// That of an address with its port, in words.
    #[cfg(test)]
    pub(crate) fn at(protocol: Protocol, address: &str) -> Self {
        let address: SocketAddr = address.parse().unwrap();
        Self::new(protocol, address.ip(), address.port())
    }

    /// Of the packets.
    #[must_use]
    pub fn family(&self) -> IpFamily {
        match self {
            Self::Address { address, .. } => family_of(address.ip()),
            Self::Mark { family, .. } => *family,
        }
    }

    /// The address, if it is known by one.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Address { address, .. } => Some(address.ip()),
            Self::Mark { .. } => None,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { protocol, address } => write!(f, "{address}/{}", protocol.lower()),
            Self::Mark { family, mark } => write!(f, "mark {mark:#x} ({family:?})"),
        }
    }
}

/// Clients that stay with the real server they have got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Persistence {
    /// Seconds since the last connection, after which a client is free again. The kernel looks every 60 s.
    pub timeout: u32,
    /// Clients that have this many bits of their address in common count as one: 1 to 32, or 128.
    pub prefix: u8,
}

/// How a virtual server chooses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The scheduler, by the kernel's name of at most 15 bytes.
    pub scheduler: Cow<'static, str>,
    /// Any of [`ONE_PACKET`], [`SCHEDULER_FALLBACK`], [`SCHEDULER_PORT`] and [`SCHEDULER_THIRD`].
    pub flags: u32,
    /// Session affinity.
    pub persistence: Option<Persistence>,
}

/// A virtual server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VirtualServer {
    /// What it is known by.
    pub key: Key,
    /// How it chooses.
    pub settings: Settings,
}

/// A real server: packets are masqueraded (`IP_VS_CONN_F_MASQ`), the number of connections has no limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RealServer {
    /// Address and port of the endpoint.
    pub address: SocketAddr,
    /// Its share of new connections; 0 for none.
    pub weight: u32,
}

/// A virtual server as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledServer {
    /// The server.
    pub server: VirtualServer,
    /// Its real servers, in the kernel's order.
    pub reals: Vec<InstalledReal>,
}

/// A real server as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstalledReal {
    /// The server.
    pub server: RealServer,
    /// Whether it masquerades and has no limits, as every [`RealServer`] does. Otherwise [`Operation::EditReal`] makes it so.
    pub plain: bool,
    /// Connections of TCP and SCTP that are established; none of UDP.
    pub active: u32,
    /// All other connections.
    pub inactive: u32,
    /// Clients that are held here by persistence.
    pub persistent: u32,
}

/// A change of one virtual or real server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Adds a virtual server. One that is there already gets these settings, and keeps its real servers.
    AddServer(VirtualServer),
    /// Changes the settings. Connections and real servers stay.
    EditServer(VirtualServer),
    /// Removes a virtual server with its real servers. One that is not there is no error.
    RemoveServer(Key),
    /// Adds a real server. One that is there already gets this weight.
    AddReal {
        /// Of this virtual server.
        server: Key,
        /// What to add.
        real: RealServer,
    },
    /// Changes the weight. Connections stay.
    EditReal {
        /// Of this virtual server.
        server: Key,
        /// What it becomes.
        real: RealServer,
    },
    /// Removes a real server. One that is not there is no error.
    RemoveReal {
        /// Of this virtual server.
        server: Key,
        /// Its address and port.
        real: SocketAddr,
    },
}

impl Operation {
    /// The virtual server that it is about.
    #[must_use]
    pub fn key(&self) -> &Key {
        match self {
            Self::AddServer(server) | Self::EditServer(server) => &server.key,
            Self::RemoveServer(server)
            | Self::AddReal { server, .. }
            | Self::EditReal { server, .. }
            | Self::RemoveReal { server, .. } => server,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddServer(server) => write!(f, "add the virtual server {}", server.key),
            Self::EditServer(server) => write!(f, "change the virtual server {}", server.key),
            Self::RemoveServer(server) => write!(f, "remove the virtual server {server}"),
            Self::AddReal { server, real } => write!(f, "add the real server {} to {server}", real.address),
            Self::EditReal { server, real } => {
                write!(f, "change the real server {} of {server}", real.address)
            }
            Self::RemoveReal { server, real } => write!(f, "remove the real server {real} from {server}"),
        }
    }
}

/// How long the kernel keeps a connection without packets, in seconds. Of a change, 0 leaves a value as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// TCP, established.
    pub tcp: u32,
    /// TCP, after a FIN.
    pub tcp_fin: u32,
    /// UDP.
    pub udp: u32,
}

impl Timeouts {
    /// What a configuration asks for.
    #[must_use]
    pub fn of(config: &NodeIpvs) -> Self {
        Self {
            tcp: config.tcp_timeout_seconds,
            tcp_fin: config.tcp_fin_timeout_seconds,
            udp: config.udp_timeout_seconds,
        }
    }

    /// Whether the kernel, which has these, has what was asked for.
    #[must_use]
    pub fn are(&self, asked: &Self) -> bool {
        let same = |there, asked| asked == 0 || there == asked;
        same(self.tcp, asked.tcp) && same(self.tcp_fin, asked.tcp_fin) && same(self.udp, asked.udp)
    }
}

impl fmt::Display for Timeouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.tcp, self.tcp_fin, self.udp)
    }
}

/// The kernel's name of a scheduler.
#[must_use]
pub fn scheduler_name(scheduler: IpvsScheduler) -> &'static str {
    match scheduler {
        IpvsScheduler::Rr => "rr",
        IpvsScheduler::Wrr => "wrr",
        IpvsScheduler::Lc => "lc",
        IpvsScheduler::Wlc => "wlc",
        IpvsScheduler::Lblc => "lblc",
        IpvsScheduler::Lblcr => "lblcr",
        IpvsScheduler::Sh => "sh",
        IpvsScheduler::Dh => "dh",
        IpvsScheduler::Sed => "sed",
        IpvsScheduler::Nq => "nq",
        IpvsScheduler::Mh => "mh",
    }
}
