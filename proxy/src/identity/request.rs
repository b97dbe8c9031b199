//! One certificate: a new key and what is asked for it, and whether the answer is what was asked for. Pure but for the making of
//! the key, which stays in memory and goes nowhere.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use diy_mesh_proto::Identity;
use diy_mesh_proto::identity::InvalidIdentity;
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
use super::roots::{BadRoots, Roots};
use super::verify::{ClientVerifier, NotThePeer, ServerVerifier};
use crate::control::ControlError;

/// Why there is no new certificate.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// The controller was not reached, or said no.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The token does not say who we are.
    #[error("the token is not a service account's: {0}")]
    Token(&'static str),
    /// The token names no workload.
    #[error("the token's subject is {subject:?}: {reason}")]
    Subject {
        /// What it says.
        subject: String,
        /// What is wrong with it.
        reason: InvalidIdentity,
    },
    /// No key, or no request for it.
    #[error("can't make a key and a request: {0}")]
    Key(#[from] rcgen::Error),
    /// The answer's roots.
    #[error("the controller's answer is not taken: its roots are wrong: {0}")]
    Roots(#[from] BadRoots),
    /// The answer's certificate.
    #[error("the controller's answer is not taken: {0}")]
    Answer(String),
    /// The certificate is right, but not now, as this machine's clock has it.
    #[error(
        "the new certificate {what} by this machine's clock, which is wrong, or the controller's is"
    )]
    Clock {
        /// "begins in 400s only", "has ended 20s ago".
        what: String,
    },
}

/// What is asked of the controller, and the key that it is for. Not to be printed: it holds both secrets.
pub(super) struct Request {
    identity: Identity,
    key: KeyPair,
    message: SignCertificateRequest,
}

/// A certificate that has been found right.
pub(super) struct Issued {
    pub certified: Arc<CertifiedKey>,
    pub leaf: Leaf,
    pub roots: Roots,
}

impl Request {
    /// For the workload that the token belongs to, with a key of its own.
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

    /// What to send.
    pub fn message(&self) -> SignCertificateRequest {
        self.message.clone()
    }

    /// The certificate, if it is for our key and our name, valid now, and proves that to whoever trusts the roots beside it.
    pub fn check(
        self,
        answer: &SignCertificateResponse,
        now: SystemTime,
    ) -> Result<Issued, IdentityError> {
        let roots = Roots::parse(&answer.ca, &answer.roots_version)?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&answer.cert).collect();
        let chain = chain.map_err(|error| {
            IdentityError::Answer(format!("the certificate is not in PEM: {error}"))
        })?;
        let certificate = chain
            .first()
            .ok_or_else(|| IdentityError::Answer("there is no certificate in it".to_owned()))?;
        let leaf = Leaf::read(certificate).map_err(not_taken)?;
        if leaf.identity != self.identity {
            return Err(not_taken(NotThePeer::Another {
                expected: self.identity,
                actual: leaf.identity,
            }));
        }
        if let Some(what) = out_of_time(&leaf, now) {
            return Err(IdentityError::Clock { what });
        }
        verify(&chain, &roots, &leaf.identity, now).map_err(not_taken)?;
        let key = any_ecdsa_type(&PrivatePkcs8KeyDer::from(self.key.serialize_der()).into())
            .map_err(not_taken)?;
        let certified = CertifiedKey::new(chain, key);
        certified
            .keys_match()
            .map_err(|_| IdentityError::Answer("the certificate is for another key".to_owned()))?;
        Ok(Issued {
            certified: Arc::new(certified),
            leaf,
            roots,
        })
    }
}

fn not_taken(reason: impl ToString) -> IdentityError {
    IdentityError::Answer(reason.to_string())
}

fn out_of_time(leaf: &Leaf, now: SystemTime) -> Option<String> {
    let seconds = |time: Duration| Duration::from_secs(time.as_secs().max(1));
    match (
        leaf.not_before.duration_since(now),
        now.duration_since(leaf.not_after),
    ) {
        (Ok(early), _) if !early.is_zero() => Some(format!("begins in {:?} only", seconds(early))),
        (_, Ok(late)) => Some(format!("has ended {:?} ago", seconds(late))),
        _ => None,
    }
}

/// As peers will, on both sides of TLS.
fn verify(
    chain: &[CertificateDer<'_>],
    roots: &Roots,
    identity: &Identity,
    now: SystemTime,
) -> Result<(), rustls::Error> {
    let Some((leaf, intermediates)) = chain.split_first() else {
        return Err(rustls::Error::NoCertificatesPresented);
    };
    let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or_default());
    let nameless = ServerName::from(std::net::IpAddr::from([0, 0, 0, 0]));
    ServerVerifier::new(roots.store.clone(), identity.clone()).verify_server_cert(
        leaf,
        intermediates,
        &nameless,
        &[],
        now,
    )?;
    let client = ClientVerifier::new(roots.store.clone(), identity.trust_domain());
    client
        .map_err(|error| rustls::Error::General(error.to_string()))?
        .verify_client_cert(leaf, intermediates, now)?;
    Ok(())
}

