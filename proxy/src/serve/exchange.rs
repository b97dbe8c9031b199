//! Steps 4 to 8 of one request, read from top to bottom: its plan, what may refuse it, and one attempt
//! after another. [`Exchange::run`] is the same for all protocols; a [`Protocol`] has the
//! differences between them. Neither decides on anything else: `plan.rs`, `filters.rs` and `attempts.rs` do.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderValue;

use crate::context::flow::{Allowed, Flow};
use crate::context::record::ExchangeRecord;
use crate::error::Failure;
use crate::http::credentials::Credentials;
use crate::http::edits::{Edits, MeshField};
use crate::http::view::RequestView;
use crate::limits::deadline::Deadline;
use crate::route::{Answer, AttemptSettings, Plan};
use crate::serve::attempts::{Attempt, AttemptError, Attempts, Step, pause};
use crate::serve::filters;

/// One request of a client, and its response.
pub struct Exchange<P: Protocol> {
    /// The head of the request, for each attempt.
    pub head: P::Head,
    /// The client, and the body of its request.
    pub client: P,
    /// The source of metrics, dumps and logs.
    pub record: ExchangeRecord,
    /// The decisions that allow the request.
    pub allowed: Allowed,
    /// Fields that the proxy adds to the head.
    pub added: Added,
}

/// Fields that the proxy adds to the head of a request, besides the changes of its route.
#[derive(Default)]
pub struct Added {
    /// The token that the policies of the pod read from the request, and the fields that the
    /// application gets. `None`: the policies read no token.
    pub credentials: Option<Box<Credentials>>,
    /// The `traceparent` of the proxy's span. `None`: the client's field stays.
    pub trace: Option<Box<HeaderValue>>,
}

impl Added {
    /// Sets fields that the application gets from an authorization server.
    pub fn set_fields(&mut self, fields: Vec<(Arc<str>, Vec<HeaderValue>)>) {
        let credentials = self.credentials.get_or_insert_default();
        for (name, values) in fields {
            credentials.set(&name, values);
        }
    }

    /// Whether the request has a token. The application may get its claims.
    fn has_token(&self) -> bool {
        let credentials = self.credentials.as_ref();
        credentials.is_some_and(|credentials| credentials.token.is_some())
    }

    /// The changes of the request's head: `own`, the added fields, then the changes of the
    /// plan.
    pub fn edits<'a>(&'a self, plan: &'a Plan, own: &'a [MeshField<'a>]) -> Edits<'a> {
        let credentials = self.credentials.as_ref();
        plan.request_edits(Edits {
            policy: credentials.map_or(&[], |credentials| &credentials.fields),
            trace: self.trace.as_deref(),
            ..Edits::of(own)
        })
    }
}

/// How the request of a client ended, unless the proxy replies itself.
pub enum Outcome<End, Tunnel> {
    /// The response was relayed, or cut off.
    Ended(End),
    /// The client has left.
    Left,
    /// Both sides agreed on another protocol: no deadline applies.
    Tunnel(Tunnel),
}

/// [`Outcome`] in a protocol.
pub type OutcomeOf<P> = Outcome<<P as Protocol>::End, <P as Protocol>::Tunnel>;

/// The client of an exchange in one protocol: how its request is forwarded, and the response relayed.
pub trait Protocol: Sized {
    /// The head of a request.
    type Head;
    /// The way in which a response has ended.
    type End;
    /// The connection, or the stream, to an endpoint that has agreed on another protocol.
    type Tunnel;

    /// The head of the request.
    fn view(head: &Self::Head) -> RequestView<'_>;

    /// Ready when the client leaves while its request is not forwarded.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()>;

    /// Reads until the body ends or is longer than `max` bytes; a client that waits for 100 (Continue)
    /// gets it. Returns all that was read, and keeps it for the application, or `None` if the client
    /// leaves.
    async fn read_body(
        &mut self,
        max: usize,
        expects_continue: bool,
        record: &mut ExchangeRecord,
    ) -> Result<Option<Bytes>, Failure>;

