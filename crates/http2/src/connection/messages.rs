//! Messages of the peer: DATA, HEADERS and CONTINUATION, in the order in which a request or a
//! response uses them.

use http::StatusCode;

use super::{Block, Connection, Drain, MAX_ID, Role};
use crate::frame::{self, HEADER_LENGTH, Header, MAX_PAYLOAD, PREFACE, flag, kind};
use crate::message::{self, Section};
use crate::stream::{Key, Receiving, Sending, Stream};
use crate::{ErrorCode, Violation};

impl Connection {
    pub(super) fn receive_frames(&mut self, mut bytes: &[u8]) -> Result<usize, Violation> {
        let all = bytes.len();
        if self.preface > 0 {
            let expected = &PREFACE[PREFACE.len() - self.preface..];
            let (start, rest) = bytes.split_at(expected.len().min(all));
            if !expected.starts_with(start) {
                return Err(Violation::protocol(
                    "the connection does not begin with the preface",
                ));
            }
            self.preface -= start.len();
            bytes = rest;
        }
        while let Some(header) = Header::read(bytes) {
            if header.length > MAX_PAYLOAD {
                let what = "a frame is longer than SETTINGS_MAX_FRAME_SIZE";
                return Err(Violation::new(ErrorCode::FRAME_SIZE_ERROR, what));
            }
            let Some((frame, rest)) = bytes.split_at_checked(HEADER_LENGTH + header.length) else {
                break;
            };
            self.receive_frame(header, &frame[HEADER_LENGTH..])?;
            bytes = rest;
        }
        Ok(all - bytes.len())
    }

    pub(super) fn receive_frame(
        &mut self,
        header: Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        if let Some(block) = &self.block
            && (header.kind != kind::CONTINUATION || header.stream != block.stream)
        {
            return Err(Violation::protocol("another frame within a field block"));
        }
        if self.peer.settings == 0 && header.kind != kind::SETTINGS {
            return Err(Violation::protocol("the first frame is not SETTINGS"));
        }
        let is_of_message = match header.kind {
            kind::DATA => self.streams.find(header.stream).is_some(),
            kind => kind == kind::HEADERS || kind == kind::CONTINUATION,
        };
        if !is_of_message {
            self.control_bytes += (HEADER_LENGTH + header.length) as u64;
        }
        match header.kind {
            kind::DATA => self.receive_data(&header, payload),
            kind::HEADERS => self.receive_headers(&header, payload),
            kind::CONTINUATION => self.receive_continuation(&header, payload),
            kind::PRIORITY => self.receive_priority(&header, payload),
            kind::RST_STREAM => self.receive_reset(&header, payload),
            kind::SETTINGS => self.receive_settings(&header, payload),
            kind::PUSH_PROMISE => Err(Violation::protocol("PUSH_PROMISE, which is disabled")),
            kind::PING => self.receive_ping(&header, payload),
            kind::GOAWAY => self.receive_go_away(&header, payload),
            kind::WINDOW_UPDATE => self.receive_window_update(&header, payload),
            // RFC 9113, section 4.1.
            _ => Ok(()),
        }
    }

    pub(super) fn receive_data(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let (id, length) = (header.stream, header.length);
        self.check_opened(id)?;
        let Some(data) = frame::without_padding(header, payload) else {
            return Err(Violation::protocol(
                "the padding of DATA is longer than its payload",
            ));
        };
        // The connection's window is never used up: its peer gets it back before.
        self.owed += length as u32;
        if self.owed >= self.config.connection_window / 2 {
            frame::write_window_update(&mut self.output, 0, std::mem::take(&mut self.owed));
        }
        let Some(key) = self.streams.find(id) else {
            return self.check_late(id, kind::DATA);
        };
        let stream = self.streams.get(key);
        if stream.end.is_some() {
            return self.check_reset(key);
        }
        if stream.receiving != Receiving::Body {
            let (code, what) = match stream.receiving {
                Receiving::Head => (
                    ErrorCode::PROTOCOL_ERROR,
                    "DATA before the head of the response",
                ),
                _ => (ErrorCode::STREAM_CLOSED, "DATA after END_STREAM"),
            };
            return self.reset_for(key, Violation::new(code, what));
        }
        stream.receive_window -= length as i64;
        if stream.receive_window < 0 {
            let what = "DATA beyond the stream's window";
            return self.reset_for(key, Violation::new(ErrorCode::FLOW_CONTROL_ERROR, what));
        }
        if let Some(left) = &mut stream.length_left {
            let Some(rest) = left.checked_sub(data.len() as u64) else {
                return self.reset_for(
                    key,
                    Violation::protocol("a body longer than Content-Length"),
                );
            };
            *left = rest;
        }
        if stream.handles > 0 {
            stream.body.extend_from_slice(data);
        }
        let padding = length - data.len();
        if header.has(flag::END_STREAM) {
            return self.receive_end(key);
        }
        if !data.is_empty() {
            self.streams.get(key).wake();
        }
        self.release(key, padding);
        Ok(())
    }

