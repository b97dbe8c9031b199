//! Tables of what the specification says: parsing, ranking, merging, conditions.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1::route_filter::Kind as FilterKind;
use diy_mesh_proto::mesh::v1::{Mirror, RouteFilter, path_modifier};
use serde_json::{Value, json};

use super::attach::{Attachment, Table, attach};
use super::model::{Reference, Route};
use super::parse::route as parse;
use super::*;
use crate::kinds::Service;
use crate::kinds::service::{ServicePort, TargetPort, Transport};
use crate::object::condition::{BACKEND_NOT_FOUND, UNSUPPORTED_VALUE};
use crate::object::{Condition, Key, Kind, Meta};

mod backend;
mod external;
mod invalid;

/// A route in `shop` for the Service `web` in `shop`.
pub(crate) fn route(name: &str, created: i64, rules: Value) -> Route {
    route_of(Kind::HttpRoute, "shop", name, created, rules)
}

pub(crate) fn route_of(
    kind: Kind,
    namespace: &str,
    name: &str,
    created: i64,
    rules: Value,
) -> Route {
    let parent = json!({"group": "", "kind": "Service", "name": "web", "namespace": "shop"});
    let spec = json!({"parentRefs": [parent], "rules": rules});
    parse_in(kind, namespace, name, created, spec)
}

fn parse_in(kind: Kind, namespace: &str, name: &str, created: i64, spec: Value) -> Route {
    parse_state(kind, Key::new(namespace, name), created, ("", 7), spec)
}

/// A route with this UID in this generation.
pub(crate) fn parse_state(
    kind: Kind,
    key: Key,
    created: i64,
    state: (&str, i64),
    spec: Value,
) -> Route {
    let spec = spec.to_string();
    let meta = Meta::new(kind, key, created, state, &spec);
    parse(meta, &spec).unwrap()
}

/// A Service with the ports 80 (http) and 90 (admin).
fn web() -> Service {
    let port = |name: &str, port| ServicePort {
        name: name.into(),
        port,
        node_port: None,
        target: TargetPort::Number(port),
        protocol: Transport::Tcp,
        app_protocol: String::new(),
    };
    Service {
        key: Key::new("shop", "web"),
        uid: "".into(),
        is_headless: false,
        selector: Default::default(),
        cluster_ips: vec!["10.96.0.7".parse().unwrap()],
        external_ips: vec![],
        external_local: false,
        created: 0,
        ports: vec![port("http", 80), port("admin", 90)],
        excess: None,
        external_name: "".into(),
        publish_not_ready: false,
        local_only: false,
        session_affinity: 0,
        canary: None,
    }
}

fn attach_all(routes: &[Route]) -> Attachment {
    attach_to(&web(), routes)
}

fn attach_to(service: &Service, routes: &[Route]) -> Attachment {
    let resolve = |_: &Route, _: &Reference| Ok(None);
    let routes = routes.iter().collect();
    attach(&service.key, Some(service), routes, None, resolve)
}

fn table(routes: &[Route]) -> std::sync::Arc<Table> {
    let attachment = attach_all(routes);
    attachment.tables[&80].clone()
}

/// The rules of the matches in their order, each as the name of its first backend.
fn order(routes: &[Route]) -> String {
    let table = table(routes);
    let backends = table.matches.iter().map(|(rule, _)| {
        let rule = table.rules[*rule as usize].message();
        rule.backends.first().map_or(String::new(), |backend| {
            let name = backend.name.strip_suffix(":80").unwrap();
            name.strip_prefix("shop/").unwrap().to_owned()
        })
    });
    backends.collect::<Vec<_>>().join(" ")
}

/// A rule whose backend has the name, which tells its matches apart.
fn rule(backend: &str, matches: Value) -> Value {
    json!({"matches": matches, "backendRefs": [{"name": backend, "port": 80}]})
}

fn prefix(path: &str) -> Value {
    json!({"path": {"type": "PathPrefix", "value": path}})
}

fn conditions(attachment: &Attachment, kind: Kind, namespace: &str, name: &str) -> Vec<String> {
    let of_route = &attachment.conditions[&(kind, Key::new(namespace, name))];
    let conditions = of_route.values().flatten();
    let say = |condition: &Condition| {
        let sign = if condition.holds { "" } else { "not " };
        format!("{sign}{} {}", condition.kind, condition.reason)
    };
    conditions.map(say).collect()
}

fn with(match_: Value, more: Value) -> Value {
    let mut all = match_;
    let more = more.as_object().unwrap().clone();
    all.as_object_mut().unwrap().extend(more);
    all
}

