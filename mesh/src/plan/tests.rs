//! Plans of policies in front of calls that were seen.

use std::collections::BTreeMap;

use diy_mesh_controller::explain;
use diy_mesh_model::identity::TRUST_DOMAIN;
use diy_mesh_proto::mesh::v1::{
    AuthorizedPath, Edge, SilentConnection, authorized_path::Kind, edge::Path,
    get_edges_response::Seen, workload,
};
use serde_json::{Value, json};

use super::*;

const DAY: u64 = 86_400;

/// Calls of the account `shop/NAME`, or of clients without identity.
pub(crate) fn edge(caller: &str, port: u32, method: &str, path: Option<Path>) -> Edge {
    let identity = |name| format!("spiffe://{TRUST_DOMAIN}/ns/shop/sa/{name}");
    Edge {
        caller: Some(caller)
            .filter(|name| !name.is_empty())
            .map(identity)
            .unwrap_or_default(),
        port,
        method: method.to_owned(),
        path,
        ..Edge::default()
    }
}

pub(crate) fn segment(path: &str) -> Option<Path> {
    Some(Path::Segment(path.to_owned()))
}

fn pattern(kind: Kind) -> Option<Path> {
    Some(Path::Pattern(AuthorizedPath { kind: Some(kind) }))
}

/// The pods of `shop/cart`, with these calls in two days.
pub(crate) fn group(edges: Vec<Edge>) -> Group {
    let seen = edges.into_iter().map(|edge| Seen {
        edge: Some(edge),
        last_day: 9,
    });
    let port = |port| workload::Port {
        port,
        protocol: "TCP".to_owned(),
        ..workload::Port::default()
    };
    Group {
        namespace: "shop".to_owned(),
        service_account: "cart".to_owned(),
        labels: BTreeMap::from([("app".to_owned(), "cart".to_owned())]),
        ports: vec![port(8080), port(9090)],
        edges: seen.collect(),
        since: 8 * DAY as i64,
        ..Group::default()
    }
}

fn policy(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
        "metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

/// A policy for all pods of the namespace.
fn spec(action: &str, rules: Value) -> Value {
    json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "action": action, "rules": rules})
}

fn planned(groups: Vec<Group>, before: &[Value], change: &[Value], strict: bool) -> Plan {
    let index = |objects: &[Value]| {
        let (index, problems) = explain::index(objects, "service-mesh", TRUST_DOMAIN);
        assert_eq!(problems, [""; 0]);
        index
    };
    let all = [before, change].concat();
    let (mut before, mut after) = (index(before), index(&all));
    let trust_domain = TRUST_DOMAIN.to_owned();
    let observed = Observed {
        groups,
        trust_domain,
    };
    plan(&observed, [&mut before, &mut after], |_| strict, 10 * DAY)
}

/// The outcomes of these calls by a DENY and an ALLOW rule with a condition.
fn verdicts(condition: Value, edge: &Edge) -> [Option<Outcome>; 2] {
    ["DENY", "ALLOW"].map(|action| {
        let rules = json!([{"networkAttributes": {"ports": [8080]}, "requests": [condition]}]);
        let change = policy("new", spec(action, rules));
        let plan = planned(vec![group(vec![edge.clone()])], &[], &[change], false);
        plan.effects.first().map(|effect| effect.verdict.verdict)
    })
}

const ALLOWED: Option<Outcome> = None;
const UNKNOWN: Option<Outcome> = Some(Outcome::Unknown);
const DENIED: Option<Outcome> = Some(Outcome::Denied);

#[test]
fn change_of_pods_that_were_not_watched_long_enough_is_unseen() {
    let unseen = |strict: &str, min_watch| {
        let change = policy("new", spec("DENY", json!([])));
        let mut plan = planned(vec![group(vec![])], &[], &[change], true);
        let names = ["new", "other"].map(|name| format!("AuthorizationPolicy shop/{name}"));
        plan.add_unseen(names.into_iter(), [strict.to_owned()].iter(), min_watch);
        assert_eq!(plan.outcome(), Outcome::Allowed);
        plan.unseen
    };
    let other = "AuthorizationPolicy shop/other is about no pod whose proxy has reported";
    for seen in ["shop", "shop/cart"] {
        assert_eq!(unseen(seen, 2 * DAY), [other]);
    }
    let expected = [
        other,
        "no proxy of pods of shop/web has reported",
        "pods were watched for 2 d only, less than 2 d 1 h",
    ];
    assert_eq!(unseen("shop/web", 2 * DAY + 3600), expected);
}

