//! The filter ExternalAuth: what it says, where it cannot apply, and what the called pods are told.

use diy_mesh_proto::authorization::check;
use diy_mesh_proto::mesh::v1::authorization_policy::Action;
use diy_mesh_proto::mesh::v1::{AuthorizationPolicy, Authorizer, authorizer::Protocol, path_match};

use super::*;
use crate::object::Rejection;

/// The filter with these fields besides the protocol GRPC and the server `auth`.
fn filter(more: Value) -> Value {
    let auth = json!({"protocol": "GRPC", "backendRef": {"name": "auth", "port": 9000}});
    json!({"type": "ExternalAuth", "externalAuth": with(auth, more)})
}

/// A rule for a prefix with the filter, and with these fields.
fn asking(path: &str, more: Value) -> Value {
    let rule = json!({
        "matches": [prefix(path)],
        "filters": [filter(json!({}))],
        "backendRefs": [{"name": "web", "port": 80}],
    });
    with(rule, more)
}

/// A rule without the filter.
fn open(path: &str) -> Value {
    rule("web", json!([prefix(path)]))
}

/// The Service `web`, which selects pods.
fn selecting() -> Service {
    Service {
        selector: [("app".to_owned(), "web".to_owned())].into(),
        ..web()
    }
}

fn attached(routes: &[Route]) -> Attachment {
    attach_to(&selecting(), routes)
}

/// The policy for the pods at a port. `None`: there is none.
fn told(attachment: &Attachment, port: u16) -> Option<AuthorizationPolicy> {
    let rules = attachment.protected.get(&port)?;
    Some(rules.message.clone())
}

/// The prefix of each match with the server of its rule, "none", or "refused".
fn asked(attachment: &Attachment, port: u16) -> Vec<String> {
    let routes = told(attachment, port).and_then(|policy| policy.routes);
    let routes = routes.unwrap_or_default();
    let say = |one: &diy_mesh_proto::mesh::v1::RouteMatch| {
        let path = one.path.clone().and_then(|path| path.kind);
        let path = match path {
            Some(path_match::Kind::Prefix(path)) => path,
            other => format!("{other:?}"),
        };
        let authorizer = routes.rules[one.rule as usize].authorizer.as_ref();
        let server = authorizer.map_or("none", |one| &one.backend);
        let server = if server.is_empty() { "refused" } else { server };
        format!("{path} {server}")
    };
    routes.matches.iter().map(say).collect()
}

/// The message of the condition that is a problem, of a route with this rule at `selecting`.
fn problem(rules: Value) -> (String, Attachment) {
    let attachment = attached(&[route("r", 0, rules)]);
    let conditions = attachment.conditions.values().flat_map(|of| of.values());
    let mut problems = conditions.flatten().filter(|one| one.is_problem());
    let first = problems.next().map(|one| (one.reason, one.message.clone()));
    let (reason, message) = first.unwrap_or_default();
    (format!("{reason}: {message}"), attachment)
}

#[test]
fn pods_get_the_matches_of_all_routes_in_their_order_with_the_servers_of_rules() {
    let shop = route("r", 0, json!([open("/"), asking("/admin", json!({}))]));
    let other = json!([{"name": "other", "namespace": "auth", "port": 80}]);
    let server = filter(json!({"backendRef": other[0]}));
    let second = route(
        "s",
        1,
        json!([
            open("/admin/open"),
            asking("/cart", json!({"filters": [server]}))
        ]),
    );
    let attachment = attached(&[shop, second]);
    for port in [80, 90] {
        assert_eq!(
            asked(&attachment, port),
            [
                "/admin/open none",
                "/admin shop/auth:9000",
                "/cart auth/other:80",
            ],
            "what comes after the last one is of no interest"
        );
    }
    let policy = told(&attachment, 80).unwrap();
    assert_eq!(policy.name, "HTTPRoute shop/r");
    assert_eq!(policy.action(), Action::ExternalAuth);
    // Proxies that do not know routes deny.
    assert_eq!((policy.rules.len(), &policy.authorizer), (1, &None));
    let names = policy.routes.unwrap().rules;
    let names: Vec<_> = names.iter().map(|rule| &*rule.name).collect();
    assert_eq!(names, ["", "HTTPRoute shop/r", "", "HTTPRoute shop/s"]);
    let accepted = ["Accepted Accepted", "ResolvedRefs ResolvedRefs"];
    assert_eq!(
        conditions(&attachment, Kind::HttpRoute, "shop", "r"),
        accepted
    );
    // Clients do not enforce it.
    let table = &attachment.tables[&80];
    assert!(table.rules.iter().all(|rule| !rule.message().invalid));
    assert!(
        table
            .rules
            .iter()
            .all(|rule| rule.message().filters.is_empty())
    );
    let none = attached(&[route("r", 0, json!([open("/")]))]);
    assert_eq!(told(&none, 80), None);
}

