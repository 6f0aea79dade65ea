//! `/livez`, `/readyz` and `/metrics`.
//!
//! In: [`Health`], which the other parts keep. Out: answers. A replica is ready once it knows all objects, whether it
//! leads or not, so that a standby that cannot take over shows.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use warp::Filter;
use warp::http::StatusCode;

use crate::metrics::{CONTENT_TYPE, Metrics};

/// The controller turns at least every 15 s, and after every request while it writes.
const STUCK: Duration = Duration::from_mins(3);

/// What the process knows of itself.
#[derive(Debug)]
pub struct Health(Mutex<State>);

#[derive(Debug)]
struct State {
    /// What readiness waits for.
    waiting_for: Option<String>,
    progress: Instant,
}

impl Default for Health {
    fn default() -> Self {
        let waiting_for = Some("starting".to_owned());
        Self(Mutex::new(State { waiting_for, progress: Instant::now() }))
    }
}

impl Health {
    /// Ready, or not because of `waiting_for`.
    pub fn set_waiting_for(&self, waiting_for: Option<String>) {
        self.state().waiting_for = waiting_for;
    }

    /// The controller is alive.
    pub fn progress(&self) {
        self.state().progress = Instant::now();
    }

    fn readiness(&self) -> Result<(), String> {
        self.state().waiting_for.clone().map_or(Ok(()), Err)
    }

    fn liveness(&self) -> Result<(), String> {
        let idle = self.state().progress.elapsed();
        if idle < STUCK { Ok(()) } else { Err(format!("no progress for {} s", idle.as_secs())) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves on `listener` until `stop` completes.
pub async fn serve(
    listener: TcpListener,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let live = Arc::clone(&health);
    let livez = warp::path!("livez").map(move || answer(live.liveness()));
    let readyz = warp::path!("readyz").map(move || answer(health.readiness()));
    let metrics = warp::path!("metrics")
        .map(move || warp::reply::with_header(metrics.text(), "content-type", CONTENT_TYPE));
    let routes = warp::get().and(livez.or(readyz).or(metrics));
    warp::serve(routes).incoming(listener).graceful(stop).run().await;
}

fn answer(health: Result<(), String>) -> impl warp::Reply {
    match health {
        Ok(()) => warp::reply::with_status("ok\n".to_owned(), StatusCode::OK),
        Err(why) => warp::reply::with_status(format!("{why}\n"), StatusCode::SERVICE_UNAVAILABLE),
    }
}

/// Listens on `address`.
pub async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}
