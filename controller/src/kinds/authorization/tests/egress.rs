//! Policies with direction Outbound: what pods may call outside of the cluster.

use super::*;

fn outbound(others: Value) -> Value {
    let mut spec = all_pods(others);
    spec["direction"] = "Outbound".into();
    spec
}

fn to(action: &str, destinations: Value) -> Value {
    outbound(json!({"action": action, "rules": [{"destinations": destinations}]}))
}

fn host(name: &str) -> Value {
    json!({"type": "Host", "host": name})
}

fn block(block: &str) -> Value {
    json!({"type": "IPBlock", "ipBlock": block})
}

/// The directions of a policy, and whether it denies everything.
fn directions(spec: &Value) -> (Vec<Direction>, bool) {
    let policy = policy("shop", "p", spec);
    let Content {
        directions, effect, ..
    } = policy.applied();
    let is_denying = *effect == Effect::denying(&policy.key, Mode::Enforce);
    (directions.to_vec(), is_denying)
}

#[test]
fn destinations_are_names_and_address_blocks_at_their_ports() {
    let policy = message(outbound(
        json!({"action": "ALLOW", "scope": "Ports", "rules": [{
            "destinations": [host("*.Example.com"), block("203.0.113.0/24")],
            "networkAttributes": {"ports": [443, 8443]},
        }]}),
    ));
    let kinds = [
        SourceKind::Host("*.Example.com".into()),
        SourceKind::IpBlock("203.0.113.0/24".into()),
    ];
    let sources = kinds.map(|kind| proto::AuthorizationSource { kind: Some(kind) });
    let rule = &policy.rules[0];
    assert_eq!(rule.sources.as_ref().unwrap().sources, sources);
    assert_eq!(
        (&*rule.ports, &*policy.ports),
        (&[443, 8443][..], &[443, 8443][..])
    );
    let all = message(outbound(
        json!({"action": "DENY", "mode": "Audit", "rules": [{}]}),
    ));
    assert_eq!((all.rules[0].sources.clone(), all.audit), (None, true));
    let nothing = message(to("ALLOW", json!([]))).rules.remove(0).sources;
    assert_eq!(nothing.unwrap().sources, []);
    assert_eq!(message(to("DENY", json!([block("::/0")]))).rules.len(), 1);
}

#[test]
fn direction_is_inbound_unless_the_policy_names_another_one() {
    use Direction::{Inbound, Outbound};
    let allow = || json!({"action": "ALLOW", "rules": [{}]});
    let with = |direction: Value| {
        let mut spec = all_pods(allow());
        spec["direction"] = direction;
        spec
    };
    for (spec, expected) in [
        (all_pods(allow()), (vec![Inbound], false)),
        (with("Inbound".into()), (vec![Inbound], false)),
        (with("Outbound".into()), (vec![Outbound], false)),
        (with("outbound".into()), (vec![Inbound, Outbound], true)),
        (with("".into()), (vec![Inbound, Outbound], true)),
        (with(Value::Null), (vec![Inbound, Outbound], true)),
        (with(json!(["Outbound"])), (vec![Inbound, Outbound], true)),
        (Value::Null, (vec![Inbound, Outbound], true)),
        ("Outbound".into(), (vec![Inbound, Outbound], true)),
        // The rest cannot be read.
        (outbound(json!({"later": 1})), (vec![Outbound], true)),
        (json!({"direction": "Outbound"}), (vec![Outbound], true)),
        (all_pods(json!({"later": 1})), (vec![Inbound], true)),
    ] {
        assert_eq!(directions(&spec), expected, "{spec}");
    }
    let spec = outbound(json!({"defaultAction": "DENY"}));
    let policy = policy("shop", "p", &spec);
    assert_eq!(policy.applied().effect, Effect::Default { deny: true });
    assert!(policy.is_about(Outbound) && !policy.is_about(Inbound));
}

#[test]
fn field_of_the_other_direction_is_named_and_makes_the_policy_deny() {
    let rule = |rule: Value| outbound(json!({"action": "ALLOW", "rules": [{}, rule]}));
    let target = |others: Value| {
        let mut spec = outbound(others);
        spec["targetRefs"] = json!([{"kind": "Service", "name": "web"}]);
        spec
    };
    let server = json!({"protocol": "GRPC", "backendRef": {"name": "auth", "port": 80}});
    let issuer = json!({"issuer": "i", "audiences": ["a"],
        "keys": {"type": "URL", "url": "https://id.example.com/keys"}});
    let inbound = with_rule("ALLOW", json!({"destinations": [host("a.test")]}));
    for (spec, expected) in [
        (
            target(json!({"action": "ALLOW", "rules": [{}]})),
            "spec.targetRefs of kind Service: expected none with direction Outbound",
        ),
        (
            target(json!({"defaultAction": "DENY"})),
            "spec.targetRefs of kind Service",
        ),
        (
            outbound(json!({"action": "ExternalAuth", "rules": [{}], "externalAuth": server})),
            "spec.externalAuth: expected none",
        ),
        (
            outbound(json!({"action": "ALLOW", "rules": [{}], "issuers": [issuer]})),
            "spec.issuers: expected none",
        ),
        (
            rule(json!({"sources": [{"type": "Unauthenticated"}]})),
            "spec.rules[1].sources: expected none with direction Outbound",
        ),
        (rule(json!({"sources": []})), "spec.rules[1].sources"),
        (
            rule(json!({"notSources": [{"type": "Unauthenticated"}]})),
            "spec.rules[1].notSources",
        ),
        (
            rule(json!({"requests": [{"methods": ["GET"]}]})),
            "spec.rules[1].requests",
        ),
        (
            inbound,
            "spec.rules[0].destinations: expected none with direction Inbound",
        ),
        (
            to("DENY", json!([block("10.0.0.0/8"), host("a.test")])),
            "spec.rules[0].destinations[1].host: a DENY by name cannot be made safe: the application \
             may leave the name out",
        ),
        (
            to("ALLOW", json!([host("a_b:80")])),
            "spec.rules[0].destinations",
        ),
        (to("ALLOW", json!([host("")])), "spec.rules[0].destinations"),
        (
            to("ALLOW", json!([block("10.0.0.0/33")])),
            "spec.rules[0].destinations",
        ),
        (
            to("ALLOW", json!([{"type": "Host", "ipBlock": "10.0.0.0/8"}])),
            "destinations[0].type",
        ),
        (
            to(
                "ALLOW",
                json!([{"type": "Host", "host": "a.test", "ipBlock": "10.0.0.0/8"}]),
            ),
            "destinations[0].type",
        ),
        (
            to("ALLOW", json!([{"type": "Namespace"}])),
            "destinations[0].type",
        ),
        (
            to("ALLOW", json!([{"type": "Host", "name": "a.test"}])),
            "[0].name: unknown field",
        ),
        (
            to("ALLOW", json!(vec![host("a.test"); 65])),
            "spec.rules[0].destinations",
        ),
        (
            outbound(json!({"action": "ALLOW", "rules": vec![json!({}); 129]})),
            "spec.rules: 129",
        ),
    ] {
        let rejected = policy("shop", "p", &spec);
        let rejection = rejected.rejection().expect("it is invalid");
        assert!(rejection.message.contains(expected), "{rejection}");
        let (directions, is_denying) = directions(&spec);
        assert!(is_denying && directions.len() == 1, "{spec}");
    }
}
