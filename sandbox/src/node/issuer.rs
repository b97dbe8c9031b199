//! The issuer of service account tokens. Its ES256 key exists in memory only. The controller
//! verifies tokens with the JWKS file of the public key.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use jsonwebtoken::{
    Algorithm, EncodingKey, Header,
    jwk::{Jwk, JwkSet},
};
use serde_json::json;

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const KEY_ID: &str = "sandbox";

/// A token issuer.
pub(super) struct Issuer {
    key: EncodingKey,
}

/// The subject of a token: a service account and the pod that the token is bound to.
#[derive(Clone, Debug)]
pub(super) struct TokenSubject {
    pub(super) namespace: String,
    pub(super) service_account: String,
    pub(super) pod: String,
    pub(super) pod_uid: String,
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

    /// Issues a token bound to the subject's pod.
    pub(super) fn token(
        &self,
        subject: &TokenSubject,
        audience: &str,
        lifetime: Duration,
    ) -> Result<String> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the system clock is before 1970")?;
        let (namespace, account) = (&subject.namespace, &subject.service_account);
        let claims = json!({
            "aud": [audience],
            "iss": ISSUER,
            "sub": format!("system:serviceaccount:{namespace}:{account}"),
            "iat": now.as_secs(),
            "nbf": now.as_secs(),
            "exp": (now + lifetime).as_secs(),
            "kubernetes.io": {
                "namespace": namespace,
                "pod": {"name": subject.pod, "uid": subject.pod_uid},
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
        let subject = TokenSubject {
            namespace: "shop".into(),
            service_account: "cart".into(),
            pod: "cart-1".into(),
            pod_uid: "u-1".into(),
        };
        let token = issuer
            .token(&subject, "diy-service-mesh", Duration::from_secs(3600))
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
