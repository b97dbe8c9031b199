//! Methods, hosts, fields and clients that servers and proxies read in different ways. No policy
//! lets them pass. The numbers in comments refer to the list of failures of other meshes.

use super::confusion::none_passes;
use super::*;

#[test]
fn methods_are_read_in_upper_case_too() {
    let methods = |method: &str| RequestMatch {
        methods: vec![method.into()],
        ..RequestMatch::default()
    };
    let head = |method: &str| Head {
        method: method.into(),
        ..get("/")
    };
    none_passes(
        Action::Deny,
        &methods("POST"),
        head,
        ["POST", "post", "Post", "pOST"],
    );
    // A WebSocket over HTTP/2, of which HTTP/1.1 has a GET.
    none_passes(Action::Deny, &methods("GET"), head, ["CONNECT", "connect"]);
    // Servers answer HEAD as GET.
    none_passes(Action::Deny, &methods("GET"), head, ["HEAD", "head"]);
    assert!(passes(Action::Deny, &methods("HEAD"), &head("GET")));
    assert!(passes(Action::Deny, &methods("POST"), &head("HEAD")));
    assert!(passes(Action::Allow, &methods("HEAD"), &head("HEAD")));
    assert!(passes(Action::Allow, &methods("CONNECT"), &head("CONNECT")));
    none_passes(
        Action::Allow,
        &methods("GET"),
        head,
        ["get", "Get", "GETX", "", "POST", "CONNECT", "HEAD"],
    );
    assert!(passes(Action::Allow, &methods("GET"), &head("GET")));
    assert!(passes(Action::Deny, &methods("POST"), &head("GET")));
}

#[test]
fn authorization_servers_of_get_are_asked_about_head() {
    let mut policy = policy(
        "p",
        Action::ExternalAuth,
        vec![about(RequestMatch {
            methods: vec!["GET".into()],
            ..RequestMatch::default()
        })],
    );
    policy.authorizer = Some(Authorizer::default());
    let policies = compile(vec![policy]);
    for (method, expected) in [("HEAD", vec![0]), ("GET", vec![0]), ("POST", vec![])] {
        let head = Head {
            method: method.into(),
            ..get("/")
        };
        assert_eq!(
            policies.external(&call(None, Some(&head))),
            expected,
            "{method}"
        );
    }
}

#[test]
fn conditions_on_fields_judge_a_bounded_number_of_values() {
    let fields = |count: usize| Head {
        fields: (0..count)
            .map(|at| (b"x-a".to_vec(), at.to_string().into_bytes()))
            .collect(),
        ..get("/")
    };
    let conditions = |count: usize, action| {
        let rules = (0..count).map(|at| about(header("x-a", &format!("exact:no{at}"))));
        compile(vec![policy("p", action, rules.collect())])
    };
    let passes = |conditions: &super::Authorization, head: &Head| {
        conditions.judge(&call(None, Some(head))).is_ok()
    };
    for count in [256, 2048] {
        let (deny, allow) = (
            conditions(count, Action::Deny),
            conditions(count, Action::Allow),
        );
        // 1,300 lines: what is not judged may match.
        assert!(!passes(&deny, &fields(1300)) && !passes(&allow, &fields(1300)));
        // Ordinary requests are judged by all conditions.
        assert!(passes(&deny, &fields(20)) && !passes(&allow, &fields(20)));
    }
    let calls = std::cell::Cell::new(0);
    struct Counted<'a>(Head, &'a std::cell::Cell<usize>);
    impl Request for Counted<'_> {
        fn method(&self) -> &[u8] {
            self.0.method()
        }
        fn path(&self) -> &[u8] {
            self.0.path()
        }
        fn hosts(&self, each: &mut dyn FnMut(&[u8])) {
            self.0.hosts(each);
        }
        fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
            self.1.set(self.1.get() + 1);
            self.0.fields(each);
        }
    }
    let head = Counted(fields(1300), &calls);
    assert!(
        conditions(2048, Action::Deny)
            .judge(&call(None, Some(&head)))
            .is_err()
    );
    assert_eq!(calls.get(), 1, "the lines are read once");
}

