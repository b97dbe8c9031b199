//! Steps 4 to 8 for HTTP/1: one connection of a client, one exchange after the other. Read [`serve`] first.
//!
//! What arrives is parsed strictly, what leaves is framed anew: two hops never disagree where a message ends. HTTP/1
//! leaves as HTTP/1, with its fields' case and order.

pub mod body;
pub mod head;

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncWriteExt;
use tokio::time::{timeout, timeout_at};

use self::body::{Broken, Relay};
use self::head::{Framing, MAX_HEAD, Refused, RequestHead, ResponseHead, Version, find_end};
use crate::balance::{Endpoint, InFlight};
use crate::connect::{self, Upstream};
use crate::copy;
use crate::dump::{Direction, ExchangeDump};
use crate::error::Failure;
use crate::io::Io;
use crate::lifetime::{Lifetime, drained_or};
use crate::metrics::Protocol;
use crate::policy::Admission;
use crate::worker::Flow;

/// How long a client may take to send a head once it has begun.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Endpoints that one request is tried on at most.
const MAX_TRIES: usize = 3;
/// How much is still read from a client whose request was refused, so that it gets to see the answer.
const MAX_LINGER: usize = 256 * 1024;

/// Serves a client's connection until either side ends it.
pub async fn serve(mut client: Io, flow: &Flow) {
    let closes_at = client.lifetime().map(Lifetime::closes_idle_at);
    let mut end = pin!(drained_or(&flow.worker.drain, closes_at));
    loop {
        let request = match next_request(&mut client, end.as_mut()).await {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(failure) => {
                let mut dump = flow.dump();
                answer(&mut client, flow, &mut dump, None, &failure).await;
                return linger(client).await;
            }
        };
        match Exchange::new(&mut client, request, flow).run().await {
            After::KeepAlive => {}
            After::Close => return linger(client).await,
            After::Gone => return,
            After::Expired(upstream) => return reset(client, upstream),
            After::Tunnel(mut upstream, mut dump) => {
                let expiry = flow.expiry(&client, &upstream);
                let copied = copy::both(&mut client, &mut upstream, None, expiry).await;
                if let Some(dump) = &mut dump {
                    dump.upgraded(copied.sent, copied.received);
                }
                if copied.expired {
                    reset(client, upstream);
                }
                return;
            }
        }
    }
}

/// What becomes of the client's connection after an exchange.
enum After {
    KeepAlive,
    /// The answer was written; nothing more will come.
    Close,
    /// The client is gone, or there is nothing to tell it.
    Gone,
    /// The connection to the peer's proxy, the client's or the upstream's, has reached its maximum age.
    Expired(Io),
    /// Both sides agreed on another protocol.
    Tunnel(Io, Option<ExchangeDump>),
}

/// The next request's head; none when the client or the proxy ends the connection between two requests.
async fn next_request(
    client: &mut Io,
    mut end: Pin<&mut impl Future<Output = ()>>,
) -> Result<Option<RequestHead>, Failure> {
    let mut scanned = 0;
    let mut deadline = None;
    loop {
        if let Some(end) = find_end(client.unread(), &mut scanned).map_err(refused)? {
            let raw = client.unread().split_to(end).freeze();
            return RequestHead::parse(raw).map(Some).map_err(refused);
        }
        let idle = client
            .unread()
            .iter()
            .all(|byte| matches!(byte, b'\r' | b'\n'));
        let filled = if idle {
            poll_fn(|cx| match client.poll_fill(cx) {
                Poll::Pending => end.as_mut().poll(cx).map(|()| {
                    // It fails only where the client is gone.
                    let _ = client.poll_half_close(cx);
                    Ok(0)
                }),
                filled => filled,
            })
            .await
        } else {
            // One deadline for the whole head: a client that sends a byte now and then gains nothing by it.
            let deadline =
                *deadline.get_or_insert_with(|| tokio::time::Instant::now() + HEAD_TIMEOUT);
            timeout_at(deadline, poll_fn(|cx| client.poll_fill(cx)))
                .await
                .map_err(|_| Failure::RequestTimeout)?
        };
        match filled {
            Ok(0) | Err(_) if idle => return Ok(None),
            Ok(0) => {
                return Err(Failure::BadRequest(
                    "the connection was closed in the middle of a head",
                ));
            }
            Err(_) => return Ok(None),
            Ok(_) => {}
        }
    }
}

