//! Step 5: the routes of a destination, as the Gateway API defines them. The first match of a request
//! selects a rule; the rule responds itself, or selects a backend by weight and says what changes on
//! the way. Pure: `discovery/routes.rs` makes these values, `flow.rs` resolves the backends.

mod cors;
pub mod fault;
pub mod fields;
pub mod matching;
pub mod session;
mod size;
#[cfg(test)]
mod tests;
pub mod url;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use get_size2::{GetSize, StandardTracker};
use http::StatusCode;

use crate::balance::{Backend, Endpoint};
use crate::deadline::{Deadline, Limit};
use crate::error::Failure;
use crate::http::edits::{Edit, Edits};
use crate::http::reply::LocalReply;
use crate::http::view::RequestView;
pub use cors::{Cors, Origin};
use fault::{Fault, Injection};
use fields::FieldEdit;
use matching::{Index, Match, MatchInput};
use session::{Session, SessionPersistence, Tag};
use url::{Redirect, Rewrite};

/// The routes of a destination.
#[derive(Debug, Default)]
pub struct Routes {
    /// In order of precedence.
    matches: Vec<Match>,
    index: Index,
    rules: Vec<Arc<Rule>>,
    /// Of connections that carry no HTTP.
    tcp: Option<Arc<Rule>>,
    faults: Vec<Fault>,
    /// Why there are none: the controller sent routes that this proxy rejected.
    rejection: Option<String>,
    size: usize,
}

/// Only the same routes are equal: expressions cannot be compared.
impl PartialEq for Routes {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Routes {}

/// What happens with the requests of a match.
#[derive(Debug, Default)]
pub struct Rule {
    /// The object that the rule comes from.
    pub name: String,
    /// Chosen by weight.
    pub backends: Vec<RouteBackend>,
    /// The destination is the backend.
    pub to_destination: bool,
    /// The rule cannot be applied: its requests fail, also those to a pod.
    pub is_invalid: bool,
    /// The changes of all requests of the rule.
    pub changes: Arc<Changes>,
    /// The rule responds with a redirect.
    pub redirect: Option<Redirect>,
    /// Requests of other origins.
    pub cors: Option<Cors>,
    /// The time for the exchange.
    pub request_timeout: Option<Duration>,
    /// The time for each attempt.
    pub backend_request_timeout: Option<Duration>,
    /// None: the proxy retries what is safe.
    pub retry: Option<Arc<RetryPolicy>>,
    /// Requests of a session go to one endpoint.
    pub session: Option<SessionPersistence>,
}

/// The retries that a rule asks for. The budget of the backend limits them too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Statuses that are retried, besides closed connections and timeouts of attempts.
    pub statuses: Vec<u16>,
    /// Attempts after the first one.
    pub attempts: u32,
    /// Time between two attempts.
    pub backoff: Duration,
}

/// A backend of a rule.
#[derive(Debug)]
pub struct RouteBackend {
    /// "NAMESPACE/SERVICE:PORT". None: the route names something else.
    pub name: Option<Arc<str>>,
    /// Its share of the sum of weights.
    pub weight: u32,
    /// The changes of the rule and those of this backend.
    pub changes: Arc<Changes>,
}

/// What a rule and a backend change.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Of the request's fields.
    pub request: Vec<FieldEdit>,
    /// Of the response's fields.
    pub response: Vec<FieldEdit>,
    /// Of the request's host and path.
    pub rewrite: Rewrite,
    /// Copies.
    pub mirrors: Vec<Mirror>,
}

/// A copy of a share of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// "NAMESPACE/SERVICE:PORT".
    pub backend: Arc<str>,
    /// The share is `numerator` of `denominator`, which is not 0.
    pub numerator: u32,
    /// Of so many requests.
    pub denominator: u32,
}

/// The way of one request.
#[derive(Debug)]
pub struct Plan {
    /// The rule that it matched.
    pub rule: Arc<Rule>,
    /// The backend's index in the rule. None: the rule has none.
    backend: Option<usize>,
    /// The rewritten target.
    target: Option<Vec<u8>>,
    /// Fields that the response gets.
    cors: Vec<FieldEdit>,
    /// The backends that get a copy.
    mirrors: Vec<Arc<str>>,
    session: Option<Box<Session>>,
}

/// A response in place of that of a backend.
#[derive(Debug)]
pub enum Answer {
    /// Of a rule.
    Reply(LocalReply),
    /// There is no way for the request.
    Failure(Failure),
}

