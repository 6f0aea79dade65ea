//! An endpoint's process is killed under load: a proxy loses no request, and the kernel loses none once the slice has changed.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, park_timeout};
use std::time::{Duration, Instant};

use pointsman_agent::model::Change;
use pointsman_crds::settings::UserspaceScheduler;

use super::lab::Lab;
use super::world::{FAMILIES, Way, World, cluster_ip, config, slice, spec};

const PORT: u16 = 9000;

/// A server that can be killed; it says its name.
struct Server {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Server {
    fn start(lab: &Lab, name: &'static str, namespace: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let socket = lab.run(namespace, || TcpListener::bind(("::", PORT)).unwrap());
        socket.set_nonblocking(true).unwrap();
        let thread = std::thread::spawn(move || {
            let mut served = 0;
            while !stopped.load(Ordering::Relaxed) {
                let Ok((mut stream, _)) = socket.accept() else {
                    park_timeout(Duration::from_micros(500));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                let _ = stream.write_all(name.as_bytes());
                served += 1;
            }
            // The socket is closed here, and the kernel resets those who wait in its queue.
            served
        });
        Self { stop, thread }
    }

    fn kill(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Clients that ask all the time.
pub struct Load {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    /// Each with what went wrong, and when that request began.
    clients: Vec<JoinHandle<Vec<(Instant, String)>>>,
}

impl Load {
    fn start(lab: &Lab) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let served = Arc::new(AtomicUsize::new(0));
        let client = |from| {
            let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
            lab.spawn(from, move || {
                let mut failed = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let ask = || {
                        let mut stream = TcpStream::connect_timeout(&cluster_ip(), Duration::from_secs(4))?;
                        stream.set_read_timeout(Some(Duration::from_secs(4)))?;
                        let mut text = String::new();
                        stream.read_to_string(&mut text)?;
                        Ok::<_, std::io::Error>(text)
                    };
                    match ask() {
                        Ok(text) if ["a", "b", "r"].contains(&text.as_str()) => {
                            served.fetch_add(1, Ordering::Relaxed);
                        }
                        other => failed.push((begun, format!("{other:?}"))),
                    }
                }
                failed
            })
        };
        let clients = ["client", "client", "node", "pod"].map(client).into();
        Self { stop, served, clients }
    }

    /// Waits until so many more were served.
    fn wait(&self, count: usize) {
        let (begun, before) = (Instant::now(), self.served.load(Ordering::Relaxed));
        while self.served.load(Ordering::Relaxed) < before + count {
            assert!(begun.elapsed() < Duration::from_secs(30));
            park_timeout(Duration::from_millis(5));
        }
    }

    fn stop(self) -> (usize, Vec<(Instant, String)>) {
        self.stop.store(true, Ordering::Relaxed);
        let failed = self.clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        (self.served.load(Ordering::Relaxed), failed)
    }
}

fn endpoints(world: &mut World, pods: &[&str]) {
    let mut slice = slice("web", FAMILIES[0], pods);
    slice.ports.as_mut().unwrap()[0].port = Some(PORT.into());
    world.apply(Change::SliceApplied(Box::new(slice)));
    world.settle();
}

/// Kills one of three. From when on none may be lost, says `until_known`, which is called after that.
pub fn kill_one(
    way: Way,
    scheduler: UserspaceScheduler,
    until_known: fn(&mut World, &Load) -> Option<Instant>,
) {
    let Some(lab) = Lab::new() else { return };
    let mut world = World::new(&lab, way);
    let mut config = config();
    config.userspace.scheduler = scheduler;
    world.configure(config);
    world.service("web", spec());
    let servers =
        [("a", "a"), ("b", "b"), ("r", "far")].map(|(name, space)| Server::start(&lab, name, space));
    endpoints(&mut world, &["a", "b", "r"]);
    let load = Load::start(&lab);
    load.wait(300);
    let [a, b, r] = servers;
    let before = b.kill();
    let known = until_known(&mut world, &load);
    load.wait(600);
    let (served, failed) = load.stop();
    let late = failed.iter().filter(|(begun, _)| known.is_none_or(|known| *begun >= known));
    let late: Vec<&String> = late.map(|(_, what)| what).collect();
    eprintln!("{way} {scheduler:?}: {served} served, {} lost, {} when none may be", failed.len(), late.len());
    assert_eq!(late, Vec::<&String>::new(), "{way}: of {served}");
    assert!(before > 50 && a.kill() > 50 && r.kill() > 50);
}

/// Kills one of three in a mode of the kernel's, which goes on reaching the others while nobody has noticed, and loses none once the
/// slice has changed.
pub fn kill_one_under_the_kernel(way: Way) {
    kill_one(way, UserspaceScheduler::Rr, |world, load| {
        load.wait(100);
        endpoints(world, &["a", "r"]);
        Some(Instant::now())
    });
}
