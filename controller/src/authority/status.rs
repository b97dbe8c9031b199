//! What the authority says of itself: for people and tools (GET /identity), for Prometheus, and in the log when something ends soon.
//! Nothing here decides anything, and no key is in it.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;

use super::certificate::Certificate;
use super::material::{Ca, Material};
use super::reports::Report;
use super::rotation::{Phase, seconds};
use crate::metrics::{family, sample};

/// How many lines a list of whom a phase waits for has at most.
const MOST_LINES: usize = 20;
/// That something ends soon is said this often.
const REMIND_AFTER: Duration = Duration::from_secs(6 * 60 * 60);

/// What is known of the authority. Times are seconds since 1970.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Status {
    /// Where the CA lies.
    pub place: String,
    /// This replica's name.
    pub replica: String,
    /// What is wrong with the store, if anything is; what was read before stays in force.
    pub problem: Option<String>,
    /// How far a rotation is.
    pub rotation: Rotation,
    /// Who signs; none before a CA was read.
    pub issuer: Option<Facts>,
    /// Whom everybody trusts.
    pub roots: Vec<Facts>,
    /// What each live replica reports.
    pub replicas: BTreeMap<String, Report>,
}

/// How far a rotation is.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Rotation {
    /// The phase.
    pub phase: Phase,
    /// Since when.
    pub since: u64,
    /// Why.
    pub reason: String,
    /// It goes back to the CA before.
    pub reverting: bool,
    /// On whom it waits, for people.
    pub waiting: Vec<String>,
    /// What became of the last request.
    pub answer: String,
}

/// A CA certificate.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    /// What it is in the rotation: `current`, `next`, `previous` or `kept`.
    pub role: &'static str,
    /// Its subject.
    pub subject: String,
    /// SHA-256 over its bytes.
    pub fingerprint: String,
    /// Its subject key identifier; empty where it has none.
    pub id: String,
    /// Whether the controller has made it.
    pub own: bool,
    /// From when it counts.
    pub not_before: u64,
    /// Until when.
    pub not_after: u64,
}

impl Facts {
    fn of(certificate: &Certificate, role: &'static str, own: bool) -> Facts {
        Facts {
            role,
            subject: certificate.subject.clone(),
            fingerprint: certificate.fingerprint(),
            id: certificate.key_id.clone().unwrap_or_default(),
            own,
            not_before: seconds(certificate.not_before),
            not_after: seconds(certificate.not_after),
        }
    }

    fn left(&self) -> u64 {
        self.not_after.saturating_sub(seconds(SystemTime::now()))
    }
}

impl Status {
    /// Of a state and what the replicas say of it.
    pub(super) fn of(material: &Material, place: &str, name: &str, mut waiting: Vec<String>, replicas: BTreeMap<String, Report>) -> Status {
        if waiting.len() > MOST_LINES {
            let more = waiting.len() - MOST_LINES;
            waiting.truncate(MOST_LINES);
            waiting.push(format!("and {more} more"));
        }
        let progress = material.progress.clone();
        let signer = material.signer();
        let signs = if *signer == material.current { "current" } else { "previous" };
        Status {
            place: place.to_owned(),
            replica: name.to_owned(),
            problem: None,
            rotation: Rotation {
                phase: progress.phase,
                since: progress.since,
                reason: progress.reason,
                reverting: progress.reverting,
                waiting,
                answer: progress.answer,
            },
            issuer: Some(Facts::of(signer.issuer(), signs, signer.is_ours())),
            roots: roots(material),
            replicas,
        }
    }

    /// The text that Prometheus reads.
    pub fn metrics(&self, text: &mut String) {
        family(text, "certificate_seconds_left", "gauge", "Seconds until the issuer, or the first trust root, ends.");
        let root = self.roots.iter().filter(|root| root.role == "current").map(Facts::left).min();
        for (of, left) in [("issuer", self.issuer.as_ref().map(Facts::left)), ("root", root)] {
            if let Some(left) = left {
                sample(text, "certificate_seconds_left", "of", of, left);
            }
        }
        family(text, "rotation_phase", "gauge", "1 for the phase that the rotation of the CA is in.");
        for phase in Phase::ALL {
            sample(text, "rotation_phase", "phase", phase.name(), u64::from(phase == self.rotation.phase));
        }
        family(text, "proxies_waited_for", "gauge", "Connected proxies, on all replicas, that do not yet have what they should.");
        let sum = |count: fn(&Report) -> u64| self.replicas.values().map(count).sum();
        sample(text, "proxies_waited_for", "what", "roots", sum(|report| report.not_acknowledged.count));
        sample(text, "proxies_waited_for", "what", "certificate", sum(|report| report.not_renewed.count));
        family(text, "authority_problems", "gauge", "1 while the CA cannot be read, or not be used.");
        sample(text, "authority_problems", "of", "store", u64::from(self.problem.is_some()));
    }
}

fn roots(material: &Material) -> Vec<Facts> {
    let mut all: Vec<Facts> = Vec::new();
    let cas = [(Some(&material.current), "current"), (material.next.as_ref(), "next"), (material.previous.as_ref(), "previous")];
    let of_cas = cas.into_iter().filter_map(|(ca, role)| ca.map(|ca| (ca.roots(), role, ca.is_ours())));
    for (roots, role, own) in of_cas.chain([(material.kept.as_slice(), "kept", false)]) {
        for facts in roots.iter().map(|root| Facts::of(root, role, own)) {
            if !all.iter().any(|known| known.fingerprint == facts.fingerprint) {
                all.push(facts);
            }
        }
    }
    all
}

/// Where the keeper leaves its status.
pub(super) struct StatusSender {
    pub(super) sender: watch::Sender<Status>,
    reminded: Option<Instant>,
}

impl StatusSender {
    pub(super) fn new(place: &str, name: &str) -> StatusSender {
        let status = Status { place: place.to_owned(), replica: name.to_owned(), ..Status::default() };
        StatusSender { sender: watch::Sender::new(status), reminded: None }
    }

    pub(super) fn update(&mut self, status: Status) {
        self.sender.send_replace(status);
    }

    /// Something is wrong; said once in the log.
    pub(super) fn problem(&mut self, problem: String) {
        self.sender.send_if_modified(|status| {
            let new = status.problem.as_ref() != Some(&problem);
            if new {
                let consequence = if status.issuer.is_some() { "what was read before stays in force" } else { "nothing can be signed" };
                tracing::error!("{problem}; {consequence}");
                status.problem = Some(problem);
            }
            new
        });
    }

    pub(super) fn no_problem(&mut self) {
        self.sender.send_if_modified(|status| status.problem.take().is_some());
    }

    /// From a third of its life on, says that a CA ends.
    pub(super) fn remind(&mut self, ca: &Ca, waiting: &[String], now: SystemTime) {
        let left = ca.ends().duration_since(now).unwrap_or_default();
        let is_long_ago = self.reminded.is_none_or(|reminded| reminded.elapsed() >= REMIND_AFTER);
        if left > ca.life() / 3 || !is_long_ago {
            return;
        }
        self.reminded = Some(Instant::now());
        let (subject, hours) = (&ca.issuer().subject, left.as_secs() / 3600);
        if !ca.is_ours() {
            tracing::warn!("the CA {subject}, or what is above it, ends in {hours} h: put its successor into tls.crt, tls.key and ca.crt");
        } else if let Some(first) = waiting.first() {
            tracing::warn!("the CA {subject} ends in {hours} h, and its rotation waits for {first} (of {} in all)", waiting.len());
        }
    }
}