#[test]
fn fields_of_the_filter_are_those_of_the_server() {
    let of = |more: Value| {
        let attachment = attached(&[route(
            "r",
            0,
            json!([asking("/", json!({"filters": [filter(more)]}))]),
        )]);
        let routes = told(&attachment, 80).unwrap().routes.unwrap();
        routes.rules[0].authorizer.clone().unwrap()
    };
    let expected = Authorizer {
        backend: "shop/auth:9000".to_owned(),
        protocol: Protocol::Grpc.into(),
        timeout: 1000,
        ..Authorizer::default()
    };
    assert_eq!(of(json!({"forwardBody": {"maxSize": 0}})), expected);
    let grpc = of(json!({"grpc": {"allowedHeaders": ["Cookie"]}}));
    assert_eq!(grpc.request_fields, ["cookie"]);
    let http =
        json!({"path": "/check", "allowedHeaders": [], "allowedResponseHeaders": ["X-User"]});
    let http = of(json!({"protocol": "HTTP", "http": http}));
    assert_eq!(
        http,
        Authorizer {
            protocol: Protocol::Http.into(),
            path: "/check".to_owned(),
            response_fields: vec!["x-user".to_owned()],
            ..expected
        }
    );
    let policy = AuthorizationPolicy {
        action: Action::ExternalAuth.into(),
        authorizer: Some(http),
        ..AuthorizationPolicy::default()
    };
    assert_eq!(check(&policy), Ok(()));
}

/// Proxies that do not know bodies deny, as with every action that they do not know.
#[test]
fn pods_get_an_action_of_its_own_if_a_server_of_a_route_gets_bodies() {
    let body = filter(json!({"forwardBody": {"maxSize": 7}}));
    for (rules, expected) in [
        (json!([asking("/a", json!({}))]), Action::ExternalAuth),
        (
            json!([
                asking("/a", json!({})),
                asking("/b", json!({"filters": [body]})),
            ]),
            Action::ExternalAuthWithBody,
        ),
    ] {
        let policy = told(&attached(&[route("r", 0, rules)]), 80).unwrap();
        assert_eq!(policy.action(), expected);
        let routes = policy.routes.unwrap();
        let last = routes
            .rules
            .last()
            .and_then(|rule| rule.authorizer.as_ref());
        let is_asked = expected == Action::ExternalAuthWithBody;
        assert_eq!(last.unwrap().max_body, if is_asked { 7 } else { 0 });
    }
}

#[test]
fn filter_that_cannot_be_read_refuses_the_requests_of_its_rule() {
    let invalid = "UnsupportedValue: spec.rules[0].filters[0].externalAuth";
    for (more, expected) in [
        (
            json!({"protocol": "TCP"}),
            ".protocol: \"TCP\" is not GRPC or HTTP",
        ),
        (
            json!({"http": {}}),
            ".protocol: \"GRPC\" is not GRPC or HTTP, without",
        ),
        (
            json!({"forwardBody": {"maxSize": 65_536}}),
            ".forwardBody.maxSize: \"65536\" is not at most 65535",
        ),
        (
            json!({"forwardBody": {"packAsBytes": true}}),
            ".forwardBody.packAsBytes: unknown field",
        ),
        (
            json!({"failureMode": "Allow"}),
            ".failureMode: unknown field",
        ),
        (
            json!({"grpc": {"allowedHeaders": ["a b"]}}),
            ".grpc.allowedHeaders[0]: \"a b\"",
        ),
        (
            json!({"protocol": "HTTP", "http": {"path": "x"}}),
            ".http.path: \"x\" is not",
        ),
        (
            json!({"protocol": "HTTP", "http": {"allowedResponseHeaders": ["host"]}}),
            ".allowedResponseHeaders: \"host\" is not",
        ),
    ] {
        let rule = asking("/a", json!({"filters": [filter(more)]}));
        let (message, attachment) = problem(json!([rule]));
        assert!(
            message.starts_with(&format!("{invalid}{expected}")),
            "{message}"
        );
        assert_eq!(asked(&attachment, 80), ["/a refused"]);
        assert!(attachment.tables[&80].rules[0].message().invalid);
    }
    let bare = json!({"filters": [{"type": "ExternalAuth"}]});
    let (message, _) = problem(json!([asking("/a", bare)]));
    assert_eq!(
        message,
        format!("{invalid}: \"\" is not set; requests of the rule get status 500")
    );
}

