//! Checks of a certificate authority, so that an unusable one fails at startup instead of at each
//! handshake.

use std::time::{Duration, SystemTime};

use aws_lc_rs::digest;
use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;

use crate::Issuer;
use crate::certificate::{parse, subject_key_id, time};

/// An unusable certificate authority.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IssuerError {
    /// The text contains no certificate.
    #[error("it contains no certificate, expected PEM text with -----BEGIN CERTIFICATE-----")]
    NoCertificate,
    /// A certificate does not parse.
    #[error("cannot parse certificate {number}: {reason}")]
    Unreadable {
        /// The position in the chain, from 1.
        number: usize,
        /// The parse error.
        reason: String,
    },
    /// The certificate is not a CA.
    #[error("{subject} is not a certificate authority (its basic constraints do not say CA:TRUE)")]
    NoAuthority {
        /// The subject of the certificate.
        subject: String,
    },
    /// The key usage excludes signing of certificates.
    #[error("{subject} may not sign certificates (its key usage lacks keyCertSign)")]
    NoCertificateSigning {
        /// The subject of the certificate.
        subject: String,
    },
    /// The path length constraint is too small.
    #[error(
        "{subject} allows {allowed} authorities below it (path length), and there are {below}; use a certificate with a larger path length"
    )]
    PathLength {
        /// The subject of the certificate.
        subject: String,
        /// The path length constraint.
        allowed: u32,
        /// The number of CAs below.
        below: usize,
    },
    /// The certificate has expired.
    #[error("{subject} has expired ({when})")]
    Expired {
        /// The subject of the certificate.
        subject: String,
        /// The time, as text.
        when: String,
    },
    /// The certificate is not valid yet.
    #[error("{subject} is not valid before {when}")]
    NotYet {
        /// The subject of the certificate.
        subject: String,
        /// The time, as text.
        when: String,
    },
    /// The order of the chain is wrong, or a certificate is missing.
    #[error(
        "{subject} is not signed by the certificate after it; order the chain from the issuer to the root"
    )]
    Chain {
        /// The subject of the certificate.
        subject: String,
    },
    /// The text contains no supported key.
    #[error(
        "it contains no private key of a supported type, expected P-256, P-384, Ed25519 or RSA (2048 bits or more), unencrypted, as PEM"
    )]
    NoKey,
    /// The key belongs to another certificate.
    #[error("the private key does not belong to the certificate of {subject}")]
    OtherKey {
        /// The subject of the certificate.
        subject: String,
    },
    /// Peers would reject signed certificates.
    #[error("peers would reject the certificates that it signs: {0}")]
    Unusable(String),
}

/// A checked CA.
pub(crate) struct Checked {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: KeyPair,
    /// The subject of the issuer, as DER.
    pub(crate) subject: Vec<u8>,
    /// The subject key identifier of the issuer.
    pub(crate) id: Vec<u8>,
    pub(crate) not_after: SystemTime,
}

pub(crate) fn check(chain: &str, key: &str, now: SystemTime) -> Result<Checked, IssuerError> {
    let chain = certificates(chain)?;
    let mut parsed = Vec::new();
    for (position, der) in chain.iter().enumerate() {
        parsed.push(parse(der).map_err(|reason| IssuerError::Unreadable {
            number: position + 1,
            reason,
        })?);
    }
    for (below, certificate) in parsed.iter().enumerate() {
        check_ca(certificate, below)?;
        check_validity(certificate, now)?;
        if let Some(above) = parsed.get(below + 1)
            && (certificate.issuer().as_raw() != above.subject().as_raw()
                || certificate
                    .verify_signature(Some(above.public_key()))
                    .is_err())
        {
            return Err(IssuerError::Chain {
                subject: subject(certificate),
            });
        }
    }
    let key = private_key(key)?;
    if *parsed[0].public_key().subject_public_key.data != *key.der_bytes() {
        return Err(IssuerError::OtherKey {
            subject: subject(&parsed[0]),
        });
    }
    let not_after = parsed
        .iter()
        .map(|certificate| time(certificate.validity().not_after.timestamp()))
        .min()
        .expect("the chain is not empty");
    Ok(Checked {
        id: key_identifier(&parsed[0], &key),
        subject: parsed[0].subject().as_raw().to_vec(),
        not_after,
        key,
        chain,
    })
}

