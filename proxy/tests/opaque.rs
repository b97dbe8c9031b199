//! Tests of protocol detection and of opaque connections through the proxy over sockets.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_proto::mesh::v1::Edge;
use diy_mesh_proxy::inbound::edges::day;
use diy_mesh_proxy::limits::lifetime::Lifetimes;
use diy_mesh_proxy::upstream::balance::Backend;
use diy_mesh_testkit::net::{closed_address, listen, read_all, read_until};
use diy_mesh_testkit::wait::{on_worker, until};
use socket2::SockRef;
use support::{App, Mesh, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;

#[test]
fn forwards_server_first_bytes() {
    on_worker(async {
        let (server, address) = listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        let mut app = server.accept().await.unwrap().0;
        write(&mut app, "220 mail.example ESMTP\r\n").await;
        assert_eq!(
            read_until(&mut client, "\r\n").await,
            "220 mail.example ESMTP\r\n"
        );
        write(&mut client, "EHLO there\r\n").await;
        assert_eq!(read_until(&mut app, "\r\n").await, "EHLO there\r\n");
        app.shutdown().await.unwrap();
        assert_eq!(read_all(&mut client).await, "");
        write(&mut client, "still here").await;
        client.shutdown().await.unwrap();
        assert_eq!(read_all(&mut app).await, "still here");
    });
}

/// Sends urgent data between other bytes, all of which have arrived before they are read.
fn send_with_urgent_data(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    assert_eq!(socket.send(b"abc").unwrap(), 3);
    assert_eq!(socket.send_out_of_band(b"!").unwrap(), 1);
    assert_eq!(socket.send(b"def\n").unwrap(), 4);
}

#[test]
fn urgent_data_stays_in_the_stream() {
    on_worker(async {
        let (server, address) = listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        // The proxy waits for the first bytes, which it inspects.
        yield_now().await;
        let readable = timeout(Duration::ZERO, client.readable()).await;
        assert!(readable.is_err(), "nothing was sent");
        send_with_urgent_data(&client);
        let mut app = server.accept().await.unwrap().0;
        for _ in 0..2 {
            assert_eq!(read_until(&mut app, "\n").await, "abc!def\n");
            send_with_urgent_data(&app);
            assert_eq!(read_until(&mut client, "\n").await, "abc!def\n");
            send_with_urgent_data(&client);
        }
        assert_eq!(read_until(&mut app, "\n").await, "abc!def\n");
    });
}

#[test]
fn connection_is_a_call_from_the_first_byte_of_its_client() {
    on_worker(async {
        let (server, address) = listen().await;
        let mesh = Mesh::new();
        let calls = || {
            let message = mesh.metrics.edges.unsent(&mut None, day(SystemTime::now()));
            let edges = message.into_iter().flat_map(|message| message.edges);
            let block = |edge: Edge| match edge.silent {
                Some(silent) => format!("silent {}", silent.block),
                None => edge.block,
            };
            edges.map(block).collect::<Vec<_>>()
        };
        let mut client = mesh.connect_inbound(address).await;
        let mut app = server.accept().await.unwrap().0;
        write(&mut app, "220 mail.example ESMTP\r\n").await;
        read_until(&mut client, "\r\n").await;
        assert_eq!(calls(), [""; 0]);
        client.shutdown().await.unwrap();
        assert_eq!(read_all(&mut app).await, "");
        drop(app);
        assert_eq!(read_all(&mut client).await, "");
        let silent = "silent 127.0.0.0/24";
        until(|| calls() == [silent]).await;

        let mut client = mesh.connect_inbound(address).await;
        let mut app = server.accept().await.unwrap().0;
        write(&mut app, "220 mail.example ESMTP\r\n").await;
        write(&mut client, "EHLO there\r\n").await;
        read_until(&mut app, "\r\n").await;
        until(|| calls() == [silent, "127.0.0.0/24"]).await;
    });
}

#[test]
fn connection_that_is_reset_without_a_byte_is_no_bad_request() {
    on_worker(async {
        let mesh = Mesh::new();
        let (_server, address) = listen().await;
        let users = Rc::strong_count(&mesh.worker);
        let failures = || mesh.metric("failures_total{direction=\"inbound\",code=\"bad-request\"}");
        for (bytes, expected) in [("", 0), ("GET", 1)] {
            let mut client = mesh.connect_inbound(address).await;
            write(&mut client, bytes).await;
            client.set_zero_linger().unwrap();
            drop(client);
            until(|| Rc::strong_count(&mesh.worker) == users).await;
            assert_eq!(failures(), expected, "{bytes:?}");
        }
    });
}

#[test]
fn opaque_connections_and_their_bytes_are_traffic_while_they_are_open() {
    on_worker(async {
        let (server, address) = listen().await;
        let mesh = Mesh::new();
        let counts = || {
            let traffic = mesh.metrics.requests.traffic(Instant::now());
            let inbound = traffic.flows.into_iter().filter(|flow| flow.inbound);
            let counts = inbound.map(|flow| {
                let tls = (flow.connections_mutual_tls, flow.open_mutual_tls);
                let bytes = [flow.bytes_sent, flow.bytes_received];
                ((flow.connections, flow.open), tls, bytes)
            });
            counts.collect::<Vec<_>>()
        };
        let mut client = mesh.connect_inbound(address).await;
        let mut app = server.accept().await.unwrap().0;
        write(&mut app, "220\r\n").await;
        read_until(&mut client, "\r\n").await;
        write(&mut client, "EHLO there\r\n").await;
        read_until(&mut app, "\r\n").await;
        until(|| counts() == [((1, 1), (0, 0), [12, 5])]).await;
        drop((client, app));
        until(|| counts() == [((1, 0), (0, 0), [12, 5])]).await;
        let hour = Duration::from_secs(3600);
        let lifetimes = Lifetimes::new(None, fastrand::Rng::new());
        let lifetime = lifetimes.sample(Instant::now(), hour, hour);
        let mut peer = mesh.connect_peer(address, lifetime).await;
        let mut app = server.accept().await.unwrap().0;
        write(&mut peer, "*1\r\n$4\r\nPING\r\n").await;
        read_until(&mut app, "PING\r\n").await;
        let expected = [((1, 0), (0, 0), [12, 5]), ((1, 1), (1, 1), [14, 0])];
        until(|| counts() == expected).await;
    });
}

#[test]
fn http2_server_preface_does_not_end_detection() {
    on_worker(async {
        // SETTINGS_MAX_CONCURRENT_STREAMS is 77, a value that the proxy does not send.
        let settings = b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x4d";
        let (server, address) = listen().await;
        let mesh = Mesh::new();
        let mut client = mesh.connect_to(address).await;
        let mut app = server.accept().await.unwrap().0;
        app.write_all(settings).await.unwrap();
        let forwarded =
            tokio::time::timeout(Duration::from_millis(200), client.peek(&mut [0])).await;
        assert!(
            forwarded.is_err(),
            "the server's preface was forwarded as opaque bytes"
        );
        client
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            .await
            .unwrap();
        let mut answer = [0; 15];
        client.read_exact(&mut answer).await.unwrap();
        assert!(
            answer[3..9] == settings[3..9] && &answer != settings,
            "the SETTINGS frame is the proxy's own: {answer:?}"
        );
        // If the server closes before the client's preface, its bytes are forwarded.
        let mut client = mesh.connect_to(address).await;
        let mut app = server.accept().await.unwrap().0;
        app.write_all(settings).await.unwrap();
        app.shutdown().await.unwrap();
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, settings);
    });
}

