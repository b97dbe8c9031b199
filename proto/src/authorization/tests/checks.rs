//! The contents that a policy may have.

use super::*;
use crate::authorization::check;
use crate::mesh::v1::authorizer::Protocol;

fn checked(action: Action, rule: AuthorizationRule) -> String {
    let result = check(&policy("p", action, vec![rule]));
    result.map_or_else(|error| error.to_string(), |()| "valid".into())
}

#[test]
fn accepts_what_a_proxy_knows() {
    for rule in [
        rule(),
        from(&[]),
        from(&[
            client("shop/"),
            client("/"),
            block("10.0.0.0/8"),
            block("fd00::/8"),
            unauthenticated(),
        ]),
        about(paths(&[
            "exact:/",
            "exact:/a%2Fb//c",
            "exact:/a;v=1",
            "prefix:/a/",
            "prefix:/pkg.Service",
            "suffix:.html",
            "template:/a/{*}/b/{**}",
            "template:/{**}",
            "exact:/caf\u{e9}",
        ])),
        about(hosts(&["api.example.com", "*.example.com", "web"])),
        about(header("x-role", "exact:a, b")),
        about(header("accept", "present:")),
    ] {
        assert_eq!(checked(Action::Allow, rule.clone()), "valid", "{rule:?}");
    }
}

