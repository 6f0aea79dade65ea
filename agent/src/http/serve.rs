//! Serves HTTP on ports that strangers may reach.
//!
//! In: a listening socket, routes. Out: answers, until told to stop. A client can hold neither a connection that says nothing nor more
//! of them than a port has places, so that nobody takes the agent's file descriptors away.

use std::time::Duration;

use http::Response;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::debug;
use warp::filters::BoxedFilter;

/// How many clients a port serves at a time; others wait in the kernel's queue.
pub(super) const CONNECTIONS: usize = 256;
/// A connection may be silent for this long. Longer than Prometheus and load balancers wait between two questions.
const SILENCE: Duration = Duration::from_mins(2);
/// After a port is closed, requests that are under way may finish for this long.
const GRACE: Duration = Duration::from_secs(5);
/// When no connection can be accepted, for want of file descriptors, trying at once would only burn the processor.
const PAUSE: Duration = Duration::from_millis(100);

/// What a port answers.
pub type Routes = BoxedFilter<(Response<String>,)>;

/// Answers until `stop`. The socket is closed at once then; if the future is dropped, all connections are too.
pub async fn serve(socket: TcpListener, routes: Routes, stop: impl Future<Output = ()>) {
    let mut connections = JoinSet::new();
    let (closing, closed) = watch::channel(());
    {
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                Some(_) = connections.join_next() => {}
                accepted = socket.accept(), if connections.len() < CONNECTIONS => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(answer(stream, routes.clone(), closed.clone()));
                    }
                    Err(error) => {
                        debug!("no connection is accepted: {error}");
                        sleep(PAUSE).await;
                    }
                },
            }
        }
    }
    drop((socket, closing));
    let _ = timeout(GRACE, async { while connections.join_next().await.is_some() {} }).await;
}

async fn answer(stream: TcpStream, routes: Routes, mut closed: watch::Receiver<()>) {
    let service = TowerToHyperService::new(warp::service(routes));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(SILENCE)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        _ = closed.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Balancers that only open a connection are no news.
        debug!("a connection has ended: {error}");
    }
}
