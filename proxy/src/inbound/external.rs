//! The authorization servers of AuthorizationPolicies and of routes: what they are asked about a
//! request, and what their answers mean. Pure: `serve/external.rs` sends the questions.

mod grpc;
mod plain;
mod routes;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use diy_mesh_model::identity::Identity;
use diy_mesh_proto::field::{CALLER, PARTIAL_BODY, QUESTIONS, is_reserved, is_same_name};
use diy_mesh_proto::mesh::v1 as proto;
use http::{HeaderName, HeaderValue, StatusCode};
use proto::authorizer::Protocol;

use crate::error::{ExternalReply, RequestPart};
use crate::http::answer::Answer;
use crate::http::edits::Edits;
use crate::http::view::RequestView;
pub use routes::{RouteAuthorizers, folded_match};

/// The number of questions that lead to each other: a server may be subject to policies with servers.
const MAX_QUESTIONS: u32 = 3;

/// The authorization server of a policy.
#[derive(Debug, PartialEq, Eq)]
pub struct Authorizer {
    /// The name of the policy, or of the rule of a route.
    pub policy: Arc<str>,
    /// The name of its backend. Empty: an invalid reference, so that there is no answer.
    pub backend: Arc<str>,
    /// The time for an answer.
    pub timeout: Duration,
    /// Without an answer, the request is allowed.
    pub fails_open: bool,
    /// The most bytes of the body that it gets.
    pub max_body: usize,
    is_grpc: bool,
    /// Stands before the path of a request.
    path: String,
    /// The fields that it gets, in lower case.
    request_fields: Vec<String>,
    /// The fields that the application gets from it, in lower case.
    response_fields: Vec<Arc<str>>,
}

/// A request, as the application is to get it.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The request of the client.
    pub request: &'a RequestView<'a>,
    /// The part of its body that the server gets.
    pub body: &'a Body,
    /// The changes that the proxy makes.
    pub edits: Edits<'a>,
    /// The address of the client.
    pub client: SocketAddr,
    /// The client, if it has authenticated.
    pub caller: Option<&'a Identity>,
    /// The address of the application.
    pub server: SocketAddr,
    /// The pod.
    pub own: Option<&'a Identity>,
    /// The time of the request.
    pub time: SystemTime,
}

/// The start of a request's body. The default is for a server that gets no body.
#[derive(Debug, Default)]
pub struct Body {
    start: Bytes,
    /// The value of [`PARTIAL_BODY`].
    is_partial: Option<&'static str>,
}

/// The question to an authorization server.
#[derive(Debug)]
pub enum Question {
    /// In HTTP/1.1.
    Http {
        /// The head of the request.
        head: Bytes,
        /// GET, POST, ...
        method: Bytes,
        /// Its body.
        body: Bytes,
    },
    /// A call of gRPC.
    Grpc(http::Request<Bytes>),
}

/// The decision of an authorization server about a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// The application gets it, with these values of fields.
    Allowed(Vec<(Arc<str>, Vec<HeaderValue>)>),
    /// The client gets this response.
    Denied(ExternalReply),
}

/// Which authorization servers a policy asks.
#[derive(Debug)]
pub enum Asking {
    /// No server.
    Nobody,
    /// One, about each request that its rules may match.
    One(Arc<Authorizer>),
    /// The server of the rule of a route.
    ByRoute(Box<RouteAuthorizers>),
}

impl Asking {
    /// The servers of a policy. Its routes are compiled.
    pub fn new(policy: &proto::AuthorizationPolicy, routes: Option<RouteAuthorizers>) -> Self {
        let one = |message| Self::One(Arc::new(Authorizer::new(&policy.name, message)));
        let routes = || routes.map_or(Self::Nobody, |routes| Self::ByRoute(Box::new(routes)));
        policy.authorizer.as_ref().map_or_else(routes, one)
    }

    /// Those that are asked about a request. Fails if a part of it is too large for expressions.
    pub fn of_request(
        &self,
        request: &RequestView<'_>,
        plain_paths: bool,
    ) -> Result<Vec<Arc<Authorizer>>, RequestPart> {
        match self {
            Self::Nobody => Ok(vec![]),
            Self::One(authorizer) => Ok(vec![authorizer.clone()]),
            Self::ByRoute(routes) => routes.of_request(request, plain_paths),
        }
    }
}

