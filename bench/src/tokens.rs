//! Projected service account tokens, signed by an issuer of this run.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
use rcgen::KeyPair;
use serde_json::json;

const ID: &str = "bench";

/// Token issuer.
pub struct Issuer {
    key: EncodingKey,
    now: u64,
}

/// Pod in tokens and catalog. Its service account has the name of its namespace.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Namespace and service account.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Pod UID.
    pub uid: String,
}

impl Pod {
    /// User name of the service account.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{0}:{0}", self.namespace)
    }
}

impl Issuer {
    /// Creates an issuer with a new key.
    pub fn new() -> Result<Self> {
        let pair = KeyPair::generate().context("generate a key")?;
        let key =
            EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).context("convert the key")?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the system time is before 1970")?
            .as_secs();
        Ok(Issuer { key, now })
    }

    /// JSON Web Key Set for verification.
    pub fn key_set(&self) -> Result<String> {
        let mut jwk =
            Jwk::from_encoding_key(&self.key, Algorithm::ES256).context("create a JWK")?;
        jwk.common.key_id = Some(ID.to_string());
        Ok(json!({ "keys": [jwk] }).to_string())
    }

    /// Creates a pod-bound token, valid for a day.
    pub fn token(&self, pod: &Pod) -> Result<String> {
        let header = Header {
            kid: Some(ID.to_string()),
            ..Header::new(Algorithm::ES256)
        };
        let claims = json!({
            "aud": ["diy-service-mesh"], "iss": "bench", "iat": self.now, "nbf": self.now, "exp": self.now + 24 * 3600,
            "sub": pod.user(),
            "kubernetes.io": {
                "namespace": pod.namespace,
                "pod": { "name": pod.name, "uid": pod.uid },
                "serviceaccount": { "name": pod.namespace, "uid": pod.uid },
            },
        });
        jsonwebtoken::encode(&header, &claims, &self.key).context("sign a token")
    }
}
