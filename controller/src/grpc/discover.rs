//! One Discover stream: subscriptions in, what they stand for out; the trust roots first, and
//! whenever they change.
//!
//! Reading never waits for writing, nor does a slow reader hold anything up: its news wait in a
//! mailbox as a list of addresses, and an answer is made, from the latest state, once there is room
//! for it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_runtime::metrics::Active;
use proto::discover_request::Action;
use proto::discover_response::Update as Answer;
use tokio::sync::mpsc::{self, Permit};
use tokio::sync::watch;
use tonic::{Status, Streaming};

use super::{Context, message, service};
use crate::authenticate::Caller;
use crate::authority::Trust;
use crate::hub::Destinations;
use crate::index::state::{State, Update};
use crate::metrics::Metrics;
use crate::proxies;

/// Far more than a pod meets; a proxy forgets idle ones.
const MAX_SUBSCRIPTIONS: usize = 10_000;
/// The longest text in a proxy's status; all are versions and numbers.
const MAX_TEXT_BYTES: usize = 128;

type Answers = mpsc::Sender<Result<proto::DiscoverResponse, Status>>;

/// Serves one stream until the caller leaves, errs, or the controller stops.
pub(super) async fn run(
    context: Context,
    caller: Caller,
    mut requests: Streaming<proto::DiscoverRequest>,
    answers: Answers,
) {
    let _open = Active::new(&context.metrics.discover_streams);
    let mut stream = Stream {
        news: context.hub.watch_destinations(),
        subscriptions: HashMap::new(),
    };
    let place = context.proxies.connect(&caller, SystemTime::now());
    let mut trust = context.authority.trust();
    trust.mark_changed();
    let mut reading = true;
    let end = loop {
        tokio::select! {
            () = context.stopping.cancelled() => break service::stopping(),
            () = answers.closed() => return,
            room = room_for_roots(&mut trust, &answers) => {
                let Some(room) = room else { return };
                let answer = roots(&trust.borrow_and_update());
                count(&context.metrics, &answer);
                room.send(Ok(answer));
            }
            request = requests.message(), if reading => match request {
                Ok(Some(proto::DiscoverRequest { action: Some(Action::Status(status)) })) => match says(status, SystemTime::now()) {
                    Ok(status) => place.says(status),
                    Err(status) => break status,
                },
                Ok(Some(request)) => if let Err(status) = stream.take(request) { break status },
                // The caller has no more to say, and may still listen.
                Ok(None) => reading = false,
                Err(status) => break status,
            },
            // Roots first: nothing of what follows is of use to a proxy that cannot verify it.
            room = room_for_news(&stream.news, &answers), if !trust.has_changed().unwrap_or(false) => {
                let Some(room) = room else { return };
                if let Some(answer) = stream.answer() {
                    count(&context.metrics, &answer);
                    room.send(Ok(answer));
                }
            }
        }
    };
    // A caller that reads no more does not hear the reason; the server's drain ends its connection.
    let _ = answers.send(Err(end)).await;
}

/// Loses nothing when it is dropped: the news stays where it is until there is room. None: the
/// caller has left.
async fn room_for_news<'a>(
    news: &Destinations,
    answers: &'a Answers,
) -> Option<Permit<'a, Result<proto::DiscoverResponse, Status>>> {
    news.wait().await;
    answers.reserve().await.ok()
}

/// The same, for roots that are not told yet. Once there is no authority any more, nothing comes.
async fn room_for_roots<'a>(
    trust: &mut watch::Receiver<Arc<Trust>>,
    answers: &'a Answers,
) -> Option<Permit<'a, Result<proto::DiscoverResponse, Status>>> {
    if trust.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
    // Not told before there is room: if this is dropped while it waits, the roots are still to be
    // told.
    trust.mark_changed();
    answers.reserve().await.ok()
}

struct Stream {
    news: Destinations,
    subscriptions: HashMap<SocketAddr, Subscription>,
}

struct Subscription {
    /// The destination as the caller writes it, for the answers.
    destination: Box<str>,
    has: Has,
}

/// What the caller has of a destination.
enum Has {
    Nothing,
    /// What it says that it has, from before a lost stream.
    Version(String),
    /// What we told it.
    Told(Arc<State>),
}

impl Stream {
    fn take(&mut self, request: proto::DiscoverRequest) -> Result<(), Status> {
        match request.action {
            Some(Action::Subscribe(proto::Subscribe {
                destination,
                known_version,
            })) => {
                let address = parse(&destination)?;
                if self.subscriptions.len() >= MAX_SUBSCRIPTIONS
                    && !self.subscriptions.contains_key(&address)
                {
                    return Err(Status::resource_exhausted(format!(
                        "{MAX_SUBSCRIPTIONS} destinations are subscribed to on this stream, which is the most; unsubscribe from idle ones"
                    )));
                }
                let has = if known_version.is_empty() {
                    Has::Nothing
                } else {
                    Has::Version(known_version)
                };
                self.subscriptions.insert(
                    address,
                    Subscription {
                        destination: destination.into(),
                        has,
                    },
                );
                self.news.subscribe(address);
            }
            Some(Action::Unsubscribe(proto::Unsubscribe { destination })) => {
                let address = parse(&destination)?;
                self.subscriptions.remove(&address);
                self.news.unsubscribe(address);
            }
            // An action of a later version of the contract: a newer proxy must be able to live with
            // an older controller.
            None | Some(Action::Status(_)) => {
                tracing::debug!("a request has no action that this controller knows; it is ignored")
            }
        }
        Ok(())
    }

