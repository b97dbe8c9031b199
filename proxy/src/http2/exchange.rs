//! One stream: a request, its response, and both bodies at the same time. A reset of either side
//! reaches the other one at once and with the same code: gRPC's cancellation and deadlines depend
//! on it.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::{EXPECT, HeaderName};
use http::request::Parts;
use http::{Method, Request, Response};
use tokio::time::timeout_at;

use super::head;
use super::relay::{Message, Relay, RelayError, reset_code};
use super::{Place, STREAM_COST, Stream};
use crate::balance::Endpoint;
use crate::batched::Queued;
use crate::connect::http2::Lease;
use crate::error::Failure;
use crate::flow::{Direction, Flow};
use crate::forward::{AttemptError, Attempts, Forward, Replayable, forward};
use crate::http::discard::{MAX_DISCARD, in_background};
use crate::http::edits::{Edits, response_edits};
use crate::http::reply::LocalReply;
use crate::http::verdict::Verdict;
use crate::io::Io;
use crate::memory::Charge;
use crate::metrics::HttpVersion;
use crate::mirror::CopiedHead;
use crate::policy::PREVIOUS_ATTEMPTS;
use crate::record::ExchangeRecord;
use crate::route::fields::FieldEdit;
use crate::route::{Answer, Route};

/// The maximum number of interim responses that a client gets, of all attempts. Flow control does not
/// limit them: they would fill the memory of the proxy while the client does not read.
const MAX_INTERIM: u32 = 16;

/// Charges a request, which ends if that fails, and forwards it in a task of its own. Fails if there
/// is no memory for it, nor for a response.
pub(super) fn start(
    request: Request<RecvStream>,
    respond: SendResponse<Queued>,
    client: Stream,
) -> Result<(), Failure> {
    let (parts, body) = request.into_parts();
    let mut memory = client.flow.charge();
    let cost = STREAM_COST + head::size(&parts);
    let refused = memory.begin(cost).err();
    if refused.is_some() {
        memory.hold(cost)?;
    }
    let malformed = || head::malformed(&parts).map(Failure::BadRequest);
    let refused = refused.or_else(malformed);
    tokio::task::spawn_local(carry(parts, body, respond, client, memory, refused));
    Ok(())
}

/// Forwards one request to an endpoint, and the response to the client.
async fn carry(
    mut parts: Parts,
    body: RecvStream,
    mut respond: SendResponse<Queued>,
    client: Stream,
    memory: Charge,
    refused: Option<Failure>,
) {
    let flow = &client.flow;
    let deadline = head::deadline(&parts);
    let Some(place) = client.place(&mut respond).await else {
        return;
    };
    let mut record = ExchangeRecord::new(flow, HttpVersion::Http2);
    record.attempts.previous = flow.previous_attempts(&parts.headers);
    record.attempts.exchange_deadline = deadline;
    // None: the client has reset the stream.
    let ready: Option<Result<(), Answer>> = match (refused, flow.destination.routes()) {
        (Some(failure), _) => Some(Err(failure.into())),
        (None, None) => Some(Ok(())),
        (None, Some(routes)) => {
            // 5. Route. Boxed: most destinations have none.
            let gone = |cx: &mut Context<'_>| respond.poll_reset(cx).map(drop);
            Box::pin(record.route(&routes, &head::view(&parts), gone)).await
        }
    };
    record.set_preference(&head::view(&parts));
    let own = flow.request_edits();
    let route = record.route.as_deref();
    let prepared = Route::edit_request(route, &own, |edits| head::prepare(&mut parts, edits));
    let ready = match (ready, prepared) {
        (Some(Ok(())), Err(failure)) => Some(Err(failure.into())),
        (ready, _) => ready,
    };
    record.request(&head::view(&parts), Edits::default());
    if let Some(Ok(())) = ready {
        let copied = || CopiedHead::Http2(Box::new(parts.clone()));
        record.mirror(&head::view(&parts), copied);
    }
    let mut exchange = Exchange {
        respond,
        upload: Relay::new(body, Message::Request),
        record,
        is_grpc: head::is_grpc(&parts.headers),
        to_client: None,
        interim_left: match parts.headers.contains_key(EXPECT) {
            true => MAX_INTERIM,
            false => 0,
        },
        client,
        _place: place,
        parts,
        cost: memory.amount(),
        memory,
    };
    match ready {
        Some(Ok(())) => exchange.run().await,
        Some(Err(answer)) => exchange.reply(answer),
        None => exchange.client.resets.record_reset(Instant::now()),
    }
}

