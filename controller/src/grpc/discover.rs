//! One Discover stream: subscriptions in, states of resources out; the trust roots first, and after
//! each change.
//!
//! Reads never wait for writes. Notifications of a slow client wait in its queue as names, and a
//! response is made from the latest state when the stream has capacity.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use diy_mesh_proto::mesh::v1 as proto;
use futures::{Stream, stream};
use proto::ResourceType;
use proto::discover_request::Action;
use proto::discover_response::Update as Response;
use tokio::sync::OwnedSemaphorePermit;
use tonic::{Status, Streaming};

use super::{frames, message};
use crate::authenticate::PodRef;
use crate::authority::{Trust, TrustReceiver};
use crate::hub::Resources;
use crate::index::object::{Key, Resource};
use crate::index::state::State;
use crate::index::version::Version;
use crate::metrics::Metrics;
use crate::proxies::{self, ConnectedGuard};
use crate::quota::Quota;

/// The length of a destination, the longest of which is an IPv6 address with a scope and a port,
/// and of a version.
const MAX_NAME_BYTES: usize = 64;
/// The length of versions and numbers in a proxy's status.
const MAX_TEXT_BYTES: usize = 128;
/// The length of a reason in the log.
const MAX_REASON_CHARS: usize = 256;
/// Endpoints in one message, about half a megabyte.
const MAX_CHUNK_ENDPOINTS: usize = 4_000;
/// Namespace, name and port of a Service.
const MAX_BACKEND_BYTES: usize = 63 + 1 + 63 + 1 + 5;

/// Reads requests until one is invalid. Does not return after a client that sends no more requests:
/// it may still read.
pub(super) async fn read(
    mut requests: Streaming<proto::DiscoverRequest>,
    subscriptions: &SharedSubscriptions,
    proxy: &ConnectedGuard,
    metrics: &Metrics,
) -> Result<Infallible, Status> {
    let mut has_rejected = false;
    while let Some(request) = requests.message().await? {
        match request.action {
            Some(Action::Subscribe(request)) => subscriptions.lock().subscribe(request)?,
            Some(Action::Unsubscribe(request)) => subscriptions.lock().unsubscribe(request)?,
            Some(Action::Status(status)) => {
                proxy.update(proxy_status(status, SystemTime::now())?);
            }
            Some(Action::Acknowledgement(request)) => {
                acknowledge(&request, &mut has_rejected, proxy, metrics);
            }
            None => tracing::debug!("ignoring a request with an action of a later release"),
        }
    }
    std::future::pending().await
}

/// The responses of a stream, made when the client reads them, until `end` returns its status.
pub(super) fn responses(
    subscriptions: SharedSubscriptions,
    mut trust: TrustReceiver,
    metrics: Arc<Metrics>,
    end: impl Future<Output = Status> + Send + Unpin + 'static,
) -> impl Stream<Item = Result<Bytes, Status>> + Send + 'static {
    trust.mark_changed();
    let notifications = subscriptions.lock().subscriber.notifications();
    let state = (subscriptions, trust, metrics, end, notifications);
    stream::unfold(state, |mut state| async move {
        let (subscriptions, trust, metrics, end, notifications) = &mut state;
        let response = loop {
            tokio::select! {
                biased;
                status = &mut *end => break Err(status),
                // Roots first: without them, a proxy cannot verify endpoints.
                () = changed(trust) => {
                    metrics.roots.inc();
                    break Ok(frames::encode(&roots(&trust.borrow_and_update())));
                }
                () = notifications.wait() => {
                    if let Some((kind, response)) = subscriptions.lock().next_response() {
                        count(kind, metrics);
                        break Ok(response);
                    }
                }
            }
        };
        Some((response, state))
    })
}

/// Waits for unsent roots.
async fn changed(trust: &mut TrustReceiver) {
    if trust.changed().await.is_err() {
        // The authority has ended: there are no further roots.
        std::future::pending().await
    }
}

