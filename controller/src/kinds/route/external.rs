//! The filter ExternalAuth of HTTPRoutes (GEP-1494): what it says, where it cannot apply, and what
//! the pods of the parent are told, which enforce it, whatever their clients do. Pure.
//!
//! The called pods select the rule of a request once more, by what they get. So a rule with the
//! filter must neither change what matches read, nor send its requests to pods with other routes.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use diy_mesh_proto::authorization::{REVISION, asking_action, check};
use diy_mesh_proto::mesh::v1 as proto;
use proto::route_authorization;
use proto::route_filter::Kind as FilterKind;
use serde_json::value::RawValue;

use super::filters::{Context, Found};
use super::model::{ExternalAuth, Match, Reference, Route, Rule};
use super::parse::reference;
use super::{INCOMPATIBLE_FILTERS, spec};
use crate::kinds::Service;
use crate::kinds::authorization::Rules;
use crate::kinds::authorization::parse::authorizer::{DEFAULT_TIMEOUT, protocol};
use crate::kinds::authorization::parse::rejected;
use crate::kinds::authorization::server::Server;
use crate::kinds::service::ServicePort;
use crate::object::Rejection;
use crate::object::fields::read_known;
use crate::object::rejection::unsupported;

/// Parses the filter in the field `at`.
pub(super) fn parse(
    spec: Option<&RawValue>,
    at: &str,
    context: &Context<'_>,
    found: &mut Found,
) -> Result<ExternalAuth, Rejection> {
    let field = format!("{at}.externalAuth");
    let spec = spec.ok_or_else(|| unsupported(&field, "", "set"))?;
    let spec::ExternalAuth {
        protocol: name,
        backend_ref,
        mut grpc,
        mut http,
        forward_body,
    } = read_known(spec.get(), &field)?;
    // Unlike the lists of policies, these lists may be empty.
    let of_grpc = grpc.iter_mut();
    let of_grpc =
        of_grpc.flat_map(|one| [&mut one.allowed_headers, &mut one.allowed_response_headers]);
    let of_http = http.iter_mut();
    let of_http =
        of_http.flat_map(|one| [&mut one.allowed_headers, &mut one.allowed_response_headers]);
    for list in of_grpc.chain(of_http) {
        list.take_if(|list| list.is_empty());
    }
    let authorizer = proto::Authorizer {
        timeout: DEFAULT_TIMEOUT,
        max_body: forward_body.unwrap_or_default().max_size,
        ..protocol(&field, &name, grpc, http)?
    };
    check_settings(&authorizer, &field)?;
    let reference = reference(
        backend_ref,
        &context.meta.key,
        format!("{field}.backendRef"),
    );
    let server = server(&reference);
    found.references.push(reference);
    Ok(ExternalAuth {
        field: at.to_owned(),
        server,
        authorizer,
    })
}

/// Checks the settings of a server in the same way as the settings of a policy.
fn check_settings(authorizer: &proto::Authorizer, field: &str) -> Result<(), Rejection> {
    let policy = proto::AuthorizationPolicy {
        action: asking_action([authorizer]).into(),
        authorizer: Some(proto::Authorizer {
            // The catalog has it, or not.
            backend: field.to_owned(),
            ..authorizer.clone()
        }),
        ..proto::AuthorizationPolicy::default()
    };
    check(&policy).map_err(|violation| rejected(field, "externalAuth.", &violation))
}

/// The server of a reference to a port of a Service.
fn server(reference: &Reference) -> Option<Server> {
    let port = reference.port.filter(|_| reference.other_kind.is_none())?;
    Some(Server {
        service: reference.key.clone(),
        port,
    })
}

/// A Service, and what the routes at some of its ports read.
pub(super) struct Place<'a> {
    service: &'a Service,
    /// The names of the headers in lower case.
    headers: HashSet<&'a str>,
}

impl<'a> Place<'a> {
    /// The place of these matches.
    pub(super) fn new(service: &'a Service, matches: &'a [(u32, Arc<Match>)]) -> Place<'a> {
        let headers = matches.iter().flat_map(|(_, one)| &one.message.headers);
        Place {
            service,
            headers: headers.map(|header| &*header.name).collect(),
        }
    }

    /// Why a rule of a route cannot have the filter here.
    fn problem(&self, route: &Route, rule: &Rule, filter: &ExternalAuth) -> Option<String> {
        let key = &self.service.key;
        let server = filter.server.as_ref();
        if route.key.namespace != key.namespace {
            let namespace = &key.namespace;
            return Some(format!(
                "the pods of {key} treat all clients alike, which requires a route of namespace \
                 {namespace}"
            ));
        }
        if self.service.selector.is_empty() {
            return Some(format!(
                "{key} has no selector, by which its pods are known"
            ));
        }
        if server.is_some_and(|server| self.is_here(route, &server.to_string())) {
            return Some(format!(
                "the authorization server is the parent {key} itself"
            ));
        }
        let mut backends = rule.shared.backends.iter();
        if let Some(other) = backends.find(|backend| !self.is_here(route, &backend.name)) {
            let name = match (&*other.name, &other.external) {
                ("", Some(external)) => &external.name,
                ("", None) => "an invalid backend",
                (name, _) => name,
            };
            return Some(format!(
                "the rule sends requests to {name}, whose pods do not have the filter: expected \
                 {key} and a port to which the route applies"
            ));
        }
        let header = self.changed_header(rule, filter)?;
        Some(format!(
            "the rule or its server changes the header {header}, which a match of the routes of \
             {key} reads: the called pods match what they get"
        ))
    }

    /// Whether a route applies to a port of the Service.
    fn has(&self, route: &Route, port: &ServicePort) -> bool {
        let mut parents = route.parents.iter();
        parents.any(|parent| parent.key(&route.key) == self.service.key && parent.selects(port))
    }

    /// Whether a backend is a port of the Service to which the route applies.
    fn is_here(&self, route: &Route, backend: &str) -> bool {
        let number = backend.rsplit_once(':').filter(|(service, _)| {
            let key = &self.service.key;
            service.split_once('/') == Some((&*key.namespace, &*key.name))
        });
        let number = number.and_then(|(_, number)| number.parse::<u16>().ok());
        let port = number.and_then(|number| self.service.tcp_port(|port| port.port == number));
        port.is_some_and(|port| self.has(route, port))
    }

    /// A header that the rule or its server changes, and that a match reads.
    fn changed_header(&self, rule: &Rule, filter: &ExternalAuth) -> Option<String> {
        let of_backends = rule.shared.backends.iter();
        let of_backends = of_backends.flat_map(|backend| &backend.filters);
        let modifiers = of_backends
            .chain(&rule.shared.filters)
            .filter_map(|filter| match &filter.kind {
                Some(FilterKind::RequestHeaders(modifier)) => Some(modifier),
                _ => None,
            });
        let modified = modifiers.flat_map(|one| {
            let fields = one.set.iter().chain(&one.add).map(|field| &field.name);
            fields.chain(&one.remove)
        });
        let mut changed = modified.chain(&filter.authorizer.response_fields);
        let is_read = |name: &&String| self.headers.contains(&*name.to_ascii_lowercase());
        changed.find(is_read).cloned()
    }
}

