//! Tests of whole connections. `model.rs` joins two engines, and `peers.rs` talks to the `h2`
//! crate. In the other files, the peer is the test (`bench.rs`): they have the reactions to its
//! frames that RFC 9113 asks for, or allows. The frames are built and read here, without the code
//! of the crate.

mod bench;
mod cases;
mod ends;
mod flow;
mod frames;
mod limits;
mod messages;
mod model;
mod peers;
mod random;
mod roles;
mod streams;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Wake, Waker};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};

use crate::frame::{flag, kind};
use crate::{Config, ErrorCode, Fields, Request, Response, Role};

/// The bytes with which a client begins.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The largest 31-bit number.
const MAX_31: u32 = (1 << 31) - 1;
/// The window before SETTINGS.
const DEFAULT_WINDOW: usize = 65_535;

/// The limits that most tests use.
fn config(role: Role) -> Config {
    Config {
        role,
        max_streams: 100,
        stream_window: 65_535,
        connection_window: 1 << 20,
        max_fields: 16 * 1024,
        max_block: 64 * 1024,
        max_output: 64 * 1024,
        enable_connect_protocol: false,
    }
}

/// A frame as it is on the wire.
#[derive(Clone, PartialEq, Eq)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Frame {
    /// Takes the first frame of these bytes, if it is complete.
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(9)?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let (payload, rest) = rest.split_at_checked(length as usize)?;
        *bytes = rest;
        Some(Self {
            kind: header[3],
            flags: header[4],
            stream: u32::from_be_bytes([header[5], header[6], header[7], header[8]]),
            payload: payload.to_vec(),
        })
    }

    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// The number at this position of the payload.
    fn number(&self, at: usize) -> u32 {
        let bytes = self.payload[at..at + 4].try_into();
        u32::from_be_bytes(bytes.expect("four bytes"))
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.payload[..self.payload.len().min(16)];
        let Self {
            kind,
            flags,
            stream,
            payload,
        } = self;
        let length = payload.len();
        write!(
            f,
            "type {kind} flags {flags:#x} stream {stream} length {length}: {start:x?}"
        )
    }
}

/// The frames of these bytes, which are complete.
fn frames(mut bytes: &[u8]) -> Vec<Frame> {
    let frames = std::iter::from_fn(|| Frame::take(&mut bytes)).collect();
    assert_eq!(bytes, b"", "an incomplete frame");
    frames
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn data(stream: u32, flags: u8, length: usize) -> Vec<u8> {
    frame(kind::DATA, flags, stream, &vec![b'd'; length])
}

/// DATA with this number of bytes, and as many of padding.
fn padded_data(stream: u32, flags: u8, length: usize, padding: u8) -> Vec<u8> {
    let mut payload = vec![padding];
    payload.resize(1 + length, b'd');
    payload.resize(1 + length + usize::from(padding), 0);
    frame(kind::DATA, flags | flag::PADDED, stream, &payload)
}

/// HEADERS with a complete field block.
fn headers(stream: u32, flags: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(
        kind::HEADERS,
        flags | flag::END_HEADERS,
        stream,
        &block(fields),
    )
}

fn continuation(stream: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    frame(kind::CONTINUATION, flags, stream, payload)
}

fn reset(stream: u32, code: ErrorCode) -> Vec<u8> {
    frame(kind::RST_STREAM, 0, stream, &code.0.to_be_bytes())
}

fn window_update(stream: u32, increment: u32) -> Vec<u8> {
    frame(kind::WINDOW_UPDATE, 0, stream, &increment.to_be_bytes())
}

fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let setting =
        |(name, value): &(u16, u32)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat();
    let payload: Vec<u8> = values.iter().flat_map(setting).collect();
    frame(kind::SETTINGS, 0, 0, &payload)
}

fn settings_ack() -> Vec<u8> {
    frame(kind::SETTINGS, flag::ACK, 0, &[])
}

fn priority(stream: u32, depends_on: u32) -> Vec<u8> {
    let payload = [&depends_on.to_be_bytes()[..], &[16]].concat();
    frame(kind::PRIORITY, 0, stream, &payload)
}

fn ping() -> Vec<u8> {
    frame(kind::PING, 0, 0, b"12345678")
}

