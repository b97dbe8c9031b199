//! Conversion of routes to messages. Pure.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::route_filter::Kind;

use crate::routes::attach::Table;
use crate::routes::model::{Backend, Filter, Match, Rule};

/// The routes of a destination.
pub(super) fn routes(table: &Table) -> proto::Routes {
    let matches = table.matches.iter();
    proto::Routes {
        matches: matches.map(route_match).collect(),
        rules: table.rules.iter().map(|one| rule(one)).collect(),
        grpc: table.grpc,
        tcp: table.tcp.as_ref().map(|one| rule(one)),
        faults: table.faults().to_vec(),
    }
}

/// A match of the rule at its index.
fn route_match((rule, one): &(u32, Arc<Match>)) -> proto::RouteMatch {
    proto::RouteMatch {
        rule: *rule,
        ..one.message.clone()
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
    let mut message = (*filter.message).clone();
    if let (Some(Kind::Mirror(mirror)), Some(name)) = (&mut message.kind, &filter.mirror) {
        mirror.backend.clone_from(name);
    }
    message
}
