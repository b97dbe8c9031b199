//! Tests of a proxy whose connections use all memory that they may use: new work is rejected with a
//! clear answer, and accepted again when memory is free.
#![allow(clippy::unwrap_used)]

mod support;

use bytes::Bytes;
use diy_mesh_proxy::limits::memory::{Charge, Holder};
use diy_mesh_runtime::admission::Class;
use diy_mesh_testkit::net::{listen, read_until};
use diy_mesh_testkit::wait::{on_worker, until};
use support::{App, Mesh, answering_app, is_reset, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const GET: &str = "GET / HTTP/1.1\r\nHost: cart\r\n\r\n";

/// The bytes that all connections hold.
fn used(mesh: &Mesh) -> usize {
    mesh.worker.admission.used_bytes(&[])
}

/// A connection of the application in use that holds this much.
fn hold(mesh: &Mesh, bytes: usize) -> Charge {
    let slot = mesh.worker.admission.admit(&Holder::App.path()).unwrap();
    slot.set(Class::InUse);
    let mut charge = Charge::new(std::rc::Rc::new(slot));
    charge.hold(bytes).unwrap();
    charge
}

/// A connection of the application in use that holds all the memory.
fn exhaust(mesh: &Mesh) -> Charge {
    hold(mesh, mesh.worker.admission.max_bytes() - used(mesh))
}

#[test]
fn http1_requests_get_503_until_memory_is_free() {
    on_worker(async {
        let (mesh, app) = (Mesh::new(), answering_app().await);
        let mut client = mesh.connect_to(app).await;
        write(&mut client, GET).await;
        read_until(&mut client, "\r\n\r\n").await;
        until(|| used(&mesh) == 0).await;
        let all = exhaust(&mesh);
        write(&mut client, GET).await;
        let reply = read_until(&mut client, "its share\n").await;
        assert!(reply.starts_with("HTTP/1.1 503 "), "{reply}");
        assert!(reply.contains("x-mesh-error: overloaded"), "{reply}");
        assert_eq!(
            mesh.metric("failures_total{direction=\"outbound\",code=\"overloaded\"}"),
            1
        );
        drop(all);
        write(&mut client, GET).await;
        let reply = read_until(&mut client, "\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    });
}

#[test]
fn request_that_the_application_has_got_is_not_offered_for_a_retry() {
    on_worker(async {
        let mesh = Mesh::with_memory(24 * 1024, |_| {});
        let (mut server, address) = App::listen().await;
        let mut client = mesh.connect_inbound(address).await;
        write(
            &mut client,
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20000\r\n\r\nstart",
        )
        .await;
        let mut app = server.accept().await;
        read_until(&mut app, "start").await;
        // Less than its half of the memory, so that the client grows above its own half.
        let _others = hold(&mesh, 10_500);
        write(&mut client, &"x".repeat(15_000)).await;
        let reply = read_until(&mut client, "\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 503 "), "{reply}");
        assert!(reply.contains("x-mesh-error: memory-exhausted"), "{reply}");
    });
}

#[test]
fn http2_requests_get_503_until_memory_is_free() {
    on_worker(async {
        let (mesh, (listener, address)) = (Mesh::new(), listen().await);
        tokio::task::spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::task::spawn_local(async move {
                    let mut app = h2::server::handshake(stream).await.unwrap();
                    while let Some(Ok((_, mut respond))) = app.accept().await {
                        respond
                            .send_response(http::Response::new(()), true)
                            .unwrap();
                    }
                });
            }
        });
        let stream = mesh.connect_to(address).await;
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::task::spawn_local(connection);
        let mut get = async || {
            let request = http::Request::get("http://cart/").body(()).unwrap();
            client.send_request(request, true).unwrap().0.await.unwrap()
        };
        assert_eq!(get().await.status(), 200);
        let all = exhaust(&mesh);
        let reply = get().await;
        assert_eq!(reply.status(), 503);
        assert_eq!(reply.headers()["x-mesh-error"], "overloaded");
        drop(all);
        assert_eq!(get().await.status(), 200);
    });
}

#[test]
fn opaque_connections_are_reset_until_memory_is_free() {
    on_worker(async {
        let (mesh, (mut app, address)) = (Mesh::new(), App::listen().await);
        let all = exhaust(&mesh);
        let mut client = mesh.connect_to(address).await;
        client.write_all(b"\0\x01hello").await.unwrap();
        assert!(is_reset(&mut client).await);
        drop(all);
        let mut client = mesh.connect_to(address).await;
        client.write_all(b"\0\x01hello").await.unwrap();
        app.accept().await.read_exact(&mut [0; 7]).await.unwrap();
    });
}

