//! Frames for which both roles have the same reactions, by sections of RFC 9113.

use super::bench::*;
use super::cases::*;
use super::*;
use crate::frame::setting;

const CHUNKED: [(&str, &str); 1] = [("transfer-encoding", "chunked")];

#[test]
fn both_roles_react_to_violations_as_the_table_says() {
    for role in [Role::Server, Role::Client] {
        let t = &Table::new(role);
        format_of_frames(t);
        field_blocks(t);
        streams_that_are_not_open(t);
        streams_that_end(t);
        frames_of_streams(t);
        settings_frames(t);
        other_frames(t);
        windows(t);
        continuations(t);
        trailers(t);
        t.end();
    }
}

fn format_of_frames(t: &Table) {
    // Section 4.1.
    t.started("frames of unknown types are ignored")
        .feed(frame(0x42, 0xff, 0, &[0; 20]))
        .feed(frame(0x42, 0xff, 1, &[0; 20]))
        .feed(frame(0xff, 0xff, 77, &[]))
        .expect(IGNORED);
    t.started("unknown flags are ignored")
        .feed(frame(kind::PING, 0xfe, 0, &[0; 8]))
        .feed(frame(kind::SETTINGS, 0xfe, 0, &[]))
        .feed(frame(kind::DATA, 0xf6, 1, &[0; 8]))
        .feed(frame(kind::WINDOW_UPDATE, 0xff, 1, &[0, 0, 0, 1]))
        .expect(IGNORED);
    let mut b = t.started("the reserved bit of a stream is ignored");
    b.feed(data(1 | 1 << 31, 0, 10));
    assert_eq!(b.read(0).0.len(), 10);
    b.expect(IGNORED);
    t.started("the reserved bit of an increment is ignored")
        .feed(window_update(1, 1 << 31 | 1))
        .feed(window_update(0, 1 << 31 | 1))
        .expect(IGNORED);
    // Section 4.2.
    t.started("a frame of 16,384 bytes is accepted")
        .feed(data(1, 0, 16_384))
        .feed(frame(0x42, 0, 1, &[0; 16_384]))
        .expect(IGNORED);
    t.started("DATA of 16,385 bytes ends the connection")
        .feed(data(1, 0, 16_385))
        .expect(SIZE);
    let mut b = t.started("HEADERS of 16,385 bytes end the connection");
    let payload = [0; 16_385];
    b.feed(frame(kind::HEADERS, flag::END_HEADERS, 1, &payload));
    b.expect(SIZE);
    t.idle("a header alone tells that a frame is too long")
        .feed([0xff, 0xff, 0xff, 0x42, 0, 0, 0, 0, 0])
        .expect(SIZE);
}

