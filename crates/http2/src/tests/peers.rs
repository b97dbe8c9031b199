//! Connections to the `h2` crate, in both roles, over a pipe in memory.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use fastrand::Rng;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};
use tokio::task::{LocalSet, spawn_local};

use super::*;
use crate::{Connection, Error, Opened, Receiver, Sender, Shared};

/// Runs a test. Nothing in it takes long.
fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let test = async { tokio::time::timeout(Duration::from_secs(30), test).await };
    LocalSet::new()
        .block_on(&runtime.expect("a runtime"), test)
        .expect("the test hangs")
}

/// Passes bytes between a pipe and the engine until one of them has ended. Returns why the
/// connection has ended.
async fn drive(
    shared: Shared,
    mut io: DuplexStream,
    mut accept: impl FnMut(Opened),
) -> Option<Error> {
    let mut rest = BytesMut::new();
    poll_fn(|cx| {
        shared.with(Connection::set_awake);
        let mut is_stuck = false;
        while !is_stuck {
            is_stuck = true;
            let mut bytes = [0; 4096];
            let mut buffer = ReadBuf::new(&mut bytes);
            let has_ended = shared.with(|connection| connection.ended().is_some());
            if !has_ended && let Poll::Ready(read) = Pin::new(&mut io).poll_read(cx, &mut buffer) {
                is_stuck = false;
                if read.is_err() || buffer.filled().is_empty() {
                    shared.with(|connection| connection.end(&Error::Closed));
                }
                rest.extend_from_slice(buffer.filled());
                if let Ok(length) = shared.with(|connection| connection.receive(&rest)) {
                    rest.advance(length);
                }
            }
            while let Some(opened) = shared.accept() {
                accept(opened);
            }
            shared.with(|connection| {
                while !connection.output().is_empty()
                    && let Poll::Ready(written) =
                        Pin::new(&mut io).poll_write(cx, connection.output())
                {
                    match written {
                        Ok(length) => connection.record_written(length),
                        Err(_) => {
                            connection.end(&Error::Closed);
                            let length = connection.output().len();
                            connection.record_written(length);
                        }
                    }
                    is_stuck = false;
                }
            });
        }
        shared.with(|connection| {
            connection.wait(cx);
            let is_over = connection.ended().is_some() || connection.is_drained();
            if is_over && connection.output().is_empty() {
                return Poll::Ready(connection.ended().cloned());
            }
            Poll::Pending
        })
    })
    .await
}

/// Limits for sections of 100 KiB.
fn config(role: Role, window: u32) -> Config {
    Config {
        max_fields: 128 * 1024,
        max_block: 256 * 1024,
        stream_window: window,
        connection_window: window,
        ..super::config(role)
    }
}

/// Both messages of a stream. The server has the plan from the fields of the request.
#[derive(Clone, Debug)]
struct Plan {
    index: u64,
    /// The lengths of both bodies, of the request first.
    lengths: [usize; 2],
    filler: usize,
}

impl Plan {
    fn random(rng: &mut Rng, index: u64) -> Self {
        let mut length = || {
            let max = [0, 10, 5_000, 150_000][rng.usize(..4)];
            rng.usize(..=max)
        };
        Self {
            index,
            lengths: [length(), length()],
            filler: if rng.u8(..8) == 0 {
                rng.usize(..60_000)
            } else {
                rng.usize(..30)
            },
        }
    }

    /// The plan of a request.
    fn read(fields: &HeaderMap) -> Self {
        let number = |name| {
            let text: &str = fields[name].to_str().expect("a number");
            text.parse().expect("a number")
        };
        let filler: usize = number("x-size");
        check_filler(fields, filler);
        Self {
            index: number("x-index") as u64,
            lengths: [number("x-request"), number("x-response")],
            filler,
        }
    }

    /// Whether the server sends an interim response.
    fn has_interim(&self) -> bool {
        self.index.is_multiple_of(5)
    }

