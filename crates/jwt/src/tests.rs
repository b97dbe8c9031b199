//! Tokens of several keys, valid and attacked.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jsonwebtoken::{EncodingKey, Header};
use serde_json::{Value, json};

use super::*;

const ISSUER: &str = "https://id.example.com";

/// A key pair and its algorithm.
struct Signer {
    key: EncodingKey,
    public: Vec<u8>,
    algorithm: Algorithm,
}

impl Signer {
    fn new(of: &'static rcgen::SignatureAlgorithm, algorithm: Algorithm) -> Signer {
        let pair = rcgen::KeyPair::generate_for(of).expect("a key");
        let (pem, public) = (pair.serialize_pem(), pair.public_key_raw().to_vec());
        let key = match algorithm.family() {
            AlgorithmFamily::Rsa => EncodingKey::from_rsa_pem(pem.as_bytes()),
            AlgorithmFamily::Ed => EncodingKey::from_ed_pem(pem.as_bytes()),
            _ => EncodingKey::from_ec_pem(pem.as_bytes()),
        };
        let key = key.expect("a key");
        Signer {
            key,
            public,
            algorithm,
        }
    }

    fn p256() -> Signer {
        Signer::new(&rcgen::PKCS_ECDSA_P256_SHA256, Algorithm::ES256)
    }

    fn rsa() -> Signer {
        Signer::new(&rcgen::PKCS_RSA_SHA256, Algorithm::RS256)
    }

    /// The JWK with other members. Null removes one.
    fn jwk(&self, members: &[(&str, Value)]) -> Value {
        let jwk = if self.algorithm == Algorithm::EdDSA {
            let key = BASE64_URL_SAFE_NO_PAD.encode(&self.public);
            json!({"kty": "OKP", "crv": "Ed25519", "x": key, "alg": "EdDSA"})
        } else {
            let jwk = Jwk::from_encoding_key(&self.key, self.algorithm).expect("a JWK");
            serde_json::to_value(jwk).expect("JSON")
        };
        changed(jwk, members)
    }

    fn sign(&self, header: &Header, claims: &Value) -> String {
        jsonwebtoken::encode(header, claims, &self.key).expect("a token")
    }

    fn header(&self) -> Header {
        Header::new(self.algorithm)
    }
}

fn changed(mut object: Value, members: &[(&str, Value)]) -> Value {
    let all = object.as_object_mut().expect("an object");
    for (name, value) in members {
        all.insert((*name).to_owned(), value.clone());
    }
    all.retain(|_, value| !value.is_null());
    object
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("the time").as_secs()
}

fn claims(members: &[(&str, Value)]) -> Value {
    let claims = json!({"iss": ISSUER, "aud": "shop", "sub": "alice", "exp": now() + 600});
    changed(claims, members)
}

fn keys(set: &[Value]) -> Keys {
    Keys::parse(json!({ "keys": set }).to_string().as_bytes()).expect("keys")
}

fn verify(keys: &Keys, token: &str) -> Result<Value, Refused> {
    keys.verify(token, &Expected::new(Some(ISSUER), &["web", "shop"], 60))
}

#[test]
fn keys_of_all_kinds_verify_their_tokens() {
    let signers = [
        Signer::p256(),
        Signer::rsa(),
        Signer::new(&rcgen::PKCS_ECDSA_P384_SHA384, Algorithm::ES384),
        Signer::new(&rcgen::PKCS_ED25519, Algorithm::EdDSA),
    ];
    let named = signers.each_ref().map(|signer| signer.jwk(&[]));
    let unnamed = signers
        .each_ref()
        .map(|signer| signer.jwk(&[("alg", Value::Null)]));
    for keys in [keys(&named), keys(&unnamed)] {
        assert_eq!(keys.count(), 4);
        for signer in &signers {
            let claims = claims(&[("groups", json!(["a", "b"]))]);
            let token = signer.sign(&signer.header(), &claims);
            assert_eq!(
                verify(&keys, &token).as_ref(),
                Ok(&claims),
                "{:?}",
                signer.algorithm
            );
        }
    }
}

