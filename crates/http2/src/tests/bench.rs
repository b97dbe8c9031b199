//! An engine whose peer is the test: the test feeds frames, and reads the frames of the engine.

use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::*;
use crate::frame::setting;
use crate::message::Received;
use crate::{Connection, Error, Receiver, Sender, Shared, Violation};

/// An engine, and what its peer has got of it.
pub struct Bench {
    pub role: Role,
    pub shared: Shared,
    pub streams: Vec<Stream>,
    pub frames: Vec<Frame>,
    pub result: Result<(), Violation>,
}

/// A stream with both handles.
pub struct Stream {
    pub request: Request,
    pub is_cut: bool,
    pub sender: Sender,
    pub receiver: Receiver,
}

impl Bench {
    /// Nothing has arrived yet.
    pub fn bare(config: Config) -> Self {
        let mut bench = Self {
            role: config.role,
            shared: Shared::new(config),
            streams: Vec::new(),
            frames: Vec::new(),
            result: Ok(()),
        };
        if config.role == Role::Client {
            let preface = bench.with(|connection| connection.output()[..24].to_vec());
            assert_eq!(preface, PREFACE);
            bench.with(|connection| connection.record_written(24));
        }
        bench.flush();
        bench
    }

    /// The SETTINGS of both sides have arrived.
    pub fn of(config: Config) -> Self {
        let mut bench = Self::bare(config);
        if config.role == Role::Server {
            bench.feed(PREFACE);
        }
        bench.feed(settings(&[]));
        bench.feed(settings_ack());
        bench.frames.clear();
        bench
    }

    pub fn new(role: Role) -> Self {
        Self::of(config(role))
    }

    pub fn with<T>(&self, use_it: impl FnOnce(&mut Connection) -> T) -> T {
        self.shared.with(use_it)
    }

    /// Takes what the peer sends, and accepts its streams.
    pub fn feed(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        match self.with(|connection| connection.receive(bytes)) {
            Ok(length) => assert_eq!(length, bytes.len(), "incomplete frames"),
            Err(violation) => self.result = Err(violation),
        }
        self.accept();
        self.flush();
    }

