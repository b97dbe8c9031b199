//! Minimal HTTP/2 for the load generator and the origin server, at low CPU cost.
//!
//! Frames, an HPACK encoder with a dynamic table, and connection-level frames. It does not decode
//! HPACK: the client only checks for `:status 200`, the server distinguishes a GET from a gRPC call
//! by the frame with END_STREAM.

use thiserror::Error;

/// Client connection preface (RFC 9113, section 3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame types (RFC 9113, section 6).
#[allow(missing_docs)]
pub mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
}

/// Flag of DATA and HEADERS: last frame of the sender.
pub const END_STREAM: u8 = 0x1;
/// Flag of HEADERS: no CONTINUATION follows.
pub const END_HEADERS: u8 = 0x4;
const ACK: u8 = 0x1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

const HEADER_TABLE_SIZE: u16 = 1;
const MAX_CONCURRENT_STREAMS: u16 = 3;
const INITIAL_WINDOW_SIZE: u16 = 4;
const DEFAULT_TABLE_SIZE: u32 = 4096;
const DEFAULT_WINDOW: i64 = 65_535;
/// Connection receive window.
const RECEIVE_WINDOW: u32 = 1 << 30;

/// Connection error.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// The peer closes the connection.
    #[error("the peer sent GOAWAY, error code {0}")]
    GoAway(u32),
    /// A frame that is too short for its type.
    #[error("a frame of type {0} is too short")]
    TooShort(u8),
    /// A window that is smaller than one message.
    #[error("the peer's stream window of {0} bytes is smaller than one message")]
    SmallWindow(u32),
}

/// A frame that borrows from the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// See [`kind`].
    pub kind: u8,
    /// Flag bits; their meaning depends on the kind.
    pub flags: u8,
    /// 0: the connection itself.
    pub stream: u32,
    payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The first frame of `bytes` and its length on the wire; `None` until it is complete.
    pub fn parse(bytes: &'a [u8]) -> Option<(Self, usize)> {
        let (head, rest) = bytes.split_first_chunk::<9>()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff;
        Some((
            Frame {
                kind: head[3],
                flags: head[4],
                stream,
                payload: rest.get(..length)?,
            },
            9 + length,
        ))
    }

    /// The payload without padding and priority.
    pub fn content(&self) -> Result<&'a [u8], Error> {
        let short = || Error::TooShort(self.kind);
        let mut content = self.payload;
        if matches!(self.kind, kind::DATA | kind::HEADERS) && self.flags & PADDED != 0 {
            let (&padding, rest) = content.split_first().ok_or_else(short)?;
            content = rest
                .get(..rest.len().saturating_sub(padding as usize))
                .ok_or_else(short)?;
        }
        if self.kind == kind::HEADERS && self.flags & PRIORITY != 0 {
            content = content.get(5..).ok_or_else(short)?;
        }
        Ok(content)
    }

    /// Whether the sender closes its side of the stream.
    pub fn ends_stream(&self) -> bool {
        matches!(self.kind, kind::DATA | kind::HEADERS) && self.flags & END_STREAM != 0
    }
}

