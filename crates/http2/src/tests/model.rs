//! Two engines, joined by queues of bytes, in random order: streams with bodies of all sizes, slow
//! readers, resets and dropped handles, and bytes that arrive in pieces. An observer reads the frames
//! of both sides, and keeps its own account of windows and streams.
//!
//! In the strict variant, a task runs only when its waker was woken: a wake-up that is missing stops
//! the test, which then fails with the state of both sides.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use fastrand::Rng;

use super::{
    DEFAULT_WINDOW, Fields, Flag, Frame, Response, Seed, bytes_of, check_bytes, config, fields_of,
    request, response,
};
use crate::frame::{flag, kind, setting};
use crate::{Config, Connection, Error, ErrorCode, Receiver, Role, Sender, Shared};

/// The failure of a connection.
const CUT: Error = Error::Io(std::io::ErrorKind::ConnectionReset);

/// The sides, as positions.
const CLIENT: usize = 0;
const SERVER: usize = 1;

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// With the head: there is no body.
    Head,
    /// With the last bytes.
    Last,
    /// With nothing after the last bytes.
    Empty,
    Trailers,
    /// With trailers that are sent before the last bytes have left.
    EarlyTrailers,
}

/// One direction of a stream.
#[derive(Clone, Debug)]
struct Body {
    pieces: Vec<usize>,
    end: End,
}

impl Body {
    fn random(rng: &mut Rng, max: usize) -> Self {
        let all = [
            End::Head,
            End::Last,
            End::Empty,
            End::Trailers,
            End::EarlyTrailers,
        ];
        let end = all[rng.usize(..all.len())];
        if end == End::Head {
            let pieces = Vec::new();
            return Self { pieces, end };
        }
        let max = [0, 100, 20_000, max][rng.usize(..4)].min(max);
        let mut left = rng.usize(..=max);
        let mut pieces = Vec::new();
        while left > 0 {
            let length = rng.usize(1..=left);
            pieces.push(length);
            left -= length;
            if rng.u8(..8) == 0 {
                pieces.push(0);
            }
        }
        if end == End::Last {
            pieces.push(rng.usize(1..=100));
        }
        Self { pieces, end }
    }

    fn length(&self) -> usize {
        self.pieces.iter().sum()
    }

    fn has_trailers(&self) -> bool {
        matches!(self.end, End::Trailers | End::EarlyTrailers)
    }
}

/// How a side disturbs a stream, after it has run this often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disturb {
    No,
    Reset(u32, ErrorCode),
    Drop(u32),
    /// The server takes nothing of the request's body.
    Ignore,
}

impl Disturb {
    fn random(rng: &mut Rng, is_server: bool) -> Self {
        let runs = rng.u32(1..60);
        match rng.u8(..10) {
            0 => Self::Reset(runs, ErrorCode(rng.u32(..20))),
            1 => Self::Drop(runs),
            2 if is_server => Self::Ignore,
            _ => Self::No,
        }
    }
}

/// The events of one stream.
#[derive(Clone, Debug)]
struct Plan {
    index: u64,
    bodies: [Body; 2],
    disturb: [Disturb; 2],
    /// Readers that take and release bytes late.
    is_slow: [bool; 2],
    interim: usize,
    /// The response begins before the request has ended.
    is_early: bool,
    /// A field of the heads with this many bytes.
    filler: usize,
}

impl Plan {
    fn random(rng: &mut Rng, index: u64, max: usize, is_disturbed: bool) -> Self {
        let mut plan = Self {
            index,
            bodies: [Body::random(rng, max), Body::random(rng, max)],
            disturb: [Disturb::No; 2],
            is_slow: [rng.u8(..3) == 0, rng.u8(..3) == 0],
            interim: if rng.bool() { 0 } else { rng.usize(..4) },
            is_early: rng.bool(),
            filler: if rng.u8(..10) == 0 {
                rng.usize(..40_000).min(max)
            } else {
                rng.usize(..30)
            },
        };
        if is_disturbed {
            plan.disturb = [Disturb::random(rng, false), Disturb::random(rng, true)];
            plan.is_early |= plan.disturb[SERVER] == Disturb::Ignore;
        }
        plan
    }
}

