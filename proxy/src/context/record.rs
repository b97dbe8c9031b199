//! The record of one exchange, and of one connection. The path fills it; when it is dropped,
//! metrics, dumps and the log take what they need. No protocol calls these itself, and no exit path
//! forgets them.

mod metrics;
mod span;

use std::fmt::Display;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_model::code::Code;
use diy_mesh_model::exchange::{ExchangeId, MESH_ERROR, Transfer};
use http::StatusCode;

use crate::context::flow::Flow;
use crate::error::Failure;
use crate::http::edits::Edits;
use crate::http::grpc_status::GrpcCall;
use crate::http::reply::LocalReply;
use crate::http::view::{Fields, RequestView};
use crate::inbound::edges::NewEdge;
use crate::labels::{self, ErrorType, OTHER_VALUE, Verdict};
use crate::observe::dump::{self, ExchangeDump};
use crate::observe::ended::{Attempt, Cause, Ended, fail_attempt, request_line};
use crate::protocol::HttpVersion;
use crate::route::{Answer, Plan, Rule};
use crate::serve::call::CallHead;
use crate::serve::mirror::Mirror;
use crate::upstream::balance::{Backend, Endpoint};
use span::RequestSpan;

/// One request and its response.
pub struct ExchangeRecord {
    /// The connection that it came on.
    pub flow: Rc<Flow>,
    /// The rule that it matched, and the name of the backend that this chose.
    rule: Option<(Arc<Rule>, Option<Arc<str>>)>,
    /// The backend. None: the destination itself.
    backend: Option<Rc<Backend>>,
    /// The number of attempts, and the endpoint and the start of the latest one.
    attempts: u32,
    endpoint: Option<Rc<Endpoint>>,
    attempt_began: Instant,
    /// The attempts that were followed by others.
    failed_attempts: Vec<(Attempt, Cause)>,
    /// A copy of the request, until it is complete.
    mirror: Option<Box<Mirror>>,
    version: HttpVersion,
    /// The same at both proxies of the exchange.
    pub id: ExchangeId,
    /// Method and path.
    line: Box<[u8]>,
    /// As metrics name it.
    method: &'static str,
    grpc: GrpcCall,
    started: Instant,
    status: Option<StatusCode>,
    /// The start of the response.
    responded: Option<Instant>,
    transfer: Transfer,
    upgraded: Option<Transfer>,
    failure: Option<Cause>,
    is_local_reply: bool,
    /// The code of an error of the callee's proxy.
    peer_error: Option<Code>,
    /// The policy of the latest fault, and its delay.
    fault: Option<(Arc<str>, Option<Duration>)>,
    /// The policy under audit that would deny the request.
    would_deny: Option<Box<str>>,
    /// A part of the response is missing, and the client has not left.
    is_broken: bool,
    dump: Option<ExchangeDump>,
    /// The edge of the request, if it is new, until the application answers.
    edge: Option<Box<NewEdge>>,
    /// None: it is not sampled.
    span: Option<Box<RequestSpan>>,
}

impl ExchangeRecord {
    /// An exchange that begins now.
    pub fn new(flow: &Rc<Flow>, version: HttpVersion) -> Self {
        let (started, policy) = (Instant::now(), flow.worker.policy());
        let (telemetry, caller) = (policy.telemetry.as_ref(), flow.caller.identity());
        Self {
            flow: flow.clone(),
            rule: None,
            backend: None,
            attempts: 0,
            endpoint: None,
            attempt_began: started,
            failed_attempts: Vec::new(),
            mirror: None,
            version,
            id: flow.new_exchange(),
            line: Box::default(),
            method: OTHER_VALUE,
            grpc: GrpcCall::default(),
            started,
            status: None,
            responded: None,
            transfer: Transfer::default(),
            upgraded: None,
            failure: None,
            is_local_reply: false,
            peer_error: None,
            fault: None,
            would_deny: None,
            is_broken: false,
            dump: (flow.worker.dumps).exchange(telemetry, caller),
            edge: None,
            span: None,
        }
    }

