//! Certificate verifiers of TLS clients and servers for rustls: the chain leads to a trust root,
//! the certificate is valid now and for this role, and its only URI SAN is the expected identity
//! (X.509-SVID, section 5). Stateless.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diy_mesh_model::identity::{Identity, InvalidIdentity};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use thiserror::Error as ThisError;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;

/// A certificate that does not authenticate the expected peer, independent of its issuer.
#[derive(Clone, PartialEq, Eq, ThisError)]
pub enum PeerError {
    /// Invalid DER encoding.
    #[error("peer certificate is not valid DER")]
    InvalidEncoding,
    /// A CA certificate.
    #[error("peer certificate is a CA certificate, expected a workload certificate")]
    Authority,
    /// Not exactly one URI SAN.
    #[error("peer certificate has {0} URI SANs, expected 1")]
    UriSanCount(usize),
    /// The URI SAN is not a workload identity.
    #[error("peer certificate has invalid URI SAN {name:?}: {reason}")]
    InvalidIdentity {
        /// The URI SAN.
        name: String,
        /// Why it is invalid.
        reason: InvalidIdentity,
    },
    /// The identity of another workload.
    #[error("peer is {actual}, expected {expected}")]
    UnexpectedIdentity {
        /// The expected identity.
        expected: Identity,
        /// The identity of the certificate.
        actual: Identity,
    },
    /// An identity of another trust domain.
    #[error("peer is {actual}, expected the trust domain {expected}")]
    UnexpectedTrustDomain {
        /// The own trust domain.
        expected: String,
        /// The identity of the certificate.
        actual: Identity,
    },
}

/// Same as `Display`: rustls prints other errors by `Debug`.
impl fmt::Debug for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<PeerError> for Error {
    fn from(reason: PeerError) -> Self {
        match reason {
            PeerError::InvalidEncoding => Self::InvalidCertificate(CertificateError::BadEncoding),
            reason => {
                Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(reason))))
            }
        }
    }
}

/// Identity and expiry of a certificate. Does not verify the chain: handshakes do, and resumed
/// sessions have done so.
pub fn identity_of(leaf: &CertificateDer<'_>) -> Result<(Identity, SystemTime), PeerError> {
    let Ok(([], certificate)) = X509Certificate::from_der(leaf) else {
        return Err(PeerError::InvalidEncoding);
    };
    let usage = certificate
        .key_usage()
        .map_err(|_| PeerError::InvalidEncoding)?;
    if certificate.is_ca()
        || usage.is_some_and(|usage| usage.value.key_cert_sign() || usage.value.crl_sign())
    {
        return Err(PeerError::Authority);
    }
    let names = certificate
        .subject_alternative_name()
        .map_err(|_| PeerError::InvalidEncoding)?;
    let names = names.iter().flat_map(|names| &names.value.general_names);
    let uris: Vec<&str> = names
        .filter_map(|name| {
            if let GeneralName::URI(uri) = name {
                Some(*uri)
            } else {
                None
            }
        })
        .collect();
    let [name] = uris[..] else {
        return Err(PeerError::UriSanCount(uris.len()));
    };
    let identity = name.parse().map_err(|reason| PeerError::InvalidIdentity {
        name: name.to_owned(),
        reason,
    })?;
    Ok((
        identity,
        system_time(certificate.validity().not_after.timestamp()),
    ))
}

/// Converts a Unix timestamp; negative ones become 1970.
pub(super) fn system_time(timestamp: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(timestamp).unwrap_or(0))
}