/// The view that one side has of a stream.
#[derive(Clone, Debug, Default)]
struct View {
    has_head: bool,
    interim: usize,
    received: usize,
    /// The peer's message is complete.
    ended: bool,
    /// Reading has failed.
    read_error: Option<Error>,
    /// This side's message was passed to the connection completely.
    submitted: bool,
    error: Option<Error>,
    /// A reset was sent.
    has_reset: bool,
    has_dropped: bool,
}

impl View {
    fn is_complete(&self) -> bool {
        self.submitted && self.ended
    }
}

/// The task of a stream on one side.
struct Task {
    plan: Rc<Plan>,
    at: usize,
    sender: Option<Sender>,
    receiver: Option<Receiver>,
    flag: Arc<Flag>,
    waker: Waker,
    runs: u32,
    sent_head: bool,
    sent_interim: usize,
    piece: usize,
    sent: usize,
    held: usize,
    view: View,
}

impl Task {
    fn new(plan: Rc<Plan>, at: usize, sender: Sender, receiver: Receiver) -> Self {
        let (flag, waker) = Flag::new();
        flag.set();
        let submitted = at == CLIENT && plan.bodies[CLIENT].end == End::Head;
        Self {
            plan,
            at,
            sender: Some(sender),
            receiver: Some(receiver),
            flag,
            waker,
            runs: 0,
            sent_head: at == CLIENT,
            sent_interim: 0,
            piece: 0,
            sent: 0,
            held: 0,
            view: View {
                submitted,
                has_head: at == SERVER,
                ..View::default()
            },
        }
    }

    /// Runs the task once. Returns whether it has ended, and has no handles.
    fn run(&mut self, rng: &mut Rng, connection: &Shared, window: usize) -> bool {
        self.runs += 1;
        self.disturb(connection);
        let waker = self.waker.clone();
        let cx = &Context::from_waker(&waker);
        if let Some(sender) = &self.sender
            && let Poll::Ready(error) = sender.poll_reset(cx)
        {
            self.view.error.get_or_insert(error);
        }
        // The response may begin at the end of the request.
        self.receive(cx, rng, window);
        self.send(cx);
        let has_sent = self.view.submitted || self.view.error.is_some();
        let has_received =
            self.view.ended || self.view.read_error.is_some() || self.receiver.is_none();
        if self.view.submitted && rng.u8(..8) == 0 {
            self.sender = None;
        }
        if self.view.ended && rng.u8(..8) == 0 {
            self.receiver = None;
        }
        if has_sent && has_received {
            self.sender = None;
            self.receiver = None;
        }
        let is_done = self.sender.is_none() && self.receiver.is_none();
        if !is_done && self.runs < self.due().unwrap_or_default() {
            self.flag.set();
        }
        is_done
    }

    /// When the plan disturbs the stream.
    fn due(&self) -> Option<u32> {
        match self.plan.disturb[self.at] {
            Disturb::Reset(runs, _) | Disturb::Drop(runs) => Some(runs),
            Disturb::Ignore => Some(1),
            Disturb::No => None,
        }
    }

    fn disturb(&mut self, connection: &Shared) {
        if self.due() != Some(self.runs) {
            return;
        }
        match self.plan.disturb[self.at] {
            Disturb::Reset(_, code) => {
                if let Some(sender) = &self.sender {
                    let open = || connection.with(|connection| connection.open_streams());
                    let before = open();
                    sender.reset(code);
                    self.view.has_reset = open() < before;
                }
            }
            Disturb::Drop(_) => {
                self.sender = None;
                self.receiver = None;
                self.view.has_dropped = true;
            }
            Disturb::Ignore => self.receiver = None,
            Disturb::No => {}
        }
    }