impl From<Failure> for Answer {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// A request that the proxy answers itself.
#[derive(Debug)]
pub struct Unrouted {
    /// The rule that it matched.
    pub rule: Option<Arc<Rule>>,
    /// The response.
    pub answer: Answer,
}

impl From<Failure> for Unrouted {
    fn from(failure: Failure) -> Self {
        Self {
            rule: None,
            answer: failure.into(),
        }
    }
}

impl Routes {
    /// Routes with these rules. `matches` refer to them by index.
    pub fn new(matches: Vec<Match>, rules: Vec<Arc<Rule>>) -> Self {
        Self {
            index: Index::new(&matches),
            matches,
            rules,
            ..Self::default()
        }
    }

    /// These routes, with faults.
    pub fn with_faults(self, faults: Vec<Fault>) -> Self {
        Self { faults, ..self }
    }

    /// The same routes with a rule for connections that carry no HTTP.
    pub fn with_connections(self, tcp: Option<Arc<Rule>>) -> Self {
        Self { tcp, ..self }
    }

    /// The backend of a connection that carries no HTTP. None: the destination itself.
    pub fn connection_backend(
        &self,
        rng: &mut fastrand::Rng,
    ) -> Result<Option<&Arc<str>>, Failure> {
        let Some(rule) = &self.tcp else {
            return Ok(None);
        };
        let index = rule.choose(rng)?;
        Ok(rule.backends[index].name.as_ref())
    }

    /// The same routes, measured.
    pub fn measured(self) -> Self {
        let (size, _) = self.get_size_with_tracker(StandardTracker::new());
        Self { size, ..self }
    }

    /// The memory that they take, in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Routes that this proxy cannot apply.
    pub fn rejected(reason: String) -> Self {
        Self {
            rejection: Some(reason),
            ..Self::default()
        }
    }

    /// The faults of a request.
    pub fn faults(
        &self,
        request: &MatchInput<'_>,
        rng: &mut fastrand::Rng,
    ) -> Result<Vec<Injection>, Failure> {
        fault::draw(&self.faults, request, rng).map_err(Failure::TooLargeToMatch)
    }

    /// Whether requests fail.
    pub fn is_rejected(&self) -> bool {
        self.rejection.is_some()
    }

    /// The way of a request to `service`. A pod stays the backend.
    pub fn plan(
        &self,
        request: &MatchInput<'_>,
        service: &Service<'_>,
        rng: &mut fastrand::Rng,
    ) -> Result<Plan, Unrouted> {
        if let Some(reason) = &self.rejection {
            let service = service.name.to_owned();
            let reason = reason.clone();
            return Err(Failure::InvalidRoutes { service, reason }.into());
        }
        let selected = self.index.select(&self.matches, request);
        let selected = selected.map_err(Failure::TooLargeToMatch)?;
        let Some(selected) = selected.map(|at| &self.matches[at]) else {
            return Err(Failure::NoRoute(service.name.to_owned()).into());
        };
        let rule = &self.rules[selected.rule];
        let plan = rule.plan(&request.request, selected, service, rng);
        plan.map_err(|answer| Unrouted {
            rule: Some(rule.clone()),
            answer,
        })
    }
}

/// The destination of a request, as far as its routes depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Service<'a> {
    /// Namespace and name.
    pub name: &'a str,
    /// The destination is a pod of a headless Service. It stays the backend.
    pub is_pod: bool,
    /// The original destination.
    pub address: std::net::SocketAddr,
}

impl Rule {
    /// The way of a request that `selected` matches.
    fn plan(
        self: &Arc<Self>,
        request: &RequestView<'_>,
        selected: &Match,
        service: &Service<'_>,
        rng: &mut fastrand::Rng,
    ) -> Result<Plan, Answer> {
        if self.is_invalid {
            return Err(Failure::InvalidBackend(self.name.clone()).into());
        }
        let cors = match &self.cors {
            Some(cors) => cors.apply(request).map_err(Answer::Reply)?,
            None => Vec::new(),
        };
        if let Some(redirect) = &self.redirect {
            let location = redirect.location(request, selected, service);
            return Err(Answer::Reply(LocalReply::redirect(
                redirect.status,
                &location,
            )?));
        }
        let session = self.session.as_ref().map(|session| {
            let path = selected.path.as_ref();
            Box::new(Session::new(session, request, path, seconds_now()))
        });
        let backend = match service.is_pod || self.to_destination {
            true => None,
            // A session keeps its backend, also one with weight 0 (GEP-1619).
            false => Some(
                match session.as_ref().and_then(|one| self.backend_of(one)) {
                    Some(kept) => kept,
                    None => self.choose(rng)?,
                },
            ),
        };
        let changes = self.changes(backend);
        let is_drawn = |mirror: &&Mirror| rng.u32(..mirror.denominator) < mirror.numerator;
        let mirrors = changes.mirrors.iter().filter(is_drawn);
        Ok(Plan {
            mirrors: mirrors.map(|mirror| mirror.backend.clone()).collect(),
            target: changes.rewrite.target(request, selected),
            rule: self.clone(),
            backend,
            cors,
            session,
        })
    }