    pub fn accept(&mut self) {
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
    pub fn flush(&mut self) {
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
    pub fn take(&mut self) -> Vec<Frame> {
        self.flush();
        std::mem::take(&mut self.frames)
    }

    /// Opens a stream of a client. Returns its position.
    pub fn open(&mut self, method: &str, end_stream: bool) -> usize {
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
    pub fn start(&mut self) {
        match self.role {
            Role::Server => {
                self.feed(headers(1, 0, &POST));
                self.streams[0].respond(false);
            }
            Role::Client => {
                self.open("POST", false);
                self.feed(headers(1, 0, &OK));
            }
        }
        self.take();
    }

    /// The peer ends stream 1.
    pub fn start_half(&mut self) {
        self.start();
        self.feed(data(1, flag::END_STREAM, 0));
    }

    /// Both sides have ended stream 1.
    pub fn finish(&mut self) {
        self.start_half();
        self.streams[0].send(b"", true);
        self.streams.clear();
        self.take();
    }

    /// This side has reset stream 1.
    pub fn cancel(&mut self) {
        self.start();
        self.streams[0].sender.reset(ErrorCode::CANCEL);
        self.take();
    }

    /// Begins a graceful end. The peer answers the PING frame with the result.
    pub fn drain(&mut self) -> Vec<u8> {
        self.with(Connection::drain);
        pong(&self.take())
    }

    pub fn close(&self, code: ErrorCode) {
        self.with(|connection| connection.close(code, &Error::Closed));
    }

    pub fn ended(&self) -> Option<Error> {
        self.with(|connection| connection.ended().cloned())
    }

    /// The code with which the connection has ended.
    pub fn end_code(&self) -> Option<ErrorCode> {
        self.ended().and_then(|error| error.code())
    }

    pub fn open_streams(&self) -> u32 {
        self.with(|connection| connection.open_streams())
    }

    pub fn has_streams(&self) -> bool {
        self.with(|connection| connection.has_streams())
    }

    /// Whether a PING frame is answered.
    pub fn is_alive(&mut self) -> bool {
        self.feed(ping());
        let answer = frames(&frame(kind::PING, flag::ACK, 0, b"12345678"));
        self.frames.last() == answer.first() && self.ended().is_none()
    }

    /// Reads a stream: the bytes, and how it ends.
    pub fn read(&self, at: usize) -> (Vec<u8>, Option<Result<(), Error>>) {
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

    /// The trailers of a stream, which have arrived.
    pub fn trailers(&self, at: usize) -> Received<Fields> {
        let cx = &Context::from_waker(Waker::noop());
        let trailers = self.streams[at].receiver.poll_trailers(cx);
        let Poll::Ready(Ok(Some(trailers))) = trailers else {
            panic!("no trailers: {trailers:?}");
        };
        trailers
    }

    /// Why a stream has ended early.
    pub fn error(&self, at: usize) -> Option<Error> {
        let cx = &Context::from_waker(Waker::noop());
        match self.streams[at].sender.poll_reset(cx) {
            Poll::Ready(error) => Some(error),
            Poll::Pending => None,
        }
    }

    /// The next response of a stream.
    pub fn response(&self, at: usize) -> Option<Result<u16, Error>> {
        let cx = &Context::from_waker(Waker::noop());
        match self.streams[at].receiver.poll_response(cx) {
            Poll::Ready(response) => {
                Some(response.map(|response| response.message.status.as_u16()))
            }
            Poll::Pending => None,
        }
    }
}

impl Stream {
    pub fn respond(&self, end_stream: bool) {
        let sent = self.sender.respond(&response(200, &[]), end_stream);
        sent.expect("a response");
    }

    pub fn send(&self, bytes: impl AsRef<[u8]>, end_stream: bool) {
        let bytes = Bytes::copy_from_slice(bytes.as_ref());
        self.sender.send(bytes, end_stream).expect("bytes");
    }

    pub fn send_trailers(&self) {
        let sent = self.sender.send_trailers(fields_of(&[("a", "b")]));
        sent.expect("trailers");
    }

    /// Sends zeros, and the end: trailers, or END_STREAM.
    pub fn send_all(&self, length: usize, has_trailers: bool) {
        self.send(vec![0; length], !has_trailers);
        if has_trailers {
            self.send_trailers();
        }
    }
}

/// The frames of a type on a stream.
pub fn of_kind(frames: &[Frame], kind: u8, stream: u32) -> impl Iterator<Item = &Frame> {
    let is_wanted = move |frame: &&Frame| frame.kind == kind && frame.stream == stream;
    frames.iter().filter(is_wanted)
}

/// The sum of the windows that these frames give.
pub fn credit(frames: &[Frame], stream: u32) -> usize {
    let updates = of_kind(frames, kind::WINDOW_UPDATE, stream);
    updates.map(|frame| frame.number(0) as usize).sum()
}

/// The lengths of the DATA frames of a stream.
pub fn lengths(frames: &[Frame], stream: u32) -> Vec<usize> {
    let data = of_kind(frames, kind::DATA, stream);
    data.map(|frame| frame.payload.len()).collect()
}

/// The types of the frames that end a stream.
pub fn ends(frames: &[Frame], stream: u32) -> Vec<u8> {
    let is_end = |frame: &&Frame| {
        let is_message = matches!(frame.kind, kind::DATA | kind::HEADERS);
        is_message && frame.stream == stream && frame.has(flag::END_STREAM)
    };
    let ends = frames.iter().filter(is_end);
    ends.map(|frame| frame.kind).collect()
}

/// The streams that these frames reset, and the codes.
pub fn resets(frames: &[Frame]) -> Vec<(u32, ErrorCode)> {
    let resets = frames.iter().filter(|frame| frame.kind == kind::RST_STREAM);
    resets
        .map(|frame| (frame.stream, ErrorCode(frame.number(0))))
        .collect()
}

/// The last streams and the codes of the GOAWAY frames.
pub fn go_aways(frames: &[Frame]) -> Vec<(u32, ErrorCode)> {
    let frames = frames.iter().filter(|frame| frame.kind == kind::GOAWAY);
    frames
        .map(|frame| (frame.number(0), ErrorCode(frame.number(4))))
        .collect()
}

/// The answer to the PING frame that a drain sends.
pub fn pong(frames: &[Frame]) -> Vec<u8> {
    let ping = frames.iter().find(|frame| frame.kind == kind::PING);
    let payload = &ping.expect("a PING frame").payload;
    frame(kind::PING, flag::ACK, 0, payload)
}

/// HEADERS with END_STREAM and a complete field block.
pub fn headers_of(stream: u32, block: &[u8]) -> Vec<u8> {
    let flags = flag::END_HEADERS | flag::END_STREAM;
    frame(kind::HEADERS, flags, stream, block)
}

/// HEADERS with END_STREAM and the beginning of a field block.
pub fn begin_headers(stream: u32, block: &[u8]) -> Vec<u8> {
    frame(kind::HEADERS, flag::END_STREAM, stream, block)
}

/// SETTINGS with the window of new streams.
pub fn initial_window(size: u32) -> Vec<u8> {
    settings(&[(setting::INITIAL_WINDOW_SIZE, size)])
}

/// A POST request with a body of 10 bytes.
pub const POST_10: [(&str, &str); 5] =
    [POST[0], POST[1], POST[2], POST[3], ("content-length", "10")];
/// A response with a body of 10 bytes.
pub const OK_10: [(&str, &str); 2] = [OK[0], ("content-length", "10")];
