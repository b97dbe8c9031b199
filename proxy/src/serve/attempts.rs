//! Steps 6 and 7 of a request, or of an opaque connection: one endpoint after another, until one
//! takes it. [`Attempts`] is the state between the attempts, and [`Attempt::next`] the only place that
//! decides on another one. Neither has a socket: the protocols connect, send and relay.

use crate::labels::RetryDenial;
use crate::route::AttemptSettings;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::context::flow::{Announced, Flow};
use crate::context::worker::Worker;
use crate::egress::Outside;
use crate::error::{Failure, Limit};
use crate::http::verdict::{Overload, Retryable, Verdict};
use crate::inbound::policy::Permit;
use crate::limits::deadline::Deadline;
use crate::secure::tls::Acceptance;
use crate::upstream::balance::{Avoided, Backend, Endpoint, InFlight};
use crate::upstream::connect::Dialer;
use diy_mesh_model::exchange::{Direction, ExchangeId};

/// Endpoints that one request is sent to at most, unless its route asks for another number.
pub const MAX_ATTEMPTS: u32 = 3;

/// How often a request that an endpoint has refused, because of a limit that it had not told before, is
/// sent again without counting as another attempt.
const MAX_REQUEUED: u32 = 2;

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
    /// The request was sent to no endpoint, or refused by one that had not told its limit. This counts as
    /// no attempt. The time to connect bounds it.
    Uncounted,
}

