//! A peer that violates the protocol, floods, or ends connections, in both roles. The tables have
//! the reaction that RFC 9113 asks for, or allows.

use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use fastrand::Rng;
use http::Uri;

use super::*;
use crate::frame::setting;
use crate::hpack::{Decoder, Field};
use crate::{Connection, Error, Protocol, Receiver, Sender, Shared, Violation};

/// An engine, and what its peer has got of it.
struct Bench {
    role: Role,
    shared: Shared,
    streams: Vec<Stream>,
    frames: Vec<Frame>,
    result: Result<(), Violation>,
}

/// A stream with both handles.
struct Stream {
    request: request::Parts,
    is_cut: bool,
    sender: Sender,
    receiver: Receiver,
}

impl Bench {
    /// Nothing has arrived yet.
    fn bare(config: Config) -> Self {
        let mut bench = Self {
            role: config.role,
            shared: Shared::new(config),
            streams: Vec::new(),
            frames: Vec::new(),
            result: Ok(()),
        };
        if config.role == Role::Client {
            let preface = bench
                .shared
                .with(|connection| connection.output()[..24].to_vec());
            assert_eq!(preface, PREFACE);
            bench
                .shared
                .with(|connection| connection.record_written(24));
        }
        bench.flush();
        bench
    }

    /// The SETTINGS of both sides have arrived.
    fn with(config: Config) -> Self {
        let mut bench = Self::bare(config);
        if config.role == Role::Server {
            bench.feed(PREFACE);
        }
        bench.feed(settings(&[]));
        bench.feed(settings_ack());
        bench.frames.clear();
        bench
    }

    fn new(role: Role) -> Self {
        Self::with(config(role))
    }

    /// Takes what the peer sends, and accepts its streams.
    fn feed(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        match self.shared.with(|connection| connection.receive(bytes)) {
            Ok(length) => assert_eq!(length, bytes.len(), "incomplete frames"),
            Err(violation) => self.result = Err(violation),
        }
        self.accept();
        self.flush();
    }

    fn accept(&mut self) {
        while let Some(opened) = self.shared.accept() {
            self.streams.push(Stream {
                request: opened.request.message,
                is_cut: opened.request.is_cut,
                sender: opened.sender,
                receiver: opened.receiver,
            });
        }
    }

    /// Writes the output.
    fn flush(&mut self) {
        let frames = &mut self.frames;
        self.shared.with(|connection| {
            while !connection.output().is_empty() {
                let output = connection.output().to_vec();
                frames.extend(super::frames(&output));
                connection.record_written(output.len());
            }
        });
    }

    /// The frames that were written since the last call.
    fn take(&mut self) -> Vec<Frame> {
        self.flush();
        std::mem::take(&mut self.frames)
    }

    /// Opens a stream of a client. Returns its position.
    fn open(&mut self, method: &str, end_stream: bool) -> usize {
        let request = request(method, &[]);
        let (sender, receiver) = self.shared.open(&request, end_stream).expect("a stream");
        self.streams.push(Stream {
            request,
            is_cut: false,
            sender,
            receiver,
        });
        self.streams.len() - 1
    }

    /// Stream 1, on which both sides send bodies.
    fn start(&mut self) {
        match self.role {
            Role::Server => {
                self.feed(headers(1, 0, &POST));
                self.streams[0]
                    .sender
                    .respond(&response(200, &[]), false)
                    .expect("a response");
            }
            Role::Client => {
                self.open("POST", false);
                self.feed(headers(1, 0, &OK));
            }
        }
        self.take();
    }

    /// The peer ends stream 1.
    fn start_half(&mut self) {
        self.start();
        self.feed(data(1, flag::END_STREAM, 0));
    }

    /// Both sides have ended stream 1.
    fn finish(&mut self) {
        self.start_half();
        self.streams[0]
            .sender
            .send(Bytes::new(), true)
            .expect("an open stream");
        self.streams.clear();
        self.take();
    }

    /// This side has reset stream 1.
    fn cancel(&mut self) {
        self.start();
        self.streams[0].sender.reset(ErrorCode::CANCEL);
        self.take();
    }

    fn ended(&self) -> Option<Error> {
        self.shared.with(|connection| connection.ended().cloned())
    }

    fn open_streams(&self) -> u32 {
        self.shared.with(|connection| connection.open_streams())
    }

    /// Whether a PING frame is answered.
    fn is_alive(&mut self) -> bool {
        self.feed(ping());
        let answer = frames(&frame(kind::PING, flag::ACK, 0, b"12345678"));
        self.frames.last() == answer.first() && self.ended().is_none()
    }

    /// Reads a stream: the bytes, and how it ends.
    fn read(&self, at: usize) -> (Vec<u8>, Option<Result<(), Error>>) {
        let cx = &Context::from_waker(Waker::noop());
        let mut bytes = Vec::new();
        loop {
            match self.streams[at].receiver.poll_data(cx) {
                Poll::Pending => return (bytes, None),
                Poll::Ready(Some(Ok(data))) => bytes.extend_from_slice(&data),
                Poll::Ready(Some(Err(error))) => return (bytes, Some(Err(error))),
                Poll::Ready(None) => return (bytes, Some(Ok(()))),
            }
        }
    }

    /// Why a stream has ended early.
    fn error(&self, at: usize) -> Option<Error> {
        let cx = &Context::from_waker(Waker::noop());
        match self.streams[at].sender.poll_reset(cx) {
            Poll::Ready(error) => Some(error),
            Poll::Pending => None,
        }
    }

    /// The next response of a stream.
    fn response(&self, at: usize) -> Option<Result<u16, Error>> {
        let cx = &Context::from_waker(Waker::noop());
        match self.streams[at].receiver.poll_response(cx) {
            Poll::Ready(response) => {
                Some(response.map(|response| response.message.status.as_u16()))
            }
            Poll::Pending => None,
        }
    }
}

/// The sum of the windows that these frames give.
fn credit(frames: &[Frame], stream: u32) -> usize {
    let updates = frames
        .iter()
        .filter(|frame| frame.kind == kind::WINDOW_UPDATE && frame.stream == stream);
    updates.map(|frame| frame.number(0) as usize).sum()
}

/// The lengths of the DATA frames of a stream.
fn lengths(frames: &[Frame], stream: u32) -> Vec<usize> {
    let data = frames
        .iter()
        .filter(|frame| frame.kind == kind::DATA && frame.stream == stream);
    data.map(|frame| frame.payload.len()).collect()
}

/// The types of the frames that end a stream.
fn ends(frames: &[Frame], stream: u32) -> Vec<u8> {
    let is_end = |frame: &&Frame| {
        let is_message = matches!(frame.kind, kind::DATA | kind::HEADERS);
        is_message && frame.stream == stream && frame.has(flag::END_STREAM)
    };
    frames
        .iter()
        .filter(is_end)
        .map(|frame| frame.kind)
        .collect()
}

/// The streams that these frames reset, and the codes.
fn resets(frames: &[Frame]) -> Vec<(u32, ErrorCode)> {
    let resets = frames.iter().filter(|frame| frame.kind == kind::RST_STREAM);
    resets
        .map(|frame| (frame.stream, ErrorCode(frame.number(0))))
        .collect()
}

/// The last streams and the codes of the GOAWAY frames.
fn go_aways(frames: &[Frame]) -> Vec<(u32, ErrorCode)> {
    let frames = frames.iter().filter(|frame| frame.kind == kind::GOAWAY);
    frames
        .map(|frame| (frame.number(0), ErrorCode(frame.number(4))))
        .collect()
}

/// The reaction to a violation.
#[derive(Clone, Copy, Debug)]
enum Expect {
    /// The connection ends with this code.
    Connection(ErrorCode),
    /// The stream is reset with this code, and the connection goes on.
    Reset(u32, ErrorCode),
    /// The connection and all streams go on.
    Ignored,
}

