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

/// The number of places of a connection with few streams.
const FEW_PLACES: usize = 8;

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
    /// The memory of connections that have no streams any more: with few places, and with many.
    static SPARE: [Cell<Streams>; 2] = Default::default();
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
        if self.free.is_empty() && self.slots.len() == self.slots.capacity() {
            self.grow();
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
            mem::take(self).lend();
        }
    }

    /// Takes memory with few places, later with many: a stream that stays open does not hold the places
    /// that an earlier burst has left.
    fn grow(&mut self) {
        let has_few = self.slots.capacity() > 0;
        let mut larger = SPARE.with(|spare| spare[usize::from(has_few)].take());
        larger.slots.append(&mut self.slots);
        larger.places.extend(self.places.drain());
        mem::replace(self, larger).lend();
    }

    /// Gives memory without streams to other connections.
    fn lend(mut self) {
        self.slots.clear();
        self.free.clear();
        let has_many = self.slots.capacity() > FEW_PLACES;
        if self.slots.capacity() > 0 {
            SPARE.with(|spare| spare[usize::from(has_many)].set(self));
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fastrand::Rng;

    use super::*;

    fn stream(mark: u32) -> Stream {
        Stream {
            owed: mark,
            ..Stream::new(Receiving::Body, Sending::Body, (0, 0))
        }
    }

    #[test]
    fn long_stream_holds_no_places_of_an_earlier_burst() {
        let (mut burst, mut long) = (Streams::default(), Streams::default());
        let mut all = || -> usize {
            let keys: Vec<_> = (0..200).map(|id| burst.insert(id, stream(id))).collect();
            let capacity = burst.slots.capacity();
            keys.into_iter().for_each(|key| burst.remove(key));
            assert_eq!(burst.slots.capacity(), 0);
            capacity
        };
        let capacity = all();
        long.insert(1, stream(1));
        assert!(long.slots.capacity() <= FEW_PLACES);
        // Another burst has the places of the earlier one.
        let many = || SPARE.with(|spare| spare[1].take());
        let spare = many();
        assert_eq!(spare.slots.capacity(), capacity);
        spare.lend();
        assert_eq!(all(), capacity);
        assert_eq!(many().slots.capacity(), capacity);
    }

    /// The connections of a thread share memory: none finds the streams of another.
    #[test]
    fn streams_are_found_by_their_connection_only() {
        let mut rng = Rng::with_seed(1);
        let mut connections: [(Streams, BTreeMap<u32, Key>); 3] = Default::default();
        let (mut gone, mut next_id) = (Vec::new(), 1);
        for round in 0..20_000 {
            let at = rng.usize(..3);
            let (streams, known) = &mut connections[at];
            // Each connection grows to a burst, and shrinks to none.
            if rng.usize(..500) + 250 > round % 1000 {
                known.insert(next_id, streams.insert(next_id, stream(next_id)));
                next_id += 2;
            } else if let Some(id) = rng.choice(known.keys().copied().collect::<Vec<_>>()) {
                let key = known.remove(&id).expect("a stream");
                streams.remove(key);
                gone.push((at, key));
            }
            assert_eq!(
                (streams.len(), streams.is_empty()),
                (known.len(), known.is_empty())
            );
            for (id, key) in known.iter() {
                assert_eq!((streams.find(*id), streams.has(*key)), (Some(*key), true));
                assert_eq!(streams.get(*key).owed, *id);
            }
            for (at, key) in gone.iter().rev().take(20) {
                let (streams, _) = &connections[*at];
                assert_eq!((streams.find(key.id), streams.has(*key)), (None, false));
            }
        }
        for (streams, known) in &connections {
            let mut keys = streams.keys();
            keys.sort_by_key(|key| key.id);
            assert_eq!(keys, known.values().copied().collect::<Vec<_>>());
        }
    }
}