fn go_away(last: u32, code: ErrorCode) -> Vec<u8> {
    let payload = [last.to_be_bytes(), code.0.to_be_bytes()].concat();
    frame(kind::GOAWAY, 0, 0, &payload)
}

/// A field block of literals that leave the dynamic table as it is.
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        literal(0, name, value, &mut block);
    }
    block
}

/// Appends a literal whose form is its first byte.
fn literal(form: u8, name: &str, value: &str, block: &mut Vec<u8>) {
    block.push(form);
    for text in [name, value] {
        length(text.len(), block);
        block.extend(text.as_bytes());
    }
}

/// Appends the length of a string without Huffman coding.
fn length(length: usize, block: &mut Vec<u8>) {
    if length < 127 {
        return block.push(length as u8);
    }
    block.push(127);
    let mut rest = length - 127;
    while rest >= 128 {
        block.push(rest as u8 | 128);
        rest >>= 7;
    }
    block.push(rest as u8);
}

const GET: [(&str, &str); 4] = [
    (":method", "GET"),
    (":scheme", "http"),
    (":path", "/"),
    (":authority", "test"),
];
const POST: [(&str, &str); 4] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/"),
    (":authority", "test"),
];
const OK: [(&str, &str); 1] = [(":status", "200")];

/// The head of a request from this side.
fn request(method: &str, fields: &[(&'static str, &str)]) -> Request {
    request_to("http://test/", method, fields)
}

fn request_to(uri: &str, method: &str, fields: &[(&'static str, &str)]) -> Request {
    let request = http::Request::builder().method(method).uri(uri);
    let (parts, ()) = request.body(()).expect("a request").into_parts();
    let mut head = Request::from(&parts);
    for (name, value) in fields {
        push(&mut head.fields, name, value);
    }
    head
}

/// The head of a response from this side.
fn response(status: u16, fields: &[(&'static str, &str)]) -> Response {
    Response {
        status: StatusCode::from_u16(status).expect("a status"),
        fields: fields_of(fields),
    }
}

fn fields_of(fields: &[(&'static str, &str)]) -> Fields {
    let mut list = Fields::default();
    for (name, value) in fields {
        push(&mut list, name, value);
    }
    list
}

fn push(fields: &mut Fields, name: &'static str, value: &str) {
    let value = HeaderValue::from_str(value).expect("a value");
    fields.push(&HeaderName::from_static(name), &value);
}

/// Counts how often it was woken.
#[derive(Default)]
struct Flag {
    is_set: AtomicBool,
    count: AtomicUsize,
}

impl Flag {
    /// A flag, and the waker that sets it.
    fn new() -> (Arc<Self>, Waker) {
        let flag = Arc::new(Self::default());
        (flag.clone(), flag.into())
    }

    /// Whether it was woken since the last call.
    fn take(&self) -> bool {
        self.is_set.swap(false, Ordering::Relaxed)
    }

    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Relaxed)
    }

    fn set(&self) {
        self.is_set.store(true, Ordering::Relaxed);
    }

    fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.set();
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The bytes of all bodies. The length is a prime number, so that no frame has the bytes of another
/// one.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut rng = fastrand::Rng::with_seed(1);
    std::iter::repeat_with(|| rng.u8(..))
        .take(1_048_573)
        .collect()
});

/// Where the bytes of a body are in the pattern.
fn place(body: u64, at: usize) -> usize {
    (body as usize * 7919 + at) % PATTERN.len()
}

/// The bytes of a body from this position on.
fn bytes_of(body: u64, at: usize, length: usize) -> Bytes {
    let start = place(body, at);
    let end = (start + length).min(PATTERN.len());
    let mut bytes = PATTERN[start..end].to_vec();
    bytes.extend_from_slice(&PATTERN[..length - bytes.len()]);
    bytes.into()
}

/// Fails unless these are the bytes of a body from this position on.
fn check_bytes(body: u64, at: usize, bytes: &[u8]) {
    let start = place(body, at);
    let (first, rest) = bytes.split_at(bytes.len().min(PATTERN.len() - start));
    let is_equal = *first == PATTERN[start..start + first.len()] && *rest == PATTERN[..rest.len()];
    assert!(is_equal, "wrong bytes of body {body} from {at} on");
}

/// Prints the seed of a test that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the seed is {}", self.0);
        }
    }
}