    fn send(&mut self, cx: &Context<'_>) {
        let Some(sender) = &self.sender else {
            return;
        };
        let body = &self.plan.bodies[self.at];
        let id = 2 * self.plan.index + self.at as u64;
        let view = &mut self.view;
        let may_begin = self.plan.is_early || view.ended || view.read_error.is_some();
        if view.error.is_some() || view.submitted || !(self.sent_head || may_begin) {
            return;
        }
        let result = loop {
            if !self.sent_head {
                let is_interim = self.sent_interim < self.plan.interim;
                let head = head_of_response(&self.plan, if is_interim { 103 } else { 200 });
                self.sent_interim += usize::from(is_interim);
                self.sent_head = !is_interim;
                let end = self.sent_head && body.end == End::Head;
                let result = sender.respond(&head, end);
                if result.is_err() || end {
                    break result;
                }
                continue;
            }
            let trailers = || {
                let (index, length) = (self.plan.index.to_string(), body.length().to_string());
                fields_of(&[("x-plan", &index), ("x-length", &length)])
            };
            if body.end == End::EarlyTrailers && self.piece == body.pieces.len() {
                break sender.send_trailers(trailers());
            }
            match sender.poll_ready(cx) {
                Poll::Pending => {
                    assert!(sender.pending() > 0);
                    return;
                }
                Poll::Ready(Err(error)) => break Err(error),
                Poll::Ready(Ok(())) => {}
            }
            match body.pieces.get(self.piece) {
                Some(&length) => {
                    self.piece += 1;
                    let is_last = body.end == End::Last && self.piece == body.pieces.len();
                    let result = sender.send(bytes_of(id, self.sent, length), is_last);
                    self.sent += length;
                    if result.is_err() || is_last {
                        break result;
                    }
                }
                None if body.end == End::Trailers => break sender.send_trailers(trailers()),
                None => break sender.send(Bytes::new(), true),
            }
        };
        match result {
            Ok(()) => view.submitted = true,
            Err(error) => {
                view.error.get_or_insert(error);
            }
        }
    }

    fn receive(&mut self, cx: &Context<'_>, rng: &mut Rng, window: usize) {
        let Some(receiver) = &self.receiver else {
            return;
        };
        let peer = 1 - self.at;
        let body = &self.plan.bodies[peer];
        let id = 2 * self.plan.index + peer as u64;
        let is_slow = self.plan.is_slow[self.at];
        let view = &mut self.view;
        assert!(receiver.buffered() <= window, "more than a window waits");
        while !view.has_head && view.read_error.is_none() {
            match receiver.poll_response(cx) {
                Poll::Pending => return,
                Poll::Ready(Err(error)) => view.read_error = Some(error),
                Poll::Ready(Ok(head)) => {
                    assert!(!head.is_cut);
                    let fields = &head.message.fields;
                    assert_eq!(number(fields, "x-plan"), self.plan.index);
                    assert_eq!(
                        fields.get("x-filler").map(<[u8]>::len),
                        Some(self.plan.filler)
                    );
                    view.has_head = head.message.status == 200;
                    view.interim += usize::from(!view.has_head);
                }
            }
        }
        if is_slow && rng.u8(..4) > 0 {
            self.flag.set();
        } else {
            while !view.ended && view.read_error.is_none() {
                match receiver.poll_data(cx) {
                    Poll::Pending => break,
                    Poll::Ready(Some(Ok(data))) => {
                        assert!(!data.is_empty());
                        check_bytes(id, view.received, &data);
                        view.received += data.len();
                        self.held += data.len();
                    }
                    Poll::Ready(Some(Err(error))) => view.read_error = Some(error),
                    Poll::Ready(None) => {
                        view.ended = true;
                        assert_eq!(view.received, body.length());
                        let Poll::Ready(Ok(trailers)) = receiver.poll_trailers(cx) else {
                            panic!("no trailers at the end of the body");
                        };
                        assert_eq!(trailers.is_some(), body.has_trailers());
                        if let Some(trailers) = trailers {
                            let fields = &trailers.message;
                            assert_eq!(number(fields, "x-plan"), self.plan.index);
                            assert_eq!(number(fields, "x-length"), body.length() as u64);
                        }
                        assert!(receiver.is_end_stream());
                    }
                }
            }
        }
        if self.held > 0 {
            let length = if is_slow {
                rng.usize(1..=self.held)
            } else {
                self.held
            };
            receiver.release(length);
            self.held -= length;
            if self.held > 0 {
                self.flag.set();
            }
        }
    }
}

fn number(fields: &Fields, name: &str) -> u64 {
    let text = str::from_utf8(fields.get(name).expect("a field"));
    text.expect("a number").parse().expect("a number")
}

fn head_of_response(plan: &Plan, status: u16) -> Response {
    let (index, filler) = (plan.index.to_string(), "f".repeat(plan.filler));
    response(status, &[("x-plan", &index), ("x-filler", &filler)])
}

