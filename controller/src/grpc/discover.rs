//! One Discover stream: subscriptions in, states of resources out; the trust roots first, and after
//! each change.
//!
//! Reads never wait for writes. Notifications of a slow client wait in its queue as names, and a
//! response is made from the latest state when the stream has capacity.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::{
    MAX_EDGES, MAX_EDGES_BYTES, MAX_EXCEPTIONS, MAX_EXCEPTIONS_BYTES, MAX_TRAFFIC_BYTES,
    MAX_UNKNOWN_KEYS,
};
use futures::{Stream, stream};
use prost::Message as _;
use proto::ResourceType;
use proto::discover_request::Action;
use proto::discover_response::Update as Response;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Status, Streaming};

use super::subscriptions::Subscriptions;
use super::told::Told;
use super::{Context, frames};
use crate::authority::{Trust, TrustReceiver};
use crate::edges::group;
use crate::index::Index;
use crate::index::position::Position;
use crate::metrics::{Metrics, Sent};
use crate::object::PodRef;
use crate::proxies::{ConnectedGuard, Watched};
use crate::publish::{Hub, Notifications, Resources};
use crate::quota::Charge;

/// Time until refused subscriptions are requested again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The length of versions and numbers in a proxy's status.
const MAX_TEXT_BYTES: usize = 128;
/// Time between two reports of unknown keys that are read. Proxies send them every 10 seconds.
const MIN_UNKNOWN_KEYS_INTERVAL: Duration = Duration::from_secs(5);

/// Reads requests until one is invalid. Does not return after a client that sends no more requests:
/// it may still read.
pub(super) async fn read(
    mut requests: Streaming<proto::DiscoverRequest>,
    subscriptions: &SharedSubscriptions,
    proxy: &ConnectedGuard,
    context: &Context,
) -> Result<Infallible, Status> {
    let metrics = &context.metrics;
    let (mut told, mut has_exceeded) = (Told::new(proxy, context), false);
    let mut next_unknown_keys = Instant::now();
    let mut published = subscriptions.lock().published();
    let refusals = subscriptions.lock().refusals();
    loop {
        let behind_until = subscriptions.lock().behind_until();
        let request = tokio::select! {
            request = requests.message() => request?,
            () = sleep(RETRY_INTERVAL), if subscriptions.lock().has_refused() => {
                subscriptions.lock().retry()?;
                continue;
            }
            () = told.expiry() => {
                told.expired();
                continue;
            }
            // A response may have refused subscriptions, too.
            () = refusals.notified() => continue,
            () = wait(&mut published, behind_until) => {
                let (count, has_caught_up) = subscriptions.lock().end_wait();
                metrics.behind(has_caught_up).inc_by(count as u64);
                continue;
            }
        };
        let Some(request) = request else {
            return std::future::pending().await;
        };
        match request.action {
            Some(Action::Subscribe(request)) => subscriptions.lock().subscribe(request)?,
            Some(Action::Unsubscribe(request)) => subscriptions.lock().unsubscribe(request)?,
            Some(Action::Status(status)) => {
                let now = context.authority.clock().now();
                let clock_skew = check_status(&status, now)?;
                told.status(&status, clock_skew, now);
                proxy.update(status, clock_skew);
            }
            Some(Action::Acknowledgement(request)) => {
                subscriptions.lock().acknowledge(&request);
                told.acknowledged(&request);
            }
            Some(Action::Exceptions(exceptions)) => {
                set_exceptions(&exceptions, &mut has_exceeded, proxy);
            }
            Some(Action::Edges(edges)) => {
                add_edges(edges, &mut has_exceeded, proxy, context);
            }
            Some(Action::UnknownKeys(keys)) => {
                report_unknown_keys(&keys, &mut next_unknown_keys, proxy, &context.hub);
            }
            Some(Action::Traffic(traffic)) => set_traffic(traffic, &mut has_exceeded, proxy),
            None => tracing::debug!("ignoring a request with an action of a later release"),
        }
    }
}

