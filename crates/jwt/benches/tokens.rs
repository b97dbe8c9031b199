//! How long the verification of a token takes, in microseconds: `cargo bench -p diy-mesh-jwt`.

use std::hint::black_box;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_jwt::{Expected, Keys};
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256, SignatureAlgorithm};
use serde_json::{Value, json};

const ISSUER: &str = "https://id.example.com";
const WARM_UP: Duration = Duration::from_millis(100);
const MEASUREMENT: Duration = Duration::from_millis(500);

fn main() {
    for (name, generated, algorithm) in [
        ("ES256", &PKCS_ECDSA_P256_SHA256, Algorithm::ES256),
        ("RS256", &PKCS_RSA_SHA256, Algorithm::RS256),
    ] {
        let key = key(generated, algorithm);
        let jwk = Jwk::from_encoding_key(&key, algorithm).expect("a public key");
        let keys = json!({"keys": [jwk]}).to_string();
        let keys = Keys::parse(keys.as_bytes()).expect("a set of keys");
        let token = jsonwebtoken::encode(&Header::new(algorithm), &claims(), &key);
        let token = token.expect("a token");
        let expected = Expected::new(Some(ISSUER), &["shop"], 60);
        let verify = || {
            keys.verify::<Value>(&token, &expected)
                .expect("a valid token")
        };
        measure(WARM_UP, &verify);
        let micros = measure(MEASUREMENT, &verify) * 1e6;
        println!("{name}: {micros:.1} µs");
    }
}

fn key(generated: &'static SignatureAlgorithm, algorithm: Algorithm) -> EncodingKey {
    let pair = rcgen::KeyPair::generate_for(generated).expect("a key");
    let pem = pair.serialize_pem();
    let key = match algorithm {
        Algorithm::ES256 => EncodingKey::from_ec_pem(pem.as_bytes()),
        _ => EncodingKey::from_rsa_pem(pem.as_bytes()),
    };
    key.expect("a private key")
}

fn claims() -> Value {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let expiry = now.expect("the time").as_secs() + 600;
    json!({"iss": ISSUER, "aud": "shop", "sub": "ada", "groups": ["dev", "ops"], "exp": expiry})
}

/// The seconds of one call.
fn measure<T>(time: Duration, verify: &impl Fn() -> T) -> f64 {
    let (began, mut calls) = (Instant::now(), 0);
    while began.elapsed() < time {
        black_box(verify());
        calls += 1;
    }
    began.elapsed().as_secs_f64() / f64::from(calls)
}
