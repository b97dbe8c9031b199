//! Filters of routes. Pure. Their values are checked as proxies check them.

use std::collections::HashSet;
use std::mem::discriminant;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::header_modifier::Field;
use diy_mesh_proto::mesh::v1::route_filter::Kind as FilterKind;
use diy_mesh_proto::mesh::v1::{
    Cors, HeaderModifier, Mirror, PathModifier, Redirect, RouteFilter, Share, UrlRewrite,
    path_match, path_modifier,
};
use diy_mesh_proto::policy::check_share;
use diy_mesh_proto::route::check_filter;

use super::model::{ExternalAuth, Match, Reference};
use super::parse::{MAX_ITEMS, reference};
use super::{INCOMPATIBLE_FILTERS, external, spec};
use crate::object::rejection::{bounded, refuse, unsupported, violates};
use crate::object::{Kind, Meta, Rejection};

/// The default of the specification, in seconds.
const DEFAULT_CORS_MAX_AGE: u32 = 5;
/// The rule of a filter.
pub(super) struct Context<'a> {
    pub meta: &'a Meta,
    pub matches: &'a [Arc<Match>],
}

/// Parts of filters and backends that are not in their messages.
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
            let filter = external::parse(spec.external_auth.as_deref(), &at, context, found)?;
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
    let mut filter = match &*spec.kind {
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
                hostname: spec.hostname.unwrap_or_default(),
                path: path_modifier(spec.path, &format!("{at}.path"), context)?,
            })
        }
        "CORS" if !is_grpc => {
            let (spec, _) = required(at, "cors", spec.cors)?;
            FilterKind::Cors(Cors {
                allow_origins: spec.allow_origins,
                allow_credentials: spec.allow_credentials,
                allow_methods: spec.allow_methods,
                allow_headers: spec.allow_headers,
                expose_headers: spec.expose_headers,
                max_age: spec.max_age.unwrap_or(DEFAULT_CORS_MAX_AGE),
            })
        }
        kind => {
            let expected = format!("a type of filter of {}", context.meta.kind);
            return refuse(at, "type", kind, &expected);
        }
    };
    check_filter(&filter).map_err(|violation| violates(at, &violation))?;
    if let FilterKind::RequestHeaders(one) | FilterKind::ResponseHeaders(one) = &mut filter {
        keep_first(&mut one.set);
        keep_first(&mut one.add);
    }
    Ok(filter)
}

/// The value of a field, and its path.
fn required<T>(at: &str, name: &str, value: Option<T>) -> Result<(T, String), Rejection> {
    let field = format!("{at}.{name}");
    let value = value.ok_or_else(|| unsupported(&field, "", "set"))?;
    Ok((value, field))
}

fn header_modifier(spec: HeaderModifier, at: &str) -> Result<HeaderModifier, Rejection> {
    bounded(&format!("{at}.set"), &spec.set, MAX_ITEMS)?;
    bounded(&format!("{at}.add"), &spec.add, MAX_ITEMS)?;
    bounded(&format!("{at}.remove"), &spec.remove, MAX_ITEMS)?;
    Ok(spec)
}

/// Keeps the first of several fields with one name.
fn keep_first(fields: &mut Vec<Field>) {
    let mut names = HashSet::new();
    fields.retain(|field| names.insert(field.name.to_ascii_lowercase()));
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
    let share = Share {
        numerator,
        denominator,
    };
    check_share("", Some(share)).map_err(|violation| violates(at, &violation))?;
    Ok(share)
}

fn redirect(spec: spec::Redirect, at: &str, context: &Context<'_>) -> Result<Redirect, Rejection> {
    Ok(Redirect {
        scheme: spec.scheme.unwrap_or_default(),
        hostname: spec.hostname.unwrap_or_default(),
        path: path_modifier(spec.path, &format!("{at}.path"), context)?,
        port: spec.port.unwrap_or_default().into(),
        status: spec.status_code.unwrap_or(302),
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
    let kind = match &*spec.kind {
        "ReplaceFullPath" => {
            let (mut full, _) = required(at, "replaceFullPath", spec.replace_full_path)?;
            if full.is_empty() {
                full.push('/');
            }
            path_modifier::Kind::Full(full)
        }
        "ReplacePrefixMatch" => {
            let (prefix, _) = required(at, "replacePrefixMatch", spec.replace_prefix_match)?;
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
