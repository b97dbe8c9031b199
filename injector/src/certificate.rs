//! The webhook's own certificates: a CA, the serving certificate that it signs, and when which of them is due. Pure but for the
//! randomness of new keys: the time is passed in.
//!
//! It never reads or writes anything: `kubernetes` keeps what is made here in a Secret, `ephemeral` in memory.
//!
//! A CA is replaced in two steps, an [`OVERLAP`] apart: first the next one joins the bundle, later it signs. So whoever has
//! read the bundle within that time trusts the serving certificate at every moment.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a CA lives. Its successor is made at two thirds of it.
pub const CA_LIFE: Duration = Duration::from_secs(365 * DAY.as_secs());
/// How long a serving certificate lives. Its successor is made at two thirds of it.
pub const SERVING_LIFE: Duration = Duration::from_secs(90 * DAY.as_secs());
/// How long the next CA is in the bundle before it signs.
pub const OVERLAP: Duration = Duration::from_secs(60 * 60);
/// How far the clocks of others may be behind.
const SKEW: Duration = Duration::from_secs(5 * 60);

/// Why certificates cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A key or certificate could not be made.
    #[error("a certificate cannot be made: {0}")]
    Make(#[from] rcgen::Error),
    /// A field of the stored material is absent.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A field of the stored material is not what it should be.
    #[error("{0} is not usable: {1}")]
    Unusable(&'static str, String),
}

/// Everything that the webhook's replicas share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    ca: Pair,
    /// In the bundle, and not signing yet.
    next: Option<Pair>,
    /// In the bundle, and not signing any more.
    previous: Option<Certificate>,
    serving: Pair,
}

impl Material {
    /// Makes it all anew.
    pub fn new(names: &Names, now: SystemTime) -> Result<Self, Error> {
        let ca = Pair::ca(now)?;
        let serving = ca.sign(names, now)?;
        Ok(Self {
            ca,
            next: None,
            previous: None,
            serving,
        })
    }

    /// What is due at this time, done; none when nothing is.
    pub fn renewed(&self, names: &Names, now: SystemTime) -> Result<Option<Self>, Error> {
        let mut renewed = self.clone();
        if self.ca.is_due(now) && self.next.is_none() {
            renewed.next = Some(Pair::ca(now)?);
        }
        let ripe = |next: &Pair| {
            now >= next.certificate.not_before + SKEW + OVERLAP || self.ca.certificate.is_over(now)
        };
        if let Some(next) = renewed.next.take_if(|next| ripe(next)) {
            renewed.previous = Some(std::mem::replace(&mut renewed.ca, next).certificate);
        }
        if renewed
            .previous
            .as_ref()
            .is_some_and(|previous| previous.is_over(now))
        {
            renewed.previous = None;
        }
        let serving = &renewed.serving;
        if serving.is_due(now)
            || !serving.certificate.is_signed_by(&renewed.ca.certificate)
            || !names.are_in(&serving.certificate)
        {
            renewed.serving = renewed.ca.sign(names, now)?;
        }
        Ok((renewed != *self).then_some(renewed))
    }

    /// The CAs to trust, as PEM.
    pub fn bundle(&self) -> String {
        let next = self.next.iter().map(|next| &next.certificate);
        let all = [&self.ca.certificate]
            .into_iter()
            .chain(next)
            .chain(&self.previous);
        all.map(|certificate| certificate.pem.as_str()).collect()
    }

    /// What TLS serves.
    pub fn serving(&self) -> Result<Arc<CertifiedKey>, Error> {
        let unusable =
            |error: &dyn std::fmt::Display| Error::Unusable(TLS_CERTIFICATE, error.to_string());
        let certificate = CertificateDer::from_pem_slice(self.serving.certificate.pem.as_bytes())
            .map_err(|error| unusable(&error))?;
        let key = PrivateKeyDer::from_pem_slice(self.serving.key.as_bytes())
            .map_err(|error| unusable(&error))?;
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        CertifiedKey::from_der(vec![certificate], key, &provider)
            .map(Arc::new)
            .map_err(|error| unusable(&error))
    }

    /// When the serving certificate ends.
    pub fn serving_ends(&self) -> SystemTime {
        self.serving.certificate.not_after
    }

    /// When the signing CA ends.
    pub fn ca_ends(&self) -> SystemTime {
        self.ca.certificate.not_after
    }

