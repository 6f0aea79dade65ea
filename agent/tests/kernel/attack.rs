//! A proxy under clients and endpoints that behave badly, while endpoints come and go: nothing is left of them afterwards, and
//! memory stays within bounds meanwhile.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, park_timeout};
use std::time::{Duration, Instant};

use pointsman_agent::model::Change;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::{sleep, timeout};

use crate::support::lab::{Lab, ip};
use crate::support::world::{FAMILIES, Way, World, block_on, config, slice};

const CLUSTER_IP: &str = "172.30.0.80";
const PORT: u16 = 9000;
/// Clients at a time.
const CLIENTS: usize = 250;
const LASTS: Duration = Duration::from_secs(12);
/// What an endpoint sends to who asks for much: were it kept for slow readers, it would be seen.
const MUCH: usize = 8 << 20;
/// What the process may allocate on top of what it had: clients and endpoints are in it too.
const MEMORY: u64 = 96 << 20;
const PATIENCE: Duration = Duration::from_secs(3);

/// A small generator (xorshift), so that a failure can be played again.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// What a byte at this place of a stream is.
fn pattern(from: usize, length: usize) -> Vec<u8> {
    (from..from + length).map(|index| u8::try_from(index % 251).unwrap()).collect()
}

/// Some leave at once, some before they answer, and the rest does what the first byte says.
async fn endpoint(mut stream: TcpStream, mood: u64) -> std::io::Result<()> {
    match mood {
        0 => return stream.set_zero_linger(),
        1 => return Ok(()),
        _ => {}
    }
    match stream.read_u8().await? {
        b'm' => {
            let mut sent = 0;
            while sent < MUCH {
                stream.write_all(&pattern(sent, 16 << 10)).await?;
                sent += 16 << 10;
            }
        }
        b'e' => {
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await?;
        }
        _ => stream.set_zero_linger()?,
    }
    Ok(())
}

