//! Step 3, its waiting half: who speaks first decides what a connection carries. While the client is silent the proxy
//! dials, so that a server that speaks first (SMTP, MySQL, SSH) is not kept waiting by the look at the client's bytes.

use std::future::{Future, poll_fn, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::balance::{Endpoint, InFlight};
use crate::connect;
use crate::detect::{
    Protocol, Verdict, classify, classify_inbound, classify_inbound_opaque, is_binary,
    is_http2_server, take_a_guess,
};
use crate::error::Failure;
use crate::io::Io;
use crate::policy::Caller;
use crate::tls::{self, Alpn, Hello};
use crate::worker::Flow;

/// How long a client may be silent before the proxy dials. Whoever speaks first at all does so within this.
const HEAD_START: Duration = Duration::from_millis(2);
/// The same where it may be a peer's proxy, whose ClientHello is under way: it is never answered with the app's own first word.
const PEERS_HEAD_START: Duration = Duration::from_millis(100);
/// How long a client that has begun to speak may pause before what it said is taken as it is.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long one may that has begun a TLS handshake.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// How long a client may be silent that has to prove who it is.
const STRANGERS_WORD: Duration = Duration::from_secs(10);
/// How long a client may still begin to speak when there was nobody to connect to.
const SECOND_CHANCE: Duration = Duration::from_secs(1);
/// Endpoints that one connection is tried on at most.
const MAX_TRIES: usize = 3;

/// A new connection to an endpoint, which has this one more to carry.
pub struct Dialed {
    /// Where to.
    pub endpoint: Rc<Endpoint>,
    /// The connection.
    pub upstream: Io,
    /// Counts against the endpoint until it is dropped.
    pub in_flight: InFlight,
}

/// Waits for the first word of either side: what the connection carries. The connection that it makes meanwhile, if it comes to
/// that, is left in `dialed`. Fails where there is nobody to connect to, or the client left.
pub async fn first_word(
    client: &mut Io,
    flow: &Flow,
    declared: Option<Protocol>,
    dialed: &mut Option<Dialed>,
) -> Result<Protocol, Failure> {
    // A peer's proxy speaks first, and once only. Its TLS ends here on an opaque port too.
    let (detector, head_start) = match (&flow.caller, declared) {
        (Caller::Unproven, Some(_)) => (
            Detector {
                classify: classify_inbound_opaque,
                guess: |_| Protocol::Opaque,
            },
            PEERS_HEAD_START,
        ),
        (Caller::Unproven, None) => (
            Detector {
                classify: classify_inbound,
                guess: take_a_guess,
            },
            PEERS_HEAD_START,
        ),
        (_, Some(protocol)) => return Ok(protocol),
        (_, None) => (
            Detector {
                classify,
                guess: take_a_guess,
            },
            HEAD_START,
        ),
    };
    if let Err(refused) = flow.admits_unseen() {
        // The app hears nothing of somebody who may not come in.
        return timeout(STRANGERS_WORD, listen(client, detector))
            .await
            .unwrap_or(Err(refused));
    }
    if let Ok(listened) = timeout(head_start, listen(client, detector)).await {
        return listened;
    }
    let mut listening = pin!(listen(client, detector));
    let mut dialing: Dialing = match dialed.take() {
        Some(dialed) => Box::pin(ready(Ok(dialed))),
        None => {
            let flow = flow.clone();
            Box::pin(async move { dial(&flow, Alpn::Detect).await })
        }
    };
    let either = poll_fn(|cx| match listening.as_mut().poll(cx) {
        Poll::Ready(listened) => Poll::Ready(Either::Listened(listened)),
        Poll::Pending => dialing.as_mut().poll(cx).map(Either::Connected),
    });
    match either.await {
        Either::Listened(listened) => {
            match &listened {
                Ok(Protocol::Http1) => drop(spawn_local(async move {
                    if let Ok(dialed) = dialing.await {
                        keep(dialed).await;
                    }
                })),
                // It needs a connection of its own in any case. A failure is found again by whoever dials next.
                Ok(Protocol::Opaque) => *dialed = dialing.await.ok(),
                _ => {}
            }
            listened
        }
        // A client that was only slow gets its answer in its own protocol.
        Either::Connected(Err(failure)) => timeout(SECOND_CHANCE, listening)
            .await
            .unwrap_or(Err(failure)),
        Either::Connected(Ok(new)) => {
            let upstream = &mut dialed.insert(new).upstream;
            // Its word, its end and its failure are all for the copying to pass on.
            poll_fn(|cx| match listening.as_mut().poll(cx) {
                Poll::Pending => loop {
                    match ready!(upstream.poll_fill(cx)) {
                        Ok(1..) if declared.is_none() && is_http2_server(upstream.unread()) => {}
                        _ => return Poll::Ready(Ok(Protocol::Opaque)),
                    }
                },
                listened => listened,
            })
            .await
        }
    }
}

/// How the protocol is told from the client's bytes.
#[derive(Clone, Copy)]
struct Detector {
    classify: fn(&[u8]) -> Verdict,
    /// The protocol of an unfinished beginning when no more bytes come.
    guess: fn(&[u8]) -> Protocol,
}

/// A connection that is being made.
type Dialing = Pin<Box<dyn Future<Output = Result<Dialed, Failure>>>>;

enum Either {
    Listened(Result<Protocol, Failure>),
    Connected(Result<Dialed, Failure>),
}

/// A connection that was made before its client turned out to speak HTTP/1 is for whoever asks the pool next. Its handshake is not
/// over for the far side until it has heard the last word, which would else wait for the first request.
pub async fn keep(
    Dialed {
        endpoint,
        mut upstream,
        ..
    }: Dialed,
) {
    if upstream.flush().await.is_ok() {
        endpoint.pool.checkin_http1(upstream, Instant::now());
    }
}

/// A connection to one of the destination's endpoints; a second and a third are tried where the first refuses.
pub async fn dial(flow: &Flow, alpn: Alpn) -> Result<Dialed, Failure> {
    let mut avoid: Vec<SocketAddr> = Vec::new();
    loop {
        let endpoint = flow
            .destination
            .pick(&avoid, &mut flow.worker.rng.borrow_mut())?;
        let mut in_flight = endpoint.begin();
        match connect::dial(&endpoint, alpn, &flow.worker.tls).await {
            Ok(upstream) => {
                in_flight.opened();
                return Ok(Dialed {
                    endpoint,
                    upstream,
                    in_flight,
                });
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
async fn listen(client: &mut Io, detector: Detector) -> Result<Protocol, Failure> {
    loop {
        let filled = if client.unread().is_empty() {
            poll_fn(|cx| client.poll_fill(cx)).await
        } else {
            match timeout(
                patience(client.unread()),
                poll_fn(|cx| client.poll_fill(cx)),
            )
            .await
            {
                Ok(filled) => filled,
                Err(_) => return Ok((detector.guess)(client.unread())),
            }
        };
        match filled {
            // The client said nothing and half-closed: the server may have something to say yet.
            Ok(0) => return Ok((detector.guess)(client.unread())),
            Ok(_) => {}
            Err(error) => return Err(left(&error)),
        }
        if let Verdict::Known(protocol) = (detector.classify)(client.unread()) {
            return Ok(protocol);
        }
    }
}

/// Part of a request line may be all of another protocol's word, and all but surely is where it is no text. Part of a ClientHello is
/// nothing yet to anybody.
fn patience(begun: &[u8]) -> Duration {
    match tls::inspect(begun) {
        Hello::NeedMore => HELLO_PATIENCE,
        _ if is_binary(begun) => Duration::ZERO,
        _ => PATIENCE,
    }
}

fn left(error: &io::Error) -> Failure {
    tracing::debug!("the client left before it said anything: {error}");
    Failure::BadRequest("the client left before it said anything")
}
