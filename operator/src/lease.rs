//! Which replica leads.
//!
//! In: a Lease that all replicas try to hold. Out: a [`Leadership`] that says until when this replica may write.
//!
//! The rules are client-go's, with its usual times. A replica measures by its own clock how long it has seen the Lease
//! unchanged, so clocks that differ between nodes do no harm; every write of the Lease names the version it replaces,
//! so of two replicas that try at once one fails; and a leader that cannot renew stops before another can start. The
//! crate kube-lease-manager compares `renewTime` with the local clock and takes over without naming a version, which
//! is why it is not used here.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::error::ApiError;

const RESOURCE: &str = "leases.coordination.k8s.io";

/// Names and times.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The Lease's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// This replica; no two may be equal.
    pub identity: String,
    /// How long others wait for a leader that does not renew.
    pub duration: Duration,
    /// How long a leader goes on without having renewed; must be shorter.
    pub renew_deadline: Duration,
    /// Time between two attempts.
    pub retry: Duration,
}

impl Settings {
    /// With the times that Kubernetes' own controllers use.
    #[must_use]
    pub fn new(namespace: String, name: String, identity: String) -> Self {
        Self {
            namespace,
            name,
            identity,
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// Until when this replica leads, if it does.
#[derive(Clone, Debug)]
pub struct Leadership(watch::Receiver<Option<Instant>>);

impl Leadership {
    /// A leadership and the end that grants it.
    #[must_use]
    pub fn new() -> (watch::Sender<Option<Instant>>, Self) {
        let (grant, leadership) = watch::channel(None);
        (grant, Self(leadership))
    }

    /// Whether this replica may write now. True to the clock even if the renewing task has been stopped.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Returns when it is held.
    pub async fn gained(&self) {
        let mut granted = self.0.clone();
        while !self.is_held() {
            if granted.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns when it is not, or no longer, held.
    pub async fn lost(&self) {
        let mut granted = self.0.clone();
        loop {
            let Some(until) = *granted.borrow_and_update() else { return };
            if Instant::now() >= until {
                return;
            }
            tokio::select! {
                () = sleep_until(until) => {}
                changed = granted.changed() => if changed.is_err() { return },
            }
        }
    }
}

/// Competes for the Lease until `stop` completes; then gives it back if it is held, so that another replica need not
/// wait. Whoever completes `stop` must have stopped writing.
pub async fn compete(
    client: Client,
    settings: Settings,
    grant: watch::Sender<Option<Instant>>,
    stop: impl Future<Output = ()>,
) {
    let mut candidate = Candidate {
        api: Api::namespaced(client, &settings.namespace),
        settings,
        seen: None,
        held_until: None,
        trouble: None,
    };
    let mut stop = std::pin::pin!(stop);
    loop {
        let pause = tokio::select! {
            () = candidate.attempt(&grant) => candidate.pause(),
            () = &mut stop => break,
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = &mut stop => break,
        }
    }
    let _ = grant.send(None);
    candidate.release().await;
}

/// What an attempt showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Mine,
    Theirs,
    Unsure,
}

struct Candidate {
    api: Api<Lease>,
    settings: Settings,
    /// The Lease as it was last read, and when it was first seen so.
    seen: Option<(Lease, Instant)>,
    held_until: Option<Instant>,
    trouble: Option<String>,
}

impl Candidate {
    /// One attempt to gain or to renew; tells the outcome.
    async fn attempt(&mut self, grant: &watch::Sender<Option<Instant>>) {
        // The term counts from before the request: nobody else can have seen the renewal earlier.
        let started = Instant::now();
        let verdict = match timeout(self.settings.renew_deadline / 2, self.try_hold()).await {
            Ok(Ok(verdict)) => {
                self.trouble = None;
                verdict
            }
            Ok(Err(error)) => {
                self.complain(error.to_string());
                Verdict::Unsure
            }
            Err(_) => {
                let name = &self.settings.name;
                self.complain(format!("the API server did not answer about lease {name} in time"));
                Verdict::Unsure
            }
        };
        let held_until = match verdict {
            Verdict::Mine => Some(started + self.settings.renew_deadline),
            Verdict::Theirs => None,
            // Not knowing is not losing: until the deadline nobody else can have taken it.
            Verdict::Unsure => self.held_until.filter(|until| Instant::now() < *until),
        };
        match (self.held_until, held_until) {
            (None, Some(_)) => info!(identity = self.settings.identity, "this replica leads"),
            (Some(_), None) => {
                warn!(identity = self.settings.identity, "this replica no longer leads; it writes nothing");
            }
            _ => {}
        }
        self.held_until = held_until;
        grant.send_replace(held_until);
    }

    fn complain(&mut self, trouble: String) {
        if self.trouble.as_ref() != Some(&trouble) {
            warn!("{trouble}");
        }
        self.trouble = Some(trouble);
    }

    /// How long to wait before the next attempt: not beyond the end of another's term.
    fn pause(&self) -> Duration {
        let retry = self.settings.retry;
        let Some((lease, since)) = &self.seen else { return retry };
        let over = *since + term(lease, &self.settings);
        // A millisecond past it, so that the term is over by then.
        let left = over.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        if self.held_until.is_some() { retry } else { retry.min(left) }
    }

    async fn try_hold(&mut self) -> Result<Verdict, ApiError> {
        let fail = |verb, error| ApiError::new(verb, RESOURCE, &self.settings.name, error);
        let found = self.api.get_opt(&self.settings.name).await.map_err(|error| fail("get", error))?;
        let Some(lease) = found else {
            let mine = Lease {
                metadata: ObjectMeta { name: Some(self.settings.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.claim(&LeaseSpec::default())),
            };
            let created = self.api.create(&PostParams::default(), &mine).await;
            return self.written("create", created);
        };
        self.see(&lease);
        let old = lease.spec.clone().unwrap_or_default();
        let holder = old.holder_identity.as_deref().unwrap_or_default();
        if !holder.is_empty() && holder != self.settings.identity {
            let over = self
                .seen
                .as_ref()
                .is_some_and(|(lease, since)| since.elapsed() >= term(lease, &self.settings));
            if !over {
                return Ok(Verdict::Theirs);
            }
            info!(holder, "the leader has not renewed its lease; taking over");
        }
        // Keeps the resource version: the write fails if anybody else has written meanwhile.
        let mine = Lease { spec: Some(self.claim(&old)), ..lease };
        let replaced = self.api.replace(&self.settings.name, &PostParams::default(), &mine).await;
        self.written("update", replaced)
    }

    /// The Lease as it stands when this replica holds it.
    fn claim(&self, old: &LeaseSpec) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let holds = old.holder_identity.as_deref() == Some(self.settings.identity.as_str());
        LeaseSpec {
            holder_identity: Some(self.settings.identity.clone()),
            lease_duration_seconds: i32::try_from(self.settings.duration.as_secs()).ok(),
            acquire_time: if holds { old.acquire_time.clone() } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(old.lease_transitions.unwrap_or(0) + i32::from(!holds)),
            ..old.clone()
        }
    }

    fn written(&mut self, verb: &'static str, result: kube::Result<Lease>) -> Result<Verdict, ApiError> {
        match result {
            Ok(lease) => {
                self.see(&lease);
                Ok(Verdict::Mine)
            }
            // Somebody was faster; who leads shows in the next attempt.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Verdict::Unsure),
            Err(error) => Err(ApiError::new(verb, RESOURCE, &self.settings.name, error)),
        }
    }

    fn see(&mut self, lease: &Lease) {
        let known = self
            .seen
            .as_ref()
            .is_some_and(|(seen, _)| seen.metadata.resource_version == lease.metadata.resource_version);
        if !known {
            self.seen = Some((lease.clone(), Instant::now()));
        }
    }

    async fn release(mut self) {
        if self.held_until.take().is_none() {
            return;
        }
        let Some((lease, _)) = self.seen.take() else { return };
        let spec = LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..lease.spec.clone().unwrap_or_default()
        };
        let free = Lease { spec: Some(spec), ..lease };
        let params = PostParams::default();
        let released = self.api.replace(&self.settings.name, &params, &free);
        match timeout(self.settings.retry, released).await {
            Ok(Ok(_)) => info!("the lease is released"),
            Ok(Err(error)) => warn!("{}", ApiError::new("update", RESOURCE, &self.settings.name, error)),
            Err(_) => warn!("the API server did not answer in time; the lease runs out by itself"),
        }
    }
}

/// How long the holder of `lease` may go without renewing.
fn term(lease: &Lease, settings: &Settings) -> Duration {
    let said = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    said.and_then(|seconds| u64::try_from(seconds).ok()).map_or(settings.duration, Duration::from_secs)
}

#[cfg(test)]
mod tests;
