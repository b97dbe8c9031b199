//! Step 8 for HTTP/1: one connection of a client, one exchange after the other. `attempt.rs` has
//! the upstream's side of an exchange.
//!
//! Heads are parsed strictly and messages are framed anew, so that two hops never disagree about
//! where a message ends. HTTP/1 leaves as HTTP/1, with the case and order of its fields.

mod attempt;
pub mod body;
pub mod call;
mod discard;
pub mod head;

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use diy_mesh_runtime::admission::Class;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::{timeout, timeout_at};

use self::attempt::{Outcome, request_failure};
use self::body::Relay;
use self::head::{Framing, HeadSearch, Refused, RequestHead};
use crate::context::flow::{Allowed, Flow};
use crate::context::record::ExchangeRecord;
use crate::error::Failure;
use crate::limits::lifetime::{Lifetime, drained_or};
use crate::limits::memory::Charge;
use crate::limits::timeouts::{IdleTimer, TimeoutKind};
use crate::protocol::HttpVersion;
use crate::route::{Answer, AttemptSettings, Plan};
use crate::secure::io::Io;
use crate::serve::attempts::{Attempts, Step, pause};
use crate::serve::call::CallHead;
use crate::serve::copy::{self, End};
use crate::serve::filters::{self, Client};

/// An unfinished head above this size gets a buffer of [`LARGE_HEAD`] bytes: buffers that grow step by
/// step would leave gaps in the heap.
const MAX_SMALL_HEAD: usize = 4 * 1024;
const LARGE_HEAD: usize = 36 * 1024;
/// Bytes of further requests from which the end of the client's connection is no longer watched.
const MAX_PIPELINED: usize = 16 * 1024;
/// Bytes that are read from a client after the last response, so that it is not lost to a reset.
const MAX_LINGER: usize = 256 * 1024;
/// How long they are read.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Serves a client's connection until either side closes it.
pub async fn serve(mut client: Io, flow: Rc<Flow>) {
    let closes_at = client.lifetime().map(Lifetime::closes_idle_at);
    let mut end = pin!(drained_or(&flow.worker.drain, closes_at));
    let mut idle = IdleTimer::new(flow.worker.config.timeouts.http1_idle);
    let mut memory = flow.charge();
    flow.slot.set(Class::Idle);
    loop {
        idle.touch();
        let reading = read_request(&mut client, &flow, end.as_mut(), &mut idle, &mut memory);
        let request = match reading.await {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(failure) => return Box::pin(refuse(client, &flow, memory, failure)).await,
        };
        flow.slot.touch();
        // Boxed, as all that does not wait for a request: most connections do.
        let exchange = Box::pin(async {
            let mut exchange = Exchange::new(&mut client, &flow, request, &mut memory);
            exchange.run().await
        });
        match exchange.await {
            After::KeepAlive => flow.slot.set(Class::BetweenExchanges),
            After::Close => return Box::pin(linger(client)).await,
            After::Closed => return,
        }
    }
}

/// Replies to what is no request, and closes the connection.
async fn refuse(mut client: Io, flow: &Rc<Flow>, memory: Charge, failure: Failure) {
    let mut record = ExchangeRecord::new(flow, HttpVersion::Http1);
    reply(&mut client, &mut record, failure.into(), false, false).await;
    drop((record, memory));
    linger(client).await;
}

