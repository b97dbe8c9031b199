//! HTTP/1 message bodies (RFC 9112, sections 6 and 7): decoded from one connection and encoded
//! again for the other one, so that both peers agree on the end of the message.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use diy_mesh_proto::field::{is_of_mesh, is_same_name};
use thiserror::Error;
use tokio::io::AsyncWrite;

use super::head::{Framing, LineSearch, put_field};
use crate::context::flow::Announced;
use crate::http::credentials::PolicyFields;
use crate::http::replay::Replay;
use crate::protocol::{MAX_SECTION, TooLarge};
use crate::secure::io::Io;

/// The maximum length of a chunk-size line with its extensions.
const MAX_CHUNK_LINE: usize = 4096;
/// The number of unwritten bytes from which the relay stops reading.
const MAX_PENDING: usize = 64 * 1024;

/// Why a body is incomplete.
#[derive(Debug, Error)]
pub enum BodyError {
    /// The sender ended its direction of the connection.
    #[error("the sender closed the connection before the end of the body")]
    SenderClosed,
    /// The sender reset its connection, or ended it without TLS close_notify.
    #[error("the sender's connection failed before the end of the body: {0}")]
    SenderFailed(io::Error),
    /// The client closed or reset its connection during the response.
    #[error("the client closed the connection before the end of the response")]
    ClientClosed,
    /// The encoding violates RFC 9112.
    #[error("the body is malformed: {0}")]
    Malformed(&'static str),
    /// No memory is left to the caller.
    #[error("the proxy is overloaded")]
    Overloaded,
    /// The policy has changed, and does not allow the request.
    #[error("{0}")]
    Denied(String),
    /// A connection reached its maximum age.
    #[error("the connection reached its maximum age")]
    Expired,
    /// The receiver closed or reset its connection.
    #[error("cannot write to the receiver: {0}")]
    Write(io::Error),
}

/// A relay of one message between two connections. The head and the start of the body are written
/// together.
pub struct Relay {
    decoder: Decoder,
    chunked: bool,
    /// The length of the head.
    head: usize,
    /// Written before `pending`: bytes that are kept for another attempt, or were.
    prefix: Bytes,
    /// Encoded bytes that were not yet written.
    pending: BytesMut,
    replay: Replay,
    /// Some bytes were written since the last attempt began.
    written: bool,
    /// `prefix` without the lines that were added for this attempt, until some bytes are written.
    unchanged: Option<Bytes>,
    /// The receiver accepts no more bytes.
    stopped: bool,
    /// Bytes were read since the last acknowledgment. The sender may keep the rest until then.
    unacknowledged: bool,
    /// Fields that are removed from the trailers, with those that are always.
    removed: Option<PolicyFields>,
}

impl Relay {
    /// Creates a relay of `head` and a body with this framing. `plain` removes the chunked
    /// encoding, for a receiver that supports only HTTP/1.0.
    pub fn new(framing: Framing, head: BytesMut, plain: bool) -> Self {
        Self {
            decoder: Decoder::new(framing),
            chunked: framing == Framing::Chunked && !plain,
            head: head.len(),
            prefix: Bytes::new(),
            pending: head,
            replay: Replay::off(),
            written: false,
            unchanged: None,
            stopped: false,
            unacknowledged: true,
            removed: None,
        }
    }

    /// Creates a relay of a request. Its start is kept for another attempt until
    /// [`Relay::discard_replay`], and its trailers lose the `removed` fields.
    pub fn with_replay(framing: Framing, head: BytesMut, removed: Option<PolicyFields>) -> Self {
        Self {
            replay: Replay::new(head.len()),
            removed,
            ..Self::new(framing, head, false)
        }
    }

    /// Whether there is nothing more to write: the relay is complete, or the receiver accepts no more
    /// bytes.
    pub fn is_done(&self) -> bool {
        self.stopped || self.is_complete()
    }

    /// Whether the complete body was read and written.
    pub fn is_complete(&self) -> bool {
        self.prefix.is_empty() && self.pending.is_empty() && self.decoder.is_done()
    }

