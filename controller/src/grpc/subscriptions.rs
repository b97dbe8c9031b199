//! The resources that the client of one Discover stream has subscribed to, and what it knows of
//! them.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use diy_mesh_proto::mesh::v1 as proto;
use proto::ResourceType;
use proto::discover_response::Update as Response;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;

use super::name::{MAX_NAME_BYTES, name_of, parse_backend, parse_destination};
use super::{frames, message};
use crate::authenticate::PodRef;
use crate::hub::{Published, Resources};
use crate::index::object::Resource;
use crate::index::state::State;
use crate::index::version::Version;
use crate::metrics::Sent;
use crate::quota::Quota;

/// Endpoints in one message, about half a megabyte.
const MAX_CHUNK_ENDPOINTS: usize = 4_000;
/// Longer responses have a frame of their own, whose bytes all streams share.
const MAX_SHARED_FRAME_BYTES: usize = 4 * 1024;

/// What a client announces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announced {
    /// It understands snapshots in several messages.
    pub chunks: bool,
    /// It applies routes.
    pub routes: bool,
}

impl Announced {
    /// What matters for this state: the others share their encoding.
    fn for_state(self, state: &State) -> Announced {
        let target = state.target.as_ref();
        let endpoints = target.map_or(0, |target| target.endpoints.len());
        let has_routes = target.is_some_and(|target| target.routes.is_some());
        Announced {
            chunks: self.chunks || endpoints <= MAX_CHUNK_ENDPOINTS,
            routes: self.routes || !has_routes,
        }
    }

    /// The form of a state for these clients.
    fn form(self) -> usize {
        usize::from(self.chunks) + 2 * usize::from(self.routes)
    }
}

/// The resources that a client has subscribed to.
pub(super) struct Subscriptions {
    subscriber: Resources,
    /// Why the stream ends.
    pub(super) end: Option<Status>,
    /// The pod of the client, if its token is bound to one.
    pod: Option<PodRef>,
    quota: Arc<Quota>,
    announced: Announced,
    by_resource: HashMap<Arc<Resource>, Subscription>,
    /// Counts all of them.
    counted: Option<OwnedSemaphorePermit>,
    /// A response that did not fit into the last frame.
    left: Option<(Sent, Bytes)>,
}

struct Subscription {
    /// The name of the resource as the client wrote it, if that is not the usual spelling.
    name: Option<Box<str>>,
    known: Known,
}

/// The state of a resource that the client has.
enum Known {
    Nothing,
    /// The version that the client received on an earlier stream.
    Earlier(Version),
    /// The version that was sent on this stream.
    Sent(Version),
}

