//! What a workload asks for: a certificate signing request (PKCS #10), checked. All that is taken from it is the public key.
//!
//! Pure. Nothing that a request wishes for (names, uses, to be an authority) reaches the certificate.

use rcgen::SubjectPublicKeyInfo;
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;

/// No request for one elliptic-curve key is longer.
const LONGEST: usize = 8 * 1024;

/// A request whose maker has the key, and which is for the user who sends it.
#[derive(Debug)]
pub struct Request {
    pub(super) key: SubjectPublicKeyInfo,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It is too long to be one.
    #[error("it has {0} bytes, more than {LONGEST}")]
    TooLong(usize),
    /// It is none.
    #[error("it is no certificate signing request (PKCS #10, as PEM or DER)")]
    NoRequest,
    /// The key is of a sort that is not signed.
    #[error("its key is neither P-256, P-384 nor Ed25519")]
    Key,
    /// Its maker does not have the key.
    #[error("its signature is not by its own key")]
    Signature,
    /// It is for somebody else.
    #[error("its common name is {found:?}; it must be the token's user name, {expected:?}")]
    CommonName {
        /// What it says.
        found: String,
        /// Who sends it.
        expected: String,
    },
}

impl Request {
    /// Checks a request, as PEM or DER, that `user` sends.
    pub fn parse(bytes: &[u8], user: &str) -> Result<Request, RequestError> {
        if bytes.len() > LONGEST {
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

/// How each DER-encoded request begins, and no PEM text.
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
        // What it says goes back to who said it, and to the log: no more of it than tells it apart.
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
    fn pem_and_der_with_each_sort_of_key_are_taken() {
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
    fn only_the_senders_own_name_will_do() {
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
    fn wishes_are_read_over() {
        let mut greedy = params(USER);
        greedy.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        greedy.subject_alt_names = vec![rcgen::SanType::URI(
            "spiffe://cluster.local/ns/shop/sa/admin"
                .try_into()
                .unwrap(),
        )];
        greedy.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
        assert!(Request::parse(&request(&greedy, &rcgen::PKCS_ECDSA_P256_SHA256).0, USER).is_ok());
    }

    #[test]
    fn a_broken_signature_is_refused() {
        let (mut der, _) = request(&params(USER), &rcgen::PKCS_ED25519);
        *der.last_mut().unwrap() ^= 1;
        assert_eq!(
            Request::parse(&der, USER).unwrap_err(),
            RequestError::Signature
        );
        // Another's key in one's own request: the signature is by the key that one has.
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
        let (own, stolen) = (key(&one), key(&other));
        let place = one
            .windows(own.len())
            .position(|window| window == own)
            .unwrap();
        let forged = [&one[..place], &stolen, &one[place + own.len()..]].concat();
        assert_eq!(
            Request::parse(&forged, USER).unwrap_err(),
            RequestError::Signature
        );
    }

    #[test]
    fn other_keys_are_refused() {
        // openssl req -new -newkey rsa:1024 -nodes -subj /CN=system:serviceaccount:shop:web -outform DER
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
    fn rubbish_of_any_size_is_refused() {
        let (der, pem) = request(&params(USER), &rcgen::PKCS_ECDSA_P256_SHA256);
        assert_eq!(
            Request::parse(&vec![b'0'; LONGEST + 1], USER).unwrap_err(),
            RequestError::TooLong(LONGEST + 1)
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
        let mut chance = fastrand::Rng::with_seed(4);
        for _ in 0..5_000 {
            let mut broken = der.clone();
            for _ in 0..chance.usize(1..4) {
                let place = chance.usize(..broken.len());
                broken[place] ^= chance.u8(1..);
            }
            // Only what the signature does not cover, the name of its own algorithm, may be another.
            if let Ok(request) = Request::parse(&broken, USER) {
                assert_eq!(request.key, whole.key);
            }
        }
    }
}
