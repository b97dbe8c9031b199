//! Tests of the selection of endpoints, of the connection pool, and of retries.

use std::cell::Cell;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hostile::{RST_STREAM, frame};
use super::raw::{End, settings};
use super::small_frames::respond_to_get;
use super::*;

#[test]
fn balances_each_request_of_a_connection() {
    on_worker(async {
        let go = Rc::new(Cell::new(false));
        let ((one, at_one), (other, at_other)) = (
            waiting_app(200, go.clone()).await,
            waiting_app(200, go.clone()).await,
        );
        let (mesh, destination) = Mesh::with_service(&[one, other]).await;
        let mut client = mesh.client(&destination).await;
        let responses: Vec<_> = (0..100)
            .map(|_| client.send_request(get("/"), true).unwrap().0)
            .collect();
        until(|| at_one.get() + at_other.get() == 100).await;
        assert!((20..=80).contains(&at_one.get()), "{} of 100", at_one.get());
        go.set(true);
        for response in responses {
            assert_eq!(response.await.unwrap().status(), 200);
        }
    });
}

/// An app that responds when `go` is set. Returns its address and the number of streams.
async fn waiting_app(max_streams: u32, go: Rc<Cell<bool>>) -> (SocketAddr, Rc<Cell<usize>>) {
    let arrived = Rc::new(Cell::new(0));
    let mut settings = h2::server::Builder::new();
    settings.max_concurrent_streams(max_streams);
    let address = app_with(settings, {
        let arrived = arrived.clone();
        move |_, mut respond| {
            let (arrived, go) = (arrived.clone(), go.clone());
            async move {
                arrived.set(arrived.get() + 1);
                until(|| go.get()).await;
                // Fails if the client has closed.
                let _ = respond.send_response(Response::new(()), true);
            }
        }
    })
    .await;
    (address, arrived)
}

#[test]
fn opens_connection_at_max_concurrent_streams() {
    on_worker(async {
        let go = Rc::new(Cell::new(false));
        let (address, arrived) = waiting_app(10, go.clone()).await;
        let mesh = Mesh::new();
        let destination = Backend::alone(address);
        let endpoint = destination.pick(&[], &mut fastrand::Rng::new()).unwrap();
        let mut client = mesh.client(&destination).await;
        let mut responses = Vec::new();
        for count in 1..=25 {
            responses.push(client.send_request(get("/"), true).unwrap().0);
            until(|| arrived.get() == count).await;
        }
        assert_eq!(endpoint.pool().http2.len(), 3);
        go.set(true);
        for response in responses {
            assert_eq!(response.await.unwrap().status(), 200);
        }
        assert_ok(&mut client).await;
        assert_eq!(endpoint.pool().http2.len(), 3);
        // Idle connections are closed.
        endpoint
            .pool()
            .http2
            .maintain(std::time::Instant::now() + Duration::from_secs(61));
        assert!(endpoint.pool().http2.is_empty());
        assert_ok(&mut client).await;
    });
}

#[test]
fn stream_waits_for_a_slot_of_a_saturated_endpoint() {
    on_worker(async {
        let go = Rc::new(Cell::new(false));
        let (address, arrived) = waiting_app(1, go.clone()).await;
        let mesh = Mesh::new();
        let destination = Backend::alone(address);
        let endpoint = destination.endpoint(address).unwrap();
        let mut client = mesh.client(&destination).await;
        let mut responses = Vec::new();
        // The endpoint gets 64 connections with one stream each.
        for count in 1..=64 {
            responses.push(client.send_request(get("/"), true).unwrap().0);
            until(|| arrived.get() == count).await;
        }
        responses.extend((0..37).map(|_| client.send_request(get("/"), true).unwrap().0));
        until(|| endpoint.in_flight() == 101).await;
        go.set(true);
        for response in responses {
            assert_eq!(response.await.unwrap().status(), 200);
        }
        assert_eq!(arrived.get(), 101);
    });
}