/// Appends one frame.
pub fn put_frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len())
        .expect("frames here are far below 16 MB")
        .to_be_bytes();
    out.extend_from_slice(&[length[1], length[2], length[3], kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// Whether a header block starts with `:status 200` as static table entry, after table size
/// updates.
pub fn is_ok(mut block: &[u8]) -> bool {
    while let Some((&first, mut rest)) = block.split_first()
        && first & 0xe0 == 0x20
    {
        if first == 0x3f {
            // A multi-byte integer ends with a byte without the high bit.
            let more = rest.iter().take_while(|&&byte| byte & 0x80 != 0).count();
            rest = rest.get(more + 1..).unwrap_or_default();
        }
        block = rest;
    }
    block.first() == Some(&0x88)
}

/// A header field to send.
#[derive(Clone, Copy, Debug)]
pub enum Field {
    /// Index in the HPACK static table.
    Static(u8),
    /// Name and value, each shorter than 127 bytes.
    Literal(&'static str, &'static str),
}

/// Connection state: HPACK encoder table and flow-control windows.
pub struct Session {
    table: Vec<(&'static str, &'static str)>,
    indexing: bool,
    shrink_announced: bool,
    send_window: i64,
    received: u32,
    message: usize,
    /// The peer has sent its SETTINGS.
    pub settings_received: bool,
    /// Concurrent streams that the peer allows.
    pub max_streams: u32,
}

impl Session {
    /// Creates a connection whose longest message has `message` bytes.
    pub fn new(message: usize) -> Self {
        Session {
            table: Vec::new(),
            indexing: true,
            shrink_announced: false,
            send_window: DEFAULT_WINDOW,
            received: 0,
            message,
            settings_received: false,
            max_streams: u32::MAX,
        }
    }

    /// Appends SETTINGS and a large connection window.
    pub fn send_settings(&self, out: &mut Vec<u8>) {
        let mut settings = Vec::new();
        for (name, value) in [
            (MAX_CONCURRENT_STREAMS, 1000),
            (INITIAL_WINDOW_SIZE, 1 << 20),
        ] {
            settings.extend_from_slice(&u16::to_be_bytes(name));
            settings.extend_from_slice(&u32::to_be_bytes(value));
        }
        put_frame(out, kind::SETTINGS, 0, 0, &settings);
        put_frame(
            out,
            kind::WINDOW_UPDATE,
            0,
            0,
            &RECEIVE_WINDOW.to_be_bytes(),
        );
    }

    /// Processes connection-level frames and the flow control of DATA. Appends responses to `out`.
    pub fn receive(&mut self, frame: &Frame, out: &mut Vec<u8>) -> Result<(), Error> {
        match frame.kind {
            kind::DATA => self.refill(frame.payload.len() as u32, out),
            kind::SETTINGS if frame.flags & ACK == 0 => {
                self.apply(frame.payload)?;
                put_frame(out, kind::SETTINGS, ACK, 0, &[]);
            }
            kind::PING if frame.flags & ACK == 0 => {
                put_frame(out, kind::PING, ACK, 0, frame.payload)
            }
            kind::WINDOW_UPDATE if frame.stream == 0 => {
                self.send_window += i64::from(number(frame.payload, 0, frame.kind)? & 0x7fff_ffff)
            }
            kind::GOAWAY => return Err(Error::GoAway(number(frame.payload, 4, frame.kind)?)),
            _ => {}
        }
        Ok(())
    }

    /// Reserves `length` bytes of the send window; returns false if they do not fit.
    pub fn may_send(&mut self, length: usize) -> bool {
        let fits = self.send_window >= length as i64;
        if fits {
            self.send_window -= length as i64;
        }
        fits
    }

    /// Appends a HEADERS frame.
    pub fn put_headers(&mut self, out: &mut Vec<u8>, stream: u32, flags: u8, fields: &[Field]) {
        let start = out.len();
        put_frame(out, kind::HEADERS, flags | END_HEADERS, stream, &[]);
        self.encode(out, fields);
        let length = u32::try_from(out.len() - start - 9)
            .expect("a header block here is short")
            .to_be_bytes();
        out[start..start + 3].copy_from_slice(&length[1..]);
    }

    fn encode(&mut self, out: &mut Vec<u8>, fields: &[Field]) {
        if !self.indexing && !self.shrink_announced {
            out.push(0x20);
            self.shrink_announced = true;
        }
        for field in fields {
            match *field {
                Field::Static(index) => out.push(0x80 | index),
                Field::Literal(name, value) => {
                    match self.table.iter().rposition(|entry| *entry == (name, value)) {
                        // The newest entry has index 62. The table is small: the index is
                        // below 127.
                        Some(position) => {
                            out.push(0x80 | (62 + self.table.len() - 1 - position) as u8)
                        }
                        None => self.encode_literal(out, name, value),
                    }
                }
            }
        }
    }

    fn encode_literal(&mut self, out: &mut Vec<u8>, name: &'static str, value: &'static str) {
        out.push(if self.indexing { 0x40 } else { 0x00 });
        for text in [name, value] {
            debug_assert!(text.len() < 127, "a longer length needs a second byte");
            out.push(text.len() as u8);
            out.extend_from_slice(text.as_bytes());
        }
        if self.indexing {
            self.table.push((name, value));
        }
    }

    fn apply(&mut self, settings: &[u8]) -> Result<(), Error> {
        self.settings_received = true;
        for setting in settings.chunks_exact(6) {
            let value = u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]]);
            match u16::from_be_bytes([setting[0], setting[1]]) {
                HEADER_TABLE_SIZE if value < DEFAULT_TABLE_SIZE => {
                    self.indexing = false;
                    self.table.clear();
                }
                MAX_CONCURRENT_STREAMS => self.max_streams = value,
                INITIAL_WINDOW_SIZE if (value as usize) < self.message => {
                    return Err(Error::SmallWindow(value));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn refill(&mut self, length: u32, out: &mut Vec<u8>) {
        self.received += length;
        if self.received >= RECEIVE_WINDOW / 2 {
            put_frame(out, kind::WINDOW_UPDATE, 0, 0, &self.received.to_be_bytes());
            self.received = 0;
        }
    }
}

fn number(payload: &[u8], at: usize, kind: u8) -> Result<u32, Error> {
    let bytes = payload
        .get(at..)
        .and_then(|rest| rest.first_chunk::<4>())
        .ok_or(Error::TooShort(kind))?;
    Ok(u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_round_trip() {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, kind::DATA, END_STREAM, 5, b"hello");
        let (frame, length) = Frame::parse(&bytes).unwrap();
        assert_eq!(
            (frame.kind, frame.stream, frame.content().unwrap(), length),
            (kind::DATA, 5, &b"hello"[..], bytes.len())
        );
        assert!(frame.ends_stream());
    }

    #[test]
    fn truncated_frame_is_incomplete() {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, kind::PING, 0, 0, &[7; 8]);
        assert!((0..bytes.len()).all(|cut| Frame::parse(&bytes[..cut]).is_none()));
    }

    #[test]
    fn content_excludes_padding_and_priority() {
        let payload = [2, 0, 0, 0, 0, 16, 0x88, 0xff, 0xff];
        let frame = Frame {
            kind: kind::HEADERS,
            flags: PADDED | PRIORITY,
            stream: 1,
            payload: &payload,
        };
        assert_eq!(frame.content(), Ok(&[0x88][..]));
        let cut = Frame {
            payload: &payload[..3],
            ..frame
        };
        assert_eq!(cut.content(), Err(Error::TooShort(kind::HEADERS)));
    }

    #[test]
    fn repeated_field_is_indexed() {
        let mut session = Session::new(1);
        let fields = [
            Field::Static(2),
            Field::Literal("a", "b"),
            Field::Literal("c", "d"),
        ];
        let mut first = Vec::new();
        session.encode(&mut first, &fields);
        let mut second = Vec::new();
        session.encode(&mut second, &fields);
        assert_eq!(first, b"\x82\x40\x01a\x01b\x40\x01c\x01d");
        assert_eq!(second, [0x82, 0x80 | 63, 0x80 | 62]);
    }

    #[test]
    fn smaller_peer_table_disables_indexing() {
        let mut session = Session::new(1);
        session.apply(&[0, 1, 0, 0, 0, 0]).unwrap();
        let mut block = Vec::new();
        session.encode(&mut block, &[Field::Literal("a", "b")]);
        session.encode(&mut block, &[Field::Literal("a", "b")]);
        assert_eq!(block, b"\x20\x00\x01a\x01b\x00\x01a\x01b");
    }

    #[test]
    fn is_ok_skips_table_size_updates() {
        assert!(is_ok(&[0x88, 0x61]) && is_ok(&[0x20, 0x3f, 0xe1, 0x1f, 0x88]));
        assert!(!is_ok(&[0x8d]) && !is_ok(&[]) && !is_ok(&[0x3f]));
    }

    #[test]
    fn send_window_limits_and_reopens() {
        let mut session = Session::new(1024);
        assert!(session.may_send(65_000) && !session.may_send(1000));
        let mut update = Vec::new();
        put_frame(
            &mut update,
            kind::WINDOW_UPDATE,
            0,
            0,
            &1000_u32.to_be_bytes(),
        );
        session
            .receive(&Frame::parse(&update).unwrap().0, &mut Vec::new())
            .unwrap();
        assert!(session.may_send(1000));
    }

    #[test]
    fn goaway_is_an_error() {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, kind::GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 11]);
        let frame = Frame::parse(&bytes).unwrap().0;
        assert_eq!(
            Session::new(1).receive(&frame, &mut Vec::new()),
            Err(Error::GoAway(11))
        );
    }
}
