//! AuthorizationPolicies about calls by pods to outside of the cluster, from their JSON. Pure.

use std::collections::BTreeSet;

use anyhow::{Context, Result, anyhow, bail};
use diy_mesh_proto::{
    authorization::{REVISION, check_egress},
    mesh::v1::{
        AuthorizationPolicy, AuthorizationRule, AuthorizationSource, AuthorizationSources,
        authorization_policy::Action, authorization_source::Kind,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;
use serde_json::Value;

use crate::files;

/// A policy that is enforced.
#[derive(Debug)]
pub struct Outbound {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The pods.
    pub targets: Vec<Target>,
    /// ALLOW or DENY, and what its rules say.
    pub message: AuthorizationPolicy,
}

/// Pods of the namespace or, in the namespace of the mesh, by their labels of all namespaces.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind")]
pub enum Target {
    /// By their labels.
    Pod {
        /// The labels.
        selector: LabelSelector,
    },
    /// That a Service selects.
    Service {
        /// Its name.
        name: String,
    },
    /// That run under a service account.
    ServiceAccount {
        /// Its name.
        name: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    target_refs: Vec<Target>,
    action: Option<String>,
    scope: Option<String>,
    default_action: Option<String>,
    #[serde(default)]
    rules: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    destinations: Option<Vec<Destination>>,
    network_attributes: Option<NetworkAttributes>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
enum Destination {
    Host {
        host: String,
    },
    #[serde(rename_all = "camelCase")]
    IPBlock {
        ip_block: String,
    },
}

#[derive(Debug, Deserialize)]
struct NetworkAttributes {
    ports: Vec<u32>,
}

/// Reads a policy. `None`: it is about calls to pods, or refuses nothing.
pub fn read(object: &Value) -> Result<Option<Outbound>> {
    let (namespace, spec) = (files::namespace(object).to_owned(), &object["spec"]);
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let title = format!("AuthorizationPolicy {namespace}/{name}");
    match spec.get("direction").map(Value::as_str) {
        None | Some(Some("Inbound")) => return Ok(None),
        Some(Some("Outbound")) => {}
        _ => {
            bail!(
                "{title}: spec.direction: {} is not Inbound or Outbound",
                spec["direction"]
            )
        }
    }
    if spec["mode"] == "Audit" || spec["defaultAction"] == "ALLOW" {
        return Ok(None);
    }
    let spec = Spec::deserialize(spec).with_context(|| format!("{title}: spec"))?;
    let (message, targets) = message(title.clone(), spec).context(title)?;
    Ok(Some(Outbound {
        namespace,
        name: name.to_owned(),
        targets,
        message,
    }))
}

/// A default that denies is one that allows nothing, because other policies allow more.
fn message(name: String, spec: Spec) -> Result<(AuthorizationPolicy, Vec<Target>)> {
    let action = match (spec.action.as_deref(), spec.default_action.as_deref()) {
        (Some("ALLOW"), None) | (None, Some("DENY")) => Action::Allow,
        (Some("DENY"), None) => Action::Deny,
        _ => bail!("spec: expected action, ALLOW or DENY, or defaultAction"),
    };
    let rules: Vec<AuthorizationRule> = spec.rules.into_iter().map(rule).collect();
    let ports = rules.iter().flat_map(|rule| rule.ports.iter().copied());
    let ports: BTreeSet<u32> = match spec.scope.as_deref() {
        None | Some("Workload") => BTreeSet::new(),
        Some("Ports") if rules.iter().all(|rule| !rule.ports.is_empty()) => ports.collect(),
        _ => bail!("spec.scope: expected Workload, or Ports with ports in each rule"),
    };
    let message = AuthorizationPolicy {
        name,
        action: action.into(),
        ports: ports.into_iter().collect(),
        rules,
        ..AuthorizationPolicy::default()
    };
    check_egress(&message).map_err(|violation| anyhow!("spec.{violation}"))?;
    Ok((message, spec.target_refs))
}

fn rule(rule: Rule) -> AuthorizationRule {
    let source = |destination| AuthorizationSource {
        kind: Some(match destination {
            Destination::Host { host } => Kind::Host(host),
            Destination::IPBlock { ip_block } => Kind::IpBlock(ip_block),
        }),
    };
    let sources = rule.destinations.map(|list| AuthorizationSources {
        sources: list.into_iter().map(source).collect(),
    });
    AuthorizationRule {
        revision: REVISION,
        sources,
        ports: rule
            .network_attributes
            .map_or(vec![], |attributes| attributes.ports),
        ..AuthorizationRule::default()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn policy(namespace: &str, name: &str, spec: Value) -> Value {
        let mut policy = json!({"kind": "AuthorizationPolicy",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"direction": "Outbound", "targetRefs": [{"kind": "Pod", "selector": {}}]}});
        let fields = spec.as_object().unwrap().clone();
        policy["spec"].as_object_mut().unwrap().extend(fields);
        policy
    }

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
    fn invalid_fields_are_named() {
        let rules = |rule: Value| json!({"action": "ALLOW", "rules": [rule]});
        for (spec, expected) in [
            (
                json!({"direction": "out"}),
                "spec.direction: \"out\" is not Inbound or Outbound",
            ),
            (
                json!({}),
                "spec: expected action, ALLOW or DENY, or defaultAction",
            ),
            (
                json!({"action": "ALLOW", "scope": "All"}),
                "spec.scope: expected Workload",
            ),
            (
                json!({"action": "ALLOW", "targetRefs": [{"kind": "Node"}]}),
                "unknown variant `Node`",
            ),
            (rules(json!({"sources": []})), "unknown field `sources`"),
            (
                rules(json!({"destinations": [{"type": "Name"}]})),
                "unknown variant `Name`, expected `Host` or `IPBlock`",
            ),
            (
                rules(json!({"destinations": [{"type": "Host", "host": "a:1"}]})),
                "spec.rules.hosts: \"a:1\" is not a name",
            ),
            (
                rules(json!({"destinations": [{"type": "IPBlock", "ipBlock": "10.0.0.1/8"}]})),
                "spec.rules.sources.ipBlock: \"10.0.0.1/8\" is not",
            ),
            (
                rules(json!({"networkAttributes": {"ports": [0]}})),
                "spec.rules.ports: \"0\" is not",
            ),
        ] {
            let error = read(&policy("shop", "p", spec)).unwrap_err();
            let error = format!("{error:#}");
            let is_told =
                error.starts_with("AuthorizationPolicy shop/p: spec") && error.contains(expected);
            assert!(is_told, "{error}");
        }
    }
}