/// Waits for another position of this replica, at most until a time. Forever without one.
async fn wait(published: &mut watch::Receiver<Option<Arc<Position>>>, until: Option<Instant>) {
    match until {
        Some(until) => drop(timeout_at(until, published.changed()).await),
        None => std::future::pending().await,
    }
}

/// The responses of a stream, made when the client reads them, until it ends. A change of the
/// trust, a watch of the traffic and the end of the stream wake the subscriber.
pub(super) fn responses(
    subscriptions: SharedSubscriptions,
    mut trust: TrustReceiver,
    watched: Option<Watched>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = Result<Bytes, Status>> + Send + 'static {
    trust.mark_changed();
    let state = (subscriptions, trust, watched, metrics);
    stream::unfold(state, |mut state| async move {
        let (subscriptions, trust, watched, metrics) = &mut state;
        let response = loop {
            match next(subscriptions, trust, watched.as_mut(), metrics) {
                Some(response) => break response,
                None => subscriptions.notifications.wait().await,
            }
        };
        Some((response, state))
    })
}

fn next(
    subscriptions: &SharedSubscriptions,
    trust: &mut TrustReceiver,
    watched: Option<&mut Watched>,
    metrics: &Metrics,
) -> Option<Result<Bytes, Status>> {
    let mut subscriptions = subscriptions.lock();
    if let Some(status) = subscriptions.end.take() {
        return Some(Err(status));
    }
    // Roots first: without them, a proxy cannot verify endpoints. There are no further ones after
    // the end of the authority.
    if trust.has_changed().unwrap_or(false) {
        metrics.updates(Sent::Roots).inc();
        return Some(Ok(frames::encode(&roots(&trust.borrow_and_update()))));
    }
    if let Some(seconds) = watched.and_then(|watched| watched.next(Instant::now())) {
        return Some(Ok(frames::encode(&proto::DiscoverResponse {
            update: Some(Response::ReportTraffic(proto::ReportTraffic { seconds })),
            ..proto::DiscoverResponse::default()
        })));
    }
    let frame = subscriptions.next_frame(|kind| {
        metrics.updates(kind).inc();
    });
    frame.map(Ok)
}

/// The subscriptions of a stream, which its requests change and its responses read.
#[derive(Clone)]
pub(super) struct SharedSubscriptions {
    inner: Arc<Mutex<Subscriptions>>,
    notifications: Notifications,
}

impl SharedSubscriptions {
    pub(super) fn new(
        subscriber: Resources,
        pod: Option<PodRef>,
        charge: Charge,
        is_earlier: bool,
    ) -> SharedSubscriptions {
        let notifications = subscriber.notifications();
        let subscriptions = Subscriptions::new(subscriber, pod, charge, is_earlier);
        SharedSubscriptions {
            inner: Arc::new(Mutex::new(subscriptions)),
            notifications,
        }
    }

    /// Ends the responses.
    pub(super) fn end(&self, status: Status) {
        self.lock().end = Some(status);
        self.notifications.wake();
    }

