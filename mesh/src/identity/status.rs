//! What the controller's replicas say of certificates (the answers of their `GET /identity`), put together: one picture of the mesh
//! out of those of its replicas. Pure.

use std::collections::{BTreeMap, BTreeSet};

pub use diy_mesh_proto::status::{Authority, Rotation, Status};
use diy_mesh_proto::status::{Pod, Proxy};
use serde::Serialize;

use super::source::Answers;

/// None is under way.
pub fn is_steady(rotation: &Rotation) -> bool {
    rotation.phase == "steady"
}

/// What the phase is about, in a sentence.
pub fn meaning(rotation: &Rotation) -> &'static str {
    match rotation.phase.as_str() {
        "steady" => "no rotation is under way",
        "announcing" if rotation.reverting => {
            "the former root is announced again; it signs once everybody trusts it"
        }
        "announcing" => "the new root is announced; its CA signs once everybody trusts it",
        "adopting" => {
            "the root of the CA that was put there by hand is announced; it signs once everybody trusts it"
        }
        "switched" => {
            "the new CA signs; the old root goes once nobody uses a certificate of the old CA any more"
        }
        _ => "a phase that this program does not know: it is older than the controller",
    }
}

/// When a CA was made; an older controller only says from when it counts.
pub fn made(authority: &Authority) -> u64 {
    authority.issued_at.max(authority.not_before)
}

/// A connected proxy, and what it says of its certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's uid.
    pub uid: String,
    /// Who it is.
    pub identity: String,
    /// Since when it is connected.
    pub connected_since: u64,
    /// The version of the roots that it verifies its peers by.
    pub roots_version: String,
    /// It trusts the roots that the controller announces.
    pub acknowledged: bool,
    /// From when its certificate counts: a little before it was made.
    pub certificate_not_before: u64,
    /// When it was made.
    pub certificate_issued_at: u64,
    /// Until when.
    pub certificate_not_after: u64,
    /// Its serial number.
    pub certificate_serial: String,
    /// The id of the issuer.
    pub certificate_issuer: String,
    /// The proxy's version.
    pub proxy_version: String,
    /// How far the proxy's clock is ahead of the controller's, in milliseconds.
    pub clock_skew_ms: i64,
}

impl From<&Proxy> for Workload {
    fn from(proxy: &Proxy) -> Self {
        let proxy = proxy.clone();
        // A token that is bound to no pod names its account at least.
        let pod = proxy.pod.unwrap_or_else(|| Pod {
            name: proxy.user,
            ..Pod::default()
        });
        let certificate = proxy.certificate.unwrap_or_default();
        Self {
            namespace: pod.namespace,
            pod: pod.name,
            uid: pod.uid,
            identity: proxy.identity.unwrap_or_default(),
            connected_since: proxy.connected_since,
            roots_version: proxy.roots_version.unwrap_or_default(),
            acknowledged: proxy.acknowledged,
            certificate_not_before: certificate.not_before,
            // An older controller does not say it.
            certificate_issued_at: certificate.issued_at.max(certificate.not_before),
            certificate_not_after: certificate.not_after,
            certificate_serial: certificate.serial,
            certificate_issuer: certificate.issuer,
            proxy_version: proxy.version.unwrap_or_default(),
            clock_skew_ms: proxy.clock_skew_ms.unwrap_or_default(),
        }
    }
}

impl Workload {
    /// `namespace/pod`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.namespace, self.pod)
    }

    /// It has said something of itself: it has a certificate.
    pub fn has_certificate(&self) -> bool {
        self.certificate_not_after != 0
    }
}

/// The mesh as a whole.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Mesh {
    /// Its trust domain.
    pub trust_domain: String,
    /// Where the CA lies.
    pub place: String,
    /// How far a rotation is.
    pub rotation: Rotation,
    /// Who signs.
    pub issuer: Option<Authority>,
    /// Whom everybody trusts.
    pub roots: Vec<Authority>,
    /// What is wrong, by replica.
    pub problems: BTreeMap<String, String>,
    /// Replicas that answered.
    pub replicas: Vec<String>,
    /// Replicas that did not, and why.
    pub silent: BTreeMap<String, String>,
    /// Every connected workload, by name.
    pub workloads: Vec<Workload>,
}

