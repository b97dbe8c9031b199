//! AuthorizationPolicies about calls by pods to outside of the cluster, as the controller reads them.
//! Pure.

use anyhow::{Context as _, Result, bail};
use diy_mesh_controller::catalog;
use diy_mesh_controller::kinds::Object;
use diy_mesh_controller::kinds::authorization::{self, Direction, Effect, Mode};
use diy_mesh_model::identity::TRUST_DOMAIN;
use diy_mesh_proto::mesh::v1::{AuthorizationPolicy, authorization_policy::Action};
use serde_json::Value;

use crate::files;

/// A policy that is enforced.
#[derive(Debug)]
pub struct Outbound {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The pods: their label selector or, of a service account, its name.
    pub targets: Vec<Result<Value, String>>,
    /// ALLOW or DENY, and what its rules say.
    pub message: AuthorizationPolicy,
}

/// Reads a policy. `None`: it is about calls to pods, or refuses nothing.
pub fn read(object: &Value) -> Result<Option<Outbound>> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let (namespace, name) = (files::namespace(object).to_owned(), name.to_owned());
    let title = || format!("AuthorizationPolicy {namespace}/{name}");
    let parsed = catalog::parse_object(object, TRUST_DOMAIN).with_context(title)?;
    let Some(Object::Authorization(policy)) = parsed.objects.into_iter().next() else {
        return Ok(None);
    };
    if !policy.is_about(Direction::Outbound) {
        return Ok(None);
    }
    if let Some(invalid) = &policy.invalid {
        bail!("{}: {}", title(), invalid.message);
    }
    let message = match &policy.applied().effect {
        Effect::Rules(rules) if rules.mode() == Mode::Enforce => rules.message.clone(),
        // A default that denies is a policy that allows nothing, because other policies allow more.
        Effect::Default { deny: true } => AuthorizationPolicy {
            name: authorization::name(&policy.key),
            action: Action::Allow.into(),
            ..AuthorizationPolicy::default()
        },
        Effect::Rules(_) | Effect::Default { deny: false } => return Ok(None),
    };
    let references = object["spec"]["targetRefs"].as_array();
    let target = |reference: &Value| match reference["name"].as_str() {
        None => Ok(reference["selector"].clone()),
        Some(account) => Err(account.to_owned()),
    };
    Ok(Some(Outbound {
        targets: references.into_iter().flatten().map(target).collect(),
        namespace,
        name,
        message,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::egress::testing::policy;

    #[test]
    fn policies_that_refuse_nothing_outside_are_skipped() {
        for spec in [
            json!({"direction": "Inbound", "action": "ALLOW", "rules": [{"sources": []}]}),
            json!({"action": "ALLOW", "mode": "Audit"}),
            json!({"defaultAction": "ALLOW"}),
        ] {
            assert!(read(&policy("shop", "p", spec)).unwrap().is_none());
        }
        let denied = read(&policy("shop", "p", json!({"defaultAction": "DENY"})));
        let denied = denied.unwrap().expect("it closes the pods").message;
        assert_eq!((denied.action(), denied.rules), (Action::Allow, vec![]));
    }

    #[test]
    fn invalid_policies_are_named() {
        for (spec, expected) in [
            (json!({"direction": "out"}), "spec.direction"),
            (
                json!({"action": "ALLOW", "rules": [{"sources": []}]}),
                "spec.rules[0].sources",
            ),
        ] {
            let error = read(&policy("shop", "p", spec)).unwrap_err().to_string();
            let is_told =
                error.starts_with("AuthorizationPolicy shop/p: ") && error.contains(expected);
            assert!(is_told, "{error}");
        }
    }
}
