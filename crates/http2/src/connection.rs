//! One connection: frames in, frames out, and the state of its streams between. Nothing here reads a
//! socket or a clock, or waits: the driver passes what has arrived to [`Connection::receive`] and
//! writes [`Connection::output`]; the tasks of streams use the handles of `handle.rs`.
//!
//! Flow control is hop by hop. The connection's window is returned on receipt, so no stream holds
//! another one; the window of a stream is returned as its bytes are taken, and bounds what waits.

mod control;
mod ending;
mod messages;
mod sending;

use std::cell::Cell;
use std::collections::VecDeque;
use std::task::{Context, Waker};

use crate::frame::{self, PREFACE, kind, setting};
use crate::hpack::{Decoder, Encoder};
use crate::message::{Received, Request};
use crate::stream::{Key, Streams};
use crate::{Error, ErrorCode, Violation};

/// The windows before SETTINGS and WINDOW_UPDATE (RFC 9113, section 6.9.2).
const DEFAULT_WINDOW: i64 = 65_535;
/// The largest window (RFC 9113, section 6.9.1).
const MAX_WINDOW: i64 = (1 << 31) - 1;
/// The largest identifier of a stream.
const MAX_ID: u32 = (1 << 31) - 1;
/// The size of the dynamic table that the peer may use.
const TABLE_SIZE: usize = 4096;
/// The number of streams that this side has reset and whose late frames are ignored.
const MAX_RESETS: usize = 200;
/// The number of streams that this side resets because of violations. Then the connection ends.
const MAX_VIOLATIONS: u32 = 100;
/// The number of closed streams that are distinguished from those that never were.
const MAX_CLOSED: usize = 16;
/// The largest buffer that is kept for other connections.
const MAX_SPARE: usize = 128 * 1024;
/// The capacity that a connection may own without using it while its peer does not read.
const MAX_UNUSED: usize = 16 * 1024;
/// The payload of the PING frame that precedes the last GOAWAY frame.
const LAST_PING: [u8; 8] = *b"mesh-end";

thread_local! {
    /// A buffer for the output of a connection that has none.
    static SPARE_OUTPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Which side of a connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It opens streams.
    Client,
    /// It accepts streams.
    Server,
}

/// The limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The side.
    pub role: Role,
    /// The number of streams that the peer may have open.
    pub max_streams: u32,
    /// The number of bytes that one stream may hold, at least 65,535.
    pub stream_window: u32,
    /// The number of bytes of all streams on their way, at least 65,535.
    pub connection_window: u32,
    /// The size of the fields of a head, or of trailers, as counted in RFC 9113, section 6.5.2. Fields
    /// that begin beyond it are dropped, and the message says so.
    pub max_fields: u32,
    /// The number of bytes of a field block. The connection ends with a larger one.
    pub max_block: usize,
    /// The number of bytes of output above which bodies wait.
    pub max_output: usize,
    /// Whether requests may open WebSockets (RFC 8441).
    pub enable_connect_protocol: bool,
}

/// The peer's settings.
#[derive(Clone, Copy, Debug)]
struct Peer {
    /// The number of its SETTINGS frames.
    settings: u64,
    stream_window: i64,
    max_streams: u32,
    accepts_connect_protocol: bool,
    /// It has sent GOAWAY: it accepts no further streams.
    is_leaving: bool,
}

/// A field block whose end has not arrived.
#[derive(Debug)]
struct Block {
    stream: u32,
    end_stream: bool,
    bytes: Vec<u8>,
    /// The length of the frames.
    size: usize,
}

/// How far a graceful end of the connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drain {
    No,
    /// The peer knows that no further streams are accepted, but may have opened some before.
    Announced,
    /// Later streams are ignored.
    Done,
}

/// A stream that the peer has opened, with the head of its request.
pub(crate) type Opened = (Key, Received<Request>);

/// The state of a connection.
pub struct Connection {
    config: Config,
    decoder: Decoder,
    encoder: Encoder,
    output: Vec<u8>,
    /// The number of bytes of the output that were written.
    written: usize,
    streams: Streams,
    /// The number of streams that are not closed.
    open: u32,
    opened: VecDeque<Opened>,
    /// Streams that have bytes for the peer, and wait for their turns.
    queue: VecDeque<Key>,
    /// The number of bytes of the preface that have not arrived.
    preface: usize,
    peer: Peer,
    block: Option<Block>,
    send_window: i64,
    owed: u32,
    /// The last stream that the peer has opened, or this side.
    last_id: u32,
    /// The last stream of the peer that this side may process, for GOAWAY: 0 for a client.
    last_accepted: u32,
    settings_sent: u64,
    settings_acknowledged: u64,
    drain: Drain,
    reset: VecDeque<u32>,
    /// The largest identifier that is no longer among them.
    forgotten: u32,
    closed: [u32; MAX_CLOSED],
    closed_at: usize,
    violations: u32,
    control_bytes: u64,
    end: Option<Error>,
    /// The connection's task, and whether it runs, or will.
    task: Option<Waker>,
    is_awake: bool,
}

