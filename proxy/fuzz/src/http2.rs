//! HTTP/2 connections of both roles, with a peer that sends any bytes while the tasks of streams
//! send and read; and header compression, which keeps the fields.

use std::task::{Context, Poll, Waker};

use diy_mesh_http2::hpack::{Decoder, Encoder, Field, Kind};
use diy_mesh_http2::{
    Config, Connection, Error, ErrorCode, Fields, MAX_FRAME, Receiver, Request, Response, Role,
    Sender, Shared, Violation,
};
use http::StatusCode;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The length of a frame's header.
const HEADER: usize = 9;
/// The type of a GOAWAY frame.
const GOAWAY: u8 = 7;
const TABLE_SIZE: usize = 4096;

const MAX_STREAMS: u32 = 4;
const STREAM_WINDOW: u32 = 65_535;
const MAX_BLOCK: usize = 256;
const MAX_OUTPUT: usize = 1000;
/// The largest buffer that a connection takes over from earlier ones.
const MAX_SPARE: usize = 128 * 1024;
/// The number of field blocks of one input.
const MAX_BLOCKS: usize = 64;
/// The most output for an act of a task.
const MAX_ACT: usize = 100;
/// The most output for SETTINGS, WINDOW_UPDATE and GOAWAY, and for bodies.
const FIRST_OUTPUT: usize = 2 * MAX_ACT + MAX_OUTPUT + MAX_FRAME;

/// The two lowest bits of the first byte select the reader of the input, the others the length of
/// the pieces in which the input arrives.
pub fn http2(bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else {
        return;
    };
    let piece = 1 + usize::from(first >> 2);
    match first & 3 {
        0 => connection(Role::Client, piece, rest, b""),
        1 => connection(Role::Server, piece, rest, b""),
        2 => connection(Role::Server, piece, rest, PREFACE),
        _ => compression(rest),
    }
}

/// The input is the number of acts, the acts, and what the peer sends after `start`.
fn connection(role: Role, piece: usize, input: &[u8], start: &[u8]) {
    let Some((&count, rest)) = input.split_first() else {
        return;
    };
    let (acts, rest) = rest.split_at(rest.len().min(count.into()));
    let bytes = [start, rest].concat();
    let whole = quiet(role, &bytes, bytes.len().max(1));
    assert_eq!(quiet(role, &bytes, piece), whole, "in pieces of {piece}");
    let mut acts = acts.iter().cycle();
    let mut engine = Engine::new(role);
    for piece in bytes.chunks(piece) {
        engine.receive(piece);
        engine.accept();
        let act = acts.next().copied().unwrap_or_default();
        engine.act(act);
        engine.check();
        // The peer does not always read.
        let length = engine.shared.with(|connection| connection.output().len());
        engine.write([usize::MAX, usize::MAX, length / 2, 0][usize::from(act >> 6)]);
    }
    engine.end();
}

/// The output for a peer that sends these bytes in pieces to streams that only wait, why the
/// connection has ended, and the messages of the streams.
fn quiet(role: Role, bytes: &[u8], piece: usize) -> (Vec<u8>, Option<Violation>, Vec<String>) {
    let mut engine = Engine::new(role);
    for piece in bytes.chunks(piece) {
        engine.receive(piece);
        engine.check();
        engine.write(usize::MAX);
    }
    let mut arrived = Vec::new();
    while let Some(opened) = engine.shared.accept() {
        arrived.push(format!("{:?}", opened.request));
        engine.add(opened.sender, opened.receiver);
    }
    for Stream(_, receiver) in &engine.streams {
        let receiver = receiver.as_ref().expect("a handle that is held");
        let cx = &Context::from_waker(Waker::noop());
        while let Poll::Ready(Ok(response)) = receiver.poll_response(cx) {
            arrived.push(format!("{response:?}"));
        }
        let data = receiver.poll_data(cx);
        arrived.push(format!("{data:?} {:?}", receiver.poll_trailers(cx)));
    }
    let violation = engine.violation;
    (engine.end(), violation, arrived)
}

/// A connection, and what its peer has sent and got.
struct Engine {
    role: Role,
    shared: Shared,
    streams: Vec<Stream>,
    /// The bytes of the preface that have not arrived.
    preface: usize,
    /// The frames that are not complete.
    rest: Vec<u8>,
    written: Vec<u8>,
    violation: Option<Violation>,
    /// The most output after the acts of the peer and of the tasks since the output was empty.
    max_output: usize,
    /// The most memory for a field block, which is not grown beyond its limit.
    max_block: usize,
}

/// The handles of a stream, as far as they are held.
struct Stream(Option<Sender>, Option<Receiver>);

