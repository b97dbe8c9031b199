//! A certificate authority in the store: its chain, its key and its roots. Pure.
//!
//! Every CA is checked when it is read, so that a loaded CA can sign. The CA of an operator, which
//! may be an intermediate, is used as it is. An unusable CA is rejected with the field and the
//! reason; the controller never replaces it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_model::identity::Identity;
use rustls::RootCertStore;
use rustls::pki_types::UnixTime;
use rustls::server::WebPkiClientVerifier;

use super::state::{Fields, StateError};
use super::{NAME, self_signed};
use crate::issuer::{BACKDATED, Certificate, Issuer, IssuerError};

/// The names of a CA's fields.
pub(super) struct FieldNames {
    pub(super) chain: &'static str,
    pub(super) key: &'static str,
    pub(super) roots: &'static str,
}

/// The fields of the CA that an operator may replace.
pub(super) const CURRENT: FieldNames = FieldNames {
    chain: "tls.crt",
    key: "tls.key",
    roots: "ca.crt",
};

/// A certificate authority.
#[derive(Clone)]
pub struct Ca {
    /// The certificate of the issuer, followed by the intermediates above it.
    chain: Vec<Certificate>,
    /// The private key as PEM, as stored.
    key: Option<Arc<str>>,
    /// The stored roots. Empty if the issuer is the root.
    stored_roots: Vec<Certificate>,
    /// `None` if the CA is trusted only: it has expired, or its key is missing.
    issuer: Option<Arc<Issuer>>,
}

