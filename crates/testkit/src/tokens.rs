//! An issuer of JSON Web Tokens.

use std::time::SystemTime;

use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

/// An issuer with one key, for ES256.
#[derive(Clone)]
pub struct Signer {
    key: EncodingKey,
    /// The ID of the key.
    pub id: Option<String>,
}

impl Signer {
    /// An issuer whose key has no ID.
    #[allow(clippy::new_without_default, reason = "each one has another key")]
    pub fn new() -> Self {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let key = EncodingKey::from_ec_pem(key.serialize_pem().as_bytes()).unwrap();
        Self { key, id: None }
    }

    /// An issuer whose key has this ID.
    pub fn named(id: &str) -> Self {
        let id = Some(id.to_owned());
        Self { id, ..Self::new() }
    }

    /// The public key.
    pub fn jwk(&self) -> Value {
        let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::ES256).unwrap();
        jwk.common.key_id = self.id.clone();
        json!(jwk)
    }

    /// The set of its public key.
    pub fn jwks(&self) -> String {
        json!({"keys": [self.jwk()]}).to_string()
    }

    /// A token with these claims.
    pub fn sign(&self, claims: &Value) -> String {
        let mut header = Header::new(Algorithm::ES256);
        header.kid = self.id.clone();
        jsonwebtoken::encode(&header, claims, &self.key).unwrap()
    }
}

/// The time, as claims have it.
pub fn now() -> u64 {
    let now = SystemTime::UNIX_EPOCH.elapsed();
    now.unwrap().as_secs()
}
