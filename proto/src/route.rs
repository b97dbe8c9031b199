//! Matches and filters of routes. The controller does not accept a route with other values, and a proxy
//! rejects a message with others: both compile matches, and check filters, here.
//!
//! Fields have the names of the Gateway API. Fields that filters write must not change the framing
//! of requests and responses. So names and values are checked, and only the proxy sets the headers
//! of connections.

use std::collections::BTreeSet;

use crate::field::is_reserved;
use crate::mesh::v1::route_filter::Kind as FilterKind;
use crate::mesh::v1::{
    self as proto, Cors, HeaderModifier, Mirror, PathModifier, Redirect, RouteMatch, RouteRetry,
    Share, UrlRewrite, field_match, path_match, path_modifier,
};
use crate::pattern::Pattern;
use crate::policy::{Violation, check_share, violation};

/// The length of the path of a match: "/SERVICE/METHOD", of gRPC names with 1024 bytes each.
const MAX_MATCH_BYTES: usize = 2 * 1024 + 2;
const MAX_PATH_BYTES: usize = 1024;
const MAX_HOSTNAME_BYTES: usize = 253;
const MAX_NAME_BYTES: usize = 256;
const MAX_VALUE_BYTES: usize = 4096;
const MAX_CORS_ITEMS: usize = 64;
/// More attempts would amplify an outage.
const MAX_RETRY_ATTEMPTS: u32 = 10;
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH",
];

/// Conditions on a request, all of which hold.
#[derive(Clone, Debug, Default)]
pub struct Match {
    /// The index of the rule.
    pub rule: usize,
    /// The condition on the path, or `None` for every path.
    pub path: Option<PathMatch>,
    /// The conditions on header fields.
    pub headers: Vec<FieldMatch>,
    /// The conditions on query parameters.
    pub query: Vec<FieldMatch>,
    /// The method, or `None` for every method.
    pub method: Option<String>,
}

/// A condition on the path.
#[derive(Clone, Debug)]
pub enum PathMatch {
    /// The whole path.
    Exact(String),
    /// The first elements, without a slash at the end.
    Prefix(String),
    /// The whole path.
    Regex(Pattern),
}

/// A condition on a header field or a query parameter.
#[derive(Clone, Debug)]
pub struct FieldMatch {
    /// The name.
    pub name: String,
    /// The value.
    pub value: ValueMatch,
}

/// A condition on a value.
#[derive(Clone, Debug)]
pub enum ValueMatch {
    /// The whole value.
    Exact(String),
    /// The whole value.
    Regex(Pattern),
}

impl Match {
    /// Compiles the conditions.
    pub fn compile(message: &RouteMatch) -> Result<Self, Violation> {
        let path = message.path.as_ref().map(PathMatch::compile).transpose();
        let method = Some(&message.method).filter(|method| !method.is_empty());
        if let Some(method) = method.filter(|method| !METHODS.contains(&method.as_str())) {
            return Err(violation("method", method, "a method"));
        }
        Ok(Self {
            rule: message.rule.try_into().unwrap_or(usize::MAX),
            path: path.map_err(|violation| violation.within("path"))?,
            headers: FieldMatch::compile_all("headers", "header", &message.headers)?,
            query: FieldMatch::compile_all("queryParams", "query parameter", &message.query)?,
            method: method.cloned(),
        })
    }

    /// The length of the path's prefix that selected the rule.
    pub fn prefix_len(&self) -> Option<usize> {
        match &self.path {
            None => Some(0),
            Some(PathMatch::Prefix(prefix)) => Some(prefix.len()),
            Some(PathMatch::Exact(_) | PathMatch::Regex(_)) => None,
        }
    }
}

impl PathMatch {
    /// A prefix of elements: "/a" and "/a/" are the same.
    pub fn prefix(prefix: &str) -> Self {
        Self::Prefix(prefix.strip_suffix('/').unwrap_or(prefix).to_owned())
    }

    fn compile(message: &proto::PathMatch) -> Result<Self, Violation> {
        let valid = |path: &str| {
            if is_path(path) {
                Ok(())
            } else {
                let expected = "a path that begins with \"/\", without empty or dot segments, query and \
                                fragment";
                Err(violation("value", path, expected))
            }
        };
        match &message.kind {
            Some(path_match::Kind::Exact(path)) => valid(path).map(|()| Self::Exact(path.clone())),
            Some(path_match::Kind::Prefix(path)) => valid(path).map(|()| Self::prefix(path)),
            Some(path_match::Kind::Regex(regex)) => {
                compile_pattern("value", regex).map(Self::Regex)
            }
            None => Err(violation("type", "", "a known type of path match")),
        }
    }
}