/// One request and its response.
struct Exchange {
    respond: SendResponse<Queued>,
    /// The request's head, for further attempts.
    parts: Parts,
    upload: Relay,
    record: ExchangeRecord,
    is_grpc: bool,
    /// The response's stream, once its head was sent.
    to_client: Option<SendStream<Queued>>,
    /// The number of interim responses that the client still gets. It waits for one of them.
    interim_left: u32,
    client: Stream,
    /// Held until the exchange ends.
    _place: Place,
    /// Charged for the stream and the heads, and for what the relays hold.
    memory: Charge,
    /// The memory of the stream and the heads.
    cost: usize,
}

/// The result of an attempt that is not followed by another one.
enum Outcome {
    /// The response was relayed, or cut off.
    Ended,
    /// The client closed, or reset its stream.
    Cancelled,
    /// The upstream reset the stream: the client gets the same code.
    Reset(Reason),
    /// Both sides agreed on another protocol: no deadline applies.
    Tunnel(Box<(Response<RecvStream>, Attempt, Rc<Endpoint>)>),
}

/// An attempt in progress. Fields are dropped in this order: the stream before its slot.
struct Attempt {
    response: ResponseFuture,
    to_upstream: SendStream<Queued>,
    lease: Lease,
}

/// Why an attempt ended early.
enum Ended {
    /// The client reset the stream.
    Client(Reason),
    Upstream(h2::Error),
    /// No memory is left for what waits.
    Overloaded,
}

impl Exchange {
    /// Runs the exchange to its end.
    async fn run(&mut self) {
        let flow = self.record.flow.clone();
        let backend = self.record.backend().clone();
        // 4. Authorization, 6. balance, 7. connect, 8. serve.
        let ended = match forward(self, &flow, &backend).await {
            // Boxed: it is rare, and would enlarge the task of every stream.
            Ok(Outcome::Tunnel(tunnel)) => Box::pin(self.tunnel(*tunnel)).await,
            ended => ended,
        };
        match ended {
            Ok(Outcome::Ended | Outcome::Tunnel(_)) => {
                self.client.resets.record_completed();
                self.client.io.queue_ended(self.cost);
            }
            Ok(Outcome::Cancelled) => self.client.resets.record_reset(Instant::now()),
            Ok(Outcome::Reset(code)) => {
                self.cut_off("the application reset the stream", code);
                self.respond.send_reset(code);
            }
            Err(failure) => self.fail(failure),
        }
    }

    /// Relays the bytes of another protocol.
    async fn tunnel(
        &mut self,
        (response, attempt, endpoint): (Response<RecvStream>, Attempt, Rc<Endpoint>),
    ) -> Result<Outcome, Failure> {
        Ok(self.relay_response(response, attempt, &endpoint).await)
    }

    /// Acquires a slot on a connection to the endpoint, for an extended CONNECT request on one whose
    /// peer has sent its SETTINGS. None if the client cancels.
    async fn connect(
        &mut self,
        flow: &Flow,
        endpoint: &Endpoint,
    ) -> Option<Result<Lease, Failure>> {
        let worker = &flow.worker;
        let expiry = |io: &Io| worker.expiry(io, Direction::Outbound);
        let dialer = self.record.attempts.dialer(flow);
        let pool = endpoint.pool();
        let is_extended = head::extended_protocol(&self.parts).is_some();
        let mut leasing = pin!(async {
            let lease = pool.http2(flow.direction, dialer, expiry).await?;
            if is_extended && !lease.supports_extended_connect() {
                // Boxed: it is rare. Without SETTINGS, the peer does not support the request.
                let settled = Box::pin(timeout_at(dialer.deadline, lease.settled()));
                if let Ok(false) = settled.await {
                    let (address, reason) = (endpoint.address, "it sent no SETTINGS".into());
                    return Err(Failure::UpstreamClosed { address, reason });
                }
            }
            Ok(lease)
        });
        poll_fn(|cx| match leasing.as_mut().poll(cx) {
            Poll::Ready(leased) => Poll::Ready(Some(leased)),
            Poll::Pending => self.respond.poll_reset(cx).map(|_| None),
        })
        .await
    }

