//! What is no HTTP, through the proxy over real sockets: whoever speaks first is heard at once, and
//! bytes stay bytes.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::rc::Rc;
use std::time::Duration;

use diy_mesh_proxy::balance::Destination;
use support::{App, Mesh, listen, on_worker, read_all, read_until, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[test]
fn a_server_that_speaks_first_is_heard_while_the_client_waits() {
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

#[test]
fn an_http2_server_that_speaks_first_leaves_its_slow_client_the_word() {
    on_worker(async {
        // At most 77 streams, which the proxy itself does not say.
        let settings = b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x4d";
        let (server, address) = listen().await;
        let mesh = Mesh::new();
        let mut client = mesh.connect_to(address).await;
        let mut app = server.accept().await.unwrap().0;
        app.write_all(settings).await.unwrap();
        let passed_on =
            tokio::time::timeout(Duration::from_millis(200), client.peek(&mut [0])).await;
        assert!(
            passed_on.is_err(),
            "the app's word was taken for the first of another protocol"
        );
        client
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            .await
            .unwrap();
        let mut answer = [0; 15];
        client.read_exact(&mut answer).await.unwrap();
        assert!(
            answer[3..9] == settings[3..9] && &answer != settings,
            "the proxy speaks HTTP/2 itself: {answer:?}"
        );
        // Who turns out to go without a client's word is heard after all.
        let mut client = mesh.connect_to(address).await;
        let mut app = server.accept().await.unwrap().0;
        app.write_all(settings).await.unwrap();
        app.shutdown().await.unwrap();
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, settings);
    });
}

#[test]
fn a_client_that_speaks_first_in_its_own_protocol_is_passed_on() {
    on_worker(async {
        let whole: &[&[u8]] = &[
            b"\x16\x03\x01\x00\x05hello",
            b"*1\r\n$4\r\nPING\r\n",
            b"GET key\r\n",
            b"ping\n",
        ];
        // These might still become a request line; they are passed on when nothing more comes.
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
fn a_request_that_pauses_in_its_first_line_does_not_get_past_http() {
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
                "it was no request yet"
            );
            write(&mut client, rest).await;
            assert_eq!(read_all(&mut app).await, "");
            let ended = client.read(&mut [0]).await;
            assert!(
                ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset),
                "{begun}"
            );
        }
        // What goes on as something else goes on.
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
fn a_slow_client_of_http_is_still_http_and_uses_the_connection_that_was_dialed() {
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
fn a_refused_connection_looks_refused() {
    on_worker(async {
        let (server, address) = listen().await;
        drop(server);
        let mut client = Mesh::new().connect_to(address).await;
        let error = client.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_slow_client_of_http_is_told_in_http_that_nobody_is_there() {
    on_worker(async {
        let (server, address) = listen().await;
        drop(server);
        let mut client = Mesh::new().connect_to(address).await;
        // Longer than the proxy waits before it dials.
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
fn a_client_that_leaves_without_a_word_leaves_nothing_behind() {
    on_worker(async {
        let (server, address) = listen().await;
        let mesh = Mesh::new();
        let destination = Rc::new(Destination::fixed(address));
        let client = mesh.connect(&destination).await;
        drop(client);
        // Dialed or not, the app sees an end and nothing else.
        if let Ok(accepted) =
            tokio::time::timeout(std::time::Duration::from_millis(200), server.accept()).await
        {
            assert_eq!(read_all(&mut accepted.unwrap().0).await, "");
        }
        while Rc::strong_count(&destination) > 1 {
            tokio::task::yield_now().await;
        }
    });
}
