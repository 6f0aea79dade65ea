//! A segment that connection tracking cannot place is not translated back. Whoever gets it from the pod's address knows no
//! such connection, resets it, and so ends the good one.

use std::net::{IpAddr, UdpSocket};

use nix::sys::socket::SockProtocol;
use pointsman_agent::sync::Dataplane as _;

use crate::support::lab::{Lab, NODE, address};
use crate::support::sctp::raw;
use crate::support::traffic::{IMPATIENT, Stream};
use crate::support::world::{FAMILIES, IN_KERNEL, World, config};

/// A segment without data.
fn segment(from: (IpAddr, u16), to: (IpAddr, u16), sequence: u32, acknowledged: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(from.1.to_be_bytes());
    bytes.extend(to.1.to_be_bytes());
    bytes.extend(sequence.to_be_bytes());
    bytes.extend(acknowledged.to_be_bytes());
    bytes.extend([5 << 4, 0x10, 0, 1, 0, 0, 0, 0]);
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from.0, to.0) else { panic!("IPv4 only") };
    let pseudo = [&source.octets()[..], &destination.octets(), &[0, 6, 0, 20], &bytes].concat();
    let sum: u32 = pseudo.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let sum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap();
    bytes[16..18].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// The next segment to this port: who it comes from, its sequence number and what it acknowledges.
fn next(socket: &UdpSocket, port: u16) -> Option<(IpAddr, u32, u32)> {
    let mut buffer = [0; 128];
    loop {
        let (length, peer) = socket.recv_from(&mut buffer).ok()?;
        let tcp = &buffer[usize::from(buffer[0] & 15) * 4..length];
        let number = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().unwrap());
        if tcp[2..4] == port.to_be_bytes() {
            return Some((peer.ip(), number(4), number(8)));
        }
    }
}

/// Sends the client of a connection to pod `a` a segment from far beyond the window; returns who it comes from for the
/// client, if it arrives.
fn beyond_the_window(lab: &Lab, watcher: &UdpSocket, stream: &mut Stream) -> Option<IpAddr> {
    let (pod, client, port) = (address("a", false), address("client", false), stream.local().port());
    assert!(stream.answers());
    let (_, sequence, acknowledged) = std::iter::from_fn(|| next(watcher, port)).last().unwrap();
    let sequence = sequence.wrapping_add(1 << 28);
    lab.run("a", move || {
        let segment = segment((pod, 8080), (client, port), sequence, acknowledged);
        raw(pod, SockProtocol::Tcp).unwrap().send_to(&segment, (client, 0)).unwrap();
    });
    std::iter::from_fn(|| next(watcher, port)).find(|(_, found, _)| *found == sequence).map(|(from, ..)| from)
}

// ids: CT-9 REG-74839
#[test]
fn a_segment_out_of_the_window_does_not_reach_a_client_from_the_pods_address() {
    for way in IN_KERNEL {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, way);
        world.service(
            "web",
            serde_json::json!({
                "type": "NodePort", "externalTrafficPolicy": "Local", "clusterIPs": ["172.30.0.80"],
                "ports": [{"name": "web", "port": 80, "nodePort": 30080}],
            }),
        );
        world.endpoints("web", &["a"]);
        world.settle();
        let mut stream = lab.stream("client", (address(NODE, false), 30080));
        let client = address("client", false);
        let watcher = lab.run("client", move || raw(client, SockProtocol::Tcp).unwrap());
        watcher.set_read_timeout(Some(IMPATIENT)).unwrap();
        assert_eq!(beyond_the_window(&lab, &watcher, &mut stream), None, "{way}: dropped");
        let counted = world.runtime.block_on(world.dataplane.invalid_dropped());
        assert_eq!((counted[&FAMILIES[0]], counted[&FAMILIES[1]]), (1, 0), "{way}: counted");
        assert!(stream.answers());
        let mut liberal = config();
        liberal.conntrack.tcp_be_liberal = true;
        world.configure(liberal);
        world.settle();
        let from = beyond_the_window(&lab, &watcher, &mut stream);
        assert_eq!(from, Some(address("a", false)), "{way}: untranslated, now that the rule is gone");
        // With the rule goes the kernel's setting.
        let mut stream = lab.stream("client", (address(NODE, false), 30080));
        lab.run(NODE, || {
            std::fs::write("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", "1").unwrap();
        });
        let from = beyond_the_window(&lab, &watcher, &mut stream);
        assert_eq!(from, Some(address(NODE, false)), "{way}: translated");
        assert!(stream.answers());
    }
}