    /// Whether the complete body was read.
    pub fn is_read(&self) -> bool {
        self.decoder.is_done()
    }

    /// Encoded bytes that were not yet written.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }

    /// The body so far, decoded again. Nothing has been written.
    pub fn body(&self) -> Bytes {
        let framing = if self.chunked {
            Framing::Chunked
        } else {
            Framing::UntilClose
        };
        let mut plain = Self::new(framing, BytesMut::new(), true);
        let mut encoded = BytesMut::from(&self.pending[self.head..]);
        // This relay has encoded it.
        let _ = plain.decode_buffered(&mut encoded, &mut |_| {});
        plain.pending.freeze()
    }

    /// The size of the buffers of the relay.
    pub fn buffered(&self) -> usize {
        let unchanged = self.unchanged.as_ref().map_or(0, Bytes::len);
        self.prefix.len() + unchanged + self.pending.capacity() + self.replay.buffered()
    }

    /// Whether some bytes were written since the last attempt began.
    pub fn is_written(&self) -> bool {
        self.written
    }

    /// Whether another attempt can send all bytes again.
    pub fn can_rewind(&self) -> bool {
        !self.written || self.replay.is_available()
    }

    /// Prepares another attempt. Returns false if some of the written bytes are not kept.
    pub fn rewind(&mut self) -> bool {
        if self.written {
            match self.replay.bytes() {
                Some(kept) => self.prefix = kept,
                None => return false,
            }
        } else if let Some(unchanged) = self.unchanged.take() {
            self.prefix = unchanged;
        }
        self.written = false;
        self.stopped = false;
        true
    }

    /// Adds fields to the head, for the attempt that begins now.
    pub fn add_fields(&mut self, fields: Announced) {
        if self.prefix.is_empty() {
            self.keep_pending();
        }
        // Before the empty line. The bytes that are kept for further attempts stay as they are.
        let (head, rest) = self.prefix.split_at(self.head.saturating_sub(2));
        let changed = fields.insert(head, rest).into();
        self.unchanged = Some(std::mem::replace(&mut self.prefix, changed));
    }

    /// Drops the bytes that are kept for another attempt.
    pub fn discard_replay(&mut self) {
        self.replay.discard();
    }

    /// Replaces the head, of which nothing has been written.
    pub fn replace_head(&mut self, head: BytesMut) {
        let body = self.pending.split_off(self.head);
        self.head = head.len();
        self.replay = Replay::new(self.head);
        self.pending = head;
        self.pending.extend_from_slice(&body);
    }

    /// The sender has ended its direction of the connection.
    pub fn end_of_stream(&mut self) -> Result<(), BodyError> {
        self.decoder.end_of_stream()
    }

    /// Ends the relay early: the receiver accepts no more bytes. The sender's connection ends with
    /// the exchange, unless the complete body was read.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Decodes the part of the body that is in the buffer `from`, and passes its data to `on_data`.
    pub fn decode_buffered(
        &mut self,
        from: &mut BytesMut,
        on_data: &mut dyn FnMut(&[u8]),
    ) -> Result<(), BodyError> {
        while !from.is_empty() && !self.decoder.is_done() {
            let before = from.len();
            let decoded = self.decoder.decode(from, self.removed.as_deref());
            match decoded.map_err(BodyError::Malformed)? {
                Decoded::Data(data) => {
                    on_data(&data);
                    self.encode(data);
                }
                Decoded::Trailers(trailers) if self.chunked => {
                    self.pending.extend_from_slice(b"0\r\n");
                    self.pending.extend_from_slice(&trailers);
                    self.pending.extend_from_slice(b"\r\n");
                }
                Decoded::Trailers(_) => {}
                Decoded::Nothing if from.len() == before => break,
                Decoded::Nothing => {}
            }
        }
        Ok(())
    }

    /// Decodes the part of the body that is in the buffer `from`, and drops it.
    pub fn drop_buffered(&mut self, from: &mut BytesMut) -> Result<(), BodyError> {
        let decoded = self.decode_buffered(from, &mut |_| {});
        self.pending.clear();
        decoded
    }