    /// Chooses a backend by weight.
    fn choose(&self, rng: &mut fastrand::Rng) -> Result<usize, Failure> {
        let total: u64 = self.backends.iter().map(|one| u64::from(one.weight)).sum();
        let no_backend = || Failure::InvalidBackend(self.name.clone());
        if total == 0 {
            return Err(no_backend());
        }
        let mut at = match self.backends.len() {
            1 => 0,
            _ => rng.u64(..total),
        };
        for (index, backend) in self.backends.iter().enumerate() {
            match at.checked_sub(backend.weight.into()) {
                Some(rest) => at = rest,
                None if backend.name.is_some() => return Ok(index),
                None => break,
            }
        }
        Err(no_backend())
    }

    /// The backend of a session that has begun.
    fn backend_of(&self, session: &Session) -> Option<usize> {
        let tag = session.backend()?;
        let is_kept = |one: &RouteBackend| {
            let name = one.name.as_ref();
            name.is_some_and(|name| session::tag(&[name]) == tag)
        };
        self.backends.iter().position(is_kept)
    }

    fn changes(&self, backend: Option<usize>) -> &Arc<Changes> {
        backend.map_or(&self.changes, |index| &self.backends[index].changes)
    }
}

impl Plan {
    /// The name of the backend. None: the destination itself.
    pub fn backend(&self) -> Option<&Arc<str>> {
        self.rule.backends[self.backend?].name.as_ref()
    }
}

/// The way of one request, with its backend.
pub struct Route {
    plan: Plan,
    /// The endpoints.
    pub backend: Rc<Backend>,
}

impl Route {
    /// The way to a backend.
    pub fn new(plan: Plan, backend: Rc<Backend>) -> Self {
        Self { plan, backend }
    }

    /// The rule, for logs.
    pub fn name(&self) -> &str {
        &self.plan.rule.name
    }

    /// The backend, for logs.
    pub fn backend_name(&self) -> Option<&str> {
        self.plan.backend().map(|name| &**name)
    }

    fn changes(&self) -> &Changes {
        self.plan.rule.changes(self.plan.backend)
    }

    /// Passes the changes of a request's head to `write`: those of the mesh, then those of the route,
    /// if there is one.
    pub fn edit_request<'a, T>(
        route: Option<&'a Self>,
        own: &[Edit<'a>],
        write: impl FnOnce(Edits<'_>) -> T,
    ) -> T {
        let Some(route) = route else {
            return write(Edits::of(own));
        };
        let changes = route.changes();
        let fields = changes.request.iter().map(FieldEdit::as_edit);
        let fields: Vec<_> = own.iter().copied().chain(fields).collect();
        write(Edits {
            fields: &fields,
            host: changes.rewrite.host.as_deref(),
            target: route.plan.target.as_deref(),
        })
    }

    /// The changes of the response's fields.
    pub fn response_edits(&self) -> impl Iterator<Item = Edit<'_>> {
        let changes = self.changes().response.iter();
        changes.chain(&self.plan.cors).map(FieldEdit::as_edit)
    }

    /// The endpoint of the request's session.
    pub fn session_endpoint(&self) -> Option<Tag> {
        self.plan.session.as_ref()?.endpoint()
    }

    /// The session's field in a response from this endpoint.
    pub fn session_edit(&self, endpoint: &Endpoint) -> Option<FieldEdit> {
        let session = self.plan.session.as_ref()?;
        let backend = session::tag(&[self.backend_name().unwrap_or_default()]);
        session.edit(backend, endpoint.tag(), seconds_now())
    }

    /// The backends that get a copy.
    pub fn mirrors(&self) -> &[Arc<str>] {
        &self.plan.mirrors
    }

    /// The end of an exchange that begins now.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.plan.rule.request_timeout, Limit::Exchange)
    }

    /// The retries that the rule asks for.
    pub fn retry_policy(&self) -> Option<&Arc<RetryPolicy>> {
        self.plan.rule.retry.as_ref()
    }

    /// The time for each attempt.
    pub fn attempt_timeout(&self) -> Option<Duration> {
        self.plan.rule.backend_request_timeout
    }
}

/// Seconds since 1970.
fn seconds_now() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| elapsed.as_secs())
}

/// The statuses of redirects.
pub const REDIRECTS: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];
