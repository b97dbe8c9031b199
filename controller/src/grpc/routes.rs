//! Conversion of routes to messages. Pure.

use diy_mesh_proto::mesh::v1 as proto;
use proto::{field_match, path_match, route_filter};

use crate::routes::attach::Table;
use crate::routes::model::{Backend, Filter, Match, PathMatch, Rule, ValueMatch};

/// The routes of a destination.
pub(super) fn routes(table: &Table) -> proto::Routes {
    let matches = table.matches.iter();
    proto::Routes {
        matches: matches.map(|(rule, one)| route_match(*rule, one)).collect(),
        rules: table.rules.iter().map(|one| rule(one)).collect(),
        grpc: table.grpc,
        tcp: table.tcp.as_ref().map(|one| rule(one)),
        faults: table.faults().to_vec(),
    }
}

/// A match of the rule at this index.
pub(crate) fn route_match(rule: u32, one: &Match) -> proto::RouteMatch {
    let path = one.path.clone().map(|path| proto::PathMatch {
        kind: Some(match path {
            PathMatch::Exact(path) => path_match::Kind::Exact(path),
            PathMatch::Prefix(path) => path_match::Kind::Prefix(path),
            PathMatch::Regex(pattern) => path_match::Kind::Regex(pattern),
        }),
    });
    proto::RouteMatch {
        rule,
        path,
        headers: one.headers.iter().map(field).collect(),
        query: one.query.iter().map(field).collect(),
        method: one.method.clone(),
    }
}

fn field((name, value): &(String, ValueMatch)) -> proto::FieldMatch {
    proto::FieldMatch {
        name: name.clone(),
        kind: Some(match value.clone() {
            ValueMatch::Exact(value) => field_match::Kind::Exact(value),
            ValueMatch::Regex(pattern) => field_match::Kind::Regex(pattern),
        }),
    }
}

fn rule(rule: &Rule<String>) -> proto::RouteRule {
    proto::RouteRule {
        name: rule.name.clone(),
        backends: rule.backends.iter().map(backend).collect(),
        filters: rule.filters.iter().map(filter).collect(),
        request_timeout: rule.request_timeout.unwrap_or_default(),
        backend_request_timeout: rule.backend_request_timeout.unwrap_or_default(),
        retry: rule.retry.clone(),
        to_destination: rule.to_destination,
        invalid: rule.is_invalid,
        session_persistence: rule.session.clone(),
    }
}

fn backend(backend: &Backend<String>) -> proto::RouteBackend {
    proto::RouteBackend {
        name: backend.target.clone(),
        weight: backend.weight,
        filters: backend.filters.iter().map(filter).collect(),
    }
}

fn filter(filter: &Filter<String>) -> proto::RouteFilter {
    use route_filter::Kind;
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaders((**modifier).clone()),
        Filter::ResponseHeaders(modifier) => Kind::ResponseHeaders((**modifier).clone()),
        Filter::Redirect(redirect) => Kind::Redirect(redirect.clone()),
        Filter::Rewrite(rewrite) => Kind::Rewrite(rewrite.clone()),
        Filter::Mirror {
            target,
            numerator,
            denominator,
        } => Kind::Mirror(proto::Mirror {
            backend: target.clone(),
            numerator: *numerator,
            denominator: *denominator,
        }),
        Filter::Cors(cors) => Kind::Cors((**cors).clone()),
    };
    proto::RouteFilter { kind: Some(kind) }
}