/// One request and its response.
struct Exchange<'a> {
    client: &'a mut Io,
    flow: &'a Flow,
    request: RequestHead,
    dump: Option<ExchangeDump>,
    /// The request's head, and what of its body came with it: one write.
    first: Bytes,
    /// The rest of its body.
    upload: Relay,
    /// There is no rest: the request can be sent again.
    replayable: bool,
    /// It is a probe that a strict pod takes from anybody: the only exchange of its connections.
    is_probe: bool,
    /// The client has half-closed its connection.
    client_ended: bool,
}

/// Why an attempt came to nothing.
struct Stopped {
    failure: Failure,
    /// The request did not reach an app, or may reach it twice: another attempt does no harm.
    again: bool,
    /// Do not choose this endpoint again.
    avoid: Option<SocketAddr>,
}

impl<'a> Exchange<'a> {
    fn new(client: &'a mut Io, request: RequestHead, flow: &'a Flow) -> Self {
        let mut dump = flow.dump();
        if let Some(dump) = &mut dump {
            let version: &[u8] = if request.version == Version::Http10 {
                b"HTTP/1.0"
            } else {
                b"HTTP/1.1"
            };
            dump.request_head(
                &[request.method(), b" ", request.target(), b" ", version].concat(),
                request.fields_to_app(flow.called_by()),
            );
        }
        let mut head = BytesMut::new();
        request.write(&mut head, flow.called_by());
        let upload = Relay::new(request.framing, head, false);
        Self {
            client,
            flow,
            request,
            dump,
            first: Bytes::new(),
            upload,
            replayable: false,
            is_probe: false,
            client_ended: false,
        }
    }

    /// Tries endpoints until one has answered, or there is no point in trying more.
    async fn run(mut self) -> After {
        match self.flow.authorize_request(&self.request.view()) {
            Ok(admission) => self.is_probe = admission == Admission::Probe,
            Err(refused) => return self.refuse(refused).await,
        }
        let (upload, dump) = (&mut self.upload, &mut self.dump);
        let taken = upload.take_buffered(self.client.unread(), &mut |data| {
            show(dump, ExchangeDump::request_body, data)
        });
        if let Err(broken) = taken {
            return self.refuse(broken_request(&broken)).await;
        }
        self.first = self.upload.take_waiting();
        self.replayable = self.upload.is_read();
        let mut avoid = Vec::new();
        for tried in 1.. {
            let stopped = match self.attempt(&avoid).await {
                Ok(after) => return after,
                Err(stopped) => stopped,
            };
            if !stopped.again || tried >= MAX_TRIES {
                return self.refuse(stopped.failure).await;
            }
            tracing::debug!(destination = %self.flow.destination.name(), "trying again: {}", stopped.failure);
            avoid.extend(stopped.avoid);
        }
        unreachable!("the loop above returns")
    }

    /// Steps 5 to 8 on one endpoint.
    async fn attempt(&mut self, avoid: &[SocketAddr]) -> Result<After, Stopped> {
        let flow = self.flow;
        let final_failure = |failure| Stopped {
            failure,
            again: false,
            avoid: None,
        };
        let endpoint = flow
            .destination
            .pick(avoid, &mut flow.worker.rng.borrow_mut())
            .map_err(final_failure)?;
        let mut in_flight = endpoint.begin();
        let since = in_flight.since();
        let mut upstream =
            match connect::http1(&endpoint, !self.is_probe, &flow.worker.tls, since).await {
                Ok(upstream) => upstream,
                Err(failure) => {
                    in_flight.failed();
                    endpoint.quarantine(Instant::now());
                    let again = flow.destination.endpoints_len() > avoid.len() + 1;
                    return Err(Stopped {
                        failure,
                        again,
                        avoid: Some(endpoint.address),
                    });
                }
            };
        if !upstream.reused {
            in_flight.connected();
        }
        let head = match self.await_response(&mut upstream, &endpoint).await {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(After::Gone),
            Err(stopped) => {
                // A pooled connection that had died says nothing of its endpoint.
                if !stopped.again {
                    in_flight.failed();
                }
                return Err(stopped);
            }
        };
        if upstream.io.is_secured() && self.was_not_delivered(&head) {
            in_flight.failed();
            endpoint.quarantine(Instant::now());
            let failure = Failure::UpstreamClosed {
                address: endpoint.address,
                reason: "its app accepts no connection".into(),
            };
            return Err(Stopped {
                failure,
                again: true,
                avoid: Some(endpoint.address),
            });
        }
        let now = in_flight.answered();
        self.pass_response(upstream.io, &endpoint, head, in_flight, now)
            .await
    }