#[test]
fn rejects_what_no_proxy_could_match_and_names_the_field() {
    let method = |method: &str| {
        about(RequestMatch {
            methods: vec![method.into()],
            ..RequestMatch::default()
        })
    };
    let ports = |port| AuthorizationRule {
        ports: vec![port],
        ..rule()
    };
    let of_revision = |revision| AuthorizationRule { revision, ..rule() };
    let long = format!("prefix:/{}", "a".repeat(1024));
    let deep = format!("template:{}", "/{*}".repeat(33));
    for (rule, field) in [
        (of_revision(0), "rules.revision"),
        (of_revision(REVISION + 1), "rules.revision"),
        (ports(0), "rules.ports"),
        (ports(65_536), "rules.ports"),
        (
            from(&[AuthorizationSource { kind: None }]),
            "rules.sources[0].type",
        ),
        (from(&[client("Shop/web")]), "rules.sources[0].identity"),
        (from(&[client("*/web")]), "rules.sources[0].identity"),
        (from(&[block("10.0.0.0")]), "rules.sources[0].ipBlock"),
        (from(&[block("10.0.0.0/33")]), "rules.sources[0].ipBlock"),
        (from(&[block("10.0.0.0/+8")]), "rules.sources[0].ipBlock"),
        (from(&[block("10.0.0.1/8")]), "rules.sources[0].ipBlock"),
        (from(&[block("fd00::/129")]), "rules.sources[0].ipBlock"),
        (from(&vec![client("shop/"); 65]), "rules.sources"),
        (method(""), "rules.requests[0].methods[0]"),
        (method("get"), "rules.requests[0].methods[0]"),
        (method("A B"), "rules.requests[0].methods[0]"),
        (
            about(RequestMatch {
                paths: vec![AuthorizedPath { kind: None }],
                ..RequestMatch::default()
            }),
            "rules.requests[0].paths[0].type",
        ),
        (
            about(paths(&["exact:a"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["exact:"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["exact:/a?b"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["exact:/a#b"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["exact:/a/../b"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["exact:/a/{*}"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["prefix:/a\\b"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["prefix:/a%2"])),
            "rules.requests[0].paths[0].value",
        ),
        (about(paths(&[&long])), "rules.requests[0].paths[0].value"),
        (
            about(paths(&["suffix:"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["suffix:\n"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["template:/{**}/a"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["template:/a{*}"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["template:/{a}"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["template:{**}"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["template:/a//{*}"])),
            "rules.requests[0].paths[0].value",
        ),
        (
            about(paths(&["template:/a/{*}/"])),
            "rules.requests[0].paths[0].value",
        ),
        (about(paths(&[&deep])), "rules.requests[0].paths[0].value"),
        (about(hosts(&[""])), "rules.requests[0].hosts[0]"),
        (about(hosts(&["*"])), "rules.requests[0].hosts[0]"),
        (
            about(hosts(&["a.example.com:80"])),
            "rules.requests[0].hosts[0]",
        ),
        (
            about(hosts(&["a.*.example.com"])),
            "rules.requests[0].hosts[0]",
        ),
        (
            about(header("", "present:")),
            "rules.requests[0].headers[0].name",
        ),
        (
            about(header("a b", "present:")),
            "rules.requests[0].headers[0].name",
        ),
        (
            about(header("host", "present:")),
            "rules.requests[0].headers[0].name",
        ),
        (
            about(header("X_Called_By", "present:")),
            "rules.requests[0].headers[0].name",
        ),
        (
            about(header("x-role", "exact:")),
            "rules.requests[0].headers[0].value",
        ),
        (
            about(header("x-role", "prefix: a")),
            "rules.requests[0].headers[0].value",
        ),
    ] {
        let error = checked(Action::Allow, rule.clone());
        assert!(
            error.starts_with(&format!("{field}: ")),
            "{rule:?}: {error}"
        );
    }
}

#[test]
fn rejects_unknown_actions_and_too_many_rules() {
    let check = |policy| check(&policy).map_err(|violation| violation.field);
    assert_eq!(check(AuthorizationPolicy::default()), Err("action".into()));
    assert_eq!(
        check(policy("p", Action::Allow, vec![rule(); 129])),
        Err("rules".into())
    );
    let ports = AuthorizationPolicy {
        ports: vec![0],
        ..policy("p", Action::Allow, vec![])
    };
    assert_eq!(check(ports), Err("ports".into()));
}

/// 1.
#[test]
fn a_deny_rule_about_requests_requires_ports() {
    let about_paths = about(paths(&["prefix:/admin"]));
    assert!(checked(Action::Deny, about_paths.clone()).starts_with("rules.ports: "));
    assert_eq!(checked(Action::Allow, about_paths.clone()), "valid");
    let with_ports = AuthorizationRule {
        ports: vec![80],
        ..about_paths.clone()
    };
    assert_eq!(checked(Action::Deny, with_ports), "valid");
    let policy = AuthorizationPolicy {
        ports: vec![80],
        ..policy("p", Action::Deny, vec![about_paths])
    };
    assert_eq!(check(&policy), Ok(()));
}

#[test]
fn checks_authorization_servers() {
    let valid = Authorizer {
        backend: "auth/server:9000".into(),
        protocol: Protocol::Http.into(),
        path: "/check".into(),
        request_fields: vec!["cookie".into()],
        response_fields: vec!["x-user".into()],
        timeout: 1000,
        fail_open: false,
        max_body: 0,
    };
    let external = |authorizer| AuthorizationPolicy {
        authorizer,
        ..policy("p", Action::ExternalAuth, vec![rule()])
    };
    let check = |policy: &AuthorizationPolicy| check(policy).map_err(|violation| violation.field);
    assert_eq!(check(&external(Some(valid.clone()))), Ok(()));
    assert_eq!(check(&external(None)), Err("externalAuth".into()));
    let deny = AuthorizationPolicy {
        action: Action::Deny.into(),
        ..external(Some(valid.clone()))
    };
    assert_eq!(check(&deny), Err("externalAuth".into()));
    let audited = AuthorizationPolicy {
        audit: true,
        ..external(Some(valid.clone()))
    };
    assert_eq!(check(&audited), Err("mode".into()));
    type Change = fn(&mut Authorizer);
    let with_body = AuthorizationPolicy {
        action: Action::ExternalAuthWithBody.into(),
        ..external(Some(Authorizer {
            max_body: 65_535,
            ..valid.clone()
        }))
    };
    assert_eq!(check(&with_body), Ok(()));
    let without_size = AuthorizationPolicy {
        authorizer: Some(valid.clone()),
        ..with_body.clone()
    };
    let size = "externalAuth.forwardBody.maxSize";
    assert_eq!(check(&without_size), Err(size.into()));
    let mut too_large = with_body;
    too_large.authorizer.as_mut().unwrap().max_body = 65_536;
    assert_eq!(check(&too_large), Err(size.into()));
    let changes: [(Change, &str); 10] = [
        (|one| one.backend.clear(), "externalAuth.backendRef"),
        (|one| one.protocol = 0, "externalAuth.protocol"),
        (
            |one| one.protocol = Protocol::Grpc.into(),
            "externalAuth.http",
        ),
        (|one| one.path = "check".into(), "externalAuth.http.path"),
        (|one| one.path = "/a b".into(), "externalAuth.http.path"),
        (
            |one| one.response_fields = vec!["X_Called_By".into()],
            "externalAuth.allowedResponseHeaders",
        ),
        (
            |one| one.request_fields = vec!["a b".into()],
            "externalAuth.allowedHeaders",
        ),
        // Proxies that do not know the field would ask without it.
        (|one| one.max_body = 1, size),
        (|one| one.timeout = 0, "externalAuth.timeout"),
        (|one| one.timeout = 60_001, "externalAuth.timeout"),
    ];
    for (change, field) in changes {
        let mut changed = valid.clone();
        change(&mut changed);
        assert_eq!(check(&external(Some(changed))), Err(field.into()));
    }
}
