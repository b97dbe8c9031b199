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
    let stranger = identity("stranger/web");
    let denial = authorization
        .judge(&call(Some(&stranger), None))
        .unwrap_err();
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