/// One connection. An error is what may happen; a wrong byte is not.
async fn client(to: SocketAddr, mood: u64, right: &AtomicU64) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(to).await?;
    let mut buffer = vec![0; 16 << 10];
    match mood {
        // Goes at once, with a reset and without.
        0 => stream.set_zero_linger()?,
        1 => {}
        // Says nothing for a while.
        2 => sleep(Duration::from_millis(400)).await,
        // Asks for much, reads slowly or never, and goes in the middle.
        3 | 4 => {
            stream.write_u8(b'm').await?;
            let mut got = 0;
            for _ in 0..if mood == 3 { 100 } else { 0 } {
                let length = stream.read(&mut buffer[..4096]).await?;
                assert_eq!(buffer[..length], pattern(got, length));
                got += length;
                sleep(Duration::from_millis(4)).await;
            }
            sleep(Duration::from_millis(200)).await;
            if mood == 4 {
                stream.set_zero_linger()?;
            }
        }
        // Asks for an unknown thing.
        5 => {
            stream.write_all(b"x and much more").await?;
            stream.read_u8().await?;
        }
        // Half-closes, and gets everything back.
        6 => {
            let question = pattern(0, 5000);
            stream.write_u8(b'e').await?;
            stream.write_all(&question).await?;
            stream.shutdown().await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            // Unless the endpoint left without a word.
            assert!(answer.is_empty() || answer == question, "an end that is none: {}", answer.len());
            right.fetch_add(1, Ordering::Relaxed);
        }
        // Reads all of it.
        _ => {
            stream.write_u8(b'm').await?;
            let mut got = 0;
            loop {
                let length = stream.read(&mut buffer).await?;
                if length == 0 {
                    break;
                }
                assert_eq!(buffer[..length], pattern(got, length));
                got += length;
            }
            assert!(got == 0 || got == MUCH, "an end that is none: {got}");
            right.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Datagrams from ever new ports.
async fn datagrams(to: SocketAddr) -> std::io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(to).await?;
    for _ in 0..5 {
        socket.send(b"?").await?;
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[derive(Default)]
struct Counts {
    tried: AtomicU64,
    right: AtomicU64,
    clients_stop: AtomicBool,
    endpoints_stop: AtomicBool,
}

fn clients(lab: &Lab, counts: &Arc<Counts>) -> Vec<JoinHandle<()>> {
    ["client", "pod"]
        .into_iter()
        .enumerate()
        .map(|(number, from)| {
            let counts = Arc::clone(counts);
            lab.spawn(from, move || {
                let work = |seed: u64| {
                    let counts = Arc::clone(&counts);
                    async move {
                        let mut dice = Dice(seed * 7919 + 17);
                        while !counts.clients_stop.load(Ordering::Relaxed) {
                            counts.tried.fetch_add(1, Ordering::Relaxed);
                            let mood = dice.roll(9);
                            let _ = if mood == 8 {
                                timeout(PATIENCE, datagrams((ip(CLUSTER_IP), 53).into())).await
                            } else {
                                let to = (ip(CLUSTER_IP), 80).into();
                                timeout(PATIENCE, client(to, mood, &counts.right)).await
                            };
                            // Who was refused does not burn the processor.
                            sleep(Duration::from_millis(5)).await;
                        }
                    }
                };
                block_on(async {
                    let half = u64::try_from(CLIENTS / 2).unwrap();
                    let first = u64::try_from(number).unwrap() * half;
                    let tasks: Vec<_> = (first..first + half).map(|seed| tokio::spawn(work(seed))).collect();
                    for task in tasks {
                        task.await.unwrap();
                    }
                });
            })
        })
        .collect()
}

fn endpoints(lab: &Lab, counts: &Arc<Counts>) -> Vec<JoinHandle<()>> {
    let serve = |namespace: &str| {
        let counts = Arc::clone(counts);
        lab.spawn(namespace, move || {
            block_on(async {
                let listener = TcpListener::bind(("0.0.0.0", PORT)).await.unwrap();
                let mut dice = Dice(4711);
                while !counts.endpoints_stop.load(Ordering::Relaxed) {
                    if let Ok(Ok((stream, _))) = timeout(Duration::from_millis(100), listener.accept()).await
                    {
                        tokio::spawn(endpoint(stream, dice.roll(8)));
                    }
                }
            });
        })
    };
    ["a", "b", "far"].map(serve).into()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn allocated() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    line.unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn nothing_is_left_of_a_thousand_clients_and_endpoints_that_behave_badly() {
    let Some(lab) = Lab::new() else { return };
    let mut world = World::new(&lab, Way::Userspace);
    let mut config = config();
    // So that flows of datagrams are over with this test.
    (config.conntrack.udp_timeout_seconds, config.conntrack.udp_stream_timeout_seconds) = (1, 1);
    world.configure(config);
    let spec = json!({"clusterIPs": [CLUSTER_IP], "ports": [
        {"name": "web", "port": 80}, {"name": "dns", "protocol": "UDP", "port": 53},
    ]});
    world.service("web", spec.clone());
    world.settle();
    let (files, memory) = (open_files(), allocated());
    let counts = Arc::new(Counts::default());
    let (endpoints, clients) = (endpoints(&lab, &counts), clients(&lab, &counts));
    let (begun, mut dice, mut most) = (Instant::now(), Dice(42), 0);
    while begun.elapsed() < LASTS {
        match dice.roll(12) {
            0 => world.delete_service("web"),
            _ => world.service("web", spec.clone()),
        }
        let pods: Vec<&str> = ["a", "b", "r"].into_iter().filter(|_| dice.roll(4) > 0).collect();
        let mut slice = slice("web", FAMILIES[0], &pods);
        slice.ports.as_mut().unwrap()[0].port = Some(PORT.into());
        world.apply(Change::SliceApplied(Box::new(slice)));
        world.sync();
        most = most.max(allocated().saturating_sub(memory));
        park_timeout(Duration::from_millis(100));
    }
    for (stop, threads) in [(&counts.clients_stop, clients), (&counts.endpoints_stop, endpoints)] {
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
    }
    let (tried, right) = (counts.tried.load(Ordering::Relaxed), counts.right.load(Ordering::Relaxed));
    let done = Instant::now();
    while open_files() > files && done.elapsed() < Duration::from_secs(10) {
        park_timeout(Duration::from_millis(50));
    }
    eprintln!(
        "{tried} clients, {right} got all; at most {} MiB; everything closed after {:?}",
        most >> 20,
        done.elapsed()
    );
    assert!(open_files() <= files, "connections or pipes are left: {} {files}", open_files());
    assert!(tried > 1000 && right > 10, "{tried} {right}");
    assert!(most < MEMORY, "{most}");
    world.service("web", spec);
    world.endpoints("web", &["a"]);
    world.settle();
    assert!(matches!(lab.tcp("client", (ip(CLUSTER_IP), 80)), crate::support::traffic::Answer::From(..)));
}
