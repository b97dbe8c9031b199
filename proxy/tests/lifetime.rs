//! Tests of the lifetime of inbound connections from other proxies. HTTP connections close
//! gracefully when they retire. Opaque connections and open streams outlive the peer's certificate
//! and are reset at the maximum age.
#![allow(clippy::unwrap_used)]

mod support;

use std::future::poll_fn;
use std::time::{Duration, Instant};

use bytes::Bytes;
use diy_mesh_proxy::limits::lifetime::Lifetime;
use diy_mesh_testkit::net::{listen, read_all, read_until};
use diy_mesh_testkit::wait::{on_worker, until};
use support::{App, Mesh, answering_app, is_reset, jump, on_worker_with_jumps, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HOUR: Duration = Duration::from_secs(3600);
const GET: &str = "GET / HTTP/1.1\r\nHost: cart\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

/// A lifetime with these events, in hours from now. `None`: no reset.
fn lifetime(retires: u32, certificate: u32, resets: Option<u32>) -> Lifetime {
    let after = |hours: u32| Instant::now() + hours * HOUR;
    Lifetime {
        retires_at: after(retires),
        certificate_ends_at: after(certificate),
        resets_at: resets.map(after),
    }
}

async fn ask(client: &mut TcpStream) -> String {
    write(client, GET).await;
    read_until(client, "\r\n\r\n").await
}

#[test]
fn retired_http1_connection_closes_after_its_exchange() {
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
fn closes_idle_http1_connection_after_retirement() {
    on_worker_with_jumps(async {
        let mesh = Mesh::with(|config| config.timeouts.http1_idle = 24 * HOUR);
        let app = answering_app().await;
        let mut client = mesh.connect_peer(app, lifetime(1, 24, None)).await;
        assert_eq!(ask(&mut client).await, OK);
        // The connection is retired, and still accepts a request that the caller may have sent.
        jump(HOUR).await;
        assert_eq!(ask(&mut client).await, OK);
        jump(Duration::from_secs(60)).await;
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
    });
}

#[test]
fn retired_http2_connection_sends_goaway_and_completes_streams() {
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

/// An opaque connection and a WebSocket through the proxy: the client's and the app's ends of each.
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
fn counts_tunnels_that_outlive_peer_certificate() {
    on_worker_with_jumps(async {
        let mesh = Mesh::new();
        let mut tunnels = tunnels(&mesh, lifetime(0, 1, None)).await;
        assert_eq!(mesh.expired(), 0);
        jump(HOUR).await;
        until(|| mesh.expired() == 2).await;
        jump(22 * HOUR).await;
        for (client, app) in &mut tunnels {
            client.write_all(b"ping").await.unwrap();
            app.read_exact(&mut [0; 4]).await.unwrap();
        }
        drop(tunnels);
        until(|| mesh.expired() == 0).await;
    });
}

#[test]
fn resets_tunnels_at_maximum_age() {
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
fn counts_and_resets_open_streams_like_tunnels() {
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
