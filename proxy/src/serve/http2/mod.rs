//! Steps 4 to 8 for HTTP/2 with prior knowledge, which includes gRPC. [`serve`] serves one client
//! connection. `exchange.rs` forwards each of its streams independently. `connect/http2.rs` manages
//! the connections to endpoints.
//!
//! The constants in this file, and `connect::http2::config`, limit the resources that one client
//! connection uses. A flood closes only the connection that it arrives on.

pub mod call;
mod exchange;
pub mod head;
mod relay;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use diy_mesh_http2::{Config, Connection, Error, ErrorCode, Role};
use diy_mesh_runtime::admission::Class;
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};

use crate::context::flow::Flow;
use crate::context::record::ConnectionRecord;
use crate::error::Failure;
use crate::limits::lifetime::{Expiry, drained_or};
use crate::limits::timeouts::{IdleTimer, TimeoutKind};
use crate::secure::io::Io;
use crate::upstream::connect;
use crate::upstream::connect::http2::{CONNECTION_COST, MAX_STREAMS, STREAM_WINDOW};
use crate::upstream::multiplexed::Multiplexed;

/// The number of streams per second that the client may reset above those that are completed. After
/// more of them, new streams wait.
const MAX_RESETS_PER_SECOND: u32 = 100;
/// The maximum number of bytes of control frames (PING, SETTINGS, PRIORITY and the like) in
/// [`CONTROL_INTERVAL`] without progress on a stream.
const MAX_CONTROL_BYTES: u64 = 256 * 1024;
/// The memory of a request and of its stream to the upstream, without their heads and bodies.
const STREAM_COST: usize = 4 * 1024;
/// The period in which [`MAX_CONTROL_BYTES`] count. Clients of quiet connections send PING frames
/// for days.
const CONTROL_INTERVAL: Duration = Duration::from_secs(15 * 60);

/// Serves a client's connection until either side ends it.
pub async fn serve(io: Io, flow: Rc<Flow>) {
    let (retires_at, expiry) = (
        io.lifetime().map(|lifetime| lifetime.retires_at),
        flow.worker.expiry(&io, flow.direction),
    );
    flow.slot.set(Class::Idle);
    let mut memory = flow.charge();
    if let Err(failure) = memory.begin(CONNECTION_COST) {
        ConnectionRecord::new(&flow).fail(&failure);
        return io.reset_on_drop();
    }
    let config = Config {
        enable_connect_protocol: flow.destination.supports_extended_connect.get(),
        ..connect::http2::config(Role::Server, STREAM_WINDOW)
    };
    let io = Multiplexed::new(io, memory, config);
    let timeouts = flow.worker.config.timeouts;
    let drain = flow.worker.drain.clone();
    let shared = Rc::new(Shared::new(flow.clone(), io.clone()));
    let mut retire = pin!(drained_or(&drain, retires_at));
    let mut client = ClientConnection {
        shared,
        bytes_at_progress: 0,
        control_since: Instant::now(),
        idle: IdleTimer::new(timeouts.http2_idle),
        settings: Some(Box::pin(sleep(timeouts.request_head))),
        draining: false,
        expiry,
    };
    let end = io.drive(|cx| client.poll(cx, retire.as_mut())).await;
    drop(client);
    match end {
        End::Closed => io.shut_down().await,
        End::Rejected => io.linger().await,
        End::Expired => io.reset_on_drop(),
        End::Overloaded(failure) => {
            ConnectionRecord::new(&flow).fail(&failure);
            io.reset_on_drop();
        }
    }
}

/// How a client connection ended.
enum End {
    Closed,
    /// The client violated the protocol. The proxy has sent GOAWAY.
    Rejected,
    /// It reached its maximum age.
    Expired,
    /// No memory is left for what the client does not read.
    Overloaded(Failure),
}

/// The server side of a client connection.
struct ClientConnection {
    shared: Rc<Shared>,
    /// The number of bytes of control frames at the last progress on a stream.
    bytes_at_progress: u64,
    /// The start of the period in which control frames count.
    control_since: Instant,
    idle: IdleTimer,
    /// The time for the client's SETTINGS, until they have arrived.
    settings: Option<Pin<Box<Sleep>>>,
    /// GOAWAY was sent: the client opens no new streams.
    draining: bool,
    expiry: Expiry,
}