#[test]
fn rule_that_changes_what_matches_read_is_not_accepted_with_the_filter() {
    let incompatible = "IncompatibleFilters: spec.rules[0]";
    let header = |name: &str| json!({"headers": [{"name": name, "value": "x"}]});
    let modifier =
        |change: Value| json!({"type": "RequestHeaderModifier", "requestHeaderModifier": change});
    let set = |name: &str| modifier(json!({"set": [{"name": name, "value": "x"}]}));
    let rewrite = json!({"type": "URLRewrite", "urlRewrite": {"hostname": "a.example"}});
    let answers = json!({"protocol": "HTTP", "http": {"allowedResponseHeaders": ["x-tenant"]}});
    let auth = || filter(json!({}));
    let backend = |filter: &Value| json!([{"name": "web", "port": 80, "filters": [filter]}]);
    let changes = |name: &str| {
        format!(".filters[0]: the rule or its server changes the header {name}, which")
    };
    for (more, expected) in [
        (
            json!({"filters": [auth(), rewrite]}),
            ": ExternalAuth excludes URLRewrite".to_owned(),
        ),
        (
            json!({"backendRefs": backend(&rewrite)}),
            ": ExternalAuth excludes URLRewrite".to_owned(),
        ),
        (
            json!({"filters": [auth(), set("X-Tenant")]}),
            changes("X-Tenant"),
        ),
        (
            json!({"filters": [auth(), modifier(json!({"remove": ["x-tenant"]}))]}),
            changes("x-tenant"),
        ),
        (
            json!({"backendRefs": backend(&set("x-tenant"))}),
            changes("x-tenant"),
        ),
        (json!({"filters": [filter(answers)]}), changes("x-tenant")),
        (
            json!({"filters": [auth(), auth()]}),
            ".filters[1]: two filters of one type".to_owned(),
        ),
        (
            json!({"filters": [], "backendRefs": backend(&auth())}),
            ".backendRefs[0].filters: ExternalAuth is a filter of rules only".to_owned(),
        ),
    ] {
        // The match of another rule reads the header.
        let rules = json!([asking("/a", more), rule("web", json!([header("x-tenant")]))]);
        let (message, attachment) = problem(rules);
        let message = message.replacen("UnsupportedValue: Dropped Rule", "IncompatibleFilters", 1);
        assert!(
            message.starts_with(&format!("{incompatible}{expected}")),
            "{message}"
        );
        assert_eq!(asked(&attachment, 80)[0], "/a refused");
        let conditions = conditions(&attachment, Kind::HttpRoute, "shop", "r");
        assert!(
            conditions[2].starts_with("PartiallyInvalid "),
            "{conditions:?}"
        );
        assert!(attachment.tables[&80].rules[0].message().invalid);
        assert!(!attachment.tables[&80].rules[1].message().invalid);
    }
    // A header that no match reads, a copy, a redirect, and fields of the response.
    let mirror = json!({"backendRef": {"name": "b", "port": 80}});
    let mirror = json!({"type": "RequestMirror", "requestMirror": mirror});
    let redirect = json!({"type": "RequestRedirect", "requestRedirect": {}});
    let response = json!({"remove": ["x-tenant"]});
    let response = json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": response});
    for (filter, backends) in [
        (set("x-other"), true),
        (mirror, true),
        (response, true),
        (redirect, false),
    ] {
        let mut rule = asking("/a", json!({"filters": [auth(), filter]}));
        if !backends {
            rule.as_object_mut().unwrap().remove("backendRefs");
        }
        let (message, attachment) = problem(json!([
            rule,
            super::rule("web", json!([header("x-tenant")]))
        ]));
        assert_eq!(message, ": ");
        assert_eq!(asked(&attachment, 80)[0], "/a shop/auth:9000");
    }
}

