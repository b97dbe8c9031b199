//! Spans of requests, from their start to the queue of a worker, whose exporter sends them
//! (`serve/trace.rs`). Names and attributes follow OpenTelemetry's semantic conventions 1.45.0.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_proto::otlp::any_value::Value;
use diy_mesh_proto::otlp::span::SpanKind;
use diy_mesh_proto::otlp::status::StatusCode;
use diy_mesh_proto::otlp::{AnyValue, KeyValue, Span, Status};
use diy_mesh_proto::telemetry::Tracing;
use prometheus_client::metrics::counter::Counter;
use prost::Message;
use tokio::sync::Notify;

use crate::http::trace_context::SpanContext;
use crate::limits::memory::{Charge, ConnectionSlot, Holder};

/// New spans of a proxy in a second.
const MAX_SPANS_PER_SECOND: u64 = 100;
/// The part of these spans for clients that have not authenticated.
const MAX_UNTRUSTED_PER_SECOND: u64 = 50;
/// Spans of a worker that wait, and their bytes.
const MAX_QUEUED: usize = 2048;
const MAX_QUEUED_BYTES: usize = 1024 * 1024;
/// The memory of a span and of an attribute, besides their texts.
const SPAN_BYTES: usize = 512;
const ATTRIBUTE_BYTES: usize = 128;
/// Spans that are sent together, and their bytes.
const MAX_BATCH: usize = 512;
const MAX_BATCH_BYTES: usize = 256 * 1024;
/// The time after which fewer are sent.
const BATCH_INTERVAL: Duration = Duration::from_secs(5);
/// The path of exports.
pub const EXPORT_PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// The flags of spans: sampled (W3C), and it is known that the parent is of another process.
const FLAGS: u32 = 0x301;

/// The spans of the proxy, which all workers count.
#[derive(Debug)]
pub struct SpanBudget {
    /// Spans that were not recorded or not sent.
    pub dropped: Counter,
    began: Instant,
    /// A second since then, and its spans.
    used: AtomicU64,
    /// The same for spans of clients that have not authenticated.
    untrusted: AtomicU64,
}

impl SpanBudget {
    /// No span yet.
    pub fn new(dropped: Counter, now: Instant) -> Self {
        Self {
            dropped,
            began: now,
            used: AtomicU64::new(0),
            untrusted: AtomicU64::new(0),
        }
    }

    /// Takes a span of the second. Counts one that is not left.
    fn take(&self, is_trusted: bool, now: Instant) -> bool {
        let second = now.saturating_duration_since(self.began).as_secs();
        let is_left = is_trusted || take(&self.untrusted, second, MAX_UNTRUSTED_PER_SECOND);
        let is_taken = is_left && take(&self.used, second, MAX_SPANS_PER_SECOND);
        if !is_taken {
            self.dropped.inc();
        }
        is_taken
    }
}

/// Counts one of a second, unless there are `max`.
fn take(used: &AtomicU64, second: u64, max: u64) -> bool {
    let taken = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
        let used = used.max(second << 32);
        let count = used & u64::from(u32::MAX);
        (count < max).then_some(used + 1)
    });
    taken.is_ok()
}

/// The span of a request that is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// The span.
    pub own: SpanContext,
    /// Its parent.
    pub parent: Option<SpanContext>,
}

impl Started {
    /// The span of a request, if it is sampled and the budget has one left. `is_trusted`: its client has
    /// authenticated.
    pub fn new(
        tracing: &Tracing,
        parent: Option<SpanContext>,
        is_trusted: bool,
        rng: &mut fastrand::Rng,
        budget: &SpanBudget,
        now: Instant,
    ) -> Option<Self> {
        let trace = parent.map_or_else(|| rng.u128(1..).to_be_bytes(), |parent| parent.trace);
        let decision = parent.and_then(|parent| parent.sampled);
        let is_sampled = match (decision, tracing.parent_sampling) {
            // A client could choose the trace.
            _ if !is_trusted => tracing.sampling.includes(&rng.u128(..).to_be_bytes()),
            (Some(decision), Some(ratio)) => decision && ratio.includes(&trace),
            _ => tracing.sampling.includes(&trace),
        };
        if !is_sampled || !budget.take(is_trusted, now) {
            return None;
        }
        let own = SpanContext {
            trace,
            span: rng.u64(1..).to_be_bytes(),
            sampled: Some(true),
        };
        Some(Self { own, parent })
    }

