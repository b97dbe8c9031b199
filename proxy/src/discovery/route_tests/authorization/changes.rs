//! The exchanges and connections that a change of the policies ends, and those that continue.

use super::*;

#[test]
fn change_ends_only_opaque_connections_that_are_no_longer_allowed() {
    on_worker(async {
        let app = App::new("", "").await;
        let mut pod = Pod::new(app.address);
        pod.authorize(proto::Authorization::default()).await;
        let [mut kept, mut ended] = [
            pod.connect(Some("clients/a")).await,
            pod.connect(Some("others/a")).await,
        ];
        exchange(&mut kept, OPAQUE, OPAQUE).await;
        exchange(&mut ended, OPAQUE, OPAQUE).await;
        let silent = pod.connect(Some("others/b")).await;
        until(|| app.connections.get() == 3).await;
        pod.authorize(allow_namespace("clients")).await;
        assert_eq!(rest(ended).await, b"");
        assert_eq!(rest(silent).await, b"");
        until(|| app.ended.get() == 2).await;
        exchange(&mut kept, OPAQUE, OPAQUE).await;
        assert!(pod.counts("failures_total{direction=\"inbound\",code=\"denied\"} 2\n"));
    });
}

#[test]
fn change_ends_websockets_whose_request_is_no_longer_allowed() {
    on_worker(async {
        let answer =
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        let app = App::new("", answer).await;
        let mut pod = Pod::new(app.address);
        pod.authorize(on_path(Action::Allow, "/chat")).await;
        let upgrade = |path| {
            format!(
                "GET {path} HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
        };
        let mut client = pod.connect(None).await;
        exchange(&mut client, upgrade("/other").as_bytes(), DENIED.as_bytes()).await;
        assert_eq!(app.got(), (0, 0));
        let mut open = Vec::new();
        for path in ["/chat/a", "/chat/b"] {
            let mut client = pod.connect(None).await;
            client.write_all(upgrade(path).as_bytes()).await.unwrap();
            let head = read_until(&mut client, "\r\n\r\n").await;
            assert!(head.starts_with("HTTP/1.1 101 "));
            exchange(&mut client, OPAQUE, OPAQUE).await;
            open.push(client);
        }
        // Opaque traffic is denied before and after the change: the request decides.
        pod.authorize(on_path(Action::Allow, "/chat/b")).await;
        let (mut kept, ended) = (open.pop().unwrap(), open.pop().unwrap());
        assert_eq!(rest(ended).await, b"");
        exchange(&mut kept, OPAQUE, OPAQUE).await;
    });
}

#[test]
fn change_ends_http1_exchanges_that_are_no_longer_allowed() {
    on_worker(async {
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello";
        let (slow, mute) = (App::new("", answer).await, App::new("", "").await);
        for (app, begins) in [(&slow, &b"HTTP/1.1 200 OK\r\n"[..]), (&mute, b"")] {
            let mut pod = Pod::new(app.address);
            pod.authorize(on_path(Action::Allow, "/")).await;
            let mut client = pod.connect(None).await;
            exchange(&mut client, b"GET /a HTTP/1.1\r\nHost: web\r\n\r\n", begins).await;
            until(|| app.connections.get() == 1).await;
            pod.authorize(on_path(Action::Allow, "/b")).await;
            if begins.is_empty() {
                exchange(&mut client, b"", DENIED.as_bytes()).await;
            } else {
                assert!(rest(client).await.ends_with(b"hello"), "it is cut off");
            }
            until(|| app.ended.get() == 1).await;
        }
    });
}

#[test]
fn change_ends_streams_that_are_no_longer_allowed() {
    on_worker(async {
        let app = streams().await;
        let mut pod = Pod::new(app);
        pod.authorize(on_path(Action::Allow, "/")).await;
        let connection = pod.connect(Some("clients/a")).await;
        let (mut client, connection) = h2::client::handshake(connection).await.unwrap();
        tokio::task::spawn_local(connection);
        let mut open = Vec::new();
        for (path, kind) in [
            ("/a", "text/plain"),
            ("/a", "application/grpc"),
            ("/b", "text/plain"),
        ] {
            let request = Request::post(format!("http://web{path}")).header("content-type", kind);
            let (response, sender) = client
                .send_request(request.body(()).unwrap(), false)
                .unwrap();
            open.push((response.await.unwrap().into_body(), sender));
        }
        let request = Request::get("http://web/a/mute").body(()).unwrap();
        let (mute, _) = client.send_request(request, true).unwrap();
        // The application has it.
        let request = Request::get("http://web/b").body(()).unwrap();
        client.send_request(request, true).unwrap().0.await.unwrap();
        pod.authorize(on_path(Action::Allow, "/b")).await;
        let (mut kept, mut sender) = open.pop().unwrap();
        let (mut grpc, _grpc) = open.pop().unwrap();
        let (mut ended, _ended) = open.pop().unwrap();
        let reset = ended.data().await.unwrap().expect_err("a reset");
        assert!(reset.is_reset(), "{reset}");
        assert!(grpc.data().await.is_none());
        let trailers = grpc.trailers().await.unwrap().unwrap();
        assert_eq!(trailers["grpc-status"], "7");
        assert_eq!(mute.await.unwrap().status(), 403);
        sender
            .send_data(Bytes::from_static(b"ping"), false)
            .unwrap();
        assert_eq!(kept.data().await.unwrap().unwrap(), "ping");
    });
}

/// An HTTP/2 application that returns the bodies of its requests, and answers none to `/a/mute`.
async fn streams() -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            tokio::task::spawn_local(async move {
                if request.uri().path() == "/a/mute" {
                    return std::future::pending().await;
                }
                let kind = request.headers().get("content-type").cloned();
                let mut response = Response::new(());
                response
                    .headers_mut()
                    .extend(kind.map(|kind| (http::header::CONTENT_TYPE, kind)));
                let mut body = request.into_body();
                let mut stream = respond.send_response(response, false).unwrap();
                while let Some(Ok(data)) = body.data().await {
                    stream.send_data(data, false).unwrap();
                }
                // Fails if the request was reset.
                let _ = stream.send_data(Bytes::new(), true);
            });
        }
    });
    address
}

#[test]
fn change_applies_to_what_waits_for_its_connection_to_the_application() {
    on_worker(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        // One connection fills the queue: the kernel drops the SYN of others, and repeats it.
        let listener = socket.listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let mut pod = Pod::new(address);
        pod.authorize(on_path(Action::Deny, "/none")).await;
        let _first = TcpStream::connect(address).await.unwrap();
        let mut client = pod.connect(None).await;
        client
            .write_all(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
            .await
            .unwrap();
        until(|| is_dialed(address)).await;
        pod.authorize(on_path(Action::Deny, "/")).await;
        listener.accept().await.unwrap();
        exchange(&mut client, b"", DENIED.as_bytes()).await;
        let (mut accepted, _) = listener.accept().await.unwrap();
        assert_eq!(accepted.read(&mut [0; 1]).await.unwrap_or(0), 0);
    });
}

/// Whether a connection to the address waits for the answer to its SYN.
fn is_dialed(address: SocketAddr) -> bool {
    let to = format!("0100007F:{:04X} 02", address.port());
    std::fs::read_to_string("/proc/net/tcp")
        .unwrap()
        .contains(&to)
}