#[test]
fn concurrent_streams_dial_once() {
    on_worker(async {
        let go = Rc::new(Cell::new(true));
        let (address, arrived) = waiting_app(200, go).await;
        let mesh = Mesh::new();
        let destination = Backend::alone(address);
        let endpoint = destination.pick(&[], &mut fastrand::Rng::new()).unwrap();
        let mut client = mesh.client(&destination).await;
        let responses: Vec<_> = (0..50)
            .map(|_| client.send_request(get("/"), true).unwrap().0)
            .collect();
        for response in responses {
            assert_eq!(response.await.unwrap().status(), 200);
        }
        assert_eq!((arrived.get(), endpoint.pool().http2.len()), (50, 1));
    });
}

#[test]
fn opens_no_streams_after_goaway() {
    on_worker(async {
        let connections = Rc::new(Cell::new(0));
        let (listener, address) = listen().await;
        tokio::task::spawn_local({
            let connections = connections.clone();
            async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    connections.set(connections.get() + 1);
                    tokio::task::spawn_local(async move {
                        let mut connection = h2::server::handshake(stream).await.unwrap();
                        while let Some(Ok((_, mut respond))) = connection.accept().await {
                            connection.graceful_shutdown();
                            respond.send_response(Response::new(()), true).unwrap();
                        }
                    });
                }
            }
        });
        let mut client = Mesh::new().client_of(address).await;
        for _ in 0..20 {
            let (response, _) = call_with(&mut client, grpc("/"), b"not to be replayed")
                .await
                .unwrap();
            assert_eq!(response.status(), 200);
        }
        assert!(
            connections.get() >= 5,
            "{} connections for 20 requests",
            connections.get()
        );
    });
}

/// A server that sends `frames` after the first HEADERS frame on its first connection, and echoes
/// bodies on the second one.
async fn app_after(frames: &'static [u8]) -> (SocketAddr, Rc<Cell<usize>>) {
    let (listener, address) = listen().await;
    let connections = Rc::new(Cell::new(0));
    tokio::task::spawn_local({
        let connections = connections.clone();
        async move {
            let (mut first, _) = listener.accept().await.unwrap();
            connections.set(1);
            // SETTINGS.
            first.write_all(b"\0\0\0\x04\0\0\0\0\0").await.unwrap();
            let mut preface = [0; 24];
            first.read_exact(&mut preface).await.unwrap();
            loop {
                let mut head = [0; 9];
                first.read_exact(&mut head).await.unwrap();
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                first.read_exact(&mut vec![0; length]).await.unwrap();
                if head[3] == 1 {
                    break;
                }
            }
            first.write_all(frames).await.unwrap();
            tokio::task::spawn_local(async move { while first.read_u8().await.is_ok() {} });
            let (second, _) = listener.accept().await.unwrap();
            connections.set(2);
            let mut connection = h2::server::handshake(second).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                tokio::task::spawn_local(echo(request, respond));
            }
        }
    });
    (address, connections)
}

const GOAWAY_NOTHING_SEEN: &[u8] = b"\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0";

#[test]
fn retries_unprocessed_request_with_body_after_goaway() {
    on_worker(async {
        let (address, connections) = app_after(GOAWAY_NOTHING_SEEN).await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, _) = call_with(&mut client, grpc("/"), b"the whole body")
            .await
            .unwrap();
        assert_eq!(
            (&response.body()[..], connections.get()),
            (&b"the whole body"[..], 2)
        );
    });
}

