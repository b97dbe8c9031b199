//! Spans of requests, from their start to the queue of a worker, whose exporter sends them
//! (`serve/trace.rs`). Names and attributes are those of OpenTelemetry's semantic conventions 1.45.0.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
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
use crate::limits::memory::Holder;

/// New spans of a proxy in a second.
const MAX_SPANS_PER_SECOND: u64 = 100;
/// Of these, spans of clients that have not authenticated.
const MAX_UNTRUSTED_PER_SECOND: u64 = 50;
/// Spans of a worker that wait, and their bytes.
const MAX_QUEUED: usize = 2048;
const MAX_QUEUED_BYTES: usize = 1024 * 1024;
/// The memory of an attribute besides its text.
const ATTRIBUTE_BYTES: usize = 128;
/// Spans that are sent together.
pub const MAX_BATCH: usize = 512;
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
    /// The same for those of clients that have not authenticated.
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

/// The spans of a worker that wait for the exporter.
#[derive(Debug, Default)]
pub struct SpanQueue {
    spans: RefCell<VecDeque<Queued>>,
    bytes: Cell<usize>,
    added: Notify,
}

/// A span that waits.
#[derive(Debug)]
struct Queued {
    /// The group of its client.
    holder: Holder,
    bytes: usize,
    span: Span,
}

impl SpanQueue {
    /// Adds a span of a client. If there is no room, the oldest span of the group of clients that
    /// holds most gives way, and is counted.
    pub fn add(&self, span: Span, client: Holder, budget: &SpanBudget) {
        let bytes = span.encoded_len() + span.attributes.len() * ATTRIBUTE_BYTES;
        let mut spans = self.spans.borrow_mut();
        spans.push_back(Queued {
            holder: group(client),
            bytes,
            span,
        });
        self.bytes.set(self.bytes.get() + bytes);
        while spans.len() > MAX_QUEUED || self.bytes.get() > MAX_QUEUED_BYTES {
            let oldest = oldest_of_largest(&spans);
            let evicted = spans.remove(oldest);
            self.release(evicted.as_ref());
            budget.dropped.inc();
        }
        if spans.len() == 1 || spans.len() >= MAX_BATCH {
            self.added.notify_one();
        }
    }

    /// The next batch. Waits until it is full, or its first span has waited.
    pub async fn next(&self) -> Vec<Span> {
        self.wait_for(1).await;
        let full = self.wait_for(MAX_BATCH);
        // After that time, it has fewer.
        let _ = tokio::time::timeout(BATCH_INTERVAL, full).await;
        self.take()
    }

    async fn wait_for(&self, count: usize) {
        while self.spans.borrow().len() < count {
            self.added.notified().await;
        }
    }

    /// What waits, at most a batch.
    pub fn take(&self) -> Vec<Span> {
        let mut spans = self.spans.borrow_mut();
        let count = spans.len().min(MAX_BATCH);
        let taken = spans.drain(..count);
        let taken = taken.inspect(|queued| self.release(Some(queued)));
        taken.map(|queued| queued.span).collect()
    }

    fn release(&self, queued: Option<&Queued>) {
        let bytes = queued.map_or(0, |queued| queued.bytes);
        self.bytes.set(self.bytes.get().saturating_sub(bytes));
    }
}

/// The namespace of a client, or all clients without an identity, or the application.
fn group(client: Holder) -> Holder {
    let mut path = client.path();
    path.truncate(2);
    path.pop().unwrap_or(Holder::App)
}

/// The oldest span of the group whose spans have most bytes.
fn oldest_of_largest(spans: &VecDeque<Queued>) -> usize {
    // Each group with its oldest span and the bytes of all.
    let mut held: Vec<(&Holder, usize, usize)> = vec![];
    for (at, queued) in spans.iter().enumerate() {
        match held
            .iter_mut()
            .find(|(holder, ..)| **holder == queued.holder)
        {
            Some((.., bytes)) => *bytes += queued.bytes,
            None => held.push((&queued.holder, at, queued.bytes)),
        }
    }
    let largest = held.iter().max_by_key(|(.., bytes)| *bytes);
    largest.map_or(0, |(_, oldest, _)| *oldest)
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1 as proto;
    use diy_mesh_proto::telemetry::Telemetry;

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

    #[test]
    fn spans_of_one_group_of_clients_displace_none_of_others() {
        let budget = SpanBudget::new(Counter::default(), Instant::now());
        let queue = SpanQueue::default();
        let large = |name: &str| Span {
            name: name.to_owned(),
            attributes: vec![text("header", "x".repeat(40_000))],
            ..Span::default()
        };
        queue.add(large("app"), Holder::App, &budget);
        for last in 0..100 {
            let client = Holder::Plaintext([10, 0, 0, last].into());
            queue.add(large(&last.to_string()), client, &budget);
        }
        assert!(queue.bytes.get() <= MAX_QUEUED_BYTES);
        let names: Vec<_> = queue.take().into_iter().map(|span| span.name).collect();
        assert_eq!((names.len(), &*names[0], &*names[1]), (26, "app", "75"));
        assert_eq!((budget.dropped.get(), queue.bytes.get()), (75, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_full_or_have_waited_and_the_queue_is_bounded() {
        let budget = SpanBudget::new(Counter::default(), Instant::now());
        let queue = SpanQueue::default();
        let began = tokio::time::Instant::now();
        queue.add(span(), Holder::App, &budget);
        assert_eq!(queue.next().await.len(), 1);
        assert_eq!(began.elapsed(), BATCH_INTERVAL);
        (0..3000).for_each(|_| queue.add(span(), Holder::App, &budget));
        assert_eq!(budget.dropped.get(), 3000 - MAX_QUEUED as u64);
        for _ in 0..4 {
            assert_eq!(queue.next().await.len(), MAX_BATCH);
        }
        assert_eq!(began.elapsed(), BATCH_INTERVAL);
        assert!(queue.take().is_empty());
    }
}