impl Authorizer {
    /// The server of a policy, or of a rule of a route.
    pub fn new(policy: &str, message: &proto::Authorizer) -> Self {
        let fields = message.response_fields.iter();
        Self {
            policy: policy.into(),
            backend: message.backend.as_str().into(),
            timeout: Duration::from_millis(message.timeout),
            fails_open: message.fail_open,
            max_body: message.max_body.min(u16::MAX.into()) as usize,
            is_grpc: message.protocol() != Protocol::Http,
            path: message.path.clone(),
            request_fields: message.request_fields.clone(),
            response_fields: fields.map(|name| name.as_str().into()).collect(),
        }
    }

    /// The question about a request. Fails if the server could read another request than the
    /// application.
    pub fn question(&self, subject: &Subject<'_>) -> Result<Question, &'static str> {
        if self.is_grpc {
            grpc::question(self, subject)
        } else {
            plain::question(self, subject)
        }
    }

    /// The decision in an answer. Fails if it has no decision. An incomplete answer denies by its
    /// status, without a body.
    pub fn decision(&self, answer: &Answer) -> Result<Decision, String> {
        if self.is_grpc {
            grpc::decision(self, answer)
        } else {
            plain::decision(self, answer)
        }
    }

    /// The field that the application gets, if it may come from this server.
    fn field(&self, name: &str) -> Option<&Arc<str>> {
        let mut fields = self.response_fields.iter();
        fields.find(|field| field.eq_ignore_ascii_case(name))
    }

    /// Calls `each` with the fields that the application gets and that are listed, by their listed
    /// names in other spellings. Fails if one has several: applications could read another one than
    /// the server.
    fn visit_listed(
        &self,
        subject: &Subject<'_>,
        always: &[&str],
        mut each: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), &'static str> {
        let listed = self.request_fields.iter().map(String::as_str);
        let listed: Vec<&str> = listed.chain(always.iter().copied()).collect();
        let mut spellings = vec![None; listed.len()];
        let mut has_several = false;
        subject.visit(|name, value| {
            let at = listed
                .iter()
                .position(|one| is_same_name(name, one.as_bytes()));
            let Some(at) = at else {
                return;
            };
            let spelling = name.to_ascii_lowercase();
            let is_listed = spelling == listed[at].as_bytes();
            let before: &mut Option<Vec<u8>> = &mut spellings[at];
            has_several |= before.as_ref().is_some_and(|before| *before != spelling);
            *before = Some(spelling);
            each(
                if is_listed {
                    name
                } else {
                    listed[at].as_bytes()
                },
                value,
            );
        });
        if has_several {
            return Err("a field for an authorization server has several spellings");
        }
        Ok(())
    }
}

impl Body {
    /// At most `max` bytes of what was read.
    pub fn new(mut read: Bytes, max: usize) -> Self {
        let is_partial = if read.len() > max { "true" } else { "false" };
        read.truncate(max);
        Self {
            start: read,
            is_partial: Some(is_partial),
        }
    }
}

impl Subject<'_> {
    /// The number of this question, if the request is one too.
    fn number(&self) -> Result<u32, &'static str> {
        let before = self
            .request
            .header(QUESTIONS)
            .map_or(Some(0), |value| str::from_utf8(value).ok()?.parse().ok());
        let before = before.filter(|before| *before < MAX_QUESTIONS);
        before
            .map(|before| before + 1)
            .ok_or("authorization servers ask each other about it")
    }

    /// Calls `each` with the name and value of each field that the application gets, but for those that
    /// only a question has.
    fn visit(&self, mut each: impl FnMut(&[u8], &[u8])) {
        self.request.head.visit_forwarded(&mut |name, value| {
            let mut own = [CALLER, PARTIAL_BODY, QUESTIONS].iter();
            let is_own = own.any(|own| is_same_name(name, own.as_bytes()));
            if let Some(value) = self.edits.value(name, value).filter(|_| !is_own) {
                each(name, value);
            }
        });
        let appended = self.edits.appended();
        appended.for_each(|(name, value)| each(name, value));
    }
}

/// Whether a denial may have this status, which has a body.
fn denies(status: StatusCode) -> bool {
    status.as_u16() >= 300 && status != StatusCode::NOT_MODIFIED
}

/// The fields of a denial that the client gets. A gRPC call has its own.
fn reply_fields<'a>(
    fields: impl Iterator<Item = (&'a str, &'a [u8])>,
) -> Vec<(HeaderName, HeaderValue)> {
    let fields = fields.filter(|(name, _)| !is_reserved(name) && !name.starts_with("grpc-"));
    let fields = fields.filter_map(|(name, value)| {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        Some((name, HeaderValue::from_bytes(value).ok()?))
    });
    fields.collect()
}
