//! Connections to one endpoint that wait for their next request. A worker's own: nothing here is shared between threads. A closed
//! pool (the endpoint is gone) takes nothing back. It never dials.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use bytes::Bytes;
use h2::client::SendRequest;

use crate::io::Io;

/// Idle HTTP/1 connections that are kept per endpoint and worker.
const MAX_IDLE: usize = 256;

/// The connections to one endpoint.
#[derive(Default)]
pub struct Pool {
    /// In the order of their coming back: the last one is the warmest.
    http1: RefCell<Vec<Idle>>,
    http2: RefCell<Vec<SendRequest<Bytes>>>,
    closed: Cell<bool>,
}

struct Idle {
    io: Io,
    since: Instant,
}

impl Pool {
    /// The HTTP/1 connection that came back last and still stands. Dead ones on the way to it are dropped.
    pub fn checkout_http1(&self) -> Option<Io> {
        let mut idle = self.http1.borrow_mut();
        while let Some(Idle { io, .. }) = idle.pop() {
            if !io.is_stale() {
                return Some(io);
            }
        }
        None
    }

    /// Takes an HTTP/1 connection back whose response has ended. Full or closed, it drops it.
    pub fn checkin_http1(&self, io: Io, now: Instant) {
        let mut idle = self.http1.borrow_mut();
        if !self.closed.get() && idle.len() < MAX_IDLE {
            idle.push(Idle { io, since: now });
        }
    }

    /// An HTTP/2 connection; many share it, and it may turn out to be dead or full.
    pub fn http2(&self) -> Option<SendRequest<Bytes>> {
        self.http2.borrow().last().cloned()
    }

    /// Adds an HTTP/2 connection for others to share; no effect in a closed pool.
    pub fn put_http2(&self, connection: SendRequest<Bytes>) {
        if !self.closed.get() {
            self.http2.borrow_mut().push(connection);
        }
    }

    /// Keeps the HTTP/2 connections that `keep` says are worth it.
    pub fn retain_http2(&self, keep: impl FnMut(&mut SendRequest<Bytes>) -> bool) {
        self.http2.borrow_mut().retain_mut(keep);
    }

    /// Drops the HTTP/1 connections that came back before `older_than`, and those that died meanwhile.
    pub fn evict_idle(&self, older_than: Instant) {
        let mut idle = self.http1.borrow_mut();
        idle.retain(|connection| connection.since >= older_than && !connection.io.is_stale());
        if idle.len() < idle.capacity() / 4 {
            idle.shrink_to_fit();
        }
    }

    /// Drops all that is idle, and from now on what comes back. HTTP/2 streams under way end in peace.
    pub fn close(&self) {
        self.closed.set(true);
        self.http1.take();
        self.http2.take();
    }

    /// Whether [`Pool::close`] was called: the endpoint is gone.
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// How many HTTP/1 connections wait here.
    pub fn idle_http1(&self) -> usize {
        self.http1.borrow().len()
    }
}