    /// Sends the request and passes interim responses on, until the final response's head is there; none when the
    /// client is gone.
    async fn await_response(
        &mut self,
        upstream: &mut Upstream,
        endpoint: &Endpoint,
    ) -> Result<Option<ResponseHead>, Stopped> {
        self.upload.send_first(self.first.clone());
        loop {
            let mut scanned = 0;
            let mut head =
                match poll_fn(|cx| self.poll_response_head(cx, &mut upstream.io, &mut scanned))
                    .await
                {
                    Ok(head) => head,
                    Err(Ended::Client) => return Ok(None),
                    Err(Ended::BadRequest(failure)) => {
                        return Err(Stopped {
                            failure,
                            again: false,
                            avoid: None,
                        });
                    }
                    Err(Ended::Malformed(reason)) => {
                        let failure = Failure::UpstreamMalformed {
                            address: endpoint.address,
                            reason: reason.to_owned(),
                        };
                        return Err(Stopped {
                            failure,
                            again: false,
                            avoid: None,
                        });
                    }
                    Err(Ended::Upstream(reason)) => {
                        let failure = Failure::UpstreamClosed {
                            address: endpoint.address,
                            reason,
                        };
                        let untouched = upstream.reused && upstream.io.unread().is_empty();
                        let again = untouched && self.replayable && self.request.is_idempotent();
                        return Err(Stopped {
                            failure,
                            again,
                            avoid: None,
                        });
                    }
                };
            if head.status == 101 && !(self.request.connection.upgrade && self.upload.is_done()) {
                let reason = "101, and the request asked for no other protocol".to_owned();
                let failure = Failure::UpstreamMalformed {
                    address: endpoint.address,
                    reason,
                };
                return Err(Stopped {
                    failure,
                    again: false,
                    avoid: None,
                });
            }
            // Only a peer's proxy, which has proven itself, speaks for the mesh.
            if !upstream.io.is_secured() {
                head.remove_mesh_error();
            }
            if !head.is_interim() {
                return Ok(Some(head));
            }
            let mut out = BytesMut::new();
            head.write(&mut out, None);
            if self.client.write_all(&out).await.is_err() {
                return Ok(None);
            }
        }
    }