#[test]
fn paths_are_compared_as_far_as_they_were_recorded() {
    let path = |kind: &str, value: &str| json!({"paths": [{"type": kind, "value": value}]});
    let (matches, misses, unknown) = ([DENIED, ALLOWED], [ALLOWED, DENIED], [UNKNOWN, UNKNOWN]);
    for (seen, kind, value, expected) in [
        (segment("/items"), "PathPrefix", "/items", matches),
        (segment("/items"), "PathPrefix", "/", matches),
        (segment("/items"), "Template", "/{**}", matches),
        (segment("/items"), "Template", "/{*}/{**}", matches),
        (segment("/items"), "PathPrefix", "/admin", misses),
        (segment("/items"), "PathPrefix", "/item", misses),
        (segment("/items"), "Exact", "/", misses),
        (segment("/items"), "Exact", "/items", unknown),
        (segment("/items"), "PathPrefix", "/items/1", unknown),
        (segment("/items"), "Template", "/items/{*}", unknown),
        (segment("/items"), "Template", "/{*}", unknown),
        (segment("/items"), "Suffix", ".html", unknown),
        (segment("/ITEMS"), "PathPrefix", "/items", unknown),
        (segment("/"), "Exact", "/", matches),
        (segment("/"), "PathPrefix", "/items", misses),
        (None, "PathPrefix", "/items", unknown),
        (
            pattern(Kind::Template("/a/{*}".into())),
            "Template",
            "/a/{*}",
            matches,
        ),
        (
            pattern(Kind::Template("/a/{*}".into())),
            "PathPrefix",
            "/a",
            matches,
        ),
        (
            pattern(Kind::Template("/a/{*}".into())),
            "Template",
            "/{*}/{*}",
            matches,
        ),
        (
            pattern(Kind::Template("/a/{*}".into())),
            "Template",
            "/a/{*}/c",
            misses,
        ),
        (
            pattern(Kind::Template("/a/{*}".into())),
            "Exact",
            "/a/b",
            unknown,
        ),
        (
            pattern(Kind::Template("/a/{*}".into())),
            "Exact",
            "/a/b/",
            unknown,
        ),
        (
            pattern(Kind::Suffix(".html".into())),
            "Suffix",
            ".html",
            matches,
        ),
        (
            pattern(Kind::Suffix(".html".into())),
            "PathPrefix",
            "/a",
            unknown,
        ),
        (
            pattern(Kind::Exact("/a/b".into())),
            "PathPrefix",
            "/a",
            matches,
        ),
        (
            pattern(Kind::Exact("/a/b".into())),
            "Exact",
            "/A/b/",
            [DENIED, DENIED],
        ),
        (
            Some(Path::Grpc("/s.S/M".into())),
            "PathPrefix",
            "/s.S",
            matches,
        ),
    ] {
        let edge = edge("web", 8080, "GET", seen);
        let told = verdicts(path(kind, value), &edge);
        assert_eq!(told, expected, "{:?} {kind} {value}", edge.path);
    }
}

#[test]
fn what_was_not_recorded_cannot_be_told_unless_another_condition_decides() {
    let get = edge("web", 8080, "GET", segment("/items"));
    let header = json!({"name": "x", "type": "Present"});
    for (condition, expected) in [
        (json!({"hosts": ["cart"]}), [UNKNOWN, UNKNOWN]),
        (json!({"headers": [header]}), [UNKNOWN, UNKNOWN]),
        (
            json!({"hosts": ["cart"], "methods": ["POST"]}),
            [ALLOWED, DENIED],
        ),
        (json!({"methods": ["GET"]}), [DENIED, ALLOWED]),
    ] {
        assert_eq!(verdicts(condition.clone(), &get), expected, "{condition}");
    }
    // A method that has no name.
    let other = edge("web", 8080, "OTHER", segment("/items"));
    assert_eq!(
        verdicts(json!({"methods": ["GET"]}), &other),
        [ALLOWED, DENIED]
    );
    assert_eq!(
        verdicts(json!({"methods": ["PROPFIND"]}), &other),
        [UNKNOWN, UNKNOWN]
    );
    // Connections without HTTP match no ALLOW, and every DENY.
    let opaque = edge("web", 8080, "", None);
    assert_eq!(
        verdicts(json!({"methods": ["GET"]}), &opaque),
        [DENIED, DENIED]
    );
}

