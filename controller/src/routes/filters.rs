//! Filters of routes. Pure.
//!
//! What they write into requests and responses must not change their framing: names and values are
//! checked, and the headers of connections are the proxy's alone.

use std::mem::discriminant;
use std::sync::Arc;

use diy_mesh_proto::field::is_reserved;
use diy_mesh_proto::mesh::v1::header_modifier::Field;
use diy_mesh_proto::mesh::v1::route_filter::Kind as FilterKind;
use diy_mesh_proto::mesh::v1::{
    Cors, HeaderModifier, Mirror, PathModifier, Redirect, RouteFilter, Share, UrlRewrite,
    path_match, path_modifier,
};

use super::model::{ExternalAuth, Match, Reference, Rejection};
use super::parse::{MAX_ITEMS, Meta, bounded, header_name, reference, refuse, unsupported};
use super::{INCOMPATIBLE_FILTERS, external, matches, spec};
use crate::index::object::Kind;

const MAX_HOSTNAME_BYTES: usize = 253;
const MAX_HEADER_NAME_BYTES: usize = 256;
const MAX_HEADER_BYTES: usize = 4096;
const MAX_PATH_BYTES: usize = 1024;
const MAX_CORS_ITEMS: usize = 64;
/// The default of the specification, in seconds.
const DEFAULT_CORS_MAX_AGE: u32 = 5;
/// The rule of a filter.
pub(super) struct Context<'a> {
    pub meta: &'a Meta,
    pub matches: &'a [Arc<Match>],
}

/// What filters and backends need that is not in their messages.
#[derive(Default)]
pub(super) struct Found {
    pub references: Vec<Reference>,
    /// The first filter that the mesh does not know.
    pub unknown: Option<String>,
    /// The filter ExternalAuth.
    pub external_auth: Option<ExternalAuth>,
}

/// Parses the filters in the field `at`.
pub(super) fn parse(
    specs: Vec<spec::Filter>,
    at: &str,
    context: &Context<'_>,
    found: &mut Found,
) -> Result<Vec<RouteFilter>, Rejection> {
    bounded(at, &specs, MAX_ITEMS)?;
    let mut filters: Vec<FilterKind> = Vec::new();
    for (position, spec) in specs.into_iter().enumerate() {
        let at = format!("{at}[{position}]");
        if spec.kind == "ExternalAuth" && context.meta.kind == Kind::HttpRoute {
            let filter = external::parse(&spec.external_auth, &at, context, found)?;
            if found.external_auth.replace(filter).is_some() {
                let message = format!("{at}: two filters of one type");
                return Err(Rejection::new(INCOMPATIBLE_FILTERS, message));
            }
            continue;
        }
        if matches!(&*spec.kind, "ExtensionRef" | "ExternalAuth") {
            let unknown = format!("{at}: the mesh has no {} filters", spec.kind);
            found.unknown.get_or_insert(unknown);
            continue;
        }
        filters.push(filter(spec, &at, context, found)?);
    }
    let incompatible =
        |message: &str| Rejection::new(INCOMPATIBLE_FILTERS, format!("{at}: {message}"));
    for (position, one) in filters.iter().enumerate() {
        let mut earlier = filters[..position].iter();
        let is_repeated = earlier.any(|other| discriminant(other) == discriminant(one));
        if is_repeated && !matches!(one, FilterKind::Mirror(_)) {
            return Err(incompatible("two filters of one type"));
        }
    }
    let has = |is_kind: fn(&FilterKind) -> bool| filters.iter().any(is_kind);
    if has(|one| matches!(one, FilterKind::Rewrite(_)))
        && has(|one| matches!(one, FilterKind::Redirect(_)))
    {
        return Err(incompatible("RequestRedirect excludes URLRewrite"));
    }
    let message = |kind| RouteFilter { kind: Some(kind) };
    Ok(filters.into_iter().map(message).collect())
}

pub(crate) fn is_redirect(filter: &RouteFilter) -> bool {
    matches!(filter.kind, Some(FilterKind::Redirect(_)))
}

pub(super) fn is_rewrite(filter: &RouteFilter) -> bool {
    matches!(filter.kind, Some(FilterKind::Rewrite(_)))
}

/// Whether the filter responds to requests.
pub(super) fn is_response(filter: &RouteFilter) -> bool {
    is_redirect(filter) || matches!(filter.kind, Some(FilterKind::Cors(_)))
}

