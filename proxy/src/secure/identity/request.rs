//! One certificate request: generates a key and a CSR, and validates the response. The private key
//! never leaves the memory.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use diy_mesh_model::identity::{Identity, InvalidIdentity};
use diy_mesh_proto::mesh::v1::{SignCertificateRequest, SignCertificateResponse};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::aws_lc_rs::sign::any_ecdsa_type;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier as _;
use rustls::sign::CertifiedKey;
use thiserror::Error;

use super::leaf::Leaf;
use super::roots::{Roots, RootsError};
use super::verify::{ClientVerifier, PeerError, ServerVerifier};
use crate::secure::control::ControlError;

/// A failed attempt to get a certificate.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// The call of the controller failed.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The token is malformed.
    #[error("invalid service account token: {0}")]
    Token(&'static str),
    /// The subject of the token is not a service account.
    #[error("invalid token subject {subject:?}: {reason}")]
    Subject {
        /// The `sub` claim.
        subject: String,
        /// Why it is invalid.
        reason: InvalidIdentity,
    },
    /// The key or the CSR could not be generated.
    #[error("failed to generate a key and a CSR: {0}")]
    Key(#[from] rcgen::Error),
    /// The roots of the response are invalid.
    #[error("response of the controller rejected: invalid trust roots: {0}")]
    Roots(#[from] RootsError),
    /// The certificate of the response is invalid.
    #[error("response of the controller rejected: {0}")]
    Response(String),
    /// The certificate is not valid now.
    #[error(
        "the new certificate {reason} according to this node's clock: check the clocks of this node and of the controller's"
    )]
    Clock {
        /// "is not valid for another 400s", "expired 20s ago".
        reason: String,
    },
}

/// A request and its private key. Has no `Debug`: it contains the key and the token.
pub(super) struct CertificateRequest {
    identity: Identity,
    key: KeyPair,
    message: SignCertificateRequest,
}

/// A validated certificate.
pub(super) struct Issued {
    pub certified: Arc<CertifiedKey>,
    pub leaf: Leaf,
    pub roots: Roots,
}

impl CertificateRequest {
    /// Generates a key and a CSR for the workload of the token.
    pub fn new(token: String, trust_domain: &str) -> Result<Self, IdentityError> {
        let name = subject(&token)?;
        let identity = Identity::from_user(trust_domain, &name);
        let identity = identity.map_err(|reason| IdentityError::Subject {
            subject: name.clone(),
            reason,
        })?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, name.as_str());
        let csr = params.serialize_request(&key)?.pem()?.into_bytes();
        Ok(Self {
            identity,
            key,
            message: SignCertificateRequest { name, token, csr },
        })
    }

    /// The message to send.
    pub fn message(&self) -> SignCertificateRequest {
        self.message.clone()
    }

    /// Validates the response: the certificate must have the key and the identity of the request,
    /// be valid now, and be trusted under the roots of the response.
    pub fn check(
        self,
        response: &SignCertificateResponse,
        now: SystemTime,
    ) -> Result<Issued, IdentityError> {
        let roots = Roots::parse(&response.ca, &response.roots_version)?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&response.cert).collect();
        let chain = chain
            .map_err(|error| IdentityError::Response(format!("certificate is not PEM: {error}")))?;
        let certificate = chain
            .first()
            .ok_or_else(|| IdentityError::Response("no certificate".to_owned()))?;
        let leaf = Leaf::parse(certificate).map_err(rejected)?;
        if leaf.identity != self.identity {
            return Err(rejected(PeerError::UnexpectedIdentity {
                expected: self.identity,
                actual: leaf.identity,
            }));
        }
        if let Some(reason) = validity_error(&leaf, now) {
            return Err(IdentityError::Clock { reason });
        }
        verify(&chain, &roots, &leaf.identity, now).map_err(rejected)?;
        let key = any_ecdsa_type(&PrivatePkcs8KeyDer::from(self.key.serialize_der()).into())
            .map_err(rejected)?;
        let certified = CertifiedKey::new(chain, key);
        certified
            .keys_match()
            .map_err(|_| IdentityError::Response("certificate has another key".to_owned()))?;
        Ok(Issued {
            certified: Arc::new(certified),
            leaf,
            roots,
        })
    }
}

