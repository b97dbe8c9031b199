//! Requests that wait while an endpoint has all the connections or streams that it may have. Both
//! the queue and the wait are bounded: further requests are rejected.

use std::cell::Cell;
use std::net::SocketAddr;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::error::Failure;

/// The limits of one endpoint, for each worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// HTTP/1 connections with an exchange.
    pub http1_connections: usize,
    /// HTTP/2 connections. The peer limits the streams of each.
    pub http2_connections: usize,
    /// Requests that wait for one of them.
    pub waiting: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            http1_connections: 4096,
            http2_connections: 64,
            waiting: 1024,
        }
    }
}

/// The requests that wait for one endpoint.
#[derive(Debug)]
pub(super) struct Queue {
    limit: usize,
    waiting: Cell<usize>,
    released: Notify,
}

impl Queue {
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            waiting: Cell::new(0),
            released: Notify::new(),
        }
    }

    /// Waits until `take` succeeds. Fails at the deadline, or at once if the queue is full.
    pub async fn wait<T>(
        &self,
        endpoint: SocketAddr,
        deadline: Instant,
        take: impl Fn() -> Option<T>,
    ) -> Result<T, Failure> {
        if self.waiting.get() >= self.limit {
            return Err(Failure::UpstreamOverloaded(endpoint));
        }
        let _waiting = Waiting::new(&self.waiting);
        loop {
            if let Some(taken) = take() {
                return Ok(taken);
            }
            let released = timeout_at(deadline, self.released.notified()).await;
            released.map_err(|_| Failure::UpstreamOverloaded(endpoint))?;
        }
    }

    /// There may be something to take for the request that waits longest.
    pub fn release(&self) {
        if self.waiting.get() > 0 {
            self.released.notify_one();
        }
    }
}

/// Counts a waiting request until it is dropped.
struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a Cell<usize>) -> Self {
        waiting.set(waiting.get() + 1);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn address() -> SocketAddr {
        ([10, 0, 0, 1], 80).into()
    }

    #[tokio::test(start_paused = true)]
    async fn waits_in_order_until_the_deadline() {
        let (queue, free) = (Queue::new(8), Cell::new(0));
        let take = || (free.get() > 0).then(|| free.set(free.get() - 1));
        let order = std::cell::RefCell::new(Vec::new());
        let wait = async |name| {
            let deadline = Instant::now() + SECOND;
            let result = queue.wait(address(), deadline, take).await;
            order.borrow_mut().push((name, result.is_ok()));
        };
        let release = async {
            tokio::task::yield_now().await;
            for _ in 0..2 {
                free.set(free.get() + 1);
                queue.release();
                tokio::task::yield_now().await;
            }
        };
        tokio::join!(wait("first"), wait("second"), wait("third"), release);
        let expected = [("first", true), ("second", true), ("third", false)];
        assert_eq!(*order.borrow(), expected);
        assert_eq!(queue.waiting.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn full_queue_rejects_at_once() {
        let queue = Queue::new(2);
        let begun = Instant::now();
        let wait = async |seconds: u32| {
            let result = queue.wait(address(), begun + seconds * SECOND, || None::<()>);
            let failure = result.await.expect_err("nothing to take");
            (failure.code(), begun.elapsed())
        };
        let rejected = ("upstream-overloaded", Duration::ZERO);
        let (one, two, three) = tokio::join!(wait(1), wait(2), wait(3));
        assert_eq!((one.1, two.1, three), (SECOND, 2 * SECOND, rejected));
        // The queue has space again.
        assert_eq!(wait(3).await.1, 3 * SECOND);
    }
}