/// What a client announces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announced {
    /// It understands snapshots in several messages.
    pub chunks: bool,
    /// It applies routes.
    pub routes: bool,
}

/// The subscriptions of a stream, which its requests change and its responses read.
#[derive(Clone)]
pub(super) struct SharedSubscriptions(Arc<Mutex<Subscriptions>>);

impl SharedSubscriptions {
    pub(super) fn new(
        subscriber: Resources,
        pod: Option<PodRef>,
        quota: Arc<Quota>,
        announced: Announced,
    ) -> SharedSubscriptions {
        let subscriptions = Subscriptions::new(subscriber, pod, quota, announced);
        SharedSubscriptions(Arc::new(Mutex::new(subscriptions)))
    }

    fn lock(&self) -> MutexGuard<'_, Subscriptions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The resources that a client has subscribed to.
struct Subscriptions {
    subscriber: Resources,
    /// The pod of the client, if its token is bound to one.
    pod: Option<PodRef>,
    quota: Arc<Quota>,
    announced: Announced,
    by_resource: HashMap<Resource, Subscription>,
}

struct Subscription {
    /// The name of the resource as the client wrote it, if that is not the usual spelling.
    name: Option<Box<str>>,
    known: Known,
    counted: OwnedSemaphorePermit,
}

/// The state of a resource that the client has.
enum Known {
    Nothing,
    /// The version that the client received on an earlier stream.
    Version(String),
    /// The version that was sent on this stream.
    Sent(Version),
}

impl Subscriptions {
    fn new(
        subscriber: Resources,
        pod: Option<PodRef>,
        quota: Arc<Quota>,
        announced: Announced,
    ) -> Subscriptions {
        Subscriptions {
            subscriber,
            pod,
            quota,
            announced,
            by_resource: HashMap::new(),
        }
    }

    fn subscribe(&mut self, request: proto::Subscribe) -> Result<(), Status> {
        let Some(resource) = self.resource(request.r#type, &request.name)? else {
            return Ok(());
        };
        if request.known_version.len() > MAX_NAME_BYTES {
            return Err(Status::invalid_argument(format!(
                "known_version of {} is longer than {MAX_NAME_BYTES} bytes",
                request.name
            )));
        }
        let counted = match self.by_resource.remove(&resource) {
            Some(before) => before.counted,
            None => self.quota.subscriptions(1)?,
        };
        let known = match request.known_version.is_empty() {
            true => Known::Nothing,
            false => Known::Version(request.known_version),
        };
        self.subscriber.subscribe(&resource);
        let name = Some(request.name).filter(|name| *name != name_of(&resource));
        let subscription = Subscription {
            name: name.map(String::into_boxed_str),
            known,
            counted,
        };
        self.by_resource.insert(resource, subscription);
        Ok(())
    }

    fn unsubscribe(&mut self, request: proto::Unsubscribe) -> Result<(), Status> {
        if let Some(resource) = self.resource(request.r#type, &request.name)? {
            self.by_resource.remove(&resource);
            self.subscriber.unsubscribe(&resource);
        }
        Ok(())
    }

    /// The resource with this type and name. `None` for types of later releases: a newer proxy must
    /// work with an older controller.
    fn resource(&self, kind: i32, name: &str) -> Result<Option<Resource>, Status> {
        let resource = match ResourceType::try_from(kind) {
            Ok(ResourceType::Destination) => Resource::Destination(parse_destination(name)?),
            Ok(ResourceType::Backend) => parse_backend(name)?,
            Ok(ResourceType::Self_) => match &self.pod {
                Some(PodRef {
                    namespace,
                    name,
                    uid,
                }) => Resource::Workload(
                    Key {
                        namespace: namespace.clone(),
                        name: name.clone(),
                    },
                    uid.clone(),
                ),
                None => {
                    return Err(Status::failed_precondition(
                        "self: the token of this call is not bound to a pod",
                    ));
                }
            },
            Ok(ResourceType::Roots) => {
                return Err(Status::invalid_argument(
                    "roots: every stream receives them without a subscription",
                ));
            }
            Err(_) => {
                tracing::debug!(kind, "ignoring a resource type of a later release");
                return Ok(None);
            }
        };
        Ok(Some(resource))
    }

