//! The output of streams: heads at once, bodies as far as windows and the output allow, in turns.

use bytes::{Buf, Bytes};
use http::Method;

use super::{Connection, MAX_CLOSED};
use crate::frame::{self, HEADER_LENGTH, Header, MAX_PAYLOAD, flag, kind};
use crate::hpack::Encoder;
use crate::message;
use crate::stream::{Finish, Key, Receiving, Sending, Stream};
use crate::{Error, Fields, Request, Response};

impl Connection {
    /// Opens a stream with a request.
    pub(crate) fn open(&mut self, head: &Request, end_stream: bool) -> Result<Key, Error> {
        if !self.accepts_streams() {
            return Err(self.end.clone().unwrap_or(Error::Closed));
        }
        let id = if self.last_id == 0 {
            1
        } else {
            self.last_id + 2
        };
        self.last_id = id;
        let sending = if end_stream {
            Sending::Ended
        } else {
            Sending::Body
        };
        let windows = (self.config.stream_window.into(), self.peer.stream_window);
        let mut stream = Stream::new(Receiving::Head, sending, windows);
        stream.is_head = head.method == Method::HEAD;
        stream.is_connect = head.method == Method::CONNECT;
        let key = self.streams.insert(id, stream);
        self.open += 1;
        self.write_block(id, end_stream, |encoder, output| {
            message::write_request(encoder, head, output)
        });
        Ok(key)
    }

    pub(super) fn write_block(
        &mut self,
        id: u32,
        end_stream: bool,
        write: impl FnOnce(&mut Encoder, &mut Vec<u8>),
    ) {
        self.lend_output();
        let start = self.output.len();
        self.output.extend_from_slice(&[0; HEADER_LENGTH]);
        write(&mut self.encoder, &mut self.output);
        frame::finish_headers(&mut self.output, start, id, end_stream);
        self.wake();
    }

    /// Fails if the stream takes no more of this side's message.
    pub(super) fn check_sending(
        &mut self,
        key: Key,
        expected: Sending,
    ) -> Result<&mut Stream, Error> {
        let stream = self.streams.get(key);
        match &stream.end {
            Some(error) => Err(error.clone()),
            None if stream.sending != expected || !matches!(stream.finish, Finish::Open) => {
                Err(Error::Closed)
            }
            None => Ok(stream),
        }
    }

    /// Sends the head of a response, which may be an interim one.
    pub(crate) fn respond(
        &mut self,
        key: Key,
        head: &Response,
        end_stream: bool,
    ) -> Result<(), Error> {
        let stream = self.check_sending(key, Sending::Head)?;
        if !head.status.is_informational() {
            stream.sending = if end_stream {
                Sending::Ended
            } else {
                Sending::Body
            };
        }
        self.write_block(key.id, end_stream, |encoder, output| {
            message::write_response(encoder, head, output)
        });
        if end_stream {
            self.close_if_ended(key);
        }
        Ok(())
    }

    /// Sends bytes, now as far as possible and the rest when it is. The bytes before must have been sent.
    pub(crate) fn send(&mut self, key: Key, data: Bytes, end_stream: bool) -> Result<(), Error> {
        let stream = self.check_sending(key, Sending::Body)?;
        debug_assert!(stream.pending.is_empty(), "bytes wait already");
        stream.pending = data;
        if end_stream {
            stream.finish = Finish::End;
        }
        self.advance(key);
        Ok(())
    }

    /// Sends trailers after the bytes that wait.
    pub(crate) fn send_trailers(&mut self, key: Key, trailers: Fields) -> Result<(), Error> {
        let stream = self.check_sending(key, Sending::Body)?;
        stream.finish = Finish::Trailers(trailers);
        self.advance(key);
        Ok(())
    }

    /// Sends what a stream has: at once if no other stream waits.
    pub(super) fn advance(&mut self, key: Key) {
        self.lend_output();
        self.wake();
        // The end of a stream needs no window.
        if self.queue.is_empty() || self.streams.get(key).pending.is_empty() {
            while self.send_turn(key) {}
        }
        self.enqueue(key);
    }

    /// Adds a stream to the queue if it has bytes and window.
    pub(super) fn enqueue(&mut self, key: Key) {
        let stream = self.streams.get(key);
        if !stream.pending.is_empty() && stream.send_window > 0 && !stream.is_queued {
            stream.is_queued = true;
            // Streams that were reset leave with their turns, or here: without turns, a peer could queue
            // any number.
            if self.queue.len() > 2 * self.streams.len() + MAX_CLOSED {
                self.queue.retain(|key| self.streams.has(*key));
            }
            self.queue.push_back(key);
        }
    }

    /// Sends what waits, one frame of a stream after the other, while there is room.
    pub(super) fn pump(&mut self) {
        while !self.queue.is_empty() && self.has_room() {
            let Some(key) = self.queue.pop_front() else {
                break;
            };
            if self.streams.has(key) {
                self.streams.get(key).is_queued = false;
                let has_more = self.send_turn(key);
                if has_more {
                    self.enqueue(key);
                } else if self.streams.has(key) && self.streams.get(key).pending.is_empty() {
                    self.streams.get(key).wake();
                }
            }
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.send_window > 0 && self.output().len() < self.config.max_output
    }

    /// Sends at most one DATA frame, and the end after the last byte. Returns whether more may follow.
    pub(super) fn send_turn(&mut self, key: Key) -> bool {
        let has_room = self.has_room();
        let connection_window = self.send_window;
        let stream = self.streams.get(key);
        if stream.end.is_some() || stream.sending != Sending::Body {
            return false;
        }
        if !stream.pending.is_empty() {
            let window = stream.send_window.min(connection_window).max(0);
            let length = stream.pending.len().min(MAX_PAYLOAD).min(window as usize);
            if !has_room || length == 0 {
                return false;
            }
            let is_last = length == stream.pending.len() && matches!(stream.finish, Finish::End);
            let header = Header {
                length,
                kind: kind::DATA,
                flags: if is_last { flag::END_STREAM } else { 0 },
                stream: key.id,
            };
            self.output.extend_from_slice(&header.bytes());
            self.output.extend_from_slice(&stream.pending[..length]);
            stream.pending.advance(length);
            stream.send_window -= length as i64;
            self.send_window -= length as i64;
            if !stream.pending.is_empty() {
                return true;
            }
            // Frees the buffer of the bytes.
            stream.pending = Bytes::new();
            if is_last {
                self.send_end(key);
                return false;
            }
        }
        match std::mem::take(&mut self.streams.get(key).finish) {
            Finish::Open => return false,
            Finish::End => {
                frame::write(&mut self.output, kind::DATA, flag::END_STREAM, key.id, &[])
            }
            Finish::Trailers(trailers) => self.write_block(key.id, true, |encoder, output| {
                message::write_trailers(encoder, &trailers, output);
            }),
        }
        self.send_end(key);
        false
    }

    /// END_STREAM was sent.
    pub(super) fn send_end(&mut self, key: Key) {
        self.streams.get(key).sending = Sending::Ended;
        self.close_if_ended(key);
        if self.streams.has(key) {
            self.remove_if_unused(key);
        }
    }
}