#[test]
fn matches_are_ordered_by_the_criteria_of_the_specification() {
    let header = |count: usize| {
        let headers = (0..count).map(|name| json!({"name": format!("h{name}"), "value": "x"}));
        json!({"headers": headers.collect::<Vec<_>>()})
    };
    let query = |count: usize| {
        let query = (0..count).map(|name| json!({"name": format!("q{name}"), "value": "x"}));
        json!({"queryParams": query.collect::<Vec<_>>()})
    };
    let exact = |path: &str| json!({"path": {"type": "Exact", "value": path}});
    let regex = |path: &str| json!({"path": {"type": "RegularExpression", "value": path}});
    let get = json!({"method": "GET"});
    let cases = [
        (
            "an exact path before a longer prefix",
            prefix("/long/path"),
            exact("/a"),
            "2 1",
        ),
        ("a longer prefix first", prefix("/a"), prefix("/aa"), "2 1"),
        (
            "a prefix without the trailing slash",
            prefix("/a/"),
            prefix("/ab"),
            "2 1",
        ),
        (
            "characters, not bytes",
            prefix("/%C3%A4"),
            prefix("/abcdefg"),
            "2 1",
        ),
        (
            "an expression before a prefix",
            prefix("/aaaaaaa"),
            regex("/a.*"),
            "2 1",
        ),
        (
            "an exact path before an expression",
            regex("/aaaaaaa"),
            exact("/a"),
            "2 1",
        ),
        ("a prefix before a method", get.clone(), prefix("/a"), "2 1"),
        ("a method before headers", header(2), get.clone(), "2 1"),
        ("more headers first", header(1), header(2), "2 1"),
        (
            "headers before query parameters",
            query(2),
            header(1),
            "2 1",
        ),
        ("more query parameters first", query(1), query(2), "2 1"),
        (
            "the first rule, of equal ones",
            prefix("/a"),
            prefix("/b"),
            "1 2",
        ),
        (
            "the first rule, of equal ones",
            with(header(1), get.clone()),
            with(get, header(1)),
            "1 2",
        ),
    ];
    for (criterion, first, second, expected) in cases {
        let rules = json!([rule("1", json!([first])), rule("2", json!([second]))]);
        assert_eq!(order(&[route("r", 0, rules)]), expected, "{criterion}");
    }
}

#[test]
fn equal_matches_of_several_routes_are_ordered_by_age_and_name() {
    let one = |name: &str, created| route(name, created, json!([rule(name, json!([]))]));
    for (routes, expected) in [
        ([one("b", 1), one("a", 2)], "b a"),
        ([one("b", 1), one("a", 1)], "a b"),
        ([one("a", 1), one("b", 0)], "b a"),
    ] {
        assert_eq!(order(&routes), expected);
    }
    // Routes are merged: the longest prefix of all precedes the age of its route.
    let younger = route("c", 9, json!([rule("c", json!([prefix("/c")]))]));
    assert_eq!(order(&[one("a", 1), younger]), "c a");
}

#[test]
fn grpc_matches_are_paths_in_the_order_of_the_specification() {
    let method =
        |service: &str, method: &str| json!({"method": {"service": service, "method": method}});
    let regex = json!({"method": {"type": "RegularExpression", "service": "a.*", "method": "B|C"}});
    let header = json!({"headers": [{"name": "x", "value": "y"}]});
    let matches = [
        json!({}),
        header,
        regex,
        method("", "Get"),
        method("a.B", ""),
        method("a.B", "Get"),
        method("long.Service", ""),
    ];
    let rules = json!([{"matches": matches}]);
    let grpc = table(&[route_of(Kind::GrpcRoute, "shop", "r", 0, rules)]);
    assert!(grpc.grpc);
    let paths: Vec<String> = grpc
        .matches
        .iter()
        .map(|(_, one)| one.path().map_or("any".into(), |path| format!("{path:?}")))
        .collect();
    assert_eq!(
        paths,
        [
            "Prefix(\"/long.Service\")",
            "Exact(\"/a.B/Get\")",
            "Prefix(\"/a.B\")",
            "Regex(\"/[^/]+/Get\")",
            "Regex(\"/(?:a.*)/(?:B|C)\")",
            "any",
            "any",
        ]
    );
    assert_eq!(
        grpc.matches[5].1.message.headers.len(),
        1,
        "a header precedes none"
    );
}

#[test]
fn grpc_routes_exclude_http_routes_of_the_same_port_and_namespace() {
    let kinds = |grpc_rules: Value| {
        let grpc = route_of(Kind::GrpcRoute, "shop", "g", 9, grpc_rules);
        attach_all(&[grpc, route("h", 0, json!([rule("h", json!([]))]))])
    };
    let http = |attachment: &Attachment| conditions(attachment, Kind::HttpRoute, "shop", "h");
    let same = kinds(json!([{}]));
    assert_eq!(
        http(&same),
        ["not Accepted Conflicted", "ResolvedRefs ResolvedRefs"]
    );
    assert!(same.tables[&80].grpc);
    let accepted = ["Accepted Accepted", "ResolvedRefs ResolvedRefs"];
    let invalid = json!([{"matches": [{"method": {}}]}]);
    assert_eq!(
        http(&kinds(invalid)),
        accepted,
        "an invalid one excludes nothing"
    );
    // A port of its own remains.
    let mut grpc = route_of(Kind::GrpcRoute, "shop", "g", 9, json!([{}]));
    grpc.parents[0].port = Some(90);
    let both = attach_all(&[grpc, route("h", 0, json!([rule("h", json!([]))]))]);
    assert_eq!(http(&both), accepted);
    assert!(both.tables[&90].grpc && !both.tables[&80].grpc);
}

