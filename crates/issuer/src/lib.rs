//! X.509: certificate authorities, leaf certificates, certificate signing requests, and reading of
//! certificates.
//!
//! Pure: no clock, no files, no network; only keys and serial numbers are random. A leaf
//! certificate contains the names that the caller of [`Issuer::sign`] passes, and only the public
//! key of a [`Request`]. The CA's key stays private and out of `Debug`.

mod certificate;
mod check;
mod request;

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use aws_lc_rs::rand;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
    SignatureAlgorithm, SigningKey,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::asn1_rs::{Any, BitString, FromDer, Sequence, ToDer};

pub use certificate::{Certificate, hex, pem, private_key_pem};
pub use check::IssuerError;
pub use request::{Request, RequestError};

/// Time by which `notBefore` precedes the signing time, to tolerate clock skew.
pub const BACKDATED: Duration = Duration::from_secs(5 * 60);
/// The attribute type serialNumber (RFC 4519, section 2.31), which tells subjects apart.
const SERIAL_NUMBER: &[u64] = &[2, 5, 4, 5];

/// A checked certificate authority.
pub struct Issuer {
    ca: rcgen::Issuer<'static, DraftKey>,
    /// The subject, as DER.
    subject: Vec<u8>,
    certificate: CertificateDer<'static>,
    id: String,
    chain_pem: String,
    intermediates: Vec<CertificateDer<'static>>,
    not_after: SystemTime,
}

/// A leaf certificate of a workload.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The leaf as PEM, without [`Issuer::chain_pem`].
    pub pem: String,
    /// The leaf as DER.
    pub der: CertificateDer<'static>,
    /// The serial number, hexadecimal.
    pub serial: String,
    /// The start of the validity.
    pub not_before: SystemTime,
    /// The end of the validity.
    pub not_after: SystemTime,
}

/// A serving certificate and its key.
pub struct Serving {
    /// The leaf, then intermediates without the root.
    pub chain: Vec<CertificateDer<'static>>,
    /// The generated private key.
    pub key: PrivateKeyDer<'static>,
    /// The start of the validity.
    pub not_before: SystemTime,
    /// The end of the validity.
    pub not_after: SystemTime,
}

/// A failure to sign.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignError {
    /// The issuer or a certificate above it has expired.
    #[error("the certificate authority has expired; replace it")]
    Expired,
    /// A cryptographic operation failed.
    #[error("cannot sign a certificate: {0}")]
    Crypto(String),
}

impl Issuer {
    /// Checks a CA: `chain` is its certificate, followed by those above it, if any, and `key` is
    /// its private key, both as PEM.
    pub fn from_pem(chain: &str, key: &str, now: SystemTime) -> Result<Issuer, IssuerError> {
        let check::Checked {
            chain,
            key,
            subject,
            id,
            not_after,
        } = check::check(chain, key, now)?;
        let mut params = CertificateParams::default();
        params.key_identifier_method = KeyIdMethod::PreSpecified(id.clone());
        let ca = rcgen::Issuer::new(params, DraftKey(key));
        let intermediates = check::without_roots(&chain);
        let chain_pem = intermediates
            .iter()
            .map(|certificate| pem(certificate))
            .collect();
        let issuer = Issuer {
            ca,
            subject,
            certificate: chain[0].clone(),
            id: hex(&id),
            chain_pem,
            intermediates,
            not_after,
        };
        check::test_signature(&issuer, now)?;
        Ok(issuer)
    }

