//! The status of the authority: JSON (GET /identity), metrics, and log messages on problems and
//! expiry. Contains no keys and decides nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::Identity;
use diy_mesh_proto::status::{self as proto, Authority, Pod, Proxy, Report, Rotation, Status};
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Trust;
use super::ca::Ca;
use super::state::{CaState, Phase, seconds};
use crate::issuer::{BACKDATED, Certificate};
use crate::metrics::encode_gauges;
use crate::proxies::ConnectedProxy;

/// The maximum number of listed conditions.
const MAX_LINES: usize = 20;
/// The interval of log messages on the expiry of a CA.
const REMINDER_INTERVAL: Duration = Duration::from_secs(6 * 60 * 60);

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

    /// In the last third of its lifetime, logs that a CA expires.
    pub(super) fn remind(&mut self, ca: &Ca, waiting: &[String], now: SystemTime) {
        let left = ca.not_after().duration_since(now).unwrap_or_default();
        let reminded = self.reminded.as_ref().map(Instant::elapsed);
        if left > ca.lifetime() / 3 || reminded.is_some_and(|age| age < REMINDER_INTERVAL) {
            return;
        }
        self.reminded = Some(Instant::now());
        let (subject, hours) = (&ca.certificate().subject, left.as_secs() / 3600);
        if !ca.is_generated() {
            tracing::warn!(
                "the CA {subject}, or a certificate above it, expires in {hours} h: write its successor to tls.crt, tls.key and ca.crt"
            );
        } else if let Some(first) = waiting.first() {
            let count = waiting.len();
            tracing::warn!(
                "the CA {subject} expires in {hours} h, and its rotation waits for {count} conditions, such as {first}"
            );
        }
    }
}

fn describe_state(status: &mut Status, state: &CaState, mut waiting: Vec<String>) {
    let waiting_omitted = waiting.len().saturating_sub(MAX_LINES) as u64;
    waiting.truncate(MAX_LINES);
    let (rotation, signer) = (state.rotation.clone(), state.signer());
    let role = match *signer == state.current {
        true => "current",
        false => "previous",
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

/// The response of `GET /identity`: the status with the proxies that are connected to this replica.
pub fn report(
    status: Status,
    trust_domain: &str,
    trust: Option<&Trust>,
    proxies: &[ConnectedProxy],
) -> Status {
    Status {
        trust_domain: trust_domain.to_owned(),
        roots_version: trust.map(|trust| trust.roots.version.clone()),
        proxies: proxies
            .iter()
            .map(|proxy| describe(proxy, trust_domain, trust))
            .collect(),
        ..status
    }
}

/// Encodes the metrics of the authority.
pub fn encode_metrics(status: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let now = seconds(SystemTime::now());
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
        Phase::ALL.map(|phase| (phase.name(), (phase.name() == status.rotation.phase).into())),
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
        [("store", status.problem.is_some().into())],
    )
}

fn describe(proxy: &ConnectedProxy, trust_domain: &str, trust: Option<&Trust>) -> Proxy {
    let pod = proxy.pod.as_ref();
    let status = proxy.status.as_ref();
    Proxy {
        pod: pod.map(|pod| Pod {
            namespace: pod.namespace.to_string(),
            name: pod.name.to_string(),
            uid: pod.uid.to_string(),
        }),
        user: proxy.user.to_string(),
        identity: Identity::from_user(trust_domain, &proxy.user)
            .ok()
            .map(|identity| identity.to_string()),
        connected_since: seconds(proxy.connected_since),
        certificate: status.map(|status| certificate(status, trust)),
        roots_version: status.map(|status| status.roots_version.clone()),
        acknowledged: status
            .zip(trust)
            .is_some_and(|(status, trust)| status.roots_version == trust.roots.version),
        version: status.map(|status| status.proxy_version.clone()),
        clock_skew_ms: status.map(|status| status.clock_skew),
    }
}

fn certificate(status: &crate::proxies::Status, trust: Option<&Trust>) -> proto::Certificate {
    let unsigned = |time: i64| u64::try_from(time).unwrap_or_default();
    let not_before = unsigned(status.certificate_not_before);
    proto::Certificate {
        not_before,
        issued_at: not_before + BACKDATED.as_secs(),
        not_after: unsigned(status.certificate_not_after),
        serial: status.certificate_serial.clone(),
        issuer: status.certificate_issuer.clone(),
        current: trust.is_some_and(|trust| trust.issuer.id() == status.certificate_issuer),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::authenticate::PodRef;
    use crate::authority::Roots;
    use crate::authority::testing::start;
    use crate::metrics::Metrics;

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
        let said = crate::proxies::Status {
            roots_version: trust.roots.version.clone(),
            certificate_not_before: 1,
            certificate_not_after: 2,
            certificate_serial: "0a".into(),
            certificate_issuer: "another".into(),
            proxy_version: "0.1.0".into(),
            clock_skew: -7,
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
        };
        let waiting = (0..30).map(|line| line.to_string()).collect();
        let status = status_of(&state, waiting);
        let json = json!(report(
            status,
            "cluster.local",
            Some(&trust),
            &[
                proxy.clone(),
                ConnectedProxy {
                    status: None,
                    ..proxy
                }
            ]
        ));
        assert_eq!(
            (
                json["rotation"]["phase"].as_str(),
                json["trust_domain"].as_str()
            ),
            (Some("steady"), Some("cluster.local"))
        );
        assert_eq!(
            (
                json["rotation"]["waiting"].as_array().unwrap().len(),
                json["rotation"]["waiting_omitted"].as_u64()
            ),
            (MAX_LINES, Some(30 - MAX_LINES as u64))
        );
        assert_eq!(
            json["roots"][0]["fingerprint"],
            json!(state.current.certificate().fingerprint())
        );
        assert_eq!(
            (&json["issuer"]["own"], &json["roots"][0]["role"]),
            (&json!(true), &json!("current"))
        );
        let (said, silent) = (&json["proxies"][0], &json["proxies"][1]);
        assert_eq!(said["identity"], "spiffe://cluster.local/ns/shop/sa/web");
        let certificate = json!({
            "not_before": 1, "issued_at": 301, "not_after": 2, "serial": "0a", "issuer": "another", "current": false,
        });
        assert_eq!(
            said["certificate"], certificate,
            "issued five minutes after the start of its validity"
        );
        assert_eq!(
            (&json["issuer"]["issued_at"], &json["issuer"]["not_before"]),
            (&json!(seconds(start())), &json!(seconds(start()) - 300))
        );
        assert_eq!(
            (
                &said["acknowledged"],
                &said["clock_skew_ms"],
                &said["pod"]["name"]
            ),
            (&json!(true), &json!(-7), &json!("web-1"))
        );
        assert_eq!(
            (&silent["acknowledged"], &silent["certificate"]),
            (&json!(false), &Value::Null)
        );
        assert!(!json.to_string().contains("PRIVATE"));
    }

    #[test]
    fn encodes_remaining_time_and_phase() {
        let state = CaState::generate(
            "cluster.local",
            SystemTime::now(),
            Duration::from_secs(86_400),
        )
        .unwrap();
        let render =
            |status: Status| Metrics::new(move |encoder| encode_metrics(&status, encoder)).render();
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
        let none = render(StatusSender::new("here", "a").sender.borrow().clone());
        assert!(
            !none.contains("certificate_seconds_left{"),
            "no CA is loaded"
        );
    }
}
