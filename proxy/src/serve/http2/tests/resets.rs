//! Tests of streams that end with a reset: what the application has not read of them is bounded, and
//! the connections stay open.

use std::cell::Cell;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hostile::{
    END_HEADERS, GET, HEADERS, PING, PREFACE, RST_STREAM, Raw, SETTINGS, frame, next_frame,
};
use super::*;
use crate::serve::http2::MAX_STREAMS;

const DATA: u8 = 0;

/// An application that does not respond to its streams. Returns its address, the number of streams
/// so far, and the largest number of streams that were not reset.
async fn counting_app() -> (SocketAddr, Rc<Cell<usize>>, Rc<Cell<usize>>) {
    let (seen, open, most) = (
        Rc::new(Cell::new(0)),
        Rc::new(Cell::new(0)),
        Rc::new(Cell::new(0)),
    );
    let (count, largest) = (seen.clone(), most.clone());
    let address = app(move |request, mut respond: SendResponse<Bytes>| {
        count.set(count.get() + 1);
        open.set(open.get() + 1);
        largest.set(open.get().max(largest.get()));
        let open = open.clone();
        async move {
            let _body = request;
            // Fails if the connection has ended.
            let _ = poll_fn(|cx| respond.poll_reset(cx)).await;
            open.set(open.get() - 1);
        }
    });
    (address.await, seen, most)
}

#[test]
fn reset_flood_of_accepted_streams_reaches_the_app_at_a_bounded_rate() {
    on_worker(async {
        let (address, seen, most) = counting_app().await;
        let mesh = Mesh::new();
        let mut client = Raw::connect(&mesh, address).await;
        let begun = Instant::now();
        let mut streams = (1..).step_by(2);
        for _ in 0..20 {
            // The proxy accepts the streams before it acknowledges the PING frame.
            let batch: Vec<u32> = streams.by_ref().take(240).collect();
            let opened = batch
                .iter()
                .flat_map(|stream| frame(HEADERS, END_HEADERS, *stream, GET));
            let ping = frame(PING, 0, 0, &[0; 8]);
            client.send(&opened.chain(ping).collect::<Vec<u8>>()).await;
            assert!(client.wait_for(PING).await.is_some(), "no GOAWAY");
            let resets = batch
                .iter()
                .flat_map(|stream| frame(RST_STREAM, 0, *stream, &8_u32.to_be_bytes()));
            client.send(&resets.collect::<Vec<u8>>()).await;
        }
        client.send(&frame(PING, 0, 0, &[0; 8])).await;
        assert!(client.wait_for(PING).await.is_some(), "no GOAWAY");
        // A batch that waits begins at once, and another one may be in flight.
        let allowed = 100 + 2 * 240 + 100 * (1 + begun.elapsed().as_secs());
        assert!(
            seen.get() as u64 <= allowed,
            "{} of 4,800, {allowed} allowed",
            seen.get()
        );
        assert!(most.get() <= MAX_STREAMS as usize, "{} at once", most.get());
    });
}

#[test]
fn calls_cancelled_at_their_deadlines_close_no_connection() {
    on_worker(async {
        let seen = Rc::new(Cell::new(0));
        let count = seen.clone();
        let address = app(move |request: Request<RecvStream>, respond| {
            let count = count.clone();
            async move {
                if request.uri().path() != "/stalled" {
                    return echo(request, respond).await;
                }
                count.set(count.get() + 1);
                let _held = (request, respond);
                std::future::pending::<()>().await;
            }
        });
        let mesh = Mesh::new();
        let mut client = mesh.client_of(address.await).await;
        let (long_call, mut upload) = client.send_request(get("/long"), false).unwrap();
        for batch in 1..=3 {
            let mut calls = Vec::new();
            for _ in 0..200 {
                poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
                calls.push(client.send_request(get("/stalled"), true).unwrap());
            }
            until(|| seen.get() == 200 * batch).await;
            for (_, stream) in &mut calls {
                stream.send_reset(Reason::CANCEL);
            }
        }
        assert_ok(&mut client).await;
        upload.send_data(Bytes::from_static(b"late"), true).unwrap();
        let (response, _) = read(long_call.await.unwrap()).await.unwrap();
        assert_eq!(response.body(), "late");
    });
}

/// An app that never responds. It acknowledges no SETTINGS frame until it is told so.
#[derive(Default)]
struct UnreadApp {
    requests: Cell<usize>,
    /// The number of bytes of all requests.
    bytes: Cell<usize>,
    pings: Cell<usize>,
    settings: Cell<usize>,
    acknowledged: Cell<usize>,
    acknowledges: Cell<bool>,
}

impl UnreadApp {
    async fn start() -> (SocketAddr, Rc<Self>) {
        let (listener, address) = listen().await;
        let app = Rc::<Self>::default();
        let started = app.clone();
        tokio::task::spawn_local(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (mut read, mut write) = stream.into_split();
            let counts = app.clone();
            tokio::task::spawn_local(async move {
                read.read_exact(&mut [0; PREFACE.len() - 9]).await.unwrap();
                while let Some((kind, payload)) = next_frame(&mut read).await {
                    let (count, amount) = match kind {
                        HEADERS => (&counts.requests, 1),
                        DATA => (&counts.bytes, payload.len()),
                        PING => (&counts.pings, 1),
                        SETTINGS if !payload.is_empty() => (&counts.settings, 1),
                        _ => continue,
                    };
                    count.set(count.get() + amount);
                }
            });
            write.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            loop {
                let count = app.acknowledged.get();
                until(|| app.acknowledges.get() && app.settings.get() > count).await;
                app.acknowledged.set(count + 1);
                write.write_all(&frame(SETTINGS, 1, 0, &[])).await.unwrap();
            }
        });
        (address, started)
    }
}

#[test]
fn requests_wait_until_the_app_has_read_the_resets_of_earlier_ones() {
    on_worker(async {
        for is_cancelled in [true, false] {
            let (address, app) = UnreadApp::start().await;
            let mesh = Mesh::new();
            let mut client = mesh.client_of(address).await;
            let mut other = mesh.client_of(named_app("other").await).await;
            let (_long_call, mut upload) = client.send_request(get("/"), false).unwrap();
            let mut calls = Vec::new();
            for number in 1..MAX_STREAMS {
                let mut call = grpc("/");
                if number <= 100 && !is_cancelled {
                    let deadline = "1S".parse().unwrap();
                    call.headers_mut().insert("grpc-timeout", deadline);
                }
                poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
                calls.push(client.send_request(call, true).unwrap());
            }
            until(|| app.requests.get() == MAX_STREAMS as usize).await;
            for (response, mut stream) in calls.drain(..100) {
                if is_cancelled {
                    stream.send_reset(Reason::CANCEL);
                } else {
                    let response = response.await.unwrap();
                    assert_eq!(response.headers()["grpc-status"], "4");
                }
            }
            for _ in 0..100 {
                poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
                calls.push(client.send_request(get("/"), true).unwrap());
            }
            // The proxy has accepted them when it has served others, before it gets these bytes.
            assert_ok(&mut other).await;
            assert_ok(&mut other).await;
            upload
                .send_data(Bytes::from_static(b"late"), false)
                .unwrap();
            until(|| app.bytes.get() == 4).await;
            assert_eq!(app.requests.get(), MAX_STREAMS as usize);
            app.acknowledges.set(true);
            until(|| app.requests.get() == MAX_STREAMS as usize + 100).await;
            // gRPC servers close connections with several PING frames.
            assert_eq!(app.pings.get(), 0);
        }
    });
}