#[test]
fn clients_get_their_half_of_the_memory_from_the_application() {
    on_worker(async {
        let (mesh, app) = (Mesh::new(), answering_app().await);
        let all = exhaust(&mesh);
        let mut client = mesh.connect_inbound(app).await;
        write(&mut client, GET).await;
        let reply = read_until(&mut client, "\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
        assert!(all.slot().is_ended());
    });
}

#[test]
fn unauthenticated_clients_that_read_nothing_leave_memory_to_peers() {
    on_worker(async {
        // The memory for a thousand connections, as in a container.
        let mesh = Mesh::with_memory(4 * 1024 * 1024, |_| {});
        let (listener, address) = listen().await;
        tokio::task::spawn_local(async move {
            let body = vec![b'x'; 8 * 1024 * 1024];
            loop {
                let mut stream = listener.accept().await.unwrap().0;
                let body = body.clone();
                tokio::task::spawn_local(async move {
                    let _ = stream
                        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 8388608\r\n\r\n")
                        .await;
                    let _ = stream.write_all(&body).await;
                    std::future::pending::<()>().await;
                });
            }
        });
        let mut flood = Vec::new();
        // More than the memory permits: the youngest of them end.
        while flood.len() < 300 {
            let mut client = mesh.connect_inbound(address).await;
            let socket = socket2::SockRef::from(&client);
            socket.set_recv_buffer_size(4096).unwrap();
            // A client that is rejected is reset, the others get the start of the response.
            let _ = client.write_all(GET.as_bytes()).await;
            client.readable().await.unwrap();
            flood.push(client);
        }
        assert!(used(&mesh) > mesh.worker.admission.max_bytes() / 4 * 3);
        let far = std::time::Instant::now() + std::time::Duration::from_secs(3600);
        let lifetime = diy_mesh_proxy::limits::lifetime::Lifetime {
            retires_at: far,
            certificate_ends_at: far,
            resets_at: None,
        };
        let mut peer = mesh.connect_peer(address, lifetime).await;
        write(&mut peer, GET).await;
        let reply = read_until(&mut peer, "\r\n\r\n").await;
        let (count, used) = (flood.len(), used(&mesh));
        assert!(
            reply.starts_with("HTTP/1.1 200 "),
            "{count} clients, {used} bytes: {reply}"
        );
    });
}

#[test]
fn buffers_of_slow_receivers_are_charged_and_released() {
    on_worker(async {
        let body = vec![b'x'; 32 * 1024 * 1024];
        for head in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 33554432\r\n\r\n"[..],
            // Opaque: the request is not HTTP.
            b"",
        ] {
            let (mesh, (mut app, address)) = (Mesh::new(), App::listen().await);
            let mut client = mesh.connect_to(address).await;
            // The buffers of the kernel would grow to the size of the body.
            let socket = socket2::SockRef::from(&client);
            socket.set_recv_buffer_size(64 * 1024).unwrap();
            let request = if head.is_empty() {
                "\0\x01\r\n\r\n"
            } else {
                GET
            };
            write(&mut client, request).await;
            let mut upstream = app.accept().await;
            read_until(&mut upstream, "\r\n\r\n").await;
            let sent = [head, &body].concat();
            tokio::task::spawn_local(async move { upstream.write_all(&sent).await });
            // More than the heads: the part of a read that the client has not accepted.
            until(|| used(&mesh) > 256).await;
            let mut received = vec![0; head.len().max(1) - 1 + body.len()];
            client.read_exact(&mut received).await.unwrap();
            drop(client);
            until(|| used(&mesh) == 0).await;
        }
    });
}

#[test]
fn unfinished_heads_are_charged_and_released() {
    on_worker(async {
        let (mesh, app) = (Mesh::new(), answering_app().await);
        let mut client = mesh.connect_to(app).await;
        write(&mut client, "GET / HTTP/1.1\r\nHost: cart\r\nX: ").await;
        write(&mut client, &"a".repeat(20_000)).await;
        until(|| used(&mesh) >= 20_000).await;
        drop(client);
        until(|| used(&mesh) == 0).await;
        let mut client = mesh.connect_to(app).await;
        write(&mut client, GET).await;
        read_until(&mut client, "\r\n\r\n").await;
        let all = exhaust(&mesh);
        write(&mut client, &GET[..GET.len() - 2]).await;
        let reply = read_until(&mut client, "its share\n").await;
        assert!(reply.starts_with("HTTP/1.1 503 "), "{reply}");
        drop((client, all));
        until(|| used(&mesh) == 0).await;
    });
}

#[test]
fn uploads_complete_without_memory_for_larger_windows() {
    on_worker(async {
        let (mesh, (listener, address)) = (Mesh::new(), listen().await);
        let _most = hold(&mesh, mesh.worker.admission.max_bytes() - 200 * 1024);
        tokio::task::spawn_local(async move {
            let mut app = h2::server::handshake(listener.accept().await.unwrap().0)
                .await
                .unwrap();
            while let Some(Ok((request, mut respond))) = app.accept().await {
                tokio::task::spawn_local(async move {
                    let mut body = request.into_body();
                    let mut length = 0;
                    while let Some(Ok(data)) = body.data().await {
                        length += data.len();
                        let _ = body.flow_control().release_capacity(data.len());
                    }
                    let mut stream = respond
                        .send_response(http::Response::new(()), false)
                        .unwrap();
                    stream.send_data(length.to_string().into(), true).unwrap();
                });
            }
        });
        let stream = mesh.connect_to(address).await;
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::task::spawn_local(connection);
        let request = http::Request::post("http://cart/").body(()).unwrap();
        let (response, mut upload) = client.send_request(request, false).unwrap();
        upload
            .send_data(Bytes::from(vec![0; 1_000_000]), true)
            .unwrap();
        let mut body = response.await.unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "1000000");
    });
}
