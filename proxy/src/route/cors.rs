//! Requests of other origins (WHATWG Fetch, "CORS protocol"): the response to a preflight request,
//! and the fields of other responses. Pure.

use diy_mesh_proto::mesh::v1::Cors;
use http::header::{HeaderName, HeaderValue, VARY};
use http::{Method, StatusCode};

use crate::http::fields::FieldEdit;
use crate::http::reply::LocalReply;
use crate::http::view::RequestView;

/// Whether an entry of `allowOrigins` allows an origin: `*`, `SCHEME://HOST[:PORT]`, or one with a `*` at
/// the start of its host.
fn allows(allowed: &str, origin: &str) -> bool {
    if allowed == "*" {
        return true;
    }
    let (Some(allowed), Some(named)) = (split(allowed), split(origin)) else {
        return false;
    };
    let host = named.1.to_ascii_lowercase();
    let is_host = match allowed.1.to_ascii_lowercase().strip_prefix('*') {
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        None => host.eq_ignore_ascii_case(allowed.1),
    };
    is_host && named.0.eq_ignore_ascii_case(allowed.0) && named.2 == allowed.2
}

/// The scheme, host and port of an origin.
fn split(origin: &str) -> Option<(&str, &str, u16)> {
    let (scheme, authority) = origin.split_once("://")?;
    let default_port = match scheme.to_ascii_lowercase().as_str() {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (authority, default_port),
    };
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._[]:*".contains(&byte);
    host.bytes().all(is_host).then_some((scheme, host, port))
}

/// The fields that the response gets. For a preflight request, the response.
pub fn apply(cors: &Cors, request: &RequestView<'_>) -> Result<Vec<FieldEdit>, LocalReply> {
    let text = |name: &str| {
        let value = request.header(name)?;
        std::str::from_utf8(value).ok()
    };
    let Some(origin) = text("origin") else {
        return Ok(Vec::new());
    };
    let is_allowed = cors.allow_origins.iter().any(|one| allows(one, origin));
    let asked_method = text("access-control-request-method");
    let is_preflight = request.method == Method::OPTIONS.as_str().as_bytes();
    let Some(method) = asked_method.filter(|_| is_preflight) else {
        let fields = if is_allowed {
            common(cors, origin)
        } else {
            Vec::new()
        };
        return Ok(edits(fields));
    };
    let mut fields = Vec::new();
    if is_allowed {
        fields = common(cors, origin);
        let asked_headers = text("access-control-request-headers");
        let methods = value(cors, &cors.allow_methods, Some(method));
        let headers = value(cors, &cors.allow_headers, asked_headers);
        fields.extend(methods.map(|list| ("access-control-allow-methods", list)));
        fields.extend(headers.map(|list| ("access-control-allow-headers", list)));
        fields.push(("access-control-max-age", cors.max_age.to_string()));
    }
    let mut headers: Vec<_> = fields
        .into_iter()
        .filter_map(|(name, value)| {
            Some((
                HeaderName::from_static(name),
                HeaderValue::try_from(value).ok()?,
            ))
        })
        .collect();
    headers.push((VARY, HeaderValue::from_static("origin")));
    Err(LocalReply::bare(StatusCode::NO_CONTENT, headers))
}

/// The fields of every response to an allowed origin.
fn common(cors: &Cors, origin: &str) -> Vec<(&'static str, String)> {
    let has_any = cors.allow_origins.iter().any(|one| one == "*");
    let origin = if has_any && !cors.allow_credentials {
        "*"
    } else {
        origin
    };
    let mut fields = vec![("access-control-allow-origin", origin.to_owned())];
    if cors.allow_credentials {
        fields.push(("access-control-allow-credentials", "true".to_owned()));
    }
    let expose = value(cors, &cors.expose_headers, None);
    fields.extend(expose.map(|list| ("access-control-expose-headers", list)));
    fields
}

/// A list as a value. With credentials, "*" means nothing: what was asked for replaces it.
fn value(cors: &Cors, list: &[String], asked: Option<&str>) -> Option<String> {
    let is_any = list.iter().any(|one| one == "*");
    match (list.is_empty(), is_any && cors.allow_credentials) {
        (true, _) => None,
        (false, true) => asked.map(str::to_owned),
        (false, false) => Some(list.join(", ")),
    }
}