#[test]
fn tcp_routes_are_for_connections_and_for_requests_that_no_other_route_is_for() {
    let backends = |name: &str| json!([{"backendRefs": [{"name": name, "port": 80, "weight": 3}]}]);
    let tcp = |name: &str, age| route_of(Kind::TcpRoute, "shop", name, age, backends(name));
    let name = |table: &Table| {
        table.tcp.as_ref().unwrap().message().backends[0]
            .name
            .clone()
    };
    // Alone: all requests have its rule too.
    let alone = table(&[tcp("t", 0)]);
    assert_eq!(name(&alone), "shop/t:80");
    assert_eq!(alone.rules[0].message().name, "TCPRoute shop/t");
    let [(0, all)] = &alone.matches[..] else {
        panic!("{alone:?}")
    };
    assert_eq!(**all, Default::default());
    // Beside routes for requests, whatever their age.
    for kind in [Kind::HttpRoute, Kind::GrpcRoute] {
        let requests = route_of(kind, "shop", "h", 9, json!([rule("h", json!([]))]));
        let both = [tcp("t", 0), requests];
        assert_eq!(order(&both), "h", "{kind}");
        let attachment = attach_all(&both);
        assert_eq!(name(&attachment.tables[&80]), "shop/t:80");
        for (kind, name) in [(kind, "h"), (Kind::TcpRoute, "t")] {
            let accepted = ["Accepted Accepted", "ResolvedRefs ResolvedRefs"];
            assert_eq!(conditions(&attachment, kind, "shop", name), accepted);
        }
    }
    // An HTTPRoute that is not accepted has no requests.
    let invalid = route("h", 0, json!([{"matches": [{"method": "get"}]}]));
    assert_eq!(order(&[tcp("t", 0), invalid]), "t");
    // The oldest of several routes applies.
    let several = attach_all(&[tcp("young", 2), tcp("old", 1)]);
    assert_eq!(name(&several.tables[&80]), "shop/old:80");
    assert_eq!(
        conditions(&several, Kind::TcpRoute, "shop", "young"),
        ["not Accepted Conflicted", "ResolvedRefs ResolvedRefs"]
    );
}

#[test]
fn tcp_routes_have_one_rule_with_backends_only() {
    let message = |rules: Value| {
        let attachment = attach_all(&[route_of(Kind::TcpRoute, "shop", "t", 0, rules)]);
        let of_route = &attachment.conditions[&(Kind::TcpRoute, Key::new("shop", "t"))];
        let accepted = of_route.values().flatten().next().unwrap();
        (accepted.holds, accepted.message.clone())
    };
    let filter = json!({"type": "URLRewrite", "urlRewrite": {}});
    for (rules, expected) in [
        (json!([]), "spec.rules: "),
        (json!([{"filters": [filter]}]), "spec.rules[0]: filters"),
        (
            json!([{"backendRefs": [{"name": "a", "filters": [filter]}]}]),
            "spec.rules[0]: filters",
        ),
        (
            json!([{"timeouts": {"request": "1s"}}]),
            "spec.rules[0]: timeouts",
        ),
        (
            json!([{"backendRefs": [{"name": "a", "weight": 1_000_001}]}]),
            "backendRefs[0].weight",
        ),
    ] {
        let (holds, message) = message(rules);
        assert!(
            !holds && message.contains(expected),
            "{expected}: {message}"
        );
    }
    let (holds, message) = message(json!([{"name": "first"}, {}]));
    assert!(
        holds && message.contains("a rule after the first one has no effect"),
        "{message}"
    );
}

#[test]
fn parents_select_ports_by_number_and_by_name() {
    for (parent, ports) in [
        (json!({}), vec![80, 90]),
        (json!({"port": 90}), vec![90]),
        (json!({"sectionName": "http"}), vec![80]),
        (json!({"sectionName": "http", "port": 90}), vec![]),
        (json!({"port": 99}), vec![]),
    ] {
        let parent = with(
            json!({"group": "", "kind": "Service", "name": "web"}),
            parent,
        );
        let spec = json!({"parentRefs": [parent], "rules": [rule("b", json!([]))]});
        let attachment = attach_all(&[parse_in(Kind::HttpRoute, "shop", "r", 0, spec)]);
        assert_eq!(
            attachment.tables.keys().copied().collect::<Vec<_>>(),
            ports,
            "{parent}"
        );
        let accepted = &conditions(&attachment, Kind::HttpRoute, "shop", "r")[0];
        let expected = if ports.is_empty() {
            "not Accepted NoMatchingParent"
        } else {
            "Accepted Accepted"
        };
        assert_eq!(accepted, expected, "{parent}");
    }
}

#[test]
fn parents_that_are_missing_or_external_accept_no_route() {
    let routes = [route("r", 0, json!([rule("b", json!([]))]))];
    let resolve = |_: &Route, _: &Reference| Ok(None);
    let key = Key::new("shop", "web");
    let missing = attach(&key, None, routes.iter().collect(), None, resolve);
    let first = |attachment| conditions(&attachment, Kind::HttpRoute, "shop", "r").remove(0);
    assert_eq!(first(missing), "not Accepted NoMatchingParent");
    let external = Service {
        external_name: "example.com".into(),
        ..web()
    };
    let external = attach(
        &key,
        Some(&external),
        routes.iter().collect(),
        None,
        resolve,
    );
    assert!(external.tables.is_empty());
    assert_eq!(first(external), "not Accepted UnsupportedValue");
}