/// An account of what both sides have written.
#[derive(Default)]
struct Observer {
    sides: [Written; 2],
}

/// The frames of one side, summed up.
#[derive(Default)]
struct Written {
    /// The start of a frame.
    rest: Vec<u8>,
    /// How many bytes the side may send.
    window: i64,
    /// How many bytes a new stream of the side may send.
    stream_window: i64,
    streams: HashMap<u32, Half>,
    last_id: u32,
    block: Option<u32>,
}

/// The frames of one side on one stream, summed up.
#[derive(Default)]
struct Half {
    window: i64,
    sent_data: bool,
    sent_end: bool,
    sent_reset: bool,
}

impl Observer {
    fn new() -> Self {
        let mut observer = Self::default();
        for side in &mut observer.sides {
            side.window = DEFAULT_WINDOW as i64;
            side.stream_window = DEFAULT_WINDOW as i64;
        }
        observer.sides[CLIENT].rest = b"-".to_vec();
        observer
    }

    /// Reads what a side has written.
    fn read(&mut self, at: usize, bytes: &[u8]) {
        let mut rest = std::mem::take(&mut self.sides[at].rest);
        // One byte stands for the preface that is still to come.
        if rest.first() == Some(&b'-') {
            rest.extend(bytes);
            if rest.len() <= super::PREFACE.len() {
                self.sides[at].rest = rest;
                return;
            }
            assert_eq!(rest[1..=super::PREFACE.len()], *super::PREFACE);
            rest.drain(..=super::PREFACE.len());
        } else {
            rest.extend(bytes);
        }
        let mut left = &rest[..];
        while let Some(frame) = Frame::take(&mut left) {
            self.observe(at, &frame);
        }
        self.sides[at].rest = left.to_vec();
    }

    fn observe(&mut self, at: usize, frame: &Frame) {
        let id = frame.stream;
        assert!(frame.payload.len() <= 16_384, "{frame:?}");
        let expected = self.sides[at].block.map(|id| (kind::CONTINUATION, id));
        let is_next = expected.is_none_or(|expected| expected == (frame.kind, id));
        assert!(is_next, "a field block is interrupted: {frame:?}");
        let [client, server] = &mut self.sides;
        let (side, peer) = if at == CLIENT {
            (client, server)
        } else {
            (server, client)
        };
        if frame.kind == kind::HEADERS && at == CLIENT && id > side.last_id {
            assert_eq!(id % 2, 1);
            side.last_id = id;
            for side in [&mut *side, &mut *peer] {
                let window = side.stream_window;
                let half = Half {
                    window,
                    ..Half::default()
                };
                side.streams.insert(id, half);
            }
        }
        if id > 0 {
            let half = side.streams.get_mut(&id).expect("a stream that was opened");
            assert!(!half.sent_reset, "a frame after a reset: {frame:?}");
            let is_message = matches!(frame.kind, kind::DATA | kind::HEADERS);
            assert!(
                !(is_message && half.sent_end),
                "a frame after the end: {frame:?}"
            );
            if frame.kind == kind::HEADERS && half.sent_data {
                assert!(frame.has(flag::END_STREAM), "trailers that end nothing");
            }
            half.sent_data |= frame.kind == kind::DATA;
            half.sent_end |= is_message && frame.has(flag::END_STREAM);
            half.sent_reset |= frame.kind == kind::RST_STREAM;
        }
        match frame.kind {
            kind::DATA => {
                let length = frame.payload.len();
                side.window -= length as i64;
                let half = side.streams.get_mut(&id).expect("a stream that was opened");
                half.window -= length as i64;
                assert!(
                    half.window >= 0,
                    "DATA beyond the stream's window: {frame:?}"
                );
                assert!(
                    side.window >= 0,
                    "DATA beyond the connection's window: {frame:?}"
                );
            }
            kind::HEADERS | kind::CONTINUATION => {
                side.block = (!frame.has(flag::END_HEADERS)).then_some(id);
            }
            kind::SETTINGS if frame.has(flag::ACK) => assert_eq!(frame.payload, b""),
            kind::SETTINGS => {
                for setting in frame.payload.chunks(6) {
                    let value = i64::from(u32::from_be_bytes(
                        setting[2..].try_into().expect("a value"),
                    ));
                    if setting[..2] == setting::INITIAL_WINDOW_SIZE.to_be_bytes() {
                        let change = value - peer.stream_window;
                        peer.stream_window = value;
                        peer.streams
                            .values_mut()
                            .for_each(|half| half.window += change);
                    }
                }
            }
            kind::WINDOW_UPDATE => {
                let increment = i64::from(frame.number(0));
                assert!(increment > 0);
                match peer.streams.get_mut(&id) {
                    None => peer.window += increment,
                    Some(half) => half.window += increment,
                }
            }
            kind::RST_STREAM => {}
            kind::PING => assert_eq!(
                (frame.payload.len(), frame.has(flag::ACK)),
                (8, at == CLIENT)
            ),
            kind::GOAWAY => assert_eq!((at, frame.number(4)), (SERVER, 0)),
            _ => panic!("no side has a reason for {frame:?}"),
        }
    }
}