/// The filters of rules, each with the position of its `route`. Rules whose filter cannot apply
/// fail, and no server can allow their requests. Returns why, too.
pub(super) fn check_rules<'a>(
    place: Option<Place<'_>>,
    rules: &mut [Arc<Rule>],
    filters: Vec<(usize, Option<ExternalAuth>)>,
    route: impl Fn(usize) -> &'a Route,
) -> (Vec<Option<ExternalAuth>>, Vec<(usize, Rejection)>) {
    let mut incompatible = Vec::new();
    let filters = filters.into_iter().zip(rules);
    let filters = filters.map(|((position, filter), rule)| {
        let filter = filter?;
        let place = place.as_ref().filter(|_| !rule.shared.invalid);
        let problem = place.and_then(|place| place.problem(route(position), rule, &filter));
        if let Some(problem) = problem {
            let message = format!("{}: {problem}; requests of the rule fail", filter.field);
            incompatible.push((position, Rejection::new(INCOMPATIBLE_FILTERS, message)));
            *rule = Arc::new(rule.failing());
            return Some(filter.refusing());
        }
        let server = filter.server.as_ref().map(ToString::to_string);
        let is_resolved = server.is_some_and(|server| !rule.unresolved.contains(&server));
        Some(if is_resolved {
            filter
        } else {
            filter.refusing()
        })
    });
    (filters.collect(), incompatible)
}

/// The rules for the pods of a Service port. `filters`: the filter of each rule. Returns `None` if
/// no rule has a filter.
pub(super) fn rules(
    matches: &[(u32, Arc<Match>)],
    rules: &[Arc<Rule>],
    filters: &[Option<ExternalAuth>],
) -> Option<Rules> {
    let filter_of = |rule: u32| filters.get(usize::try_from(rule).ok()?)?.as_ref();
    let last = matches
        .iter()
        .rposition(|(rule, _)| filter_of(*rule).is_some())?;
    let matches = matches[..=last]
        .iter()
        .map(|(rule, one)| proto::RouteMatch {
            rule: *rule,
            ..one.message.clone()
        });
    let of_rules = rules.iter().zip(filters).map(|(rule, filter)| {
        let filter = filter.as_ref();
        filter.map_or_else(Default::default, |filter| route_authorization::Rule {
            name: rule.shared.name.clone(),
            authorizer: Some(filter.message()),
        })
    });
    let routes = proto::RouteAuthorization {
        matches: matches.collect(),
        rules: of_rules.collect(),
    };
    let servers = routes
        .rules
        .iter()
        .filter_map(|rule| rule.authorizer.as_ref());
    let mut named = routes.rules.iter().filter(|rule| rule.authorizer.is_some());
    let message = proto::AuthorizationPolicy {
        name: named.next().map(|rule| rule.name.clone())?,
        action: asking_action(servers).into(),
        rules: vec![proto::AuthorizationRule {
            revision: REVISION,
            ..proto::AuthorizationRule::default()
        }],
        routes: Some(routes),
        ..proto::AuthorizationPolicy::default()
    };
    let servers = filters.iter().flatten();
    let servers = servers.filter_map(|filter| filter.server.clone());
    let servers: BTreeMap<_, _> = servers.map(|one| (one.to_string(), one)).collect();
    let servers = servers.into_values().collect();
    Some(Rules::with_references(message, vec![], servers))
}

impl ExternalAuth {
    /// The filter where it is not accepted, or has no valid reference.
    fn refusing(&self) -> ExternalAuth {
        ExternalAuth {
            server: None,
            ..self.clone()
        }
    }

    fn message(&self) -> proto::Authorizer {
        let server = self.server.as_ref().map(ToString::to_string);
        proto::Authorizer {
            backend: server.unwrap_or_default(),
            // A filter that could not be read has no timeout.
            timeout: self.authorizer.timeout.max(1),
            ..self.authorizer.clone()
        }
    }
}
