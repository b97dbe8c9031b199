//! One stream: a request, its response, and both bodies at the same time. A reset of either side
//! reaches the other one at once and with the same code: gRPC's cancellation and deadlines depend
//! on it.

use std::future::{Future, poll_fn};
use std::mem;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use tokio::time::timeout_at;

use super::relay::{Message, Relay, RelayError, reset_code};
use super::{Place, STREAM_COST, Stream, head};
use crate::context::flow::Flow;
use crate::context::record::ExchangeRecord;
use crate::error::Failure;
use crate::http::discard::{MAX_DISCARD, in_background};
use crate::http::edits::{Edits, response_edits};
use crate::http::reply::LocalReply;
use crate::http::verdict::Verdict;
use crate::http::view::RequestView;
use crate::limits::deadline::Deadline;
use crate::limits::memory::Charge;
use crate::protocol::{HttpVersion, MAX_SECTION, TooLarge};
use crate::route::{Answer, Plan};
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError, Replayable};
use crate::serve::call::CallHead;
use crate::serve::exchange::{self, Protocol};
use crate::upstream::balance::Endpoint;
use crate::upstream::batched::Queued;
use crate::upstream::connect::http2::Lease;
use diy_mesh_model::exchange::Direction;

/// The maximum number of interim responses that a client gets, of all attempts. Flow control does not
/// limit them: they would fill the memory of the proxy while the client does not read.
const MAX_INTERIM: u32 = 16;

/// Charges a request, which ends if that fails. Forwards it to an endpoint in a task of its own, and the
/// response to the client, once it has a place. Fails if there is no memory for it, nor for a response.
pub(super) fn start(
    request: Request<RecvStream>,
    mut respond: SendResponse<Queued>,
    stream: Stream,
) -> Result<(), Failure> {
    let (parts, body) = request.into_parts();
    let mut memory = stream.flow.charge();
    let cost = STREAM_COST + head::size(&parts);
    let refused = memory.begin(cost).err();
    if refused.is_some() {
        memory.hold(cost)?;
    }
    let too_large = || head::too_large(&parts).map(Failure::HeadersTooLarge);
    let malformed = || head::malformed(&parts).map(Failure::BadRequest);
    let refused = refused.or_else(too_large).or_else(malformed);
    let is_grpc = head::is_grpc(&parts.headers);
    let deadline = if is_grpc {
        head::deadline(&parts)
    } else {
        Deadline::default()
    };
    // Boxed where it is made: a task moves its future twice, and this one has several KiB. A function
    // would hold its arguments twice.
    tokio::task::spawn_local(Box::pin(async move {
        let Some(place) = stream.place(&mut respond).await else {
            return;
        };
        let flow = stream.flow.clone();
        let mut exchange = Exchange {
            head: parts,
            record: ExchangeRecord::new(&flow, HttpVersion::Http2),
            allowed: flow.allowed(),
            added: exchange::Added::default(),
            client: Http2 {
                respond,
                upload: Relay::new(body, Message::Request),
                is_grpc,
                to_client: None,
                interim_left: MAX_INTERIM,
                is_continued: false,
                stream,
                _place: place,
                cost: memory.amount(),
                memory,
            },
        };
        let ended = match refused {
            Some(failure) => exchange.refuse(failure),
            None => {
                let run = pin!(exchange.run(deadline));
                flow.worker.run_under_policy(flow.direction, run).await
            }
        };
        exchange.end(ended);
    }));
    Ok(())
}

/// The client of an exchange.
struct Http2 {
    respond: SendResponse<Queued>,
    upload: Relay,
    is_grpc: bool,
    /// The response's stream, once its head was sent.
    to_client: Option<SendStream<Queued>>,
    /// The number of interim responses that the client still gets.
    interim_left: u32,
    /// The proxy has sent 100 (Continue): the client does not get this response from the application.
    is_continued: bool,
    stream: Stream,
    /// Held until the exchange ends.
    _place: Place,
    /// Charged for the stream and the heads, and for what the relays hold.
    memory: Charge,
    /// The memory of the stream and the heads.
    cost: usize,
}

type Exchange = exchange::Exchange<Http2>;
type Outcome = exchange::Outcome<End, Tunnel>;
/// The head of the response, and the stream.
type Tunnel = Box<(Response<RecvStream>, Upstream)>;

/// How a response ended.
enum End {
    /// It was relayed, or cut off.
    Relayed,
    /// The upstream reset the stream before: the client gets the same code.
    Reset(Reason),
}

