//! Steps 4 to 7 of a request, or of an opaque connection: one endpoint after another, until one
//! takes it. This is the only loop that retries; the protocols send, receive and relay.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::balance::{Avoided, Backend, Endpoint, InFlight, Preference};
use crate::connect::Dialer;
use crate::deadline::{Deadline, Limit};
use crate::error::Failure;
use crate::flow::{Direction, Flow};
use crate::http::verdict::{Overload, Retryable, Verdict};
use crate::route::RetryPolicy;
use crate::tls::Acceptance;
use crate::worker::Worker;

/// Endpoints that one request is sent to at most, unless its route asks for another number.
pub const MAX_ATTEMPTS: u32 = 3;

/// What can be sent to an endpoint: a request of either version of HTTP, or an opaque connection.
pub(crate) trait Forward {
    /// How an attempt ends that needs no other one.
    type Outcome;

    /// Step 4: whether the policy of the pod allows it.
    fn authorize(&mut self, flow: &Flow) -> Result<(), Failure>;

    /// The record of the attempts.
    fn attempts(&mut self) -> &mut Attempts;

    /// Steps 7 and 8: connects to `endpoint`, sends, and relays the response.
    async fn attempt(
        &mut self,
        flow: &Flow,
        endpoint: &Rc<Endpoint>,
    ) -> Result<Self::Outcome, AttemptError>;

    /// Ready if the client leaves between two attempts, as far as that shows.
    fn poll_cancelled(&mut self, _: &mut Context<'_>) -> Poll<Self::Outcome> {
        Poll::Pending
    }

    /// Prepares another attempt. False if a part of what was sent is no longer there.
    fn rewind(&mut self) -> bool;
}

/// A failed attempt.
#[derive(Debug)]
pub struct AttemptError {
    /// Why it failed.
    pub failure: Failure,
    /// Whether another attempt is safe.
    pub retry: Retry,
}

/// Whether, and where, another attempt is safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The application may have processed the request.
    Never,
    /// The endpoint accepts no connections: the request did not reach it.
    OtherEndpoint,
    /// The connection was closed before the peer processed the request.
    AnyEndpoint,
}

impl AttemptError {
    /// There is no connection. Another endpoint may accept one.
    pub fn connect(failure: Failure) -> Self {
        let retry = match failure {
            Failure::Overloaded(_) => Retry::Never,
            _ => Retry::OtherEndpoint,
        };
        Self { failure, retry }
    }

    /// The error of a connection that ended before the peer accepted the TLS handshake, if it did.
    /// Without an alert, the peer may have processed the request, so only an idempotent one is safe
    /// to send again.
    pub fn handshake(
        address: SocketAddr,
        reason: &str,
        acceptance: Acceptance,
        is_idempotent: bool,
    ) -> Option<Self> {
        let retry = match acceptance {
            Acceptance::Accepted => return None,
            Acceptance::Unknown if !is_idempotent => Retry::Never,
            Acceptance::Unknown | Acceptance::Rejected => Retry::OtherEndpoint,
        };
        let reason = format!("the peer did not accept it: {reason}");
        let failure = Failure::Handshake { address, reason };
        Some(Self { failure, retry })
    }

    /// The connection ended before the response. `is_safe`: the request may be sent again, to any
    /// endpoint.
    pub fn closed(address: SocketAddr, reason: String, is_safe: bool) -> Self {
        let failure = Failure::UpstreamClosed { address, reason };
        let retry = match is_safe {
            true => Retry::AnyEndpoint,
            false => Retry::Never,
        };
        Self { failure, retry }
    }

    /// The response violates the protocol.
    pub fn malformed(address: SocketAddr, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::last(Failure::UpstreamMalformed { address, reason })
    }

    /// The authenticated proxy of the endpoint replied that its application accepts no connection.
    pub fn not_delivered(address: SocketAddr) -> Self {
        let source = io::Error::new(
            io::ErrorKind::ConnectionRefused,
            "its application accepts no connection",
        );
        Self::connect(Failure::Connect {
            address,
            source: Arc::new(source),
        })
    }