    /// Relays until the complete body is written. Passes the data to `on_data`.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Io,
        to: &mut Io,
        on_data: &mut dyn FnMut(&[u8]),
    ) -> Poll<Result<(), BodyError>> {
        loop {
            if self.pending.len() < MAX_PENDING {
                self.decode_buffered(from.unread(), on_data)?;
            }
            ready!(self.poll_flush(cx, to))?;
            if self.is_done() {
                return Poll::Ready(Ok(()));
            }
            let Poll::Ready(filled) = from.poll_fill(cx) else {
                if std::mem::take(&mut self.unacknowledged) {
                    from.acknowledge();
                }
                return Poll::Pending;
            };
            self.unacknowledged = true;
            if filled.map_err(BodyError::SenderFailed)? == 0 {
                self.end_of_stream()?;
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>, to: &mut Io) -> Poll<Result<(), BodyError>> {
        if self.replay.is_available() && self.prefix.is_empty() && !self.pending.is_empty() {
            self.keep_pending();
        }
        let length = self.prefix.len() + self.pending.len();
        let flushed = poll_write_all(cx, to, &mut self.prefix);
        let flushed = match flushed {
            Poll::Ready(Ok(())) => poll_write_all(cx, to, &mut self.pending),
            unfinished => unfinished,
        };
        if self.prefix.len() + self.pending.len() < length {
            self.written = true;
            self.unchanged = None;
        }
        flushed
    }

    fn keep_pending(&mut self) {
        self.prefix = self.pending.split().freeze();
        self.replay.keep(&self.prefix);
    }

    fn encode(&mut self, data: BytesMut) {
        if self.chunked {
            self.pending
                .extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
            self.pending.extend_from_slice(&data);
            self.pending.extend_from_slice(b"\r\n");
        } else if self.pending.is_empty() {
            self.pending = data;
        } else {
            self.pending.extend_from_slice(&data);
        }
    }
}

fn poll_write_all(
    cx: &mut Context<'_>,
    to: &mut Io,
    bytes: &mut impl Buf,
) -> Poll<Result<(), BodyError>> {
    while bytes.has_remaining() {
        let written =
            ready!(Pin::new(&mut *to).poll_write(cx, bytes.chunk())).map_err(BodyError::Write)?;
        bytes.advance(written);
    }
    Poll::Ready(Ok(()))
}

/// The result of one decoding step.
enum Decoded {
    Data(BytesMut),
    /// The end of a chunked body, with the permitted trailer fields.
    Trailers(BytesMut),
    Nothing,
}

/// The state of the decoder: what the next byte belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoder {
    Length(u64),
    UntilClose,
    ChunkSize(LineSearch),
    ChunkData(u64),
    ChunkEnd,
    Trailers(LineSearch),
    Done,
}

impl Decoder {
    fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Done,
            Framing::Length(length) => Self::Length(length),
            Framing::Chunked => Self::ChunkSize(LineSearch::default()),
            Framing::UntilClose => Self::UntilClose,
        }
    }

    fn is_done(self) -> bool {
        self == Self::Done
    }

    fn decode(
        &mut self,
        from: &mut BytesMut,
        removed: Option<&[Arc<str>]>,
    ) -> Result<Decoded, &'static str> {
        match self {
            Self::Done => Ok(Decoded::Nothing),
            Self::UntilClose => Ok(Decoded::Data(from.split())),
            &mut (Self::Length(left) | Self::ChunkData(left)) => {
                let data = take(from, left);
                *self = match (*self, left - data.len() as u64) {
                    (Self::Length(_), 0) => Self::Done,
                    (Self::Length(_), left) => Self::Length(left),
                    (_, 0) => Self::ChunkEnd,
                    (_, left) => Self::ChunkData(left),
                };
                Ok(Decoded::Data(data))
            }
            Self::ChunkSize(search) => {
                let Some(line) = take_line(from, search)? else {
                    return Ok(Decoded::Nothing);
                };
                *self = match parse_chunk_size(&line)? {
                    0 => Self::Trailers(LineSearch::default()),
                    size => Self::ChunkData(size),
                };
                Ok(Decoded::Nothing)
            }

            Self::ChunkEnd => {
                let ends = from.starts_with(b"\r\n");
                if !ends && !b"\r\n".starts_with(from) {
                    return Err("a chunk is longer than its size");
                }
                if ends {
                    from.advance(2);
                    *self = Self::ChunkSize(LineSearch::default());
                }
                Ok(Decoded::Nothing)
            }
            Self::Trailers(search) => {
                let Some(raw) = take_trailers(from, search)? else {
                    return Ok(Decoded::Nothing);
                };
                let trailers = permitted_trailers(&raw, removed.unwrap_or_default())?;
                *self = Self::Done;
                Ok(Decoded::Trailers(trailers))
            }
        }
    }

    fn end_of_stream(&mut self) -> Result<(), BodyError> {
        match self {
            Self::UntilClose | Self::Done => {
                *self = Self::Done;
                Ok(())
            }
            _ => Err(BodyError::SenderClosed),
        }
    }
}

