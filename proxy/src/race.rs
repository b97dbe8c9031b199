//! Step 3, its waiting half: who speaks first decides what a connection carries. While the client is silent the proxy
//! dials, so that a server that speaks first (SMTP, MySQL, SSH) is not kept waiting by the look at the client's bytes.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use crate::balance::{Endpoint, InFlight};
use crate::connect;
use crate::detect::{Protocol, Verdict, announced, classify, take_a_guess};
use crate::error::Failure;
use crate::io::Io;
use crate::worker::Flow;

/// How long a client may be silent before the proxy dials. Whoever speaks first at all does so within this.
const HEAD_START: Duration = Duration::from_millis(2);
/// How long a client that has begun to speak may pause before what it said is taken as it is.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long a client may still begin to speak when there was nobody to connect to.
const SECOND_CHANCE: Duration = Duration::from_secs(1);
/// Endpoints that one connection is tried on at most.
const MAX_TRIES: usize = 3;

/// What the race ended with.
pub struct Start {
    /// What the connection carries.
    pub protocol: Protocol,
    /// The connection that was made meanwhile, if it came to that.
    pub dialed: Option<Dialed>,
}

/// A new connection to an endpoint, which has this one more to carry.
pub struct Dialed {
    /// Where to.
    pub endpoint: Rc<Endpoint>,
    /// The connection.
    pub upstream: Io,
    /// Counts against the endpoint until it is dropped.
    pub in_flight: InFlight,
}

/// Waits for the first word of either side. Fails where there is nobody to connect to, or the client left.
pub async fn first_word(client: &mut Io, flow: &Flow) -> Result<Start, Failure> {
    if let Some(protocol) = announced(flow.destination.app_protocol()) {
        return Ok(Start { protocol, dialed: None });
    }
    if let Ok(listened) = timeout(HEAD_START, listen(client)).await {
        return Ok(Start { protocol: listened?, dialed: None });
    }
    let mut dialed = None;
    let listened = {
        let mut listening = pin!(listen(client));
        let mut speaking = pin!(async {
            match dial(flow).await.map(|new| dialed.insert(new)) {
                // Its word, its end and its failure are all for the copying to pass on.
                Ok(Dialed { upstream, .. }) => Ok(poll_fn(|cx| upstream.poll_fill(cx).map(|_| Protocol::Opaque)).await),
                // A client that was only slow gets its answer in its own protocol.
                Err(failure) => {
                    sleep(SECOND_CHANCE).await;
                    Err(failure)
                }
            }
        });
        poll_fn(|cx| match listening.as_mut().poll(cx) {
            Poll::Pending => speaking.as_mut().poll(cx),
            listened => listened,
        })
        .await
    };
    Ok(Start { protocol: listened?, dialed })
}

/// A connection to one of the destination's endpoints; a second and a third are tried where the first refuses.
pub async fn dial(flow: &Flow) -> Result<Dialed, Failure> {
    let mut avoid: Vec<SocketAddr> = Vec::new();
    loop {
        let endpoint = flow.destination.pick(&avoid, &mut flow.worker.rng.borrow_mut())?;
        let mut in_flight = endpoint.begin();
        match connect::dial(endpoint.address).await {
            Ok(upstream) => {
                in_flight.answered();
                return Ok(Dialed { endpoint, upstream, in_flight });
            }
            Err(failure) => {
                in_flight.failed();
                endpoint.quarantine(Instant::now());
                avoid.push(endpoint.address);
                if avoid.len() >= flow.destination.endpoints_len().min(MAX_TRIES) {
                    return Err(failure);
                }
            }
        }
    }
}

/// The client's word, once it is long enough to tell what it is; what was read stays unread.
async fn listen(client: &mut Io) -> Result<Protocol, Failure> {
    loop {
        let filled = if client.unread().is_empty() {
            poll_fn(|cx| client.poll_fill(cx)).await
        } else {
            match timeout(PATIENCE, poll_fn(|cx| client.poll_fill(cx))).await {
                Ok(filled) => filled,
                Err(_) => return Ok(take_a_guess(client.unread())),
            }
        };
        match filled {
            // The client said nothing and half-closed: the server may have something to say yet.
            Ok(0) => return Ok(take_a_guess(client.unread())),
            Ok(_) => {}
            Err(error) => return Err(left(&error)),
        }
        if let Verdict::Known(protocol) = classify(client.unread()) {
            return Ok(protocol);
        }
    }
}

fn left(error: &io::Error) -> Failure {
    tracing::debug!("the client left before it said anything: {error}");
    Failure::BadRequest("the client left before it said anything")
}
