//! Requests and clients that servers and proxies read in different ways. None passes. The numbers
//! in comments are those of the list of failures of other meshes.

use super::*;

/// Asserts that none of the requests passes a policy with this condition, and returns their number.
fn none_passes<'a, T: ?Sized + 'a>(
    action: Action,
    condition: &RequestMatch,
    head: impl Fn(&'a T) -> Head,
    requests: impl IntoIterator<Item = &'a T>,
) -> usize {
    let requests = requests.into_iter().map(head);
    let denied = requests.map(|head| {
        assert!(
            !passes(action, condition, &head),
            "{action:?} {condition:?} passed {head:?}"
        );
    });
    denied.count()
}

fn no_path_passes(action: Action, pattern: &str, paths: &[&str]) -> usize {
    none_passes(
        action,
        &super::paths(&[pattern]),
        get,
        paths.iter().copied(),
    )
}

/// 5.
#[test]
fn no_spelling_of_a_denied_path_passes() {
    let mut count = no_path_passes(
        Action::Deny,
        "prefix:/admin",
        &[
            "/admin",
            "/admin/",
            "/admin/x",
            "/ADMIN",
            "/Admin/x",
            "//admin",
            "///admin//x",
            "/./admin",
            "/x/../admin",
            "/x/y/../../admin",
            "/x/..//admin",
            "/x//../admin",
            "/../admin",
            "/%61dmin",
            "/%41DMIN",
            "/admin%2Fx",
            "/admin%2fx",
            "/%2Fadmin",
            "/%2e/admin",
            "/x/%2e%2e/admin",
            "/x/%2E./admin",
            "/x%2F..%2Fadmin",
            "/\\admin",
            "/%5Cadmin",
            "/%5cadmin",
            "/x\\..\\admin",
            "/x/..\\admin",
            "/x/..%5Cadmin",
            "/admin\\x",
            "/admin;x=1",
            "/admin;x=1/y",
            "/admin;/x",
            "/;x/admin",
            "/x/..;/admin",
            "/x/..;a=b/admin",
            "/x/..;%2Fadmin",
            "/x/%2e%2e;/admin",
            "/x/..%3B/admin",
            "/admin%3Bx",
            "/admin%3Bx/y",
            "/admin;%2Fx",
            "/admin#x",
            "/admin?x",
            "/x#/../admin",
            "/admin%00",
            "/admin%00.html",
            "/admin%0a",
            "/admin%",
            "/%zzadmin",
            "/admin%u002f",
            "/%c0%afadmin",
            "//host/admin",
            "/\\host/admin",
            "\\admin",
            "admin",
            "",
        ],
    );
    for (pattern, paths) in [
        (
            "exact:/admin/users",
            &[
                "/admin/users/",
                "/admin/users//",
                "/admin//users",
                "/admin/./users",
                "/admin/users/.",
                "/admin/users/x/..",
                "/admin;a/users;b",
                "/admin/%75sers",
                "/ADMIN/USERS/",
                "/admin%2Fusers",
            ][..],
        ),
        (
            "exact:/admin/",
            &["/admin", "/Admin", "/admin//", "/admin/;x"],
        ),
        (
            "exact:/projects/a%2Fb",
            &["/projects/a%2Fb", "/projects/a%2fb", "/pr%6fjects/a%2Fb"],
        ),
        (
            "exact:/bucket//key",
            &["/bucket//key", "/bucket//key/", "/bucket/%2Fkey"],
        ),
        (
            "prefix:/a/b/c",
            &["/a//../b//../a//b/c", "/a/b//c", "/x//../a/b//c"],
        ),
        (
            "suffix:.php",
            &[
                "/x.PHP",
                "/x.php/",
                "/x.ph%70",
                "/x.php;a.html",
                "/x.php%3Ba",
                "/x.php%00.html",
                "/a;x.php",
            ],
        ),
        (
            "template:/files/{*}",
            &[
                "/f%69les/a%2Fb",
                "/files//a",
                "/files/a/",
                "/FILES/a",
                "/files/a;b=c",
                "/files;x/a",
            ],
        ),
        (
            "template:/users/{*}/delete",
            &[
                "/users/1/delete/",
                "/users/1%2Fdelete",
                "/users//1/delete",
                "/users/1/x/../delete",
                "/Users/1/Delete",
            ],
        ),
        (
            "template:/users/{**}",
            &["/users", "/users/", "/users/1/2", "/users;x/1", "/USERS"],
        ),
    ] {
        count += no_path_passes(Action::Deny, pattern, paths);
    }
    assert!(count >= 80, "{count}");
}

/// 5.
#[test]
fn no_path_passes_of_which_a_reading_is_not_allowed() {
    for (pattern, paths) in [
        (
            "prefix:/public",
            &[
                "/admin",
                "/publicity",
                "/PUBLIC/x",
                "/public/../admin",
                "/public/..",
                "/public/..%2fadmin",
                "/public/%2e%2e/admin",
                "/public/%2E%2E%2Fadmin",
                "/public%2F..%2Fadmin",
                "/public/..\\admin",
                "/public/..%5cadmin",
                "/public/..;/admin",
                "/public/..;x/admin",
                "/public/..%3B/admin",
                "/public//../../admin",
                "/public//../admin",
                "/public;/../admin",
                "/public;x/y",
                "/public%3Bx/y",
                "//public",
                "/x/../public",
                "/%70ublic",
                "/public/%00",
                "/public/x%0d%0ay",
                "/public/x%zz",
                "/public/%ff",
                "/public#/../../admin",
                "/public?/../admin",
                "public",
                "*",
                "",
            ][..],
        ),
        ("exact:/", &["//", "/;x", "/%2F", "/x/..", "/."]),
        ("exact:/a", &["/a/", "/A", "/a;x", "/a%3Bx"]),
        (
            "template:/a/{*}",
            &[
                "/a",
                "/a/",
                "/a//",
                "/a//b",
                "/a/b/",
                "/a/b%2Fc",
                "/a/..",
                "/a/%2e%2e",
                "/a/;x",
                "/a/%2Fb",
                "/a/b\\c",
            ],
        ),
        (
            "suffix:.css",
            &[
                "/admin;.css",
                "/admin;x.css",
                "/admin%3B.css",
                "/admin/;x.css",
                "/x.css/..",
                "/admin%00.css",
                "/admin#.css",
            ],
        ),
    ] {
        no_path_passes(Action::Allow, pattern, paths);
    }
}

#[test]
fn encoded_slashes_doubled_slashes_and_matrix_parameters_pass_where_they_are_allowed() {
    for (patterns, path) in [
        // GitLab.
        (
            &["prefix:/api/v4/projects"][..],
            "/api/v4/projects/group%2Fproject/issues",
        ),
        (
            &["template:/api/v4/projects/{**}"],
            "/api/v4/projects/group%2Fproject",
        ),
        (
            &["exact:/projects/a%2Fb", "exact:/projects/a/b"],
            "/projects/a%2Fb",
        ),
        (
            &["template:/projects/{*}", "template:/projects/{*}/{*}"],
            "/projects/a%2Fb",
        ),
        // S3.
        (&["prefix:/bucket"], "/bucket//key"),
        (&["template:/bucket/{**}"], "/bucket//a///b"),
        (&["exact:/bucket//key", "exact:/bucket/key"], "/bucket//key"),
        (&["prefix:/bucket"], "/bucket/a%20b%2Bc"),
        // Matrix parameters.
        (&["prefix:/cars"], "/cars/blue;year=2026/doors;count=4"),
        (&["template:/cars/{*}"], "/cars/blue;year=2026"),
        (&["exact:/cars;year=2026", "exact:/cars"], "/cars;year=2026"),
        (&["prefix:/"], "/../a/./b\\c;d%2F//e"),
        (&["prefix:/.well-known"], "/.well-known/acme"),
        (&["prefix:/caf\u{e9}", "prefix:/caf%C3%A9"], "/caf%C3%A9/x"),
    ] {
        assert!(
            passes(Action::Allow, &paths(patterns), &get(path)),
            "{patterns:?} {path}"
        );
    }
}

#[test]
fn paths_that_no_server_reads_as_denied_pass() {
    for (pattern, path) in [
        ("prefix:/admin", "/administrator"),
        ("prefix:/admin", "/x/admin"),
        ("exact:/admin", "/admin/x"),
        ("suffix:.php", "/php"),
        ("template:/files/{*}", "/files"),
        ("template:/files/{*}", "/files/a/b"),
        ("template:/users/{*}/delete", "/users/1/edit"),
    ] {
        assert!(
            passes(Action::Deny, &paths(&[pattern]), &get(path)),
            "{pattern} {path}"
        );
    }
}

#[test]
fn long_paths_and_paths_with_too_many_readings_do_not_pass() {
    let long = format!("/{}", "a".repeat(64 * 1024));
    let many = "/a;b//../%2e%2e\\c%3Bd%2F//;e/..;f%5C..%2f%2F/g/%2e/".repeat(20);
    for path in [&long, &many] {
        no_path_passes(Action::Allow, "prefix:/", &[path]);
        no_path_passes(Action::Deny, "exact:/never", &[path]);
    }
}

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
    none_passes(
        Action::Allow,
        &methods("GET"),
        head,
        ["get", "Get", "GETX", "", "POST"],
    );
    assert!(passes(Action::Allow, &methods("GET"), &head("GET")));
    assert!(passes(Action::Deny, &methods("POST"), &head("GET")));
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
