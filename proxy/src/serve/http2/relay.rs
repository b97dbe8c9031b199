//! One direction of a stream: relays body and trailers from one connection to another. The proxy
//! releases the sender's flow-control capacity only after it has sent the bytes on, so a slow
//! receiver limits the sender.

use std::collections::VecDeque;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use http::HeaderMap;

use super::head::fields_size;
use crate::context::record::ExchangeRecord;
use crate::http::credentials::PolicyField;
use crate::http::edits::{Edits, REQUEST_TRAILER_EDITS, response_edits};
use crate::http::replay::Replay;
use crate::protocol::MAX_SECTION;
use crate::upstream::batched::{Batched, MAX_UNRESERVED_QUEUED, Queued};

/// The number of bytes that a relay passes to `h2` before it waits for flow-control capacity. Small
/// bodies need no wait.
const MAX_UNRESERVED: usize = 16 * 1024;

/// One direction of an exchange.
pub(super) struct Relay {
    from: RecvStream,
    message: Message,
    /// Bytes that were read and not yet sent.
    pending: Bytes,
    /// Those that follow them.
    ahead: Ahead,
    /// The end of the stream was read.
    ended: bool,
    trailers: Option<HeaderMap>,
    /// Bytes that were read, and whose flow-control capacity the sender has not got back.
    unreleased: usize,
    /// The end of the stream was sent.
    complete: bool,
    /// The receiver accepts no more bytes.
    stopped: bool,
    /// The number of bytes that may still be sent without flow-control capacity.
    unreserved: usize,
    replay: Replay,
}

/// The message that is relayed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    Request,
    /// `from_proxy`: the sender is an authenticated proxy, whose `x-mesh-error` is kept.
    Response {
        from_proxy: bool,
    },
}

/// Why a relay ended early.
pub(super) enum RelayError {
    /// The sender reset its stream, or its connection failed.
    Sender(h2::Error),
    /// The receiver has closed its stream.
    ReceiverClosed,
    /// The trailers of the sender are over the limit.
    TooLarge,
}

impl Relay {
    /// Creates a relay of the body `from`. The start of a request is kept for another attempt until
    /// [`Relay::discard_replay`].
    pub fn new(from: RecvStream, message: Message) -> Self {
        let complete = from.is_end_stream();
        let replay = if message == Message::Request {
            Replay::new(0)
        } else {
            Replay::off()
        };
        Self {
            from,
            message,
            pending: Bytes::new(),
            ahead: Ahead::default(),
            ended: complete,
            trailers: None,
            unreleased: 0,
            complete,
            stopped: false,
            unreserved: MAX_UNRESERVED,
            replay,
        }
    }

    /// Whether the relay has nothing more to send.
    pub fn is_done(&self) -> bool {
        self.complete || self.stopped
    }