impl ClientConnection {
    /// Ready when the connection has ended.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        retire: Pin<&mut impl Future<Output = ()>>,
    ) -> Poll<End> {
        if Pin::new(&mut self.expiry).poll(cx).is_ready() {
            return Poll::Ready(End::Expired);
        }
        if let Some(failure) = self.shared.io.overload() {
            return Poll::Ready(End::Overloaded(failure));
        }
        let slot = &self.shared.flow.slot;
        if !self.draining && (slot.is_asked_to_end() || retire.poll(cx).is_ready()) {
            self.draining = true;
            self.shared.io.with(Connection::drain);
        }
        let destination = &self.shared.flow.destination;
        let io = self.shared.io.clone();
        if destination.supports_extended_connect.get() {
            io.with(Connection::enable_connect_protocol);
        }
        if let Some(timer) = &mut self.settings {
            if io.is_settled() {
                self.settings = None;
            } else if timer.as_mut().poll(cx).is_ready() {
                self.shared.flow.count_timeout(TimeoutKind::RequestHead);
                return Poll::Ready(End::Closed);
            }
        }
        if let Some(error) = io.ended() {
            tracing::debug!(peer = %self.shared.flow.peer, "client connection ended: {error}");
            return Poll::Ready(match error {
                Error::Violation(_) => End::Rejected,
                _ => End::Closed,
            });
        }
        while let Some(opened) = io.streams().accept() {
            self.shared.record_progress();
            let stream = Stream::open(&self.shared);
            if let Err(failure) = exchange::start(opened, stream) {
                return Poll::Ready(End::Overloaded(failure));
            }
        }
        if self.is_flood() {
            io.with(|connection| connection.close(ErrorCode::ENHANCE_YOUR_CALM, &Error::Closed));
            return Poll::Ready(End::Rejected);
        }
        if io.with(|connection| connection.is_drained()) {
            return Poll::Ready(End::Closed);
        }
        io.open_streams(self.shared.open.get() as usize);
        let slot = &self.shared.flow.slot;
        if io.with(|connection| connection.has_streams()) || self.shared.places.are_taken(cx) {
            self.idle.touch();
            slot.touch();
        } else if self.shared.has_served.get() {
            slot.set(Class::BetweenExchanges);
        }
        // The timer runs while there are streams too: the end of the last one may wake nothing.
        if self.idle.poll(cx).is_ready() {
            self.shared.flow.count_timeout(TimeoutKind::Http2Idle);
            if self.draining {
                return Poll::Ready(End::Closed);
            }
            self.draining = true;
            self.idle.touch();
            io.with(Connection::drain);
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Whether the client floods the connection with control frames.
    fn is_flood(&mut self) -> bool {
        let bytes = self.shared.io.with(|connection| connection.control_bytes());
        if self.shared.progress.take() {
            self.bytes_at_progress = bytes;
        }
        if bytes - self.bytes_at_progress <= MAX_CONTROL_BYTES {
            return false;
        }
        if self.control_since.elapsed() >= CONTROL_INTERVAL {
            self.control_since = Instant::now();
            self.bytes_at_progress = bytes;
            return false;
        }
        tracing::info!(peer = %self.shared.flow.peer, "connection closed: control-frame flood");
        true
    }
}

impl Drop for ClientConnection {
    /// The streams end, also if the connection has to end at once.
    fn drop(&mut self) {
        self.shared.io.release();
    }
}

/// The state that a client connection shares with its streams.
struct Shared {
    flow: Rc<Flow>,
    io: Multiplexed,
    /// The number of open streams.
    open: Cell<u32>,
    /// A stream was opened.
    has_served: Cell<bool>,
    /// A stream was opened or polled since the last check for floods.
    progress: Cell<bool>,
    resets: Resets,
    places: Rc<Places>,
}

impl Shared {
    fn new(flow: Rc<Flow>, io: Multiplexed) -> Self {
        Self {
            flow,
            io,
            open: Cell::new(0),
            has_served: Cell::new(false),
            progress: Cell::new(false),
            resets: Resets::default(),
            places: Rc::default(),
        }
    }

    fn record_progress(&self) {
        self.progress.set(true);
    }

    /// A place for a request. Waits while all are taken, or the client has reset too many streams.
    async fn place(&self) -> Option<Place> {
        let is_free = self.resets.delay(Instant::now).is_zero();
        if let Some(place) = self.places.try_take().filter(|_| is_free) {
            return Some(place);
        }
        // Boxed: it is rare.
        Box::pin(async {
            let place = self.places.take().await;
            loop {
                match self.resets.delay(Instant::now) {
                    Duration::ZERO => return place,
                    delay => sleep(delay).await,
                }
            }
        })
        .await
    }
}

/// The places for requests of one client connection, [`MAX_STREAMS`]. The client cannot have more of
/// them with the application by resetting streams: those that the application has not read the reset
/// of have places too.
struct Places {
    free: Semaphore,
    /// The number of places that were taken while none was free.
    owed: Cell<usize>,
    /// Wakes the task of the connection.
    task: RefCell<Option<Waker>>,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            free: Semaphore::new(MAX_STREAMS as usize),
            owed: Cell::new(0),
            task: RefCell::default(),
        }
    }
}

impl Places {
    fn try_take(self: &Rc<Self>) -> Option<Place> {
        self.free.try_acquire().ok()?.forget();
        Some(Place(self.clone()))
    }

    async fn take(self: &Rc<Self>) -> Option<Place> {
        self.free.acquire().await.ok()?.forget();
        Some(Place(self.clone()))
    }

