//! What the store's fields hold: the CA that signs, the ones before and after it in a rotation, and
//! how far that has got. Read and checked here, so that what is loaded can sign; made anew here.
//! Pure but for the randomness of new keys: the time is passed in.
//!
//! An operator's own CA, also an intermediate, is used as it is. One that cannot be used is refused
//! with the field and the reason; it is never replaced by one of ours.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::Identity;
use rustls::RootCertStore;
use rustls::pki_types::UnixTime;
use rustls::server::WebPkiClientVerifier;

use super::rotation::{Phase, Progress};
use super::{NAME, self_signed};
use crate::issuer::{BACKDATED, Certificate, Issuer, IssuerError};

/// The fields' names. All of them, and no others, are the mesh's own.
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
    "kept.crt",
    "rotation.json",
];
const CURRENT: Names = Names {
    chain: "tls.crt",
    key: "tls.key",
    roots: "ca.crt",
};
const NEXT: Names = Names {
    chain: "next.crt",
    key: "next.key",
    roots: "next.roots.crt",
};
const PREVIOUS: Names = Names {
    chain: "previous.crt",
    key: "previous.key",
    roots: "previous.roots.crt",
};
const KEPT_ROOTS: &str = "kept.crt";
const ROTATION: &str = "rotation.json";

/// The fields of a store, by name.
pub type Fields = BTreeMap<String, Vec<u8>>;

/// Why fields cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// A field that must be there is not.
    #[error("{field} is missing: {hint}")]
    Missing {
        /// The field.
        field: &'static str,
        /// What belongs there.
        hint: &'static str,
    },
    /// A field holds something else than it should.
    #[error("{field} cannot be used: {reason}")]
    Field {
        /// The field.
        field: &'static str,
        /// Why.
        reason: String,
    },
    /// A new CA could not be made.
    #[error("a CA cannot be made: {0}")]
    Make(String),
}

/// Everything that the replicas of the controller share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    /// The CA of the fields tls.crt, tls.key and ca.crt.
    pub current: Ca,
    /// The CA that signs after all proxies trust it.
    pub next: Option<Ca>,
    /// The one that signed before; its leaves may still be in use.
    pub previous: Option<Ca>,
    /// Further roots that stay trusted until the rotation ends.
    pub kept: Vec<Certificate>,
    /// How far a rotation has got.
    pub progress: Progress,
}

impl Material {
    /// Made anew.
    pub fn make(trust_domain: &str, now: SystemTime, life: Duration) -> Result<Material, Unusable> {
        let current = Ca::make(trust_domain, now, life)?;
        let progress = Progress::steady(now, "made by the controller", &current);
        Ok(Material {
            current,
            next: None,
            previous: None,
            kept: Vec::new(),
            progress,
        })
    }

    /// Reads and checks the fields.
    pub fn read(fields: &Fields, now: SystemTime) -> Result<Material, Unusable> {
        let current = Ca::read(fields, &CURRENT, now, Use::Signs)?;
        let given = |names: &Names| fields.contains_key(names.chain);
        let next = if given(&NEXT) {
            Some(Ca::read(fields, &NEXT, now, Use::Signs)?)
        } else {
            None
        };
        let previous = if given(&PREVIOUS) {
            Some(Ca::read(fields, &PREVIOUS, now, Use::Trusted)?)
        } else {
            None
        };
        let kept = certificates(fields, KEPT_ROOTS)?.unwrap_or_default();
        let mut progress: Progress = match fields.get(ROTATION) {
            None => Progress::default(),
            Some(bytes) => serde_json::from_slice(bytes).map_err(|error| Unusable::Field {
                field: ROTATION,
                reason: format!("{error}; remove it to begin in the phase steady"),
            })?,
        };
        // Who takes a partner out by hand has ended the rotation.
        let partner = match progress.phase {
            Phase::Steady => true,
            Phase::Announcing => next.is_some(),
            Phase::Adopting => previous
                .as_ref()
                .is_some_and(|previous| previous.signs.is_some()),
            Phase::Switched => previous.is_some(),
        };
        if !partner {
            progress.phase = Phase::Steady;
        }
        Ok(Material {
            current,
            next,
            previous,
            kept,
            progress,
        })
    }