/// Reads a request's head. None if the client or the proxy closes the connection between two
/// requests.
async fn read_request(
    client: &mut Io,
    flow: &Flow,
    mut end: Pin<&mut impl Future<Output = ()>>,
    idle_timer: &mut IdleTimer,
    memory: &mut Charge,
) -> Result<Option<RequestHead>, Failure> {
    let mut search = HeadSearch::default();
    let mut deadline = None;
    loop {
        if let Some(end) = search.find_end(client.unread())? {
            let raw = client.unread().split_to(end).freeze();
            return RequestHead::parse(raw).map(Some).map_err(Failure::from);
        }
        let idle = search.is_blank();
        if !idle {
            enlarge(client.unread());
        }
        memory.begin(client.buffered())?;
        let filled = if idle {
            poll_fn(|cx| match client.poll_fill(cx) {
                Poll::Pending => {
                    if idle_timer.poll(cx).is_ready() {
                        flow.count_timeout(TimeoutKind::Http1Idle);
                    } else if !flow.slot.is_asked_to_end() {
                        ready!(end.as_mut().poll(cx));
                    }
                    // An error means that the client has closed.
                    let _ = Pin::new(&mut *client).poll_shutdown(cx);
                    Poll::Ready(Ok(0))
                }
                filled => filled,
            })
            .await
        } else {
            // One deadline for the whole head: a byte now and then does not extend it.
            let head_timeout = flow.worker.config.timeouts.request_head;
            let deadline =
                *deadline.get_or_insert_with(|| tokio::time::Instant::now() + head_timeout);
            timeout_at(deadline, poll_fn(|cx| client.poll_fill(cx)))
                .await
                .map_err(|_| {
                    flow.count_timeout(TimeoutKind::RequestHead);
                    Failure::RequestTimeout
                })?
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

/// Enlarges the buffer of an unfinished head that is not small.
fn enlarge(head: &mut BytesMut) {
    if head.len() > MAX_SMALL_HEAD {
        head.reserve(LARGE_HEAD.saturating_sub(head.len()));
    }
}

/// What the client's connection does after an exchange.
enum After {
    /// It carries another one.
    KeepAlive,
    /// It is closed once the client has read the response.
    Close,
    /// It is over: it was a tunnel, failed, or has reached its maximum age.
    Closed,
}

/// One request and its response.
struct Exchange<'a> {
    client: &'a mut Io,
    /// Charged for the buffers of the exchange.
    memory: &'a mut Charge,
    /// The size of the request's head.
    head_size: usize,
    request: RequestHead,
    record: ExchangeRecord,
    /// The request's head and body.
    upload: Relay,
    /// A part of an interim response may have been written to the client.
    in_interim: bool,
    /// The proxy has sent 100 (Continue): the client gets none of the application.
    is_continued: bool,
    /// The client has half-closed its connection.
    client_ended: bool,
    /// Its half-close was passed on.
    end_passed_on: bool,
    /// What allows the request.
    allowed: Allowed,
}

impl<'a> Exchange<'a> {
    fn new(
        client: &'a mut Io,
        flow: &Rc<Flow>,
        request: RequestHead,
        memory: &'a mut Charge,
    ) -> Self {
        let record = ExchangeRecord::new(flow, HttpVersion::Http1);
        let upload = Relay::with_replay(request.framing, BytesMut::new(), None);
        Self {
            client,
            memory,
            head_size: 0,
            request,
            record,
            upload,
            in_interim: false,
            is_continued: false,
            client_ended: false,
            end_passed_on: false,
            allowed: flow.allowed(),
        }
    }

    /// Carries the exchange to its end.
    async fn run(&mut self) -> After {
        let flow = self.record.flow.clone();
        // 5. Plan.
        let request = self.request.view();
        let mut plan = flow.plan(request);
        let mut backend = flow.backend(&plan).await;
        let announced = flow.announced(&self.request);
        let settings = plan.attempts(AttemptSettings {
            preference: backend.preference(Some(&request), flow.peer),
            previous: announced.attempts,
            ..AttemptSettings::default()
        });
        self.record
            .plan(&mut plan, &backend, &request, announced.exchange);
        self.write_head(&plan, &flow);
        if let Err(failure) = self.take_body() {
            return self.fail(failure).await;
        }
        // 4. Authorization, limits, and faults.
        let request = self.request.view();
        let deadline = settings.deadline;
        let mut client = Waiting {
            client: self.client,
            memory: self.memory,
            head_size: self.head_size,
            upload: &mut self.upload,
            expects_continue: request.expects_continue(),
            is_continued: &mut self.is_continued,
        };
        let record = &mut self.record;
        let applied = filters::apply(
            &mut plan,
            &request,
            &mut backend,
            deadline,
            record,
            &mut self.allowed,
            &mut client,
        );
        let permit = match applied.await {
            Some(Ok(permit)) => permit,
            Some(Err(answer)) => return self.reply(answer).await,
            None => {
                self.record.client_left();
                self.client.reset_on_drop();
                return After::Closed;
            }
        };
        if !self.allowed.authorizers.is_empty() || plan.has_token() {
            let head = self.head(&plan, &flow);
            self.head_size = head.len();
            self.upload.replace_head(head);
        }
        let mut attempts = Attempts::new(&flow, &backend, settings, permit);
        loop {
            // 6. Balance.
            let mut attempt = match attempts.begin(&flow) {
                Ok(attempt) => attempt,
                Err(failure) => return self.fail(failure).await,
            };
            self.record.attempt(&attempt.endpoint, attempt.began());
            self.allowed.outside.clone_from(&attempt.outside);
            // 7. Connect, 8. serve.
            let deadline = attempt.deadline();
            let ended = deadline
                .limit(pin!(self.attempt(&flow, &plan, &mut attempt)))
                .await;
            let error = match ended {
                Ok(Outcome::After(after)) => return after,
                Ok(Outcome::Tunnel(upstream, _slot)) => {
                    drop(attempt);
                    // Boxed: it is rare, and would enlarge the task of every connection.
                    return Box::pin(self.tunnel(upstream)).await;
                }
                Err(error) => error,
            };
            let rewind = || !self.in_interim && self.upload.rewind();
            match attempt.next(error, &flow, rewind) {
                Step::Retry(backoff, failure) => {
                    self.record.retried(&failure);
                    if self.has_left_during(pause(backoff)).await {
                        self.record.client_left();
                        self.client.reset_on_drop();
                        return After::Closed;
                    }
                }
                Step::Done(failure) => return self.fail(failure).await,
            }
        }
    }

    /// Whether the client leaves before the pause ends.
    async fn has_left_during(&mut self, pause: impl Future<Output = ()>) -> bool {
        let mut client = Waiting {
            client: self.client,
            memory: self.memory,
            head_size: self.head_size,
            upload: &mut self.upload,
            expects_continue: false,
            is_continued: &mut self.is_continued,
        };
        let mut pause = pin!(pause);
        poll_fn(|cx| match pause.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(false),
            Poll::Pending => client.poll_gone(cx).map(|()| true),
        })
        .await
    }

    /// Writes the head for the next hop.
    fn write_head(&mut self, plan: &Plan, flow: &Flow) {
        let head = self.head(plan, flow);
        let request = self.request.view();
        self.head_size = head.len();
        let copied = || CallHead::Http1 {
            head: Bytes::copy_from_slice(&head),
            method: Bytes::copy_from_slice(self.request.method()),
            chunked: self.request.framing == Framing::Chunked,
        };
        self.record.mirror(plan.mirrors(), &request, copied);
        self.upload = Relay::with_replay(self.request.framing, head, flow.policy_fields());
    }

    /// Records the head for the next hop, and returns it.
    fn head(&mut self, plan: &Plan, flow: &Flow) -> BytesMut {
        let own = flow.request_edits();
        let edits = plan.request_edits(&own);
        self.record.request(&self.request.view(), edits);
        let mut head = BytesMut::new();
        self.request.write(&mut head, edits);
        head
    }

    /// Charges the request, and takes what has arrived of its body.
    fn take_body(&mut self) -> Result<(), Failure> {
        let held = self.client.buffered() + self.head_size;
        self.memory.begin(held)?;
        let record = &mut self.record;
        let seen = &mut |data: &[u8]| record.request_body(data);
        let taken = self.upload.decode_buffered(self.client.unread(), seen);
        taken.map_err(|broken| request_failure(&broken))
    }

    /// Judges the request again if the policy has changed.
    fn judge_again(&mut self) -> Result<(), Failure> {
        let flow = &self.record.flow;
        flow.judge_again(&mut self.allowed, || Some(self.request.view()))
    }

    /// Copies the bytes of another protocol both ways.
    async fn tunnel(&mut self, mut upstream: Io) -> After {
        let flow = self.record.flow.clone();
        let request = self.request.view();
        let allowed = self.allowed.clone();
        let mut end = flow.copy_end(self.client, &upstream, allowed, Some(request));
        let charge = &mut |bytes, _| self.memory.hold(bytes).is_ok();
        let copied = copy::bidirectional(self.client, &mut upstream, None, &mut end, charge).await;
        self.record.tunnel(copied.sent, copied.received);
        if copied.end == End::Expired
            && let Err(failure) = flow.judge(Some(&request), &self.allowed)
        {
            self.record.fail(&failure);
            self.record.cut_off(&failure.to_string());
        }
        After::Closed
    }

    /// The client's connection can carry another exchange.
    fn may_keep_alive(&self, now: Instant) -> bool {
        self.request.connection.persists(self.request.version)
            && self.upload.is_read()
            && !self.client_ended
            && !self.record.flow.is_draining()
            && !self.client.is_retired(now)
            && !self.record.flow.slot.is_asked_to_end()
    }

    /// Replies in place of the application.
    async fn fail(&mut self, failure: Failure) -> After {
        if self.record.has_response() || self.in_interim {
            // The client sees that the response is cut off, as without the mesh.
            self.record.fail(&failure);
            self.record.cut_off(&failure.to_string());
            self.client.reset_on_drop();
            return After::Closed;
        }
        self.reply(Answer::Failure(failure)).await
    }

    async fn reply(&mut self, answer: Answer) -> After {
        let closes = matches!(&answer, Answer::Failure(failure) if failure.closes_connection());
        let keep_alive = !closes && self.may_keep_alive(Instant::now());
        let head_only = self.request.method() == b"HEAD";
        reply(self.client, &mut self.record, answer, keep_alive, head_only).await;
        if keep_alive {
            After::KeepAlive
        } else {
            After::Close
        }
    }
}

/// The client of a request that is not forwarded yet. A half-close counts as its end: no application
/// can decide yet what it means.
struct Waiting<'a> {
    client: &'a mut Io,
    memory: &'a mut Charge,
    head_size: usize,
    upload: &'a mut Relay,
    expects_continue: bool,
    is_continued: &'a mut bool,
}

