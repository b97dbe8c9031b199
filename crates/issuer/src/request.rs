//! Certificate signing requests (PKCS #10). Pure.
//!
//! Only the public key is used. Requested names, key usages and extensions are ignored.

use rcgen::SubjectPublicKeyInfo;
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;

/// Maximum size of a request: more than a request with any elliptic-curve key takes.
const MAX_BYTES: usize = 8 * 1024;

/// A checked request: signed with its own key, and with the common name of its sender.
#[derive(Debug)]
pub struct Request {
    pub(crate) key: SubjectPublicKeyInfo,
}

/// An invalid request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request exceeds the maximum size.
    #[error("it has {0} bytes, expected at most {MAX_BYTES}")]
    TooLong(usize),
    /// The bytes are not a request.
    #[error("it is not a certificate signing request (PKCS #10, as PEM or DER)")]
    NoRequest,
    /// The key algorithm is not supported.
    #[error("its key algorithm is not supported, expected P-256, P-384 or Ed25519")]
    Key,
    /// The signature does not match the key.
    #[error("its signature does not match its public key")]
    Signature,
    /// The common name is not the user name of the sender.
    #[error("its common name is {found:?}, expected the user name of the token, {expected:?}")]
    CommonName {
        /// The common name of the request.
        found: String,
        /// The user name of the sender.
        expected: String,
    },
}

impl Request {
    /// Checks a request, as PEM or DER, from the sender `user`.
    pub fn parse(bytes: &[u8], user: &str) -> Result<Request, RequestError> {
        if bytes.len() > MAX_BYTES {
            return Err(RequestError::TooLong(bytes.len()));
        }
        let der = if bytes.first() == Some(&DER_SEQUENCE) {
            CertificateSigningRequestDer::from(bytes)
        } else {
            CertificateSigningRequestDer::from_pem_slice(bytes)
                .map_err(|_| RequestError::NoRequest)?
        };
        match X509CertificationRequest::from_der(&der) {
            Ok(([], request)) => check(&request, user),
            _ => Err(RequestError::NoRequest),
        }
    }
}

/// The first byte of every DER request, and of no PEM text.
const DER_SEQUENCE: u8 = 0x30;