impl FieldMatch {
    fn compile_all(
        field: &str,
        what: &str,
        messages: &[proto::FieldMatch],
    ) -> Result<Vec<Self>, Violation> {
        let compile = |(position, message): (usize, &proto::FieldMatch)| {
            let one = Self::compile(what, message);
            one.map_err(|violation| violation.within(&format!("{field}[{position}]")))
        };
        messages.iter().enumerate().map(compile).collect()
    }

    fn compile(what: &str, message: &proto::FieldMatch) -> Result<Self, Violation> {
        let name = message.name.clone();
        if !is_token(&name) {
            return Err(violation("name", name, &format!("the name of a {what}")));
        }
        let value = match &message.kind {
            Some(field_match::Kind::Regex(regex)) => {
                ValueMatch::Regex(compile_pattern("value", regex)?)
            }
            Some(field_match::Kind::Exact(value)) => {
                if !(1..=MAX_VALUE_BYTES).contains(&value.len()) {
                    return Err(violation("value", value, "a value of 1 to 4096 bytes"));
                }
                ValueMatch::Exact(value.clone())
            }
            None => return Err(violation("type", "", "a known type of match")),
        };
        Ok(Self { name, value })
    }
}

/// Compiles a regular expression.
pub fn compile_pattern(field: &'static str, text: &str) -> Result<Pattern, Violation> {
    Pattern::parse(text)
        .map_err(|error| violation(field, text, &format!("a regular expression: {error}")))
}

/// The number of regular expressions in a match.
pub fn patterns(one: &RouteMatch) -> usize {
    let is_regex = |one: &&proto::FieldMatch| matches!(one.kind, Some(field_match::Kind::Regex(_)));
    let path = one.path.as_ref().and_then(|path| path.kind.as_ref());
    one.headers
        .iter()
        .chain(&one.query)
        .filter(is_regex)
        .count()
        + usize::from(matches!(path, Some(path_match::Kind::Regex(_))))
}

/// Checks a filter.
pub fn check_filter(filter: &FilterKind) -> Result<(), Violation> {
    let (field, checked) = match filter {
        FilterKind::RequestHeaders(one) => ("requestHeaderModifier", check_modifier(one)),
        FilterKind::ResponseHeaders(one) => ("responseHeaderModifier", check_modifier(one)),
        FilterKind::Redirect(one) => ("requestRedirect", check_redirect(one)),
        FilterKind::Rewrite(one) => ("urlRewrite", check_rewrite(one)),
        FilterKind::Mirror(one) => ("requestMirror", check_mirror(one)),
        FilterKind::Cors(one) => ("cors", check_cors(one)),
    };
    checked.map_err(|violation| violation.within(field))
}

fn check_modifier(modifier: &HeaderModifier) -> Result<(), Violation> {
    let mut names = Vec::new();
    for (list, fields) in [("set", &modifier.set), ("add", &modifier.add)] {
        for field in fields {
            check_modified(list, &field.name)?;
            let value = &field.value;
            let is_text = |byte: u8| (b' '..=b'~').contains(&byte) || byte == b'\t';
            let is_trimmed = value.trim_matches([' ', '\t']) == value;
            if !(value.bytes().all(is_text) && is_trimmed && value.len() <= MAX_VALUE_BYTES) {
                return Err(violation(list, value, "the value of a header"));
            }
        }
        // Within a list, only the first field with a name counts.
        let own = fields.iter().map(|field| field.name.to_ascii_lowercase());
        names.extend(own.collect::<BTreeSet<_>>());
    }
    for name in &modifier.remove {
        check_modified("remove", name)?;
        names.push(name.to_ascii_lowercase());
    }
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(violation("", &pair[0], "the subject of one change only")),
        None => Ok(()),
    }
}

/// Checks the name of a header that filters may change.
fn check_modified(field: &'static str, name: &str) -> Result<(), Violation> {
    if !is_token(name) {
        Err(violation(field, name, "the name of a header"))
    } else if is_reserved(name) {
        Err(violation(field, name, "a header that filters may change"))
    } else {
        Ok(())
    }
}

fn check_redirect(redirect: &Redirect) -> Result<(), Violation> {
    let Redirect {
        scheme,
        hostname,
        path,
        port,
        status,
    } = redirect;
    if !matches!(scheme.as_str(), "" | "http" | "https") {
        return Err(violation("scheme", scheme, "http or https"));
    }
    if !matches!(status, 301 | 302 | 303 | 307 | 308) {
        let expected = "301, 302, 303, 307 or 308";
        return Err(violation("statusCode", status, expected));
    }
    if u16::try_from(*port).is_err() {
        return Err(violation("port", port, "at most 65535"));
    }
    check_hostname(hostname)?;
    check_path_modifier(path.as_ref())
}

