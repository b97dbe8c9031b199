//! The sandbox's issuer of service account tokens: one ES256 key, made at the start and never written down. Its public half
//! is the JWKS file that the controller checks tokens with.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use jsonwebtoken::{
    Algorithm, EncodingKey, Header,
    jwk::{Jwk, JwkSet},
};
use serde::Serialize;

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const KEY_ID: &str = "sandbox";

/// Signs tokens.
pub(super) struct Issuer {
    key: EncodingKey,
}

/// Whom a token is for.
#[derive(Clone, Debug)]
pub(super) struct Bearer {
    pub(super) namespace: String,
    pub(super) service_account: String,
    pub(super) pod: String,
    pub(super) pod_uid: String,
}

impl Issuer {
    /// An issuer with a new key.
    pub(super) fn new() -> Result<Self> {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)
            .context("cannot make the token issuer's key")?;
        Ok(Self {
            key: EncodingKey::from_ec_der(&key.serialize_der()),
        })
    }

    /// The text of the JWKS file.
    pub(super) fn jwks(&self) -> Result<String> {
        let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::ES256)
            .context("cannot derive the public key")?;
        jwk.common.key_id = Some(KEY_ID.into());
        Ok(serde_json::to_string_pretty(&JwkSet { keys: vec![jwk] })?)
    }

    /// A token as a kubelet would project it into the bearer's pod.
    pub(super) fn token(
        &self,
        bearer: &Bearer,
        audience: &str,
        lifetime: Duration,
    ) -> Result<String> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the clock is before 1970")?;
        let object = |name: &str, uid: &str| Object {
            name: name.into(),
            uid: uid.into(),
        };
        let account = &bearer.service_account;
        let claims = Claims {
            aud: vec![audience.into()],
            iss: ISSUER,
            sub: format!("system:serviceaccount:{}:{account}", bearer.namespace),
            iat: now.as_secs(),
            nbf: now.as_secs(),
            exp: (now + lifetime).as_secs(),
            kubernetes: BTreeMap::from([
                ("namespace", Claim::Text(bearer.namespace.clone())),
                ("pod", Claim::Object(object(&bearer.pod, &bearer.pod_uid))),
                // There are no ServiceAccount objects here; their uid is derived from the name.
                (
                    "serviceaccount",
                    Claim::Object(object(account, &format!("{}-{account}", bearer.namespace))),
                ),
            ]),
        };
        let header = Header {
            kid: Some(KEY_ID.into()),
            ..Header::new(Algorithm::ES256)
        };
        jsonwebtoken::encode(&header, &claims, &self.key).context("cannot sign a token")
    }
}

#[derive(Serialize)]
struct Claims {
    aud: Vec<String>,
    iss: &'static str,
    sub: String,
    iat: u64,
    nbf: u64,
    exp: u64,
    #[serde(rename = "kubernetes.io")]
    kubernetes: BTreeMap<&'static str, Claim>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Claim {
    Text(String),
    Object(Object),
}

#[derive(Serialize)]
struct Object {
    name: String,
    uid: String,
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{DecodingKey, Validation};
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_token_is_valid_by_the_jwks_file_and_names_its_pod() {
        let issuer = Issuer::new().unwrap();
        let bearer = Bearer {
            namespace: "shop".into(),
            service_account: "cart".into(),
            pod: "cart-1".into(),
            pod_uid: "u-1".into(),
        };
        let token = issuer
            .token(&bearer, "diy-service-mesh", Duration::from_secs(3600))
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