fn check(request: &X509CertificationRequest<'_>, user: &str) -> Result<Request, RequestError> {
    let info = &request.certification_request_info;
    let key =
        SubjectPublicKeyInfo::from_der(info.subject_pki.raw).map_err(|_| RequestError::Key)?;
    let signed = [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
    ];
    if !signed
        .iter()
        .any(|algorithm| **algorithm == *rcgen::PublicKeyData::algorithm(&key))
    {
        return Err(RequestError::Key);
    }
    request
        .verify_signature()
        .map_err(|_| RequestError::Signature)?;
    let mut names = info.subject.iter_common_name();
    let found = names
        .next()
        .and_then(|name| name.as_str().ok())
        .unwrap_or_default();
    if found != user || names.next().is_some() {
        // The response and the log contain the name, so its length is limited.
        return Err(RequestError::CommonName {
            found: found.chars().take(300).collect(),
            expected: user.to_owned(),
        });
    }
    Ok(Request { key })
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, SignatureAlgorithm};

    use super::*;

    const USER: &str = "system:serviceaccount:shop:web";

    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    fn request(
        params: &CertificateParams,
        algorithm: &'static SignatureAlgorithm,
    ) -> (Vec<u8>, String) {
        let request = params
            .serialize_request(&KeyPair::generate_for(algorithm).unwrap())
            .unwrap();
        (request.der().to_vec(), request.pem().unwrap())
    }

    #[test]
    fn accepts_pem_and_der_with_each_key_algorithm() {
        for algorithm in [
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ED25519,
        ] {
            let (der, pem) = request(&params(USER), algorithm);
            assert!(Request::parse(&der, USER).is_ok(), "{algorithm:?}");
            assert!(
                Request::parse(pem.as_bytes(), USER).is_ok(),
                "{algorithm:?}"
            );
        }
    }

    #[test]
    fn rejects_common_name_of_another_user() {
        for name in [
            "system:serviceaccount:shop:admin",
            "",
            "system:serviceaccount:shop:web ",
            "system:serviceaccount:shop:web\0",
        ] {
            let error = Request::parse(
                &request(&params(name), &rcgen::PKCS_ECDSA_P256_SHA256).0,
                USER,
            )
            .unwrap_err();
            assert_eq!(
                error,
                RequestError::CommonName {
                    found: name.into(),
                    expected: USER.into()
                }
            );
        }
        let mut nameless = params(USER);
        nameless.distinguished_name = rcgen::DistinguishedName::new();
        assert!(Request::parse(&request(&nameless, &rcgen::PKCS_ED25519).0, USER).is_err());
    }

    #[test]
    fn ignores_requested_extensions() {
        let mut requested = params(USER);
        requested.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        requested.subject_alt_names = vec![rcgen::SanType::URI(
            "spiffe://cluster.local/ns/shop/sa/admin"
                .try_into()
                .unwrap(),
        )];
        requested.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
        assert!(
            Request::parse(&request(&requested, &rcgen::PKCS_ECDSA_P256_SHA256).0, USER).is_ok()
        );
    }

    #[test]
    fn rejects_signature_of_another_key() {
        let (mut der, _) = request(&params(USER), &rcgen::PKCS_ED25519);
        *der.last_mut().unwrap() ^= 1;
        assert_eq!(
            Request::parse(&der, USER).unwrap_err(),
            RequestError::Signature
        );
        // The public key of another request, with the signature of the sender's key.
        let (one, other) = (
            request(&params(USER), &rcgen::PKCS_ED25519).0,
            request(&params(USER), &rcgen::PKCS_ED25519).0,
        );
        let key = |der: &[u8]| {
            X509CertificationRequest::from_der(der)
                .unwrap()
                .1
                .certification_request_info
                .subject_pki
                .raw
                .to_vec()
        };
        let (own, foreign) = (key(&one), key(&other));
        let place = one
            .windows(own.len())
            .position(|window| window == own)
            .unwrap();
        let forged = [&one[..place], &foreign, &one[place + own.len()..]].concat();
        assert_eq!(
            Request::parse(&forged, USER).unwrap_err(),
            RequestError::Signature
        );
    }

    #[test]
    fn rejects_unsupported_key_algorithms() {
        // openssl req -new -newkey rsa:1024 -nodes -subj /CN=system:serviceaccount:shop:web
        // -outform DER
        let small = include_bytes!("testdata/rsa-1024.der");
        assert_eq!(Request::parse(small, USER).unwrap_err(), RequestError::Key);
        assert_eq!(
            Request::parse(&request(&params(USER), &rcgen::PKCS_RSA_SHA256).0, USER).unwrap_err(),
            RequestError::Key
        );
        assert_eq!(
            Request::parse(
                &request(&params(USER), &rcgen::PKCS_ECDSA_P521_SHA512).0,
                USER
            )
            .unwrap_err(),
            RequestError::Key
        );
    }

    #[test]
    fn rejects_malformed_requests() {
        let (der, pem) = request(&params(USER), &rcgen::PKCS_ECDSA_P256_SHA256);
        assert_eq!(
            Request::parse(&vec![b'0'; MAX_BYTES + 1], USER).unwrap_err(),
            RequestError::TooLong(MAX_BYTES + 1)
        );
        let longer = [der.as_slice(), b"x"].concat();
        for bytes in [
            &b""[..],
            b"0",
            b"x",
            b"-----BEGIN CERTIFICATE REQUEST-----",
            &[0x30, 0x80],
            &longer,
            &der[..der.len() - 1],
        ] {
            assert_eq!(
                Request::parse(bytes, USER).unwrap_err(),
                RequestError::NoRequest,
                "{bytes:?}"
            );
        }
        let certificate = pem.replace("CERTIFICATE REQUEST", "CERTIFICATE");
        assert_eq!(
            Request::parse(certificate.as_bytes(), USER).unwrap_err(),
            RequestError::NoRequest
        );
        let whole = Request::parse(&der, USER).unwrap();
        let mut rng = fastrand::Rng::with_seed(4);
        for _ in 0..5_000 {
            let mut broken = der.clone();
            for _ in 0..rng.usize(1..4) {
                let place = rng.usize(..broken.len());
                broken[place] ^= rng.u8(1..);
            }
            // The signature does not cover the identifier of its own algorithm.
            if let Ok(request) = Request::parse(&broken, USER) {
                assert_eq!(request.key, whole.key);
            }
        }
    }
}
