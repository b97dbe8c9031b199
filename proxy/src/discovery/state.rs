//! The known state of discovery, for the admin server: the stream, the inbound configuration, and
//! the version of each resource.

use std::collections::HashMap;

use diy_mesh_model::exchange::milliseconds;
use diy_mesh_model::state::{self, Cut};
use diy_mesh_proto::mesh::v1::Authorization;

use super::own_pod::OwnPod;
use super::{Driver, Resource};

/// The bytes of each list of names, in JSON.
const MAX_NAMES: usize = 64 << 10;

/// The known state of discovery.
#[derive(Debug, Default)]
pub struct Known {
    /// The stream.
    pub stream: state::Discovery,
    /// The configuration of the pod.
    pub inbound: state::Inbound,
    /// The version of each resource in force, and its position.
    pub versions: HashMap<Resource, (String, String)>,
}

impl Driver {
    pub(super) fn known(&self) -> Known {
        Known {
            stream: state::Discovery {
                connected: self.stream.is_some(),
                message_age_ms: self.metrics.last_message_age().map(milliseconds),
                subscriptions: self.table.len(),
                refused: self.metrics.refused.get(),
                unready: self.unready.borrow().clone(),
            },
            inbound: self.own_pod.state(),
            versions: self.table.versions().collect(),
        }
    }
}

impl OwnPod {
    fn state(&self) -> state::Inbound {
        let policy = self.policy.borrow();
        let policy = policy.as_deref().unwrap_or(&self.arguments);
        let limits = policy.rate_limits.0.iter();
        state::Inbound {
            pending: policy.pending,
            version: self.version.clone(),
            position: self.order.text(),
            strict: policy.strict,
            opaque_ports: policy.opaque_ports.to_string(),
            allow_connect: policy.allow_connect,
            zone: policy.zone.clone(),
            authorization: self.policies.authorization.as_ref().map(names),
            egress: self.policies.egress.as_ref().map(names),
            rate_limits: Cut::of(limits, &mut { MAX_NAMES }, |limit, _| {
                format!("{} per {}", limit.name, limit.scope.name())
            }),
        }
    }
}

/// The names of the policies, and not what they say.
fn names(message: &Authorization) -> Cut<String> {
    let policies = message.policies.iter();
    Cut::of(policies, &mut { MAX_NAMES }, |policy, _| {
        let audit = if policy.audit { " (audit)" } else { "" };
        format!("{}{audit}", policy.name)
    })
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1 as proto;
    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::super::own_pod::Received;
    use proto::authorization_policy::Action;

    use super::*;
    use crate::inbound::policy::Policy;

    fn policy(name: &str, action: Action, audit: bool) -> proto::AuthorizationPolicy {
        let issuer = proto::TokenIssuer {
            name: "https://issuer".into(),
            keys: "inline-keys".into(),
            ..proto::TokenIssuer::default()
        };
        proto::AuthorizationPolicy {
            name: format!("AuthorizationPolicy shop/{name}"),
            action: action.into(),
            audit,
            issuers: vec![issuer],
            ..proto::AuthorizationPolicy::default()
        }
    }

    fn received(policies: Vec<proto::AuthorizationPolicy>) -> Received {
        let component = proto::position::Component {
            kind: "Pod".into(),
            resource_version: 42,
            ..proto::position::Component::default()
        };
        let position = proto::Position {
            components: vec![component],
            ..proto::Position::default()
        };
        Received {
            workload: proto::Workload {
                inbound_mode: proto::workload::InboundMode::Strict.into(),
                authorization: Some(Authorization {
                    policies,
                    deny_by_default: true,
                    ..Authorization::default()
                }),
                ..proto::Workload::default()
            },
            version: "7".into(),
            position: Some(position).into(),
        }
    }

    #[test]
    fn inbound_configuration_names_its_policies_and_tells_no_keys() {
        let mut own = OwnPod::new(Policy::default(), watch::channel(None).0);
        assert_eq!(own.state(), state::Inbound::default());
        let policies = vec![
            policy("only-web", Action::Allow, false),
            policy("batch", Action::Deny, true),
        ];
        own.receive(received(policies), Instant::now());
        let state = own.state();
        assert_eq!(
            (state.strict, &*state.version, &*state.position),
            (true, "7", "Pod 42")
        );
        let known = state.authorization.as_ref().expect("policies");
        let expected = [
            "AuthorizationPolicy shop/only-web",
            "AuthorizationPolicy shop/batch (audit)",
        ];
        assert_eq!(known.items, expected);
        assert!(
            !serde_json::to_string(&state)
                .expect("JSON")
                .contains("inline-keys")
        );
    }

    #[test]
    fn many_policies_are_cut() {
        let mut own = OwnPod::new(Policy::default(), watch::channel(None).0);
        let name = "x".repeat(200);
        let policies = vec![policy(&name, Action::Allow, false); 1000];
        own.receive(received(policies), Instant::now());
        let policies = own.state().authorization.expect("policies");
        assert_eq!(policies.items.len() + policies.omitted, 1000);
        assert!(
            (100..400).contains(&policies.items.len()),
            "{}",
            policies.items.len()
        );
    }
}