    pub(super) fn receive_headers(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let Some(mut block) = frame::without_padding(header, payload) else {
            return Err(Violation::protocol(
                "the padding of HEADERS is longer than its payload",
            ));
        };
        let id = header.stream;
        let is_of_client = id % 2 == 1;
        if !is_of_client {
            return Err(Violation::protocol(
                "HEADERS on a stream that no client opens",
            ));
        }
        if header.has(flag::PRIORITY) {
            let Some((&[a, b, c, d, _], rest)) = block.split_first_chunk::<5>() else {
                return Err(Violation::new(
                    ErrorCode::FRAME_SIZE_ERROR,
                    "a short HEADERS frame",
                ));
            };
            if u32::from_be_bytes([a, b, c, d]) & MAX_ID == id {
                return Err(Violation::protocol("a stream that depends on itself"));
            }
            block = rest;
        }
        let end_stream = header.has(flag::END_STREAM);
        if header.has(flag::END_HEADERS) {
            return self.receive_block(id, end_stream, block);
        }
        self.block = Some(Block {
            stream: id,
            end_stream,
            bytes: block.to_vec(),
            size: HEADER_LENGTH + payload.len(),
        });
        Ok(())
    }

    pub(super) fn receive_continuation(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let Some(mut block) = self.block.take() else {
            return Err(Violation::protocol("CONTINUATION without HEADERS"));
        };
        // The headers of the frames count: they may be empty.
        block.size += HEADER_LENGTH + payload.len();
        if block.size > self.config.max_block {
            let what = "a field block is too large";
            return Err(Violation::new(ErrorCode::ENHANCE_YOUR_CALM, what));
        }
        block.bytes.extend_from_slice(payload);
        if header.has(flag::END_HEADERS) {
            return self.receive_block(block.stream, block.end_stream, &block.bytes);
        }
        if payload.is_empty() {
            return Err(Violation::new(
                ErrorCode::ENHANCE_YOUR_CALM,
                "an empty CONTINUATION frame",
            ));
        }
        self.block = Some(block);
        Ok(())
    }

    /// Takes a complete field block. It is decoded in any case: the tables of both sides stay the same.
    pub(super) fn receive_block(
        &mut self,
        id: u32,
        end_stream: bool,
        block: &[u8],
    ) -> Result<(), Violation> {
        let (mut section, max) = (Section::default(), self.config.max_fields as usize);
        let decoded = self.decoder.decode(block, |field| section.push(field, max));
        if decoded.is_err() {
            let what = "a field block cannot be decoded";
            return Err(Violation::new(ErrorCode::COMPRESSION_ERROR, what));
        }
        if self.config.role == Role::Server && id > self.last_id {
            return self.open_for_peer(id, end_stream, section);
        }
        if id > self.last_id {
            return Err(Violation::protocol("HEADERS on a stream that is not open"));
        }
        let Some(key) = self.streams.find(id) else {
            return self.check_late(id, kind::HEADERS);
        };
        let stream = self.streams.get(key);
        if stream.end.is_some() {
            return self.check_reset(key);
        }
        match stream.receiving {
            Receiving::Head => self.receive_response(key, end_stream, section),
            Receiving::Body => self.receive_trailers(key, end_stream, section),
            Receiving::Ended => {
                let what = "HEADERS after END_STREAM";
                self.reset_for(key, Violation::new(ErrorCode::STREAM_CLOSED, what))
            }
        }
    }

