//! Signing with the issuer name copied byte by byte from the CA certificate, because verifiers
//! compare the encodings (RFC 5280, section 6.1.3).
//!
//! rcgen stores names in a map and encodes them again. It changes names with a repeated attribute,
//! such as `DC=example, DC=com`, and with several attributes in one RDN. Therefore rcgen encodes a
//! draft, and this module inserts the name and the signature.

use rcgen::{KeyPair, PublicKeyData, SignatureAlgorithm, SigningKey};
use rustls::pki_types::CertificateDer;
use x509_parser::asn1_rs::{Any, BitString, FromDer, Sequence, ToDer};

use crate::SignError;

/// A CA key that rcgen signs drafts with. Drafts have an empty signature.
pub(crate) struct DraftKey(pub(crate) KeyPair);

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

/// Signs a draft by [`DraftKey`], with `issuer` (a Name, as DER) in place of the issuer name.
pub(crate) fn sign(
    draft: &CertificateDer<'_>,
    issuer: &[u8],
    key: &DraftKey,
) -> Result<CertificateDer<'static>, SignError> {
    let (_, certificate) = Sequence::from_der(draft).map_err(failed)?;
    let (after, content) = Sequence::from_der(certificate.as_ref()).map_err(failed)?;
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
    let signature = key.0.sign(&content).map_err(failed)?;
    let signature = BitString::new(0, &signature).to_der_vec().map_err(failed)?;
    Ok(sequence(&[&content, algorithm, &signature])?.into())
}

/// The remainder after the first element, and that element.
fn element(bytes: &[u8]) -> Result<(&[u8], &[u8]), SignError> {
    let (rest, _) = Any::from_der(bytes).map_err(failed)?;
    Ok((rest, &bytes[..bytes.len() - rest.len()]))
}

fn sequence(parts: &[&[u8]]) -> Result<Vec<u8>, SignError> {
    Sequence::new(parts.concat().into())
        .to_der_vec()
        .map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> SignError {
    SignError::Crypto(error.to_string())
}
