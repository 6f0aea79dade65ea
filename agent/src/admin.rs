//! The admin socket: a Unix socket for probes and for people on the node.
//!
//! In: requests for `/live`, `/ready` and `/state`. Out: answers in text or JSON. It is there whatever the configuration says
//! about ports, which is why the kubelet's probes ask here ([`probe`]). Only root may open it.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Response;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, timeout};
use warp::Filter;
use warp::filters::BoxedFilter;

use crate::http::{View, json as json_reply, reply};

const SOCKET: &str = "admin.sock";
/// Less than a kubelet probe's default would be too little on a node that is starved.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// Why the admin socket did not work.
#[derive(Debug, Error)]
pub enum AdminError {
    /// The socket cannot be made.
    #[error("the admin socket {path:?} cannot be made: {error}; check that its directory is writable")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Nobody answers.
    #[error(
        "no agent answers at {path:?}: {error}; is `pointsman-agent run` running, with the same --run-dir?"
    )]
    Ask {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Something answered, and it was no.
    #[error("{0}")]
    No(String),
}

/// Makes the socket in `directory` and answers until the future is dropped.
pub async fn serve(directory: &Path, view: &View) -> Result<(), AdminError> {
    let path = directory.join(SOCKET);
    let listener = listen(directory, &path).map_err(|error| AdminError::Listen { path, error })?;
    warp::serve(routes(view)).incoming(listener).run().await;
    Ok(())
}

fn listen(directory: &Path, path: &Path) -> io::Result<UnixListener> {
    std::fs::create_dir_all(directory)?;
    // Closed before the socket exists, so that there is no moment in which others can open it.
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700))?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn routes(view: &View) -> BoxedFilter<(Response<String>,)> {
    let (live, ready, state) = (view.clone(), view.clone(), view.clone());
    let routes = warp::path!("live")
        .map(move || live.live())
        .or(warp::path!("ready").map(move || {
            let (is, why) = ready.ready();
            reply(if is { 200 } else { 503 }, "text/plain; charset=utf-8", format!("{why}\n"))
        }))
        .unify()
        .or(warp::path!("state").map(move || json_reply(200, &state_json(&state))))
        .unify();
    warp::get().and(routes).boxed()
}

/// What the agent knows, for people.
fn state_json(view: &View) -> Value {
    let state = view.state.borrow().clone();
    let watches = view.watches.borrow().clone();
    let now = Instant::now();
    let (ready, why) = view.ready();
    let watches: serde_json::Map<String, Value> = watches
        .0
        .iter()
        .map(|(source, watch)| {
            let failing = watch.failing.as_ref().map(|(since, error)| {
                json!({ "seconds": now.saturating_duration_since(*since).as_secs(), "error": error })
            });
            (source.resource().0.to_owned(), json!({ "listed": watch.listed, "failing": failing }))
        })
        .collect();
    json!({
        "ready": ready,
        "why": why,
        "alive": view.pulse.alive(),
        "mode": state.mode.map(|mode| mode.to_string()),
        "waiting": state.waiting.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "config": {
            "assigned": state.config.assigned,
            "active": state.config.active,
            "activeHash": state.config.active_hash,
            "lastKnownGood": state.config.last_known_good,
            "rejected": state.config.rejected.as_ref().map(|(revision, rejection)| json!({
                "revision": revision, "reason": rejection.reason, "message": rejection.message,
            })),
        },
        "health": view.health(Some(*view.node.borrow())),
        "services": state.services,
        "endpoints": state.endpoints,
        "rules": state.rules,
        "verified": state.verified,
        "consecutiveFailures": state.consecutive_failures(),
        "lastError": state.error().map(ToString::to_string),
        "drift": {
            "lastCheck": state.drift.last_check.map(|time| time.to_string()),
            "foreignChanges": state.drift.foreign_changes,
            "repairs": state.drift.repairs,
            "differs": state.drift.differs,
            "lastDiff": state.drift.last_diff,
        },
        "skipped": state.skipped,
        "conflicts": state.conflicts,
        "watches": watches,
        "listeners": *view.listeners.borrow(),
        "healthChecks": {"open": view.checks.open(), "problems": view.checks.problems()},
    })
}

/// Asks the agent on this node for `/live`, `/ready` or `/state`. A refusal is an error that says why.
pub async fn probe(directory: &Path, what: &str) -> Result<String, AdminError> {
    let path = directory.join(SOCKET);
    let failed = |error| AdminError::Ask { path: path.clone(), error };
    let answer = timeout(PROBE_TIMEOUT, ask(&path, what))
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)))
        .map_err(failed)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let accepted = head.split_whitespace().nth(1) == Some("200");
    if accepted { Ok(body.to_owned()) } else { Err(AdminError::No(body.trim_end().to_owned())) }
}

/// One request of the simplest kind; a client library would be the larger part of this binary's start-up.
async fn ask(path: &Path, what: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(format!("GET /{what} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
