//! The authority's one task: reads the store, puts the trust that lies there in force, tells the
//! other replicas how far its proxies are, and takes the next step of a rotation when all agree.
//!
//! Level-triggered: whatever wakes it, it reads what is there and acts by that. Every decision is
//! made elsewhere ([`super::material`], [`super::rotation`], [`super::reports`]); here they meet
//! the store, the clock and the proxies. With the store away, what was read stays in force.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use diy_mesh_runtime::{Backoff, error_chain};
use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::material::Material;
use super::publish::Published;
use super::reports::{
    Agreement, Connected, ConnectedProxies, Evidence, Liveness, Report, few, pod_digest,
};
use super::rotation::{Phase, Progress, Request, Rules, Step};
use super::status::{self, StatusSender};
use super::store::{Store, Stored, Written};
use super::{Roots, Trust, TrustSender};
use crate::hub::Hub;
use crate::issuer::hex;

/// How often a replica reports, and judges the reports, while a rotation is under way,
const ROTATION_REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// and otherwise.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// A store that was emptied is filled again from memory after this time: whoever replaces what is
/// in it may do that in two steps.
const REFILL_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the store may have changed between reading and writing before that counts as an error.
const MAX_ATTEMPTS: usize = 10;
/// How often the store is asked again after an error, at first and at last.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The state that is in force.
struct InForce {
    material: Material,
    /// A digest of it: the same on each replica that acts by it.
    state: String,
    trust: TrustSender,
}

/// Keeps the authority.
pub(super) struct Keeper<S> {
    pub(super) store: Arc<S>,
    pub(super) rules: Rules,
    /// This replica's name.
    pub(super) name: String,
    pub(super) hub: Hub,
    pub(super) proxies: ConnectedProxies,
    pub(super) published: watch::Receiver<Published>,
    /// Gets the authority once there is one.
    pub(super) first: watch::Sender<Option<TrustSender>>,
    pub(super) status: StatusSender,
}

/// What is known from round to round.
#[derive(Default)]
struct State {
    in_force: Option<InForce>,
    /// The version of the store that was read and is in force.
    version: Option<String>,
    empty_since: Option<Instant>,
    liveness: Liveness,
    agreement: Agreement,
    beat: u64,
    next_beat: Option<Instant>,
}

/// What a round has come to.
enum Round {
    Done,
    /// Somebody has written, maybe we: read again.
    Again,
}