/// The `sub` claim of a token. Whether the token is good, the controller knows; here it says who to ask for.
fn subject(token: &str) -> Result<String, IdentityError> {
    let payload = token
        .split('.')
        .nth(1)
        .ok_or(IdentityError::Token("it has no three parts"))?;
    let claims = URL_SAFE_NO_PAD
        .decode(payload)
        .map_err(|_| IdentityError::Token("its second part is not in base64"))?;
    let claims: serde_json::Value = serde_json::from_slice(&claims)
        .map_err(|_| IdentityError::Token("its claims are not in JSON"))?;
    claims["sub"]
        .as_str()
        .map(str::to_owned)
        .ok_or(IdentityError::Token("it has no subject"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{Authority, WEB, token};
    use rcgen::CertificateSigningRequestParams;

    const WEB_USER: &str = "system:serviceaccount:shop:web";

    fn request() -> Request {
        Request::new(token(WEB_USER), "cluster.local").unwrap()
    }

    fn answer(authority: &Authority, certificates: &[String]) -> SignCertificateResponse {
        SignCertificateResponse {
            cert: certificates.concat().into_bytes(),
            ca: authority.pem().into_bytes(),
            roots_version: "1".to_owned(),
        }
    }

    /// What comes of a request that `sign` answers.
    fn check(
        sign: impl FnOnce(&CertificateSigningRequestParams) -> SignCertificateResponse,
    ) -> Result<Issued, String> {
        let request = request();
        let csr = CertificateSigningRequestParams::from_pem(
            std::str::from_utf8(&request.message().csr).unwrap(),
        )
        .unwrap();
        let answer = sign(&csr);
        request
            .check(&answer, SystemTime::now())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_request_names_the_tokens_user_and_nothing_else() {
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
            "each has a key of its own"
        );
    }

    #[test]
    fn a_token_that_names_no_workload_asks_for_nothing() {
        let no_json = format!("e30.{}.x", URL_SAFE_NO_PAD.encode("no json"));
        for (token, expected) in [
            (String::new(), "three parts"),
            ("one.!.three".to_owned(), "base64"),
            (no_json, "JSON"),
            ("e30.e30.x".to_owned(), "no subject"),
            (token("kubernetes-admin"), "not a service account"),
        ] {
            let error = Request::new(token, "cluster.local")
                .err()
                .expect(expected)
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        let root = Authority::new("root");
        let issuer = root.intermediate("issuer");
        let issued = check(|csr| {
            answer(
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
    fn what_was_not_asked_for_is_not_taken() {
        let (one, other) = (Authority::new("one"), Authority::new("other"));
        let refused = |expected: &str,
                       sign: &dyn Fn(
            &CertificateSigningRequestParams,
        ) -> SignCertificateResponse| {
            let error = check(sign).err().expect(expected);
            assert!(error.contains(expected), "{error}");
        };
        refused("another key", &|_| {
            answer(
                &one,
                &[one.sign(WEB, &KeyPair::generate().unwrap(), |_| {}).pem()],
            )
        });
        let cart = "spiffe://cluster.local/ns/shop/sa/cart";
        refused(
            "the peer is spiffe://cluster.local/ns/shop/sa/cart",
            &|csr| answer(&one, &[one.sign(cart, &csr.public_key, |_| {}).pem()]),
        );
        refused("UnknownIssuer", &|csr| {
            answer(&other, &[one.sign(WEB, &csr.public_key, |_| {}).pem()])
        });
        refused("no certificate", &|_| answer(&one, &[]));
        refused("its roots are wrong", &|csr| SignCertificateResponse {
            ca: Vec::new(),
            ..answer(&one, &[one.sign(WEB, &csr.public_key, |_| {}).pem()])
        });
        let from =
            |time: SystemTime| move |leaf: &mut CertificateParams| leaf.not_before = time.into();
        let until =
            |time: SystemTime| move |leaf: &mut CertificateParams| leaf.not_after = time.into();
        let (before, after) = (
            SystemTime::now() - Duration::from_secs(400),
            SystemTime::now() + Duration::from_secs(400),
        );
        refused("begins in", &|csr| {
            answer(&one, &[one.sign(WEB, &csr.public_key, from(after)).pem()])
        });
        refused("has ended", &|csr| {
            answer(&one, &[one.sign(WEB, &csr.public_key, until(before)).pem()])
        });
        let one_sided = |leaf: &mut CertificateParams| leaf.extended_key_usages.truncate(1);
        refused("certificate", &|csr| {
            answer(&one, &[one.sign(WEB, &csr.public_key, one_sided).pem()])
        });
    }
}