    /// The plan of the request, which goes to `backend`. `id` is that of the caller's proxy.
    pub fn plan(
        &mut self,
        plan: &mut Plan,
        backend: &Rc<Backend>,
        request: &RequestView<'_>,
        id: Option<ExchangeId>,
    ) {
        self.id = id.unwrap_or(self.id);
        plan.trace = self.begin_span(backend, request);
        self.count_trace(request, plan.trace.is_some());
        if let Some(rule) = plan.rule() {
            self.rule = Some((rule.clone(), plan.backend().map(|to| to.name().clone())));
            self.backend = Some(backend.clone());
        }
    }

    /// A fault delays or aborts the request.
    pub fn fault(&mut self, name: &Arc<str>, delay: Option<Duration>) {
        self.fault = Some((name.clone(), delay));
    }

    /// The policies allow the request.
    pub fn allowed(&mut self, request: &RequestView<'_>) {
        self.edge = self.flow.new_edge(Some(request));
    }

    /// The policies under audit would deny the request.
    pub fn would_deny(&mut self, denial: &impl Display) {
        self.would_deny = Some(denial.to_string().into());
    }

    /// The request is allowed although the authorization server of a policy did not answer.
    pub fn failed_open(&mut self, policy: &str, reason: &str) {
        let denial = format!("{policy}, whose authorization server did not answer: {reason}");
        if self.flow.worker.denials.should_log(Instant::now()) {
            let (peer, caller) = (self.flow.peer, self.flow.called_by());
            tracing::warn!(%peer, caller, "allowed: failureMode of {denial}");
        }
        self.would_deny(&denial);
    }

    /// An attempt begins at this time.
    pub fn attempt(&mut self, endpoint: &Rc<Endpoint>, began: Instant) {
        self.attempts += 1;
        self.endpoint = Some(endpoint.clone());
        self.attempt_began = began;
    }

    /// Another attempt follows the latest one.
    pub fn retried(&mut self, failure: &Failure) {
        if let Some(attempt) = self.latest_attempt() {
            fail_attempt(&mut self.failed_attempts, attempt, failure);
        }
    }

    fn latest_attempt(&self) -> Option<Attempt> {
        let endpoint = self.endpoint.as_ref()?.info.clone();
        let began = self.attempt_began;
        Some(Attempt { endpoint, began })
    }

