//! The answers of the server, from a source of the test.

mod browser;
mod fixture;
mod page;

use hyper::{HeaderMap, Method};
use serde_json::Value;

use super::*;
use fixture::Fake;

pub(super) const PORT: u16 = 4100;

fn token() -> String {
    "07".repeat(16)
}

fn server(source: Fake, port: u16) -> Server<Fake> {
    let token = token();
    Server::new(source, Guard { port, token })
}

/// The response to a request of the page.
async fn get(server: &Server<Fake>, path: &str) -> (StatusCode, HeaderMap, String) {
    let bearer = format!("Bearer {}", token());
    let request = Request::get(path).header("host", format!("127.0.0.1:{PORT}"));
    let request = request.header("authorization", bearer).body(());
    respond(server, request.expect("a request")).await
}

async fn respond(server: &Server<Fake>, request: Request<()>) -> (StatusCode, HeaderMap, String) {
    use http_body_util::BodyExt;
    let (head, body) = server.respond(&request).await.into_parts();
    let body = body.collect().await.expect("it is complete").to_bytes();
    let body = String::from_utf8(body.to_vec()).expect("it is text");
    (head.status, head.headers, body)
}

async fn json(server: &Server<Fake>, path: &str) -> Value {
    let (status, _, body) = get(server, path).await;
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).expect("it is JSON")
}

#[tokio::test]
async fn page_is_served_without_token_and_data_is_not() {
    let server = server(Fake::shop(), PORT);
    for (path, expected) in [
        ("/", 200),
        ("/app.js", 200),
        ("/style.css", 200),
        ("/api/traffic", 401),
        ("/api/workload?name=shop/cart", 401),
        ("/api/why?id=10.244.1.7-5f3a9c210b44", 401),
        ("/elsewhere", 401),
    ] {
        let request = Request::get(path).header("host", format!("localhost:{PORT}"));
        let (status, headers, body) = respond(&server, request.body(()).expect("a request")).await;
        assert_eq!(status, expected, "{path}");
        for (name, part) in [
            (
                "content-security-policy",
                "default-src 'none'; script-src 'self';",
            ),
            ("content-security-policy", "frame-ancestors 'none'"),
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("content-type", "; charset=utf-8"),
        ] {
            let value = headers[name].to_str().expect("it is text");
            assert!(value.contains(part), "{path}: {name}: {value}");
        }
        assert!(status == 200 || body.contains("open the URL"), "{body}");
    }
    assert_eq!(server.source.asked.get(), 0);
    let post = Request::builder().method(Method::POST).uri("/");
    let post = post.header("host", format!("localhost:{PORT}")).body(());
    let (status, ..) = respond(&server, post.expect("a request")).await;
    assert_eq!(status, 405);
}

#[tokio::test(start_paused = true)]
async fn tabs_share_one_question_a_second() {
    let server = server(Fake::shop(), PORT);
    for (milliseconds, asked) in [(0, 1), (0, 1), (999, 1), (1, 2), (5000, 3)] {
        tokio::time::advance(Duration::from_millis(milliseconds)).await;
        let traffic = json(&server, "/api/traffic").await;
        assert_eq!(server.source.asked.get(), asked);
        assert_eq!(traffic["error"], Value::Null);
    }
}

#[tokio::test(start_paused = true)]
async fn failed_question_leaves_the_earlier_data_with_its_age() {
    let server = server(Fake::shop(), PORT);
    let traffic = json(&server, "/api/traffic").await;
    assert_eq!(traffic["age_ms"], 0);
    let names = |list: &Value| list.as_array().map_or(0, Vec::len);
    let known = (names(&traffic["workloads"]), names(&traffic["edges"]));
    assert_eq!(known, (9, 9));
    assert_eq!(traffic["edges"][0]["from"], "(no identity)");
    assert_eq!(traffic["edges"][0]["mutual_tls"], 0.0);
    *server.source.sample.borrow_mut() = Err("no controller".into());
    tokio::time::advance(Duration::from_secs(3)).await;
    let traffic = json(&server, "/api/traffic").await;
    assert_eq!(
        (&traffic["age_ms"], &traffic["error"]),
        (&3000.into(), &"no controller".into())
    );
    assert_eq!(
        (names(&traffic["workloads"]), names(&traffic["edges"])),
        known
    );
}

#[tokio::test]
async fn workload_has_states_and_failures_beside_others() {
    let server = server(Fake::shop(), PORT);
    let workload = json(&server, "/api/workload?name=shop/cart").await;
    assert_eq!(
        workload["pods"][0]["state"]["certificate"]["trust_roots"],
        1
    );
    assert_eq!(workload["pods"][1]["error"], "timed out");
    let exchanges = workload["exchanges"].as_array().expect("a list");
    let failed = exchanges.iter().filter(|one| one["is_failure"] == true);
    assert_eq!((exchanges.len(), failed.count()), (53, 3));
    let times = exchanges.iter().map(|one| one["time"].as_str());
    assert!(
        times.is_sorted_by(|one, other| one >= other),
        "the latest first"
    );
    let failed = &exchanges[0];
    assert_eq!(failed["with"], "pay/checkout");
    assert_eq!(
        (&failed["failure"], &failed["subject"]),
        (&"connect-failed".into(), &"GET /3".into())
    );
}

#[tokio::test]
async fn why_is_the_page_of_mesh_why() {
    let server = server(Fake::shop(), PORT);
    for path in [
        "/api/why?id=10.244.1.7-5f3a9c210b44",
        "/api/why?from=shop/cart&to=pay/checkout",
    ] {
        let story = json(&server, path).await;
        assert_eq!(story["is_failure"], true);
        let page = story["page"].as_str().expect("a text");
        assert!(
            page.contains("\nWhy: the proxy of the caller answered connect-failed"),
            "{page}"
        );
    }
}

#[tokio::test]
async fn names_are_checked_before_they_become_paths() {
    let server = server(Fake::shop(), PORT);
    for (path, expected) in [
        ("/api/workload", 400),
        ("/api/workload?name=shop", 400),
        ("/api/workload?name=../cart", 400),
        ("/api/workload?name=shop/..%2Fcart", 400),
        ("/api/workload?name=shop/cart/x", 400),
        ("/api/workload?name=shop/", 400),
        ("/api/why?id=1", 400),
        ("/api/why?from=shop/web", 400),
        ("/api/why?from=shop/web&to=SHOP/cart", 400),
        ("/api/elsewhere", 404),
        ("/api/workload?name=shop/gone", 502),
    ] {
        let (status, _, body) = get(&server, path).await;
        assert_eq!(status, expected, "{path}: {body}");
    }
}
