//! Tests of HTTP/1 through the proxy over sockets: forwarding byte for byte, and rejection of
//! malformed messages.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::time::Duration;

use diy_mesh_testkit::net::{closed_address, listen, read_all, read_until};
use diy_mesh_testkit::wait::on_worker;
use support::{App, Mesh, is_reset, on_worker_without_waiting, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[test]
fn forwards_messages_byte_for_byte() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        let request = "POST /p?q=1 HTTP/1.1\r\nhOST: a\r\nX-B: 2\r\nx-a: 1\r\nX-B: 3\r\nCoNtent-LENGTH: 5\r\n\r\nhello";
        write(&mut client, request).await;
        let mut app = server.accept().await;
        assert_eq!(read_until(&mut app, "hello").await, request);
        let response = "HTTP/1.1 201 Made It\r\nSERVER: x\r\nset-Cookie: a\r\nContent-length: 3\r\nset-Cookie: b\r\n\r\nabc";
        write(&mut app, response).await;
        assert_eq!(read_until(&mut client, "abc").await, response);
    });
}

#[test]
fn serves_pipelined_requests_in_order_on_kept_alive_connections() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let mut client = mesh.connect_to(address).await;
        write(
            &mut client,
            "GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\nPOST /3 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx",
        )
        .await;
        let mut app = server.accept().await;
        for path in ["/1", "/2", "/3"] {
            let head = read_until(&mut app, "\r\n\r\n").await;
            assert!(head.contains(&format!(" {path} HTTP/1.1")), "{head}");
            if path == "/3" {
                assert_eq!(app.read_u8().await.unwrap(), b'x');
            }
            write(
                &mut app,
                &format!("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n={path}"),
            )
            .await;
            assert!(
                read_until(&mut client, &format!("={path}"))
                    .await
                    .starts_with("HTTP/1.1 200 OK\r\n")
            );
        }
    });
}

#[test]
fn forwards_chunked_bodies_with_trailers() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        write(
            &mut client,
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n",
        )
        .await;
        let mut app = server.accept().await;
        read_until(&mut app, "\r\n\r\n").await;
        write(&mut client, "3\r\nabc\r\n").await;
        assert_eq!(read_until(&mut app, "abc\r\n").await, "3\r\nabc\r\n");
        // The app responds before the end of the request.
        write(
            &mut app,
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        )
        .await;
        assert!(
            read_until(&mut client, "2\r\nhi\r\n")
                .await
                .contains("Transfer-Encoding: chunked")
        );
        write(&mut client, "0\r\nX-Sum: 1\r\n\r\n").await;
        assert_eq!(
            read_until(&mut app, "\r\n\r\n").await,
            "0\r\nX-Sum: 1\r\n\r\n"
        );
        write(&mut app, "0\r\nX-Took: 2\r\n\r\n").await;
        assert_eq!(
            read_until(&mut client, "\r\n\r\n").await,
            "0\r\nX-Took: 2\r\n\r\n"
        );
    });
}

#[test]
fn forwards_100_continue() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        write(
            &mut client,
            "PUT / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
        )
        .await;
        let mut app = server.accept().await;
        assert!(
            read_until(&mut app, "\r\n\r\n")
                .await
                .contains("Expect: 100-continue")
        );
        write(&mut app, "HTTP/1.1 100 Continue\r\n\r\n").await;
        assert_eq!(
            read_until(&mut client, "\r\n\r\n").await,
            "HTTP/1.1 100 Continue\r\n\r\n"
        );
        write(&mut client, "hi").await;
        assert_eq!(read_until(&mut app, "hi").await, "hi");
        write(&mut app, OK).await;
        assert_eq!(read_until(&mut client, "ok").await, OK);
    });
}

