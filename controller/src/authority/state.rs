//! The state of the authority in the store, which all replicas share: the current CA, its
//! predecessor and successor, and the phase of the rotation. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

use super::ca::{CURRENT, Ca, FieldNames, certificates, pem};
use crate::issuer::{Certificate, SignError, hex};
use crate::unix_time::seconds;

/// The names of the fields. The mesh ignores other fields.
pub const FIELDS: [&str; 11] = [
    "tls.crt",
    "tls.key",
    "ca.crt",
    "next.crt",
    "next.key",
    "next.roots.crt",
    "previous.crt",
    "previous.key",
    "previous.roots.crt",
    KEPT_ROOTS,
    ROTATION,
];
const NEXT: FieldNames = FieldNames {
    chain: "next.crt",
    key: "next.key",
    roots: "next.roots.crt",
};
const PREVIOUS: FieldNames = FieldNames {
    chain: "previous.crt",
    key: "previous.key",
    roots: "previous.roots.crt",
};
const KEPT_ROOTS: &str = "kept.crt";
const ROTATION: &str = "rotation.json";

/// The fields of a store by name.
pub type Fields = BTreeMap<String, Vec<u8>>;

/// Why fields cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A required field is missing.
    #[error("{field} is missing: {hint}")]
    Missing {
        /// The field.
        field: &'static str,
        /// The expected content.
        hint: &'static str,
    },
    /// A field has invalid content.
    #[error("{field} cannot be used: {reason}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// The reason.
        reason: String,
    },
    /// A CA cannot be generated.
    #[error("cannot generate a CA: {0}")]
    Generate(#[from] SignError),
}

impl StateError {
    pub(super) fn missing(field: &'static str, hint: &'static str) -> StateError {
        StateError::Missing { field, hint }
    }

    pub(super) fn invalid(field: &'static str, reason: impl fmt::Display) -> StateError {
        let reason = reason.to_string();
        StateError::Invalid { field, reason }
    }
}

/// The phase of a rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// No rotation is in progress.
    #[default]
    Steady,
    /// The root of the next CA is distributed.
    Announcing,
    /// The root of a CA from an operator is distributed. The previous CA signs.
    Adopting,
    /// The new CA signs. Leaves of the previous CA are in use.
    Switched,
}

impl Phase {
    /// All phases.
    pub const ALL: [Phase; 4] = [
        Phase::Steady,
        Phase::Announcing,
        Phase::Adopting,
        Phase::Switched,
    ];

    /// The name in the store, in JSON and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Steady => "steady",
            Phase::Announcing => "announcing",
            Phase::Adopting => "adopting",
            Phase::Switched => "switched",
        }
    }
}

/// The content of the field rotation.json. Times are in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RotationState {
    /// The phase.
    pub phase: Phase,
    /// The start of the phase.
    pub since: u64,
    /// The reason for the phase, as text.
    pub reason: String,
    /// Incremented by each write of a controller.
    pub generation: u64,
    /// The fingerprint of the certificate in tls.crt at the last write of a controller. Another
    /// certificate there comes from an operator.
    pub current: String,
    /// Whether the rotation reverts to the previous CA.
    pub reverting: bool,
    /// Whether the CA replaced the previous one at once, whose roots must not be trusted.
    pub forced: bool,
    /// The latest expiry of leaves of the CA that has stopped to sign.
    pub old_leaves_end: u64,
    /// The result of the last request, as text.
    pub answer: String,
}

/// The stored state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaState {
    /// The CA in the fields tls.crt, tls.key and ca.crt.
    pub current: Ca,
    /// The CA that will sign when all proxies trust it.
    pub next: Option<Ca>,
    /// The CA that signed before. Its leaves may be in use.
    pub previous: Option<Ca>,
    /// Further roots that stay trusted until the rotation completes.
    pub kept: Vec<Certificate>,
    /// The state of the rotation.
    pub rotation: RotationState,
}

