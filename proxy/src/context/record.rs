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
use http::{HeaderValue, StatusCode};

use crate::context::flow::Flow;
use crate::error::Failure;
use crate::http::edits::Edits;
use crate::http::grpc_status::GrpcCall;
use crate::http::reply::LocalReply;
use crate::http::view::{Fields, RequestView};
use crate::inbound::edges::NewEdge;
use crate::labels::{self, ErrorType, OTHER_VALUE, Verdict};
use crate::observe::dump::{self, ExchangeDump};
use crate::observe::ended::{Attempt, Ended, fail_attempt, request_line};
use crate::observe::metrics::OpenConnection;
use crate::protocol::HttpVersion;
use crate::route::{Answer, Plan};
use crate::serve::call::CallHead;
use crate::serve::mirror::Mirror;
use crate::upstream::balance::{Backend, Endpoint};
use span::RequestSpan;

/// One request and its response.
pub struct ExchangeRecord {
    /// The connection that it came on.
    pub flow: Rc<Flow>,
    /// The known results so far.
    ended: Ended,
    /// The backend, or `None` for the destination itself.
    backend: Option<Rc<Backend>>,
    /// A copy of the request, until it is complete.
    mirror: Option<Box<Mirror>>,
    /// As metrics name it.
    method: &'static str,
    grpc: GrpcCall,
    /// A part of the response is missing, and the client has not left.
    is_broken: bool,
    dump: Option<ExchangeDump>,
    /// The edge of the request, if it is new, until the application answers.
    edge: Option<Box<NewEdge>>,
    /// The span, or `None` if the request is not sampled.
    span: Option<Box<RequestSpan>>,
}

impl ExchangeRecord {
    /// An exchange that begins now.
    pub fn new(flow: &Rc<Flow>, version: HttpVersion) -> Self {
        let policy = flow.worker.policy();
        let (telemetry, caller) = (policy.telemetry.as_ref(), flow.caller.identity());
        Self {
            flow: flow.clone(),
            ended: Ended {
                protocol: version.into(),
                ..begun(flow)
            },
            backend: None,
            mirror: None,
            method: OTHER_VALUE,
            grpc: GrpcCall::default(),
            is_broken: false,
            dump: (flow.worker.dumps).exchange(telemetry, caller),
            edge: None,
            span: None,
        }
    }

    /// The identifier, the same at both proxies of the exchange.
    pub fn id(&self) -> ExchangeId {
        self.ended.id
    }

    /// The plan of the request, which goes to `backend`. `id` is the identifier by the caller's
    /// proxy. Returns the `traceparent` of the proxy's span. `None`: the client's field stays.
    pub fn plan(
        &mut self,
        plan: &Plan,
        backend: &Rc<Backend>,
        request: &RequestView<'_>,
        id: Option<ExchangeId>,
    ) -> Option<Box<HeaderValue>> {
        self.ended.id = id.unwrap_or(self.ended.id);
        if let Some(rule) = plan.rule() {
            let to = plan.backend().map(|to| to.name().clone());
            self.ended.rule = Some((rule.clone(), to));
            self.backend = Some(backend.clone());
        }
        self.begin_span(backend, request)
    }

    /// A fault delays or aborts the request.
    pub fn fault(&mut self, name: &Arc<str>, delay: Option<Duration>) {
        self.ended.fault = Some((name.clone(), delay));
    }

    /// The policies allow the request.
    pub fn allowed(&mut self, request: &RequestView<'_>) {
        self.edge = self.flow.new_edge(Some(request));
    }

    /// The policies under audit would deny the request.
    pub fn would_deny(&mut self, denial: &impl Display) {
        self.ended.would_deny = Some(denial.to_string().into());
    }

    /// The request is allowed although the authorization server of a policy did not answer.
    pub fn failed_open(&mut self, policy: &str, reason: &str) {
        let denial = format!("{policy}, whose authorization server did not answer: {reason}");
        let limit = &self.flow.worker.failures_open;
        if limit.should_log(self.flow.holder(), Instant::now()) {
            let (peer, caller) = (self.flow.peer, self.flow.called_by());
            tracing::warn!(%peer, caller, "allowed: failureMode of {denial}");
        }
        self.would_deny(&denial);
    }