/// How many bytes arrive at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    One,
    Few,
    Any,
}

/// One side of the connection.
struct Side {
    config: Config,
    shared: Shared,
    /// Bytes that the peer has written, and that have not arrived.
    wire: BytesMut,
    /// The start of a frame that has arrived.
    rest: BytesMut,
    flag: Arc<Flag>,
    waker: Waker,
    /// The output was not empty when the connection's task ran last.
    has_more: bool,
}

/// The fate of the connection, and its round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    /// The server begins a graceful end.
    Drain(usize),
    /// The connection fails.
    Cut(usize),
}

/// Both sides, and the tasks of their streams.
struct Model {
    rng: Rng,
    sides: [Side; 2],
    observer: Observer,
    tasks: Vec<Task>,
    plans: HashMap<u64, Rc<Plan>>,
    views: HashMap<(u64, usize), View>,
    pace: Pace,
    is_strict: bool,
    fate: Fate,
    next_index: u64,
}

impl Model {
    fn new(seed: u64, pace: Pace, is_strict: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut side = |role| {
            let mut window = || [65_535, 256 * 1024][rng.usize(..2)];
            let (stream_window, connection_window) = (window(), window());
            let config = Config {
                stream_window,
                connection_window,
                max_fields: 64 * 1024,
                max_block: 128 * 1024,
                max_output: [1, 1000, 16_384, 65_536][rng.usize(..4)],
                ..config(role)
            };
            let (flag, waker) = Flag::new();
            flag.set();
            Side {
                config,
                shared: Shared::new(config),
                wire: BytesMut::new(),
                rest: BytesMut::new(),
                flag,
                waker,
                has_more: false,
            }
        };
        let sides = [side(Role::Client), side(Role::Server)];
        Self {
            rng,
            sides,
            observer: Observer::new(),
            tasks: Vec::new(),
            plans: HashMap::new(),
            views: HashMap::new(),
            pace,
            is_strict,
            fate: Fate::Stays,
            next_index: 0,
        }
    }

    /// Plans with bodies of at most this size.
    fn plan(&mut self, count: usize, max: usize, is_disturbed: bool) -> Vec<Plan> {
        let indexes = self.next_index..self.next_index + count as u64;
        self.next_index = indexes.end;
        indexes
            .map(|index| Plan::random(&mut self.rng, index, max, is_disturbed))
            .collect()
    }

    /// Runs streams as planned, and checks what both sides have seen of them.
    fn run(&mut self, plans: Vec<Plan>) {
        let bytes: usize = plans
            .iter()
            .flat_map(|plan| &plan.bodies)
            .map(Body::length)
            .sum();
        let fillers: usize = plans
            .iter()
            .map(|plan| (2 + plan.interim) * (plan.filler + 200))
            .sum();
        let piece = [1, 50, 1000][self.pace as usize];
        let max_rounds = 20_000 + 8 * (bytes + fillers) / piece;
        let mut waiting: Vec<_> = plans.iter().cloned().map(Rc::new).rev().collect();
        let mut rounds = 0;
        while !(waiting.is_empty() && self.tasks.is_empty() && self.is_quiet()) {
            rounds += 1;
            assert!(
                rounds < max_rounds,
                "no end after {rounds} rounds: {}",
                self.state()
            );
            let mut has_run = false;
            match self.fate {
                Fate::Drain(round) if round == rounds => {
                    self.sides[SERVER].shared.with(Connection::drain);
                }
                Fate::Cut(round) if round == rounds => self.cut(),
                _ => {}
            }
            if !self.sides[CLIENT]
                .shared
                .with(|connection| connection.accepts_streams())
            {
                waiting.clear();
            }
            let open = self.sides[CLIENT]
                .shared
                .with(|connection| connection.open_streams());
            if open < self.sides[SERVER].config.max_streams
                && let Some(plan) = waiting.pop_if(|_| self.rng.u8(..4) == 0)
            {
                self.open(plan);
            }
            has_run |= !waiting.is_empty();
            for at in [CLIENT, SERVER] {
                if self.is_runnable(at) {
                    has_run = true;
                    if self.rng.bool() {
                        self.drive(at);
                    }
                }
            }
            has_run |= self.run_tasks();
            assert!(has_run, "a wake-up is missing: {}", self.state());
        }
        for plan in plans {
            // Others were not opened.
            if self.plans.contains_key(&plan.index) {
                self.check(&plan);
            }
        }
    }

