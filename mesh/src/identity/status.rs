//! The certificate status of a mesh, merged from the `GET /identity` responses of the controller
//! replicas. Pure.

use std::collections::{BTreeMap, BTreeSet};

pub use diy_mesh_proto::status::{Authority, Rotation, Status};
use diy_mesh_proto::status::{Pod, Proxy};
use serde::Serialize;

use super::source::Responses;

/// A larger clock skew is reported, in milliseconds. Certificates tolerate five minutes.
pub const CLOCK_SKEW_WARNING_MS: i64 = 30_000;

/// Whether no rotation is in progress.
pub fn is_steady(rotation: &Rotation) -> bool {
    rotation.phase == "steady"
}

/// Describes the phase of a rotation.
pub fn describe_phase(rotation: &Rotation) -> &'static str {
    match rotation.phase.as_str() {
        "steady" => "no rotation is in progress",
        "announcing" if rotation.reverting => {
            "the previous root is being announced; its CA issues certificates once all proxies trust it"
        }
        "announcing" => {
            "the new root is being announced; its CA issues certificates once all proxies trust it"
        }
        "adopting" => {
            "the root of the provided CA is being announced; the CA issues certificates once all proxies trust it"
        }
        "switched" => {
            "the new CA issues certificates; the old root is removed once no certificate of the old CA is in use"
        }
        _ => "unknown phase: update mesh to the version of the controller",
    }
}

/// What a rotation waits for: the listed items, and the number of the others.
pub fn describe_waiting(rotation: &Rotation) -> Vec<String> {
    let listed = rotation.waiting.iter();
    let listed = listed.map(|item| format!("waiting for {item}"));
    let omitted = rotation.waiting_omitted;
    let omitted = (omitted > 0).then(|| format!("waiting for {omitted} more"));
    listed.chain(omitted).collect()
}

/// The time of issue of a CA certificate. Older controllers report notBefore only.
pub fn issued_at(authority: &Authority) -> u64 {
    authority.issued_at.max(authority.not_before)
}

/// A connected proxy and its certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's uid.
    pub uid: String,
    /// The SPIFFE identity.
    pub identity: String,
    /// The time of the connection, in seconds since 1970.
    pub connected_since: u64,
    /// The version of the trust roots that the proxy uses.
    pub roots_version: String,
    /// Whether the proxy uses the announced trust roots.
    pub acknowledged: bool,
    /// notBefore of the certificate, which is earlier than its time of issue.
    pub certificate_not_before: u64,
    /// The time of issue of the certificate.
    pub certificate_issued_at: u64,
    /// notAfter of the certificate.
    pub certificate_not_after: u64,
    /// The serial number of the certificate.
    pub certificate_serial: String,
    /// The id of the issuing CA.
    pub certificate_issuer: String,
    /// The version of the proxy.
    pub proxy_version: String,
    /// The clock of the proxy minus the clock of the controller, in milliseconds.
    pub clock_skew_ms: i64,
}

impl From<&Proxy> for Workload {
    fn from(proxy: &Proxy) -> Self {
        let proxy = proxy.clone();
        // A token that is not bound to a pod has a user only.
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
            // Older controllers do not report the time of issue.
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

    /// Whether the proxy has reported a certificate.
    pub fn has_certificate(&self) -> bool {
        self.certificate_not_after != 0
    }
}

/// The merged status of a mesh.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Mesh {
    /// The trust domain.
    pub trust_domain: String,
    /// The location of the CA.
    pub place: String,
    /// The state of the root rotation.
    pub rotation: Rotation,
    /// The issuing CA.
    pub issuer: Option<Authority>,
    /// The trust roots.
    pub roots: Vec<Authority>,
    /// The reported problems by replica.
    pub problems: BTreeMap<String, String>,
    /// The replicas that responded.
    pub replicas: Vec<String>,
    /// The errors of replicas that did not respond.
    #[serde(rename = "silent")]
    pub unreachable: BTreeMap<String, String>,
    /// The connected workloads, sorted by name.
    pub workloads: Vec<Workload>,
}