#[test]
fn parents_of_other_kinds_are_ignored() {
    let spec = json!({"parentRefs": [{"name": "gateway"}, {"group": "", "kind": "Pod", "name": "p"}],
        "rules": [{"matches": [{"method": "invalid"}]}]});
    assert!(
        parse_in(Kind::HttpRoute, "shop", "r", 0, spec)
            .parents
            .is_empty()
    );
}

#[test]
fn routes_of_a_port_are_bounded_and_the_oldest_ones_stay() {
    let value = "x".repeat(4000);
    let large = |name: &str, created| {
        let matches: Vec<Value> = (0..60)
            .map(|_| json!({"headers": [{"name": "h", "value": value}]}))
            .collect();
        route(name, created, json!([rule(name, json!(matches))]))
    };
    let mut routes: Vec<Route> = (0..5)
        .map(|age| large(&format!("r{age}"), 10 - age))
        .collect();
    routes.push(route("small", 20, json!([rule("small", json!([]))])));
    let names = ["r0", "r1", "r2", "r3", "r4", "small"];
    let accepted = |service: &Service, routes: &[Route]| {
        let attachment = attach_to(service, routes);
        names.map(|name| {
            conditions(&attachment, Kind::HttpRoute, "shop", name)[0] == "Accepted Accepted"
        })
    };
    let mut service = web();
    assert_eq!(
        accepted(&service, &routes),
        [false, true, true, true, true, true]
    );
    // All addresses share the tables of the ports.
    service.external_ips = (1..50).map(|n| [203, 0, 113, n].into()).collect();
    assert_eq!(
        accepted(&service, &routes),
        [false, true, true, true, true, true]
    );
    // 100 ports with a route of their own each: 84 KB for each of 100 tables.
    service.ports = (1..=100).map(|number| port(&service, number)).collect();
    let own = |number: u16| {
        let parents = json!([{"group": "", "kind": "Service", "name": "web", "port": number}]);
        let spec = json!({"parentRefs": parents, "rules": [{}]});
        parse_in(Kind::HttpRoute, "shop", &format!("own-{number}"), 20, spec)
    };
    routes.extend((1..=100).map(own));
    assert_eq!(
        accepted(&service, &routes),
        [false, false, false, false, false, true]
    );
}

fn port(service: &Service, number: u16) -> ServicePort {
    ServicePort {
        name: format!("p{number}"),
        port: number,
        ..service.ports[0].clone()
    }
}

#[test]
fn ports_with_the_same_routes_share_a_table_and_their_routes_are_bounded_together() {
    let mut service = web();
    service.ports = (1..=1000).map(|number| port(&service, number)).collect();
    let to = |name: &str, created, parents: Value| {
        let spec = json!({"parentRefs": parents, "rules": [{}]});
        parse_in(Kind::HttpRoute, "shop", name, created, spec)
    };
    let parent = |port| json!({"group": "", "kind": "Service", "name": "web", "port": port});
    let mut routes = vec![
        to("all", 0, json!([parent(Value::Null)])),
        to("two", 1, json!([parent(json!(7)), parent(json!(8))])),
    ];
    let tables = |routes: &[Route]| {
        let tables = attach_to(&service, routes).tables;
        assert_eq!(tables.len(), 1000);
        assert_eq!(tables[&7].routes.len(), 2);
        let tables = tables.values().map(Arc::as_ptr);
        tables.collect::<std::collections::HashSet<_>>().len()
    };
    assert_eq!(tables(&routes), 2);
    routes.extend((1..=900).map(|n| to(&format!("r{n:03}"), 2, json!([parent(Value::Null)]))));
    routes.extend((1..=100).map(|n| to(&format!("s{n:03}"), 3, json!([parent(json!(100 + n))]))));
    let attachment = attach_to(&service, &routes);
    let of_port = attachment.tables.values().map(|table| table.routes.len());
    // 102 tables, each of 82 KB and 642 routes at most.
    assert!(
        of_port
            .max()
            .is_some_and(|routes| (100..=642).contains(&routes))
    );
    let route = |name: &str| conditions(&attachment, Kind::HttpRoute, "shop", name)[0].clone();
    assert_eq!(route("r001"), "Accepted Accepted");
    assert_eq!(route("r900"), "not Accepted UnsupportedValue");
}

