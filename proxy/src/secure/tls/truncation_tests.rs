//! Connections between proxies that end without close_notify: nothing that is cut off looks
//! complete to either end.

use std::io::ErrorKind;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::spawn_local;

use super::tests::Pair;
use crate::secure::io::Io;
use diy_mesh_testkit::net::listen;
use diy_mesh_testkit::wait::on_worker;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: cart\r\n\r\n";

/// A client and an application that have exchanged these bytes through two proxies.
async fn exchanged(request: &[u8], response: &[u8]) -> (Pair, TcpStream, TcpStream) {
    let (listener, address) = listen().await;
    let pair = Pair::usual(address).await;
    let mut client = pair.connect().await;
    client.write_all(request).await.unwrap();
    let mut app = listener.accept().await.unwrap().0;
    read_until_end_of(request, &mut app).await;
    app.write_all(response).await.unwrap();
    read_until_end_of(response, &mut client).await;
    (pair, client, app)
}

/// Reads until the last bytes of a message, whose head the proxies may have changed.
async fn read_until_end_of(message: &[u8], stream: &mut TcpStream) {
    let (mut received, end) = (Vec::new(), &message[message.len().saturating_sub(4)..]);
    while !received.ends_with(end) {
        received.push(stream.read_u8().await.unwrap());
    }
}

async fn assert_reset(stream: &mut TcpStream, name: &str) {
    // The end of a chunk may come first.
    let end = stream.read_to_end(&mut Vec::new()).await;
    let kind = end.map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::ConnectionReset), "{name}");
}

#[test]
fn truncated_http1_response_resets_the_client() {
    on_worker(async {
        for response in [
            &b"HTTP/1.1 200 OK\r\n\r\npartial"[..],
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\npartial",
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npartial",
        ] {
            let (pair, mut client, _app) = exchanged(GET, response).await;
            pair.cut.cancel();
            assert_reset(&mut client, &response.escape_ascii().to_string()).await;
        }
    });
}

#[test]
fn response_without_length_of_a_failed_application_resets_the_client() {
    on_worker(async {
        // The client of HTTP/1.0 gets no chunks.
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\npartial";
        let (_pair, mut client, app) = exchanged(b"GET / HTTP/1.0\r\n\r\n", chunked).await;
        drop(app);
        assert_reset(&mut client, "end within a chunk").await;
        let (_pair, mut client, app) = exchanged(GET, b"HTTP/1.1 200 OK\r\n\r\npartial").await;
        Io::new(app).reset();
        assert_reset(&mut client, "reset").await;
    });
}

#[test]
fn response_that_ends_early_arrives_with_its_end() {
    on_worker(async {
        let response = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npartial";
        let (_pair, mut client, app) = exchanged(GET, response).await;
        drop(app);
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
    });
}

#[test]
fn truncated_http1_request_resets_the_application() {
    on_worker(async {
        for head in [
            "Content-Length: 100\r\n\r\n",
            "Transfer-Encoding: chunked\r\n\r\n8\r\n",
        ] {
            let request = format!("POST / HTTP/1.1\r\nHost: cart\r\n{head}partial");
            let (pair, _client, mut app) = exchanged(request.as_bytes(), b"").await;
            pair.cut.cancel();
            assert_reset(&mut app, head).await;
        }
    });
}

#[test]
fn truncated_opaque_connections_and_tunnels_reset_both_ends() {
    const UPGRADE: &[u8] =
        b"GET / HTTP/1.1\r\nHost: cart\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    const SWITCH: &[u8] =
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\npartial";
    on_worker(async {
        for (name, request, response) in [
            ("opaque", &b"\0\x01hello"[..], &b"partial"[..]),
            ("server first", b"", b"220 partial"),
            ("upgrade", UPGRADE, SWITCH),
        ] {
            let (pair, mut client, mut app) = exchanged(request, response).await;
            pair.cut.cancel();
            assert_reset(&mut client, &format!("client, {name}")).await;
            assert_reset(&mut app, &format!("application, {name}")).await;
        }
    });
}

#[test]
fn truncated_connection_keeps_a_direction_that_has_ended() {
    on_worker(async {
        let (pair, mut client, mut app) = exchanged(b"\0\x01hello", b"partial").await;
        app.write_all(b", complete").await.unwrap();
        app.shutdown().await.unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        pair.cut.cancel();
        assert_eq!(rest, b", complete");
        assert_reset(&mut app, "application").await;
    });
}

#[test]
fn truncated_http2_connection_resets_its_streams() {
    on_worker(async {
        let (listener, address) = listen().await;
        let pair = Pair::usual(address).await;
        let (mut sender, connection) = h2::client::handshake(pair.connect().await).await.unwrap();
        spawn_local(connection);
        let request = http::Request::post("http://cart/").body(()).unwrap();
        let (response, mut upload) = sender.send_request(request, false).unwrap();
        upload.send_data("partial".into(), false).unwrap();
        let app = listener.accept().await.unwrap().0;
        let mut app = h2::server::handshake(app).await.unwrap();
        let (request, mut respond) = app.accept().await.unwrap().unwrap();
        spawn_local(async move { while app.accept().await.is_some() {} });
        let mut to_client = respond
            .send_response(http::Response::new(()), false)
            .unwrap();
        to_client.send_data("partial".into(), false).unwrap();
        let mut bodies = [request.into_body(), response.await.unwrap().into_body()];
        for body in &mut bodies {
            assert_eq!(body.data().await.unwrap().unwrap(), "partial");
        }
        pair.cut.cancel();
        for mut body in bodies {
            let end = body.data().await;
            assert!(end.is_some_and(|end| end.is_err_and(|error| error.is_reset())));
        }
    });
}