    /// An error after which there is no other attempt.
    pub fn last(failure: Failure) -> Self {
        Self {
            failure,
            retry: Retry::Never,
        }
    }
}

/// Sends to endpoints of `backend` until one takes the request, or no other attempt is safe. Fails
/// with the last attempt's failure, or with that of all endpoints.
pub(crate) async fn forward<F: Forward>(
    request: &mut F,
    flow: &Flow,
    backend: &Rc<Backend>,
) -> Result<F::Outcome, Failure> {
    // 4. Authorization: no application is reached without it. Outbound, the client is the pod's own
    // application.
    if flow.direction == Direction::Inbound {
        request.authorize(flow)?;
    }
    request.attempts().backend = Some(backend.clone());
    let mut failures = Vec::new();
    let time_to_connect = backend.policy().connect_timeout;
    let mut time_to_connect = time_to_connect.unwrap_or(flow.worker.config.timeouts.connect);
    let mut now = tokio::time::Instant::now();
    backend.retries.record_request(now.into_std());
    let summary =
        |failures| Failure::of_attempts(failures, &backend.name(), backend.endpoints_len());
    loop {
        // 6. Balance.
        let attempts = request.attempts();
        let endpoint = match pick(flow, backend, attempts) {
            Ok(endpoint) => endpoint,
            Err(failure) => return Err(summary(failures).unwrap_or(failure)),
        };
        attempts.begin(&endpoint, time_to_connect);
        // 7. Connect, and 8. serve.
        let deadline = request.attempts().deadline();
        let ended = within(deadline, pin!(request.attempt(flow, &endpoint))).await;
        let AttemptError { failure, retry } = match ended {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        let failure = failure.with_policy(|| backend.policy().name.clone());
        request.attempts().fail(&failure, retry);
        let retry = request.attempts().retry_of_route(&failure, retry);
        let begun = std::mem::replace(&mut now, tokio::time::Instant::now());
        if retry == Retry::OtherEndpoint {
            request.attempts().exclude(endpoint.address);
            time_to_connect = time_to_connect.saturating_sub(now - begun);
        }
        let is_retried =
            retry != Retry::Never && request.rewind() && request.attempts().start_retry(flow);
        if !is_retried {
            failures.push(failure.clone());
            return Err(summary(failures).unwrap_or(failure));
        }
        tracing::debug!(destination = %backend.name(), "retrying: {failure}");
        failures.push(failure);
        if let Some(backoff) = request.attempts().backoff() {
            // Boxed: only routes set one.
            let mut pause = Box::pin(tokio::time::sleep(backoff));
            let cancelled = poll_fn(|cx| match pause.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(None),
                Poll::Pending => request.poll_cancelled(cx).map(Some),
            });
            if let Some(outcome) = cancelled.await {
                return Ok(outcome);
            }
            now = tokio::time::Instant::now();
        }
    }
}

/// Step 6: the endpoint for the next attempt.
fn pick(flow: &Flow, backend: &Backend, attempts: &Attempts) -> Result<Rc<Endpoint>, Failure> {
    let Worker { metrics, rng, .. } = &*flow.worker;
    let (policy, rng) = (flow.worker.policy(), &mut rng.borrow_mut());
    let picked = backend.pick_for(attempts.preference, &attempts.avoided, &policy.zone, rng)?;
    let zone = &picked.info.zone;
    if !zone.is_empty() && !policy.zone.is_empty() {
        metrics.zone(*zone == policy.zone);
    }
    Ok(picked)
}

/// Runs an attempt until the deadline, and cancels it then.
async fn within<T>(
    deadline: Deadline,
    mut attempt: Pin<&mut impl Future<Output = Result<T, AttemptError>>>,
) -> Result<T, AttemptError> {
    let mut timer = deadline.timer();
    poll_fn(|cx| match attempt.as_mut().poll(cx) {
        Poll::Pending => timer
            .poll(cx)
            .map(|limit| Err(AttemptError::last(Failure::Timeout(limit)))),
        ended => ended,
    })
    .await
}

