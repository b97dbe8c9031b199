//! One Discover stream: subscriptions in, what they stand for out.
//!
//! Reading never waits for writing, nor does a slow reader hold anything up: its news wait in a mailbox as a list of addresses, and
//! an answer is made, from the latest state, once there is room for it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::discover_request::Action;
use proto::discover_response::Update as Answer;
use tokio::sync::mpsc::{self, Permit};
use tonic::{Status, Streaming};

use super::{Context, message, service};
use crate::hub::Destinations;
use crate::index::state::{State, Update};
use crate::metrics::Metrics;

/// Far more than a pod meets; a proxy forgets idle ones.
const MOST_SUBSCRIPTIONS: usize = 10_000;

type Answers = mpsc::Sender<Result<proto::DiscoverResponse, Status>>;

/// Serves one stream until the caller leaves, errs, or the controller stops.
pub(super) async fn run(context: Context, mut requests: Streaming<proto::DiscoverRequest>, answers: Answers) {
    let _open = context.metrics.discover_streams.hold();
    let mut stream = Stream { news: context.hub.watch_destinations(), subscriptions: HashMap::new() };
    let mut reading = true;
    let end = loop {
        tokio::select! {
            () = context.stopping.cancelled() => break service::stopping(),
            () = answers.closed() => return,
            request = requests.message(), if reading => match request {
                Ok(Some(request)) => if let Err(status) = stream.take(request) { break status },
                // The caller has no more to say, and may still listen.
                Ok(None) => reading = false,
                Err(_) => return,
            },
            room = room_for_news(&stream.news, &answers) => {
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

/// Loses nothing when it is dropped: the news stays where it is until there is room. None: the caller has left.
async fn room_for_news<'a>(news: &Destinations, answers: &'a Answers) -> Option<Permit<'a, Result<proto::DiscoverResponse, Status>>> {
    news.wait().await;
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
            Some(Action::Subscribe(proto::Subscribe { destination, known_version })) => {
                let address = parse(&destination)?;
                if self.subscriptions.len() >= MOST_SUBSCRIPTIONS && !self.subscriptions.contains_key(&address) {
                    return Err(Status::resource_exhausted(format!(
                        "{MOST_SUBSCRIPTIONS} destinations are subscribed to on this stream, which is the most; unsubscribe from idle ones"
                    )));
                }
                let has = if known_version.is_empty() { Has::Nothing } else { Has::Version(known_version) };
                self.subscriptions.insert(address, Subscription { destination: destination.into(), has });
                self.news.subscribe(address);
            }
            Some(Action::Unsubscribe(proto::Unsubscribe { destination })) => {
                let address = parse(&destination)?;
                self.subscriptions.remove(&address);
                self.news.unsubscribe(address);
            }
            // An action of a later version of the contract.
            None => return Err(Status::invalid_argument("the request has no action that this controller knows (subscribe, unsubscribe)")),
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
        Some(proto::DiscoverResponse { destination: subscription.destination.to_string(), version, update: Some(update) })
    }
}

fn whole(state: &State) -> Answer {
    match &state.target {
        Some(target) => Answer::Snapshot(message::snapshot(target)),
        None => Answer::Unknown(proto::Unknown {}),
    }
}

fn count(metrics: &Metrics, answer: &proto::DiscoverResponse) {
    match answer.update {
        Some(Answer::Snapshot(_)) => metrics.snapshots.add(1),
        Some(Answer::Delta(_)) => metrics.deltas.add(1),
        Some(Answer::Unchanged(_)) => metrics.unchanged.add(1),
        Some(Answer::Unknown(_)) | None => metrics.unknown.add(1),
    }
}

/// An IPv4 address in IPv6 clothes is the IPv4 address, and scopes mean nothing across machines.
fn parse(destination: &str) -> Result<SocketAddr, Status> {
    let address = destination.parse::<SocketAddr>().ok().filter(|address| address.port() != 0);
    address.map(|address| SocketAddr::new(address.ip().to_canonical(), address.port())).ok_or_else(|| {
        Status::invalid_argument(format!(
            "destination {destination:?} is not ADDRESS:PORT, for example \"10.96.0.7:80\" or \"[fd00::7]:80\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_addresses_with_a_port() {
        assert_eq!(parse("10.96.0.7:80").unwrap(), "10.96.0.7:80".parse().unwrap());
        assert_eq!(parse("[fd00::7]:80").unwrap(), "[fd00::7]:80".parse().unwrap());
        assert_eq!(parse("[::ffff:10.96.0.7]:80").unwrap(), "10.96.0.7:80".parse().unwrap());
        for text in ["", "10.96.0.7", "10.96.0.7:0", "web.shop:80", "10.96.0.7:80 ", "fd00::7:80"] {
            let status = parse(text).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(&format!("{text:?}")), "{}", status.message());
        }
    }
}
