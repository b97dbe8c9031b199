//! Requests of other origins (WHATWG Fetch, "CORS protocol"): the response to a preflight request,
//! and the fields of other responses. Pure.

use http::header::{HeaderName, HeaderValue, VARY};
use http::{Method, StatusCode};

use crate::http::fields::FieldEdit;
use crate::http::reply::LocalReply;
use crate::http::view::RequestView;

/// What requests of other origins may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// The origins.
    pub origins: Vec<Origin>,
    /// Requests may have credentials.
    pub credentials: bool,
    /// Methods, or "*".
    pub methods: Vec<String>,
    /// Fields of requests, or "*".
    pub headers: Vec<String>,
    /// Fields of responses, or "*".
    pub expose: Vec<String>,
    /// Seconds for which the response to a preflight request is valid.
    pub max_age: u32,
}

/// Origins that are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// All.
    Any,
    /// Of a scheme and port, whose host has this end, or is it.
    Host {
        /// "http" or "https".
        scheme: String,
        /// The host, or its end from the first dot on.
        host: String,
        /// `host` is an end.
        is_suffix: bool,
        /// The port.
        port: u16,
    },
}

impl Origin {
    /// Reads `*`, `SCHEME://HOST[:PORT]`, or one with a `*` at the start of its host.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let expected = || format!("CORS origin {text:?}: expected SCHEME://HOST[:PORT] or \"*\"");
        let (scheme, host, port) = split(text).ok_or_else(expected)?;
        let (host, is_suffix) = match host.strip_prefix('*') {
            Some(suffix) => (suffix, true),
            None => (host, false),
        };
        if host.contains('*') || (host.is_empty() && !is_suffix) {
            return Err(expected());
        }
        Ok(Self::Host {
            scheme: scheme.to_ascii_lowercase(),
            host: host.to_ascii_lowercase(),
            is_suffix,
            port,
        })
    }

    fn allows(&self, origin: &str) -> bool {
        let Self::Host {
            scheme,
            host,
            is_suffix,
            port,
        } = self
        else {
            return true;
        };
        let Some((named_scheme, named, named_port)) = split(origin) else {
            return false;
        };
        let named = named.to_ascii_lowercase();
        let is_host = if *is_suffix {
            named.len() > host.len() && named.ends_with(host.as_str())
        } else {
            named == *host
        };
        is_host && named_scheme.eq_ignore_ascii_case(scheme) && named_port == *port
    }
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

impl Cors {
    /// The fields that the response gets. For a preflight request, the response.
    pub fn apply(&self, request: &RequestView<'_>) -> Result<Vec<FieldEdit>, LocalReply> {
        let text = |name: &str| {
            let value = request.header(name)?;
            std::str::from_utf8(value).ok()
        };
        let Some(origin) = text("origin") else {
            return Ok(Vec::new());
        };
        let is_allowed = self.origins.iter().any(|one| one.allows(origin));
        let asked_method = text("access-control-request-method");
        let is_preflight = request.method == Method::OPTIONS.as_str().as_bytes();
        let Some(method) = asked_method.filter(|_| is_preflight) else {
            let fields = if is_allowed {
                self.common(origin)
            } else {
                Vec::new()
            };
            return Ok(edits(fields));
        };
        let mut fields = Vec::new();
        if is_allowed {
            fields = self.common(origin);
            let asked_headers = text("access-control-request-headers");
            let methods = self.list(&self.methods, Some(method));
            let headers = self.list(&self.headers, asked_headers);
            fields.extend(methods.map(|list| ("access-control-allow-methods", list)));
            fields.extend(headers.map(|list| ("access-control-allow-headers", list)));
            fields.push(("access-control-max-age", self.max_age.to_string()));
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
    fn common(&self, origin: &str) -> Vec<(&'static str, String)> {
        let is_any = self.origins.contains(&Origin::Any) && !self.credentials;
        let origin = if is_any { "*" } else { origin };
        let mut fields = vec![("access-control-allow-origin", origin.to_owned())];
        if self.credentials {
            fields.push(("access-control-allow-credentials", "true".to_owned()));
        }
        let expose = self.list(&self.expose, None);
        fields.extend(expose.map(|list| ("access-control-expose-headers", list)));
        fields
    }

    /// A list as a value. With credentials, "*" means nothing: what was asked for replaces it.
    fn list(&self, list: &[String], asked: Option<&str>) -> Option<String> {
        let is_any = list.iter().any(|one| one == "*");
        match (list.is_empty(), is_any && self.credentials) {
            (true, _) => None,
            (false, true) => asked.map(str::to_owned),
            (false, false) => Some(list.join(", ")),
        }
    }
}

/// The changes of a response. Caches keep the responses to different origins apart.
fn edits(fields: Vec<(&str, String)>) -> Vec<FieldEdit> {
    let set = |(name, value): (&str, String)| FieldEdit::set(name, &value).ok();
    let vary = [FieldEdit::add("vary", "origin").ok()];
    let fields = fields.into_iter().map(set);
    fields.chain(vary).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn cors(origins: &[&str]) -> Cors {
        Cors {
            origins: origins
                .iter()
                .map(|one| Origin::parse(one).unwrap())
                .collect(),
            ..Cors::default()
        }
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    /// The response's fields as text, and whether it is that of a preflight request.
    fn apply(cors: &Cors, method: &str, fields: &[(&str, &str)]) -> (bool, Vec<String>) {
        let head = fields
            .iter()
            .fold(Request::get("/"), |head, (name, value)| {
                head.header(*name, *value)
            });
        let head = head.body(()).unwrap().into_parts().0;
        let request = RequestView {
            head: &head,
            ..crate::http::view::testing::request(method, "/")
        };
        match cors.apply(&request) {
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
            let origins = Origin::parse(allowed).unwrap();
            assert_eq!(origins.allows(origin), expected, "{allowed} {origin}");
        }
        for invalid in [
            "",
            "foo.example",
            "ftp://a",
            "http://a.*.b",
            "http://",
            "http://a:b",
        ] {
            assert!(Origin::parse(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn preflight_requests_are_answered() {
        let mut cors = cors(&["https://foo.example"]);
        (cors.methods, cors.headers, cors.max_age) = (texts(&["GET", "PUT"]), texts(&["X-A"]), 60);
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
        (cors.methods, cors.headers, cors.expose) = (texts(&["*"]), texts(&["*"]), texts(&["*"]));
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
        cors.credentials = true;
        let expected = [
            "access-control-allow-origin: https://foo.example",
            "access-control-allow-credentials: true",
            "access-control-allow-methods: PUT",
            "access-control-allow-headers: x-b",
        ];
        assert_eq!(apply(&cors, "OPTIONS", &asked).1[..4], expected);
    }
}
