//! Whether this node can run mode ipvs, and if not, everything that it lacks.
//!
//! In: the kernel, asked by [`Kernel`], and whether it has ipsets. Out: what is [`Missing`]; nothing if the node can. Then the
//! device is there, which is needed next; otherwise the kernel is left as it was. Each thing is tried for itself, so that one
//! message names all that has to be done.

use std::fmt;
use std::net::IpAddr;

use pointsman_crds::proxy_node_status::IpFamily;

use super::Error;
use super::client::Connection;
use super::device::{Device, DeviceError};
use super::server::{Key, Operation, Settings, VirtualServer};
use crate::ipset;
use crate::model::Protocol;

/// Of the addresses that are reserved for documentation; kube-proxy takes the first.
const PROBE: [(IpFamily, IpAddr); 2] = [
    (IpFamily::IPv4, IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 0))),
    (IpFamily::IPv6, IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0x5c64, 0))),
];
const PROBE_PORT: u16 = 20_000;

/// Something that the node lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// ipsets.
    Ipset(ipset::Error),
    /// IPVS does not list its virtual servers.
    Ipvs(Error),
    /// A virtual server with this scheduler cannot be added.
    Scheduler {
        /// Of the virtual server.
        family: IpFamily,
        /// The scheduler.
        name: String,
        /// Why not.
        error: Error,
    },
    /// A virtual server is not there after it was added.
    NotAdded(IpFamily),
    /// A virtual server that was added cannot be removed again.
    NotRemoved(IpFamily, Error),
    /// Dummy devices.
    Device(DeviceError),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipset(error) => error.fmt(f),
            Self::Ipvs(error) => write!(f, "IPVS: {error}"),
            Self::Scheduler { family, name, error } => {
                write!(
                    f,
                    "no {family:?} virtual server with scheduler {name} (kernel module ip_vs_{name}): {error}"
                )
            }
            Self::NotAdded(family) => write!(f, "an {family:?} virtual server that was added is not there"),
            Self::NotRemoved(family, error) => {
                write!(f, "an {family:?} virtual server cannot be removed again: {error}")
            }
            Self::Device(error) => error.fmt(f),
        }
    }
}

/// What is asked of the kernel.
pub trait Kernel {
    /// All virtual servers, without their real servers.
    fn servers(&mut self) -> Result<Vec<VirtualServer>, Error>;
    /// Makes a change.
    fn apply(&mut self, operation: Operation) -> Result<(), Error>;
    /// Makes the device of the mode; whether it was not there.
    fn make_device(&mut self) -> Result<bool, DeviceError>;
    /// Removes the device. The kernel takes a while for that.
    fn remove_device(&mut self) -> Result<(), DeviceError>;
}

impl Kernel for Connection {
    fn servers(&mut self) -> Result<Vec<VirtualServer>, Error> {
        Ok(Self::servers(self)?.unwrap_or_default())
    }

    fn apply(&mut self, operation: Operation) -> Result<(), Error> {
        Self::apply(self, &[operation])
    }

    fn make_device(&mut self) -> Result<bool, DeviceError> {
        let there = Device::find()?.is_some();
        Device::open().map(|_| !there)
    }

    fn remove_device(&mut self) -> Result<(), DeviceError> {
        Device::find()?.map_or(Ok(()), Device::remove)
    }
}

/// What the node lacks. `ipset` and `kernel` may be the reason why there is none.
pub fn preflight<K: Kernel>(
    ipset: Result<(), ipset::Error>,
    kernel: Result<K, Error>,
    scheduler: &str,
    families: &[IpFamily],
) -> Vec<Missing> {
    let mut missing = Vec::from_iter(ipset.err().map(Missing::Ipset));
    match kernel {
        Ok(mut kernel) => {
            missing.extend(
                families.iter().filter_map(|family| try_server(&mut kernel, scheduler, *family).err()),
            );
            match kernel.make_device() {
                Ok(true) if !missing.is_empty() => {
                    missing.extend(kernel.remove_device().err().map(Missing::Device));
                }
                Ok(_) => {}
                Err(error) => missing.push(Missing::Device(error)),
            }
        }
        Err(error) => missing.push(Missing::Ipvs(error)),
    }
    missing.dedup();
    missing
}

