//! Frames of the peer beside messages: resets, settings, windows, and the end of the connection.

use super::{Connection, Drain, LAST_PING, MAX_ID, MAX_WINDOW, Role};
use crate::frame::{self, Header, MAX_PAYLOAD, flag, kind, setting};
use crate::stream::Key;
use crate::{Error, ErrorCode, Violation};

impl Connection {
    pub(super) fn receive_priority(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        if header.stream == 0 {
            return Err(Violation::protocol("PRIORITY on the connection"));
        }
        let violation = match payload {
            [a, b, c, d, _] if u32::from_be_bytes([*a, *b, *c, *d]) & MAX_ID != header.stream => {
                return Ok(());
            }
            [_, _, _, _, _] => Violation::protocol("a stream that depends on itself"),
            _ => Violation::new(
                ErrorCode::FRAME_SIZE_ERROR,
                "a PRIORITY frame of a wrong size",
            ),
        };
        if let Some(key) = self.streams.find(header.stream) {
            return self.reset_for(key, violation);
        }
        // RFC 9113 has a reset here, and no reset of an idle stream.
        Err(violation)
    }

    pub(super) fn receive_reset(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let Some(&code) = payload.first_chunk().filter(|_| payload.len() == 4) else {
            let what = "a RST_STREAM frame of a wrong size";
            return Err(Violation::new(ErrorCode::FRAME_SIZE_ERROR, what));
        };
        self.check_opened(header.stream)?;
        let code = ErrorCode(u32::from_be_bytes(code));
        if let Some(key) = self.streams.find(header.stream) {
            self.fail_stream(key, &Error::Reset(code));
        }
        Ok(())
    }

    pub(super) fn receive_settings(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        if header.stream != 0 {
            return Err(Violation::protocol("SETTINGS on a stream"));
        }
        if header.has(flag::ACK) {
            if !payload.is_empty() {
                let what = "an acknowledgment with settings";
                return Err(Violation::new(ErrorCode::FRAME_SIZE_ERROR, what));
            }
            if self.settings_acknowledged == self.settings_sent {
                return Err(Violation::protocol("an acknowledgment without SETTINGS"));
            }
            self.settings_acknowledged += 1;
            return Ok(());
        }
        let (settings, rest) = payload.as_chunks::<6>();
        if !rest.is_empty() {
            let what = "a SETTINGS frame of a wrong size";
            return Err(Violation::new(ErrorCode::FRAME_SIZE_ERROR, what));
        }
        let mut window = None;
        for &[a, b, s, t, u, v] in settings {
            let value = u32::from_be_bytes([s, t, u, v]);
            match u16::from_be_bytes([a, b]) {
                setting::INITIAL_WINDOW_SIZE => window = Some(value),
                name => self.apply(name, value)?,
            }
        }
        // Each change passes all streams: the last value counts.
        window.map_or(Ok(()), |value| self.apply_window(value))?;
        self.peer.settings += 1;
        frame::write(&mut self.output, kind::SETTINGS, flag::ACK, 0, &[]);
        Ok(())
    }

    pub(super) fn apply(&mut self, name: u16, value: u32) -> Result<(), Violation> {
        let is_flag = value <= 1;
        match name {
            setting::HEADER_TABLE_SIZE => self.encoder.set_max_table_size(value as usize),
            setting::ENABLE_PUSH if !is_flag || value == 1 && self.config.role == Role::Client => {
                return Err(Violation::protocol("a wrong value of SETTINGS_ENABLE_PUSH"));
            }
            setting::MAX_CONCURRENT_STREAMS => self.peer.max_streams = value,
            setting::MAX_FRAME_SIZE if (value as usize) < MAX_PAYLOAD || value >= 1 << 24 => {
                return Err(Violation::protocol(
                    "a wrong value of SETTINGS_MAX_FRAME_SIZE",
                ));
            }
            setting::ENABLE_CONNECT_PROTOCOL if !is_flag => {
                return Err(Violation::protocol(
                    "a wrong value of SETTINGS_ENABLE_CONNECT_PROTOCOL",
                ));
            }
            setting::ENABLE_CONNECT_PROTOCOL => self.peer.accepts_connect_protocol = value == 1,
            _ => {}
        }
        Ok(())
    }

    /// Changes the windows of all streams (RFC 9113, section 6.9.2).
    pub(super) fn apply_window(&mut self, value: u32) -> Result<(), Violation> {
        let violation = |what| Violation::new(ErrorCode::FLOW_CONTROL_ERROR, what);
        let value = i64::from(value);
        if value > MAX_WINDOW {
            return Err(violation("a wrong value of SETTINGS_INITIAL_WINDOW_SIZE"));
        }
        let change = value - self.peer.stream_window;
        self.peer.stream_window = value;
        for stream in self.streams.iter_mut() {
            stream.send_window += change;
            if stream.send_window > MAX_WINDOW {
                return Err(violation(
                    "SETTINGS_INITIAL_WINDOW_SIZE makes a window too large",
                ));
            }
        }
        if change > 0 {
            for key in self.streams.keys() {
                self.enqueue(key);
            }
        }
        Ok(())
    }

