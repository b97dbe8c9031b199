//! Requests by the OpenTelemetry semantic conventions: how many, and how long they took. Each
//! connection keeps the sets of its latest request, so that an equal one takes no lock. Opaque
//! connections by their peers, for reports of traffic.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use diy_mesh_model::exchange::Direction;
use diy_mesh_proto::traffic::{DURATION_BOUNDS, Flow, Traffic};
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::series::{Labels, Series, Set};
use super::{MAX_CONNECTION_SETS, MAX_DURATION_SETS, MAX_REQUEST_SETS};
use crate::labels::{ErrorType, OTHER, OTHER_VALUE, Peer, TlsKind};

/// By [`DurationLabels::kind`].
const DURATIONS: [&str; 4] = [
    "http_server_request_duration_seconds",
    "http_client_request_duration_seconds",
    "rpc_server_call_duration_seconds",
    "rpc_client_call_duration_seconds",
];

/// The labels of a request. Absent values are empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestLabels {
    /// The direction of its connection.
    pub direction: Direction,
    /// The rule that it matched. `None` without a rule: all workers would count the references of an
    /// empty text.
    pub route: Option<Arc<str>>,
    /// The caller or the Service.
    pub peer: Peer,
    /// One of the known methods.
    pub method: &'static str,
    /// 0: none. Less than 100: the class.
    pub status: u16,
    /// The name of the gRPC status.
    pub grpc: &'static str,
    /// Why it failed.
    pub error: ErrorType,
    /// The TLS of the connection to the peer.
    pub tls: TlsKind,
}

/// The labels of a duration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DurationLabels {
    kind: usize,
    route: Option<Arc<str>>,
    peer: Peer,
}

/// All requests of the proxy.
#[derive(Debug)]
pub struct Requests {
    start: Instant,
    counts: Series<RequestLabels, AtomicU64>,
    durations: Series<DurationLabels, Histogram>,
    connections: Series<ConnectionLabels, Connections>,
}

/// The labels of an opaque connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionLabels {
    /// The direction.
    pub direction: Direction,
    /// The caller or the Service.
    pub peer: Peer,
}

/// Opaque connections with the same labels.
#[derive(Debug, Default)]
struct Connections {
    /// All, and those that are open: without and with mutual TLS.
    all: [AtomicU64; 2],
    open: [AtomicU64; 2],
    /// Bytes that clients sent, and that they received.
    bytes: [AtomicU64; 2],
}

/// An open opaque connection, until it is dropped.
#[derive(Debug)]
pub struct OpenConnection {
    set: Arc<Set<Connections>>,
    is_mutual: bool,
    /// The bytes that are counted.
    bytes: [u64; 2],
}

/// The counters that a connection keeps for its requests.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    caller: OnceCell<Peer>,
    latest: RefCell<Option<Latest>>,
}

#[derive(Clone, Debug)]
struct Latest {
    labels: RequestLabels,
    count: Arc<Set<AtomicU64>>,
    duration: Arc<Set<Histogram>>,
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; DURATION_BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Counted {
    /// The caller, which all requests of the connection share.
    pub fn caller(&self, find: impl FnOnce() -> Peer) -> Peer {
        self.caller.get_or_init(find).clone()
    }
}

impl Requests {
    /// No requests yet.
    pub fn new(start: Instant) -> Self {
        Self {
            start,
            counts: Series::new(MAX_REQUEST_SETS, start),
            durations: Series::new(MAX_DURATION_SETS, start),
            connections: Series::new(MAX_CONNECTION_SETS, start),
        }
    }

    /// Counts an opaque connection that began now.
    pub fn connect(&self, labels: &ConnectionLabels, tls: TlsKind, now: Instant) -> OpenConnection {
        let set = self.connections.get(labels, now);
        let is_mutual = tls == TlsKind::Mutual;
        let counts = self.connections.used(&set, now);
        for counts in [&counts.all, &counts.open] {
            counts[usize::from(is_mutual)].fetch_add(1, Relaxed);
        }
        OpenConnection {
            set,
            is_mutual,
            bytes: [0, 0],
        }
    }