#[test]
fn denied_and_closed_are_told_and_what_stays_is_not() {
    let calls = || {
        vec![
            edge("web", 8080, "GET", segment("/items")),
            edge("", 8080, "GET", segment("/items")),
            edge("prometheus", 9090, "GET", segment("/metrics")),
        ]
    };
    let web = json!([{"type": "ServiceAccount", "serviceAccount": {"name": "web"}}]);
    let rules = json!([{"sources": web, "networkAttributes": {"ports": [8080]}}]);
    let allow = policy("cart", spec("ALLOW", rules));
    let plan = planned(
        vec![group(calls())],
        &[],
        std::slice::from_ref(&allow),
        false,
    );
    let told: Vec<String> = plan
        .effects
        .iter()
        .map(|one| format!("{} {} {}", one.call, one.port, one.verdict.reason))
        .collect();
    let name = "AuthorizationPolicy shop/cart: no rule matches";
    assert_eq!(
        told,
        [
            format!(
                "GET /items/... from unauthenticated 8080 {name}, the nearest is rules[0] but for its sources"
            ),
            format!("GET /metrics/... from shop/prometheus 9090 {name}"),
        ]
    );
    assert_eq!(plan.outcome(), Outcome::Denied);
    let [
        Closed {
            port: Some(9090),
            policy: name,
            ..
        },
    ] = &plan.closed[..]
    else {
        panic!("one port is closed: {:?}", plan.closed)
    };
    assert_eq!(name, "AuthorizationPolicy shop/cart");
    assert_eq!(
        (plan.groups, plan.calls, plan.watched),
        (1, 3, Some((2 * DAY, 2 * DAY)))
    );
    // The same again changes nothing.
    let plan = planned(
        vec![group(calls())],
        std::slice::from_ref(&allow),
        std::slice::from_ref(&allow),
        false,
    );
    assert_eq!(
        (plan.groups, plan.effects.len(), plan.closed.len()),
        (0, 0, 0)
    );
    // One that replaces it allows again.
    let open = policy("cart", spec("ALLOW", json!([{}])));
    let plan = planned(vec![group(calls())], &[allow], &[open], false);
    let all_allowed = plan
        .effects
        .iter()
        .all(|one| one.verdict.verdict == Outcome::Allowed);
    assert!(plan.effects.len() == 2 && all_allowed, "{:?}", plan.effects);
    assert_eq!((plan.outcome(), plan.closed.len()), (Outcome::Allowed, 0));
}

#[test]
fn calls_that_a_server_decides_about_are_told_as_such() {
    let calls = vec![
        edge("web", 8080, "GET", segment("/items")),
        edge("web", 8080, "GET", segment("/health")),
        edge("web", 9090, "", None),
    ];
    let items = json!({"paths": [{"type": "PathPrefix", "value": "/items"}]});
    let rules = json!([{"networkAttributes": {"ports": [8080]}, "requests": [items]}]);
    let mut external = spec("ExternalAuth", rules);
    let backend = json!({"name": "auth", "port": 9000});
    external["externalAuth"] = json!({"protocol": "HTTP", "backendRef": backend});
    let plan = planned(vec![group(calls)], &[], &[policy("new", external)], false);
    let [effect] = &plan.effects[..] else {
        panic!(
            "a server decides about one kind of calls: {:?}",
            plan.effects
        )
    };
    assert_eq!(
        (&*effect.call, effect.port),
        ("GET /items/... from shop/web", 8080)
    );
    assert_eq!(effect.verdict.verdict, Outcome::Asks);
    let reason = "allowed if shop/auth:9000 allows it (AuthorizationPolicy shop/new)";
    assert_eq!(effect.verdict.reason, reason);
    assert_eq!((plan.outcome(), plan.closed.len()), (Outcome::Asks, 0));
}