    /// As the data of a Secret.
    pub fn to_fields(&self) -> BTreeMap<&'static str, Vec<u8>> {
        let mut fields = BTreeMap::new();
        let mut put = |name, pem: &str| fields.insert(name, pem.as_bytes().to_vec());
        put(CA_CERTIFICATE, &self.ca.certificate.pem);
        put(CA_KEY, &self.ca.key);
        put(TLS_CERTIFICATE, &self.serving.certificate.pem);
        put(TLS_KEY, &self.serving.key);
        if let Some(next) = &self.next {
            put(NEXT_CA_CERTIFICATE, &next.certificate.pem);
            put(NEXT_CA_KEY, &next.key);
        }
        if let Some(previous) = &self.previous {
            put(PREVIOUS_CA_CERTIFICATE, &previous.pem);
        }
        fields
    }

    /// From the data of a Secret: all of it checked, so that what is loaded can be served and can sign.
    pub fn from_fields<'a>(field: impl Fn(&str) -> Option<&'a [u8]>) -> Result<Self, Error> {
        let material = Self {
            ca: Pair::read(&field, CA_CERTIFICATE, CA_KEY)?,
            next: field(NEXT_CA_CERTIFICATE)
                .map(|_| Pair::read(&field, NEXT_CA_CERTIFICATE, NEXT_CA_KEY))
                .transpose()?,
            previous: field(PREVIOUS_CA_CERTIFICATE)
                .map(|pem| Certificate::read(pem, PREVIOUS_CA_CERTIFICATE))
                .transpose()?,
            serving: Pair::read(&field, TLS_CERTIFICATE, TLS_KEY)?,
        };
        material.serving()?;
        Ok(material)
    }
}

/// All fields of a Secret that are the material's.
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

/// The names and addresses that the webhook is called by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl Names {
    /// DNS names and IP addresses, as text.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let mut names: Vec<String> = names.into_iter().collect();
        names.sort();
        names.dedup();
        Self(names)
    }

    fn are_in(&self, certificate: &Certificate) -> bool {
        self.0.iter().all(|name| certificate.names.contains(name))
    }
}

/// A certificate and its key, both as PEM.
#[derive(Clone, PartialEq, Eq)]
struct Pair {
    certificate: Certificate,
    key: String,
}

/// The key stays out of logs.
impl std::fmt::Debug for Pair {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Pair")
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

impl Pair {
    fn ca(now: SystemTime) -> Result<Self, Error> {
        let mut params = valid(CertificateParams::default(), now, CA_LIFE);
        params
            .distinguished_name
            .push(DnType::CommonName, "diy-service-mesh injector CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let certificate = params.self_signed(&key)?;
        Ok(Self {
            certificate: Certificate::read(certificate.pem().as_bytes(), CA_CERTIFICATE)?,
            key: key.serialize_pem(),
        })
    }

    fn sign(&self, names: &Names, now: SystemTime) -> Result<Self, Error> {
        let issuer =
            Issuer::from_ca_cert_pem(&self.certificate.pem, KeyPair::from_pem(&self.key)?)?;
        let mut params = valid(CertificateParams::default(), now, SERVING_LIFE);
        params
            .distinguished_name
            .push(DnType::CommonName, "diy-service-mesh injector");
        params.subject_alt_names = names
            .0
            .iter()
            .map(|name| subject_alternative_name(name))
            .collect::<Result<_, _>>()?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let certificate = params.signed_by(&key, &issuer)?;
        Ok(Self {
            certificate: Certificate::read(certificate.pem().as_bytes(), TLS_CERTIFICATE)?,
            key: key.serialize_pem(),
        })
    }

    fn read<'a>(
        field: &impl Fn(&str) -> Option<&'a [u8]>,
        certificate: &'static str,
        key: &'static str,
    ) -> Result<Self, Error> {
        let text = field(key).ok_or(Error::Missing(key))?;
        let text =
            std::str::from_utf8(text).map_err(|error| Error::Unusable(key, error.to_string()))?;
        let pair =
            KeyPair::from_pem(text).map_err(|error| Error::Unusable(key, error.to_string()))?;
        let certificate = Certificate::read(
            field(certificate).ok_or(Error::Missing(certificate))?,
            certificate,
        )?;
        if certificate.public_key != pair.public_key_raw() {
            return Err(Error::Unusable(
                key,
                "it is not the key of its certificate".into(),
            ));
        }
        Ok(Self {
            certificate,
            key: text.into(),
        })
    }