    /// The next answer, if what is new is news to the caller.
    fn answer(&mut self) -> Option<proto::DiscoverResponse> {
        let (address, state) = self.news.next()?;
        let subscription = self.subscriptions.get_mut(&address)?;
        let version = state.version.to_string();
        let update = match &subscription.has {
            Has::Version(known) if *known == version => Answer::Unchanged(proto::Unchanged {}),
            Has::Nothing | Has::Version(_) => whole(&state),
            Has::Told(before) => match state.since(before) {
                Update::Nothing => return None,
                Update::Whole => whole(&state),
                Update::Difference(delta) => Answer::Delta(message::delta(&delta)),
            },
        };
        subscription.has = Has::Told(state);
        Some(proto::DiscoverResponse {
            destination: subscription.destination.to_string(),
            version,
            update: Some(update),
        })
    }
}

/// What a proxy says of itself, in our words. Its texts are kept for as long as it is connected, so
/// they are short.
fn says(status: proto::ProxyStatus, now: SystemTime) -> Result<proxies::Status, Status> {
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
        update: Some(Answer::Roots(roots)),
    }
}

fn whole(state: &State) -> Answer {
    match &state.target {
        Some(target) => Answer::Snapshot(message::snapshot(target)),
        None => Answer::Unknown(proto::Unknown {}),
    }
}

fn count(metrics: &Metrics, answer: &proto::DiscoverResponse) {
    let counter = match answer.update {
        Some(Answer::Snapshot(_)) => &metrics.snapshots,
        Some(Answer::Delta(_)) => &metrics.deltas,
        Some(Answer::Unchanged(_)) => &metrics.unchanged,
        Some(Answer::Roots(_)) => &metrics.roots,
        Some(Answer::Unknown(_)) | None => &metrics.unknown,
    };
    counter.inc();
}

/// An IPv4 address in IPv6 clothes is the IPv4 address, and scopes mean nothing across machines.
fn parse(destination: &str) -> Result<SocketAddr, Status> {
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
        fn take(&mut self, answer: proto::DiscoverResponse) {
            let by_address = |endpoint: proto::Endpoint| (endpoint.address.clone(), endpoint);
            self.version = answer.version;
            match answer.update.unwrap() {
                Answer::Unchanged(_) | Answer::Roots(_) => {}
                Answer::Unknown(_) => (self.target, self.endpoints) = (None, BTreeMap::new()),
                Answer::Snapshot(snapshot) => {
                    self.target = Some((
                        snapshot.kind,
                        snapshot.namespace,
                        snapshot.name,
                        snapshot.app_protocol,
                    ));
                    self.endpoints = snapshot.endpoints.into_iter().map(by_address).collect();
                }
                Answer::Delta(delta) => {
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

    fn stream(hub: &Hub) -> Stream {
        Stream {
            news: hub.watch_destinations(),
            subscriptions: HashMap::new(),
        }
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

    fn read(stream: &mut Stream, kept: &mut BTreeMap<SocketAddr, ProxyState>, at_most: usize) {
        for _ in 0..at_most {
            if let Some(answer) = stream.answer() {
                kept.entry(answer.destination.parse().unwrap())
                    .or_default()
                    .take(answer);
            }
        }
    }

    #[test]
    fn whatever_happens_and_however_slowly_it_reads_a_proxy_ends_with_the_state_that_a_new_one_is_told()
     {
        for seed in 0..50 {
            let mut chance = Chance(fastrand::Rng::with_seed(seed));
            let (hub, mut kept) = (Hub::default(), BTreeMap::new());
            let mut slow = stream(&hub);
            for step in 0..200 {
                match chance.0.u8(..12) {
                    // A stream that is lost, and resumes with what it has.
                    0 => {
                        let subscribed: Vec<SocketAddr> =
                            slow.subscriptions.keys().copied().collect();
                        slow = stream(&hub);
                        for destination in subscribed {
                            let known = kept
                                .get(&destination)
                                .map_or("", |kept: &ProxyState| &kept.version);
                            slow.take(subscribe(destination, known)).unwrap();
                        }
                    }
                    1..4 => {
                        let all = Chance::destinations();
                        slow.take(subscribe(all[chance.0.usize(..all.len())], ""))
                            .unwrap();
                    }
                    4..6 => read(&mut slow, &mut kept, step % 4),
                    _ => hub.apply([chance.change()]),
                }
            }
            read(&mut slow, &mut kept, 1000);
            let (mut fresh, mut told) = (stream(&hub), BTreeMap::new());
            for destination in slow.subscriptions.keys() {
                fresh.take(subscribe(*destination, "")).unwrap();
            }
            read(&mut fresh, &mut told, 1000);
            assert_eq!(kept, told, "seed {seed}");
        }
    }

    #[test]
    fn destinations_are_addresses_with_a_port() {
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