impl Ca {
    /// Generates a root CA.
    pub fn generate(
        trust_domain: &str,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<Ca, StateError> {
        let (certificate, key) = self_signed(trust_domain, now, lifetime)?;
        let field = |name: &str, pem: String| (name.to_owned(), pem.into_bytes());
        let fields = [field(CURRENT.chain, certificate), field(CURRENT.key, key)].into();
        Ca::read(&fields, &CURRENT, now)
    }

    /// Reads a CA that signs, now or later.
    pub(super) fn read(
        fields: &Fields,
        names: &FieldNames,
        now: SystemTime,
    ) -> Result<Ca, StateError> {
        let mut ca = Ca::parse(fields, names)?;
        ca.issuer = Some(Arc::new(ca.check(names, now)?));
        Ok(ca)
    }

    /// Reads a CA whose leaves are trusted. It may have expired.
    pub(super) fn read_trusted(
        fields: &Fields,
        names: &FieldNames,
        now: SystemTime,
    ) -> Result<Ca, StateError> {
        let mut ca = Ca::parse(fields, names)?;
        ca.issuer = ca.check(names, now).ok().map(Arc::new);
        Ok(ca)
    }

    /// The certificate of the issuer.
    pub fn certificate(&self) -> &Certificate {
        &self.chain[0]
    }

    /// The issuer, unless the CA is trusted only.
    pub fn issuer(&self) -> Option<&Arc<Issuer>> {
        self.issuer.as_ref()
    }

    /// The trust roots.
    pub fn roots(&self) -> &[Certificate] {
        if self.stored_roots.is_empty() {
            &self.chain[..1]
        } else {
            &self.stored_roots
        }
    }

    /// Whether the controller generated the CA. It does not rotate the CA of an operator.
    pub fn is_generated(&self) -> bool {
        let certificate = self.certificate();
        certificate.common_name == NAME
            && self.roots().iter().any(|root| root.der == certificate.der)
    }

    /// The end of the validity of leaves: the first expiry in the chain, or the expiry of the last
    /// root.
    pub fn not_after(&self) -> SystemTime {
        let chain = self.chain.iter().map(|link| link.not_after).min();
        let root = self.roots().iter().map(|root| root.not_after).max();
        let chain = chain.expect("a chain contains the issuer");
        chain.min(root.expect("a CA has a root"))
    }

    /// The time of issue. Generated certificates are backdated to tolerate clock skew.
    pub fn issued_at(&self) -> SystemTime {
        let not_before = self.certificate().not_before;
        if self.is_generated() {
            not_before + BACKDATED
        } else {
            not_before
        }
    }

    /// The time from issue to expiry.
    pub fn lifetime(&self) -> Duration {
        let lifetime = self.not_after().duration_since(self.issued_at());
        lifetime.unwrap_or_default()
    }

    /// Whether the chain of the issuer ends in one of these roots.
    pub fn chains_to(&self, roots: &[&Certificate]) -> bool {
        let mut links = self.chain.iter();
        links.any(|link| {
            let mut roots = roots.iter();
            roots.any(|root| root.der == link.der || link.is_signed_by(root))
        })
    }

    /// Writes the fields of the CA.
    pub(super) fn write(&self, fields: &mut Fields, names: &FieldNames) {
        let mut insert = |name: &str, text: String| {
            if !text.is_empty() {
                fields.insert(name.to_owned(), text.into_bytes());
            }
        };
        insert(names.chain, pem(&self.chain));
        insert(
            names.key,
            self.key.as_deref().unwrap_or_default().to_owned(),
        );
        insert(names.roots, pem(&self.stored_roots));
    }

    fn parse(fields: &Fields, names: &FieldNames) -> Result<Ca, StateError> {
        let chain = certificates(fields, names.chain)?;
        if chain.is_empty() {
            let hint = "expected the certificate of the CA, as PEM";
            return Err(StateError::missing(names.chain, hint));
        }
        let key = fields.get(names.key).filter(|key| !key.is_empty());
        let key = key.map(|key| std::str::from_utf8(key).map(Arc::from));
        let key = key
            .transpose()
            .map_err(|_| StateError::invalid(names.key, "it is not PEM: it is not UTF-8 text"))?;
        Ok(Ca {
            chain,
            key,
            stored_roots: certificates(fields, names.roots)?,
            issuer: None,
        })
    }

    fn check(&self, names: &FieldNames, now: SystemTime) -> Result<Issuer, StateError> {
        // The rotation replaces a generated CA whose lifetime has not begun. It can sign.
        let now = if self.is_generated() {
            now.max(self.certificate().not_before)
        } else {
            now
        };
        let hint = "expected the private key of the CA, as PEM";
        let key = self.key.as_deref();
        let key = key.ok_or_else(|| StateError::missing(names.key, hint))?;
        let issuer = Issuer::from_pem(&pem(&self.chain), key, now).map_err(|error| {
            let field = match error {
                IssuerError::Key(_) => names.key,
                IssuerError::Chain(_) => names.chain,
            };
            StateError::invalid(field, error)
        })?;
        self.check_roots(names.chain, now)
            .map_err(|reason| StateError::invalid(names.roots, reason))?;
        self.verify_leaf(&issuer, now).map_err(|reason| {
            let reason = format!("proxies would reject what it signs: {reason}");
            StateError::invalid(names.chain, reason)
        })?;
        Ok(issuer)
    }

    fn check_roots(&self, chain: &str, now: SystemTime) -> Result<(), String> {
        let certificate = self.certificate();
        if self.stored_roots.is_empty() && !certificate.is_self_signed() {
            let (subject, above) = (&certificate.subject, &certificate.issuer);
            return Err(format!(
                "it is missing, and {subject} is an intermediate, signed by {above}; put the root there"
            ));
        }
        if let Some(root) = self.stored_roots.iter().find(|root| !root.may_sign) {
            let subject = &root.subject;
            return Err(format!("{subject} is not a certificate authority"));
        }
        let mut roots: Vec<&Certificate> = self.roots().iter().collect();
        if !self.chains_to(&roots) {
            return Err(format!(
                "none of its certificates has signed the chain in {chain}"
            ));
        }
        roots.retain(|root| root.not_after > now);
        if !self.chains_to(&roots) {
            return Err(format!("the root of the chain in {chain} has expired"));
        }
        // Only some verifiers enforce the path length of a root.
        roots.retain(|root| {
            let below = self.chain.iter().filter(|link| link.der != root.der);
            let below = below.count();
            root.path_length.is_none_or(|max| below <= max as usize)
        });
        if !self.chains_to(&roots) {
            return Err(format!(
                "the path length of the root is less than the length of the chain in {chain}"
            ));
        }
        Ok(())
    }

    /// Signs a leaf and verifies it as a proxy does, with these roots.
    fn verify_leaf(&self, issuer: &Issuer, now: SystemTime) -> Result<(), String> {
        let identity = Identity::new("cluster.local", "none", "none").expect("the names are valid");
        let leaf = issuer.sign_serving(Some(identity.as_str()), &[], &[], now, BACKDATED);
        let leaf = leaf.map_err(|error| error.to_string())?;
        let mut roots = RootCertStore::empty();
        for root in self.roots() {
            let added = roots.add(root.der.clone());
            added.map_err(|error| format!("root {}: {error}", root.subject))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| error.to_string())?;
        let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH);
        let now = UnixTime::since_unix_epoch(since_epoch.unwrap_or_default());
        let (leaf, intermediates) = leaf.chain.split_first().expect("a chain contains its leaf");
        let verified = verifier.verify_client_cert(leaf, intermediates, now);
        verified.map(|_| ()).map_err(|error| error.to_string())
    }
}

impl PartialEq for Ca {
    fn eq(&self, other: &Ca) -> bool {
        (&self.chain, &self.key, &self.stored_roots)
            == (&other.chain, &other.key, &other.stored_roots)
    }
}

impl Eq for Ca {}

/// Without the key.
impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let certificate = self.certificate();
        let fingerprint = certificate.fingerprint();
        write!(f, "Ca({}, {})", certificate.subject, &fingerprint[..16])
    }
}

/// The certificates of a field. Empty if the field is missing or empty.
pub(super) fn certificates(
    fields: &Fields,
    field: &'static str,
) -> Result<Vec<Certificate>, StateError> {
    match fields.get(field).filter(|pem| !pem.is_empty()) {
        None => Ok(Vec::new()),
        Some(pem) => Certificate::all(pem).map_err(|reason| StateError::invalid(field, reason)),
    }
}

/// Certificates as PEM.
pub(super) fn pem(certificates: &[Certificate]) -> String {
    certificates.iter().map(|one| one.pem.as_str()).collect()
}