/// A name, the acts of a peer, and the reaction.
type Case = (&'static str, fn(&mut Bench), Expect);

/// Why a case has not the expected reaction.
fn failure(role: Role, (name, act, expect): &Case) -> Option<String> {
    let mut bench = Bench::new(role);
    act(&mut bench);
    bench.flush();
    let (resets, go_aways) = (resets(&bench.frames), go_aways(&bench.frames));
    let result = bench.result;
    let is_right = match expect {
        Expect::Connection(code) => {
            let is_closed = go_aways.last().is_some_and(|(_, sent)| sent == code);
            let has_ended = matches!(bench.ended(), Some(Error::Violation(_)));
            let is_told = result.is_err_and(|violation| violation.code == *code);
            bench.frames.clear();
            bench.feed(ping());
            is_closed && has_ended && is_told && go_aways.len() == 1 && bench.frames.is_empty()
        }
        Expect::Reset(stream, code) => {
            let is_reset = resets == [(*stream, *code)];
            is_reset && go_aways.is_empty() && result.is_ok() && bench.is_alive()
        }
        Expect::Ignored => {
            let is_quiet = resets.is_empty() && go_aways.is_empty();
            is_quiet && result.is_ok() && bench.is_alive()
        }
    };
    let state = format!("{name} ({role:?}): {expect:?}, not {result:?} {resets:?} {go_aways:?}");
    (!is_right).then_some(state)
}

fn check(role: Role, cases: &[Case]) {
    let failures: Vec<_> = cases
        .iter()
        .filter_map(|case| failure(role, case))
        .collect();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

const PROTOCOL: Expect = Expect::Connection(ErrorCode::PROTOCOL_ERROR);
const SIZE: Expect = Expect::Connection(ErrorCode::FRAME_SIZE_ERROR);
const FLOW: Expect = Expect::Connection(ErrorCode::FLOW_CONTROL_ERROR);
const COMPRESSION: Expect = Expect::Connection(ErrorCode::COMPRESSION_ERROR);
const CLOSED: Expect = Expect::Connection(ErrorCode::STREAM_CLOSED);
const MALFORMED: Expect = Expect::Reset(1, ErrorCode::PROTOCOL_ERROR);

/// The same for both roles. Stream 1 is open, and its handles are held, after `start`.
const EITHER: &[Case] = &[
    // Section 4.1.
    (
        "frames of unknown types are ignored",
        |b| {
            b.start();
            b.feed(frame(0x42, 0xff, 0, &[0; 20]));
            b.feed(frame(0x42, 0xff, 1, &[0; 20]));
            b.feed(frame(0xff, 0xff, 77, &[]));
        },
        Expect::Ignored,
    ),
    (
        "unknown flags are ignored",
        |b| {
            b.start();
            b.feed(frame(kind::PING, 0xfe, 0, &[0; 8]));
            b.feed(frame(kind::SETTINGS, 0xfe, 0, &[]));
            b.feed(frame(kind::DATA, 0xf6, 1, &[0; 8]));
            b.feed(frame(kind::WINDOW_UPDATE, 0xff, 1, &[0, 0, 0, 1]));
        },
        Expect::Ignored,
    ),
    (
        "the reserved bit of a stream is ignored",
        |b| {
            b.start();
            b.feed(data(1 | 1 << 31, 0, 10));
            assert_eq!(b.read(0).0.len(), 10);
        },
        Expect::Ignored,
    ),
    (
        "the reserved bit of an increment is ignored",
        |b| {
            b.start();
            b.feed(window_update(1, 1 << 31 | 1));
            b.feed(window_update(0, 1 << 31 | 1));
        },
        Expect::Ignored,
    ),
    // Section 4.2.
    (
        "a frame of 16,384 bytes is accepted",
        |b| {
            b.start();
            b.feed(data(1, 0, 16_384));
            b.feed(frame(0x42, 0, 1, &[0; 16_384]));
        },
        Expect::Ignored,
    ),
    (
        "DATA of 16,385 bytes ends the connection",
        |b| {
            b.start();
            b.feed(data(1, 0, 16_385));
        },
        SIZE,
    ),
    (
        "HEADERS of 16,385 bytes end the connection",
        |b| {
            b.start();
            let payload = [0; 16_385];
            b.feed(frame(kind::HEADERS, flag::END_HEADERS, 1, &payload));
        },
        SIZE,
    ),
    (
        "a header alone tells that a frame is too long",
        |b| b.feed([0xff, 0xff, 0xff, 0x42, 0, 0, 0, 0, 0]),
        SIZE,
    ),
    // Section 4.3.
    (
        "a field outside of the tables ends the connection",
        |b| {
            b.start();
            b.feed(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                1,
                &[0xbe],
            ));
        },
        COMPRESSION,
    ),
    (
        "a block that ends within a field ends the connection",
        |b| {
            b.start();
            b.feed(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                1,
                &[0, 5, b'a'],
            ));
        },
        COMPRESSION,
    ),
    (
        "a table above SETTINGS_HEADER_TABLE_SIZE ends the connection",
        |b| {
            b.start();
            b.feed(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                1,
                &[0x3f, 0xe2, 0x1f],
            ));
        },
        COMPRESSION,
    ),
    (
        "a table at SETTINGS_HEADER_TABLE_SIZE is accepted",
        |b| {
            b.start();
            b.feed(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                1,
                &[0x3f, 0xe1, 0x1f],
            ));
        },
        Expect::Ignored,
    ),
    (
        "a change of the table's size after a field ends the connection",
        |b| {
            b.start();
            let mut payload = block(&[("a", "b")]);
            payload.push(0x20);
            b.feed(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                1,
                &payload,
            ));
        },
        COMPRESSION,
    ),
    (
        "an invalid block on a stream that was reset ends the connection",
        |b| {
            b.cancel();
            b.feed(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                1,
                &[0xbe],
            ));
        },
        COMPRESSION,
    ),
    (
        "PRIORITY within a field block ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(priority(1, 0));
        },
        PROTOCOL,
    ),
    (
        "PING within a field block ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(ping());
        },
        PROTOCOL,
    ),
    (
        "an unknown frame within a field block ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(frame(0x42, 0, 1, &[]));
        },
        PROTOCOL,
    ),
    (
        "HEADERS within a field block end the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(headers(1, flag::END_STREAM, &[]));
        },
        PROTOCOL,
    ),
    (
        "DATA within a field block ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(data(1, 0, 1));
        },
        PROTOCOL,
    ),
    (
        "CONTINUATION of another stream ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(continuation(3, flag::END_HEADERS, &[]));
        },
        PROTOCOL,
    ),
    // Section 5.1, idle.
    (
        "DATA on an idle stream ends the connection",
        |b| b.feed(data(9, 0, 1)),
        PROTOCOL,
    ),
    (
        "RST_STREAM on an idle stream ends the connection",
        |b| b.feed(reset(9, ErrorCode::CANCEL)),
        PROTOCOL,
    ),
    (
        "WINDOW_UPDATE on an idle stream ends the connection",
        |b| b.feed(window_update(9, 1)),
        PROTOCOL,
    ),
    (
        "CONTINUATION on an idle stream ends the connection",
        |b| b.feed(continuation(9, flag::END_HEADERS, &[])),
        PROTOCOL,
    ),
    (
        "PRIORITY on an idle stream is ignored",
        |b| b.feed(priority(9, 3)),
        Expect::Ignored,
    ),
    // Streams of servers do not exist: push is disabled.
    (
        "DATA on an even stream ends the connection",
        |b| b.feed(data(2, 0, 1)),
        PROTOCOL,
    ),
    (
        "HEADERS on an even stream end the connection",
        |b| b.feed(headers(2, 0, &POST)),
        PROTOCOL,
    ),
    (
        "RST_STREAM on an even stream ends the connection",
        |b| b.feed(reset(2, ErrorCode::CANCEL)),
        PROTOCOL,
    ),
    (
        "WINDOW_UPDATE on an even stream ends the connection",
        |b| b.feed(window_update(2, 1)),
        PROTOCOL,
    ),
    // Section 5.1, half-closed (remote).
    (
        "DATA after END_STREAM resets the stream",
        |b| {
            b.start_half();
            b.feed(data(1, 0, 1));
        },
        Expect::Reset(1, ErrorCode::STREAM_CLOSED),
    ),
    (
        "HEADERS after END_STREAM reset the stream",
        |b| {
            b.start_half();
            b.feed(headers(1, flag::END_STREAM, &[("a", "b")]));
        },
        Expect::Reset(1, ErrorCode::STREAM_CLOSED),
    ),
    (
        "CONTINUATION after END_STREAM ends the connection",
        |b| {
            b.start_half();
            b.feed(continuation(1, flag::END_HEADERS, &[]));
        },
        PROTOCOL,
    ),
    (
        "WINDOW_UPDATE, PRIORITY and RST_STREAM may follow END_STREAM",
        |b| {
            b.start_half();
            b.feed(window_update(1, 1));
            b.feed(priority(1, 0));
            b.feed(reset(1, ErrorCode::CANCEL));
        },
        Expect::Ignored,
    ),
    // Section 5.1, closed.
    (
        "DATA on a closed stream ends the connection",
        |b| {
            b.finish();
            b.feed(data(1, 0, 1));
        },
        CLOSED,
    ),
    (
        "HEADERS on a closed stream end the connection",
        |b| {
            b.finish();
            b.feed(headers(1, flag::END_STREAM, &[("a", "b")]));
        },
        CLOSED,
    ),
    (
        "CONTINUATION on a closed stream ends the connection",
        |b| {
            b.finish();
            b.feed(continuation(1, flag::END_HEADERS, &[]));
        },
        PROTOCOL,
    ),
    (
        "WINDOW_UPDATE, PRIORITY and RST_STREAM on a closed stream are ignored",
        |b| {
            b.finish();
            b.feed(window_update(1, 1));
            b.feed(priority(1, 0));
            b.feed(reset(1, ErrorCode::CANCEL));
            b.feed(reset(1, ErrorCode::CANCEL));
        },
        Expect::Ignored,
    ),
    (
        "DATA after the peer's own reset ends the connection",
        |b| {
            b.start();
            b.feed(reset(1, ErrorCode::CANCEL));
            b.streams.clear();
            b.feed(data(1, 0, 1));
        },
        CLOSED,
    ),
    (
        "HEADERS after the peer's own reset end the connection",
        |b| {
            b.start();
            b.feed(reset(1, ErrorCode::CANCEL));
            b.streams.clear();
            b.feed(headers(1, flag::END_STREAM, &[]));
        },
        CLOSED,
    ),
    (
        "WINDOW_UPDATE and RST_STREAM after the peer's own reset are ignored",
        |b| {
            b.start();
            b.feed(reset(1, ErrorCode::CANCEL));
            b.feed(window_update(1, 1));
            b.streams.clear();
            b.feed(window_update(1, 1));
            b.feed(reset(1, ErrorCode::CANCEL));
            b.feed(priority(1, 0));
        },
        Expect::Ignored,
    ),
    (
        "frames after a reset are ignored while the stream has handles",
        |b| {
            b.cancel();
            b.feed(data(1, 0, 1));
            b.feed(window_update(1, MAX_31));
            b.feed(headers(1, 0, &[(":status", "200")]));
            b.feed(data(1, flag::END_STREAM, 1));
            b.feed(reset(1, ErrorCode::CANCEL));
        },
        Expect::Ignored,
    ),
    (
        "frames after a reset are ignored when the stream has no handles",
        |b| {
            b.cancel();
            b.streams.clear();
            b.feed(data(1, 0, 1));
            b.feed(window_update(1, MAX_31));
            b.feed(headers(1, 0, &[(":status", "200")]));
            b.feed(data(1, flag::END_STREAM, 1));
            b.feed(reset(1, ErrorCode::CANCEL));
        },
        Expect::Ignored,
    ),
    // Section 6.1.
    (
        "DATA on the connection ends it",
        |b| b.feed(data(0, 0, 1)),
        PROTOCOL,
    ),
    (
        "padding as long as the payload of DATA ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::DATA, flag::PADDED, 1, &[3, 0, 0]));
        },
        PROTOCOL,
    ),
    (
        "DATA with nothing but padding is accepted",
        |b| {
            b.start();
            b.feed(padded_data(1, 0, 0, 255));
            b.feed(padded_data(1, 0, 0, 0));
        },
        Expect::Ignored,
    ),
    // Section 6.2.
    (
        "HEADERS on the connection end it",
        |b| b.feed(headers(0, 0, &POST)),
        PROTOCOL,
    ),
    (
        "padding longer than the payload of HEADERS ends the connection",
        |b| {
            b.start();
            let flags = flag::PADDED | flag::END_HEADERS | flag::END_STREAM;
            b.feed(frame(kind::HEADERS, flags, 1, &[3, 0, 0]));
        },
        PROTOCOL,
    ),
    (
        "HEADERS too short for their priority end the connection",
        |b| {
            b.start();
            let flags = flag::PRIORITY | flag::END_HEADERS | flag::END_STREAM;
            b.feed(frame(kind::HEADERS, flags, 1, &[0; 4]));
        },
        SIZE,
    ),
    (
        "HEADERS with padding and priority are accepted",
        |b| {
            b.start();
            let flags = flag::PADDED | flag::PRIORITY | flag::END_HEADERS | flag::END_STREAM;
            let payload = [&[4, 0, 0, 0, 0, 16][..], &block(&[("a", "b")]), &[0; 4]].concat();
            b.feed(frame(kind::HEADERS, flags, 1, &payload));
        },
        Expect::Ignored,
    ),
    // Section 6.3.
    (
        "PRIORITY on the connection ends it",
        |b| b.feed(priority(0, 1)),
        PROTOCOL,
    ),
    (
        "PRIORITY of 4 bytes resets the stream",
        |b| {
            b.start();
            b.feed(frame(kind::PRIORITY, 0, 1, &[0; 4]));
        },
        Expect::Reset(1, ErrorCode::FRAME_SIZE_ERROR),
    ),
    (
        "PRIORITY of 6 bytes on an idle stream ends the connection",
        |b| b.feed(frame(kind::PRIORITY, 0, 9, &[0; 6])),
        SIZE,
    ),
    (
        "a stream that depends on itself is reset",
        |b| {
            b.start();
            b.feed(priority(1, 1));
        },
        MALFORMED,
    ),
    // Section 6.4.
    (
        "RST_STREAM on the connection ends it",
        |b| b.feed(reset(0, ErrorCode::CANCEL)),
        PROTOCOL,
    ),
    (
        "RST_STREAM of 3 bytes ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::RST_STREAM, 0, 1, &[0; 3]));
        },
        SIZE,
    ),
    (
        "RST_STREAM of 5 bytes ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::RST_STREAM, 0, 1, &[0; 5]));
        },
        SIZE,
    ),
    // Section 6.5.
    (
        "an acknowledgment with settings ends the connection",
        |b| b.feed(frame(kind::SETTINGS, flag::ACK, 0, &[0; 6])),
        SIZE,
    ),
    (
        "an acknowledgment without SETTINGS ends the connection",
        |b| b.feed(settings_ack()),
        PROTOCOL,
    ),
    (
        "SETTINGS on a stream end the connection",
        |b| b.feed(frame(kind::SETTINGS, 0, 1, &[])),
        PROTOCOL,
    ),
    (
        "SETTINGS of 5 bytes end the connection",
        |b| b.feed(frame(kind::SETTINGS, 0, 0, &[0; 5])),
        SIZE,
    ),
    (
        "SETTINGS_ENABLE_PUSH of 2 ends the connection",
        |b| b.feed(settings(&[(setting::ENABLE_PUSH, 2)])),
        PROTOCOL,
    ),
    (
        "SETTINGS_INITIAL_WINDOW_SIZE of 2^31 ends the connection",
        |b| b.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 1 << 31)])),
        FLOW,
    ),
    (
        "SETTINGS_MAX_FRAME_SIZE of 16,383 ends the connection",
        |b| b.feed(settings(&[(setting::MAX_FRAME_SIZE, 16_383)])),
        PROTOCOL,
    ),
    (
        "SETTINGS_MAX_FRAME_SIZE of 2^24 ends the connection",
        |b| b.feed(settings(&[(setting::MAX_FRAME_SIZE, 1 << 24)])),
        PROTOCOL,
    ),
    (
        "SETTINGS_ENABLE_CONNECT_PROTOCOL of 2 ends the connection",
        |b| b.feed(settings(&[(setting::ENABLE_CONNECT_PROTOCOL, 2)])),
        PROTOCOL,
    ),
    (
        "a wrong value after others ends the connection",
        |b| {
            b.feed(settings(&[
                (99, 1),
                (setting::MAX_FRAME_SIZE, 16_384),
                (setting::ENABLE_PUSH, 9),
            ]))
        },
        PROTOCOL,
    ),
    (
        "all right values are accepted, and unknown settings are ignored",
        |b| {
            b.start();
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
            let acks = b
                .frames
                .iter()
                .filter(|frame| frame.kind == kind::SETTINGS)
                .count();
            assert_eq!(acks, 1);
        },
        Expect::Ignored,
    ),
    // Section 6.6.
    (
        "PUSH_PROMISE ends the connection",
        |b| {
            b.start();
            let payload = [&[0, 0, 0, 2][..], &block(&GET)].concat();
            b.feed(frame(kind::PUSH_PROMISE, flag::END_HEADERS, 1, &payload));
        },
        PROTOCOL,
    ),
    // Section 6.7.
    (
        "PING on a stream ends the connection",
        |b| b.feed(frame(kind::PING, 0, 1, &[0; 8])),
        PROTOCOL,
    ),
    (
        "PING of 7 bytes ends the connection",
        |b| b.feed(frame(kind::PING, 0, 0, &[0; 7])),
        SIZE,
    ),
    (
        "an answer to PING of 9 bytes ends the connection",
        |b| b.feed(frame(kind::PING, flag::ACK, 0, &[0; 9])),
        SIZE,
    ),
    (
        "an answer to PING has no answer",
        |b| {
            b.feed(frame(kind::PING, flag::ACK, 0, &[0; 8]));
            assert_eq!(b.frames, []);
        },
        Expect::Ignored,
    ),
    // Section 6.8.
    (
        "GOAWAY on a stream ends the connection",
        |b| b.feed(frame(kind::GOAWAY, 0, 1, &[0; 8])),
        PROTOCOL,
    ),
    (
        "GOAWAY of 7 bytes ends the connection",
        |b| b.feed(frame(kind::GOAWAY, 0, 0, &[0; 7])),
        SIZE,
    ),
    (
        "GOAWAY may have a text",
        |b| {
            b.start();
            b.feed(frame(kind::GOAWAY, 0, 0, b"\0\0\0\x01\0\0\0\0good bye"));
        },
        Expect::Ignored,
    ),
    // Section 6.9.
    (
        "WINDOW_UPDATE of 3 bytes ends the connection",
        |b| b.feed(frame(kind::WINDOW_UPDATE, 0, 0, &[1; 3])),
        SIZE,
    ),
    (
        "WINDOW_UPDATE of 5 bytes ends the connection",
        |b| b.feed(frame(kind::WINDOW_UPDATE, 0, 0, &[1; 5])),
        SIZE,
    ),
    (
        "an increment of 0 for the connection ends it",
        |b| b.feed(window_update(0, 0)),
        PROTOCOL,
    ),
    (
        "an increment of 0 for a stream resets it",
        |b| {
            b.start();
            b.feed(window_update(1, 0));
        },
        MALFORMED,
    ),
    (
        "an increment makes the connection's window too large",
        |b| {
            b.feed(window_update(0, MAX_31 - 65_535));
            b.feed(window_update(0, 1));
        },
        FLOW,
    ),
    (
        "an increment makes a stream's window too large",
        |b| {
            b.start();
            b.feed(window_update(1, MAX_31 - 65_535));
            b.feed(window_update(1, 1));
        },
        Expect::Reset(1, ErrorCode::FLOW_CONTROL_ERROR),
    ),
    (
        "SETTINGS make a stream's window too large",
        |b| {
            b.start();
            b.feed(window_update(1, MAX_31 - 65_535));
            b.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 65_536)]));
        },
        FLOW,
    ),
    (
        "the largest windows are accepted",
        |b| {
            b.start();
            b.feed(window_update(0, MAX_31 - 65_535));
            b.feed(window_update(1, MAX_31 - 65_535));
            b.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 0)]));
            b.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 65_535)]));
        },
        Expect::Ignored,
    ),
    (
        "DATA beyond a stream's window resets the stream",
        |b| {
            b.start();
            for _ in 0..3 {
                b.feed(data(1, 0, 16_384));
            }
            b.feed(data(1, 0, 16_383));
            assert_eq!(b.take(), []);
            b.feed(data(1, 0, 1));
        },
        Expect::Reset(1, ErrorCode::FLOW_CONTROL_ERROR),
    ),
    (
        "padding beyond a stream's window resets the stream",
        |b| {
            b.start();
            for _ in 0..3 {
                b.feed(data(1, 0, 16_384));
            }
            b.feed(data(1, 0, 16_383 - 10));
            b.feed(padded_data(1, 0, 0, 10));
        },
        Expect::Reset(1, ErrorCode::FLOW_CONTROL_ERROR),
    ),
    // Section 6.10.
    (
        "CONTINUATION on the connection ends it",
        |b| b.feed(continuation(0, flag::END_HEADERS, &[])),
        PROTOCOL,
    ),
    (
        "CONTINUATION after a complete block ends the connection",
        |b| {
            b.start();
            b.feed(headers(1, flag::END_STREAM, &[]));
            b.feed(continuation(1, flag::END_HEADERS, &[]));
        },
        PROTOCOL,
    ),
    (
        "CONTINUATION after the last CONTINUATION ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(continuation(1, flag::END_HEADERS, &[]));
            b.feed(continuation(1, flag::END_HEADERS, &[]));
        },
        PROTOCOL,
    ),
    (
        "CONTINUATION after DATA ends the connection",
        |b| {
            b.start();
            b.feed(data(1, 0, 1));
            b.feed(continuation(1, flag::END_HEADERS, &[]));
        },
        PROTOCOL,
    ),
    (
        "a block in pieces is accepted",
        |b| {
            b.start();
            let block = block(&[("a", "b")]);
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &block[..1]));
            b.feed(continuation(1, 0, &block[1..3]));
            b.feed(continuation(1, 0, &block[3..]));
            b.feed(continuation(1, flag::END_HEADERS, &[]));
            assert_eq!(b.read(0).1, Some(Ok(())));
        },
        Expect::Ignored,
    ),
    (
        "an empty CONTINUATION frame that ends nothing ends the connection",
        |b| {
            b.start();
            b.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
            b.feed(continuation(1, 0, &[]));
        },
        Expect::Connection(ErrorCode::ENHANCE_YOUR_CALM),
    ),
    // Section 8.1.
    (
        "trailers without END_STREAM reset the stream",
        |b| {
            b.start();
            b.feed(headers(1, 0, &[("a", "b")]));
        },
        MALFORMED,
    ),
    (
        "a status in trailers resets the stream",
        |b| {
            b.start();
            b.feed(headers(1, flag::END_STREAM, &OK));
        },
        MALFORMED,
    ),
    (
        "a method in trailers resets the stream",
        |b| {
            b.start();
            b.feed(headers(1, flag::END_STREAM, &[(":method", "GET")]));
        },
        MALFORMED,
    ),
    (
        "an unknown pseudo-header field in trailers resets the stream",
        |b| {
            b.start();
            b.feed(headers(1, flag::END_STREAM, &[(":a", "b")]));
        },
        MALFORMED,
    ),
    (
        "a field of the connection in trailers resets the stream",
        |b| {
            b.start();
            b.feed(headers(
                1,
                flag::END_STREAM,
                &[("transfer-encoding", "chunked")],
            ));
        },
        MALFORMED,
    ),
    (
        "a name with an uppercase letter in trailers resets the stream",
        |b| {
            b.start();
            b.feed(headers(1, flag::END_STREAM, &[("A", "b")]));
        },
        MALFORMED,
    ),
];

