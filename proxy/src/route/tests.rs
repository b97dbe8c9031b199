//! Tests of matching and of the choice of backends, on tables.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use http::Request;

use diy_mesh_proto::pattern::Pattern;

use super::matching::{FieldMatch, Index, PathMatch, ValueMatch};
use super::*;
use crate::http::view::RequestView;
use crate::http::view::testing::request;

fn exact(path: &str) -> Match {
    Match {
        path: Some(PathMatch::Exact(path.to_owned())),
        ..Match::default()
    }
}

fn prefix(path: &str) -> Match {
    Match {
        path: Some(PathMatch::prefix(path)),
        ..Match::default()
    }
}

fn regex(expression: &str) -> Match {
    Match {
        path: Some(PathMatch::Regex(Pattern::parse(expression).unwrap())),
        ..Match::default()
    }
}

fn field(name: &str, value: &str) -> FieldMatch {
    FieldMatch {
        name: name.to_owned(),
        value: ValueMatch::Exact(value.to_owned()),
    }
}

/// The index of the first match.
fn select(matches: &[Match], request: &RequestView<'_>) -> Option<usize> {
    let input = MatchInput::new(*request);
    Index::new(matches).select(matches, &input).unwrap()
}

fn head(fields: &[(&str, &str)]) -> diy_mesh_http2::Request {
    let builder = Request::get("/");
    let builder = fields.iter().fold(builder, |builder, (name, value)| {
        builder.header(*name, *value)
    });
    diy_mesh_http2::Request::from(&builder.body(()).unwrap().into_parts().0)
}

#[test]
fn paths_match_as_they_were_sent() {
    for (condition, target, expected) in [
        (exact("/a"), "/a", true),
        (exact("/a"), "/a?b", true),
        (exact("/a"), "/a/", false),
        (exact("/a"), "/A", false),
        (exact("/a"), "//a", false),
        (exact("/a"), "/./a", false),
        (exact("/a"), "/%61", false),
        (exact("/a"), "http://host/a", true),
        (exact("/"), "http://host", true),
        (exact("/"), "http://host?q", true),
        (prefix("/a"), "/a", true),
        (prefix("/a"), "/a/", true),
        (prefix("/a"), "/a/b?c", true),
        (prefix("/a"), "/ab", false),
        (prefix("/a/"), "/a", true),
        (prefix("/a/"), "/a/b", true),
        (prefix("/a/"), "/ab", false),
        (prefix("/a"), "/b/../a", false),
        (prefix("/a"), "/a/../b", true),
        (prefix("/"), "/anything", true),
        (prefix("/"), "*", true),
        (Match::default(), "/anything", true),
        (prefix("/pkg.Service"), "/pkg.Service/Method", true),
        (prefix("/pkg.Service"), "/pkg.Service2/Method", false),
        (regex("/a[0-9]+"), "/a12", true),
        (regex("/a[0-9]+"), "/a12/", false),
        (regex("/a|/b"), "/b", true),
        (regex("/a|/b"), "/bc", false),
        (regex("/.*"), "/\u{e4}", true),
    ] {
        let matched = select(&[condition], &request("GET", target)).is_some();
        assert_eq!(matched, expected, "{target}");
    }
}

#[test]
fn fields_parameters_and_method_match() {
    let parts = head(&[
        ("x-a", "1"),
        ("X-Many", "1"),
        ("x-many", "2"),
        ("cookie", "a=1"),
        ("cookie", "b=2"),
        ("host", "shop.example:80"),
    ]);
    let view = RequestView {
        head: &parts,
        ..request("POST", "/p?a=1&a=2&b&c=%31&=x")
    };
    let header = |name, value| Match {
        headers: vec![field(name, value)],
        ..Match::default()
    };
    let query = |name, value| Match {
        query: vec![field(name, value)],
        ..Match::default()
    };
    let method = |method: &str| Match {
        method: Some(method.to_owned()),
        ..Match::default()
    };
    for (condition, expected) in [
        (header("X-A", "1"), true),
        (header("x-a", "2"), false),
        (header("x-b", ""), false),
        (header("x-many", "1,2"), true),
        (header("x-many", "1"), false),
        (header("cookie", "a=1; b=2"), true),
        (header("Host", "shop.example:80"), true),
        (query("a", "1"), true),
        (query("a", "2"), false),
        (query("A", "1"), false),
        (query("b", ""), true),
        (query("c", "%31"), true),
        (query("c", "1"), false),
        (query("d", ""), false),
        (method("POST"), true),
        (method("post"), false),
    ] {
        let text = format!("{condition:?}");
        assert_eq!(select(&[condition], &view).is_some(), expected, "{text}");
    }
    let both = Match {
        headers: vec![field("x-a", "1")],
        method: Some("GET".to_owned()),
        ..prefix("/p")
    };
    assert_eq!(select(&[both], &view), None, "all conditions must hold");
}

