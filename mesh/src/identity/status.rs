//! The certificate status of a mesh, merged from the GetIdentity responses of the controller
//! replicas. Pure.

use std::collections::{BTreeMap, BTreeSet};

pub use diy_mesh_proto::mesh::v1::get_identity_response::{Authority, Rotation, Workload};
use serde::Serialize;

use diy_mesh_proto::mesh::v1::GetIdentityResponse;

use crate::controller::Responses;

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

/// The items for which a rotation waits: the listed ones, and the number of the others.
pub fn describe_waiting(rotation: &Rotation) -> Vec<String> {
    let listed = rotation.waiting.iter();
    let listed = listed.map(|item| format!("waiting for {item}"));
    let omitted = rotation.waiting_omitted;
    let omitted = (omitted > 0).then(|| format!("waiting for {omitted} more"));
    listed.chain(omitted).collect()
}

/// `namespace/pod`.
pub fn workload_name(workload: &Workload) -> String {
    format!("{}/{}", workload.namespace, workload.pod)
}

/// Whether the proxy has reported a certificate.
pub fn has_certificate(workload: &Workload) -> bool {
    workload.certificate_not_after != 0
}

/// The merged status of a mesh.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Mesh {
    /// The trust domain.
    pub trust_domain: String,
    /// The namespace of the workloads, if the workloads of all namespaces are not wanted, or the
    /// account may not list them.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
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
    /// The differences between the clocks of the controllers and the API server, by replica.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub clocks: BTreeMap<String, String>,
    /// The replicas that responded.
    pub replicas: Vec<String>,
    /// The errors of replicas that did not respond.
    #[serde(rename = "silent")]
    pub unreachable: BTreeMap<String, String>,
    /// The connected workloads, sorted by name.
    pub workloads: Vec<Workload>,
}

impl Mesh {
    /// Keeps the workloads of a namespace only.
    pub fn keep_namespace(&mut self, namespace: &str) {
        namespace.clone_into(&mut self.namespace);
        self.workloads.retain(|one| one.namespace == namespace);
    }

    /// Merges the responses of the replicas. The replica with the latest phase determines the
    /// rotation, and the latest connection of a workload its status.
    pub fn merge(responses: Responses) -> Self {
        let mut workloads: BTreeMap<(String, String), Workload> = BTreeMap::new();
        // Replicas list different items of one set.
        let (mut waiting, mut number) = (BTreeSet::new(), 0);
        let rotation_of =
            |status: &GetIdentityResponse| status.rotation.clone().unwrap_or_default();
        let newest = responses
            .replicas
            .values()
            .filter(|status| status.issuer.is_some())
            .max_by_key(|status| rotation_of(status).since);
        let newest = newest
            .or_else(|| responses.replicas.values().next())
            .cloned()
            .unwrap_or_default();
        let newest_rotation = rotation_of(&newest);
        for status in responses.replicas.values() {
            for workload in &status.workloads {
                let key = (workload.namespace.clone(), workload.pod.clone());
                let later = workloads
                    .get(&key)
                    .is_none_or(|known| known.connected_since <= workload.connected_since);
                if later {
                    workloads.insert(key, workload.clone());
                }
            }
            let rotation = rotation_of(status);
            if (&rotation.phase, rotation.since) == (&newest_rotation.phase, newest_rotation.since)
            {
                number = number.max(rotation.waiting.len() as u64 + rotation.waiting_omitted);
                waiting.extend(rotation.waiting);
            }
        }
        let texts = |text: fn(&GetIdentityResponse) -> &String| {
            let texts = responses.replicas.iter();
            let texts = texts.map(|(name, status)| (name.clone(), text(status).clone()));
            texts.filter(|(_, text)| !text.is_empty()).collect()
        };
        Self {
            problems: texts(|status| &status.problem),
            clocks: texts(|status| &status.clocks),
            replicas: responses.replicas.keys().cloned().collect(),
            unreachable: responses.unreachable,
            workloads: workloads.into_values().collect(),
            rotation: Rotation {
                waiting_omitted: number.saturating_sub(waiting.len() as u64),
                waiting: waiting.into_iter().collect(),
                ..newest_rotation
            },
            trust_domain: newest.trust_domain,
            namespace: newest.namespace,
            place: newest.place,
            issuer: newest.issuer,
            roots: newest.roots,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(
        phase: &str,
        since: u64,
        waiting: &[&str],
        workloads: &[(&str, u64, &str)],
    ) -> GetIdentityResponse {
        let workloads = workloads.iter().map(|(pod, since, serial)| Workload {
            namespace: "shop".into(),
            pod: (*pod).into(),
            connected_since: *since,
            certificate_serial: (*serial).into(),
            ..Workload::default()
        });
        GetIdentityResponse {
            issuer: Some(Authority {
                fingerprint: phase.into(),
                ..Authority::default()
            }),
            rotation: Some(Rotation {
                phase: phase.into(),
                since,
                waiting: waiting.iter().map(ToString::to_string).collect(),
                ..Rotation::default()
            }),
            workloads: workloads.collect(),
            ..GetIdentityResponse::default()
        }
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
            (
                "c".to_owned(),
                GetIdentityResponse {
                    clocks: "they differ".to_owned(),
                    ..status("switched", 9, &["y to renew"], &[])
                },
            ),
        ]);
        let mesh = Mesh::merge(Responses {
            replicas,
            unreachable: BTreeMap::from([("d".into(), "gone".into())]),
        });
        assert_eq!(mesh.clocks, [("c".into(), "they differ".into())].into());
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
            status.rotation.as_mut().unwrap().waiting_omitted = omitted;
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
        let empty = GetIdentityResponse {
            rotation: Some(Rotation {
                since: 100,
                ..Rotation::default()
            }),
            ..GetIdentityResponse::default()
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