    /// The code of the failure.
    fn code(&self) -> Option<&'static str> {
        Some(self.failure.as_ref()?.code)
    }

    /// There was no complete response, and no failure says why.
    fn is_incomplete(&self) -> bool {
        self.failure.is_none() && (self.is_broken || self.status.is_none())
    }

    /// Why it failed: by this proxy, by that of the callee, or by its response.
    fn error_type(&self) -> ErrorType {
        let code = self.code().or(self.peer_error.map(Code::label));
        ErrorType::of(code, self.status, self.grpc.status(), !self.is_broken)
    }

    /// The rule of the request and the backend that it chose, for dumps and logs.
    fn rule(&self) -> Option<(&str, Option<&str>)> {
        let (rule, backend) = self.rule.as_ref()?;
        Some((&rule.name, backend.as_deref()))
    }

    fn dump(&mut self, fill: impl FnOnce(&mut dump::Record)) {
        if let Some(dump) = &mut self.dump {
            dump.fill(fill);
        }
    }

    /// The request's head, with the changes that the proxy makes to it.
    pub fn request(&mut self, request: &RequestView<'_>, edits: Edits<'_>) {
        self.line = request_line(request);
        self.method = labels::method(request.method);
        self.grpc = GrpcCall::of(request);
        if let Some(dump) = &mut self.dump {
            dump.request_head(request, edits);
        }
    }

    /// Begins a copy of the request for these backends, with the head that was prepared for the next
    /// hop. Another protocol is not copied.
    pub fn mirror(
        &mut self,
        backends: &[Arc<str>],
        request: &RequestView<'_>,
        head: impl FnOnce() -> CallHead,
    ) {
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
        self.transfer.sent += data.len() as u64;
        self.mirror.take_if(|mirror| !mirror.body(data));
        self.dump(|dump| dump.request.body.append(data));
        self.dump_if_long_lived();
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
        self.transfer.received += data.len() as u64;
        self.grpc.body(data);
        self.dump(|dump| dump.response.body.append(data));
        self.dump_if_long_lived();
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
        self.responded = Some(Instant::now());
        self.grpc.response(fields);
        // The edits remove it, unless an authenticated proxy sent it.
        let may_be_error = status.as_u16() >= 400 || self.grpc.is_call();
        let code = may_be_error.then(|| fields.field(MESH_ERROR)).flatten();
        let code = code.and_then(|code| edits.value(MESH_ERROR.as_bytes(), code));
        self.peer_error = code.and_then(|code| Code::of(str::from_utf8(code).ok()?));
        if let Some(edge) = self.edge.take() {
            self.flow.worker.edges.answered(*edge, status, fields);
        }
        self.dump(|dump| dump.response_head(status, reason, fields, edits));
    }

    /// The response's trailers.
    pub fn response_trailers(&mut self, trailers: &dyn Fields) {
        self.grpc.trailers(trailers);
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
        let mut reply = LocalReply::from(&failure);
        reply.name_exchange(self.id);
        self.status = Some(reply.status);
        self.is_local_reply = true;
        self.fail(&failure);
        self.dump(|dump| dump.status = Some(reply.status.as_u16()));
        reply
    }

    /// The proxy could not carry the exchange to its end.
    pub fn fail(&mut self, failure: &Failure) {
        self.failure = Some(failure.into());
        self.grpc.fail(failure.grpc_status());
        report(&self.flow, failure, false);
    }

    /// Dumps an exchange that stays open.
    fn dump_if_long_lived(&mut self) {
        if self.dump.as_ref().is_some_and(ExchangeDump::is_long_lived) {
            let so_far = Arc::new(self.describe(Instant::now()));
            if let Some(dump) = &mut self.dump {
                dump.write(&so_far, true);
            }
        }
    }

    /// What is told of the exchange, which ends at this time.
    fn describe(&self, ended: Instant) -> Ended {
        Ended {
            responded: self.responded,
            protocol: self.version.into(),
            rule: self.rule.clone(),
            attempts: self.attempts,
            attempt: self.latest_attempt(),
            failed: self.failed_attempts.clone(),
            line: self.line.clone(),
            status: self.status,
            grpc: self.grpc.status(),
            is_failure: self.error_type().is_failure(self.grpc.status()),
            is_incomplete: self.is_incomplete(),
            transfer: self.transfer,
            upgraded: self.upgraded,
            failure: self.failure.clone(),
            is_local_reply: self.is_local_reply,
            peer_error: self.peer_error,
            fault: self.fault.clone(),
            would_deny: self.would_deny.clone(),
            ..ended_on(
                &self.flow,
                self.id,
                self.endpoint.as_ref(),
                [self.started, ended],
            )
        }
    }

    /// The client left before the end of the exchange.
    pub fn client_left(&mut self) {
        self.is_broken = false;
        self.grpc.cancel();
    }

    /// The exchange ended early.
    pub fn cut_off(&mut self, reason: &str) {
        self.is_broken = true;
        self.dump(|dump| dump.cut_off = Some(reason.to_owned()));
    }

    /// The connection became a tunnel, which carried so many bytes.
    pub fn tunnel(&mut self, sent: u64, received: u64) {
        self.transfer.sent += sent;
        self.transfer.received += received;
        self.upgraded = Some(Transfer { sent, received });
    }
}

impl Drop for ExchangeRecord {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut ended = self.describe(now);
        let span = self.span.take();
        ended.trace_id = span.map(|span| self.end_span(*span));
        self.count(now.saturating_duration_since(self.started), now);
        let (flow, worker) = (&self.flow, &self.flow.worker);
        let destination = &flow.destination;
        if self.status.is_some() || self.failure.is_some() {
            let backend = self.backend.as_ref().unwrap_or(destination);
            worker.ended(flow.direction, backend, self.code());
        }
        tracing::debug!(
            direction = flow.direction.name(),
            id = %self.id,
            version = ?self.version,
            peer = %flow.peer,
            caller = flow.called_by(),
            destination = %destination.name(),
            route = self.rule().map(|(rule, _)| rule),
            backend = self.rule().and_then(|(_, backend)| backend),
            endpoint = self.endpoint.as_ref().map(|endpoint| tracing::field::display(endpoint.address)),
            attempts = self.attempts,
            status = self.status.map(|status| status.as_u16()),
            failure = self.code(),
            fault = self.fault.as_ref().map(|(policy, _)| &**policy),
            sent = self.transfer.sent,
            received = self.transfer.received,
            duration = ?now.saturating_duration_since(self.started),
            "exchange",
        );
        let ended = Arc::new(ended);
        if let Some(mut dump) = self.dump.take() {
            dump.write(&ended, false);
        }
        tell(&self.flow, ended);
    }
}

