//! HTTP/1 bodies on their way: decoded from one connection and framed anew for the other, so that what the far side
//! reads as the end is what this side read as the end (RFC 9112, sections 6 and 7).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;
use tokio::io::AsyncWrite;

use super::head::Framing;
use crate::io::Io;
use crate::policy::{is_called_by, is_mesh_error};

/// The longest line of a chunk's size with its extensions.
const MAX_CHUNK_LINE: usize = 4096;
/// The most bytes of trailers.
const MAX_TRAILERS: usize = 16 * 1024;
/// How many bytes wait at most for the far side before nothing more is read from this one.
const MAX_WAITING: usize = 64 * 1024;

/// Why a body stopped short.
#[derive(Debug, Error)]
pub enum Broken {
    /// The sender closed or broke its connection.
    #[error("the sender closed or broke the connection in the middle of a body")]
    Gone,
    /// What the sender sent is no body.
    #[error("the body is malformed: {0}")]
    Malformed(&'static str),
    /// A connection reached the age at which it is reset.
    #[error("the connection reached its maximum age")]
    Expired,
    /// The receiver takes no more.
    #[error("the receiver takes no more: {0}")]
    Writing(io::Error),
}

/// One body between two connections. It starts with a head that waits to be written, so that a head and the start of
/// its body leave in one write.
pub struct Relay {
    decoder: Decoder,
    chunked: bool,
    /// Leaves before what is waiting; given again for each attempt.
    first: Bytes,
    waiting: BytesMut,
}

impl Relay {
    /// A body framed as `framing` behind `head`. `plain` drops the chunks' framing, for a receiver that knows HTTP/1.0.
    pub fn new(framing: Framing, head: BytesMut, plain: bool) -> Self {
        Self {
            decoder: Decoder::new(framing),
            chunked: framing == Framing::Chunked && !plain,
            first: Bytes::new(),
            waiting: head,
        }
    }

    /// The whole body has been read and written.
    pub fn is_done(&self) -> bool {
        self.first.is_empty() && self.waiting.is_empty() && self.decoder.is_done()
    }

    /// The whole body has been read.
    pub fn is_read(&self) -> bool {
        self.decoder.is_done()
    }

    /// What waits to be written now: the head and what came with it. It is given back with [`Relay::send_first`].
    pub fn take_waiting(&mut self) -> Bytes {
        self.waiting.split().freeze()
    }

    /// Has this written before anything else.
    pub fn send_first(&mut self, first: Bytes) {
        self.first = first;
    }

    /// The receiver takes no more: nothing is read for it any longer, and the sender's connection ends with the exchange.
    pub fn stop(&mut self) {
        self.first = Bytes::new();
        self.waiting = BytesMut::new();
        if !self.decoder.is_done() {
            self.decoder = Decoder::Stopped;
        }
    }