    /// As fields. What is absent here shall be absent there.
    pub fn write(&self) -> Fields {
        let mut fields = Fields::new();
        self.current.write(&mut fields, &CURRENT);
        self.next
            .iter()
            .for_each(|next| next.write(&mut fields, &NEXT));
        self.previous
            .iter()
            .for_each(|previous| previous.write(&mut fields, &PREVIOUS));
        if !self.kept.is_empty() {
            fields.insert(
                KEPT_ROOTS.to_owned(),
                self.kept
                    .iter()
                    .map(|root| root.pem.as_str())
                    .collect::<String>()
                    .into_bytes(),
            );
        }
        fields.insert(
            ROTATION.to_owned(),
            serde_json::to_vec(&self.progress).expect("numbers and texts are JSON"),
        );
        fields
    }

    /// The CA that signs in this phase.
    pub fn signer(&self) -> &Ca {
        match (&self.progress.phase, &self.previous) {
            (Phase::Adopting, Some(previous)) => previous,
            _ => &self.current,
        }
    }

    /// All roots to trust, each once, in the same order on every replica.
    pub fn roots(&self) -> Vec<&Certificate> {
        let all = [
            Some(&self.current),
            self.next.as_ref(),
            self.previous.as_ref(),
        ];
        let mut roots: Vec<&Certificate> = all
            .into_iter()
            .flatten()
            .flat_map(Ca::roots)
            .chain(&self.kept)
            .collect();
        roots.sort_by(|one, other| one.der.cmp(&other.der));
        roots.dedup_by(|one, other| one.der == other.der);
        roots
    }

    /// The roots that proxies trust already in this phase: those that wait to be acknowledged are
    /// left out.
    pub fn acknowledged_roots(&self) -> Vec<&Certificate> {
        let (current, previous) = (Some(&self.current), self.previous.as_ref());
        let all = match self.progress.phase {
            Phase::Adopting => [None, previous],
            Phase::Steady | Phase::Announcing | Phase::Switched => [current, previous],
        };
        all.into_iter()
            .flatten()
            .flat_map(Ca::roots)
            .chain(&self.kept)
            .collect()
    }
}

/// A CA: its certificate, its key, and the roots that it is trusted by.
#[derive(Clone)]
pub struct Ca {
    /// The issuer, then the intermediates that lead to a root, if any.
    chain: Vec<Certificate>,
    /// Its private key as PEM, as it was given.
    key: Option<Arc<str>>,
    /// The roots as the store gives them; none: the issuer itself is the root.
    given_roots: Vec<Certificate>,
    /// What signs; none for a CA that is only still trusted, and has ended or lost its key.
    signs: Option<Arc<Issuer>>,
}

impl PartialEq for Ca {
    fn eq(&self, other: &Ca) -> bool {
        (&self.chain, &self.key, &self.given_roots)
            == (&other.chain, &other.key, &other.given_roots)
    }
}

impl Eq for Ca {}

/// The key stays out of logs.
impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Ca({}, {})",
            self.issuer().subject,
            &self.issuer().fingerprint()[..16]
        )
    }
}

/// What a CA in the store is for.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    /// It signs, now or next: everything about it must be right.
    Signs,
    /// Its leaves are still trusted: it may have ended.
    Trusted,
}

struct Names {
    chain: &'static str,
    key: &'static str,
    roots: &'static str,
}

impl Ca {
    /// Makes a root CA.
    pub fn make(trust_domain: &str, now: SystemTime, life: Duration) -> Result<Ca, Unusable> {
        let (certificate, key) = self_signed(trust_domain, now, life)
            .map_err(|error| Unusable::Make(error.to_string()))?;
        let made = |name: &str, pem: String| (name.to_owned(), pem.into_bytes());
        let fields = [made(CURRENT.chain, certificate), made(CURRENT.key, key)].into();
        Ca::read(&fields, &CURRENT, now, Use::Signs)
    }

    /// The certificate that signs leaves.
    pub fn issuer(&self) -> &Certificate {
        &self.chain[0]
    }

    /// What signs; none where the CA is only still trusted.
    pub fn signs(&self) -> Option<&Arc<Issuer>> {
        self.signs.as_ref()
    }

    /// What it is trusted by.
    pub fn roots(&self) -> &[Certificate] {
        if self.given_roots.is_empty() {
            &self.chain[..1]
        } else {
            &self.given_roots
        }
    }

