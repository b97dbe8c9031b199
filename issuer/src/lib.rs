//! Who signs: a certificate authority's certificate and key, checked once, and the certificates that it makes.
//!
//! Pure: no clock, no files, no network; only the serial numbers and the controller's own keys are random. A certificate says what
//! [`Identity`] says and nothing that a [`Request`] wishes. The key never leaves this module, nor does it show in Debug.

mod certificate;
mod check;
mod named;
mod request;

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use aws_lc_rs::rand;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub use certificate::Certificate;
pub use check::IssuerError;
use named::Drafting;
pub use request::{Request, RequestError};

/// Certificates are valid from a little before they are made: clocks differ.
pub const BACKDATED: Duration = Duration::from_secs(5 * 60);

/// A certificate authority that is fit to sign workloads' certificates.
pub struct Issuer {
    authority: rcgen::Issuer<'static, Drafting>,
    /// Its subject, as it stands in its certificate.
    name: Vec<u8>,
    certificate: CertificateDer<'static>,
    id: String,
    chain_pem: String,
    intermediates: Vec<CertificateDer<'static>>,
    not_after: SystemTime,
    signed: AtomicU64,
}

/// A workload's certificate.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The leaf alone; what follows it is [`Issuer::chain_pem`].
    pub pem: String,
    /// The leaf alone.
    pub der: CertificateDer<'static>,
    /// Its serial number, hexadecimal.
    pub serial: String,
    /// From when it is valid.
    pub not_before: SystemTime,
    /// Until when.
    pub not_after: SystemTime,
}

/// The controller's own certificate.
pub struct Serving {
    /// The leaf and its intermediates.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its key, made for it.
    pub key: PrivateKeyDer<'static>,
    /// From when it is valid.
    pub not_before: SystemTime,
    /// Until when.
    pub not_after: SystemTime,
}

/// Why nothing is signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignError {
    /// The issuer, or one above it, has ended.
    #[error("the certificate authority has expired; give the controller a new one")]
    Expired,
    /// The cryptography failed.
    #[error("no certificate could be made: {0}")]
    Crypto(String),
}

impl Issuer {
    /// `chain`: the authority's own certificate, then those above it, if any. `key`: its key. Both PEM. Unfit ones are refused
    /// with a reason.
    pub fn from_pem(chain: &str, key: &str, now: SystemTime) -> Result<Issuer, IssuerError> {
        let check::Checked {
            chain,
            key,
            name,
            id,
            not_after,
        } = check::check(chain, key, now)?;
        let mut params = CertificateParams::default();
        params.key_identifier_method = KeyIdMethod::PreSpecified(id.clone());
        let authority = rcgen::Issuer::new(params, Drafting(key));
        let intermediates = check::without_roots(&chain);
        let chain_pem = intermediates
            .iter()
            .map(|certificate| pem(certificate))
            .collect();
        let (certificate, id, signed) = (chain[0].clone(), hex(&id), AtomicU64::new(0));
        let issuer = Issuer {
            authority,
            name,
            certificate,
            id,
            chain_pem,
            intermediates,
            not_after,
            signed,
        };
        check::signs_well(&issuer, now)?;
        Ok(issuer)
    }

    /// Makes the certificate of `identity` for the key of `request`: valid for `life` from `now`, never beyond the issuer's own end.
    pub fn sign(
        &self,
        request: &Request,
        spiffe_id: &str,
        now: SystemTime,
        life: Duration,
    ) -> Result<Signed, SignError> {
        self.signed.fetch_add(1, Ordering::Relaxed);
        self.leaf(&request.key, vec![uri(spiffe_id)?], now, life)
    }

