//! The status of the authority: GetIdentity, metrics, and log messages on problems and expiry.
//! Contains no keys and decides nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::clock::{Finding, Verdict};
use diy_mesh_model::identity::Identity;
use diy_mesh_proto::mesh::v1::get_identity_response::{Authority, Rotation, Workload};
use diy_mesh_proto::mesh::v1::{Exceptions, GetIdentityResponse};
use prometheus_client::encoding::DescriptorEncoder;
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Trust;
use super::ca::Ca;
use super::state::{CaState, Phase};
use crate::authenticate::Namespaces;
use crate::issuer::{BACKDATED, Certificate};
use crate::metrics::encode_gauges;
use crate::proxies::ConnectedProxy;
use crate::replicas::reports::Report;
use crate::unix_time::seconds;

/// The maximum number of listed conditions.
const MAX_LINES: usize = 20;
/// The interval of log messages on the expiry of a CA.
const REMINDER_INTERVAL: Duration = Duration::from_secs(6 * 60 * 60);

/// The status of this replica.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The location of the CA.
    pub place: String,
    /// The name of this replica.
    pub replica: String,
    /// The error of the stored CA, if any; the previous state stays in use.
    pub problem: Option<String>,
    /// The latest reminder that a CA expires and cannot be rotated.
    pub expiring: Option<String>,
    /// The progress of a CA rotation.
    pub rotation: Rotation,
    /// The issuing CA; `None` until it is loaded.
    pub issuer: Option<Authority>,
    /// The trust roots.
    pub roots: Vec<Authority>,
    /// The reports of all live replicas.
    pub replicas: BTreeMap<String, Report>,
}

/// Publishes the status of this replica.
pub(super) struct StatusSender {
    pub(super) sender: watch::Sender<Status>,
    reminded: Option<Instant>,
}

impl StatusSender {
    /// The status before the store is read.
    pub(super) fn new(place: &str, replica: &str) -> StatusSender {
        let mut status = Status {
            place: place.to_owned(),
            replica: replica.to_owned(),
            ..Status::default()
        };
        Phase::default()
            .name()
            .clone_into(&mut status.rotation.phase);
        StatusSender {
            sender: watch::Sender::new(status),
            reminded: None,
        }
    }

    /// Publishes a loaded state. The reports of replicas follow.
    pub(super) fn load(&self, state: &CaState) {
        self.sender
            .send_modify(|status| describe_state(status, state, Vec::new()));
    }

    /// Publishes a state with its unmet conditions and the reports of replicas.
    pub(super) fn update(
        &self,
        state: &CaState,
        waiting: Vec<String>,
        replicas: BTreeMap<String, Report>,
    ) {
        self.sender.send_modify(|status| {
            describe_state(status, state, waiting);
            status.replicas = replicas;
        });
    }

    /// Publishes a problem, and logs a new one.
    pub(super) fn problem(&self, problem: Option<String>) {
        self.sender.send_if_modified(|status| {
            let is_new = status.problem != problem;
            if let Some(problem) = problem.as_ref().filter(|_| is_new) {
                let consequence = match status.issuer {
                    Some(_) => "the previous state stays in use",
                    None => "certificates cannot be signed",
                };
                tracing::error!("{problem}; {consequence}");
            }
            status.problem = problem;
            is_new
        });
    }

    /// In the last third of its lifetime, logs and publishes that a CA expires, unless it is about to
    /// be rotated.
    pub(super) fn remind(&mut self, ca: &Ca, waiting: &[String], now: SystemTime) {
        let left = ca.not_after().duration_since(now).unwrap_or_default();
        let reminded = self.reminded.as_ref().map(Instant::elapsed);
        if left > ca.lifetime() / 3 || reminded.is_some_and(|age| age < REMINDER_INTERVAL) {
            return;
        }
        let (subject, hours) = (&ca.certificate().subject, left.as_secs() / 3600);
        let note = match waiting.first() {
            _ if !ca.is_generated() => format!(
                "the CA {subject}, or a certificate above it, expires in {hours} h: write its successor to tls.crt, tls.key and ca.crt"
            ),
            Some(first) => format!(
                "the CA {subject} expires in {hours} h, and its rotation waits for {} conditions, such as {first}",
                waiting.len()
            ),
            None => return,
        };
        tracing::warn!("{note}");
        self.reminded = Some(Instant::now());
        self.sender
            .send_modify(|status| status.expiring = Some(note));
    }
}