impl Connection {
    /// A connection before its first byte. The output is what this side begins with.
    pub fn new(config: Config) -> Self {
        let mut connection = Self {
            config,
            decoder: Decoder::new(TABLE_SIZE),
            encoder: Encoder::new(),
            output: SPARE_OUTPUT.take(),
            written: 0,
            streams: Streams::default(),
            open: 0,
            opened: VecDeque::new(),
            queue: VecDeque::new(),
            preface: if config.role == Role::Server {
                PREFACE.len()
            } else {
                0
            },
            peer: Peer {
                settings: 0,
                stream_window: DEFAULT_WINDOW,
                max_streams: u32::MAX,
                accepts_connect_protocol: false,
                is_leaving: false,
            },
            block: None,
            send_window: DEFAULT_WINDOW,
            owed: 0,
            last_id: 0,
            last_accepted: 0,
            settings_sent: 0,
            settings_acknowledged: 0,
            drain: Drain::No,
            reset: VecDeque::new(),
            forgotten: 0,
            closed: [0; MAX_CLOSED],
            closed_at: 0,
            violations: 0,
            control_bytes: 0,
            end: None,
            task: None,
            is_awake: true,
        };
        connection.begin();
        connection
    }

    fn begin(&mut self) {
        let config = self.config;
        let mut settings = vec![
            (setting::INITIAL_WINDOW_SIZE, config.stream_window),
            (setting::MAX_HEADER_LIST_SIZE, config.max_block as u32),
        ];
        match config.role {
            Role::Client => {
                self.output.extend_from_slice(PREFACE);
                settings.push((setting::ENABLE_PUSH, 0));
            }
            Role::Server => {
                settings.push((setting::MAX_CONCURRENT_STREAMS, config.max_streams));
                if config.enable_connect_protocol {
                    settings.push((setting::ENABLE_CONNECT_PROTOCOL, 1));
                }
            }
        }
        self.send_settings(&settings);
        let increment = i64::from(config.connection_window) - DEFAULT_WINDOW;
        if increment > 0 {
            frame::write_window_update(&mut self.output, 0, increment as u32);
        }
    }

    // For the driver.

