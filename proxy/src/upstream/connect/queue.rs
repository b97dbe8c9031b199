//! The limits of one endpoint: connections and requests in flight. Requests wait in order while a
//! limit is reached. Both the queue and the wait are bounded: further requests are rejected.

use crate::labels::LimitKind;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use diy_mesh_runtime::metrics::Active;
use tokio::time::{Instant, timeout_at};

use crate::error::Failure;
use crate::observe::metrics::UpstreamMetrics;

/// The limits of one endpoint. A limit of `u32::MAX` is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// HTTP/1 connections with an exchange.
    pub connections: u32,
    /// Opaque connections count as `connections`.
    pub opaque: bool,
    /// HTTP/2 connections. The peer limits the streams of each.
    pub http2_connections: u32,
    /// Requests in flight.
    pub requests: u32,
    /// Requests that wait for one of them.
    pub waiting: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            opaque: false,
            http2_connections: 64,
            requests: u32::MAX,
            waiting: 1024,
        }
    }
}

impl Limits {
    /// The equal share of one of the proxy's workers, one at least.
    pub fn of_worker(self, workers: u32) -> Self {
        let share = |limit: u32| match limit {
            u32::MAX => limit,
            limit => limit.div_ceil(workers.max(1)),
        };
        Self {
            connections: share(self.connections),
            opaque: self.opaque,
            http2_connections: share(self.http2_connections),
            requests: share(self.requests),
            waiting: share(self.waiting),
        }
    }
}

/// The use of the limits of one endpoint.
pub(super) struct Limiter {
    pub limits: Limits,
    connections: Cell<u32>,
    requests: Cell<u32>,
    /// By [`LimitKind`]. Most endpoints never reach a limit.
    queues: OnceCell<Box<[Queue; LimitKind::NAMES.len()]>>,
    pub metrics: Arc<UpstreamMetrics>,
}

impl Limiter {
    pub fn new(limits: Limits, metrics: Arc<UpstreamMetrics>) -> Rc<Self> {
        Rc::new(Self {
            limits,
            connections: Cell::new(0),
            requests: Cell::new(0),
            queues: OnceCell::new(),
            metrics,
        })
    }

    /// The number of HTTP/1 and opaque connections in use.
    pub fn connections(&self) -> u32 {
        self.connections.get()
    }

    /// Whether requests wait for a limit. Later ones must not overtake them.
    pub fn has_queue(&self, kind: LimitKind) -> bool {
        let queues = self.queues.get();
        queues.is_some_and(|queues| !queues[kind as usize].borrow().is_empty())
    }

    /// The number of requests that wait.
    pub fn waiting(&self) -> usize {
        let queues = self.queues.get().into_iter().flat_map(|all| all.iter());
        queues.map(|queue| queue.borrow().len()).sum()
    }

    /// Counts an open connection until the value is dropped, for the metric.
    pub fn count_connection(&self) -> Active {
        Active::new(&self.metrics.connections)
    }

    /// A slot of a connection or of a request. Waits while all are in use.
    pub async fn acquire(
        self: &Rc<Self>,
        kind: LimitKind,
        endpoint: SocketAddr,
        deadline: Instant,
    ) -> Result<Slot, Failure> {
        let free = if self.has_queue(kind) {
            None
        } else {
            self.try_acquire(kind)
        };
        match free {
            Some(slot) => Ok(slot),
            // Boxed: it is rare, and would enlarge the task of every connection.
            None => Box::pin(self.wait(kind, endpoint, deadline, || self.try_acquire(kind))).await,
        }
    }

    fn try_acquire(self: &Rc<Self>, kind: LimitKind) -> Option<Slot> {
        let (in_use, limit) = self.counter(kind)?;
        (in_use.get() < limit).then(|| {
            in_use.set(in_use.get() + 1);
            Slot(self.clone(), kind)
        })
    }

    /// The slots in use, and the limit. HTTP/2 connections are counted by their owner.
    fn counter(&self, kind: LimitKind) -> Option<(&Cell<u32>, u32)> {
        match kind {
            LimitKind::Connections => Some((&self.connections, self.limits.connections)),
            LimitKind::Requests => Some((&self.requests, self.limits.requests)),
            LimitKind::Http2Connections => None,
        }
    }