#[test]
fn retries_refused_stream_with_body_at_most_three_times() {
    on_worker(async {
        let refuse = Rc::new(Cell::new(2));
        let address = app({
            let refuse = refuse.clone();
            move |request, mut respond| {
                let refused = refuse.get() > 0;
                refuse.set(refuse.get() - i32::from(refused));
                async move {
                    if refused {
                        return respond.send_reset(Reason::REFUSED_STREAM);
                    }
                    echo(request, respond).await;
                }
            }
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, _) = call_with(&mut client, grpc("/"), b"the whole body")
            .await
            .unwrap();
        assert_eq!(
            (&response.body()[..], refuse.get()),
            (&b"the whole body"[..], 0)
        );
        // Several frames and trailers are sent again as well.
        refuse.set(1);
        let (response, mut body) = client.send_request(grpc("/"), false).unwrap();
        body.send_data("two ".into(), false).unwrap();
        until(|| refuse.get() == 0).await;
        body.send_data("frames".into(), false).unwrap();
        body.send_trailers(HeaderMap::from_iter([(
            "x-sum".parse().unwrap(),
            "7".parse().unwrap(),
        )]))
        .unwrap();
        let (response, trailers) = read(response.await.unwrap()).await.unwrap();
        assert_eq!(&response.body()[..], b"two frames");
        assert_eq!(trailers.unwrap()["x-sum"], "7");
        // At most three attempts.
        refuse.set(100);
        let (response, trailers) = call_with(&mut client, grpc("/"), b"x").await.unwrap();
        assert_eq!(
            (
                response.headers()["x-mesh-error"].as_bytes(),
                &response.headers()["grpc-status"],
                trailers
            ),
            (&b"upstream-closed"[..], &"14".parse().unwrap(), None)
        );
        assert_eq!(refuse.get(), 97);
    });
}

#[test]
fn response_in_whose_place_another_attempt_follows_is_not_reset() {
    on_worker(async {
        for (length, is_reset) in [(5000, false), (1_000_000, true)] {
            let (requests, resets) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
            let rejecting = || {
                let (requests, resets) = (requests.clone(), resets.clone());
                app(move |_, mut respond| {
                    let (requests, resets) = (requests.clone(), resets.clone());
                    async move {
                        let number = requests.get() + 1;
                        requests.set(number);
                        let head = Response::builder().status(429).body(()).unwrap();
                        let mut stream = respond.send_response(head, false).unwrap();
                        if number % 2 == 0 {
                            return stream.send_data(Bytes::new(), true).unwrap();
                        }
                        // The body follows after the retry, and the next request.
                        until(|| requests.get() >= (number + 2).min(20)).await;
                        // Fails after a reset.
                        let _ = stream.send_data(vec![b'x'; length].into(), !is_reset);
                        let closed = poll_fn(|cx| stream.poll_reset(cx)).await;
                        resets.set(resets.get() + usize::from(closed.is_ok()));
                    }
                })
            };
            let endpoints = [rejecting().await, rejecting().await];
            let (mesh, destination) = Mesh::with_service(&endpoints).await;
            let mut client = mesh.client(&destination).await;
            for _ in 0..10 {
                let (response, _) = call(&mut client, get("/")).await.unwrap();
                assert_eq!(response.status(), 429);
            }
            assert_eq!(requests.get(), 20);
            if is_reset {
                until(|| resets.get() == 10).await
            } else {
                assert!(resets.get() < 5, "{}", resets.get())
            }
        }
    });
}

#[test]
fn retries_only_idempotent_requests_on_closed_pooled_connection() {
    on_worker(async {
        // The app responds to one request per connection, and closes at the second one without
        // GOAWAY.
        let (listener, address) = listen().await;
        tokio::task::spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::task::spawn_local(async move {
                    let mut connection = h2::server::handshake(stream).await.unwrap();
                    let (_, mut respond) = connection.accept().await.unwrap().unwrap();
                    respond.send_response(Response::new(()), true).unwrap();
                    // Reads the second request, and drops the connection.
                    let _ = connection.accept().await;
                });
            }
        });
        let mut client = Mesh::new().client_of(address).await;
        assert_ok(&mut client).await;
        assert_ok(&mut client).await;
        let (response, _) = call_with(&mut client, grpc("/"), b"x").await.unwrap();
        assert_eq!(response.headers()["x-mesh-error"], "upstream-closed");
        assert_eq!(response.headers()["grpc-status"], "14");
        assert_ok(&mut client).await;
        let (response, _) = call(&mut client, Request::post("http://app/").body(()).unwrap())
            .await
            .unwrap();
        assert_local_reply(&response, 502, "upstream-closed");
        assert!(
            String::from_utf8_lossy(response.body())
                .contains("closed the connection before it responded")
        );
    });
}

