//! The resources that the client of one Discover stream has subscribed to, and what it knows of
//! them.
//!
//! Memory that the replica keeps for this client alone is charged to it: each subscription, the
//! state of its own pod, and the reasons of its rejections. States that subscribers share are not
//! charged.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use diy_mesh_proto::mesh::v1 as proto;
use prost::Message as _;
use proto::ResourceType;
use proto::acknowledgement::Part;
use proto::discover_response::Update as Response;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tonic::Status;

use super::name::{MAX_NAME_BYTES, name_of, parse_backend, parse_destination};
use super::{frames, message};
use crate::index::position::{self, Position};
use crate::index::state::{State, Target, TargetKind};
use crate::index::{Resource, dependencies};
use crate::kinds::policy::Side;
use crate::metrics::Sent;
use crate::object::PodRef;
use crate::object::version::Version;
use crate::publish::{Rejection, Resources};
use crate::quota::{Charge, MAX_SUBSCRIPTIONS, SUBSCRIPTION_BYTES};

/// Longer parts of responses have a frame of their own, whose bytes all streams share.
const MAX_SHARED_FRAME_BYTES: usize = 4 * 1024;
/// Time for which subscriptions wait until this replica has caught up with their client. A proxy
/// takes an older state 30 seconds after the start of its stream.
const MAX_CATCH_UP: Duration = Duration::from_secs(10);
/// Refused subscriptions of a stream. One with more ends.
const MAX_REFUSED: usize = 1000;
/// The length of the reason of a rejection.
const MAX_REASON_CHARS: usize = 200;
/// The fields of a [`proto::DiscoverResponse`] with shared encodings.
const SNAPSHOT: u32 = 3;
const DELTA: u32 = 4;

/// The resources that a client has subscribed to.
pub(super) struct Subscriptions {
    subscriber: Resources,
    /// Why the stream ends.
    pub(super) end: Option<Status>,
    /// The pod of the client, if its token is bound to one.
    pod: Option<PodRef>,
    /// The client is of an earlier release: it applies no routes, and reads a snapshot as one message.
    is_earlier: bool,
    by_resource: HashMap<Arc<Resource>, Subscription>,
    /// The subscriptions that wait until this replica has caught up with the client, and the end of
    /// the wait.
    behind: HashMap<Resource, (proto::Subscribe, position::Known)>,
    behind_until: Option<Instant>,
    charged: Charge,
    /// Whether the log says that subscriptions are refused.
    is_logged: bool,
    /// The subscriptions that the caller may not have yet.
    refused: HashMap<Resource, proto::Subscribe>,
    has_new_refused: Arc<Notify>,
    /// The parts of the last response that are still to be sent.
    left: VecDeque<Bytes>,
}

struct Subscription {
    /// The name of the resource as the client wrote it, if that is not the usual spelling.
    name: Option<Box<str>>,
    known: Known,
    /// The version of the last state that the client is to acknowledge.
    unacknowledged: Option<Version>,
    /// The bytes that are charged for its state, and for the reason of a rejection.
    state_bytes: usize,
    reason_bytes: usize,
}

/// The state of a resource that the client has.
enum Known {
    Nothing,
    /// The version that the client received on an earlier stream.
    Earlier(Version),
    /// The version that was sent on this stream: the digests of the endpoints, if there were any,
    /// and of the rest.
    Sent(Option<Version>, Version),
}

impl Subscriptions {
    pub(super) fn new(
        subscriber: Resources,
        pod: Option<PodRef>,
        charged: Charge,
        is_earlier: bool,
    ) -> Subscriptions {
        Subscriptions {
            subscriber,
            pod,
            is_earlier,
            by_resource: HashMap::new(),
            behind: HashMap::new(),
            behind_until: None,
            charged,
            is_logged: false,
            refused: HashMap::new(),
            has_new_refused: Arc::default(),
            end: None,
            left: VecDeque::new(),
        }
    }

    pub(super) fn subscribe(&mut self, mut request: proto::Subscribe) -> Result<(), Status> {
        let Some(resource) = self.resource(request.r#type, &request.name)? else {
            return Ok(());
        };
        if request.known_version.len() > MAX_NAME_BYTES {
            return Err(Status::invalid_argument(format!(
                "known_version of {} is longer than {MAX_NAME_BYTES} bytes",
                request.name
            )));
        }
        // Without its texts, which have no limit.
        let known = request.known_position.take().map(position::Known::from);
        if !self.by_resource.contains_key(&resource) && !self.behind.contains_key(&resource) {
            if self.by_resource.len() + self.behind.len() >= MAX_SUBSCRIPTIONS {
                return Err(Status::resource_exhausted(format!(
                    "this stream has {MAX_SUBSCRIPTIONS} subscriptions, the maximum; unsubscribe \
                     from idle destinations"
                )));
            }
            if let Err(exhausted) = self.charged.add(SUBSCRIPTION_BYTES) {
                if self.refused.len() >= MAX_REFUSED {
                    return Err(exhausted);
                }
                self.refuse(resource, request, &exhausted);
                return Ok(());
            }
        }
        self.refused.remove(&resource);
        self.behind.remove(&resource);
        match known.filter(|known| self.subscriber.is_behind(known)) {
            Some(known) => self.catch_up(resource, request, known),
            None => self.add(&resource, request),
        }
        Ok(())
    }