/// The stream to the endpoint. Fields are dropped in this order: the stream before its slot.
struct Upstream {
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
    /// The policy has changed and does not allow the request, or trailers are over the limit.
    Failed(Failure),
}

impl Exchange {
    /// Replies to a request that is not forwarded.
    fn refuse(&mut self, failure: Failure) -> Result<Outcome, Answer> {
        let flow = self.record.flow.clone();
        Http2::prepare(self, &Plan::default(), &flow)?;
        Err(failure.into())
    }

    /// Ends the client's stream as the exchange has ended.
    fn end(&mut self, ended: Result<Outcome, Answer>) {
        match ended {
            Ok(Outcome::Ended(End::Relayed) | Outcome::Tunnel(_)) => {
                self.client.stream.resets.record_completed();
                self.client.stream.io.queue_ended(self.client.cost);
            }
            Ok(Outcome::Left) => {
                self.record.client_left();
                self.client.stream.resets.record_reset(Instant::now());
            }
            Ok(Outcome::Ended(End::Reset(code))) => {
                self.cut_off("the application reset the stream", code);
                self.client.respond.send_reset(code);
            }
            Err(Answer::Failure(failure)) if self.record.has_response() => {
                self.fail_response(&failure, &failure.to_string());
            }
            Err(answer) => self.reply(answer),
        }
    }

    /// Connects to the endpoint, sends, and relays the response.
    async fn attempt(
        &mut self,
        plan: &Plan,
        flow: &Flow,
        attempt: &mut Attempt<'_>,
    ) -> Result<Outcome, AttemptError> {
        let address = attempt.endpoint.address;
        // 7. Connect.
        let mut lease = match self.connect(flow, attempt).await {
            Some(Ok(lease)) => lease,
            Some(Err(failure)) => return Err(AttemptError::connect(failure)),
            None => return Ok(Outcome::Left),
        };
        if !lease.is_reused() {
            attempt.check_endpoint()?;
        }
        if head::extended_protocol(&self.head).is_some() && !lease.supports_extended_connect() {
            let reason = "it does not accept extended CONNECT requests";
            return Err(AttemptError::malformed(address, reason));
        }
        // 8. Serve.
        attempt.in_flight.connected();
        self.judge_again().map_err(AttemptError::last)?;
        let request = self.next_request(attempt, &lease);
        let (places, is_complete) = (
            self.client.stream.places.clone(),
            self.client.upload.is_done(),
        );
        let (response, to_upstream) = match lease.send(request, is_complete, Some(places)) {
            Ok(stream) => stream,
            Err(error) => return self.failed(&error, attempt, &lease, false),
        };
        let mut upstream = Upstream {
            response,
            to_upstream,
            lease,
        };
        let mut response = match poll_fn(|cx| self.poll_response(cx, &mut upstream)).await {
            Ok(response) => response,
            Err(Ended::Client(code)) => {
                upstream.to_upstream.send_reset(code);
                self.cut_off("the client closed", code);
                return Ok(Outcome::Left);
            }
            Err(Ended::Overloaded) => {
                upstream.to_upstream.send_reset(Reason::CANCEL);
                return Err(AttemptError::last(Failure::MemoryExhausted));
            }
            Err(Ended::Failed(failure)) => {
                upstream.to_upstream.send_reset(Reason::CANCEL);
                return Err(AttemptError::last(failure));
            }
            Err(Ended::Upstream(error)) => {
                upstream.lease.record_end();
                return self.failed(&error, attempt, &upstream.lease, true);
            }
        };
        if upstream.lease.supports_extended_connect() {
            flow.destination.supports_extended_connect.set(true);
        }
        let is_peer = upstream.lease.is_peer();
        Edits::of(response_edits(is_peer)).apply(response.headers_mut());
        let status = response.status().as_u16();
        let verdict = Verdict::of(status, response.headers(), is_peer, SystemTime::now);
        let request = Replayable {
            is_kept: self.client.upload.can_rewind(),
            is_idempotent: self.head.method.is_idempotent(),
        };
        if let Err(error) = attempt.answered(status, verdict, request, flow) {
            if self.client.upload.is_complete() && !response.body().is_end_stream() {
                let mut memory = self.client.stream.flow.charge();
                if memory.begin(STREAM_COST).is_ok() {
                    in_background(memory, discard(upstream, response.into_body()));
                }
            }
            return Err(error);
        }
        self.client.upload.discard_replay();
        let size = head::fields_size(response.headers());
        if size > MAX_SECTION {
            upstream.to_upstream.send_reset(Reason::ENHANCE_YOUR_CALM);
            let limit = TooLarge::Header;
            let failure = Failure::UpstreamTooLarge { address, limit };
            return Err(AttemptError::last(failure));
        }
        self.client.cost += size;
        if self.client.charge(0).is_err() {
            return Err(AttemptError::last(Failure::MemoryExhausted));
        }
        if self.head.method == Method::CONNECT && response.status().is_success() {
            return Ok(Outcome::Tunnel(Box::new((response, upstream))));
        }
        let relayed = self.relay_response(response, &mut upstream, plan, &attempt.endpoint);
        Ok(relayed.await)
    }

