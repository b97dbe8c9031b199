//! Windows: the credit that bytes give back, and bodies that wait for windows, or for room in the
//! output.

use super::bench::*;
use super::*;

#[test]
fn a_reset_stream_gives_the_window_of_the_connection_back() {
    for role in [Role::Server, Role::Client] {
        for has_handles in [true, false] {
            let mut bench = Bench::of(Config {
                connection_window: 65_535,
                ..config(role)
            });
            bench.cancel();
            if !has_handles {
                bench.streams.clear();
            }
            for _ in 0..20 {
                bench.feed(padded_data(1, 0, 9_744, 255));
            }
            let frames = bench.take();
            let credit = credit(&frames, 0);
            let is_right = (200_000 - 32_767..=200_000).contains(&credit);
            assert!(is_right, "{credit} bytes");
            assert!(frames.iter().all(|frame| frame.stream == 0));
        }
    }
}

#[test]
fn every_byte_of_data_gives_the_window_of_the_connection_back() {
    let mut bench = Bench::of(Config {
        connection_window: 65_535,
        max_streams: 2,
        ..config(Role::Server)
    });
    // The request of stream 1 is not read, stream 3 is malformed, stream 5 has no handles, and the
    // streams 9 and 11 are refused.
    bench.feed(headers(1, 0, &POST));
    bench.feed(headers(3, 0, &[]));
    bench.feed(headers(5, 0, &POST));
    bench.streams.pop();
    bench.feed(headers(7, 0, &POST));
    bench.feed(headers(9, 0, &POST));
    bench.feed(headers(11, 0, &POST));
    let mut sent = 0;
    for _ in 0..6 {
        for stream in [1, 3, 5, 7, 9, 11] {
            bench.feed(data(stream, 0, 5_000));
            bench.feed(padded_data(stream, 0, 100, 200));
            bench.feed(padded_data(stream, 0, 0, 0));
            sent += 5_000 + 301 + 1;
        }
    }
    assert_eq!(bench.result, Ok(()));
    let credit = credit(&bench.take(), 0);
    let is_right = (sent - 32_767..=sent).contains(&credit);
    assert!(is_right, "{credit} of {sent} bytes");
}

#[test]
fn padding_gives_both_windows_back() {
    for role in [Role::Server, Role::Client] {
        let mut bench = Bench::of(Config {
            connection_window: 65_535,
            ..config(role)
        });
        bench.start();
        for _ in 0..1000 {
            bench.feed(padded_data(1, 0, 1, 255));
        }
        assert_eq!((bench.result, bench.error(0)), (Ok(()), None));
        let frames = bench.take();
        for (stream, bytes) in [(0, 257 * 1000), (1, 256 * 1000)] {
            let credit = credit(&frames, stream);
            let is_right = (bytes - 32_767..=bytes).contains(&credit);
            assert!(is_right, "{credit} bytes of stream {stream}");
        }
        assert_eq!(bench.read(0).0.len(), 1000);
    }
}

#[test]
fn bytes_that_nobody_takes_give_no_window_back() {
    for role in [Role::Server, Role::Client] {
        let mut bench = Bench::new(role);
        bench.start();
        for _ in 0..4 {
            bench.feed(data(1, 0, 16_000));
        }
        assert_eq!(credit(&bench.take(), 1), 0);
        assert_eq!(bench.read(0).0.len(), 64_000);
        assert_eq!(credit(&bench.take(), 1), 0);
        bench.streams[0].receiver.release(32_766);
        assert_eq!(credit(&bench.take(), 1), 0);
        bench.streams[0].receiver.release(64_000 - 32_766);
        assert_eq!(credit(&bench.take(), 1), 64_000);
        // Nothing is due after the end.
        bench.feed(data(1, flag::END_STREAM, 60_000 % 16_384));
        bench.streams[0].receiver.release(60_000 % 16_384);
        assert_eq!(credit(&bench.take(), 1), 0);
    }
}

#[test]
fn bodies_respect_windows_that_settings_make_negative() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(initial_window(0));
    bench.feed(headers(1, flag::END_STREAM, &GET));
    let stream = &bench.streams[0];
    stream.respond(false);
    stream.send(b"0123456789", true);
    assert_eq!(lengths(&bench.take(), 1), []);
    bench.feed(window_update(1, 3));
    assert_eq!(lengths(&bench.take(), 1), [3]);
    bench.feed(initial_window(5));
    assert_eq!(lengths(&bench.take(), 1), [5]);
    bench.feed(initial_window(0));
    bench.feed(window_update(1, 5));
    assert_eq!(lengths(&bench.take(), 1), []);
    bench.feed(window_update(1, 1));
    assert_eq!(lengths(&bench.take(), 1), [1]);
    assert_eq!(bench.streams[0].sender.pending(), 1);
    bench.feed(window_update(1, 100));
    let frames = bench.take();
    assert_eq!(lengths(&frames, 1), [1]);
    assert!(frames[0].has(flag::END_STREAM));
    // A new stream has the last window.
    bench.feed(initial_window(2));
    bench.feed(headers(3, flag::END_STREAM, &GET));
    let stream = &bench.streams[1];
    stream.respond(false);
    stream.send(b"0123456789", true);
    assert_eq!(lengths(&bench.take(), 3), [2]);
}

