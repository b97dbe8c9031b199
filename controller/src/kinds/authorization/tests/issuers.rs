//! Issuers of tokens, and conditions on claims.

use super::*;

/// The key of RFC 7515, appendix A.3.
pub(super) const KEYS: &str = r#"{"keys": [{"kty": "EC", "crv": "P-256",
    "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
    "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}"#;

/// A policy with an issuer that has these fields in place of the usual ones, and a rule.
fn issuing(fields: &Value, rule: &Value) -> Value {
    let mut issuer = json!({
        "issuer": "https://id.example.com",
        "audiences": ["shop"],
        "keys": {"type": "Inline", "inline": KEYS},
    });
    for (name, field) in fields.as_object().unwrap() {
        issuer[name] = field.clone();
    }
    all_pods(json!({"action": "ALLOW", "issuers": [issuer], "rules": [rule]}))
}

#[test]
fn issuers_and_claims_are_those_of_the_policy() {
    let policy = message(issuing(
        &json!({"headers": [{"claim": "sub", "name": "X-User"}]}),
        &json!({"requests": [{"claims": [
            {"claim": "/realm_access/roles", "type": "Exact", "value": "Buyer"},
            {"claim": "sub", "type": "Present"},
        ]}]}),
    ));
    let issuer = proto::TokenIssuer {
        name: "https://id.example.com".into(),
        audiences: vec!["shop".into()],
        keys: KEYS.into(),
        fields: vec![proto::ClaimField {
            claim: "sub".into(),
            name: "X-User".into(),
        }],
    };
    assert_eq!(policy.issuers, [issuer]);
    // Proxies that know no issuers do not know any of its rules.
    assert_eq!(policy.rules[0].revision, 2);
    let claims = policy.rules[0].requests[0].claims.iter();
    let claims: Vec<_> = claims
        .map(|one| (&*one.name, one.kind.clone().unwrap()))
        .collect();
    let expected = [
        ("/realm_access/roles", FieldKind::Exact("Buyer".into())),
        ("sub", FieldKind::Present(proto::Present {})),
    ];
    assert_eq!(claims, expected);
}

#[test]
fn invalid_issuer_is_named_and_makes_the_policy_deny() {
    let keys = |keys: Value| issuing(&json!({"keys": keys}), &json!({}));
    let header = |claim: &str, name: &str| {
        let headers = json!([{"claim": claim, "name": name}]);
        issuing(&json!({"headers": headers}), &json!({}))
    };
    let symmetric = r#"{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}"#;
    let claims = json!({"requests": [{"claims": [{"claim": "sub", "type": "Present"}]}]});
    let mut without_rules = issuing(&json!({}), &json!({}));
    without_rules["rules"] = json!([]);
    for (spec, expected) in [
        (with_rule("ALLOW", claims), "rules[0].requests[0].claims"),
        (without_rules, "spec.issuers: requires rules"),
        (
            all_pods(json!({"action": "ALLOW", "issuers": [], "rules": [{}]})),
            "spec.issuers: expected 1 to 8",
        ),
        (
            all_pods(json!({"defaultAction": "ALLOW", "issuers": [{}]})),
            "spec.defaultAction: excludes",
        ),
        (
            issuing(&json!({"issuer": ""}), &json!({})),
            "issuers[0].issuer",
        ),
        (
            issuing(&json!({"audiences": []}), &json!({})),
            "issuers[0].audiences",
        ),
        (keys(json!({"type": "Inline"})), "issuers[0].keys.type"),
        (
            keys(json!({"type": "URL", "inline": KEYS})),
            "issuers[0].keys.type",
        ),
        (
            keys(json!({"type": "Inline", "inline": "{}"})),
            "issuers[0].keys.inline",
        ),
        (
            keys(json!({"type": "Inline", "inline": symmetric})),
            "no public key for tokens",
        ),
        (
            keys(json!({"type": "Secret", "secret": {"name": "../a", "key": "b"}})),
            "issuers[0].keys.secret.name",
        ),
        (
            keys(json!({"type": "Secret", "secret": {"name": "a", "key": "b\nc"}})),
            "issuers[0].keys.secret.key",
        ),
        (header("sub", "X_Called-By"), "issuers[0].headers.name"),
        (header("sub", "authorization"), "issuers[0].headers.name"),
        (header("", "x-user"), "issuers[0].headers.claim"),
        (
            issuing(
                &json!({}),
                &json!({"requests": [{"claims": [{"claim": "sub", "type": "Regex"}]}]}),
            ),
            "rules[0].requests[0].claims[0].type",
        ),
    ] {
        let policy = policy("shop", "p", &spec);
        let rejection = policy.rejection().expect(expected);
        assert!(rejection.message.contains(expected), "{rejection}");
        assert!(!rejection.message.contains("c2VjcmV0"), "{rejection}");
    }
}

#[test]
fn keys_of_secrets_and_urls_are_in_the_status() {
    let url = "https://id.example.com/keys";
    let of_url = issuing(&json!({"keys": {"type": "URL", "url": url}}), &json!({}));
    let of_secret = json!({"type": "Secret", "secret": {"name": "idp", "key": "jwks"}});
    let of_secret = issuing(&json!({"keys": of_secret}), &json!({}));
    let keys = |spec: &Value, entry: Value| {
        let policy = policy_with("shop", "p", spec, &json!({"issuers": [entry]}));
        assert_eq!(policy.rejection(), None);
        let Effect::Rules(rules) = &policy.applied().effect else {
            panic!("it has rules")
        };
        (
            rules.message.issuers[0].keys.clone(),
            policy.fetched()[0].has_keys,
        )
    };
    for (spec, source) in [(&of_url, url), (&of_secret, "Secret idp/jwks")] {
        let known = (KEYS.to_owned(), true);
        assert_eq!(
            keys(
                spec,
                json!({"source": source, "keys": KEYS, "message": "down"})
            ),
            known
        );
        let missing = (String::new(), false);
        assert_eq!(keys(spec, json!({"source": source})), missing);
        assert_eq!(
            keys(spec, json!({"source": "https://other", "keys": KEYS})),
            missing
        );
        assert_eq!(keys(spec, json!({"source": source, "keys": "{}"})), missing);
        assert_eq!(keys(spec, json!("no entry")), missing);
    }
}