impl Mesh {
    /// Puts the replicas' pictures together. They agree but for moments: then the one of the latest phase counts, and a workload that
    /// has just gone from one to the other is taken from where it connected last.
    pub fn of(answers: Answers) -> Self {
        let mut workloads: BTreeMap<(String, String), Workload> = BTreeMap::new();
        let mut waiting = BTreeSet::new();
        let newest = answers
            .replicas
            .values()
            .filter(|status| status.issuer.is_some())
            .max_by_key(|status| status.rotation.since);
        let newest = newest
            .or_else(|| answers.replicas.values().next())
            .cloned()
            .unwrap_or_default();
        for status in answers.replicas.values() {
            for workload in status.proxies.iter().map(Workload::from) {
                let key = (workload.namespace.clone(), workload.pod.clone());
                let later = workloads
                    .get(&key)
                    .is_none_or(|known| known.connected_since <= workload.connected_since);
                if later {
                    workloads.insert(key, workload);
                }
            }
            if (&status.rotation.phase, status.rotation.since)
                == (&newest.rotation.phase, newest.rotation.since)
            {
                waiting.extend(status.rotation.waiting.iter().cloned());
            }
        }
        let problems = answers
            .replicas
            .iter()
            .filter_map(|(name, status)| Some((name.clone(), status.problem.clone()?)));
        Self {
            problems: problems.collect(),
            replicas: answers.replicas.keys().cloned().collect(),
            silent: answers.silent,
            workloads: workloads.into_values().collect(),
            rotation: Rotation {
                waiting: waiting.into_iter().collect(),
                ..newest.rotation
            },
            trust_domain: newest.trust_domain,
            place: newest.place,
            issuer: newest.issuer,
            roots: newest.roots,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(phase: &str, since: u64, waiting: &[&str], proxies: &[(&str, u64, &str)]) -> Status {
        let proxies: Vec<_> = proxies
            .iter()
            .map(|(pod, since, serial)| {
                let certificate = json!({"not_before": 1, "not_after": 2, "serial": serial, "issuer": "aa", "current": true});
                let pod = json!({"namespace": "shop", "name": pod, "uid": "u"});
                json!({"pod": pod, "user": "x", "identity": null, "connected_since": since, "certificate": certificate, "clock_skew_ms": 7})
            })
            .collect();
        serde_json::from_value(json!({
            "issuer": {"fingerprint": phase}, "rotation": {"phase": phase, "since": since, "waiting": waiting}, "proxies": proxies,
            "something": "new",
        }))
        .unwrap()
    }

    #[test]
    fn replicas_are_put_together_and_the_latest_phase_counts() {
        let replicas = BTreeMap::from([
            (
                "a".to_owned(),
                status(
                    "announcing",
                    5,
                    &["x to trust"],
                    &[("till", 1, "old"), ("desk", 4, "d")],
                ),
            ),
            (
                "b".to_owned(),
                status(
                    "switched",
                    9,
                    &["y to renew", "z to renew"],
                    &[("till", 3, "new")],
                ),
            ),
            ("c".to_owned(), status("switched", 9, &["y to renew"], &[])),
        ]);
        let mesh = Mesh::of(Answers {
            replicas,
            silent: BTreeMap::from([("d".into(), "gone".into())]),
        });
        assert_eq!(
            (mesh.rotation.phase.as_str(), mesh.rotation.waiting.len()),
            ("switched", 2)
        );
        assert_eq!(mesh.issuer.unwrap().fingerprint, "switched");
        let workloads: Vec<_> = mesh
            .workloads
            .iter()
            .map(|workload| (workload.pod.as_str(), workload.certificate_serial.as_str()))
            .collect();
        assert_eq!(workloads, [("desk", "d"), ("till", "new")]);
        assert_eq!((mesh.replicas.len(), mesh.silent.len()), (3, 1));
    }

    #[test]
    fn a_replica_that_has_read_no_authority_yet_does_not_count() {
        let empty = Status {
            rotation: Rotation {
                since: 100,
                ..Rotation::default()
            },
            ..Status::default()
        };
        let replicas = BTreeMap::from([
            ("a".to_owned(), empty),
            ("b".to_owned(), status("steady", 9, &[], &[])),
        ]);
        assert_eq!(
            Mesh::of(Answers {
                replicas,
                ..Answers::default()
            })
            .rotation
            .phase,
            "steady"
        );
    }

    #[test]
    fn a_proxy_that_has_said_nothing_yet_has_no_certificate() {
        let silent = json!({"pod": null, "user": "system:serviceaccount:shop:till", "identity": null, "connected_since": 1, "certificate": null,
            "roots_version": null, "acknowledged": false, "version": null, "clock_skew_ms": null});
        let workload = Workload::from(&serde_json::from_value::<Proxy>(silent).unwrap());
        assert_eq!(
            (workload.has_certificate(), workload.name().as_str()),
            (false, "/system:serviceaccount:shop:till")
        );
    }

    #[test]
    fn a_certificate_is_as_old_as_the_controller_says_or_else_as_it_seems() {
        let made = |certificate: serde_json::Value| {
            Workload::from(
                &serde_json::from_value::<Proxy>(json!({"certificate": certificate})).unwrap(),
            )
            .certificate_issued_at
        };
        assert_eq!(
            made(json!({"not_before": 700, "issued_at": 1_000, "not_after": 9_000})),
            1_000
        );
        assert_eq!(made(json!({"not_before": 700, "not_after": 9_000})), 700);
    }

    #[test]
    fn every_phase_has_a_meaning() {
        for phase in ["steady", "announcing", "adopting", "switched"] {
            let rotation = Rotation {
                phase: phase.into(),
                ..Rotation::default()
            };
            assert!(!meaning(&rotation).contains("does not know"), "{phase}");
        }
    }
}