#[test]
fn both_roles_react_to_violations_as_the_table_says() {
    check(Role::Server, EITHER);
    check(Role::Client, EITHER);
}

#[test]
fn servers_react_to_clients_as_the_table_says() {
    let cases: &[Case] = &[
        // Section 3.4.
        (
            "another protocol ends the connection",
            |b| {
                *b = Bench::bare(config(Role::Server));
                b.frames.clear();
                b.feed("GET / HTTP/1.1\r\nhost: test\r\n\r\n");
            },
            PROTOCOL,
        ),
        (
            "a preface with a wrong end ends the connection",
            |b| {
                *b = Bench::bare(config(Role::Server));
                b.frames.clear();
                b.feed(&PREFACE[..23]);
                b.feed("\r");
            },
            PROTOCOL,
        ),
        (
            "a first frame other than SETTINGS ends the connection",
            |b| {
                *b = Bench::bare(config(Role::Server));
                b.frames.clear();
                b.feed(PREFACE);
                b.feed(ping());
            },
            PROTOCOL,
        ),
        (
            "an unknown first frame ends the connection",
            |b| {
                *b = Bench::bare(config(Role::Server));
                b.frames.clear();
                b.feed(PREFACE);
                b.feed(frame(0x42, 0, 0, &[]));
            },
            PROTOCOL,
        ),
        // Section 5.1.1.
        (
            "a smaller stream than an earlier one ends the connection",
            |b| {
                b.feed(headers(5, flag::END_STREAM, &GET));
                b.feed(headers(3, flag::END_STREAM, &GET));
            },
            PROTOCOL,
        ),
        (
            "streams may be skipped",
            |b| {
                b.feed(headers(5, flag::END_STREAM, &GET));
                b.feed(headers(101, flag::END_STREAM, &GET));
                b.feed(headers(MAX_31, flag::END_STREAM, &GET));
            },
            Expect::Ignored,
        ),
        (
            "DATA on a stream that was skipped resets it",
            |b| {
                b.feed(headers(5, flag::END_STREAM, &GET));
                b.feed(data(3, 0, 1));
            },
            Expect::Reset(3, ErrorCode::STREAM_CLOSED),
        ),
        // Section 5.1.2.
        (
            "a stream above the limit is refused",
            |b| {
                for stream in 0..101 {
                    b.feed(headers(2 * stream + 1, 0, &POST));
                }
                assert_eq!(b.streams.len(), 100);
            },
            Expect::Reset(201, ErrorCode::REFUSED_STREAM),
        ),
        (
            "frames on a refused stream are ignored",
            |b| {
                for stream in 0..101 {
                    b.feed(headers(2 * stream + 1, 0, &POST));
                }
                b.take();
                b.feed(data(201, 0, 100));
                b.feed(window_update(201, 100));
                b.feed(headers(201, flag::END_STREAM, &[("a", "b")]));
                b.feed(reset(201, ErrorCode::CANCEL));
            },
            Expect::Ignored,
        ),
        (
            "a place is free again after a reset",
            |b| {
                for stream in 0..100 {
                    b.feed(headers(2 * stream + 1, 0, &POST));
                }
                b.feed(reset(7, ErrorCode::CANCEL));
                b.feed(headers(201, 0, &POST));
            },
            Expect::Ignored,
        ),
        // Section 5.3.1 of RFC 7540.
        (
            "a request that depends on itself ends the connection",
            |b| {
                let payload = [&[0, 0, 0, 1, 16][..], &block(&GET)].concat();
                b.feed(frame(
                    kind::HEADERS,
                    flag::PRIORITY | flag::END_HEADERS,
                    1,
                    &payload,
                ));
            },
            PROTOCOL,
        ),
        // Section 6.5.2.
        (
            "a client may enable push, which is not used",
            |b| b.feed(settings(&[(setting::ENABLE_PUSH, 1)])),
            Expect::Ignored,
        ),
        // Section 8.1.1.
        (
            "a body longer than Content-Length resets the stream",
            |b| {
                b.feed(headers(
                    1,
                    0,
                    &[&POST[..], &[("content-length", "10")]].concat(),
                ));
                b.feed(data(1, 0, 10));
                assert_eq!(b.frames, []);
                b.feed(data(1, flag::END_STREAM, 1));
            },
            MALFORMED,
        ),
        (
            "a body shorter than Content-Length resets the stream",
            |b| {
                b.feed(headers(
                    1,
                    0,
                    &[&POST[..], &[("content-length", "10")]].concat(),
                ));
                b.feed(data(1, flag::END_STREAM, 9));
            },
            MALFORMED,
        ),
        (
            "trailers before the end of Content-Length reset the stream",
            |b| {
                b.feed(headers(
                    1,
                    0,
                    &[&POST[..], &[("content-length", "10")]].concat(),
                ));
                b.feed(data(1, 0, 9));
                b.feed(headers(1, flag::END_STREAM, &[("a", "b")]));
            },
            MALFORMED,
        ),
        (
            "no body resets a stream with Content-Length",
            |b| {
                b.feed(headers(
                    1,
                    flag::END_STREAM,
                    &[&POST[..], &[("content-length", "10")]].concat(),
                ))
            },
            MALFORMED,
        ),
        (
            "padding does not count for Content-Length",
            |b| {
                b.feed(headers(
                    1,
                    0,
                    &[&POST[..], &[("content-length", "10")]].concat(),
                ));
                b.feed(padded_data(1, 0, 4, 100));
                b.feed(padded_data(1, flag::END_STREAM, 6, 0));
                assert_eq!(b.read(0), (vec![b'd'; 10], Some(Ok(()))));
            },
            Expect::Ignored,
        ),
    ];
    check(Role::Server, cases);
}

