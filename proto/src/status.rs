//! What each replica of the controller says of certificates, as the answer of its `GET /identity`. The controller writes it, the
//! command line reads it: data alone.
//!
//! Times are seconds since 1970. Fields that a newer controller has and an older reader does not know are left aside; those that an
//! older controller lacks are empty.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// What one replica says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The mesh's trust domain.
    pub trust_domain: String,
    /// Where the CA lies.
    pub place: String,
    /// This replica's name.
    pub replica: String,
    /// What is wrong with what lies there, if anything is; what was read before stays in force.
    pub problem: Option<String>,
    /// How far a rotation of the CA is.
    pub rotation: Rotation,
    /// Who signs; none before a CA was read.
    pub issuer: Option<Authority>,
    /// Whom everybody trusts.
    pub roots: Vec<Authority>,
    /// The version of the roots that proxies acknowledge.
    pub roots_version: Option<String>,
    /// What each live replica reports.
    pub replicas: BTreeMap<String, Report>,
    /// The proxies that are connected to this replica.
    pub proxies: Vec<Proxy>,
}

/// How far a rotation of the CA is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rotation {
    /// `steady`, `announcing`, `adopting` or `switched`.
    pub phase: String,
    /// Since when.
    pub since: u64,
    /// Why it is in this phase, for people.
    pub reason: String,
    /// It goes back to the CA before.
    pub reverting: bool,
    /// On whom it waits, for people.
    pub waiting: Vec<String>,
    /// What became of the last request, for people.
    pub answer: String,
}

/// A CA certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Authority {
    /// What it is in the rotation: `current`, `next`, `previous` or `kept`.
    pub role: String,
    /// Its subject.
    pub subject: String,
    /// SHA-256 over its bytes, hexadecimal.
    pub fingerprint: String,
    /// Its subject key identifier, hexadecimal; empty where it has none.
    pub id: String,
    /// The controller has made it.
    pub own: bool,
    /// From when it counts.
    pub not_before: u64,
    /// When it was made, as far as is known: the controller's own count from a little before that.
    pub issued_at: u64,
    /// Until when it counts.
    pub not_after: u64,
}

/// A proxy that is connected, and what it says of itself. What it has not said yet is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Proxy {
    /// Its pod, where its token is bound to one.
    pub pod: Option<Pod>,
    /// Its user: `system:serviceaccount:NAMESPACE:NAME`.
    pub user: String,
    /// Its SPIFFE ID.
    pub identity: Option<String>,
    /// Since when it is connected.
    pub connected_since: u64,
    /// Its certificate.
    pub certificate: Option<Certificate>,
    /// The version of the roots that it verifies its peers by.
    pub roots_version: Option<String>,
    /// It trusts the roots that the controller announces.
    pub acknowledged: bool,
    /// Its version.
    pub version: Option<String>,
    /// How far its clock is ahead of the controller's, in milliseconds; behind: negative.
    pub clock_skew_ms: Option<i64>,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A workload's certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    /// From when it counts: a little before it was made, for clocks that are behind.
    pub not_before: u64,
    /// When it was made.
    pub issued_at: u64,
    /// Until when it counts.
    pub not_after: u64,
    /// Its serial number, hexadecimal.
    pub serial: String,
    /// The key identifier, hexadecimal, of the CA that signed it.
    pub issuer: String,
    /// That CA is the one that signs now.
    pub current: bool,
}

/// What one replica reports to the others of the proxies that are connected to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Another number in each report.
    pub beat: u64,
    /// The state of the store that it acts by.
    pub state: String,
    /// The version of the roots that it tells its proxies.
    pub roots: String,
    /// The id of the issuer that it signs with.
    pub issuer: String,
    /// How many proxies are connected to it.
    pub connected: u64,
    /// How many of them trust which version of the roots.
    pub acknowledged: BTreeMap<String, u64>,
    /// Those that do not trust the current version.
    pub not_acknowledged: Few,
    /// Those whose certificate is another issuer's.
    pub not_renewed: Few,
    /// The namespaces that do not hold the current roots.
    pub namespaces: Few,
    /// The connected pods, as digests; only while a rotation is under way.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub pods: BTreeSet<String>,
}

/// A number, and some of the names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Few {
    /// How many there are.
    pub count: u64,
    /// At most 20 of them.
    pub names: Vec<String>,
}
