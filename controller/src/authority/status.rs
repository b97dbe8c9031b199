//! What the authority says of itself: for people and tools (GET /identity), for Prometheus, and in the log when something ends soon.
//! Nothing here decides anything, and no key is in it.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::Identity;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Trust;
use super::certificate::Certificate;
use super::material::{Ca, Material};
use super::reports::Report;
use super::rotation::{Phase, seconds};
use crate::metrics::{family, sample};
use crate::proxies::ConnectedProxy;

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

    /// The answer of GET /identity: this, and the proxies that are connected to this replica.
    pub fn json(&self, trust_domain: &str, trust: Option<&Trust>, proxies: &[ConnectedProxy]) -> Value {
        let mut value = json!(self);
        value["trust_domain"] = json!(trust_domain);
        value["roots_version"] = json!(trust.map(|trust| &trust.roots.version));
        value["proxies"] = proxies.iter().map(|proxy| describe(proxy, trust_domain, trust)).collect();
        value
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

fn describe(proxy: &ConnectedProxy, trust_domain: &str, trust: Option<&Trust>) -> Value {
    let pod = proxy.pod.as_ref().map(|pod| json!({"namespace": &*pod.namespace, "name": &*pod.name, "uid": &*pod.uid}));
    let certificate = proxy.status.as_ref().map(|status| {
        json!({
            "not_before": status.certificate_not_before,
            "not_after": status.certificate_not_after,
            "serial": status.certificate_serial,
            "issuer": status.certificate_issuer,
            "current": trust.is_some_and(|trust| trust.issuer.id() == status.certificate_issuer),
        })
    });
    let status = proxy.status.as_ref();
    json!({
        "pod": pod,
        "user": &*proxy.user,
        "identity": Identity::of_user(trust_domain, &proxy.user).ok().map(|identity| identity.to_string()),
        "connected_since": seconds(proxy.connected_since),
        "certificate": certificate,
        "roots_version": status.map(|status| &status.roots_version),
        "acknowledged": status.zip(trust).is_some_and(|(status, trust)| status.roots_version == trust.roots.version),
        "version": status.map(|status| &status.proxy_version),
        "clock_skew_ms": status.map(|status| status.clock_skew),
    })
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

    /// Another state is in force; what the replicas say of it comes later.
    pub(super) fn follow(&mut self, status: Status) {
        self.sender.send_modify(|before| *before = Status { replicas: std::mem::take(&mut before.replicas), ..status });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authenticate::PodRef;
    use crate::authority::Roots;
    use crate::authority::material::tests::start;

    fn trust(material: &Material) -> Trust {
        let roots = Roots::new(material.roots().into_iter().map(|root| root.der.clone()));
        Trust { issuer: material.current.signs().unwrap().clone(), roots: roots.into(), renew_within: Duration::ZERO }
    }

    #[test]
    fn people_see_the_phase_the_roots_and_each_proxys_certificate_and_no_key() {
        let material = Material::make("cluster.local", start(), Duration::from_secs(86_400)).unwrap();
        let trust = trust(&material);
        let said = crate::proxies::Status {
            roots_version: trust.roots.version.clone(),
            certificate_not_before: 1,
            certificate_not_after: 2,
            certificate_serial: "0a".into(),
            certificate_issuer: "another".into(),
            proxy_version: "0.1.0".into(),
            clock_skew: -7,
        };
        let pod = PodRef { namespace: "shop".into(), name: "web-1".into(), uid: "u".into() };
        let user = "system:serviceaccount:shop:web".into();
        let proxy = ConnectedProxy { pod: Some(pod), user, connected_since: start(), status: Some(said) };
        let status = Status::of(&material, "here", "a", (0..30).map(|line| line.to_string()).collect(), BTreeMap::new());
        let json = status.json("cluster.local", Some(&trust), &[proxy.clone(), ConnectedProxy { status: None, ..proxy }]);
        assert_eq!((json["rotation"]["phase"].as_str(), json["trust_domain"].as_str()), (Some("steady"), Some("cluster.local")));
        assert_eq!(json["rotation"]["waiting"].as_array().unwrap().len(), MOST_LINES + 1);
        assert_eq!(json["roots"][0]["fingerprint"], json!(material.current.issuer().fingerprint()));
        assert_eq!((&json["issuer"]["own"], &json["roots"][0]["role"]), (&json!(true), &json!("current")));
        let (said, silent) = (&json["proxies"][0], &json["proxies"][1]);
        assert_eq!(said["identity"], "spiffe://cluster.local/ns/shop/sa/web");
        assert_eq!(said["certificate"], json!({"not_before": 1, "not_after": 2, "serial": "0a", "issuer": "another", "current": false}));
        assert_eq!((&said["acknowledged"], &said["clock_skew_ms"], &said["pod"]["name"]), (&json!(true), &json!(-7), &json!("web-1")));
        assert_eq!((&silent["acknowledged"], &silent["certificate"]), (&json!(false), &Value::Null));
        assert!(!json.to_string().contains("PRIVATE"));
    }

    #[test]
    fn metrics_say_how_long_and_how_far() {
        let material = Material::make("cluster.local", SystemTime::now(), Duration::from_secs(86_400)).unwrap();
        let mut text = String::new();
        Status::of(&material, "here", "a", Vec::new(), BTreeMap::new()).metrics(&mut text);
        assert!(text.contains("diy_mesh_controller_certificate_seconds_left{of=\"issuer\"} 86"), "{text}");
        assert!(text.contains("diy_mesh_controller_rotation_phase{phase=\"steady\"} 1\n"), "{text}");
        assert!(text.contains("diy_mesh_controller_rotation_phase{phase=\"switched\"} 0\n"), "{text}");
        let mut none = String::new();
        Status::default().metrics(&mut none);
        assert!(!none.contains("certificate_seconds_left{"), "nothing is known yet");
    }
}
