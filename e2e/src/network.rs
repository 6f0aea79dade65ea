//! The cluster's network: namespaces, links, addresses and routes.
//!
//! In: a layout and the number of nodes. Out: namespaces mounted under the cluster's folder (not under
//! /run/netns: nothing outside the folder is touched) that are joined as [`crate::layout`] shows.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use tokio::process::Command;

use crate::command::{command, output, output_with_input};
use crate::layout::Layout;

/// A command that runs `program` in the network namespace mounted on `netns`.
#[must_use]
pub fn in_netns(netns: &Path, program: &str) -> Command {
    let mut net = std::ffi::OsString::from("--net=");
    net.push(netns);
    let mut nsenter = command("nsenter", [net]);
    nsenter.arg("--").arg(program);
    nsenter
}

/// Creates the fabric and the outside client. Nothing of it may exist yet.
pub async fn create(layout: &Layout) -> Result<()> {
    let ns = layout.dir().join("ns");
    fs::create_dir_all(&ns).with_context(|| format!("creating {}", ns.display()))?;
    // A namespace can only be kept on a mount whose changes are not passed on.
    output(command("mount", ["--bind"]).args([&ns, &ns])).await?;
    output(command("mount", ["--make-private"]).arg(&ns)).await?;
    for name in ["fabric", "client"] {
        create_netns(&layout.netns(name)).await?;
    }
    set(&layout.netns("fabric"), &fabric_settings()).await?;
    set(&layout.netns("client"), CLIENT_SETTINGS).await?;
    let link = layout.host_link();
    let mut add = command("ip", ["link", "add", &link, "type", "veth", "peer", "name", "uplink", "netns"]);
    output(add.arg(layout.netns("fabric"))).await?;
    ip(None, &host_script(layout)).await?;
    ip(Some(&layout.netns("fabric")), &fabric_script(layout)).await?;
    attach(layout, "client").await?;
    ip(Some(&layout.netns("client")), &edge_script(layout, layout.client())).await
}

/// Creates the namespace of node `number` and joins it to the fabric.
pub async fn create_node(layout: &Layout, number: u8) -> Result<()> {
    let name = Layout::node_name(number);
    let netns = layout.netns(&name);
    create_netns(&netns).await?;
    set(&netns, NODE_SETTINGS).await?;
    attach(layout, &name).await?;
    ip(Some(&netns), &edge_script(layout, layout.node(number))).await?;
    output_with_input(in_netns(&netns, "nft").args(["-f", "-"]), &node_ruleset(layout)).await.map(drop)
}

/// Sets the routes of node `number`, one of `nodes`, to the pods of the others.
pub async fn route_pods(layout: &Layout, number: u8, nodes: u8) -> Result<()> {
    ip(Some(&layout.netns(&Layout::node_name(number))), &pod_routes(layout, number, nodes)).await
}

/// Joins virtual machine `number` to the fabric, with a device that has its name.
pub async fn create_tap(layout: &Layout, number: u8) -> Result<()> {
    let name = Layout::node_name(number);
    let tap = format!("tuntap add {name} mode tap\nlink set {name} master br0 up\n");
    ip(Some(&layout.netns("fabric")), &tap).await
}

/// For `sh` in virtual machine `number`, one of `nodes`: makes of its network what [`create_node`] and [`route_pods`] make
/// of a namespace's. Its kernel has no NAT of nftables.
#[must_use]
pub fn machine_script(layout: &Layout, number: u8, nodes: u8) -> String {
    let mut script = String::new();
    for (path, value) in NODE_SETTINGS.lines().filter_map(|line| line.split_once('=')) {
        let _ = writeln!(script, "echo {value} >/proc/sys/{path}");
    }
    let lines = edge_script(layout, layout.node(number)) + &pod_routes(layout, number, nodes);
    let _ = writeln!(script, "ip -batch - <<END\n{lines}END");
    let (pods, first, last) = (layout.pods(), layout.node(1), layout.node(crate::layout::MAX_NODES));
    for (program, pods, nodes) in [
        ("iptables", pods.v4, format!("{}-{}", first.v4, last.v4)),
        ("ip6tables", pods.v6, format!("{}-{}", first.v6, last.v6)),
    ] {
        let _ = writeln!(
            script,
            "{program} -t nat -A POSTROUTING -s {pods} ! -d {pods} -o eth0 -m iprange ! --dst-range {nodes} -j MASQUERADE"
        );
    }
    script
}

async fn create_netns(path: &Path) -> Result<()> {
    fs::write(path, "").with_context(|| format!("creating {}", path.display()))?;
    let mut net = std::ffi::OsString::from("--net=");
    net.push(path);
    output(command("unshare", [net]).arg("true")).await.map(drop)
}

/// Joins the namespace `name` to the fabric with a link that is `eth0` inside and has its name outside.
async fn attach(layout: &Layout, name: &str) -> Result<()> {
    let fabric = layout.netns("fabric");
    let mut add = in_netns(&fabric, "ip");
    add.args(["link", "add", name, "type", "veth", "peer", "name", "eth0", "netns"]).arg(layout.netns(name));
    output(&mut add).await?;
    ip(Some(&fabric), &format!("link set {name} master br0 up\n")).await
}