    /// An attempt begins at this time.
    pub fn attempt(&mut self, endpoint: &Rc<Endpoint>, began: Instant) {
        self.ended.attempts += 1;
        self.ended.attempt = Some(Attempt {
            endpoint: endpoint.info.clone(),
            began,
        });
    }

    /// Another attempt follows the latest one.
    pub fn retried(&mut self, failure: &Failure) {
        if let Some(attempt) = self.ended.attempt.clone() {
            fail_attempt(&mut self.ended.failed, attempt, failure);
        }
    }

    /// The code of the failure.
    fn code(&self) -> Option<&'static str> {
        Some(self.ended.failure.as_ref()?.code)
    }

    /// There was no complete response, and no failure says why.
    fn is_incomplete(&self) -> bool {
        self.ended.failure.is_none() && (self.is_broken || self.ended.status.is_none())
    }

    /// Why it failed: by this proxy, by the callee's proxy, or by its response.
    fn error_type(&self) -> ErrorType {
        let code = self.code().or(self.ended.peer_error.map(Code::label));
        let status = self.ended.status;
        ErrorType::of(code, status, self.grpc.status(), !self.is_broken)
    }

    /// The rule of the request and the backend that it chose, for dumps and logs.
    fn rule(&self) -> Option<(&str, Option<&str>)> {
        let (rule, backend) = self.ended.rule.as_ref()?;
        Some((&rule.name, backend.as_deref()))
    }

    fn dump(&mut self, fill: impl FnOnce(&mut dump::Record)) {
        if let Some(dump) = &mut self.dump {
            dump.fill(fill);
        }
    }

    /// The request's head, with the changes that the proxy makes to it.
    pub fn request(&mut self, request: &RequestView<'_>, edits: Edits<'_>) {
        self.ended.line = request_line(request);
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
        self.ended.transfer.sent += data.len() as u64;
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
        self.ended.status.is_some()
    }

    /// Bytes of the response's body.
    pub fn response_body(&mut self, data: &[u8]) {
        self.ended.transfer.received += data.len() as u64;
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
        self.ended.status = Some(status);
        self.ended.responded = Some(Instant::now());
        self.grpc.response(fields);
        // The edits remove it, unless an authenticated proxy sent it.
        let may_be_error = status.as_u16() >= 400 || self.grpc.is_call();
        let code = may_be_error.then(|| fields.field(MESH_ERROR)).flatten();
        let code = code.and_then(|code| edits.value(MESH_ERROR.as_bytes(), code));
        self.ended.peer_error = code.and_then(|code| Code::of(str::from_utf8(code).ok()?));
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
        reply.name_exchange(self.ended.id);
        self.ended.status = Some(reply.status);
        self.ended.is_local_reply = true;
        self.fail(&failure);
        self.dump(|dump| dump.status = Some(reply.status.as_u16()));
        reply
    }

    /// The proxy could not carry the exchange to its end.
    pub fn fail(&mut self, failure: &Failure) {
        self.ended.failure = Some(failure.into());
        self.grpc.fail(failure.grpc_status());
        report(&self.flow, failure, false);
    }

    /// Dumps an exchange that stays open.
    fn dump_if_long_lived(&mut self) {
        if self.dump.as_ref().is_some_and(ExchangeDump::is_long_lived) {
            self.finish(Instant::now());
            let so_far = Arc::new(self.ended.clone());
            if let Some(dump) = &mut self.dump {
                dump.write(&so_far, true);
            }
        }
    }

    /// Completes what is told of the exchange, as if it ended at this time.
    fn finish(&mut self, now: Instant) {
        let grpc = self.grpc.status();
        self.ended.grpc = grpc;
        self.ended.is_failure = self.error_type().is_failure(grpc);
        self.ended.is_incomplete = self.is_incomplete();
        finish(&mut self.ended, &self.flow, now);
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
        self.ended.transfer.sent += sent;
        self.ended.transfer.received += received;
        self.ended.upgraded = Some(Transfer { sent, received });
    }
}