    fn lock(&self) -> MutexGuard<'_, Subscriptions> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stores the exceptions of a proxy while it is connected. Too large ones count as none.
fn set_exceptions(exceptions: &proto::Exceptions, has_exceeded: &mut bool, proxy: &ConnectedGuard) {
    let size = (exceptions.exceptions.len(), exceptions.encoded_len());
    let max = (MAX_EXCEPTIONS, MAX_EXCEPTIONS_BYTES);
    let is_within = is_within("exceptions", size, max, has_exceeded, proxy);
    let stored = is_within.then(|| exceptions.encode_to_vec().into());
    proxy.change(|known| known.exceptions = stored.unwrap_or_default());
}

/// Stores the traffic of a proxy while it is connected. Too large messages count as none.
fn set_traffic(traffic: Vec<u8>, has_exceeded: &mut bool, proxy: &ConnectedGuard) {
    let (size, max) = ((1, traffic.len()), (1, MAX_TRAFFIC_BYTES));
    let is_within = is_within("reports of traffic", size, max, has_exceeded, proxy);
    let traffic = is_within.then(|| (traffic.into(), Instant::now()));
    proxy.change(|known| known.traffic = traffic);
}

/// Adds what a proxy reports about its own pod, which the token of the stream is bound to.
fn add_edges(
    mut edges: proto::Edges,
    has_exceeded: &mut bool,
    proxy: &ConnectedGuard,
    context: &Context,
) {
    let size = (edges.edges.len(), edges.encoded_len());
    if !is_within(
        "edges",
        size,
        (MAX_EDGES, MAX_EDGES_BYTES),
        has_exceeded,
        proxy,
    ) {
        edges = proto::Edges {
            incomplete: true,
            ..proto::Edges::default()
        };
    }
    let group = proxy.pod().and_then(|pod| {
        let read = |index: &Index| index.meshed_pod(&pod).map(group);
        context.hub.read(read)
    });
    if let Some(group) = group {
        context
            .edges
            .report(group, edges, context.authority.clock().now());
    }
}

/// Has keys fetched again that a proxy lacks, if it is time for a report.
fn report_unknown_keys(
    keys: &proto::UnknownKeys,
    next: &mut Instant,
    proxy: &ConnectedGuard,
    hub: &Hub,
) {
    let now = Instant::now();
    if let Some(pod) = proxy.pod().filter(|_| *next <= now) {
        *next = now + MIN_UNKNOWN_KEYS_INTERVAL;
        let count = keys.issuers.len().min(MAX_UNKNOWN_KEYS);
        hub.report_unknown_keys(&pod, &keys.issuers[..count], now);
    }
}

/// Whether the number of items in a message, and their bytes, are within a maximum. If not, that is
/// logged once for a stream.
fn is_within(
    items: &str,
    (count, bytes): (usize, usize),
    (max_count, max_bytes): (usize, usize),
    has_exceeded: &mut bool,
    proxy: &ConnectedGuard,
) -> bool {
    let is_within = count <= max_count && bytes <= max_bytes;
    if !is_within && !std::mem::replace(has_exceeded, true) {
        tracing::warn!(
            "{proxy}: ignoring {count} {items} of {bytes} bytes, expected at most {max_count} of \
             {max_bytes} bytes"
        );
    }
    is_within
}

/// Checks the status of a proxy. Its texts stay in memory while the proxy is connected, so their
/// length is limited. Returns how far its clock is ahead, in milliseconds.
fn check_status(status: &proto::ProxyStatus, now: SystemTime) -> Result<i64, Status> {
    let texts = [
        &status.roots_version,
        &status.certificate_serial,
        &status.certificate_issuer,
        &status.proxy_version,
    ];
    if texts.iter().any(|text| text.len() > MAX_TEXT_BYTES) {
        return Err(Status::invalid_argument(format!(
            "status: a text is longer than {MAX_TEXT_BYTES} bytes"
        )));
    }
    let now = now
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
        });
    Ok(status.clock.saturating_sub(now))
}

