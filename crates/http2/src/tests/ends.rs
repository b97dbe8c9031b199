//! Ends of connections: GOAWAY of either side, and what is left after the end. The task of a
//! connection wakes when there is something to do.

use std::task::{Context, Waker};

use bytes::Bytes;

use super::bench::*;
use super::*;
use crate::{Connection, Error};

#[test]
fn go_away_fails_the_streams_that_the_server_has_not_processed() {
    let mut bench = Bench::new(Role::Client);
    for _ in 0..4 {
        bench.open("POST", false);
    }
    // The response of stream 7 is complete before.
    bench.feed(headers(7, flag::END_STREAM, &OK));
    bench.feed(go_away(MAX_31, ErrorCode::NO_ERROR));
    assert!(!bench.with(|connection| connection.accepts_streams()));
    let opened = bench.shared.open(&request("GET", &[]), true);
    assert!(matches!(opened, Err(Error::Closed)));
    assert_eq!((0..4).find_map(|at| bench.error(at)), None);
    bench.take();
    bench.feed(go_away(3, ErrorCode(42)));
    assert_eq!(bench.take(), []);
    let error = Error::GoAway(ErrorCode(42));
    let expected = [None, None, Some(error.clone()), Some(error.clone())];
    assert_eq!([0, 1, 2, 3].map(|at| bench.error(at)), expected);
    assert_eq!(bench.response(2), Some(Err(error)));
    assert_eq!(bench.response(3), Some(Ok(200)));
    assert_eq!(bench.open_streams(), 2);
    // The others go on.
    bench.streams[0].send(b"x", true);
    assert_eq!(lengths(&bench.take(), 1), [1]);
    bench.feed(headers(1, flag::END_STREAM, &OK));
    assert_eq!(bench.response(0), Some(Ok(200)));
    // They fail with the connection.
    let error = Error::Io(std::io::ErrorKind::BrokenPipe);
    bench.with(|connection| connection.end(&error));
    assert_eq!(bench.response(1), Some(Err(error)));
    assert_eq!(bench.read(0), (vec![], Some(Ok(()))));
    bench.streams.clear();
    assert!(!bench.has_streams());
}

#[test]
fn a_server_serves_clients_that_leave() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.feed(go_away(0, ErrorCode::NO_ERROR));
    assert_eq!(bench.error(0), None);
    bench.feed(data(1, flag::END_STREAM, 10));
    assert_eq!(bench.read(0), (vec![b'd'; 10], Some(Ok(()))));
    bench.streams[0].respond(true);
    assert_eq!(bench.open_streams(), 0);
}

#[test]
fn a_drained_server_serves_all_streams_that_were_on_their_way() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.with(Connection::drain);
    bench.with(Connection::drain);
    let frames = bench.take();
    assert_eq!(go_aways(&frames), [(MAX_31, ErrorCode::NO_ERROR)]);
    let pong = pong(&frames);
    bench.feed(headers(3, flag::END_STREAM, &GET));
    // The answer to another PING frame.
    bench.feed(frame(kind::PING, flag::ACK, 0, &[0; 8]));
    assert_eq!((bench.streams.len(), bench.take()), (2, vec![]));
    bench.feed(pong);
    assert_eq!(go_aways(&bench.take()), [(3, ErrorCode::NO_ERROR)]);
    // Later streams are ignored, and their bytes give the window back.
    let mut sent = 0;
    for stream in [5, 7, 9] {
        bench.feed(headers(stream, 0, &POST));
        for _ in 0..20 {
            bench.feed(data(stream, 0, 16_000));
            sent += 16_000;
        }
        bench.feed(window_update(stream, 1));
        bench.feed(headers(stream, flag::END_STREAM, &[("a", "b")]));
        bench.feed(reset(stream, ErrorCode::CANCEL));
    }
    let frames = bench.take();
    assert_eq!(
        of_kind(&frames, kind::WINDOW_UPDATE, 0).count(),
        frames.len()
    );
    assert!(credit(&frames, 0) > sent - (1 << 19));
    assert_eq!(bench.streams.len(), 2);
    // The others go on to their ends.
    let is_drained = |bench: &Bench| bench.with(|connection| connection.is_drained());
    bench.feed(data(1, flag::END_STREAM, 10));
    bench.streams.iter().for_each(|stream| stream.respond(true));
    assert!(!is_drained(&bench));
    bench.streams.clear();
    assert!(is_drained(&bench) && bench.ended().is_none());
}

/// RFC 9113, section 6.8: the peer may have sent the requests again, to others.
#[test]
fn the_last_stream_of_go_away_does_not_grow() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    let pong = bench.drain();
    bench.feed(pong);
    bench.feed(headers(3, 0, &POST));
    bench.close(ErrorCode::NO_ERROR);
    assert_eq!(go_aways(&bench.take()), [(1, ErrorCode::NO_ERROR); 2]);
}

/// A client accepts no streams of servers.
#[test]
fn the_last_stream_of_a_client_is_0() {
    let mut bench = Bench::new(Role::Client);
    bench.open("GET", true);
    let pong = bench.drain();
    bench.feed(pong);
    assert_eq!(go_aways(&bench.take()), [(0, ErrorCode::NO_ERROR)]);
    bench.close(ErrorCode::NO_ERROR);
    assert_eq!(go_aways(&bench.take()), [(0, ErrorCode::NO_ERROR)]);
}

