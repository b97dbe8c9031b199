//! One direction of a stream: relays body and trailers from one connection to another. The sender gets
//! its flow-control window back only for bytes that were sent on, so a slow receiver limits the sender.

use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use diy_mesh_http2::{Error, ErrorCode, Fields, Received, Receiver, Response, Sender};

use crate::context::record::ExchangeRecord;
use crate::http::credentials::PolicyField;
use crate::http::edits::{Edits, REQUEST_TRAILER_EDITS, response_edits};
use crate::http::replay::Replay;
use crate::protocol::MAX_SECTION;

/// One direction of an exchange.
pub(super) struct Relay {
    from: Receiver,
    message: Message,
    /// Bytes that were read, and that no receiver has got.
    unsent: Bytes,
    /// The end of the stream was read.
    ended: bool,
    trailers: Option<Fields>,
    /// Bytes that were passed to the receiver, and whose window the sender has not got back.
    unreleased: usize,
    /// The end of the stream was passed to the receiver, or is the only thing that there is.
    is_passed: bool,
    /// All bytes and the end of the stream are in the output of the receiver's connection.
    complete: bool,
    /// The receiver accepts no more bytes.
    stopped: bool,
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
    Sender(Error),
    /// The receiver has closed its stream.
    ReceiverClosed,
    /// The trailers of the sender are over the limit.
    TooLarge,
}

impl Relay {
    /// Creates a relay of the body `from`. The start of a request is kept for another attempt until
    /// [`Relay::discard_replay`].
    pub fn new(from: Receiver, message: Message) -> Self {
        let complete = from.is_end_stream();
        let replay = if message == Message::Request {
            Replay::new(0)
        } else {
            Replay::off()
        };
        Self {
            from,
            message,
            unsent: Bytes::new(),
            ended: complete,
            trailers: None,
            unreleased: 0,
            is_passed: complete,
            complete,
            stopped: false,
            replay,
        }
    }

    /// Waits for the head of the response, or for an interim one.
    pub fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<Received<Response>, Error>> {
        let head = ready!(self.from.poll_response(cx));
        self.complete = self.from.is_end_stream();
        (self.ended, self.is_passed) = (self.complete, self.complete);
        Poll::Ready(head)
    }

    /// Whether the relay has nothing more to send.
    pub fn is_done(&self) -> bool {
        self.complete || self.stopped
    }

    /// The size of the bytes that the relay holds: those that are kept for another attempt, and those
    /// that wait for the receiver.
    pub fn held(&self) -> usize {
        let waiting = self.unsent.len() + self.unreleased + self.from.buffered();
        self.replay.buffered() + waiting
    }

    /// Reads until the body ends or is longer than `max` bytes, while there is no receiver. Returns the
    /// bytes that were read.
    pub fn poll_start(
        &mut self,
        cx: &mut Context<'_>,
        max: usize,
        record: &mut ExchangeRecord,
    ) -> Poll<Result<Bytes, Error>> {
        // At the end of the body, trailers may follow.
        while !self.ended
            && self.unsent.len() <= max
            && let Some(data) = ready!(self.from.poll_data(cx)).transpose()?
        {
            self.take(&data, record);
            self.from.release(data.len());
            self.unsent = join(std::mem::take(&mut self.unsent), data);
        }
        Poll::Ready(Ok(self.unsent.clone()))
    }

    /// Whether the complete body was sent.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Ends the relay early: the receiver accepts no more bytes.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// The body, in place of a relay.
    pub fn into_body(self) -> Receiver {
        self.from
    }

    /// Drops what arrives after [`Relay::stop`]. The sender does not get its window back.
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
        self.is_passed &= kept.is_empty() && self.trailers.is_none();
        self.complete &= self.is_passed;
        self.from.release(std::mem::take(&mut self.unreleased));
        // Bytes that no receiver has got are kept again when they are sent.
        self.unsent = join(kept, std::mem::take(&mut self.unsent));
        self.replay = Replay::new(0);
        self.stopped = false;
        true
    }

    /// Relays the available bytes to a stream. Ready when all bytes and the end of the stream are in
    /// the output of its connection.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        to: &Sender,
        record: &mut ExchangeRecord,
    ) -> Poll<Result<(), RelayError>> {
        while !self.is_done() {
            let Poll::Ready(ready) = to.poll_ready(cx) else {
                // Bytes that arrive meanwhile are charged, and a message that is cut off ends at once.
                self.from.wait(cx).map_err(RelayError::Sender)?;
                return Poll::Pending;
            };
            ready.map_err(|_| RelayError::ReceiverClosed)?;
            self.from.release(std::mem::take(&mut self.unreleased));
            if self.is_passed {
                self.complete = true;
                break;
            }
            if !self.unsent.is_empty() {
                let data = std::mem::take(&mut self.unsent);
                self.send(data, to)?;
                continue;
            }
            if self.ended {
                self.finish(to)?;
                continue;
            }
            match ready!(self.from.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.take(&data, record);
                    self.unreleased = data.len();
                    self.send(data, to)?;
                }
                Some(Err(error)) => return Poll::Ready(Err(RelayError::Sender(error))),
                None => {
                    let trailers =
                        ready!(self.from.poll_trailers(cx)).map_err(RelayError::Sender)?;
                    let is_large = |fields: &Fields| fields.size() > MAX_SECTION;
                    let large = trailers
                        .as_ref()
                        .is_some_and(|read| read.is_cut || is_large(&read.message));
                    if large {
                        return Poll::Ready(Err(RelayError::TooLarge));
                    }
                    self.trailers =
                        trailers.map(|read| self.prepare_trailers(read.message, record));
                    self.ended = true;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Counts bytes that were read.
    fn take(&mut self, data: &Bytes, record: &mut ExchangeRecord) {
        self.ended = self.from.is_end_stream();
        match self.message {
            Message::Request => record.request_body(data),
            Message::Response { .. } => record.response_body(data),
        }
    }

    /// Passes bytes to the receiver's connection, with the end of the stream if they are the last.
    fn send(&mut self, data: Bytes, to: &Sender) -> Result<(), RelayError> {
        self.replay.keep(&data);
        let last = self.ended && self.trailers.is_none();
        to.send(data, last)
            .map_err(|_| RelayError::ReceiverClosed)?;
        self.is_passed = last;
        Ok(())
    }

    /// Sends the end of the stream, with the trailers.
    fn finish(&mut self, to: &Sender) -> Result<(), RelayError> {
        self.is_passed = true;
        let trailers = if self.replay.is_available() {
            self.trailers.clone()
        } else {
            self.trailers.take()
        };
        match trailers {
            Some(trailers) => to.send_trailers(trailers),
            None => to.send(Bytes::new(), true),
        }
        .map_err(|_| RelayError::ReceiverClosed)
    }

    /// Removes the fields that only the mesh may set.
    fn prepare_trailers(&self, mut trailers: Fields, record: &mut ExchangeRecord) -> Fields {
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

fn join(start: Bytes, rest: Bytes) -> Bytes {
    if start.is_empty() {
        return rest;
    }
    if rest.is_empty() {
        return start;
    }
    let mut joined = BytesMut::from(start);
    joined.extend_from_slice(&rest);
    joined.freeze()
}

/// The error code for a stream whose other end failed: the code of the peer's reset if there is
/// one, else CANCEL.
pub(super) fn reset_code(error: &Error) -> ErrorCode {
    match error {
        Error::Reset(code) if *code != ErrorCode::NO_ERROR => *code,
        _ => ErrorCode::CANCEL,
    }
}
