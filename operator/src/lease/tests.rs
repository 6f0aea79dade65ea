use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;

/// An API server that holds one Lease, and that can be cut off.
#[derive(Clone, Default)]
struct Server {
    lease: Arc<Mutex<Option<Value>>>,
    cut_off: Arc<AtomicBool>,
}

impl Server {
    fn client(&self) -> Client {
        let server = self.clone();
        Client::new(tower::service_fn(move |request| server.clone().answer(request)), "default")
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, std::io::Error> {
        if self.cut_off.load(Ordering::Relaxed) {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        let mut lease = self.lease.lock().unwrap();
        let version =
            |lease: &Value| lease["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap();
        let refuse =
            |code: u16, reason: &str| (code, json!({"status": "Failure", "code": code, "reason": reason}));
        let (code, answer) = match (parts.method, lease.as_ref()) {
            (Method::GET, Some(lease)) => (200, lease.clone()),
            (Method::POST, None) => {
                let mut new: Value = serde_json::from_slice(&body).unwrap();
                new["metadata"]["resourceVersion"] = "1".into();
                (201, lease.insert(new).clone())
            }
            (Method::PUT, Some(old)) => {
                let mut new: Value = serde_json::from_slice(&body).unwrap();
                if version(&new) == version(old) {
                    new["metadata"]["resourceVersion"] = (version(old) + 1).to_string().into();
                    (200, lease.insert(new).clone())
                } else {
                    refuse(409, "Conflict")
                }
            }
            (Method::POST, Some(_)) => refuse(409, "AlreadyExists"),
            _ => refuse(404, "NotFound"),
        };
        Ok(Response::builder().status(code).body(Body::from(serde_json::to_vec(&answer).unwrap())).unwrap())
    }

    fn spec(&self) -> Value {
        self.lease.lock().unwrap().as_ref().unwrap()["spec"].clone()
    }

    /// What somebody else does to the Lease.
    fn edit(&self, edit: impl FnOnce(&mut Value)) {
        let mut lease = self.lease.lock().unwrap();
        let lease = lease.as_mut().unwrap();
        let version: u64 = lease["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        lease["metadata"]["resourceVersion"] = (version + 1).to_string().into();
        edit(lease);
    }
}

struct Replica {
    leadership: Leadership,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Replica {
    fn start(server: &Server, identity: &str) -> Self {
        let (grant, leadership) = Leadership::new();
        let stop = CancellationToken::new();
        let settings = Settings::new("system".to_owned(), "lease".to_owned(), identity.to_owned());
        let task = tokio::spawn(compete(server.client(), settings, grant, stop.clone().cancelled_owned()));
        Self { leadership, stop, task }
    }

    /// As kill -9 does.
    fn kill(&self) {
        self.task.abort();
    }
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn the_first_leads_and_goes_on_leading() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    let b = Replica::start(&server, "b");
    for _ in 0..600 {
        seconds(1).await;
        assert!(a.leadership.is_held() && !b.leadership.is_held());
    }
    assert_eq!(server.spec()["holderIdentity"], "a");
    assert_eq!(server.spec()["leaseTransitions"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_killed_leader_is_replaced_within_twenty_seconds_and_not_before_its_term_ends() {
    for phase in 0..20 {
        let server = Server::default();
        let a = Replica::start(&server, "a");
        a.leadership.gained().await;
        sleep(Duration::from_millis(30_000 + 150 * phase)).await;
        let b = Replica::start(&server, "b");
        sleep(Duration::from_millis(30_000 + 370 * phase)).await;
        a.kill();
        let killed = Instant::now();
        b.leadership.gained().await;
        let taken = killed.elapsed();
        assert!(!a.leadership.is_held(), "the dead leader's term is over");
        assert!((13..18).contains(&taken.as_secs()), "took {taken:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_stops_gives_the_lease_back_for_the_next() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    let b = Replica::start(&server, "b");
    seconds(30).await;
    a.stop.cancel();
    let stopped = Instant::now();
    b.leadership.gained().await;
    assert!(stopped.elapsed() <= Duration::from_millis(2100), "took {:?}", stopped.elapsed());
    assert!(!a.leadership.is_held());
    a.task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_cut_off_stops_before_another_can_start() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    seconds(5).await;
    server.cut_off.store(true, Ordering::Relaxed);
    let cut = Instant::now();
    a.leadership.lost().await;
    assert!(cut.elapsed() <= Duration::from_secs(10), "took {:?}", cut.elapsed());
    assert!(!a.leadership.is_held());
    server.cut_off.store(false, Ordering::Relaxed);
    a.leadership.gained().await;
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_costs_nothing() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    for _ in 0..10 {
        server.cut_off.store(true, Ordering::Relaxed);
        for _ in 0..50 {
            sleep(Duration::from_millis(100)).await;
            assert!(a.leadership.is_held());
        }
        server.cut_off.store(false, Ordering::Relaxed);
        seconds(5).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_another_takes_is_lost_at_the_next_look() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    seconds(5).await;
    server.edit(|lease| lease["spec"]["holderIdentity"] = "thief".into());
    let taken = Instant::now();
    a.leadership.lost().await;
    assert!(taken.elapsed() <= Duration::from_secs(2));
    seconds(5).await;
    assert_eq!(server.spec()["holderIdentity"], "thief", "within the other's term nothing is written");
}

#[tokio::test(start_paused = true)]
async fn an_edit_by_somebody_who_does_not_take_it_is_no_loss() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    for _ in 0..20 {
        seconds(1).await;
        server.edit(|lease| lease["metadata"]["labels"] = json!({"note": "mine"}));
        assert!(a.leadership.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_lease_is_made_again() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    seconds(5).await;
    *server.lease.lock().unwrap() = None;
    seconds(5).await;
    assert!(a.leadership.is_held());
    assert_eq!(server.spec()["holderIdentity"], "a");
}

/// Clocks of replicas may be hours apart: only the writer's time is in the Lease, and nobody compares it.
#[tokio::test(start_paused = true)]
async fn renewals_count_whatever_time_they_name() {
    let server = Server::default();
    let a = Replica::start(&server, "a");
    a.leadership.gained().await;
    let b = Replica::start(&server, "b");
    a.kill();
    for _ in 0..30 {
        server.edit(|lease| lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z".into());
        seconds(10).await;
        assert!(!b.leadership.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn of_many_at_most_one_leads() {
    let server = Server::default();
    let replicas: Vec<_> = (0..7).map(|index| Replica::start(&server, &format!("r{index}"))).collect();
    let mut killed = 0;
    let mut led = 0;
    for second in 0..400 {
        seconds(1).await;
        let leaders: Vec<_> = replicas
            .iter()
            .filter(|replica| replica.leadership.is_held() && !replica.task.is_finished())
            .collect();
        assert!(leaders.len() <= 1);
        led += leaders.len();
        if second % 50 == 49
            && killed < 6
            && let Some(leader) = leaders.first()
        {
            leader.kill();
            killed += 1;
        }
    }
    assert_eq!(killed, 6);
    assert!(led > 250, "led for {led} of 400 s, with six deaths");
}
