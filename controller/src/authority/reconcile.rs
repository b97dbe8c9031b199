//! The reconcile loop of the authority: loads the state from the store, publishes its trust,
//! reports on the proxies of this replica, and takes the next step of a rotation when all replicas
//! agree.
//!
//! Level-triggered: each event causes a complete reconciliation. [`super::state`],
//! [`super::rotation`] and [`crate::replicas::reports`] decide; this module connects them to the
//! store, the clock and the proxies. While the store is unavailable, the loaded state stays in use.

use std::collections::BTreeMap;
use std::mem::{discriminant, replace};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_control_plane::clock::{Clock, Finding};
use diy_mesh_runtime::{Backoff, error_chain};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::publish::PublishStatus;
use super::rotation::{RotationPolicy, Step};
use super::state::{CaState, Phase, fields_digest};
use super::status::StatusSender;
use super::store::{Store, StoreError, Stored, Written};
use super::{Roots, Trust, TrustSender};
use crate::object::Kind;
use crate::proxies::Proxies;
use crate::publish::Hub;
use crate::replicas::exchange::Page;
use crate::replicas::reports::{
    Agreement, BoundedNames, END, Liveness, Observation, Pods, Report, bounded, pod_digest,
};
use crate::unix_time::seconds;

/// Interval of reports during a rotation.
const ROTATION_REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of reports without a rotation.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Proxies that a report counts without a pause.
const MAX_SLICE: usize = 1000;
/// Time until the loaded state is written to an empty store. An operator may replace it in two
/// steps.
const RESTORE_DELAY: Duration = Duration::from_secs(5);
/// Time until a CA is generated for an empty store that had one: replicas that have loaded it
/// notice the loss within a report interval, and restore it first.
const GENERATE_DELAY: Duration = Duration::from_secs(20);
/// Writes by others between a read and a write, until they count as an error.
const MAX_CONFLICTS: usize = 10;
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Reconciles the store, the published trust and the reports.
pub(super) struct Reconciler<S> {
    pub(super) store: Arc<S>,
    pub(super) policy: RotationPolicy,
    /// The name of this replica.
    pub(super) replica: String,
    pub(super) clock: Clock,
    pub(super) hub: Hub,
    pub(super) proxies: Proxies,
    pub(super) published: watch::Receiver<PublishStatus>,
    /// The replica stops within a few seconds.
    pub(super) stopping: CancellationToken,
    /// Receives the trust when the first CA is loaded.
    pub(super) trust: watch::Sender<Option<TrustSender>>,
    pub(super) status: StatusSender,
}

/// The memory between reconciliations.
#[derive(Default)]
struct Memory {
    loaded: Option<Loaded>,
    /// The version of the store that is loaded.
    version: Option<String>,
    empty_since: Option<Instant>,
    others: Others,
    agreement: Agreement,
    /// The latest one in the reports of this replica.
    beat: u64,
    /// The pods below this digest are accounted for in the current state.
    confirmed: u64,
    /// The digest from which on the next report names pods.
    from: u64,
    next_report: Option<Instant>,
}

impl Memory {
    fn is_report_due(&self) -> bool {
        self.next_report.is_none_or(|next| next <= Instant::now())
    }
}

/// The other replicas.
#[derive(Default)]
struct Others {
    liveness: Liveness,
    /// The reports of live replicas, if they were read since the own report was written.
    live: Option<BTreeMap<String, Report>>,
    /// The latest comparison of the clocks.
    finding: Finding,
}

/// The loaded state.
struct Loaded {
    state: CaState,
    /// A digest of the state, equal on all replicas that use it.
    digest: String,
    trust: TrustSender,
}

