use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use pointsman_crds::proxy_node_status::IpFamily;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use super::*;
use crate::events::objects::{ObjectNews, Objects};
use crate::state::{FamilyState, SyncState};

fn web() -> ObjectName {
    ObjectName::new("shop", "web")
}

fn check(listen: &[SocketAddr], four: usize, six: usize) -> HealthCheck {
    HealthCheck {
        listen: listen.iter().copied().collect(),
        local_endpoints: BTreeMap::from([(IpFamily::IPv4, four), (IpFamily::IPv6, six)]),
    }
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn hc_2_only_ports_that_differ_are_closed_and_opened() {
    let (a, b, c) = (at("192.0.2.1:32000"), at("[2001:db8::1]:32000"), at("192.0.2.1:32001"));
    let open = BTreeSet::from([a, b]);
    assert_eq!(steps(&open, Some(&check(&[a, b], 0, 0))), (vec![], vec![]));
    assert_eq!(steps(&open, Some(&check(&[b, c], 0, 0))), (vec![a], vec![c]));
    assert_eq!(steps(&open, None), (vec![a, b], vec![]));
    assert_eq!(steps(&BTreeSet::new(), Some(&check(&[a], 0, 0))), (vec![], vec![a]));
}

// ids: HC-3 HC-5
#[test]
fn hc_3_and_5_the_answer_is_kube_proxys_and_each_family_has_its_own() {
    let checks = Checks::default();
    let (four, six) = (at("192.0.2.1:32000"), at("[2001:db8::1]:32000"));
    checks.change([(web(), Some(check(&[four, six], 2, 0)))]);
    let port = |address| Port { service: web(), address };
    for (address, healthy, code, count) in
        [(four, true, 200, 2), (four, false, 503, 2), (six, true, 503, 0), (four, true, 200, 2)]
    {
        let answer = checks.answer(&port(address), healthy);
        assert_eq!(answer.status(), code, "{address} {healthy}");
        assert_eq!(answer.headers()["X-Load-Balancing-Endpoint-Weight"], count.to_string());
        assert_eq!(answer.headers()["Content-Type"], "application/json");
        assert_eq!(answer.headers()["X-Content-Type-Options"], "nosniff");
        let body: serde_json::Value = serde_json::from_str(answer.body()).unwrap();
        let expected = serde_json::json!({
            "service": {"namespace": "shop", "name": "web"},
            "localEndpoints": count, "serviceProxyHealthy": healthy,
        });
        assert_eq!(body, expected);
    }
    checks.change([(web(), None)]);
    assert_eq!(checks.answer(&port(four), true).status(), 503, "over a connection that is still open");
}

struct Rig {
    checks: Checks,
    state: watch::Sender<SyncState>,
    news: mpsc::Receiver<ObjectNews>,
    _server: tokio::task::JoinHandle<()>,
}

fn rig() -> Rig {
    let checks = Checks::default();
    let (state, of_state) = watch::channel(SyncState::new(Timestamp::UNIX_EPOCH));
    let (objects, news) = Objects::channel();
    let server = Server::new(checks.clone(), of_state, Arc::default(), objects);
    Rig { checks, state, news, _server: tokio::spawn(server.run()) }
}

impl Rig {
    fn change(&self, name: &ObjectName, check: Option<HealthCheck>) {
        self.checks.change([(name.clone(), check)]);
    }

    /// Waits until so many ports are open.
    async fn open(&self, count: usize) {
        for _ in 0..500 {
            if self.checks.open() == count && self.checks.table().dirty.is_empty() {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("{} ports are open, not {count}: {:?}", self.checks.open(), self.checks.problems());
    }
}

async fn get(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(b"GET /any/path HTTP/1.0\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

/// A port that is free in both families right now.
async fn free_port() -> u16 {
    TcpListener::bind("[::]:0").await.unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn hc_1_ports_open_move_and_close_with_the_check_and_follow_the_nodes_health() {
    let rig = rig();
    let (first, second) = (free_port().await, free_port().await);
    let local = |port| [SocketAddr::from(([127, 0, 0, 1], port)), at(&format!("[::1]:{port}"))];
    let any = |port| [SocketAddr::from(([0, 0, 0, 0], port)), at(&format!("[::]:{port}"))];
    rig.change(&web(), Some(check(&any(first), 0, 3)));
    rig.open(2).await;
    let [four, six] = local(first);
    let answer = get(four).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 503") && answer.contains("\"localEndpoints\":0"), "{answer}");
    let answer = get(six).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 200") && answer.contains("endpoint-weight: 3"), "{answer}");

    rig.change(&web(), Some(check(&any(first), 18, 3)));
    assert!(get(four).await.unwrap().starts_with("HTTP/1.0 200"), "without opening anything anew");
    rig.state.send_modify(|state| {
        let stuck = FamilyState { consecutive_failures: 3, ..FamilyState::default() };
        state.families.insert(IpFamily::IPv4, stuck);
    });
    let answer = get(four).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 503"), "HC-3: {answer}");
    assert!(answer.contains("\"localEndpoints\":18,\"serviceProxyHealthy\":false"), "{answer}");
    rig.state.send_modify(|state| state.families.clear());
    assert!(get(four).await.unwrap().starts_with("HTTP/1.0 200"));

    // From all addresses to one, with the same number: the first must be closed by then.
    rig.change(&web(), Some(check(&[four], 1, 0)));
    rig.open(1).await;
    assert!(get(four).await.is_some() && get(six).await.is_none());
    rig.change(&web(), Some(check(&local(second), 1, 0)));
    rig.open(2).await;
    assert!(get(four).await.is_none());
    rig.change(&web(), None);
    rig.open(0).await;
    assert!(get(local(second)[0]).await.is_none());
}

#[tokio::test]
async fn a_port_that_is_taken_is_told_once_and_opened_when_it_is_free() {
    let mut rig = rig();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    let other = ObjectName::new("shop", "other");
    rig.change(&web(), Some(check(&[address], 1, 0)));
    let news = timeout(Duration::from_secs(5), rig.news.recv()).await.unwrap().unwrap();
    assert_eq!((news.kind, &news.name, news.reason), ("Service", &web(), "FailedToStartServiceHealthcheck"));
    assert!(news.note.contains(&address.to_string()), "{}", news.note);
    // Others are served meanwhile, and what failed is tried again with them.
    rig.change(&other, Some(check(&[SocketAddr::from(([127, 0, 0, 1], free_port().await))], 1, 0)));
    rig.open(1).await;
    assert_eq!(rig.checks.problems().len(), 1);
    drop(taken);
    rig.change(&other, None);
    rig.open(1).await;
    assert!(get(address).await.is_some());
    assert_eq!(rig.checks.problems(), [""; 0]);
    assert!(rig.news.try_recv().is_err(), "told once");
}

#[tokio::test]
async fn two_services_with_one_port_take_turns() {
    let mut rig = rig();
    let address = SocketAddr::from(([127, 0, 0, 1], free_port().await));
    let other = ObjectName::new("shop", "other");
    rig.change(&web(), Some(check(&[address], 1, 0)));
    rig.open(1).await;
    rig.change(&other, Some(check(&[address], 1, 0)));
    let news = timeout(Duration::from_secs(5), rig.news.recv()).await.unwrap().unwrap();
    assert_eq!(news.name, other);
    assert!(get(address).await.unwrap().contains("\"name\":\"web\""));
    rig.change(&web(), None);
    for _ in 0..500 {
        if get(address).await.is_some_and(|answer| answer.contains("\"name\":\"other\"")) {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the other Service never got the port");
}

#[tokio::test]
async fn hc_4_an_address_that_no_interface_has_yet_is_listened_on() {
    let mut rig = rig();
    let port = free_port().await;
    let addresses = [SocketAddr::from(([192, 0, 2, 77], port)), at(&format!("[2001:db8::77]:{port}"))];
    rig.change(&web(), Some(check(&addresses, 1, 1)));
    rig.open(2).await;
    assert!(rig.news.try_recv().is_err());
}