    pub(super) fn receive_ping(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        if header.stream != 0 {
            return Err(Violation::protocol("PING on a stream"));
        }
        if payload.len() != 8 {
            let what = "a PING frame of a wrong size";
            return Err(Violation::new(ErrorCode::FRAME_SIZE_ERROR, what));
        }
        if !header.has(flag::ACK) {
            frame::write(&mut self.output, kind::PING, flag::ACK, 0, payload);
        } else if self.drain == Drain::Announced && payload == LAST_PING {
            self.drain = Drain::Done;
            frame::write_go_away(&mut self.output, self.last_accepted, ErrorCode::NO_ERROR);
        }
        Ok(())
    }

    pub(super) fn receive_go_away(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        if header.stream != 0 {
            return Err(Violation::protocol("GOAWAY on a stream"));
        }
        let Some(&[a, b, c, d, s, t, u, v]) = payload.first_chunk() else {
            return Err(Violation::new(
                ErrorCode::FRAME_SIZE_ERROR,
                "a short GOAWAY frame",
            ));
        };
        self.peer.is_leaving = true;
        if self.config.role == Role::Client {
            let last = u32::from_be_bytes([a, b, c, d]) & MAX_ID;
            let code = ErrorCode(u32::from_be_bytes([s, t, u, v]));
            self.fail_streams(&Error::GoAway(code), last);
        }
        Ok(())
    }

    pub(super) fn receive_window_update(
        &mut self,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let Some(&increment) = payload.first_chunk().filter(|_| payload.len() == 4) else {
            let what = "a WINDOW_UPDATE frame of a wrong size";
            return Err(Violation::new(ErrorCode::FRAME_SIZE_ERROR, what));
        };
        let increment = i64::from(u32::from_be_bytes(increment) & MAX_ID);
        let is_wrong = |window: i64| match window + increment {
            _ if increment == 0 => Some(Violation::protocol("a WINDOW_UPDATE frame of 0 bytes")),
            sum if sum > MAX_WINDOW => {
                let what = "WINDOW_UPDATE makes a window too large";
                Some(Violation::new(ErrorCode::FLOW_CONTROL_ERROR, what))
            }
            _ => None,
        };
        if header.stream == 0 {
            is_wrong(self.send_window).map_or(Ok(()), Err)?;
            self.send_window += increment;
            return Ok(());
        }
        self.check_opened(header.stream)?;
        let Some(key) = self.streams.find(header.stream) else {
            return Ok(());
        };
        let stream = self.streams.get(key);
        if let Some(violation) = is_wrong(stream.send_window) {
            return self.reset_for(key, violation);
        }
        stream.send_window += increment;
        self.enqueue(key);
        Ok(())
    }

    /// Fails for the connection, and for streams that were never opened.
    pub(super) fn check_opened(&self, id: u32) -> Result<(), Violation> {
        if id.is_multiple_of(2) || id > self.last_id {
            return Err(Violation::protocol("a frame on a stream that is not open"));
        }
        Ok(())
    }

    /// A frame on a stream that is reset: it may have been on its way when this side reset the stream, but
    /// not when the peer did.
    pub(super) fn check_reset(&mut self, key: Key) -> Result<(), Violation> {
        if !matches!(self.streams.get(key).end, Some(Error::Reset(_))) {
            return Ok(());
        }
        let violation = Violation::new(ErrorCode::STREAM_CLOSED, "a frame after RST_STREAM");
        frame::write_reset(&mut self.output, key.id, violation.code);
        self.count_violation(violation)
    }

    /// A frame on a stream that is gone: it may have been on its way when this side reset the stream, of
    /// which it remembers the last ones.
    pub(super) fn check_late(&mut self, id: u32, kind: u8) -> Result<(), Violation> {
        let violation = Violation::new(ErrorCode::STREAM_CLOSED, "a frame on a closed stream");
        // A stream below the forgotten ones may be one of them.
        if id <= self.forgotten || self.reset.contains(&id) || self.drain == Drain::Done {
            Ok(())
        } else if self.closed.contains(&id) {
            Err(violation)
        } else if kind == kind::HEADERS && self.config.role == Role::Server {
            Err(Violation::protocol(
                "a stream with a smaller identifier than an earlier one",
            ))
        } else {
            frame::write_reset(&mut self.output, id, violation.code);
            self.record_reset(id);
            self.count_violation(violation)
        }
    }
}
