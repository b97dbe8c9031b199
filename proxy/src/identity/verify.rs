//! Whether a peer is who it has to be: its chain leads to the roots, it is valid now, it is for this side of TLS, and its one URI
//! SAN is the identity expected (X.509-SVID, section 5). Both sides' verifiers for rustls. It asks nobody and remembers nothing.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diy_mesh_proto::Identity;
use diy_mesh_proto::identity::InvalidIdentity;
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

/// Why a certificate, whoever signed it, does not say that its holder is the peer wanted.
#[derive(Clone, PartialEq, Eq, ThisError)]
pub enum NotThePeer {
    /// It can't be read.
    #[error("the peer's certificate can't be read")]
    Unreadable,
    /// Its key may sign certificates: it is an authority's, not a workload's.
    #[error("the peer's certificate is one to sign others with, not a workload's")]
    Authority,
    /// A workload's certificate names exactly one.
    #[error("the peer's certificate has {0} URI SANs instead of one")]
    Names(usize),
    /// It names something else.
    #[error("the peer's certificate names {name:?}: {reason}")]
    NoWorkload {
        /// What the certificate says.
        name: String,
        /// What is wrong with it.
        reason: InvalidIdentity,
    },
    /// It names another workload.
    #[error("the peer is {actual}, expected {expected}")]
    Another {
        /// Whom the connection was for.
        expected: Identity,
        /// Who answered.
        actual: Identity,
    },
    /// It names a workload of another mesh.
    #[error("the peer is {actual}, which is not of the trust domain {expected}")]
    Stranger {
        /// Our own.
        expected: String,
        /// Who called.
        actual: Identity,
    },
}

/// For people: rustls prints what it is given by others in this way alone.
impl fmt::Debug for NotThePeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<NotThePeer> for Error {
    fn from(reason: NotThePeer) -> Self {
        match reason {
            NotThePeer::Unreadable => Self::InvalidCertificate(CertificateError::BadEncoding),
            reason => {
                Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(reason))))
            }
        }
    }
}

/// Who a certificate says its holder is, and until when. It verifies nothing else: the chain is the handshake's affair, which a
/// resumed one has behind it.
pub fn identity_of(leaf: &CertificateDer<'_>) -> Result<(Identity, SystemTime), NotThePeer> {
    let Ok(([], certificate)) = X509Certificate::from_der(leaf) else {
        return Err(NotThePeer::Unreadable);
    };
    let usage = certificate
        .key_usage()
        .map_err(|_| NotThePeer::Unreadable)?;
    if certificate.is_ca()
        || usage.is_some_and(|usage| usage.value.key_cert_sign() || usage.value.crl_sign())
    {
        return Err(NotThePeer::Authority);
    }
    let names = certificate
        .subject_alternative_name()
        .map_err(|_| NotThePeer::Unreadable)?;
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
        return Err(NotThePeer::Names(uris.len()));
    };
    let identity = name.parse().map_err(|reason| NotThePeer::NoWorkload {
        name: name.to_owned(),
        reason,
    })?;
    Ok((
        identity,
        system_time(certificate.validity().not_after.timestamp()),
    ))
}

/// A certificate's time; one before 1970 is 1970.
pub(super) fn system_time(timestamp: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(timestamp).unwrap_or(0))
}