/// The result of a reconciliation.
enum Outcome {
    Done,
    /// The store has changed. Reconcile again.
    Requeue,
    /// The store is empty and is filled later.
    Empty(String),
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{}", error_chain(.0))]
    Store(#[from] StoreError),
    #[error("{0}")]
    Other(String),
}

impl<S: Store> Reconciler<S> {
    /// Runs until it is dropped.
    pub(super) async fn run(mut self) {
        let store = self.store.clone();
        let mut changes = pin!(store.changes());
        let mut memory = Memory::default();
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        let mut conflicts = 0;
        let mut is_stopping = false;
        loop {
            let wake = match self.reconcile(&mut memory).await {
                Ok(Outcome::Requeue) if conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    continue;
                }
                Ok(Outcome::Done) => {
                    backoff.reset();
                    self.status.problem(self.clock.error());
                    memory.next_report
                }
                Ok(Outcome::Empty(problem)) => {
                    backoff.reset();
                    self.status.problem(Some(problem));
                    memory.next_report
                }
                result => {
                    let place = self.store.place();
                    let problem = match result {
                        Err(error) => error.to_string(),
                        Ok(_) => format!("{place} changed {MAX_CONFLICTS} times before a write"),
                    };
                    self.status.problem(Some(problem));
                    // Statuses and keys of tokens do not depend on the store of the CA. An error is
                    // the next one of the reconciliation.
                    if memory.is_report_due() {
                        let _ = self.exchange_reports(&mut memory).await;
                    }
                    Some(Instant::now() + backoff.next_delay())
                }
            };
            conflicts = 0;
            tokio::select! {
                Some(()) = changes.next() => {}
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
                () = self.stopping.cancelled(), if !is_stopping => {
                    (is_stopping, memory.next_report) = (true, None);
                }
            }
        }
    }

    async fn reconcile(&mut self, memory: &mut Memory) -> Result<Outcome, Error> {
        if memory.is_report_due() {
            self.read_others(&mut memory.others).await?;
        }
        let stored = match self.store.read().await? {
            Some(stored) if !stored.is_empty() => stored,
            empty => return self.fill_empty_store(memory, empty.as_ref()).await,
        };
        memory.empty_since = None;
        if memory.version.as_ref() != Some(&stored.version) {
            if let Outcome::Requeue = self.load(memory, &stored).await? {
                return Ok(Outcome::Requeue);
            }
            memory.version = Some(stored.version.clone());
        }
        let Some(loaded) = &memory.loaded else {
            return Ok(Outcome::Done);
        };
        if let Some(request) = &stored.request {
            let now = self.clock.verdict().ca_time;
            let next = self.policy.request(&loaded.state, request, now);
            let next = next.map_err(other)?;
            let note = format!("rotation: {}", next.rotation.answer);
            return self.write(next, Some(loaded), Some(&stored), &note).await;
        }
        if memory.is_report_due() {
            self.report_and_advance(memory, &stored).await
        } else {
            Ok(Outcome::Done)
        }
    }

    /// Restores the loaded CA, or generates one. Both wait, unless the store never had a CA.
    async fn fill_empty_store(
        &self,
        memory: &mut Memory,
        empty: Option<&Stored>,
    ) -> Result<Outcome, Error> {
        let (place, loaded) = (self.store.place(), memory.loaded.as_ref());
        let traces = match loaded {
            Some(_) => Vec::new(),
            None => self.store.traces().await?,
        };
        let delay = match loaded {
            Some(_) => RESTORE_DELAY,
            None if traces.is_empty() => Duration::ZERO,
            None => GENERATE_DELAY,
        };
        let since = *memory.empty_since.get_or_insert_with(Instant::now);
        let traces = bounded(traces);
        let (names, count) = (traces.names.join(", "), traces.count);
        if since.elapsed() < delay {
            memory.next_report = Some(since + delay);
            let seconds = delay.as_secs();
            return Ok(Outcome::Empty(match loaded {
                Some(_) => {
                    format!("{place} contains no CA; it is restored after {seconds} s")
                }
                None => format!(
                    "{place} contains no CA, but the mesh had one ({count} traces: {names}); a new one is generated after {seconds} s, \
                     unless a replica or an operator restores it"
                ),
            }));
        }
        let (state, note) = match loaded {
            Some(loaded) => (loaded.state.clone(), "restoring the loaded CA"),
            None => {
                let policy = &self.policy;
                let now = self.clock.verdict().ca_time;
                let generated = CaState::generate(&policy.trust_domain, now, policy.ca_life);
                let mut state = generated.map_err(other)?;
                if count > 0 {
                    state.rotation.reason = format!(
                        "the CA was lost and a new one generated: {place} contained none, but the mesh had one ({count} traces: {names})"
                    );
                }
                (state, "generating a CA")
            }
        };
        let note = format!("{place} is empty, {note}");
        self.write(state, loaded, empty, &note).await
    }