/// 6.
#[test]
fn no_spelling_of_a_host_passes() {
    let heads = |all: &[&[&str]]| {
        all.iter()
            .map(|hosts| with_hosts(hosts))
            .collect::<Vec<_>>()
    };
    let denied = heads(&[
        &["admin.example.com"],
        &["ADMIN.example.com"],
        &["admin.example.com."],
        &["admin.example.com:8080"],
        &["Admin.Example.Com.:443"],
        &["admin.example.com:"],
        &["other", "admin.example.com"],
        &["admin.example.com", "other"],
        &[],
        &[""],
        &["user@admin.example.com"],
        &["admin.example.com,other"],
        &["admin.example.com other"],
        &["admin.example.com:80x"],
        &["admin.example.com:80:80"],
        &["admin%2eexample.com"],
        &["admin..example.com"],
        &["admin.example.com.."],
        &["admin.example.com/"],
        &["\u{ff41}dmin.example.com"],
        &["[admin.example.com]"],
    ]);
    none_passes(
        Action::Deny,
        &hosts(&["admin.example.com"]),
        Clone::clone,
        &denied,
    );
    let denied = heads(&[
        &["a.example.com"],
        &["A.B.EXAMPLE.com:80"],
        &["a.example.com."],
        &["x", "a.example.com"],
    ]);
    none_passes(
        Action::Deny,
        &hosts(&["*.example.com"]),
        Clone::clone,
        &denied,
    );
    let denied = heads(&[
        &["example.com"],
        &[".example.com"],
        &["aexample.com"],
        &["a.example.com.evil.org"],
        &["a.example.com", "evil.org"],
        &["evil.org", "a.example.com"],
        &["a.example.com@evil.org"],
        &["evil.org:a.example.com"],
        &["a.example.com:x"],
        &[],
    ]);
    none_passes(
        Action::Allow,
        &hosts(&["*.example.com"]),
        Clone::clone,
        &denied,
    );
    for hosts_of in [
        &["a.b.example.com"][..],
        &["A.example.com.:80"],
        &["a.example.com", "b.example.com:80"],
    ] {
        assert!(passes(
            Action::Allow,
            &hosts(&["*.example.com"]),
            &with_hosts(hosts_of)
        ));
    }
    for host in ["example.com", "[::1]:80", "10.0.0.1", "web"] {
        assert!(passes(
            Action::Deny,
            &hosts(&["admin.example.com"]),
            &with_hosts(&[host])
        ));
    }
}