#[test]
fn first_match_wins_whatever_its_kind() {
    let with_header = |one: Match| Match {
        headers: vec![field("x-a", "1")],
        ..one
    };
    let matches = [
        with_header(exact("/a/b")),
        with_header(regex("/a/.*")),
        prefix("/a/b"),
        exact("/a/b"),
        regex("/a/.*"),
        prefix("/a"),
        Match::default(),
    ];
    let parts = head(&[("x-a", "1")]);
    for (target, has_header, expected) in [
        ("/a/b", true, 0),
        ("/a/c", true, 1),
        ("/a/b", false, 2),
        ("/a/b/c", false, 2),
        ("/a/c", false, 4),
        ("/a", false, 5),
        ("/z", false, 6),
    ] {
        let mut view = request("GET", target);
        if has_header {
            view.head = &parts;
        }
        assert_eq!(select(&matches, &view), Some(expected), "{target}");
    }
}

#[test]
fn index_selects_as_a_search_from_the_first_match_on() {
    let mut rng = fastrand::Rng::with_seed(7);
    let paths = ["/", "/a", "/a/b", "/a/b/c", "/ab", "/b", "/b/a", "/c/d/e"];
    for _ in 0..300 {
        let matches: Vec<Match> = (0..rng.usize(1..12))
            .map(|_| {
                let path = paths[rng.usize(..paths.len())];
                let mut one = match rng.u8(..3) {
                    0 => exact(path),
                    1 => prefix(path),
                    _ => regex(path),
                };
                one.method = rng.bool().then(|| "GET".to_owned());
                let pattern = ValueMatch::Regex(Pattern::parse("[12]").unwrap());
                let headers = [field("X-A", "1"), field("x-a", "2"), field("x-b", "1,2")];
                let headers = headers.into_iter().chain([FieldMatch {
                    name: "x-a".to_owned(),
                    value: pattern,
                }]);
                one.headers = headers.filter(|_| rng.u8(..4) == 0).collect();
                one
            })
            .collect();
        let heads = [
            head(&[]),
            head(&[("x-a", "1"), ("x-b", "1"), ("x-b", "2")]),
            head(&[("x-a", "2")]),
        ];
        for path in paths {
            for (method, head) in ["GET", "PUT"]
                .iter()
                .flat_map(|method| heads.iter().map(move |head| (method, head)))
            {
                let view = RequestView {
                    head,
                    ..request(method, path)
                };
                let searched =
                    (0..matches.len()).find(|at| select(&matches[*at..=*at], &view).is_some());
                assert_eq!(select(&matches, &view), searched, "{matches:?} {path}");
            }
        }
    }
}

#[test]
fn expressions_are_limited_and_whole() {
    for invalid in [
        "(",
        "a)|(b",
        "(?=a)",
        "(a)\\1",
        "((((a{1,200}){1,200}){1,200}))",
    ] {
        assert!(Pattern::parse(invalid).is_err(), "{invalid}");
    }
    assert!(Pattern::parse(&"a".repeat(1_000_000)).is_err());
    assert!(Pattern::parse("(?x) a # comment").is_err());
    // Linear time: a search that backtracks would not end.
    let condition = [regex("(/|/a|a)*(a*)*b")];
    let path = format!("/{}", "a".repeat(20_000));
    assert_eq!(select(&condition, &request("GET", &path)), None);
}

fn service() -> Service<'static> {
    Service {
        name: "shop/web",
        is_pod: false,
        address: SocketAddr::from(([10, 96, 0, 7], 80)),
    }
}

fn backends(weights: &[(&str, u32)]) -> Vec<RouteBackend> {
    let backend = |(name, weight): &(&str, u32)| RouteBackend {
        to: Some(BackendRef::Service(Arc::from(*name))).filter(|_| !name.is_empty()),
        weight: *weight,
        changes: Arc::default(),
    };
    weights.iter().map(backend).collect()
}

/// The plan of a GET request.
fn plan(routes: &Routes, service: Service<'_>, target: &str, rng: &mut fastrand::Rng) -> Plan {
    let request = MatchInput::new(request("GET", target));
    routes.plan(&request, &service, || SystemTime::UNIX_EPOCH, rng)
}

/// How often each backend, or failure, was chosen.
fn shares(weights: &[(&str, u32)], times: usize) -> BTreeMap<String, usize> {
    let rule = Rule {
        backends: backends(weights),
        ..Rule::default()
    };
    let routes = Routes::new(vec![Match::default()], vec![Arc::new(rule)]);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut shares = BTreeMap::new();
    for _ in 0..times {
        let plan = plan(&routes, service(), "/", &mut rng);
        let chosen = match &plan.answer {
            None => plan.backend().expect("a backend").name().to_string(),
            Some(Answer::Failure(failure)) => failure.code().label().to_owned(),
            Some(Answer::Reply(reply)) => panic!("{reply:?}"),
        };
        *shares.entry(chosen).or_default() += 1;
    }
    shares
}