impl Subscriptions {
    pub(super) fn new(
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
            counted: None,
            end: None,
            left: None,
        }
    }

    pub(super) fn subscribe(&mut self, request: proto::Subscribe) -> Result<(), Status> {
        let Some(resource) = self.resource(request.r#type, &request.name)? else {
            return Ok(());
        };
        if request.known_version.len() > MAX_NAME_BYTES {
            return Err(Status::invalid_argument(format!(
                "known_version of {} is longer than {MAX_NAME_BYTES} bytes",
                request.name
            )));
        }
        if !self.by_resource.contains_key(&resource) {
            let counted = self.quota.subscriptions(1)?;
            match &mut self.counted {
                Some(all) => all.merge(counted),
                none => *none = Some(counted),
            }
        }
        let known = Version::parse(&request.known_version);
        let known = known.map_or(Known::Nothing, Known::Earlier);
        let name = Some(request.name).filter(|name| *name != name_of(&resource));
        let name = name.map(String::into_boxed_str);
        let resource = self.subscriber.subscribe(&resource);
        let subscription = Subscription { name, known };
        self.by_resource.insert(resource, subscription);
        Ok(())
    }

    pub(super) fn unsubscribe(&mut self, request: proto::Unsubscribe) -> Result<(), Status> {
        if let Some(resource) = self.resource(request.r#type, &request.name)? {
            if self.by_resource.remove(&resource).is_some() {
                let counted = self.counted.as_mut();
                drop(counted.and_then(|counted| counted.split(1)));
            }
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
                Some(pod) => Resource::Workload(pod.key(), pod.uid.clone()),
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

    /// The next responses. Short ones share a frame: one write and one TLS record.
    pub(super) fn next_frame(&mut self, mut count: impl FnMut(Sent)) -> Option<Bytes> {
        let (kind, first) = self.left.take().or_else(|| self.next_response())?;
        count(kind);
        let mut frame = None;
        while frame.as_ref().map_or(first.len(), BytesMut::len) < MAX_SHARED_FRAME_BYTES
            && let Some((kind, next)) = self.next_response()
        {
            if next.len() >= MAX_SHARED_FRAME_BYTES {
                self.left = Some((kind, next));
                break;
            }
            count(kind);
            let frame = frame.get_or_insert_with(|| BytesMut::from(&*first));
            frame.extend_from_slice(&next);
        }
        Some(frame.map_or(first, BytesMut::freeze))
    }

    /// The next response, if the state of a resource differs from the client's. Notifications
    /// without a difference are skipped.
    fn next_response(&mut self) -> Option<(Sent, Bytes)> {
        while let Some((resource, published)) = self.subscriber.next() {
            let response = self.response(&resource, &published);
            if response.is_some() {
                return response;
            }
        }
        None
    }

    /// The response with a state, if it differs from the client's.
    fn response(&mut self, resource: &Resource, published: &Published) -> Option<(Sent, Bytes)> {
        let Subscription { name, known } = self.by_resource.get_mut(resource)?;
        let state = &published.state;
        let kind = match (resource, &state.target) {
            // The pod is not in the catalog yet.
            (Resource::Workload(..), None) => return None,
            (Resource::Workload(..), Some(_)) => Sent::Workload,
            (_, None) => Sent::Unknown,
            (_, Some(_)) => Sent::Snapshot,
        };
        let encode = |update| frames::encode(&response(resource, name.as_deref(), state, update));
        let difference = |version| match name {
            None => published.difference(version, |delta| encode(message::delta(delta))),
            Some(_) => published
                .since(version)
                .map(|delta| encode(message::delta(&delta))),
        };
        let delta = match &*known {
            Known::Sent(version) if *version == state.version => return None,
            Known::Earlier(version) if *version == state.version => {
                let unchanged = encode(Response::Unchanged(proto::Unchanged {}));
                Some((Sent::Unchanged, unchanged))
            }
            Known::Nothing | Known::Earlier(_) => None,
            Known::Sent(version) => difference(*version).map(|delta| (Sent::Delta, delta)),
        };
        *known = Known::Sent(state.version);
        let announced = self.announced.for_state(state);
        let whole = || {
            let mut update = message::whole(state);
            if let Response::Snapshot(snapshot) = &mut update
                && !announced.routes
            {
                snapshot.routes = None;
            }
            let response = response(resource, name.as_deref(), state, update);
            whole(response, announced.chunks)
        };
        Some(delta.unwrap_or_else(|| match name {
            None => (kind, published.whole(announced.form(), whole)),
            Some(_) => (kind, whole()),
        }))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::{Ipv4Addr, SocketAddr};

    use prost::Message;

    use super::*;
    use crate::hub::Hub;
    use crate::index::object::{Change, Object, Source};
    use crate::index::tests::Chance;

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
            .map(|resource| match &**resource {
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

    /// The messages of a frame.
    fn messages(mut frame: Bytes) -> Vec<proto::DiscoverResponse> {
        let mut messages = Vec::new();
        while !frame.is_empty() {
            let length = u32::from_be_bytes(frame[1..5].try_into().unwrap()) as usize;
            let message = frame.split_to(5 + length).split_off(5);
            messages.push(proto::DiscoverResponse::decode(message).unwrap());
        }
        messages
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
    fn short_responses_share_a_frame_and_long_ones_do_not() {
        let hub = Hub::new([Source::Kubernetes]);
        let pods: Vec<String> = (1..=200).map(|pod| format!("10.1.0.{pod}")).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        let service = crate::index::tests::service_with_pods("web", "10.96.0.1", &pods);
        let changes = service.into_iter();
        hub.apply(changes.map(|object| Change::Apply(Source::Kubernetes, object)));
        let mut stream = stream(&hub);
        for address in ["10.0.0.1", "10.0.0.2", "10.96.0.1", "10.0.0.3", "10.0.0.4"] {
            let destination = SocketAddr::new(address.parse().unwrap(), 80);
            stream.subscribe(subscribe(destination, "")).unwrap();
        }
        let mut frames = Vec::new();
        let mut count = 0;
        while let Some(frame) = stream.next_frame(|_| count += 1) {
            let names = messages(frame).into_iter().map(|message| message.name);
            frames.push(names.collect::<Vec<_>>().join(" "));
        }
        let short = ["10.0.0.1:80 10.0.0.2:80", "10.0.0.3:80 10.0.0.4:80"];
        assert_eq!(frames, [short[0], "10.96.0.1:80", short[1]]);
        assert_eq!(count, 5);
    }

    #[test]
    fn service_of_100_000_endpoints_is_sent_in_parts_and_then_by_difference() {
        const ENDPOINTS: u32 = 100_000;
        let address = |number| Ipv4Addr::from_bits(0x0a40_0000 + number).to_string();
        let pods: Vec<String> = (0..ENDPOINTS).map(address).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        let mut objects = crate::index::tests::service_with_pods("web", "10.96.0.1", &pods);
        let apply = |object| Change::Apply(Source::Kubernetes, object);
        let hub = Hub::new([Source::Kubernetes]);
        hub.apply(objects.iter().cloned().map(apply));
        let mut stream = stream(&hub);
        let destination = "10.96.0.1:80".parse().unwrap();
        stream.subscribe(subscribe(destination, "")).unwrap();
        let frame = stream.next_frame(|_| ()).unwrap();
        // Clients of an earlier release share a message of their own.
        let earlier = Announced {
            chunks: false,
            ..ALL
        };
        let frames = [earlier, earlier, ALL].map(|announced| {
            let resources = hub.watch_resources(None);
            let mut other = Subscriptions::new(resources, None, Arc::default(), announced);
            other.subscribe(subscribe(destination, "")).unwrap();
            other.next_frame(|_| ()).unwrap()
        });
        assert_eq!(frames[0].as_ptr(), frames[1].as_ptr());
        assert_eq!(frames[2].as_ptr(), frame.as_ptr());
        let parts = messages(frame);
        assert!(parts.iter().all(|part| part.encoded_len() < 1024 * 1024));
        let (mut proxy, mut received) = (ProxyState::default(), 0);
        for part in parts {
            proxy.apply(part);
            received += proxy.endpoints.len();
        }
        assert_eq!(received, ENDPOINTS as usize);
        // The last object is the EndpointSlice.
        let Some(Object::Slice(slice)) = objects.last_mut() else {
            panic!("a slice")
        };
        slice.endpoints.pop();
        hub.apply(objects.pop().map(apply));
        let frame = stream.next_frame(|_| ()).unwrap();
        assert!(frame.len() < 256, "{} bytes", frame.len());
        let Some(Response::Delta(delta)) = messages(frame).remove(0).update else {
            panic!("a difference")
        };
        assert_eq!((delta.upserted.len(), delta.removed.len()), (0, 1));
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
}
