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
use crate::dump::Direction;
use crate::error::Failure;
use crate::flow::Flow;
use crate::http::verdict::{Overload, Retryable, Verdict};
use crate::route::RetryPolicy;
use crate::tls::{Acceptance, Tls};

/// Endpoints that one request is sent to at most.
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
    async fn attempt(&mut self, endpoint: &Rc<Endpoint>) -> Result<Self::Outcome, AttemptError>;

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
        let preference = request.attempts().preference;
        let avoided = &request.attempts().avoided;
        let picked = flow.worker.pick(backend, preference, avoided);
        let endpoints_left = backend.endpoints_len().saturating_sub(avoided.tried.len());
        let endpoint = match picked {
            Ok(endpoint) => endpoint,
            Err(failure) => return Err(summary(failures).unwrap_or(failure)),
        };
        request
            .attempts()
            .begin(&endpoint, time_to_connect, endpoints_left);
        // 7. Connect, and 8. serve.
        let deadline = request.attempts().deadline();
        let ended = within(deadline, pin!(request.attempt(&endpoint))).await;
        let AttemptError { failure, retry } = match ended {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        let failure = failure.with_policy(|| backend.policy().name.clone());
        request.attempts().fail(&failure, retry);
        let retry = request.attempts().apply_policy(&failure, retry);
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
    /// All reasons, in the order of their discriminants.
    pub const ALL: [Self; 4] = [
        Self::Budget,
        Self::PreviousAttempt,
        Self::Deadline,
        Self::Circuit,
    ];

    /// The value of the label `reason`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::PreviousAttempt => "previous-attempt",
            Self::Deadline => "deadline",
            Self::Circuit => "circuit-open",
        }
    }
}

/// The attempts of one request or opaque connection. Their results decide how the balancer treats
/// the endpoints.
#[derive(Default)]
pub struct Attempts {
    /// Attempts so far, the current one included.
    pub count: u32,
    /// Attempts of earlier hops, this request excluded that came from the last of them.
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

/// What a request permits.
#[derive(Clone, Copy, Debug)]
pub struct Replayable {
    /// All of its bytes that were sent are still there.
    pub is_kept: bool,
    /// Sending it twice has the effect of sending it once.
    pub is_idempotent: bool,
    /// The status of its response.
    pub status: u16,
}

impl Replayable {
    /// A request that is sent once.
    pub const ONCE: Self = Self {
        is_kept: false,
        is_idempotent: false,
        status: 0,
    };
}

impl Attempts {
    /// An attempt begins. It gets an equal share of the time to connect, so that there is time for
    /// the other endpoints.
    fn begin(&mut self, endpoint: &Rc<Endpoint>, time_to_connect: Duration, endpoints: usize) {
        let attempts_left = self.max_attempts().saturating_sub(self.count).max(1);
        let attempts_left = u32::try_from(endpoints)
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
    pub fn dialer<'a>(&self, tls: &'a Tls) -> Dialer<'a> {
        Dialer {
            tls,
            timeout: self.connect_timeout,
        }
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

