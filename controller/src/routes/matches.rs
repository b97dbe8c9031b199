//! Matches of routes and their precedence. Pure.

use std::cmp::Reverse;

use diy_mesh_proto::mesh::v1::field_match::Kind as ValueMatch;
use diy_mesh_proto::mesh::v1::path_match::Kind as PathKind;
use diy_mesh_proto::mesh::v1::{FieldMatch, PathMatch, RouteMatch};
use diy_mesh_proto::pattern::Pattern;

use super::filters::is_token;
use super::model::{Match, Rejection};
use super::parse::{MAX_ITEMS, bounded, header_name, refuse, unsupported};
use super::spec::{self, GrpcMatch, GrpcMethodMatch, HttpMatch, TcpMatch};
use crate::fields::one_of;

const MAX_PATH_BYTES: usize = 1024;
const MAX_VALUE_BYTES: usize = 4096;
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH",
];

/// A match in its object. The default matches every request.
pub(crate) trait MatchSpec: Default {
    /// Parses the match in the field `at`.
    fn parse(&self, at: &str) -> Result<Match, Rejection>;
}

impl MatchSpec for HttpMatch {
    /// Exact paths precede regular expressions, which precede prefixes: the specification leaves
    /// their place open, and after the prefix "/" they would never match.
    fn parse(&self, at: &str) -> Result<Match, Rejection> {
        let path = match &self.path {
            None => PathKind::Prefix("/".to_owned()),
            Some(path) => path_match(path, &format!("{at}.path"))?,
        };
        let headers = headers(&self.headers, &format!("{at}.headers"))?;
        let query = query(&self.query_params, &format!("{at}.queryParams"))?;
        let method = self.method.clone().unwrap_or_default();
        if self.method.is_some() && !METHODS.contains(&&*method) {
            return refuse(at, "method", &method, "a method");
        }
        let (kind, length) = match &path {
            PathKind::Exact(path) => (2, path.chars().count()),
            PathKind::Regex(pattern) => (1, pattern.chars().count()),
            // A trailing slash has no meaning.
            PathKind::Prefix(path) => (0, path.trim_end_matches('/').chars().count()),
        };
        let has_method = usize::from(!method.is_empty());
        Ok(Match {
            rank: Reverse([kind, length, has_method, headers.len(), query.len()]),
            message: RouteMatch {
                rule: 0,
                path: Some(PathMatch { kind: Some(path) }),
                headers,
                query,
                method,
            },
        })
    }
}

impl MatchSpec for GrpcMatch {
    /// Exact names precede regular expressions.
    fn parse(&self, at: &str) -> Result<Match, Rejection> {
        let headers = headers(&self.headers, &format!("{at}.headers"))?;
        let (path, [service, method]) = match &self.method {
            None => (None, [0, 0]),
            Some(method) => grpc_path(method, &format!("{at}.method"))?,
        };
        Ok(Match {
            rank: Reverse([service, method, path.is_some().into(), headers.len(), 0]),
            message: RouteMatch {
                path: path.map(|path| PathMatch { kind: Some(path) }),
                headers,
                ..RouteMatch::default()
            },
        })
    }
}

impl MatchSpec for TcpMatch {
    fn parse(&self, _: &str) -> Result<Match, Rejection> {
        Ok(Match::default())
    }
}

/// The path of a gRPC call, "/SERVICE/METHOD", and the lengths of the exact names in it.
fn grpc_path(
    method: &GrpcMethodMatch,
    at: &str,
) -> Result<(Option<PathKind>, [usize; 2]), Rejection> {
    let is_regex = is_regex(method.kind.as_deref(), at)?;
    let is_service = |name: &str| name.split('.').all(is_identifier);
    let service = method.service.as_deref().unwrap_or_default();
    let name = method.method.as_deref().unwrap_or_default();
    let parts = [
        ("service", service, is_service as fn(&str) -> bool),
        ("method", name, is_identifier),
    ];
    for (part, value, is_valid) in parts {
        let field = format!("{at}.{part}");
        match is_regex {
            true => pattern(&field, value)?,
            false if value.is_empty() => {}
            false if is_valid(value) && value.len() <= MAX_PATH_BYTES => {}
            false => return Err(unsupported(&field, value, "a name of gRPC")),
        }
    }
    if service.is_empty() && name.is_empty() {
        return Err(unsupported(at, "", "a service, a method or both"));
    }
    if !is_regex {
        let lengths = [service.len(), name.len()];
        let path = match (service, name) {
            ("", name) => PathKind::Regex(format!("/[^/]+/{name}")),
            (service, "") => PathKind::Prefix(format!("/{service}")),
            (service, name) => PathKind::Exact(format!("/{service}/{name}")),
        };
        if let PathKind::Regex(path) = &path {
            // A long name alone may exceed what proxies compile.
            pattern(&format!("{at}.method"), path)?;
        }
        return Ok((Some(path), lengths));
    }
    let part = |pattern: &str| match pattern {
        "" => "[^/]+".to_owned(),
        pattern => format!("(?:{pattern})"),
    };
    let path = format!("/{}/{}", part(service), part(name));
    pattern(at, &path)?;
    Ok((Some(PathKind::Regex(path)), [0, 0]))
}