/// Why a safe retry does not take place: the label `reason` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDenial {
    /// The budget of the backend is used up.
    Budget,
    /// Another hop has sent the request before, with its own budget.
    PreviousAttempt,
    /// No endpoint usually answers before the deadline.
    Deadline,
    /// The circuit of the backend is open.
    Circuit,
}

impl RetryDenial {
    /// The values of the label `reason`, in the order of the discriminants.
    pub const NAMES: [&str; 4] = ["budget", "previous-attempt", "deadline", "circuit-open"];
}

/// The attempts of one request or opaque connection. Their results decide how the balancer treats
/// the endpoints.
#[derive(Default)]
pub struct Attempts {
    /// Attempts so far, the current one included.
    pub count: u32,
    /// Attempts of earlier hops before the one with which this request came.
    pub previous: u32,
    /// The end of the whole exchange.
    pub exchange_deadline: Deadline,
    /// The time for each attempt.
    pub attempt_timeout: Option<Duration>,
    /// The endpoint that it prefers.
    pub preference: Preference,
    /// What the route asks for.
    pub policy: Option<Arc<RetryPolicy>>,
    backend: Option<Rc<Backend>>,
    /// The endpoints that further attempts avoid.
    avoided: Avoided,
    /// Another attempt has its share of the budget already.
    is_granted: bool,
    current: Option<InFlight>,
    connect_timeout: Duration,
    last: Option<Rc<Endpoint>>,
}

/// Whether a request can be sent again.
#[derive(Clone, Copy, Debug)]
pub struct Replayable {
    /// All of its bytes that were sent are still there.
    pub is_kept: bool,
    /// Sending it twice has the effect of sending it once.
    pub is_idempotent: bool,
}

impl Replayable {
    /// A request that is sent once.
    pub const ONCE: Self = Self {
        is_kept: false,
        is_idempotent: false,
    };
}

impl Attempts {
    /// An attempt begins. It gets an equal share of the time to connect, so that there is time for
    /// the other endpoints.
    fn begin(&mut self, endpoint: &Rc<Endpoint>, time_to_connect: Duration) {
        let attempts_left = self.max_attempts().saturating_sub(self.count).max(1);
        let endpoints = self.backend.as_ref().map_or(0, |all| all.endpoints_len());
        let endpoints_left = endpoints.saturating_sub(self.avoided.tried.len());
        let attempts_left = u32::try_from(endpoints_left)
            .map_or(attempts_left, |endpoints| endpoints.clamp(1, attempts_left));
        self.connect_timeout = time_to_connect / attempts_left;
        self.count += 1;
        self.current = Some(endpoint.begin());
        self.last = Some(endpoint.clone());
    }

    /// The deadline of an attempt that begins now.
    fn deadline(&self) -> Deadline {
        let attempt = Deadline::after(self.attempt_timeout, Limit::Attempt);
        self.exchange_deadline.earlier(attempt)
    }

    /// There is a new connection. Fails if discovery has removed the endpoint in the meantime:
    /// another one gets the request, which has not been sent yet.
    pub fn check_endpoint(&mut self) -> Result<(), AttemptError> {
        let (Some(backend), Some(endpoint)) = (&self.backend, &self.last) else {
            return Ok(());
        };
        if backend.contains(endpoint) {
            return Ok(());
        }
        self.is_granted = self.count < self.max_attempts() && backend.endpoints_len() > 0;
        let failure = Failure::NoEndpoint(backend.name().to_string());
        let retry = Retry::OtherEndpoint;
        Err(AttemptError { failure, retry })
    }