#[test]
fn algorithm_is_that_of_the_key() {
    let rsa = Signer::rsa();
    let token = |algorithm| rsa.sign(&Header::new(algorithm), &claims(&[]));
    let plain = keys(&[rsa.jwk(&[("alg", Value::Null)])]);
    assert!(verify(&plain, &token(Algorithm::RS256)).is_ok());
    for other in [Algorithm::RS512, Algorithm::PS256] {
        assert_eq!(verify(&plain, &token(other)), Err(Refused::UnknownKey));
    }
    let pss = keys(&[rsa.jwk(&[("alg", json!("PS256"))])]);
    assert!(verify(&pss, &token(Algorithm::PS256)).is_ok());
    assert_eq!(
        verify(&pss, &token(Algorithm::RS256)),
        Err(Refused::UnknownKey)
    );
    // Signed with the public key as a shared secret.
    let public = json!({ "keys": [rsa.jwk(&[])] }).to_string();
    let secret = EncodingKey::from_secret(public.as_bytes());
    let header = Header::new(Algorithm::HS256);
    let forged = jsonwebtoken::encode(&header, &claims(&[]), &secret).expect("a token");
    assert_eq!(verify(&plain, &forged), Err(Refused::Symmetric));
}

#[test]
fn keys_that_are_not_for_signatures_are_ignored() {
    let signer = Signer::p256();
    for unusable in [
        json!({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}),
        signer.jwk(&[("use", json!("enc"))]),
        signer.jwk(&[("key_ops", json!(["sign"]))]),
        signer.jwk(&[("alg", json!("ES384"))]),
        signer.jwk(&[("alg", json!("ES512"))]),
        signer.jwk(&[("alg", json!("RSA-OAEP"))]),
        signer.jwk(&[("crv", json!("P-521"))]),
        signer.jwk(&[("kty", json!("new"))]),
    ] {
        let set = json!({ "keys": [unusable] }).to_string();
        let parsed = Keys::parse(set.as_bytes());
        assert!(matches!(parsed, Err(KeysError::Empty)), "{set}");
        let with_others = keys(&[unusable, signer.jwk(&[("use", json!("sig"))])]);
        assert_eq!(with_others.count(), 1);
    }
    assert!(matches!(Keys::parse(b"{}"), Err(KeysError::Parse(_))));
}

#[test]
fn public_set_has_no_secrets_and_verifies_the_same_tokens() {
    let signer = Signer::p256();
    let private = signer.jwk(&[
        ("d", json!("secret")),
        ("kid", json!("a")),
        ("note", json!("secret")),
    ]);
    let rsa = Signer::rsa().jwk(&[
        ("d", json!("secret")),
        ("p", json!("secret")),
        ("dp", json!("secret")),
    ]);
    let shared = json!({"kty": "oct", "k": "secret", "kid": "b"});
    let set = json!({"keys": [private, rsa, shared], "note": "secret"}).to_string();
    let public = Keys::public(set.as_bytes()).expect("keys");
    assert!(!public.contains("secret"), "{public}");
    let keys = Keys::parse(public.as_bytes()).expect("keys");
    assert_eq!(keys.count(), 2);
    assert!(keys.contains("a"));
    let token = signer.sign(&signer.header(), &claims(&[]));
    assert!(verify(&keys, &token).is_ok());
    assert!(matches!(
        Keys::public(b"{\"keys\": []}"),
        Err(KeysError::Empty)
    ));
}

