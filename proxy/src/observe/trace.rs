//! Spans of requests, from their start to the queue of a worker, whose exporter sends them
//! (`serve/trace.rs`). Names and attributes are those of OpenTelemetry's semantic conventions 1.45.0.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_proto::otlp::any_value::Value;
use diy_mesh_proto::otlp::span::SpanKind;
use diy_mesh_proto::otlp::status::StatusCode;
use diy_mesh_proto::otlp::{AnyValue, KeyValue, Span, Status};
use diy_mesh_proto::telemetry::Tracing;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;

use crate::http::trace_context::SpanContext;

/// New spans of a proxy in a second.
const MAX_SPANS_PER_SECOND: u64 = 100;
/// Spans of a worker that wait.
const MAX_QUEUED: usize = 2048;
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
}

impl SpanBudget {
    /// No span yet.
    pub fn new(dropped: Counter, now: Instant) -> Self {
        Self {
            dropped,
            began: now,
            used: AtomicU64::new(0),
        }
    }

    /// Takes a span of the second. Counts one that is not left.
    fn take(&self, now: Instant) -> bool {
        let second = now.saturating_duration_since(self.began).as_secs() << 32;
        let taken = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                let used = used.max(second);
                let count = used & u64::from(u32::MAX);
                (count < MAX_SPANS_PER_SECOND).then_some(used + 1)
            });
        if taken.is_err() {
            self.dropped.inc();
        }
        taken.is_ok()
    }
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
            (Some(decision), Some(ratio)) if is_trusted => decision && ratio.includes(&trace),
            _ => tracing.sampling.includes(&trace),
        };
        if !is_sampled || !budget.take(now) {
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
    spans: RefCell<VecDeque<Span>>,
    added: Notify,
}

impl SpanQueue {
    /// Adds a span. Counts one without room.
    pub fn add(&self, span: Span, budget: &SpanBudget) {
        let mut spans = self.spans.borrow_mut();
        if spans.len() >= MAX_QUEUED {
            budget.dropped.inc();
            return;
        }
        spans.push_back(span);
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
        spans.drain(..count).collect()
    }
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
    fn spans_of_a_second_are_bounded_and_the_others_are_counted() {
        let now = Instant::now();
        let budget = SpanBudget::new(Counter::default(), now);
        let taken = |now| (0..150).filter(|_| budget.take(now)).count();
        assert_eq!(taken(now), 100);
        assert_eq!(taken(now + Duration::from_millis(999)), 0);
        assert_eq!(taken(now + Duration::from_secs(1)), 100);
        assert_eq!(taken(now), 0, "a thread that is late");
        assert_eq!(budget.dropped.get(), 50 + 150 + 50 + 150);
    }

    fn span() -> Span {
        Span::default()
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_full_or_have_waited_and_the_queue_is_bounded() {
        let budget = SpanBudget::new(Counter::default(), Instant::now());
        let queue = SpanQueue::default();
        let began = tokio::time::Instant::now();
        queue.add(span(), &budget);
        assert_eq!(queue.next().await.len(), 1);
        assert_eq!(began.elapsed(), BATCH_INTERVAL);
        (0..3000).for_each(|_| queue.add(span(), &budget));
        assert_eq!(budget.dropped.get(), 3000 - MAX_QUEUED as u64);
        for _ in 0..4 {
            assert_eq!(queue.next().await.len(), MAX_BATCH);
        }
        assert_eq!(began.elapsed(), BATCH_INTERVAL);
        assert!(queue.take().is_empty());
    }
}
