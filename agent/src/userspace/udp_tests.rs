//! Clients and endpoints on loopback.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::timeout;

use super::super::tests::{plan, port, shared};
use super::*;
use crate::model::Protocol;

/// Answers with its port and what it got.
async fn endpoint() -> (SocketAddr, JoinHandle<()>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut buffer = vec![0; LONGEST];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
            let mut answer = address.port().to_be_bytes().to_vec();
            answer.extend(&buffer[..length.min(60_000)]);
            let _ = socket.send_to(&answer, peer).await;
        }
    });
    (address, task)
}

async fn refuser() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

fn listen(shared: &Arc<Shared>, endpoints: &[SocketAddr]) -> (Listener, Arc<ServicePort>) {
    let port = port(shared, Protocol::Udp, plan(endpoints));
    let at = IpAddr::from([127, 0, 0, 1]);
    let listener = Listener::open(at, Arc::clone(&port), Entrance::Internal, Arc::clone(shared)).unwrap();
    (listener, port)
}

async fn client(listener: &Listener) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(listener.address).await.unwrap();
    socket
}

/// Asks once; who has answered.
async fn ask(client: &UdpSocket, question: &[u8]) -> Option<u16> {
    client.send(question).await.unwrap();
    let mut buffer = vec![0; LONGEST];
    let length = timeout(Duration::from_millis(500), client.recv(&mut buffer)).await.ok()?.ok()?;
    assert_eq!(&buffer[2..length], question);
    Some(u16::from_be_bytes([buffer[0], buffer[1]]))
}

#[tokio::test]
async fn a_flow_stays_with_its_endpoint_and_flows_go_to_all() {
    let (a, b) = (endpoint().await.0, endpoint().await.0);
    let (listener, port) = listen(&shared(), &[a, b]);
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        let client = client(&listener).await;
        let first = ask(&client, b"one").await.unwrap();
        for question in [b"two".to_vec(), vec![7], vec![8; 50_000]] {
            assert_eq!(ask(&client, &question).await, Some(first));
        }
        seen.insert(first);
    }
    assert_eq!(seen, BTreeSet::from([a.port(), b.port()]));
    assert_eq!(port.counters.connections.get(), 4);
    assert_eq!(port.counters.bytes.to_endpoint.get(), 4 * (3 + 3 + 1 + 50_000));
}

#[tokio::test]
async fn an_endpoint_that_refuses_is_replaced_and_the_datagram_sent_again() {
    let (good, bad) = (endpoint().await.0, refuser().await);
    let shared = shared();
    let (listener, _port) = listen(&shared, &[bad, good]);
    for _ in 0..10 {
        assert_eq!(ask(&client(&listener).await, b"first").await, Some(good.port()));
    }
    assert_eq!(shared.counters.resting(), [format!("ns/web/UDP (IPv4) {bad}")]);
}

#[tokio::test]
async fn a_flow_moves_when_its_endpoint_is_gone_or_dies() {
    let ((a, first), (b, _second)) = (endpoint().await, endpoint().await);
    let shared = shared();
    let (listener, port) = listen(&shared, &[a]);
    let client = client(&listener).await;
    assert_eq!(ask(&client, b"x").await, Some(a.port()));
    port.update(Arc::new(plan(&[a, b])), super::super::tests::setting());
    assert_eq!(ask(&client, b"x").await, Some(a.port()));
    first.abort();
    let _ = first.await;
    // The refusal of the first datagram is noticed with the answer or with the second.
    let mut answers = Vec::new();
    for _ in 0..3 {
        answers.push(ask(&client, b"x").await);
    }
    assert_eq!(answers[1..], [Some(b.port()), Some(b.port())], "{answers:?}");
    let (c, _third) = endpoint().await;
    port.update(Arc::new(plan(&[c])), super::super::tests::setting());
    assert_eq!(ask(&client, b"x").await, Some(c.port()));
}

#[tokio::test]
async fn silent_flows_end_and_the_limit_holds() {
    let shared = Arc::new(Shared::new(
        super::super::counters::Counters::default(),
        super::super::shared::Limits { connections: 1, flows: 2 },
        2,
    ));
    let (a, _task) = endpoint().await;
    let (listener, port) = listen(&shared, &[a]);
    let mut setting = (*super::super::tests::setting()).clone();
    setting.flow.open = Duration::from_millis(300);
    port.update(Arc::new(plan(&[a])), Arc::new(setting));
    let (one, two, three) = (client(&listener).await, client(&listener).await, client(&listener).await);
    assert!(ask(&one, b"x").await.is_some() && ask(&two, b"x").await.is_some());
    assert_eq!(port.counters.open.get(), 2);
    assert_eq!(ask(&three, b"x").await, None, "no room");
    assert_eq!(shared.counters.limited.get(), 1);
    // 500 ms later.
    assert_eq!(port.counters.open.get(), 0);
    assert!(ask(&three, b"x").await.is_some());
}