#[test]
fn attacked_tokens_are_refused() {
    let (signer, other) = (Signer::p256(), Signer::p256());
    let id = |id: &str| ("kid", json!(id));
    let keys = keys(&[signer.jwk(&[id("a")]), other.jwk(&[id("b")])]);
    let header = |id: Option<&str>| Header {
        kid: id.map(str::to_owned),
        ..signer.header()
    };
    let valid = signer.sign(&header(Some("a")), &claims(&[]));
    assert!(verify(&keys, &valid).is_ok());
    assert!(verify(&keys, &signer.sign(&header(None), &claims(&[]))).is_ok());
    let by_other_key = signer.sign(&header(Some("b")), &claims(&[]));
    assert_eq!(verify(&keys, &by_other_key), Err(Refused::Signature));
    let by_no_key = signer.sign(&header(Some("c")), &claims(&[]));
    assert_eq!(verify(&keys, &by_no_key), Err(Refused::UnknownKey));
    let critical = Header {
        crit: Some(vec!["b64".into()]),
        ..header(Some("a"))
    };
    let critical = signer.sign(&critical, &claims(&[]));
    assert_eq!(verify(&keys, &critical), Err(Refused::Critical));
    let parts: Vec<&str> = valid.split('.').collect();
    let [head, body, signature] = parts[..] else {
        panic!("{valid}");
    };
    // {"alg":"none"}
    let none = "eyJhbGciOiJub25lIn0";
    for malformed in [
        format!("{none}.{body}."),
        format!("{none}.{body}.{signature}"),
        format!("{head}.{body}"),
        format!("{head}=.{body}.{signature}"),
        String::new(),
    ] {
        assert_eq!(
            verify(&keys, &malformed),
            Err(Refused::Malformed),
            "{malformed}"
        );
    }
    for changed in [
        format!("{head}.{body}."),
        format!("{head}.{body}.{signature}."),
        format!("{head}.{body}.{signature}AA"),
        format!("{head}.{body}A.{signature}"),
    ] {
        assert!(verify(&keys, &changed).is_err(), "{changed}");
    }
}

#[test]
fn claims_are_those_that_are_expected() {
    let signer = Signer::p256();
    let keys = keys(&[signer.jwk(&[])]);
    let audience = || Refused::Audience("web or shop".into());
    let missing = |claim: &str| Refused::Missing(claim.into());
    for (name, value, expected) in [
        ("aud", json!(["other", "web"]), None),
        ("aud", json!("other"), Some(audience())),
        ("aud", json!([]), Some(audience())),
        ("aud", json!(7), Some(missing("aud"))),
        ("aud", Value::Null, Some(missing("aud"))),
        (
            "iss",
            json!("https://id.example.com/"),
            Some(Refused::Issuer(ISSUER.into())),
        ),
        ("iss", Value::Null, Some(missing("iss"))),
        ("exp", json!(now() - 30), None),
        ("exp", json!(now() - 120), Some(Refused::Expired)),
        ("exp", json!("never"), Some(missing("exp"))),
        ("exp", Value::Null, Some(missing("exp"))),
        ("nbf", json!(now() + 120), Some(Refused::NotYetValid)),
    ] {
        let token = signer.sign(&signer.header(), &claims(&[(name, value.clone())]));
        assert_eq!(verify(&keys, &token).err(), expected, "{name} {value}");
    }
}

#[test]
fn key_ids_are_those_of_the_keys() {
    let signer = Signer::p256();
    let keys = keys(&[signer.jwk(&[("kid", json!("a"))]), Signer::rsa().jwk(&[])]);
    assert!(keys.contains("a") && !keys.contains("b") && !keys.contains(""));
    let mut header = signer.header();
    let token = signer.sign(&header, &claims(&[]));
    assert_eq!(unverified_key_id(&token), None);
    header.kid = Some("b".to_owned());
    let token = signer.sign(&header, &claims(&[]));
    assert_eq!(unverified_key_id(&token).as_deref(), Some("b"));
    assert_eq!(verify(&keys, &token), Err(Refused::UnknownKey));
    assert_eq!(unverified_key_id("opaque"), None);
}