fn filter(
    spec: spec::Filter,
    at: &str,
    context: &Context<'_>,
    found: &mut Found,
) -> Result<FilterKind, Rejection> {
    let is_grpc = context.meta.kind == Kind::GrpcRoute;
    Ok(match &*spec.kind {
        "RequestHeaderModifier" => {
            let modifier = spec.request_header_modifier;
            let (spec, at) = required(at, "requestHeaderModifier", modifier)?;
            FilterKind::RequestHeaders(header_modifier(spec, &at)?)
        }
        "ResponseHeaderModifier" => {
            let modifier = spec.response_header_modifier;
            let (spec, at) = required(at, "responseHeaderModifier", modifier)?;
            FilterKind::ResponseHeaders(header_modifier(spec, &at)?)
        }
        "RequestMirror" => {
            let (spec, at) = required(at, "requestMirror", spec.request_mirror)?;
            let share = share(spec.percent, spec.fraction.as_ref(), &at)?;
            let field = format!("{at}.backendRef");
            let reference = reference(spec.backend_ref, &context.meta.key, field);
            let backend = reference.name();
            found.references.push(reference);
            FilterKind::Mirror(Mirror {
                backend,
                numerator: share.numerator,
                denominator: share.denominator,
            })
        }
        "RequestRedirect" if !is_grpc => {
            let (spec, at) = required(at, "requestRedirect", spec.request_redirect)?;
            FilterKind::Redirect(redirect(spec, &at, context)?)
        }
        "URLRewrite" if !is_grpc => {
            let (spec, at) = required(at, "urlRewrite", spec.url_rewrite)?;
            FilterKind::Rewrite(UrlRewrite {
                hostname: hostname(&spec.hostname, &at)?,
                path: path_modifier(spec.path, &format!("{at}.path"), context)?,
            })
        }
        "CORS" if !is_grpc => {
            let (spec, at) = required(at, "cors", spec.cors)?;
            FilterKind::Cors(cors(spec, &at)?)
        }
        kind => {
            let expected = format!("a type of filter of {}", context.meta.kind);
            return refuse(at, "type", kind, &expected);
        }
    })
}

/// The value of a field, and its path.
fn required<T>(at: &str, name: &str, value: Option<T>) -> Result<(T, String), Rejection> {
    let field = format!("{at}.{name}");
    let value = value.ok_or_else(|| unsupported(&field, "", "set"))?;
    Ok((value, field))
}

fn header_modifier(spec: HeaderModifier, at: &str) -> Result<HeaderModifier, Rejection> {
    let set = headers(spec.set, &format!("{at}.set"))?;
    let add = headers(spec.add, &format!("{at}.add"))?;
    let field = format!("{at}.remove");
    bounded(&field, &spec.remove, MAX_ITEMS)?;
    let remove = spec.remove.iter().map(|name| modified(&field, name));
    let modifier = HeaderModifier {
        remove: remove.collect::<Result<_, _>>()?,
        set,
        add,
    };
    let fields = [&modifier.set, &modifier.add];
    let names = fields.into_iter().flatten().map(|field| &field.name);
    let names = names.chain(&modifier.remove);
    let mut names: Vec<String> = names.map(|name| name.to_ascii_lowercase()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(unsupported(at, &pair[0], "the subject of one change only")),
        None => Ok(modifier),
    }
}

/// Of several fields with one name, the first one counts.
fn headers(specs: Vec<Field>, at: &str) -> Result<Vec<Field>, Rejection> {
    bounded(at, &specs, MAX_ITEMS)?;
    let mut headers: Vec<Field> = Vec::new();
    for spec in specs {
        let name = modified(at, &spec.name)?;
        let is_text = |byte: u8| (b' '..=b'~').contains(&byte) || byte == b'\t';
        let is_trimmed = spec.value.trim_matches([' ', '\t']) == spec.value;
        let is_bounded = spec.value.len() <= MAX_HEADER_BYTES;
        if !(spec.value.bytes().all(is_text) && is_trimmed && is_bounded) {
            return Err(unsupported(at, &spec.value, "the value of a header"));
        }
        let is_same = |other: &Field| other.name.eq_ignore_ascii_case(&name);
        if !headers.iter().any(is_same) {
            let value = spec.value;
            headers.push(Field { name, value });
        }
    }
    Ok(headers)
}

/// The name of a header that filters may change.
fn modified(field: &str, name: &str) -> Result<String, Rejection> {
    header_name(field, name)?;
    if is_reserved(name) {
        Err(unsupported(field, name, "a header that filters may change"))
    } else {
        Ok(name.to_owned())
    }
}

/// A share, which is all by default.
pub(crate) fn share(
    percent: Option<u32>,
    fraction: Option<&spec::Fraction>,
    at: &str,
) -> Result<Share, Rejection> {
    let (numerator, denominator) = match (percent, fraction) {
        (None, None) => (100, 100),
        (Some(percent), None) => (percent, 100),
        (None, Some(fraction)) => (fraction.numerator, fraction.denominator.unwrap_or(100)),
        (Some(_), Some(_)) => return Err(unsupported(at, "", "one of percent and fraction")),
    };
    if denominator == 0 || numerator > denominator {
        let share = format!("{numerator}/{denominator}");
        return Err(unsupported(at, &share, "a share of at most 1"));
    }
    Ok(Share {
        numerator,
        denominator,
    })
}

