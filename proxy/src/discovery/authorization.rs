//! Conversion of the policies of the own pod from the controller's message. What this proxy cannot
//! apply completely denies. Pure.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::authorization_policy::Action;

use super::routes::{MAX_MATCHES, MAX_PATTERNS, parse_matches};
use crate::inbound::external::{Authorizer, RouteAuthorizers};
use crate::inbound::policy::Policies;

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
    let matches = parse_matches(matches.clone(), rules.len(), &mut { MAX_PATTERNS })?;
    let rules = rules.iter().map(|rule| {
        let authorizer = rule.authorizer.as_ref();
        authorizer.map(|authorizer| Arc::new(Authorizer::new(&rule.name, authorizer)))
    });
    Ok(RouteAuthorizers::new(matches, rules.collect()))
}
