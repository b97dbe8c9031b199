//! Acknowledgements of proxies, and the reviews that tell from them which proxies apply which routes
//! and policies.
//!
//! An acknowledgement is recorded with the subscription that it is about: work of constant size. A
//! review reads all of them every 10 seconds, in slices of a few milliseconds under a lock, and takes
//! a twentieth of the time at most.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::Arc;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use super::{Hub, Lacking, Resources};
use crate::index::Resource;
use crate::index::authorization::Covering;
use crate::index::outcome::{Coverage, Outcome, Progress, Subject};
use crate::index::state::{State, TargetKind};
use crate::kinds::policy::{Side, Target};
use crate::kinds::route::attach::Table;
use crate::kinds::smi::traffic_target;
use crate::object::version::Version;
use crate::object::{Key, Kind, PodRef};
use crate::status::programmed::REVIEW_INTERVAL;

/// The time between two reviews is this multiple of the time that a review takes, at least.
const PAUSE: u32 = 20;
/// Pods that are looked up under a lock.
const MAX_PODS: usize = 128;

/// The rejection of a state.
#[derive(Clone, Debug)]
pub struct Rejection {
    /// Why.
    pub reason: Arc<str>,
    /// The rejected part of the state. `None`: all of the state.
    pub part: Option<Side>,
}

/// The acknowledgement of a proxy: the digest of a state without its endpoints, and the rejection.
pub(super) type Acknowledged = (Version, Option<Box<Rejection>>);

impl Resources {
    /// Records what the client, the proxy of an earlier release, does not apply.
    pub fn set_lacking(&mut self, lacking: Lacking) {
        self.hub.subscribers().set_lacking(self.id, lacking);
    }

    /// Records that the client applies the state of a resource with this digest, or rejects it.
    pub fn acknowledge(&self, resource: &Resource, rest: Version, rejection: Option<Rejection>) {
        let mut subscribers = self.hub.subscribers();
        if let Some(subscriber) = subscribers.subscriber(self.id, resource) {
            subscriber.acknowledged = Some((rest, rejection.map(Box::new)));
        }
    }
}

/// The outcome of the current state, with this digest, at a proxy: of one part, or of the
/// authorization.
fn outcome_of(
    acknowledged: Option<&Acknowledged>,
    side: Option<Side>,
    current: Version,
    is_incapable: bool,
) -> Outcome {
    match acknowledged {
        _ if is_incapable => Outcome::Incapable,
        Some((rest, rejection)) if *rest == current => {
            let rejection = rejection.as_deref();
            let rejection = rejection.filter(|one| one.part.is_none_or(|part| Some(part) == side));
            rejection.map_or(Outcome::Applied, |one| {
                Outcome::Rejected(one.reason.to_string())
            })
        }
        _ => Outcome::Waiting,
    }
}

/// The findings of a review.
#[derive(Default)]
pub(super) struct Review {
    /// The pods with connected proxies, in order.
    pods: Vec<Key>,
    /// The positions of their pods, and what they lack, by the number of the client.
    proxies: HashMap<u64, (usize, Lacking)>,
    parts: HashMap<PartId, Part>,
}

#[derive(PartialEq, Eq, Hash)]
enum PartId {
    /// A part of a Service: who applies it, and the address of the table in it.
    Service(Key, Side, usize),
    /// An AuthorizationPolicy.
    Authorization(Key),
}

/// A part of states that proxies apply as a whole.
#[derive(Default)]
struct Part {
    table: Option<Arc<Table>>,
    /// By the position of the pod.
    outcomes: Vec<(usize, Outcome)>,
}