/// Whether the field is forbidden in trailers, because it is necessary for framing, routing or
/// authentication (RFC 9110, section 6.5.1), or because only the mesh may set it.
fn is_forbidden_in_trailers(name: &str) -> bool {
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
    .any(|forbidden| name.eq_ignore_ascii_case(forbidden))
        || is_of_mesh(name.as_bytes())
}

fn take(from: &mut BytesMut, at_most: u64) -> BytesMut {
    let length = usize::try_from(at_most)
        .unwrap_or(usize::MAX)
        .min(from.len());
    from.split_to(length)
}

/// A complete chunk-size line, without its end.
fn take_line(
    from: &mut BytesMut,
    search: &mut LineSearch,
) -> Result<Option<BytesMut>, &'static str> {
    let end = search.next_end(from);
    if end.unwrap_or(from.len()) > MAX_CHUNK_LINE {
        return Err("a chunk-size line is over 4096 bytes");
    }
    let Some(end) = end else {
        return Ok(None);
    };
    let mut line = from.split_to(end);
    let Some(length) = line.strip_suffix(b"\r\n").map(<[u8]>::len) else {
        return Err("a chunk-size line ends without CR LF");
    };
    line.truncate(length);
    Ok(Some(line))
}

/// A complete trailer section, with the empty line at its end.
fn take_trailers(
    from: &mut BytesMut,
    search: &mut LineSearch,
) -> Result<Option<BytesMut>, &'static str> {
    let end = search.next_empty(from)?;
    if end.unwrap_or(from.len()) > MAX_SECTION {
        Err(TooLarge::Trailers.message())
    } else {
        Ok(end.map(|end| from.split_to(end)))
    }
}

/// Encodes the trailer fields that are not forbidden.
fn permitted_trailers(raw: &[u8], removed: &[Arc<str>]) -> Result<BytesMut, &'static str> {
    let mut storage = [httparse::EMPTY_HEADER; 32];
    let fields = match httparse::parse_headers(raw, &mut storage) {
        Ok(httparse::Status::Complete((read, fields))) if read == raw.len() => fields,
        _ => return Err("the trailers are malformed"),
    };
    let mut trailers = BytesMut::with_capacity(raw.len());
    let is_permitted = |field: &&httparse::Header<'_>| {
        let is_same = |own: &Arc<str>| is_same_name(field.name.as_bytes(), own.as_bytes());
        !is_forbidden_in_trailers(field.name) && !removed.iter().any(is_same)
    };
    for field in fields.iter().filter(is_permitted) {
        put_field(&mut trailers, field.name.as_bytes(), field.value);
    }
    Ok(trailers)
}