/// Verifies a server: exactly one identity is right, the one that the connection is for. The server's name is not looked at.
#[derive(Debug)]
pub struct ServerVerifier {
    roots: Arc<RootCertStore>,
    expected: Identity,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerVerifier {
    /// For connections to `expected`.
    pub fn new(roots: Arc<RootCertStore>, expected: Identity) -> Arc<Self> {
        Arc::new(Self {
            roots,
            expected,
            algorithms: algorithms(),
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
            return Err(NotThePeer::Another {
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
        Err(old_tls())
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

/// Verifies a client: it must have a certificate, and be a workload of our own trust domain.
#[derive(Debug)]
pub struct ClientVerifier {
    chain: Arc<dyn ClientCertVerifier>,
    trust_domain: String,
}

impl ClientVerifier {
    /// For callers that `roots` vouch for; an error where there are none.
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
            return Err(NotThePeer::Stranger {
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
        Err(old_tls())
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

fn algorithms() -> WebPkiSupportedAlgorithms {
    aws_lc_rs::default_provider().signature_verification_algorithms
}

/// TLS 1.2 is not offered: this is what is left to say should rustls ask all the same.
fn old_tls() -> Error {
    Error::General("inside the mesh there is TLS 1.3 only".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{Authority, WEB, uri};
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

    /// What both sides say of a chain. The client's verdict does not depend on the identity expected.
    fn verdicts(
        authority: &Authority,
        chain: &[CertificateDer<'static>],
    ) -> [Result<(), Error>; 2] {
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
        verdicts(authority, &[authority.leaf(WEB, change)])
    }

    fn invalid(reason: NotThePeer) -> Error {
        reason.into()
    }

    #[test]
    fn a_workload_is_verified_and_named() {
        let authority = Authority::new("one");
        let leaf = authority.leaf(WEB, |_| {});
        assert_eq!(
            verdicts(&authority, std::slice::from_ref(&leaf)),
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
    fn an_intermediate_may_stand_between_and_must_be_shown() {
        let root = Authority::new("root");
        let issuer = root.intermediate("issuer");
        let leaf = issuer.leaf(WEB, |_| {});
        assert_eq!(
            verdicts(&root, &[leaf.clone(), issuer.certificate()]),
            [Ok(()), Ok(())]
        );
        assert_eq!(
            verdicts(&root, &[leaf]).map(|verdict| verdict.is_err()),
            [true, true]
        );
    }

    #[test]
    fn the_clock_is_looked_at() {
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
    fn another_authority_proves_nothing_whatever_its_name() {
        let (ours, other) = (Authority::new("one"), Authority::new("one"));
        let leaf = other.leaf(WEB, |_| {});
        assert_eq!(
            verdicts(&ours, std::slice::from_ref(&leaf)).map(|verdict| verdict.is_err()),
            [true, true]
        );
        assert_eq!(
            verdicts(&ours, &[leaf, other.certificate()]).map(|verdict| verdict.is_err()),
            [true, true]
        );
    }

    #[test]
    fn a_workload_can_vouch_for_nobody() {
        let authority = Authority::new("one");
        let (stolen, key) =
            authority.leaf_and_key("spiffe://cluster.local/ns/shop/sa/thief", |_| {});
        let forged = Authority::of(stolen.clone(), key).leaf(WEB, |_| {});
        assert_eq!(
            verdicts(&authority, &[forged, stolen]).map(|verdict| verdict.is_err()),
            [true, true]
        );
    }

    #[test]
    fn an_authority_is_no_workload() {
        let authority = Authority::new("one");
        let makes_one =
            |leaf: &mut CertificateParams| leaf.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        assert_eq!(
            leaf(&authority, makes_one).map(|verdict| verdict.is_err()),
            [true, true]
        );
        for usage in [KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign] {
            let signs = leaf(&authority, |leaf| leaf.key_usages.push(usage));
            assert_eq!(
                signs.map(loose),
                [0, 0].map(|_| loose(Err(invalid(NotThePeer::Authority))))
            );
        }
    }

    #[test]
    fn the_certificate_is_for_the_side_of_tls_that_it_is_shown_on() {
        let authority = Authority::new("one");
        let only = |usage| {
            leaf(&authority, |leaf| leaf.extended_key_usages = vec![usage])
                .map(|verdict| verdict.is_ok())
        };
        assert_eq!(only(ExtendedKeyUsagePurpose::ServerAuth), [true, false]);
        assert_eq!(only(ExtendedKeyUsagePurpose::ClientAuth), [false, true]);
        assert_eq!(only(ExtendedKeyUsagePurpose::CodeSigning), [false, false]);
    }

    #[test]
    fn there_is_one_name_and_it_is_a_workloads() {
        let authority = Authority::new("one");
        let refused = |names: &[&str], expected: NotThePeer| {
            let verdicts = leaf(&authority, |leaf| {
                leaf.subject_alt_names = names.iter().map(|name| uri(name)).collect()
            });
            assert_eq!(
                verdicts.map(loose),
                [expected.clone(), expected].map(|reason| loose(Err(invalid(reason)))),
                "{names:?}"
            );
        };
        refused(&[], NotThePeer::Names(0));
        refused(&[WEB, WEB], NotThePeer::Names(2));
        refused(
            &[WEB, "spiffe://cluster.local/ns/shop/sa/cart"],
            NotThePeer::Names(2),
        );
        let foreign = "https://cluster.local/ns/shop/sa/web";
        let reason = foreign.parse::<Identity>().unwrap_err();
        refused(
            &[foreign],
            NotThePeer::NoWorkload {
                name: foreign.to_owned(),
                reason,
            },
        );
        // DNS names count for nothing.
        let dns = |leaf: &mut CertificateParams| {
            leaf.subject_alt_names = vec![rcgen::SanType::DnsName("ignored".try_into().unwrap())]
        };
        assert_eq!(
            leaf(&authority, dns).map(loose),
            [0, 0].map(|names| loose(Err(invalid(NotThePeer::Names(names)))))
        );
        let both = |leaf: &mut CertificateParams| {
            leaf.subject_alt_names
                .push(rcgen::SanType::DnsName("a.b".try_into().unwrap()))
        };
        assert_eq!(leaf(&authority, both), [Ok(()), Ok(())]);
    }

    #[test]
    fn a_client_wants_one_server_and_a_server_its_own_trust_domain() {
        let authority = Authority::new("one");
        let cart: Identity = "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap();
        let [server, client] = verdicts(&authority, &[authority.leaf(cart.as_str(), |_| {})]);
        assert_eq!(
            loose(server),
            loose(Err(invalid(NotThePeer::Another {
                expected: web(),
                actual: cart
            })))
        );
        assert_eq!(client, Ok(()));
        let abroad: Identity = "spiffe://example.org/ns/shop/sa/web".parse().unwrap();
        let [server, client] = verdicts(&authority, &[authority.leaf(abroad.as_str(), |_| {})]);
        assert_eq!(
            loose(server),
            loose(Err(invalid(NotThePeer::Another {
                expected: web(),
                actual: abroad.clone()
            })))
        );
        assert_eq!(
            loose(client),
            loose(Err(invalid(NotThePeer::Stranger {
                expected: "cluster.local".to_owned(),
                actual: abroad
            })))
        );
    }

    #[test]
    fn a_client_must_show_a_certificate_and_is_told_no_names_of_authorities() {
        let client = ClientVerifier::new(Authority::new("one").roots(), "cluster.local").unwrap();
        assert!(
            client.offer_client_auth()
                && client.client_auth_mandatory()
                && client.root_hint_subjects().is_empty()
        );
        assert!(
            ClientVerifier::new(Arc::new(RootCertStore::empty()), "cluster.local").is_err(),
            "without roots nobody is trusted"
        );
    }

    #[test]
    fn bytes_that_are_no_certificate_are_no_peer() {
        let authority = Authority::new("one");
        let whole = authority.leaf(WEB, |_| {});
        for end in 0..whole.len() {
            assert_eq!(
                identity_of(&CertificateDer::from(&whole[..end])),
                Err(NotThePeer::Unreadable)
            );
        }
        let longer = [&whole[..], b"more"].concat();
        assert_eq!(
            identity_of(&CertificateDer::from(longer)),
            Err(NotThePeer::Unreadable)
        );
    }

    /// Errors of ours compare by their text: rustls holds no two of another's errors for equal.
    fn loose(verdict: Result<(), Error>) -> Result<(), String> {
        verdict.map_err(|error| error.to_string())
    }
}