#[test]
fn strict_mode_denies_what_was_plaintext() {
    let silent = Edge {
        silent: Some(SilentConnection {
            port: 8080,
            ..SilentConnection::default()
        }),
        ..Edge::default()
    };
    let calls = vec![
        edge("web", 8080, "GET", segment("/items")),
        edge("", 8080, "GET", segment("/items")),
        silent,
    ];
    let plan = planned(vec![group(calls)], &[], &[], true);
    let [effect] = &plan.effects[..] else {
        panic!("one kind of calls is denied: {:?}", plan.effects)
    };
    assert_eq!(effect.call, "GET /items/... from unauthenticated");
    assert_eq!(effect.verdict.verdict, Outcome::Denied);
    assert_eq!(plan.calls, 2, "a connection without a byte is no call");
}

#[test]
fn calls_that_were_cut_cannot_be_told() {
    let mut cut = group(vec![edge("web", 8080, "GET", segment("/items"))]);
    cut.incomplete = true;
    let open = policy("cart", spec("ALLOW", json!([{}])));
    let plan = planned(vec![cut], &[], std::slice::from_ref(&open), false);
    assert_eq!(plan.incomplete, ["shop/cart app=cart"]);
    assert_eq!(plan.outcome(), Outcome::Unknown);
    // The rest of the groups of a namespace.
    let rest = Group {
        namespace: "shop".to_owned(),
        incomplete: true,
        ..Group::default()
    };
    let plan = planned(vec![rest], &[], &[open], false);
    assert_eq!(
        (plan.incomplete, plan.groups),
        (vec!["shop, other pods".to_owned()], 0)
    );
}

#[test]
fn outbound_policies_are_planned_with_calls_to_outside_only() {
    let to = |destination: &str| Edge {
        destination: destination.to_owned(),
        ..Edge::default()
    };
    let seen = || {
        vec![group(vec![
            edge("web", 8080, "GET", segment("/items")),
            to("api.example.com:443"),
            to("192.0.2.1:5432"),
        ])]
    };
    let outbound = |mut spec: Value| {
        spec["direction"] = "Outbound".into();
        policy("out", spec)
    };
    let told = |before: &[Value], change: &Value| {
        let plan = planned(seen(), before, std::slice::from_ref(change), false);
        let effects = plan.effects.into_iter();
        let effects = effects.map(|one| (one.port, one.call, one.verdict.verdict));
        let closed = plan.closed.into_iter().map(|one| (one.port, one.policy));
        (effects.collect::<Vec<_>>(), closed.collect::<Vec<_>>())
    };
    let closes = || vec![(None, "AuthorizationPolicy shop/out".to_owned())];
    let denied = |port, call: &str| (port, format!("to {call}"), Outcome::Denied);
    let names = json!([{"type": "Host", "host": "api.example.com"}]);
    let allow = outbound(spec("ALLOW", json!([{"destinations": names}])));
    let to_database = denied(5432, "192.0.2.1:5432");
    assert_eq!(told(&[], &allow), (vec![to_database.clone()], closes()));
    let all = json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "defaultAction": "DENY"});
    let default = outbound(all.clone());
    let to_api = denied(443, "api.example.com:443");
    assert_eq!(told(&[], &default), (vec![to_api, to_database], closes()));
    // Closed already, or of the ports of rules only.
    let closed = [policy("default", default["spec"].clone())];
    assert_eq!(told(&closed, &allow).1, []);
    let mut scoped = spec(
        "ALLOW",
        json!([{"destinations": names, "networkAttributes": {"ports": [443]}}]),
    );
    scoped["scope"] = "Ports".into();
    assert_eq!(told(&[], &outbound(scoped)), (vec![], vec![]));
    // Inbound policies say nothing about calls to outside.
    let (effects, closed) = told(&[], &policy("in", spec("ALLOW", json!([]))));
    assert_eq!(effects.len(), 1, "{effects:?}");
    let ports: Vec<_> = closed.iter().map(|(port, _)| *port).collect();
    assert_eq!(ports, [Some(8080), Some(9090)]);
}