#[test]
fn forwards_websocket_and_connect_as_tunnels() {
    on_worker(async {
        for (request, response) in [
            (
                "GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            ),
            (
                "CONNECT db:5432 HTTP/1.1\r\nHost: db:5432\r\n\r\n",
                "HTTP/1.1 200 Connected\r\n\r\n",
            ),
        ] {
            let (mut server, address) = App::listen().await;
            let mut client = Mesh::new().connect_to(address).await;
            write(&mut client, request).await;
            let mut app = server.accept().await;
            assert_eq!(read_until(&mut app, "\r\n\r\n").await, request);
            write(&mut app, &format!("{response}\u{1}from-app")).await;
            assert_eq!(
                read_until(&mut client, "from-app").await,
                format!("{response}\u{1}from-app")
            );
            write(&mut client, "\u{2}from-client").await;
            assert_eq!(
                read_until(&mut app, "from-client").await,
                "\u{2}from-client"
            );
            client.shutdown().await.unwrap();
            assert_eq!(read_all(&mut app).await, "");
        }
    });
}

#[test]
fn forwards_response_delimited_by_close() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        write(&mut client, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let mut app = server.accept().await;
        read_until(&mut app, "\r\n\r\n").await;
        write(&mut app, "HTTP/1.0 200 OK\r\n\r\nuntil the end").await;
        drop(app);
        assert_eq!(
            read_all(&mut client).await,
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"
        );
    });
}

#[test]
fn responds_to_http10_client_without_chunks() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let mut client = mesh.connect_to(address).await;
        write(
            &mut client,
            "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        )
        .await;
        let mut app = server.accept().await;
        assert_eq!(
            read_until(&mut app, "\r\n\r\n").await,
            "GET / HTTP/1.0\r\n\r\n"
        );
        write(&mut app, OK).await;
        assert!(
            read_until(&mut client, "ok")
                .await
                .contains("Connection: keep-alive")
        );
        write(&mut client, "GET / HTTP/1.0\r\n\r\n").await;
        // The app may close the first connection, although its response has no Connection field.
        let mut app = server.accept().await;
        let head = read_until(&mut app, "\r\n\r\n").await;
        assert_eq!(head, "GET / HTTP/1.0\r\n\r\n");
        write(
            &mut app,
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        )
        .await;
        assert_eq!(
            read_all(&mut client).await,
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi",
            "HTTP/1.0 has no chunked encoding"
        );
    });
}

#[test]
fn reuses_connection_after_http10_request_only_if_the_response_allows_it() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let destination = diy_mesh_proxy::upstream::balance::Backend::alone(address);
        let mesh = Mesh::new();
        let mut open = Vec::new();
        for (field, is_reused) in [
            ("Connection: keep-alive\r\n", false),
            ("", true),
            ("", false),
        ] {
            let mut client = mesh.connect(&destination).await;
            write(&mut client, "POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n").await;
            let mut app = if is_reused {
                open.pop().unwrap()
            } else {
                server.accept().await
            };
            read_until(&mut app, "\r\n\r\n").await;
            write(
                &mut app,
                &format!("HTTP/1.1 200 OK\r\n{field}Content-Length: 0\r\n\r\n"),
            )
            .await;
            read_all(&mut client).await;
            open.push(app);
        }
    });
}

#[test]
fn responds_to_half_closed_client_and_forwards_half_close() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        write(&mut client, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        client.shutdown().await.unwrap();
        let mut app = server.accept().await;
        assert!(read_all(&mut app).await.starts_with("GET / HTTP/1.1"));
        write(&mut app, OK).await;
        assert!(read_all(&mut client).await.ends_with("ok"));
    });
}

#[test]
fn retries_only_idempotent_request_on_closed_pooled_connection() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let destination = diy_mesh_proxy::upstream::balance::Backend::alone(address);
        let mut client = mesh.connect(&destination).await;
        write(&mut client, "GET /1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let mut app = server.accept().await;
        read_until(&mut app, "\r\n\r\n").await;
        write(&mut app, OK).await;
        read_until(&mut client, "ok").await;
        write(&mut client, "GET /2 HTTP/1.1\r\nHost: a\r\n\r\n").await;
        read_until(&mut app, "\r\n\r\n").await;
        // The app closes before it processes the second request.
        drop(app);
        let mut app = server.accept().await;
        assert!(
            read_until(&mut app, "\r\n\r\n")
                .await
                .starts_with("GET /2 ")
        );
        write(&mut app, OK).await;
        assert_eq!(read_until(&mut client, "ok").await, OK);
        // A request that is not idempotent is not retried.
        write(
            &mut client,
            "POST /3 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx",
        )
        .await;
        read_until(&mut app, "\r\n\r\n").await;
        drop(app);
        let answer =
            read_until(&mut client, "\n").await + &read_until(&mut client, "\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 502 ") && answer.contains("x-mesh-error: upstream-closed"),
            "{answer}"
        );
    });
}