    /// Makes a key and a certificate for the controller itself.
    pub fn sign_serving(
        &self,
        spiffe_id: Option<&str>,
        names: &[String],
        addresses: &[IpAddr],
        now: SystemTime,
        life: Duration,
    ) -> Result<Serving, SignError> {
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut all: Vec<SanType> = spiffe_id.map(uri).transpose()?.into_iter().collect();
        for name in names {
            all.push(SanType::DnsName(name.as_str().try_into().map_err(failed)?));
        }
        all.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
        let leaf = self.leaf(&key, all, now, life)?;
        let chain = [vec![leaf.der], self.intermediates.clone()].concat();
        let key = PrivateKeyDer::Pkcs8(key.serialized_der().to_vec().into());
        Ok(Serving {
            chain,
            key,
            not_before: leaf.not_before,
            not_after: leaf.not_after,
        })
    }

    /// Its subject key identifier, hexadecimal: what the certificates that it signs name as their authority.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its own certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// What follows a leaf: the intermediates up to a root, and without it. PEM; empty where the issuer itself is a root.
    pub fn chain_pem(&self) -> &str {
        &self.chain_pem
    }

    /// When it ends, or the first one above it does.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// How many workloads' certificates it has signed in this process.
    pub fn signed(&self) -> u64 {
        self.signed.load(Ordering::Relaxed)
    }

    fn leaf(
        &self,
        key: &impl PublicKeyData,
        names: Vec<SanType>,
        now: SystemTime,
        life: Duration,
    ) -> Result<Signed, SignError> {
        let not_after = now
            .checked_add(life)
            .map_or(self.not_after, |end| end.min(self.not_after));
        if not_after <= now {
            return Err(SignError::Expired);
        }
        let not_before = now - BACKDATED;
        let serial = serial()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.not_before = not_before.into();
        params.not_after = not_after.into();
        params.serial_number = Some(serial.to_vec().into());
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        // SPIFFE requires both usages; a certificate without a SPIFFE ID is for a server only.
        if names.iter().any(|name| matches!(name, SanType::URI(_))) {
            params
                .extended_key_usages
                .push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        params.subject_alt_names = names;
        params.use_authority_key_identifier_extension = true;
        let draft = params.signed_by(key, &self.authority).map_err(failed)?;
        let der = named::sign(draft.der(), &self.name, self.authority.key())?;
        Ok(Signed {
            pem: pem(&der),
            der,
            serial: hex(&serial),
            not_before,
            not_after,
        })
    }
}

impl fmt::Debug for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issuer")
            .field("id", &self.id)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

fn uri(spiffe_id: &str) -> Result<SanType, SignError> {
    Ok(SanType::URI(spiffe_id.try_into().map_err(failed)?))
}

fn failed(error: rcgen::Error) -> SignError {
    SignError::Crypto(error.to_string())
}

/// Generates a self-signed root CA for leaf certificates: the certificate and its P-384 key, as PEM.
pub fn self_signed(
    organization: &str,
    common_name: &str,
    now: SystemTime,
    life: Duration,
) -> Result<(String, String), SignError> {
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).map_err(failed)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::OrganizationName, organization);
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + life).into();
    let certificate = params.self_signed(&key).map_err(failed)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// 128 bits, all but the first two of them random: so it is positive, and has its full length, as X.509 wants it.
fn serial() -> Result<[u8; 16], SignError> {
    let mut serial = [0; 16];
    rand::fill(&mut serial).map_err(|_| SignError::Crypto("there is no randomness".to_owned()))?;
    serial[0] = serial[0] & 0x3f | 0x40;
    Ok(serial)
}

/// A certificate as text.
pub fn pem(certificate: &CertificateDer<'_>) -> String {
    to_pem("CERTIFICATE", certificate)
}

fn to_pem(label: &str, der: &[u8]) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new(label, der), config)
}

/// A private key as PEM.
pub fn private_key_pem(key: &PrivateKeyDer<'_>) -> String {
    let label = match key {
        PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
        PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
        _ => "PRIVATE KEY",
    };
    to_pem(label, key.secret_der())
}

/// Lower-case, two digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(crate) mod tests;
