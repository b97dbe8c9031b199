//! Bearer tokens. Without the key of the issuer, only the token that the issuer has signed is
//! valid.

use diy_mesh_jwt::{Expected, Keys, unverified_claims, unverified_key_id};
use diy_mesh_proxy::http::credentials::{bearer, field_value};
use diy_mesh_proxy::http::view::RequestView;
use http::{HeaderValue, Request, Version};
use serde_json::Value;

/// The key of an issuer, whose private part is not kept.
const KEYS: &str = r#"{"keys": [{"kty": "EC", "crv": "P-256", "kid": "1",
    "x": "pGncoZuvGJZU9CjdR0Jbr43dI-p_savkUWzjXCb5DM8",
    "y": "sbOBQrVmjQZ_iY7Yep7fvdYWj5jbARJFUS1Mpsf0r40"}]}"#;
/// The signed part of the only token, which expires in 2100.
const SIGNED: &str = concat!(
    "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6IjEifQ.eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwi",
    "YXVkIjoic2hvcCIsInN1YiI6ImFubiIsImV4cCI6NDEwMjQ0NDgwMH0"
);

/// The value of an `Authorization` field.
pub fn token(bytes: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(bytes.trim_ascii()) else {
        return;
    };
    let request = Request::get("/").header("authorization", value).body(());
    let head = diy_mesh_http2::Request::from(&request.expect("a request").into_parts().0);
    let view = RequestView {
        method: b"GET",
        target: b"/",
        head: &head,
        version: Version::HTTP_11,
        upgrade: false,
    };
    let Ok(Some(token)) = bearer(&view) else {
        return;
    };
    let keys = Keys::parse(KEYS.as_bytes()).expect("a set with one key");
    let expected = Expected::new(Some("https://issuer.example"), &["shop"], 0);
    let claims = keys.verify::<Value>(token, &expected);
    let Ok(Value::Object(claims)) = claims else {
        return;
    };
    let (signed, _signature) = token
        .rsplit_once('.')
        .expect("a verified token has three parts");
    assert_eq!(signed, SIGNED, "another token is accepted");
    assert_eq!(unverified_key_id(token).as_deref(), Some("1"));
    assert_eq!(
        unverified_claims(token),
        Some(Value::Object(claims.clone()))
    );
    for claim in claims.values() {
        assert!(field_value(claim).is_some(), "{claim} has no text");
    }
}
