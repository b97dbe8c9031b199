//! Checks of a certificate authority, so that an unusable one fails at startup instead of at each
//! handshake.

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest;
use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;

use crate::Issuer;
use crate::certificate::{parse, subject_key_id, time};

/// An unusable certificate authority: the part with the error, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IssuerError {
    /// The certificates are unusable.
    #[error("{0}")]
    Chain(String),
    /// The private key is unusable.
    #[error("{0}")]
    Key(String),
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
    let chain = certificates(chain).map_err(IssuerError::Chain)?;
    let mut parsed = Vec::new();
    for (certificate, number) in chain.iter().zip(1..) {
        let certificate = parse(certificate).map_err(|reason| unreadable(number, reason));
        parsed.push(certificate.map_err(IssuerError::Chain)?);
    }
    check_chain(&parsed, now).map_err(IssuerError::Chain)?;
    let key = private_key(key).map_err(IssuerError::Key)?;
    let issuer = &parsed[0];
    if *issuer.public_key().subject_public_key.data != *key.der_bytes() {
        return Err(IssuerError::Key(format!(
            "the private key does not belong to the certificate of {}",
            subject(issuer)
        )));
    }
    let not_after = parsed
        .iter()
        .map(|one| one.validity().not_after.timestamp());
    let not_after = not_after.min().expect("the chain is not empty");
    Ok(Checked {
        id: key_identifier(issuer, &key),
        subject: issuer.subject().as_raw().to_vec(),
        not_after: time(not_after),
        key,
        chain,
    })
}

/// Signs a certificate and verifies the signature with the CA certificate.
pub(crate) fn test_signature(issuer: &Issuer, now: SystemTime) -> Result<(), IssuerError> {
    let verify = || {
        let own = parse(&issuer.certificate)?;
        let leaf = issuer.leaf(issuer.ca.key(), Vec::new(), now, Duration::from_secs(60));
        let leaf = leaf.map_err(|error| error.to_string())?;
        let verified = parse(&leaf.der)?.verify_signature(Some(own.public_key()));
        verified.map_err(|_| "the public key does not verify the signature".to_owned())
    };
    verify().map_err(|reason: String| {
        let reason = format!("peers would reject the certificates that it signs: {reason}");
        IssuerError::Chain(reason)
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

fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates = CertificateDer::pem_slice_iter(text.as_bytes()).zip(1..);
    let all: Result<Vec<_>, String> = certificates
        .map(|(certificate, number)| certificate.map_err(|error| unreadable(number, error)))
        .collect();
    let all = all?;
    if all.is_empty() {
        let expected = "expected PEM text with -----BEGIN CERTIFICATE-----";
        return Err(format!("it contains no certificate, {expected}"));
    }
    Ok(all)
}

fn unreadable(number: usize, reason: impl Display) -> String {
    format!("cannot parse certificate {number}: {reason}")
}

fn check_chain(chain: &[X509Certificate<'_>], now: SystemTime) -> Result<(), String> {
    for (below, certificate) in chain.iter().enumerate() {
        check_ca(certificate, below)?;
        check_validity(certificate, now)?;
        let is_signed_by = |above: &X509Certificate<'_>| {
            certificate.issuer().as_raw() == above.subject().as_raw()
                && certificate
                    .verify_signature(Some(above.public_key()))
                    .is_ok()
        };
        if chain
            .get(below + 1)
            .is_some_and(|above| !is_signed_by(above))
        {
            let subject = subject(certificate);
            return Err(format!(
                "{subject} is not signed by the certificate after it; order the chain from the issuer to the root"
            ));
        }
    }
    Ok(())
}

fn check_ca(certificate: &X509Certificate<'_>, below: usize) -> Result<(), String> {
    let subject = subject(certificate);
    let constraints = certificate.basic_constraints().ok().flatten();
    let constraints = constraints.map(|extension| extension.value);
    let Some(constraints) = constraints.filter(|constraints| constraints.ca) else {
        return Err(format!(
            "{subject} is not a certificate authority (its basic constraints do not say CA:TRUE)"
        ));
    };
    // RFC 5280, section 4.2.1.3: without the extension, every use is allowed.
    let usage = certificate.key_usage();
    let usage = usage.map_err(|error| format!("{subject}: {error}"))?;
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(format!(
            "{subject} may not sign certificates (its key usage lacks keyCertSign)"
        ));
    }
    match constraints.path_len_constraint {
        Some(allowed) if (allowed as usize) < below => Err(format!(
            "{subject} allows {allowed} authorities below it (path length), and there are {below}; use a certificate with a larger path length"
        )),
        _ => Ok(()),
    }
}

fn check_validity(certificate: &X509Certificate<'_>, now: SystemTime) -> Result<(), String> {
    let (validity, subject) = (certificate.validity(), subject(certificate));
    if time(validity.not_after.timestamp()) <= now {
        return Err(format!("{subject} has expired ({})", validity.not_after));
    }
    if time(validity.not_before.timestamp()) > now {
        let not_before = validity.not_before;
        return Err(format!("{subject} is not valid before {not_before}"));
    }
    Ok(())
}

fn private_key(text: &str) -> Result<KeyPair, String> {
    let usable = [
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_RSA_SHA256,
    ];
    let der = PrivateKeyDer::from_pem_slice(text.as_bytes()).ok();
    let key = der.and_then(|der| KeyPair::try_from(&der).ok());
    let key = key.filter(|key| usable.contains(&key.algorithm()));
    key.ok_or_else(|| {
        "it contains no private key of a supported type, expected P-256, P-384, Ed25519 or RSA (2048 bits or more), unencrypted, as PEM".to_owned()
    })
}

/// The identifier in the certificate, or one derived from the key if the extension is missing.
fn key_identifier(certificate: &X509Certificate<'_>, key: &KeyPair) -> Vec<u8> {
    let derived = || digest::digest(&digest::SHA256, &key.subject_public_key_info());
    let id = subject_key_id(certificate).map(<[u8]>::to_vec);
    id.unwrap_or_else(|| derived().as_ref()[..20].to_vec())
}

fn subject(certificate: &X509Certificate<'_>) -> String {
    format!("{:?}", certificate.subject().to_string())
}