    /// Signs a certificate with `spiffe_id` for the key of `request`. It is valid for `lifetime`
    /// from `now`, at most until the issuer expires.
    pub fn sign(
        &self,
        request: &Request,
        spiffe_id: &str,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<Signed, SignError> {
        self.leaf(&request.key, vec![uri(spiffe_id)?], now, lifetime)
    }

    /// Generates a key and signs a serving certificate. Names: `spiffe_id`, DNS names and IP
    /// addresses.
    pub fn sign_serving(
        &self,
        spiffe_id: Option<&str>,
        names: &[String],
        addresses: &[IpAddr],
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<Serving, SignError> {
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(crypto)?;
        let mut all: Vec<SanType> = spiffe_id.map(uri).transpose()?.into_iter().collect();
        for name in names {
            all.push(SanType::DnsName(name.as_str().try_into().map_err(crypto)?));
        }
        all.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
        let leaf = self.leaf(&key, all, now, lifetime)?;
        let chain = [vec![leaf.der], self.intermediates.clone()].concat();
        let key = PrivateKeyDer::Pkcs8(key.serialized_der().to_vec().into());
        Ok(Serving {
            chain,
            key,
            not_before: leaf.not_before,
            not_after: leaf.not_after,
        })
    }

    /// The subject key identifier, hexadecimal: the authority key identifier of signed
    /// certificates.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The certificates that peers need after a leaf, as PEM: the intermediates without the root.
    /// Empty if the issuer is a root.
    pub fn chain_pem(&self) -> &str {
        &self.chain_pem
    }

    /// The earliest expiry of the issuer and the certificates above it.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    fn leaf(
        &self,
        key: &impl PublicKeyData,
        names: Vec<SanType>,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<Signed, SignError> {
        let not_after = now
            .checked_add(lifetime)
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
        let draft = params.signed_by(key, &self.ca).map_err(crypto)?;
        let der = sign_draft(draft.der(), &self.subject, self.ca.key())?;
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
    Ok(SanType::URI(spiffe_id.try_into().map_err(crypto)?))
}

fn crypto(error: impl fmt::Display) -> SignError {
    SignError::Crypto(error.to_string())
}

/// Generates a self-signed root CA for leaf certificates: the certificate and its P-384 key, as
/// PEM. Each CA has a subject of its own: verifiers select the root of a chain by its subject
/// (RFC 5280, section 6.1), and would report an invalid signature in place of an unknown issuer.
pub fn self_signed(
    organization: &str,
    common_name: &str,
    now: SystemTime,
    lifetime: Duration,
) -> Result<(String, String), SignError> {
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).map_err(crypto)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let subject = &mut params.distinguished_name;
    subject.push(DnType::OrganizationName, organization);
    let number = hex(&serial()?).as_str().try_into().map_err(crypto)?;
    let number = DnValue::PrintableString(number);
    subject.push(DnType::CustomDnType(SERIAL_NUMBER.into()), number);
    subject.push(DnType::CommonName, common_name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + lifetime).into();
    let certificate = params.self_signed(&key).map_err(crypto)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// A serial number of 128 bits. The first two bits are fixed, so that the DER integer is positive
/// and has 16 bytes.
fn serial() -> Result<[u8; 16], SignError> {
    let mut serial = [0; 16];
    rand::fill(&mut serial)
        .map_err(|_| SignError::Crypto("no random bytes are available".to_owned()))?;
    serial[0] = serial[0] & 0x3f | 0x40;
    Ok(serial)
}

/// A CA key that rcgen signs drafts with. Drafts have an empty signature.
struct DraftKey(KeyPair);

impl PublicKeyData for DraftKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl SigningKey for DraftKey {
    fn sign(&self, _: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(Vec::new())
    }
}

/// Signs a draft by [`DraftKey`], with `issuer` (a Name, as DER) in place of the issuer name: it is
/// copied byte by byte from the CA certificate, because verifiers compare the encodings (RFC 5280,
/// section 6.1.3). rcgen stores names in a map and encodes them again, which changes names with a
/// repeated attribute, such as `DC=example, DC=com`, and with several attributes in one RDN.
fn sign_draft(
    draft: &CertificateDer<'_>,
    issuer: &[u8],
    key: &DraftKey,
) -> Result<CertificateDer<'static>, SignError> {
    let (_, certificate) = Sequence::from_der(draft).map_err(crypto)?;
    let (after, content) = Sequence::from_der(certificate.as_ref()).map_err(crypto)?;
    let (_, algorithm) = element(after)?;
    let content = content.as_ref();
    // Version, serial number and algorithm precede the issuer name.
    let mut rest = content;
    for _ in 0..3 {
        rest = element(rest)?.0;
    }
    let before = &content[..content.len() - rest.len()];
    let (after, _) = element(rest)?;
    let content = sequence(&[before, issuer, after])?;
    let signature = key.0.sign(&content).map_err(crypto)?;
    let signature = BitString::new(0, &signature).to_der_vec().map_err(crypto)?;
    Ok(sequence(&[&content, algorithm, &signature])?.into())
}

/// The remainder after the first element, and that element.
fn element(bytes: &[u8]) -> Result<(&[u8], &[u8]), SignError> {
    let (rest, _) = Any::from_der(bytes).map_err(crypto)?;
    Ok((rest, &bytes[..bytes.len() - rest.len()]))
}

fn sequence(parts: &[&[u8]]) -> Result<Vec<u8>, SignError> {
    Sequence::new(parts.concat().into())
        .to_der_vec()
        .map_err(crypto)
}

#[cfg(test)]
mod tests;
