//! Tables of policies: what each field becomes, and what makes a policy invalid.

mod authorizer;
pub(crate) mod crd;
mod egress;
mod issuers;

use proto::authorization_source::Kind as SourceKind;
use proto::authorized_field::Kind as FieldKind;
use proto::authorized_path::Kind as PathKind;
use serde_json::{Value, json};

use super::*;
use crate::object::Kind;

/// A policy of the trust domain `cluster.local`.
pub(crate) fn policy(namespace: &str, name: &str, spec: &Value) -> AuthorizationPolicy {
    policy_with(namespace, name, spec, &Value::Null)
}

/// The same, with a status.
pub(crate) fn policy_with(
    namespace: &str,
    name: &str,
    spec: &Value,
    status: &Value,
) -> AuthorizationPolicy {
    let key = Key::new(namespace, name);
    let (spec, status) = (spec.to_string(), status.to_string());
    let meta = Meta::new(Kind::Authorization, key, 0, ("", 1), &spec);
    parse::policy(meta, &spec, &status, "cluster.local")
}

/// The message of a policy in `shop`, without its name.
fn message(spec: Value) -> proto::AuthorizationPolicy {
    let policy = self::policy("shop", "p", &spec);
    assert_eq!(policy.invalid, None, "{spec}");
    match &policy.applied().effect {
        Effect::Rules(rules) => rules.message.clone(),
        effect => panic!("{effect:?}"),
    }
}

/// A policy for all pods of `shop`.
fn all_pods(others: Value) -> Value {
    let mut spec = json!({"targetRefs": [{"kind": "Pod", "selector": {}}]});
    let others = others.as_object().unwrap().clone();
    spec.as_object_mut().unwrap().extend(others);
    spec
}

fn with_rule(action: &str, rule: Value) -> Value {
    all_pods(json!({"action": action, "rules": [rule]}))
}

fn rule(rule: Value) -> proto::AuthorizationRule {
    message(with_rule("ALLOW", rule)).rules.remove(0)
}

fn identity(parts: [&str; 3]) -> SourceKind {
    let [trust_domain, namespace, service_account] = parts.map(str::to_owned);
    SourceKind::Identity(proto::IdentityMatch {
        trust_domain,
        namespace,
        service_account,
    })
}

#[test]
fn action_mode_and_name_are_those_of_the_policy() {
    let policy = message(all_pods(
        json!({"action": "DENY", "mode": "Audit", "rules": [{}]}),
    ));
    assert_eq!(policy.name, "AuthorizationPolicy shop/p");
    assert_eq!((policy.action(), policy.audit), (Action::Deny, true));
    assert_eq!(policy.rules[0].revision, 1);
    let empty = message(all_pods(json!({"action": "ALLOW"})));
    assert_eq!((empty.action(), empty.audit), (Action::Allow, false));
    assert_eq!((empty.rules, empty.ports), (vec![], vec![]));
}

#[test]
fn omitted_sources_are_every_client_and_empty_ones_none() {
    assert_eq!(rule(json!({})).sources, None);
    let nobody = proto::AuthorizationSources { sources: vec![] };
    assert_eq!(rule(json!({"sources": []})).sources, Some(nobody));
}