#[test]
fn backends_get_their_share_of_requests() {
    let (v1, v2) = ("shop/v1:80", "shop/v2:80");
    let only = |name: &str| BTreeMap::from([(name.to_owned(), 100)]);
    let shared = shares(&[(v1, 90), (v2, 10)], 10_000);
    // 10,000 draws: within four standard deviations of 9,000.
    assert!((8880..=9120).contains(&shared[v1]), "{shared:?}");
    assert_eq!(shares(&[(v1, 1)], 100), only(v1));
    assert_eq!(shares(&[(v1, 0), (v2, 3)], 100), only(v2));
    assert_eq!(shares(&[(v1, 0)], 100), only("invalid-backend"));
    assert_eq!(shares(&[], 100), only("invalid-backend"));
    let shared = shares(&[(v1, 1), ("", 1)], 10_000);
    assert!(
        (4800..=5200).contains(&shared["invalid-backend"]),
        "{shared:?}"
    );
    let large = shares(&[(v1, u32::MAX), (v2, u32::MAX)], 1000);
    assert!((400..=600).contains(&large[v1]), "{large:?}");
}

#[test]
fn mirrors_are_drawn_by_their_shares() {
    let mirror = |name: &str, numerator, denominator| Mirror {
        backend: name.to_owned(),
        numerator,
        denominator,
    };
    let changes = Changes {
        mirrors: vec![
            mirror("all", 1, 1),
            mirror("some", 20, 100),
            mirror("none", 0, 100),
        ],
        ..Changes::default()
    };
    let backend = RouteBackend {
        changes: Arc::new(changes),
        ..backends(&[("shop/v1:80", 1)]).remove(0)
    };
    let rule = Rule {
        backends: vec![backend],
        ..Rule::default()
    };
    let routes = Routes::new(vec![Match::default()], vec![Arc::new(rule)]);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut copies = BTreeMap::new();
    for _ in 0..10_000 {
        for name in plan(&routes, service(), "/", &mut rng).mirrors() {
            *copies.entry(name.to_string()).or_default() += 1;
        }
    }
    assert_eq!(copies.remove("all"), Some(10_000));
    // 10,000 draws: within four standard deviations of 2,000.
    let some = copies.remove("some").unwrap_or(0);
    assert!((1840..=2160).contains(&some), "{some}");
    assert!(copies.is_empty(), "{copies:?}");
}

#[test]
fn requests_without_a_way_fail() {
    let rng = || fastrand::Rng::with_seed(7);
    let rule = || Arc::new(Rule::default());
    let routes = Routes::new(vec![exact("/a")], vec![rule()]);
    let fail = |routes: &Routes, service: Service<'_>, target| match plan(
        routes,
        service,
        target,
        &mut rng(),
    )
    .answer
    {
        Some(Answer::Failure(failure)) => {
            let (status, grpc) = (failure.status().as_u16(), failure.grpc_status());
            (failure.code().label(), status, grpc, failure.to_string())
        }
        other => panic!("{other:?}"),
    };
    let (code, status, grpc, _) = fail(&routes, service(), "/b");
    assert_eq!((code, status, grpc), ("no-route", 404, 12));
    let (code, status, grpc, _) = fail(&routes, service(), "/a");
    assert_eq!((code, status, grpc), ("invalid-backend", 500, 14));
    let rejected = Routes::rejected("match 3: no".to_owned());
    let (code, status, grpc, message) = fail(&rejected, service(), "/a");
    assert_eq!((code, status, grpc), ("invalid-routes", 500, 14));
    assert!(
        message.contains("shop/web") && message.contains("match 3: no"),
        "{message}"
    );
    // The pod of a headless Service is the backend of every rule.
    let pod = Service {
        is_pod: true,
        ..service()
    };
    let planned = plan(&routes, pod, "/a", &mut rng());
    assert!(planned.answer.is_none() && planned.backend().is_none());
    assert_eq!(fail(&routes, pod, "/b").0, "no-route");
    // Unless the rule cannot be applied.
    let invalid = Rule {
        is_invalid: true,
        ..Rule::default()
    };
    let invalid = Routes::new(vec![exact("/a")], vec![Arc::new(invalid)]);
    assert_eq!(fail(&invalid, pod, "/a").0, "invalid-backend");
    // A rule of a policy leaves requests where they are.
    let rule = Rule {
        to_destination: true,
        backends: backends(&[("", 1)]),
        ..Rule::default()
    };
    let matches = vec![prefix("/")];
    let to_destination = Routes::new(matches, vec![Arc::new(rule)]);
    let planned = plan(&to_destination, service(), "/", &mut rng());
    assert!(planned.answer.is_none() && planned.backend().is_none());
}