    fn poll_response_head(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Io,
        scanned: &mut usize,
    ) -> Poll<Result<ResponseHead, Ended>> {
        let uploading = self.poll_upload(cx, upstream)?;
        loop {
            match find_end(upstream.unread(), scanned) {
                Ok(None) => {}
                Ok(Some(end)) => {
                    let raw = upstream.unread().split_to(end).freeze();
                    let parsed = ResponseHead::parse(raw, self.request.method());
                    return Poll::Ready(
                        parsed.map_err(|refused| Ended::Malformed(describe(refused))),
                    );
                }
                Err(refused) => return Poll::Ready(Err(Ended::Malformed(describe(refused)))),
            }
            match upstream.poll_fill(cx) {
                Poll::Ready(Ok(0)) => {
                    return Poll::Ready(Err(Ended::Upstream("end of stream".into())));
                }
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Err(Ended::Upstream(error.to_string())));
                }
                Poll::Pending => break,
            }
        }
        if uploading.is_ready() {
            ready!(self.poll_client_end(cx, upstream))?;
        }
        Poll::Pending
    }

    /// Moves the request's body along. An upstream that takes no more may have answered already: that is not an error yet.
    fn poll_upload(&mut self, cx: &mut Context<'_>, upstream: &mut Io) -> Result<Poll<()>, Ended> {
        if self.upload.is_done() {
            return Ok(Poll::Ready(()));
        }
        let dump = &mut self.dump;
        let seen = &mut |data: &[u8]| show(dump, ExchangeDump::request_body, data);
        match self.upload.poll(cx, self.client, upstream, seen) {
            Poll::Pending => Ok(Poll::Pending),
            Poll::Ready(Ok(())) => {
                if let Some(dump) = &mut self.dump {
                    dump.request_end();
                }
                Ok(Poll::Ready(()))
            }
            Poll::Ready(Err(Broken::Writing(_))) => {
                self.upload.stop();
                Ok(Poll::Ready(()))
            }
            Poll::Ready(Err(Broken::Gone)) => Err(Ended::Client),
            Poll::Ready(Err(broken)) => Err(Ended::BadRequest(broken_request(&broken))),
        }
    }

    /// While the app works on its answer: a client that half-closes is shown to the app as it would be without the mesh,
    /// one that breaks off ends the exchange.
    fn poll_client_end(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Io,
    ) -> Poll<Result<(), Ended>> {
        if self.client_ended || !self.client.unread().is_empty() {
            return Poll::Pending;
        }
        match self.client.poll_fill(cx) {
            Poll::Ready(Ok(0)) => {
                self.client_ended = true;
                // It fails only where the upstream is gone, which reading from it will tell.
                let _ = upstream.poll_half_close(cx);
                Poll::Pending
            }
            Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
            Poll::Ready(Err(_)) => Poll::Ready(Err(Ended::Client)),
        }
    }

    /// The far side's proxy says that its app took no connection: this request did not reach it.
    fn was_not_delivered(&self, head: &ResponseHead) -> bool {
        self.flow.direction == Direction::Outbound
            && head.status == 502
            && self.replayable
            && head.fields().any(|(name, value)| {
                name.eq_ignore_ascii_case(b"x-mesh-error") && value == b"connect-failed"
            })
            && self.flow.destination.endpoints_len() > 1
    }

    /// Passes the response on, and gives the upstream's connection back where it can carry another exchange.
    async fn pass_response(
        &mut self,
        mut upstream: Io,
        endpoint: &Rc<Endpoint>,
        mut head: ResponseHead,
        in_flight: InFlight,
        now: Instant,
    ) -> Result<After, Stopped> {
        let flow = self.flow;
        let status =
            http::StatusCode::from_u16(head.status).unwrap_or(http::StatusCode::BAD_GATEWAY);
        flow.worker
            .metrics
            .request(flow.direction, Protocol::Http1, status);
        if let Some(dump) = &mut self.dump {
            let digits = head.status.to_string();
            dump.response_head(
                &[b"HTTP/1.1 ", digits.as_bytes(), b" ", head.reason()].concat(),
                head.fields(),
            );
        }
        let tunnel = head.status == 101
            || (self.request.method() == b"CONNECT" && (200..300).contains(&head.status));
        let plain = self.request.version == Version::Http10;
        let until_close =
            head.framing == Framing::UntilClose || (plain && head.framing == Framing::Chunked);
        let keep = !tunnel
            && !until_close
            && !self.is_probe
            && self.request.connection.persists(self.request.version)
            && self.upload.is_read()
            && !self.is_ending(now);
        if plain {
            head.drop_chunks();
        }
        let mut out = BytesMut::new();
        let connection = match (tunnel, keep) {
            (true, _) => None,
            (_, false) => Some("close"),
            (_, true) => plain.then_some("keep-alive"),
        };
        head.write(&mut out, connection);
        let mut download = Relay::new(head.framing, out, plain);
        let mut expiry = None;
        let passed = poll_fn(
            |cx| match self.poll_pass(cx, &mut upstream, &mut download) {
                Poll::Pending => {
                    let expiry = expiry.get_or_insert_with(|| flow.expiry(self.client, &upstream));
                    Pin::new(expiry).poll(cx).map(|()| Err(Broken::Expired))
                }
                passed => passed,
            },
        )
        .await;
        drop(in_flight);
        match passed {
            Err(broken) => {
                if let Some(dump) = &mut self.dump {
                    dump.cut_off(&broken.to_string());
                }
                if matches!(broken, Broken::Expired) {
                    return Ok(After::Expired(upstream));
                }
                // The client reads an end that is none, as it would without the mesh.
                return Ok(After::Gone);
            }
            Ok(()) if tunnel => return Ok(After::Tunnel(upstream, self.dump.take())),
            Ok(()) => {}
        }
        if let Some(dump) = &mut self.dump {
            dump.response_end();
        }
        let reusable = head.connection.persists(head.version)
            && !until_close
            && self.upload.is_done()
            && !self.client_ended
            && !self.is_probe;
        if reusable && upstream.unread().is_empty() {
            endpoint.pool.checkin_http1(upstream, Instant::now());
        }
        Ok(if keep && !self.client_ended {
            After::KeepAlive
        } else {
            After::Close
        })
    }

    /// The response on its way to the client, and what is left of the request on its way to the app.
    fn poll_pass(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Io,
        download: &mut Relay,
    ) -> Poll<Result<(), Broken>> {
        if let Err(Ended::Client) = self.poll_upload(cx, upstream) {
            return Poll::Ready(Err(Broken::Gone));
        }
        let dump = &mut self.dump;
        download.poll(cx, upstream, self.client, &mut |data| {
            show(dump, ExchangeDump::response_body, data)
        })
    }

    /// The client's connection carries no exchange after this one.
    fn is_ending(&self, now: Instant) -> bool {
        self.flow.is_draining() || self.client.is_retired(now)
    }

    /// Answers in the app's place.
    async fn refuse(mut self, failure: Failure) -> After {
        let keep = !failure.closes_connection()
            && self.upload.is_read()
            && self.request.connection.persists(self.request.version)
            && !self.client_ended
            && !self.is_ending(Instant::now());
        answer(
            self.client,
            self.flow,
            &mut self.dump,
            keep.then_some(&self.request),
            &failure,
        )
        .await;
        if keep { After::KeepAlive } else { After::Close }
    }
}