    /// The next response, if the state of a resource differs from the client's.
    fn next_response(&mut self) -> Option<(Sent, Bytes)> {
        let (resource, published) = self.subscriber.next()?;
        let Subscription { name, known, .. } = self.by_resource.get_mut(&resource)?;
        let state = &published.state;
        let kind = match (&resource, &state.target) {
            // The pod is not in the catalog yet.
            (Resource::Workload(..), None) => return None,
            (Resource::Workload(..), Some(_)) => Sent::Workload,
            (_, None) => Sent::Unknown,
            (_, Some(_)) => Sent::Snapshot,
        };
        let encode = |update| frames::encode(&response(&resource, name.as_deref(), state, update));
        let difference = |version| match name {
            None => published.difference(version, |delta| encode(message::delta(delta))),
            Some(_) => published
                .since(version)
                .map(|delta| encode(message::delta(&delta))),
        };
        let delta = match &*known {
            Known::Sent(version) if *version == state.version => return None,
            Known::Version(known) if *known == state.version.to_string() => {
                let unchanged = encode(Response::Unchanged(proto::Unchanged {}));
                Some((Sent::Unchanged, unchanged))
            }
            Known::Nothing | Known::Version(_) => None,
            Known::Sent(version) => difference(*version).map(|delta| (Sent::Delta, delta)),
        };
        *known = Known::Sent(state.version);
        let Announced { chunks, routes } = self.announced;
        let whole = || {
            let mut update = message::whole(state);
            if let Response::Snapshot(snapshot) = &mut update
                && !routes
            {
                snapshot.routes = None;
            }
            whole(response(&resource, name.as_deref(), state, update), chunks)
        };
        let target = state.target.as_ref();
        let endpoints = target.map_or(0, |target| target.endpoints.len());
        let has_routes = target.is_some_and(|target| target.routes.is_some());
        // Few clients need an encoding of their own.
        let is_shared = name.is_none()
            && (chunks || endpoints <= MAX_CHUNK_ENDPOINTS)
            && (routes || !has_routes);
        Some(delta.unwrap_or_else(|| match is_shared {
            true => (kind, published.whole(whole)),
            false => (kind, whole()),
        }))
    }
}

/// The usual spelling of the name of a resource.
fn name_of(resource: &Resource) -> String {
    match resource {
        Resource::Destination(address) => address.to_string(),
        Resource::Backend(service, port) => format!("{service}:{port}"),
        Resource::Workload(..) => String::new(),
    }
}

/// A response about a resource.
fn response(
    resource: &Resource,
    name: Option<&str>,
    state: &State,
    update: Response,
) -> proto::DiscoverResponse {
    let kind = match resource {
        Resource::Destination(_) => ResourceType::Destination,
        Resource::Backend(..) => ResourceType::Backend,
        Resource::Workload(..) => ResourceType::Self_,
    };
    proto::DiscoverResponse {
        name: name.map_or_else(|| name_of(resource), str::to_owned),
        version: state.version.to_string(),
        update: Some(update),
        r#type: kind.into(),
        position: state.position.as_deref().map(message::position),
        ..proto::DiscoverResponse::default()
    }
}

/// Encodes a response with the whole state, in several messages if the client understands them.
fn whole(mut response: proto::DiscoverResponse, chunks: bool) -> Bytes {
    let mut encoded = BytesMut::new();
    while let Some(Response::Snapshot(snapshot)) = &mut response.update
        && chunks
        && snapshot.endpoints.len() > MAX_CHUNK_ENDPOINTS
    {
        let rest = snapshot.endpoints.split_off(MAX_CHUNK_ENDPOINTS);
        let draining = std::mem::take(&mut snapshot.draining);
        response.more = true;
        encoded.extend_from_slice(&frames::encode(&response));
        response.more = false;
        if let Some(Response::Snapshot(snapshot)) = &mut response.update {
            (snapshot.endpoints, snapshot.draining) = (rest, draining);
        }
    }
    match encoded.is_empty() {
        true => frames::encode(&response),
        false => {
            encoded.extend_from_slice(&frames::encode(&response));
            encoded.freeze()
        }
    }
}

/// Counts an acknowledgement. Logs the first rejection of a stream.
fn acknowledge(
    acknowledgement: &proto::Acknowledgement,
    has_rejected: &mut bool,
    proxy: &ConnectedGuard,
    metrics: &Metrics,
) {
    if acknowledgement.rejection.is_empty() {
        metrics.acknowledged.inc();
        return;
    }
    metrics.rejected.inc();
    if !std::mem::replace(has_rejected, true) {
        let reason: String = acknowledgement
            .rejection
            .chars()
            .take(MAX_REASON_CHARS)
            .collect();
        let kind = ResourceType::try_from(acknowledgement.r#type);
        let kind = kind.map_or("a resource", |kind| kind.as_str_name());
        tracing::warn!(resource = kind, reason, "{proxy} rejects an update");
    }
}

/// Checks the status of a proxy. Its texts stay in memory while the proxy is connected, so their
/// length is limited.
fn proxy_status(status: proto::ProxyStatus, now: SystemTime) -> Result<proxies::Status, Status> {
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
    Ok(proxies::Status {
        roots_version: status.roots_version,
        certificate_not_before: status.certificate_not_before,
        certificate_not_after: status.certificate_not_after,
        certificate_serial: status.certificate_serial,
        certificate_issuer: status.certificate_issuer,
        proxy_version: status.proxy_version,
        clock_skew: status.clock.saturating_sub(now),
    })
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

/// The kind of a response, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Snapshot,
    Delta,
    Unchanged,
    Unknown,
    Workload,
}

fn count(kind: Sent, metrics: &Metrics) {
    let counter = match kind {
        Sent::Snapshot => &metrics.snapshots,
        Sent::Delta => &metrics.deltas,
        Sent::Unchanged => &metrics.unchanged,
        Sent::Unknown => &metrics.unknown,
        Sent::Workload => &metrics.workloads,
    };
    counter.inc();
}

/// Parses a destination. IPv4-mapped IPv6 addresses become IPv4 addresses; scope IDs are ignored.
fn parse_destination(destination: &str) -> Result<SocketAddr, Status> {
    if destination.len() > MAX_NAME_BYTES {
        return Err(Status::invalid_argument(format!(
            "a destination is longer than {MAX_NAME_BYTES} bytes"
        )));
    }
    let address = destination
        .parse::<SocketAddr>()
        .ok()
        .filter(|address| address.port() != 0);
    address.map(|address| SocketAddr::new(address.ip().to_canonical(), address.port())).ok_or_else(|| {
        Status::invalid_argument(format!(
            "destination {destination:?} is not ADDRESS:PORT, for example \"10.96.0.7:80\" or \"[fd00::7]:80\""
        ))
    })
}

/// Parses the name of a backend.
fn parse_backend(name: &str) -> Result<Resource, Status> {
    let parse = || {
        let (service, port) = name.rsplit_once(':')?;
        let (namespace, service) = service.split_once('/')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let is_valid = !namespace.is_empty() && !service.is_empty() && !service.contains('/');
        is_valid.then(|| Resource::Backend(Key::new(namespace, service), port))
    };
    let is_bounded = name.len() <= MAX_BACKEND_BYTES;
    is_bounded.then(parse).flatten().ok_or_else(|| {
        let name: String = name.chars().take(MAX_BACKEND_BYTES).collect();
        Status::invalid_argument(format!(
            "backend {name:?} is not NAMESPACE/SERVICE:PORT, for example \"shop/web:80\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use std::time::Duration;

    use futures::{FutureExt, StreamExt};
    use prost::Message;
    use tokio::sync::{oneshot, watch};

    use super::*;
    use crate::authority::{Roots, self_signed};
    use crate::hub::Hub;
    use crate::index::object::Source;
    use crate::index::tests::Chance;
    use crate::issuer::Issuer;

    /// The state of a destination in a proxy.
    #[derive(Debug, Default, PartialEq)]
    struct ProxyState {
        version: String,
        /// Kind, namespace, name, application protocol; none while it is unknown.
        target: Option<(i32, String, String, String)>,
        endpoints: BTreeMap<String, proto::Endpoint>,
        draining: BTreeMap<String, proto::Endpoint>,
    }

    impl ProxyState {
        fn with_version(version: &str) -> ProxyState {
            ProxyState {
                version: version.to_owned(),
                ..ProxyState::default()
            }
        }

        fn apply(&mut self, response: proto::DiscoverResponse) {
            let by_address = |endpoint: proto::Endpoint| (endpoint.address.clone(), endpoint);
            self.version = response.version;
            match response.update.unwrap() {
                Response::Unchanged(_) | Response::Roots(_) | Response::Workload(_) => {}
                Response::Unknown(_) => *self = ProxyState::with_version(&self.version),
                Response::Snapshot(snapshot) => {
                    self.target = Some((
                        snapshot.kind,
                        snapshot.namespace,
                        snapshot.name,
                        snapshot.app_protocol,
                    ));
                    self.endpoints = snapshot.endpoints.into_iter().map(by_address).collect();
                    self.draining = snapshot.draining.into_iter().map(by_address).collect();
                }
                Response::Delta(delta) => {
                    for address in delta.removed {
                        self.endpoints.remove(&address);
                        self.draining.remove(&address);
                    }
                    for endpoint in delta.upserted {
                        self.draining.remove(&endpoint.address);
                        self.endpoints.insert(endpoint.address.clone(), endpoint);
                    }
                    self.draining
                        .extend(delta.draining.into_iter().map(by_address));
                }
            }
        }
    }

    fn destinations(stream: &Subscriptions) -> Vec<SocketAddr> {
        let destinations = stream.by_resource.keys();
        destinations
            .map(|resource| match resource {
                Resource::Destination(address) => *address,
                other => panic!("{other:?} was not subscribed to"),
            })
            .collect()
    }

    const ALL: Announced = Announced {
        chunks: true,
        routes: true,
    };

    fn stream(hub: &Hub) -> Subscriptions {
        Subscriptions::new(hub.watch_resources(None), None, Arc::default(), ALL)
    }

    fn subscribe(destination: SocketAddr, known_version: &str) -> proto::Subscribe {
        proto::Subscribe {
            name: destination.to_string(),
            known_version: known_version.to_owned(),
            ..proto::Subscribe::default()
        }
    }

    fn read(
        stream: &mut Subscriptions,
        received: &mut BTreeMap<SocketAddr, ProxyState>,
        at_most: usize,
    ) {
        for _ in 0..at_most {
            if let Some((_, response)) = stream.next_response() {
                let response = proto::DiscoverResponse::decode(&response[5..]).unwrap();
                received
                    .entry(response.name.parse().unwrap())
                    .or_default()
                    .apply(response);
            }
        }
    }

    #[test]
    fn slow_proxy_ends_with_the_state_of_a_new_proxy() {
        for seed in 0..50 {
            let mut chance = Chance(fastrand::Rng::with_seed(seed));
            let (hub, mut received) = (Hub::new([Source::Kubernetes]), BTreeMap::new());
            let mut slow = stream(&hub);
            for step in 0..200 {
                match chance.0.u8(..12) {
                    // A stream that is lost, and resumes with what it has.
                    0 => {
                        let subscribed: Vec<SocketAddr> = destinations(&slow);
                        slow = stream(&hub);
                        for destination in subscribed {
                            let known = received
                                .get(&destination)
                                .map_or("", |received: &ProxyState| &received.version);
                            slow.subscribe(subscribe(destination, known)).unwrap();
                        }
                    }
                    1..4 => {
                        let all = Chance::destinations();
                        slow.subscribe(subscribe(all[chance.0.usize(..all.len())], ""))
                            .unwrap();
                    }
                    4..6 => read(&mut slow, &mut received, step % 4),
                    _ => hub.apply([chance.change()]),
                }
            }
            read(&mut slow, &mut received, 1000);
            let (mut fresh, mut expected) = (stream(&hub), BTreeMap::new());
            for destination in destinations(&slow) {
                fresh.subscribe(subscribe(destination, "")).unwrap();
            }
            read(&mut fresh, &mut expected, 1000);
            assert_eq!(received, expected, "seed {seed}");
        }
    }

    #[tokio::test]
    async fn responses_are_the_roots_the_updates_and_the_status_of_the_end() {
        let now = SystemTime::now();
        let (ca, key) = self_signed("cluster.local", now, Duration::from_secs(3600)).unwrap();
        let (_keep, trust) = watch::channel(Arc::new(Trust {
            issuer: Issuer::from_pem(&ca, &key, now).unwrap().into(),
            roots: Roots::from_pem(&ca).unwrap().into(),
            renew_within: Duration::ZERO,
        }));
        let hub = Hub::new([Source::Kubernetes]);
        let subscriptions =
            SharedSubscriptions::new(hub.watch_resources(None), None, Arc::default(), ALL);
        let destination = "10.0.0.1:80".parse().unwrap();
        let request = subscribe(destination, "");
        subscriptions.lock().subscribe(request).unwrap();
        let metrics = Arc::new(Metrics::new(|_| Ok(())));
        let (ended, end) = oneshot::channel();
        let end = end.map(Result::unwrap);
        let responses = responses(subscriptions, trust, metrics.clone(), end);
        let mut responses = std::pin::pin!(responses);
        for kind in ["roots", "unknown"] {
            let response = responses.next().await.unwrap().unwrap();
            let response = proto::DiscoverResponse::decode(&response[5..]).unwrap();
            let text = format!("{:?}", response.update.unwrap()).to_lowercase();
            assert!(text.starts_with(kind), "{text}");
        }
        assert_eq!((metrics.roots.get(), metrics.unknown.get()), (1, 1));
        ended.send(Status::new(tonic::Code::Ok, "")).unwrap();
        let status = responses.next().await.unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::Ok);
    }

    #[test]
    fn streams_share_the_encoding_of_each_message() {
        let hub = Hub::new([Source::Kubernetes]);
        let mut chance = Chance(fastrand::Rng::with_seed(7));
        let all = Chance::destinations();
        let mut streams = [stream(&hub), stream(&hub)];
        for stream in &mut streams {
            for destination in &all {
                stream.subscribe(subscribe(*destination, "")).unwrap();
            }
        }
        let mut kinds = Vec::new();
        for _ in 0..200 {
            hub.apply([chance.change()]);
            let [one, other] = &mut streams;
            while let Some((kind, message)) = one.next_response() {
                let (_, same) = other.next_response().unwrap();
                assert_eq!(
                    (message.as_ptr(), message.len()),
                    (same.as_ptr(), same.len())
                );
                kinds.push(kind);
            }
        }
        assert!(kinds.contains(&Sent::Snapshot) && kinds.contains(&Sent::Delta));
    }

    #[test]
    fn large_snapshot_has_several_messages_for_clients_that_understand_them() {
        let endpoint = |number: usize| proto::Endpoint {
            address: format!("10.0.0.{number}:80"),
            ..proto::Endpoint::default()
        };
        let snapshot = proto::Snapshot {
            namespace: "shop".to_owned(),
            endpoints: (0..2 * MAX_CHUNK_ENDPOINTS + 1).map(endpoint).collect(),
            draining: vec![endpoint(0)],
            ..proto::Snapshot::default()
        };
        let response = proto::DiscoverResponse {
            update: Some(Response::Snapshot(snapshot.clone())),
            ..proto::DiscoverResponse::default()
        };
        for (chunks, expected) in [(true, [true, true, false].as_slice()), (false, &[false])] {
            let mut encoded = &*whole(response.clone(), chunks);
            let (mut more, mut received) = (Vec::new(), proto::Snapshot::default());
            while let Some((prefix, rest)) = encoded.split_first_chunk::<5>() {
                let length = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
                let message = proto::DiscoverResponse::decode(&rest[..length]).unwrap();
                encoded = &rest[length..];
                let Some(Response::Snapshot(part)) = message.update else {
                    panic!("each message is a part of the snapshot")
                };
                more.push(message.more);
                received.namespace = part.namespace;
                received.endpoints.extend(part.endpoints);
                received.draining.extend(part.draining);
            }
            assert_eq!((more.as_slice(), received == snapshot), (expected, true));
        }
    }

    /// A log that the test reads.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn rejections_of_a_hostile_proxy_are_one_short_line_of_the_log() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        let caller = crate::authenticate::Caller {
            user: "system:serviceaccount:shop:web".into(),
            pod: None,
        };
        let proxy = proxies::Proxies::default().connect(&caller, SystemTime::now());
        let metrics = Metrics::new(|_| Ok(()));
        let rejection = proto::Acknowledgement {
            rejection: format!("x\n2026 ERROR forged\r\u{1b}[2J{}", "y".repeat(100_000)),
            r#type: 77,
            ..proto::Acknowledgement::default()
        };
        tracing::subscriber::with_default(subscriber, || {
            let mut has_rejected = false;
            for _ in 0..1_000 {
                acknowledge(&rejection, &mut has_rejected, &proxy, &metrics);
            }
        });
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let mut control = text.chars().filter(|character| character.is_control());
        assert_eq!(
            (control.next(), control.next()),
            (Some('\n'), None),
            "{text}"
        );
        assert!(text.ends_with('\n') && text.len() < 1_000, "{text}");
    }

    #[test]
    fn response_has_the_name_as_the_client_wrote_it() {
        let mut stream = stream(&Hub::new([Source::Kubernetes]));
        for name in ["10.0.0.1:80", "[::ffff:10.0.0.2]:80"] {
            let request = proto::Subscribe {
                name: name.to_owned(),
                ..proto::Subscribe::default()
            };
            stream.subscribe(request).unwrap();
            let (_, response) = stream.next_response().unwrap();
            let response = proto::DiscoverResponse::decode(&response[5..]).unwrap();
            assert_eq!(response.name, name);
        }
    }

    #[test]
    fn accepts_only_addresses_with_port_as_destinations() {
        assert_eq!(
            parse_destination("10.96.0.7:80").unwrap(),
            "10.96.0.7:80".parse().unwrap()
        );
        assert_eq!(
            parse_destination("[fd00::7]:80").unwrap(),
            "[fd00::7]:80".parse().unwrap()
        );
        assert_eq!(
            parse_destination("[::ffff:10.96.0.7]:80").unwrap(),
            "10.96.0.7:80".parse().unwrap()
        );
        for text in [
            "",
            "10.96.0.7",
            "10.96.0.7:0",
            "web.shop:80",
            "10.96.0.7:80 ",
            "fd00::7:80",
        ] {
            let status = parse_destination(text).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(
                status.message().contains(&format!("{text:?}")),
                "{}",
                status.message()
            );
        }
    }
}