    fn are_all_free(&self) -> bool {
        self.free.available_permits() == MAX_STREAMS as usize
    }

    /// Whether a place is taken. Then the task wakes when all are free.
    fn are_taken(&self, cx: &Context<'_>) -> bool {
        let are_taken = !self.are_all_free();
        self.task.replace(are_taken.then(|| cx.waker().clone()));
        are_taken
    }
}

impl connect::http2::Places for Places {
    fn keep(self: Rc<Self>) -> Box<dyn Any> {
        if self.free.forget_permits(1) == 0 {
            self.owed.set(self.owed.get() + 1);
        }
        Box::new(Place(self))
    }
}

/// One of the [`Places`]. Released on drop.
struct Place(Rc<Places>);

impl Drop for Place {
    fn drop(&mut self) {
        let Self(places) = self;
        match places.owed.get() {
            0 => places.free.add_permits(1),
            owed => places.owed.set(owed - 1),
        }
        if places.are_all_free() {
            places.task.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// The streams that a client reset: calls that it cancelled, or whose deadlines passed. They close no
/// connection, because in an outage most calls end so. But each one costs the application more than
/// the client, so new streams wait until no more than [`MAX_RESETS_PER_SECOND`] count. Pure.
#[derive(Default)]
struct Resets {
    /// When no reset counts any more. `None`: without resets, no clock is read.
    over_at: Cell<Option<Instant>>,
}

impl Resets {
    /// The time in which one of them ceases to count.
    const INTERVAL: Duration = Duration::from_millis(1000 / MAX_RESETS_PER_SECOND as u64);

    /// The client reset a stream.
    fn record_reset(&self, now: Instant) {
        let over_at = self.over_at.get().map_or(now, |over_at| over_at.max(now));
        self.over_at.set(Some(over_at + Self::INTERVAL));
    }

    /// A stream ended with a response, which makes up for one that was reset.
    fn record_completed(&self) {
        let over_at = self.over_at.get();
        self.over_at
            .set(over_at.and_then(|over_at| over_at.checked_sub(Self::INTERVAL)));
    }

    /// How long new streams wait.
    fn delay(&self, now: impl Fn() -> Instant) -> Duration {
        self.over_at.get().map_or(Duration::ZERO, |over_at| {
            let allowed = now() + MAX_RESETS_PER_SECOND * Self::INTERVAL;
            over_at.saturating_duration_since(allowed)
        })
    }
}

/// An open stream. The connection counts it until it is dropped.
struct Stream(Rc<Shared>);

impl Stream {
    fn open(shared: &Rc<Shared>) -> Self {
        shared.open.set(shared.open.get() + 1);
        shared.has_served.set(true);
        Self(shared.clone())
    }

    fn clone_shared(&self) -> Rc<Shared> {
        self.0.clone()
    }
}

impl std::ops::Deref for Stream {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.open.set(self.open.get() - 1);
    }
}

#[cfg(test)]
mod resets_tests {
    use super::*;

    #[test]
    fn streams_that_were_reset_have_places_until_the_application_has_read_it() {
        let places: Rc<Places> = Rc::default();
        let take = || places.try_take();
        let running: Vec<_> = std::iter::from_fn(take).collect();
        assert_eq!(running.len(), MAX_STREAMS as usize);
        let keep = |_| connect::http2::Places::keep(places.clone());
        let mut reset: Vec<_> = (0..2 * MAX_STREAMS).map(keep).collect();
        drop(running);
        assert!(take().is_none(), "more were reset than there are places");
        reset.truncate(MAX_STREAMS as usize);
        assert!(take().is_none());
        reset.truncate(10);
        let free: Vec<_> = std::iter::from_fn(take).collect();
        assert_eq!(free.len(), MAX_STREAMS as usize - 10);
        drop((reset, free));
        assert!(places.are_all_free());
        let all: Vec<_> = std::iter::from_fn(take).collect();
        assert_eq!(all.len(), MAX_STREAMS as usize);
    }

    #[test]
    fn streams_wait_after_100_resets_a_second_that_no_response_makes_up_for() {
        let start = Instant::now();
        let resets = Resets::default();
        (0..100).for_each(|_| resets.record_reset(start));
        assert_eq!(resets.delay(|| start), Duration::ZERO);
        (0..50).for_each(|_| resets.record_reset(start));
        assert_eq!(resets.delay(|| start), Duration::from_millis(500));
        (0..20).for_each(|_| resets.record_completed());
        assert_eq!(resets.delay(|| start), Duration::from_millis(300));
        let later = start + Duration::from_millis(300);
        assert_eq!(resets.delay(|| later), Duration::ZERO);
        // Completed streams allow no more resets at once than a pause does.
        (0..1000).for_each(|_| resets.record_completed());
        (0..101).for_each(|_| resets.record_reset(later));
        assert_eq!(resets.delay(|| later), Duration::from_millis(10));
    }
}