#[test]
fn clients_react_to_servers_as_the_table_says() {
    let cases: &[Case] = &[
        (
            "a first frame other than SETTINGS ends the connection",
            |b| {
                *b = Bench::bare(config(Role::Client));
                b.frames.clear();
                b.feed(ping());
            },
            PROTOCOL,
        ),
        (
            "another protocol ends the connection",
            |b| {
                *b = Bench::bare(config(Role::Client));
                b.frames.clear();
                b.feed("HTTP/1.1 400 Bad Request\r\n\r\n");
            },
            SIZE,
        ),
        (
            "a response on an idle stream ends the connection",
            |b| {
                b.start();
                b.feed(headers(3, 0, &OK));
            },
            PROTOCOL,
        ),
        (
            "a server that enables push ends the connection",
            |b| b.feed(settings(&[(setting::ENABLE_PUSH, 1)])),
            PROTOCOL,
        ),
        (
            "DATA before the response resets the stream",
            |b| {
                b.open("GET", true);
                b.feed(data(1, 0, 1));
            },
            MALFORMED,
        ),
        (
            "DATA after an interim response resets the stream",
            |b| {
                b.open("GET", true);
                b.feed(headers(1, 0, &[(":status", "103")]));
                b.feed(data(1, flag::END_STREAM, 1));
            },
            MALFORMED,
        ),
        (
            "an interim response with END_STREAM resets the stream",
            |b| {
                b.open("GET", true);
                b.feed(headers(1, flag::END_STREAM, &[(":status", "103")]));
            },
            MALFORMED,
        ),
        (
            "an interim response after the response resets the stream",
            |b| {
                b.open("GET", true);
                b.feed(headers(1, 0, &OK));
                b.feed(headers(1, 0, &[(":status", "103")]));
            },
            MALFORMED,
        ),
        (
            "a second response resets the stream",
            |b| {
                b.open("GET", true);
                b.feed(headers(1, 0, &OK));
                b.feed(headers(1, flag::END_STREAM, &OK));
            },
            MALFORMED,
        ),
        (
            "a body longer than Content-Length resets the stream",
            |b| {
                b.open("GET", true);
                b.feed(headers(
                    1,
                    0,
                    &[(":status", "200"), ("content-length", "10")],
                ));
                b.feed(data(1, 0, 11));
            },
            MALFORMED,
        ),
        (
            "a body shorter than Content-Length resets the stream",
            |b| {
                b.open("GET", false);
                b.feed(headers(
                    1,
                    0,
                    &[(":status", "200"), ("content-length", "10")],
                ));
                b.feed(data(1, flag::END_STREAM, 9));
            },
            MALFORMED,
        ),
        (
            "no body resets a stream with Content-Length",
            |b| {
                b.open("GET", false);
                b.feed(headers(
                    1,
                    flag::END_STREAM,
                    &[(":status", "200"), ("content-length", "10")],
                ));
            },
            MALFORMED,
        ),
        (
            "a response to HEAD has Content-Length and no body",
            |b| {
                b.open("HEAD", true);
                b.feed(headers(
                    1,
                    flag::END_STREAM,
                    &[(":status", "200"), ("content-length", "10")],
                ));
                assert_eq!(b.response(0), Some(Ok(200)));
                assert_eq!(b.read(0), (vec![], Some(Ok(()))));
            },
            Expect::Ignored,
        ),
        (
            "a response to HEAD may end with empty DATA",
            |b| {
                b.open("HEAD", true);
                b.feed(headers(
                    1,
                    0,
                    &[(":status", "200"), ("content-length", "10")],
                ));
                b.feed(data(1, flag::END_STREAM, 0));
                assert_eq!(b.read(0), (vec![], Some(Ok(()))));
            },
            Expect::Ignored,
        ),
        (
            "a response 304 has Content-Length and no body",
            |b| {
                b.open("GET", true);
                b.feed(headers(
                    1,
                    flag::END_STREAM,
                    &[(":status", "304"), ("content-length", "10")],
                ));
                assert_eq!(b.response(0), Some(Ok(304)));
                assert_eq!(b.read(0), (vec![], Some(Ok(()))));
            },
            Expect::Ignored,
        ),
        (
            "a body in a response to HEAD resets the stream",
            |b| {
                b.open("HEAD", false);
                b.feed(headers(
                    1,
                    0,
                    &[(":status", "200"), ("content-length", "10")],
                ));
                b.feed(data(1, flag::END_STREAM, 10));
            },
            MALFORMED,
        ),
        (
            "a body in a response 304 resets the stream",
            |b| {
                b.open("GET", false);
                b.feed(headers(1, 0, &[(":status", "304")]));
                b.feed(data(1, flag::END_STREAM, 10));
            },
            MALFORMED,
        ),
        (
            "a body in a response 204 resets the stream",
            |b| {
                b.open("GET", false);
                b.feed(headers(1, 0, &[(":status", "204")]));
                b.feed(data(1, flag::END_STREAM, 10));
            },
            MALFORMED,
        ),
    ];
    check(Role::Client, cases);
}

