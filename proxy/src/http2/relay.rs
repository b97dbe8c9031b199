//! One direction of a stream: body and trailers from where they come to where they go. What has arrived is given back to the
//! sender's window only once it is passed on, so what a slow receiver makes the proxy hold is bounded.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};

use super::head::remove;
use crate::dump::pairs;
use crate::policy::{is_called_by, is_mesh_error};
use crate::record::ExchangeRecord;

/// Bytes of a direction that are handed to `h2` without asking whether the receiver has room: a small body takes no detour.
const FREE: usize = 16 * 1024;

/// The way from one stream to another.
pub(super) struct Relay {
    from: RecvStream,
    way: Way,
    waiting: Bytes,
    /// The end of the stream was read.
    ended: bool,
    done: bool,
    /// The receiver wants no more.
    stopped: bool,
    free: usize,
    /// What was sent, while it may have to be sent again: at most one piece.
    sent: Sent,
}

enum Sent {
    Nothing,
    Kept(Bytes),
    Gone,
}

/// Which half of an exchange is relayed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Request,
    /// From a peer's proxy, which may speak for the mesh, or from somebody else.
    Response {
        from_proxy: bool,
    },
}

/// Why a relay ended early.
pub(super) enum Broken {
    /// The sender reset its stream, or its connection broke.
    From(h2::Error),
    /// The receiver takes no more.
    To,
}

impl Relay {
    /// `from` is the body; what was sent of a request's first bytes is kept until [`Relay::settle`].
    pub fn new(from: RecvStream, way: Way) -> Self {
        let done = from.is_end_stream();
        let sent = if way == Way::Request {
            Sent::Nothing
        } else {
            Sent::Gone
        };
        Self {
            from,
            way,
            waiting: Bytes::new(),
            ended: done,
            done,
            stopped: false,
            free: FREE,
            sent,
        }
    }

    /// Everything was passed on, or nothing more will be.
    pub fn is_done(&self) -> bool {
        self.done || self.stopped
    }

    /// Everything was passed on.
    pub fn is_whole(&self) -> bool {
        self.done
    }

    /// The receiver wants no more: what still comes is not taken.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Nothing will have to be sent again.
    pub fn settle(&mut self) {
        self.sent = Sent::Gone;
    }

    /// Begins anew, for another receiver. False where that is impossible: some of what was sent is not there any more.
    pub fn rewind(&mut self) -> bool {
        match std::mem::replace(&mut self.sent, Sent::Nothing) {
            Sent::Gone => {
                self.sent = Sent::Gone;
                return false;
            }
            Sent::Nothing => {}
            Sent::Kept(piece) if self.waiting.is_empty() => {
                self.waiting = piece;
                self.done = false;
            }
            Sent::Kept(piece) => {
                self.waiting = [piece, std::mem::take(&mut self.waiting)].concat().into()
            }
        }
        self.stopped = false;
        self.free = FREE;
        true
    }

    /// Passes on what there is. Ready: the end was passed on, too.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut SendStream<Bytes>,
        record: &mut ExchangeRecord,
    ) -> Poll<Result<(), Broken>> {
        while !self.is_done() {
            if !self.waiting.is_empty() {
                ready!(self.poll_send(cx, to))?;
                continue;
            }
            match ready!(self.from.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.ended = self.from.is_end_stream();
                    match self.way {
                        Way::Request => record.request_body(&data),
                        Way::Response { .. } => record.response_body(&data),
                    }
                    if data.is_empty() && self.ended {
                        return Poll::Ready(self.finish(to));
                    }
                    self.waiting = data;
                }
                Some(Err(error)) => return Poll::Ready(Err(Broken::From(error))),
                None => match ready!(self.from.poll_trailers(cx)) {
                    Ok(Some(mut trailers)) => {
                        match self.way {
                            Way::Request => remove(&mut trailers, is_called_by),
                            Way::Response { from_proxy: false } => {
                                remove(&mut trailers, is_mesh_error)
                            }
                            Way::Response { from_proxy: true } => {}
                        }
                        record.dump(|dump| match self.way {
                            Way::Request => dump.request_trailers(pairs(&trailers)),
                            Way::Response { .. } => dump.response_trailers(pairs(&trailers)),
                        });
                        self.sent = Sent::Gone;
                        self.done = true;
                        return Poll::Ready(to.send_trailers(trailers).map_err(|_| Broken::To));
                    }
                    Ok(None) => return Poll::Ready(self.finish(to)),
                    Err(error) => return Poll::Ready(Err(Broken::From(error))),
                },
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Sends what waits, as far as the receiver has room.
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut SendStream<Bytes>,
    ) -> Poll<Result<(), Broken>> {
        let waiting = self.waiting.len();
        let room = if waiting <= self.free {
            self.free -= waiting;
            waiting
        } else {
            to.reserve_capacity(waiting);
            match to.capacity() {
                0 => match ready!(to.poll_capacity(cx)) {
                    Some(Ok(room)) => room,
                    Some(Err(_)) | None => return Poll::Ready(Err(Broken::To)),
                },
                room => room,
            }
        };
        let piece = if room >= waiting {
            std::mem::take(&mut self.waiting)
        } else {
            self.waiting.split_to(room)
        };
        let (length, last) = (piece.len(), self.ended && self.waiting.is_empty());
        self.keep(&piece);
        to.send_data(piece, last).map_err(|_| Broken::To)?;
        self.done = last;
        // Only a stream that is closed does not want to know.
        let _ = self.from.flow_control().release_capacity(length);
        Poll::Ready(Ok(()))
    }

    /// What is about to be sent may have to be sent again, as long as it is the first that is sent at all.
    fn keep(&mut self, piece: &Bytes) {
        self.sent = match self.sent {
            Sent::Nothing if piece.len() <= FREE => Sent::Kept(piece.clone()),
            _ => Sent::Gone,
        };
    }

    /// Ends the stream where its end came alone.
    fn finish(&mut self, to: &mut SendStream<Bytes>) -> Result<(), Broken> {
        self.ended = true;
        self.done = true;
        to.send_data(Bytes::new(), true).map_err(|_| Broken::To)
    }
}

/// The code to pass on for a stream that broke: the peer's own, where it gave one.
pub(super) fn reason(error: &h2::Error) -> Reason {
    match error.reason() {
        Some(reason) if error.is_remote() && error.is_reset() && reason != Reason::NO_ERROR => {
            reason
        }
        _ => Reason::CANCEL,
    }
}