    fn fields(&self) -> HeaderMap {
        let [request, response] = self.lengths.map(|length| length.to_string());
        let (index, size) = (self.index.to_string(), self.filler.to_string());
        let fields = fields_of(&[
            ("x-index", &index),
            ("x-request", &request),
            ("x-response", &response),
            ("x-size", &size),
            ("user-agent", "a value that repeats"),
        ]);
        let mut fields = HeaderMap::from(&fields);
        for at in 0..self.filler.div_ceil(1000) {
            let length = 1000.min(self.filler - 1000 * at);
            let value = HeaderValue::from_str(&"f".repeat(length)).expect("a value");
            fields.append("x-filler", value);
        }
        let name = format!("x-{}", self.index % 50)
            .parse::<http::HeaderName>()
            .expect("a name");
        fields.append(
            name,
            HeaderValue::from_static("a value that several requests have"),
        );
        fields
    }

    fn request(&self) -> http::Request<()> {
        let mut request = http::Request::post("http://test/path")
            .body(())
            .expect("a request");
        *request.headers_mut() = self.fields();
        request
    }

    fn trailers(&self) -> HeaderMap {
        (&fields_of(&[("x-index", &self.index.to_string()), ("grpc-status", "0")])).into()
    }

    fn check_trailers(&self, trailers: Option<&HeaderMap>) {
        assert_eq!(trailers, Some(&self.trailers()), "{self:?}");
    }

    /// The bytes of one body.
    fn body(&self, at: usize) -> Bytes {
        bytes_of(2 * self.index + at as u64, 0, self.lengths[at])
    }

    fn check_body(&self, at: usize, body: &[u8]) {
        assert_eq!(body.len(), self.lengths[at], "{self:?}");
        check_bytes(2 * self.index + at as u64, 0, body);
    }
}

fn check_filler(fields: &HeaderMap, size: usize) {
    let filler = fields.get_all("x-filler").iter().map(|value| value.len());
    assert_eq!(filler.sum::<usize>(), size);
}

/// Reads a body to its end, with the trailers.
async fn read(receiver: &Receiver) -> Result<(Vec<u8>, Option<HeaderMap>), Error> {
    let mut body = Vec::new();
    while let Some(data) = poll_fn(|cx| receiver.poll_data(cx)).await {
        let data = data?;
        receiver.release(data.len());
        body.extend_from_slice(&data);
    }
    let trailers = poll_fn(|cx| receiver.poll_trailers(cx)).await?;
    Ok((body, trailers.map(|trailers| (&trailers.message).into())))
}

/// Sends a body in pieces, and trailers.
async fn write(sender: &Sender, mut body: Bytes, trailers: HeaderMap) -> Result<(), Error> {
    while !body.is_empty() {
        poll_fn(|cx| sender.poll_ready(cx)).await?;
        sender.send(body.split_to(body.len().min(10_000)), false)?;
    }
    sender.send_trailers(Fields::from(&trailers))
}

/// Waits for both at once, in one task: a stream has one waker.
async fn both<A, B>(first: impl Future<Output = A>, second: impl Future<Output = B>) -> (A, B) {
    let (mut first, mut second) = (pin!(first), pin!(second));
    let (mut a, mut b) = (None, None);
    poll_fn(|cx| {
        poll_into(first.as_mut(), &mut a, cx);
        poll_into(second.as_mut(), &mut b, cx);
        match (a.take(), b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (first, second) => {
                (a, b) = (first, second);
                Poll::Pending
            }
        }
    })
    .await
}

fn poll_into<T>(
    future: Pin<&mut impl Future<Output = T>>,
    result: &mut Option<T>,
    cx: &mut Context<'_>,
) {
    if result.is_none()
        && let Poll::Ready(value) = future.poll(cx)
    {
        *result = Some(value);
    }
}

async fn peer_read(body: &mut RecvStream) -> Result<(Vec<u8>, Option<HeaderMap>), h2::Error> {
    let mut bytes = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, body.trailers().await?))
}