    /// Loads a stored state and publishes its trust.
    async fn load(&mut self, memory: &mut Memory, stored: &Stored) -> Result<Outcome, Error> {
        let (time, place) = (self.clock.verdict(), self.store.place());
        let unusable = |reason| Error::Other(format!("cannot use the CA in {place}: {reason}"));
        let state = CaState::read(&stored.fields, time.now);
        let state = state.map_err(|error| unusable(error.to_string()))?;
        if let Some(loaded) = &memory.loaded
            && let Some(next) = self.policy.adopt(&loaded.state, &state, time.ca_time)
        {
            let note = next.rotation.reason.clone();
            return self.write(next, Some(loaded), Some(stored), &note).await;
        }
        let before = memory.loaded.as_ref().map(|loaded| &loaded.state);
        let trust = self.trust(&state, before).map_err(unusable)?;
        let digest = fields_digest(&state.write());
        match &mut memory.loaded {
            Some(loaded) if loaded.digest == digest => return Ok(Outcome::Done),
            Some(loaded) => {
                let (version, count) = (&trust.roots.version, trust.roots.certificates.len());
                if loaded.trust.borrow().roots.version != *version {
                    tracing::info!(version, "the number of trust roots is now {count}");
                }
                self.status.load(&state);
                loaded.trust.send_replace(Arc::new(trust));
                (loaded.state, loaded.digest) = (state, digest);
                (memory.confirmed, memory.from) = (0, 0);
                memory.next_report = None;
            }
            None => {
                let phase = state.rotation.phase.name();
                let (issuer, version) =
                    (&state.signer().certificate().subject, &trust.roots.version);
                tracing::info!(issuer, version, phase, "loaded the CA in {place}");
                self.status.load(&state);
                let trust = TrustSender::new(Arc::new(trust));
                self.trust.send_replace(Some(trust.clone()));
                memory.loaded = Some(Loaded {
                    state,
                    digest,
                    trust,
                });
            }
        }
        Ok(Outcome::Done)
    }

    /// The trust of a state. An unchanged issuer stays in use after its expiry.
    fn trust(&self, state: &CaState, before: Option<&CaState>) -> Result<Trust, String> {
        let before = before.map(CaState::signer);
        let signer = before.filter(|before| *before == state.signer());
        let issuer = signer.unwrap_or(state.signer()).issuer();
        let issuer = issuer.ok_or("the signing CA has expired, or its key is missing")?;
        let roots = state.roots().into_iter().map(|root| root.der.clone());
        Ok(Trust {
            issuer: issuer.clone(),
            roots: Arc::new(Roots::new(roots)),
            renew_within: if state.rotation.forced {
                Duration::ZERO
            } else {
                self.policy.renew_within()
            },
        })
    }

