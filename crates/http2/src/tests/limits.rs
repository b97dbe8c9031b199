//! Peers that flood: field blocks, violations, resets and interim responses have limits. The
//! dynamic table stays in step with the peer whatever becomes of a field block.

use super::bench::*;
use super::*;
use crate::Error;

#[test]
fn a_field_block_has_a_maximum_size() {
    let max = config(Role::Server).max_block;
    let mut bench = Bench::new(Role::Server);
    bench.feed(large_block(&GET, max - 100));
    assert_eq!((bench.result, bench.streams.len()), (Ok(()), 1));
    assert!(bench.streams[0].is_cut);
    let mut bench = Bench::new(Role::Server);
    bench.feed(large_block(&GET, max + 1));
    assert_eq!(bench.end_code(), Some(ErrorCode::ENHANCE_YOUR_CALM));
    assert_eq!(bench.streams.len(), 0);
}

/// HEADERS of stream 1 with a block of this size, in frames of 16,384 bytes. The block leaves the
/// dynamic table as it is.
fn large_block(fields: &[(&str, &str)], size: usize) -> Vec<u8> {
    let mut block = block(fields);
    let value = "v".repeat(1000);
    while block.len() + 2500 < size {
        literal(0, "large", &value, &mut block);
    }
    let empty = super::block(&[("large", &value)]).len() - value.len();
    let value = "v".repeat((size - block.len()) / 2 - empty);
    literal(0, "large", &value, &mut block);
    let value = "v".repeat(size - block.len() - empty);
    literal(0, "large", &value, &mut block);
    assert_eq!(block.len(), size);
    let mut pieces = block.chunks(16_384);
    let first = pieces.next().expect("a piece");
    let mut bytes = begin_headers(1, first);
    for piece in pieces {
        bytes.extend(continuation(1, 0, piece));
    }
    bytes.extend(continuation(1, flag::END_HEADERS, &[]));
    bytes
}

/// The headers of the frames count: otherwise a block of frames with one byte is ten times as long.
#[test]
fn small_continuation_frames_count_with_their_headers() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(begin_headers(1, &[]));
    let piece = continuation(1, 0, &[0]);
    let count = config(Role::Server).max_block / piece.len();
    bench.feed(piece.repeat(count - 1));
    assert_eq!(bench.result, Ok(()));
    bench.feed(piece.repeat(2));
    assert_eq!(bench.end_code(), Some(ErrorCode::ENHANCE_YOUR_CALM));
}

#[test]
fn fields_over_the_limit_are_dropped_and_the_table_stays_in_step() {
    let mut bench = Bench::of(Config {
        max_fields: 1000,
        ..config(Role::Server)
    });
    let mut large = block(&GET);
    literal(0, "large", &"v".repeat(1000), &mut large);
    literal(0, "dropped", "a", &mut large);
    literal(INSERT, "kept", "in the table", &mut large);
    literal(0, "dropped", "b", &mut large);
    bench.feed(headers_of(1, &large));
    let stream = &bench.streams[0];
    assert!(stream.is_cut);
    let names: Vec<_> = stream.request.fields.iter().map(|(name, _)| name).collect();
    assert_eq!(names, [b"large"]);
    let mut next = block(&GET);
    next.push(LAST);
    bench.feed(headers_of(3, &next));
    let stream = &bench.streams[1];
    assert!(!stream.is_cut);
    assert_eq!(
        stream.request.fields.get("kept"),
        Some(&b"in the table"[..])
    );
    // Trailers have the same limit.
    bench.feed(headers(5, 0, &POST));
    let large = &*"v".repeat(1000);
    let fields = [("large", large), ("dropped", "a")];
    bench.feed(headers(5, flag::END_STREAM, &fields));
    let trailers = bench.trailers(2);
    assert!(trailers.is_cut);
    assert!(trailers.message.get("dropped").is_none());
    assert!(bench.is_alive());
}

/// An entry for the dynamic table, and the field that refers to the last entry.
const INSERT: u8 = 0x40;
const LAST: u8 = 0x80 | 62;

/// Blocks that insert one field: of requests that are refused, malformed, late, or follow the end.
#[test]
fn the_table_stays_in_step_whatever_becomes_of_a_stream() {
    let mut bench = Bench::of(Config {
        max_streams: 2,
        ..config(Role::Server)
    });
    let mut count = 0;
    let mut insert = |fields: &[(&str, &str)], flags: u8, stream: u32| {
        let mut block = block(fields);
        literal(INSERT, "count", &count.to_string(), &mut block);
        count += 1;
        frame(kind::HEADERS, flag::END_HEADERS | flags, stream, &block)
    };
    bench.feed(headers(1, 0, &POST));
    bench.feed(insert(&[(":a", "b")], 0, 3));
    check_last(&mut bench, 5, "0");
    bench.streams[0].sender.reset(ErrorCode::CANCEL);
    bench.feed(insert(&[], flag::END_STREAM, 1));
    check_last(&mut bench, 7, "1");
    bench.streams.clear();
    bench.feed(insert(&[], flag::END_STREAM, 1));
    check_last(&mut bench, 9, "2");
    bench.feed(headers(11, 0, &POST));
    bench.feed(headers(13, 0, &POST));
    bench.feed(insert(&POST, 0, 15));
    let resets = resets(&bench.take());
    assert_eq!(resets.last(), Some(&(15, ErrorCode::REFUSED_STREAM)));
    bench.streams.clear();
    check_last(&mut bench, 17, "3");
    let pong = bench.drain();
    bench.feed(headers(19, 0, &POST));
    bench.feed(pong);
    bench.feed(insert(&POST, 0, 21));
    bench.feed(headers_of(19, &[LAST]));
    assert_eq!(bench.trailers(0).message.get("count"), Some(&b"4"[..]));
}