impl Engine {
    /// A client has two streams, one of them with a complete request.
    fn new(role: Role) -> Self {
        let shared = Shared::new(Config {
            role,
            max_streams: MAX_STREAMS,
            stream_window: STREAM_WINDOW,
            connection_window: STREAM_WINDOW,
            max_fields: 200,
            max_block: MAX_BLOCK,
            max_output: MAX_OUTPUT,
            enable_connect_protocol: true,
        });
        let mut engine = Self {
            role,
            shared,
            streams: Vec::new(),
            preface: PREFACE.len() * usize::from(role == Role::Server),
            rest: Vec::new(),
            written: Vec::new(),
            violation: None,
            max_output: FIRST_OUTPUT,
            max_block: 2 * MAX_BLOCK,
        };
        if role == Role::Client {
            engine.open("GET", true);
            engine.open("POST", false);
        }
        engine
    }

    fn add(&mut self, sender: Sender, receiver: Receiver) {
        self.streams.push(Stream(Some(sender), Some(receiver)));
    }

    fn open(&mut self, method: &str, end_stream: bool) {
        let request = http::Request::builder()
            .method(method)
            .uri("http://shop/cart");
        let (head, ()) = request.body(()).expect("a request").into_parts();
        let head = Request::from(&head);
        self.max_output += MAX_ACT;
        match self.shared.open(&head, end_stream) {
            Ok((sender, receiver)) => self.add(sender, receiver),
            Err(_) => assert!(!self.shared.with(|connection| connection.accepts_streams())),
        }
    }

    fn accept(&mut self) {
        while let Some(opened) = self.shared.accept() {
            self.add(opened.sender, opened.receiver);
        }
    }

    fn receive(&mut self, piece: &[u8]) {
        self.rest.extend_from_slice(piece);
        // Each frame has at most one answer, which is a little longer than the shortest frame.
        self.max_output += 2 * piece.len();
        let mut expected = self.preface.min(self.rest.len());
        while let Some(frame) = frame(&self.rest[expected..]) {
            expected += frame;
            self.max_block = self.max_block.max(frame);
        }
        let receive = |connection: &mut Connection| connection.receive(&self.rest);
        match self.shared.with(receive) {
            Ok(length) if self.violation.is_some() => assert_eq!(length, self.rest.len()),
            Ok(length) => {
                assert_eq!(length, expected, "the length of the complete frames");
                self.preface -= self.preface.min(length);
                self.rest.drain(..length);
            }
            Err(violation) => {
                assert_eq!(self.violation, None, "a violation after the end");
                self.violation = Some(violation);
            }
        }
    }

    /// Lets the peer read.
    fn write(&mut self, length: usize) {
        self.shared.with(|connection| {
            let mut left = length;
            while left > 0 && !connection.output().is_empty() {
                let output = connection.output();
                let output = &output[..output.len().min(left)];
                left -= output.len();
                self.written.extend_from_slice(output);
                connection.record_written(output.len());
            }
            if connection.output().is_empty() {
                self.max_output = FIRST_OUTPUT;
                connection.return_buffer();
                let buffered = connection.buffered();
                assert!(buffered <= self.max_block, "{buffered} bytes of a block");
            }
        });
    }

    /// Does something that a task may do. The lowest bits select the act, the next ones the stream.
    fn act(&mut self, act: u8) {
        self.max_output += MAX_ACT;
        match act & 15 {
            0 => {}
            1 => self.shared.with(Connection::drain),
            2 => {
                self.shared.with(Connection::probe);
            }
            3 if self.role == Role::Client => self.open("HEAD", act & 16 == 0),
            kind => {
                let stream = self.streams.iter_mut().nth_back(usize::from(act >> 4 & 3));
                stream.into_iter().for_each(|stream| stream.act(kind));
            }
        }
    }

    /// The limits hold, and a connection has ended if its peer has violated the protocol.
    fn check(&self) {
        let held = self
            .streams
            .iter()
            .filter_map(|Stream(_, receiver)| receiver.as_ref());
        for receiver in held {
            assert!(receiver.buffered() <= STREAM_WINDOW as usize);
        }
        self.shared.with(|connection| {
            let (open, length) = (connection.open_streams(), connection.output().len());
            let max_streams = match self.role {
                Role::Server => MAX_STREAMS,
                Role::Client => self.streams.len() as u32,
            };
            assert!(open <= max_streams, "{open} streams");
            assert!(length <= self.max_output, "{length} bytes of output");
            let max_buffered = MAX_SPARE.max(2 * self.max_output) + self.max_block;
            let buffered = connection.buffered();
            assert!(buffered <= max_buffered, "{buffered} bytes of memory");
            let error = self.violation.map(Error::Violation);
            assert_eq!(connection.ended(), error.as_ref());
            assert!(error.is_none() || open == 0, "{open} streams after the end");
        });
    }