    /// Waits until `take` succeeds, after the requests that wait already. Fails at the deadline, or
    /// at once if the queue is full.
    pub async fn wait<T>(
        &self,
        kind: LimitKind,
        endpoint: SocketAddr,
        deadline: Instant,
        take: impl Fn() -> Option<T>,
    ) -> Result<T, Failure> {
        let reached = || {
            self.metrics.limited[kind as usize].inc();
            Failure::EndpointLimit {
                address: endpoint,
                limit: kind.setting(),
                policy: String::new(),
            }
        };
        if self.waiting() >= self.limits.waiting as usize {
            return Err(reached());
        }
        let queue = &self.queues.get_or_init(Box::default)[kind as usize];
        let place = Place::new(queue, &self.metrics);
        let taking = poll_fn(|cx| match place.is_first(cx).then(&take).flatten() {
            Some(taken) => Poll::Ready(taken),
            None => Poll::Pending,
        });
        timeout_at(deadline, taking).await.map_err(|_| reached())
    }

    /// There may be something to take for the request that waits longest.
    pub fn release(&self, kind: LimitKind) {
        if let Some(queues) = self.queues.get() {
            wake_first(&queues[kind as usize]);
        }
    }
}

/// One of the connections or requests that an endpoint may have. Released on drop.
pub struct Slot(Rc<Limiter>, LimitKind);

impl Slot {
    /// Whether opaque connections count.
    pub fn counts_opaque(&self) -> bool {
        self.0.limits.opaque
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Self(limiter, kind) = self;
        if let Some((in_use, _)) = limiter.counter(*kind) {
            in_use.set(in_use.get() - 1);
        }
        limiter.release(*kind);
    }
}

/// The requests that wait for one limit, in the order of their arrival.
type Queue = RefCell<BTreeMap<u64, Waker>>;

fn wake_first(queue: &Queue) {
    if let Some((_, first)) = queue.borrow().first_key_value() {
        first.wake_by_ref();
    }
}

/// The place of a waiting request in a queue, until it is dropped.
struct Place<'a> {
    queue: &'a Queue,
    number: u64,
    _counted: Active,
}

impl<'a> Place<'a> {
    fn new(queue: &'a Queue, metrics: &UpstreamMetrics) -> Self {
        let last = queue.borrow().last_key_value().map(|(last, _)| *last);
        let number = last.map_or(0, |last| last + 1);
        queue.borrow_mut().insert(number, Waker::noop().clone());
        Self {
            queue,
            number,
            _counted: Active::new(&metrics.waiting),
        }
    }

