//! Verification of tokens with a file of public keys (a JWK set), without a Kubernetes API: in the
//! sandbox and on plain machines.
//!
//! A changed file is read again before each verification. The previous keys stay in use if it is
//! invalid.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use diy_mesh_jwt::{Expected, Keys, KeysError, Refused};
use serde::Deserialize;

use super::{Accepted, AuthError, Caller, refused, wrong_audience};
use crate::file::Stamp;
use crate::object::PodRef;

/// The tolerated clock skew of the issuer, in seconds.
const LEEWAY: u64 = 10;

/// An unusable file of keys.
#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, #[source] std::io::Error),
    /// The file contains no keys.
    #[error("{0}: {1}")]
    Keys(PathBuf, #[source] KeysError),
}

/// Verifies tokens with the keys of a file.
pub struct Jwks {
    path: PathBuf,
    expected: Expected,
    keys: Mutex<(Stamp, Keys)>,
}

#[derive(Deserialize)]
struct Claims {
    sub: String,
    exp: u64,
    #[serde(rename = "kubernetes.io", default)]
    kubernetes: Bound,
}

/// The private claim of Kubernetes.
#[derive(Default, Deserialize)]
struct Bound {
    namespace: Option<String>,
    pod: Option<BoundObject>,
}

#[derive(Deserialize)]
struct BoundObject {
    name: String,
    uid: String,
}

impl Claims {
    fn caller(&self) -> Caller {
        let Bound { namespace, pod } = &self.kubernetes;
        let pod = pod
            .as_ref()
            .and_then(|pod| PodRef::of(&self.sub, Some(&pod.name), Some(&pod.uid)));
        // A token with contradictory claims is bound to no pod.
        let pod = pod.filter(|pod| namespace.as_deref() == Some(&*pod.namespace));
        Caller {
            user: self.sub.as_str().into(),
            pod,
        }
    }
}

impl Jwks {
    /// Reads the keys. `issuer` is the only accepted issuer, if any.
    pub fn open(path: &Path, issuer: Option<String>) -> Result<Jwks, JwksError> {
        let stamp = Stamp::of(path).map_err(|error| JwksError::Read(path.to_owned(), error))?;
        Ok(Jwks {
            path: path.to_owned(),
            expected: Expected::new(issuer.as_deref(), &[diy_mesh_proto::TOKEN_AUDIENCE], LEEWAY),
            keys: Mutex::new((stamp, read(path)?)),
        })
    }

    /// The sender of a token.
    pub(super) fn verify(&self, token: &str) -> Result<Accepted, AuthError> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut keys);
        let claims: Result<Claims, _> = keys.1.verify(token, &self.expected);
        match claims {
            Ok(claims) if claims.sub.is_empty() => Err(refused("it names no subject")),
            Ok(claims) => Ok(Accepted {
                caller: claims.caller(),
                expires: Some(claims.exp),
            }),
            Err(Refused::Audience(_)) => Err(refused(&wrong_audience())),
            Err(reason) => Err(refused(&reason.to_string())),
        }
    }

    fn refresh(&self, (known, keys): &mut (Stamp, Keys)) {
        let Ok(stamp) = Stamp::of(&self.path) else {
            return;
        };
        if !stamp.differs(known) {
            return;
        }
        *known = stamp;
        match read(&self.path) {
            Ok(all) => {
                tracing::info!(file = %self.path.display(), keys = all.count(), "keys of the token issuer reloaded");
                *keys = all;
            }
            Err(error) => tracing::error!(
                "cannot reload the keys of the token issuer, the previous ones stay in use: {error}"
            ),
        }
    }
}

fn read(path: &Path) -> Result<Keys, JwksError> {
    let text = std::fs::read(path).map_err(|error| JwksError::Read(path.to_owned(), error))?;
    Keys::parse(&text).map_err(|error| JwksError::Keys(path.to_owned(), error))
}

#[cfg(test)]
mod tests {
    use diy_mesh_testkit::tokens::{Signer, now};
    use jsonwebtoken::{Algorithm, EncodingKey, Header};
    use serde_json::{Value, json};

    use super::*;

    fn claims(changes: &[(&str, Value)]) -> Value {
        let now = now();
        let mut claims = json!({"iss": "us", "aud": ["diy-service-mesh"], "sub": "system:serviceaccount:a:b", "nbf": now, "exp": now + 600});
        for (claim, value) in changes {
            claims[*claim] = value.clone();
            if value.is_null() {
                claims.as_object_mut().unwrap().remove(*claim);
            }
        }
        claims
    }

    fn write(path: &Path, keys: &[Value]) {
        let hidden = path.with_extension("new");
        std::fs::write(&hidden, json!({ "keys": keys }).to_string()).unwrap();
        std::fs::rename(hidden, path).unwrap();
    }

    fn reason(jwks: &Jwks, token: &str) -> String {
        match jwks.verify(token).unwrap_err() {
            AuthError::Refused(reason) => reason.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn accepts_valid_token_with_subject_and_expiry() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer) = (dir.path().join("jwks.json"), Signer::named("k"));
        write(&path, &[Signer::named("other").jwk(), issuer.jwk()]);
        let jwks = Jwks::open(&path, Some("us".into())).unwrap();
        let claims = claims(&[]);
        let accepted = jwks.verify(&issuer.sign(&claims)).unwrap();
        let caller = Caller {
            user: "system:serviceaccount:a:b".into(),
            pod: None,
        };
        assert_eq!(
            accepted,
            Accepted {
                caller,
                expires: claims["exp"].as_u64()
            }
        );
    }

