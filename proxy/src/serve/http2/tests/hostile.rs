//! Tests with clients that violate the protocol or flood the proxy: it closes their connection,
//! with GOAWAY if possible, and continues to serve other connections.

use diy_mesh_testkit::wait::until;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// `GET /` with the scheme `http`, as indexes of HPACK's static table.
pub(super) const GET: &[u8] = &[0x82, 0x84, 0x86];

pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PING: u8 = 6;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const GOAWAY: u8 = 7;
pub(super) const CONTINUATION: u8 = 9;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;

pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A client that sends raw frames.
pub(super) struct Raw(pub TcpStream);

impl Raw {
    pub async fn connect(mesh: &Mesh, address: SocketAddr) -> Self {
        let mut stream = mesh.dial(&Backend::alone(address)).await;
        stream.write_all(PREFACE).await.unwrap();
        Self(stream)
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// Sends repeatedly and reads until the proxy closes the connection. Returns the code of its
    /// GOAWAY frame.
    async fn flood(self, mut bytes: impl FnMut() -> Vec<u8> + 'static) -> Option<u32> {
        let (mut read, mut write) = self.0.into_split();
        let writer =
            tokio::task::spawn_local(
                async move { while write.write_all(&bytes()).await.is_ok() {} },
            );
        let mut code = None;
        while let Some((kind, payload)) = next_frame(&mut read).await {
            if kind == GOAWAY {
                code = Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
            }
        }
        writer.abort();
        code
    }

    /// The payload of the next frame of this type, or `None` if the connection ends without one.
    pub async fn wait_for(&mut self, wanted: u8) -> Option<Vec<u8>> {
        loop {
            let (kind, payload) = next_frame(&mut self.0).await?;
            if kind == wanted {
                return Some(payload);
            }
        }
    }
}

pub(super) async fn next_frame(stream: &mut (impl AsyncReadExt + Unpin)) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    stream.read_exact(&mut payload).await.ok()?;
    Some((head[3], payload))
}

/// Runs a flood while another client of the same worker and app sends requests, which must succeed.
async fn flood_beside_others(make: impl FnMut() -> Vec<u8> + 'static) -> Option<u32> {
    let address = named_app("fine").await;
    let mesh = Mesh::new();
    let mut other = mesh.client_of(address).await;
    assert_ok(&mut other).await;
    let flooding = tokio::task::spawn_local(Raw::connect(&mesh, address).await.flood(make));
    while !flooding.is_finished() {
        assert_ok(&mut other).await;
    }
    assert_ok(&mut other).await;
    flooding.await.unwrap()
}

const ENHANCE_YOUR_CALM: Option<u32> = Some(11);

#[test]
fn closes_connection_on_reset_flood() {
    on_worker(async {
        let mut stream = 1;
        let code = flood_beside_others(move || {
            let mut bytes = Vec::new();
            for _ in 0..50 {
                bytes.extend(frame(HEADERS, END_HEADERS, stream, GET));
                bytes.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
                stream += 2;
            }
            bytes
        });
        assert_eq!(code.await, ENHANCE_YOUR_CALM);
    });
}

#[test]
fn accepts_concurrent_large_uploads() {
    on_worker(async {
        let address = stalled_app().await;
        let mesh = Mesh::new();
        let mut raw = Raw::connect(&mesh, address).await;
        raw.wait_for(SETTINGS).await.unwrap();
        raw.send(&frame(SETTINGS, 1, 0, &[])).await;
        let streams = || (0..8_u32).map(|index| 2 * index + 1);
        let window = super::super::STREAM_WINDOW;
        for stream in streams() {
            raw.send(&frame(HEADERS, END_HEADERS, stream, GET)).await;
        }
        let mut granted = crate::upstream::connect::http2::MIN_WINDOW;
        while granted < 8 * window {
            let increment = raw.wait_for(WINDOW_UPDATE).await.unwrap();
            granted += u32::from_be_bytes(increment.try_into().unwrap());
        }
        let (mut read, mut write) = raw.0.into_split();
        // Uploads that fill the flow-control windows at once are not a flood.
        let chunk = vec![0; 16 * 1024];
        let upload = streams()
            .flat_map(|stream| frame(0, 0, stream, &chunk).repeat(window as usize / chunk.len()));
        let upload: Vec<u8> = upload.chain(frame(PING, 0, 0, b"thereyet")).collect();
        let writing =
            tokio::task::spawn_local(async move { write.write_all(&upload).await.map(|()| write) });
        loop {
            match next_frame(&mut read)
                .await
                .expect("the connection stays open")
            {
                (PING, payload) if payload == b"thereyet" => break,
                (GOAWAY, payload) => panic!("the proxy sent GOAWAY: {payload:?}"),
                _ => {}
            }
        }
        writing.await.unwrap().unwrap();
    });
}

