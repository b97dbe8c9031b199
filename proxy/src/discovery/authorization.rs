//! Conversion of the policies of the own pod from the controller's message. A policy that this
//! proxy cannot apply completely denies calls. Pure.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::authorization_policy::Action;

use super::routes::{MAX_MATCHES, MAX_PATTERNS, compile_matches};
use crate::inbound::external::{Authorizer, RouteAuthorizers, folded_match};
use crate::inbound::policy::Policies;
use crate::route::matching::{Match, Matches, PathMatch};

/// Compiles policies for a pod with this setting.
pub(super) fn compile(message: &proto::Authorization, plain_paths: bool) -> Policies {
    let mut message = proto::Authorization {
        plain_paths: message.plain_paths || plain_paths,
        ..message.clone()
    };
    let policies = message.policies.iter_mut();
    let routes: Vec<_> = policies.map(routes).collect();
    Policies::compile(&message, routes)
}

/// The routes of a policy. One with routes that are invalid becomes one of an unknown action.
fn routes(policy: &mut proto::AuthorizationPolicy) -> Option<RouteAuthorizers> {
    match parse(policy.routes.as_ref()?) {
        Ok(routes) => Some(routes),
        Err(reason) => {
            tracing::warn!("{} denies all calls at its ports: {reason}", policy.name);
            policy.action = Action::Unspecified.into();
            None
        }
    }
}

fn parse(message: &proto::RouteAuthorization) -> Result<RouteAuthorizers, String> {
    let (matches, rules) = (&message.matches, &message.rules);
    if matches.len() > MAX_MATCHES {
        return Err(format!("more than {MAX_MATCHES} matches"));
    }
    let matches = compile_matches(matches, rules.len(), &mut { MAX_PATTERNS })?;
    let mut folded = matches.clone();
    let changed = folded.iter_mut().filter_map(|one| fold(one).then_some(()));
    let folded = (changed.count() > 0).then(|| Matches::new(folded));
    let rules = rules.iter().map(|rule| {
        let authorizer = rule.authorizer.as_ref();
        authorizer.map(|authorizer| Arc::new(Authorizer::new(&rule.name, authorizer)))
    });
    Ok(RouteAuthorizers {
        matches: Matches::new(matches),
        folded,
        rules: rules.collect(),
    })
}

/// Folds the path of a match. Expressions stay. Returns whether it changes.
fn fold(one: &mut Match) -> bool {
    let Some(PathMatch::Exact(path) | PathMatch::Prefix(path)) = &mut one.path else {
        return false;
    };
    let folded = folded_match(path);
    let is_changed = folded != *path;
    *path = folded;
    is_changed
}