impl Mesh {
    /// Merges the responses of the replicas. The replica with the latest phase determines the
    /// rotation, and the latest connection of a workload its status.
    pub fn merge(responses: Responses) -> Self {
        let mut workloads: BTreeMap<(String, String), Workload> = BTreeMap::new();
        // Replicas list different items of one set.
        let (mut waiting, mut number) = (BTreeSet::new(), 0);
        let newest = responses
            .replicas
            .values()
            .filter(|status| status.issuer.is_some())
            .max_by_key(|status| status.rotation.since);
        let newest = newest
            .or_else(|| responses.replicas.values().next())
            .cloned()
            .unwrap_or_default();
        for status in responses.replicas.values() {
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
                let listed = &status.rotation.waiting;
                number = number.max(listed.len() as u64 + status.rotation.waiting_omitted);
                waiting.extend(listed.iter().cloned());
            }
        }
        let problems = responses
            .replicas
            .iter()
            .filter_map(|(name, status)| Some((name.clone(), status.problem.clone()?)));
        Self {
            problems: problems.collect(),
            replicas: responses.replicas.keys().cloned().collect(),
            unreachable: responses.unreachable,
            workloads: workloads.into_values().collect(),
            rotation: Rotation {
                waiting_omitted: number.saturating_sub(waiting.len() as u64),
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
    fn merges_replicas_and_prefers_the_latest_phase() {
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
        let mesh = Mesh::merge(Responses {
            replicas,
            unreachable: BTreeMap::from([("d".into(), "gone".into())]),
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
        assert_eq!((mesh.replicas.len(), mesh.unreachable.len()), (3, 1));
    }

    #[test]
    fn counts_what_a_rotation_waits_for_once() {
        let replica = |waiting: &[&str], omitted| {
            let mut status = status("switched", 9, waiting, &[]);
            status.rotation.waiting_omitted = omitted;
            status
        };
        let replicas = BTreeMap::from([
            ("a".to_owned(), replica(&["x to renew", "y to renew"], 12)),
            ("b".to_owned(), replica(&["y to renew", "z to renew"], 20)),
        ]);
        let mesh = Mesh::merge(Responses {
            replicas,
            ..Responses::default()
        });
        assert_eq!(
            describe_waiting(&mesh.rotation),
            [
                "waiting for x to renew",
                "waiting for y to renew",
                "waiting for z to renew",
                "waiting for 19 more"
            ]
        );
    }

    #[test]
    fn ignores_replicas_without_an_authority() {
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
            Mesh::merge(Responses {
                replicas,
                ..Responses::default()
            })
            .rotation
            .phase,
            "steady"
        );
    }

    #[test]
    fn proxy_without_a_report_has_no_certificate() {
        let silent = json!({"pod": null, "user": "system:serviceaccount:shop:till", "identity": null, "connected_since": 1, "certificate": null,
            "roots_version": null, "acknowledged": false, "version": null, "clock_skew_ms": null});
        let workload = Workload::from(&serde_json::from_value::<Proxy>(silent).unwrap());
        assert_eq!(
            (workload.has_certificate(), workload.name().as_str()),
            (false, "/system:serviceaccount:shop:till")
        );
    }

    #[test]
    fn time_of_issue_defaults_to_not_before() {
        let issued_at = |certificate: serde_json::Value| {
            Workload::from(
                &serde_json::from_value::<Proxy>(json!({"certificate": certificate})).unwrap(),
            )
            .certificate_issued_at
        };
        assert_eq!(
            issued_at(json!({"not_before": 700, "issued_at": 1_000, "not_after": 9_000})),
            1_000
        );
        assert_eq!(
            issued_at(json!({"not_before": 700, "not_after": 9_000})),
            700
        );
    }

    #[test]
    fn describes_all_phases() {
        for phase in ["steady", "announcing", "adopting", "switched"] {
            let rotation = Rotation {
                phase: phase.into(),
                ..Rotation::default()
            };
            assert!(
                !describe_phase(&rotation).starts_with("unknown phase"),
                "{phase}"
            );
        }
    }
}
