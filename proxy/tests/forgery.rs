//! Attacks on `X-Called-By` over HTTP/1: the application gets no request that the proxy has not
//! parsed, whatever an untrusted peer sends.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use diy_mesh_testkit::net::{listen, read_all, read_until};
use diy_mesh_testkit::wait::on_worker;
use support::{App, Mesh, write};
use tokio::io::AsyncWriteExt;

const FORGED: &str = "GET /admin HTTP/1.1\r\nHost: a\r\nX-Called-By: forged\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

#[test]
fn rejects_inbound_connect() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        for connect in [
            "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
            "connect a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
            "CONNECT a:80 HTTP/1.0\r\n\r\n",
            "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        ] {
            let mut client = mesh.connect_inbound(address).await;
            write(&mut client, &format!("{connect}{FORGED}")).await;
            let answer = read_all(&mut client).await;
            let refused = answer.starts_with("HTTP/1.1 405 Method Not Allowed\r\n")
                || answer.starts_with("HTTP/1.1 400 ");
            assert!(
                refused && answer.matches("HTTP/1.1 ").count() == 1,
                "one response, then close: {answer}"
            );
            assert!(
                answer.contains("400") || answer.contains("\r\nallow: GET, "),
                "{answer}"
            );
        }
        // CONNECT as the second request of a connection.
        let mut client = mesh.connect_inbound(address).await;
        write(&mut client, &format!("GET / HTTP/1.1\r\nHost: a\r\n\r\nCONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n{FORGED}")).await;
        let mut app = server.accept().await;
        read_until(&mut app, "\r\n\r\n").await;
        write(&mut app, OK).await;
        let answers = read_all(&mut client).await;
        assert!(
            answers.starts_with(OK) && answers[OK.len()..].starts_with("HTTP/1.1 405 "),
            "{answers}"
        );
        drop((client, mesh));
        assert!(
            !read_all(&mut app).await.contains("CONNECT"),
            "the app received it"
        );
    });
}

#[test]
fn accepts_connect_of_own_app_and_for_pods_that_allow_it() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let declared = Mesh::with(|config| config.policy.allow_connect = true);
        for mut client in [
            declared.connect_inbound(address).await,
            Mesh::new().connect_to(address).await,
        ] {
            write(&mut client, "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n").await;
            let mut app = server.accept().await;
            assert_eq!(
                read_until(&mut app, "\r\n\r\n").await,
                "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"
            );
            write(&mut app, "HTTP/1.1 200 OK\r\n\r\n").await;
            assert_eq!(
                read_until(&mut client, "\r\n\r\n").await,
                "HTTP/1.1 200 OK\r\n\r\n"
            );
            client.write_all(b"\x16\x03\x01").await.unwrap();
            assert_eq!(read_until(&mut app, "\x01").await, "\x16\x03\x01");
        }
        // It asks for a tunnel only, whatever its fields are, and does not get another protocol.
        let mut client = declared.connect_inbound(address).await;
        write(&mut client, "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
        let mut app = server.accept().await;
        assert_eq!(
            read_until(&mut app, "\r\n\r\n").await,
            "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"
        );
        let switching =
            "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
        write(&mut app, switching).await;
        let response = read_until(&mut client, "\r\n\r\n").await;
        assert!(response.starts_with("HTTP/1.1 502 "), "{response}");
        // The target must be HOST:PORT.
        let mut client = declared.connect_inbound(address).await;
        write(
            &mut client,
            &format!("CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n{FORGED}"),
        )
        .await;
        assert!(read_all(&mut client).await.starts_with("HTTP/1.1 400 "));
    });
}

#[test]
fn rejects_unrequested_protocol_switch() {
    on_worker(async {
        for asked in [
            "",
            "Upgrade: websocket\r\n",
            "Connection: Upgrade\r\n",
            "Connection: Upgrade\r\nUpgrade: h2c\r\n",
        ] {
            let (mut server, address) = App::listen().await;
            let mut client = Mesh::new().connect_inbound(address).await;
            write(
                &mut client,
                &format!("GET / HTTP/1.1\r\nHost: a\r\n{asked}\r\n"),
            )
            .await;
            let mut app = server.accept().await;
            read_until(&mut app, "\r\n\r\n").await;
            write(
                &mut app,
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
            )
            .await;
            let head = read_until(&mut client, "\r\n\r\n").await;
            assert!(
                head.starts_with("HTTP/1.1 502 ")
                    && head.contains("x-mesh-error: upstream-malformed"),
                "{asked:?}: {head}"
            );
            write(&mut client, FORGED).await;
            client.shutdown().await.unwrap();
            assert_eq!(read_all(&mut app).await, "", "{asked:?}");
        }
    });
}

