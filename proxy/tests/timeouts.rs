//! Tests of the timeouts of connections, and of the connections that they must not end: quiet
//! databases, watches and gRPC streams.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use bytes::Bytes;
use diy_mesh_model::exchange::Direction::{Inbound, Outbound};
use diy_mesh_proxy::limits::timeouts::TimeoutKind;
use diy_mesh_proxy::path::listener;
use diy_mesh_proxy::secure::tls::Alpn;
use diy_mesh_proxy::upstream::connect::{Dialer, Remote};
use diy_mesh_testkit::net::{listen, read_all, read_until};
use diy_mesh_testkit::wait::{TEST_TIMEOUT, on_worker};
use socket2::SockRef;
use support::{
    App, Mesh, answering_app, is_reset, jump, on_worker_with_jumps, on_worker_without_waiting,
    write,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const GET: &str = "GET / HTTP/1.1\r\nHost: cart\r\n\r\n";

async fn exchange(client: &mut TcpStream) {
    write(client, GET).await;
    read_until(client, "\r\n\r\n").await;
}

#[test]
fn closes_http1_connection_that_is_idle_for_an_hour() {
    on_worker_with_jumps(async {
        let (mesh, app) = (Mesh::new(), answering_app().await);
        let mut client = mesh.connect_to(app).await;
        for _ in 0..3 {
            exchange(&mut client).await;
            jump(59 * MINUTE).await;
        }
        exchange(&mut client).await;
        assert_eq!(mesh.timeouts(Outbound, TimeoutKind::Http1Idle), 0);
        jump(HOUR).await;
        assert_eq!(read_all(&mut client).await, "");
        assert_eq!(mesh.timeouts(Outbound, TimeoutKind::Http1Idle), 1);
    });
}

#[test]
fn quiet_response_is_not_idle() {
    on_worker_with_jumps(async {
        let (mesh, (mut app, address)) = (Mesh::new(), App::listen().await);
        let mut client = mesh.connect_to(address).await;
        write(&mut client, GET).await;
        let mut upstream = app.accept().await;
        read_until(&mut upstream, "\r\n\r\n").await;
        jump(30 * HOUR).await;
        write(&mut upstream, "HTTP/1.1 200 OK\r\n\r\n").await;
        read_until(&mut client, "\r\n\r\n").await;
        jump(30 * HOUR).await;
        write(&mut upstream, "event").await;
        read_until(&mut client, "event").await;
    });
}

#[test]
fn closes_http2_connection_without_streams_for_an_hour() {
    on_worker_with_jumps(async {
        let (mesh, (listener, app)) = (Mesh::new(), listen().await);
        let stream = mesh.connect_to(app).await;
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::task::spawn_local(connection);
        let request = http::Request::get("http://cart/").body(()).unwrap();
        let (response, _) = client.send_request(request, true).unwrap();
        let mut app = h2::server::handshake(listener.accept().await.unwrap().0)
            .await
            .unwrap();
        let (_, mut respond) = app.accept().await.unwrap().unwrap();
        tokio::task::spawn_local(async move { while let Some(Ok(_)) = app.accept().await {} });
        let mut body = respond
            .send_response(http::Response::new(()), false)
            .unwrap();
        let mut answer = response.await.unwrap().into_body();
        // A quiet stream is not idle. The upstream connection stays open as long as no `maintain`
        // of the pool sends a PING.
        jump(30 * HOUR).await;
        body.send_data(Bytes::from_static(b"event"), true).unwrap();
        assert_eq!(answer.data().await.unwrap().unwrap(), "event");
        assert!(answer.data().await.is_none());
        assert_eq!(mesh.timeouts(Outbound, TimeoutKind::Http2Idle), 0);
        drop((answer, body, respond));
        while mesh.timeouts(Outbound, TimeoutKind::Http2Idle) == 0 {
            jump(HOUR).await;
            tokio::task::yield_now().await;
        }
        // GOAWAY: the client opens no further stream, and its connection ends.
        while std::future::poll_fn(|cx| client.poll_ready(cx))
            .await
            .is_ok()
        {
            tokio::task::yield_now().await;
        }
        drop(client);
        connection.await.unwrap().unwrap();
    });
}

#[test]
fn resets_opaque_connection_that_is_quiet_for_a_day() {
    on_worker_with_jumps(async {
        let (mesh, (mut app, address)) = (Mesh::new(), App::listen().await);
        let mut client = mesh.connect_to(address).await;
        client.write_all(b"\0\x01hello").await.unwrap();
        let mut upstream = app.accept().await;
        upstream.read_exact(&mut [0; 7]).await.unwrap();
        for _ in 0..3 {
            jump(23 * HOUR).await;
            client.write_all(b"ping").await.unwrap();
            upstream.read_exact(&mut [0; 4]).await.unwrap();
            jump(23 * HOUR).await;
            upstream.write_all(b"pong").await.unwrap();
            client.read_exact(&mut [0; 4]).await.unwrap();
        }
        assert_eq!(mesh.timeouts(Outbound, TimeoutKind::OpaqueIdle), 0);
        jump(24 * HOUR).await;
        assert!(is_reset(&mut client).await && is_reset(&mut upstream).await);
        assert_eq!(mesh.timeouts(Outbound, TimeoutKind::OpaqueIdle), 1);
    });
}

#[test]
fn limits_total_time_of_detection() {
    on_worker_without_waiting(async {
        let (mesh, (server, address)) = (Mesh::new(), listen().await);
        let mut client = mesh.connect_inbound(address).await;
        let begun = Instant::now();
        // Never pauses for long, and no detector knows the protocol.
        let drip = async {
            while client.write_all(b"x").await.is_ok() {
                sleep(Duration::from_millis(200)).await;
            }
        };
        let forwarded = async {
            loop {
                let mut upstream = server.accept().await.unwrap().0;
                if upstream.read(&mut [0]).await.is_ok_and(|read| read > 0) {
                    return;
                }
            }
        };
        tokio::select! {
            () = drip => panic!("the connection was closed"),
            () = forwarded => {}
        }
        assert_eq!(begun.elapsed().as_secs(), 10);
        assert_eq!(mesh.timeouts(Inbound, TimeoutKind::Detect), 1);
    });
}

#[test]
fn resets_connection_whose_client_and_server_are_silent_for_an_hour() {
    on_worker_with_jumps(async {
        let (mesh, (server, address)) = (Mesh::new(), listen().await);
        let mut client = mesh.connect_inbound(address).await;
        let mut upstream = server.accept().await.unwrap().0;
        // Until the proxy waits for both.
        jump(59 * MINUTE).await;
        upstream.writable().await.unwrap();
        assert_eq!(mesh.timeouts(Inbound, TimeoutKind::SilentClient), 0);
        until_counted(&mesh).await;
        assert!(is_reset(&mut client).await);
        assert_eq!(read_all(&mut upstream).await, "");
    });
}

async fn until_counted(mesh: &Mesh) {
    let begun = Instant::now();
    while mesh.timeouts(Inbound, TimeoutKind::SilentClient) == 0 {
        assert!(begun.elapsed() < 24 * HOUR, "the timeout is an hour");
        jump(MINUTE).await;
        tokio::task::yield_now().await;
    }
}

#[test]
fn counts_incomplete_request_heads_and_prefaces() {
    on_worker_without_waiting(async {
        let (mesh, (_server, address)) = (Mesh::new(), listen().await);
        let mut http1 = mesh.connect_to(address).await;
        write(&mut http1, "GET / HTTP/1.1\r\nHost:").await;
        assert!(read_all(&mut http1).await.starts_with("HTTP/1.1 408 "));
        assert_eq!(mesh.timeouts(Outbound, TimeoutKind::RequestHead), 1);
    });
}

#[test]
fn every_socket_has_user_timeout_and_keepalive() {
    on_worker(async {
        let mesh = Mesh::with(|config| config.timeouts.tcp_user = Duration::from_secs(77));
        let user_timeout = mesh.worker.config.timeouts.tcp_user;
        let listener = listener::bind([127, 0, 0, 1].into(), 0, user_timeout).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let remote = Remote {
            pod: String::new(),
            address: listener.local_addr().unwrap(),
            identity: None,
            tls: None,
        };
        let slot = mesh.slot();
        let dialer = Dialer::new(
            &mesh.worker.tls,
            tokio::time::Instant::now(),
            TEST_TIMEOUT,
            &slot,
        );
        let (dialed, accepted) = tokio::join!(dialer.dial(&remote, Alpn::Http1), listener.accept());
        let (dialed, accepted) = (dialed.unwrap(), accepted.unwrap().0);
        for socket in [SockRef::from(dialed.socket()), SockRef::from(&accepted)] {
            assert_eq!(socket.tcp_user_timeout().unwrap(), Some(user_timeout));
            assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
        }
    });
}