#[test]
fn bodies_respect_the_window_of_the_connection_and_take_turns() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(initial_window(MAX_31));
    for stream in [1, 3, 5] {
        bench.feed(headers(stream, flag::END_STREAM, &GET));
        let stream = bench.streams.last().expect("a stream");
        stream.respond(false);
        stream.send([0; 100_000], true);
    }
    let frames = bench.take();
    let sent = [1, 3, 5].map(|stream| lengths(&frames, stream));
    assert_eq!(sent.concat().iter().sum::<usize>(), 65_535);
    bench.feed(window_update(0, 3 * 16_384));
    let frames = bench.take();
    for stream in [1, 3, 5] {
        assert_eq!(lengths(&frames, stream), [16_384]);
    }
    bench.feed(window_update(0, MAX_31));
    let frames = bench.take();
    let ends = frames.iter().filter(|frame| frame.has(flag::END_STREAM));
    assert_eq!((ends.count(), bench.open_streams()), (3, 0));
}

/// Stream 1 has taken the window of the connection, or the output is full: the ends of other
/// streams need neither, do not wait, and never get lost.
#[test]
fn the_end_of_a_message_is_sent_while_other_streams_wait() {
    for max_output in [1000, 1 << 20] {
        let mut bench = Bench::of(Config {
            max_output,
            ..config(Role::Server)
        });
        bench.feed(initial_window(MAX_31));
        for stream in [1, 3, 5, 7] {
            bench.feed(headers(stream, flag::END_STREAM, &GET));
        }
        bench
            .streams
            .iter()
            .for_each(|stream| stream.respond(false));
        bench.take();
        let [first, second, third, fourth] = &bench.streams[..] else {
            panic!("four streams");
        };
        first.send([0; 100_000], true);
        assert!(first.sender.pending() > 0);
        second.send_trailers();
        third.send(b"", true);
        fourth.send(b"x", false);
        fourth.send_trailers();
        bench.feed(window_update(0, 1 << 20));
        let frames = bench.take();
        for stream in [1, 3, 5, 7] {
            let ends = frames
                .iter()
                .filter(|frame| frame.stream == stream && frame.has(flag::END_STREAM));
            assert_eq!(ends.count(), 1, "stream {stream}, output {max_output}");
        }
        assert_eq!(lengths(&frames, 7), [1]);
        assert_eq!(bench.open_streams(), 0);
    }
}

#[test]
fn output_has_a_maximum_beyond_which_bodies_wait() {
    let mut bench = Bench::of(Config {
        max_output: 1000,
        ..config(Role::Server)
    });
    bench.feed(window_update(0, 1 << 20));
    bench.feed(initial_window(MAX_31));
    for stream in 0..20 {
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &GET));
    }
    for stream in &bench.streams {
        stream.respond(false);
        stream.send([0; 30_000], true);
    }
    let output = bench.with(|connection| connection.output().len());
    assert!(output < 1000 + 16_384 + 9 + 20 * 20, "{output} bytes");
    bench.flush();
    assert_eq!(bench.open_streams(), 0);
}

/// The peer takes no more bytes of bodies, and reads what else arrives.
#[test]
fn resets_arrive_while_the_window_of_the_connection_is_closed() {
    let mut bench = Bench::new(Role::Client);
    let uploads: Vec<usize> = (0..4).map(|_| bench.open("POST", false)).collect();
    for at in &uploads {
        let sent = bench.streams[*at]
            .sender
            .send(vec![0; DEFAULT_WINDOW].into(), false);
        assert_eq!(sent, Ok(()));
    }
    let frames = bench.take();
    let sent: usize = [1, 3, 5, 7]
        .iter()
        .flat_map(|id| lengths(&frames, *id))
        .sum();
    assert_eq!(sent, DEFAULT_WINDOW);
    for at in uploads {
        bench.streams[at].sender.reset(ErrorCode::CANCEL);
    }
    let cancelled = [1, 3, 5, 7].map(|id| (id, ErrorCode::CANCEL));
    assert_eq!(resets(&bench.take()), cancelled);
}
