//! Checks of a token that need no key. Garbage does not reach the API server. It alone decides on
//! the issuer, the key and the signature.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use diy_mesh_proto::TOKEN_AUDIENCE;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{AuthError, refused, wrong_audience};

/// The tolerated difference to the clock of the API server.
const CLOCK_SKEW: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct Header {
    alg: String,
}

#[derive(Deserialize)]
struct Claims {
    aud: Option<Audience>,
    /// Seconds since 1970.
    exp: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

/// Refuses what is no JWT, tokens without a signature or with a symmetric one, without our
/// audience, or expired.
pub(super) fn check(token: &str, now: SystemTime) -> Result<(), AuthError> {
    let wrong_audience = wrong_audience();
    let reason = match parse(token) {
        None => "it is not a JWT",
        Some((Header { alg }, _)) if alg.eq_ignore_ascii_case("none") => "it is not signed",
        Some((Header { alg }, _)) if alg.starts_with("HS") => {
            "its algorithm is symmetric, expected RS256, ES256 or another asymmetric one"
        }
        Some((_, claims)) if !has_our_audience(&claims) => &wrong_audience,
        Some((_, claims)) if is_expired(&claims, now) => "it has expired",
        Some(_) => return Ok(()),
    };
    Err(refused(reason))
}

fn parse(token: &str) -> Option<(Header, Claims)> {
    let mut parts = token.split('.');
    let parsed = (decode(parts.next()?)?, decode(parts.next()?)?);
    parts.next()?;
    parts.next().is_none().then_some(parsed)
}

fn decode<T: DeserializeOwned>(part: &str) -> Option<T> {
    let json = BASE64_URL_SAFE_NO_PAD.decode(part).ok()?;
    serde_json::from_slice(&json).ok()
}

fn has_our_audience(claims: &Claims) -> bool {
    match &claims.aud {
        Some(Audience::One(audience)) => audience == TOKEN_AUDIENCE,
        Some(Audience::Many(audiences)) => audiences.iter().any(|one| one == TOKEN_AUDIENCE),
        None => false,
    }
}

fn is_expired(claims: &Claims, now: SystemTime) -> bool {
    let now = now.duration_since(SystemTime::UNIX_EPOCH);
    let seconds = now.unwrap_or_default().as_secs_f64();
    claims
        .exp
        .is_some_and(|exp| exp + CLOCK_SKEW.as_secs_f64() < seconds)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn token(alg: &str, claims: &Value) -> String {
        let [header, claims] = [json!({ "alg": alg, "kid": "k" }), claims.clone()]
            .map(|part| BASE64_URL_SAFE_NO_PAD.encode(part.to_string()));
        format!("{header}.{claims}.c2ln")
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn leaves_issuer_key_and_signature_to_the_api_server() {
        let now = at(1000);
        for claims in [
            json!({"aud": ["x", "diy-service-mesh"], "exp": 2000, "iss": "anyone"}),
            json!({"aud": "diy-service-mesh", "exp": 940, "nbf": 5000}),
            json!({"aud": ["diy-service-mesh"]}),
        ] {
            for alg in ["RS256", "ES512", "EdDSA"] {
                assert_eq!(check(&token(alg, &claims), now), Ok(()), "{claims}");
            }
        }
    }

    #[test]
    fn refuses_what_the_api_server_would_refuse() {
        let good = json!({"aud": ["diy-service-mesh"], "exp": 2000});
        let with = |claims: Value| token("RS256", &claims);
        for (token, reason) in [
            ("rubbish".to_owned(), "not a JWT"),
            ("a.b.c".to_owned(), "not a JWT"),
            (with(good.clone()) + ".x", "not a JWT"),
            (with(json!(["aud"])), "not a JWT"),
            (
                with(json!({"aud": ["diy-service-mesh"], "exp": "x"})),
                "not a JWT",
            ),
            (token("none", &good), "not signed"),
            (token("NONE", &good), "not signed"),
            (token("HS256", &good), "symmetric"),
            (with(json!({"aud": ["another"], "exp": 2000})), "audience"),
            (with(json!({"exp": 2000})), "audience"),
            (
                with(json!({"aud": "diy-service-mesh", "exp": 939})),
                "expired",
            ),
        ] {
            let error = check(&token, at(1000)).unwrap_err().to_string();
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }
}