/// One connection that carries opaque bytes, or that was refused.
pub struct ConnectionRecord {
    flow: Rc<Flow>,
    started: Instant,
    copied: Option<Transfer>,
    /// The endpoint, and the proxy's own address of the connection to it.
    endpoint: Option<Rc<Endpoint>>,
    local: Option<SocketAddr>,
    failure: Option<Cause>,
}

impl ConnectionRecord {
    /// A connection that was accepted now.
    pub fn new(flow: &Rc<Flow>) -> Self {
        Self {
            flow: flow.clone(),
            started: Instant::now(),
            endpoint: None,
            copied: None,
            local: None,
            failure: None,
        }
    }

    /// There is a connection to this endpoint, from the proxy's `local` address.
    pub fn connected(&mut self, endpoint: &Rc<Endpoint>, local: Option<SocketAddr>) {
        (self.endpoint, self.local) = (Some(endpoint.clone()), local);
    }

    /// The bytes that the client sent and received.
    pub fn copied(&mut self, sent: u64, received: u64) {
        self.copied = Some(Transfer { sent, received });
    }

    /// The proxy could not carry the connection. The log is the only place where a failed
    /// authentication shows: the client cannot be told.
    pub fn fail(&mut self, failure: &Failure) {
        self.failure = Some(failure.into());
        report(&self.flow, failure, failure.is_identity_failure());
    }
}

impl Drop for ConnectionRecord {
    fn drop(&mut self) {
        if self.copied.is_none() && self.failure.is_none() {
            return;
        }
        let (flow, worker) = (&self.flow, &self.flow.worker);
        let code = self.failure.as_ref().map(|cause| cause.code);
        worker.ended(flow.direction, &flow.destination, code);
        let id = flow.new_exchange();
        let (began, endpoint) = (self.started, self.endpoint.as_ref());
        let ended = Arc::new(Ended {
            attempts: endpoint.is_some().into(),
            attempt: endpoint.map(|endpoint| Attempt {
                endpoint: endpoint.info.clone(),
                began,
            }),
            local: self.local,
            is_failure: self.failure.is_some(),
            transfer: self.copied.unwrap_or_default(),
            failure: self.failure.clone(),
            ..ended_on(flow, id, endpoint, [began, Instant::now()])
        });
        if let Some(Transfer { sent, received }) = self.copied {
            worker.metrics.opaque(flow.direction, sent, received);
            worker
                .dumps
                .opaque(&ended, worker.policy().telemetry.as_ref());
        }
        tell(flow, ended);
    }
}

/// What is told of something without HTTP that began on this connection.
fn ended_on(
    flow: &Flow,
    id: ExchangeId,
    endpoint: Option<&Rc<Endpoint>>,
    times: [Instant; 2],
) -> Ended {
    Ended {
        service: flow.destination.name(),
        caller: flow.caller.shared_identity(),
        tls: metrics::tls(flow, endpoint),
        ..Ended::new(id, flow.direction, [flow.peer, flow.original], times)
    }
}

/// Tells the access log, and keeps it among the recent ones.
fn tell(flow: &Flow, ended: Arc<Ended>) {
    let worker = &flow.worker;
    if let Some(telemetry) = &worker.policy().telemetry {
        worker.dumps.access(&ended, telemetry);
    }
    worker.recent.add(ended);
}

/// Counts a failure and logs it, at the rate of warnings if it is one.
fn report(flow: &Flow, failure: &Failure, is_warning: bool) {
    flow.worker.metrics.failure(flow.direction, failure);
    let (path, peer, code) = (flow.direction.name(), flow.peer, failure.code().label());
    let destination = flow.destination.name();
    let (worker, now) = (&flow.worker, Instant::now());
    let is_denial = failure.is_denial();
    if is_denial {
        worker.metrics.verdict(flow.direction, Verdict::Denied);
    }
    let should_log = if is_denial && !failure.is_identity_failure() {
        worker.denials.should_log(now)
    } else {
        is_warning && worker.warnings.should_log(now)
    };
    if should_log {
        let caller = flow.called_by();
        tracing::warn!(path, %peer, caller, %destination, code, "{failure}");
    } else {
        tracing::debug!(path, %peer, %destination, code, "{failure}");
    }
}
