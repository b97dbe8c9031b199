//! The nine bytes before each frame, and the frames that need no state (RFC 9113, sections 4 and 6).

use crate::ErrorCode;

/// The bytes with which a client begins a connection (RFC 9113, section 3.4).
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The length of a frame's header.
pub const HEADER_LENGTH: usize = 9;
/// The maximum length of a payload, in both directions: the value that every peer accepts.
pub const MAX_PAYLOAD: usize = 16_384;

/// The maximum length of a frame.
pub const MAX_FRAME: usize = HEADER_LENGTH + MAX_PAYLOAD;

/// The types of frames.
pub mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// The flags of frames.
pub mod flag {
    pub const END_STREAM: u8 = 1;
    pub const ACK: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    pub const PADDED: u8 = 8;
    pub const PRIORITY: u8 = 32;
}

/// The settings that this crate sends or reads (RFC 9113, section 6.5.2, and RFC 8441).
pub mod setting {
    pub const HEADER_TABLE_SIZE: u16 = 1;
    pub const ENABLE_PUSH: u16 = 2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_FRAME_SIZE: u16 = 5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
    pub const ENABLE_CONNECT_PROTOCOL: u16 = 8;
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub length: usize,
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
}

impl Header {
    /// Reads a header. `None` while it is incomplete.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let &[a, b, c, kind, flags, s, t, u, v] = bytes.first_chunk::<HEADER_LENGTH>()?;
        Some(Self {
            length: u32::from_be_bytes([0, a, b, c]) as usize,
            kind,
            flags,
            stream: u32::from_be_bytes([s, t, u, v]) & (u32::MAX >> 1),
        })
    }

    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub fn bytes(&self) -> [u8; HEADER_LENGTH] {
        let [_, a, b, c] = (self.length as u32).to_be_bytes();
        let [s, t, u, v] = self.stream.to_be_bytes();
        [a, b, c, self.kind, self.flags, s, t, u, v]
    }
}

/// Writes a frame with a payload.
pub fn write(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = payload.len();
    let header = Header {
        length,
        kind,
        flags,
        stream,
    };
    out.extend_from_slice(&header.bytes());
    out.extend_from_slice(payload);
}

pub fn write_reset(out: &mut Vec<u8>, stream: u32, code: ErrorCode) {
    write(out, kind::RST_STREAM, 0, stream, &code.0.to_be_bytes());
}

pub fn write_window_update(out: &mut Vec<u8>, stream: u32, increment: u32) {
    write(
        out,
        kind::WINDOW_UPDATE,
        0,
        stream,
        &increment.to_be_bytes(),
    );
}

pub fn write_go_away(out: &mut Vec<u8>, last_stream: u32, code: ErrorCode) {
    let mut payload = [0; 8];
    payload[..4].copy_from_slice(&last_stream.to_be_bytes());
    payload[4..].copy_from_slice(&code.0.to_be_bytes());
    write(out, kind::GOAWAY, 0, 0, &payload);
}

pub fn write_settings(out: &mut Vec<u8>, settings: &[(u16, u32)]) {
    let header = Header {
        length: 6 * settings.len(),
        kind: kind::SETTINGS,
        flags: 0,
        stream: 0,
    };
    out.extend_from_slice(&header.bytes());
    for (name, value) in settings {
        out.extend_from_slice(&name.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// Writes a field block as one HEADERS frame and the CONTINUATION frames that it needs. `block` begins
/// at this position of `out`, after the place for the first header.
pub fn finish_headers(out: &mut Vec<u8>, start: usize, stream: u32, end_stream: bool) {
    let length = out.len() - start - HEADER_LENGTH;
    let end_stream = if end_stream { flag::END_STREAM } else { 0 };
    let first = length.min(MAX_PAYLOAD);
    let is_whole = first == length;
    let header = Header {
        length: first,
        kind: kind::HEADERS,
        flags: end_stream | if is_whole { flag::END_HEADERS } else { 0 },
        stream,
    };
    out[start..start + HEADER_LENGTH].copy_from_slice(&header.bytes());
    if is_whole {
        return;
    }
    let rest = out.split_off(start + HEADER_LENGTH + first);
    let mut pieces = rest.chunks(MAX_PAYLOAD).peekable();
    while let Some(piece) = pieces.next() {
        let flags = match pieces.peek() {
            Some(_) => 0,
            None => flag::END_HEADERS,
        };
        write(out, kind::CONTINUATION, flags, stream, piece);
    }
}

/// The payload of a DATA or HEADERS frame without its padding. `None` if the padding is longer.
pub fn without_padding<'a>(header: &Header, payload: &'a [u8]) -> Option<&'a [u8]> {
    if !header.has(flag::PADDED) {
        return Some(payload);
    }
    let (&padding, rest) = payload.split_first()?;
    rest.get(..rest.len().checked_sub(padding.into())?)
}