fn rejected(reason: impl ToString) -> IdentityError {
    IdentityError::Response(reason.to_string())
}

fn validity_error(leaf: &Leaf, now: SystemTime) -> Option<String> {
    let seconds = |time: Duration| Duration::from_secs(time.as_secs().max(1));
    match (
        leaf.not_before.duration_since(now),
        now.duration_since(leaf.not_after),
    ) {
        (Ok(early), _) if !early.is_zero() => {
            Some(format!("is not valid for another {:?}", seconds(early)))
        }
        (_, Ok(late)) => Some(format!("expired {:?} ago", seconds(late))),
        _ => None,
    }
}

/// Verifies the chain as TLS clients and servers do, with the announced roots.
pub(super) fn verify(
    chain: &[CertificateDer<'_>],
    roots: &Roots,
    identity: &Identity,
    now: SystemTime,
) -> Result<(), rustls::Error> {
    let Some((leaf, intermediates)) = chain.split_first() else {
        return Err(rustls::Error::NoCertificatesPresented);
    };
    let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or_default());
    let server_name = ServerName::from(std::net::IpAddr::from([0, 0, 0, 0]));
    ServerVerifier::new(roots.store.clone(), identity.clone()).verify_server_cert(
        leaf,
        intermediates,
        &server_name,
        &[],
        now,
    )?;
    let client = ClientVerifier::new(roots.store.clone(), identity.trust_domain());
    client
        .map_err(|error| rustls::Error::General(error.to_string()))?
        .verify_client_cert(leaf, intermediates, now)?;
    Ok(())
}

