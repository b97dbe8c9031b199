//! The issuer of service account tokens. Its ES256 key exists in memory only. The controller
//! verifies tokens with the JWKS file of the public key.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use jsonwebtoken::{
    Algorithm, EncodingKey, Header,
    jwk::{Jwk, JwkSet},
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const KEY_ID: &str = "sandbox";

/// A token issuer.
pub(super) struct Issuer {
    key: EncodingKey,
}

impl Issuer {
    /// Creates an issuer with a new key.
    pub(super) fn new() -> Result<Self> {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)
            .context("failed to generate the key of the token issuer")?;
        Ok(Self {
            key: EncodingKey::from_ec_der(&key.serialize_der()),
        })
    }

    /// The JSON Web Key Set of the public key.
    pub(super) fn jwks(&self) -> Result<String> {
        let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::ES256)
            .context("failed to derive the public key")?;
        jwk.common.key_id = Some(KEY_ID.into());
        Ok(serde_json::to_string_pretty(&JwkSet { keys: vec![jwk] })?)
    }

    /// Issues a token for the service account of a pod, bound to the pod.
    pub(super) fn token(&self, pod: &Pod, audience: &str, lifetime: Duration) -> Result<String> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the system clock is before 1970")?;
        let namespace = pod.namespace().unwrap_or_default();
        let spec = pod.spec.as_ref();
        let account = spec.and_then(|spec| spec.service_account_name.as_deref());
        let account = account.unwrap_or("default");
        let claims = json!({
            "aud": [audience],
            "iss": ISSUER,
            "sub": format!("system:serviceaccount:{namespace}:{account}"),
            "iat": now.as_secs(),
            "nbf": now.as_secs(),
            "exp": (now + lifetime).as_secs(),
            "kubernetes.io": {
                "namespace": namespace,
                "pod": {"name": pod.name_any(), "uid": pod.uid()},
                // The sandbox has no ServiceAccount objects, so the uid is derived from the name.
                "serviceaccount": {"name": account, "uid": format!("{namespace}-{account}")},
            },
        });
        let header = Header {
            kid: Some(KEY_ID.into()),
            ..Header::new(Algorithm::ES256)
        };
        jsonwebtoken::encode(&header, &claims, &self.key).context("failed to sign a token")
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{DecodingKey, Validation};
    use serde_json::Value;

    use super::*;

    #[test]
    fn issues_tokens_that_the_jwks_verifies() {
        let issuer = Issuer::new().unwrap();
        let pod = json!({
            "metadata": {"namespace": "shop", "name": "cart-1", "uid": "u-1"},
            "spec": {"serviceAccountName": "cart", "containers": []},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let token = issuer
            .token(&pod, "diy-service-mesh", Duration::from_secs(3600))
            .unwrap();

        let keys: JwkSet = serde_json::from_str(&issuer.jwks().unwrap()).unwrap();
        let key = DecodingKey::from_jwk(keys.find(KEY_ID).unwrap()).unwrap();
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_audience(&["diy-service-mesh"]);
        let claims = jsonwebtoken::decode::<Value>(&token, &key, &validation)
            .unwrap()
            .claims;
        assert_eq!(claims["sub"], "system:serviceaccount:shop:cart");
        assert_eq!(claims["kubernetes.io"]["pod"]["name"], "cart-1");
        assert_eq!(
            claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(),
            3600
        );

        validation.set_audience(&["something-else"]);
        assert!(jsonwebtoken::decode::<Value>(&token, &key, &validation).is_err());
    }
}