    /// Takes the complete frames of what has arrived. Returns their length: the rest is passed again, with
    /// what follows. After an error the connection has ended, and the output is the last that the peer
    /// gets.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<usize, Violation> {
        if self.end.is_some() {
            return Ok(bytes.len());
        }
        self.lend_output();
        let received = self.receive_frames(bytes);
        if let Err(violation) = received {
            self.close(violation.code, &Error::Violation(violation));
        }
        self.pump();
        received
    }

    /// The bytes to write.
    pub fn output(&self) -> &[u8] {
        &self.output[self.written..]
    }

    /// These bytes of the output were written.
    pub fn record_written(&mut self, length: usize) {
        self.written += length;
        let left = self.output.len() - self.written;
        if left == 0 {
            self.output.clear();
            self.written = 0;
        } else if self.output.capacity() - left > MAX_UNUSED {
            self.output = self.output.split_off(self.written);
            self.written = 0;
        }
        self.pump();
    }

    /// Gives the buffer of an empty output to other connections.
    pub fn return_buffer(&mut self) {
        if self.output.is_empty() {
            let buffer = std::mem::take(&mut self.output);
            if (1..=MAX_SPARE).contains(&buffer.capacity()) {
                SPARE_OUTPUT.set(buffer);
            }
        }
    }

    /// The memory of the output, and of a field block whose end has not arrived.
    pub fn buffered(&self) -> usize {
        let block = self.block.as_ref();
        self.output.capacity() + block.map_or(0, |block| block.bytes.capacity())
    }

    /// The bytes of all frames but HEADERS, CONTINUATION, and DATA on streams that are there.
    pub fn control_bytes(&self) -> u64 {
        self.control_bytes
    }

    /// Takes a buffer for the output. Connections of a worker share one: most fill and empty it in one round
    /// of the event loop.
    fn lend_output(&mut self) {
        if self.output.capacity() == 0 {
            self.output = SPARE_OUTPUT.take();
        }
    }

    /// Sets the number of bytes of output above which bodies wait.
    pub fn set_max_output(&mut self, max_output: usize) {
        self.config.max_output = max_output;
    }

    /// The next stream that the peer has opened.
    pub(crate) fn next_opened(&mut self) -> Option<Opened> {
        self.opened.pop_front()
    }

    /// The connection's task runs: what the streams do does not wake it.
    pub fn set_awake(&mut self) {
        self.is_awake = true;
    }

    /// The connection's task waits. It wakes when there is output.
    pub fn wait(&mut self, cx: &Context<'_>) {
        self.is_awake = false;
        match &mut self.task {
            Some(task) => task.clone_from(cx.waker()),
            None => self.task = Some(cx.waker().clone()),
        }
    }

    /// Lets the connection's task run.
    pub fn wake(&mut self) {
        if !self.is_awake
            && let Some(task) = &self.task
        {
            self.is_awake = true;
            task.wake_by_ref();
        }
    }

    /// The peer has closed the connection, or it has failed.
    pub fn end(&mut self, error: &Error) {
        self.fail_streams(error, 0);
        self.end.get_or_insert_with(|| error.clone());
    }

    /// Ends the connection with a GOAWAY frame.
    pub fn close(&mut self, code: ErrorCode, error: &Error) {
        if self.end.is_none() {
            frame::write_go_away(&mut self.output, self.last_accepted, code);
            self.end(error);
            self.wake();
        }
    }

    /// Begins a graceful end: the peer may open no further streams, those that it has opened go on.
    pub fn drain(&mut self) {
        if self.drain == Drain::No && self.end.is_none() {
            self.drain = Drain::Announced;
            frame::write_go_away(&mut self.output, MAX_ID, ErrorCode::NO_ERROR);
            frame::write(&mut self.output, kind::PING, 0, 0, &LAST_PING);
            self.wake();
        }
    }

    /// Whether a graceful end is complete.
    pub fn is_drained(&self) -> bool {
        self.drain == Drain::Done && self.streams.is_empty()
    }

    /// Why the connection has ended.
    pub fn ended(&self) -> Option<&Error> {
        self.end.as_ref()
    }

    /// The number of streams that are not closed.
    pub fn open_streams(&self) -> u32 {
        self.open
    }

    /// Whether there are streams, or handles to closed ones.
    pub fn has_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Whether the peer's SETTINGS have arrived.
    pub fn is_settled(&self) -> bool {
        self.peer.settings > 0
    }

    /// The number of the peer's SETTINGS frames.
    pub fn settings_received(&self) -> u64 {
        self.peer.settings
    }

    /// The number of streams that the peer accepts. `None` before its SETTINGS have arrived.
    pub fn max_streams(&self) -> Option<u32> {
        self.is_settled().then_some(self.peer.max_streams)
    }

    /// Whether the peer accepts extended CONNECT requests (RFC 8441).
    pub fn accepts_connect_protocol(&self) -> bool {
        self.peer.accepts_connect_protocol
    }

    /// Whether further streams can be opened, if the peer's limit allows it.
    pub fn accepts_streams(&self) -> bool {
        self.end.is_none() && !self.peer.is_leaving && self.last_id < MAX_ID - 2
    }

    /// Tells the client that it may open WebSockets.
    pub fn enable_connect_protocol(&mut self) {
        if !self.config.enable_connect_protocol && self.end.is_none() {
            self.config.enable_connect_protocol = true;
            self.send_settings(&[(setting::ENABLE_CONNECT_PROTOCOL, 1)]);
            self.wake();
        }
    }

    /// Sends a SETTINGS frame without a change. When the peer has acknowledged as many frames as this
    /// number, it has read all that was sent before (RFC 9113, section 6.5.3).
    pub fn probe(&mut self) -> u64 {
        if self.end.is_none() {
            self.send_settings(&[(setting::INITIAL_WINDOW_SIZE, self.config.stream_window)]);
            self.wake();
        }
        self.settings_sent
    }

    /// The number of SETTINGS frames that were sent, and that the peer has acknowledged.
    pub fn settings(&self) -> (u64, u64) {
        (self.settings_sent, self.settings_acknowledged)
    }

    fn send_settings(&mut self, settings: &[(u16, u32)]) {
        self.settings_sent += 1;
        frame::write_settings(&mut self.output, settings);
    }
}