    /// Ends the connection, which leaves nothing. Returns all that its peer has got: frames whose
    /// last tells why the connection has ended.
    fn end(mut self) -> Vec<u8> {
        let close = |connection: &mut Connection| {
            connection.close(ErrorCode::NO_ERROR, &Error::Closed);
        };
        self.shared.with(close);
        self.streams.clear();
        while self.shared.accept().is_some() {}
        self.write(usize::MAX);
        self.shared.with(|connection| {
            assert_eq!(connection.open_streams(), 0);
            assert!(!connection.has_streams());
        });
        let preface: &[u8] = match self.role {
            Role::Client => PREFACE,
            Role::Server => b"",
        };
        let mut rest = self.written.strip_prefix(preface).expect("the preface");
        let mut last = rest;
        while !rest.is_empty() {
            let length = frame(rest).expect("a complete frame");
            assert!(length <= MAX_FRAME, "a frame of {length} bytes");
            (last, rest) = rest.split_at(length);
        }
        let code = self
            .violation
            .map_or(ErrorCode::NO_ERROR, |violation| violation.code);
        assert_eq!(last[3], GOAWAY, "the last frame");
        assert_eq!(last[HEADER + 4..], code.0.to_be_bytes());
        self.written
    }
}

impl Stream {
    fn act(&mut self, kind: u8) {
        let cx = &Context::from_waker(Waker::noop());
        if let Some(sender) = &self.0 {
            let is_ready = matches!(sender.poll_ready(cx), Poll::Ready(Ok(())));
            match kind {
                3 => drop(sender.respond(&response(103), false)),
                4 => drop(sender.respond(&response(200), false)),
                5 => drop(sender.respond(&response(204), true)),
                6 if is_ready => drop(sender.send(vec![0; 20_000].into(), false)),
                7 if is_ready => drop(sender.send(vec![0; 10].into(), true)),
                8 => drop(sender.send_trailers(Fields::default())),
                9 => sender.reset(ErrorCode::CANCEL),
                10 => self.0 = None,
                _ => {}
            }
        }
        if let Some(receiver) = &self.1 {
            match kind {
                11 => drop(receiver.poll_response(cx)),
                12 => drop(receiver.poll_trailers(cx)),
                13 | 14 => {
                    if let Poll::Ready(Some(Ok(data))) = receiver.poll_data(cx) {
                        receiver.release(data.len());
                    }
                }
                15 => self.1 = None,
                _ => {}
            }
        }
    }
}

fn response(status: u16) -> Response {
    Response {
        status: StatusCode::from_u16(status).expect("a status"),
        fields: Fields::default(),
    }
}

/// The length of the first frame, if the frame is complete.
fn frame(bytes: &[u8]) -> Option<usize> {
    let [a, b, c] = *bytes.first_chunk()?;
    let length = HEADER + u32::from_be_bytes([0, a, b, c]) as usize;
    (length <= bytes.len()).then_some(length)
}

/// Field blocks, each after its length. Fields have the same names and values after another
/// compression. The table of a decoder does not depend on the fields that its caller wants.
fn compression(mut input: &[u8]) {
    let mut decoder = Decoder::new(TABLE_SIZE);
    let mut unwanted = Decoder::new(TABLE_SIZE);
    let (mut encoder, mut second) = (Encoder::new(), Decoder::new(TABLE_SIZE));
    for _ in 0..MAX_BLOCKS {
        let Some((&length, rest)) = input.split_first() else {
            return;
        };
        let (block, rest) = rest.split_at(rest.len().min(length.into()));
        input = rest;
        let Some(fields) = decode(&mut decoder, block) else {
            return;
        };
        assert_eq!(unwanted.decode(block, |_| false), Ok(()));
        assert_eq!(table(&mut unwanted), table(&mut decoder));
        if length % 2 == 1 {
            encoder.set_max_table_size(16 * usize::from(length));
        }
        let fields: Vec<_> = fields.into_iter().filter(|field| field.is_valid).collect();
        let mut block = Vec::new();
        encode(&mut encoder, &fields, &mut block);
        assert_eq!(decode(&mut second, &block), Some(fields));
    }
}

/// A field that was decoded.
#[derive(Debug, PartialEq)]
struct Decoded {
    name: Vec<u8>,
    value: Vec<u8>,
    is_sensitive: bool,
    is_valid: bool,
}

/// The fields of a block. `None` if the block is invalid. No field but a header field stays sensitive.
fn decode(decoder: &mut Decoder, block: &[u8]) -> Option<Vec<Decoded>> {
    let mut fields = Vec::new();
    let each = |field: &Field<'_>| {
        fields.push(Decoded {
            name: field.name.to_vec(),
            value: field.value.to_vec(),
            is_sensitive: field.is_sensitive && !field.name.starts_with(b":"),
            is_valid: !matches!(field.kind, Kind::Malformed(_)),
        });
        true
    };
    decoder.decode(block, each).ok()?;
    Some(fields)
}

/// The fields of the dynamic table, whose entries have at least 32 bytes.
fn table(decoder: &mut Decoder) -> Vec<Decoded> {
    let indexes = (0..TABLE_SIZE / 32).map(|position| match position {
        0..65 => vec![0x80 + 62 + position as u8],
        _ => vec![0xff, position as u8 - 65],
    });
    let fields = indexes.map_while(|index| decode(decoder, &index));
    fields.flatten().collect()
}

fn encode(encoder: &mut Encoder, fields: &[Decoded], block: &mut Vec<u8>) {
    encoder.begin(block);
    for field in fields {
        encoder.field(&field.name, &field.value, field.is_sensitive, block);
    }
}
