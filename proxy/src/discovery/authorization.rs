//! Conversion of the policies of the own pod from the controller's message. What this proxy cannot
//! apply completely denies. Pure.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::authorization_policy::Action;
use proto::path_match::Kind;

use super::routes::{MAX_MATCHES, MAX_PATTERNS, parse_matches};
use crate::inbound::external::{Authorizer, RouteAuthorizers, folded_match};
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
    let parse = |matches| parse_matches(matches, rules.len(), &mut { MAX_PATTERNS });
    let folded: Vec<_> = matches.iter().cloned().map(fold).collect();
    let folded = (folded != *matches).then(|| parse(folded)).transpose()?;
    let matches = parse(matches.clone())?;
    let rules = rules.iter().map(|rule| {
        let authorizer = rule.authorizer.as_ref();
        authorizer.map(|authorizer| Arc::new(Authorizer::new(&rule.name, authorizer)))
    });
    Ok(RouteAuthorizers {
        matches,
        folded,
        rules: rules.collect(),
    })
}

/// A match whose path is folded. Expressions stay.
fn fold(mut one: proto::RouteMatch) -> proto::RouteMatch {
    let kind = one.path.as_mut().and_then(|path| path.kind.as_mut());
    if let Some(Kind::Exact(path) | Kind::Prefix(path)) = kind {
        *path = folded_match(path);
    }
    one
}
