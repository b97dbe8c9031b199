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

use self::attempt::request_failure;
use self::body::Relay;
use self::head::{Framing, HeadSearch, Refused, RequestHead};
use crate::context::flow::Flow;
use crate::context::record::ExchangeRecord;
use crate::error::Failure;
use crate::http::view::RequestView;
use crate::limits::deadline::Deadline;
use crate::limits::lifetime::{Lifetime, drained_or};
use crate::limits::memory::Charge;
use crate::limits::timeouts::{IdleTimer, TimeoutKind};
use crate::protocol::HttpVersion;
use crate::route::{Answer, Plan};
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError};
use crate::serve::call::CallHead;
use crate::serve::copy::{self, End};
use crate::serve::exchange::{self, Protocol};
use crate::upstream::connect::Slot;

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
            exchange.serve().await
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

/// Reads a request's head, or returns `None` if the client or the proxy closes the connection
/// between two requests.
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

/// The state of the client's connection after an exchange.
enum After {
    /// It carries another one.
    KeepAlive,
    /// It is closed once the client has read the response.
    Close,
    /// It is over: it was a tunnel, failed, or has reached its maximum age.
    Closed,
}

/// The client of an exchange.
struct Http1<'a> {
    io: &'a mut Io,
    /// Charged for the buffers of the exchange.
    memory: &'a mut Charge,
    /// The size of the request's head.
    head_size: usize,
    /// The request's head and body.
    upload: Relay,
    /// A part of an interim response may have been written to the client.
    in_interim: bool,
    /// The proxy has sent 100 (Continue): the client does not get this response from the application.
    is_continued: bool,
    /// The client has half-closed its connection.
    has_ended: bool,
    /// Its half-close was passed on.
    end_passed_on: bool,
}

type Exchange<'a> = exchange::Exchange<Http1<'a>>;
type Outcome = exchange::Outcome<After, (Io, Option<Slot>)>;

impl<'a> Exchange<'a> {
    fn new(io: &'a mut Io, flow: &Rc<Flow>, head: RequestHead, memory: &'a mut Charge) -> Self {
        let upload = Relay::with_replay(head.framing, BytesMut::new(), None);
        Self {
            head,
            client: Http1 {
                io,
                memory,
                head_size: 0,
                upload,
                in_interim: false,
                is_continued: false,
                has_ended: false,
                end_passed_on: false,
            },
            record: ExchangeRecord::new(flow, HttpVersion::Http1),
            allowed: flow.allowed(),
            added: exchange::Added::default(),
        }
    }

    /// Carries the exchange to its end.
    async fn serve(&mut self) -> After {
        match self.run(Deadline::default()).await {
            Ok(Outcome::Ended(after)) => after,
            Ok(Outcome::Tunnel(_)) => After::Closed,
            Ok(Outcome::Left) => {
                self.record.client_left();
                self.client.io.reset_on_drop();
                After::Closed
            }
            Err(Answer::Failure(failure))
                if self.record.has_response() || self.client.in_interim =>
            {
                // The client sees that the response is cut off, as without the mesh.
                self.record.fail(&failure);
                self.record.cut_off(&failure.to_string());
                self.client.io.reset_on_drop();
                After::Closed
            }
            Err(answer) => self.reply(answer).await,
        }
    }

    /// Replies in place of the application.
    async fn reply(&mut self, answer: Answer) -> After {
        let closes = matches!(&answer, Answer::Failure(failure) if failure.closes_connection());
        let keep_alive = !closes && self.may_keep_alive(Instant::now());
        let head_only = self.head.method() == b"HEAD";
        let (io, record) = (&mut *self.client.io, &mut self.record);
        reply(io, record, answer, keep_alive, head_only).await;
        if keep_alive {
            After::KeepAlive
        } else {
            After::Close
        }
    }

    /// Records the head for the next hop, and returns it.
    fn next_head(&mut self, plan: &Plan, flow: &Flow) -> BytesMut {
        let own = flow.request_edits();
        let edits = self.added.edits(plan, &own);
        self.record.request(&self.head.view(), edits);
        let mut head = BytesMut::new();
        self.head.write(&mut head, edits);
        self.client.head_size = head.len();
        head
    }

