//! Matches of routes and their precedence. Pure.

use std::cmp::Reverse;
use std::collections::HashSet;

use diy_mesh_proto::mesh::v1::field_match::Kind as ValueMatch;
use diy_mesh_proto::mesh::v1::path_match::Kind as PathKind;
use diy_mesh_proto::mesh::v1::{FieldMatch, PathMatch, RouteMatch};
use diy_mesh_proto::route::{self, compile_pattern};

use super::model::Match;
use super::parse::MAX_ITEMS;
use super::spec::{self, GrpcMatch, GrpcMethodMatch, HttpMatch, TcpMatch};
use crate::object::Rejection;
use crate::object::fields::one_of;
use crate::object::rejection::{bounded, refuse, unsupported, violates};

/// The length of a path, and of a name of gRPC.
const MAX_NAME_BYTES: usize = 1024;

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
        let query = values(
            &self.query_params,
            &format!("{at}.queryParams"),
            str::to_owned,
        )?;
        let method = self.method.clone().unwrap_or_default();
        // In the message, an empty one is every method.
        if self.method.is_some() && method.is_empty() {
            return refuse(at, "method", &method, "a method");
        }
        let (kind, length) = match &path {
            PathKind::Exact(path) => (2, path.chars().count()),
            PathKind::Regex(pattern) => (1, pattern.chars().count()),
            // A trailing slash has no meaning.
            PathKind::Prefix(path) => (0, path.trim_end_matches('/').chars().count()),
        };
        let has_method = usize::from(!method.is_empty());
        let message = RouteMatch {
            rule: 0,
            path: Some(PathMatch { kind: Some(path) }),
            headers,
            query,
            method,
        };
        ranked([kind, length, has_method], message, at)
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
        let has_path = path.is_some().into();
        let message = RouteMatch {
            path: path.map(|path| PathMatch { kind: Some(path) }),
            headers,
            ..RouteMatch::default()
        };
        ranked([service, method, has_path], message, at)
    }
}

impl MatchSpec for TcpMatch {
    fn parse(&self, _: &str) -> Result<Match, Rejection> {
        Ok(Match::default())
    }
}

/// A match that proxies can compile. Its rank ends with the numbers of its conditions. The first of
/// several conditions with one name counts.
fn ranked(rank: [usize; 3], mut message: RouteMatch, at: &str) -> Result<Match, Rejection> {
    route::Match::compile(&message).map_err(|violation| violates(at, &violation))?;
    for list in [&mut message.headers, &mut message.query] {
        let mut names = HashSet::new();
        list.retain(|one| names.insert(one.name.clone()));
    }
    let [first, second, third] = rank;
    let (headers, query) = (message.headers.len(), message.query.len());
    Ok(Match {
        message,
        rank: Reverse([first, second, third, headers, query]),
    })
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
            false if is_valid(value) && value.len() <= MAX_NAME_BYTES => {}
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

fn path_match(path: &spec::ValueMatch, at: &str) -> Result<PathKind, Rejection> {
    let value = path.value.as_deref().unwrap_or("/").to_owned();
    if path.kind.as_deref() != Some("RegularExpression") && value.len() > MAX_NAME_BYTES {
        return refuse(at, "value", value, "a path of at most 1024 bytes");
    }
    match path.kind.as_deref() {
        Some("Exact") => Ok(PathKind::Exact(value)),
        None | Some("PathPrefix") => Ok(PathKind::Prefix(value)),
        Some("RegularExpression") => Ok(PathKind::Regex(value)),
        Some(kind) => refuse(at, "type", kind, "a type of path match"),
    }
}

/// The conditions on headers, whose names are in lower case.
fn headers(specs: &[spec::ValueMatch], at: &str) -> Result<Vec<FieldMatch>, Rejection> {
    values(specs, at, str::to_ascii_lowercase)
}

fn values(
    specs: &[spec::ValueMatch],
    at: &str,
    name: fn(&str) -> String,
) -> Result<Vec<FieldMatch>, Rejection> {
    bounded(at, specs, MAX_ITEMS)?;
    let value = |(position, spec): (usize, &spec::ValueMatch)| {
        let value = spec.value.clone().unwrap_or_default();
        let kind = if is_regex(spec.kind.as_deref(), &format!("{at}[{position}]"))? {
            ValueMatch::Regex(value)
        } else {
            ValueMatch::Exact(value)
        };
        let (name, kind) = (name(&spec.name), Some(kind));
        Ok(FieldMatch { name, kind })
    };
    specs.iter().enumerate().map(value).collect()
}

fn is_regex(kind: Option<&str>, at: &str) -> Result<bool, Rejection> {
    let kinds = [("Exact", false), ("RegularExpression", true)];
    one_of(&format!("{at}.type"), kind, &kinds)
}

/// Rejects a regular expression that proxies cannot compile, as the value of `field`.
fn pattern(field: &str, text: &str) -> Result<(), Rejection> {
    let compiled = compile_pattern("", text).map(drop);
    compiled.map_err(|violation| violates(field, &violation))
}
