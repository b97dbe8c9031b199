//! Tokens of pods' service accounts, as the kubelet mounts them: an issuer made for this run signs them.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
use rcgen::KeyPair;
use serde_json::json;

const ID: &str = "bench";

/// Who makes them.
pub struct Issuer {
    key: EncodingKey,
    now: u64,
}

/// One pod, as tokens and the catalog name it. Its service account has the name of its namespace.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Its namespace, and its service account.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl Pod {
    /// What Kubernetes calls its service account.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{0}:{0}", self.namespace)
    }
}

impl Issuer {
    /// With a new key.
    pub fn new() -> Result<Self> {
        let pair = KeyPair::generate().context("make a key")?;
        let key = EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes())
            .context("take the key over")?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the clock stands before 1970")?
            .as_secs();
        Ok(Issuer { key, now })
    }

    /// The key set that proves what it signs.
    pub fn key_set(&self) -> Result<String> {
        let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::ES256).context("make a JWK")?;
        jwk.common.key_id = Some(ID.to_string());
        Ok(json!({ "keys": [jwk] }).to_string())
    }

    /// A token that is bound to the pod, good for a day.
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
