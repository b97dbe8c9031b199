//! An exchange, or an opaque connection, that has ended: what dumps, access logs and recent exchanges
//! tell of it. In bounded memory; credentials and queries are masked when it is told.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_model::access;
use diy_mesh_model::code::{Code, GRPC_STATUSES};
use diy_mesh_model::escape;
use diy_mesh_model::exchange::{
    self, Course, Direction, Exchange, ExchangeId, Fault, MESH_ERROR, Part, Protocol, Transfer,
    milliseconds,
};
use diy_mesh_model::identity::Identity;
use http::StatusCode;

use crate::endpoint::EndpointInfo;
use crate::error::Failure;
use crate::http::view::RequestView;
use crate::labels::TlsKind;
use crate::observe::dump::{mask, rfc3339};
use crate::route::Rule;

/// The bytes of a method, of a target without its query, and of the text of a failure.
const MAX_METHOD: usize = 32;
const MAX_TARGET: usize = 512;
const MAX_TEXT: usize = 256;
/// The text of an exchange without a complete response.
const INCOMPLETE: &str = "there was no complete response";
/// The failed attempts of an exchange.
const MAX_FAILED_ATTEMPTS: usize = 3;

/// One exchange or opaque connection that has ended.
#[derive(Clone)]
pub struct Ended {
    /// Its identifier.
    pub id: ExchangeId,
    /// Its start.
    pub started: Instant,
    /// The head of the response.
    pub responded: Option<Instant>,
    /// Its end.
    pub ended: Instant,
    /// As seen from the application.
    pub direction: Direction,
    /// The protocol that the proxy forwarded.
    pub protocol: Protocol,
    /// The client.
    pub peer: SocketAddr,
    /// The original destination.
    pub destination: SocketAddr,
    /// The name of the original destination.
    pub service: Arc<str>,
    /// The caller, if mutual TLS has verified it.
    pub caller: Option<Arc<Identity>>,
    /// The TLS of the connection to the other side.
    pub tls: TlsKind,
    /// The rule, and the name of the backend that it chose.
    pub rule: Option<(Arc<Rule>, Option<Arc<str>>)>,
    /// The number of attempts, and the latest one.
    pub attempts: u32,
    /// The latest attempt.
    pub attempt: Option<Attempt>,
    /// Failed attempts before it, as many as are kept.
    pub failed: Vec<(Attempt, Cause)>,
    /// The proxy's own address of an opaque connection to the endpoint.
    pub local: Option<SocketAddr>,
    /// Method and target of the request.
    pub line: Box<[u8]>,
    /// The response.
    pub status: Option<StatusCode>,
    /// The name of the status of a gRPC call; empty for other requests.
    pub grpc: &'static str,
    /// As access logs and recent exchanges see it.
    pub is_failure: bool,
    /// There was no complete response, and no failure says why.
    pub is_incomplete: bool,
    /// Bytes of the client, and to the client.
    pub transfer: Transfer,
    /// Those after an upgrade or CONNECT.
    pub upgraded: Option<Transfer>,
    /// Why the proxy could not carry it to its end.
    pub failure: Option<Cause>,
    /// The proxy has answered with an error itself.
    pub is_local_reply: bool,
    /// The code of an error of the callee's proxy.
    pub peer_error: Option<Code>,
    /// The policy of the latest fault, and its delay.
    pub fault: Option<(Arc<str>, Option<Duration>)>,
    /// The policy under audit that would deny it.
    pub would_deny: Option<Box<str>>,
    /// The trace of its span.
    pub trace_id: Option<String>,
}

/// See [`Ended::holder`].
pub type Holder<'a> = (Direction, Option<&'a str>);

/// An attempt to reach an endpoint.
#[derive(Clone)]
pub struct Attempt {
    /// The endpoint.
    pub endpoint: Arc<EndpointInfo>,
    /// Its start.
    pub began: Instant,
}