    /// Exchanges reports, and takes the next step if all replicas agree.
    async fn report_and_advance(
        &mut self,
        memory: &mut Memory,
        stored: &Stored,
    ) -> Result<Outcome, Error> {
        let reports = self.exchange_reports(memory).await?;
        let Some(loaded) = &memory.loaded else {
            return Ok(Outcome::Done);
        };
        let is_steady = loaded.state.rotation.phase == Phase::Steady;
        let time = self.clock.verdict();
        let observed = Observation {
            state: loaded.digest.clone(),
            reports,
            confirmed: memory.confirmed,
            pods: if is_steady || memory.confirmed == END {
                BTreeMap::new()
            } else {
                self.ready_pods(memory.confirmed)
            },
        };
        memory.confirmed = observed.next_confirmed();
        memory.from = observed.next_from();
        let step = self.policy.next(&loaded.state, &observed, &time);
        let (waiting, next) = match step.map_err(other)? {
            Step::Wait(waiting) => (waiting, None),
            Step::Write(next) => (Vec::new(), Some(next)),
        };
        let agree = next.is_some() && self.hub.is_listed(Kind::Pod);
        let is_stable = memory.agreement.is_stable(agree, &observed);
        self.status
            .remind(loaded.state.signer(), &waiting, time.ca_time);
        self.status.update(&loaded.state, waiting, observed.reports);
        // A replica that has just started does not know the clocks of others.
        let is_certain = is_steady && !time.is_disputed();
        match next {
            Some(next) if is_stable || is_certain => {
                let (phase, reason) = (next.rotation.phase.name(), &next.rotation.reason);
                let note = format!("rotation: entering the phase {phase}: {reason}");
                self.write(*next, Some(loaded), Some(stored), &note).await
            }
            _ => Ok(Outcome::Done),
        }
    }

    /// Reads the reports of other replicas, removes reports of dead ones, and compares the clocks.
    async fn read_others(&self, others: &mut Others) -> Result<(), Error> {
        let reports = self.store.reports().await?.into_iter();
        let reports = reports.filter(|(name, _)| *name != self.replica);
        // An invalid one is too old.
        let reports = reports.map(|(name, text)| {
            let report = serde_json::from_str(&text);
            (name, report.unwrap_or_default())
        });
        let liveness = &mut others.liveness;
        let (live, dead) = liveness.update(reports.collect(), Instant::now());
        for name in dead {
            tracing::info!("replica {name} has stopped, removing its report");
            self.store.report(&name, None).await?;
        }
        let date = self.store.date().await;
        self.clock.compare(date, others.liveness.clocks());
        let finding = self.clock.verdict().finding;
        let before = replace(&mut others.finding, finding);
        match finding {
            _ if discriminant(&before) == discriminant(&finding) => {}
            Finding::Agreement => tracing::info!("{finding}"),
            _ => tracing::warn!("{finding}"),
        }
        others.live = Some(live);
        Ok(())
    }

    /// Writes the report of this replica, receives the others, and returns all live ones.
    async fn exchange_reports(
        &self,
        memory: &mut Memory,
    ) -> Result<BTreeMap<String, Report>, Error> {
        let Some(loaded) = &memory.loaded else {
            return Ok(BTreeMap::new());
        };
        let interval = match loaded.state.rotation.phase {
            Phase::Steady => REPORT_INTERVAL,
            _ => ROTATION_REPORT_INTERVAL,
        };
        memory.next_report = Some(Instant::now() + interval);
        let own = seconds(self.clock.own());
        memory.beat = own + u64::from(own == memory.beat);
        let report = Report {
            beat: memory.beat,
            confirmed: memory.confirmed,
            ..self.report(loaded, memory.from).await
        };
        let others = &mut memory.others;
        if others.live.is_none() {
            self.read_others(others).await?;
        }
        let mut live = others.live.take().unwrap_or_default();
        let urls = live.values().flat_map(|report| &report.unknown_keys);
        self.hub.receive_unknown_keys(urls.cloned());
        let page = |report: &Report| Page::deserialize(&report.programmed).unwrap_or_default();
        // The proxies of a replica that has stopped are connected to others.
        let running = live
            .iter()
            .filter(|(name, _)| others.liveness.is_certain(name));
        let pages = running.map(|(name, report)| (name.clone(), page(report)));
        self.hub.receive_pages(pages.collect());
        let text = serde_json::to_string(&report).expect("numbers and texts are valid JSON");
        self.store.report(&self.replica, Some(&text)).await?;
        live.insert(self.replica.clone(), report);
        Ok(live)
    }