fn peer_write(stream: &mut SendStream<Bytes>, mut body: Bytes, trailers: HeaderMap) {
    while !body.is_empty() {
        let piece = body.split_to(body.len().min(10_000));
        stream.send_data(piece, false).expect("an open stream");
    }
    stream.send_trailers(trailers).expect("an open stream");
}

/// Serves a stream as its request plans.
async fn serve(opened: Opened) -> Result<(), Error> {
    let Opened {
        request,
        sender,
        receiver,
    } = opened;
    assert!(!request.is_cut);
    let plan = Plan::read(&(&request.message.fields).into());
    let mut head = response(200, &[]);
    head.fields = Fields::from(&plan.fields());
    if plan.has_interim() {
        sender.respond(&response(103, &[("link", "a")]), false)?;
    }
    sender.respond(&head, false)?;
    let ((body, trailers), sent) = both(
        async { read(&receiver).await.expect("a request") },
        write(&sender, plan.body(1), plan.trailers()),
    )
    .await;
    plan.check_body(0, &body);
    plan.check_trailers(trailers.as_ref());
    sent
}

/// A server, and a client of the `h2` crate.
async fn server(
    config: Config,
    builder: &h2::client::Builder,
) -> (Shared, h2::client::SendRequest<Bytes>) {
    let (ours, theirs) = duplex(20_000);
    let shared = Shared::new(config);
    spawn_local(drive(shared.clone(), ours, |opened| {
        spawn_local(async { serve(opened).await.expect("a response") });
    }));
    let (client, connection) = builder.handshake(theirs).await.expect("a handshake");
    spawn_local(async { connection.await.expect("no violations") });
    (shared, client)
}