    /// The client's connection can carry another exchange.
    fn may_keep_alive(&self, now: Instant) -> bool {
        self.head.connection.persists(self.head.version)
            && self.client.upload.is_read()
            && !self.client.has_ended
            && !self.record.flow.is_draining()
            && !self.client.io.is_retired(now)
            && !self.record.flow.slot.is_asked_to_end()
    }
}

impl Protocol for Http1<'_> {
    type Head = RequestHead;
    type End = After;
    /// The connection and its slot, which it keeps.
    type Tunnel = (Io, Option<Slot>);

    fn view(head: &RequestHead) -> RequestView<'_> {
        head.view()
    }

    fn prepare(exchange: &mut Exchange<'_>, plan: &Plan, flow: &Flow) -> Result<(), Failure> {
        let head = exchange.next_head(plan, flow);
        let Exchange {
            head: request,
            client,
            record,
            ..
        } = exchange;
        let copied = || CallHead::Http1 {
            head: Bytes::copy_from_slice(&head),
            method: Bytes::copy_from_slice(request.method()),
            chunked: request.framing == Framing::Chunked,
        };
        record.mirror(plan.mirrors(), &request.view(), copied);
        client.upload = Relay::with_replay(request.framing, head, flow.policy_fields());
        client
            .memory
            .begin(client.io.buffered() + client.head_size)?;
        let seen = &mut |data: &[u8]| record.request_body(data);
        let taken = client.upload.decode_buffered(client.io.unread(), seen);
        taken.map_err(|broken| request_failure(&broken))
    }

    fn add_policy_fields(exchange: &mut Exchange<'_>, plan: &Plan, flow: &Flow) {
        let head = exchange.next_head(plan, flow);
        exchange.client.upload.replace_head(head);
    }

    fn attempt(
        exchange: &mut Exchange<'_>,
        plan: &Plan,
        flow: &Flow,
        attempt: &mut Attempt<'_>,
    ) -> impl Future<Output = Result<Outcome, AttemptError>> {
        exchange.attempt(plan, flow, attempt)
    }

    async fn tunnel(
        exchange: &mut Exchange<'_>,
        (mut upstream, _slot): Self::Tunnel,
        _plan: &Plan,
        attempt: Attempt<'_>,
    ) -> Outcome {
        // It counts as a connection, and no longer as a request.
        drop(attempt);
        let flow = exchange.record.flow.clone();
        let (request, allowed) = (exchange.head.view(), exchange.allowed.clone());
        let Http1 { io, memory, .. } = &mut exchange.client;
        let mut end = flow.copy_end(io, &upstream, allowed, Some(request));
        let charge = &mut |bytes, _| memory.hold(bytes).is_ok();
        let copied = copy::bidirectional(io, &mut upstream, None, &mut end, charge).await;
        exchange.record.tunnel(copied.sent, copied.received);
        if copied.end == End::Expired
            && let Err(failure) = flow.judge(Some(&request), &exchange.allowed)
        {
            exchange.record.fail(&failure);
            exchange.record.cut_off(&failure.to_string());
        }
        Outcome::Ended(After::Closed)
    }

    /// A half-close counts: no application can decide yet what it means.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.io.unread().len() < MAX_PIPELINED {
            match self.io.poll_fill(cx) {
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
        expects_continue: bool,
        record: &mut ExchangeRecord,
    ) -> Result<Option<Bytes>, Failure> {
        let mut length = self.upload.body().len();
        while length <= max && !self.upload.is_read() {
            if self.io.unread().is_empty()
                && expects_continue
                && !mem::replace(&mut self.is_continued, true)
                && self.io.write_all(CONTINUE).await.is_err()
            {
                return Ok(None);
            }
            self.io.acknowledge();
            match poll_fn(|cx| self.io.poll_fill(cx)).await {
                Ok(read) if read > 0 => {}
                _ => return Ok(None),
            }
            let seen = &mut |data: &[u8]| {
                length += data.len();
                record.request_body(data);
            };
            let taken = self.upload.decode_buffered(self.io.unread(), seen);
            taken.map_err(|broken| request_failure(&broken))?;
            self.charge()?;
        }
        Ok(Some(self.upload.body()))
    }

    fn rewind(&mut self) -> bool {
        !self.in_interim && self.upload.rewind()
    }
}

impl Http1<'_> {
    /// Charges what the client and its request hold.
    fn charge(&mut self) -> Result<(), Failure> {
        let held = self.head_size + self.upload.buffered();
        self.memory.hold(held + self.io.buffered())
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