    /// Whether the controller has made it; an operator's own is never rotated by itself.
    pub fn is_ours(&self) -> bool {
        self.issuer().common_name == NAME
            && self
                .roots()
                .iter()
                .any(|root| root.der == self.issuer().der)
    }

    /// When the first of its certificates ends that every leaf needs.
    pub fn ends(&self) -> SystemTime {
        let chain = self
            .chain
            .iter()
            .map(|certificate| certificate.not_after)
            .min()
            .expect("a chain has an issuer");
        let root = self
            .roots()
            .iter()
            .map(|root| root.not_after)
            .max()
            .expect("a CA has a root");
        chain.min(root)
    }

    /// When it was made: ours are backdated, for clocks that are behind.
    pub fn begins(&self) -> SystemTime {
        self.issuer().not_before
            + if self.is_ours() {
                BACKDATED
            } else {
                Duration::ZERO
            }
    }

    /// How long it counts.
    pub fn life(&self) -> Duration {
        self.ends()
            .duration_since(self.begins())
            .unwrap_or_default()
    }

    /// Whether a chain from its issuer leads to one of these roots.
    pub fn leads_to(&self, roots: &[&Certificate]) -> bool {
        let is_root =
            |certificate: &Certificate| roots.iter().any(|root| root.der == certificate.der);
        self.chain
            .iter()
            .any(|link| is_root(link) || roots.iter().any(|root| link.is_signed_by(root)))
    }

    fn is_short_enough_for(&self, root: &Certificate) -> bool {
        let below = self
            .chain
            .iter()
            .filter(|link| link.der != root.der)
            .count();
        root.path_length
            .is_none_or(|allowed| below <= allowed as usize)
    }

    fn read(fields: &Fields, names: &Names, now: SystemTime, purpose: Use) -> Result<Ca, Unusable> {
        let missing = |field, hint| Unusable::Missing { field, hint };
        let chain = certificates(fields, names.chain)?.ok_or(missing(
            names.chain,
            "the CA's certificate belongs there, as PEM",
        ))?;
        let given_roots = certificates(fields, names.roots)?.unwrap_or_default();
        let key = fields.get(names.key).filter(|key| !key.is_empty());
        let wrong_key = |reason: &str| Unusable::Field {
            field: names.key,
            reason: reason.to_owned(),
        };
        let text = |key: &Vec<u8>| {
            std::str::from_utf8(key)
                .map(Arc::from)
                .map_err(|_| wrong_key("it is not PEM, it is not even text"))
        };
        let key: Option<Arc<str>> = key.map(text).transpose()?;
        let mut ca = Ca {
            chain,
            key,
            given_roots,
            signs: None,
        };
        let usable = match &ca.key {
            None => Err(missing(
                names.key,
                "the CA's private key belongs there, as PEM",
            )),
            Some(key) => ca.usable(key, names, now),
        };
        match usable {
            Ok(issuer) => ca.signs = Some(Arc::new(issuer)),
            Err(_) if purpose == Use::Trusted => {}
            Err(error) => return Err(error),
        }
        Ok(ca)
    }

    /// What signs by it, once all about it is right.
    fn usable(&self, key: &str, names: &Names, now: SystemTime) -> Result<Issuer, Unusable> {
        let wrong = |field, reason| Err(Unusable::Field { field, reason });
        let issuer =
            Issuer::from_pem(&self.chain_pem(), key, now).map_err(|error| match error {
                IssuerError::NoKey | IssuerError::OtherKey { .. } => Unusable::Field {
                    field: names.key,
                    reason: error.to_string(),
                },
                error => Unusable::Field {
                    field: names.chain,
                    reason: error.to_string(),
                },
            })?;
        if self.given_roots.is_empty() && !self.issuer().is_self_signed() {
            let (who, above) = (&self.issuer().subject, &self.issuer().issuer);
            return wrong(
                names.roots,
                format!(
                    "it is missing, and {who} is an intermediate, signed by {above}; put the root there"
                ),
            );
        }
        if let Some(root) = self.given_roots.iter().find(|root| !root.may_sign) {
            return wrong(
                names.roots,
                format!("the certificate of {} is no CA's", root.subject),
            );
        }
        if !self.leads_to(&self.roots().iter().collect::<Vec<_>>()) {
            return wrong(
                names.roots,
                format!(
                    "none of its certificates has signed the chain in {}",
                    names.chain
                ),
            );
        }
        let valid: Vec<&Certificate> = self
            .roots()
            .iter()
            .filter(|root| root.not_after > now)
            .collect();
        if !self.leads_to(&valid) {
            return wrong(
                names.roots,
                format!(
                    "the root that the chain in {} leads to has ended",
                    names.chain
                ),
            );
        }
        // Some verifiers hold a root to this, and some do not.
        let wide: Vec<&Certificate> = valid
            .into_iter()
            .filter(|root| self.is_short_enough_for(root))
            .collect();
        if !self.leads_to(&wide) {
            return wrong(
                names.roots,
                format!(
                    "the root's path length allows no chain as long as the one in {}",
                    names.chain
                ),
            );
        }
        self.verify_a_leaf(&issuer, names, now)?;
        Ok(issuer)
    }