    /// The head for the endpoint.
    fn next_request(&self, attempt: &Attempt<'_>, lease: &Lease) -> Request<()> {
        let mut parts = self.head.clone();
        if let Some(announced) = attempt.announced(lease.is_peer(), self.record.id()) {
            announced.add_to(&mut parts.headers, lease.take_first_announcement());
        }
        head::set_deadline(&mut parts, attempt.exchange_deadline());
        if attempt.endpoint.info.server_tls().is_some() {
            head::set_https(&mut parts);
        }
        Request::from_parts(parts, ())
    }

    /// Acquires a slot on a connection to the endpoint. For an extended CONNECT request, the peer of
    /// the connection has sent its SETTINGS. `None` if the client cancels.
    async fn connect(
        &mut self,
        flow: &Flow,
        attempt: &Attempt<'_>,
    ) -> Option<Result<Lease, Failure>> {
        let worker = &flow.worker;
        let expiry = |io: &Io| worker.expiry(io, Direction::Outbound);
        let dialer = attempt.dialer(flow);
        let pool = attempt.endpoint.pool();
        let is_extended = head::extended_protocol(&self.head).is_some();
        let mut leasing = pin!(async {
            let lease = pool.http2(flow.direction, dialer, expiry).await?;
            if is_extended && !lease.supports_extended_connect() {
                // Boxed: it is rare. Without SETTINGS, the peer does not support the request.
                let settled = Box::pin(timeout_at(dialer.deadline, lease.settled()));
                if let Ok(false) = settled.await {
                    let (address, reason) =
                        (attempt.endpoint.address, "it sent no SETTINGS".into());
                    return Err(Failure::UpstreamClosed { address, reason });
                }
            }
            Ok(lease)
        });
        poll_fn(|cx| match leasing.as_mut().poll(cx) {
            Poll::Ready(leased) => Poll::Ready(Some(leased)),
            Poll::Pending => self.client.poll_left(cx, &mut self.record).map(|()| None),
        })
        .await
    }

    /// Sends the request's body until the response's head has arrived.
    fn poll_response(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Upstream,
    ) -> Poll<Result<Response<RecvStream>, Ended>> {
        self.client.stream.record_progress();
        self.judge_again().map_err(Ended::Failed)?;
        self.poll_upload(cx, upstream)?;
        if self.client.charge(0).is_err() {
            return Poll::Ready(Err(Ended::Overloaded));
        }
        while self.client.interim_left > 0 {
            match upstream.response.poll_informational(cx) {
                Poll::Ready(Some(Ok(mut interim))) => {
                    let edits = response_edits(upstream.lease.is_peer());
                    Edits::of(edits).apply(interim.headers_mut());
                    if !self.client.is_continued || interim.status() != StatusCode::CONTINUE {
                        // An error means that the client has closed, which is detected below.
                        drop(self.client.respond.send_informational(interim));
                    }
                    self.client.interim_left -= 1;
                }
                Poll::Ready(_) => self.client.interim_left = 0,
                // Nothing has arrived: the response would be pending too.
                Poll::Pending => return self.poll_client_reset(cx),
            }
        }
        match Pin::new(&mut upstream.response).poll(cx) {
            Poll::Ready(response) => Poll::Ready(response.map_err(Ended::Upstream)),
            Poll::Pending => self.poll_client_reset(cx),
        }
    }

