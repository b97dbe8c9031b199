//! One Discover stream: subscriptions in, states of destinations out; the trust roots first, and
//! after each change.
//!
//! Reads never wait for writes. Notifications of a slow client wait in its queue as addresses, and
//! a response is made from the latest state when the stream has capacity.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use diy_mesh_proto::mesh::v1 as proto;
use proto::discover_request::Action;
use proto::discover_response::Update as Response;
use tokio::sync::OwnedSemaphorePermit;
use tonic::{Status, Streaming};

use super::message;
use super::responses::{Capacity, Responses};
use crate::authority::{Trust, TrustReceiver};
use crate::hub::Destinations;
use crate::index::state::{State, Update};
use crate::metrics::Metrics;
use crate::proxies::{self, ConnectedGuard};
use crate::quota::Quota;

/// The length of a destination, the longest of which is an IPv6 address with a scope and a port,
/// and of a version.
const MAX_NAME_BYTES: usize = 64;
/// The length of versions and numbers in a proxy's status.
const MAX_TEXT_BYTES: usize = 128;

/// Serves one stream until the client disconnects or sends an invalid request.
pub(super) async fn run(
    mut subscriptions: Subscriptions,
    mut trust: TrustReceiver,
    proxy: &ConnectedGuard,
    metrics: &Metrics,
    mut requests: Streaming<proto::DiscoverRequest>,
    responses: &Responses<proto::DiscoverResponse>,
) -> Result<(), Status> {
    trust.mark_changed();
    let mut reading = true;
    loop {
        tokio::select! {
            permit = permit_for_roots(&mut trust, responses) => {
                let Some(permit) = permit else { return Ok(()) };
                send(permit, roots(&trust.borrow_and_update()), metrics);
            }
            request = requests.message(), if reading => match request? {
                Some(proto::DiscoverRequest { action: Some(Action::Status(status)) }) => {
                    proxy.update(proxy_status(status, SystemTime::now())?);
                }
                Some(request) => subscriptions.apply(request)?,
                // The client sends no more requests, and may still read.
                None => reading = false,
            },
            // Roots first: without them, a proxy cannot verify endpoints.
            permit = permit_for_update(&subscriptions.subscriber, responses), if !trust.has_changed().unwrap_or(false) => {
                let Some(permit) = permit else { return Ok(()) };
                if let Some(response) = subscriptions.next_response() {
                    send(permit, response, metrics);
                }
            }
        }
    }
}

/// Waits for a notification and for capacity. `None`: the client has disconnected. Cancel-safe: the
/// notification stays queued.
async fn permit_for_update<'a>(
    subscriber: &Destinations,
    responses: &'a Responses<proto::DiscoverResponse>,
) -> Option<Capacity<'a, proto::DiscoverResponse>> {
    subscriber.wait().await;
    responses.reserve().await
}

/// Waits for unsent roots and for capacity. `None`: the client has disconnected. Cancel-safe: the
/// roots stay marked as changed until they are sent.
async fn permit_for_roots<'a>(
    trust: &mut TrustReceiver,
    responses: &'a Responses<proto::DiscoverResponse>,
) -> Option<Capacity<'a, proto::DiscoverResponse>> {
    if trust.changed().await.is_err() {
        // The authority has ended: there are no further roots.
        std::future::pending::<()>().await;
    }
    trust.mark_changed();
    responses.reserve().await
}

/// The destinations that a client has subscribed to.
pub(super) struct Subscriptions {
    subscriber: Destinations,
    quota: Arc<Quota>,
    by_address: HashMap<SocketAddr, Subscription>,
}

struct Subscription {
    /// The destination as the client wrote it.
    destination: Box<str>,
    known: Known,
    counted: OwnedSemaphorePermit,
}

/// The state of a destination that the client has.
enum Known {
    Nothing,
    /// The version that the client received on an earlier stream.
    Version(String),
    /// The state that was sent on this stream.
    Sent(Arc<State>),
}

impl Subscriptions {
    pub(super) fn new(subscriber: Destinations, quota: Arc<Quota>) -> Subscriptions {
        Subscriptions {
            subscriber,
            quota,
            by_address: HashMap::new(),
        }
    }

    fn apply(&mut self, request: proto::DiscoverRequest) -> Result<(), Status> {
        match request.action {
            Some(Action::Subscribe(proto::Subscribe {
                destination,
                known_version,
            })) => {
                let address = parse(&destination)?;
                if known_version.len() > MAX_NAME_BYTES {
                    return Err(Status::invalid_argument(format!(
                        "known_version of {destination} is longer than {MAX_NAME_BYTES} bytes"
                    )));
                }
                let counted = match self.by_address.remove(&address) {
                    Some(before) => before.counted,
                    None => self.quota.subscriptions(1)?,
                };
                let known = match known_version.is_empty() {
                    true => Known::Nothing,
                    false => Known::Version(known_version),
                };
                let subscription = Subscription {
                    destination: destination.into(),
                    known,
                    counted,
                };
                self.by_address.insert(address, subscription);
                self.subscriber.subscribe(address);
            }
            Some(Action::Unsubscribe(proto::Unsubscribe { destination })) => {
                let address = parse(&destination)?;
                self.by_address.remove(&address);
                self.subscriber.unsubscribe(address);
            }
            // A newer proxy must work with an older controller.
            None | Some(Action::Status(_)) => {
                tracing::debug!("ignoring a request with an action of a later release")
            }
        }
        Ok(())
    }

