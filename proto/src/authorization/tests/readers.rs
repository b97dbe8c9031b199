//! The readings of paths contain what real libraries read. `proto/tests/readers` has their
//! programs, and `proto/tests/readers.rs` runs them over more paths and writes the table.

use super::*;

/// A path per line, and what a reader makes of it: NAME=PATH, separated by tabs.
const TABLE: &str = include_str!("../../../tests/readers/table.tsv");

/// How many readings a path has in addition to itself.
const MAX_OTHERS: usize = 63;

#[test]
fn readings_contain_what_named_readers_read() {
    let mut count = 0;
    for line in TABLE.lines() {
        let (path, read) = line.split_once('\t').expect("a path and its readings");
        let Some(others) = other_readings(path.as_bytes(), false) else {
            continue;
        };
        for (reader, reading) in read.split('\t').filter_map(|one| one.split_once('=')) {
            let is_known = others
                .iter()
                .any(|other| trimmed(other) == trimmed(reading.as_bytes()));
            assert!(is_known, "{reader} reads {path} as {reading}");
            count += 1;
        }
    }
    assert!(count >= 1000, "{count}");
}

#[test]
fn legitimate_paths_have_few_readings_and_pass() {
    for (pattern, path) in [
        (
            "prefix:/api/v4/projects",
            "/api/v4/projects/group%2Fproject/repository/files/src%2Fa%2Eb/raw",
        ),
        (
            "prefix:/api/v4",
            "/api/v4/projects/a%2Fb%2Fc%2Fd%2Fe/merge_requests/1",
        ),
        ("prefix:/bucket", "/bucket//key//x/a%20b%2Bc;d=e"),
        (
            "prefix:/bucket",
            "/bucket/photos/2026/%5Bx%5D/%3Bname=a%2Fb",
        ),
        (
            "prefix:/cars",
            "/cars/blue;year=2026;trim=x/doors;count=4/wheels;size=17%22",
        ),
        ("prefix:/cars", "/cars/blue%3Byear=2026/doors;count=4"),
        (
            "prefix:/wiki",
            "/wiki/%E6%97%A5%E6%9C%AC%E8%AA%9E/%C3%A9;lang=fr",
        ),
        ("prefix:/wiki", "/wiki/a%5Cb/c%3A%2F%2Fd"),
        ("prefix:/proxy", "/proxy/https://example.com//a/./b/../c"),
        (
            "prefix:/proxy",
            "/proxy/https%3A%2F%2Fexample.com%2Fa%2F%2Fb;c",
        ),
        ("prefix:/.well-known", "/.well-known/acme-challenge/x;y"),
    ] {
        let others = other_readings(path.as_bytes(), false).map(|others| others.len());
        assert!(
            others.is_some_and(|count| count <= MAX_OTHERS),
            "{path}: {others:?}"
        );
        assert!(
            passes(Action::Allow, &paths(&[pattern]), &get(path)),
            "{path}"
        );
        assert!(
            passes(Action::Deny, &paths(&["prefix:/never"]), &get(path)),
            "{path}"
        );
    }
}

#[test]
fn certain_elements_are_those_of_all_readings() {
    for (path, is_certain) in [
        ("/", true),
        ("/a/b/", true),
        ("/a.b/%61/%C3%A9/c;d=e/f%3Bg", true),
        ("/projects/a%2Fb", false),
        ("/a//b", false),
        ("//a", false),
        ("/a//", false),
        ("/a/./b", false),
        ("/a/../b", false),
        ("/a/%2e%2E/b", false),
        ("/a/..;x/b", false),
        ("/a/.%3Bx", false),
        ("/a/;x/b", false),
        ("/a\\b", false),
        ("/a%5cb", false),
        ("/a%zz", false),
        ("/a%c0%af", false),
        ("/a%00", false),
        ("a", false),
    ] {
        assert_eq!(has_certain_elements(path.as_bytes()), is_certain, "{path}");
    }
    let elements = |path: &[u8]| trimmed(path).split(|byte| *byte == b'/').count();
    let paths = TABLE.lines().filter_map(|line| line.split('\t').next());
    let paths = paths.filter(|path| !path.contains(';') && !path.contains("%3B"));
    for path in paths.filter(|path| has_certain_elements(path.as_bytes())) {
        for other in other_readings(path.as_bytes(), false).unwrap_or_default() {
            assert_eq!(elements(&other), elements(path.as_bytes()), "{path}");
        }
    }
}

/// A path without slashes at its end, and with at most two at its start.
fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/');
    let mut path = &path[..end.map_or(0, |end| end + 1)];
    while path.starts_with(b"///") {
        path = &path[1..];
    }
    path
}