    /// Signs a leaf and has it verified by the roots as a proxy does: what that finds is found
    /// before a proxy does.
    fn verify_a_leaf(
        &self,
        issuer: &Issuer,
        names: &Names,
        now: SystemTime,
    ) -> Result<(), Unusable> {
        let refused = |error: &dyn fmt::Display| Unusable::Field {
            field: names.chain,
            reason: format!("proxies would refuse what it signs: {error}"),
        };
        let somebody = Identity::new("cluster.local", "none", "none").expect("these are names");
        let leaf = issuer
            .sign_serving(Some(somebody.as_str()), &[], &[], now, BACKDATED)
            .map_err(|error| refused(&error))?;
        let mut roots = RootCertStore::empty();
        for root in self.roots() {
            let added = roots.add(root.der.clone());
            added.map_err(|error| Unusable::Field {
                field: names.roots,
                reason: format!("{}: {error}", root.subject),
            })?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| refused(&error))?;
        let now = UnixTime::since_unix_epoch(
            now.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default(),
        );
        let (leaf, intermediates) = leaf
            .chain
            .split_first()
            .expect("a chain begins with its leaf");
        verifier
            .verify_client_cert(leaf, intermediates, now)
            .map(|_| ())
            .map_err(|error| refused(&error))
    }

    /// The chain as PEM, the issuer first.
    fn chain_pem(&self) -> String {
        self.chain
            .iter()
            .map(|certificate| certificate.pem.as_str())
            .collect()
    }

    fn write(&self, fields: &mut Fields, names: &Names) {
        fields.insert(names.chain.to_owned(), self.chain_pem().into_bytes());
        if let Some(key) = &self.key {
            fields.insert(names.key.to_owned(), key.as_bytes().to_vec());
        }
        if !self.given_roots.is_empty() {
            let pem: String = self
                .given_roots
                .iter()
                .map(|root| root.pem.as_str())
                .collect();
            fields.insert(names.roots.to_owned(), pem.into_bytes());
        }
    }
}

fn certificates(
    fields: &Fields,
    field: &'static str,
) -> Result<Option<Vec<Certificate>>, Unusable> {
    let pem = fields.get(field).filter(|pem| !pem.is_empty());
    pem.map(|pem| Certificate::all(pem).map_err(|reason| Unusable::Field { field, reason }))
        .transpose()
}