    /// Both sides notice that the connection has failed.
    fn cut(&mut self) {
        for side in &mut self.sides {
            side.shared.with(|connection| {
                connection.end(&CUT);
                let length = connection.output().len();
                connection.record_written(length);
            });
            while side.shared.accept().is_some() {}
            side.wire.clear();
            side.rest.clear();
        }
    }

    fn open(&mut self, plan: Rc<Plan>) {
        let (index, filler) = (plan.index.to_string(), "f".repeat(plan.filler));
        let head = request("POST", &[("x-plan", &index), ("x-filler", &filler)]);
        let end_stream = plan.bodies[CLIENT].end == End::Head;
        let opened = self.sides[CLIENT].shared.open(&head, end_stream);
        let (sender, receiver) = opened.expect("a stream");
        self.plans.insert(plan.index, plan.clone());
        self.tasks.push(Task::new(plan, CLIENT, sender, receiver));
    }

    fn is_runnable(&self, at: usize) -> bool {
        let side = &self.sides[at];
        !self.is_strict || side.flag.is_set() || side.has_more || !side.wire.is_empty()
    }

    /// Nothing is on its way.
    fn is_quiet(&self) -> bool {
        self.sides.iter().all(|side| {
            let is_written = side
                .shared
                .with(|connection| connection.output().is_empty());
            is_written && side.wire.is_empty() && side.rest.is_empty()
        })
    }

    /// Runs the task of a side's connection once.
    fn drive(&mut self, at: usize) {
        let side = &mut self.sides[at];
        side.flag.take();
        side.shared.with(Connection::set_awake);
        let rng = &mut self.rng;
        if !side.wire.is_empty() && rng.u8(..4) > 0 {
            let max = match self.pace {
                Pace::One => 1,
                Pace::Few => rng.usize(1..1000),
                Pace::Any => rng.usize(1..=side.wire.len()),
            };
            let arrived = side.wire.split_to(max.min(side.wire.len()));
            side.rest.extend_from_slice(&arrived);
            let received = side
                .shared
                .with(|connection| connection.receive(&side.rest));
            side.rest
                .advance(received.expect("a peer without violations"));
        }
        while let Some(opened) = side.shared.accept() {
            let head = &opened.request.message;
            assert!(!opened.request.is_cut);
            let plan = self.plans[&number(&head.fields, "x-plan")].clone();
            let filler = head.fields.get("x-filler");
            assert_eq!(filler.map(<[u8]>::len), Some(plan.filler));
            self.tasks
                .push(Task::new(plan, at, opened.sender, opened.receiver));
        }
        if rng.u8(..50) == 0 {
            let max_output = [1, 1000, 16_384, 65_536][rng.usize(..4)];
            side.config.max_output = max_output;
            side.shared
                .with(|connection| connection.set_max_output(max_output));
        }
        let mut written = Vec::new();
        while rng.u8(..4) > 0
            && side
                .shared
                .with(|connection| !connection.output().is_empty())
        {
            side.shared.with(|connection| {
                let length = rng.usize(1..=connection.output().len());
                written.extend_from_slice(&connection.output()[..length]);
                connection.record_written(length);
            });
        }
        side.shared.with(|connection| {
            side.has_more = !connection.output().is_empty();
            connection.wait(&Context::from_waker(&side.waker));
        });
        self.observer.read(at, &written);
        self.sides[1 - at].wire.extend_from_slice(&written);
    }