fn is_identifier(name: &str) -> bool {
    let mut bytes = name.bytes();
    let is_letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    bytes.next().is_some_and(is_letter)
        && bytes.all(|byte| is_letter(byte) || byte.is_ascii_digit())
}

/// The number of regular expressions in a match.
pub(crate) fn patterns(one: &Match) -> usize {
    let values = one.message.headers.iter().chain(&one.message.query);
    let values = values.filter(|value| matches!(value.kind, Some(ValueMatch::Regex(_))));
    values.count() + usize::from(matches!(one.path(), Some(PathKind::Regex(_))))
}

fn path_match(path: &spec::ValueMatch, at: &str) -> Result<PathKind, Rejection> {
    let value = path.value.as_deref().unwrap_or("/");
    let field = format!("{at}.value");
    let valid = |value: &str| {
        if is_path(value) {
            Ok(value.to_owned())
        } else {
            Err(unsupported(
                &field,
                value,
                "a path that begins with \"/\", without empty or dot segments, query and fragment",
            ))
        }
    };
    match path.kind.as_deref() {
        Some("Exact") => Ok(PathKind::Exact(valid(value)?)),
        None | Some("PathPrefix") => Ok(PathKind::Prefix(valid(value)?)),
        Some("RegularExpression") => {
            pattern(&field, value)?;
            Ok(PathKind::Regex(value.to_owned()))
        }
        Some(kind) => refuse(at, "type", kind, "a type of path match"),
    }
}

/// A path of a match, as the CRD permits it.
fn is_path(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    let mut segments = path.split('/').skip(1).peekable();
    let mut has_bad_segment = false;
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        has_bad_segment |= matches!(segment, "." | "..") || (segment.is_empty() && !is_last);
    }
    path.starts_with('/')
        && path.len() <= MAX_PATH_BYTES
        && !has_bad_segment
        && !lower.contains("%2f")
        && is_path_text(path)
}

/// Whether all characters may be part of a path, RFC 3986.
pub(super) fn is_path_text(text: &str) -> bool {
    let is_hex = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_hexdigit);
    let bytes = text.as_bytes();
    bytes.iter().enumerate().all(|(at, byte)| match byte {
        b'%' => is_hex(bytes.get(at + 1)) && is_hex(bytes.get(at + 2)),
        byte => byte.is_ascii_alphanumeric() || b"-/._~!$&'()*+,;=:@".contains(byte),
    })
}

/// The conditions on headers. Of several with one name, the first one counts.
fn headers(specs: &[spec::ValueMatch], at: &str) -> Result<Vec<FieldMatch>, Rejection> {
    values(specs, at, header_name)
}

fn query(specs: &[spec::ValueMatch], at: &str) -> Result<Vec<FieldMatch>, Rejection> {
    values(specs, at, |field, name| {
        if is_token(name) {
            Ok(name.to_owned())
        } else {
            Err(unsupported(field, name, "the name of a query parameter"))
        }
    })
}

fn values(
    specs: &[spec::ValueMatch],
    at: &str,
    name: impl Fn(&str, &str) -> Result<String, Rejection>,
) -> Result<Vec<FieldMatch>, Rejection> {
    bounded(at, specs, MAX_ITEMS)?;
    let mut values: Vec<FieldMatch> = Vec::new();
    for (position, spec) in specs.iter().enumerate() {
        let at = format!("{at}[{position}]");
        let name = name(&format!("{at}.name"), &spec.name)?;
        let (value, field) = (
            spec.value.as_deref().unwrap_or_default(),
            format!("{at}.value"),
        );
        let value = match is_regex(spec.kind.as_deref(), &at)? {
            true => {
                pattern(&field, value)?;
                ValueMatch::Regex(value.to_owned())
            }
            false if (1..=MAX_VALUE_BYTES).contains(&value.len()) => {
                ValueMatch::Exact(value.to_owned())
            }
            false => return Err(unsupported(&field, value, "a value of 1 to 4096 bytes")),
        };
        if values.iter().all(|other| other.name != name) {
            let kind = Some(value);
            values.push(FieldMatch { name, kind });
        }
    }
    Ok(values)
}

fn is_regex(kind: Option<&str>, at: &str) -> Result<bool, Rejection> {
    let kinds = [("Exact", false), ("RegularExpression", true)];
    one_of(&format!("{at}.type"), kind, &kinds)
}

/// Rejects a regular expression that proxies cannot compile.
fn pattern(field: &str, text: &str) -> Result<(), Rejection> {
    let parsed = Pattern::parse(text);
    parsed
        .map(drop)
        .map_err(|error| unsupported(field, text, &format!("a regular expression: {error}")))
}
