//! The latest exchanges and opaque connections of the proxy: what the admin server tells of them
//! (`/exchanges`). Those that failed do not give way to those that did not. Bounded: 256 of each, of
//! at most 1 KiB.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use diy_mesh_model::code::GRPC_STATUSES;
use diy_mesh_model::escape;
use diy_mesh_model::exchange::{
    self, Course, Direction, Exchange, ExchangeId, Fault, Part, Protocol, Transfer, milliseconds,
};
use diy_mesh_model::identity::Identity;
use http::StatusCode;

use crate::context::flow::Flow;
use crate::endpoint::EndpointInfo;
use crate::error::Failure;
use crate::http::view::RequestView;
use crate::observe::dump::rfc3339;
use crate::route::Rule;

/// The entries that failed, and the others.
const MAX_ENTRIES: usize = 256;
/// The bytes of a request line, and of the text of a failure.
const MAX_TEXT: usize = 256;
/// The text of an entry without a complete response.
const INCOMPLETE: &str = "there was no complete response";
/// The failed attempts of an entry.
const MAX_FAILED_ATTEMPTS: usize = 4;

/// One exchange or opaque connection that has ended.
pub struct Entry {
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
    /// What the proxy forwarded.
    pub protocol: Protocol,
    /// The client.
    pub peer: SocketAddr,
    /// The original destination.
    pub destination: SocketAddr,
    /// The name of the original destination.
    pub service: Arc<str>,
    /// The caller, if mutual TLS has verified it.
    pub caller: Option<Arc<Identity>>,
    /// The rule, and the name of the backend that it chose.
    pub rule: Option<(Arc<Rule>, Option<Arc<str>>)>,
    /// The latest attempt.
    pub attempt: Option<Attempt>,
    /// Failed attempts before it.
    pub failed: Vec<(Attempt, Cause)>,
    /// The proxy's own address of an opaque connection to the endpoint.
    pub local: Option<SocketAddr>,
    /// Method and target of the request. Its query is not told.
    pub line: Box<[u8]>,
    /// The response.
    pub status: Option<StatusCode>,
    /// The name of the status of a gRPC call; empty for other requests.
    pub grpc: &'static str,
    /// It stays as long as other failures.
    pub is_failure: bool,
    /// There was no complete response, and no failure says why.
    pub is_incomplete: bool,
    /// Bytes of the client, and to the client.
    pub transfer: Transfer,
    /// Why the proxy could not carry it to its end.
    pub failure: Option<Cause>,
    /// The policy of the latest fault.
    pub fault: Option<Arc<str>>,
}

/// An attempt to reach an endpoint.
#[derive(Clone)]
pub struct Attempt {
    /// The endpoint.
    pub endpoint: Arc<EndpointInfo>,
    /// Its start.
    pub began: Instant,
}

/// What failed.
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

/// The latest entries, shared by all threads.
pub struct Recent {
    /// The number of the next exchange that begins here.
    next: AtomicU64,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// The number of entries so far.
    ended: u64,
    failed: VecDeque<(u64, Arc<Entry>)>,
    others: VecDeque<(u64, Arc<Entry>)>,
}

/// Which entries are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// Those of one exchange.
    Id(ExchangeId),
    /// Those that ended after so many others.
    After(u64),
}

impl Query {
    /// The query of a URL: `id=ID` or `after=NUMBER`; all, if it is empty.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected ?id=ID or ?after=NUMBER";
        match text.split_once('=') {
            None if text.is_empty() => Ok(Self::After(0)),
            Some(("id", id)) => id.parse().map(Self::Id).map_err(|error| format!("{error}")),
            Some(("after", number)) => number.parse().map(Self::After).map_err(|_| expected.into()),
            _ => Err(expected.into()),
        }
    }
}

impl Default for Recent {
    /// No entries. Numbers begin anywhere, so that those of an earlier proxy of the pod are others.
    fn default() -> Self {
        Self {
            next: AtomicU64::new(fastrand::u64(..)),
            entries: Mutex::default(),
        }
    }
}

impl Recent {
    /// The number of an exchange that begins now.
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds an entry.
    pub fn add(&self, entry: Entry) {
        let entry = Arc::new(entry);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.ended += 1;
        let number = entries.ended;
        let ring = if entry.is_failure {
            &mut entries.failed
        } else {
            &mut entries.others
        };
        if ring.len() == MAX_ENTRIES {
            ring.pop_front();
        }
        ring.push_back((number, entry));
    }