    /// Takes what of the body is in `from`'s buffer already. `seen` is shown each piece.
    pub fn take_buffered(
        &mut self,
        from: &mut BytesMut,
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Broken> {
        while !from.is_empty() && !self.decoder.is_done() {
            let before = from.len();
            let piece = self.decoder.decode(from).map_err(Broken::Malformed)?;
            match piece {
                Piece::Data(data) => {
                    seen(&data);
                    self.frame(data);
                }
                Piece::Trailers(trailers) if self.chunked => {
                    self.waiting.extend_from_slice(b"0\r\n");
                    self.waiting.extend_from_slice(&trailers);
                    self.waiting.extend_from_slice(b"\r\n");
                }
                Piece::Trailers(_) => {}
                Piece::Nothing if from.len() == before => break,
                Piece::Nothing => {}
            }
        }
        Ok(())
    }

    /// Moves the body along until it has all been written; shows each piece to `seen`.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Io,
        to: &mut Io,
        seen: &mut dyn FnMut(&[u8]),
    ) -> Poll<Result<(), Broken>> {
        loop {
            if self.waiting.len() < MAX_WAITING {
                self.take_buffered(from.unread(), seen)?;
            }
            ready!(self.poll_flush(cx, to))?;
            if matches!(self.decoder, Decoder::Done | Decoder::Stopped) {
                return Poll::Ready(Ok(()));
            }
            if ready!(from.poll_fill(cx)).map_err(|_| Broken::Gone)? == 0 {
                self.decoder.end_of_stream()?;
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>, to: &mut Io) -> Poll<Result<(), Broken>> {
        while !self.first.is_empty() {
            let written =
                ready!(Pin::new(&mut *to).poll_write(cx, &self.first)).map_err(Broken::Writing)?;
            self.first.advance(written);
        }
        while !self.waiting.is_empty() {
            let written = ready!(Pin::new(&mut *to).poll_write(cx, &self.waiting))
                .map_err(Broken::Writing)?;
            self.waiting.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    fn frame(&mut self, data: BytesMut) {
        if self.chunked {
            self.waiting
                .extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
            self.waiting.extend_from_slice(&data);
            self.waiting.extend_from_slice(b"\r\n");
        } else if self.waiting.is_empty() {
            self.waiting = data;
        } else {
            self.waiting.extend_from_slice(&data);
        }
    }
}

/// What one step of decoding took.
enum Piece {
    Data(BytesMut),
    /// The end of a chunked body, with its trailer fields as they were sent.
    Trailers(BytesMut),
    Nothing,
}

/// Where in a body the next byte lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoder {
    Length(u64),
    UntilClose,
    ChunkSize,
    ChunkData(u64),
    ChunkEnd,
    Trailers,
    Done,
    /// Nobody wants the rest.
    Stopped,
}

impl Decoder {
    fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Done,
            Framing::Length(length) => Self::Length(length),
            Framing::Chunked => Self::ChunkSize,
            Framing::UntilClose => Self::UntilClose,
        }
    }

    fn is_done(self) -> bool {
        self == Self::Done
    }

    fn decode(&mut self, from: &mut BytesMut) -> Result<Piece, &'static str> {
        match *self {
            Self::Done | Self::Stopped => Ok(Piece::Nothing),
            Self::UntilClose => Ok(Piece::Data(from.split())),
            Self::Length(left) => {
                let data = take(from, left);
                let left = left - data.len() as u64;
                *self = if left == 0 {
                    Self::Done
                } else {
                    Self::Length(left)
                };
                Ok(Piece::Data(data))
            }
            Self::ChunkSize => {
                let Some(line) = take_line(from, MAX_CHUNK_LINE)? else {
                    return Ok(Piece::Nothing);
                };
                *self = match parse_chunk_size(&line)? {
                    0 => Self::Trailers,
                    size => Self::ChunkData(size),
                };
                Ok(Piece::Nothing)
            }
            Self::ChunkData(left) => {
                let data = take(from, left);
                let left = left - data.len() as u64;
                *self = if left == 0 {
                    Self::ChunkEnd
                } else {
                    Self::ChunkData(left)
                };
                Ok(Piece::Data(data))
            }
            Self::ChunkEnd => {
                let ends = from.starts_with(b"\r\n");
                if !ends && !b"\r\n".starts_with(from) {
                    return Err("a chunk is longer than it said");
                }
                if ends {
                    from.advance(2);
                    *self = Self::ChunkSize;
                }
                Ok(Piece::Nothing)
            }
            Self::Trailers => self.decode_trailers(from),
        }
    }

    fn decode_trailers(&mut self, from: &mut BytesMut) -> Result<Piece, &'static str> {
        let end = if from.starts_with(b"\r\n") {
            Some(2)
        } else {
            memchr::memmem::find(from, b"\r\n\r\n").map(|at| at + 4)
        };
        if end.unwrap_or(from.len()) > MAX_TRAILERS {
            return Err("the trailers are too large");
        }
        let Some(end) = end else {
            return Ok(Piece::Nothing);
        };
        let raw = from.split_to(end);
        let mut storage = [httparse::EMPTY_HEADER; 32];
        let Ok(httparse::Status::Complete((read, fields))) =
            httparse::parse_headers(&raw, &mut storage)
        else {
            return Err("the trailers are malformed");
        };
        if read != end {
            return Err("the trailers are malformed");
        }
        let mut trailers = BytesMut::with_capacity(end);
        for field in fields.iter().filter(|field| !frames_or_names(field.name)) {
            trailers.extend_from_slice(field.name.as_bytes());
            trailers.extend_from_slice(b": ");
            trailers.extend_from_slice(field.value);
            trailers.extend_from_slice(b"\r\n");
        }
        *self = Self::Done;
        Ok(Piece::Trailers(trailers))
    }

    fn end_of_stream(&mut self) -> Result<(), Broken> {
        match self {
            Self::UntilClose | Self::Done => {
                *self = Self::Done;
                Ok(())
            }
            _ => Err(Broken::Gone),
        }
    }
}

/// Fields that must not stand in trailers (RFC 9110, section 6.5.1): they would reframe or reroute the message.
fn frames_or_names(name: &str) -> bool {
    [
        "content-length",
        "transfer-encoding",
        "host",
        "connection",
        "trailer",
        "te",
        "upgrade",
        "authorization",
    ]
    .iter()
    .any(|refused| name.eq_ignore_ascii_case(refused))
        || is_called_by(name.as_bytes())
        || is_mesh_error(name.as_bytes())
}

