//! Tests of bodies in small frames, or with empty ones: they arrive, and neither the other streams of
//! the connection nor other connections notice.

use super::hostile::{END_HEADERS, END_STREAM, GET, HEADERS, frame};
use super::raw::{DATA, End, OK, settings};
use super::*;

const OPEN: u32 = 256 * 1024;
const PADDED: u8 = 8;

/// Frames of 1 to `max` bytes.
fn small_frames(stream: u32, count: usize, max: usize) -> (Vec<u8>, Vec<u8>) {
    let body: Vec<u8> = (0..)
        .map(|at: usize| (at % 251) as u8)
        .take(count * max)
        .collect();
    let (mut frames, mut at) = (Vec::new(), 0);
    for number in 0..count {
        let size = number % max + 1;
        frames.extend(frame(DATA, 0, stream, &body[at..at + size]));
        at += size;
    }
    (frames, body[..at].to_vec())
}

/// A response without a body to a request without one.
pub(super) fn respond_to_get(stream: u32, flags: u8) -> Vec<u8> {
    if flags & END_STREAM == 0 {
        return Vec::new();
    }
    frame(HEADERS, END_HEADERS | END_STREAM, stream, OK)
}

#[test]
fn requests_of_small_frames_reach_an_app_that_reads_slowly() {
    on_worker(async {
        for direction in [Direction::Outbound, Direction::Inbound] {
            for (window, count, max) in [
                (0, 20_000, 10),
                (10, 20_000, 10),
                (100, 20_000, 10),
                (65_535, 20_000, 10),
                (0, 20_000, 1),
            ] {
                let mesh = Mesh::new();
                let (address, app) = End::app(settings(&[(4, window)]), respond_to_get).await;
                let client = End::client(&mesh, &Backend::alone(address), direction, OPEN).await;
                let other = End::client(&mesh, &Backend::alone(address), direction, OPEN).await;
                let (frames, body) = small_frames(1, count, max);
                client.send(frame(HEADERS, END_HEADERS, 1, GET));
                let app = app.await;
                until(|| client.seen.windows.borrow().get(&0) >= Some(&190_000)).await;
                client.send(frames);
                client.send(frame(DATA, END_STREAM, 1, b""));
                client.sync().await;
                if direction == Direction::Outbound {
                    // Both share the connection to the app.
                    other.get(1).await;
                }
                client.get(3).await;
                assert!(app.seen.data_of(1).len() <= window as usize);
                app.grant(&[0, 1], 1 << 20);
                until(|| app.seen.has_ended(1)).await;
                assert!(app.seen.data_of(1) == body);
                client.sync().await;
            }
        }
    });
}

#[test]
fn responses_of_small_frames_reach_a_client_that_reads_slowly() {
    on_worker(async {
        for direction in [Direction::Outbound, Direction::Inbound] {
            for (window, count, max) in [
                (0, 20_000, 10),
                (10, 20_000, 10),
                (100, 20_000, 10),
                (OPEN, 20_000, 10),
                (0, 20_000, 1),
            ] {
                let mesh = Mesh::new();
                let (frames, body) = small_frames(1, count, max);
                let end = frame(DATA, END_STREAM, 1, b"");
                let response = [frame(HEADERS, END_HEADERS, 1, OK), frames, end].concat();
                let respond = move |stream, flags| match stream {
                    1 => Vec::new(),
                    _ => respond_to_get(stream, flags),
                };
                let (address, app) = End::app(settings(&[]), respond).await;
                let client = End::client(&mesh, &Backend::alone(address), direction, window).await;
                client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, GET));
                let app = app.await;
                until(|| app.seen.windows.borrow().get(&0) >= Some(&190_000)).await;
                app.send(response);
                app.sync().await;
                client.get(3).await;
                assert!(client.seen.data_of(1).len() <= window as usize);
                client.grant(&[0, 1], 1 << 20);
                until(|| client.seen.has_ended(1)).await;
                assert!(client.seen.data_of(1) == body);
                client.sync().await;
            }
        }
    });
}