impl Review {
    /// Adds the outcome of a state at a client that has acknowledged this digest.
    pub(super) fn add(&mut self, id: u64, acknowledged: Option<&Acknowledged>, state: &State) {
        let (Some((pod, lacking)), Some(target)) = (self.proxies.get(&id), &state.target) else {
            return;
        };
        let (pod, lacking) = (*pod, *lacking);
        let outcome = |side, is_incapable| outcome_of(acknowledged, side, state.rest, is_incapable);
        if let TargetKind::Workload(workload) = &target.kind {
            let limits = outcome(Some(Side::Pods), lacking.policies);
            let telemetry = outcome(Some(Side::Telemetry), lacking.telemetry);
            for (service, is_surplus) in &workload.limiting {
                let limits = limits.clone().or_worse(*is_surplus, Outcome::Surplus);
                self.add_part(service, Side::Pods, None, (pod, limits));
                let is_replaced = workload.replaced.contains(service);
                let telemetry = telemetry.clone().or_worse(is_replaced, Outcome::Replaced);
                self.add_part(service, Side::Telemetry, None, (pod, telemetry));
            }
            for (policies, is_incapable) in [
                (&workload.authorization, lacking.authorization),
                (&workload.egress, lacking.egress),
            ] {
                let outcome = outcome(None, is_incapable);
                for (policy, is_too_large) in policies.keys() {
                    let id = PartId::Authorization(policy.clone());
                    let outcome = outcome.clone().or_worse(is_too_large, Outcome::TooLarge);
                    self.parts
                        .entry(id)
                        .or_default()
                        .outcomes
                        .push((pod, outcome));
                }
            }
        }
        let Some(service) = &target.service else {
            return;
        };
        if let Some(table) = &target.routes {
            let outcome = outcome(Some(Side::Requests), lacking.policies);
            self.add_part(service, Side::Requests, Some(table), (pod, outcome));
        }
        if target.policy.is_some() {
            let outcome = outcome(Some(Side::Endpoints), lacking.policies);
            self.add_part(service, Side::Endpoints, None, (pod, outcome));
        }
    }

    fn add_part(
        &mut self,
        service: &Key,
        side: Side,
        table: Option<&Arc<Table>>,
        outcome: (usize, Outcome),
    ) {
        let address = table.map_or(0, |table| Arc::as_ptr(table).addr());
        let id = PartId::Service(service.clone(), side, address);
        let part = self.parts.entry(id).or_default();
        // It keeps the address.
        part.table = table.cloned();
        part.outcomes.push(outcome);
    }

    /// The outcomes at the proxies of an object with these parts.
    fn progress(&self, subject: &Subject, parts: &[&Part]) -> Progress {
        let all = parts.iter().flat_map(|part| &part.outcomes);
        let mut all: Vec<&(usize, Outcome)> = all.collect();
        // The outcomes of each part are sorted. The worst outcome of a pod comes first.
        all.sort();
        all.dedup_by_key(|(pod, _)| *pod);
        let pods = all.into_iter();
        let pods = pods.map(|(pod, outcome)| (&self.pods[*pod], outcome));
        Progress::of(&subject.key.namespace, pods)
    }
}

/// Whether routes or policies have a part in a state.
pub(super) fn is_reviewed(state: &State) -> bool {
    state.target.as_ref().is_some_and(|target| {
        let is_limited = match &target.kind {
            TargetKind::Workload(workload) => {
                let authorizations = [&workload.authorization, &workload.egress];
                let mut policies = authorizations.into_iter().flat_map(|one| one.keys());
                policies.next().is_some() || !workload.limiting.is_empty()
            }
            _ => false,
        };
        is_limited || target.routes.is_some() || target.policy.is_some()
    })
}

impl Hub {
    /// Reviews the acknowledgements until it is dropped.
    pub async fn review_acknowledgements(&self) -> Infallible {
        loop {
            let begin = Instant::now();
            self.review().await;
            sleep(REVIEW_INTERVAL.max(begin.elapsed() * PAUSE)).await;
        }
    }

    /// Updates the conditions once.
    pub async fn review(&self) {
        let mut review = self.proxies().await;
        let mut last = None;
        loop {
            last = self.subscribers().review(last.as_deref(), &mut review);
            if last.is_none() {
                break;
            }
            // Streams and changes of the catalog come first.
            yield_now().await;
        }
        let (found, covered) = (self.progress(review).await, self.coverage().await);
        let changed = self.reports().update(Instant::now(), found, covered);
        self.mark_statuses(changed);
    }