#[test]
fn sources_are_typed_and_of_the_own_trust_domain() {
    let account = |account: Value| json!({"type": "ServiceAccount", "serviceAccount": account});
    let spiffe = |id: &str| json!({"type": "SPIFFE", "spiffe": id});
    for (source, expected) in [
        (
            account(json!({"name": "web"})),
            identity(["cluster.local", "shop", "web"]),
        ),
        (
            account(json!({"namespace": "bank", "name": "*"})),
            identity(["cluster.local", "bank", ""]),
        ),
        (
            json!({"type": "Namespace", "namespace": "bank"}),
            identity(["cluster.local", "bank", ""]),
        ),
        (
            spiffe("spiffe://example.org/ns/*/sa/web.v2"),
            identity(["example.org", "", "web.v2"]),
        ),
        (spiffe("spiffe://*/ns/*/sa/*"), identity(["", "", ""])),
        (
            json!({"type": "IPBlock", "ipBlock": "fd00::/8"}),
            SourceKind::IpBlock("fd00::/8".into()),
        ),
        (
            json!({"type": "Unauthenticated"}),
            SourceKind::Unauthenticated(proto::Unauthenticated {}),
        ),
    ] {
        let expected = vec![proto::AuthorizationSource {
            kind: Some(expected),
        }];
        let both = rule(json!({"sources": [source], "notSources": [source]}));
        assert_eq!(both.not_sources, expected);
        assert_eq!(both.sources.unwrap().sources, expected);
    }
}

#[test]
fn conditions_on_requests_are_typed_and_grpc_methods_are_paths() {
    let all = rule(json!({"networkAttributes": {"ports": [8080]}, "requests": [
        {"methods": ["GET"], "hosts": ["*.Example.com"], "paths": [
            {"type": "Exact", "value": "/a"}, {"type": "PathPrefix", "value": "/b"},
            {"type": "Suffix", "value": ".html"}, {"type": "Template", "value": "/c/{*}"}]},
        {"headers": [{"name": "X-A", "type": "Exact", "value": "1"},
            {"name": "x-b", "type": "Present"}]},
        {"grpc": [{"service": "echo.v1.Echo", "method": "Say"}, {"service": "echo.v1.Echo"}]},
    ]}));
    assert_eq!(all.ports, [8080]);
    let paths = |at: usize| {
        let paths = all.requests[at].paths.iter();
        Vec::from_iter(paths.map(|path| path.kind.clone().unwrap()))
    };
    let expected = [
        PathKind::Exact("/a".into()),
        PathKind::Prefix("/b".into()),
        PathKind::Suffix(".html".into()),
        PathKind::Template("/c/{*}".into()),
    ];
    assert_eq!(paths(0), expected);
    let expected = [
        PathKind::Exact("/echo.v1.Echo/Say".into()),
        PathKind::Prefix("/echo.v1.Echo".into()),
    ];
    assert_eq!(paths(2), expected);
    assert_eq!(all.requests[0].methods, ["GET"]);
    assert_eq!(all.requests[0].hosts, ["*.Example.com"]);
    let headers = all.requests[1].headers.iter();
    let headers: Vec<_> = headers
        .map(|one| (&*one.name, one.kind.clone().unwrap()))
        .collect();
    let present = FieldKind::Present(proto::Present {});
    assert_eq!(
        headers,
        [("x-a", FieldKind::Exact("1".into())), ("x-b", present)]
    );
}