/// Verifies that a server has the expected identity. Ignores the server name.
#[derive(Debug)]
pub struct ServerVerifier {
    roots: Arc<RootCertStore>,
    expected: Identity,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerVerifier {
    /// A verifier of the identity `expected`.
    pub fn new(roots: Arc<RootCertStore>, expected: Identity) -> Arc<Self> {
        Arc::new(Self {
            roots,
            expected,
            algorithms: aws_lc_rs::default_provider().signature_verification_algorithms,
        })
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.roots,
            intermediates,
            now,
            self.algorithms.all,
        )?;
        let (actual, _) = identity_of(end_entity)?;
        if actual != self.expected {
            return Err(PeerError::UnexpectedIdentity {
                expected: self.expected.clone(),
                actual,
            }
            .into());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(tls12_unsupported())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Verifies that a client has a certificate with an identity of the own trust domain.
#[derive(Debug)]
pub struct ClientVerifier {
    chain: Arc<dyn ClientCertVerifier>,
    trust_domain: String,
}

impl ClientVerifier {
    /// A verifier under `roots`. Fails if there are none.
    pub fn new(
        roots: Arc<RootCertStore>,
        trust_domain: &str,
    ) -> Result<Arc<Self>, VerifierBuilderError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider)
            .clear_root_hint_subjects()
            .build()?;
        Ok(Arc::new(Self {
            chain,
            trust_domain: trust_domain.to_owned(),
        }))
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .chain
            .verify_client_cert(end_entity, intermediates, now)?;
        let (actual, _) = identity_of(end_entity)?;
        if actual.trust_domain() != self.trust_domain {
            return Err(PeerError::UnexpectedTrustDomain {
                expected: self.trust_domain.clone(),
                actual,
            }
            .into());
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(tls12_unsupported())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// TLS 1.2 is not offered, so rustls does not verify its signatures.
fn tls12_unsupported() -> Error {
    Error::General("TLS 1.2 is not supported".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secure::identity::testing::{Authority, WEB, uri};
    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose,
    };

    const HOUR: Duration = Duration::from_secs(3600);

    fn web() -> Identity {
        WEB.parse().unwrap()
    }

    fn now() -> UnixTime {
        UnixTime::now()
    }

    /// Results of both verifiers: server, client. The client's result does not depend on the expected
    /// identity.
    fn verify(authority: &Authority, chain: &[CertificateDer<'static>]) -> [Result<(), Error>; 2] {
        let (leaf, intermediates) = chain.split_first().unwrap();
        let name = ServerName::try_from("ignored").unwrap();
        let server = ServerVerifier::new(authority.roots(), web());
        let client = ClientVerifier::new(authority.roots(), "cluster.local").unwrap();
        [
            server
                .verify_server_cert(leaf, intermediates, &name, &[], now())
                .map(drop),
            client
                .verify_client_cert(leaf, intermediates, now())
                .map(drop),
        ]
    }

    fn leaf(
        authority: &Authority,
        change: impl FnOnce(&mut CertificateParams),
    ) -> [Result<(), Error>; 2] {
        verify(authority, &[authority.leaf(WEB, change)])
    }

    fn invalid(reason: PeerError) -> Error {
        reason.into()
    }

    #[test]
    fn accepts_workload_certificate_and_returns_its_identity() {
        let authority = Authority::new("one");
        let leaf = authority.leaf(WEB, |_| {});
        assert_eq!(
            verify(&authority, std::slice::from_ref(&leaf)),
            [Ok(()), Ok(())]
        );
        let (identity, until) = identity_of(&leaf).unwrap();
        let left = until.duration_since(SystemTime::now()).unwrap();
        assert!(
            identity == web() && left > HOUR / 2 && left <= HOUR,
            "{identity} {left:?}"
        );
    }

    #[test]
    fn requires_intermediate_certificates() {
        let root = Authority::new("root");
        let issuer = root.intermediate("issuer");
        let leaf = issuer.leaf(WEB, |_| {});
        assert_eq!(
            verify(&root, &[leaf.clone(), issuer.certificate()]),
            [Ok(()), Ok(())]
        );
        assert_eq!(
            verify(&root, &[leaf]).map(|result| result.is_err()),
            [true, true]
        );
    }

    #[test]
    fn rejects_expired_and_future_certificates() {
        let authority = Authority::new("one");
        for expired in leaf(&authority, |leaf| {
            leaf.not_after = (SystemTime::now() - HOUR / 60).into()
        }) {
            assert!(
                matches!(
                    expired,
                    Err(Error::InvalidCertificate(
                        CertificateError::ExpiredContext { .. }
                    ))
                ),
                "{expired:?}"
            );
        }
        for early in leaf(&authority, |leaf| {
            leaf.not_before = (SystemTime::now() + HOUR / 60).into()
        }) {
            assert!(
                matches!(
                    early,
                    Err(Error::InvalidCertificate(
                        CertificateError::NotValidYetContext { .. }
                    ))
                ),
                "{early:?}"
            );
        }
    }

    #[test]
    fn rejects_certificate_of_another_authority_with_the_same_name() {
        let (ours, other) = (Authority::new("one"), Authority::new("one"));
        let leaf = other.leaf(WEB, |_| {});
        assert_eq!(
            verify(&ours, std::slice::from_ref(&leaf)).map(|result| result.is_err()),
            [true, true]
        );
        assert_eq!(
            verify(&ours, &[leaf, other.certificate()]).map(|result| result.is_err()),
            [true, true]
        );
    }

    #[test]
    fn rejects_certificate_issued_by_a_workload() {
        let authority = Authority::new("one");
        let (stolen, key) =
            authority.leaf_and_key("spiffe://cluster.local/ns/shop/sa/other", |_| {});
        let forged = Authority::from_certificate(stolen.clone(), key).leaf(WEB, |_| {});
        assert_eq!(
            verify(&authority, &[forged, stolen]).map(|result| result.is_err()),
            [true, true]
        );
    }

    #[test]
    fn rejects_ca_certificate_of_a_workload() {
        let authority = Authority::new("one");
        let makes_one =
            |leaf: &mut CertificateParams| leaf.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        assert_eq!(
            leaf(&authority, makes_one).map(|result| result.is_err()),
            [true, true]
        );
        for usage in [KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign] {
            let signs = leaf(&authority, |leaf| leaf.key_usages.push(usage));
            assert_eq!(
                signs.map(as_text),
                [0, 0].map(|_| as_text(Err(invalid(PeerError::Authority))))
            );
        }
    }

    #[test]
    fn requires_extended_key_usage_of_the_role() {
        let authority = Authority::new("one");
        let only = |usage| {
            leaf(&authority, |leaf| leaf.extended_key_usages = vec![usage])
                .map(|result| result.is_ok())
        };
        assert_eq!(only(ExtendedKeyUsagePurpose::ServerAuth), [true, false]);
        assert_eq!(only(ExtendedKeyUsagePurpose::ClientAuth), [false, true]);
        assert_eq!(only(ExtendedKeyUsagePurpose::CodeSigning), [false, false]);
    }

    #[test]
    fn requires_exactly_one_workload_uri_san() {
        let authority = Authority::new("one");
        let refused = |names: &[&str], expected: PeerError| {
            let results = leaf(&authority, |leaf| {
                leaf.subject_alt_names = names.iter().map(|name| uri(name)).collect()
            });
            assert_eq!(
                results.map(as_text),
                [expected.clone(), expected].map(|reason| as_text(Err(invalid(reason)))),
                "{names:?}"
            );
        };
        refused(&[], PeerError::UriSanCount(0));
        refused(&[WEB, WEB], PeerError::UriSanCount(2));
        refused(
            &[WEB, "spiffe://cluster.local/ns/shop/sa/cart"],
            PeerError::UriSanCount(2),
        );
        let foreign = "https://cluster.local/ns/shop/sa/web";
        let reason = foreign.parse::<Identity>().unwrap_err();
        refused(
            &[foreign],
            PeerError::InvalidIdentity {
                name: foreign.to_owned(),
                reason,
            },
        );
        // DNS names are ignored.
        let dns = |leaf: &mut CertificateParams| {
            leaf.subject_alt_names = vec![rcgen::SanType::DnsName("ignored".try_into().unwrap())]
        };
        assert_eq!(
            leaf(&authority, dns).map(as_text),
            [0, 0].map(|names| as_text(Err(invalid(PeerError::UriSanCount(names)))))
        );
        let both = |leaf: &mut CertificateParams| {
            leaf.subject_alt_names
                .push(rcgen::SanType::DnsName("a.b".try_into().unwrap()))
        };
        assert_eq!(leaf(&authority, both), [Ok(()), Ok(())]);
    }

    #[test]
    fn client_requires_expected_identity_and_server_its_trust_domain() {
        let authority = Authority::new("one");
        let cart: Identity = "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap();
        let [server, client] = verify(&authority, &[authority.leaf(cart.as_str(), |_| {})]);
        assert_eq!(
            as_text(server),
            as_text(Err(invalid(PeerError::UnexpectedIdentity {
                expected: web(),
                actual: cart
            })))
        );
        assert_eq!(client, Ok(()));
        let abroad: Identity = "spiffe://example.org/ns/shop/sa/web".parse().unwrap();
        let [server, client] = verify(&authority, &[authority.leaf(abroad.as_str(), |_| {})]);
        assert_eq!(
            as_text(server),
            as_text(Err(invalid(PeerError::UnexpectedIdentity {
                expected: web(),
                actual: abroad.clone()
            })))
        );
        assert_eq!(
            as_text(client),
            as_text(Err(invalid(PeerError::UnexpectedTrustDomain {
                expected: "cluster.local".to_owned(),
                actual: abroad
            })))
        );
    }

    #[test]
    fn requires_client_certificate_without_root_hints() {
        let client = ClientVerifier::new(Authority::new("one").roots(), "cluster.local").unwrap();
        assert!(
            client.offer_client_auth()
                && client.client_auth_mandatory()
                && client.root_hint_subjects().is_empty()
        );
        assert!(
            ClientVerifier::new(Arc::new(RootCertStore::empty()), "cluster.local").is_err(),
            "no roots"
        );
    }

    #[test]
    fn rejects_truncated_and_extended_der() {
        let authority = Authority::new("one");
        let whole = authority.leaf(WEB, |_| {});
        for end in 0..whole.len() {
            assert_eq!(
                identity_of(&CertificateDer::from(&whole[..end])),
                Err(PeerError::InvalidEncoding)
            );
        }
        let longer = [&whole[..], b"more"].concat();
        assert_eq!(
            identity_of(&CertificateDer::from(longer)),
            Err(PeerError::InvalidEncoding)
        );
    }

    /// Compares by text, because custom errors of rustls are never equal.
    fn as_text(result: Result<(), Error>) -> Result<(), String> {
        result.map_err(|error| error.to_string())
    }
}
