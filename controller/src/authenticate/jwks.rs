//! Tokens checked against a file of public keys (a JWK set), for clusters without a Kubernetes API:
//! the sandbox, plain machines.
//!
//! The file is looked at before each check and read again when it has changed; one that cannot be
//! read leaves the last keys in force.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use jsonwebtoken::jwk::{Jwk, JwkSet, KeyAlgorithm};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, Validation};
use serde::Deserialize;

use super::{Accepted, AuthError, Caller, PodRef};
use crate::file::Stamp;

/// How far the issuer's clock may be from ours, in seconds.
const LEEWAY: u64 = 10;

/// Why a file of keys is of no use.
#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    /// It cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no JWK set.
    #[error("{path} is not a JWK set: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// It is one, but of no use.
    #[error("{path} holds no public key that could check a token (RSA, P-256, P-384 or Ed25519)")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Checks tokens against the keys of a file.
pub struct Jwks {
    path: PathBuf,
    issuer: Option<String>,
    keys: Mutex<Keys>,
}

struct Keys {
    stamp: Stamp,
    all: Vec<Key>,
}

struct Key {
    id: Option<String>,
    /// Where the set says it: no other algorithm will do.
    algorithm: Option<Algorithm>,
    key: DecodingKey,
}

#[derive(Deserialize)]
struct Claims {
    sub: String,
    exp: u64,
    #[serde(rename = "kubernetes.io", default)]
    kubernetes: Bound,
}

/// What Kubernetes says of a token in its private claim.
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
        // A token whose parts disagree is bound to nothing.
        let pod = pod.filter(|pod| namespace.as_deref() == Some(&*pod.namespace));
        Caller {
            user: self.sub.as_str().into(),
            pod,
        }
    }
}

impl Jwks {
    /// Reads the keys. `issuer`, where given, is the only one whose tokens are accepted.
    pub fn open(path: &Path, issuer: Option<String>) -> Result<Jwks, JwksError> {
        let stamp = Stamp::of(path).map_err(|source| JwksError::Read {
            path: path.to_owned(),
            source,
        })?;
        let keys = Keys {
            stamp,
            all: read(path)?,
        };
        Ok(Jwks {
            path: path.to_owned(),
            issuer,
            keys: Mutex::new(keys),
        })
    }

    /// Whose token it is.
    pub(super) fn verify(&self, token: &str) -> Result<Accepted, AuthError> {
        let header = jsonwebtoken::decode_header(token)
            .map_err(|_| refused("it is not a JWT with an algorithm that we know"))?;
        if header.alg.family() == AlgorithmFamily::Hmac {
            return Err(refused(
                "its algorithm is symmetric; RS256, ES256 and their like are accepted",
            ));
        }
        let validation = self.validation(header.alg);
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(&mut keys);
        let mut reason = refused("none of the issuer's keys has its key ID and algorithm");
        for key in keys
            .all
            .iter()
            .filter(|key| key.fits(header.alg, header.kid.as_deref()))
        {
            match jsonwebtoken::decode::<Claims>(token, &key.key, &validation) {
                Ok(token) if token.claims.sub.is_empty() => {
                    return Err(refused("it names no subject"));
                }
                Ok(token) => {
                    return Ok(Accepted {
                        caller: token.claims.caller(),
                        expires: Some(token.claims.exp),
                    });
                }
                Err(error) => reason = refused(&self.explain(&error)),
            }
        }
        Err(reason)
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        validation.leeway = LEEWAY;
        validation.validate_nbf = true;
        validation.set_audience(&[diy_mesh_proto::TOKEN_AUDIENCE]);
        validation.set_required_spec_claims(&["exp", "aud", "sub"]);
        if let Some(issuer) = &self.issuer {
            validation.set_issuer(&[issuer]);
            validation.required_spec_claims.insert("iss".to_owned());
        }
        validation
    }

    fn refresh(&self, keys: &mut Keys) {
        let Ok(stamp) = Stamp::of(&self.path) else {
            return;
        };
        if !stamp.differs(&keys.stamp) {
            return;
        }
        keys.stamp = stamp;
        match read(&self.path) {
            Ok(all) => {
                tracing::info!(file = %self.path.display(), keys = all.len(), "the issuer's keys were read again");
                keys.all = all;
            }
            Err(error) => tracing::error!("the issuer's former keys stay in force: {error}"),
        }
    }