#[test]
fn rejections_name_the_field_and_its_value() {
    let matches = |one: Value| json!([{"matches": [one]}]);
    let filter = |one: Value| json!([{"filters": [one]}]);
    let path = |kind: &str, value: &str| matches(json!({"path": {"type": kind, "value": value}}));
    let header = |name: &str, value: &str| {
        filter(
            json!({"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [{"name": name, "value": value}]}}),
        )
    };
    let redirect =
        |redirect: Value| filter(json!({"type": "RequestRedirect", "requestRedirect": redirect}));
    let cors = |cors: Value| filter(json!({"type": "CORS", "cors": cors}));
    let cases = [
        (
            path("Glob", "/"),
            "spec.rules[0].matches[0].path.type: \"Glob\"",
        ),
        (
            path("Exact", "a"),
            "spec.rules[0].matches[0].path.value: \"a\"",
        ),
        (path("PathPrefix", "/a//b"), "path.value: \"/a//b\""),
        (path("PathPrefix", "/a/../b"), "path.value"),
        (path("PathPrefix", "/a?b"), "path.value"),
        (path("Exact", "/a%2fb"), "path.value"),
        (path("Exact", "/a\r\nx"), "path.value"),
        (
            path("RegularExpression", "("),
            "path.value: \"(\" is not a regular expression",
        ),
        (
            path("PathPrefix", &format!("/{}", "a".repeat(1024))),
            "path.value",
        ),
        (
            matches(json!({"method": "get"})),
            "matches[0].method: \"get\"",
        ),
        (matches(json!({"method": ""})), "matches[0].method: \"\""),
        (
            matches(json!({"headers": [{"name": "a", "value": "x"}, {"name": "A", "value": ""}]})),
            "headers[1].value",
        ),
        (
            matches(json!({"headers": [{"name": "a b", "value": "x"}]})),
            "headers[0].name",
        ),
        (
            matches(json!({"headers": [{"name": "a"}]})),
            "headers[0].value",
        ),
        (
            matches(json!({"headers": [{"name": "a", "value": "[", "type": "RegularExpression"}]})),
            "headers[0].value",
        ),
        (
            matches(json!({"queryParams": [{"name": "a", "value": "x", "type": "Suffix"}]})),
            "queryParams[0].type",
        ),
        (header("a", "x\r\nb: c"), "requestHeaderModifier.set"),
        (
            header("transfer-encoding", "chunked"),
            "\"transfer-encoding\" is not a header that filters may change",
        ),
        (
            header("X-Called-By", "admin"),
            "not a header that filters may change",
        ),
        (
            filter(
                json!({"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [
                    {"name": "a", "value": "x"}, {"name": "A", "value": "x\r\nX-Called-By: c"},
                ]}}),
            ),
            "requestHeaderModifier.set",
        ),
        (
            filter(json!({"type": "Magic"})),
            "filters[0].type: \"Magic\"",
        ),
        (
            filter(json!({"type": "URLRewrite"})),
            "filters[0].urlRewrite",
        ),
        (
            filter(json!({"type": "URLRewrite", "urlRewrite": {"hostname": "a b"}})),
            "urlRewrite.hostname",
        ),
        (
            filter(
                json!({"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplaceFullPath", "replaceFullPath": "/a b"}}}),
            ),
            "replaceFullPath",
        ),
        (redirect(json!({"scheme": "ftp"})), "requestRedirect.scheme"),
        (
            redirect(json!({"statusCode": 200})),
            "requestRedirect.statusCode",
        ),
        (
            cors(json!({"allowOrigins": ["*", "https://a.example"]})),
            "cors.allowOrigins",
        ),
        (
            cors(json!({"allowOrigins": ["https://a.example/path"]})),
            "cors.allowOrigins",
        ),
        (
            cors(json!({"allowHeaders": ["a\r\n"]})),
            "cors.allowHeaders",
        ),
        (
            json!([{"timeouts": {"request": "10"}}]),
            "timeouts.request: \"10\"",
        ),
        (
            json!([{"timeouts": {"request": "1s", "backendRequest": "2s"}}]),
            "timeouts.backendRequest",
        ),
        (json!([{"retry": {"codes": [200]}}]), "retry.codes: \"200\""),
        (json!([{"retry": {"attempts": 1000}}]), "retry.attempts"),
        (
            json!([{"backendRefs": [{"name": "a", "port": 80, "weight": 1000001}]}]),
            "backendRefs[0].weight",
        ),
        (json!([{"name": "a b"}]), "spec.rules[0].name"),
        (json!([{"matches": "x"}]), "spec.rules[0].matches: "),
        (json!(vec![json!({}); 17]), "spec.rules: 17 entries"),
        (
            json!([{"matches": vec![prefix("/a"); 65]}]),
            "spec.rules[0].matches",
        ),
        (
            json!(vec![json!({"matches": vec![prefix("/a"); 64]}); 3]),
            "spec.rules: 192 matches",
        ),
    ];
    for (rules, expected) in cases {
        let rejection = route("r", 0, rules.clone()).invalid.unwrap();
        assert_eq!(rejection.reason, UNSUPPORTED_VALUE, "{rules}");
        assert!(rejection.message.contains(expected), "{rejection}");
        assert!(rejection.message.chars().count() < 400, "{rejection}");
    }
}