impl CaState {
    /// A CA without a rotation.
    pub fn steady(current: Ca, now: SystemTime, reason: &str) -> CaState {
        let mut state = CaState {
            current,
            next: None,
            previous: None,
            kept: Vec::new(),
            rotation: RotationState::default(),
        };
        state.enter(Phase::Steady, now, reason);
        state
    }

    /// Generates a CA.
    pub fn generate(
        trust_domain: &str,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<CaState, StateError> {
        let current = Ca::generate(trust_domain, now, lifetime)?;
        Ok(CaState::steady(current, now, "generated by the controller"))
    }

    /// Reads and checks the fields.
    pub fn read(fields: &Fields, now: SystemTime) -> Result<CaState, StateError> {
        let current = Ca::read(fields, &CURRENT, now)?;
        let next = fields.contains_key(NEXT.chain);
        let next = next.then(|| Ca::read(fields, &NEXT, now)).transpose();
        // It does not sign yet.
        let (next, problem) = match next {
            Ok(next) => (next, None),
            Err(error) => (None, Some(error)),
        };
        let previous = if fields.contains_key(PREVIOUS.chain) {
            Some(Ca::read_trusted(fields, &PREVIOUS, now)?)
        } else {
            None
        };
        let mut rotation = match fields.get(ROTATION) {
            None => RotationState::default(),
            Some(json) => serde_json::from_slice(json).map_err(|error| {
                let reason = format!("{error}; remove it to start in the phase steady");
                StateError::invalid(ROTATION, reason)
            })?,
        };
        // An operator who removes the other CA ends the rotation.
        let has_other_ca = match rotation.phase {
            Phase::Steady => true,
            Phase::Announcing => next.is_some(),
            Phase::Adopting => previous.as_ref().and_then(Ca::issuer).is_some(),
            Phase::Switched => previous.is_some(),
        };
        if !has_other_ca {
            rotation.phase = Phase::Steady;
        }
        if let Some(problem) = problem {
            rotation.reason = format!("{problem}; the next CA is ignored");
        }
        Ok(CaState {
            current,
            next,
            previous,
            kept: certificates(fields, KEPT_ROOTS)?,
            rotation,
        })
    }

    /// All fields. Fields that are absent here must be removed from the store.
    pub fn write(&self) -> Fields {
        let mut fields = Fields::new();
        self.current.write(&mut fields, &CURRENT);
        if let Some(next) = &self.next {
            next.write(&mut fields, &NEXT);
        }
        if let Some(previous) = &self.previous {
            previous.write(&mut fields, &PREVIOUS);
        }
        if !self.kept.is_empty() {
            fields.insert(KEPT_ROOTS.to_owned(), pem(&self.kept).into_bytes());
        }
        let rotation = serde_json::to_vec(&self.rotation);
        let rotation = rotation.expect("numbers and texts are valid JSON");
        fields.insert(ROTATION.to_owned(), rotation);
        fields
    }

    /// The CA that signs in this phase.
    pub fn signer(&self) -> &Ca {
        match (&self.rotation.phase, &self.previous) {
            (Phase::Adopting, Some(previous)) => previous,
            _ => &self.current,
        }
    }

    /// The CAs with their roles.
    pub fn cas(&self) -> impl Iterator<Item = (&Ca, &'static str)> {
        let next = self.next.as_ref().map(|ca| (ca, "next"));
        let previous = self.previous.as_ref().map(|ca| (ca, "previous"));
        [(&self.current, "current")]
            .into_iter()
            .chain(next)
            .chain(previous)
    }

    /// All trust roots, sorted and without duplicates.
    pub fn roots(&self) -> Vec<&Certificate> {
        let of_cas = self.cas().flat_map(|(ca, _)| ca.roots());
        let mut roots: Vec<&Certificate> = of_cas.chain(&self.kept).collect();
        roots.sort_by(|one, other| one.der.cmp(&other.der));
        roots.dedup_by(|one, other| one.der == other.der);
        roots
    }

    /// The roots that all proxies trust in this phase, without those to be acknowledged.
    pub fn acknowledged_roots(&self) -> Vec<&Certificate> {
        let current = (self.rotation.phase != Phase::Adopting).then_some(&self.current);
        let cas = current.into_iter().chain(&self.previous);
        cas.flat_map(Ca::roots).chain(&self.kept).collect()
    }

    /// Enters a phase.
    pub(super) fn enter(&mut self, phase: Phase, now: SystemTime, reason: &str) {
        self.rotation.phase = phase;
        self.rotation.since = seconds(now);
        self.rotation.reason = reason.to_owned();
        self.rotation.current = self.current.certificate().fingerprint();
    }
}

/// A digest of fields.
pub(super) fn fields_digest(fields: &Fields) -> String {
    let mut digest = Context::new(&SHA256);
    for (name, value) in fields {
        for part in [name.as_bytes(), value] {
            digest.update(&(part.len() as u64).to_be_bytes());
            digest.update(part);
        }
    }
    hex(&digest.finish().as_ref()[..8])
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, IsCa, SignatureAlgorithm};