/// Fails unless each of these messages has the expected reaction, or one of them has no reaction.
fn check_messages(role: Role, messages: &[(&str, &[(&str, &str)])], expect: Expect) {
    let mut failures = Vec::new();
    for (name, fields) in messages {
        let mut bench = Bench::new(role);
        if role == Role::Client {
            bench.open("GET", false);
        }
        bench.take();
        bench.feed(headers(1, flag::END_STREAM, fields));
        let resets = resets(&bench.take());
        let expected = match expect {
            Expect::Reset(stream, code) => vec![(stream, code)],
            _ => vec![],
        };
        if resets != expected || bench.result.is_err() || !bench.is_alive() {
            failures.push(format!("{name}: {resets:?}"));
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

const METHOD: (&str, &str) = (":method", "GET");
const SCHEME: (&str, &str) = (":scheme", "http");
const PATH: (&str, &str) = (":path", "/");
const AUTHORITY: (&str, &str) = (":authority", "test");
const CONNECT: (&str, &str) = (":method", "CONNECT");

#[test]
fn malformed_requests_are_reset() {
    let messages: &[(&str, &[(&str, &str)])] = &[
        ("nothing", &[]),
        ("no method", &[SCHEME, PATH, AUTHORITY]),
        ("no scheme", &[METHOD, PATH, AUTHORITY]),
        ("no path", &[METHOD, SCHEME, AUTHORITY]),
        ("an empty path", &[METHOD, SCHEME, (":path", ""), AUTHORITY]),
        (
            "a path without a slash",
            &[METHOD, SCHEME, (":path", "a"), AUTHORITY],
        ),
        (
            "a query without a path",
            &[METHOD, SCHEME, (":path", "?a"), AUTHORITY],
        ),
        (
            "a URI as the path",
            &[METHOD, SCHEME, (":path", "http://a/"), AUTHORITY],
        ),
        (
            "a path with a fragment",
            &[METHOD, SCHEME, (":path", "/#a"), AUTHORITY],
        ),
        (
            "a path with a space",
            &[METHOD, SCHEME, (":path", "/ HTTP/1.1"), AUTHORITY],
        ),
        (
            "an authority with a space",
            &[METHOD, SCHEME, PATH, (":authority", "a b")],
        ),
        (
            "an authority with a path",
            &[METHOD, SCHEME, PATH, (":authority", "a/b")],
        ),
        (
            "an empty method",
            &[(":method", ""), SCHEME, PATH, AUTHORITY],
        ),
        (
            "a method with a space",
            &[(":method", "GET /"), SCHEME, PATH, AUTHORITY],
        ),
        (
            "a method with a line break",
            &[(":method", "GET\r\n"), SCHEME, PATH, AUTHORITY],
        ),
        (
            "an empty scheme",
            &[METHOD, (":scheme", ""), PATH, AUTHORITY],
        ),
        (
            "a scheme with a colon",
            &[METHOD, (":scheme", "http:"), PATH, AUTHORITY],
        ),
        ("two methods", &[METHOD, METHOD, SCHEME, PATH, AUTHORITY]),
        ("two schemes", &[METHOD, SCHEME, SCHEME, PATH, AUTHORITY]),
        ("two paths", &[METHOD, SCHEME, PATH, PATH, AUTHORITY]),
        (
            "two authorities",
            &[METHOD, SCHEME, PATH, AUTHORITY, AUTHORITY],
        ),
        (
            "a status",
            &[METHOD, SCHEME, PATH, AUTHORITY, (":status", "200")],
        ),
        (
            "an unknown pseudo-header field",
            &[METHOD, SCHEME, PATH, AUTHORITY, (":a", "b")],
        ),
        (
            "a pseudo-header field after others",
            &[METHOD, SCHEME, PATH, ("a", "b"), AUTHORITY],
        ),
        ("an uppercase name", &[METHOD, SCHEME, PATH, ("A", "b")]),
        ("an empty name", &[METHOD, SCHEME, PATH, ("", "b")]),
        ("a name with a space", &[METHOD, SCHEME, PATH, ("a b", "c")]),
        ("a name with a colon", &[METHOD, SCHEME, PATH, ("a:", "b")]),
        (
            "a name with a line break",
            &[METHOD, SCHEME, PATH, ("a\r\nb", "c")],
        ),
        ("a name with a zero", &[METHOD, SCHEME, PATH, ("a\0", "b")]),
        (
            "a value with a line break",
            &[METHOD, SCHEME, PATH, ("a", "b\r\nc: d")],
        ),
        (
            "a value with a line feed",
            &[METHOD, SCHEME, PATH, ("a", "b\nc")],
        ),
        (
            "a value with a carriage return",
            &[METHOD, SCHEME, PATH, ("a", "b\rc")],
        ),
        (
            "a value with a zero",
            &[METHOD, SCHEME, PATH, ("a", "b\0c")],
        ),
        (
            "a value after a space",
            &[METHOD, SCHEME, PATH, ("a", " b")],
        ),
        (
            "a value before a space",
            &[METHOD, SCHEME, PATH, ("a", "b ")],
        ),
        (
            "a value before a tab",
            &[METHOD, SCHEME, PATH, ("a", "b\t")],
        ),
        (
            "connection",
            &[METHOD, SCHEME, PATH, ("connection", "close")],
        ),
        ("keep-alive", &[METHOD, SCHEME, PATH, ("keep-alive", "1")]),
        (
            "proxy-connection",
            &[METHOD, SCHEME, PATH, ("proxy-connection", "close")],
        ),
        (
            "transfer-encoding",
            &[METHOD, SCHEME, PATH, ("transfer-encoding", "chunked")],
        ),
        ("upgrade", &[METHOD, SCHEME, PATH, ("upgrade", "websocket")]),
        (
            "te other than trailers",
            &[METHOD, SCHEME, PATH, ("te", "gzip")],
        ),
        (
            "te with trailers and others",
            &[METHOD, SCHEME, PATH, ("te", "trailers, gzip")],
        ),
        (
            "no number",
            &[METHOD, SCHEME, PATH, ("content-length", "a")],
        ),
        (
            "a number with a sign",
            &[METHOD, SCHEME, PATH, ("content-length", "+0")],
        ),
        (
            "a negative number",
            &[METHOD, SCHEME, PATH, ("content-length", "-1")],
        ),
        (
            "an empty number",
            &[METHOD, SCHEME, PATH, ("content-length", "")],
        ),
        (
            "two numbers",
            &[METHOD, SCHEME, PATH, ("content-length", "0, 0")],
        ),
        (
            "a number of 65 bits",
            &[
                METHOD,
                SCHEME,
                PATH,
                ("content-length", "18446744073709551616"),
            ],
        ),
        (
            "numbers that differ",
            &[
                METHOD,
                SCHEME,
                PATH,
                ("content-length", "0"),
                ("content-length", "1"),
            ],
        ),
        ("CONNECT with a path", &[CONNECT, PATH, AUTHORITY]),
        ("CONNECT with a scheme", &[CONNECT, SCHEME, AUTHORITY]),
        ("CONNECT without an authority", &[CONNECT]),
        (
            "CONNECT with a protocol, which is disabled",
            &[CONNECT, SCHEME, PATH, AUTHORITY, (":protocol", "websocket")],
        ),
    ];
    check_messages(Role::Server, messages, MALFORMED);
}

#[test]
fn unusual_requests_are_accepted() {
    let messages: &[(&str, &[(&str, &str)])] = &[
        ("no authority", &[METHOD, SCHEME, PATH]),
        (
            "pseudo-header fields in another order",
            &[PATH, AUTHORITY, SCHEME, METHOD],
        ),
        (
            "all resources",
            &[(":method", "OPTIONS"), SCHEME, (":path", "*"), AUTHORITY],
        ),
        (
            "an unknown method",
            &[(":method", "A-B"), SCHEME, PATH, AUTHORITY],
        ),
        (
            "an unknown scheme",
            &[METHOD, (":scheme", "coap+tcp"), PATH, AUTHORITY],
        ),
        ("CONNECT", &[CONNECT, (":authority", "test:443")]),
        ("te", &[METHOD, SCHEME, PATH, ("te", "trailers")]),
        ("an empty value", &[METHOD, SCHEME, PATH, ("a", "")]),
        (
            "a value with a space and a tab",
            &[METHOD, SCHEME, PATH, ("a", "b \tc")],
        ),
        (
            "a value beyond ASCII",
            &[METHOD, SCHEME, PATH, ("a", "\u{fc}")],
        ),
        ("no bytes", &[METHOD, SCHEME, PATH, ("content-length", "0")]),
        (
            "equal numbers",
            &[
                METHOD,
                SCHEME,
                PATH,
                ("content-length", "0"),
                ("content-length", "0"),
            ],
        ),
        (
            "several cookies",
            &[METHOD, SCHEME, PATH, ("cookie", "a=b"), ("cookie", "c=d")],
        ),
    ];
    check_messages(Role::Server, messages, Expect::Ignored);
}

#[test]
fn malformed_responses_are_reset() {
    let messages: &[(&str, &[(&str, &str)])] = &[
        ("no status", &[("a", "b")]),
        ("an empty status", &[(":status", "")]),
        ("a status of two digits", &[(":status", "20")]),
        ("a status of four digits", &[(":status", "2000")]),
        ("a status below 100", &[(":status", "099")]),
        ("a status with a text", &[(":status", "200 OK")]),
        ("two statuses", &[(":status", "200"), (":status", "200")]),
        ("a status after others", &[("a", "b"), (":status", "200")]),
        (
            "an unknown pseudo-header field",
            &[(":status", "200"), (":a", "b")],
        ),
        ("a method", &[(":status", "200"), METHOD]),
        ("a scheme", &[(":status", "200"), SCHEME]),
        ("a path", &[(":status", "200"), PATH]),
        ("an authority", &[(":status", "200"), AUTHORITY]),
        (
            "a protocol",
            &[(":status", "200"), (":protocol", "websocket")],
        ),
        ("status 101", &[(":status", "101")]),
        ("an uppercase name", &[(":status", "200"), ("A", "b")]),
        (
            "a value with a line break",
            &[(":status", "200"), ("a", "b\r\nc: d")],
        ),
        ("connection", &[(":status", "200"), ("connection", "close")]),
        (
            "transfer-encoding",
            &[(":status", "200"), ("transfer-encoding", "chunked")],
        ),
        ("upgrade", &[(":status", "200"), ("upgrade", "websocket")]),
        ("no number", &[(":status", "200"), ("content-length", "a")]),
        (
            "numbers that differ",
            &[
                (":status", "200"),
                ("content-length", "0"),
                ("content-length", "1"),
            ],
        ),
    ];
    check_messages(Role::Client, messages, MALFORMED);
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
    let mut bytes = frame(kind::HEADERS, flag::END_STREAM, 1, first);
    for piece in pieces {
        bytes.extend(continuation(1, 0, piece));
    }
    bytes.extend(continuation(1, flag::END_HEADERS, &[]));
    bytes
}

#[test]
fn a_field_block_has_a_maximum_size() {
    let max = config(Role::Server).max_block;
    let mut bench = Bench::new(Role::Server);
    bench.feed(large_block(&GET, max - 100));
    assert_eq!((bench.result, bench.streams.len()), (Ok(()), 1));
    assert!(bench.streams[0].is_cut);
    let mut bench = Bench::new(Role::Server);
    bench.feed(large_block(&GET, max + 1));
    assert_eq!(
        bench.ended().and_then(|error| error.code()),
        Some(ErrorCode::ENHANCE_YOUR_CALM)
    );
    assert_eq!(bench.streams.len(), 0);
}

/// The headers of the frames count: otherwise a block of frames with one byte is ten times as long.
#[test]
fn small_continuation_frames_count_with_their_headers() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(frame(kind::HEADERS, flag::END_STREAM, 1, &[]));
    let piece = continuation(1, 0, &[0]);
    let count = config(Role::Server).max_block / piece.len();
    bench.feed(piece.repeat(count - 1));
    assert_eq!(bench.result, Ok(()));
    bench.feed(piece.repeat(2));
    assert_eq!(
        bench.ended().and_then(|error| error.code()),
        Some(ErrorCode::ENHANCE_YOUR_CALM)
    );
}

/// An entry for the dynamic table, and the field that refers to the last entry.
const INSERT: u8 = 0x40;
const LAST: u8 = 0x80 | 62;

#[test]
fn fields_over_the_limit_are_dropped_and_the_table_stays_in_step() {
    let mut bench = Bench::with(Config {
        max_fields: 1000,
        ..config(Role::Server)
    });
    let mut large = block(&GET);
    literal(0, "large", &"v".repeat(1000), &mut large);
    literal(0, "dropped", "a", &mut large);
    literal(INSERT, "kept", "in the table", &mut large);
    literal(0, "dropped", "b", &mut large);
    bench.feed(frame(
        kind::HEADERS,
        flag::END_HEADERS | flag::END_STREAM,
        1,
        &large,
    ));
    let Stream {
        request, is_cut, ..
    } = &bench.streams[0];
    assert!(is_cut);
    assert_eq!(request.headers.keys().collect::<Vec<_>>(), ["large"]);
    let mut next = block(&GET);
    next.push(LAST);
    bench.feed(frame(
        kind::HEADERS,
        flag::END_HEADERS | flag::END_STREAM,
        3,
        &next,
    ));
    let Stream {
        request, is_cut, ..
    } = &bench.streams[1];
    assert!(!is_cut);
    assert_eq!(request.headers["kept"], "in the table");
    // Trailers have the same limit.
    bench.feed(headers(5, 0, &POST));
    let value = "v".repeat(1000);
    bench.feed(headers(
        5,
        flag::END_STREAM,
        &[("large", &value), ("dropped", "a")],
    ));
    let trailers = bench.streams[2]
        .receiver
        .poll_trailers(&Context::from_waker(Waker::noop()));
    let Poll::Ready(Ok(Some(trailers))) = trailers else {
        panic!("no trailers: {trailers:?}");
    };
    assert!(trailers.is_cut);
    assert!(!trailers.message.contains_key("dropped"));
    assert!(bench.is_alive());
}

/// Blocks that insert one field: of requests that are refused, malformed, late, or follow the end.
#[test]
fn the_table_stays_in_step_whatever_becomes_of_a_stream() {
    let mut bench = Bench::with(Config {
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
    assert_eq!(
        resets(&bench.take()).last(),
        Some(&(15, ErrorCode::REFUSED_STREAM))
    );
    bench.streams.clear();
    check_last(&mut bench, 17, "3");
    bench.shared.with(Connection::drain);
    let ping = drain_ping(&bench.take());
    bench.feed(headers(19, 0, &POST));
    bench.feed(frame(kind::PING, flag::ACK, 0, &ping));
    bench.feed(insert(&POST, 0, 21));
    bench.feed(frame(
        kind::HEADERS,
        flag::END_HEADERS | flag::END_STREAM,
        19,
        &[LAST],
    ));
    let trailers = bench.streams[0]
        .receiver
        .poll_trailers(&Context::from_waker(Waker::noop()));
    let Poll::Ready(Ok(Some(trailers))) = trailers else {
        panic!("no trailers: {trailers:?}");
    };
    assert_eq!(trailers.message["count"], "4");
}

/// Sends a request with the last field of the table.
fn check_last(bench: &mut Bench, id: u32, value: &str) {
    let mut block = block(&POST);
    block.push(LAST);
    bench.feed(frame(
        kind::HEADERS,
        flag::END_HEADERS | flag::END_STREAM,
        id,
        &block,
    ));
    let stream = bench.streams.pop().expect("a stream");
    assert_eq!(stream.request.headers["count"], value);
}

#[test]
fn a_reset_stream_gives_the_window_of_the_connection_back() {
    for role in [Role::Server, Role::Client] {
        for has_handles in [true, false] {
            let mut bench = Bench::with(Config {
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
            assert!(
                (200_000 - 32_767..=200_000).contains(&credit),
                "{credit} bytes"
            );
            assert!(frames.iter().all(|frame| frame.stream == 0));
        }
    }
}

#[test]
fn every_byte_of_data_gives_the_window_of_the_connection_back() {
    let mut bench = Bench::with(Config {
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
    assert!(
        (sent - 32_767..=sent).contains(&credit),
        "{credit} of {sent} bytes"
    );
}

#[test]
fn padding_gives_both_windows_back() {
    for role in [Role::Server, Role::Client] {
        let mut bench = Bench::with(Config {
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
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 0)]));
    bench.feed(headers(1, flag::END_STREAM, &GET));
    let sender = &bench.streams[0].sender;
    sender
        .respond(&response(200, &[]), false)
        .expect("a response");
    sender
        .send(Bytes::from_static(b"0123456789"), true)
        .expect("bytes");
    assert_eq!(lengths(&bench.take(), 1), []);
    bench.feed(window_update(1, 3));
    assert_eq!(lengths(&bench.take(), 1), [3]);
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 5)]));
    assert_eq!(lengths(&bench.take(), 1), [5]);
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 0)]));
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
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 2)]));
    bench.feed(headers(3, flag::END_STREAM, &GET));
    let sender = &bench.streams[1].sender;
    sender
        .respond(&response(200, &[]), false)
        .expect("a response");
    sender
        .send(Bytes::from_static(b"0123456789"), true)
        .expect("bytes");
    assert_eq!(lengths(&bench.take(), 3), [2]);
}