/// Requests of the `h2` crate, all at once.
async fn request_all(client: h2::client::SendRequest<Bytes>, plans: Vec<Plan>) {
    let tasks = plans.into_iter().map(|plan| {
        let client = client.clone();
        spawn_local(async move {
            let mut client = client.ready().await.expect("a stream");
            let (response, mut stream) = client
                .send_request(plan.request(), false)
                .expect("a stream");
            peer_write(&mut stream, plan.body(0), plan.trailers());
            let (head, mut body) = response.await.expect("a response").into_parts();
            assert_eq!(Plan::read(&head.headers).index, plan.index);
            let (body, trailers) = peer_read(&mut body).await.expect("a body");
            plan.check_body(1, &body);
            plan.check_trailers(trailers.as_ref());
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a complete exchange");
    }
}

fn plans(seed: u64, count: u64) -> Vec<Plan> {
    let mut rng = Rng::with_seed(seed);
    (0..count)
        .map(|index| Plan::random(&mut rng, index))
        .collect()
}

/// Waits until all streams of a connection have ended.
async fn wait_for_end(shared: &Shared) {
    while shared.with(|connection| connection.has_streams()) {
        tokio::task::yield_now().await;
    }
    assert_eq!(shared.with(|connection| connection.open_streams()), 0);
}

#[test]
fn a_server_serves_200_streams_of_h2() {
    for (window, table) in [(65_535, 4096), (256 * 1024, 0), (1 << 20, 65_536)] {
        run(async {
            let mut builder = h2::client::Builder::new();
            builder
                .initial_window_size(window)
                .initial_connection_window_size(window)
                .header_table_size(table);
            let (shared, client) = server(config(Role::Server, window), &builder).await;
            request_all(client.clone(), plans(table.into(), 200)).await;
            wait_for_end(&shared).await;
            // The windows are balanced, and the tables are in step.
            request_all(client, plans(77, 20)).await;
            wait_for_end(&shared).await;
        });
    }
}

#[test]
fn a_server_respects_small_windows_of_h2() {
    run(async {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(100).header_table_size(100);
        let (shared, client) = server(config(Role::Server, 65_535), &builder).await;
        let mut plans = plans(3, 60);
        for plan in &mut plans {
            plan.lengths = plan.lengths.map(|length| length % 3000);
        }
        request_all(client, plans).await;
        wait_for_end(&shared).await;
    });
}

/// A client, and a server of the `h2` crate that serves as the requests plan.
async fn client(config: Config, builder: &h2::server::Builder) -> Shared {
    let (ours, theirs) = duplex(20_000);
    let shared = Shared::new(config);
    spawn_local(drive(shared.clone(), ours, |_| {
        panic!("servers open no streams")
    }));
    let handshake = builder.handshake::<_, Bytes>(theirs);
    spawn_local(async {
        let mut connection = handshake.await.expect("a handshake");
        while let Some(accepted) = connection.accept().await {
            let (request, mut respond) = accepted.expect("no violations");
            spawn_local(async move {
                let (head, mut body) = request.into_parts();
                let plan = Plan::read(&head.headers);
                assert_eq!((head.method.as_str(), head.uri.path()), ("POST", "/path"));
                if plan.has_interim() {
                    let interim = http::Response::builder()
                        .status(103)
                        .body(())
                        .expect("a response");
                    respond.send_informational(interim).expect("an open stream");
                }
                let mut response = http::Response::new(());
                *response.headers_mut() = plan.fields();
                let mut stream = respond
                    .send_response(response, false)
                    .expect("an open stream");
                peer_write(&mut stream, plan.body(1), plan.trailers());
                let (body, trailers) = peer_read(&mut body).await.expect("a body");
                plan.check_body(0, &body);
                plan.check_trailers(trailers.as_ref());
            });
        }
    });
    while !shared.with(|connection| connection.is_settled()) {
        tokio::task::yield_now().await;
    }
    shared
}

/// Waits for the head of a response after interim ones, whose number it returns too.
async fn head(receiver: &Receiver) -> Result<(Response, usize), Error> {
    for count in 0.. {
        let head = poll_fn(|cx| receiver.poll_response(cx)).await?;
        assert!(!head.is_cut);
        if !head.message.status.is_informational() {
            return Ok((head.message, count));
        }
    }
    unreachable!("the loop has no end")
}

/// Sends a request, and reads the response.
async fn exchange(shared: &Shared, plan: &Plan) -> Result<(), Error> {
    let (head_of_request, ()) = plan.request().into_parts();
    let (sender, receiver) = shared.open(&Request::from(&head_of_request), false)?;
    let response = async {
        let (head, interim) = head(&receiver).await?;
        assert_eq!(interim, usize::from(plan.has_interim()));
        assert_eq!(Plan::read(&(&head.fields).into()).index, plan.index);
        read(&receiver).await
    };
    let (sent, received) = both(write(&sender, plan.body(0), plan.trailers()), response).await;
    sent?;
    let (body, trailers) = received?;
    plan.check_body(1, &body);
    plan.check_trailers(trailers.as_ref());
    Ok(())
}

async fn exchange_all(shared: &Shared, plans: Vec<Plan>) {
    let tasks = plans.into_iter().map(|plan| {
        let shared = shared.clone();
        spawn_local(async move { exchange(&shared, &plan).await.expect("a complete exchange") })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("a complete exchange");
    }
}

#[test]
fn a_client_opens_200_streams_to_h2() {
    for (window, table) in [(65_535, 4096), (256 * 1024, 0), (1 << 20, 65_536)] {
        run(async {
            let mut builder = h2::server::Builder::new();
            builder
                .initial_window_size(window)
                .initial_connection_window_size(window)
                .header_table_size(table);
            builder.max_concurrent_streams(200);
            let shared = client(config(Role::Client, window), &builder).await;
            assert_eq!(
                shared.with(|connection| connection.max_streams()),
                Some(200)
            );
            exchange_all(&shared, plans(table.into(), 200)).await;
            wait_for_end(&shared).await;
            exchange_all(&shared, plans(77, 20)).await;
            wait_for_end(&shared).await;
        });
    }
}

#[test]
fn a_client_respects_small_windows_of_h2() {
    run(async {
        let mut builder = h2::server::Builder::new();
        builder.initial_window_size(100).header_table_size(100);
        let shared = client(config(Role::Client, 65_535), &builder).await;
        let mut plans = plans(4, 60);
        for plan in &mut plans {
            plan.lengths = plan.lengths.map(|length| length % 3000);
        }
        exchange_all(&shared, plans).await;
        wait_for_end(&shared).await;
    });
}

#[test]
fn the_resets_of_a_server_arrive_at_h2() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Server, 65_535));
        let driver = drive(shared.clone(), ours, |opened| {
            let code = match str::from_utf8(opened.request.message.path().expect("a path"))
                .expect("a text")
            {
                // Before the response, after a part of it, and after all of it.
                "/before" => 42,
                "/within" => 43,
                "/early" => {
                    let Opened {
                        sender, receiver, ..
                    } = opened;
                    sender
                        .respond(&response(200, &[]), false)
                        .expect("a response");
                    sender.send(vec![b'a'; 50_000].into(), true).expect("bytes");
                    // The request has not ended: it is reset without an error.
                    drop((sender, receiver));
                    return;
                }
                _ => return,
            };
            if code == 43 {
                opened
                    .sender
                    .respond(&response(200, &[]), false)
                    .expect("a response");
            }
            opened.sender.reset(ErrorCode(code));
        });
        spawn_local(driver);
        let (client, connection) = h2::client::handshake(theirs).await.expect("a handshake");
        spawn_local(async { connection.await.expect("no violations") });
        let mut results = Vec::new();
        for path in ["before", "within", "early", "dropped"] {
            let mut client = client.clone().ready().await.expect("a stream");
            let request = http::Request::post(format!("http://test/{path}"))
                .body(())
                .expect("a request");
            let (response, _stream) = client.send_request(request, false).expect("a stream");
            let body = match response.await {
                Ok(response) => peer_read(&mut response.into_body())
                    .await
                    .map(|(body, _)| body.len()),
                Err(error) => Err(error),
            };
            results.push(body.map_err(|error| error.reason().map(u32::from)));
        }
        assert_eq!(
            results,
            [Err(Some(42)), Err(Some(43)), Ok(50_000), Err(Some(8))]
        );
        wait_for_end(&shared).await;
    });
}

