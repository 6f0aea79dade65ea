//! Through sockets on loopback.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;

const PATIENCE: Patience = Patience { open: Duration::from_secs(30), half_closed: Duration::from_secs(30) };

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (near, far) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

/// A client, a server, and the relay between them.
async fn relayed(patience: Patience) -> (TcpStream, TcpStream, JoinHandle<Ended>, Bytes) {
    let (client, mut left) = pair().await;
    let (server, mut right) = pair().await;
    let bytes = Bytes::default();
    let counters = bytes.clone();
    let task = tokio::spawn(async move {
        let ended = relay(&mut left, &mut right, patience, &counters, &|| {}).await;
        if !matches!(ended, Ended::Well) {
            let _ = (left.set_zero_linger(), right.set_zero_linger());
        }
        ended
    });
    (client, server, task, bytes)
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| u8::try_from(index * 7 % 251).unwrap()).collect()
}

#[tokio::test]
async fn each_side_may_finish_first_and_still_gets_all_of_the_other() {
    let (mut client, mut server, task, bytes) = relayed(PATIENCE).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut question = String::new();
    server.read_to_string(&mut question).await.unwrap();
    assert_eq!(question, "question");
    server.write_all(b"a long answer").await.unwrap();
    drop(server);
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "a long answer");
    assert!(matches!(task.await.unwrap(), Ended::Well));
    assert_eq!((bytes.to_endpoint.get(), bytes.to_client.get()), (8, 13));
}

#[tokio::test]
async fn bulk_goes_through_a_pipe_unharmed_in_both_directions_at_once() {
    let (client, server, task, bytes) = relayed(PATIENCE).await;
    let size = 20 << 20;
    let exchange = |stream: TcpStream| async move {
        let (mut read, mut write) = stream.into_split();
        let writer = tokio::spawn(async move {
            write.write_all(&pattern(size)).await.unwrap();
            write.shutdown().await.unwrap();
        });
        let mut got = Vec::new();
        read.read_to_end(&mut got).await.unwrap();
        writer.await.unwrap();
        assert!(got == pattern(size));
    };
    tokio::join!(exchange(client), exchange(server));
    assert!(matches!(task.await.unwrap(), Ended::Well));
    assert_eq!((bytes.to_endpoint.get(), bytes.to_client.get()), (size as u64, size as u64));
}

#[test]
fn only_large_amounts_are_worth_a_pipe() {
    let after = |start, amounts: &[usize]| amounts.iter().fold(start, |bulk, count| weigh(bulk, *count));
    assert_eq!(after(0, &[128; 2_000]), 0);
    assert_eq!(after(0, &[BUFFER; 16]), BULK);
    // 64 KiB at a time, as network cards hand them over.
    let mut arrivals = [BUFFER; 40];
    (0..40).step_by(5).for_each(|index| arrivals[index] = 100);
    assert_eq!(after(0, &arrivals), BULK);
    assert_eq!(after(BULK, &[128; 16]), 0);
    assert_eq!(after(BULK, &[64 << 10, 128, 64 << 10, 128]), BULK - BUFFER);
}

#[tokio::test]
async fn what_is_large_and_small_by_turns_arrives_unharmed() {
    let (mut client, mut server, task, bytes) = relayed(PATIENCE).await;
    let (mut sent, mut got) = (0, vec![0; 2 << 20]);
    for round in 0..3 {
        for length in std::iter::once(2 << 20).chain([100 + round; 40]) {
            let message = pattern(length);
            let (written, read) =
                tokio::join!(client.write_all(&message), server.read_exact(&mut got[..length]));
            written.unwrap();
            assert_eq!(read.unwrap(), length);
            assert!(got[..length] == message);
            sent += length as u64;
        }
    }
    drop(client);
    assert_eq!(server.read(&mut got).await.unwrap(), 0);
    drop(server);
    assert!(matches!(task.await.unwrap(), Ended::Well));
    assert_eq!(bytes.to_endpoint.get(), sent);
}

#[tokio::test]
async fn a_reader_that_does_not_read_stops_the_writer() {
    let (client, mut server, _task, bytes) = relayed(PATIENCE).await;
    let writing = tokio::spawn(async move {
        let mut client = client;
        client.write_all(&pattern(64 << 20)).await.unwrap();
        client.shutdown().await.unwrap();
        client
    });
    let mut before = u64::MAX;
    while bytes.to_endpoint.get() != before {
        before = bytes.to_endpoint.get();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(!writing.is_finished());
    assert!(before < 32 << 20, "{before}: only what sockets hold");
    let mut got = Vec::new();
    server.read_to_end(&mut got).await.unwrap();
    assert!(got == pattern(64 << 20));
    writing.await.unwrap();
}

#[tokio::test]
async fn a_reset_is_passed_on_and_never_looks_like_an_end() {
    let (mut client, mut server, task, _) = relayed(PATIENCE).await;
    server.write_all(b"half of the ans").await.unwrap();
    let mut buffer = [0; 15];
    client.read_exact(&mut buffer).await.unwrap();
    server.set_zero_linger().unwrap();
    drop(server);
    assert!(matches!(task.await.unwrap(), Ended::Broken(_)));
    assert_eq!(client.read(&mut buffer).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn an_endpoint_that_goes_before_anything_was_said_is_told_apart() {
    let (_client, server, task, _) = relayed(PATIENCE).await;
    server.set_zero_linger().unwrap();
    drop(server);
    assert!(matches!(task.await.unwrap(), Ended::Unused(_)));
    let (_client, server, task, _) = relayed(PATIENCE).await;
    drop(server);
    assert!(matches!(task.await.unwrap(), Ended::Unused(_)), "closed as is usual");
    // A client that goes is no reason to look for another endpoint.
    let (client, _server, task, _) = relayed(PATIENCE).await;
    client.set_zero_linger().unwrap();
    drop(client);
    assert!(matches!(task.await.unwrap(), Ended::Broken(_)));
    // Nor is one that has said nothing and wants to say nothing more, or has let the endpoint wait for too long.
    for wait in [None, Some(UNWANTED)] {
        let (mut client, mut server, task, _) = relayed(PATIENCE).await;
        match wait {
            None => {
                client.shutdown().await.unwrap();
                assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
            }
            Some(wait) => tokio::time::sleep(wait).await,
        }
        drop(server);
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        drop(client);
        assert!(matches!(task.await.unwrap(), Ended::Well));
    }
}

#[tokio::test]
async fn a_silent_connection_ends_and_sooner_if_one_side_has_finished() {
    let patience = Patience { open: Duration::from_millis(600), half_closed: Duration::from_millis(100) };
    let (mut client, mut server, task, _) = relayed(patience).await;
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        client.write_all(b"x").await.unwrap();
        server.read_u8().await.unwrap();
    }
    assert!(!task.is_finished(), "it was not silent for long enough");
    let begun = Instant::now();
    assert!(matches!(timeout(Duration::from_secs(5), task).await.unwrap().unwrap(), Ended::Silent));
    assert!(begun.elapsed() > Duration::from_millis(400));
    let (mut client, _server, task, _) = relayed(patience).await;
    client.shutdown().await.unwrap();
    let begun = Instant::now();
    assert!(matches!(timeout(Duration::from_secs(5), task).await.unwrap().unwrap(), Ended::Silent));
    assert!(begun.elapsed() < Duration::from_millis(500));
}