#[test]
fn bodies_respect_the_window_of_the_connection_and_take_turns() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, MAX_31)]));
    for stream in [1, 3, 5] {
        bench.feed(headers(stream, flag::END_STREAM, &GET));
        let sender = &bench.streams.last().expect("a stream").sender;
        sender
            .respond(&response(200, &[]), false)
            .expect("a response");
        sender.send(vec![0; 100_000].into(), true).expect("bytes");
    }
    let frames = bench.take();
    let sent: usize = [1, 3, 5]
        .iter()
        .flat_map(|stream| lengths(&frames, *stream))
        .sum();
    assert_eq!(sent, 65_535);
    bench.feed(window_update(0, 3 * 16_384));
    let frames = bench.take();
    for stream in [1, 3, 5] {
        assert_eq!(lengths(&frames, stream), [16_384]);
    }
    bench.feed(window_update(0, MAX_31));
    let frames = bench.take();
    let ends = frames
        .iter()
        .filter(|frame| frame.has(flag::END_STREAM))
        .count();
    assert_eq!((ends, bench.open_streams()), (3, 0));
}

/// Stream 1 has taken the window of the connection, or the output is full: the ends of other streams
/// need neither, do not wait, and never get lost.
#[test]
fn the_end_of_a_message_is_sent_while_other_streams_wait() {
    for max_output in [1000, 1 << 20] {
        let mut bench = Bench::with(Config {
            max_output,
            ..config(Role::Server)
        });
        bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, MAX_31)]));
        for stream in [1, 3, 5, 7] {
            bench.feed(headers(stream, flag::END_STREAM, &GET));
            let sender = &bench.streams.last().expect("a stream").sender;
            sender
                .respond(&response(200, &[]), false)
                .expect("a response");
        }
        bench.take();
        let senders = || bench.streams.iter().map(|stream| &stream.sender);
        let [first, second, third, fourth] = senders().collect::<Vec<_>>()[..] else {
            panic!("four streams");
        };
        first.send(vec![0; 100_000].into(), true).expect("bytes");
        assert!(first.pending() > 0);
        second
            .send_trailers(fields_of(&[("a", "b")]))
            .expect("trailers");
        third.send(Bytes::new(), true).expect("an end");
        fourth.send(Bytes::from_static(b"x"), false).expect("bytes");
        fourth
            .send_trailers(fields_of(&[("a", "b")]))
            .expect("trailers");
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
    let mut bench = Bench::with(Config {
        max_output: 1000,
        ..config(Role::Server)
    });
    bench.feed(window_update(0, 1 << 20));
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, MAX_31)]));
    for stream in 0..20 {
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &GET));
    }
    for stream in &bench.streams {
        stream
            .sender
            .respond(&response(200, &[]), false)
            .expect("a response");
        stream
            .sender
            .send(vec![0; 30_000].into(), true)
            .expect("bytes");
    }
    let output = bench.shared.with(|connection| connection.output().len());
    assert!(output < 1000 + 16_384 + 9 + 20 * 20, "{output} bytes");
    bench.flush();
    assert_eq!(bench.open_streams(), 0);
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
    assert_eq!(
        go_aways(&bench.take()),
        [(201, ErrorCode::ENHANCE_YOUR_CALM)]
    );
    let mut bench = Bench::new(Role::Client);
    for stream in 0..101 {
        bench.open("GET", true);
        bench.feed(headers(2 * stream + 1, flag::END_STREAM, &[("a", "b")]));
    }
    assert_eq!(go_aways(&bench.take()), [(0, ErrorCode::ENHANCE_YOUR_CALM)]);
}

#[test]
fn more_resets_at_once_than_streams_end_the_connection() {
    let config = Config {
        max_streams: 10,
        ..config(Role::Server)
    };
    let pairs = |count: u32| -> Vec<u8> {
        let pair = |at| {
            [
                headers(2 * at + 1, 0, &POST),
                reset(2 * at + 1, ErrorCode::CANCEL),
            ]
            .concat()
        };
        (0..count).flat_map(pair).collect()
    };
    let mut bench = Bench::with(config);
    bench.feed(pairs(11));
    assert_eq!(
        (bench.result, bench.streams.len(), bench.open_streams()),
        (Ok(()), 11, 0)
    );
    for at in 0..11 {
        assert_eq!(bench.error(at), Some(Error::Reset(ErrorCode::CANCEL)));
        let sent = bench.streams[at].sender.respond(&response(200, &[]), true);
        assert_eq!(sent, Err(Error::Reset(ErrorCode::CANCEL)));
    }
    bench.streams.clear();
    assert!(!bench.shared.with(|connection| connection.has_streams()));
    let mut bench = Bench::with(config);
    bench.feed(pairs(12));
    assert_eq!(
        go_aways(&bench.take()),
        [(23, ErrorCode::ENHANCE_YOUR_CALM)]
    );
}

/// The server learns later that many requests were cancelled at once: the late frames violate nothing,
/// and other requests use the connection.
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
    let mut bench = Bench::with(Config {
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
fn frames_after_the_end_of_a_message_change_nothing_for_the_reader() {
    for role in [Role::Server, Role::Client] {
        let mut bench = Bench::new(role);
        bench.start();
        bench.feed(data(1, 0, 10));
        bench.feed(headers(1, flag::END_STREAM, &[("a", "b")]));
        bench.streams[0]
            .sender
            .send(Bytes::new(), true)
            .expect("an end");
        bench.feed(data(1, 0, 5));
        bench.feed(headers(1, flag::END_STREAM, &[("a", "c")]));
        bench.feed(reset(1, ErrorCode::CANCEL));
        assert_eq!(bench.read(0), (vec![b'd'; 10], Some(Ok(()))));
        let trailers = bench.streams[0]
            .receiver
            .poll_trailers(&Context::from_waker(Waker::noop()));
        let Poll::Ready(Ok(Some(trailers))) = trailers else {
            panic!("no trailers: {trailers:?}");
        };
        assert_eq!(trailers.message["a"], "b");
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
    assert_eq!(
        bench.read(1),
        (vec![], Some(Err(Error::Reset(ErrorCode::NO_ERROR))))
    );
}

#[test]
fn a_response_is_sent_completely_without_handles() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 10)]));
    for (stream, has_trailers) in [(1, false), (3, true)] {
        bench.feed(headers(stream, 0, &POST));
        let sender = &bench.streams[0].sender;
        sender
            .respond(&response(200, &[]), false)
            .expect("a response");
        sender
            .send(vec![0; 25].into(), !has_trailers)
            .expect("bytes");
        if has_trailers {
            sender
                .send_trailers(fields_of(&[("a", "b")]))
                .expect("trailers");
        }
        bench.streams.clear();
        assert_eq!(bench.open_streams(), 1);
        bench.feed(data(stream, 0, 100));
        assert_eq!(resets(&bench.take()), []);
        bench.feed(window_update(stream, 100));
        let frames = bench.take();
        assert_eq!(lengths(&frames, stream), [15]);
        let end = frames.iter().position(|frame| frame.has(flag::END_STREAM));
        let position = frames
            .iter()
            .position(|frame| frame.kind == kind::RST_STREAM);
        assert!(end.is_some() && end < position);
        assert_eq!(resets(&frames), [(stream, ErrorCode::NO_ERROR)]);
        assert!(!bench.shared.with(|connection| connection.has_streams()));
    }
}