#[test]
fn the_resets_of_h2_arrive_at_a_server() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Server, 65_535));
        let count = Rc::new(Cell::new(0));
        let seen = count.clone();
        spawn_local(drive(shared.clone(), ours, move |opened| {
            let seen = seen.clone();
            spawn_local(async move {
                opened
                    .sender
                    .respond(&response(200, &[]), false)
                    .expect("a response");
                opened
                    .sender
                    .send(vec![0; 1_000_000].into(), true)
                    .expect("bytes");
                let error = poll_fn(|cx| opened.sender.poll_reset(cx)).await;
                assert_eq!(error, Error::Reset(ErrorCode::ENHANCE_YOUR_CALM));
                assert_eq!(opened.sender.pending(), 0);
                seen.set(seen.get() + 1);
            });
        }));
        let (client, connection) = h2::client::handshake(theirs).await.expect("a handshake");
        spawn_local(async { connection.await.expect("no violations") });
        for _ in 0..50 {
            let mut client = client.clone().ready().await.expect("a stream");
            let request = http::Request::post("http://test/")
                .body(())
                .expect("a request");
            let (response, mut stream) = client.send_request(request, false).expect("a stream");
            let response = response.await.expect("a response");
            stream.send_reset(h2::Reason::ENHANCE_YOUR_CALM);
            drop(response);
        }
        wait_for_end(&shared).await;
        assert_eq!(count.get(), 50);
    });
}

