//! One stream: a request, its response, and both bodies at the same time. A reset of either side
//! reaches the other one at once and with the same code: gRPC's cancellation and deadlines depend
//! on it.

use std::future::{Future, poll_fn};
use std::mem;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use diy_mesh_http2::{Error, ErrorCode, Fields, Opened, Received, Request, Response, Sender};
use http::uri::Scheme;
use http::{Method, StatusCode};
use tokio::time::timeout_at;

use super::relay::{Message, Relay, RelayError, reset_code};
use super::{STREAM_COST, Stream, head};
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
use crate::upstream::connect::http2::Lease;
use diy_mesh_model::exchange::Direction;

/// The maximum number of interim responses that a client gets, of all attempts. Flow control does not
/// limit them: they would fill the memory of the proxy while the client does not read.
const MAX_INTERIM: u32 = 16;

/// Charges a request, which ends if that fails. Forwards it to an endpoint in a task of its own, and the
/// response to the client, once it has a place. Fails if there is no memory for it, nor for a response.
pub(super) fn start(opened: Opened, stream: Stream) -> Result<(), Failure> {
    let Opened {
        request: Received {
            message: head,
            is_cut,
        },
        sender: respond,
        receiver: body,
    } = opened;
    let mut memory = stream.flow.charge();
    let cost = STREAM_COST + head.fields.memory();
    let refused = memory.begin(cost).err();
    if refused.is_some() {
        memory.hold(cost)?;
    }
    let too_large = || {
        let limit = is_cut.then_some(TooLarge::Header);
        let limit = limit.or_else(|| head::too_large(&head));
        limit.map(Failure::HeadersTooLarge)
    };
    let malformed = || head::malformed(&head).map(Failure::BadRequest);
    let refused = refused.or_else(too_large).or_else(malformed);
    let is_grpc = head::is_grpc(&head.fields);
    let deadline = if is_grpc {
        head::deadline(&head)
    } else {
        Deadline::default()
    };
    // Boxed where it is made: a task moves its future twice, and this one has several KiB. A function
    // would hold its arguments twice.
    tokio::task::spawn_local(Box::pin(async move {
        let shared = stream.clone_shared();
        let flow = shared.flow.clone();
        let mut client = Http2 {
            respond,
            upload: Relay::new(body, Message::Request),
            is_grpc,
            has_response: false,
            interim_left: MAX_INTERIM,
            is_continued: false,
            stream,
            cost: memory.amount(),
            memory,
        };
        // If the client resets the stream meanwhile, the application has not seen it: it does not count.
        let mut waiting = pin!(shared.place());
        let place = poll_fn(|cx| match waiting.as_mut().poll(cx) {
            Poll::Pending => client.poll_gone(cx).map(|()| None),
            taken => taken,
        });
        let Some(_place) = place.await else {
            return;
        };
        let mut exchange = Exchange {
            head,
            record: ExchangeRecord::new(&flow, HttpVersion::Http2),
            allowed: flow.allowed(),
            added: exchange::Added::default(),
            client,
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
    respond: Sender,
    upload: Relay,
    is_grpc: bool,
    /// The head of the response was sent.
    has_response: bool,
    /// The number of interim responses that the client still gets.
    interim_left: u32,
    /// The proxy has sent 100 (Continue): the client does not get this response from the application.
    is_continued: bool,
    stream: Stream,
    /// Charged for the stream and the heads, and for what the relays hold.
    memory: Charge,
    /// The memory of the stream and the heads.
    cost: usize,
}

type Exchange = exchange::Exchange<Http2>;
type Outcome = exchange::Outcome<End, Tunnel>;
/// The head of the response, and the stream.
type Tunnel = Box<(Response, Upstream)>;

/// How a response ended.
enum End {
    /// It was relayed, or cut off.
    Relayed,
    /// The upstream reset the stream before: the client gets the same code.
    Reset(ErrorCode),
}

/// The stream to the endpoint. Fields are dropped in this order: the stream before its slot.
struct Upstream {
    sender: Sender,
    download: Relay,
    lease: Lease,
}

/// Why an attempt ended early.
enum Ended {
    /// The client reset the stream.
    Client(ErrorCode),
    Upstream(Error),
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
                self.client.respond.reset(code);
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
        if self.head.protocol().is_some() && !lease.supports_extended_connect() {
            let reason = "it does not accept extended CONNECT requests";
            return Err(AttemptError::malformed(address, reason));
        }
        // 8. Serve.
        attempt.in_flight.connected();
        self.judge_again().map_err(AttemptError::last)?;
        let sent = {
            let request = self.next_request(attempt, &lease);
            let places = self.client.stream.places.clone();
            lease.send(&request, self.client.upload.is_done(), Some(places))
        };
        let (sender, receiver) = match sent {
            Ok(stream) => stream,
            Err(error) => return self.failed(&error, attempt, &lease, false),
        };
        let from_proxy = lease.is_peer();
        let mut upstream = Upstream {
            sender,
            download: Relay::new(receiver, Message::Response { from_proxy }),
            lease,
        };
        let response = match poll_fn(|cx| self.poll_response(cx, &mut upstream)).await {
            Ok(response) => response,
            Err(Ended::Client(code)) => {
                upstream.sender.reset(code);
                self.cut_off("the client closed", code);
                return Ok(Outcome::Left);
            }
            Err(Ended::Overloaded) => {
                upstream.sender.reset(ErrorCode::CANCEL);
                return Err(AttemptError::last(Failure::MemoryExhausted));
            }
            Err(Ended::Failed(failure)) => {
                upstream.sender.reset(ErrorCode::CANCEL);
                return Err(AttemptError::last(failure));
            }
            Err(Ended::Upstream(error)) => {
                upstream.lease.record_end();
                return self.failed(&error, attempt, &upstream.lease, true);
            }
        };
        let Received {
            message: mut response,
            is_cut,
        } = response;
        if upstream.lease.supports_extended_connect() {
            flow.destination.supports_extended_connect.set(true);
        }
        let is_peer = upstream.lease.is_peer();
        Edits::of(response_edits(is_peer)).apply(&mut response.fields);
        let status = response.status.as_u16();
        let verdict = Verdict::of(status, &response.fields, is_peer, SystemTime::now);
        let request = Replayable {
            is_kept: self.client.upload.can_rewind(),
            is_idempotent: self.head.method.is_idempotent(),
        };
        if let Err(error) = attempt.answered(status, verdict, request, flow) {
            if self.client.upload.is_complete() && !upstream.download.is_done() {
                let mut memory = self.client.stream.flow.charge();
                if memory.begin(STREAM_COST).is_ok() {
                    in_background(memory, discard(upstream));
                }
            }
            return Err(error);
        }
        self.client.upload.discard_replay();
        if is_cut || response.fields.size() > MAX_SECTION {
            upstream.sender.reset(ErrorCode::ENHANCE_YOUR_CALM);
            let limit = TooLarge::Header;
            let failure = Failure::UpstreamTooLarge { address, limit };
            return Err(AttemptError::last(failure));
        }
        self.client.cost += response.fields.memory();
        if self.client.charge(0).is_err() {
            return Err(AttemptError::last(Failure::MemoryExhausted));
        }
        if self.head.method == Method::CONNECT && response.status.is_success() {
            return Ok(Outcome::Tunnel(Box::new((response, upstream))));
        }
        let relayed = self.relay_response(response, &mut upstream, plan, &attempt.endpoint);
        Ok(relayed.await)
    }

    /// The head for the endpoint.
    fn next_request(&self, attempt: &Attempt<'_>, lease: &Lease) -> Request {
        let mut request = self.head.clone();
        if let Some(announced) = attempt.announced(lease.is_peer(), self.record.id()) {
            announced.add_to(&mut request.fields, lease.take_first_announcement());
        }
        head::set_deadline(&mut request, attempt.exchange_deadline());
        if attempt.endpoint.info.server_tls().is_some() {
            request.scheme = request.scheme.and(Some(Scheme::HTTPS));
        }
        request
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
        let is_extended = self.head.protocol().is_some();
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
            Poll::Pending => self.client.poll_gone(cx).map(|()| None),
        })
        .await
    }

    /// Sends the request's body until the response's head has arrived.
    fn poll_response(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Upstream,
    ) -> Poll<Result<Received<Response>, Ended>> {
        self.client.stream.record_progress();
        self.judge_again().map_err(Ended::Failed)?;
        self.poll_upload(cx, upstream)?;
        if self.client.charge(0).is_err() {
            return Poll::Ready(Err(Ended::Overloaded));
        }
        loop {
            let response = match upstream.download.poll_head(cx) {
                Poll::Ready(response) => response.map_err(Ended::Upstream)?,
                Poll::Pending => return self.poll_client_reset(cx),
            };
            if !response.message.status.is_informational() {
                return Poll::Ready(Ok(response));
            }
            if self.client.interim_left > 0 {
                self.client.interim_left -= 1;
                self.send_interim(response.message, upstream.lease.is_peer());
            }
        }
    }

    /// Sends an interim response, except a second 100 (Continue).
    fn send_interim(&mut self, mut interim: Response, is_peer: bool) {
        Edits::of(response_edits(is_peer)).apply(&mut interim.fields);
        if !self.client.is_continued || interim.status != StatusCode::CONTINUE {
            // An error means that the client has closed, which is detected elsewhere.
            drop(self.client.respond.respond(&interim, false));
        }
    }

    fn poll_client_reset<T>(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, Ended>> {
        let reset = self.client.respond.poll_reset(cx);
        reset.map(|error| Err(Ended::Client(reset_code(&error))))
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
        match (self.client.upload).poll(cx, &upstream.sender, &mut self.record) {
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
        response: Response,
        upstream: &mut Upstream,
        plan: &Plan,
        endpoint: &Endpoint,
    ) -> Outcome {
        let is_whole = upstream.download.is_done();
        if self.send_head(response, is_whole, plan, endpoint).is_err() {
            upstream.sender.reset(ErrorCode::CANCEL);
            return Outcome::Left;
        }
        let address = endpoint.address;
        let relayed = poll_fn(|cx| self.poll_relay(cx, upstream, address)).await;
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
                upstream.sender.reset(code);
                self.cut_off("the client closed", code);
                Outcome::Left
            }
            Err(Ended::Overloaded) => {
                upstream.sender.reset(ErrorCode::CANCEL);
                let cut_off = "cut off: the client does not read it, and no memory is left for it";
                self.fail_response(&Failure::MemoryExhausted, cut_off);
                Outcome::Ended(End::Relayed)
            }
            Err(Ended::Failed(failure)) => {
                upstream.sender.reset(ErrorCode::CANCEL);
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

    /// Sends the head of the response. `is_whole`: no body follows.
    fn send_head(
        &mut self,
        mut head: Response,
        is_whole: bool,
        plan: &Plan,
        endpoint: &Endpoint,
    ) -> Result<(), Error> {
        if plan.rule().is_some() {
            let session = plan.session_edit(endpoint.tag());
            let edits = plan.response_edits(&[], &session);
            edits.apply(&mut head.fields);
        }
        self.record
            .response(head.status, b"", &head.fields, Edits::default());
        self.client.respond.respond(&head, is_whole)?;
        self.client.is_grpc = self.client.is_grpc && head::is_grpc(&head.fields);
        self.client.has_response = true;
        Ok(())
    }

    /// Relays both bodies. Ready when both have ended.
    fn poll_relay(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Upstream,
        address: SocketAddr,
    ) -> Poll<Result<(), Ended>> {
        self.client.stream.record_progress();
        self.judge_again().map_err(Ended::Failed)?;
        self.poll_upload(cx, upstream)?;
        let Upstream {
            sender, download, ..
        } = upstream;
        match download.poll(cx, &self.client.respond, &mut self.record) {
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
                if self.client.charge(download.held()).is_err() {
                    return Poll::Ready(Err(Ended::Overloaded));
                }
                return self.poll_client_reset(cx);
            }
        }
        if !self.client.upload.is_done() {
            // The response has ended. The upstream may still read the request, until it resets it.
            if sender.poll_reset(cx).is_pending() {
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
        error: &Error,
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
        let refused = *error == Error::Reset(ErrorCode::REFUSED_STREAM);
        if refused && lease.was_over_limit() && attempt.may_requeue() {
            return Err(AttemptError::over_limit(address, reason));
        }
        // The peer has not processed this stream.
        let unprocessed = refused || matches!(error, Error::GoAway(_));
        match error {
            Error::Reset(code) if !unprocessed => Ok(Outcome::Ended(End::Reset(*code))),
            Error::Violation(_) => Err(AttemptError::malformed(address, reason)),
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
    fn break_off(&mut self, error: &Error, address: SocketAddr) {
        let code = reset_code(error);
        if matches!(error, Error::Reset(_)) {
            self.cut_off("the application reset the stream", code);
            return self.client.respond.reset(code);
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
        let respond = &self.client.respond;
        let takes_trailers = self.client.has_response && self.client.is_grpc;
        let ended = takes_trailers && respond.send_trailers(Fields::from(&trailers)).is_ok();
        if !ended {
            respond.reset(match failure {
                Failure::HeadersTooLarge(_) | Failure::UpstreamTooLarge { .. } => {
                    ErrorCode::ENHANCE_YOUR_CALM
                }
                _ => ErrorCode::INTERNAL_ERROR,
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
        let (head, ()) = head.into_parts();
        let head = Response::from(&head);
        let sent = self.client.respond.respond(&head, body.is_empty());
        if sent.is_ok() && !body.is_empty() {
            let _ = self.client.respond.send(body, true);
        }
        self.client.stream.io.queue_ended(self.client.cost);
    }

    fn cut_off(&mut self, what: &str, code: ErrorCode) {
        self.record.cut_off(&format!("{what}: {code:?}"));
    }
}

impl Protocol for Http2 {
    type Head = Request;
    type End = End;
    type Tunnel = Tunnel;

    fn view(head: &Request) -> RequestView<'_> {
        head::view(head)
    }

    fn prepare(exchange: &mut Exchange, plan: &Plan, flow: &Flow) -> Result<(), Failure> {
        let own = flow.request_edits();
        let prepared = head::prepare(&mut exchange.head, exchange.added.edits(plan, &own));
        exchange.client.cost = STREAM_COST + exchange.head.fields.memory();
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
            .apply(&mut exchange.head.fields);
        exchange.client.cost = STREAM_COST + exchange.head.fields.memory();
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

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // The client sends more than there is memory for, while nobody takes it.
        if self.charge(0).is_err() {
            self.respond.reset(ErrorCode::ENHANCE_YOUR_CALM);
        }
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
                let interim = Response {
                    status: StatusCode::CONTINUE,
                    fields: Fields::default(),
                };
                // An error means that the client has closed, which is detected below.
                drop(self.respond.respond(&interim, false));
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
        let held = self.cost + self.upload.held() + response;
        self.memory.hold(held)
    }
}

/// Reads the rest of a response in whose place another attempt follows, so that its stream ends
/// without a reset.
async fn discard(upstream: Upstream) {
    let Upstream {
        sender: _sender,
        download,
        lease,
    } = upstream;
    let (body, mut left) = (download.into_body(), MAX_DISCARD);
    while let Some(Ok(data)) = poll_fn(|cx| body.poll_data(cx)).await {
        if data.len() > left {
            return;
        }
        left -= data.len();
        body.release(data.len());
    }
    lease.record_end();
}