    /// The message.
    pub fn finish(
        &self,
        name: String,
        kind: SpanKind,
        attributes: Vec<KeyValue>,
        is_error: bool,
        duration: Duration,
    ) -> Span {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let end = now.unwrap_or_default();
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let parent = self.parent.map(|parent| parent.span.to_vec());
        let code = StatusCode::Error.into();
        Span {
            trace_id: self.own.trace.to_vec(),
            span_id: self.own.span.to_vec(),
            parent_span_id: parent.unwrap_or_default(),
            name,
            kind: kind.into(),
            start_time_unix_nano: nanos(end.saturating_sub(duration)),
            end_time_unix_nano: nanos(end),
            attributes,
            status: is_error.then_some(Status { code }),
            flags: FLAGS,
        }
    }
}

/// An attribute with a text.
pub fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

/// An attribute with a number.
pub fn number(key: &str, value: impl Into<i64>) -> KeyValue {
    attribute(key, Value::IntValue(value.into()))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
    }
}

/// The memory of a span with this name and these attributes.
pub fn size(name: &str, attributes: &[KeyValue]) -> usize {
    let attribute = |one: &KeyValue| one.encoded_len() + ATTRIBUTE_BYTES;
    SPAN_BYTES + name.len() + attributes.iter().map(attribute).sum::<usize>()
}

/// The spans of a worker that wait for the exporter. Each is charged to its client.
#[derive(Debug, Default)]
pub struct SpanQueue {
    spans: RefCell<VecDeque<Queued>>,
    bytes: Cell<usize>,
    added: Notify,
    ended: Arc<Ended>,
}

/// A span that waits.
#[derive(Debug)]
struct Queued {
    /// The client, after its groups.
    holders: Vec<Holder>,
    memory: Charge,
    span: Span,
}

/// Notified when a client of spans that wait has to give way.
#[derive(Debug, Default)]
struct Ended(Notify);

impl Wake for Ended {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

impl SpanQueue {
    /// Adds a span of a client with a connection. If the client has no memory left, the span is
    /// dropped. If the queue is full, the group with most bytes loses a span: the oldest one of its
    /// client with most bytes. Both are counted.
    pub fn add(&self, span: Span, client: Holder, slot: &ConnectionSlot, budget: &SpanBudget) {
        let slot = slot.beside();
        slot.wake_on_end(Waker::from(self.ended.clone()));
        let mut memory = Charge::new(Rc::new(slot));
        if !memory.try_grow(size(&span.name, &span.attributes)) {
            budget.dropped.inc();
            return;
        }
        let mut spans = self.spans.borrow_mut();
        self.bytes.set(self.bytes.get() + memory.amount());
        spans.push_back(Queued {
            holders: client.path(),
            memory,
            span,
        });
        while spans.len() > MAX_QUEUED || self.bytes.get() > MAX_QUEUED_BYTES {
            let oldest = oldest_of_largest(&spans);
            self.release(spans.remove(oldest));
            budget.dropped.inc();
        }
        let is_first = spans.len() == 1;
        drop(spans);
        if is_first || self.is_full() {
            self.added.notify_one();
        }
    }

    /// The next batch. Waits until it is full, or its first span has waited.
    pub async fn next(&self) -> Vec<Span> {
        while self.spans.borrow().is_empty() {
            self.added.notified().await;
        }
        let full = async {
            while !self.is_full() {
                self.added.notified().await;
            }
        };
        // After that time, it has fewer.
        let _ = tokio::time::timeout(BATCH_INTERVAL, full).await;
        self.take()
    }

    fn is_full(&self) -> bool {
        self.spans.borrow().len() >= MAX_BATCH || self.bytes.get() >= MAX_BATCH_BYTES
    }

    /// The waiting spans, at most a batch.
    pub fn take(&self) -> Vec<Span> {
        let (mut spans, mut taken, mut bytes) = (self.spans.borrow_mut(), vec![], 0);
        while taken.len() < MAX_BATCH
            && bytes < MAX_BATCH_BYTES
            && let Some(first) = spans.pop_front()
        {
            bytes += first.memory.amount();
            taken.extend(self.release(Some(first)));
        }
        taken
    }

    /// Drops the spans of clients that have to give way, and counts them.
    pub async fn evict(&self, budget: &SpanBudget) {
        loop {
            self.ended.0.notified().await;
            self.spans.borrow_mut().retain(|queued| {
                let is_ended = queued.memory.slot().is_ended();
                if is_ended {
                    self.bytes.set(self.bytes.get() - queued.memory.amount());
                    budget.dropped.inc();
                }
                !is_ended
            });
        }
    }