fn describe_state(status: &mut Status, state: &CaState, mut waiting: Vec<String>) {
    let waiting_omitted = waiting.len().saturating_sub(MAX_LINES) as u64;
    waiting.truncate(MAX_LINES);
    let (rotation, signer) = (state.rotation.clone(), state.signer());
    let role = if *signer == state.current {
        "current"
    } else {
        "previous"
    };
    let certificate = signer.certificate();
    status.issuer = Some(authority(certificate, role, signer.is_generated()));
    status.roots = roots(state);
    status.rotation = Rotation {
        phase: rotation.phase.name().to_owned(),
        since: rotation.since,
        reason: rotation.reason,
        reverting: rotation.reverting,
        waiting,
        waiting_omitted,
        answer: rotation.answer,
    };
}

fn roots(state: &CaState) -> Vec<Authority> {
    let of_cas = state.cas().flat_map(|(ca, role)| {
        let roots = ca.roots().iter();
        roots.map(move |root| authority(root, role, ca.is_generated()))
    });
    let kept = state.kept.iter().map(|root| authority(root, "kept", false));
    let mut roots: Vec<Authority> = Vec::new();
    for root in of_cas.chain(kept) {
        let is_known = |known: &Authority| known.fingerprint == root.fingerprint;
        if !roots.iter().any(is_known) {
            roots.push(root);
        }
    }
    roots
}

fn authority(certificate: &Certificate, role: &str, own: bool) -> Authority {
    let backdated = if own { BACKDATED } else { Duration::ZERO };
    Authority {
        role: role.to_owned(),
        subject: certificate.subject.clone(),
        fingerprint: certificate.fingerprint(),
        id: certificate.key_id.clone().unwrap_or_default(),
        own,
        not_before: seconds(certificate.not_before),
        issued_at: seconds(certificate.not_before + backdated),
        not_after: seconds(certificate.not_after),
    }
}

/// A response to GetIdentity without workloads, for a client that may list the pods of `namespaces`.
pub fn response(
    status: Status,
    trust_domain: &str,
    trust: Option<&Trust>,
    namespaces: &Namespaces,
) -> GetIdentityResponse {
    let mut rotation = status.rotation;
    let namespace = match namespaces {
        Namespaces::All => String::new(),
        Namespaces::One(own) => {
            rotation.waiting_omitted += rotation.waiting.len() as u64;
            rotation.waiting.clear();
            // It may name namespaces too.
            rotation.reason.clear();
            own.to_string()
        }
    };
    GetIdentityResponse {
        trust_domain: trust_domain.to_owned(),
        place: status.place,
        replica: status.replica,
        problem: status.problem.unwrap_or_default(),
        rotation: Some(rotation),
        issuer: status.issuer,
        roots: status.roots,
        roots_version: trust.map_or(String::new(), |trust| trust.roots.version.clone()),
        namespace,
        ..GetIdentityResponse::default()
    }
}

/// Encodes the metrics of the authority.
pub fn encode_metrics(
    status: &Status,
    time: Verdict,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    let now = seconds(time.now);
    let left = |authority: &Authority| authority.not_after.saturating_sub(now) as i64;
    let root = status
        .roots
        .iter()
        .filter(|root| root.role == "current")
        .map(left)
        .min();
    let issuer = status.issuer.as_ref().map(left);
    let certificates = [("issuer", issuer), ("root", root)];
    encode_gauges(
        encoder,
        "certificate_seconds_left",
        "Seconds until the issuer, or the first trust root, expires",
        "of",
        certificates
            .into_iter()
            .filter_map(|(of, left)| left.map(|left| (of, left))),
    )?;
    encode_gauges(
        encoder,
        "rotation_phase",
        "1 for the phase of the CA rotation",
        "phase",
        Phase::ALL.map(|phase| {
            (
                phase.name(),
                i64::from(phase.name() == status.rotation.phase),
            )
        }),
    )?;
    let findings = Finding::NAMES.into_iter();
    encode_gauges(
        encoder,
        "clocks",
        "1 for the result of the comparison of clocks",
        "result",
        findings.map(|name| (name, i64::from(name == time.finding.name()))),
    )?;
    let sum = |count: fn(&Report) -> u64| status.replicas.values().map(count).sum::<u64>() as i64;
    encode_gauges(
        encoder,
        "proxies_waited_for",
        "Connected proxies, on all replicas, with outdated roots or certificates",
        "what",
        [
            ("roots", sum(|report| report.not_acknowledged.count)),
            ("certificate", sum(|report| report.not_renewed.count)),
        ],
    )?;
    encode_gauges(
        encoder,
        "authority_problems",
        "1 while the CA cannot be read or used",
        "of",
        [("store", i64::from(status.problem.is_some()))],
    )
}