fn check_rewrite(rewrite: &UrlRewrite) -> Result<(), Violation> {
    check_hostname(&rewrite.hostname)?;
    check_path_modifier(rewrite.path.as_ref())
}

fn check_hostname(hostname: &str) -> Result<(), Violation> {
    if hostname.is_empty() || is_hostname(hostname) {
        Ok(())
    } else {
        Err(violation("hostname", hostname, "a host name"))
    }
}

fn check_path_modifier(modifier: Option<&PathModifier>) -> Result<(), Violation> {
    let (field, path) = match modifier.map(|modifier| &modifier.kind) {
        None => return Ok(()),
        Some(Some(path_modifier::Kind::Prefix(path))) if path.is_empty() => return Ok(()),
        Some(Some(path_modifier::Kind::Full(path))) => ("path.replaceFullPath", path),
        Some(Some(path_modifier::Kind::Prefix(path))) => ("path.replacePrefixMatch", path),
        Some(None) => return Err(violation("path.type", "", "a known type of path modifier")),
    };
    if path.starts_with('/') && path.len() <= MAX_PATH_BYTES && is_path_text(path) {
        Ok(())
    } else {
        Err(violation(field, path, "a path that begins with \"/\""))
    }
}

fn check_mirror(mirror: &Mirror) -> Result<(), Violation> {
    let (numerator, denominator) = (mirror.numerator, mirror.denominator);
    check_share(
        "",
        Some(Share {
            numerator,
            denominator,
        }),
    )
}

fn check_cors(cors: &Cors) -> Result<(), Violation> {
    type Check = fn(&str) -> bool;
    for (field, list, is_valid) in [
        ("allowOrigins", &cors.allow_origins, is_origin as Check),
        ("allowMethods", &cors.allow_methods, is_token),
        ("allowHeaders", &cors.allow_headers, is_token),
        ("exposeHeaders", &cors.expose_headers, is_token),
    ] {
        if list.len() > MAX_CORS_ITEMS {
            let expected = format!("at most {MAX_CORS_ITEMS} entries");
            return Err(violation(field, list.len(), &expected));
        }
        if let Some(value) = list.iter().find(|one| *one != "*" && !is_valid(one)) {
            return Err(violation(field, value, "valid"));
        }
        if list.len() > 1 && list.iter().any(|one| one == "*") {
            return Err(violation(field, "*", "the only entry"));
        }
    }
    Ok(())
}

/// SCHEME://HOST[:PORT], with a host that may be "*" or begin with "*.".
fn is_origin(origin: &str) -> bool {
    let Some((scheme, host)) = origin.split_once("://") else {
        return false;
    };
    let (host, port) = host.split_once(':').unwrap_or((host, "1"));
    let labels = host.strip_prefix("*.").unwrap_or(host);
    let is_label = |label: &str| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !label.is_empty() && label.bytes().all(is_valid)
    };
    matches!(scheme, "http" | "https")
        && origin.len() <= MAX_HOSTNAME_BYTES
        && (host == "*" || labels.split('.').all(is_label))
        && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// Checks the retries of a rule.
pub fn check_retry(retry: &RouteRetry) -> Result<(), Violation> {
    let mut statuses = retry.statuses.iter();
    if let Some(status) = statuses.find(|status| !(400..600).contains(*status)) {
        let expected = "a status from 400 to 599";
        return Err(violation("retry.codes", status, expected));
    }
    if retry.attempts > MAX_RETRY_ATTEMPTS {
        let expected = format!("at most {MAX_RETRY_ATTEMPTS}");
        return Err(violation("retry.attempts", retry.attempts, &expected));
    }
    Ok(())
}

/// A path of a match, as the Gateway API permits it.
fn is_path(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    let mut segments = path.split('/').skip(1).peekable();
    let mut has_bad_segment = false;
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        has_bad_segment |= matches!(segment, "." | "..") || (segment.is_empty() && !is_last);
    }
    path.starts_with('/')
        && path.len() <= MAX_MATCH_BYTES
        && !has_bad_segment
        && !lower.contains("%2f")
        && is_path_text(path)
}

/// Whether all characters may be part of a path (RFC 3986).
fn is_path_text(text: &str) -> bool {
    let is_hex = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_hexdigit);
    let bytes = text.as_bytes();
    bytes.iter().enumerate().all(|(at, byte)| match byte {
        b'%' => is_hex(bytes.get(at + 1)) && is_hex(bytes.get(at + 2)),
        byte => byte.is_ascii_alphanumeric() || b"-/._~!$&'()*+,;=:@".contains(byte),
    })
}