    fn release(&self, queued: Option<Queued>) -> Option<Span> {
        let Queued { memory, span, .. } = queued?;
        self.bytes.set(self.bytes.get() - memory.amount());
        Some(span)
    }
}

/// The oldest span of the holder whose spans have most bytes, at each level.
fn oldest_of_largest(spans: &VecDeque<Queued>) -> usize {
    let mut candidates: Vec<usize> = (0..spans.len()).collect();
    for level in 0.. {
        // Each holder with the bytes of its spans, and its oldest one.
        let mut held: HashMap<&Holder, (usize, Reverse<usize>)> = HashMap::new();
        for at in &candidates {
            if let Some(holder) = spans[*at].holders.get(level) {
                held.entry(holder).or_insert((0, Reverse(*at))).0 += spans[*at].memory.amount();
            }
        }
        let Some((largest, _)) = held.into_iter().max_by_key(|(_, held)| *held) else {
            break;
        };
        candidates.retain(|at| spans[*at].holders.get(level) == Some(largest));
    }
    candidates.first().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1 as proto;
    use diy_mesh_proto::telemetry::Telemetry;
    use diy_mesh_runtime::admission::Admission;

    use super::*;

    fn tracing(numerator: u32, parents: Option<u32>) -> Tracing {
        let share = |numerator| proto::Share {
            numerator,
            denominator: 100,
        };
        let message = proto::Telemetry {
            tracing: Some(proto::Tracing {
                backend: "o11y/otel:4317".into(),
                sampling: Some(share(numerator)),
                parent_sampling: parents.map(share),
                ..proto::Tracing::default()
            }),
            ..proto::Telemetry::default()
        };
        Telemetry::compile(&message).unwrap().tracing.unwrap()
    }

    fn parent(sampled: Option<bool>) -> Option<SpanContext> {
        Some(SpanContext {
            trace: [7; 16],
            span: [8; 8],
            sampled,
        })
    }

    #[test]
    fn parents_of_authenticated_clients_decide_and_others_do_not() {
        let mut rng = fastrand::Rng::with_seed(7);
        let now = Instant::now();
        let budget = SpanBudget::new(Counter::default(), now);
        let mut start = |tracing: &Tracing, sampled: Option<bool>, is_trusted| {
            let parent = parent(sampled);
            let started = Started::new(tracing, parent, is_trusted, &mut rng, &budget, now);
            if let Some(started) = started {
                assert_eq!((started.own.trace, started.parent), ([7; 16], parent));
                assert_ne!(started.own.span, [8; 8]);
            }
            started.is_some()
        };
        let (none, all) = (tracing(0, Some(100)), tracing(100, Some(100)));
        assert!(start(&none, Some(true), true) && !start(&none, Some(true), false));
        assert!(!start(&all, Some(false), true) && start(&all, Some(false), false));
        assert!(start(&all, None, true) && !start(&none, None, true));
        let ignoring = tracing(100, None);
        assert!(start(&ignoring, Some(false), true));
        assert!(!start(&tracing(100, Some(0)), Some(true), true));
    }

    #[test]
    fn trace_of_an_unauthenticated_client_decides_nothing() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut now = Instant::now();
        let budget = SpanBudget::new(Counter::default(), now);
        let half = tracing(50, Some(100));
        for byte in [0, 1, 0xff] {
            let parent = SpanContext {
                trace: [byte; 16],
                span: [8; 8],
                sampled: Some(true),
            };
            let mut count = 0;
            for _ in 0..200 {
                now += Duration::from_secs(1);
                let parent = Some(parent);
                let started = Started::new(&half, parent, false, &mut rng, &budget, now);
                count += u32::from(started.is_some());
            }
            assert!((60..140).contains(&count), "{byte}: {count} of 200");
        }
    }

    #[test]
    fn unauthenticated_clients_take_half_of_the_spans_at_most() {
        let now = Instant::now();
        let budget = SpanBudget::new(Counter::default(), now);
        let taken = |is_trusted| (0..150).filter(|_| budget.take(is_trusted, now)).count();
        assert_eq!((taken(false), taken(true), taken(false)), (50, 50, 0));
    }

    #[test]
    fn spans_of_a_second_are_bounded_and_the_others_are_counted() {
        let now = Instant::now();
        let budget = SpanBudget::new(Counter::default(), now);
        let taken = |now| (0..150).filter(|_| budget.take(true, now)).count();
        assert_eq!(taken(now), 100);
        assert_eq!(taken(now + Duration::from_millis(999)), 0);
        assert_eq!(taken(now + Duration::from_secs(1)), 100);
        assert_eq!(taken(now), 0, "a thread that is late");
        assert_eq!(budget.dropped.get(), 50 + 150 + 50 + 150);
    }

    fn span() -> Span {
        Span::default()
    }

    /// A span of 40 kB.
    fn large(name: &str) -> Span {
        Span {
            name: name.to_owned(),
            attributes: vec![text("header", "x".repeat(40_000))],
            ..Span::default()
        }
    }

    fn address(last: u8) -> Holder {
        Holder::Plaintext([10, 0, 0, last].into())
    }

    /// A queue, and clients with so much memory.
    struct Clients {
        queue: SpanQueue,
        budget: SpanBudget,
        admission: Arc<Admission<Holder>>,
    }

