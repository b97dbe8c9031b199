//! Test certificate authorities, certificates and tokens.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;

/// Default workload of tests.
pub(crate) const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

/// A certificate authority.
pub(crate) struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A root.
    pub fn new(name: &str) -> Self {
        let (params, key) = (Self::params(name), KeyPair::generate().unwrap());
        let certificate = params.self_signed(&key).unwrap().into();
        Self {
            certificate,
            issuer: Issuer::new(params, key),
        }
    }

    /// An intermediate authority issued by this one.
    pub fn intermediate(&self, name: &str) -> Self {
        let (params, key) = (Self::params(name), KeyPair::generate().unwrap());
        let certificate = params.signed_by(&key, &self.issuer).unwrap().into();
        Self {
            certificate,
            issuer: Issuer::new(params, key),
        }
    }

    /// An authority with the key of any certificate, such as a workload's.
    pub fn from_certificate(certificate: CertificateDer<'static>, key: KeyPair) -> Self {
        let issuer = Issuer::from_ca_cert_der(&certificate, key).unwrap();
        Self {
            certificate,
            issuer,
        }
    }

    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    pub fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    pub fn pem(&self) -> String {
        pem(&self.certificate)
    }

    /// Subject key identifier, hexadecimal.
    pub fn key_id(&self) -> String {
        let (_, parsed) = X509Certificate::from_der(&self.certificate).unwrap();
        let id =
            parsed
                .iter_extensions()
                .find_map(|extension| match extension.parsed_extension() {
                    ParsedExtension::SubjectKeyIdentifier(id) => {
                        Some(id.0.iter().map(|byte| format!("{byte:02x}")).collect())
                    }
                    _ => None,
                });
        id.unwrap()
    }

    /// Trust roots with this authority only.
    pub fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate()).unwrap();
        Arc::new(roots)
    }

    /// A certificate valid for an hour, with changes.
    pub fn leaf(
        &self,
        identity: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> CertificateDer<'static> {
        self.leaf_and_key(identity, change).0
    }

    /// A certificate valid for an hour, with changes, and its key.
    pub fn leaf_and_key(
        &self,
        identity: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (CertificateDer<'static>, KeyPair) {
        let key = KeyPair::generate().unwrap();
        (self.sign(identity, &key, change).into(), key)
    }

    /// A certificate for an existing key.
    pub fn sign(
        &self,
        identity: &str,
        key: &impl PublicKeyData,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Certificate {
        let mut params = CertificateParams::default();
        params.not_before = (SystemTime::now() - Duration::from_secs(300)).into();
        params.not_after = (SystemTime::now() + Duration::from_secs(3600)).into();
        params.subject_alt_names = vec![uri(identity)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        change(&mut params);
        params.signed_by(key, &self.issuer).unwrap()
    }
}

/// A certificate as PEM.
pub(crate) fn pem(certificate: &CertificateDer<'_>) -> String {
    let base64 = STANDARD.encode(certificate);
    let lines: Vec<&str> = base64
        .as_bytes()
        .chunks(64)
        .map(|line| std::str::from_utf8(line).unwrap())
        .collect();
    format!(
        "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
        lines.join("\n")
    )
}

/// A URI SAN.
pub(crate) fn uri(text: &str) -> SanType {
    SanType::URI(text.try_into().unwrap())
}

/// An unsigned token with this subject.
pub(crate) fn token(user: &str) -> String {
    let claims = serde_json::json!({ "sub": user }).to_string();
    format!("e30.{}.signature", URL_SAFE_NO_PAD.encode(claims))
}