    /// The next response, if the state of a destination differs from the client's.
    fn next_response(&mut self) -> Option<proto::DiscoverResponse> {
        let (address, state) = self.subscriber.next()?;
        let subscription = self.by_address.get_mut(&address)?;
        let version = state.version.to_string();
        let update = match &subscription.known {
            Known::Version(known) if *known == version => Response::Unchanged(proto::Unchanged {}),
            Known::Nothing | Known::Version(_) => whole(&state),
            Known::Sent(before) => match state.since(before) {
                Update::Nothing => return None,
                Update::Whole => whole(&state),
                Update::Difference(delta) => Response::Delta(message::delta(&delta)),
            },
        };
        subscription.known = Known::Sent(state);
        Some(proto::DiscoverResponse {
            destination: subscription.destination.to_string(),
            version,
            update: Some(update),
        })
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
        destination: String::new(),
        version: trust.roots.version.clone(),
        update: Some(Response::Roots(roots)),
    }
}

fn whole(state: &State) -> Response {
    match &state.target {
        Some(target) => Response::Snapshot(message::snapshot(target)),
        None => Response::Unknown(proto::Unknown {}),
    }
}

fn send(
    permit: Capacity<'_, proto::DiscoverResponse>,
    response: proto::DiscoverResponse,
    metrics: &Metrics,
) {
    let counter = match response.update {
        Some(Response::Snapshot(_)) => &metrics.snapshots,
        Some(Response::Delta(_)) => &metrics.deltas,
        Some(Response::Unchanged(_)) => &metrics.unchanged,
        Some(Response::Roots(_)) => &metrics.roots,
        Some(Response::Unknown(_)) | None => &metrics.unknown,
    };
    counter.inc();
    permit.send(response);
}

/// Parses a destination. IPv4-mapped IPv6 addresses become IPv4 addresses; scope IDs are ignored.
fn parse(destination: &str) -> Result<SocketAddr, Status> {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::hub::Hub;
    use crate::index::tests::Chance;

    /// The state of a destination in a proxy.
    #[derive(Debug, Default, PartialEq)]
    struct ProxyState {
        version: String,
        /// Kind, namespace, name, application protocol; none while it is unknown.
        target: Option<(i32, String, String, String)>,
        endpoints: BTreeMap<String, proto::Endpoint>,
    }

    impl ProxyState {
        fn apply(&mut self, response: proto::DiscoverResponse) {
            let by_address = |endpoint: proto::Endpoint| (endpoint.address.clone(), endpoint);
            self.version = response.version;
            match response.update.unwrap() {
                Response::Unchanged(_) | Response::Roots(_) => {}
                Response::Unknown(_) => (self.target, self.endpoints) = (None, BTreeMap::new()),
                Response::Snapshot(snapshot) => {
                    self.target = Some((
                        snapshot.kind,
                        snapshot.namespace,
                        snapshot.name,
                        snapshot.app_protocol,
                    ));
                    self.endpoints = snapshot.endpoints.into_iter().map(by_address).collect();
                }
                Response::Delta(delta) => {
                    for address in delta.removed {
                        assert!(
                            self.endpoints.remove(&address).is_some(),
                            "only what is there is removed"
                        );
                    }
                    self.endpoints
                        .extend(delta.upserted.into_iter().map(by_address));
                }
            }
        }
    }

    fn stream(hub: &Hub) -> Subscriptions {
        Subscriptions::new(hub.watch_destinations(), Arc::default())
    }

    fn subscribe(destination: SocketAddr, known_version: &str) -> proto::DiscoverRequest {
        let subscribe = proto::Subscribe {
            destination: destination.to_string(),
            known_version: known_version.to_owned(),
        };
        proto::DiscoverRequest {
            action: Some(Action::Subscribe(subscribe)),
        }
    }

    fn read(
        stream: &mut Subscriptions,
        received: &mut BTreeMap<SocketAddr, ProxyState>,
        at_most: usize,
    ) {
        for _ in 0..at_most {
            if let Some(response) = stream.next_response() {
                received
                    .entry(response.destination.parse().unwrap())
                    .or_default()
                    .apply(response);
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
                        let subscribed: Vec<SocketAddr> = slow.by_address.keys().copied().collect();
                        slow = stream(&hub);
                        for destination in subscribed {
                            let known = received
                                .get(&destination)
                                .map_or("", |received: &ProxyState| &received.version);
                            slow.apply(subscribe(destination, known)).unwrap();
                        }
                    }
                    1..4 => {
                        let all = Chance::destinations();
                        slow.apply(subscribe(all[chance.0.usize(..all.len())], ""))
                            .unwrap();
                    }
                    4..6 => read(&mut slow, &mut received, step % 4),
                    _ => hub.apply([chance.change()]),
                }
            }
            read(&mut slow, &mut received, 1000);
            let (mut fresh, mut expected) = (stream(&hub), BTreeMap::new());
            for destination in slow.by_address.keys() {
                fresh.apply(subscribe(*destination, "")).unwrap();
            }
            read(&mut fresh, &mut expected, 1000);
            assert_eq!(received, expected, "seed {seed}");
        }
    }

    #[test]
    fn accepts_only_addresses_with_port_as_destinations() {
        assert_eq!(
            parse("10.96.0.7:80").unwrap(),
            "10.96.0.7:80".parse().unwrap()
        );
        assert_eq!(
            parse("[fd00::7]:80").unwrap(),
            "[fd00::7]:80".parse().unwrap()
        );
        assert_eq!(
            parse("[::ffff:10.96.0.7]:80").unwrap(),
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
            let status = parse(text).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(
                status.message().contains(&format!("{text:?}")),
                "{}",
                status.message()
            );
        }
    }
}
