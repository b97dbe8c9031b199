//! Policies for a call with unknown parts. Conditions on unknown parts are replaced by conditions
//! that hold, or that do not. Pure.

use diy_mesh_proto::authorization::edge;
use diy_mesh_proto::mesh::v1::{
    Authorization, AuthorizationRule, AuthorizationSource, AuthorizedPath, IdentityMatch,
    RequestMatch, RouteAuthorization, RouteMatch, Unauthenticated, authorization_policy::Action,
    authorization_source::Kind, authorized_path::Kind as PathKind, path_match::Kind as RoutePath,
};

use super::{Call, Claims, Head, Path};

/// The path of a request whose path is not known.
pub(super) const SOME_PATH: &[u8] = b"/";
/// Another path.
const OTHER_PATH: &str = "/-/-";

/// The policies, with what is not known of the call assumed so that they allow it, or deny it.
pub(super) fn assume(message: &Authorization, call: &Call, is_allowed: bool) -> Authorization {
    let mut assumed = message.clone();
    for policy in &mut assumed.policies {
        let matches = (policy.action() == Action::Allow) == is_allowed;
        let mut routes = policy.routes.iter();
        if !matches && call.request.is_some() && routes.any(|routes| !asks_always(routes)) {
            // It selects a rule that asks no server.
            policy.rules.clear();
        }
        for rule in &mut policy.rules {
            if call.address.is_none() {
                assume_address(rule, matches);
            }
            if let Some(head) = &call.request {
                let requests = rule.requests.iter_mut();
                requests.for_each(|request| assume_request(request, head, matches));
            }
        }
    }
    assumed
}

/// Whether each rule that a request may select asks a server, and each request selects one.
fn asks_always(routes: &RouteAuthorization) -> bool {
    let is_for_all = |one: &RouteMatch| {
        let path = one.path.as_ref().and_then(|path| path.kind.as_ref());
        let is_any = path.is_none_or(|path| *path == RoutePath::Prefix("/".to_owned()));
        let others = [&one.headers, &one.query];
        is_any && others.iter().all(|fields| fields.is_empty()) && one.method.is_empty()
    };
    let asks = |one: &RouteMatch| {
        let rule = routes.rules.get(one.rule as usize);
        rule.is_some_and(|rule| rule.authorizer.is_some())
    };
    routes.matches.iter().all(asks) && routes.matches.iter().any(is_for_all)
}

fn assume_address(rule: &mut AuthorizationRule, matches: bool) {
    let is_block = |source: &AuthorizationSource| matches!(source.kind, Some(Kind::IpBlock(_)));
    let sources = rule.sources.as_mut();
    if let Some(list) = sources.filter(|list| list.sources.iter().any(is_block)) {
        list.sources.retain(|source| !is_block(source));
        if matches {
            list.sources.extend(everyone());
        }
    }
    let has_block = rule.not_sources.iter().any(is_block);
    rule.not_sources.retain(|source| !is_block(source));
    if has_block && !matches {
        rule.not_sources.extend(everyone());
    }
}

/// Sources that include each client.
fn everyone() -> [AuthorizationSource; 2] {
    let kinds = [
        Kind::Identity(IdentityMatch::default()),
        Kind::Unauthenticated(Unauthenticated {}),
    ];
    kinds.map(|kind| AuthorizationSource { kind: Some(kind) })
}

fn assume_request(request: &mut RequestMatch, head: &Head, matches: bool) {
    // Otherwise, no host and no field matches.
    if head.host.is_none() && matches {
        request.hosts.clear();
    }
    if head.fields.is_none() && matches {
        request.headers.clear();
    }
    if head.token == Claims::Unknown && matches {
        request.claims.clear();
    }
    let is_other = |name: &str| edge::method(name.as_bytes()) == edge::OTHER_METHOD;
    if matches && is_other(&head.method) && request.methods.iter().any(|name| is_other(name)) {
        request.methods.clear();
    }
    let known = match &head.path {
        Path::Known(_) => return,
        _ if request.paths.is_empty() => return,
        Path::Like(pattern) => truth(&request.paths, pattern),
        Path::Unknown => None,
    };
    request.paths.clear();
    if !known.unwrap_or(matches) {
        let kind = Some(PathKind::Exact(OTHER_PATH.to_owned()));
        request.paths.push(AuthorizedPath { kind });
    }
}

/// Whether the paths that match `seen` match one of `patterns`. `None`: only some do, perhaps.
fn truth(patterns: &[AuthorizedPath], seen: &AuthorizedPath) -> Option<bool> {
    let seen_shape = Shape::of(seen);
    let shapes = || patterns.iter().map(Shape::of);
    if patterns.contains(seen) || shapes().any(|shape| shape.contains(&seen_shape)) {
        return Some(true);
    }
    let may_match = shapes().any(|shape| shape.intersects(&seen_shape));
    (!may_match).then_some(false)
}

/// A pattern by its elements. `None` is any element.
struct Shape<'a> {
    elements: Vec<Option<&'a str>>,
    has_rest: bool,
    /// There are further conditions.
    is_partial: bool,
}

impl<'a> Shape<'a> {
    fn of(path: &'a AuthorizedPath) -> Self {
        let (text, has_rest, is_partial) = match &path.kind {
            Some(PathKind::Exact(path)) => (&**path, false, path.ends_with('/')),
            Some(PathKind::Prefix(prefix)) => (&**prefix, true, false),
            Some(PathKind::Template(template)) => match template.strip_suffix("/{**}") {
                Some(start) => (start, true, false),
                None => (&**template, false, template.ends_with('/')),
            },
            Some(PathKind::Suffix(_)) | None => ("", true, true),
        };
        let elements = text.trim_end_matches('/').split('/').skip(1);
        let is_template = matches!(path.kind, Some(PathKind::Template(_)));
        let element = |element| Some(element).filter(|one| !is_template || *one != "{*}");
        Self {
            elements: elements.map(element).collect(),
            has_rest,
            is_partial,
        }
    }

    /// Whether all paths of the other shape have this one.
    fn contains(&self, other: &Self) -> bool {
        let has_length = if self.has_rest {
            other.elements.len() >= self.elements.len()
        } else {
            !other.has_rest && other.elements.len() == self.elements.len()
        };
        let mut pairs = self.elements.iter().zip(&other.elements);
        has_length && !self.is_partial && pairs.all(|(one, other)| one.is_none() || one == other)
    }

    /// Whether a path may have both shapes. Servers may ignore case, and slashes at the end.
    fn intersects(&self, other: &Self) -> bool {
        let lengths = [self, other].map(|shape| shape.elements.len());
        let is_length = (self.has_rest || lengths[0] >= lengths[1])
            && (other.has_rest || lengths[1] >= lengths[0]);
        let is_same = |(one, other): (&Option<&str>, &Option<&str>)| match (one, other) {
            (Some(one), Some(other)) => one.eq_ignore_ascii_case(other),
            _ => true,
        };
        is_length && self.elements.iter().zip(&other.elements).all(is_same)
    }
}