#[test]
fn small_frames_that_arrive_before_the_upstream_connection_are_forwarded() {
    on_worker(async {
        for (streams, count) in [(1, 200), (10, 20), (20, 10), (40, 20)] {
            let mesh = Mesh::new();
            let (address, app) = End::app(settings(&[(3, 1_000)]), |_, _| Vec::new()).await;
            let client =
                End::client(&mesh, &Backend::alone(address), Direction::Outbound, OPEN).await;
            let ids = || (0..streams).map(|index| 2 * index + 1);
            let mut bodies = Vec::new();
            let mut flight = Vec::new();
            for stream in ids() {
                let (frames, body) = small_frames(stream, count, 10);
                flight.extend(frame(HEADERS, END_HEADERS, stream, GET));
                flight.extend(frames);
                flight.extend(frame(DATA, END_STREAM, stream, b""));
                bodies.push(body);
            }
            client.send(flight);
            client.sync().await;
            let app = app.await;
            until(|| ids().all(|stream| app.seen.has_ended(stream))).await;
            let received = ids().map(|stream| app.seen.data_of(stream));
            let mut received: Vec<_> = received.collect();
            received.sort();
            bodies.sort();
            assert!(received == bodies);
        }
    });
}

/// Empty DATA frames, in three forms.
fn empty(stream: u32, form: usize) -> Vec<u8> {
    match form {
        0 => frame(DATA, 0, stream, b""),
        1 => frame(DATA, PADDED, stream, &[0]),
        _ => frame(DATA, PADDED, stream, &[&[255][..], &[0; 255]].concat()),
    }
}

#[test]
fn empty_data_frames_end_no_connection() {
    on_worker(async {
        for direction in [Direction::Outbound, Direction::Inbound] {
            for count in [1, 3] {
                let mesh = Mesh::new();
                let frames = move |stream, head| {
                    let empty = empty(stream, stream as usize / 2 % 3).repeat(count);
                    let end = frame(DATA, END_STREAM, stream, b"end");
                    [frame(HEADERS, END_HEADERS, stream, head), empty, end].concat()
                };
                let respond = move |stream, _| frames(stream, OK);
                let (address, app) = End::app(settings(&[]), respond).await;
                let destination = Backend::alone(address);
                let client = End::client(&mesh, &destination, direction, OPEN).await;
                let app = tokio::task::spawn_local(app);
                let streams: Vec<u32> = (0..1_000).map(|number| 2 * number + 1).collect();
                for batch in streams.chunks(20) {
                    let requests = batch.iter().flat_map(|stream| frames(*stream, GET));
                    client.send(requests.collect::<Vec<u8>>());
                    let is_complete = || batch.iter().all(|stream| client.seen.has_ended(*stream));
                    until(|| is_complete() || client.seen.is_closed.get()).await;
                    assert!(is_complete(), "{:?}", client.seen.goaway.get());
                }
                assert!(
                    streams
                        .iter()
                        .all(|stream| client.seen.data_of(*stream) == b"end")
                );
                assert_eq!(app.await.unwrap().seen.goaway.get(), None);
            }
        }
    });
}

#[test]
fn long_stream_may_have_any_number_of_empty_data_frames() {
    on_worker(async {
        for form in 0..3 {
            let mesh = Mesh::new();
            let (address, app) = End::app(settings(&[]), |_, _| Vec::new()).await;
            let client =
                End::client(&mesh, &Backend::alone(address), Direction::Inbound, OPEN).await;
            client.send(frame(HEADERS, END_HEADERS, 1, GET));
            let app = app.await;
            until(|| !app.seen.heads.borrow().is_empty()).await;
            app.send(frame(HEADERS, END_HEADERS, 1, OK));
            // More than fits into the windows.
            for _ in 0..20 {
                client.send(empty(1, form).repeat(200));
                app.send(empty(1, form).repeat(200));
                client.sync().await;
                app.sync().await;
            }
            client.send(frame(DATA, END_STREAM, 1, b"ping"));
            app.send(frame(DATA, END_STREAM, 1, b"pong"));
            until(|| client.seen.has_ended(1) && app.seen.has_ended(1)).await;
            assert_eq!(client.seen.data_of(1), b"pong");
            assert_eq!(app.seen.data_of(1), b"ping");
        }
    });
}