/// Whether the proxy closed the connection. A client that writes faster than it reads may miss the
/// GOAWAY frame.
fn is_rejected(code: Option<u32>) -> bool {
    matches!(code, None | ENHANCE_YOUR_CALM)
}

#[test]
fn closes_connection_on_ping_flood() {
    on_worker(async {
        assert!(is_rejected(
            flood_beside_others(|| frame(PING, 0, 0, &[0; 8]).repeat(100)).await
        ))
    });
}

#[test]
fn closes_connection_on_settings_flood() {
    on_worker(async {
        assert!(is_rejected(
            flood_beside_others(|| frame(SETTINGS, 0, 0, &[]).repeat(100)).await
        ))
    });
}

#[test]
fn sends_goaway_on_control_frame_flood() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut raw = Raw::connect(&mesh, closed_address()).await;
        // PRIORITY frames, slightly more than the limit.
        let priorities = frame(2, 0, 1, &[0; 5])
            .repeat(usize::try_from(super::super::MAX_CONTROL_BYTES).unwrap() / 14 + 1);
        raw.send(&priorities).await;
        let goaway = raw.wait_for(GOAWAY).await.unwrap();
        assert_eq!(goaway[4..8], 11_u32.to_be_bytes());
        assert!(raw.wait_for(GOAWAY).await.is_none());
    });
}

#[test]
fn closes_connection_on_continuation_flood() {
    on_worker(async {
        let mut begun = false;
        let code = flood_beside_others(move || {
            let (kind, block) = if begun {
                (CONTINUATION, &[][..])
            } else {
                (HEADERS, GET)
            };
            begun = true;
            frame(kind, 0, 1, block)
        });
        assert_eq!(code.await, ENHANCE_YOUR_CALM);
    });
}

#[test]
fn does_not_buffer_endless_header_block() {
    on_worker(async {
        // A field x-a of 1000 bytes, never indexed, repeatedly.
        let field = [&[0x10, 3][..], b"x-a", &[0x7f, 0xe9, 0x06], &[b'v'; 1000]].concat();
        let mut begun = false;
        let code = flood_beside_others(move || {
            let kind = if std::mem::replace(&mut begun, true) {
                CONTINUATION
            } else {
                HEADERS
            };
            frame(kind, 0, 1, &field.repeat(16))
        });
        assert!(code.await.is_some());
    });
}

#[test]
fn replies_431_to_header_list_over_limit() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = mesh.client_of(named_app("fine").await).await;
        let value = "v".repeat(10_000);
        let request = (0..8).fold(Request::get("http://app/"), |request, number| {
            request.header(format!("x-{number}"), &value)
        });
        let (response, _) = call(&mut client, request.body(()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 431);
        assert_ok(&mut client).await;
    });
}

#[test]
fn rejects_http2_requests_with_ambiguous_host() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = mesh.client_of(named_app("fine").await).await;
        let request = |fields: &[(&'static str, &'static str)]| {
            let mut request = get("/");
            request.headers_mut().extend(super::fields(fields));
            request
        };
        for bad in [
            request(&[("host", "other")]),
            request(&[("host", "app"), ("host", "app")]),
        ] {
            let (response, _) = call(&mut client, bad).await.unwrap();
            assert_local_reply(&response, 400, "bad-request");
        }
        assert_eq!(
            call(&mut client, request(&[("host", "APP")]))
                .await
                .unwrap()
                .0
                .status(),
            200
        );
    });
}

