//! Clients, ports, the order of policies, audit, and what is not known.

use super::*;

fn judge(policies: &[AuthorizationPolicy], call: &Call<'_>) -> bool {
    compile(policies.to_vec()).judge(call).is_ok()
}

#[test]
fn without_policies_the_default_decides() {
    let head = get("/");
    let call = call(None, Some(&head));
    assert!(compile(vec![]).judge(&call).is_ok());
    let denied = Authorization::compile(&proto::Authorization {
        deny_by_default: true,
        default_name: "AuthorizationPolicy mesh/default".into(),
        ..proto::Authorization::default()
    });
    let denial = denied.judge(&call).unwrap_err();
    assert_eq!(&*denial.policy, "AuthorizationPolicy mesh/default");
    assert_eq!((denial.rule, denial.nearest), (None, None));
}

#[test]
fn a_deny_rule_wins_and_one_of_all_allow_policies_must_match() {
    let (web, api) = (identity("shop/web"), identity("shop/api"));
    let allow = policy("allow", Action::Allow, vec![from(&[client("shop/")])]);
    let other = policy("other", Action::Allow, vec![from(&[client("bank/")])]);
    let deny = policy("deny", Action::Deny, vec![from(&[client("shop/api")])]);
    let authorization = compile(vec![allow, deny, other]);
    assert_eq!(authorization.judge(&call(Some(&web), None)), Ok(()));
    let denial = authorization.judge(&call(Some(&api), None)).unwrap_err();
    assert_eq!((&*denial.policy, denial.rule), ("deny", Some(0)));
    let other = identity("other/web");
    let denial = authorization.judge(&call(Some(&other), None)).unwrap_err();
    let nearest = Nearest {
        rule: 0,
        failed: Condition::Sources,
    };
    assert_eq!((&*denial.policy, denial.nearest), ("allow", Some(nearest)));
}

#[test]
fn omitted_sources_are_all_clients_and_an_empty_list_is_none() {
    let caller = identity("shop/web");
    let call = call(Some(&caller), None);
    for (action, rule, expected) in [
        (Action::Allow, rule(), true),
        (Action::Allow, from(&[]), false),
        (Action::Deny, rule(), false),
        (Action::Deny, from(&[]), true),
    ] {
        assert_eq!(judge(&[policy("p", action, vec![rule])], &call), expected);
    }
    assert!(!judge(&[policy("p", Action::Allow, vec![])], &call));
    assert!(judge(&[policy("p", Action::Deny, vec![])], &call));
}

/// 1.
#[test]
fn a_deny_rule_about_requests_leaves_other_ports_open() {
    let deny = AuthorizationPolicy {
        ports: vec![80],
        ..policy("p", Action::Deny, vec![about(paths(&["prefix:/admin"]))])
    };
    let caller = identity("shop/web");
    let opaque = call(Some(&caller), None);
    assert!(!judge(std::slice::from_ref(&deny), &opaque));
    assert!(judge(
        &[deny],
        &Call {
            port: 5432,
            ..opaque
        }
    ));
}

/// A policy whose authorization server is asked.
fn external(name: &str, rule: AuthorizationRule) -> AuthorizationPolicy {
    AuthorizationPolicy {
        authorizer: Some(Authorizer::default()),
        ..policy(name, Action::ExternalAuth, vec![rule])
    }
}

#[test]
fn authorization_servers_are_asked_where_a_rule_may_match() {
    let caller = identity("shop/web");
    let head = get("/orders/1");
    let (request, opaque) = (call(Some(&caller), Some(&head)), call(Some(&caller), None));
    let unauthenticated = call(None, Some(&head));
    let all = compile(vec![
        external("a", about(paths(&["prefix:/orders"]))),
        external("b", from(&[client("shop/till")])),
        external("c", from(&[])),
        external("d", rule()),
        policy("e", Action::Allow, vec![rule()]),
    ]);
    assert_eq!(all.external(&request), [0, 3]);
    let with_body = AuthorizationPolicy {
        action: Action::ExternalAuthWithBody.into(),
        ..external("f", rule())
    };
    assert_eq!(compile(vec![with_body]).external(&request), [0]);
    assert_eq!(
        all.external(&unauthenticated),
        [0, 1, 3],
        "it may be shop/till"
    );
    assert_eq!(all.external(&call(Some(&caller), Some(&get("/")))), [3]);
    assert_eq!(all.judge(&request), Ok(()));
    // Nobody can ask about a connection.
    let denial = all.judge(&opaque).unwrap_err();
    assert_eq!((&*denial.policy, denial.rule), ("a", Some(0)));
    assert_eq!(compile(vec![]).external(&request), Vec::<usize>::new());
}