/// 3.
#[test]
fn no_way_to_split_join_or_spell_a_field_passes() {
    for (name, value, fields) in [
        ("x-role", "exact:admin", &[("x-role", "admin")][..]),
        ("x-role", "exact:admin", &[("X-ROLE", "admin")]),
        ("x-role", "exact:admin", &[("x_role", "admin")]),
        ("x-role", "exact:admin", &[("x.role", "admin")]),
        ("x-role", "exact:admin", &[("x-role", " admin\t")]),
        (
            "x-role",
            "exact:admin",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        (
            "x-role",
            "exact:admin",
            &[("x-role", "admin"), ("x-role", "user")],
        ),
        (
            "x-role",
            "exact:admin",
            &[("x-role", "user"), ("x_role", "admin")],
        ),
        ("x-role", "exact:admin", &[("x-role", "user,admin")]),
        ("x-role", "exact:admin", &[("x-role", "user , admin")]),
        (
            "x-role",
            "exact:user,admin",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        (
            "x-role",
            "exact:user, admin",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        (
            "x-role",
            "suffix:r,admin",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        (
            "x-role",
            "prefix:user,a",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        ("x-role", "present:", &[("X_Role", "")]),
        (
            "cookie",
            "exact:a=1; b=2",
            &[("cookie", "a=1"), ("cookie", "b=2")],
        ),
        (
            "accept",
            "exact:text/html",
            &[("accept", "image/png, text/html")],
        ),
        (
            "accept",
            "prefix:text/",
            &[("accept", "image/png,text/html")],
        ),
    ] {
        none_passes(Action::Deny, &header(name, value), with_fields, [fields]);
    }
    for (name, value, fields) in [
        ("x-role", "exact:user", &[][..]),
        ("x-role", "exact:user", &[("x-role", "User")]),
        ("x-role", "exact:user", &[("x-role", "user,admin")]),
        (
            "x-role",
            "exact:user",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        (
            "x-role",
            "exact:user",
            &[("x-role", "admin"), ("x-role", "user")],
        ),
        (
            "x-role",
            "exact:user",
            &[("x-role", "user"), ("X_Role", "admin")],
        ),
        ("x-role", "exact:user", &[("x_role", "user")]),
        ("x-role", "exact:user", &[("other", "user")]),
        (
            "x-role",
            "exact:user,admin",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        (
            "x-role",
            "prefix:user",
            &[("x-role", "user"), ("x-role", "admin")],
        ),
        ("x-role", "present:", &[("x_role", "user")]),
        (
            "accept",
            "prefix:text/",
            &[("accept", "text/html, image/png")],
        ),
        (
            "accept",
            "suffix:/png",
            &[("accept", "text/html, image/png")],
        ),
        (
            "x-forwarded-for",
            "prefix:10.",
            &[("x-forwarded-for", "10.0.0.1, 192.0.2.1")],
        ),
    ] {
        none_passes(Action::Allow, &header(name, value), with_fields, [fields]);
    }
    for (name, value, fields) in [
        ("x-role", "exact:user", &[("X-Role", "user")][..]),
        ("x-role", "exact:user,admin", &[("x-role", "user,admin")]),
        ("x-role", "present:", &[("x-role", "")]),
        ("x-role", "prefix:a", &[("x-role", "ab"), ("x-role", "ac")]),
        (
            "accept",
            "prefix:text/",
            &[("accept", "text/html, text/plain")],
        ),
        (
            "user-agent",
            "prefix:Mozilla",
            &[("user-agent", "Mozilla/5.0 (X11, Linux)")],
        ),
    ] {
        assert!(
            passes(Action::Allow, &header(name, value), &with_fields(fields)),
            "{value} {fields:?}"
        );
    }
    assert!(passes(
        Action::Deny,
        &header("x-role", "exact:admin"),
        &with_fields(&[("x-role", "administrator")])
    ));
}

/// 2 and 4.
#[test]
fn no_client_passes_as_another() {
    let not_from = |sources: &[AuthorizationSource]| AuthorizationRule {
        not_sources: sources.to_vec(),
        ..rule()
    };
    let other = Identity::new("other.org", "shop", "web.v2").unwrap();
    let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
    let client_of = |text: &str| Some(identity(text));
    for (action, rule, caller) in [
        (Action::Deny, from(&[client("shop/")]), None),
        (Action::Deny, from(&[client("/")]), None),
        (Action::Deny, from(&[client("shop/web")]), None),
        (Action::Deny, from(&[unauthenticated()]), None),
        (Action::Deny, not_from(&[client("shop/")]), None),
        (
            Action::Deny,
            not_from(&[client("shop/")]),
            client_of("bank/web"),
        ),
        (
            Action::Deny,
            from(&[client("shop/")]),
            client_of("shop/web"),
        ),
        (Action::Deny, from(&[client("/web")]), client_of("shop/web")),
        (Action::Deny, from(&[block("10.0.0.0/8")]), None),
        (Action::Deny, from(&[block("0.0.0.0/0")]), None),
        (Action::Deny, from(&[block("::ffff:10.0.0.0/104")]), None),
        (Action::Deny, from(&[block("10.0.0.0/33")]), None),
        (Action::Deny, from(&[block("10.0.0.1")]), None),
        (Action::Deny, from(&[block("10.0.0.1/8")]), None),
        (Action::Deny, not_from(&[block("fd00::/8")]), None),
        (Action::Allow, from(&[client("shop/")]), None),
        (Action::Allow, from(&[client("/")]), None),
        (Action::Allow, not_from(&[client("bank/")]), None),
        (Action::Allow, not_from(&[block("10.0.0.0/8")]), None),
        (
            Action::Allow,
            from(&[unauthenticated()]),
            client_of("shop/web"),
        ),
        (
            Action::Allow,
            from(&[client("shop/web.v2")]),
            client_of("shop/web-v2"),
        ),
        (
            Action::Allow,
            from(&[client("shop/web.v2")]),
            client_of("shop/webxv2"),
        ),
        (
            Action::Allow,
            from(&[client("shop/web.v2")]),
            Some(other.clone()),
        ),
        (Action::Allow, from(&[client("shop/")]), Some(other.clone())),
        (
            Action::Allow,
            from(&[client("shop/web")]),
            client_of("shop/web.v2"),
        ),
        (
            Action::Allow,
            from(&[client("shop/")]),
            client_of("shop-2/web"),
        ),
        (
            Action::Allow,
            from(&[client("shop/")]),
            client_of("web/shop"),
        ),
        (Action::Allow, from(&[block("::/0")]), None),
        (Action::Allow, from(&[block("fd00::/8")]), None),
        (Action::Allow, from(&[block("10.0.0.2/32")]), None),
    ] {
        let policy = policy("p", action, vec![rule.clone()]);
        let authorization = compile(vec![policy]);
        for address in [mapped, mapped.to_canonical()] {
            let call = Call {
                address,
                ..call(caller.as_ref(), None)
            };
            assert!(
                authorization.judge(&call).is_err(),
                "{action:?} {rule:?} {caller:?} {address}"
            );
        }
    }
}