    /// Counts a request that ended now, of a connection that keeps `counted`.
    pub fn count(&self, counted: &Counted, labels: RequestLabels, took: Duration, now: Instant) {
        let mut latest = counted.latest.borrow_mut();
        let same = latest.take();
        let same = same.filter(|latest| latest.labels.is_identical(&labels));
        let sets = latest.insert(same.unwrap_or_else(|| Latest {
            count: self.counts.get(&labels, now),
            duration: self.durations.get(&labels.duration(), now),
            labels,
        }));
        self.counts.used(&sets.count, now).fetch_add(1, Relaxed);
        self.durations.used(&sets.duration, now).observe(took);
    }

    /// The totals since the start, as they are now.
    pub fn traffic(&self, now: Instant) -> Traffic {
        let mut flows = BTreeMap::<_, Flow>::new();
        for (labels, set) in self.counts.all() {
            let count = set.value().load(Relaxed);
            let (is_failure, tls) = (labels.error.is_failure(labels.grpc), labels.tls);
            let key = (labels.direction as usize, labels.route, labels.peer);
            let flow = flows.entry(key).or_default();
            flow.requests += count;
            flow.failures += count * u64::from(is_failure);
            flow.mutual_tls += count * u64::from(tls == TlsKind::Mutual);
        }
        for (labels, set) in self.durations.all() {
            let key = (labels.kind % 2, labels.route, labels.peer);
            if let Some(flow) = flows.get_mut(&key) {
                set.value().add_to(&mut flow.durations);
            }
        }
        for (labels, set) in self.connections.all() {
            let key = (labels.direction as usize, None, labels.peer);
            set.value().add_to(flows.entry(key).or_default());
        }
        let since = now.saturating_duration_since(self.start).as_millis();
        Traffic {
            milliseconds: since.try_into().unwrap_or(u64::MAX),
            flows: flows.into_iter().map(named).collect(),
            incomplete: false,
        }
    }

    /// Writes the durations.
    pub fn encode_durations(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let all = self.durations.all();
        for (kind, name) in DURATIONS.into_iter().enumerate() {
            let direction = Direction::NAMES[kind % 2];
            let what = ["HTTP requests", "gRPC and gRPC-Web calls"][kind / 2];
            let help = format!(
                "Durations of {direction} {what}, from the first byte of the request to the last one of the response."
            );
            let mut family = encoder.encode_descriptor(name, &help, None, MetricType::Histogram)?;
            for (labels, set) in all.iter().filter(|(labels, _)| labels.kind == kind) {
                let (seconds, count, buckets) = set.value().read();
                let labels = peer_labels(labels.route.as_deref(), &labels.peer);
                let mut histogram = family.encode_family(&labels)?;
                histogram.encode_histogram::<NoLabelSet>(seconds, count, &buckets, None)?;
            }
        }
        Ok(())
    }

    /// Writes the counters.
    pub fn encode_counts(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Requests that ended, with or without a response.";
        let mut family = encoder.encode_descriptor("requests", help, None, MetricType::Counter)?;
        for (labels, set) in self.counts.all() {
            let [route, name, namespace] = peer_labels(labels.route.as_deref(), &labels.peer);
            let status = labels.status_text();
            let all = [
                ("direction", labels.direction.name()),
                route,
                name,
                namespace,
                ("http_request_method", labels.method),
                ("http_response_status_code", &status),
                ("rpc_response_status_code", labels.grpc),
                ("error_type", labels.error.value(&status, labels.grpc)),
                ("tls", labels.tls.name()),
            ];
            let count = set.value().load(Relaxed);
            let mut counter = family.encode_family(&all)?;
            counter.encode_counter::<NoLabelSet, u64, f64>(&count, None)?;
        }
        Ok(())
    }
}

fn named(((direction, route, peer), flow): ((usize, Option<Arc<str>>, Peer), Flow)) -> Flow {
    Flow {
        inbound: direction == Direction::Inbound as usize,
        route: route.as_deref().unwrap_or_default().to_owned(),
        peer_namespace: peer.namespace.to_string(),
        peer: peer.name.to_string(),
        ..flow
    }
}

fn peer_labels<'a>(route: Option<&'a str>, peer: &'a Peer) -> [(&'static str, &'a str); 3] {
    [
        ("http_route", route.unwrap_or_default()),
        ("service_peer_name", &peer.name),
        ("service_peer_namespace", &peer.namespace),
    ]
}