impl AttemptError {
    /// There is no connection. Another endpoint may accept one.
    pub fn connect(failure: Failure) -> Self {
        let retry = match failure {
            Failure::Overloaded(_) => Retry::Never,
            Failure::NoSettings(_) => Retry::Uncounted,
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
        let retry = if is_safe {
            Retry::AnyEndpoint
        } else {
            Retry::Never
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

    /// The peer refused the request because of a limit that it had not told before.
    pub fn over_limit(address: SocketAddr, reason: String) -> Self {
        Self {
            retry: Retry::Uncounted,
            ..Self::closed(address, reason, true)
        }
    }

    /// The connection ended without SETTINGS of the peer, which speaks another protocol, or is stopped.
    pub fn unsettled(address: SocketAddr) -> Self {
        let reason = "it sent no SETTINGS".to_owned();
        Self {
            retry: Retry::OtherEndpoint,
            ..Self::closed(address, reason, true)
        }
    }

    /// An error without a further attempt.
    pub fn last(failure: Failure) -> Self {
        Self {
            failure,
            retry: Retry::Never,
        }
    }
}

impl From<Limit> for AttemptError {
    /// The deadline has passed.
    fn from(limit: Limit) -> Self {
        Self::last(Failure::Timeout(limit))
    }
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

/// The step after a failed attempt.
#[derive(Debug)]
pub enum Step {
    /// Another attempt, after this time; and why.
    Retry(Option<Duration>, Failure),
    /// The failure of the request.
    Done(Failure),
}

/// The attempts of one request or opaque connection.
pub struct Attempts {
    /// The settings from the plan, before the first attempt.
    settings: AttemptSettings,
    backend: Rc<Backend>,
    /// The time that is left for connections.
    time_to_connect: Duration,
    /// The endpoints that further attempts avoid.
    avoided: Avoided,
    /// The failures of the attempts before the current one.
    failures: Vec<Failure>,
    /// The next attempt has its share of the budget already.
    is_granted: bool,
    /// How often an endpoint has refused the request because of its limit.
    requeued: u32,
    /// The destination outside of the cluster, found by its name.
    named: Option<Outside>,
}

impl Attempts {
    /// No attempt yet to reach `backend`, which the permit allows.
    pub fn new(
        flow: &Flow,
        backend: &Rc<Backend>,
        settings: AttemptSettings,
        permit: Permit,
    ) -> Self {
        let time_to_connect = backend.policy().connect_timeout;
        Self {
            settings,
            backend: backend.clone(),
            time_to_connect: time_to_connect.unwrap_or(flow.worker.config.timeouts.connect),
            avoided: Avoided::default(),
            failures: Vec::new(),
            is_granted: false,
            requeued: 0,
            named: permit.into_named(),
        }
    }

    /// Step 6: an attempt begins, on the endpoint that the balancer picks. It gets an equal share of
    /// the time to connect, so that there is time for the other endpoints. Fails with the failure of
    /// the attempts before, if there are any.
    pub fn begin(&mut self, flow: &Flow) -> Result<Attempt<'_>, Failure> {
        let began = tokio::time::Instant::now();
        if self.failures.is_empty() {
            self.backend.retries.record_request(began.into_std());
        }
        let endpoint = match self.pick(flow, began.into_std()) {
            Ok(endpoint) => endpoint,
            Err(failure) => return Err(self.summary().unwrap_or(failure)),
        };
        let outside = self.judge_outside(&endpoint, flow)?;
        let attempts_left = self.max().saturating_sub(self.failed()).max(1);
        let endpoints = self.backend.endpoints_len();
        let endpoints_left = endpoints.saturating_sub(self.avoided.tried.len());
        let attempts_left = u32::try_from(endpoints_left)
            .map_or(attempts_left, |endpoints| endpoints.clamp(1, attempts_left));
        Ok(Attempt {
            began,
            connect_timeout: self.time_to_connect / attempts_left,
            in_flight: endpoint.begin(began.into_std()),
            endpoint,
            outside,
            attempts: self,
        })
    }

    /// The endpoint, if it is outside of the cluster: whoever has listed it, the policies of egress
    /// have to allow it.
    fn judge_outside(&self, endpoint: &Endpoint, flow: &Flow) -> Result<Option<Outside>, Failure> {
        if !endpoint.info.outside || flow.direction == Direction::Inbound {
            return Ok(None);
        }
        let named = self.named.as_ref();
        let named = named.filter(|named| named.address == endpoint.address);
        let outside = named.cloned().unwrap_or_else(|| Outside {
            address: endpoint.address,
            name: (endpoint.info.external.as_ref()).map(|host| host.host.clone()),
        });
        flow.worker.policy().judge_outside(&outside)?;
        Ok(Some(outside))
    }

    fn pick(&self, flow: &Flow, now: Instant) -> Result<Rc<Endpoint>, Failure> {
        let Worker { metrics, rng, .. } = &*flow.worker;
        let (policy, rng) = (flow.worker.policy(), &mut rng.borrow_mut());
        let (preference, avoided) = (self.settings.preference, &self.avoided);
        let picked = (self.backend).pick_for(preference, avoided, &policy.zone, rng, now)?;
        let zone = &picked.info.zone;
        if !zone.is_empty() && !policy.zone.is_empty() {
            metrics.zone(*zone == policy.zone);
        }
        if picked.node_unready.get() {
            metrics.last_resorts.inc();
        }
        Ok(picked)
    }

    /// Whether another attempt begins after a response of an overloaded endpoint. It avoids all
    /// endpoints that want no retries at this time.
    fn retries_overload(&mut self, address: SocketAddr, flow: &Flow) -> bool {
        let before = (self.avoided.tried.len(), self.avoided.refusing);
        self.avoid(address);
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
    fn retries_status(&mut self, address: SocketAddr, status: u16, flow: &Flow) -> bool {
        let retries = self.settings.retries.as_ref();
        if !retries.is_some_and(|retries| retries.statuses.contains(&status)) {
            return false;
        }
        self.avoid(address);
        if !self.backend.has_untried(&self.avoided, Instant::now()) {
            self.avoided.tried.clear();
            self.avoided.refusing = true;
        }
        self.is_granted = self.start_retry(flow);
        self.is_granted
    }

    /// Further attempts avoid this endpoint.
    fn avoid(&mut self, address: SocketAddr) {
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
        let (backend, avoided) = (&self.backend, &self.avoided);
        let now = tokio::time::Instant::now().into_std();
        if self.is_last() || !backend.has_untried(avoided, now) {
            return false;
        }
        let can_finish = |time| backend.can_answer_within(time, avoided, now);
        let denial = if self.settings.previous > 0 {
            Some(RetryDenial::PreviousAttempt)
        } else if !(self.settings.deadline.remaining()).is_none_or(can_finish) {
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

    /// Whether another attempt follows, given that it is safe as `retry` says: a route with retries
    /// asks for one after closed connections and timeouts of attempts, whatever the request does.
    fn retry_of_route(&self, failure: &Failure, retry: Retry) -> Retry {
        let is_covered = matches!(
            failure,
            Failure::UpstreamClosed { .. } | Failure::Timeout(Limit::Attempt)
        );
        match self.settings.retries {
            Some(_) if is_covered => Retry::AnyEndpoint,
            _ => retry,
        }
    }

    /// The time until the next attempt. The exchange may end before.
    fn backoff(&self) -> Option<Duration> {
        let backoff = self.settings.retries.as_ref()?.backoff;
        let remaining = self.settings.deadline.remaining();
        Some(remaining.map_or(backoff, |remaining| remaining.min(backoff)))
            .filter(|backoff| !backoff.is_zero())
    }

    /// Attempts of the request at most.
    fn max(&self) -> u32 {
        let retries = self.settings.retries.as_ref();
        retries.map_or(MAX_ATTEMPTS, |retries| retries.attempts + 1)
    }

    /// Attempts before the current one.
    fn failed(&self) -> u32 {
        u32::try_from(self.failures.len()).unwrap_or(u32::MAX)
    }

    /// The current attempt is the last one.
    fn is_last(&self) -> bool {
        self.failed() + 1 >= self.max()
    }

    /// The failure of all attempts so far, or `None` without attempts.
    fn summary(&mut self) -> Option<Failure> {
        let failures = std::mem::take(&mut self.failures);
        Failure::of_attempts(failures, &self.backend.name(), self.backend.endpoints_len())
    }
}

/// One attempt, which is in flight at its endpoint until it is dropped. Its result decides how the
/// balancer treats the endpoint.
pub struct Attempt<'a> {
    /// Where the request is sent.
    pub endpoint: Rc<Endpoint>,
    /// Measures the endpoint.
    pub in_flight: InFlight,
    /// The endpoint, if it is outside of the cluster.
    pub outside: Option<Outside>,
    attempts: &'a mut Attempts,
    began: tokio::time::Instant,
    connect_timeout: Duration,
}

impl Attempt<'_> {
    /// Its start.
    pub fn began(&self) -> Instant {
        self.began.into_std()
    }

    /// The end of this attempt, which begins now.
    pub fn deadline(&self) -> Deadline {
        let settings = &self.attempts.settings;
        let attempt = Deadline::after(settings.timeout, Limit::Attempt);
        settings.deadline.earlier(attempt)
    }

    /// The end of the whole exchange.
    pub fn exchange_deadline(&self) -> Deadline {
        self.attempts.settings.deadline
    }

    /// Opens the connections of this attempt.
    pub fn dialer<'a>(&self, flow: &'a Flow) -> Dialer<'a> {
        let (tls, slot) = (&flow.worker.tls, &flow.slot);
        Dialer::new(tls, self.began, self.connect_timeout, slot)
    }

    /// There is a new connection. Fails if discovery has removed the endpoint in the meantime:
    /// another one gets the request, which has not been sent yet, while there is time to connect.
    pub fn check_endpoint(&mut self) -> Result<(), AttemptError> {
        let backend = &self.attempts.backend;
        if backend.contains(&self.endpoint) {
            return Ok(());
        }
        Err(AttemptError {
            failure: Failure::EndpointRemoved {
                address: self.endpoint.address,
                backend: backend.name().to_string(),
            },
            retry: Retry::Uncounted,
        })
    }

    /// Whether a request that the endpoint has refused because of its limit may wait for it again.
    pub fn may_requeue(&mut self) -> bool {
        self.attempts.requeued += 1;
        self.attempts.requeued <= MAX_REQUEUED
    }

    /// The announcement to the next proxy: the exchange, and the number of attempts before this one.
    /// Only an authenticated proxy that parses the request removes it.
    pub fn announced(&self, is_peer: bool, exchange: ExchangeId) -> Option<Announced> {
        let previous = self.attempts.settings.previous;
        (is_peer && !self.endpoint.info.opaque).then(|| Announced {
            attempts: previous.saturating_add(self.attempts.failed()),
            exchange: Some(exchange),
        })
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
        let address = self.endpoint.address;
        let is_outbound = flow.direction == Direction::Outbound;
        if verdict == Verdict::NotDelivered && is_outbound {
            return Err(AttemptError::not_delivered(address));
        }
        let now = self.in_flight.answered(verdict);
        if !is_outbound || !request.is_kept {
            return Ok(now);
        }
        let attempts = &mut *self.attempts;
        if let Verdict::Overloaded(Overload { retry, .. }) = verdict {
            let is_safe = match retry {
                Retryable::None => false,
                Retryable::Idempotent => request.is_idempotent,
                Retryable::All => true,
            };
            if is_safe
                && attempts.backend.has_other(address)
                && attempts.retries_overload(address, flow)
            {
                return Err(AttemptError {
                    failure: Failure::UpstreamOverloaded(address),
                    retry: Retry::OtherEndpoint,
                });
            }
        }
        if attempts.retries_status(address, status, flow) {
            return Err(AttemptError {
                failure: Failure::RetriedStatus { address, status },
                retry: Retry::AnyEndpoint,
            });
        }
        Ok(now)
    }

    /// The step after this attempt, which has failed. `rewind` prepares another one: false if a part of
    /// the sent bytes is no longer there.
    pub fn next(self, error: AttemptError, flow: &Flow, mut rewind: impl FnMut() -> bool) -> Step {
        let Self {
            attempts,
            endpoint,
            in_flight,
            began,
            connect_timeout,
            ..
        } = self;
        let AttemptError { failure, retry } = error;
        let failure = failure.with_policy(|| attempts.backend.policy().name.clone());
        judge(in_flight, &failure, retry, attempts.is_last());
        let retry = attempts.retry_of_route(&failure, retry);
        if retry == Retry::OtherEndpoint || matches!(failure, Failure::NoSettings(_)) {
            attempts.avoid(endpoint.address);
        }
        let spent = match retry {
            // A longer time was not spent on connecting: it was a response, or a lack of CPU time.
            Retry::OtherEndpoint => began.elapsed().min(connect_timeout),
            Retry::Uncounted => began.elapsed(),
            _ => Duration::ZERO,
        };
        attempts.time_to_connect = attempts.time_to_connect.saturating_sub(spent);
        if retry == Retry::Uncounted
            && !attempts.time_to_connect.is_zero()
            && attempts.backend.endpoints_len() > 0
            && rewind()
        {
            return Step::Retry(None, failure);
        }
        let is_safe = !matches!(retry, Retry::Never | Retry::Uncounted);
        let is_retried = is_safe && rewind() && attempts.start_retry(flow);
        attempts.failures.push(failure.clone());
        if !is_retried {
            return Step::Done(attempts.summary().unwrap_or(failure));
        }
        tracing::debug!(destination = %attempts.backend.name(), "retrying: {failure}");
        Step::Retry(attempts.backoff(), failure)
    }
}

/// Records what a failed attempt says about its endpoint.
fn judge(mut in_flight: InFlight, failure: &Failure, retry: Retry, is_last: bool) {
    match retry {
        Retry::Uncounted if matches!(failure, Failure::NoSettings(_)) => in_flight.refused(),
        Retry::Uncounted => in_flight.discard(),
        // Without a certificate of its own, the proxy does not connect.
        Retry::OtherEndpoint if failure.is_upstream_failure() => in_flight.refused(),
        // A closed pooled connection says nothing about the endpoint, nor does a bad request.
        Retry::AnyEndpoint if !is_last => in_flight.discard(),
        _ if failure.is_upstream_failure() => in_flight.failed(),
        _ if matches!(failure, Failure::Timeout(Limit::Exchange)) => in_flight.timed_out(),
        // It has no response yet: its latency is at least the time until now.
        _ if matches!(failure, Failure::Timeout(_)) => drop(in_flight),
        _ => in_flight.discard(),
    }
}

/// Waits before an attempt.
pub async fn pause(backoff: Option<Duration>) {
    if let Some(backoff) = backoff {
        // Boxed: only routes set one.
        Box::pin(tokio::time::sleep(backoff)).await;
    }
}

#[cfg(test)]
mod tests;
