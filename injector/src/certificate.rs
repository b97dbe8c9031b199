//! The webhook's certificates: a private CA, the serving certificate that it signs, and the renewal
//! schedule. Pure, apart from key generation: the caller passes the time.
//!
//! `kubernetes` stores them in a Secret, `ephemeral` keeps them in memory.
//!
//! A CA is replaced in two steps, [`OVERLAP`] apart: the next CA first joins the bundle and later
//! signs. A client that has read the bundle within that time trusts the serving certificate at
//! every moment.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_issuer::{
    BACKDATED, Certificate, Issuer, IssuerError, SignError, pem, private_key_pem, self_signed,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::CertifiedKey;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Lifetime of a CA. The next one is generated after two thirds of it.
pub const CA_LIFETIME: Duration = Duration::from_secs(365 * DAY.as_secs());
/// Lifetime of a serving certificate. The next one is generated after two thirds of it.
pub const SERVING_LIFETIME: Duration = Duration::from_secs(90 * DAY.as_secs());
/// Time that the next CA spends in the bundle before it signs.
pub const OVERLAP: Duration = Duration::from_secs(60 * 60);

const ORGANIZATION: &str = "diy-service-mesh";
const CA_COMMON_NAME: &str = "diy-service-mesh injector CA";

/// A failure to generate or load certificates.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A certificate was not signed.
    #[error("cannot generate a certificate: {0}")]
    Sign(#[from] SignError),
    /// The CA cannot sign.
    #[error("cannot sign with the CA: {0}")]
    Issuer(#[from] IssuerError),
    /// A field of the Secret is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A field of the Secret is invalid.
    #[error("{0} is invalid: {1}")]
    Invalid(&'static str, String),
}

/// The keys and certificates that all replicas of the webhook share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyMaterial {
    ca: Credential,
    /// In the bundle, does not sign yet.
    next_ca: Option<Credential>,
    /// In the bundle, no longer signs.
    previous_ca: Option<Certificate>,
    serving: Credential,
}

impl KeyMaterial {
    /// Generates a CA and a serving certificate.
    pub fn generate(names: &Names, now: SystemTime) -> Result<Self, Error> {
        let ca = Credential::generate_ca(now)?;
        let serving = ca.sign(names, now)?;
        Ok(Self {
            ca,
            next_ca: None,
            previous_ca: None,
            serving,
        })
    }

    /// Performs the renewals that are due at `now`. Returns `None` if none is.
    pub fn renewed(&self, names: &Names, now: SystemTime) -> Result<Option<Self>, Error> {
        let mut renewed = self.clone();
        renewed.next_ca.take_if(|next| next.is_of_the_future(now));
        if self.ca.is_renewal_due(now) && renewed.next_ca.is_none() {
            renewed.next_ca = Some(Credential::generate_ca(now)?);
        }
        let is_signing_due = |next: &mut Credential| {
            now >= next.certificate.not_before + BACKDATED + OVERLAP
                || self.ca.certificate.has_expired(now)
                || self.ca.is_of_the_future(now)
        };
        if let Some(next) = renewed.next_ca.take_if(is_signing_due) {
            renewed.previous_ca = Some(std::mem::replace(&mut renewed.ca, next).certificate);
        }
        renewed
            .previous_ca
            .take_if(|previous| previous.has_expired(now));
        let serving = &renewed.serving;
        if serving.is_renewal_due(now)
            || !serving.certificate.is_signed_by(&renewed.ca.certificate)
            || !names.are_in(&serving.certificate)
        {
            renewed.serving = renewed.ca.sign(names, now)?;
        }
        Ok((renewed != *self).then_some(renewed))
    }

    /// The CA certificates that clients trust, as PEM.
    pub fn bundle(&self) -> String {
        let next = self.next_ca.iter().map(|next| &next.certificate);
        [&self.ca.certificate]
            .into_iter()
            .chain(next)
            .chain(&self.previous_ca)
            .map(|certificate| certificate.pem.as_str())
            .collect()
    }

    /// The serving certificate and its key, for rustls.
    pub fn serving(&self) -> Result<Arc<CertifiedKey>, Error> {
        self.serving
            .certified_key()
            .map(Arc::new)
            .map_err(|error| Error::Invalid(TLS_CERTIFICATE, error.to_string()))
    }

    /// Expiry of the serving certificate.
    pub fn serving_not_after(&self) -> SystemTime {
        self.serving.certificate.not_after
    }

    /// Expiry of the CA that signs.
    pub fn ca_not_after(&self) -> SystemTime {
        self.ca.certificate.not_after
    }

    /// The data of the Secret.
    pub fn to_fields(&self) -> BTreeMap<&'static str, Vec<u8>> {
        let mut fields = BTreeMap::new();
        let mut insert = |name, pem: &str| fields.insert(name, pem.as_bytes().to_vec());
        insert(CA_CERTIFICATE, &self.ca.certificate.pem);
        insert(CA_KEY, &self.ca.key_pem);
        insert(TLS_CERTIFICATE, &self.serving.certificate.pem);
        insert(TLS_KEY, &self.serving.key_pem);
        if let Some(next) = &self.next_ca {
            insert(NEXT_CA_CERTIFICATE, &next.certificate.pem);
            insert(NEXT_CA_KEY, &next.key_pem);
        }
        if let Some(previous) = &self.previous_ca {
            insert(PREVIOUS_CA_CERTIFICATE, &previous.pem);
        }
        fields
    }

    /// Reads the data of the Secret. Checks that every certificate parses and that every key
    /// matches its certificate.
    pub fn from_fields<'a>(field: impl Fn(&str) -> Option<&'a [u8]>) -> Result<Self, Error> {
        Ok(Self {
            ca: Credential::read(&field, CA_CERTIFICATE, CA_KEY)?,
            next_ca: field(NEXT_CA_CERTIFICATE)
                .map(|_| Credential::read(&field, NEXT_CA_CERTIFICATE, NEXT_CA_KEY))
                .transpose()?,
            previous_ca: field(PREVIOUS_CA_CERTIFICATE)
                .map(|pem| read_certificate(pem, PREVIOUS_CA_CERTIFICATE))
                .transpose()?,
            serving: Credential::read(&field, TLS_CERTIFICATE, TLS_KEY)?,
        })
    }
}