/// The changes of a response. Caches keep the responses to different origins apart.
fn edits(fields: Vec<(&str, String)>) -> Vec<FieldEdit> {
    let is_valid = |(_, value): &(&str, String)| HeaderValue::from_str(value).is_ok();
    let set = |(name, value): (&str, String)| FieldEdit::Set(name.to_owned(), value);
    let vary = [FieldEdit::Add("vary".to_owned(), "origin".to_owned())];
    let fields = fields.into_iter().filter(is_valid).map(set);
    fields.chain(vary).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn cors(origins: &[&str]) -> Cors {
        Cors {
            allow_origins: texts(origins),
            ..Cors::default()
        }
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    /// The response's fields as text, and whether it answers a preflight request.
    fn apply(cors: &Cors, method: &str, fields: &[(&str, &str)]) -> (bool, Vec<String>) {
        let head = fields
            .iter()
            .fold(Request::get("/"), |head, (name, value)| {
                head.header(*name, *value)
            });
        let head = diy_mesh_http2::Request::from(&head.body(()).unwrap().into_parts().0);
        let request = RequestView {
            head: &head,
            ..crate::http::view::testing::request(method, "/")
        };
        match super::apply(cors, &request) {
            Ok(edits) => (
                false,
                edits.iter().map(|edit| format!("{edit:?}")).collect(),
            ),
            Err(reply) => {
                assert_eq!(reply.status, StatusCode::NO_CONTENT);
                let field = |(name, value): &(HeaderName, HeaderValue)| {
                    format!("{name}: {}", value.to_str().unwrap())
                };
                (true, reply.headers.iter().map(field).collect())
            }
        }
    }

    #[test]
    fn origins_match_by_scheme_host_and_port() {
        for (allowed, origin, expected) in [
            ("*", "https://any.example", true),
            ("https://foo.example", "https://foo.example", true),
            ("https://foo.example", "https://FOO.example:443", true),
            ("https://foo.example", "http://foo.example", false),
            ("https://foo.example:8443", "https://foo.example", false),
            ("https://foo.example", "https://foo.example.evil", false),
            ("https://foo.example", "https://evil-foo.example", false),
            ("https://*.foo.example", "https://a.b.foo.example", true),
            ("https://*.foo.example", "https://foo.example", false),
            ("https://*.foo.example", "https://evilfoo.example", false),
            ("http://*", "http://any", true),
            ("http://*:8080", "http://any", false),
            ("http://*:8080", "http://any:8080", true),
            ("http://*", "null", false),
            ("http://*", "http://a@b", false),
        ] {
            assert_eq!(allows(allowed, origin), expected, "{allowed} {origin}");
        }
    }

    #[test]
    fn preflight_requests_are_answered() {
        let mut cors = cors(&["https://foo.example"]);
        (cors.allow_methods, cors.allow_headers, cors.max_age) =
            (texts(&["GET", "PUT"]), texts(&["X-A"]), 60);
        let asked = [
            ("origin", "https://foo.example"),
            ("access-control-request-method", "PUT"),
            ("access-control-request-headers", "x-b"),
        ];
        let (is_preflight, fields) = apply(&cors, "OPTIONS", &asked);
        assert!(is_preflight);
        let expected = [
            "access-control-allow-origin: https://foo.example",
            "access-control-allow-methods: GET, PUT",
            "access-control-allow-headers: X-A",
            "access-control-max-age: 60",
            "vary: origin",
        ];
        assert_eq!(fields, expected);
        let denied = [("origin", "https://evil"), asked[1]];
        assert_eq!(
            apply(&cors, "OPTIONS", &denied),
            (true, texts(&["vary: origin"]))
        );
        assert!(!apply(&cors, "PUT", &asked).0, "only OPTIONS");
        assert!(
            !apply(&cors, "OPTIONS", &asked[..1]).0,
            "no preflight request"
        );
        assert_eq!(apply(&cors, "OPTIONS", &asked[1..]), (false, Vec::new()));
    }

    #[test]
    fn credentials_exclude_wildcards() {
        let mut cors = cors(&["*"]);
        (cors.allow_methods, cors.allow_headers, cors.expose_headers) =
            (texts(&["*"]), texts(&["*"]), texts(&["*"]));
        let asked = [
            ("origin", "https://foo.example"),
            ("access-control-request-method", "PUT"),
            ("access-control-request-headers", "x-b"),
        ];
        let any = [
            "access-control-allow-origin: *",
            "access-control-expose-headers: *",
        ];
        assert_eq!(apply(&cors, "OPTIONS", &asked).1[..2], any);
        cors.allow_credentials = true;
        let expected = [
            "access-control-allow-origin: https://foo.example",
            "access-control-allow-credentials: true",
            "access-control-allow-methods: PUT",
            "access-control-allow-headers: x-b",
        ];
        assert_eq!(apply(&cors, "OPTIONS", &asked).1[..4], expected);
    }
}