    /// The report of this replica, with connected pods from a digest on.
    async fn report(&self, loaded: &Loaded, from: u64) -> Report {
        let trust = loaded.trust.borrow().clone();
        let phase = loaded.state.rotation.phase;
        let mut report = Report {
            state: loaded.digest.clone(),
            roots: trust.roots.version.clone(),
            issuer: trust.issuer.id().to_owned(),
            namespaces: self.unpublished(&trust.roots.version),
            // The proxies of a replica that stops connect to others, which count them.
            programmed: if self.stopping.is_cancelled() {
                Value::Null
            } else {
                json!(self.hub.page())
            },
            unknown_keys: self.hub.unknown_keys(Instant::now()),
            ..Report::default()
        };
        // An incomplete catalog excludes nothing.
        let is_complete = self.hub.is_listed(Kind::Pod);
        let (mut pods, mut last) = (Vec::new(), 0);
        loop {
            let mut proxies = self.proxies.page(last, MAX_SLICE, |_| true);
            let Some((number, _)) = proxies.last() else {
                break;
            };
            last = *number;
            report.connected += proxies.len() as u64;
            self.hub.read(|index| {
                proxies.retain(|(_, proxy)| !is_complete || proxy.is_meshed(index));
            });
            for (_, proxy) in proxies {
                let trusts = proxy.roots_version() == report.roots;
                let has_renewed = proxy.certificate_issuer() == report.issuer;
                if !trusts {
                    report.not_acknowledged.add(&proxy);
                }
                if !has_renewed {
                    report.not_renewed.add(&proxy);
                }
                let is_done = match phase {
                    Phase::Switched => has_renewed,
                    _ => trusts,
                };
                let pod = proxy.pod.filter(|_| phase != Phase::Steady);
                let digest = pod.map(|pod| pod_digest(&pod.namespace, &pod.name, &pod.uid));
                pods.extend(digest.map(|digest| (digest, is_done)));
            }
            yield_now().await;
        }
        if phase != Phase::Steady {
            report.pods = Pods::new(from, pods);
        }
        report
    }

    /// The namespaces without the current roots.
    fn unpublished(&self, roots: &str) -> BoundedNames {
        let published = self.published.borrow();
        if published.version == *roots {
            let namespaces = published.waiting.keys();
            bounded(namespaces.map(|name| format!("namespace {name}")))
        } else {
            bounded([format!("the namespaces of replica {}", self.replica)])
        }
    }

    /// The names of ready meshed pods by digest, from one on.
    fn ready_pods(&self, from: u64) -> BTreeMap<u64, String> {
        let pods = self.hub.ready_meshed_pods().into_iter();
        let pods = pods.map(|(key, uid)| (pod_digest(&key.namespace, &key.name, &uid), key));
        let pods = pods.filter(|(digest, _)| *digest >= from);
        pods.map(|(digest, key)| (digest, key.to_string()))
            .collect()
    }

    /// Writes a state and logs a note about it, unless the clock of this replica is wrong.
    async fn write(
        &self,
        mut state: CaState,
        loaded: Option<&Loaded>,
        before: Option<&Stored>,
        note: &str,
    ) -> Result<Outcome, Error> {
        if let Some(error) = self.clock.error() {
            return Err(Error::Other(error));
        }
        tracing::info!("{note}");
        let known = loaded.map_or(0, |loaded| loaded.state.rotation.generation);
        state.rotation.generation = known.max(state.rotation.generation) + 1;
        if let Written::Conflict = self.store.write(&state.write(), before).await? {
            tracing::info!("another replica has written {}", self.store.place());
        }
        Ok(Outcome::Requeue)
    }
}

fn other(error: impl std::fmt::Display) -> Error {
    Error::Other(error.to_string())
}

#[cfg(test)]
mod tests;