/// The fields of the Secret that the injector owns.
pub const FIELDS: [&str; 7] = [
    CA_CERTIFICATE,
    CA_KEY,
    NEXT_CA_CERTIFICATE,
    NEXT_CA_KEY,
    PREVIOUS_CA_CERTIFICATE,
    TLS_CERTIFICATE,
    TLS_KEY,
];

const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const NEXT_CA_CERTIFICATE: &str = "next-ca.crt";
const NEXT_CA_KEY: &str = "next-ca.key";
const PREVIOUS_CA_CERTIFICATE: &str = "previous-ca.crt";
const TLS_CERTIFICATE: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";

/// The subject alternative names of the serving certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    dns: Vec<String>,
    addresses: Vec<IpAddr>,
}

impl Names {
    /// Sorts DNS names from IP addresses, both given as text.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let (mut dns, mut addresses) = (Vec::new(), Vec::new());
        for name in names {
            match name.parse() {
                Ok(address) => addresses.push(address),
                Err(_) => dns.push(name),
            }
        }
        dns.sort();
        dns.dedup();
        addresses.sort();
        addresses.dedup();
        Self { dns, addresses }
    }

    fn are_in(&self, certificate: &Certificate) -> bool {
        self.dns
            .iter()
            .all(|name| certificate.dns_names.contains(name))
            && self
                .addresses
                .iter()
                .all(|address| certificate.addresses.contains(address))
    }
}

/// A certificate and its private key.
#[derive(Clone, PartialEq, Eq)]
struct Credential {
    certificate: Certificate,
    key_pem: String,
}

/// Omits the key.
impl std::fmt::Debug for Credential {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Credential")
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

impl Credential {
    fn generate_ca(now: SystemTime) -> Result<Self, Error> {
        let (certificate, key_pem) = self_signed(ORGANIZATION, CA_COMMON_NAME, now, CA_LIFETIME)?;
        let certificate = read_certificate(certificate.as_bytes(), CA_CERTIFICATE)?;
        Ok(Self {
            certificate,
            key_pem,
        })
    }

    fn sign(&self, names: &Names, now: SystemTime) -> Result<Self, Error> {
        let issuer = Issuer::from_pem(&self.certificate.pem, &self.key_pem, now)?;
        let (dns, addresses) = (&names.dns, &names.addresses);
        let serving = issuer.sign_serving(None, dns, addresses, now, SERVING_LIFETIME)?;
        let certificate = read_certificate(pem(&serving.chain[0]).as_bytes(), TLS_CERTIFICATE)?;
        Ok(Self {
            certificate,
            key_pem: private_key_pem(&serving.key),
        })
    }