impl Waiting<'_> {
    /// Charges what the exchange holds.
    fn charge(&mut self) -> Result<(), Failure> {
        let held = self.head_size + self.upload.buffered();
        self.memory.hold(held + self.client.buffered())
    }
}

impl Client for Waiting<'_> {
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.client.unread().len() < MAX_PIPELINED {
            match self.client.poll_fill(cx) {
                Poll::Ready(Ok(read)) if read > 0 => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => break,
            }
        }
        // Reset, as if it had left, if no memory is left for what it has sent.
        self.charge().map_or(Poll::Ready(()), |()| Poll::Pending)
    }

    async fn read_body(
        &mut self,
        max: usize,
        record: &mut ExchangeRecord,
    ) -> Result<Option<Bytes>, Failure> {
        let mut length = self.upload.body().len();
        while length <= max && !self.upload.is_read() {
            if self.client.unread().is_empty()
                && self.expects_continue
                && !mem::replace(self.is_continued, true)
                && self.client.write_all(CONTINUE).await.is_err()
            {
                return Ok(None);
            }
            self.client.acknowledge();
            match poll_fn(|cx| self.client.poll_fill(cx)).await {
                Ok(read) if read > 0 => {}
                _ => return Ok(None),
            }
            let seen = &mut |data: &[u8]| {
                length += data.len();
                record.request_body(data);
            };
            let taken = self.upload.decode_buffered(self.client.unread(), seen);
            taken.map_err(|broken| request_failure(&broken))?;
            self.charge()?;
        }
        Ok(Some(self.upload.body()))
    }
}

/// Sends the proxy's own response.
async fn reply(
    client: &mut Io,
    record: &mut ExchangeRecord,
    answer: Answer,
    keep_alive: bool,
    head_only: bool,
) {
    let reply = record.local_reply(answer).http1(keep_alive, head_only);
    // A client that has closed needs no response.
    let _ = client.write_all(&reply).await;
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::TooLarge(limit) => Self::HeadersTooLarge(limit),
            Refused::Malformed(reason) => Self::BadRequest(reason),
        }
    }
}

/// Closes a connection so that the client sees the last response: a close while its bytes still
/// arrive would reset it.
async fn linger(mut client: Io) {
    if client.shutdown().await.is_err() {
        return;
    }
    let mut left = MAX_LINGER;
    let discarded = poll_fn(|cx| client.poll_discard(cx, &mut left));
    // A client that sends for longer gets the reset.
    let _ = timeout(LINGER_TIMEOUT, discarded).await;
}