    use super::*;
    use crate::authority::testing::{YEAR, operator_ca, secret, start};

    fn error(fields: &Fields) -> String {
        CaState::read(fields, start()).unwrap_err().to_string()
    }

    const P256: &SignatureAlgorithm = &rcgen::PKCS_ECDSA_P256_SHA256;

    #[test]
    fn generated_ca_round_trips() {
        let state = CaState::generate("cluster.local", start(), YEAR).unwrap();
        assert_eq!(CaState::read(&state.write(), start()).unwrap(), state);
        assert!(state.current.is_generated());
        let subject = &state.current.certificate().subject;
        assert!(
            subject.starts_with("O=cluster.local, serialNumber=")
                && subject.ends_with(", CN=diy-service-mesh CA"),
            "{subject}"
        );
        assert_eq!(
            (state.current.issued_at(), state.current.not_after()),
            (start(), start() + YEAR)
        );
        assert_eq!(state.roots(), [state.current.certificate()]);
        assert!(
            state
                .write()
                .keys()
                .all(|name| FIELDS.contains(&name.as_str()))
        );
        assert!(!format!("{state:?}").contains("PRIVATE"));
    }

    #[test]
    fn keeps_the_ca_of_an_operator_with_any_key() {
        for algorithm in [P256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
            let root = operator_ca("root", None, algorithm, |_| {});
            let (middle, issuer) = {
                let middle = operator_ca("middle", Some(&root), algorithm, |_| {});
                let issuer = operator_ca("issuer", Some(&middle), algorithm, |_| {});
                (middle, issuer)
            };
            let alone = CaState::read(&secret(&[&root], &[]), start()).unwrap();
            assert!(!alone.current.is_generated());
            let chained = secret(&[&issuer, &middle], &[&root]);
            let read = CaState::read(&chained, start()).unwrap();
            assert_eq!(read.roots().len(), 1);
            assert_eq!(read.roots()[0].subject, "CN=root");
            let written = read.write();
            assert_eq!(
                written["tls.crt"].as_slice(),
                chained["tls.crt"].as_slice(),
                "{algorithm:?}"
            );
            assert_eq!(written["tls.key"], chained["tls.key"]);
        }
    }

    #[test]
    fn next_ca_that_cannot_be_used_does_not_make_the_ca_unreadable() {
        let mut state = CaState::generate("cluster.local", start(), YEAR).unwrap();
        state.next = Some(Ca::generate("cluster.local", start(), YEAR / 2).unwrap());
        state.enter(Phase::Announcing, start(), "requested");
        let written = state.write();
        let with = |name: &str, value: &str| {
            let mut fields = written.clone();
            fields.insert(name.to_owned(), value.as_bytes().to_vec());
            fields
        };
        let ended = start() + YEAR / 2;
        for (fields, now, problem) in [
            (
                with("next.crt", "rubbish"),
                start(),
                "next.crt cannot be used",
            ),
            (with("next.key", ""), start(), "next.key is missing"),
            (with("next.roots.crt", "rubbish"), start(), "next.roots.crt"),
            (written.clone(), ended, "next.crt cannot be used"),
        ] {
            let read = CaState::read(&fields, now).unwrap();
            assert_eq!((&read.current, &read.next), (&state.current, &None));
            assert_eq!(read.rotation.phase, Phase::Steady);
            assert!(read.rotation.reason.contains(problem), "{read:?}");
        }
    }