/// The failure: its code and its message.
#[derive(Clone)]
pub struct Cause {
    /// The code.
    pub code: &'static str,
    message: Box<str>,
}

impl From<&Failure> for Cause {
    fn from(failure: &Failure) -> Self {
        let mut message = failure.to_string();
        message.truncate(message.floor_char_boundary(MAX_TEXT));
        Self {
            code: failure.code().label(),
            message: message.into(),
        }
    }
}

impl Cause {
    fn failure(&self) -> exchange::Failure {
        exchange::Failure {
            code: self.code.to_owned(),
            message: self.message.to_string(),
        }
    }
}

fn mesh_error(code: Code) -> (String, String) {
    (MESH_ERROR.to_owned(), code.label().to_owned())
}

/// Method and target of a request. Only the first character of its query is kept: it shows that
/// there is a query.
pub fn request_line(request: &RequestView<'_>) -> Box<[u8]> {
    let is_end = |byte: &u8| matches!(byte, b'?' | b'#');
    let target = request.target;
    let end = target.iter().position(is_end).map(|end| end + 1);
    let kept = end.unwrap_or(target.len()).min(MAX_TARGET);
    let method = &request.method[..request.method.len().min(MAX_METHOD)];
    [method, b" ", &target[..kept]].concat().into()
}

/// Adds an attempt, of which another one follows.
pub fn fail_attempt(failed: &mut Vec<(Attempt, Cause)>, attempt: Attempt, failure: &Failure) {
    if failed.len() < MAX_FAILED_ATTEMPTS {
        failed.push((attempt, failure.into()));
    }
}

impl Ended {
    /// Something without HTTP on a connection of a client to an original destination, of which nothing
    /// else is known than its start and its end.
    pub fn new(
        id: ExchangeId,
        direction: Direction,
        [peer, destination]: [SocketAddr; 2],
        [started, ended]: [Instant; 2],
    ) -> Self {
        Self {
            id,
            started,
            responded: None,
            ended,
            direction,
            protocol: Protocol::Tcp,
            peer,
            destination,
            service: Arc::default(),
            caller: None,
            tls: TlsKind::None,
            rule: None,
            attempts: 0,
            attempt: None,
            failed: Vec::new(),
            local: None,
            line: Box::default(),
            status: None,
            grpc: "",
            is_failure: false,
            is_incomplete: false,
            transfer: Transfer::default(),
            upgraded: None,
            failure: None,
            is_local_reply: false,
            peer_error: None,
            fault: None,
            would_deny: None,
            trace_id: None,
        }
    }

    /// The record of the exchange.
    pub fn exchange(&self) -> Exchange {
        let is_opaque = self.protocol == Protocol::Tcp;
        Exchange {
            time: self.time(Instant::now()),
            direction: self.direction,
            peer: self.peer,
            destination: self.destination,
            endpoint: self.endpoint(),
            route: self.rule.as_ref().map(|(rule, _)| rule.name.to_string()),
            backend: (self.rule.as_ref()).and_then(|(_, to)| Some(to.as_ref()?.to_string())),
            fault: (self.fault.as_ref()).map(|(name, delay)| Fault::new(name.to_string(), *delay)),
            would_deny: self.would_deny.as_deref().map(str::to_owned),
            identity: self.identity().map(Identity::to_string),
            protocol: self.protocol,
            duration_ms: self.after(self.ended),
            request: self.request(),
            response: self.response(),
            failure: self.failure.as_ref().map(Cause::failure),
            incomplete: self.is_incomplete.then(|| INCOMPLETE.to_owned()),
            upgraded: self.upgraded,
            opaque: is_opaque.then_some(self.transfer),
            id: Some(self.id),
            course: Some(self.course()),
        }
    }

    /// The same for a dump, which has the complete messages. An error is shown if it is the response.
    pub fn dumped(&self) -> Exchange {
        let exchange = self.exchange();
        Exchange {
            failure: exchange.failure.filter(|_| self.is_local_reply),
            course: None,
            ..exchange
        }
    }