/// Signs a certificate and verifies the signature with the CA certificate.
pub(crate) fn test_signature(issuer: &Issuer, now: SystemTime) -> Result<(), IssuerError> {
    let own = parse(&issuer.certificate).map_err(IssuerError::Unusable)?;
    let leaf = issuer.leaf(issuer.ca.key(), Vec::new(), now, Duration::from_secs(60));
    let leaf = leaf.map_err(|error| IssuerError::Unusable(error.to_string()))?;
    let leaf = parse(&leaf.der).map_err(IssuerError::Unusable)?;
    leaf.verify_signature(Some(own.public_key())).map_err(|_| {
        IssuerError::Unusable("the public key does not verify the signature".to_owned())
    })
}

/// The certificates of a chain that are sent to peers: peers have the root, or must not trust it.
pub(crate) fn without_roots(chain: &[CertificateDer<'static>]) -> Vec<CertificateDer<'static>> {
    let signs_itself = |der: &CertificateDer<'_>| {
        parse(der).is_ok_and(|certificate| certificate.issuer() == certificate.subject())
    };
    chain
        .iter()
        .filter(|certificate| !signs_itself(certificate))
        .cloned()
        .collect()
}

fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, IssuerError> {
    let mut all = Vec::new();
    for (position, certificate) in CertificateDer::pem_slice_iter(text.as_bytes()).enumerate() {
        all.push(certificate.map_err(|error| IssuerError::Unreadable {
            number: position + 1,
            reason: error.to_string(),
        })?);
    }
    if all.is_empty() {
        Err(IssuerError::NoCertificate)
    } else {
        Ok(all)
    }
}

fn check_ca(certificate: &X509Certificate<'_>, below: usize) -> Result<(), IssuerError> {
    let subject = || subject(certificate);
    let constraints = certificate
        .basic_constraints()
        .ok()
        .flatten()
        .map(|extension| extension.value);
    let Some(constraints) = constraints.filter(|constraints| constraints.ca) else {
        return Err(IssuerError::NoAuthority { subject: subject() });
    };
    // RFC 5280, section 4.2.1.3: without the extension, every use is allowed.
    let usage = certificate
        .key_usage()
        .map_err(|error| IssuerError::Unusable(format!("{}: {error}", subject())))?;
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(IssuerError::NoCertificateSigning { subject: subject() });
    }
    match constraints.path_len_constraint {
        Some(allowed) if (allowed as usize) < below => Err(IssuerError::PathLength {
            subject: subject(),
            allowed,
            below,
        }),
        _ => Ok(()),
    }
}

fn check_validity(certificate: &X509Certificate<'_>, now: SystemTime) -> Result<(), IssuerError> {
    let validity = certificate.validity();
    if time(validity.not_after.timestamp()) <= now {
        return Err(IssuerError::Expired {
            subject: subject(certificate),
            when: validity.not_after.to_string(),
        });
    }
    if time(validity.not_before.timestamp()) > now {
        return Err(IssuerError::NotYet {
            subject: subject(certificate),
            when: validity.not_before.to_string(),
        });
    }
    Ok(())
}

fn private_key(text: &str) -> Result<KeyPair, IssuerError> {
    let der = PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|_| IssuerError::NoKey)?;
    let key = KeyPair::try_from(&der).map_err(|_| IssuerError::NoKey)?;
    let usable = [
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_RSA_SHA256,
    ];
    if usable.contains(&key.algorithm()) {
        Ok(key)
    } else {
        Err(IssuerError::NoKey)
    }
}

/// The identifier in the certificate, or one derived from the key if the extension is missing.
fn key_identifier(certificate: &X509Certificate<'_>, key: &KeyPair) -> Vec<u8> {
    subject_key_id(certificate)
        .map(<[u8]>::to_vec)
        .unwrap_or_else(|| {
            digest::digest(&digest::SHA256, &key.subject_public_key_info()).as_ref()[..20].to_vec()
        })
}

fn subject(certificate: &X509Certificate<'_>) -> String {
    format!("{:?}", certificate.subject().to_string())
}