    /// Sends the request's body until the response's head has arrived.
    fn poll_response(
        &mut self,
        cx: &mut Context<'_>,
        attempt: &mut Attempt,
    ) -> Poll<Result<Response<RecvStream>, Ended>> {
        self.client.record_progress();
        if let Err(code) = self.poll_upload(cx, attempt) {
            return Poll::Ready(Err(Ended::Client(code)));
        }
        if self.memory.hold(self.cost + self.upload.kept()).is_err() {
            return Poll::Ready(Err(Ended::Overloaded));
        }
        while self.interim_left > 0 {
            match attempt.response.poll_informational(cx) {
                Poll::Ready(Some(Ok(mut interim))) => {
                    let edits = response_edits(attempt.lease.is_secured());
                    Edits::of(edits).apply(interim.headers_mut());
                    // An error means that the client has closed, which is detected below.
                    drop(self.respond.send_informational(interim));
                    self.interim_left -= 1;
                }
                Poll::Ready(_) => self.interim_left = 0,
                Poll::Pending => break,
            }
        }
        if let Poll::Ready(response) = Pin::new(&mut attempt.response).poll(cx) {
            return Poll::Ready(response.map_err(Ended::Upstream));
        }
        let reset = self.respond.poll_reset(cx);
        reset.map(|reset| Err(Ended::Client(reset.unwrap_or(Reason::CANCEL))))
    }

    /// Relays the request's body. Fails with the client's code. An upstream that reads no more may
    /// have responded already: that is not an error yet.
    fn poll_upload(&mut self, cx: &mut Context<'_>, attempt: &mut Attempt) -> Result<(), Reason> {
        if self.upload.is_done() {
            if self.upload.is_complete() {
                self.record.send_mirror();
            }
            return Ok(());
        }
        let Attempt {
            to_upstream, lease, ..
        } = attempt;
        match (self.upload).poll(cx, to_upstream, lease.io(), &mut self.record) {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => self.record.send_mirror(),
            Poll::Ready(Err(RelayError::ReceiverClosed)) => self.upload.stop(),
            Poll::Ready(Err(RelayError::Sender(error))) => return Err(reset_code(&error)),
        }
        Ok(())
    }

    /// Relays the response to the client, and the rest of the request to the upstream.
    async fn relay_response(
        &mut self,
        response: Response<RecvStream>,
        mut attempt: Attempt,
        endpoint: &Endpoint,
    ) -> Outcome {
        let (mut parts, body) = response.into_parts();
        if let Some(route) = &self.record.route {
            let session = route.session_edit(endpoint);
            let session = session.iter().map(FieldEdit::as_edit);
            let edits: Vec<_> = route.response_edits().chain(session).collect();
            Edits::of(&edits).apply(&mut parts.headers);
        }
        self.record
            .response(parts.status, b"", &parts.headers, Edits::default());
        let from_proxy = attempt.lease.is_secured();
        let mut download = Relay::new(body, Message::Response { from_proxy });
        let is_grpc = self.is_grpc && head::is_grpc(&parts.headers);
        let head = Response::from_parts(parts, ());
        let Ok(to_client) = self.respond.send_response(head, download.is_done()) else {
            attempt.to_upstream.send_reset(Reason::CANCEL);
            return Outcome::Cancelled;
        };
        self.is_grpc = is_grpc;
        self.to_client = Some(to_client);
        let relayed = poll_fn(|cx| self.poll_relay(cx, &mut attempt, &mut download)).await;
        self.record.attempts.end();
        match relayed {
            Ok(()) => {
                attempt.lease.record_end();
                self.record.response_end();
                if self.upload.is_complete() {
                    self.record.request_end();
                }
                Outcome::Ended
            }
            Err(Ended::Client(code)) => {
                attempt.to_upstream.send_reset(code);
                self.cut_off("the client closed", code);
                Outcome::Cancelled
            }
            Err(Ended::Overloaded) => {
                attempt.to_upstream.send_reset(Reason::CANCEL);
                let cut_off = "cut off: the client does not read it, and no memory is left for it";
                self.fail_response(&Failure::MemoryExhausted, cut_off);
                Outcome::Ended
            }
            Err(Ended::Upstream(error)) => {
                attempt.lease.record_end();
                self.break_off(&error, endpoint);
                Outcome::Ended
            }
        }
    }