    fn read<'a>(
        field: &impl Fn(&str) -> Option<&'a [u8]>,
        certificate: &'static str,
        key: &'static str,
    ) -> Result<Self, Error> {
        let key_pem = field(key).ok_or(Error::Missing(key))?;
        let pem = field(certificate).ok_or(Error::Missing(certificate))?;
        let credential = Self {
            certificate: read_certificate(pem, certificate)?,
            key_pem: String::from_utf8_lossy(key_pem).into_owned(),
        };
        match credential.certified_key() {
            Ok(_) => Ok(credential),
            Err(rustls::Error::InconsistentKeys(_)) => Err(Error::Invalid(
                key,
                format!("it does not match {certificate}"),
            )),
            Err(error) => Err(Error::Invalid(key, error.to_string())),
        }
    }

    fn certified_key(&self) -> Result<CertifiedKey, rustls::Error> {
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes())
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        CertifiedKey::from_der(vec![self.certificate.der.clone()], key, &provider)
    }

    /// Whether it is not valid yet: the clock of the replica that has generated it was ahead.
    fn is_of_the_future(&self, now: SystemTime) -> bool {
        now < self.certificate.not_before
    }

    /// Whether two thirds of the lifetime have passed, or have not begun.
    fn is_renewal_due(&self, now: SystemTime) -> bool {
        let Certificate {
            not_before,
            not_after,
            ..
        } = self.certificate;
        let lifetime = not_after.duration_since(not_before).unwrap_or_default();
        self.is_of_the_future(now) || now >= not_before + lifetime * 2 / 3
    }
}

