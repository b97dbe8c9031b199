//! The record of one exchange, and of one connection. The path fills it; when it is dropped,
//! metrics, dumps and the log take what they need. No protocol calls these itself, and no exit path
//! forgets them.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use diy_mesh_model::exchange::{self, Fault, Transfer};
use diy_mesh_proto::Identity;
use http::StatusCode;

use crate::balance::{Backend, Preference};
use crate::dump::{self, ExchangeDump};
use crate::error::Failure;
use crate::flow::{Direction, Flow};
use crate::forward::Attempts;
use crate::http::edits::Edits;
use crate::http::reply::LocalReply;
use crate::http::view::{Fields, RequestView};
use crate::metrics::HttpVersion;
use crate::mirror::{CopiedHead, Mirror};
use crate::route::fault::{FaultKind, Injection};
use crate::route::matching::MatchInput;
use crate::route::{Answer, Route, Routes, Rule};

/// One request and its response.
pub struct ExchangeRecord {
    /// The connection that it came on.
    pub flow: Rc<Flow>,
    /// Where it was sent to.
    pub attempts: Attempts,
    /// The way that a route chose. None: to the destination itself.
    pub route: Option<Rc<Route>>,
    /// The rule in whose place the proxy replies.
    unrouted: Option<Arc<Rule>>,
    /// A copy of the request, until it is complete.
    mirror: Option<Box<Mirror>>,
    version: HttpVersion,
    started: Instant,
    status: Option<StatusCode>,
    sent: u64,
    received: u64,
    failure: Option<&'static str>,
    /// The policy of the latest fault.
    fault: Option<Arc<str>>,
    dump: Option<ExchangeDump>,
}

impl ExchangeRecord {
    /// An exchange that begins now.
    pub fn new(flow: &Rc<Flow>, version: HttpVersion) -> Self {
        Self {
            flow: flow.clone(),
            attempts: Attempts::default(),
            route: None,
            unrouted: None,
            mirror: None,
            version,
            started: Instant::now(),
            status: None,
            sent: 0,
            received: 0,
            failure: None,
            fault: None,
            dump: flow.worker.dumps.exchange(&flow.info()),
        }
    }

