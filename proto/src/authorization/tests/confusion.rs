//! Paths that servers and proxies read in different ways. No policy lets them pass. The numbers in
//! comments refer to the list of failures of other meshes.

use super::*;

/// Asserts that no request passes a policy with this condition, and returns the number of requests.
pub(super) fn none_passes<'a, T: ?Sized + 'a>(
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
            "///host/admin",
            "////host/admin",
            "/\\/host/admin",
            "/\\\\/host/x/../admin",
            "//\\user@host:80/admin",
            "/%2F/host/admin",
            "/%5C/host/admin",
            "/.///host/admin",
            "/x/..//%2e/host/admin",
            "/x/..///host/admin",
            "///host/%2e%2e/%61dmin",
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
        ("exact:/x;y", &["/x;y", "/x%3By", "/x%3By;z/w"]),
        (
            "exact:/caf%C3%A9",
            &[
                "/caf%C3%A9",
                "/%63af%c3%a9",
                "/Caf%C3%A9/",
                "/x/../c%61f%C3%A9",
            ],
        ),
        ("prefix:/%7Eroot", &["/~root", "/%7eroot/x", "/~ROOT/x"]),
        (
            "prefix:/a%20b/c%2Fd",
            &["/%61%20b/c%2Fd/e", "/a%20%62/c%2fd"],
        ),
        ("suffix:%2Eenv", &["/x.env", "/x%2eenv", "/x.%65nv"]),
        (
            "template:/my%20files/{*}",
            &["/my%20files/a", "/m%79%20files/a%2Fb", "/MY%20files/a/"],
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
                "///public/public",
                "/\\/public/public",
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