#[test]
fn policies_with_routes_ask_and_count_by_their_position() {
    let routes = RouteAuthorization {
        rules: vec![route_authorization::Rule {
            authorizer: Some(Authorizer {
                response_fields: vec!["x-user".into()],
                ..Authorizer::default()
            }),
            ..route_authorization::Rule::default()
        }],
        ..RouteAuthorization::default()
    };
    let asking = AuthorizationPolicy {
        routes: Some(routes),
        ..policy("r", Action::ExternalAuth, vec![rule()])
    };
    assert_eq!(fields(&asking).collect::<Vec<_>>(), ["x-user"]);
    let audited = AuthorizationPolicy {
        audit: true,
        ..policy("a", Action::Deny, vec![rule()])
    };
    let all = compile(vec![audited, external("b", from(&[])), asking]);
    let caller = identity("shop/web");
    let head = get("/orders/1");
    assert_eq!(all.external(&call(Some(&caller), Some(&head))), [2]);
    // Nobody can ask about a connection.
    let denial = all.judge(&call(Some(&caller), None)).unwrap_err();
    assert_eq!(&*denial.policy, "r");
}

/// 7.
#[test]
fn policy_without_its_authorization_server_denies() {
    let caller = identity("shop/web");
    for action in [Action::ExternalAuth, Action::ExternalAuthWithBody] {
        let incomplete = policy("p", action, vec![rule()]);
        assert!(!judge(&[incomplete], &call(Some(&caller), Some(&get("/")))));
    }
}

#[test]
fn opaque_traffic_matches_no_allow_rule_about_requests() {
    let caller = identity("shop/web");
    let rules = vec![about(RequestMatch::default())];
    let allow = policy("p", Action::Allow, rules);
    assert!(judge(
        std::slice::from_ref(&allow),
        &call(Some(&caller), Some(&get("/")))
    ));
    let denial = compile(vec![allow])
        .judge(&call(Some(&caller), None))
        .unwrap_err();
    assert_eq!(denial.nearest.unwrap().failed, Condition::Requests);
}

/// 7.
#[test]
fn what_a_later_release_adds_matches_every_deny_and_no_allow() {
    let caller = identity("shop/web");
    let head = get("/");
    let unknown_source = AuthorizationSource { kind: None };
    let request = |request: RequestMatch| about(request);
    let later = AuthorizationRule {
        revision: ISSUERS_REVISION + 1,
        ports: vec![81],
        ..from(&[client("bank/")])
    };
    let rules = [
        from(std::slice::from_ref(&unknown_source)),
        AuthorizationRule {
            not_sources: vec![unknown_source],
            ..rule()
        },
        request(RequestMatch {
            paths: vec![AuthorizedPath { kind: None }],
            ..RequestMatch::default()
        }),
        request(RequestMatch {
            headers: vec![AuthorizedField {
                name: "x-role".into(),
                kind: None,
            }],
            ..RequestMatch::default()
        }),
        request(paths(&["template:/{**}/a"])),
        request(paths(&["template:/{name}"])),
        request(hosts(&["a*.example.com"])),
        later,
        AuthorizationRule::default(),
        AuthorizationRule {
            ports: vec![70_000],
            ..rule()
        },
    ];
    for rule in rules {
        let call = call(Some(&caller), Some(&head));
        for action in [Action::Allow, Action::Deny] {
            assert!(
                !judge(&[policy("p", action, vec![rule.clone()])], &call),
                "{action:?} {rule:?}"
            );
        }
    }
}

#[test]
fn an_action_of_a_later_release_denies_at_its_ports() {
    let later = AuthorizationPolicy {
        action: 77,
        ports: vec![80],
        ..policy("p", Action::Deny, vec![])
    };
    let call = call(None, None);
    assert!(!judge(std::slice::from_ref(&later), &call));
    assert!(judge(&[later], &Call { port: 81, ..call }));
}

#[test]
fn an_unknown_condition_does_not_hide_one_that_is_false() {
    let rule = AuthorizationRule {
        sources: Some(AuthorizationSources {
            sources: vec![AuthorizationSource { kind: None }],
        }),
        not_sources: vec![client("shop/")],
        ..rule()
    };
    let deny = [policy("p", Action::Deny, vec![rule])];
    let (web, bank) = (identity("shop/web"), identity("bank/web"));
    assert!(judge(&deny, &call(Some(&web), None)));
    assert!(!judge(&deny, &call(Some(&bank), None)));
}