    /// Adds its line of an access log, when it ends.
    pub fn write_access(&self, format: &access::Format, out: &mut Vec<u8>) {
        let request = self.target();
        let entry = access::Entry {
            time: self.time(self.ended),
            duration: self.ended.saturating_duration_since(self.started),
            direction: self.direction,
            protocol: self.protocol,
            method: request.as_ref().map(|(method, _)| access::shown(method)),
            path: request.as_ref().map(|(_, target)| access::shown(target)),
            status: self.status.map(|status| status.as_u16()),
            grpc_status: (!self.grpc.is_empty()).then_some(self.grpc),
            failure: (self.failure.as_ref().map(|cause| cause.code))
                .or(self.peer_error.map(Code::label)),
            bytes_sent: self.transfer.sent,
            bytes_received: self.transfer.received,
            peer: self.peer,
            identity: self.identity().map(Identity::as_str),
            destination: self.destination,
            route: self.rule.as_ref().map(|(rule, _)| &*rule.name),
            backend: self.rule.as_ref().and_then(|(_, to)| to.as_deref()),
            endpoint: self.endpoint(),
            attempts: self.attempts,
            tls: self.tls.name(),
            fault: self.fault.as_ref().map(|(policy, _)| &**policy),
            trace_id: self.trace_id.as_deref(),
            id: Some(self.id),
            incomplete: self.is_incomplete,
        };
        entry.write(format, out);
    }

    /// The selected endpoint of an outbound exchange.
    fn endpoint(&self) -> Option<SocketAddr> {
        let last = self.attempt.as_ref();
        let last = last.filter(|_| self.direction == Direction::Outbound);
        last.map(|attempt| attempt.endpoint.address)
    }

    /// Method and target of the request, with masks.
    fn target(&self) -> Option<(&[u8], Cow<'_, [u8]>)> {
        let space = self.line.iter().position(|byte| *byte == b' ')?;
        let (method, target) = self.line.split_at(space);
        Some((method, mask::url(&target[1..], true)))
    }