#[test]
fn resets_between_a_client_and_h2_have_their_codes() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Client, 65_535));
        spawn_local(drive(shared.clone(), ours, |_| {}));
        let codes = Rc::new(Cell::new(0));
        let seen = codes.clone();
        spawn_local(async move {
            let mut connection = h2::server::handshake(theirs).await.expect("a handshake");
            while let Some(accepted) = connection.accept().await {
                let (request, mut respond) = accepted.expect("no violations");
                let seen = seen.clone();
                spawn_local(async move {
                    match request.uri().path() {
                        "/reset" => respond.send_reset(h2::Reason::CONNECT_ERROR),
                        "/early" => {
                            let mut stream = respond
                                .send_response(http::Response::new(()), false)
                                .expect("a stream");
                            stream
                                .send_data(vec![0; 50_000].into(), true)
                                .expect("an open stream");
                            // The rest of the request is not read.
                            drop(request);
                        }
                        _ => {
                            let reason =
                                poll_fn(|cx| respond.poll_reset(cx)).await.expect("a reset");
                            seen.set(seen.get() + u32::from(reason));
                        }
                    }
                });
            }
        });
        let open = |path: &str| {
            let head = request_to(&format!("http://test/{path}"), "POST", &[]);
            shared.open(&head, false).expect("a stream")
        };
        let (sender, receiver) = open("reset");
        let error = poll_fn(|cx| sender.poll_reset(cx)).await;
        assert_eq!(error, Error::Reset(ErrorCode::CONNECT_ERROR));
        let response = poll_fn(|cx| receiver.poll_response(cx)).await;
        assert_eq!(response.map(|_| ()), Err(error));
        let (sender, receiver) = open("early");
        head(&receiver).await.expect("a response");
        assert_eq!(read(&receiver).await.expect("a body").0.len(), 50_000);
        drop((sender, receiver));
        let (sender, _receiver) = open("cancelled");
        sender.reset(ErrorCode(100));
        drop(open("dropped"));
        while codes.get() < 108 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_drained_server_completes_with_h2() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Server, 65_535));
        let count = Rc::new(Cell::new(0));
        let accepted = count.clone();
        let driver = spawn_local(drive(shared.clone(), ours, move |opened| {
            accepted.set(accepted.get() + 1);
            spawn_local(async { serve(opened).await.expect("a response") });
        }));
        let (client, connection) = h2::client::handshake(theirs).await.expect("a handshake");
        let connection = spawn_local(connection);
        let first = client.clone();
        let requests = spawn_local(request_all(first, plans(5, 30)));
        while count.get() < 30 {
            tokio::task::yield_now().await;
        }
        shared.with(Connection::drain);
        requests.await.expect("complete exchanges");
        connection.await.expect("a task").expect("no error");
        assert!(client.ready().await.is_err());
        // The client has closed the connection, or the driver has seen that it is drained.
        let ended = driver.await.expect("a task");
        assert!(matches!(ended, None | Some(Error::Closed)), "{ended:?}");
    });
}

#[test]
fn a_client_completes_its_streams_when_h2_leaves() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Client, 65_535));
        let driver = spawn_local(drive(shared.clone(), ours, |_| {}));
        let server = spawn_local(async {
            let mut connection = h2::server::handshake(theirs).await.expect("a handshake");
            let mut count = 0;
            while let Some(accepted) = connection.accept().await {
                let (mut request, mut respond) = accepted.expect("no violations");
                count += 1;
                if count == 5 {
                    connection.graceful_shutdown();
                }
                spawn_local(async move {
                    let (body, _) = peer_read(request.body_mut()).await.expect("a body");
                    let mut stream = respond
                        .send_response(http::Response::new(()), false)
                        .expect("a stream");
                    stream.send_data(body.into(), true).expect("an open stream");
                });
            }
        });
        let tasks = (0..10).map(|_| {
            let (sender, receiver) = shared.open(&request("POST", &[]), false).expect("a stream");
            spawn_local(async move {
                let send = async {
                    sender.send(vec![7; 100_000].into(), true)?;
                    poll_fn(|cx| sender.poll_ready(cx)).await?;
                    Ok::<_, Error>(())
                };
                let (sent, body) = both(send, async {
                    head(&receiver).await?;
                    read(&receiver).await
                })
                .await;
                sent.expect("an open stream");
                assert_eq!(body.expect("a body").0, vec![7; 100_000]);
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.expect("a complete exchange");
        }
        server.await.expect("an end");
        assert!(!shared.with(|connection| connection.accepts_streams()));
        assert_eq!(driver.await.expect("a task"), Some(Error::Closed));
        assert!(!shared.with(|connection| connection.has_streams()));
    });
}