/// A DNS label in lower case (RFC 1123), of any length.
pub fn is_label(label: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let has_edges = !label.starts_with('-') && !label.ends_with('-');
    !label.is_empty() && has_edges && label.bytes().all(is_valid)
}

/// A name of DNS labels in lower case.
pub fn is_hostname(name: &str) -> bool {
    name.len() <= MAX_HOSTNAME_BYTES && name.split('.').all(is_label)
}

/// A token (RFC 9110), such as the name of a header.
pub fn is_token(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_valid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::v1::header_modifier::Field;

    fn error(filter: FilterKind) -> String {
        check_filter(&filter).unwrap_err().to_string()
    }

    #[test]
    fn filters_change_no_fields_of_the_mesh_and_of_connections_and_write_no_line_ends() {
        let field = |name: &str, value: &str| Field {
            name: name.to_owned(),
            value: value.to_owned(),
        };
        let set = |name, value| HeaderModifier {
            set: vec![field(name, value)],
            ..HeaderModifier::default()
        };
        let remove = |name: &str| HeaderModifier {
            remove: vec![name.to_owned()],
            ..HeaderModifier::default()
        };
        for name in [
            "X-Called-By",
            "X-Mesh-Previous-Attempts",
            "x_called.by",
            "X-Mesh-Error",
            "Connection",
            "TE",
            "Host",
            "Transfer-Encoding",
            "Content-Length",
            "",
            "a b",
            "a:b",
            "a\r\nb",
        ] {
            assert!(check_modifier(&remove(name)).is_err(), "{name:?}");
            assert!(check_modifier(&set(name, "1")).is_err(), "{name:?}");
        }
        for value in ["a\r\nX-Called-By: b", "a\n", "\0", "ä"] {
            let add = std::mem::take(&mut set("x-a", value).set);
            let add = HeaderModifier {
                add,
                ..HeaderModifier::default()
            };
            assert!(check_modifier(&add).is_err(), "{value:?}");
        }
        assert_eq!(check_modifier(&set("X-Route", "canary, 10%")), Ok(()));
        let mut twice = set("X-Route", "1");
        twice.remove.push("x-route".to_owned());
        let message = "requestHeaderModifier: \"x-route\" is not the subject of one change only";
        assert_eq!(error(FilterKind::RequestHeaders(twice)), message);
    }

    #[test]
    fn origins_have_a_scheme_and_a_host() {
        let cors = |origins: &[&str]| Cors {
            allow_origins: origins.iter().map(ToString::to_string).collect(),
            ..Cors::default()
        };
        for valid in ["*", "https://foo.example", "http://*", "http://*.foo:8080"] {
            assert_eq!(check_cors(&cors(&[valid])), Ok(()), "{valid}");
        }
        for invalid in [
            "",
            "foo.example",
            "ftp://a",
            "http://a.*.b",
            "http://",
            "http://a:b",
        ] {
            assert!(check_cors(&cors(&[invalid])).is_err(), "{invalid}");
        }
        let message = "cors.allowOrigins: \"*\" is not the only entry";
        assert_eq!(error(FilterKind::Cors(cors(&["*", "http://a"]))), message);
    }

    #[test]
    fn violation_of_a_match_names_its_field() {
        let of = |change: fn(&mut RouteMatch)| {
            let mut one = RouteMatch::default();
            change(&mut one);
            Match::compile(&one).unwrap_err().field
        };
        let field = |name: &str, kind| proto::FieldMatch {
            name: name.to_owned(),
            kind,
        };
        assert_eq!(of(|one| one.method = "get".to_owned()), "method");
        assert_eq!(of(|one| one.path = Some(Default::default())), "path.type");
        let relative = |one: &mut RouteMatch| {
            let kind = path_match::Kind::Exact("a".to_owned());
            one.path = Some(proto::PathMatch { kind: Some(kind) });
        };
        assert_eq!(of(relative), "path.value");
        let mut one = RouteMatch {
            headers: vec![
                field("x-a", Some(field_match::Kind::Exact("1".to_owned()))),
                field("x-b", Some(field_match::Kind::Regex("(".to_owned()))),
            ],
            ..RouteMatch::default()
        };
        assert_eq!(patterns(&one), 1);
        let violation = |one: &RouteMatch| Match::compile(one).unwrap_err().field;
        assert_eq!(violation(&one), "headers[1].value");
        one.query = one.headers.drain(..).rev().collect();
        assert_eq!(violation(&one), "queryParams[0].value");
        one.query[0].kind = None;
        assert_eq!(violation(&one), "queryParams[0].type");
    }
}