    #[test]
    fn returns_the_pod_of_a_bound_token() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer) = (dir.path().join("jwks.json"), Signer::named("k"));
        write(&path, &[issuer.jwk()]);
        let jwks = Jwks::open(&path, None).unwrap();
        let pod = |kubernetes: Value| {
            jwks.verify(&issuer.sign(&claims(&[("kubernetes.io", kubernetes)])))
                .unwrap()
                .caller
                .pod
        };
        let bound = pod(
            json!({"namespace": "a", "pod": {"name": "b-1", "uid": "u"}, "serviceaccount": {"name": "b", "uid": "v"}}),
        );
        assert_eq!(
            bound,
            Some(PodRef {
                namespace: "a".into(),
                name: "b-1".into(),
                uid: "u".into()
            })
        );
        assert_eq!(
            pod(json!({"namespace": "a", "serviceaccount": {"name": "b", "uid": "v"}})),
            None
        );
        assert_eq!(
            pod(json!({"namespace": "other", "pod": {"name": "b-1", "uid": "u"}})),
            None
        );
        assert_eq!(pod(json!({"pod": {"name": "b-1", "uid": "u"}})), None);
    }

    #[test]
    fn rejects_invalid_claims_with_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer) = (dir.path().join("jwks.json"), Signer::named("k"));
        write(&path, &[issuer.jwk()]);
        let jwks = Jwks::open(&path, Some("us".into())).unwrap();
        let now = claims(&[])["nbf"].as_u64().unwrap();
        let cases = [
            (
                "aud",
                json!("another"),
                "its audience is not \"diy-service-mesh\"",
            ),
            ("aud", Value::Null, "the claim \"aud\" is missing"),
            ("exp", json!(now - 60), "it has expired"),
            ("exp", Value::Null, "exp"),
            ("nbf", json!(now + 60), "it is not valid yet (nbf)"),
            ("iss", json!("them"), "its issuer is not \"us\""),
            ("iss", Value::Null, "the claim \"iss\" is missing"),
            ("sub", json!(""), "it names no subject"),
        ];
        for (claim, value, expected) in cases {
            let reason = reason(&jwks, &issuer.sign(&claims(&[(claim, value.clone())])));
            assert!(reason.contains(expected), "{claim} {value}: {reason}");
        }
    }

    #[test]
    fn rejects_symmetric_algorithms_and_unknown_keys() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer, other_issuer) = (
            dir.path().join("jwks.json"),
            Signer::named("k"),
            Signer::named("k"),
        );
        let shared = json!({"kty": "oct", "k": "c2VjcmV0", "kid": "k", "alg": "HS256"});
        write(&path, &[shared.clone(), issuer.jwk()]);
        let jwks = Jwks::open(&path, None).unwrap();
        assert!(reason(&jwks, &other_issuer.sign(&claims(&[]))).contains("signature"));
        let symmetric = jsonwebtoken::encode(
            &Header::new(Algorithm::HS256),
            &claims(&[]),
            &EncodingKey::from_secret(b"secret"),
        )
        .unwrap();
        assert!(reason(&jwks, &symmetric).contains("symmetric"));
        // {"alg":"none"}
        let unsigned = format!(
            "eyJhbGciOiJub25lIn0.{}.",
            issuer.sign(&claims(&[])).split('.').nth(1).unwrap()
        );
        assert!(reason(&jwks, &unsigned).contains("algorithm"));
        assert!(reason(&jwks, "rubbish").contains("JWT"));
        let mut other_id = issuer.clone();
        other_id.id = Some("another".into());
        assert!(reason(&jwks, &other_id.sign(&claims(&[]))).contains("key ID"));
        write(&path, &[shared]);
        assert!(
            matches!(
                Jwks::open(&path, None),
                Err(JwksError::Keys(_, KeysError::Empty))
            ),
            "a shared secret alone is no key"
        );
    }

    #[test]
    fn reloads_keys_and_keeps_previous_ones_if_invalid() {
        let dir = tempfile::tempdir().unwrap();
        let (path, old, new) = (
            dir.path().join("jwks.json"),
            Signer::named("old"),
            Signer::named("new"),
        );
        write(&path, &[old.jwk()]);
        let jwks = Jwks::open(&path, None).unwrap();
        assert!(jwks.verify(&new.sign(&claims(&[]))).is_err());
        write(&path, &[new.jwk()]);
        assert!(jwks.verify(&new.sign(&claims(&[]))).is_ok());
        assert!(jwks.verify(&old.sign(&claims(&[]))).is_err());
        std::fs::write(&path, "{").unwrap();
        assert!(jwks.verify(&new.sign(&claims(&[]))).is_ok());
        std::fs::remove_file(&path).unwrap();
        assert!(jwks.verify(&new.sign(&claims(&[]))).is_ok());
    }
}