/// Reads the first certificate of a PEM text.
fn read_certificate(pem: &[u8], field: &'static str) -> Result<Certificate, Error> {
    Certificate::all(pem)
        .map(|mut all| all.swap_remove(0))
        .map_err(|reason| Error::Invalid(field, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{RootCertStore, client::WebPkiServerVerifier};

    fn names() -> Names {
        Names::new([
            "injector.service-mesh.svc".into(),
            "10.0.0.1".into(),
            "::1".into(),
        ])
    }

    fn start() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    /// Whether a client that trusts `bundle` accepts the serving certificate.
    fn is_trusted(bundle: &str, material: &KeyMaterial, name: &str, now: SystemTime) -> bool {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            roots.add(certificate.expect("PEM")).expect("a root");
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider)
            .build()
            .expect("roots");
        let now = UnixTime::since_unix_epoch(
            now.duration_since(SystemTime::UNIX_EPOCH)
                .expect("after 1970"),
        );
        let serving = material.serving().expect("usable");
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        verifier
            .verify_server_cert(&serving.cert[0], &[], &name, &[], now)
            .is_ok()
    }

    fn renew(material: &KeyMaterial, now: SystemTime) -> Option<KeyMaterial> {
        material
            .renewed(&names(), now)
            .expect("renews certificates")
    }

    #[test]
    fn generates_certificate_that_is_valid_for_its_names() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        for name in ["injector.service-mesh.svc", "10.0.0.1", "::1"] {
            assert!(
                is_trusted(&material.bundle(), &material, name, start()),
                "{name}"
            );
        }
        assert!(!is_trusted(
            &material.bundle(),
            &material,
            "other.service-mesh.svc",
            start()
        ));
        assert!(
            is_trusted(&material.bundle(), &material, "::1", start() - BACKDATED),
            "client clock is behind"
        );
        assert_eq!(renew(&material, start()), None);
        assert_eq!(renew(&material, start() + DAY * 59), None);
    }

    #[test]
    fn certificates_of_the_future_are_replaced_at_once() {
        for ahead in [DAY / 24, DAY, DAY * 30, DAY * 600] {
            // A replica whose clock is ahead has generated all, or renewed what was due for it.
            let generated = KeyMaterial::generate(&names(), start() + ahead);
            let before = KeyMaterial::generate(&names(), start()).expect("generates certificates");
            let renewed = renew(&before, start() + ahead);
            for material in [generated.ok(), renewed].into_iter().flatten() {
                let repaired = renew(&material, start()).unwrap_or(material);
                let bundle = repaired.bundle();
                assert!(is_trusted(&bundle, &repaired, "::1", start()), "{ahead:?}");
                assert_eq!(renew(&repaired, start()), None, "{ahead:?}");
            }
        }
    }

    #[test]
    fn renews_serving_certificate_with_same_ca_after_two_thirds_of_lifetime() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let now = start() + DAY * 60;
        let renewed = renew(&material, now).expect("due");
        assert_eq!(renewed.bundle(), material.bundle());
        assert!(renewed.serving_not_after() >= now + DAY * 89);
        assert!(is_trusted(&material.bundle(), &renewed, "::1", now));
        assert_eq!(renew(&renewed, now), None);
    }

    #[test]
    fn renews_serving_certificate_when_a_name_is_added() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let more = Names::new(["injector.service-mesh.svc".into(), "new.example".into()]);
        let renewed = material
            .renewed(&more, start())
            .expect("generates certificates")
            .expect("due");
        assert!(is_trusted(
            &material.bundle(),
            &renewed,
            "new.example",
            start()
        ));
    }

    #[test]
    fn bundles_of_the_last_hour_trust_serving_certificate_over_three_years() {
        let mut material =
            KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let (mut bundles, mut cas) = (vec![material.bundle()], vec![material.ca.clone()]);
        let mut now = start();
        while now < start() + DAY * 3 * 365 {
            assert!(
                material.ca_not_after() > material.serving_not_after()
                    && material.serving_not_after() > now,
                "{now:?}"
            );
            // Half an hour during the overlap of one hour, else four days.
            now += if material.next_ca.is_some() {
                OVERLAP / 2
            } else {
                DAY * 4
            };
            let Some(renewed) = renew(&material, now) else {
                continue;
            };
            material = renewed;
            cas.push(material.ca.clone());
            assert!(
                is_trusted(bundles.last().expect("one"), &material, "::1", now),
                "{now:?}"
            );
            assert!(
                is_trusted(&material.bundle(), &material, "::1", now),
                "{now:?}"
            );
            bundles.push(material.bundle());
        }
        cas.dedup();
        assert_eq!(cas.len(), 5, "a new CA every eight months");
        assert!(material.bundle().matches("BEGIN").count() <= 3);
    }

    #[test]
    fn next_ca_signs_after_overlap() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let now = start() + DAY * 244;
        let waiting = renew(&material, now).expect("due");
        assert!(waiting.next_ca.is_some() && waiting.ca == material.ca);
        assert_eq!(
            renew(&waiting, now + OVERLAP - Duration::from_secs(1)),
            None
        );
        let signing = renew(&waiting, now + OVERLAP).expect("due");
        assert_eq!(Some(&signing.ca), waiting.next_ca.as_ref());
        assert_eq!(signing.bundle().len(), waiting.bundle().len());
        assert!(is_trusted(
            &waiting.bundle(),
            &signing,
            "::1",
            now + OVERLAP
        ));
        assert!(
            signing.bundle().contains(&material.ca.certificate.pem),
            "replicas that serve the old certificate stay trusted"
        );
    }

    #[test]
    fn replaces_expired_certificates_at_once() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let now = start() + DAY * 1000;
        let renewed = renew(&material, now).expect("due");
        assert!(is_trusted(&renewed.bundle(), &renewed, "::1", now));
        assert_eq!(renew(&renewed, now), None);
    }

    #[test]
    fn secret_fields_round_trip() {
        let plain = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let waiting = renew(&plain, start() + DAY * 244).expect("due");
        let signing = renew(&waiting, start() + DAY * 245).expect("due");
        for material in [plain, waiting, signing] {
            let fields = material.to_fields();
            let read = KeyMaterial::from_fields(|name| fields.get(name).map(Vec::as_slice))
                .expect("readable");
            assert_eq!(read, material);
            assert!(fields.keys().all(|name| FIELDS.contains(name)));
        }
    }

    #[test]
    fn rejects_invalid_secret_and_names_the_field() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let other = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        let error = |name: &'static str, value: Option<Vec<u8>>| {
            let mut fields = material.to_fields();
            match value {
                None => fields.remove(name),
                Some(value) => fields.insert(name, value),
            };
            let read = KeyMaterial::from_fields(|name| fields.get(name).map(Vec::as_slice));
            read.expect_err("invalid").to_string()
        };
        assert_eq!(error("tls.key", None), "tls.key is missing");
        assert_eq!(error("ca.crt", None), "ca.crt is missing");
        assert!(error("tls.crt", Some(b"x".to_vec())).starts_with("tls.crt is invalid"));
        assert!(error("ca.key", Some(vec![0xff])).starts_with("ca.key is invalid"));
        assert_eq!(
            error("tls.key", Some(other.to_fields()["tls.key"].clone())),
            "tls.key is invalid: it does not match tls.crt"
        );
        assert_eq!(
            error("ca.key", Some(other.to_fields()["ca.key"].clone())),
            "ca.key is invalid: it does not match ca.crt"
        );
    }

    #[test]
    fn debug_output_omits_keys() {
        let material = KeyMaterial::generate(&names(), start()).expect("generates certificates");
        assert!(!format!("{material:?}").contains("PRIVATE KEY"));
    }
}
