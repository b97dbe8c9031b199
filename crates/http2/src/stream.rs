//! The streams of a connection. A stream stays while it is open, has handles, or bytes that wait.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::mem;
use std::task::{Context, Waker};

use bytes::{Bytes, BytesMut};

use crate::message::{Received, Response};
use crate::{Error, Fields};

/// The maximum number of interim responses that wait for one stream's task. Further ones are dropped.
const MAX_INTERIM: usize = 16;

/// The place of a stream, and the identifier that tells it from others at the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    place: usize,
    pub id: u32,
}

/// The rest of the peer's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiving {
    /// The head of a response.
    Head,
    Body,
    /// Nothing: END_STREAM has arrived.
    Ended,
}

/// The rest of this side's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sending {
    /// The head of a response.
    Head,
    Body,
    /// Nothing: END_STREAM was sent.
    Ended,
}

/// The end after the bytes that wait.
#[derive(Debug, Default)]
pub(crate) enum Finish {
    /// More bytes.
    #[default]
    Open,
    /// END_STREAM with the last of them.
    End,
    Trailers(Fields),
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The number of handles.
    pub handles: u8,
    pub receiving: Receiving,
    pub responses: VecDeque<Received<Response>>,
    pub body: BytesMut,
    pub trailers: Option<Received<Fields>>,
    /// The number of bytes that the peer may still send.
    pub receive_window: i64,
    /// Bytes that the peer has no credit for yet, and will get it.
    pub owed: u32,
    /// The rest of Content-Length.
    pub length_left: Option<u64>,
    /// The request is HEAD, whose response has no body whatever Content-Length says.
    pub is_head: bool,
    /// The request is CONNECT: Content-Length of a response with success means nothing.
    pub is_connect: bool,
    pub sending: Sending,
    /// The number of bytes that may still be sent. SETTINGS can make it negative.
    pub send_window: i64,
    /// Bytes that wait for windows, and for room in the output.
    pub pending: Bytes,
    pub finish: Finish,
    /// The stream is in the queue for the connection's window and output.
    pub is_queued: bool,
    /// It is reset, or its connection has ended.
    pub end: Option<Error>,
    pub waker: Option<Waker>,
}

impl Stream {
    pub fn new(receiving: Receiving, sending: Sending, windows: (i64, i64)) -> Self {
        Self {
            handles: 0,
            receiving,
            responses: VecDeque::new(),
            body: BytesMut::new(),
            trailers: None,
            receive_window: windows.0,
            owed: 0,
            length_left: None,
            is_head: false,
            is_connect: false,
            sending,
            send_window: windows.1,
            pending: Bytes::new(),
            finish: Finish::Open,
            is_queued: false,
            end: None,
            waker: None,
        }
    }

    /// Whether neither side sends on the stream.
    pub fn is_closed(&self) -> bool {
        let is_done = self.receiving == Receiving::Ended && self.sending == Sending::Ended;
        is_done || self.end.is_some()
    }

    pub fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub fn wait(&mut self, cx: &Context<'_>) {
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => self.waker = Some(cx.waker().clone()),
        }
    }

    /// Keeps a response for the task of the stream.
    pub fn respond(&mut self, response: Received<Response>) {
        let is_interim = response.message.status.is_informational();
        if !is_interim || self.responses.len() < MAX_INTERIM {
            self.responses.push_back(response);
        }
        self.wake();
    }

    /// Ends the stream early. A complete message that has arrived before stays readable.
    pub fn fail(&mut self, error: &Error) {
        if self.receiving != Receiving::Ended {
            self.body = BytesMut::new();
        }
        self.pending = Bytes::new();
        self.finish = Finish::Open;
        self.end.get_or_insert_with(|| error.clone());
        self.wake();
    }
}

thread_local! {
    /// The memory of a connection that has no streams any more.
    static SPARE: Cell<Streams> = Cell::default();
}

/// The streams of a connection, by place, and by identifier.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    slots: Vec<Option<(u32, Stream)>>,
    free: Vec<usize>,
    places: HashMap<u32, usize, BuildHasherDefault<IdHasher>>,
}

/// Spreads identifiers. A peer can choose some that meet, but few are there at a time.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    fn write_u32(&mut self, id: u32) {
        self.0 = (self.0 ^ u64::from(id)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

impl Streams {
    /// Adds a stream with a larger identifier than all before.
    pub fn insert(&mut self, id: u32, stream: Stream) -> Key {
        if self.slots.capacity() == 0 {
            *self = SPARE.take();
        }
        let place = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(place) {
            Some(slot) => *slot = Some((id, stream)),
            None => self.slots.push(Some((id, stream))),
        }
        self.places.insert(id, place);
        Key { place, id }
    }

    pub fn find(&self, id: u32) -> Option<Key> {
        let place = *self.places.get(&id)?;
        Some(Key { place, id })
    }

    /// The stream of a handle, or of a key that was just found.
    pub fn get(&mut self, key: Key) -> &mut Stream {
        let slot = self.slots[key.place].as_mut();
        let (_, stream) = slot.expect("a stream with handles stays, and no other has its place");
        stream
    }

    /// Whether the stream is still there.
    pub fn has(&self, key: Key) -> bool {
        let slot = self.slots.get(key.place).and_then(Option::as_ref);
        slot.is_some_and(|(id, _)| *id == key.id)
    }

    pub fn remove(&mut self, key: Key) {
        if self.places.remove(&key.id).is_some() {
            self.slots[key.place] = None;
            self.free.push(key.place);
        }
        // A quiet connection holds nothing for its past streams.
        if self.places.is_empty() {
            SPARE.set(mem::take(self));
        }
    }

    /// In any order.
    pub fn keys(&self) -> Vec<Key> {
        let key = |(place, slot): (usize, &Option<(u32, Stream)>)| {
            slot.as_ref().map(|(id, _)| Key { place, id: *id })
        };
        self.slots.iter().enumerate().filter_map(key).collect()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.slots.iter_mut().flatten().map(|(_, stream)| stream)
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}
