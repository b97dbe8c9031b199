//! Tokens of requests, and conditions on their claims.

use serde_json::{Value, json};

use super::*;
use crate::authorization::check;

/// Written as in [`header`].
fn claims(conditions: &[(&str, &str)]) -> RequestMatch {
    let claim = |(name, value): &(&str, &str)| header(name, value).headers.remove(0);
    RequestMatch {
        claims: conditions.iter().map(claim).collect(),
        ..RequestMatch::default()
    }
}

fn issuer() -> TokenIssuer {
    TokenIssuer {
        name: "https://id.example.com".into(),
        audiences: vec!["shop".into()],
        ..TokenIssuer::default()
    }
}

/// A policy with an issuer and a rule about requests.
fn issuing(name: &str, action: Action, request: RequestMatch) -> AuthorizationPolicy {
    let rule = AuthorizationRule {
        revision: ISSUERS_REVISION,
        ..about(request)
    };
    AuthorizationPolicy {
        issuers: vec![issuer()],
        ..policy(name, action, vec![rule])
    }
}

fn token(policies: &[&str], claims: Value) -> Token {
    Token {
        policies: policies.iter().map(|name| Arc::from(*name)).collect(),
        claims: claims.into(),
    }
}

fn verdict(policies: &[AuthorizationPolicy], token: Option<&Token>) -> Result<(), Denial> {
    let (caller, head) = (identity("shop/web"), get("/"));
    let call = Call {
        token,
        ..call(Some(&caller), Some(&head))
    };
    compile(policies.to_vec()).judge(&call)
}

#[test]
fn claims_match_as_their_types_say() {
    let content = json!({
        "sub": "ada",
        "scope": "read write",
        "scp": "admin",
        "groups": ["dev", "ops", 7],
        "level": 3,
        "verified": true,
        "nothing": null,
        "empty": [],
        "address": {"country": "NZ", "lines": ["a b"]},
        "https://example.com/roles": ["buyer"],
        "a/b": "c",
    });
    let token = token(&["p"], content);
    for (name, value, expected) in [
        ("sub", "exact:ada", true),
        ("sub", "exact:ad", false),
        ("sub", "prefix:ad", true),
        ("sub", "suffix:da", true),
        ("sub", "exact:Ada", false),
        ("scope", "exact:write", true),
        ("scope", "exact:read write", false),
        ("scp", "exact:admin", true),
        ("groups", "exact:ops", true),
        ("groups", "exact:7", true),
        ("groups", "exact:dev,ops", false),
        ("groups", "prefix:o", true),
        ("level", "exact:3", true),
        ("verified", "exact:true", true),
        ("verified", "exact:false", false),
        ("nothing", "present:", false),
        ("empty", "present:", true),
        ("empty", "exact:a", false),
        ("address", "present:", true),
        ("address", "prefix:{", false),
        ("/address/country", "exact:NZ", true),
        ("/address/lines", "exact:a b", true),
        ("/address/city", "present:", false),
        ("address/country", "present:", false),
        ("https://example.com/roles", "exact:buyer", true),
        ("/a~1b", "exact:c", true),
        ("other", "present:", false),
    ] {
        for (action, is_allowed) in [(Action::Allow, expected), (Action::Deny, !expected)] {
            let policy = issuing("p", action, claims(&[(name, value)]));
            let verdict = verdict(&[policy], Some(&token));
            assert_eq!(verdict.is_ok(), is_allowed, "{action:?} {name} {value}");
        }
    }
}

#[test]
fn claims_are_unknown_without_a_token_that_the_policy_accepts() {
    let content = json!({"sub": "ada"});
    let other = issuing("other", Action::Allow, RequestMatch::default());
    for token in [None, Some(token(&["other"], content))] {
        for action in [Action::Allow, Action::Deny] {
            for claim in [("sub", "exact:ada"), ("sub", "exact:bob")] {
                let policy = issuing("p", action, claims(&[claim]));
                let mut policies = vec![policy];
                if action == Action::Deny {
                    policies.push(other.clone());
                } else {
                    policies.push(issuing("other", action, claims(&[("sub", "exact:eve")])));
                }
                let verdict = verdict(&policies, token.as_ref());
                let denial = verdict.expect_err("no rule matches");
                assert!(!denial.refuses_token, "{action:?} {token:?}");
            }
        }
    }
    // Without conditions on claims, no token is required.
    assert_eq!(verdict(&[other], None), Ok(()));
}

#[test]
fn a_token_that_no_issuer_at_the_port_accepts_is_refused_whatever_the_rules() {
    let open = policy("open", Action::Allow, vec![rule()]);
    let issuing = issuing("p", Action::Allow, RequestMatch::default());
    for token in [
        token(&[], Value::Null),
        token(&["other"], json!({"sub": "ada"})),
    ] {
        let policies = [open.clone(), issuing.clone()];
        let denial = verdict(&policies, Some(&token)).expect_err("the token is not valid");
        assert!(denial.refuses_token && denial.rule.is_none());
        let text = "p: the token is not valid for any of its issuers";
        assert_eq!(denial.to_string(), text);
        let at_other_ports = AuthorizationPolicy {
            ports: vec![81],
            ..issuing.clone()
        };
        assert_eq!(
            verdict(&[open.clone(), at_other_ports], Some(&token)),
            Ok(())
        );
        let audited = AuthorizationPolicy {
            audit: true,
            ..issuing.clone()
        };
        let policies = [open.clone(), audited];
        assert_eq!(verdict(&policies, Some(&token)), Ok(()), "it is audited");
        let (caller, head) = (identity("shop/web"), get("/"));
        let call = Call {
            token: Some(&token),
            ..call(Some(&caller), Some(&head))
        };
        let audited = compile(policies.to_vec()).audit(&call);
        assert!(audited.expect("a denial").refuses_token);
    }
}