#[test]
fn an_abrupt_end_of_h2_fails_the_streams() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Client, 65_535));
        spawn_local(drive(shared.clone(), ours, |_| {}));
        spawn_local(async {
            let mut connection = h2::server::handshake(theirs).await.expect("a handshake");
            let accepted = connection
                .accept()
                .await
                .expect("a stream")
                .expect("no violations");
            connection.abrupt_shutdown(h2::Reason::INTERNAL_ERROR);
            while connection
                .accept()
                .await
                .is_some_and(|accepted| accepted.is_ok())
            {}
            drop(accepted);
        });
        let streams: Vec<_> = (0..3)
            .map(|_| shared.open(&request("POST", &[]), false).expect("a stream"))
            .collect();
        for (_, receiver) in &streams {
            let error = head(receiver).await.map(|_| ()).expect_err("an error");
            let is_expected = matches!(
                error,
                Error::GoAway(ErrorCode::INTERNAL_ERROR) | Error::Closed | Error::Reset(_)
            );
            assert!(is_expected, "{error:?}");
        }
    });
}

#[test]
fn h2_accepts_the_go_away_of_a_violation() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Server, 65_535));
        spawn_local(drive(shared.clone(), ours, |_| {}));
        let (client, connection) = h2::client::handshake(theirs).await.expect("a handshake");
        let connection = spawn_local(connection);
        let mut client = client.ready().await.expect("a stream");
        let request = http::Request::post("http://test/")
            .body(())
            .expect("a request");
        let (_response, _stream) = client.send_request(request, false).expect("a stream");
        tokio::task::yield_now().await;
        shared.with(|connection| connection.close(ErrorCode::ENHANCE_YOUR_CALM, &Error::Closed));
        let error = connection.await.expect("a task").expect_err("an error");
        assert_eq!(error.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM));
    });
}

#[test]
fn pings_of_h2_are_answered() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Server, 65_535));
        spawn_local(drive(shared, ours, |_| {}));
        let (_client, mut connection) = h2::client::handshake(theirs).await.expect("a handshake");
        let mut pings = connection.ping_pong().expect("pings");
        spawn_local(async { connection.await.expect("no violations") });
        for _ in 0..10 {
            pings.ping(h2::Ping::opaque()).await.expect("an answer");
        }
    });
}

/// Sends what it has received, to the end.
async fn echo(sender: &Sender, receiver: &Receiver) -> Result<(), Error> {
    while let Some(data) = poll_fn(|cx| receiver.poll_data(cx)).await {
        let data = data?;
        poll_fn(|cx| sender.poll_ready(cx)).await?;
        receiver.release(data.len());
        sender.send(data, false)?;
    }
    poll_fn(|cx| sender.poll_ready(cx)).await?;
    sender.send(Bytes::new(), true)
}

