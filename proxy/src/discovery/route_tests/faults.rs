//! Tests of faults, from the controller's message to the response.

use std::time::Instant;

use super::*;
use crate::observe::recent::testing::without_ids;

const POLICY: &str = "TrafficPolicy shop/web";
/// Longer than a test.
const HOUR: u64 = 3_600_000;

fn share(numerator: u32, denominator: u32) -> Option<proto::Share> {
    Some(proto::Share {
        numerator,
        denominator,
    })
}

fn delay(milliseconds: u64) -> proto::Fault {
    proto::Fault {
        name: POLICY.to_owned(),
        delay: milliseconds,
        delayed: share(1, 1),
        ..proto::Fault::default()
    }
}

fn abort(status: u32) -> proto::Fault {
    proto::Fault {
        name: POLICY.to_owned(),
        abort_status: status,
        aborted: share(1, 1),
        ..proto::Fault::default()
    }
}

fn faulty(faults: Vec<proto::Fault>) -> proto::Routes {
    proto::Routes {
        faults,
        ..one(to(&[(V1, 1)]))
    }
}

fn call() -> Request<()> {
    let call = Request::post("http://web/").header("content-type", "application/grpc");
    call.body(()).unwrap()
}

#[test]
fn aborts_replace_the_response_in_both_versions_and_reach_no_backend() {
    on_worker(async {
        let (app, requests) = app("v1").await;
        let mesh = Mesh::new(faulty(vec![abort(418), abort(503)]), &[(V1, app)]).await;
        let mut client = mesh.connect().await;
        for _ in 0..2 {
            // The connection stays open for the next request.
            client
                .write_all(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
                .await
                .unwrap();
            let expected = "HTTP/1.1 418 I'm a teapot\r\ncontent-type: text/plain; charset=utf-8\r\n\
                            content-length: 32\r\nx-mesh-error: fault-injected\r\n\r\n\
                            fault of TrafficPolicy shop/web\n";
            let id = "x-mesh-exchange: 127.0.0.1-000000000000\r\n";
            let mut response = vec![0; expected.len() + id.len()];
            client.read_exact(&mut response).await.unwrap();
            let response = String::from_utf8(response).unwrap();
            assert_eq!(without_ids(&response), expected);
        }
        let plain = Request::get("http://web/").body(()).unwrap();
        let (head, _) = mesh.http2(plain).await;
        assert_eq!(head.status(), 418);
        assert_eq!(head.headers()["x-mesh-error"], "fault-injected");
        for (status, grpc_status) in [(400, "13"), (404, "12"), (503, "14"), (500, "2")] {
            let mesh = Mesh::new(faulty(vec![abort(status)]), &[(V1, app)]).await;
            let (head, _) = mesh.http2(call()).await;
            assert_eq!(head.status(), 200);
            assert_eq!(head.headers()["grpc-status"], grpc_status, "{status}");
        }
        assert!(requests.borrow().is_empty(), "{requests:?}");
        let metrics = mesh.worker.metrics.render();
        for line in [
            "faults_total{kind=\"abort\",policy=\"TrafficPolicy shop/web\"} 3\n",
            "failures_total{direction=\"outbound\",code=\"fault-injected\"} 3\n",
            "retries_total{direction=\"outbound\"} 0\n",
        ] {
            assert!(metrics.contains(line), "{line}: {metrics}");
        }
    });
}

#[test]
fn only_matching_requests_get_a_fault() {
    on_worker(async {
        let (app, _) = app("v1").await;
        let fault = proto::Fault {
            matches: vec![prefix("/a", 7), prefix("/b", 9)],
            ..abort(503)
        };
        let mesh = Mesh::new(faulty(vec![fault]), &[(V1, app)]).await;
        for (path, status) in [
            ("/a", "503"),
            ("/b/c", "503"),
            ("/c", "200"),
            ("/ab", "200"),
        ] {
            let response = mesh.http1(&format!("GET {path} HTTP/1.1")).await;
            let begin = format!("HTTP/1.1 {status} ");
            assert!(response.starts_with(&begin), "{path}: {response}");
        }
    });
}

#[test]
fn delay_precedes_the_request_and_the_abort() {
    on_worker(async {
        let (app, requests) = app("v1").await;
        let pause = std::time::Duration::from_millis(20);
        for (faults, expected) in [
            (vec![delay(20)], "HTTP/1.1 200 OK\r\n"),
            (vec![delay(10), delay(10)], "HTTP/1.1 200 OK\r\n"),
            (
                vec![delay(20), abort(500)],
                "HTTP/1.1 500 Internal Server Error\r\n",
            ),
        ] {
            let mesh = Mesh::new(faulty(faults), &[(V1, app)]).await;
            let begun = Instant::now();
            let response = mesh.http1("GET / HTTP/1.1").await;
            assert!(response.starts_with(expected), "{response}");
            assert!(begun.elapsed() >= pause);
        }
        assert_eq!(requests.borrow().len(), 2);
        let (app, _) = app2("v1").await;
        let mesh = Mesh::new(faulty(vec![delay(20)]), &[(V1, app)]).await;
        let begun = Instant::now();
        let (_, body) = mesh.http2(call()).await;
        assert!(body == "v1" && begun.elapsed() >= pause);
    });
}

#[test]
fn deadlines_of_route_and_caller_end_a_delay() {
    on_worker(async {
        let (app, requests) = app("v1").await;
        let with_timeout = proto::Routes {
            rules: vec![with_timeouts(50, 0)],
            ..faulty(vec![delay(HOUR)])
        };
        let mesh = Mesh::new(with_timeout, &[(V1, app)]).await;
        let response = mesh.http1("GET / HTTP/1.1").await;
        let expected = "HTTP/1.1 504 Gateway Timeout\r\n";
        assert!(response.starts_with(expected), "{response}");
        let (head, _) = mesh.http2(call()).await;
        assert_eq!(head.headers()["grpc-status"], "4");
        let mesh = Mesh::new(faulty(vec![delay(HOUR)]), &[(V1, app)]).await;
        let mut impatient = call();
        let timeout = http::HeaderValue::from_static("50m");
        impatient.headers_mut().insert("grpc-timeout", timeout);
        let (head, _) = mesh.http2(impatient).await;
        assert_eq!(head.headers()["grpc-status"], "4");
        assert!(requests.borrow().is_empty());
    });
}

#[test]
fn client_that_leaves_ends_a_delay() {
    on_worker(async {
        let (app, requests) = app("v1").await;
        let mesh = Mesh::new(faulty(vec![delay(HOUR)]), &[(V1, app)]).await;
        let metrics = mesh.worker.metrics.clone();
        let delayed = |count| {
            let metrics = metrics.clone();
            let line = format!("faults_total{{kind=\"delay\",policy=\"{POLICY}\"}} {count}\n");
            until(move || metrics.render().contains(&line))
        };
        let mut client = mesh.connect().await;
        let request = b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 100000\r\n\r\nbegin";
        client.write_all(request).await.unwrap();
        delayed(1).await;
        client.shutdown().await.unwrap();
        let mut response = Vec::new();
        // The proxy resets or closes the connection.
        let _ = client.read_to_end(&mut response).await;
        assert!(response.is_empty(), "{response:?}");

        let (mut client, connection) = h2::client::handshake(mesh.connect().await).await.unwrap();
        let connection = tokio::task::spawn_local(connection);
        let (response, mut stream) = client.send_request(call(), false).unwrap();
        delayed(2).await;
        stream.send_reset(h2::Reason::CANCEL);
        drop((response, stream, client));
        connection.await.unwrap().unwrap();
        // Nothing holds the worker any more: the exchanges have ended.
        until(|| Rc::strong_count(&mesh.worker) == 1).await;
        assert!(requests.borrow().is_empty());
    });
}

#[test]
fn faults_that_cannot_be_interpreted_reject_the_routes() {
    let with = |change: fn(&mut proto::Fault)| {
        let mut fault = delay(1);
        change(&mut fault);
        rejection(faulty(vec![abort(503), fault]))
    };
    let named = "fault 1 (TrafficPolicy shop/web): ";
    for (reason, expected) in [
        (with(|fault| fault.delayed = None), "delay.percent"),
        (with(|fault| fault.delayed = share(2, 1)), "delay.percent"),
        (with(|fault| fault.delay = u64::MAX), "delay.duration"),
        (with(|fault| fault.abort_status = 399), "abort.status"),
        (with(|fault| fault.abort_status = 503), "abort.percent"),
        (
            with(|fault| {
                let unknown = proto::RouteMatch {
                    path: Some(proto::PathMatch { kind: None }),
                    ..proto::RouteMatch::default()
                };
                fault.matches = vec![proto::RouteMatch::default(), unknown];
            }),
            "match 1: path.type: \"\" is not",
        ),
    ] {
        assert!(
            reason.starts_with(named) && reason.contains(expected),
            "{expected}: {reason}"
        );
    }
    let many = |faults: usize, matches: usize| {
        let fault = proto::Fault {
            matches: vec![prefix("/", 0); matches],
            ..abort(503)
        };
        rejection(faulty(vec![fault; faults]))
    };
    assert!(many(17, 0).contains("17 faults"), "{}", many(17, 0));
    assert_eq!(many(3, 3333), "");
    assert!(many(10, 1000).contains("10001 matches"));
}