    /// Who counts for it: the pod's own application, or the namespace of the caller.
    pub fn holder(&self) -> Holder<'_> {
        let caller = self.caller.as_deref();
        (self.direction, caller.map(Identity::namespace))
    }

    /// The start, in RFC 3339.
    fn time(&self, now: Instant) -> String {
        let age = now.saturating_duration_since(self.started);
        let started = SystemTime::now().checked_sub(age);
        rfc3339(started.unwrap_or(SystemTime::UNIX_EPOCH))
    }

    /// The caller or the endpoint.
    fn identity(&self) -> Option<&Identity> {
        match self.direction {
            Direction::Inbound => self.caller.as_deref(),
            Direction::Outbound => self.attempt.as_ref()?.endpoint.identity.as_ref(),
        }
    }

    fn request(&self) -> Option<Part> {
        let (method, target) = self.target()?;
        let mut start_line = String::new();
        escape::line(&[method, &target].join(&b' '), &mut start_line);
        Some(Part {
            start_line,
            body_bytes: self.transfer.sent,
            ..Part::default()
        })
    }

    fn response(&self) -> Option<Part> {
        let version = match self.protocol {
            Protocol::Http2 => "HTTP/2",
            Protocol::Http1 | Protocol::Tcp => "HTTP/1.1",
        };
        Some(Part {
            start_line: format!("{version} {}", self.status?.as_str()),
            body_bytes: self.transfer.received,
            headers: self.peer_error.map(mesh_error).into_iter().collect(),
            trailers: self.grpc_status().into_iter().collect(),
            ..Part::default()
        })
    }

    /// The field of a response to a gRPC call.
    fn grpc_status(&self) -> Option<(String, String)> {
        let number = GRPC_STATUSES.iter().position(|name| *name == self.grpc)?;
        Some(("grpc-status".to_owned(), number.to_string()))
    }

    fn course(&self) -> Course {
        let failed = self.failed.iter().map(|(one, cause)| (one, Some(cause)));
        let attempts = failed.chain(self.attempt.iter().map(|one| (one, None)));
        Course {
            service: self.service.to_string(),
            attempts: attempts
                .map(|(one, cause)| self.attempt(one, cause))
                .collect(),
            responded_ms: self.responded.map(|at| self.after(at)),
            local: self.local,
            cut_off: self.failure.is_some() && !self.is_local_reply,
        }
    }

    fn attempt(&self, attempt: &Attempt, cause: Option<&Cause>) -> exchange::Attempt {
        let endpoint = &attempt.endpoint;
        exchange::Attempt {
            endpoint: endpoint.address,
            pod: endpoint.pod.clone(),
            identity: endpoint.identity.as_ref().map(Identity::to_string),
            began_ms: self.after(attempt.began),
            failure: cause.map(Cause::failure),
        }
    }

    /// The milliseconds from the start to this time.
    fn after(&self, at: Instant) -> f64 {
        milliseconds(at.saturating_duration_since(self.started))
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// An exchange of HTTP/1 that ended at once, of which only the connection is known.
    pub fn ended(direction: Direction) -> Ended {
        let id = ExchangeId::new([10, 0, 0, 7].into(), fastrand::u64(..));
        let connection = ["10.0.0.7:41234", "10.0.0.9:8080"].map(|end| end.parse().unwrap());
        Ended {
            protocol: Protocol::Http1,
            ..Ended::new(id, direction, connection, [Instant::now(); 2])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::ended;
    use super::*;
    use crate::http::view::testing::request;

    #[test]
    fn ended_exchanges_are_bounded() {
        let long = Failure::Unresolved {
            name: "é".repeat(10_000).into(),
            reason: String::new(),
        };
        let attempt = Attempt {
            endpoint: Arc::new(EndpointInfo::bare("10.0.0.9:8080".parse().unwrap())),
            began: Instant::now(),
        };
        let mut ended = ended(Direction::Outbound);
        for _ in 0..100 {
            fail_attempt(&mut ended.failed, attempt.clone(), &long);
        }
        let (method, path) = ("M".repeat(1000), format!("/{}?secret", "a".repeat(10_000)));
        ended.line = request_line(&request(&method, &path));
        let texts = ended.failed.iter().map(|(_, cause)| cause.message.len());
        let size = size_of::<Ended>() + ended.line.len() + texts.sum::<usize>() + MAX_TEXT;
        assert!(size <= 2048, "{size}");
        let json = serde_json::to_string(&ended.exchange()).unwrap();
        assert!(!json.contains("secret") && json.len() < 4096, "{json}");
    }

    #[test]
    fn failure_that_was_no_response_is_told_apart() {
        let mut ended = ended(Direction::Inbound);
        let is_cut_off = |ended: &Ended| ended.exchange().course.unwrap().cut_off;
        assert!(!is_cut_off(&ended));
        ended.failure = Some(Cause::from(&Failure::RequestTimeout));
        assert!(is_cut_off(&ended));
        ended.is_local_reply = true;
        assert!(!is_cut_off(&ended));
    }

    #[test]
    fn no_credentials_and_no_queries_are_told() {
        for (target, shown) in [
            ("/a?token=x", "GET /a?***"),
            ("http://user:secret@cart/a", "GET http://***@cart/a"),
        ] {
            let mut ended = ended(Direction::Inbound);
            ended.line = request_line(&request("GET", target));
            let request = ended.exchange().request.unwrap();
            assert_eq!(request.start_line, shown);
            let mut line = Vec::new();
            let format = access::Format::parse("{method} {path}").unwrap();
            ended.write_access(&format, &mut line);
            assert_eq!(line, format!("{shown}\n").into_bytes());
        }
    }
}