#[test]
fn policies_and_rules_concern_their_ports_only() {
    let caller = identity("shop/web");
    let at = |port| Call {
        port,
        ..call(Some(&caller), None)
    };
    let ports = |list: &[u32], of_rule: &[u32], action| {
        let rule = AuthorizationRule {
            ports: of_rule.to_vec(),
            ..rule()
        };
        let policy = AuthorizationPolicy {
            ports: list.to_vec(),
            ..policy("p", action, vec![rule])
        };
        [80, 81, 82].map(|port| judge(std::slice::from_ref(&policy), &at(port)))
    };
    assert_eq!(ports(&[], &[], Action::Allow), [true, true, true]);
    assert_eq!(ports(&[80], &[], Action::Allow), [true, true, true]);
    assert_eq!(ports(&[], &[80], Action::Allow), [true, false, false]);
    assert_eq!(
        ports(&[80, 81], &[81, 82], Action::Allow),
        [false, true, true]
    );
    assert_eq!(
        ports(&[80, 81], &[81, 82], Action::Deny),
        [true, false, true]
    );
    assert_eq!(ports(&[80], &[], Action::Deny), [false, true, true]);
}

#[test]
fn a_denial_names_the_nearest_rule_and_its_first_condition_that_failed() {
    let caller = identity("shop/web");
    let with_method = |method: &str, pattern: &str| RequestMatch {
        methods: vec![method.into()],
        ..paths(&[pattern])
    };
    let rules = vec![
        about(with_method("POST", "prefix:/a")),
        AuthorizationRule {
            requests: vec![with_method("POST", "prefix:/x")],
            ..from(&[client("shop/")])
        },
        about(with_method("GET", "prefix:/c")),
        from(&[client("bank/")]),
    ];
    let authorization = compile(vec![
        policy("first", Action::Allow, vec![]),
        policy("p", Action::Allow, rules),
    ]);
    let denial = authorization
        .judge(&call(Some(&caller), Some(&get("/x"))))
        .unwrap_err();
    let nearest = Nearest {
        rule: 1,
        failed: Condition::Methods,
    };
    assert_eq!(
        denial,
        Denial {
            policy: "p".into(),
            rule: None,
            nearest: Some(nearest),
            refuses_token: false,
        }
    );
    let denial = compile(vec![policy("first", Action::Allow, vec![])]);
    let denial = denial.judge(&call(Some(&caller), None)).unwrap_err();
    assert_eq!((&*denial.policy, denial.nearest), ("first", None));
}

#[test]
fn policies_under_audit_decide_nothing_and_give_one_verdict_with_those_in_force() {
    let (web, api) = (identity("shop/web"), identity("shop/api"));
    let audited = |policy| AuthorizationPolicy {
        audit: true,
        ..policy
    };
    let allow_web = policy("web", Action::Allow, vec![from(&[client("shop/web")])]);
    let allow_api = policy("api", Action::Allow, vec![from(&[client("shop/api")])]);
    let deny_web = policy("deny", Action::Deny, vec![from(&[client("shop/web")])]);
    let verdicts = |policies: &[AuthorizationPolicy]| {
        let authorization = compile(policies.to_vec());
        [&web, &api].map(|caller| {
            let call = call(Some(caller), None);
            let audit = authorization
                .audit(&call)
                .map(|denial| denial.policy.to_string());
            (authorization.judge(&call).is_ok(), audit)
        })
    };
    let would_deny = |policy: &str| (true, Some(policy.to_owned()));
    assert_eq!(
        verdicts(&[audited(allow_web.clone())]),
        [(true, None), would_deny("web")]
    );
    assert_eq!(
        verdicts(&[audited(deny_web.clone())]),
        [would_deny("deny"), (true, None)]
    );
    // One under audit allows nothing, and another one that allows the call counts.
    assert_eq!(
        verdicts(&[allow_web.clone(), audited(allow_api.clone())]),
        [(true, None), (false, None)]
    );
    assert_eq!(
        verdicts(&[audited(allow_web), audited(allow_api), deny_web]),
        [(false, None), (true, None)]
    );
}

#[test]
fn where_paths_have_to_be_plain_no_allow_and_every_deny_about_paths_matches_others() {
    let compile = |action, condition: &RequestMatch| {
        Authorization::compile(&proto::Authorization {
            policies: vec![policy("p", action, vec![about(condition.clone())])],
            plain_paths: true,
            ..proto::Authorization::default()
        })
    };
    let prefix = paths(&["prefix:/shop"]);
    let get_only = RequestMatch {
        methods: vec!["GET".into()],
        ..RequestMatch::default()
    };
    for (path, is_plain) in [
        ("/shop/a", true),
        ("/shop/caf%C3%A9", false),
        ("/shop/a;b=1", false),
        ("/shop//a", false),
        ("/shop/./a", false),
        ("/shop/\\a", false),
    ] {
        let head = get(path);
        let call = call(None, Some(&head));
        let passes = |action, condition| compile(action, condition).judge(&call).is_ok();
        assert_eq!(passes(Action::Allow, &prefix), is_plain, "{path}");
        let other = paths(&["prefix:/other"]);
        assert_eq!(passes(Action::Deny, &other), is_plain, "{path}");
        // Without a rule about paths, the path does not matter.
        assert!(passes(Action::Allow, &get_only), "{path}");
    }
}
