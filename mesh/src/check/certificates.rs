//! Parsing of PEM certificates for the checks. Pure.

use aws_lc_rs::digest::{SHA256, digest};
use x509_parser::{pem::Pem, prelude::X509Certificate};

/// The certificates in a PEM text. Skips invalid blocks.
pub(super) fn read(pem: &[u8]) -> Vec<Pem> {
    Pem::iter_from_buffer(pem)
        .filter_map(Result::ok)
        .filter(|pem| pem.label == "CERTIFICATE")
        .collect()
}

/// The SHA-256 fingerprints of the certificates, in hexadecimal.
pub(super) fn fingerprints(pem: &[u8]) -> Vec<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    read(pem)
        .iter()
        .map(|pem| hex(digest(&SHA256, &pem.contents).as_ref()))
        .collect()
}

/// Whether one of `authorities` signed the first certificate of `chain`.
pub(super) fn signed_by(chain: &[u8], authorities: &[u8]) -> bool {
    let (chain, authorities) = (read(chain), read(authorities));
    let Some(Ok(leaf)) = chain.first().map(Pem::parse_x509) else {
        return false;
    };
    let is_issuer = |authority: &X509Certificate<'_>| {
        leaf.verify_signature(Some(authority.public_key())).is_ok()
    };
    authorities
        .iter()
        .filter_map(|pem| pem.parse_x509().ok())
        .any(|authority| is_issuer(&authority))
}

/// The validity (notBefore, notAfter) of the certificate that expires first, in seconds since 1970.
pub(super) fn validity(pem: &[u8]) -> Option<(u64, u64)> {
    let certificates = read(pem);
    let validities = certificates
        .iter()
        .filter_map(|pem| pem.parse_x509().ok())
        .map(|certificate| {
            let validity = certificate.validity();
            (
                validity.not_before.timestamp(),
                validity.not_after.timestamp(),
            )
        });
    let (not_before, not_after) = validities.min_by_key(|(_, not_after)| *not_after)?;
    Some((
        u64::try_from(not_before).unwrap_or(0),
        u64::try_from(not_after).unwrap_or(0),
    ))
}