fn field_blocks(t: &Table) {
    // Section 4.3.
    t.started("a field outside of the tables ends the connection")
        .feed(headers_of(1, &[0xbe]))
        .expect(COMPRESSION);
    t.started("a block that ends within a field ends the connection")
        .feed(headers_of(1, &[0, 5, b'a']))
        .expect(COMPRESSION);
    t.started("a table above SETTINGS_HEADER_TABLE_SIZE ends the connection")
        .feed(headers_of(1, &[0x3f, 0xe2, 0x1f]))
        .expect(COMPRESSION);
    t.started("a table at SETTINGS_HEADER_TABLE_SIZE is accepted")
        .feed(headers_of(1, &[0x3f, 0xe1, 0x1f]))
        .expect(IGNORED);
    let mut b = t.started("a change of the table's size after a field ends the connection");
    let mut payload = block(&[("a", "b")]);
    payload.push(0x20);
    b.feed(headers_of(1, &payload));
    b.expect(COMPRESSION);
    t.cancelled("an invalid block on a stream that was reset ends the connection")
        .feed(headers_of(1, &[0xbe]))
        .expect(COMPRESSION);
    t.started("PRIORITY within a field block ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(priority(1, 0))
        .expect(PROTOCOL);
    t.started("PING within a field block ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(ping())
        .expect(PROTOCOL);
    t.started("an unknown frame within a field block ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(frame(0x42, 0, 1, &[]))
        .expect(PROTOCOL);
    t.started("HEADERS within a field block end the connection")
        .feed(begin_headers(1, &[]))
        .feed(headers(1, flag::END_STREAM, &[]))
        .expect(PROTOCOL);
    t.started("DATA within a field block ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(data(1, 0, 1))
        .expect(PROTOCOL);
    t.started("CONTINUATION of another stream ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(continuation(3, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
}

fn streams_that_are_not_open(t: &Table) {
    // Section 5.1, idle.
    t.idle("DATA on an idle stream ends the connection")
        .feed(data(9, 0, 1))
        .expect(PROTOCOL);
    t.idle("RST_STREAM on an idle stream ends the connection")
        .feed(reset(9, ErrorCode::CANCEL))
        .expect(PROTOCOL);
    t.idle("WINDOW_UPDATE on an idle stream ends the connection")
        .feed(window_update(9, 1))
        .expect(PROTOCOL);
    t.idle("CONTINUATION on an idle stream ends the connection")
        .feed(continuation(9, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    t.idle("PRIORITY on an idle stream is ignored")
        .feed(priority(9, 3))
        .expect(IGNORED);
    // Streams of servers do not exist: push is disabled.
    t.idle("DATA on an even stream ends the connection")
        .feed(data(2, 0, 1))
        .expect(PROTOCOL);
    t.idle("HEADERS on an even stream end the connection")
        .feed(headers(2, 0, &POST))
        .expect(PROTOCOL);
    t.idle("RST_STREAM on an even stream ends the connection")
        .feed(reset(2, ErrorCode::CANCEL))
        .expect(PROTOCOL);
    t.idle("WINDOW_UPDATE on an even stream ends the connection")
        .feed(window_update(2, 1))
        .expect(PROTOCOL);
}

fn streams_that_end(t: &Table) {
    // Section 5.1, half-closed (remote).
    t.half_closed("DATA after END_STREAM resets the stream")
        .feed(data(1, 0, 1))
        .expect(Expect::Reset(1, ErrorCode::STREAM_CLOSED));
    t.half_closed("HEADERS after END_STREAM reset the stream")
        .feed(headers(1, flag::END_STREAM, &[("a", "b")]))
        .expect(Expect::Reset(1, ErrorCode::STREAM_CLOSED));
    t.half_closed("CONTINUATION after END_STREAM ends the connection")
        .feed(continuation(1, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    t.half_closed("WINDOW_UPDATE, PRIORITY and RST_STREAM may follow END_STREAM")
        .feed(window_update(1, 1))
        .feed(priority(1, 0))
        .feed(reset(1, ErrorCode::CANCEL))
        .expect(IGNORED);
    // Section 5.1, closed.
    t.closed("DATA on a closed stream ends the connection")
        .feed(data(1, 0, 1))
        .expect(CLOSED);
    t.closed("HEADERS on a closed stream end the connection")
        .feed(headers(1, flag::END_STREAM, &[("a", "b")]))
        .expect(CLOSED);
    t.closed("CONTINUATION on a closed stream ends the connection")
        .feed(continuation(1, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    t.closed("WINDOW_UPDATE, PRIORITY and RST_STREAM on a closed stream are ignored")
        .feed(window_update(1, 1))
        .feed(priority(1, 0))
        .feed(reset(1, ErrorCode::CANCEL))
        .feed(reset(1, ErrorCode::CANCEL))
        .expect(IGNORED);
    t.started("DATA after the peer's own reset ends the connection")
        .feed(reset(1, ErrorCode::CANCEL))
        .drop_handles()
        .feed(data(1, 0, 1))
        .expect(CLOSED);
    t.started("HEADERS after the peer's own reset end the connection")
        .feed(reset(1, ErrorCode::CANCEL))
        .drop_handles()
        .feed(headers(1, flag::END_STREAM, &[]))
        .expect(CLOSED);
    t.started("WINDOW_UPDATE and RST_STREAM after the peer's own reset are ignored")
        .feed(reset(1, ErrorCode::CANCEL))
        .feed(window_update(1, 1))
        .drop_handles()
        .feed(window_update(1, 1))
        .feed(reset(1, ErrorCode::CANCEL))
        .feed(priority(1, 0))
        .expect(IGNORED);
    t.cancelled("frames after a reset are ignored while the stream has handles")
        .feed(data(1, 0, 1))
        .feed(window_update(1, MAX_31))
        .feed(headers(1, 0, &OK))
        .feed(data(1, flag::END_STREAM, 1))
        .feed(reset(1, ErrorCode::CANCEL))
        .expect(IGNORED);
    t.cancelled("frames after a reset are ignored when the stream has no handles")
        .drop_handles()
        .feed(data(1, 0, 1))
        .feed(window_update(1, MAX_31))
        .feed(headers(1, 0, &OK))
        .feed(data(1, flag::END_STREAM, 1))
        .feed(reset(1, ErrorCode::CANCEL))
        .expect(IGNORED);
}

fn frames_of_streams(t: &Table) {
    // Section 6.1.
    t.idle("DATA on the connection ends it")
        .feed(data(0, 0, 1))
        .expect(PROTOCOL);
    t.started("padding as long as the payload of DATA ends the connection")
        .feed(frame(kind::DATA, flag::PADDED, 1, &[3, 0, 0]))
        .expect(PROTOCOL);
    t.started("DATA with nothing but padding is accepted")
        .feed(padded_data(1, 0, 0, 255))
        .feed(padded_data(1, 0, 0, 0))
        .expect(IGNORED);
    // Section 6.2.
    t.idle("HEADERS on the connection end it")
        .feed(headers(0, 0, &POST))
        .expect(PROTOCOL);
    let mut b = t.started("padding longer than the payload of HEADERS ends the connection");
    let flags = flag::PADDED | flag::END_HEADERS | flag::END_STREAM;
    b.feed(frame(kind::HEADERS, flags, 1, &[3, 0, 0]));
    b.expect(PROTOCOL);
    let mut b = t.started("HEADERS too short for their priority end the connection");
    let flags = flag::PRIORITY | flag::END_HEADERS | flag::END_STREAM;
    b.feed(frame(kind::HEADERS, flags, 1, &[0; 4]));
    b.expect(SIZE);
    let mut b = t.started("HEADERS with padding and priority are accepted");
    let flags = flag::PADDED | flag::PRIORITY | flag::END_HEADERS | flag::END_STREAM;
    let payload = [&[4, 0, 0, 0, 0, 16][..], &block(&[("a", "b")]), &[0; 4]].concat();
    b.feed(frame(kind::HEADERS, flags, 1, &payload));
    b.expect(IGNORED);
    // Section 6.3.
    t.idle("PRIORITY on the connection ends it")
        .feed(priority(0, 1))
        .expect(PROTOCOL);
    t.started("PRIORITY of 4 bytes resets the stream")
        .feed(frame(kind::PRIORITY, 0, 1, &[0; 4]))
        .expect(Expect::Reset(1, ErrorCode::FRAME_SIZE_ERROR));
    t.idle("PRIORITY of 6 bytes on an idle stream ends the connection")
        .feed(frame(kind::PRIORITY, 0, 9, &[0; 6]))
        .expect(SIZE);
    t.started("a stream that depends on itself is reset")
        .feed(priority(1, 1))
        .expect(MALFORMED);
    // Section 6.4.
    t.idle("RST_STREAM on the connection ends it")
        .feed(reset(0, ErrorCode::CANCEL))
        .expect(PROTOCOL);
    t.started("RST_STREAM of 3 bytes ends the connection")
        .feed(frame(kind::RST_STREAM, 0, 1, &[0; 3]))
        .expect(SIZE);
    t.started("RST_STREAM of 5 bytes ends the connection")
        .feed(frame(kind::RST_STREAM, 0, 1, &[0; 5]))
        .expect(SIZE);
}

fn settings_frames(t: &Table) {
    // Section 6.5.
    t.idle("an acknowledgment with settings ends the connection")
        .feed(frame(kind::SETTINGS, flag::ACK, 0, &[0; 6]))
        .expect(SIZE);
    t.idle("an acknowledgment without SETTINGS ends the connection")
        .feed(settings_ack())
        .expect(PROTOCOL);
    t.idle("SETTINGS on a stream end the connection")
        .feed(frame(kind::SETTINGS, 0, 1, &[]))
        .expect(PROTOCOL);
    t.idle("SETTINGS of 5 bytes end the connection")
        .feed(frame(kind::SETTINGS, 0, 0, &[0; 5]))
        .expect(SIZE);
    t.idle("SETTINGS_ENABLE_PUSH of 2 ends the connection")
        .feed(settings(&[(setting::ENABLE_PUSH, 2)]))
        .expect(PROTOCOL);
    t.idle("SETTINGS_INITIAL_WINDOW_SIZE of 2^31 ends the connection")
        .feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 1 << 31)]))
        .expect(FLOW);
    t.idle("SETTINGS_MAX_FRAME_SIZE of 16,383 ends the connection")
        .feed(settings(&[(setting::MAX_FRAME_SIZE, 16_383)]))
        .expect(PROTOCOL);
    t.idle("SETTINGS_MAX_FRAME_SIZE of 2^24 ends the connection")
        .feed(settings(&[(setting::MAX_FRAME_SIZE, 1 << 24)]))
        .expect(PROTOCOL);
    t.idle("SETTINGS_ENABLE_CONNECT_PROTOCOL of 2 ends the connection")
        .feed(settings(&[(setting::ENABLE_CONNECT_PROTOCOL, 2)]))
        .expect(PROTOCOL);
    t.idle("a wrong value after others ends the connection")
        .feed(settings(&[
            (99, 1),
            (setting::MAX_FRAME_SIZE, 16_384),
            (setting::ENABLE_PUSH, 9),
        ]))
        .expect(PROTOCOL);
    let mut b = t.started("all right values are accepted, and unknown settings are ignored");
    b.feed(settings(&[
        (setting::HEADER_TABLE_SIZE, 0),
        (setting::HEADER_TABLE_SIZE, u32::MAX),
        (setting::ENABLE_PUSH, 0),
        (setting::MAX_CONCURRENT_STREAMS, 0),
        (setting::MAX_CONCURRENT_STREAMS, u32::MAX),
        (setting::INITIAL_WINDOW_SIZE, 0),
        (setting::INITIAL_WINDOW_SIZE, MAX_31),
        (setting::MAX_FRAME_SIZE, 16_384),
        (setting::MAX_FRAME_SIZE, (1 << 24) - 1),
        (setting::MAX_HEADER_LIST_SIZE, 0),
        (setting::ENABLE_CONNECT_PROTOCOL, 1),
        (0, u32::MAX),
        (0xffff, u32::MAX),
    ]));
    assert_eq!(of_kind(&b.frames, kind::SETTINGS, 0).count(), 1);
    b.expect(IGNORED);
}

fn other_frames(t: &Table) {
    // Section 6.6.
    let mut b = t.started("PUSH_PROMISE ends the connection");
    let payload = [&[0, 0, 0, 2][..], &block(&GET)].concat();
    b.feed(frame(kind::PUSH_PROMISE, flag::END_HEADERS, 1, &payload));
    b.expect(PROTOCOL);
    // Section 6.7.
    t.idle("PING on a stream ends the connection")
        .feed(frame(kind::PING, 0, 1, &[0; 8]))
        .expect(PROTOCOL);
    t.idle("PING of 7 bytes ends the connection")
        .feed(frame(kind::PING, 0, 0, &[0; 7]))
        .expect(SIZE);
    t.idle("an answer to PING of 9 bytes ends the connection")
        .feed(frame(kind::PING, flag::ACK, 0, &[0; 9]))
        .expect(SIZE);
    let mut b = t.idle("an answer to PING has no answer");
    b.feed(frame(kind::PING, flag::ACK, 0, &[0; 8]));
    assert_eq!(b.frames, []);
    b.expect(IGNORED);
    // Section 6.8.
    t.idle("GOAWAY on a stream ends the connection")
        .feed(frame(kind::GOAWAY, 0, 1, &[0; 8]))
        .expect(PROTOCOL);
    t.idle("GOAWAY of 7 bytes ends the connection")
        .feed(frame(kind::GOAWAY, 0, 0, &[0; 7]))
        .expect(SIZE);
    t.started("GOAWAY may have a text")
        .feed(frame(kind::GOAWAY, 0, 0, b"\0\0\0\x01\0\0\0\0good bye"))
        .expect(IGNORED);
}

fn windows(t: &Table) {
    // Section 6.9.
    t.idle("WINDOW_UPDATE of 3 bytes ends the connection")
        .feed(frame(kind::WINDOW_UPDATE, 0, 0, &[1; 3]))
        .expect(SIZE);
    t.idle("WINDOW_UPDATE of 5 bytes ends the connection")
        .feed(frame(kind::WINDOW_UPDATE, 0, 0, &[1; 5]))
        .expect(SIZE);
    t.idle("an increment of 0 for the connection ends it")
        .feed(window_update(0, 0))
        .expect(PROTOCOL);
    t.started("an increment of 0 for a stream resets it")
        .feed(window_update(1, 0))
        .expect(MALFORMED);
    t.idle("an increment makes the connection's window too large")
        .feed(window_update(0, MAX_31 - 65_535))
        .feed(window_update(0, 1))
        .expect(FLOW);
    t.started("an increment makes a stream's window too large")
        .feed(window_update(1, MAX_31 - 65_535))
        .feed(window_update(1, 1))
        .expect(Expect::Reset(1, ErrorCode::FLOW_CONTROL_ERROR));
    t.started("SETTINGS make a stream's window too large")
        .feed(window_update(1, MAX_31 - 65_535))
        .feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 65_536)]))
        .expect(FLOW);
    t.started("the largest windows are accepted")
        .feed(window_update(0, MAX_31 - 65_535))
        .feed(window_update(1, MAX_31 - 65_535))
        .feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 0)]))
        .feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 65_535)]))
        .expect(IGNORED);
    let mut b = t.started("DATA beyond a stream's window resets the stream");
    for _ in 0..3 {
        b.feed(data(1, 0, 16_384));
    }
    b.feed(data(1, 0, 16_383));
    assert_eq!(b.take(), []);
    b.feed(data(1, 0, 1));
    b.expect(Expect::Reset(1, ErrorCode::FLOW_CONTROL_ERROR));
    let mut b = t.started("padding beyond a stream's window resets the stream");
    for _ in 0..3 {
        b.feed(data(1, 0, 16_384));
    }
    b.feed(data(1, 0, 16_383 - 10));
    b.feed(padded_data(1, 0, 0, 10));
    b.expect(Expect::Reset(1, ErrorCode::FLOW_CONTROL_ERROR));
}