/// Objects as an API server without validation, or a file, has them.
#[test]
fn invalid_objects_have_a_condition_that_names_the_field_and_disturb_no_others() {
    let (http, grpc, tcp) = (Kind::HttpRoute, Kind::GrpcRoute, Kind::TcpRoute);
    let matches = |one: Value| json!([{"matches": [one]}]);
    let filter = |kind: &str, field: &str, value: Value| json!([{"filters": [{"type": kind, field: value}]}]);
    let redirect = |value: Value| filter("RequestRedirect", "requestRedirect", value);
    let mirror = |share: Value| {
        let mut value = share;
        value["backendRef"] = json!({"name": "a", "port": 80});
        filter("RequestMirror", "requestMirror", value)
    };
    let backend = |value: Value| json!([{"backendRefs": [value]}]);
    let path = |value: Value| matches(json!({"path": value}));
    let method = |value: Value| matches(json!({"method": value}));
    let cases = [
        (
            http,
            path(json!({"value": 7})),
            "matches[0].path.value: invalid type",
        ),
        (
            http,
            path(json!({"type": "Glob"})),
            "matches[0].path.type: \"Glob\"",
        ),
        (
            http,
            path(json!({"value": "a"})),
            "matches[0].path.value: \"a\"",
        ),
        (
            http,
            matches(json!({"method": "get"})),
            "matches[0].method: \"get\"",
        ),
        (
            http,
            matches(json!({"headers": [{"name": "a b", "value": "c"}]})),
            "matches[0].headers[0].name: \"a b\"",
        ),
        (
            http,
            matches(json!({"queryParams": [{"name": "a"}]})),
            "matches[0].queryParams[0].value: \"\"",
        ),
        (http, matches(json!("all")), "matches[0]: invalid type"),
        (
            http,
            redirect(json!({"port": 65536})),
            "filters[0].requestRedirect.port: invalid value",
        ),
        (
            http,
            redirect(json!({"scheme": "ftp"})),
            "filters[0].requestRedirect.scheme: \"ftp\"",
        ),
        (
            http,
            redirect(json!({"statusCode": 300})),
            "filters[0].requestRedirect.statusCode: \"300\"",
        ),
        (
            http,
            redirect(json!({"hostname": "*.a"})),
            "filters[0].requestRedirect.hostname: \"*.a\"",
        ),
        (
            http,
            filter("CORS", "cors", json!({"maxAge": -1})),
            "filters[0].cors.maxAge: invalid value",
        ),
        (
            http,
            filter("CORS", "cors", json!({"allowOrigins": ["null"]})),
            "filters[0].cors.allowOrigins: \"null\"",
        ),
        (
            http,
            mirror(json!({"percent": 101})),
            "filters[0].requestMirror: \"101/100\"",
        ),
        (
            http,
            mirror(json!({"fraction": {"numerator": 1, "denominator": 0}})),
            "filters[0].requestMirror: \"1/0\"",
        ),
        (
            http,
            filter("Magic", "magic", json!({})),
            "filters[0].type: \"Magic\"",
        ),
        (
            http,
            backend(json!({"name": "a", "weight": -1})),
            "backendRefs[0]",
        ),
        (
            http,
            backend(json!({"name": "a", "weight": 1_000_001})),
            "backendRefs[0].weight: \"1000001\"",
        ),
        (
            http,
            json!([{"timeouts": {"request": "1"}}]),
            "timeouts.request: \"1\"",
        ),
        (
            http,
            json!([{"timeouts": {"request": "1s", "backendRequest": "2s"}}]),
            "timeouts.backendRequest: \"2000ms\"",
        ),
        (
            http,
            json!([{"retry": {"codes": [399]}}]),
            "retry.codes: \"399\"",
        ),
        (
            http,
            json!([{"retry": {"attempts": 11}}]),
            "retry.attempts: \"11\"",
        ),
        (http, json!([{"name": "é"}]), "name: \"é\""),
        (
            grpc,
            method(json!({"service": "a/b"})),
            "matches[0].method.service: \"a/b\"",
        ),
        (
            grpc,
            method(json!({"method": "a".repeat(1024)})),
            "matches[0].method.method: ",
        ),
        (
            grpc,
            method(json!({"type": "RegularExpression", "method": "("})),
            "matches[0].method.method: \"(\"",
        ),
        (grpc, method(json!({})), "matches[0].method: "),
        (
            grpc,
            redirect(json!({})),
            "filters[0].type: \"RequestRedirect\"",
        ),
        (
            tcp,
            backend(json!({"name": "a", "weight": 1_000_001})),
            "backendRefs[0].weight: \"1000001\"",
        ),
        (
            tcp,
            backend(json!({"name": "a", "port": 65536})),
            "backendRefs[0]",
        ),
        (tcp, json!([{"name": "A B"}]), "name: \"A B\""),
    ];
    // A valid route of each kind is in force.
    let valid = |kind: Kind| {
        let backends = json!([{"backendRefs": [{"name": "valid", "port": 80}]}]);
        route_of(kind, "shop", "valid", 1, backends)
    };
    for (kind, rules, expected) in cases {
        let expected = format!("spec.rules[0].{expected}");
        let invalid = route_of(kind, "shop", "invalid", 2, rules);
        let attachment = attach_all(&[invalid, valid(kind)]);
        let of_route = &attachment.conditions[&(kind, Key::new("shop", "invalid"))];
        let [condition] = &of_route[&0][..] else {
            panic!("{expected}: {of_route:?}")
        };
        let Condition {
            kind: name,
            holds,
            reason,
            message,
            ..
        } = condition;
        assert_eq!(
            (*name, *holds, *reason),
            ("Accepted", false, UNSUPPORTED_VALUE)
        );
        assert!(message.starts_with(&expected), "{expected}: {message}");
        let table = &attachment.tables[&80];
        let (first, _) = table.matches[0];
        let backend = &table.rules[first as usize].message().backends[0].name;
        assert_eq!(backend, "shop/valid:80", "{expected}");
    }
}

