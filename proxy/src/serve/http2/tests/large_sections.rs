//! Tests of header and trailer sections over the proxy's limits.

use super::hostile::{CONTINUATION, END_HEADERS, END_STREAM, GET, HEADERS, frame};
use super::raw::{End, settings};
use super::small_frames::respond_to_get;
use super::*;

/// This many fields of 1,000 bytes, and the last one of a gRPC response.
fn large(count: usize) -> HeaderMap {
    let name = |number| http::HeaderName::try_from(format!("x-{number}")).unwrap();
    let value = http::HeaderValue::try_from("v".repeat(1_000)).unwrap();
    let mut fields: HeaderMap = (0..count)
        .map(|number| (name(number), value.clone()))
        .collect();
    fields.insert("grpc-status", http::HeaderValue::from_static("5"));
    fields
}

/// An app whose response has this many large trailers, or fields if it has no body.
async fn large_app(count: usize, is_grpc: bool, has_body: bool) -> SocketAddr {
    app(move |_, mut respond| async move {
        let mut response = Response::new(());
        if is_grpc {
            let kind = http::HeaderValue::from_static("application/grpc");
            response.headers_mut().insert("content-type", kind);
        }
        if !has_body {
            response.headers_mut().extend(large(count));
            respond.send_response(response, true).unwrap();
            return;
        }
        let mut stream = respond.send_response(response, false).unwrap();
        stream
            .send_data(Bytes::from_static(b"body"), false)
            .unwrap();
        stream.send_trailers(large(count)).unwrap();
    })
    .await
}

/// The status of the call, and its message.
fn grpc_status(fields: &HeaderMap) -> (&str, String) {
    let text = |name| fields.get(name).map_or("", |value| value.to_str().unwrap());
    (
        text("grpc-status"),
        text("grpc-message").replace("%20", " "),
    )
}

#[test]
fn trailers_arrive_whole_or_the_call_fails_with_the_limit() {
    on_worker(async {
        for (count, is_whole) in [(60, true), (71, false), (240, false), (300, false)] {
            for is_grpc in [true, false] {
                let mesh = Mesh::new();
                let address = large_app(count, is_grpc, true).await;
                let mut client = mesh.client_of(address).await;
                let request = if is_grpc { grpc("/a/b") } else { get("/") };
                let ended = call(&mut client, request).await;
                if is_whole {
                    assert_eq!(ended.unwrap().1.unwrap().len(), count + 1);
                } else if is_grpc {
                    let (response, trailers) = ended.unwrap();
                    assert_eq!(&response.body()[..], b"body");
                    let trailers = trailers.unwrap();
                    let (status, message) = grpc_status(&trailers);
                    assert_eq!(status, "8", "{count}");
                    assert!(
                        message.contains("trailer section is over 65536 bytes"),
                        "{message}"
                    );
                } else {
                    let reason = ended.unwrap_err().reason();
                    assert_eq!(reason, Some(Reason::ENHANCE_YOUR_CALM), "{count}");
                }
            }
        }
    });
}

#[test]
fn response_heads_over_the_limit_fail_with_it() {
    on_worker(async {
        for (count, is_grpc) in [(60, true), (80, true), (60, false), (80, false)] {
            let mesh = Mesh::new();
            let mut client = mesh.client_of(large_app(count, is_grpc, false).await).await;
            let request = if is_grpc { grpc("/a/b") } else { get("/") };
            let (response, _) = call(&mut client, request).await.unwrap();
            let (status, message) = grpc_status(response.headers());
            let is_whole = response.headers().contains_key("x-59");
            match (count, is_grpc) {
                (60, _) => assert!(is_whole && status == "5"),
                (_, true) => {
                    assert_eq!((status, is_whole), ("8", false));
                    assert!(
                        message.contains("header section is over 65536 bytes"),
                        "{message}"
                    );
                    assert!(!response.headers().contains_key("grpc-retry-pushback-ms"));
                }
                (_, false) => {
                    assert_local_reply(&response, 502, "upstream-malformed");
                    let body = String::from_utf8_lossy(response.body()).into_owned();
                    assert!(
                        body.contains("header section is over 65536 bytes"),
                        "{body}"
                    );
                }
            }
        }
    });
}