/// The server may still read the request, and its client has sent it completely.
#[test]
fn a_request_is_sent_completely_after_its_response_without_handles() {
    for has_trailers in [false, true] {
        let mut bench = Bench::new(Role::Client);
        bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 10)]));
        bench.open("POST", false);
        let sender = &bench.streams[0].sender;
        sender
            .send(vec![0; 25].into(), !has_trailers)
            .expect("bytes");
        if has_trailers {
            sender
                .send_trailers(fields_of(&[("a", "b")]))
                .expect("trailers");
        }
        bench.feed(headers(1, flag::END_STREAM, &OK));
        bench.streams.clear();
        assert_eq!(resets(&bench.take()), []);
        bench.feed(window_update(1, 100));
        let frames = bench.take();
        assert_eq!((lengths(&frames, 1), resets(&frames)), (vec![15], vec![]));
        assert_eq!(ends(&frames, 1).len(), 1);
        assert!(!bench.shared.with(|connection| connection.has_streams()));
    }
    // One that is incomplete is cancelled.
    let mut bench = Bench::new(Role::Client);
    bench.open("POST", false);
    bench.streams[0]
        .sender
        .send(vec![0; 25].into(), false)
        .expect("bytes");
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
            bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, window)]));
            bench.feed(headers(1, 0, &POST));
            let sender = &bench.streams[0].sender;
            sender
                .respond(&response(200, &[]), false)
                .expect("a response");
            sender
                .send(vec![0; 10].into(), !has_trailers)
                .expect("bytes");
            if has_trailers {
                sender
                    .send_trailers(fields_of(&[("a", "b")]))
                    .expect("trailers");
            }
            assert_eq!(
                sender.send_trailers(fields_of(&[("a", "c")])),
                Err(Error::Closed)
            );
            assert_eq!(
                sender.send(Bytes::from_static(b"x"), true),
                Err(Error::Closed)
            );
            assert_eq!(
                sender.respond(&response(200, &[]), true),
                Err(Error::Closed)
            );
            bench.feed(window_update(1, 100));
            let frames = bench.take();
            assert_eq!(lengths(&frames, 1).iter().sum::<usize>(), 10);
            let expected = if has_trailers {
                kind::HEADERS
            } else {
                kind::DATA
            };
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
        let sender = &bench.streams[0].sender;
        if case > 0 {
            sender
                .respond(&response(200, &[]), false)
                .expect("a response");
        }
        if case > 1 {
            sender.send(vec![0; 10].into(), false).expect("bytes");
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
    let bytes = [
        headers(1, 0, &POST),
        data(1, 0, 10),
        reset(1, ErrorCode(77)),
    ]
    .concat();
    bench.feed(bytes);
    assert_eq!(bench.error(0), Some(Error::Reset(ErrorCode(77))));
    assert_eq!(
        bench.read(0),
        (vec![], Some(Err(Error::Reset(ErrorCode(77)))))
    );
    assert_eq!(bench.streams[0].receiver.buffered(), 0);
    bench.streams.clear();
    assert_eq!(bench.take(), []);
}

#[test]
fn go_away_fails_the_streams_that_the_server_has_not_processed() {
    let mut bench = Bench::new(Role::Client);
    for _ in 0..4 {
        bench.open("POST", false);
    }
    // The response of stream 7 is complete before.
    bench.feed(headers(7, flag::END_STREAM, &OK));
    bench.feed(go_away(MAX_31, ErrorCode::NO_ERROR));
    assert!(!bench.shared.with(|connection| connection.accepts_streams()));
    assert!(matches!(
        bench.shared.open(&request("GET", &[]), true),
        Err(Error::Closed)
    ));
    assert_eq!((0..4).find_map(|at| bench.error(at)), None);
    bench.take();
    bench.feed(go_away(3, ErrorCode(42)));
    assert_eq!(bench.take(), []);
    let error = Error::GoAway(ErrorCode(42));
    let errors: Vec<_> = (0..4).map(|at| bench.error(at)).collect();
    assert_eq!(
        errors,
        [None, None, Some(error.clone()), Some(error.clone())]
    );
    assert_eq!(bench.response(2), Some(Err(error)));
    assert_eq!(bench.response(3), Some(Ok(200)));
    assert_eq!(bench.open_streams(), 2);
    // The others go on.
    bench.streams[0]
        .sender
        .send(Bytes::from_static(b"x"), true)
        .expect("bytes");
    assert_eq!(lengths(&bench.take(), 1), [1]);
    bench.feed(headers(1, flag::END_STREAM, &OK));
    assert_eq!(bench.response(0), Some(Ok(200)));
    // They fail with the connection.
    bench
        .shared
        .with(|connection| connection.end(&Error::Io(std::io::ErrorKind::BrokenPipe)));
    assert_eq!(
        bench.response(1),
        Some(Err(Error::Io(std::io::ErrorKind::BrokenPipe)))
    );
    assert_eq!(bench.read(0), (vec![], Some(Ok(()))));
    bench.streams.clear();
    assert!(!bench.shared.with(|connection| connection.has_streams()));
}

#[test]
fn a_server_serves_clients_that_leave() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.feed(go_away(0, ErrorCode::NO_ERROR));
    assert_eq!(bench.error(0), None);
    bench.feed(data(1, flag::END_STREAM, 10));
    assert_eq!(bench.read(0), (vec![b'd'; 10], Some(Ok(()))));
    bench.streams[0]
        .sender
        .respond(&response(200, &[]), true)
        .expect("a response");
    assert_eq!(bench.open_streams(), 0);
}

/// The payload of the PING frame that a drain sends.
fn drain_ping(frames: &[Frame]) -> Vec<u8> {
    let ping = frames.iter().find(|frame| frame.kind == kind::PING);
    ping.expect("a PING frame").payload.clone()
}

#[test]
fn a_drained_server_serves_all_streams_that_were_on_their_way() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.shared.with(Connection::drain);
    bench.shared.with(Connection::drain);
    let frames = bench.take();
    assert_eq!(go_aways(&frames), [(MAX_31, ErrorCode::NO_ERROR)]);
    let ping = drain_ping(&frames);
    bench.feed(headers(3, flag::END_STREAM, &GET));
    // The answer to another PING frame.
    bench.feed(frame(kind::PING, flag::ACK, 0, &[0; 8]));
    assert_eq!((bench.streams.len(), bench.take()), (2, vec![]));
    bench.feed(frame(kind::PING, flag::ACK, 0, &ping));
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
    assert!(
        frames
            .iter()
            .all(|frame| frame.kind == kind::WINDOW_UPDATE && frame.stream == 0)
    );
    assert!(credit(&frames, 0) > sent - (1 << 19));
    assert_eq!(bench.streams.len(), 2);
    // The others go on to their ends.
    let is_drained = |bench: &Bench| bench.shared.with(|connection| connection.is_drained());
    bench.feed(data(1, flag::END_STREAM, 10));
    for at in 0..2 {
        bench.streams[at]
            .sender
            .respond(&response(200, &[]), true)
            .expect("a response");
    }
    assert!(!is_drained(&bench));
    bench.streams.clear();
    assert!(is_drained(&bench) && bench.ended().is_none());
}

/// RFC 9113, section 6.8: the peer may have sent the requests again, to others.
#[test]
fn the_last_stream_of_go_away_does_not_grow() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.shared.with(Connection::drain);
    let ping = drain_ping(&bench.take());
    bench.feed(frame(kind::PING, flag::ACK, 0, &ping));
    bench.feed(headers(3, 0, &POST));
    bench
        .shared
        .with(|connection| connection.close(ErrorCode::NO_ERROR, &Error::Closed));
    let go_aways = go_aways(&bench.take());
    assert_eq!(
        go_aways,
        [(1, ErrorCode::NO_ERROR), (1, ErrorCode::NO_ERROR)]
    );
}

/// A client accepts no streams of servers.
#[test]
fn the_last_stream_of_a_client_is_0() {
    let mut bench = Bench::new(Role::Client);
    bench.open("GET", true);
    bench.shared.with(Connection::drain);
    let ping = drain_ping(&bench.take());
    bench.feed(frame(kind::PING, flag::ACK, 0, &ping));
    assert_eq!(go_aways(&bench.take()), [(0, ErrorCode::NO_ERROR)]);
    bench
        .shared
        .with(|connection| connection.close(ErrorCode::NO_ERROR, &Error::Closed));
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
                bench.shared.with(Connection::drain);
                let ping = drain_ping(&bench.take());
                bench.feed(frame(kind::PING, flag::ACK, 0, &ping));
            }
            Role::Client => bench.feed(go_away(1, ErrorCode::NO_ERROR)),
        }
        bench.streams[0]
            .sender
            .send(Bytes::new(), true)
            .expect("an end");
        bench.flush();
        let (flag, waker) = Flag::new();
        bench
            .shared
            .with(|connection| connection.wait(&Context::from_waker(&waker)));
        bench.streams.clear();
        assert!(!bench.shared.with(|connection| connection.has_streams()));
        assert!(flag.is_set(), "the task of a {role:?} does not wake");
    }
}

#[test]
fn a_connection_wakes_its_task_when_there_is_output() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.feed(data(1, 0, 16_000));
    bench.feed(data(1, 0, 16_000));
    bench.feed(data(1, 0, 16_000));
    let (flag, waker) = Flag::new();
    let cx = Context::from_waker(&waker);
    let stream = &bench.streams[0];
    let wakes = |act: &dyn Fn()| {
        bench.shared.with(|connection| {
            let length = connection.output().len();
            connection.record_written(length);
            connection.wait(&cx);
        });
        flag.take();
        act();
        let has_output = bench
            .shared
            .with(|connection| !connection.output().is_empty());
        assert!(has_output);
        flag.take()
    };
    assert!(wakes(&|| stream.receiver.release(48_000)));
    assert!(wakes(&|| stream
        .sender
        .respond(&response(200, &[]), false)
        .expect("a response")));
    assert!(wakes(&|| stream
        .sender
        .send(Bytes::from_static(b"x"), false)
        .expect("bytes")));
    assert!(wakes(&|| stream
        .sender
        .send_trailers(HeaderMap::new())
        .expect("trailers")));
    assert!(wakes(&|| stream.sender.reset(ErrorCode::CANCEL)));
    assert!(wakes(&|| {
        bench.shared.with(Connection::probe);
    }));
    assert!(wakes(&|| bench
        .shared
        .with(Connection::enable_connect_protocol)));
    assert!(wakes(&|| bench.shared.with(Connection::drain)));
    let close = |connection: &mut Connection| connection.close(ErrorCode::NO_ERROR, &Error::Closed);
    assert!(wakes(&|| bench.shared.with(close)));
}