fn parse_chunk_size(line: &[u8]) -> Result<u64, &'static str> {
    let digits = line
        .split(|byte| *byte == b';')
        .next()
        .unwrap_or_default()
        .trim_ascii_end();
    if digits.is_empty() || digits.len() > 16 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err("a chunk size is not a hexadecimal number of at most 16 digits");
    }
    if line
        .iter()
        .any(|byte| byte.is_ascii_control() && *byte != b'\t')
    {
        return Err("a chunk extension has a forbidden byte");
    }
    let text = std::str::from_utf8(digits).map_err(|_| "a chunk size is not text")?;
    u64::from_str_radix(text, 16).map_err(|_| "a chunk size is too large")
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::secure::io::tests::pair;

    /// Relays `input` in pieces of `step` bytes. Returns the encoded body and the remaining input.
    fn relay(framing: Framing, input: &[u8], step: usize) -> Result<(String, String), String> {
        let mut relay = Relay::new(framing, BytesMut::new(), false);
        let mut from = BytesMut::new();
        let mut body = Vec::new();
        for piece in input.chunks(step) {
            from.extend_from_slice(piece);
            relay
                .decode_buffered(&mut from, &mut |data| body.extend_from_slice(data))
                .map_err(|error| format!("{error:?}"))?;
        }
        assert!(
            relay.is_read(),
            "the body is incomplete: {:?}",
            relay.decoder
        );
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&relay.pending), text(&from)))
    }

    #[tokio::test]
    async fn request_whose_first_write_fails_is_untouched() {
        const REQUEST: &[u8] = b"POST / HTTP/1.1\r\n\r\n";
        let ((mut client, _client), (mut closed, upstream)) = (pair().await, pair().await);
        upstream.set_zero_linger().unwrap();
        drop(upstream);
        let filled = poll_fn(|cx| closed.poll_fill(cx)).await;
        assert!(filled.is_err(), "it was reset");
        let mut upload = Relay::with_replay(Framing::None, REQUEST.into(), None);
        let sent = poll_fn(|cx| upload.poll(cx, &mut client, &mut closed, &mut |_| {})).await;
        assert!(matches!(sent, Err(BodyError::Write(_))), "{sent:?}");
        assert!(!upload.is_written() && upload.rewind());
        let (mut open, mut upstream) = pair().await;
        let sent = poll_fn(|cx| upload.poll(cx, &mut client, &mut open, &mut |_| {})).await;
        assert!(sent.is_ok() && upload.is_written());
        let mut received = [0; REQUEST.len()];
        upstream.read_exact(&mut received).await.unwrap();
        assert_eq!(received, REQUEST);
    }

    /// Two ends of a connection that has carried many requests and responses, so that the kernel
    /// delays the acknowledgments of the near one.
    async fn busy_connection() -> (Io, TcpStream) {
        let (mut near, mut far) = pair().await;
        while near.socket().quickack().unwrap() {
            far.write_all(b"response").await.unwrap();
            near.read_exact(&mut [0; 8]).await.unwrap();
            near.write_all(b"request").await.unwrap();
            far.read_exact(&mut [0; 7]).await.unwrap();
        }
        (near, far)
    }

    #[tokio::test]
    async fn acknowledges_a_part_of_a_body_when_the_rest_does_not_follow() {
        let (mut from, mut far) = busy_connection().await;
        let (mut to, _client) = busy_connection().await;
        let head = BytesMut::from(&b"head"[..]);
        let mut relay = Relay::new(Framing::Length(8), head, false);
        let mut poll = async |from: &mut Io, relay: &mut Relay, wanted: usize| {
            let mut read = 0;
            poll_fn(|cx| {
                let done = relay.poll(cx, from, &mut to, &mut |data| read += data.len());
                if read < wanted {
                    Poll::Pending
                } else {
                    Poll::Ready(done.is_ready())
                }
            })
            .await
        };
        // The head was read before.
        assert!(!poll(&mut from, &mut relay, 0).await);
        assert!(from.socket().quickack().unwrap());
        // Pending again, without new bytes: no system call.
        from.socket().set_quickack(false).unwrap();
        assert!(!poll(&mut from, &mut relay, 0).await);
        assert!(!from.socket().quickack().unwrap());
        far.write_all(b"half").await.unwrap();
        assert!(!poll(&mut from, &mut relay, 4).await);
        assert!(from.socket().quickack().unwrap());
        // Nothing follows a complete body.
        from.socket().set_quickack(false).unwrap();
        far.write_all(b"rest").await.unwrap();
        assert!(poll(&mut from, &mut relay, 4).await);
        assert!(!from.socket().quickack().unwrap());
    }

    #[test]
    fn relay_that_was_stopped_is_done_and_not_complete() {
        let mut relay = Relay::new(Framing::Length(3), BytesMut::new(), false);
        let mut from = BytesMut::from(&b"abc"[..]);
        relay.decode_buffered(&mut from, &mut |_| {}).unwrap();
        assert!(relay.is_read() && !relay.is_done());
        relay.stop();
        assert!(relay.is_done() && !relay.is_complete());
    }

    #[test]
    fn length_leaves_the_next_request_unread() {
        for step in 1..12 {
            let (encoded, left) = relay(Framing::Length(5), b"helloGET /", step).unwrap();
            assert_eq!((encoded.as_str(), left.as_str()), ("hello", "GET /"));
        }
    }

    #[test]
    fn encodes_chunks_again_with_permitted_trailers() {
        let input = b"3;ext=\"x\"\r\nabc\r\n0A \r\n0123456789\r\n0\r\nX-Sum: 9\r\nContent-Length: 3\r\nX.Called.By: a\r\nX_Mesh_Previous.Attempts: 1\r\nX-Mesh-Error: b\r\n\r\nrest";
        let whole = relay(Framing::Chunked, input, input.len()).unwrap();
        assert_eq!(
            whole,
            (
                "3\r\nabc\r\na\r\n0123456789\r\n0\r\nX-Sum: 9\r\n\r\n".to_owned(),
                "rest".to_owned()
            )
        );
        for step in 1..7 {
            let (encoded, left) = relay(Framing::Chunked, input, step).unwrap();
            assert!(encoded.ends_with("0\r\nX-Sum: 9\r\n\r\n"), "{encoded}");
            assert_eq!(left, "rest");
        }
    }

    #[test]
    fn rejects_malformed_chunks() {
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
            let decoded = relay.decode_buffered(&mut BytesMut::from(input), &mut |_| {});
            assert!(decoded.is_err() && !relay.is_read(), "{input:?}");
        }
        let endless = vec![b'1'; MAX_CHUNK_LINE + 2];
        let mut relay = Relay::new(Framing::Chunked, BytesMut::new(), false);
        assert!(
            relay
                .decode_buffered(&mut BytesMut::from(&endless[..]), &mut |_| {})
                .is_err()
        );
    }

    #[test]
    fn searches_each_byte_of_chunk_sizes_and_trailers_once() {
        let long = "a".repeat(4000);
        let body = format!("1;{long}\r\nx\r\n0;{long}\r\nX: {long}\r\nY: {long}\r\n\r\n");
        let mut decoder = Decoder::new(Framing::Chunked);
        let (mut from, mut trailers) = (BytesMut::new(), BytesMut::new());
        for byte in body.into_bytes() {
            from.extend_from_slice(&[byte]);
            // Line ends in place of the searched bytes, except the bytes of the last line end, would end
            // the line, or the section.
            let searched = from.len().saturating_sub(4);
            let mut received = from.clone();
            received[..searched].fill(b'\n');
            match decoder.clone().decode(&mut received, None) {
                // Complete: the searched bytes are parsed.
                Err(_) if byte == b'\n' => {}
                decoded => assert!(decoded.is_ok(), "byte {} was searched again", from.len()),
            }
            if let Decoded::Trailers(fields) = decoder.decode(&mut from, None).unwrap() {
                trailers = fields;
            }
        }
        assert!(decoder.is_done() && trailers.len() == 2 * long.len() + 10);
    }

    #[test]
    fn close_ends_only_bodies_without_length() {
        assert!(Decoder::new(Framing::UntilClose).end_of_stream().is_ok());
        assert!(Decoder::new(Framing::Length(3)).end_of_stream().is_err());
        assert!(Decoder::new(Framing::Chunked).end_of_stream().is_err());
    }
}