#[test]
fn forwards_client_first_opaque_protocols() {
    on_worker(async {
        let whole: &[&[u8]] = &[
            b"\x16\x03\x01\x00\x05hello",
            b"*1\r\n$4\r\nPING\r\n",
            b"GET key\r\n",
            b"ping\n",
        ];
        // Prefixes of request lines. They are forwarded after the detection timeout.
        let unfinished: &[&[u8]] = &[b"hello", b"PRI * HT"];
        for bytes in whole.iter().chain(unfinished) {
            let (mut server, address) = App::listen().await;
            let mut client = Mesh::new().connect_to(address).await;
            client.write_all(bytes).await.unwrap();
            let mut app = server.accept().await;
            let mut read = vec![0; bytes.len()];
            app.read_exact(&mut read).await.unwrap();
            assert_eq!(&read, bytes);
            write(&mut app, "answer").await;
            assert_eq!(read_until(&mut client, "answer").await, "answer");
        }
    });
}

#[test]
fn closes_opaque_connection_when_paused_first_line_becomes_request() {
    on_worker(async {
        for (begun, rest) in [
            ("GE", "T / HTTP/1.1\r\nX-Called-By: forged\r\n\r\n"),
            ("PRI * HT", "TP/2.0\r\n\r\nSM\r\n\r\n forged"),
        ] {
            let (mut server, address) = App::listen().await;
            let mut client = Mesh::new().connect_to(address).await;
            write(&mut client, begun).await;
            let mut app = server.accept().await;
            assert_eq!(
                read_until(&mut app, begun).await,
                begun,
                "not a request line yet"
            );
            write(&mut client, rest).await;
            assert_eq!(read_all(&mut app).await, "");
            let ended = client.read(&mut [0]).await;
            assert!(
                ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset),
                "{begun}"
            );
        }
        // A connection whose first line is not a request line continues.
        let (mut server, address) = App::listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        write(&mut client, "JDWP-Handshake").await;
        let mut app = server.accept().await;
        assert_eq!(
            read_until(&mut app, "JDWP-Handshake").await,
            "JDWP-Handshake"
        );
        write(&mut client, "\0\0\0\x0bGET / HTTP/1.1\r\n").await;
        assert_eq!(
            read_until(&mut app, "1.1\r\n").await,
            "\0\0\0\x0bGET / HTTP/1.1\r\n"
        );
    });
}