/// The tasks of connections wait for this: drained servers, and clients whose server leaves.
#[test]
fn the_last_handle_wakes_the_connection() {
    for role in [Role::Server, Role::Client] {
        let mut bench = Bench::new(role);
        bench.start_half();
        match role {
            Role::Server => {
                let pong = bench.drain();
                bench.feed(pong);
            }
            Role::Client => bench.feed(go_away(1, ErrorCode::NO_ERROR)),
        }
        bench.streams[0].send(b"", true);
        bench.flush();
        let (flag, waker) = Flag::new();
        bench.with(|connection| connection.wait(&Context::from_waker(&waker)));
        bench.streams.clear();
        assert!(!bench.has_streams());
        assert!(flag.is_set(), "the task of a {role:?} does not wake");
    }
}

#[test]
fn nothing_works_after_the_end_of_a_connection() {
    let mut bench = Bench::new(Role::Client);
    bench.open("POST", false);
    bench.open("POST", false);
    bench.feed(headers(3, flag::END_STREAM, &OK));
    bench.take();
    bench.close(ErrorCode::CANCEL);
    assert_eq!(go_aways(&bench.take()), [(0, ErrorCode::CANCEL)]);
    bench.feed(headers(1, 0, &OK));
    bench.feed([0xff; 100]);
    assert_eq!(bench.result, Ok(()));
    assert_eq!(bench.response(0), Some(Err(Error::Closed)));
    assert_eq!(bench.response(1), Some(Ok(200)));
    let sent = bench.streams[0].sender.send(Bytes::new(), true);
    assert_eq!(sent, Err(Error::Closed));
    assert!(bench.shared.open(&request("GET", &[]), true).is_err());
    bench.streams[0].sender.reset(ErrorCode::CANCEL);
    bench.with(Connection::drain);
    bench.with(Connection::probe);
    bench.streams[0].receiver.release(1_000_000);
    bench.streams.clear();
    assert_eq!(bench.take(), []);
    assert!(!bench.has_streams());
}

#[test]
fn a_connection_wakes_its_task_when_there_is_output() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.feed(data(1, 0, 16_000).repeat(3));
    let (flag, waker) = Flag::new();
    let cx = Context::from_waker(&waker);
    let stream = &bench.streams[0];
    let wakes = |act: &dyn Fn()| {
        bench.with(|connection| {
            let length = connection.output().len();
            connection.record_written(length);
            connection.wait(&cx);
        });
        flag.take();
        act();
        let has_output = bench.with(|connection| !connection.output().is_empty());
        assert!(has_output);
        flag.take()
    };
    assert!(wakes(&|| stream.receiver.release(48_000)));
    assert!(wakes(&|| stream.respond(false)));
    assert!(wakes(&|| stream.send(b"x", false)));
    let send_trailers = || stream.sender.send_trailers(Fields::default());
    assert!(wakes(&|| send_trailers().expect("trailers")));
    assert!(wakes(&|| stream.sender.reset(ErrorCode::CANCEL)));
    assert!(wakes(&|| {
        bench.with(Connection::probe);
    }));
    assert!(wakes(&|| bench.with(Connection::enable_connect_protocol)));
    assert!(wakes(&|| bench.with(Connection::drain)));
    assert!(wakes(&|| bench.close(ErrorCode::NO_ERROR)));
}

/// Buffers for output are shared by the connections of a worker: a connection without output holds
/// none, whatever has arrived.
#[test]
fn a_connection_without_output_holds_no_buffer() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.feed(initial_window(0));
    let wait = |bench: &Bench| {
        let cx = Context::from_waker(Waker::noop());
        bench.with(|connection| {
            connection.wait(&cx);
            connection.return_buffer();
            connection.buffered()
        })
    };
    // The buffer of the answer is the one for the next output.
    assert!(bench.is_alive());
    assert_eq!(wait(&bench), 0);
    bench.feed(data(1, 0, 10));
    assert_eq!(wait(&bench), 0);
    bench.streams[0].respond(false);
    bench.flush();
    bench.streams[0].send(b"waits", false);
    assert_eq!(wait(&bench), 0);
}

#[test]
fn a_body_uses_the_same_buffer_again() {
    let mut bench = Bench::of(Config {
        max_output: 10_000,
        ..config(Role::Server)
    });
    bench.feed(headers(1, flag::END_STREAM, &GET));
    let stream = &bench.streams[0];
    stream.respond(false);
    stream.send([0; 60_000], true);
    bench.with(|connection| {
        let buffers: Vec<_> = (0..3)
            .map(|_| {
                let (buffer, length) = (connection.output().as_ptr(), connection.output().len());
                assert!(length > 10_000);
                connection.record_written(length);
                buffer
            })
            .collect();
        assert_eq!(buffers[1..], [buffers[0]; 2]);
    });
}

#[test]
fn acknowledgments_are_counted() {
    let mut bench = Bench::new(Role::Client);
    assert_eq!(bench.with(|connection| connection.settings()), (1, 1));
    assert_eq!(bench.with(Connection::probe), 2);
    assert_eq!(bench.with(|connection| connection.settings()), (2, 1));
    bench.feed(settings_ack());
    assert_eq!(bench.with(|connection| connection.settings()), (2, 2));
    bench.feed(settings_ack());
    assert!(bench.ended().is_some());
}
