//! Certificates as PEM, understood as far as the checks need. Pure.

use aws_lc_rs::digest::{SHA256, digest};
use x509_parser::{pem::Pem, prelude::X509Certificate};

/// The certificates of a text; none where it is none.
pub(super) fn read(pem: &[u8]) -> Vec<Pem> {
    Pem::iter_from_buffer(pem)
        .filter_map(Result::ok)
        .filter(|pem| pem.label == "CERTIFICATE")
        .collect()
}

/// SHA-256 over each, hexadecimal.
pub(super) fn fingerprints(pem: &[u8]) -> Vec<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    read(pem)
        .iter()
        .map(|pem| hex(digest(&SHA256, &pem.contents).as_ref()))
        .collect()
}

/// Whether one of `authorities` has signed the first of `chain`.
pub(super) fn signed_by(chain: &[u8], authorities: &[u8]) -> bool {
    let (chain, authorities) = (read(chain), read(authorities));
    let Some(Ok(leaf)) = chain.first().map(Pem::parse_x509) else {
        return false;
    };
    let signs = |authority: &X509Certificate<'_>| {
        leaf.verify_signature(Some(authority.public_key())).is_ok()
    };
    authorities
        .iter()
        .filter_map(|pem| pem.parse_x509().ok())
        .any(|authority| signs(&authority))
}

/// When the first of them counts from, and the first of them ends, in seconds since 1970.
pub(super) fn validity(pem: &[u8]) -> Option<(u64, u64)> {
    let all = read(pem);
    let times = all
        .iter()
        .filter_map(|pem| pem.parse_x509().ok())
        .map(|certificate| {
            let validity = certificate.validity();
            (
                validity.not_before.timestamp(),
                validity.not_after.timestamp(),
            )
        });
    let (from, to) = times.min_by_key(|(_, end)| *end)?;
    Some((
        u64::try_from(from).unwrap_or(0),
        u64::try_from(to).unwrap_or(0),
    ))
}
