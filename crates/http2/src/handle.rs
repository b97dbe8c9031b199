//! The handles of tasks: one to a connection, and two to each stream, for the two directions. A
//! stream is reset when both are dropped before its end. One task uses both handles of a stream: only
//! the task that has waited last wakes.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;

use crate::connection::{Config, Connection};
use crate::message::{Received, Request, Response};
use crate::stream::{Key, Receiving, Stream};
use crate::{Error, ErrorCode, Fields};

/// A connection, shared by its driver and the tasks of its streams.
#[derive(Clone)]
pub struct Shared(Rc<RefCell<Connection>>);

/// The sending direction of a stream.
pub struct Sender(Handle);

/// The receiving direction of a stream.
pub struct Receiver(Handle);

struct Handle {
    connection: Rc<RefCell<Connection>>,
    key: Key,
}

/// A stream that the peer has opened.
pub struct Opened {
    /// The head of the request.
    pub request: Received<Request>,
    /// For the response.
    pub sender: Sender,
    /// The body of the request.
    pub receiver: Receiver,
}

impl Shared {
    /// A connection before its first byte.
    pub fn new(config: Config) -> Self {
        Self(Rc::new(RefCell::new(Connection::new(config))))
    }

    /// Uses the connection.
    pub fn with<T>(&self, use_it: impl FnOnce(&mut Connection) -> T) -> T {
        use_it(&mut self.0.borrow_mut())
    }

    /// The next stream that the peer has opened.
    pub fn accept(&self) -> Option<Opened> {
        let connection = &mut *self.0.borrow_mut();
        let (key, request) = connection.next_opened()?;
        let (sender, receiver) = self.handles(connection, key);
        Some(Opened {
            request,
            sender,
            receiver,
        })
    }

    /// Opens a stream with a request. Fails if the connection takes no more.
    pub fn open(&self, head: &Request, end_stream: bool) -> Result<(Sender, Receiver), Error> {
        let connection = &mut *self.0.borrow_mut();
        let key = connection.open(head, end_stream)?;
        Ok(self.handles(connection, key))
    }

    /// The two handles of a stream, which had none, or the one that is counted until it is accepted.
    fn handles(&self, connection: &mut Connection, key: Key) -> (Sender, Receiver) {
        connection.stream(key).handles = 2;
        let handle = || Handle {
            connection: self.0.clone(),
            key,
        };
        (Sender(handle()), Receiver(handle()))
    }
}

impl Handle {
    fn with<T>(&self, use_it: impl FnOnce(&mut Connection, Key) -> T) -> T {
        use_it(&mut self.connection.borrow_mut(), self.key)
    }

    fn poll<T>(&self, cx: &Context<'_>, read: impl FnOnce(&mut Stream) -> Option<T>) -> Poll<T> {
        self.with(|connection, key| {
            let stream = connection.stream(key);
            match read(stream) {
                Some(value) => Poll::Ready(value),
                None => {
                    stream.wait(cx);
                    Poll::Pending
                }
            }
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.with(Connection::drop_handle);
    }
}

impl Sender {
    /// Sends the head of the response, or an interim one.
    pub fn respond(&self, head: &Response, end_stream: bool) -> Result<(), Error> {
        self.0
            .with(|connection, key| connection.respond(key, head, end_stream))
    }

    /// Waits until all earlier bytes are in the output of the connection. Fails if the stream has ended
    /// early.
    pub fn poll_ready(&self, cx: &Context<'_>) -> Poll<Result<(), Error>> {
        self.0.poll(cx, |stream| match &stream.end {
            Some(error) => Some(Err(error.clone())),
            None => stream.pending.is_empty().then_some(Ok(())),
        })
    }

    /// The number of bytes that wait.
    pub fn pending(&self) -> usize {
        self.0
            .with(|connection, key| connection.stream(key).pending.len())
    }

    /// Sends bytes of the body after [`Sender::poll_ready`].
    pub fn send(&self, data: Bytes, end_stream: bool) -> Result<(), Error> {
        self.0
            .with(|connection, key| connection.send(key, data, end_stream))
    }

    /// Sends trailers, after the bytes that wait.
    pub fn send_trailers(&self, trailers: Fields) -> Result<(), Error> {
        self.0
            .with(|connection, key| connection.send_trailers(key, trailers))
    }

    /// Resets the stream, unless it has ended.
    pub fn reset(&self, code: ErrorCode) {
        self.0
            .with(|connection, key| connection.reset(key, code, &Error::Closed));
    }

    /// Waits until the stream has ended early, by the peer's reset or with its connection.
    pub fn poll_reset(&self, cx: &Context<'_>) -> Poll<Error> {
        self.0.poll(cx, |stream| stream.end.clone())
    }
}

impl Receiver {
    /// Waits for the head of the response. Interim ones come first.
    pub fn poll_response(&self, cx: &Context<'_>) -> Poll<Result<Received<Response>, Error>> {
        self.0
            .poll(cx, |stream| match stream.responses.pop_front() {
                Some(response) => Some(Ok(response)),
                None => stream.end.clone().map(Err),
            })
    }

    /// Takes the bytes of the body that have arrived. `None`: the body has ended.
    pub fn poll_data(&self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        self.0.poll(cx, |stream| {
            if !stream.body.is_empty() {
                return Some(Some(Ok(stream.body.split().freeze())));
            }
            if stream.receiving == Receiving::Ended {
                return Some(None);
            }
            stream.end.clone().map(|error| Some(Err(error)))
        })
    }

    /// Takes the trailers, after the end of the body.
    pub fn poll_trailers(&self, cx: &Context<'_>) -> Poll<Result<Option<Received<Fields>>, Error>> {
        self.0.poll(cx, |stream| {
            if stream.receiving == Receiving::Ended {
                return Some(Ok(stream.trailers.take()));
            }
            stream.end.clone().map(Err)
        })
    }

    /// Whether nothing is left of body and trailers.
    pub fn is_end_stream(&self) -> bool {
        self.0.with(|connection, key| {
            let stream = connection.stream(key);
            let is_empty = stream.body.is_empty() && stream.trailers.is_none();
            is_empty && stream.receiving == Receiving::Ended
        })
    }

    /// The number of bytes that have arrived and were not taken.
    pub fn buffered(&self) -> usize {
        self.0
            .with(|connection, key| connection.stream(key).body.len())
    }

    /// The task wakes when something arrives. Fails if the message has ended early.
    pub fn wait(&self, cx: &Context<'_>) -> Result<(), Error> {
        self.0.with(|connection, key| {
            let stream = connection.stream(key);
            stream.wait(cx);
            let is_cut = stream.receiving != Receiving::Ended;
            stream.end.clone().filter(|_| is_cut).map_or(Ok(()), Err)
        })
    }

    /// Lets the peer send as many bytes as were taken.
    pub fn release(&self, length: usize) {
        self.0
            .with(|connection, key| connection.release(key, length));
    }
}