#[cfg(test)]
pub(super) mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose,
        SignatureAlgorithm,
    };

    use super::*;

    const YEAR: Duration = Duration::from_secs(365 * 86_400);

    pub(in crate::authority) fn start() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    /// An operator's: a certificate and its key as PEM, signed by another or by itself.
    pub(in crate::authority) struct Made {
        params: CertificateParams,
        key: KeyPair,
        pub(in crate::authority) pem: String,
    }

    pub(in crate::authority) fn operators(
        name: &str,
        by: Option<&Made>,
        algorithm: &'static SignatureAlgorithm,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Made {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.not_before = start().into();
        params.not_after = (start() + YEAR).into();
        change(&mut params);
        let key = KeyPair::generate_for(algorithm).unwrap();
        let certificate = match by {
            None => params.self_signed(&key).unwrap(),
            Some(by) => params
                .signed_by(&key, &rcgen::Issuer::from_params(&by.params, &by.key))
                .unwrap(),
        };
        Made {
            pem: certificate.pem(),
            params,
            key,
        }
    }

    pub(in crate::authority) fn fields(all: &[(&str, &str)]) -> Fields {
        all.iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
            .collect()
    }

    pub(in crate::authority) fn secret(chain: &[&Made], roots: &[&Made]) -> Fields {
        let pem = |all: &[&Made]| all.iter().map(|made| made.pem.as_str()).collect::<String>();
        let mut all = fields(&[
            ("tls.crt", &pem(chain)),
            ("tls.key", &chain[0].key.serialize_pem()),
        ]);
        if !roots.is_empty() {
            all.extend(fields(&[("ca.crt", &pem(roots))]));
        }
        all
    }

    fn refusal(fields: &Fields) -> String {
        Material::read(fields, start()).unwrap_err().to_string()
    }

    const P256: &SignatureAlgorithm = &rcgen::PKCS_ECDSA_P256_SHA256;

    #[test]
    fn what_is_made_is_read_again_as_it_was_and_is_ours() {
        let made = Material::make("cluster.local", start(), YEAR).unwrap();
        assert_eq!(Material::read(&made.write(), start()).unwrap(), made);
        assert!(made.current.is_ours());
        assert_eq!(
            made.current.issuer().subject,
            "O=cluster.local, CN=diy-service-mesh CA"
        );
        assert_eq!(
            (made.current.begins(), made.current.ends()),
            (start(), start() + YEAR)
        );
        assert_eq!(made.roots(), [made.current.issuer()]);
        assert!(
            made.write()
                .keys()
                .all(|name| FIELDS.contains(&name.as_str()))
        );
        assert!(!format!("{made:?}").contains("PRIVATE"));
    }

    #[test]
    fn an_operators_root_or_intermediate_is_used_as_it_is_whatever_its_key() {
        for algorithm in [P256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
            let root = operators("root", None, algorithm, |_| {});
            let (middle, issuer) = {
                let middle = operators("middle", Some(&root), algorithm, |_| {});
                let issuer = operators("issuer", Some(&middle), algorithm, |_| {});
                (middle, issuer)
            };
            let alone = Material::read(&secret(&[&root], &[]), start()).unwrap();
            assert!(!alone.current.is_ours());
            let chained = secret(&[&issuer, &middle], &[&root]);
            let read = Material::read(&chained, start()).unwrap();
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
    fn a_broken_ca_is_refused_with_the_field_and_the_reason() {
        let good = operators("good", None, P256, |_| {});
        let other = operators("other", None, P256, |_| {});
        let issuer = operators("issuer", Some(&good), P256, |_| {});
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
        let ended = operators("ended", None, P256, |params| {
            params.not_after = (start() - Duration::from_secs(60)).into()
        });
        let later = operators("later", None, P256, |params| {
            params.not_before = (start() + YEAR / 2).into()
        });
        let leaf = operators("leaf", None, P256, |params| params.is_ca = IsCa::NoCa);
        let narrow = operators("narrow", None, P256, |params| {
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0))
        });
        let below = operators("below", Some(&narrow), P256, |_| {});
        let old_root = operators("old-root", None, P256, |params| {
            params.not_after = (start() - Duration::from_secs(60)).into()
        });
        let orphan = operators("orphan", Some(&old_root), P256, |_| {});
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
            (with("next.crt", &other.pem), ["next.key", "missing"]),
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
            (secret(&[&orphan], &[&old_root]), ["ca.crt", "has ended"]),
        ] {
            let refusal = refusal(&fields);
            assert!(
                parts.iter().all(|part| refusal.contains(part)),
                "{parts:?}: {refusal}"
            );
            assert!(!refusal.contains("PRIVATE"), "{refusal}");
        }
    }

    #[test]
    fn who_takes_a_partner_out_by_hand_has_ended_the_rotation() {
        let mut material = Material::make("cluster.local", start(), YEAR).unwrap();
        material.next = Some(Ca::make("cluster.local", start(), YEAR).unwrap());
        material.progress.phase = Phase::Announcing;
        let mut fields = material.write();
        assert_eq!(
            Material::read(&fields, start()).unwrap().progress.phase,
            Phase::Announcing
        );
        fields.remove("next.crt");
        assert_eq!(
            Material::read(&fields, start()).unwrap().progress.phase,
            Phase::Steady
        );
    }
}
