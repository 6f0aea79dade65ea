//! Clients at a NodePort of localhost, endpoints on loopback.

use std::collections::BTreeMap;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::tests::{plan, port, shared};
use super::*;
use crate::model::Protocol;

/// Greets everybody with its port, then echoes.
async fn endpoint() -> (SocketAddr, JoinHandle<()>) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let task = tokio::spawn(async move {
        while let Ok((mut stream, _)) = socket.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                write.write_all(&address.port().to_be_bytes()).await?;
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    });
    (address, task)
}

/// Takes everybody, and leaves before a word: by a reset, or as is usual.
async fn leaver(resets: bool) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = socket.accept().await {
            sleep(Duration::from_millis(20)).await;
            if resets {
                reset(&stream);
            }
        }
    });
    address
}

async fn refuser() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

struct Rig {
    shared: Arc<Shared>,
    port: Arc<ServicePort>,
    listener: Listener,
}

fn rig(endpoints: &[SocketAddr]) -> Rig {
    let shared = shared();
    let port = port(&shared, Protocol::Tcp, plan(endpoints));
    let at = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::open(at, &Whose::NodePort(Arc::clone(&port)), &shared).unwrap();
    Rig { shared, port, listener }
}

impl Rig {
    async fn connect(&self) -> io::Result<(TcpStream, u16)> {
        let mut stream = TcpStream::connect(self.listener.address).await?;
        let number = stream.read_u16().await?;
        Ok((stream, number))
    }

    async fn ask(&self) -> io::Result<u16> {
        self.connect().await.map(|(_, number)| number)
    }

    fn failures(&self) -> String {
        let mut registry = prometheus_client::registry::Registry::default();
        self.shared.counters.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text.lines().filter(|line| line.contains("failures_total{")).collect::<Vec<_>>().join("\n")
    }
}

#[tokio::test]
async fn what_is_accepted_inherits_how_the_listener_is_prepared() {
    let socket = TcpSocket::new_v4().unwrap();
    prepare(&socket);
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(BACKLOG).unwrap();
    let (client, accepted) = tokio::join!(connect(listener.local_addr().unwrap()), listener.accept());
    for stream in [client.unwrap(), accepted.unwrap().0] {
        assert!(stream.nodelay().unwrap() && getsockopt(&stream, sockopt::KeepAlive).unwrap());
    }
}

#[tokio::test]
async fn connections_go_to_all_endpoints_in_turn() {
    let (a, b, c) = (endpoint().await.0, endpoint().await.0, endpoint().await.0);
    let rig = rig(&[a, b, c]);
    let mut counts = BTreeMap::new();
    for _ in 0..9 {
        let (mut stream, number) = rig.connect().await.unwrap();
        stream.write_all(b"hello").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut echo = String::new();
        stream.read_to_string(&mut echo).await.unwrap();
        assert_eq!(echo, "hello");
        *counts.entry(number).or_insert(0) += 1;
    }
    assert_eq!(counts, BTreeMap::from([(a.port(), 3), (b.port(), 3), (c.port(), 3)]));
    let counters = &rig.port.counters;
    assert_eq!(
        (counters.connections.get(), counters.bytes.to_endpoint.get(), counters.bytes.to_client.get()),
        (9, 45, 63)
    );
}

#[tokio::test]
async fn lnp_3_an_endpoint_that_refuses_or_leaves_is_replaced_unnoticed_and_then_rests() {
    let (good, refuser) = (endpoint().await.0, refuser().await);
    let rig = rig(&[good, refuser, leaver(true).await, leaver(false).await]);
    for _ in 0..30 {
        assert_eq!(rig.ask().await.unwrap(), good.port());
    }
    assert_eq!(rig.shared.counters.resting().join(" ").matches("127.0.0.1:").count(), 3);
    let failures = rig.failures();
    assert!(
        failures.contains("reason=\"refused\"} 3") && failures.contains("reason=\"closed\"} "),
        "{failures}"
    );
    assert!(!failures.contains("exhausted"), "{failures}");
}