/// Sends a request with the last field of the table.
fn check_last(bench: &mut Bench, id: u32, value: &str) {
    let mut block = block(&POST);
    block.push(LAST);
    bench.feed(headers_of(id, &block));
    let stream = bench.streams.pop().expect("a stream");
    assert_eq!(stream.request.fields.get("count"), Some(value.as_bytes()));
}

#[test]
fn more_than_100_violations_end_the_connection() {
    let mut bench = Bench::new(Role::Server);
    for stream in 0..100 {
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &[("a", "b")]));
    }
    assert_eq!(resets(&bench.take()).len(), 100);
    assert!(bench.is_alive());
    bench.feed(headers(201, flag::END_STREAM, &[("a", "b")]));
    let calm = ErrorCode::ENHANCE_YOUR_CALM;
    assert_eq!(go_aways(&bench.take()), [(201, calm)]);
    let mut bench = Bench::new(Role::Client);
    let other = bench.open("GET", true);
    for stream in 1..102 {
        bench.open("GET", true);
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &[("a", "b")]));
    }
    // The other stream goes on, and no further one is opened.
    assert!(go_aways(&bench.take()).is_empty() && bench.is_alive());
    assert!(!bench.shared.with(|connection| connection.accepts_streams()));
    bench.feed(headers(1, flag::END_STREAM, &OK));
    assert_eq!(bench.error(other), None);
}

#[test]
fn more_resets_at_once_than_twice_the_streams_end_the_connection() {
    let config = Config {
        max_streams: 10,
        ..config(Role::Server)
    };
    let pairs = |count: u32| -> Vec<u8> {
        let ids = (0..count).map(|at| 2 * at + 1);
        let pairs = ids.map(|id| [headers(id, 0, &POST), reset(id, ErrorCode::CANCEL)]);
        pairs.flatten().flatten().collect()
    };
    let mut bench = Bench::of(config);
    bench.feed(pairs(20));
    assert_eq!(bench.result, Ok(()));
    assert_eq!((bench.streams.len(), bench.open_streams()), (20, 0));
    for at in 0..20 {
        assert_eq!(bench.error(at), Some(Error::Reset(ErrorCode::CANCEL)));
        let sent = bench.streams[at].sender.respond(&response(200, &[]), true);
        assert_eq!(sent, Err(Error::Reset(ErrorCode::CANCEL)));
    }
    bench.streams.clear();
    assert!(!bench.has_streams());
    let mut bench = Bench::of(config);
    bench.feed(pairs(21));
    let calm = ErrorCode::ENHANCE_YOUR_CALM;
    assert_eq!(go_aways(&bench.take()), [(41, calm)]);
}

/// The server learns later that many requests were cancelled at once: the late frames violate
/// nothing, and other requests use the connection.
#[test]
fn late_frames_after_many_resets_are_ignored() {
    let mut bench = Bench::new(Role::Client);
    for _ in 0..400 {
        bench.open("GET", true);
    }
    bench.streams.clear();
    assert_eq!(resets(&bench.take()).len(), 400);
    for stream in 0..400 {
        bench.feed(headers(2 * stream + 1, 0, &OK));
        bench.feed(data(2 * stream + 1, flag::END_STREAM, 10));
    }
    assert_eq!(bench.ended(), None);
    let mut bench = Bench::of(Config {
        max_streams: 400,
        ..config(Role::Server)
    });
    for stream in 0..400 {
        bench.feed(headers(2 * stream + 1, 0, &POST));
    }
    bench.streams.clear();
    for stream in 0..400 {
        bench.feed(data(2 * stream + 1, 0, 10));
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &[("a", "b")]));
    }
    assert_eq!(bench.ended(), None);
}

#[test]
fn interim_responses_are_limited_while_nobody_reads() {
    let mut bench = Bench::new(Role::Client);
    bench.open("GET", true);
    for _ in 0..1000 {
        bench.feed(headers(1, 0, &[(":status", "103")]));
    }
    bench.feed(headers(1, flag::END_STREAM, &OK));
    let statuses: Vec<_> = std::iter::from_fn(|| bench.response(0)).take(100).collect();
    assert!(statuses.len() <= 20);
    assert!(statuses.contains(&Ok(103)));
    assert_eq!(statuses.last(), Some(&Ok(200)));
    assert_eq!(bench.read(0), (vec![], Some(Ok(()))));
}

/// Each stream counts until its peer takes the end of the response.
#[test]
fn responses_that_a_peer_does_not_take_use_up_its_streams() {
    let mut bench = Bench::of(Config {
        max_streams: 10,
        ..config(Role::Server)
    });
    bench.feed(initial_window(0));
    for stream in 0..10 {
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &GET));
        let Stream { sender, .. } = bench.streams.pop().expect("an accepted stream");
        assert_eq!(sender.respond(&response(200, &[]), false), Ok(()));
        assert_eq!(sender.send(Bytes::from_static(b"waits"), true), Ok(()));
    }
    bench.take();
    assert_eq!(bench.open_streams(), 10);
    bench.feed(headers(21, flag::END_STREAM, &GET));
    assert_eq!(resets(&bench.take()), [(21, ErrorCode::REFUSED_STREAM)]);
    // The peer takes one, and cancels the others.
    bench.feed(window_update(1, 5));
    assert_eq!(ends(&bench.take(), 1).len(), 1);
    for stream in 1..10 {
        bench.feed(reset(2 * stream + 1, ErrorCode::CANCEL));
    }
    assert!(!bench.has_streams() && bench.is_alive());
}