    /// Step 5. The deadlines of the route begin, then the faults take place. None if the client
    /// leaves in the meantime: `poll_gone` is ready then.
    pub async fn route(
        &mut self,
        routes: &Routes,
        request: &RequestView<'_>,
        poll_gone: impl FnMut(&mut Context<'_>) -> Poll<()>,
    ) -> Option<Result<(), Answer>> {
        let input = MatchInput::new(*request);
        let faults = routes.faults(&input, &mut self.flow.worker.rng.borrow_mut());
        let faults = match faults {
            Ok(faults) => faults,
            Err(failure) => return Some(Err(failure.into())),
        };
        let routed = self.flow.route(routes, input).await;
        let routed = match routed {
            Ok(route) => {
                let earlier = self.attempts.exchange_deadline;
                self.attempts.exchange_deadline = earlier.earlier(route.deadline());
                self.attempts.attempt_timeout = route.attempt_timeout();
                self.attempts.policy = route.retry_policy().cloned();
                self.route = Some(Rc::new(route));
                Ok(())
            }
            Err(unrouted) => {
                self.unrouted = unrouted.rule;
                Err(unrouted.answer)
            }
        };
        match self.inject(faults, poll_gone).await? {
            Ok(()) => Some(routed),
            Err(failure) => Some(Err(failure.into())),
        }
    }

    /// Delays the request until its deadline at most, and fails in place of a backend. None if the
    /// client leaves.
    async fn inject(
        &mut self,
        faults: Vec<Injection>,
        mut poll_gone: impl FnMut(&mut Context<'_>) -> Poll<()>,
    ) -> Option<Result<(), Failure>> {
        for Injection { name, delay, abort } in faults {
            let flow = self.flow.clone();
            let count = |kind| flow.worker.metrics.fault(kind, &name);
            self.fault = Some(name.clone());
            self.dump(|dump| dump.exchange.fault = Some(Fault::new(name.to_string(), delay)));
            if let Some(delay) = delay {
                count(FaultKind::Delay);
                let mut timer = self.attempts.exchange_deadline.timer();
                let mut sleep = pin!(tokio::time::sleep(delay));
                let delayed = poll_fn(|cx| {
                    if sleep.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(Some(Ok(())));
                    }
                    match timer.poll(cx) {
                        Poll::Ready(limit) => Poll::Ready(Some(Err(Failure::Timeout(limit)))),
                        Poll::Pending => poll_gone(cx).map(|()| None),
                    }
                });
                let delayed = delayed.await;
                if delayed.is_none() {
                    self.cut_off("the client closed");
                }
                if let Err(timeout) = delayed? {
                    return Some(Err(timeout));
                }
            }
            if let Some(status) = abort {
                count(FaultKind::Abort);
                return Some(Err(Failure::FaultInjected { name, status }));
            }
        }
        Some(Ok(()))
    }

    /// The endpoints of the request.
    pub fn backend(&self) -> &Rc<Backend> {
        match &self.route {
            Some(route) => &route.backend,
            None => &self.flow.destination,
        }
    }

    /// Reads what the endpoint depends on, from the head as the client sent it.
    pub fn set_preference(&mut self, request: &RequestView<'_>) {
        let preference = self.backend().preference(Some(request), self.flow.peer);
        let session = self
            .route
            .as_ref()
            .and_then(|route| route.session_endpoint());
        self.attempts.preference = Preference {
            session,
            ..preference
        };
    }

    /// The rule of the request and the backend that it chose, for dumps and logs.
    fn rule(&self) -> Option<(&str, Option<&str>)> {
        match (&self.route, &self.unrouted) {
            (Some(route), _) => Some((route.name(), route.backend_name())),
            (None, rule) => rule.as_ref().map(|rule| (&*rule.name, None)),
        }
    }

    fn dump(&mut self, fill: impl FnOnce(&mut dump::Record)) {
        if let Some(dump) = &mut self.dump {
            dump.fill(fill);
        }
    }

    /// The request's head, with the changes that the proxy makes to it.
    pub fn request(&mut self, request: &RequestView<'_>, edits: Edits<'_>) {
        self.dump(|dump| dump.request_head(request, edits));
    }

    /// Begins a copy of the request, with the head that was prepared for the next hop, if its route
    /// has a mirror. Another protocol is not copied.
    pub fn mirror(&mut self, request: &RequestView<'_>, head: impl FnOnce() -> CopiedHead) {
        let Some(route) = &self.route else { return };
        let backends = route.mirrors();
        if !backends.is_empty() && !request.upgrade && !request.is_connect() {
            self.mirror = Mirror::new(&self.flow, backends, head());
        }
    }

    /// The request is complete: sends its copy.
    pub fn send_mirror(&mut self) {
        if let Some(mirror) = self.mirror.take() {
            mirror.send();
        }
    }

    /// Bytes of the request's body.
    pub fn request_body(&mut self, data: &[u8]) {
        self.sent += data.len() as u64;
        self.mirror.take_if(|mirror| !mirror.body(data));
        if let Some(dump) = &mut self.dump {
            dump.request_body(data);
        }
    }

    /// The request's trailers.
    pub fn request_trailers(&mut self, trailers: &dyn Fields) {
        self.dump(|dump| dump.request.set_trailers(trailers));
    }

    /// The request was sent to its end.
    pub fn request_end(&mut self) {
        self.send_mirror();
        self.dump(|dump| dump.request.ended = true);
    }

    /// A response has begun.
    pub fn has_response(&self) -> bool {
        self.status.is_some()
    }

    /// Bytes of the response's body.
    pub fn response_body(&mut self, data: &[u8]) {
        self.received += data.len() as u64;
        if let Some(dump) = &mut self.dump {
            dump.response_body(data);
        }
    }

    /// The head of the response that the client gets, with the changes that the proxy makes to it.
    /// HTTP/2 has no reason phrase.
    pub fn response(
        &mut self,
        status: StatusCode,
        reason: &[u8],
        fields: &dyn Fields,
        edits: Edits<'_>,
    ) {
        self.status = Some(status);
        self.dump_remote();
        self.dump(|dump| dump.response_head(status, reason, fields, edits));
    }

    /// The response's trailers.
    pub fn response_trailers(&mut self, trailers: &dyn Fields) {
        self.dump(|dump| dump.response.set_trailers(trailers));
    }

    /// The response was sent to its end.
    pub fn response_end(&mut self) {
        self.dump(|dump| dump.response.ended = true);
    }

    /// The proxy replies itself.
    pub fn local_reply(&mut self, answer: Answer) -> LocalReply {
        let failure = match answer {
            Answer::Reply(reply) => {
                let (head, _) = reply.http2(true);
                let reason = reply.status.canonical_reason().unwrap_or_default();
                self.request_end();
                self.response(
                    reply.status,
                    reason.as_bytes(),
                    head.headers(),
                    Edits::default(),
                );
                self.response_end();
                return reply;
            }
            Answer::Failure(failure) => failure,
        };
        let reply = LocalReply::from(&failure);
        self.status = Some(reply.status);
        self.fail(&failure);
        self.dump(|dump| {
            dump.exchange.failure = Some(exchange::Failure {
                code: failure.code().label().to_owned(),
                message: failure.to_string(),
            });
        });
        reply
    }

    /// The proxy could not carry the exchange to its end.
    pub fn fail(&mut self, failure: &Failure) {
        self.failure = Some(failure.code().label());
        report(&self.flow, failure, false);
    }

    /// Adds the rule, and the other side of the proxy, to the dump: an inbound caller, or an outbound
    /// endpoint.
    fn dump_remote(&mut self) {
        let Some(mut dump) = self.dump.take() else {
            return;
        };
        dump.fill(|record| {
            let dump = &mut record.exchange;
            if let Some((rule, backend)) = self.rule() {
                dump.route = Some(rule.to_owned());
                dump.backend = backend.map(str::to_owned);
            }
            match (self.flow.direction, self.attempts.endpoint()) {
                (Direction::Inbound, _) => {
                    dump.identity = self.flow.called_by().map(str::to_owned);
                }
                (Direction::Outbound, Some(endpoint)) => {
                    let remote = &endpoint.pool().remote;
                    dump.endpoint = Some(remote.address);
                    dump.identity = remote.identity.as_ref().map(Identity::to_string);
                }
                (Direction::Outbound, None) => {}
            }
        });
        self.dump = Some(dump);
    }

    /// The exchange ended early.
    pub fn cut_off(&mut self, reason: &str) {
        self.dump(|dump| dump.cut_off = Some(reason.to_owned()));
    }

    /// The connection became a tunnel, which carried so many bytes.
    pub fn tunnel(&mut self, sent: u64, received: u64) {
        self.sent += sent;
        self.received += received;
        self.dump(|dump| dump.exchange.upgraded = Some(Transfer { sent, received }));
    }
}

impl Drop for ExchangeRecord {
    fn drop(&mut self) {
        self.dump_remote();
        let Flow {
            worker,
            direction,
            peer,
            destination,
            ..
        } = &*self.flow;
        if let Some(status) = self.status {
            worker.metrics.request(*direction, self.version, status);
        }
        if self.status.is_some() || self.failure.is_some() {
            worker.ended(*direction, self.backend(), self.failure);
        }
        tracing::debug!(
            direction = direction.name(),
            %peer,
            caller = self.flow.called_by(),
            destination = %destination.name(),
            route = self.rule().map(|(rule, _)| rule),
            backend = self.rule().and_then(|(_, backend)| backend),
            endpoint = self.attempts.endpoint().map(|endpoint| tracing::field::display(endpoint.address)),
            attempts = self.attempts.count,
            status = self.status.map(|status| status.as_u16()),
            failure = self.failure,
            fault = self.fault.as_deref(),
            sent = self.sent,
            received = self.received,
            duration = ?self.started.elapsed(),
            "exchange",
        );
    }
}

/// One connection that carries opaque bytes, or that was refused.
pub struct ConnectionRecord {
    flow: Rc<Flow>,
    started: Instant,
    copied: Option<(u64, u64)>,
    failure: Option<&'static str>,
}

impl ConnectionRecord {
    /// A connection that was accepted now.
    pub fn new(flow: &Rc<Flow>) -> Self {
        Self {
            flow: flow.clone(),
            started: Instant::now(),
            copied: None,
            failure: None,
        }
    }

