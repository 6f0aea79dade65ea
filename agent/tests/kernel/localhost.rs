//! NodePorts on localhost: by a proxy beside every mode, for the node itself and not for its neighbours.

use std::net::{IpAddr, TcpListener, UdpSocket};

use pointsman_agent::plan::Changes;
use pointsman_agent::userspace::counters::Counters;
use pointsman_agent::userspace::localhost::Localhost;
use pointsman_crds::settings::NodePortAddress;
use serde_json::{Value, json};

use crate::support::lab::{Lab, NODE, address, ip, masqueraded, shell};
use crate::support::traffic::{Answer, IMPATIENT};
use crate::support::world::{WAYS, World, config};

const PORT: u16 = 30080;

fn spec(node_port: u16) -> Value {
    json!({
        "type": "NodePort",
        "clusterIPs": ["172.30.0.80", "fd00:ac:1e::50"],
        "externalTrafficPolicy": "Local",
        "ports": [
            {"name": "web", "protocol": "TCP", "port": 80, "nodePort": node_port},
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": node_port},
        ],
    })
}

/// What the sync loop does after each write.
fn follow(localhost: &mut Localhost, world: &mut World) -> Vec<String> {
    let changes: Changes = world.pending.clone();
    world.settle();
    let _inside = world.runtime.enter();
    localhost.follow(&world.plan, Some(&changes))
}

fn closed(lab: &Lab, to: (IpAddr, u16)) -> bool {
    lab.tcp("node", to) == Answer::Refused
}

// ids: NP-4 NP-6 REG-92315
#[test]
fn np_4_6_localhost_is_served_by_a_proxy_in_every_mode_and_out_of_reach_from_outside() {
    for way in WAYS {
        let Some(lab) = Lab::new() else { return };
        lab.enter(NODE);
        let mut world = World::new(&lab, way);
        let mut localhost = Localhost::new(Counters::default());
        world.service("web", spec(PORT));
        world.endpoints("web", &["r"]);
        let (here, here6) = ((ip("127.0.0.1"), PORT), (ip("::1"), PORT));
        let mut config = config();
        config.node_port_addresses = vec![NodePortAddress("all".into())];
        world.configure(config.clone());
        assert_eq!(follow(&mut localhost, &mut world), Vec::<String>::new());
        assert_eq!(lab.tcp("node", here), Answer::Refused, "{way}: off unless asked for");

        config.iptables.localhost_node_ports = true;
        world.configure(config.clone());
        assert_eq!(follow(&mut localhost, &mut world), Vec::<String>::new());
        // Policy Local is not for the node itself.
        assert_eq!(lab.tcp("node", here), Answer::From("r".into(), address("node", false)), "{way}");
        assert_eq!([lab.udp("node", here), lab.tcp("node", here6)], [Answer::Refused, Answer::Refused]);
        assert_eq!(lab.node("cat /proc/sys/net/ipv4/conf/all/route_localnet"), "0\n", "{way}");

        // A neighbour sends packets for 127.0.0.1 to the node.
        lab.run("client", || std::fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1").unwrap());
        shell(&format!(
            "ip -n {0} route del local 127.0.0.0/8 dev lo table local; ip -n {0} route del local 127.0.0.1 dev lo table local;
             ip -n {0} route add 127.0.0.1/32 via 192.168.0.2 dev eth0 src 203.0.113.2",
            lab.namespace("client")
        ));
        let secret = lab.run(NODE, || UdpSocket::bind("127.0.0.1:9999").unwrap());
        secret.set_read_timeout(Some(IMPATIENT)).unwrap();
        let gets_in = || {
            lab.run("client", || {
                UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", "127.0.0.1:9999").unwrap()
            });
            secret.recv_from(&mut [0; 8]).is_ok()
        };
        assert!(!gets_in(), "{way}");
        lab.node("echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet");
        assert!(gets_in(), "{way}: the way is open, were it not for the kernel");

        // Somebody else has the new port, and gives it up.
        let taken = lab.run(NODE, || TcpListener::bind("127.0.0.1:30081").unwrap());
        world.service("web", spec(PORT + 1));
        let problems = follow(&mut localhost, &mut world);
        assert!(problems.len() == 1 && problems[0].contains("ns/web:web is not served at 127.0.0.1:30081"));
        assert!(closed(&lab, here), "{way}: the old port");
        drop(taken);
        assert_eq!(follow(&mut localhost, &mut world), Vec::<String>::new());
        let new = (ip("127.0.0.1"), PORT + 1);
        assert!(matches!(lab.tcp("node", new), Answer::From(..)), "{way}");

        config.node_port_addresses = vec![NodePortAddress("primary".into())];
        world.configure(config.clone());
        follow(&mut localhost, &mut world);
        assert!(closed(&lab, new), "{way}: allowed, but not among the addresses");
        config.node_port_addresses.push(NodePortAddress("localhost".into()));
        world.configure(config);
        follow(&mut localhost, &mut world);
        assert!(matches!(lab.tcp("node", new), Answer::From(..)), "{way}");
        world.delete_service("web");
        follow(&mut localhost, &mut world);
        assert!(closed(&lab, new), "{way}: deleted");
    }
}

#[test]
fn a_node_port_that_passes_to_another_service_does_so_in_one_step() {
    let Some(lab) = Lab::new() else { return };
    lab.enter(NODE);
    let mut world = World::new(&lab, WAYS[0]);
    let mut localhost = Localhost::new(Counters::default());
    let mut config = config();
    config.iptables.localhost_node_ports = true;
    config.node_port_addresses = vec![NodePortAddress("localhost".into())];
    world.configure(config);
    for (old, new, pod, source) in
        [("web", "api", "a", masqueraded(false)), ("api", "web", "r", address("node", false))]
    {
        world.delete_service(old);
        world.service(new, spec(PORT));
        world.endpoints(new, &[pod]);
        assert_eq!(follow(&mut localhost, &mut world), Vec::<String>::new());
        let answer = lab.tcp("node", (ip("127.0.0.1"), PORT));
        assert_eq!(answer, Answer::From(pod.into(), source));
    }
}