    /// Two thirds of its life are over.
    fn is_due(&self, now: SystemTime) -> bool {
        let Certificate {
            not_before,
            not_after,
            ..
        } = self.certificate;
        let life = not_after.duration_since(not_before).unwrap_or_default();
        now >= not_before + life * 2 / 3
    }
}

fn valid(mut params: CertificateParams, now: SystemTime, life: Duration) -> CertificateParams {
    params.not_before = (now - SKEW).into();
    params.not_after = (now + life).into();
    params
}

fn subject_alternative_name(name: &str) -> Result<SanType, rcgen::Error> {
    match name.parse::<IpAddr>() {
        Ok(address) => Ok(SanType::IpAddress(address)),
        Err(_) => Ok(SanType::DnsName(name.try_into()?)),
    }
}

/// A certificate, and what of it decisions are made by.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Certificate {
    pem: String,
    not_before: SystemTime,
    not_after: SystemTime,
    public_key: Vec<u8>,
    names: Vec<String>,
}

impl Certificate {
    fn read(pem: &[u8], field: &'static str) -> Result<Self, Error> {
        let unusable = |error: String| Error::Unusable(field, error);
        let pem = std::str::from_utf8(pem).map_err(|error| unusable(error.to_string()))?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|error| unusable(error.to_string()))?;
        let parsed = parse(&der).ok_or_else(|| unusable("it is no X.509 certificate".into()))?;
        let time = |seconds: i64| {
            SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
        };
        let names = match parsed.subject_alternative_name() {
            Ok(Some(names)) => names.value.general_names.iter().filter_map(name).collect(),
            _ => Vec::new(),
        };
        Ok(Self {
            pem: pem.into(),
            not_before: time(parsed.validity.not_before.timestamp()),
            not_after: time(parsed.validity.not_after.timestamp()),
            public_key: parsed.public_key().subject_public_key.data.to_vec(),
            names,
        })
    }

    fn is_over(&self, now: SystemTime) -> bool {
        now >= self.not_after
    }

    fn is_signed_by(&self, ca: &Self) -> bool {
        let der =
            |certificate: &Self| CertificateDer::from_pem_slice(certificate.pem.as_bytes()).ok();
        let (Some(own), Some(ca)) = (der(self), der(ca)) else {
            return false;
        };
        let (Some(own), Some(ca)) = (parse(&own), parse(&ca)) else {
            return false;
        };
        own.issuer() == ca.subject() && own.verify_signature(Some(ca.public_key())).is_ok()
    }
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    x509_parser::parse_x509_certificate(der)
        .ok()
        .map(|(_, certificate)| certificate)
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).into()),
        GeneralName::IPAddress(octets) => match octets.len() {
            4 => <[u8; 4]>::try_from(*octets)
                .ok()
                .map(|octets| IpAddr::from(octets).to_string()),
            _ => <[u8; 16]>::try_from(*octets)
                .ok()
                .map(|octets| IpAddr::from(octets).to_string()),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};
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

    /// As a caller that trusts `bundle` sees it.
    fn is_trusted(bundle: &str, material: &Material, name: &str, now: SystemTime) -> bool {
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

    fn due(material: &Material, now: SystemTime) -> Option<Material> {
        material
            .renewed(&names(), now)
            .expect("certificates can be made")
    }

    #[test]
    fn what_is_made_is_trusted_by_its_names_and_nothing_is_due() {
        let material = Material::new(&names(), start()).expect("made");
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
            is_trusted(&material.bundle(), &material, "::1", start() - SKEW),
            "by a clock that is behind"
        );
        assert_eq!(due(&material, start()), None);
        assert_eq!(due(&material, start() + DAY * 59), None);
    }

    #[test]
    fn the_serving_certificate_is_renewed_at_two_thirds_of_its_life_by_the_same_ca() {
        let material = Material::new(&names(), start()).expect("made");
        let now = start() + DAY * 60;
        let renewed = due(&material, now).expect("due");
        assert_eq!(renewed.bundle(), material.bundle());
        assert!(renewed.serving_ends() >= now + DAY * 89);
        assert!(is_trusted(&material.bundle(), &renewed, "::1", now));
        assert_eq!(due(&renewed, now), None);
    }

    #[test]
    fn a_new_name_gets_a_new_serving_certificate() {
        let material = Material::new(&names(), start()).expect("made");
        let more = Names::new(["injector.service-mesh.svc".into(), "new.example".into()]);
        let renewed = material
            .renewed(&more, start())
            .expect("made")
            .expect("due");
        assert!(is_trusted(
            &material.bundle(),
            &renewed,
            "new.example",
            start()
        ));
    }

    #[test]
    fn over_three_years_every_bundle_of_the_last_hour_trusts_what_is_served() {
        let mut material = Material::new(&names(), start()).expect("made");
        let (mut bundles, mut cas) = (vec![material.bundle()], vec![material.ca.clone()]);
        let mut now = start();
        while now < start() + DAY * 3 * 365 {
            assert!(
                material.ca_ends() > material.serving_ends() && material.serving_ends() > now,
                "{now:?}"
            );
            // Half an hour where the hour of overlap runs, to see every side of it; else four days.
            now += if material.next.is_some() {
                OVERLAP / 2
            } else {
                DAY * 4
            };
            let Some(renewed) = due(&material, now) else {
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
    fn the_next_ca_waits_for_its_hour_before_it_signs() {
        let material = Material::new(&names(), start()).expect("made");
        let now = start() + DAY * 244;
        let waiting = due(&material, now).expect("due");
        assert!(waiting.next.is_some() && waiting.ca == material.ca);
        assert_eq!(due(&waiting, now + OVERLAP - Duration::from_secs(1)), None);
        let signing = due(&waiting, now + OVERLAP).expect("due");
        assert_eq!(Some(&signing.ca), waiting.next.as_ref());
        assert_eq!(signing.bundle().len(), waiting.bundle().len());
        assert!(is_trusted(
            &waiting.bundle(),
            &signing,
            "::1",
            now + OVERLAP
        ));
        assert!(
            signing.bundle().contains(&material.ca.certificate.pem),
            "who still serves the old certificate is trusted"
        );
    }

    #[test]
    fn after_years_in_a_drawer_all_is_made_anew_at_once() {
        let material = Material::new(&names(), start()).expect("made");
        let now = start() + DAY * 1000;
        let renewed = due(&material, now).expect("due");
        assert!(is_trusted(&renewed.bundle(), &renewed, "::1", now));
        assert_eq!(due(&renewed, now), None);
    }

    #[test]
    fn a_secret_gives_back_what_was_put_in() {
        let plain = Material::new(&names(), start()).expect("made");
        let waiting = due(&plain, start() + DAY * 244).expect("due");
        let signing = due(&waiting, start() + DAY * 245).expect("due");
        for material in [plain, waiting, signing] {
            let fields = material.to_fields();
            let read = Material::from_fields(|name| fields.get(name).map(Vec::as_slice))
                .expect("readable");
            assert_eq!(read, material);
            assert!(fields.keys().all(|name| FIELDS.contains(name)));
        }
    }

    #[test]
    fn a_secret_that_cannot_be_used_is_refused_with_the_field_that_is_wrong() {
        let material = Material::new(&names(), start()).expect("made");
        let other = Material::new(&names(), start()).expect("made");
        let refusal = |name: &'static str, value: Option<Vec<u8>>| {
            let mut fields = material.to_fields();
            match value {
                None => fields.remove(name),
                Some(value) => fields.insert(name, value),
            };
            let read = Material::from_fields(|name| fields.get(name).map(Vec::as_slice));
            read.expect_err("refused").to_string()
        };
        assert_eq!(refusal("tls.key", None), "tls.key is missing");
        assert_eq!(refusal("ca.crt", None), "ca.crt is missing");
        assert!(refusal("tls.crt", Some(b"x".to_vec())).starts_with("tls.crt is not usable"));
        assert!(refusal("ca.key", Some(vec![0xff])).starts_with("ca.key is not usable"));
        assert_eq!(
            refusal("tls.key", Some(other.to_fields()["tls.key"].clone())),
            "tls.key is not usable: it is not the key of its certificate"
        );
        assert_eq!(
            refusal("ca.key", Some(other.to_fields()["ca.key"].clone())),
            "ca.key is not usable: it is not the key of its certificate"
        );
    }

    #[test]
    fn keys_stay_out_of_logs() {
        let material = Material::new(&names(), start()).expect("made");
        assert!(!format!("{material:?}").contains("PRIVATE KEY"));
    }
}