fn redirect(spec: spec::Redirect, at: &str, context: &Context<'_>) -> Result<Redirect, Rejection> {
    let scheme = spec.scheme.unwrap_or_default();
    if !matches!(&*scheme, "" | "http" | "https") {
        return refuse(at, "scheme", &scheme, "http or https");
    }
    let status = spec.status_code.unwrap_or(302);
    if !matches!(status, 301 | 302 | 303 | 307 | 308) {
        return refuse(at, "statusCode", status, "301, 302, 303, 307 or 308");
    }
    Ok(Redirect {
        scheme,
        hostname: hostname(&spec.hostname, at)?,
        path: path_modifier(spec.path, &format!("{at}.path"), context)?,
        port: spec.port.unwrap_or_default().into(),
        status,
    })
}

fn path_modifier(
    spec: Option<spec::PathModifier>,
    at: &str,
    context: &Context<'_>,
) -> Result<Option<PathModifier>, Rejection> {
    let Some(spec) = spec else {
        return Ok(None);
    };
    let path = |value: Option<String>, name: &str| {
        let (value, field) = required(at, name, value)?;
        let is_absolute = value.is_empty() || value.starts_with('/');
        let is_bounded = value.len() <= MAX_PATH_BYTES;
        if is_absolute && is_bounded && matches::is_path_text(&value) {
            Ok(value)
        } else {
            Err(unsupported(&field, &value, "a path that begins with \"/\""))
        }
    };
    let kind = match &*spec.kind {
        "ReplaceFullPath" => {
            let mut full = path(spec.replace_full_path, "replaceFullPath")?;
            if full.is_empty() {
                full.push('/');
            }
            path_modifier::Kind::Full(full)
        }
        "ReplacePrefixMatch" => {
            let prefix = path(spec.replace_prefix_match, "replacePrefixMatch")?;
            let is_prefix =
                |one: &Arc<Match>| matches!(one.path(), Some(path_match::Kind::Prefix(_)));
            match context.matches {
                [one] if is_prefix(one) => path_modifier::Kind::Prefix(prefix),
                _ => {
                    let expected =
                        "possible: the rule needs exactly one match, with the path type PathPrefix";
                    return Err(unsupported(at, &spec.kind, expected));
                }
            }
        }
        kind => return refuse(at, "type", kind, "a type of path modifier"),
    };
    Ok(Some(PathModifier { kind: Some(kind) }))
}

fn cors(spec: spec::Cors, at: &str) -> Result<Cors, Rejection> {
    let list = |name: &str, values: &[String], is_valid: fn(&str) -> bool| {
        let field = format!("{at}.{name}");
        bounded(&field, values, MAX_CORS_ITEMS)?;
        match values
            .iter()
            .find(|value| *value != "*" && !is_valid(value))
        {
            Some(value) => Err(unsupported(&field, value, "valid")),
            None if values.len() > 1 && values.iter().any(|value| value == "*") => {
                Err(unsupported(&field, "*", "the only entry"))
            }
            None => Ok(()),
        }
    };
    list("allowOrigins", &spec.allow_origins, is_origin)?;
    list("allowMethods", &spec.allow_methods, is_token)?;
    list("allowHeaders", &spec.allow_headers, is_token)?;
    list("exposeHeaders", &spec.expose_headers, is_token)?;
    Ok(Cors {
        allow_origins: spec.allow_origins,
        allow_credentials: spec.allow_credentials,
        allow_methods: spec.allow_methods,
        allow_headers: spec.allow_headers,
        expose_headers: spec.expose_headers,
        max_age: spec.max_age.unwrap_or(DEFAULT_CORS_MAX_AGE),
    })
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

fn hostname(hostname: &Option<String>, at: &str) -> Result<String, Rejection> {
    match hostname.as_deref().filter(|hostname| !hostname.is_empty()) {
        None => Ok(String::new()),
        Some(hostname) if is_hostname(hostname) => Ok(hostname.to_owned()),
        Some(hostname) => refuse(at, "hostname", hostname, "a host name"),
    }
}

/// A DNS label in lower case (RFC 1123), of any length.
pub(crate) fn is_label(label: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let has_edges = !label.starts_with('-') && !label.ends_with('-');
    !label.is_empty() && has_edges && label.bytes().all(is_valid)
}

/// A name of DNS labels in lower case.
pub(crate) fn is_hostname(name: &str) -> bool {
    name.len() <= MAX_HOSTNAME_BYTES && name.split('.').all(is_label)
}

/// A token of RFC 9110, such as the name of a header.
pub(super) fn is_token(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (1..=MAX_HEADER_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_valid)
}
