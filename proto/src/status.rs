//! Certificate status of a controller replica: the JSON response of `GET /identity`, which the
//! `mesh` command line reads.
//!
//! Times are in seconds since 1970. Readers ignore unknown fields of newer controllers; fields that
//! an older controller lacks have their default values.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Status of one replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Trust domain of the mesh.
    pub trust_domain: String,
    /// Location of the CA.
    pub place: String,
    /// Name of this replica.
    pub replica: String,
    /// Error of the stored CA, if any; the previous state stays in use.
    pub problem: Option<String>,
    /// Progress of a CA rotation.
    pub rotation: Rotation,
    /// Issuing CA; `None` until it is loaded.
    pub issuer: Option<Authority>,
    /// Trust roots.
    pub roots: Vec<Authority>,
    /// Version of the roots that proxies acknowledge.
    pub roots_version: Option<String>,
    /// Reports of all live replicas.
    pub replicas: BTreeMap<String, Report>,
    /// Proxies that are connected to this replica.
    pub proxies: Vec<Proxy>,
}

/// Progress of a CA rotation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rotation {
    /// `steady`, `announcing`, `adopting` or `switched`.
    pub phase: String,
    /// Start of the phase.
    pub since: u64,
    /// Reason for the phase, as text.
    pub reason: String,
    /// Whether the rotation reverts to the previous CA.
    pub reverting: bool,
    /// Workloads and replicas that the rotation waits for, as text.
    pub waiting: Vec<String>,
    /// Number of others that `waiting` does not list.
    pub waiting_omitted: u64,
    /// Result of the last request, as text.
    pub answer: String,
}

/// A CA certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Authority {
    /// Role in the rotation: `current`, `next`, `previous` or `kept`.
    pub role: String,
    /// Subject.
    pub subject: String,
    /// SHA-256 fingerprint, hexadecimal.
    pub fingerprint: String,
    /// Subject key identifier, hexadecimal; empty if there is none.
    pub id: String,
    /// Whether the controller generated it.
    pub own: bool,
    /// Start of validity.
    pub not_before: u64,
    /// Time of issue, if known. `not_before` of a generated certificate is slightly earlier.
    pub issued_at: u64,
    /// End of validity.
    pub not_after: u64,
}

/// Connected proxy with the status that it reported. Missing values are not reported yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Proxy {
    /// Pod, if the token is bound to one.
    pub pod: Option<Pod>,
    /// Kubernetes user: `system:serviceaccount:NAMESPACE:NAME`.
    pub user: String,
    /// SPIFFE ID.
    pub identity: Option<String>,
    /// Start of the connection.
    pub connected_since: u64,
    /// Certificate of the proxy.
    pub certificate: Option<Certificate>,
    /// Version of the roots that verify peers.
    pub roots_version: Option<String>,
    /// Whether it trusts the current roots of the controller.
    pub acknowledged: bool,
    /// Version of the proxy.
    pub version: Option<String>,
    /// Offset of the proxy's clock from the controller's, in milliseconds.
    pub clock_skew_ms: Option<i64>,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// Certificate of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    /// Start of validity: slightly before the time of issue, to allow for clock skew.
    pub not_before: u64,
    /// Time of issue.
    pub issued_at: u64,
    /// End of validity.
    pub not_after: u64,
    /// Serial number, hexadecimal.
    pub serial: String,
    /// Key identifier of the issuing CA, hexadecimal.
    pub issuer: String,
    /// Whether that CA is the current issuer.
    pub current: bool,
}

/// Report of a replica to the other replicas about its connected proxies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Counter that changes with each report.
    pub beat: u64,
    /// Version of the CA state that the replica uses.
    pub state: String,
    /// Version of the roots that the replica sends to its proxies.
    pub roots: String,
    /// Key identifier of the issuer that the replica uses.
    pub issuer: String,
    /// Number of connected proxies.
    pub connected: u64,
    /// Number of proxies by acknowledged version of the roots.
    pub acknowledged: BTreeMap<String, u64>,
    /// Proxies that do not trust the current version.
    pub not_acknowledged: BoundedNames,
    /// Proxies whose certificate has another issuer.
    pub not_renewed: BoundedNames,
    /// Namespaces without the current roots.
    pub namespaces: BoundedNames,
    /// Digests of the connected pods; only during a rotation.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub pods: BTreeSet<String>,
}

/// Count with a bounded list of names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoundedNames {
    /// Total number.
    pub count: u64,
    /// At most 20 names.
    pub names: Vec<String>,
}