    /// The entries that are asked for.
    pub fn query(&self, query: Query) -> exchange::Recent {
        let is_asked = |(number, entry): &&(u64, Arc<Entry>)| match query {
            Query::Id(id) => entry.id == id,
            Query::After(after) => *number > after,
        };
        // The workers wait for the lock, but not for the texts.
        let (ended, mut found) = {
            let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
            let all = entries.failed.iter().chain(&entries.others);
            (
                entries.ended,
                all.filter(is_asked).cloned().collect::<Vec<_>>(),
            )
        };
        found.sort_by_key(|(number, _)| *number);
        exchange::Recent {
            ended,
            exchanges: found.iter().map(|(_, entry)| entry.exchange()).collect(),
        }
    }
}

impl Entry {
    /// What began on this connection, and has ended.
    pub fn new(flow: &Flow, id: ExchangeId, [started, ended]: [Instant; 2]) -> Self {
        Self {
            id,
            started,
            responded: None,
            ended,
            direction: flow.direction,
            protocol: Protocol::Tcp,
            peer: flow.peer,
            destination: flow.original,
            service: flow.destination.name(),
            caller: flow.caller.shared_identity(),
            rule: None,
            attempt: None,
            failed: Vec::new(),
            local: None,
            line: Box::default(),
            status: None,
            grpc: "",
            is_failure: false,
            is_incomplete: false,
            transfer: Transfer::default(),
            failure: None,
            fault: None,
        }
    }

    /// Method and target of a request.
    pub fn line(request: &RequestView<'_>) -> Box<[u8]> {
        let [method, target] =
            [request.method, request.target].map(|text| &text[..text.len().min(MAX_TEXT)]);
        [method, b" ", target].concat().into()
    }

    /// Adds an attempt, of which another one follows.
    pub fn fail_attempt(failed: &mut Vec<(Attempt, Cause)>, attempt: Attempt, failure: &Failure) {
        if failed.len() < MAX_FAILED_ATTEMPTS {
            failed.push((attempt, failure.into()));
        }
    }

    /// The record of the exchange.
    fn exchange(&self) -> Exchange {
        let started = SystemTime::now().checked_sub(self.started.elapsed());
        let is_opaque = self.protocol == Protocol::Tcp;
        let part = |start_line: String, body_bytes| Part {
            start_line,
            body_bytes,
            ..Part::default()
        };
        let mut line = self.line.split(|byte| b"?#".contains(byte));
        let line = line.next().map(escaped).filter(|line| !line.is_empty());
        let last = self.attempt.as_ref();
        let identity = match self.direction {
            Direction::Inbound => self.caller.as_deref(),
            Direction::Outbound => last.and_then(|one| one.endpoint.identity.as_ref()),
        };
        let failure = self.failure.as_ref().map(Cause::failure);
        Exchange {
            time: rfc3339(started.unwrap_or(SystemTime::UNIX_EPOCH)),
            direction: self.direction,
            peer: self.peer,
            destination: self.destination,
            endpoint: last.map(|attempt| attempt.endpoint.address),
            route: self.rule.as_ref().map(|(rule, _)| rule.name.to_string()),
            backend: (self.rule.as_ref()).and_then(|(_, to)| Some(to.as_ref()?.to_string())),
            fault: (self.fault.as_ref()).map(|name| Fault::new(name.to_string(), None)),
            would_deny: None,
            identity: identity.map(Identity::to_string),
            protocol: self.protocol,
            duration_ms: self.after(self.ended),
            request: line.map(|line| part(line, self.transfer.sent)),
            response: self.status.map(|status| {
                let line = format!("{} {}", version(self.protocol), status.as_str());
                Part {
                    trailers: self.grpc_status().into_iter().collect(),
                    ..part(line, self.transfer.received)
                }
            }),
            failure,
            incomplete: self.is_incomplete.then(|| INCOMPLETE.to_owned()),
            upgraded: None,
            opaque: is_opaque.then_some(self.transfer),
            id: Some(self.id),
            course: Some(self.course()),
        }
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

impl Cause {
    fn failure(&self) -> exchange::Failure {
        exchange::Failure {
            code: self.code.to_owned(),
            message: self.message.to_string(),
        }
    }
}

fn version(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Http2 => "HTTP/2",
        Protocol::Http1 | Protocol::Tcp => "HTTP/1.1",
    }
}

fn escaped(bytes: &[u8]) -> String {
    let mut out = String::new();
    escape::line(bytes, &mut out);
    out
}

#[cfg(test)]
pub(crate) mod testing {
    /// A message without the identifiers of exchanges, which differ from run to run.
    pub fn without_ids(text: &str) -> String {
        let lines = text.split_inclusive('\n');
        lines
            .filter(|line| !line.starts_with("x-mesh-exchange: "))
            .collect()
    }
}

#[cfg(test)]
mod tests;