impl RequestLabels {
    /// Whether all texts are the same ones in memory, as they usually are for the requests of a
    /// connection. To compare them would take longer, most of all empty ones, which have no address.
    fn is_identical(&self, other: &Self) -> bool {
        let places = |labels: &Self| {
            let Self {
                direction,
                route,
                peer: Peer { name, namespace },
                method,
                status,
                grpc,
                error,
                tls,
            } = labels;
            (
                route.as_ref().map(Arc::as_ptr),
                [name, namespace].map(Arc::as_ptr),
                [*method, *grpc].map(ptr::from_ref),
                (*direction, *status, *error, *tls),
            )
        };
        places(self) == places(other)
    }

    fn duration(&self) -> DurationLabels {
        DurationLabels {
            kind: self.direction as usize + 2 * usize::from(!self.grpc.is_empty()),
            route: self.route.clone(),
            peer: self.peer.clone(),
        }
    }

    fn status_text(&self) -> String {
        match self.status {
            0 => String::new(),
            class @ 1..100 => format!("{class}xx"),
            status => status.to_string(),
        }
    }
}

/// The others have the class of a status, and tell failures from successes.
impl Labels for RequestLabels {
    fn namespace(&self) -> &str {
        &self.peer.namespace
    }

    fn other(&self) -> Self {
        let is_rpc = !self.grpc.is_empty();
        let class = (self.status / 100).min(5);
        Self {
            direction: self.direction,
            route: Some(OTHER.into()),
            peer: Peer::other(),
            method: OTHER_VALUE,
            // The status of a call is its gRPC status.
            status: if is_rpc { 0 } else { class },
            grpc: match self.grpc {
                "" | "OK" => self.grpc,
                _ => OTHER_VALUE,
            },
            error: match self.error {
                ErrorType::None => ErrorType::None,
                _ => ErrorType::Other,
            },
            tls: self.tls,
        }
    }
}

impl Labels for DurationLabels {
    fn namespace(&self) -> &str {
        &self.peer.namespace
    }

    fn other(&self) -> Self {
        Self {
            kind: self.kind,
            route: Some(OTHER.into()),
            peer: Peer::other(),
        }
    }
}

impl Labels for ConnectionLabels {
    fn namespace(&self) -> &str {
        &self.peer.namespace
    }

    fn other(&self) -> Self {
        Self {
            direction: self.direction,
            peer: Peer::other(),
        }
    }
}

impl Connections {
    fn add_to(&self, flow: &mut Flow) {
        let read = |counts: &[AtomicU64; 2]| counts.each_ref().map(|count| count.load(Relaxed));
        // A connection that is closed in the meantime counts as open, so that no number is wrong.
        let (open, all, bytes) = (read(&self.open), read(&self.all), read(&self.bytes));
        flow.connections += all[0] + all[1];
        flow.connections_mutual_tls += all[1];
        flow.open += open[0] + open[1];
        flow.open_mutual_tls += open[1];
        flow.bytes_sent += bytes[0];
        flow.bytes_received += bytes[1];
    }
}

impl OpenConnection {
    /// The client has sent and received so many bytes.
    pub fn copied(&mut self, bytes: [u64; 2]) {
        let counted = std::mem::replace(&mut self.bytes, bytes);
        let counts = &self.set.value().bytes;
        for ((count, now), before) in counts.iter().zip(bytes).zip(counted) {
            count.fetch_add(now.saturating_sub(before), Relaxed);
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let open = &self.set.value().open;
        open[usize::from(self.is_mutual)].fetch_sub(1, Relaxed);
    }
}

impl Histogram {
    fn observe(&self, took: Duration) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = DURATION_BOUNDS.partition_point(|bound| bound * 1000 < nanoseconds);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Relaxed);
    }

    /// Adds the number of each bucket. Requests and calls have a histogram each.
    fn add_to(&self, sums: &mut Vec<u64>) {
        sums.resize(self.buckets.len(), 0);
        for (sum, bucket) in sums.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Relaxed);
        }
    }

    /// The sum in seconds, the number, and the number of each bucket with its upper bound.
    fn read(&self) -> (f64, u64, [(f64, u64); DURATION_BOUNDS.len() + 1]) {
        let counts = self.buckets.each_ref().map(|bucket| bucket.load(Relaxed));
        let mut buckets = counts.map(|count| (f64::INFINITY, count));
        for (bucket, bound) in buckets.iter_mut().zip(DURATION_BOUNDS) {
            bucket.0 = bound as f64 / 1e6;
        }
        let seconds = self.nanoseconds.load(Relaxed) as f64 / 1e9;
        (seconds, counts.iter().sum(), buckets)
    }
}