fn take(from: &mut BytesMut, at_most: u64) -> BytesMut {
    let length = usize::try_from(at_most)
        .unwrap_or(usize::MAX)
        .min(from.len());
    from.split_to(length)
}

fn take_line(from: &mut BytesMut, limit: usize) -> Result<Option<BytesMut>, &'static str> {
    match memchr::memchr(b'\n', from) {
        Some(at) if at <= limit && at > 0 && from[at - 1] == b'\r' => {
            let mut line = from.split_to(at + 1);
            line.truncate(at - 1);
            Ok(Some(line))
        }
        Some(at) if at <= limit => Err("a chunk's size ends without CR LF"),
        None if from.len() <= limit => Ok(None),
        _ => Err("the line of a chunk's size is too long"),
    }
}

fn parse_chunk_size(line: &[u8]) -> Result<u64, &'static str> {
    let digits = line
        .split(|byte| *byte == b';')
        .next()
        .unwrap_or_default()
        .trim_ascii_end();
    if digits.is_empty() || digits.len() > 16 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err("a chunk's size is not a hexadecimal number of at most 16 digits");
    }
    if line
        .iter()
        .any(|byte| byte.is_ascii_control() && *byte != b'\t')
    {
        return Err("a chunk's extension has a forbidden byte");
    }
    let text = std::str::from_utf8(digits).map_err(|_| "a chunk's size is not text")?;
    u64::from_str_radix(text, 16).map_err(|_| "a chunk's size is too large")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `input` in pieces of `step` bytes; gives what was framed anew, and what is left over.
    fn reframe(framing: Framing, input: &[u8], step: usize) -> Result<(String, String), String> {
        let mut relay = Relay::new(framing, BytesMut::new(), false);
        let mut from = BytesMut::new();
        let mut body = Vec::new();
        for piece in input.chunks(step) {
            from.extend_from_slice(piece);
            let taken = relay.take_buffered(&mut from, &mut |data| body.extend_from_slice(data));
            taken.map_err(|broken| format!("{broken:?}"))?;
        }
        assert!(
            relay.is_read(),
            "the body has not ended: {:?}",
            relay.decoder
        );
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&relay.waiting), text(&from)))
    }

    #[test]
    fn a_length_takes_no_byte_too_many() {
        for step in 1..12 {
            let (framed, left) = reframe(Framing::Length(5), b"helloGET /", step).unwrap();
            assert_eq!((framed.as_str(), left.as_str()), ("hello", "GET /"));
        }
    }

    #[test]
    fn chunks_are_framed_anew_with_their_trailers() {
        let input = b"3;ext=\"x\"\r\nabc\r\n0A \r\n0123456789\r\n0\r\nX-Sum: 9\r\nContent-Length: 3\r\nX.Called.By: a\r\nX-Mesh-Error: b\r\n\r\nrest";
        let whole = reframe(Framing::Chunked, input, input.len()).unwrap();
        assert_eq!(
            whole,
            (
                "3\r\nabc\r\na\r\n0123456789\r\n0\r\nX-Sum: 9\r\n\r\n".to_owned(),
                "rest".to_owned()
            )
        );
        for step in 1..7 {
            let (framed, left) = reframe(Framing::Chunked, input, step).unwrap();
            assert!(framed.ends_with("0\r\nX-Sum: 9\r\n\r\n"), "{framed}");
            assert_eq!(left, "rest");
        }
    }

    #[test]
    fn absurd_chunks_are_refused() {
        for input in [
            "\r\n",
            "g\r\n",
            "-1\r\n",
            "0x1\r\n",
            "11111111111111111\r\n",
            "1\nx\r\n",
            "1\r\nxy\r\n0\r\n\r\n",
            "1;\0\r\nx\r\n",
            "0\r\nbad trailer\r\n\r\n",
            "0\r\nX: 1\n\r\n\r\n\r\n",
        ] {
            let mut relay = Relay::new(Framing::Chunked, BytesMut::new(), false);
            assert!(
                relay
                    .take_buffered(&mut BytesMut::from(input), &mut |_| {})
                    .is_err()
                    || !relay.is_read(),
                "{input:?}"
            );
        }
        let endless = vec![b'1'; MAX_CHUNK_LINE + 2];
        let mut relay = Relay::new(Framing::Chunked, BytesMut::new(), false);
        assert!(
            relay
                .take_buffered(&mut BytesMut::from(&endless[..]), &mut |_| {})
                .is_err()
        );
    }

    #[test]
    fn a_close_ends_only_what_may_end_so() {
        assert!(Decoder::new(Framing::UntilClose).end_of_stream().is_ok());
        assert!(Decoder::new(Framing::Length(3)).end_of_stream().is_err());
        assert!(Decoder::new(Framing::Chunked).end_of_stream().is_err());
    }
}