    /// Whether bytes wait for the receiver.
    pub fn is_blocked(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The size of the bytes that the relay holds and the sender may replace: the bytes that are kept
    /// for another attempt, and the bytes from [`Relay::poll_start`].
    pub fn kept(&self) -> usize {
        let waiting = self.ahead.length + self.pending.len();
        self.replay.buffered() + waiting.saturating_sub(self.unreleased)
    }

    /// Reads until the body ends or is longer than `max` bytes, while there is no receiver. Returns the
    /// bytes that were read.
    pub fn poll_start(
        &mut self,
        cx: &mut Context<'_>,
        max: usize,
        record: &mut ExchangeRecord,
    ) -> Poll<Result<Bytes, h2::Error>> {
        // At the end of the body, trailers may follow.
        while !self.ended
            && self.ahead.length <= max
            && let Some(data) = ready!(self.from.poll_data(cx)).transpose()?
        {
            self.take(&data, record);
            self.ahead.push(&data);
            // Fails only if the sender's stream is closed.
            let released = std::mem::take(&mut self.unreleased);
            let _ = self.from.flow_control().release_capacity(released);
        }
        Poll::Ready(Ok(self.ahead.pieces.make_contiguous().concat().into()))
    }

    /// Takes what arrives while there is no receiver, or while bytes wait for it: `h2` tells neither how
    /// much it holds nor in how many frames, and ends the connection if these are too many. Returns the
    /// number of bytes that wait, which the stream's flow-control window bounds.
    pub fn read_ahead(&mut self, cx: &mut Context<'_>, record: &mut ExchangeRecord) -> usize {
        // The end and an error are returned again.
        while !self.ended
            && let Poll::Ready(Some(Ok(data))) = self.from.poll_data(cx)
        {
            self.take(&data, record);
            self.ahead.push(&data);
        }
        self.unreleased
    }

    /// Whether the complete body was sent.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Ends the relay early: the receiver accepts no more bytes.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Drops what arrives after [`Relay::stop`]. The sender does not get back its flow-control capacity.
    pub fn drop_rest(&mut self, cx: &mut Context<'_>) {
        while !self.ended
            && let Poll::Ready(Some(Ok(_))) = self.from.poll_data(cx)
        {
            self.ended = self.from.is_end_stream();
        }
    }

    /// Drops the bytes that are kept for another attempt.
    pub fn discard_replay(&mut self) {
        self.replay.discard();
    }

    /// Whether another attempt can send all bytes again.
    pub fn can_rewind(&self) -> bool {
        self.replay.is_available()
    }

    /// Prepares another attempt with another receiver. Returns false if some of the sent bytes are
    /// not kept.
    pub fn rewind(&mut self) -> bool {
        let Some(kept) = self.replay.bytes() else {
            return false;
        };
        self.complete &= kept.is_empty() && self.trailers.is_none();
        self.pending = kept;
        self.stopped = false;
        self.unreserved = MAX_UNRESERVED;
        true
    }

    /// Relays the available bytes to a stream of the connection `io`. Ready when the end of the
    /// stream was sent.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut SendStream<Queued>,
        io: &Batched,
        record: &mut ExchangeRecord,
    ) -> Poll<Result<(), RelayError>> {
        while !self.is_done() {
            if !self.pending.is_empty() {
                ready!(self.poll_send(cx, to, io))?;
                continue;
            }
            if let Some(next) = self.ahead.pop() {
                self.replay.keep(&next);
                self.pending = next;
                continue;
            }
            if self.ended {
                return Poll::Ready(self.finish(to, io));
            }
            match ready!(self.from.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.take(&data, record);
                    self.replay.keep(&data);
                    self.pending = data;
                }
                Some(Err(error)) => return Poll::Ready(Err(RelayError::Sender(error))),
                None => {
                    let trailers =
                        ready!(self.from.poll_trailers(cx)).map_err(RelayError::Sender)?;
                    if trailers.as_ref().map_or(0, fields_size) > MAX_SECTION {
                        return Poll::Ready(Err(RelayError::TooLarge));
                    }
                    self.trailers = trailers.map(|fields| self.prepare_trailers(fields, record));
                    self.ended = true;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Counts bytes that were read.
    fn take(&mut self, data: &Bytes, record: &mut ExchangeRecord) {
        self.ended = self.from.is_end_stream();
        self.unreleased += data.len();
        match self.message {
            Message::Request => record.request_body(data),
            Message::Response { .. } => record.response_body(data),
        }
    }

    /// Sends pending bytes within the receiver's flow-control capacity, and the room of its connection.
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut SendStream<Queued>,
        io: &Batched,
    ) -> Poll<Result<(), RelayError>> {
        let pending = self.pending.len();
        ready!(io.poll_room(cx, pending));
        let is_unreserved =
            pending <= self.unreserved && io.queued() + pending <= MAX_UNRESERVED_QUEUED;
        let capacity = if is_unreserved {
            self.unreserved -= pending;
            pending
        } else {
            to.reserve_capacity(pending);
            match to.capacity() {
                0 => match ready!(to.poll_capacity(cx)) {
                    Some(Ok(capacity)) => capacity,
                    Some(Err(_)) | None => return Poll::Ready(Err(RelayError::ReceiverClosed)),
                },
                capacity => capacity,
            }
        };
        let data = if capacity >= pending {
            std::mem::take(&mut self.pending)
        } else {
            self.pending.split_to(capacity)
        };
        let is_rest_sent = self.pending.is_empty() && self.ahead.length == 0;
        let last = self.ended && self.trailers.is_none() && is_rest_sent;
        // Bytes that are sent again were released already.
        let released = data.len().min(self.unreleased);
        self.unreleased -= released;
        to.send_data(io.queue(data), last)
            .map_err(|_| RelayError::ReceiverClosed)?;
        self.complete = last;
        // Fails only if the sender's stream is closed.
        let _ = self.from.flow_control().release_capacity(released);
        Poll::Ready(Ok(()))
    }

    /// Sends the end of the stream, with the trailers.
    fn finish(&mut self, to: &mut SendStream<Queued>, io: &Batched) -> Result<(), RelayError> {
        self.complete = true;
        let trailers = if self.replay.is_available() {
            self.trailers.clone()
        } else {
            self.trailers.take()
        };
        match trailers {
            Some(trailers) => to.send_trailers(trailers),
            None => to.send_data(io.queue(Bytes::new()), true),
        }
        .map_err(|_| RelayError::ReceiverClosed)
    }

    /// Removes the fields that only the mesh may set.
    fn prepare_trailers(&self, mut trailers: HeaderMap, record: &mut ExchangeRecord) -> HeaderMap {
        match self.message {
            Message::Request => {
                let fields = record.flow.policy_fields();
                let fields = fields.iter().flat_map(|names| names.iter());
                let fields: Vec<_> = fields.map(|name| PolicyField(name.clone(), None)).collect();
                let edits = Edits {
                    policy: &fields,
                    ..Edits::of(&REQUEST_TRAILER_EDITS)
                };
                edits.apply(&mut trailers);
                record.request_trailers(&trailers);
            }
            Message::Response { from_proxy } => {
                Edits::of(response_edits(from_proxy)).apply(&mut trailers);
                record.response_trailers(&trailers);
            }
        }
        trailers
    }
}

/// Bytes that were read and wait. They are copied, and short ones joined: a sender may divide a body
/// into frames of one byte, each of which would keep the buffer that it was read into.
#[derive(Default)]
struct Ahead {
    pieces: VecDeque<BytesMut>,
    /// The number of bytes.
    length: usize,
}

impl Ahead {
    /// The maximum size of pieces that are joined.
    const MAX_JOINED: usize = 4 * 1024;

    fn push(&mut self, data: &[u8]) {
        self.length += data.len();
        match self.pieces.back_mut() {
            Some(last) if last.len() + data.len() <= Self::MAX_JOINED => {
                last.extend_from_slice(data);
            }
            _ => self.pieces.push_back(data.into()),
        }
    }

    fn pop(&mut self) -> Option<Bytes> {
        let piece = self.pieces.pop_front()?.freeze();
        self.length -= piece.len();
        Some(piece)
    }
}

/// The error code for a stream whose other end failed: the code of the peer's reset if there is
/// one, else CANCEL.
pub(super) fn reset_code(error: &h2::Error) -> Reason {
    match error.reason() {
        Some(reason) if error.is_remote() && error.is_reset() && reason != Reason::NO_ERROR => {
            reason
        }
        _ => Reason::CANCEL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_tiny_frames_are_joined_in_order() {
        let mut ahead = Ahead::default();
        let bytes: Vec<u8> = (0..250_000_u32).map(|at| (at % 251) as u8).collect();
        let (tiny, large) = bytes.split_at(100_000);
        tiny.chunks(1).for_each(|one| ahead.push(one));
        let held: usize = ahead.pieces.iter().map(BytesMut::capacity).sum();
        assert!(ahead.pieces.len() <= 25 && held <= 2 * tiny.len(), "{held}");
        large.chunks(16_384).for_each(|one| ahead.push(one));
        assert!(ahead.pieces.len() <= 35);
        let read: Vec<u8> = std::iter::from_fn(|| ahead.pop()).flatten().collect();
        assert!(read == bytes);
    }
}