    fn poll_client_reset<T>(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, Ended>> {
        let reset = self.client.respond.poll_reset(cx);
        reset.map(|reset| Err(Ended::Client(reset.unwrap_or(Reason::CANCEL))))
    }

    /// Relays the request's body. Fails if the client does. An upstream that reads no more may have
    /// responded already: that is not an error yet.
    fn poll_upload(&mut self, cx: &mut Context<'_>, upstream: &mut Upstream) -> Result<(), Ended> {
        if self.client.upload.is_done() {
            if self.client.upload.is_complete() {
                self.record.send_mirror();
            } else {
                self.client.upload.drop_rest(cx);
            }
            return Ok(());
        }
        let Upstream {
            to_upstream, lease, ..
        } = upstream;
        match (self.client.upload).poll(cx, to_upstream, lease.io(), &mut self.record) {
            Poll::Pending if self.client.upload.is_blocked() => {
                self.client.upload.read_ahead(cx, &mut self.record);
            }
            Poll::Pending => {}
            Poll::Ready(Ok(())) => self.record.send_mirror(),
            Poll::Ready(Err(RelayError::ReceiverClosed)) => self.client.upload.stop(),
            Poll::Ready(Err(RelayError::Sender(error))) => {
                return Err(Ended::Client(reset_code(&error)));
            }
            Poll::Ready(Err(RelayError::TooLarge)) => {
                let failure = Failure::HeadersTooLarge(TooLarge::Trailers);
                return Err(Ended::Failed(failure));
            }
        }
        Ok(())
    }

    /// Relays the response to the client, and the rest of the request to the upstream.
    async fn relay_response(
        &mut self,
        response: Response<RecvStream>,
        upstream: &mut Upstream,
        plan: &Plan,
        endpoint: &Endpoint,
    ) -> Outcome {
        let from_proxy = upstream.lease.is_peer();
        let Ok(mut download) = self.send_head(response, from_proxy, plan, endpoint) else {
            upstream.to_upstream.send_reset(Reason::CANCEL);
            return Outcome::Left;
        };
        let address = endpoint.address;
        let relayed = poll_fn(|cx| self.poll_relay(cx, upstream, &mut download, address)).await;
        match relayed {
            Ok(()) => {
                upstream.lease.record_end();
                self.record.response_end();
                if self.client.upload.is_complete() {
                    self.record.request_end();
                }
                Outcome::Ended(End::Relayed)
            }
            Err(Ended::Client(code)) => {
                upstream.to_upstream.send_reset(code);
                self.cut_off("the client closed", code);
                Outcome::Left
            }
            Err(Ended::Overloaded) => {
                upstream.to_upstream.send_reset(Reason::CANCEL);
                let cut_off = "cut off: the client does not read it, and no memory is left for it";
                self.fail_response(&Failure::MemoryExhausted, cut_off);
                Outcome::Ended(End::Relayed)
            }
            Err(Ended::Failed(failure)) => {
                upstream.to_upstream.send_reset(Reason::CANCEL);
                self.fail_response(&failure, &failure.to_string());
                Outcome::Ended(End::Relayed)
            }
            Err(Ended::Upstream(error)) => {
                upstream.lease.record_end();
                self.break_off(&error, address);
                Outcome::Ended(End::Relayed)
            }
        }
    }

    /// Sends the head of the response. Returns what relays the rest.
    fn send_head(
        &mut self,
        response: Response<RecvStream>,
        from_proxy: bool,
        plan: &Plan,
        endpoint: &Endpoint,
    ) -> Result<Relay, h2::Error> {
        let (mut parts, body) = response.into_parts();
        if plan.rule().is_some() {
            let session = plan.session_edit(endpoint.tag());
            let edits = plan.response_edits(&[], &session);
            edits.apply(&mut parts.headers);
        }
        self.record
            .response(parts.status, b"", &parts.headers, Edits::default());
        let download = Relay::new(body, Message::Response { from_proxy });
        let is_grpc = self.client.is_grpc && head::is_grpc(&parts.headers);
        let head = Response::from_parts(parts, ());
        let to_client = self
            .client
            .respond
            .send_response(head, download.is_done())?;
        self.client.is_grpc = is_grpc;
        self.client.to_client = Some(to_client);
        Ok(download)
    }

    /// Relays both bodies. Ready when both have ended.
    fn poll_relay(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Upstream,
        download: &mut Relay,
        address: SocketAddr,
    ) -> Poll<Result<(), Ended>> {
        self.client.stream.record_progress();
        self.judge_again().map_err(Ended::Failed)?;
        self.poll_upload(cx, upstream)?;
        let to_client = self.client.to_client.as_mut();
        if let Some(to_client) = to_client.filter(|_| !download.is_done()) {
            match download.poll(cx, to_client, &self.client.stream.io, &mut self.record) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(RelayError::Sender(error))) => {
                    return Poll::Ready(Err(Ended::Upstream(error)));
                }
                Poll::Ready(Err(RelayError::TooLarge)) => {
                    let limit = TooLarge::Trailers;
                    let failure = Failure::UpstreamTooLarge { address, limit };
                    return Poll::Ready(Err(Ended::Failed(failure)));
                }
                // If the client has closed its stream, this returns the error code.
                Poll::Ready(Err(RelayError::ReceiverClosed)) | Poll::Pending => {
                    let held = if download.is_blocked() {
                        download.read_ahead(cx, &mut self.record)
                    } else {
                        0
                    };
                    upstream.lease.record_held(held);
                    if self.client.charge(held).is_err() {
                        return Poll::Ready(Err(Ended::Overloaded));
                    }
                    let to_client = self.client.to_client.as_mut();
                    return to_client.map_or(Poll::Pending, |to_client| {
                        let reset = to_client.poll_reset(cx);
                        reset.map(|code| Err(Ended::Client(code.unwrap_or(Reason::CANCEL))))
                    });
                }
            }
        }
        if !self.client.upload.is_done() {
            // The response has ended. The upstream may still read the request, until it resets it.
            if upstream.to_upstream.poll_reset(cx).is_pending() {
                return Poll::Pending;
            }
            self.client.upload.stop();
        }
        Poll::Ready(Ok(()))
    }

    /// The result of an attempt whose stream, or connection, ended before the response. `is_sent`:
    /// the connection has taken the stream.
    fn failed(
        &mut self,
        error: &h2::Error,
        attempt: &mut Attempt<'_>,
        lease: &Lease,
        is_sent: bool,
    ) -> Result<Outcome, AttemptError> {
        let address = attempt.endpoint.address;
        let reason = error.to_string();
        let is_repeatable = self.head.method.is_idempotent() || !is_sent;
        let acceptance = lease.acceptance();
        let rejected = AttemptError::handshake(address, &reason, acceptance, is_repeatable);
        if let Some(rejected) = rejected {
            return Err(rejected);
        }
        // The peer has not processed this stream.
        let refused = error.reason() == Some(Reason::REFUSED_STREAM);
        let unprocessed = error.is_remote() && (error.is_go_away() || refused);
        if error.is_remote() && refused && lease.was_over_limit() && attempt.may_requeue() {
            return Err(AttemptError::over_limit(address, reason));
        }
        match error.reason() {
            Some(code) if error.is_remote() && !unprocessed => Ok(Outcome::Ended(End::Reset(code))),
            Some(_) if error.is_library() => Err(AttemptError::malformed(address, reason)),
            _ if !lease.is_settled() && is_repeatable => Err(AttemptError::unsettled(address)),
            _ => {
                // The peer may close a pooled connection just when it is used.
                let is_stale = lease.is_reused() || !is_sent;
                let is_safe = unprocessed || is_stale && is_repeatable;
                Err(AttemptError::closed(address, reason, is_safe))
            }
        }
    }

    /// The upstream's stream ended within its response.
    fn break_off(&mut self, error: &h2::Error, address: SocketAddr) {
        let code = reset_code(error);
        if error.is_reset() && error.is_remote() {
            self.cut_off("the application reset the stream", code);
            return self.client.respond.send_reset(code);
        }
        let reason = error.to_string();
        let cut_off = format!("cut off before the response ended: {error}");
        self.fail_response(&Failure::UpstreamClosed { address, reason }, &cut_off);
    }

    /// Ends a response that has begun: a gRPC call with its status, any other one with a reset.
    fn fail_response(&mut self, failure: &Failure, cut_off: &str) {
        self.record.fail(failure);
        self.record.cut_off(cut_off);
        let trailers = LocalReply::from(failure).grpc_trailers();
        let ended = match &mut self.client.to_client {
            Some(to_client) if self.client.is_grpc => to_client.send_trailers(trailers).is_ok(),
            _ => false,
        };
        if !ended {
            self.client.respond.send_reset(match failure {
                Failure::HeadersTooLarge(_) | Failure::UpstreamTooLarge { .. } => {
                    Reason::ENHANCE_YOUR_CALM
                }
                _ => Reason::INTERNAL_ERROR,
            });
        }
    }

    /// Replies in place of the application.
    fn reply(&mut self, answer: Answer) {
        let is_failure = matches!(answer, Answer::Failure(_));
        let reply = self.record.local_reply(answer);
        let head_only = self.head.method == Method::HEAD;
        let (head, body) = if self.client.is_grpc && is_failure {
            reply.grpc()
        } else {
            reply.http2(head_only)
        };
        // A client that has closed needs no response. Dropped, the stream tells the client that the
        // rest of its request is not read.
        if let Ok(mut stream) = self.client.respond.send_response(head, body.is_empty())
            && !body.is_empty()
        {
            let _ = stream.send_data(self.client.stream.io.queue(body), true);
        }
        self.client.stream.io.queue_ended(self.client.cost);
    }

    fn cut_off(&mut self, what: &str, code: Reason) {
        self.record.cut_off(&format!("{what}: {code:?}"));
    }
}

