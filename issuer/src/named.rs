//! Certificates under the very name of their issuer: byte for byte as it stands in the issuer's own certificate, since that is what
//! verifiers compare (RFC 5280, section 6.1.3, and most of them no more cleverly than so).
//!
//! rcgen keeps names in a map and writes them anew. A name that has an attribute twice, as `DC=example, DC=com` has, or several in one
//! part, would come out as another one. So rcgen drafts the certificate, and the name and the signature are put in here.

use rcgen::{KeyPair, PublicKeyData, SignatureAlgorithm, SigningKey};
use rustls::pki_types::CertificateDer;
use x509_parser::asn1_rs::{Any, BitString, FromDer, Sequence, ToDer};

use crate::SignError;

/// An issuer's key, for drafts: what it signs has no signature.
pub(super) struct Drafting(pub(super) KeyPair);

impl PublicKeyData for Drafting {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl SigningKey for Drafting {
    fn sign(&self, _: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(Vec::new())
    }
}

/// The certificate of a draft by [`Drafting`], with `issuer` (a Name, as DER) in the place of the name there, and signed.
pub(super) fn sign(
    draft: &CertificateDer<'_>,
    issuer: &[u8],
    key: &Drafting,
) -> Result<CertificateDer<'static>, SignError> {
    let (_, certificate) = Sequence::from_der(draft).map_err(failed)?;
    let (after, content) = Sequence::from_der(certificate.as_ref()).map_err(failed)?;
    let (_, algorithm) = element(after)?;
    let content = content.as_ref();
    // Version, serial number, algorithm; then the issuer's name.
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

/// What follows the first element, and that element.
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