    /// The head of the response has arrived. Returns the time. Fails if another endpoint gets the
    /// request, in place of the client this response.
    pub fn answered(
        &mut self,
        verdict: Verdict,
        request: Replayable,
        flow: &Flow,
    ) -> Result<Instant, AttemptError> {
        let address = self.address();
        let others = |backend: &Rc<Backend>| backend.has_other(address);
        let has_others =
            flow.direction == Direction::Outbound && self.backend.as_ref().is_some_and(others);
        if verdict == Verdict::NotDelivered && request.is_kept && has_others {
            return Err(AttemptError::not_delivered(self.address()));
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
            if is_safe && request.is_kept && has_others && self.grant_retry(flow) {
                let failure = Failure::UpstreamOverloaded(self.address());
                let retry = Retry::OtherEndpoint;
                return Err(AttemptError { failure, retry });
            }
        }
        let is_outbound = flow.direction == Direction::Outbound;
        if is_outbound && request.is_kept && self.retries_status(request.status, flow) {
            let (address, status) = (self.address(), request.status);
            let failure = Failure::RetriedStatus { address, status };
            let retry = Retry::AnyEndpoint;
            return Err(AttemptError { failure, retry });
        }
        Ok(now)
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

    /// With a policy, a route asks for retries after closed connections and timeouts of attempts,
    /// whatever the request does.
    fn apply_policy(&self, failure: &Failure, retry: Retry) -> Retry {
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

    /// Whether a request whose response has arrived is sent to another endpoint. Those that want no
    /// retries are excluded.
    fn grant_retry(&mut self, flow: &Flow) -> bool {
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
        let parses = self.last.as_ref().is_some_and(|last| !last.is_opaque);
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
mod tests {
    use super::*;
    use crate::balance::policy::BackendPolicy;
    use crate::balance::{BreakerSettings, BudgetSettings};
    use crate::destination::Destination;
    use crate::discovery::{Discovery, EndpointInfo, ServiceTarget, Target};
    use crate::metrics::Metrics;
    use crate::policy::Caller;
    use crate::worker::{Worker, WorkerContext};

    /// Fails as often as it has errors, then succeeds, or never ends.
    struct Scripted {
        attempts: Attempts,
        errors: Vec<Retry>,
        can_rewind: bool,
        hangs: bool,
    }

    impl Forward for Scripted {
        type Outcome = ();

        fn authorize(&mut self, _: &Flow) -> Result<(), Failure> {
            Ok(())
        }

        fn attempts(&mut self) -> &mut Attempts {
            &mut self.attempts
        }

        async fn attempt(&mut self, endpoint: &Rc<Endpoint>) -> Result<(), AttemptError> {
            match self.errors.pop() {
                None if self.hangs => std::future::pending().await,
                None => Ok(()),
                Some(retry) => {
                    let failure = Failure::ConnectTimeout(endpoint.address);
                    Err(AttemptError { failure, retry })
                }
            }
        }

        fn rewind(&mut self) -> bool {
            self.can_rewind
        }
    }

    /// Sends to a destination with one endpoint: the result, the attempts, and whether it is
    /// quarantined.
    async fn send(errors: &[Retry], can_rewind: bool) -> (Result<(), String>, u32, bool) {
        let request = Scripted {
            attempts: Attempts::default(),
            errors: errors.to_vec(),
            can_rewind,
            hangs: false,
        };
        run(request).await
    }

    async fn run(mut request: Scripted) -> (Result<(), String>, u32, bool) {
        let address = SocketAddr::from(([127, 0, 0, 1], 80));
        let flow = Flow {
            worker: Worker::new(WorkerContext::for_a_test("")),
            direction: Direction::Outbound,
            peer: address,
            destination: Rc::new(Destination::fixed(address)),
            caller: Caller::App,
        };
        let backend = flow.destination.backend();
        let result = forward(&mut request, &flow, backend).await;
        let endpoint = backend
            .pick(&[], &mut fastrand::Rng::new())
            .expect("it is fixed");
        let result = result.map_err(|failure| failure.code().to_owned());
        (
            result,
            request.attempts.count,
            endpoint.is_quarantined(Instant::now()),
        )
    }

    #[tokio::test]
    async fn retries_only_what_is_safe_and_at_most_three_times() {
        use Retry::{AnyEndpoint, Never};
        let failed = || Err("connect-timeout".to_owned());
        assert_eq!(send(&[], true).await, (Ok(()), 1, false));
        assert_eq!(
            send(&[AnyEndpoint, AnyEndpoint], true).await,
            (Ok(()), 3, false)
        );
        assert_eq!(send(&[AnyEndpoint; 3], true).await, (failed(), 3, false));
        assert_eq!(send(&[AnyEndpoint], false).await, (failed(), 1, false));
        assert_eq!(send(&[Never], true).await, (failed(), 1, false));
    }

    #[tokio::test(start_paused = true)]
    async fn retries_nothing_that_was_retried_before_or_cannot_finish() {
        let scripted = |attempts| Scripted {
            attempts,
            errors: vec![Retry::AnyEndpoint],
            can_rewind: true,
            hangs: false,
        };
        let deadline = |seconds| Attempts {
            exchange_deadline: Deadline::after(Some(Duration::from_secs(seconds)), Limit::Exchange),
            ..Attempts::default()
        };
        let retried_before = Attempts {
            previous: 1,
            ..Attempts::default()
        };
        let failed = Err("connect-timeout".to_owned());
        for (attempts, expected) in [
            (retried_before, (failed.clone(), 1, false)),
            (deadline(0), (failed, 1, false)),
            (deadline(1), (Ok(()), 2, false)),
        ] {
            assert_eq!(run(scripted(attempts)).await, expected);
        }
    }

    #[tokio::test]
    async fn announces_as_many_previous_attempts_as_fit() {
        let address = SocketAddr::from(([127, 0, 0, 1], 80));
        let backend = Destination::fixed(address).backend().clone();
        for (previous, count, expected) in [
            (0, 1, None),
            (0, 2, Some(1)),
            (3, 2, Some(4)),
            (u32::MAX, 2, Some(u32::MAX)),
        ] {
            let attempts = Attempts {
                previous,
                count,
                last: backend.pick(&[], &mut fastrand::Rng::new()).ok(),
                ..Attempts::default()
            };
            assert_eq!(attempts.announced(true), expected);
            assert_eq!(attempts.announced(false), None);
        }
    }

    /// A request whose attempts end with these errors.
    fn failing(errors: Vec<Retry>) -> Scripted {
        Scripted {
            attempts: Attempts::default(),
            errors,
            can_rewind: true,
            hangs: false,
        }
    }

    /// A connection to a Service with so many endpoints, and the metrics of its proxy.
    async fn flow_to(endpoints: u32, policy: BackendPolicy) -> (Flow, Arc<Metrics>) {
        let (discovery, mut questions) = Discovery::by_hand();
        let context = WorkerContext {
            discovery,
            ..WorkerContext::for_a_test("")
        };
        let metrics = context.metrics.clone();
        let worker = Worker::new(context);
        let endpoint = |number| {
            let ip = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number);
            Arc::new(EndpointInfo::bare((ip, 80).into()))
        };
        let target = Target::Service(ServiceTarget {
            endpoints: (1..=endpoints).map(endpoint).collect(),
            policy: Arc::new(policy),
            ..ServiceTarget::default()
        });
        let address = SocketAddr::from(([10, 96, 0, 7], 80));
        let (destination, ()) = tokio::join!(worker.destinations.get_or_watch(address), async {
            drop(questions.next().await.1(Arc::new(target)));
        });
        let flow = Flow {
            worker,
            direction: Direction::Outbound,
            peer: address,
            destination,
            caller: Caller::App,
        };
        (flow, metrics)
    }

    #[tokio::test]
    async fn retry_finds_the_endpoint_that_does_not_refuse_it_without_a_list_of_the_others() {
        let (flow, _) = flow_to(1000, BackendPolicy::default()).await;
        let backend = flow.destination.backend();
        let address = |number| SocketAddr::from((std::net::Ipv4Addr::from_bits(number), 80));
        let endpoint = |number: u32| backend.endpoint(address(0x0a00_0000 + number)).unwrap();
        let overload = Verdict::Overloaded(Overload {
            retry: Retryable::All,
            retry_after: Duration::from_secs(600),
        });
        for number in 1..1000 {
            endpoint(number).begin().answered(overload);
        }
        let mut attempts = Attempts {
            backend: Some(backend.clone()),
            ..Attempts::default()
        };
        attempts.begin(&endpoint(1), Duration::ZERO, 1000);
        let replayable = Replayable {
            is_kept: true,
            ..Replayable::ONCE
        };
        let error = attempts.answered(overload, replayable, &flow).unwrap_err();
        assert_eq!(error.retry, Retry::OtherEndpoint);
        assert_eq!(attempts.avoided.tried, [address(0x0a00_0001)]);
        let picked = flow
            .worker
            .pick(backend, Preference::default(), &attempts.avoided);
        assert_eq!(picked.unwrap().address, address(0x0a00_0000 + 1000));
    }

    /// Sends 1000 requests to three endpoints, none of which answers. Returns the attempts and the
    /// metrics.
    async fn fail_all(request: impl Fn() -> Scripted, policy: BackendPolicy) -> (u32, String) {
        let (flow, metrics) = flow_to(3, policy).await;
        let mut attempts = 0;
        for _ in 0..1000 {
            let mut request = request();
            let backend = flow.destination.backend();
            forward(&mut request, &flow, backend)
                .await
                .expect_err("no endpoint");
            attempts += request.attempts.count;
        }
        (attempts, metrics.render())
    }

    #[tokio::test(start_paused = true)]
    async fn outage_of_all_endpoints_adds_at_most_a_fifth_of_the_requests() {
        for error in [Retry::OtherEndpoint, Retry::AnyEndpoint] {
            let (attempts, metrics) =
                fail_all(|| failing(vec![error; 3]), BackendPolicy::default()).await;
            assert_eq!(attempts, 1000 + 200 + 10, "{error:?}");
            let retries = "diy_mesh_proxy_retries_total{direction=\"outbound\"} 210\n";
            assert!(metrics.contains(retries), "{metrics}");
            let policy = BackendPolicy {
                budget: Some(BudgetSettings {
                    percent: 5,
                    min_per_second: 2,
                }),
                ..BackendPolicy::default()
            };
            let (attempts, _) = fail_all(|| failing(vec![error; 3]), policy).await;
            assert_eq!(attempts, 1000 + 50 + 20, "{error:?} with a policy");
            let denied =
                "diy_mesh_proxy_retries_denied_total{direction=\"outbound\",reason=\"budget\"} ";
            assert!(!metrics.contains(&format!("{denied}0\n")), "{metrics}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn open_circuit_ends_attempts_and_retries() {
        let policy = || BackendPolicy {
            name: "TrafficPolicy shop/web".to_owned(),
            breaker: Some(BreakerSettings {
                failure_percent: 50,
                min_requests: 20,
                interval: Duration::from_secs(3600),
                open_time: Duration::from_secs(3600),
            }),
            ..BackendPolicy::default()
        };
        for error in [Retry::OtherEndpoint, Retry::Never] {
            let (attempts, metrics) = fail_all(|| failing(vec![error; 3]), policy()).await;
            assert_eq!(attempts, 20, "{error:?}");
            for gauge in ["circuits_open", "circuits_opened_total"] {
                let expected = format!("{gauge}{{direction=\"outbound\"}} 1\n");
                assert!(metrics.contains(&expected), "{expected}: {metrics}");
            }
            let denied = "{direction=\"outbound\",reason=\"circuit-open\"} ";
            let denied = metrics.contains(&format!("{denied}1\n"));
            assert_eq!(denied, error == Retry::OtherEndpoint, "{metrics}");
        }
        // What a route retries is a failure too.
        let hanging = || Scripted {
            attempts: Attempts {
                attempt_timeout: Some(Duration::from_secs(1)),
                policy: Some(Arc::new(RetryPolicy {
                    statuses: Vec::new(),
                    attempts: 2,
                    backoff: Duration::ZERO,
                })),
                ..Attempts::default()
            },
            hangs: true,
            ..failing(Vec::new())
        };
        assert_eq!(fail_all(hanging, policy()).await.0, 20);
        let slow = || Scripted {
            attempts: Attempts {
                exchange_deadline: Deadline::after(Some(Duration::from_secs(1)), Limit::Exchange),
                ..Attempts::default()
            },
            hangs: true,
            ..failing(Vec::new())
        };
        assert_eq!(fail_all(slow, policy()).await.0, 20);
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_together_take_no_longer_than_the_exchange() {
        const SECOND: Duration = Duration::from_secs(1);
        let policy = RetryPolicy {
            statuses: vec![504],
            attempts: 5,
            backoff: SECOND / 2,
        };
        let request = Scripted {
            attempts: Attempts {
                exchange_deadline: Deadline::after(Some(4 * SECOND), Limit::Exchange),
                attempt_timeout: Some(SECOND),
                policy: Some(Arc::new(policy)),
                ..Attempts::default()
            },
            errors: Vec::new(),
            can_rewind: true,
            hangs: true,
        };
        let began = tokio::time::Instant::now();
        let ended = run(request).await;
        assert_eq!(ended.0, Err("timeout".to_owned()));
        // At 0, 1.5 and 3 s: no endpoint is known to answer in less than the time that is left.
        assert_eq!((ended.1, began.elapsed()), (3, 4 * SECOND));
    }

    #[tokio::test(start_paused = true)]
    async fn deadlines_of_exchange_and_attempt_end_it() {
        const SECOND: Duration = Duration::from_secs(1);
        for (exchange, attempt) in [
            (None, Some(SECOND)),
            (Some(SECOND), None),
            (Some(2 * SECOND), Some(SECOND)),
        ] {
            let request = Scripted {
                attempts: Attempts {
                    exchange_deadline: Deadline::after(exchange, Limit::Exchange),
                    attempt_timeout: attempt,
                    ..Attempts::default()
                },
                errors: Vec::new(),
                can_rewind: true,
                hangs: true,
            };
            let began = tokio::time::Instant::now();
            let ended = run(request).await;
            assert_eq!(ended.0, Err("timeout".to_owned()));
            assert_eq!((ended.1, began.elapsed().as_secs()), (1, 1));
        }
    }

    #[tokio::test]
    async fn reports_the_last_failure_when_no_endpoint_is_left() {
        let result = send(&[Retry::OtherEndpoint; 3], true).await;
        assert_eq!(result, (Err("connect-timeout".to_owned()), 1, true));
    }
}