#[test]
fn incompatible_filters_reject_a_route() {
    let redirect = json!({"type": "RequestRedirect", "requestRedirect": {"statusCode": 301}});
    let rewrite = json!({"type": "URLRewrite", "urlRewrite": {"hostname": "a.example"}});
    for rule in [
        json!({"filters": [redirect, rewrite]}),
        json!({"filters": [rewrite, rewrite]}),
        json!({"filters": [redirect], "backendRefs": [{"name": "a", "port": 80}]}),
        json!({"backendRefs": [{"name": "a", "port": 80, "filters": [redirect]}]}),
        json!({"backendRefs": [{"name": "a", "port": 80, "filters": [{"type": "CORS", "cors": {}}]}]}),
    ] {
        let rejection = route("r", 0, json!([rule])).invalid.unwrap();
        assert_eq!(rejection.reason, INCOMPATIBLE_FILTERS, "{rule}");
    }
}

#[test]
fn reserved_headers_are_recognized_in_every_spelling() {
    let accepts = |name: &str| {
        let modifier = json!({"remove": [name]});
        let filter = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": modifier});
        route("r", 0, json!([{"filters": [filter]}]))
            .invalid
            .is_none()
    };
    assert!(accepts("x-own") && accepts("X-Called"));
    for name in [
        "Host",
        "TE",
        "x_called_by",
        "X-Called-By",
        "x.mesh.error",
        "Expect",
    ] {
        assert!(!accepts(name), "{name}");
    }
}

#[test]
fn empty_path_of_a_redirect_is_the_root() {
    let path = json!({"type": "ReplaceFullPath", "replaceFullPath": ""});
    let filter = json!({"type": "RequestRedirect", "requestRedirect": {"path": path}});
    let rules = route("r", 0, json!([{"filters": [filter]}]))
        .content
        .unwrap();
    let Some(FilterKind::Redirect(redirect)) = &rules[0].message.filters[0].kind else {
        panic!("{rules:?}")
    };
    let full = path_modifier::Kind::Full("/".to_owned());
    let path = redirect.path.clone().unwrap();
    assert_eq!(path.kind, Some(full));
}

#[test]
fn prefix_is_replaced_only_if_the_rule_has_one_prefix() {
    let replace = json!({"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/x"}}});
    let is_valid = |matches: Value| {
        route("r", 0, json!([{"matches": matches, "filters": [replace]}]))
            .invalid
            .is_none()
    };
    assert!(is_valid(json!([prefix("/a")])) && is_valid(json!([])));
    assert!(!is_valid(json!([prefix("/a"), prefix("/b")])));
    assert!(!is_valid(
        json!([{"path": {"type": "Exact", "value": "/a"}}])
    ));
}

#[test]
fn grpc_routes_have_fewer_filters_and_matches_of_their_own() {
    for (rule, expected) in [
        (
            json!({"filters": [{"type": "URLRewrite", "urlRewrite": {}}]}),
            "GRPCRoute",
        ),
        (
            json!({"matches": [{"method": {"service": "a/b"}}]}),
            "method.service: \"a/b\"",
        ),
        (
            json!({"matches": [{"method": {"method": "a.b"}}]}),
            "method.method",
        ),
        (
            json!({"matches": [{"method": {"type": "RegularExpression", "method": "a)|(b"}}]}),
            "method.method",
        ),
        (
            json!({"matches": [{"method": {"type": "Prefix", "method": "a"}}]}),
            "method.type",
        ),
    ] {
        let route = route_of(Kind::GrpcRoute, "shop", "r", 0, json!([rule]));
        let rejection = route.invalid.unwrap();
        assert!(rejection.message.contains(expected), "{rejection}");
    }
}

#[test]
fn durations_are_those_of_gep_2257() {
    let request = |text: &str| {
        let rules = json!([{"timeouts": {"request": text}}]);
        let route = route("r", 0, rules);
        let timeout = route.content.unwrap()[0].settings.timeouts[0];
        route.invalid.is_none().then_some(timeout)
    };
    for (text, milliseconds) in [
        ("0h", 0),
        ("0h0m0s", 0),
        ("500ms", 500),
        ("10s30m1h", 5_410_000),
        ("100ms200ms300ms", 600),
        ("00060m", 3_600_000),
    ] {
        assert_eq!(request(text), Some(Some(milliseconds)), "{text}");
    }
    for text in [
        "",
        "1",
        "1m1",
        "1d",
        "1h30m10s20ms50h",
        "999999h",
        "1.5h",
        "-15m",
    ] {
        assert_eq!(request(text), None, "{text}");
    }
}

