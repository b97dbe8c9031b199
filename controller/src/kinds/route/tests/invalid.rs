//! Invalid rules: which requests fail, and what the author is told.

use super::*;

/// A match that cannot be read.
fn unreadable() -> Value {
    json!({"path": {"type": "RegularExpression", "value": "("}})
}

/// A rule for a prefix that cannot be applied.
fn unapplied(path: &str) -> Value {
    let filter = json!({"type": "RequestRedirect", "requestRedirect": {"statusCode": 200}});
    json!({"matches": [prefix(path)], "filters": [filter]})
}

/// A rule with a filter that protects its requests.
fn protected(matches: Value) -> Value {
    json!({"matches": matches, "filters": [{"type": "ExternalAuth"}]})
}

/// Each match of a table as its prefix, with the backend or "500".
fn effects(table: &Table) -> Vec<String> {
    let effect = |(rule, one): &(u32, std::sync::Arc<super::super::model::Match>)| {
        let rule = table.rules[*rule as usize].message();
        let path = match one.path() {
            Some(diy_mesh_proto::mesh::v1::path_match::Kind::Prefix(path)) => path,
            None => "rest",
            other => panic!("{other:?}"),
        };
        let backend = rule.backends.first().map(|backend| &*backend.name);
        assert_eq!(rule.invalid, backend.is_none(), "{rule:?}");
        let backend = backend.and_then(|name| name.strip_suffix(":80"));
        format!("{path} {}", backend.unwrap_or("500"))
    };
    table.matches.iter().map(effect).collect()
}

/// The effects of an HTTPRoute with these rules, and its conditions.
fn of(rules: Value) -> (Vec<String>, Vec<String>) {
    let routes = [route("r", 0, rules)];
    let attachment = attach_all(&routes);
    let conditions = conditions(&attachment, Kind::HttpRoute, "shop", "r");
    (effects(&attachment.tables[&80]), conditions)
}

const PARTIAL: [&str; 3] = [
    "Accepted Accepted",
    "ResolvedRefs ResolvedRefs",
    "PartiallyInvalid UnsupportedValue",
];

#[test]
fn requests_of_a_rule_that_cannot_be_applied_fail() {
    let (effects, conditions) = of(json!([rule("a", json!([prefix("/a")])), unapplied("/b")]));
    assert_eq!(effects, ["/a shop/a", "/b 500"]);
    assert_eq!(conditions, PARTIAL);
    let (effects, conditions) = of(json!([unapplied("/b")]));
    assert_eq!(effects, ["/b 500"]);
    assert_eq!(conditions, ["not Accepted UnsupportedValue"]);
    // The same for a field with the wrong type, and for a backend.
    for field in [
        json!({"timeouts": {"request": 7}}),
        json!({"backendRefs": [{"name": "a", "weight": -1}]}),
        json!({"filters": 7}),
    ] {
        let rule = with(json!({"matches": [prefix("/b")]}), field.clone());
        assert_eq!(of(json!([rule])).0, ["/b 500"], "{field}");
    }
}

#[test]
fn rule_with_a_match_that_cannot_be_read_is_dropped_whole() {
    let both = json!([prefix("/b"), unreadable()]);
    let rules = json!([rule("a", json!([prefix("/a")])), rule("b", both)]);
    let route = route("r", 0, rules.clone());
    let (effects, conditions) = of(rules);
    assert_eq!(effects, ["/a shop/a"]);
    assert_eq!(conditions, PARTIAL);
    let message = route.invalid.unwrap().message;
    let expected = "Dropped Rule: spec.rules[1].matches[1].path.value: \"(\" is not a regular \
                    expression";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.ends_with("; the rule has no effect"), "{message}");
}

#[test]
fn protected_requests_never_pass_without_their_filter() {
    let valid = rule("a", json!([prefix("/a")]));
    let rule = protected(json!([prefix("/b"), unreadable()]));
    let (effects, conditions) = of(json!([valid, rule]));
    assert_eq!(effects, ["/a shop/a", "/b 500"]);
    assert_eq!(conditions, PARTIAL);
    // Which requests it protects is unknown.
    let backend = json!([{"name": "b", "port": 80, "filters": [{"type": "ExternalAuth"}]}]);
    let of_backend = json!({"matches": [unreadable()], "backendRefs": backend});
    for rule in [protected(json!([unreadable()])), of_backend] {
        let (effects, conditions) = of(json!([valid, rule]));
        assert_eq!(effects, ["/a 500", "rest 500"]);
        assert_eq!(conditions, ["not Accepted UnsupportedValue"]);
    }
}

#[test]
fn route_without_a_readable_rule_fails_what_no_other_route_matches() {
    let unread = |kind, created| {
        let rules = json!([{"matches": [{"headers": [{"name": "a b", "value": "x"}]}]}]);
        route_of(kind, "shop", "unread", created, rules)
    };
    let http = Kind::HttpRoute;
    let alone = attach_all(&[unread(http, 0)]).tables[&80].clone();
    assert_eq!(effects(&alone), ["rest 500"]);
    assert!(alone.is_unreadable);
    // Also a younger route, and one for all paths.
    for path in ["/a", "/"] {
        let other = route("r", 9, json!([rule("a", json!([prefix(path)]))]));
        let table = table(&[unread(http, 0), other]);
        assert_eq!(
            effects(&table),
            [format!("{path} shop/a"), "rest 500".into()]
        );
        assert!(!table.is_unreadable);
    }
    // It excludes no routes of other kinds.
    let other = route("r", 9, json!([rule("a", json!([prefix("/a")]))]));
    let both = [unread(Kind::GrpcRoute, 0), other];
    assert_eq!(effects(&table(&both)), ["/a shop/a"]);
}

#[test]
fn connections_of_an_invalid_tcp_route_fail_unless_another_one_applies() {
    let tcp = |name: &str, created, rules| route_of(Kind::TcpRoute, "shop", name, created, rules);
    let (unread, filter) = (
        json!(["x"]),
        json!([{"filters": [{"type": "CORS", "cors": {}}]}]),
    );
    for rules in [&unread, &filter, &json!([])] {
        let table = table(&[tcp("a", 0, rules.clone())]);
        let connections = table.tcp.as_ref().unwrap().message();
        assert!(connections.invalid && connections.backends.is_empty());
        assert_eq!(effects(&table), ["rest 500"], "HTTP too");
    }
    let valid = json!([{"backendRefs": [{"name": "b", "port": 80}]}]);
    let table = table(&[tcp("a", 0, unread), tcp("b", 9, valid)]);
    let connections = table.tcp.as_ref().unwrap().message();
    assert_eq!(connections.backends[0].name, "shop/b:80");
}

#[test]
fn requests_fail_at_a_headless_service_too() {
    let headless = Service {
        is_headless: true,
        cluster_ips: vec![],
        ..web()
    };
    let attachment = attach_to(&headless, &[route("r", 0, json!([protected(json!([]))]))]);
    let table = &attachment.tables[&80];
    assert!(
        table.rules[0].message().invalid,
        "the pod stays the backend of others"
    );
}
