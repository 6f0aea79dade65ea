//! What needs privilege, done once by the privileged init container, so that the agent itself needs less.
//!
//! In: the node. Out: kernel modules loaded and sysctls set, and one warning for each thing that cannot be had. Nothing here is
//! fatal: most nodes have all of it already, and what is really missing shows in the agent's status.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use tracing::{debug, info, warn};

/// Modules that iptables rules need. Most are loaded by the kernel on first use, if it may load modules on demand.
const MODULES: [&str; 13] = [
    "nf_conntrack",
    // Without it entries of endpoints that are gone cannot be deleted.
    "nf_conntrack_netlink",
    "nf_nat",
    "ip_tables",
    "ip6_tables",
    "nf_tables",
    "nft_compat",
    "xt_conntrack",
    "xt_mark",
    "xt_comment",
    "xt_statistic",
    "xt_recent",
    "ip_set",
];

/// `RTF_ADDRCONF` in `/proc/net/ipv6_route`: a route that came with a router advertisement.
const BY_ADVERTISEMENT: u32 = 0x0004_0000;

/// A sysctl, what it should be, and why.
#[derive(Debug, PartialEq, Eq)]
struct Sysctl {
    path: &'static str,
    value: &'static str,
    why: &'static str,
}

const IPV4_FORWARD: Sysctl = Sysctl {
    path: "net/ipv4/ip_forward",
    value: "1",
    why: "NodePorts and LoadBalancer addresses reach pods on other nodes only if this node forwards",
};
const IPV6_FORWARD: Sysctl = Sysctl {
    path: "net/ipv6/conf/all/forwarding",
    value: "1",
    why: "NodePorts and LoadBalancer addresses reach pods on other nodes only if this node forwards",
};
const BRIDGES: [Sysctl; 2] = [
    Sysctl {
        path: "net/bridge/bridge-nf-call-iptables",
        value: "1",
        why: "replies between pods on one bridge would bypass NAT",
    },
    Sysctl {
        path: "net/bridge/bridge-nf-call-ip6tables",
        value: "1",
        why: "replies between pods on one bridge would bypass NAT",
    },
];

/// Prepares the node. Returns how many things could not be had.
#[must_use]
pub fn prepare() -> usize {
    let root = Path::new("/proc");
    load_modules() + set_sysctls(root)
}

fn load_modules() -> usize {
    let mut missing = 0;
    for module in MODULES {
        match Command::new("modprobe").arg("--").arg(module).output() {
            Ok(output) if output.status.success() => debug!(module, "loaded"),
            // Built-in modules have no file; where the kernel has the feature, the agent's own check will find it.
            Ok(output) => {
                info!(
                    module,
                    "not loaded: {}; fine if the kernel has it built in",
                    String::from_utf8_lossy(&output.stderr).trim()
                );
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                warn!("modprobe is not installed: relying on modules that are loaded or built in");
                return 1;
            }
            Err(error) => {
                missing += 1;
                warn!(module, "not loaded: {error}; run the init container privileged");
            }
        }
    }
    missing
}

fn set_sysctls(proc: &Path) -> usize {
    let mut missing = usize::from(!set(proc, &IPV4_FORWARD));
    if proc.join("net/if_inet6").exists() {
        if routes_by_advertisement(proc) && read(&sysctl(proc, IPV6_FORWARD.path)).as_deref() == Some("0") {
            missing += 1;
            warn!(
                "IPv6 forwarding is off and stays off: turning it on would make the kernel ignore the router advertisements that \
                 this node has its default route from; set net.ipv6.conf.all.forwarding=1 together with accept_ra=2 on that \
                 interface"
            );
        } else {
            missing += usize::from(!set(proc, &IPV6_FORWARD));
        }
    }
    for bridge in BRIDGES {
        // Only there with the module br_netfilter, which only nodes with a bridge for pods need.
        if sysctl(proc, bridge.path).exists() {
            missing += usize::from(!set(proc, &bridge));
        }
    }
    missing
}

fn sysctl(proc: &Path, path: &str) -> PathBuf {
    proc.join("sys").join(path)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|value| value.trim().to_owned())
}

fn set(proc: &Path, wanted: &Sysctl) -> bool {
    let path = sysctl(proc, wanted.path);
    match read(&path) {
        Some(value) if value == wanted.value => true,
        None => {
            warn!(sysctl = wanted.path, "not there; {}", wanted.why);
            false
        }
        Some(value) => match std::fs::write(&path, wanted.value) {
            Ok(()) => {
                info!(sysctl = wanted.path, from = value, to = wanted.value, "set: {}", wanted.why);
                true
            }
            Err(error) => {
                warn!(
                    sysctl = wanted.path,
                    value,
                    "cannot be set to {}: {error}; {}; run the init container privileged",
                    wanted.value,
                    wanted.why
                );
                false
            }
        },
    }
}

/// Whether the default route for IPv6 comes from router advertisements.
fn routes_by_advertisement(proc: &Path) -> bool {
    let routes = std::fs::read_to_string(proc.join("net/ipv6_route")).unwrap_or_default();
    routes.lines().any(|line| {
        let mut fields = line.split_whitespace();
        let default = fields.next().is_some_and(|to| to.bytes().all(|digit| digit == b'0'))
            && fields.next() == Some("00");
        // Flags are the ninth field.
        let flags = fields.nth(6).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        default && flags.is_some_and(|flags| flags & BY_ADVERTISEMENT != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(forward: &str, route: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in [
            ("sys/net/ipv4/ip_forward", "0"),
            ("sys/net/ipv6/conf/all/forwarding", forward),
            ("net/if_inet6", ""),
            ("net/ipv6_route", route),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{content}\n")).unwrap();
        }
        root
    }

    fn value(root: &tempfile::TempDir, path: &str) -> String {
        read(&sysctl(root.path(), path)).unwrap()
    }

    #[test]
    fn forwarding_is_turned_on_where_it_is_off() {
        let root = node("0", "");
        assert_eq!(set_sysctls(root.path()), 0);
        assert_eq!(value(&root, IPV4_FORWARD.path), "1");
        assert_eq!(value(&root, IPV6_FORWARD.path), "1");
    }

    #[test]
    fn a_default_route_by_advertisement_is_not_lost() {
        let route = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
                     fe800000000000000000000000000001 00000400 00000001 00000000 00450003     eth0";
        let root = node("0", route);
        assert_eq!(set_sysctls(root.path()), 1);
        assert_eq!(value(&root, IPV6_FORWARD.path), "0");
        let root = node("1", route);
        assert_eq!(set_sysctls(root.path()), 0, "it is on already, whoever arranged that");
    }

    #[test]
    fn what_is_not_there_is_counted_and_not_fatal() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(set_sysctls(root.path()), 1);
    }
}
