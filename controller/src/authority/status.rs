//! What the authority says of itself: for people and tools (GET /identity), for Prometheus, and in
//! the log when something ends soon. Nothing here decides anything, and no key is in it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::Identity;
use diy_mesh_proto::status::{self as proto, Authority, Pod, Proxy, Report, Rotation, Status};
use diy_mesh_runtime::metrics::encode_gauges;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Trust;
use super::material::{Ca, Material};
use super::rotation::{Phase, seconds};
use crate::issuer::{BACKDATED, Certificate};
use crate::proxies::ConnectedProxy;

/// The maximum number of listed conditions.
const MAX_LINES: usize = 20;
/// That something ends soon is said this often.
const REMINDER_INTERVAL: Duration = Duration::from_secs(6 * 60 * 60);

/// Of a state, and what the replicas say of it. Who is connected is not in it.
pub(super) fn of(
    material: &Material,
    place: &str,
    name: &str,
    mut waiting: Vec<String>,
    replicas: BTreeMap<String, Report>,
) -> Status {
    if waiting.len() > MAX_LINES {
        let more = waiting.len() - MAX_LINES;
        waiting.truncate(MAX_LINES);
        waiting.push(format!("and {more} more"));
    }
    let progress = material.progress.clone();
    let signer = material.signer();
    let signs = if *signer == material.current {
        "current"
    } else {
        "previous"
    };
    let rotation = Rotation {
        phase: progress.phase.name().to_owned(),
        since: progress.since,
        reason: progress.reason,
        reverting: progress.reverting,
        waiting,
        answer: progress.answer,
    };
    let issuer = Some(authority(signer.issuer(), signs, signer.is_ours()));
    Status {
        rotation,
        issuer,
        roots: roots(material),
        replicas,
        ..unknown(place, name)
    }
}

/// Before anything was read.
fn unknown(place: &str, name: &str) -> Status {
    let rotation = Rotation {
        phase: Phase::default().name().to_owned(),
        ..Rotation::default()
    };
    Status {
        place: place.to_owned(),
        replica: name.to_owned(),
        rotation,
        ..Status::default()
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

fn authority(certificate: &Certificate, role: &str, own: bool) -> Authority {
    Authority {
        role: role.to_owned(),
        subject: certificate.subject.clone(),
        fingerprint: certificate.fingerprint(),
        id: certificate.key_id.clone().unwrap_or_default(),
        own,
        not_before: seconds(certificate.not_before),
        issued_at: seconds(certificate.not_before + if own { BACKDATED } else { Duration::ZERO }),
        not_after: seconds(certificate.not_after),
    }
}

fn roots(material: &Material) -> Vec<Authority> {
    let mut all: Vec<Authority> = Vec::new();
    let cas = [
        (Some(&material.current), "current"),
        (material.next.as_ref(), "next"),
        (material.previous.as_ref(), "previous"),
    ];
    let of_cas = cas
        .into_iter()
        .filter_map(|(ca, role)| ca.map(|ca| (ca.roots(), role, ca.is_ours())));
    for (roots, role, own) in of_cas.chain([(material.kept.as_slice(), "kept", false)]) {
        for root in roots.iter().map(|root| authority(root, role, own)) {
            if !all
                .iter()
                .any(|known| known.fingerprint == root.fingerprint)
            {
                all.push(root);
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
        StatusSender {
            sender: watch::Sender::new(unknown(place, name)),
            reminded: None,
        }
    }

    /// Another state is in force; what the replicas say of it comes later.
    pub(super) fn follow(&mut self, status: Status) {
        self.sender.send_modify(|before| {
            *before = Status {
                replicas: std::mem::take(&mut before.replicas),
                ..status
            }
        });
    }

    pub(super) fn update(&mut self, status: Status) {
        self.sender.send_replace(status);
    }

    /// Something is wrong; said once in the log.
    pub(super) fn problem(&mut self, problem: String) {
        self.sender.send_if_modified(|status| {
            let new = status.problem.as_ref() != Some(&problem);
            if new {
                let consequence = if status.issuer.is_some() {
                    "what was read before stays in force"
                } else {
                    "nothing can be signed"
                };
                tracing::error!("{problem}; {consequence}");
                status.problem = Some(problem);
            }
            new
        });
    }

    pub(super) fn no_problem(&mut self) {
        self.sender
            .send_if_modified(|status| status.problem.take().is_some());
    }

    /// From a third of its life on, says that a CA ends.
    pub(super) fn remind(&mut self, ca: &Ca, waiting: &[String], now: SystemTime) {
        let left = ca.ends().duration_since(now).unwrap_or_default();
        let is_long_ago = self
            .reminded
            .is_none_or(|reminded| reminded.elapsed() >= REMINDER_INTERVAL);
        if left > ca.life() / 3 || !is_long_ago {
            return;
        }
        self.reminded = Some(Instant::now());
        let (subject, hours) = (&ca.issuer().subject, left.as_secs() / 3600);
        if !ca.is_ours() {
            tracing::warn!(
                "the CA {subject}, or what is above it, ends in {hours} h: put its successor into tls.crt, tls.key and ca.crt"
            );
        } else if let Some(first) = waiting.first() {
            tracing::warn!(
                "the CA {subject} ends in {hours} h, and its rotation waits for {first} (of {} in all)",
                waiting.len()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::authenticate::PodRef;
    use crate::authority::Roots;
    use crate::authority::material::tests::start;
    use crate::metrics::Metrics;

    fn trust(material: &Material) -> Trust {
        let roots = Roots::new(material.roots().into_iter().map(|root| root.der.clone()));
        Trust {
            issuer: material.current.signs().unwrap().clone(),
            roots: roots.into(),
            renew_within: Duration::ZERO,
        }
    }

    #[test]
    fn people_see_the_phase_the_roots_and_each_proxys_certificate_and_no_key() {
        let material =
            Material::make("cluster.local", start(), Duration::from_secs(86_400)).unwrap();
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
        let status = of(
            &material,
            "here",
            "a",
            (0..30).map(|line| line.to_string()).collect(),
            BTreeMap::new(),
        );
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
            json["rotation"]["waiting"].as_array().unwrap().len(),
            MAX_LINES + 1
        );
        assert_eq!(
            json["roots"][0]["fingerprint"],
            json!(material.current.issuer().fingerprint())
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
            "made five minutes after it counts"
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
    fn metrics_say_how_long_and_how_far() {
        let material = Material::make(
            "cluster.local",
            SystemTime::now(),
            Duration::from_secs(86_400),
        )
        .unwrap();
        let render =
            |status: Status| Metrics::new(move |encoder| encode_metrics(&status, encoder)).render();
        let text = render(of(&material, "here", "a", Vec::new(), BTreeMap::new()));
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
        let none = render(unknown("here", "a"));
        assert!(
            !none.contains("certificate_seconds_left{"),
            "nothing is known yet"
        );
    }
}
