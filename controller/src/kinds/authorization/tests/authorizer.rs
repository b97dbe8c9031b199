//! External authorization servers.

use proto::authorizer::Protocol;

use super::*;

/// A policy with a server that has these fields in addition, and a rule.
fn asking(fields: &Value) -> Value {
    let mut server = json!({
        "protocol": "HTTP",
        "backendRef": {"name": "server", "namespace": "auth", "port": 9000},
    });
    for (name, field) in fields.as_object().unwrap() {
        server[name] = field.clone();
    }
    all_pods(json!({"action": "ExternalAuth", "externalAuth": server, "rules": [{}]}))
}

#[test]
fn server_is_that_of_the_policy() {
    let policy = message(asking(&json!({
        "http": {
            "path": "/check",
            "allowedHeaders": ["Cookie"],
            "allowedResponseHeaders": ["X-User", "x-groups"],
        },
        "timeout": "250ms",
        "failureMode": "Allow",
    })));
    let expected = proto::Authorizer {
        backend: "auth/server:9000".into(),
        protocol: Protocol::Http.into(),
        path: "/check".into(),
        request_fields: vec!["cookie".into()],
        response_fields: vec!["x-user".into(), "x-groups".into()],
        timeout: 250,
        fail_open: true,
        max_body: 0,
    };
    assert_eq!(policy.action(), Action::ExternalAuth);
    assert_eq!(policy.authorizer, Some(expected));
    assert_eq!(policy.rules.len(), 1);
}

#[test]
fn defaults_are_the_own_namespace_one_second_and_to_deny() {
    let policy = message(asking(&json!({
        "protocol": "GRPC",
        "backendRef": {"group": "", "kind": "Service", "name": "server", "port": 9000},
        "grpc": {"allowedHeaders": ["X-Tenant"], "allowedResponseHeaders": ["X-User"]},
    })));
    let expected = proto::Authorizer {
        backend: "shop/server:9000".into(),
        protocol: Protocol::Grpc.into(),
        request_fields: vec!["x-tenant".into()],
        response_fields: vec!["x-user".into()],
        timeout: 1000,
        ..proto::Authorizer::default()
    };
    assert_eq!(policy.authorizer, Some(expected));
}

/// Proxies that do not know bodies deny, as with every action that they do not know.
#[test]
fn server_of_bodies_has_an_action_of_its_own() {
    let policy = |body: Value| {
        let policy = message(asking(&json!({"forwardBody": body})));
        let max = policy.authorizer.as_ref().map(|server| server.max_body);
        (policy.action(), max, policy.rules.len())
    };
    let without = (Action::ExternalAuth, Some(0), 1);
    assert_eq!(policy(json!({})), without);
    assert_eq!(policy(json!({"maxSize": 0})), without);
    let with = (Action::ExternalAuthWithBody, Some(65_535), 1);
    assert_eq!(policy(json!({"maxSize": 65_535})), with);
}

#[test]
fn invalid_server_is_named_and_makes_the_policy_deny() {
    let with = |name: &str, field: Value| asking(&json!({name: field}));
    let http = |name: &str, field: Value| with("http", json!({name: field}));
    let backend = |name: &str, field: Value| {
        let mut backend = json!({"name": "server", "port": 9000});
        backend[name] = field;
        with("backendRef", backend)
    };
    let policy_with = |name: &str, field: Value| {
        let mut spec = asking(&json!({}));
        spec[name] = field;
        spec
    };
    let without = |name: &str| {
        let mut spec = asking(&json!({}));
        spec.as_object_mut().unwrap().remove(name);
        spec
    };
    let requests = json!([{"requests": [{"methods": ["GET"]}]}]);
    for (spec, expected) in [
        (without("externalAuth"), "spec.externalAuth: "),
        (policy_with("action", json!("DENY")), "spec.externalAuth: "),
        (policy_with("action", json!("CUSTOM")), "spec.action: "),
        (policy_with("mode", json!("Audit")), "spec.mode: \"Audit\""),
        (policy_with("scope", json!("Workload")), "spec.scope"),
        (policy_with("rules", requests), "spec.rules[0].ports"),
        (
            all_pods(json!({"defaultAction": "ALLOW", "externalAuth": {}})),
            "spec.defaultAction: excludes",
        ),
        (with("protocol", json!("TCP")), "protocol: \"TCP\""),
        (with("grpc", json!({})), "externalAuth.protocol: \"HTTP\""),
        (
            asking(&json!({"protocol": "GRPC", "http": {}})),
            "externalAuth.protocol: \"GRPC\"",
        ),
        (backend("group", json!("apps")), "backendRef.group"),
        (backend("kind", json!("Pod")), "backendRef.kind: \"Pod\""),
        (backend("name", json!("")), "backendRef.name: \"\""),
        (backend("name", json!("a/b")), "backendRef.name: \"a/b\""),
        (backend("namespace", json!("")), "backendRef.namespace"),
        (backend("port", json!(0)), "backendRef.port: \"0\""),
        (backend("port", json!(65_536)), "backendRef.port: \"65536\""),
        (backend("weight", json!(1)), "backendRef.weight: unknown"),
        (
            with("timeout", json!("soon")),
            "externalAuth.timeout: \"soon\"",
        ),
        (
            with("timeout", json!("0s")),
            "externalAuth.timeout: \"0ms\"",
        ),
        (
            with("timeout", json!("61s")),
            "externalAuth.timeout: \"61000ms\"",
        ),
        (with("failureMode", json!("Open")), "failureMode: \"Open\""),
        (
            with("forwardBody", json!({"maxSize": 65_536})),
            "forwardBody.maxSize: \"65536\" is not at most 65535",
        ),
        (
            with("forwardBody", json!({"maxSize": 1, "allowPartial": false})),
            "forwardBody.allowPartial: unknown field",
        ),
        (http("path", json!("check")), "http.path: \"check\""),
        (
            http("allowedHeaders", json!([])),
            "http.allowedHeaders: expected 1",
        ),
        (
            http("allowedHeaders", json!(["a b"])),
            "http.allowedHeaders[0]: \"a b\"",
        ),
        (
            http("allowedResponseHeaders", json!(["X-Called-By"])),
            "allowedResponseHeaders: \"x-called-by\"",
        ),
        (
            http("allowedHeaders", json!(vec!["a"; 65])),
            "http.allowedHeaders: 65 entries",
        ),
    ] {
        let policy = policy("shop", "p", &spec);
        let rejection = policy.rejection().expect(expected);
        assert!(
            rejection.message.contains(expected),
            "{expected}: {rejection}"
        );
        let rules = policy.rules().expect("it denies");
        assert_eq!(rules.message.action(), Action::Deny, "{spec}");
        assert_eq!(
            (policy.server(), rules.message.rules[0].revision),
            (None, u32::MAX)
        );
    }
}

#[test]
fn issuers_are_possible_and_without_rules_nothing_matches() {
    let mut spec = asking(&json!({}));
    spec["rules"] = json!([]);
    assert_eq!(message(spec.clone()).rules, []);
    spec["rules"] = json!([{}]);
    spec["issuers"] = json!([{
        "issuer": "https://id.example.com",
        "audiences": ["shop"],
        "keys": {"type": "Inline", "inline": issuers::KEYS},
    }]);
    let policy = message(spec);
    assert_eq!((policy.issuers.len(), policy.rules[0].revision), (1, 2));
}