    /// Whether no earlier request waits. The task wakes when there may be something to take.
    fn is_first(&self, cx: &Context<'_>) -> bool {
        let mut queue = self.queue.borrow_mut();
        queue.insert(self.number, cx.waker().clone());
        queue.first_key_value().map(|(first, _)| *first) == Some(self.number)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queue.borrow_mut().remove(&self.number);
        wake_first(self.queue);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::LimitKind::{Connections, Http2Connections, Requests};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn address() -> SocketAddr {
        ([10, 0, 0, 1], 80).into()
    }

    fn limiter(limits: Limits) -> Rc<Limiter> {
        Limiter::new(limits, Arc::default())
    }

    #[tokio::test(start_paused = true)]
    async fn waits_in_order_until_the_deadline() {
        let limiter = limiter(Limits {
            connections: 2,
            waiting: 8,
            ..Limits::default()
        });
        let acquire = || limiter.acquire(Connections, address(), Instant::now() + SECOND);
        let held = [acquire().await.expect("one"), acquire().await.expect("two")];
        let order = std::cell::RefCell::new(Vec::new());
        let slots = std::cell::RefCell::new(Vec::new());
        let wait = async |name| {
            let slot = acquire().await;
            order.borrow_mut().push((name, slot.is_ok()));
            slots.borrow_mut().extend(slot);
        };
        let release = async {
            tokio::task::yield_now().await;
            assert_eq!(limiter.metrics.waiting.get(), 3);
            for slot in held {
                drop(slot);
                tokio::task::yield_now().await;
            }
        };
        tokio::join!(wait("first"), wait("second"), wait("third"), release);
        let expected = [("first", true), ("second", true), ("third", false)];
        assert_eq!(*order.borrow(), expected);
        assert_eq!((limiter.waiting(), limiter.metrics.waiting.get()), (0, 0));
        assert_eq!(limiter.metrics.limited[Connections as usize].get(), 1);
        slots.take();
        assert_eq!(limiter.connections(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn later_requests_do_not_overtake_a_waiting_one() {
        let limiter = limiter(Limits {
            connections: 1,
            waiting: 8,
            ..Limits::default()
        });
        let acquire = || limiter.acquire(Connections, address(), Instant::now() + 3 * SECOND);
        let begun = Instant::now();
        let mut held = acquire().await.expect("the first one");
        let waited = std::cell::OnceCell::new();
        let wait = async {
            drop(acquire().await.expect("a slot before the timeout"));
            waited.set(begun.elapsed()).expect("once");
        };
        let busy = async {
            while begun.elapsed() < 4 * SECOND {
                tokio::time::sleep(SECOND / 100).await;
                drop(held);
                held = acquire().await.expect("a slot");
            }
        };
        tokio::join!(wait, busy);
        assert_eq!(waited.get(), Some(&(SECOND / 100)));
    }

    #[tokio::test(start_paused = true)]
    async fn request_that_leaves_the_queue_makes_place_for_the_next_one() {
        let limiter = limiter(Limits {
            connections: 1,
            waiting: 8,
            ..Limits::default()
        });
        let acquire = |timeout| limiter.acquire(Connections, address(), Instant::now() + timeout);
        let held = acquire(SECOND).await.expect("the first one");
        let begun = Instant::now();
        let release = async {
            tokio::time::sleep(2 * SECOND).await;
            drop(held);
        };
        let next = async { (acquire(3 * SECOND).await.is_ok(), begun.elapsed()) };
        let (first, next, ()) = tokio::join!(acquire(SECOND), next, release);
        assert!(first.is_err());
        assert_eq!(next, (true, 2 * SECOND));
        assert!(!limiter.has_queue(Connections));
    }

    #[tokio::test(start_paused = true)]
    async fn full_queue_rejects_at_once() {
        let limiter = limiter(Limits {
            waiting: 2,
            ..Limits::default()
        });
        let begun = Instant::now();
        let wait = async |seconds: u32| {
            let deadline = begun + seconds * SECOND;
            let result = limiter.wait(Http2Connections, address(), deadline, || None::<()>);
            let failure = result.await.expect_err("nothing to take");
            (failure.code().label(), begun.elapsed())
        };
        let rejected = ("upstream-overloaded", Duration::ZERO);
        let (one, two, three) = tokio::join!(wait(1), wait(2), wait(3));
        assert_eq!((one.1, two.1, three), (SECOND, 2 * SECOND, rejected));
        // The queue has space again.
        assert_eq!(wait(3).await.1, 3 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn released_slot_reaches_a_request_that_waits_for_its_kind() {
        let limiter = limiter(Limits {
            connections: 1,
            requests: 1,
            ..Limits::default()
        });
        let acquire = |kind| limiter.acquire(kind, address(), Instant::now() + SECOND);
        let connection = acquire(Connections).await.expect("the first one");
        let _request = acquire(Requests).await.expect("the first one");
        let begun = Instant::now();
        let waiting = async { (acquire(Connections).await.is_ok(), begun.elapsed()) };
        let (request, waited, ()) = tokio::join!(acquire(Requests), waiting, async {
            tokio::task::yield_now().await;
            drop(connection);
        });
        assert_eq!(waited, (true, Duration::ZERO));
        assert!(request.is_err());
    }

    #[test]
    fn workers_share_the_limits() {
        let limits = Limits {
            connections: 10,
            opaque: true,
            http2_connections: 1,
            requests: u32::MAX,
            waiting: 0,
        };
        let shared = Limits {
            connections: 3,
            ..limits
        };
        assert_eq!(limits.of_worker(4), shared);
        assert_eq!(limits.of_worker(1), limits);
    }
}