    /// Relays both bodies. Ready when both have ended.
    fn poll_relay(
        &mut self,
        cx: &mut Context<'_>,
        attempt: &mut Attempt,
        download: &mut Relay,
    ) -> Poll<Result<(), Ended>> {
        self.client.record_progress();
        if let Err(code) = self.poll_upload(cx, attempt) {
            return Poll::Ready(Err(Ended::Client(code)));
        }
        if let Some(to_client) = self.to_client.as_mut().filter(|_| !download.is_done()) {
            match download.poll(cx, to_client, &self.client.io, &mut self.record) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(RelayError::Sender(error))) => {
                    return Poll::Ready(Err(Ended::Upstream(error)));
                }
                // If the client has closed its stream, this returns the error code.
                Poll::Ready(Err(RelayError::ReceiverClosed)) | Poll::Pending => {
                    if download.is_blocked() {
                        attempt.lease.record_blocked();
                    }
                    // Inbound, the window of the connection is charged.
                    let held = match self.client.flow.direction {
                        Direction::Inbound => 0,
                        Direction::Outbound => download.read_ahead(cx, &mut self.record),
                    };
                    if self.memory.hold(self.cost + held).is_err() {
                        return Poll::Ready(Err(Ended::Overloaded));
                    }
                    return to_client
                        .poll_reset(cx)
                        .map(|reset| Err(Ended::Client(reset.unwrap_or(Reason::CANCEL))));
                }
            }
        }
        if !self.upload.is_done() {
            // The response has ended. The upstream may still read the request, until it resets it.
            if attempt.to_upstream.poll_reset(cx).is_pending() {
                return Poll::Pending;
            }
            self.upload.stop();
        }
        Poll::Ready(Ok(()))
    }

    /// The result of an attempt whose stream, or connection, ended before the response. `is_sent`:
    /// the connection has taken the stream.
    fn failed(
        &mut self,
        error: &h2::Error,
        endpoint: &Endpoint,
        lease: &Lease,
        is_sent: bool,
    ) -> Result<Outcome, AttemptError> {
        let (address, reason) = (endpoint.address, error.to_string());
        let is_repeatable = self.parts.method.is_idempotent() || !is_sent;
        let acceptance = lease.acceptance();
        let rejected = AttemptError::handshake(address, &reason, acceptance, is_repeatable);
        if let Some(rejected) = rejected {
            return Err(rejected);
        }
        // The peer has not processed this stream.
        let refused = error.reason() == Some(Reason::REFUSED_STREAM);
        let unprocessed = error.is_remote() && (error.is_go_away() || refused);
        match error.reason() {
            Some(code) if error.is_remote() && !unprocessed => Ok(Outcome::Reset(code)),
            Some(_) if error.is_library() => Err(AttemptError::malformed(address, reason)),
            _ => {
                // The peer may close a pooled connection just when it is used.
                let is_stale = lease.is_reused() || !is_sent;
                let is_safe = unprocessed || is_stale && is_repeatable;
                Err(AttemptError::closed(address, reason, is_safe))
            }
        }
    }

    /// The upstream's stream ended within its response.
    fn break_off(&mut self, error: &h2::Error, endpoint: &Endpoint) {
        let code = reset_code(error);
        if error.is_reset() && error.is_remote() {
            self.cut_off("the application reset the stream", code);
            return self.respond.send_reset(code);
        }
        let (address, reason) = (endpoint.address, error.to_string());
        let cut_off = format!("cut off before the response ended: {error}");
        self.fail_response(&Failure::UpstreamClosed { address, reason }, &cut_off);
    }

    /// Ends a response that has begun: a gRPC call with its status, any other one with a reset.
    fn fail_response(&mut self, failure: &Failure, cut_off: &str) {
        self.record.fail(failure);
        self.record.cut_off(cut_off);
        let trailers = LocalReply::from(failure).grpc_trailers();
        let ended = match &mut self.to_client {
            Some(to_client) if self.is_grpc => to_client.send_trailers(trailers).is_ok(),
            _ => false,
        };
        if !ended {
            self.respond.send_reset(Reason::INTERNAL_ERROR);
        }
    }

    /// Replies in place of the application.
    fn fail(&mut self, failure: Failure) {
        if self.record.has_response() {
            return self.fail_response(&failure, &failure.to_string());
        }
        self.reply(Answer::Failure(failure));
    }

    fn reply(&mut self, answer: Answer) {
        let is_failure = matches!(answer, Answer::Failure(_));
        let reply = self.record.local_reply(answer);
        let head_only = self.parts.method == Method::HEAD;
        let (head, body) = if self.is_grpc && is_failure {
            reply.grpc()
        } else {
            reply.http2(head_only)
        };
        // A client that has closed needs no response. Dropped, the stream tells the client that the
        // rest of its request is not read.
        if let Ok(mut stream) = self.respond.send_response(head, body.is_empty())
            && !body.is_empty()
        {
            let _ = stream.send_data(self.client.io.queue(body), true);
        }
        self.client.io.queue_ended(self.cost);
    }

    fn cut_off(&mut self, what: &str, code: Reason) {
        self.record.cut_off(&format!("{what}: {code:?}"));
    }
}