#[test]
fn header_that_a_match_of_another_route_reads_is_not_changed_with_the_filter() {
    let set = json!({"set": [{"name": "x-tenant", "value": "x"}]});
    let set = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": set});
    let one = route(
        "r",
        0,
        json!([asking("/a", json!({"filters": [filter(json!({})), set]}))]),
    );
    assert_eq!(
        asked(&attached(std::slice::from_ref(&one)), 80),
        ["/a shop/auth:9000"]
    );
    let header = json!({"headers": [{"name": "x-tenant", "value": "x"}]});
    let other = route("s", 1, json!([rule("web", json!([header]))]));
    let both = attached(&[one, other]);
    assert_eq!(asked(&both, 80), ["/a refused"]);
    let of = |name| conditions(&both, Kind::HttpRoute, "shop", name);
    assert_eq!(of("r")[0], "not Accepted IncompatibleFilters");
    assert_eq!(of("s")[0], "Accepted Accepted");
}

#[test]
fn rule_that_sends_to_other_pods_is_not_accepted_with_the_filter() {
    let to = |backends: Value| json!([asking("/a", json!({"backendRefs": backends}))]);
    for (backends, expected) in [
        (
            json!([{"name": "web", "port": 80}, {"name": "web", "port": 90, "weight": 0}]),
            None,
        ),
        (
            json!([{"name": "other", "port": 80}]),
            Some("the rule sends requests to shop/other:80"),
        ),
        (
            json!([{"name": "web", "port": 80}, {"name": "other", "port": 80, "weight": 0}]),
            Some("the rule sends requests to shop/other:80"),
        ),
        (
            json!([{"name": "web", "port": 99}]),
            Some("the rule sends requests to shop/web:99"),
        ),
        (
            json!([{"name": "web"}]),
            Some("the rule sends requests to an invalid backend"),
        ),
        // Clients of the Service get 500, and requests do not reach other pods.
        (json!([]), None),
    ] {
        let (message, attachment) = problem(to(backends));
        let server = if expected.is_some() {
            "refused"
        } else {
            "shop/auth:9000"
        };
        assert_eq!(asked(&attachment, 80), [format!("/a {server}")]);
        let expected = expected.map_or_else(
            || ": ".to_owned(),
            |expected| {
                format!("IncompatibleFilters: spec.rules[0].filters[0]: {expected}, whose pods")
            },
        );
        assert!(message.starts_with(&expected), "{message}");
    }
    // A port to which the route does not apply.
    let parent = |port: u16| json!({"group": "", "kind": "Service", "name": "web", "port": port});
    let at = |port: u16, rules: Value| {
        let spec = json!({"parentRefs": [parent(port)], "rules": rules});
        parse_in(Kind::HttpRoute, "shop", "r", 0, spec)
    };
    for (port, server) in [(80, "refused"), (90, "shop/auth:9000")] {
        let own = json!([{"name": "web", "port": 90}]);
        let attachment = attached(&[at(port, to(own))]);
        assert_eq!(asked(&attachment, port), [format!("/a {server}")]);
    }
}

#[test]
fn filter_requires_pods_that_are_known_and_another_server_than_their_own() {
    let message = |service: &Service, route: Route| {
        let attachment = attach_to(service, std::slice::from_ref(&route));
        let condition = &attachment.conditions[&(route.kind, route.key)][&0][0];
        assert_eq!(condition.reason, "IncompatibleFilters");
        assert_eq!(asked(&attachment, 80), ["/ refused"]);
        condition.message.clone()
    };
    let rules = || {
        json!([asking(
            "/",
            json!({"backendRefs": [{"name": "web", "namespace": "shop", "port": 80}]})
        )])
    };
    let consumer = route_of(Kind::HttpRoute, "bank", "r", 0, rules());
    let text = message(&selecting(), consumer);
    assert!(
        text.contains("which requires a route of namespace shop; requests of the rule fail"),
        "{text}"
    );
    let text = message(&web(), route("r", 0, rules()));
    assert!(text.contains("shop/web has no selector"), "{text}");
    let own = filter(json!({"backendRef": {"name": "web", "port": 90}}));
    let text = message(
        &selecting(),
        route("r", 0, json!([asking("/", json!({"filters": [own]}))])),
    );
    assert!(
        text.contains("the authorization server is the parent shop/web itself"),
        "{text}"
    );
}