/// A connected proxy.
pub fn workload(proxy: &ConnectedProxy, trust_domain: &str, trust: Option<&Trust>) -> Workload {
    let (namespace, pod, uid) = match &proxy.pod {
        Some(pod) => (&*pod.namespace, &*pod.name, &*pod.uid),
        None => ("", &*proxy.user, ""),
    };
    let identity = Identity::from_user(trust_domain, &proxy.user);
    let mut workload = Workload {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        uid: uid.to_owned(),
        identity: identity.map_or(String::new(), |identity| identity.to_string()),
        connected_since: seconds(proxy.connected_since),
        ..Workload::default()
    };
    if let Some(status) = proxy.status.clone() {
        let unsigned = |time: i64| u64::try_from(time).unwrap_or_default();
        let not_before = unsigned(status.certificate_not_before);
        workload.acknowledged =
            trust.is_some_and(|trust| status.roots_version == trust.roots.version);
        workload.roots_version = status.roots_version;
        workload.certificate_not_before = not_before;
        workload.certificate_issued_at = not_before.saturating_add(BACKDATED.as_secs());
        workload.certificate_not_after = unsigned(status.certificate_not_after);
        workload.certificate_serial = status.certificate_serial;
        workload.certificate_issuer = status.certificate_issuer;
        workload.proxy_version = status.proxy_version;
        workload.clock_skew_ms = proxy.clock_skew;
    }
    if !proxy.exceptions.is_empty() {
        workload.exceptions = Exceptions::decode(proxy.exceptions.clone()).ok();
    }
    workload
}

#[cfg(test)]
mod tests {
    use diy_mesh_control_plane::clock::judge;
    use diy_mesh_proto::mesh::v1::ProxyStatus;

    use super::*;
    use crate::authority::Roots;
    use crate::authority::testing::start;
    use crate::metrics::Metrics;
    use crate::object::PodRef;

    fn trust(state: &CaState) -> Trust {
        let roots = Roots::new(state.roots().into_iter().map(|root| root.der.clone()));
        Trust {
            issuer: state.current.issuer().unwrap().clone(),
            roots: roots.into(),
            renew_within: Duration::ZERO,
        }
    }

    fn status_of(state: &CaState, waiting: Vec<String>) -> Status {
        let sender = StatusSender::new("here", "a");
        sender.update(state, waiting, BTreeMap::new());
        sender.sender.borrow().clone()
    }