    fn add(&mut self, resource: &Resource, request: proto::Subscribe) {
        let known = Version::parse(&request.known_version);
        let known = known.map_or(Known::Nothing, Known::Earlier);
        let name = Some(request.name).filter(|name| *name != name_of(resource));
        let name = name.map(String::into_boxed_str);
        let resource = self.subscriber.subscribe(resource);
        let subscription = Subscription {
            name,
            known,
            unacknowledged: None,
            state_bytes: 0,
            reason_bytes: 0,
        };
        if let Some(before) = self.by_resource.insert(resource, subscription) {
            self.charged.remove(before.own_bytes());
        }
    }

    /// The client has a state that may be newer. It keeps it while this replica catches up.
    fn catch_up(&mut self, resource: Resource, request: proto::Subscribe, known: position::Known) {
        self.subscriber.catch_up(&known);
        if self.behind.is_empty() {
            self.behind_until = Some(Instant::now() + MAX_CATCH_UP);
        }
        self.behind.insert(resource, (request, known));
    }

    /// Until when subscriptions wait at most, if there are any.
    pub(super) fn behind_until(&self) -> Option<Instant> {
        self.behind_until.filter(|_| !self.behind.is_empty())
    }

    /// The positions of this replica that are published.
    pub(super) fn published(&self) -> watch::Receiver<Option<Arc<Position>>> {
        self.subscriber.published()
    }

    /// Ends the wait of subscriptions if this replica has caught up, or if it takes too long: the
    /// client then decides. Returns their number, and whether it has caught up.
    pub(super) fn end_wait(&mut self) -> (usize, bool) {
        let mut known = self.behind.values().map(|(_, known)| known);
        let has_caught_up = !known.any(|known| self.subscriber.is_behind(known));
        let is_due = self
            .behind_until
            .is_some_and(|until| Instant::now() >= until);
        if !has_caught_up && !is_due {
            return (0, false);
        }
        let behind = std::mem::take(&mut self.behind);
        let count = behind.len();
        for (resource, (request, _)) in behind {
            self.add(&resource, request);
        }
        (count, has_caught_up)
    }