#[test]
fn fields_from_claims_have_no_known_value_for_rules() {
    let caller = identity("shop/web");
    let head = with_fields(&[("x-user", "ada")]);
    let call = call(Some(&caller), Some(&head));
    for (action, value) in [(Action::Allow, "exact:ada"), (Action::Deny, "exact:bob")] {
        let policy = policy("p", action, vec![about(header("x-user", value))]);
        let mut set = issuing("set", Action::Deny, claims(&[("sub", "exact:eve")]));
        set.rules[0].sources = Some(AuthorizationSources::default());
        let is_allowed = |set| compile(vec![policy.clone(), set]).judge(&call).is_ok();
        assert!(
            is_allowed(set.clone()),
            "the field of the client: {action:?}"
        );
        for name in ["x-user", "X_User"] {
            let mut set = set.clone();
            set.issuers[0].fields = vec![ClaimField {
                claim: "sub".into(),
                name: name.into(),
            }];
            assert!(!is_allowed(set), "{action:?} {name}");
        }
    }
}

#[test]
fn policies_with_issuers_are_checked() {
    let policy = || issuing("p", Action::Allow, claims(&[("sub", "exact:ada")]));
    assert!(check(&policy()).is_ok());
    type Change = fn(&mut AuthorizationPolicy);
    let changes: [(&str, Change); 15] = [
        ("issuers", |policy| policy.rules.clear()),
        ("issuers", |policy| policy.issuers = vec![issuer(); 9]),
        ("rules.requests[0].claims", |policy| {
            policy.issuers.clear();
            policy.rules[0].revision = REVISION;
        }),
        ("rules.revision", |policy| policy.issuers.clear()),
        ("rules.revision", |policy| {
            policy.rules[0].revision = REVISION;
        }),
        ("issuers.issuer", |policy| policy.issuers[0].name.clear()),
        ("issuers.audiences", |policy| {
            policy.issuers[0].audiences.clear();
        }),
        ("issuers.audiences", |policy| {
            policy.issuers[0].audiences[0].clear();
        }),
        ("issuers.audiences", |policy| {
            policy.issuers[0].audiences = vec!["a".into(); 17];
        }),
        ("issuers.keys", |policy| {
            policy.issuers[0].keys = " ".repeat(64 * 1024 + 1);
        }),
        ("issuers.headers.name", |policy| {
            set_field(policy, "sub", "X-Called.By")
        }),
        ("issuers.headers.name", |policy| {
            set_field(policy, "sub", "Authorization")
        }),
        ("issuers.headers.claim", |policy| {
            set_field(policy, "", "x-user")
        }),
        ("rules.requests[0].claims[0].name", |policy| {
            policy.rules[0].requests[0].claims[0].name = "/".into();
        }),
        ("rules.requests[0].claims[0].value", |policy| {
            policy.rules[0].requests[0].claims[0].kind = None;
        }),
    ];
    for (field, change) in changes {
        let mut policy = policy();
        change(&mut policy);
        let violation = check(&policy).expect_err(field);
        assert_eq!(violation.field, field, "{violation}");
    }
}

fn set_field(policy: &mut AuthorizationPolicy, claim: &str, name: &str) {
    policy.issuers[0].fields = vec![ClaimField {
        claim: claim.into(),
        name: name.into(),
    }];
}

#[test]
fn before_the_token_only_what_it_cannot_change_is_denied() {
    let head = get("/admin");
    let judge = |policies: &[AuthorizationPolicy]| {
        let caller = identity("shop/web");
        let policies = compile(policies.to_vec());
        let before = policies.judge_before_token(&call(Some(&caller), Some(&head)));
        (before.is_ok(), policies)
    };
    let on_admin = |conditions: &[(&str, &str)]| RequestMatch {
        paths: paths(&["prefix:/admin"]).paths,
        ..claims(conditions)
    };
    let of_ada = &[("sub", "exact:ada")];
    for (action, request, may_pass) in [
        (Action::Deny, on_admin(&[]), false),
        (Action::Deny, on_admin(of_ada), true),
        (Action::Deny, paths(&["prefix:/other"]), true),
        (Action::Allow, on_admin(&[]), true),
        (Action::Allow, on_admin(of_ada), true),
        (Action::Allow, paths(&["prefix:/other"]), false),
        (
            Action::Allow,
            RequestMatch {
                paths: paths(&["exact:/x"]).paths,
                ..claims(of_ada)
            },
            false,
        ),
    ] {
        let policy = issuing("p", action, request.clone());
        let (passes, policies) = judge(&[policy]);
        assert_eq!(passes, may_pass, "{action:?} {request:?}");
        // Some token, or none, leads to this verdict.
        let tokens = [
            None,
            Some(token(&["p"], json!({"sub": "ada"}))),
            Some(token(&["p"], json!({}))),
        ];
        let caller = identity("shop/web");
        let verdicts = tokens.iter().map(|token| {
            let call = Call {
                token: token.as_ref(),
                ..call(Some(&caller), Some(&head))
            };
            policies.judge(&call).is_ok()
        });
        assert_eq!(
            verdicts.into_iter().any(|passes| passes),
            may_pass,
            "{action:?} {request:?}"
        );
    }
}