#[test]
fn rejects_request_for_lenient_server() {
    on_worker(async {
        for line in [
            "GET / HTTP/1.1 x",
            "GET / x HTTP/1.1",
            "GET\u{a0}/\u{2003}HTTP/1.1",
            "GET / RTSP/1.0 x",
            "GET /",
        ] {
            let (mut server, address) = App::listen().await;
            let mut client = Mesh::new().connect_inbound(address).await;
            write(
                &mut client,
                &format!("{line}\r\nHost: a\r\nX-Called-By: forged\r\n\r\n"),
            )
            .await;
            let answer = read_all(&mut client).await;
            assert!(
                answer.starts_with("HTTP/1.1 400 ") && answer.contains("x-mesh-error: bad-request"),
                "{line}: {answer}"
            );
            assert!(server.received_nothing().await, "{line}");
        }
    });
}

#[test]
fn removes_forged_caller_identity_in_all_spellings() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_inbound(address).await;
        let forged = ["X-Called-By", "x_called_by", "X.Called.By", "x!called~by"]
            .map(|name| format!("{name}: forged\r\n"))
            .concat();
        write(
            &mut client,
            &format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n{forged}\r\n0\r\n{forged}X-Sum: 1\r\n\r\n"),
        )
        .await;
        let mut app = server.accept().await;
        let seen = read_until(&mut app, "X-Sum: 1\r\n\r\n").await;
        assert_eq!(
            seen,
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Sum: 1\r\n\r\n"
        );
    });
}

#[test]
fn removes_mesh_error_of_app() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        let mesh = Mesh::new();
        for mut client in [
            mesh.connect_inbound(address).await,
            mesh.connect_to(address).await,
        ] {
            write(
                &mut client,
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx",
            )
            .await;
            let mut app = server.accept().await;
            read_until(&mut app, "\r\n\r\nx").await;
            let forged = "X-Mesh-Error: connect-failed\r\nx_mesh.error: connect-failed\r\n\
                          X-Mesh-Exchange: 10.0.0.1-000000000001\r\nx.mesh_exchange: 1\r\n";
            write(&mut app, &format!("HTTP/1.1 103 Early Hints\r\n{forged}\r\nHTTP/1.1 502 No\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n{forged}\r\n0\r\n{forged}\r\n")).await;
            let answers = read_until(&mut client, "\r\n0\r\n\r\n").await;
            assert!(
                answers.starts_with("HTTP/1.1 103 ")
                    && answers.contains("HTTP/1.1 502 No\r\n")
                    && !answers.contains("rror")
                    && !answers.contains("xchange"),
                "{answers}"
            );
        }
    });
}

#[test]
fn rejects_target_that_differs_from_host_field() {
    on_worker(async {
        let (mut server, address) = App::listen().await;
        for other in ["http://b/", "http://u@a/"] {
            let mut client = Mesh::new().connect_to(address).await;
            let head = format!("GET {other} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            write(&mut client, &head).await;
            assert!(read_all(&mut client).await.starts_with("HTTP/1.1 400 "));
        }
        assert!(server.received_nothing().await);
        let mut client = Mesh::new().connect_to(address).await;
        write(&mut client, "GET HTTP://A:80/ HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(
            read_until(&mut server.accept().await, "\r\n\r\n")
                .await
                .starts_with("GET HTTP://A:80/ ")
        );
    });
}

#[test]
fn resets_request_without_a_version_when_a_field_follows() {
    on_worker(async {
        for pieces in [
            ["GET a:1\r\nX-Called-By: forged\r\n\r\n", ""],
            ["GET a:1\r\n", "X-Called-By: forged\r\n\r\n"],
        ] {
            let (server, address) = listen().await;
            let mut client = Mesh::new().connect_inbound(address).await;
            write(&mut client, pieces[0]).await;
            let mut app = server.accept().await.unwrap().0;
            if !pieces[1].is_empty() {
                assert_eq!(read_until(&mut app, "\r\n").await, pieces[0]);
                write(&mut client, pieces[1]).await;
            }
            assert_eq!(read_all(&mut app).await, "", "{pieces:?}");
        }
    });
}