    /// The bytes that the client sent and received.
    pub fn copied(&mut self, sent: u64, received: u64) {
        self.copied = Some((sent, received));
    }

    /// The proxy could not carry the connection. The log is the only place where a failed
    /// authentication shows: the client cannot be told.
    pub fn fail(&mut self, failure: &Failure) {
        self.failure = Some(failure.code().label());
        report(&self.flow, failure, failure.is_identity_failure());
    }
}

impl Drop for ConnectionRecord {
    fn drop(&mut self) {
        let worker = &self.flow.worker;
        if self.copied.is_some() || self.failure.is_some() {
            let backend = &self.flow.destination;
            worker.ended(self.flow.direction, backend, self.failure);
        }
        if let Some((sent, received)) = self.copied {
            worker.metrics.opaque(self.flow.direction, sent, received);
            let duration = self.started.elapsed();
            worker
                .dumps
                .opaque(&self.flow.info(), sent, received, duration);
        }
    }
}

/// Counts a failure and logs it, at the rate of warnings if it is one.
fn report(flow: &Flow, failure: &Failure, is_warning: bool) {
    flow.worker.metrics.failure(flow.direction, failure);
    let (path, peer, code) = (flow.direction.name(), flow.peer, failure.code().label());
    let destination = flow.destination.name();
    if is_warning && flow.worker.should_log(Instant::now()) {
        tracing::warn!(path, %peer, %destination, code, "{failure}");
    } else {
        tracing::debug!(path, %peer, %destination, code, "{failure}");
    }
}