#[test]
fn h2_opens_tunnels_through_a_server() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let config = Config {
            enable_connect_protocol: true,
            ..config(Role::Server, 65_535)
        };
        spawn_local(drive(Shared::new(config), ours, |opened| {
            let head = &opened.request.message;
            let target = (head.authority(), head.path(), head.protocol());
            let chat = (b"test", b"/chat?a", b"websocket");
            match head.path() {
                Some(_) => assert_eq!(
                    target,
                    (Some(&chat.0[..]), Some(&chat.1[..]), Some(&chat.2[..]))
                ),
                None => assert_eq!(target, (Some(&b"test:443"[..]), None, None)),
            }
            spawn_local(async move {
                opened
                    .sender
                    .respond(&response(200, &[]), false)
                    .expect("a response");
                echo(&opened.sender, &opened.receiver)
                    .await
                    .expect("a tunnel");
            });
        }));
        let (client, connection) = h2::client::handshake(theirs).await.expect("a handshake");
        spawn_local(async { connection.await.expect("no violations") });
        let mut client = client.ready().await.expect("a stream");
        while !client.is_extended_connect_protocol_enabled() {
            tokio::task::yield_now().await;
        }
        for uri in ["http://test/chat?a", "test:443"] {
            let mut request = http::Request::connect(uri).body(()).expect("a request");
            if uri.contains("chat") {
                request
                    .extensions_mut()
                    .insert(h2::ext::Protocol::from_static("websocket"));
            }
            client = client.ready().await.expect("a stream");
            let (response, mut stream) = client.send_request(request, false).expect("a stream");
            let response = response.await.expect("a response");
            assert_eq!(response.status(), StatusCode::OK);
            let mut body = response.into_body();
            for _ in 0..10 {
                stream
                    .send_data(Bytes::from_static(b"hello"), false)
                    .expect("a tunnel");
                assert_eq!(body.data().await.expect("bytes").expect("bytes"), "hello");
            }
            stream
                .send_data(vec![1; 200_000].into(), true)
                .expect("a tunnel");
            body.flow_control().release_capacity(50).expect("a window");
            assert_eq!(
                peer_read(&mut body).await.expect("bytes").0,
                vec![1; 200_000]
            );
        }
    });
}

#[test]
fn a_client_opens_tunnels_through_h2() {
    run(async {
        let (ours, theirs) = duplex(20_000);
        let shared = Shared::new(config(Role::Client, 65_535));
        spawn_local(drive(shared.clone(), ours, |_| {}));
        let mut builder = h2::server::Builder::new();
        builder.enable_connect_protocol();
        let handshake = builder.handshake::<_, Bytes>(theirs);
        spawn_local(async {
            let mut connection = handshake.await.expect("a handshake");
            while let Some(accepted) = connection.accept().await {
                let (request, mut respond) = accepted.expect("no violations");
                let protocol = request.extensions().get().map(h2::ext::Protocol::as_str);
                assert_eq!(
                    (request.uri().path(), protocol),
                    ("/chat", Some("websocket"))
                );
                spawn_local(async move {
                    let mut stream = respond
                        .send_response(http::Response::new(()), false)
                        .expect("a stream");
                    let mut body = request.into_body();
                    while let Some(data) = body.data().await {
                        let data = data.expect("bytes");
                        body.flow_control()
                            .release_capacity(data.len())
                            .expect("a window");
                        stream.send_data(data, false).expect("a tunnel");
                    }
                    stream.send_data(Bytes::new(), true).expect("a tunnel");
                });
            }
        });
        while !shared.with(|connection| connection.is_settled()) {
            tokio::task::yield_now().await;
        }
        assert!(shared.with(|connection| connection.accepts_connect_protocol()));
        let mut head_of_request = request_to("http://test/chat", "GET", &[]);
        head_of_request.set_protocol("websocket");
        let (sender, receiver) = shared.open(&head_of_request, false).expect("a stream");
        assert_eq!(head(&receiver).await.expect("a response").0.status, 200);
        for _ in 0..10 {
            sender
                .send(Bytes::from_static(b"hello"), false)
                .expect("a tunnel");
            let data = poll_fn(|cx| receiver.poll_data(cx))
                .await
                .expect("bytes")
                .expect("bytes");
            receiver.release(data.len());
            assert_eq!(data, "hello");
        }
        sender
            .send(vec![1; 200_000].into(), true)
            .expect("a tunnel");
        let (body, _) = read(&receiver).await.expect("bytes");
        assert_eq!(body, vec![1; 200_000]);
        wait_for_end_of(&shared, sender, receiver).await;
    });
}

/// Drops the handles, and waits for the end of the streams.
async fn wait_for_end_of(shared: &Shared, sender: Sender, receiver: Receiver) {
    drop((sender, receiver));
    wait_for_end(shared).await;
}