#[test]
fn request_trailers_over_the_limit_get_431() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = mesh.client_of(app(echo).await).await;
        for (count, status) in [(60, 200), (71, 431)] {
            poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
            let request = Request::post("http://app/").body(()).unwrap();
            let (response, mut stream) = client.send_request(request, false).unwrap();
            stream.send_data(Bytes::from_static(b"a"), false).unwrap();
            stream.send_trailers(large(count)).unwrap();
            let (response, _) = read(response.await.unwrap()).await.unwrap();
            assert_eq!(response.status(), status);
            if status == 431 {
                assert_local_reply(&response, 431, "headers-too-large");
                let body = String::from_utf8_lossy(response.body()).into_owned();
                assert!(
                    body.contains("the trailer section is over 65536 bytes"),
                    "{body}"
                );
            }
        }
    });
}

#[test]
fn status_431_names_the_limit() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = mesh.client_of(named_app("fine").await).await;
        let repeated = |name: &'static str, count: usize, size: usize| {
            let value = "v".repeat(size);
            let request = (0..count).fold(Request::get("http://app/"), |request, number| {
                let name = if name == "cookie" {
                    name.to_owned()
                } else {
                    format!("{name}{number}")
                };
                request.header(name, &value)
            });
            request.body(()).unwrap()
        };
        for (request, limit) in [
            (repeated("x-", 128, 1), None),
            (repeated("x-", 129, 1), Some("over 128 fields")),
            (repeated("cookie", 500, 1), None),
            (repeated("x-", 7, 10_000), Some("over 65536 bytes")),
            (repeated("cookie", 7, 10_000), Some("over 65536 bytes")),
        ] {
            let (response, _) = call(&mut client, request).await.unwrap();
            let Some(limit) = limit else {
                assert_eq!(response.status(), 200);
                continue;
            };
            assert_local_reply(&response, 431, "headers-too-large");
            let body = String::from_utf8_lossy(response.body()).into_owned();
            assert!(body.contains(limit), "{body}");
        }
    });
}

#[test]
fn incomplete_header_blocks_are_charged_and_released() {
    on_worker(async {
        let mesh = Mesh::new();
        let destination = Backend::alone(named_app("fine").await);
        let used = || mesh.worker.admission.used_bytes(&[]);
        let before = used();
        let mut clients = Vec::new();
        for _ in 0..5 {
            let client = End::client(&mesh, &destination, Direction::Outbound, 65_535).await;
            // No acknowledgment of SETTINGS comes between the frames of the block.
            client.sync().await;
            client.send(frame(HEADERS, END_STREAM, 1, GET));
            // A field x of 16,000 bytes, never indexed.
            let field = [&[0x10, 1, b'x', 0x7f, 0x81, 0x7c][..], &[b'v'; 16_000]].concat();
            for _ in 0..15 {
                client.send(frame(CONTINUATION, 0, 1, &field));
            }
            clients.push(client);
        }
        until(|| used() >= before + 5 * 15 * 16_000).await;
        for client in &clients {
            client.send(frame(CONTINUATION, END_HEADERS, 1, b""));
            until(|| client.seen.has_ended(1)).await;
            client.get(3).await;
        }
        until(|| used() < before + 5 * 100_000).await;
    });
}

/// Each byte of the block stands for a field of 4,000 bytes.
#[test]
fn references_to_a_large_field_count_with_its_size() {
    on_worker(async {
        let mesh = Mesh::new();
        let (address, app) = End::app(settings(&[]), respond_to_get).await;
        let destination = Backend::alone(address);
        let client = End::client(&mesh, &destination, Direction::Outbound, 65_535).await;
        let field = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'v'; 4_000]].concat();
        let block = [GET, &field, &[0x80 | 62; 100]].concat();
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, &block));
        until(|| client.seen.has_ended(1)).await;
        let (app, ()) = tokio::join!(app, client.get(3));
        assert_eq!(app.seen.heads.borrow().len(), 1, "only the second request");
        client.sync().await;
    });
}
