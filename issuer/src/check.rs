//! Whether a certificate authority is fit to sign for the mesh. Refused at the start, with a reason, rather than at each handshake.

use std::time::{Duration, SystemTime};

use aws_lc_rs::digest;
use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer;

use super::Issuer;

/// Why a certificate authority is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IssuerError {
    /// There is no certificate in the text.
    #[error("no certificate is in it: PEM text with -----BEGIN CERTIFICATE----- is expected")]
    NoCertificate,
    /// A certificate that is none.
    #[error("certificate {number} of it cannot be read: {reason}")]
    Unreadable {
        /// Which, from 1.
        number: usize,
        /// Why.
        reason: String,
    },
    /// It may not sign certificates at all.
    #[error("{subject} is not a certificate authority (its basic constraints do not say CA:TRUE)")]
    NoAuthority {
        /// Whose certificate.
        subject: String,
    },
    /// Its key is for other things.
    #[error("{subject} may not sign certificates (its key usage lacks keyCertSign)")]
    NoCertificateSigning {
        /// Whose certificate.
        subject: String,
    },
    /// It allows fewer authorities below it than there are.
    #[error(
        "{subject} allows {allowed} authorities below it (path length), and there are {below}; use an intermediate with more"
    )]
    PathLength {
        /// Whose certificate.
        subject: String,
        /// What it allows.
        allowed: u32,
        /// What there is.
        below: usize,
    },
    /// It has ended.
    #[error("{subject} has expired ({when})")]
    Expired {
        /// Whose certificate.
        subject: String,
        /// When.
        when: String,
    },
    /// It has not begun.
    #[error("{subject} is not valid before {when}")]
    NotYet {
        /// Whose certificate.
        subject: String,
        /// When.
        when: String,
    },
    /// The chain does not hang together.
    #[error(
        "{subject} is not signed by the certificate after it; give the issuer first, then whoever signed each"
    )]
    Chain {
        /// Whose certificate.
        subject: String,
    },
    /// There is no key in the text.
    #[error(
        "no private key is in it that could be used: P-256, P-384, Ed25519 or RSA (2048 bits or more), not encrypted, as PEM"
    )]
    NoKey,
    /// The key is another certificate's.
    #[error("the private key does not belong to the certificate of {subject}")]
    OtherKey {
        /// Whose certificate.
        subject: String,
    },
    /// What it signs would not be accepted.
    #[error("certificates that it signs would not be accepted: {0}")]
    Unusable(String),
}

/// What a check leaves.
pub(super) struct Checked {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: KeyPair,
    /// The issuer's subject, as DER.
    pub(super) name: Vec<u8>,
    /// The issuer's subject key identifier.
    pub(super) id: Vec<u8>,
    pub(super) not_after: SystemTime,
}

pub(super) fn check(chain: &str, key: &str, now: SystemTime) -> Result<Checked, IssuerError> {
    let chain = certificates(chain)?;
    let mut parsed = Vec::new();
    for (position, der) in chain.iter().enumerate() {
        parsed.push(parse(der).map_err(|reason| IssuerError::Unreadable {
            number: position + 1,
            reason,
        })?);
    }
    for (below, certificate) in parsed.iter().enumerate() {
        authority(certificate, below)?;
        valid(certificate, now)?;
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
    let ends = parsed
        .iter()
        .map(|certificate| time(certificate.validity().not_after.timestamp()));
    let not_after = ends.min().expect("there is a certificate");
    let (id, name) = (
        key_identifier(&parsed[0], &key),
        parsed[0].subject().as_raw().to_vec(),
    );
    Ok(Checked {
        id,
        name,
        not_after,
        key,
        chain,
    })
}

/// Makes a certificate and looks at it as a peer would: what fails here would fail in every handshake.
pub(super) fn signs_well(issuer: &Issuer, now: SystemTime) -> Result<(), IssuerError> {
    let own = parse(&issuer.certificate).map_err(IssuerError::Unusable)?;
    let leaf = issuer.leaf(
        issuer.authority.key(),
        Vec::new(),
        now,
        Duration::from_secs(60),
    );
    let leaf = leaf.map_err(|error| IssuerError::Unusable(error.to_string()))?;
    let leaf = parse(&leaf.der).map_err(IssuerError::Unusable)?;
    leaf.verify_signature(Some(own.public_key()))
        .map_err(|_| IssuerError::Unusable("its key does not verify what it signs".to_owned()))
}

/// Those of a chain that peers must be sent: all but the roots, which they have or must not trust.
pub(super) fn without_roots(chain: &[CertificateDer<'static>]) -> Vec<CertificateDer<'static>> {
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

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err("something follows its end".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn authority(certificate: &X509Certificate<'_>, below: usize) -> Result<(), IssuerError> {
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

fn valid(certificate: &X509Certificate<'_>, now: SystemTime) -> Result<(), IssuerError> {
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

/// As it stands in the certificate; where it does not, as it will stand in those that it signs.
fn key_identifier(certificate: &X509Certificate<'_>, key: &KeyPair) -> Vec<u8> {
    let stated =
        certificate
            .extensions()
            .iter()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(identifier) => Some(identifier.0.to_vec()),
                _ => None,
            });
    stated.unwrap_or_else(|| {
        digest::digest(&digest::SHA256, &key.subject_public_key_info()).as_ref()[..20].to_vec()
    })
}

fn subject(certificate: &X509Certificate<'_>) -> String {
    format!("{:?}", certificate.subject().to_string())
}

fn time(seconds: i64) -> SystemTime {
    match u64::try_from(seconds) {
        Ok(seconds) => SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        Err(_) => SystemTime::UNIX_EPOCH,
    }
}