#[test]
fn parents_of_a_route_do_not_multiply_its_memory() {
    // Conditions are short, whatever the length of names and values.
    let name = "b".repeat(253);
    let references: Vec<Value> = (0..16)
        .map(|at| json!({"name": format!("{name}{at}"), "port": 80}))
        .collect();
    let unresolved = route("r", 0, json!([{"backendRefs": references}]));
    let long = json!([{"backendRefs": [{"name": "a", "weight": "9".repeat(100_000)}]}]);
    for route in [unresolved, route("r", 0, long)] {
        let resolve = |_: &Route, reference: &Reference| {
            Err(crate::object::Rejection {
                is_partial: false,
                reason: BACKEND_NOT_FOUND,
                message: format!("{}: no {}", reference.field, reference.key),
            })
        };
        let service = web();
        let all = attach(&service.key, Some(&service), vec![&route], None, resolve);
        let conditions = all.conditions.values().flat_map(|one| one.values());
        for condition in conditions.flatten() {
            assert!(
                condition.message.len() <= 512,
                "{}",
                condition.message.len()
            );
        }
    }
    // Filters, which may be large, are shared.
    let modifier = json!({"set": [{"name": "a", "value": "b"}]});
    let filter = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": modifier});
    let one = route("r", 0, json!([{"filters": [filter]}]));
    let tables = [table(std::slice::from_ref(&one)), table(&[one])];
    let shared = tables.each_ref().map(|table| &table.rules[0].shared);
    assert!(!shared[0].filters.is_empty());
    assert!(std::sync::Arc::ptr_eq(shared[0], shared[1]));
}

#[test]
fn invalid_references_are_reported_and_leave_a_backend_without_a_name() {
    let rules = json!([{
        "backendRefs": [{"name": "a", "port": 80, "weight": 9}, {"name": "b", "port": 80}],
        "filters": [
            {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "b", "port": 80}}},
            {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "a", "port": 80}, "percent": 5}},
        ],
    }]);
    let routes = [route("r", 0, rules)];
    let service = web();
    let resolve = |_: &Route, reference: &Reference| match &*reference.key.name {
        "a" => Ok(None),
        _ => Err(crate::object::Rejection {
            is_partial: false,
            reason: BACKEND_NOT_FOUND,
            message: format!("{}: no b", reference.field),
        }),
    };
    let attachment = attach(
        &service.key,
        Some(&service),
        routes.iter().collect(),
        None,
        resolve,
    );
    let table = &attachment.tables[&80];
    let rule = table.rules[0].message();
    let backends = rule.backends.iter();
    let backends: Vec<(&str, u32)> = backends.map(|one| (&*one.name, one.weight)).collect();
    assert_eq!(backends, [("shop/a:80", 9), ("", 1)]);
    let mirror = FilterKind::Mirror(Mirror {
        backend: "shop/a:80".to_owned(),
        numerator: 5,
        denominator: 100,
    });
    assert_eq!(
        rule.filters,
        [RouteFilter { kind: Some(mirror) }],
        "a mirror without a backend is dropped"
    );
    let conditions = &attachment.conditions[&(Kind::HttpRoute, Key::new("shop", "r"))][&0];
    assert_eq!((conditions[0].holds, conditions[1].holds), (true, false));
    assert_eq!(conditions[1].reason, "BackendNotFound");
    let message = "spec.rules[0].backendRefs[1]: no b; spec.rules[0].filters[0].requestMirror.backendRef: no b";
    assert_eq!(conditions[1].message, message);
}

#[test]
fn requests_of_a_rule_with_an_unknown_extension_fail() {
    let rules = json!([{
        "filters": [{"type": "ExtensionRef", "extensionRef": {"group": "x", "kind": "Y", "name": "z"}}],
        "backendRefs": [{"name": "a", "port": 80}],
    }]);
    let routes = [route("r", 0, rules)];
    assert!(table(&routes).rules[0].shared.backends.is_empty());
    let conditions = conditions(&attach_all(&routes), Kind::HttpRoute, "shop", "r");
    assert_eq!(
        conditions,
        ["Accepted Accepted", "not ResolvedRefs InvalidKind"]
    );
}

#[test]
fn backends_without_effect_at_a_headless_service_are_named() {
    let headless = Service {
        is_headless: true,
        cluster_ips: vec![],
        ..web()
    };
    let message = |service: &Service, kind, rule: Value| {
        let route = route_of(kind, "shop", "r", 0, json!([rule]));
        let resolve = |_: &Route, _: &Reference| Ok(None);
        let attachment = attach(&service.key, Some(service), vec![&route], None, resolve);
        let accepted = attachment.conditions[&(kind, route.key.clone())][&0][0].clone();
        assert!(accepted.holds);
        accepted.message
    };
    let backends = || json!({"backendRefs": [{"name": "a", "port": 80, "weight": 9}]});
    let plain = "the route applies to shop/web";
    let expected = "the route applies to shop/web; backendRefs, with their weights and filters, \
        have no effect: the Service is headless, and requests stay at the pod that the client has \
        selected";
    assert_eq!(message(&headless, Kind::HttpRoute, backends()), expected);
    assert_eq!(message(&headless, Kind::GrpcRoute, backends()), expected);
    let timeout = json!({"timeouts": {"request": "1s"}});
    assert_eq!(message(&headless, Kind::HttpRoute, timeout), plain);
    assert_eq!(message(&web(), Kind::HttpRoute, backends()), plain);
}

#[test]
fn fields_without_effect_are_named() {
    let parent = json!({"group": "", "kind": "Service", "name": "web"});
    let spec = json!({"parentRefs": [parent], "hostnames": ["a.example"], "rules": [{}]});
    let attachment = attach_all(&[parse_in(Kind::HttpRoute, "shop", "r", 0, spec)]);
    let condition = &attachment.conditions[&(Kind::HttpRoute, Key::new("shop", "r"))][&0][0];
    let message = "the route applies to shop/web; spec.hostnames has no effect in a mesh";
    assert_eq!(condition.message, message);
}
