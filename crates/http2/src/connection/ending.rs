//! How streams end, and when their places are free again.

use super::{Connection, MAX_CLOSED, MAX_RESETS, MAX_VIOLATIONS, Role};
use crate::frame;
use crate::stream::{Finish, Key, Receiving, Sending, Stream};
use crate::{Error, ErrorCode, Violation};

impl Connection {
    /// Resets a stream whose peer violates the protocol.
    pub(super) fn reset_for(&mut self, key: Key, violation: Violation) -> Result<(), Violation> {
        self.reset(key, violation.code, &Error::Violation(violation));
        self.count_violation(violation)
    }

    pub(super) fn count_violation(&mut self, violation: Violation) -> Result<(), Violation> {
        self.violations += 1;
        if self.violations <= MAX_VIOLATIONS {
            return Ok(());
        }
        if self.config.role == Role::Client {
            // Streams that are open go on. Later ones use another connection.
            self.peer.is_leaving = true;
            return Ok(());
        }
        Err(Violation::new(ErrorCode::ENHANCE_YOUR_CALM, violation.what))
    }

    /// Resets a stream, unless it is closed.
    pub(crate) fn reset(&mut self, key: Key, code: ErrorCode, error: &Error) {
        if !self.streams.get(key).is_closed() {
            frame::write_reset(&mut self.output, key.id, code);
            self.record_reset(key.id);
            self.fail_stream(key, error);
            self.wake();
        }
    }

    pub(super) fn record_reset(&mut self, id: u32) {
        if self.reset.len() == MAX_RESETS
            && let Some(oldest) = self.reset.pop_front()
        {
            self.forgotten = self.forgotten.max(oldest);
        }
        self.reset.push_back(id);
    }

    pub(super) fn fail_stream(&mut self, key: Key, error: &Error) {
        let stream = self.streams.get(key);
        let was_closed = stream.is_closed();
        stream.fail(error);
        if !was_closed {
            self.record_closed(key);
        }
        self.remove_if_unused(key);
    }

    /// Ends all streams after this one.
    pub(super) fn fail_streams(&mut self, error: &Error, last: u32) {
        let mut keys = self.streams.keys();
        keys.retain(|key| key.id > last);
        for key in keys {
            self.fail_stream(key, error);
        }
    }

    pub(super) fn record_closed(&mut self, key: Key) {
        self.open -= 1;
        self.closed[self.closed_at] = key.id;
        self.closed_at = (self.closed_at + 1) % MAX_CLOSED;
    }

    /// One side has sent END_STREAM.
    pub(super) fn close_if_ended(&mut self, key: Key) {
        let stream = self.streams.get(key);
        if stream.end.is_none() && stream.is_closed() {
            self.record_closed(key);
            self.remove_if_unused(key);
        }
    }

    /// Removes a stream without handles if it is closed. Otherwise nobody reads what the peer sends.
    pub(super) fn remove_if_unused(&mut self, key: Key) {
        let stream = self.streams.get(key);
        if stream.handles > 0 {
            return;
        }
        if stream.is_closed() {
            self.streams.remove(key);
            // The task may wait for this to end the connection.
            if self.streams.is_empty() {
                self.wake();
            }
            return;
        }
        let code = match (self.config.role, stream.sending, &stream.finish) {
            // The response waits, and is sent first.
            (Role::Server, Sending::Body, Finish::End | Finish::Trailers(_)) => return,
            // So does the end of a request that has its response.
            (Role::Client, Sending::Body, Finish::End | Finish::Trailers(_))
                if stream.receiving == Receiving::Ended =>
            {
                return;
            }
            // RFC 9113, section 8.1: the rest of the request is not needed.
            (Role::Server, Sending::Ended, _) => ErrorCode::NO_ERROR,
            _ => ErrorCode::CANCEL,
        };
        self.reset(key, code, &Error::Closed);
    }

    pub(crate) fn stream(&mut self, key: Key) -> &mut Stream {
        self.streams.get(key)
    }

    /// Gives back window for bytes that were taken. The peer hears of it in steps of half a window.
    pub(crate) fn release(&mut self, key: Key, length: usize) {
        let half = self.config.stream_window / 2;
        let stream = self.streams.get(key);
        stream.owed += length as u32;
        if stream.owed >= half && stream.receiving == Receiving::Body && stream.end.is_none() {
            let owed = std::mem::take(&mut stream.owed);
            stream.receive_window += i64::from(owed);
            frame::write_window_update(&mut self.output, key.id, owed);
            self.wake();
        }
    }

    /// A handle was dropped.
    pub(crate) fn drop_handle(&mut self, key: Key) {
        let stream = self.streams.get(key);
        stream.handles -= 1;
        self.remove_if_unused(key);
    }
}