impl<S: Store> Keeper<S> {
    /// Runs until the process ends.
    pub(super) async fn run(mut self) {
        let store = self.store.clone();
        let mut changes = pin!(store.changes());
        let mut state = State {
            beat: seconds_since_1970(),
            ..State::default()
        };
        let (mut backoff, mut again) = (Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL), 0);
        loop {
            let done = match self.round(&mut state).await {
                Ok(Round::Again) if again >= MAX_ATTEMPTS => Err(format!(
                    "{} is written by somebody all the time",
                    self.store.place()
                )),
                done => done,
            };
            let wake = match done {
                Ok(Round::Again) => {
                    again += 1;
                    continue;
                }
                Ok(Round::Done) => {
                    backoff.reset();
                    again = 0;
                    self.status.no_problem();
                    state.next_beat
                }
                Err(problem) => {
                    self.status.problem(problem);
                    again = 0;
                    Some(Instant::now() + backoff.next_delay())
                }
            };
            tokio::select! {
                Some(()) = changes.next() => {}
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
    }

    async fn round(&mut self, state: &mut State) -> Result<Round, String> {
        let stored = self
            .store
            .read()
            .await
            .map_err(|error| error_chain(&error))?;
        let Some(stored) = stored else {
            return self.fill(state).await;
        };
        state.empty_since = None;
        if state.version.as_ref() != Some(&stored.version) {
            if let Round::Again = self.take_in(state, &stored).await? {
                return Ok(Round::Again);
            }
            state.version = Some(stored.version.clone());
        }
        let Some(in_force) = &state.in_force else {
            return Ok(Round::Done);
        };
        if let Some(request) = &stored.request {
            return self.grant(in_force, request, &stored).await;
        }
        if state.next_beat.is_none_or(|next| next <= Instant::now()) {
            return self.beat(state, &stored).await;
        }
        Ok(Round::Done)
    }

    /// There is nothing: makes a CA, or puts back what was there.
    async fn fill(&self, state: &mut State) -> Result<Round, String> {
        let material = match &state.in_force {
            Some(in_force) => {
                let since = *state.empty_since.get_or_insert_with(Instant::now);
                if since.elapsed() < REFILL_TIMEOUT {
                    state.next_beat = Some(since + REFILL_TIMEOUT);
                    return Ok(Round::Done);
                }
                tracing::warn!(
                    "{} is empty: it is filled again with the CA that is in force",
                    self.store.place()
                );
                in_force.material.clone()
            }
            None => {
                tracing::info!("{} holds no CA: one is made", self.store.place());
                Material::make(
                    &self.rules.trust_domain,
                    SystemTime::now(),
                    self.rules.ca_life,
                )
                .map_err(|error| error.to_string())?
            }
        };
        self.write(material, state.in_force.as_ref(), None).await
    }

    /// Takes in what was read and puts it in force, or says why not.
    async fn take_in(&mut self, state: &mut State, stored: &Stored) -> Result<Round, String> {
        let now = SystemTime::now();
        let unusable = |error: &dyn std::fmt::Display| {
            format!("the CA in {} cannot be used: {error}", self.store.place())
        };
        let material = Material::read(&stored.fields, now).map_err(|error| unusable(&error))?;
        if let Some(in_force) = &state.in_force
            && let Some((material, why)) = self.rules.by_hand(&in_force.material, &material, now)
        {
            tracing::warn!("{why}");
            return self.write(material, Some(in_force), Some(stored)).await;
        }
        let trust = self
            .trust(&material, state.in_force.as_ref())
            .map_err(|error| unusable(&error))?;
        let digest = state_of(&material);
        match &mut state.in_force {
            Some(in_force) if in_force.state == digest => {}
            Some(in_force) => {
                if in_force.trust.borrow().roots.version != trust.roots.version {
                    tracing::info!(
                        version = trust.roots.version,
                        "there are {} trust roots now",
                        trust.roots.certificates.len()
                    );
                }
                in_force.trust.send_replace(Arc::new(trust));
                self.status.follow(status::of(
                    &material,
                    &self.store.place(),
                    &self.name,
                    Vec::new(),
                    BTreeMap::new(),
                ));
                (in_force.material, in_force.state) = (material, digest);
                state.next_beat = None;
            }
            None => {
                let (issuer, version) = (material.signer().issuer(), &trust.roots.version);
                tracing::info!(
                    issuer = issuer.subject,
                    version,
                    phase = material.progress.phase.name(),
                    "the CA in {} is in use",
                    self.store.place()
                );
                let trust = TrustSender::new(Arc::new(trust));
                self.status.follow(status::of(
                    &material,
                    &self.store.place(),
                    &self.name,
                    Vec::new(),
                    BTreeMap::new(),
                ));
                self.first.send_replace(Some(trust.clone()));
                state.in_force = Some(InForce {
                    material,
                    state: digest,
                    trust,
                });
            }
        }
        Ok(Round::Done)
    }

    /// The trust that a state means. An issuer that goes on signing stays the one that it is.
    fn trust(&self, material: &Material, before: Option<&InForce>) -> Result<Trust, String> {
        let same = before
            .map(|before| before.material.signer())
            .filter(|signer| *signer == material.signer());
        let signs = same
            .unwrap_or(material.signer())
            .signs()
            .ok_or("the CA that signs has ended, or its key is not there")?;
        let roots = Roots::new(material.roots().into_iter().map(|root| root.der.clone()));
        Ok(Trust {
            issuer: signs.clone(),
            roots: Arc::new(roots),
            renew_within: self.rules.renew_within(),
        })
    }

    async fn grant(
        &self,
        in_force: &InForce,
        request: &str,
        stored: &Stored,
    ) -> Result<Round, String> {
        let (material, now) = (&in_force.material, SystemTime::now());
        let (next, answer) = match Request::read(request) {
            Ok(request) => self
                .rules
                .request(material, request, now)
                .map_err(|error| error.to_string())?,
            Err(reason) => {
                let answer = format!("refused: {reason}");
                let progress = Progress {
                    answer: answer.clone(),
                    ..material.progress.clone()
                };
                (
                    Material {
                        progress,
                        ..material.clone()
                    },
                    answer,
                )
            }
        };
        tracing::info!(request = request.trim(), "rotation: {answer}");
        self.write(next, Some(in_force), Some(stored)).await
    }

    /// Reports, judges all reports, and takes the next step where all agree.
    async fn beat(&mut self, state: &mut State, stored: &Stored) -> Result<Round, String> {
        let Some(in_force) = &state.in_force else {
            return Ok(Round::Done);
        };
        let phase = in_force.material.progress.phase;
        state.next_beat = Some(
            Instant::now()
                + if phase == Phase::Steady {
                    REPORT_INTERVAL
                } else {
                    ROTATION_REPORT_INTERVAL
                },
        );
        state.beat += 1;
        let connected = (self.proxies)();
        let report = self.report(in_force, state.beat, &connected);
        let text = serde_json::to_string(&report).expect("numbers and texts are JSON");
        self.store
            .report(&self.name, Some(&text))
            .await
            .map_err(|error| error_chain(&error))?;
        let others = self
            .store
            .reports()
            .await
            .map_err(|error| error_chain(&error))?;
        let mut reports: BTreeMap<String, Report> = others
            .into_iter()
            .filter_map(|(name, text)| Some((name, serde_json::from_str(&text).ok()?)))
            .collect();
        reports.insert(self.name.clone(), report);
        let (live, gone) = state.liveness.update(reports, Instant::now());
        for name in gone {
            tracing::info!("replica {name} has gone: its report is removed");
            self.store
                .report(&name, None)
                .await
                .map_err(|error| error_chain(&error))?;
        }
        let evidence = Evidence {
            state: in_force.state.clone(),
            reports: live,
            pods: self.pods(),
        };
        let step = self
            .rules
            .next(&in_force.material, &evidence, SystemTime::now())
            .map_err(|error| error.to_string())?;
        let (waiting, write) = match step {
            Step::Stay(waiting) => (waiting, None),
            Step::Write(material, why) => (Vec::new(), Some((material, why))),
        };
        let synced = self.hub.missing().is_empty();
        let agreed = state.agreement.holds(write.is_some() && synced, &evidence);
        self.status
            .remind(in_force.material.signer(), &waiting, SystemTime::now());
        self.status.update(status::of(
            &in_force.material,
            &self.store.place(),
            &self.name,
            waiting,
            evidence.reports,
        ));
        match write {
            Some((material, why)) if agreed || phase == Phase::Steady => {
                tracing::info!("rotation: {why}");
                self.write(*material, Some(in_force), Some(stored)).await
            }
            _ => Ok(Round::Done),
        }
    }

    fn report(&self, in_force: &InForce, beat: u64, connected: &[Connected]) -> Report {
        let trust = in_force.trust.borrow().clone();
        let mut acknowledged = BTreeMap::new();
        for proxy in connected {
            *acknowledged.entry(proxy.roots_version.clone()).or_default() += 1;
        }
        let published = self.published.borrow();
        let namespaces = if published.version == trust.roots.version {
            few(published
                .waiting
                .keys()
                .map(|name| format!("namespace {name}")))
        } else {
            few([format!("replica {}'s namespaces", self.name)])
        };
        let pods = connected.iter().filter_map(|proxy| proxy.pod.as_ref());
        let in_rotation = in_force.material.progress.phase != Phase::Steady;
        Report {
            beat,
            state: in_force.state.clone(),
            roots: trust.roots.version.clone(),
            issuer: trust.issuer.id().to_owned(),
            connected: connected.len() as u64,
            acknowledged,
            not_acknowledged: Connected::few(connected, |proxy| {
                proxy.roots_version != trust.roots.version
            }),
            not_renewed: Connected::few(connected, |proxy| proxy.issuer != trust.issuer.id()),
            namespaces,
            pods: pods
                .filter(|_| in_rotation)
                .map(|(namespace, name, uid)| pod_digest(namespace, name, uid))
                .collect(),
        }
    }

    /// The ready meshed pods, by digest.
    fn pods(&self) -> BTreeMap<String, String> {
        let pods = self.hub.ready_meshed_pods().into_iter();
        pods.map(|(key, uid)| (pod_digest(&key.namespace, &key.name, &uid), key.to_string()))
            .collect()
    }

    async fn write(
        &self,
        mut material: Material,
        in_force: Option<&InForce>,
        before: Option<&Stored>,
    ) -> Result<Round, String> {
        let known = in_force.map_or(0, |in_force| in_force.material.progress.generation);
        material.progress.generation = known.max(material.progress.generation) + 1;
        match self
            .store
            .write(&material.write(), before)
            .await
            .map_err(|error| error_chain(&error))?
        {
            Written::Done => {}
            Written::Raced => tracing::info!(
                "another replica has written {}: reading it",
                self.store.place()
            ),
        }
        Ok(Round::Again)
    }
}

fn state_of(material: &Material) -> String {
    let mut text = Vec::new();
    for (name, value) in material.write() {
        text.extend_from_slice(&(name.len() as u64).to_be_bytes());
        text.extend_from_slice(name.as_bytes());
        text.extend_from_slice(&(value.len() as u64).to_be_bytes());
        text.extend_from_slice(&value);
    }
    hex(&digest(&SHA256, &text).as_ref()[..8])
}

fn seconds_since_1970() -> u64 {
    super::rotation::seconds(SystemTime::now())
}
