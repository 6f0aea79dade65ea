//! Load balancers' health checks with packets: through the host's firewall, at the right addresses, in both families.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use pointsman_agent::events::objects::Objects;
use pointsman_agent::health::Pulse;
use pointsman_agent::healthcheck::{Checks, Server};
use pointsman_agent::iptables::Flavour;
use pointsman_agent::model::{Change, ObjectName};
use pointsman_agent::state::SyncState;
use pointsman_agent::sync::Dataplane as _;
use serde_json::json;
use tokio::sync::{oneshot, watch};

use crate::support::lab::{Lab, address, ip, masqueraded};
use crate::support::traffic::Answer;
use crate::support::world::{FAMILIES, World, block_on, slice};

const PORT: u16 = 31999;

/// The answer's first line, if there is an answer.
fn ask(lab: &Lab, to: IpAddr) -> String {
    lab.run("client", move || {
        let to = SocketAddr::new(to, PORT);
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(1))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer.lines().next().unwrap_or_default().to_owned())
        };
        ask().unwrap_or_else(|error| error.kind().to_string())
    })
}

/// Lets the health checks follow the plan, as the sync loop does after a write.
fn follow(world: &mut World, checks: &Checks, open: usize) {
    world.settle();
    let web = ObjectName::new("ns", "web");
    checks.change([(web.clone(), world.plan.health_check(&web).cloned())]);
    for _ in 0..500 {
        if checks.open() == open {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    panic!("{} ports are open, not {open}: {:?}", checks.open(), checks.problems());
}

// ids: HC-4 HC-5 HC-6 REG-82163 TRM-12
#[test]
fn hc_4_5_6_health_checks_answer_at_eligible_addresses_and_at_the_balancers_and_nowhere_else() {
    let Some(lab) = Lab::new() else { return };
    // A host that lets in nothing by itself (k/k#97225).
    lab.node("iptables-nft -P INPUT DROP; ip6tables-nft -P INPUT DROP; ip6tables-nft -A INPUT -p ipv6-icmp -j ACCEPT");
    let checks = Checks::default();
    let (stop, stopped) = oneshot::channel::<()>();
    let answers = checks.clone();
    let server = lab.spawn("node", move || {
        block_on(async move {
            let (_state, of_state) = watch::channel(SyncState::new(Timestamp::UNIX_EPOCH));
            let (objects, _news) = Objects::channel();
            let server = Server::new(answers, of_state, Arc::new(Pulse::default()), objects);
            tokio::select! {
                () = server.run() => {}
                _ = stopped => {}
            }
        });
    });
    let mut world = World::new(&lab, Flavour::Nft);
    let balancer = [ip("198.51.100.7"), ip("2001:db8:7::7")];
    world.service(
        "web",
        json!({
            "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": PORT,
            "clusterIPs": ["172.30.0.80", "fd00:ac:1e::50"],
            "ports": [{"name": "web", "protocol": "TCP", "port": 80, "nodePort": 30080}],
            "status": {"loadBalancer": {"ingress": balancer.map(|address| json!({"ip": address}))}},
        }),
    );
    follow(&mut world, &checks, 4);
    let own = [address("node", false), address("node", true)];
    for address in own {
        assert_eq!(
            ask(&lab, address),
            "HTTP/1.0 503 Service Unavailable",
            "no endpoint yet, and the firewall lets it in"
        );
    }
    world.endpoints("web", &["a", "r"]);
    follow(&mut world, &checks, 4);
    for address in own {
        assert_eq!(ask(&lab, address), "HTTP/1.0 200 OK", "{address}");
    }
    for v6 in [false, true] {
        assert_eq!(ask(&lab, masqueraded(v6)), "connection refused", "another address of the node");
    }
    // A balancer that does not rewrite addresses asks at its own, which its agent puts on the node later.
    lab.node("ip addr add 198.51.100.7/32 dev lo; ip addr add 2001:db8:7::7/128 dev lo nodad");
    for address in balancer {
        assert_eq!(ask(&lab, address), "HTTP/1.0 200 OK", "{address}");
    }
    for family in FAMILIES {
        let mut ending = slice("web", family, &["a"]);
        let conditions = json!({"ready": false, "serving": true, "terminating": true});
        ending.endpoints[0].conditions = serde_json::from_value(conditions).unwrap();
        world.apply(Change::SliceApplied(Box::new(ending)));
    }
    follow(&mut world, &checks, 4);
    assert_eq!(ask(&lab, own[0]), "HTTP/1.0 503 Service Unavailable", "the balancer is to leave");
    let answer = lab.tcp("client", (own[0], 30080));
    assert!(matches!(&answer, Answer::From(name, _) if name == "a"), "it still serves: {answer:?}");
    world.endpoints("web", &["r"]);
    follow(&mut world, &checks, 4);
    assert_eq!(ask(&lab, own[0]), "HTTP/1.0 503 Service Unavailable");
    world.delete_service("web");
    follow(&mut world, &checks, 0);
    for address in own {
        assert_eq!(ask(&lab, address), "timed out", "{address}: the firewall is closed again");
    }
    drop(stop);
    server.join().unwrap();
}

#[test]
fn packets_that_are_dropped_as_invalid_are_read_from_the_rule_in_both_flavours() {
    let Some(lab) = Lab::new() else { return };
    // ip6tables-nft, as far as 1.8.9, ignores the number that it is told to begin with.
    for (flavour, suffix, v6) in [(Flavour::Nft, "nft", 0), (Flavour::Legacy, "legacy", 7)] {
        let mut world = World::new(&lab, flavour);
        world.settle();
        let read = |world: &mut World| block_on(world.dataplane.invalid_dropped());
        let rule = |count: u32, tool: &str| {
            format!(
                "{tool}-{suffix} -c {count} 60 -t filter -R KUBE-FORWARD 1 -m conntrack --ctstate INVALID -j DROP"
            )
        };
        assert_eq!(read(&mut world).into_values().collect::<Vec<_>>(), [0, 0], "{suffix}");
        lab.node(&format!("{}; {}", rule(42, "iptables"), rule(7, "ip6tables")));
        assert_eq!(read(&mut world).into_values().collect::<Vec<_>>(), [42, v6], "{suffix}");
        assert_eq!(world.differences(), Vec::<String>::new(), "the rule itself is the same");
    }
}