    impl Clients {
        fn new(bytes: usize) -> Self {
            let admission = Admission::new(1000);
            admission.resize(1000, bytes);
            Self {
                queue: SpanQueue::default(),
                budget: SpanBudget::new(Counter::default(), Instant::now()),
                admission,
            }
        }

        /// Adds a span of a client whose connection ends.
        fn add(&self, span: Span, client: Holder) {
            let slot = self.admission.admit(&client.clone().path()).unwrap();
            self.queue.add(span, client, &slot, &self.budget);
        }

        fn dropped(&self) -> u64 {
            self.budget.dropped.get()
        }

        fn take_names(&self) -> Vec<String> {
            let batches = std::iter::repeat_with(|| self.queue.take());
            let spans = batches.take_while(|batch| !batch.is_empty()).flatten();
            spans.map(|span| span.name).collect()
        }
    }

    #[test]
    fn spans_of_one_group_of_clients_displace_none_of_others() {
        let clients = Clients::new(1 << 30);
        clients.add(large("app"), Holder::App);
        for last in 0..100 {
            clients.add(large(&format!("{last:02}")), address(last));
        }
        assert!(clients.queue.bytes.get() <= MAX_QUEUED_BYTES);
        let used = clients.admission.used_bytes(&[]);
        assert_eq!(used, clients.queue.bytes.get());
        let names = clients.take_names();
        assert_eq!((names.len(), &*names[0], &*names[1]), (25, "app", "76"));
        assert_eq!((clients.dropped(), clients.queue.bytes.get()), (76, 0));
        assert_eq!(clients.admission.used_bytes(&[]), 0);
    }

    #[test]
    fn spans_of_one_client_displace_none_of_others_of_the_same_group() {
        let clients = Clients::new(1 << 30);
        clients.add(large("other"), address(2));
        for _ in 0..100 {
            clients.add(large("flood"), address(1));
        }
        clients.add(large("later"), address(3));
        let names = clients.take_names();
        assert_eq!((&*names[0], &*names[names.len() - 1]), ("other", "later"));
    }

    #[test]
    fn client_without_a_share_of_the_memory_loses_its_own_spans() {
        let clients = Clients::new(1024 * 1024);
        clients.add(large("other"), address(2));
        for _ in 0..100 {
            clients.add(large("flood"), address(1));
        }
        // A quarter of the memory is for whoever is first.
        let used = clients.admission.used_bytes(&[]);
        assert!(used <= 1024 * 1024 / 4 + 41_000, "{used}");
        let dropped = clients.dropped();
        clients.add(large("later"), address(3));
        assert_eq!(clients.dropped(), dropped);
        let names = clients.take_names();
        let flood = names.iter().filter(|name| *name == "flood").count();
        assert_eq!((flood as u64 + dropped, names.len()), (100, flood + 2));
        assert!(flood < 10, "{flood}");
    }

    #[tokio::test]
    async fn spans_end_before_connections_when_the_memory_is_needed() {
        let clients = Clients::new(1024 * 1024);
        for _ in 0..5 {
            clients.add(large("span"), address(1));
        }
        let connection = Rc::new(clients.admission.admit(&address(1).path()).unwrap());
        connection.touch();
        let mut memory = Charge::new(connection.clone());
        memory.hold(1000).unwrap();
        clients.admission.resize(1000, 64 * 1024);
        let evicted = async {
            while clients.dropped() < 4 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = clients.queue.evict(&clients.budget) => {}
            () = evicted => {}
        }
        assert!(!connection.is_ended());
        let used = clients.admission.used_bytes(&[]);
        assert_eq!(used, clients.queue.bytes.get() + 1000);
        assert_eq!(clients.take_names(), ["span"]);
        assert_eq!(clients.admission.used_bytes(&[]), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_full_or_have_waited_and_the_queue_is_bounded() {
        let clients = Clients::new(1 << 30);
        let queue = &clients.queue;
        let began = tokio::time::Instant::now();
        clients.add(span(), Holder::App);
        assert_eq!(queue.next().await.len(), 1);
        assert_eq!(began.elapsed(), BATCH_INTERVAL);
        (0..3000).for_each(|_| clients.add(span(), Holder::App));
        assert_eq!(clients.dropped(), 3000 - MAX_QUEUED as u64);
        for _ in 0..4 {
            assert_eq!(queue.next().await.len(), MAX_BATCH);
        }
        assert!(queue.take().is_empty());
        for _ in 0..10 {
            clients.add(large("one"), Holder::App);
        }
        assert_eq!(queue.next().await.len(), 7, "256 KiB");
        assert_eq!(began.elapsed(), BATCH_INTERVAL);
    }
}