/// Adds a virtual server, looks for it, and removes it; not if there is one with this scheduler already.
fn try_server(kernel: &mut impl Kernel, scheduler: &str, family: IpFamily) -> Result<(), Missing> {
    let there = kernel.servers().map_err(Missing::Ipvs)?;
    let uses =
        |server: &VirtualServer| server.settings.scheduler == scheduler && server.key.family() == family;
    if there.iter().any(uses) {
        return Ok(());
    }
    let Some((_, address)) = PROBE.into_iter().find(|(of, _)| *of == family) else { return Ok(()) };
    let settings = Settings { scheduler: scheduler.to_owned().into(), flags: 0, persistence: None };
    let server = VirtualServer { key: Key::new(Protocol::Tcp, address, PROBE_PORT), settings };
    let added = kernel.apply(Operation::AddServer(server.clone()));
    added.map_err(|error| Missing::Scheduler { family, name: scheduler.to_owned(), error })?;
    let found = kernel.servers().map(|servers| servers.contains(&server));
    let removed = kernel.apply(Operation::RemoveServer(server.key));
    if !found.map_err(Missing::Ipvs)? {
        return Err(Missing::NotAdded(family));
    }
    removed.map_err(|error| Missing::NotRemoved(family, error))
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    const V4: [IpFamily; 1] = [IpFamily::IPv4];

    #[derive(Default)]
    struct Fake {
        servers: Vec<VirtualServer>,
        device: bool,
        /// What does not work.
        broken: &'static [&'static str],
        done: Vec<String>,
    }

    impl Fake {
        fn without(broken: &'static [&'static str]) -> Self {
            Self { broken, ..Self::default() }
        }

        fn lacks(&self, what: &str) -> bool {
            self.broken.contains(&what)
        }
    }

    fn refused(errno: Errno) -> Error {
        Error::NotTold { what: "servers", errno }
    }

    impl Kernel for &mut Fake {
        fn servers(&mut self) -> Result<Vec<VirtualServer>, Error> {
            if self.lacks("list") { Err(refused(Errno::EPERM)) } else { Ok(self.servers.clone()) }
        }

        fn apply(&mut self, operation: Operation) -> Result<(), Error> {
            self.done.push(operation.to_string());
            match operation {
                Operation::AddServer(_) if self.lacks("add") => return Err(refused(Errno::ENOENT)),
                Operation::AddServer(server) if !self.lacks("keep") => self.servers.push(server),
                Operation::RemoveServer(_) if self.lacks("remove") => return Err(refused(Errno::EBUSY)),
                Operation::RemoveServer(key) => self.servers.retain(|server| server.key != key),
                _ => {}
            }
            Ok(())
        }

        fn make_device(&mut self) -> Result<bool, DeviceError> {
            if self.lacks("dummy") {
                Err(DeviceError::NoDummy)
            } else {
                Ok(!std::mem::replace(&mut self.device, true))
            }
        }

        fn remove_device(&mut self) -> Result<(), DeviceError> {
            self.device = false;
            Ok(())
        }
    }

    fn run(ipset: Result<(), ipset::Error>, kernel: &mut Fake) -> Vec<String> {
        preflight(ipset, Ok(kernel), "wrr", &V4).iter().map(ToString::to_string).collect()
    }

    const IPSET: Result<(), ipset::Error> = Ok(());

    #[test]
    fn ipvs_probe_1_to_6() {
        let mut kernel = Fake::default();
        assert_eq!(run(IPSET, &mut kernel), Vec::<String>::new(), "1 ok");
        let probe = "the virtual server 198.51.100.0:20000/tcp";
        assert_eq!(kernel.done, [format!("add {probe}"), format!("remove {probe}")]);
        assert_eq!(kernel.servers, [], "nothing is left");
        assert!(kernel.device, "but what is needed next");
        for (name, ipset, mut kernel, expected) in [
            (
                "2 no ipset",
                Err(ipset::Error::NoIpsets(Errno::EINVAL)),
                Fake::default(),
                "kernel module ip_set",
            ),
            ("3 old ipset", Err(ipset::Error::TooOld(5)), Fake::default(), "protocol 5, and 6 is needed"),
            ("4 no list", IPSET, Fake::without(&["list"]), "NET_ADMIN"),
            ("5 no add", IPSET, Fake::without(&["add"]), "ip_vs_wrr"),
            ("6 no removal", IPSET, Fake::without(&["remove"]), "cannot be removed again"),
            ("added and not there", IPSET, Fake::without(&["keep"]), "is not there"),
            ("no dummy", IPSET, Fake::without(&["dummy"]), "kernel module dummy"),
        ] {
            let missing = run(ipset, &mut kernel);
            assert_eq!(missing.len(), 1, "{name}: {missing:?}");
            assert!(missing[0].contains(expected), "{name}: {missing:?}");
            assert!(!kernel.device, "{name}: left as it was");
        }
    }

    #[test]
    fn ipvs_everything_that_is_missing_is_named_at_once() {
        let mut kernel = Fake::without(&["add", "dummy"]);
        let missing = run(Err(ipset::Error::TooOld(5)), &mut kernel);
        assert_eq!(missing.len(), 3, "{missing:?}");
        let missing = preflight::<&mut Fake>(Err(ipset::Error::TooOld(5)), Err(Error::NoIpvs), "rr", &V4);
        assert!(missing.contains(&Missing::Ipvs(Error::NoIpvs)) && missing.len() == 2, "{missing:?}");
    }

    #[test]
    fn ipvs_a_scheduler_in_use_needs_no_probe() {
        let settings = Settings { scheduler: "wrr".into(), flags: 0, persistence: None };
        let key = Key::new(Protocol::Udp, [10, 96, 0, 10].into(), 53);
        let mut kernel = Fake { servers: vec![VirtualServer { key, settings }], ..Fake::default() };
        assert_eq!(run(IPSET, &mut kernel), Vec::<String>::new());
        assert_eq!(kernel.done, Vec::<String>::new());
        // In another family it may be missing all the same.
        let missing = preflight(IPSET, Ok(&mut kernel), "wrr", &[IpFamily::IPv6]);
        assert_eq!((missing, kernel.done.len()), (Vec::new(), 2));
    }
}