/// Buffers for output are shared by the connections of a worker: a connection without output holds
/// none, whatever has arrived.
#[test]
fn a_connection_without_output_holds_no_buffer() {
    let mut bench = Bench::new(Role::Server);
    bench.feed(headers(1, 0, &POST));
    bench.feed(settings(&[(setting::INITIAL_WINDOW_SIZE, 0)]));
    let wait = |bench: &Bench| {
        let cx = Context::from_waker(Waker::noop());
        bench.shared.with(|connection| {
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
    bench.streams[0]
        .sender
        .respond(&response(200, &[]), false)
        .expect("a response");
    bench.flush();
    bench.streams[0]
        .sender
        .send(Bytes::from_static(b"waits"), false)
        .expect("bytes");
    assert_eq!(wait(&bench), 0);
}

#[test]
fn a_body_uses_the_same_buffer_again() {
    let mut bench = Bench::with(Config {
        max_output: 10_000,
        ..config(Role::Server)
    });
    bench.feed(headers(1, flag::END_STREAM, &GET));
    let sender = &bench.streams[0].sender;
    sender
        .respond(&response(200, &[]), false)
        .expect("a response");
    sender.send(vec![0; 60_000].into(), true).expect("bytes");
    bench.shared.with(|connection| {
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

#[test]
fn extended_connect_is_announced_and_accepted() {
    let mut bench = Bench::bare(Config {
        enable_connect_protocol: true,
        ..config(Role::Server)
    });
    let setting = [
        setting::ENABLE_CONNECT_PROTOCOL.to_be_bytes().as_slice(),
        &1u32.to_be_bytes(),
    ]
    .concat();
    assert!(
        bench.frames[0]
            .payload
            .chunks(6)
            .any(|chunk| chunk == setting)
    );
    bench.feed([PREFACE, &settings(&[])].concat());
    let fields = [
        CONNECT,
        (":protocol", "websocket"),
        SCHEME,
        (":path", "/chat"),
        AUTHORITY,
    ];
    bench.feed(headers(1, 0, &fields));
    let request = &bench.streams[0].request;
    assert_eq!(
        request.extensions.get().map(Protocol::as_str),
        Some("websocket")
    );
    assert_eq!(
        (request.method.as_str(), request.uri.path()),
        ("CONNECT", "/chat")
    );
    bench.take();
    // RFC 8441, section 4: the other pseudo-header fields are required.
    bench.feed(headers(
        3,
        0,
        &[CONNECT, (":protocol", "websocket"), AUTHORITY],
    ));
    bench.feed(headers(
        5,
        0,
        &[METHOD, (":protocol", "websocket"), SCHEME, PATH, AUTHORITY],
    ));
    let expected = [
        (3, ErrorCode::PROTOCOL_ERROR),
        (5, ErrorCode::PROTOCOL_ERROR),
    ];
    assert_eq!(resets(&bench.take()), expected);
    // It may be enabled later.
    let mut bench = Bench::new(Role::Server);
    bench.shared.with(Connection::enable_connect_protocol);
    bench.shared.with(Connection::enable_connect_protocol);
    let frames = bench.take();
    assert_eq!((frames.len(), frames[0].payload == setting), (1, true));
    bench.feed(settings_ack());
    bench.feed(headers(1, 0, &fields));
    assert_eq!(bench.streams.len(), 1);
}

#[test]
fn a_client_learns_of_extended_connect() {
    let mut bench = Bench::new(Role::Client);
    assert!(
        !bench
            .shared
            .with(|connection| connection.accepts_connect_protocol())
    );
    bench.feed(settings(&[(setting::ENABLE_CONNECT_PROTOCOL, 1)]));
    assert!(
        bench
            .shared
            .with(|connection| connection.accepts_connect_protocol())
    );
    let mut head = request("CONNECT", &[]);
    head.extensions
        .insert(Protocol::try_from("websocket").expect("a name"));
    bench.shared.open(&head, false).expect("a stream");
    let fields = decode(&bench.take()[1].payload);
    let has = |field: &str| {
        fields
            .iter()
            .any(|known| format!("{known:?}").contains(field))
    };
    assert!(
        has("websocket") && has("CONNECT") && has("Path") && has("Scheme"),
        "{fields:?}"
    );
}

/// The fields of a block that does not need a table.
fn decode(block: &[u8]) -> Vec<Field> {
    let mut fields = Vec::new();
    let each = |field: &Field, _| {
        fields.push(field.clone());
        true
    };
    Decoder::new(4096)
        .decode(block, each)
        .expect("a field block");
    fields
}

/// HTTP/1 clients may send `GET http://test?a=b`.
#[test]
fn a_request_without_a_path_has_a_slash() {
    for (uri, path) in [
        ("http://test", "/"),
        ("http://test?a=b", "/?a=b"),
        ("http://test/?a", "/?a"),
    ] {
        let mut bench = Bench::new(Role::Client);
        let mut head = request("GET", &[]);
        head.uri = uri.parse::<Uri>().expect("a URI");
        bench.shared.open(&head, true).expect("a stream");
        let fields = decode(&bench.take()[0].payload);
        let is_path = |field: &Field| matches!(field, Field::Path(sent) if sent.as_str() == path);
        assert!(fields.iter().any(is_path), "{uri}: {fields:?}");
    }
}

#[test]
fn acknowledgments_are_counted() {
    let mut bench = Bench::new(Role::Client);
    assert_eq!(
        bench.shared.with(|connection| connection.settings()),
        (1, 1)
    );
    assert_eq!(bench.shared.with(Connection::probe), 2);
    assert_eq!(
        bench.shared.with(|connection| connection.settings()),
        (2, 1)
    );
    bench.feed(settings_ack());
    assert_eq!(
        bench.shared.with(|connection| connection.settings()),
        (2, 2)
    );
    bench.feed(settings_ack());
    assert!(bench.ended().is_some());
}

/// The pieces in which bytes arrive make no difference.
#[test]
fn frames_may_arrive_byte_by_byte() {
    let conversation = [
        PREFACE,
        &settings(&[(setting::INITIAL_WINDOW_SIZE, 1 << 20)]),
        &headers(1, 0, &POST),
        &data(1, 0, 300),
        &frame(kind::HEADERS, 0, 3, &block(&GET)[..10]),
        &continuation(3, flag::END_HEADERS, &block(&GET)[10..]),
        &padded_data(1, flag::END_STREAM, 20, 200),
        &reset(3, ErrorCode::CANCEL),
        &ping(),
        &headers(5, flag::END_STREAM, &[("a", "b")]),
        &window_update(0, 0),
    ]
    .concat();
    let results = [1, 2, 7, 9, 100, conversation.len()].map(|step| {
        let shared = Shared::new(config(Role::Server));
        let mut rest = Vec::new();
        let mut result = Ok(());
        for piece in conversation.chunks(step) {
            rest.extend(piece);
            match shared.with(|connection| connection.receive(&rest)) {
                Ok(length) => drop(rest.drain(..length)),
                Err(violation) => result = Err(violation),
            }
        }
        let output = shared.with(|connection| connection.output().to_vec());
        let opened: Vec<_> = std::iter::from_fn(|| shared.accept()).collect();
        let buffered: Vec<_> = opened
            .iter()
            .map(|opened| opened.receiver.buffered())
            .collect();
        (result, output, buffered)
    });
    assert_eq!(
        results[0].0.map_err(|violation| violation.code),
        Err(ErrorCode::PROTOCOL_ERROR)
    );
    assert_eq!(results[0].2, [320, 0]);
    for result in &results {
        assert_eq!(*result, results[0]);
    }
}

#[test]
fn nothing_works_after_the_end_of_a_connection() {
    let mut bench = Bench::new(Role::Client);
    bench.open("POST", false);
    bench.open("POST", false);
    bench.feed(headers(3, flag::END_STREAM, &OK));
    bench.take();
    bench
        .shared
        .with(|connection| connection.close(ErrorCode::CANCEL, &Error::Closed));
    assert_eq!(go_aways(&bench.take()), [(0, ErrorCode::CANCEL)]);
    bench.feed(headers(1, 0, &OK));
    bench.feed([0xff; 100]);
    assert_eq!(bench.result, Ok(()));
    assert_eq!(bench.response(0), Some(Err(Error::Closed)));
    assert_eq!(bench.response(1), Some(Ok(200)));
    assert_eq!(
        bench.streams[0].sender.send(Bytes::new(), true),
        Err(Error::Closed)
    );
    assert!(bench.shared.open(&request("GET", &[]), true).is_err());
    bench.streams[0].sender.reset(ErrorCode::CANCEL);
    bench.shared.with(Connection::drain);
    bench.shared.with(Connection::probe);
    bench.streams[0].receiver.release(1_000_000);
    bench.streams.clear();
    assert_eq!(bench.take(), []);
    assert!(!bench.shared.with(|connection| connection.has_streams()));
}

/// A frame of a peer that knows the protocol, and respects it rarely.
fn random_frame(rng: &mut Rng) -> Vec<u8> {
    let stream = [0, 1, 3, 5, 7, 9, 11, 13, 2, MAX_31][rng.usize(..10)];
    let blocks = [
        block(&GET),
        block(&POST),
        block(&OK),
        block(&[("a", "b")]),
        block(&[]),
        block(&[(":status", "103")]),
    ];
    let block = &blocks[rng.usize(..blocks.len())];
    let flags = [
        0,
        flag::END_STREAM,
        flag::END_HEADERS,
        flag::END_HEADERS | flag::END_STREAM,
        rng.u8(..),
    ];
    let flags = flags[rng.usize(..flags.len())];
    match rng.u8(..20) {
        0..5 => frame(kind::HEADERS, flags | flag::END_HEADERS, stream, block),
        5 => frame(kind::HEADERS, flags, stream, block),
        6 => continuation(stream, flags, block),
        7..11 => data(stream, flags & flag::END_STREAM, rng.usize(..16_385)),
        11 => padded_data(
            stream,
            flags & flag::END_STREAM,
            rng.usize(..100),
            rng.u8(..),
        ),
        12 => reset(stream, ErrorCode(rng.u32(..20))),
        13 => window_update(stream, rng.u32(..100_000)),
        14 => window_update(0, rng.u32(1..100_000)),
        15 => settings(&[(rng.u16(1..9), [0, 1, 100, 65_535, 1 << 20][rng.usize(..5)])]),
        16 => go_away(stream, ErrorCode(rng.u32(..20))),
        17 => priority(stream, rng.u32(..20)),
        18 => ping(),
        _ => frame(
            rng.u8(..12),
            flags,
            stream,
            &vec![rng.u8(..); rng.usize(..20)],
        ),
    }
}

/// Does something with a stream that its task may do.
fn random_act(rng: &mut Rng, stream: &Stream) {
    let cx = &Context::from_waker(Waker::noop());
    let Stream {
        sender, receiver, ..
    } = stream;
    match rng.u8(..8) {
        0 => drop(sender.respond(&response(200, &[]), rng.bool())),
        1 => drop(sender.respond(&response(103, &[]), false)),
        2..4 if sender.poll_ready(cx).is_ready() => {
            let length = rng.usize(..40_000);
            drop(sender.send(vec![0; length].into(), rng.u8(..4) == 0));
        }
        4 => drop(sender.send_trailers(HeaderMap::new())),
        5 => sender.reset(ErrorCode::CANCEL),
        6 => drop(receiver.poll_response(cx)),
        _ => {
            if let Poll::Ready(Some(Ok(data))) = receiver.poll_data(cx) {
                receiver.release(data.len());
            }
        }
    }
}

#[test]
fn random_frames_end_in_order() {
    for seed in 0..600 {
        let _seed = Seed(seed);
        let mut rng = Rng::with_seed(seed);
        let role = if rng.bool() {
            Role::Server
        } else {
            Role::Client
        };
        let mut bench = Bench::with(Config {
            max_streams: 4,
            connection_window: 65_535,
            max_output: 20_000,
            ..config(role)
        });
        let mut rest = Vec::new();
        for _ in 0..300 {
            match rng.u8(..6) {
                0..3 => {
                    rest.extend(random_frame(&mut rng));
                    if rng.u8(..50) == 0 {
                        let at = rng.usize(..rest.len());
                        rest[at] ^= 1 << rng.u8(..8);
                    }
                    let received = bench.shared.with(|connection| connection.receive(&rest));
                    if let Ok(length) = received {
                        rest.drain(..length);
                    }
                    bench.accept();
                }
                3 if role == Role::Client && bench.ended().is_none() => {
                    if bench.shared.with(|connection| connection.accepts_streams()) {
                        bench.open("POST", rng.bool());
                    }
                }
                4 if !bench.streams.is_empty() => {
                    let at = rng.usize(..bench.streams.len());
                    if rng.u8(..4) == 0 {
                        bench.streams.swap_remove(at);
                    } else {
                        random_act(&mut rng, &bench.streams[at]);
                    }
                }
                5 if rng.u8(..20) == 0 => bench.shared.with(Connection::drain),
                _ => bench.flush(),
            }
            if role == Role::Server {
                assert!(bench.open_streams() <= 4);
            }
            if bench.ended().is_some() {
                break;
            }
        }
        bench
            .shared
            .with(|connection| connection.close(ErrorCode::NO_ERROR, &Error::Closed));
        bench.streams.clear();
        bench.flush();
        assert_eq!(bench.open_streams(), 0);
        assert!(!bench.shared.with(|connection| connection.has_streams()));
    }
}