    #[test]
    fn rejects_unusable_ca_with_field_and_reason() {
        let good = operator_ca("good", None, P256, |_| {});
        let other = operator_ca("other", None, P256, |_| {});
        let issuer = operator_ca("issuer", Some(&good), P256, |_| {});
        let whole = || secret(&[&good], &[]);
        let with = |name: &str, value: &str| {
            let mut all = whole();
            all.insert(name.to_owned(), value.as_bytes().to_vec());
            all
        };
        let without = |name: &str| {
            let mut all = whole();
            all.remove(name);
            all
        };
        let ended = operator_ca("ended", None, P256, |params| {
            params.not_after = (start() - Duration::from_secs(60)).into()
        });
        let later = operator_ca("later", None, P256, |params| {
            params.not_before = (start() + YEAR / 2).into()
        });
        let leaf = operator_ca("leaf", None, P256, |params| params.is_ca = IsCa::NoCa);
        let narrow = operator_ca("narrow", None, P256, |params| {
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0))
        });
        let below = operator_ca("below", Some(&narrow), P256, |_| {});
        let old_root = operator_ca("old-root", None, P256, |params| {
            params.not_after = (start() - Duration::from_secs(60)).into()
        });
        let orphan = operator_ca("orphan", Some(&old_root), P256, |_| {});
        for (fields, parts) in [
            (without("tls.crt"), ["tls.crt", "missing"]),
            (without("tls.key"), ["tls.key", "missing"]),
            (with("tls.crt", "rubbish"), ["tls.crt", "no PEM block"]),
            (with("tls.key", "rubbish"), ["tls.key", "no private key"]),
            (
                with("tls.key", &other.key.serialize_pem()),
                ["tls.key", "does not belong"],
            ),
            (
                with("ca.crt", &other.pem),
                ["ca.crt", "none of its certificates has signed"],
            ),
            (
                with(
                    "ca.crt",
                    "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
                ),
                ["ca.crt", "certificate number 1"],
            ),
            (with("rotation.json", "{"), ["rotation.json", "remove it"]),
            (secret(&[&issuer], &[]), ["ca.crt", "put the root there"]),
            (
                secret(&[&issuer, &other], &[&good]),
                ["tls.crt", "not signed by the certificate after it"],
            ),
            (secret(&[&ended], &[]), ["tls.crt", "expired"]),
            (secret(&[&later], &[]), ["tls.crt", "not valid before"]),
            (
                secret(&[&leaf], &[]),
                ["tls.crt", "not a certificate authority"],
            ),
            (secret(&[&below], &[&narrow]), ["ca.crt", "path length"]),
            (secret(&[&orphan], &[&old_root]), ["ca.crt", "has expired"]),
        ] {
            let error = error(&fields);
            assert!(
                parts.iter().all(|part| error.contains(part)),
                "{parts:?}: {error}"
            );
            assert!(!error.contains("PRIVATE"), "{error}");
        }
    }

    #[test]
    fn removal_of_the_other_ca_ends_the_rotation() {
        let mut state = CaState::generate("cluster.local", start(), YEAR).unwrap();
        state.next = Some(Ca::generate("cluster.local", start(), YEAR).unwrap());
        state.rotation.phase = Phase::Announcing;
        let mut fields = state.write();
        assert_eq!(
            CaState::read(&fields, start()).unwrap().rotation.phase,
            Phase::Announcing
        );
        fields.remove("next.crt");
        assert_eq!(
            CaState::read(&fields, start()).unwrap().rotation.phase,
            Phase::Steady
        );
    }
}