    /// Runs some of the tasks of streams. Returns whether one can run.
    fn run_tasks(&mut self) -> bool {
        let mut can_run = false;
        let mut position = 0;
        while position < self.tasks.len() {
            let task = &mut self.tasks[position];
            let is_runnable = !self.is_strict || task.flag.is_set();
            can_run |= is_runnable;
            position += 1;
            if !is_runnable || self.rng.bool() {
                continue;
            }
            task.flag.take();
            let side = &self.sides[task.at];
            let window = self.sides[task.at].config.stream_window as usize;
            if task.run(&mut self.rng, &side.shared, window) {
                position -= 1;
                let task = self.tasks.swap_remove(position);
                self.views.insert((task.plan.index, task.at), task.view);
            }
        }
        can_run
    }

    fn check(&self, plan: &Plan) {
        if matches!(self.fate, Fate::Cut(_)) {
            return self.check_cut(plan);
        }
        let [client, server] = [CLIENT, SERVER].map(|at| &self.views[&(plan.index, at)]);
        let state = || format!("{plan:?}\nclient: {client:?}\nserver: {server:?}");
        assert!(
            !client.ended || client.interim == plan.interim,
            "{}",
            state()
        );
        let reset = |code| Some(Error::Reset(code));
        let is_ignored_by = |error: &Option<Error>| {
            error.is_none() || *error == reset(ErrorCode::NO_ERROR) && !server.ended
        };
        let is_right = match plan.disturb {
            [Disturb::No, Disturb::No] => {
                let has_error = client.error.is_some() || server.error.is_some();
                client.is_complete() && server.is_complete() && !has_error
            }
            [Disturb::No, Disturb::Ignore] => {
                client.ended
                    && is_ignored_by(&client.error)
                    && server.submitted
                    && server.error.is_none()
            }
            [Disturb::Reset(_, code), Disturb::No] if client.has_reset => {
                server.is_complete()
                    || server.error.clone().or(server.read_error.clone()) == reset(code)
            }
            [Disturb::Drop(_), Disturb::No] if client.has_dropped => {
                let error = server.error.clone().or(server.read_error.clone());
                server.is_complete() || error == reset(ErrorCode::CANCEL)
            }
            [Disturb::No, Disturb::Reset(_, code)] if server.has_reset => {
                client.is_complete()
                    || client.error.clone().or(client.read_error.clone()) == reset(code)
            }
            [Disturb::No, Disturb::Drop(_)] if server.has_dropped => {
                let error = client.error.clone().or(client.read_error.clone());
                if server.submitted {
                    client.ended && is_ignored_by(&error)
                } else {
                    error == reset(ErrorCode::CANCEL)
                }
            }
            // Both sides disturb, or the stream has ended before.
            _ => [client, server].into_iter().all(|view| {
                view.is_complete()
                    || view.has_dropped
                    || view.error.is_some()
                    || view.read_error.is_some()
                    || view.submitted
            }),
        };
        assert!(is_right, "{}", state());
    }

    /// Each side has the complete message of the other one, or knows of the failure.
    fn check_cut(&self, plan: &Plan) {
        // The server has not seen the request if the failure came first.
        for view in [CLIENT, SERVER]
            .iter()
            .filter_map(|at| self.views.get(&(plan.index, *at)))
        {
            let knows = view.read_error == Some(CUT) || view.error == Some(CUT);
            assert!(view.is_complete() || knows, "{view:?}");
        }
    }

    /// Fails if one of the sides still holds something, or owes window.
    fn check_end(&self) {
        for (at, side) in self.sides.iter().enumerate() {
            let (open, has_streams, ended) = side.shared.with(|connection| {
                let ended = connection.ended().cloned();
                (connection.open_streams(), connection.has_streams(), ended)
            });
            assert_eq!((open, has_streams), (0, false), "{}", self.state());
            if matches!(self.fate, Fate::Cut(_)) {
                continue;
            }
            assert_eq!(ended, None, "{}", self.state());
            let window = i64::from(side.config.connection_window);
            let left = self.observer.sides[1 - at].window;
            let is_balanced = left > window - window / 2 && left <= window;
            assert!(is_balanced, "{left} of {window} bytes: {}", self.state());
        }
    }