    pub(super) fn open_for_peer(
        &mut self,
        id: u32,
        end_stream: bool,
        section: Section,
    ) -> Result<(), Violation> {
        self.last_id = id;
        if self.drain == Drain::Done {
            self.record_reset(id);
            return Ok(());
        }
        self.last_accepted = id;
        if self.opened.len() >= 2 * self.config.max_streams as usize {
            let what = "more streams were reset at once than may be open";
            return Err(Violation::new(ErrorCode::ENHANCE_YOUR_CALM, what));
        }
        if self.open >= self.config.max_streams {
            frame::write_reset(&mut self.output, id, ErrorCode::REFUSED_STREAM);
            self.record_reset(id);
            return Ok(());
        }
        let request = section.request().and_then(|request| {
            let length = message::content_length(&request.message.fields)?;
            if end_stream && length.is_some_and(|length| length > 0) {
                return Err("a body shorter than Content-Length");
            }
            let is_extended = request.message.protocol().is_some();
            if is_extended && !self.config.enable_connect_protocol {
                return Err(":protocol without SETTINGS_ENABLE_CONNECT_PROTOCOL");
            }
            Ok((request, length))
        });
        let (request, length) = match request {
            Ok(request) => request,
            Err(what) => {
                frame::write_reset(&mut self.output, id, ErrorCode::PROTOCOL_ERROR);
                self.record_reset(id);
                return self.count_violation(Violation::protocol(what));
            }
        };
        let receiving = if end_stream {
            Receiving::Ended
        } else {
            Receiving::Body
        };
        let windows = (self.config.stream_window.into(), self.peer.stream_window);
        let mut stream = Stream::new(receiving, Sending::Head, windows);
        stream.length_left = length;
        // For the queue: without a handle the stream would be gone.
        stream.handles = 1;
        let key = self.streams.insert(id, stream);
        self.open += 1;
        self.opened.push_back((key, request));
        Ok(())
    }

    pub(super) fn receive_response(
        &mut self,
        key: Key,
        end_stream: bool,
        section: Section,
    ) -> Result<(), Violation> {
        let response = match section.response() {
            Ok(response) => response,
            Err(what) => return self.reset_for(key, Violation::protocol(what)),
        };
        let status = response.message.status;
        let stream = self.streams.get(key);
        if status.is_informational() {
            if end_stream {
                let what = "an interim response with END_STREAM";
                return self.reset_for(key, Violation::protocol(what));
            }
            stream.respond(response);
            return Ok(());
        }
        stream.receiving = Receiving::Body;
        // RFC 9110, sections 6.4.1 and 8.6: these have no content, whatever Content-Length says.
        if stream.is_head || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            stream.length_left = Some(0);
        } else if !(stream.is_connect && status.is_success()) {
            match message::content_length(&response.message.fields) {
                Ok(length) => stream.length_left = length,
                Err(what) => return self.reset_for(key, Violation::protocol(what)),
            }
        }
        stream.respond(response);
        if end_stream {
            self.receive_end(key)
        } else {
            Ok(())
        }
    }

    pub(super) fn receive_trailers(
        &mut self,
        key: Key,
        end_stream: bool,
        section: Section,
    ) -> Result<(), Violation> {
        let trailers = match section.trailers() {
            Ok(trailers) if end_stream => trailers,
            Ok(_) => {
                return self.reset_for(key, Violation::protocol("trailers without END_STREAM"));
            }
            Err(what) => return self.reset_for(key, Violation::protocol(what)),
        };
        self.streams.get(key).trailers = Some(trailers);
        self.receive_end(key)
    }

    /// The peer has sent END_STREAM.
    pub(super) fn receive_end(&mut self, key: Key) -> Result<(), Violation> {
        let stream = self.streams.get(key);
        if stream.length_left.is_some_and(|left| left > 0) {
            return self.reset_for(
                key,
                Violation::protocol("a body shorter than Content-Length"),
            );
        }
        stream.receiving = Receiving::Ended;
        stream.wake();
        self.close_if_ended(key);
        Ok(())
    }
}