#[test]
fn resets_only_stream_of_malformed_request() {
    on_worker(async {
        let literal = |name: &[u8], value: &[u8]| {
            [
                &[0x10, name.len() as u8][..],
                name,
                &[value.len() as u8],
                value,
            ]
            .concat()
        };
        let mesh = Mesh::new();
        let mut raw = Raw::connect(&mesh, named_app("fine").await).await;
        let bad: [Vec<u8>; 6] = [
            [GET, &literal(b"connection", b"close")].concat(),
            [GET, &literal(b"transfer-encoding", b"chunked")].concat(),
            [GET, &literal(b"te", b"gzip")].concat(),
            [GET, &literal(b"content-length", b"5")].concat(),
            [GET, &[0x82]].concat(),
            [
                &literal(b":method", b"CONNECT"),
                &literal(b":protocol", b"websocket"),
                &[0x84, 0x86][..],
                &literal(b":authority", b"a"),
            ]
            .concat(),
        ];
        for (index, block) in bad.iter().enumerate() {
            let stream = 2 * u32::try_from(index).unwrap() + 1;
            raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
                .await;
            let code = raw
                .wait_for(RST_STREAM)
                .await
                .unwrap_or_else(|| panic!("the connection ended at {index}"));
            assert_eq!(code, 1_u32.to_be_bytes(), "{index}");
        }
        raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, 99, GET))
            .await;
        assert_eq!(raw.wait_for(HEADERS).await.unwrap()[0], 0x88, "200");
    });
}

#[test]
fn refuses_streams_over_limit() {
    on_worker(async {
        let address = stalled_app().await;
        let mesh = Mesh::new();
        let mut raw = Raw::connect(&mesh, address).await;
        for index in 0..=super::super::MAX_STREAMS {
            raw.send(&frame(HEADERS, END_HEADERS, 2 * index + 1, GET))
                .await;
        }
        assert_eq!(raw.wait_for(RST_STREAM).await.unwrap(), 7_u32.to_be_bytes());
    });
}

#[test]
fn rejects_invalid_preface() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut stream = mesh.dial(&Backend::alone(closed_address())).await;
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")
            .await
            .unwrap();
        let mut raw = Raw(stream);
        assert!(raw.wait_for(HEADERS).await.is_none());
    });
}

/// An app with endless responses.
async fn endless_app() -> SocketAddr {
    let (listener, address) = listen().await;
    let respond = async |mut respond: SendResponse<Bytes>| {
        let mut body = respond.send_response(Response::new(()), false).unwrap();
        loop {
            body.reserve_capacity(64 * 1024);
            let Some(Ok(capacity)) = poll_fn(|cx| body.poll_capacity(cx)).await else {
                return;
            };
            if body.send_data(vec![0; capacity].into(), false).is_err() {
                return;
            }
        }
    };
    tokio::task::spawn_local(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((_, stream))) = connection.accept().await {
            tokio::task::spawn_local(respond(stream));
        }
    });
    address
}

/// A slow client gets every byte, in order, and what waits for it is charged while it waits.
#[test]
fn responses_that_wait_for_a_slow_client_are_charged_and_arrive() {
    on_worker(async {
        const SIZE: usize = 400_000;
        let byte = |at: usize| (at % 251) as u8;
        let app = app(move |_, mut respond| async move {
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            let body: Vec<u8> = (0..SIZE).map(byte).collect();
            stream.send_data(body.into(), false).unwrap();
            stream.send_trailers(fields(&[("x-sum", "7")])).unwrap();
        });
        let mesh = Mesh::new();
        let mut client = mesh.client_of(app.await).await;
        let used = || mesh.worker.admission.used_bytes(&[]);
        assert_ok(&mut client).await;
        let idle = used();
        let mut responses = Vec::new();
        for _ in 0..4 {
            let (response, _) = client.send_request(get("/"), true).unwrap();
            responses.push(response.await.unwrap());
        }
        // The windows of the streams to the app are full.
        let window = super::super::STREAM_WINDOW as usize;
        until(|| used() > idle + 3 * window).await;
        // They share the window of the client's connection.
        let read = |response| tokio::task::spawn_local(read(response));
        let reading: Vec<_> = responses.into_iter().map(read).collect();
        for response in reading {
            let (response, trailers) = response.await.unwrap().unwrap();
            let body = response.body().iter().enumerate();
            assert_eq!(response.body().len(), SIZE);
            assert!(body.into_iter().all(|(at, one)| *one == byte(at)));
            assert_eq!(trailers, Some(fields(&[("x-sum", "7")])));
        }
        until(|| used() <= idle + window / 2).await;
    });
}