    /// The others stay. It is requested again later.
    fn refuse(&mut self, resource: Resource, request: proto::Subscribe, exhausted: &Status) {
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::warn!("a proxy gets no more destinations: {}", exhausted.message());
        }
        self.refused.insert(resource, request);
        self.has_new_refused.notify_one();
    }

    pub(super) fn unsubscribe(&mut self, request: proto::Unsubscribe) -> Result<(), Status> {
        if let Some(resource) = self.resource(request.r#type, &request.name)? {
            self.refused.remove(&resource);
            self.remove(&resource);
        }
        Ok(())
    }

    fn remove(&mut self, resource: &Resource) {
        let was_behind = self.behind.remove(resource).is_some();
        let subscription = self.by_resource.remove(resource);
        if was_behind || subscription.is_some() {
            let own_bytes = subscription.map_or(0, |subscription| subscription.own_bytes());
            self.charged.remove(SUBSCRIPTION_BYTES + own_bytes);
        }
        self.subscriber.unsubscribe(resource);
    }

    /// Records whether the client applies the last state of a resource. Acknowledgements of other
    /// states have no effect.
    pub(super) fn acknowledge(&mut self, message: &proto::Acknowledgement) {
        let resource = self.resource(message.r#type, &message.name);
        let Ok(Some(resource)) = resource else {
            return;
        };
        let version = Version::parse(&message.version);
        if let Some(subscription) = self.by_resource.get_mut(&resource)
            && let Known::Sent(_, rest) = subscription.known
            && version.is_some()
            && subscription.unacknowledged == version
        {
            let mut rejection = rejection(message);
            let reason = rejection.as_mut().map(|rejection| &mut rejection.reason);
            let bytes = reason.as_ref().map_or(0, |reason| reason.len());
            let is_charged = self.charged.change(&mut subscription.reason_bytes, bytes);
            if let (Some(reason), Err(_)) = (reason, is_charged) {
                *reason = "".into();
            }
            self.subscriber.acknowledge(&resource, rest, rejection);
        }
    }

    /// Notified of each refused subscription.
    pub(super) fn refusals(&self) -> Arc<Notify> {
        self.has_new_refused.clone()
    }

    /// Whether subscriptions were refused.
    pub(super) fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Requests refused subscriptions again.
    pub(super) fn retry(&mut self) -> Result<(), Status> {
        let mut refused = std::mem::take(&mut self.refused).into_values();
        refused.try_for_each(|request| self.subscribe(request))
    }

    /// The resource with this type and name. `None` for types of later releases: a newer proxy must
    /// work with an older controller.
    fn resource(&self, kind: i32, name: &str) -> Result<Option<Resource>, Status> {
        let resource = match ResourceType::try_from(kind) {
            Ok(ResourceType::Destination) => Resource::Destination(parse_destination(name)?),
            Ok(ResourceType::Backend) => parse_backend(name)?,
            Ok(ResourceType::Self_) if !name.is_empty() => {
                return Err(Status::invalid_argument(format!(
                    "self: its name has {} bytes, expected none",
                    name.len()
                )));
            }
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

    /// The next bytes of responses. Short ones share a frame: one write and one TLS record.
    pub(super) fn next_frame(&mut self, mut count: impl FnMut(Sent)) -> Option<Bytes> {
        let mut frame = BytesMut::new();
        while self.left.is_empty() && frame.len() < MAX_SHARED_FRAME_BYTES {
            let Some((kind, parts)) = self.next_response() else {
                break;
            };
            count(kind);
            for part in parts {
                if self.left.is_empty() && part.len() < MAX_SHARED_FRAME_BYTES {
                    frame.extend_from_slice(&part)
                } else {
                    self.left.push_back(part)
                }
            }
        }
        if frame.is_empty() {
            self.left.pop_front()
        } else {
            Some(frame.freeze())
        }
    }

    /// The parts of the next response, if the state of a resource differs from the client's.
    /// Notifications without a difference are skipped.
    fn next_response(&mut self) -> Option<(Sent, Vec<Bytes>)> {
        while let Some((resource, state)) = self.subscriber.next() {
            if let Err(exhausted) = self.charge_state(&resource, &state) {
                self.remove(&resource);
                let request = proto::Subscribe {
                    r#type: kind(&resource).into(),
                    name: name_of(&resource),
                    ..proto::Subscribe::default()
                };
                self.refuse((*resource).clone(), request, &exhausted);
                continue;
            }
            let response = self.response(&resource, &state);
            if response.is_some() {
                return response;
            }
        }
        None
    }

    /// Charges the state of a pod, which its proxies alone have: in memory, and encoded for them.
    fn charge_state(&mut self, resource: &Resource, state: &State) -> Result<(), Status> {
        let Some(subscription) = self.by_resource.get_mut(resource) else {
            return Ok(());
        };
        let bytes = match state.target.as_ref().map(|target| &target.kind) {
            Some(TargetKind::Workload(workload)) => 2 * workload.message().encoded_len(),
            _ => 0,
        };
        self.charged.change(&mut subscription.state_bytes, bytes)
    }

    /// The response with a state, if it differs from the client's.
    fn response(&mut self, resource: &Resource, state: &State) -> Option<(Sent, Vec<Bytes>)> {
        let subscription = self.by_resource.get_mut(resource)?;
        let Subscription { name, known, .. } = subscription;
        if state.is_withheld {
            return None;
        }
        let mut response = header(resource, name.as_deref(), state);
        let mut plain = |kind, update| {
            response.update = Some(update);
            Some((kind, vec![frames::encode(&response)]))
        };
        let endpoints = state.target.as_ref().map(|target| &target.endpoints);
        let current = Known::Sent(endpoints.map(|one| one.version), state.rest);
        let before = std::mem::replace(known, current);
        match before {
            Known::Sent(before, rest) if rest == state.rest => {
                let (before, endpoints) = before.zip(endpoints)?;
                if before == endpoints.version {
                    return None;
                }
                let delta = self.subscriber.difference(before, endpoints, |delta| {
                    message::delta(delta).encode_to_vec().into()
                });
                if let Some(delta) = delta {
                    return Some((Sent::Delta, frames::spliced(&response, DELTA, &[delta])));
                }
            }
            Known::Earlier(version) if version == state.version => {
                // A client does not name the version of a state that it has rejected.
                self.subscriber.acknowledge(resource, state.rest, None);
                return plain(Sent::Unchanged, Response::Unchanged(proto::Unchanged {}));
            }
            Known::Nothing | Known::Earlier(_) | Known::Sent(..) => {}
        }
        subscription.unacknowledged = Some(state.version);
        match &state.target {
            None => {
                let node = state.is_node;
                plain(Sent::Unknown, Response::Unknown(proto::Unknown { node }))
            }
            Some(target) => match &target.kind {
                TargetKind::Workload(workload) => {
                    plain(Sent::Workload, Response::Workload(workload.message()))
                }
                _ => Some((Sent::Snapshot, whole(response, target, self.is_earlier))),
            },
        }
    }
}

impl Subscription {
    fn own_bytes(&self) -> usize {
        self.state_bytes + self.reason_bytes
    }
}

/// The rejection in an acknowledgement, if it is one. Its reason stays in memory, and authors read
/// it.
fn rejection(message: &proto::Acknowledgement) -> Option<Rejection> {
    (!message.rejection.is_empty()).then(|| Rejection {
        reason: printable(&message.rejection).into(),
        part: match message.part() {
            Part::Unspecified => None,
            Part::Routes => Some(Side::Requests),
            Part::Policy => Some(Side::Endpoints),
        },
    })
}

/// A text of a proxy for people, of bounded length.
pub(super) fn printable(text: &str) -> String {
    let printable = |one: char| {
        if one.is_alphanumeric() || one.is_ascii_graphic() {
            one
        } else {
            ' '
        }
    };
    text.chars().map(printable).take(MAX_REASON_CHARS).collect()
}

/// A response about a resource without its update.
fn header(resource: &Resource, name: Option<&str>, state: &State) -> proto::DiscoverResponse {
    let kinds = dependencies::kinds(resource, state.target.as_ref());
    let position = state.position.as_deref();
    proto::DiscoverResponse {
        name: name.map_or_else(|| name_of(resource), str::to_owned),
        version: state.version.to_string(),
        r#type: kind(resource).into(),
        position: position.map(|position| position.message(kinds)),
        ..proto::DiscoverResponse::default()
    }
}

fn kind(resource: &Resource) -> ResourceType {
    match resource {
        Resource::Destination(_) => ResourceType::Destination,
        Resource::Backend(..) => ResourceType::Backend,
        Resource::Workload(..) => ResourceType::Self_,
    }
}

/// The parts of a snapshot: its own fields, the routes that ports share, and the endpoints that all
/// addresses and subscribers share. In one message for a client of an earlier
/// release, which applies no routes.
fn whole(mut response: proto::DiscoverResponse, target: &Target, is_earlier: bool) -> Vec<Bytes> {
    let mut parts = vec![message::snapshot(target).encode_to_vec().into()];
    let routes = target.routes.as_deref().filter(|_| !is_earlier);
    parts.extend(routes.map(message::routes).cloned());
    let endpoints = message::endpoints(&target.endpoints);
    let per_message = if is_earlier { usize::MAX } else { 1 };
    let mut messages = Vec::new();
    let mut rest = endpoints.chunks(per_message);
    loop {
        parts.extend_from_slice(rest.next().unwrap_or_default());
        response.more = rest.len() > 0;
        messages.append(&mut frames::spliced(&response, SNAPSHOT, &parts));
        if !response.more {
            return messages;
        }
        parts.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};
    use std::net::{Ipv4Addr, SocketAddr};

    use futures::FutureExt as _;
    use prost::Message;

    use super::*;
    use crate::catalog::claims::Subject;
    use crate::catalog::{Change, Event};
    use crate::index::tests::Chance;
    use crate::kinds::Object;
    use crate::object::{Key, Kind};
    use crate::publish::Hub;
    use crate::quota::Quotas;
    use crate::status::statuses::Statuses as _;

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
                Response::Unchanged(_)
                | Response::Roots(_)
                | Response::Workload(_)
                | Response::ReportTraffic(_) => {}
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

    fn charge() -> Charge {
        Quotas::default().connect("", "")
    }

    fn stream(hub: &Hub) -> Subscriptions {
        Subscriptions::new(hub.watch_resources(None), None, charge(), false)
    }

    fn subscribe(destination: SocketAddr, known_version: &str) -> proto::Subscribe {
        proto::Subscribe {
            name: destination.to_string(),
            known_version: known_version.to_owned(),
            ..proto::Subscribe::default()
        }
    }

    /// The messages of frames.
    fn messages(frames: Vec<Bytes>) -> Vec<proto::DiscoverResponse> {
        let mut frame = Bytes::from(frames.concat());
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
                let [response] = &messages(response)[..] else {
                    panic!("small states are in one message")
                };
                received
                    .entry(response.name.parse().unwrap())
                    .or_default()
                    .apply(response.clone());
            }
        }
    }

    #[test]
    fn slow_proxy_ends_with_the_state_of_a_new_proxy() {
        for seed in 0..50 {
            let mut chance = Chance(fastrand::Rng::with_seed(seed));
            let (hub, mut received) = (Hub::default(), BTreeMap::new());
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

    /// All frames until nothing is left.
    fn frames(stream: &mut Subscriptions) -> Vec<Bytes> {
        std::iter::from_fn(|| stream.next_frame(|_| ())).collect()
    }

    /// A hub with this Service, and its objects: the last one is the EndpointSlice.
    fn hub_with_service(pods: u32) -> (Hub, Vec<Object>) {
        let address = |number| Ipv4Addr::from_bits(0x0a40_0000 + number).to_string();
        let pods: Vec<String> = (0..pods).map(address).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        let objects = crate::index::tests::service_with_pods("web", "10.96.0.1", &pods);
        let hub = Hub::default();
        hub.apply(objects.iter().cloned().map(apply));
        (hub, objects)
    }

    fn apply(object: Object) -> Change {
        Change::Apply(object)
    }

    fn without_last_endpoint(objects: &mut [Object]) -> Change {
        let Some(Object::Slice(slice)) = objects.last_mut() else {
            panic!("a slice")
        };
        slice.endpoints.pop();
        apply(Object::Slice(slice.clone()))
    }

    fn at(change: Change, version: u64) -> Event {
        Event {
            change,
            version: Some(version),
        }
    }

    /// A cluster whose pods are at this version.
    fn hub_at(pods: u64) -> Hub {
        let hub = Hub::default();
        let list = |kind, objects| Change::Reset(kind, objects);
        let api = crate::index::tests::api_service("uid");
        hub.apply([Change::Epoch(0)]);
        hub.apply([
            at(list(Kind::Service, vec![api]), 1),
            at(list(Kind::Slice, vec![]), 1),
            at(list(Kind::Pod, vec![]), pods),
        ]);
        hub
    }

    fn known(pods: u64, restored: u64) -> Option<proto::Position> {
        let components = [("Pod", pods), ("HTTPRoute", 99), ("of a later release", 1)];
        let component = |(kind, version): (&str, u64)| proto::position::Component {
            kind: kind.to_owned(),
            resource_version: version,
            restored,
            ..proto::position::Component::default()
        };
        Some(proto::Position {
            epoch: "uid".to_owned(),
            components: components.map(component).into(),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn replica_that_is_behind_catches_up_before_it_responds() {
        let hub = hub_at(10);
        let mut stream = stream(&hub);
        let destination = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let subscribe = |port, known_position| proto::Subscribe {
            known_position,
            ..subscribe(destination(port), "")
        };
        // HTTPRoutes are not installed.
        stream.subscribe(subscribe(1, known(10, 0))).unwrap();
        stream.subscribe(subscribe(2, known(20, 0))).unwrap();
        stream.subscribe(subscribe(3, known(20, 0))).unwrap();
        stream.subscribe(subscribe(4, known(20, 0))).unwrap();
        let claims = hub.claims();
        assert_eq!(claims.pending(Subject::Kind(Kind::Pod)), 1);
        let unsubscribe = proto::Unsubscribe {
            name: destination(3).to_string(),
            r#type: 0,
        };
        stream.unsubscribe(unsubscribe).unwrap();
        let names = |stream: &mut Subscriptions| {
            let messages = messages(frames(stream)).into_iter();
            messages.map(|message| message.name).collect::<HashSet<_>>()
        };
        assert_eq!(names(&mut stream), ["10.0.0.1:1".to_owned()].into());
        hub.apply([at(Change::Bookmark(Kind::Pod), 19)]);
        assert_eq!(stream.end_wait(), (0, false));
        hub.apply([at(Change::Bookmark(Kind::Pod), 20)]);
        assert_eq!(stream.end_wait(), (2, true));
        let expected = ["10.0.0.1:2".to_owned(), "10.0.0.1:4".to_owned()];
        assert_eq!(names(&mut stream), expected.into());
        assert_eq!(stream.behind_until(), None);
        // A later epoch, or a client that lies.
        stream.subscribe(subscribe(5, known(1, 1000))).unwrap();
        assert_eq!(claims.pending(Subject::Epoch), 1);
        let until = stream.behind_until().unwrap();
        assert_eq!(until, Instant::now() + MAX_CATCH_UP);
        tokio::time::advance(MAX_CATCH_UP).await;
        assert_eq!(stream.end_wait(), (1, false));
        assert_eq!(names(&mut stream), ["10.0.0.1:5".to_owned()].into());
    }

    #[test]
    fn waiting_subscriptions_are_charged() {
        let hub = hub_at(10);
        let quotas = Quotas::with_subscriptions(10);
        let charge = quotas.connect("", "");
        let mut stream = Subscriptions::new(hub.watch_resources(None), None, charge, false);
        for port in 1..=100 {
            let destination = SocketAddr::from(([10, 0, 0, 1], port));
            let request = proto::Subscribe {
                known_position: known(20, 0),
                ..subscribe(destination, "")
            };
            stream.subscribe(request).unwrap();
        }
        assert_eq!((stream.behind.len(), stream.refused.len()), (10, 90));
    }

    #[test]
    fn streams_share_the_encoding_of_endpoints_and_of_differences() {
        let (hub, mut objects) = hub_with_service(1000);
        // Another address, and another resource, with the same endpoints.
        let Some(Object::Service(web)) = objects.iter_mut().rev().nth(1) else {
            panic!("the Service comes before its slice")
        };
        web.external_ips.push("192.0.2.1".parse().unwrap());
        hub.apply([apply(Object::Service(web.clone()))]);
        let backend = proto::Subscribe {
            name: "shop/web:80".to_owned(),
            r#type: ResourceType::Backend.into(),
            ..proto::Subscribe::default()
        };
        let requests = [
            subscribe("10.96.0.1:80".parse().unwrap(), ""),
            subscribe("192.0.2.1:80".parse().unwrap(), ""),
            backend,
        ];
        let mut streams = [stream(&hub), stream(&hub)];
        let shared = |streams: &mut [Subscriptions; 2], expected: Sent| {
            let mut pointers = HashSet::new();
            for stream in streams {
                for _ in 0..requests.len() {
                    let (kind, parts) = stream.next_response().unwrap();
                    assert_eq!(kind, expected);
                    pointers.insert(parts.last().unwrap().as_ptr());
                }
                assert!(stream.next_response().is_none());
            }
            pointers.len()
        };
        for stream in &mut streams {
            for request in &requests {
                stream.subscribe(request.clone()).unwrap();
            }
        }
        assert_eq!(shared(&mut streams, Sent::Snapshot), 1);
        hub.apply([without_last_endpoint(&mut objects)]);
        assert_eq!(shared(&mut streams, Sent::Delta), 1);
    }

    #[test]
    fn short_responses_share_a_frame_and_long_parts_do_not() {
        let (hub, _) = hub_with_service(200);
        let mut stream = stream(&hub);
        for address in ["10.0.0.1", "10.0.0.2", "10.96.0.1", "10.0.0.3", "10.0.0.4"] {
            let destination = SocketAddr::new(address.parse().unwrap(), 80);
            stream.subscribe(subscribe(destination, "")).unwrap();
        }
        let frames = frames(&mut stream);
        let is_short = |frame: &Bytes| frame.len() < MAX_SHARED_FRAME_BYTES;
        assert_eq!(
            frames.iter().map(is_short).collect::<Vec<_>>(),
            [true, false, true]
        );
        let names = messages(frames).into_iter().map(|message| message.name);
        let names = names.collect::<Vec<_>>().join(" ");
        assert_eq!(
            names,
            "10.0.0.1:80 10.0.0.2:80 10.96.0.1:80 10.0.0.3:80 10.0.0.4:80"
        );
    }

    #[test]
    fn large_service_is_sent_in_parts_and_then_by_difference() {
        const ENDPOINTS: u32 = 20_000;
        let (hub, mut objects) = hub_with_service(ENDPOINTS);
        let destination = "10.96.0.1:80".parse().unwrap();
        let mut streams = [false, true].map(|is_earlier| {
            let resources = hub.watch_resources(None);
            let mut stream = Subscriptions::new(resources, None, charge(), is_earlier);
            stream.subscribe(subscribe(destination, "")).unwrap();
            stream
        });
        let [parts, whole] = streams.each_mut().map(|stream| messages(frames(stream)));
        assert!(parts.iter().all(|part| part.encoded_len() < 1024 * 1024));
        let more: Vec<bool> = parts.iter().map(|part| part.more).collect();
        assert_eq!(more, [true, true, true, true, false]);
        // Clients of an earlier release read one message.
        assert_eq!((whole.len(), whole[0].more), (1, false));
        let (mut proxy, mut received) = (ProxyState::default(), Vec::new());
        for part in parts {
            proxy.apply(part);
            received.extend(proxy.endpoints.values().cloned());
        }
        let mut expected = ProxyState::default();
        expected.apply(whole[0].clone());
        received.sort_by(|one, other| one.address.cmp(&other.address));
        assert_eq!(received.len(), ENDPOINTS as usize);
        assert!(received.iter().eq(expected.endpoints.values()));
        hub.apply([without_last_endpoint(&mut objects)]);
        for stream in &mut streams {
            let frames = frames(stream);
            assert!(frames.concat().len() < 256);
            let Some(Response::Delta(delta)) = messages(frames).remove(0).update else {
                panic!("a difference")
            };
            assert_eq!((delta.upserted.len(), delta.removed.len()), (0, 1));
        }
    }

    #[test]
    fn refused_subscriptions_end_no_stream_and_follow_when_others_end() {
        let hub = Hub::default();
        let quotas = Quotas::with_subscriptions(100);
        let [mut one, mut other] = ["1", "2"].map(|uid| {
            let charge = quotas.connect("shop", uid);
            Subscriptions::new(hub.watch_resources(None), None, charge, false)
        });
        let destination = |port| SocketAddr::from(([10, 0, 0, 1], port));
        for port in 1..=100 {
            one.subscribe(subscribe(destination(port), "")).unwrap();
        }
        for port in 1..=60 {
            other.subscribe(subscribe(destination(port), "")).unwrap();
        }
        // The other one has its share. Both keep what they have.
        for port in 101..=102 {
            one.subscribe(subscribe(destination(port), "")).unwrap();
        }
        assert_eq!(messages(frames(&mut one)).len(), 100);
        assert_eq!(messages(frames(&mut other)).len(), 50);
        assert!(other.has_refused());
        other.retry().unwrap();
        assert!(other.has_refused() && frames(&mut other).is_empty());
        drop(one);
        other.retry().unwrap();
        assert!(!other.has_refused());
        assert_eq!(messages(frames(&mut other)).len(), 10);
    }

    /// A cluster with a pod, and the limits of its requests: they take about so many bytes.
    fn hub_with_limits(bytes: usize) -> (Hub, PodRef) {
        let hub = Hub::default();
        let client = crate::index::tests::pod("client", &[]);
        let pod = PodRef {
            namespace: client.key.namespace.clone(),
            name: client.key.name.clone(),
            uid: client.uid.clone(),
        };
        let web = crate::index::tests::service("web", &["10.96.0.1"]);
        hub.apply([Object::Service(web), Object::Pod(client), limits(bytes)].map(apply));
        (hub, pod)
    }

    fn limits(bytes: usize) -> Object {
        let matches: Vec<_> = std::iter::repeat_n("v".repeat(1000), bytes / 1000)
            .map(|value| serde_json::json!({"headers": [{"name": "h", "value": value}]}))
            .collect();
        let limit = serde_json::json!({"name": "all", "requests": 7, "matches": matches});
        let limits = serde_json::json!({"rateLimits": [limit]});
        Object::Policy(crate::kinds::policy::tests::policy("p", 0, limits))
    }

    fn own() -> proto::Subscribe {
        proto::Subscribe {
            r#type: ResourceType::Self_.into(),
            ..proto::Subscribe::default()
        }
    }

    #[test]
    fn state_of_a_pod_is_charged_by_its_length_while_it_is_subscribed_to() {
        let (hub, pod) = hub_with_limits(20_000);
        let quotas = Quotas::with_subscriptions(50);
        let open = |uid| {
            let resources = hub.watch_resources(Some(pod.clone()));
            let charge = quotas.connect("shop", uid);
            Subscriptions::new(resources, Some(pod.clone()), charge, false)
        };
        let used = || quotas.charged().0;
        let mut stream = open("1");
        stream.subscribe(own()).unwrap();
        let heavy = messages(frames(&mut stream)).remove(0);
        let bytes = heavy.encoded_len();
        assert!(bytes > 20_000 && (2 * bytes..2 * bytes + 2500).contains(&used()));
        // As often as it is subscribed to anew.
        let before = used();
        stream.subscribe(own()).unwrap();
        frames(&mut stream);
        assert_eq!(used(), before);
        hub.apply([apply(limits(1000))]);
        frames(&mut stream);
        assert!(used() < 5000, "{}", used());
        // The client keeps what it has, and asks again for what the budget does not have.
        let mut large = quotas.connect("shop", "2");
        large.add(90 * 1024 - used()).unwrap();
        hub.apply([apply(limits(20_000))]);
        let mut third = open("3");
        third.subscribe(own()).unwrap();
        for stream in [&mut stream, &mut third] {
            assert_eq!((frames(stream).len(), stream.has_refused()), (0, true));
            let refused = stream.refusals();
            assert!(refused.notified().now_or_never().is_some());
            stream.retry().unwrap();
            assert_eq!((frames(stream).len(), stream.has_refused()), (0, true));
        }
        drop(large);
        stream.retry().unwrap();
        assert_eq!(messages(frames(&mut stream)).remove(0).update, heavy.update);
        assert_eq!(used(), before);
        let unsubscribe = proto::Unsubscribe {
            r#type: ResourceType::Self_.into(),
            ..proto::Unsubscribe::default()
        };
        stream.unsubscribe(unsubscribe).unwrap();
        assert_eq!(used(), 0);
        third.retry().unwrap();
        assert_eq!((messages(frames(&mut third)).len(), used()), (1, before));
        drop(third);
        assert_eq!(used(), 0);
    }

    #[test]
    fn reasons_of_rejections_are_charged() {
        let (hub, _) = hub_with_service(1);
        let quotas = Quotas::with_subscriptions(2);
        let charge = quotas.connect("shop", "1");
        let mut stream = Subscriptions::new(hub.watch_resources(None), None, charge, false);
        let web: SocketAddr = "10.96.0.1:80".parse().unwrap();
        stream.subscribe(subscribe(web, "")).unwrap();
        let mut acknowledge = |reason: &str, filled: usize| {
            let version = messages(frames(&mut stream)).remove(0).version;
            let mut others = stream.charged.beside();
            others.add(filled).unwrap();
            stream.acknowledge(&proto::Acknowledgement {
                name: web.to_string(),
                version,
                rejection: reason.to_owned(),
                ..proto::Acknowledgement::default()
            });
            drop(others);
            let used = quotas.charged().0 - SUBSCRIPTION_BYTES;
            stream.subscribe(subscribe(web, "")).unwrap();
            used
        };
        // Characters of four bytes.
        let reason = "𠀀".repeat(1000);
        assert_eq!(acknowledge(&reason, 0), 4 * MAX_REASON_CHARS);
        assert_eq!(acknowledge("", 0), 0);
        assert_eq!(acknowledge(&reason, 2000), 0, "it is left out");
        assert_eq!(acknowledge("short", 0), 5);
        drop(stream);
        assert_eq!(quotas.charged().0, 0);
    }

    #[test]
    fn own_pod_has_no_name() {
        let (hub, pod) = hub_with_limits(0);
        let resources = hub.watch_resources(Some(pod.clone()));
        let mut stream = Subscriptions::new(resources, Some(pod), charge(), false);
        let request = proto::Subscribe {
            name: "x".repeat(200_000),
            ..own()
        };
        let status = stream.subscribe(request).unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().len() < 100, "{status}");
    }

    /// The last condition of a policy of generation 7.
    async fn condition(hub: &Hub, id: &(Kind, Key)) -> String {
        for _ in 0..2 {
            hub.review().await;
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        let status = hub.get(id).unwrap().unwrap();
        let conditions = status.parents[0].conditions.clone();
        let last = conditions.into_iter().next_back().unwrap();
        last.message.replace("pods have generation 7", "have it")
    }

    #[tokio::test(start_paused = true)]
    async fn proxy_whose_limits_are_refused_does_not_have_them() {
        let (hub, pod) = hub_with_limits(2000);
        let quotas = Quotas::with_subscriptions(3);
        let charge = quotas.connect("shop", "1");
        let mut others = charge.beside();
        let resources = hub.watch_resources(Some(pod.clone()));
        let mut stream = Subscriptions::new(resources, Some(pod), charge, false);
        stream.subscribe(own()).unwrap();
        assert!(frames(&mut stream).is_empty() && stream.has_refused());
        let id = (Kind::TrafficPolicy, Key::new("shop", "p"));
        let waiting = "0 of 1 have it; not: client (not acknowledged yet)";
        assert_eq!(condition(&hub, &id).await, waiting);
        // They fit now.
        hub.apply([apply(limits(1000))]);
        stream.retry().unwrap();
        let version = messages(frames(&mut stream)).remove(0).version;
        assert!(others.add(SUBSCRIPTION_BYTES).is_err());
        assert_eq!(condition(&hub, &id).await, waiting);
        stream.acknowledge(&proto::Acknowledgement {
            version,
            r#type: ResourceType::Self_.into(),
            ..proto::Acknowledgement::default()
        });
        assert_eq!(condition(&hub, &id).await, "1 of 1 have it");
    }

    #[tokio::test(start_paused = true)]
    async fn acknowledgements_count_for_the_state_that_was_sent_alone() {
        let (hub, _) = hub_with_service(1);
        let limits = serde_json::json!({"connections": {"maxRequests": 1}});
        let client = crate::index::tests::pod("client", &[]);
        let pod = PodRef {
            namespace: client.key.namespace.clone(),
            name: client.key.name.clone(),
            uid: client.uid.clone(),
        };
        let policy = crate::kinds::policy::tests::policy("p", 0, limits);
        let id = (Kind::TrafficPolicy, policy.key.clone());
        hub.apply([Object::Pod(client), Object::Policy(policy)].map(apply));
        let message = async || condition(&hub, &id).await;
        let resources = hub.watch_resources(Some(pod.clone()));
        let mut stream = Subscriptions::new(resources, Some(pod.clone()), charge(), false);
        let web = "10.96.0.1:80".parse().unwrap();
        stream.subscribe(subscribe(web, "")).unwrap();
        let version = messages(frames(&mut stream)).remove(0).version;
        let waiting = "0 of 1 have it; not: client (not acknowledged yet)";
        let acknowledgement = proto::Acknowledgement {
            name: web.to_string(),
            version: version.clone(),
            rejection: format!("bad\n\u{1b}[2J\u{202e}{}", "y".repeat(100_000)),
            part: Part::Policy.into(),
            ..proto::Acknowledgement::default()
        };
        let others = [
            ("10.96.0.1:81", &*version, 0),
            ("nonsense", &*version, 0),
            ("10.96.0.1:80", "", 0),
            ("10.96.0.1:80", &*"0".repeat(32), 0),
            ("10.96.0.1:80", &*version, 77),
            ("", &*version, ResourceType::Self_.into()),
        ];
        for (name, version, kind) in others {
            stream.acknowledge(&proto::Acknowledgement {
                name: name.to_owned(),
                version: version.to_owned(),
                r#type: kind,
                ..proto::Acknowledgement::default()
            });
            assert_eq!(message().await, waiting, "{name} {version} {kind}");
        }
        stream.acknowledge(&acknowledgement);
        let reason = format!("bad  [2J {}", "y".repeat(MAX_REASON_CHARS - 9));
        let rejected = format!("0 of 1 have it; not: client (rejected: {reason})");
        assert_eq!(message().await, rejected);
        // A proxy that resumes names the version that it applies.
        for (known, expected) in [("", waiting), (&*version, "1 of 1 have it")] {
            let resources = hub.watch_resources(Some(pod.clone()));
            let mut stream = Subscriptions::new(resources, Some(pod.clone()), charge(), false);
            stream.subscribe(subscribe(web, known)).unwrap();
            frames(&mut stream);
            assert_eq!(message().await, expected, "{known}");
        }
    }

    #[test]
    fn withheld_state_gets_no_answer_and_the_client_keeps_what_it_has() {
        let (hub, _) = hub_with_service(1);
        let service = "10.96.0.1:80".parse().unwrap();
        let mut before = stream(&hub);
        before.subscribe(subscribe(service, "")).unwrap();
        let version = messages(frames(&mut before)).remove(0).version;
        // Another replica, which cannot read a kind.
        let (hub, _) = hub_with_service(1);
        hub.apply([Change::Unreadable(Kind::TcpRoute)]);
        let [mut known, mut new] = [(); 2].map(|()| stream(&hub));
        known.subscribe(subscribe(service, &version)).unwrap();
        new.subscribe(subscribe(service, "")).unwrap();
        new.subscribe(subscribe("10.64.0.0:80".parse().unwrap(), ""))
            .unwrap();
        assert!(frames(&mut known).is_empty());
        let served = messages(frames(&mut new));
        assert_eq!(served.len(), 1, "the pod by its own address: {served:?}");
        hub.apply([Change::Reset(Kind::TcpRoute, vec![])]);
        let update = |stream: &mut Subscriptions| messages(frames(stream)).remove(0).update;
        assert!(matches!(update(&mut known), Some(Response::Unchanged(_))));
        assert!(matches!(update(&mut new), Some(Response::Snapshot(_))));
    }

    #[test]
    fn proxies_are_told_what_is_outside_and_what_pods_may_call_there() {
        use crate::index::tests::{endpoint, service, slice};
        use crate::kinds::Node;
        use crate::kinds::authorization::tests::policy;

        let spec = serde_json::json!({
            "targetRefs": [{"kind": "Pod", "selector": {}}], "direction": "Outbound",
            "defaultAction": "DENY",
        });
        let node = Node {
            key: Key::new("", "n"),
            addresses: vec!["10.1.0.1".parse().unwrap()],
            unready: false,
            zone: "".into(),
        };
        let hub = Hub::default();
        hub.apply([
            apply(Object::Node(node)),
            apply(Object::Service(service("web", &["10.96.0.1"]))),
            apply(Object::Slice(slice(
                "s",
                "web",
                443,
                vec![endpoint("203.0.113.1", "")],
            ))),
            apply(Object::Pod(crate::index::tests::pod("p", &["10.0.0.1"]))),
            apply(Object::Authorization(policy("shop", "closed", &spec))),
        ]);
        let pod = PodRef {
            namespace: "shop".into(),
            name: "p".into(),
            uid: "".into(),
        };
        let resources = hub.watch_resources(Some(pod.clone()));
        let mut stream = Subscriptions::new(resources, Some(pod), charge(), false);
        let mut update = |name: &str, kind: ResourceType| {
            let request = proto::Subscribe {
                name: name.to_owned(),
                r#type: kind.into(),
                ..proto::Subscribe::default()
            };
            stream.subscribe(request).unwrap();
            messages(frames(&mut stream)).remove(0).update.unwrap()
        };
        let destination = ResourceType::Destination;
        let Response::Snapshot(web) = update("10.96.0.1:80", destination) else {
            panic!("a Service")
        };
        assert!(web.endpoints[0].outside);
        for (address, node) in [("10.1.0.1:22", true), ("10.1.0.2:22", false)] {
            let expected = Response::Unknown(proto::Unknown { node });
            assert_eq!(update(address, destination), expected);
        }
        let Response::Workload(own) = update("", ResourceType::Self_) else {
            panic!("the state of the pod")
        };
        assert!(own.authorization.is_none() && own.egress.unwrap().deny_by_default);
    }

    #[test]
    fn response_has_the_name_as_the_client_wrote_it() {
        let mut stream = stream(&Hub::default());
        for name in ["10.0.0.1:80", "[::ffff:10.0.0.2]:80"] {
            let request = proto::Subscribe {
                name: name.to_owned(),
                ..proto::Subscribe::default()
            };
            stream.subscribe(request).unwrap();
            let response = messages(frames(&mut stream)).remove(0);
            assert_eq!(response.name, name);
        }
    }
}