/// An application that serves one connection at a time accepts the new one, because the old one is
/// gone.
#[test]
fn request_that_may_be_lost_gets_no_connection_that_was_idle_for_a_second() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let destination = diy_mesh_proxy::upstream::balance::Backend::alone(address);
        let mut client = mesh.connect(&destination).await;
        let mut app: Option<TcpStream> = None;
        for (request, is_on_new) in [
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", false),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
                true,
            ),
            (
                "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx",
                true,
            ),
        ] {
            write(&mut client, request).await;
            if is_on_new {
                if let Some(mut old) = app.take() {
                    assert!(is_reset(&mut old).await, "{request}");
                }
                app = Some(server.accept().await);
            }
            let app = app.as_mut().unwrap();
            let (head, body) = request.split_at(request.find("\r\n\r\n").unwrap());
            assert!(read_until(app, body).await.starts_with(head));
            write(app, OK).await;
            read_until(&mut client, "ok").await;
            // The time itself is the condition.
            sleep(Duration::from_secs(1)).await;
        }
    });
}

#[test]
fn retries_body_that_arrives_in_pieces_if_it_is_short() {
    on_worker(async {
        const HEAD: &str = "PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let destination = diy_mesh_proxy::upstream::balance::Backend::alone(address);
        for (second_chunk, is_retried) in [(5, true), (17_000, false)] {
            let mut client = mesh.connect(&destination).await;
            write(&mut client, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let mut app = server.accept().await;
            read_until(&mut app, "\r\n\r\n").await;
            write(&mut app, OK).await;
            read_until(&mut client, "ok").await;
            write(&mut client, &format!("{HEAD}3\r\none\r\n")).await;
            read_until(&mut app, "one\r\n").await;
            let chunk = format!("{second_chunk:x}\r\n{}\r\n", "x".repeat(second_chunk));
            write(&mut client, &chunk).await;
            read_until(&mut app, "x\r\n").await;
            // The app closes before it responds.
            drop(app);
            if is_retried {
                let mut app = server.accept().await;
                let again = read_until(&mut app, "xxxxx\r\n").await;
                assert!(again.ends_with(&format!("3\r\none\r\n{chunk}")), "{again}");
                write(&mut client, "0\r\n\r\n").await;
                read_until(&mut app, "0\r\n\r\n").await;
                write(
                    &mut app,
                    &OK.replace("200 OK\r\n", "200 OK\r\nConnection: close\r\n"),
                )
                .await;
                read_until(&mut client, "ok").await;
            } else {
                let answer = read_until(&mut client, "\r\n\r\n").await;
                assert!(answer.contains("x-mesh-error: upstream-closed"), "{answer}");
            }
        }
    });
}

#[test]
fn replies_502_without_listener_and_keeps_connection() {
    on_worker(async {
        let address = closed_address();
        let mut client = Mesh::new().connect_to(address).await;
        for _ in 0..2 {
            write(&mut client, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let head = read_until(&mut client, "\r\n\r\n").await;
            assert!(
                head.starts_with("HTTP/1.1 502 Bad Gateway\r\n")
                    && head.contains("x-mesh-error: connect-failed"),
                "{head}"
            );
            read_until(&mut client, "\n").await;
        }
    });
}

#[test]
fn rejects_malformed_requests_with_reason() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let long = format!(
            "GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n",
            "y".repeat(70_000)
        );
        let many = format!(
            "GET / HTTP/1.1\r\nHost: a\r\n{}\r\n",
            "X: y\r\n".repeat(129)
        );
        for (request, status, reason) in [
            ("GET / HTTP/1.1\r\n\r\n", "400", "the Host field is missing"),
            (
                "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                "400",
                "the Host field is repeated",
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
                "400",
                "Content-Length is repeated",
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                "400",
                "together with",
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
                "400",
                "a field's name is not a token",
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
                "400",
                "at most 16 digits",
            ),
            (
                "GET / HTTP/1.1\r\nHost: a\r\nBad Name: 1\r\n\r\n",
                "400",
                "a field's name is not a token",
            ),
            ("GET / HTTP/1.1\nHost: a\n\n", "400", "without CR LF"),
            (long.as_str(), "431", "header section is over 65536 bytes"),
            (many.as_str(), "431", "header section has over 128 fields"),
        ] {
            let mut client = mesh.connect_to(address).await;
            write(&mut client, request).await;
            let answer = read_all(&mut client).await;
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(reason),
                "{request:.60?} got {answer:?}"
            );
            assert!(answer.contains("connection: close"));
        }
        let accepted =
            tokio::time::timeout(std::time::Duration::from_millis(50), server.accept()).await;
        assert!(accepted.is_err(), "a rejected request reached the app");
    });
}