/// The start of a request is kept for another attempt until the response.
#[test]
fn bodies_that_are_kept_for_another_attempt_are_charged() {
    on_worker(async {
        const STREAMS: usize = 20;
        const BODY: &[u8] = &[0; 16_000];
        let mesh = Mesh::new();
        let mut client = mesh.client_of(stalled_reader().await).await;
        let used = || mesh.worker.admission.used_bytes(&[]);
        let mut open = Vec::new();
        for _ in 0..STREAMS {
            poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
            let (response, mut stream) = client.send_request(grpc("/"), false).unwrap();
            stream.send_data(Bytes::from_static(BODY), false).unwrap();
            open.push((response, stream));
        }
        until(|| used() > STREAMS * BODY.len()).await;
        // More than 16 KiB are not kept.
        for (_, stream) in &mut open {
            stream.send_data(Bytes::from_static(BODY), false).unwrap();
        }
        until(|| used() < STREAMS * BODY.len() / 2).await;
    });
}

/// The field that names the caller does not fit into the memory of the head, which doubles.
#[test]
fn heads_that_grow_by_edits_are_charged() {
    on_worker(async {
        const STREAMS: usize = 10;
        const LENGTH: usize = 16_000;
        let mesh = Mesh::new();
        let app = Backend::alone(stalled_reader().await);
        let caller = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        let caller = Caller::Peer(Arc::new(caller));
        let mut client = connect(mesh.carry(Direction::Inbound, &app, caller).await).await;
        let used = || mesh.worker.admission.used_bytes(&[]);
        let mut open = Vec::new();
        for _ in 0..STREAMS {
            poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
            let mut request = grpc("/");
            let long = "v".repeat(LENGTH).parse().unwrap();
            request.headers_mut().insert("x-long", long);
            open.push(client.send_request(request, false).unwrap());
        }
        until(|| used() > STREAMS * 2 * LENGTH).await;
        drop(open);
        until(|| used() < 4 * LENGTH).await;
    });
}

/// One request has a stream of the endpoint, which is silent. The bodies of the others wait.
#[test]
fn bodies_that_wait_for_an_endpoint_are_charged_and_released() {
    on_worker(async {
        const STREAMS: usize = 10;
        const BODY: &[u8] = &[0; 60_000];
        let mesh = Mesh::new();
        let (_silent, address) = listen().await;
        let mut client = mesh.client_of(address).await;
        let used = || mesh.worker.admission.used_bytes(&[]);
        let mut open = Vec::new();
        for _ in 0..STREAMS {
            poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
            let (response, mut stream) = client.send_request(grpc("/"), false).unwrap();
            stream.send_data(Bytes::from_static(BODY), false).unwrap();
            open.push((response, stream));
        }
        // The window of the client's connection is larger than all bodies.
        until(|| used() > STREAMS * BODY.len()).await;
        drop(open);
        until(|| used() < BODY.len()).await;
    });
}

/// Starts an app that reads bodies, and never responds.
async fn stalled_reader() -> SocketAddr {
    app(|request, respond| async move {
        let _held = respond;
        // Fails when the client is gone.
        let _ = read_body(&mut request.into_body()).await;
        std::future::pending::<()>().await;
    })
    .await
}

#[test]
fn unread_responses_are_bounded_and_charged_whatever_windows_the_client_grants() {
    on_worker(async {
        const STREAMS: usize = 80;
        let mesh = Mesh::new();
        let mut raw = Raw::connect(&mesh, endless_app().await).await;
        let used = || mesh.worker.admission.used_bytes(&[]);
        let mut bytes = frame(
            SETTINGS,
            0,
            0,
            &[&[0, 4][..], &[0x7f, 0xff, 0xff, 0xff]].concat(),
        );
        bytes.extend(frame(WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes()));
        let gets = (0..STREAMS as u32).map(|number| 2 * number + 1);
        bytes.extend(gets.flat_map(|stream| frame(HEADERS, END_HEADERS | END_STREAM, stream, GET)));
        raw.send(&bytes).await;
        // A connection on each side, the streams with their heads, and what the app has sent within the
        // windows of the streams.
        let unread = STREAMS * super::super::STREAM_WINDOW as usize;
        let usual =
            2 * super::super::CONNECTION_COST + STREAMS * super::super::STREAM_COST + unread;
        let queued = 64 * 1024;
        let mut unchanged = (0, 0);
        while unchanged.1 < 3000 {
            let held = used();
            let is_same = held == unchanged.0 && held > unread / 2;
            unchanged = (held, if is_same { unchanged.1 + 1 } else { 0 });
            tokio::task::yield_now().await;
        }
        let heads = STREAMS * 1024;
        assert!(
            unchanged.0 < usual + heads + 5 * queued,
            "{} bytes",
            unchanged.0
        );
        drop(raw);
        until(|| used() <= super::super::CONNECTION_COST).await;
    });
}