    /// Opens the connections of the current attempt.
    pub fn dialer<'a>(&self, flow: &'a Flow) -> Dialer<'a> {
        Dialer::new(&flow.worker.tls, self.connect_timeout, &flow.slot)
    }

    /// The endpoint of the current attempt, or of the last one.
    pub fn endpoint(&self) -> Option<&Rc<Endpoint>> {
        self.last.as_ref()
    }

    /// When the current attempt began.
    pub fn began_at(&self) -> Instant {
        self.current
            .as_ref()
            .map_or_else(Instant::now, InFlight::started_at)
    }

    /// There is a new connection for the request: its latency counts from here.
    pub fn connected(&mut self) {
        if let Some(in_flight) = &mut self.current {
            in_flight.connected();
        }
    }

    /// There is a connection for opaque bytes: how long it lasts is no latency.
    pub fn opened(&mut self) {
        if let Some(in_flight) = &mut self.current {
            in_flight.opened();
        }
    }

    /// The opaque connection has ended: whether the endpoint sent anything, and whether it ended the
    /// connection before the client did.
    pub fn closed(self, has_answered: bool, ended_first: bool) {
        if let Some(in_flight) = self.current {
            in_flight.closed(has_answered, ended_first);
        }
    }

    /// The head of the response has arrived. Returns the time. Fails if another attempt begins: the
    /// client does not get this response.
    pub fn answered(
        &mut self,
        status: u16,
        verdict: Verdict,
        request: Replayable,
        flow: &Flow,
    ) -> Result<Instant, AttemptError> {
        let address = self.address();
        let is_outbound = flow.direction == Direction::Outbound;
        let others = |backend: &Rc<Backend>| backend.has_other(address);
        let has_others = is_outbound && self.backend.as_ref().is_some_and(others);
        if verdict == Verdict::NotDelivered && is_outbound {
            return Err(AttemptError::not_delivered(address));
        }
        let now = self
            .current
            .as_mut()
            .map_or_else(Instant::now, |in_flight| in_flight.answered(verdict));
        if let Verdict::Overloaded(Overload { retry, .. }) = verdict {
            let is_safe = match retry {
                Retryable::None => false,
                Retryable::Idempotent => request.is_idempotent,
                Retryable::All => true,
            };
            if is_safe && request.is_kept && has_others && self.retries_overload(flow) {
                return Err(AttemptError {
                    failure: Failure::UpstreamOverloaded(address),
                    retry: Retry::OtherEndpoint,
                });
            }
        }
        if is_outbound && request.is_kept && self.retries_status(status, flow) {
            return Err(AttemptError {
                failure: Failure::RetriedStatus { address, status },
                retry: Retry::AnyEndpoint,
            });
        }
        Ok(now)
    }

    /// Whether another attempt begins after a response of an overloaded endpoint. It avoids all
    /// endpoints that want no retries at this time.
    fn retries_overload(&mut self, flow: &Flow) -> bool {
        let before = (self.avoided.tried.len(), self.avoided.refusing);
        self.exclude(self.address());
        self.avoided.refusing = true;
        self.is_granted = self.start_retry(flow);
        if !self.is_granted {
            self.avoided.tried.truncate(before.0);
            self.avoided.refusing = before.1;
        }
        self.is_granted
    }

    /// Whether the route asks for another attempt after this status, which then begins: on another
    /// endpoint while there is one that was not tried.
    fn retries_status(&mut self, status: u16, flow: &Flow) -> bool {
        let Some(policy) = self.policy.clone() else {
            return false;
        };
        if !policy.statuses.contains(&status) {
            return false;
        }
        self.exclude(self.address());
        let has_untried = |all: &Rc<Backend>| all.has_untried(&self.avoided, Instant::now());
        if !self.backend.as_ref().is_some_and(has_untried) {
            self.avoided.tried.clear();
            self.avoided.refusing = true;
        }
        self.is_granted = self.start_retry(flow);
        self.is_granted
    }

    /// Attempts of the request at most.
    fn max_attempts(&self) -> u32 {
        let policy = self.policy.as_ref();
        policy.map_or(MAX_ATTEMPTS, |policy| policy.attempts + 1)
    }

    /// Whether another attempt follows, given that it is safe as `retry` says: a route with a policy
    /// asks for one after closed connections and timeouts of attempts, whatever the request does.
    fn retry_of_route(&self, failure: &Failure, retry: Retry) -> Retry {
        let is_covered = matches!(
            failure,
            Failure::UpstreamClosed { .. } | Failure::Timeout(Limit::Attempt)
        );
        match self.policy {
            Some(_) if is_covered => Retry::AnyEndpoint,
            _ => retry,
        }
    }

    /// The time until the next attempt. The exchange may end before.
    fn backoff(&self) -> Option<Duration> {
        let backoff = self.policy.as_ref()?.backoff;
        let remaining = self.exchange_deadline.remaining();
        Some(remaining.map_or(backoff, |remaining| remaining.min(backoff)))
            .filter(|backoff| !backoff.is_zero())
    }

    /// Further attempts avoid this endpoint.
    fn exclude(&mut self, address: SocketAddr) {
        let tried = &mut self.avoided.tried;
        if !tried.contains(&address) {
            tried.push(address);
        }
    }

    /// Whether another attempt may begin, which then uses the budget of the backend. All retries
    /// count, also those after refused connections: if all endpoints refuse them, callers would
    /// connect three times as often, and an overloaded node or network refuses connections too.
    fn start_retry(&mut self, flow: &Flow) -> bool {
        if std::mem::take(&mut self.is_granted) {
            return true;
        }
        let Some(backend) = &self.backend else {
            return false;
        };
        let now = tokio::time::Instant::now().into_std();
        if self.count >= self.max_attempts() || !backend.has_untried(&self.avoided, now) {
            return false;
        }
        let can_finish = |time| backend.can_answer_within(time, &self.avoided, now);
        let denial = if self.previous > 0 {
            Some(RetryDenial::PreviousAttempt)
        } else if !self.exchange_deadline.remaining().is_none_or(can_finish) {
            Some(RetryDenial::Deadline)
        } else if backend.is_circuit_open(now) {
            Some(RetryDenial::Circuit)
        } else if !backend.retries.try_retry(now) {
            Some(RetryDenial::Budget)
        } else {
            None
        };
        flow.worker.metrics.retry(flow.direction, denial);
        denial.is_none()
    }

    /// What the next proxy is told of the attempts before the current one. Only an authenticated
    /// proxy that parses the request removes it.
    pub fn announced(&self, is_secured: bool) -> Option<u32> {
        let parses = self.last.as_ref().is_some_and(|last| !last.info.opaque);
        let previous = self.previous.saturating_add(self.count.saturating_sub(1));
        (previous > 0 && is_secured && parses).then_some(previous)
    }

    fn address(&self) -> SocketAddr {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        self.last.as_ref().map_or(unspecified, |last| last.address)
    }

    /// Nothing more is in flight.
    pub fn end(&mut self) {
        self.current = None;
    }

    fn fail(&mut self, failure: &Failure, retry: Retry) {
        let Some(mut in_flight) = self.current.take() else {
            return;
        };
        match retry {
            // Without a certificate of its own, the proxy does not connect.
            Retry::OtherEndpoint if failure.is_upstream_failure() => in_flight.refused(),
            // A closed pooled connection says nothing about the endpoint, nor does a bad request.
            Retry::AnyEndpoint if self.count < self.max_attempts() => in_flight.discard(),
            _ if failure.is_upstream_failure() => in_flight.failed(),
            _ if matches!(failure, Failure::Timeout(Limit::Exchange)) => in_flight.timed_out(),
            // It has no response yet: its latency is at least the time until now.
            _ if matches!(failure, Failure::Timeout(_)) => drop(in_flight),
            _ => in_flight.discard(),
        }
    }
}

#[cfg(test)]
mod tests;