#[test]
fn server_that_is_no_valid_reference_allows_nothing_and_is_reported() {
    for (reference, reason) in [
        (
            json!({"name": "auth", "port": 9000}),
            crate::object::condition::BACKEND_NOT_FOUND,
        ),
        (
            json!({"name": "auth", "namespace": "x", "port": 9000}),
            crate::object::condition::REF_NOT_PERMITTED,
        ),
    ] {
        let auth = filter(json!({"backendRef": reference}));
        let routes = [route(
            "r",
            0,
            json!([asking("/", json!({"filters": [auth]}))]),
        )];
        let resolve = |_: &Route, reference: &Reference| match &*reference.key.name {
            "auth" => Err(Rejection::new(reason, format!("{}: no", reference.field))),
            _ => Ok(None),
        };
        let service = selecting();
        let attachment = attach(
            &service.key,
            Some(&service),
            routes.iter().collect(),
            None,
            resolve,
        );
        assert_eq!(asked(&attachment, 80), ["/ refused"]);
        assert!(
            !attachment.tables[&80].rules[0].message().invalid,
            "the pods refuse"
        );
        let conditions = &attachment.conditions[&(Kind::HttpRoute, Key::new("shop", "r"))][&0];
        assert!(conditions[0].holds);
        assert_eq!((conditions[1].holds, conditions[1].reason), (false, reason));
        let field = "spec.rules[0].filters[0].externalAuth.backendRef";
        assert_eq!(conditions[1].message, format!("{field}: no"));
    }
}

#[test]
fn pods_refuse_what_an_unreadable_rule_may_protect() {
    let unreadable = json!({"path": {"type": "RegularExpression", "value": "("}});
    let some = json!([prefix("/b"), unreadable]);
    let attachment = attached(&[route(
        "r",
        0,
        json!([open("/a"), asking("/", json!({"matches": some}))]),
    )]);
    assert_eq!(asked(&attachment, 80), ["/a none", "/b refused"]);
    // Another route that cannot be read comes first, which has no filter.
    let older = route("o", 0, json!([{"matches": [unreadable]}]));
    let rules = json!([open("/a"), asking("/", json!({"matches": [unreadable]}))]);
    let attachment = attached(&[older.clone(), route("r", 1, rules)]);
    assert_eq!(asked(&attachment, 80), ["/a refused", "None refused"]);
    let many: Vec<Value> = (0..17).map(|_| asking("/", json!({}))).collect();
    let attachment = attached(&[older, route("r", 1, json!(many))]);
    assert_eq!(asked(&attachment, 80), ["None refused"]);
}

#[test]
fn pods_deny_all_where_a_route_with_the_filter_does_not_apply() {
    let asking = |created| route("r", created, json!([asking("/admin", json!({}))]));
    let denied = |attachment: &Attachment, port| {
        let policy = told(attachment, port).unwrap();
        assert_eq!(
            (&*policy.name, policy.action()),
            ("HTTPRoute shop/r", Action::Deny)
        );
        assert_eq!(policy.rules[0].revision, u32::MAX);
    };
    let parent = json!({"group": "", "kind": "Service", "name": "web", "port": 80});
    let spec =
        json!({"parentRefs": [parent], "rules": [{"backendRefs": [{"name": "web", "port": 80}]}]});
    let grpc = parse_in(Kind::GrpcRoute, "shop", "g", 9, spec);
    let attachment = attached(&[asking(0), grpc]);
    denied(&attachment, 80);
    assert_eq!(asked(&attachment, 90), ["/admin shop/auth:9000"]);
    let told = |attachment: &Attachment| {
        let of_route = &attachment.conditions[&(Kind::HttpRoute, Key::new("shop", "r"))];
        let accepted = &of_route[&0][0];
        assert!(accepted.message.ends_with(
            "; the route has the filter ExternalAuth, so that the pods deny all calls at the ports \
             where it does not apply"
        ));
        accepted.holds
    };
    assert!(told(&attachment), "at the other port");
    // Older routes leave no room.
    let older: Vec<Route> = (0..1024)
        .map(|name| route(&format!("o{name}"), 0, json!([open("/")])))
        .collect();
    let attachment = attached(&[older, vec![asking(1)]].concat());
    denied(&attachment, 80);
    denied(&attachment, 90);
    assert!(!told(&attachment));
}

#[test]
fn grpc_routes_have_no_such_filter() {
    let rules =
        json!([{"filters": [filter(json!({}))], "backendRefs": [{"name": "web", "port": 80}]}]);
    let attachment = attached(&[route_of(Kind::GrpcRoute, "shop", "g", 0, rules)]);
    assert!(attachment.protected.is_empty());
    assert!(attachment.tables[&80].rules[0].message().invalid);
}
