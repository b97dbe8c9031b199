//! Ends of streams: messages that are complete, resets, and handles that are dropped.

use bytes::Bytes;

use super::bench::*;
use super::*;
use crate::Error;

#[test]
fn frames_after_the_end_of_a_message_change_nothing_for_the_reader() {
    for role in [Role::Server, Role::Client] {
        let mut bench = Bench::new(role);
        bench.start();
        bench.feed(data(1, 0, 10));
        bench.feed(headers(1, flag::END_STREAM, &[("a", "b")]));
        bench.streams[0].send(b"", true);
        bench.feed(data(1, 0, 5));
        bench.feed(headers(1, flag::END_STREAM, &[("a", "c")]));
        bench.feed(reset(1, ErrorCode::CANCEL));
        assert_eq!(bench.read(0), (vec![b'd'; 10], Some(Ok(()))));
        assert_eq!(bench.trailers(0).message.get("a"), Some(&b"b"[..]));
    }
}

#[test]
fn a_complete_response_is_readable_after_a_reset() {
    let mut bench = Bench::new(Role::Client);
    bench.open("POST", false);
    bench.feed(headers(1, 0, &OK));
    bench.feed(data(1, flag::END_STREAM, 100));
    bench.feed(reset(1, ErrorCode::NO_ERROR));
    let error = Error::Reset(ErrorCode::NO_ERROR);
    assert_eq!(bench.error(0), Some(error.clone()));
    assert_eq!(bench.streams[0].sender.send(Bytes::new(), true), Err(error));
    assert_eq!(bench.response(0), Some(Ok(200)));
    assert_eq!(bench.read(0), (vec![b'd'; 100], Some(Ok(()))));
    assert!(bench.streams[0].receiver.is_end_stream());
    assert_eq!(bench.open_streams(), 0);
    // An incomplete one is not.
    bench.open("POST", false);
    bench.feed(headers(3, 0, &OK));
    bench.feed(data(3, 0, 100));
    bench.feed(reset(3, ErrorCode::NO_ERROR));
    assert_eq!(bench.response(1), Some(Ok(200)));
    let error = Error::Reset(ErrorCode::NO_ERROR);
    assert_eq!(bench.read(1), (vec![], Some(Err(error))));
}

#[test]
fn a_response_is_sent_completely_without_handles() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(initial_window(10));
    for (id, has_trailers) in [(1, false), (3, true)] {
        bench.feed(headers(id, 0, &POST));
        let stream = &bench.streams[0];
        stream.respond(false);
        stream.send_all(25, has_trailers);
        bench.streams.clear();
        assert_eq!(bench.open_streams(), 1);
        bench.feed(data(id, 0, 100));
        assert_eq!(resets(&bench.take()), []);
        bench.feed(window_update(id, 100));
        let frames = bench.take();
        assert_eq!(lengths(&frames, id), [15]);
        let mut order = frames.iter();
        let end = order.position(|frame| frame.has(flag::END_STREAM));
        let reset = order.position(|frame| frame.kind == kind::RST_STREAM);
        assert!(end.is_some() && reset.is_some());
        assert_eq!(resets(&frames), [(id, ErrorCode::NO_ERROR)]);
        assert!(!bench.has_streams());
    }
}

/// The server may still read the request, and its client has sent it completely.
#[test]
fn a_request_is_sent_completely_after_its_response_without_handles() {
    for has_trailers in [false, true] {
        let mut bench = Bench::new(Role::Client);
        bench.feed(initial_window(10));
        bench.open("POST", false);
        bench.streams[0].send_all(25, has_trailers);
        bench.feed(headers(1, flag::END_STREAM, &OK));
        bench.streams.clear();
        assert_eq!(resets(&bench.take()), []);
        bench.feed(window_update(1, 100));
        let frames = bench.take();
        assert_eq!((lengths(&frames, 1), resets(&frames)), (vec![15], vec![]));
        assert_eq!(ends(&frames, 1).len(), 1);
        assert!(!bench.has_streams());
    }
    // One that is incomplete is cancelled.
    let mut bench = Bench::new(Role::Client);
    bench.open("POST", false);
    bench.streams[0].send([0; 25], false);
    bench.feed(headers(1, flag::END_STREAM, &OK));
    bench.streams.clear();
    assert_eq!(resets(&bench.take()), [(1, ErrorCode::CANCEL)]);
}

#[test]
fn nothing_follows_the_end_of_a_message() {
    // The end is sent, or waits for a window.
    for window in [65_535, 1] {
        for has_trailers in [false, true] {
            let mut bench = Bench::new(Role::Server);
            bench.feed(initial_window(window));
            bench.feed(headers(1, 0, &POST));
            let stream = &bench.streams[0];
            stream.respond(false);
            stream.send_all(10, has_trailers);
            let sender = &stream.sender;
            for result in [
                sender.send_trailers(fields_of(&[("a", "c")])),
                sender.send(Bytes::from_static(b"x"), true),
                sender.respond(&response(200, &[]), true),
            ] {
                assert_eq!(result, Err(Error::Closed));
            }
            bench.feed(window_update(1, 100));
            let frames = bench.take();
            assert_eq!(lengths(&frames, 1).iter().sum::<usize>(), 10);
            let expected = [kind::DATA, kind::HEADERS][usize::from(has_trailers)];
            assert_eq!(ends(&frames, 1), [expected]);
        }
    }
}

#[test]
fn a_stream_without_handles_is_cancelled_if_its_message_is_incomplete() {
    // No response, only a head, and bytes without an end.
    for case in 0..3 {
        let mut bench = Bench::new(Role::Server);
        bench.feed(headers(1, flag::END_STREAM, &GET));
        let stream = &bench.streams[0];
        if case > 0 {
            stream.respond(false);
        }
        if case > 1 {
            stream.send([0; 10], false);
        }
        bench.streams.clear();
        assert_eq!(resets(&bench.take()), [(1, ErrorCode::CANCEL)]);
        assert_eq!(bench.open_streams(), 0);
    }
    let mut bench = Bench::new(Role::Client);
    bench.open("POST", true);
    bench.feed(headers(1, 0, &OK));
    let Stream {
        sender, receiver, ..
    } = bench.streams.remove(0);
    drop(sender);
    assert_eq!(resets(&bench.take()), []);
    drop(receiver);
    assert_eq!(resets(&bench.take()), [(1, ErrorCode::CANCEL)]);
}

#[test]
fn a_reset_before_the_stream_was_accepted_reaches_its_task() {
    let mut bench = Bench::new(Role::Server);
    let code = ErrorCode(77);
    bench.feed([headers(1, 0, &POST), data(1, 0, 10), reset(1, code)].concat());
    assert_eq!(bench.error(0), Some(Error::Reset(code)));
    assert_eq!(bench.read(0), (vec![], Some(Err(Error::Reset(code)))));
    assert_eq!(bench.streams[0].receiver.buffered(), 0);
    bench.streams.clear();
    assert_eq!(bench.take(), []);
}