    /// Changes the head for the next hop as the plan says, and takes what has arrived of the body.
    fn prepare(exchange: &mut Exchange<Self>, plan: &Plan, flow: &Flow) -> Result<(), Failure>;

    /// Changes the prepared head again: it gets fields of tokens, or of authorization servers.
    fn add_policy_fields(exchange: &mut Exchange<Self>, plan: &Plan, flow: &Flow);

    /// Connects to the endpoint, sends the request, and relays the response.
    async fn attempt(
        exchange: &mut Exchange<Self>,
        plan: &Plan,
        flow: &Flow,
        attempt: &mut Attempt<'_>,
    ) -> Result<OutcomeOf<Self>, AttemptError>;

    /// Relays another protocol until either side closes.
    async fn tunnel(
        exchange: &mut Exchange<Self>,
        tunnel: Self::Tunnel,
        plan: &Plan,
        attempt: Attempt<'_>,
    ) -> OutcomeOf<Self>;

    /// Prepares another attempt. False if a part of what was sent is no longer there.
    fn rewind(&mut self) -> bool;
}

impl<P: Protocol> Exchange<P> {
    /// Carries the exchange to its end, which `deadline` limits. Fails with the answer in place of a
    /// response.
    pub async fn run(&mut self, deadline: Deadline) -> Result<OutcomeOf<P>, Answer> {
        let flow = self.record.flow.clone();
        // 5. Plan.
        let request = P::view(&self.head);
        let plan = flow.plan(request);
        self.added.credentials = flow.credentials(&request);
        let mut backend = flow.backend(&plan).await;
        let announced = flow.announced(request.head);
        let settings = plan.attempts(AttemptSettings {
            deadline,
            preference: backend.preference(Some(&request), flow.peer),
            previous: announced.attempts,
            ..AttemptSettings::default()
        });
        let (record, id) = (&mut self.record, announced.exchange);
        self.added.trace = record.plan(&plan, &backend, &request, id);
        P::prepare(self, &plan, &flow)?;
        // 4. Authorization, limits, and faults.
        let applied = filters::apply(self, &plan, &mut backend, settings.deadline);
        let Some(permit) = applied.await else {
            return Ok(Outcome::Left);
        };
        let permit = permit?;
        let plan = plan.forwarded()?;
        if !self.allowed.authorizers.is_empty() || self.added.has_token() {
            P::add_policy_fields(self, &plan, &flow);
        }
        let mut attempts = Attempts::new(&flow, &backend, settings, permit);
        loop {
            // 6. Balance.
            let mut attempt = attempts.begin(&flow)?;
            self.record.attempt(&attempt.endpoint, attempt.began());
            self.allowed.outside.clone_from(&attempt.outside);
            // 7. Connect, 8. serve.
            let deadline = attempt.deadline();
            let attempted = deadline
                .limit(pin!(P::attempt(self, &plan, &flow, &mut attempt)))
                .await;
            let error = match attempted {
                Ok(Outcome::Tunnel(tunnel)) => {
                    // Boxed: it is rare, and would enlarge the task of every request.
                    return Ok(Box::pin(P::tunnel(self, tunnel, &plan, attempt)).await);
                }
                Ok(outcome) => return Ok(outcome),
                Err(error) => error,
            };
            match attempt.next(error, &flow, || self.client.rewind()) {
                Step::Retry(backoff, failure) => {
                    self.record.retried(&failure);
                    if self.has_left_during(pause(backoff)).await {
                        return Ok(Outcome::Left);
                    }
                }
                Step::Done(failure) => return Err(failure.into()),
            }
        }
    }

    /// Whether the client leaves before the pause ends.
    async fn has_left_during(&mut self, pause: impl Future<Output = ()>) -> bool {
        let mut pause = pin!(pause);
        poll_fn(|cx| match pause.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(false),
            Poll::Pending => self.client.poll_gone(cx).map(|()| true),
        })
        .await
    }

    /// Judges the request again if the policy has changed.
    pub fn judge_again(&mut self) -> Result<(), Failure> {
        let request = || Some(P::view(&self.head));
        self.record.flow.judge_again(&mut self.allowed, request)
    }
}
