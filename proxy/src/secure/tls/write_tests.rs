//! The contract of writes (`io.rs`) with send buffers of 4 kB: whatever arrives is passed on whole,
//! although its source stays open and sends nothing more.

use std::future::{pending, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use diy_mesh_http2::Role;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;

use super::Alpn;
use super::session_tests::{bytes_of, configs, secured};
use super::tests::{CART, Pair, listening, memory};
use crate::secure::io::Io;
use crate::serve::copy::bidirectional;
use crate::serve::http1::body::Relay;
use crate::serve::http1::head::Framing;
use crate::upstream::connect::http2::{STREAM_WINDOW, config};
use crate::upstream::multiplexed::Multiplexed;
use diy_mesh_testkit::net::connected;
use diy_mesh_testkit::wait::on_worker;

/// Far more than the sockets hold, and less than a session seals in one write.
const LENGTH: usize = 100_000;

/// Both ends of a connection with small buffers.
async fn small_sockets() -> (TcpStream, TcpStream) {
    let (near, far) = connected().await;
    for socket in [&near, &far] {
        SockRef::from(socket).set_send_buffer_size(4096).unwrap();
    }
    (near, far)
}

async fn small_pair() -> (Io, Io) {
    secured(&configs(), small_sockets().await).await
}

async fn receives(io: &mut (impl AsyncReadExt + Unpin), expected: &[u8]) {
    let mut received = vec![0; expected.len()];
    io.read_exact(&mut received).await.unwrap();
    assert!(received == expected);
}

#[test]
fn write_completes_when_the_socket_has_the_bytes() {
    on_worker(async {
        for length in [1, LENGTH, 10 * LENGTH] {
            let ((mut near, mut far), bytes) = (small_pair().await, bytes_of(length));
            // The writer polls its connection no further.
            tokio::join!(
                async { near.write_all(&bytes).await.unwrap() },
                receives(&mut far, &bytes)
            );
        }
    });
}

#[test]
fn pending_write_must_be_continued() {
    on_worker(async {
        let ((mut near, mut far), bytes) = (small_pair().await, bytes_of(LENGTH));
        poll_fn(|cx| {
            assert!(Pin::new(&mut near).poll_write(cx, &bytes).is_pending());
            Poll::Ready(())
        })
        .await;
        let (shorter, ()) = tokio::join!(near.write(&bytes[1..]), receives(&mut far, &bytes));
        assert_eq!(
            shorter.unwrap_err().kind(),
            std::io::ErrorKind::InvalidInput
        );
    });
}

#[test]
fn copies_a_paused_stream_whole_after_the_end_of_the_other_direction() {
    on_worker(async {
        for is_upload in [true, false] {
            let (mut secured, mut peer) = small_pair().await;
            let (mut app, far) = connected().await;
            let mut plain = Io::new(far);
            spawn_local(async move {
                let (client, upstream) = if is_upload {
                    (&mut plain, &mut secured)
                } else {
                    (&mut secured, &mut plain)
                };
                bidirectional(client, upstream, None, &mut pending(), &mut |_, _| true).await
            });
            peer.shutdown().await.unwrap();
            assert_eq!(app.read(&mut [0]).await.unwrap(), 0);
            let bytes = bytes_of(LENGTH);
            app.write_all(&bytes).await.unwrap();
            receives(&mut peer, &bytes).await;
        }
    });
}

#[test]
fn relays_a_paused_http1_body_whole() {
    on_worker(async {
        let (mut secured, mut peer) = small_pair().await;
        let (mut sender, far) = connected().await;
        let bytes = bytes_of(LENGTH);
        sender.write_all(&bytes).await.unwrap();
        let (mut from, head) = (Io::new(far), BytesMut::from(&b"head"[..]));
        let mut relay = Relay::new(Framing::Length(2 * LENGTH as u64), head, false);
        let relaying = spawn_local(async move {
            poll_fn(|cx| relay.poll(cx, &mut from, &mut secured, &mut |_| {})).await
        });
        receives(&mut peer, b"head").await;
        receives(&mut peer, &bytes).await;
        assert!(!relaying.is_finished());
    });
}

/// A client's connection to the inbound proxy of a new pair. Both ends have small send buffers.
async fn connect(app: SocketAddr, alpn: Alpn) -> Io {
    let pair = Pair::usual(app).await;
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    SockRef::from(&listener).set_send_buffer_size(4096).unwrap();
    let address = pair.inbound.receive_on(listener, app);
    let stream = TcpStream::connect(address).await.unwrap();
    SockRef::from(&stream).set_send_buffer_size(4096).unwrap();
    let (tls, cart) = (&pair.outbound.worker.tls, CART.parse().unwrap());
    let connected = tls
        .connect(Io::new(stream), address, &cart, alpn, memory())
        .await;
    connected.unwrap()
}

#[test]
fn streamed_http1_response_arrives_whole_while_the_application_pauses() {
    on_worker(async {
        let event = vec![b'e'; LENGTH];
        let app = listening(async move |mut stream| {
            stream.read_exact(&mut [0; 30]).await.unwrap();
            let head =
                format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{LENGTH:x}\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&event).await.unwrap();
            pending::<()>().await;
        })
        .await;
        let mut client = connect(app, Alpn::Http1).await;
        let request = b"GET /events HTTP/1.1\r\nHost: cart\r\n\r\n";
        client.write_all(request).await.unwrap();
        let mut received = 0;
        while received < LENGTH {
            let mut piece = [0; 16 * 1024];
            let read = client.read(&mut piece).await.unwrap();
            received += piece[..read].iter().filter(|byte| **byte == b'e').count();
        }
    });
}

#[test]
fn streamed_http2_bodies_arrive_whole_while_both_sides_pause() {
    on_worker(async {
        let app = listening(async |stream| {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let mut response = respond
                    .send_response(http::Response::new(()), false)
                    .unwrap();
                spawn_local(async move {
                    echo_length(request.into_body(), &mut response, LENGTH).await;
                    pending::<()>().await;
                });
            }
        })
        .await;
        let config = config(Role::Client, STREAM_WINDOW);
        let io = Multiplexed::new(connect(app, Alpn::Http2).await, memory(), config);
        spawn_local({
            let io = io.clone();
            async move { io.drive(|_| Poll::<()>::Pending).await }
        });
        let request = http::Request::post("http://cart/").body(()).unwrap();
        let request = diy_mesh_http2::Request::from(&request.into_parts().0);
        let (upload, download) = io.streams().open(&request, false).unwrap();
        poll_fn(|cx| download.poll_response(cx)).await.unwrap();
        upload.send(vec![7; LENGTH].into(), false).unwrap();
        let mut received = 0;
        while received < LENGTH {
            let data = poll_fn(|cx| download.poll_data(cx)).await.unwrap().unwrap();
            received += data.len();
            download.release(data.len());
        }
        assert_eq!(received, LENGTH);
    });
}

/// Sends as much as it received, and ends neither direction.
async fn echo_length(
    mut body: h2::RecvStream,
    response: &mut h2::SendStream<Bytes>,
    length: usize,
) {
    assert_eq!(receive(&mut body, length).await, length);
    response.send_data(vec![8; length].into(), false).unwrap();
}

async fn receive(body: &mut h2::RecvStream, length: usize) -> usize {
    let mut received = 0;
    while received < length {
        let data = body.data().await.unwrap().unwrap();
        received += data.len();
        body.flow_control().release_capacity(data.len()).unwrap();
    }
    received
}