impl Drop for ExchangeRecord {
    fn drop(&mut self) {
        let now = Instant::now();
        self.finish(now);
        let span = self.span.take();
        self.ended.trace_id = span.map(|span| self.end_span(*span));
        let took = now.saturating_duration_since(self.ended.started);
        self.count(took, now);
        let (flow, worker, ended) = (&self.flow, &self.flow.worker, &self.ended);
        if ended.status.is_some() || ended.failure.is_some() {
            let backend = self.backend.as_ref().unwrap_or(&flow.destination);
            worker.ended(flow.direction, backend, self.code());
        }
        tracing::debug!(
            direction = flow.direction.name(),
            id = %ended.id,
            version = ?ended.protocol,
            peer = %flow.peer,
            caller = flow.called_by(),
            destination = %ended.service,
            route = self.rule().map(|(rule, _)| rule),
            backend = self.rule().and_then(|(_, backend)| backend),
            endpoint = ended.attempt.as_ref().map(|attempt| tracing::field::display(attempt.endpoint.address)),
            attempts = ended.attempts,
            status = ended.status.map(|status| status.as_u16()),
            failure = self.code(),
            fault = ended.fault.as_ref().map(|(policy, _)| &**policy),
            sent = ended.transfer.sent,
            received = ended.transfer.received,
            duration = ?took,
            "exchange",
        );
        let ended = Arc::new(ended.clone());
        if let Some(mut dump) = self.dump.take() {
            dump.write(&ended, false);
        }
        tell(&self.flow, ended);
    }
}

/// One connection that carries opaque bytes, or that was refused.
pub struct ConnectionRecord {
    flow: Rc<Flow>,
    /// The known results so far.
    ended: Ended,
    /// It is open.
    open: Option<OpenConnection>,
    is_copied: bool,
}

impl ConnectionRecord {
    /// A connection that was accepted now.
    pub fn new(flow: &Rc<Flow>) -> Self {
        Self {
            flow: flow.clone(),
            ended: begun(flow),
            open: None,
            is_copied: false,
        }
    }

    /// There is a connection to this endpoint, from the proxy's `local` address.
    pub fn connected(&mut self, endpoint: &Rc<Endpoint>, local: Option<SocketAddr>) {
        self.ended.attempts = 1;
        self.ended.attempt = Some(Attempt {
            endpoint: endpoint.info.clone(),
            began: self.ended.started,
        });
        self.ended.local = local;
        self.open = Some(self.count_open());
    }

    /// The bytes that the client has sent and received so far.
    pub fn copying(&mut self, bytes: [u64; 2]) {
        if let Some(open) = &mut self.open {
            open.copied(bytes);
        }
    }

    /// The bytes that the client sent and received.
    pub fn copied(&mut self, sent: u64, received: u64) {
        self.copying([sent, received]);
        self.ended.transfer = Transfer { sent, received };
        self.is_copied = true;
    }

    /// The proxy could not carry the connection. The log is the only place where a failed
    /// authentication shows: the client cannot be told.
    pub fn fail(&mut self, failure: &Failure) {
        self.ended.failure = Some(failure.into());
        self.ended.is_failure = true;
        report(&self.flow, failure, failure.is_identity_failure());
    }
}

impl Drop for ConnectionRecord {
    fn drop(&mut self) {
        if !self.is_copied && !self.ended.is_failure {
            return;
        }
        let (flow, worker) = (&self.flow, &self.flow.worker);
        let code = self.ended.failure.as_ref().map(|cause| cause.code);
        worker.ended(flow.direction, &flow.destination, code);
        finish(&mut self.ended, flow, Instant::now());
        let ended = Arc::new(self.ended.clone());
        if self.is_copied {
            let Transfer { sent, received } = ended.transfer;
            worker.metrics.opaque(flow.direction, sent, received);
            worker
                .dumps
                .opaque(&ended, worker.policy().telemetry.as_ref());
        }
        tell(flow, ended);
    }
}

/// Something that begins now on this connection.
fn begun(flow: &Flow) -> Ended {
    let (id, now) = (flow.new_exchange(), Instant::now());
    let ends = [flow.peer, flow.original];
    Ended::new(id, flow.direction, ends, [now, now])
}

/// Completes what is told of something that ends now on this connection.
fn finish(ended: &mut Ended, flow: &Flow, now: Instant) {
    ended.ended = now;
    ended.service = flow.destination.name();
    ended.caller = flow.caller.shared_identity();
    ended.tls = metrics::tls(flow, ended.attempt.as_ref());
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
        worker.denials.should_log(flow.holder(), now)
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