/// How waiting for a response can end without one.
enum Ended {
    /// The client is gone.
    Client,
    /// What the client sends is no body.
    BadRequest(Failure),
    /// The upstream closed or broke the connection.
    Upstream(String),
    /// What the upstream sent is no response.
    Malformed(&'static str),
}

fn show(dump: &mut Option<ExchangeDump>, part: fn(&mut ExchangeDump, &[u8]), data: &[u8]) {
    if let Some(dump) = dump {
        part(dump, data);
    }
}

fn refused(refused: Refused) -> Failure {
    match refused {
        Refused::TooLarge => Failure::HeadersTooLarge(MAX_HEAD),
        Refused::Malformed(reason) => Failure::BadRequest(reason),
    }
}

fn describe(refused: Refused) -> &'static str {
    match refused {
        Refused::TooLarge => "its header block is over the limit",
        Refused::Malformed(reason) => reason,
    }
}

fn broken_request(broken: &Broken) -> Failure {
    match broken {
        Broken::Malformed(reason) => Failure::BadRequest(reason),
        Broken::Writing(_) | Broken::Gone | Broken::Expired => {
            Failure::BadRequest("the request ended early")
        }
    }
}

/// The proxy's own answer. `request` is given where the connection goes on after it.
async fn answer(
    client: &mut Io,
    flow: &Flow,
    dump: &mut Option<ExchangeDump>,
    request: Option<&RequestHead>,
    failure: &Failure,
) {
    let status = failure.status();
    flow.worker.metrics.failure(flow.direction, failure);
    tracing::debug!(peer = %flow.peer, destination = %flow.destination.name(), code = failure.code(), "{failure}");
    if let Some(dump) = dump {
        dump.failure(failure);
    }
    let text = format!("{failure}\n");
    let connection = if request.is_some() {
        ""
    } else {
        "connection: close\r\n"
    };
    let allow = failure
        .allow()
        .map(|methods| format!("allow: {methods}\r\n"))
        .unwrap_or_default();
    let mut out = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\nx-mesh-error: {}\r\n{allow}{connection}\r\n",
        status.as_u16(),
        status.canonical_reason().unwrap_or_default(),
        text.len(),
        failure.code(),
    );
    if request.is_none_or(|request| request.method() != b"HEAD") {
        out.push_str(&text);
    }
    // A client that is gone needs no answer.
    let _ = client.write_all(out.as_bytes()).await;
}

/// Breaks both connections off.
fn reset(client: Io, upstream: Io) {
    client.reset();
    upstream.reset();
}

/// Ends a connection so that the client sees the last answer: closing while its bytes still come in would reset it.
async fn linger(mut client: Io) {
    if client.shutdown().await.is_err() {
        return;
    }
    let drained = async {
        let mut total = 0;
        while total < MAX_LINGER {
            client.unread().clear();
            match poll_fn(|cx| client.poll_fill(cx)).await {
                Ok(read) if read > 0 => total += read,
                _ => break,
            }
        }
    };
    // Whoever is still sending after that gets the reset.
    let _ = timeout(Duration::from_secs(1), drained).await;
}
