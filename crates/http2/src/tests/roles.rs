//! Frames and messages that one role reacts to, by sections of RFC 9113.

use super::bench::*;
use super::cases::*;
use super::*;
use crate::frame::setting;

const INTERIM: [(&str, &str); 1] = [(":status", "103")];

#[test]
fn servers_react_to_clients_as_the_table_says() {
    let t = &Table::new(Role::Server);
    beginnings(t);
    streams_of_clients(t);
    bodies_of_clients(t);
    t.end();
}

fn beginnings(t: &Table) {
    // Section 3.4.
    t.bare("another protocol ends the connection")
        .feed("GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        .expect(PROTOCOL);
    t.bare("a preface with a wrong end ends the connection")
        .feed(&PREFACE[..23])
        .feed("\r")
        .expect(PROTOCOL);
    t.bare("a first frame other than SETTINGS ends the connection")
        .feed(PREFACE)
        .feed(ping())
        .expect(PROTOCOL);
    t.bare("an unknown first frame ends the connection")
        .feed(PREFACE)
        .feed(frame(0x42, 0, 0, &[]))
        .expect(PROTOCOL);
}

fn streams_of_clients(t: &Table) {
    // Section 5.1.1.
    t.idle("a smaller stream than an earlier one ends the connection")
        .feed(headers(5, flag::END_STREAM, &GET))
        .feed(headers(3, flag::END_STREAM, &GET))
        .expect(PROTOCOL);
    t.idle("streams may be skipped")
        .feed(headers(5, flag::END_STREAM, &GET))
        .feed(headers(101, flag::END_STREAM, &GET))
        .feed(headers(MAX_31, flag::END_STREAM, &GET))
        .expect(IGNORED);
    t.idle("DATA on a stream that was skipped resets it")
        .feed(headers(5, flag::END_STREAM, &GET))
        .feed(data(3, 0, 1))
        .expect(Expect::Reset(3, ErrorCode::STREAM_CLOSED));
    // Section 5.1.2.
    let mut b = t.idle("a stream above the limit is refused");
    for stream in 0..101 {
        b.feed(headers(2 * stream + 1, 0, &POST));
    }
    assert_eq!(b.streams.len(), 100);
    b.expect(Expect::Reset(201, ErrorCode::REFUSED_STREAM));
    let mut b = t.idle("frames on a refused stream are ignored");
    for stream in 0..101 {
        b.feed(headers(2 * stream + 1, 0, &POST));
    }
    b.take();
    b.feed(data(201, 0, 100));
    b.feed(window_update(201, 100));
    b.feed(headers(201, flag::END_STREAM, &[("a", "b")]));
    b.feed(reset(201, ErrorCode::CANCEL));
    b.expect(IGNORED);
    let mut b = t.idle("a place is free again after a reset");
    for stream in 0..100 {
        b.feed(headers(2 * stream + 1, 0, &POST));
    }
    b.feed(reset(7, ErrorCode::CANCEL));
    b.feed(headers(201, 0, &POST));
    b.expect(IGNORED);
    // Section 5.3.1 of RFC 7540.
    let mut b = t.idle("a request that depends on itself ends the connection");
    let payload = [&[0, 0, 0, 1, 16][..], &block(&GET)].concat();
    let flags = flag::PRIORITY | flag::END_HEADERS;
    b.feed(frame(kind::HEADERS, flags, 1, &payload));
    b.expect(PROTOCOL);
    // Section 6.5.2.
    t.idle("a client may enable push, which is not used")
        .feed(settings(&[(setting::ENABLE_PUSH, 1)]))
        .expect(IGNORED);
}

fn bodies_of_clients(t: &Table) {
    // Section 8.1.1.
    let mut b = t.idle("a body longer than Content-Length resets the stream");
    b.feed(headers(1, 0, &POST_10));
    b.feed(data(1, 0, 10));
    assert_eq!(b.frames, []);
    b.feed(data(1, flag::END_STREAM, 1));
    b.expect(MALFORMED);
    t.idle("a body shorter than Content-Length resets the stream")
        .feed(headers(1, 0, &POST_10))
        .feed(data(1, flag::END_STREAM, 9))
        .expect(MALFORMED);
    t.idle("trailers before the end of Content-Length reset the stream")
        .feed(headers(1, 0, &POST_10))
        .feed(data(1, 0, 9))
        .feed(headers(1, flag::END_STREAM, &[("a", "b")]))
        .expect(MALFORMED);
    t.idle("no body resets a stream with Content-Length")
        .feed(headers(1, flag::END_STREAM, &POST_10))
        .expect(MALFORMED);
    let mut b = t.idle("padding does not count for Content-Length");
    b.feed(headers(1, 0, &POST_10));
    b.feed(padded_data(1, 0, 4, 100));
    b.feed(padded_data(1, flag::END_STREAM, 6, 0));
    assert_eq!(b.read(0), (vec![b'd'; 10], Some(Ok(()))));
    b.expect(IGNORED);
}

#[test]
fn clients_react_to_servers_as_the_table_says() {
    let t = &Table::new(Role::Client);
    frames_of_servers(t);
    bodies_of_servers(t);
    t.end();
}

fn frames_of_servers(t: &Table) {
    t.bare("a first frame other than SETTINGS ends the connection")
        .feed(ping())
        .expect(PROTOCOL);
    t.bare("another protocol ends the connection")
        .feed("HTTP/1.1 400 Bad Request\r\n\r\n")
        .expect(SIZE);
    t.started("a response on an idle stream ends the connection")
        .feed(headers(3, 0, &OK))
        .expect(PROTOCOL);
    t.idle("a server that enables push ends the connection")
        .feed(settings(&[(setting::ENABLE_PUSH, 1)]))
        .expect(PROTOCOL);
    t.idle("DATA before the response resets the stream")
        .open("GET", true)
        .feed(data(1, 0, 1))
        .expect(MALFORMED);
    t.idle("DATA after an interim response resets the stream")
        .open("GET", true)
        .feed(headers(1, 0, &INTERIM))
        .feed(data(1, flag::END_STREAM, 1))
        .expect(MALFORMED);
    t.idle("an interim response with END_STREAM resets the stream")
        .open("GET", true)
        .feed(headers(1, flag::END_STREAM, &INTERIM))
        .expect(MALFORMED);
    t.idle("an interim response after the response resets the stream")
        .open("GET", true)
        .feed(headers(1, 0, &OK))
        .feed(headers(1, 0, &INTERIM))
        .expect(MALFORMED);
    t.idle("a second response resets the stream")
        .open("GET", true)
        .feed(headers(1, 0, &OK))
        .feed(headers(1, flag::END_STREAM, &OK))
        .expect(MALFORMED);
}

fn bodies_of_servers(t: &Table) {
    t.idle("a body longer than Content-Length resets the stream")
        .open("GET", true)
        .feed(headers(1, 0, &OK_10))
        .feed(data(1, 0, 11))
        .expect(MALFORMED);
    t.idle("a body shorter than Content-Length resets the stream")
        .open("GET", false)
        .feed(headers(1, 0, &OK_10))
        .feed(data(1, flag::END_STREAM, 9))
        .expect(MALFORMED);
    t.idle("no body resets a stream with Content-Length")
        .open("GET", false)
        .feed(headers(1, flag::END_STREAM, &OK_10))
        .expect(MALFORMED);
    let mut b = t.idle("a response to HEAD has Content-Length and no body");
    b.open("HEAD", true);
    b.feed(headers(1, flag::END_STREAM, &OK_10));
    assert_eq!(b.response(0), Some(Ok(200)));
    assert_eq!(b.read(0), (vec![], Some(Ok(()))));
    b.expect(IGNORED);
    let mut b = t.idle("a response to HEAD may end with empty DATA");
    b.open("HEAD", true);
    b.feed(headers(1, 0, &OK_10));
    b.feed(data(1, flag::END_STREAM, 0));
    assert_eq!(b.read(0), (vec![], Some(Ok(()))));
    b.expect(IGNORED);
    let mut b = t.idle("a response 304 has Content-Length and no body");
    b.open("GET", true);
    let fields = [(":status", "304"), ("content-length", "10")];
    b.feed(headers(1, flag::END_STREAM, &fields));
    assert_eq!(b.response(0), Some(Ok(304)));
    assert_eq!(b.read(0), (vec![], Some(Ok(()))));
    b.expect(IGNORED);
    t.idle("a body in a response to HEAD resets the stream")
        .open("HEAD", false)
        .feed(headers(1, 0, &OK_10))
        .feed(data(1, flag::END_STREAM, 10))
        .expect(MALFORMED);
    t.idle("a body in a response 304 resets the stream")
        .open("GET", false)
        .feed(headers(1, 0, &[(":status", "304")]))
        .feed(data(1, flag::END_STREAM, 10))
        .expect(MALFORMED);
    t.idle("a body in a response 204 resets the stream")
        .open("GET", false)
        .feed(headers(1, 0, &[(":status", "204")]))
        .feed(data(1, flag::END_STREAM, 10))
        .expect(MALFORMED);
}
