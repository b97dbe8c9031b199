//! The record of one exchange, and of one connection. The path fills it; when it is dropped,
//! metrics, dumps and the log take what they need. No protocol calls these itself, and no exit path
//! forgets them.

mod metrics;
mod observed;
mod span;

use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_model::exchange::{self, Direction, Fault, Transfer};
use diy_mesh_model::identity::Identity;
use http::StatusCode;

use crate::context::flow::Flow;
use crate::error::Failure;
use crate::http::edits::Edits;
use crate::http::grpc_status::GrpcCall;
use crate::http::reply::LocalReply;
use crate::http::view::{Fields, RequestView};
use crate::inbound::edges::NewEdge;
use crate::labels::{self, OTHER_VALUE, Verdict};
use crate::observe::dump::{self, ExchangeDump, Remote};
use crate::protocol::HttpVersion;
use crate::route::{Answer, Plan, Rule};
use crate::serve::call::CallHead;
use crate::serve::mirror::Mirror;
use crate::upstream::balance::{Backend, Endpoint};
use observed::Observed;

/// One request and its response.
pub struct ExchangeRecord {
    /// The connection that it came on.
    pub flow: Rc<Flow>,
    /// The rule that it matched, and the name of the backend that this chose.
    rule: Option<(Arc<Rule>, Option<Arc<str>>)>,
    /// The backend. None: the destination itself.
    backend: Option<Rc<Backend>>,
    /// The number of attempts, and the endpoint of the latest one.
    attempts: u32,
    endpoint: Option<Rc<Endpoint>>,
    /// A copy of the request, until it is complete.
    mirror: Option<Box<Mirror>>,
    version: HttpVersion,
    /// As metrics name it.
    method: &'static str,
    grpc: GrpcCall,
    started: Instant,
    status: Option<StatusCode>,
    sent: u64,
    received: u64,
    failure: Option<&'static str>,
    /// The policy of the latest fault.
    fault: Option<Arc<str>>,
    /// A part of the response is missing, and the client has not left.
    is_broken: bool,
    dump: Option<ExchangeDump>,
    /// The edge of the request, if it is new, until the application answers.
    edge: Option<Box<NewEdge>>,
    /// For the access log and for spans. None: the pod has neither.
    observed: Option<Box<Observed>>,
}

impl ExchangeRecord {
    /// An exchange that begins now.
    pub fn new(flow: &Rc<Flow>, version: HttpVersion) -> Self {
        let policy = flow.worker.policy();
        let (telemetry, caller) = (policy.telemetry.as_ref(), flow.caller.identity());
        Self {
            flow: flow.clone(),
            rule: None,
            backend: None,
            attempts: 0,
            endpoint: None,
            mirror: None,
            version,
            method: OTHER_VALUE,
            grpc: GrpcCall::default(),
            started: Instant::now(),
            status: None,
            sent: 0,
            received: 0,
            failure: None,
            fault: None,
            is_broken: false,
            dump: (flow.worker.dumps).exchange(&flow.info(), telemetry, caller),
            edge: None,
            observed: telemetry.and_then(Observed::new),
        }
    }

    /// The plan of the request, which goes to `backend`.
    pub fn plan(&mut self, plan: &mut Plan, backend: &Rc<Backend>, request: &RequestView<'_>) {
        plan.trace = self.observe(backend, request);
        if let Some(rule) = plan.rule() {
            self.rule = Some((rule.clone(), plan.backend().map(|to| to.name().clone())));
            self.backend = Some(backend.clone());
        }
    }

    /// A fault delays or aborts the request.
    pub fn fault(&mut self, name: &Arc<str>, delay: Option<Duration>) {
        self.fault = Some(name.clone());
        self.dump(|dump| dump.exchange.fault = Some(Fault::new(name.to_string(), delay)));
    }

    /// The policies allow the request.
    pub fn allowed(&mut self, request: &RequestView<'_>) {
        self.edge = self.flow.new_edge(Some(request));
    }