    fn state(&self) -> String {
        let sides = self
            .sides
            .iter()
            .zip(&self.observer.sides)
            .map(|(side, written)| {
                let (open, has_streams, output) = side.shared.with(|connection| {
                    (
                        connection.open_streams(),
                        connection.has_streams(),
                        connection.output().len(),
                    )
                });
                format!(
                    "\n{:?}: {open} open, streams: {has_streams}, output {output}, \
                 to read {} and {}, may send {}",
                    side.config,
                    side.wire.len(),
                    side.rest.len(),
                    written.window,
                )
            });
        let tasks = self.tasks.iter().map(|task| {
            let pending = task.sender.as_ref().map(Sender::pending);
            let buffered = task.receiver.as_ref().map(Receiver::buffered);
            let (plan, view) = (&task.plan, &task.view);
            let (at, woken) = (task.at, task.flag.count());
            let bytes = format!("pending {pending:?}, buffered {buffered:?}");
            format!("\n{at}: {bytes}, woken {woken}, {view:?} {plan:?}")
        });
        sides.chain(tasks.take(4)).collect()
    }
}

/// Runs disturbed streams, then others on the same connection.
fn run(seed: u64, pace: Pace, is_strict: bool, count: usize, max: usize) {
    let _seed = Seed(seed);
    let mut model = Model::new(seed, pace, is_strict);
    let plans = model.plan(count, max, true);
    model.run(plans);
    model.check_end();
    let plans = model.plan(100, max.min(10_000), false);
    model.run(plans);
    model.check_end();
}

#[test]
fn all_streams_are_complete_whatever_others_do() {
    for seed in 0..24 {
        run(seed, Pace::Any, false, 60, 200 * 1024);
    }
}

#[test]
fn bytes_may_arrive_in_small_pieces() {
    for seed in 100..106 {
        run(seed, Pace::Few, false, 30, 20_000);
    }
    for seed in 200..203 {
        run(seed, Pace::One, false, 10, 400);
    }
}

#[test]
fn no_task_is_polled_without_a_wake_up() {
    for seed in 300..324 {
        run(seed, Pace::Any, true, 60, 200 * 1024);
    }
    for seed in 400..404 {
        run(seed, Pace::Few, true, 30, 20_000);
    }
}

#[test]
fn undisturbed_streams_have_no_errors() {
    for seed in 500..508 {
        let _seed = Seed(seed);
        let mut model = Model::new(seed, Pace::Any, true);
        let plans = model.plan(150, 100 * 1024, false);
        model.run(plans);
        model.check_end();
    }
}

#[test]
fn a_graceful_end_completes_all_streams() {
    for seed in 700..712 {
        let _seed = Seed(seed);
        let mut model = Model::new(seed, Pace::Any, true);
        let round = model.rng.usize(1..400);
        model.fate = Fate::Drain(round);
        let plans = model.plan(100, 20_000, false);
        model.run(plans);
        model.check_end();
        let is_drained = model.sides[SERVER]
            .shared
            .with(|connection| connection.is_drained());
        let opened = model.plans.len();
        assert!(is_drained, "after {opened} streams: {}", model.state());
    }
}

#[test]
fn the_failure_of_a_connection_reaches_all_tasks() {
    for seed in 800..824 {
        let _seed = Seed(seed);
        let mut model = Model::new(seed, Pace::Any, true);
        let round = model.rng.usize(1..400);
        model.fate = Fate::Cut(round);
        let plans = model.plan(100, 100_000, false);
        model.run(plans);
        model.check_end();
    }
}

#[test]
fn streams_take_turns_with_the_window_of_the_connection() {
    let mut model = Model::new(600, Pace::Any, true);
    for side in &model.sides {
        side.shared
            .with(|connection| connection.set_max_output(65_536));
    }
    let body = |end| Body {
        pieces: vec![40_000; 4],
        end,
    };
    let ends = [End::Last, End::Empty, End::Trailers, End::EarlyTrailers];
    let plans = (0..40).map(|index| Plan {
        index,
        bodies: [body(End::Last), body(ends[index as usize % 4])],
        disturb: [Disturb::No; 2],
        is_slow: [index % 3 == 0, false],
        interim: 0,
        is_early: true,
        filler: 10,
    });
    model.run(plans.collect());
    model.check_end();
}