/// Each differs from a valid policy in what the expected message names.
#[test]
fn invalid_field_is_named_and_makes_the_policy_deny() {
    let source = |source: Value| with_rule("ALLOW", json!({"sources": [source]}));
    let request = |request: Value| with_rule("ALLOW", json!({"requests": [request]}));
    let path =
        |kind: &str, value: &str| request(json!({"paths": [{"type": kind, "value": value}]}));
    let target = |target: Value| json!({"targetRefs": [target], "action": "DENY", "rules": [{}]});
    let scope = |action: &str, rules: Value| {
        all_pods(json!({"action": action, "scope": "Ports", "rules": rules}))
    };
    let mut wrong = Vec::new();
    for (spec, expected) in [
        (json!({"action": "DENY"}), "spec.targetRefs"),
        (
            json!({"targetRefs": [], "action": "DENY"}),
            "spec.targetRefs: expected 1 to 16",
        ),
        (target(json!({"kind": "Pod"})), "targetRefs[0].kind"),
        (target(json!({"kind": "Service"})), "targetRefs[0].kind"),
        (
            target(json!({"kind": "Service", "name": "a", "port": 1})),
            "[0].port: unknown field",
        ),
        (
            target(json!({"group": "apps", "kind": "Pod", "selector": {}})),
            "targetRefs[0].group",
        ),
        (
            target(json!({"kind": "Pod", "selector": {"matchExpressions": [
                {"key": "a", "operator": "In"}]}})),
            "matchExpressions[0].operator",
        ),
        (all_pods(json!({})), "spec.action"),
        (all_pods(json!({"action": "Allow"})), "spec.action"),
        (
            all_pods(json!({"action": "ALLOW", "mode": "Off"})),
            "spec.mode",
        ),
        (
            all_pods(json!({"action": "ALLOW", "rules": null})),
            "spec.rules: null",
        ),
        (
            all_pods(json!({"action": "ALLOW", "selector": {}})),
            "spec.selector: unknown field",
        ),
        (
            all_pods(json!({"action": "ALLOW", "rules": vec![json!({}); 129]})),
            "spec.rules: 129",
        ),
        (
            with_rule("ALLOW", json!({"sources": null})),
            "rules[0].sources: null",
        ),
        (
            with_rule("ALLOW", json!({"notSources": []})),
            "rules[0].notSources",
        ),
        (
            with_rule("ALLOW", json!({"requests": []})),
            "rules[0].requests",
        ),
        (
            with_rule("ALLOW", json!({"networkAttributes": {}})),
            "networkAttributes.ports",
        ),
        (
            with_rule("ALLOW", json!({"networkAttributes": {"ports": [0]}})),
            "rules[0].ports",
        ),
        (
            with_rule("ALLOW", json!({"networkAttributes": {"ports": [65536]}})),
            "65536",
        ),
        (source(json!({"type": "ServiceAccount"})), "sources[0].type"),
        (source(json!({"type": "Group"})), "sources[0].type"),
        (
            source(json!({"type": "Namespace", "namespace": "*"})),
            "sources[0]",
        ),
        (
            source(json!({"type": "Namespace", "namespace": "a", "spiffe": "b"})),
            "sources[0].type",
        ),
        (
            source(json!({"type": "Unauthenticated", "ipBlock": "10.0.0.0/8"})),
            "sources[0].type",
        ),
        (
            source(json!({"type": "SPIFFE", "spiffe": "spiffe://a/ns/b*/sa/c"})),
            "spiffe",
        ),
        (
            source(json!({"type": "SPIFFE", "spiffe": "spiffe://a/ns/b"})),
            "spiffe",
        ),
        (
            source(json!({"type": "IPBlock", "ipBlock": "10.0.0.0/33"})),
            "rules[0].sources",
        ),
        (
            source(json!({"type": "IPBlock", "ipBlock": "10.0.0.1"})),
            "rules[0].sources",
        ),
        (
            source(json!({"type": "IPBlock", "ipBlock": "10.0.0.0/+8"})),
            "rules[0].sources",
        ),
        (request(json!({})), "requests[0]: expected a condition"),
        (request(json!({"methods": []})), "requests[0].methods"),
        (
            request(json!({"methods": ["GET POST"]})),
            "rules[0].requests[0].methods[0]",
        ),
        (
            request(json!({"hosts": ["a.*"]})),
            "rules[0].requests[0].hosts[0]",
        ),
        (
            request(json!({"hosts": ["a:80"]})),
            "rules[0].requests[0].hosts[0]",
        ),
        (
            request(json!({"query": "a"})),
            "requests[0].query: unknown field",
        ),
        (path("Regex", "/a"), "paths[0].type"),
        (path("Exact", "a"), "rules[0].requests[0].paths[0].value"),
        (path("Exact", "/a?b"), "rules[0].requests[0].paths[0].value"),
        (path("Suffix", ""), "rules[0].requests[0].paths[0].value"),
        (
            request(json!({"headers": [{"name": "a b", "type": "Present"}]})),
            "headers[0].name",
        ),
        (
            request(json!({"headers": [{"name": "a", "type": "Exact"}]})),
            "headers[0].type",
        ),
        (request(json!({"grpc": [{"service": "a/b"}]})), "grpc[0]"),
        (
            request(
                json!({"grpc": [{"service": "a"}], "paths": [{"type": "Exact", "value": "/"}]}),
            ),
            "grpc and paths",
        ),
        (
            with_rule("DENY", json!({"requests": [{"methods": ["GET"]}]})),
            "rules[0].ports",
        ),
        (scope("ALLOW", json!([])), "spec.scope"),
        (scope("ALLOW", json!([{}])), "spec.scope"),
        (
            scope("DENY", json!([{"networkAttributes": {"ports": [80]}}])),
            "spec.scope",
        ),
        (
            all_pods(json!({"defaultAction": "AUDIT"})),
            "spec.defaultAction",
        ),
        (
            all_pods(json!({"defaultAction": "DENY", "mode": "Audit"})),
            "spec.defaultAction: excludes",
        ),
        (
            json!({"targetRefs": [{"kind": "Service", "name": "a"}], "defaultAction": "DENY"}),
            "spec.defaultAction: requires",
        ),
    ] {
        let policy = policy("shop", "p", &spec);
        let rejection = policy
            .rejection()
            .unwrap_or_else(|| panic!("{spec} is valid"));
        if !rejection.message.contains(expected) {
            wrong.push(format!("{spec}: {expected}: {rejection}"));
        }
        assert_eq!(rejection.reason, "Invalid");
        let Effect::Rules(rules) = &policy.applied().effect else {
            panic!("{spec} sets the default")
        };
        assert_eq!(
            (rules.message.action(), rules.message.rules[0].revision),
            (Action::Deny, u32::MAX)
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn policy_over_the_bound_is_too_large() {
    let header = json!({"name": "h", "type": "Exact", "value": "v".repeat(1000)});
    let rule = json!({"requests": [{"headers": vec![header; 16]}]});
    let spec = all_pods(json!({"action": "ALLOW", "rules": vec![rule; 17]}));
    assert_eq!(
        policy("shop", "p", &spec).rejection().unwrap().reason,
        "TooLarge"
    );
}

#[test]
fn targets_have_names_for_the_status() {
    let selector = json!({"matchLabels": {"app": "web"}, "matchExpressions": [
        {"key": "tier", "operator": "In", "values": ["a", "b"]},
        {"key": "x", "operator": "DoesNotExist"}]});
    let spec = json!({"action": "DENY", "targetRefs": [
        {"kind": "Pod", "selector": {}}, {"kind": "Pod", "selector": selector},
        {"kind": "Service", "name": "web"}, {"kind": "ServiceAccount", "name": "web"}]});
    let policy = policy("shop", "p", &spec);
    let names = policy
        .parents
        .iter()
        .map(|one| (one.kind.as_deref().unwrap(), &*one.name));
    let expected = [
        ("Pod", "*"),
        ("Pod", "app=web,tier in (a,b),!x"),
        ("Service", "web"),
        ("ServiceAccount", "web"),
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
}

#[test]
fn selectors_of_a_policy_cost_little_in_all() {
    let values: Vec<String> = (0..63).map(|number| format!("v{number}")).collect();
    let expression = json!({"key": "a", "operator": "NotIn", "values": values});
    let target = json!({"kind": "Pod", "selector": {"matchExpressions": [expression, expression]}});
    let policy = |targets: usize| {
        let targets = vec![target.clone(); targets];
        self::policy(
            "shop",
            "p",
            &json!({"targetRefs": targets, "action": "ALLOW"}),
        )
    };
    assert_eq!(policy(2).invalid, None);
    let rejection = policy(3).invalid.unwrap();
    let expected = "spec.targetRefs: expected at most 256 labels and values in all selectors";
    assert_eq!(rejection.message, expected);
}
