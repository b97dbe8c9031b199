//! The end of connections between proxies, on the callee's side: HTTP connections end gracefully at
//! their age, opaque ones and streams outlive the peer's certificate and are reset at the maximum
//! age.
#![allow(clippy::unwrap_used)]

mod support;

use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use diy_mesh_proxy::lifetime::Lifetime;
use support::{
    App, Mesh, jump, listen, on_worker, on_worker_with_jumps, read_all, read_until, until, write,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HOUR: Duration = Duration::from_secs(3600);
const GET: &str = "GET / HTTP/1.1\r\nHost: cart\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

/// A lifetime whose events come after so many hours from now; none for no reset.
fn lifetime(retires: u32, certificate: u32, resets: Option<u32>) -> Lifetime {
    let after = |hours: u32| Instant::now() + hours * HOUR;
    Lifetime {
        retires_at: after(retires),
        certificate_ends_at: after(certificate),
        resets_at: resets.map(after),
    }
}

/// An app that answers the requests of each connection.
async fn answering_app() -> SocketAddr {
    let (mut app, address) = App::listen().await;
    tokio::task::spawn_local(async move {
        loop {
            let mut stream = app.accept().await;
            tokio::task::spawn_local(async move {
                let mut head = Vec::new();
                while let Ok(byte) = stream.read_u8().await {
                    head.push(byte);
                    if head.ends_with(b"\r\n\r\n") {
                        write(&mut stream, OK).await;
                        head.clear();
                    }
                }
            });
        }
    });
    address
}

async fn ask(client: &mut TcpStream) -> String {
    write(client, GET).await;
    read_until(client, "\r\n\r\n").await
}

/// The other end was reset.
async fn is_reset(stream: &mut TcpStream) -> bool {
    stream
        .read(&mut [0])
        .await
        .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
}

#[test]
fn a_retired_http1_connection_ends_after_its_exchange_and_not_before() {
    on_worker(async {
        let (mesh, app) = (Mesh::new(), answering_app().await);
        let mut young = mesh.connect_peer(app, lifetime(1, 24, None)).await;
        for _ in 0..2 {
            assert_eq!(ask(&mut young).await, OK);
        }
        let mut retired = mesh.connect_peer(app, lifetime(0, 24, None)).await;
        assert_eq!(
            ask(&mut retired).await,
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        assert_eq!(read_all(&mut retired).await, "");
        assert_eq!(ask(&mut young).await, OK);
    });
}

#[test]
fn an_idle_http1_connection_is_closed_once_no_caller_keeps_it() {
    on_worker_with_jumps(async {
        let (mesh, app) = (Mesh::new(), answering_app().await);
        let mut client = mesh.connect_peer(app, lifetime(1, 24, None)).await;
        assert_eq!(ask(&mut client).await, OK);
        // It is retired, and the caller may still have sent a request.
        jump(HOUR).await;
        assert_eq!(ask(&mut client).await, OK);
        jump(Duration::from_secs(60)).await;
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
    });
}

#[test]
fn a_retired_http2_connection_says_goodbye_and_its_stream_ends() {
    on_worker_with_jumps(async {
        let (listener, app) = listen().await;
        let mesh = Mesh::new();
        let client = mesh.connect_peer(app, lifetime(1, 24, None)).await;
        let (mut client, connection) = h2::client::handshake(client).await.unwrap();
        let connection = tokio::task::spawn_local(connection);
        let (response, _) = client
            .send_request(http::Request::get("http://cart/").body(()).unwrap(), true)
            .unwrap();
        let mut app = h2::server::handshake(listener.accept().await.unwrap().0)
            .await
            .unwrap();
        let (_, mut respond) = app.accept().await.unwrap().unwrap();
        tokio::task::spawn_local(async move { while app.accept().await.is_some() {} });
        poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
        jump(HOUR).await;
        let mut more = client.clone();
        while poll_fn(|cx| more.poll_ready(cx)).await.is_ok() {
            tokio::task::yield_now().await;
        }
        let mut body = respond
            .send_response(http::Response::new(()), false)
            .unwrap();
        body.send_data(Bytes::from_static(b"late"), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.into_body().data().await.unwrap().unwrap(), "late");
        drop((client, more));
        connection.await.unwrap().unwrap();
    });
}

/// A connection that carries bytes through the proxy, once as opaque and once as WebSocket, and the
/// app's end of it.
async fn tunnels(mesh: &Mesh, lifetime: Lifetime) -> [(TcpStream, TcpStream); 2] {
    let (mut app, address) = App::listen().await;
    let mut opaque = mesh.connect_peer(address, lifetime).await;
    opaque.write_all(b"\0\x01hello").await.unwrap();
    let mut opaque_app = app.accept().await;
    opaque_app.read_exact(&mut [0; 7]).await.unwrap();
    let mut upgraded = mesh.connect_peer(address, lifetime).await;
    write(
        &mut upgraded,
        "GET / HTTP/1.1\r\nHost: cart\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    )
    .await;
    let mut upgraded_app = app.accept().await;
    read_until(&mut upgraded_app, "\r\n\r\n").await;
    write(
        &mut upgraded_app,
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    )
    .await;
    read_until(&mut upgraded, "\r\n\r\n").await;
    [(opaque, opaque_app), (upgraded, upgraded_app)]
}

#[test]
fn opaque_and_upgraded_connections_outlive_the_peers_certificate_and_are_counted() {
    on_worker_with_jumps(async {
        let mesh = Mesh::new();
        let mut tunnels = tunnels(&mesh, lifetime(0, 1, None)).await;
        assert_eq!(mesh.expired(), 0);
        jump(HOUR).await;
        until(|| mesh.expired() == 2).await;
        jump(98 * HOUR).await;
        for (client, app) in &mut tunnels {
            client.write_all(b"ping").await.unwrap();
            app.read_exact(&mut [0; 4]).await.unwrap();
        }
        drop(tunnels);
        until(|| mesh.expired() == 0).await;
    });
}

#[test]
fn opaque_and_upgraded_connections_are_reset_at_the_maximum_age() {
    on_worker_with_jumps(async {
        let mesh = Mesh::new();
        let mut tunnels = tunnels(&mesh, lifetime(0, 1, Some(2))).await;
        jump(HOUR).await;
        until(|| mesh.expired() == 2).await;
        jump(HOUR).await;
        for (client, app) in &mut tunnels {
            assert!(is_reset(client).await && is_reset(app).await);
        }
        assert_eq!(mesh.expired(), 0);
    });
}

#[test]
fn streams_that_are_still_open_count_and_are_reset_as_opaque_connections() {
    on_worker_with_jumps(async {
        let mesh = Mesh::new();
        let (mut app, address) = App::listen().await;
        let mut http1 = mesh.connect_peer(address, lifetime(0, 1, Some(2))).await;
        write(&mut http1, GET).await;
        let mut http1_app = app.accept().await;
        read_until(&mut http1_app, "\r\n\r\n").await;
        write(&mut http1_app, "HTTP/1.1 200 OK\r\n\r\ndata").await;
        read_until(&mut http1, "data").await;

        let (listener, address) = listen().await;
        let http2 = mesh.connect_peer(address, lifetime(2, 1, Some(2))).await;
        let (mut client, connection) = h2::client::handshake(http2).await.unwrap();
        tokio::task::spawn_local(connection);
        let (response, _) = client
            .send_request(http::Request::get("http://cart/").body(()).unwrap(), true)
            .unwrap();
        let mut app = h2::server::handshake(listener.accept().await.unwrap().0)
            .await
            .unwrap();
        let (_, mut respond) = app.accept().await.unwrap().unwrap();
        tokio::task::spawn_local(async move { while let Some(Ok(_)) = app.accept().await {} });
        let mut body = respond
            .send_response(http::Response::new(()), false)
            .unwrap();
        let mut answer = response.await.unwrap().into_body();

        jump(HOUR).await;
        until(|| mesh.expired() == 2).await;
        body.send_data(Bytes::from_static(b"more"), false).unwrap();
        assert_eq!(answer.data().await.unwrap().unwrap(), "more");
        jump(HOUR).await;
        assert!(is_reset(&mut http1).await && is_reset(&mut http1_app).await);
        assert!(answer.data().await.unwrap().unwrap_err().is_io());
        poll_fn(|cx| body.poll_reset(cx)).await.unwrap();
        assert_eq!(mesh.expired(), 0);
    });
}
