//! The issuers of tokens. Pure.

use diy_mesh_jwt::Keys;
use diy_mesh_proto::authorization::check_issuer;
use diy_mesh_proto::mesh::v1 as proto;
use http::Uri;

use super::rejected;
use crate::kinds::authorization::keys::Fetched;
use crate::kinds::authorization::spec::{ClaimHeader, Issuer, IssuerKeys};
use crate::object::issuer_keys::{Entry, Source};
use crate::object::rejection::{refuse, unsupported};
use crate::object::{Key, Rejection};

/// An issuer, and its keys in the status, unless the spec has them.
pub(super) fn issuer(
    spec: Issuer,
    field: &str,
    namespace: &str,
    known: &[Entry],
) -> Result<(proto::TokenIssuer, Option<Fetched>), Rejection> {
    let (keys, fetched) = match source(spec.keys, &format!("{field}.keys"), namespace)? {
        Ok(keys) => (keys, None),
        Err(source) => {
            let text = source.to_string();
            let entry = known.iter().find(|entry| entry.source == text);
            let entry = entry.cloned().unwrap_or_default();
            let keys = entry
                .keys
                .filter(|keys| Keys::parse(keys.as_bytes()).is_ok());
            let fetched = Fetched {
                issuer: spec.issuer.clone(),
                source,
                has_keys: keys.is_some(),
                message: entry.message,
            };
            (keys.unwrap_or_default(), Some(fetched))
        }
    };
    let headers = spec.headers.unwrap_or_default().into_iter();
    let fields = headers.map(|ClaimHeader { claim, name }| proto::ClaimField { claim, name });
    let issuer = proto::TokenIssuer {
        name: spec.issuer,
        audiences: spec.audiences,
        keys,
        fields: fields.collect(),
    };
    check_issuer(&issuer).map_err(|violation| rejected(field, "issuers.", &violation))?;
    Ok((issuer, fetched))
}

/// The keys, or where they are.
fn source(
    spec: IssuerKeys,
    field: &str,
    namespace: &str,
) -> Result<Result<String, Source>, Rejection> {
    match (&*spec.kind, spec.inline, spec.secret, spec.url) {
        ("Inline", Some(keys), None, None) => {
            let invalid = |error| unsupported(&format!("{field}.inline"), "", &format!("{error}"));
            Keys::parse(keys.as_bytes()).map_err(invalid)?;
            Ok(Ok(keys))
        }
        ("Secret", None, Some(secret), None) => {
            // They become a part of a path of the API, of log lines and of the status.
            let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            for (name, text) in [("secret.name", &secret.name), ("secret.key", &secret.key)] {
                if text.is_empty() || !text.bytes().all(is_valid) {
                    return refuse(field, name, text, "of letters, digits, -, _ and .");
                }
            }
            let key = Key::new(namespace, &secret.name);
            Ok(Err(Source::Secret(key, secret.key)))
        }
        ("URL", None, None, Some(url)) => {
            let parsed = url.parse::<Uri>().ok();
            let is_valid = parsed.is_some_and(|uri| {
                let authority = uri.authority();
                uri.scheme_str() == Some("https")
                    && authority.is_some_and(|authority| !authority.as_str().contains('@'))
            });
            if is_valid {
                return Ok(Err(Source::Url(url)));
            }
            let expected = "a URL such as https://id.example.com/keys";
            refuse(field, "url", &url, expected)
        }
        (kind, ..) => {
            let expected = "Inline, Secret or URL, with its field and no other";
            refuse(field, "type", kind, expected)
        }
    }
}