    /// The proxies of meshed pods. Clients without a pod are tools, and every service account can
    /// open a stream. A proxy that replaces its stream has two of them: the latest one counts.
    async fn proxies(&self) -> Review {
        let mut review = Review::default();
        let mut pods = self.subscribers().pods();
        pods.sort_unstable();
        for pods in pods.chunks(MAX_PODS) {
            self.add_proxies(&mut review, pods);
            yield_now().await;
        }
        review
    }

    fn add_proxies(&self, review: &mut Review, pods: &[Key]) {
        let (index, subscribers) = (self.index(), self.subscribers());
        for key in pods {
            let latest = subscribers.latest_in(key);
            let has_proxy = |pod: &PodRef| {
                index
                    .meshed_pod(pod)
                    .is_some_and(|known| !known.terminating)
            };
            let latest = latest.filter(|(_, pod, _)| has_proxy(pod));
            let Some((id, reference, lacking)) = latest else {
                continue;
            };
            let pod = review.pods.len();
            review.pods.push(key.clone());
            review.proxies.insert(id, (pod, lacking));
            // The proxy does not ask for its own state, or its subscription is refused.
            if !subscribers.has_own_state(id) {
                let own = Resource::Workload(key.clone(), reference.uid.clone());
                let location = index.location(key, &reference.uid);
                review.add(id, None, &index.resolve(&own, &location).1);
            }
        }
    }

    /// The outcomes of each object at the proxies, with its generation.
    async fn progress(&self, mut review: Review) -> BTreeMap<Subject, (i64, Progress)> {
        let mut parts = std::mem::take(&mut review.parts);
        for part in parts.values_mut() {
            part.outcomes.sort_unstable();
        }
        let mut subjects: BTreeMap<Subject, Vec<&Part>> = BTreeMap::new();
        for (id, part) in &parts {
            let (service, side) = match id {
                PartId::Service(service, side, _) => (service, side),
                PartId::Authorization(key) => {
                    let subject = of_authorization(key.clone());
                    subjects.entry(subject).or_default().push(part);
                    continue;
                }
            };
            let routes = part.table.iter().flat_map(|table| table.routes.clone());
            let target = Target::Service(service.clone());
            let routes = routes.map(|(kind, key)| (kind, key, target.clone()));
            let policies = self.index().policies_of(service, *side).into_iter();
            let policies = policies.map(|(key, target)| (Kind::TrafficPolicy, key, target));
            for (kind, key, target) in routes.chain(policies) {
                let subject = Subject { kind, key, target };
                subjects.entry(subject).or_default().push(part);
            }
            yield_now().await;
        }
        let mut found = BTreeMap::new();
        for (subject, parts) in subjects {
            let generation = self
                .index()
                .generation(&(subject.kind, subject.key.clone()));
            if let Some(generation) = generation {
                let progress = review.progress(&subject, &parts);
                found.insert(subject, (generation, progress));
            }
            yield_now().await;
        }
        found
    }

    /// The pods that AuthorizationPolicies select.
    async fn coverage(&self) -> BTreeMap<Subject, (i64, Coverage)> {
        let policies = self.index().authorizations();
        let mut covered = BTreeMap::new();
        for key in policies {
            let mut covering = Covering::default();
            let namespaces = self.index().namespaces_of_authorization(&key);
            for namespace in namespaces {
                self.index().cover(&key, &namespace, &mut covering);
                yield_now().await;
            }
            let found = self.index().covered(&key, covering);
            covered.extend(found.map(|found| (of_authorization(key), found)));
        }
        covered
    }
}

fn of_authorization(key: Key) -> Subject {
    let (kind, key) = traffic_target::id(&key);
    let target = Target::Namespace(key.namespace.clone());
    Subject { kind, key, target }
}