/// Reads the rest of a response in whose place another attempt follows, so that its stream ends
/// without a reset.
async fn discard(attempt: Attempt, mut body: RecvStream) {
    let mut left = MAX_DISCARD;
    while let Some(Ok(data)) = body.data().await {
        if data.len() > left {
            return;
        }
        left -= data.len();
        // Fails only if the stream is closed.
        let _ = body.flow_control().release_capacity(data.len());
    }
    attempt.lease.record_end();
}

impl Forward for Exchange {
    type Outcome = Outcome;

    fn authorize(&mut self, flow: &Flow) -> Result<(), Failure> {
        flow.authorize_request(&head::view(&self.parts))
    }

    fn attempts(&mut self) -> &mut Attempts {
        &mut self.record.attempts
    }

    async fn attempt(
        &mut self,
        flow: &Flow,
        endpoint: &Rc<Endpoint>,
    ) -> Result<Outcome, AttemptError> {
        // 7. Connect.
        let mut lease = match self.connect(flow, endpoint).await {
            Some(Ok(lease)) => lease,
            Some(Err(failure)) => return Err(AttemptError::connect(failure)),
            None => return Ok(Outcome::Cancelled),
        };
        if !lease.is_reused() {
            self.record.attempts.check_endpoint()?;
        }
        if head::extended_protocol(&self.parts).is_some() && !lease.supports_extended_connect() {
            let reason = "it does not accept extended CONNECT requests";
            return Err(AttemptError::malformed(endpoint.address, reason));
        }
        // 8. Serve.
        self.record.attempts.connected();
        let mut parts = self.parts.clone();
        if let Some(previous) = self.record.attempts.announced(lease.is_secured()) {
            let name = HeaderName::from_static(PREVIOUS_ATTEMPTS);
            parts.headers.insert(name, previous.into());
        }
        head::set_deadline(&mut parts, self.record.attempts.exchange_deadline);
        let request = Request::from_parts(parts, ());
        let (places, is_complete) = (self.client.places.clone(), self.upload.is_done());
        let (response, to_upstream) = match lease.send(request, is_complete, Some(places)) {
            Ok(stream) => stream,
            Err(error) => return self.failed(&error, endpoint, &lease, false),
        };
        let mut attempt = Attempt {
            response,
            to_upstream,
            lease,
        };
        let response = match poll_fn(|cx| self.poll_response(cx, &mut attempt)).await {
            Ok(response) => response,
            Err(Ended::Client(code)) => {
                attempt.to_upstream.send_reset(code);
                self.cut_off("the client closed", code);
                return Ok(Outcome::Cancelled);
            }
            Err(Ended::Overloaded) => {
                attempt.to_upstream.send_reset(Reason::CANCEL);
                return Err(AttemptError::last(Failure::MemoryExhausted));
            }
            Err(Ended::Upstream(error)) => {
                attempt.lease.record_end();
                return self.failed(&error, endpoint, &attempt.lease, true);
            }
        };
        if attempt.lease.supports_extended_connect() {
            flow.destination.supports_extended_connect.set(true);
        }
        let (mut parts, body) = response.into_parts();
        let is_peer = attempt.lease.is_secured();
        Edits::of(response_edits(is_peer)).apply(&mut parts.headers);
        let status = parts.status.as_u16();
        let verdict = Verdict::of(status, &parts.headers, is_peer, SystemTime::now);
        let request = Replayable {
            is_kept: self.upload.can_rewind(),
            is_idempotent: self.parts.method.is_idempotent(),
        };
        let attempts = &mut self.record.attempts;
        if let Err(error) = attempts.answered(status, verdict, request, flow) {
            if self.upload.is_complete() && !body.is_end_stream() {
                let mut memory = self.client.flow.charge();
                if memory.begin(STREAM_COST).is_ok() {
                    in_background(memory, discard(attempt, body));
                }
            }
            return Err(error);
        }
        self.upload.discard_replay();
        self.cost += head::fields_size(&parts.headers);
        if self.memory.hold(self.cost).is_err() {
            return Err(AttemptError::last(Failure::MemoryExhausted));
        }
        let is_tunnel = self.parts.method == Method::CONNECT && parts.status.is_success();
        let response = Response::from_parts(parts, body);
        if is_tunnel {
            let tunnel = Box::new((response, attempt, endpoint.clone()));
            return Ok(Outcome::Tunnel(tunnel));
        }
        Ok(self.relay_response(response, attempt, endpoint).await)
    }

    fn poll_cancelled(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        self.respond.poll_reset(cx).map(|_| Outcome::Cancelled)
    }

    fn rewind(&mut self) -> bool {
        self.upload.rewind()
    }
}
