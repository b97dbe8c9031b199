//! Answers of authorization servers of which a part is missing.

use super::*;

/// An answer of HTTP that is cut off or too large after its status.
fn truncated(status: &str, rest: &str) -> &'static str {
    format!("HTTP/1.1 {status}\r\n{rest}").leak()
}

#[test]
fn status_of_a_server_decides_whatever_follows_it() {
    on_worker(async {
        let long_body = "x".repeat(17_000);
        let fields = "X-A: 1\r\n".repeat(129);
        for (what, rest, keeps_fields) in [
            (
                "long",
                format!("X-User: ada\r\nContent-Length: 17000\r\n\r\n{long_body}"),
                true,
            ),
            (
                "endless",
                "X-User: ada\r\nContent-Length: 17000\r\n\r\n<p>".to_owned(),
                true,
            ),
            (
                "large head",
                format!("X-A: {}\r\n\r\n", "a".repeat(70_000)),
                false,
            ),
            (
                "many fields",
                format!("{fields}Content-Length: 0\r\n\r\n"),
                false,
            ),
            (
                "ambiguous",
                "Content-Length: 1\r\nContent-Length: 2\r\n\r\n".to_owned(),
                false,
            ),
        ] {
            for fail_open in [false, true] {
                for (status, is_cut_off) in [("403 No", false), ("403 No", true), ("200 OK", false)]
                {
                    let answer = truncated(status, &rest);
                    let address = if is_cut_off {
                        once(answer).await
                    } else {
                        server(answer).await.0
                    };
                    let app = App::new("", EMPTY).await;
                    let (mut pod, _mesh) = pod(app.address, address).await;
                    let authorizer = proto::Authorizer {
                        timeout: 200,
                        fail_open,
                        ..authorizer(Protocol::Http)
                    };
                    pod.authorize(asking(app.address, authorizer)).await;
                    let response = pod.http1(None, "/orders").await;
                    let is_allowed = status == "200 OK" && (keeps_fields || fail_open);
                    let expected = match status {
                        "403 No" => "HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n",
                        _ if is_allowed => OK,
                        _ => FAILED,
                    };
                    assert!(
                        response.starts_with(expected),
                        "{what} {status}: {response}"
                    );
                    assert_eq!(
                        app.connections.get(),
                        usize::from(is_allowed),
                        "{what} {status}"
                    );
                    if is_allowed && keeps_fields {
                        assert!(text(&app).contains("\r\nx-user: ada\r\n"), "{what}");
                    }
                    let denied = "external_authorizations_total{result=\"denied\"} 1\n";
                    assert_eq!(pod.counts(denied), status == "403 No", "{what}");
                }
            }
        }
    });
}

#[test]
fn long_denial_over_grpc_denies_in_both_failure_modes() {
    on_worker(async {
        for fail_open in [false, true] {
            let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
            let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
            let authorizer = proto::Authorizer {
                fail_open,
                ..authorizer(Protocol::Grpc)
            };
            pod.authorize(asking(app.address, authorizer)).await;
            let response = pod.http1(None, "/orders/long").await;
            assert!(response.starts_with(DENIED), "{response}");
            assert_eq!((app.got(), envoy.0.lock().unwrap().len()), ((0, 0), 1));
        }
    });
}