fn continuations(t: &Table) {
    // Section 6.10.
    t.idle("CONTINUATION on the connection ends it")
        .feed(continuation(0, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    t.started("CONTINUATION after a complete block ends the connection")
        .feed(headers(1, flag::END_STREAM, &[]))
        .feed(continuation(1, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    t.started("CONTINUATION after the last CONTINUATION ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(continuation(1, flag::END_HEADERS, &[]))
        .feed(continuation(1, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    t.started("CONTINUATION after DATA ends the connection")
        .feed(data(1, 0, 1))
        .feed(continuation(1, flag::END_HEADERS, &[]))
        .expect(PROTOCOL);
    let mut b = t.started("a block in pieces is accepted");
    let block = block(&[("a", "b")]);
    b.feed(begin_headers(1, &block[..1]));
    b.feed(continuation(1, 0, &block[1..3]));
    b.feed(continuation(1, 0, &block[3..]));
    b.feed(continuation(1, flag::END_HEADERS, &[]));
    assert_eq!(b.read(0).1, Some(Ok(())));
    b.expect(IGNORED);
    t.started("an empty CONTINUATION frame that ends nothing ends the connection")
        .feed(begin_headers(1, &[]))
        .feed(continuation(1, 0, &[]))
        .expect(Expect::Connection(ErrorCode::ENHANCE_YOUR_CALM));
}

fn trailers(t: &Table) {
    // Section 8.1.
    t.started("trailers without END_STREAM reset the stream")
        .feed(headers(1, 0, &[("a", "b")]))
        .expect(MALFORMED);
    t.started("a status in trailers resets the stream")
        .feed(headers(1, flag::END_STREAM, &OK))
        .expect(MALFORMED);
    t.started("a method in trailers resets the stream")
        .feed(headers(1, flag::END_STREAM, &[(":method", "GET")]))
        .expect(MALFORMED);
    t.started("an unknown pseudo-header field in trailers resets the stream")
        .feed(headers(1, flag::END_STREAM, &[(":a", "b")]))
        .expect(MALFORMED);
    t.started("a field of the connection in trailers resets the stream")
        .feed(headers(1, flag::END_STREAM, &CHUNKED))
        .expect(MALFORMED);
    t.started("a name with an uppercase letter in trailers resets the stream")
        .feed(headers(1, flag::END_STREAM, &[("A", "b")]))
        .expect(MALFORMED);
}