/// Runs lines of `ip`, in a namespace or in ours.
pub async fn ip(netns: Option<&Path>, script: &str) -> Result<()> {
    let mut ip = netns.map_or_else(|| Command::new("ip"), |netns| in_netns(netns, "ip"));
    output_with_input(ip.args(["-batch", "-"]), script).await.map(drop)
}

/// Writes kernel settings, one `path=value` a line; those this kernel lacks are skipped.
pub async fn set(netns: &Path, settings: &str) -> Result<()> {
    let script = "while IFS== read -r key value; do
        [ -e /proc/sys/$key ] || continue; echo $value >/proc/sys/$key || exit 1
    done";
    output_with_input(in_netns(netns, "sh").args(["-c", script]), settings).await.map(drop)
}

/// Of the fabric: frames between nodes meet no firewall and no address of ours is tentative.
fn fabric_settings() -> String {
    let bridge = ["arptables", "iptables", "ip6tables"].map(|t| format!("net/bridge/bridge-nf-call-{t}=0\n"));
    bridge.concat()
        + "net/ipv6/conf/default/accept_dad=0\nnet/ipv4/ip_forward=0\nnet/ipv6/conf/all/forwarding=0\n"
}

/// Of the outside client. As a load balancer, it sends what is for an address to the node that it was told: a redirect, which a node
/// that does not serve the address yet answers with, would lead it away for minutes.
const CLIENT_SETTINGS: &str = "net/ipv6/conf/default/accept_dad=0
net/ipv4/conf/all/accept_redirects=0
net/ipv4/conf/default/accept_redirects=0
net/ipv6/conf/all/accept_redirects=0
net/ipv6/conf/default/accept_redirects=0
";

/// Of a node: it routes for its pods, and service rules see what passes between pods on its bridge. It may refuse as often as
/// it is asked; by default a client gets one answer a second.
const NODE_SETTINGS: &str = "net/ipv4/ip_forward=1
net/ipv6/conf/all/forwarding=1
net/ipv6/conf/default/accept_dad=0
net/bridge/bridge-nf-call-iptables=1
net/bridge/bridge-nf-call-ip6tables=1
net/ipv4/icmp_ratelimit=0
net/ipv6/icmp/ratelimit=0
";

fn host_script(layout: &Layout) -> String {
    let (link, host) = (layout.host_link(), layout.host());
    format!(
        "address add {}/24 dev {link}\naddress add {}/64 dev {link} nodad\nlink set {link} up\n",
        host.v4, host.v6
    )
}

fn fabric_script(layout: &Layout) -> String {
    let gateway = layout.gateway();
    format!(
        "link set lo up\nlink add br0 type bridge mcast_snooping 0\nlink set uplink master br0 up\n\
         address add {}/24 dev br0\naddress add {}/64 dev br0 nodad\nlink set br0 up\n",
        gateway.v4, gateway.v6
    )
}

/// Of a node or the client. Both have a default route, as any machine does: without one, packets to a service
/// address fail before a service rule sees them.
fn edge_script(layout: &Layout, own: crate::layout::Addresses) -> String {
    let gateway = layout.gateway();
    format!(
        "link set lo up\naddress add {}/24 dev eth0\naddress add {}/64 dev eth0 nodad\nlink set eth0 up\n\
         route add default via {}\nroute add default via {}\n",
        own.v4, own.v6, gateway.v4, gateway.v6
    )
}

fn pod_routes(layout: &Layout, number: u8, nodes: u8) -> String {
    let mut script = String::new();
    for other in (1..=nodes).filter(|other| *other != number) {
        let (pods, via) = (layout.node_pods(other), layout.node(other));
        let _ = writeln!(script, "route replace {} via {}", pods.v4, via.v4);
        let _ = writeln!(script, "route replace {} via {}", pods.v6, via.v6);
    }
    script
}

/// Pods reach what is outside pods and nodes (the API server, the client) with their node's address, as with
/// most pod networks. Between pods and nodes the source stays, so that tests see who called. The priority is
/// after every service proxy's.
fn node_ruleset(layout: &Layout) -> String {
    let pods = layout.pods();
    let first = layout.node(1);
    let last = layout.node(crate::layout::MAX_NODES);
    format!(
        "table ip testbed {{\n chain post {{\n  type nat hook postrouting priority 150\n  \
         ip saddr {p4} ip daddr != {{ {p4}, {f4}-{l4} }} oifname eth0 masquerade\n }}\n}}\n\
         table ip6 testbed {{\n chain post {{\n  type nat hook postrouting priority 150\n  \
         ip6 saddr {p6} ip6 daddr != {{ {p6}, {f6}-{l6} }} oifname eth0 masquerade\n }}\n}}\n",
        p4 = pods.v4,
        p6 = pods.v6,
        f4 = first.v4,
        l4 = last.v4,
        f6 = first.v6,
        l6 = last.v6,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_routes_to_the_pods_of_the_others() {
        let layout = Layout::new("a", 3).unwrap();
        assert_eq!(
            pod_routes(&layout, 1, 2),
            "route replace 10.227.2.0/24 via 10.208.3.12\nroute replace fd10:e0:3:2::/64 via fd10:d0:3::c\n"
        );
        assert_eq!(pod_routes(&layout, 1, 1), "");
    }
}