fn roots(trust: &Trust) -> proto::DiscoverResponse {
    let roots = proto::Roots {
        pem: trust.roots.pem.clone().into(),
        issuer: trust.issuer.id().to_owned(),
        renew_within_seconds: u32::try_from(trust.renew_within.as_secs()).unwrap_or(u32::MAX),
    };
    proto::DiscoverResponse {
        version: trust.roots.version.clone(),
        update: Some(Response::Roots(roots)),
        r#type: ResourceType::Roots.into(),
        ..proto::DiscoverResponse::default()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use futures::{FutureExt, StreamExt};
    use prost::Message;

    use super::*;
    use crate::authority::{Roots, self_signed};
    use crate::issuer::Issuer;
    use crate::status::testing::subscriber;
    use diy_mesh_testkit::output::Output;

    fn subscribe(destination: SocketAddr, known_version: &str) -> proto::Subscribe {
        proto::Subscribe {
            name: destination.to_string(),
            known_version: known_version.to_owned(),
            ..proto::Subscribe::default()
        }
    }

    #[tokio::test]
    async fn responses_are_the_roots_the_updates_and_the_status_of_the_end() {
        let now = SystemTime::now();
        let (ca, key) = self_signed("cluster.local", now, Duration::from_secs(3600)).unwrap();
        let (authority, trust) = watch::channel(Arc::new(Trust {
            issuer: Issuer::from_pem(&ca, &key, now).unwrap().into(),
            roots: Roots::from_pem(&ca).unwrap().into(),
            renew_within: Duration::ZERO,
        }));
        let hub = Hub::default();
        let charge = crate::quota::Quotas::default().connect("", "");
        let subscriptions =
            SharedSubscriptions::new(hub.watch_resources(None), None, charge, false);
        let destination = "10.0.0.1:80".parse().unwrap();
        let request = subscribe(destination, "");
        subscriptions.lock().subscribe(request).unwrap();
        let metrics = Arc::new(Metrics::new(|_| Ok(())));
        let responses = responses(subscriptions.clone(), trust, None, metrics.clone());
        let mut responses = std::pin::pin!(responses);
        for kind in ["roots", "unknown"] {
            let response = responses.next().await.unwrap().unwrap();
            let response = proto::DiscoverResponse::decode(&response[5..]).unwrap();
            let text = format!("{:?}", response.update.unwrap()).to_lowercase();
            assert!(text.starts_with(kind), "{text}");
        }
        let sent = |kind| metrics.updates(kind).get();
        assert_eq!((sent(Sent::Roots), sent(Sent::Unknown)), (1, 1));
        let newer = authority.borrow().clone();
        assert!(responses.next().now_or_never().is_none());
        authority.send_replace(newer);
        hub.wake_clients();
        assert!(responses.next().await.unwrap().is_ok());
        assert_eq!(sent(Sent::Roots), 2);
        subscriptions.end(Status::new(tonic::Code::Ok, ""));
        let status = responses.next().await.unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::Ok);
    }

    #[test]
    fn exceptions_of_a_hostile_proxy_are_ignored_and_logged_once() {
        let log = Output::default();
        let caller = crate::authenticate::Caller {
            user: "system:serviceaccount:shop:web".into(),
            pod: None,
        };
        let proxies = crate::proxies::Proxies::default();
        let proxy = proxies.connect(&caller, SystemTime::now());
        let stored = || {
            let proxy = proxies.snapshot().remove(0);
            let workload = crate::authority::status::workload(&proxy, "cluster.local", None);
            workload.exceptions.map(|stored| stored.exceptions.len())
        };
        let of = |count, destination: String| proto::Exceptions {
            exceptions: vec![
                proto::exceptions::Exception {
                    destination,
                    ..Default::default()
                };
                count
            ],
            omitted: 0,
        };
        let mut has_exceeded = false;
        let mut set = |exceptions| set_exceptions(&exceptions, &mut has_exceeded, &proxy);
        tracing::subscriber::with_default(subscriber(&log), || {
            set(of(2, "shop/cart:80".into()));
            assert_eq!(stored(), Some(2));
            for hostile in [of(1, "x".repeat(100_000)), of(65, String::new())] {
                set(of(1, "shop/cart:80".into()));
                set(hostile);
                assert_eq!(stored(), None);
            }
            set(of(MAX_EXCEPTIONS, String::new()));
            assert_eq!(stored(), Some(MAX_EXCEPTIONS));
            set(of(0, String::new()));
            assert_eq!(stored(), None);
        });
        let text = log.text();
        assert_eq!(text.matches("ignoring 1 exceptions of 1000").count(), 1);
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}