#[test]
fn limits_total_time_of_request_head() {
    on_worker_without_waiting(async {
        let (_server, address) = listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        let begun = tokio::time::Instant::now();
        write(&mut client, "GET / HTTP/1.1\r\n").await;
        let (mut read, mut written) = client.split();
        let drip = async {
            while written.write_all(b"X").await.is_ok() {
                tokio::time::sleep(std::time::Duration::from_secs(7)).await
            }
        };
        let mut answer = [0; 13];
        tokio::select! {
            _ = drip => panic!("the connection was closed without a response"),
            read = read.read_exact(&mut answer) => { read.unwrap(); }
        }
        assert_eq!(&answer, b"HTTP/1.1 408 ");
        assert_eq!(begun.elapsed().as_secs(), 30);
    });
}

#[test]
fn chunked_body_does_not_smuggle_a_request() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        // A hop that parsed the first body as empty would forward GET /smuggled.
        write(
            &mut client,
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1c\r\nGET /smuggled HTTP/1.1\r\n\r\nxx\r\n0\r\n\r\n",
        )
        .await;
        let mut app = server.accept().await;
        let seen = read_until(&mut app, "0\r\n\r\n").await;
        assert!(
            seen.ends_with("\r\n\r\n1c\r\nGET /smuggled HTTP/1.1\r\n\r\nxx\r\n0\r\n\r\n"),
            "{seen}"
        );
        write(&mut app, OK).await;
        assert_eq!(read_until(&mut client, "ok").await, OK);
    });
}

#[test]
fn replies_with_upstream_malformed_to_malformed_response() {
    on_worker(async {
        for response in [
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
            "nonsense\r\n\r\n",
        ] {
            let (mut server, address) = App::listen().await;
            let mut client = Mesh::new().connect_to(address).await;
            write(&mut client, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let mut app = server.accept().await;
            read_until(&mut app, "\r\n\r\n").await;
            write(&mut app, response).await;
            let head = read_until(&mut client, "\r\n\r\n").await;
            assert!(
                head.starts_with("HTTP/1.1 502 ")
                    && head.contains("x-mesh-error: upstream-malformed"),
                "{head}"
            );
        }
    });
}

#[test]
fn draining_proxy_completes_exchange_and_closes_connections() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        let mut idle = mesh.connect_to(address).await;
        write(&mut idle, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let mut app = server.accept().await;
        read_until(&mut app, "\r\n\r\n").await;
        write(&mut app, OK).await;
        read_until(&mut idle, "ok").await;
        let mut busy = mesh.connect_to(address).await;
        write(&mut busy, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let mut app = server.accept().await;
        read_until(&mut app, "\r\n\r\n").await;
        mesh.drain.cancel();
        assert_eq!(read_all(&mut idle).await, "");
        write(&mut app, OK).await;
        assert_eq!(
            read_all(&mut busy).await,
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
        );
    });
}

#[test]
fn counts_local_reply_as_request() {
    on_worker(async {
        let address = closed_address();
        let mesh = Mesh::new();
        let mut client = mesh.connect_to(address).await;
        write(
            &mut client,
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        )
        .await;
        assert!(read_all(&mut client).await.starts_with("HTTP/1.1 502 "));
        let labels = [
            "http_response_status_code=\"502\"",
            "error_type=\"connect-failed\"",
        ];
        assert_eq!(mesh.requests(&labels), 1);
        let failures = "failures_total{direction=\"outbound\",code=\"connect-failed\"}";
        assert_eq!(mesh.metric(failures), 1);
    });
}
