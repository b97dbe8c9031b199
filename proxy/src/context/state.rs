//! The state in force of the proxy, for the admin server (`/state`): discovery is asked, then each
//! worker about its own backends. Read-only and bounded, and without secrets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_model::state::{Certificate, Cut, Destination, State, Worker as WorkerState};
use http::StatusCode;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout_at;

use crate::context::worker::Worker;
use crate::discovery::{Discovery, Known};
use crate::observe::dump::rfc3339;
use crate::observe::exceptions::{Exception, Exceptions, Kind};
use crate::observe::metrics::IdentityMetrics;
use crate::secure::identity::{Credentials, CurrentCredentials};
use crate::upstream::balance::Backend;

/// The time for all answers.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The bytes of the destinations of all workers. With all else, the page has less than 1 MiB.
const MAX_BYTES: usize = 512 << 10;

/// Those who know the state.
pub struct States {
    /// Namespace and name.
    pub pod: String,
    /// The certificate.
    pub credentials: CurrentCredentials,
    /// Its renewal.
    pub identity: IdentityMetrics,
    /// The stream.
    pub discovery: Discovery,
    /// The questions of each worker.
    pub workers: Vec<mpsc::Sender<Question>>,
    /// The recent failures.
    pub exceptions: Arc<Exceptions>,
    /// One state is made at a time.
    pub turn: Mutex<()>,
}

/// A question of the admin server to a worker.
pub struct Question {
    /// The name of the only destination that is asked for.
    destination: Option<Arc<str>>,
    known: Arc<Known>,
    max_bytes: usize,
    answer: oneshot::Sender<WorkerState>,
}

impl States {
    /// The state that the query of a URL asks for, in JSON: `destination=NAME`; all, if it is empty.
    pub async fn json(&self, query: &str) -> Result<String, (StatusCode, String)> {
        let destination = match query.split_once('=') {
            None if query.is_empty() => None,
            Some(("destination", name)) => Some(name.into()),
            _ => return Err((StatusCode::BAD_REQUEST, "expected ?destination=NAME".into())),
        };
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        let turn = timeout_at(deadline, self.turn.lock()).await;
        let busy = |_| (StatusCode::SERVICE_UNAVAILABLE, "too many clients".into());
        let _turn = turn.map_err(busy)?;
        let credentials = self.credentials.borrow().clone();
        let known = timeout_at(deadline, self.discovery.known()).await;
        let known = known.ok().flatten().map(Arc::new);
        let asked = self.ask(destination, known.clone().unwrap_or_default());
        let mut workers = Vec::new();
        for answered in asked {
            workers.extend(timeout_at(deadline, answered).await.into_iter().flatten());
        }
        let state = State {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pod: self.pod.clone(),
            certificate: credentials.as_deref().map(certificate),
            certificate_failure: self.identity.failure(),
            discovery: known.as_ref().map(|known| known.stream.clone()),
            inbound: known.as_ref().map(|known| known.inbound.clone()),
            failed_probes: failed_probes(&self.exceptions, Instant::now()),
            silent_workers: self.workers.len() - workers.len(),
            workers,
        };
        Ok(serde_json::to_string(&state).expect("all keys are strings"))
    }

    /// Asks each worker. Those that have not answered the previous question do not answer this one.
    fn ask(
        &self,
        destination: Option<Arc<str>>,
        known: Arc<Known>,
    ) -> Vec<oneshot::Receiver<WorkerState>> {
        let ask = |worker: &mpsc::Sender<Question>| {
            let (answer, answered) = oneshot::channel();
            let _ = worker.try_send(Question {
                destination: destination.clone(),
                known: known.clone(),
                max_bytes: MAX_BYTES / self.workers.len(),
                answer,
            });
            answered
        };
        self.workers.iter().map(ask).collect()
    }
}

/// The failed probes of the last minute, as many as are kept.
fn failed_probes(exceptions: &Exceptions, now: Instant) -> Vec<String> {
    let mut failed = exceptions.report(now);
    failed.retain(|one| one.kind == Kind::Probe);
    let text = |one: Exception| {
        let (probe, reason) = (one.destination, one.reason);
        format!("{} of {} failed, {probe}: {reason}", one.count, one.total)
    };
    failed.into_iter().map(text).collect()
}

fn certificate(credentials: &Credentials) -> Certificate {
    Certificate {
        identity: credentials.identity.to_string(),
        not_after: rfc3339(credentials.not_after),
        trust_roots: credentials.roots.len(),
        roots_version: credentials.roots_version.clone(),
    }
}

impl Question {
    /// Tells the state of the worker.
    pub fn answer(self, worker: &Worker) {
        let state = self.state(worker);
        // The client may have left.
        let _ = self.answer.send(state);
    }

    fn state(&self, worker: &Worker) -> WorkerState {
        let (apps, destinations) = (worker.apps.backends(), worker.destinations.backends());
        let inbound = apps.into_iter().map(|app| (true, app));
        let outbound = destinations.into_iter().map(|backend| (false, backend));
        let mut backends: Vec<_> = inbound.chain(outbound).collect();
        backends.retain(|(_, backend)| self.is_about(backend));
        let now = Instant::now();
        WorkerState {
            connections: worker.admission.used(&[]),
            max_connections: worker.max_connections(),
            bytes: worker.admission.used_bytes(&[]),
            max_bytes: worker.admission.max_bytes(),
            destinations: Cut::of(
                backends.iter(),
                &mut { self.max_bytes },
                |(inbound, backend), max_bytes| Destination {
                    inbound: *inbound,
                    ..self.destination(backend, max_bytes, now)
                },
            ),
        }
    }

    fn destination(&self, backend: &Backend, max_bytes: usize, now: Instant) -> Destination {
        let version = self.known.versions.get(backend.resource());
        let (version, position) = version.cloned().unwrap_or_default();
        Destination {
            version,
            position,
            ..backend.state(max_bytes, now)
        }
    }

    /// Whether the backend is asked for, by the name of its Service or pod, or of the resource.
    fn is_about(&self, backend: &Backend) -> bool {
        let names = || [backend.name(), backend.resource().to_string().into()];
        let wanted = self.destination.as_ref();
        wanted.is_none_or(|wanted| names().contains(wanted))
    }
}

#[cfg(test)]
mod tests;