#[test]
fn tries_another_endpoint_after_refused_connection() {
    on_worker(async {
        let (mesh, destination) =
            Mesh::with_service(&[named_app("one").await, closed_address(), closed_address()]).await;
        let mut client = mesh.client(&destination).await;
        for _ in 0..20 {
            let (response, _) = call_with(&mut client, grpc("/"), b"x").await.unwrap();
            assert_eq!(&response.body()[..], b"one");
        }
    });
}

#[test]
fn replies_with_connect_failed_without_listener() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = mesh.client_of(closed_address()).await;
        let (response, _) = call(&mut client, get("/")).await.unwrap();
        assert_local_reply(&response, 502, "connect-failed");
        let (response, _) = call(&mut client, Request::head("http://app/").body(()).unwrap())
            .await
            .unwrap();
        assert_eq!(
            (response.status().as_u16(), response.body().len()),
            (502, 0)
        );
        let (response, trailers) = call_with(&mut client, grpc("/"), b"x").await.unwrap();
        assert_eq!(
            (
                response.status().as_u16(),
                &response.headers()["grpc-status"],
                trailers
            ),
            (200, &"14".parse().unwrap(), None)
        );
        assert!(
            response.headers()["grpc-message"]
                .to_str()
                .unwrap()
                .contains("cannot connect to")
        );
        assert_eq!(
            mesh.metric("failures_total{direction=\"outbound\",code=\"connect-failed\"}"),
            3
        );
    });
}

#[test]
fn replies_with_name_of_service_without_endpoints() {
    on_worker(async {
        let (mesh, destination) = Mesh::with_service(&[]).await;
        let mut client = mesh.client(&destination).await;
        let (response, _) = call(&mut client, get("/")).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.body()[..]),
            (503, &b"service shop/cart has no ready endpoint\n"[..])
        );
    });
}

#[test]
fn ignores_and_removes_mesh_error_of_app() {
    on_worker(async {
        let asked = Rc::new(Cell::new(0));
        let forger = || {
            let asked = asked.clone();
            app(move |request, mut respond| {
                asked.set(asked.get() + 1);
                async move {
                    let (data, _) = read_body(&mut request.into_body()).await.unwrap();
                    let forged = fields(&[
                        ("x-mesh-error", "connect-failed"),
                        ("x_mesh.error", "connect-failed"),
                    ]);
                    let mut response = Response::new(());
                    response.headers_mut().extend(forged.clone());
                    response.headers_mut().insert("grpc-status", 14.into());
                    let mut stream = respond.send_response(response, false).unwrap();
                    stream.send_data(data, false).unwrap();
                    stream.send_trailers(forged).unwrap();
                }
            })
        };
        let (mesh, destination) = Mesh::with_service(&[forger().await, forger().await]).await;
        let mut client = mesh.client(&destination).await;
        for _ in 0..20 {
            let (response, trailers) = call_with(&mut client, grpc("/"), b"body").await.unwrap();
            assert_eq!(&response.body()[..], b"body");
            assert!(
                !response
                    .headers()
                    .keys()
                    .any(|name| name.as_str().contains("error")),
                "{response:?}"
            );
            assert_eq!(trailers, Some(HeaderMap::new()));
        }
        assert_eq!(asked.get(), 20, "no request was retried");
    });
}

