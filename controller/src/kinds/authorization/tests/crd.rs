//! The definition of AuthorizationPolicy, from the types of its fields.

use serde_json::{Value, json};

pub(crate) use crate::kinds::policy::tests::crd::{NAME as TOKEN, UpToAMinute, rule};
use crate::kinds::policy::tests::crd::{Resource, assert_installed, assert_structural};

use crate::kinds::authorization::keys::MAX_KEY_BYTES;
use crate::kinds::authorization::spec::AuthorizationPolicySpec;

/// The name of a namespace.
pub(crate) const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// The name of a service account, or `*`.
pub(crate) const NAME_OR_ALL: &str = "^([*]|[a-z0-9]([-.a-z0-9]*[a-z0-9])?)$";
pub(crate) const SPIFFE: &str =
    "^spiffe://([*]|[-._a-z0-9]+)/ns/([*]|[-a-z0-9]+)/sa/([*]|[-.a-z0-9]+)$";
pub(crate) const IP_BLOCK: &str = "^[0-9a-fA-F.:]+/[0-9]{1,3}$";
pub(crate) const HOST: &str =
    "^([*][.])?[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?([.][A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*$";
pub(crate) const METHOD: &str = "^[A-Z0-9!#$%&'*+\\-.^_\\x60|~]+$";
pub(crate) const PATH: &str = "^[^?#\\\\]+$";
/// A prefix of a path, or nothing: visible characters except `?` and `#`.
pub(crate) const PATH_PREFIX: &str = r#"^(/[!"$->@-~]*)?$"#;
pub(crate) const GRPC: &str = "^[A-Za-z0-9_.]+$";

/// The rules between the fields of a policy.
pub(crate) fn policies() -> Value {
    let all = [
        (
            "has(self.action) != has(self.defaultAction)",
            "expected action with rules, or defaultAction",
        ),
        (
            "!has(self.defaultAction) || !(has(self.rules) || has(self.mode) || \
             has(self.scope) || has(self.issuers))",
            "defaultAction excludes rules, mode, scope and issuers",
        ),
        (
            "!has(self.defaultAction) || (size(self.targetRefs) == 1 && \
             has(self.targetRefs[0].selector) && \
             !has(self.targetRefs[0].selector.matchLabels) && \
             !has(self.targetRefs[0].selector.matchExpressions))",
            "defaultAction requires the targetRefs [{kind: Pod, selector: {}}]",
        ),
        (
            "self.targetRefs.map(target, !has(target.selector) ? 0 : \
             (has(target.selector.matchLabels) ? size(target.selector.matchLabels) : 0) + \
             (has(target.selector.matchExpressions) ? target.selector.matchExpressions.map(one, \
             1 + (has(one.values) ? size(one.values) : 0)).sum() : 0)).sum() <= 256",
            "all selectors have at most 256 labels and values",
        ),
        (
            "!has(self.issuers) || (has(self.rules) && size(self.rules) > 0)",
            "issuers require rules",
        ),
        (
            "has(self.issuers) || !has(self.rules) || self.rules.all(one, \
             !has(one.requests) || one.requests.all(request, !has(request.claims)))",
            "claims require issuers",
        ),
        (
            "!has(self.scope) || (has(self.action) && self.action == 'ALLOW')",
            "scope is for ALLOW",
        ),
        (
            "!has(self.scope) || self.scope != 'Ports' || (has(self.rules) && \
             size(self.rules) > 0 && self.rules.all(one, has(one.networkAttributes)))",
            "scope Ports requires ports in each of one or more rules",
        ),
        (
            "!has(self.action) || self.action == 'ALLOW' || !has(self.rules) || \
             self.rules.all(one, !has(one.requests) || has(one.networkAttributes))",
            "a DENY or ExternalAuth about requests requires ports: it denies connections there that \
             carry no HTTP",
        ),
        (
            "has(self.externalAuth) == (has(self.action) && self.action == 'ExternalAuth')",
            "the action ExternalAuth requires externalAuth, and others exclude it",
        ),
        (
            "!has(self.externalAuth) || !has(self.mode) || self.mode == 'Enforce'",
            "ExternalAuth has no mode Audit",
        ),
        (
            "!has(self.direction) || self.direction == 'Inbound' || \
             !(has(self.issuers) || has(self.externalAuth) || \
             self.targetRefs.exists(target, target.kind == 'Service'))",
            "Outbound excludes issuers, externalAuth and targetRefs of kind Service",
        ),
        (
            "!has(self.rules) || self.rules.all(one, \
             has(self.direction) && self.direction == 'Outbound' ? \
             !(has(one.sources) || has(one.notSources) || has(one.requests)) : \
             !has(one.destinations))",
            "rules have destinations and ports with direction Outbound, or else no destinations",
        ),
        (
            "!has(self.action) || self.action != 'DENY' || !has(self.rules) || \
             self.rules.all(one, !has(one.destinations) || \
             one.destinations.all(to, !has(to.host)))",
            "a DENY by name cannot be made safe: the application may leave the name out",
        ),
    ];
    let all = all.map(|(rule, message)| json!({"rule": rule, "message": message}));
    Value::from(all.to_vec())
}

fn definition() -> Value {
    let column = |name: &str, path: &str| json!({"name": name, "type": "string", "jsonPath": path});
    let resource = Resource {
        kind: "AuthorizationPolicy",
        plural: "authorizationpolicies",
        description: "Who may call pods of a namespace, or what they may call outside of the cluster.",
        // GEP-713.
        labels: json!({"gateway.networking.k8s.io/policy": "Direct"}),
        columns: vec![
            column("Direction", ".spec.direction"),
            column("Action", ".spec.action"),
            column("Mode", ".spec.mode"),
        ],
    };
    let mut definition = resource.definition::<AuthorizationPolicySpec>();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let text = |max: usize| json!({"type": "string", "maxLength": max});
    schema["properties"]["status"]["properties"]["issuers"] = json!({
        "type": "array", "maxItems": 8, "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "object", "required": ["source"],
            "properties": {
                "source": text(2048), "keys": text(MAX_KEY_BYTES), "message": text(1024),
            },
        },
    });
    definition
}

#[test]
fn crd_of_the_manifests_is_that_of_the_types() {
    assert_installed(&definition(), "authorization");
}

#[test]
fn schema_is_structural_and_describes_every_field() {
    let count = assert_structural(&definition());
    assert!(count > 40, "{count} fields");
}
