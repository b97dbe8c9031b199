//! Certificates for the checks. Pure.

use diy_mesh_issuer::Certificate;

use crate::time::seconds;

/// The certificates in a PEM text, or an empty list if one of them is invalid.
pub(super) fn read(pem: &[u8]) -> Vec<Certificate> {
    Certificate::all(pem).unwrap_or_default()
}

/// Whether one of `authorities` signed the first certificate of `chain`.
pub(super) fn signed_by(chain: &[u8], authorities: &[u8]) -> bool {
    let (chain, authorities) = (read(chain), read(authorities));
    let is_signed = |leaf: &Certificate| authorities.iter().any(|one| leaf.is_signed_by(one));
    chain.first().is_some_and(is_signed)
}

/// The validity (notBefore, notAfter) of the certificate that expires first, in seconds since 1970.
pub(super) fn validity(pem: &[u8]) -> Option<(u64, u64)> {
    let first = read(pem).into_iter().min_by_key(|one| one.not_after)?;
    Some((seconds(first.not_before), seconds(first.not_after)))
}