/// The `sub` claim of a token, which the controller authenticates.
fn subject(token: &str) -> Result<String, IdentityError> {
    let payload = token
        .split('.')
        .nth(1)
        .ok_or(IdentityError::Token("expected three parts"))?;
    let claims = URL_SAFE_NO_PAD
        .decode(payload)
        .map_err(|_| IdentityError::Token("payload is not base64url"))?;
    let claims: serde_json::Value =
        serde_json::from_slice(&claims).map_err(|_| IdentityError::Token("claims are not JSON"))?;
    claims["sub"]
        .as_str()
        .map(str::to_owned)
        .ok_or(IdentityError::Token("missing claim sub"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secure::identity::testing::{Authority, WEB, token};
    use rcgen::CertificateSigningRequestParams;

    const WEB_USER: &str = "system:serviceaccount:shop:web";

    fn request() -> CertificateRequest {
        CertificateRequest::new(token(WEB_USER), "cluster.local").unwrap()
    }

    fn response(authority: &Authority, certificates: &[String]) -> SignCertificateResponse {
        SignCertificateResponse {
            cert: certificates.concat().into_bytes(),
            ca: authority.pem().into_bytes(),
            roots_version: "1".to_owned(),
        }
    }

    /// The result of a request that `sign` responds to.
    fn check(
        sign: impl FnOnce(&CertificateSigningRequestParams) -> SignCertificateResponse,
    ) -> Result<Issued, String> {
        let request = request();
        let csr = CertificateSigningRequestParams::from_pem(
            std::str::from_utf8(&request.message().csr).unwrap(),
        )
        .unwrap();
        let response = sign(&csr);
        request
            .check(&response, SystemTime::now())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn request_contains_only_the_user_and_a_new_key() {
        let message = request().message();
        assert_eq!(
            (message.name.as_str(), message.token),
            (WEB_USER, token(WEB_USER))
        );
        let csr =
            CertificateSigningRequestParams::from_pem(std::str::from_utf8(&message.csr).unwrap())
                .unwrap();
        let names: Vec<_> = csr
            .params
            .distinguished_name
            .iter()
            .map(|(kind, value)| (kind.clone(), format!("{value:?}")))
            .collect();
        assert!(
            matches!(&names[..], [(DnType::CommonName, name)] if name.contains(WEB_USER)),
            "{names:?}"
        );
        assert!(csr.params.subject_alt_names.is_empty());
        assert_eq!(csr.public_key.algorithm(), &rcgen::PKCS_ECDSA_P256_SHA256);
        assert_ne!(
            request().key.public_key_raw(),
            request().key.public_key_raw(),
            "each request has a new key"
        );
    }

    #[test]
    fn rejects_token_without_workload() {
        let no_json = format!("e30.{}.x", URL_SAFE_NO_PAD.encode("no json"));
        for (token, expected) in [
            (String::new(), "three parts"),
            ("one.!.three".to_owned(), "base64"),
            (no_json, "JSON"),
            ("e30.e30.x".to_owned(), "missing claim sub"),
            (token("kubernetes-admin"), "not a service account"),
        ] {
            let error = CertificateRequest::new(token, "cluster.local")
                .err()
                .expect(expected)
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn accepts_the_requested_certificate() {
        let root = Authority::new("root");
        let issuer = root.intermediate("issuer");
        let issued = check(|csr| {
            response(
                &root,
                &[
                    issuer.sign(WEB, &csr.public_key, |_| {}).pem(),
                    issuer.pem(),
                ],
            )
        })
        .unwrap();
        assert_eq!(
            (issued.leaf.identity.as_str(), issued.certified.cert.len()),
            (WEB, 2)
        );
        assert_eq!(
            (issued.roots.version.as_str(), issued.leaf.issuer),
            ("1", issuer.key_id())
        );
    }

    #[test]
    fn rejects_other_certificates() {
        let (one, other) = (Authority::new("one"), Authority::new("other"));
        let refused = |expected: &str,
                       sign: &dyn Fn(
            &CertificateSigningRequestParams,
        ) -> SignCertificateResponse| {
            let error = check(sign).err().expect(expected);
            assert!(error.contains(expected), "{error}");
        };
        refused("another key", &|_| {
            response(
                &one,
                &[one.sign(WEB, &KeyPair::generate().unwrap(), |_| {}).pem()],
            )
        });
        let cart = "spiffe://cluster.local/ns/shop/sa/cart";
        refused("peer is spiffe://cluster.local/ns/shop/sa/cart", &|csr| {
            response(&one, &[one.sign(cart, &csr.public_key, |_| {}).pem()])
        });
        refused("UnknownIssuer", &|csr| {
            response(&other, &[one.sign(WEB, &csr.public_key, |_| {}).pem()])
        });
        refused("no certificate", &|_| response(&one, &[]));
        refused("invalid trust roots", &|csr| SignCertificateResponse {
            ca: Vec::new(),
            ..response(&one, &[one.sign(WEB, &csr.public_key, |_| {}).pem()])
        });
        let from =
            |time: SystemTime| move |leaf: &mut CertificateParams| leaf.not_before = time.into();
        let until =
            |time: SystemTime| move |leaf: &mut CertificateParams| leaf.not_after = time.into();
        let (before, after) = (
            SystemTime::now() - Duration::from_secs(400),
            SystemTime::now() + Duration::from_secs(400),
        );
        refused("is not valid for another", &|csr| {
            response(&one, &[one.sign(WEB, &csr.public_key, from(after)).pem()])
        });
        refused("expired", &|csr| {
            response(&one, &[one.sign(WEB, &csr.public_key, until(before)).pem()])
        });
        let one_sided = |leaf: &mut CertificateParams| leaf.extended_key_usages.truncate(1);
        refused("certificate", &|csr| {
            response(&one, &[one.sign(WEB, &csr.public_key, one_sided).pem()])
        });
    }
}