/// Sends `request` to an app that closes the connection within the response. Returns the rest of
/// the body that the client reads, and the trailers.
async fn truncated_response(request: Request<()>) -> Result<(Bytes, Option<HeaderMap>), h2::Error> {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        let mut response = Response::new(());
        if let Some(kind) = request.headers().get("content-type") {
            response.headers_mut().insert("content-type", kind.clone());
        }
        let mut stream = respond.send_response(response, false).unwrap();
        stream
            .send_data(Bytes::from_static(b"part"), false)
            .unwrap();
        // Writes the response until the next request, and closes.
        let _ = connection.accept().await;
    });
    let mut client = Mesh::new().client_of(address).await;
    let (response, _stream) = client.send_request(request, false).unwrap();
    let mut body = response.await.unwrap().into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "part");
    let _next_request = client.send_request(get("/"), true).unwrap();
    read_body(&mut body).await
}

#[test]
fn truncated_response_ends_with_error() {
    on_worker(async {
        assert_eq!(
            truncated_response(get("/")).await.unwrap_err().reason(),
            Some(Reason::INTERNAL_ERROR)
        );
        // A gRPC client gets the failure in the trailers.
        let (data, trailers) = truncated_response(grpc("/")).await.unwrap();
        let trailers = trailers.unwrap();
        assert!(
            data.is_empty()
                && trailers["grpc-status"] == "14"
                && trailers["x-mesh-error"] == "upstream-closed",
            "{trailers:?}"
        );
    });
}

#[test]
fn replies_with_upstream_malformed_to_non_http2_response() {
    on_worker(async {
        let (listener, address) = listen().await;
        tokio::task::spawn_local(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                .await
                .unwrap();
            while stream.read_u8().await.is_ok() {}
        });
        let mut client = Mesh::new().client_of(address).await;
        let (response, _) = call(&mut client, get("/")).await.unwrap();
        assert_local_reply(&response, 502, "upstream-malformed");
    });
}

#[test]
fn streams_over_a_limit_that_the_endpoint_lowers_are_sent_again() {
    on_worker(async {
        let (heads, is_low) = (Cell::new(0), Cell::new(false));
        let respond = move |stream, flags| {
            if is_low.get() {
                return respond_to_get(stream, flags);
            }
            heads.set(heads.get() + 1);
            // The first one settles the connection.
            match heads.get() {
                1 => respond_to_get(stream, flags),
                2..7 => Vec::new(),
                _ => {
                    is_low.set(true);
                    let refused = (0..5)
                        .map(|index| 5 + 2 * index)
                        .flat_map(|stream| frame(RST_STREAM, 0, stream, &7_u32.to_be_bytes()));
                    let lowered = settings(&[(3, 1)]).into_iter().chain(refused);
                    lowered.chain(respond_to_get(3, flags)).collect()
                }
            }
        };
        let (listener, address) = listen().await;
        let mesh = Mesh::new();
        let mut client = mesh.client_of(address).await;
        let app = End::accept(&listener, settings(&[(3, 100)]), respond);
        let (first, app) = tokio::join!(call(&mut client, get("/")), app);
        assert_eq!(first.unwrap().0.status(), 200);
        let others = Rc::new(Cell::new(0));
        let counted = others.clone();
        tokio::task::spawn_local(async move {
            loop {
                let counted = counted.clone();
                let respond = move |stream, flags| {
                    counted.set(counted.get() + 1);
                    respond_to_get(stream, flags)
                };
                End::accept(&listener, settings(&[(3, 1)]), respond).await;
            }
        });
        let mut calls = Vec::new();
        for _ in 0..6 {
            let mut client = client.clone();
            calls.push(tokio::task::spawn_local(async move {
                call(&mut client, get("/")).await
            }));
        }
        for called in calls {
            let (response, _) = called.await.unwrap().unwrap();
            assert_eq!(response.status(), 200, "{response:?}");
        }
        let sent = app.seen.heads.borrow().len() + others.get();
        assert_eq!(sent, 7 + 5, "the refused ones twice");
        app.sync().await;
    });
}