#[tokio::test]
async fn lnp_4_without_an_endpoint_that_answers_the_client_is_reset() {
    for endpoints in [vec![], vec![refuser().await, refuser().await]] {
        let rig = rig(&endpoints);
        assert_eq!(rig.ask().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn aff_10_a_client_stays_with_its_endpoint_until_that_is_gone() {
    let (a, b, c) = (endpoint().await.0, endpoint().await.0, endpoint().await.0);
    let rig = rig(&[a, b, c]);
    let sticky = |endpoints: &[SocketAddr], affinity| {
        let plan = crate::plan::PortPlan { affinity, ..plan(endpoints) };
        rig.port.update(Arc::new(plan), super::super::tests::setting());
    };
    sticky(&[a, b, c], Some(100));
    let first = rig.ask().await.unwrap();
    for _ in 0..5 {
        assert_eq!(rig.ask().await.unwrap(), first);
    }
    let rest: Vec<SocketAddr> = [a, b, c].into_iter().filter(|address| address.port() != first).collect();
    sticky(&rest, Some(100));
    let second = rig.ask().await.unwrap();
    assert_ne!(second, first);
    assert_eq!(rig.ask().await.unwrap(), second);
    sticky(&rest, None);
    assert_ne!(rig.ask().await.unwrap(), rig.ask().await.unwrap(), "AFF-3: spread again");
}

#[tokio::test]
async fn a_connection_to_an_endpoint_that_is_removed_goes_on() {
    let (a, b) = (endpoint().await.0, endpoint().await.0);
    let rig = rig(&[a]);
    let (mut stream, _) = rig.connect().await.unwrap();
    rig.port.update(Arc::new(plan(&[b])), super::super::tests::setting());
    assert_eq!(rig.ask().await.unwrap(), b.port());
    stream.write_all(b"still there?").await.unwrap();
    let mut buffer = [0; 12];
    stream.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"still there?");
}

#[tokio::test]
async fn lnp_5_a_closed_listener_refuses_and_connections_go_on_until_the_drain_ends() {
    let rig = rig(&[endpoint().await.0]);
    let (mut stream, _) = rig.connect().await.unwrap();
    let Rig { shared, listener, .. } = rig;
    let address = listener.address;
    drop(listener);
    let begun = Instant::now();
    while TcpStream::connect(address).await.is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(2));
        tokio::task::yield_now().await;
    }
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    assert_eq!(shared.open(), 1);
    shared.drain(Duration::from_millis(300)).await;
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(stream.read_u8().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn lnp_5_whoever_waits_in_the_queue_when_a_listener_is_closed_is_served() {
    let rig = rig(&[endpoint().await.0]);
    // Nothing is accepted any more, on any thread.
    for (_, task) in &rig.listener.doors {
        task.abort();
        while !task.is_finished() {
            tokio::task::yield_now().await;
        }
    }
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(TcpStream::connect(rig.listener.address).await.unwrap());
    }
    assert_eq!(rig.shared.open(), 0);
    drop(rig.listener);
    for stream in &mut waiting {
        assert!(stream.read_u16().await.is_ok());
    }
}

#[tokio::test]
async fn each_thread_listens_at_the_same_port_and_one_alone_shares_it_with_nobody() {
    let rig = rig(&[endpoint().await.0]);
    let address = rig.listener.address;
    let queues = rig.listener.doors.iter().map(|(door, _)| door.socket.local_addr().unwrap());
    assert_eq!(queues.collect::<Vec<_>>(), [address, address]);
    assert!(socket(address, false).is_err());
    let alone = socket("127.0.0.1:0".parse().unwrap(), false).unwrap().listen(1).unwrap();
    assert!(socket(alone.local_addr().unwrap(), true).is_err());
}

#[tokio::test]
async fn more_connections_than_the_limit_wait_and_are_served() {
    let shared = Arc::new(Shared::new(
        super::super::counters::Counters::default(),
        super::super::shared::Limits { connections: 2, flows: 2 },
        2,
    ));
    let port = port(&shared, Protocol::Tcp, plan(&[endpoint().await.0]));
    let at = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::open(at, &Whose::NodePort(Arc::clone(&port)), &shared).unwrap();
    let rig = Rig { shared, port, listener };
    let (first, second) = (rig.connect().await.unwrap(), rig.connect().await.unwrap());
    assert!(timeout(Duration::from_millis(200), rig.ask()).await.is_err(), "it waits");
    drop((first, second));
    for _ in 0..5 {
        rig.ask().await.unwrap();
    }
    assert!(rig.shared.counters.limited.get() >= 1);
}

#[test]
fn frontends_are_found_by_address_then_by_node_port() {
    let shared = shared();
    let (one, two) = (port(&shared, Protocol::Tcp, plan(&[])), port(&shared, Protocol::Tcp, plan(&[])));
    let frontends = Frontends::default();
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    frontends.add(&one, [(at("10.96.0.1:80"), Entrance::Internal)], Some(30080));
    let found = |text| frontends.find(at(text)).map(|(entrance, port)| (entrance, Arc::ptr_eq(&port, &one)));
    assert_eq!(found("10.96.0.1:80"), Some((Entrance::Internal, true)));
    assert_eq!(found("192.168.0.2:30080"), Some((Entrance::External, true)));
    assert_eq!(found("10.96.0.1:81"), None);
    // Another Service has taken the address over; the old one does not take it away.
    frontends.add(&two, [(at("10.96.0.1:80"), Entrance::External)], None);
    frontends.remove(&one, [at("10.96.0.1:80")], Some(30080));
    assert_eq!(found("10.96.0.1:80"), Some((Entrance::External, false)));
    assert_eq!(found("192.168.0.2:30080"), None);
}