    fn explain(&self, error: &jsonwebtoken::errors::Error) -> String {
        use jsonwebtoken::errors::ErrorKind;
        match error.kind() {
            ErrorKind::InvalidSignature => {
                "its signature is not by any of the issuer's keys".to_owned()
            }
            ErrorKind::ExpiredSignature => "it has expired".to_owned(),
            ErrorKind::ImmatureSignature => "it is not valid yet (nbf)".to_owned(),
            ErrorKind::InvalidAudience => {
                format!("its audience is not {:?}", diy_mesh_proto::TOKEN_AUDIENCE)
            }
            ErrorKind::InvalidIssuer => format!(
                "its issuer is not {:?}",
                self.issuer.as_deref().unwrap_or_default()
            ),
            ErrorKind::MissingRequiredClaim(claim) => format!("the claim {claim:?} is missing"),
            _ => format!("{error}"),
        }
    }
}

impl Key {
    fn fits(&self, algorithm: Algorithm, id: Option<&str>) -> bool {
        let same_id = match (id, self.id.as_deref()) {
            (Some(wanted), Some(id)) => wanted == id,
            _ => true,
        };
        same_id
            && self.key.family() == algorithm.family()
            && self.algorithm.is_none_or(|only| only == algorithm)
    }
}

fn read(path: &Path) -> Result<Vec<Key>, JwksError> {
    let text = std::fs::read(path).map_err(|source| JwksError::Read {
        path: path.to_owned(),
        source,
    })?;
    let set: JwkSet = serde_json::from_slice(&text).map_err(|source| JwksError::Parse {
        path: path.to_owned(),
        source,
    })?;
    let keys: Vec<Key> = set.keys.iter().filter_map(usable).collect();
    if keys.is_empty() {
        Err(JwksError::Empty {
            path: path.to_owned(),
        })
    } else {
        Ok(keys)
    }
}

/// A shared secret is no key to check with: whoever can read the file could make tokens.
fn usable(jwk: &Jwk) -> Option<Key> {
    let key = DecodingKey::from_jwk(jwk)
        .ok()
        .filter(|key| key.family() != AlgorithmFamily::Hmac)?;
    let algorithm = match jwk.common.key_algorithm {
        None | Some(KeyAlgorithm::UNKNOWN_ALGORITHM) => None,
        Some(named) => Some(Algorithm::try_from(named).ok()?),
    };
    Some(Key {
        id: jwk.common.key_id.clone(),
        algorithm,
        key,
    })
}

fn refused(reason: &str) -> AuthError {
    AuthError::Refused(reason.into())
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use jsonwebtoken::{EncodingKey, Header};
    use serde_json::{Value, json};

    use super::*;

    struct Issuer {
        key: EncodingKey,
        id: &'static str,
    }

    impl Issuer {
        fn new(id: &'static str) -> Issuer {
            let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
            Issuer {
                key: EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).unwrap(),
                id,
            }
        }

        fn jwk(&self) -> Value {
            let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::ES256).unwrap();
            jwk.common.key_id = Some(self.id.to_owned());
            serde_json::to_value(jwk).unwrap()
        }

        fn sign(&self, claims: &Value) -> String {
            let header = Header {
                kid: Some(self.id.to_owned()),
                ..Header::new(Algorithm::ES256)
            };
            jsonwebtoken::encode(&header, claims, &self.key).unwrap()
        }
    }

    fn claims(changes: &[(&str, Value)]) -> Value {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs();
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
    fn a_good_token_names_its_subject_and_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer) = (dir.path().join("jwks.json"), Issuer::new("k"));
        write(&path, &[Issuer::new("other").jwk(), issuer.jwk()]);
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
    fn a_token_names_the_pod_that_it_is_bound_to() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer) = (dir.path().join("jwks.json"), Issuer::new("k"));
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
    fn each_wrong_claim_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer) = (dir.path().join("jwks.json"), Issuer::new("k"));
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
    fn only_asymmetric_signatures_by_a_known_key_count() {
        let dir = tempfile::tempdir().unwrap();
        let (path, issuer, other_issuer) = (
            dir.path().join("jwks.json"),
            Issuer::new("k"),
            Issuer::new("k"),
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
        let other_id = Issuer {
            key: issuer.key.clone(),
            id: "another",
        };
        assert!(reason(&jwks, &other_id.sign(&claims(&[]))).contains("key ID"));
        write(&path, &[shared]);
        assert!(
            matches!(Jwks::open(&path, None), Err(JwksError::Empty { .. })),
            "a shared secret alone is no key"
        );
    }

    #[test]
    fn new_keys_are_read_and_a_broken_file_leaves_the_former_in_force() {
        let dir = tempfile::tempdir().unwrap();
        let (path, old, new) = (
            dir.path().join("jwks.json"),
            Issuer::new("old"),
            Issuer::new("new"),
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