    #[test]
    fn reports_phase_roots_and_proxies_without_keys() {
        let state =
            CaState::generate("cluster.local", start(), Duration::from_secs(86_400)).unwrap();
        let trust = trust(&state);
        let said = ProxyStatus {
            roots_version: trust.roots.version.clone(),
            certificate_not_before: 1,
            certificate_not_after: 2,
            certificate_serial: "0a".into(),
            certificate_issuer: "another".into(),
            proxy_version: "0.1.0".into(),
            clock: 0,
        };
        let pod = PodRef {
            namespace: "shop".into(),
            name: "web-1".into(),
            uid: "u".into(),
        };
        let user = "system:serviceaccount:shop:web".into();
        let proxy = ConnectedProxy {
            pod: Some(pod),
            user,
            connected_since: start(),
            status: Some(said),
            clock_skew: -7,
            exceptions: bytes::Bytes::new(),
            traffic: None,
        };
        let waiting = (0..30).map(|line| line.to_string()).collect();
        let status = status_of(&state, waiting);
        let of = |namespaces| response(status.clone(), "cluster.local", Some(&trust), &namespaces);
        let all = of(Namespaces::All);
        let rotation = all.rotation.unwrap();
        assert_eq!(
            (rotation.phase.as_str(), all.trust_domain.as_str()),
            ("steady", "cluster.local")
        );
        let counts = (rotation.waiting.len(), rotation.waiting_omitted);
        assert_eq!(counts, (MAX_LINES, 30 - MAX_LINES as u64));
        let (root, issuer) = (&all.roots[0], all.issuer.as_ref().unwrap());
        assert_eq!(root.fingerprint, state.current.certificate().fingerprint());
        assert_eq!((issuer.own, root.role.as_str()), (true, "current"));
        assert_eq!(
            (issuer.issued_at, issuer.not_before),
            (seconds(start()), seconds(start()) - 300)
        );
        assert!(!rotation.reason.is_empty());
        // Names of other namespaces and of their pods are omitted.
        let shop = of(Namespaces::One("shop".into()));
        let rotation = shop.rotation.unwrap();
        assert_eq!(shop.namespace, "shop");
        assert_eq!((rotation.waiting.len(), rotation.waiting_omitted), (0, 30));
        assert_eq!(rotation.reason, "");

        let workload = |proxy: &ConnectedProxy| workload(proxy, "cluster.local", Some(&trust));
        let reported = workload(&proxy);
        assert_eq!(reported.identity, "spiffe://cluster.local/ns/shop/sa/web");
        assert_eq!((&*reported.namespace, &*reported.pod), ("shop", "web-1"));
        let validity = [
            reported.certificate_not_before,
            reported.certificate_issued_at,
            reported.certificate_not_after,
        ];
        assert_eq!(
            validity,
            [1, 301, 2],
            "issued five minutes after the start of its validity"
        );
        assert_eq!((reported.acknowledged, reported.clock_skew_ms), (true, -7));
        let silent = ConnectedProxy {
            status: None,
            pod: None,
            ..proxy
        };
        let silent = workload(&silent);
        assert_eq!(
            (silent.acknowledged, silent.certificate_not_after),
            (false, 0)
        );
        assert_eq!(silent.pod, "system:serviceaccount:shop:web");
    }

    #[test]
    fn reminds_of_a_ca_in_its_last_third_that_is_not_rotated() {
        let day = Duration::from_secs(86_400);
        let state = CaState::generate("cluster.local", start(), 3 * day).unwrap();
        let mut sender = StatusSender::new("here", "a");
        let mut remind = |waiting: &[String], now| {
            sender.remind(state.signer(), waiting, now);
            sender.sender.borrow().expiring.clone()
        };
        let waiting = ["shop/web".to_owned()];
        assert_eq!(remind(&waiting, start() + day), None);
        let late = start() + 2 * day + day / 2;
        assert_eq!(remind(&[], late), None, "it is rotated");
        let note = remind(&waiting, late).expect("a reminder");
        let is_expected = note.contains("expires in 12 h") && note.ends_with("such as shop/web");
        assert!(is_expected, "{note}");
        let others = ["shop/cart".to_owned()];
        assert_eq!(
            remind(&others, late),
            Some(note),
            "no other one for some hours"
        );
    }

    #[test]
    fn encodes_remaining_time_and_phase() {
        let state = CaState::generate(
            "cluster.local",
            SystemTime::now(),
            Duration::from_secs(86_400),
        )
        .unwrap();
        let render = |status: Status| {
            let (own, server) = (SystemTime::now(), SystemTime::UNIX_EPOCH);
            let time = judge(own, Some(server), &[own]);
            Metrics::new(move |encoder| encode_metrics(&status, time, encoder)).render()
        };
        let text = render(status_of(&state, Vec::new()));
        assert!(
            text.contains("diy_mesh_controller_certificate_seconds_left{of=\"issuer\"} 86"),
            "{text}"
        );
        assert!(
            text.contains("diy_mesh_controller_rotation_phase{phase=\"steady\"} 1\n"),
            "{text}"
        );
        assert!(
            text.contains("diy_mesh_controller_rotation_phase{phase=\"switched\"} 0\n"),
            "{text}"
        );
        // The clock of the API server is the odd one of three.
        for (result, value) in [("agreement", 0), ("server-differs", 1), ("own-differs", 0)] {
            let line = format!("diy_mesh_controller_clocks{{result=\"{result}\"}} {value}\n");
            assert!(text.contains(&line), "{line} {text}");
        }
        let none = render(StatusSender::new("here", "a").sender.borrow().clone());
        assert!(
            !none.contains("certificate_seconds_left{"),
            "no CA is loaded"
        );
    }
}