#[test]
fn slow_http_client_uses_dialed_connection() {
    on_worker(async {
        let (server, address) = listen().await;
        let mut client = Mesh::new().connect_to(address).await;
        // The client is silent: the proxy dials.
        let mut app = server.accept().await.unwrap().0;
        write(
            &mut client,
            "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        )
        .await;
        assert_eq!(
            read_until(&mut app, "\r\n\r\n").await,
            "GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        );
        write(&mut app, "HTTP/1.1 204 No Content\r\n\r\n").await;
        assert_eq!(
            read_all(&mut client).await,
            "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
        );
    });
}

#[test]
fn resets_client_if_upstream_refuses_connection() {
    on_worker(async {
        let address = closed_address();
        let mut client = Mesh::new().connect_to(address).await;
        let error = client.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn replies_502_to_slow_http_client() {
    on_worker(async {
        let address = closed_address();
        let mut client = Mesh::new().connect_to(address).await;
        // Longer than the timeout after which the proxy dials.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        write(
            &mut client,
            "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        )
        .await;
        let answer = read_all(&mut client).await;
        assert!(
            answer.starts_with("HTTP/1.1 502 ") && answer.contains("x-mesh-error: connect-failed"),
            "{answer}"
        );
    });
}

#[test]
fn releases_destination_after_silent_client_closes() {
    on_worker(async {
        let (server, address) = listen().await;
        let mesh = Mesh::new();
        let destination = Backend::alone(address);
        let client = mesh.connect(&destination).await;
        drop(client);
        // The proxy may have dialed. The app receives no bytes.
        if let Ok(accepted) =
            tokio::time::timeout(std::time::Duration::from_millis(200), server.accept()).await
        {
            assert_eq!(read_all(&mut accepted.unwrap().0).await, "");
        }
        until(|| Rc::strong_count(&destination) <= 1).await;
    });
}