impl Protocol for Http2 {
    type Head = Parts;
    type End = End;
    type Tunnel = Tunnel;

    fn view(head: &Parts) -> RequestView<'_> {
        head::view(head)
    }

    fn prepare(exchange: &mut Exchange, plan: &Plan, flow: &Flow) -> Result<(), Failure> {
        let own = flow.request_edits();
        let prepared = head::prepare(&mut exchange.head, exchange.added.edits(plan, &own));
        let request = head::view(&exchange.head);
        exchange.record.request(&request, Edits::default());
        let copied = || CallHead::Http2(Box::new(exchange.head.clone()));
        exchange.record.mirror(plan.mirrors(), &request, copied);
        prepared
    }

    fn add_policy_fields(exchange: &mut Exchange, plan: &Plan, flow: &Flow) {
        let own = flow.request_edits();
        exchange
            .added
            .edits(plan, &own)
            .apply(&mut exchange.head.headers);
        let request = head::view(&exchange.head);
        exchange.record.request(&request, Edits::default());
    }

    fn attempt(
        exchange: &mut Exchange,
        plan: &Plan,
        flow: &Flow,
        attempt: &mut Attempt<'_>,
    ) -> impl Future<Output = Result<Outcome, AttemptError>> {
        exchange.attempt(plan, flow, attempt)
    }

    async fn tunnel(
        exchange: &mut Exchange,
        tunnel: Tunnel,
        plan: &Plan,
        attempt: Attempt<'_>,
    ) -> Outcome {
        let (response, mut upstream) = *tunnel;
        let relayed = exchange.relay_response(response, &mut upstream, plan, &attempt.endpoint);
        relayed.await
    }

    fn poll_left(&mut self, cx: &mut Context<'_>, record: &mut ExchangeRecord) -> Poll<()> {
        self.upload.read_ahead(cx, record);
        self.poll_gone(cx)
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.respond.poll_reset(cx).map(drop)
    }

    async fn read_body(
        &mut self,
        max: usize,
        expects_continue: bool,
        record: &mut ExchangeRecord,
    ) -> Result<Option<Bytes>, Failure> {
        poll_fn(|cx| {
            self.stream.record_progress();
            let read = self.upload.poll_start(cx, max, record);
            self.charge(0)?;
            if let Poll::Ready(read) = read {
                return Poll::Ready(Ok(read.ok()));
            }
            if expects_continue && !mem::replace(&mut self.is_continued, true) {
                let mut interim = Response::new(());
                *interim.status_mut() = StatusCode::CONTINUE;
                // An error means that the client has closed, which is detected below.
                drop(self.respond.send_informational(interim));
            }
            self.poll_gone(cx).map(|()| Ok(None))
        })
        .await
    }

    fn rewind(&mut self) -> bool {
        self.upload.rewind()
    }
}

impl Http2 {
    /// Charges what the exchange holds, with this part of its response.
    fn charge(&mut self, response: usize) -> Result<(), Failure> {
        let held = self.cost + self.upload.kept() + response;
        self.memory.hold(held)
    }
}

/// Reads the rest of a response in whose place another attempt follows, so that its stream ends
/// without a reset.
async fn discard(upstream: Upstream, mut body: RecvStream) {
    let mut left = MAX_DISCARD;
    while let Some(Ok(data)) = body.data().await {
        if data.len() > left {
            return;
        }
        left -= data.len();
        // Fails only if the stream is closed.
        let _ = body.flow_control().release_capacity(data.len());
    }
    upstream.lease.record_end();
}