    /// The policies under audit would deny the request.
    pub fn would_deny(&mut self, denial: &impl Display) {
        self.dump(|dump| dump.exchange.would_deny = Some(denial.to_string()));
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

    /// An attempt begins.
    pub fn attempt(&mut self, endpoint: &Rc<Endpoint>) {
        self.attempts += 1;
        self.endpoint = Some(endpoint.clone());
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
        self.grpc.body(data);
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
        self.grpc.response(fields);
        if let Some(edge) = self.edge.take() {
            self.flow.worker.edges.answered(*edge, status, fields);
        }
        self.dump_remote();
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
        let reply = LocalReply::from(&failure);
        self.status = Some(reply.status);
        self.fail(&failure);
        self.dump(|dump| {
            dump.status = Some(reply.status.as_u16());
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
        self.grpc.fail(failure.grpc_status());
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
            let remote = remote(&self.flow, self.endpoint.as_deref());
            (dump.endpoint, dump.identity) = (remote.endpoint, remote.identity);
        });
        self.dump = Some(dump);
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
        self.sent += sent;
        self.received += received;
        self.dump(|dump| dump.exchange.upgraded = Some(Transfer { sent, received }));
    }
}

impl Drop for ExchangeRecord {
    fn drop(&mut self) {
        self.dump_remote();
        self.tell_observed();
        let took = self.started.elapsed();
        self.count(took);
        let Flow {
            worker,
            direction,
            peer,
            destination,
            ..
        } = &*self.flow;
        if self.status.is_some() || self.failure.is_some() {
            let backend = self.backend.as_ref().unwrap_or(destination);
            worker.ended(*direction, backend, self.failure);
        }
        tracing::debug!(
            direction = direction.name(),
            version = ?self.version,
            %peer,
            caller = self.flow.called_by(),
            destination = %destination.name(),
            route = self.rule().map(|(rule, _)| rule),
            backend = self.rule().and_then(|(_, backend)| backend),
            endpoint = self.endpoint.as_ref().map(|endpoint| tracing::field::display(endpoint.address)),
            attempts = self.attempts,
            status = self.status.map(|status| status.as_u16()),
            failure = self.failure,
            fault = self.fault.as_deref(),
            sent = self.sent,
            received = self.received,
            duration = ?took,
            "exchange",
        );
    }
}

/// One connection that carries opaque bytes, or that was refused.
pub struct ConnectionRecord {
    flow: Rc<Flow>,
    started: Instant,
    endpoint: Option<Rc<Endpoint>>,
    copied: Option<(u64, u64)>,
    failure: Option<&'static str>,
}

impl ConnectionRecord {
    /// A connection that was accepted now.
    pub fn new(flow: &Rc<Flow>) -> Self {
        Self {
            flow: flow.clone(),
            started: Instant::now(),
            endpoint: None,
            copied: None,
            failure: None,
        }
    }

    /// There is a connection to this endpoint.
    pub fn connected(&mut self, endpoint: &Rc<Endpoint>) {
        self.endpoint = Some(endpoint.clone());
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
        let telemetry = worker.policy().telemetry.clone();
        if let Some((sent, received)) = self.copied {
            worker.metrics.opaque(self.flow.direction, sent, received);
            worker.dumps.opaque(
                &self.flow.info(),
                telemetry.as_ref(),
                self.flow.caller.identity(),
                remote(&self.flow, self.endpoint.as_deref()),
                Transfer { sent, received },
                self.started.elapsed(),
            );
        }
        if let Some(telemetry) = telemetry {
            self.log_access(telemetry);
        }
    }
}

/// The other side of the proxy.
fn remote(flow: &Flow, endpoint: Option<&Endpoint>) -> Remote {
    match (flow.direction, endpoint) {
        (Direction::Inbound, _) => Remote {
            endpoint: None,
            identity: flow.called_by().map(str::to_owned),
        },
        (Direction::Outbound, Some(endpoint)) => {
            let remote = &endpoint.pool().remote;
            Remote {
                endpoint: Some(remote.address),
                identity: remote.identity.as_ref().map(Identity::to_string),
            }
        }
        (Direction::Outbound, None) => Remote::default(),
    }
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
